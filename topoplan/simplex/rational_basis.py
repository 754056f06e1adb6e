"""What a basis of a packing program is worth, exactly: amounts, duals, and whether it is feasible.

    maximise  c x   subject to  A x <= b,  x >= 0.

Rows whose slack is basic are not tight: they have dual zero, and their slack is what the others leave over. So only
the tight rows and the basic columns are solved for, by lifting digit by digit from a prime (Dixon 1982).

One inverse modulo a prime p below 2^31 gives the solution of A x = b modulo p; what is left over, divided by p, is the
right-hand side of the next digit, and so x is known modulo p^n at n small products of matrix and vector. Fractions
are then read off modulo M = p^n (Wang 1981) over one common denominator d. With x = z / d modulo M, A z and d b agree
modulo M; where both are too small to differ by M they are equal, which is the proof. So the digits end where the
answer does, mostly long before the bound of Hadamard.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cached_property
from math import isqrt

import numpy as np
from numpy.typing import NDArray


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


PRIMES = (2147483647, 2147483629, 2147483587, 2147483579)
"""The largest primes below 2^31."""

_SAFE = 1 << 62
_FIRST_DIGITS = 4
_MORE_DIGITS = 1.6


class WholeSystem:
    """A square system of whole numbers that can be solved for many right-hand sides, from either side.

    Parameters
    ----------
    matrix : (k, k) int64
        Not singular.

    Raises
    ------
    ZeroDivisionError
        The matrix is singular, or at least modulo all `PRIMES`.

    Examples
    --------
    >>> system = WholeSystem(np.array([[2, 1], [1, 3]]))
    >>> system.solve([1, 1]), system.solve_rows([0, 5])
    (([2, 1], 5), ([-1, 2], 1))
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
        """The solution x of A x = b: numerators, and their common denominator, one or more."""
        return _lifted(self._matrix, self._inverse, self._prime, right)

    def solve_rows(self, right: Sequence[int]) -> tuple[list[int], int]:
        """The solution y of y A = c, as `solve` gives it."""
        return _lifted(self._matrix.T, self._inverse.T, self._prime, right)


def inverse_modulo(matrix: NDArray[np.int64], prime: int) -> NDArray[np.int64] | None:
    """The inverse of a square matrix modulo a prime below 2^31, or None where it is singular there.

    Examples
    --------
    >>> inverse_modulo(np.array([[2, 1], [1, 3]]), 7).tolist()
    [[2, 4], [4, 6]]
    """
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
    wide = heaviest * prime >= _SAFE // 2
    exact = matrix.astype(object) if wide else matrix
    rest = np.array(right, dtype=object)
    digits: list[NDArray[np.int64]] = []
    wanted = _FIRST_DIGITS
    while True:
        while len(digits) < wanted:
            digit = _times(inverse, (rest % prime).astype(np.int64), prime)
            digits.append(digit)
            if rest.dtype == object and not wide and max(map(abs, rest.tolist())) < _SAFE // 2:
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
    """Product modulo a prime below 2^31, in halves of 16 bits so that sums of up to 2^16 products fit."""
    upper = inverse @ (vector >> 16) % prime
    lower = inverse @ (vector & 0xFFFF) % prime
    return np.asarray(((upper << 16) + lower) % prime)


def _joined(digits: list[NDArray[np.int64]], prime: int) -> list[int]:
    """Numbers from their digits, the lowest first, two by two."""
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
    """Numerators over one denominator of fractions known modulo a number, or None where that is too small."""
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
    """The remainder nearest to zero."""
    value %= modulus
    return value - modulus if 2 * value > modulus else value


def _denominator(value: int, modulus: int, bound: int) -> int:
    """The denominator of the fraction with numerator up to a bound that equals a value modulo a number."""
    before, now = modulus, value
    last, here = 0, 1
    while now > bound:
        quotient, rest = divmod(before, now)
        before, now = now, rest
        last, here = here, last - quotient * here
    return abs(here)
