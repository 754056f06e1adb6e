"""What the exchanges of entries do with arrays, on the processor or on a GPU: the same bits on both.

An exchange sees two kinds of arrays. *Lines* are the back end's (numpy, torch, CuPy), which move between ranks.
*Values*, indices and messages are what it computes with: numpy arrays, or on a GPU CuPy arrays. Those of torch tensors
are on the same memory; without CuPy, tensors on a GPU are copied to the processor and back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collectives.wire.filters import WireFormat

Line = TypeVar("Line")

Entries = tuple[Any, Any]
"""Indices, ascending, and values."""


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """Entries on their way.

    Parameters
    ----------
    message : array of uint8
    told : Entries
        As those who get the message read them: a wire format may round values.
    lost : Entries or None
        What rounding took away, at the same indices; None where nothing is rounded.
    """

    message: Any
    told: Entries
    lost: Entries | None


class Feedback(Protocol):
    """As `collectives.ErrorFeedback`, which see."""

    residual: Any
    velocity: Any
    momentum: float
    step: int

    def feed(self, gradient: Any, k: int) -> Entries:
        """Take in a gradient, and give out the k largest entries of what is there now."""

    def part(self, start: int, stop: int) -> Feedback:
        """The feedback of some neighbouring elements, on the same memory."""

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as numpy copies."""

    def restore(self, state: Any) -> None:
        """Go on from a state, whose arrays are numpy's or as the residual is."""


class EntryArrays(Protocol[Line]):
    """Computes with gradients and entries; everything but `feedback` inside ``with here()``."""

    def here(self) -> AbstractContextManager[object]:
        """Where this process computes; what was begun inside is complete when it is left."""

    def feedback(self, size: int, dtype: str, *, momentum: float) -> Feedback:
        """A new residual, all zero."""

    def area(self, nbytes: int) -> Line:
        """A new line of so many bytes, contents undefined: for messages."""

    def values(self, line: Line) -> Any:
        """The values of a line, only to be read."""

    def line(self, values: Any) -> Line:
        """A line with these values, which may be the same memory."""

    def zeroed(self, line: Line) -> Any:
        """Values of zero, to be put into a line by `store`: the same memory where that can be."""

    def store(self, line: Line, values: Any) -> None:
        """Put values into a line; nothing is done where they are its own memory."""

    def widened(self, array: Line, dtype: str) -> Line:
        """A gradient as one line of a dtype that holds all its values; the same memory where it is one already."""

    def rounded(self, target: Line, result: Line) -> None:
        """Put a result into an array of the same shape with fewer bits, each value rounded to the nearest, or even."""

    def bounded(self, values: Any, limit: float = math.inf) -> bool:
        """Whether all magnitudes are below a limit, and so are finite."""

    def shown(self, values: Any) -> Any:
        """Infinities where values are not finite, zeros elsewhere: new values."""

    def nonzero(self, values: Any) -> Entries:
        """The entries of values that are not zero, as copies."""

    def add(self, total: Any, entries: Entries) -> None:
        """Add entries, no index twice."""

    def encode(
        self, entries: Entries, *, size: int, wire: WireFormat | None, rank: int, step: int
    ) -> Encoded:
        """Entries of so many elements as a message; see `collectives.sparse.entry_messages`."""

    def decode(self, message: Any, *, size: int, dtype: str, wire: WireFormat | None) -> Entries:
        """The entries of a message."""

    def merge(self, parts: Sequence[Entries], k: int) -> tuple[Entries, Entries]:
        """Add entries up in their order; the k largest of them and the others."""
