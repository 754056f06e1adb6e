"""What a rank's program is made of: operations, messages, and the memories that they work on, as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

SOURCE, SHARED, SCRATCH, RESULT, SHOWN, BLOCK, FIRST_ARRAY = range(7)
"""The memories of a rank: what it puts in; what its host shares; where messages arrive; its result; what all ranks of
the host have shown when they met; room for sums of a block, in which nothing is further on in the next block; and from
here on what every rank of the host puts in, then the result of each, where these lie in memory that all see."""

COPY, JOIN, JOIN_ONE, DIVIDE, ASIDE, COPY_PAST, FETCH, UNLESS_FAILED = range(8)
"""What an operation does: copy its one input; join all of them, first and second, then that and the third; join single
elements (numpy rounds complex products of one element in its place in another way); divide what it has in its place
where there is a divisor; what only Python can do; copy its input past the caches; read what another rank puts in
from the memory of its process; or go on only where no rank has failed, whose memory may have changed since."""

FETCHED_BLOCK = 64 << 10
"""Bytes of a block where inputs are read from other processes."""

COLUMNS = (
    ROW,
    KIND,
    TOGETHER,
    FIRST_WAIT,
    LAST_WAIT,
    FIRST_INPUT,
    LAST_INPUT,
    MEMORY,
    OFFSET,
    BYTES,
    MESSAGE,
    POST,
) = range(12)
"""The columns of operations: row of the table; kind; how many operations from here on are done together, block by
block; the waits, which the first of them has, and the inputs that belong to it, from one and up to another; memory,
byte and length in bytes of what it writes, memory -1 for sending; number of the message that it sends or whose arrival
it waits for, -1 for none; and what the rank has done with it, as others wait for it, 0 for nothing to tell."""

PLACE, LEAST, WAITING_ROW = range(3)
"""The columns of waits: whose operations (place among the ranks of the host), what they must have posted, and for which
row."""

Place = tuple[int, int]
"""A memory, and an element of it."""

Waits = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Message:
    """A row that crosses hosts, as one of its ends sees it.

    Parameters
    ----------
    row, peer : int
    stream : int
        Place of its stream among all those between the two ranks in this direction: the streams of one place are
        one after another in the same order at both ends.
    scratch : slice
        Elements of the scratch memory where it arrives; empty for messages that leave.
    following : int
        Number of the message that may arrive there next; -1 if none.
    first : bool
        Whether it may arrive there from the start.
    """

    row: int
    peer: int
    stream: int
    scratch: slice
    following: int
    first: bool


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """All operations of a rank in one collective, in order; the last of them hand over its result.

    Parameters
    ----------
    operations : (O, `COLUMNS`) int64
    waits : (W, 3) int64
    inputs : (I, 2) int64
        Memory and byte.
    block_bytes : int
        Of what is done together; as much as a multiple of every element, and what fits into `BLOCK`'s rooms.
    unsent : mapping of int to tuple of int
        For operations the messages of this rank that must have left before.
    ends : (int, int, int)
        Where it ends; and, of those that may stand behind it and be run in its stead, where the one ends for arrays
        that all ranks see, and the one for inputs that all ranks may read.
    leaving, arriving : tuple of Message
    shown_bytes : int
        How much of what it puts in a rank shows when all meet.
    shared_elements, scratch_elements : int
        Elements of the memory that the host shares, and of this rank's memory for arriving messages or for sums.
    """

    operations: Numbers
    waits: Numbers
    inputs: Numbers
    block_bytes: int
    unsent: Mapping[int, tuple[int, ...]]
    ends: tuple[int, int, int]
    leaving: tuple[Message, ...]
    arriving: tuple[Message, ...]
    shown_bytes: int
    shared_elements: int
    scratch_elements: int


class Writing:
    """A program while it is written down.

    Parameters
    ----------
    itemsize : int
        Bytes of an element.
    """

    def __init__(self, itemsize: int) -> None:
        self._itemsize = itemsize
        self._operations: list[tuple[int, ...]] = []
        self._waits: list[tuple[int, int, int]] = []
        self._inputs: list[tuple[int, int]] = []

    def __len__(self) -> int:
        """Operations so far."""
        return len(self._operations)

    def add(
        self,
        kind: int,
        row: int,
        elements: int,
        inputs: list[Place],
        target: Place,
        *,
        waits: Waits = (),
        message: int = -1,
        post: int = 0,
    ) -> None:
        """Add an operation; inputs and target are a memory and the element of it where they begin."""
        self.together([(kind, inputs, target)], row, elements, waits=waits, message=message, post=post)

    def together(
        self,
        lines: list[tuple[int, list[Place], Place]],
        row: int,
        elements: int,
        *,
        waits: Waits = (),
        message: int = -1,
        post: int = 0,
    ) -> None:
        """Add operations that are done together: kind, inputs and target of each."""
        size = self._itemsize
        for number, (kind, inputs, (memory, start)) in enumerate(lines):
            first_wait, first_input = len(self._waits), len(self._inputs)
            self._waits += () if number else waits
            self._inputs += [(origin, first * size) for origin, first in inputs]
            bounds = (first_wait, len(self._waits), first_input, len(self._inputs))
            row_of_all = (row, kind, len(lines) - number, *bounds, memory, start * size)
            self._operations.append((*row_of_all, elements * size, message, post))

    def arrays(self) -> tuple[Numbers, Numbers, Numbers]:
        """Operations, waits and inputs of a `Program`."""
        columns = ((self._operations, len(COLUMNS)), (self._waits, 3), (self._inputs, 2))
        first, second, third = (
            np.array(lines, dtype=np.int64).reshape(-1, width) for lines, width in columns
        )
        return first, second, third
