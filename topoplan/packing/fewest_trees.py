"""Fewer trees at the same rate: among the corners of the optimal face, or by peeling.

Among the corners of the optimal face (`topoplan.simplex.reweighted_vertices`) one with few trees is looked for. Trees
to choose from are the cheapest ones under the certificate's lengths, since no other tree is in any optimal packing. The
search ends early when the number of trees meets a lower bound that the certificate implies.

Peeling takes out one tree at a time, each with the largest weight that leaves the rest optimal. If the best packing of
capacities c is worth R, then a tree T may carry w exactly when the rest, c - w T, is still worth R - w. The largest
such w is found by Newton's method on the weakest cut or partition of the rest, so each step costs a few flows.
Candidates are cheapest trees under the lengths of the current weakest cut, wide links first. For broadcast, reduce, and
allreduce on direct symmetric links, where flows alone give the value of the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from topoplan.bounds.cuts_and_partitions import smallest_cut, weakest_partition
from topoplan.columns.generation import Generation
from topoplan.columns.pricing import Pricing, length_of
from topoplan.columns.problem import Packing, TreeColumn
from topoplan.simplex.random_numbers import Stream
from topoplan.simplex.reweighted_vertices import WALKS, WORK

POOL = 200
"""Trees to look for, apart from those that the packing already knows."""
STALE = 16
"""Rounds without a new tree after which the search for trees ends."""
PEELINGS = 6
PEELING_CANDIDATES = 8
_NOISE = 1000


def thin(master: Generation, lengths: list[int]) -> dict[TreeColumn, Fraction]:
    """Weights of an optimal packing with few trees.

    Parameters
    ----------
    master : Generation
        Column generation that has reached the optimal value.
    lengths : list of int, one per row
        Lengths under which every tree of an optimal packing is a cheapest one.

    Returns
    -------
    dict of TreeColumn to Fraction
        Deterministic: the random walks come from a fixed stream.
    """
    best = master.weights()
    least = fewest_possible(master.packing, lengths)
    if len(best) <= least or master.program.work > WORK or master.deadline.over():
        return best
    random = Stream(0)
    master.add(_tight_columns(master, lengths, random))
    return master.fewer_trees(random, least=least, walks=WALKS)


def fewest_possible(packing: Packing, lengths: list[int]) -> int:
    """A number of trees below which no packing can fill every row that has a length.

    With lengths 0 and 1 each optimal tree crosses exactly ``L`` of the rows of length 1, and all of them are full:
    rows / L trees at least.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.plans import Fabric
    >>> fabric = Fabric(topoplan.load("dgx-1v"), ("nvlink",))
    >>> packing = Packing(fabric, "broadcast", 0)
    >>> fewest_possible(packing, [int(link.src == "gpu0") for link in fabric.links])
    4
    """
    positive = [y for y in lengths if y]
    if not positive or len(set(positive)) > 1:
        return packing.owners
    unit = [int(bool(y)) for y in lengths]
    if packing.shared:
        return packing.owners
    crossed = min(length_of(tree, unit) for tree in Pricing(packing).cheapest(unit).values())
    return -(-len(positive) // crossed) if crossed else 1


def _tight_columns(master: Generation, lengths: list[int], random: Stream) -> list[TreeColumn]:
    """Columns that are cheapest under the lengths, found by breaking ties at random."""
    packing, pricing = master.packing, master.pricing
    top = max(lengths)
    # The noise of a whole column must stay below one unit of length.
    unit = _NOISE * 4 * packing.fabric.size * max(arc.hops for arc in packing.fabric.arcs)
    if top * unit >= 1 << 30:
        return []
    cheapest = {place: length_of(tree, lengths) for place, tree in pricing.cheapest(lengths).items()}
    if not packing.shared:
        cheapest = dict.fromkeys(cheapest, min(cheapest.values()))
    found: set[TreeColumn] = set()
    stale = 0
    widths = sorted(set(packing.limits))[-4:]
    for turn in range(-(-POOL // len(packing.roots))):
        # Trees over wide links can carry much: in turn, links narrower than each width come last among equals.
        narrow = np.array(packing.limits) < widths[turn % len(widths)]
        noise = random.whole(len(lengths), _NOISE) + 2 * _NOISE * narrow
        noisy = [y * unit + int(z) for y, z in zip(lengths, noise, strict=True)]
        before = len(found)
        for place, tree in pricing.cheapest(noisy).items():
            if length_of(tree, lengths) == cheapest[place]:
                found.add(tree)
        stale = stale + 1 if len(found) == before else 0
        if stale == STALE or len(found) >= POOL:
            break
    return sorted(found, key=lambda tree: tree.order)


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


def fewest_peeled(
    packing: Packing, target: Fraction, *, fewer_than: int
) -> dict[TreeColumn, Fraction] | None:
    """Weights of the optimal packing of fewest trees among some peelings, or None where none has fewer than asked."""
    peeler = Peeler(packing)
    best: dict[TreeColumn, Fraction] | None = None
    if peeler.applies:
        stream = Stream(1)
        for _ in range(PEELINGS):
            found = peeler.peel(target, stream, candidates=PEELING_CANDIDATES, fewer_than=fewer_than)
            if found is not None:
                best, fewer_than = found, len(found)
    return best
