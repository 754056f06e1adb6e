"""Any allreduce plan on entries: every tree carries the largest entries of its shard instead of all elements.

A reduce tree adds up the entries that arrive at a rank, keeps as many as one message holds, the largest, and sends them
on; the root hands its own down. One low tree is gTop-k; one star for each rank, where each owns its part of the buffer,
balances load as Ok-Topk does, with fixed borders between the parts. What a rank drops stays in its residual.

References
----------
Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low Bandwidth Networks", ICDCS
2019 (gTop-k). Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022 (Ok-Topk).
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from topoplan.errors import UsageError
from topoplan.fabric.fabric import Fabric
from topoplan.plans.build import build_plan
from topoplan.plans.certificates import Entries, OneFabric
from topoplan.plans.plan import Plan
from topoplan.plans.tree import Shard


def sparse_trees(plan: Plan, *, entries: Fraction) -> Plan:
    """The trees of an allreduce on entries.

    Parameters
    ----------
    plan : Plan
        An allreduce of elements over one fabric.
    entries : Fraction
        Bytes of entries for each byte of the buffer (`topoplan.units.entry_share`).

    Raises
    ------
    UsageError
        The plan is no such allreduce, or ``entries`` not above zero.

    Examples
    --------
    At density 1 % in pairs of 4 bytes each, a fiftieth of the bytes moves:

    >>> import topoplan
    >>> from topoplan.units import entry_share
    >>> dense = topoplan.plan(topoplan.load("dgx-2"), "allreduce")
    >>> made = sparse_trees(dense, entries=entry_share(0.01))
    >>> dense.rate, made.rate, made.bound
    (80.0, 4000.0, 4000.0)
    """
    if plan.collective != "allreduce" or plan.sparse:
        kind = "sparse " if plan.sparse else ""
        raise UsageError(
            f"entries are summed on the trees of an allreduce, and this is a {kind}{plan.collective}"
        )
    if entries <= 0:
        raise UsageError(f"{entries} bytes of entries for a byte of the buffer must be above zero")
    if len(plan.ranks) == 1:
        return plan
    if not isinstance(plan.certificate, OneFabric):
        raise UsageError(
            "a plan that divides the buffer between channels has no sparse form; plan for one channel"
        )
    shards = [
        Shard(shard.share, tuple(replace(stage, entries=entries) for stage in shard.stages))
        for shard in plan.shards
    ]
    return build_plan(
        Fabric(plan.topology, plan.channels),
        "allreduce",
        root=None,
        shards=shards,
        certificate=Entries(entries, plan.certificate),
        schedule=f"sparse {plan.schedule}",
        method=plan.method,
        notes=plan.notes,
    )
