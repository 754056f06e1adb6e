"""Synchronisation modes as one rule about clocks: how far a rank may run ahead of the slowest.

A rank's clock is the number of steps it has finished. It may begin a step when its clock is at most the staleness bound
ahead of the slowest clock, so no two clocks ever differ by more than the bound and one.

- `BSP` (bulk synchronous, bound 0, the default): every step averages the gradients of all ranks. Nothing is given up;
  every step takes as long as the slowest rank.
- `SSP` (stale synchronous, bound s; Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
  Parameter Server", NIPS 2013): gradients are added when they arrive, at most so many steps late. Replicas differ in
  the meantime, a run does not repeat bit for bit, and the rate of learning may have to be smaller.
- `ASP` (asynchronous, no bound): nobody waits. Convergence is promised for no staleness that is not bounded.
- `LocalSGD` (every H steps; Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019): ranks train alone
  and average their parameters, not gradients, every H steps. H times less is sent; replicas drift apart in between, and
  a moment that the optimiser keeps is of its own rank only. ``proximal`` holds them together (EMSO).
- `Gossip` (a neighbour at a time; NetMax, arXiv 2009.05766): ranks train alone, and after each step a rank pulls the
  parameters of one other and moves towards them (`topoplan.simulation.gossip`). Nobody meets all others; replicas
  differ until the end, and their mean stays in expectation only.

Their names are ``bsp``, ``ssp:S``, ``asp`` and ``local:H`` (`mode_of`); `Gossip` has none. `Straggler` makes a rank
slow, to see what they make of it.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from topoplan.errors import UsageError
from topoplan.simulation.gossip import checked_probabilities, mixing_weights, strongest


@dataclass(frozen=True, slots=True)
class BSP:
    """Every step waits for all ranks."""

    @property
    def bound(self) -> int | None:
        """Steps that a rank may be ahead; None for any number."""
        return 0


@dataclass(frozen=True, slots=True)
class SSP:
    """A rank may be so many steps ahead of the slowest.

    Raises
    ------
    UsageError
        The staleness is no whole number of 0 or more.
    """

    staleness: int

    def __post_init__(self) -> None:
        _check("staleness", self.staleness, least=0)

    @property
    def bound(self) -> int | None:
        """As `BSP.bound`."""
        return self.staleness


@dataclass(frozen=True, slots=True)
class ASP:
    """Nobody waits."""

    @property
    def bound(self) -> int | None:
        """As `BSP.bound`."""
        return None


@dataclass(frozen=True, slots=True, repr=False)
class LocalSGD:
    """Ranks train alone, and average their parameters every so many steps.

    Parameters
    ----------
    every : int
    proximal : float
        What pulls a rank back to where it was when parameters were last averaged: so many times the way from there is
        added to its gradients. Each rank then solves its own part of the loss plus proximal / 2 times the squared
        distance (EMSO; Li et al., KDD 2014, where it grows with the square root of the step); 0 pulls nothing.

    Raises
    ------
    UsageError
        The number is no whole one of 1 or more, or the pull is negative or no number.

    Examples
    --------
    >>> LocalSGD(8), LocalSGD(8, proximal=0.1)
    (LocalSGD(every=8), LocalSGD(every=8, proximal=0.1))
    """

    every: int
    proximal: float = 0.0

    def __post_init__(self) -> None:
        _check("every", self.every, least=1)
        number = isinstance(self.proximal, (int, float)) and not isinstance(self.proximal, bool)
        if not number or not (self.proximal >= 0 and math.isfinite(self.proximal)):
            raise UsageError(f"proximal {self.proximal!r} must be a number of zero or more")

    def __repr__(self) -> str:
        pull = f", proximal={self.proximal}" if self.proximal else ""
        return f"LocalSGD(every={self.every}{pull})"

    @property
    def bound(self) -> int | None:
        """Between two averages nobody waits; at one all do, so clocks differ by this at most."""
        return self.every - 1

    def averages_after(self, step: int) -> bool:
        """Whether parameters are averaged when this step, counted from 0, has ended."""
        return (step + 1) % self.every == 0


class Gossip:
    """After each step of its own a rank pulls the newest parameters of one neighbour and moves towards them.

    Rank i moves to x_i - a (x_i - x_m) with a = strength * gamma, where gamma = (d[i][m] + d[m][i]) / (2 p[i][m]): the
    form of NetMax, with its alpha * rho as the strength, so that who is chosen seldom pulls harder.

    Parameters
    ----------
    probabilities : (N, N) floats
        p[i][m], of rank i choosing rank m, such as `topoplan.neighbour_probabilities` gives; m = i pulls nothing.
    strength : float, optional
        By default the largest that moves no rank past the middle (`topoplan.simulation.gossip.strongest`).
    seed : int
        Of the choices, which are a function of seed, rank and step.

    Raises
    ------
    UsageError
        The probabilities are none, leave a rank alone, or the strength moves a rank past its neighbour.

    Examples
    --------
    >>> import topoplan
    >>> mode = Gossip(topoplan.neighbour_probabilities("v100x4"))
    >>> mode.size, [mode.neighbour(0, step) for step in range(6)]
    (4, [3, 2, 3, 3, 3, 3])
    """

    __slots__ = ("_sums", "probabilities", "seed", "strength", "weights")

    def __init__(self, probabilities: ArrayLike, *, strength: float | None = None, seed: int = 0) -> None:
        self.probabilities = checked_probabilities(probabilities)
        self.strength = strongest(self.probabilities) if strength is None else strength
        self.weights = mixing_weights(self.probabilities, self.strength)
        _check("seed", seed, least=0)
        self.seed = seed
        self._sums = np.cumsum(self.probabilities, axis=1)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.probabilities)

    @property
    def bound(self) -> int | None:
        """As `BSP.bound`."""
        return None

    def averages_after(self, step: int) -> bool:
        """As `LocalSGD.averages_after`: after every step, with one neighbour."""
        return step >= 0

    def neighbour(self, rank: int, step: int) -> int:
        """The rank whose parameters a rank pulls after a step; itself for none."""
        drawn = np.random.default_rng([self.seed, rank, step]).random() * self._sums[rank, -1]
        return int(np.searchsorted(self._sums[rank], drawn, side="right"))

    def __str__(self) -> str:
        told = hashlib.sha256(self.probabilities.tobytes()).hexdigest()[:8]
        return (
            f"Gossip({self.size} ranks, strength {self.strength:.4g}, seed {self.seed}, probabilities {told})"
        )


Mode = BSP | SSP | ASP | LocalSGD | Gossip

APART = (LocalSGD, Gossip)
"""Modes that leave gradients where they are, so that each rank has parameters of its own."""


def mode_of(given: object) -> Mode:
    """The mode that is given or named.

    Parameters
    ----------
    given : BSP, SSP, ASP, LocalSGD, Gossip, str or None
        Names are ``bsp``, ``asp``, ``ssp:S`` with the staleness and ``local:H`` with the steps between two averages.
        None is BSP.

    Raises
    ------
    UsageError
        It is no mode and names none.

    Examples
    --------
    >>> mode_of("ssp:2"), mode_of("local:8"), mode_of(None)
    (SSP(staleness=2), LocalSGD(every=8), BSP())
    """
    if given is None:
        return BSP()
    if isinstance(given, Mode):
        return given
    name, colon, number = str(given).strip().lower().partition(":")
    if isinstance(given, str) and not colon and name in ("bsp", "asp"):
        return BSP() if name == "bsp" else ASP()
    if isinstance(given, str) and number.isdecimal() and name in ("ssp", "local"):
        return SSP(int(number)) if name == "ssp" else LocalSGD(int(number))
    raise UsageError(
        f"mode {given!r} is no synchronisation mode; give BSP(), SSP(2), ASP(), LocalSGD(8) or Gossip(p), or a "
        "name: 'bsp', 'ssp:2', 'asp', 'local:8'"
    )


def may_begin(clock: int, others: Iterable[int], bound: int | None) -> bool:
    """The rule: whether a rank with this clock may begin its next step.

    Parameters
    ----------
    clock : int
        Steps it has finished.
    others : iterable of int
        Steps that the others have finished, as far as it knows.
    bound : int or None

    Examples
    --------
    >>> may_begin(3, [3, 1], 1), may_begin(3, [3, 2], 1), may_begin(3, [0], None)
    (False, True, True)
    """
    return bound is None or all(clock - other <= bound for other in others)


@dataclass(frozen=True, slots=True)
class Straggler:
    """Makes some steps of one rank take longer, to see what the modes make of it.

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


def _check(name: str, value: int, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name} {value!r} must be a whole number of {least} or more")
