"""Compute with selected entries, here on the host, and encode them as messages of one length on all ranks.

*Lines* are the back end's arrays (numpy, torch, CuPy), which move between ranks. *Values*, indices and messages are
numpy arrays, or CuPy arrays on a GPU (`EntryArrays` is the protocol of both): the same bits on both.

Without a wire format a message is all indices and then all values. With one it is the bytes of `WireFormat`, padded to
the most that so many entries can take; a format that caches keys gains nothing so, and is refused. Messages that lie
one after another have places that start as shards do (`place_bytes`):

    3 entries of a gradient of 1000 float32: 3 indices of 4 bytes, 3 values of 4 bytes   24 bytes
    its place among the messages of all ranks                                            32 bytes, the last 8 unused
    rank r's message, in the gathered line                                               bytes 32 r to 32 r + 24
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from collectives.sparse.selection.error_feedback import ErrorFeedback, checked_density
from collectives.sparse.selection.topk import index_type, topk
from collectives.tables.numpy_arrays import ArrayLibrary
from topoplan.errors import UsageError
from topoplan.plans.shards import ALIGNMENT

if TYPE_CHECKING:
    from collectives.sparse.codec import WireFormat

Line = TypeVar("Line")

Array = NDArray[Any]

Entries = tuple[Any, Any]  # indices, ascending, and values


@dataclass(frozen=True, slots=True, eq=False)
class EncodedEntries:
    """Encoded entries.

    `decoded` are the entries as receivers decode them: a wire format may round values. `lost` is the rounding error at
    the same indices, None without rounding.
    """

    message: Any
    decoded: Entries
    lost: Entries | None


class ResidualFeedback(Protocol):
    """The protocol of `collectives.ErrorFeedback`."""

    residual: Any
    velocity: Any
    momentum: float
    step: int

    def feed(self, gradient: Any, k: int) -> Entries:
        """Add a gradient to the residual, and remove and return its k largest entries."""

    def part(self, start: int, stop: int) -> ResidualFeedback:
        """Return the feedback of a range of elements, on the same memory."""

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as numpy copies."""

    def restore(self, state: Any) -> None:
        """Restore a state, with numpy arrays or arrays like the residual."""


class EntryArrays(Protocol[Line]):
    """Computes with gradients and entries; everything but `feedback` inside ``with here()``."""

    def here(self) -> AbstractContextManager[object]:
        """Return the context of the computation, which is complete when it is left."""

    def feedback(self, size: int, dtype: str, *, momentum: float) -> ResidualFeedback:
        """Return a new residual, all zero."""

    def area(self, nbytes: int) -> Line:
        """Return a new line of so many bytes, contents undefined, for messages."""

    def values(self, line: Line) -> Any:
        """Return the values of a line, read-only."""

    def line(self, values: Any) -> Line:
        """Return a line with these values, possibly the same memory."""

    def zeroed(self, line: Line) -> Any:
        """Return zeros to fill and `store` in a line: its own memory if possible."""

    def store(self, line: Line, values: Any) -> None:
        """Put values into a line, unless they are its own memory."""

    def widened(self, array: Line, dtype: str) -> Line:
        """Return a gradient as a line of a dtype that holds all its values; the same memory if it is one already."""

    def rounded(self, target: Line, result: Line) -> None:
        """Put a result into an array of the same shape with fewer bits, rounded to nearest, ties to even."""

    def bounded(self, values: Any, limit: float = math.inf) -> bool:
        """Return whether all magnitudes are below a limit, and so are finite."""

    def shown(self, values: Any) -> Any:
        """Return new values: infinities in place of values that are not finite, zeros elsewhere."""

    def nonzero(self, values: Any) -> Entries:
        """Return copies of the nonzero entries."""

    def add(self, total: Any, entries: Entries) -> None:
        """Add entries with distinct indices."""

    def encode(
        self, entries: Entries, *, size: int, wire: WireFormat | None, rank: int, step: int
    ) -> EncodedEntries:
        """Encode entries of so many elements as a message (see `collectives.sparse.entry_arrays`)."""

    def decode(self, message: Any, *, size: int, dtype: str, wire: WireFormat | None) -> Entries:
        """Decode the entries of a message."""

    def merge(self, parts: Sequence[Entries], k: int) -> tuple[Entries, Entries]:
        """Sum entries in their order; return the k largest and the others."""


Bytes = NDArray[np.uint8]

LARGEST_FLOAT = {
    "float32": float(np.finfo(np.float32).max),
    "float16": float(np.finfo(np.float16).max),
    "bfloat16": float.fromhex("0x1.fep127"),
}
"""Largest magnitude that a format does not round to infinity."""


class EntryMessages(Generic[Line]):
    """Encodes the entries of a gradient's shards; all messages of one shard have one length.

    `borders` are those of the shards, from 0 to the gradient's size, and `density` is the selected share of every
    shard, unless `entries` are given. `entries` and `lengths` (in bytes) are those of a message, by shard.
    """

    def __init__(
        self,
        arrays: EntryArrays[Line],
        borders: Sequence[int],
        *,
        dtype: str,
        density: float,
        wire: WireFormat | None,
        entries: Sequence[int] | None = None,
    ) -> None:
        self.borders = tuple(borders)
        self.dtype = dtype
        self._arrays = arrays
        self._sizes = tuple(stop - start for start, stop in pairwise(borders))
        # an empty shard has no entries to pack, and its messages no bytes
        self._wires = tuple(wire if size else None for size in self._sizes)
        self.entries = tuple(
            (entry_count(size, density) for size in self._sizes) if entries is None else entries
        )
        self.lengths = tuple(
            message_bytes(entries, size=size, dtype=dtype, wire=one)
            for entries, size, one in zip(self.entries, self._sizes, self._wires, strict=True)
        )

    @property
    def size(self) -> int:
        """Elements of the gradient."""
        return self.borders[-1]

    def encoded(self, entries: Entries, shard: int, *, rank: int, step: int) -> EncodedEntries:
        """Encode a rank's entries; step and rank seed random rounding."""
        return self._arrays.encode(
            entries, size=self._sizes[shard], wire=self._wires[shard], rank=shard << 32 | rank, step=step
        )

    def decoded(self, message: Any, shard: int) -> Entries:
        """Decode a message."""
        return self._arrays.decode(
            message, size=self._sizes[shard], dtype=self.dtype, wire=self._wires[shard]
        )


def entry_count(size: int, density: float) -> int:
    """Return the number of entries of a density, at least one if there are any; UsageError for an invalid density.

    >>> entry_count(1000, 0.01), entry_count(10, 0.01), entry_count(0, 0.01)
    (10, 1, 0)
    """
    return min(size, max(1, round(checked_density(density) * size)))


def message_bytes(entries: int, *, size: int, dtype: str, wire: WireFormat | None) -> int:
    """Return the bytes of a message with entries of `size` elements; UsageError if the wire format caches keys."""
    if wire is None:
        return entries * (np.dtype(index_type(size)).itemsize + np.dtype(dtype).itemsize)
    if wire.cache_keys:
        raise UsageError(
            "messages of a sparse allreduce have one length, which cached keys cannot shorten; "
            "use a wire format without cache_keys"
        )
    return wire.encoded_bytes_at_most(entries, size, dtype, index_dtype=index_type(size))


def place_bytes(length: int) -> int:
    """Return the bytes of a message with its padding, after which the next message may start.

    >>> place_bytes(24), place_bytes(32)
    (32, 32)
    """
    return -(-length // ALIGNMENT) * ALIGNMENT


def encode_entries(
    indices: Array, values: Array, *, size: int, wire: WireFormat | None, rank: int, step: int
) -> Bytes:
    """Encode entries as a message; rank and step seed random rounding."""
    if wire is None:
        return np.concatenate((indices.view(np.uint8), values.view(np.uint8)))
    message = np.zeros(message_bytes(len(indices), size=size, dtype=values.dtype.name, wire=wire), np.uint8)
    encoded = wire.encode(indices, values, size, step=step, stream=rank)
    message[: len(encoded)] = encoded
    return message


def clip_to_format(values: Array, wire: WireFormat) -> Array:
    """Clip finite values to the range of a rounding format; infinite ones stay.

    >>> from collectives.sparse.codec import WireFormat
    >>> clip_to_format(np.float32([3, 1e6, -np.inf]), WireFormat(values="float16")).tolist()
    [3.0, 65504.0, -inf]
    """
    from collectives.sparse.quantization import LARGEST as LARGEST_FIXED

    most = LARGEST_FLOAT.get(wire.values, LARGEST_FIXED)
    return np.where(np.isfinite(values), np.clip(values, -most, most), values)


def decode_entries(message: Bytes, *, size: int, dtype: str, wire: WireFormat | None) -> tuple[Array, Array]:
    """Return indices and values of a message.

    >>> message = encode_entries(np.int32([2, 5]), np.float32([0.5, -1]), size=9, wire=None, rank=0, step=0)
    >>> indices, values = decode_entries(message, size=9, dtype="float32", wire=None)
    >>> len(message), indices.tolist(), values.tolist()
    (16, [2, 5], [0.5, -1.0])
    """
    if wire is not None:
        return wire.decode(message, universe=size)
    index = np.dtype(index_type(size))
    border = len(message) // (index.itemsize + np.dtype(dtype).itemsize) * index.itemsize
    return message[:border].view(index), message[border:].view(dtype)


class HostEntryArrays(Generic[Line]):
    """The `EntryArrays` of numpy arrays, for any array library."""

    def __init__(self, library: ArrayLibrary[Line]) -> None:
        self._library = library

    def here(self) -> AbstractContextManager[object]:
        return nullcontext()

    def feedback(self, size: int, dtype: str, *, momentum: float) -> ErrorFeedback:
        return ErrorFeedback(size, dtype, momentum=momentum)

    def area(self, nbytes: int) -> Line:
        return self._library.empty((nbytes,), self._library.of(np.empty(0, np.uint8)))

    def values(self, line: Line) -> Array:
        return self._library.values(line)

    def line(self, values: Array) -> Line:
        return self._library.wrapped(values)

    def zeroed(self, line: Line) -> Array:
        if not self._library.by_numpy(line):
            return np.zeros(self._library.shape(line), self._library.dtype(line))
        values = self._library.values(line)
        values.fill(0)
        return values

    def store(self, line: Line, values: Array) -> None:
        if not self._library.by_numpy(line):
            self._library.put(line, values)
            return
        target = self._library.values(line)
        if target.ctypes.data != values.ctypes.data:
            target[...] = values

    def widened(self, array: Line, dtype: str) -> Line:
        library = self._library
        if library.dtype(array) == dtype:
            return library.line(array)
        return library.wrapped(np.ascontiguousarray(library.values(array), dtype).reshape(-1))

    def rounded(self, target: Line, result: Line) -> None:
        with np.errstate(over="ignore"):  # overflow becomes infinite, as in sums of such values
            self._library.put(target, self._library.values(result))

    def bounded(self, values: Array, limit: float = math.inf) -> bool:
        # a NaN makes smallest and largest NaN, for which no comparison holds
        return not values.size or (float(values.min()) > -limit and float(values.max()) < limit)

    def shown(self, values: Array) -> Array:
        shown = np.where(np.isfinite(values), values.dtype.type(0), values)
        shown[np.isnan(shown)] = np.inf
        return shown

    def nonzero(self, values: Array) -> Entries:
        indices = np.flatnonzero(values)
        return indices, values[indices]

    def add(self, total: Array, entries: Entries) -> None:
        indices, values = entries
        total[indices] += values

    def encode(
        self, entries: Entries, *, size: int, wire: WireFormat | None, rank: int, step: int
    ) -> EncodedEntries:
        indices, values = entries
        if wire is None or wire.lossless_for(values.dtype):
            message = encode_entries(indices, values, size=size, wire=wire, rank=rank, step=step)
            return EncodedEntries(message, entries, None)
        # the residual keeps what the format cannot hold
        sent = clip_to_format(values, wire)
        message = encode_entries(indices, sent, size=size, wire=wire, rank=rank, step=step)
        decoded = decode_entries(message, size=size, dtype=values.dtype.name, wire=wire)
        lost = np.subtract(values, decoded[1], where=np.isfinite(values), out=np.zeros_like(values))
        return EncodedEntries(message, decoded, (indices, lost))

    def decode(self, message: Array, *, size: int, dtype: str, wire: WireFormat | None) -> Entries:
        return decode_entries(message, size=size, dtype=dtype, wire=wire)

    def merge(self, parts: Sequence[Entries], k: int) -> tuple[Entries, Entries]:
        return largest_entries(*merge_entries(parts), k)


def merge_entries(parts: Sequence[Entries]) -> Entries:
    """Return the entries of several ranks in ascending order, equal indices summed in the order of the ranks.

    >>> parts = [(np.array([1, 4]), np.float32([1, 2])), (np.array([4, 5]), np.float32([3, 4]))]
    >>> indices, values = merge_entries(parts)
    >>> indices.tolist(), values.tolist()
    ([1, 4, 5], [1.0, 5.0, 4.0])
    """
    indices = np.concatenate([part[0] for part in parts])
    indices.sort()  # np.unique hashes, which takes much longer
    first = np.ones(len(indices), dtype=np.bool_)
    np.not_equal(indices[1:], indices[:-1], out=first[1:])
    indices = indices[first]
    values = np.zeros(len(indices), parts[0][1].dtype)
    for own, added in parts:
        values[np.searchsorted(indices, own)] += added
    return indices, values


def largest_entries(indices: Array, values: Array, k: int) -> tuple[Entries, Entries]:
    """Return the k entries of largest magnitude, ties by lowest index, and the others, both ascending.

    >>> kept, others = largest_entries(np.array([1, 4, 6]), np.float32([2, -3, 2]), 2)
    >>> kept[0].tolist(), others[0].tolist()
    ([1, 4], [6])
    """
    if k >= len(indices):
        return (indices, values), (indices[:0], values[:0])
    # a NaN, as from infinities of both signs, must reach all ranks
    chosen, _ = topk(values, k, nan="largest")
    rest = np.ones(len(indices), dtype=np.bool_)
    rest[chosen] = False
    return (indices[chosen], values[chosen]), (indices[rest], values[rest])
