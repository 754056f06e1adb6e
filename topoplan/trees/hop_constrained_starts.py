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

from topoplan.trees.blocked_matmul import product
from topoplan.trees.facility_location import cheapest_open, opened_ranks
from topoplan.trees.hop_constrained_exact import UNREACHABLE
from topoplan.trees.subtree_moves import Costs, Trees, arc_costs, shape_of

TURNS = 2
"""Times that the ranks of an upper part are chosen."""

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


def leaves_rehung(cost: Costs, parent: Trees, height: int) -> Trees:
    """The trees with every leaf below the cheapest rank that is no leaf and not too deep.

    Examples
    --------
    >>> cost = np.array([[99.0, 1, 9, 9], [99, 99, 5, 2], [99, 1, 99, 7], [99, 1, 1, 99]])
    >>> leaves_rehung(cost, np.array([[0, 0, 0, 1]]), 2).tolist()
    [[0, 0, 1, 1]]
    """
    shape = shape_of(parent)
    inner = (shape.below > 0) & (shape.depth < height)
    cheapest = np.where(inner[:, :, None], cost, np.inf).argmin(axis=1)
    return np.where(shape.below == 0, cheapest, parent)


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


def two_part_tree(
    cost: Costs, root: int, height: int, ways: Sequence[int], finder: TreeFinder
) -> NDArray[np.int64]:
    """A tree of ``height - 1`` over a few ranks, and every other rank below the cheapest of these.

    Which ranks are few is a matter of facility location: at first the fee of a rank is the cost of a given way to it,
    later that of the cheapest arc to it from the last upper part.

    Parameters
    ----------
    cost : (N, N) float64
    root, height : int
        Height 3 or more.
    ways : sequence of N int
        Parents of a tree of at most ``height - 1`` edges; the root's is itself. Arcs that do not exist are never
        followed, but every rank must be one arc from a rank that the others lead to.
    finder : callable
        Finds the upper tree.

    Returns
    -------
    (N,) int64
    """
    way = np.array([ways])
    fees = path_lengths(cost, way)
    best, least = way[0], np.inf
    for _ in range(TURNS):
        opened = opened_ranks(cost, np.array([root]), fees)
        # The ranks on the ways to them belong to the upper part too.
        upper = np.flatnonzero(shape_of(way).above[0][:, opened[0]].any(axis=1))
        found = finder(cost[np.ix_(upper, upper)], int(np.searchsorted(upper, root)), height - 1)
        inner = np.zeros((1, len(cost)), dtype=bool)
        inner[0, upper] = True
        tree = cheapest_open(cost, inner)
        tree[0, upper] = upper[found]
        total = float(arc_costs(cost, tree).sum())
        if total < least:
            best, least = tree[0], total
        inner[0, upper[shape_of(found[None]).depth[0] >= height - 1]] = False
        way = np.where(inner, tree, cheapest_open(cost, inner))
        fees = arc_costs(cost, way)
    return np.asarray(best)


def path_lengths(cost: Costs, parent: Trees) -> Costs:
    """(trees, N): cost of the path from the root to every rank.

    Examples
    --------
    >>> path_lengths(np.array([[99.0, 5, 9], [9, 99, 1], [9, 1, 99]]), np.array([[0, 0, 1]])).tolist()
    [[0.0, 5.0, 6.0]]
    """
    above = shape_of(parent).above.astype(np.float64)
    lengths: Costs = np.einsum("tv,tvw->tw", arc_costs(cost, parent), above)
    return lengths
