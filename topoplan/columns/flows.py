"""All-to-all as a packing of trees: what one rank sends is a tree, in which an edge carries all that lies below it.

    maximise f, subject to   sum of x(T) usage(T, L) <= capacity(L),   sum of x(T) over the trees of rank s = f,

where a tree of rank s leads from s to every rank that s sends to, and x(T) is the rate at which it serves a unit of
what each of them wants. Flows of one source that add up to what its destinations want are mixtures of such trees (Ford
and Fulkerson 1962), so with one row for each source instead of one for each pair the optimum is that of the concurrent
flow problem (Shahrokhi and Matula 1990). Its dual gives every link a length, and the cheapest tree is one of shortest
paths (Dijkstra 1959), priced in whole numbers of any size. Ranks may relay; among paths of equal length those with few
ranks in between are taken, then those of few links.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

from topoplan.columns.pricing import Pricing
from topoplan.columns.problem import Packing, TreeColumn
from topoplan.plans.tree import Edge, Shard, Stage
from topoplan.trees.route_table import RouteTable

Path = tuple[int, ...]
"""Nodes of a fabric from a source to a destination, one for what a rank keeps."""


@dataclass(frozen=True)
class FlowPacking(Packing):
    """The packing problem of an all-to-all, perhaps up to symmetries.

    ``down`` of its columns holds the parent of every node of the fabric, in layers where the height is limited, -1 for
    the root and where nothing passes; ``up`` the node at which each rank is reached.

    Parameters
    ----------
    fabric, collective, root, generators
        As of `Packing`; the root is None, and symmetries keep the demand.
    demand : tuple of tuple of int
        What row sends to column, in any unit; what a rank keeps crosses no link.
    """

    demand: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def roots(self) -> tuple[int, ...]:
        """The first rank of every orbit that sends something over links."""
        return tuple(
            rank for rank in self.orbits.first_ranks if sum(self.demand[rank]) > self.demand[rank][rank]
        )

    @cached_property
    def shared(self) -> bool:
        """Every source has a rate of its own, and all of them are equal."""
        return True

    @cached_property
    def rate_of_one(self) -> Fraction:
        """Units of demand in the buffer of a rank, on average: the program's value is the rate of one unit."""
        return Fraction(sum(map(sum, self.demand)), self.fabric.size)

    @cached_property
    def _leaving(self) -> list[list[tuple[int, int]]]:
        """For every state of the graph of routes, the states that its links lead to, and the rows of these links."""
        row_of = self.orbits.row_of_link.tolist()
        return [[(dst, row_of[link]) for link, dst in row] for row in self.fabric.route_graph.leaving()]

    def shortest_paths(
        self, root: int, lengths: Sequence[int], height: int | None = None
    ) -> TreeColumn | None:
        """The tree of shortest paths from a rank to all that it sends to, under lengths of the rows.

        Parameters
        ----------
        height : int or None
            Most edges on a path from rank to rank. Then the tree has a layer of states for each number of edges so far.

        Returns
        -------
        TreeColumn or None
            None where a path takes more edges.
        """
        size, nodes = self.fabric.size, len(self.fabric.route_graph.nodes)
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
            for end, row in self._leaving[node]:
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
        for rank, wanted in enumerate(self.demand[root]):
            if wanted and rank not in ends:
                return None
            if wanted:
                carried[ends[rank]] = wanted
        usage = [0] * len(self.limits)
        for state in reversed(settled[1:]):
            if not carried[state]:
                parent[state] = -1
                continue
            carried[parent[state]] += carried[state]
            usage[entered[state]] += carried[state]
        reached = tuple(ends.get(rank, -1) for rank in range(size))
        routes = RouteTable(self.orbits, tuple(lengths))
        return TreeColumn(root, reached, tuple(parent), tuple(usage), routes)

    def shards(self, weights: Mapping[TreeColumn, Fraction]) -> tuple[Shard, ...]:
        """The shards of a plan: paths in the order of destination, source and share.

        What a rank keeps is a shard without edges. A share is of the buffer of a rank, of the mean one where they
        differ, so that all of them add up to the number of ranks.
        """
        found: dict[Path, Fraction] = {}
        for path, part in self._parts_of_paths(weights):
            found[path] = found.get(path, Fraction(0)) + part
        shards: dict[tuple[int, int], list[tuple[Fraction, Path]]] = {}
        for path, part in found.items():
            shards.setdefault((path[-1], path[0]), []).append((part, path))
        return tuple(
            Shard(part * self.demand[pair[1]][pair[0]] / self.rate_of_one, (self._stage(path),))
            for pair in sorted(shards)
            for part, path in sorted(shards[pair], key=lambda item: (-item[0], len(item[1]), item[1]))
        )

    def _parts_of_paths(self, weights: Mapping[TreeColumn, Fraction]) -> Iterator[tuple[Path, Fraction]]:
        """Every path with a part of what its destination wants; the parts of a pair add up to 1."""
        totals: dict[int, Fraction] = {}
        for tree, weight in weights.items():
            totals[tree.root] = totals.get(tree.root, Fraction(0)) + weight
        elements = self.orbits.elements.tolist()
        alike = dict(zip(self.roots, self.root_counts, strict=True))
        for tree, weight in weights.items():
            paths = self._paths(tree)
            images = Counter(tuple(element[node] for node in path) for element in elements for path in paths)
            part = weight / totals[tree.root] * Fraction(alike[tree.root], len(elements))
            for path, count in images.items():
                yield path, part * count
        for rank in range(self.fabric.size):
            if self.demand[rank][rank]:
                yield (rank,), Fraction(1)

    def _paths(self, tree: TreeColumn) -> list[Path]:
        """The path to every rank that the tree's root sends to."""
        paths, nodes = [], self.fabric.route_graph.nodes
        for rank, wanted in enumerate(self.demand[tree.root]):
            if wanted and rank != tree.root:
                state, path = tree.up[rank], [rank]
                while state != tree.root:
                    state = tree.down[state]
                    path.append(nodes[state % len(nodes)])
                paths.append(tuple(path[::-1]))
        return paths

    def edges_in_a_row(self, tree: TreeColumn) -> int:
        """Most edges from rank to rank on a path of a tree."""
        return max(sum(node < self.fabric.size for node in path) - 1 for path in self._paths(tree))

    def _stage(self, path: Path) -> Stage:
        """A chain of edges along a path, one from each rank on it to the next."""
        fabric = self.fabric
        names = [fabric.nodes[node] for node in path]
        stops = [place for place, node in enumerate(path) if node < fabric.size]
        edges = []
        for start, stop in pairwise(stops):
            route = tuple(names[start : stop + 1])
            links = [fabric.link_index[ends] for ends in pairwise(route)]
            edges.append(Edge(path[start], path[stop], route, fabric.channel_of(links)))
        return Stage("broadcast", path[0], tuple(edges))


@dataclass(frozen=True)
class FlowPricing(Pricing):
    """Cheapest columns of an all-to-all: shortest paths, exact."""

    packing: FlowPacking

    def cheapest(self, lengths: Sequence[int], effort: int = 0) -> dict[int, TreeColumn]:
        """A tree of shortest paths of every root that has one, by its place among `FlowPacking.roots`."""
        trees = (self.packing.shortest_paths(root, lengths, self.height) for root in self.packing.roots)
        return {place: tree for place, tree in enumerate(trees) if tree is not None}
