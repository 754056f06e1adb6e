"""Optimal packings by exact column generation, then of the lowest height, then of few trees.

The master program packs the trees known so far (`topoplan.packing.simplex`); its dual values are lengths of the links,
and the oracle answers with the cheapest trees under them. The first bound comes from flows alone
(`topoplan.packing.bounds`). Where a packing reaches it, that is the proof. Where none does (switches that cannot
copy, asymmetric ports), the final duals are the proof: dual lengths under which every forest is long enough.

Height: heights are tried from the lowest on (`topoplan.packing.heights`), up to 9 ranks each refuted before the next
is tried. On more ranks low heights come before all else: where one reaches the bound, no unlimited packing is needed;
where none does, the trees are as peeling (`topoplan.packing.peeling`) or the unlimited packing gives them. The plan
says what was not proved.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from topoplan.packing.bounds import best_bound
from topoplan.packing.column_generation import ColumnGeneration, Progress
from topoplan.packing.columns import Packing, TreeColumn
from topoplan.packing.heights import LowestFound, lowest
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
    generator = ColumnGeneration(packing, progress=progress)
    few = generator.oracle.exact_heights
    tries = LowestFound(packing, progress)
    if not few:
        low = tries.reach(target) if order == "height" else None
        if low is not None:
            return ExactPacking(thin(low, low.row_lengths(certificate)), certificate, tries.doubts(low))
        # With this many ranks peeling is many times quicker than the program.
        peeled = _peeled(packing, target, len(packing.limits) + fabric.size, 1)
        if peeled is not None:
            return ExactPacking(peeled, certificate, (_heights_as_found(fabric),))
    tight = certificate
    notes: tuple[str, ...] = ()
    generator.add(tries.pool)
    if not generator.run(target, None):
        target = generator.value
        tight = generator.lengths()
        if fabric.in_network:
            notes = (
                "switches that copy or add are used as plain switches; the bound allows for what they could do",
            )
        else:
            certificate = tight
    if order == "height" and few:
        generator = lowest(packing, target, generator, progress)
    elif order == "height":
        low = tries.reach(target)
        notes += tries.doubts(low) if low else (_heights_as_found(fabric),)
        generator = low or generator
    weights = thin(generator, generator.row_lengths(tight))
    if order == "trees":
        weights = _peeled(packing, target, len(weights), PEELINGS) or weights
    return ExactPacking(weights, certificate, notes)


def _peeled(
    packing: Packing, target: Fraction, fewer_than: int, passes: int
) -> dict[TreeColumn, Fraction] | None:
    """The packing of fewest trees among some peelings, if one has fewer than asked."""
    peeler = Peeler(packing)
    stream = Stream(1)
    best = None
    for _ in range(passes if peeler.applies else 0):
        fewer = peeler.peel(target, stream, candidates=PEELING_CANDIDATES, fewer_than=fewer_than)
        if fewer is not None:
            best, fewer_than = fewer, len(fewer)
    return best


def _heights_as_found(fabric: Fabric) -> str:
    return f"heights are proved lowest up to {LARGEST} ranks; with {fabric.size} the trees are as found"
