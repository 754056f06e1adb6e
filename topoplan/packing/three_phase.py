"""Plans of three phases with the proof of how good they are: composed trees under the bound on any plan.

The bound is the lowest of: flows; the dual lengths of the composition's own program, where they prove anything; and
on small fabrics, where neither is reached, the certificate of the exact method, which is run for it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from fractions import Fraction

from topoplan.columns.generation import Progress
from topoplan.errors import InfeasibleError, PlanError, UsageError
from topoplan.fabric.fabric import Fabric
from topoplan.packing.exact import pack_exact
from topoplan.packing.hierarchical import Composition, compose
from topoplan.plans.build import build_plan
from topoplan.plans.certificates import Certificate
from topoplan.plans.loads import forest_rate
from topoplan.plans.plan import Plan

THREE_PHASE = "three-phase"

MOST_RANKS = 16
"""Ranks up to which the exact method is run for its certificate."""


def plan_three_phase(
    fabric: Fabric,
    collective: str,
    *,
    root: int | None = None,
    certificate: Certificate | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The best composition as a plan, and in its notes what it gives up.

    Parameters
    ----------
    fabric, collective, root, progress
        As `topoplan.packing.hierarchical.compose`.
    certificate : Certificate or None
        The proof of a general plan for the same fabric, where it is at hand; then no other is looked for.

    Raises
    ------
    UsageError, InfeasibleError
        As `topoplan.packing.hierarchical.compose`.
    """
    composed = compose(fabric, collective, root=root, certificate=certificate, progress=progress)
    rate = forest_rate(composed.shards, fabric)
    assert rate is not None, "trees over two servers cross links"
    proof = composed.certificate
    notes: tuple[str, ...] = ()
    if rate < composed.bound and certificate is None:
        proof, notes = _lower_bound(composed, fabric, collective, root, rate, progress)
    made = build_plan(
        fabric,
        collective,
        root=root,
        shards=composed.shards,
        certificate=proof,
        schedule=THREE_PHASE,
        method=THREE_PHASE,
        notes=notes,
    )
    if made.gap == 0:
        return replace(made, notes=())
    lost = f"three phases stay {made.gap:.2%} below the bound of {made.bound:.6g} GB/s on any plan over these links"
    return replace(made, notes=(lost, *notes))


def composed_optimum(
    fabric: Fabric, collective: str, *, root: int | None = None, progress: Progress | None = None
) -> Plan | None:
    """A plan of three phases where one reaches the bound from flows; None where none does, or none exists."""
    try:
        composed = compose(fabric, collective, root=root, progress=progress)
    except (UsageError, InfeasibleError):
        return None
    if forest_rate(composed.shards, fabric) != composed.bound:
        return None
    return build_plan(
        fabric,
        collective,
        root=root,
        shards=composed.shards,
        certificate=composed.certificate,
        schedule=THREE_PHASE,
        method=THREE_PHASE,
        notes=("three phases reach the bound; lower trees were not looked for",),
    )


def _lower_bound(
    composed: Composition,
    fabric: Fabric,
    collective: str,
    root: int | None,
    rate: Fraction,
    progress: Progress | None,
) -> tuple[Certificate, tuple[str, ...]]:
    """The best proof that is quickly had where the composition misses the first bound, and what was left out."""
    proof, bound = composed.certificate, composed.bound
    assert composed.duals is not None, "a program that misses its bound has been solved to its end"
    with suppress(PlanError):
        proved = composed.duals.bound(fabric, collective, root)
        if proved < bound:
            proof, bound = composed.duals, proved
    if rate == bound:
        return proof, ()
    if fabric.size > MOST_RANKS:
        return proof, (f"with more than {MOST_RANKS} GPUs the exact method was not run for a lower bound",)
    return pack_exact(fabric, collective, root=root, progress=progress).certificate, ()
