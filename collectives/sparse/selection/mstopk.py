"""Select k large entries by a bisection of thresholds, as published (MSTopK).

Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters", MLSys 2021, algorithm 1.
Thresholds between the mean and the maximum of |x| are bisected, and for each the entries that reach it are counted. In
the end at most k entries reach one threshold and at least k another one; the certain ones are taken, and the rest from
the band between the two thresholds, as a contiguous run at a random offset.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.sparse.selection.topk import check_arguments, index_type
from collectives.tables.compiled import compiled
from topoplan.errors import UsageError
from topoplan.units import check_whole

LANES = 64  # elements of a block

Array = NDArray[Any]


MOST_SAMPLES = 4096
"""Halvings of an interval of floats, which has no middle after about 2,200."""


def mstopk(x: Array, k: int, samples: int = 30, *, seed: int = 0) -> tuple[Array, Array]:
    """Return exactly k entries, mostly the largest by magnitude.

    Guaranteed: all entries that reach the upper threshold are there, and no entry below the lower one. If no entry is
    further than r from the mean of |x|, entries whose magnitudes differ by more than r / 2**samples are distinguished.

    Not guaranteed: the thresholds divide the distance from the mean to the maximum evenly, so one entry that is
    2**samples times larger than the others leaves all of those in the band, from which arbitrary ones are selected; an
    infinity always does. No threshold below the mean is ever tried: with k above the number of entries that reach the
    mean, the rest is arbitrary too. `topk` has none of these weaknesses, and is faster.

    Parameters
    ----------
    x : contiguous array of float32 or float64, any shape
    k : int
        Between 0 and the number of elements.
    samples : int
        Number of thresholds; each costs a read of the data.
    seed : int
        Seed of the random offset.

    Returns
    -------
    indices : (k,) int32, or int64 for 2**31 elements or more
        Into the flattened array: the certain entries, then those of the band, each ascending.
    values : (k,) of x's dtype

    Raises
    ------
    UsageError
        ``k`` or ``samples`` is out of range, or ``x`` holds NaN or is of another kind.

    Examples
    --------
    >>> x = np.array([3.0, -7.0, 0.5, 7.0, -4.0])
    >>> sorted(mstopk(x, 3)[1].tolist())
    [-7.0, -4.0, 7.0]
    """
    if (
        not isinstance(x, np.ndarray)
        or x.dtype.name not in ("float32", "float64")
        or not x.flags.c_contiguous
    ):
        kind = x.dtype if isinstance(x, np.ndarray) else type(x).__name__
        raise UsageError(f"x must be a contiguous numpy array of float32 or float64, got {kind}; convert it")
    flat = x.reshape(-1)
    k = check_arguments(k, flat.size, "refuse")
    check_whole("samples", samples, least=1, most=MOST_SAMPLES)
    check_whole("seed", seed)
    index = index_type(flat.size)
    if k == 0:
        return np.zeros(0, index), flat[:0].copy()
    upper, lower, certain, has_nan = _bisect(flat, k, samples)
    if has_nan:
        raise UsageError("the array holds NaN, which no threshold finds; repair the gradient")
    missing = k - certain
    upper, lower = flat.dtype.type(upper), flat.dtype.type(lower)
    band = _count(flat, lower) - certain
    offset = int(np.random.default_rng(seed).integers(0, band - missing + 1))
    indices = np.empty(k, index)
    _between(flat, upper, lower, offset, indices[:certain], indices[certain:])
    return indices, flat[indices]


def _bisect(x: Array, k: int, samples: int) -> tuple[float, float, int, bool]:
    """Return two thresholds of |x|, how many entries reach the first (at most k), and whether there is a NaN.

    At least k entries reach the second one.
    """
    total, largest, has_nan = _sum_and_maximum(x)
    mean = total / x.size
    low, high = 0.0, 1.0
    upper, lower, certain, possible = np.inf, 0.0, 0, x.size
    for _ in range(samples):
        ratio = low + (high - low) / 2
        # infinity minus infinity is NaN, which no entry reaches: the published form continues with it
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
    """Write the indices of the entries that reach ``upper``, which fit into ``certain``, and a run of the others.

    The run fills its array with those down to ``lower``, except the first ``offset`` of them.
    """
    sure = 0
    maybe = -offset
    # upper is infinite if no entry is certain, but an entry may be infinite too
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
