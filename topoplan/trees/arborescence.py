"""The cheapest tree of any height: arborescences (Chu-Liu 1965, Edmonds 1967), and undirected trees (Prim 1957).

For dense cost matrices of a few dozen ranks. In an arborescence every vertex takes its cheapest entering arc; while
these close a cycle, the cycle is contracted and the costs of the arcs that enter it are lowered by what they would
replace. Plain Python on small matrices is several times faster here than arrays, and a hundred times faster than a
general graph library.
"""

from __future__ import annotations

from collections.abc import Sequence


def cheapest_arborescence(cost: Sequence[Sequence[float]], root: int) -> list[int]:
    """Parent of every vertex in a cheapest spanning arborescence; the root's is -1.

    Parameters
    ----------
    cost : N x N numbers
        ``cost[v][u]`` of the arc from u to v: one row per *head*. The diagonal is ignored; ``inf`` or a very
        large number where there is no arc.
    root : int

    Returns
    -------
    list of N int
        Ties go to the tail of lowest number.

    Examples
    --------
    >>> cheapest_arborescence([[0, 9, 9], [5, 0, 1], [5, 1, 0]], 0)
    [-1, 0, 1]
    """
    size = len(cost)
    parent = [-1] * size
    for v in range(size):
        if v != root:
            row = cost[v]
            best = min(row[:v] + row[v + 1 :]) if isinstance(row, list) else min(_without(row, v))
            u = row.index(best)
            parent[v] = u if u != v else row.index(best, v + 1)
    cycle = _find_cycle(parent, root)
    if not cycle:
        return parent
    return _expand(cost, root, parent, cycle)


def _without(row: Sequence[float], v: int) -> list[float]:
    return [value for u, value in enumerate(row) if u != v]


def _find_cycle(parent: list[int], root: int) -> list[int]:
    """Vertices of one cycle of the parent pointers; empty if there is none."""
    state = [0] * len(parent)
    state[root] = -1
    for start in range(len(parent)):
        v = start
        while not state[v]:
            state[v] = start + 1
            v = parent[v]
        if state[v] == start + 1:
            cycle = [v]
            u = parent[v]
            while u != v:
                cycle.append(u)
                u = parent[u]
            return cycle
        v = start
        while state[v] == start + 1:
            state[v] = -1
            v = parent[v]
    return []


def _expand(cost: Sequence[Sequence[float]], root: int, parent: list[int], cycle: list[int]) -> list[int]:
    """Contract one cycle, solve the smaller graph, and open the cycle where the solution enters it."""
    size = len(cost)
    inside = set(cycle)
    outside = [v for v in range(size) if v not in inside]
    last = len(outside)
    entry: list[int] = []
    entering: list[float] = []
    for u in outside:
        best, at = None, -1
        for v in cycle:
            slack = cost[v][u] - cost[v][parent[v]]
            if best is None or slack < best:
                best, at = slack, v
        assert best is not None, "a cycle has vertices"
        entering.append(best)
        entry.append(at)
    exits = [min(cycle, key=lambda u, v=v: (cost[v][u], u)) for v in outside]  # type: ignore[misc]
    smaller: list[list[float]] = []
    for v, out in zip(outside, exits, strict=True):
        row = cost[v]
        smaller.append([row[u] for u in outside] + [row[out]])
    smaller.append([*entering, 0.0])
    solved = cheapest_arborescence(smaller, outside.index(root))
    result = list(parent)
    for position, v in enumerate(outside):
        up = solved[position]
        result[v] = -1 if up < 0 else exits[position] if up == last else outside[up]
    way_in = solved[last]
    result[entry[way_in]] = outside[way_in]
    return result


def cheapest_spanning_tree(cost: Sequence[Sequence[float]]) -> list[int]:
    """Parent of every vertex in a cheapest spanning tree, as seen from vertex 0; that of vertex 0 is -1.

    Parameters
    ----------
    cost : N x N numbers, symmetric
        ``inf`` where there is no edge; the diagonal is ignored.

    Examples
    --------
    >>> cheapest_spanning_tree([[0, 1, 4], [1, 0, 2], [4, 2, 0]])
    [-1, 0, 1]
    """
    parent = [0] * len(cost)
    parent[0] = -1
    best = list(cost[0])
    outside = list(range(1, len(cost)))
    while outside:
        v = min(outside, key=best.__getitem__)
        outside.remove(v)
        row = cost[v]
        for u in outside:
            if row[u] < best[u]:
                best[u] = row[u]
                parent[u] = v
    return parent
