"""Length of the shortest spanning arborescence: what the cheapest tree from a root costs under dual lengths."""

from __future__ import annotations


def arborescence_length(distance: list[list[int]], root: int) -> int:
    """Length of the shortest spanning arborescence from ``root`` (Chu-Liu 1965, Edmonds 1967), by contraction.

    Parameters
    ----------
    distance : N x N int, zero or more
        ``distance[u][v]`` is the length of the arc from u to v.

    Examples
    --------
    >>> arborescence_length([[0, 5, 5], [9, 0, 1], [9, 1, 0]], 0)
    6
    """
    count = len(distance)
    total = 0
    while True:
        parent = [-1] * count
        for v in range(count):
            if v != root:
                parent[v] = min((u for u in range(count) if u != v), key=lambda u: (distance[u][v], u))
                total += distance[parent[v]][v]
        group = _cycles(parent, root)
        merged = max(group) + 1
        if merged == count:
            return total
        reduced: list[list[int | None]] = [[None] * merged for _ in range(merged)]
        for u in range(count):
            for v in range(count):
                if group[u] != group[v] and v != root:
                    slack = distance[u][v] - distance[parent[v]][v]
                    known = reduced[group[u]][group[v]]
                    if known is None or slack < known:
                        reduced[group[u]][group[v]] = slack
        root = group[root]
        distance = [[0 if value is None else value for value in row] for row in reduced]
        count = merged


def _cycles(parent: list[int], root: int) -> list[int]:
    """Number the vertices so that those on one cycle of the parent pointers share a number."""
    group = [-1] * len(parent)
    state = [0] * len(parent)
    state[root] = 2
    following = 0
    for start in range(len(parent)):
        path = []
        v = start
        while state[v] == 0:
            state[v] = 1
            path.append(v)
            v = parent[v]
        if state[v] == 1:
            for u in path[path.index(v) :]:
                group[u] = following
            following += 1
        for u in path:
            state[u] = 2
    for v in range(len(parent)):
        if group[v] < 0:
            group[v] = following
            following += 1
    return group
