"""Optimal packings by exact column generation, then of the lowest height, then of few trees.

The master program packs the trees known so far (`topoplan.packing.simplex`); its dual values are lengths of the links,
and the oracle answers with the cheapest trees under them. The first bound comes from flows alone
(`topoplan.packing.bounds`). Where a packing reaches it, that is the proof. Where none does (switches that cannot
copy, asymmetric ports), the final duals are the proof: dual lengths under which every forest is long enough.

Height: heights are tried from the lowest on, and each is refuted by its own duals before the next is tried, so the
height is the lowest possible wherever the oracle prices limited heights exactly (up to 9 ranks); on larger machines
the trees are as peeling (`topoplan.packing.peeling`) or the unlimited packing gives them, and the plan says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from topoplan.packing.bounds import best_bound
from topoplan.packing.column_generation import ColumnGeneration, Progress
from topoplan.packing.columns import Packing, TreeColumn
from topoplan.packing.hop_limited import LARGEST
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
    target = certified_bound(certificate, fabric, collective, root) * packing.scale
    tight = certificate
    generator = ColumnGeneration(packing, progress=progress)
    peeler = Peeler(packing)
    if peeler.applies and not generator.oracle.exact_heights:
        # With this many ranks heights are not priced anyway, and peeling is many times quicker than the program.
        peeled = peeler.peel(
            target, Stream(1), candidates=PEELING_CANDIDATES, fewer_than=len(packing.limits) + fabric.size
        )
        if peeled is not None:
            return ExactPacking(peeled, certificate, (_heights_as_found(fabric),))
    notes: tuple[str, ...] = ()
    if not generator.run(target, None):
        target = generator.value
        tight = generator.lengths()
        if fabric.in_network:
            notes = (
                "switches that copy or add are used as plain switches; the bound allows for what they could do",
            )
        else:
            certificate = tight
    if order == "height":
        generator, doubts = _lowest(packing, target, generator, progress)
        notes += doubts
    weights = thin(generator, generator.row_lengths(tight))
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
    packing: Packing, target: Fraction, generator: ColumnGeneration, progress: Progress | None
) -> tuple[ColumnGeneration, tuple[str, ...]]:
    """Column generation at the lowest height that reaches the target."""
    if not generator.oracle.exact_heights:
        return generator, (_heights_as_found(packing.fabric),)
    tallest = max(packing.height(column) for column in generator.used())
    pool = generator.columns
    for height in range(1, tallest):
        limited = ColumnGeneration(packing, height=height, progress=progress)
        limited.add([column for column in pool if packing.height(column) <= height])
        if limited.run(target, target):
            return limited, ()
        pool = sorted({*pool, *limited.columns})
    limited = ColumnGeneration(packing, height=tallest, progress=progress)
    limited.add([column for column in pool if packing.height(column) <= tallest])
    limited.run(target, None)
    return limited, ()


def _heights_as_found(fabric: Fabric) -> str:
    return f"heights are proved lowest up to {LARGEST} ranks; with {fabric.size} the trees are as found"
