"""Compute with gradients and entries on a GPU, in CuPy arrays.

Residuals, selection, sums and messages stay there. Entries that a wire format packs or rounds, or that a rank of a
tree adds up and chooses from again, are few and go through the processor, which has the code for it. Without a wire
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
    """`EntryArrays` of one GPU.

    Parameters
    ----------
    library : CupyArrays
        Everything runs on its GPU, in its stream.
    """

    def __init__(self, library: Any) -> None:
        self._cupy: Any = load_cupy("gpu selection")
        self._library = library
        self._host = HostEntryArrays(library)

    @contextmanager
    def here(self) -> Iterator[None]:
        """See `EntryArrays.here`."""
        with self._library.here() as stream:
            try:
                yield
            finally:
                stream.synchronize()

    def feedback(self, size: int, dtype: str, *, momentum: float) -> GpuErrorFeedback:
        """See `EntryArrays.feedback`."""
        return GpuErrorFeedback(size, dtype, momentum=momentum, device=self._library.device)

    def area(self, nbytes: int) -> Any:
        """See `EntryArrays.area`."""
        return self._cupy.empty(nbytes, dtype=np.uint8)

    def values(self, line: Any) -> Any:
        """See `EntryArrays.values`."""
        return line

    def line(self, values: Any) -> Any:
        """See `EntryArrays.line`."""
        return values

    def zeroed(self, line: Any) -> Any:
        """See `EntryArrays.zeroed`."""
        line[...] = 0
        return line

    def store(self, line: Any, values: Any) -> None:
        """See `EntryArrays.store`."""
        if line.data.ptr != values.data.ptr:
            line[...] = values

    def widened(self, array: Any, dtype: str) -> Any:
        """See `EntryArrays.widened`."""
        line = self._library.line(array)
        if line.dtype == dtype:
            return line
        made = self._cupy.empty(line.shape, dtype=dtype)
        made[...] = line
        return made

    def rounded(self, target: Any, result: Any) -> None:
        """See `EntryArrays.rounded`."""
        target[...] = result

    def bounded(self, values: Any, limit: float = math.inf) -> bool:
        """See `EntryArrays.bounded`."""
        return abs(_largest(values)) < limit

    def shown(self, values: Any) -> Any:
        """See `EntryArrays.shown`."""
        return self._cupy.asarray(self._host.shown(values.get()))

    def nonzero(self, values: Any) -> Entries:
        """See `EntryArrays.nonzero`."""
        indices = self._cupy.flatnonzero(values)
        return indices, values[indices]

    def add(self, total: Any, entries: Entries) -> None:
        """See `EntryArrays.add`."""
        add_entries_gpu(total, *entries)

    def encode(
        self, entries: Entries, *, size: int, wire: WireFormat | None, rank: int, step: int
    ) -> EncodedEntries:
        """See `EntryArrays.encode`."""
        if wire is None:
            return EncodedEntries(encode_entries_gpu(*entries), entries, None)
        made = self._host.encode(_fetched(entries), size=size, wire=wire, rank=rank, step=step)
        message = self._cupy.asarray(made.message)
        if made.lost is None:
            return EncodedEntries(message, entries, None)
        return EncodedEntries(message, self._put(made.told), self._put(made.lost))

    def decode(self, message: Any, *, size: int, dtype: str, wire: WireFormat | None) -> Entries:
        """See `EntryArrays.decode`."""
        if wire is None:
            return decode_entries_gpu(message, size=size, dtype=dtype)
        return self._put(self._host.decode(message.get(), size=size, dtype=dtype, wire=wire))

    def merge(self, parts: Sequence[Entries], k: int) -> tuple[Entries, Entries]:
        """See `EntryArrays.merge`."""
        kept, rest = self._host.merge([_fetched(part) for part in parts], k)
        return self._put(kept), self._put(rest)

    def _put(self, entries: Entries) -> Entries:
        return self._cupy.asarray(entries[0]), self._cupy.asarray(entries[1])


def _largest(values: Any) -> float:
    """The value of largest magnitude, or a NaN where there is one."""
    return float(topk_gpu(values, 1, nan="largest")[1].get()[0]) if values.size else 0.0


def _fetched(entries: Entries) -> Entries:
    return entries[0].get(), entries[1].get()


def encode_entries_gpu(indices: Any, values: Any) -> Any:
    """A message, on the current stream of the entries' GPU.

    Parameters
    ----------
    indices : (n,) CuPy array of int32 or int64
    values : (n,) CuPy array

    Returns
    -------
    (n (index bytes + value bytes),) CuPy array of uint8
    """
    cupy: Any = load_cupy("gpu selection")
    with on_device(cupy, indices.device.id):
        parts = [cupy.ascontiguousarray(part).view(np.uint8) for part in (indices, values)]
        message = cupy.empty(indices.nbytes + values.nbytes, dtype=np.uint8)
        message[: indices.nbytes] = parts[0]
        message[indices.nbytes :] = parts[1]
        return message


def decode_entries_gpu(message: Any, *, size: int, dtype: str) -> tuple[Any, Any]:
    """Indices and values of a message, in its memory where they are aligned there.

    Parameters
    ----------
    message : (m,) CuPy array of uint8
    size : int
        Elements of the array that the entries are from, which tells the indices' dtype.
    dtype : str
        Of the values; bfloat16 comes as its bits in uint16.

    Raises
    ------
    UsageError
        The message has no length that such entries have.
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
    """Bytes as numbers: a GPU reads these from multiples of their size only."""
    if line.data.ptr % dtype.itemsize:
        aligned = cupy.empty(line.size, dtype=np.uint8)
        aligned[...] = line
        line = aligned
    return line.view(dtype)
