"""Runs a program on exact integers: thread blocks as coroutines, in an order drawn by a seed.

Every input cell begins as a random number of 64 bits, and sums wrap around, so that a wrong sum equals the right one
with a chance of 2^-64. In between, what hardware leaves open is drawn: which block goes next (uniformly, or by
priorities that seldom change, which starves some blocks for long), when each rank's kernel begins, when the proxy of a
port channel does what it was handed, and when a thread that nothing holds back is at the end of its part: a move may be
late, and a wait not yet over, until the block's next ``Sync``. Moves read first and write later.

A rank's input and output are its caller's before its kernel begins and after it ends; nobody else may touch them then.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Hashable
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import PlanError
from topoplan.interpreters.program import (
    Barrier,
    Block,
    Fifo,
    Flush,
    Move,
    Post,
    Program,
    Region,
    Signal,
    Sync,
    Wait,
)

Numbers = NDArray[np.uint64]
_Steps = Generator[tuple[Hashable, str] | None, None, None]
"""A coroutine: yields what it waits for to change and where it stands, or None where it only lets others go first."""

_PLAIN, _PACKET = 1, 2

MOST_STEPS = 20_000_000
"""Steps after which a run is given up."""


class Memory:
    """The buffers of all ranks: a number for each cell, and whether and how it was written."""

    def __init__(self, program: Program, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self._program = program
        self._values: dict[tuple[int, str], Numbers] = {}
        self._states: dict[tuple[int, str], NDArray[np.uint8]] = {}
        for address, size in sorted(program.sizes.items()):
            if address not in program.aliases:
                self._values[address] = np.zeros(size, dtype=np.uint64)
                self._states[address] = np.zeros(size, dtype=np.uint8)
        self.inputs: list[Numbers] = []
        for rank in range(program.ranks):
            size = program.sizes[rank, "i"]
            self.inputs.append(draw.integers(0, 1 << 64, size, dtype=np.uint64))
            values, states = self.view(Region(rank, "i", 0, size))
            values[:] = self.inputs[rank]
            states[:] = _PLAIN

    def view(self, region: Region) -> tuple[Numbers, NDArray[np.uint8]]:
        """Numbers and states of a region."""
        address = (region.rank, region.buffer)
        buffer, offset = self._program.aliases.get(address, (region.buffer, 0))
        start = region.start + offset
        own = (region.rank, buffer)
        return (
            self._values[own][start : start + region.size],
            self._states[own][start : start + region.size],
        )


class Machine:
    """One run of a program.

    Parameters
    ----------
    program : Program
    seed : int
        Of the numbers and of the order.
    """

    def __init__(self, program: Program, seed: int) -> None:
        self.program = program
        self.memory = Memory(program, seed)
        self._draw = np.random.default_rng([seed, 1])
        self._change = 1.0 if seed % 2 == 0 else 0.02
        self._counters = {number: first for number, (first, _) in program.counters.items()}
        self._begun = [False] * program.ranks
        self._left = [sum(block.rank == rank for block in program.blocks) for rank in range(program.ranks)]
        self._arrived: dict[tuple[int, int], int] = {}
        self._handed: dict[int, list[tuple[Move | Signal, str, int]]] = {}
        self._held: dict[int, list[Numbers]] = {number: [] for number in program.fifos}
        self._asleep: dict[Hashable, list[int]] = {}
        self._ready: list[tuple[float, int]] = []
        self._tasks: dict[int, _Steps] = {}
        self._made = 0
        self._servants: set[int] = set()
        self._waiting: dict[int, str] = {}

    def run(self) -> Memory:
        """The buffers at the end.

        Raises
        ------
        PlanError
            A block waits for ever, a read finds nothing, a buffer is touched out of turn, a signal is left over; names
            rank, block and operation.
        """
        for rank in range(self.program.ranks):
            self._start(self._begin(rank))
        for block in self.program.blocks:
            self._start(self._block(block))
        for channel in self.program.proxies:
            self._start(self._proxy(channel), serves=True)
        steps = 0
        while self._ready:
            priority, number = heapq.heappop(self._ready)
            try:
                wanted = next(self._tasks[number])
            except StopIteration:
                del self._tasks[number]
                continue
            if wanted is None:
                if self._draw.random() < self._change:
                    priority = self._draw.random()
                heapq.heappush(self._ready, (priority, number))
            else:
                key, self._waiting[number] = wanted
                self._asleep.setdefault(key, []).append(number)
            steps += 1
            if steps > MOST_STEPS:
                raise PlanError(f"does not end within {MOST_STEPS} steps")
        self._check_end()
        return self.memory

    def _start(self, task: _Steps, *, serves: bool = False) -> None:
        number = self._made
        self._made += 1
        self._tasks[number] = task
        if serves:
            self._servants.add(number)
        heapq.heappush(self._ready, (self._draw.random(), number))

    def _wake(self, key: Hashable) -> None:
        for number in self._asleep.pop(key, ()):
            heapq.heappush(self._ready, (self._draw.random(), number))

    def _begin(self, rank: int) -> _Steps:
        """The kernel of a rank begins some time after others."""
        yield None
        self._begun[rank] = True
        self._wake(("begin", rank))

    def _block(self, block: Block) -> _Steps:
        rank = block.rank
        if not self._begun[rank]:
            yield ("begin", rank), "its kernel"
        owed: list[tuple[int, int, str]] = []
        late: list[tuple[Move, str]] = []
        for instruction, where in block.unrolled():
            match instruction:
                case Sync():
                    yield from self._settle(owed, late, rank)
                case Barrier():
                    yield from self._settle(owed, late, rank)
                    yield from self._meet(rank, instruction, where)
                case Wait():
                    owed += [(thread, counter, where) for thread, counter in enumerate(instruction.counters)]
                case Signal():
                    for thread, counter in enumerate(instruction.counters):
                        yield from self._settle_thread(owed, thread)
                        self._add(counter)
                case Post():
                    yield from self._settle_thread(owed, instruction.thread)
                    queue = self._handed.setdefault(instruction.channel, [])
                    queue.append((instruction.what, where, rank))
                    self._wake(("proxy", instruction.channel))
                case Flush():
                    for thread, channel in enumerate(instruction.channels):
                        yield from self._settle_thread(owed, thread)
                        while self._handed.get(channel):
                            yield ("idle", channel), where
                case Move():
                    if instruction.waits or instruction.marks:
                        yield from self._catch_up(late, rank)
                        yield from self._move(instruction, where, rank)
                    else:
                        late.append((instruction, where))
            yield None
            if late and self._draw.random() < 0.5:
                yield from self._catch_up(late, rank)
        yield from self._settle(owed, late, rank)
        self._left[rank] -= 1

    def _settle(self, owed: list[tuple[int, int, str]], late: list[tuple[Move, str]], rank: int) -> _Steps:
        """All threads arrive: the waits are over and the moves done."""
        # a move that no sync holds back behind a wait is not held back by it here
        yield from self._catch_up(late, rank)
        for _, counter, where in owed:
            yield from self._take(counter, where)
        owed.clear()

    def _settle_thread(self, owed: list[tuple[int, int, str]], thread: int) -> _Steps:
        """One thread has ended its waits."""
        for item in [item for item in owed if item[0] == thread]:
            yield from self._take(item[1], item[2])
            owed.remove(item)

    def _take(self, counter: int, where: str) -> _Steps:
        while self._counters[counter] == 0:
            yield ("counter", counter), f"{where}, which waits for {self.program.counters[counter][1]}"
        self._counters[counter] -= 1

    def _add(self, counter: int) -> None:
        self._counters[counter] += 1
        self._wake(("counter", counter))

    def _meet(self, rank: int, barrier: Barrier, where: str) -> _Steps:
        key = (rank, barrier.number)
        before = self._arrived.get(key, 0)
        self._arrived[key] = before + 1
        full = (before // barrier.blocks + 1) * barrier.blocks
        self._wake(("barrier", key))
        while self._arrived[key] < full:
            yield ("barrier", key), where

    def _proxy(self, channel: int) -> _Steps:
        """Does what a port channel is handed, one after another, some time later."""
        while True:
            queue = self._handed.get(channel)
            if not queue:
                yield ("proxy", channel), "nothing"
                continue
            what, where, rank = queue[0]
            yield None
            if isinstance(what, Signal):
                for counter in what.counters:
                    self._add(counter)
            else:
                yield from self._move(what, where, rank)
            queue.pop(0)
            if not queue:
                self._wake(("idle", channel))

    def _catch_up(self, late: list[tuple[Move, str]], rank: int) -> _Steps:
        while late:
            move, where = late[0]
            yield from self._move(move, where, rank)
            late.pop(0)

    def _move(self, move: Move, where: str, rank: int) -> _Steps:
        total: Numbers | None = None
        for number, place in enumerate(move.reads):
            if isinstance(place, Fifo):
                held = self._held[place.number]
                while not held:
                    yield ("fifo", place.number), f"{where}, to which nothing comes"
                values = held.pop(0)
                self._wake(("fifo", place.number))
                wanted = next(one.size for one in (*move.reads, *move.writes) if isinstance(one, Region))
                if values.size != wanted:
                    _refuse(where, f"receives {wanted} cells at once, where {values.size} are sent")
            elif not place.size:
                return
            else:
                values, states = self.memory.view(place)
                self._check_alive(place, rank, where)
                if move.waits and move.waits[number]:
                    while not (states == _PACKET).all():
                        what = f"{where}, which waits for packets in {_named(place)}"
                        yield ("cells", place.rank, place.buffer), what
                elif not (states == _PLAIN).all():
                    found = "packets" if (states == _PACKET).any() else "what nobody has written yet"
                    _refuse(where, f"reads {found} in {_named(place)}")
            total = values.copy() if total is None else total + values
        if total is None:
            return
        yield None
        for number, place in enumerate(move.writes):
            if isinstance(place, Fifo):
                held = self._held[place.number]
                while len(held) >= self.program.fifos[place.number][1]:
                    yield ("fifo", place.number), f"{where}, from which nothing is taken"
                held.append(total)
                self._wake(("fifo", place.number))
                continue
            self._check_alive(place, rank, where)
            values, states = self.memory.view(place)
            values[:] = total
            marked = bool(move.marks) and move.marks[number]
            states[:] = _PACKET if marked else _PLAIN
            if marked:
                self._wake(("cells", place.rank, place.buffer))

    def _check_alive(self, region: Region, rank: int, where: str) -> None:
        """Refuse to touch what belongs to a caller at the time."""
        if region.buffer == "s":
            return
        if not self._begun[region.rank]:
            _refuse(where, f"touches the {_named(region)} before its kernel may have begun")
        if not self._left[region.rank]:
            _refuse(where, f"touches the {_named(region)} when its kernel may have ended")

    def _check_end(self) -> None:
        """Nothing waits, and nothing is left for the next call."""
        stuck = [number for number in sorted(self._tasks) if number not in self._servants]
        if stuck:
            others = f"; so do {len(stuck) - 1} more blocks" if len(stuck) > 1 else ""
            raise PlanError(f"{self._waiting[stuck[0]]}, waits for ever{others}")
        for number, held in sorted(self._held.items()):
            if held:
                raise PlanError(
                    f"{len(held)} chunks that are sent to gpu {self.program.fifos[number][0]} are never received"
                )
        for number, (first, name) in sorted(self.program.counters.items()):
            left = self._counters[number] - first
            if left:
                what = f"{left} more" if left > 0 else f"{-left} fewer"
                raise PlanError(
                    f"{name} is sent {what} times than it is waited for; the next call would take it"
                )


def _named(region: Region) -> str:
    names = {"i": "input", "o": "output", "s": "scratch"}
    return f"{names[region.buffer]} of gpu {region.rank}"


def _refuse(where: str, fault: str) -> NoReturn:
    raise PlanError(f"{where}: {fault}")
