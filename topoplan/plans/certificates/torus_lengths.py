"""Prove a bound for a torus of servers from lengths of its classes of links.

Every tree edge joins two GPUs of one server or of neighbours, and a translation maps it to one of server 0. So the
edges are *arcs* (u, v, t): from GPU u of a server to GPU v of the server at offset t, at least as long as the shortest
route D(u, v, t). For any numbers z(v) >= 0 of the GPUs and s >= 0 of the servers with D(u, v, t) >= z(v), and
D(u, v, t) >= z(v) + s if t is not 0, a tree of N servers from rank r is at least

    N sum of z(v) - z(r) + (N - 1) s + the shortest spanning tree of what is left of D

long: it enters every GPU but r and every server but that of r once, and without its directions it is a spanning tree.
Each number is as large as the nearest arc allows, or 0; the best of the four bounds is taken.

The spanning tree is that of Kruskal (1956). The parts into which arcs of some offsets divide the torus are the cosets
of a subgroup of the translations, so their number follows from a determinant (Gross and Tucker, Topological Graph
Theory, 1987, section 2.5, of voltage graphs). The cost grows with the GPUs of a server, not with the servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product

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


def torus_tree_at_least(torus: Torus, gpus: int, arcs: Sequence[TorusRoute]) -> list[Fraction]:
    """Return a lower bound of the length of a tree from each GPU of a server to all ranks.

    ``gpus`` are those of a server. PlanError if the arcs do not join all ranks.
    """
    best = [Fraction(0)] * gpus
    for of_gpus, of_servers in product((True, False), repeat=2):
        entered, left = [0] * gpus, list(arcs)
        if of_gpus:
            entered = [min((arc.length for arc in arcs if arc.head == v), default=0) for v in range(gpus)]
            left = [_shorter(arc, entered[arc.head]) for arc in left]
        servers = 0
        if of_servers:
            servers = min((arc.length for arc in left if any(arc.offset)), default=0)
            left = [_shorter(arc, servers if any(arc.offset) else 0) for arc in left]
        total = torus.servers * sum(entered) + (torus.servers - 1) * servers
        total += _spanning_tree(torus, gpus, left)
        best = [max(known, Fraction(total - own)) for known, own in zip(best, entered, strict=True)]
    return best


def _shorter(arc: TorusRoute, less: int) -> TorusRoute:
    return TorusRoute(arc.tail, arc.head, arc.offset, arc.length - less)


@dataclass(slots=True)
class _Part:
    """GPUs of a server that arcs join, each with its offset from the first, and the offsets of their cycles."""

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

    @property
    def index(self) -> int:
        """The number of cosets in all whole vectors: the determinant."""
        found = 1
        for column, row in enumerate(self.rows):
            found *= row[column]
        return found


def _spanning_tree(torus: Torus, gpus: int, arcs: Sequence[TorusRoute]) -> int:
    """Return the length of the shortest spanning tree of all ranks, each arc in either direction."""
    part_of = [_Part({v: [0] * len(torus.sides)}, _Lattice(torus.sides)) for v in range(gpus)]
    # A part of a server stands for as many parts of the torus as its cycles have cosets.
    parts, length = gpus * torus.servers, 0
    for arc in sorted(arcs, key=lambda one: one.length):
        if parts == 1:
            break
        tail, head = part_of[arc.tail], part_of[arc.head]
        # The offset of the head's part from that of the tail, both at their first GPU.
        apart = [
            a + t - b
            for a, t, b in zip(tail.offsets[arc.tail], arc.offset, head.offsets[arc.head], strict=True)
        ]
        before = tail.cycles.index
        if tail is head:
            tail.cycles.add(apart)
        else:
            before += head.cycles.index
            for row in head.cycles.rows:
                tail.cycles.add(row)
            for v, offset in head.offsets.items():
                tail.offsets[v] = [a + b for a, b in zip(offset, apart, strict=True)]
                part_of[v] = tail
        joined = before - tail.cycles.index
        parts -= joined
        length += arc.length * joined
    if parts > 1:
        raise PlanError("the lengths prove nothing: a rank does not reach another on the plan's channels")
    return length
