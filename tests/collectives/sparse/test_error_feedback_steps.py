"""Error feedback: gradients of fewer bits, entries given back, infinities, and memory that is used again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import ErrorFeedback, topk
from topoplan.errors import UsageError

Array = NDArray[Any]

SIZE = 50_021


def normal(seed: int, dtype: str = "float32") -> Array:
    return np.random.default_rng(seed).standard_normal(SIZE).astype(dtype)


# ---- gradients of fewer bits


def half_of_every_bit_pattern(name: str) -> Array:
    """All numbers of 16 bits but NaN and infinities, in an order that mixes them."""
    bits = np.random.default_rng(1).permutation(np.arange(1 << 16, dtype=np.uint16))
    if name == "bfloat16":
        ml_dtypes = pytest.importorskip("ml_dtypes", reason="numpy has no bfloat16 of its own")
        values: Array = bits.view(ml_dtypes.bfloat16)
    else:
        values = bits.view(np.float16)
    return values[np.isfinite(values.astype(np.float32))]


@pytest.mark.thorough
@pytest.mark.parametrize(("kept", "momentum"), [("float32", 0.0), ("float32", 0.5), ("float64", 0.0)])
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_a_gradient_of_16_bits_is_taken_in_as_its_copy_of_more(name: str, momentum: float, kept: str) -> None:
    gradient = half_of_every_bit_pattern(name)[: -5 if momentum else None]
    narrow = ErrorFeedback(gradient.size, kept, momentum=momentum)
    wide = ErrorFeedback(gradient.size, kept, momentum=momentum)
    for k in (300, 0, gradient.size // 2):
        for a, b in zip(narrow.feed(gradient, k), wide.feed(gradient.astype(kept), k), strict=True):
            assert a.tobytes() == b.tobytes()
        assert narrow.residual.tobytes() == wide.residual.tobytes()


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_in_16_bits_is_seen(name: str, odd: float) -> None:
    gradient = half_of_every_bit_pattern(name)
    gradient[123] = odd
    feedback = ErrorFeedback(gradient.size)
    if np.isnan(odd):
        with pytest.raises(UsageError, match="element 123 of the gradient is NaN"):
            feedback.feed(gradient, 200)
        assert not feedback.residual.any()
    else:
        indices, values = feedback.feed(gradient, 200)
        assert values[np.searchsorted(indices, 123)] == odd


def test_a_gradient_of_float32_is_added_to_float64_and_one_of_whole_numbers_to_float32() -> None:
    feedback = ErrorFeedback(SIZE, "float64")
    feedback.feed(normal(1), 0)
    assert np.array_equal(feedback.residual, normal(1).astype(np.float64))
    small = ErrorFeedback(3)
    small.feed(np.array([1, -2, 3], np.int16), 0)
    assert small.residual.tolist() == [1, -2, 3]


# ---- given back


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("k", [0, 1, 400, SIZE // 3, SIZE])
def test_all_that_is_given_back_leaves_what_a_step_that_sent_nothing_leaves(k: int, momentum: float) -> None:
    sending, silent = (ErrorFeedback(SIZE, momentum=momentum) for _ in range(2))
    for step in range(3):
        sending.give_back(*sending.feed(normal(step), k))
        silent.feed(normal(step), 0)
        assert np.array_equal(sending.residual, silent.residual)
        if momentum:
            assert np.array_equal(sending.velocity, silent.velocity)


def test_a_part_that_is_given_back_in_any_order_is_there_again_and_the_rest_stays_sent() -> None:
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


def test_entries_of_an_earlier_step_get_their_values_back_and_a_velocity_comes_back_once() -> None:
    feedback = ErrorFeedback(3, momentum=0.5)
    earlier = feedback.feed(np.array([8, 1, 1], np.float32), 1)
    last = feedback.feed(np.array([0, 4, 0], np.float32), 1)
    feedback.give_back(*earlier)
    assert (feedback.residual.tolist(), feedback.velocity.tolist()) == ([8, 0, 1.5], [0, 0, 0.5])
    feedback.give_back(*last)
    feedback.give_back(*last)
    assert (feedback.residual.tolist(), feedback.velocity.tolist()) == ([8, 11, 1.5], [0, 4.5, 0.5])


@pytest.mark.parametrize(
    ("indices", "values", "told"),
    [
        ([3], np.ones(1, np.float32), "index 3 is not among 3"),
        ([-1], np.ones(1, np.float32), "index -1 is not among 3"),
        ([0, 1], np.ones(1, np.float32), "do not pair up"),
        ([0], np.ones(1), "float64 values"),
        ([0.0], np.ones(1, np.float32), "float64 indices"),
    ],
)
def test_what_cannot_have_been_given_out_is_not_taken_back(
    indices: list[int], values: Array, told: str
) -> None:
    feedback = ErrorFeedback(3)
    with pytest.raises(UsageError, match=told):
        feedback.give_back(np.array(indices), values)
    assert not feedback.residual.any()


# ---- infinities and NaN


@pytest.mark.parametrize("place", [0, 1000, 1024, SIZE // 2, SIZE - 1])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("k", [0, 2, 3, 400, SIZE // 2])
def test_infinities_are_kept_and_sent_as_numbers_are(k: int, momentum: float, place: int) -> None:
    feedback = ErrorFeedback(SIZE, momentum=momentum)
    feedback.feed(normal(1), 100)
    before, gradient = feedback.state(), normal(2)
    gradient[[place, place // 2, place // 2 + 7]] = np.inf, -np.inf, np.inf
    velocity = gradient if not momentum else np.float32(momentum) * before["velocity"] + gradient
    total = before["residual"] + velocity
    indices, values = feedback.feed(gradient, k)
    assert np.array_equal(indices, topk(total, k)[0])
    assert np.array_equal(values, total[indices])
    total[indices] = 0
    assert np.array_equal(feedback.residual, total)
    if momentum:
        velocity[indices] = 0
        assert np.array_equal(feedback.velocity, velocity)


@pytest.mark.parametrize("place", [0, 5000, SIZE - 1])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("k", [0, 1, 400, SIZE // 2])
def test_a_step_with_infinities_before_a_nan_is_taken_back_wholly(
    k: int, momentum: float, place: int
) -> None:
    feedback = ErrorFeedback(SIZE, momentum=momentum)
    feedback.feed(np.rint(100 * normal(1)), 100)
    before, gradient = feedback.state(), np.rint(100 * normal(2))
    gradient[place // 2] = np.inf
    gradient[place] = np.nan
    with pytest.raises(UsageError, match=f"element {place} of the gradient is NaN"):
        feedback.feed(gradient, k)
    assert np.array_equal(feedback.residual, before["residual"])
    if momentum:
        assert np.array_equal(feedback.velocity, before["velocity"])


def test_an_infinity_where_the_opposite_one_is_kept_is_refused() -> None:
    feedback = ErrorFeedback(SIZE)
    gradient = np.zeros(SIZE, np.float32)
    gradient[70] = np.inf
    feedback.feed(gradient, 0)
    before = feedback.residual.copy()
    with pytest.raises(UsageError, match="element 70 of the gradient is -inf, and what is kept there is inf"):
        feedback.feed(-gradient, 10)
    assert np.array_equal(feedback.residual, before)


def test_a_nan_behind_more_candidates_than_there_is_room_for_is_still_refused() -> None:
    feedback, gradient = ErrorFeedback(SIZE), np.ones(SIZE, np.float32)
    gradient[SIZE - 100] = np.nan
    with pytest.raises(UsageError, match=f"element {SIZE - 100} of the gradient is NaN"):
        feedback.feed(gradient, 10)
    assert not feedback.residual.any()


# ---- memory


def test_a_result_that_somebody_still_has_is_not_written_to() -> None:
    feedback, held, copies = ErrorFeedback(SIZE), [], []
    for step in range(12):
        indices, values = feedback.feed(normal(step), 300)
        if step % 3 != 1:
            part = slice(step, step + 20)
            held += [indices[part], values[part]]
            copies += [indices[part].copy(), values[part].copy()]
        del indices, values
    assert all(np.array_equal(a, b) for a, b in zip(held, copies, strict=True))


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1023, 1024, 1025, 16_384, 16_447, 70_001])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_sizes_about_those_of_steps_and_blocks_are_as_topk_of_the_sum(size: int, momentum: float) -> None:
    feedback = ErrorFeedback(size, momentum=momentum)
    residual = velocity = np.zeros(size, np.float32)
    for seed in range(3):
        gradient = np.rint(9 * np.random.default_rng(seed).standard_normal(size)).astype(np.float32)
        velocity = np.float32(momentum) * velocity + gradient
        residual = residual + velocity
        wanted = topk(residual, -(-size // 50))
        for found, expected in zip(feedback.feed(gradient, -(-size // 50)), wanted, strict=True):
            assert np.array_equal(found, expected)
        residual[wanted[0]] = velocity[wanted[0]] = 0
        assert np.array_equal(feedback.residual, residual)
