"""Moves single chunks between the memories of ranks, in any order that the table allows.

Where a rank gets no result for a chunk, what passes through it is kept in scratch memory from the first transfer that
writes it to the last one that needs it; then the next such chunk takes the place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.backends.backend import RankArrays
from collectives.lowering.edge_streams import Stream


class ChunkMover:
    """The memories of all ranks during one collective.

    Parameters
    ----------
    parts : tuple of Stream
        All streams of the table.
    memory : sequence of RankArrays
        One for each rank.
    combine : numpy ufunc
        Joins what a rank has with what arrives.
    chunk_elements : int
    """

    def __init__(
        self,
        parts: tuple[Stream, ...],
        memory: Sequence[RankArrays[NDArray[Any]]],
        combine: np.ufunc,
        *,
        chunk_elements: int,
    ) -> None:
        self._memory = memory
        self._combine = combine
        self._chunk = chunk_elements
        self._uses: Counter[tuple[int, int]] = Counter()
        for part in parts:
            self._uses[part.destination, part.shard] += 1
            if not part.source_fresh:
                self._uses[part.source, part.shard] += 1
        self._held: dict[tuple[int, int], NDArray[Any]] = {}
        self._left: dict[tuple[int, int], int] = {}
        self._free: list[NDArray[Any]] = []

    def passing(self, part: Stream) -> bool:
        """Whether what a stream brings is kept in scratch memory."""
        return not self._memory[part.destination].holds(part.start, part.stop)

    def move(self, part: Stream, start: int, stop: int) -> None:
        """Do the transfer of elements ``start`` to ``stop``, one chunk of a stream."""
        arriving = self._elements(part.source, part.source_fresh, start, stop, part.shard)
        target = self._elements(part.destination, False, start, stop, part.shard)
        if part.add:
            own = (
                self._elements(part.destination, True, start, stop, part.shard)
                if part.destination_fresh
                else target
            )
            with np.errstate(all="ignore"):
                self._combine(own, arriving, out=target)
        else:
            target[...] = arriving
        self._used(part.destination, start)
        if not part.source_fresh:
            self._used(part.source, start)

    def _elements(self, rank: int, fresh: bool, start: int, stop: int, shard: int) -> NDArray[Any]:
        one = self._memory[rank]
        if fresh:
            return one.source[start - one.given[0] : stop - one.given[0]]
        if one.holds(start, stop):
            return one.result[start - one.block[0] : stop - one.block[0]]
        if (rank, start) not in self._held:
            place = self._free.pop() if self._free else np.empty(self._chunk, one.source.dtype)
            self._held[rank, start] = place
            self._left[rank, start] = self._uses[rank, shard]
        return self._held[rank, start][: stop - start]

    def _used(self, rank: int, start: int) -> None:
        """Note that one of the transfers that need a chunk is done."""
        if (rank, start) in self._held:
            self._left[rank, start] -= 1
            if not self._left[rank, start]:
                del self._left[rank, start]
                self._free.append(self._held.pop((rank, start)))
