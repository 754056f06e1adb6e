"""Pack a broadcast or reduce on a torus of servers by kind, with disjoint trees on a small torus.

With equal ports in d dimensions, 2 d disjoint trees have a closed form, one for each dimension j and direction. Let Z
be the dimensions in which a host is not at the root's coordinate. The tree enters it in dimension j if j is not in Z,
and else in the next dimension of Z behind j, cyclically, always in the tree's direction. This maps the dimensions j one
to one to dimensions, so each link carries one tree at most. Walking back in dimension j puts j into Z, or takes the
next one behind j out of Z until j alone is left, so every walk ends at the root.

With other ports the trees are those of `topoplan.solve.packing.disjoint_arborescences` on the sample
(`topoplan.plans.torus_trees`), whose smallest cut is that of the whole torus. A tree takes a common part of the ports.
If these were too many, those of a small sample are of `topoplan.plan`, with unequal shares.

Servers of several GPUs, or with links of their own, have the same trees between them
(`topoplan.solve.packing.torus_servers`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import gcd, lcm

from topoplan.errors import InfeasibleError
from topoplan.machine.cluster_by_kind import ClusterByKind
from topoplan.machine.fabric import Fabric, usable_fabric
from topoplan.machine.torus import Direction, Torus
from topoplan.plans.build import stage_order
from topoplan.plans.plan_by_kind import PlanByKind
from topoplan.plans.shards import Edge, Stage
from topoplan.plans.torus_trees import TorusTree, line_rate, narrowest_line, port_rates, rooted_sample
from topoplan.solve.packing.disjoint_arborescences import disjoint_arborescences
from topoplan.solve.packing.torus_servers import TorusServers, broadcast_trees

MOST_TREES = 64
"""Disjoint trees up to which ports of different bandwidth are packed."""

MOST_TREE_EDGES = 2048
"""Edges of all trees together up to which they are: some seconds."""

MOST_EXACT = 9
"""Servers of a sample up to which ports of any bandwidth are packed: 3 x 3, or 2 x 2 x 2."""

Trees = list[tuple[Fraction, tuple[int, ...]]]
"""Shares of trees, and the parent of each host there, -1 for the root."""


def plan_rooted_torus(
    cluster: ClusterByKind,
    collective: str,
    *,
    root: int,
    channels: str,
    progress: Callable[[str], None] | None,
) -> PlanByKind:
    """Return the plan of a broadcast or reduce on a torus of servers, whose rate is the proved bound.

    Arguments are those of `topoplan.plan_by_kind`. InfeasibleError unless the servers are equal, with ports in every
    dimension and own links that carry what these take, or if ports of different bandwidth need too many trees.
    """
    started = time.perf_counter()
    sample = rooted_sample(cluster)
    _, gpu = cluster.server_of(root)
    fabric = usable_fabric(sample.topology.settled(), channels=channels, collective=collective, root=gpu)
    torus = sample.cluster.network.torus
    (op,) = stage_order(collective)
    of = {name: sample.server_of(name) for name in fabric.nodes}
    flows: dict[tuple[int, int], Fraction] = {}
    for link, capacity in zip(fabric.links, fabric.capacity, strict=True):
        ends = (of[link.src], of[link.dst]) if op == "broadcast" else (of[link.dst], of[link.src])
        if ends[0] != ends[1]:
            flows[ends] = flows.get(ends, Fraction(0)) + capacity
    ports = {
        torus.between(*ends): rate / (2 if _side(torus, ends) == 2 else 1) for ends, rate in flows.items()
    }
    if progress is not None:
        progress(f"packing trees on {torus.servers:,} servers")
    trees = (
        _equal([_closed(torus, one) for one in torus.directions])
        if len(set(ports.values())) == 1 and len(ports) == len({*map(torus.offset, torus.directions)})
        else _packed(cluster, torus, flows)
    )
    whole, rates = cluster.network.torus.sides, port_rates(cluster)
    line = narrowest_line(whole, rates)
    if sample.cluster.kinds[0].links or fabric.size > torus.servers:
        templates = TorusServers(sample, fabric, op, gpu, line_rate(whole, rates, line)).templates(trees)
    else:
        templates = tuple(TorusTree(share, (_stage(fabric, op, tree),)) for share, tree in trees)
    bare = PlanByKind(collective, cluster, root, fabric.channels, (), (), 0.0, 0.0, line=line)
    bare.__dict__.update(sample=sample, fabric=fabric)
    return bare.with_templates(templates).timed(time.perf_counter() - started)


def _side(torus: Torus, ends: tuple[int, int]) -> int:
    """Return the side of the dimension in which two neighbours differ."""
    return next(side for side, ahead in zip(torus.sides, torus.between(*ends), strict=True) if ahead)


def _closed(torus: Torus, tree: Direction) -> list[int]:
    """Return the parent of each host in the tree of a dimension and direction, -1 for the root."""
    parents, many = [-1], len(torus.sides)
    for host in range(1, torus.servers):
        at = torus.coordinates(host)
        # The dimensions behind that of the tree, and it as the last one.
        behind = [(tree.dimension + 1 + one) % many for one in range(many)]
        entered = tree.dimension
        if at[entered]:
            entered = next(one for one in behind if at[one])
        parents.append(torus.moved(host, torus.offset(Direction(entered, -tree.step))))
    return parents


def _equal(trees: Sequence[list[int]]) -> Trees:
    """Return trees that all carry the same, equal ones together."""
    return [(Fraction(many, len(trees)), tree) for tree, many in sorted(Counter(map(tuple, trees)).items())]


def _packed(cluster: ClusterByKind, torus: Torus, flows: dict[tuple[int, int], Fraction]) -> Trees:
    """Return trees on links of different bandwidth: equal ones, or on few hosts those of `topoplan.plan`."""
    rates = port_rates(cluster)
    rate = line_rate(torus.sides, rates, narrowest_line(torus.sides, rates))
    scale = lcm(*(one.denominator for one in flows.values()))
    whole = {ends: int(one * scale) for ends, one in flows.items()}
    part = gcd(*whole.values())
    count = int(rate * scale) // part
    if count <= MOST_TREES and count * torus.servers <= MOST_TREE_EDGES:
        found = disjoint_arborescences(
            torus.servers, {ends: one // part for ends, one in whole.items()}, 0, count
        )
        assert found is not None, "lines are the smallest cuts of a torus"
        return _equal(found)
    if torus.servers > MOST_EXACT:
        raise InfeasibleError(
            f"ports of different bandwidth must have a common part that needs at most {MOST_TREES} trees, of "
            f"{MOST_TREE_EDGES:,} edges on the sample, or a sample of at most {MOST_EXACT} servers, got {count:,} "
            f"trees of {torus.servers - 1:,}; plan the listed cluster instead"
        )
    named = {(str(tail), str(head)): one for (tail, head), one in flows.items()}
    unequal = broadcast_trees(named, [str(one) for one in range(torus.servers)], 0, rate)
    assert unequal is not None, "lines are the smallest cuts of a torus"
    made = []
    for share, routes in unequal:
        above = {int(child): int(parent) for parent, child in routes}
        made.append((share, tuple(above.get(one, -1) for one in range(torus.servers))))
    return made


def _stage(fabric: Fabric, op: str, parents: Sequence[int]) -> Stage:
    """Return the tree of the parents of all ranks, each edge on the link between its ends."""
    edges = []
    for child, parent in enumerate(parents):
        if parent >= 0:
            ends = (parent, child) if op == "broadcast" else (child, parent)
            arc = fabric.arc((fabric.link_between[ends],))
            route = arc.route if op == "broadcast" else arc.route[::-1]
            edges.append(Edge(parent, child, route, arc.channel))
    made = Stage(op, 0, tuple(edges))
    return Stage(op, 0, made.top_down())
