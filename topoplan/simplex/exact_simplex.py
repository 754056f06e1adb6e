"""An exact simplex for packing programs whose columns are made on demand.

    maximise  c x   subject to  A x <= b,  x >= 0,     A, b, c whole numbers, b >= 0.

Column generation solves it with few columns: the dual values price the columns known so far, then an oracle may
add better ones. The basis inverse is kept as whole numbers over one common denominator (Edmonds 1967, Bareiss
1968), so optimum and duals are exact rationals, the same on every machine, and a proof rather than a rounding.
Ties in the ratio test go by the lexicographic rule (Dantzig, Orden, Wolfe 1955), which cannot cycle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Whole = NDArray[np.int64] | NDArray[np.object_]
"""Whole numbers: machine words while they fit, Python integers beyond."""

_SAFE = 1 << 62
_WIDE_COST = 30
"""How much longer an operation on a Python integer takes than on a machine word, roughly."""
_PIVOT_COST = 5000
"""What a pivot costs beside its table entries, in entries."""


class PackingSimplex:
    """A packing program in the making.

    Parameters
    ----------
    limits : sequence of int
        Right-hand sides b, one per row, zero or more.

    Attributes
    ----------
    pivots : int
        Pivots made so far.
    work : int
        Effort so far in table entries, wide ones counted dearer: the same on every machine, unlike seconds.

    Examples
    --------
    >>> program = PackingSimplex([4, 6])
    >>> program.add([[1, 1], [1, 3], [2, 1]], [1, 1, 1])
    >>> program.optimise()
    >>> program.value, program.solution()
    (Fraction(4, 1), {0: Fraction(4, 1)})
    """

    blur = Fraction(0)
    """Part of a price by which near dual values may be wrong."""

    def __init__(self, limits: Sequence[int]) -> None:
        rows = len(limits)
        # Column 0 holds the basic values, the others the inverse; all over ``_denominator``.
        self._table: Whole = _fitting(
            [[int(limit), *(int(i == j) for j in range(rows))] for i, limit in enumerate(limits)]
        )
        self._table_peak: int | None = None
        self._denominator = 1
        self._basis = [-1 - row for row in range(rows)]
        self._columns: NDArray[np.int64] = np.zeros((rows, 0), dtype=np.int64)
        self._costs: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._allowed: NDArray[np.bool_] = np.zeros(0, dtype=bool)
        self._closed: NDArray[np.bool_] = np.zeros(rows, dtype=bool)
        self._heaviest = 0
        self.pivots = 0
        self.work = 0

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self._basis)

    @property
    def columns(self) -> int:
        """Number of columns, slacks apart."""
        return int(self._columns.shape[1])

    @property
    def basis(self) -> tuple[int, ...]:
        """The basic columns, and -1 - row for the slack of a row."""
        return tuple(self._basis)

    def add(self, columns: Sequence[Sequence[int]], costs: Sequence[int]) -> None:
        """Append columns (each with one whole number per row) and their objective coefficients."""
        if columns:
            block = np.array(columns, dtype=np.int64).T
            self._heaviest = max(self._heaviest, int(np.abs(block).sum(axis=0).max()))
            self._columns = np.hstack([self._columns, block])
            self._costs = np.concatenate([self._costs, np.array(costs, dtype=np.int64)])
            self._allowed = np.concatenate([self._allowed, np.ones(len(columns), dtype=bool)])

    @property
    def value(self) -> Fraction:
        """Objective of the current basic solution."""
        total = sum(int(self._table[i, 0]) * int(self._costs[j]) for i, j in enumerate(self._basis) if j >= 0)
        return Fraction(total, self._denominator)

    def solution(self) -> dict[int, Fraction]:
        """Value of each column that is above zero, by column number."""
        return {
            j: Fraction(int(self._table[i, 0]), self._denominator)
            for i, j in sorted(enumerate(self._basis), key=lambda pair: pair[1])
            if j >= 0 and self._table[i, 0] > 0
        }

    def duals(self) -> tuple[list[int], int]:
        """Dual value of each row as whole numbers, and their common denominator."""
        return [int(value) for value in self._dual_numerators()], self._denominator

    def _dual_numerators(self) -> Whole:
        table = self._table
        costs = [int(self._costs[j]) if j >= 0 else 0 for j in self._basis]
        if table.dtype != object and self._peak() * sum(map(abs, costs)) < _SAFE:
            return np.asarray(np.array(costs, dtype=np.int64) @ table[:, 1:])
        return np.asarray(np.array(costs, dtype=object) @ table[:, 1:].astype(object))

    def _reduced_costs(self, duals: Whole) -> Whole:
        """Gain of every column per unit, over the common denominator."""
        largest = _largest(duals) * self._heaviest + _largest(self._costs) * self._denominator
        if duals.dtype != object and largest < _SAFE:
            return np.asarray(self._costs * self._denominator - duals @ self._columns)
        costs = self._costs.astype(object) * self._denominator
        return np.asarray(costs - duals.astype(object) @ self._columns.astype(object))

    def optimise(self, *, target: Fraction | None = None) -> None:
        """Pivot until no known column improves the objective, or until the objective reaches ``target``."""
        while target is None or self.value < target:
            entering = self._entering()
            if entering is None:
                return
            self._pivot(entering)

    def start_from(self, columns: Sequence[int]) -> None:
        """Optimise over these columns alone, as a start for a search over all."""
        allowed, self._allowed = self._allowed, np.zeros_like(self._allowed)
        self._allowed[list(columns)] = True
        self.optimise()
        self._allowed = allowed

    def reaches(self, target: Fraction) -> bool:
        """Whether the current basic solution is worth a target."""
        return self.value >= target

    def confirm(self) -> bool:
        """True: the basis that the last search ended at is optimal, and `near_duals` are `duals`."""
        return True

    @property
    def near_value(self) -> float:
        """`value` as the nearest float."""
        return float(self.value)

    def near_duals(self) -> tuple[list[int], int]:
        """`duals`: there is no quicker way to them here."""
        return self.duals()

    def near_solution(self) -> Mapping[int, Fraction | float]:
        """`solution`: there is no quicker way to it here."""
        return self.solution()

    def corner(self) -> dict[int, Fraction] | None:
        """`solution`, which stays on the face of `keep_optimal`."""
        return self.solution()

    def keep_optimal(self) -> None:
        """From now on stay on the face of optimal solutions: forbid what would lower the objective."""
        self.optimise()
        duals = self._dual_numerators()
        self._allowed = self._allowed & (self._reduced_costs(duals) == 0)
        self._closed = self._closed | (duals > 0)

    def prefer(self, weights: NDArray[np.int64]) -> None:
        """Move on the face to a solution of largest ``weights`` x, without giving up the first objective."""
        first, self._costs = self._costs, weights
        self.optimise()
        self._costs = first

    def _entering(self) -> int | None:
        """The column (or slack, as -1 - row) of largest reduced cost, if one is above zero."""
        duals = self._dual_numerators()
        reduced = np.where(self._allowed, self._reduced_costs(duals), 0)
        best, gain = None, 0
        if reduced.size:
            candidate = int(np.argmax(reduced))
            if reduced[candidate] > 0:
                best, gain = candidate, int(reduced[candidate])
        open_duals = np.where(self._closed, 0, duals)
        row = int(np.argmin(open_duals))
        return -1 - row if -int(open_duals[row]) > gain else best

    def _peak(self) -> int:
        """The largest entry of the table, whatever its sign; looked up once for each pivot."""
        if self._table_peak is None:
            self._table_peak = _largest(self._table)
        return self._table_peak

    def _column(self, number: int) -> Whole:
        """A column as the current basis sees it, over the common denominator."""
        table = self._table
        if number < 0:
            return table[:, -number].copy()
        column = self._columns[:, number]
        if table.dtype == object or self._peak() * int(np.abs(column).sum()) >= _SAFE:
            return _fitting((table[:, 1:].astype(object) @ column.astype(object)).tolist())
        return table[:, 1:] @ column

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
        fresh = (table * pivot - np.outer(column, table[row])) // self._denominator
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
        """The row of the lexicographically smallest ratio among rows where the column is above zero."""
        rows = [int(i) for i in np.flatnonzero(column > 0)]
        if not rows:
            return None
        table = self._table
        for k in range(table.shape[1]):
            best: list[int] = []
            numerator, divisor = 0, 0
            for i in rows:
                a, b = int(table[i, k]), int(column[i])
                if not best or a * divisor < numerator * b:
                    best, numerator, divisor = [i], a, b
                elif a * divisor == numerator * b:
                    best.append(i)
            if len(best) == 1:
                return best[0]
            rows = best
        return rows[0]


def _fitting(values: list[list[int]] | list[int]) -> Whole:
    """An int64 array where the numbers are small, an array of Python integers otherwise."""
    wide = np.array(values, dtype=object)
    return wide.astype(np.int64) if _largest(wide) < _SAFE >> 24 else wide


def _largest(values: Whole) -> int:
    return int(np.abs(values).max()) if values.size else 0
