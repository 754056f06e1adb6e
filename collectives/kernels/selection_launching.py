"""Compiled selection kernels of one GPU, launched on the current stream."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np

from collectives.kernels.compiler import load_kernel
from collectives.kernels.selection_source import KEY_BITS, selection_kernel, selection_source
from collectives.kernels.work import THREADS, TILE_BYTES

BINS = 2048
"""Counters of a histogram; as in ``select.cu``."""

DIGIT = 11
"""Bits of a key that one histogram makes known."""

STATE = np.dtype([(name, np.uint64) for name in ("ended", "key", "wanted", "nan", "gathered")])
"""What the kernels of a selection tell each other; as in ``select.cu``."""

BLOCKS_PER_PROCESSOR = 4
"""As many as the kernels are bound to leave room for on a multiprocessor of any generation."""


class SelectionKernels:
    """The selection kernels of the GPU that is current, compiled when they are first used.

    Parameters
    ----------
    cupy : module
    """

    def __init__(self, cupy: ModuleType) -> None:
        self._cupy: Any = cupy
        self._compiled: dict[str, Any] = {}
        self._most_blocks: int = cupy.cuda.Device().attributes["MultiProcessorCount"] * BLOCKS_PER_PROCESSOR

    def blocks(self, count: int, itemsize: int) -> int:
        """Blocks that share the tiles of so many elements."""
        return max(1, min(-(-count * itemsize // TILE_BYTES), self._most_blocks))

    def launch(self, form: str, dtype: str, blocks: int, arguments: tuple[Any, ...]) -> None:
        """Run one kernel, see `selection_kernel`; arrays, and numbers of the widths that it takes."""
        name = selection_kernel(form, dtype)
        if name not in self._compiled:
            self._compiled[name] = load_kernel(self._cupy, selection_source([name]), name)
        self._compiled[name]((blocks,), (THREADS,), arguments)


@lru_cache(maxsize=64)
def selection_kernels(cupy: ModuleType, device: int) -> SelectionKernels:
    """The kernels of one GPU, which must be current."""
    return SelectionKernels(cupy)


def digits(dtype: str) -> tuple[tuple[int, int], ...]:
    """Lowest bit and number of bits of each part of a key, from the top.

    Examples
    --------
    >>> digits("float32")
    ((20, 11), (9, 11), (0, 9))
    """
    top = KEY_BITS[dtype][0]
    ends = [*range(top, 0, -DIGIT), 0]
    return tuple((low, high - low) for high, low in pairwise(ends))
