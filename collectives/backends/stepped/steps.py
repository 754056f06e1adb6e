"""The step of every row for back ends that run a table as matched steps, and how many chunks one step takes.

As `collectives.streams.wavefront`, with two additions. Steps of a GPU cost microseconds however little they move, so
several chunks can go *together*. And a join can be given a step of its own after the transfers that bring its operands
(``join_steps=1``), so that it runs beside the transfers of the next chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collectives.streams import stream_of, streams
from collectives.transfer_table import TransferTable


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """When each of R rows runs: in step ``group + level``.

    Parameters
    ----------
    group : (R,) int64
        Chunks that go together have one group; of every shard they are consecutive.
    level : (R,) int64
        Steps between the group's first and this row.
    """

    group: NDArray[np.int64]
    level: NDArray[np.int64]

    @property
    def step(self) -> NDArray[np.int64]:
        """The step of each row, (R,)."""
        return self.group + self.level


def steps_of(table: TransferTable, *, together: int = 1, join_steps: int = 0) -> Steps:
    """The steps of a table's rows.

    Parameters
    ----------
    table : TransferTable
    together : int
        Chunks of every shard in one step; of shards with fewer chunks, in proportion.
    join_steps : int
        0: what a step brings is joined before the next step. 1: while the next step moves; what needs the joined
        data waits one step longer.

    Examples
    --------
    >>> import topoplan
    >>> from collectives import lower
    >>> table = lower(topoplan.plan(topoplan.load("dgx-2"), "allreduce"), 16 * 1000, chunk_elements=100)
    >>> [int(steps_of(table, **how).step.max()) + 1 for how in ({}, {"together": 5}, {"join_steps": 1})]
    [11, 3, 12]
    """
    parts = streams(table)
    if not parts:
        return Steps(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    levels: list[int] = []
    for part in parts:
        after = [0]
        for number in part.waits:
            before = parts[number]
            siblings = part.add and before.add and part.destination == before.destination
            joined = before.add and before.destination in (part.source, part.destination)
            after.append(levels[number] + (0 if siblings else 1 + (join_steps if joined else 0)))
        levels.append(max(after))
    stream = stream_of(table)
    chunks = np.array([part.chunks for part in parts], dtype=np.int64)
    group = table.chunk * int(chunks.max()) // chunks[stream] // together
    return Steps(group, np.array(levels, dtype=np.int64)[stream])


def chunks_together(table: TransferTable, itemsize: int, step_bytes: int) -> int:
    """Chunks of each shard that must go together for a step in the middle to move so many bytes.

    Examples
    --------
    >>> import topoplan
    >>> from collectives import lower
    >>> table = lower(topoplan.plan(topoplan.load("dgx-2"), "allreduce"), 16 * 1000, chunk_elements=100)
    >>> chunks_together(table, 4, 10 * 480 * 100), chunks_together(table, 4, 1)
    (3, 1)
    """
    groups = max((part.chunks for part in streams(table)), default=1)
    moved = int((table.stop - table.start).sum()) * itemsize
    return max(1, min(groups, -(-step_bytes * groups // max(moved, 1))))
