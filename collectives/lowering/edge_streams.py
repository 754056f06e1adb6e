"""The streams of a transfer table: one for each tree edge, along which the chunks of a shard follow one another.

A table has a row for every chunk; what a back end schedules are the few streams behind the rows. Chunks touch
different elements, so chunk c of a stream waits for chunk c of other streams and for nothing else.

`level` counts the hops that data has behind it: chunk c of a stream can move in step c + level of a pipeline that
starts a new chunk in every step (of shards with fewer chunks in proportion, so that every link carries about the same
in each step), which is the list schedule for back ends with matched global steps (`collectives.backends.stepped`).
Additions at one rank may arrive in one step; they are joined in the order of their rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from collectives.lowering.transfer_table import TransferTable


@dataclass(frozen=True, slots=True)
class Stream:
    """One tree edge in the direction of its data.

    Parameters
    ----------
    number : int
        Position among the streams; also the row of its chunk 0.
    queue : int
        Index into the table's queues.
    source, destination : int
        Ranks.
    shard, stage : int
        Where it stands in the plan.
    add, source_fresh, destination_fresh : bool
        As in `TransferTable`, the same for all chunks.
    start, stop : int
        Elements of the shard.
    chunks : int
        At least 1.
    level : int
        Steps before this one, 0 if it waits for none: one more than what it waits for, but siblings that are added
        at one rank may share a step.
    waits : tuple of int
        Numbers of the streams of which chunk c must have run before chunk c here. They write at the source, or they
        read or write at the destination.
    window : int
        Chunks by which this stream may run ahead of what its destination has used: 2 more than the levels by which
        data that must be joined before it is behind.
    """

    number: int
    queue: int
    source: int
    destination: int
    shard: int
    stage: int
    add: bool
    source_fresh: bool
    destination_fresh: bool
    start: int
    stop: int
    chunks: int
    level: int
    waits: tuple[int, ...]
    window: int


@lru_cache(maxsize=64)
def streams(table: TransferTable) -> tuple[Stream, ...]:
    """The streams of a table, in the order of its rows; kept for the last 64 tables.

    Examples
    --------
    >>> import topoplan
    >>> from collectives import lower
    >>> plan = topoplan.plan(topoplan.load("dgx-2"), "allreduce")
    >>> parts = streams(lower(plan, 16 * 1000, chunk_elements=64))
    >>> len(parts), parts[0].chunks, max(stream.level for stream in parts)
    (480, 16, 1)
    """
    firsts = range(int(np.count_nonzero(table.chunk == 0)))
    columns = (table.queue, table.source, table.destination, table.shard, table.stage)
    ints = list(zip(*(column[: len(firsts)].tolist() for column in columns), strict=True))
    flags = (table.add, table.source_fresh, table.destination_fresh)
    bools = list(zip(*(column[: len(firsts)].tolist() for column in flags), strict=True))
    waits = [tuple(table.before(row).tolist()) for row in firsts]
    level: list[int] = []
    for row, before in enumerate(waits):
        level.append(
            max((level[other] + (not _siblings(ints, bools, row, other)) for other in before), default=0)
        )
    ahead: list[int] = []
    latest: dict[tuple[int, int], int] = {}
    for row, (_, _, destination, shard, _) in enumerate(ints):
        slowest = latest.get((destination, shard), 0)
        ahead.append(2 + max(slowest - level[row], 0))
        latest[destination, shard] = max(slowest, level[row])
    bounds = table.bounds.tolist()
    return tuple(
        Stream(
            number=row,
            queue=queue,
            source=source,
            destination=destination,
            shard=shard,
            stage=stage,
            add=bools[row][0],
            source_fresh=bools[row][1],
            destination_fresh=bools[row][2],
            start=bounds[shard],
            stop=bounds[shard + 1],
            chunks=-(-(bounds[shard + 1] - bounds[shard]) // table.chunk_elements),
            level=level[row],
            waits=waits[row],
            window=ahead[row],
        )
        for row, (queue, source, destination, shard, stage) in enumerate(ints)
    )


def _siblings(ints: list[tuple[int, ...]], bools: list[tuple[bool, ...]], row: int, other: int) -> bool:
    """Whether two rows add at one rank: their data may arrive together."""
    return bools[row][0] and bools[other][0] and ints[row][2] == ints[other][2]


def row_of(table: TransferTable, number: int, chunk: int) -> int:
    """The row of a chunk of a stream.

    Examples
    --------
    >>> import topoplan
    >>> from collectives import lower
    >>> table = lower(topoplan.plan(topoplan.load("dgx-1v"), "allreduce"), 1000, chunk_elements=16)
    >>> row = row_of(table, 5, 2)
    >>> int(table.chunk[row]), bool(table.source[row] == table.source[5])
    (2, True)
    """
    chunks = np.array([stream.chunks for stream in streams(table)])
    earlier = int(np.minimum(chunks, chunk).sum())
    return earlier + int(np.count_nonzero(chunks[:number] > chunk))


def stream_of(table: TransferTable) -> NDArray[np.int64]:
    """The number of the stream of every row, (R,) int64."""
    chunks = np.array([part.chunks for part in streams(table)], dtype=np.int64)
    numbers = [np.flatnonzero(chunks > chunk) for chunk in range(int(chunks.max(initial=0)))]
    return np.concatenate([np.zeros(0, dtype=np.int64), *numbers])
