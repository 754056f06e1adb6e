"""A packing program in floating point: its columns, a basis, and what that holds and prices.

    maximise  c x   subject to  A x <= b,  x >= 0,     b >= 0, columns made on demand.

Amounts are kept in parts of the largest limit and every row is divided by its own, so that a tolerance means the same
in all rows and all programs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from topoplan.simplex.float_basis import FloatBasis, Floats

FEASIBLE = 1e-9
"""How far below zero a basic amount may lie."""

GAINFUL = 1e-9
"""Gain per unit of a column above which it may enter the basis."""

PIVOT = 1e-7
"""The smallest number that may be divided by."""

OLD = 100
"""Pivots after which the inverse is made anew."""


class FloatProgram:
    """A program, and a basis of it, at first that of all slacks.

    Parameters
    ----------
    limits : (rows,) float64
        Right-hand sides b, zero or more.

    Attributes
    ----------
    costs : (columns,) float64
        Objective coefficients; they may be replaced.
    allowed : (columns,) bool
        Columns that may enter the basis.
    closed : (rows,) bool
        Rows whose slack may not.
    limits : (rows,) float64
        Limits that the basis is held to, scaled.
    held : (rows,) float64
        Amount of every member, scaled.
    pivots : int
        Pivots made so far.

    Examples
    --------
    >>> program = FloatProgram(np.array([4.0, 6.0]))
    >>> program.add(np.array([[1.0], [1.0]]), np.ones(1))
    >>> program.pivot(0, 0, program.seen(0)).tolist()
    [0.6666666666666666, 0.0]
    >>> program.value, program.solution(), program.duals.tolist()
    (4.0, {0: 4.0}, [1.0, 0.0])
    """

    def __init__(self, limits: Floats) -> None:
        rows = len(limits)
        self._top = float(limits.max()) or 1.0
        shares = limits / self._top
        self._scale: Floats = np.where(shares > 0, shares, 1.0)
        self.true_limits: Floats = shares / self._scale
        self.limits: Floats = self.true_limits
        self.held: Floats = self.limits.copy()
        self.basis = FloatBasis(rows)
        self._room: Floats = np.zeros((rows, 256))
        self.norms: Floats = np.zeros(0)
        self.costs: Floats = np.zeros(0)
        self.allowed: NDArray[np.bool_] = np.zeros(0, dtype=bool)
        self.closed: NDArray[np.bool_] = np.zeros(rows, dtype=bool)
        self.pivots = 0

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.held)

    @property
    def columns(self) -> int:
        """Number of columns, slacks apart."""
        return len(self.costs)

    @property
    def members(self) -> NDArray[np.int64]:
        """(rows,) int64: the basic columns, and -1 - row for basic slacks."""
        return self.basis.members

    @property
    def table(self) -> Floats:
        """(rows, columns) float64: the columns, every row divided by its scaled limit."""
        return self._room[:, : self.columns]

    @property
    def value(self) -> float:
        """Objective of the amounts held."""
        return self.objective() * self._top

    @property
    def duals(self) -> Floats:
        """(rows,) float64: dual value of each row."""
        return np.asarray(self.prices() / self._scale)

    def solution(self) -> dict[int, float]:
        """Amount of each column that has one above zero, by column number."""
        used = np.flatnonzero((self.members >= 0) & (self.held > FEASIBLE))
        amounts = (self.held[used] * self._top).tolist()
        return dict(sorted(zip(self.members[used].tolist(), amounts, strict=True)))

    def add(self, columns: Floats, costs: Floats) -> None:
        """Append columns, (rows, count) float64, and their objective coefficients."""
        first, last = self.columns, self.columns + len(costs)
        if last > self._room.shape[1]:
            self._room = np.concatenate([self._room, np.zeros((self.rows, last))], axis=1)
        fresh = columns / self._scale[:, None]
        self._room[:, first:last] = fresh
        # A slack has length 1 here, so a column of no entries at all is not infinitely steep.
        self.norms = np.concatenate([self.norms, 1 + (fresh * fresh).sum(axis=0)])
        self.costs = np.concatenate([self.costs, costs])
        self.allowed = np.concatenate([self.allowed, np.ones(len(costs), dtype=bool)])

    def scaled(self, value: float) -> float:
        """An objective value in the unit of `objective`."""
        return value / self._top

    def objective(self) -> float:
        """Objective of the amounts held, scaled."""
        return float(sum((self.held * self.member_costs()).tolist()))

    def member_costs(self) -> Floats:
        """(rows,) float64: objective coefficient of every member."""
        if not self.columns:
            return np.zeros(self.rows)
        return np.where(self.members >= 0, self.costs[np.maximum(self.members, 0)], 0)

    def prices(self) -> Floats:
        """(rows,) float64: dual values of the scaled rows."""
        return self.basis.weighed(self.member_costs())

    def priced(self, prices: Floats) -> Floats:
        """(columns,) float64: what the columns cost at prices of the scaled rows."""
        return np.asarray((self.table * prices[:, None]).sum(axis=0))

    def gains(self) -> Floats:
        """(columns,) float64: gain of one unit of every column."""
        return np.asarray(self.costs - self.priced(self.prices()))

    def seen(self, number: int) -> Floats:
        """(rows,) float64: a column, or the slack -1 - row, as the basis sees it."""
        if number < 0:
            return np.array(self.basis.inverse[-1 - number])
        return self.basis.seen(self.table[:, number])

    def pivot(self, row: int, entering: int, column: Floats) -> Floats:
        """Let a column, given as the basis sees it, replace the member of a row; that row of the new inverse."""
        step = self.held[row] / column[row]
        self.held -= step * column
        self.held[row] = step
        self.pivots += 1
        return np.asarray(self.basis.pivot(row, entering, column))

    def holding(self, limits: Floats) -> Floats:
        """(rows,) float64: what the members would hold at other scaled limits."""
        return np.asarray((self.basis.inverse * limits[:, None]).sum(axis=0))

    def refresh(self) -> bool:
        """Make the inverse and the amounts anew; False where the basis cannot be inverted."""
        done = self.basis.refresh(self.table)
        self.held = self.holding(self.limits)
        return done

    def magnify(self, amounts: dict[int, float]) -> None:
        """Hold amounts, of every member in true units, whatever the limits say."""
        held = np.array([amounts[member] for member in self.members.tolist()])
        slack = self.members < 0
        held[slack] /= self._scale[-1 - self.members[slack]]
        self.held = held / self._top

    def restart(self, members: NDArray[np.int64]) -> None:
        """Go on from another basis; from that of all slacks where rounding cannot invert it."""
        self.limits = self.true_limits
        self.basis = FloatBasis(self.rows)
        self.basis.members = members
        if not self.refresh():
            self.basis = FloatBasis(self.rows)
            self.held = self.limits.copy()
