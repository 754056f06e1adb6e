"""Error feedback: the entries sent and the residual add up to the gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import ErrorFeedback, topk, warm_up_density
from topoplan.errors import UsageError

Array = NDArray[Any]

SIZE = 50_021


def normal(seed: int, size: int = SIZE) -> Array:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def infinite(seed: int, place: int) -> Array:
    gradient = normal(seed)
    gradient[[place, place // 2, place // 2 + 7]] = np.inf, -np.inf, np.inf
    return gradient


def every_16_bits(name: str) -> Array:
    bits = np.random.default_rng(1).permutation(np.arange(1 << 16, dtype=np.uint16))
    dtype: Any = np.float16
    if name == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes", reason="numpy has no bfloat16 of its own").bfloat16
    values: Array = bits.view(dtype)
    return values[np.isfinite(values.astype(np.float32))]


SEQUENCES: dict[str, list[tuple[Array, int]]] = {
    "any k": [(normal(step), k) for step, k in enumerate((500, 50, 0, SIZE // 3, SIZE, 500))],
    "scales of 1e30 and 1e-30": [
        (np.rint(100 * normal(step)) * np.float32(scale), 300)
        for step, scale in enumerate((1, 1e30, 1, 1e-30, 1))
    ],
    **{
        f"infinities at {place}": [(normal(1), 100), *((infinite(k, place), k) for k in (0, 3, 400))]
        for place in (0, 1024, SIZE - 1)
    },
    "more infinities than k": [(normal(1), 100), (infinite(2, 1000), 2)],
    **{
        f"{size} elements": [(np.rint(9 * normal(seed, size)), -(-size // 50)) for seed in range(3)]
        for size in (1, 63, 64, 65, 1023, 1024, 1025, 16_384, 16_447, 70_001)
    },
}
"""Gradients with the number of entries to send; sizes lie about those of vectors and blocks."""


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("name", SEQUENCES)
def test_sends_the_topk_of_the_sum_and_keeps_the_rest(name: str, momentum: float) -> None:
    feedback = ErrorFeedback(SEQUENCES[name][0][0].size, momentum=momentum)
    residual = velocity = np.zeros(feedback.residual.size, np.float32)
    for gradient, k in SEQUENCES[name]:
        velocity = np.float32(momentum) * velocity + gradient if momentum else gradient.copy()
        residual = residual + velocity
        wanted = topk(residual, k)
        for found, expected in zip(feedback.feed(gradient, k), wanted, strict=True):
            assert np.array_equal(found, expected)
        residual[wanted[0]] = velocity[wanted[0]] = 0
        assert np.array_equal(feedback.residual, residual)
        assert not momentum or np.array_equal(feedback.velocity, velocity)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_whole_numbers_are_conserved_exactly(dtype: str) -> None:
    feedback, given, sent = ErrorFeedback(SIZE, dtype), np.zeros(SIZE), np.zeros(SIZE)
    for step in range(20):
        gradient = np.random.default_rng(step).integers(-100, 101, SIZE).astype(dtype)
        given += gradient
        indices, values = feedback.feed(gradient, 500)
        sent[indices] += values
        assert np.array_equal(given, sent + feedback.residual)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_restored_state_continues_with_the_same_bits(momentum: float) -> None:
    first, second = ErrorFeedback(SIZE, momentum=momentum), ErrorFeedback(SIZE, momentum=momentum)
    for step in range(6):
        sent = first.feed(normal(step), 200)
        if step == 2:
            second.restore(first.state())
        elif step > 2:
            again = second.feed(normal(step), 200)
            assert all(np.array_equal(a, b) for a, b in zip(sent, again, strict=True))
    assert second.step == 6


# ---- dtypes


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kept", "momentum"),
    [("float32", 0.0), ("float32", 0.5), pytest.param("float64", 0.0, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_a_16_bit_gradient_gives_the_bits_of_its_wider_copy(name: str, momentum: float, kept: str) -> None:
    gradient = every_16_bits(name)[: -5 if momentum else None]
    narrow, wide = (ErrorFeedback(gradient.size, kept, momentum=momentum) for _ in range(2))
    for k in (300, 0, gradient.size // 2):
        for a, b in zip(narrow.feed(gradient, k), wide.feed(gradient.astype(kept), k), strict=True):
            assert a.tobytes() == b.tobytes()
        assert narrow.residual.tobytes() == wide.residual.tobytes()


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_finds_16_bit_elements_that_are_not_finite(name: str, odd: float) -> None:
    gradient = every_16_bits(name)
    gradient[123] = odd
    feedback = ErrorFeedback(gradient.size)
    if np.isnan(odd):
        with pytest.raises(UsageError, match="element 123 of the gradient is NaN"):
            feedback.feed(gradient, 200)
        assert not feedback.residual.any()
    else:
        indices, values = feedback.feed(gradient, 200)
        assert values[np.searchsorted(indices, 123)] == odd


@pytest.mark.parametrize(
    ("given", "kept"), [("float16", "float32"), ("float32", "float64"), ("int16", "float32")]
)
def test_adds_a_gradient_to_a_wider_residual(given: str, kept: str) -> None:
    feedback = ErrorFeedback(3, kept)
    feedback.feed(np.array([1, -2, 3], given), 1)
    assert feedback.residual.tolist() == [1, -2, 0]


# ---- entries given back


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("k", [0, 400, SIZE])
def test_giving_all_back_equals_sending_nothing(k: int, momentum: float) -> None:
    sending, silent = (ErrorFeedback(SIZE, momentum=momentum) for _ in range(2))
    for step in range(3):
        sending.give_back(*sending.feed(normal(step), k))
        silent.feed(normal(step), 0)
        assert np.array_equal(sending.residual, silent.residual)
        assert not momentum or np.array_equal(sending.velocity, silent.velocity)


def test_restores_a_part_given_back_in_any_order() -> None:
    feedback = ErrorFeedback(SIZE, momentum=0.9)
    feedback.feed(normal(0), 100)
    before = feedback.state()
    indices, values = feedback.feed(normal(1), 500)
    back = np.random.default_rng(2).permutation(500)[:50]
    feedback.give_back(indices[back], values[back])
    velocity = np.float32(0.9) * before["velocity"] + normal(1)
    assert np.array_equal(feedback.residual[indices[back]], values[back])
    assert np.array_equal(feedback.velocity[indices[back]], velocity[indices[back]])
    gone = np.delete(indices, back)
    assert not feedback.residual[gone].any()
    assert not feedback.velocity[gone].any()


def test_entries_of_an_earlier_step_come_back_and_a_velocity_once() -> None:
    feedback = ErrorFeedback(3, momentum=0.5)
    earlier = feedback.feed(np.array([8, 1, 1], np.float32), 1)
    last = feedback.feed(np.array([0, 4, 0], np.float32), 1)
    feedback.give_back(*earlier)
    assert (feedback.residual.tolist(), feedback.velocity.tolist()) == ([8, 0, 1.5], [0, 0, 0.5])
    feedback.give_back(*last)
    feedback.give_back(*last)
    assert (feedback.residual.tolist(), feedback.velocity.tolist()) == ([8, 11, 1.5], [0, 4.5, 0.5])


# ---- refusals


@pytest.mark.parametrize("place", [0, 5000, SIZE - 1])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("k", [0, 1, 400, SIZE // 2])
def test_a_nan_is_refused_and_the_state_stays(k: int, momentum: float, place: int) -> None:
    feedback = ErrorFeedback(SIZE, momentum=momentum)
    feedback.feed(np.rint(100 * normal(1)), 100)
    before, gradient = feedback.state(), np.rint(100 * normal(2))
    gradient[place // 2] = np.inf
    gradient[place] = np.nan
    with pytest.raises(UsageError, match=f"element {place} of the gradient is NaN"):
        feedback.feed(gradient, k)
    assert feedback.step == 1
    assert np.array_equal(feedback.residual, before["residual"])
    assert not momentum or np.array_equal(feedback.velocity, before["velocity"])


def test_a_nan_behind_more_candidates_than_the_buffer_holds_is_refused() -> None:
    feedback, gradient = ErrorFeedback(SIZE), np.ones(SIZE, np.float32)
    gradient[SIZE - 100] = np.nan
    with pytest.raises(UsageError, match=f"element {SIZE - 100} of the gradient is NaN"):
        feedback.feed(gradient, 10)
    assert not feedback.residual.any()


def test_an_infinity_opposite_to_the_residual_is_refused() -> None:
    feedback, gradient = ErrorFeedback(SIZE), np.zeros(SIZE, np.float32)
    gradient[70] = np.inf
    feedback.feed(gradient, 0)
    before = feedback.residual.copy()
    with pytest.raises(UsageError, match="element 70 of the gradient is -inf, and what is kept there is inf"):
        feedback.feed(-gradient, 10)
    assert np.array_equal(feedback.residual, before)


@pytest.mark.parametrize(
    ("indices", "values", "message"),
    [
        ([3], np.ones(1, np.float32), "index 3 is not among 3"),
        ([-1], np.ones(1, np.float32), "index -1 is not among 3"),
        ([0, 1], np.ones(1, np.float32), "do not pair up"),
        ([0], np.ones(1), "float64 values"),
        ([0.0], np.ones(1, np.float32), "float64 indices"),
    ],
)
def test_refuses_entries_that_it_cannot_have_sent(indices: list[int], values: Array, message: str) -> None:
    feedback = ErrorFeedback(3)
    with pytest.raises(UsageError, match=message):
        feedback.give_back(np.array(indices), values)
    assert not feedback.residual.any()


def test_refuses_bad_arguments_and_changes_nothing() -> None:
    feedback = ErrorFeedback(3)
    for gradient, k, message in (
        (np.zeros(4, np.float32), 1, "4 elements, and the residual has 3"),
        (np.zeros(3), 1, "float64 cannot be added to float32"),
        (np.ones(3, np.float32), 4, "k must be a whole number from 0 to 3, .* got 4"),
    ):
        with pytest.raises(UsageError, match=message):
            feedback.feed(gradient, k)
    for other, message in ((ErrorFeedback(4), "does not fit"), (ErrorFeedback(3, momentum=0.5), "momentum")):
        with pytest.raises(UsageError, match=message):
            feedback.restore(other.state())
    assert not feedback.residual.any()
    for options in ({"size": -1}, {"size": 3, "dtype": "float16"}, {"size": 3, "momentum": 1.0}):
        with pytest.raises(UsageError):
            ErrorFeedback(**options)  # type: ignore[arg-type]
    for epoch, density in ((-1, 0.1), (0, 0.0), (0, 1.5)):
        with pytest.raises(UsageError):
            warm_up_density(epoch, density)


# ---- buffers


def test_a_result_in_use_is_not_overwritten() -> None:
    feedback, held, copies = ErrorFeedback(SIZE), [], []
    for step in range(12):
        indices, values = feedback.feed(normal(step), 300)
        if step % 3 != 1:
            part = slice(step, step + 20)
            held += [indices[part], values[part]]
            copies += [indices[part].copy(), values[part].copy()]
        del indices, values
    assert all(np.array_equal(a, b) for a, b in zip(held, copies, strict=True))
