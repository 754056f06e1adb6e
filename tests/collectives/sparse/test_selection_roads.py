"""How often a selection on a GPU reads its data, error feedback, and bad input; the kernels run on this processor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import collectives
from collectives.sparse.gpu_entry_arrays import GpuErrorFeedback
from collectives.sparse.selection import gpu_topk
from collectives.sparse.selection.gpu_topk import feed_gpu, topk_gpu
from collectives.tables.kernels.kernel_launch import digits
from tests.support.fake_streams import Machine
from tests.support.selection_data import DTYPES, drawn, key_of, reference, same
from tests.support.selection_on_cpu import Launches, install_selection
from topoplan.errors import UsageError

Fake = tuple[Any, Launches]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return install_selection(monkeypatch, Machine())


def test_two_reads_of_the_data_are_enough_where_values_differ(fake: Fake) -> None:
    cupy, launches = fake
    x = cupy.asarray(drawn("normal", "float32", 30000, np.random.default_rng(1)))
    topk_gpu(x, 300)
    few = ["histogram", "histogram", "measure_list", "emit_list_int32"]
    assert launches.forms() == ["histogram", "gather", *few]
    topk_gpu(cupy.asarray(np.ones(30000, dtype=np.float32)), 300)
    assert launches.forms()[6:] == ["histogram"] * 3 + ["measure_all", "emit_all_int32"]


def test_a_float64_of_two_reads_has_its_mantissas_top_bits_looked_at_first(fake: Fake) -> None:
    """Half of normal values share the border's exponent, which a list has no room for."""
    cupy, launches = fake
    x = drawn("normal", "float64", 9001, np.random.default_rng(1))
    found = topk_gpu(cupy.asarray(x), 700)
    assert same((found[0].get(), found[1].get()), reference(x, 700))
    assert launches.forms() == [
        *["histogram"] * 2,
        "gather",
        *["histogram"] * (len(digits("float64")) - 2),
        "measure_list",
        "emit_list_int32",
    ]


@pytest.mark.parametrize("values", ["normal", "equal"])
def test_what_is_returned_is_there_whichever_stream_reads_it(fake: Fake, values: str) -> None:
    """Streams of the fake run late: what nobody has waited for is not there."""
    cupy, _ = fake
    x = (
        drawn("normal", "float32", 30000, np.random.default_rng(1))
        if values == "normal"
        else np.ones(30000, "f4")
    )
    indices, chosen = topk_gpu(cupy.asarray(x), 300)
    assert same((indices.host, chosen.host), reference(x, 300))
    feedback = GpuErrorFeedback(30000, momentum=0.5)
    indices, chosen = feedback.feed(cupy.asarray(x), 300)
    assert same((indices.host, chosen.host), reference(x, 300))
    assert not feedback.velocity.host[indices.host].any()


# ---- error feedback


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_of_error_feedback_are_those_of_numpy_and_conserve(fake: Fake, dtype: str) -> None:
    """Integers as floats: every sum is exact, so nothing may be lost at all."""
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


def stored(values: Any, dtype: str) -> Any:
    """Small whole numbers in a dtype; bfloat16 as its bits."""
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)


def wide(values: Any, dtype: str) -> Any:
    """As float64."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return values.astype(np.float64)


def test_a_threshold_that_holds_saves_a_read_and_one_that_does_not_changes_nothing(fake: Fake) -> None:
    cupy, launches = fake
    generator = np.random.default_rng(6)
    kept, gradient = (drawn("normal", "float32", 30000, generator) for _ in range(2))
    expected = reference(kept + gradient, 300)
    key = int(key_of(expected[1]).min())
    roads = []
    for guess in (None, key, key + (1 << 22), 0, 2**64 - 1):
        residual = cupy.asarray(kept)
        threshold = None if guess is None else cupy.asarray(np.array([guess], dtype=np.uint64))
        indices, values, found = feed_gpu(residual, cupy.asarray(gradient), 300, threshold=threshold)
        assert same((indices.get(), values.get()), expected)
        assert found.get().tolist() == [key]
        assert np.flatnonzero(residual.get() != kept + gradient).tolist() == expected[0].tolist()
        roads.append([form for form in launches.forms() if "gather" in form or "feed" in form])
    assert roads == [["feed_histogram", "gather"], ["feed_gather"], *[["feed_gather", "gather"]] * 3]


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_saves_a_read_of_many_elements(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    cupy, launches = fake
    monkeypatch.setattr(gpu_topk, "SAMPLE", 1000)
    x = drawn("normal", dtype, 70001, np.random.default_rng(8))
    rest = ["histogram"] * len(digits(dtype))
    for k in (1, 700, 17500):
        found = topk_gpu(cupy.asarray(x), k)
        assert same((found[0].get(), found[1].get()), reference(x, k))
        assert launches.forms() == [*["histogram"] * 2, "gather", *rest, "measure_list", "emit_list_int32"]
    residual = cupy.zeros(70001, dtype=x.dtype)
    found = feed_gpu(residual, cupy.asarray(x), 700)
    assert same((found[0].get(), found[1].get()), reference(x, 700))
    assert [form for form in launches.forms() if "feed" in form] == ["feed_histogram", "feed_gather"]
    assert np.flatnonzero(residual.get() != x).tolist() == found[0].get().tolist()


def test_a_sample_that_misses_what_is_large_changes_nothing(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy, launches = fake
    monkeypatch.setattr(gpu_topk, "SAMPLE", 1000)
    x = drawn("normal", "float32", 64000, np.random.default_rng(8))
    x[::64] = 1e6 * x[::64]
    residual = cupy.zeros(64000, dtype=np.float32)
    found = feed_gpu(residual, cupy.asarray(x), 2000)
    assert same((found[0].get(), found[1].get()), reference(x, 2000))
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
    kept, gradient = (drawn("normal", "float16", 3000, np.random.default_rng(i)) for i in range(2))
    residual = cupy.asarray(kept)
    indices, values, threshold = feed_gpu(residual, cupy.asarray(gradient), 0)
    assert (indices.size, values.size, threshold) == (0, 0, None)
    assert residual.get().tobytes() == (kept + gradient).tobytes()
    nothing = cupy.zeros(0, dtype=np.float32)
    assert feed_gpu(nothing, nothing, 0)[0].size == topk_gpu(nothing, 0)[0].size == 0


# ---- bad input


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_is_refused_and_nothing_is_taken(fake: Fake, dtype: str) -> None:
    cupy, _ = fake
    x = drawn("normal", dtype, 5000, np.random.default_rng(2))
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


def test_topk_takes_arrays_on_a_gpu_too(fake: Fake) -> None:
    cupy, _ = fake
    x = np.random.default_rng(4).standard_normal(30000)
    indices, values = collectives.topk(cupy.asarray(x), 200)
    wanted = collectives.topk(x, 200)
    assert np.array_equal(indices.get(), wanted[0])
    assert np.array_equal(values.get(), wanted[1])


def test_infinity_is_no_nan(fake: Fake) -> None:
    cupy, _ = fake
    x = np.array([1, -np.inf, 2, np.inf], dtype=np.float32)
    assert topk_gpu(cupy.asarray(x), 3)[1].get().tolist() == [-np.inf, 2, np.inf]


def test_what_does_not_fit_is_told(fake: Fake) -> None:
    cupy, _ = fake
    x = cupy.zeros(10, dtype=np.float32)
    for arguments, reason in (
        ((np.zeros(10), 1), "x must be a CuPy array, got ndarray"),
        ((cupy.zeros(10, dtype=np.int32), 1), "dtype of x must be .*, got int32"),
        ((x, 11), "k must be a whole number from 0 to 10, .*, got 11"),
        ((x, -1), "k must be .*, got -1"),
        ((x, 0.5), "k must be a whole number from 0 to 10, .*, got 0.5"),
    ):
        with pytest.raises(UsageError, match=reason):
            topk_gpu(*arguments)
    with pytest.raises(UsageError, match="nan='ignore' is unknown; use 'refuse' or 'largest'"):
        topk_gpu(x, 1, nan="ignore")
    wide_ones = cupy.zeros(20, dtype=np.float32)
    for residual, gradient, reason in (
        (x, wide_ones, r"gradient is float32 of shape \(20,\)"),
        (x, cupy.zeros(10, dtype=np.float64), "gradient is float64"),
        (wide_ones[::2], x, "cannot be changed in place"),
    ):
        with pytest.raises(UsageError, match=reason):
            feed_gpu(residual, gradient, 1)
    with pytest.raises(UsageError, match="threshold must be that of an earlier step on GPU 0, got float"):
        feed_gpu(x, x, 1, threshold=0.5)
