"""Data whose collective is known without running it: whole numbers that repeat after a prime number of elements.

Sums of them are exact in float32 for any number of ranks that a test bed can hold, and a chunk that lands in a wrong
place shows, since no chunk is a multiple of the period.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PERIOD = 8191

Floats = NDArray[np.float32]


def given(rank: int, count: int) -> Floats:
    """What a rank puts in, (count,) float32.

    Examples
    --------
    >>> given(1, 4).tolist()
    [0.0, 2.0, 4.0, 6.0]
    """
    return np.resize(_period(rank), count)


def expected(collective: str, root: int | None, *, rank: int, ranks: int, count: int) -> Floats | None:
    """What a rank must get, or None where it gets nothing.

    Parameters
    ----------
    collective : str
    root : int or None
    rank, ranks : int
    count : int
        Elements of what each rank puts in.

    Examples
    --------
    >>> expected("allreduce", None, rank=0, ranks=2, count=3).tolist()
    [0.0, 3.0, 6.0]
    """
    if collective == "allgather":
        return np.concatenate([given(other, count) for other in range(ranks)])
    if collective == "broadcast":
        return given(root or 0, count)
    if collective == "reduce" and rank != root:
        return None
    total = np.resize(np.sum([_period(other) for other in range(ranks)], axis=0, dtype=np.float32), count)
    if collective == "reduce_scatter":
        block = count // ranks
        return total[rank * block : (rank + 1) * block]
    return total


def _period(rank: int) -> Floats:
    return (np.arange(PERIOD) * (rank + 1) % 251).astype(np.float32)
