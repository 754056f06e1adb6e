"""Products of matrices of whole numbers in float64: exact, and on one thread.

Sums of whole numbers below 2^53 are exact in whatever order a library adds them. Large products it divides between
threads, which here costs more than it gains: the processors are often busy, and threads that wait for each other burn
tens of times the work. Products of blocks of 64 stay below the size from which OpenBLAS does so (2^18
multiplications).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK = 64


def product(left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """``left @ right`` for stacks of matrices of whole numbers whose sums stay below 2^53.

    Parameters
    ----------
    left : (stack, n, k) float64
    right : (stack, k, m) float64

    Returns
    -------
    (stack, n, m) float64

    Examples
    --------
    >>> product(np.full((1, 70, 80), 3.0), np.full((1, 80, 2), 2.0)).sum()
    np.float64(67200.0)
    """
    (_, n, k), m = left.shape, right.shape[2]
    if n * k * m <= BLOCK**3:
        return np.asarray(left @ right)
    found = np.zeros((len(left), n, m))
    for top in range(0, n, BLOCK):
        rows = slice(top, top + BLOCK)
        for middle in range(0, k, BLOCK):
            inner = slice(middle, middle + BLOCK)
            part = np.ascontiguousarray(left[:, rows, inner])
            for start in range(0, m, BLOCK):
                columns = slice(start, start + BLOCK)
                found[:, rows, columns] += part @ np.ascontiguousarray(right[:, inner, columns])
    return found
