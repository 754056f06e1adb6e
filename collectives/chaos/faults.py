"""What is done to a job, and when: the schedule of faults, which follows from a seed.

A fault is drawn from its number and the ranks that are there, so that the same seed hurts the same ranks in the same
order, after the same pauses. At which instruction a signal finds a rank is left to the machine.

Ranks are named by their place in the first plan: others count themselves anew when one is lost.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

KILL, KILL_TWO, KILL_TWICE, STOP = "kill", "two at once", "during recovery", "stop"
PAUSE, BURST, HOG = "pause", "bursts", "hogs"
REVIVE, REVIVE_AND_KILL = "revive", "revive and kill"

WEIGHTS = {
    KILL: 0.32,
    KILL_TWO: 0.1,
    KILL_TWICE: 0.16,
    STOP: 0.12,
    PAUSE: 0.1,
    BURST: 0.1,
    HOG: 0.1,
}
"""How often each kind is drawn, where all are possible."""

REVIVED, DISTURBED = 0.4, 0.3
"""How often a rank that is gone is started anew, where there is one and the ranks can let it in; and how often another
is killed meanwhile."""

LOSES = {KILL: 1, KILL_TWO: 2, KILL_TWICE: 2, STOP: 1}
"""How many ranks a kind takes; the others take none, but see `REVIVE_AND_KILL`."""

FEWEST = 2
"""Ranks that are always left."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Parameters
    ----------
    number : int
        Its place in the schedule, from 0.
    kind : str
        ``kill``: SIGKILL; ``two at once``; ``during recovery``: a second one while the others find each other;
        ``stop``: SIGSTOP until the others have gone on; ``pause``: SIGSTOP for less than the timeout; ``bursts``: of
        short ones; ``hogs``: processes that want the processors too; ``revive``: a new process for a rank that is gone;
        ``revive and kill``: another rank is killed while that comes.
    ranks : tuple of int
        The victims, by their places in the first plan; of hogs so many are started.
    wait : float
        Seconds that the ranks work before it.
    gaps : tuple of float
        Seconds: between the two signals of ``during recovery``; how long a rank pauses; by turns how long bursts and
        the time between them are; how long hogs live; from the start of a rank to the death of another.
    revived : int or None
        The rank for which a new process is started.

    Examples
    --------
    >>> fault(7, 0, (0, 1, 2, 3), timeout=1.0) == fault(7, 0, [3, 1, 2, 0], timeout=1.0)
    True
    >>> fault(7, 4, (0, 1, 2, 3), timeout=1.0).kind
    'kill'
    """

    number: int
    kind: str
    ranks: tuple[int, ...]
    wait: float
    gaps: tuple[float, ...] = ()
    revived: int | None = None

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks that it takes from the job."""
        return self.ranks if self.kind in LOSES or self.kind == REVIVE_AND_KILL else ()

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        what = f"{len(self.ranks)} {self.kind}" if self.kind == HOG else f"{self.kind} of rank {ranks}"
        if self.revived is not None:
            what = f"{self.kind}: rank {self.revived} is started" + (
                f", rank {ranks} killed" if ranks else ""
            )
        return f"fault {self.number}, {what}"


def fault(
    seed: int, number: int, there: Collection[int], *, timeout: float, gone: Collection[int] = ()
) -> Fault:
    """The fault of this number.

    Parameters
    ----------
    seed, number : int
    there : collection of int
        Ranks that work, `FEWEST` + 1 at least, or there are ``gone`` ones.
    timeout : float
        Of the ranks, in seconds.
    gone : collection of int
        Ranks that may be started anew.
    """
    draw = np.random.default_rng([seed, number])
    ranks, dead = sorted(there), sorted(gone)
    gaps: tuple[float, ...] = ()
    wait = float(draw.uniform(0.05, 0.4))
    spare = len(ranks) - FEWEST
    if dead and (spare < 1 or draw.random() < REVIVED):
        revived = int(draw.choice(dead))
        if spare < 1 or draw.random() >= DISTURBED:
            return Fault(number, REVIVE, (), wait, revived=revived)
        # the ranks ask for it only now and then
        gaps = (float(draw.uniform(0.0, 0.5)),)
        return Fault(number, REVIVE_AND_KILL, (int(draw.choice(ranks)),), wait, gaps, revived)
    possible = [kind for kind in WEIGHTS if LOSES.get(kind, 0) <= spare]
    weights = np.array([WEIGHTS[kind] for kind in possible])
    kind = str(draw.choice(possible, p=weights / weights.sum()))
    most = LOSES.get(kind) or int(draw.integers(1, 3))
    victims = tuple(map(int, draw.permutation(ranks)[:most]))
    if kind == KILL_TWICE:
        gaps = (float(draw.uniform(0.001, 0.12)),)
    elif kind == PAUSE:
        gaps = (float(draw.uniform(0.1, 0.5)) * timeout,)
    elif kind == BURST:
        gaps = tuple(map(float, draw.uniform(0.002, 0.06, size=2 * int(draw.integers(3, 10)))))
    elif kind == HOG:
        gaps = (float(draw.uniform(0.3, 1.0)),)
    return Fault(number, kind, victims, wait, gaps)
