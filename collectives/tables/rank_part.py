"""Lower one rank's part of a plan by kind: the rows of the transfer table that the rank sends or receives.

The plan is not listed: `collectives.tables.template_part` finds the rank's edges in all images of a template.
`collectives.tables.lowering.lower` gives the listed plan the same rows, in the same order, bit for bit. Prerequisites
are left out: most of them are rows of other ranks.

Time and memory grow with the rows of the rank, which has one or more in every tree, not with the edges of the trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.tables.lowering import PlanKey, aligned_chunk, check_lengths, chunk_rows
from collectives.tables.template_part import (
    EdgeRows,
    Flags,
    Numbers,
    RolePlaces,
    RowKinds,
    TemplatePart,
    first_ranks,
)
from collectives.tables.torus_rank_part import TorusTemplatePart, TorusTreePart
from collectives.tables.transfer_table import OneRankOnly, TransferTable
from topoplan.errors import UsageError
from topoplan.machine.fabric import edge_channels
from topoplan.plans.deferred_plan import DeferredPlan
from topoplan.plans.kind_exchange import KindPath
from topoplan.plans.kind_templates import KindTemplate
from topoplan.plans.plan import Plan
from topoplan.plans.plan_by_kind import PlanByKind
from topoplan.plans.shards import ALIGNMENT
from topoplan.plans.torus_templates import TorusPaths, TorusTemplate
from topoplan.plans.torus_trees import TorusTree
from topoplan.units import check_type, check_whole

AnyPart = TemplatePart | TorusTemplatePart | TorusTreePart
"""The rows of a rank in the images of a template, by its kind."""

MOST_TREES = 8_000_000
"""Trees up to which a rank's part is lowered, of one row or more for each tree."""

MOST_ROWS = 100_000_000
"""Rows up to which they are put in order: a gigabyte."""


@dataclass(frozen=True, slots=True, eq=False)
class RankPart:
    """Transfers of one chunk of every shard that one rank sends or receives, in the order of the whole table.

    - ``shard``, ``peer``: (R,) int32, the shard and the other rank of each; ``kind``: (R,) uint16, of ``kinds``
    - ``steps``: (S,), where shard s ends, and ``unit``: the same for the whole buffer; int64, or Python integers
    - ``channels``: names; ``height``: edges on the longest path of a tree

    A transfer takes 10 bytes and a shard 8. What the columns of a table say of it is made on request.
    """

    rank: int
    ranks: int
    blocks: int
    channels: tuple[str, ...]
    shard: NDArray[np.int32]
    peer: NDArray[np.int32]
    kind: NDArray[np.uint16]
    kinds: RowKinds
    steps: Numbers
    unit: int
    height: int

    def __len__(self) -> int:
        return len(self.shard)

    def __repr__(self) -> str:
        return f"<RankPart of rank {self.rank}, {self.ranks} ranks, {len(self)} rows>"

    def bounds(self, count: int) -> Numbers:
        """Return the bounds of all shards in a buffer of ``count`` elements: (S + 1,) int64, as `shard_bounds`."""
        check_lengths(count, 1, ranks=self.ranks, blocks=self.blocks)
        bounds = np.zeros(len(self.steps) + 1, dtype=np.int64)
        bounds[1:] = aligned_ends(self.steps, self.unit, count, blocks=self.blocks)
        return bounds

    def rows(self, count: int, *, chunk_elements: int) -> dict[str, NDArray[np.generic]]:
        """Return the rank's rows of the transfer table of a buffer of ``count`` elements, column by column.

        Columns are those of `TransferTable`, with ``channel`` in place of ``queue``. UsageError as `lower`.
        """
        return self._columns(count, self.bounds(count), chunk_elements)

    def _columns(self, count: int, bounds: Numbers, chunk_elements: int) -> dict[str, NDArray[np.generic]]:
        check_lengths(count, chunk_elements, ranks=self.ranks, blocks=self.blocks)
        edge, chunk, start, stop = chunk_rows(self.shard, bounds, chunk_elements)
        facts, kind, peer = self.kinds.table(), self.kind[edge], self.peer[edge]
        sends, rank = facts.pop("sends")[kind], np.int32(self.rank)
        return {
            "source": np.where(sends, rank, peer),
            "destination": np.where(sends, peer, rank),
            "shard": self.shard[edge],
            **{name: values[kind] for name, values in facts.items()},
            "chunk": chunk.astype(np.int32),
            "start": start,
            "stop": stop,
        }

    def table(self, count: int, *, chunk_elements: int) -> TransferTable:
        """Return the transfer table of the rank alone for a buffer of ``count`` elements; UsageError as `lower`."""
        bounds = self.bounds(count)
        columns: dict[str, Any] = self._columns(count, bounds, chunk_elements)
        queues, queue = self._queues(columns["source"], columns["destination"], columns.pop("channel"))
        return TransferTable(
            ranks=self.ranks,
            count=count,
            chunk_elements=aligned_chunk(chunk_elements),
            bounds=bounds,
            queues=queues,
            queue=queue,
            offsets=np.broadcast_to(np.int64(0), len(queue) + 1),
            prerequisites=np.zeros(0, dtype=np.int64),
            only=OneRankOnly(self.rank, self.kinds.stages, self.height),
            **columns,
        )

    def _queues(
        self, source: NDArray[np.int32], destination: NDArray[np.int32], channel: NDArray[np.int8]
    ) -> tuple[tuple[tuple[int, int, str], ...], NDArray[np.int32]]:
        """Return the queues of rows, sorted, and the queue of each row."""
        # Channels in the order of their names. Ranks below send first, then this one, then ranks above.
        names = sorted(self.channels)
        place = np.array([names.index(one) for one in self.channels], dtype=np.int32)
        above = np.where(source > self.rank, source + self.ranks, source)
        key = np.where(source == self.rank, destination + self.rank, above) * np.int32(len(names))
        key += place[channel]
        used = np.zeros(2 * self.ranks * len(names), dtype=np.bool_)
        used[key] = True
        ends, named = np.divmod(np.flatnonzero(used), len(names))
        sends = (ends >= self.rank) & (ends < self.rank + self.ranks)
        starts = np.where(sends, self.rank, ends % self.ranks).tolist()
        arrives = np.where(sends, ends - self.rank, self.rank).tolist()
        number = np.cumsum(used, dtype=np.int32)
        number -= 1
        return tuple(zip(starts, arrives, map(names.__getitem__, named.tolist()), strict=True)), number[key]


def aligned_ends(steps: Numbers, unit: int, count: int, *, blocks: int) -> Numbers:
    """Return `topoplan.plans.shards.aligned_end` of all ``steps`` of ``unit``, (S,) int64."""
    each = count // blocks
    block, rest = _quotients(steps, blocks, unit)
    inside, _ = _quotients(rest, each, unit)
    inside //= ALIGNMENT
    inside *= ALIGNMENT
    block *= each
    block += inside
    return block


def _quotients(parts: Numbers, times: int, unit: int) -> tuple[Numbers, Numbers]:
    """Return quotient and remainder of ``parts * times`` by ``unit``, for parts from 0 to unit; the quotient is int64.

    The product may have 128 bits. A quotient below 2**50 is found in float64 with an error of 1 at most, and the
    remainder, computed modulo 2**64, says which.
    """
    if parts.dtype == np.object_ or times >= 1 << 50:
        product = parts.astype(object) * times
        whole = product // unit
        rest = product - whole * unit
        return whole.astype(np.int64), rest if unit >= 1 << 62 else rest.astype(np.int64)
    quotient = (parts * (times / unit)).astype(np.int64)
    rest = parts * np.int64(times)
    rest -= quotient * np.int64(unit)
    for off, step in ((np.flatnonzero(rest < 0), -1), (np.flatnonzero(rest >= unit), 1)):
        quotient[off] += step
        rest[off] -= step * unit
    return quotient, rest


def rank_part(plan: PlanByKind, rank: int) -> RankPart:
    """Return one rank's transfers of a valid plan by kind (see `topoplan.verify`).

    UsageError for a rank that the plan does not have, too many trees or rows, or paths of an all-to-all; PlanError if a
    server without a role of its own sends to another one.

    >>> import topoplan
    >>> from collectives import rank_part
    >>> many = topoplan.cluster_by_kind([topoplan.Server("dgx-h100", count=50)], nic_gbps=400)
    >>> part = rank_part(topoplan.plan_by_kind(many, "all_gather"), 17)
    >>> len(part), part.bounds(400)[-1].item()
    (798, 400)
    """
    check_type("plan", plan, PlanByKind, remedy="make one by topoplan.plan_by_kind")
    check_whole("rank", rank, most=plan.size - 1)
    if plan.num_trees > MOST_TREES:
        raise UsageError(
            f"a rank of {plan.num_trees:,} trees has as many rows or more; at most {MOST_TREES:,} trees fit; choose "
            "fewer servers or larger leaves"
        )
    places = first_ranks(plan.cluster)
    finders: list[AnyPart] = []
    of_roles: dict[tuple[object, ...], RolePlaces] = {}
    for template in plan.templates:
        if isinstance(template, (KindPath, TorusPaths)):
            raise UsageError("an all_to_all by kind cannot be lowered for a rank; list it")
        if isinstance(template, TorusTree):
            finders.append(TorusTreePart(plan, template, rank))
        elif isinstance(template, TorusTemplate):
            finders.append(TorusTemplatePart(plan, template, rank))
        else:
            roles = (template.root, template.centre, template.entries, template.shifts, template.pod_entries)
            if roles not in of_roles:
                of_roles[roles] = RolePlaces(plan, template, places, rank)
            finders.append(TemplatePart(plan, template, of_roles[roles], rank))
    position, steps, unit = _shard_order(plan, finders)
    kinds = RowKinds(
        max(len(template.stages) for template in plan.templates), len(edge_channels(plan.channels))
    )
    pieces: dict[tuple[int, bool], list[EdgeRows]] = {}
    while finders:
        for one in finders.pop().rows(position.pop(), kinds):
            pieces.setdefault((one.stage, one.sends), []).append(one)
    shard, peer, kind = _in_order(pieces, len(steps))
    return RankPart(
        rank=rank,
        ranks=plan.size,
        blocks=plan.size if plan.collective in ("allgather", "reduce_scatter") else 1,
        channels=edge_channels(plan.channels),
        shard=shard,
        peer=peer,
        kind=kind,
        kinds=kinds,
        steps=steps,
        unit=unit,
        height=plan.height,
    )


def _in_order(
    pieces: dict[tuple[int, bool], list[EdgeRows]], shards: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.uint16]]:
    """Return shard, peer and kind of all rows, by shard, then stage, then what arrives, then child.

    A shard has few rows of the rank, so rows are counted and put into their places. Only rows of shards in which an
    edge leads to several children are sorted.
    """
    every = [one.shard for key in sorted(pieces) for one in pieces[key]]
    rows = sum(map(len, every))
    if rows > MOST_ROWS:
        raise UsageError(
            f"the rank has {rows:,} rows; at most {MOST_ROWS:,} fit; choose fewer servers or another rank"
        )
    each = np.bincount(np.concatenate(every), minlength=shards).astype(np.int32) if every else _NO_ROWS
    place = np.cumsum(each, dtype=np.int32) - each
    peers, kinds = np.empty(rows, dtype=np.int32), np.empty(rows, dtype=np.uint16)
    for key in sorted(pieces):
        of = pieces[key]
        if of[0].is_child:  # the rank has one parent in a stage
            for one in of:
                at = place[one.shard]
                peers[at], kinds[at] = one.peer, one.kind
                place[one.shard] += 1
            continue
        begun, several = (np.zeros(shards, dtype=np.bool_) for _ in range(2))
        for one in of:
            if not isinstance(one.peer, int):
                several[one.shard] = True
        unsorted = [one for one in of if not isinstance(one.peer, int)]
        for one in sorted(of, key=lambda each: each.peer if isinstance(each.peer, int) else -1):
            if isinstance(one.peer, int):
                apart = several[one.shard]
                if apart.any():
                    unsorted.append(one.taken(apart))
                    one = one.taken(~apart)
                at = place[one.shard]
                peers[at] = one.peer
                kinds[at] = _added_once(one.kind, begun[one.shard])
                place[one.shard] += 1
                begun[one.shard] = True
        if unsorted:
            shard, peer, kind = (
                np.concatenate(column) for column in zip(*(one.columns() for one in unsorted), strict=True)
            )
            order = np.argsort(shard * np.int64(1 << 32) + peer, kind="stable")
            shard, within = shard[order], _within_runs(shard[order])
            at = place[shard] + within
            peers[at], kinds[at] = peer[order], _added_once(kind[order], within > 0)
            place += np.bincount(shard, minlength=shards).astype(np.int32)
    return np.repeat(np.arange(shards, dtype=np.int32), each), peers, kinds


_NO_ROWS = np.zeros(0, dtype=np.int32)


def _added_once(kind: NDArray[np.uint16] | int, later: Flags) -> NDArray[np.uint16] | int:
    """Return kinds of rows of children: data of all but the lowest child find a sum, and not the rank's own data."""
    fresh = kind & 1
    if isinstance(fresh, int) and not fresh:
        return kind
    return np.where(later, kind - fresh, kind).astype(np.uint16)


def _within_runs(ordered: NDArray[Any]) -> NDArray[np.int32]:
    """Return the place of each value among its equals, which are neighbours."""
    number = np.arange(len(ordered), dtype=np.int32)
    first = number.copy()
    first[1:][ordered[1:] == ordered[:-1]] = 0
    found: NDArray[np.int32] = number - np.maximum.accumulate(first)
    return found


@lru_cache(maxsize=4)
def _part_of(key: PlanKey, rank: int) -> RankPart:
    assert isinstance(key.plan, DeferredPlan), "the plan of a table of one rank is by kind"
    return rank_part(key.plan.by_kind, rank)


@lru_cache(maxsize=64)
def lower_part(key: PlanKey, rank: int, count: int, chunk_elements: int) -> TransferTable:
    """Return one rank's transfer table of a `DeferredPlan`; errors as `rank_part` and `lower`.

    The same object for the same arguments: the last 64 are cached, and the parts of the last 4 plans.
    """
    return _part_of(key, rank).table(count, chunk_elements=chunk_elements)


def is_lowered_by_part(plan: Plan) -> bool:
    """Return whether ranks can run tables of their own of a plan: a `DeferredPlan` with trees for which
    `collectives.backends.tcp.chunk_order.rank_order` needs no other rank, and not too many.
    """
    return (
        isinstance(plan, DeferredPlan)
        and all(
            isinstance(one, (KindTemplate, TorusTree)) and _is_reduced_first(one)
            for one in plan.by_kind.templates
        )
        and plan.num_trees <= MOST_TREES
    )


def _is_reduced_first(template: KindTemplate | TorusTree) -> bool:
    """Return whether the stages are a reduce, a broadcast, or a reduce and a broadcast at one root."""
    first = template.stages[0]
    return [one.op for one in template.stages] in (
        ["reduce"],
        ["broadcast"],
        ["reduce", "broadcast"],
    ) and all(one.root == first.root for one in template.stages)


def _shard_order(
    plan: PlanByKind, finders: Sequence[AnyPart]
) -> tuple[list[NDArray[np.int32]], Numbers, int]:
    """Return the shards of the images of each template, where each shard ends, and the end of the last one.

    The order is that of `PlanByKind.listed`.
    """
    shares = [finder.template.share / finder.count for finder in finders]
    unit = lcm(*(share.denominator for share in shares))
    templates = [finder.template for finder in finders]
    symmetric = all(
        isinstance(one, TorusTemplate) or (isinstance(one, KindTemplate) and one.shifts == 1)
        for one in templates
    )
    by_rotation = symmetric and plan.cluster.rotations() is not None
    classes = {share: number for number, share in enumerate(sorted(set(shares), reverse=True))}
    total = sum((share * one.count for share, one in zip(shares, finders, strict=True)), Fraction(0))
    kind = np.int64 if unit * total < 1 << 62 else np.object_
    owners = [finder.owners(plan.collective) for finder in finders]
    each = np.bincount(np.concatenate(owners), minlength=plan.size).astype(np.int32)
    place = np.cumsum(each, dtype=np.int32) - each
    position = [_NO_ROWS] * len(finders)
    steps = np.empty(int(each.sum()), dtype=kind)
    ordinal = range(len(finders)) if by_rotation else [classes[share] for share in shares]
    for number in sorted(range(len(finders)), key=ordinal.__getitem__):
        owner = owners[number]
        order = np.argsort(owner, kind="stable")
        ordered = owner[order]
        at = place[ordered] + _within_runs(ordered)
        place += np.bincount(owner, minlength=plan.size).astype(np.int32)
        position[number] = np.empty_like(at)
        position[number][order] = at
        steps[at] = int(shares[number] * unit)
    return position, np.cumsum(steps), unit
