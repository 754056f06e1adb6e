"""What one rank does in each global step: which rows it sends, where it puts those that arrive, what it joins.

The rows' steps are those of `wavefront`. A chunk has a *home* at a rank: its place in the result, or a slot of
scratch memory where the rank passes a chunk on that is none of its result. What is stored, and what is the first
to be joined with the rank's own contribution, arrives at home; everything else that is joined arrives in a slot.

Receives may be posted some steps ahead, as soon as their memory is free, so that data is under way while earlier
steps are joined; sends are waited for two steps later, or before their memory is written to.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from collectives.lowering.edge_streams import wavefront
from collectives.lowering.transfer_table import TransferTable
from topoplan.plans.tree import ALIGNMENT

SOURCE, RESULT, SCRATCH = range(3)
"""The three lines of memory that a part can lie in."""

SEND_STEPS = 2
"""Steps after which a send is waited for."""


@dataclass(frozen=True, slots=True)
class Part:
    """Elements of one of the lines of memory."""

    line: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """A row that leaves or reaches this rank."""

    row: int
    peer: int
    part: Part


@dataclass(frozen=True, slots=True)
class Arrival:
    """A row that is there at the end of a step: ``target = own joined with arrived``, or nothing to do."""

    row: int
    peer: int
    own: Part | None
    arrived: Part
    target: Part


@dataclass(frozen=True, slots=True)
class Step:
    """In this order: sends of earlier steps that must have ended, what is posted, and what is waited for."""

    ended: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    sends: tuple[Transfer, ...]
    arrivals: tuple[Arrival, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """The steps of one rank.

    Parameters
    ----------
    steps : tuple of Step
        Those in which this rank takes no part are left out.
    slot : int
        Elements of a slot of scratch memory, which holds the longest row; a multiple of `ALIGNMENT`.
    slots : int
        How many slots there must be.
    """

    steps: tuple[Step, ...]
    slot: int
    slots: int


@lru_cache(maxsize=64)
def program(
    table: TransferTable, rank: int, given: tuple[int, int], block: tuple[int, int], *, ahead: int
) -> Program:
    """The program of a rank; the last 64 are kept.

    Parameters
    ----------
    table : TransferTable
    rank : int
    given, block : (int, int)
        As in `RankArrays`.
    ahead : int
        Steps by which a receive may be posted before its data is sent; 0 for back ends that match the sends and
        receives of one step.

    Notes
    -----
    No deadlock: what a rank waits for in a step was posted by its peer in that step or before, and posting waits
    only for what ended in earlier steps.

    Examples
    --------
    >>> import topoplan
    >>> from collectives import lower
    >>> table = lower(topoplan.plan(topoplan.load("dgx-1v"), "allreduce"), 80000, chunk_elements=100)
    >>> made = program(table, 3, (0, 80000), (0, 80000), ahead=1)
    >>> sum(len(step.sends) for step in made.steps) == int((table.source == 3).sum())
    True
    """
    rows = np.flatnonzero((table.source == rank) | (table.destination == rank))
    plan = _Places(given[0], block, ahead)
    columns = (wavefront(table), table.source, table.destination, table.start, table.stop, table.shard)
    flags = (table.chunk, table.add, table.source_fresh, table.destination_fresh)
    listed = (column[rows].tolist() for column in (*columns, *flags))
    for row, step, source, destination, start, stop, *rest in zip(rows.tolist(), *listed, strict=True):
        shard, chunk, add, source_fresh, destination_fresh = rest
        if source == rank:
            plan.send(step, row, destination, (start, stop), (shard, chunk), source_fresh)
        else:
            fresh = destination_fresh if add else None
            plan.receive(step, row, source, (start, stop), (shard, chunk), fresh)
    longest = int((table.stop - table.start).max(initial=0))
    return plan.program(-(-longest // ALIGNMENT) * ALIGNMENT)


@dataclass(slots=True)
class _Send:
    step: int
    ended: int
    transfer: Transfer


@dataclass(slots=True)
class _Home:
    """The life of a chunk's home: when it is first posted to, free again, and which sends read it."""

    part: Part
    first: int
    free: int
    reads: list[_Send]


class _Places:
    """Gives every row its memory and its steps; rows must come in the order of the table.

    Until `program` numbers the slots, a part in scratch memory is (number of its life, elements).
    """

    def __init__(self, given: int, block: tuple[int, int], ahead: int) -> None:
        self.given = given
        self.block = block
        self.ahead = ahead
        self.sends: list[_Send] = []
        self.receives: list[tuple[int, Transfer]] = []
        self.arrivals: list[tuple[int, Arrival]] = []
        self.homes: dict[tuple[int, int], _Home] = {}
        self.lives: list[tuple[int, int]] = []

    def send(
        self, step: int, row: int, peer: int, elements: tuple[int, int], chunk: tuple[int, int], fresh: bool
    ) -> None:
        """A row that leaves; ``fresh`` if it is this rank's own contribution."""
        part = self._own(elements) if fresh else self.homes[chunk].part
        sent = _Send(step, step + SEND_STEPS, Transfer(row, peer, part))
        self.sends.append(sent)
        if not fresh:
            self.homes[chunk].reads.append(sent)
            self.homes[chunk].free = max(self.homes[chunk].free, step + 1)

    def receive(
        self,
        step: int,
        row: int,
        peer: int,
        elements: tuple[int, int],
        chunk: tuple[int, int],
        fresh: bool | None,
    ) -> None:
        """A row that arrives; ``fresh`` if it is the first that is joined here, None if it is stored."""
        early = max(step - self.ahead, 0)
        home = self.homes.get(chunk)
        if home is None:
            home = self.homes[chunk] = _Home(self._new_home(elements), early, 0, [])
        if fresh is False:
            arrived = self._life(early, step + 1, elements)
            post = early
            written = step
        else:
            arrived = home.part
            post = written = max(early, home.free)
        for sent in home.reads:
            sent.ended = min(sent.ended, written)
        home.free = max(home.free, step + 1)
        own = None if fresh is None else self._own(elements) if fresh else home.part
        self.receives.append((post, Transfer(row, peer, arrived)))
        self.arrivals.append((step, Arrival(row, peer, own, arrived, home.part)))

    def program(self, slot: int) -> Program:
        """Everything in its steps, with slots of so many elements."""
        for home in self.homes.values():
            if home.part.line == SCRATCH:
                used = max((sent.ended for sent in home.reads), default=0)
                self.lives[home.part.start] = (home.first, max(home.free, used))
        numbers = _slots(self.lives)

        def placed(part: Part) -> Part:
            if part.line != SCRATCH:
                return part
            return Part(SCRATCH, numbers[part.start] * slot, numbers[part.start] * slot + part.stop)

        def moved(transfer: Transfer) -> Transfer:
            return Transfer(transfer.row, transfer.peer, placed(transfer.part))

        length = 1 + max(
            [sent.ended for sent in self.sends] + [step for step, _ in self.arrivals], default=-1
        )
        ended, receives, sends = ([list[Transfer]() for _ in range(length)] for _ in range(3))
        arrivals = [list[Arrival]() for _ in range(length)]
        for sent in self.sends:
            sends[sent.step].append(moved(sent.transfer))
            ended[sent.ended].append(moved(sent.transfer))
        for step, transfer in self.receives:
            receives[step].append(moved(transfer))
        for step, arrival in self.arrivals:
            own = None if arrival.own is None else placed(arrival.own)
            parts = (own, placed(arrival.arrived), placed(arrival.target))
            arrivals[step].append(Arrival(arrival.row, arrival.peer, *parts))
        columns = zip(ended, receives, sends, arrivals, strict=True)
        steps = (Step(tuple(a), tuple(b), tuple(c), tuple(d)) for a, b, c, d in columns)
        busy = tuple(step for step in steps if any((step.ended, step.receives, step.sends, step.arrivals)))
        return Program(busy, slot, 1 + max(numbers, default=-1))

    def _own(self, elements: tuple[int, int]) -> Part:
        return Part(SOURCE, elements[0] - self.given, elements[1] - self.given)

    def _new_home(self, elements: tuple[int, int]) -> Part:
        if self.block[0] <= elements[0] and elements[1] <= self.block[1]:
            return Part(RESULT, elements[0] - self.block[0], elements[1] - self.block[0])
        return self._life(0, 0, elements)

    def _life(self, first: int, free: int, elements: tuple[int, int]) -> Part:
        self.lives.append((first, free))
        return Part(SCRATCH, len(self.lives) - 1, elements[1] - elements[0])


def _slots(lives: list[tuple[int, int]]) -> list[int]:
    """A slot for every life, given as (first step, first step after), so that no two share one at a time.

    Examples
    --------
    >>> _slots([(0, 2), (1, 3), (2, 4)])
    [0, 1, 0]
    """
    numbers = [0] * len(lives)
    taken: list[tuple[int, int]] = []
    idle: list[int] = []
    count = 0
    for life in sorted(range(len(lives)), key=lambda life: lives[life]):
        first, free = lives[life]
        while taken and taken[0][0] <= first:
            heapq.heappush(idle, heapq.heappop(taken)[1])
        if idle:
            numbers[life] = heapq.heappop(idle)
        else:
            numbers[life] = count
            count += 1
        heapq.heappush(taken, (free, numbers[life]))
    return numbers
