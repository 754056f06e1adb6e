"""Cheapest trees that span some vertices and may pass others: Steiner arborescences, by all sets of others.

The vertices that must be spanned are terminals, the others inner: helpers that add and copy, switches that do so. An
arborescence over the terminals and a set of inner vertices is a cheapest spanning one (Chu-Liu 1965, Edmonds 1967), and
one of the sets is that of the cheapest Steiner arborescence (Hakimi 1971). Vertices that a swap leaves all distances
between count once, so twenty equal helpers give 21 sets and not a million.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from topoplan.trees.arborescence import cheapest_arborescence

MOST_SETS = 256
"""Sets of inner vertices that are all tried for one tree; of more, each vertex alone, all together, and none."""


def like_vertices(table: NDArray[np.int64] | NDArray[np.object_], vertices: Sequence[int]) -> list[list[int]]:
    """The vertices in classes: two are alike where swapping them leaves the table of distances as it is.

    Parameters
    ----------
    table : (V, V) numbers
    vertices : sequence of int
        Those to be divided.

    Examples
    --------
    >>> like_vertices(np.array([[0, 2, 2], [1, 0, 3], [1, 3, 0]]), [0, 1, 2])
    [[0], [1, 2]]
    """
    classes: list[list[int]] = []
    for vertex in vertices:
        for members in classes:
            if _alike(table, members[0], vertex):
                members.append(vertex)
                break
        else:
            classes.append([vertex])
    return classes


def _alike(table: NDArray[np.int64] | NDArray[np.object_], a: int, b: int) -> bool:
    others = np.ones(len(table), dtype=np.bool_)
    others[[a, b]] = False
    return bool(
        table[a, b] == table[b, a]
        and np.array_equal(table[a, others], table[b, others])
        and np.array_equal(table[others, a], table[others, b])
    )


def set_count(classes: Sequence[Sequence[int]]) -> int:
    """Number of different sets that `inner_sets` gives."""
    return prod(len(members) + 1 for members in classes)


def inner_sets(classes: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """All sets of inner vertices up to swaps of vertices that are alike, the empty one first.

    Examples
    --------
    >>> list(inner_sets([[3, 4], [7]]))
    [[], [7], [3], [3, 7], [3, 4], [3, 4, 7]]
    """
    for counts in product(*(range(len(members) + 1) for members in classes)):
        yield [vertex for members, count in zip(classes, counts, strict=True) for vertex in members[:count]]


def cheapest_steiner_tree(
    cost: NDArray[np.int64], root: int, terminals: Sequence[int], inner: Sequence[int]
) -> list[int]:
    """Parents in a cheapest arborescence from a root over the terminals, -1 for the root and for what is left out.

    Parameters
    ----------
    cost : (V, V) int64
        ``cost[u, v]`` of the arc from u to v.
    root : int
        A terminal or an inner vertex.
    terminals, inner : sequence of int
        Vertices; the root need not be among them.

    Returns
    -------
    list of V int
        Of equally cheap ones the one with the fewest inner vertices, and then the lowest that is found. Exact up to
        `MOST_SETS` sets of inner vertices.

    Examples
    --------
    A helper, vertex 3, to which three ranks are nearer than to each other:

    >>> cost = np.array([[0, 5, 5, 3], [5, 0, 5, 3], [5, 5, 0, 3], [1, 1, 1, 0]])
    >>> cheapest_steiner_tree(cost, 0, [0, 1, 2], [3])
    [-1, 3, 3, 0]
    """
    must = sorted({root, *terminals})
    classes = like_vertices(cost, [vertex for vertex in inner if vertex != root])
    if set_count(classes) <= MOST_SETS:
        sets = list(inner_sets(classes))
    else:
        every = sorted(vertex for members in classes for vertex in members)
        sets = [[], *([members[0]] for members in classes), every]
    best: tuple[int, int, list[int]] | None = None
    for chosen in sorted(sets, key=len):
        # Two levels over what is chosen are as cheap as any tree wherever only ports cost something, and low.
        for parents in (_spread(cost, root, must, chosen), _spanning(cost, root, must, chosen)):
            price = sum(int(cost[up, v]) for v, up in enumerate(parents) if up >= 0)
            if best is None or price < best[0]:
                best = (price, len(chosen), parents)
    assert best is not None, "the empty set is always tried"
    return best[2]


def _spread(cost: NDArray[np.int64], root: int, must: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The chosen vertices below the root, and every terminal below the nearest of them or the root itself."""
    parents = [-1] * len(cost)
    above = [root, *chosen]
    for vertex in must:
        if vertex != root:
            parents[vertex] = min(above, key=lambda up, v=vertex: (cost[up, v], up))  # type: ignore[misc]
    for vertex in chosen:
        if vertex in parents:
            parents[vertex] = root
    return parents


def _spanning(cost: NDArray[np.int64], root: int, must: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The cheapest arborescence over exactly these vertices, without inner leaves."""
    kept = sorted({*must, *chosen})
    found = cheapest_arborescence(cost[np.ix_(kept, kept)].T.tolist(), kept.index(root))
    parents = [-1] * len(cost)
    for place, up in enumerate(found):
        if up >= 0:
            parents[kept[place]] = kept[up]
    loose = set(chosen) - set(parents)
    while loose:
        for vertex in loose:
            parents[vertex] = -1
        loose = {vertex for vertex in chosen if parents[vertex] >= 0} - set(parents)
    return parents
