"""Where what moves lies: in what a rank has given, in its result, or in scratch of the back end.

Elements that a rank has not received anything for are read where it gave them. What it receives goes into its result
where that covers them, and else into scratch, which each shard of a rank uses as a ring: a group of chunks takes the
place of the group before it that nobody needs any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.backends.backend import RankArrays
from collectives.backends.stepped.moves import Flags, Moves, Numbers
from collectives.lowering.transfer_table import TransferTable

Place = tuple[Numbers, Numbers]
"""Buffer and byte offset for every move."""

VECTOR = 16
"""Elements in scratch lie as those of whole buffers do, counted from here, so that kernels can use vectors."""


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Places of M moves; buffer -1 where the rank lives in another process.

    Rank number i of this process has buffers 2 i (given) and 2 i + 1 (result); scratch is the last one.

    Parameters
    ----------
    source : Place
        What is moved.
    own : Place
        What the destination has before.
    target : Place
        Where the destination puts what it has afterwards.
    scratch : int
        Bytes of scratch.
    """

    source: Place
    own: Place
    target: Place
    scratch: int


@dataclass(frozen=True, slots=True, eq=False)
class _Rings:
    """Scratch of all ranks and shards: rings of slots, each slot for one group of chunks.

    Parameters
    ----------
    base, depth : (ranks, shards) arrays
        Where a ring begins, in bytes, and its number of slots.
    slot : (shards,) array
        Bytes of a slot.
    total : int
        Bytes of all rings.
    """

    base: Numbers
    depth: Numbers
    slot: Numbers
    total: int

    def offset(self, moves: Moves, rank: NDArray[np.int32], itemsize: int) -> Numbers:
        """Bytes at which each move lies in the ring of this rank; of no use where it has none."""
        turn = moves.group % self.depth[rank, moves.shard]
        found: Numbers = self.base[rank, moves.shard] + turn * self.slot[moves.shard]
        return found + moves.start * itemsize % VECTOR


def places_of(table: TransferTable, moves: Moves, memory: Sequence[RankArrays[Any]], itemsize: int) -> Places:
    """Find the places of all moves.

    Parameters
    ----------
    table : TransferTable
    moves : Moves
        Of that table.
    memory : sequence of RankArrays
        Only ``rank``, ``given`` and ``block`` matter.
    itemsize : int
        Bytes of an element.
    """
    number = np.full(table.ranks, -1, dtype=np.int64)
    given = np.array([(0, 1, 0)] * table.ranks, dtype=np.int64)
    block = np.zeros((table.ranks, 2), dtype=np.int64)
    for i, one in enumerate(memory):
        number[one.rank] = i
        given[one.rank] = one.given[0], *(one.given[2:] or (1, 0))
        block[one.rank] = one.block
    rings = _rings(table, moves, number, block, itemsize)

    def place(rank: NDArray[np.int32], fresh: Flags) -> Place:
        inside = _inside(moves, block, rank)
        buffer = np.where(fresh, 2 * number[rank], np.where(inside, 2 * number[rank] + 1, 2 * len(memory)))
        start, period, skip = given[rank].T
        first = np.where(fresh, start + moves.start // period * skip, block[rank, 0])
        offset = np.where(
            fresh | inside, (moves.start - first) * itemsize, rings.offset(moves, rank, itemsize)
        )
        return np.where(number[rank] < 0, -1, buffer), offset

    never = np.zeros(len(moves), dtype=np.bool_)
    return Places(
        source=place(moves.source, moves.source_fresh),
        own=place(moves.destination, moves.destination_fresh),
        target=place(moves.destination, never),
        scratch=rings.total,
    )


def slot_bytes(elements: Numbers, itemsize: int) -> Numbers:
    """Bytes of a slot for so many elements, wherever in a vector of 16 bytes the first one lies."""
    return -(-elements * itemsize // VECTOR) * VECTOR + VECTOR


def _rings(table: TransferTable, moves: Moves, number: Numbers, block: Numbers, itemsize: int) -> _Rings:
    shards = len(table.bounds) - 1
    longest = np.zeros(shards, dtype=np.int64)
    np.maximum.at(longest, moves.shard, moves.stop - moves.start)
    slot = slot_bytes(longest, itemsize)

    # A slot is first written at the lowest level, and used last at the highest; the transfers of the step that
    # follows may run beside the joins of that one.
    never = np.iinfo(np.int64).max
    first = np.full((table.ranks, shards), never)
    last = np.full((table.ranks, shards), -1, dtype=np.int64)
    outside = (number[moves.destination] >= 0) & ~_inside(moves, block, moves.destination)
    np.minimum.at(first, (moves.destination[outside], moves.shard[outside]), moves.level[outside])
    np.maximum.at(last, (moves.destination, moves.shard), moves.level)
    read = ~moves.source_fresh
    np.maximum.at(last, (moves.source[read], moves.shard[read]), moves.level[read])
    used = first < never
    groups = int(moves.group.max(initial=0)) + 1
    depth = np.where(used, np.minimum(last - np.where(used, first, 0) + 2, groups), 1)
    sizes = np.where(used, depth * slot, 0).reshape(-1)
    base = (np.cumsum(sizes) - sizes).reshape(table.ranks, shards)
    return _Rings(base, depth, slot, int(sizes.sum()))


def _inside(moves: Moves, block: Numbers, rank: NDArray[np.int32]) -> Flags:
    """Whether what moves is part of the rank's result: a shard is so as a whole or not at all."""
    within: Flags = (block[rank, 0] <= moves.start) & (moves.stop <= block[rank, 1])
    return within
