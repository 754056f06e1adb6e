"""The pricing step: given a length for every row, the cheapest column of each root.

Without a limit on the height this is one cheapest arborescence per root and direction (Chu-Liu, Edmonds). With a
limit it is exact up to `hop_constrained_exact.LARGEST` ranks by dynamic programming over subsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topoplan.columns.problem import Packing, TreeColumn
from topoplan.fabric.fabric import Arc
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
        cost, chosen = self._matrix(_rounded(lengths))
        trees = self._limited(cost, height) if height is not None else self._unlimited(cost)
        found = {}
        for root, (up, down) in trees.items():
            rising = [chosen[child, parent] for parent, child in up]
            falling = [chosen[parent, child] for parent, child in down]
            if packing.folded:
                rising = [packing.reversed_arc(arc) for arc in falling]
            column = packing.column(root, rising, falling)
            found[root] = (
                int(sum(u * w for u, w in zip(packing.usage(column).tolist(), weights, strict=True))),
                column,
            )
        return found

    def learn(self, lengths: Sequence[int]) -> bool:
        """Look for routes that are shorter under lengths than those of which `cheapest` knows; False without any."""
        return self.packing.routes.learn(_rounded(lengths))

    def _matrix(self, lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], dict[tuple[int, int], Arc]]:
        """Cost from rank to rank, and the first arc that has it."""
        routes = self.packing.routes
        arc_cost = routes.costs(lengths)
        (tails, heads), starts = routes.pairs, routes.starts
        size = self.packing.fabric.size
        cost = np.full((size, size), hop_constrained_exact.UNREACHABLE, dtype=np.int64)
        cost[tails, heads] = np.minimum.reduceat(arc_cost, starts)
        chosen = {}
        ends = [*starts[1:].tolist(), len(arc_cost)]
        for tail, head, start, end in zip(tails.tolist(), heads.tolist(), starts.tolist(), ends, strict=True):
            place = start + int(np.argmin(arc_cost[start:end])) if end - start > 1 else start
            chosen[tail, head] = routes.arcs[place]
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


def _rounded(lengths: Sequence[int]) -> NDArray[np.int64]:
    """Lengths that fit the tables, rounded down together."""
    shift = max(0, int(max(lengths, default=0)).bit_length() - _HEADROOM.bit_length())
    return np.array([int(length) >> shift for length in lengths], dtype=np.int64)


def _edges(parent: list[int]) -> _Edges:
    return tuple((u, v) for v, u in enumerate(parent) if u >= 0)
