"""Length of the cheapest forest that one byte of a collective can use when every link has a length.

It turns any lengths into a bound (`topoplan.plans.certificates.certificate.Lengths`): distances between ranks over any
routes (`topoplan.machine.routing`; Dijkstra 1959), then the shortest spanning arborescences (Chu-Liu 1965, Edmonds
1967), in integers of any size. Devices at distance zero from each other both ways are contracted: a server whose inner
links have no length counts as a single vertex.

Beyond `MOST_VERTICES` vertices the sum of the distances from the nearest other rank replaces the length of an
arborescence: it is never longer, so the bound holds, and it is equal if all ranks are equivalent.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from fractions import Fraction
from operator import add, mul

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import PlanError
from topoplan.machine.fabric import Fabric

MOST_VERTICES = 512
"""Ranks, after contraction, beyond which a forest's length is bounded from below instead of computed."""

_WORD = 1 << 61
"""Sums up to this are computed in machine words, larger ones in Python integers."""

ArcLengths = dict[int, dict[int, int]]
Table = NDArray[np.int64] | NDArray[np.object_]


def forest_length(fabric: Fabric, length: Sequence[int], collective: str, root: int | None) -> Fraction:
    """Return the length of the cheapest forest of a collective on a fabric whose links have lengths, zero or more.

    PlanError if a rank does not reach another.

    >>> import topoplan
    >>> fabric = Fabric(topoplan.load("dgx-2"), ("nvlink",))
    >>> forest_length(fabric, [int(link.dst == "nvswitch0") for link in fabric.links], "allreduce", None)
    Fraction(30, 1)
    """
    if collective == "alltoall":
        ones = ((1,) * fabric.size,) * fabric.size
        return exchange_length(fabric, length, ones) / fabric.size
    part, arcs = contracted_graph(fabric, length)
    where = sorted({part[rank] for rank in range(fabric.size)})
    place = {vertex: number for number, vertex in enumerate(where)}
    counts = [0] * len(where)
    for rank in range(fabric.size):
        counts[place[part[rank]]] += 1
    if len(where) == 1:
        return Fraction(0)
    if len(where) > MOST_VERTICES:
        return _forest_at_least(arcs, where, counts, collective, None if root is None else place[part[root]])
    table = [distances(arcs, start, where) for start in where]
    # A broadcast or reduce may lack a path between two ranks: such an arc costs more than any tree.
    no_arc = (max(map(max, table)) + 1) * 2 * len(where)
    for start, row in zip(where, table, strict=True):
        if -1 in row and collective not in ("broadcast", "reduce"):
            ranks = [part.index(where[row.index(-1)]), part.index(start)]
            raise PlanError(
                f"rank {ranks[1]} does not reach rank {ranks[0]} on the plan's channels", rank=ranks[1]
            )
        row[:] = [no_arc if reach < 0 else reach for reach in row]
    found = cheapest_forest(table, collective, None if root is None else place[part[root]], counts)
    if found >= no_arc:
        raise PlanError(f"no tree of this {collective} spans all ranks on the plan's channels")
    return found


def exchange_length(fabric: Fabric, length: Sequence[int], demand: Sequence[Sequence[int]]) -> Fraction:
    """Return the sum over all pairs of ranks of their distance times the demand, from row to column.

    PlanError if a rank does not reach one that it sends to.

    >>> import topoplan
    >>> fabric = Fabric(topoplan.load("v100x4"), ("nvlink",))
    >>> exchange_length(fabric, [1] * len(fabric.links), [[1] * 4] * 4)
    Fraction(12, 1)
    """
    part, arcs = contracted_graph(fabric, length)
    total = 0
    wanted: dict[int, dict[int, int]] = {}
    for source, row in enumerate(demand):
        sent = wanted.setdefault(part[source], {})
        for destination, amount in enumerate(row):
            if amount and part[destination] != part[source]:
                sent[part[destination]] = sent.get(part[destination], 0) + amount
    for start, sent in wanted.items():
        for end, reach in zip(sent, distances(arcs, start, list(sent)), strict=True):
            if reach < 0:
                ranks = [part.index(start), part.index(end)]
                raise PlanError(f"rank {ranks[0]} does not reach rank {ranks[1]} on the plan's channels")
            total += reach * sent[end]
    return Fraction(total)


def contracted_graph(fabric: Fabric, length: Sequence[int]) -> tuple[list[int], ArcLengths]:
    """Return the component of every state of the graph of routes, and the shortest links between components."""
    part = zero_length_components(fabric, length)
    arcs: ArcLengths = {}
    graph = fabric.route_graph
    for (src, dst), link in zip(graph.ends, graph.links, strict=True):
        a, b, y = part[src], part[dst], length[link]
        if a != b:
            known = arcs.setdefault(a, {})
            known[b] = min(y, known.get(b, y))
    return part, arcs


def _forest_at_least(
    arcs: ArcLengths, where: Sequence[int], counts: Sequence[int], collective: str, root: int | None
) -> Fraction:
    """Return a lower bound of forests: every vertex but the root is entered from, or left to, the nearest other one."""
    backwards: ArcLengths = {}
    for src, row in arcs.items():
        for dst, y in row.items():
            backwards.setdefault(dst, {})[src] = y
    entered, left = _nearest(arcs, where), _nearest(backwards, where)
    if collective == "broadcast":
        return Fraction(sum(entered) - entered[checked_root(root)])
    if collective == "reduce":
        return Fraction(sum(left) - left[checked_root(root)])
    if collective == "allreduce":
        return Fraction(sum(entered) + sum(left) - max(map(add, entered, left)))
    near = entered if collective == "allgather" else left
    return sum(near) - Fraction(sum(map(mul, near, counts)), sum(counts))


def _nearest(arcs: ArcLengths, where: Sequence[int]) -> list[int]:
    """Return every vertex's distance from the nearest other one of a set, by one search with two sources per node."""
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


def distances(arcs: ArcLengths, start: int, ends: Sequence[int]) -> list[int]:
    """Return the distances from one vertex to some, -1 if unreachable."""
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


def zero_length_components(fabric: Fabric, length: Sequence[int]) -> list[int]:
    """Return for every state of the graph of routes the first one that is at distance zero both ways.

    Strongly connected components by two depth-first searches (Kosaraju 1978).
    """
    graph = fabric.route_graph
    leaving: list[list[int]] = [[] for _ in graph.nodes]
    entering: list[list[int]] = [[] for _ in graph.nodes]
    for (src, dst), link in zip(graph.ends, graph.links, strict=True):
        if length[link] == 0:
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


def cheapest_forest(
    distance: Sequence[Sequence[int]], collective: str, root: int | None, counts: Sequence[int] | None = None
) -> Fraction:
    """Return the length of the cheapest forest of one byte of the buffer, from the (N, N) distances.

    Broadcast: the cheapest arborescence from the root. Reduce: the same on the transposed table. Allgather and
    reduce-scatter: the mean over all roots, since every rank owns 1/N of the buffer. Allreduce: the best root's
    reduce tree and broadcast tree together. ``counts`` are the ranks that each vertex represents; None means one each.
    """
    size = len(distance)
    down = _table(distance)
    up: Table = down.T.copy()
    if collective == "broadcast":
        return Fraction(arborescence_of(down, checked_root(root)))
    if collective == "reduce":
        return Fraction(arborescence_of(up, checked_root(root)))
    if collective in ("allgather", "reduce_scatter"):
        weights = [1] * size if counts is None else list(counts)
        table = down if collective == "allgather" else up
        return Fraction(
            sum(arborescence_of(table, rank) * weight for rank, weight in enumerate(weights)), sum(weights)
        )
    least: int | None = None
    lowest = [_at_least(down, rank) + _at_least(up, rank) for rank in range(size)]
    for rank in sorted(range(size), key=lambda rank: (lowest[rank], rank)):
        if least is not None and lowest[rank] >= least:
            break
        both = arborescence_of(down, rank) + arborescence_of(up, rank)
        least = both if least is None else min(least, both)
    assert least is not None, "a fabric has ranks"
    return Fraction(least)


def _table(distance: Sequence[Sequence[int]]) -> Table:
    largest = max((max(row) for row in distance), default=0)
    fits = largest * (len(distance) + 1) < _WORD
    return np.array(distance, dtype=np.int64 if fits else object)


def _at_least(distance: Table, root: int) -> int:
    """Return a lower bound of arborescences: every vertex but the root is entered once, over its cheapest arc."""
    size = len(distance)
    if size == 1:
        return 0
    apart = distance.copy()
    np.fill_diagonal(apart, apart.max() + 1)
    cheapest = apart.min(axis=0)
    return int(cheapest.sum() - cheapest[root])


def arborescence_of(distance: Table, root: int) -> int:
    """Return the length by Chu-Liu and Edmonds on rows of an array: cycles of cheapest arcs become one vertex."""
    size = len(distance)
    if size == 1:
        return 0
    star = int(distance[root].sum() - distance[root, root])
    if star == _at_least(distance, root):
        return star
    # Prices only fall, so this marks missing arcs; a sum of all prices could exceed machine words.
    far = distance.max() + 1
    entering = distance.T.copy()
    np.fill_diagonal(entering, far)
    vertex = list(range(size))
    settled = [False] * size
    settled[root] = True
    total = 0
    for start in range(size):
        path = [vertex[start]]
        while not settled[path[-1]]:
            head = path[-1]
            tail = int(np.argmin(entering[head]))
            price = int(entering[head, tail])
            total += price
            entering[head] = np.where(entering[head] < far, entering[head] - price, far)
            if tail not in path:
                path.append(tail)
                continue
            # The last vertices of the path form a cycle of length zero: they become the first of them.
            cycle = path[path.index(tail) :]
            path = path[: path.index(tail) + 1]
            entering[tail] = entering[cycle].min(axis=0)
            entering[:, tail] = entering[:, cycle].min(axis=1)
            entering[tail, cycle] = far
            entering[:, cycle[1:]] = far
            vertex = [tail if v in cycle else v for v in vertex]
        for v in path:
            settled[v] = True
    return total


def checked_root(root: int | None) -> int:
    """Return the root rank of a broadcast or reduce; PlanError if it is None."""
    if root is None:
        raise PlanError("broadcast and reduce need a root rank")
    return root
