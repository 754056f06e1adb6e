"""Control a search: its time limit, and random numbers that are the same on every machine.

`Deadline` is the only part of planning that reads a clock, and only if a limit was given. Searches look at it
between rounds, after the first one, so a forest always exists; bounds by flows and other work before the first
round are not limited. `RandomStream` draws whole numbers that are the same in every version of numpy (NEP 19).
"""

from __future__ import annotations

import math
import time

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import UsageError
from topoplan.machine.notes import Note


class RandomStream:
    """Whole numbers from a bit generator whose raw output numpy promises never to change (NEP 19).

    Examples
    --------
    >>> RandomStream(0).whole(4, 1000).tolist() == RandomStream(0).whole(4, 1000).tolist()
    True
    """

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def whole(self, count: int, below: int) -> NDArray[np.int64]:
        """(count,) int64 in [0, below)."""
        return (self._bits.random_raw(count) % np.uint64(below)).astype(np.int64)


SEARCH_UNFINISHED = "lower or fewer trees of this rate were not looked for to the end"
"""What a search left undone that had reached the optimal rate in time."""


class Deadline:
    """The end of a time limit that starts now.

    Parameters
    ----------
    limit : float or None
        Seconds; None for no limit.

    Attributes
    ----------
    cut : bool
        Whether a search has asked and found it over.

    Raises
    ------
    UsageError
        Not a number of zero or more.

    Examples
    --------
    >>> Deadline(0).over(), Deadline(None).over(), Deadline(None).left
    (True, False, None)
    """

    def __init__(self, limit: float | None) -> None:
        if limit is not None and not (isinstance(limit, int | float) and 0 <= limit < math.inf):
            raise UsageError(
                f"time_limit is {limit!r}; give the seconds after which to stop, 0 or more, or leave it out"
            )
        self.limit = limit
        self.cut = False
        self._started = time.monotonic()

    @property
    def left(self) -> float | None:
        """Seconds left, zero or more; None for no limit."""
        return None if self.limit is None else max(0.0, self._started + self.limit - time.monotonic())

    def over(self) -> bool:
        """Whether no time is left: the search that asks ends then, and `cut` remembers it."""
        self.cut = self.cut or self.left == 0
        return self.cut

    def note(self, what: str) -> Note:
        """What a plan says of a search that was cut short, a note of kind "stopped".

        Examples
        --------
        >>> Deadline(1.5).note("lower heights were not tried")
        'stopped after 1.5 s: lower heights were not tried'
        """
        return Note(f"stopped after {self.limit:.4g} s: {what}", "stopped")


def deadline_of(limit: float | Deadline | None) -> Deadline:
    """A deadline as it is, or a new one some seconds from now."""
    return limit if isinstance(limit, Deadline) else Deadline(limit)


def time_limit_note(rate: float, bound: float) -> str:
    """What the end of a search left undone.

    Examples
    --------
    >>> time_limit_note(75.0, 100.0)
    'the rate is 25.00% below the bound, and more time may raise it'
    """
    return f"the rate is {1 - rate / bound:.2%} below the bound, and more time may raise it"
