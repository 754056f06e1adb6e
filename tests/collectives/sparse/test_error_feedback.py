"""Error feedback: what is sent and what is kept sum up to what was given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import ErrorFeedback, topk, warm_up_density
from topoplan.errors import UsageError

Array = NDArray[Any]

SIZE = 50_021


def whole_numbers(step: int, dtype: str = "float32") -> Array:
    return np.random.default_rng(step).integers(-100, 101, SIZE).astype(dtype)


@pytest.mark.thorough
@pytest.mark.parametrize("k", [0, 1, 50, 500, SIZE // 4, SIZE])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sent_and_kept_are_what_was_given_exactly_in_whole_numbers(dtype: str, k: int) -> None:
    feedback, given, sent = ErrorFeedback(SIZE, dtype), np.zeros(SIZE), np.zeros(SIZE)
    for step in range(100 if k == 500 else 5):
        gradient = whole_numbers(step, dtype)
        given += gradient
        indices, values = feedback.feed(gradient, k)
        sent[indices] += values
        assert len(indices) == k
        assert not feedback.residual[indices].any()
        assert np.array_equal(given, sent + feedback.residual)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_selects_what_topk_selects_from_the_sum(momentum: float) -> None:
    feedback = ErrorFeedback(SIZE, momentum=momentum)
    residual, velocity = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
    for step, k in enumerate((500, 50, 0, SIZE // 3, 500)):
        gradient = np.random.default_rng(step).standard_normal(SIZE).astype(np.float32)
        velocity = np.float32(momentum) * velocity + gradient
        residual += velocity
        wanted = topk(residual, k)
        indices, values = feedback.feed(gradient, k)
        assert np.array_equal(indices, wanted[0])
        assert np.array_equal(values, wanted[1])
        residual[indices] = velocity[indices] = 0
    assert np.array_equal(feedback.residual, residual)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_a_gradient_that_is_suddenly_larger_or_smaller_misleads_nobody(scale: float) -> None:
    feedback = ErrorFeedback(SIZE)
    for step in range(4):
        gradient = (whole_numbers(step) * np.float32(scale if step % 2 else 1)).astype(np.float32)
        wanted = topk(feedback.residual + gradient, 300)[0]
        assert np.array_equal(feedback.feed(gradient, 300)[0], wanted)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_nan_is_refused_and_the_residual_is_as_before(momentum: float) -> None:
    feedback = ErrorFeedback(SIZE, momentum=momentum)
    feedback.feed(whole_numbers(0), 100)
    before = feedback.state()
    broken = whole_numbers(1)
    broken[SIZE - 3] = np.nan
    with pytest.raises(UsageError, match=f"element {SIZE - 3} of the gradient is NaN"):
        feedback.feed(broken, 100)
    assert np.array_equal(feedback.residual, before["residual"])
    assert feedback.step == 1


def test_an_infinity_is_sent_first_and_leaves_nothing_behind() -> None:
    feedback, gradient = ErrorFeedback(SIZE), whole_numbers(0)
    gradient[77] = -np.inf
    assert feedback.feed(gradient, 1)[0].tolist() == [77]
    assert np.isfinite(feedback.residual).all()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_restored_state_goes_on_as_if_nothing_had_happened(momentum: float) -> None:
    first, second = ErrorFeedback(SIZE, momentum=momentum), ErrorFeedback(SIZE, momentum=momentum)
    for step in range(3):
        first.feed(whole_numbers(step), 200)
    second.restore(first.state())
    for step in range(3, 6):
        for a, b in zip(
            first.feed(whole_numbers(step), 200), second.feed(whole_numbers(step), 200), strict=True
        ):
            assert np.array_equal(a, b)
    assert second.step == 6


def test_a_gradient_of_fewer_bits_is_kept_in_more() -> None:
    feedback = ErrorFeedback(3)
    feedback.feed(np.array([1, 2, 3], np.float16), 1)
    assert feedback.residual.tolist() == [1, 2, 0]


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    feedback = ErrorFeedback(3)
    for gradient, k, told in (
        (np.zeros(4, np.float32), 1, "4 elements, and the residual has 3"),
        (np.zeros(3), 1, "float64 cannot be added to float32"),
        (np.ones(3, np.float32), 4, "k must be a whole number from 0 to 3, .* got 4"),
    ):
        with pytest.raises(UsageError, match=told):
            feedback.feed(gradient, k)
    with pytest.raises(UsageError, match="does not fit"):
        feedback.restore(ErrorFeedback(4).state())
    with pytest.raises(UsageError, match="momentum"):
        feedback.restore(ErrorFeedback(3, momentum=0.5).state())
    assert not feedback.residual.any()
    for options in ({"size": -1}, {"size": 3, "dtype": "float16"}, {"size": 3, "momentum": 1.0}):
        with pytest.raises(UsageError):
            ErrorFeedback(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("epoch", "density"), [(-1, 0.1), (0, 0.0), (0, 1.5)])
def test_a_density_that_cannot_be_is_refused(epoch: int, density: float) -> None:
    with pytest.raises(UsageError):
        warm_up_density(epoch, density)
