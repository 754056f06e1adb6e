"""Length of the cheapest forest that one byte of a collective can use when every link has a length.

This is what makes a bound of any lengths (`topoplan.plans.certificate`): distances between ranks over any devices
(Dijkstra 1959), then the shortest spanning arborescences (Chu-Liu 1965, Edmonds 1967). Devices that are at distance
zero from each other both ways are one: a server whose inner links have no length counts as a single vertex.

Beyond `MOST_VERTICES` vertices the sum of the distances from the nearest other rank stands for the length of an
arborescence: it is never longer, so the bound holds, and it is equal where all ranks are alike.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction
from operator import add, mul

from topoplan.errors import PlanError
from topoplan.fabric.fabric import Fabric
from topoplan.plans.cheapest_forest import cheapest_forest, known_root

MOST_VERTICES = 512
"""Ranks, those at distance zero being one, beyond which a forest's length is bounded from below, not computed."""

Arcs = dict[int, dict[int, int]]


def forest_length(fabric: Fabric, length: Sequence[int], collective: str, root: int | None) -> Fraction:
    """Length of the cheapest forest of a collective on a fabric whose links have lengths.

    Parameters
    ----------
    length : sequence of int, one per link
        Zero or more.
    collective : str
    root : int or None
        Root rank of a broadcast or reduce.

    Raises
    ------
    PlanError
        A rank does not reach another.

    Examples
    --------
    >>> import topoplan
    >>> fabric = Fabric(topoplan.load("dgx-2"), ("nvlink",))
    >>> forest_length(fabric, [int(link.dst == "nvswitch0") for link in fabric.links], "allreduce", None)
    Fraction(30, 1)
    """
    part = zero_parts(fabric, length)
    arcs: Arcs = {}
    for (src, dst), y in zip(fabric.ends, length, strict=True):
        a, b = part[src], part[dst]
        if a != b:
            known = arcs.setdefault(a, {})
            known[b] = min(y, known.get(b, y))
    where = sorted({part[rank] for rank in range(fabric.size)})
    place = {vertex: number for number, vertex in enumerate(where)}
    counts = [0] * len(where)
    for rank in range(fabric.size):
        counts[place[part[rank]]] += 1
    if len(where) == 1:
        return Fraction(0)
    if len(where) > MOST_VERTICES:
        return _forest_at_least(arcs, where, counts, collective, None if root is None else place[part[root]])
    table = [_distances(arcs, start, where) for start in where]
    # A broadcast or reduce may do without a way between two ranks: such an arc is dearer than any tree.
    dear = (sum(length) + 1) * len(where)
    for start, row in zip(where, table, strict=True):
        if -1 in row and collective not in ("broadcast", "reduce"):
            ranks = [part.index(where[row.index(-1)]), part.index(start)]
            raise PlanError(
                f"rank {ranks[1]} does not reach rank {ranks[0]} on the plan's channels", rank=ranks[1]
            )
        row[:] = [dear if reach < 0 else reach for reach in row]
    found = cheapest_forest(table, collective, None if root is None else place[part[root]], counts)
    if found >= dear:
        raise PlanError(f"no tree of this {collective} spans all ranks on the plan's channels")
    return found


def _forest_at_least(
    arcs: Arcs, where: Sequence[int], counts: Sequence[int], collective: str, root: int | None
) -> Fraction:
    """A length that no forest undercuts: every vertex but the root is entered from the nearest one, or left to it."""
    backwards: Arcs = {}
    for src, row in arcs.items():
        for dst, y in row.items():
            backwards.setdefault(dst, {})[src] = y
    entered, left = _nearest(arcs, where), _nearest(backwards, where)
    if collective == "broadcast":
        return Fraction(sum(entered) - entered[known_root(root)])
    if collective == "reduce":
        return Fraction(sum(left) - left[known_root(root)])
    if collective == "allreduce":
        return Fraction(sum(entered) + sum(left) - max(map(add, entered, left)))
    near = entered if collective == "allgather" else left
    return sum(near) - Fraction(sum(map(mul, near, counts)), sum(counts))


def _nearest(arcs: Arcs, where: Sequence[int]) -> list[int]:
    """Distance of every vertex from the nearest other one of a set: one search that keeps two sources per node."""
    known: dict[int, dict[int, int]] = {}
    heap = [(0, start, start) for start in where]
    heapq.heapify(heap)
    while heap:
        reach, node, source = heapq.heappop(heap)
        sources = known.setdefault(node, {})
        if source in sources or len(sources) == 2:
            continue
        sources[source] = reach
        for dst, y in arcs.get(node, {}).items():
            if len(known.get(dst, ())) < 2:
                heapq.heappush(heap, (reach + y, dst, source))
    near = []
    for start in where:
        others = [reach for source, reach in known[start].items() if source != start]
        if not others:
            raise PlanError("a rank reaches no other, or is reached by none, on the plan's channels")
        near.append(min(others))
    return near


def _distances(arcs: Arcs, start: int, ends: Sequence[int]) -> list[int]:
    """Distance from one vertex to some, -1 where there is no way."""
    best = {start: 0}
    heap = [(0, start)]
    while heap:
        reach, node = heapq.heappop(heap)
        if reach > best[node]:
            continue
        for dst, y in arcs.get(node, {}).items():
            if dst not in best or reach + y < best[dst]:
                best[dst] = reach + y
                heapq.heappush(heap, (reach + y, dst))
    return [best.get(end, -1) for end in ends]


def zero_parts(fabric: Fabric, length: Sequence[int]) -> list[int]:
    """For every node the first node that it reaches, and is reached from, over links of length zero.

    Strongly connected components by two depth-first searches (Kosaraju 1978).
    """
    leaving: list[list[int]] = [[] for _ in fabric.nodes]
    entering: list[list[int]] = [[] for _ in fabric.nodes]
    for (src, dst), y in zip(fabric.ends, length, strict=True):
        if y == 0:
            leaving[src].append(dst)
            entering[dst].append(src)
    seen = [False] * len(leaving)
    finished: list[int] = []
    for start in range(len(leaving)):
        path = [(start, 0)] if not seen[start] else []
        seen[start] = True
        while path:
            node, at = path.pop()
            while at < len(leaving[node]) and seen[leaving[node][at]]:
                at += 1
            if at == len(leaving[node]):
                finished.append(node)
                continue
            path += [(node, at + 1), (leaving[node][at], 0)]
            seen[leaving[node][at]] = True
    part = [-1] * len(leaving)
    for start in reversed(finished):
        if part[start] >= 0:
            continue
        members = [start]
        part[start] = start
        for node in members:
            for before in entering[node]:
                if part[before] < 0:
                    part[before] = start
                    members.append(before)
        first = min(members)
        for node in members:
            part[node] = first
    return part
