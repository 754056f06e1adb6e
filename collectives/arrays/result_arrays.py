"""numpy arrays whose memory is used again when the caller has dropped them.

New memory costs a page fault and a zeroing for each page, as much time as the whole collective. So the memory of
large results is kept, and given out again as soon as no array refers to it any more.
"""

from __future__ import annotations

import math
import sys
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.arrays.numpy_arrays import NumpyArrays

WORTHWHILE = 1 << 20
"""Bytes from which on memory is kept; smaller arrays come from numpy, which keeps some itself."""

KEPT = 4
"""Pieces of memory that are kept at most, free or not."""


class ResultArrays(NumpyArrays):
    """`ArrayLibrary` of numpy that keeps the memory of its large results.

    Examples
    --------
    >>> library = ResultArrays()
    >>> first = library.empty((1 << 20,), np.empty(0))
    >>> place = first.ctypes.data
    >>> second = library.empty((1 << 20,), np.empty(0))
    >>> del first
    >>> third = library.empty((1 << 19, 2), np.empty(0))
    >>> third.ctypes.data == place, second.ctypes.data == place
    (True, False)
    """

    def __init__(self) -> None:
        self._kept: list[NDArray[np.uint8]] = []
        self._giving = threading.Lock()

    def empty(self, shape: tuple[int, ...], like: NDArray[Any]) -> NDArray[Any]:
        """See `ArrayLibrary.empty`."""
        length = math.prod(shape) * like.dtype.itemsize
        if length < WORTHWHILE:
            return super().empty(shape, like)
        with self._giving:
            memory = self._free(length)
            if memory is None:
                memory = np.empty(length, np.uint8)
                self._kept = [*self._kept[1 - KEPT :], memory]
            return memory[:length].view(like.dtype).reshape(shape)

    def _free(self, length: int) -> NDArray[np.uint8] | None:
        """The smallest memory that is long enough, not much too long, and not in use."""
        found = None
        for place in range(len(self._kept)):
            # every array in this memory refers to it as its base; the list and getrefcount itself do so too
            unused = sys.getrefcount(self._kept[place]) == 2
            size = len(self._kept[place])
            if unused and length <= size <= 2 * length and (found is None or size < len(found)):
                found = self._kept[place]
        return found
