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
from collectives.sparse.selection.gpu_topk import feed_gpu, topk_gpu
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
from tests.support.selection_data import DATA, DTYPES, drawn, key_of, reference, same
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
    """Check the result on a GPU with so many multiprocessors."""

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
    """The kernels that arrays of 2**31 elements take, on a small one."""
    x = normal(dtype, 9000, 3)
    k, blocks = 90, 2
    tiles = -(-x.nbytes // TILE_BYTES)
    state, counts = np.zeros(1, dtype=SELECTION_STATE), np.zeros(BINS, dtype=np.uint64)
    for number, digit in enumerate(digits(dtype)):
        first = 0 if number else k
        words = [x.ctypes.data, 0, len(x), 0, *digit, first, counts.ctypes.data, state.ctypes.data]
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
    """Return small whole numbers in a dtype; bfloat16 as its bits."""
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def wide(values: Any, dtype: str) -> Any:
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return values.astype(np.float64)


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_steps_are_those_of_numpy_and_conserve_whole_numbers(fake: Fake, dtype: str) -> None:
    cupy, launches = fake
    generator = np.random.default_rng(5)
    count, k = 13001, 130
    given_, sent = np.zeros(count), np.zeros(count)
    residual = cupy.asarray(drawn("zeros", dtype, count, generator))
    threshold = None
    for step in range(6):
        whole = np.rint(generator.standard_normal(count) * 3 * (1 + (step == 4) * 2))
        gradient = stored(whole, dtype)
        launches.backwards = step % 2 == 1
        total = stored(wide(residual.get(), dtype) + whole, dtype)
        indices, values, threshold = feed_gpu(residual, cupy.asarray(gradient), k, threshold=threshold)
        expected = reference(total, k)
        assert same((indices.get(), values.get()), expected)
        assert threshold.get()[0] == key_of(expected[1]).min()
        total[expected[0]] = 0
        assert residual.get().tobytes() == total.tobytes()
        given_ += whole
        sent[expected[0]] += wide(expected[1], dtype)
        assert (sent + wide(residual.get(), dtype) == given_).all()


def test_a_threshold_that_holds_saves_a_read_and_another_changes_nothing(fake: Fake) -> None:
    cupy, launches = fake
    kept, gradient = (normal("float32", 30000, seed) for seed in (6, 7))
    expected = reference(kept + gradient, 300)
    key = int(key_of(expected[1]).min())
    reads = []
    for guess in (None, key, key + (1 << 22), 0, 2**64 - 1):
        residual = cupy.asarray(kept)
        threshold = None if guess is None else cupy.asarray(np.array([guess], dtype=np.uint64))
        indices, values, found = feed_gpu(residual, cupy.asarray(gradient), 300, threshold=threshold)
        assert same((indices.get(), values.get()), expected)
        assert found.get().tolist() == [key]
        assert np.flatnonzero(residual.get() != kept + gradient).tolist() == expected[0].tolist()
        reads.append([form for form in launches.forms() if "gather" in form or "feed" in form])
    assert reads == [["feed_histogram", "gather"], ["feed_gather"], *[["feed_gather", "gather"]] * 3]


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
    residual = cupy.zeros(70001, dtype=x.dtype)
    found = feed_gpu(residual, cupy.asarray(x), 700)
    check(found, x, 700)
    assert [form for form in launches.forms() if "feed" in form] == ["feed_histogram", "feed_gather"]
    assert np.flatnonzero(residual.get() != x).tolist() == found[0].get().tolist()


def test_a_sample_that_misses_the_largest_changes_nothing(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy, launches = fake
    monkeypatch.setattr(gpu_topk, "SAMPLE", 1000)
    x = normal("float32", 64000, 8)
    x[::64] = 1e6 * x[::64]
    residual = cupy.zeros(64000, dtype=np.float32)
    found = feed_gpu(residual, cupy.asarray(x), 2000)
    check(found, x, 2000)
    assert [form for form in launches.forms() if "gather" in form] == ["feed_gather", "gather"]
    x[found[0].get()] = 0
    assert residual.get().tobytes() == x.tobytes()


def test_a_residual_of_equal_magnitudes_gives_its_first_entries(fake: Fake) -> None:
    cupy, launches = fake
    residual = cupy.zeros(20000, dtype=np.float32)
    gradient = np.where(np.arange(20000) % 2, -1, 1).astype(np.float32)
    indices, values, threshold = feed_gpu(residual, cupy.asarray(gradient), 5)
    assert indices.get().tolist() == [0, 1, 2, 3, 4]
    assert values.get().tolist() == [1, -1, 1, -1, 1]
    assert "emit_all_int32" in launches.forms()
    feed_gpu(residual, cupy.zeros(20000, dtype=np.float32), 5, threshold=threshold)
    assert np.flatnonzero(residual.get()[:20] == 0).tolist() == list(range(10))
    assert np.abs(residual.get()).sum() == 19990


def test_a_step_without_entries_only_adds(fake: Fake) -> None:
    cupy, _ = fake
    kept, gradient = (normal("float16", 3000, seed) for seed in range(2))
    residual = cupy.asarray(kept)
    indices, values, threshold = feed_gpu(residual, cupy.asarray(gradient), 0)
    assert (indices.size, values.size, threshold) == (0, 0, None)
    assert residual.get().tobytes() == (kept + gradient).tobytes()
    nothing = cupy.zeros(0, dtype=np.float32)
    assert feed_gpu(nothing, nothing, 0)[0].size == topk_gpu(nothing, 0)[0].size == 0


# ---- refusals


@pytest.mark.parametrize("dtype", EACH_DTYPE)
def test_a_nan_is_refused_and_nothing_is_taken(fake: Fake, dtype: str) -> None:
    cupy, _ = fake
    x = normal(dtype, 5000, 2)
    x[4321] = stored(np.array([np.nan]), dtype)[0]
    with pytest.raises(UsageError, match="NaN among the 5000 elements"):
        topk_gpu(cupy.asarray(x), 9)
    for threshold in (None, cupy.asarray(np.array([1 << 14], dtype=np.uint64))):
        residual = cupy.zeros(5000, dtype=x.dtype)
        with pytest.raises(UsageError, match="nan='largest'"):
            feed_gpu(residual, cupy.asarray(x), 9, threshold=threshold)
        kept = key_of(residual.get())
        assert (np.delete(kept, 4321) == np.delete(key_of(x), 4321)).all()
        # a sum on a GPU is a NaN of its own making
        assert kept[4321] > key_of(stored(np.array([np.inf]), dtype))[0]
    assert 4321 in topk_gpu(cupy.asarray(x), 1, nan="largest")[0].get()


def test_refuses_bad_arguments(fake: Fake) -> None:
    cupy, _ = fake
    x = cupy.zeros(10, dtype=np.float32)
    longer = cupy.zeros(20, dtype=np.float32)
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
        (topk_gpu, (np.zeros(10), 1), {}, "x must be a CuPy array, got ndarray"),
        (topk_gpu, (cupy.zeros(10, dtype=np.int32), 1), {}, "dtype of x must be .*, got int32"),
        (topk_gpu, (x, 11), {}, "k must be a whole number from 0 to 10, .*, got 11"),
        (topk_gpu, (x, -1), {}, "k must be .*, got -1"),
        (topk_gpu, (x, 0.5), {}, "k must be a whole number from 0 to 10, .*, got 0.5"),
        (topk_gpu, (x, 1), {"nan": "ignore"}, "nan='ignore' is unknown; use 'refuse' or 'largest'"),
        (feed_gpu, (x, longer, 1), {}, r"gradient is float32 of shape \(20,\)"),
        (feed_gpu, (x, cupy.zeros(10, dtype=np.float64), 1), {}, "gradient is float64"),
        (feed_gpu, (longer[::2], x, 1), {}, "cannot be changed in place"),
        (feed_gpu, (x, x, 1), {"threshold": 0.5}, "must be that of an earlier step on GPU 0, got float"),
    ]
    for call, arguments, options, message in calls:
        with pytest.raises(UsageError, match=message):
            call(*arguments, **options)
