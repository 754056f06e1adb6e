"""The cheapest forest of a collective on a table of distances: shortest spanning arborescences of some or all roots.

Every vertex takes its cheapest entering arc; cycles are contracted (Chu-Liu 1965, Edmonds 1967), in rows of an array.
Whole numbers of any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import PlanError

_WORD = 1 << 61
"""Sums up to here are computed in machine words, larger ones in Python integers."""


def cheapest_forest(
    distance: Sequence[Sequence[int]], collective: str, root: int | None, counts: Sequence[int] | None = None
) -> Fraction:
    """Length of the cheapest forest that one byte of the buffer can use.

    Broadcast: the cheapest arborescence from the root. Reduce: the same on the transposed table. Allgather and
    reduce-scatter: the mean over all roots, since every rank owns 1/N of the buffer. Allreduce: the best root's
    reduce tree and broadcast tree together.

    Parameters
    ----------
    distance : N x N int, zero or more
    counts : sequence of int or None
        How many ranks each vertex stands for; one each for None.
    """
    size = len(distance)
    down = _table(distance)
    up: Table = down.T.copy()
    if collective == "broadcast":
        return Fraction(_arborescence(down, known_root(root)))
    if collective == "reduce":
        return Fraction(_arborescence(up, known_root(root)))
    if collective in ("allgather", "reduce_scatter"):
        weights = [1] * size if counts is None else list(counts)
        table = down if collective == "allgather" else up
        return Fraction(
            sum(_arborescence(table, rank) * weight for rank, weight in enumerate(weights)), sum(weights)
        )
    least: int | None = None
    lowest = [_at_least(down, rank) + _at_least(up, rank) for rank in range(size)]
    for rank in sorted(range(size), key=lambda rank: (lowest[rank], rank)):
        if least is not None and lowest[rank] >= least:
            break
        both = _arborescence(down, rank) + _arborescence(up, rank)
        least = both if least is None else min(least, both)
    assert least is not None, "there is a rank"
    return Fraction(least)


def arborescence_length(distance: Sequence[Sequence[int]], root: int) -> int:
    """Length of the shortest spanning arborescence from ``root``, by contraction.

    Parameters
    ----------
    distance : N x N int, zero or more
        ``distance[u][v]`` is the length of the arc from u to v.

    Examples
    --------
    >>> arborescence_length([[0, 5, 5], [9, 0, 1], [9, 1, 0]], 0)
    6
    """
    return _arborescence(_table(distance), root)


Table = NDArray[np.int64] | NDArray[np.object_]


def _table(distance: Sequence[Sequence[int]]) -> Table:
    largest = max((max(row) for row in distance), default=0)
    fits = largest * (len(distance) + 1) < _WORD
    return np.array(distance, dtype=np.int64 if fits else object)


def _at_least(distance: Table, root: int) -> int:
    """Every vertex but the root is entered once: no arborescence is shorter than the sum of the cheapest arcs."""
    size = len(distance)
    if size == 1:
        return 0
    apart = distance.copy()
    np.fill_diagonal(apart, apart.max() + 1)
    cheapest = apart.min(axis=0)
    return int(cheapest.sum() - cheapest[root])


def _arborescence(distance: Table, root: int) -> int:
    """Chu-Liu and Edmonds in rows of an array: each vertex takes its cheapest arc, cycles become one vertex."""
    size = len(distance)
    if size == 1:
        return 0
    star = int(distance[root].sum() - distance[root, root])
    if star == _at_least(distance, root):
        return star
    # Prices only fall, so this marks what is no arc; a sum of all prices could leave the machine words.
    far = distance.max() + 1
    entering = distance.T.copy()
    np.fill_diagonal(entering, far)
    vertex = list(range(size))
    settled = [False] * size
    settled[root] = True
    total = 0
    for start in range(size):
        path = [vertex[start]]
        while not settled[path[-1]]:
            head = path[-1]
            tail = int(np.argmin(entering[head]))
            price = int(entering[head, tail])
            total += price
            entering[head] = np.where(entering[head] < far, entering[head] - price, far)
            if tail not in path:
                path.append(tail)
                continue
            # The last vertices of the path form a cycle of length zero: they become the first of them.
            cycle = path[path.index(tail) :]
            path = path[: path.index(tail) + 1]
            entering[tail] = entering[cycle].min(axis=0)
            entering[:, tail] = entering[:, cycle].min(axis=1)
            entering[tail, cycle] = far
            entering[:, cycle[1:]] = far
            vertex = [tail if v in cycle else v for v in vertex]
        for v in path:
            settled[v] = True
    return total


def known_root(root: int | None) -> int:
    """The root rank of a broadcast or reduce; PlanError where there is none."""
    if root is None:
        raise PlanError("broadcast and reduce need a root rank")
    return root
