"""The clock that paces links: the machine's own, or any other that tells and waits."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time and waits, in seconds from any beginning."""

    def now(self) -> float:
        """The time."""

    def wait_until(self, moment: float) -> None:
        """Return at this moment or somewhat later, at once if it is over."""


class WallClock:
    """Real time, which runs evenly whatever happens to the date."""

    def now(self) -> float:
        """See `Clock.now`."""
        return time.monotonic()

    def wait_until(self, moment: float) -> None:
        """See `Clock.wait_until`."""
        left = moment - time.monotonic()
        if left > 0:
            time.sleep(left)
