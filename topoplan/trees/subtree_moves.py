"""Local search for cheap trees of limited height: a rank moves below another, and takes others in or lets them go.

One move hangs rank v, with all that is below it, under rank u. Where its subtree still fits under the limit, every
rank that is cheaper below v than where it is now, and fits there, joins v: so a rank is opened at a dear place
because that pays for others. Where it does not fit, the children of v that would hang too deep leave for their
cheapest other place: so a rank is closed. All N^2 moves of many trees are weighed at once, by two products of
matrices for each tree; sums of whole numbers below 2^53 are exact in float64, so every machine finds the same trees.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topoplan.simplex.random_numbers import Stream
from topoplan.trees.blocked_matmul import product

Costs = NDArray[np.float64]
"""(N, N): whole numbers, ``cost[u, v]`` of the arc from u to v, very large where there is none and on the diagonal."""

Trees = NDArray[np.int64]
"""(trees, N): the parent of every rank; the root's is itself."""

WORK = 1 << 31
"""Numbers multiplied for one tree after which its search ends where it is."""

_NOISE = 1 << 16
_TILT = 4
"""How dear a random move may be, in mean arcs of the tree."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Where the ranks of several trees hang.

    Parameters
    ----------
    above : (trees, N, N) bool
        ``above[t, a, v]`` where a is v or lies on v's path to the root.
    depth, below : (trees, N) int64
        Edges to the root, and to the deepest leaf below.
    """

    above: NDArray[np.bool_]
    depth: NDArray[np.int64]
    below: NDArray[np.int64]


def shape_of(parent: Trees) -> Shape:
    """Ancestors and depths of every rank.

    Examples
    --------
    >>> shape = shape_of(np.array([[0, 0, 1]]))
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
    return Shape(above, depth, below)


def arc_costs(cost: Costs, parent: Trees) -> Costs:
    """(trees, N): cost of the arc into every rank, 0 for the root."""
    ranks = np.arange(len(cost))
    return np.where(parent == ranks, 0, cost[parent, ranks])


def rehang(cost: Costs, parent: Trees, height: int) -> Trees:
    """Improve trees until no move helps, or `WORK` is done.

    Parameters
    ----------
    cost : (N, N) float64
        See `Costs`; any sum of N of them is below 2^53.
    parent : (trees, N) int64
        Trees of at most this height.
    height : int

    Returns
    -------
    (trees, N) int64
        Trees of at most this height, none dearer than it was.

    Examples
    --------
    >>> cost = np.array([[99.0, 5, 9, 9], [9, 99, 1, 1], [9, 1, 99, 1], [9, 1, 1, 99]])
    >>> rehang(cost, np.array([[0, 0, 0, 0]]), 2).tolist()
    [[0, 0, 1, 1]]
    """
    size = len(cost)
    best = parent.copy()
    active = np.arange(len(parent))
    for _ in range(1 + WORK // size**3):
        if not active.size:
            break
        improved, moved = _moved(cost, best[active], height, None)
        best[active] = improved
        active = active[moved]
    return best


def shaken(cost: Costs, parent: Trees, height: int, stream: Stream) -> Trees:
    """Each tree after one random move, one that is not much dearer where there are such."""
    return _moved(cost, parent, height, stream)[0]


def _moved(cost: Costs, parent: Trees, height: int, stream: Stream | None) -> tuple[Trees, NDArray[np.bool_]]:
    """The trees after the best move of each, or with a stream after a random one; True where there was one."""
    count, size = parent.shape
    trees, ranks = np.arange(count), np.arange(size)
    shape = shape_of(parent)
    current = arc_costs(cost, parent)
    outside = ~shape.above
    # How many edges may hang below a child of each rank.
    room = height - 1 - shape.depth
    fits = shape.below[:, :, None] <= room[:, None, :]
    fits_deeper = shape.below[:, :, None] < room[:, None, :]
    # What w saves below v, for those w that may then hang below u's child v.
    saves = np.maximum(current[:, None, :] - cost, 0)
    joins = outside & fits_deeper
    saved = product(saves, joins.astype(np.float64))
    # Where w hangs cheapest if its parent is closed, and how much dearer that is.
    free = np.take_along_axis(outside, parent[:, :, None], axis=1) & fits
    elsewhere = np.where(free, cost.T, np.inf)
    other = elsewhere.argmin(axis=2)
    dearer = np.minimum(elsewhere.min(axis=2), float(1 << 42)) - current
    child = (parent[:, None, :] == ranks[:, None]) & (shape.depth > 0)[:, None, :]
    lost = product(np.where(child, dearer[:, None, :], 0), (~fits_deeper).astype(np.float64))
    gain = np.where(fits, saved, -lost) + current[:, :, None] - cost.T
    gain[~(outside & (room >= 0)[:, None, :])] = -np.inf
    if stream is None:
        least = 0.0
    else:
        least = -float(1 << 39)
        noise = stream.whole(gain.size, _NOISE).reshape(gain.shape)
        mean = current.sum(axis=1) // size + 1
        gain = gain + np.where(gain > least, noise * (_TILT * mean)[:, None, None] // _NOISE, 0)
        gain[trees[:, None], ranks, parent] = -np.inf
    chosen = gain.reshape(count, -1).argmax(axis=1)
    v, u = np.divmod(chosen, size)
    moved = gain[trees, v, u] > least
    joining = fits[trees, v, u][:, None] & joins[trees, :, u] & (saves[trees, v] > 0)
    leaving = ~fits[trees, v, u][:, None] & child[trees, v] & ~fits_deeper[trees, :, u]
    changed = np.where(joining, v[:, None], np.where(leaving, other, parent))
    changed[trees, v] = u
    return np.where(moved[:, None], changed, parent), moved
