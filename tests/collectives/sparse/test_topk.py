"""Selection by magnitude: `topk` is exact on any data, `mstopk` as published."""

from __future__ import annotations

import math
import os
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from collectives import ErrorFeedback, mstopk, topk
from collectives.sparse.selection.topk import magnitudes, select_in_two_reads
from tests.bench import robustness
from topoplan.errors import UsageError

Array = NDArray[Any]

SIZE = 100_003


def largest(x: Array, k: int) -> Array:
    """Return the indices of the k largest by a full sort: magnitude first, then index."""
    order = np.lexsort((np.arange(x.size), -np.abs(x.astype(np.float64))))
    return np.sort(order[:k])


NORMAL = np.random.default_rng(7).standard_normal(SIZE).astype(np.float32)


def with_one(value: float) -> Array:
    return np.where(np.arange(SIZE) == SIZE // 3, np.float32(value), NORMAL)


ENTRIES: dict[str, Array] = {
    "normal": NORMAL,
    "Laplace": np.random.default_rng(8).laplace(size=SIZE).astype(np.float32),
    "lognormal, sigma 3": np.exp(3 * NORMAL),
    "lognormal, sigma 5": np.exp(5 * NORMAL),
    "layered scales": NORMAL * np.float32(10.0) ** (np.arange(SIZE) * 8 // SIZE - 4),
    "one outlier, 1e6": with_one(1e6),
    "one outlier, 1e12": with_one(1e12),
    "one infinity": with_one(np.inf),
    "mostly zeros": np.where(np.arange(SIZE) % 300 > 0, np.float32(0), NORMAL),
    "all zero": np.zeros(SIZE, np.float32),
    "all equal": np.full(SIZE, -2.5, np.float32),
    "denormals": NORMAL * np.float32(1e-40),
    "ascending": np.arange(SIZE, dtype=np.float32),
}


@pytest.mark.sampled
@pytest.mark.parametrize("k", [0, 1, SIZE // 1000, SIZE // 100, SIZE // 3, SIZE - 1, SIZE])
@pytest.mark.parametrize("name", ENTRIES)
def test_topk_is_exact_and_takes_the_first_of_equals(name: str, k: int) -> None:
    x = ENTRIES[name]
    indices, values = topk(x, k)
    assert np.array_equal(indices, largest(x, k))
    assert np.array_equal(values, x[indices])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@settings(max_examples=60)
@given(data=st.data())
def test_topk_of_small_arrays_with_ties_is_exact(dtype: str, data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, 6e-8, math.inf]), max_size=40))
    x = np.array(numbers, dtype)
    k = data.draw(st.integers(0, len(numbers)))
    assert np.array_equal(topk(x, k)[0], largest(x, k))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", ["normal", "mostly zeros", "all equal", "layered scales"])
def test_one_read_and_two_reads_select_the_same(name: str, dtype: str) -> None:
    with np.errstate(over="ignore"):
        x = ENTRIES[name].astype(dtype)
    for k in (1, 17, SIZE // 50):
        assert np.array_equal(select_in_two_reads(magnitudes(x), k).indices, topk(x, k)[0])


def test_bfloat16_is_ordered_by_its_bits() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="numpy has no bfloat16 of its own")
    x = NORMAL.astype(ml_dtypes.bfloat16)
    assert np.array_equal(topk(x, 500)[0], largest(x.astype(np.float32), 500))


def test_an_array_of_several_axes_is_read_flat_and_may_be_read_only() -> None:
    x = np.arange(12.0).reshape(3, 4)
    x.flags.writeable = False
    assert topk(x, 2)[0].tolist() == [10, 11]


def test_nan_is_refused_or_counts_as_the_largest() -> None:
    x = with_one(math.nan)
    with pytest.raises(UsageError, match=f"element {SIZE // 3} is NaN"):
        topk(x, 10)
    indices, values = topk(x, 1, nan="largest")
    assert indices.tolist() == [SIZE // 3]
    assert math.isnan(values[0])
    assert topk(x, 0)[0].size == 0


@pytest.mark.parametrize(
    ("x", "k", "message"),
    [
        (np.zeros(3), 4, "k must be a whole number from 0 to 3, .* got 4"),
        (np.zeros(3), -1, "k must be a whole number from 0 to 3, .* got -1"),
        (np.zeros(3), 2.0, "k must be a whole number from 0 to 3, .* got 2.0"),
        (np.zeros(3, np.int32), 1, "selected from floats, got int32"),
        (np.zeros(6)[::2], 1, "not contiguous"),
        ([1.0, 2.0], 1, "selected from floats, got list"),
        (np.zeros(3, ">f4"), 1, "selected from floats, got"),
    ],
)
def test_topk_refuses(x: Any, k: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        topk(x, k)


# ---- MSTopK


@pytest.mark.sampled
@pytest.mark.parametrize("k", [100, 0, SIZE // 2, SIZE])
@pytest.mark.parametrize("name", ENTRIES)
def test_mstopk_selects_k_different_entries(name: str, k: int) -> None:
    x = ENTRIES[name]
    indices, values = mstopk(x, k)
    assert len(np.unique(indices)) == k
    assert np.array_equal(values, x[indices])


@pytest.mark.parametrize("name", ["normal", "Laplace"])
def test_mstopk_with_thirty_samples_finds_the_largest_without_outliers(name: str) -> None:
    x = ENTRIES[name]
    assert np.array_equal(np.sort(mstopk(x, 1000)[0]), largest(x, 1000))


def test_an_outlier_costs_mstopk_its_resolution_as_published() -> None:
    """All entries but the outlier lie in one band, from which a run of neighbours is taken."""
    indices, _ = mstopk(ENTRIES["one outlier, 1e12"], 100, seed=3)
    band = np.sort(indices[indices != SIZE // 3])
    assert SIZE // 3 in indices
    assert band[-1] - band[0] in (len(band) - 1, len(band))


def test_the_run_of_mstopk_depends_on_its_seed_only() -> None:
    x = ENTRIES["all equal"]
    first, again, other = (mstopk(x, 10, seed=seed)[0] for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("x", "k", "samples", "message"),
    [
        (np.full(5, np.nan), 2, 30, "NaN"),
        (np.zeros(5), 6, 30, "k must be a whole number from 0 to 5, .* got 6"),
        (np.zeros(5), 2, 0, "samples must be from 1 to 4096, got 0"),
        (np.zeros(5, np.float16), 2, 30, "got float16"),
    ],
)
def test_mstopk_refuses(x: Array, k: int, samples: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        mstopk(x, k, samples)


# ---- the recall that ``python -m tests.bench robustness`` prints, on less data


@cache
def recall(name: str) -> list[float]:
    return robustness.recalls(robustness.made(SIZE)[name])


@pytest.mark.parametrize("name", ["one outlier, 1e6 x", "one outlier, 1e12 x", "one infinity"])
def test_with_an_outlier_topk_recalls_all_and_mstopk_a_tenth_at_most(name: str) -> None:
    assert recall(name)[-1] == 1.0
    assert recall(name)[robustness.SAMPLES.index(30)] < 0.1


@pytest.mark.parametrize("name", ["normal", "Laplace"])
def test_without_an_outlier_more_samples_recall_more(name: str) -> None:
    found = recall(name)[: len(robustness.SAMPLES)]
    assert found == sorted(found)
    assert found[-1] == 1.0


# ---- more elements than 32 bits can number

MANY = (1 << 31) + 5
NEEDED = 16 << 30
LARGE = {7: 3.0, (1 << 31) - 1: -9.0, 1 << 31: 5.0, (1 << 31) + 1: -5.0, (1 << 31) + 4: 8.0}
"""The largest entries; the first of the two fives comes first."""


def of_many(dtype: str) -> Array:
    x = np.zeros(MANY, dtype)
    x[:: 1 << 20] = 0.5
    x[list(LARGE)] = list(LARGE.values())
    return x


def check_of_many(indices: Array, values: Array, k: int) -> None:
    wanted = sorted(sorted(LARGE, key=lambda place: (-abs(LARGE[place]), place))[:k])
    assert (indices.dtype, indices.tolist()) == (np.int64, wanted)
    assert values.tolist() == [LARGE[place] for place in wanted]


@pytest.mark.slow
def test_more_than_two_to_the_31_elements_have_wide_indices() -> None:
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if available < NEEDED:
        pytest.skip(f"{available >> 30} GiB of memory are available, and {NEEDED >> 30} are needed")
    x = of_many("float16")
    for k in (1, 3, 5):
        check_of_many(*topk(x, k), k)
    indices, values = topk(x, MANY // 8)
    assert (indices.dtype, len(indices)) == (np.int64, MANY // 8)
    assert np.array_equal(indices[-4:], [place for place in LARGE if place > 7])
    assert np.array_equal(values, x[indices])
    del indices, values
    feedback = ErrorFeedback(MANY)
    check_of_many(*feedback.feed(x, 3), 3)
    assert feedback.residual[[7, (1 << 31) + 1, (1 << 31) + 4]].tolist() == [3.0, -5.0, 0.0]
    x[:] = 0
    rest = feedback.feed(x, 2)
    assert (rest[0].dtype, rest[0].tolist(), rest[1].tolist()) == (np.int64, [7, (1 << 31) + 1], [3.0, -5.0])
    feedback.give_back(*rest)
    assert feedback.residual[rest[0]].tolist() == [3.0, -5.0]
    del x, feedback
    indices, values = mstopk(of_many("float32"), 5, 8)
    order = np.argsort(indices)
    check_of_many(indices[order], values[order], 5)
