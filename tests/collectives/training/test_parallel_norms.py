"""Owners of layers, norms, and the rates of LARS and LAMB: known answers, bounds, and every rank with the same bits."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives import Communicator
from collectives.training.trust_ratios import ParallelRates, assign_layers, lamb_rate, lars_rate, norm
from tests.support.hand_plans import forest_plan
from topoplan.errors import UsageError


def smallest_makespan(costs: list[int], ranks: int) -> int:
    """Of all assignments."""
    every = itertools.product(range(ranks), repeat=len(costs))
    return min(
        max(sum(c for c, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks))
        for owners in every
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 60), max_size=7), st.integers(1, 3))
def test_the_makespan_is_within_grahams_bound_of_the_optimum(costs: list[int], ranks: int) -> None:
    assignment = assign_layers(costs, ranks)
    best = smallest_makespan(costs, ranks)
    assert assignment.lower_bound <= best <= assignment.makespan <= assignment.guarantee * best


@given(st.lists(st.integers(0, 10**9), max_size=40), st.integers(1, 9))
def test_every_layer_has_one_owner_and_loads_are_sums_of_costs(costs: list[int], ranks: int) -> None:
    assignment = assign_layers(costs, ranks)
    owned = [assignment.owned(rank) for rank in range(ranks)]
    assert sorted(itertools.chain(*owned)) == list(range(len(costs)))
    assert assignment.loads == tuple(sum(costs[layer] for layer in layers) for layers in owned)


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_grahams_worst_case_is_reached_and_not_exceeded(ranks: int) -> None:
    """Two of each of 2m - 1, ..., m + 1, and three of m: the optimum is 3m, and the makespan 4m - 1 (Graham 1969)."""
    costs = [cost for cost in range(2 * ranks - 1, ranks, -1) for _ in range(2)] + [ranks] * 3
    assignment = assign_layers(costs, ranks)
    assert assignment.makespan == 4 * ranks - 1
    assert assignment.lower_bound == 3 * ranks
    assert assignment.guarantee == Fraction(4 * ranks - 1, 3 * ranks)


def test_ties_go_to_the_earlier_layer_and_the_lower_rank() -> None:
    assert assign_layers([5, 5, 5, 5, 0], 3).owners == (0, 1, 2, 0, 1)


@pytest.mark.parametrize(
    ("costs", "ranks", "told"),
    [([1, -2], 2, "costs must be 0 or more, got -2 for layer 1"), ([1], 0, "ranks must be 1 or more, got 0")],
)
def test_negative_costs_and_no_ranks_are_refused(costs: list[int], ranks: int, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        assign_layers(costs, ranks)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 5000, 1_000_003])
def test_a_norm_is_as_close_to_the_exact_one_as_its_bound_says(dtype: str, size: int) -> None:
    values = np.random.default_rng(size).standard_normal(size).astype(dtype)
    exact = math.sqrt(math.fsum(float(value) ** 2 for value in values))
    assert abs(norm(values) - exact) <= (size / 256 + 514) * 2**-53 * exact


def test_a_norm_neither_overflows_in_float16_nor_loses_ones_behind_a_large_float32() -> None:
    assert norm(np.full(4, 60000, np.float16)) == 120000
    values = np.ones(2**20 + 1, np.float32)
    values[0] = 2**13
    assert norm(values) ** 2 == pytest.approx(2**26 + 2**20, rel=1e-15)


def test_the_norm_of_a_transposed_or_strided_array_is_that_of_its_copy() -> None:
    values = np.random.default_rng(3).standard_normal((40, 70)).astype(np.float32)
    assert norm(values.T) == norm(values.T.copy())
    assert norm(values[:, ::3]) == norm(values[:, ::3].copy())


@pytest.mark.parametrize("dtype", ["int64", "complex128", "longdouble", ">f4"])
def test_a_norm_of_other_dtypes_is_refused(dtype: str) -> None:
    with pytest.raises(UsageError, match="has no norm here"):
        norm(np.ones(3, dtype))


def test_rates_are_those_of_the_papers_and_one_where_a_norm_is_zero() -> None:
    assert lars_rate(8.0, 3.0, coefficient=0.5, weight_decay=0.125) == 1.0
    assert lars_rate(8.0, 4.0, coefficient=0.001) == 0.002
    assert lamb_rate(6.0, 4.0) == 1.5
    assert [lars_rate(0.0, 3.0), lars_rate(3.0, 0.0, weight_decay=0.1)] == [1.0, 1.0]
    assert [lamb_rate(0.0, 3.0), lamb_rate(3.0, 0.0), lamb_rate(0.0, 0.0)] == [1.0, 1.0, 1.0]


def communicator(ranks: int) -> Communicator:
    return Communicator(forest_plan(ranks, "allreduce", "binary"))


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("layers", [0, 1, 4, 161])
def test_all_ranks_have_all_rates_in_the_order_of_layers(ranks: int, layers: int) -> None:
    generator = np.random.default_rng(layers)
    wanted = generator.random(layers)
    with communicator(ranks) as comm:
        parallel = ParallelRates(comm, generator.integers(0, 10**6, layers).tolist())
        found = parallel.gather([[wanted[layer] for layer in parallel.owned(rank)] for rank in comm.ranks])
    assert len(found) == ranks
    assert all(one.tobytes() == wanted.tobytes() for one in found)


def test_nan_goes_through_and_the_gather_moves_8_bytes_for_each_place_of_the_longest_list() -> None:
    with communicator(2) as comm:
        parallel = ParallelRates(comm, [10, 20, 30])
        before = sum(comm.bytes_sent().values())
        rates = parallel.gather([[math.nan] * len(parallel.owned(rank)) for rank in comm.ranks])
        assert sum(comm.bytes_sent().values()) - before == 2 * 8 * 2
    assert np.isnan(rates).all()


@pytest.mark.parametrize(
    ("rates", "told"),
    [
        ([[1.0], [1.0, -0.5]], "rates must be 0 or more, got -0.5 for layer 2"),
        ([[1.0], []], "rank 1 must give a rate for each of 2 layers, got 0"),
        ([[1.0]], "rates must be a list for each of 2 ranks, got 1"),
    ],
)
def test_wrong_rates_are_refused_before_anything_moves(rates: list[list[float]], told: str) -> None:
    with communicator(2) as comm:
        parallel = ParallelRates(comm, [100, 100_000, 50_000])
        assert [parallel.owned(rank) for rank in comm.ranks] == [(1,), (0, 2)]
        before = comm.bytes_sent()
        with pytest.raises(UsageError, match=told):
            parallel.gather(rates)
        assert comm.bytes_sent() == before
