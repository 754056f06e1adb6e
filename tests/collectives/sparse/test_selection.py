"""Selecting by magnitude: exactly, whatever the entries are, and as MSTopK does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import collectives
from collectives.sparse.selection.topk import magnitudes, select_in_two_reads
from topoplan.errors import UsageError

Array = NDArray[Any]

SIZE = 100_003


def largest(x: Array, k: int) -> Array:
    """The k largest by a full sort: magnitude first, then index."""
    order = np.lexsort((np.arange(x.size), -np.abs(x.astype(np.float64))))
    return np.sort(order[:k])


def normal() -> Array:
    return np.random.default_rng(7).standard_normal(SIZE).astype(np.float32)


def with_one(value: float) -> Array:
    x = normal()
    x[SIZE // 3] = value
    return x


def mostly_zero() -> Array:
    x = normal()
    x[np.arange(SIZE) % 300 > 0] = 0
    return x


ENTRIES: dict[str, Array] = {
    "normal": normal(),
    "Laplace": np.random.default_rng(8).laplace(size=SIZE).astype(np.float32),
    "lognormal, sigma 3": np.exp(3 * normal()),
    "lognormal, sigma 5": np.exp(5 * normal()),
    "layered scales": normal() * np.float32(10.0) ** (np.arange(SIZE) * 8 // SIZE - 4),
    "one outlier, 1e6": with_one(1e6),
    "one outlier, 1e12": with_one(1e12),
    "one infinity": with_one(np.inf),
    "mostly zeros": mostly_zero(),
    "all zero": np.zeros(SIZE, np.float32),
    "all equal": np.full(SIZE, -2.5, np.float32),
    "denormals": normal() * np.float32(1e-40),
    "ascending": np.arange(SIZE, dtype=np.float32),
}


@pytest.mark.sampled
@pytest.mark.parametrize("k", [0, 1, SIZE // 1000, SIZE // 100, SIZE // 3, SIZE - 1, SIZE])
@pytest.mark.parametrize("name", ENTRIES)
def test_topk_finds_exactly_the_largest_and_of_equal_ones_the_first(name: str, k: int) -> None:
    x = ENTRIES[name]
    indices, values = collectives.topk(x, k)
    assert np.array_equal(indices, largest(x, k))
    assert np.array_equal(values, x[indices])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_topk_of_small_arrays_with_many_ties_is_exact_in_every_dtype(dtype: str, data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, 6e-8, math.inf]), max_size=40))
    x = np.array(numbers, dtype)
    k = data.draw(st.integers(0, len(numbers)))
    assert np.array_equal(collectives.topk(x, k)[0], largest(x, k))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", ["normal", "mostly zeros", "all equal", "layered scales"])
def test_one_read_and_two_reads_find_the_same(name: str, dtype: str) -> None:
    with np.errstate(over="ignore"):
        x = ENTRIES[name].astype(dtype)
    for k in (1, 17, SIZE // 50):
        assert np.array_equal(select_in_two_reads(magnitudes(x), k).indices, collectives.topk(x, k)[0])


def test_bfloat16_orders_by_its_bits() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="numpy has no bfloat16 of its own")
    x = normal().astype(ml_dtypes.bfloat16)
    assert np.array_equal(collectives.topk(x, 500)[0], largest(x.astype(np.float32), 500))


def test_nan_is_refused_or_counted_largest() -> None:
    x = with_one(math.nan)
    with pytest.raises(UsageError, match=f"element {SIZE // 3} is NaN"):
        collectives.topk(x, 10)
    indices, values = collectives.topk(x, 1, nan="largest")
    assert indices.tolist() == [SIZE // 3]
    assert math.isnan(values[0])
    assert collectives.topk(x, 0)[0].size == 0


@pytest.mark.parametrize(
    ("x", "k", "told"),
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
def test_topk_refuses_what_it_cannot_select_from(x: Any, k: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        collectives.topk(x, k)


def test_an_array_of_several_axes_is_read_flat_and_may_be_read_only() -> None:
    x = np.arange(12.0).reshape(3, 4)
    x.flags.writeable = False
    assert collectives.topk(x, 2)[0].tolist() == [10, 11]


@pytest.mark.parametrize("k", [0, 1, 100, SIZE // 2, SIZE])
@pytest.mark.parametrize("name", ENTRIES)
def test_mstopk_chooses_exactly_k_different_entries(name: str, k: int) -> None:
    x = ENTRIES[name]
    indices, values = collectives.mstopk(x, k)
    assert len(np.unique(indices)) == k
    assert np.array_equal(values, x[indices])


@pytest.mark.parametrize("name", ["normal", "Laplace"])
def test_mstopk_with_thirty_samples_finds_the_largest_of_gradients_without_outliers(name: str) -> None:
    x = ENTRIES[name]
    assert np.array_equal(np.sort(collectives.mstopk(x, 1000)[0]), largest(x, 1000))


def test_an_outlier_takes_mstopk_its_resolution_as_published() -> None:
    """All but the outlier lie in one band, from which a run of neighbours is taken."""
    indices, _ = collectives.mstopk(ENTRIES["one outlier, 1e12"], 100, seed=3)
    band = np.sort(indices[indices != SIZE // 3])
    assert SIZE // 3 in indices
    assert band[-1] - band[0] in (len(band) - 1, len(band))


def test_the_run_of_mstopk_depends_on_its_seed_only() -> None:
    x = ENTRIES["all equal"]
    first, again, other = (collectives.mstopk(x, 10, seed=seed)[0] for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("x", "k", "samples", "told"),
    [
        (np.full(5, np.nan), 2, 30, "NaN"),
        (np.zeros(5), 6, 30, "k must be a whole number from 0 to 5, .* got 6"),
        (np.zeros(5), 2, 0, "samples must be at least 1, got 0"),
        (np.zeros(5, np.float16), 2, 30, "got float16"),
    ],
)
def test_mstopk_refuses_what_it_cannot_select_from(x: Array, k: int, samples: int, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        collectives.mstopk(x, k, samples)
