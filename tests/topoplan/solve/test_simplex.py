"""Exact optima: rational numbers that prove each other, whether every pivot is exact or floating point guides."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from topoplan.solve.simplex.exact_simplex import PackingSimplex
from topoplan.solve.simplex.float_simplex import FloatSimplex
from topoplan.solve.simplex.guided_simplex import (
    PRIMES,
    ExactBasis,
    GuidedSimplex,
    WholeSystem,
    inverse_modulo,
)
from topoplan.solve.tree_local_search import blocked_product

Rows = list[list[int]]
Simplex = PackingSimplex | GuidedSimplex
BOTH = (PackingSimplex, GuidedSimplex)


@dataclass(frozen=True)
class Program:
    """maximise costs x subject to columns x <= limits, x >= 0."""

    limits: list[int]
    columns: Rows
    costs: list[int]


@st.composite
def programs(draw: st.DrawFn, *, limit: st.SearchStrategy[int], entry: st.SearchStrategy[int]) -> Program:
    """Packing programs: every column uses some row, so the optimum is finite."""
    rows, count = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    limits = draw(st.lists(limit, min_size=rows, max_size=rows))
    column = st.lists(entry, min_size=rows, max_size=rows).filter(any)
    columns = draw(st.lists(column, min_size=count, max_size=count))
    return Program(limits, columns, draw(st.lists(st.integers(0, 5), min_size=count, max_size=count)))


SMALL = programs(limit=st.integers(0, 20), entry=st.integers(0, 4))
HUGE = programs(limit=st.integers(0, 20) | st.integers(1 << 60, 1 << 200), entry=st.integers(0, 4))
STEEP = programs(limit=st.integers(0, 1 << 40), entry=st.integers(0, 1 << 30))
NEARLY_EQUAL = programs(limit=st.integers(10**17, 10**17 + 3), entry=st.integers(0, 2))


def solved(kind: type[PackingSimplex] | type[GuidedSimplex], program: Program, *, first: int = 0) -> Simplex:
    """The optimum, with the first columns given before the others."""
    simplex = kind(program.limits)
    for part in (slice(None, first), slice(first, None)):
        simplex.add(program.columns[part], program.costs[part])
        simplex.optimise()
    return simplex


def load(program: Program, solution: dict[int, Fraction]) -> list[Fraction]:
    rows = range(len(program.limits))
    return [sum((program.columns[j][i] * x for j, x in solution.items()), Fraction(0)) for i in rows]


def assert_proved(program: Program, simplex: Simplex) -> None:
    """Feasible solution, feasible duals, equal objectives: strong duality in exact numbers."""
    solution = simplex.solution()
    assert all(x > 0 for x in solution.values())
    assert all(used <= limit for used, limit in zip(load(program, solution), program.limits, strict=True))
    assert simplex.value == sum((program.costs[j] * x for j, x in solution.items()), Fraction(0))
    whole, denominator = simplex.duals()
    prices = [Fraction(y, denominator) for y in whole]
    assert all(y >= 0 for y in prices)
    for column, cost in zip(program.columns, program.costs, strict=True):
        assert sum(a * y for a, y in zip(column, prices, strict=True)) >= cost
    assert sum(b * y for b, y in zip(program.limits, prices, strict=True)) == simplex.value


@given(SMALL, st.integers(0, 11))
@settings(max_examples=60, deadline=None)
def test_small_programs_are_proved_and_agree_with_linprog(program: Program, first: int) -> None:
    other = linprog([-c for c in program.costs], A_ub=np.array(program.columns).T, b_ub=program.limits)
    for kind in BOTH:
        simplex = solved(kind, program, first=first)
        assert_proved(program, simplex)
        assert float(simplex.value) == pytest.approx(-other.fun, abs=1e-7)


@given(HUGE | STEEP, st.integers(1, 11))
@settings(max_examples=80, deadline=None)
def test_huge_programs_are_proved(program: Program, first: int) -> None:
    """Limits of two hundred bits and entries of thirty: nothing wraps around, nothing is rounded."""
    simplex = solved(PackingSimplex, program)
    assert_proved(program, simplex)
    assert solved(PackingSimplex, program, first=first).value == simplex.value


@pytest.mark.thorough
@given(SMALL | NEARLY_EQUAL | HUGE)
@settings(max_examples=300, deadline=None)
def test_guided_by_floating_point_the_optimum_is_the_exact_one(program: Program) -> None:
    """To the last digit, however near limits are to each other."""
    guided = solved(GuidedSimplex, program)
    assert_proved(program, guided)
    assert guided.value == solved(PackingSimplex, program).value


@given(STEEP)
@settings(max_examples=40, deadline=None)
def test_steep_programs_are_feasible_and_proved(program: Program) -> None:
    """Entries of thirty bits, where rounding may miss a gain: duals are asked for, and then the optimum is exact."""
    guided, exact = solved(GuidedSimplex, program), solved(PackingSimplex, program)
    used = load(program, guided.solution())
    assert all(load <= b for load, b in zip(used, program.limits, strict=True))
    assert guided.value <= exact.value
    guided.confirm()
    assert guided.value == exact.value


@given(SMALL, st.data())
@settings(max_examples=40, deadline=None)
def test_a_second_objective_keeps_the_first(program: Program, data: st.DataObject) -> None:
    """On the face of optimal solutions the second objective is as large as linprog finds it there."""
    count = len(program.columns)
    second = data.draw(st.lists(st.integers(-5, 5), min_size=count, max_size=count))
    found = []
    for kind in BOTH:
        simplex = solved(kind, program)
        best = simplex.value
        simplex.keep_optimal()
        simplex.prefer(np.array(second, dtype=np.int64))
        corner = simplex.corner()
        assert corner is not None
        assert sum(program.costs[j] * x for j, x in corner.items()) == best
        assert all(used <= b for used, b in zip(load(program, corner), program.limits, strict=True))
        found.append(sum((second[j] * x for j, x in corner.items()), Fraction(0)))
    other = linprog(
        [-w for w in second],
        A_ub=np.vstack([np.array(program.columns).T, [-c for c in program.costs]]),
        b_ub=[*program.limits, -float(best)],
    )
    assert other.status == 0
    assert found[0] == found[1]
    assert float(found[0]) == pytest.approx(-other.fun, abs=1e-6)


def test_a_target_ends_the_search_early() -> None:
    """The first pivot reaches 4 of 7: asked for 3, it stops there; a target one unit of 10^20 above is out of reach."""
    simplex = PackingSimplex([4, 3])
    simplex.add([[1, 0], [0, 1]], [1, 1])
    simplex.optimise(target=Fraction(3))
    assert simplex.value == 4
    simplex.optimise(target=Fraction(8))
    assert simplex.value == 7
    limit = 10**20 + 1
    guided = GuidedSimplex([limit, 10**21])
    guided.add([[1, 1], [2, 1]], [1, 1])
    guided.optimise(target=Fraction(limit + 1))
    assert not guided.reaches(Fraction(limit + 1))
    assert guided.reaches(Fraction(limit))
    assert guided.value == limit


def test_degenerate_and_empty_programs_end() -> None:
    """Rows of limit 0 that tie in every ratio test; no columns are worth nothing."""
    columns = [[int((i * j) % 3 == 0) for i in range(8)] + [1] for j in range(20)]
    for kind in BOTH:
        assert solved(kind, Program([0] * 8 + [1], columns, [1 + j % 3 for j in range(20)])).value == 0
        empty = solved(kind, Program([5, 0], [], []))
        assert (empty.value, empty.solution(), empty.duals()) == (0, {}, ([0, 0], 1))


def test_numbers_that_shrink_again_go_on_exactly() -> None:
    """Hundreds of pivots over wide and narrow numbers, there and back, and duality still holds to the last bit."""
    wide = [3**60 + 7 * i for i in range(12)]
    columns = [[(i * 7 + j * 5 + i * j) % 4 for i in range(12)] for j in range(60) if j % 7]
    program = Program(wide, columns, [1 + j % 5 for j in range(60) if j % 7])
    simplex = solved(PackingSimplex, program)
    best = simplex.value
    assert_proved(program, simplex)
    simplex.keep_optimal()
    rng = np.random.Generator(np.random.PCG64(7))
    for _ in range(30):
        simplex.prefer(rng.integers(-50, 50, len(program.columns)))
        assert simplex.value == best
        used = load(program, simplex.solution())
        assert all(x <= limit for x, limit in zip(used, wide, strict=True))


def test_limits_that_differ_in_the_last_bit_are_told_apart() -> None:
    """Six rows of 10^17 and a little: floating point sees ties, and the basis that it takes is mended, not redone."""
    limits = [10**17 + extra for extra in (3, 1, 2, 0, 2, 1)]
    columns = [[int((i * j + j) % 3 != 1) for i in range(6)] for j in range(1, 12)]
    columns = [column for column in columns if any(column)]
    program = Program(limits, columns, [1] * len(columns))
    guided = solved(GuidedSimplex, program)
    assert guided.value == solved(PackingSimplex, program).value
    assert guided.repairs == 0


def test_repairs_find_the_optimum_from_any_basis() -> None:
    """If only exact pivots help, they start from the columns of the basis and end at the optimum."""
    program = Program([7, 9, 11], [[1, 1, 0], [0, 1, 2], [1, 0, 1], [1, 1, 1]], [1, 1, 1, 2])
    guided, exact = (solved(kind, program) for kind in (GuidedSimplex, PackingSimplex))
    assert guided._repaired().value == exact.value
    assert (guided.repairs, guided.value) == (1, exact.value)
    assert guided.confirm()


@pytest.mark.parametrize("size", [1, 1 << 40])
@pytest.mark.parametrize("seed", range(4))
def test_gains_too_small_for_floating_point_are_found_by_exact_pivots(size: int, seed: int) -> None:
    """Entries of 1 to 10^12 in one program: the optimum is exact, and no search starts anew."""
    pick = Random(f"entries {seed}")
    limits = [pick.randint(1, 9) for _ in range(12)]
    columns = [[int(10 ** pick.uniform(0, 12)) * (pick.random() < 0.4) for _ in range(12)] for _ in range(40)]
    for column in columns:
        column[pick.randrange(12)] += 1
    program = Program(limits, columns, [pick.choice((1, 2, 10**6)) for _ in columns])
    exact = solved(PackingSimplex, program)
    guided = GuidedSimplex(limits, size=size)
    guided.add(columns, program.costs)
    guided.optimise()
    assert_proved(program, guided)
    assert guided.value == exact.value


@pytest.mark.parametrize("seed", range(4))
def test_any_feasible_basis_leads_to_the_optimum_by_exact_pivots(seed: int) -> None:
    """From the basis of all slacks, with ties in every row: nothing is gained by most pivots, and they end."""
    pick = Random(f"ties {seed}")
    columns = [[pick.randint(0, 2) for _ in range(9)] + [1] for _ in range(25)]
    program = Program([0, 0, 0, 4, 4, 4, 6, 6, 6, 9], columns, [pick.randint(1, 5) for _ in columns])
    guided, exact = GuidedSimplex(program.limits), solved(PackingSimplex, program)
    guided.add(columns, program.costs)
    guided.duals()
    assert guided.value == exact.value
    assert guided.repairs == 0
    assert_proved(program, guided)


def test_near_duals_are_the_duals_to_many_digits() -> None:
    """Rounded to whole numbers of fifty bits, over a common denominator that is rounded too."""
    guided = solved(GuidedSimplex, Program([5, 7, 9], [[1, 2, 0], [0, 1, 3], [2, 0, 1]], [1, 1, 1]))
    near, near_unit = guided.near_duals()
    exact, unit = guided.duals()
    for a, b in zip(near, exact, strict=True):
        assert a / near_unit == pytest.approx(b / unit, rel=1e-9, abs=1e-12)


def test_a_basis_that_cannot_be_inverted_is_left_for_that_of_slacks() -> None:
    """Two equal columns are no basis: the search starts anew and finds the optimum."""
    guide = FloatSimplex(np.array([3.0, 4.0]))
    guide.add(np.array([[1.0, 1.0], [1.0, 1.0]]), np.ones(2))
    guide.restart(np.array([0, 1]))
    assert guide.members.tolist() == [-1, -2]
    assert guide.maximise()
    assert guide.value == pytest.approx(3.0)
    with pytest.raises(ZeroDivisionError, match="singular"):
        ExactBasis([1, 1], np.array([[1, 1], [2, 2]]), np.array([1, 1]), np.array([0, 1]))


@st.composite
def systems(draw: st.DrawFn, *, entry: st.SearchStrategy[int]) -> tuple[Rows, list[int]]:
    """A square matrix and a right-hand side with numbers of up to two hundred bits."""
    size = draw(st.integers(1, 6))
    row = st.lists(entry, min_size=size, max_size=size)
    matrix = draw(st.lists(row, min_size=size, max_size=size))
    right = st.integers(-20, 20) | st.integers(-(1 << 200), 1 << 200)
    return matrix, draw(st.lists(right, min_size=size, max_size=size))


def determinant(matrix: Rows) -> int:
    """By expansion along the first row."""
    if not matrix:
        return 1
    minors = [[row[:j] + row[j + 1 :] for row in matrix[1:]] for j in range(len(matrix))]
    return sum((-1) ** j * matrix[0][j] * determinant(minors[j]) for j in range(len(matrix)) if matrix[0][j])


def times(matrix: Rows, vector: list[int]) -> list[int]:
    return [sum(a * x for a, x in zip(row, vector, strict=True)) for row in matrix]


@given(systems(entry=st.integers(-4, 4)) | systems(entry=st.integers(-(1 << 40), 1 << 40)))
@settings(max_examples=60, deadline=None)
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
    assert times([list(column) for column in zip(*matrix, strict=True)], y) == [below * b for b in right]


def test_a_large_system_has_hundreds_of_digits_and_is_solved_to_the_last() -> None:
    """120 unknowns, entries of one digit: the common denominator has more than 300 bits."""
    rng = np.random.Generator(np.random.PCG64(5))
    matrix = rng.integers(0, 5, (120, 120)) * rng.integers(0, 2, (120, 120)) + np.eye(120, dtype=np.int64)
    right = [int(value) for value in rng.integers(1, 10**7, 120)]
    x, below = WholeSystem(matrix).solve(right)
    assert below.bit_length() > 300
    assert times(matrix.tolist(), x) == [below * value for value in right]


def test_primes_are_prime_and_one_that_divides_a_determinant_is_passed_over() -> None:
    """p x = 1 has the solution 1/p, though p is zero modulo p."""
    small = np.arange(2, 46341)
    assert all(np.all(prime % small) and prime < 1 << 31 for prime in PRIMES)
    assert inverse_modulo(np.array([[PRIMES[0]]]), PRIMES[0]) is None
    assert WholeSystem(np.array([[PRIMES[0]]])).solve([1]) == ([1], PRIMES[0])


@given(st.integers(1, 40), st.sampled_from(PRIMES), st.integers(0, 1 << 30))
@settings(max_examples=30, deadline=None)
def test_inverses_modulo_a_prime_are_inverses(size: int, prime: int, seed: int) -> None:
    """Their product with the matrix is the identity, summed in Python integers."""
    matrix = np.random.Generator(np.random.PCG64(seed)).integers(-3, 4, (size, size))
    inverse = inverse_modulo(matrix, prime)
    assume(inverse is not None)
    assert inverse is not None
    found = (matrix.astype(object) @ inverse.astype(object)) % prime
    assert np.array_equal(found, np.eye(size, dtype=object))


def test_a_basis_tells_amounts_slacks_and_duals() -> None:
    """x = 3 in the tight row 2 x <= 6 leaves a slack of 2 in x <= 5; a slack of minus 10^-30 is not feasible."""
    columns, costs, members = np.array([[2], [1]]), np.array([1]), np.array([0, -2])
    basis = ExactBasis([6, 5], columns, costs, members)
    assert (basis.feasible, basis.value, basis.solution()) == (True, 3, {0: Fraction(3)})
    assert basis.held == ({0: 6, -2: 4}, 2) or basis.held == ({0: 3, -2: 2}, 1)
    assert basis.duals == ([1, 0], 2)
    huge = 10**30
    assert ExactBasis([2 * huge, huge], columns, costs, members).feasible
    assert not ExactBasis([2 * huge + 1, huge], columns, costs, members).feasible


@pytest.mark.parametrize("shape", [(3, 5, 7), (64, 64, 64), (65, 130, 70), (1, 200, 300)])
def test_products_in_blocks_are_products(shape: tuple[int, int, int]) -> None:
    """Stacks of whole numbers up to 2^20, against Python's integers."""
    n, k, m = shape
    rng = np.random.Generator(np.random.PCG64(1))
    left, right = rng.integers(0, 1 << 20, (2, n, k)), rng.integers(0, 1 << 20, (2, k, m))
    found = blocked_product(left.astype(np.float64), right.astype(np.float64))
    assert np.array_equal(found, (left @ right).astype(np.float64))


def test_columns_beyond_machine_words_keep_the_optimum() -> None:
    """Entries of 63 bits whose sum has more, and entries of 67 bits: the optimum is the one in Python's integers."""
    big = 1 << 61
    for columns, limits, best in (
        ([[big] * 5, [1 << 62, 3, 0, 1, 1]], [big] * 5, Fraction(1)),
        ([[10**20, 1], [1, 10**20]], [10**20, 10**20], Fraction(2 * 10**20, 10**20 + 1)),
    ):
        program = PackingSimplex(limits)
        program.add(columns, [1, 1])
        program.optimise()
        assert program.value == best
        for row, limit in enumerate(limits):
            assert sum(columns[place][row] * share for place, share in program.solution().items()) <= limit
    program = PackingSimplex([2 << 60, 2 << 60])
    program.add([[3 << 60, 3 << 60], [1 << 60, 0], [0, 1 << 60]], [4, 1, 1])
    program.optimise()
    assert (program.value, program.duals()[0][0] >= 0) == (Fraction(4), True)
