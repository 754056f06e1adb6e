"""Column generation: the packing program of `problem`, fed by the trees that `pricing` finds cheapest.

The master packs the trees known so far; its dual values are lengths of the rows. Where pricing is exact and finds
nothing cheaper the value is the optimum, of the height asked for. Where heights are searched for, a limited run may end
below what its height allows; it never claims more than it packed. For allgather and reduce-scatter, where every owner
has the same part of the buffer, one more column counts the rate that all owners reach.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from topoplan.columns.pricing import Pricing, has_tables, length_of
from topoplan.columns.problem import Packing, TreeColumn
from topoplan.simplex.exact_simplex import PackingSimplex
from topoplan.simplex.float_guided import GuidedSimplex
from topoplan.simplex.random_numbers import Stream
from topoplan.simplex.reweighted_vertices import NearCorner, cheapest_corner
from topoplan.simplex.time_limit import Deadline

Progress = Callable[[str], None]

OTHERS = 3
"""Further trees that are priced for an only root before the master is solved again."""

DEARER = 4
"""For each of them the links of the last tree become dearer, together by one part in so many of its price."""

GUIDED_ROWS = 64
"""Rows from which floating point guides the master program; where heights are priced by tables, only of wide limits."""

GUIDED_BITS = 16
"""Bits beyond which a limit is wide: exact tables then soon outgrow machine words, and elsewhere half the rows do."""


@dataclass
class Generation:
    """The master program of one packing problem, and the trees it knows.

    ``gain`` is what a unit of rate counts in the objective, for programs that want something else beside it.
    """

    pricing: Pricing
    progress: Progress | None = None
    trees: list[TreeColumn] = field(default_factory=list)
    gain: int = 1
    deadline: Deadline = field(default_factory=lambda: Deadline(None))

    def __post_init__(self) -> None:
        packing = self.packing
        self.rows = len(packing.limits)
        self.known: set[TreeColumn] = set()
        groups = packing.owner_rows
        wide = max(packing.limits).bit_length() > GUIDED_BITS
        few = has_tables(packing.fabric)
        self.guided = self.rows >= (GUIDED_ROWS // 2 if wide and not few else GUIDED_ROWS) and (
            wide or not few
        )
        simplex = GuidedSimplex if self.guided else PackingSimplex
        self.program: PackingSimplex | GuidedSimplex = simplex([*packing.limits, *[0] * groups])
        self.offset = 0
        if groups:
            # One more column counts the rate of one rank: |orbit| x rate - sum of the orbit's trees <= 0.
            self.program.add([[*[0] * self.rows, *packing.owner_parts]], [self.gain])
            self.offset = 1

    @property
    def packing(self) -> Packing:
        """The problem."""
        return self.pricing.packing

    @property
    def value(self) -> Fraction:
        """Rate of the packing in units of the packing's scale."""
        return self.program.value * self.packing.rate_of_one

    def add(self, trees: Sequence[TreeColumn]) -> int:
        """Make trees known to the master; the number of those that were new to it."""
        packing = self.packing
        vectors = []
        for tree in trees:
            if tree in self.known:
                continue
            self.known.add(tree)
            self.trees.append(tree)
            place = packing.owner_row(tree)
            owners = [-int(place == row) for row in range(packing.owner_rows)]
            vectors.append([*tree.usage, *owners])
        self.program.add(vectors, [0 if packing.shared else self.gain] * len(vectors))
        return len(vectors)

    def run(self, target: Fraction | None, *, hopeless: Fraction | None = None) -> bool:
        """Generate trees until the target is reached; False where pricing finds nothing better or time is up.

        ``hopeless``: stop as soon as exact pricing proves that the height does not allow this value.
        """
        packing = self.packing
        lengths = self._first_lengths()
        prices: list[int] | None = None
        goal = None if target is None else target / packing.rate_of_one
        while True:
            fresh = 0
            for effort in self.pricing.efforts:
                found = self.pricing.cheapest(lengths, effort)
                if len({packing.owner_row(tree) for tree in found.values()}) < max(1, packing.owner_rows):
                    return False
                priced = [(tree, length_of(tree, lengths)) for _, tree in sorted(found.items())]
                if hopeless is not None and prices is not None and self._proved(lengths, priced) < hopeless:
                    return False
                fresh = self.add(
                    [
                        tree
                        for tree, length in priced
                        if prices is None or length < prices[packing.owner_row(tree)]
                    ]
                )
                if fresh:
                    break
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
                rate = self.program.near_value * float(packing.rate_of_one / packing.scale)
                self.progress(
                    f"packing: {len(self.trees)} trees of {packing.fabric.size} GPUs, {rate:.6g} GB/s"
                )

    def _proved(self, lengths: list[int], priced: list[tuple[TreeColumn, int]]) -> Fraction:
        """The bound that lengths prove for columns of this height: sum of c y over the cheapest forest."""
        total = sum(c * y for c, y in zip(self.packing.limits, lengths, strict=True))
        cheapest: dict[int, int] = {}
        for tree, length in priced:
            row = self.packing.owner_row(tree)
            cheapest[row] = min(length, cheapest.get(row, length))
        parts = self.packing.owner_parts if self.packing.shared else [1]
        forest = Fraction(sum(n * cheapest[row] for row, n in enumerate(parts))) / self.packing.rate_of_one
        return total / forest if forest else Fraction(total + 1) * 10**9

    def _add_others(self, lengths: list[int], price: int) -> None:
        """Trees that are cheap too, beside the latest of an only root: its links are made dearer again and again."""
        bumped = lengths
        for _ in range(OTHERS):
            tree = self.trees[-1]
            dearer = price // (DEARER * sum(tree.usage))
            bumped = [length + dearer * times for length, times in zip(bumped, tree.usage, strict=True)]
            other = self.pricing.cheapest(bumped)[0]
            if length_of(other, lengths) >= price or not self.add([other]):
                return

    def duals(self) -> list[int]:
        """Dual value of every row over a common denominator."""
        return self.program.duals()[0][: self.rows]

    def weights(self) -> dict[TreeColumn, Fraction]:
        """Weight of every tree in use."""
        solution = self.program.solution()
        return {self.trees[j - self.offset]: x for j, x in solution.items() if j >= self.offset}

    def fewer_trees(self, random: Stream, *, least: int, walks: int) -> dict[TreeColumn, Fraction]:
        """Weights of the same value with few trees, all their images counted; ``least`` is enough."""
        best = self.weights()
        found = cheapest_corner(
            self.program,
            random,
            offset=self.offset,
            least=least,
            cost=self._images,
            walks=walks,
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
        single = [limit // width for limit, width in zip(packing.limits, packing.widths, strict=True)]
        return [1000 * max(single) // c for c in single]
