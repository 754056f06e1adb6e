"""Steps a second of a training job whose ranks wait for each other by a clock rule, before it runs.

A rank's clock is the number of steps that it has finished. Before step c it waits until all ranks have finished c - s
steps: a finite s is stale synchronous (Ho et al., NIPS 2013), none asynchronous. With compute(i, c) and a time for
sending,

    end(i, c) = max(end(i, c - 1), max over j of end(j, c - s - 1)) + compute(i, c) + send,

so that no two clocks differ by more than s + 1. Bulk synchronous, s = 0, all meet in every step, and its end is one for
all; where parameters are averaged every H steps they meet, and send, then only. A rank that is slow for ever sets the
pace whatever s is; one that is late now and then costs others nothing as long as it is less than s steps late.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import UsageError

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ClockRun:
    """When every rank ended every step.

    Parameters
    ----------
    ends : (N, K) float64
        Seconds.
    waited : (N, K) float64
        Seconds before each step in which a rank stood still for others.
    """

    ends: Floats
    waited: Floats

    @property
    def seconds(self) -> float:
        """Until the last rank has ended its last step."""
        return float(np.max(self.ends[:, -1]))

    @property
    def steps_per_second(self) -> float:
        """Of the slowest rank; infinite where nothing takes time."""
        return self.ends.shape[1] / self.seconds if self.seconds else math.inf

    @property
    def idle(self) -> Floats:
        """(N,): part of the time until its last step in which each rank stood still."""
        last = self.ends[:, -1]
        idle: Floats = np.divide(self.waited.sum(axis=1), last, out=np.zeros_like(last), where=last > 0)
        return idle

    def finished(self, seconds: float) -> NDArray[np.int64]:
        """(N,): steps that each rank has finished by then."""
        finished: NDArray[np.int64] = (self.ends <= seconds * (1 + 1e-12)).sum(axis=1)
        return finished

    @property
    def gaps(self) -> dict[int, int]:
        """How often a rank was so many steps ahead of the slowest when it ended one, ascending."""
        slowest = np.minimum.reduce([np.searchsorted(row, self.ends, side="right") for row in self.ends])
        ahead = np.arange(1, self.ends.shape[1] + 1)[None, :] - slowest
        return dict(sorted(Counter(ahead.ravel().tolist()).items()))


def run_clocks(
    compute: Sequence[Sequence[float]] | Floats,
    send: float = 0.0,
    *,
    staleness: int | None = 0,
    every: int = 1,
) -> ClockRun:
    """Run ranks under a clock rule.

    Parameters
    ----------
    compute : (N, K) floats
        Seconds that each rank computes in each step.
    send : float
        Seconds that an exchange takes, such as a plan's model time for the gradients.
    staleness : int or None
        Steps that a rank may be ahead of the slowest; 0 where all meet in every step, None for any number.
    every : int
        Steps between two exchanges, at which all wait for all (local SGD); above 1 the staleness is not looked at.

    Raises
    ------
    UsageError
        A negative staleness, time or number of steps, or no steps.

    Examples
    --------
    Three ranks, of which the last takes three times as long in the second of four steps:

    >>> late = [[1, 1, 1, 1], [1, 1, 1, 1], [1, 3, 1, 1]]
    >>> [run_clocks(late, staleness=s).ends.max(axis=1).tolist() for s in (0, 2, None)]
    [[6.0, 6.0, 6.0], [4.0, 4.0, 6.0], [4.0, 4.0, 6.0]]
    """
    times = np.asarray(compute, dtype=np.float64)
    if times.ndim != 2 or not times.size:
        raise UsageError("compute must give each rank the seconds of one step or more, as many for each")
    if not (np.isfinite(times).all() and (times >= 0).all() and 0 <= send < np.inf):
        raise UsageError("seconds of computing and sending must be numbers of zero or more")
    if staleness is not None and staleness < 0:
        raise UsageError(f"a staleness of {staleness} is none; give 0 or more, or None for no bound")
    if every < 1:
        raise UsageError(f"exchanges every {every} steps are none; give 1 or more")
    ranks, steps = times.shape
    ends, waited = np.zeros((ranks, steps)), np.zeros((ranks, steps))
    before = np.zeros(ranks)
    for step in range(steps):
        # the last step that all must have ended before this one
        last = -1 if staleness is None or every > 1 else step - staleness - 1
        begin = before if last < 0 else np.maximum(before, ends[:, last].max())
        meets = (step + 1) % every == 0 and (staleness == 0 or every > 1)
        done = begin + times[:, step]
        met = np.full(ranks, done.max()) if meets else done
        waited[:, step] = begin - before + met - done
        before = met + (send if every == 1 or meets else 0.0)
        ends[:, step] = before
    return ClockRun(ends, waited)
