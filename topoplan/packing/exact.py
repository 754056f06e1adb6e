"""Optimal packings by exact column generation, then of the lowest height, then of few trees.

The master program packs the trees known so far (`topoplan.simplex.exact_simplex`); its dual values are lengths of the
links, and the oracle answers with the cheapest trees under them. The first bound comes from flows alone
(`topoplan.bounds.cuts_and_partitions`). Where a packing reaches it, that is the proof. Where none does (switches that
cannot copy, asymmetric ports), the final duals are the proof: dual lengths under which every forest is long enough.

Height: heights are tried from the lowest on, and each is refuted by its own duals before the next is tried, so the
height is the lowest possible. The oracle prices limited heights exactly up to 9 ranks, on switches that only forward,
over routes that can be listed; for everything else see `topoplan.packing.exact_symmetric`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from topoplan.bounds.cuts_and_partitions import best_bound
from topoplan.columns.generation import Generation, Progress
from topoplan.columns.pricing import Pricing
from topoplan.columns.problem import Packing, TreeColumn
from topoplan.errors import PlanError
from topoplan.fabric.fabric import Fabric
from topoplan.packing.fewest_trees import fewest_peeled, thin
from topoplan.plans.certificates import Certificate
from topoplan.simplex.time_limit import UNDONE, Deadline, deadline_of, out_of_time

ORDERS = ("height", "trees")
"""What is minimised first among packings of equal rate."""


@dataclass(frozen=True, slots=True)
class ExactPacking:
    """An optimal packing.

    Parameters
    ----------
    weights : dict of TreeColumn to Fraction
        Rate of each column in units of 1 / scale GB/s.
    certificate : Certificate
    notes : tuple of str
        What a time limit cut short.
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
    time_limit: float | Deadline | None = None,
    progress: Progress | None = None,
) -> ExactPacking:
    """The optimal packing of a collective, with its proof.

    Parameters
    ----------
    fabric : Fabric
        2 to 9 connected ranks; switches only forward. Heights are found where it `has_tables`.
    collective : str
    root : int or None
        Root rank of a broadcast or reduce.
    order : str
        ``height``: lowest height, then few trees. ``trees``: few trees, whatever their height.
    time_limit : float, Deadline or None
        Seconds after which the best packing so far is taken.
    progress : callable or None
        Called with a line of text now and then.

    Returns
    -------
    ExactPacking

    Notes
    -----
    The number of columns stays near the number of links. DGX-1V takes milliseconds.
    """
    deadline = deadline_of(time_limit)
    packing = Packing(fabric, collective, root)
    certificate = best_bound(fabric, collective, root)
    target = certificate.bound(fabric, collective, root) * packing.scale
    tight = certificate
    generator = Generation(Pricing(packing), progress=progress, deadline=deadline)
    if not generator.run(target):
        if deadline.cut:
            return _cut_short(generator, certificate)
        target = generator.value
        certificate = tight = packing.certificate(generator.duals())
    if order == "height":
        generator = _lowest(packing, target, generator, progress)
    weights = thin(generator, packing.row_lengths(tight.link_lengths(fabric, collective)))
    if order == "trees" and not deadline.over():
        weights = fewest_peeled(packing, target, fewer_than=len(weights)) or weights
    return ExactPacking(weights, certificate, (deadline.note(UNDONE),) if deadline.cut else ())


def _cut_short(generator: Generation, certificate: Certificate) -> ExactPacking:
    """What is known of a packing whose time is up: the better of two bounds, and how far below it the rate is."""
    packing = generator.packing
    bounds = []
    for candidate in (certificate, packing.certificate(generator.duals())):
        try:
            bound = candidate.bound(packing.fabric, packing.collective, packing.root)
        except PlanError:
            # Lengths of a search under way may prove nothing.
            continue
        bounds.append((bound, candidate))
    bound, best = min(bounds, key=lambda pair: pair[0])
    note = generator.deadline.note(out_of_time(float(generator.value / packing.scale), float(bound)))
    return ExactPacking(generator.weights(), best, (note,))


def _lowest(
    packing: Packing, target: Fraction, generator: Generation, progress: Progress | None
) -> Generation:
    """Column generation at the lowest height that reaches the target."""
    tallest = max(tree.height for tree in generator.weights())
    pool = generator.trees
    for height in range(1, tallest):
        if generator.deadline.over():
            return generator
        limited = Generation(Pricing(packing, height), progress=progress, deadline=generator.deadline)
        limited.add([tree for tree in pool if tree.height <= height])
        if limited.run(target, hopeless=target):
            return limited
        pool = sorted({*pool, *limited.trees}, key=lambda tree: tree.order)
    if generator.deadline.over():
        return generator
    limited = Generation(Pricing(packing, tallest), progress=progress, deadline=generator.deadline)
    limited.add([tree for tree in pool if tree.height <= tallest])
    return limited if limited.run(target) else generator
