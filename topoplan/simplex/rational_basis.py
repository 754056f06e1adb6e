"""What a basis of a packing program is worth, exactly: amounts, duals, and whether it is feasible.

    maximise  c x   subject to  A x <= b,  x >= 0.

Rows whose slack is basic are not tight: they have dual zero, and their slack is what the others leave over. So only
the tight rows and the basic columns are solved for (`topoplan.simplex.dixon_lifting`).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from topoplan.simplex.dixon_lifting import WholeSystem


class ExactBasis:
    """A basis, solved in exact arithmetic.

    Parameters
    ----------
    limits : sequence of int
        Right-hand sides b.
    columns : (rows, columns) int64
        The matrix A.
    costs : (columns,) int64
        Objective coefficients.
    members : (rows,) int64
        The basic columns, and -1 - row for the slack of a row, in any order.

    Raises
    ------
    ZeroDivisionError
        The members are dependent.

    Examples
    --------
    >>> columns = np.array([[1, 1, 2], [1, 3, 1]])
    >>> basis = ExactBasis([4, 6], columns, np.array([1, 1, 1]), np.array([0, -2]))
    >>> basis.feasible, basis.value, basis.solution(), basis.duals
    (True, Fraction(4, 1), {0: Fraction(4, 1)}, ([1, 0], 1))
    """

    def __init__(
        self,
        limits: Sequence[int],
        columns: NDArray[np.int64],
        costs: NDArray[np.int64],
        members: NDArray[np.int64],
    ) -> None:
        self._limits = limits
        self._numbers: list[int] = np.sort(members[members >= 0]).tolist()
        self._columns = columns[:, self._numbers]
        self._costs: list[int] = costs[self._numbers].tolist()
        self._loose = np.zeros(len(limits), dtype=bool)
        self._loose[-1 - members[members < 0]] = True
        self._tight: list[int] = np.flatnonzero(~self._loose).tolist()
        self._system = WholeSystem(self._columns[self._tight])

    @cached_property
    def _amounts(self) -> tuple[list[int], int]:
        """Amounts of the basic columns as whole numbers, and their common denominator."""
        return self._system.solve([self._limits[row] for row in self._tight])

    @cached_property
    def held(self) -> tuple[dict[int, int], int]:
        """Amount of every member as a whole number, and the common denominator."""
        amounts, denominator = self._amounts
        used = self._columns[self._loose].astype(object) @ np.array(amounts, dtype=object)
        held = dict(zip(self._numbers, amounts, strict=True))
        for row, load in zip(np.flatnonzero(self._loose).tolist(), used.tolist(), strict=True):
            held[-1 - row] = self._limits[row] * denominator - load
        return held, denominator

    @cached_property
    def feasible(self) -> bool:
        """True where no member is below zero."""
        return all(amount >= 0 for amount in self.held[0].values())

    @cached_property
    def value(self) -> Fraction:
        """The objective."""
        amounts, denominator = self._amounts
        return Fraction(sum(c * x for c, x in zip(self._costs, amounts, strict=True)), denominator)

    def solution(self) -> dict[int, Fraction]:
        """Amount of each column that has one above zero, by column number."""
        amounts, denominator = self._amounts
        return {
            number: Fraction(amount, denominator)
            for number, amount in zip(self._numbers, amounts, strict=True)
            if amount > 0
        }

    @cached_property
    def duals(self) -> tuple[list[int], int]:
        """Dual value of every row as whole numbers, and their common denominator."""
        tight, denominator = self._system.solve_rows(self._costs)
        duals = [0] * len(self._limits)
        for row, value in zip(self._tight, tight, strict=True):
            duals[row] = value
        return duals, denominator
