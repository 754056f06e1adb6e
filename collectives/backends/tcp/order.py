"""What each rank must have done itself before it sends or joins a chunk, and which streams need a window.

A rank sees only its own sends and receives, so every hazard is held where it arises. Chunk c of a stream is sent
when the last stream that wrote at its source has been joined there; it is joined when the last stream that wrote at
its destination has been joined and all that read there since have been sent. Whatever the waits of a transfer table
leave out because other waits imply it is spelled out again here, for the implication may pass through other ranks.

Where the sending of a chunk already proves that its place is free, the receiver reads it straight into that place
and needs nothing else. Only the other streams are *held*: their chunks may have to wait at the destination.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from collectives.lowering.edge_streams import Stream, streams
from collectives.lowering.transfer_table import TransferTable, result_block

FLIGHT_BYTES = 4 << 20
"""What may be under way, or wait at its destination, of a held stream: what the queues in a network hold."""


@dataclass(frozen=True, slots=True)
class Order:
    """What precedes the chunks of one stream at its two ends.

    Parameters
    ----------
    stream : Stream
    written : int or None
        The stream that must have been joined at the source.
    before : tuple of (stream number, lag)
        Chunk c may be joined once those streams have done chunk c - lag at the destination.
    held : bool
        Whether a chunk may arrive before it can be joined.
    slots : int
        Where the destination gets no result in this shard and this is the first stream that writes there: partial sums
        that it keeps at most, else 0.
    """

    stream: Stream
    written: int | None
    before: tuple[tuple[int, int], ...]
    held: bool
    slots: int


@lru_cache(maxsize=64)
def orders(table: TransferTable, collective: str, root: int | None) -> tuple[Order, ...]:
    """The order of every stream of a table; the last 64 are kept.

    Parameters
    ----------
    table : TransferTable
    collective, root
        They tell which ranks get which elements as their result.

    Examples
    --------
    Of two children that add at one parent, the second may come too early:

    >>> import topoplan
    >>> from collectives import lower
    >>> plan = topoplan.plan(topoplan.load("dgx-2"), "allreduce", gpus=[0, 1, 2])
    >>> up = [order for order in orders(lower(plan, 48, chunk_elements=16), "allreduce", None) if order.stream.add]
    >>> [(order.held, order.before) for order in up[:2]]
    [(False, ()), (True, ((0, 0),))]
    """
    shards: dict[int, list[Stream]] = {}
    for stream in streams(table):
        shards.setdefault(stream.shard, []).append(stream)
    made: list[Order] = []
    for parts in shards.values():
        made += _orders_of_shard(parts, table, collective, root)
    return tuple(sorted(made, key=lambda order: order.stream.number))


def _orders_of_shard(
    parts: Sequence[Stream], table: TransferTable, collective: str, root: int | None
) -> list[Order]:
    """Streams of one shard, in the order of the table."""
    sent = {part.number: 1 << 2 * place for place, part in enumerate(parts)}
    joined = {number: 2 * bit for number, bit in sent.items()}
    when_sent: dict[int, int] = {}
    when_joined: dict[int, int] = {}
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    made = []
    for part in parts:
        number = part.number
        written = writer.get(part.source)
        proved = sent[number] | (0 if written is None else when_joined[written])
        needed = 0
        together = proved | joined[number]
        before = []
        if part.destination in writer:
            last = writer[part.destination]
            needed |= joined[last]
            together |= when_joined[last]
            before.append((last, 0))
        for reader in readers.get(part.destination, ()):
            needed |= sent[reader]
            together |= when_sent[reader]
            before.append((reader, 0))
        slots = 0
        if part.destination not in writer:
            slots = _slots(part, parts, table, collective, root)
            if slots:
                before += [(other.number, slots) for other in _others_at(part, parts)]
        when_sent[number], when_joined[number] = proved, together
        made.append(Order(part, written, tuple(before), bool(needed & ~proved) or slots > 0, slots))
        readers.setdefault(part.source, []).append(number)
        readers[part.destination] = []
        writer[part.destination] = number
    return made


def _others_at(first: Stream, parts: Sequence[Stream]) -> list[Stream]:
    """The other streams that write the partial sums at the destination of the first one, or read them."""
    rank = first.destination
    return [
        part
        for part in parts
        if part.number != first.number
        and (part.destination == rank or (part.source == rank and not part.source_fresh))
    ]


def _slots(
    first: Stream, parts: Sequence[Stream], table: TransferTable, collective: str, root: int | None
) -> int:
    """Partial sums to keep at the destination: two, and one for every level that they wait there."""
    block = (0, 0)
    if first.destination < table.ranks:  # helpers get no result
        block = result_block(collective, root, first.destination, table.ranks, table.count)
    if block[0] <= first.start and first.stop <= block[1]:
        return 0
    last = max((part.level for part in _others_at(first, parts)), default=first.level)
    return 2 + max(0, last - first.level)
