"""The tables that a kernel works through: items of work, what arrives for each, and tiles.

An *item* writes one chunk: ``destination = own``, joined with its arrivals one after another. An item without
arrivals is a copy. Chunks lie in numbered buffers, at byte offsets; the addresses of the buffers are a table of their
own, so the same work runs on other memory. A *tile* is the part of an item that a block of threads does at a time.
A *launch* is a run of items that do not touch what another of them writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

THREADS = 256
"""Threads of a block; as in ``join.cu``."""

TILE_BYTES = THREADS * 4 * 16
"""Bytes of a tile: four vectors of 16 bytes for every thread; as in ``join.cu``."""

ITEM = np.dtype(
    [
        ("destination", np.int64),
        ("own", np.int64),
        ("count", np.int64),
        ("destination_buffer", np.int32),
        ("own_buffer", np.int32),
        ("first", np.int32),
        ("arriving", np.int32),
    ]
)
"""Byte offsets and buffers of what is written and of the first operand, elements, and the item's arrivals."""

ARRIVAL = np.dtype([("offset", np.int64), ("buffer", np.int64)])
TILE = np.dtype([("item", np.int32), ("number", np.int32)])


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Rows of a transfer table that one process joins or copies; R rows, columns of length R.

    Parameters
    ----------
    step : array
        Launches come in ascending steps.
    rank, start, count : array
        Where the row leads: rows of one step, rank and start are joined into one item, in their order.
    add : bool array
        Join, or store.
    destination, own, arriving : (array, array)
        Buffers and byte offsets of what is written, of the rank's own operand, and of what arrives.
    """

    step: Numbers
    rank: Numbers
    start: Numbers
    count: Numbers
    add: NDArray[np.bool_]
    destination: tuple[Numbers, Numbers]
    own: tuple[Numbers, Numbers]
    arriving: tuple[Numbers, Numbers]


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What the kernels do in each of some launches.

    Parameters
    ----------
    items : (I,) array of `ITEM`
    arrivals : (A,) array of `ARRIVAL`
    tiles : (T,) array of `TILE`
        Tiles of one launch stand together.
    steps : tuple of int
        The step of each launch, ascending.
    ends : tuple of int
        Launch i does the tiles up to ``ends[i]`` that no earlier one does.
    """

    items: NDArray[np.void]
    arrivals: NDArray[np.void]
    tiles: NDArray[np.void]
    steps: tuple[int, ...]
    ends: tuple[int, ...]

    def traffic(self, itemsize: int) -> int:
        """Bytes that are read and written: an item reads its own operand and every arrival, and writes once."""
        return int((self.items["count"] * (2 + self.items["arriving"])).sum()) * itemsize


def work_of(chunks: Chunks, itemsize: int) -> Work:
    """Put rows together into items, and cut the items into tiles.

    Parameters
    ----------
    chunks : Chunks
    itemsize : int
        Bytes of an element.

    Examples
    --------
    Two siblings that arrive in step 0 are joined by one item of two tiles, and copied on in step 1:

    >>> column = lambda *values: np.array(values)
    >>> add = column(True, True, False)
    >>> far, near, slots = (column(0, 0, 4), column(0, 0, 0)), (column(1, 1, 1), column(0, 0, 0)), column(0, 8192, 0)
    >>> rows = Chunks(column(0, 0, 1), column(5, 5, 6), column(0, 0, 0), column(5000, 5000, 5000), add, far, near,
    ...               (column(2, 2, 0), slots))
    >>> work = work_of(rows, 4)
    >>> work.items["arriving"].tolist(), work.arrivals["offset"].tolist(), work.steps, work.ends
    ([2, 0], [0, 8192], (0, 1), (2, 4))
    >>> work.traffic(4) == (4 + 2) * 5000 * 4
    True
    """
    rows = np.lexsort((np.arange(len(chunks.step)), chunks.start, chunks.rank, chunks.step))
    step, rank, start, add = (column[rows] for column in (chunks.step, chunks.rank, chunks.start, chunks.add))
    leads = np.ones(len(rows), dtype=np.bool_)
    leads[1:] = (np.diff(step) != 0) | (np.diff(rank) != 0) | (np.diff(start) != 0)
    firsts = np.flatnonzero(leads)
    lead = rows[firsts]

    items = np.zeros(len(lead), dtype=ITEM)
    stores = ~add[firsts]
    items["destination_buffer"], items["destination"] = (column[lead] for column in chunks.destination)
    for name, own, arriving in zip(("own_buffer", "own"), chunks.own, chunks.arriving, strict=True):
        items[name] = np.where(stores, arriving[lead], own[lead])
    items["count"] = chunks.count[lead]
    items["arriving"] = np.add.reduceat(add.astype(np.int64), firsts) if len(firsts) else 0
    items["first"] = np.cumsum(items["arriving"]) - items["arriving"]

    joined = rows[add]
    arrivals = np.zeros(len(joined), dtype=ARRIVAL)
    arrivals["buffer"], arrivals["offset"] = (column[joined] for column in chunks.arriving)

    per_item = -(-items["count"] // (TILE_BYTES // itemsize))
    before = np.cumsum(per_item) - per_item
    tiles = np.zeros(int(per_item.sum()), dtype=TILE)
    tiles["item"] = np.repeat(np.arange(len(items)), per_item)
    tiles["number"] = np.arange(len(tiles)) - np.repeat(before, per_item)

    steps, places = np.unique(step[firsts], return_index=True)
    ends = np.append(before, len(tiles))[np.append(places[1:], len(items))] if len(steps) else steps
    return Work(items, arrivals, tiles, tuple(steps.tolist()), tuple(ends.tolist()))
