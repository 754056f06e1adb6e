"""The pricing step: given a length for every row, a cheapest column of each root.

Without a limit on the height that is one cheapest arborescence per root and direction (Chu-Liu, Edmonds). With a limit
it is exact for few ranks, by dynamic programming over subsets (`hop_constrained_exact`), and else a search
(`hop_constrained_search`) that may miss the cheapest. Routes are the shortest under the lengths, of all that there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topoplan.columns.problem import Packing, TreeColumn
from topoplan.fabric.fabric import Fabric
from topoplan.trees.arborescence import cheapest_arborescence
from topoplan.trees.hop_constrained_exact import LARGEST, UNREACHABLE, HopLimitedTrees
from topoplan.trees.hop_constrained_search import EFFORT, low_arborescences

_LONGEST = 1 << 20
"""Lengths of rows are rounded to whole numbers up to this one; what a tree costs is then exact."""

_LONGEST_OF_FEW = 1 << 30
"""The same for few ranks, whose trees cost less in all."""


def has_tables(fabric: Fabric) -> bool:
    """True where heights are priced by tables: few ranks, switches that only forward, few shortest routes of a pair.

    Examples
    --------
    >>> import topoplan
    >>> [has_tables(Fabric(topoplan.load(name), ("nvlink",))) for name in ("dgx-1v", "dgx-2")]
    [True, False]
    """
    return fabric.size <= LARGEST and not fabric.in_network and fabric.lists_shortest_routes


@dataclass(frozen=True)
class Pricing:
    """Cheapest columns of one packing problem.

    Parameters
    ----------
    packing : Packing
    height : int or None
        Most edges on a root-to-leaf path.
    """

    packing: Packing
    height: int | None = None

    @property
    def efforts(self) -> tuple[int, ...]:
        """Efforts worth trying one after the other: searching longer pays only where the quick answer is no better."""
        searched = self.height is not None and self.height > 1 and not has_tables(self.packing.fabric)
        return (0, EFFORT) if searched else (0,)

    def cheapest(self, lengths: Sequence[int], effort: int = 0) -> dict[int, TreeColumn]:
        """A cheap column of every root that has one, by the place of the root among `Packing.roots`.

        Parameters
        ----------
        lengths : sequence of int, one per row
            Zero or more. Numbers too large for the tables are made smaller together, which only makes the column that
            is found slightly dearer than the cheapest.
        effort : int
            How long a search shakes trees.
        """
        packing = self.packing
        few = has_tables(packing.fabric)
        routes = packing.routes(rounded(lengths, _LONGEST_OF_FEW if few else _LONGEST))
        nothing: list[Sequence[int] | None] = [()] * len(packing.roots)
        downs = self._trees(routes.cost, effort) if packing.uses("broadcast") else nothing
        ups = downs
        if not packing.uses("reduce"):
            ups = nothing
        elif not packing.uses("broadcast") or not (packing.folded or alike_both_ways(routes.cost)):
            ups = self._trees(routes.cost.T, effort)
        made = {
            place: (root, up, down)
            for place, (root, up, down) in enumerate(zip(packing.roots, ups, downs, strict=True))
            if up is not None and down is not None
        }
        return dict(zip(made, packing.trees(made.values(), routes), strict=True))

    def _trees(self, cost: NDArray[np.int64], effort: int) -> list[Sequence[int] | None]:
        """A tree of every root in which parents reach children at the given cost, or None."""
        roots = self.packing.roots
        if self.height is None:
            by_head = cost.T.tolist()
            return [cheapest_arborescence(by_head, root) for root in roots]
        if not has_tables(self.packing.fabric):
            return list(low_arborescences(cost, roots, self.height, effort=effort))
        tables = HopLimitedTrees(cost, self.height)
        return [tables.parents(root) if tables.costs[root] < UNREACHABLE else None for root in roots]


def alike_both_ways(cost: NDArray[np.int64]) -> bool:
    """True where every way costs as much as the way back: trees up are then trees down, and need no second search."""
    return np.array_equal(cost, cost.T)


def length_of(tree: TreeColumn, lengths: Sequence[int]) -> int:
    """What one byte of a column costs under lengths of the rows, exactly."""
    return sum(times * length for times, length in zip(tree.usage, lengths, strict=True) if times)


def rounded(lengths: Sequence[int], longest: int = _LONGEST) -> tuple[int, ...]:
    """Lengths small enough for pricing, in proportion as far as whole numbers go."""
    largest = max(lengths)
    if largest <= longest:
        return tuple(lengths)
    # Rounded up, so that no length above zero becomes none.
    return tuple(-(-length * longest // largest) for length in lengths)
