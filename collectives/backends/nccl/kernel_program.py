"""Build the tables of a rank's part in a plan's collectives for the one kernel that runs it (`kernels/forest.cu`).

The steps are those of `tree_steps`. An *end* is a tree edge seen from one of its ranks. Data crosses an edge
through slots in the arena of its destination, which its source writes; if the edge is *pulled*, since the plan's
machine states that as the faster way, through slots in the arena of its source, which its destination reads; directly
into the destination's result, if all results lie at one place in the arenas; or, between domains, as a message that
moves when the kernel of its phase has ended. Flags are always written. Steps have *parts*, which take the chunks of the
shard in turn.

Deadlock is impossible: chunk c of a step has its turn in round c + level, and every block of every rank takes its
steps in the order of rounds. The input of a step, data of lower levels or a free slot, has an earlier round: an
edge has more slots than its data skips levels. Steps can be dealt to blocks in any way, as long as the GPUs run all
blocks of all ranks at once. Kernels of a phase wait for no later one, and messages for those of earlier phases
alone.

A long buffer of several phases is cut into slices, each a part of every shard, so that messages of one move beside
kernels of another. All ranks run the kernels one at a time in the order of `KernelTables.phases`, and their messages in
that order too, so both wait only for earlier ones. No element is added in another order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.backends.backend import RankArrays
from collectives.backends.nccl.tree_steps import (
    GIVEN,
    KEPT,
    NOWHERE,
    RESULT,
    ForestStep,
    ForestSteps,
    steps_of,
)
from collectives.tables.lowering import PlanKey
from collectives.tables.transfer_table import TransferTable, place_in
from topoplan.machine.routing import memory_access
from topoplan.machine.topology import UNREACHED
from topoplan.model.window_engine import LEAST_CHUNK, WindowsClock, costs_of, most_blocks
from topoplan.model.window_slices import SlicedClock
from topoplan.plans.plan import Plan
from topoplan.plans.shards import ALIGNMENT

FLAG_BYTES = 128
"""Distance of flags: each has a cache line to itself."""

HOP_BYTES = 112 << 10
"""Bytes that a block moves in the time of a hop, which every chunk costs besides."""

LEAST_STRIDE = 32 << 10
"""The least bytes of a slot into which a long one is halved: four vectors of 16 bytes for every thread."""

MOST_ENDS = 256
"""The most ends of a step; as in ``forest.cu``."""

DIRECT, STAGED = 0, -1
"""In place of a number of slots: data goes to the result, or has come into this rank's room as a message."""

NO_BUFFER = (NOWHERE, 0)

WHOLE = ("allreduce", "allgather", "broadcast")
"""Collectives whose ranks all end with the whole buffer."""

STEP = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("level", "start", "stop", "chunk", "part", "parts", "chunks", "own", "own_first", "kept"),
            *("kept_first", "final", "first", "arrivals", "departures", "direct", "gathers", "spreads"),
            "switched",
        )
    ]
)
END = np.dtype(
    [
        (name, np.int64)
        for name in ("peer", "home", "slots", "count", "stride", "data", "credit", "sent", "row")
    ]
)
"""Rows of the tables; ``forest.cu`` explains them."""


@dataclass(frozen=True, slots=True)
class KernelMessage:
    """Elements that a rank sends or receives between two kernels; `buffer` is `GIVEN`, `RESULT` or `KEPT`."""

    sends: bool
    peer: int
    buffer: int
    first: int
    count: int


@dataclass(frozen=True, slots=True, eq=False)
class KernelPhase:
    """A rank's work in one kernel on a slice of the buffer, and the messages behind it.

    `blocks` has B + 1 entries, for B blocks; no kernel runs if B is 0. `steps` has rows of `STEP`, `ends` of `END`.
    """

    blocks: NDArray[np.int64]
    steps: NDArray[np.void]
    ends: NDArray[np.void]
    messages: tuple[KernelMessage, ...]
    slice: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class KernelTables:
    """A rank's work in a collective.

    `phases` has all slices of the first phase, then those of the second, and so on. `room` counts the elements for sums
    that are needed again, and for messages.
    """

    phases: tuple[KernelPhase, ...]
    room: int


def _rank_pairs(plan: Plan, pairs: Iterable[tuple[str, str]]) -> frozenset[tuple[int, int]]:
    """Return pairs of GPUs that are ranks or that the trees pass, as vertices of the plan's trees."""
    used = {*plan.ranks, *plan.helpers}
    number = {name: vertex for vertex, name in enumerate(plan.vertices) if name in used}
    return frozenset((number[a], number[b]) for a, b in pairs if a in number and b in number)


def refused_edges(plan: Plan) -> frozenset[tuple[int, int]]:
    """Return the pairs of vertices, in both orders, that a plan sends between and that no copy of a kernel joins."""
    unreached = _rank_pairs(plan, memory_access(plan.topology).unreached)
    if not unreached:
        return unreached
    return (unreached | {(b, a) for a, b in unreached}) & tree_pairs(plan)


def tree_pairs(plan: Plan) -> frozenset[tuple[int, int]]:
    """Return the pairs of vertices, in both orders, that edges of a plan's trees join."""
    joined = {
        (edge.parent, edge.child) for shard in plan.shards for stage in shard.stages for edge in stage.edges
    }
    return frozenset(joined | {(b, a) for a, b in joined})


def writes_everywhere(plan: Plan) -> bool:
    """Return whether all ranks may write data to all others, as small collectives do."""
    access = memory_access(plan.topology)
    return not _rank_pairs(plan, access.unwritten | access.unreached)


class KernelPlan:
    """A plan with its place in the arenas for as long as these live; the same on all ranks.

    - `base`: where its place begins in every arena, a multiple of `FLAG_BYTES`.
    - `stride`: the most bytes of a slot, a multiple of `FLAG_BYTES`, and at least `ALIGNMENT` elements of 16 bytes.
    - `blocks`: the most blocks of the kernel; shorter buffers take fewer (`most_blocks`).
    - `room`: bytes that the arenas have left. A plan takes as many parts as fit, at least one, in slots that are halved
      down to `LEAST_STRIDE` while fewer than three quarters of the wanted parts fit.
    - `domains` of each rank; empty if all are in one.
    - `overlaps`: kernels run beside messages, so long buffers are cut into slices.
    - `adds`, `copies`: whether switches that can are to add, and to copy.

    `nbytes` is what it takes in every arena, zeroed before its first run. `stars` counts what switches add or copy.
    `apart`: pairs of vertices, in both orders, whose edges exchange messages alone, since the flags of an edge are
    written both ways; `ends_nowhere`: on some of them no copy ends, else all lack peer access. `pulled` edges have
    their slots in the arenas of their sources.
    """

    def __init__(
        self,
        key: PlanKey,
        *,
        base: int,
        stride: int,
        blocks: int,
        room: int = 1 << 62,
        domains: tuple[int, ...] = (),
        overlaps: bool = False,
        adds: bool = False,
        copies: bool = False,
    ) -> None:
        access = memory_access(key.plan.topology)
        self.apart = refused_edges(key.plan)
        self.ends_nowhere = any(
            device.fact(UNREACHED) for device in key.plan.topology.devices if device.facts
        )
        self.steps = found = steps_of(key, domains, adds=adds, copies=copies, apart=self.apart)
        self.stride = stride
        self.blocks = blocks
        self.whole = key.plan.collective in WHOLE
        self.stars = int(found.star.max(initial=-1)) + 1
        pulled, ends = (
            _rank_pairs(key.plan, access.pulled),
            (found.source.tolist(), found.destination.tolist()),
        )
        self.pulled = np.array([pair in pulled for pair in zip(*ends, strict=True)], dtype=np.bool_)
        self.pulled &= ~found.crosses & (found.star < 0)
        self.phases = 1 + max((step.phase for step in found.steps), default=0)
        self.clock = clock_of(key)
        self._sliced = overlaps and self.phases > 1
        self._domains, self._key = domains or (0,) * len(key.plan.vertices), key
        self._longest = _longest_step(key, found)
        wanted = self.wanted_parts(blocks)
        while True:
            self._lay(key, base, 1)
            parts = min(wanted, max(1, room // max(self.nbytes, 1)))
            if 4 * parts >= 3 * wanted or self.stride // 2 < LEAST_STRIDE:
                break
            self.stride = self.stride // 2 // FLAG_BYTES * FLAG_BYTES
        self._lay(key, base, parts)

    def wanted_parts(self, blocks: int) -> int:
        """Return into how many parts steps are cut: a rank's longest one shares blocks by its part of the work."""
        return max(1, min(blocks, math.ceil(blocks * self._longest - 1e-9)))

    def slices(self, nbytes: int, blocks: int, limit: int) -> int:
        """Return into how many slices a buffer is cut, for so many blocks and bytes of a chunk; all ranks agree."""
        if not self._sliced:
            return 1
        return sliced_clock_of(self._key, self._domains, self.apart).slices(
            nbytes, blocks=blocks, limit=limit
        )

    def _lay(self, key: PlanKey, base: int, parts: int) -> None:
        """Assign flags and slots of so many parts their places in the arenas."""
        found, stride = self.steps, self.stride
        self.parts = parts
        self.data, self.credit, self.slots = np.zeros((3, len(found.slots), parts), dtype=np.int64)
        end = np.full(len(key.plan.vertices), base, dtype=np.int64)
        inside = np.flatnonzero(~found.crosses).tolist()
        for edge in inside:
            source, destination = found.source[edge], found.destination[edge]
            for part in range(parts):
                for place, rank in ((self.data, destination), (self.credit, source)):
                    place[edge, part] = end[rank]
                    end[rank] += FLAG_BYTES
        for edge in inside:
            if found.star[edge] < 0:
                length, rank = int(found.slots[edge]) * stride, self.home(edge)
                self.slots[edge] = end[rank] + length * np.arange(parts)
                end[rank] += length * parts
        for star in range(self.stars):
            edges = np.flatnonzero(found.star == star)
            length = int(found.slots[edges[0]]) * stride
            self.slots[edges] = end.max() + length * np.arange(parts)
            end[:] = end.max() + length * parts
        self.nbytes = int(end.max(initial=base)) - base

    def home(self, edge: int) -> int:
        """Return the rank whose arena has the slots of an edge."""
        return int((self.steps.source if self.pulled[edge] else self.steps.destination)[edge])

    @property
    def most_ends(self) -> int:
        """Return the most ends of a step, of which the kernel takes `MOST_ENDS`."""
        return max((len(step.arrivals) + len(step.departures) for step in self.steps.steps), default=0)

    @property
    def numbers(self) -> int:
        """Return how many counters each rank keeps, zeroed at first: the chunks that each of its ends has seen."""
        return 2 * self.data.size

    def tables(
        self, table: TransferTable, memory: RankArrays[Any], itemsize: int, *, direct: bool = False
    ) -> KernelTables:
        """Return the tables of one rank; the arrays of `memory` themselves are not read.

        The chunks of `table` are the longest that are possible. `direct`: the results of all ranks begin at the same
        offset of their arenas.
        """
        return _KernelTablesBuilder(self, table, memory, itemsize, direct=direct and self.whole).build()


@lru_cache(maxsize=64)
def clock_of(key: PlanKey) -> WindowsClock:
    """Return the model of a plan's times, by which its kernels are cut."""
    return WindowsClock(key.plan, costs_of(key.plan.topology)[0])


@lru_cache(maxsize=64)
def sliced_clock_of(key: PlanKey, domains: tuple[int, ...], apart: frozenset[tuple[int, int]]) -> SlicedClock:
    """Return the model of a plan over several domains, by which its buffers are cut into slices."""
    return SlicedClock(key.plan, domains, apart)


def _longest_step(key: PlanKey, found: ForestSteps) -> float:
    """Return the longest step's part of its rank's work in a kernel."""
    work: dict[tuple[int, int], list[float]] = {}
    for step in found.steps:
        ends = len(step.arrivals) + len(step.departures)
        work.setdefault((step.rank, step.phase), []).append(ends * float(key.plan.shards[step.shard].share))
    return max((max(one) / sum(one) for one in work.values() if sum(one)), default=0.0)


Buffer = tuple[int, int]
"""A buffer of a rank, and the element of the collective that it begins with."""


class _KernelTablesBuilder:
    """Builds the tables of one rank."""

    def __init__(
        self, plan: KernelPlan, table: TransferTable, memory: RankArrays[Any], itemsize: int, *, direct: bool
    ) -> None:
        self._plan = plan
        self._found = plan.steps
        self._memory = memory
        self._direct = direct
        self._bounds: list[int] = table.bounds.tolist()
        self._longest = min(table.chunk_elements, plan.stride // itemsize // ALIGNMENT * ALIGNMENT)
        nbytes, limit = table.count * itemsize, self._longest * itemsize
        self._blocks = min(plan.blocks, most_blocks(nbytes))
        self._parts = min(plan.parts, plan.wanted_parts(self._blocks))
        settings = np.array([[self._blocks], [self._parts], [limit]])
        self._slices = plan.slices(nbytes, self._blocks, limit)
        self._pieces = int(plan.clock.pieces(-(-nbytes // self._slices), settings)[0])
        self._itemsize = itemsize
        # the rows of chunk 0, without empty shards
        _, firsts = np.unique(self._found.row, return_index=True)
        rows = np.cumsum(np.diff(table.bounds)[self._found.shard[firsts]] > 0) - 1
        self._row = rows[self._found.row]
        self._room: dict[tuple[str, int], Buffer] = {}
        self._length = 0
        self._values: dict[int, Buffer] = {}  # where the value of a step is after it
        count = plan.phases * self._slices
        self._messages: list[list[tuple[int, KernelMessage]]] = [[] for _ in range(count)]

    def build(self) -> KernelTables:
        pieces: list[list[tuple[ForestStep, int]]] = [[] for _ in self._messages]
        rows: list[list[tuple[int, ...]]] = [[] for _ in self._messages]
        ends: list[list[tuple[int, ...]]] = [[] for _ in self._messages]
        for step in self._found.steps:
            if step.rank != self._memory.rank or self._bounds[step.shard] == self._bounds[step.shard + 1]:
                continue
            fixed, arrivals, departures = self._step(step)
            if not arrivals and not departures:
                continue
            for cut, part in product(range(self._slices), range(self._parts)):
                size, (own, kept, *rest) = self._size(step, cut, part), fixed
                if not size[-1]:
                    continue
                place = step.phase * self._slices + cut
                here = ends[place]
                counts = (len(here), len(arrivals), len(departures))
                rows[place].append((*size, *own, *kept, rest[0], *counts, *rest[1:]))
                pieces[place].append((step, part))
                here += [self._end(edge, cut, part, arrives=True) for edge in arrivals]
                here += [self._end(edge, cut, part, arrives=False) for edge in departures]
        phases = []
        for place, (mine, steps, of_steps, messages) in enumerate(
            zip(pieces, rows, ends, self._messages, strict=True)
        ):
            blocks, dealt, order = _dealt_to_blocks(
                mine, np.array(steps, dtype=STEP), self._blocks, self._itemsize
            )
            moved = tuple(message for _, message in sorted(messages, key=lambda one: one[0]))
            rows_of_ends = np.array(of_steps, dtype=END)[order]
            phases.append(KernelPhase(blocks, dealt, rows_of_ends, moved, place % self._slices))
        return KernelTables(tuple(phases), self._length)

    def _step(self, step: ForestStep) -> tuple[tuple[Any, ...], list[int], list[int]]:
        """Return what all parts of a step have in common, and its ends in the kernel."""
        found, crosses = self._found, self._found.crosses
        start, stop = self._bounds[step.shard : step.shard + 2]
        result = (RESULT, self._memory.block[0]) if self._memory.holds(start, stop) else None
        final = step.last and result is not None and bool(step.arrivals)
        arrivals, departures = step.arrivals, [edge for edge in step.departures if not crosses[edge]]
        own = {
            GIVEN: (GIVEN, start - place_in(self._memory.given, start)),
            KEPT: self._values.get(id(step.behind), NO_BUFFER),
            NOWHERE: NO_BUFFER,
        }[step.own]
        kept = NO_BUFFER
        if step.own == NOWHERE and crosses[arrivals[0]]:
            # the step only forwards a message
            own = (
                result if final and result is not None else self._placed("message", arrivals[0], start, stop)
            )
            self._message(arrivals[0], own, sends=False)
            arrivals, value = [], own
        elif not arrivals:
            value = own
        elif self._is_direct(step):
            value = (RESULT, self._memory.block[0])
        else:
            if final or (step.keeps and result is not None):
                assert result is not None, "only then is it final"
                kept = result
            elif step.keeps or len(departures) < len(step.departures):
                kept = self._placed("sum", step.shard, start, stop)
            for edge in arrivals:
                if crosses[edge]:
                    self._message(edge, self._placed("message", edge, start, stop), sends=False)
            value = kept
        self._values[id(step)] = value
        for edge in step.departures:
            if crosses[edge]:
                self._message(edge, value, sends=True)
        direct = self._direct and any(
            self._is_direct(found.receivers[edge]) for edge in (*arrivals, *departures)
        )
        divides = step.completes or (final and step.stage != NOWHERE)
        switched = bool((found.star[arrivals + departures] >= 0).any())
        return (own, kept, divides, direct, step.gathers, step.spreads, switched), arrivals, departures

    def _is_direct(self, step: ForestStep) -> bool:
        """Return whether the arrivals of a step are its rank's result already."""
        return (
            self._direct
            and step.own == NOWHERE
            and step.last
            and not step.gathers
            and not self._found.crosses[step.arrivals[0]]
            and self._found.star[step.arrivals[0]] < 0
            and not self._plan.pulled[step.arrivals[0]]
        )

    def _placed(self, what: str, number: int, start: int, stop: int) -> Buffer:
        """Return where in the room the elements of a shard lie."""
        if (what, number) not in self._room:
            self._room[what, number] = (KEPT, start - self._length)
            self._length += -(-(stop - start) // ALIGNMENT) * ALIGNMENT
        return self._room[what, number]

    def _message(self, edge: int, place: Buffer, *, sends: bool) -> None:
        peer = int((self._found.destination if sends else self._found.source)[edge])
        first = self._found.senders[edge].phase * self._slices
        for cut in range(self._slices):
            start, stop = self._slice(int(self._found.shard[edge]), cut)
            if start < stop:
                message = KernelMessage(sends, peer, place[0], start - place[1], stop - start)
                self._messages[first + cut].append((edge, message))

    def _slice(self, shard: int, cut: int) -> tuple[int, int]:
        """Return the elements of a shard that belong to a slice."""
        start, stop = self._bounds[shard : shard + 2]
        length, unit = stop - start, self._slices * ALIGNMENT
        first, last = (start + min(-(-length * one // unit) * ALIGNMENT, length) for one in (cut, cut + 1))
        return first, last

    def _size(self, step: ForestStep, cut: int, part: int) -> tuple[int, ...]:
        start, stop = self._slice(step.shard, cut)
        piece = -(-(stop - start) // (self._pieces * self._parts * ALIGNMENT)) * ALIGNMENT
        chunk = min(max(piece, LEAST_CHUNK // self._itemsize), self._longest)
        chunks = max(-(-(-(-(stop - start) // chunk) - part) // self._parts), 0)
        return step.level, start, stop, chunk, part, self._parts, chunks

    def _end(self, edge: int, cut: int, part: int, *, arrives: bool) -> tuple[int, ...]:
        plan, found = self._plan, self._found
        source, destination = int(found.source[edge]), int(found.destination[edge])
        peer, home = (source if arrives else destination), plan.home(edge)
        slots, count = int(plan.slots[edge, part]), int(found.slots[edge])
        if found.receivers[edge].gathers:
            home = source
        elif found.crosses[edge]:
            slots = self._slice(int(found.shard[edge]), cut)[0] - self._room["message", edge][1]
            count = STAGED
        elif self._is_direct(found.receivers[edge]):
            slots, count = 0, DIRECT
        number = (2 * edge + arrives) * plan.parts + part
        data, credit = int(plan.data[edge, part]), int(plan.credit[edge, part])
        return peer, home, slots, count, plan.stride, data, credit, number, int(self._row[edge])


def _dealt_to_blocks(
    pieces: list[tuple[ForestStep, int]], rows: NDArray[np.void], blocks: int, itemsize: int
) -> tuple[NDArray[np.int64], NDArray[np.void], NDArray[np.int64]]:
    """Deal steps to blocks, the most work first to the least loaded block; steps that continue a sum stay with it.

    Returns the limits of the blocks, the steps in their order, and the order in which the ends follow the steps.
    """
    chains: dict[tuple[int, int], list[int]] = {}
    head: dict[int, int] = {}
    for number, (step, part) in enumerate(pieces):
        first = head.get(id(step.behind), id(step))
        head[id(step)] = first
        chains.setdefault((first, part), []).append(number)
    chunk = np.minimum(rows["chunk"], rows["stop"] - rows["start"]) * itemsize
    each = rows["chunks"] * (HOP_BYTES + (rows["arrivals"] + rows["departures"]) * chunk)
    work = {chain: int(each[numbers].sum()) for chain, numbers in chains.items()}
    heap = [(0, block) for block in range(min(blocks, len(chains)))]
    heapify(heap)
    mine: list[list[int]] = [[] for _ in heap]
    for chain in sorted(chains, key=lambda chain: (-work[chain], chains[chain])):
        load, block = heap[0]
        mine[block] += chains[chain]
        heapreplace(heap, (load + work[chain], block))
    order = [number for numbers in mine for number in sorted(numbers, key=lambda n: (rows["level"][n], n))]
    limits = np.cumsum([0, *(len(numbers) for numbers in mine)])
    dealt = rows[order]
    counts = dealt["arrivals"] + dealt["departures"]
    firsts = np.cumsum(counts) - counts
    ends = np.repeat(dealt["first"] - firsts, counts) + np.arange(counts.sum())
    dealt["first"] = firsts
    return limits, dealt, ends
