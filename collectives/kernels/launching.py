"""Compiled kernels of one GPU, and work whose tables lie in its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from collectives.kernels.compiler import load_kernel
from collectives.kernels.source import divide_kernel, forest_source, join_kernel, kernel_source
from collectives.kernels.work import THREADS, TILE_BYTES, Chunks, Work, work_of

BLOCKS_PER_PROCESSOR = 8
"""Blocks of 256 threads that a multiprocessor of any generation can hold; more would only wait."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceWork:
    """A `Work` in the memory of a GPU, and the table of buffers that it is to be done on.

    Parameters
    ----------
    work : Work
    items, arrivals, tiles, bases : CuPy arrays
        Of bytes; ``bases`` holds the address of each buffer.
    """

    work: Work
    items: Any
    arrivals: Any
    tiles: Any
    bases: Any


class Kernels:
    """The kernels of the GPU that is current, compiled when they are first used.

    Everything runs on the current stream.

    Parameters
    ----------
    cupy : module
    """

    def __init__(self, cupy: ModuleType) -> None:
        self._cupy: Any = cupy
        self._compiled: dict[str, Any] = {}
        attributes = cupy.cuda.Device().attributes
        self._most_blocks = attributes["MultiProcessorCount"] * BLOCKS_PER_PROCESSOR

    def upload(self, work: Work, buffers: int) -> DeviceWork:
        """Put the tables of some work on so many buffers into the GPU's memory."""
        items, arrivals, tiles = (
            self._cupy.asarray(table.view(np.uint8)) for table in (work.items, work.arrivals, work.tiles)
        )
        return DeviceWork(work, items, arrivals, tiles, self._cupy.zeros(buffers, dtype=np.int64))

    def compiled(self, op: str | None, dtype: str, itemsize: int) -> Any:
        """The kernel that joins with an operation."""
        return self._kernel(join_kernel(op, dtype, itemsize))

    def forest(self, name: str) -> Any:
        """The kernel of this name (`forest_kernel`), which runs a rank's whole part in a collective."""
        return self._kernel(name, forest_source)

    def launch(self, kernel: Any, done: DeviceWork, number: int) -> None:
        """Do one launch of the work."""
        ends = done.work.ends
        first = ends[number - 1] if number else 0
        count = ends[number] - first
        tiles = done.tiles.data.ptr + first * done.work.tiles.itemsize
        kernel(
            (min(count, self._most_blocks),),
            (THREADS,),
            (done.bases, done.items, done.arrivals, np.int64(tiles), np.int32(count)),
        )

    def divide(self, line: Any, dtype: str, ranks: int) -> None:
        """Turn sums into averages, in place."""
        tiles = -(-line.nbytes // TILE_BYTES)
        if tiles:
            self._kernel(divide_kernel(dtype))(
                (min(tiles, self._most_blocks),),
                (THREADS,),
                (line, np.int64(line.size), np.int64(ranks), np.int32(tiles)),
            )

    def join(self, target: Any, lines: Sequence[Any], op: str, dtype: str, itemsize: int) -> None:
        """Join lines one after another into another line of the same length, which shares no memory with them."""
        if not target.size:
            return
        none = np.zeros(len(lines) - 1, dtype=np.int64)
        chunks = Chunks(
            step=none,
            rank=none,
            start=none,
            count=none + target.size,
            add=none == 0,
            destination=(none, none),
            own=(none + 1, none),
            arriving=(np.arange(2, len(lines) + 1), none),
        )
        work = self.upload(work_of(chunks, itemsize), len(lines) + 1)
        work.bases.set(np.array([line.data.ptr for line in (target, *lines)], dtype=np.int64))
        self.launch(self.compiled(op, dtype, itemsize), work, 0)
        self._cupy.cuda.get_current_stream().synchronize()  # the tables go with this call

    def _kernel(self, name: str, source: Callable[[list[str]], str] = kernel_source) -> Any:
        if name not in self._compiled:
            self._compiled[name] = load_kernel(self._cupy, source([name]), name)
        return self._compiled[name]
