"""Column generation on orbits: the packing program of `orbit_problem`, fed by low or unlimited trees.

The master packs the trees known so far; its dual values are lengths of the orbits of links. Limited heights are priced
by `hop_constrained_search`, a heuristic, so a limited run may end below what its height allows; it never claims more
than it packed. Unlimited trees are priced exactly (Chu-Liu, Edmonds): when none is cheaper the value is the optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from topoplan.columns.orbit_problem import OrbitPacking, OrbitTree
from topoplan.simplex.exact_simplex import PackingSimplex
from topoplan.simplex.float_guided import GuidedSimplex
from topoplan.simplex.random_numbers import Stream
from topoplan.simplex.reweighted_vertices import NearCorner, cheapest_corner
from topoplan.simplex.time_limit import Deadline
from topoplan.trees.arborescence import cheapest_arborescence
from topoplan.trees.hop_constrained_search import EFFORT, low_arborescences
from topoplan.trees.route_table import RouteTable

Progress = Callable[[str], None]

WALKS = 12
"""Walks along the optimal face in search of fewer trees."""

OTHERS = 3
"""Further trees that are priced for an only root before the master is solved again."""

DEARER = 4
"""For each of them the links of the last tree become dearer, together by one part in so many of its price."""

GUIDED_ROWS = 64
"""Rows from which floating point guides the master program."""

GUIDED_BITS = 16
"""Bits of a limit from which it does so for half as many rows: exact tables then soon outgrow machine words."""

_LONGEST = 1 << 20
"""Lengths of rows are rounded to whole numbers up to this one for pricing; what a tree costs is then exact."""


@dataclass
class OrbitGeneration:
    """The master program of one packing problem, and the trees it knows.

    ``gain`` is what a unit of rate counts in the objective, for programs that want something else beside it.
    """

    packing: OrbitPacking
    height: int | None = None
    progress: Progress | None = None
    trees: list[OrbitTree] = field(default_factory=list)
    gain: int = 1
    deadline: Deadline = field(default_factory=lambda: Deadline(None))

    def __post_init__(self) -> None:
        packing = self.packing
        self.rows = len(packing.limits)
        self.known: set[tuple[int, tuple[int, ...]]] = set()
        groups = len(packing.roots) if packing.shared else 0
        wide = max(packing.limits).bit_length() > GUIDED_BITS
        self.guided = self.rows >= (GUIDED_ROWS // 2 if wide else GUIDED_ROWS)
        simplex = GuidedSimplex if self.guided else PackingSimplex
        self.program: PackingSimplex | GuidedSimplex = simplex([*packing.limits, *[0] * groups])
        self.offset = 0
        if groups:
            # One more column counts the rate of one rank: |orbit| x rate - sum of the orbit's trees <= 0.
            self.program.add([[*[0] * self.rows, *packing.orbits.rank_counts]], [self.gain])
            self.offset = 1

    @property
    def value(self) -> Fraction:
        """Rate of the packing in units of the packing's scale."""
        return self.program.value * self._units

    @property
    def _units(self) -> int:
        """Rate for each unit of the master's objective."""
        return self.packing.fabric.size if self.packing.shared else 1

    def add(self, trees: list[OrbitTree]) -> int:
        """Make trees known to the master; the number of those that were new to it."""
        packing = self.packing
        vectors = []
        for tree in trees:
            key = (tree.root, tree.usage)
            if key in self.known:
                continue
            self.known.add(key)
            self.trees.append(tree)
            owners = [-int(tree.root == root) for root in packing.roots] if packing.shared else []
            vectors.append([*tree.usage, *owners])
        self.program.add(vectors, [0 if packing.shared else self.gain] * len(vectors))
        return len(vectors)

    def run(self, target: Fraction | None) -> bool:
        """Generate trees until the target is reached; False where pricing finds nothing better or time is up."""
        packing = self.packing
        lengths = self._first_lengths()
        prices: list[int] | None = None
        goal = None if target is None else target / self._units
        while True:
            effort = 0
            fresh = 0
            while not fresh and effort <= EFFORT:
                found = self._cheapest(lengths, effort)
                if len(found) < len(packing.roots) and (packing.shared or not found):
                    return False
                fresh = self.add(
                    [
                        tree
                        for place, tree in sorted(found.items())
                        if prices is None or _length(tree, lengths) < prices[place if packing.shared else 0]
                    ]
                )
                # Searching longer pays only where the quick answer is not good enough.
                effort = effort + EFFORT if self.height is not None and self.height > 1 else EFFORT + 1
            if fresh and prices is not None and len(packing.roots) == 1 and self.guided:
                self._add_others(lengths, prices[0])
            if fresh or prices is None:
                self.program.optimise(target=goal)
            elif self.program.confirm():
                return goal is not None and self.program.reaches(goal)
            if goal is not None and self.program.reaches(goal):
                return True
            if self.deadline.over():
                return False
            duals, denominator = self.program.near_duals()
            lengths = duals[: self.rows]
            prices = duals[self.rows :] if packing.shared else [self.gain * denominator]
            prices = [price - int(price * self.program.blur) for price in prices]
            if self.progress is not None:
                rate = self.program.near_value * float(self._units / packing.scale)
                self.progress(
                    f"packing: {len(self.trees)} trees of {packing.fabric.size} GPUs, {rate:.6g} GB/s"
                )

    def _add_others(self, lengths: list[int], price: int) -> None:
        """Trees that are cheap too, beside the latest of an only root: its links are made dearer again and again."""
        bumped = lengths
        for _ in range(OTHERS):
            tree = self.trees[-1]
            dearer = price // (DEARER * sum(tree.usage))
            bumped = [length + dearer * times for length, times in zip(bumped, tree.usage, strict=True)]
            other = self._cheapest(bumped, 0)[0]
            if _length(other, lengths) >= price or not self.add([other]):
                return

    def duals(self) -> list[int]:
        """Dual value of every row over a common denominator."""
        return self.program.duals()[0][: self.rows]

    def weights(self) -> dict[OrbitTree, Fraction]:
        """Weight of every tree in use."""
        solution = self.program.solution()
        return {self.trees[j - self.offset]: x for j, x in solution.items() if j >= self.offset}

    def fewer_trees(self, least: int) -> dict[OrbitTree, Fraction]:
        """Weights of the same value with few trees, all their images counted; ``least`` is enough."""
        best = self.weights()
        random = Stream(0)
        found = cheapest_corner(
            self.program,
            random,
            offset=self.offset,
            least=least,
            cost=self._images,
            walks=WALKS,
            deadline=self.deadline,
        )
        if found is None:
            return best
        fewer = {self.trees[j - self.offset]: x for j, x in found.items()}
        count = self.packing.image_count
        return fewer if sum(map(count, fewer)) < sum(map(count, best)) else best

    def _images(self, corner: NearCorner) -> int:
        return sum(self.packing.image_count(self.trees[j - self.offset]) for j in corner)

    def _first_lengths(self) -> list[int]:
        """Lengths to start with: inverse capacities."""
        packing = self.packing
        counts = packing.orbits.row_counts.tolist()
        single = [limit // count for limit, count in zip(packing.limits, counts, strict=True)]
        return [1000 * max(single) // c for c in single]

    def _cheapest(self, lengths: list[int], effort: int) -> dict[int, OrbitTree]:
        """A cheap tree for every root that has one, by the position of the root."""
        packing = self.packing
        routes = RouteTable(packing.orbits, rounded(lengths))
        nothing: list[Sequence[int] | None] = [()] * len(packing.roots)
        downs = self._trees(routes.cost, effort) if packing.uses("broadcast") else nothing
        if packing.orbits.folded:
            ups = downs
        else:
            ups = self._trees(routes.cost.T, effort) if packing.uses("reduce") else nothing
        return {
            place: packing.tree(root, up, down, routes)
            for place, (root, up, down) in enumerate(zip(packing.roots, ups, downs, strict=True))
            if up is not None and down is not None
        }

    def _trees(self, cost: NDArray[np.int64], effort: int) -> list[Sequence[int] | None]:
        """A tree of every root in which parents reach children at the given cost, or None."""
        roots = self.packing.roots
        if self.height is not None:
            return list(low_arborescences(cost, roots, self.height, effort=effort))
        by_head = cost.T.tolist()
        return [cheapest_arborescence(by_head, root) for root in roots]


def _length(tree: OrbitTree, lengths: list[int]) -> int:
    return sum(times * length for times, length in zip(tree.usage, lengths, strict=True))


def rounded(lengths: list[int]) -> tuple[int, ...]:
    """Lengths small enough for pricing, in proportion as far as whole numbers go."""
    largest = max(lengths)
    if largest <= _LONGEST:
        return tuple(lengths)
    # Rounded up, so that no length above zero becomes none.
    return tuple(-(-length * _LONGEST // largest) for length in lengths)
