"""Pack the even all-to-all of a cluster by kind: paths on a sample of its servers.

    maximise f, subject to   sum of x(T) usage(T, C) <= capacity(C),   sum of x(T) over the trees of rank s = n(s) f,

for classes of links C, where s stands for n(s) ranks. A tree of s leads to one rank of every commodity of s
(`topoplan.plans.kind_exchange`), which counts as often as one source has destinations there. As in
`topoplan.solve.packing.flow_packing` the cheapest tree is one of shortest paths. The mean of a routing over the
permutations of equivalent servers loads all links of a class equally, so the optimum is that of the whole cluster.

Paths keep to the servers that are ends of commodities. Another server of the source's cell and leaf can be replaced by
the source's, one of the destination's by that of the destination, and another leaf of their classes by theirs, and no
path gets longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

from topoplan.errors import InfeasibleError
from topoplan.plans.certificates.kind_lengths import pair_counts
from topoplan.plans.kind_exchange import KindPath
from topoplan.solve.packing.flow_packing import Path, path_stages, shortest_path_tree
from topoplan.solve.packing.kind_program import KindColumn, KindProgram, Solution
from topoplan.solve.simplex.exact_simplex import PackingSimplex

MOST_PAIR_ROWS = 256
"""Rows of the program that looks for fewer paths: a larger one takes seconds."""


@dataclass(frozen=True, slots=True)
class _PathsColumn(KindColumn):
    """A path from a rank to one rank of each commodity."""

    paths: tuple[Path, ...]


class KindExchange(KindProgram[_PathsColumn]):
    """Column generation of the even all-to-all; the height is the number of edges on a path from rank to rank."""

    @cached_property
    def _demand(self) -> dict[int, list[int]]:
        """For the rank of every owner, how many ranks each rank of the sample stands for as a destination."""
        home = self.servers.of_rank.tolist()
        found = {}
        for rank, _ in self.owners:
            counts = pair_counts(self.sample, home, rank)
            found[rank] = [counts.get(other, 0) for other in range(self.fabric.size)]
        return found

    @cached_property
    def _leaving(self) -> dict[int, list[list[tuple[int, int]]]]:
        """For the rank of every owner, the next states of every state, with rows, on servers that are ends for it."""
        fabric = self.fabric
        server = {device.name: device.server for device in fabric.topology.devices}
        graph = fabric.route_graph
        found: dict[int, list[list[tuple[int, int]]]] = {}
        known: dict[frozenset[str], list[list[tuple[int, int]]]] = {}
        for rank, wanted in self._demand.items():
            ends = (fabric.ranks[other] for other, amount in enumerate(wanted) if amount or other == rank)
            kept = frozenset({"", *(server[name] for name in ends)})
            if kept not in known:
                known[kept] = [
                    [
                        (state, self.rows[link])
                        for link, state in arcs
                        if server[fabric.nodes[graph.nodes[state]]] in kept
                    ]
                    for arcs in graph.leaving()
                ]
            found[rank] = known[kept]
        return found

    def cheapest(self, lengths: Sequence[int], height: int | None) -> list[_PathsColumn]:
        columns = []
        for rank, wanted in self._demand.items():
            tree = shortest_path_tree(self.fabric, self._leaving[rank], rank, wanted, lengths, height=height)
            if tree is None:
                name = self.fabric.ranks[rank]
                raise InfeasibleError(f"{name} does not reach every other GPU by a path of {height} edges")
            columns.append(_PathsColumn(rank, tree.usage, tuple(tree.paths(self.fabric, wanted))))
        return columns

    def heights(self, solution: Solution[_PathsColumn]) -> Iterable[int]:
        size = self.fabric.size
        paths = (path for column in solution.columns for path in column.paths)
        return range(1, max(sum(node < size for node in path) - 1 for path in paths))

    def templates(self, solution: Solution[_PathsColumn]) -> tuple[KindPath, ...]:
        totals: dict[int, Fraction] = {}
        for column, weight in solution.columns.items():
            totals[column.rank] = totals.get(column.rank, Fraction(0)) + weight
        cells, places, home = self.sample.cluster.cells, self.sample.places, self.servers.of_rank
        ranks = {rank: count // cells[places[home[rank]].cell].servers for rank, count in self.owners}
        shares: dict[Path, Fraction] = {}
        for column, weight in solution.columns.items():
            for path in column.paths:
                shares[path] = shares.get(path, Fraction(0)) + weight / totals[column.rank]
        shares = self._fewer_paths(shares)
        found: dict[KindPath, Fraction] = {}
        stages = path_stages(self.fabric, list(shares))
        for (path, share), stage in zip(shares.items(), stages, strict=True):
            # Each of the equivalent sources sends the whole block.
            part = KindPath(share * ranks[path[0]], (stage,))
            for image in self.images(part):
                bare = replace(image, share=Fraction(1))
                found[bare] = found.get(bare, Fraction(0)) + image.share
        return tuple(
            replace(bare, share=found[bare])
            for bare in sorted(
                found, key=lambda one: (one.ends, -found[one], [edge.route for edge in one.stages[0].edges])
            )
        )

    def _fewer_paths(self, shares: dict[Path, Fraction]) -> dict[Path, Fraction]:
        """Return shares of as many paths as a basis of the program with a row for each pair has, at the same rate.

        They stay as they are if that program has more than `MOST_PAIR_ROWS` rows.
        """
        pairs = list(dict.fromkeys((path[0], path[-1]) for path in shares))
        rows = len(self.limits)
        if len(pairs) == len(shares) or rows + len(pairs) > MOST_PAIR_ROWS:
            return shares
        place = {pair: number for number, pair in enumerate(pairs)}
        ranks = dict(self.owners)
        program = PackingSimplex([*self.limits, *[0] * len(pairs)])
        demand = [ranks[source] * self._demand[source][destination] for source, destination in pairs]
        columns = [[*[0] * rows, *demand]]
        nodes, index = self.fabric.nodes, self.fabric.link_index
        for path in shares:
            column = [0] * (rows + len(pairs))
            for src, dst in pairwise(path):
                column[self.rows[index[nodes[src], nodes[dst]]]] += 1
            column[rows + place[path[0], path[-1]]] = -1
            columns.append(column)
        program.add(columns, [1, *[0] * len(shares)])
        program.optimise()
        solution = program.solution()
        rate = solution[0]
        paths = list(shares)
        return {
            path: solution[number] / (rate * demand[place[path[0], path[-1]]])
            for number, path in enumerate(paths, start=1)
            if number in solution
        }
