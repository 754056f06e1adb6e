"""Write a plan as an execution plan of MSCCL++ (JSON): tasks in thread blocks within the engine's limits.

The executor runs packed trees inside a server as they are: a thread block of a GPU reads its children's sums and
forwards them in one pass, unit by unit. Between servers its proxies send over NICs. The format is that of release 0.9
as its source parses it (``src/core/executor/execution_plan.cc``); it has no document and no version. Data stay in
place: in the input of allreduce, broadcast and reduce_scatter, in the output of allgather; an all-to-all goes from
input to output. A block takes several tasks of one direction in the order of their shards, in one loop; leaves share
blocks. Limits are those of release 0.9 (``src/core/include/execution_common.hpp``), few of which the engine checks.
Deliberately absent: reduce, which the engine lacks, and switches that copy and add beyond stars in one server: there
the GPUs do the work, and the stated rate accounts for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import cast

from topoplan.engines.exported import (
    ALIGNMENT,
    DEFAULT_CHOICES,
    Choices,
    Chunking,
    Exported,
    chunk_shares,
    kept_rate,
)
from topoplan.engines.mscclpp_write_tasks import (
    BARRIER,
    MAX_REFERENCES,
    MEMORY,
    PORT,
    SWITCH,
    ChannelKey,
    ChunkPlace,
    MscclppStep,
    MscclppTask,
    RankChannels,
    by_switch,
    packet_tasks,
    tasks,
)
from topoplan.errors import UsageError
from topoplan.machine.routing import memory_access, refused_pairs
from topoplan.model.closed_form import chunk_counts, pipeline
from topoplan.model.dataflow import dataflow
from topoplan.plans.file_values import compact
from topoplan.plans.plan import ALL_TO_ALL, Plan, Plans
from topoplan.units import TOLERANCE, listed

MAX_BLOCK_OPERATIONS = 64
"""Operations of a block; a loop counts one more than its body."""

MAX_BLOCK_CHANNELS = 16
"""Channels of a block, and remote buffers."""

SUMS = ("re", "rre", "rres", "repkt", "respkt", "glres")

RemoteBuffer = tuple[str, int, str]
"""A remote buffer: the type of channel over which it is reached, its GPU, and the letter of the buffer."""


class MscclppBlock:
    """The operations of one thread block, for tasks in the order of their shards with loops of one length.

    ``unit`` is the number of bytes of a chunk that one turn of the loop moves.
    """

    def __init__(self, tasks: Sequence[MscclppTask], unit: int) -> None:
        self.before = [
            *(step for task in tasks for step in task.steps),
            *_group_operations("signal", [channel for task in tasks for channel in task.announce]),
            *_group_operations("wait", [channel for task in tasks for channel in task.expect]),
        ]
        self.body = [step for task in tasks for step in task.body]
        self.after = [
            *_group_operations("signal", [channel for task in tasks for channel in task.release]),
            *_group_operations("wait", [channel for task in tasks for channel in task.finish]),
        ]
        confirmed = _group_operations("signal", [channel for task in tasks for channel in task.confirm])
        if confirmed:
            self.after += [*([BARRIER] if self.after or self.body else ()), *confirmed]
        if self.body and any(step.name == "wait" for step in self.before):
            self.before.append(BARRIER)
        if self.body and self.body[-1] != BARRIER and any(step.name == "signal" for step in self.after):
            self.after.insert(0, BARRIER)
        self.body = [part for step in self.body for part in _split(step)]
        self.chunks = max(task.chunks for task in tasks)
        self.unit = unit * self.chunks
        steps = (*self.before, *self.body, *self.after)
        used = dict.fromkeys(channel for step in steps for channel in step.channels)
        self.channels = {kind: [number for name, number in used if name == kind] for kind in (MEMORY, PORT)}
        if any(place.kind == SWITCH for step in steps for place in step.writes):
            self.channels[SWITCH] = [0]
        places = dict.fromkeys(
            (place.kind, place.peer, place.buffer)
            for step in steps
            for place in (*step.reads, *step.writes)
            if place.peer is not None
        )
        self.remote = {kind: [place for place in places if place[0] == kind] for kind in (MEMORY, PORT)}

    @property
    def remote_chunks(self) -> int:
        """Return the number of chunks read from peers and written to them, or to a switch."""
        places = (place for step in (*self.before, *self.body) for place in (*step.reads, *step.writes))
        return sum(place.size for place in places if place.peer is not None or place.kind == SWITCH)

    @property
    def operations(self) -> int:
        return len(self.before) + len(self.after) + (1 + len(self.body) if self.body else 0)

    @property
    def beyond(self) -> str:
        for resource, number, most in (
            ("operations", self.operations, MAX_BLOCK_OPERATIONS),
            ("channels", max(map(len, self.channels.values())), MAX_BLOCK_CHANNELS),
            ("remote buffers", max(map(len, self.remote.values())), MAX_BLOCK_CHANNELS),
        ):
            if number > most:
                return f"{number} {resource}, and a block of MSCCL++ has {most}"
        return ""

    def to_object(self, number: int, remote: Sequence[RemoteBuffer]) -> dict[str, object]:
        """Return the block in the file; ``remote`` lists the GPU's remote buffers."""
        operations = [self._operation(step) for step in self.before]
        if self.body:
            loop = {"unit_size": self.unit, "num_chunks": self.chunks}
            inner = [self._operation(step) for step in self.body]
            operations.append({"name": "pipeline", "iter_context": loop, "ops": inner})
        operations += [self._operation(step) for step in self.after]
        return {
            "id": number,
            "ops": operations,
            "channels": [
                {"channel_type": kind, "channel_ids": ids} for kind, ids in self.channels.items() if ids
            ],
            "remote_buffer_refs": [
                {"access_channel_type": kind, "remote_buffer_ids": [remote.index(one) for one in buffers]}
                for kind, buffers in self.remote.items()
                if buffers
            ],
        }

    def _operation(self, step: MscclppStep) -> dict[str, object]:
        if step == BARRIER:
            return {"name": "nop"}
        named: dict[str, object] = {"name": step.name}
        if step.reads:
            named["src_buff"] = [self._reference(place) for place in step.reads]
            named["dst_buff"] = [self._reference(place) for place in step.writes]
        kind = step.channels[0][0] if step.channels else MEMORY
        if any(place.kind == SWITCH for place in step.writes):
            return {**named, "channel_type": SWITCH, **({"reduce_op": "sum"} if step.name in SUMS else {})}
        if step.channels:
            named["channel_ids"] = [self.channels[kind].index(number) for _, number in step.channels]
        if step.channels or any(place.peer is not None for place in (*step.reads, *step.writes)):
            named["channel_type"] = kind
        return {**named, "reduce_op": "sum"} if step.name in SUMS else named

    def _reference(self, place: ChunkPlace) -> dict[str, object]:
        if place.kind == SWITCH:
            return {"switch_channel_id": 0, "index": place.index, "size": place.size}
        where: dict[str, object] = {"type": place.buffer}
        if place.peer is not None:
            where = {"buffer_id": self.remote[place.kind].index((place.kind, place.peer, place.buffer))}
        return {**where, "index": place.index, "size": place.size}


def make_blocks(tasks: Sequence[MscclppTask], unit: int, most: int) -> list[MscclppBlock]:
    """Return the blocks of a rank, at most ``most``; a UsageError says that the limits of the engine need more."""
    groups = _leaf_blocks(tasks, unit)
    loops = [task for task in tasks if task.body or task.steps]
    if len(loops) > most - len(groups):
        loops_in_blocks = _merge_loops(loops, unit, most - len(groups))
    else:
        loops_in_blocks = [[task] for task in loops]
    made = [MscclppBlock(group, unit) for group in (*loops_in_blocks, *groups)]
    for block in made:
        if block.beyond:
            raise UsageError(
                f"a rank of this plan needs {block.beyond}; plan fewer trees (--order trees), or raise --max-blocks"
            )
    return made


def loops_share_blocks(tasks: Sequence[MscclppTask], unit: int, most: int) -> bool:
    return sum(bool(task.body or task.steps) for task in tasks) > most - len(_leaf_blocks(tasks, unit))


def _leaf_blocks(tasks: Sequence[MscclppTask], unit: int) -> list[list[MscclppTask]]:
    """Return the tasks without a loop, as many to a block as its channels allow."""
    groups: list[list[MscclppTask]] = []
    for task in tasks:
        if task.body or task.steps:
            continue
        if groups and not MscclppBlock([*groups[-1], task], unit).beyond:
            groups[-1].append(task)
        else:
            groups.append([task])
    return groups


def _merge_loops(loops: Sequence[MscclppTask], unit: int, most: int) -> list[list[MscclppTask]]:
    """Merge loops of one direction into as few blocks as the limits allow and ``most`` requires."""
    directions = [[task for task in loops if task.upwards is upwards] for upwards in (True, False)]
    directions = [one for one in directions if one]
    if most < len(directions):
        raise UsageError(
            f"a rank needs {len(directions)} blocks for its loops up and down besides that of its leaves; raise "
            "--max-blocks"
        )
    # the longer direction first, and each at least one block
    counts = [max(1, most * len(one) // len(loops)) for one in directions]
    counts[0] += most - sum(counts)
    merged: list[list[MscclppTask]] = []
    for direction, count in zip(directions, counts, strict=True):
        dealt: list[list[MscclppTask]] = [[] for _ in range(min(count, len(direction)))]
        for task in sorted(direction, key=lambda task: (-_length(task), task.shard)):
            fitting = [group for group in dealt if not MscclppBlock([*group, task], unit).beyond] or dealt
            min(fitting, key=lambda group: sum(map(_length, group))).append(task)
        merged += [sorted(group, key=lambda task: task.shard) for group in dealt]
    return merged


def _length(task: MscclppTask) -> int:
    return len(task.body) + len(task.steps)


def _group_operations(name: str, channels: Sequence[ChannelKey]) -> list[MscclppStep]:
    """Return signals or waits, as many channels of one type to an operation as it takes."""
    found: list[MscclppStep] = []
    for kind in (MEMORY, PORT):
        own = [channel for channel in channels if channel[0] == kind]
        for at in range(0, len(own), MAX_REFERENCES):
            found.append(MscclppStep(name, tuple(own[at : at + MAX_REFERENCES])))
    return found


def _split(step: MscclppStep) -> list[MscclppStep]:
    return [step] if step.reads or not step.channels else _group_operations(step.name, step.channels)


COLLECTIVE_NAMES = {"reduce_scatter": "reducescatter"}
"""Collectives with another name in the engine."""

MAX_BLOCKS = 64
"""Default for the most blocks of a GPU: all of a plan's must be resident at once, and a V100 holds 80."""

MAX_BUFFER_BYTES = 1 << 32
"""Bytes of the smallest buffer that the engine's offsets of 32 bits do not reach."""

USUAL_SIZE = 1 << 28
"""Bytes for which the unit of the loops is chosen if no size is given."""

MAX_TURNS = 65535
"""Most turns of a loop, which the engine counts in 16 bits."""


def execution_plan(
    plan: Plan,
    choices: Choices = DEFAULT_CHOICES,
    *,
    sizes: tuple[int, int | None] = (0, None),
    usual: int = USUAL_SIZE,
) -> Exported:
    """Export the execution plan, with notes on its resources and the rate that it keeps.

    The engine uses the file for buffers from ``sizes[0]`` bytes up to below ``sizes[1]``, None for no limit. ``usual``
    is the size in bytes for which the unit of the loops is chosen if no size is given. A UsageError says that the
    engine lacks the collective, or that the plan exceeds its limits.

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
    cut = chunk_shares(plan, chunks=choices.chunks, size=choices.size, in_network=switched)
    unit = _unit(plan, cut, choices.size or usual)
    most = MAX_BLOCKS if choices.max_blocks is None else choices.max_blocks
    found, wires = packet_tasks(plan, cut.shards) if packets else tasks(plan, cut.shards, switched=switched)
    if not packets and any(loops_share_blocks(own, unit, most) for own in found):
        # loops share blocks only if all of them take equally many turns
        piece = math.gcd(*(count for _, _, count in cut.shards))
        found, wires = tasks(plan, cut.shards, piece=piece, switched=switched)
    made = [make_blocks(own, unit, most) for own in found]
    gpus = [_gpu(plan, cut, rank, wires, own, switched=switched) for rank, own in enumerate(made)]
    return Exported(
        _format_file(plan, cut, gpus, sizes, packets=packets),
        _notes(plan, cut, made, wires, packets=packets, switched=switched),
    )


def execution_plans(plans: Plans, choices: Choices = DEFAULT_CHOICES) -> Exported:
    """Export a file for each range of sizes, which states its smallest and largest size; as `execution_plan`.

    If ranks exchange elements without trees, which have no file, the next larger plan of trees is taken.
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
    """Return the bytes of a chunk that a turn of a loop moves: a power of two near the model's choice for this size."""
    turns = max(chunk_counts(pipeline(dataflow(plan)), size, None))
    wanted = max(1, size // (cut.count * turns))
    shortest = -(-MAX_BUFFER_BYTES // (cut.count * MAX_TURNS))
    unit = 1 << max(0, round(math.log2(wanted)))
    return int(max(unit, 1 << (shortest - 1).bit_length(), ALIGNMENT))


def _gpu(
    plan: Plan, cut: Chunking, rank: int, wires: RankChannels, own: Sequence[MscclppBlock], *, switched: bool
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


def _format_file(
    plan: Plan,
    cut: Chunking,
    gpus: Sequence[dict[str, object]],
    sizes: tuple[int, int | None],
    *,
    packets: bool,
) -> str:
    """Return the file, a thread block to a line."""
    head: dict[str, object] = {
        "name": f"{plan.schedule} {plan.collective} {plan.topology.name}".replace(" ", "_"),
        "collective": COLLECTIVE_NAMES.get(plan.collective, plan.collective),
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


def _access_limit(
    plan: Plan, cut: Chunking, made: Sequence[Sequence[MscclppBlock]], wires: RankChannels
) -> tuple[float, tuple[str, ...]]:
    """Return GB/s to which slow accesses limit the file, and notes on them.

    Operations read the memory of peers, write to it, and signal by writes. UsageError names a pair that cannot do so.
    """
    topology, ranks = plan.topology, plan.ranks
    access, apart = memory_access(topology), refused_pairs(topology)
    for rank, peers in enumerate(wires.peers):
        for peer in peers.get(MEMORY, ()):
            pair = ranks[rank], ranks[peer]
            if pair in apart or pair in access.unreached:
                raise UsageError(
                    f"MSCCL++ maps the memory of peers, and {pair[0]} has no peer access to {pair[1]}; allow it, or "
                    "run the plan with a communicator, whose messages need none"
                )
            if pair in access.unwritten:
                raise UsageError(
                    f"MSCCL++ signals by writing to peers, and writes of {pair[0]} to {pair[1]} never end; run the "
                    "plan with a communicator"
                )
    moved: Counter[tuple[int, int, str]] = Counter()
    for rank, own in enumerate(made):
        for block in own:
            for step in (*block.before, *block.body):
                for places, kind in ((step.reads, "pull"), (step.writes, "push")):
                    for place in places:
                        if place.peer is not None and place.kind == MEMORY:
                            ends = (place.peer, rank) if kind == "pull" else (rank, place.peer)
                            moved[(*ends, kind)] += place.size
    by_channel = sorted(topology.links, key=lambda link: link.channel == "nvlink")
    direct = {(link.src, link.dst): link for link in by_channel if link.access}
    seconds: dict[tuple[str, str], float] = {}
    slow: dict[str, None] = {}
    for (src, dst, kind), chunks in sorted(moved.items()):
        pair = ranks[src], ranks[dst]
        link = direct.get(pair)
        if link is None:
            if kind == "push" and pair in access.pulled:
                slow[f"{pair[0]}>{pair[1]} pushed, which is slower than pulled"] = None
            continue
        rate = link.push if kind == "push" else link.pull
        if rate is None:
            raise UsageError(
                f"MSCCL++ has {pair[1]} read the memory of {pair[0]} here, and such reads never end; run the plan with "
                "a communicator"
            )
        seconds[pair] = seconds.get(pair, 0.0) + chunks / cut.count / rate
        if rate < link.bandwidth:
            slow[f"{pair[0]}>{pair[1]} {kind}ed at {rate:g} of {link.bandwidth:g} GB/s"] = None
    limit = 1 / max(seconds.values()) if seconds else math.inf
    named = (
        (f"in the file {listed(slow, noun='accesses')}; the windows engine takes the faster access",)
        if slow
        else ()
    )
    return limit, named


def _largest(cut: Chunking) -> int:
    """Return the largest buffer in bytes: below `MAX_BUFFER_BYTES`, and a multiple of the chunks."""
    step = ALIGNMENT * cut.count
    return (MAX_BUFFER_BYTES - 1) // step * step


def _notes(
    plan: Plan,
    cut: Chunking,
    made: Sequence[Sequence[MscclppBlock]],
    wires: RankChannels,
    *,
    packets: bool,
    switched: bool,
) -> tuple[str, ...]:
    # a packet is half flag, and the engine keeps two sets of them
    part = cut.kept / 2 if packets else cut.kept
    rate = float(part) * plan.rate
    channels = max(sum(map(len, peers.values())) for peers in wires.peers)
    scratch = Fraction(max(wires.scratch) * (4 if packets else 1), cut.count)
    busiest = max(block.remote_chunks for own in made for block in own) / cut.count * rate
    limit, slow = _access_limit(plan, cut, made, wires)
    if limit < rate * (1 - TOLERANCE):
        kept, busiest = (
            f"at most {limit:.6g} GB/s, {limit / plan.rate:.2%} of the plan's",
            busiest * limit / rate,
        )
    else:
        kept = kept_rate(plan, part)
    return (
        f"{kept}; {cut.count} chunks, so buffers are multiples of {ALIGNMENT * cut.count} "
        f"bytes, up to {_largest(cut)}",
        f"a GPU takes up to {max(map(len, made))} blocks, {channels} channels and {_scratch(scratch)} of scratch",
        f"at that rate its busiest block reads and writes {busiest:.4g} GB/s of its peers' memory",
        *(("switches add and copy, which needs GPUs of sm_90 or later",) if switched else ()),
        *slow,
    )


def _scratch(part: Fraction) -> str:
    return f"{float(part):.4g} of the buffer's bytes" if part else "0 bytes"
