"""Pack the even all-to-all of a cluster by kind: paths on a sample of its servers.

    maximise f, subject to   sum of x(T) usage(T, C) <= capacity(C),   sum of x(T) over the trees of rank s = n(s) f,

for classes of links C, where s stands for n(s) ranks. A tree of s leads to one rank of every commodity of s
(`topoplan.plans.kind_exchange`), which counts as often as one source has destinations there. As in
`topoplan.solve.packing.flow_packing` the cheapest tree is one of shortest paths. The mean of a routing over the
permutations of equivalent servers loads all links of a class equally, so the optimum is that of the whole cluster.

Paths keep to the servers that are ends of commodities. Another server of the source's cell and leaf can be replaced by
the source's, one of the destination's by that of the destination, and another leaf of their classes by theirs, and no
path gets longer.

In a torus of equal servers, paths lie along trees from each GPU of one server (`TorusExchange`). A column of the
program (`topoplan.solve.packing.kind_program`) is a template (`topoplan.plans.torus_templates`). Under lengths of the
classes of links, the best tree has short paths to all ranks together. Servers that are entered in one direction have
the same edges, however far they are. So each GPU is reached as it would be after some steps in that direction: the
distances of step s follow from those of step s - 1 by the shortest routes between neighbours, and routes inside a
server (value iteration). Trees after few and after many steps are compared by the length of all of their paths, in
orders of the dimensions that begin with each of them.

Steps ahead and back are split where the lengths of the ways are equal. In a dimension of an even side two splits are
best, and the program mixes them. With lengths of cables alone any of these trees has shortest paths, so the packing is
optimal if cables are the bottleneck.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise, permutations, product

from topoplan.errors import InfeasibleError
from topoplan.machine.torus import Direction
from topoplan.plans.certificates.kind_lengths import pair_counts
from topoplan.plans.kind_exchange import KindPath
from topoplan.plans.kind_templates import ClassCrossings
from topoplan.plans.minimum_trees import UNREACHABLE
from topoplan.plans.shards import Stage
from topoplan.plans.torus_templates import Arm, TorusPaths
from topoplan.solve.packing.flow_packing import Path, path_stages, shortest_path_tree
from topoplan.solve.packing.kind_program import KindColumn, KindProgram, Solution, TemplateColumn
from topoplan.solve.packing.packing_program import rounded_lengths
from topoplan.solve.packing.torus_packing import TorusPacking, TorusRoutes
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


FAR = int(UNREACHABLE)
"""Distance of what is not reached."""

MOST_ORDERED = 3
"""Dimensions up to which all orders are tried; of more, one order that begins with each."""

FEW, MANY = 1, 9
"""Steps in a direction after which trees are compared."""


class TorusExchange(TorusPacking):
    """Column generation of the even all-to-all in a torus; heights are those of the trees, and not limited."""

    def heights(self, solution: Solution[TemplateColumn]) -> Iterable[int]:
        return ()

    def cheapest(self, lengths: Sequence[int], height: int | None) -> list[TemplateColumn]:
        routes = TorusRoutes(self, rounded_lengths(lengths))
        crossings = ClassCrossings(self.sample, self.fabric, self.rows)
        found = []
        for rank, _ in self.owners:
            best: tuple[int, TemplateColumn] | None = None
            for arms, stage in _Trees(routes).of(rank):
                template = TorusPaths(Fraction(1), arms, (stage,))
                usage = crossings.of(template)
                column = TemplateColumn(
                    rank, tuple(usage.get(row, 0) for row in range(len(self.counts))), template
                )
                cost = sum(times * length for times, length in zip(column.usage, lengths, strict=True))
                if best is None or cost < best[0]:
                    best = cost, column
            assert best is not None, "there is an order of the dimensions"
            found.append(best[1])
        return found


@dataclass(frozen=True, slots=True)
class _Entered:
    """How the GPUs of a server are reached: distances from the root, and the parent of each.

    Parents are ranks of the sample, of the server itself or of server 0; -1 for the root.
    """

    reach: list[int]
    parents: list[int]


class _Trees:
    """Trees of short paths from a rank of server 0, under lengths of the rows."""

    def __init__(self, routes: TorusRoutes) -> None:
        self.routes, self.torus = routes, routes.torus
        self.home = routes.members(None)

    def of(self, root: int) -> Iterator[tuple[tuple[Arm, ...], Stage]]:
        """Yield arms and trees, in several orders of the dimensions."""
        many = len(self.torus.sides)
        orders = (
            list(permutations(range(many)))
            if many <= MOST_ORDERED
            else [tuple((first + one) % many for one in range(many)) for first in range(many)]
        )
        start = self._settled(
            self.home, [0 if rank == root else FAR for rank in self.home], [-1] * len(self.home)
        )
        for order, steps in product(orders, (FEW, MANY)):
            reach, entered = start.reach, {}
            splits: list[list[Arm]] = []
            for dimension in order:
                both = [self._run(reach, Direction(dimension, step), steps) for step in (1, -1)]
                costs = [None if each is None else max(0, min(each.reach) - min(reach)) for each in both]
                splits.append(self._splits(dimension, *costs))
                for step, each in zip((1, -1), both, strict=True):
                    if each is not None:
                        entered[Direction(dimension, step)] = each
                known = [each.reach for each in both if each is not None]
                reach = [sum(column) // len(known) for column in zip(*known, strict=True)]
            for number in (0, -1):
                arms = tuple(split[number] for split in splits)
                used = [(one, entered[one]) for arm in arms for one, _ in arm.directions]
                yield arms, self._stage(root, start, used)

    def _run(self, reach: Sequence[int], direction: Direction, steps: int) -> _Entered | None:
        """Return how a server is reached after some steps, from a server that is reached so; None if it is not."""
        there, found = self.routes.members(direction), None
        now = list(reach)
        for _ in range(steps):
            ways = [
                [
                    known + self.routes.cost("broadcast", rank, child)
                    for rank, known in zip(self.home, now, strict=True)
                ]
                for child in there
            ]
            nearest = [min(way) for way in ways]
            parents = [self.home[way.index(least)] for way, least in zip(ways, nearest, strict=True)]
            found = self._settled(there, nearest, parents)
            if max(found.reach) >= FAR:
                return None
            now = found.reach
        return found

    def _settled(self, ranks: Sequence[int], reach: Sequence[int], parents: Sequence[int]) -> _Entered:
        """Return the distances of the ranks of a server after routes inside it (Dijkstra 1959)."""
        best, above = list(reach), list(parents)
        left = set(range(len(ranks)))
        while left:
            at = min(left, key=lambda one: (best[one], one))
            left.remove(at)
            for one in sorted(left):
                over = best[at] + self.routes.cost("broadcast", ranks[at], ranks[one])
                if over < best[one]:
                    best[one], above[one] = over, ranks[at]
        return _Entered(best, above)

    def _splits(self, dimension: int, ahead: int | None, back: int | None) -> list[Arm]:
        """Return the arms of least length; two if a server is as far ahead as back."""
        side = self.torus.sides[dimension]
        if ahead is None or back is None:
            if ahead is None and back is None:
                raise InfeasibleError(
                    f"a server reaches none of its neighbours in dimension {dimension}; plan the listed cluster instead"
                )
            return [Arm(dimension, 0, side - 1) if ahead is None else Arm(dimension, side - 1, 0)]
        if not ahead + back:
            ahead = back = 1
        turn = min(side - 1, side * back // (ahead + back))
        splits = [Arm(dimension, turn, side - 1 - turn)]
        if turn and turn * ahead == (side - turn) * back:
            splits.append(Arm(dimension, turn - 1, side - turn))
        return splits

    def _stage(self, root: int, start: _Entered, arms: Sequence[tuple[Direction, _Entered]]) -> Stage:
        """Return the tree of a root whose arms enter servers so."""
        pairs = [(above, child) for child, above in zip(self.home, start.parents, strict=True) if above >= 0]
        for direction, entered in arms:
            pairs += zip(entered.parents, self.routes.members(direction), strict=True)
        if max(start.reach) >= FAR:
            raise InfeasibleError(
                "paths of a torus by kind need links inside a server that connect its GPUs; plan the listed cluster "
                "instead"
            )
        stage = Stage("broadcast", root, tuple(self.routes.edge("broadcast", *pair) for pair in pairs))
        return Stage("broadcast", root, stage.top_down())
