"""Error feedback and messages on a GPU, with kernels that run on this processor: the processor's bits."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from collectives import ErrorFeedback
from collectives.sparse.entry_arrays import decode_entries, encode_entries
from collectives.sparse.gpu_entry_arrays import (
    GpuErrorFeedback,
    add_entries_gpu,
    decode_entries_gpu,
    encode_entries_gpu,
)
from collectives.sparse.selection import gpu_topk
from tests.support.feedback_steps import CASES, compare_steps, equal_states, widened
from tests.support.selection_data import drawn, same
from tests.support.selection_on_cpu import Launches
from topoplan.errors import UsageError

Fake = tuple[Any, Launches]


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sample", "size", "several", "forms"),
    [
        (None, 5001, (50, 0, 1700, 5001, 50), ["histogram"] * 5),
        (256, 16501, (165, 16, 165, 165), ["histogram", "gather"] * 4),
    ],
    ids=["two reads", "a sampled bound"],
)
@pytest.mark.parametrize("case", CASES)
def test_steps_give_and_keep_the_processors_bits(
    fake: Fake,
    monkeypatch: pytest.MonkeyPatch,
    case: tuple[str, str, float],
    sample: int | None,
    size: int,
    several: tuple[int, ...],
    forms: list[str],
) -> None:
    cupy, launches = fake
    if sample:
        monkeypatch.setattr(gpu_topk, "SAMPLE", sample)

    def blocks_in_another_order(step: int) -> None:
        launches.backwards = step % 2 == 1

    compare_steps(cupy, case, size, several, blocks_in_another_order)
    kind = "momentum" if case[2] else "feedback"
    added = [name for name in launches.names if re.match("feedback|momentum", name)]
    assert added == [f"{kind}_{form}_{case[1]}_{case[0]}" for form in forms]


@pytest.mark.thorough
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("sample", [1 << 20, 128])
def test_a_nan_is_refused_and_the_state_stays(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, sample: int, momentum: float
) -> None:
    cupy, _ = fake
    monkeypatch.setattr(gpu_topk, "SAMPLE", sample)
    size = 9001
    feedback = GpuErrorFeedback(size, momentum=momentum)
    whole = [np.random.default_rng(i).integers(-100, 101, size).astype(np.float32) for i in range(2)]
    feedback.feed(cupy.asarray(whole[0]), 50)
    before = feedback.state()
    broken = whole[1].copy()
    broken[[7777, 8000, size - 1]] = np.nan
    for k in (0, 50):
        with pytest.raises(UsageError, match=r"element 7777 of the gradient is NaN; leave this step out"):
            feedback.feed(cupy.asarray(broken), k)
        after = feedback.state()
        assert np.array_equal(after["residual"], before["residual"])
        assert momentum == 0 or np.array_equal(after["velocity"], before["velocity"])
        assert feedback.step == 1
    host = ErrorFeedback(size, momentum=momentum)
    host.restore(before)
    indices, values = feedback.feed(cupy.asarray(whole[1]), 50)
    assert same((indices.get(), values.get()), host.feed(whole[1], 50))


@pytest.mark.sampled
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_an_infinity_opposite_to_the_residual_is_refused(fake: Fake, momentum: float) -> None:
    cupy, _ = fake
    feedback = GpuErrorFeedback(100, momentum=momentum)
    gradient = np.arange(100, dtype=np.float32)
    gradient[5] = np.inf
    feedback.feed(cupy.asarray(gradient), 0)
    with pytest.raises(UsageError, match="infinity where the residual has one of the other sign"):
        feedback.feed(cupy.asarray(-gradient), 1)
    assert feedback.residual.get()[5] == np.inf
    assert np.array_equal(np.delete(feedback.residual.get(), 5), np.delete(gradient, 5))
    assert feedback.feed(cupy.asarray(gradient), 1)[0].get().tolist() == [5]
    assert np.isfinite(feedback.residual.get()).all()


def test_entries_given_back_are_kept(fake: Fake) -> None:
    cupy, _ = fake
    host, device = ErrorFeedback(5000), GpuErrorFeedback(5000)
    gradient = drawn("normal", "float32", 5000, np.random.default_rng(3))
    indices, values = host.feed(gradient, 300)
    sent = device.feed(cupy.asarray(gradient), 300)
    device.give_back(sent[0][::3], sent[1][::3])
    host.residual[indices[::3]] += values[::3]
    equal_states(host, device)


def test_refuses_bad_arguments_and_changes_nothing(fake: Fake) -> None:
    cupy, _ = fake
    feedback = GpuErrorFeedback(3)
    for gradient, k, message in (
        (cupy.zeros(4, dtype=np.float32), 1, "4 elements, and the residual has 3"),
        (cupy.zeros(3, dtype=np.float64), 1, "float64 cannot be added to float32"),
        (cupy.zeros(3, dtype=np.int32), 1, "int32 cannot be added to float32"),
        (cupy.zeros(3, dtype=np.float32), 4, "k must be a whole number from 0 to 3, .* got 4"),
        (np.ones(3, np.float32), 1, "must be a CuPy array, got ndarray"),
    ):
        with pytest.raises(UsageError, match=message):
            feedback.feed(gradient, k)
    for other, message in ((ErrorFeedback(4), "does not fit"), (ErrorFeedback(3, momentum=0.5), "momentum")):
        with pytest.raises(UsageError, match=message):
            feedback.restore(other.state())
    assert not feedback.residual.get().any()
    for options in ({"size": -1}, {"size": 3, "dtype": "float16"}, {"size": 3, "momentum": 1.0}):
        with pytest.raises(UsageError):
            GpuErrorFeedback(**options)  # type: ignore[arg-type]
    empty = GpuErrorFeedback(0, momentum=0.5)
    assert [part.size for part in empty.feed(cupy.zeros(0, dtype=np.float32), 0)] == [0, 0]
    assert empty.step == 1


def test_a_residual_lies_on_the_gpu_of_its_gradients(fake: Fake) -> None:
    cupy, _ = fake
    here = cupy.asarray(np.arange(9, dtype=np.float32))
    feedback = GpuErrorFeedback(9, device=1, momentum=0.5)
    with cupy.cuda.Device(1):
        there = cupy.asarray(np.arange(9, dtype=np.float32))
    indices, values = feedback.feed(there, 2)
    assert (indices.device.id, values.device.id, indices.get().tolist()) == (1, 1, [7, 8])
    with pytest.raises(UsageError, match="on GPU 0 and the residual on GPU 1"):
        feedback.feed(here, 2)


# ---- entries and messages


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_entries_are_added_in_order_of_messages_as_numpy_adds_them(
    fake: Fake, dtype: str, index: str
) -> None:
    cupy, launches = fake
    generator = np.random.default_rng(2)
    total = drawn("normal", dtype, 20001, generator)
    there = cupy.asarray(total)
    for count in (1, 700, 20001, 0):
        launches.backwards = not launches.backwards
        indices = np.sort(generator.permutation(20001)[:count]).astype(index)
        values = drawn("normal", dtype, count, generator) if count else np.zeros(0, dtype)
        add_entries_gpu(there, cupy.asarray(indices), cupy.asarray(values))
        total[indices] += values
    assert there.get().tobytes() == total.tobytes()


def test_refuses_entries_that_do_not_fit_and_touches_no_other_memory(fake: Fake) -> None:
    cupy, _ = fake
    buffer = cupy.zeros(30, dtype=np.float32)
    outside, ones = np.int32([-1, 0, 9, 10, 15]), np.ones(5, np.float32)
    pairs = np.zeros(2, np.int32), np.zeros(2, np.float32)
    with pytest.raises(UsageError, match=r"3 of 5 indices are not in 0 to 9"):
        add_entries_gpu(buffer[10:20], cupy.asarray(outside), cupy.asarray(ones))
    assert np.flatnonzero(buffer.get()).tolist() == [10, 19]
    for total, indices, values, message in (
        (buffer, cupy.asarray(np.zeros(2, np.int16)), cupy.asarray(pairs[1]), "indices of int16"),
        (buffer, cupy.asarray(pairs[0]), cupy.asarray(np.zeros(2)), "values of float64"),
        (buffer, cupy.asarray(pairs[0]), cupy.asarray(ones), r"values of shape \(5,\)"),
        (buffer, pairs[0], cupy.asarray(pairs[1]), "must be a CuPy array, got ndarray"),
        (buffer[::2], cupy.asarray(pairs[0]), cupy.asarray(pairs[1]), "strides"),
    ):
        with pytest.raises(UsageError, match=message):
            add_entries_gpu(total, indices, values)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("size", [9, 2**31])
def test_messages_equal_the_processors_byte_for_byte(fake: Fake, dtype: str, size: int) -> None:
    cupy, _ = fake
    index = "int32" if size < 2**31 else "int64"
    for count in (0, 1, 2, 7):
        indices, values = np.arange(count).astype(index), -np.arange(count).astype(dtype)
        message = encode_entries(indices, values, size=size, wire=None, rank=0, step=0)
        packed = encode_entries_gpu(cupy.asarray(indices), cupy.asarray(values))
        assert packed.get().tobytes() == message.tobytes()
        back = decode_entries_gpu(packed, size=size, dtype=dtype)
        expected = decode_entries(message, size=size, dtype=dtype, wire=None)
        assert same((back[0].get(), back[1].get()), expected)


def test_messages_at_any_address_are_read_at_aligned_ones(fake: Fake) -> None:
    cupy, _ = fake
    indices, values = np.arange(3, dtype=np.int32), np.array([0.5, -1.0, 2.0])
    message = encode_entries(indices, values, size=9, wire=None, rank=0, step=0)
    gathered = cupy.asarray(np.concatenate([np.zeros(3, np.uint8), message, message]))
    for first, end in pairwise((3, 3 + len(message), 3 + 2 * len(message))):
        back = decode_entries_gpu(gathered[first:end], size=9, dtype="float64")
        assert [part.data.ptr % part.dtype.itemsize for part in back] == [0, 0]
        assert same((back[0].get(), back[1].get()), (indices, values))


def test_bfloat16_is_sent_as_its_bits_and_a_truncated_message_is_refused(fake: Fake) -> None:
    cupy, _ = fake
    bits = drawn("normal", "bfloat16", 5, np.random.default_rng(0))
    packed = encode_entries_gpu(cupy.asarray(np.arange(5, dtype=np.int32)), cupy.asarray(bits))
    back = decode_entries_gpu(packed, size=9, dtype="bfloat16")[1].get()
    assert np.array_equal(widened(back, "bfloat16", "float32"), widened(bits, "bfloat16", "float32"))
    with pytest.raises(UsageError, match="29 bytes does not hold entries of 6 bytes"):
        decode_entries_gpu(packed[:29], size=9, dtype="bfloat16")
