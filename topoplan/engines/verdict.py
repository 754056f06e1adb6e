"""Check that a program fulfils its collective, and compute the link loads and the rate of its traffic.

The check runs the program several times; each run has its own order and numbers. A file names GPUs and no routes: bytes
take the routes with the fewest links, split evenly among several, as through the planes of NVSwitch. `EngineVerdict` is
the result for a correct file.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from topoplan.engines.interpreter import (
    CellMemory,
    CellNumbers,
    CellRegion,
    EngineProgram,
    Fifo,
    Move,
    Post,
    ProgramRun,
)
from topoplan.errors import InfeasibleError, PlanError, UsageError
from topoplan.machine.fabric import CHANNEL_CHOICES, Fabric
from topoplan.machine.topology import Topology
from topoplan.plans.loads import full_links, rate_of_loads

CHECK_RUNS = 20
"""Default number of runs."""


def check_runs(programs: tuple[EngineProgram, ...], runs: int = CHECK_RUNS) -> int | None:
    """Run programs of one plan, for buffers of different sizes, in turn, with seeds from 0; return a broadcast's root.

    A PlanError describes the first fault: its place, or the rank with the wrong output.
    """
    root: int | None = None
    for seed in range(runs):
        program = programs[seed % len(programs)]
        root = _check_outputs(program, ProgramRun(program, seed).run())
    return root


def _check_outputs(program: EngineProgram, memory: CellMemory) -> int | None:
    """Compare every output with the collective's definition; return the root of a broadcast."""
    outputs = [
        memory.view(CellRegion(rank, "o", 0, program.sizes[rank, "o"])) for rank in range(program.ranks)
    ]
    for rank, (_, states) in enumerate(outputs):
        if not states.all():
            raise PlanError(
                f"gpu {rank} ends without {_cells(states == 0)} of its output: it is never written"
            )
    inputs = memory.inputs
    root: int | None = None
    if program.collective == "broadcast":
        held = outputs[0][0]
        matching = [
            rank for rank, own in enumerate(inputs) if own.shape == held.shape and (own == held).all()
        ]
        root = matching[0] if matching else 0
    for rank, (values, _) in enumerate(outputs):
        wanted = _expected_output(program, rank, inputs, root)
        if wanted.shape != values.shape:
            raise PlanError(
                f"gpu {rank} has an output of {values.size} cells, and {program.collective} of these inputs gives "
                f"{wanted.size}"
            )
        wrong = np.flatnonzero(values != wanted)
        if wrong.size:
            raise PlanError(
                f"gpu {rank} ends with wrong numbers in {_cells(values != wanted)} of its output"
                f"{_explain_wrong_sum(program, rank, int(wrong[0]), values, wanted, inputs)}"
            )
    return root


def _expected_output(
    program: EngineProgram, rank: int, inputs: list[CellNumbers], root: int | None
) -> CellNumbers:
    ranks = program.ranks
    match program.collective:
        case "allreduce":
            return _sum(inputs)
        case "reduce_scatter":
            total = _sum(inputs)
            part = total.size // ranks
            return total[rank * part : (rank + 1) * part]
        case "allgather":
            return np.concatenate(inputs)
        case "alltoall":
            part = inputs[rank].size // ranks
            return np.concatenate([one[rank * part : (rank + 1) * part] for one in inputs])
        case "broadcast":
            return inputs[root or 0]
    # sendrecv: a rank sends to the next one
    return inputs[(rank - 1) % ranks]


def _sum(inputs: list[CellNumbers]) -> CellNumbers:
    total = inputs[0].copy()
    for one in inputs[1:]:
        total += one
    return total


def _cells(wrong: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> str:
    count, size = int(wrong.sum()), wrong.size
    return (
        "all" if count == size else f"{count / size:.0%}, from {int(np.flatnonzero(wrong)[0]) / size:.1%} on,"
    )


def _explain_wrong_sum(
    program: EngineProgram,
    rank: int,
    cell: int,
    values: CellNumbers,
    wanted: CellNumbers,
    inputs: list[CellNumbers],
) -> str:
    """Name the rank whose number is missing from a wrong sum, or in it twice, if that explains it."""
    if program.collective not in ("allreduce", "reduce_scatter"):
        return ""
    place = cell + (rank * values.size if program.collective == "reduce_scatter" else 0)
    more = (int(values[cell]) - int(wanted[cell])) % (1 << 64)
    for source, own in enumerate(inputs):
        if more == int(own[place]):
            return f": there the contribution of gpu {source} is in the sum twice"
        if (more + int(own[place])) % (1 << 64) == 0:
            return f": there the contribution of gpu {source} is missing"
    return ""


Traffic = dict[tuple[int, int], Fraction]
"""Bytes from one GPU to another, for each byte of the buffer."""


@dataclass(frozen=True, slots=True)
class TrafficLoads:
    """Links under the traffic of a file.

    ``loads`` are bytes across each used link, for each byte of the buffer. ``rate`` is the algorithm bandwidth in GB/s
    at which the first links, those in ``full``, are full. ``channels`` are those of the routes.
    """

    loads: dict[tuple[str, str], Fraction]
    rate: Fraction
    full: tuple[tuple[str, str], ...]
    channels: tuple[str, ...]


def program_traffic(program: EngineProgram) -> Traffic:
    """Return the traffic from GPU to GPU, without the part that switches add or copy."""
    cells: Counter[tuple[int, int]] = Counter()
    for block in program.blocks:
        for instruction, _ in block.unrolled():
            move = instruction.action if isinstance(instruction, Post) else instruction
            if not isinstance(move, Move) or move.by_switch:
                continue
            for place in move.reads:
                if isinstance(place, CellRegion) and place.rank != block.rank:
                    cells[place.rank, block.rank] += place.size
            for place in move.writes:
                if isinstance(place, Fifo):
                    # the size of the move's buffer, which it reads or writes
                    size = max(one.size for one in (*move.reads, *move.writes) if isinstance(one, CellRegion))
                    cells[block.rank, program.fifos[place.number][0]] += size
                elif place.rank != block.rank:
                    cells[block.rank, place.rank] += place.size
    whole = max(program.sizes[0, "i"], program.sizes[0, "o"])
    return {pair: Fraction(count, whole) for pair, count in sorted(cells.items())}


def machine_loads(sent: Traffic, ranks: int, machine: Topology) -> TrafficLoads:
    """Return the loads of a machine's links under this traffic; rank i is the i-th GPU."""
    if len(machine.gpus) != ranks:
        raise UsageError(
            f"the file is for {ranks} GPUs, and {machine.name} has {len(machine.gpus)} here; choose with --gpus"
        )
    for channels in CHANNEL_CHOICES["auto"]:
        fabric = Fabric(machine, channels)
        shortest: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        for arc in fabric.arcs:
            routes = shortest.setdefault((arc.tail, arc.head), [])
            if not routes or len(arc.links) == len(routes[0]):
                routes.append(arc.links)
        if all(pair in shortest for pair in sent):
            break
    else:
        raise InfeasibleError(f"{machine.name} does not join all GPUs that send to each other in this file")
    loads = [Fraction(0)] * len(fabric.links)
    for pair, share in sent.items():
        for links in shortest[pair]:
            for link in links:
                loads[link] += share / len(shortest[pair])
    rate = rate_of_loads(loads, fabric)
    if rate is None:
        raise UsageError(
            "nothing in this file goes from GPU to GPU but through switches, whose loads are not counted"
        )
    ends = [(link.src, link.dst) for link in fabric.links]
    return TrafficLoads(
        loads={ends[number]: load for number, load in enumerate(loads) if load},
        rate=rate,
        full=tuple(ends[number] for number in full_links(loads, fabric)),
        channels=channels,
    )


@dataclass(frozen=True, slots=True)
class EngineVerdict:
    """A file that implements its collective.

    ``root`` is that of a broadcast, ``summary`` the file's size in one line, ``runs`` the interleavings that were run,
    ``traffic`` in bytes from GPU to GPU for each byte of the buffer.
    """

    collective: str
    ranks: int
    root: int | None
    summary: str
    runs: int
    traffic: Traffic
    notes: tuple[str, ...] = ()
