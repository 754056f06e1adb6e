"""Where the chunk of every row lies: in what a rank has given, in its result, or in scratch of the back end.

Elements that a rank has not received anything for are read where it gave them. What it receives goes into its result
where that covers the chunk, and else into scratch, which each shard of a rank uses as a ring: a group of chunks takes
the place of the group before it that nobody needs any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.backends.backend import RankArrays
from collectives.backends.stepped.steps import Steps
from collectives.transfer_table import TransferTable

Numbers = NDArray[np.int64]
Place = tuple[Numbers, Numbers]
"""Buffer and byte offset of every row."""

VECTOR = 16
"""Chunks in scratch lie as those in the result do, counted from here, so that kernels can use whole vectors."""


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Places of the chunks of R rows; buffer -1 where the rank lives in another process.

    Rank number i of this process has buffers 2 i (given) and 2 i + 1 (result); scratch is the last one.

    Parameters
    ----------
    source : Place
        What the row moves.
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


def places_of(table: TransferTable, memory: Sequence[RankArrays[Any]], steps: Steps, itemsize: int) -> Places:
    """Find the places of all rows.

    Parameters
    ----------
    table : TransferTable
    memory : sequence of RankArrays
        Only ``rank``, ``given`` and ``block`` matter.
    steps : Steps
    itemsize : int
        Bytes of an element.
    """
    number = np.full(table.ranks, -1, dtype=np.int64)
    given = np.zeros(table.ranks, dtype=np.int64)
    block = np.zeros((table.ranks, 2), dtype=np.int64)
    for i, one in enumerate(memory):
        number[one.rank] = i
        given[one.rank] = one.given[0]
        block[one.rank] = one.block
    rings = _rings(table, steps, number, block, itemsize)

    def place(rank: NDArray[np.int32], fresh: NDArray[np.bool_]) -> Place:
        inside = _inside(table, block, rank)
        buffer = np.where(fresh, 2 * number[rank], np.where(inside, 2 * number[rank] + 1, 2 * len(memory)))
        first = np.where(fresh, given[rank], block[rank, 0])
        offset = np.where(fresh | inside, (table.start - first) * itemsize, rings.offset(rank))
        return np.where(number[rank] < 0, -1, buffer), offset

    never = np.zeros(len(table), dtype=np.bool_)
    return Places(
        source=place(table.source, table.source_fresh),
        own=place(table.destination, table.destination_fresh),
        target=place(table.destination, never),
        scratch=rings.total,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Rings:
    """Scratch of all ranks and shards: rings of slots, each slot for one group of chunks.

    Parameters
    ----------
    shard, group, within : (R,) arrays
        Of each row; ``within`` counts bytes from the start of the slot.
    base, depth : (ranks, shards) arrays
        Where a ring begins, in bytes, and its number of slots.
    slot : (shards,) array
        Bytes of a slot.
    total : int
        Bytes of all rings.
    """

    shard: NDArray[np.int32]
    group: Numbers
    within: Numbers
    base: Numbers
    depth: Numbers
    slot: Numbers
    total: int

    def offset(self, rank: NDArray[np.int32]) -> Numbers:
        """Bytes at which each row's chunk lies in the ring of this rank; of no use where it has none."""
        turn = self.group % self.depth[rank, self.shard]
        found: Numbers = self.base[rank, self.shard] + turn * self.slot[self.shard] + self.within
        return found


def _rings(table: TransferTable, steps: Steps, number: Numbers, block: Numbers, itemsize: int) -> _Rings:
    shards = len(table.bounds) - 1
    groups = int(steps.group.max(initial=0)) + 1
    start = np.full((shards, groups), table.count, dtype=np.int64)
    stop = np.zeros((shards, groups), dtype=np.int64)
    np.minimum.at(start, (table.shard, steps.group), table.start)
    np.maximum.at(stop, (table.shard, steps.group), table.stop)
    longest = np.maximum(stop - start, 0).max(axis=1, initial=0) * itemsize
    slot = -(-longest // VECTOR) * VECTOR + VECTOR

    # A group's slot is written first by what comes in at the lowest level, and used last at the highest; the
    # transfers of a step may run beside the joins of the step before.
    outside = (number[table.destination] >= 0) & ~_inside(table, block, table.destination)
    first = np.full((table.ranks, shards), np.iinfo(np.int64).max)
    last = np.full((table.ranks, shards), -1, dtype=np.int64)
    np.minimum.at(first, (table.destination[outside], table.shard[outside]), steps.level[outside])
    np.maximum.at(last, (table.destination, table.shard), steps.level)
    read = ~table.source_fresh
    np.maximum.at(last, (table.source[read], table.shard[read]), steps.level[read])
    used = first < np.iinfo(np.int64).max
    depth = np.where(used, np.minimum(last - np.where(used, first, 0) + 2, groups), 1)
    sizes = np.where(used, depth * slot, 0).reshape(-1)
    base = (np.cumsum(sizes) - sizes).reshape(table.ranks, shards)

    begun = start[table.shard, steps.group]
    within = begun * itemsize % VECTOR + (table.start - begun) * itemsize
    return _Rings(table.shard, steps.group, within, base, depth, slot, int(sizes.sum()))


def _inside(table: TransferTable, block: Numbers, rank: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Whether each row's chunk is part of the rank's result."""
    within: NDArray[np.bool_] = (block[rank, 0] <= table.start) & (table.stop <= block[rank, 1])
    return within
