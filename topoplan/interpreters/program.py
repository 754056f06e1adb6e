"""What a file of an engine says, in one form for all engines: ranks, buffers, and instructions of thread blocks.

Buffers are counted in cells, the smallest pieces that any instruction moves; a cell holds one number. Nothing here is
shared with what writes such files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

Address = tuple[int, str]
"""A rank and a buffer of it: ``i`` input, ``o`` output, ``s`` scratch."""


@dataclass(frozen=True, slots=True)
class Region:
    """Cells of a buffer."""

    rank: int
    buffer: str
    start: int
    size: int

    def turn(self, number: int, unit: int) -> Region:
        """What a turn of a loop moves of it."""
        begin = min(number * unit, self.size)
        return replace(self, start=self.start + begin, size=min(unit, self.size - begin))


@dataclass(frozen=True, slots=True)
class Fifo:
    """A connection between two ranks: what is written first is read first, and it holds so much and no more."""

    number: int

    def turn(self, number: int, unit: int) -> Fifo:
        """The same in every turn of a loop."""
        return self


@dataclass(frozen=True, slots=True)
class Sync:
    """All threads of the block arrive before any goes on."""


@dataclass(frozen=True, slots=True)
class Barrier:
    """So many blocks of the rank arrive before any goes on."""

    number: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Signal:
    """Add one to each of some counters, each by a thread of its own."""

    counters: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Take one from each of some counters when it is there, each by a thread of its own."""

    counters: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """Add up what is read, element by element, and write the sum to each of some regions.

    Parameters
    ----------
    reads, writes : tuple of Region or Fifo
    waits : tuple of bool
        For each read whether its elements say themselves when they are there, as packets do.
    marks : tuple of bool
        For each write whether elements are written as packets.
    by_switch : bool
        Whether a switch reads for it, adds or copies.
    """

    reads: tuple[Region | Fifo, ...]
    writes: tuple[Region | Fifo, ...]
    waits: tuple[bool, ...] = ()
    marks: tuple[bool, ...] = ()
    by_switch: bool = False

    def turn(self, number: int, unit: int) -> Move:
        """As `Region.turn`."""
        return replace(
            self,
            reads=tuple(place.turn(number, unit) for place in self.reads),
            writes=tuple(place.turn(number, unit) for place in self.writes),
        )


@dataclass(frozen=True, slots=True)
class Post:
    """Hand a move or a signal to the proxy of a channel, which does what it is handed one after another, later.

    The thread of this number does it.
    """

    channel: int
    thread: int
    what: Move | Signal

    def turn(self, number: int, unit: int) -> Post:
        """As `Region.turn`."""
        return replace(self, what=self.what.turn(number, unit)) if isinstance(self.what, Move) else self


@dataclass(frozen=True, slots=True)
class Flush:
    """Wait until the proxies of some channels have done all that they were handed."""

    channels: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Loop:
    """Turns over units of what the instructions in it move."""

    turns: int
    unit: int
    body: tuple[tuple[Plain, str], ...]


Plain = Sync | Barrier | Signal | Wait | Move | Post | Flush
Instruction = Plain | Loop


@dataclass(frozen=True, slots=True)
class Block:
    """A thread block of a rank: instructions, each with its place in the file, in words."""

    rank: int
    instructions: tuple[tuple[Instruction, str], ...]

    def unrolled(self) -> Iterator[tuple[Plain, str]]:
        """The instructions as they run, loops turn by turn."""
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
class Program:
    """A whole plan.

    Parameters
    ----------
    collective : str
        allreduce, allgather, reduce_scatter, alltoall, broadcast, sendrecv.
    ranks : int
    sizes : dict from (rank, buffer) to int
        Cells.
    aliases : dict from (rank, buffer) to (buffer, int)
        Buffers that are part of another of their rank, and where they begin in it.
    blocks : tuple of Block
    counters : dict from int to (int, str)
        What each counter holds at first, and its name.
    proxies : tuple of int
        Channels that `Post` names.
    fifos : dict from int to (int, int)
        Of each connection the rank that it leads to, and how many moves it holds.
    """

    collective: str
    ranks: int
    sizes: dict[Address, int]
    aliases: dict[Address, tuple[str, int]]
    blocks: tuple[Block, ...]
    counters: dict[int, tuple[int, str]]
    proxies: tuple[int, ...] = ()
    fifos: dict[int, tuple[int, int]] = field(default_factory=dict)
