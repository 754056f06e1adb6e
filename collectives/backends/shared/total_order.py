"""The one order in which all ranks of a host work, and each rank's own part of it.

Rows stand in the order of their pipeline step (`edge_streams`). A row between hosts is two operations, sending and
receiving; an input that others read is put into shared memory by an operation of its own, just before it is read
first. All that a rank adds to one value is one operation, in the place of the last row, where nothing of it comes from
another host. Every operation waits only for operations with smaller keys, so the ranks cannot wait for each other in a
circle, whatever the slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collectives.backends.shared.chunk_values import Instances
from collectives.lowering.edge_streams import stream_of, streams
from collectives.lowering.transfer_table import TransferTable
from collectives.peers.control_page import Placement

Numbers = NDArray[np.int64]

NEVER = np.iinfo(np.int64).max
"""Key of an operation that does not exist."""

SPREAD = 2
"""Chunks that begin between two levels of a tree, so that ranks need not work in step."""


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Keys and positions of the operations of the ranks on one host; R rows, I instances.

    Parameters
    ----------
    publish_key : (I,) int64
        Key of the operation that puts an input into shared memory; `NEVER` where nobody needs it there.
    send_key, join_key : (R,) int64
        Key of the sending of a row, and of its joining at the destination, which rows of one operation share;
        meaningless where there is none.
    publish_position : (I,) int64
    join_position : (R,) int64
        How many operations its rank has done when this one is done; 0 where it is not done on this host.
    own_keys : (own operations,) int64
        Keys of this rank's operations, ascending: 3 s is a publication for row ``rows[s]``, 3 s + 1 its sending and
        3 s + 2 its joining, or that of all rows that share it.
    rows : (R,) int64
        The rows in order.
    """

    publish_key: Numbers
    send_key: Numbers
    join_key: Numbers
    publish_position: Numbers
    join_position: Numbers
    own_keys: Numbers
    rows: Numbers

    def ready(self, held: Instances) -> Numbers:
        """How many operations its rank has done when an instance is complete; (I,) int64, 0 on other hosts."""
        position = self.publish_position.copy()
        done = held.last & held.made
        position[held.writes[done]] = self.join_position[done]
        return position


def order_of(table: TransferTable, held: Instances, placement: Placement) -> Order:
    """The order of a table's operations."""
    hosts = np.array(placement.hosts)
    mine = hosts[placement.rank]
    sequence = np.empty(len(table), dtype=np.int64)
    rows = np.argsort(_steps(table), kind="stable")
    sequence[rows] = np.arange(len(table))
    send_key, join_key = 3 * sequence + 1, 3 * sequence + 2
    publish_key = np.full(len(held.rank), NEVER)
    from_input = held.shared & held.is_input[held.reads]
    np.minimum.at(publish_key, held.reads[from_input], 3 * sequence[from_input])

    from_afar = np.zeros(len(held.rank), dtype=np.bool_)
    from_afar[held.writes[~held.shared]] = True
    together = held.made & ~from_afar[held.writes]
    last_key = np.zeros(len(held.rank), dtype=np.int64)
    np.maximum.at(last_key, held.writes[together], join_key[together])
    ends = held.made & (~together | (join_key == last_key[held.writes]))
    join_key[together] = last_key[held.writes[together]]

    publishing = np.flatnonzero((publish_key < NEVER) & (hosts[held.rank] == mine))
    sending = np.flatnonzero(~held.shared & (hosts[table.source] == mine))
    joining = np.flatnonzero(ends & (hosts[table.destination] == mine))
    rank = np.concatenate((held.rank[publishing], table.source[sending], table.destination[joining]))
    key = np.concatenate((publish_key[publishing], send_key[sending], join_key[joining]))
    sorting = np.lexsort((key, rank))
    place = np.arange(len(rank))
    position = np.empty(len(rank), dtype=np.int64)
    position[sorting] = place - np.searchsorted(rank[sorting], rank[sorting]) + 1
    publish_position = np.zeros(len(held.rank), dtype=np.int64)
    publish_position[publishing] = position[: len(publishing)]
    join_position = np.zeros(len(table), dtype=np.int64)
    join_position[joining] = position[len(publishing) + len(sending) :]
    of_last = np.zeros(len(held.rank), dtype=np.int64)
    np.maximum.at(of_last, held.writes[joining], join_position[joining])
    join_position[together] = of_last[held.writes[together]]
    return Order(
        publish_key=publish_key,
        send_key=send_key,
        join_key=join_key,
        publish_position=publish_position,
        join_position=join_position,
        own_keys=np.sort(key[rank == placement.rank]),
        rows=rows,
    )


def _steps(table: TransferTable) -> Numbers:
    """The step of every row; a step takes one new chunk, of the shards in turn in proportion to their lengths."""
    if not len(table):
        return np.zeros(0, dtype=np.int64)
    chunks = -(-np.diff(table.bounds) // table.chunk_elements)
    shard = np.repeat(np.arange(len(chunks)), chunks)
    chunk = np.arange(len(shard)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
    turn = np.empty(len(shard), dtype=np.int64)
    turn[np.lexsort((shard, (2 * chunk + 1) / (2 * chunks[shard])))] = np.arange(len(shard))
    first = np.cumsum(chunks) - chunks
    level = np.array([part.level for part in streams(table)], dtype=np.int64)
    steps: Numbers = turn[first[table.shard] + table.chunk] + SPREAD * level[stream_of(table)]
    return steps
