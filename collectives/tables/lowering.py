"""Lower a plan to a transfer table: (plan, element count, chunk size) to rows and prerequisites.

The *pattern* of a plan holds its tree edges as transfers of one chunk. A transfer waits for the last write to its
input, and for the last write and all later reads of its output; a prerequisite that another one implies is left
out. Additions at one parent follow in ascending rank of the children, so results repeat bit for bit. The pattern
does not depend on the element count. Chunks and shards touch different elements, so the table is the pattern
repeated for every chunk, a few numpy operations for any number of chunks.

Shards (`shard_bounds`) and chunks start on multiples of `ALIGNMENT` elements of the buffer or of a rank's block, on
every rank and back end. NCCL and the kernels, which copy 16 bytes at a time only between such borders, find them at
both ends of a message if back ends lay out scratch memory in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from collectives.tables.transfer_table import RankBlocks, TransferTable, UnevenBlocks
from topoplan.errors import PlanError, UsageError
from topoplan.plans.certificates.exchange import Demand
from topoplan.plans.plan import LATE, Plan
from topoplan.plans.shards import ALIGNMENT, Edge, Shard, Stage, path_ends, shard_bounds
from topoplan.units import check_type, check_whole


@dataclass(frozen=True, slots=True)
class PlanKey:
    """A plan that is hashed by its digest: hashing the plan itself would walk through every edge.

    Two keys are equal if their plans are, whatever their digests; the same object is not compared edge by edge.
    """

    digest: str
    plan: Plan = field(hash=False)


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """The transfers of one chunk of every shard, shard after shard; columns as in `TransferTable`."""

    queues: tuple[tuple[int, int, str], ...]
    source: NDArray[np.int32]
    destination: NDArray[np.int32]
    queue: NDArray[np.int32]
    add: NDArray[np.bool_]
    source_fresh: NDArray[np.bool_]
    destination_fresh: NDArray[np.bool_]
    shard: NDArray[np.int32]
    stage: NDArray[np.int32]
    offsets: NDArray[np.int64]
    prerequisites: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PatternTransfer:
    """A transfer of one chunk of one shard, as a row of a `Pattern`; `after` are the rows that it waits for."""

    source: int
    destination: int
    channel: str
    add: bool
    source_fresh: bool
    destination_fresh: bool
    shard: int
    stage: int
    after: tuple[int, ...]


@lru_cache(maxsize=64)
def pattern_of(key: PlanKey) -> Pattern:
    """Return the transfers of a plan and their prerequisites; the last 64 patterns are cached.

    PlanError: a stage is not a tree, or two ranks would end with values that were added in different orders.

    >>> import topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce")
    >>> pattern = pattern_of(PlanKey(plan.digest, plan))
    >>> len(pattern.source) == 2 * 7 * len(plan.shards)
    True
    """
    transfers: list[PatternTransfer] = []
    for number, shard in enumerate(key.plan.shards):
        transfers += shard_transfers(key.plan, shard, number, base=len(transfers))
    queues = sorted({(t.source, t.destination, t.channel) for t in transfers})
    position = {queue: i for i, queue in enumerate(queues)}
    return Pattern(
        queues=tuple(queues),
        source=_column(t.source for t in transfers),
        destination=_column(t.destination for t in transfers),
        queue=_column(position[t.source, t.destination, t.channel] for t in transfers),
        add=_column(t.add for t in transfers).astype(np.bool_),
        source_fresh=_column(t.source_fresh for t in transfers).astype(np.bool_),
        destination_fresh=_column(t.destination_fresh for t in transfers).astype(np.bool_),
        shard=_column(t.shard for t in transfers),
        stage=_column(t.stage for t in transfers),
        offsets=cumulative(np.array([len(t.after) for t in transfers], dtype=np.int64)),
        prerequisites=np.array([row for t in transfers for row in t.after], dtype=np.int64),
    )


def cumulative(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return zero and the running sums: where each run of so many entries starts, and the end."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)))


def _column(values: Iterable[int]) -> NDArray[np.int32]:
    return np.fromiter(values, dtype=np.int32)


def shard_transfers(plan: Plan, shard: Shard, number: int, *, base: int) -> list[PatternTransfer]:
    """Return the transfers of one chunk of one shard; ``base`` transfers of earlier shards precede them."""
    transfers: list[PatternTransfer] = []
    implied: list[int] = []
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    size = len(plan.ranks)
    vertices = len(plan.vertices)
    value = list(range(vertices))
    sums: dict[tuple[int, int], int] = {}
    for position, stage in enumerate(shard.stages):
        if stage.op == "gather":
            raise PlanError(
                "a stage of gathers cannot be lowered to transfers in one buffer; its rounds run one by one",
                shard=number,
                stage=position,
            )
        for edge in _data_order(stage):
            source, destination = (
                (edge.child, edge.parent) if stage.op == "reduce" else (edge.parent, edge.child)
            )
            # A helper rank begins with nothing: its first arrival is stored.
            add = stage.op == "reduce" and (destination < size or destination in writer)
            row = len(transfers)
            conflicts = {writer[rank] for rank in (source, destination) if rank in writer}
            conflicts.update(readers.get(destination, ()))
            after, all_before = _without_implied(conflicts, implied)
            implied.append(all_before)
            transfers.append(
                PatternTransfer(
                    source=source,
                    destination=destination,
                    channel=edge.channel,
                    add=add,
                    source_fresh=source not in writer,
                    destination_fresh=add and destination not in writer,
                    shard=number,
                    stage=position,
                    after=tuple(base + earlier for earlier in after),
                )
            )
            readers.setdefault(source, []).append(row)
            readers[destination] = []
            writer[destination] = row
            if add:
                operands = (value[destination], value[source])
                value[destination] = sums.setdefault(operands, vertices + len(sums))
            else:
                value[destination] = value[source]
    if plan.collective in ("allreduce", "broadcast", "allgather"):
        _check_one_value(value[:size], number)
    return transfers


def _data_order(stage: Stage) -> list[Edge]:
    """Return the edges in an order in which data can run along them; at a parent, children in ascending rank."""
    if stage.op == "broadcast":
        return list(stage.top_down())
    depth = stage.depths()
    return sorted(stage.edges, key=lambda edge: (-depth[edge.child], edge.child))


def _without_implied(conflicts: set[int], implied: list[int]) -> tuple[list[int], int]:
    """Return the conflicts that no other of them implies, ascending, and the bit set of all rows before.

    ``implied[row]`` is the bit set of the rows that must run before it; they all have smaller numbers.
    """
    kept: list[int] = []
    before = 0
    for row in sorted(conflicts, reverse=True):
        if not before >> row & 1:
            kept.append(row)
            before |= implied[row] | 1 << row
    return kept[::-1], before


def _check_one_value(value: list[int], shard: int) -> None:
    for rank, number in enumerate(value):
        if number != value[0]:
            raise PlanError(
                "ends with another value than rank 0 (other data, or added in another order, which rounds "
                "differently); let one rank compute the result and broadcast it",
                shard=shard,
                rank=rank,
            )


def lower(plan: Plan, count: int, *, chunk_elements: int, digest: str | None = None) -> TransferTable:
    """Lower a plan to the transfer table of a buffer of ``count`` elements.

    Parameters
    ----------
    plan : Plan
        A valid plan (see `topoplan.verify`).
    count : int
        Elements of the plan's buffer, zero or more; for allgather and reduce_scatter those of the full gathered buffer,
        a multiple of the number of ranks; for alltoall those of the buffers of all ranks together, a multiple of its
        square: blocks are in the order of their destinations, then of their sources.
    chunk_elements : int
        Longest chunk; rounded up to a multiple of `ALIGNMENT`.
    digest : str, optional
        ``plan.digest``, if the caller has it already.

    Returns
    -------
    TransferTable
        The same object for the same (digest, count, chunk_elements): the last 64 are cached.

    Raises
    ------
    UsageError
        ``count`` or ``chunk_elements`` is out of range.
    PlanError
        A stage is not a tree, or two ranks would end with values that were added in different orders.

    Notes
    -----
    O(rows + prerequisites) in numpy; Python loops run over the plan's tree edges only, once per plan.

    Examples
    --------
    >>> import topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "broadcast", gpus=[4, 7])
    >>> table = lower(plan, 100, chunk_elements=40)
    >>> list(zip(table.start.tolist(), table.stop.tolist())), len(set(table.queue.tolist()))
    ([(0, 48), (48, 96), (96, 100)], 1)
    """
    check_type("plan", plan, Plan, remedy="of plans by size or failure lower one at a time")
    if isinstance(plan.certificate, Demand):
        raise UsageError(
            "the plan is for a demand, and arrays are exchanged in equal blocks; plan without demand, or call "
            "all_to_all_v, which makes its own plans"
        )
    check_lengths(count, chunk_elements, ranks=len(plan.ranks), blocks=plan.blocks)
    check_type("digest", digest, str, type(None), remedy="leave it out, or give plan.digest")
    key = PlanKey(plan.digest if digest is None else digest, plan)
    return _lowered(key, count, chunk_elements)


def check_lengths(count: int, chunk_elements: int, *, ranks: int, blocks: int) -> None:
    """Raise UsageError if a buffer of ``count`` elements cannot be divided into blocks and chunks."""
    check_whole("count", count)
    if count >= 1 << 63:
        raise UsageError(f"count must be below 2**63 elements, got {count}")
    check_whole("chunk_elements", chunk_elements, least=1, most=(1 << 63) - 1)
    if count % blocks:
        raise UsageError(
            f"{count} elements cannot be divided among {ranks} ranks; "
            f"pad the buffer to {count + -count % blocks} elements"
        )


@lru_cache(maxsize=64)
def lower_to(key: PlanKey, borders: tuple[int, ...], chunk_elements: int) -> TransferTable:
    """Return the transfer table of a plan with other lengths of shards than their shares: shard s ends at
    ``borders[s]``.

    ``borders`` ascend to the number of elements; chunks start on multiples of `ALIGNMENT` only if the borders are. The
    last 64 tables are cached.
    """
    return _table(key, np.array((0, *borders), dtype=np.int64), chunk_elements)


@lru_cache(maxsize=64)
def block_shares(key: PlanKey) -> dict[tuple[int, int], tuple[Fraction, ...]]:
    """Return the shares of the paths of a block in it, by its destination and source, in the order of the shards."""
    shares: dict[tuple[int, int], list[Fraction]] = {}
    for shard in key.plan.shards:
        source, destination = path_ends(shard)
        shares.setdefault((destination, source), []).append(shard.share)
    if list(shares) != sorted(shares):
        raise PlanError("the blocks of an all-to-all must be in the order of destinations, then of sources")
    alone = (Fraction(1),)
    return {
        block: alone if len(parts) == 1 else tuple(part / sum(parts) for part in parts)
        for block, parts in shares.items()
    }


@lru_cache(maxsize=64)
def rank_shares(key: PlanKey) -> dict[int, tuple[Fraction, ...]]:
    """Return the shares of the trees of a rank's block in it, in the order of the shards.

    The one block of a broadcast or reduce is that of its root.
    """
    plan = key.plan
    if plan.root is not None:
        return {plan.root: tuple(shard.share for shard in plan.shards)}
    size, before = len(plan.ranks), Fraction(0)
    shares: dict[int, list[Fraction]] = {}
    for shard in plan.shards:  # in the order of their owners
        shares.setdefault(int(before * size), []).append(shard.share * size)
        before += shard.share
    return {rank: tuple(parts) for rank, parts in shares.items()}


@lru_cache(maxsize=64)
def lower_uneven(key: PlanKey, blocks: UnevenBlocks | RankBlocks, chunk_elements: int) -> TransferTable:
    """Return the transfer table of the plan of an all-to-all, allgather or reduce-scatter with blocks of other lengths
    than planned.

    Paths and trees share the elements of their block as those of its plan, with borders on multiples of `ALIGNMENT`
    elements from its start. A block without a path has no elements. Blocks of ranks may be moved by the plan
    of a broadcast or reduce if one alone has elements. The last 64 tables are cached.

    >>> import topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "alltoall", gpus=[4, 7])
    >>> table = lower_uneven(PlanKey(plan.digest, plan), UnevenBlocks(((3, 20), (0, 5))), 16)
    >>> list(zip(table.source.tolist(), table.start.tolist(), table.stop.tolist()))
    [(0, 3, 19), (0, 19, 23)]
    """
    pieces: Iterable[tuple[int, tuple[Fraction, ...], int]]
    if isinstance(blocks, RankBlocks):
        owned = rank_shares(key)
        pieces = ((elements, owned.get(rank, ()), rank) for rank, elements in enumerate(blocks.counts))
    else:
        shares = block_shares(key)
        pieces = (
            (row[destination], shares.get((destination, source), ()), source)
            for destination in range(len(blocks.counts))
            for source, row in enumerate(blocks.counts)
        )
    start, bounds = 0, [0]
    for elements, parts, rank in pieces:
        if elements and not parts:
            raise PlanError(f"has no path for a block of {elements} elements", rank=rank)
        ends = shard_bounds(parts, elements)[1:] if elements and len(parts) > 1 else [elements] * len(parts)
        bounds += [start + end for end in ends]
        start += elements
    return _table(key, np.array(bounds, dtype=np.int64), chunk_elements, uneven=blocks)


@lru_cache(maxsize=64)
def _lowered(key: PlanKey, count: int, chunk_elements: int) -> TransferTable:
    plan = key.plan
    bounds = plan.bounds(count)
    return _table(key, np.array(bounds, dtype=np.int64), chunk_elements)


def _table(
    key: PlanKey, bounds: NDArray[np.int64], longest: int, *, uneven: UnevenBlocks | RankBlocks | None = None
) -> TransferTable:
    pattern = pattern_of(key)
    edge, chunk, start, stop = chunk_rows(pattern.shard, bounds, longest)
    first = cumulative(np.bincount(edge, minlength=len(pattern.shard)))
    row_of = np.empty(len(edge), dtype=np.int64)
    row_of[first[edge] + chunk] = np.arange(len(edge))
    needed = np.diff(pattern.offsets)[edge]
    offsets = cumulative(needed)
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], needed)
    earlier_edge = pattern.prerequisites[np.repeat(pattern.offsets[edge], needed) + within]
    return TransferTable(
        ranks=len(key.plan.ranks),
        count=int(bounds[-1]),
        chunk_elements=aligned_chunk(longest),
        bounds=bounds,
        queues=pattern.queues,
        source=pattern.source[edge],
        destination=pattern.destination[edge],
        queue=pattern.queue[edge],
        start=start,
        stop=stop,
        add=pattern.add[edge],
        source_fresh=pattern.source_fresh[edge],
        destination_fresh=pattern.destination_fresh[edge],
        shard=pattern.shard[edge],
        stage=pattern.stage[edge],
        chunk=chunk.astype(np.int32),
        offsets=offsets,
        prerequisites=row_of[first[earlier_edge] + np.repeat(chunk, needed)],
        helpers=len(key.plan.vertices) - len(key.plan.ranks) if key.plan.helpers else 0,
        uneven=uneven,
        late=late_rank(key.plan),
    )


def late_rank(plan: Plan) -> int:
    """Return the rank for which a plan is made that comes late; -1 if it is not made for one.

    It is the root of a tree, or a leaf with a stage of its own before the last one.
    """
    if plan.schedule != LATE:
        return -1
    ranks = set(range(len(plan.ranks)))
    for shard in plan.shards:
        joined = [edge.child for edge in shard.stages[-2].edges] if len(shard.stages) > 2 else []
        ranks &= {shard.stages[-1].root, *(joined if len(joined) == 1 else ())}
    return ranks.pop() if len(ranks) == 1 else -1


def chunk_rows(
    shard: NDArray[np.int32], bounds: NDArray[np.int64], longest: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of transfers of some shards, chunk by chunk: transfer, chunk, first element and end of each."""
    chunk_elements = aligned_chunk(longest)
    chunks = -(-np.diff(bounds) // chunk_elements)
    repeats = chunks[shard]
    if chunks.max(initial=0) <= 1:
        edge = np.flatnonzero(repeats)
        of = shard[edge]
        return edge, np.zeros(len(edge), dtype=np.int64), bounds[of], bounds[of + 1]
    first = cumulative(repeats)
    edge = np.repeat(np.arange(len(repeats)), repeats)
    chunk = np.arange(first[-1]) - first[edge]
    order = np.argsort(chunk, kind="stable")
    edge, chunk = edge[order], chunk[order]
    start = bounds[shard[edge]] + chunk * chunk_elements
    return edge, chunk, start, np.minimum(start + chunk_elements, bounds[shard[edge] + 1])


def aligned_chunk(longest: int) -> int:
    """Return the length of a chunk, rounded up, so that a buffer that fits into one chunk does not become two."""
    return -(-longest // ALIGNMENT) * ALIGNMENT
