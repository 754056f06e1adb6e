"""The check of a plan that moves entries: that it can run, and what its certificate takes for granted.

The bounds of sparse plans hold for plans of their own kind only: `Entries` where each stage moves entries,
`InsideServer` and `BetweenServers` where elements stay inside servers, and the entries of each server are exchanged
once.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import groupby

from topoplan.errors import PlanError
from topoplan.plans.certificate import BetweenServers, Entries, InsideServer, Sparse
from topoplan.plans.fabric import Fabric
from topoplan.plans.plan import Plan, Shard, Stage
from topoplan.plans.rounds import rounds
from topoplan.plans.servers import Servers


def check_sparse(plan: Plan, fabric: Fabric) -> None:
    """Hold a sparse plan to what can run and to what its certificate speaks of.

    Parameters
    ----------
    plan : Plan
        Its trees are trees. Other plans than sparse ones pass, unless their certificate is for sparse ones.
    fabric : Fabric
        The plan's.

    Raises
    ------
    PlanError
        It is no allreduce, its shards take different rounds, or the certificate speaks of other plans.

    Examples
    --------
    >>> import topoplan
    >>> made = topoplan.sparse_plan(topoplan.load("dgx-2"), density=0.01)
    >>> check_sparse(made, Fabric(made.topology, made.channels))
    """
    certificate = plan.certificate
    if not plan.sparse:
        if isinstance(certificate, Sparse):
            raise PlanError("the certificate bounds plans that move entries, and this one moves none")
        return
    if plan.collective != "allreduce":
        raise PlanError(f"entries can be summed by an allreduce only, not by {plan.collective}")
    rounds(plan)
    if isinstance(certificate, Entries):
        for number, (shard, _) in enumerate(plan.shard_counts):
            _check_all_entries(shard, number, certificate.entries)
    elif isinstance(certificate, InsideServer | BetweenServers):
        least = certificate.entries if isinstance(certificate, BetweenServers) else Fraction(0)
        home = {device.name: device.server for device in fabric.topology.devices}
        for number, (shard, _) in enumerate(plan.shard_counts):
            _check_phases(shard, number, least, Servers(fabric), home)
    else:
        raise PlanError(
            "the certificate bounds plans that move elements; entries, inside server or between servers bound this one"
        )


def _check_all_entries(shard: Shard, number: int, least: Fraction) -> None:
    for position, stage in enumerate(shard.stages):
        if stage.edges and (stage.op == "gather" or stage.entries is None or stage.entries < least):
            raise PlanError(
                f"{stage.op}s {stage.weight} bytes for a byte of the shard, and the bound holds for trees on which "
                f"{least} bytes of entries move",
                shard=number,
                stage=position,
            )


def _check_phases(shard: Shard, number: int, least: Fraction, servers: Servers, home: dict[str, str]) -> None:
    """Elements inside servers, one exchange between one rank of each, elements inside servers."""
    if [kind for kind, _ in groupby(stage.op == "gather" for stage in shard.stages)].count(True) != 1:
        raise PlanError("the bound holds for one exchange of entries", shard=number)
    owner: dict[int, int] = {}
    for position, stage in enumerate(shard.stages):
        fault = (
            _exchange_fault(stage, least, servers, owner)
            if stage.op == "gather"
            else _inside_fault(stage, home)
        )
        if fault:
            raise PlanError(fault, shard=number, stage=position)


def _exchange_fault(stage: Stage, least: Fraction, servers: Servers, owner: dict[int, int]) -> str:
    if stage.weight < least:
        return (
            f"gathers {stage.weight} bytes of entries for a byte of the shard, and the bound supposes {least}"
        )
    for rank in (stage.root, *(edge.child for edge in stage.edges)):
        server = int(servers.of_rank[rank])
        if owner.setdefault(server, rank) != rank:
            return (
                f"gathers at ranks {owner[server]} and {rank} of {servers.names[server]}, and the bound holds for one "
                "rank of each server"
            )
    return ""


def _inside_fault(stage: Stage, home: dict[str, str]) -> str:
    if stage.entries is not None:
        return f"{stage.op}s entries, and the bound holds where elements move inside servers"
    for edge in stage.edges:
        if edge.channel == "network" or len({home.get(device, "") for device in edge.route}) > 1:
            return f"the route {'-'.join(edge.route)} leaves its server, and the bound holds where elements stay inside"
    return ""
