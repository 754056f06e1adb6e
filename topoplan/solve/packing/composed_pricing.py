"""Price composed trees: for each root the cheapest tree over every server, joined by a star between local roots.

A composed tree has one local root in each server. One of these is the centre: each other local root is its child, and
the ranks of a server are below their local root. For an allreduce the centre is the root, and both directions use
the same local roots (Blink 3.4, with each of n centres owning 1/n of a partition). A broadcast or allgather has its
root at the data: the tree of its server starts there, and from a gateway, any rank of that tree, the data goes to the
centre, or the gateway is the centre. A reduce or reduce-scatter is the same backwards.

Under additive lengths everything but the centre is chosen server by server, so N centres price all composed trees.

Trees inside servers are arborescences (Chu-Liu, Edmonds); with a limit on the height they come from the exact
tables of `minimum_trees`, or for servers with more GPUs than these take from `hop_constrained_search`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from topoplan.machine.fabric_structure import FabricServers
from topoplan.plans.minimum_trees import LARGEST_EXACT, UNREACHABLE, HopLimitedTrees, cheapest_arborescence
from topoplan.solve.hop_constrained_search import low_arborescences
from topoplan.solve.packing.packing_program import Pricing, TreeColumn, rounded_lengths
from topoplan.solve.route_table import FabricOrbits, RouteTable

CostMatrix = NDArray[np.int64]
ParentArray = NDArray[np.int64]

RankPlaces = list[int]
"""Parent of every rank of a server, as places among its ranks; -1 for the root."""


@dataclass(frozen=True)
class ServerTrees:
    """Trees over servers.

    ``costs``, of shape (N,), are those of the tree over its server from each rank; `UNREACHABLE` if it has none. For
    each server ``tree_of`` maps a place in it to the parents in the tree from there.
    """

    servers: FabricServers
    costs: NDArray[np.int64]
    tree_of: tuple[Callable[[int], RankPlaces], ...]

    def attach(self, root: int, parents: NDArray[np.int64]) -> None:
        """Write the tree over a rank's server from this rank into the parents of all ranks except its own."""
        number = int(self.servers.of_rank[root])
        members = self.servers.members[number]
        place = int(np.searchsorted(members, root))
        for child, parent in enumerate(self.tree_of[number](place)):
            if child != place:
                parents[members[child]] = members[parent]


def server_trees(cost: NDArray[np.int64], servers: FabricServers, height: int | None) -> ServerTrees:
    """Return the cheapest trees over all servers, with at most ``height`` edges on a path inside a server.

    ``cost[u, v]`` is the cost of v as a child of u; `UNREACHABLE` if that is impossible.
    """
    costs = np.zeros(servers.fabric.size, dtype=np.int64)
    known: dict[bytes, tuple[NDArray[np.int64], Callable[[int], RankPlaces]]] = {}
    tree_of = []
    for members in servers.members:
        table = cost[np.ix_(members, members)]
        np.fill_diagonal(table, UNREACHABLE)
        key = table.tobytes()
        if key not in known:
            known[key] = _trees(table, height)
        costs[members], trees = known[key]
        tree_of.append(trees)
    return ServerTrees(servers, np.minimum(costs, UNREACHABLE), tuple(tree_of))


def _trees(
    cost: NDArray[np.int64], height: int | None
) -> tuple[NDArray[np.int64], Callable[[int], RankPlaces]]:
    size = len(cost)
    if size == 1:
        return np.zeros(1, dtype=np.int64), lambda place: [-1]
    if height is not None and size <= LARGEST_EXACT:
        tables = HopLimitedTrees(cost, height)
        return tables.costs, tables.parents
    if height is not None:
        found = low_arborescences(cost, range(size), height)
    else:
        by_head = cost.T.tolist()
        found = [cheapest_arborescence(by_head, place) for place in range(size)]
    trees = [tree or [-1] * size for tree in found]
    sums = [_sum(cost, tree) if tree else int(UNREACHABLE) for tree in found]
    return np.array(sums, dtype=np.int64), trees.__getitem__


def _sum(cost: NDArray[np.int64], parents: RankPlaces) -> int:
    return sum(int(cost[parent, child]) for child, parent in enumerate(parents) if parent >= 0)


@dataclass(frozen=True)
class ServerRoutes:
    """Routes under one length for every orbit of links; routes between ranks of one server stay in it.

    The symmetries keep servers together (see `FabricServers.keeps`). ``lengths``, one for each row, are 0 or more and
    far below `UNREACHABLE`.
    """

    orbits: FabricOrbits
    servers: FabricServers
    lengths: tuple[int, ...]

    @cached_property
    def _across(self) -> RouteTable:
        return RouteTable(self.orbits, self.lengths)

    @cached_property
    def _inside(self) -> RouteTable:
        """Routes that pay so much for leaving a server that they count as missing."""
        lengths = np.array(self.lengths, dtype=np.int64)
        lengths[self.orbits.row_of_link[self.servers.crossing]] = UNREACHABLE
        return RouteTable(self.orbits, tuple(lengths.tolist()))

    def cost(self) -> NDArray[np.int64]:
        """(N, N) int64: distance from rank to rank; `UNREACHABLE` if no route exists."""
        inside = np.minimum(self._inside.cost, UNREACHABLE)
        return np.where(self.servers.same, inside, self._across.cost)

    def usage(
        self, tails: NDArray[np.int64], heads: NDArray[np.int64], tree: NDArray[np.int64], trees: int
    ) -> NDArray[np.int64]:
        # See `RankRoutes`.
        same = self.servers.same[tails, heads]
        inside = self._inside.usage(tails[same], heads[same], tree[same], trees)
        return np.asarray(inside + self._across.usage(tails[~same], heads[~same], tree[~same], trees))

    def route(self, tail: int, head: int) -> tuple[int, ...]:
        table = self._inside if self.servers.same[tail, head] else self._across
        return table.route(tail, head)


@dataclass(frozen=True)
class ComposedStar:
    """Centre, gateway and local roots of a composed tree.

    All three ranks are the same for an allreduce; gateway and centre are if the data starts in the centre's server.
    ``local``, of shape (servers,), is the local root of each server, unused for those of gateway and centre.
    """

    root: int
    gateway: int
    centre: int
    local: NDArray[np.int64]

    def parents(self, trees: ServerTrees) -> ParentArray:
        """(N,) int64: parent of every rank in the composed tree, -1 for the root."""
        servers = trees.servers
        found = np.full(servers.fabric.size, -1, dtype=np.int64)
        trees.attach(self.root, found)
        if self.centre != self.gateway:
            found[self.centre] = self.gateway
            trees.attach(self.centre, found)
        reached = {int(servers.of_rank[self.root]), int(servers.of_rank[self.centre])}
        for number, local in enumerate(self.local.tolist()):
            if number not in reached:
                found[local] = self.centre
                trees.attach(local, found)
        return found


def paired_stars(
    down: CostMatrix, up: CostMatrix, below: ServerTrees, above: ServerTrees, roots: Sequence[int]
) -> list[ComposedStar | None]:
    """Return the cheapest composed tree from each root for data that runs up and down by the same local roots.

    ``down[u, v]`` is the cost of data from parent u to child v, ``up[u, v]`` from child v to parent u; ``below`` and
    ``above`` are the trees for the two ways. An entry is None if its root reaches no rank of some server.
    """
    joined = _JoinedServers(np.minimum(down + up, UNREACHABLE), below.costs + above.costs, below.servers)
    return [
        ComposedStar(root, root, root, joined.local[root]) if joined.total[root] < UNREACHABLE else None
        for root in roots
    ]


def one_way_stars(cost: CostMatrix, trees: ServerTrees, roots: Sequence[int]) -> list[ComposedStar | None]:
    """Return the cheapest composed tree from each root for data that runs one way, perhaps through a gateway."""
    servers = trees.servers
    joined = _JoinedServers(cost, trees.costs, servers)
    found: list[ComposedStar | None] = []
    for root in roots:
        home = int(servers.of_rank[root])
        members = servers.members[home]
        inside = servers.of_rank == home
        best = int(members[np.argmin(joined.beyond[members])])
        # A centre elsewhere is the child of a gateway, and does not reach back into the root's server.
        entry = cost[members].min(axis=0)
        elsewhere = joined.beyond - joined.cheapest[:, home] + entry + trees.costs
        elsewhere[inside] = len(servers.names) * UNREACHABLE
        centre = int(np.argmin(elsewhere))
        if elsewhere[centre] < joined.beyond[best]:
            gateway = int(members[np.argmin(cost[members, centre])])
            star, total = ComposedStar(root, gateway, centre, joined.local[centre]), elsewhere[centre]
        else:
            star, total = ComposedStar(root, best, best, joined.local[best]), joined.beyond[best]
        found.append(star if total + trees.costs[root] < UNREACHABLE else None)
    return found


class _JoinedServers:
    """For every centre and server: the cheapest local root there, with its tree, and the sums over servers."""

    def __init__(self, near: CostMatrix, trees: CostMatrix, servers: FabricServers) -> None:
        shape = (len(trees), len(servers.names))
        every, places = np.arange(len(trees)), _places(servers)
        self.cheapest = np.zeros(shape, dtype=np.int64)
        self.local = np.zeros(shape, dtype=np.int64)
        for number, members in enumerate(servers.members):
            costs = near[:, members] + trees[members]
            # Among equals the one at the centre's own place: rails join equal places, and so centres are spread.
            order = (np.arange(len(members)) + places[:, None]) % len(members)
            turned = np.take_along_axis(costs, order, axis=1)
            chosen = np.take_along_axis(order, turned.argmin(axis=1)[:, None], axis=1)[:, 0]
            self.cheapest[:, number] = costs[every, chosen]
            self.local[:, number] = members[chosen]
        self.cheapest[every, servers.of_rank] = 0
        self.beyond: CostMatrix = self.cheapest.sum(axis=1)
        self.total: CostMatrix = self.beyond + trees


def _places(servers: FabricServers) -> NDArray[np.int64]:
    """(N,) int64: place of every rank among those of its server."""
    places = np.zeros(servers.fabric.size, dtype=np.int64)
    for members in servers.members:
        places[members] = np.arange(len(members))
    return places


@dataclass(frozen=True)
class ComposedPricing(Pricing):
    """The cheapest composed trees; ``height`` limits the trees inside servers.

    Unlimited trees, and limited ones in servers of up to `LARGEST_EXACT` GPUs, are priced exactly.
    """

    servers: FabricServers = field(kw_only=True)

    @property
    def efforts(self) -> tuple[int, ...]:
        # Trees inside servers are searched in one way only.
        return (0,)

    def cheapest(self, lengths: Sequence[int], effort: int = 0) -> dict[int, TreeColumn]:
        packing = self.packing
        routes = ServerRoutes(packing.orbits, self.servers, rounded_lengths(lengths))
        down = routes.cost()
        up = down.T
        below = server_trees(down, self.servers, self.height) if packing.uses("broadcast") else None
        above = server_trees(up, self.servers, self.height) if packing.uses("reduce") else None
        if below and above:
            stars = paired_stars(down, up, below, above, packing.roots)
        elif below:
            stars = one_way_stars(down, below, packing.roots)
        else:
            assert above is not None, "every collective has a stage"
            stars = one_way_stars(up, above, packing.roots)
        made = {place: star for place, star in enumerate(stars) if star is not None}
        columns = packing.trees(
            [
                (
                    star.root,
                    star.parents(above).tolist() if above else (),
                    star.parents(below).tolist() if below else (),
                )
                for star in made.values()
            ],
            routes,
        )
        return dict(zip(made, columns, strict=True))
