"""Define synchronisation modes by one rule about clocks: how far a rank may run ahead of the slowest.

A rank's clock is the number of steps it has finished. It may begin a step when its clock is at most the staleness bound
ahead of the slowest clock, so no two clocks ever differ by more than the bound and one.

- `BSP` (bulk synchronous, bound 0, the default): every step averages the gradients of all ranks.
- `SSP` (stale synchronous, bound s; Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
  Parameter Server", NIPS 2013): gradients are added when they arrive, at most s steps late. A run does not repeat bit
  for bit, and the learning rate may have to be smaller.
- `ASP` (asynchronous, no bound): ranks never wait. Convergence is not guaranteed without a staleness bound.
- `LocalSGD` (Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019): ranks train alone and average their
  parameters every H steps. Replicas drift apart in between; a moment of the optimizer is of its own rank only.
  ``proximal`` holds them together (EMSO; Li et al., "Efficient Mini-batch Training for Stochastic Optimization", KDD
  2014): `Proximal` adds gamma (w - anchor), the gradient of gamma / 2 |w - anchor|^2, the anchor being the parameters
  after the last average.
- `Gossip` (NetMax, arXiv 2009.05766): after each step a rank pulls the parameters of one other and moves towards them
  (`topoplan.model.asynchronous_training`). Replicas differ until the end; their mean is preserved in expectation only.

Names are ``bsp``, ``ssp:S``, ``asp`` and ``local:H`` (`mode_of`); `Gossip` has none. `Straggler` slows one rank down.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from collectives.tables.numpy_arrays import ArrayLibrary
from topoplan.errors import UsageError
from topoplan.model.asynchronous_training import checked_probabilities, mixing_weights, strongest


@dataclass(frozen=True, slots=True)
class BSP:
    """Mode in which every step waits for all ranks."""

    @property
    def bound(self) -> int | None:
        """Steps that a rank may be ahead; None for any number."""
        return 0


@dataclass(frozen=True, slots=True)
class SSP:
    """Mode in which a rank may be `staleness` steps ahead of the slowest, 0 or more."""

    staleness: int

    def __post_init__(self) -> None:
        check_count("staleness", self.staleness, least=0)

    @property
    def bound(self) -> int | None:
        return self.staleness


@dataclass(frozen=True, slots=True)
class ASP:
    """Mode in which ranks never wait."""

    @property
    def bound(self) -> int | None:
        return None


@dataclass(frozen=True, slots=True, repr=False)
class LocalSGD:
    """Mode in which ranks train alone, and average their parameters every so many steps.

    Parameters
    ----------
    every : int
        Steps between two averages, 1 or more.
    proximal : float
        Factor gamma of the pull to the parameters of the last average, which is added to gradients. Each rank then
        minimizes its own part of the loss plus gamma / 2 times the squared distance (EMSO; Li et al., KDD 2014, in
        which it grows with the square root of the step); 0 for no pull.

    Examples
    --------
    >>> LocalSGD(8), LocalSGD(8, proximal=0.1)
    (LocalSGD(every=8), LocalSGD(every=8, proximal=0.1))
    """

    every: int
    proximal: float = 0.0

    def __post_init__(self) -> None:
        check_count("every", self.every, least=1)
        number = isinstance(self.proximal, (int, float)) and not isinstance(self.proximal, bool)
        if not number or not (self.proximal >= 0 and math.isfinite(self.proximal)):
            raise UsageError(f"proximal must be 0 or more, got {self.proximal!r}")

    def __repr__(self) -> str:
        pull = f", proximal={self.proximal}" if self.proximal else ""
        return f"LocalSGD(every={self.every}{pull})"

    @property
    def bound(self) -> int | None:
        """Steps that a rank may be ahead: ranks wait at averages only."""
        return self.every - 1

    def averages_after(self, step: int) -> bool:
        """Return whether parameters are averaged after this step, counted from 0."""
        return (step + 1) % self.every == 0


class Gossip:
    """Mode in which a rank pulls the newest parameters of one neighbour after each step and moves towards them.

    Rank i moves to x_i - a (x_i - x_m) with a = strength * gamma, and gamma = ``(d[i][m] + d[m][i]) / (2 p[i][m])``:
    the form of NetMax, with its alpha * rho as the strength, so that a rarely chosen neighbour pulls harder.

    Parameters
    ----------
    probabilities : (N, N) floats
        ``p[i][m]``, of rank i choosing rank m, such as `topoplan.neighbour_probabilities` gives; m = i pulls nothing.
    strength : float, optional
        By default the largest that moves no rank past the middle (`topoplan.model.asynchronous_training.strongest`).
    seed : int
        The choices are a function of seed, rank and step.

    Raises
    ------
    UsageError
        The probabilities are invalid, isolate a rank, or the strength moves a rank past its neighbour.

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
        check_count("seed", seed, least=0)
        self.seed = seed
        self._sums = np.cumsum(self.probabilities, axis=1)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.probabilities)

    @property
    def bound(self) -> int | None:
        return None

    def averages_after(self, step: int) -> bool:
        """Return whether parameters are mixed after this step: always."""
        return step >= 0

    def neighbour(self, rank: int, step: int) -> int:
        """Return the rank whose parameters a rank pulls after a step; itself for none."""
        drawn = np.random.default_rng([self.seed, rank, step]).random() * self._sums[rank, -1]
        return int(np.searchsorted(self._sums[rank], drawn, side="right"))

    def __str__(self) -> str:
        digest = hashlib.sha256(self.probabilities.tobytes()).hexdigest()[:8]
        return f"Gossip({self.size} ranks, strength {self.strength:.4g}, seed {self.seed}, probabilities {digest})"


Mode = BSP | SSP | ASP | LocalSGD | Gossip

LOCAL_MODES = (LocalSGD, Gossip)
"""Modes that leave gradients as they are, so that each rank has parameters of its own."""


def mode_of(given: object, name: str = "mode") -> Mode:
    """Return the mode for a mode, its name or None.

    Names are ``bsp``, ``asp``, ``ssp:S`` with the staleness and ``local:H`` with the steps between two averages. None
    is BSP. An error calls it by `name`.

    >>> mode_of("ssp:2"), mode_of("local:8"), mode_of(None)
    (SSP(staleness=2), LocalSGD(every=8), BSP())
    """
    if given is None:
        return BSP()
    if isinstance(given, Mode):
        return given
    kind, colon, number = str(given).strip().lower().partition(":")
    if isinstance(given, str) and not colon and kind in ("bsp", "asp"):
        return BSP() if kind == "bsp" else ASP()
    if isinstance(given, str) and number.isdecimal() and kind in ("ssp", "local"):
        return SSP(int(number)) if kind == "ssp" else LocalSGD(int(number))
    raise UsageError(
        f"{name} must be BSP(), SSP(2), ASP(), LocalSGD(8) or Gossip(p), or a name: 'bsp', 'ssp:2', 'asp', "
        f"'local:8'; got {given!r}"
    )


def may_begin(clock: int, others: Iterable[int], bound: int | None) -> bool:
    """Return whether a rank may begin its next step; clocks are the numbers of finished steps.

    >>> may_begin(3, [3, 1], 1), may_begin(3, [3, 2], 1), may_begin(3, [0], None)
    (False, True, True)
    """
    return bound is None or all(clock - other <= bound for other in others)


@dataclass(frozen=True, slots=True)
class Straggler:
    """Slows steps of one rank down by a factor of 1 or more, from step `first` to `last` (exclusive).

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
            raise UsageError(f"factor must be 1 or more, got {self.factor}")

    def delay(self, rank: int, step: int, seconds: float) -> float:
        """Return the seconds that a step of a rank takes longer than the ``seconds`` without delay."""
        slow = rank == self.rank and self.first <= step < self.last
        return (self.factor - 1) * seconds if slow else 0.0

    def hold_up(self, rank: int, step: int, seconds: float) -> None:
        """Sleep for the delay."""
        time.sleep(self.delay(rank, step, seconds))


def check_count(name: str, value: int, *, least: int, most: int | None = None) -> None:
    """Raise `UsageError` if a value is not an integer in a range."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        limits = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise UsageError(f"{name} must be a whole number {limits}, got {value!r}")


class Proximal:
    """Pull of parameters to their anchors, with factor `strength`; one list of arrays for each rank of this process."""

    def __init__(
        self, strength: float, library: ArrayLibrary[Any], parameters: Sequence[Sequence[Any]]
    ) -> None:
        self._strength = strength
        self._library = library
        for one in parameters[0]:
            if "float" not in library.dtype(one) and "complex" not in library.dtype(one):
                raise UsageError(
                    f"proximal needs float or complex parameters, got {library.dtype(one)}; leave it out"
                )
        self.averaged(parameters)

    def averaged(self, parameters: Sequence[Sequence[Any]]) -> None:
        """Make averaged parameters the anchor."""
        self._anchor = [[self._copy(one) for one in mine] for mine in parameters]
        self._pull: list[list[Any]] | None = None

    def moved(self, parameters: Sequence[Sequence[Any]]) -> None:
        """Compute the pull of parameters that have moved."""
        self._pull = [
            [(one - anchor) * self._strength for one, anchor in zip(mine, anchors, strict=True)]
            for mine, anchors in zip(parameters, self._anchor, strict=True)
        ]

    def add_to(self, gradients: Sequence[Sequence[Any]], *, scale: float = 1.0) -> None:
        """Add the pull, times a loss scale, to gradients, in place."""
        if self._pull is None:
            return
        for mine, pulls in zip(gradients, self._pull, strict=True):
            for gradient, pull in zip(mine, pulls, strict=True):
                gradient += pull if scale == 1 else pull * scale

    def state(self) -> dict[str, Any]:
        """Return copies of the anchors, and of the pull or None, as numpy arrays."""
        parts = {"anchor": self._anchor, "pull": self._pull}
        return {
            name: None
            if part is None
            else [[np.array(self._library.values(one)) for one in mine] for mine in part]
            for name, part in parts.items()
        }

    def common(self) -> dict[str, NDArray[Any]]:
        """Return the anchors by name, which are the same on all ranks."""
        return {
            f"anchor {place}": np.array(self._library.values(one))
            for place, one in enumerate(self._anchor[0])
        }

    def restore_common(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore the anchors of another rank, as `common` returned them, without a pull."""
        self._anchor = [[self._library.of(state[f"anchor {place}"]) for place in range(len(self._anchor[0]))]]
        self._pull = None

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        anchors, pulls = (
            None if part is None else [[self._library.of(one) for one in mine] for mine in part]
            for part in (state["anchor"], state["pull"])
        )
        assert anchors is not None, "a state has anchors"
        self._anchor, self._pull = anchors, pulls

    def _copy(self, array: Any) -> Any:
        made = self._library.empty(self._library.shape(array), array)
        self._library.follow_caller(array)
        with self._library.ordered():
            self._library.copy(made, array)
        return made
