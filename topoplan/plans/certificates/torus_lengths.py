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

A path of an all-to-all is bounded by its steps. Let m(t) be the shortest route in direction t, from whatever GPU. A
path to the server c ahead in a dimension of n takes c steps ahead or n - c back, so it is at least as long as the lower
of c m(ahead) and (n - c) m(back) over all dimensions. Of what routes have beyond m, every path has at least the least
that leads into its last GPU, and then the least that leads out of its first one. A path inside a server, or to a
neighbour, is a shortest route, or it takes more steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from topoplan.errors import PlanError
from topoplan.machine.torus import Direction, Offset, Torus

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


def torus_paths_at_least(torus: Torus, gpus: int, routes: Sequence[TorusRoute]) -> int:
    """Return a lower bound of the lengths of paths from each GPU of one server to all other ranks, all together.

    Arguments are those of `torus_tree_at_least`; no route is longer than one to a neighbour with others inside servers
    before and behind it. PlanError if the routes do not join all ranks.
    """
    torus_tree_at_least(torus, gpus, [replace(route, length=0) for route in routes])  # joins all ranks
    home = (0,) * len(torus.sides)
    nearest: dict[Offset, int] = {home: 0}
    for route in routes:
        if any(route.offset):
            nearest[route.offset] = min(route.length, nearest.get(route.offset, route.length))
    length = {(route.tail, route.head, route.offset): route.length for route in routes}
    left = {(u, v, t): over - nearest[t] for (u, v, t), over in length.items()}
    last = [min(over for (_, v, _), over in left.items() if v == head) for head in range(gpus)]
    first = [min(over - last[v] for (u, v, _), over in left.items() if u == tail) for tail in range(gpus)]
    both = {one: nearest.get(torus.offset(one)) for one in torus.directions}
    steps, loops = 0, []
    for dimension, side in enumerate(torus.sides):
        ahead, back = (both[Direction(dimension, step)] for step in (1, -1))
        steps += torus.servers // side * _ring_at_least(side, ahead, back)
        loops += [side * one for one in (ahead, back) if one is not None]
        loops += [ahead + back] if ahead is not None and back is not None else []
    ends = [[one + other for other in last] for one in first]
    total = gpus * gpus * steps + torus.servers * sum(map(sum, ends)) - sum(first) - sum(last)
    # Least steps to a server nearby, and those of all ways but the shortest.
    ways = {home: (0, min(loops))}
    for direction, step in both.items():
        if step is None:
            continue
        side, around = torus.sides[direction.dimension], both[direction._replace(step=-direction.step)]
        other = [step + min(loops)] + ([(side - 1) * around] if around is not None and side > 2 else [])
        ways[torus.offset(direction)] = min(step, *other), min(other)
    for offset, (least, more) in ways.items():
        for tail, head in product(range(gpus), repeat=2):
            if any(offset) or tail != head:
                longer = more + ends[tail][head]
                near = min(length.get((tail, head, offset), longer), longer)
                total += max(0, near - least - ends[tail][head])
    return total


def _ring_at_least(side: int, ahead: int | None, back: int | None) -> int:
    """Return the sum over all servers of a ring of the steps there: c ahead or side - c back, whichever is shorter."""
    if ahead is None or back is None:
        only = back if ahead is None else ahead
        assert only is not None, "the routes join all ranks"
        return only * side * (side - 1) // 2
    turn = side - 1 if not ahead else side * back // (ahead + back)
    rest = side - 1 - turn
    return ahead * turn * (turn + 1) // 2 + back * rest * (rest + 1) // 2


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
