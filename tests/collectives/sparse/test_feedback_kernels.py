"""Error feedback for GPUs without one: kernels compiled for every architecture, and run on this processor."""

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
from collectives.tables.kernels.kernel_launch import THREADS
from collectives.tables.kernels.source import FEEDBACK_LINES, selection_source
from tests.support.fake_streams import Machine
from tests.support.feedback_steps import CASES, compare_steps, equal_states, widened
from tests.support.nvrtc import built, compilers
from tests.support.selection_data import drawn, same
from tests.support.selection_on_cpu import Launches, install_selection
from topoplan.errors import UsageError

# ---- compiled for GPUs

WHOLE_VECTOR = r"(?:v4\.[bufs]32|v2\.[bufs]64)\b"


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", [70, 75, 80, 90, 100])
def test_four_blocks_of_every_feedback_kernel_fit_and_spill_nothing(architecture: int) -> None:
    if 12 not in compilers():
        pytest.skip("no NVRTC of CUDA 12: pip install nvidia-cuda-nvrtc-cu12")
    names = [name for name in FEEDBACK_LINES if architecture == 90 or name.endswith("float32_float32")]
    made = built(compilers()[12], selection_source(names), architecture)
    assert sorted(made.registers) == sorted(names)
    assert {name: size for name, size in made.spilled.items() if size} == {}
    assert max(made.registers.values()) * THREADS * 4 <= 65536
    kernels = re.split(r"\.entry (\w+)\(", made.ptx)[1:]
    bodies = dict(zip(kernels[::2], kernels[1::2], strict=True))
    for name, body in bodies.items():
        if re.fullmatch(r"\w+_(gather|histogram)_(\w+)_\2", name):
            momentum = name.startswith("momentum")
            assert len(re.findall(rf"ld\.global\.{WHOLE_VECTOR}", body)) == (12 if momentum else 8), name
            assert len(re.findall(rf"st\.global\.{WHOLE_VECTOR}", body)) == (8 if momentum else 4), name
        assert not re.search(r"\b(ld|st)\.local", body), name


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [70, 75, 80, 100])
def test_every_feedback_kernel_compiles_for_the_other_architectures(architecture: int) -> None:
    if 12 not in compilers():
        pytest.skip("no NVRTC of CUDA 12: pip install nvidia-cuda-nvrtc-cu12")
    made = built(compilers()[12], selection_source(FEEDBACK_LINES), architecture)
    assert sorted(made.registers) == sorted(FEEDBACK_LINES)
    assert not any(made.spilled.values())


# ---- run on this processor

Fake = tuple[Any, Launches]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return install_selection(monkeypatch, Machine())


def turn(launches: Launches, step: int) -> None:
    """Other blocks go first in every other step."""
    launches.backwards = step % 2 == 1


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_steps_in_two_reads_give_and_keep_the_processors_bits(
    fake: Fake, case: tuple[str, str, float]
) -> None:
    cupy, launches = fake
    compare_steps(cupy, case, 5001, (50, 0, 1700, 5001, 50), lambda step: turn(launches, step))
    kind = "momentum" if case[2] else "feedback"
    added = [name for name in launches.names if re.match("feedback|momentum", name)]
    assert added == [f"{kind}_histogram_{case[1]}_{case[0]}"] * 5


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_steps_with_a_sampled_bound_give_and_keep_the_processors_bits(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, case: tuple[str, str, float]
) -> None:
    cupy, launches = fake
    monkeypatch.setattr(gpu_topk, "SAMPLE", 256)
    compare_steps(cupy, case, 16501, (165, 16, 165, 165), lambda step: turn(launches, step))
    kind = "momentum" if case[2] else "feedback"
    added = [name for name in launches.names if re.match("feedback|momentum", name)]
    assert added == [f"{kind}_{form}_{case[1]}_{case[0]}" for form in ("histogram", "gather")] * 4


@pytest.mark.thorough
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("samples", [False, True])
def test_a_nan_in_a_gradient_is_refused_and_all_is_as_before(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, samples: bool, momentum: float
) -> None:
    cupy, _ = fake
    if samples:
        monkeypatch.setattr(gpu_topk, "SAMPLE", 128)
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
    assert same(*(found(feedback, cupy.asarray(whole[1])), expected(before, whole[1])))


def found(feedback: GpuErrorFeedback, gradient: Any) -> tuple[Any, Any]:
    indices, values = feedback.feed(gradient, 50)
    return indices.get(), values.get()


def expected(state: dict[str, Any], gradient: Any) -> tuple[Any, Any]:
    """What the processor gives from there."""
    feedback = ErrorFeedback(gradient.size, momentum=state["momentum"])
    feedback.restore(state)
    return feedback.feed(gradient, 50)


@pytest.mark.sampled
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_infinities_of_both_signs_are_refused_and_the_kept_one_stays(fake: Fake, momentum: float) -> None:
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


def test_what_is_given_back_is_kept(fake: Fake) -> None:
    cupy, _ = fake
    host, device = ErrorFeedback(5000), GpuErrorFeedback(5000)
    gradient = drawn("normal", "float32", 5000, np.random.default_rng(3))
    indices, values = host.feed(gradient, 300)
    sent = device.feed(cupy.asarray(gradient), 300)
    device.give_back(sent[0][::3], sent[1][::3])
    host.residual[indices[::3]] += values[::3]
    equal_states(host, device)


def test_what_does_not_fit_is_refused_and_changes_nothing(fake: Fake) -> None:
    cupy, _ = fake
    feedback = GpuErrorFeedback(3)
    for gradient, k, told in (
        (np.zeros(4, np.float32), 1, "4 elements, and the residual has 3"),
        (np.zeros(3), 1, "float64 cannot be added to float32"),
        (np.zeros(3, np.int32), 1, "int32 cannot be added to float32"),
        (np.ones(3, np.float32), 4, "k must be a whole number from 0 to 3, .* got 4"),
    ):
        with pytest.raises(UsageError, match=told):
            feedback.feed(cupy.asarray(gradient), k)
    with pytest.raises(UsageError, match="must be a CuPy array, got ndarray"):
        feedback.feed(np.ones(3, np.float32), 1)
    with pytest.raises(UsageError, match="does not fit"):
        feedback.restore(ErrorFeedback(4).state())
    with pytest.raises(UsageError, match="momentum"):
        feedback.restore(ErrorFeedback(3, momentum=0.5).state())
    assert not feedback.residual.get().any()
    for options in ({"size": -1}, {"size": 3, "dtype": "float16"}, {"size": 3, "momentum": 1.0}):
        with pytest.raises(UsageError):
            GpuErrorFeedback(**options)  # type: ignore[arg-type]


def test_a_gradient_without_elements_is_fed(fake: Fake) -> None:
    cupy, _ = fake
    feedback = GpuErrorFeedback(0, momentum=0.5)
    assert [part.size for part in feedback.feed(cupy.zeros(0, dtype=np.float32), 0)] == [0, 0]
    assert feedback.step == 1


def test_a_residual_lies_on_the_gpu_of_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy, _ = install_selection(monkeypatch, Machine(gpus=2))
    here = cupy.asarray(np.arange(9, dtype=np.float32))
    feedback = GpuErrorFeedback(9, device=1, momentum=0.5)
    with cupy.cuda.Device(1):
        there = cupy.asarray(np.arange(9, dtype=np.float32))
    indices, values = feedback.feed(there, 2)
    assert (indices.device.id, values.device.id, indices.get().tolist()) == (1, 1, [7, 8])
    with pytest.raises(UsageError, match="on GPU 0 and the residual on GPU 1"):
        feedback.feed(here, 2)


# ---- entries


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_entries_are_added_one_message_after_another_as_numpy_adds_them(
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


def test_an_index_outside_is_refused_and_no_other_memory_touched(fake: Fake) -> None:
    cupy, _ = fake
    room = cupy.zeros(30, dtype=np.float32)
    with pytest.raises(UsageError, match=r"3 of 5 indices are not in 0 to 9"):
        add_entries_gpu(
            room[10:20], cupy.asarray(np.int32([-1, 0, 9, 10, 15])), cupy.asarray(np.ones(5, np.float32))
        )
    assert np.flatnonzero(room.get()).tolist() == [10, 19]


@pytest.mark.parametrize(
    ("indices", "values", "told"),
    [
        (np.zeros(2, np.int16), np.zeros(2, np.float32), "indices of int16"),
        (np.zeros(2, np.int32), np.zeros(2), "values of float64"),
        (np.zeros(2, np.int32), np.zeros(3, np.float32), r"values of shape \(3,\)"),
    ],
)
def test_entries_that_do_not_fit_are_refused(fake: Fake, indices: Any, values: Any, told: str) -> None:
    cupy, _ = fake
    with pytest.raises(UsageError, match=told):
        add_entries_gpu(cupy.zeros(9, dtype=np.float32), cupy.asarray(indices), cupy.asarray(values))
    with pytest.raises(UsageError, match="must be a CuPy array, got ndarray"):
        add_entries_gpu(cupy.zeros(9, dtype=np.float32), indices, cupy.asarray(values))
    entry = cupy.asarray(np.zeros(1, np.int32)), cupy.asarray(np.zeros(1, np.float32))
    with pytest.raises(UsageError, match="strides"):
        add_entries_gpu(cupy.zeros(9, dtype=np.float32)[::2], *entry)


# ---- messages


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("size", [9, 2**31])
def test_messages_are_byte_for_byte_those_of_the_processor(fake: Fake, dtype: str, size: int) -> None:
    cupy, _ = fake
    index = "int32" if size < 2**31 else "int64"
    for count in (0, 1, 2, 7):
        indices, values = np.arange(count).astype(index), -np.arange(count).astype(dtype)
        message = encode_entries(indices, values, size=size, wire=None, rank=0, step=0)
        packed = encode_entries_gpu(cupy.asarray(indices), cupy.asarray(values))
        assert packed.get().tobytes() == message.tobytes()
        back = decode_entries_gpu(packed, size=size, dtype=dtype)
        assert same(
            (back[0].get(), back[1].get()), decode_entries(message, size=size, dtype=dtype, wire=None)
        )


def test_messages_that_lie_anywhere_are_read_at_aligned_addresses(fake: Fake) -> None:
    cupy, _ = fake
    indices, values = np.arange(3, dtype=np.int32), np.array([0.5, -1.0, 2.0])
    message = encode_entries(indices, values, size=9, wire=None, rank=0, step=0)
    gathered = cupy.asarray(np.concatenate([np.zeros(3, np.uint8), message, message]))
    ends = (3, 3 + len(message), 3 + 2 * len(message))
    for first, end in pairwise(ends):
        back = decode_entries_gpu(gathered[first:end], size=9, dtype="float64")
        assert [part.data.ptr % part.dtype.itemsize for part in back] == [0, 0]
        assert same((back[0].get(), back[1].get()), (indices, values))


def test_bfloat16_travels_as_its_bits_and_a_cut_message_is_refused(fake: Fake) -> None:
    cupy, _ = fake
    bits = drawn("normal", "bfloat16", 5, np.random.default_rng(0))
    packed = encode_entries_gpu(cupy.asarray(np.arange(5, dtype=np.int32)), cupy.asarray(bits))
    back = decode_entries_gpu(packed, size=9, dtype="bfloat16")[1].get()
    assert np.array_equal(widened(back, "bfloat16", "float32"), widened(bits, "bfloat16", "float32"))
    with pytest.raises(UsageError, match="29 bytes does not hold entries of 6 bytes"):
        decode_entries_gpu(packed[:29], size=9, dtype="bfloat16")
