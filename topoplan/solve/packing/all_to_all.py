"""Pack the optimal all-to-all: flows from every source at once, as paths with shares, and their certificate.

    maximise f, subject to   sum of x(T) usage(T, L) <= capacity(L),   sum of x(T) over the trees of rank s = f,

where a tree of rank s leads from s to every rank that s sends to, and x(T) is the rate at which it serves a unit of
the demand of each. Flows of one source that meet the demand are mixtures of such trees (Ford and Fulkerson 1962),
so with one row for each source instead of one for each pair the optimum is that of the concurrent flow problem
(Shahrokhi and Matula 1990). Its dual gives every link a length, and the cheapest tree is one of shortest paths
(Dijkstra 1959), priced in whole numbers of any size. Ranks may relay; among paths of equal length those with few
relaying ranks are taken, then those of few links.

Plans of a demand among many ranks begin with trees under lengths that grow with the loads of the trees before, as in
multiplicative weights. Column generation runs on the orbits of the fabric's symmetries, and the final duals are priced
once more in whole numbers, so rate and bound are equal as rationals. If a cut proves the same bound, it is the
certificate, since people can read it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import gcd, lcm

from topoplan.errors import Note, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.plans.build import build_plan
from topoplan.plans.certificates.certificate import Certificate, Cut, OneFabric
from topoplan.plans.certificates.exchange import Demand, DemandMatrix
from topoplan.plans.certificates.forest_length import zero_length_components
from topoplan.plans.plan import ALL_TO_ALL, Plan
from topoplan.plans.shards import Edge, Shard, Stage
from topoplan.solve.cuts_and_partitions import exchange_bounds, lowest, proved_bounds
from topoplan.solve.packing.column_generation import ColumnGeneration
from topoplan.solve.packing.packing_program import Packing, Pricing, TreeColumn, length_of
from topoplan.solve.route_table import RouteTable
from topoplan.solve.search_control import SEARCH_UNFINISHED, Deadline, time_limit_note
from topoplan.solve.symmetry.symmetry_search import find_symmetry

Path = tuple[int, ...]
"""Nodes of a fabric from a source to a destination; a single node for data that a rank keeps."""


@dataclass(frozen=True, slots=True)
class PathTree:
    """A tree of shortest paths from a rank.

    ``parents`` is for every state of the graph of routes, in layers if the height is limited: -1 for the root and for
    unused states. ``reached`` is the state at which each rank is reached, -1 for ranks out of reach; ``usage`` is the
    demand that crosses the links of each row.
    """

    root: int
    reached: tuple[int, ...]
    parents: tuple[int, ...]
    usage: tuple[int, ...]

    def paths(self, fabric: Fabric, wanted: Sequence[int]) -> list[Path]:
        """Return the path to every rank with a demand above 0."""
        paths, nodes = [], fabric.route_graph.nodes
        for rank, amount in enumerate(wanted):
            if amount and rank != self.root:
                state, path = self.reached[rank], [rank]
                while state != self.root:
                    state = self.parents[state]
                    path.append(nodes[state % len(nodes)])
                paths.append(tuple(path[::-1]))
        return paths


def shortest_path_tree(
    fabric: Fabric,
    leaving: Sequence[Sequence[tuple[int, int]]],
    root: int,
    wanted: Sequence[int],
    lengths: Sequence[int],
    *,
    height: int | None = None,
) -> PathTree | None:
    """Return the tree of shortest paths from a rank to all that ``wanted`` has a demand for, under lengths of the rows.

    ``leaving`` gives for every state of the fabric's graph of routes the next states and the rows of the links to them.
    ``height`` limits the edges on a path from rank to rank; the tree then has a layer of states for each number of
    edges so far. None is returned if a path takes more edges, or does not exist.
    """
    size, nodes = fabric.size, len(leaving)
    layers = 1 if height is None else height + 1
    parent, entered = [-1] * (layers * nodes), [-1] * (layers * nodes)
    best: dict[int, tuple[int, int, int]] = {root: (0, 0, 0)}
    heap = [(0, 0, 0, root)]
    settled: list[int] = []
    ends: dict[int, int] = {}
    seen = [False] * (layers * nodes)
    while heap:
        reach, edges, links, state = heapq.heappop(heap)
        if seen[state]:
            continue
        seen[state] = True
        settled.append(state)
        node = state % nodes
        ends.setdefault(node, state)
        if edges == height:
            continue
        for end, row in leaving[node]:
            further = edges + (end < size)
            there = (reach + lengths[row], further, links + 1)
            if height is not None and further > height:
                continue
            after = end if layers == 1 else further * nodes + end
            if not seen[after] and (after not in best or there < best[after]):
                best[after] = there
                parent[after], entered[after] = state, row
                heapq.heappush(heap, (*there, after))
    carried = [0] * (layers * nodes)
    for rank, amount in enumerate(wanted):
        if amount and rank not in ends:
            return None
        if amount:
            carried[ends[rank]] = amount
    usage = [0] * len(lengths)
    for state in reversed(settled[1:]):
        if not carried[state]:
            parent[state] = -1
            continue
        carried[parent[state]] += carried[state]
        usage[entered[state]] += carried[state]
    return PathTree(root, tuple(ends.get(rank, -1) for rank in range(size)), tuple(parent), tuple(usage))


def path_stage(fabric: Fabric, path: Sequence[int]) -> Stage:
    """Return a chain of edges along a path of nodes of a fabric, one from each rank on it to the next."""
    names = [fabric.nodes[node] for node in path]
    stops = [place for place, node in enumerate(path) if node < fabric.size]
    edges = []
    for start, stop in pairwise(stops):
        route = tuple(names[start : stop + 1])
        links = [fabric.link_index[ends] for ends in pairwise(route)]
        edges.append(Edge(path[start], path[stop], route, fabric.channel_of(links)))
    return Stage("broadcast", path[0], tuple(edges))


@dataclass(frozen=True)
class FlowPacking(Packing):
    """The packing problem of an all-to-all, perhaps up to symmetries.

    ``down`` of its columns holds the parent of every node of the fabric, in layers if the height is limited, -1 for
    the root and for unused nodes; ``up`` the node at which each rank is reached. The root is None, and symmetries keep
    the demand.

    ``demand`` from row to column is in any unit; data that a rank keeps crosses no link.
    """

    demand: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def roots(self) -> tuple[int, ...]:
        """The first rank of every orbit that sends data over links."""
        return tuple(
            rank for rank in self.orbits.first_ranks if sum(self.demand[rank]) > self.demand[rank][rank]
        )

    @cached_property
    def shared(self) -> bool:
        return True

    @cached_property
    def rate_of_one(self) -> Fraction:
        """Units of demand in the mean buffer of a rank: the program's value is the rate of one unit."""
        return Fraction(sum(map(sum, self.demand)), self.fabric.size)

    @cached_property
    def _leaving(self) -> list[list[tuple[int, int]]]:
        """For every state of the graph of routes, the next states and the rows of the links to them."""
        row_of = self.orbits.row_of_link.tolist()
        return [[(dst, row_of[link]) for link, dst in row] for row in self.fabric.route_graph.leaving()]

    def shortest_paths(
        self, root: int, lengths: Sequence[int], height: int | None = None
    ) -> TreeColumn | None:
        """Return the tree of shortest paths from a rank to all its destinations, under lengths of the rows.

        ``height`` limits the edges on a path from rank to rank; the tree then has a layer of states for each number of
        edges so far. None is returned if a path takes more edges.
        """
        found = shortest_path_tree(
            self.fabric,
            self._leaving,
            root,
            self.demand[root],
            lengths,
            height=height,
        )
        if found is None:
            return None
        return TreeColumn(
            root, found.reached, found.parents, found.usage, RouteTable(self.orbits, tuple(lengths))
        )

    def shards(self, weights: Mapping[TreeColumn, Fraction]) -> tuple[Shard, ...]:
        """Return the shards of a plan: paths in the order of destination, source and share.

        Data that a rank keeps is a shard without edges. A share is a fraction of the buffer of a rank, of the mean one
        if buffers differ, so that all shares add up to the number of ranks.
        """
        found: dict[Path, Fraction] = {}
        for path, part in self._parts_of_paths(weights):
            found[path] = found.get(path, Fraction(0)) + part
        shards: dict[tuple[int, int], list[tuple[Fraction, Path]]] = {}
        for path, part in found.items():
            shards.setdefault((path[-1], path[0]), []).append((part, path))
        return tuple(
            Shard(part * self.demand[pair[1]][pair[0]] / self.rate_of_one, (path_stage(self.fabric, path),))
            for pair in sorted(shards)
            for part, path in sorted(shards[pair], key=lambda item: (-item[0], len(item[1]), item[1]))
        )

    def _parts_of_paths(self, weights: Mapping[TreeColumn, Fraction]) -> Iterator[tuple[Path, Fraction]]:
        """Yield every path with its part of its pair's demand; the parts of a pair add up to 1."""
        totals: dict[int, Fraction] = {}
        for tree, weight in weights.items():
            totals[tree.root] = totals.get(tree.root, Fraction(0)) + weight
        elements = [element.tolist() for element in self.orbits.elements]
        orbit_size = dict(zip(self.roots, self.root_counts, strict=True))
        for tree, weight in weights.items():
            paths = self.paths(tree)
            images = Counter(tuple(element[node] for node in path) for element in elements for path in paths)
            part = weight / totals[tree.root] * Fraction(orbit_size[tree.root], len(elements))
            for path, count in images.items():
                yield path, part * count
        for rank in range(self.fabric.size):
            if self.demand[rank][rank]:
                yield (rank,), Fraction(1)

    def paths(self, tree: TreeColumn) -> list[Path]:
        """Return the path to every rank that the tree's root sends to."""
        return PathTree(tree.root, tree.up, tree.down, tree.usage).paths(self.fabric, self.demand[tree.root])


@dataclass(frozen=True)
class FlowPricing(Pricing):
    """Cheapest columns of an all-to-all: shortest paths, exact."""

    packing: FlowPacking

    def cheapest(self, lengths: Sequence[int], effort: int = 0) -> dict[int, TreeColumn]:
        trees = (self.packing.shortest_paths(root, lengths, self.height) for root in self.packing.roots)
        return {place: tree for place, tree in enumerate(trees) if tree is not None}


Matrix = Sequence[Sequence[float]]
"""Bytes that row sends to column."""

MOST_LOW = 16
"""Inequivalent ranks up to which lower paths are searched."""

SPREAD_FROM = 9
"""Ranks from which the search for paths of a demand begins with trees that avoid each other's links."""

SPREAD_ROUNDS = 12
"""Trees of each rank that are tried then; 32 GPUs on 4 servers have 8 different ones, one for each NIC."""

LENGTH_PARTS = 1 << 20
"""Parts of the longest link in which lengths are rounded to whole numbers."""

MOST_BYTES = 1 << 53
"""Bytes of one pair up to which a JSON number is exact everywhere."""


def plan_all_to_all(
    fabric: Fabric,
    *,
    demand: DemandMatrix | None = None,
    deadline: Deadline | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Return the optimal all-to-all among two or more connected ranks.

    ``demand`` is as `check_demand` returns it; None if all pairs exchange the same. At ``deadline`` the best plan so
    far is taken.
    """
    deadline = deadline or Deadline(None)
    generators: tuple[tuple[int, ...], ...] = ()
    if demand is None:
        units: DemandMatrix = ((1,) * fabric.size,) * fabric.size
        generators = tuple(tuple(each.tolist()) for each in find_symmetry(fabric, largest=fabric.size))
    else:
        common = gcd(*(amount for row in demand for amount in row))
        units = tuple(tuple(amount // common for amount in row) for row in demand)

    def proofs(certificates: Sequence[OneFabric]) -> list[tuple[Fraction, Certificate]]:
        stated: list[Certificate] = [one if demand is None else Demand(demand, one) for one in certificates]
        return proved_bounds(stated, fabric, ALL_TO_ALL, None)

    packing = FlowPacking(fabric, ALL_TO_ALL, None, generators, units)
    known = proofs(exchange_bounds(fabric))
    bound, certificate = lowest(known)
    generation = ColumnGeneration(FlowPricing(packing), progress=progress, deadline=deadline)
    target = bound * packing.scale
    spread = demand is not None and fabric.size >= SPREAD_FROM
    if spread:
        generation.add(_spread_trees(packing, deadline))
    if not (spread and generation.pack_known(target)) and not generation.run(target):
        while not deadline.over() and _price_again(generation):
            pass
        lengths = packing.certificate(generation.duals())
        known += proofs((*_candidate_cuts(lengths, fabric), lengths))
        bound, certificate = lowest(known)
    notes: tuple[str, ...] = ()
    routes = (path for tree in generation.weights() for path in packing.paths(tree))
    tallest = max(sum(node < fabric.size for node in path) - 1 for path in routes)
    if len(packing.roots) <= MOST_LOW and not deadline.cut:
        generation = _lowest_paths(packing, generation, tallest, progress, deadline)
    elif tallest > 1 and not deadline.cut:
        notes = (
            Note(f"height {tallest} is that of the first optimum; lower ones were not tried", "height open"),
        )
    if deadline.cut:
        rate = float(generation.value / packing.scale)
        notes = (deadline.note(time_limit_note(rate, float(bound)) if rate < bound else SEARCH_UNFINISHED),)
    return build_plan(
        fabric,
        ALL_TO_ALL,
        root=None,
        shards=packing.shards(generation.weights()),
        certificate=certificate,
        schedule="paths",
        method="exact",
        notes=notes,
    )


def check_demand(demand: Matrix, size: int) -> DemandMatrix:
    """Return the bytes that row sends to column among ``size`` ranks; raise UsageError unless whole, zero or more."""
    if len(demand) != size or any(len(row) != size for row in demand):
        lengths = ", ".join(map(str, sorted({len(row) for row in demand})))
        raise UsageError(
            f"the demand has {len(demand)} rows of {lengths or 0} entries for {size} ranks; "
            f"give {size} rows of {size}"
        )
    for source, row in enumerate(demand):
        for destination, amount in enumerate(row):
            if isinstance(amount, bool) or not 0 <= amount <= MOST_BYTES or amount != int(amount):
                raise UsageError(
                    f"the demand from rank {source} to rank {destination} is {amount}; give whole bytes, zero or more"
                )
    if not any(row[other] for rank, row in enumerate(demand) for other in range(size) if other != rank):
        raise UsageError("the demand sends nothing from any rank to another; there is nothing to plan")
    return tuple(tuple(int(amount) for amount in row) for row in demand)


def _spread_trees(packing: FlowPacking, deadline: Deadline) -> list[TreeColumn]:
    """Return trees of shortest paths for every rank, under lengths that grow with the loads of earlier trees.

    The rule is that of multiplicative weights (Garg, Könemann 1998) with long steps. The master program then has most
    trees of an optimum at once, which pricing would find one by one.
    """
    weights = [1 / limit for limit in packing.limits]
    found: list[TreeColumn] = []
    for _ in range(SPREAD_ROUNDS):
        longest = max(weights)
        lengths = [1 + int(weight / longest * LENGTH_PARTS) for weight in weights]
        trees = (packing.shortest_paths(root, lengths) for root in packing.roots)
        round_of_trees = [tree for tree in trees if tree is not None]
        found += round_of_trees
        loads = [sum(used) for used in zip(*(tree.usage for tree in round_of_trees), strict=True)]
        fullest = max((load / limit for load, limit in zip(loads, packing.limits, strict=True)), default=0.0)
        if not fullest or deadline.over():
            break
        weights = [
            weight * (1 + load / limit / fullest / 2)
            for weight, load, limit in zip(weights, loads, packing.limits, strict=True)
        ]
    return found


def _lowest_paths(
    packing: FlowPacking,
    generation: ColumnGeneration,
    tallest: int,
    progress: Callable[[str], None] | None,
    deadline: Deadline,
) -> ColumnGeneration:
    """Return paths of as few edges as reach the same rate, each lower height being refuted by its own duals."""
    target = generation.value
    for height in range(1, tallest):
        limited = ColumnGeneration(FlowPricing(packing, height), progress=progress, deadline=deadline)
        if limited.run(target, hopeless=target):
            return limited
    return generation


def _price_again(generation: ColumnGeneration) -> bool:
    """Price the columns once more under exact duals; return whether the program got better columns."""
    duals, _ = generation.program.duals()
    lengths, prices = duals[: generation.rows], duals[generation.rows :]
    found = generation.pricing.cheapest(lengths)
    better = [tree for place, tree in sorted(found.items()) if length_of(tree, lengths) < prices[place]]
    if not generation.add(better):
        return False
    generation.program.optimise()
    return True


def _candidate_cuts(lengths: OneFabric, fabric: Fabric) -> list[Cut]:
    """Return the cuts between devices at a distance above 0: they may prove the same bound and are readable."""
    values = lengths.link_lengths(fabric, ALL_TO_ALL)
    scale = lcm(*(value.denominator for value in values))
    part = zero_length_components(fabric, [int(value * scale) for value in values])
    with_ranks = sorted(set(part[: fabric.size]))
    if len(with_ranks) < 2:
        return []
    return [
        Cut(fabric.devices_of(state for state, other in enumerate(part) if other == first))
        for first in with_ranks
    ]
