"""LARS and LAMB by owners of layers: assignments and rates, the papers' formulas, the same bits as alone, states."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import warnings
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from collectives import Communicator
from collectives.training.optimizers import Lamb, Lars
from collectives.training.trust_ratios import ParallelRates, assign_layers, lamb_rate, lars_rate, norm
from tests.support.hand_plans import forest_plan
from topoplan.errors import UsageError

# ---- owners, norms and rates


def smallest_makespan(costs: list[int], ranks: int) -> int:
    every = itertools.product(range(ranks), repeat=len(costs))
    return min(
        max(sum(c for c, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks))
        for owners in every
    )


@settings(max_examples=60)
@given(st.lists(st.integers(0, 60), max_size=7), st.integers(1, 3))
def test_the_makespan_is_within_grahams_bound_of_the_optimum(costs: list[int], ranks: int) -> None:
    assignment = assign_layers(costs, ranks)
    best = smallest_makespan(costs, ranks)
    assert assignment.lower_bound <= best <= assignment.makespan <= assignment.guarantee * best
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
    for costs, ranks, message in (
        ([1, -2], 2, "costs must be 0 or more, got -2 for layer 1"),
        ([1], 0, "ranks must be 1 or more, got 0"),
    ):
        with pytest.raises(UsageError, match=message):
            assign_layers(costs, ranks)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("size", [1_000_003, 0, 1, 255, 256, 257, 5000])
def test_a_norm_is_within_its_error_bound(dtype: str, size: int) -> None:
    values = np.random.default_rng(size).standard_normal(size).astype(dtype)
    exact = math.sqrt(math.fsum(float(value) ** 2 for value in values))
    assert abs(norm(values) - exact) <= (size / 256 + 514) * 2**-53 * exact


def test_norms_of_any_layout_and_dtype() -> None:
    assert norm(np.full(4, 60000, np.float16)) == 120000
    values = np.ones(2**20 + 1, np.float32)
    values[0] = 2**13
    assert norm(values) ** 2 == pytest.approx(2**26 + 2**20, rel=1e-15), "ones behind a large element"
    matrix = np.random.default_rng(3).standard_normal((40, 70)).astype(np.float32)
    for view in (matrix.T, matrix[:, ::3]):
        assert norm(view) == norm(view.copy())
    for dtype in ("int64", "complex128", "longdouble", ">f4"):
        with pytest.raises(UsageError, match="has no norm here"):
            norm(np.ones(3, dtype))


def test_rates_are_those_of_the_papers_and_one_for_a_norm_of_zero() -> None:
    assert lars_rate(8.0, 3.0, coefficient=0.5, weight_decay=0.125) == 1.0
    assert lars_rate(8.0, 4.0, coefficient=0.001) == 0.002
    assert lamb_rate(6.0, 4.0) == 1.5
    assert [lars_rate(0.0, 3.0), lars_rate(3.0, 0.0, weight_decay=0.1)] == [1.0, 1.0]
    assert [lamb_rate(0.0, 3.0), lamb_rate(3.0, 0.0), lamb_rate(0.0, 0.0)] == [1.0, 1.0, 1.0]


def communicator(ranks: int) -> Communicator:
    return Communicator(forest_plan(ranks, "allreduce", "binary"))


@pytest.mark.sampled
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("layers", [0, 1, 4, 161])
def test_all_ranks_have_all_rates_in_the_order_of_layers(ranks: int, layers: int) -> None:
    generator = np.random.default_rng(layers)
    wanted = generator.random(layers)
    wanted[layers // 2 :] = math.nan
    with communicator(ranks) as comm:
        parallel = ParallelRates(comm, generator.integers(0, 10**6, layers).tolist())
        before = sum(comm.bytes_sent().values())
        found = parallel.gather([[wanted[layer] for layer in parallel.owned(rank)] for rank in comm.ranks])
        longest = max(len(parallel.owned(rank)) for rank in comm.ranks)
        assert sum(comm.bytes_sent().values()) - before == ranks * (ranks - 1) * 8 * longest
    assert len(found) == ranks
    assert all(one.tobytes() == wanted.tobytes() for one in found)


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


# ---- steps

Array = NDArray[Any]

SHAPES = ((64, 3, 7, 7), (64,), (300, 70), (), (0, 5), (1, 999), (41,))
MADE: dict[str, Callable[..., Any]] = {
    "lars": lambda **options: Lars(0.5, weight_decay=1e-3, coefficient=0.01, excluded=[1, 6], **options),
    "lamb": lambda **options: Lamb(0.01, weight_decay=0.02, excluded=[1, 6], **options),
}
METHODS = pytest.mark.parametrize("method", MADE)


def layers(seed: int, dtype: str = "float32") -> list[Array]:
    generator = np.random.default_rng(seed)
    return [np.asarray(generator.standard_normal(shape)).astype(dtype) for shape in SHAPES]


def bits(arrays: Sequence[Array]) -> list[bytes]:
    return [array.tobytes() for array in arrays]


def run(optimiser: Any, weights: Any, steps: range, dtype: str = "float32", ranks: int = 0) -> None:
    """Steps on gradients that depend on the weights; with ranks on as many replicas."""
    for step in steps:
        noise = layers(100 + step, dtype)
        replicas = weights if ranks else [weights]
        gradients = [[w * w.dtype.type(0.1) + g for w, g in zip(one, noise, strict=True)] for one in replicas]
        optimiser.step(weights, gradients if ranks else gradients[0])


def lars_by_the_paper(weights: list[Array], gradients: list[list[Array]]) -> list[Array]:
    wanted = [w.astype(np.float64) for w in weights]
    velocities = [np.zeros(shape) for shape in SHAPES]
    for step in gradients:
        for i, (w, g) in enumerate(zip(wanted, step, strict=True)):
            lengths = np.linalg.norm(w), np.linalg.norm(g.astype(np.float64))
            rate = 1 if i in (1, 6) or 0 in lengths else 0.01 * lengths[0] / (lengths[1] + 1e-3 * lengths[0])
            velocities[i] = 0.9 * velocities[i] + 0.5 * rate * (g + 1e-3 * w)
            wanted[i] = w - velocities[i]
    return wanted


def lamb_by_the_paper(weights: list[Array], gradients: list[list[Array]]) -> list[Array]:
    wanted = [w.astype(np.float64) for w in weights]
    first, second = ([np.zeros(shape) for shape in SHAPES] for _ in range(2))
    for step, each in enumerate(gradients, 1):
        for i, (w, g) in enumerate(zip(wanted, each, strict=True)):
            first[i] = 0.9 * first[i] + 0.1 * g
            second[i] = 0.999 * second[i] + 0.001 * g * g
            scale = np.sqrt(second[i] / (1 - 0.999**step)) + 1e-6
            update = first[i] / (1 - 0.9**step) / scale + 0.02 * w
            lengths = np.linalg.norm(w), np.linalg.norm(update)
            rate = 1 if i in (1, 6) or 0 in lengths else lengths[0] / lengths[1]
            wanted[i] = w - 0.01 * rate * update
    return wanted


@pytest.mark.sampled
@pytest.mark.parametrize(("dtype", "close"), [("float32", 3e-5), ("float64", 1e-9)])
@pytest.mark.parametrize(("method", "paper"), [("lars", lars_by_the_paper), ("lamb", lamb_by_the_paper)])
def test_steps_follow_the_papers_algorithm(method: str, paper: Any, dtype: str, close: float) -> None:
    weights, optimiser = layers(1, dtype), MADE[method]()
    gradients = [layers(step + 10, dtype) for step in range(5)]
    wanted = paper(weights, gradients)
    for one in gradients:
        optimiser.step(weights, one)
    for found, right in zip(weights, wanted, strict=True):
        np.testing.assert_allclose(found, right, rtol=close, atol=1e-6)


@pytest.mark.sampled
@METHODS
@pytest.mark.parametrize(("dtype", "ranks"), [("float16", 2), ("float32", 4), ("float64", 2)])
def test_owners_take_the_steps_of_one_rank_alone_bit_for_bit(method: str, dtype: str, ranks: int) -> None:
    alone = layers(1, dtype)
    serial = MADE[method]()
    run(serial, alone, range(20), dtype)
    with Communicator(forest_plan(ranks, "allreduce", "chain")) as comm:
        replicas = [layers(1, dtype) for _ in comm.ranks]
        shared = MADE[method](communicator=comm)
        run(shared, replicas, range(20), dtype, comm.size)
    assert all(bits(one) == bits(alone) for one in replicas)
    assert bits(alone) != bits(layers(1, dtype))
    state = shared.state_dict()
    for kept in state["kept"]:
        for one, other in zip(kept, serial.state_dict()["kept"][0], strict=True):
            assert bits(list(one.values())) == bits(list(other.values()))
            assert {line.dtype.name for line in one.values()} <= {"float32", dtype} - {"float16"}


@METHODS
def test_a_nan_stays_in_its_layer(method: str) -> None:
    gradients = layers(5)
    gradients[2][3, 4] = np.nan
    alone = layers(1)
    MADE[method]().step(alone, gradients)
    with Communicator(forest_plan(2, "allreduce", "chain")) as comm:
        replicas = [layers(1), layers(1)]
        MADE[method](communicator=comm).step(replicas, [gradients, gradients])
    assert [bool(np.isnan(one).any()) for one in alone] == [i == 2 for i in range(len(SHAPES))]
    for one in replicas:
        for found, wanted in zip(one, alone, strict=True):
            np.testing.assert_array_equal(found, wanted)


@METHODS
@pytest.mark.parametrize("ranks", [0, 2], ids=["alone", "owners"])
def test_a_restored_state_continues_with_the_same_bits_and_is_a_copy(method: str, ranks: int) -> None:
    with Communicator(forest_plan(2, "allreduce", "chain")) as comm:
        options = {"communicator": comm} if ranks else {}
        weights: Any = [layers(1), layers(1)] if ranks else layers(1)
        optimiser = MADE[method](**options)
        run(optimiser, weights, range(3), ranks=ranks)
        state, saved = optimiser.state_dict(), copy.deepcopy(weights)
        run(optimiser, weights, range(3, 6), ranks=ranks)
        for _ in range(2):
            again, restored = copy.deepcopy(saved), MADE[method](**options)
            restored.load_state_dict(state)
            run(restored, again, range(3, 6), ranks=ranks)
            assert pickle.dumps(again) == pickle.dumps(weights)
            assert restored.steps == 6


def test_weight_decay_may_be_given_for_each_layer_in_numbers_of_numpy_too() -> None:
    for number in (float, np.float64):
        weights = [np.ones(3), np.ones(3)]
        optimiser = Lars(
            number(0.5), momentum=number(0), weight_decay=[number(0.0), number(0.5)], excluded=[0, 1]
        )
        optimiser.step(weights, [np.zeros(3), np.zeros(3)])
        assert [one.tolist() for one in weights] == [[1.0] * 3, [0.75] * 3]
    for options, message in (
        ({"excluded": [3]}, "excluded layers must be from 0 to 0, got 3"),
        ({"weight_decay": [0.0, 0.1]}, "weight_decay must be one for each of 1 layers, got 2"),
    ):
        with pytest.raises(UsageError, match=message):
            Lars(0.1, **options).step([ONE.copy()], [ONE])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Lars(-0.1), "learning rate must be 0 or more, got -0.1"),
        (lambda: Lars(float("nan")), "learning rate must be 0 or more, got nan"),
        (lambda: Lamb(0.1, weight_decay=[0.0, -1.0]), "weight decay must be 0 or more, got -1.0"),
        (lambda: Lars(0.1, momentum=1.0), r"momentum must be in \[0, 1\), got 1.0"),
        (lambda: Lars(0.1, coefficient=0.0), "coefficient must be above 0, got 0.0"),
        (lambda: Lamb(0.1, betas=(0.9, 1.0)), r"betas must be in \[0, 1\), got \(0.9, 1.0\)"),
        (lambda: Lamb(0.1, epsilon=0.0), "epsilon must be above 0, got 0.0"),
    ],
)
def test_settings_out_of_range_are_refused(make: Callable[[], object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        make()


ONE = np.ones(3, np.float32)
READ_ONLY = np.ones(3, np.float32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("weights", "gradients", "told"),
    [
        ([ONE], [ONE, ONE], "1 layers have 2 gradients"),
        ([ONE], [np.ones(4, np.float32)], r"layer 0 has weights of shape \(3,\) and a gradient of \(4,\)"),
        (
            [ONE, ONE],
            [ONE, np.ones(3)],
            "layer 1 has weights of float32 and a gradient of float64, which is wider",
        ),
        ([np.ones(3, int)], [ONE], "layer 0 has weights of int64"),
        ([READ_ONLY], [ONE], "cannot be written to"),
        ([np.ones((3, 3))[:, :1]], [np.ones((3, 1))], "not contiguous"),
        ([ONE], [[1.0, 1.0, 1.0]], "layer 0 has a gradient of type list"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(weights: Any, gradients: Any, told: str) -> None:
    optimiser = Lars(0.1)
    with pytest.raises(UsageError, match=told):
        optimiser.step(weights, gradients)
    assert optimiser.steps == 0


@METHODS
def test_other_layers_and_states_are_refused_before_anything_moves(method: str) -> None:
    weights, optimiser = layers(1), MADE[method]()
    optimiser.step(weights, layers(2))
    before = bits(weights)
    with pytest.raises(UsageError, match="there are 6 and were 7"):
        optimiser.step(weights[:6], layers(2)[:6])
    with pytest.raises(UsageError, match=f"state must be one of {method.capitalize()}"):
        optimiser.load_state_dict({"steps": 3, "learning_rate": 0.1, "kept": [[{"other": weights[0]}]]})
    state = optimiser.state_dict()
    state["kept"][0][2] = state["kept"][0][1]
    optimiser.load_state_dict(state)
    with pytest.raises(UsageError, match="layer 2 is 21000 of float32 and was 64 of float32"):
        optimiser.step(weights, layers(2))
    assert bits(weights) == before


def test_replicas_with_other_layers_are_refused_before_anything_moves() -> None:
    with Communicator(forest_plan(2, "allreduce", "chain")) as comm:
        replicas = [layers(1), layers(1)[:5]]
        with pytest.raises(UsageError, match="ranks differ in their layers: there are 5 and were 7"):
            Lars(0.1, communicator=comm).step(replicas, replicas)
        assert not comm.bytes_sent()
    assert bits(list(itertools.chain(*replicas))) == bits([*layers(1), *layers(1)[:5]])


@METHODS
def test_overflow_raises_no_warning_whatever_the_setting_of_numpy(method: str) -> None:
    weights = [np.ones(4, np.float32), np.ones(4, np.float32)]
    gradients = [np.float32([1, np.inf, np.nan, 1e30]), np.ones(4, np.float32)]
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        {"lars": Lars, "lamb": Lamb}[method](0.1).step(weights, gradients)
    assert np.isnan(weights[0]).all()
    assert (weights[1] < 1).all()
