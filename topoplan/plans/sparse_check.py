"""The check of a plan that moves entries: that it can run, and what its certificate takes for granted.

The bounds of sparse plans hold for plans of their own kind only: `Entries` where each stage moves entries,
`InsideServer` and `BetweenServers` where elements stay inside servers, and the entries of each server are exchanged
once.
"""

from __future__ import annotations

from fractions import Fraction

from topoplan.errors import PlanError
from topoplan.fabric.fabric import Fabric
from topoplan.fabric.servers import Servers
from topoplan.plans.certificates import Sparse
from topoplan.plans.plan import Plan
from topoplan.plans.rounds import rounds
from topoplan.plans.tree import Shard, Stage
from topoplan.units import shown


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
    kinds = [one.kind for one in rounds(plan)]
    if not isinstance(certificate, Sparse):
        raise PlanError(
            "the certificate bounds plans that move elements; entries, inside server or between servers bound this one"
        )
    if not certificate.by_server:
        for number, (shard, _) in enumerate(plan.shard_counts):
            _check_all_entries(shard, number, certificate.least)
        return
    if kinds != ["elements", "gather", "elements"]:
        raise PlanError(
            f"takes the rounds {', '.join(kinds)}, and the bound holds for elements, one exchange, and elements"
        )
    servers = Servers(fabric)
    home = {device.name: device.server for device in fabric.topology.devices}
    # every image too: a symmetry may take a server to several
    for number, shard in enumerate(plan.shards):
        _check_phases(shard, number, certificate.least, servers, home)


def _check_all_entries(shard: Shard, number: int, least: Fraction) -> None:
    """Entries are summed up trees on which no rank sends twice, and then handed down."""
    sent: set[int] = set()
    falling = False
    for position, stage in enumerate(shard.stages):
        if stage.op == "gather" or stage.entries is None or stage.entries < least:
            raise PlanError(
                f"{stage.op}s {shown(stage.weight)} bytes for a byte of the shard, and the bound holds for trees on "
                f"which {shown(least)} bytes of entries move",
                shard=number,
                stage=position,
            )
        falling = falling or stage.op == "broadcast"
        for edge in reversed(stage.top_down()) if stage.op == "reduce" else ():
            if falling or {edge.child, edge.parent} & sent:
                raise PlanError(
                    "sums entries of which a rank has sent its own already; they would count twice",
                    shard=number,
                    stage=position,
                    rank=edge.child,
                )
            sent.add(edge.child)


def _check_phases(shard: Shard, number: int, least: Fraction, servers: Servers, home: dict[str, str]) -> None:
    """Elements are summed at one owner in each server, who exchanges entries with the others and hands elements out."""
    gathers = [stage for stage in shard.stages if stage.op == "gather"]
    owner = {int(servers.of_rank[stage.root]): stage.root for stage in gathers}
    if len(owner) < len(gathers) or len(owner) < len(servers.names):
        raise PlanError(
            f"{len(gathers)} ranks gather for {len(servers.names)} servers, and the bound holds for one of each",
            shard=number,
        )
    exchanged = False
    for position, stage in enumerate(shard.stages):
        if stage.op == "gather":
            exchanged = True
            fault = _exchange_fault(stage, least, servers, owner)
        else:
            fault = _inside_fault(stage, "broadcast" if exchanged else "reduce", servers, owner, home)
        if fault:
            raise PlanError(fault, shard=number, stage=position)


def _exchange_fault(stage: Stage, least: Fraction, servers: Servers, owner: dict[int, int]) -> str:
    if stage.weight < least:
        return (
            f"gathers {shown(stage.weight)} bytes of entries for a byte of the shard, and the bound supposes "
            f"{shown(least)}"
        )
    for edge in stage.edges:
        server = int(servers.of_rank[edge.child])
        if owner[server] != edge.child:
            return f"gathers at rank {edge.child}, and the owner in {servers.names[server]} is rank {owner[server]}"
    return ""


def _inside_fault(
    stage: Stage, op: str, servers: Servers, owner: dict[int, int], home: dict[str, str]
) -> str:
    if stage.entries is not None:
        return f"{stage.op}s entries, and the bound holds where elements move inside servers"
    if stage.op != op:
        return f"{stage.op}s where only a {op} has its place, before or after the exchange"
    server = int(servers.of_rank[stage.root])
    if owner[server] != stage.root:
        return f"{stage.op}s at rank {stage.root}, and the owner in {servers.names[server]} is rank {owner[server]}"
    for edge in stage.edges:
        if edge.channel == "network" or len({home.get(device, "") for device in edge.route}) > 1:
            return f"the route {'-'.join(edge.route)} leaves its server, and the bound holds where elements stay inside"
    return ""
