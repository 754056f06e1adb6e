"""The pricing step: given a length for every row, the cheapest column of each root.

Without a limit on the height this is one cheapest arborescence per root and direction (Chu-Liu, Edmonds). With a
limit it is exact up to `hop_limited.LARGEST` ranks by dynamic programming over subsets, and at height 1, where each
root has one star. For other heights on more ranks it is a search (`topoplan.packing.low_trees`): a column that it
finds is there, but a cheaper one may be too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from topoplan.packing import hop_limited
from topoplan.packing.arborescence import cheapest_arborescence
from topoplan.packing.columns import Packing, TreeColumn
from topoplan.packing.low_trees import EFFORT, low_arborescences, lowest_heights

EFFORTS = (2, 32)
"""How hard low trees are searched for, at first and where that finds none that help (see `low_arborescence`)."""

_HEADROOM = 1 << 30
_TRIES = 16
_CALL_COST = 300
_SHAKES_PER_SEARCH = 4


@dataclass(frozen=True)
class Oracle:
    """Cheapest columns of one packing problem.

    Parameters
    ----------
    packing : Packing
    """

    packing: Packing

    @cached_property
    def _pairs(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Tail and head of every pair with an arc, and where its arcs start (arcs are sorted by pair)."""
        arcs = self.packing.fabric.arcs
        order = sorted({(arc.tail, arc.head) for arc in arcs})
        keys = [(arc.tail, arc.head) for arc in arcs]
        starts = [keys.index(pair) for pair in order]
        return np.array([t for t, _ in order]), np.array([h for _, h in order]), np.array(starts)

    @property
    def exact_heights(self) -> bool:
        """True where columns of every limited height are priced exactly."""
        return self.packing.fabric.size <= hop_limited.LARGEST

    @cached_property
    def lowest_height(self) -> int:
        """No column of every root, or of any root where one will do, is lower than this."""
        packing = self.packing
        cost, _ = self._matrix(np.zeros(len(packing.fabric.arcs), dtype=np.int64))
        heights = np.zeros(packing.fabric.size, dtype=np.int64)
        if packing.uses_down:
            heights = lowest_heights(cost)
        if packing.uses_up:
            heights = np.maximum(heights, lowest_heights(cost.T))
        here = heights[list(packing.roots)]
        return int(here.max() if packing.groups > 1 else here.min())

    def efforts(self, height: int | None) -> tuple[int, ...]:
        """How hard to search for columns of this height: one value where they are priced exactly."""
        return (0,) if height in (None, 1) or self.exact_heights else EFFORTS

    def work(self, height: int | None, effort: int) -> int:
        """Roughly what a call costs, in the units of `PackingSimplex.work`, where columns are searched for."""
        if height in (None, 1) or self.exact_heights:
            return 0
        trees = len(self.packing.roots) * self._tries(effort)
        directions = 1 + (self.packing.uses_up and self.packing.uses_down and not self.packing.folded)
        searches = (_SHAKES_PER_SEARCH + effort) * directions
        return _CALL_COST * trees * self.packing.fabric.size**2 * searches // _SHAKES_PER_SEARCH

    def _tries(self, effort: int) -> int:
        """Trees for each root; where there are few roots they take little more time together than alone."""
        return max(1, min(effort, _TRIES // len(self.packing.roots)))

    def cheapest(
        self, lengths: Sequence[int], height: int | None = None, *, effort: int = EFFORT
    ) -> dict[int, tuple[int, TreeColumn]]:
        """Length and column of a cheapest column of every root that has one.

        Parameters
        ----------
        lengths : sequence of int, one per row
            Zero or more. Numbers too large for the tables are rounded down together, which only makes the
            column that is found slightly dearer than the cheapest; its length is exact either way.
        height : int or None
            Most edges on a root-to-leaf path.
        effort : int
            How hard to search where limited heights are not priced exactly (see `low_arborescence`).

        Returns
        -------
        dict of root to (length, TreeColumn)
        """
        found: dict[int, tuple[int, TreeColumn]] = {}
        for length, column in self.candidates(lengths, height, effort=effort):
            found.setdefault(column.root, (length, column))
        return dict(sorted(found.items()))

    def candidates(
        self, lengths: Sequence[int], height: int | None = None, *, effort: int = EFFORT
    ) -> list[tuple[int, TreeColumn]]:
        """Lengths and columns in ascending order: of each root a cheapest one, and others where a search met them.

        Parameters: see `cheapest`.
        """
        packing = self.packing
        weights = np.array(lengths, dtype=object)
        shift = max(0, int(max(lengths, default=0)).bit_length() - _HEADROOM.bit_length())
        arc_cost = packing.incidence @ np.array([int(w) >> shift for w in weights], dtype=np.int64)
        cost, chosen = self._matrix(arc_cost)
        trees = self._limited(cost, height, effort) if height is not None else self._unlimited(cost)
        columns = set()
        for root, up, down in trees:
            rising = [chosen[child, parent] for parent, child in up]
            falling = [chosen[parent, child] for parent, child in down]
            if packing.folded:
                rising = [packing.reversed_arc(number) for number in falling]
            columns.add(packing.column(root, rising, falling))
        return sorted(
            (int(sum(u * w for u, w in zip(packing.usage(column).tolist(), weights, strict=True))), column)
            for column in columns
        )

    def _matrix(self, arc_cost: NDArray[np.int64]) -> tuple[NDArray[np.int64], dict[tuple[int, int], int]]:
        """Cost from rank to rank, and the arc that has it."""
        tails, heads, starts = self._pairs
        size = self.packing.fabric.size
        cost = np.full((size, size), hop_limited.UNREACHABLE, dtype=np.int64)
        cost[tails, heads] = np.minimum.reduceat(arc_cost, starts)
        chosen = {}
        ends = [*starts[1:].tolist(), len(arc_cost)]
        for tail, head, start, end in zip(tails.tolist(), heads.tolist(), starts.tolist(), ends, strict=True):
            chosen[tail, head] = start + int(np.argmin(arc_cost[start:end])) if end - start > 1 else start
        return cost, chosen

    def _limited(self, cost: NDArray[np.int64], height: int, effort: int) -> list[_Trees]:
        packing = self.packing
        if not self.exact_heights:
            return self._low(cost, height, effort)
        down = hop_limited.HopLimitedTrees(cost, height) if packing.uses_down else None
        up = hop_limited.HopLimitedTrees(cost.T, height) if packing.uses_up and not packing.folded else None
        return [
            (root, up.tree(root) if up else (), down.tree(root) if down else ())
            for root in packing.roots
            if all(table is None or table.costs[root] < hop_limited.UNREACHABLE for table in (up, down))
        ]

    def _low(self, cost: NDArray[np.int64], height: int, effort: int) -> list[_Trees]:
        """As a search finds them; the cheapest up tree of a root goes with its cheapest down tree."""
        packing = self.packing
        roots = [root for root in packing.roots for _ in range(self._tries(effort))]
        falling: list[_Edges | None] = [()] * len(roots)
        if packing.uses_down:
            falling = _cheapest_first(cost, roots, height, effort)
        rising: list[_Edges | None] = [()] * len(roots)
        if packing.uses_up and not packing.folded:
            rising = _cheapest_first(cost.T, roots, height, effort)
        return [
            (root, up, down)
            for root, up, down in zip(roots, rising, falling, strict=True)
            if up is not None and down is not None
        ]

    def _unlimited(self, cost: NDArray[np.int64]) -> list[_Trees]:
        packing = self.packing
        by_head, by_tail = cost.T.tolist(), cost.tolist()
        trees = []
        for root in packing.roots:
            down = _edges(cheapest_arborescence(by_head, root)) if packing.uses_down else ()
            up = (
                _edges(cheapest_arborescence(by_tail, root)) if packing.uses_up and not packing.folded else ()
            )
            trees.append((root, up, down))
        return trees


_Edges = tuple[tuple[int, int], ...]
_Trees = tuple[int, _Edges, _Edges]
"""A root, and the edges (parent, child) of its up tree and of its down tree."""


def _cheapest_first(
    cost: NDArray[np.int64], roots: Sequence[int], height: int, effort: int
) -> list[_Edges | None]:
    """Trees from roots that are named in ascending order, perhaps several times; of each root the cheapest first."""
    found = low_arborescences(cost, roots, height, effort=effort)
    trees = [None if parent is None else _edges(parent) for parent in found]
    totals = [sum(int(cost[edge]) for edge in edges or ()) for edges in trees]
    order = sorted(range(len(roots)), key=lambda i: (roots[i], totals[i], i))
    return [trees[i] for i in order]


def _edges(parent: list[int]) -> _Edges:
    return tuple((u, v) for v, u in enumerate(parent) if u >= 0)
