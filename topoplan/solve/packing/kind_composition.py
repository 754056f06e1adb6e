"""Pack trees of a cluster by kind: column generation on a sample of its servers, at a cost that grows with its cells.

The program is that of `topoplan.solve.packing.packing_program`, with one row for each class of links and one column
for each template (`topoplan.plans.kind_templates`). A column is priced on the sample: the cheapest tree inside each
server from each of its ranks, the cheapest local root in each cell for each centre, and for each class of leaves the
cheaper of a star to all its servers and an entry that sends to the others of its leaf. Counts of servers enter as
numbers only.

The dual lengths of the classes prove the bound (`topoplan.plans.certificates.kind_lengths`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import combinations
from math import gcd, lcm
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import InfeasibleError, PlanError, UsageError
from topoplan.machine.cluster_by_kind import ClusterByKind, ClusterSample, Place
from topoplan.machine.fabric import Arc, Fabric, usable_fabric
from topoplan.machine.fabric_structure import (
    LARGEST_TABLE,
    FabricServers,
    components,
    group_elements,
    link_permutation,
    orbits,
)
from topoplan.plans.build import stage_order
from topoplan.plans.kind_templates import (
    SAMPLE,
    ClassCrossings,
    KindTemplate,
    entry_allowed,
    needed_shifts,
    represented,
)
from topoplan.plans.minimum_trees import UNREACHABLE
from topoplan.plans.plan import COLLECTIVES, check_collective, root_rank
from topoplan.plans.plan_by_kind import PlanByKind
from topoplan.plans.shards import Edge, Stage
from topoplan.solve.cuts_and_partitions import whole_capacities
from topoplan.solve.packing.column_generation import GUIDED_BITS, GUIDED_ROWS
from topoplan.solve.packing.composition import ServerRoutes, ServerTrees, server_trees
from topoplan.solve.packing.packing_program import rounded_lengths
from topoplan.solve.route_table import FabricOrbits
from topoplan.solve.simplex.exact_simplex import PackingSimplex
from topoplan.solve.symmetry.symmetry_search import find_symmetry

LOW = (1, 2)
"""Heights of trees inside servers that are tried before any height."""

FEW_ROWS = 64
"""Rows of a program that is solved at once."""

FEW_SETS = 3
"""Cells whose servers, or leaves, alone may prove a bound."""

MOST_ROUNDS = 200
"""Rounds of column generation after which the best forest so far is taken, with its gap."""


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
    """Searches for the cheapest tree between servers, from each rank of one server of each cell."""

    def __init__(self, sample: ClusterSample, fabric: Fabric) -> None:
        self.sample, self.fabric = sample, fabric
        self.servers = FabricServers(fabric)
        self.cells, self.places = sample.cluster.cells, sample.places
        self.members = [each.tolist() for each in self.servers.members]
        self.home: list[int] = self.servers.of_rank.tolist()
        self._at = {place: number for number, place in enumerate(self.places)}
        self._stands: dict[tuple[int, int, tuple[int, ...]], dict[int, int]] = {}

    def at(self, cell: int, leaf: int, position: int) -> int:
        """Return the server of the sample at a place."""
        return self._at[Place(cell, leaf, position)]

    def roots(self) -> list[int]:
        """The first server of every cell."""
        return [self.at(cell, 0, 0) for cell in range(len(self.cells))]

    def stands(self, root: int, centre: int, entries: tuple[int, ...]) -> dict[int, int]:
        key = (root, centre, entries)
        if key not in self._stands:
            self._stands[key] = represented(
                self.sample, KindTemplate(Fraction(0), root, centre, entries, 1, ())
            )
        return self._stands[key]

    def centres(self, root: int) -> Iterator[int]:
        """Yield a server of the sample for every relation of a centre to the root, the root itself first."""
        yield root
        here = self.places[root]
        home = self.cells[here.cell]
        for number, cell in enumerate(self.cells):
            if cell.leaf_class != home.leaf_class:
                yield self.at(number, 0, 0)
                continue
            if number != here.cell or cell.count > 1:
                yield self.at(number, here.leaf, int(number == here.cell))
            if cell.leaves > 1:
                yield self.at(number, 1, 0)

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
        flat = self.stands(root, centre, ())
        others: dict[tuple[int, int], list[int]] = {}
        for server, count in flat.items():
            if server in (root, centre):
                continue
            leaf = self._leaf(server)
            if leaf in (self._leaf(root), self._leaf(centre)):
                ways = [self.joined(costs, rank, server)]
                if leaf == self._leaf(root) and centre != root:
                    ways.append(self.joined(costs, gateway, server))
                join += min(ways, key=lambda way: way.cost).times(count)
            else:
                others.setdefault(leaf, []).append(server)
        for servers in others.values():
            entry = None
            best = _NOTHING
            for server in servers:
                best += self.joined(costs, rank, server).times(flat[server])
            leaves = self.cells[self.places[servers[0]].cell].leaves
            if len(servers) > 1 or any(flat[server] > leaves for server in servers):
                for one in servers:
                    if entry_allowed(self.sample, root, centre, one):
                        entered = self._entered(costs, rank, root, centre, one)
                        if entered.cost < best.cost:
                            best, entry = entered, one
            join += best
            entries += [] if entry is None else [entry]
        return None if join.cost >= UNREACHABLE else _Star(root, centre, tuple(entries), join)

    def _entered(self, costs: _Costs, rank: int, root: int, centre: int, entry: int) -> _Join:
        """Return the cheapest way to a leaf through one server, which sends to the others of the leaf."""
        counts = self.stands(root, centre, (entry,))
        leaf = self._leaf(entry)
        rest = [server for server in counts if server != entry and self._leaf(server) == leaf]
        ways = []
        for local in self.members[entry]:
            cost = int(costs.near[rank, local] + costs.inside[local])
            way = _Join(cost, ((rank, local),), (local,)).times(counts[entry])
            for server in rest:
                way += self.joined(costs, local, server).times(counts[server])
            ways.append(way)
        return min(ways, key=lambda way: way.cost)

    def _leaf(self, server: int) -> tuple[int, int]:
        place = self.places[server]
        return self.cells[place.cell].leaf_class, place.leaf


@dataclass(frozen=True, slots=True)
class _Column:
    """A template of share 1, the rank that orders it, and its crossings of every class of links."""

    template: KindTemplate
    rank: int
    usage: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Solution:
    """A packing: its rate in GB/s, the columns' rates in proportion, and the dual lengths of the classes."""

    rate: Fraction
    columns: dict[_Column, Fraction]
    duals: list[int]


class _Proof(NamedTuple):
    """A bound in GB/s, and the plan without templates whose lengths prove it."""

    bound: Fraction
    bare: PlanByKind


def _between(calm: Sequence[int], lengths: Sequence[int], limits: Sequence[int]) -> list[int]:
    """Return lengths between the former ones and those of the last program, both scaled to one total.

    Duals jump from vertex to vertex; columns that are cheap under the mean are more often part of the optimum (Wentges
    1997).
    """
    former, latest = (sum(map(mul, limits, each)) for each in (calm, lengths))
    if not former or not latest:
        return list(lengths)
    scale = lcm(former, latest) if max(former, latest) < _EXACT_TOTAL else _EXACT_TOTAL
    return [
        (CALM - 1) * a * scale // former + b * scale // latest for a, b in zip(calm, lengths, strict=True)
    ]


CALM = 4
"""The latest dual lengths make one part in so many of the lengths under which columns are priced."""

_EXACT_TOTAL = 1 << 60


class KindPacking:
    """Column generation of one collective on a cluster by kind; ``height`` limits the trees inside servers."""

    def __init__(
        self,
        cluster: ClusterByKind,
        collective: str,
        *,
        root: tuple[int, int] | None,
        channels: str,
        progress: Callable[[str], None] | None,
    ) -> None:
        self.collective, self.progress = collective, progress
        self.sample = cluster.sample(SAMPLE)
        first = None
        if root is not None:
            server = self.sample.numbers.index(root[0])
            first = sum(cluster.gpus_of_kind[cluster.cells[p.cell].kind] for p in self.sample.places[:server])
            first += root[1]
        self.root = first
        self.fabric = usable_fabric(
            self.sample.topology.settled(), channels=channels, collective=collective, root=first
        )
        self.stars = KindStars(self.sample, self.fabric)
        self.stars.servers.check()
        self.classes, counts = self.sample.link_classes(self.fabric.links)
        self.orbits = FabricOrbits(self.fabric)
        self.row_of_class = self._rows(self.symmetries)
        self.rows = [self.row_of_class[number] for number in self.classes]
        capacity, self.scale = whole_capacities(self.fabric)
        capacity_of = dict(zip(self.classes, capacity, strict=True))
        self.counts = [0] * (max(self.rows) + 1)
        self.limits = [0] * len(self.counts)
        for number, count in enumerate(counts):
            row = self.row_of_class[number]
            self.counts[row] += count
            self.limits[row] += capacity_of[number] * count
        self.crossings = ClassCrossings(self.sample, self.fabric, self.rows)
        self.shared = collective in ("allgather", "reduce_scatter")

    @cached_property
    def symmetries(self) -> tuple[NDArray[np.int64], ...]:
        """Permutations of the fabric's nodes that map links to equal links and every server to itself.

        Of the subsets of those found, and their products, the one with the fewest orbits of ranks, then with the fewest
        rows beyond `FEW_ROWS`, then of the fewest elements: every template has as many images in the plan.
        """
        fabric = self.fabric
        server = {device.name: device.server for device in fabric.topology.devices}
        home = np.unique([server[name] or name for name in fabric.nodes], return_inverse=True)[1]
        found = [each for each in find_symmetry(fabric, fixed=self.root) if np.array_equal(home[each], home)]
        best: tuple[tuple[int, ...], tuple[NDArray[np.int64], ...]] = ((), ())
        for count in range(1, len(found) + 1):
            for chosen in combinations(found, count):
                product = chosen[0]
                for each in chosen[1:]:
                    product = product[each]
                for generators in ((product,), chosen):
                    elements = group_elements(generators, LARGEST_TABLE // len(fabric.nodes))
                    assert elements is not None, "symmetries are chosen so that their group can be listed"
                    ranks = len(set(orbits(len(fabric.nodes), generators)[: fabric.size].tolist()))
                    rows = len(set(self._rows(generators)))
                    key = (ranks, max(rows, FEW_ROWS), len(elements), rows)
                    if not best[1] or key < best[0]:
                        best = (key, generators)
        return best[1]

    def _rows(self, symmetries: Sequence[NDArray[np.int64]]) -> list[int]:
        """Return the row of the program of every class of links: classes that a symmetry joins share one."""
        number = np.array(self.classes, dtype=np.int64)
        tails = np.tile(number, len(symmetries))
        heads = [number[link_permutation(self.fabric, each)] for each in symmetries]
        labels = components(
            int(number.max()) + 1, tails, np.concatenate([np.zeros(0, dtype=np.int64), *heads])
        )
        return [int(row) for row in np.unique(labels, return_inverse=True)[1]]

    @cached_property
    def owners(self) -> list[tuple[int, int]]:
        """The first rank of every orbit in one server of each cell, or the root, and the ranks that it represents."""
        if self.root is not None:
            return [(self.root, 1)]
        orbit = orbits(len(self.fabric.nodes), self.symmetries).tolist()
        counts: dict[int, int] = {}
        for server in self.stars.roots():
            servers = self.sample.cluster.cells[self.sample.places[server].cell].servers
            for rank in self.stars.members[server]:
                counts[orbit[rank]] = counts.get(orbit[rank], 0) + servers
        return list(counts.items())

    @cached_property
    def _elements(self) -> list[tuple[list[int], dict[Edge, Edge]]]:
        """The images of nodes under every symmetry, and those of edges as far as they are known."""
        elements = group_elements(self.symmetries, LARGEST_TABLE // len(self.fabric.nodes))
        assert elements is not None, "symmetries are chosen so that their group can be listed"
        return [(element, {}) for element in elements.tolist()]

    @cached_property
    def _place(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.fabric.nodes)}

    def images(self, template: KindTemplate) -> list[KindTemplate]:
        """Return the distinct images of a template under the symmetries, each with an equal part of its share."""
        if not self.symmetries:
            return [template]
        found: dict[tuple[Stage, ...], None] = {}
        for element, image in self._elements:
            stages = []
            for stage in template.stages:
                for edge in stage.edges:
                    # Templates have most edges in common.
                    if edge not in image:
                        route = tuple(self.fabric.nodes[element[self._place[name]]] for name in edge.route)
                        image[edge] = Edge(element[edge.parent], element[edge.child], route, edge.channel)
                moved = Stage(stage.op, element[stage.root], tuple(image[edge] for edge in stage.edges))
                stages.append(Stage(moved.op, moved.root, moved.top_down()))
            found.setdefault(tuple(stages))
        return [replace(template, share=template.share / len(found), stages=stages) for stages in found]

    def solve(self, height: int | None, target: Fraction | None, start: Sequence[_Column] = ()) -> Solution:
        """Pack trees whose height inside servers is limited; stop at the rate ``target`` in GB/s.

        ``start`` are the first columns, such as those of a solution with a lower height.
        """
        owners = len(self.owners) if self.shared else 0
        limits = [*self.limits, *[0] * owners]
        wide = max(self.limits).bit_length() > GUIDED_BITS
        guided = len(self.limits) >= (GUIDED_ROWS // 2 if wide else GUIDED_ROWS)
        if guided:
            from topoplan.solve.simplex.guided_simplex import GuidedSimplex

            program: PackingSimplex | GuidedSimplex = GuidedSimplex(limits)
        else:
            program = PackingSimplex(limits)
        offset = 0
        if owners:
            program.add([[*[0] * len(self.limits), *(count for _, count in self.owners)]], [1])
            offset = 1
        place = {rank: number for number, (rank, _) in enumerate(self.owners)}
        columns: list[_Column] = []
        known: set[_Column] = set()
        single = [limit // count for limit, count in zip(self.limits, self.counts, strict=True)]
        lengths = [1000 * max(single) // limit for limit in single]
        prices: list[int] = []
        calm = lengths
        for _ in range(MOST_ROUNDS):
            fresh = [] if columns else list(start)
            known.update(fresh)
            for priced_at in () if fresh else (calm, lengths) if prices else (lengths,):
                for column in self._cheapest(priced_at, height):
                    cost = sum(times * length for times, length in zip(column.usage, lengths, strict=True))
                    price = prices[place[column.rank] if self.shared else 0] if prices else cost + 1
                    if cost < price and column not in known:
                        fresh.append(column)
                        known.add(column)
                if fresh:
                    break
            if not fresh and program.confirm():
                break
            columns += fresh
            program.add(
                [
                    [*column.usage, *(-int(place[column.rank] == row) for row in range(owners))]
                    for column in fresh
                ],
                [0 if self.shared else 1] * len(fresh),
            )
            program.optimise()
            duals, denominator = program.near_duals()
            lengths = duals[: len(self.limits)]
            prices = duals[len(self.limits) :] if self.shared else [denominator]
            prices = [price - int(price * program.blur) for price in prices]
            calm = _between(calm, lengths, self.limits)
            if self.progress is not None:
                self.progress(f"packing: {len(columns)} templates, {self._rate(program.near_value):.6g} GB/s")
            if target is not None and self._exact(program.value) >= target:
                break
        solution = {columns[j - offset]: x for j, x in program.solution().items() if j >= offset}
        return Solution(self._exact(program.value), solution, program.duals()[0][: len(self.limits)])

    def class_lengths(self, duals: Sequence[int]) -> tuple[tuple[str, str, Fraction], ...]:
        """Return lengths of the classes by the first link of each, whole numbers without common divisor."""
        common = gcd(*duals) or 1
        first: dict[int, tuple[str, str, Fraction]] = {}
        for link, number, row in zip(self.fabric.links, self.classes, self.rows, strict=True):
            if duals[row]:
                first.setdefault(number, (link.src, link.dst, Fraction(duals[row] // common)))
        return tuple(first.values())

    def plain_lengths(self) -> Iterator[list[int]]:
        """Yield lengths of 1 for the links that data crosses into sets, or out of them.

        The sets are GPUs, servers, leaves and combinations of these; and the servers, or leaves, of one cell alone,
        for the few cells with the least bandwidth of one server or leaf.
        """
        cell_of = {
            f"s{n}": place.cell for n, place in zip(self.sample.numbers, self.sample.places, strict=True)
        }
        ranks = set(self.fabric.ranks)
        server = {device.name: device.server for device in self.fabric.topology.devices}
        for inwards in (True, False):
            of_gpus: set[int] = set()
            of_servers: dict[int, set[int]] = {}
            of_leaves: dict[str, set[int]] = {}
            for link, row in zip(self.fabric.links, self.rows, strict=True):
                near, far = (link.dst, link.src) if inwards else (link.src, link.dst)
                if near in ranks and server[far] == server[near]:
                    of_gpus.add(row)
                elif server[near] and not server[far]:
                    of_servers.setdefault(cell_of[server[near]], set()).add(row)
                elif near.startswith("leaf") and not server[far]:
                    of_leaves.setdefault(near, set()).add(row)
            levels = [of_gpus, set().union(*of_servers.values()), set().union(*of_leaves.values())]
            chosen = [
                set().union(*(rows for place, rows in enumerate(levels) if number >> place & 1))
                for number in range(1, 8)
            ]
            for parts in (of_servers.values(), of_leaves.values()):
                if len(parts) > 1:
                    chosen += sorted(parts, key=self._capacity)[:FEW_SETS]
            for rows in dict.fromkeys(map(frozenset, chosen)):
                if rows:
                    yield [int(row in rows) for row in range(len(self.counts))]

    def _capacity(self, rows: set[int]) -> Fraction:
        """Return the bandwidth of rows of the program, each by the link of one server or leaf."""
        return sum((Fraction(self.limits[row], self.counts[row]) for row in rows), Fraction(0))

    def aim(self, root: int | None) -> _Proof | None:
        """Return the lowest bound of `plain_lengths`, at which a search may stop; None if none proves any."""
        return self.lowest(root, self.plain_lengths())

    def lowest(self, root: int | None, every: Iterable[Sequence[int]]) -> _Proof | None:
        """Return the lowest of the bounds that lengths of the classes prove; None if none proves any."""
        best: _Proof | None = None
        for lengths in every:
            bare = self.bare(root, lengths)
            try:
                bound = bare.exact_bound()
            except PlanError:
                continue
            if best is None or bound < best.bound:
                best = _Proof(bound, bare)
        return best

    def bare(self, root: int | None, lengths: Sequence[int]) -> PlanByKind:
        """Return a plan without templates under lengths of the classes."""
        made = PlanByKind(
            self.collective,
            self.sample.cluster,
            root,
            self.fabric.channels,
            (),
            self.class_lengths(lengths),
            0.0,
            0.0,
        )
        made.__dict__.update(sample=self.sample, fabric=self.fabric)
        return made

    def _exact(self, value: Fraction) -> Fraction:
        return value * (self.sample.cluster.size if self.shared else 1) / self.scale

    def _rate(self, value: float) -> float:
        return value * (self.sample.cluster.size if self.shared else 1) / self.scale

    def _cheapest(self, lengths: Sequence[int], height: int | None) -> list[_Column]:
        """Return the cheapest column of every owner under lengths of the classes."""
        short = rounded_lengths(lengths)
        routes = ServerRoutes(self.orbits, self.stars.servers, tuple(short[row] for row in self.rows))
        down = routes.cost()
        order = stage_order(self.collective)
        below = server_trees(down, self.stars.servers, height) if "broadcast" in order else None
        above = server_trees(down.T, self.stars.servers, height) if "reduce" in order else None
        near = np.zeros_like(down)
        inside = np.zeros(len(down), dtype=np.int64)
        for table, trees in ((down, below), (down.T, above)):
            if trees is not None:
                near = np.minimum(near + table, UNREACHABLE)
                inside = np.minimum(inside + trees.costs, UNREACHABLE)
        costs = _Costs(near, inside)
        found: list[_Column] = []
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
    ) -> _Column:
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
        return _Column(template, rank, tuple(usage.get(row, 0) for row in range(len(self.counts))))

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
        all_reduce, all_gather, reduce_scatter, broadcast or reduce.
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
        `topoplan.plans.kind_templates`). Trees inside servers are as low as the rate allows. The gap is exact.

    Raises
    ------
    UsageError
        An unknown collective, or a root that does not exist or fits no collective with one.
    InfeasibleError
        Links do not connect the GPUs of a server, or the servers, or a server reaches another only through a third.

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
    if collective not in COLLECTIVES:
        raise UsageError(f"{collective} is not planned by kind; list the cluster and use topoplan.plan")
    if root is not None and not 0 <= root < cluster.size:
        raise UsageError(f"root {root} must be a rank from 0 to {cluster.size - 1}; name another")
    root = root_rank(range(cluster.size), collective, root)
    where = None
    if root is not None:
        where = cluster.server_of(root)
        cluster = cluster.apart(where[0])
    packing = KindPacking(cluster, collective, root=where, channels=channels, progress=progress)
    aim = packing.aim(root)
    target = None if aim is None else aim.bound
    solved: list[Solution] = []
    try:
        solved.append(packing.solve(1, target))
    except InfeasibleError:
        if max(cluster.gpus_of_kind) < 3:
            raise
    proof = _lowest_proof(packing, root, solved, aim)
    if not solved or proof.bound > solved[0].rate:
        lowest = tuple(solved[0].columns) if solved else ()
        whole = packing.solve(None, target, lowest)
        best = whole
        for height in LOW:
            try:
                lower = solved[0] if height == 1 and solved else packing.solve(height, whole.rate, lowest)
            except InfeasibleError:
                continue
            if lower.rate >= whole.rate:
                best = lower
                break
        solved = [best, whole]
        proof = _lowest_proof(packing, root, solved, aim)
    made = proof.bare.with_templates(_templates(packing, solved[0]))
    return made.timed(time.perf_counter() - started)


def _lowest_proof(
    packing: KindPacking, root: int | None, solved: Sequence[Solution], aim: _Proof | None
) -> _Proof:
    """Return the lowest bound of the dual lengths of the solutions, and of ``aim``."""
    found = packing.lowest(root, (one.duals for one in solved))
    proofs = [one for one in (found, aim) if one is not None]
    assert proofs, "links into GPUs prove a bound"
    return min(proofs, key=lambda one: one.bound)


def _templates(packing: KindPacking, solved: Solution) -> tuple[KindTemplate, ...]:
    """Return the templates of a solution with their shares, and their images under the symmetries."""
    cluster = packing.sample.cluster
    totals: dict[int, Fraction] = {}
    for column, weight in solved.columns.items():
        owner = column.rank if packing.shared else 0
        totals[owner] = totals.get(owner, Fraction(0)) + weight
    parts = {
        rank: Fraction(count, cluster.size) if packing.shared else Fraction(1)
        for rank, count in packing.owners
    }
    templates = [
        image
        for column, weight in solved.columns.items()
        for image in packing.images(
            replace(
                column.template,
                share=weight * parts[column.rank] / totals[column.rank if packing.shared else 0],
            )
        )
    ]
    templates.sort(key=lambda one: (one.stages[0].root, -one.share))
    return tuple(templates)
