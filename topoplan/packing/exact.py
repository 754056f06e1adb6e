"""Optimal packings by exact column generation, then of the lowest height, then of few trees.

The master program packs the trees known so far (`topoplan.packing.simplex`); its dual values are lengths of the links,
and the oracle answers with the cheapest trees under them. The first bound comes from flows alone
(`topoplan.packing.bounds`). Where a packing reaches it, that is the proof. Where none does (switches that cannot
copy, asymmetric ports), the final duals are the proof: dual lengths under which every forest is long enough.

Height: heights are tried from the lowest on, and each is refuted by its own duals before the next is tried, so the
height is the lowest possible. The oracle prices limited heights exactly up to 9 ranks, on switches that only forward;
for everything else see `topoplan.packing.exact_orbits`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from topoplan.packing.bounds import best_bound
from topoplan.packing.column_generation import ColumnGeneration, Progress
from topoplan.packing.columns import Packing, TreeColumn
from topoplan.packing.peeling import Peeler
from topoplan.packing.stream import Stream
from topoplan.packing.thinning import thin
from topoplan.plans.certificate import Certificate, certified_bound
from topoplan.plans.fabric import Fabric

ORDERS = ("height", "trees")
"""What is minimised first among packings of equal rate."""

PEELINGS = 6
PEELING_CANDIDATES = 8


@dataclass(frozen=True, slots=True)
class ExactPacking:
    """An optimal packing.

    Parameters
    ----------
    weights : dict of TreeColumn to Fraction
        Rate of each column in units of 1 / scale GB/s.
    certificate : Certificate
    """

    weights: dict[TreeColumn, Fraction]
    certificate: Certificate


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
        2 to 9 connected ranks; switches only forward.
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
    target = certified_bound(certificate, fabric, collective, root) * packing.scale
    tight = certificate
    generator = ColumnGeneration(packing, progress=progress)
    if not generator.run(target, None):
        target = generator.value
        certificate = tight = generator.lengths()
    if order == "height":
        generator = _lowest(packing, target, generator, progress)
    weights = thin(generator, generator.row_lengths(tight))
    if order == "trees":
        weights = _peeled(packing, target, weights)
    return ExactPacking(weights, certificate)


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
    packing: Packing, target: Fraction, generator: ColumnGeneration, progress: Progress | None
) -> ColumnGeneration:
    """Column generation at the lowest height that reaches the target."""
    tallest = max(packing.height(column) for column in generator.used())
    pool = generator.columns
    for height in range(1, tallest):
        limited = ColumnGeneration(packing, height=height, progress=progress)
        limited.add([column for column in pool if packing.height(column) <= height])
        if limited.run(target, target):
            return limited
        pool = sorted({*pool, *limited.columns})
    limited = ColumnGeneration(packing, height=tallest, progress=progress)
    limited.add([column for column in pool if packing.height(column) <= tallest])
    limited.run(target, None)
    return limited
