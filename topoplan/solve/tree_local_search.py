"""Improve trees of limited height by local search: moves of subtrees, and choice of the ranks that feed others.

A move makes rank v, with its subtree, a child of rank u. If the subtree fits under the limit, every rank that is
cheaper below v than at its place, and fits there, joins v: a rank is opened at a dear place because others pay for it.
If it does not fit, the children of v that would be too deep move to their cheapest other place: a rank is closed.
All N^2 moves of many trees are evaluated at once by two matrix products for each tree.

Height 2 is uncapacitated facility location: feeding v from the root costs a fee and opens v. Ranks are opened
greedily (Minoux 1978: old savings serve as bounds), then opened, closed or swapped (Resende and Werneck 2007) while
it helps.

Sums of whole numbers below 2^53 are exact in float64, so every machine finds the same trees. Products are made in
blocks of 64, below the size from which OpenBLAS divides them between threads (2^18 multiplications), which costs
more here.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

import numpy as np
from numpy.typing import NDArray

from topoplan.plans.minimum_trees import UNREACHABLE
from topoplan.solve.search_control import RandomStream

MATMUL_BLOCK = 64


def blocked_product(left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``left @ right`` for stacks of matrices of whole numbers whose sums stay below 2^53."""
    (_, n, k), m = left.shape, right.shape[2]
    if n * k * m <= MATMUL_BLOCK**3:
        return np.asarray(left @ right)
    found = np.zeros((len(left), n, m))
    for top in range(0, n, MATMUL_BLOCK):
        rows = slice(top, top + MATMUL_BLOCK)
        for middle in range(0, k, MATMUL_BLOCK):
            inner = slice(middle, middle + MATMUL_BLOCK)
            part = np.ascontiguousarray(left[:, rows, inner])
            for start in range(0, m, MATMUL_BLOCK):
                columns = slice(start, start + MATMUL_BLOCK)
                found[:, rows, columns] += part @ np.ascontiguousarray(right[:, inner, columns])
    return found


Costs = NDArray[np.float64]
"""(N, N): whole numbers, ``cost[u, v]`` of the arc from u to v, very large if it is missing and on the diagonal."""

Trees = NDArray[np.int64]
"""(trees, N): the parent of every rank; the root's is itself."""

MOVE_WORK = 1 << 31
"""Multiplications for one tree after which its search ends."""

_MOVE_NOISE = 1 << 16
_TILT = 4
"""Cost of a random move, at most, in mean arcs of the tree."""


@dataclass(frozen=True, slots=True)
class TreeAncestry:
    """Ancestors and depths of the ranks of several trees.

    ``above[t, a, v]`` holds if a is v or lies on v's path to the root. ``depth`` and ``below``, of shape (trees, N),
    are edges to the root and to the deepest leaf below.
    """

    above: NDArray[np.bool_]
    depth: NDArray[np.int64]
    below: NDArray[np.int64]


def ancestry_of(parent: Trees) -> TreeAncestry:
    """Return ancestors and depths of every rank.

    >>> shape = ancestry_of(np.array([[0, 0, 1]]))
    >>> shape.depth.tolist(), shape.below.tolist()
    ([[0, 1, 2]], [[2, 1, 0]])
    """
    count, size = parent.shape
    above = np.zeros((count, size, size), dtype=bool)
    trees, ranks = np.arange(count)[:, None], np.arange(size)
    at = np.broadcast_to(ranks, parent.shape)
    while True:
        above[trees, at, ranks] = True
        higher = parent[trees, at]
        if np.array_equal(higher, at):
            break
        at = higher
    depth = above.sum(axis=1) - 1
    below = np.where(above, depth[:, None, :], 0).max(axis=2) - depth
    return TreeAncestry(above, depth, below)


def arc_costs(cost: Costs, parent: Trees) -> Costs:
    """(trees, N): cost of the arc into every rank, 0 for the root."""
    ranks = np.arange(len(cost))
    return np.where(parent == ranks, 0, cost[parent, ranks])


def improve_by_moves(cost: Costs, parent: Trees, height: int) -> Trees:
    """Return trees of at most ``height`` edges, none dearer than before, that no move improves.

    See `Costs`; any sum of N of them is below 2^53. A search may end earlier, after `MOVE_WORK`.

    >>> cost = np.array([[99.0, 5, 9, 9], [9, 99, 1, 1], [9, 1, 99, 1], [9, 1, 1, 99]])
    >>> improve_by_moves(cost, np.array([[0, 0, 0, 0]]), 2).tolist()
    [[0, 0, 1, 1]]
    """
    size = len(cost)
    best = parent.copy()
    active = np.arange(len(parent))
    for _ in range(1 + MOVE_WORK // size**3):
        if not active.size:
            break
        improved, moved = _after_best_moves(cost, best[active], height, None)
        best[active] = improved
        active = active[moved]
    return best


def perturbed(cost: Costs, parent: Trees, height: int, stream: RandomStream) -> Trees:
    """Return each tree after one random move, if possible one that is not much dearer."""
    return _after_best_moves(cost, parent, height, stream)[0]


def _after_best_moves(
    cost: Costs, parent: Trees, height: int, stream: RandomStream | None
) -> tuple[Trees, NDArray[np.bool_]]:
    """Return the trees after the best move of each, or with a stream after a random one, and whether each has moved."""
    count, size = parent.shape
    trees, ranks = np.arange(count), np.arange(size)
    shape = ancestry_of(parent)
    current = arc_costs(cost, parent)
    outside = ~shape.above
    # Most edges below a child of each rank.
    room = height - 1 - shape.depth
    fits = shape.below[:, :, None] <= room[:, None, :]
    fits_deeper = shape.below[:, :, None] < room[:, None, :]
    # Savings of w below v, for each w that may then be below u's child v.
    saves = np.maximum(current[:, None, :] - cost, 0)
    joins = outside & fits_deeper
    saved = blocked_product(saves, joins.astype(np.float64))
    # The cheapest other parent of w if its own is closed, and the extra cost.
    free = np.take_along_axis(outside, parent[:, :, None], axis=1) & fits
    elsewhere = np.where(free, cost.T, np.inf)
    other = elsewhere.argmin(axis=2)
    dearer = np.minimum(elsewhere.min(axis=2), float(1 << 42)) - current
    child = (parent[:, None, :] == ranks[:, None]) & (shape.depth > 0)[:, None, :]
    lost = blocked_product(np.where(child, dearer[:, None, :], 0), (~fits_deeper).astype(np.float64))
    gain = np.where(fits, saved, -lost) + current[:, :, None] - cost.T
    gain[~(outside & (room >= 0)[:, None, :])] = -np.inf
    if stream is None:
        least = 0.0
    else:
        least = -float(1 << 39)
        noise = stream.whole(gain.size, _MOVE_NOISE).reshape(gain.shape)
        mean = current.sum(axis=1) // size + 1
        gain = gain + np.where(gain > least, noise * (_TILT * mean)[:, None, None] // _MOVE_NOISE, 0)
        gain[trees[:, None], ranks, parent] = -np.inf
    chosen = gain.reshape(count, -1).argmax(axis=1)
    v, u = np.divmod(chosen, size)
    moved = gain[trees, v, u] > least
    joining = fits[trees, v, u][:, None] & joins[trees, :, u] & (saves[trees, v] > 0)
    leaving = ~fits[trees, v, u][:, None] & child[trees, v] & ~fits_deeper[trees, :, u]
    changed = np.where(joining, v[:, None], np.where(leaving, other, parent))
    changed[trees, v] = u
    return np.where(moved[:, None], changed, parent), moved


GREEDY_FROM = 48
"""Ranks from which ranks are opened by old values; below, all trees open their best rank at once."""

SWAP_WORK = 1 << 29
"""Multiplications for one tree after which its search ends."""

_UNREACHABLE_COST = float(UNREACHABLE)


def two_level_trees(cost: Costs, roots: NDArray[np.int64]) -> Trees:
    """Return a cheap tree of height at most 2 for every root, of shape (trees, N).

    See `Costs`, with `UNREACHABLE` for a missing arc. Missing arcs are used only from roots without a tree of height 2.

    >>> cost = np.array([[99.0, 5, 9, 9], [9, 99, 1, 1], [9, 1, 99, 1], [9, 1, 1, 99]])
    >>> two_level_trees(cost, np.array([0, 2])).tolist()
    [[0, 0, 1, 1], [2, 2, 2, 2]]
    """
    opened = opened_ranks(cost, roots, cost[roots])
    return np.where(opened, roots[:, None], cheapest_open(cost, opened))


def opened_ranks(cost: Costs, roots: NDArray[np.int64], fees: Costs) -> NDArray[np.bool_]:
    """Choose the ranks to feed at a fee, so that fees and the cheapest arcs from fed ranks to the others cost little.

    Roots are fed without a fee; a rank with the fee `UNREACHABLE` is never opened. ``fees`` and the result have shape
    (trees, N).
    """
    size = len(cost)
    serve = cost.copy()
    np.fill_diagonal(serve, 0)
    trees = np.arange(len(roots))
    fees = np.where(fees < _UNREACHABLE_COST, fees, np.inf)
    fees[trees, roots] = 0
    opened = np.zeros((len(roots), size), dtype=bool)
    opened[trees, roots] = True
    if size >= GREEDY_FROM:
        for root, fee, mask in zip(roots.tolist(), fees, opened, strict=True):
            _open_greedily(serve, fee, mask, serve[root])
    active, work = trees, 0
    while active.size and work <= SWAP_WORK:
        now = opened[active]
        work += int(now.sum(axis=1).max()) * size * size
        moved = _open_close_or_swap(serve, fees[active], now, roots[active])
        opened[active] = now
        active = active[moved]
    return opened


def cheapest_open(cost: Costs, opened: NDArray[np.bool_]) -> Trees:
    """(trees, N): for every rank the other open rank with the cheapest arc to it, the lowest among equals."""
    return np.asarray(np.where(opened[:, :, None], cost, np.inf).argmin(axis=1))


def _open_greedily(serve: Costs, fee: Costs, opened: NDArray[np.bool_], served: Costs) -> None:
    """Open ranks of one tree, in place, the largest saving first, as long as one saves more than its fee."""
    savings = np.maximum(served - serve, 0).sum(axis=1) - fee
    queue = [(-saving, v) for v, saving in enumerate(savings.tolist()) if saving > 0]
    heapify(queue)
    while queue:
        _, v = queue[0]
        saving = float(np.maximum(served - serve[v], 0).sum() - fee[v])
        if saving <= 0:
            heappop(queue)
        elif len(queue) > 1 and (-saving, v) > min(queue[1:3]):
            heapreplace(queue, (-saving, v))
        else:
            opened[v] = True
            served = np.minimum(served, serve[v])
            heappop(queue)


def _open_close_or_swap(
    serve: Costs, fee: Costs, opened: NDArray[np.bool_], roots: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Open, close or swap where it saves most in every tree, in place; return whether each tree has changed.

    The root 0 serves the others at 9 each; 1 (open, fee 5) and 2 (fee 2) serve each other and rank 3 at 1 each.
    Now 1 serves itself at 0, 2 and 3 at 1: the ``nearest``. Without it each pays 9: a ``spread`` of 9, 8 and 8.
    Opening 2 saves 1 at 2 itself, less the fee: -1. Closing 1 gives its fee back, less all spreads: 5 - 25 = -20.
    Both at once: children of 1 move to 2 if that is nearer than 9, so only 1 itself pays ``more``, namely 1:
    -1 + (5 - 1) = 3, which is the difference of the fees.
    """
    count, size = opened.shape
    trees = np.arange(count)
    places = np.flatnonzero(opened.any(axis=0))
    served = np.where(opened[:, places, None], serve[places], np.inf)
    first = served.argmin(axis=1)
    nearest = np.take_along_axis(served, first[:, None, :], axis=1)
    np.put_along_axis(served, first[:, None, :], np.inf, axis=1)
    spread = np.minimum(served.min(axis=1, keepdims=True), 2 * _UNREACHABLE_COST) - nearest
    away = serve - nearest
    opening = np.maximum(-away, 0).sum(axis=2) - fee
    opening[opened] = -np.inf
    # The last row opens nothing, the last column closes nothing.
    opening = np.concatenate([opening, np.zeros((count, 1))], axis=1)
    # Extra cost of w if its rank closes while v opens, beyond its saving by v.
    more = np.concatenate([np.minimum(np.maximum(away, 0), spread), spread], axis=1)
    owner = (first[:, :, None] == np.arange(len(places))).astype(np.float64)
    refund = np.where(opened, fee, -np.inf)
    refund[trees, roots] = -np.inf
    closing = refund[:, None, places] - blocked_product(more, owner)
    gain = opening[:, :, None] + np.concatenate([closing, np.zeros((count, size + 1, 1))], axis=2)
    flat = gain.reshape(count, -1)
    chosen = flat.argmax(axis=1)
    moved = flat[trees, chosen] > 0
    v, r = np.divmod(chosen, len(places) + 1)
    shut = moved & (r < len(places))
    opened[trees[shut], places[r[shut]]] = False
    made = moved & (v < size)
    opened[trees[made], v[made]] = True
    return np.asarray(moved)
