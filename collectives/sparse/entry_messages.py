"""The messages of an exchange of entries: how many entries each shard gives, and their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collectives.sparse.explanation import entries_of
from collectives.sparse.pairs import decode_entries, encode_entries, message_bytes

if TYPE_CHECKING:
    from collectives.wire.filters import WireFormat

Array = NDArray[Any]
Entries = tuple[Array, Array]
"""Indices, ascending, and values."""


class EntryMessages:
    """Messages with entries of the shards of a gradient; all of one shard have one length.

    Parameters
    ----------
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
        self, borders: Sequence[int], dtype: str, *, density: float, wire: WireFormat | None
    ) -> None:
        self.borders = tuple(borders)
        self.dtype = dtype
        self._wire = wire
        self._sizes = tuple(stop - start for start, stop in pairwise(borders))
        self.entries = tuple(entries_of(size, density) for size in self._sizes)
        self.lengths = tuple(
            message_bytes(entries, size=size, dtype=dtype, wire=wire) if size else 0
            for entries, size in zip(self.entries, self._sizes, strict=True)
        )

    @property
    def size(self) -> int:
        """Elements of the gradient."""
        return self.borders[-1]

    def encoded(
        self, entries: Entries, shard: int, *, rank: int, step: int
    ) -> tuple[NDArray[np.uint8], Entries]:
        """A message, and the entries as it tells them: a wire format may round values."""
        size = self._sizes[shard]
        if not size:
            return np.empty(0, np.uint8), entries
        stream = shard << 32 | rank
        message = encode_entries(*entries, size=size, wire=self._wire, rank=stream, step=step)
        rounds = self._wire is not None and not self._wire.lossless_for(self.dtype)
        return message, self.decoded(message, shard) if rounds else entries

    def decoded(self, message: NDArray[np.uint8], shard: int) -> Entries:
        """The entries of a message."""
        if not self._sizes[shard]:
            return np.empty(0, np.int32), np.empty(0, self.dtype)
        return decode_entries(message, size=self._sizes[shard], dtype=self.dtype, wire=self._wire)
