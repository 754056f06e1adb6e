"""Packing by multiplicative weights, within (1 - epsilon) of the optimum (Blink 3.2).

Garg and Könemann (1998), for trees as in Chekuri and Quanrud (2017): every link e has a length y(e), at first
1 / c(e). Again and again the cheapest tree takes as much flow as its narrowest link has capacity, and every link it
crosses gets longer by the factor 1 + step x flow / c(e). What was sent, divided by the largest overload, is a packing;
at any time sum of c(e) y(e) / (length of the cheapest tree) is an upper bound. The loop ends when the two are within
epsilon, so the result is proved and not only promised. Lengths are scaled down together before they overflow, which
changes no choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import inf

from topoplan.errors import UsageError
from topoplan.packing.arborescence import cheapest_arborescence
from topoplan.packing.bounds import best_bound
from topoplan.packing.columns import Packing, TreeColumn
from topoplan.packing.spanning_tree import cheapest_spanning_tree
from topoplan.plans.certificate import Certificate, Lengths, certified_bound

_OVERFLOW = 1e200
_ROUNDS_BETWEEN_CHECKS = 8

TreeOracle = Callable[[list[list[float]], int], list[int]]
"""Parent pointers of a cheapest arborescence, from costs by head and a root."""


@dataclass(frozen=True, slots=True)
class MwuPacking:
    """A packing within (1 - epsilon) of its bound.

    Parameters
    ----------
    weights : dict of TreeColumn to Fraction
        Relative weight of each column; feasible up to one common factor.
    certificate : Certificate
    iterations : int
        Trees that were priced.
    """

    weights: dict[TreeColumn, Fraction]
    certificate: Certificate
    iterations: int


def pack_mwu(packing: Packing, *, epsilon: float = 0.05, tree_oracle: TreeOracle | None = None) -> MwuPacking:
    """Pack by multiplicative weights until rate >= (1 - epsilon) x bound is proved.

    Parameters
    ----------
    packing : Packing
        At least two connected ranks.
    epsilon : float
        Above 0, at most 0.5.
    tree_oracle : callable or None
        Another way to find the cheapest arborescence, for comparison; None uses our own.

    Raises
    ------
    UsageError
        epsilon is out of range.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.plans import Fabric
    >>> packing = Packing(Fabric(topoplan.load("dgx-1v"), ("nvlink",)), "broadcast", 0)
    >>> result = pack_mwu(packing)
    >>> len(result.weights) > 6
    True
    """
    if not 0 < epsilon <= 0.5:
        raise UsageError(f"epsilon {epsilon} must be above 0 and at most 0.5, for example 0.05")
    return _Loop(packing, epsilon, tree_oracle).run()


class _Loop:
    def __init__(self, packing: Packing, epsilon: float, tree_oracle: TreeOracle | None) -> None:
        fabric = packing.fabric
        self.packing = packing
        self.epsilon = epsilon
        self.oracle = tree_oracle or cheapest_arborescence
        # Prim serves undirected trees; a rival oracle is asked for them as arborescences from rank 0.
        self.undirected = packing.folded
        self.own = tree_oracle is None
        self.certificate = best_bound(fabric, packing.collective, packing.root)
        bound = certified_bound(self.certificate, fabric, packing.collective, packing.root)
        self.bound = float(bound * packing.scale)
        self.capacity = [float(c) for c in packing.limits]
        self.length = [1.0 / c for c in self.capacity]
        self.rows_of_arc = [
            [row for row, times in enumerate(line) for _ in range(times)]
            for line in packing.incidence.tolist()
        ]
        self.arcs_of_row: list[list[int]] = [[] for _ in self.capacity]
        for arc, rows in enumerate(self.rows_of_arc):
            for row in rows:
                self.arcs_of_row[row].append(arc)
        self.between = packing.arcs_between
        self.ends = [(arc.tail, arc.head) for arc in fabric.arcs]
        size = fabric.size
        self.by_head = [[inf] * size for _ in range(size)]
        self.by_tail = [[inf] * size for _ in range(size)]
        for arc in range(len(self.ends)):
            self._reprice(arc)

    def run(self) -> MwuPacking:
        packing = self.packing
        step = self.epsilon / 2
        load = [0.0] * len(self.capacity)
        sent: dict[TreeColumn, float] = {}
        total, iterations, best_rate = 0.0, 0, 0.0
        while True:
            columns, length = self._cheapest()
            iterations += 1
            weight = sum(c * y for c, y in zip(self.capacity, self.length, strict=True))
            dual = weight * packing.groups / length
            if dual < self.bound * (1 - 1e-12):
                self._certify()
            crossings: dict[int, int] = {}
            for rows in columns.values():
                for row in rows:
                    crossings[row] = crossings.get(row, 0) + 1
            flow = min(self.capacity[row] / times for row, times in crossings.items())
            for column in columns:
                sent[column] = sent.get(column, 0.0) + flow
            total += flow * packing.groups
            stale = set()
            for row, times in crossings.items():
                load[row] += times * flow
                self.length[row] *= 1 + step * times * flow / self.capacity[row]
                stale.update(self.arcs_of_row[row])
            for arc in stale:
                self._reprice(arc)
            if max(self.length) > _OVERFLOW:
                self.length = [y / _OVERFLOW for y in self.length]
                for arc in range(len(self.ends)):
                    self._reprice(arc)
            if iterations % _ROUNDS_BETWEEN_CHECKS == 0 or iterations < _ROUNDS_BETWEEN_CHECKS:
                best_rate = total / max(x / c for x, c in zip(load, self.capacity, strict=True))
                if best_rate >= (1 - self.epsilon) * self.bound:
                    weights = {column: Fraction(x).limit_denominator(1 << 24) for column, x in sent.items()}
                    return MwuPacking(weights, self.certificate, iterations)

    def _certify(self) -> None:
        """Keep the current lengths as the certificate if they prove a lower bound than the known one."""
        packing, fabric = self.packing, self.packing.fabric
        half = 2 if packing.folded else 1
        top = max(self.length)
        rounded = [Fraction(round(y / top * (1 << 20)), half) for y in self.length]
        certificate = Lengths(
            tuple(
                (link.src, link.dst, rounded[row])
                for link, row in zip(fabric.links, packing.row_of_link.tolist(), strict=True)
                if rounded[row]
            )
        )
        bound = float(certified_bound(certificate, fabric, packing.collective, packing.root) * packing.scale)
        if bound < self.bound:
            self.certificate, self.bound = certificate, bound

    def _reprice(self, arc: int) -> None:
        tail, head = self.ends[arc]
        cost = min(
            sum(self.length[row] for row in self.rows_of_arc[other]) for other in self.between[tail, head]
        )
        self.by_head[head][tail] = cost
        self.by_tail[tail][head] = cost

    def _cheapest(self) -> tuple[dict[TreeColumn, list[int]], float]:
        """Columns to use together (one per group) with the rows they cross, and their length in all."""
        packing = self.packing
        if self.undirected:
            parent = cheapest_spanning_tree(self.by_head) if self.own else self.oracle(self.by_head, 0)
            down = self._arcs_down(parent)
            rising = [packing.reversed_arc(arc) for arc in down]
            rows = [row for arc in down for row in self.rows_of_arc[arc]]
            return {packing.column(0, rising, down): rows}, sum(self.length[row] for row in rows)
        found = {}
        for root in packing.roots:
            down = self._arcs_down(self.oracle(self.by_head, root)) if packing.uses_down else []
            rising = self._arcs_up(self.oracle(self.by_tail, root)) if packing.uses_up else []
            rows = [row for arc in (*rising, *down) for row in self.rows_of_arc[arc]]
            found[packing.column(root, rising, down)] = rows
        lengths = {column: sum(self.length[row] for row in rows) for column, rows in found.items()}
        if packing.groups > 1:
            return found, sum(lengths.values())
        best = min(found, key=lambda column: (lengths[column], column))
        return {best: found[best]}, lengths[best]

    def _arcs_down(self, parent: list[int]) -> list[int]:
        return [self._arc(up, v) for v, up in enumerate(parent) if up >= 0]

    def _arcs_up(self, parent: list[int]) -> list[int]:
        return [self._arc(v, up) for v, up in enumerate(parent) if up >= 0]

    def _arc(self, tail: int, head: int) -> int:
        arcs = self.between[tail, head]
        if len(arcs) == 1:
            return arcs[0]
        return min(arcs, key=lambda arc: (sum(self.length[row] for row in self.rows_of_arc[arc]), arc))
