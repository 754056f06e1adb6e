"""Optimal packings by exact column generation, then of the lowest height, then of few trees.

The master program packs the trees known so far (`topoplan.packing.simplex`); its dual values are lengths of the links,
and the oracle answers with the cheapest trees under them. The first bound comes from flows alone
(`topoplan.packing.bounds`). Where a packing reaches it, that is the proof. Where none does (switches that cannot
copy, asymmetric ports), the final duals are the proof: dual lengths under which every forest is long enough.

Height: heights are tried from the lowest on, and each is refuted by its own duals before the next is tried, so the
height is the lowest possible wherever the oracle prices limited heights exactly (up to 9 ranks); on larger machines
the trees are as the unlimited packing gives them and the plan says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from topoplan.packing.bounds import best_bound
from topoplan.packing.columns import Packing, TreeColumn
from topoplan.packing.oracle import Oracle
from topoplan.packing.peeling import Peeler
from topoplan.packing.simplex import PackingSimplex
from topoplan.packing.stream import Stream
from topoplan.packing.thinning import thin
from topoplan.plans.certificate import Certificate, Lengths, certified_bound
from topoplan.plans.fabric import Fabric

ORDERS = ("height", "trees")
"""What is minimised first among packings of equal rate."""

PEELINGS = 6
PEELING_CANDIDATES = 8

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ExactPacking:
    """An optimal packing.

    Parameters
    ----------
    weights : dict of TreeColumn to Fraction
        Rate of each column in units of 1 / scale GB/s.
    certificate : Certificate
    notes : tuple of str
        What could not be proved.
    """

    weights: dict[TreeColumn, Fraction]
    certificate: Certificate
    notes: tuple[str, ...] = ()


def pack_exact(
    fabric: Fabric,
    collective: str,
    *,
    root: int | None = None,
    order: str = "height",
    progress: Progress | None = None,
) -> ExactPacking:
    """The optimal packing of a collective, with its proof.

    Parameters
    ----------
    fabric : Fabric
        At least two connected ranks.
    collective : str
    root : int or None
        Root rank of a broadcast or reduce.
    order : str
        ``height``: lowest height, then few trees. ``trees``: few trees, whatever their height.
    progress : callable or None
        Called with a line of text now and then.

    Returns
    -------
    ExactPacking

    Notes
    -----
    The number of columns stays near the number of links. DGX-1V takes milliseconds.
    """
    packing = Packing(fabric, collective, root)
    certificate = best_bound(fabric, collective, root)
    bound = certified_bound(certificate, fabric, collective, root)
    target = bound * packing.scale
    generator = _ColumnGeneration(packing, progress=progress)
    if not generator.run(target, None):
        target = generator.value
        certificate = generator.lengths()
    notes: tuple[str, ...] = ()
    if order == "height":
        generator, notes = _lowest(packing, target, generator, progress)
    weights = thin(generator, generator.certificate_lengths(certificate))
    if order == "trees":
        weights = _peeled(packing, target, weights)
    return ExactPacking(weights, certificate, notes)


def _peeled(
    packing: Packing, target: Fraction, weights: dict[TreeColumn, Fraction]
) -> dict[TreeColumn, Fraction]:
    """The packing of fewest trees among the given one and some peelings."""
    peeler = Peeler(packing)
    if peeler.applies:
        stream = Stream(1)
        for _ in range(PEELINGS):
            fewer = peeler.peel(target, stream, candidates=PEELING_CANDIDATES, fewer_than=len(weights))
            weights = fewer or weights
    return weights


def _lowest(
    packing: Packing, target: Fraction, generator: _ColumnGeneration, progress: Progress | None
) -> tuple[_ColumnGeneration, tuple[str, ...]]:
    """Column generation at the lowest height that reaches the target."""
    if not generator.oracle.exact_heights:
        return generator, (
            f"heights are proved lowest up to 9 ranks; with {packing.fabric.size} the trees are as found",
        )
    tallest = max(packing.height(column) for column in generator.used())
    pool = generator.columns
    for height in range(1, tallest):
        limited = _ColumnGeneration(packing, height=height, progress=progress)
        limited.add([column for column in pool if packing.height(column) <= height])
        if limited.run(target, target):
            return limited, ()
        pool = sorted({*pool, *limited.columns})
    limited = _ColumnGeneration(packing, height=tallest, progress=progress)
    limited.add([column for column in pool if packing.height(column) <= tallest])
    limited.run(target, None)
    return limited, ()


@dataclass
class _ColumnGeneration:
    """The master program of one packing problem and the columns it knows."""

    packing: Packing
    height: int | None = None
    progress: Progress | None = None
    columns: list[TreeColumn] = field(default_factory=list)

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
        """Generate columns until the target is reached; False when it is out of reach.

        ``hopeless``: stop as soon as the duals prove that the height does not allow this value.
        """
        packing = self.packing
        goal = target / packing.groups
        lengths = self._first_lengths()
        prices: list[int] | None = None
        rounds = 0
        while True:
            found = self.oracle.cheapest(lengths, self.height)
            if len(found) < len(packing.roots) and (packing.groups > 1 or not found):
                return False
            improving = [
                column
                for root, (length, column) in sorted(found.items())
                if prices is None or length < prices[packing.group(column) if packing.groups > 1 else 0]
            ]
            if prices is not None and hopeless is not None and self._dual_value(lengths, found) < hopeless:
                return False
            fresh = [column for column in improving if column not in self.known]
            if prices is not None and not fresh:
                return self.value >= target
            self.add(fresh)
            self.program.optimise(target=goal)
            if self.value >= target:
                return True
            duals, denominator = self.program.duals()
            lengths = duals[: self.rows]
            prices = duals[self.rows :] if packing.groups > 1 else [denominator]
            rounds += 1
            if self.progress is not None and rounds % 50 == 0:
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

    def certificate_lengths(self, certificate: Certificate) -> list[int]:
        """Lengths of the rows under which every tree of an optimal packing is a cheapest one."""
        packing, fabric = self.packing, self.packing.fabric
        values = certificate_values(certificate, fabric, packing.collective)
        lengths = np.zeros(self.rows, dtype=object)
        for row, value in zip(packing.row_of_link.tolist(), values, strict=True):
            lengths[row] = value
        scale = int(np.lcm.reduce([value.denominator for value in values], dtype=object))
        return [int(value * scale) for value in lengths]


def certificate_values(certificate: Certificate, fabric: Fabric, collective: str) -> list[Fraction]:
    """The length that a certificate gives every link: 1 across a cut or partition, or the listed value."""
    if isinstance(certificate, Lengths):
        listed = {(src, dst): value for src, dst, value in certificate.lengths}
        return [listed.get((link.src, link.dst), Fraction(0)) for link in fabric.links]
    parts = getattr(certificate, "parts", None) or (getattr(certificate, "side", ()),)
    part_of = {name: number for number, part in enumerate(parts) for name in part}
    both = collective == "allreduce"
    forward = collective in ("broadcast", "allgather")
    values = []
    for link in fabric.links:
        src, dst = part_of.get(link.src, -1), part_of.get(link.dst, -1)
        crosses = src != dst if both else (src == 0 and dst == -1) if forward else (src == -1 and dst == 0)
        values.append(Fraction(int(crosses)))
    return values
