"""Pack trees of a cluster by kind, and plan any collective there.

A column of the program (`topoplan.solve.packing.kind_program`) is a template (`topoplan.plans.kind_templates`). It is
priced on the sample: the cheapest tree inside each server from each of its ranks, the cheapest local root in each cell
for each centre, and for each class of leaves the cheaper of a star to all its servers and an entry that sends to the
others of its leaf.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.cluster_by_kind import ClusterByKind, ClusterSample, ServerPlace
from topoplan.machine.fabric import Arc
from topoplan.machine.fabric_structure import FabricServers
from topoplan.plans.build import stage_order
from topoplan.plans.kind_templates import (
    ClassCrossings,
    KindTemplate,
    LeafGroups,
    centre_allowed,
    entry_allowed,
    needed_shifts,
    represented,
)
from topoplan.plans.minimum_trees import UNREACHABLE
from topoplan.plans.plan import ALL_TO_ALL, check_collective, root_rank
from topoplan.plans.plan_by_kind import PlanByKind
from topoplan.plans.shards import Edge, Stage
from topoplan.solve.packing.composition import ServerRoutes, ServerTrees, server_trees
from topoplan.solve.packing.kind_all_to_all import KindExchange
from topoplan.solve.packing.kind_program import KindColumn, KindProgram, Solution
from topoplan.solve.packing.packing_program import rounded_lengths


@dataclass(frozen=True, slots=True)
class _Join:
    """How one rank reaches the ranks of servers: edges (parent, child), and local roots above the tree of their server.

    ``cost`` counts every edge, and every tree below a local root, once for each server that is represented.
    """

    cost: int
    edges: tuple[tuple[int, int], ...]
    roots: tuple[int, ...]

    def times(self, count: int) -> _Join:
        return _Join(self.cost * count, self.edges, self.roots)

    def __add__(self, other: _Join) -> _Join:
        return _Join(self.cost + other.cost, self.edges + other.edges, self.roots + other.roots)


_NOTHING = _Join(0, (), ())


@dataclass(frozen=True, slots=True)
class _Star:
    """A tree between servers on the sample, without the tree below its root."""

    root: int
    centre: int
    entries: tuple[int, ...]
    join: _Join


@dataclass(frozen=True)
class _Costs:
    """Costs of trees under lengths: ``near[u, v]`` of an edge, ``inside`` of the tree over a server from each rank.

    ``ways`` are known cheapest ways from a rank to a server.
    """

    near: NDArray[np.int64]
    inside: NDArray[np.int64]
    ways: dict[tuple[int, int], _Join] = field(default_factory=dict)


class KindStars:
    """Searches for the cheapest tree between servers, from each rank of one server of each cell.

    ``most_images`` limits the images of a tree, None for any number; ``left_out`` says whether that ruled out a tree.
    """

    def __init__(self, sample: ClusterSample, servers: FabricServers) -> None:
        self.sample = sample
        self.cells, self.places = sample.cluster.cells, sample.places
        self.members = [each.tolist() for each in servers.members]
        self.home: list[int] = servers.of_rank.tolist()
        self._at = {place: number for number, place in enumerate(self.places)}
        self._stands: dict[tuple[int, int, tuple[int, ...]], dict[int, int]] = {}
        self.most_images: int | None = None
        self.left_out = False

    def at(self, cell: int, leaf: int, position: int) -> int:
        """Return the server of the sample at a place."""
        return self._at[ServerPlace(cell, leaf, position)]

    def stands(self, root: int, centre: int, entries: tuple[int, ...]) -> dict[int, int]:
        key = (root, centre, entries)
        if key not in self._stands:
            self._stands[key] = represented(
                self.sample, KindTemplate(Fraction(0), root, centre, entries, 1, ())
            )
        return self._stands[key]

    def _few(self, root: int, centre: int, entries: Sequence[int]) -> bool:
        """Return whether trees with these roles have at most ``most_images`` images."""
        if self.most_images is None:
            return True
        servers = self.cells[self.places[root].cell].servers
        few = servers * needed_shifts(self.sample, root, centre, entries) <= self.most_images
        self.left_out = self.left_out or not few
        return few

    def centres(self, root: int) -> Iterator[int]:
        """Yield a server of the sample for every relation of a centre to the root, the root itself first."""
        return (centre for centre in self._centres(root) if self._few(root, centre, ()))

    def _centres(self, root: int) -> Iterator[int]:
        yield root
        here = self.places[root]
        home = self.cells[here.cell]
        for number, cell in enumerate(self.cells):
            if cell.leaf_class != home.leaf_class:
                if centre_allowed(self.sample, root, self.at(number, 0, 0)):
                    yield self.at(number, 0, 0)
                continue
            if number != here.cell or cell.count > 1:
                yield self.at(number, here.leaf, int(number == here.cell))
            if cell.leaves_in_pod > 1:
                yield self.at(number, 1, 0)
            if cell.pods > 1:
                yield self.at(number, cell.leaves_in_pod, 0)

    def joined(self, costs: _Costs, tail: int, server: int) -> _Join:
        """Return the cheapest way from a rank to all ranks of a server: one local root, or an edge to each rank."""
        if (tail, server) not in costs.ways:
            costs.ways[tail, server] = self._joined(costs, tail, server)
        return costs.ways[tail, server]

    def _joined(self, costs: _Costs, tail: int, server: int) -> _Join:
        members = self.members[server]
        place = self.members[self.home[tail]].index(tail)
        order = [members[(place + step) % len(members)] for step in range(len(members))]
        best = min(order, key=lambda rank: costs.near[tail, rank] + costs.inside[rank])
        one = _Join(int(costs.near[tail, best] + costs.inside[best]), ((tail, best),), (best,))
        every = sum(int(costs.near[tail, rank]) for rank in members)
        if every < one.cost:
            return _Join(every, tuple((tail, rank) for rank in members), ())
        return one

    def star(self, costs: _Costs, root: int, rank: int, centre: int) -> _Star | None:
        """Return the cheapest tree between servers from a centre.

        ``rank`` is the centre's rank if the centre is the root; else the data comes from the best rank of the root's
        server to the best one of the centre. None if some server is out of reach.
        """
        if centre == root:
            return self._from(costs, root, rank, root, rank)
        best: _Star | None = None
        for middle in self.members[centre]:
            gateway = min(self.members[root], key=lambda one: (costs.near[one, middle], one))
            start = int(costs.near[gateway, middle] + costs.inside[middle])
            if start >= UNREACHABLE:
                continue
            found = self._from(costs, root, gateway, centre, middle)
            if found is not None and (best is None or found.join.cost + start < best.join.cost):
                first = _Join(start, ((gateway, middle),), (middle,))
                best = _Star(root, centre, found.entries, first + found.join)
        return best

    def cheapest(self, costs: _Costs, root: int) -> _Star | None:
        """Return the cheapest tree between servers, from any rank of the root's server or through any centre."""
        best: _Star | None = None
        for centre in self.centres(root):
            # A centre elsewhere has its data from the best rank, so one start is enough.
            for rank in self.members[root] if centre == root else self.members[root][:1]:
                star = self.star(costs, root, rank, centre)
                if star is not None and (best is None or star.join.cost < best.join.cost):
                    best = star
        return best

    def _from(self, costs: _Costs, root: int, gateway: int, centre: int, rank: int) -> _Star | None:
        entries: list[int] = []
        join = _NOTHING
        flat, groups = self.stands(root, centre, ()), LeafGroups(self.sample, root, centre)
        home, middle = self.sample.leaf_of(root), self.sample.leaf_of(centre)
        others: dict[tuple[int, int], list[tuple[int, _Join]]] = {}
        for server, count in flat.items():
            if server in (root, centre):
                continue
            leaf = self.sample.leaf_of(server)
            ways = [self.joined(costs, sender, server) for sender in self._senders(leaf, home, rank, gateway)]
            direct = min(ways, key=lambda way: way.cost).times(count)
            if leaf == middle:
                join += direct
            else:
                others.setdefault(leaf, []).append((server, direct))
        for leaf, joins in others.items():
            servers = [server for server, _ in joins]
            entry = None
            best = _NOTHING
            for _, direct in joins:
                best += direct
            senders = self._senders(leaf, home, rank, gateway)
            leaves = groups.size(self.cells[self.places[servers[0]].cell], leaf[1])
            if len(servers) > 1 or any(flat[server] > leaves for server in servers):
                for one in servers:
                    allowed = entry_allowed(self.sample, root, centre, one)
                    if allowed and self._few(root, centre, (*entries, one)):
                        entered = self._entered(costs, senders, root, centre, one)
                        if entered.cost < best.cost:
                            best, entry = entered, one
            join += best
            entries += [] if entry is None else [entry]
        return None if join.cost >= UNREACHABLE else _Star(root, centre, tuple(entries), join)

    def _senders(
        self, leaf: tuple[int, int], home: tuple[int, int], rank: int, gateway: int
    ) -> tuple[int, ...]:
        """Return the ranks that may send to a leaf: the centre's, and the root's gateway to its own leaf."""
        return (rank, gateway) if leaf == home and gateway != rank else (rank,)

    def _entered(self, costs: _Costs, senders: Sequence[int], root: int, centre: int, entry: int) -> _Join:
        """Return the cheapest way to a leaf through one server, which sends to the others of the leaf."""
        counts = self.stands(root, centre, (entry,))
        leaf = self.sample.leaf_of(entry)
        marked = (entry, root, centre)
        rest = [server for server in counts if server not in marked and self.sample.leaf_of(server) == leaf]
        ways = []
        for rank, local in product(senders, self.members[entry]):
            cost = int(costs.near[rank, local] + costs.inside[local])
            way = _Join(cost, ((rank, local),), (local,)).times(counts[entry])
            for server in rest:
                way += self.joined(costs, local, server).times(counts[server])
            ways.append(way)
        return min(ways, key=lambda way: way.cost)


@dataclass(frozen=True, slots=True)
class _TemplateColumn(KindColumn):
    """A template of share 1, ordered by its rank."""

    template: KindTemplate


class KindPacking(KindProgram[_TemplateColumn]):
    """Column generation of trees; the height is that of trees inside servers."""

    @cached_property
    def stars(self) -> KindStars:
        """The search for trees between servers; InfeasibleError if links inside a server do not connect its ranks."""
        self.servers.check()
        return KindStars(self.sample, self.servers)

    @cached_property
    def crossings(self) -> ClassCrossings:
        """The count of crossings of the rows."""
        return ClassCrossings(self.sample, self.fabric, self.rows)

    def best_plan(self, root: int | None) -> PlanByKind:
        """Return the plan of the best rate; if trees with as many images as servers reach it, one of these."""
        self.stars.most_images = self.sample.cluster.servers
        few: PlanByKind | None = None
        with suppress(InfeasibleError):
            few = super().best_plan(root)
        if few is not None and (few.rate == few.bound or not self.stars.left_out):
            return few
        self.stars.most_images = None
        more = super().best_plan(root)
        return more.with_templates(few.templates) if few is not None and few.rate >= more.rate else more

    def templates(self, solution: Solution[_TemplateColumn]) -> tuple[KindTemplate, ...]:
        totals: dict[int, Fraction] = {}
        for column, weight in solution.columns.items():
            owner = column.rank if self.shared else 0
            totals[owner] = totals.get(owner, Fraction(0)) + weight
        size = self.sample.cluster.size
        parts = {rank: Fraction(count, size) if self.shared else Fraction(1) for rank, count in self.owners}
        found = [
            image
            for column, weight in solution.columns.items()
            for image in self.images(
                replace(
                    column.template,
                    share=weight * parts[column.rank] / totals[column.rank if self.shared else 0],
                )
            )
        ]
        return tuple(sorted(found, key=lambda one: (one.stages[0].root, -one.share)))

    def cheapest(self, lengths: Sequence[int], height: int | None) -> list[_TemplateColumn]:
        short = rounded_lengths(lengths)
        routes = ServerRoutes(self.orbits, self.servers, tuple(short[row] for row in self.rows))
        down = routes.cost()
        order = stage_order(self.collective)
        below = server_trees(down, self.servers, height) if "broadcast" in order else None
        above = server_trees(down.T, self.servers, height) if "reduce" in order else None
        near = np.zeros_like(down)
        inside = np.zeros(len(down), dtype=np.int64)
        for table, trees in ((down, below), (down.T, above)):
            if trees is not None:
                near = np.minimum(near + table, UNREACHABLE)
                inside = np.minimum(inside + trees.costs, UNREACHABLE)
        costs = _Costs(near, inside)
        found: list[_TemplateColumn] = []
        missing: int | None = None
        beyond: dict[int, _Star | None] = {}
        edges: dict[tuple[str, int, int], Edge] = {}
        for rank, _ in self.owners:
            home = self.stars.home[rank]
            best: _Star | None = None
            if inside[rank] < UNREACHABLE and self.collective == "allreduce":
                best = self.stars.star(costs, home, rank, home)
            elif inside[rank] < UNREACHABLE:
                if home not in beyond:
                    beyond[home] = self.stars.cheapest(costs, home)
                best = beyond[home]
            if best is not None:
                found.append(self._column(rank, best, below, above, routes, edges))
            elif self.shared:
                # Its block needs a tree; the trees of an allreduce may have other roots.
                missing = rank
                break
        if missing is not None or not found:
            name = self.fabric.ranks[self.owners[0][0] if missing is None else missing]
            raise InfeasibleError(
                "trees by kind need a GPU that reaches one of every other server in one hop and back, and "
                f"{name} reaches none; plan the listed cluster instead"
            )
        return found

    def _column(
        self,
        rank: int,
        star: _Star,
        below: ServerTrees | None,
        above: ServerTrees | None,
        routes: ServerRoutes,
        known: dict[tuple[str, int, int], Edge],
    ) -> _TemplateColumn:
        stages = []
        for op in stage_order(self.collective):
            trees = below if op == "broadcast" else above
            assert trees is not None, "every stage has trees inside servers"
            parents = np.full(self.fabric.size, -1, dtype=np.int64)
            trees.attach(rank, parents)
            for parent, child in star.join.edges:
                parents[child] = parent
            for local in star.join.roots:
                trees.attach(local, parents)
            stages.append(Stage(op, rank, self._edges(op, parents.tolist(), routes, known)))
        template = KindTemplate(
            Fraction(1),
            star.root,
            star.centre,
            star.entries,
            needed_shifts(self.sample, star.root, star.centre, star.entries),
            tuple(Stage(stage.op, stage.root, stage.top_down()) for stage in stages),
        )
        usage = self.crossings.of(template)
        return _TemplateColumn(rank, tuple(usage.get(row, 0) for row in range(len(self.counts))), template)

    def _edges(
        self,
        op: str,
        parents: Sequence[int],
        routes: ServerRoutes,
        known: dict[tuple[str, int, int], Edge],
    ) -> tuple[Edge, ...]:
        edges = []
        for child, parent in enumerate(parents):
            if parent < 0:
                continue
            key = (op, parent, child)
            if key not in known:
                tail, head = (parent, child) if op == "broadcast" else (child, parent)
                arc: Arc = self.fabric.arc(routes.route(tail, head))
                route = arc.route if op == "broadcast" else arc.route[::-1]
                known[key] = Edge(parent, child, route, arc.channel)
            edges.append(known[key])
        return tuple(edges)


def plan_by_kind(
    cluster: ClusterByKind,
    collective: str,
    *,
    root: int | None = None,
    channels: str = "auto",
    progress: Callable[[str], None] | None = None,
) -> PlanByKind:
    """Plan a collective on a cluster by kind, at a cost that grows with its kinds of servers.

    Parameters
    ----------
    cluster : ClusterByKind
        From `topoplan.cluster_by_kind`.
    collective : str
        all_reduce, all_gather, reduce_scatter, broadcast, reduce or alltoall.
    root : int or None
        GPU number of the root of a broadcast or reduce; None takes GPU 0.
    channels : str
        As for `topoplan.plan`.
    progress : callable or None
        Called with a line of text now and then.

    Returns
    -------
    PlanByKind
        Its trees have one edge into each server, or one into each GPU of it, from a root, a centre or an entry (see
        `topoplan.plans.kind_templates`). An all-to-all has paths (see `topoplan.plans.kind_exchange`), and every pair
        of GPUs exchanges the same. Trees inside servers, and paths, are as low as the rate allows. The gap is exact.

    Raises
    ------
    UsageError
        An unknown collective, or a root that does not exist or fits no collective with one.
    InfeasibleError
        Links do not connect the GPUs; devices add, copy or forward data of other servers. For trees also: links inside
        a server do not connect its GPUs, or a server reaches another only through a third. Plan the listed cluster
        instead.

    See Also
    --------
    topoplan.plan, topoplan.verify

    Examples
    --------
    >>> import topoplan
    >>> servers = [topoplan.Server("dgx-h100", count=12500)]
    >>> many = topoplan.cluster_by_kind(servers, nic_gbps=400, nic_access="direct")
    >>> plan = plan_by_kind(many, "all_reduce")
    >>> round(plan.rate, 3), plan.gap, plan.cluster.size
    (200.016, 0.0, 100000)
    """
    started = time.perf_counter()
    collective = check_collective(collective)
    if cluster.size < 2:
        raise UsageError("a plan by kind must have two GPUs or more, got 1; nothing moves there")
    if root is not None and not 0 <= root < cluster.size:
        raise UsageError(f"root {root} must be a rank from 0 to {cluster.size - 1}; name another")
    root = root_rank(range(cluster.size), collective, root)
    where = None
    if root is not None:
        where = cluster.server_of(root)
        cluster = cluster.apart(where[0])
    program = KindExchange if collective == ALL_TO_ALL else KindPacking
    packing: KindExchange | KindPacking = program(
        cluster, collective, root=where, channels=channels, progress=progress
    )
    return packing.best_plan(root).timed(time.perf_counter() - started)
