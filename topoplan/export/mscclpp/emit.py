"""A plan as an execution plan of MSCCL++ (JSON).

The engine's executor runs packed trees inside a server as they are: a thread block of a GPU reads what its children
have summed and writes on, in one pass, unit by unit. Between servers its proxies put what NICs carry. The format is
that of release 0.9 as its source reads it (``src/core/executor/execution_plan.cc``); no document states it, and the
file has no version. Data stay in place: in the input of allreduce, broadcast and reduce_scatter, in the output of
allgather; those of an all-to-all go from input to output. Deliberately absent: reduce, which the engine lacks, and
switches that copy and add beyond stars in one server: there the GPUs do their work, and the rate that is kept says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import cast

from topoplan.errors import UsageError
from topoplan.export.chunks import ALIGNMENT, Chunking, chunked, kept_rate
from topoplan.export.exported import DEFAULT, Choices, Exported
from topoplan.export.mscclpp.blocks import Block, blocks, crowded
from topoplan.export.mscclpp.packets import packet_tasks
from topoplan.export.mscclpp.tasks import SWITCH, Wires, by_switch, tasks
from topoplan.plans.json_values import compact
from topoplan.plans.plan import ALL_TO_ALL, Plan, Plans
from topoplan.simulation.alpha_beta import chunk_counts, pipeline
from topoplan.simulation.dataflow import dataflow

NAMES = {"reduce_scatter": "reducescatter"}
"""Collectives that the engine calls otherwise."""

BLOCKS = 64
"""Most blocks of a GPU unless asked: all of a plan's must be resident at once, and a V100 holds 80."""

LONGEST = 1 << 32
"""Bytes of a buffer that the engine's offsets of 32 bits do not reach."""

USUAL_SIZE = 1 << 28
"""Bytes for which the unit of the loops is chosen where no size is given."""

MOST_TURNS = 65535
"""Most turns of a loop, which the engine counts in 16 bits."""


def execution_plan(
    plan: Plan,
    choices: Choices = DEFAULT,
    *,
    sizes: tuple[int, int | None] = (0, None),
    usual: int = USUAL_SIZE,
) -> Exported:
    """The execution plan, with notes on what it takes and what rate it keeps.

    Parameters
    ----------
    plan : Plan
    choices : Choices
    sizes : (int, int or None)
        Bytes from which on the engine may take this file, and where it may no longer.
    usual : int
        Bytes for which the unit of the loops is chosen where no size is given.

    Raises
    ------
    UsageError
        The engine lacks the collective, or its limits do not hold the plan.

    Examples
    --------
    >>> import topoplan
    >>> found = execution_plan(topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7]))
    >>> print(*found.notes, sep="\\n")
    keeps 50 GB/s, all of the rate; 2 chunks, so buffers are multiples of 32 bytes, up to 4294967264
    a GPU takes up to 3 blocks, 4 channels and 0 bytes of scratch
    at that rate its busiest block reads and writes 100 GB/s of its peers' memory
    """
    if len(plan.ranks) < 2:
        raise UsageError("this plan has one GPU, where nothing moves; an execution plan needs two or more")
    packets = choices.protocol == "ll"
    switched = by_switch(plan) and not packets
    cut = chunked(plan, chunks=choices.chunks, size=choices.size, in_network=switched)
    unit = _unit(plan, cut, choices.size or usual)
    most = BLOCKS if choices.max_blocks is None else choices.max_blocks
    found, wires = packet_tasks(plan, cut.shards) if packets else tasks(plan, cut.shards, switched=switched)
    if not packets and any(crowded(own, unit, most) for own in found):
        # loops share blocks only where all of them take equally many turns
        piece = math.gcd(*(count for _, _, count in cut.shards))
        found, wires = tasks(plan, cut.shards, piece=piece, switched=switched)
    made = [blocks(own, unit, most) for own in found]
    gpus = [_gpu(plan, cut, rank, wires, own, switched=switched) for rank, own in enumerate(made)]
    return Exported(
        _text(plan, cut, gpus, sizes, packets=packets),
        _notes(plan, cut, made, wires, packets=packets, switched=switched),
    )


def execution_plans(plans: Plans, choices: Choices = DEFAULT) -> Exported:
    """A file for each range of sizes, which says the smallest and the largest that it is for; as `execution_plan`.

    Where ranks exchange elements without trees, which this writes no file for, the next larger plan of trees is taken.
    """
    files = []
    notes = []
    of_trees = [one for one in plans.ranges if not one.plan.exchanges]
    for number, one in enumerate(plans.ranges):
        if one.plan.exchanges and of_trees:
            larger = [other for other in of_trees if other.start > one.start]
            taken = (larger or of_trees[-1:])[0].plan
            notes.append(f"{one}: {one.plan.schedule} is not written; its file holds {taken.schedule}")
            one = replace(one, plan=taken)
        # the unit suits the larger sizes of a range, where it matters
        size = USUAL_SIZE if one.stop is None else one.stop
        made = execution_plan(one.plan, choices, sizes=(one.start, one.stop), usual=max(size, one.start))
        files.append((f".{number}.json", made.text.encode()))
        notes += [f"{one}: {note}" for note in made.notes]
    return Exported("", tuple(notes), tuple(files))


def _unit(plan: Plan, cut: Chunking, size: int) -> int:
    """Bytes of a chunk that a turn of a loop moves: the power of two next to the model's choice for this size."""
    turns = max(chunk_counts(pipeline(dataflow(plan)), size, None))
    wanted = max(1, size // (cut.count * turns))
    shortest = -(-LONGEST // (cut.count * MOST_TURNS))
    unit = 1 << max(0, round(math.log2(wanted)))
    return int(max(unit, 1 << (shortest - 1).bit_length(), ALIGNMENT))


def _gpu(
    plan: Plan, cut: Chunking, rank: int, wires: Wires, own: Sequence[Block], *, switched: bool
) -> dict[str, object]:
    block = cut.count // len(plan.ranks)
    buffer = "o" if plan.collective == "allgather" else "i"
    channels: list[dict[str, object]] = [
        {"channel_type": kind, "connected_to": peers} for kind, peers in wires.peers[rank].items() if peers
    ]
    if switched:
        group = {"size": cut.count, "ranks": list(range(len(plan.ranks)))}
        channels.append({"channel_type": SWITCH, "buffer_type": buffer, "rank_groups": [group]})
    remote = sorted({place for one in own for places in one.remote.values() for place in places})
    return {
        "id": rank,
        "input_chunks": block if plan.collective == "allgather" else cut.count,
        "output_chunks": block if plan.collective == "reduce_scatter" else cut.count,
        "scratch_chunks": wires.scratch[rank],
        "threadblocks": [one.to_object(number, remote) for number, one in enumerate(own)],
        "channels": channels,
        "remote_buffers": [
            {"rank": peer, "type": letter, "access_channel_types": [kind]} for kind, peer, letter in remote
        ],
        "semaphores": [],
    }


def _text(
    plan: Plan,
    cut: Chunking,
    gpus: Sequence[dict[str, object]],
    sizes: tuple[int, int | None],
    *,
    packets: bool,
) -> str:
    """The file, a thread block to a line."""
    head: dict[str, object] = {
        "name": f"{plan.schedule} {plan.collective} {plan.topology.name}".replace(" ", "_"),
        "collective": NAMES.get(plan.collective, plan.collective),
        "protocol": "LL" if packets else "Simple",
        "inplace": plan.collective != ALL_TO_ALL,
        "reuse_resources": False,
    }
    tail: dict[str, object] = {
        "num_threads_per_block": 1024,
        "use_double_scratch_buffer": packets,
        "buffer_alignment": ALIGNMENT,
        "min_message_size": sizes[0],
        "max_message_size": _largest(cut) if sizes[1] is None else min(_largest(cut), sizes[1] - 1),
    }
    rows = []
    for gpu in gpus:
        keys = [f'"{key}":{compact(value)}' for key, value in gpu.items() if key != "threadblocks"]
        lines = ",\n   ".join(compact(one) for one in cast("list[object]", gpu["threadblocks"]))
        rows.append("{" + ",".join(keys) + ',\n  "threadblocks":[\n   ' + lines + "]}")
    parts = [f'"{key}":{compact(value)}' for key, value in head.items()]
    parts.append('"gpus":[\n ' + ",\n ".join(rows) + "]")
    parts += [f'"{key}":{compact(value)}' for key, value in tail.items()]
    return "{" + ",\n".join(parts) + "}\n"


def _largest(cut: Chunking) -> int:
    """The largest buffer in bytes: below `LONGEST`, and a multiple of the chunks."""
    step = ALIGNMENT * cut.count
    return (LONGEST - 1) // step * step


def _notes(
    plan: Plan, cut: Chunking, made: Sequence[Sequence[Block]], wires: Wires, *, packets: bool, switched: bool
) -> tuple[str, ...]:
    # a packet is half flag, and the engine keeps two sets of them
    part = cut.kept / 2 if packets else cut.kept
    rate = float(part) * plan.rate
    channels = max(sum(map(len, peers.values())) for peers in wires.peers)
    scratch = Fraction(max(wires.scratch) * (4 if packets else 1), cut.count)
    busiest = max(block.remote_chunks for own in made for block in own) / cut.count * rate
    return (
        f"{kept_rate(plan, part)}; {cut.count} chunks, so buffers are multiples of {ALIGNMENT * cut.count} "
        f"bytes, up to {_largest(cut)}",
        f"a GPU takes up to {max(map(len, made))} blocks, {channels} channels and {_scratch(scratch)} of scratch",
        f"at that rate its busiest block reads and writes {busiest:.4g} GB/s of its peers' memory",
        *(("switches add and copy, which needs GPUs of sm_90 or later",) if switched else ()),
    )


def _scratch(part: Fraction) -> str:
    return f"{float(part):.4g} of the buffer's bytes" if part else "0 bytes"
