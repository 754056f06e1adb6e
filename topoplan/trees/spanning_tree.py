"""The cheapest spanning tree of an undirected graph (Prim 1957), for dense cost matrices of a few dozen ranks."""

from __future__ import annotations

from collections.abc import Sequence


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
