"""Column generation: a packing program that asks the oracle for the trees it needs.

The master packs the trees known so far; its dual values are lengths of the links, and the oracle answers with the
cheapest trees under them. For allgather and reduce-scatter, where every owner has the same part of the buffer, one
more column counts the rate that all owners reach.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from math import lcm

from topoplan.columns.pricing import Oracle
from topoplan.columns.problem import Packing, TreeColumn
from topoplan.plans.certificates import Lengths, OneFabric
from topoplan.simplex.exact_simplex import PackingSimplex
from topoplan.simplex.time_limit import Deadline

Progress = Callable[[str], None]


@dataclass
class ColumnGeneration:
    """The master program of one packing problem and the columns it knows."""

    packing: Packing
    height: int | None = None
    progress: Progress | None = None
    columns: list[TreeColumn] = field(default_factory=list)
    deadline: Deadline = field(default_factory=lambda: Deadline(None))

    def __post_init__(self) -> None:
        packing = self.packing
        self.oracle = Oracle(packing)
        self.known: set[TreeColumn] = set()
        grouped = packing.groups > 1
        self.rows = len(packing.limits)
        limits = [int(c) for c in packing.limits] + [0] * (packing.groups if grouped else 0)
        self.program = PackingSimplex(limits)
        self.offset = 0
        if grouped:
            # One more column counts the rate that every group reaches: rate - sum of its trees <= 0.
            self.program.add([[0] * self.rows + [1] * packing.groups], [1])
            self.offset = 1

    @property
    def value(self) -> Fraction:
        """Rate of the packing in units of the packing's scale."""
        return self.program.value * self.packing.groups

    def add(self, columns: list[TreeColumn]) -> None:
        """Make columns known to the master."""
        packing = self.packing
        fresh = [column for column in columns if column not in self.known]
        vectors = []
        for column in fresh:
            vector = [int(x) for x in packing.usage(column)]
            if packing.groups > 1:
                vector += [-int(packing.group(column) == g) for g in range(packing.groups)]
            vectors.append(vector)
        self.program.add(vectors, [0 if packing.groups > 1 else 1] * len(fresh))
        self.columns.extend(fresh)
        self.known.update(fresh)

    def run(self, target: Fraction, hopeless: Fraction | None) -> bool:
        """Generate columns until the target is reached; False when it is out of reach or time is up.

        ``hopeless``: stop as soon as the duals prove that the height does not allow this value.
        """
        packing = self.packing
        goal = target / packing.groups
        lengths = self._first_lengths()
        prices: list[int] | None = None
        while True:
            found = self.oracle.cheapest(lengths, self.height)
            if len(found) < len(packing.roots) and (packing.groups > 1 or not found):
                return False
            improving = [
                column
                for root, (length, column) in sorted(found.items())
                if prices is None or length < prices[packing.group(column) if packing.groups > 1 else 0]
            ]
            fresh = [column for column in improving if column not in self.known]
            if prices is not None:
                refuted = hopeless is not None and self._dual_value(lengths, found) < hopeless
                if (refuted or not fresh) and self.oracle.learn(lengths):
                    continue
                if refuted or not fresh:
                    return not refuted and self.value >= target
            self.add(fresh)
            self.program.optimise(target=goal)
            if self.value >= target:
                return True
            if self.deadline.over():
                return False
            duals, denominator = self.program.duals()
            lengths = duals[: self.rows]
            prices = duals[self.rows :] if packing.groups > 1 else [denominator]
            if self.progress is not None:
                self.progress(
                    f"packing: {len(self.columns)} trees, {float(self.value / packing.scale):.6g} GB/s"
                )

    def _first_lengths(self) -> list[int]:
        """Lengths to start with: inverse capacities."""
        limits = [int(c) for c in self.packing.limits]
        largest = max(limits)
        return [1000 * largest // c for c in limits]

    def _dual_value(self, lengths: list[int], found: dict[int, tuple[int, TreeColumn]]) -> Fraction:
        """The bound that lengths prove for columns of this height: sum of c y over the cheapest forest."""
        total = sum(int(c) * y for c, y in zip(self.packing.limits, lengths, strict=True))
        cheapest = [length for length, _ in found.values()]
        forest = (
            Fraction(sum(cheapest), self.packing.groups)
            if self.packing.groups > 1
            else Fraction(min(cheapest))
        )
        return total / forest if forest else Fraction(total + 1) * 10**9

    def used(self) -> list[TreeColumn]:
        """Columns with weight in the current solution."""
        return sorted(self.weights())

    def weights(self) -> dict[TreeColumn, Fraction]:
        """Weight of every column in use."""
        solution = self.program.solution()
        return {self.columns[j - self.offset]: x for j, x in solution.items() if j >= self.offset}

    def lengths(self) -> Lengths:
        """The current duals as a certificate."""
        duals, denominator = self.program.duals()
        packing = self.packing
        half = Fraction(1, 2) if packing.folded else Fraction(1)
        return Lengths(
            tuple(
                (link.src, link.dst, duals[row] * half / denominator)
                for link, row in zip(packing.fabric.links, packing.row_of_link.tolist(), strict=True)
                if duals[row]
            )
        )

    def row_lengths(self, certificate: OneFabric) -> list[int]:
        """Lengths of the rows under which every tree of an optimal packing is a cheapest one."""
        packing = self.packing
        values = certificate.link_lengths(packing.fabric, packing.collective)
        scale = lcm(*(value.denominator for value in values))
        lengths = [0] * self.rows
        for row, value in zip(packing.row_of_link.tolist(), values, strict=True):
            lengths[row] = int(value * scale)
        return lengths
