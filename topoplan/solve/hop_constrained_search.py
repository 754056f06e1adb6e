"""Search for cheap spanning arborescences of limited height, for more ranks than the exact tables can take.

The problem is NP-hard from height 2 on. From a few starts each tree is improved by moves (`tree_local_search`),
perturbed and improved again; the cheapest one met is the answer. A tree is found whenever one exists. If the
unlimited optimum is low enough, it is the answer. A larger limit may by chance give a slightly dearer tree.

Starts: by hops (every rank below the cheapest rank nearer to the root); by paths (cheapest paths of limited length;
Bellman, Ford); from the unlimited optimum, with the low path spliced in below the limit (as Khuller, Raghavachari,
Young 1995 balance spanning with shortest-path trees); in two parts (a tree of one edge less over a few ranks, all
others below).

Against the exact tables (2458 trees of 8 ranks, heights 2 to 5; random, sparse and metric costs, DGX-1V over NVLink
and PCIe) the mean ratio is 1.001 and the worst 1.39; 98.2 % are optimal, 96.6 % without perturbation, 99.4 % with
effort 32.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from topoplan.plans.minimum_trees import UNREACHABLE, cheapest_arborescence
from topoplan.solve.route_table import SparseCosts
from topoplan.solve.search_control import RandomStream
from topoplan.solve.tree_local_search import (
    Costs,
    Trees,
    ancestry_of,
    arc_costs,
    blocked_product,
    cheapest_open,
    improve_by_moves,
    opened_ranks,
    perturbed,
    two_level_trees,
)

STARTING_TURNS = 2
"""Choices of the ranks of an upper part."""


FEW_ROOTS = 8
"""Roots up to which hops are counted from each alone, without products of matrices."""


def hop_counts(cost: NDArray[np.int64] | Costs | SparseCosts, roots: NDArray[np.int64]) -> NDArray[np.int64]:
    """(roots, N) int64: fewest arcs from each root to every rank; N if no path exists.

    >>> none = UNREACHABLE
    >>> hop_counts(np.array([[none, 1, none], [none, none, 1], [none, none, none]]), np.array([0, 1])).tolist()
    [[0, 1, 2], [3, 0, 1]]
    """
    if isinstance(cost, SparseCosts):
        return _sparse_hop_counts(cost, roots)
    size = len(cost)
    joined = cost < UNREACHABLE
    arcs = joined.astype(np.float64) if len(roots) > FEW_ROOTS else None
    found = np.full((len(roots), size), size, dtype=np.int64)
    found[np.arange(len(roots)), roots] = 0
    for step in range(1, size):
        latest = found == step - 1
        if arcs is None:
            reached = np.array([joined[each].any(axis=0) for each in latest])
        else:
            reached = blocked_product(latest[None].astype(np.float64), arcs[None])[0] > 0
        fresh = reached & (found == size)
        if not fresh.any():
            break
        found[fresh] = step
    return found


def _sparse_hop_counts(cost: SparseCosts, roots: NDArray[np.int64]) -> NDArray[np.int64]:
    found = np.full((len(roots), cost.size), cost.size, dtype=np.int64)
    for row, root in zip(found, roots.tolist(), strict=True):
        row[root] = step = 0
        latest = row == 0
        while latest.any():
            step += 1
            reached = cost.heads[latest[cost.tails]]
            latest = np.zeros(cost.size, dtype=bool)
            latest[reached[row[reached] == cost.size]] = True
            row[latest] = step
    return found


def trees_by_hops(cost: Costs | SparseCosts, distance: NDArray[np.int64]) -> Trees:
    """Put every rank below the cheapest of the ranks nearer to the root: as low as a tree can be.

    ``distance``, of shape (trees, N), is hops from each tree's root, which reach every rank.
    """
    if isinstance(cost, SparseCosts):
        return np.stack([_sparse_tree_by_hops(cost, each) for each in distance])
    nearer = distance[:, :, None] < distance[:, None, :]
    parent = np.where(nearer, cost, np.inf).argmin(axis=1)
    return np.where(distance == 0, np.arange(len(cost)), parent)


def _sparse_tree_by_hops(cost: SparseCosts, distance: NDArray[np.int64]) -> NDArray[np.int64]:
    nearer = distance[cost.tails] < distance[cost.heads]
    tails, heads, costs = cost.tails[nearer], cost.heads[nearer], cost.costs[nearer]
    order = np.lexsort((tails, costs, heads))
    parent = np.arange(cost.size)
    # The cheapest comes last here, and is what stays.
    parent[heads[order][::-1]] = tails[order][::-1]
    return parent


def tree_by_paths(cost: Costs, root: int, height: int) -> list[int]:
    """Return parents by cheapest paths of at most ``height`` arcs, nearest ranks first; the root is its own parent.

    A path is followed as far as it lowers a rank.

    A detour of two arcs is taken for rank 1, but not if it makes the path to rank 2 too long.

    >>> cost = np.array([[99.0, 9, 99, 1], [99, 99, 1, 99], [99, 99, 99, 99], [99, 1, 99, 99]])
    >>> tree_by_paths(cost, 0, 3), tree_by_paths(cost, 0, 2)
    ([0, 3, 1, 0], [0, 0, 1, 0])
    """
    size = len(cost)
    length = np.full(size, np.inf)
    length[root] = 0
    arcs = np.zeros(size, dtype=np.int64)
    before = np.full(size, root)
    # For every number of arcs, the last but one rank of the cheapest path with at most that many.
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
        forest.attach(path[::-1])
    return forest.parent


def leaves_moved(cost: Costs, parent: Trees, height: int) -> Trees:
    """Move every leaf below the cheapest rank that is not a leaf and not too deep.

    >>> cost = np.array([[99.0, 1, 9, 9], [99, 99, 5, 2], [99, 1, 99, 7], [99, 1, 1, 99]])
    >>> leaves_moved(cost, np.array([[0, 0, 0, 1]]), 2).tolist()
    [[0, 0, 1, 1]]
    """
    shape = ancestry_of(parent)
    inner = (shape.below > 0) & (shape.depth < height)
    cheapest = np.where(inner[:, :, None], cost, np.inf).argmin(axis=1)
    return np.where(shape.below == 0, cheapest, parent)


def spliced_tree(parent: Sequence[int], low: Sequence[int], height: int) -> list[int]:
    """Return a tree that follows ``parent`` as far as the height allows, and the paths of ``low`` beyond.

    Both are trees from one root, which is its own parent; ``low`` is at most ``height`` edges high.

    >>> spliced_tree([0, 0, 1, 2, 3], [0, 0, 0, 0, 3], 2)
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
            forest.attach([parent[v], v])
        else:
            path = [v]
            while path[-1] != root:
                path.append(low[path[-1]])
            forest.attach(path[::-1])
    return forest.parent


class _Forest:
    """A tree under construction, with an upper limit on the depth of every rank in it."""

    def __init__(self, size: int, root: int) -> None:
        self.parent = [root] * size
        self.depth = [size] * size
        self.depth[root] = 0

    def attach(self, path: Sequence[int]) -> None:
        """Follow a path from a rank of the tree, and move each rank that it makes less deep."""
        for up, v in pairwise(path):
            if self.depth[up] + 1 < self.depth[v]:
                self.depth[v] = self.depth[up] + 1
                self.parent[v] = up


def two_part_tree(cost: Costs, root: int, height: int, ways: Sequence[int]) -> NDArray[np.int64]:
    """Return a tree of ``height - 1``, 2 or more, over a few ranks, and every other rank below the cheapest of these.

    The few ranks are chosen by facility location: at first the fee of a rank is the cost of a given path to it, later
    the cost of the cheapest arc to it from the last upper part.

    ``ways`` are the parents of a tree of at most ``height - 1`` edges; the root is its own parent. Missing arcs are
    never followed, but every rank must be one arc from a rank that the others lead to.
    """
    way = np.array([ways])
    fees = path_lengths(cost, way)
    best, least = way[0], np.inf
    for _ in range(STARTING_TURNS):
        opened = opened_ranks(cost, np.array([root]), fees)
        # The ranks on the paths to them belong to the upper part too.
        upper = np.flatnonzero(ancestry_of(way).above[0][:, opened[0]].any(axis=1))
        part, top = cost[np.ix_(upper, upper)], np.searchsorted(upper, [root])
        found = _search(part, top, hop_counts(part, top), height - 1, 0)[0]
        inner = np.zeros((1, len(cost)), dtype=bool)
        inner[0, upper] = True
        tree = cheapest_open(cost, inner)
        tree[0, upper] = upper[found]
        total = float(arc_costs(cost, tree).sum())
        if total < least:
            best, least = tree[0], total
        inner[0, upper[ancestry_of(found[None]).depth[0] >= height - 1]] = False
        way = np.where(inner, tree, cheapest_open(cost, inner))
        fees = arc_costs(cost, way)
    return np.asarray(best)


def path_lengths(cost: Costs, parent: Trees) -> Costs:
    """(trees, N): cost of the path from the root to every rank.

    >>> path_lengths(np.array([[99.0, 5, 9], [9, 99, 1], [9, 1, 99]]), np.array([[0, 0, 1]])).tolist()
    [[0.0, 5.0, 6.0]]
    """
    above = ancestry_of(parent).above.astype(np.float64)
    lengths: Costs = np.einsum("tv,tvw->tw", arc_costs(cost, parent), above)
    return lengths


SEARCH_EFFORT = 4
"""Perturbations of a tree unless the caller sets another number."""

SMALL_SEARCH = 128
"""Most ranks for which trees start from the unlimited optimum and are perturbed."""

BY_HOPS = -1
"""The effort of trees that put every rank below the cheapest of the ranks nearer to the root, and search no further."""

_MOVES_PER_PERTURBATION = 2
_BATCH = 1 << 19


def low_arborescences(
    cost: NDArray[np.int64] | SparseCosts, roots: Sequence[int], height: int, *, effort: int = SEARCH_EFFORT
) -> list[list[int] | None]:
    """Return parents of a cheap spanning arborescence from each root, -1 for the root; None if no tree is so low.

    ``cost[u, v]`` of the arc from u to v is 0 or more, `UNREACHABLE` if it is missing; the diagonal is ignored. Trees
    cost less than 2^39. Paths from the root have at most ``height`` edges, 1 or more. Trees are perturbed ``effort``
    times, 0 or more, or are those of `BY_HOPS`; the answer gets no dearer with more.

    The roots are searched together. A root named several times is tried several times, and may give different trees.
    """
    place = np.array(roots, dtype=np.int64)
    if isinstance(cost, SparseCosts) and (effort != BY_HOPS or height <= 2):
        cost = cost.table()
    size = len(cost)
    costs: Costs | SparseCosts
    if isinstance(cost, SparseCosts):
        costs = cost
    else:
        costs = np.array(cost, dtype=np.float64, order="C")
        np.fill_diagonal(costs, float(UNREACHABLE))
    distance = hop_counts(costs, place)
    found: list[list[int] | None] = [None] * len(roots)
    possible = np.flatnonzero(distance.max(axis=1) <= height)
    step = max(1, _BATCH // size**2)
    for start in range(0, len(possible), step):
        which = possible[start : start + step]
        if isinstance(costs, SparseCosts):
            trees = trees_by_hops(costs, distance[which])
        else:
            trees = _search(costs, place[which], distance[which], height, effort)
        for number, tree in zip(which.tolist(), trees, strict=True):
            found[number] = np.where(tree == np.arange(size), -1, tree).tolist()
    return found


def lowest_heights(cost: NDArray[np.int64] | SparseCosts, roots: Sequence[int]) -> NDArray[np.int64]:
    """(roots,) int64: the lowest height that a tree from each root can have; N if none exists."""
    found: NDArray[np.int64] = hop_counts(cost, np.array(roots, dtype=np.int64)).max(axis=1)
    return found


def _search(
    cost: Costs, roots: NDArray[np.int64], distance: NDArray[np.int64], height: int, effort: int
) -> Trees:
    stream = RandomStream(2)
    size = len(cost)
    if height == 1:
        return np.repeat(roots[:, None], size, axis=1)
    _, first, which = np.unique(roots, return_index=True, return_inverse=True)
    if effort == BY_HOPS and height > 2:
        return trees_by_hops(cost, distance[first])[which]
    starts = _starts(cost, roots[first], distance[first], height)
    best = starts[0].copy()
    least = arc_costs(cost, best).sum(axis=1)
    if size > SMALL_SEARCH:
        # Moves are expensive here: only the best start is worth them.
        for trees in starts:
            _keep_cheaper(cost, best, least, leaves_moved(cost, trees, height))
        starts = [best]
    if height > 2:
        improved = improve_by_moves(cost, np.concatenate(starts), height).reshape(len(starts), *best.shape)
        for trees in improved:
            _keep_cheaper(cost, best, least, trees)
    best, least = best[which], least[which]
    for _ in range(effort if size <= SMALL_SEARCH else 0):
        trees = best
        for _ in range(_MOVES_PER_PERTURBATION):
            trees = perturbed(cost, trees, height, stream)
        _keep_cheaper(cost, best, least, improve_by_moves(cost, trees, height))
    return best


def _keep_cheaper(cost: Costs, best: Trees, least: Costs, trees: Trees) -> None:
    """Replace, in place, trees by others that are not dearer."""
    totals = arc_costs(cost, trees).sum(axis=1)
    better = totals <= least
    best[better] = trees[better]
    least[better] = totals[better]


def _starts(cost: Costs, roots: NDArray[np.int64], distance: NDArray[np.int64], height: int) -> list[Trees]:
    """Return lists of trees to start from, each with one tree of every root."""
    if height == 2:
        return [two_level_trees(cost, roots)]
    size = len(cost)
    by_hops = trees_by_hops(cost, distance)
    by_paths = [tree_by_paths(cost, root, height) for root in roots.tolist()]
    starts = [by_hops, np.array(by_paths)]
    if size <= SMALL_SEARCH:
        by_head = cost.T.tolist()
        free = []
        for root, low in zip(roots.tolist(), by_paths, strict=True):
            parent = cheapest_arborescence(by_head, root)
            parent[root] = root
            free.append(spliced_tree(parent, low, height))
        starts.append(np.array(free))
    in_two = distance.max() <= 2
    if in_two:
        starts.append(two_level_trees(cost, roots))
    if size > SMALL_SEARCH:
        ways = [[tree_by_paths(cost, root, height - 1) for root in roots.tolist()]]
        if in_two:
            ways.append([[root] * size for root in roots.tolist()])
        for tried in ways:
            upper = [
                two_part_tree(cost, r, height, way) for r, way in zip(roots.tolist(), tried, strict=True)
            ]
            starts.append(np.array(upper))
    return starts
