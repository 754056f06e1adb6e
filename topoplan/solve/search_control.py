"""Control a search: its time limit, and random numbers that are the same on every machine.

`Deadline` is the only part of planning that reads a clock, and only if a limit was given. Searches check it
between rounds, after the first one, so a forest always exists; bounds by flows and other work before the first
round are not limited. `RandomStream` draws whole numbers that are the same in every version of numpy (NEP 19).
"""

from __future__ import annotations

import math
import time
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import Note, UsageError


class RandomStream:
    """Whole numbers from a bit generator whose raw output numpy promises never to change (NEP 19)."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def whole(self, count: int, below: int) -> NDArray[np.int64]:
        """(count,) int64 in [0, below)."""
        return (self._bits.random_raw(count) % np.uint64(below)).astype(np.int64)


class Deadline:
    """The end of a time limit that starts now; with None it never comes.

    `cut` remembers that a search has found it over. UsageError unless the limit is a number of 0 or more.
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
        """Return whether no time is left: the search that asks ends then, and `cut` remembers it."""
        self.cut = self.cut or self.left == 0
        return self.cut

    def note(self, rate: Fraction | float, bound: Fraction | float) -> Note:
        """Return the note of kind "stopped" of a plan whose search was cut short at this rate."""
        if rate < bound:
            return self._note(
                f"the rate is {1 - float(rate / bound):.2%} below the bound, and more time may raise it"
            )
        return self._note("lower or fewer trees of this rate were not looked for to the end")

    def note_of_height(self) -> Note:
        """Return that note of a plan whose trees have a height that was asked for."""
        return self._note("a higher rate at this height was not looked for to the end")

    def _note(self, what: str) -> Note:
        return Note(f"stopped after {self.limit:.4g} s: {what}", "stopped")


def deadline_of(limit: float | Deadline | None) -> Deadline:
    """Return a deadline as it is, or a new one ``limit`` seconds from now."""
    return limit if isinstance(limit, Deadline) else Deadline(limit)
