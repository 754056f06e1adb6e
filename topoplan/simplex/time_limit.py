"""When a search should end: the only thing in planning that looks at a clock, and only where a limit was asked for.

Searches look at it between rounds, after the first one, so there is always a forest; what comes before the first
round, such as bounds by flows, is not limited.
"""

from __future__ import annotations

import math
import time

from topoplan.errors import UsageError
from topoplan.hosts.notes import Note

UNDONE = "lower or fewer trees of this rate were not looked for to the end"
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


def out_of_time(rate: float, bound: float) -> str:
    """What the end of a search left undone.

    Examples
    --------
    >>> out_of_time(75.0, 100.0)
    'the rate is 25.00% below the bound, and more time may raise it'
    """
    return f"the rate is {1 - rate / bound:.2%} below the bound, and more time may raise it"
