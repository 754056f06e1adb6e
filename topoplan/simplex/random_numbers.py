"""Random whole numbers that are the same on every machine and in every version of the library."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Stream:
    """Whole numbers from a bit generator whose raw output numpy promises never to change (NEP 19).

    Examples
    --------
    >>> Stream(0).whole(4, 1000).tolist() == Stream(0).whole(4, 1000).tolist()
    True
    """

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def whole(self, count: int, below: int) -> NDArray[np.int64]:
        """(count,) int64 in [0, below)."""
        return (self._bits.random_raw(count) % np.uint64(below)).astype(np.int64)
