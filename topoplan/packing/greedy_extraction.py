"""Few trees by peeling: take out one tree at a time, each with the largest weight that leaves the rest optimal.

If the best packing of capacities c is worth R, then a tree T may carry w exactly when the rest, c - w T, is still worth
R - w. The largest such w is found by Newton's method on the weakest cut or partition of the rest, so each step
costs a few flows. Candidates are cheapest trees under the lengths of the current weakest cut, wide links first. For
broadcast, reduce, and allreduce on direct symmetric links, where flows alone give the value of the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from topoplan.bounds.cuts_and_partitions import smallest_cut, weakest_partition
from topoplan.columns.pricing import Pricing, length_of
from topoplan.columns.problem import Packing, TreeColumn
from topoplan.simplex.random_numbers import Stream

_NOISE = 1000


@dataclass(frozen=True)
class Peeler:
    """Peels packings of one problem.

    Parameters
    ----------
    packing : Packing
    """

    packing: Packing

    @property
    def applies(self) -> bool:
        """True where flows alone give the value of what is left."""
        packing = self.packing
        return packing.folded or (packing.collective in ("broadcast", "reduce") and packing.fabric.direct)

    def peel(
        self, target: Fraction, stream: Stream, *, candidates: int, fewer_than: int
    ) -> dict[TreeColumn, Fraction] | None:
        """One pass: weights of an optimal packing with fewer trees than asked, or None.

        Parameters
        ----------
        target : Fraction
            The optimal value in the packing's units.
        stream : Stream
            Breaks ties between candidates.
        candidates : int
            Trees tried for each place.
        fewer_than : int
            A pass that needs this many trees or more is given up.
        """
        rest = [Fraction(c) for c in self.packing.limits]
        value = target
        chosen: dict[TreeColumn, Fraction] = {}
        while value > 0:
            if len(chosen) + 1 >= fewer_than:
                return None
            best: tuple[Fraction, TreeColumn] | None = None
            for column in self._candidates(rest, stream, candidates):
                weight = self._largest_weight(rest, value, column)
                if best is None or weight > best[0]:
                    best = (weight, column)
            if best is None or best[0] <= 0:
                return None
            weight, column = best
            chosen[column] = chosen.get(column, Fraction(0)) + weight
            value -= weight
            rest = self._without(rest, column, weight)
        return chosen

    def _without(self, rest: list[Fraction], column: TreeColumn, weight: Fraction) -> list[Fraction]:
        return [c - weight * times for c, times in zip(rest, column.usage, strict=True)]

    def _largest_weight(self, rest: list[Fraction], value: Fraction, column: TreeColumn) -> Fraction:
        usage = column.usage
        weight: Fraction = min(value, *(c / times for c, times in zip(rest, usage, strict=True) if times))
        while weight > 0:
            crossing, needed = self._weakest(self._without(rest, column, weight))
            capacity = sum((c * y for c, y in zip(rest, crossing, strict=True)), Fraction(0))
            crossed = sum(times * y for times, y in zip(usage, crossing, strict=True))
            if capacity - weight * crossed >= needed * (value - weight):
                return weight
            weight = (capacity - needed * value) / (crossed - needed)
        return weight

    def _weakest(self, rest: list[Fraction]) -> tuple[list[int], int]:
        """Rows across the weakest cut or partition of the rest, and how many of them every tree crosses."""
        packing, fabric = self.packing, self.packing.fabric
        scale = int(np.lcm.reduce([c.denominator for c in rest], dtype=object))
        whole = [int(c * scale) for c in rest]
        capacity = [whole[row] for row in packing.orbits.row_of_link.tolist()]
        crossing = [0] * len(rest)
        if packing.folded:
            parts = weakest_partition(fabric, capacity)
            part_of = {rank: number for number, part in enumerate(parts) for rank in part}
            for (s, d), row in zip(fabric.ends, packing.orbits.row_of_link.tolist(), strict=True):
                crossing[row] = int(part_of[s] != part_of[d])
            return crossing, len(parts) - 1
        assert packing.root is not None, "broadcast and reduce have a root"
        forward = packing.collective == "broadcast"
        side = smallest_cut(fabric, capacity, packing.root, forward=forward)
        for (s, d), row in zip(fabric.ends, packing.orbits.row_of_link.tolist(), strict=True):
            crossing[row] = int((s in side and d not in side) if forward else (s not in side and d in side))
        return crossing, 1

    def _candidates(self, rest: list[Fraction], stream: Stream, count: int) -> list[TreeColumn]:
        """Trees that cross the weakest cut least often, over links with capacity left, wide ones first."""
        crossing, _ = self._weakest(rest)
        widths = sorted({c for c in rest if c > 0}, reverse=True)
        pricing = Pricing(self.packing)
        unit = 8 * _NOISE * self.packing.fabric.size
        found: list[TreeColumn] = []
        for turn in range(count):
            width = widths[turn % min(3, len(widths))]
            noise: NDArray[np.int64] = stream.whole(len(rest), _NOISE)
            lengths = [
                unit * (64 if c == 0 else y) + int(z) + (4 * _NOISE if c < width else 0)
                for c, y, z in zip(rest, crossing, noise, strict=True)
            ]
            priced = pricing.cheapest(lengths).values()
            if priced:
                column = min(priced, key=lambda each: (length_of(each, lengths), each.order))
                if column not in found:
                    found.append(column)
        return [c for c in found if all(r > 0 for r, t in zip(rest, c.usage, strict=True) if t)]
