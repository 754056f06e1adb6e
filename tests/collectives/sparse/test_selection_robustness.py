"""The recall of the table that ``python -m tests.bench robustness`` prints, on less data."""

from __future__ import annotations

from functools import cache

import pytest

from tests.bench.robustness import SAMPLES, made, recalls

SIZE = 100_000

DATA = made(SIZE)

OUTLIERS = ("one outlier, 1e6 x", "one outlier, 1e12 x", "one infinity")
"""Each lifts the mean of so few entries above all others; the last two are 2**30 times larger than those as well."""


@cache
def row(name: str) -> list[float]:
    """Of the table."""
    return recalls(DATA[name])


@pytest.mark.parametrize("name", DATA)
def test_topk_finds_all_of_the_largest_of_every_kind(name: str) -> None:
    assert row(name)[-1] == 1.0


@pytest.mark.parametrize("name", OUTLIERS)
def test_an_outlier_leaves_mstopk_hardly_any_of_the_others(name: str) -> None:
    assert row(name)[SAMPLES.index(30)] < 0.1


@pytest.mark.parametrize("name", ["normal", "Laplace"])
def test_more_samples_find_more_where_there_is_no_outlier(name: str) -> None:
    found = row(name)[: len(SAMPLES)]
    assert found == sorted(found)
    assert found[-1] == 1.0
