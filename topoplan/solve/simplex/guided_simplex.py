"""Solve large packing programs exactly: floating point finds the basis, rational arithmetic proves it.

`PackingSimplex` pivots exactly, which is fast while numbers are short; measured bandwidths make them hundreds of
digits long. Here `FloatSimplex` pivots, and the last basis is solved exactly (`ExactBasis`), as in QSopt_ex
(Applegate, Cook, Dash, Espinoza 2007). If rounding made it look optimal, exact pivots lead from it to the optimum: a
few, since only gains too small for floating point are left. If it made a basis look feasible, and rounding cannot mend
it, a `PackingSimplex` that starts from its columns finds the right one.

Rows whose slack is basic have dual zero, so only the tight rows and the basic columns are solved for, by lifting
digit by digit from a prime (Dixon 1982): one inverse modulo a prime p below 2^31 gives the solution of A x = b
modulo p, the remainder divided by p is the right-hand side of the next digit, and n products give x modulo M = p^n.
Fractions are reconstructed modulo M (Wang 1981) over one common denominator d. With x = z / d modulo M, A z and d b
agree modulo M; if both are too small to differ by M they are equal, which is the proof, usually long before the
bound of Hadamard.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from topoplan.solve.simplex.exact_simplex import PackingSimplex
from topoplan.solve.simplex.float_simplex import NEAR, FloatSimplex


class ExactBasis:
    """A basis of A x <= b, solved in exact arithmetic.

    ``members`` are the basic columns, and -1 - row for the slack of a row, in any order; ZeroDivisionError if they are
    dependent.
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
        """Whether all members are at least zero."""
        return all(amount >= 0 for amount in self.held[0].values())

    @cached_property
    def value(self) -> Fraction:
        amounts, denominator = self._amounts
        return Fraction(sum(c * x for c, x in zip(self._costs, amounts, strict=True)), denominator)

    @property
    def members(self) -> list[int]:
        """The basic columns, and -1 - row for the slack of a row."""
        return list(self.held[0])

    def exchanged(self, entering: int, column: Sequence[int]) -> list[int]:
        """Return the members after a column, or the slack -1 - row, enters; the first of equals leaves (Bland 1977)."""
        parts, denominator = self._system.solve([column[row] for row in self._tight])
        loose = np.flatnonzero(self._loose).tolist()
        used = self._columns[self._loose].astype(object) @ np.array(parts, dtype=object)
        falling = dict(zip(self._numbers, parts, strict=True))
        for row, load in zip(loose, used.tolist(), strict=True):
            falling[-1 - row] = column[row] * denominator - load
        held, _ = self.held
        leaving, least, fall = 0, 0, 0
        for member in sorted(held):
            amount, part = held[member], falling[member]
            if part > 0 and (not fall or amount * fall < least * part):
                leaving, least, fall = member, amount, part
        assert fall, "a packing program is bounded: every column uses some row"
        return [entering if member == leaving else member for member in held]

    def solution(self) -> dict[int, Fraction]:
        """Return the amount of each column that has one above zero, by column number."""
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


PRIMES = (2147483647, 2147483629, 2147483587, 2147483579)
"""The largest primes below 2^31."""

_SAFE_PRODUCT = 1 << 62
_FIRST_DIGITS = 4
_MORE_DIGITS = 1.6


class WholeSystem:
    """A square system of whole numbers that can be solved for many right-hand sides, from either side.

    ZeroDivisionError if the matrix is singular, at least modulo all `PRIMES`.
    """

    def __init__(self, matrix: NDArray[np.int64]) -> None:
        for prime in PRIMES:
            inverse = inverse_modulo(matrix, prime)
            if inverse is not None:
                break
        else:
            raise ZeroDivisionError("the matrix of the system is singular")
        self._matrix = matrix
        self._prime = prime
        self._inverse = inverse

    def solve(self, right: Sequence[int]) -> tuple[list[int], int]:
        """Return the solution x of A x = b: numerators, and their common denominator, one or more."""
        return _lifted(self._matrix, self._inverse, self._prime, right)

    def solve_rows(self, right: Sequence[int]) -> tuple[list[int], int]:
        """Return the solution y of y A = c in the form of `solve`."""
        return _lifted(self._matrix.T, self._inverse.T, self._prime, right)


def inverse_modulo(matrix: NDArray[np.int64], prime: int) -> NDArray[np.int64] | None:
    """Return the inverse of a square matrix modulo a prime below 2^31, or None if it is singular there."""
    size = len(matrix)
    p = np.uint64(prime)
    work = (matrix % prime).astype(np.uint64)
    swaps = []
    for step in range(size):
        below = np.flatnonzero(work[step:, step])
        if not below.size:
            return None
        row = step + int(below[0])
        swaps.append(row)
        work[[step, row]] = work[[row, step]]
        head = np.uint64(pow(int(work[step, step]), -1, prime))
        work[step, step] = 1
        pivot = work[step] * head % p
        factors = work[:, step].copy()
        factors[step] = 0
        work[:, step] = np.where(factors > 0, 0, work[:, step])
        work[step] = pivot
        work += ((p - factors) % p)[:, None] * pivot
        # A quotient by a constant is several times faster than a remainder.
        work -= work // p * p
    for step in range(size - 1, -1, -1):
        row = swaps[step]
        work[:, [step, row]] = work[:, [row, step]]
    return work.astype(np.int64)


def _lifted(
    matrix: NDArray[np.int64], inverse: NDArray[np.int64], prime: int, right: Sequence[int]
) -> tuple[list[int], int]:
    if not any(right):
        return [0] * len(right), 1
    heaviest = max(map(sum, np.abs(matrix.astype(object)).tolist()))
    largest = max(map(abs, right))
    wide = heaviest * prime >= _SAFE_PRODUCT // 2
    exact = matrix.astype(object) if wide else matrix
    rest = np.array(right, dtype=object)
    digits: list[NDArray[np.int64]] = []
    wanted = _FIRST_DIGITS
    while True:
        while len(digits) < wanted:
            digit = _times(inverse, (rest % prime).astype(np.int64), prime)
            digits.append(digit)
            if rest.dtype == object and not wide and max(map(abs, rest.tolist())) < _SAFE_PRODUCT // 2:
                rest = rest.astype(np.int64)
            rest = (rest - exact @ digit.astype(rest.dtype)) // prime
        modulus = prime ** len(digits)
        found = _fractions(_joined(digits, prime), modulus)
        if found is not None:
            numerators, denominator = found
            if heaviest * max(map(abs, numerators)) + denominator * largest < modulus:
                return found
        wanted = int(wanted * _MORE_DIGITS) + 1


def _times(inverse: NDArray[np.int64], vector: NDArray[np.int64], prime: int) -> NDArray[np.int64]:
    """Return a product modulo a prime below 2^31, in halves of 16 bits so that sums of up to 2^16 products fit."""
    upper = inverse @ (vector >> 16) % prime
    lower = inverse @ (vector & 0xFFFF) % prime
    return np.asarray(((upper << 16) + lower) % prime)


def _joined(digits: list[NDArray[np.int64]], prime: int) -> list[int]:
    """Combine digits, the lowest first, into numbers, two by two."""
    parts = [digit.astype(object) for digit in digits]
    base = prime
    while len(parts) > 1:
        parts = [
            parts[i] + base * parts[i + 1] if i + 1 < len(parts) else parts[i]
            for i in range(0, len(parts), 2)
        ]
        base *= base
    return [int(value) for value in parts[0]]


def _fractions(values: list[int], modulus: int) -> tuple[list[int], int] | None:
    """Return numerators over one denominator of fractions known modulo a number, or None if that is too small."""
    bound = isqrt(modulus // 2)
    denominator = 1
    for value in values:
        scaled = _centred(value * denominator, modulus)
        if abs(scaled) > bound:
            fresh = _denominator(scaled % modulus, modulus, bound)
            denominator *= fresh
            if denominator > bound:
                return None
    numerators = [_centred(value * denominator, modulus) for value in values]
    return (numerators, denominator) if max(map(abs, numerators)) <= bound else None


def _centred(value: int, modulus: int) -> int:
    """Return the remainder nearest to zero."""
    value %= modulus
    return value - modulus if 2 * value > modulus else value


def _denominator(value: int, modulus: int, bound: int) -> int:
    """Return the denominator of the fraction, with a bounded numerator, that equals a value modulo a number."""
    before, now = modulus, value
    last, here = 0, 1
    while now > bound:
        quotient, rest = divmod(before, now)
        before, now = now, rest
        last, here = here, last - quotient * here
    return abs(here)


_UNIT = 1 << 50
"""Value to which the largest near dual value is rounded."""

_SURELY_DEAR = 1e-6
"""Loss for each unit beyond which a column is not a candidate for an optimum, however rounding went."""

_MENDS = 10
"""Feasibility repairs of a basis before the search continues exactly."""

_STALLED = 50
"""Exact pivots without a gain after which the first column that gains enters, so that none returns for ever."""

_EXACT_PIVOTS = 500
"""Exact pivots from a feasible basis before the search starts anew from its columns."""

_LARGEST = 900
"""Bits that a magnified amount may have."""

_GUIDED_PIVOT_COST = 5000
_ENTRIES = 4
"""Numbers of an inverse in floating point that change in the time of one whole number of an exact table."""


class GuidedSimplex:
    """A packing program under construction, with the interface of `PackingSimplex`.

    ``size`` is about the largest entry of its columns, as a power of two.
    `mends` counts infeasible bases, and `repairs` the cases that only exact pivots could solve.
    """

    blur = Fraction(1, 1 << 28)

    def __init__(self, limits: Sequence[int], *, size: int = 1) -> None:
        self._limits = [int(limit) for limit in limits]
        self._size = size
        self._guide = FloatSimplex(np.array([float(limit) for limit in limits]), size=float(size))
        self._columns: NDArray[np.int64] = np.zeros((len(limits), 0), dtype=np.int64)
        self._costs: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._basis: ExactBasis | None = None
        self._best: Fraction | None = None
        self._repair_work = 0
        self.mends = 0
        self.repairs = 0

    @property
    def rows(self) -> int:
        return len(self._limits)

    @property
    def columns(self) -> int:
        return len(self._costs)

    @property
    def work(self) -> int:
        """Effort so far, in the unit of `PackingSimplex.work`."""
        return self._guide.pivots * (_GUIDED_PIVOT_COST + self.rows**2 // _ENTRIES) + self._repair_work

    def add(self, columns: Sequence[Sequence[int]], costs: Sequence[int]) -> None:
        if columns:
            block = np.array(columns, dtype=np.int64).T
            self._columns = np.hstack([self._columns, block])
            self._costs = np.concatenate([self._costs, np.array(costs, dtype=np.int64)])
            self._guide.add(block.astype(np.float64), np.array(costs, dtype=np.float64))

    def optimise(self, *, target: Fraction | None = None) -> None:
        """Pivot until no known column seems to improve the objective, or until it is near ``target``."""
        self._basis = None
        if not self._guide.maximise(enough=None if target is None else float(target)):
            self._repaired()

    def reaches(self, target: Fraction) -> bool:
        """Return whether the current basic solution reaches a target; near it the search continues to the end."""
        if self._guide.value < float(target) * (1 - 2 * NEAR):
            return False
        basis = self._exact()
        if basis is None or not basis.feasible or basis.value < target:
            self.optimise()
        return self.value >= target

    def confirm(self) -> bool:
        """Ensure that the basis is optimal for the known columns; return False if it was not, and duals are new."""
        before = np.sort(self._guide.members)
        self.duals()
        return np.array_equal(before, np.sort(self._guide.members))

    @property
    def value(self) -> Fraction:
        return self._feasible().value

    @property
    def near_value(self) -> float:
        """`value` to a few digits, quickly."""
        return self._guide.value

    def solution(self) -> dict[int, Fraction]:
        return self._feasible().solution()

    def near_solution(self) -> dict[int, float]:
        """Return `solution` to a few digits, quickly."""
        return self._guide.solution()

    def corner(self) -> dict[int, Fraction] | None:
        """Return `solution` if it is on the face of `keep_optimal`; None if rounding has left it."""
        basis = self._exact()
        proved = basis is not None and basis.feasible and basis.value == self._best
        return basis.solution() if basis is not None and proved else None

    def duals(self) -> tuple[list[int], int]:
        return self._optimal(self._feasible()).duals

    def _optimal(self, basis: ExactBasis) -> ExactBasis:
        """Return an optimal basis of the known columns, by exact pivots from a feasible one.

        The column or slack of largest gain enters; once the value has long stayed, the first that gains (Bland 1977).
        """
        stalled = 0
        for pivot in range(_EXACT_PIVOTS + 1):
            known = np.arange(self.columns) if pivot else self._near()  # the guide stays at the first basis
            entering = self._gaining(basis, known, first=stalled > _STALLED)
            if entering is None:
                if pivot:
                    self._guide.restart(np.array(basis.members))
                    self._basis = basis
                return basis
            try:
                after = self._solved(np.array(basis.exchanged(entering, self._column(entering))))
            except ZeroDivisionError:
                break
            stalled, basis = stalled + 1 if after.value == basis.value else 0, after
        return self._repaired()

    def _gaining(self, basis: ExactBasis, columns: NDArray[np.int64], *, first: bool) -> int | None:
        """Return the column of largest gain, or a slack as -1 - row; the first with ``first``, None if none gains."""
        slacks = ((-1 - row, -dual) for row, dual in enumerate(basis.duals[0]))
        found = [(gain, number) for number, gain in (*self._gains(basis, columns), *slacks) if gain > 0]
        if not found:
            return None
        return min(number for _, number in found) if first else max(found)[1]

    def _column(self, number: int) -> list[int]:
        """Return a column, or the slack -1 - row."""
        if number >= 0:
            column: list[int] = self._columns[:, number].tolist()
            return column
        return [int(row == -1 - number) for row in range(self.rows)]

    def near_duals(self) -> tuple[list[int], int]:
        """Return `duals` up to `blur`, quickly."""
        duals = np.maximum(self._guide.duals, 0)
        largest = float(duals.max())
        if largest == 0:
            return [0] * self.rows, 1
        unit = _UNIT * self._size
        return [int(value) for value in np.rint(duals / largest * unit).tolist()], round(unit / largest)

    def keep_optimal(self) -> None:
        self.optimise()
        basis = self._optimal(self._feasible())
        self._best = basis.value
        tight = np.zeros(self.columns, dtype=bool)
        tight[[number for number, gain in self._gains(basis, self._near()) if gain == 0]] = True
        self._guide.allowed = self._guide.allowed & tight
        self._guide.closed = self._guide.closed | np.array([value > 0 for value in basis.duals[0]])

    def prefer(self, weights: NDArray[np.int64]) -> None:
        self._basis = None
        first, self._guide.costs = self._guide.costs, weights / max(1, int(np.abs(weights).max()))
        self._guide.maximise()
        self._guide.costs = first

    def _gains(self, basis: ExactBasis, columns: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Return columns with their exact gains, over the common denominator of the duals."""
        duals, denominator = basis.duals
        costs, used = self._costs[columns].astype(object), self._columns[:, columns].astype(object)
        exact = costs * denominator - np.array(duals, dtype=object) @ used
        return list(zip(columns.tolist(), exact.tolist(), strict=True))

    def _near(self) -> NDArray[np.int64]:
        """Return the columns that gain nearly nothing, or something, at the guide's basis."""
        return np.flatnonzero(self._guide.gains() > -_SURELY_DEAR)

    def _feasible(self) -> ExactBasis:
        """Return the current basis, or a feasible one if it is not."""
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
        """Return the current basis solved exactly, or None if its members are dependent."""
        if self._basis is None:
            try:
                self._basis = self._solved(self._guide.members)
            except ZeroDivisionError:
                return None
        return self._basis

    def _solved(self, members: NDArray[np.int64]) -> ExactBasis:
        return ExactBasis(self._limits, self._columns, self._costs, members)

    def _repaired(self) -> ExactBasis:
        """Return the optimal basis of the known columns, found exactly from the columns of the current one."""
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
    """Return amounts of the members, scaled so that the one farthest below zero is at ``-top``."""
    held, _ = basis.held
    least = -min(held.values())
    largest = least << _LARGEST
    return {member: min(amount * top, largest) / least for member, amount in held.items()}
