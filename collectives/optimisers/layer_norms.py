"""The length of a layer's vector: the root of the sum of its squares, added up in float64.

Every 256th element goes to the same of 256 sums, and those are added up in order: the bits are the same with any
number of threads and on every processor. Squares of float16 and float32 are exact in float64; with u = 2**-53, the
sum of n of them is off by at most (n / 256 + 512) u of itself, and u more for squares of float64: 1e-9 for 2**31
elements. Squares of float64 numbers beyond 1e154 overflow.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.compiled import compiled
from topoplan.errors import UsageError

LANES = 256
"""Sums that are added to in turn: enough of them for the widest vector registers, few enough for the nearest cache."""


def norm(array: NDArray[Any]) -> float:
    """The Euclidean length of an array.

    Parameters
    ----------
    array : float16, float32 or float64 array of any shape
        Contiguous, or it is copied.

    Returns
    -------
    float
        0 of an empty one, NaN where it holds NaN.

    Raises
    ------
    UsageError
        It has another dtype.

    Examples
    --------
    >>> norm(np.array([[3, 0], [0, 4]], np.float16))
    5.0
    """
    if array.dtype.kind != "f" or array.dtype.itemsize > 8 or not array.dtype.isnative:
        raise UsageError(
            f"a layer of dtype {array.dtype} has no norm here; use float16, float32 or float64 arrays"
        )
    line = array.reshape(-1)
    return math.sqrt(_sum_of_squares(line.astype(np.float32) if line.dtype == np.float16 else line))


@compiled
def _sum_of_squares(line: NDArray[Any]) -> Any:
    """Of a float32 or float64 line."""
    sums = np.zeros(LANES)
    whole = line.size - line.size % LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            value = np.float64(line[start + lane])
            sums[lane] += value * value
    total = 0.0
    for i in range(whole, line.size):
        value = np.float64(line[i])
        total += value * value
    for lane in range(LANES):
        total += sums[lane]
    return total
