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
        size = cost.shape[0]
        self._cost: list[list[int]] = cost.tolist()
        level, hung = _stars(cost)
        # Few entries are read one by one, which a view answers without making numbers of all others.
        self._below: list[memoryview[int]] = [level.data]
        self._hung: list[memoryview[int]] = [hung.data]
        for _ in range(1, height):
            previous = level
            level, hung = _next_level(cost, previous)
            self._below.append(level.data)
            self._hung.append(hung.data)
            if np.array_equal(level, previous):
                break
        everything = (1 << size) - 1
        roots = np.arange(size)
        self.costs: NDArray[np.int64] = level[everything ^ (1 << roots), roots]

    def tree(self, root: int) -> tuple[tuple[int, int], ...]:
        """Edges (parent, child) of a cheapest tree from ``root``, in ascending order."""
        return tuple(sorted((up, child) for child, up in enumerate(self.parents(root)) if up >= 0))

    def parents(self, root: int) -> list[int]:
        """The same tree as the parent of every rank, -1 for the root."""
        found = [-1] * len(self._cost)
        everything = (1 << len(self._cost)) - 1
        pending = [(root, everything ^ (1 << root), len(self._below) - 1)]
        while pending:
            v, rest, place = pending.pop()
            while rest:
                block, child = self._first_block(v, rest, place)
                found[child] = v
                rest ^= block
                if place:
                    pending.append((child, block ^ (1 << child), place - 1))
        return found

    def _first_block(self, v: int, rest: int, place: int) -> tuple[int, int]:
        """The ranks below v that hang with the lowest of ``rest``, and which of them is v's child."""
        low = rest & -rest
        if not place:
            return low, low.bit_length() - 1
        here, hung, deeper = self._below[place], self._hung[place], self._below[place - 1]
        wanted = here[rest, v]
        others = rest ^ low
        sub = others
        while hung[sub | low, v] + here[others ^ sub, v] != wanted:
            assert sub, "the table holds the cost of some block"
            sub = (sub - 1) & others
        block = sub | low
        wanted = hung[block, v]
        for child, reach in enumerate(self._cost[v]):
            if block >> child & 1 and reach + deeper[block ^ (1 << child), child] == wanted:
                return block, child
        raise AssertionError("the table holds the cost of some child")


def _stars(cost: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The table of trees of height 1, a row for each set of ranks, and that of single ranks below a parent."""
    size = cost.shape[0]
    hung = np.full((1 << size, size), UNREACHABLE, dtype=np.int64)
    level = np.zeros_like(hung)
    for child in range(size):
        hung[1 << child] = cost[:, child]
        level[1 << child : 2 << child] = level[: 1 << child] + cost[:, child]
    return np.minimum(level, UNREACHABLE), np.minimum(hung, UNREACHABLE)


def _next_level(
    cost: NDArray[np.int64], below: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The tables of trees of the next height, and of ranks hung below a parent by one edge."""
    rests, holds, groups = _subsets(cost.shape[0])
    hanging = np.where(holds, below.take(rests), UNREACHABLE)
    by_parent = (cost.T[:, :, None] + hanging[:, None, :]).min(axis=0)
    hung = np.minimum(by_parent, UNREACHABLE).T.copy()
    level = np.zeros_like(below)
    for sets, blocks, others in groups:
        divided = hung.take(blocks, axis=0)
        divided += level.take(others, axis=0)
        level[sets] = np.minimum.reduce(divided)
    return np.minimum(level, UNREACHABLE, out=level), hung


@lru_cache(maxsize=LARGEST + 1)
def _subsets(
    size: int,
) -> tuple[
    NDArray[np.int64],
    NDArray[np.bool_],
    list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]],
]:
    """Where tables hold the sets of ranks without a member, which sets have it, and how sets are divided.

    Returns
    -------
    rests, holds : (size, sets) arrays
        For each rank c and set A: place of c's row for A - c in a table, and whether A holds c.
    groups : list of (sets, blocks, others)
        For each number of members the sets, (count,), and as (ways, count) their blocks with the lowest rank, and what
        these leave over.
    """
    sets, ranks = np.arange(1 << size), np.arange(size)[:, None]
    holds = (sets >> ranks & 1) == 1
    rests = (sets & ~(1 << ranks)) * size + ranks
    groups = []
    for members in range(1, size + 1):
        chosen = sets[holds.sum(axis=0) == members]
        lowest = chosen & -chosen
        left = [chosen ^ lowest]
        while left[-1].any():
            left.append((left[-1] - 1) & left[0])
        kept = np.stack(left)
        groups.append((chosen, kept | lowest, kept ^ left[0]))
    return rests, holds, groups
