"""Pack the even all-to-all of a torus of equal servers by kind: paths along trees from each GPU of one server.

A column of the program (`topoplan.solve.packing.kind_program`) is a template (`topoplan.plans.torus_exchange`). Under
lengths of the classes of links, the best tree has short paths to all ranks together. Servers that are entered in one
direction have the same edges, however far they are. So each GPU is reached as it would be after some steps in that
direction: the distances of step s follow from those of step s - 1 by the shortest routes between neighbours, and
routes inside a server (value iteration). Trees after few and after many steps are compared by the length of all of
their paths, in orders of the dimensions that begin with each of them.

Steps ahead and back are split where the lengths of the ways are equal. In a dimension of an even side two splits are
best, and the program mixes them. With lengths of cables alone any of these trees has shortest paths, so the packing is
optimal if cables are the bottleneck.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import permutations, product

from topoplan.errors import InfeasibleError
from topoplan.machine.torus import Direction
from topoplan.plans.kind_templates import ClassCrossings
from topoplan.plans.minimum_trees import UNREACHABLE
from topoplan.plans.shards import Stage
from topoplan.plans.torus_exchange import TorusPaths
from topoplan.plans.torus_templates import Arm
from topoplan.solve.packing.kind_program import Solution, TemplateColumn
from topoplan.solve.packing.packing_program import rounded_lengths
from topoplan.solve.packing.torus_packing import TorusPacking, TorusRoutes

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
