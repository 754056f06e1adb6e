"""Chosen entries as bytes, in messages of one length on all ranks: they are gathered by an allgather.

Without a wire format a message is all indices and then all values. With one it is what `WireFormat` makes of them,
padded to the most that so many entries can take; so a format that caches keys gains nothing, and is refused.
Where messages lie one after another, each has a place of its own that starts as shards do (`place_bytes`):

    3 entries of a gradient of 1000 float32: 3 indices of 4 bytes, 3 values of 4 bytes   24 bytes
    its place among the messages of all ranks                                            32 bytes, the last 8 unused
    rank r's message, in the gathered line                                               bytes 32 r to 32 r + 24
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
from numpy.typing import NDArray

from collectives.selection.topk import index_type
from collectives.sparse.entry_arrays import Encoded, Entries, EntryArrays, Line
from collectives.sparse.explanation import entries_of
from topoplan.errors import UsageError
from topoplan.plans.tree import ALIGNMENT

if TYPE_CHECKING:
    from collectives.wire.filters import WireFormat

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

LARGEST = {
    "float32": float(np.finfo(np.float32).max),
    "float16": float(np.finfo(np.float16).max),
    "bfloat16": float.fromhex("0x1.fep127"),
}
"""The largest magnitude that a format does not turn into infinity."""


class EntryMessages(Generic[Line]):
    """Messages with entries of the shards of a gradient; all of one shard have one length.

    Parameters
    ----------
    arrays : EntryArrays
    borders : sequence of int
        Where shards begin and end, from 0 to the gradient's size.
    dtype : str
        Of values.
    density : float
        Share of the elements of every shard that is chosen.
    wire : WireFormat or None

    Attributes
    ----------
    entries : tuple of int
        Entries of every shard.
    lengths : tuple of int
        Bytes of a message of every shard.
    """

    def __init__(
        self,
        arrays: EntryArrays[Line],
        borders: Sequence[int],
        *,
        dtype: str,
        density: float,
        wire: WireFormat | None,
    ) -> None:
        self.borders = tuple(borders)
        self.dtype = dtype
        self._arrays = arrays
        self._sizes = tuple(stop - start for start, stop in pairwise(borders))
        # an empty shard has no entries to pack, and its messages no bytes
        self._wires = tuple(wire if size else None for size in self._sizes)
        self.entries = tuple(entries_of(size, density) for size in self._sizes)
        self.lengths = tuple(
            message_bytes(entries, size=size, dtype=dtype, wire=one)
            for entries, size, one in zip(self.entries, self._sizes, self._wires, strict=True)
        )

    @property
    def size(self) -> int:
        """Elements of the gradient."""
        return self.borders[-1]

    def encoded(self, entries: Entries, shard: int, *, rank: int, step: int) -> Encoded:
        """The message of a rank; step and rank are those of random rounding."""
        return self._arrays.encode(
            entries, size=self._sizes[shard], wire=self._wires[shard], rank=shard << 32 | rank, step=step
        )

    def decoded(self, message: Any, shard: int) -> Entries:
        """The entries of a message."""
        return self._arrays.decode(
            message, size=self._sizes[shard], dtype=self.dtype, wire=self._wires[shard]
        )


def message_bytes(entries: int, *, size: int, dtype: str, wire: WireFormat | None) -> int:
    """Bytes of a message with entries of a gradient of so many elements.

    Raises
    ------
    UsageError
        The wire format caches keys.
    """
    if wire is None:
        return entries * (np.dtype(index_type(size)).itemsize + np.dtype(dtype).itemsize)
    if wire.cache_keys:
        raise UsageError(
            "messages of a sparse allreduce have one length, which cached keys could not shorten; "
            "use a wire format without cache_keys"
        )
    return wire.encoded_bytes_at_most(entries, size, dtype, index_dtype=index_type(size))


def place_bytes(length: int) -> int:
    """Bytes of the place of a message of so many, at whose end the next message may start.

    Examples
    --------
    >>> place_bytes(24), place_bytes(32)
    (32, 32)
    """
    return -(-length // ALIGNMENT) * ALIGNMENT


def encode_entries(
    indices: Array, values: Array, *, size: int, wire: WireFormat | None, rank: int, step: int
) -> Bytes:
    """A message; rank and step are those of random rounding."""
    if wire is None:
        return np.concatenate((indices.view(np.uint8), values.view(np.uint8)))
    message = np.zeros(message_bytes(len(indices), size=size, dtype=values.dtype.name, wire=wire), np.uint8)
    encoded = wire.encode(indices, values, size, step=step, stream=rank)
    message[: len(encoded)] = encoded
    return message


def within(values: Array, wire: WireFormat) -> Array:
    """Values as near as a rounding format comes to them: larger ones are cut, infinite ones stay.

    Examples
    --------
    >>> from collectives.wire import WireFormat
    >>> within(np.float32([3, 1e6, -np.inf]), WireFormat(values="float16")).tolist()
    [3.0, 65504.0, -inf]
    """
    from collectives.wire.fixed_point import LARGEST as LARGEST_FIXED

    most = LARGEST.get(wire.values, LARGEST_FIXED)
    return np.where(np.isfinite(values), np.clip(values, -most, most), values)


def decode_entries(message: Bytes, *, size: int, dtype: str, wire: WireFormat | None) -> tuple[Array, Array]:
    """Indices and values of a message.

    Examples
    --------
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
