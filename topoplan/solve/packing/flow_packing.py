"""State the packing problem of an all-to-all: trees of shortest paths from every rank, and the shards of their paths.

    maximise f, subject to   sum of x(T) usage(T, L) <= capacity(L),   sum of x(T) over the trees of rank s = f,

where a tree of rank s leads from s to every rank that s sends to, and x(T) is the rate at which it serves a unit of
the demand of each. Flows of one source that meet the demand are mixtures of such trees (Ford and Fulkerson 1962),
so with one row for each source instead of one for each pair the optimum is that of the concurrent flow problem
(Shahrokhi and Matula 1990). Its dual gives every link a length, and the cheapest tree is one of shortest paths
(Dijkstra 1959), priced in whole numbers of any size. Ranks may relay; among paths of equal length those with few
relaying ranks are taken, then those of few links.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from topoplan.machine.fabric import Fabric
from topoplan.plans.certificates.exchange import DemandMatrix
from topoplan.plans.shards import Edge, Shard, Stage
from topoplan.solve.packing.packing_program import Packing, Pricing, TreeColumn
from topoplan.solve.route_table import RouteTable

Whole = NDArray[np.int64]

LARGE_ENTRIES = 1 << 12
"""Demand of a rank from which amounts are counted in units of their size, so that floating point tells them from 0."""

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


def path_stages(fabric: Fabric, paths: Sequence[Path]) -> list[Stage]:
    """Return for each path of nodes of a fabric the chain of edges along it, one from each rank to the next."""
    counts = np.fromiter(map(len, paths), dtype=np.int64, count=len(paths))
    nodes = np.fromiter(chain.from_iterable(paths), dtype=np.int64, count=int(counts.sum()))
    firsts = np.cumsum(counts) - counts
    ranks = np.flatnonzero(nodes < fabric.size)
    ends = np.setdiff1d(ranks, firsts, assume_unique=True)
    starts = ranks[np.searchsorted(ranks, ends) - 1]
    names = tuple(map(fabric.nodes.__getitem__, nodes.tolist()))
    columns = (starts.tolist(), (ends + 1).tolist(), nodes[starts].tolist(), nodes[ends].tolist())
    edges = [
        Edge(parent, child, names[start:end], channel)
        for start, end, parent, child, channel in zip(
            *columns, _channels(fabric, nodes, starts, ends), strict=True
        )
    ]
    bounds = np.searchsorted(starts, np.append(firsts, len(nodes))).tolist()
    return [
        Stage("broadcast", path[0], tuple(edges[first:last]))
        for path, (first, last) in zip(paths, pairwise(bounds), strict=True)
    ]


def _channels(fabric: Fabric, nodes: Whole, starts: Whole, ends: Whole) -> list[str]:
    """Return the channels of edges that begin and end at positions of successive nodes."""
    if not len(starts):
        return []
    size, links = len(fabric.nodes), fabric.links
    number = {src * size + dst: link for (src, dst), link in fabric.link_between.items()}
    bit = {name: 1 << place for place, name in enumerate(sorted({link.channel for link in links}))}
    keys = np.array(sorted(number), dtype=np.int64)
    bits = np.array([bit[links[number[key]].channel] for key in keys.tolist()], dtype=np.int64)
    steps = nodes[:-1] * size + nodes[1:]
    change = np.zeros(len(nodes), dtype=np.int64)  # between two paths there is not a link
    np.add.at(change, starts, 1)
    np.add.at(change, ends, -1)
    within = np.cumsum(change)[:-1] > 0
    over = np.zeros_like(steps)
    over[within] = bits[np.searchsorted(keys, steps[within])]
    _, first, kind = np.unique(np.bitwise_or.reduceat(over, starts), return_index=True, return_inverse=True)
    crossed = (steps[starts[hop] : ends[hop]].tolist() for hop in first.tolist())
    names = [fabric.channel_of([number[step] for step in each]) for each in crossed]
    return [names[each] for each in kind.tolist()]


def block_shards(fabric: Fabric, demand: DemandMatrix, parts: Mapping[Path, Fraction]) -> tuple[Shard, ...]:
    """Return the shards of paths, ``parts`` having the part of its block that takes each one."""
    paths = sorted(parts.items(), key=lambda item: (item[0][-1], item[0][0], -item[1], len(item[0]), item[0]))
    return path_shards(fabric, demand, paths)


def path_shards(
    fabric: Fabric, demand: DemandMatrix, paths: Iterable[tuple[Path, Fraction]]
) -> tuple[Shard, ...]:
    """Return the shards of a plan: paths, and their parts of their blocks, by destination, source and share.

    Data that a rank keeps is a shard without edges. A share is a fraction of the buffer of a rank, of the mean one if
    buffers differ, so that all shards add up to the number of ranks.
    """
    whole, size = sum(map(sum, demand)), fabric.size
    known: dict[tuple[int, int], Fraction] = {}  # many blocks are equally long
    listed: list[Path] = []
    shares: list[Fraction] = []
    for path, part in paths:
        amount = demand[path[0]][path[-1]]
        share = known.get((amount, part.denominator)) if part.numerator == 1 else None
        if share is None:
            share = Fraction(part.numerator * amount * size, part.denominator * whole)
            if part.numerator == 1:
                known[amount, part.denominator] = share
        listed.append(path)
        shares.append(share)
    stages = path_stages(fabric, listed)
    return tuple(Shard(share, (stage,)) for share, stage in zip(shares, stages, strict=True))


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

    @property
    def column_size(self) -> int:
        most = max(map(sum, self.demand))
        return 1 << most.bit_length() if most >= LARGE_ENTRIES else 1

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
        """Return the shards of a plan."""
        found: dict[Path, Fraction] = {}
        for path, part in self._parts_of_paths(weights):
            found[path] = found.get(path, Fraction(0)) + part
        return block_shards(self.fabric, self.demand, found)

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
