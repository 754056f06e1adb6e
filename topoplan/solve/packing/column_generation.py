"""Solve the packing program by column generation, and visit vertices of its optimal face in search of few trees.

The master packs the trees known so far; its dual values are lengths of the rows. If pricing is exact and finds
nothing cheaper, the value is the optimum of the requested height. If heights are searched heuristically, a limited run
may end below the optimum; it never claims more than it packed. For allgather and reduce-scatter, in which every owner
has the same part of the buffer, one more column counts the rate that all owners reach.

The optimal packings are a face of a polytope whose vertices use different numbers of trees. The vertex with the
fewest is NP-hard to find, so many are visited: each walk starts towards a random vertex, or a neighbour of the best
one, and follows the reweighting of sparse recovery (Candès, Wakin, Boyd 2008), which makes large weights cheap and
small ones dear.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from topoplan.solve.packing.packing_program import Packing, Pricing, TreeColumn, has_exact_tables, length_of
from topoplan.solve.search_control import Deadline, RandomStream
from topoplan.solve.simplex.exact_simplex import PackingSimplex
from topoplan.units import check_function

if TYPE_CHECKING:
    from topoplan.solve.simplex.guided_simplex import GuidedSimplex

RANDOM_WALKS = 60
VERTEX_WORK = 12_000_000
"""Effort after which no further walk is started, as `PackingSimplex.work` counts it."""
STEPS_PER_WALK = 10
_REWARD_NOISE = 1000

OptimalVertex = dict[int, Fraction]
"""Weight of each used column."""

ApproximateVertex = Mapping[int, Fraction | float]
"""The same to a few digits."""


def cheapest_vertex(
    program: PackingSimplex | GuidedSimplex,
    random: RandomStream,
    *,
    offset: int,
    least: int,
    cost: Callable[[ApproximateVertex], int],
    walks: int = RANDOM_WALKS,
    deadline: Deadline | None = None,
) -> OptimalVertex | None:
    """Return the vertex of lowest cost that is met, or None if time allowed none.

    The program is at an optimum, and stays on the optimal face from now on. Columns before ``offset`` are not trees.
    The search ends at the cost ``least``, and starts no walk after ``deadline``.
    """
    program.keep_optimal()
    count = program.columns - offset
    limit = program.work + VERTEX_WORK
    kept: ApproximateVertex = {}
    best: OptimalVertex | None = None
    for walk in range(walks):
        if program.work > limit or (deadline is not None and deadline.over()):
            break
        weights = random.whole(count, _REWARD_NOISE)
        if walk % 2 and kept:
            weights = _rewards_of_neighbour(kept, offset, weights, random)
        previous: int | None = None
        for _ in range(STEPS_PER_WALK):
            program.prefer(np.concatenate([np.zeros(offset, dtype=np.int64), weights]))
            used = {j: x for j, x in program.near_solution().items() if j >= offset}
            price = cost(used)
            if best is None or price < cost(best):
                exact = program.corner()
                if exact is None:
                    break
                best = {j: x for j, x in exact.items() if j >= offset}
                price = cost(best)
                if price <= least:
                    return best
            if not kept or price <= cost(kept):
                kept = used
            if previous is not None and price >= previous:
                break
            previous = price
            weights = _reweighted_rewards(used, offset, count) + random.whole(count, _REWARD_NOISE // 40)
    return best


def _reweighted_rewards(used: ApproximateVertex, offset: int, count: int) -> NDArray[np.int64]:
    """Return rewards that draw weight away from columns with little of it."""
    total = float(sum(used.values()))
    rewards = np.zeros(count, dtype=np.int64)
    for j, x in used.items():
        rewards[j - offset] = _REWARD_NOISE - int(_REWARD_NOISE / (1 + 50 * float(x) / total))
    return rewards


def _rewards_of_neighbour(
    kept: ApproximateVertex, offset: int, noise: NDArray[np.int64], random: RandomStream
) -> NDArray[np.int64]:
    """Return rewards that keep to a packing except for one or two of its trees: a walk to a neighbour."""
    rewards = _reweighted_rewards(kept, offset, len(noise)) + noise // 8
    trees = sorted(kept)
    for place in random.whole(2, len(trees)).tolist():
        rewards[trees[place] - offset] = -_REWARD_NOISE
    return rewards


ProgressCallback = Callable[[str], None]

OTHER_COLUMNS = 3
"""Further trees that are priced for an only root before the master is solved again."""

DEARER_COLUMNS = 4
"""For each of them the links of the last tree become dearer, together by one part in so many of its price."""

GUIDED_ROWS = 64
"""Rows from which floating point guides the master; if heights are priced by tables, only with wide limits."""

GUIDED_BITS = 16
"""Bits beyond which a limit is wide: exact tables then soon outgrow machine words; without tables half the rows do."""


@dataclass
class ColumnGeneration:
    """The master program of one packing problem, and its trees.

    ``gain`` is the weight of a unit of rate in the objective, for programs with a second objective.
    """

    pricing: Pricing
    progress: ProgressCallback | None = None
    trees: list[TreeColumn] = field(default_factory=list)
    gain: int = 1
    deadline: Deadline = field(default_factory=lambda: Deadline(None))

    def __post_init__(self) -> None:
        if self.progress is not None:
            check_function("progress", self.progress)
        packing = self.packing
        self.rows = len(packing.limits)
        self.known: set[TreeColumn] = set()
        groups = packing.owner_rows
        wide = packing.uneven or max(packing.limits).bit_length() > GUIDED_BITS
        few = has_exact_tables(packing.fabric) and not packing.uneven
        self.guided = self.rows >= (GUIDED_ROWS // 2 if wide and not few else GUIDED_ROWS) and (
            wide or not few
        )
        limits = [*packing.limits, *[0] * groups]
        self.program: PackingSimplex | GuidedSimplex
        if self.guided:
            from topoplan.solve.simplex.guided_simplex import GuidedSimplex

            self.program = GuidedSimplex(limits, size=packing.column_size)
        else:
            self.program = PackingSimplex(limits)
        self.offset = 0
        if groups:
            # One more column counts the rate of one rank: |orbit| x rate - sum of the orbit's trees <= 0.
            self.program.add([[*[0] * self.rows, *packing.owner_parts]], [self.gain])
            self.offset = 1

    @property
    def packing(self) -> Packing:
        return self.pricing.packing

    @property
    def value(self) -> Fraction:
        """Rate of the packing in units of the packing's scale."""
        return self.program.value * self.packing.rate_of_one

    def add(self, trees: Sequence[TreeColumn]) -> int:
        """Add trees to the master; return the number of new ones."""
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
        """Generate trees until the target is reached; return False if pricing finds nothing better or time is up.

        The run stops as soon as exact pricing proves that the height does not allow the value ``hopeless``.
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

    def pack_known(self, target: Fraction) -> bool:
        """Pack the trees that have been added; return whether they reach the target."""
        goal = target / self.packing.rate_of_one
        self.program.optimise(target=goal)
        return self.program.reaches(goal)

    def _proved(self, lengths: list[int], priced: list[tuple[TreeColumn, int]]) -> Fraction:
        """Return the bound that lengths prove for columns of this height: sum of c y over the cheapest forest."""
        total = sum(c * y for c, y in zip(self.packing.limits, lengths, strict=True))
        cheapest: dict[int, int] = {}
        for tree, length in priced:
            row = self.packing.owner_row(tree)
            cheapest[row] = min(length, cheapest.get(row, length))
        parts = self.packing.owner_parts if self.packing.shared else [1]
        forest = Fraction(sum(n * cheapest[row] for row, n in enumerate(parts))) / self.packing.rate_of_one
        return total / forest if forest else Fraction(total + 1) * 10**9

    def _add_others(self, lengths: list[int], price: int) -> None:
        """Add more cheap trees beside the latest of an only root, whose links are made dearer repeatedly."""
        bumped = lengths
        for _ in range(OTHER_COLUMNS):
            tree = self.trees[-1]
            dearer = price // (DEARER_COLUMNS * sum(tree.usage))
            bumped = [length + dearer * times for length, times in zip(bumped, tree.usage, strict=True)]
            other = self.pricing.cheapest(bumped)[0]
            if length_of(other, lengths) >= price or not self.add([other]):
                return

    def duals(self) -> list[int]:
        """Return the dual value of every row over a common denominator."""
        return self.program.duals()[0][: self.rows]

    def weights(self) -> dict[TreeColumn, Fraction]:
        """Return the weight of every used tree."""
        solution = self.program.solution()
        return {self.trees[j - self.offset]: x for j, x in solution.items() if j >= self.offset}

    def fewer_trees(self, random: RandomStream, *, least: int, walks: int) -> dict[TreeColumn, Fraction]:
        """Return weights of the same value with few trees, all their images counted; ``least`` is enough."""
        best, count = self.weights(), self.packing.image_count
        found = cheapest_vertex(
            self.program,
            random,
            offset=self.offset,
            least=least,
            cost=lambda vertex: sum(count(self.trees[j - self.offset]) for j in vertex),
            walks=walks,
            deadline=self.deadline,
        )
        if found is None:
            return best
        fewer = {self.trees[j - self.offset]: x for j, x in found.items()}
        return fewer if sum(map(count, fewer)) < sum(map(count, best)) else best

    def _first_lengths(self) -> list[int]:
        """Return the lengths to start with: inverse capacities."""
        packing = self.packing
        single = [limit // width for limit, width in zip(packing.limits, packing.widths, strict=True)]
        return [1000 * max(single) // c for c in single]
