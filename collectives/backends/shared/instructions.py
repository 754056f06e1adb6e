"""What a rank's program is made of: operations, messages, and the memories that they work on, as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

SOURCE, SHARED, SCRATCH, RESULT, SHOWN = range(5)
"""The memories of a rank: what it puts in, what its host shares (`slots`), where messages arrive or what it adds up by
itself lies, its result, and what all ranks of the host have shown when they met (`small_program`)."""

COPY, JOIN, HAND_OVER, ASIDE = range(4)
"""What an operation does: copy its one input, or join all of them, first and second, then that and the third; copy to
the result and divide where there is a divisor; or what only Python can do."""

COLUMNS = ROW, KIND, FIRST_WAIT, LAST_WAIT, FIRST_INPUT, LAST_INPUT, MEMORY, OFFSET, BYTES, MESSAGE = range(
    10
)
"""The columns of operations: row of the table; kind; the waits and the inputs that belong to it, from one and up to
another; memory, byte and length in bytes of what it writes, memory -1 for sending; number of the message that it sends
or whose arrival it waits for, -1 for none."""

PLACE, LEAST, WAITING_ROW = range(3)
"""The columns of waits: whose operations (place among the ranks of the host), how many of them must be done, and for
which row."""


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
    posted : int
        How many operations others may wait for.
    unsent : mapping of int to tuple of int
        For operations the messages of this rank that must have left before.
    leaving, arriving : tuple of Message
    shown_bytes : int
        How much of what it puts in a rank shows when all meet.
    shared_elements, scratch_elements : int
        Elements of the memory that the host shares, and of this rank's memory for arriving messages.
    """

    operations: Numbers
    waits: Numbers
    inputs: Numbers
    posted: int
    unsent: Mapping[int, tuple[int, ...]]
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
        inputs: list[tuple[int, int]],
        target: tuple[int, int],
        *,
        waits: tuple[tuple[int, int, int], ...] = (),
        message: int = -1,
    ) -> None:
        """Add an operation; inputs and target are a memory and the element of it where they begin."""
        memory, start = target
        size = self._itemsize
        first_wait, first_input = len(self._waits), len(self._inputs)
        self._waits += waits
        self._inputs += [(origin, first * size) for origin, first in inputs]
        bounds = (first_wait, len(self._waits), first_input, len(self._inputs))
        self._operations.append((row, kind, *bounds, memory, start * size, elements * size, message))

    def arrays(self) -> tuple[Numbers, Numbers, Numbers]:
        """Operations, waits and inputs of a `Program`."""
        columns = ((self._operations, len(COLUMNS)), (self._waits, 3), (self._inputs, 2))
        first, second, third = (
            np.array(lines, dtype=np.int64).reshape(-1, width) for lines, width in columns
        )
        return first, second, third
