"""Selection from more elements than 32 bits can number; takes 16 GiB of memory and some tens of seconds."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import ErrorFeedback, mstopk, topk

Array = NDArray[Any]

SIZE = (1 << 31) + 5

NEEDED = 16 << 30

AVAILABLE = "MemAvailable:"

LARGE = {7: 3.0, (1 << 31) - 1: -9.0, 1 << 31: 5.0, (1 << 31) + 1: -5.0, (1 << 31) + 4: 8.0}
"""The interesting entries; of the two fives the first one comes first."""

pytestmark = pytest.mark.slow


def available() -> int:
    """Bytes that can be had without swapping."""
    if os.path.exists("/proc/meminfo"):
        with open("/proc/meminfo") as lines:
            found = [line.split()[1] for line in lines if line.startswith(AVAILABLE)]
        return int(found[0]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture(autouse=True)
def _enough_memory() -> None:
    if available() < NEEDED:
        pytest.skip(f"{available() >> 30} GiB of memory are available, and {NEEDED >> 30} are needed")


def made(dtype: str) -> Array:
    """Zeros but for the large entries and a few small ones."""
    x = np.zeros(SIZE, dtype)
    x[:: 1 << 20] = 0.5
    for place, value in LARGE.items():
        x[place] = value
    return x


def check(indices: Array, values: Array, k: int) -> None:
    wanted = sorted(sorted(LARGE, key=lambda place: (-abs(LARGE[place]), place))[:k])
    assert indices.dtype == np.int64
    assert indices.tolist() == wanted
    assert values.tolist() == [LARGE[place] for place in wanted]


@pytest.mark.parametrize("k", [1, 3, 5])
def test_topk_numbers_more_than_two_to_the_31_elements(k: int) -> None:
    check(*topk(made("float16"), k), k)


def test_topk_in_two_reads_does_so_too() -> None:
    x = made("float16")
    indices, values = topk(x, SIZE // 8)
    assert indices.dtype == np.int64
    assert len(indices) == SIZE // 8
    assert np.array_equal(indices[-4:], [place for place in LARGE if place > 7])
    assert np.array_equal(values, x[indices])


def test_mstopk_numbers_more_than_two_to_the_31_elements() -> None:
    indices, values = mstopk(made("float32"), 5, 8)
    order = np.argsort(indices)
    check(indices[order], values[order], 5)


def test_error_feedback_keeps_more_than_two_to_the_31_elements() -> None:
    feedback, gradient = ErrorFeedback(SIZE), made("float16")
    check(*feedback.feed(gradient, 3), 3)
    assert feedback.residual[[7, (1 << 31) + 1, (1 << 31) + 4]].tolist() == [3.0, -5.0, 0.0]
    gradient[:] = 0
    rest = feedback.feed(gradient, 2)
    assert (rest[0].dtype, rest[0].tolist(), rest[1].tolist()) == (np.int64, [7, (1 << 31) + 1], [3.0, -5.0])
    feedback.give_back(*rest)
    assert feedback.residual[rest[0]].tolist() == [3.0, -5.0]
