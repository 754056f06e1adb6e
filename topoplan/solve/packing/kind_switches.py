"""Search for the cheapest trees of a cluster by kind that pass switches which copy and add.

Inside a server such a tree is a Steiner tree over its ranks and its switches (`cheapest_steiner_tree`), one for each
rank. Between servers it leads from a rank up to one switch of the network, and down to every server: past the switch of
each leaf, in a fat tree, which copies for its servers. A reduce runs the same way backwards. In the plan a switch is
part of routes: those of one parent have the way to the switch in common, and so cross it once
(`topoplan.plans.kind_templates.ClassCrossings`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from topoplan.machine.cluster_by_kind import ClusterSample
from topoplan.machine.fabric import Fabric
from topoplan.plans.kind_templates import leaf_groups
from topoplan.plans.minimum_trees import UNREACHABLE, cheapest_steiner_tree
from topoplan.solve.packing.composition import ServerTrees
from topoplan.solve.packing.kind_routes import KindRoutes
from topoplan.solve.packing.kind_stars import Join, KindStars, Star, StarCosts
from topoplan.solve.route_table import arcs_to

Numbers = NDArray[np.int64]

Path = tuple[int, ...]
"""Links of a route in the order of crossing, as numbers of the fabric's links."""

Paths = dict[int, tuple[int, Path]]
"""Parent, and route, of every rank of a server but the root of its tree."""


@dataclass(frozen=True)
class SwitchedTrees:
    """The cheaper of plain trees over servers and of trees that pass switches, for one direction.

    ``plain`` are trees of edges between ranks; ``op`` is reduce or broadcast; no tree has more than ``height`` edges
    in sequence inside a server.
    """

    plain: ServerTrees
    routes: KindRoutes
    op: str
    height: int | None
    _known: dict[tuple[int, bytes, tuple[int, ...]], tuple[Numbers, list[Paths | None]]] = field(
        default_factory=dict
    )

    @cached_property
    def _searched(self) -> list[tuple[Numbers, list[Paths | None]]]:
        """Costs and trees of every server, by the places of its ranks; None for a plain tree."""
        return [self._of_server(number) for number in range(len(self.plain.servers.members))]

    def _of_server(self, number: int) -> tuple[Numbers, list[Paths | None]]:
        part = self.routes.parts.parts[number]
        fabric, graph = self._fabric, self._fabric.route_graph
        merging = fabric.adding if self.op == "reduce" else fabric.copying
        inner = [
            place
            for place, state in enumerate(part.states.tolist())
            if fabric.nodes[graph.nodes[state]] in merging
        ]
        plain = self.plain.costs[part.ranks]
        if not inner:
            return plain, [None] * len(part.ranks)
        lengths = self.routes.lengths[self.routes.parts.orbits.link_of_arc[part.arcs]]
        key = (id(part.search), lengths.tobytes(), tuple(inner))
        if key not in self._known:
            ranks = len(part.ranks)
            starts = [*range(ranks), *inner]
            distance, last = part.search(lengths, np.array(starts))
            table = np.where(distance[:, starts] < 0, UNREACHABLE, distance[:, starts])
            np.fill_diagonal(table, UNREACHABLE)
            upwards = self.op == "reduce"
            costs, trees = plain.copy(), list[Paths | None]()
            for root in range(ranks):
                cost = table.T if upwards else table
                parents = cheapest_steiner_tree(cost, root, range(ranks), range(ranks, len(starts)))
                total = sum(int(cost[up, vertex]) for vertex, up in enumerate(parents) if up >= 0)
                chains = _chains(parents, ranks, self.height) if total < costs[root] else None
                if chains is None:
                    trees.append(None)
                    continue
                costs[root] = total

                def route(tail: int, head: int) -> Path:
                    return tuple(arcs_to(starts[head], last[tail], part.ends))

                trees.append(
                    {rank: (chain[0], _joined(chain, upwards, route)) for rank, chain in chains.items()}
                )
            self._known[key] = costs, trees
        costs, trees = self._known[key]
        return costs, [tree and self._named(tree, part.ranks, part.arcs) for tree in trees]

    def _named(self, tree: Paths, ranks: Numbers, arcs: Numbers) -> Paths:
        """Return the tree of a server's places by ranks and links of the fabric."""
        links = self.routes.parts.orbits.link_of_arc
        return {
            int(ranks[rank]): (int(ranks[parent]), tuple(int(links[arcs[arc]]) for arc in path))
            for rank, (parent, path) in tree.items()
        }

    @property
    def _fabric(self) -> Fabric:
        return self.plain.servers.fabric

    @cached_property
    def costs(self) -> Numbers:
        """(N,) int64: the cost of the tree over its server from each rank."""
        found = self.plain.costs.copy()
        for members, (costs, _) in zip(self.plain.servers.members, self._searched, strict=True):
            found[members] = costs
        return found

    def attach(self, root: int, parents: Numbers, paths: dict[int, Path]) -> None:
        """Write the tree over a rank's server from this rank into the parents, and its own routes into the paths."""
        number = int(self.plain.servers.of_rank[root])
        members = self.plain.servers.members[number]
        tree = self._searched[number][1][int(np.searchsorted(members, root))]
        if tree is None:
            self.plain.attach(root, parents)
            return
        for child, (parent, path) in tree.items():
            parents[child] = parent
            paths[child] = path


def _chains(parents: Sequence[int], ranks: int, height: int | None) -> dict[int, list[int]] | None:
    """Return for every rank the vertices from the rank above it to itself; None for a tree that is too high."""
    found: dict[int, list[int]] = {}
    for rank in range(ranks):
        if parents[rank] < 0:
            continue
        chain = [rank, parents[rank]]
        while chain[-1] >= ranks:
            chain.append(parents[chain[-1]])
        found[rank] = chain[::-1]
    for rank in found if height is not None else ():
        depth, at = 0, rank
        while at in found:
            depth, at = depth + 1, found[at][0]
        if height is not None and depth > height:
            return None
    return found


def _joined(chain: Sequence[int], upwards: bool, route: Callable[[int, int], Path]) -> Path:
    """Return the route along vertices from a parent to a child, in the order in which data crosses it."""
    stops = chain[::-1] if upwards else chain
    return tuple(link for tail, head in pairwise(stops) for link in route(tail, head))


@dataclass(frozen=True, slots=True)
class SwitchedStar:
    """A tree between servers through a switch: the star, and by direction the route to every rank that it enters."""

    star: Star
    paths: Mapping[str, Mapping[int, Path]]


@dataclass(frozen=True)
class NetworkStars:
    """Searches for the cheapest tree between servers through a switch of the network.

    ``order`` are the stages of the collective, in which the tree is run forwards or backwards.
    """

    sample: ClusterSample
    stars: KindStars
    routes: KindRoutes
    order: Sequence[str]
    _counted: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    @cached_property
    def switches(self) -> dict[str, int]:
        """The states of the network's switches that copy, or add, in all stages, by name."""
        fabric = self.routes.parts.orbits.fabric
        able = {device.name for device in fabric.topology.devices if not device.server}
        for op in self.order:
            able &= fabric.adding if op == "reduce" else fabric.copying
        graph = fabric.route_graph
        found: dict[str, list[int]] = {}
        for state in self.routes.parts.switches.tolist():
            found.setdefault(fabric.nodes[graph.nodes[state]], []).append(state)
        return {
            name: states[0] for name, states in sorted(found.items()) if name in able and len(states) == 1
        }

    @cached_property
    def _search(self) -> tuple[Numbers, NDArray[np.int32], list[int], dict[int, int]]:
        """Distances and last arcs from ranks and switches, their states, and the place of each among them."""
        orbits = self.routes.parts.orbits
        starts = [*range(orbits.fabric.size), *self.switches.values()]
        distance, last = orbits.search(self.routes.lengths[orbits.link_of_arc], np.array(starts))
        return distance, last, starts, {state: place for place, state in enumerate(starts)}

    @cached_property
    def _costs(self) -> Numbers:
        """Distances between ranks and switches, there and back as the stages need them."""
        distance, _, starts, _ = self._search
        one = np.where(distance[:, starts] < 0, UNREACHABLE, distance[:, starts])
        found = np.zeros_like(one)
        for op in self.order:
            found = np.minimum(found + (one.T if op == "reduce" else one), UNREACHABLE)
        return found

    def star(self, costs: StarCosts, root: int, gateways: Sequence[int], limit: int) -> SwitchedStar | None:
        """Return the cheapest tree from a rank of the root's server to all others, None if none costs below ``limit``.

        ``gateways`` are the ranks from which it may start.
        """
        roles = self.stars.alone(root)
        best: SwitchedStar | None = None
        for top in self._tops(root):
            for gateway in gateways:
                ways = self._ways(costs, root, gateway, top)
                cost = sum(one.cost for one, _ in ways) + self._stems(root, gateway, top)
                if cost >= limit:
                    continue
                limit = cost
                paths = {
                    op: {
                        child: _joined([*stem, child], op == "reduce", self._path)
                        for way, stem in ways
                        for _, child in way.edges
                    }
                    for op in self.order
                }
                best = SwitchedStar(Star(roles, Join.of(cost, [way for way, _ in ways])), paths)
        return best

    def _tops(self, root: int) -> list[int]:
        """Return the switches to which a tree may lead up: all but those of leaves without the root."""
        word, own = self.sample.cluster.network.leaf, self._leaf_switch(root)
        return [
            state
            for name, state in self.switches.items()
            if not word or not name.startswith(word) or state == own
        ]

    def _up(self, root: int, gateway: int, top: int) -> list[int]:
        """Return the way from a rank to the top switch: it passes the switch of the root's leaf."""
        first = self._leaf_switch(root)
        return [gateway, top] if first is None or first == top else [gateway, first, top]

    def _stem(self, root: int, gateway: int, top: int, server: int) -> list[int]:
        """Return the way from a rank to the last switch before a server."""
        up, last = self._up(root, gateway, top), self._leaf_switch(server)
        if last is None:
            return up
        return up[: up.index(last) + 1] if last in up else [*up, last]

    def _ways(self, costs: StarCosts, root: int, gateway: int, top: int) -> list[tuple[Join, list[int]]]:
        """Return the cheapest way into every server, with its cost from the last switch on, and the way to that."""
        found = []
        for server, times in self.stars.stands(self.stars.alone(root)).items():
            if server == root:
                continue
            stem = self._stem(root, gateway, top, server)
            cost, children, roots = self._below(costs, stem[-1], server)
            edges = tuple((gateway, child) for child in children)
            found.append((Join(cost * times, edges, roots), stem))
        return found

    def _below(
        self, costs: StarCosts, switch: int, server: int
    ) -> tuple[int, Sequence[int], tuple[int, ...]]:
        """Return the cost from a switch to all ranks of a server, the ranks that are entered, and the local root."""
        members = self.stars.members[server]
        reach = self._costs[self._place[switch], members]
        best = min(members, key=lambda rank: self._costs[self._place[switch], rank] + costs.inside[rank])
        one = int(self._costs[self._place[switch], best] + costs.inside[best])
        every = sum(int(each) for each in reach)
        return (every, members, ()) if every < one else (one, (best,), (best,))

    def _stems(self, root: int, gateway: int, top: int) -> int:
        """Return the cost of the ways to all last switches, each part of a way once for each leaf."""
        place = self._place
        up = self._up(root, gateway, top)
        total = sum(int(self._costs[place[a], place[b]]) for a, b in pairwise(up))
        for last, leaves in self._leaf_counts(root):
            if last not in up:
                total += leaves * int(self._costs[place[top], place[last]])
        return total

    def _leaf_counts(self, root: int) -> list[tuple[int, int]]:
        """Return the switch of each leaf that a tree from a root reaches, and for how many leaves it stands."""
        if root not in self._counted:
            roles, found = self.stars.alone(root), dict[int, int]()
            groups = leaf_groups(self.sample, Star(roles, Join(0, (), ())).template(self.sample))
            for server in self.stars.stands(roles):
                last, place = self._leaf_switch(server), self.sample.places[server]
                if last is not None and last not in found:
                    found[last] = groups.size(self.sample.cluster.cells[place.cell], place.leaf)
            self._counted[root] = list(found.items())
        return self._counted[root]

    @property
    def _place(self) -> dict[int, int]:
        return self._search[3]

    def _leaf_switch(self, server: int) -> int | None:
        """Return the state of the switch of a server's leaf, None in a network without leaves."""
        if not self.sample.cluster.network.leaf:
            return None
        return self.switches.get(self.sample.cluster.leaf_name(*self.sample.leaf_of(server)))

    def _path(self, tail: int, head: int) -> Path:
        """Return the links of the route between two states."""
        graph = self.routes.parts.orbits.fabric.route_graph
        last = self._search[1][self._place[tail]]
        return tuple(graph.links[arc] for arc in arcs_to(head, last, graph.ends))
