"""Cheap trees of height 2: which ranks does the root feed, so that they feed the others?

This is uncapacitated facility location. Feeding v from the root costs a fee and opens v; every other rank hangs below
the cheapest open one, and the root is one of them. Ranks are opened greedily, the largest saving first; savings only
shrink as more are open, so old values serve as bounds (Minoux 1978). Then opening one rank, closing one, or both at
once are weighed together until none of these helps (swaps as Resende and Werneck 2007 weigh them). Sums of whole
numbers below 2^53 are exact in float64.
"""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace

import numpy as np
from numpy.typing import NDArray

from topoplan.trees.blocked_matmul import product
from topoplan.trees.hop_constrained_exact import UNREACHABLE
from topoplan.trees.subtree_moves import Costs, Trees

GREEDY_FROM = 48
"""Ranks from which opening goes by old values; below, all trees open their best rank at once."""

WORK = 1 << 29
"""Numbers multiplied for one tree after which its search ends where it is."""

_FAR = float(UNREACHABLE)


def two_level_trees(cost: Costs, roots: NDArray[np.int64]) -> Trees:
    """A cheap tree of height at most 2 for every root.

    Parameters
    ----------
    cost : (N, N) float64
        See `topoplan.trees.subtree_moves.Costs`; `UNREACHABLE` where there is no arc.
    roots : (trees,) int64

    Returns
    -------
    (trees, N) int64
        Arcs that do not exist are used only from roots that have no tree of height 2.

    Examples
    --------
    >>> cost = np.array([[99.0, 5, 9, 9], [9, 99, 1, 1], [9, 1, 99, 1], [9, 1, 1, 99]])
    >>> two_level_trees(cost, np.array([0, 2])).tolist()
    [[0, 0, 1, 1], [2, 2, 2, 2]]
    """
    opened = opened_ranks(cost, roots, cost[roots])
    return np.where(opened, roots[:, None], cheapest_open(cost, opened))


def opened_ranks(cost: Costs, roots: NDArray[np.int64], fees: Costs) -> NDArray[np.bool_]:
    """Which ranks to feed at a fee, so that fees and the cheapest arcs from fed ranks to the others cost little.

    Parameters
    ----------
    cost : (N, N) float64
    roots : (trees,) int64
        Fed at no fee.
    fees : (trees, N) float64
        Fee of every other rank; a rank of `UNREACHABLE` fee is never opened.

    Returns
    -------
    (trees, N) bool
    """
    size = len(cost)
    serve = cost.copy()
    np.fill_diagonal(serve, 0)
    trees = np.arange(len(roots))
    fees = np.where(fees < _FAR, fees, np.inf)
    fees[trees, roots] = 0
    opened = np.zeros((len(roots), size), dtype=bool)
    opened[trees, roots] = True
    if size >= GREEDY_FROM:
        for root, fee, mask in zip(roots.tolist(), fees, opened, strict=True):
            _open_greedily(serve, fee, mask, serve[root])
    active, work = trees, 0
    while active.size and work <= WORK:
        now = opened[active]
        work += int(now.sum(axis=1).max()) * size * size
        moved = _swap(serve, fees[active], now, roots[active])
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


def _swap(serve: Costs, fee: Costs, opened: NDArray[np.bool_], roots: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Open, close or swap where it saves most in every tree, in place; True where something was done.

    The root 0 serves the others at 9 each; 1 (open, fee 5) and 2 (fee 2) serve each other and rank 3 at 1 each.
    Now 1 serves itself at 0, 2 and 3 at 1: the ``nearest``. Without it each pays 9: a ``spread`` of 9, 8 and 8.
    Opening 2 saves 1 at 2 itself, less the fee: -1. Closing 1 gives its fee back, less all spreads: 5 - 25 = -20.
    Both at once: those of 1 hang on 2 where that is nearer than 9, so only 1 itself pays ``more``, namely 1:
    -1 + (5 - 1) = 3, which is the difference of the fees.
    """
    count, size = opened.shape
    trees = np.arange(count)
    places = np.flatnonzero(opened.any(axis=0))
    served = np.where(opened[:, places, None], serve[places], np.inf)
    first = served.argmin(axis=1)
    nearest = np.take_along_axis(served, first[:, None, :], axis=1)
    np.put_along_axis(served, first[:, None, :], np.inf, axis=1)
    spread = np.minimum(served.min(axis=1, keepdims=True), 2 * _FAR) - nearest
    away = serve - nearest
    opening = np.maximum(-away, 0).sum(axis=2) - fee
    opening[opened] = -np.inf
    # The last row stands for opening nothing, the last column for closing nothing.
    opening = np.concatenate([opening, np.zeros((count, 1))], axis=1)
    # What w pays more if its rank closes while v opens, beyond what v saves it.
    more = np.concatenate([np.minimum(np.maximum(away, 0), spread), spread], axis=1)
    owner = (first[:, :, None] == np.arange(len(places))).astype(np.float64)
    refund = np.where(opened, fee, -np.inf)
    refund[trees, roots] = -np.inf
    closing = refund[:, None, places] - product(more, owner)
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
