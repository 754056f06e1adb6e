"""Gradients and entries on the processor, in numpy arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
from numpy.typing import NDArray

from collectives.arrays.library import ArrayLibrary
from collectives.selection.error_feedback import ErrorFeedback
from collectives.selection.topk import topk
from collectives.sparse.entry_arrays import Encoded, Entries, Line
from collectives.sparse.entry_messages import decode_entries, encode_entries, within

if TYPE_CHECKING:
    from collectives.wire.filters import WireFormat

Array = NDArray[Any]


class HostEntryArrays(Generic[Line]):
    """`EntryArrays` of numpy arrays, for any library of arrays.

    Parameters
    ----------
    library : ArrayLibrary
    """

    def __init__(self, library: ArrayLibrary[Line]) -> None:
        self._library = library

    def here(self) -> AbstractContextManager[object]:
        """See `EntryArrays.here`."""
        return nullcontext()

    def feedback(self, size: int, dtype: str, *, momentum: float) -> ErrorFeedback:
        """See `EntryArrays.feedback`."""
        return ErrorFeedback(size, dtype, momentum=momentum)

    def area(self, nbytes: int) -> Line:
        """See `EntryArrays.area`."""
        return self._library.empty((nbytes,), self._library.of(np.empty(0, np.uint8)))

    def values(self, line: Line) -> Array:
        """See `EntryArrays.values`."""
        return self._library.values(line)

    def line(self, values: Array) -> Line:
        """See `EntryArrays.line`."""
        return self._library.wrapped(values)

    def zeroed(self, line: Line) -> Array:
        """See `EntryArrays.zeroed`."""
        if not self._library.by_numpy(line):
            return np.zeros(self._library.shape(line), self._library.dtype(line))
        values = self._library.values(line)
        values.fill(0)
        return values

    def store(self, line: Line, values: Array) -> None:
        """See `EntryArrays.store`."""
        if not self._library.by_numpy(line):
            self._library.put(line, values)
            return
        target = self._library.values(line)
        if target.ctypes.data != values.ctypes.data:
            target[...] = values

    def widened(self, array: Line, dtype: str) -> Line:
        """See `EntryArrays.widened`."""
        library = self._library
        if library.dtype(array) == dtype:
            return library.line(array)
        return library.wrapped(np.ascontiguousarray(library.values(array), dtype).reshape(-1))

    def rounded(self, target: Line, result: Line) -> None:
        """See `EntryArrays.rounded`."""
        with np.errstate(over="ignore"):  # what is too large is infinite, as in sums of such values
            self._library.put(target, self._library.values(result))

    def bounded(self, values: Array, limit: float = math.inf) -> bool:
        """See `EntryArrays.bounded`."""
        # smallest and largest are NaN if there is one, for which no comparison holds
        return not values.size or (float(values.min()) > -limit and float(values.max()) < limit)

    def shown(self, values: Array) -> Array:
        """See `EntryArrays.shown`."""
        shown = np.where(np.isfinite(values), values.dtype.type(0), values)
        shown[np.isnan(shown)] = np.inf
        return shown

    def nonzero(self, values: Array) -> Entries:
        """See `EntryArrays.nonzero`."""
        indices = np.flatnonzero(values)
        return indices, values[indices]

    def add(self, total: Array, entries: Entries) -> None:
        """See `EntryArrays.add`."""
        indices, values = entries
        total[indices] += values

    def encode(
        self, entries: Entries, *, size: int, wire: WireFormat | None, rank: int, step: int
    ) -> Encoded:
        """See `EntryArrays.encode`."""
        indices, values = entries
        if wire is None or wire.lossless_for(values.dtype):
            message = encode_entries(indices, values, size=size, wire=wire, rank=rank, step=step)
            return Encoded(message, entries, None)
        # what a format cannot hold is told another time
        sent = within(values, wire)
        message = encode_entries(indices, sent, size=size, wire=wire, rank=rank, step=step)
        told = decode_entries(message, size=size, dtype=values.dtype.name, wire=wire)
        lost = np.subtract(values, told[1], where=np.isfinite(values), out=np.zeros_like(values))
        return Encoded(message, told, (indices, lost))

    def decode(self, message: Array, *, size: int, dtype: str, wire: WireFormat | None) -> Entries:
        """See `EntryArrays.decode`."""
        return decode_entries(message, size=size, dtype=dtype, wire=wire)

    def merge(self, parts: Sequence[Entries], k: int) -> tuple[Entries, Entries]:
        """See `EntryArrays.merge`."""
        return largest_entries(*merged(parts), k)


def merged(parts: Sequence[Entries]) -> Entries:
    """Entries of several ranks in ascending order, the values of one index added up in the order of the ranks.

    Examples
    --------
    >>> indices, values = merged([(np.array([1, 4]), np.float32([1, 2])), (np.array([4, 5]), np.float32([3, 4]))])
    >>> indices.tolist(), values.tolist()
    ([1, 4, 5], [1.0, 5.0, 4.0])
    """
    indices = np.concatenate([part[0] for part in parts])
    indices.sort()  # np.unique would hash them, which takes much longer
    first = np.ones(len(indices), dtype=np.bool_)
    np.not_equal(indices[1:], indices[:-1], out=first[1:])
    indices = indices[first]
    values = np.zeros(len(indices), parts[0][1].dtype)
    for own, added in parts:
        values[np.searchsorted(indices, own)] += added
    return indices, values


def largest_entries(indices: Array, values: Array, k: int) -> tuple[Entries, Entries]:
    """Of entries in ascending order the k of largest magnitude, ties by lowest index, and the others.

    Examples
    --------
    >>> kept, left = largest_entries(np.array([1, 4, 6]), np.float32([2, -3, 2]), 2)
    >>> kept[0].tolist(), left[0].tolist()
    ([1, 4], [6])
    """
    if k >= len(indices):
        return (indices, values), (indices[:0], values[:0])
    # a NaN, as infinities of both signs make, goes to everybody
    chosen, _ = topk(values, k, nan="largest")
    rest = np.ones(len(indices), dtype=np.bool_)
    rest[chosen] = False
    return (indices[chosen], values[chosen]), (indices[rest], values[rest])
