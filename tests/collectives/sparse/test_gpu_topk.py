"""Selection on a GPU, with kernels that run on this processor: numpy's bits, and few reads of the data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import collectives
from collectives.sparse.gpu_entry_arrays import GpuErrorFeedback
from collectives.sparse.selection import gpu_topk
from collectives.sparse.selection.gpu_topk import topk_gpu
from collectives.tables.kernels.kernel_launch import (
    BINS,
    SELECTION_STATE,
    THREADS,
    TILE_BYTES,
    digits,
    selection_kernels,
)
from tests.support.compiled_kernels import launch
from tests.support.fake_streams import Machine
from tests.support.selection_data import DATA, DTYPES, drawn, reference, same
from tests.support.selection_on_cpu import Launches, install_selection
from topoplan.errors import UsageError

Fake = tuple[Any, Launches]

EACH_DTYPE = [
    pytest.param(dtype, marks=[] if dtype == "float32" else pytest.mark.thorough) for dtype in DTYPES
]


def normal(dtype: str, count: int, seed: int = 1) -> Any:
    return drawn("normal", dtype, count, np.random.default_rng(seed))


def check(found: tuple[Any, ...], x: Any, k: int) -> None:
    assert same((found[0].get(), found[1].get()), reference(x, k)), (x.size, k)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", EACH_DTYPE)
@pytest.mark.parametrize("kind", sorted(DATA))
def test_topk_is_exact_and_takes_the_first_of_equals(fake: Fake, kind: str, dtype: str) -> None:
    cupy, launches = fake
    for count in (1, 9001):
        x = drawn(kind, dtype, count, np.random.default_rng(count))
        for k in sorted({1, -(-count // 100), -(-count // 3), count}):
            launches.backwards = not launches.backwards
            check(topk_gpu(cupy.asarray(x), k, nan="largest"), x, k)


def topk_of_a_gpu_with(processors: int, cupy: Any, x: Any, k: int) -> None:
    class Device(cupy.cuda.Device):
        def __init__(self, ordinal: int | None = None) -> None:
            super().__init__(ordinal)
            self.attributes = {"MultiProcessorCount": processors}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cupy.cuda, "Device", Device)
        selection_kernels.cache_clear()
        check(topk_gpu(cupy.asarray(x), k, nan="largest"), x, k)


@pytest.mark.thorough
@given(
    st.sampled_from(DTYPES),
    st.sampled_from(sorted(DATA)),
    st.integers(1, 9000),
    st.floats(0, 1),
    st.integers(0),
)
@settings(max_examples=20)
def test_the_order_and_number_of_blocks_change_nothing(
    dtype: str, kind: str, count: int, density: float, seed: int
) -> None:
    x = drawn(kind, dtype, count, np.random.default_rng(seed))
    with pytest.MonkeyPatch.context() as patch:
        cupy, launches = install_selection(patch, Machine())
        for launches.backwards in (False, True):
            for processors in (1, 5):
                topk_of_a_gpu_with(processors, cupy, x, round(count * density))


@pytest.mark.thorough
def test_empty_blocks_and_more_blocks_than_threads_of_a_warp_change_nothing(fake: Fake) -> None:
    cupy, launches = fake
    x = normal("float64", 150001, 4)
    x[: 150000 - 150000 % 4096].reshape(-1, 4096)[1::3] = 0
    for processors, launches.backwards in ((2, False), (20, True)):
        topk_of_a_gpu_with(processors, cupy, x, 1500)
    topk_of_a_gpu_with(20, cupy, np.full(150001, 2.0), 70000)


def test_arrays_at_any_address_and_of_any_strides_are_selected_from(fake: Fake) -> None:
    cupy, _ = fake
    base = normal("float32", 30000)
    for part in (slice(1, None), slice(3, 20000), slice(None, None, 3)):
        check(topk_gpu(cupy.asarray(base)[part], 77), base[part], 77)
    for one, other in zip(
        collectives.topk(cupy.asarray(base), 200), collectives.topk(base, 200), strict=True
    ):
        assert np.array_equal(one.get(), other)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.thorough)])
def test_wide_indices_equal_narrow_ones(dtype: str) -> None:
    x = normal(dtype, 9000, 3)
    k, blocks = 90, 2
    tiles = -(-x.nbytes // TILE_BYTES)
    state, counts = np.zeros(1, dtype=SELECTION_STATE), np.zeros(BINS, dtype=np.uint64)
    for number, digit in enumerate(digits(dtype)):
        first = 0 if number else k
        words = [x.ctypes.data, len(x), 0, *digit, first, counts.ctypes.data, state.ctypes.data]
        launch(f"histogram_{dtype}", blocks, THREADS, words, backwards=False)
    above, equal = (np.empty(tiles, dtype=np.uint32) for _ in range(2))
    groups = np.empty(2 * blocks, dtype=np.uint64)
    indices, values = np.empty(k, dtype=np.int64), np.empty(k, dtype=dtype)
    run = [x.ctypes.data, 0, len(x), 0, 0, k, 0]
    tables = [array.ctypes.data for array in (above, equal, groups, state)]
    launch(f"measure_all_{dtype}", blocks, THREADS, [*run, *tables], backwards=True)
    result = [indices.ctypes.data, values.ctypes.data, 0]
    launch(f"emit_all_int64_{dtype}", blocks, THREADS, [*run, 1, *tables, *result], backwards=True)
    assert same((indices.astype(np.int32), values), reference(x, k))


# ---- reads of the data


def test_two_reads_are_enough_for_values_that_differ(fake: Fake) -> None:
    cupy, launches = fake
    topk_gpu(cupy.asarray(normal("float32", 30000)), 300)
    few = ["histogram", "histogram", "measure_list", "emit_list_int32"]
    assert launches.forms() == ["histogram", "gather", *few]
    topk_gpu(cupy.asarray(np.ones(30000, dtype=np.float32)), 300)
    assert launches.forms()[6:] == ["histogram"] * 3 + ["measure_all", "emit_all_int32"]


@pytest.mark.thorough
def test_two_reads_of_float64_look_at_the_mantissas_top_bits_first(fake: Fake) -> None:
    """Half of normal values share the border's exponent, for which the list has too few places."""
    cupy, launches = fake
    x = normal("float64", 9001)
    check(topk_gpu(cupy.asarray(x), 700), x, 700)
    rest = ["histogram"] * (len(digits("float64")) - 2)
    assert launches.forms() == [*["histogram"] * 2, "gather", *rest, "measure_list", "emit_list_int32"]


@pytest.mark.parametrize("values", ["normal", "equal"])
def test_results_wait_for_their_stream(fake: Fake, values: str) -> None:
    """Streams of the fake run late: without a wait the results are not there."""
    cupy, _ = fake
    x = drawn(values, "float32", 30000, np.random.default_rng(1))
    indices, chosen = topk_gpu(cupy.asarray(x), 300)
    assert same((indices.host, chosen.host), reference(x, 300))
    feedback = GpuErrorFeedback(30000, momentum=0.5)
    indices, chosen = feedback.feed(cupy.asarray(x), 300)
    assert same((indices.host, chosen.host), reference(x, 300))
    assert not feedback.velocity.host[indices.host].any()


def stored(values: Any, dtype: str) -> Any:
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def wide(values: Any, dtype: str) -> Any:
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return values.astype(np.float64)


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_a_sample_saves_a_read_of_many_elements(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    cupy, launches = fake
    monkeypatch.setattr(gpu_topk, "SAMPLE", 1000)
    x = normal(dtype, 70001, 8)
    rest = ["histogram"] * len(digits(dtype))
    for k in (1, 700, 17500):
        check(topk_gpu(cupy.asarray(x), k), x, k)
        assert launches.forms() == [*["histogram"] * 2, "gather", *rest, "measure_list", "emit_list_int32"]
    feedback = GpuErrorFeedback(70001, "float64" if dtype == "float64" else "float32")
    found = feedback.feed(cupy.asarray(x), 700)
    kept = wide(x, dtype).astype(feedback.residual.dtype)
    check(found, kept, 700)
    reads = [form for form in launches.forms() if "feed" in form]
    assert reads == [f"feedback_histogram_{dtype}", f"feedback_gather_{dtype}"]
    assert np.flatnonzero(feedback.residual.get() != kept).tolist() == found[0].get().tolist()


def test_a_sample_that_misses_the_largest_changes_nothing(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy, launches = fake
    monkeypatch.setattr(gpu_topk, "SAMPLE", 1000)
    x = normal("float32", 64000, 8)
    x[::64] = 1e6 * x[::64]
    feedback = GpuErrorFeedback(64000)
    found = feedback.feed(cupy.asarray(x), 2000)
    check(found, x, 2000)
    assert [form for form in launches.forms() if "gather" in form] == ["feedback_gather_float32", "gather"]
    x[found[0].get()] = 0
    assert feedback.residual.get().tobytes() == x.tobytes()


def test_a_residual_of_equal_magnitudes_gives_its_first_entries(fake: Fake) -> None:
    cupy, launches = fake
    feedback = GpuErrorFeedback(20000)
    gradient = np.where(np.arange(20000) % 2, -1, 1).astype(np.float32)
    indices, values = feedback.feed(cupy.asarray(gradient), 5)
    assert indices.get().tolist() == [0, 1, 2, 3, 4]
    assert values.get().tolist() == [1, -1, 1, -1, 1]
    assert "emit_all_int32" in launches.forms()
    feedback.feed(cupy.zeros(20000, dtype=np.float32), 5)
    assert np.flatnonzero(feedback.residual.get()[:20] == 0).tolist() == list(range(10))
    assert np.abs(feedback.residual.get()).sum() == 19990


def test_a_step_without_entries_only_adds(fake: Fake) -> None:
    cupy, _ = fake
    given, feedback = [normal("float32", 3000, seed) for seed in range(2)], GpuErrorFeedback(3000)
    for gradient in given:
        indices, values = feedback.feed(cupy.asarray(gradient), 0)
        assert (indices.size, values.size) == (0, 0)
    assert feedback.residual.get().tobytes() == (given[0] + given[1]).tobytes()
    nothing = cupy.zeros(0, dtype=np.float32)
    assert GpuErrorFeedback(0).feed(nothing, 0)[0].size == topk_gpu(nothing, 0)[0].size == 0


# ---- refusals


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_a_nan_is_refused_or_counts_as_the_largest(fake: Fake, dtype: str) -> None:
    cupy, _ = fake
    x = normal(dtype, 5000, 2)
    x[4321] = stored(np.array([np.nan]), dtype)[0]
    with pytest.raises(UsageError, match="NaN among the 5000 elements"):
        topk_gpu(cupy.asarray(x), 9)
    assert 4321 in topk_gpu(cupy.asarray(x), 1, nan="largest")[0].get()


def test_refuses_bad_arguments(fake: Fake) -> None:
    cupy, _ = fake
    x = cupy.zeros(10, dtype=np.float32)
    calls: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((np.zeros(10), 1), {}, "x must be a CuPy array, got ndarray"),
        ((cupy.zeros(10, dtype=np.int32), 1), {}, "dtype of x must be .*, got int32"),
        ((x, 11), {}, "k must be a whole number from 0 to 10, .*, got 11"),
        ((x, -1), {}, "k must be .*, got -1"),
        ((x, 0.5), {}, "k must be a whole number from 0 to 10, .*, got 0.5"),
        ((x, 1), {"nan": "ignore"}, "nan='ignore' is unknown; use 'refuse' or 'largest'"),
    ]
    for arguments, options, message in calls:
        with pytest.raises(UsageError, match=message):
            topk_gpu(*arguments, **options)
