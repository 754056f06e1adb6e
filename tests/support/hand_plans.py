"""Plans made by hand where every GPU has a wire to every other: stars, chains, binary trees, servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Device, Link, Topology
from topoplan.plans.build import build_plan, stage_order
from topoplan.plans.certificates.certificate import Cut, Partition
from topoplan.plans.plan import ALL_TO_ALL, Plan
from topoplan.plans.shards import Edge, Shard, Stage

Tree = Mapping[int, int]  # parent of every rank but the root


def full_mesh(size: int) -> Topology:
    """Every pair of GPUs joined by a 1 GB/s NVLink in each direction."""
    names = [f"gpu{rank}" for rank in range(size)]
    links = [Link(a, b, "nvlink", 1.0) for a in names for b in names if a != b]
    return Topology("mesh", tuple(Device(name, "gpu") for name in names), tuple(links))


def star(ranks: Sequence[int], root: int) -> Tree:
    return {rank: root for rank in ranks if rank != root}


def chain(ranks: Sequence[int], root: int) -> Tree:
    """Ranks in a row that begins with the root and wraps around."""
    turned = [*ranks[ranks.index(root) :], *ranks[: ranks.index(root)]]
    return dict(zip(turned[1:], turned, strict=False))


def binary(ranks: Sequence[int], root: int) -> Tree:
    turned = [*ranks[ranks.index(root) :], *ranks[: ranks.index(root)]]
    return {turned[i]: turned[(i - 1) // 2] for i in range(1, len(turned))}


SHAPES: dict[str, Callable[[Sequence[int], int], Tree]] = {"star": star, "chain": chain, "binary": binary}


def stage(op: str, root: int, tree: Tree) -> Stage:
    edges = (Edge(p, c, (f"gpu{p}", f"gpu{c}"), "nvlink") for c, p in sorted(tree.items()))
    return Stage(op, root, tuple(edges))


def path(tree: Tree, root: int, rank: int) -> Stage:
    """The way down a tree from its root to a rank."""
    edges: dict[int, int] = {}
    while rank != root:
        edges[rank] = tree[rank]
        rank = tree[rank]
    return stage("broadcast", root, edges)


def plan_of(size: int, collective: str, shards: Sequence[Shard], *, root: int | None = None) -> Plan:
    """A plan with a valid, if weak, certificate."""
    fabric = Fabric(full_mesh(size), ("nvlink",))
    if collective == "allreduce":
        certificate: Cut | Partition = Partition(tuple((name,) for name in fabric.ranks))
    else:
        certificate = Cut((fabric.ranks[0 if root is None else root],))
    return build_plan(
        fabric, collective, root=root, shards=shards, certificate=certificate, schedule="trees", method="hand"
    )


def forest_plan(size: int, collective: str, shape: str, *, root: int = 1) -> Plan:
    """One tree per rank with shares 1/N; with one root for all of them where the collective has one.

    In an all-to-all every block goes down the tree of its source.
    """
    ranks = range(size)
    if collective == ALL_TO_ALL:
        down = [SHAPES[shape](ranks, source) for source in ranks]
        paths = [path(down[source], source, rank) for rank in ranks for source in ranks]
        return plan_of(size, collective, [Shard(Fraction(1, size), (one,)) for one in paths])
    rooted = collective in ("broadcast", "reduce")
    shares = [Fraction(1, size)] * size
    if collective in ("allreduce", "broadcast", "reduce") and size > 2:
        shares[0], shares[1] = Fraction(1, 7 * size), Fraction(2, size) - Fraction(1, 7 * size)
    shards = []
    for rank, share in zip(ranks, shares, strict=True):
        top = root if rooted else rank
        tree = SHAPES[shape](ranks, top)
        shards.append(Shard(share, tuple(stage(op, top, tree) for op in stage_order(collective))))
    return plan_of(size, collective, shards, root=root if rooted else None)


def three_phase_plan(servers: Sequence[Sequence[int]]) -> Plan:
    """Reduce in each server, reduce and broadcast across the local roots, broadcast in each server.

    One shard for each rank of the largest server; servers may differ in size.
    """
    size = sum(len(server) for server in servers)
    parts = max(len(server) for server in servers)
    shards = []
    for part in range(parts):
        roots = [server[part % len(server)] for server in servers]
        top = roots[part % len(roots)]
        up = [stage("reduce", r, chain(s, r)) for s, r in zip(servers, roots, strict=True)]
        down = [stage("broadcast", r, binary(s, r)) for s, r in zip(servers, roots, strict=True)]
        across = star(roots, top)
        shards.append(
            Shard(
                Fraction(1, parts),
                (*up, stage("reduce", top, across), stage("broadcast", top, across), *down),
            )
        )
    return plan_of(size, "allreduce", shards)
