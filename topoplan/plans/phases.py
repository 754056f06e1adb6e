"""What each phase of a plan over several servers could sustain alone, and which of them holds the plan back.

Three phases: reduce inside servers, exchange between them (both directions), broadcast inside. The edges of a stage
tell them apart, since an edge joins ranks of one server or of two. Alone, a phase runs at min c(e) / load(e) over the
links that its edges cross; phases that share a link, as reduce and broadcast inside a server do, are slower together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from topoplan.fabric.fabric import Fabric
from topoplan.fabric.servers import Servers
from topoplan.plans.loads import spread_evenly, stage_links
from topoplan.plans.plan import Plan
from topoplan.plans.symmetric_shards import ImageShards, shard_counts
from topoplan.plans.tree import Edge, Shard
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
    """The phases of a plan whose ranks are on several servers; None for any other.

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
    fabric = Fabric(plan.topology, plan.channels)
    servers = Servers(fabric)
    if len(servers.names) < 2:
        return None
    load = _loads(plan.shards, servers)
    inside = [a + b for a, b in zip(load[REDUCE], load[BROADCAST], strict=True)]
    between = load[BETWEEN]
    total = [a + b for a, b in zip(inside, between, strict=True)]
    _, full = _rate(total, fabric)
    return Phases(
        reduce=_phase(REDUCE, load[REDUCE], fabric),
        between=_phase(BETWEEN, between, fabric),
        broadcast=_phase(BROADCAST, load[BROADCAST], fabric),
        inside=_phase(INSIDE, inside, fabric),
        bottleneck=_bottleneck([(bool(inside[link]), bool(between[link])) for link in full]),
    )


def _loads(shards: Sequence[Shard], servers: Servers) -> Mapping[str, list[Fraction]]:
    """Bytes across every link for each byte of the buffer, by phase."""
    fabric = servers.fabric
    generators = shards.generators if isinstance(shards, ImageShards) else ()
    if not all(servers.keeps(generator) for generator in generators):
        shards, generators = tuple(shards), ()
    load = {name: [Fraction(0)] * len(fabric.links) for name in (REDUCE, BETWEEN, BROADCAST)}
    for shard, count in shard_counts(shards):
        for stage in shard.stages:
            parts: dict[str, list[Edge]] = {name: [] for name in load}
            for edge in stage.edges:
                inside = REDUCE if stage.op == "reduce" else BROADCAST
                parts[inside if servers.same[edge.parent, edge.child] else BETWEEN].append(edge)
            for name, edges in parts.items():
                crossed = stage_links(replace(stage, edges=tuple(edges)), fabric)
                for link, times in Counter(crossed).items():
                    load[name][link] += shard.share * count * times * stage.weight
    if generators:
        return {name: spread_evenly(loads, fabric, generators) for name, loads in load.items()}
    return load


def _phase(name: str, load: Sequence[Fraction], fabric: Fabric) -> Phase:
    rate, full = _rate(load, fabric)
    return Phase(
        name,
        math.inf if rate is None else nearest_float(rate),
        tuple((fabric.links[link].src, fabric.links[link].dst) for link in full),
    )


def _rate(load: Sequence[Fraction], fabric: Fabric) -> tuple[Fraction | None, list[int]]:
    """min c(e) / load(e), and the links that have it; None where no byte crosses a link."""
    rates = {link: fabric.capacity[link] / load[link] for link in range(len(load)) if load[link]}
    if not rates:
        return None, []
    least = min(rates.values())
    return least, [link for link, rate in rates.items() if rate == least]


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
