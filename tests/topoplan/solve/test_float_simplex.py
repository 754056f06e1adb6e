"""Programs that floating point guides: what is said of them is exact, as if every pivot had been."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topoplan.solve.simplex.exact_simplex import PackingSimplex
from topoplan.solve.simplex.float_simplex import FloatSimplex
from topoplan.solve.simplex.guided_simplex import GuidedSimplex

Columns = list[list[int]]


@st.composite
def programs(
    draw: st.DrawFn, *, limit: st.SearchStrategy[int], entry: st.SearchStrategy[int]
) -> tuple[list[int], Columns, list[int]]:
    """Packing programs: every column uses some row, so the optimum is finite."""
    rows, count = draw(st.integers(1, 7)), draw(st.integers(1, 14))
    limits = draw(st.lists(limit, min_size=rows, max_size=rows))
    column = st.lists(entry, min_size=rows, max_size=rows).filter(any)
    columns = draw(st.lists(column, min_size=count, max_size=count))
    return limits, columns, draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))


SMALL = programs(limit=st.integers(0, 20), entry=st.integers(0, 4))
NEARLY_EQUAL = programs(limit=st.integers(10**17, 10**17 + 3), entry=st.integers(0, 2))
STEEP = programs(limit=st.integers(0, 1 << 40), entry=st.integers(0, 1 << 30))
HUGE = programs(limit=st.integers(0, 20) | st.integers(1 << 60, 1 << 200), entry=st.integers(0, 4))


def both(limits: list[int], columns: Columns, costs: list[int]) -> tuple[GuidedSimplex, PackingSimplex]:
    guided, exact = GuidedSimplex(limits), PackingSimplex(limits)
    for program in (guided, exact):
        program.add(columns, costs)
        program.optimise()
    return guided, exact


def loads(columns: Columns, solution: dict[int, Fraction], rows: int) -> list[Fraction]:
    return [sum((columns[j][i] * x for j, x in solution.items()), Fraction(0)) for i in range(rows)]


@pytest.mark.thorough
@given(SMALL | NEARLY_EQUAL | HUGE)
@settings(max_examples=300, deadline=None)
def test_the_optimum_is_the_exact_one(program: tuple[list[int], Columns, list[int]]) -> None:
    """To the last digit, with a feasible solution and duals that prove it, however near limits are to each other."""
    limits, columns, costs = program
    guided, exact = both(*program)
    whole, denominator = guided.duals()
    prices = [Fraction(y, denominator) for y in whole]
    assert guided.value == exact.value == sum(y * b for y, b in zip(prices, limits, strict=True))
    assert min(prices) >= 0
    for column, cost in zip(columns, costs, strict=True):
        assert sum(a * y for a, y in zip(column, prices, strict=True)) >= cost
    solution = guided.solution()
    assert all(x > 0 for x in solution.values())
    assert all(used <= b for used, b in zip(loads(columns, solution, len(limits)), limits, strict=True))
    assert sum(costs[j] * x for j, x in solution.items()) == guided.value


@given(STEEP)
@settings(max_examples=100, deadline=None)
def test_steep_programs_are_feasible_and_proved(program: tuple[list[int], Columns, list[int]]) -> None:
    """Entries of thirty bits, where rounding may miss a gain: duals are asked for, and then the optimum is exact."""
    limits, columns, _ = program
    guided, exact = both(*program)
    used = loads(columns, guided.solution(), len(limits))
    assert all(load <= b for load, b in zip(used, limits, strict=True))
    assert guided.value <= exact.value
    guided.confirm()
    assert guided.value == exact.value


@given(SMALL, st.integers(1, 13))
@settings(max_examples=80, deadline=None)
def test_columns_may_come_later(program: tuple[list[int], Columns, list[int]], first: int) -> None:
    """Two helpings of columns reach the optimum of one."""
    limits, columns, costs = program
    guided = GuidedSimplex(limits)
    for part in (slice(None, first), slice(first, None)):
        guided.add(columns[part], costs[part])
        guided.optimise()
        assert guided.confirm()
    assert guided.value == both(*program)[1].value


@given(SMALL, st.data())
@settings(max_examples=80, deadline=None)
def test_walks_stay_on_the_optimal_face(
    program: tuple[list[int], Columns, list[int]], data: st.DataObject
) -> None:
    """A corner that a second objective leads to has the first optimum, and the second as the exact program finds it."""
    _, columns, costs = program
    weight = st.lists(st.integers(-5, 5), min_size=len(columns), max_size=len(columns))
    weights = np.array(data.draw(weight), dtype=np.int64)
    guided, exact = both(*program)
    found = []
    for one in (guided, exact):
        one.keep_optimal()
        one.prefer(weights)
        corner = one.corner()
        assert corner is not None
        assert sum(costs[j] * x for j, x in corner.items()) == exact.value
        found.append(sum((int(weights[j]) * x for j, x in corner.items()), Fraction(0)))
    assert found[0] == found[1]


def test_a_target_is_reached_exactly_or_not_at_all() -> None:
    """The optimum is 1 + 10^-20 of a unit of 10^20: a target one above it is near and yet out of reach."""
    limit = 10**20 + 1
    program = GuidedSimplex([limit, 10**21])
    program.add([[1, 1], [2, 1]], [1, 1])
    program.optimise(target=Fraction(limit + 1))
    assert not program.reaches(Fraction(limit + 1))
    assert program.reaches(Fraction(limit))
    assert program.value == limit


def test_limits_that_differ_in_the_last_bit_are_told_apart() -> None:
    """Six rows of 10^17 and a little: floating point sees ties, and the basis that it takes is mended, not redone."""
    limits = [10**17 + extra for extra in (3, 1, 2, 0, 2, 1)]
    columns = [[int((i * j + j) % 3 != 1) for i in range(6)] for j in range(1, 12)]
    columns = [column for column in columns if any(column)]
    guided, exact = both(limits, columns, [1] * len(columns))
    assert guided.value == exact.value
    assert guided.repairs == 0


def test_repairs_find_the_optimum_from_any_basis() -> None:
    """Where only exact pivots help they start from the columns of the basis, and end at the optimum."""
    limits, columns = [7, 9, 11], [[1, 1, 0], [0, 1, 2], [1, 0, 1], [1, 1, 1]]
    guided, exact = both(limits, columns, [1, 1, 1, 2])
    assert guided._repaired().value == exact.value
    assert (guided.repairs, guided.value) == (1, exact.value)
    assert guided.confirm()


def test_near_duals_are_the_duals_to_many_digits() -> None:
    """Rounded to whole numbers of fifty bits, over a common denominator that is rounded too."""
    guided, _ = both([5, 7, 9], [[1, 2, 0], [0, 1, 3], [2, 0, 1]], [1, 1, 1])
    near, near_unit = guided.near_duals()
    exact, unit = guided.duals()
    for a, b in zip(near, exact, strict=True):
        assert a / near_unit == pytest.approx(b / unit, rel=1e-9, abs=1e-12)


def test_degenerate_programs_end() -> None:
    """Rows of limit 0 that tie in every ratio test."""
    rows = 8
    columns = [[int((i * j) % 3 == 0) for i in range(rows)] + [1] for j in range(20)]
    guided, _ = both([0] * rows + [1], columns, [1 + j % 3 for j in range(20)])
    assert (guided.value, guided.repairs) == (0, 0)


def test_a_program_without_columns_is_worth_nothing() -> None:
    """Value 0, no solution, duals 0."""
    guided = GuidedSimplex([5, 0])
    guided.optimise()
    assert (guided.value, guided.solution(), guided.duals()) == (0, {}, ([0, 0], 1))


WALK = """
import numpy as np
from topoplan.solve.simplex.float_simplex import FloatSimplex
rng = np.random.Generator(np.random.PCG64(3))
guide = FloatSimplex(rng.integers(50, 99, 60).astype(float))
for _ in range(3):
    guide.add(rng.integers(0, 4, (60, 80)).astype(float), np.ones(80))
    assert guide.maximise()
print(guide.value.hex(), guide.members.tolist())
"""


def test_the_path_is_the_same_in_every_process_and_on_any_number_of_threads() -> None:
    """The last bit of the value and the order of the basis, whatever the library's threads and the hash seed."""
    seen = {
        subprocess.run(
            [sys.executable, "-c", WALK],
            env={"PYTHONHASHSEED": seed, "OPENBLAS_NUM_THREADS": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


def test_a_basis_that_cannot_be_inverted_is_left_for_that_of_slacks() -> None:
    """Two equal columns are no basis: the search starts anew and finds the optimum."""
    guide = FloatSimplex(np.array([3.0, 4.0]))
    guide.add(np.array([[1.0, 1.0], [1.0, 1.0]]), np.ones(2))
    guide.restart(np.array([0, 1]))
    assert guide.members.tolist() == [-1, -2]
    assert guide.maximise()
    assert guide.value == pytest.approx(3.0)
