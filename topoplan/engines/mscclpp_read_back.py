"""Run an execution plan of MSCCL++ from any source: lower it to a program, check its results, and note oddities.

A chunk has so many cells that every loop takes about three turns, the last one short, or so few that it takes one; both
are run. Numbers of bytes and signals come from the file alone. The kernels are those of
``src/core/include/execution_kernel.hpp``, release 0.9.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from topoplan.engines.interpreter import (
    Address,
    Barrier,
    CellRegion,
    EngineProgram,
    Flush,
    Instruction,
    Loop,
    Move,
    PlainInstruction,
    Post,
    ProgramBlock,
    Signal,
    Sync,
    Wait,
    in_place_alias,
)
from topoplan.engines.mscclpp_read import (
    MAX_TURNS,
    PACKETS,
    PAIRED,
    ChunkReference,
    ExecutionPlanFile,
    MscclppGpu,
    MscclppOperation,
    MscclppThreadBlock,
    check_limits,
    located_operations,
)
from topoplan.engines.verdict import CHECK_RUNS, EngineVerdict, check_runs, program_traffic
from topoplan.errors import PlanError
from topoplan.plans.plan import collective_name

MAX_CELLS = 1 << 22
"""Largest number of cells of all buffers together."""

COLLECTIVE_NAMES = {"reducescatter": "reduce_scatter"}


def lower_execution_plan(plan: ExecutionPlanFile, *, in_step: bool = False) -> tuple[EngineProgram, ...]:
    """Lower a plan that `check_limits` accepts, for a buffer of several turns of every loop and for one of one turn.

    ``in_step``: the blocks of a group, which divide an operation, begin it together and end it together, which the
    engine does not enforce. A PlanError names a loop that runs past the chunks that it moves.
    """
    operations = [one for gpu in plan.gpus for block in gpu.blocks for one in block.operations]
    loops = [one for one in operations if one.name == "pipeline"]
    slices = math.lcm(*(inner.group[1] for one in operations for inner in (one, *one.body)))
    if not loops:
        return (_program(plan, slices, 0, 0, in_step),)
    step = math.gcd(*(one.unit for one in loops))
    # half a step is a cell, so that a turn can be short
    several = slices * max(1, math.ceil(max(5 * one.unit / (step * one.chunks) for one in loops)))
    chunks = max(plan.gpus[0].chunks["i"], plan.gpus[0].chunks["o"])
    made = []
    if several * step * chunks <= 2 * slices * plan.most:
        made.append(_program(plan, several, step, 2 * slices, in_step))
    if not made or plan.least <= min(chunks * (one.unit // one.chunks) for one in loops):
        made.append(_program(plan, slices, 0, 0, in_step))
    return tuple(made)


def _program(plan: ExecutionPlanFile, cells: int, step: int, divisor: int, in_step: bool) -> EngineProgram:
    """Return the program for chunks of so many cells, ``divisor`` to ``step`` bytes; 0: loops turn once."""
    sizes: dict[Address, int] = {}
    aliases: dict[Address, tuple[str, int]] = {}
    collective = COLLECTIVE_NAMES.get(plan.collective, plan.collective)
    for rank, gpu in enumerate(plan.gpus):
        for buffer, chunks in gpu.chunks.items():
            sizes[rank, buffer] = chunks * cells
        if plan.in_place:
            aliases |= in_place_alias(collective, rank, sizes)
    if sum(sizes.values()) > MAX_CELLS:
        raise PlanError(
            f"{sum(sizes.values())} pieces are more than the {MAX_CELLS} that are run: units of loops have almost no "
            "common divisor, or the chunks are too many"
        )
    counters = _Counters(plan)
    groups: dict[object, int] | None = {} if in_step else None
    blocks = []
    for rank, gpu in enumerate(plan.gpus):
        for block in gpu.blocks:
            lowering = _Lowering(plan, rank, gpu, block, counters, groups, cells, step, divisor)
            blocks.append(ProgramBlock(rank, lowering.instructions()))
    return EngineProgram(
        collective=collective,
        ranks=len(plan.gpus),
        sizes=sizes,
        aliases=aliases,
        blocks=tuple(blocks),
        counters=counters.first,
        proxies=tuple(counters.proxies.values()),
    )


class _Counters:
    """Numbers of the counters: each end of each channel, each semaphore."""

    def __init__(self, plan: ExecutionPlanFile) -> None:
        self.first: dict[int, tuple[int, str]] = {}
        self.inbound: dict[tuple[int, str, int], int] = {}
        self.semaphores: dict[tuple[int, int], int] = {}
        self.proxies: dict[tuple[int, int], int] = {}
        self._opposite: dict[tuple[int, str, int], tuple[int, str, int]] = {}
        ends: dict[tuple[int, int, str], list[int]] = {}
        for rank, gpu in enumerate(plan.gpus):
            for kind, peers in gpu.peers.items():
                for number, peer in enumerate(peers):
                    name = f"{kind} channel {number} of gpu {rank}, from gpu {peer},"
                    self.inbound[rank, kind, number] = self._new(0, name)
                    ends.setdefault((rank, peer, kind), []).append(number)
                    if kind == "port":
                        self.proxies[rank, number] = len(self.proxies)
            for number, first in enumerate(gpu.semaphores):
                self.semaphores[rank, number] = self._new(first, f"semaphore {number} of gpu {rank}")
        for (rank, peer, kind), numbers in ends.items():
            for number, other in zip(numbers, ends[peer, rank, kind], strict=True):
                self._opposite[rank, kind, number] = (peer, kind, other)

    def outbound(self, rank: int, kind: str, number: int) -> int:
        """Return the counter that a signal on a channel adds to: that of its other end."""
        return self.inbound[self._opposite[rank, kind, number]]

    def _new(self, first: int, name: str) -> int:
        self.first[len(self.first)] = (first, name)
        return len(self.first) - 1


class _Lowering:
    """The instructions of one block."""

    def __init__(
        self,
        plan: ExecutionPlanFile,
        rank: int,
        gpu: MscclppGpu,
        block: MscclppThreadBlock,
        counters: _Counters,
        groups: dict[object, int] | None,
        cells: int,
        step: int,
        divisor: int,
    ) -> None:
        self._plan, self._rank, self._gpu, self._block = plan, rank, gpu, block
        self._counters, self._cells, self._step, self._divisor = counters, cells, step, divisor
        self._groups = groups

    def instructions(self) -> tuple[tuple[Instruction, str], ...]:
        found: list[tuple[Instruction, str]] = []
        for number, operation in enumerate(self._block.operations):
            where = f"gpu {self._rank}, block {self._block.number}, operation {number} ({operation.name})"
            if operation.name == "pipeline":
                found.append((self._loop(operation, where), where))
            else:
                found += [(one, where) for one in self._together(operation)]
        return tuple(found)

    def _together(self, operation: MscclppOperation) -> list[PlainInstruction]:
        """Lower an operation; ``in_step``, between two barriers of the blocks that divide it."""
        plain = self._plain(operation)
        if self._groups is None or operation.group[1] == 1:
            return plain
        members = (self._rank, operation.name, operation.reads, operation.writes, operation.group[1])
        # the engine's own barriers have numbers from 0
        barrier = Barrier(-1 - self._groups.setdefault(members, len(self._groups)), operation.group[1])
        return [barrier, *plain, barrier]

    def _loop(self, operation: MscclppOperation, where: str) -> Loop:
        size = operation.chunks * self._cells
        unit = operation.unit * self._divisor // self._step if self._step else size
        turns = -(-size // unit)
        if turns > MAX_TURNS:
            raise PlanError(f"{where}: takes {turns} turns, and the engine counts them in 16 bits")
        body: list[tuple[PlainInstruction, str]] = []
        for at, inner in enumerate(operation.body):
            place = f"{where}, inner operation {at} ({inner.name})"
            for reference in (*inner.reads, *inner.writes):
                if (turns - 1) * unit > reference.size * self._cells // inner.group[1]:
                    raise PlanError(
                        f"{place}: the loop is over {operation.chunks} chunks and runs past this one's {reference.size}"
                    )
            body += [(one, place) for one in self._together(inner)]
        return Loop(turns, unit, tuple(body))

    def _plain(self, operation: MscclppOperation) -> list[PlainInstruction]:
        name = operation.name
        kind = operation.channel_type or "memory"
        ids = [self._block.channels[kind][channel] for channel in operation.channels]
        match name:
            case "nop":
                return [Sync()]
            case "barrier":
                return [Barrier(*operation.barrier)]
            case "sem_acquire" | "sem_release":
                own = tuple(self._counters.semaphores[self._rank, number] for number in operation.semaphores)
                return [Wait(own) if name == "sem_acquire" else Signal(own)]
            case "wait" | "rlxwait":
                return [Wait(tuple(self._counters.inbound[self._rank, kind, number] for number in ids))]
            case "signal" | "rlxsignal":
                counters = [self._counters.outbound(self._rank, kind, number) for number in ids]
                if kind == "memory":
                    return [Signal(tuple(counters))]
                pairs = enumerate(zip(ids, counters, strict=True))
                return [Post(self._proxy(number), at, Signal((one,))) for at, (number, one) in pairs]
            case "flush":
                return [Flush(tuple(self._proxy(number) for number in ids))]
        moves = self._moves(operation)
        if kind == "port" and name in ("put", "pws", "pwsf", "ppkt", "rppkt"):
            return self._posted(name, moves, ids)
        return list(moves)

    def _posted(self, name: str, moves: Sequence[Move], ids: Sequence[int]) -> list[PlainInstruction]:
        """Lower puts over port channels: a thread for each posts the move to the channel's proxy."""
        found: list[PlainInstruction] = []
        if name == "rppkt":
            # all threads see all packets before any is sent
            source = moves[0].reads[0]
            found += [Move((source,), (), (True,), ()), Sync()]
        for thread, (move, number) in enumerate(zip(moves, ids, strict=True)):
            found.append(Post(self._proxy(number), thread, move))
            if name in ("pws", "pwsf"):
                counter = self._counters.outbound(self._rank, "port", number)
                found.append(Post(self._proxy(number), thread, Signal((counter,))))
        if name == "pwsf":
            found.append(Flush(tuple(self._proxy(number) for number in ids)))
        return found

    def _proxy(self, number: int) -> int:
        return self._counters.proxies[self._rank, number]

    def _moves(self, operation: MscclppOperation) -> list[Move]:
        """Return the sums and their targets; copies to several places are several moves."""
        name = operation.name
        reads = [self._regions(one, operation) for one in operation.reads]
        writes = [self._regions(one, operation) for one in operation.writes]
        waits, marks = _packets(name, operation.channel_type, len(reads), len(writes))
        if name in PAIRED:
            return [
                Move(tuple(source), tuple(target), waits[at : at + 1], marks[at : at + 1])
                for at, (source, target) in enumerate(zip(reads, writes, strict=True))
            ]
        if name == "rppkt":
            return [Move(tuple(reads[0]), tuple(target), waits, marks[:1]) for target in writes]
        # a switch reads all of its group, and writes to all of it
        sources = tuple(region for regions in reads for region in regions)
        targets = tuple(region for regions in writes for region in regions)
        if name in ("glres", "gstore", "gstorepkt"):
            packets = name == "gstorepkt"
            marks = (True,) * len(targets) if packets else ()
            return [Move(sources, targets, (True,) if packets else (), marks, by_switch=True)]
        return [Move(sources, targets, waits, marks)]

    def _regions(self, reference: ChunkReference, operation: MscclppOperation) -> list[CellRegion]:
        """Return the regions of a reference: one, or one on each GPU of a switch group."""
        if reference.buffer is not None:
            places = [(self._rank, reference.buffer)]
        elif reference.remote is not None:
            ids = self._block.buffers[operation.channel_type or "memory"]
            rank, buffer, _ = self._gpu.remote[ids[reference.remote]]
            places = [(rank, buffer)]
        else:
            buffer, ranks = self._gpu.groups[self._block.channels["switch"][reference.switch or 0]]
            places = [(rank, buffer) for rank in ranks]
        number, slices = operation.group
        size = reference.size * self._cells // slices
        start = reference.index * self._cells + number * size
        return [CellRegion(rank, buffer, start, size) for rank, buffer in places]


def _packets(
    name: str, kind: str | None, reads: int, writes: int
) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Return whether each item read, and each item written, is a packet; both empty if none is."""
    if name not in PACKETS:
        return (), ()
    match name:
        case "ppkt":
            return (kind == "port",) * reads, (True,) * writes
        case "rppkt":
            return (True,), (True,) * writes
        case "cpkt":
            return (False,), (True,)
        case "upkt":
            return (True,), (False,)
    # a sum: the rank's own number first, then packets
    return (False, *(True,) * (reads - 1)), (False, *(True,) * (writes - 1))


def check_execution_plan(plan: ExecutionPlanFile, *, runs: int = CHECK_RUNS) -> EngineVerdict:
    """Check an execution plan of MSCCL++ from any source, in ``runs`` interleavings; a PlanError names the operation.

    >>> import topoplan
    >>> from topoplan.engines.registry import export_plan
    >>> from topoplan.engines.mscclpp_read import read_plan_file
    >>> file = export_plan(topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7]), "mscclpp").text
    >>> check_execution_plan(read_plan_file(file)).summary
    'all_reduce of 4 GPUs, in place: 2 chunks, 3 blocks of a GPU at most'
    """
    check_limits(plan)
    notes: list[str] = []
    made = lower_execution_plan(plan)
    try:
        root = check_runs(made, runs)
    except PlanError as error:
        # the engine does not synchronise blocks that divide an operation; files that rely on it run by luck
        if not any(one.group[1] > 1 for one in _operations(plan)):
            raise
        made = lower_execution_plan(plan, in_step=True)
        root = check_runs(made, runs)
        notes.append(
            "warning: right only if blocks that divide an operation keep in step, which the engine does not enforce: "
            f"otherwise {error}"
        )
    names = Counter(one.name for one in _operations(plan))
    if names["flush"]:
        notes.append("flush is run as meant; release 0.9 flushes as many channels as dst_buff has references")
    if plan.protocol == "LL":
        notes.append(
            "every packet carries its flag, so the wires carry twice the bytes that are counted here"
        )
    if any(gpu.groups for gpu in plan.gpus):
        notes.append("the loads of links do not include copies and additions in switches")
    chunks = max(plan.gpus[0].chunks["i"], plan.gpus[0].chunks["o"])
    collective = made[0].collective
    return EngineVerdict(
        collective=collective,
        ranks=len(plan.gpus),
        root=root,
        summary=f"{collective_name(collective)} of {len(plan.gpus)} GPUs, "
        f"{'in place' if plan.in_place else 'out of place'}: {chunks} chunks, "
        f"{max(len(gpu.blocks) for gpu in plan.gpus)} blocks of a GPU at most",
        runs=runs,
        traffic=program_traffic(made[0]),
        notes=tuple(notes),
    )


def _operations(plan: ExecutionPlanFile) -> list[MscclppOperation]:
    return [one for gpu in plan.gpus for block in gpu.blocks for one, _, _ in located_operations(block, "")]
