"""Find Hamiltonian cycles of a small directed graph, and a largest set without a shared lane: rings over direct links.

All cycles are listed, or a varied sample if there are too many: both walk depth first and give a path up as soon as
some vertex can no longer be entered or left. Then as many as possible of them are packed by branch and bound. A ring
leaves every set of vertices at least once, so a cycle is dropped as soon as it would leave some set too few lanes for
the remaining rings. The next branch is at the vertex with the least slack: either some ring uses its scarcest lane, or
none does. Listing and packing stop at fixed limits, and the result says whether they had to.

A torus needs no search of paths: `torus_rings` divides its links into as many cycles as it has dimensions. The
Cartesian product of k cycles is the union of k Hamiltonian cycles without a common edge (Kotzig 1973 for two, Aubert
and Schneider 1982 for k). They are found by exchanges. At first factor d holds all edges of dimension d, that is its
rings. In a square of two dimensions, where one factor has two opposite edges and another factor the other two, the
factors may change these pairs; every vertex keeps two edges of each factor. Two cycles of a factor that the pair joins
become one. A pair in one cycle splits it if the cycle passes both edges in one sense round the square, and else leaves
one cycle. Exchanges that leave fewer cycles are made first; if there are none, one that leaves as many, by a generator
of fixed seed, at most `MOST_TRIES` of these.

Ranks count through the last dimension first, as in `topoplan.machine.torus`. In a dimension of two vertices both links
join the same ones, and its rings have two; most such tori are left to the search.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from topoplan.machine.torus import factorings

STEP_LIMIT = 200_000
"""Most paths visited by a walk among up to `STEP_VERTICES` vertices; each step costs as much as there are vertices."""

STEP_VERTICES = 64

CYCLE_LIMIT = 10_000
"""Most cycles listed."""

_SAMPLE = 64

MOST_PACKED = 256
"""Vertices up to which a largest set of disjoint cycles is searched; of more, each cycle that fits is taken in turn."""

Vertex = TypeVar("Vertex")


def ring_hops(order: Sequence[Vertex]) -> list[tuple[Vertex, Vertex]]:
    """Return the hops of a ring: from each vertex to the next, and from the last to the first."""
    return list(zip(order, (*order[1:], *order[:1]), strict=True))


def all_cycles(
    lanes: Sequence[Sequence[int]], *, cycle_limit: int | None = None
) -> tuple[list[tuple[int, ...]], bool]:
    """Return Hamiltonian cycles in ascending order, at most ``cycle_limit``, and whether they are all.

    ``lanes[u][v]`` above zero is an arc from u to v. None stands for `CYCLE_LIMIT`.

    >>> all_cycles([[int(u != v) for v in range(4)] for u in range(4)])[0][:2]
    [(0, 1, 2, 3), (0, 1, 3, 2)]
    """
    walk = _Walk(lanes)
    most = CYCLE_LIMIT if cycle_limit is None else cycle_limit
    cycles: list[tuple[int, ...]] = []
    for cycle in walk.cycles(lambda u, rest: [v for v in walk.following[u] if rest >> v & 1]):
        cycles.append(cycle)
        if len(cycles) >= most:
            return cycles, False
    return cycles, not walk.exhausted


def varied_cycles(lanes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return a sample of cycles, each over the lanes least used so far, with their reverses if these exist."""
    size = len(lanes)
    used = [[0] * size for _ in range(size)]
    cycles: list[tuple[int, ...]] = []
    walk = _Walk(lanes)

    def onward(u: int, rest: int) -> list[int]:
        found = [v for v in walk.following[u] if rest >> v & 1]
        return sorted(
            found, key=lambda v: (used[u][v] / lanes[u][v], (walk.leaving[v] & rest).bit_count(), v)
        )

    for _ in range(_SAMPLE):
        path = next(walk.cycles(onward), None)
        if path is None:
            break
        for cycle in (path, (0, *path[:0:-1])):
            if all(lanes[u][v] for u, v in ring_hops(cycle)):
                cycles.append(cycle)
                for u, v in ring_hops(cycle):
                    used[u][v] += 1
    return cycles


def step_limit(size: int) -> int:
    """Return the most paths that a walk among so many vertices visits."""
    return STEP_LIMIT // -(-size // STEP_VERTICES)


class _Walk:
    """Counts partial cycles up to a limit, and detects paths that cannot be closed."""

    def __init__(self, lanes: Sequence[Sequence[int]]) -> None:
        size = len(lanes)
        self._lanes = lanes
        self.following = [[v for v in range(size) if lanes[u][v]] for u in range(size)]
        self.leaving = [sum(1 << v for v in range(size) if lanes[u][v]) for u in range(size)]
        self._entering = [sum(1 << u for u in range(size) if lanes[u][v]) for v in range(size)]
        self._left = step_limit(size)

    @property
    def exhausted(self) -> bool:
        return self._left <= 0

    def cycles(self, onward: Callable[[int, int], list[int]]) -> Iterator[tuple[int, ...]]:
        """Yield Hamiltonian cycles from vertex 0, depth first, until the limit is reached.

        ``onward`` returns the vertices to try after one, in order, out of those of a bit set.
        """
        path, rest = [0], (1 << len(self._lanes)) - 2
        pending: list[Iterator[int]] = []
        while True:
            following: Iterator[int] = iter(())
            if not rest:
                if self._lanes[path[-1]][0]:
                    yield tuple(path)
            elif self.can_finish(path[-1], rest):
                following = iter(onward(path[-1], rest))
            elif self.exhausted:
                return
            pending.append(following)
            while (vertex := next(pending[-1], -1)) < 0:
                pending.pop()
                rest |= 1 << path.pop()
                if not pending:
                    return
            path.append(vertex)
            rest ^= 1 << vertex

    def can_finish(self, end: int, rest: int) -> bool:
        """Return False if some vertex of ``rest`` can no longer be entered or left, or the limit is reached."""
        self._left -= 1
        before, after = rest | 1 << end, rest | 1
        inside = rest
        while inside:
            lowest = inside & -inside
            v = lowest.bit_length() - 1
            if not self._entering[v] & before or not self.leaving[v] & after:
                return False
            inside ^= lowest
        return not self.exhausted


NODE_LIMIT = 5_000
"""Most nodes of the branch and bound."""

_LARGEST_CUT_TABLE = 9


@dataclass(frozen=True, slots=True)
class RingSearch:
    """Link-disjoint directed rings, each an order of all vertices from vertex 0; `exhaustive` if no more exist."""

    rings: tuple[tuple[int, ...], ...]
    exhaustive: bool


def ring_limit(lanes: Sequence[Sequence[int]]) -> int:
    """Return the most rings that the lanes in and out of each vertex allow."""
    table = np.array(lanes, dtype=np.int64)
    return int(min(table.sum(axis=0).min(), table.sum(axis=1).min()))


def disjoint_rings(lanes: Sequence[Sequence[int]]) -> RingSearch:
    """Return as many directed Hamiltonian cycles as fit if every lane carries at most one of them.

    ``lanes[u][v]`` are parallel lanes from u to v. Two vertices have the ring there and back for each pair of lanes.
    The number of cycles is exponential in N at worst; DGX-1V has 60, a full mesh of 8 has 5040. Beyond the limits the
    packing is over a varied sample of cycles. A torus of ranks in its order has its rings without a search.

    A full mesh of 4 has 12 lanes, but its arcs are not a union of 3 Hamiltonian cycles (Tillson 1980).

    >>> disjoint_rings([[int(u != v) for v in range(4)] for u in range(4)])
    RingSearch(rings=((0, 1, 2, 3), (0, 3, 2, 1)), exhaustive=True)
    """
    most = ring_limit(lanes)
    if len(lanes) == 2:
        return RingSearch(((0, 1),) * most, True)
    sides = torus_sides(lanes)
    known = None if sides is None else torus_rings(sides)
    if known is not None:
        both = [cycle for one in known for cycle in (one, (0, *one[:0:-1]))]
        return RingSearch(tuple(sorted(both * (most // len(both)))), True)
    cycles, complete = all_cycles(lanes)
    if not complete:
        cycles = sorted({*cycles[:1], *varied_cycles(lanes)})
    if len(lanes) > MOST_PACKED:
        taken = _first_disjoint(lanes, cycles)
        return RingSearch(taken, len(taken) == most or (complete and not cycles))
    packing = _Packing(lanes, cycles)
    best: tuple[int, ...] = ()
    while len(best) < most:
        found = packing.find(len(best) + 1)
        if found is None:
            break
        best = found
    proved = len(best) == most or (complete and packing.nodes < NODE_LIMIT)
    return RingSearch(tuple(cycles[number] for number in sorted(best)), proved)


def _first_disjoint(
    lanes: Sequence[Sequence[int]], cycles: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """Return each cycle for which the ones before it leave lanes."""
    used: Counter[tuple[int, int]] = Counter()
    found = []
    for cycle in cycles:
        hops = ring_hops(cycle)
        if all(used[u, v] < lanes[u][v] for u, v in hops):
            found.append(cycle)
            used.update(hops)
    return tuple(found)


class _Packing:
    """Branch and bound over a list of cycles: choose some that share no lane."""

    def __init__(self, lanes: Sequence[Sequence[int]], cycles: Sequence[tuple[int, ...]]) -> None:
        size = len(lanes)
        arcs = [(u, v) for u in range(size) for v in range(size) if lanes[u][v]]
        index = {arc: number for number, arc in enumerate(arcs)}
        self._room: NDArray[np.int64] = np.array([lanes[u][v] for u, v in arcs], dtype=np.int64)
        self._use: NDArray[np.int64] = np.zeros((len(cycles), len(arcs)), dtype=np.int64)
        for number, cycle in enumerate(cycles):
            for arc in ring_hops(cycle):
                self._use[number, index[arc]] = 1
        ends = [[arc[0] == vertex for arc in arcs] for vertex in range(size)]
        ends += [[arc[1] == vertex for arc in arcs] for vertex in range(size)]
        self._ports: NDArray[np.int64] = np.array(ends, dtype=np.int64).T
        # Every vertex set that holds vertex 0 and leaves out another vertex.
        sets = range(1, (1 << size) - 1, 2) if size <= _LARGEST_CUT_TABLE else ()
        self._out: NDArray[np.int64] = np.array(
            [[side >> u & 1 and not side >> v & 1 for side in sets] for u, v in arcs], dtype=np.int64
        ).reshape(len(arcs), len(sets))
        self._into: NDArray[np.int64] = np.array(
            [[side >> v & 1 and not side >> u & 1 for side in sets] for u, v in arcs], dtype=np.int64
        ).reshape(len(arcs), len(sets))
        self._crossings = self._use @ self._out
        self.nodes = 0

    def find(self, count: int) -> tuple[int, ...] | None:
        """Return the numbers of ``count`` cycles that fit together; None if none do or the limit is reached."""
        return self._extend(np.arange(len(self._use)), self._room, count)

    def _extend(
        self, cycles: NDArray[np.int64], room: NDArray[np.int64], count: int
    ) -> tuple[int, ...] | None:
        if self.nodes >= NODE_LIMIT:
            return None
        self.nodes += 1
        to_spare = np.minimum(room @ self._out, room @ self._into) - (count - 1)
        fits = (self._use[cycles] <= room).all(axis=1) & (self._crossings[cycles] <= to_spare).all(axis=1)
        cycles = cycles[fits]
        if not cycles.size:
            return None
        if count == 1:
            return (int(cycles[0]),)
        through = self._use[cycles].sum(axis=0)
        usable = np.where(through > 0, room, 0)
        slack = usable @ self._ports - count
        port = int(np.argmin(slack))
        if slack[port] < 0:
            return None
        choices = np.flatnonzero((self._ports[:, port] > 0) & (usable > 0))
        arc = choices[np.argmin(through[choices])]
        on_arc = cycles[self._use[cycles, arc] > 0]
        for cycle in on_arc:
            # Packings with an earlier cycle of this list have been covered; the cycle itself may come again.
            found = self._extend(cycles, room - self._use[cycle], count - 1)
            if found is not None:
                return (int(cycle), *found)
            cycles = cycles[cycles != cycle]
        if slack[port] < usable[arc]:
            return None
        without = room.copy()
        without[arc] = 0
        return self._extend(cycles, without, count)


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
