"""A simplex in floating point that finds its way through large packing programs, on every machine the same way.

It is a guide and proves nothing: `topoplan.simplex.float_guided` solves the basis that it ends at exactly. Columns
are priced a few at a time, by gain over length. Ties, of which packing programs are full, are broken beforehand: what
the basis holds, and with it the limits, is raised by small fixed amounts (Charnes 1952). At the optimum the true
limits return, and the dual simplex mends what raising them had hidden.

The dual simplex (Lemke 1954) mends a basis that prices well but holds less than nothing of some members: the member
that is farthest below zero for its length leaves, at the least loss (dual steepest edge; Forrest, Goldfarb 1992). Ties
between the columns that may replace it are broken beforehand: small fixed fees on all that are not in the basis.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from topoplan.simplex.float_basis import Floats
from topoplan.simplex.float_tableau import FEASIBLE, GAINFUL, OLD, PIVOT, FloatProgram
from topoplan.simplex.random_numbers import Stream

NEAR = 1e-9
"""How far below a target, in parts of it, the objective may end."""

_RAISE = 1e-6
"""The largest amount by which a limit is raised, in parts of it."""

_STEPS = 1 << 20

_CANDIDATES = 32
"""Columns that are priced at every pivot; all others only when none of these is worth its place any more."""

_FADED = 0.25
"""Part of the best merit at the last pricing of all columns below which all are priced again."""

_LOOK = 16
"""Pivots between two looks at whether the target is reached."""

_LOST = 40
"""Pivots for each row and column after which the search is lost."""


class FloatSimplex(FloatProgram):
    """A program that can be solved.

    Parameters
    ----------
    limits : (rows,) float64
        Right-hand sides b, zero or more.

    Examples
    --------
    >>> guide = FloatSimplex(np.array([4.0, 6.0]))
    >>> guide.add(np.array([[1.0, 1, 2], [1, 3, 1]]), np.ones(3))
    >>> guide.maximise(), guide.value, guide.members.tolist()
    (True, 4.0, [0, -2])
    """

    def __init__(self, limits: Floats) -> None:
        super().__init__(limits)
        self._stream = Stream(3)

    def maximise(self, *, enough: float | None = None) -> bool:
        """Pivot until no allowed column or open slack gains, or until the objective is near ``enough``.

        Returns
        -------
        bool
            False where rounding led astray: too many pivots, or a basis that cannot be inverted.
        """
        goal = np.inf if enough is None else self.scaled(enough) * (1 - NEAR)
        self._raise_limits()
        prices = self.prices()
        chosen: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        least = 0.0
        for pivot in range(1, 2 + _LOST * (self.rows + self.columns)):
            entering, gain, merit = self._entering(prices, chosen)
            if merit <= least:
                chosen = self._candidates(prices)
                entering, gain, merit = self._entering(prices, chosen)
                least = _FADED * merit
                if merit == 0:
                    return self._settle()
            column = self.seen(entering)
            row = self._leaving(column)
            if row is None:
                return False
            prices += gain * self.pivot(row, entering, column)
            if self.basis.age >= OLD:
                if not self.refresh():
                    return False
                prices = self.prices()
            if pivot % _LOOK == 0 and self.objective() >= goal and self._arrived(goal):
                return self._settle()
        return False

    def mend(self, amounts: dict[int, float]) -> bool:
        """Expel members that are below zero, by amounts better known than rounding shows them.

        Parameters
        ----------
        amounts : dict of int to float
            Amount of every member, all magnified alike.

        Returns
        -------
        bool
            False where rounding led astray.
        """
        self.magnify(amounts)
        return expel(self, self._stream) and self.refresh()

    def _entering(self, prices: Floats, chosen: NDArray[np.int64]) -> tuple[int, float, float]:
        """The best of the chosen columns and of all slacks, its gain, and its merit: 0 where none gains."""
        best, gain, merit = 0, 0.0, 0.0
        if chosen.size:
            gains = self.costs[chosen] - (self.table[:, chosen] * prices[:, None]).sum(axis=0)
            merits = _merits(gains, self.norms[chosen])
            at = int(merits.argmax())
            best, gain, merit = int(chosen[at]), float(gains[at]), float(merits[at])
        slacks = np.where(self.closed, 0, -prices)
        row = int(slacks.argmax())
        slack = float(slacks[row])
        if slack > GAINFUL and slack * slack / 2 > merit:
            return -1 - row, slack, slack * slack / 2
        return best, gain, merit

    def _candidates(self, prices: Floats) -> NDArray[np.int64]:
        merits = np.where(self.allowed, _merits(self.costs - self.priced(prices), self.norms), 0)
        best = np.argsort(-merits, kind="stable")[:_CANDIDATES]
        return np.sort(best[merits[best] > 0])

    def _leaving(self, column: Floats) -> int | None:
        """The row of largest pivot among those that reach zero first, give or take `FEASIBLE` (Harris 1973)."""
        rows = np.flatnonzero(column > PIVOT)
        if not rows.size:
            return None
        pivots = column[rows]
        held = np.maximum(self.held[rows], 0)
        first = held <= ((held + FEASIBLE) / pivots).min() * pivots
        return int(rows[np.where(first, pivots, 0).argmax()])

    def _raise_limits(self) -> None:
        """Give every member a little more than it has, and every row the limit that this needs."""
        noise = self._stream.whole(self.rows, _STEPS)
        self.held = np.maximum(self.held, 0) + _RAISE * (_STEPS + noise) / (2.0 * _STEPS)
        slack = self.members < 0
        self.limits = np.zeros(self.rows)
        self.limits[-1 - self.members[slack]] = self.held[slack]
        columns = np.ascontiguousarray(self.table[:, self.members[~slack]].T)
        self.limits += (columns * self.held[~slack][:, None]).sum(axis=0)

    def _arrived(self, goal: float) -> bool:
        """Whether the basis is feasible at the true limits and reaches a goal there."""
        raised, self.held = self.held, self.holding(self.true_limits)
        arrived = self.held.min() > -FEASIBLE and self.objective() >= goal
        self.held = raised
        return bool(arrived)

    def _settle(self) -> bool:
        """Return to the true limits."""
        self.limits = self.true_limits
        if 2 * self.basis.age >= OLD:
            return self.refresh() and expel(self, self._stream)
        self.held = self.holding(self.limits)
        return expel(self, self._stream)


def _merits(gains: Floats, norms: Floats) -> Floats:
    """Squared gain per squared length: steep columns first."""
    return np.where(gains > GAINFUL, gains * gains / norms, 0)


_FEE = 1e-7
"""The largest fee, in units of the objective."""

_DUAL_LOST = 20
"""Pivots for each row after which the search is lost."""


def expel(program: FloatProgram, stream: Stream) -> bool:
    """Pivot until no member of the basis is below zero.

    Parameters
    ----------
    program : FloatProgram
        No column gains.
    stream : Stream
        Where the fees come from.

    Returns
    -------
    bool
        False where rounding led astray: no column could replace a member, or too many did.

    Examples
    --------
    >>> program = FloatProgram(np.array([4.0, 6.0]))
    >>> program.add(np.array([[1.0], [2.0]]), np.ones(1))
    >>> program.pivot(0, 0, program.seen(0)).tolist(), program.value, program.held.tolist()
    ([0.6666666666666666, 0.0], 4.0, [0.6666666666666666, -0.33333333333333326])
    >>> expel(program, Stream(0)), program.value
    (True, 3.0)
    """
    columns, rows = program.columns, program.rows
    fees: Floats = np.asarray((_STEPS + stream.whole(columns + rows, _STEPS)) * (_FEE / (2 * _STEPS)))
    fees[_places(program)] = 0
    for _ in range(_DUAL_LOST * rows):
        below = np.minimum(program.held, 0)
        if below.min() > -FEASIBLE:
            return True
        lengths = (program.basis.inverse * program.basis.inverse).sum(axis=0)
        row = int((below * below / lengths).argmax())
        entering = _replacement(program, row, fees)
        if entering is None:
            return False
        program.pivot(row, entering, program.seen(entering))
        if program.basis.age >= OLD and not _renewed(program):
            return False
    return False


def _places(program: FloatProgram) -> NDArray[np.int64]:
    """Place of every member among the columns and, behind them, the slacks."""
    members = program.members
    return np.where(members >= 0, members, program.columns - 1 - members)


def _replacement(program: FloatProgram, row: int, fees: Floats) -> int | None:
    """The column or slack that may replace the member of a row at the least loss for each unit."""
    columns = program.columns
    prices = program.basis.weighed(program.member_costs() - fees[_places(program)])
    weights = program.basis.inverse[:, row]
    seen = np.concatenate([program.priced(weights), weights])
    losses = np.concatenate([program.priced(prices) - program.costs, prices]) + fees
    usable = np.concatenate([program.allowed, ~program.closed]) & (seen < -PIVOT)
    if not usable.any():
        return None
    ratios = np.where(usable, np.maximum(losses, 0) / np.where(usable, -seen, 1), np.inf)
    near = ratios <= ratios.min() + GAINFUL
    place = int(np.where(near, -seen, 0).argmax())
    return place if place < columns else columns - 1 - place


def _renewed(program: FloatProgram) -> bool:
    """Make the inverse anew and keep what every member holds; False where that cannot be done."""
    held = dict(zip(program.members.tolist(), program.held.tolist(), strict=True))
    done = program.basis.refresh(program.table)
    program.held = np.array([held[member] for member in program.members.tolist()])
    return done
