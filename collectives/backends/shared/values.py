"""Find the values that ranks hold during a collective, the order in which they are made, and their slots.

A *value* is the content that one rank holds of one shard between two visible changes: its input, a sum, a copy.
Additions without a reader in between make one value. Chunks of a shard are equal in this, so values belong to streams;
`instances` spreads them over the chunks. A copy between ranks of one host moves nothing: its readers read the original.
Only a copy that a rank sends to another host, from which MPI reads it, or adds to is made.

Rows stand in the order of their pipeline step. A row between hosts is two operations, sending and receiving; an input
that others read is put into shared memory just before its first reader. All additions of a rank to one value without a
part from another host are one operation, at the place of the last row. Operations wait only for smaller keys, so the
ranks cannot deadlock, whatever the slots.

Results lie element for element in memory for one whole buffer; each rank copies them from there. Behind it each rank
has a ring of slots of one chunk each; a slot is used again when all readers of its last value have read it. Rings are
as short as the common order allows, plus `AHEAD` slots: few slots mean that values are read while they are in the
cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collectives.peers.control_page import HostPlacement
from collectives.tables.lowering import cumulative
from collectives.tables.transfer_table import EdgeStream, TransferTable, stream_of, streams

Numbers = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class RankValue:
    """The content that a rank holds of a shard for a while.

    - `before`: number of the value that the first addition starts from; -1 for inputs and copies.
    - `writers`: streams that make it, in order: one copy or some additions; none for an input.
    - `readers`: streams that carry it to other ranks.
    - `after`: number of the value that replaces it; -1 if it is the last of its rank and shard.
    """

    rank: int
    shard: int
    before: int
    writers: list[int]
    readers: list[int]
    after: int = -1


def values(table: TransferTable) -> tuple[RankValue, ...]:
    """Return the values of a collective.

    Broadcast along a chain of two: the root's input, and the copy that the other rank keeps.

    >>> import topoplan
    >>> from collectives import lower
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "broadcast", gpus=[4, 7])
    >>> [(value.rank, value.writers, value.readers) for value in values(lower(plan, 160, chunk_elements=64))]
    [(0, [], [0]), (1, [0], [])]
    """
    found: list[RankValue] = []
    current: dict[tuple[int, int], int] = {}

    def held(rank: int, shard: int) -> int:
        if (rank, shard) not in current:
            current[rank, shard] = len(found)
            found.append(RankValue(rank, shard, -1, [], []))
        return current[rank, shard]

    for stream in streams(table):
        found[held(stream.source, stream.shard)].readers.append(stream.number)
        place = (stream.destination, stream.shard)
        previous = held(*place) if stream.add else current.get(place, -1)
        if stream.add and found[previous].writers and not found[previous].readers:
            found[previous].writers.append(stream.number)
            continue
        current[place] = len(found)
        found.append(RankValue(*place, previous if stream.add else -1, [stream.number], []))
        if previous >= 0:
            found[previous].after = current[place]
    return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class ValueInstances:
    """One instance of a value for each chunk of its shard; I instances, R rows.

    - `rank`: (I,), the rank that holds it. `is_input`: (I,), it is the rank's input.
    - `shared`: (R,), source and destination of the row are on one host.
    - `made`: (R,), the row does anything; else the ranks of the host see what it would copy.
    - `reads`, `writes`: (R,), the instance that a row carries away, and the one that it makes, adds to, or would copy.
    - `own`: (R,), the instance that an addition starts from; -1 if the row copies.
    - `first`, `last`: (R,), the row begins the instance, and completes it.
    - `final`: (R,), the row completes the last value of its destination.
    """

    rank: Numbers
    is_input: NDArray[np.bool_]
    shared: NDArray[np.bool_]
    made: NDArray[np.bool_]
    reads: Numbers
    writes: Numbers
    own: Numbers
    first: NDArray[np.bool_]
    last: NDArray[np.bool_]
    final: NDArray[np.bool_]


def instances(table: TransferTable, hosts: Sequence[int]) -> ValueInstances:
    """Return the instances of a table; `hosts` has the number of each rank's host.

    >>> import topoplan
    >>> from collectives import lower
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "broadcast", gpus=[4, 7])
    >>> table = lower(plan, 160, chunk_elements=64)
    >>> held = instances(table, hosts=(0, 1))
    >>> held.reads.tolist(), held.writes.tolist(), held.rank.tolist()
    ([0, 1, 2], [3, 4, 5], [0, 0, 0, 1, 1, 1])
    >>> instances(table, hosts=(0, 0)).writes.tolist()
    [0, 1, 2]
    """
    known = values(table)
    origin = _origins(known, streams(table), hosts)
    parts = streams(table)
    chunks = -(-np.diff(table.bounds) // table.chunk_elements)
    repeats = chunks[_column([value.shard for value in known])]
    offsets = cumulative(repeats)
    value_of = np.repeat(np.arange(len(known)), repeats)

    stream = stream_of(table)
    read_by_stream = np.full(len(parts), -1)
    written_by_stream = np.full(len(parts), -1)
    for number, value in enumerate(known):
        read_by_stream[value.readers] = origin[number]
        written_by_stream[value.writers] = number
    first_of_value = _column([value.writers[0] if value.writers else -1 for value in known])
    last_of_value = _column([value.writers[-1] if value.writers else -1 for value in known])
    written = written_by_stream[stream]
    first = first_of_value[written] == stream
    last = last_of_value[written] == stream
    before = _column([origin[value.before] if value.before >= 0 else -1 for value in known])[written]
    writes = offsets[_column(origin)[written]] + table.chunk
    host = np.array(hosts)
    own = np.where(before >= 0, offsets[before] + table.chunk, -1)
    return ValueInstances(
        rank=_column([value.rank for value in known])[value_of],
        is_input=_column([not value.writers for value in known]).astype(np.bool_)[value_of],
        shared=host[table.source] == host[table.destination],
        made=_column(origin)[written] == written,
        reads=offsets[read_by_stream[stream]] + table.chunk,
        writes=writes,
        own=np.where(first, own, np.where(table.add, writes, -1)),
        first=first,
        last=last,
        final=last & (_column([value.after for value in known])[written] < 0),
    )


def _origins(known: tuple[RankValue, ...], parts: tuple[EdgeStream, ...], hosts: Sequence[int]) -> list[int]:
    """Return for each value the one that its readers read: itself, or the original of a copy."""
    origin = list(range(len(known)))
    source = {stream: number for number, value in enumerate(known) for stream in value.readers}
    # what a value is copied from was made by an earlier stream
    for number in sorted(
        (n for n, value in enumerate(known) if value.writers), key=lambda n: known[n].writers
    ):
        writer = parts[known[number].writers[0]]
        on_one_host = hosts[writer.source] == hosts[writer.destination]
        leaves = any(
            hosts[parts[stream].destination] != hosts[writer.destination] for stream in known[number].readers
        )
        after = known[number].after
        grows = after >= 0 and known[after].before == number
        if on_one_host and not writer.add and not leaves and not grows:
            origin[number] = origin[source[writer.number]]
    return origin


def _column(entries: list[int]) -> Numbers:
    return np.array(entries, dtype=np.int64)


NEVER = np.iinfo(np.int64).max
"""Key of an operation that does not exist."""

SPREAD = 2
"""Chunks that begin between two levels of a tree, so that ranks need not work in step."""


@dataclass(frozen=True, slots=True, eq=False)
class OperationOrder:
    """Keys and positions of the operations of the ranks on one host; R rows, I instances.

    - `publish_key`: (I,), of the operation that puts an input into shared memory; `NEVER` if no rank needs it there.
    - `send_key`, `join_key`: (R,), of the sending of a row, and of its joining at the destination, which rows of one
      operation share; meaningless if there is none.
    - `publish_position`, `join_position`: (I,) and (R,), how many operations the rank has done when this one is done; 0
      on other hosts.
    - `own_keys`: keys of this rank's operations, ascending: 3 s is a publication for row ``rows[s]``, 3 s + 1 its
      sending and 3 s + 2 its joining, or that of all rows that share it.
    - `rows`: (R,), the rows in order.
    """

    publish_key: Numbers
    send_key: Numbers
    join_key: Numbers
    publish_position: Numbers
    join_position: Numbers
    own_keys: Numbers
    rows: Numbers

    def ready(self, held: ValueInstances) -> Numbers:
        """Return how many operations its rank has done when an instance is complete; (I,), 0 on other hosts."""
        position = self.publish_position.copy()
        done = held.last & held.made
        position[held.writes[done]] = self.join_position[done]
        return position


def order_of(table: TransferTable, held: ValueInstances, placement: HostPlacement) -> OperationOrder:
    """Return the order of a table's operations."""
    hosts = np.array(placement.hosts)
    mine = hosts[placement.rank]
    sequence = np.empty(len(table), dtype=np.int64)
    rows = np.argsort(_pipeline_steps(table), kind="stable")
    sequence[rows] = np.arange(len(table))
    send_key, join_key = 3 * sequence + 1, 3 * sequence + 2
    publish_key = np.full(len(held.rank), NEVER)
    from_input = held.shared & held.is_input[held.reads]
    np.minimum.at(publish_key, held.reads[from_input], 3 * sequence[from_input])

    received = np.zeros(len(held.rank), dtype=np.bool_)
    received[held.writes[~held.shared]] = True
    together = held.made & ~received[held.writes]
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
    return OperationOrder(
        publish_key=publish_key,
        send_key=send_key,
        join_key=join_key,
        publish_position=publish_position,
        join_position=join_position,
        own_keys=np.sort(key[rank == placement.rank]),
        rows=rows,
    )


def _pipeline_steps(table: TransferTable) -> Numbers:
    """Return the step of every row; a step takes one new chunk, of the shards in proportion to their lengths."""
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


AHEAD = 4
"""Slots of a ring beyond the necessary ones."""


@dataclass(frozen=True, slots=True, eq=False)
class ValueSlots:
    """The slots of a host's instances; I instances.

    - `number`: (I,), among all slots of the host; -1 for results in place, and for instances outside shared memory.
    - `begin`: (I,), key of the operation that first writes it.
    - `next_user`: (I,), the instance that has the slot afterwards; -1 if none.
    - `count`: slots of all ranks of the host.
    """

    number: Numbers
    begin: Numbers
    next_user: Numbers
    count: int


def slots_of(
    table: TransferTable,
    held: ValueInstances,
    order: OperationOrder,
    placement: HostPlacement,
    *,
    kept: NDArray[np.bool_],
) -> ValueSlots:
    """Divide slots among instances.

    `kept`: (R,), the row's elements are part of the result at its destination. If several ranks of a host get the same
    result from other hosts, the first one's copy lies in place.
    """
    begin = order.publish_key.copy()
    starting = held.first & held.made
    begin[held.writes[starting]] = order.join_key[starting]
    reading = held.shared & held.made
    adding = held.own >= 0
    end = np.full(len(held.rank), -1)
    np.maximum.at(end, held.reads[reading], order.join_key[reading])
    np.maximum.at(end, held.reads[~held.shared], order.send_key[~held.shared])
    np.maximum.at(end, held.writes[held.made], order.join_key[held.made])
    np.maximum.at(end, held.own[adding], order.join_key[adding])

    in_place = _in_place(table, held, placement, kept)
    end[held.writes[held.final & kept]] = NEVER
    in_slot = (begin < NEVER) & ~in_place
    number = np.full(len(held.rank), -1)
    next_user = np.full(len(held.rank), -1)
    used = 0
    for rank in placement.members:
        own = np.flatnonzero(in_slot & (held.rank == rank))
        own = own[np.argsort(begin[own])]
        if not len(own):
            continue
        place = np.arange(len(own))
        needed = int((np.searchsorted(begin[own], end[own], side="right") - place).max())
        ring = min(needed + AHEAD, len(own))
        number[own] = used + place % ring
        next_user[own[:-ring]] = own[ring:]
        used += ring
    return ValueSlots(number, begin, next_user, used)


def _in_place(
    table: TransferTable, held: ValueInstances, placement: HostPlacement, kept: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Return which instances are results in place: one for each chunk of a shard, on this host; (I,)."""
    here = np.isin(table.destination, placement.members)
    rows = np.flatnonzero(held.final & kept & here)
    longest = int(table.chunk.max(initial=0)) + 1
    _, first = np.unique(table.shard[rows].astype(np.int64) * longest + table.chunk[rows], return_index=True)
    chosen = np.zeros(len(held.rank), dtype=np.bool_)
    chosen[held.writes[rows[first]]] = True
    return chosen
