"""The messages of an exchange of entries: how many entries each shard gives, and their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from collectives.sparse.entry_arrays import Encoded, Entries, EntryArrays
from collectives.sparse.explanation import entries_of
from collectives.sparse.pairs import message_bytes

if TYPE_CHECKING:
    from collectives.wire.filters import WireFormat


class EntryMessages:
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
        arrays: EntryArrays,
        borders: Sequence[int],
        dtype: str,
        *,
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
