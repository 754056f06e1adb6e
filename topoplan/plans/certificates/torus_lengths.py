"""Prove a bound for a torus of servers from lengths of its classes of links.

Every tree edge joins two GPUs of one server or of neighbours, and a translation maps it to one of server 0. So the
edges are *routes* (u, v, t): from GPU u of a server to GPU v of the server at offset t, at least as long as the
shortest path D(u, v, t). The bound is the dual of shortest arborescences (Edmonds 1967), a packing of rooted cuts:
every set S of a nested family has a number z(S) >= 0, and no D is less than the sum of z over the sets that the route
enters. A tree enters each set without its root, so it is at least as long as the sum of z over these.

The sets are found as in Edmonds' algorithm, for all roots at once. At first every rank is a set. Each set's number is
the shortest way into it, which is taken off all routes that enter it; sets that routes of length 0 join in cycles then
become one. By symmetry a set is a coset of a subgroup of the translations: GPUs of a server, each at an offset, and the
offsets of the cycles among them. The number of cosets is a determinant (Gross and Tucker, Topological Graph Theory,
1987, section 2.5, of voltage graphs). The cost grows with the GPUs of a server, not with the servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from topoplan.errors import PlanError
from topoplan.machine.torus import Offset, Torus

Row = list[int]


@dataclass(frozen=True, slots=True)
class TorusRoute:
    """A shortest route from a GPU of a server to one of the server at an offset."""

    tail: int
    head: int
    offset: Offset
    length: int


def torus_tree_at_least(torus: Torus, gpus: int, routes: Sequence[TorusRoute]) -> list[int]:
    """Return a lower bound of the length of a tree from each GPU of a server to all ranks.

    ``gpus`` are those of a server; lengths are 0 or more. PlanError if the routes do not join all ranks.
    """
    sets = [_Set({v: [0] * len(torus.sides)}, _Lattice(torus.sides)) for v in range(gpus)]
    own, total, left = [0] * gpus, 0, list(routes)
    while any(len(one.offsets) < gpus or one.cycles.index > 1 for one in sets):
        left = [route for route in left if _enters(sets, route)]
        nearest: dict[int, int] = {}
        for route in left:
            head = id(sets[route.head])
            nearest[head] = min(route.length, nearest.get(head, route.length))
        for one in {id(one): one for one in sets}.values():
            if id(one) not in nearest:
                raise PlanError(
                    "the lengths prove nothing: a rank does not reach another on the plan's channels"
                )
            total += nearest[id(one)] * one.cycles.index
        own = [known + nearest[id(one)] for known, one in zip(own, sets, strict=True)]
        left = [replace(route, length=route.length - nearest[id(sets[route.head])]) for route in left]
        sets = _joined(sets, [route for route in left if not route.length])
    return [total - known for known in own]


@dataclass(slots=True)
class _Set:
    """GPUs of a server that routes join in cycles, each with its offset from the first, and the cycles' offsets."""

    offsets: dict[int, Row]
    cycles: _Lattice


@dataclass(slots=True)
class _Lattice:
    """The whole vectors that some offsets generate together with the sides, as a triangular basis."""

    sides: tuple[int, ...]
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.rows:
            many = len(self.sides)
            self.rows = [
                [side if column == row else 0 for column in range(many)]
                for row, side in enumerate(self.sides)
            ]

    def add(self, vector: Sequence[int]) -> None:
        """Add a generator: Euclid's algorithm in each column."""
        rest = list(vector)
        for column, row in enumerate(self.rows):
            while rest[column]:
                times = row[column] // rest[column]
                row, rest = rest, [a - times * b for a, b in zip(row, rest, strict=True)]
            self.rows[column] = row if row[column] > 0 else [-one for one in row]

    def has(self, vector: Sequence[int]) -> bool:
        """Return whether a vector is one of the lattice."""
        rest = list(vector)
        for column, row in enumerate(self.rows):
            times, left = divmod(rest[column], row[column])
            if left:
                return False
            rest = [a - times * b for a, b in zip(rest, row, strict=True)]
        return True

    @property
    def index(self) -> int:
        """The number of cosets in all whole vectors: the determinant."""
        found = 1
        for column, row in enumerate(self.rows):
            found *= row[column]
        return found


def _apart(sets: Sequence[_Set], route: TorusRoute) -> Row:
    """Return the offset of the set of a route's head from that of its tail, both at their first GPU."""
    here, there = sets[route.tail].offsets[route.tail], sets[route.head].offsets[route.head]
    return [a + t - b for a, t, b in zip(here, route.offset, there, strict=True)]


def _enters(sets: Sequence[_Set], route: TorusRoute) -> bool:
    """Return whether a route leads from one set to another: of other GPUs, or another coset."""
    return sets[route.tail] is not sets[route.head] or not sets[route.tail].cycles.has(_apart(sets, route))


def _joined(sets: Sequence[_Set], routes: Sequence[TorusRoute]) -> list[_Set]:
    """Return the set of every GPU after routes that lie on cycles have joined sets.

    A cycle of some offset, repeated, is one of offset 0, as the torus is finite.
    """
    reached = {id(one): {id(one)} for one in sets}
    for _ in reached:
        for route in routes:
            first, last = id(sets[route.tail]), id(sets[route.head])
            for ends in reached.values():
                if first in ends:
                    ends.add(last)
    made = list(sets)
    for route in routes:
        first, last = id(sets[route.tail]), id(sets[route.head])
        if first not in reached[last]:
            continue
        tail, head, apart = made[route.tail], made[route.head], _apart(made, route)
        if tail is head:
            tail.cycles.add(apart)
            continue
        for row in head.cycles.rows:
            tail.cycles.add(row)
        for v, offset in head.offsets.items():
            tail.offsets[v] = [a + b for a, b in zip(offset, apart, strict=True)]
            made[v] = tail
    return made
