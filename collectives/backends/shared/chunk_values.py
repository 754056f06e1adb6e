"""The values that ranks hold during a collective, and for every chunk which one each row reads and makes.

A *value* is what one rank holds of one shard between two changes that somebody can notice: its input, a sum, a
copy. Additions that follow one another without anybody reading in between make one value. Chunks of a shard
behave alike, so values belong to streams, of which there are few; `instances` spreads them over the chunks.

Ranks of one host see the same memory, so a copy between two of them moves nothing: who reads the copy, or keeps it
as a result, reads what was copied. Only a copy that a rank sends on to another host, where MPI reads it, or adds to is
made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collectives.lowering.dependencies import cumulative
from collectives.lowering.edge_streams import Stream, stream_of, streams
from collectives.lowering.transfer_table import TransferTable

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Value:
    """What a rank holds of a shard for a while.

    Parameters
    ----------
    rank, shard : int
    before : int
        Number of the value that the first addition starts from; -1 for inputs and copies.
    writers : tuple of int
        Streams that make it, in order: one copy or some additions; none for an input.
    readers : tuple of int
        Streams that carry it to other ranks.
    after : int
        Number of the value that takes its place; -1 if it is the last of its rank and shard.
    """

    rank: int
    shard: int
    before: int
    writers: tuple[int, ...]
    readers: tuple[int, ...]
    after: int


@dataclass(slots=True)
class _Growing:
    rank: int
    shard: int
    before: int
    writers: list[int]
    readers: list[int]
    after: int = -1


def values(table: TransferTable) -> tuple[Value, ...]:
    """The values of a collective.

    Examples
    --------
    Broadcast along a chain of two: the root's input, and the copy that the other rank keeps.

    >>> import topoplan
    >>> from collectives import lower
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "broadcast", gpus=[4, 7])
    >>> [(value.rank, value.writers, value.readers) for value in values(lower(plan, 160, chunk_elements=64))]
    [(0, (), (0,)), (1, (0,), ())]
    """
    found: list[_Growing] = []
    current: dict[tuple[int, int], int] = {}

    def held(rank: int, shard: int) -> int:
        if (rank, shard) not in current:
            current[rank, shard] = len(found)
            found.append(_Growing(rank, shard, -1, [], []))
        return current[rank, shard]

    for stream in streams(table):
        found[held(stream.source, stream.shard)].readers.append(stream.number)
        place = (stream.destination, stream.shard)
        previous = held(*place) if stream.add else current.get(place, -1)
        if stream.add and found[previous].writers and not found[previous].readers:
            found[previous].writers.append(stream.number)
            continue
        current[place] = len(found)
        found.append(_Growing(*place, previous if stream.add else -1, [stream.number], []))
        if previous >= 0:
            found[previous].after = current[place]
    return tuple(
        Value(one.rank, one.shard, one.before, tuple(one.writers), tuple(one.readers), one.after)
        for one in found
    )


@dataclass(frozen=True, slots=True, eq=False)
class Instances:
    """One instance of a value for each chunk of its shard; I instances, R rows.

    Parameters
    ----------
    rank : (I,) int64
        Who holds it.
    is_input : (I,) bool
        Whether it is what the rank has put in.
    shared : (R,) bool
        Whether source and destination of a row are on one host.
    made : (R,) bool
        Whether the row does anything; else the ranks of the host see what it would copy.
    reads, writes : (R,) int64
        The instance that a row carries away, and the one that it makes or adds to; where it makes none, the one
        that it would copy.
    own : (R,) int64
        The instance that an addition starts from; -1 where the row copies.
    first, last : (R,) bool
        Whether the row begins the instance, and whether it completes it.
    final : (R,) bool
        Whether the row completes what its destination ends with.
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


def instances(table: TransferTable, hosts: Sequence[int]) -> Instances:
    """The instances of a table.

    Parameters
    ----------
    table : TransferTable
    hosts : sequence of int
        For each rank the number of its host.

    Examples
    --------
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
        read_by_stream[list(value.readers)] = origin[number]
        written_by_stream[list(value.writers)] = number
    first_of_value = _column([value.writers[0] if value.writers else -1 for value in known])
    last_of_value = _column([value.writers[-1] if value.writers else -1 for value in known])
    written = written_by_stream[stream]
    first = first_of_value[written] == stream
    last = last_of_value[written] == stream
    before = _column([origin[value.before] if value.before >= 0 else -1 for value in known])[written]
    writes = offsets[_column(origin)[written]] + table.chunk
    host = np.array(hosts)
    own = np.where(before >= 0, offsets[before] + table.chunk, -1)
    return Instances(
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


def _origins(known: tuple[Value, ...], parts: tuple[Stream, ...], hosts: Sequence[int]) -> list[int]:
    """For each value the one that its readers read: itself, or what it is a copy of."""
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
