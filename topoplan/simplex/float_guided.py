"""An exact simplex for large packing programs: floating point finds the basis, exact arithmetic proves it.

`PackingSimplex` makes every pivot exactly, which is fast while numbers are short. Where limits have nothing in common
(measured bandwidths) its numbers grow to hundreds of digits. Here `FloatSimplex` makes the pivots, and all that is
said of the result is solved exactly from the basis that it ends at (`ExactBasis`), as QSopt_ex does (Applegate, Cook,
Dash, Espinoza 2007). Where rounding has passed off a basis as feasible or optimal, a `PackingSimplex` that starts from
its columns finds the right one.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from topoplan.simplex.exact_simplex import PackingSimplex
from topoplan.simplex.float_simplex import NEAR, FloatSimplex
from topoplan.simplex.rational_basis import ExactBasis

_UNIT = 1 << 50
"""What the largest near dual value is rounded to."""

_SURELY_DEAR = 1e-6
"""Loss for each unit beyond which a column is no candidate for an optimum, whatever rounding did."""

_MENDS = 10
"""Times that a basis is mended before the search goes on exactly."""

_LARGEST = 900
"""Bits that a magnified amount may have."""

_PIVOT_COST = 5000
_ENTRIES = 4
"""Numbers of an inverse in floating point that change in the time of one whole number of an exact table."""


class GuidedSimplex:
    """A packing program in the making: the interface of `PackingSimplex`.

    Parameters
    ----------
    limits : sequence of int
        Right-hand sides b, one per row, zero or more.

    Attributes
    ----------
    mends, repairs : int
        How often a basis turned out not to be feasible, and how often only exact pivots could help.

    Examples
    --------
    >>> program = GuidedSimplex([4, 6])
    >>> program.add([[1, 1], [1, 3], [2, 1]], [1, 1, 1])
    >>> program.optimise()
    >>> program.value, program.solution(), program.duals()
    (Fraction(4, 1), {0: Fraction(4, 1)}, ([1, 0], 1))
    """

    blur = Fraction(1, 1 << 28)
    """Part of a price by which near dual values may be wrong."""

    def __init__(self, limits: Sequence[int]) -> None:
        self._limits = [int(limit) for limit in limits]
        self._guide = FloatSimplex(np.array([float(limit) for limit in limits]))
        self._columns: NDArray[np.int64] = np.zeros((len(limits), 0), dtype=np.int64)
        self._costs: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._basis: ExactBasis | None = None
        self._best: Fraction | None = None
        self._repair_work = 0
        self.mends = 0
        self.repairs = 0

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self._limits)

    @property
    def columns(self) -> int:
        """Number of columns, slacks apart."""
        return len(self._costs)

    @property
    def work(self) -> int:
        """Effort so far, in the unit of `PackingSimplex.work`."""
        return self._guide.pivots * (_PIVOT_COST + self.rows**2 // _ENTRIES) + self._repair_work

    def add(self, columns: Sequence[Sequence[int]], costs: Sequence[int]) -> None:
        """Append columns (each with one whole number per row) and their objective coefficients."""
        if columns:
            block = np.array(columns, dtype=np.int64).T
            self._columns = np.hstack([self._columns, block])
            self._costs = np.concatenate([self._costs, np.array(costs, dtype=np.int64)])
            self._guide.add(block.astype(np.float64), np.array(costs, dtype=np.float64))

    def optimise(self, *, target: Fraction | None = None) -> None:
        """Pivot until no known column seems to improve the objective, or until it comes near ``target``."""
        self._basis = None
        if not self._guide.maximise(enough=None if target is None else float(target)):
            self._repaired()

    def reaches(self, target: Fraction) -> bool:
        """Whether the current basic solution is worth a target; where it is near, the search goes on to the end."""
        if self._guide.value < float(target) * (1 - 2 * NEAR):
            return False
        basis = self._exact()
        if basis is None or not basis.feasible or basis.value < target:
            self.optimise()
        return self.value >= target

    def confirm(self) -> bool:
        """Make sure that the basis is optimal for the known columns; False where it was not, and duals are new."""
        before = np.sort(self._guide.members)
        self.duals()
        return np.array_equal(before, np.sort(self._guide.members))

    @property
    def value(self) -> Fraction:
        """Objective of the current basic solution."""
        return self._feasible().value

    @property
    def near_value(self) -> float:
        """`value` to a few digits, in little time."""
        return self._guide.value

    def solution(self) -> dict[int, Fraction]:
        """Value of each column that is above zero, by column number."""
        return self._feasible().solution()

    def near_solution(self) -> dict[int, float]:
        """`solution` to a few digits, in little time."""
        return self._guide.solution()

    def corner(self) -> dict[int, Fraction] | None:
        """`solution` where it is on the face of `keep_optimal`; None where rounding has left that."""
        basis = self._exact()
        proved = basis is not None and basis.feasible and basis.value == self._best
        return basis.solution() if basis is not None and proved else None

    def duals(self) -> tuple[list[int], int]:
        """Dual value of each row at the optimum of the known columns as whole numbers, and their common denominator."""
        basis = self._feasible()
        duals, denominator = basis.duals
        if min(duals) < 0 or any(gain > 0 for _, gain in self._near_gains(duals, denominator)):
            basis = self._repaired()
        return basis.duals

    def near_duals(self) -> tuple[list[int], int]:
        """`duals` up to `blur`, in little time."""
        duals = np.maximum(self._guide.duals, 0)
        largest = float(duals.max())
        if largest == 0:
            return [0] * self.rows, 1
        return np.rint(duals / largest * _UNIT).astype(np.int64).tolist(), round(_UNIT / largest)

    def keep_optimal(self) -> None:
        """From now on stay on the face of optimal solutions: forbid what would lower the objective."""
        self.optimise()
        duals, denominator = self.duals()
        self._best = self.value
        tight = np.zeros(self.columns, dtype=bool)
        tight[[number for number, gain in self._near_gains(duals, denominator) if gain == 0]] = True
        self._guide.allowed = self._guide.allowed & tight
        self._guide.closed = self._guide.closed | np.array([value > 0 for value in duals])

    def prefer(self, weights: NDArray[np.int64]) -> None:
        """Move on the face towards a solution of largest ``weights`` x, without giving up the first objective."""
        self._basis = None
        first, self._guide.costs = self._guide.costs, weights / max(1, int(np.abs(weights).max()))
        self._guide.maximise()
        self._guide.costs = first

    def _near_gains(self, duals: list[int], denominator: int) -> list[tuple[int, int]]:
        """Exact gain of every column that may be as good as free, over the common denominator."""
        near = np.flatnonzero(self._guide.gains() > -_SURELY_DEAR)
        prices = np.array(duals, dtype=object)
        exact = self._costs[near].astype(object) * denominator - prices @ self._columns[:, near].astype(
            object
        )
        return list(zip(near.tolist(), exact.tolist(), strict=True))

    def _feasible(self) -> ExactBasis:
        """The current basis, or where that is not feasible one that is."""
        for _ in range(_MENDS):
            basis = self._exact()
            if basis is None:
                break
            if basis.feasible:
                return basis
            self.mends += 1
            if not self._guide.mend(_magnified(basis, max(self._limits))):
                break
            self._basis = None
        return self._repaired()

    def _exact(self) -> ExactBasis | None:
        """The current basis solved exactly, or None if it is none."""
        if self._basis is None:
            try:
                self._basis = self._solved(self._guide.members)
            except ZeroDivisionError:
                return None
        return self._basis

    def _solved(self, members: NDArray[np.int64]) -> ExactBasis:
        return ExactBasis(self._limits, self._columns, self._costs, members)

    def _repaired(self) -> ExactBasis:
        """The optimal basis of the known columns, found exactly from the columns of the current one."""
        self.repairs += 1
        members = self._guide.members
        program = PackingSimplex(self._limits)
        program.add(self._columns.T.tolist(), self._costs.tolist())
        program.start_from(np.sort(members[members >= 0]).tolist())
        program.optimise()
        self._repair_work += program.work
        self._guide.restart(np.array(program.basis))
        self._basis = self._solved(np.array(program.basis))
        return self._basis


def _magnified(basis: ExactBasis, top: int) -> dict[int, float]:
    """Amounts of the members, so magnified that the one farthest below zero is at ``-top``."""
    held, _ = basis.held
    least = -min(held.values())
    largest = least << _LARGEST
    return {member: min(amount * top, largest) / least for member, amount in held.items()}
