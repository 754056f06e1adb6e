"""Link loads and rate of a finished forest.

The rate is never taken from a solver: rate = min over directed links of c(e) / load(e), where load(e) is the
sum over stages of share x number of times the stage crosses e, times the stage's weight if entries cross it.

If the routes from a parent to its children part at a switch that can copy (`multicast`), a broadcast crosses the links
before it once for all of them; if they meet at a switch that can add (`reduce`), so does a reduce.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from itertools import pairwise
from math import lcm

import numpy as np

from topoplan.errors import PlanError
from topoplan.machine.fabric import Fabric
from topoplan.machine.fabric_structure import link_images, link_orbits
from topoplan.machine.routing import memory_access
from topoplan.machine.topology import PULLS
from topoplan.plans.shards import Edge, ImageParts, ImageShards, Shard, Stage, shard_counts
from topoplan.units import listed


def edge_links(edge: Edge, op: str, fabric: Fabric) -> tuple[int, ...]:
    """Return the indices of the links that data crosses on an edge, in the order of crossing.

    PlanError if the route does not join the edge's ranks, the edge's channel has no such link, the route passes a
    device of a third server that does not forward, or no copy can take it for lack of peer access.
    """
    if len(edge.route) < 2 or (edge.route[0], edge.route[-1]) != (
        fabric.vertices[edge.parent],
        fabric.vertices[edge.child],
    ):
        raise PlanError(
            f"the route {'-'.join(edge.route)} does not lead from {fabric.vertices[edge.parent]} "
            f"to {fabric.vertices[edge.child]}",
            rank=edge.child,
        )
    if edge.channel not in fabric.edge_channels:
        raise PlanError(
            f"edge {edge.parent}->{edge.child} uses channel {edge.channel!r}, but the plan has channels "
            f"{', '.join(fabric.edge_channels)}",
            rank=edge.child,
        )
    devices = edge.route[::-1] if op == "reduce" else edge.route
    link_on, channel = fabric.link_on, edge.channel
    try:
        crossed = tuple([link_on[src, dst, channel] for src, dst in pairwise(devices)])
    except KeyError as error:
        src, dst, _ = error.args[0]
        raise PlanError(
            f"the route {'-'.join(edge.route)} crosses {src}->{dst}, which has no {channel} link",
            rank=edge.child,
        ) from None
    foreign = fabric.transit.foreign(edge.route) if len(edge.route) > 2 else None
    if foreign is not None:
        raise PlanError(
            f"the route {'-'.join(edge.route)} of edge {edge.parent}->{edge.child} passes {foreign} of server "
            f"{fabric.transit.servers[foreign]}, which does not forward what other servers send; end the edge at a "
            f'rank of that server, or state "forwards": true of the device',
            rank=edge.child,
        )
    unable = fabric.transit.unable(devices)
    if unable:
        raise PlanError(
            f"the route {'-'.join(edge.route)} of edge {edge.parent}->{edge.child} {unable}", rank=edge.child
        )
    return crossed


def initiator_notes(shards: Iterable[Shard], fabric: Fabric) -> list[str]:
    """Return which edges are not pushed by their source, in words; nothing if all are.

    On pairs whose destination reads faster than the source writes, the destination pulls
    (`topoplan.machine.routing.memory_access`); pairs without peer access copy through a CPU's memory.
    """
    topology, vertices = fabric.topology, fabric.vertices
    stated = any(link.pulls for link in topology.links) or any(
        d.fact(PULLS) for d in topology.devices if d.facts
    )
    pulled = memory_access(topology).pulled if stated else frozenset[tuple[str, str]]()
    hosted = {(vertices[a], vertices[b]) for a, heads in fabric.barred.items() for b in heads}
    if not pulled and not hosted:
        return []
    ends = {
        (edge.child, edge.parent) if stage.op == "reduce" else (edge.parent, edge.child)
        for shard in shards
        for stage in shard.stages
        for edge in stage.edges
    }
    pairs = [(vertices[a], vertices[b]) for a, b in sorted(ends)]
    kinds = (
        ("pulled by their destination, which reads faster than the source writes", pulled - hosted),
        ("copied through a CPU's memory, without peer access", hosted),
    )
    named = [(words, [f"{a}>{b}" for a, b in pairs if (a, b) in those]) for words, those in kinds]
    return [f"{listed(names, noun='edges')}: {words}" for words, names in named if names]


def stage_links(stage: Stage, fabric: Fabric) -> list[int]:
    """Return the indices of all links that a stage crosses, one entry for each crossing."""
    merging = fabric.adding if stage.op == "reduce" else fabric.copying
    if stage.op == "reduce" and stage.entries is not None:
        merging = frozenset()  # a switch adds elements, but does not choose entries
    if not merging:
        return [number for edge in stage.edges for number in edge_links(edge, stage.op, fabric)]
    crossed: list[int] = []
    families: dict[int, list[Edge]] = {}
    for edge in stage.edges:
        families.setdefault(edge.parent, []).append(edge)
    for edges in families.values():
        # Routes are listed from parent to child: a reduce crosses them backwards, from the last link on.
        routes = []
        for edge in edges:
            links = edge_links(edge, stage.op, fabric)
            routes.append((links[::-1] if stage.op == "reduce" else links, edge.route[1:]))
        _cross(routes, 0, merging, crossed)
    return crossed


def _cross(
    routes: list[tuple[tuple[int, ...], tuple[str, ...]]],
    at: int,
    merging: frozenset[str],
    crossed: list[int],
) -> int:
    """Append the crossings, from step ``at``, of routes with a common beginning; return the copies that start there."""
    copies = 0
    following: dict[int, list[tuple[tuple[int, ...], tuple[str, ...]]]] = {}
    for route in routes:
        if at == len(route[0]):
            copies += 1
        else:
            following.setdefault(route[0][at], []).append(route)
    for number, branch in following.items():
        needed = _cross(branch, at + 1, merging, crossed)
        if branch[0][1][at] in merging:
            needed = 1
        crossed += [number] * needed
        copies += needed
    return copies


def team_wide_rate(shards: Sequence[Shard], fabric: Fabric) -> Fraction | None:
    """Return a forest's rate in GB/s if NVSwitches add and copy for a team of ranks, the root's own part included.

    ``multimem`` instructions work so (NVLink SHARP): a root's load through the switch is the sum of all parts, its own
    too, and its store is copied to all ranks, itself too. A plan keeps the root's part outside the switch. None if no
    byte crosses a link.
    """
    kind = {device.name: device.kind for device in fabric.topology.devices}

    def with_own(stage: Stage) -> Stage:
        merging = fabric.adding if stage.op == "reduce" else fabric.copying
        ways: Counter[tuple[int, tuple[str, ...], str]] = Counter()
        for edge in stage.edges:
            for place, name in enumerate(edge.route[1:-1], start=1):
                if name in merging and kind[name] == "nvswitch":
                    ways[edge.parent, edge.route[: place + 1], edge.channel] += 1
                    break
        own = tuple(
            Edge(parent, parent, (*way, *way[-2::-1]), channel)
            for (parent, way, channel), times in ways.items()
            if times > 1
        )
        return Stage(stage.op, stage.root, (*stage.edges, *own), stage.entries)

    return rate_of_loads(link_loads(shards, fabric, part=with_own), fabric)


FEW_CROSSINGS = 32
"""Crossings of links with one share below which each is added alone; more are counted first."""


def link_loads(
    shards: Sequence[Shard], fabric: Fabric, *, part: Callable[[Stage], Stage] | None = None
) -> list[Fraction]:
    """Return the load of every link of the fabric: bytes across it for each byte of the buffer.

    With ``part`` only the edges that it keeps of each stage count. For `ImageShards` the images of a template spread
    its load evenly over a link's orbit, unless they have parts of their own.
    """
    if isinstance(shards, ImageShards) and shards.parts is not None:
        return _loads_of_parts(shards, shards.parts, fabric, part)
    # Many shards have equal shares, so integers are added first.
    crossings: dict[tuple[int, int], list[int]] = {}
    for index, (shard, count) in enumerate(shard_counts(shards)):
        for position, stage in enumerate(shard.stages):
            plain = count == 1 and stage.entries is None
            weight = shard.share if plain else shard.share * count * stage.weight
            crossed_by = crossings.setdefault(_rational_key(weight), [])
            try:
                crossed_by += stage_links(part(stage) if part else stage, fabric)
            except PlanError as error:
                raise error.within(index, position) from None
    unit = lcm(*(denominator for _, denominator in crossings))
    whole = [0] * len(fabric.links)
    for (numerator, denominator), crossed in crossings.items():
        units = numerator * (unit // denominator)
        if len(crossed) < FEW_CROSSINGS:
            for number in crossed:
                whole[number] += units
        else:
            for number, times in Counter(crossed).items():
                whole[number] += units * times
    exact = {amount: Fraction(amount, unit) for amount in set(whole)}
    load = [exact[amount] for amount in whole]
    return spread_evenly(load, fabric, shards.generators) if isinstance(shards, ImageShards) else load


def _loads_of_parts(
    shards: ImageShards, images: ImageParts, fabric: Fabric, part: Callable[[Stage], Stage] | None
) -> list[Fraction]:
    """Return the load of every link, image by image, as exact sums of whole numbers."""
    loads = [Fraction(0)] * len(fabric.links)
    for index, template in enumerate(shards.templates):
        elements = shards.elements[list(shards.images[index])]
        parts = np.array(images.parts[index], dtype=np.int64)
        for position, stage in enumerate(template.stages):
            try:
                crossed = Counter(stage_links(part(stage) if part else stage, fabric))
                links = np.array(sorted(crossed), dtype=np.int64)
                there = link_images(fabric, elements, links)
            except PlanError as error:
                raise error.within(index, position) from None
            times = np.array([crossed[link] for link in links.tolist()], dtype=np.int64)
            total = np.zeros(len(loads), dtype=np.int64)
            np.add.at(total, there, parts[:, None] * times)
            unit = stage.weight / images.unit
            for link in np.flatnonzero(total).tolist():
                loads[link] += int(total[link]) * unit
    return loads


def spread_evenly(
    load: Sequence[Fraction], fabric: Fabric, generators: Sequence[Sequence[int]]
) -> list[Fraction]:
    """Return every load replaced by the mean over the orbit of its link under some automorphisms."""
    orbit = link_orbits(fabric, [np.array(generator) for generator in generators]).tolist()
    total: dict[int, Fraction] = {}
    for label, value in zip(orbit, load, strict=True):
        if value:
            total[label] = total.get(label, Fraction(0)) + value
    size = np.bincount(orbit).tolist()
    mean = {label: value / size[label] for label, value in total.items()}
    return [mean.get(label, Fraction(0)) for label in orbit]


def forest_rate(shards: Sequence[Shard], fabric: Fabric) -> Fraction | None:
    """Return the rate of a forest in GB/s, exact; None if no byte crosses a link."""
    return rate_of_loads(link_loads(shards, fabric), fabric)


def rate_of_loads(loads: Sequence[Fraction], fabric: Fabric) -> Fraction | None:
    """Return the rate in GB/s at which the first of some loaded links is full, exact; None if none is loaded."""
    return min(_rates(loads, fabric).values(), default=None)


def flow_rates(
    shards: Sequence[Shard], fabric: Fabric
) -> dict[tuple[tuple[int, int, str], tuple[int, ...]], Fraction]:
    """Return the GB/s at which each flow of a forest may send so that no link ever queues data.

    A flow has a source and destination rank, a channel and links; it is keyed by ((source, destination, channel), link
    indices). A link is divided among its flows in proportion to their bytes, so that all end together; a flow has the
    least of its parts. Switches that copy or add are not modelled.
    On a DGX-2 every GPU has 150 GB/s to its switches, for 15 others:

    >>> import topoplan
    >>> plan = topoplan.plan("dgx-2")
    >>> {float(rate) for rate in flow_rates(plan.shards, Fabric(plan.topology, plan.channels)).values()}
    {10.0}
    """
    sent: dict[tuple[tuple[int, int, str], tuple[int, ...]], Fraction] = defaultdict(Fraction)
    load: dict[int, Fraction] = defaultdict(Fraction)
    for shard in shards:
        for stage in shard.stages:
            for edge in stage.edges:
                ends = (edge.child, edge.parent) if stage.op == "reduce" else (edge.parent, edge.child)
                links = edge_links(edge, stage.op, fabric)
                sent[(*ends, edge.channel), links] += shard.share
                for link in links:
                    load[link] += shard.share
    return {
        flow: min(fabric.capacity[link] * share / load[link] for link in flow[1])
        for flow, share in sent.items()
    }


def full_links(loads: Sequence[Fraction], fabric: Fabric) -> tuple[int, ...]:
    """Return the indices of the links that are full when a forest of these loads runs at its rate."""
    rates = _rates(loads, fabric)
    rate = min(rates.values(), default=None)
    keys = zip(map(_rational_key, fabric.capacity), map(_rational_key, loads), strict=True)
    return tuple(number for number, key in enumerate(keys) if key in rates and rates[key] == rate)


def _rates(
    loads: Sequence[Fraction], fabric: Fabric
) -> dict[tuple[tuple[int, int], tuple[int, int]], Fraction]:
    """Return capacity over load of every loaded link, once for all links of one capacity and load."""
    return {
        (capacity, load): Fraction(capacity[0] * load[1], capacity[1] * load[0])
        for capacity, load in dict.fromkeys(
            zip(map(_rational_key, fabric.capacity), map(_rational_key, loads), strict=True)
        )
        if load[0]
    }


def _rational_key(value: Fraction) -> tuple[int, int]:
    """Return a rational number as a key; hashing a Fraction takes a division."""
    return value.numerator, value.denominator
