"""What a rank's program is made of: operations, messages, and the three memories that they work on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

SOURCE, SHARED, SCRATCH = range(3)
"""The memories of a rank: what it puts in, what its host shares (`slots`), and where messages arrive."""


class Operation(NamedTuple):
    """One step of a program: it copies or joins one chunk, or sends it to another host.

    Parameters
    ----------
    row : int
        The row of the table that it is part of.
    waits : tuple of (rank, int)
        Ranks, and how many of its operations each must have done before.
    unsent : tuple of int
        Messages of this rank that must have left before.
    message : int
        Number of the message that it sends, or whose arrival it waits for; -1 for none.
    arriving : int
        Memory of what is copied, joined or sent.
    arriving_elements : slice
    own : int
        Memory of what it is joined with; -1 for copies.
    own_elements : slice
    target : int
        Memory where that goes; -1 for sending.
    target_elements : slice
    """

    row: int
    waits: tuple[tuple[int, int], ...]
    unsent: tuple[int, ...]
    message: int
    arriving: int
    arriving_elements: slice
    own: int
    own_elements: slice
    target: int
    target_elements: slice


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
    """All operations of a rank in one collective, in order, and its result when they are done.

    Parameters
    ----------
    operations : tuple of Operation
    complete : tuple of (rank, int, int)
        Ranks, how many operations each must have done before the result is there, and the row that makes it so.
    parts : tuple of (slice, slice)
        Elements of shared memory, and of the result where they belong.
    leaving, arriving : tuple of Message
    shared_elements, scratch_elements : int
        Elements of the memory that the host shares, and of this rank's memory for arriving messages.
    """

    operations: tuple[Operation, ...]
    complete: tuple[tuple[int, int, int], ...]
    parts: tuple[tuple[slice, slice], ...]
    leaving: tuple[Message, ...]
    arriving: tuple[Message, ...]
    shared_elements: int
    scratch_elements: int
