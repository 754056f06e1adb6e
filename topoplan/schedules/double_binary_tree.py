"""Double binary trees: two binary trees over the ranks, each with half of the buffer.

Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009; NCCL
uses them for AllReduce. No rank is an inner node of both, so that all ranks send about equally much. The
first tree numbers its positions in order, so that odd positions are leaves and even ones inner nodes; the
second is its mirror image where the number of positions is even and its shift by one where it is odd, which
swaps leaves and inner nodes. For broadcast and reduce the root stands outside and is the parent of both
trees' roots. The trees know nothing of the wires: a hop without a direct route is relayed along a shortest
path.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from fractions import Fraction

from topoplan.bounds.cuts_and_partitions import best_bound
from topoplan.errors import UsageError
from topoplan.fabric.fabric import Fabric
from topoplan.plans.allocation import Allocation
from topoplan.plans.build import build_plan, stage_order, trivial_plan
from topoplan.plans.plan import Plan
from topoplan.plans.tree import Edge, Shard, Stage
from topoplan.schedules.relay import shortest_route
from topoplan.topology import TopologyLike

Parents = dict[int, int]
"""Parent of every rank but the root."""


def double_binary_tree(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
) -> Plan:
    """The double binary tree schedule of a collective.

    Parameters
    ----------
    topology : Topology, or what `topoplan.load` takes
    collective : str
        allreduce, broadcast or reduce.
    gpus : sequence of int or None
        The allocation; all GPUs for None.
    root : int or None
        GPU number of the root of a broadcast or reduce; the allocation's first GPU for None.
    channels : str
        auto, nvlink or pcie, as for `topoplan.plan`.

    Raises
    ------
    UsageError
        Another collective, GPU out of range, a root outside the allocation, or a root for allreduce.
    InfeasibleError
        The channels do not connect the allocation.

    Examples
    --------
    >>> import topoplan
    >>> plan = double_binary_tree(topoplan.load("dgx-2"))
    >>> plan.trees, plan.height, plan.rate
    (2, 4, 75.0)
    """
    started = time.perf_counter()
    asked = Allocation.of(topology, collective, gpus=gpus, root=root)
    collective, rank = asked.collective, asked.root
    if collective not in ("allreduce", "broadcast", "reduce"):
        raise UsageError(
            f"double binary trees do not do {collective}; use allreduce, broadcast or reduce, or the ring"
        )
    fabric = asked.connected(channels)
    if fabric.size == 1:
        return trivial_plan(fabric, collective, root=rank, method="double binary tree").timed(
            time.perf_counter() - started
        )
    trees = two_trees(range(fabric.size)) if rank is None else rooted_trees(fabric.size, rank)
    direct = {(arc.tail, arc.head) for arc in fabric.arcs}
    relayed = sum((parent, child) not in direct for tree in trees for child, parent in tree.items())
    made = build_plan(
        fabric,
        collective,
        root=rank,
        shards=[
            Shard(Fraction(1, 2), tuple(_stage(op, tree, fabric) for op in stage_order(collective)))
            for tree in trees
        ],
        certificate=best_bound(fabric, collective, rank),
        schedule="double binary tree",
        method="double binary tree",
        notes=(f"{relayed} tree edges have no direct route and are relayed",) if relayed else (),
    )
    return made.timed(time.perf_counter() - started)


def two_trees(ranks: Sequence[int]) -> tuple[Parents, Parents]:
    """Two binary trees over the same ranks such that no rank is an inner node of both.

    Examples
    --------
    >>> two_trees(range(5))
    ({0: 1, 1: 3, 2: 1, 4: 3}, {1: 2, 2: 4, 3: 2, 0: 4})
    """
    count = len(ranks)
    first = in_order_tree(count)
    if count % 2 == 0:
        second = {count - 1 - child: count - 1 - parent for child, parent in first.items()}
    else:
        second = {(child + 1) % count: (parent + 1) % count for child, parent in first.items()}
    return _named(first, ranks), _named(second, ranks)


def rooted_trees(size: int, root: int) -> tuple[Parents, Parents]:
    """Two trees over ranks 0 to ``size - 1`` from one root: `two_trees` over the others, hung below it."""
    others = [(root + i) % size for i in range(1, size)]
    first, second = two_trees(others)
    tops = [next(rank for rank in others if rank not in tree) for tree in (first, second)]
    return first | {tops[0]: root}, second | {tops[1]: root}


def in_order_tree(count: int) -> Parents:
    """The binary tree whose in-order numbering is 0 to ``count - 1``, with leaves at even numbers.

    Its height is floor(log2(count)).

    Examples
    --------
    >>> in_order_tree(7)
    {0: 1, 1: 3, 2: 1, 4: 5, 5: 3, 6: 5}
    """
    parents = {}
    for number in range(1, count + 1):
        level = number & -number
        parent = (number ^ level) | (level << 1)
        if parent > count:
            parent = number ^ level
        if parent:
            parents[number - 1] = parent - 1
    return parents


def _named(tree: Parents, ranks: Sequence[int]) -> Parents:
    return {ranks[child]: ranks[parent] for child, parent in tree.items()}


def _stage(op: str, tree: Parents, fabric: Fabric) -> Stage:
    edges = []
    for child, parent in sorted(tree.items()):
        tail, head = (parent, child) if op == "broadcast" else (child, parent)
        links = shortest_route(fabric, tail, head)
        route = (fabric.ranks[tail], *(fabric.links[number].dst for number in links))
        edges.append(
            Edge(parent, child, route if op == "broadcast" else route[::-1], fabric.channel_of(links))
        )
    top = next(parent for parent in sorted(set(tree.values())) if parent not in tree)
    return Stage(op, top, tuple(edges))
