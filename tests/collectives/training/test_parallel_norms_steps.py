"""LARS and LAMB in a plain loop: the papers' formulas, the same bits by owners as alone, states, refusals."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import Communicator
from collectives.training.optimizers import Lamb, Lars
from tests.support.hand_plans import forest_plan
from topoplan.errors import UsageError

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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_lars_follows_the_papers_algorithm(dtype: str) -> None:
    weights = layers(1, dtype)
    wanted = [w.astype(np.float64) for w in weights]
    velocities = [np.zeros(shape) for shape in SHAPES]
    optimiser = Lars(0.5, momentum=0.9, weight_decay=1e-3, coefficient=0.01, excluded=[1])
    for step in range(5):
        gradients = layers(step + 10, dtype)
        optimiser.step(weights, gradients)
        for i, (w, g) in enumerate(zip(wanted, gradients, strict=True)):
            lengths = np.linalg.norm(w), np.linalg.norm(g.astype(np.float64))
            rate = 1 if i == 1 or 0 in lengths else 0.01 * lengths[0] / (lengths[1] + 1e-3 * lengths[0])
            velocities[i] = 0.9 * velocities[i] + 0.5 * rate * (g + 1e-3 * w)
            wanted[i] = w - velocities[i]
    for found, one in zip(weights, wanted, strict=True):
        np.testing.assert_allclose(found, one, rtol=1e-12 if dtype == "float64" else 3e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_lamb_follows_the_papers_algorithm(dtype: str) -> None:
    weights = layers(1, dtype)
    wanted = [w.astype(np.float64) for w in weights]
    first, second = ([np.zeros(shape) for shape in SHAPES] for _ in range(2))
    optimiser = Lamb(0.01, betas=(0.8, 0.99), epsilon=1e-5, weight_decay=0.02, excluded=[1])
    for step in range(1, 6):
        gradients = layers(step + 10, dtype)
        optimiser.step(weights, gradients)
        for i, (w, g) in enumerate(zip(wanted, gradients, strict=True)):
            first[i] = 0.8 * first[i] + 0.2 * g
            second[i] = 0.99 * second[i] + 0.01 * g * g
            scale = np.sqrt(second[i] / (1 - 0.99**step)) + 1e-5
            update = first[i] / (1 - 0.8**step) / scale + 0.02 * w
            lengths = np.linalg.norm(w), np.linalg.norm(update)
            rate = 1 if i == 1 or 0 in lengths else lengths[0] / lengths[1]
            wanted[i] = w - 0.01 * rate * update
    for found, one in zip(weights, wanted, strict=True):
        np.testing.assert_allclose(found, one, rtol=1e-9 if dtype == "float64" else 3e-5, atol=1e-6)


@METHODS
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_owners_walk_the_trajectory_of_one_rank_alone_bit_for_bit(
    method: str, dtype: str, ranks: int
) -> None:
    alone = layers(1, dtype)
    serial = MADE[method]()
    run(serial, alone, range(20), dtype)
    with Communicator(forest_plan(ranks, "allreduce", "chain")) as comm:
        replicas = [layers(1, dtype) for _ in comm.ranks]
        shared = MADE[method](communicator=comm)
        run(shared, replicas, range(20), dtype, comm.size)
    assert all(bits(one) == bits(alone) for one in replicas)
    assert bits(alone) != bits(layers(1, dtype))
    for kept in shared.state_dict()["kept"]:
        for one, other in zip(kept, serial.state_dict()["kept"][0], strict=True):
            assert bits(list(one.values())) == bits(list(other.values()))


@METHODS
def test_nan_in_one_layer_stays_in_that_layer_by_owners_as_alone(method: str) -> None:
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
def test_a_restored_state_goes_on_bit_for_bit_and_is_a_copy(method: str) -> None:
    weights, optimiser = layers(1), MADE[method]()
    run(optimiser, weights, range(5))
    state, saved = optimiser.state_dict(), copy.deepcopy(weights)
    run(optimiser, weights, range(5, 9))
    for _ in range(2):
        again, restored = copy.deepcopy(saved), MADE[method]()
        restored.load_state_dict(state)
        run(restored, again, range(5, 9))
        assert bits(again) == bits(weights)
        assert restored.steps == 9


@METHODS
def test_the_state_of_owners_is_that_of_all_ranks_and_restores_into_them(method: str) -> None:
    with Communicator(forest_plan(2, "allreduce", "chain")) as comm:
        replicas = [layers(1), layers(1)]
        optimiser = MADE[method](communicator=comm)
        run(optimiser, replicas, range(3), ranks=2)
        state = optimiser.state_dict()
        saved = copy.deepcopy(replicas)
        run(optimiser, replicas, range(3, 6), ranks=2)
        optimiser.load_state_dict(state)
        run(optimiser, saved, range(3, 6), ranks=2)
    assert bits(saved[1]) == bits(replicas[0])


@METHODS
def test_weights_of_16_bits_keep_states_of_32(method: str) -> None:
    weights, optimiser = layers(1, "float16"), MADE[method]()
    run(optimiser, weights, range(2), "float16")
    kept = optimiser.state_dict()["kept"][0]
    assert {line.dtype.name for one in kept for line in one.values()} == {"float32"}


def test_weight_decay_may_be_given_for_each_layer() -> None:
    weights = [np.ones(3), np.ones(3)]
    Lars(0.5, weight_decay=[0.0, 0.5], excluded=[0, 1]).step(weights, [np.zeros(3), np.zeros(3)])
    assert [one.tolist() for one in weights] == [[1.0] * 3, [0.75] * 3]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Lars(-0.1), "learning rate must be 0 or more, got -0.1"),
        (lambda: Lars(float("nan")), "learning rate must be 0 or more, got nan"),
        (lambda: Lamb(0.1, weight_decay=[0.0, -1.0]), "weight decay must be 0 or more, got -1.0"),
        (lambda: Lars(0.1, momentum=1.0), r"momentum must be in \[0, 1\), got 1.0"),
        (lambda: Lars(0.1, coefficient=0.0), "coefficient must be above 0, got 0.0"),
        (lambda: Lamb(0.1, betas=(0.9, 1.0)), r"betas must be in \[0, 1\), got 1.0"),
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
def test_other_layers_than_before_and_states_of_others_are_refused_and_nothing_moves(method: str) -> None:
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


def test_layers_that_do_not_exist_cannot_be_excluded_nor_have_a_weight_decay() -> None:
    with pytest.raises(UsageError, match="excluded layers must be from 0 to 0, got 3"):
        Lars(0.1, excluded=[3]).step([ONE.copy()], [ONE])
    with pytest.raises(UsageError, match="weight_decay must be one for each of 1 layers, got 2"):
        Lars(0.1, weight_decay=[0.0, 0.1]).step([ONE.copy()], [ONE])


@METHODS
def test_what_overflows_goes_through_in_silence_whatever_numpy_is_told_to_do(method: str) -> None:
    weights = [np.ones(4, np.float32), np.ones(4, np.float32)]
    gradients = [np.float32([1, np.inf, np.nan, 1e30]), np.ones(4, np.float32)]
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        {"lars": Lars, "lamb": Lamb}[method](0.1).step(weights, gradients)
    assert np.isnan(weights[0]).all()
    assert (weights[1] < 1).all()


def test_numbers_of_numpy_are_as_good_as_those_of_python() -> None:
    ends = []
    for number in (float, np.float64):
        moved = [layers(1), layers(1)]
        betas = (number(0.9), number(0.999))
        lars = Lars(number(0.5), momentum=number(0.9), weight_decay=[number(0.01)] * len(SHAPES))
        run(lars, moved[0], range(3))
        run(Lamb(number(0.1), betas=betas, epsilon=number(1e-6)), moved[1], range(3))
        ends.append([bits(one) for one in moved])
    assert ends[0] == ends[1]
