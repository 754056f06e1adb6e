"""Order the chunks of each rank: the work before it sends or joins one, the windows, and the memory of a plan.

A rank sees only its own sends and receives, so every hazard is held at the rank where it arises. Chunk c of a
stream is sent when the last stream that wrote at its source has been joined there; it is joined when the last
stream that wrote at its destination has been joined and all that read there since have been sent. Waits that a
transfer table leaves out because others imply them are spelled out again, for the implication may pass through
other ranks. If the sending of a chunk already proves that its place is free, the receiver reads it straight into
that place. Only the other streams are *held*: their chunks may have to wait at the destination.

`footprint`: a rank buffers arrivals that cannot be joined yet in windows of a few chunks per stream, and partial
sums if it gets no result: two chunks per joining stream and one for every level that it waits, at most fan-in x
(depth + 2), partial sums apart. The tcp back end lets `FLIGHT_BYTES` of each such stream be under way if that is
more, or long links would idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from collectives.tables.lowering import lower
from collectives.tables.transfer_table import EdgeStream, TransferTable, results_in, streams
from topoplan.errors import UsageError
from topoplan.plans.plan import Plan
from topoplan.plans.shards import ALIGNMENT

FLIGHT_BYTES = 4 << 20
"""Bytes of a held stream that may be under way, or wait at the destination: the capacity of a network's queues."""


@dataclass(frozen=True, slots=True)
class StreamOrder:
    """The work that precedes the chunks of one stream at its two ends.

    - `written`: the stream that must have been joined at the source, or None.
    - `before`: stream numbers and lags: chunk c may be joined once those streams have done chunk c - lag at the
      destination.
    - `held`: a chunk may arrive before it can be joined.
    - `slots`: the most partial sums of the destination, if it gets no result in this shard and this is the first stream
      that writes there; else 0.
    """

    stream: EdgeStream
    written: int | None
    before: tuple[tuple[int, int], ...]
    held: bool
    slots: int


@lru_cache(maxsize=64)
def orders(table: TransferTable, collective: str, root: int | None) -> tuple[StreamOrder, ...]:
    """Return the order of every stream of a table; the last 64 results are kept.

    `collective` and `root` tell which ranks get which elements as their result. Of two children that add at one parent,
    the second may come too early:

    >>> import topoplan
    >>> from collectives import lower
    >>> plan = topoplan.plan(topoplan.load("dgx-2"), "allreduce", gpus=[0, 1, 2])
    >>> up = [order for order in orders(lower(plan, 48, chunk_elements=16), "allreduce", None) if order.stream.add]
    >>> [(order.held, order.before) for order in up[:2]]
    [(False, ()), (True, ((0, 0),))]
    """
    shards: dict[int, list[EdgeStream]] = {}
    for stream in streams(table):
        shards.setdefault(stream.shard, []).append(stream)
    made: list[StreamOrder] = []
    for parts in shards.values():
        made += _orders_of_shard(parts, table, collective, root)
    return tuple(sorted(made, key=lambda order: order.stream.number))


def _orders_of_shard(
    parts: Sequence[EdgeStream], table: TransferTable, collective: str, root: int | None
) -> list[StreamOrder]:
    """Return the orders of one shard's streams, which come in the order of the table."""
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
        made.append(StreamOrder(part, written, tuple(before), bool(needed & ~proved) or slots > 0, slots))
        readers.setdefault(part.source, []).append(number)
        readers[part.destination] = []
        writer[part.destination] = number
    return made


def _others_at(first: EdgeStream, parts: Sequence[EdgeStream]) -> list[EdgeStream]:
    """Return the other streams that write or read the partial sums at the destination of the first one."""
    rank = first.destination
    return [
        part
        for part in parts
        if part.number != first.number
        and (part.destination == rank or (part.source == rank and not part.source_fresh))
    ]


def _slots(
    first: EdgeStream, parts: Sequence[EdgeStream], table: TransferTable, collective: str, root: int | None
) -> int:
    """Return how many partial sums the destination keeps: two, and one for every level that they wait there."""
    block = (0, 0)
    if first.destination < table.ranks:  # helpers get no result
        block = results_in(table, collective, root)[first.destination]
    if block[0] <= first.start and first.stop <= block[1]:
        return 0
    last = max((part.level for part in _others_at(first, parts)), default=first.level)
    return 2 + max(0, last - first.level)


LARGEST = 200_000
"""The most tree edges of a plan for `footprint`."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """The resources of a running plan, independent of the buffer's length.

    - `streams`: tree edges.
    - `queues`: directed pairs of ranks, by channel.
    - `steps` of one chunk; the next chunk follows a step later.
    - `fan_in`: the most streams that one rank joins, over all trees.
    - `scratch`: the most chunks of scratch memory on each rank.
    - `held`: streams of each rank whose chunks may have to wait.
    """

    streams: int
    queues: int
    steps: int
    fan_in: int
    scratch: tuple[int, ...]
    held: tuple[int, ...]

    def to_object(self) -> dict[str, object]:
        """Return the fields as a JSON object."""
        return {
            "streams": self.streams,
            "queues": self.queues,
            "steps": self.steps,
            "fan_in": self.fan_in,
            "scratch_chunks": list(self.scratch),
            "held_streams": list(self.held),
        }


def footprint(plan: Plan) -> Footprint:
    """Return the resources of a plan; raise `UsageError` for more than `LARGEST` edges, helper ranks or exchange
    rounds.

    Every GPU of a DGX-2 adds up its sixteenth of the buffer, which the 15 others send it at once:

    >>> import topoplan
    >>> found = footprint(topoplan.plan(topoplan.load("dgx-2"), "allreduce"))
    >>> found.streams, found.queues, found.steps, found.fan_in, set(found.scratch)
    (480, 240, 2, 15, {28})
    """
    edges = sum(count * len(stage.edges) for shard, count in plan.shard_counts for stage in shard.stages)
    if edges > LARGEST:
        raise UsageError(
            f"the plan must have at most {LARGEST} tree edges to be explained, got {edges}; "
            "explain a smaller allocation"
        )
    if plan.helpers:
        raise UsageError(
            f"plans with helper ranks cannot be explained, and {plan.helpers[0]} is one; leave the helpers out of the "
            "machine"
        )
    if plan.exchanges:
        raise UsageError("plans of exchange rounds cannot be explained; explain a plan of trees or rings")
    denominator = max((shard.share.denominator for shard in plan.shards), default=1)
    # long enough that no shard is empty, and each is one chunk
    count = ALIGNMENT * max(len(plan.ranks), plan.blocks) * denominator
    table = lower(plan, count, chunk_elements=count)
    parts = streams(table)
    joins = [0] * len(plan.ranks)
    scratch = [0] * len(plan.ranks)
    held = [0] * len(plan.ranks)
    for order in orders(table, plan.collective, plan.root):
        stream = order.stream
        joins[stream.destination] += stream.add
        held[stream.destination] += order.held
        scratch[stream.destination] += (stream.window if order.held else 0) + order.slots
    return Footprint(
        streams=len(parts),
        queues=len({part.queue for part in parts}),
        steps=1 + max((part.level for part in parts), default=-1),
        fan_in=max(joins, default=0),
        scratch=tuple(scratch),
        held=tuple(held),
    )
