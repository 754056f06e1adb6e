"""Maximum flow in whole numbers on small graphs (Dinic 1970), with the minimum cut that proves it."""

from __future__ import annotations

from collections.abc import Iterable


class FlowNetwork:
    """A directed graph with capacities, solved by shortest augmenting paths in phases.

    Parameters
    ----------
    size : int
        Number of vertices.
    arcs : iterable of (tail, head, capacity)
        Whole-number capacities of any size; zero and parallel arcs are allowed.

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
        """Value of a maximum flow; forgets any earlier flow."""
        self._residual = list(self._full)
        total = 0
        while self._find_levels(source, sink):
            position = [0] * self._size
            while pushed := self._augment(source, sink, position):
                total += pushed
        return total

    def source_side(self) -> set[int]:
        """Vertices on the source's side of a minimum cut, after `maximum`: the smallest such set."""
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
        """Push along one path of the level graph; 0 when there is none left."""
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
