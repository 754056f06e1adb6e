"""Solve packing programs by an exact simplex whose columns are made on demand.

    maximise  c x   subject to  A x <= b,  x >= 0,     A, b, c whole numbers, b >= 0.

Column generation solves it with few columns: the dual values price the columns known so far, then an oracle may
add better ones. The basis inverse is kept as whole numbers over one common denominator (Edmonds 1967, Bareiss
1968), so optimum and duals are exact rationals, the same on every machine. Ties in the ratio test go by the
lexicographic rule (Dantzig, Orden, Wolfe 1955), which cannot cycle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import cast

import numpy as np
from numpy.typing import NDArray

Whole = NDArray[np.int64] | NDArray[np.object_]
"""Whole numbers: machine words while they fit, else Python integers."""

_SAFE = 1 << 62
_WIDE_COST = 30
"""Approximate cost of an operation on a Python integer, in operations on a machine word."""
_PIVOT_COST = 5000
"""Cost of a pivot beside its table entries, in entries."""


class PackingSimplex:
    """A packing program under construction, with one limit b, zero or more, for each row.

    `work` is the effort so far in table entries, wide ones at a higher cost: the same on every machine, unlike seconds.
    """

    blur = Fraction(0)
    """Relative error of near dual values, at most."""

    def __init__(self, limits: Sequence[int]) -> None:
        rows = len(limits)
        # Column 0 holds the basic values, the others the inverse; all over ``_denominator``.
        self._table: Whole = _fitting(
            [[int(limit), *(int(i == j) for j in range(rows))] for i, limit in enumerate(limits)]
        )
        self._table_peak: int | None = None
        self._denominator = 1
        self._basis: NDArray[np.int64] = -1 - np.arange(rows)
        # Below a row of zeros, for the values among the columns of the table.
        self._columns: Whole = np.zeros((1 + rows, 0), dtype=np.int64)
        # Costs of the columns, and zeros for the slacks, which the basis counts from the end.
        self._costs: NDArray[np.int64] = np.zeros(rows, dtype=np.int64)
        self._allowed: NDArray[np.bool_] = np.zeros(0, dtype=bool)
        self._closed: NDArray[np.bool_] = np.zeros(rows, dtype=bool)
        self._weights: list[int] = []
        self._heaviest = 0
        self._dearest = 0
        self.pivots = 0
        self.work = 0

    @property
    def rows(self) -> int:
        return len(self._basis)

    @property
    def columns(self) -> int:
        """Number of columns without slacks."""
        return int(self._columns.shape[1])

    @property
    def basis(self) -> tuple[int, ...]:
        """The basic columns, and -1 - row for the slack of a row."""
        return tuple(self._basis.tolist())

    def add(self, columns: Sequence[Sequence[int]], costs: Sequence[int]) -> None:
        """Append columns (each with one whole number per row) and their objective coefficients."""
        if columns:
            block = _columns_of(columns)
            self._weights += np.abs(block).sum(axis=0).tolist()
            self._heaviest = max(self._weights)
            self._price(np.concatenate([self._costs[: self.columns], np.array(costs, dtype=np.int64)]))
            self._columns = cast("Whole", np.hstack([self._columns, block]))
            self._allowed = np.concatenate([self._allowed, np.ones(len(columns), dtype=bool)])

    @property
    def value(self) -> Fraction:
        """Objective of the current basic solution."""
        return Fraction(int(self._objective()[0]), self._denominator)

    def solution(self) -> dict[int, Fraction]:
        """Return the value of each column that is above zero, by column number."""
        amounts = zip(self._basis.tolist(), self._table[:, 0].tolist(), strict=True)
        return {j: Fraction(a, self._denominator) for j, a in sorted(amounts) if j >= 0 and a > 0}

    def duals(self) -> tuple[list[int], int]:
        """Return the dual value of each row as whole numbers, and their common denominator."""
        return self._objective()[1:].tolist(), self._denominator

    def _price(self, costs: NDArray[np.int64]) -> None:
        """Replace the objective coefficients."""
        self._costs = np.concatenate([costs, np.zeros(self.rows, dtype=np.int64)])
        self._dearest = _largest(self._costs)

    def _objective(self) -> Whole:
        """Return the row of the objective: its value, and the dual values, over the common denominator."""
        table, costs = self._table, self._costs[self._basis]
        if table.dtype != object and self._peak() * self._dearest * self.rows < _SAFE:
            return np.asarray(costs.dot(table))
        return np.asarray(costs.astype(object).dot(table.astype(object)))

    def _gains(self, objective: Whole) -> Whole:
        """Return the reduced cost of every column, over the common denominator."""
        costs, columns = self._costs[: self.columns], self._columns
        largest = _largest(objective[1:]) * self._heaviest + self._dearest * self._denominator
        if objective.dtype == object or largest >= _SAFE:
            costs, columns, objective = (array.astype(object) for array in (costs, columns, objective))
        return np.asarray(costs * self._denominator - objective.dot(columns))

    def optimise(self, *, target: Fraction | None = None) -> None:
        """Pivot until no known column improves the objective, or until the objective reaches ``target``."""
        while True:
            objective = self._objective()
            value = int(objective[0])
            if target is not None and value * target.denominator >= target.numerator * self._denominator:
                return
            entering = self._entering(objective)
            if entering is None:
                return
            self._pivot(entering)

    def start_from(self, columns: Sequence[int]) -> None:
        """Optimise over these columns alone, as the start of a search over all."""
        allowed, self._allowed = self._allowed, np.zeros_like(self._allowed)
        self._allowed[list(columns)] = True
        self.optimise()
        self._allowed = allowed

    def reaches(self, target: Fraction) -> bool:
        """Return whether the current basic solution reaches a target value."""
        return self.value >= target

    def confirm(self) -> bool:
        """Return True: the basis at which the last search ended is optimal, and `near_duals` are `duals`."""
        return True

    @property
    def near_value(self) -> float:
        """`value` as the nearest float."""
        return float(self.value)

    def near_duals(self) -> tuple[list[int], int]:
        """Return `duals`, which have no quicker approximation here."""
        return self.duals()

    def near_solution(self) -> Mapping[int, Fraction | float]:
        """Return `solution`, which has no quicker approximation here."""
        return self.solution()

    def corner(self) -> dict[int, Fraction] | None:
        """Return `solution`, which stays on the face of `keep_optimal`."""
        return self.solution()

    def keep_optimal(self) -> None:
        """From now on stay on the face of optimal solutions: forbid all that lowers the objective."""
        self.optimise()
        objective = self._objective()
        self._allowed = self._allowed & (self._gains(objective) == 0)
        self._closed = self._closed | (objective[1:] > 0)

    def prefer(self, weights: NDArray[np.int64]) -> None:
        """Move on the face to a solution of largest ``weights`` x, at the same value of the first objective."""
        first = self._costs[: self.columns]
        self._price(weights)
        self.optimise()
        self._price(first)

    def _entering(self, objective: Whole) -> int | None:
        """Return the column (or slack, as -1 - row) of largest reduced cost, if one is above zero."""
        gains = np.where(self._allowed, self._gains(objective), 0)
        best, gain = None, 0
        if gains.size:
            candidate = int(gains.argmax())
            if gains[candidate] > 0:
                best, gain = candidate, int(gains[candidate])
        open_duals = np.where(self._closed, 0, objective[1:])
        row = int(open_duals.argmin())
        return -1 - row if -int(open_duals[row]) > gain else best

    def _peak(self) -> int:
        """Return the largest absolute entry of the table; computed once for each pivot."""
        if self._table_peak is None:
            self._table_peak = _largest(self._table)
        return self._table_peak

    def _column(self, number: int) -> Whole:
        """Return a column in terms of the current basis, over the common denominator."""
        table = self._table
        if number < 0:
            return table[:, -number].copy()
        column = self._columns[:, number]
        if table.dtype == object or self._peak() * self._weights[number] >= _SAFE:
            return _fitting(table.astype(object).dot(column.astype(object)).tolist())
        return np.asarray(table.dot(column))

    def _pivot(self, entering: int) -> None:
        column = self._column(entering)
        row = self._leaving(column)
        assert row is not None, "a packing program is bounded: every column uses some row"
        pivot = int(column[row])
        table = self._table
        if table.dtype != object and self._peak() * max(pivot, _largest(column)) >= _SAFE // 2:
            table = table.astype(object)
        if table.dtype == object:
            column = column.astype(object)
        fresh = table * pivot - column[:, None] * table[row]
        fresh //= self._denominator
        fresh[row] = table[row]
        self._table = fresh
        self._table_peak = None
        self._denominator = pivot
        self._basis[row] = entering
        self.pivots += 1
        self.work += _PIVOT_COST + fresh.size * (_WIDE_COST if fresh.dtype == object else 1)
        if self.pivots % 64 == 0 and fresh.dtype == object and _largest(fresh) < _SAFE >> 24:
            self._table = fresh.astype(np.int64)

    def _leaving(self, column: Whole) -> int | None:
        """Return the row of the lexicographically smallest ratio among rows where the column is above zero."""
        divisors = column.tolist()
        rows = [i for i, b in enumerate(divisors) if b > 0]
        for entries in self._table.T if len(rows) > 1 else ():
            numerators = entries.tolist()
            best: list[int] = []
            numerator, divisor = 0, 0
            for i in rows:
                a, b = numerators[i], divisors[i]
                if not best or a * divisor < numerator * b:
                    best, numerator, divisor = [i], a, b
                elif a * divisor == numerator * b:
                    best.append(i)
            rows = best
            if len(rows) == 1:
                break
        return rows[0] if rows else None


def _columns_of(columns: Sequence[Sequence[int]]) -> Whole:
    """Return columns below a zero each: int64 if the sum of a column has room there, else Python integers."""
    values = [[0, *column] for column in columns]
    try:
        block: Whole = np.array(values, dtype=np.int64).T
    except OverflowError:
        return np.array(values, dtype=object).T
    return block if _largest(block) < _SAFE // max(1, len(block)) else block.astype(object)


def _fitting(values: list[list[int]] | list[int]) -> Whole:
    """Return an int64 array if the numbers are small, else an array of Python integers."""
    wide = np.array(values, dtype=object)
    return wide.astype(np.int64) if _largest(wide) < _SAFE >> 24 else wide


def _largest(values: Whole) -> int:
    return int(np.abs(values).max()) if values.size else 0
