"""The values that ranks hold during a collective, and who reads them.

A *value* is what one rank holds of one shard between two changes that somebody can notice: its input, a sum, a
copy. Additions that follow one another without anybody reading in between make one value. Chunks of a shard
behave alike, so values belong to streams, of which there are few; `program` spreads them over the chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

from collectives.lowering.edge_streams import streams
from collectives.lowering.transfer_table import TransferTable


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
