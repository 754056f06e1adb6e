"""A rank's part in the collectives of a plan as tables for the one kernel that runs it (`kernels/forest.cu`).

A *step* of a rank joins what arrives over some tree edges of a shard, and writes the sum on over others: a leaf of a
tree has one that sends what the rank gives, an inner rank one that adds its children and sends on, and so on. An *end*
is a tree edge seen from one of its ranks. Data crosses an edge through slots in the arena of the rank that it leads to.
Steps have *parts*, which take the chunks of the shard in turns.

Deadlock cannot be: chunk c of a step has its turn in round c + level, and every block of every rank takes its steps in
the order of rounds. What a step waits for, data of lower levels or a free slot, has an earlier round: an edge has more
slots than its data skips levels. So steps can be dealt out to blocks in any way, as long as the GPUs have all blocks of
all ranks at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heapify, heapreplace

import numpy as np
from numpy.typing import NDArray

from collectives.backends.backend import RankArrays
from collectives.lowering.dependencies import PlanKey, pattern_of
from collectives.lowering.transfer_table import TransferTable
from topoplan.plans.tree import ALIGNMENT

GIVEN, RESULT, KEPT, NOWHERE = 0, 1, 2, -1
"""Buffers of a rank, as the kernel numbers them: what it gives, its result, and room for sums that it needs again."""

FLAG_BYTES = 128
"""From flag to flag: each has a line of the cache to itself."""

SPARE_SLOTS = 2
"""Slots of an edge besides one for each level that its data skips."""

PIECES, LEAST_CHUNK = 8, 8 << 10
"""A part of a shard has this many chunks, for a pipeline, but shorter ones than so many bytes leave threads idle."""

MOST_ENDS, DEPTH = 256, 4
"""Ends of a step, and sums that wait for another one in a small collective; as in ``forest.cu``."""

TAKE, JOIN_ONE, JOIN_BOTH = range(3)
"""What a small collective does next with a rank's contribution: go on from it, with the sum so far set aside; join it
to the sum; or join the sum to the one that was set aside last."""

STEP = np.dtype(
    [
        (name, np.int64)
        for name in (
            *("level", "start", "stop", "chunk", "part", "parts", "own", "own_first", "kept", "kept_first"),
            *("final", "first", "arrivals", "departures"),
        )
    ]
)
END = np.dtype(
    [(name, np.int64) for name in ("peer", "slots", "count", "stride", "data", "credit", "sent", "row")]
)
"""Rows of the tables; what they mean stands in ``forest.cu``."""


@dataclass(slots=True)
class _Step:
    """A step of a rank; edges by their number in the plan's pattern."""

    rank: int
    shard: int
    own: int
    level: int = 0
    arrivals: list[int] = field(default_factory=list)
    departures: list[int] = field(default_factory=list)
    stage: int = NOWHERE  # in which it adds
    behind: _Step | None = None  # whose sum it goes on from
    keeps: bool = False  # another step goes on from its sum
    last: bool = True  # of its rank and shard


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """What all ranks do in a plan.

    Parameters
    ----------
    steps : tuple of _Step
        In an order in which data can run through them.
    source, destination, shard : (E,) array
        Ranks and shards of the plan's edges.
    slots : (E,) array
        How many each edge has.
    senders : tuple of _Step
        The step from which the data of each edge comes.
    """

    steps: tuple[_Step, ...]
    source: NDArray[np.int32]
    destination: NDArray[np.int32]
    shard: NDArray[np.int32]
    slots: NDArray[np.int64]
    senders: tuple[_Step, ...]


@lru_cache(maxsize=64)
def steps_of(key: PlanKey) -> Steps:
    """The steps of a plan's ranks; those of the last 64 plans are kept.

    Examples
    --------
    >>> import topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[1, 4, 5, 7])
    >>> steps = steps_of(PlanKey(plan.digest, plan)).steps
    >>> [(step.shard, step.level, len(step.arrivals), len(step.departures)) for step in steps if step.rank == 1]
    [(0, 2, 2, 2), (1, 0, 0, 1), (1, 4, 1, 0)]
    """
    pattern = pattern_of(key)
    made: list[_Step] = []
    latest: dict[tuple[int, int], _Step] = {}
    sender: list[_Step] = []
    receiver: list[_Step] = []

    def new(rank: int, shard: int, own: int) -> _Step:
        step = _Step(rank, shard, own)
        earlier = latest.get((rank, shard))
        if earlier is not None:
            earlier.last = False
        made.append(step)
        latest[rank, shard] = step
        return step

    columns = (pattern.source, pattern.destination, pattern.shard, pattern.stage, pattern.add)
    for edge, (source, destination, shard, stage, add) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        sends = latest.get((source, shard)) or new(source, shard, GIVEN)
        sends.departures.append(edge)
        before = latest.get((destination, shard))
        if before is not None and add and before.stage == stage:
            takes = before
        else:
            takes = new(destination, shard, GIVEN if add else NOWHERE)
            if add:
                takes.stage = stage
                if before is not None and before.arrivals:
                    before.keeps, takes.behind, takes.own = True, before, KEPT
                    takes.level = before.level + 1
        takes.arrivals.append(edge)
        takes.level = max(takes.level, sends.level + 1)
        sender.append(sends)
        receiver.append(takes)
    skipped = [takes.level - sends.level for sends, takes in zip(sender, receiver, strict=True)]
    slots = np.array(skipped, dtype=np.int64) + SPARE_SLOTS
    return Steps(tuple(made), pattern.source, pattern.destination, pattern.shard, slots, tuple(sender))


@lru_cache(maxsize=64)
def order_of(key: PlanKey) -> tuple[tuple[tuple[int, int], ...], ...] | None:
    """For each shard of an allreduce in which order contributions are joined: ranks, and what is done with each.

    None for other collectives, and where more sums than `DEPTH` would have to wait.

    Examples
    --------
    Of gpu1, gpu4, gpu5, gpu7 the second adds to its own what the third has with the first, and then the fourth:

    >>> import topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[1, 4, 5, 7])
    >>> order_of(PlanKey(plan.digest, plan))[0]
    ((1, 0), (2, 0), (0, 1), (1, 2), (3, 1))
    """
    if key.plan.collective != "allreduce":
        return None
    steps = steps_of(key)
    orders = []
    for shard in range(len(key.plan.shards)):
        order: list[tuple[int, int]] = []
        _join(steps, next(step for step in steps.steps if step.shard == shard and step.last), order)
        aside = np.cumsum([{TAKE: 1, JOIN_ONE: 0, JOIN_BOTH: -1}[action] for _, action in order]) - 1
        if aside.max() > DEPTH:
            return None
        orders.append(tuple(order))
    return tuple(orders)


def _join(steps: Steps, step: _Step, order: list[tuple[int, int]]) -> None:
    """Write down in which order the sum of a step comes about."""
    if step.behind is not None:
        _join(steps, step.behind, order)
    elif step.own == GIVEN:
        order.append((step.rank, TAKE))
    for edge in step.arrivals:
        sender = steps.senders[edge]
        if step.own == NOWHERE:
            _join(steps, sender, order)
        elif sender.arrivals:
            _join(steps, sender, order)
            order.append((step.rank, JOIN_BOTH))
        else:
            order.append((sender.rank, JOIN_ONE))


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """What a rank's kernel is told.

    Parameters
    ----------
    blocks : (B + 1,) int64
    steps : (S,) array of `STEP`
    ends : (E,) array of `END`
    kept : int
        Elements of the room for sums that are needed again.
    """

    blocks: NDArray[np.int64]
    steps: NDArray[np.void]
    ends: NDArray[np.void]
    kept: int


class KernelPlan:
    """A plan with its place in the arenas, which it has for as long as these live.

    It is the same on all ranks.

    Parameters
    ----------
    key : PlanKey
    base : int
        Where its place begins in every arena, a multiple of `FLAG_BYTES`.
    stride : int
        Bytes of a slot, a multiple of `FLAG_BYTES`, and of `ALIGNMENT` elements of 16 bytes at least.
    blocks : int
        Of the kernel, at most.

    Attributes
    ----------
    nbytes : int
        That it takes in every arena. They must be zero where it has never run.
    """

    def __init__(self, key: PlanKey, *, base: int, stride: int, blocks: int) -> None:
        self._steps = steps_of(key)
        self._stride = stride
        self._blocks = blocks
        count = np.zeros(len(key.plan.ranks), dtype=np.int64)
        for step in self._steps.steps:
            count[step.rank] += 1
        self._parts = max(1, blocks // max(int(count.max(initial=1)), 1))
        edges = len(self._steps.slots)
        end = np.full(len(count), base, dtype=np.int64)
        self._data, self._credit, self._slots = np.zeros((3, edges, self._parts), dtype=np.int64)
        for edge, (source, destination) in enumerate(
            zip(self._steps.source.tolist(), self._steps.destination.tolist(), strict=True)
        ):
            for part in range(self._parts):
                self._data[edge, part], self._credit[edge, part] = end[destination], end[source]
                end[destination] += FLAG_BYTES
                end[source] += FLAG_BYTES
        for edge, destination in enumerate(self._steps.destination.tolist()):
            for part in range(self._parts):
                self._slots[edge, part] = end[destination]
                end[destination] += int(self._steps.slots[edge]) * stride
        self.nbytes = int(end.max(initial=base)) - base

    @property
    def most_ends(self) -> int:
        """The most ends of a step, of which the kernel takes `MOST_ENDS`."""
        return max((len(step.arrivals) + len(step.departures) for step in self._steps.steps), default=0)

    @property
    def numbers(self) -> int:
        """How many numbers each rank keeps, zero at first: the chunks that each of its ends has seen."""
        return self._data.size

    def tables(self, table: TransferTable, memory: RankArrays[object], itemsize: int) -> Tables:
        """The tables of one rank.

        Parameters
        ----------
        table : TransferTable
            The plan, lowered; its chunks are the longest that there may be.
        memory : RankArrays
            The arrays themselves are not looked at.
        itemsize : int
            Bytes of an element.
        """
        mine = [step for step in self._steps.steps if step.rank == memory.rank]
        bounds = table.bounds.tolist()
        most = min(table.chunk_elements, self._stride // itemsize // ALIGNMENT * ALIGNMENT)
        # the rows of chunk 0, from which empty shards are left out
        row_of = np.cumsum(np.diff(table.bounds)[self._steps.shard] > 0) - 1
        room: dict[int, int] = {}
        kept = 0
        for step in mine:
            if (
                step.keeps
                and not memory.holds(*bounds[step.shard : step.shard + 2])
                and step.shard not in room
            ):
                room[step.shard] = kept
                kept += bounds[step.shard + 1] - bounds[step.shard]
        pieces = [(step, part) for step in mine for part in range(self._parts)]
        rows: list[tuple[int, ...]] = []
        ends: list[tuple[int, ...]] = []
        for step, part in pieces:
            start, stop = bounds[step.shard : step.shard + 2]
            pieces_long = -(-(stop - start) // (PIECES * self._parts * ALIGNMENT)) * ALIGNMENT
            chunk = min(max(pieces_long, LEAST_CHUNK // itemsize), most)
            holds = memory.holds(start, stop)
            places = {
                GIVEN: (GIVEN, memory.given[0]),
                KEPT: (RESULT, memory.block[0]) if holds else (KEPT, start - room.get(step.shard, 0)),
                NOWHERE: (NOWHERE, 0),
            }
            final = step.last and holds and bool(step.arrivals)
            own, kept_at = places[step.own], places[KEPT if final or step.keeps else NOWHERE]
            counts = (len(step.arrivals), len(step.departures))
            size = (step.level, start, stop, chunk, part, self._parts)
            rows.append((*size, *own, *kept_at, final, len(ends), *counts))
            for edges, peers in (
                (step.arrivals, self._steps.source),
                (step.departures, self._steps.destination),
            ):
                ends += [self._end(edge, part, int(peers[edge]), int(row_of[edge])) for edge in edges]
        blocks, steps = _dealt(pieces, np.array(rows, dtype=STEP), self._blocks)
        return Tables(blocks, steps, np.array(ends, dtype=END), kept)

    def _end(self, edge: int, part: int, peer: int, row: int) -> tuple[int, ...]:
        return (
            peer,
            int(self._slots[edge, part]),
            int(self._steps.slots[edge]),
            self._stride,
            int(self._data[edge, part]),
            int(self._credit[edge, part]),
            edge * self._parts + part,
            row,
        )


def _dealt(
    pieces: list[tuple[_Step, int]], rows: NDArray[np.void], blocks: int
) -> tuple[NDArray[np.int64], NDArray[np.void]]:
    """Deal steps out to blocks, most work first to the block that has least; who goes on from a sum stays with it."""
    chains: dict[tuple[int, int], list[int]] = {}
    head: dict[int, int] = {}
    for number, (step, part) in enumerate(pieces):
        first = head[id(step.behind)] if step.behind is not None else id(step)
        head[id(step)] = first
        chains.setdefault((first, part), []).append(number)
    work = {
        chain: sum(
            (rows["arrivals"][number] + rows["departures"][number] + 1)
            * (rows["stop"][number] - rows["start"][number])
            for number in numbers
        )
        for chain, numbers in chains.items()
    }
    heap = [(0, block) for block in range(min(blocks, len(chains)))]
    heapify(heap)
    mine: list[list[int]] = [[] for _ in heap]
    for chain in sorted(chains, key=lambda chain: (-work[chain], chains[chain])):
        load, block = heap[0]
        mine[block] += chains[chain]
        heapreplace(heap, (load + int(work[chain]), block))
    order = [number for numbers in mine for number in sorted(numbers, key=lambda n: (rows["level"][n], n))]
    limits = np.cumsum([0, *(len(numbers) for numbers in mine)])
    return limits, rows[order]
