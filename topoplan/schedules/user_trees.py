"""Plan user-defined trees: check them, route them, and divide the buffer among them at the highest rate.

A tree is given by its edges from parent to child, as a nested list of ranks, or as an order of the ranks: a chain
from its root, or a ring, which is as many chains as it has ranks (`topoplan.schedules.ring_forest`). Missing routes
are the least loaded so far and then the shortest (`topoplan.schedules.routes`), through other ranks only if no other
route exists. Missing shares x are those of the highest rate R for these trees and routes,

    maximise R   subject to   sum of x(T) R load(T, e) <= c(e) for every link e,   sum of x(T) = 1,

a linear program with a row for each link, solved exactly in the variables x(T) R. In allgather and reduce-scatter
the shares of every owner's trees add up to 1/N. The bound is that of all plans on these links: the gap is what other
trees could gain.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import pairwise
from math import lcm
from numbers import Integral

from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.routing import fewest_steps
from topoplan.machine.topology import TopologyLike
from topoplan.plans.build import Allocation, stage_order, timed, trivial_plan
from topoplan.plans.loads import link_loads
from topoplan.plans.plan import ROOTED, Plan, Tree
from topoplan.plans.shards import Edge, Shard, Stage
from topoplan.plans.verify import verify
from topoplan.schedules.hamiltonian_cycles import ring_hops
from topoplan.schedules.ring_forest import LogicalRing, ring_shards, shortest_route
from topoplan.schedules.routes import LeastLoaded, edge_along
from topoplan.solve.cuts_and_partitions import bounded_plan, whole_capacities
from topoplan.solve.simplex.exact_simplex import PackingSimplex
from topoplan.units import check_type

USER_TREES = "own trees"
"""Schedule and method of such plans."""

SHAPES = ("edges", "tree", "chain", "ring")
"""Keys by which a tree may be given."""

FORMS = (
    "give edges [[parent, child], …], a nested list [root, [child, grandchild], child], or an order of ranks as "
    '{"chain": […]} or {"ring": […]}'
)

MOST_NAMED = 8
"""Devices up to which an error names each of them."""

Share = Fraction | int | float | str

_SHARE = re.compile(r"\s*[0-9]{1,300}(?:/[0-9]{1,300}|\.[0-9]{1,300})?\s*")
"""No exponents: ``1e9999999999`` is short to write and too long to compute with."""


@dataclass(frozen=True, slots=True)
class _Given:
    """A tree as it was given, with its ranks checked.

    An edge is parent, child, and the devices of its route, empty if it is to be found. ``order`` is of a ring, else
    empty; ``root`` of a ring is -1. ``share`` None is to be chosen.
    """

    order: tuple[int, ...]
    edges: tuple[tuple[int, int, tuple[str, ...]], ...]
    root: int
    share: Fraction | None


@dataclass(frozen=True, slots=True)
class _Routed:
    """A routed tree: its shards if it has the whole buffer, or its owner's whole part."""

    shards: tuple[Shard, ...]
    share: Fraction | None


@timed
def plan_from_trees(
    topology: TopologyLike,
    collective: str,
    trees: Sequence[object],
    *,
    shares: Sequence[Share | None] | None = None,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
) -> Plan:
    """Return the plan that runs a collective over user-defined trees.

    Parameters
    ----------
    topology, gpus, channels
        As for `topoplan.plan`.
    collective : str
        allreduce (up and down each tree), broadcast, reduce, allgather or reduce_scatter, whose trees have their owners
        as roots.
    trees : sequence
        For each tree a networkx graph, whose edges lead from parent to child (an undirected one states its ``root`` as
        an attribute); one of `Plan.trees`; its edges, ``[(parent, child), …]``; a nested list, ``[root, [child,
        grandchild], child]``; an order of ranks from the root on, ``[0, 1, 2]``, which is a chain; or one of these
        under its name: ``{"edges": …}``, ``{"tree": …}``, ``{"chain": …}``, ``{"ring": …}``, where ``"share"`` may
        stand too. Whole numbers are ranks, from 0 in the order of the GPUs; anything else is a name of a device, or a
        node as `Topology.from_networkx` took it. An edge may have its route, ``(parent, child, devices)``.
    shares : sequence of Fraction, int, float, text such as "1/3", or None, optional
        For each tree, a fraction of the whole buffer; None for a share that is to be chosen.
    root : int or None
        GPU number of the root of a broadcast or reduce; the root of the trees for None.

    Raises
    ------
    UsageError
        An invalid tree, or one that does not span all ranks; an unknown rank or device; shares that do not add up; as
        `topoplan.plan`.
    InfeasibleError
        The channels do not connect the allocation, or no path leads along an edge.

    See Also
    --------
    topoplan.plan_from_rings, topoplan.register_schedule, topoplan.compare

    Examples
    --------
    Blink's GPUs 1, 4, 5, 7 have NVLinks between 4, 5 and 7 and from 1 to 5: the two trees that `topoplan.plan` finds.

    >>> import topoplan
    >>> made = plan_from_trees("dgx-1v", "allreduce", [[(1, 2), (1, 3), (2, 0)], [2, [3, 1], 0]], gpus=[1, 4, 5, 7])
    >>> made.rate, made.bound, [str(shard.share) for shard in made.shards]
    (50.0, 50.0, ['1/2', '1/2'])
    >>> import networkx
    >>> links = topoplan.load("dgx-1v").to_networkx().subgraph(["gpu1", "gpu4", "gpu5", "gpu7"])
    >>> nvlinks = networkx.Graph((a, b) for a, b, link in links.edges(data=True) if link["channel"] == "nvlink")
    >>> plan_from_trees("dgx-1v", "allreduce", [networkx.bfs_tree(nvlinks, "gpu4")], gpus=[1, 4, 5, 7]).rate
    25.0
    """
    asked = Allocation.of(topology, collective, gpus=gpus)
    names = asked.topology.gpus
    given = [_given(tree, number, names) for number, tree in enumerate(_listed(trees))]
    given = _with_shares(given, shares)
    if asked.collective in ROOTED:
        centre = _common_root(given, asked, root)
        asked = replace(asked, root=centre)
    elif root is not None:
        raise UsageError(
            f"{asked.collective} has no root; leave out root {root}, or plan a broadcast or reduce"
        )
    fabric = asked.fabric(channels)
    if fabric.size == 1:
        return trivial_plan(fabric, asked.collective, root=asked.root, method=USER_TREES)
    routed, notes = _routed(given, fabric, asked)
    parts = _parts(routed, asked.collective, fabric.size)
    chosen = _shares(routed, parts, fabric)
    idle = [str(number) for number, share in enumerate(chosen) if not share]
    if idle:
        which = f"trees {', '.join(idle)} add" if len(idle) > 1 else f"tree {idle[0]} adds"
        notes.append(f"{which} nothing beside the others: no share")
    shards = [
        Shard(shard.share * share, shard.stages)
        for tree, share in zip(routed, chosen, strict=True)
        for shard in tree.shards
        if share
    ]
    if asked.collective in ("allgather", "reduce_scatter"):
        shards.sort(key=lambda shard: shard.stages[0].root)
    made = bounded_plan(fabric, asked.collective, shards, USER_TREES, root=asked.root, notes=notes)
    verify(made)
    return made


def plan_from_rings(
    topology: TopologyLike,
    collective: str,
    rings: Sequence[object],
    *,
    shares: Sequence[Share | None] | None = None,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
) -> Plan:
    """Return the plan that runs a collective over user-defined rings, each in one direction.

    The rate is that of these rings. `topoplan.ring_plan` mixes as many rings as the links carry.

    Parameters
    ----------
    rings : sequence
        For each ring the order of its ranks (numbers or devices), or a networkx graph that is one cycle through all
        ranks; an undirected cycle runs in one of its directions.
    topology, collective, shares, gpus, root, channels
        As for `plan_from_trees`, as are the errors.

    See Also
    --------
    topoplan.plan_from_trees, topoplan.ring_plan, topoplan.register_schedule

    Examples
    --------
    >>> import networkx
    >>> ring = networkx.cycle_graph([0, 1, 2, 3], create_using=networkx.DiGraph)
    >>> both = [ring, ring.reverse()]
    >>> [round(plan_from_rings("dgx-1v", "all_reduce", some, gpus=range(4)).rate, 3) for some in ([ring], both)]
    [16.667, 33.333]
    """
    asked = [{"ring": _cycle(one, f"ring {number}")} for number, one in enumerate(_listed(rings))]
    return plan_from_trees(
        topology, collective, asked, shares=shares, gpus=gpus, root=root, channels=channels
    )


def _cycle(ring: object, where: str) -> list[object]:
    """Return the order of the ranks in a ring."""
    if isinstance(ring, list | tuple):
        return list(ring[:-1] if len(ring) > 2 and ring[0] == ring[-1] else ring)
    from networkx import Graph, dfs_preorder_nodes

    if not isinstance(ring, Graph):
        raise UsageError(f"{where} must be an order of ranks or a networkx graph, got {type(ring).__name__}")
    order = list(dfs_preorder_nodes(ring, next(iter(ring)))) if ring else []
    ends = zip(order, [*order[1:], *order[:1]], strict=True)
    edges = len(order) if ring.is_directed() or len(order) > 2 else len(order) - 1
    closed = ring.number_of_edges() == edges and all(ring.has_edge(*pair) for pair in ends)
    if not order or len(order) < len(ring) or not closed:
        raise UsageError(f"{where} must be one cycle through all its nodes; networkx.cycle_graph makes one")
    return order


def _listed(trees: object) -> list[object]:
    if not isinstance(trees, list | tuple) or not trees:
        raise UsageError(f"trees must be a list of one tree or more; of each {FORMS}")
    return list(trees)


def _of_graph(graph: object, where: str) -> Mapping[str, object]:
    """Return a networkx tree as its edges from parent to child, with the fraction that it states."""
    from networkx import Graph, bfs_edges, is_tree

    if not isinstance(graph, Graph):
        raise UsageError(f"{where}: {_short(graph)} is not a tree; {FORMS}, or a networkx.DiGraph")
    edges = list(graph.edges())
    if not graph.is_directed():
        root = graph.graph.get("root")
        if root not in graph or not is_tree(graph):
            raise UsageError(f"{where}: an undirected graph has no root; give networkx.bfs_tree(graph, root)")
        edges = list(bfs_edges(graph, root))
    return {"edges": edges or [*graph], "share": graph.graph.get("fraction")}


def _given(tree: object, number: int, names: Sequence[str]) -> _Given:
    where = f"tree {number}"
    share = None
    if isinstance(tree, Tree):
        tree = {"edges": tree.edges, "share": tree.fraction}
    elif hasattr(tree, "is_directed"):
        tree = _of_graph(tree, where)
    if isinstance(tree, Mapping):
        unknown = [key for key in tree if key not in (*SHAPES, "share")]
        if unknown:
            raise UsageError(
                f"{where}: key {unknown[0]!r} is unknown; known are {', '.join(SHAPES)} and share"[:300]
            )
        shapes = [key for key in SHAPES if key in tree]
        if len(shapes) != 1:
            raise UsageError(f"{where}: it has {' and '.join(shapes) or 'no tree'}; {FORMS}")
        shape, body = shapes[0], tree[shapes[0]]
        share = None if tree.get("share") is None else _share(tree["share"], where)
    else:
        shape, body = _shape(tree), tree
    if not isinstance(body, list | tuple) or not body:
        raise UsageError(f"{where}: {_short(body)} is not a tree; {FORMS}")
    if shape in ("chain", "ring"):
        order = tuple(_rank(item, names, where) for item in body)
        twice = [rank for place, rank in enumerate(order) if rank in order[:place]]
        if twice:
            raise UsageError(f"{where}: rank {twice[0]} stands twice in the {shape}; every rank stands once")
        _check_spans(set(order), names, where)
        if shape == "ring":
            return _Given(order, (), -1, share)
        edges = [(parent, child, ()) for parent, child in pairwise(order)]
        return _Given((), tuple(edges), order[0], share)
    found = (
        _nested_edges(body, names, where) if shape == "tree" else [_edge(item, names, where) for item in body]
    )
    return _Given((), tuple(found), _root_of(found, names, where), share)


def _shape(tree: object) -> str:
    """Return the key of a tree given without one: pairs are edges, ranks alone a chain, and both a nested list."""
    if not isinstance(tree, list | tuple):
        return "edges"
    lists = [isinstance(item, list | tuple) for item in tree]
    return "edges" if all(lists) else "tree" if any(lists) else "chain"


def _rank(item: object, names: Sequence[str], where: str) -> int:
    # a node of a graph may be any object, which `Topology.from_networkx` names after its kind
    name = item if isinstance(item, str) else f"gpu{item}"
    if isinstance(item, Integral) and not isinstance(item, bool):
        if 0 <= int(item) < len(names):
            return int(item)
    elif name in names:
        return names.index(name)
    known = ", ".join(names) if len(names) <= MOST_NAMED else f"{names[0]} to {names[-1]}"
    raise UsageError(
        f"{where}: {_short(item)} is not a rank; ranks are 0 to {len(names) - 1}, which are {known}"
    )


def _edge(item: object, names: Sequence[str], where: str) -> tuple[int, int, tuple[str, ...]]:
    if not isinstance(item, list | tuple) or len(item) not in (2, 3):
        raise UsageError(
            f"{where}: {_short(item)} is not an edge; give [parent, child] or [parent, child, [devices]]"
        )
    parent, child = (_rank(end, names, where) for end in item[:2])
    if parent == child:
        raise UsageError(f"{where}: an edge joins rank {parent} with itself")
    route = item[2] if len(item) == 3 else ()
    if not isinstance(route, list | tuple) or not all(isinstance(name, str) for name in route):
        raise UsageError(f"{where}: the route {_short(route)} is not a list of names of devices")
    return parent, child, tuple(route)


def _nested_edges(
    body: Sequence[object], names: Sequence[str], where: str
) -> list[tuple[int, int, tuple[str, ...]]]:
    """Return the edges of ``[root, child, [child, grandchild], …]``."""
    edges: list[tuple[int, int, tuple[str, ...]]] = []
    waiting: list[tuple[int, object]] = [(-1, body)]
    for above, item in waiting:
        branch = list(item) if isinstance(item, list | tuple) else [item]
        if not branch:
            raise UsageError(f"{where}: an empty list is not a branch; a branch begins with its rank")
        rank = _rank(branch[0], names, where)
        if above >= 0:
            edges.append((above, rank, ()))
        waiting += [(rank, child) for child in branch[1:]]
    return edges


def _check_spans(reached: set[int], names: Sequence[str], where: str) -> None:
    missing = [rank for rank in range(len(names)) if rank not in reached]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UsageError(
            f"{where}: it does not reach rank {missing[0]} ({names[missing[0]]}){more}; a tree spans all"
        )


def _root_of(edges: Sequence[tuple[int, int, tuple[str, ...]]], names: Sequence[str], where: str) -> int:
    """Return the root of a spanning tree; raise UsageError if the edges are not one."""
    parent: dict[int, int] = {}
    for above, below, _ in edges:
        if below in parent:
            raise UsageError(
                f"{where}: rank {below} has two parents, {parent[below]} and {above}; a tree gives it one"
            )
        parent[below] = above
    touched = {end for above, below, _ in edges for end in (above, below)} or {0}
    roots = sorted(touched - set(parent))
    if not roots:
        raise UsageError(
            f"{where}: its edges run in a cycle, so no rank is the root; edges are [parent, child]"
        )
    if len(roots) > 1:
        raise UsageError(
            f"{where}: ranks {roots[0]} and {roots[1]} both have no parent; a tree has one root, and edges are "
            "[parent, child]"
        )
    children: dict[int, list[int]] = {}
    for above, below, _ in edges:
        children.setdefault(above, []).append(below)
    stray = sorted(touched - fewest_steps(roots, lambda rank: children.get(rank, ())).keys())
    if stray:
        raise UsageError(
            f"{where}: rank {stray[0]} is in a cycle that the root {roots[0]} does not reach; edges are [parent, child]"
        )
    _check_spans(touched, names, where)
    return roots[0]


def _share(value: object, where: str) -> Fraction:
    """Return a share above zero, at most 1, exact: decimals are what they say."""
    try:
        number = isinstance(value, Fraction | int | float) and not isinstance(value, bool)
        if not number and not (isinstance(value, str) and _SHARE.fullmatch(value)):
            raise ValueError
        share = Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        raise UsageError(f'{where}: the share {_short(value)} is not a number such as 0.5 or "1/3"') from None
    if not 0 < share <= 1:
        raise UsageError(
            f"{where}: the share {_short(value)} is not above 0 and at most 1; leave out trees of no share"
        )
    return share


def _with_shares(given: list[_Given], shares: Sequence[Share | None] | None) -> list[_Given]:
    if shares is None:
        return given
    if any(tree.share is not None for tree in given):
        raise UsageError("shares are given beside the trees and inside them; give them in one place")
    check_type(
        "shares", shares, Collection, remedy="give one share for each tree, None for a share to choose"
    )
    if len(shares) != len(given):
        raise UsageError(
            f"{len(shares)} shares do not fit {len(given)} trees; give one each, None for a share to choose"
        )
    return [
        replace(tree, share=None if share is None else _share(share, f"tree {number}"))
        for number, (tree, share) in enumerate(zip(given, shares, strict=True))
    ]


def _common_root(given: Sequence[_Given], asked: Allocation, root: int | None) -> int:
    rooted = [(number, tree.root) for number, tree in enumerate(given) if tree.root >= 0]
    centre = rooted[0][1] if rooted else 0
    why = f"tree {rooted[0][0]} has rank {centre}" if rooted else ""
    if root is not None:
        why = f"root {root} was asked for"
        centre = Allocation.of(asked.machine, asked.collective, gpus=asked.gpus, root=root).root or 0
    for number, own in rooted:
        if own != centre:
            raise UsageError(
                f"tree {number} has rank {own} as its root, but {why}; a {asked.collective} has one root"
            )
    return centre


def _routed(given: Sequence[_Given], fabric: Fabric, asked: Allocation) -> tuple[list[_Routed], list[str]]:
    """Route every tree, and return notes on the routes through other ranks."""
    routes = LeastLoaded(fabric)
    share = Fraction(1, len(given))
    relayed: dict[str, None] = {}
    found = []
    for number, tree in enumerate(given):
        load = tree.share or share
        wired = partial(_wired, routes, fabric, share=load, number=number, relayed=relayed)
        if tree.order:
            edges = (wired("broadcast", (tail, head, ())) for tail, head in ring_hops(tree.order))
            hops = (tuple(fabric.link_index[ends] for ends in pairwise(edge.route)) for edge in edges)
            ring = LogicalRing(Fraction(1), tree.order, tuple(hops))
            shards = ring_shards([ring], fabric, collective=asked.collective, root=asked.root)
        else:
            stages = []
            for op in stage_order(asked.collective):
                edges = (wired(op, edge) for edge in tree.edges)
                stages.append(Stage(op, tree.root, Stage(op, tree.root, tuple(edges)).top_down()))
            shards = (Shard(Fraction(1), tuple(stages)),)
        found.append(_Routed(shards, tree.share))
    return found, list(relayed)


def _wired(
    routes: LeastLoaded,
    fabric: Fabric,
    op: str,
    edge: tuple[int, int, tuple[str, ...]],
    *,
    share: Fraction,
    number: int,
    relayed: dict[str, None],
) -> Edge:
    """Return one edge with its route, in the direction from parent to child."""
    parent, child, route = edge
    ends = (parent, child) if op == "broadcast" else (child, parent)
    if not route and routes.joined(*ends):
        return routes.edge(op, (parent,), child, share)
    if route:
        if (route[0], route[-1]) != (fabric.ranks[parent], fabric.ranks[child]):
            raise UsageError(
                f"tree {number}: the route {'-'.join(route)} does not lead from {fabric.ranks[parent]} to "
                f"{fabric.ranks[child]}"[:300]
            )
        forward = route if op == "broadcast" else route[::-1]
        for src, dst in pairwise(forward):
            if (src, dst) not in fabric.link_index:
                raise UsageError(
                    f"tree {number}: the route {'-'.join(route)} crosses {src}->{dst}, but no link over "
                    f"{'+'.join(fabric.channels)} joins them"[:300]
                )
        foreign = fabric.transit.foreign(forward)
        if foreign is not None:
            raise UsageError(
                f"tree {number}: the route {'-'.join(route)} passes {foreign} of server "
                f"{fabric.transit.servers[foreign]}, which does not forward what other servers send"[:300]
            )
        unable = fabric.transit.unable(forward)
        if unable:
            raise UsageError(f"tree {number}: the route {'-'.join(route)} {unable}"[:300])
        links = tuple(fabric.link_index[pair] for pair in pairwise(forward))
    else:
        try:
            links = shortest_route(fabric, *ends)
        except InfeasibleError as error:
            raise InfeasibleError(f"tree {number}: {error}", cut=error.cut) from None
        forward = (fabric.ranks[ends[0]], *(fabric.links[link].dst for link in links))
        between = ", ".join(forward[1:-1])
        relayed[f"no wire leads from {forward[0]} to {forward[-1]}: data passes {between}"] = None
    return edge_along(fabric, op, parent, child, links)


def _parts(routed: Sequence[_Routed], collective: str, size: int) -> list[dict[int, Fraction]]:
    """Return the part of each owner's need that a whole tree covers: 1 of the only one, 1/N of each for a ring."""
    if collective not in ("allgather", "reduce_scatter"):
        return [{0: Fraction(1)} for _ in routed]
    found: list[dict[int, Fraction]] = []
    for tree in routed:
        covered: dict[int, Fraction] = {}
        for shard in tree.shards:
            owner = shard.stages[0].root
            covered[owner] = covered.get(owner, Fraction(0)) + shard.share
        found.append(covered)
    lacking = sorted(set(range(size)) - {owner for covered in found for owner in covered})
    if lacking:
        raise UsageError(
            f"no tree has rank {lacking[0]} as its root; {collective} needs one from every rank, or a ring"
        )
    return found


def _shares(
    routed: Sequence[_Routed], parts: Sequence[Mapping[int, Fraction]], fabric: Fabric
) -> list[Fraction]:
    """Return the share of every tree: as given, else those of the highest rate."""
    owners = sorted({owner for covered in parts for owner in covered})
    need = {owner: Fraction(1, len(owners)) for owner in owners}
    for tree, covered in zip(routed, parts, strict=True):
        for owner, part in covered.items():
            need[owner] -= part * (tree.share or 0)
    free = [number for number, tree in enumerate(routed) if tree.share is None]
    open_to = {owner for number in free for owner in parts[number]}
    for owner in owners:
        if need[owner] < 0 or (need[owner] > 0 and owner not in open_to):
            whole = Fraction(1, len(owners))
            of = "" if len(owners) == 1 else f" of the trees of rank {owner}"
            raise UsageError(
                f"the shares{of} add up to {whole - need[owner]}, not to {whole}; leave out shares to have them chosen"
            )
    if free:
        chosen = _best_shares(routed, parts, need, free, fabric)
        return [tree.share or chosen.get(number, Fraction(0)) for number, tree in enumerate(routed)]
    return [tree.share or Fraction(0) for tree in routed]


def _best_shares(
    routed: Sequence[_Routed],
    parts: Sequence[Mapping[int, Fraction]],
    need: Mapping[int, Fraction],
    free: Sequence[int],
    fabric: Fabric,
) -> dict[int, Fraction]:
    """Return shares of the free trees at the highest rate; column 0 is the rate, the others are the trees."""
    capacity, _ = whole_capacities(fabric)
    loads = [link_loads(tree.shards, fabric) for tree in routed]
    fixed = [
        sum((load[link] * (tree.share or 0) for load, tree in zip(loads, routed, strict=True)), Fraction(0))
        for link in range(len(capacity))
    ]
    columns = [[*fixed, *need.values()]]
    columns += [
        [*loads[number], *(-parts[number].get(owner, Fraction(0)) for owner in need)] for number in free
    ]
    unit = lcm(*(value.denominator for column in columns for value in column))
    program = PackingSimplex([*capacity, *[0] * len(need)])
    try:
        program.add([[int(value * unit) for value in column] for column in columns], [1, *[0] * len(free)])
    except OverflowError:
        told = f"the shares have the common denominator {unit}, which is too large; write simpler fractions"
        raise UsageError(told[:300]) from None
    program.optimise()
    found = program.solution()
    rate = found[0]
    return {number: found[place] / rate for place, number in enumerate(free, 1) if place in found}


def _short(value: object) -> str:
    return repr(value)[:60]
