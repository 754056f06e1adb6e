"""Prove a bound for a cluster by kind from lengths of its classes of links.

As for `topoplan.plans.certificates.certificate.Lengths`: all links of a class have a length y >= 0, one byte uses at
least L of length whatever the trees, and so rate <= sum of n c y / L over the classes, with n links of c GB/s each.

L is a packing of cuts. Let D(u, v) be the shortest route from rank u to rank v, and let every GPU, every server and
every leaf and pod be a set S with a number z(S) >= 0, so that no D(u, v) is less than the sum of z over the sets that v
is in and u is not. A tree that reaches every rank enters each set without its root at least once, by an edge; each edge
is at least as long as the sum of z over the sets that it enters; so the tree's length is at least the sum of z over all
sets without the root. Four more sets are without the root: all ranks but those of its pod, its leaf, its server, and
but itself. The numbers are chosen greedily: first z of the GPUs, as large as the nearest other rank allows, then of the
servers, of the leaves, of the pods, and of the four. If links inside a server do not connect its ranks, each of its
*islands* is a set too, chosen before the servers, and all ranks but those of the root's island are one before the four.
All are equal inside a cell, and the sample has every relation of two ranks. In a torus L is that of
`topoplan.plans.certificates.torus_lengths`.

Switches that copy (in trees that lead down) or add (in trees that lead up) may be inner vertices of a tree. Then D is
between ranks and such switches, and u and v are any of both. A switch of a server is in the set of the server, one of a
leaf in that of the leaf, and one of the spine in none. Every set still has a rank, so a tree still enters it. Each rank
with the switches of its server is a set too, a *hub*: its numbers are chosen after those of the GPUs. A link from
another of n ranks of the server to a switch enters n - 1 hubs, and one from outside the server n of them.

Certificates of the kind `DUAL_ASCENT` choose the sets by the distances too (Fulkerson 1974). While a strongly connected
component of the ways of length 0 without the root is entered by none of them, a set that holds it gets the shortest
remaining way into it as its number. The set has all ranks of the component's cells and GPU numbers in one server, one
leaf, one pod or the cluster, whichever is the least that holds the component; the like sets of other servers, leaves
and pods have the same number. Sets of one step are disjoint, so a way enters at most one of them. Without a root all
components count, and the four sets of each root follow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import PlanError
from topoplan.machine.cluster_by_kind import ClusterSample
from topoplan.machine.fabric import Fabric
from topoplan.plans.certificates.forest_length import ArcLengths, contracted_graph, distances
from topoplan.plans.certificates.torus_lengths import (
    TorusRoute,
    torus_paths_at_least,
    torus_tree_at_least,
)

CLASS_LENGTHS, DUAL_ASCENT = "class-lengths", "class-lengths-dual-ascent"
"""Kinds of certificates: of GPUs, servers, leaves and pods as sets, and of sets by the distances."""


@dataclass(frozen=True)
class SampleDistances:
    """Shortest distances between the ranks of a sample, and the sets that they are in.

    ``table``, of shape (V, V), is in whole numbers, -1 if no route exists: of the ranks, and then of switches that are
    inner vertices of trees. ``server``, ``leaf`` and ``pod`` give for each its server, leaf and pod in the sample, and
    ``weight`` for each rank the number of ranks of the cluster for each such rank of it. ``island`` gives the part of
    the server that links inside it connect; None if that is the whole server for all.
    """

    table: NDArray[Any]
    server: NDArray[np.int64]
    leaf: NDArray[np.int64]
    pod: NDArray[np.int64]
    weight: tuple[Fraction, ...]
    island: NDArray[np.int64] | None = None


def sample_distances(
    sample: ClusterSample, fabric: Fabric, lengths: Sequence[int], inner: Collection[str] = ()
) -> SampleDistances:
    """Return the distances of a sample whose links have these lengths; ``inner`` are switches among the vertices."""
    part, arcs = contracted_graph(fabric, lengths)
    nodes = fabric.route_graph.nodes
    switches = [state for state, node in enumerate(nodes) if fabric.nodes[node] in inner] if inner else []
    states = [*range(fabric.size), *switches]
    where = sorted({part[state] for state in states})
    column = {vertex: place for place, vertex in enumerate(where)}
    reach = _all_distances(arcs, where)
    vertex = [column[part[state]] for state in states]
    server = sample.servers_of(fabric.ranks)
    cells, places = sample.cluster.cells, sample.places
    leaves: dict[tuple[int, int], int] = {}
    pods: dict[tuple[int, int], int] = {}
    leaf, pod = [], []
    for one in server:
        leaf.append(leaves.setdefault(sample.leaf_of(one), len(leaves)))
        pod.append(pods.setdefault(sample.pod_of(one), len(pods)))
    sampled: dict[int, int] = {}
    for place in places:
        sampled[place.cell] = sampled.get(place.cell, 0) + 1
    weight = tuple(Fraction(cells[places[one].cell].servers, sampled[places[one].cell]) for one in server)
    of_leaf = {sample.cluster.leaf_name(*key): place for key, place in leaves.items()} if switches else {}
    pod_of = dict(zip(leaf, pod, strict=True))
    for number, state in enumerate(switches, start=len(places)):
        name = fabric.nodes[nodes[state]]
        if "." in name:
            rank = server.index(sample.server_of(name))
            row = server[rank], leaf[rank], pod[rank]
        else:
            # A set of its own has no rank, and no number.
            own = of_leaf.get(name, number + len(states))
            row = number, own, pod_of.get(own, number + len(states))
        for labels, label in zip((server, leaf, pod), row, strict=True):
            labels.append(label)
    return SampleDistances(
        reach[np.ix_(vertex, vertex)],
        np.array(server),
        np.array(leaf),
        np.array(pod),
        weight,
        _islands(fabric, [fabric.nodes[nodes[state]] for state in states], len(places)),
    )


def _islands(fabric: Fabric, names: Sequence[str], servers: int) -> NDArray[np.int64] | None:
    """Return for each device the number of its island, None if the ranks of ``servers`` servers have no more islands.

    Any device of an island reaches any other over links inside the server: a strongly connected component.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    number = {name: place for place, name in enumerate(fabric.nodes)}
    inner = [
        (number[link.src], number[link.dst])
        for link in fabric.links
        if "." in link.src and link.src.split(".")[0] == link.dst.split(".")[0]
    ]
    tails, heads = np.array(inner, dtype=np.int64).reshape(-1, 2).T
    graph = csr_array((np.ones(len(tails)), (tails, heads)), shape=(len(number), len(number)))
    island = connected_components(graph, connection="strong")[1]
    if len({int(island[number[name]]) for name in fabric.ranks}) <= servers:
        return None
    return np.array([int(island[number[name]]) for name in names])


def _tree_at_least(
    found: SampleDistances,
    leaves_of: Sequence[Fraction],
    pods_of: Sequence[Fraction],
    roots: Sequence[int],
    *,
    into: bool,
) -> list[Fraction]:
    """Return a lower bound of the length of a tree from each root, or (``into`` False) to each root.

    ``leaves_of`` is for each rank the number of the cluster's leaves of its leaf's class over those of the sample, and
    ``pods_of`` that of its pod's class.
    PlanError if a rank does not reach another.
    """
    left = found.table if into else found.table.T
    size, ranks = len(left), len(found.weight)
    among = left[:ranks, :ranks]
    if ranks > 1 and (among[~np.eye(ranks, dtype=bool)] < 0).any():
        raise PlanError("the lengths prove nothing: a rank does not reach another on the plan's channels")
    # No number that is chosen exceeds the greatest distance, and a pair pays for nine sets of others at most.
    left = np.where(left < 0, 10 * left.max() + 1, left)
    if int(left.max()) < _FAR:
        left = left.astype(np.int64)
    chain, total = np.zeros(size, dtype=left.dtype), Fraction(0)
    inside = [found.server] if found.island is None else [found.island, found.server]
    labels = (np.arange(size), *inside, found.leaf, found.pod)
    every = (found.weight, *(found.weight for _ in inside), leaves_of, pods_of)
    scale = 1
    for level, (label, weights) in enumerate(zip(labels, every, strict=True)):
        if level == 1 and size > ranks:
            scale, step, left = _less_at_hubs(left, found.server, ranks)
            chain, total = chain * scale + step, total * scale
            total += sum(
                (int(one) * weight for one, weight in zip(step, found.weight, strict=False)), Fraction(0)
            )
        first, step, left = _less_entered(left, label, ranks)
        total += sum((int(step[one]) * weights[one] for one in first.tolist()), Fraction(0))
        chain = chain + step
    beyond = _beyond(left, labels, ranks)
    return [(total - int(chain[root]) + int(beyond[root])) / scale for root in roots]


def _beyond(left: NDArray[Any], labels: Sequence[NDArray[np.int64]], ranks: int) -> NDArray[Any]:
    """Return for each root the numbers of its own sets: all ranks outside of its part of each label, the last first."""
    # They are entered from the root's part alone: rows and columns change places.
    left, beyond = left.T, np.zeros(len(left), dtype=left.dtype)
    for label in reversed(labels):
        _, step, left = _less_entered(left, label, ranks)
        beyond = beyond + step
    return beyond


def _ascended_tree(
    found: SampleDistances,
    kinds: NDArray[np.int64],
    leaves_of: Sequence[Fraction],
    pods_of: Sequence[Fraction],
    roots: Sequence[int],
    *,
    into: bool,
    fixed: int | None,
) -> list[Fraction]:
    """Return such a bound by dual ascent; ``kinds`` are cell and GPU number of each rank, ``fixed`` the only root.

    PlanError if a rank does not reach another, or switches are vertices.
    """
    left = found.table if into else found.table.T
    size = len(left)
    if size != len(found.weight):
        raise PlanError(f"a certificate {DUAL_ASCENT} must have no switches that copy or add on its channels")
    if (left[~np.eye(size, dtype=bool)] < 0).any():
        raise PlanError("the lengths prove nothing: a rank does not reach another on the plan's channels")
    chain, total = np.zeros(size, dtype=left.dtype), Fraction(0)
    labels = (found.server, found.leaf, found.pod)
    anywhere = np.zeros(size, dtype=np.int64), [Fraction(1)] * size
    levels = [*zip(labels, (found.weight, leaves_of, pods_of), strict=True), anywhere]
    raised = True
    while raised:
        raised = False
        for members in _unentered(left == 0):
            label, weights = next(one for one in levels if len(set(one[0][members].tolist())) == 1)
            within = np.isin(kinds, kinds[members])
            if fixed is not None and within[fixed]:
                continue
            entered = within[None, :] & ~(within[:, None] & (label[:, None] == label[None, :]))
            step = int(left[entered].min()) if entered.any() else 0
            if step:
                left, chain, raised = left - entered * step, chain + within * step, True
                first = np.flatnonzero(within)[np.unique(label[within], return_index=True)[1]]
                total += step * sum((weights[one] for one in first.tolist()), Fraction(0))
                break
    if fixed is not None:
        return [total]
    beyond = _beyond(left, (np.arange(size), *labels), size)
    return [total - int(chain[root]) + int(beyond[root]) for root in roots]


def _unentered(ways: NDArray[np.bool_]) -> list[NDArray[np.int64]]:
    """Return the strongly connected components that no way enters, in the order of their first vertices."""
    from scipy.sparse.csgraph import connected_components

    many, component = connected_components(ways.astype(np.int64), connection="strong")
    tails, heads = component[np.array(np.nonzero(ways))]
    entered = np.zeros(many, dtype=bool)
    entered[heads[tails != heads]] = True
    numbers, first = np.unique(component, return_index=True)
    return [
        np.flatnonzero(component == one) for one in numbers[np.argsort(first)].tolist() if not entered[one]
    ]


_FAR = 1 << 60
"""Distances below it are added in 64 bits; what is at least as far is not reached."""


def _all_distances(arcs: ArcLengths, where: Sequence[int]) -> NDArray[Any]:
    """Return the distances between some vertices, of shape (V, V), in whole numbers; -1 if unreachable.

    Routes pass few vertices, so all links are relaxed at once until nothing changes (Bellman and Ford).
    """
    size = max((*where, *arcs, *(dst for row in arcs.values() for dst in row)), default=0) + 1
    every = sorted((dst, src, y) for src, row in arcs.items() for dst, y in row.items())
    if not every or size * max(y for _, _, y in every) >= _FAR:
        return np.array([distances(arcs, start, where) for start in where], dtype=object)
    heads, tails, lengths = np.array(every, dtype=np.int64).T
    ends, first = np.unique(heads, return_index=True)
    reach = np.full((size, len(where)), 2 * _FAR, dtype=np.int64)
    reach[list(where), range(len(where))] = 0
    while True:
        shorter = np.minimum.reduceat(reach[tails] + lengths[:, None], first, axis=0)
        known = reach[ends]
        if (known <= shorter).all():
            break
        reach[ends] = np.minimum(known, shorter)
    found = reach[list(where)].T
    return np.where(found >= _FAR, -1, found)


def _less_entered(
    left: NDArray[Any], label: NDArray[np.int64], ranks: int
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]]:
    """Return the shortest way into the set of each vertex from outside, and what it leaves of ways.

    The first array are the first ranks of the sets: vertices below ``ranks`` are such. The way is 0 into a set without
    ranks, and into one with all of them.
    """
    _, first, part = np.unique(label, return_index=True, return_inverse=True)
    if (first < ranks).sum() == 1:
        return first[first < ranks], np.zeros(len(label), dtype=left.dtype), left
    inside = label[:, None] == label[None, :]
    nearest = np.where(inside, left.max() + 1, left).min(axis=0)
    order = np.argsort(part, kind="stable")
    step = np.minimum.reduceat(nearest[order], np.searchsorted(part[order], range(len(first))))
    step = np.where(first < ranks, step, 0)[part]
    return first[first < ranks], step, left - np.where(inside, 0, step[None, :])


def _less_at_hubs(
    left: NDArray[Any], server: NDArray[np.int64], ranks: int
) -> tuple[int, NDArray[Any], NDArray[Any]]:
    """Return a scale, the number of the hub of each rank in its units, and what it leaves of the scaled ways.

    All hubs of a server have one number. A hub is a rank with the switches of its server.
    """
    size = len(left)
    of_server = {one: np.flatnonzero(server == one) for one in sorted(set(server[:ranks].tolist()))}
    counts = [len(own[own < ranks]) for own in of_server.values() if own[-1] >= ranks]
    scale = lcm(*(count * max(1, count - 1) for count in counts))
    # Numbers grow by the scale, and must still fit.
    left = left.astype(object) * scale
    number = np.zeros(size, dtype=object)
    for own in of_server.values():
        members, switches = own[own < ranks], own[own >= ranks]
        count = len(members)
        if not len(switches) or count == 1:
            continue
        # How many hubs of the server a way between two vertices enters: those of the head without those of the tail.
        entered = np.zeros((size, size), dtype=np.int64)
        entered[:, members] = 1
        entered[:, switches] = count
        entered[np.ix_(members, switches)] = count - 1
        entered[np.ix_(switches, own)] = 0
        entered[own, own] = 0
        step = (left[entered > 0] // entered[entered > 0]).min()
        number[members] = step
        left = left - entered * step
    return scale, number, left if int(left.max()) >= _FAR else left.astype(np.int64)


def forest_at_least(
    sample: ClusterSample,
    fabric: Fabric,
    lengths: Sequence[int],
    collective: str,
    root: int | None,
    *,
    kind: str = CLASS_LENGTHS,
) -> Fraction:
    """Return a lower bound of the length of the cheapest forest of one byte of a collective.

    ``lengths`` are whole numbers for the links of the sample's fabric, equal on every class; ``root`` is a rank of the
    sample; ``kind`` is the certificate's. PlanError if a rank does not reach another, or the certificate's kind does
    not hold there.
    """
    if kind == DUAL_ASCENT and (sample.cluster.network.kind == "torus" or collective == "alltoall"):
        raise PlanError(f"a certificate {DUAL_ASCENT} must be of trees outside a torus, got {collective}")
    if sample.cluster.network.kind == "torus":
        return _torus_forest(sample, sample_distances(sample, fabric, lengths), collective)
    if collective == "alltoall":
        return _mean_distance(sample, sample_distances(sample, fabric, lengths))
    merging = {True: fabric.copying, False: fabric.adding}
    known = {inner: sample_distances(sample, fabric, lengths, inner) for inner in set(merging.values())}
    cells, places = sample.cluster.cells, sample.places
    sampled = Counter(pod_class for pod_class, _ in {sample.pod_of(one) for one in range(len(places))})
    home = sample.servers_of(fabric.ranks)
    of_rank = [cells[places[one].cell] for one in home]
    leaves_of = [Fraction(cell.leaves, len(sample.leaves_of[cell.leaf_class])) for cell in of_rank]
    pods_of = [Fraction(cell.pods, sampled[cell.pod_class]) for cell in of_rank]
    if collective in ("broadcast", "reduce") and root is None:
        raise PlanError("broadcast and reduce need a root rank")
    roots = _first_of_cells(sample, home) if root is None else [root]
    trees = [Fraction(0)] * len(roots)
    local = [rank - home.index(one) for rank, one in enumerate(home)]
    kinds = np.array([places[one].cell * len(home) + gpu for one, gpu in zip(home, local, strict=True)])
    for into, users in ((True, ("broadcast", "allgather")), (False, ("reduce", "reduce_scatter"))):
        if collective in (*users, "allreduce"):
            reach = known[merging[into]]
            if kind == DUAL_ASCENT:
                more = _ascended_tree(reach, kinds, leaves_of, pods_of, roots, into=into, fixed=root)
            else:
                more = _tree_at_least(reach, leaves_of, pods_of, roots, into=into)
            trees = [one + length for one, length in zip(trees, more, strict=True)]
    if collective in ("allgather", "reduce_scatter"):
        weights = [of_rank[rank].servers for rank in roots]
        total = sum((w * tree for w, tree in zip(weights, trees, strict=True)), Fraction(0))
        return total / sum(weights)
    return min(trees)


def _torus_forest(sample: ClusterSample, found: SampleDistances, collective: str) -> Fraction:
    """Return such a bound for a torus of equal servers: of trees, or of the paths of an all-to-all."""
    if collective not in IN_TORUS:
        raise PlanError(f"bounds of a torus by kind are for {', '.join(IN_TORUS)}, got {collective}")
    torus, home = sample.cluster.network.torus, found.server.tolist()
    first = {server: home.index(server) for server in range(len(sample.numbers))}
    gpus = home.count(0)

    def arcs(table: NDArray[Any]) -> list[TorusRoute]:
        return [
            TorusRoute(u, v - first[home[v]], torus.between(0, sample.numbers[home[v]]), int(table[u, v]))
            for u in range(gpus)
            for v in range(len(home))
            if u != v and table[u, v] >= 0
        ]

    if collective == "alltoall":
        return Fraction(torus_paths_at_least(torus, gpus, arcs(found.table)), gpus)
    trees = [0] * gpus
    for table, users in ((found.table, "allgather"), (found.table.T, "reduce_scatter")):
        if collective in (users, "allreduce"):
            more = torus_tree_at_least(torus, gpus, arcs(table))
            trees = [known + length for known, length in zip(trees, more, strict=True)]
    return Fraction(min(trees)) if collective == "allreduce" else Fraction(sum(trees), gpus)


IN_TORUS = ("allreduce", "allgather", "reduce_scatter", "alltoall")
"""Collectives that are planned by kind on a torus of servers."""


def _first_of_cells(sample: ClusterSample, home: Sequence[int]) -> list[int]:
    """Return the ranks of the first server of every cell; ``home`` is the server of each rank."""
    first: dict[int, int] = {}
    for server, place in enumerate(sample.places):
        first.setdefault(place.cell, server)
    return [rank for rank, server in enumerate(home) if server in first.values()]


def _mean_distance(sample: ClusterSample, found: SampleDistances) -> Fraction:
    """Return the sum of all ranks' distances to all others, over the number of ranks."""
    total = Fraction(0)
    home: list[int] = found.server.tolist()
    for tail, weight in enumerate(found.weight):
        for head, count in pair_counts(sample, home, tail).items():
            reach = int(found.table[tail, head])
            if reach < 0:
                raise PlanError(
                    "the lengths prove nothing: a rank does not reach another on the plan's channels"
                )
            total += weight * count * reach
    return total / sample.cluster.size


def pair_counts(sample: ClusterSample, home: Sequence[int], tail: int) -> dict[int, int]:
    """Return for one rank the ranks of the sample that stand for all others, and how many ranks each stands for.

    ``home`` is the server of the sample of every rank.
    """
    cells, places = sample.cluster.cells, sample.places
    server = home[tail]
    here = places[server]
    own_cell = cells[here.cell]
    counts: dict[int, int] = {}
    chosen: dict[tuple[int, bool, bool], int] = {}
    for other, place in enumerate(places):
        cell = cells[place.cell]
        near = cell.leaf_class == own_cell.leaf_class and place.leaf == here.leaf
        beside = sample.pod_of(other) == sample.pod_of(server)
        if other == server:
            counts[other] = 1
        elif (place.cell, near, beside) not in chosen:
            own = int(place.cell == here.cell and near)
            pods = 1 if beside else cell.pods - int(cell.pod_class == own_cell.pod_class)
            held = int(beside and cell.leaf_class == own_cell.leaf_class)
            leaves = 1 if near else pods * cell.leaves_in_pod - held
            chosen[place.cell, near, beside] = other
            counts[other] = leaves * (cell.count - own)
    return {rank: counts[one] for rank, one in enumerate(home) if one in counts and rank != tail}
