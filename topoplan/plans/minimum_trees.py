"""Compute minimum-cost trees exactly: arborescences of any or limited height, spanning trees, Steiner trees.

- Any height: arborescences (Chu-Liu 1965, Edmonds 1967) by contraction of cycles, spanning trees by Prim (1957).
  Plain Python: for a few dozen ranks it is several times faster than arrays.
- Limited height, for all roots at once, by dynamic programming over subsets. ``tree[h][v, S]`` is the cost of the
  cheapest tree of height at most h with the ranks S below v, and ``hung[h][v, A]`` = min over c in A of
  ``cost[v, c] + tree[h - 1][c, A - c]``: tree[h][v, S] = min over A ⊆ S that hold the lowest rank of S of
  hung[h][v, A] + tree[h][v, S - A]. The 3^N pairs (S, A) take milliseconds for N = 8. The problem is NP-hard.
- Steiner arborescences: the best spanning one over the terminals and a set of inner vertices (Hakimi 1971), over
  all sets. Inner vertices that can be swapped without changing distances count once: twenty equal helpers give 21 sets.
- Limited height among many ranks: a lower bound by dual ascent (Wong 1984), over hops with levels from 1 to h.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray


def cheapest_arborescence(cost: Sequence[Sequence[float]], root: int) -> list[int]:
    """Return the parent of every vertex in a cheapest spanning arborescence; the root's is -1.

    ``cost[v][u]`` is that of the arc from u to v: one row per *head*. The diagonal is ignored; ``inf`` or a very large
    number means no arc. Ties go to the tail of lowest number.

    >>> cheapest_arborescence([[0, 9, 9], [5, 0, 1], [5, 1, 0]], 0)
    [-1, 0, 1]
    """
    size = len(cost)
    parent = [-1] * size
    for v in range(size):
        if v != root:
            row = cost[v]
            best = min(row[:v] + row[v + 1 :]) if isinstance(row, list) else min(_without(row, v))
            u = row.index(best)
            parent[v] = u if u != v else row.index(best, v + 1)
    cycle = _find_cycle(parent, root)
    if not cycle:
        return parent
    return _expand(cost, root, parent, cycle)


def _without(row: Sequence[float], v: int) -> list[float]:
    return [value for u, value in enumerate(row) if u != v]


def _find_cycle(parent: list[int], root: int) -> list[int]:
    """Return the vertices of one cycle of the parent pointers; empty if there is none."""
    state = [0] * len(parent)
    state[root] = -1
    for start in range(len(parent)):
        v = start
        while not state[v]:
            state[v] = start + 1
            v = parent[v]
        if state[v] == start + 1:
            cycle = [v]
            u = parent[v]
            while u != v:
                cycle.append(u)
                u = parent[u]
            return cycle
        v = start
        while state[v] == start + 1:
            state[v] = -1
            v = parent[v]
    return []


def _expand(cost: Sequence[Sequence[float]], root: int, parent: list[int], cycle: list[int]) -> list[int]:
    """Contract one cycle, solve the smaller graph, and open the cycle at the arc that enters it."""
    size = len(cost)
    inside = set(cycle)
    outside = [v for v in range(size) if v not in inside]
    last = len(outside)
    entry: list[int] = []
    entering: list[float] = []
    for u in outside:
        best, at = None, -1
        for v in cycle:
            slack = cost[v][u] - cost[v][parent[v]]
            if best is None or slack < best:
                best, at = slack, v
        assert best is not None, "a cycle has vertices"
        entering.append(best)
        entry.append(at)
    exits = [min(cycle, key=lambda u, v=v: (cost[v][u], u)) for v in outside]  # type: ignore[misc]
    smaller: list[list[float]] = []
    for v, out in zip(outside, exits, strict=True):
        row = cost[v]
        smaller.append([row[u] for u in outside] + [row[out]])
    smaller.append([*entering, 0.0])
    solved = cheapest_arborescence(smaller, outside.index(root))
    result = list(parent)
    for position, v in enumerate(outside):
        up = solved[position]
        result[v] = -1 if up < 0 else exits[position] if up == last else outside[up]
    way_in = solved[last]
    result[entry[way_in]] = outside[way_in]
    return result


def cheapest_spanning_tree(cost: Sequence[Sequence[float]]) -> list[int]:
    """Return the parent of every vertex in a cheapest spanning tree rooted at vertex 0, whose parent is -1.

    ``cost`` is symmetric, ``inf`` means no edge; the diagonal is ignored.
    >>> cheapest_spanning_tree([[0, 1, 4], [1, 0, 2], [4, 2, 0]])
    [-1, 0, 1]
    """
    parent = [0] * len(cost)
    parent[0] = -1
    best = list(cost[0])
    outside = list(range(1, len(cost)))
    while outside:
        v = min(outside, key=best.__getitem__)
        outside.remove(v)
        row = cost[v]
        for u in outside:
            if row[u] < best[u]:
                best[u] = row[u]
                parent[u] = v
    return parent


LARGEST_EXACT = 9
"""Most ranks for which the table justifies its memory and time."""

UNREACHABLE = np.int64(1) << 40
"""Cost of an arc that does not exist; real costs stay below it (callers scale them)."""


class HopLimitedTrees:
    """Tables of the cheapest trees with at most ``height`` edges on a path from the root.

    ``cost[u, v]``, (N, N), is that of the arc from u to v, zero or more; `UNREACHABLE` means no arc.

    A path 0-1-2 with a costly shortcut: height 1 forces the shortcut.

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
        # Few entries are read, one by one; a memoryview answers without making numbers of all others.
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
        """Return the edges (parent, child) of a cheapest tree from ``root``, in ascending order."""
        return tuple(sorted((up, child) for child, up in enumerate(self.parents(root)) if up >= 0))

    def parents(self, root: int) -> list[int]:
        """Return the same tree as the parent of every rank, -1 for the root."""
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
        """Return the block of ``rest`` with its lowest rank that shares a subtree of v, and v's child in it."""
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
    """Return the table of trees of height 1, a row for each set of ranks, and that of single ranks below a parent."""
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
    """Return the tables of trees of the next height, and of ranks below a parent through one edge."""
    rests, holds, groups = _subset_tables(cost.shape[0])
    hanging = np.where(holds, below.take(rests), UNREACHABLE)
    by_parent = (cost.T[:, :, None] + hanging[:, None, :]).min(axis=0)
    hung = np.minimum(by_parent, UNREACHABLE).T.copy()
    level = np.zeros_like(below)
    for sets, blocks, others in groups:
        divided = hung.take(blocks, axis=0)
        divided += level.take(others, axis=0)
        level[sets] = np.minimum.reduce(divided)
    return np.minimum(level, UNREACHABLE, out=level), hung


@lru_cache(maxsize=LARGEST_EXACT + 1)
def _subset_tables(
    size: int,
) -> tuple[
    NDArray[np.int64], NDArray[np.bool_], list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]
]:
    """Return the index tables of the sets of ranks: ``rests, holds, groups``.

    ``rests`` and ``holds``, (size, sets), have for each rank c and set A the place of c's row for A - c in a table, and
    whether A holds c. ``groups`` has for each number of members the sets, (count,), and as (ways, count) their blocks
    with the lowest rank, and the complements of the blocks.
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


MOST_SETS = 256
"""Sets of inner vertices that are all tried for one tree; beyond it each vertex alone, all together, and none."""


def equivalent_vertices(
    table: NDArray[np.int64] | NDArray[np.object_], vertices: Sequence[int]
) -> list[list[int]]:
    """Return the equivalence classes of ``vertices``: swapping two of a class keeps the (V, V) table of distances.
    >>> equivalent_vertices(np.array([[0, 2, 2], [1, 0, 3], [1, 3, 0]]), [0, 1, 2])
    [[0], [1, 2]]
    """
    classes: list[list[int]] = []
    for vertex in vertices:
        for members in classes:
            if _equivalent(table, members[0], vertex):
                members.append(vertex)
                break
        else:
            classes.append([vertex])
    return classes


def _equivalent(table: NDArray[np.int64] | NDArray[np.object_], a: int, b: int) -> bool:
    others = np.ones(len(table), dtype=np.bool_)
    others[[a, b]] = False
    return bool(
        table[a, b] == table[b, a]
        and np.array_equal(table[a, others], table[b, others])
        and np.array_equal(table[others, a], table[others, b])
    )


def set_count(classes: Sequence[Sequence[int]]) -> int:
    """Return the number of sets that `inner_sets` yields."""
    return prod(len(members) + 1 for members in classes)


def inner_sets(classes: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yield all sets of inner vertices up to swaps of equivalent vertices, the empty one first.

    >>> list(inner_sets([[3, 4], [7]]))
    [[], [7], [3], [3, 7], [3, 4], [3, 4, 7]]
    """
    for counts in product(*(range(len(members) + 1) for members in classes)):
        yield [vertex for members, count in zip(classes, counts, strict=True) for vertex in members[:count]]


def cheapest_steiner_tree(
    cost: NDArray[np.int64], root: int, terminals: Sequence[int], inner: Sequence[int]
) -> list[int]:
    """Return the parents in a cheapest arborescence from a root over the terminals; -1 for the root and unused ones.

    ``cost[u, v]`` is that of the arc from u to v; the root is a terminal or an inner vertex. Ties go to the fewest
    inner vertices, and then to the lowest that is found. Exact up to `MOST_SETS` sets of inner vertices.

    A helper, vertex 3, that is nearer to three ranks than they are to each other:

    >>> cost = np.array([[0, 5, 5, 3], [5, 0, 5, 3], [5, 5, 0, 3], [1, 1, 1, 0]])
    >>> cheapest_steiner_tree(cost, 0, [0, 1, 2], [3])
    [-1, 3, 3, 0]
    """
    must = sorted({root, *terminals})
    classes = equivalent_vertices(cost, [vertex for vertex in inner if vertex != root])
    if set_count(classes) <= MOST_SETS:
        sets = list(inner_sets(classes))
    else:
        every = sorted(vertex for members in classes for vertex in members)
        sets = [[], *([members[0]] for members in classes), every]
    best: tuple[int, int, list[int]] | None = None
    for chosen in sorted(sets, key=len):
        # Two levels over the chosen vertices are as cheap as any tree if only ports have a cost, and low.
        for parents in (_below_chosen(cost, root, must, chosen), _spanning_exactly(cost, root, must, chosen)):
            price = sum(int(cost[up, v]) for v, up in enumerate(parents) if up >= 0)
            if best is None or price < best[0]:
                best = (price, len(chosen), parents)
    assert best is not None, "the empty set is always tried"
    return best[2]


def _below_chosen(
    cost: NDArray[np.int64], root: int, must: Sequence[int], chosen: Sequence[int]
) -> list[int]:
    """Return parents: the chosen vertices below the root, every terminal below the nearest of them or the root."""
    parents = [-1] * len(cost)
    above = [root, *chosen]
    for vertex in must:
        if vertex != root:
            parents[vertex] = min(above, key=lambda up, v=vertex: (cost[up, v], up))  # type: ignore[misc]
    for vertex in chosen:
        if vertex in parents:
            parents[vertex] = root
    return parents


def _spanning_exactly(
    cost: NDArray[np.int64], root: int, must: Sequence[int], chosen: Sequence[int]
) -> list[int]:
    """Return the cheapest arborescence over exactly these vertices, without inner leaves."""
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


def least_hops(cost: NDArray[np.int64], height: int, sources: Sequence[int]) -> int:
    """Return a lower bound on the cost of hops by which every source reaches all ranks in ``height`` hops or fewer.

    A hop's level is the number of hops in the longest chain that ends with it. Waiting is free, so a chain from a
    source to a rank is a path from level 0 to level ``height``. If a rank at the last level has such paths from some
    sources only, hops must enter the set of states from which it is reached at no cost. The least cost of a hop into
    the set counts, and all these become cheaper by as much; of all ranks the one with the fewest such hops is next.
    Each hop pays no more than its cost, so the sum is a bound. `UNREACHABLE` if some rank is not reached.

    cost: (N, N) int64 of 0 or more, `UNREACHABLE` for no hop.

    Four ranks around a ring: three hops of a tree from rank 0; at least five from all to all, where two rounds of
    exchanges in pairs are eight.

    >>> ring = np.full((4, 4), UNREACHABLE)
    >>> for rank in range(4):
    ...     ring[rank, [rank - 1, (rank + 1) % 4]] = 1
    >>> least_hops(ring, 2, [0]), least_hops(ring, 2, range(4)), least_hops(ring, 1, [0]) >= 1 << 40
    (3, 5, True)
    """
    size = len(cost)
    wanted = sum(1 << rank for rank in sources)
    into = [
        {
            tail: int(cost[tail, rank])
            for tail in range(size)
            if tail != rank and cost[tail, rank] < UNREACHABLE
        }
        for rank in range(size)
    ]
    tails = [sum(1 << tail for tail in row) for row in into]
    left = [[dict(row) for row in into] for _ in range(height)]
    free = [
        [sum(1 << tail for tail, price in row.items() if not price) for row in into] for _ in range(height)
    ]
    waiting = list(range(size))
    total = 0
    while True:
        fewest, entering = 0, None
        unserved = []
        for rank in waiting:
            reach = 1 << rank
            hops: list[tuple[int, int, int]] = []  # level, head, tails
            for level in range(height - 1, -1, -1):
                heads = _members(reach)
                for head in heads:
                    reach |= free[level][head]
                hops += [(level, head, tails[head] & ~reach) for head in heads if tails[head] & ~reach]
            if wanted & ~reach:
                unserved.append(rank)
                count = sum(mask.bit_count() for _, _, mask in hops)
                if entering is None or count < fewest:
                    fewest, entering = count, hops
        if entering is None:
            return total
        if not entering:
            return int(UNREACHABLE)
        waiting = unserved
        least = min(left[level][head][tail] for level, head, mask in entering for tail in _members(mask))
        total += least
        for level, head, mask in entering:
            for tail in _members(mask):
                left[level][head][tail] -= least
                if not left[level][head][tail]:
                    free[level][head] |= 1 << tail


def _members(mask: int) -> list[int]:
    """Return the numbers of the bits that are set."""
    members = []
    while mask:
        members.append((mask & -mask).bit_length() - 1)
        mask &= mask - 1
    return members
