"""MSTopK: k large entries by a bisection of thresholds, as published.

Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters", MLSys 2021, algorithm 1.
Thresholds between the mean and the maximum of |x| are bisected, and for each the entries that reach it are counted.
In the end at most k entries reach one threshold and at least k another one; the certain ones are taken, and the rest
from the band between the two thresholds, as a contiguous run at a random offset.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.selection.topk import check_arguments, index_type
from topoplan.errors import UsageError

Array = NDArray[Any]


def mstopk(x: Array, k: int, samples: int = 30, *, seed: int = 0) -> tuple[Array, Array]:
    """Exactly k entries, mostly the largest by magnitude.

    What is guaranteed: all entries that reach the upper threshold are there, and no entry below the lower one. With d
    entries of which none is further than r from the mean of |x|, entries whose magnitudes differ by more than
    r / 2**samples are told apart.

    What is not: the thresholds divide the distance from the mean to the maximum evenly, so one entry that is
    2**samples times larger than the others leaves all of those in the band, and arbitrary ones of them are chosen; an
    infinity always does. No threshold below the mean is ever tried: with k above the number of entries that reach the
    mean, the rest is arbitrary too. `topk` has none of these weaknesses, and is faster.

    Parameters
    ----------
    x : contiguous array of float32 or float64, any shape
    k : int
        Between 0 and the number of elements.
    samples : int
        Thresholds that are tried; each costs a read of the data.
    seed : int
        Of the random offset.

    Returns
    -------
    indices : (k,) int32, or int64 where there are 2**31 elements or more
        Into the flattened array: the certain entries, then those of the band, each ascending.
    values : (k,) of x's dtype

    Raises
    ------
    UsageError
        ``k`` or ``samples`` is out of range, or ``x`` holds NaN or is nothing to select from.

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
        raise UsageError(
            f"mstopk reads contiguous numpy arrays of float32 or float64, not {kind}; convert it"
        )
    flat = x.reshape(-1)
    check_arguments(k, flat.size, "refuse")
    if samples < 1:
        raise UsageError(f"{samples} samples find no threshold; give at least 1")
    index = index_type(flat.size)
    if k == 0:
        return np.zeros(0, index), flat[:0].copy()
    from collectives.selection.thresholds import between, bisect, count_band

    upper, lower, certain, has_nan = bisect(flat, k, samples)
    if has_nan:
        raise UsageError("the array holds NaN, which no threshold finds; repair the gradient")
    missing = k - certain
    band = count_band(flat, lower, certain)
    offset = int(np.random.default_rng(seed).integers(0, band - missing + 1))
    indices = np.empty(k, index)
    between(flat, upper, lower, offset, indices[:certain], indices[certain:])
    return indices, flat[indices]
