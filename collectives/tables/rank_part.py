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
from collectives.tables.template_part import Flags, Numbers, TemplatePart, first_ranks
from collectives.tables.torus_rank_part import TorusTemplatePart
from collectives.tables.transfer_table import OneRankOnly, TransferTable
from topoplan.errors import UsageError
from topoplan.plans.deferred_plan import DeferredPlan
from topoplan.plans.kind_exchange import KindPath
from topoplan.plans.kind_templates import KindTemplate
from topoplan.plans.plan import Plan
from topoplan.plans.plan_by_kind import PlanByKind
from topoplan.plans.shards import aligned_end
from topoplan.plans.torus_exchange import TorusPaths
from topoplan.plans.torus_templates import TorusTemplate

MOST_TREES = 8_000_000
"""Trees up to which a rank's part is lowered: a gigabyte, of one row or more for each tree."""


@dataclass(frozen=True, slots=True, eq=False)
class RankPart:
    """Transfers of one chunk of every shard that one rank sends or receives, in the order of the whole table.

    - ``source``, ``destination``, ``shard``, ``stage``: (R,) int32; ``channel``: (R,) int8, index into ``channels``
    - ``add``, ``source_fresh``, ``destination_fresh``: (R,) bool, as in `TransferTable`
    - ``steps``: (S,), where shard s ends, and ``unit``: the same for the whole buffer; int64, or Python integers
    - ``stages``: stages of a shard; ``height``: edges on the longest path of a tree
    """

    rank: int
    ranks: int
    blocks: int
    channels: tuple[str, ...]
    source: NDArray[np.int32]
    destination: NDArray[np.int32]
    channel: NDArray[np.int8]
    add: Flags
    source_fresh: Flags
    destination_fresh: Flags
    shard: NDArray[np.int32]
    stage: NDArray[np.int32]
    steps: Numbers
    unit: int
    stages: int
    height: int

    def __len__(self) -> int:
        return len(self.source)

    def bounds(self, count: int) -> Numbers:
        """Return the bounds of all shards in a buffer of ``count`` elements: (S + 1,) int64, as `shard_bounds`."""
        check_lengths(count, 1, ranks=self.ranks, blocks=self.blocks)
        fits = self.unit * max(count, self.blocks, 1) < 1 << 62
        steps = self.steps if fits else self.steps.astype(object)
        ends = aligned_end(steps, self.unit, count, blocks=self.blocks)
        return np.concatenate((np.zeros(1, dtype=np.int64), ends.astype(np.int64)))

    def rows(self, count: int, *, chunk_elements: int) -> dict[str, NDArray[np.generic]]:
        """Return the rank's rows of the transfer table of a buffer of ``count`` elements, column by column.

        Columns are those of `TransferTable`, with ``channel`` in place of ``queue``. UsageError as `lower`.
        """
        check_lengths(count, chunk_elements, ranks=self.ranks, blocks=self.blocks)
        edge, chunk, start, stop = chunk_rows(self.shard, self.bounds(count), chunk_elements)
        found: dict[str, NDArray[np.generic]] = {name: getattr(self, name)[edge] for name in _OF_EDGES}
        return found | {"chunk": chunk.astype(np.int32), "start": start, "stop": stop}

    def table(self, count: int, *, chunk_elements: int) -> TransferTable:
        """Return the transfer table of the rank alone for a buffer of ``count`` elements; UsageError as `lower`."""
        columns: dict[str, Any] = self.rows(count, chunk_elements=chunk_elements)
        channel = columns.pop("channel").astype(np.int64)
        # Channels in the order of their names, as the queues of all ranks.
        by_name = sorted(range(len(self.channels)), key=self.channels.__getitem__)
        place = np.empty(len(by_name), dtype=np.int64)
        place[by_name] = np.arange(len(by_name))
        key = (columns["source"] * np.int64(self.ranks) + columns["destination"]) * len(by_name) + place[
            channel
        ]
        found, queue = np.unique(key, return_inverse=True)
        ends, named = np.divmod(found, len(by_name))
        source, destination = np.divmod(ends, self.ranks)
        names = [self.channels[by_name[number]] for number in named.tolist()]
        return TransferTable(
            ranks=self.ranks,
            count=count,
            chunk_elements=aligned_chunk(chunk_elements),
            bounds=self.bounds(count),
            queues=tuple(zip(source.tolist(), destination.tolist(), names, strict=True)),
            queue=queue.astype(np.int32),
            offsets=np.zeros(len(queue) + 1, dtype=np.int64),
            prerequisites=np.zeros(0, dtype=np.int64),
            only=OneRankOnly(self.rank, self.stages, self.height),
            **columns,
        )


_OF_EDGES = ("source", "destination", "channel", "add", "source_fresh", "destination_fresh", "shard", "stage")
"""Columns with an entry for each edge."""


def rank_part(plan: PlanByKind, rank: int) -> RankPart:
    """Return one rank's transfers of a valid plan by kind (see `topoplan.verify`).

    UsageError for a rank that the plan does not have, or paths of an all-to-all; PlanError if a server without a role
    of its own sends to another one.

    >>> import topoplan
    >>> from collectives import rank_part
    >>> many = topoplan.cluster_by_kind([topoplan.Server("dgx-h100", count=50)], nic_gbps=400)
    >>> part = rank_part(topoplan.plan_by_kind(many, "all_gather"), 17)
    >>> len(part), part.bounds(400)[-1].item()
    (798, 400)
    """
    if not 0 <= rank < plan.size:
        raise UsageError(f"rank must be from 0 to {plan.size - 1}, got {rank}")
    if plan.num_trees > MOST_TREES:
        raise UsageError(
            f"a rank of {plan.num_trees:,} trees has as many rows or more; at most {MOST_TREES:,} trees fit; choose "
            "fewer servers or larger leaves"
        )
    places = first_ranks(plan.cluster)
    finders: list[TemplatePart | TorusTemplatePart] = []
    for template in plan.templates:
        if isinstance(template, (KindPath, TorusPaths)):
            raise UsageError("an all_to_all by kind cannot be lowered for a rank; list it")
        if isinstance(template, TorusTemplate):
            finders.append(TorusTemplatePart(plan, template, rank))
        else:
            finders.append(TemplatePart(plan, template, places, rank))
    position, steps, unit = _shard_order(plan, finders)
    columns = [
        np.concatenate(parts)
        for parts in zip(
            *(finder.rows(order) for finder, order in zip(finders, position, strict=True)), strict=True
        )
    ]
    shard, stage, parent, child, channel, reduce, parent_fresh, child_fresh = columns
    # At a rank, its parent's edge stands first in a broadcast, and last in a reduce.
    last = (child == rank) == reduce
    stages = max(len(template.stages) for template in plan.templates)
    key = ((shard * np.int64(stages) + stage) * 2 + last) * plan.size + child
    order = np.argsort(key)
    del key, last
    shard, stage, parent, child, channel, reduce, parent_fresh, child_fresh = (
        column[order] for column in (shard, stage, parent, child, channel, reduce, parent_fresh, child_fresh)
    )
    add = reduce
    # Children that add at the rank itself: only the lowest finds the rank's own data.
    repeated = np.zeros(len(order), dtype=np.bool_)
    repeated[1:] = (shard[1:] == shard[:-1]) & (stage[1:] == stage[:-1])
    parent_fresh &= ~(add & (parent == rank) & repeated)
    return RankPart(
        rank=rank,
        ranks=plan.size,
        blocks=plan.size if plan.collective in ("allgather", "reduce_scatter") else 1,
        channels=plan.channels,
        source=np.where(add, child, parent),
        destination=np.where(add, parent, child),
        channel=channel,
        add=add,
        source_fresh=np.where(add, child_fresh, parent_fresh),
        destination_fresh=add & parent_fresh,
        shard=shard,
        stage=stage.astype(np.int32),
        steps=steps,
        unit=unit,
        stages=stages,
        height=plan.height,
    )


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
        and all(isinstance(one, KindTemplate) and _is_reduced_first(one) for one in plan.by_kind.templates)
        and plan.num_trees <= MOST_TREES
    )


def _is_reduced_first(template: KindTemplate) -> bool:
    """Return whether the stages are a reduce, a broadcast, or a reduce and a broadcast at one root."""
    first = template.stages[0]
    return [one.op for one in template.stages] in (
        ["reduce"],
        ["broadcast"],
        ["reduce", "broadcast"],
    ) and all(one.root == first.root for one in template.stages)


def _shard_order(
    plan: PlanByKind, finders: Sequence[TemplatePart | TorusTemplatePart]
) -> tuple[list[Numbers], Numbers, int]:
    """Return the shards of the images of each template, where each shard ends, and the end of the last one.

    The order is that of `PlanByKind.listed`.
    """
    shares = [finder.template.share / finder.count for finder in finders]
    unit = lcm(*(share.denominator for share in shares))
    templates = [finder.template for finder in finders]
    symmetric = all(isinstance(one, TorusTemplate) or one.shifts == 1 for one in templates)
    by_rotation = symmetric and plan.cluster.rotations() is not None
    classes = {share: number for number, share in enumerate(sorted(set(shares), reverse=True))}
    counts = [finder.count for finder in finders]
    roots = np.concatenate([finder.owners(plan.collective) for finder in finders])
    number = np.arange(len(finders)) if by_rotation else np.array([classes[share] for share in shares])
    order = np.lexsort((np.repeat(number, counts), roots))
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    total = sum((share * count for share, count in zip(shares, counts, strict=True)), Fraction(0))
    kind = np.int64 if unit * total < 1 << 62 else np.object_
    each = np.array([int(share * unit) for share in shares], dtype=kind)
    steps = np.cumsum(np.repeat(each, counts)[order])
    return np.split(position, np.cumsum(counts)[:-1]), steps, unit
