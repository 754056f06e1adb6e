"""Transfer tables in steps, for back ends whose steps match on all ranks and cost something however little they move.

A *move* is what goes along one tree edge in one step: one chunk as in `collectives.lowering.edge_streams`, or
several that follow one another (``together``). A join can be given a step of its own after the transfers that bring its
operands (``join_steps=1``), so that it runs beside the transfers of the next chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collectives.lowering.edge_streams import stream_of, streams
from collectives.lowering.transfer_table import TransferTable

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """M moves in the order of a table's rows; columns of length M.

    Parameters
    ----------
    row : array
        The first of the rows of the table that a move stands for.
    group : array
        Chunks that go together have one group.
    level : array
        A move runs in step ``group + level``.
    source, destination, shard, start, stop, add, source_fresh, destination_fresh : array
        As in `TransferTable`.
    """

    row: Numbers
    group: Numbers
    level: Numbers
    source: NDArray[np.int32]
    destination: NDArray[np.int32]
    shard: NDArray[np.int32]
    start: Numbers
    stop: Numbers
    add: Flags
    source_fresh: Flags
    destination_fresh: Flags

    @property
    def step(self) -> Numbers:
        """The step of each move."""
        return self.group + self.level

    def __len__(self) -> int:
        """Number of moves."""
        return len(self.row)


def moves_of(table: TransferTable, *, together: int = 1, join_steps: int = 0) -> Moves:
    """The moves of a table.

    Parameters
    ----------
    table : TransferTable
    together : int
        Chunks of every shard in one move; of shards with fewer chunks, in proportion.
    join_steps : int
        0: what a step brings is joined before the next step. 1: while the next step moves; what needs the joined
        data waits one step longer.

    Examples
    --------
    >>> import topoplan
    >>> from collectives import lower
    >>> table = lower(topoplan.plan(topoplan.load("dgx-2"), "allreduce"), 16 * 1600, chunk_elements=160)
    >>> [int(moves_of(table, **how).step.max()) + 1 for how in ({}, {"together": 5}, {"join_steps": 1})]
    [11, 3, 12]
    >>> len(table), len(moves_of(table, together=5))
    (4800, 960)
    """
    stream = stream_of(table)
    chunks = np.array([part.chunks for part in streams(table)], dtype=np.int64)
    level = np.array(_levels(table, join_steps), dtype=np.int64)
    group = table.chunk * int(chunks.max(initial=0)) // chunks[stream] // together
    key = group * len(chunks) + stream
    _, first, length = np.unique(key, return_index=True, return_counts=True)
    last = np.argsort(key, kind="stable")[np.cumsum(length) - 1]
    return Moves(
        row=first,
        group=group[first],
        level=level[stream[first]],
        source=table.source[first],
        destination=table.destination[first],
        shard=table.shard[first],
        start=table.start[first],
        stop=table.stop[last],
        add=table.add[first],
        source_fresh=table.source_fresh[first],
        destination_fresh=table.destination_fresh[first],
    )


def chunks_together(table: TransferTable, itemsize: int, step_bytes: int) -> int:
    """Chunks of each shard that must go together for a step in the middle to move so many bytes.

    Examples
    --------
    >>> import topoplan
    >>> from collectives import lower
    >>> table = lower(topoplan.plan(topoplan.load("dgx-2"), "allreduce"), 16 * 1600, chunk_elements=160)
    >>> chunks_together(table, 4, 10 * 480 * 160), chunks_together(table, 4, 1)
    (3, 1)
    """
    groups = max((part.chunks for part in streams(table)), default=1)
    moved = int((table.stop - table.start).sum()) * itemsize
    return max(1, min(groups, -(-step_bytes * groups // max(moved, 1))))


def _levels(table: TransferTable, join_steps: int) -> list[int]:
    """The level of each stream."""
    parts = streams(table)
    levels: list[int] = []
    for part in parts:
        level = 0
        for number in part.waits:
            before = parts[number]
            siblings = part.add and before.add and part.destination == before.destination
            joined = before.add and before.destination in (part.source, part.destination)
            level = max(level, levels[number] + (0 if siblings else 1 + (join_steps if joined else 0)))
        levels.append(level)
    return levels
