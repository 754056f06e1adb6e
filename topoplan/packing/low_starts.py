"""Trees of limited height to start a search from: by hops, by paths, from the unlimited optimum, and in two parts.

By hops: every rank hangs below the cheapest rank that is nearer to the root. By paths: the cheapest path of limited
length to every rank (Bellman, Ford), nearest ranks first. From the unlimited optimum: its tree is walked from the
root, and where a rank would come too deep the low path to it is spliced in (as Khuller, Raghavachari, Young 1995
balance spanning with shortest-path trees). In two parts: a tree of one edge less over a few ranks, and all others hang
below the cheapest of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from topoplan.packing.exact_product import product
from topoplan.packing.facilities import cheapest_open, opened_ranks
from topoplan.packing.hop_limited import UNREACHABLE
from topoplan.packing.rehanging import Costs, Trees, arc_costs, shape_of

TURNS = 3
"""Times that the ranks of the upper part are chosen anew, by what the last upper part charges for them."""

TreeFinder = Callable[[Costs, int, int], NDArray[np.int64]]
"""Parents of a tree, from costs, root and height."""


def hops(cost: NDArray[np.int64] | Costs, roots: NDArray[np.int64]) -> NDArray[np.int64]:
    """(roots, N) int64: fewest arcs from each root to every rank; N where no path leads.

    Examples
    --------
    >>> none = UNREACHABLE
    >>> hops(np.array([[none, 1, none], [none, none, 1], [none, none, none]]), np.array([0, 1])).tolist()
    [[0, 1, 2], [3, 0, 1]]
    """
    size = len(cost)
    arcs = (cost < UNREACHABLE).astype(np.float64)
    found = np.full((len(roots), size), size, dtype=np.int64)
    found[np.arange(len(roots)), roots] = 0
    for step in range(1, size):
        latest = (found == step - 1).astype(np.float64)
        fresh = (product(latest[None], arcs[None])[0] > 0) & (found == size)
        if not fresh.any():
            break
        found[fresh] = step
    return found


def trees_by_hops(cost: Costs, distance: NDArray[np.int64]) -> Trees:
    """Every rank below the cheapest of those nearer to the root: as low as a tree can be.

    Parameters
    ----------
    cost : (N, N) float64
    distance : (trees, N) int64
        Hops from each tree's root, which reach every rank.
    """
    nearer = distance[:, :, None] < distance[:, None, :]
    parent = np.where(nearer, cost, np.inf).argmin(axis=1)
    return np.where(distance == 0, np.arange(len(cost)), parent)


def tree_by_paths(cost: Costs, root: int, height: int) -> list[int]:
    """Cheapest paths of at most ``height`` arcs to the ranks, nearest first, each as far as it lowers a rank.

    Returns
    -------
    list of N int
        Parents; the root's is itself.

    Examples
    --------
    A detour of two arcs is taken for rank 1, but not where it makes the path to rank 2 too long.

    >>> cost = np.array([[99.0, 9, 99, 1], [99, 99, 1, 99], [99, 99, 99, 99], [99, 1, 99, 99]])
    >>> tree_by_paths(cost, 0, 3), tree_by_paths(cost, 0, 2)
    ([0, 3, 1, 0], [0, 0, 1, 0])
    """
    size = len(cost)
    length = np.full(size, np.inf)
    length[root] = 0
    arcs = np.zeros(size, dtype=np.int64)
    before = np.full(size, root)
    # For every number of arcs, the rank before the last on the cheapest path of at most so many.
    tables = [before.tolist()]
    for step in range(1, height + 1):
        through = length[:, None] + cost
        shortest = through.min(axis=0)
        closer = shortest < length
        if not closer.any():
            break
        before = np.where(closer, through.argmin(axis=0), before)
        length = np.where(closer, shortest, length)
        arcs[closer] = step
        tables.append(before.tolist())
    forest = _Forest(size, root)
    for v in np.lexsort((arcs, length)).tolist():
        path = [v]
        for table in tables[int(arcs[v]) : 0 : -1]:
            path.append(table[path[-1]])
        forest.hang(path[::-1])
    return forest.parent


def spliced(parent: Sequence[int], low: Sequence[int], height: int) -> list[int]:
    """A tree that follows ``parent`` as far as the height allows, and the paths of ``low`` beyond.

    Parameters
    ----------
    parent, low : sequences of int
        Two trees from one root, whose parent is itself; ``low`` is at most ``height`` edges high.
    height : int

    Examples
    --------
    >>> spliced([0, 0, 1, 2, 3], [0, 0, 0, 0, 3], 2)
    [0, 0, 1, 0, 3]
    """
    size = len(parent)
    root = next(v for v, up in enumerate(parent) if up == v)
    children: list[list[int]] = [[] for _ in range(size)]
    for v, up in enumerate(parent):
        if v != root:
            children[up].append(v)
    forest = _Forest(size, root)
    pending = children[root][::-1]
    while pending:
        v = pending.pop()
        pending += children[v][::-1]
        if forest.depth[parent[v]] < height:
            forest.hang([parent[v], v])
        else:
            path = [v]
            while path[-1] != root:
                path.append(low[path[-1]])
            forest.hang(path[::-1])
    return forest.parent


class _Forest:
    """A tree in the making, with an upper limit on the depth of every rank in it."""

    def __init__(self, size: int, root: int) -> None:
        self.parent = [root] * size
        self.depth = [size] * size
        self.depth[root] = 0

    def hang(self, path: Sequence[int]) -> None:
        """Follow a path from a rank of the tree wherever that makes a rank less deep."""
        for up, v in pairwise(path):
            if self.depth[up] + 1 < self.depth[v]:
                self.depth[v] = self.depth[up] + 1
                self.parent[v] = up


def two_part_tree(cost: Costs, root: int, height: int, finder: TreeFinder) -> NDArray[np.int64]:
    """A tree of ``height - 1`` over a few ranks, and every other rank below the cheapest of these.

    Parameters
    ----------
    cost : (N, N) float64
    root, height : int
        Where every rank can be reached in two hops, and 3 or more.
    finder : callable
        Finds the upper tree.

    Returns
    -------
    (N,) int64
    """
    at_root = np.array([root])
    fees = cost[at_root]
    best, least = np.full(len(cost), root), np.inf
    for _ in range(TURNS):
        opened = opened_ranks(cost, at_root, fees)
        upper = np.flatnonzero(opened[0])
        place = int(np.searchsorted(upper, root))
        found = finder(cost[np.ix_(upper, upper)], place, height - 1)
        tree = cheapest_open(cost, opened)[0]
        tree[upper] = upper[found]
        total = float(arc_costs(cost, tree[None]).sum())
        if total < least:
            best, least = tree, total
        inner = upper[shape_of(found[None]).depth[0] < height - 1]
        fees = cost[inner].min(axis=0)[None]
    return best
