"""Exact solutions of whole systems and of bases: fractions that satisfy every equation, whatever their length."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from topoplan.solve.simplex.guided_simplex import PRIMES, ExactBasis, WholeSystem, inverse_modulo
from topoplan.solve.tree_local_search import blocked_product

Rows = list[list[int]]


@st.composite
def systems(draw: st.DrawFn, *, entry: st.SearchStrategy[int]) -> tuple[Rows, list[int]]:
    """A square matrix and a right-hand side with numbers of up to two hundred bits."""
    size = draw(st.integers(1, 6))
    row = st.lists(entry, min_size=size, max_size=size)
    matrix = draw(st.lists(row, min_size=size, max_size=size))
    right = st.integers(-20, 20) | st.integers(-(1 << 200), 1 << 200)
    return matrix, draw(st.lists(right, min_size=size, max_size=size))


def determinant(matrix: Rows) -> Fraction:
    """By elimination in fractions."""
    rows = [[Fraction(value) for value in row] for row in matrix]
    value = Fraction(1)
    for step in range(len(rows)):
        pivot = next((i for i in range(step, len(rows)) if rows[i][step]), None)
        if pivot is None:
            return Fraction(0)
        if pivot != step:
            rows[step], rows[pivot], value = rows[pivot], rows[step], -value
        value *= rows[step][step]
        for i in range(step + 1, len(rows)):
            factor = rows[i][step] / rows[step][step]
            rows[i] = [a - factor * b for a, b in zip(rows[i], rows[step], strict=True)]
    return value


def times(matrix: Rows, vector: list[int]) -> list[int]:
    return [sum(a * x for a, x in zip(row, vector, strict=True)) for row in matrix]


@given(systems(entry=st.integers(-4, 4)) | systems(entry=st.integers(-(1 << 40), 1 << 40)))
@settings(max_examples=200, deadline=None)
def test_solutions_from_both_sides_satisfy_every_equation(system: tuple[Rows, list[int]]) -> None:
    """A x = b and y A = b hold in whole numbers; only matrices of determinant zero are refused."""
    matrix, right = system
    if determinant(matrix) == 0:
        with pytest.raises(ZeroDivisionError, match="singular"):
            WholeSystem(np.array(matrix))
        return
    solver = WholeSystem(np.array(matrix))
    x, below = solver.solve(right)
    assert below > 0
    assert times(matrix, x) == [below * value for value in right]
    y, below = solver.solve_rows(right)
    transposed = [list(column) for column in zip(*matrix, strict=True)]
    assert times(transposed, y) == [below * value for value in right]


def test_a_large_system_has_hundreds_of_digits_and_is_solved_to_the_last() -> None:
    """120 unknowns, entries of one digit: the common denominator has more than 300 bits."""
    rng = np.random.Generator(np.random.PCG64(5))
    matrix = rng.integers(0, 5, (120, 120)) * rng.integers(0, 2, (120, 120)) + np.eye(120, dtype=np.int64)
    right = [int(value) for value in rng.integers(1, 10**7, 120)]
    x, below = WholeSystem(matrix).solve(right)
    assert below.bit_length() > 300
    assert times(matrix.tolist(), x) == [below * value for value in right]


def test_a_determinant_that_the_first_prime_divides_takes_the_next() -> None:
    """p x = 1 has the solution 1/p, though p is zero modulo p."""
    prime = PRIMES[0]
    assert inverse_modulo(np.array([[prime]]), prime) is None
    assert WholeSystem(np.array([[prime]])).solve([1]) == ([1], prime)


def test_primes_are_prime() -> None:
    """No number up to their square root divides them."""
    small = np.arange(2, 46341)
    assert all(np.all(prime % small) and prime < 1 << 31 for prime in PRIMES)


@given(st.integers(1, 40), st.sampled_from(PRIMES), st.integers(0, 1 << 30))
@settings(max_examples=30, deadline=None)
def test_inverses_modulo_a_prime_are_inverses(size: int, prime: int, seed: int) -> None:
    """Their product with the matrix is the identity, summed in Python integers."""
    rng = np.random.Generator(np.random.PCG64(seed))
    matrix = rng.integers(-3, 4, (size, size))
    inverse = inverse_modulo(matrix, prime)
    assume(inverse is not None)
    assert inverse is not None
    found = (matrix.astype(object) @ inverse.astype(object)) % prime
    assert np.array_equal(found, np.eye(size, dtype=object))


def test_a_basis_tells_amounts_slacks_and_duals() -> None:
    """x = 3 in the tight row 2 x <= 6; the slack of x <= 5 is 2; the dual is 1/2."""
    basis = ExactBasis([6, 5], np.array([[2], [1]]), np.array([1]), np.array([0, -2]))
    assert (basis.feasible, basis.value, basis.solution()) == (True, 3, {0: Fraction(3)})
    assert basis.held == ({0: 6, -2: 4}, 2) or basis.held == ({0: 3, -2: 2}, 1)
    assert basis.duals == ([1, 0], 2)


def test_a_basis_that_holds_less_than_nothing_is_not_feasible() -> None:
    """x = 3 would leave a slack of -1 in x <= 2; a slack of minus 10^-30 counts as well."""
    columns, costs, members = np.array([[2], [1]]), np.array([1]), np.array([0, -2])
    assert not ExactBasis([6, 2], columns, costs, members).feasible
    huge = 10**30
    assert ExactBasis([2 * huge, huge], columns, costs, members).feasible
    assert not ExactBasis([2 * huge + 1, huge], columns, costs, members).feasible


def test_dependent_members_are_no_basis() -> None:
    """Two equal columns in two tight rows."""
    with pytest.raises(ZeroDivisionError, match="singular"):
        ExactBasis([1, 1], np.array([[1, 1], [2, 2]]), np.array([1, 1]), np.array([0, 1]))


@pytest.mark.parametrize("shape", [(3, 5, 7), (64, 64, 64), (65, 130, 70), (1, 200, 300)])
def test_products_in_blocks_are_products(shape: tuple[int, int, int]) -> None:
    """Of stacks of whole numbers up to 2^20, against Python's integers."""
    n, k, m = shape
    rng = np.random.Generator(np.random.PCG64(1))
    left, right = rng.integers(0, 1 << 20, (2, n, k)), rng.integers(0, 1 << 20, (2, k, m))
    found = blocked_product(left.astype(np.float64), right.astype(np.float64))
    assert np.array_equal(found, (left @ right).astype(np.float64))
