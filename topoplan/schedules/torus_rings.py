"""Divide the links of a torus into Hamiltonian cycles, as many as it has dimensions: rings without a search of paths.

The Cartesian product of k cycles is the union of k Hamiltonian cycles without a common edge (Kotzig 1973 for two,
Aubert and Schneider 1982 for k). They are found by exchanges. At first factor d holds all edges of dimension d, that is
its rings. In a square of two dimensions, where one factor has two opposite edges and another factor the other two,
the factors may change these pairs; every vertex keeps two edges of each factor. Two cycles of a factor that the pair
joins become one. A pair in one cycle splits it if the cycle passes both edges in one sense round the square, and else
leaves one cycle. Exchanges that leave fewer cycles are made first; if there are none, one that leaves as many, by a
generator of fixed seed, at most `MOST_TRIES` of these.

Ranks count through the last dimension first, as in `topoplan.machine.torus`. In a dimension of two vertices both links
join the same ones, and its rings have two; most such tori are left to the search.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations
from math import prod

from topoplan.machine.torus import factorings

MOST_TRIES = 2_000
"""Most exchanges that leave as many cycles as before."""

MOST_VERTICES = 4_096
"""Vertices of a torus up to which its cycles are found: seconds."""

Edge = tuple[int, int]
"""A vertex and a dimension: the edge to the next vertex ahead."""


def torus_sides(lanes: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """Return the sides of the torus, or ring, whose links are all lanes; None for other graphs.

    ``lanes[u][v]`` are parallel lanes from u to v, as many of each link of the torus.
    """
    size = len(lanes)
    if size > MOST_VERTICES:
        return None
    around = [{v: count for v, count in enumerate(row) if count} for row in lanes]
    every = sum(around[0].values())
    for sides in factorings(size):
        many, left = divmod(every, 2 * len(sides))
        if (
            many
            and not left
            and all(around[vertex] == _neighbours(sides, vertex, many) for vertex in range(size))
        ):
            return sides
    return None


def _ahead(sides: Sequence[int], vertex: int, dimension: int, step: int = 1) -> int:
    """Return the vertex a step ahead in a dimension."""
    below = prod(sides[dimension + 1 :])
    digit = vertex // below % sides[dimension]
    return vertex + ((digit + step) % sides[dimension] - digit) * below


def _neighbours(sides: Sequence[int], vertex: int, many: int) -> dict[int, int]:
    """Return the lanes to each neighbour, so many of each link."""
    found: dict[int, int] = {}
    for dimension in range(len(sides)):
        for step in (1, -1):
            other = _ahead(sides, vertex, dimension, step)
            found[other] = found.get(other, 0) + many
    return found


def torus_rings(sides: Sequence[int]) -> list[tuple[int, ...]] | None:
    """Return a Hamiltonian cycle for each dimension, which share no link; None if the exchanges do not end.

    >>> torus_rings((3, 3))
    [(0, 1, 7, 8, 2, 5, 4, 3, 6), (0, 2, 1, 4, 7, 6, 8, 5, 3)]
    """
    factors = _Factors(sides)
    return factors.cycles() if factors.join() else None


class _Factors:
    """The edges of a torus in factors, of which each has two at every vertex."""

    def __init__(self, sides: Sequence[int]) -> None:
        self.sides, self.size = tuple(sides), prod(sides)
        many = range(len(sides))
        self.factor = {(vertex, one): one for vertex in range(self.size) for one in many}
        self.ahead = [[_ahead(sides, vertex, one) for vertex in range(self.size)] for one in many]
        self.at: list[list[list[Edge]]] = [[[] for _ in range(self.size)] for _ in many]
        for vertex, one in self.factor:
            for end in (vertex, self.ahead[one][vertex]):
                self.at[one][end].append((vertex, one))
        # For each factor the cycle of every edge, its place there, and whether the cycle passes it ahead.
        self.known: list[dict[Edge, tuple[int, int]]] = [{} for _ in many]
        self.count = [self._walk(one) for one in many]

    def _other(self, edge: Edge, end: int) -> int:
        vertex, one = edge
        return self.ahead[one][vertex] if end == vertex else vertex

    def _walk(self, factor: int) -> int:
        """Number the cycles of a factor, and return how many there are."""
        known: dict[Edge, tuple[int, int]] = {}
        count = 0
        for start in range(self.size):
            edge, end = self.at[factor][start][0], start
            if edge in known:
                continue
            while edge not in known:
                known[edge] = count, end
                end = self._other(edge, end)
                first, second = self.at[factor][end]
                edge = second if edge == first else first
            count += 1
        self.known[factor] = known
        return count

    def _change(self, factor: int, near: Edge, far: Edge) -> int:
        """Return by how many cycles a factor has more without two opposite edges of a square, and with the others."""
        (first, tail), (second, other) = self.known[factor][near], self.known[factor][far]
        if first != second:
            return -1
        # Both are passed ahead or both back: they turn in opposite senses round the square.
        return 0 if (tail == near[0]) == (other == far[0]) else 1

    def join(self) -> bool:
        """Exchange edges until every factor is one cycle; return whether that is so."""
        squares = [
            (vertex, one, other)
            for vertex in range(self.size)
            for one, other in combinations(range(len(self.sides)), 2)
        ]
        rng, tries = random.Random(0), 0
        while max(self.count) > 1:
            level = []
            joined = False
            for vertex, one, other in squares:
                change = self._gain(vertex, one, other)
                if change is not None and change < 0:
                    self._exchange(vertex, one, other)
                    joined = True
                elif change == 0:
                    level.append((vertex, one, other))
            if joined:
                continue
            level = [square for square in level if self._gain(*square) == 0]
            if not level or tries >= MOST_TRIES:
                return False
            tries += 1
            self._exchange(*rng.choice(level))
        return True

    def _pairs(self, vertex: int, one: int, other: int) -> tuple[tuple[Edge, Edge], tuple[Edge, Edge]]:
        """Return the opposite edges of a square: those of one dimension, and those of the other."""
        return (
            ((vertex, one), (self.ahead[other][vertex], one)),
            ((vertex, other), (self.ahead[one][vertex], other)),
        )

    def _gain(self, vertex: int, one: int, other: int) -> int | None:
        """Return by how many an exchange changes the number of cycles; None if the square has none."""
        rows, columns = self._pairs(vertex, one, other)
        first, second = self.factor[rows[0]], self.factor[columns[0]]
        if first == second or self.factor[rows[1]] != first or self.factor[columns[1]] != second:
            return None
        return self._change(first, *rows) + self._change(second, *columns)

    def _exchange(self, vertex: int, one: int, other: int) -> None:
        rows, columns = self._pairs(vertex, one, other)
        first, second = self.factor[rows[0]], self.factor[columns[0]]
        for edges, old, new in ((rows, first, second), (columns, second, first)):
            for edge in edges:
                self.factor[edge] = new
                for end in (edge[0], self.ahead[edge[1]][edge[0]]):
                    self.at[old][end].remove(edge)
                    self.at[new][end].append(edge)
        for factor in (first, second):
            self.count[factor] = self._walk(factor)

    def cycles(self) -> list[tuple[int, ...]]:
        """Return the vertices of every factor from vertex 0 on, towards the lower neighbour."""
        found = []
        for factor in range(len(self.sides)):
            order = [end for _, end in self.known[factor].values()]
            found.append(min(tuple(order), (order[0], *order[:0:-1])))
        return found
