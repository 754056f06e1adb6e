"""Compute with gradients and entries on a GPU, in CuPy arrays.

Residuals, selection, sums and messages stay there. Entries that a wire format packs or rounds, or that a rank of a
tree sums and selects from again, are few and go through the processor, which has the code for it. Without a wire
format a message is all indices and then all values, as they lie in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.sparse.entry_arrays import EncodedEntries, Entries, HostEntryArrays
from collectives.sparse.selection.gpu_error_feedback import GpuErrorFeedback, add_entries_gpu
from collectives.sparse.selection.gpu_topk import topk_gpu
from collectives.sparse.selection.topk import index_type
from collectives.tables.cupy_arrays import load_cupy, on_device
from topoplan.errors import UsageError

if TYPE_CHECKING:
    from collectives.sparse.codec import WireFormat


class GpuEntryArrays:
    """The `EntryArrays` of one GPU, in the stream of its CuPy library."""

    def __init__(self, library: Any) -> None:
        self._cupy: Any = load_cupy("gpu selection")
        self._library = library
        self._host = HostEntryArrays(library)

    @contextmanager
    def here(self) -> Iterator[None]:
        with self._library.here() as stream:
            try:
                yield
            finally:
                stream.synchronize()

    def feedback(self, size: int, dtype: str, *, momentum: float) -> GpuErrorFeedback:
        return GpuErrorFeedback(size, dtype, momentum=momentum, device=self._library.device)

    def area(self, nbytes: int) -> Any:
        return self._cupy.empty(nbytes, dtype=np.uint8)

    def values(self, line: Any) -> Any:
        return line

    def line(self, values: Any) -> Any:
        return values

    def zeroed(self, line: Any) -> Any:
        line[...] = 0
        return line

    def store(self, line: Any, values: Any) -> None:
        if line.data.ptr != values.data.ptr:
            line[...] = values

    def widened(self, array: Any, dtype: str) -> Any:
        line = self._library.line(array)
        if line.dtype == dtype:
            return line
        made = self._cupy.empty(line.shape, dtype=dtype)
        made[...] = line
        return made

    def rounded(self, target: Any, result: Any) -> None:
        target[...] = result

    def bounded(self, values: Any, limit: float = math.inf) -> bool:
        return abs(_largest(values)) < limit

    def shown(self, values: Any) -> Any:
        return self._cupy.asarray(self._host.shown(values.get()))

    def nonzero(self, values: Any) -> Entries:
        indices = self._cupy.flatnonzero(values)
        return indices, values[indices]

    def add(self, total: Any, entries: Entries) -> None:
        add_entries_gpu(total, *entries)

    def encode(
        self, entries: Entries, *, size: int, wire: WireFormat | None, rank: int, step: int
    ) -> EncodedEntries:
        if wire is None:
            return EncodedEntries(encode_entries_gpu(*entries), entries, None)
        made = self._host.encode(_fetched(entries), size=size, wire=wire, rank=rank, step=step)
        message = self._cupy.asarray(made.message)
        if made.lost is None:
            return EncodedEntries(message, entries, None)
        return EncodedEntries(message, self._put(made.decoded), self._put(made.lost))

    def decode(self, message: Any, *, size: int, dtype: str, wire: WireFormat | None) -> Entries:
        if wire is None:
            return decode_entries_gpu(message, size=size, dtype=dtype)
        return self._put(self._host.decode(message.get(), size=size, dtype=dtype, wire=wire))

    def merge(self, parts: Sequence[Entries], k: int) -> tuple[Entries, Entries]:
        kept, rest = self._host.merge([_fetched(part) for part in parts], k)
        return self._put(kept), self._put(rest)

    def _put(self, entries: Entries) -> Entries:
        return self._cupy.asarray(entries[0]), self._cupy.asarray(entries[1])


def _largest(values: Any) -> float:
    """Return the value of largest magnitude, or a NaN if there is one."""
    return float(topk_gpu(values, 1, nan="largest")[1].get()[0]) if values.size else 0.0


def _fetched(entries: Entries) -> Entries:
    return entries[0].get(), entries[1].get()


def encode_entries_gpu(indices: Any, values: Any) -> Any:
    """Return the message of entries (vectors of equal length) as uint8, on the current stream of their GPU."""
    cupy: Any = load_cupy("gpu selection")
    with on_device(cupy, indices.device.id):
        parts = [cupy.ascontiguousarray(part).view(np.uint8) for part in (indices, values)]
        message = cupy.empty(indices.nbytes + values.nbytes, dtype=np.uint8)
        message[: indices.nbytes] = parts[0]
        message[indices.nbytes :] = parts[1]
        return message


def decode_entries_gpu(message: Any, *, size: int, dtype: str) -> tuple[Any, Any]:
    """Return indices and values of a message, in its memory if aligned; bfloat16 as its bits in uint16.

    `size` is that of the array with the entries, which determines the indices' dtype. Raises `UsageError` for a length
    that does not fit.
    """
    cupy: Any = load_cupy("gpu selection")
    index, value = np.dtype(index_type(size)), np.dtype("uint16" if dtype == "bfloat16" else dtype)
    entry = index.itemsize + value.itemsize
    if message.size % entry:
        raise UsageError(
            f"a message of {message.size} bytes does not hold entries of {entry} bytes each; "
            "decode it with the size and dtype that it was encoded with"
        )
    border = message.size // entry * index.itemsize
    with on_device(cupy, message.device.id):
        return _seen_as(cupy, message[:border], index), _seen_as(cupy, message[border:], value)


def _seen_as(cupy: Any, line: Any, dtype: np.dtype[Any]) -> Any:
    """Return bytes as numbers, copied if they are not aligned for a GPU."""
    if line.data.ptr % dtype.itemsize:
        aligned = cupy.empty(line.size, dtype=np.uint8)
        aligned[...] = line
        line = aligned
    return line.view(dtype)
