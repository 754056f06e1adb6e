"""Run the program of an engine file on exact integers, thread blocks interleaved at random by a seed.

A program has ranks, buffers counted in cells (the smallest piece that an instruction moves) and instructions of thread
blocks; all engines share this form. Nothing is shared with the writers of such files.

Each input cell is a random 64-bit number and sums wrap around, so a wrong sum is right with probability 2^-64. The seed
draws the freedom of the hardware: the next block (uniform, or by priorities that starve some blocks), the start of each
kernel, the delay of port-channel proxies, and the end of a thread's part: a move may be late and a wait unfinished
until the block's next ``Sync``. Moves read first and write later. A rank's input and output belong to its caller before
its kernel begins and after it ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import PlanError

Address = tuple[int, str]
"""A rank and a buffer of it: ``i`` input, ``o`` output, ``s`` scratch."""


@dataclass(frozen=True, slots=True)
class CellRegion:
    """Cells of a buffer."""

    rank: int
    buffer: str
    start: int
    size: int

    def turn(self, number: int, unit: int) -> CellRegion:
        """Return the part that a turn of a loop moves."""
        begin = min(number * unit, self.size)
        return replace(self, start=self.start + begin, size=min(unit, self.size - begin))


@dataclass(frozen=True, slots=True)
class Fifo:
    """A connection between two ranks: first in, first out, of limited capacity."""

    number: int

    def turn(self, number: int, unit: int) -> Fifo:
        return self


@dataclass(frozen=True, slots=True)
class Sync:
    """All threads of the block arrive before any continues."""


@dataclass(frozen=True, slots=True)
class Barrier:
    """So many blocks of the rank arrive before any continues."""

    number: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Signal:
    """Add one to each of some counters, each by its own thread."""

    counters: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Take one from each of some counters when it is available, each by its own thread."""

    counters: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """Add up the reads, element by element, and write the sum to each of some regions.

    ``waits``: for each read whether its elements announce themselves, as packets do. ``marks``: for each write whether
    elements are written as packets. ``by_switch``: a switch reads, adds or copies for it.
    """

    reads: tuple[CellRegion | Fifo, ...]
    writes: tuple[CellRegion | Fifo, ...]
    waits: tuple[bool, ...] = ()
    marks: tuple[bool, ...] = ()
    by_switch: bool = False

    def turn(self, number: int, unit: int) -> Move:
        return replace(
            self,
            reads=tuple(place.turn(number, unit) for place in self.reads),
            writes=tuple(place.turn(number, unit) for place in self.writes),
        )


@dataclass(frozen=True, slots=True)
class Post:
    """Enqueue a move or a signal of one thread at the proxy of a channel, which runs its queue in order, later."""

    channel: int
    thread: int
    action: Move | Signal

    def turn(self, number: int, unit: int) -> Post:
        return replace(self, action=self.action.turn(number, unit)) if isinstance(self.action, Move) else self


@dataclass(frozen=True, slots=True)
class Flush:
    """Wait until the proxies of some channels have finished their queues."""

    channels: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Loop:
    """Turns over units of the moves in the body."""

    turns: int
    unit: int
    body: tuple[tuple[PlainInstruction, str], ...]


PlainInstruction = Sync | Barrier | Signal | Wait | Move | Post | Flush
Instruction = PlainInstruction | Loop


@dataclass(frozen=True, slots=True)
class ProgramBlock:
    """A thread block of a rank: instructions, each with its place in the file, in words."""

    rank: int
    instructions: tuple[tuple[Instruction, str], ...]

    def unrolled(self) -> Iterator[tuple[PlainInstruction, str]]:
        """Yield the instructions as they run, loops turn by turn."""
        for instruction, where in self.instructions:
            if not isinstance(instruction, Loop):
                yield instruction, where
                continue
            for number in range(instruction.turns):
                for inner, place in instruction.body:
                    if isinstance(inner, Move | Post):
                        yield inner.turn(number, instruction.unit), place
                    else:
                        yield inner, place


@dataclass(frozen=True, slots=True)
class EngineProgram:
    """A whole plan.

    ``collective`` is allreduce, allgather, reduce_scatter, alltoall, broadcast or sendrecv. ``sizes`` are in cells;
    ``aliases`` are buffers that are part of another of their rank, with their offset in it. ``counters`` hold initial
    value and name, ``proxies`` the channels that `Post` names, ``fifos`` the target rank and capacity in moves of each
    connection.
    """

    collective: str
    ranks: int
    sizes: dict[Address, int]
    aliases: dict[Address, tuple[str, int]]
    blocks: tuple[ProgramBlock, ...]
    counters: dict[int, tuple[int, str]]
    proxies: tuple[int, ...] = ()
    fifos: dict[int, tuple[int, int]] = field(default_factory=dict)


def in_place_alias(
    collective: str, rank: int, sizes: Mapping[Address, int]
) -> dict[Address, tuple[str, int]]:
    """Return the buffer of a rank that is part of another one in a call in place, with its offset there."""
    if collective == "allgather":
        return {(rank, "i"): ("o", rank * sizes[rank, "i"])}
    return {(rank, "o"): ("i", rank * sizes[rank, "o"] if collective == "reduce_scatter" else 0)}


CellNumbers = NDArray[np.uint64]
_Steps = Generator[tuple[Hashable, str] | None, None, None]
"""A coroutine: yields the event that it waits for and its place, or None if it only lets others run first."""

_PLAIN, _PACKET = 1, 2

MAX_STEPS = 20_000_000
"""Steps after which a run is aborted."""


class CellMemory:
    """The buffers of all ranks: a number for each cell, and its state: unwritten, plain or packet."""

    def __init__(self, program: EngineProgram, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self._program = program
        self._values: dict[tuple[int, str], CellNumbers] = {}
        self._states: dict[tuple[int, str], NDArray[np.uint8]] = {}
        for address, size in sorted(program.sizes.items()):
            if address not in program.aliases:
                self._values[address] = np.zeros(size, dtype=np.uint64)
                self._states[address] = np.zeros(size, dtype=np.uint8)
        self.inputs: list[CellNumbers] = []
        for rank in range(program.ranks):
            size = program.sizes[rank, "i"]
            self.inputs.append(draw.integers(0, 1 << 64, size, dtype=np.uint64))
            values, states = self.view(CellRegion(rank, "i", 0, size))
            values[:] = self.inputs[rank]
            states[:] = _PLAIN

    def view(self, region: CellRegion) -> tuple[CellNumbers, NDArray[np.uint8]]:
        address = (region.rank, region.buffer)
        buffer, offset = self._program.aliases.get(address, (region.buffer, 0))
        start = region.start + offset
        own = (region.rank, buffer)
        return (
            self._values[own][start : start + region.size],
            self._states[own][start : start + region.size],
        )


class ProgramRun:
    """One run of a program; the seed determines the numbers and the order."""

    def __init__(self, program: EngineProgram, seed: int) -> None:
        self.program = program
        self.memory = CellMemory(program, seed)
        self._draw = np.random.default_rng([seed, 1])
        self._change = 1.0 if seed % 2 == 0 else 0.02
        self._counters = {number: first for number, (first, _) in program.counters.items()}
        self._begun = [False] * program.ranks
        self._running = [sum(block.rank == rank for block in program.blocks) for rank in range(program.ranks)]
        self._arrived: dict[tuple[int, int], int] = {}
        self._posted: dict[int, list[tuple[Move | Signal, str]]] = {}
        self._held: dict[int, list[CellNumbers]] = {number: [] for number in program.fifos}
        self._asleep: dict[Hashable, list[int]] = {}
        self._ready: list[tuple[float, int]] = []
        self._tasks: dict[int, _Steps] = {}
        self._made = 0
        self._proxies: set[int] = set()
        self._waiting: dict[int, str] = {}

    def run(self) -> CellMemory:
        """Return the buffers at the end.

        A PlanError names rank, block and operation of a deadlock, a read of unwritten data, a buffer that is touched
        out of turn, or a signal that is not consumed.
        """
        for rank in range(self.program.ranks):
            self._start(self._begin(rank))
        for block in self.program.blocks:
            self._start(self._block(block))
        for channel in self.program.proxies:
            self._start(self._proxy(channel), is_proxy=True)
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
            if steps > MAX_STEPS:
                raise PlanError(f"does not end within {MAX_STEPS} steps")
        self._check_end()
        return self.memory

    def _start(self, task: _Steps, *, is_proxy: bool = False) -> None:
        number = self._made
        self._made += 1
        self._tasks[number] = task
        if is_proxy:
            self._proxies.add(number)
        heapq.heappush(self._ready, (self._draw.random(), number))

    def _wake(self, key: Hashable) -> None:
        for number in self._asleep.pop(key, ()):
            heapq.heappush(self._ready, (self._draw.random(), number))

    def _begin(self, rank: int) -> _Steps:
        """Begin the kernel of a rank some time after others."""
        yield None
        self._begun[rank] = True
        self._wake(("begin", rank))

    def _block(self, block: ProgramBlock) -> _Steps:
        rank = block.rank
        if not self._begun[rank]:
            yield ("begin", rank), "its kernel"
        owed: list[tuple[int, int, str]] = []
        late: list[tuple[Move, str]] = []
        for instruction, where in block.unrolled():
            match instruction:
                case Sync():
                    yield from self._settle(owed, late)
                case Barrier():
                    yield from self._settle(owed, late)
                    yield from self._meet(rank, instruction, where)
                case Wait():
                    owed += [(thread, counter, where) for thread, counter in enumerate(instruction.counters)]
                case Signal():
                    for thread, counter in enumerate(instruction.counters):
                        yield from self._settle_thread(owed, thread)
                        self._add(counter)
                case Post():
                    yield from self._settle_thread(owed, instruction.thread)
                    queue = self._posted.setdefault(instruction.channel, [])
                    queue.append((instruction.action, where))
                    self._wake(("proxy", instruction.channel))
                case Flush():
                    for thread, channel in enumerate(instruction.channels):
                        yield from self._settle_thread(owed, thread)
                        while self._posted.get(channel):
                            yield ("idle", channel), where
                case Move():
                    if instruction.waits or instruction.marks:
                        yield from self._catch_up(late)
                        yield from self._move(instruction, where)
                    else:
                        late.append((instruction, where))
            yield None
            if late and self._draw.random() < 0.5:
                yield from self._catch_up(late)
        yield from self._settle(owed, late)
        self._running[rank] -= 1

    def _settle(self, owed: list[tuple[int, int, str]], late: list[tuple[Move, str]]) -> _Steps:
        """Let all threads arrive: the waits are over and the moves done."""
        # a move that no sync orders after a wait runs before it here
        yield from self._catch_up(late)
        for _, counter, where in owed:
            yield from self._take(counter, where)
        owed.clear()

    def _settle_thread(self, owed: list[tuple[int, int, str]], thread: int) -> _Steps:
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
        """Run the queue of a port channel in order, some time later."""
        while True:
            queue = self._posted.get(channel)
            if not queue:
                yield ("proxy", channel), "nothing"
                continue
            action, where = queue[0]
            yield None
            if isinstance(action, Signal):
                for counter in action.counters:
                    self._add(counter)
            else:
                yield from self._move(action, where)
            queue.pop(0)
            if not queue:
                self._wake(("idle", channel))

    def _catch_up(self, late: list[tuple[Move, str]]) -> _Steps:
        while late:
            move, where = late[0]
            yield from self._move(move, where)
            late.pop(0)

    def _move(self, move: Move, where: str) -> _Steps:
        total: CellNumbers | None = None
        for number, place in enumerate(move.reads):
            if isinstance(place, Fifo):
                held = self._held[place.number]
                while not held:
                    yield ("fifo", place.number), f"{where}, to which nothing comes"
                values = held.pop(0)
                self._wake(("fifo", place.number))
                wanted = next(one.size for one in (*move.reads, *move.writes) if isinstance(one, CellRegion))
                if values.size != wanted:
                    _refuse(where, f"receives {wanted} cells at once, where {values.size} are sent")
            elif not place.size:
                return
            else:
                values, states = self.memory.view(place)
                self._check_alive(place, where)
                if move.waits and move.waits[number]:
                    while not (states == _PACKET).all():
                        place_words = f"{where}, which waits for packets in {_quote_names(place)}"
                        yield ("cells", place.rank, place.buffer), place_words
                elif not (states == _PLAIN).all():
                    found = "packets" if (states == _PACKET).any() else "cells that are not written yet"
                    _refuse(where, f"reads {found} in {_quote_names(place)}")
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
            self._check_alive(place, where)
            values, states = self.memory.view(place)
            values[:] = total
            marked = bool(move.marks) and move.marks[number]
            states[:] = _PACKET if marked else _PLAIN
            if marked:
                self._wake(("cells", place.rank, place.buffer))

    def _check_alive(self, region: CellRegion, where: str) -> None:
        """Refuse to touch a buffer that belongs to a caller at the time."""
        if region.buffer == "s":
            return
        if not self._begun[region.rank]:
            _refuse(where, f"touches the {_quote_names(region)} before its kernel may have begun")
        if not self._running[region.rank]:
            _refuse(where, f"touches the {_quote_names(region)} when its kernel may have ended")

    def _check_end(self) -> None:
        """Raise unless every task has ended, every queue is empty and every counter has its initial value."""
        stuck = [number for number in sorted(self._tasks) if number not in self._proxies]
        if stuck:
            others = f"; so do {len(stuck) - 1} more blocks" if len(stuck) > 1 else ""
            raise PlanError(f"{self._waiting[stuck[0]]}, waits forever{others}")
        for number, held in sorted(self._held.items()):
            if held:
                raise PlanError(
                    f"{len(held)} chunks that are sent to gpu {self.program.fifos[number][0]} are never received"
                )
        for number, (first, name) in sorted(self.program.counters.items()):
            excess = self._counters[number] - first
            if excess:
                times = f"{excess} more" if excess > 0 else f"{-excess} fewer"
                raise PlanError(
                    f"{name} is sent {times} times than it is waited for; the next call would take it"
                )


def _quote_names(region: CellRegion) -> str:
    names = {"i": "input", "o": "output", "s": "scratch"}
    return f"{names[region.buffer]} of gpu {region.rank}"


def _refuse(where: str, fault: str) -> NoReturn:
    raise PlanError(f"{where}: {fault}")
