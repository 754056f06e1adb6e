"""The lowest tree: the buffer in one piece, over as few edges one after another as the wires allow.

A tree of shortest paths from its root, found breadth first, where an edge is a route that passes no other rank. An
allreduce takes the root whose way up and down is shortest together; of several, the one with the highest rate. An
allgather or reduce-scatter takes one such tree for each owner. Each rank hangs below the parent whose link is least
full. One tree pays each start-up once, where a packing of many trees pays them on shared wires one after another: it
is for messages that are too small to need bandwidth.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from fractions import Fraction

from topoplan.bounds.cuts_and_partitions import best_bound
from topoplan.fabric.fabric import Fabric
from topoplan.plans.allocation import Allocation
from topoplan.plans.build import build_plan, stage_order, trivial_plan
from topoplan.plans.loads import forest_rate
from topoplan.plans.plan import Plan
from topoplan.plans.tree import Edge, Shard, Stage
from topoplan.schedules.least_loaded import LeastLoaded
from topoplan.topology import TopologyLike


def lowest_tree(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
) -> Plan:
    """The schedule of a collective with the fewest edges one after another, in one piece for each owner.

    Parameters
    ----------
    topology : Topology, or what `topoplan.load` takes
    collective : str
        allreduce, broadcast, reduce, allgather or reduce_scatter.
    gpus : sequence of int or None
        The allocation; all GPUs for None.
    root : int or None
        GPU number of the root of a broadcast or reduce; the allocation's first GPU for None.
    channels : str
        As for `topoplan.plan`.

    Raises
    ------
    UsageError
        Unknown collective, GPU out of range, a root outside the allocation, or one where the collective has none.
    InfeasibleError
        The channels do not connect the allocation.

    Examples
    --------
    The hybrid cube mesh has diameter 2:

    >>> import topoplan
    >>> plan = lowest_tree(topoplan.load("dgx-1v"))
    >>> plan.trees, plan.height, plan.rate
    (1, 2, 25.0)
    """
    started = time.perf_counter()
    asked = Allocation.of(topology, collective, gpus=gpus, root=root)
    collective, rank, fabric = asked.collective, asked.root, asked.connected(channels)
    if fabric.size == 1:
        made = trivial_plan(fabric, collective, root=rank, method="lowest tree")
        return made.timed(time.perf_counter() - started)
    if collective in ("allgather", "reduce_scatter"):
        routes, share, steps = LeastLoaded(fabric), Fraction(1, fabric.size), _steps(fabric, collective)
        shards = [_shard(fabric, steps, owner, routes, share) for owner in range(fabric.size)]
    else:
        shards = [_best_shard(fabric, collective, range(fabric.size) if rank is None else (rank,))]
    made = build_plan(
        fabric,
        collective,
        root=rank,
        shards=shards,
        certificate=best_bound(fabric, collective, rank),
        schedule="lowest tree" if len(shards) == 1 else "lowest trees",
        method="lowest tree",
    )
    return made.timed(time.perf_counter() - started)


def _best_shard(fabric: Fabric, collective: str, roots: Sequence[int]) -> Shard:
    """The whole buffer over the trees of the best root: lowest, then fastest, then first."""

    steps = _steps(fabric, collective)

    def depth(root: int) -> int:
        return sum(max(_depths(onward, root)) for onward in steps.values())

    depths = {root: depth(root) for root in roots}
    lowest = min(depths.values())
    routes = LeastLoaded(fabric)
    shards = [
        _shard(fabric, steps, root, routes.emptied(), Fraction(1)) for root in roots if depths[root] == lowest
    ]
    return max(shards, key=lambda shard: forest_rate([shard], fabric) or 0)


Steps = dict[str, list[list[int]]]
"""For each operation the ranks one hop further from the root than every rank, in the direction of the data."""


def _steps(fabric: Fabric, collective: str) -> Steps:
    steps: Steps = {}
    for op in stage_order(collective):
        onward: list[set[int]] = [set() for _ in range(fabric.size)]
        for arc in fabric.arcs:
            near, far = (arc.tail, arc.head) if op == "broadcast" else (arc.head, arc.tail)
            onward[near].add(far)
        steps[op] = [sorted(each) for each in onward]
    return steps


def _shard(fabric: Fabric, steps: Steps, root: int, routes: LeastLoaded, share: Fraction) -> Shard:
    return Shard(share, tuple(_stage(op, onward, root, routes, share) for op, onward in steps.items()))


def _stage(op: str, onward: list[list[int]], root: int, routes: LeastLoaded, share: Fraction) -> Stage:
    """A tree of shortest paths; ranks with the fewest possible parents choose first."""
    depth = _depths(onward, root)
    level: dict[int, list[int]] = {}
    for parent, children in enumerate(onward):
        for child in children:
            if depth[parent] + 1 == depth[child]:
                level.setdefault(child, []).append(parent)
    edges: list[Edge] = []
    for child in sorted(level, key=lambda rank: (depth[rank], len(level[rank]), rank)):
        edges.append(routes.edge(op, sorted(level[child]), child, share))
    return Stage(op, root, Stage(op, root, tuple(edges)).top_down())


def _depths(onward: list[list[int]], root: int) -> list[int]:
    """Fewest edges between the root and every rank, in the direction of the data."""
    depth = {root: 0}
    frontier = [root]
    for rank in frontier:
        for far in onward[rank]:
            if far not in depth:
                depth[far] = depth[rank] + 1
                frontier.append(far)
    return [depth[rank] for rank in range(len(onward))]
