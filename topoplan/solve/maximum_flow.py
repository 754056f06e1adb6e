"""Compute maximum flows in whole numbers (Dinic 1970) and the minimum cuts that prove them, on quotients.

In an equitable partition every device of a class has the same capacity to and from each other class, so a maximum
flow may be averaged over each class without loss (linear programs shrink by colour refinement: Grohe, Kersting,
Mladenov, Selman 2014): flow and cut of the machine are those of the small graph whose vertices are the classes and
whose capacities are those between classes together. The sink, and the root of a broadcast, are classes of their
own. A cut found here is a cut of the machine, whatever the argument; a packing that meets it proves that it is the
smallest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np

from topoplan.machine.fabric import Fabric
from topoplan.plans.permutation_groups import equitable_partition


class FlowNetwork:
    """A directed graph with capacities, solved by shortest augmenting paths in phases.

    Arcs are (tail, head, capacity) with whole capacities of any size; zero and parallel arcs are allowed.

    Examples
    --------
    >>> network = FlowNetwork(4, [(0, 1, 3), (0, 2, 2), (1, 3, 2), (2, 3, 3), (1, 2, 1)])
    >>> network.maximum(0, 3), sorted(network.source_side())
    (5, [0])
    """

    def __init__(self, size: int, arcs: Iterable[tuple[int, int, int]]) -> None:
        self._size = size
        self._head: list[int] = []
        self._residual: list[int] = []
        self._leaving: list[list[int]] = [[] for _ in range(size)]
        for tail, head, capacity in arcs:
            self._leaving[tail].append(len(self._head))
            self._head.append(head)
            self._residual.append(capacity)
            self._leaving[head].append(len(self._head))
            self._head.append(tail)
            self._residual.append(0)
        self._full = list(self._residual)
        self._level: list[int] = []

    def maximum(self, source: int, sink: int) -> int:
        """Return the value of a maximum flow; forget any earlier flow."""
        self._residual = list(self._full)
        total = 0
        while self._find_levels(source, sink):
            position = [0] * self._size
            while pushed := self._augment(source, sink, position):
                total += pushed
        return total

    def source_side(self) -> set[int]:
        """Return the vertices on the source's side of a minimum cut, after `maximum`: the smallest such set."""
        return {v for v in range(self._size) if self._level[v] >= 0}

    def _find_levels(self, source: int, sink: int) -> bool:
        level = [-1] * self._size
        level[source] = 0
        frontier = [source]
        for v in frontier:
            for arc in self._leaving[v]:
                head = self._head[arc]
                if level[head] < 0 and self._residual[arc] > 0:
                    level[head] = level[v] + 1
                    frontier.append(head)
        self._level = level
        return level[sink] >= 0

    def _augment(self, source: int, sink: int, position: list[int]) -> int:
        """Push along one path of the level graph; return the flow, 0 if no path remains."""
        path: list[int] = []
        v = source
        while v != sink:
            arcs = self._leaving[v]
            while position[v] < len(arcs):
                arc = arcs[position[v]]
                if self._residual[arc] > 0 and self._level[self._head[arc]] == self._level[v] + 1:
                    break
                position[v] += 1
            else:
                if v == source:
                    return 0
                v = self._head[path.pop() ^ 1]
                position[v] += 1
                continue
            path.append(arc)
            v = self._head[arc]
        pushed = min(self._residual[arc] for arc in path)
        for arc in path:
            self._residual[arc] -= pushed
            self._residual[arc ^ 1] += pushed
        return pushed


class Quotient:
    """Classes of devices that are equivalent beside some fixed ones, and the capacities between them.

    ``capacity`` has a whole number for each link, in any unit, the same on equivalent links. Each ``fixed`` node is a
    class of its own. ``forward`` takes links in their own direction, else reversed. `class_of` maps nodes to classes,
    from 0, and `ranks_in` counts the ranks in every class.
    """

    def __init__(
        self, fabric: Fabric, capacity: Sequence[int], *, fixed: Sequence[int], forward: bool
    ) -> None:
        labels = equitable_partition(fabric, fixed)
        numbers = np.unique(labels, return_inverse=True)[1]
        self.class_of: list[int] = numbers.tolist()
        self.size = max(self.class_of) + 1
        self.ranks_in: list[int] = np.bincount(numbers[: fabric.size], minlength=self.size).tolist()
        between: dict[tuple[int, int], int] = {}
        of = self.class_of
        for (s, d), c in zip(fabric.ends, capacity, strict=True):
            pair = (of[s], of[d]) if forward else (of[d], of[s])
            between[pair] = between.get(pair, 0) + c
        self._arcs = [(a, b, c) for (a, b), c in sorted(between.items()) if a != b]

    def smallest_cut(self, source: int, sink: int) -> tuple[int, set[int]]:
        """Return the maximum flow between two fixed nodes, and the nodes on the source's side of the smallest cut."""
        network = FlowNetwork(self.size, self._arcs)
        value = network.maximum(self.class_of[source], self.class_of[sink])
        return value, self._nodes(network.source_side())

    def gather_cut(self, sink: int, *, ranks: int, time: Fraction) -> set[int] | None:
        """Return the nodes of a cut S that leaves out the sink and takes longer than ``time``; None if none exists.

        A cut with |S ∩ ranks| > time x capacity shows as a flow below ``ranks`` from a source with one unit per rank.
        """
        arcs = [(a, b, c * time.numerator) for a, b, c in self._arcs]
        arcs += [(self.size, place, time.denominator * count) for place, count in enumerate(self.ranks_in)]
        network = FlowNetwork(self.size + 1, arcs)
        if network.maximum(self.size, self.class_of[sink]) >= ranks * time.denominator:
            return None
        return self._nodes(network.source_side() - {self.size})

    def _nodes(self, classes: set[int]) -> set[int]:
        return {node for node, place in enumerate(self.class_of) if place in classes}


def equivalent_ranks(fabric: Fabric, fixed: Sequence[int] = ()) -> list[int]:
    """Return the first rank of every class of ranks that are equivalent beside the fixed nodes, without these."""
    labels = equitable_partition(fabric, fixed)[: fabric.size]
    firsts = np.unique(labels, return_index=True)[1].tolist()
    return sorted(rank for rank in firsts if rank not in set(fixed))
