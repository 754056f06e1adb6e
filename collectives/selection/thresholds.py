"""The reads of MSTopK: mean and maximum, one count for each threshold, and the entries between two of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.compiled import compiled

LANES = 64
"""Elements that are looked at together."""

Array = NDArray[Any]


def bisect(x: Array, k: int, samples: int) -> tuple[float, float, int, bool]:
    """Two thresholds of |x|, how many entries reach the first, at most k, and whether there is a NaN.

    At least k entries reach the second one.
    """
    total, largest, has_nan = _sum_and_maximum(x)
    mean = total / x.size
    low, high = 0.0, 1.0
    upper, lower, certain, possible = np.inf, 0.0, 0, x.size
    for _ in range(samples):
        ratio = low + (high - low) / 2
        # infinity less infinity is NaN, which no entry reaches: the published form goes on with it
        with np.errstate(invalid="ignore"):
            threshold = x.dtype.type(mean + ratio * (largest - mean))
        count = _count(x, threshold)
        if count <= k:
            high = ratio
            if count > certain:
                certain, upper = count, threshold
        else:
            low = ratio
            if count < possible:
                possible, lower = count, threshold
    return upper, lower, certain, has_nan


def count_band(x: Array, lower: float, certain: int) -> int:
    """How many entries reach a threshold, besides the certain ones."""
    return _count(x, x.dtype.type(lower)) - certain


def between(x: Array, upper: float, lower: float, offset: int, certain: Array, run: Array) -> None:
    """Write the indices of the entries that reach ``upper``, which fit into ``certain``, and a run of the others.

    The run fills its array with those down to ``lower``, but for the first ``offset`` of them.
    """
    _between(x, x.dtype.type(upper), x.dtype.type(lower), offset, certain, run)


@compiled
def _sum_and_maximum(x: Array) -> tuple[float, float, bool]:
    total = 0.0
    largest = 0.0
    has_nan = False
    for start in range(0, x.size, LANES):
        block = x[start : start + LANES]
        part = 0.0
        for j in range(block.size):
            magnitude = abs(block[j])
            part += magnitude
            largest = max(largest, magnitude)
        total += part
        has_nan |= part != part
    return total, largest, has_nan


@compiled
def _count(x: Array, threshold: Any) -> int:
    count = 0
    for start in range(0, x.size, 4096):
        block = x[start : start + 4096]
        here: Any = np.int32(0)
        for j in range(block.size):
            here += np.int32(abs(block[j]) >= threshold)
        count += here
    return count


@compiled
def _between(x: Array, upper: Any, lower: Any, offset: int, certain: Array, run: Array) -> None:
    sure = 0
    maybe = -offset
    # upper is infinite where no entry is certain, but an entry may be infinite too
    for i in range(x.size):
        magnitude = abs(x[i])
        if magnitude >= lower:
            if magnitude >= upper and sure < certain.size:
                certain[sure] = i
                sure += 1
            else:
                if 0 <= maybe < run.size:
                    run[maybe] = i
                maybe += 1
