"""Pack composed trees in three phases: reduce in servers, exchange between local roots, broadcast (Blink 3.4).

A composed tree has one local root in each server. One of these is the centre: each other local root is its child, and
the ranks of a server are below their local root. One program over all composed trees (`ComposedPricing`), solved by
column generation on orbits of symmetries, gives shares, centres, local roots and trees of the best composition
together, for any GPU counts, wires and NICs of the servers. Then the height inside servers is lowered as far as the
rate allows. If NICs have bandwidth to spare, a last program keeps the rate and spreads the local roots.

`plan_three_phase` puts the composition under the lowest bound on any plan: flows; the dual lengths of the composition's
own program, if they prove anything; and on small fabrics, if neither is reached, the certificate of the exact method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from math import gcd

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.fabric_structure import FabricServers
from topoplan.plans.build import build_plan
from topoplan.plans.certificates.certificate import Certificate, Lengths
from topoplan.plans.loads import forest_rate
from topoplan.plans.minimum_trees import LARGEST_EXACT, UNREACHABLE, HopLimitedTrees, cheapest_arborescence
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Shard
from topoplan.solve.cuts_and_partitions import best_bound, lowest, proved_bounds
from topoplan.solve.hop_constrained_search import low_arborescences
from topoplan.solve.packing.column_generation import ColumnGeneration, ProgressCallback
from topoplan.solve.packing.exact import pack_exact
from topoplan.solve.packing.packing_program import Packing, Pricing, TreeColumn, rounded_lengths
from topoplan.solve.route_table import FabricOrbits, RouteTable
from topoplan.solve.search_control import Deadline
from topoplan.solve.symmetry.symmetry_search import find_symmetry
from topoplan.units import name_ranges

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

    def routes(self, tails: Sequence[int], heads: Sequence[int]) -> list[tuple[int, ...]]:
        # See `RankRoutes`.
        return [self.route(tail, head) for tail, head in zip(tails, heads, strict=True)]


@dataclass(frozen=True)
class ComposedStar:
    """Centre, gateway and local roots of a composed tree.

    For an allreduce the centre is the root, and both directions use the same local roots (Blink 3.4, with each of n
    centres owning 1/n of a partition). A broadcast or allgather has its root at the data: the tree of its server starts
    there, and from a gateway, any rank of that tree, the data goes to the centre, or the gateway is the centre. A
    reduce or reduce-scatter is the same backwards.

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

    Under additive lengths everything but the centre is chosen server by server, so N centres price all composed trees.
    Unlimited trees (Chu-Liu, Edmonds), and limited ones in servers of up to `LARGEST_EXACT` GPUs, are priced exactly.
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


_GAINS = (10**3, 10**6, 10**9)
"""Worth of a unit of rate against free NICs; the first that sacrifices no rate is taken."""


_LARGEST_PART = 1 << 31


@dataclass(frozen=True, slots=True)
class Composition:
    """A composed forest; large ones are templates with the symmetries.

    ``bound``, in GB/s, is the target of the search, and ``certificate`` proves it. ``duals``, if the forest does not
    reach the bound, are the dual lengths of its program: they may prove a lower bound, or nothing, since they need to
    be long for composed trees only.
    """

    shards: Sequence[Shard]
    bound: Fraction
    certificate: Certificate
    duals: Lengths | None


def compose(
    fabric: Fabric,
    collective: str,
    *,
    root: int | None = None,
    certificate: Certificate | None = None,
    deadline: Deadline | None = None,
    progress: ProgressCallback | None = None,
) -> Composition:
    """Return the best composition of trees inside servers with stars between them.

    At the bound of ``certificate`` the search may stop; None stands for the one from flows. At ``deadline`` the best
    composition so far is taken. UsageError if all ranks are
    on one server; InfeasibleError if the ranks of a server are not connected inside it, or if no rank reaches one of
    every other server in one hop.
    """
    servers = FabricServers(fabric)
    servers.check()
    symmetries = (tuple(each.tolist()) for each in find_symmetry(fabric, fixed=root))
    kept = tuple(each for each in symmetries if servers.keeps(each))
    packing = Packing(fabric, collective, root, kept)
    aim = best_bound(fabric, collective, root) if certificate is None else certificate
    bound = aim.bound(fabric, collective, root)
    duals = None
    best = ColumnGeneration(
        ComposedPricing(packing, servers=servers), progress=progress, deadline=deadline or Deadline(None)
    )
    if not best.run(bound * packing.scale):
        if not best.trees:
            raise InfeasibleError(
                "three phases need a GPU that reaches one of every other server in one hop and back, and none of "
                f"{', '.join(name_ranges(servers.names))} has one; plan trees instead (method exact)"
            )
        duals = packing.certificate(best.duals())
    shards = packing.forest(_even_loads(_lowest_inside(best, servers), servers).weights())
    return Composition(shards, bound, aim, duals)


def _lowest_inside(best: ColumnGeneration, servers: FabricServers) -> ColumnGeneration:
    """Keep the rate with trees inside servers as low as they can be."""
    tallest = max(_inner_height(tree, servers) for tree in best.weights())
    for height in range(1, tallest):
        if best.deadline.over():
            break
        lower = ColumnGeneration(
            ComposedPricing(best.packing, height, servers=servers),
            progress=best.progress,
            deadline=best.deadline,
        )
        lower.add([tree for tree in best.trees if _inner_height(tree, servers) <= height])
        if lower.run(best.value):
            return lower
    return best


def _even_loads(best: ColumnGeneration, servers: FabricServers) -> ColumnGeneration:
    """Keep rate and height, and even the load on the NICs of every server as far as possible."""
    packing = best.packing
    ports = port_groups(servers, packing.orbits.row_of_link.tolist())
    load = [Fraction(0)] * len(packing.limits)
    for tree, weight in best.weights().items():
        for row, times in enumerate(tree.usage):
            load[row] += times * weight
    if all(len({load[row] / packing.limits[row] for row in rows}) == 1 for rows in ports):
        return best
    for gain in _GAINS:
        if best.deadline.over():
            break
        even = EvenLoadGeneration(
            best.pricing, progress=best.progress, gain=gain, deadline=best.deadline, ports=ports
        )
        even.add(best.trees)
        even.run(None)
        if even.value >= best.value:
            return even
    return best


def _inner_height(tree: TreeColumn, servers: FabricServers) -> int:
    """Return the edges on the longest path inside a server, of either tree."""
    home = servers.of_rank.tolist()
    longest = 0
    for parents in (tree.up, tree.down):
        for rank in range(len(parents)):
            steps = 0
            while (parent := parents[rank]) >= 0 and home[parent] == home[rank]:
                rank, steps = parent, steps + 1
            longest = max(longest, steps)
    return longest


@dataclass
class EvenLoadGeneration(ColumnGeneration):
    """Column generation with one more column for each group of ports: their common spare bandwidth.

    A port takes part in proportion to its capacity. The objective is ``gain`` x rate + the sum of spare bandwidths.
    """

    ports: tuple[tuple[int, ...], ...] = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        columns = []
        for rows in self.ports:
            column = [0] * self.program.rows
            for row, part in zip(rows, self._parts(rows), strict=True):
                column[row] = part
            columns.append(column)
        self.program.add(columns, [1] * len(columns))
        self.offset += len(columns)

    @property
    def value(self) -> Fraction:
        """Rate of the packing in units of the packing's scale, without spare bandwidth."""
        solution = self.program.solution()
        if self.packing.shared:
            return solution.get(0, Fraction(0)) * self.packing.owners
        return sum((x for j, x in solution.items() if j >= self.offset), Fraction(0))

    def _parts(self, rows: tuple[int, ...]) -> list[int]:
        """Return capacities of some rows without common divisor, rounded if they would be huge."""
        limits = [self.packing.limits[row] for row in rows]
        common = max(gcd(*limits), -(-max(limits) // _LARGEST_PART))
        return [max(1, limit // common) for limit in limits]


def port_groups(servers: FabricServers, row_of_link: list[int]) -> tuple[tuple[int, ...], ...]:
    """Return the rows of the links out of each server, and into it; only groups of several rows."""
    found: dict[tuple[str, str], set[int]] = {}
    for row, (src, dst) in zip(row_of_link, servers.ends, strict=True):
        if src != dst:
            found.setdefault(("out of", src), set()).add(row)
            found.setdefault(("into", dst), set()).add(row)
    groups = {tuple(sorted(rows)) for (_, server), rows in found.items() if server in servers.names}
    return tuple(sorted(group for group in groups if len(group) > 1))


THREE_PHASE = "three-phase"

MOST_EXACT_RANKS = 16
"""Ranks up to which the exact method is run for its certificate."""


def plan_three_phase(
    fabric: Fabric,
    collective: str,
    *,
    root: int | None = None,
    certificate: Certificate | None = None,
    deadline: Deadline | None = None,
    progress: ProgressCallback | None = None,
) -> Plan:
    """Return the best composition as a plan whose notes state its gap.

    ``certificate`` of a general plan for the same fabric, if known, saves the search for another one. At ``deadline``
    the best composition so far is taken, and the notes say nothing of others. Errors are those of `compose`.
    """
    deadline = deadline or Deadline(None)
    composed = compose(
        fabric, collective, root=root, certificate=certificate, deadline=deadline, progress=progress
    )
    rate = forest_rate(composed.shards, fabric)
    assert rate is not None, "trees over two servers cross links"
    proof = composed.certificate
    notes: tuple[str, ...] = ()
    if rate < composed.bound and certificate is None:
        proof, notes = _lower_bound(composed, fabric, collective, root, rate, deadline, progress)
    made = build_plan(
        fabric,
        collective,
        root=root,
        shards=composed.shards,
        certificate=proof,
        schedule=THREE_PHASE,
        method=THREE_PHASE,
        notes=notes,
    )
    if made.gap == 0 or deadline.cut:
        return replace(made, notes=())
    lost = f"three phases stay {made.gap:.2%} below the bound of {made.bound:.6g} GB/s on any plan over these links"
    return replace(made, notes=(lost, *notes))


def composed_optimum(
    fabric: Fabric,
    collective: str,
    *,
    root: int | None = None,
    deadline: Deadline | None = None,
    progress: ProgressCallback | None = None,
) -> Plan | None:
    """Return a plan of three phases that reaches the bound from flows; None if none does by ``deadline``."""
    try:
        composed = compose(fabric, collective, root=root, deadline=deadline, progress=progress)
    except (UsageError, InfeasibleError):
        return None
    if forest_rate(composed.shards, fabric) != composed.bound:
        return None
    return build_plan(
        fabric,
        collective,
        root=root,
        shards=composed.shards,
        certificate=composed.certificate,
        schedule=THREE_PHASE,
        method=THREE_PHASE,
        notes=("three phases reach the bound; lower trees were not looked for",),
    )


def _lower_bound(
    composed: Composition,
    fabric: Fabric,
    collective: str,
    root: int | None,
    rate: Fraction,
    deadline: Deadline,
    progress: ProgressCallback | None,
) -> tuple[Certificate, tuple[str, ...]]:
    """Return the best certificate that is quick to compute if the first bound is missed, and notes on the rest."""
    assert composed.duals is not None, "a program that misses its bound has duals"
    known: list[tuple[Fraction, Certificate]] = [(composed.bound, composed.certificate)]
    bound, proof = lowest([*known, *proved_bounds([composed.duals], fabric, collective, root)])
    if rate == bound or deadline.over():
        return proof, ()
    if fabric.size > MOST_EXACT_RANKS:
        return proof, (
            f"with more than {MOST_EXACT_RANKS} GPUs the exact method was not run for a lower bound",
        )
    exact = pack_exact(fabric, collective, root=root, time_limit=deadline, progress=progress).certificate
    return lowest([(exact.bound(fabric, collective, root), exact), (bound, proof)])[1], ()
