"""What each phase of a plan over several servers could sustain alone, and which of them holds the plan back.

Three phases: reduce inside servers, exchange between them (both directions), broadcast inside. The edges of a stage
tell them apart, since an edge joins ranks of one server or of two. Alone, a phase runs at min c(e) / load(e) over the
links that its edges cross; phases that share a link, as reduce and broadcast inside a server do, are slower together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from topoplan.fabric.fabric import Fabric
from topoplan.fabric.servers import Servers
from topoplan.plans.loads import full_links, link_loads, rate_of_loads
from topoplan.plans.plan import ALL_TO_ALL, Plan
from topoplan.plans.symmetric_shards import ImageShards
from topoplan.plans.tree import Edge, Shard, Stage
from topoplan.units import nearest_float

REDUCE, BETWEEN, BROADCAST = "reduce inside servers", "between servers", "broadcast inside servers"
INSIDE = "both inside servers"


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase, or several together.

    Parameters
    ----------
    name : str
    rate : float
        GB/s of algorithm bandwidth if nothing else used the links; infinite where it moves nothing.
    full : tuple of (str, str)
        Links that are full at that rate.
    """

    name: str
    rate: float
    full: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Phases:
    """The phases of a plan.

    Parameters
    ----------
    reduce, between, broadcast : Phase
    inside : Phase
        Reduce and broadcast inside servers together.
    bottleneck : str
        ``between servers``, ``inside servers``, both, or the links that they share: what is full at the plan's rate.
    """

    reduce: Phase
    between: Phase
    broadcast: Phase
    inside: Phase
    bottleneck: str

    def to_object(self) -> dict[str, object]:
        """A JSON object: GB/s of every phase alone, null for one that moves nothing, and the bottleneck."""
        phases = (self.reduce, self.between, self.broadcast, self.inside)
        return {
            "alone": {one.name: one.rate if math.isfinite(one.rate) else None for one in phases},
            "bottleneck": self.bottleneck,
        }


def phases(plan: Plan) -> Phases | None:
    """The phases of a plan whose ranks are on several servers; None for any other, and for an all-to-all.

    Raises
    ------
    PlanError
        A route crosses a link that the plan's topology does not have.

    Examples
    --------
    Two DGX-1V with one NIC of 96 Gb/s each:

    >>> import topoplan
    >>> pair = topoplan.cluster([topoplan.Server(topoplan.load("dgx-1v"), count=2)], nic_gbps=96, nics=1)
    >>> found = phases(topoplan.three_phase(pair))
    >>> found.between.rate, found.inside.rate, found.bottleneck
    (12.0, 25.0, 'between servers')
    """
    if plan.collective == ALL_TO_ALL:
        return None
    fabric = Fabric(plan.topology, plan.channels)
    servers = Servers(fabric)
    if len(servers.names) < 2:
        return None
    load = {name: _load(name, plan.shards, servers) for name in (REDUCE, BETWEEN, BROADCAST)}
    inside = [a + b for a, b in zip(load[REDUCE], load[BROADCAST], strict=True)]
    between = load[BETWEEN]
    total = [a + b for a, b in zip(inside, between, strict=True)]
    return Phases(
        reduce=_phase(REDUCE, load[REDUCE], fabric),
        between=_phase(BETWEEN, between, fabric),
        broadcast=_phase(BROADCAST, load[BROADCAST], fabric),
        inside=_phase(INSIDE, inside, fabric),
        bottleneck=_bottleneck(
            [(bool(inside[link]), bool(between[link])) for link in full_links(total, fabric)]
        ),
    )


def _load(phase: str, shards: Sequence[Shard], servers: Servers) -> list[Fraction]:
    """Bytes across every link in a phase, for each byte of the buffer."""

    def within(edge: Edge) -> bool:
        # helpers are in no server
        return max(edge.parent, edge.child) < len(servers.same) and servers.same[edge.parent, edge.child]

    def part(stage: Stage) -> Stage:
        inside = REDUCE if stage.op == "reduce" else BROADCAST
        edges = (edge for edge in stage.edges if (inside if within(edge) else BETWEEN) == phase)
        return replace(stage, edges=tuple(edges))

    if isinstance(shards, ImageShards) and not all(map(servers.keeps, shards.generators)):
        shards = tuple(shards)  # an edge inside a server may have images between two
    return link_loads(shards, servers.fabric, part=part)


def _phase(name: str, load: Sequence[Fraction], fabric: Fabric) -> Phase:
    rate = rate_of_loads(load, fabric)
    return Phase(
        name,
        math.inf if rate is None else nearest_float(rate),
        tuple((fabric.links[link].src, fabric.links[link].dst) for link in full_links(load, fabric)),
    )


def _bottleneck(full: Sequence[tuple[bool, bool]]) -> str:
    """What loads the full links, each given as (inside, between)."""
    kinds = set(full)
    names = []
    if (False, True) in kinds:
        names.append(BETWEEN)
    if (True, False) in kinds:
        names.append("inside servers")
    if (True, True) in kinds:
        names.append("links that both cross")
    return " and ".join(names)
