"""Turn a finished forest into a Plan: recompute its rate, recompute its bound, keep the stronger proof."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from topoplan.errors import InfeasibleError
from topoplan.fabric.fabric import Fabric
from topoplan.plans.certificates import Certificate, Trivial
from topoplan.plans.loads import forest_rate
from topoplan.plans.plan import Plan
from topoplan.plans.symmetric_shards import ImageShards
from topoplan.plans.tree import Shard, Stage
from topoplan.units import nearest_float


def build_plan(
    fabric: Fabric,
    collective: str,
    *,
    root: int | None,
    shards: Sequence[Shard],
    certificate: Certificate,
    schedule: str,
    method: str,
    notes: Sequence[str] = (),
) -> Plan:
    """A Plan from shards and a certificate, with rate and bound recomputed from them.

    Raises
    ------
    PlanError
        A route crosses a link that the fabric does not have, or the certificate proves nothing.
    """
    rate = forest_rate(shards, fabric)
    bound = math.inf
    if fabric.size > 1:
        bound = nearest_float(certificate.bound(fabric, collective, root))
    return Plan(
        collective=collective,
        ranks=fabric.ranks,
        root=root,
        topology=fabric.topology,
        channels=fabric.channels,
        schedule=schedule,
        method=method,
        shards=shards if isinstance(shards, ImageShards) else tuple(shards),
        rate=math.inf if rate is None else nearest_float(rate),
        bound=bound,
        certificate=certificate,
        notes=tuple(notes),
    )


def trivial_plan(fabric: Fabric, collective: str, *, root: int | None, method: str) -> Plan:
    """The plan of one rank: it already holds the result, and nothing moves."""
    if fabric.size != 1:
        raise InfeasibleError(f"{fabric.size} ranks need links between them")
    shard = Shard(Fraction(1), tuple(Stage(op, 0, ()) for op in stage_order(collective)))
    return build_plan(
        fabric,
        collective,
        root=root,
        shards=[shard],
        certificate=Trivial(),
        schedule="trivial",
        method=method,
    )


def stage_order(collective: str) -> tuple[str, ...]:
    """The stages of one shard of a plan with one tree or one pair of trees per shard."""
    return {
        "allreduce": ("reduce", "broadcast"),
        "broadcast": ("broadcast",),
        "reduce": ("reduce",),
        "allgather": ("broadcast",),
        "reduce_scatter": ("reduce",),
        "alltoall": ("broadcast",),
    }[collective]
