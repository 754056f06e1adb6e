"""The exact simplex: optimum and duals are rational numbers that prove each other, whatever the size of the numbers."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from topoplan.solve.simplex.exact_simplex import PackingSimplex


@dataclass(frozen=True)
class Program:
    """maximise costs x subject to columns x <= limits, x >= 0."""

    limits: list[int]
    columns: list[list[int]]
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


def solved(program: Program) -> PackingSimplex:
    simplex = PackingSimplex(program.limits)
    simplex.add(program.columns, program.costs)
    simplex.optimise()
    return simplex


def load(program: Program, solution: dict[int, Fraction]) -> list[Fraction]:
    return [
        sum((program.columns[j][i] * x for j, x in solution.items()), Fraction(0))
        for i in range(len(program.limits))
    ]


def assert_proved(program: Program, simplex: PackingSimplex) -> None:
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


@given(SMALL)
@settings(max_examples=150, deadline=None)
def test_small_programs_are_proved_and_agree_with_linprog(program: Program) -> None:
    """Exact duality, and linprog's optimum to its own accuracy."""
    simplex = solved(program)
    assert_proved(program, simplex)
    other = linprog([-c for c in program.costs], A_ub=np.array(program.columns).T, b_ub=program.limits)
    assert float(simplex.value) == pytest.approx(-other.fun, abs=1e-7)


@given(HUGE | STEEP)
@settings(max_examples=150, deadline=None)
def test_huge_programs_are_proved(program: Program) -> None:
    """Limits of two hundred bits and entries of thirty: nothing wraps around, nothing is rounded."""
    assert_proved(program, solved(program))


@given(HUGE, st.integers(1, 11))
@settings(max_examples=80, deadline=None)
def test_columns_may_come_later(program: Program, first: int) -> None:
    """Two helpings of columns reach the optimum of one, and the second starts where the first ended."""
    simplex = PackingSimplex(program.limits)
    simplex.add(program.columns[:first], program.costs[:first])
    simplex.optimise()
    before = simplex.value
    simplex.add(program.columns[first:], program.costs[first:])
    assert simplex.value == before
    simplex.optimise()
    assert_proved(program, simplex)
    assert simplex.value == solved(program).value


@given(SMALL, st.data())
@settings(max_examples=80, deadline=None)
def test_a_second_objective_keeps_the_first(program: Program, data: st.DataObject) -> None:
    """On the face of optimal solutions the second objective is as large as linprog finds it there."""
    count = len(program.columns)
    second = data.draw(st.lists(st.integers(-5, 5), min_size=count, max_size=count))
    simplex = solved(program)
    best = simplex.value
    simplex.keep_optimal()
    simplex.prefer(np.array(second, dtype=np.int64))
    assert simplex.value == best
    solution = simplex.solution()
    assert all(used <= limit for used, limit in zip(load(program, solution), program.limits, strict=True))
    reached = sum((second[j] * x for j, x in solution.items()), Fraction(0))
    other = linprog(
        [-w for w in second],
        A_ub=np.vstack([np.array(program.columns).T, [-c for c in program.costs]]),
        b_ub=[*program.limits, -float(best)],
    )
    assert other.status == 0
    assert float(reached) == pytest.approx(-other.fun, abs=1e-6)


def test_a_target_ends_the_search_early() -> None:
    """The first pivot reaches 4 of 7: asked for 3, it stops there; asked for more than there is, it ends at 7."""
    simplex = PackingSimplex([4, 3])
    simplex.add([[1, 0], [0, 1]], [1, 1])
    simplex.optimise(target=Fraction(3))
    assert simplex.value == 4
    simplex.optimise(target=Fraction(8))
    assert simplex.value == 7


def test_degenerate_programs_do_not_cycle() -> None:
    """Rows of limit 0 that tie in every ratio test: the lexicographic rule gets through them."""
    rows = 8
    simplex = PackingSimplex([0] * rows + [1])
    columns = [[int((i * j) % 3 == 0) for i in range(rows)] + [1] for j in range(20)]
    simplex.add(columns, [1 + j % 3 for j in range(20)])
    simplex.optimise()
    assert simplex.value == 0
    assert simplex.pivots < 100


def test_a_program_without_columns_is_worth_nothing() -> None:
    """Value 0, no solution, duals 0."""
    simplex = PackingSimplex([5])
    simplex.optimise()
    assert (simplex.value, simplex.solution(), simplex.duals()) == (0, {}, ([0], 1))


def test_numbers_that_shrink_again_go_on_exactly() -> None:
    """Hundreds of pivots over wide and narrow numbers, there and back, and duality still holds to the last bit."""
    wide = [3**60 + 7 * i for i in range(12)]
    program = Program(
        wide,
        [[(i * 7 + j * 5 + i * j) % 4 for i in range(12)] for j in range(60) if j % 7],
        [1 + j % 5 for j in range(60) if j % 7],
    )
    simplex = solved(program)
    assert_proved(program, simplex)
    simplex.keep_optimal()
    rng = np.random.Generator(np.random.PCG64(7))
    for _ in range(30):
        simplex.prefer(rng.integers(-50, 50, len(program.columns)))
        assert simplex.value == solved(program).value
        used = load(program, simplex.solution())
        assert all(x <= limit for x, limit in zip(used, wide, strict=True))
