"""The cheapest spanning arborescence of limited height, exactly, for all roots at once.

Dynamic programming over subsets of ranks. With ``tree[h][v, S]`` the cost of the cheapest tree of height at most h
that hangs the ranks S below v, and ``hung[h][v, A]`` = min over c in A of ``cost[v, c] + tree[h - 1][c, A - c]`` the
cost of hanging A below v by one edge,

    tree[h][v, S] = min over A ⊆ S that hold the lowest rank of S of hung[h][v, A] + tree[h][v, S - A].

There are 3^N pairs (S, A), so this is for small N; it answers in milliseconds for N = 8. Limited height makes the
problem NP-hard, which is why larger machines need another road.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

LARGEST = 9
"""Most ranks for which the table is worth its memory and time."""

UNREACHABLE = np.int64(1) << 40
"""Cost of an arc that does not exist; real costs stay below it (callers scale them)."""


class HopLimitedTrees:
    """Tables of cheapest trees for one cost matrix.

    Parameters
    ----------
    cost : (N, N) int64
        ``cost[u, v]`` of the arc from u to v, zero or more; `UNREACHABLE` where there is none.
    height : int
        Most edges on a path from the root.

    Examples
    --------
    A path 0-1-2 with a dear shortcut: with height 1 the shortcut must be taken.

    >>> cost = np.array([[0, 1, 9], [1, 0, 1], [9, 1, 0]])
    >>> HopLimitedTrees(cost, 1).costs.tolist(), HopLimitedTrees(cost, 2).costs.tolist()
    ([10, 2, 10], [2, 2, 2])
    >>> HopLimitedTrees(cost, 2).tree(0)
    ((0, 1), (1, 2))
    """

    def __init__(self, cost: NDArray[np.int64], height: int) -> None:
        self._cost = cost
        size = cost.shape[0]
        level = _empty_level(size)
        # Trees are read from the tables entry by entry, which lists answer faster.
        self._below: list[list[list[int]]] = [level.tolist()]
        self._hung: list[list[list[int]]] = [[]]
        for _ in range(height):
            previous = level
            level, hung = _next_level(cost, previous)
            self._below.append(level.tolist())
            self._hung.append(hung.tolist())
            if np.array_equal(level, previous):
                break
        everything = (1 << size) - 1
        roots = np.arange(size)
        self.costs: NDArray[np.int64] = level[roots, everything ^ (1 << roots)]

    def tree(self, root: int) -> tuple[tuple[int, int], ...]:
        """Edges (parent, child) of a cheapest tree from ``root``, in ascending order."""
        everything = (1 << self._cost.shape[0]) - 1
        edges: list[tuple[int, int]] = []
        pending = [(root, everything ^ (1 << root), len(self._below) - 1)]
        while pending:
            v, rest, h = pending.pop()
            while rest:
                block, child = self._first_block(v, rest, h)
                edges.append((v, child))
                pending.append((child, block ^ (1 << child), h - 1))
                rest ^= block
        return tuple(sorted(edges))

    def parents(self, root: int) -> list[int]:
        """The same tree as the parent of every rank, -1 for the root."""
        found = [-1] * self._cost.shape[0]
        for parent, child in self.tree(root):
            found[child] = parent
        return found

    def _first_block(self, v: int, rest: int, h: int) -> tuple[int, int]:
        """The ranks below v that hang with the lowest of ``rest``, and which of them is v's child."""
        here, hung = self._below[h][v], self._hung[h][v]
        low = rest & -rest
        others = rest ^ low
        sub = others
        while hung[sub | low] + here[others ^ sub] != here[rest]:
            assert sub, "the table holds the cost of some block"
            sub = (sub - 1) & others
        block, deeper = sub | low, self._below[h - 1]
        for child, reach in enumerate(self._cost[v].tolist()):
            if block >> child & 1 and reach + deeper[child][block ^ (1 << child)] == hung[block]:
                return block, child
        raise AssertionError("the table holds the cost of some child")


def _empty_level(size: int) -> NDArray[np.int64]:
    level = np.full((size, 1 << size), UNREACHABLE, dtype=np.int64)
    level[:, 0] = 0
    return level


def _next_level(
    cost: NDArray[np.int64], below: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The next table of trees, and that of ranks hung below a parent by one edge."""
    size = cost.shape[0]
    sets = np.arange(1 << size)
    hung = np.full((size, 1 << size), UNREACHABLE, dtype=np.int64)
    for child in range(size):
        holding = sets[(sets >> child & 1) == 1]
        options = cost[:, child, None] + below[child, holding ^ (1 << child)][None, :]
        hung[:, holding] = np.minimum(hung[:, holding], options)
    level = _empty_level(size)
    for which, starts, blocks, rests in _subset_pairs(size):
        level[:, which] = np.minimum.reduceat(hung[:, blocks] + level[:, rests], starts, axis=1)
        np.minimum(level, UNREACHABLE, out=level)
    return level, hung


@lru_cache(maxsize=LARGEST + 1)
def _subset_pairs(
    size: int,
) -> tuple[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]], ...]:
    """For each number of members: the sets, where each one's run starts, its blocks, and what they leave over."""
    groups: list[tuple[list[int], list[int], list[int], list[int]]] = [
        ([], [], [], []) for _ in range(size + 1)
    ]
    for members in range(1, 1 << size):
        which, starts, blocks, rests = groups[members.bit_count()]
        which.append(members)
        starts.append(len(blocks))
        low = members & -members
        others = members ^ low
        sub = others
        while True:
            blocks.append(sub | low)
            rests.append(others ^ sub)
            if not sub:
                break
            sub = (sub - 1) & others
    return tuple((np.array(a), np.array(b), np.array(c), np.array(d)) for a, b, c, d in groups[1:])
