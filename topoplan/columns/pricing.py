"""The pricing step: given a length for every row, the cheapest column of each root.

Without a limit on the height this is one cheapest arborescence per root and direction (Chu-Liu, Edmonds). With a
limit it is exact up to `hop_constrained_exact.LARGEST` ranks by dynamic programming over subsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from topoplan.columns.problem import Packing, TreeColumn
from topoplan.trees import hop_constrained_exact
from topoplan.trees.arborescence import cheapest_arborescence

_HEADROOM = 1 << 30


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
        """True where columns of limited height are priced exactly."""
        return self.packing.fabric.size <= hop_constrained_exact.LARGEST

    def cheapest(
        self, lengths: Sequence[int], height: int | None = None
    ) -> dict[int, tuple[int, TreeColumn]]:
        """Length and column of a cheapest column of every root that has one.

        Parameters
        ----------
        lengths : sequence of int, one per row
            Zero or more. Numbers too large for the tables are rounded down together, which only makes the
            column that is found slightly dearer than the cheapest; its length is exact either way.
        height : int or None
            Most edges on a root-to-leaf path; only where `exact_heights`.

        Returns
        -------
        dict of root to (length, TreeColumn)
        """
        packing = self.packing
        weights = np.array(lengths, dtype=object)
        shift = max(0, int(max(lengths, default=0)).bit_length() - _HEADROOM.bit_length())
        arc_cost = packing.incidence @ np.array([int(w) >> shift for w in weights], dtype=np.int64)
        cost, chosen = self._matrix(arc_cost)
        trees = self._limited(cost, height) if height is not None else self._unlimited(cost)
        found = {}
        for root, (up, down) in trees.items():
            rising = [chosen[child, parent] for parent, child in up]
            falling = [chosen[parent, child] for parent, child in down]
            if packing.folded:
                rising = [packing.reversed_arc(number) for number in falling]
            column = packing.column(root, rising, falling)
            found[root] = (
                int(sum(u * w for u, w in zip(packing.usage(column).tolist(), weights, strict=True))),
                column,
            )
        return found

    def _matrix(self, arc_cost: NDArray[np.int64]) -> tuple[NDArray[np.int64], dict[tuple[int, int], int]]:
        """Cost from rank to rank, and the arc that has it."""
        tails, heads, starts = self._pairs
        size = self.packing.fabric.size
        cost = np.full((size, size), hop_constrained_exact.UNREACHABLE, dtype=np.int64)
        cost[tails, heads] = np.minimum.reduceat(arc_cost, starts)
        chosen = {}
        ends = [*starts[1:].tolist(), len(arc_cost)]
        for tail, head, start, end in zip(tails.tolist(), heads.tolist(), starts.tolist(), ends, strict=True):
            chosen[tail, head] = start + int(np.argmin(arc_cost[start:end])) if end - start > 1 else start
        return cost, chosen

    def _limited(self, cost: NDArray[np.int64], height: int) -> dict[int, tuple[_Edges, _Edges]]:
        packing = self.packing
        down = hop_constrained_exact.HopLimitedTrees(cost, height) if packing.uses_down else None
        up = (
            hop_constrained_exact.HopLimitedTrees(cost.T, height)
            if packing.uses_up and not packing.folded
            else None
        )
        trees = {}
        for root in packing.roots:
            if all(
                table is None or table.costs[root] < hop_constrained_exact.UNREACHABLE for table in (up, down)
            ):
                trees[root] = (up.tree(root) if up else (), down.tree(root) if down else ())
        return trees

    def _unlimited(self, cost: NDArray[np.int64]) -> dict[int, tuple[_Edges, _Edges]]:
        packing = self.packing
        by_head, by_tail = cost.T.tolist(), cost.tolist()
        trees = {}
        for root in packing.roots:
            down = _edges(cheapest_arborescence(by_head, root)) if packing.uses_down else ()
            up = (
                _edges(cheapest_arborescence(by_tail, root)) if packing.uses_up and not packing.folded else ()
            )
            trees[root] = (up, down)
        return trees


_Edges = tuple[tuple[int, int], ...]


def _edges(parent: list[int]) -> _Edges:
    return tuple((u, v) for v, u in enumerate(parent) if u >= 0)
