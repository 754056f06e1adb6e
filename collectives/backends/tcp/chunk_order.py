"""Order the chunks of each rank: the work before it sends or joins one, the windows, and the memory of a plan.

A rank sees only its own sends and receives, so every hazard is held at the rank where it arises. Chunk c of a
stream is sent when the last stream that wrote at its source has been joined there; it is joined when the last
stream that wrote at its destination has been joined and all that read there since have been sent. Waits that a
transfer table leaves out because others imply them are spelled out again, for the implication may pass through
other ranks. If the sending of a chunk already proves that its place is free, the receiver reads it straight into
that place. Only the other streams are *held*: their chunks may have to wait at the destination.

`footprint`: a rank buffers arrivals that cannot be joined yet in windows of a few chunks per stream, and partial
sums if it gets no result: two chunks per joining stream and one for every level that it waits, at most fan-in x
(depth + 2), partial sums apart. The tcp back end lets up to `FLIGHT_BYTES` of each such stream be under way if that
is more, or long links would idle (`compiled_exchange.OPENING_BYTES` at first).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from collectives.tables.lowering import lower
from collectives.tables.transfer_table import EdgeStream, OneRankOnly, TransferTable, results_in, streams
from topoplan.errors import UsageError
from topoplan.plans.plan import Plan
from topoplan.plans.shards import ALIGNMENT

Numbers = NDArray[np.int64]

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


@dataclass(frozen=True, slots=True, eq=False)
class RankOrder:
    """The streams that begin or end at one rank, and the work that precedes their chunks there, as in `StreamOrder`.

    - `rows`: (S,) row of chunk 0 in the table, ascending; `numbers`: (S,) by which both ends name a stream
    - `written`: (S,) place in `rows` of the stream that must have been joined here before a chunk is sent, or -1
    - `held`, `window`, `slots`: (S,); a stream that is not held has no window
    - `befores`: (B, 3) place of a stream that arrives, place of one before it, and lag; sorted by the first
    """

    rows: Numbers
    numbers: Numbers
    written: Numbers
    held: NDArray[np.bool_]
    window: Numbers
    slots: Numbers
    befores: Numbers


def rank_order(table: TransferTable, rank: int, collective: str, root: int | None) -> RankOrder:
    """Return the streams of one rank and their order, from the table of all ranks or of this one."""
    if table.only is not None:
        return _order_of_part(table, table.only, collective, root)
    mine = [
        one for one in orders(table, collective, root) if rank in (one.stream.source, one.stream.destination)
    ]
    place = {one.stream.number: number for number, one in enumerate(mine)}
    rows = _numbers(one.stream.number for one in mine)
    return RankOrder(
        rows=rows,
        numbers=rows,
        written=_numbers(
            -1 if one.stream.destination == rank or one.written is None else place[one.written]
            for one in mine
        ),
        held=np.array([one.held for one in mine], dtype=np.bool_),
        window=_numbers(one.stream.window for one in mine),
        slots=_numbers(one.slots for one in mine),
        befores=np.array(
            [
                (number, place[other], lag)
                for number, one in enumerate(mine)
                if one.stream.destination == rank
                for other, lag in one.before
            ],
            dtype=np.int64,
        ).reshape(-1, 3),
    )


def _numbers(values: Iterable[int]) -> Numbers:
    return np.fromiter(values, dtype=np.int64)


def _order_of_part(table: TransferTable, only: OneRankOnly, collective: str, root: int | None) -> RankOrder:
    """Return the order of a rank from its own rows, of shards that are a reduce, a broadcast, or both on one root.

    No other rank has to be known. What a reduce sends to a parent is held unless it is the first to arrive there: its
    sender is below the parent, and no sibling is. Before the root sends in a broadcast, the whole shard has been
    reduced, so nothing is held there. Windows and slots are those of the highest tree, an upper bound.
    """
    count = int(np.count_nonzero(table.chunk == 0))
    shard, stage = (column[:count].astype(np.int64) for column in (table.shard, table.stage))
    arrives, add = table.destination[:count] == only.rank, table.add[:count]
    place = np.arange(count)
    first = np.searchsorted(shard, shard)  # of the shard
    arrived = np.maximum.accumulate(np.where(arrives, place, -1)) if count else place
    earlier = np.concatenate(
        (np.full(min(count, 1), -1), arrived[:-1])
    )  # the arrival before, if in the same shard
    earlier = np.where(earlier >= first, earlier, -1)
    # An arrival waits for the one before it, and for what was sent since.
    begin = np.where(earlier >= 0, earlier, first)
    waits = np.where(arrives, place - begin, 0)
    after = np.repeat(place, waits)
    within = np.arange(len(after)) - np.repeat(np.cumsum(waits) - waits, waits)
    befores = np.stack((after, begin[after] + within, np.zeros_like(after)), axis=1)
    # Partial sums at a destination without this shard in its result.
    holds = _holds_at(table, table.destination[:count], shard, collective, root)
    partial = add & ~holds
    slots = np.where(arrives & partial & (earlier < 0), 2 + only.height, 0)
    kept = np.flatnonzero(slots)
    length = np.searchsorted(shard, shard[kept], side="right") - first[kept]
    after = np.repeat(kept, length)
    within = np.arange(len(after)) - np.repeat(np.cumsum(length) - length, length)
    other = first[after] + within
    uses = (other != after) & (arrives[other] | ~table.source_fresh[:count][other])
    sums = np.stack((after, other, slots[after]), axis=1)[uses]
    befores = np.concatenate((befores, sums))
    return RankOrder(
        rows=place,
        numbers=shard * only.stages + stage,
        written=np.where(arrives, -1, earlier),
        held=add & (~table.destination_fresh[:count] | partial),
        window=np.full(count, 2 + only.height),
        slots=slots,
        befores=befores[np.argsort(befores[:, 0], kind="stable")],
    )


def _holds_at(
    table: TransferTable, ranks: NDArray[np.int32], shard: Numbers, collective: str, root: int | None
) -> NDArray[np.bool_]:
    """Return whether shards are a part of the results of ranks, by `result_block`."""
    if collective == "reduce":
        assert root is not None, "a reduce has a root"
        return np.equal(ranks, root)
    if collective != "reduce_scatter":
        return np.ones(len(ranks), dtype=np.bool_)
    each = table.count // table.ranks
    at = ranks.astype(np.int64)
    held: NDArray[np.bool_] = (at * each <= table.bounds[shard]) & (
        table.bounds[shard + 1] <= (at + 1) * each
    )
    return held


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
