"""A rank that is slower for a while, to see what the synchronisation modes make of it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from topoplan.errors import UsageError


@dataclass(frozen=True, slots=True)
class Straggler:
    """Makes some steps of one rank take longer.

    Parameters
    ----------
    rank : int
    factor : float
        How many times as long a step takes, 1 or more.
    first, last : int
        Steps, counted from 0; ``last`` is not one of them.

    Raises
    ------
    UsageError
        The factor is below 1.

    Examples
    --------
    >>> slow = Straggler(rank=2, factor=3, first=10, last=20)
    >>> slow.delay(2, 15, 0.5), slow.delay(2, 20, 0.5), slow.delay(1, 15, 0.5)
    (1.0, 0.0, 0.0)
    """

    rank: int
    factor: float
    first: int
    last: int

    def __post_init__(self) -> None:
        if not self.factor >= 1:
            raise UsageError(f"a factor of {self.factor} makes no rank slower; give 1 or more")

    def delay(self, rank: int, step: int, seconds: float) -> float:
        """Seconds that a step of a rank takes longer than the ``seconds`` that it would take."""
        slow = rank == self.rank and self.first <= step < self.last
        return (self.factor - 1) * seconds if slow else 0.0

    def hold_up(self, rank: int, step: int, seconds: float) -> None:
        """Sleep for the delay."""
        time.sleep(self.delay(rank, step, seconds))
