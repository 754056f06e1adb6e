"""Build the dataflow of a plan of a torus by kind: one hop for each step of an arm, not for each server.

The servers of an image that are entered at the same step of the same arm have the same hops beyond them, so one *place*
stands for all of them: with n servers in a dimension an arm has n - 1 places. They differ only in the way to them, as
the arm begins at every server of the earlier arms. So each first hop of an arm has alternatives, the hops into all of
these servers. The longest chain takes the longest of them, and the earliest start-up of a route the shortest.

Every route has as many copies as its moved ones (`topoplan.plans.torus_templates`), so the times are those of the list
of all servers. The cost grows with the sum of the sides, not with their product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from topoplan.errors import UsageError
from topoplan.model.closed_form import EarliestStarts
from topoplan.model.dataflow import Dataflow, Hop, Starters, flow_of
from topoplan.model.times_by_size import least_start_ups
from topoplan.plans.kind_images import local_numbers
from topoplan.plans.plan_by_kind import PlanByKind
from topoplan.plans.shards import Shard, Stage
from topoplan.plans.torus_templates import TorusPaths, TorusTemplate, represented_in_torus

MOST_HOPS = 400_000
"""Hops along the arms of all templates up to which a plan of a torus is timed: a gigabyte."""

MOST_STEPS = 4096
"""Height of trees up to which it is timed: three seconds for each size."""


@dataclass(frozen=True, slots=True)
class ArmPlace:
    """Servers of an image that are entered at one step of an arm.

    server: that of the sample for which they stand.
    copies: how many they are.
    before: the places of the servers that they may be entered from; none for that of the root.
    """

    server: int
    copies: int
    before: tuple[int, ...]


@dataclass(slots=True)
class _Hops:
    """The hops of all stages so far, and what they wait for.

    ``alternatives`` are the hops of which each ends at one of the servers for which a place stands: those before a hop
    of a broadcast, those behind one of a reduce. ``blocks`` count the ranks beyond a hop, its own included.
    """

    hops: list[Hop] = field(default_factory=list)
    waits: list[list[int]] = field(default_factory=list)
    alternatives: dict[int, list[int]] = field(default_factory=dict)
    copies: list[int] = field(default_factory=list)


def torus_places(plan: PlanByKind, template: TorusTemplate) -> list[ArmPlace]:
    """Return the places of an image, each behind those before it: that of the root, then every step of every arm."""
    torus = plan.cluster.network.torus
    number = {server: place for place, server in enumerate(plan.sample.numbers)}
    places = [ArmPlace(number[0], 1, ())]
    copies = 1
    for arm in template.arms:
        starts = tuple(range(len(places)))
        for direction, steps in arm.directions:
            server, before = number[torus.server(torus.offset(direction))], starts
            for _ in range(steps):
                places.append(ArmPlace(server, copies, before))
                before = (len(places) - 1,)
        copies *= torus.sides[arm.dimension]
    return places


def torus_dataflow(plan: PlanByKind) -> tuple[Dataflow, Starters, EarliestStarts]:
    """Return the hops of a plan of a torus, the copies that each route starts, and the earliest chains around hops.

    UsageError if it has more than `MOST_HOPS`, or is higher than `MOST_STEPS`.
    """
    if plan.height > MOST_STEPS:
        raise UsageError(
            f"times of a torus need trees of at most {MOST_STEPS:,} edges in height, got {plan.height:,}; choose "
            "shorter sides"
        )
    templates = [one for one in plan.templates if isinstance(one, TorusTemplate)]
    home = plan.sample.servers_of(plan.fabric.ranks)
    places = [torus_places(plan, template) for template in templates]
    gpus = home.count(home[0])
    many = sum(
        len(one) * gpus * len(template.stages) for one, template in zip(places, templates, strict=True)
    )
    if many > MOST_HOPS:
        raise UsageError(
            f"times of a torus must have at most {MOST_HOPS:,} hops along its sides, got {many:,}; choose shorter sides"
        )
    flow = template_flow(plan)
    base: dict[tuple[int, int], list[Hop]] = {}
    for hop in flow.hops:
        base.setdefault((hop.shard, hop.stage), []).append(hop)
    local, found = local_numbers(home), _Hops()
    for number, template in enumerate(templates):
        arrived: list[int] = []
        for position, stage in enumerate(template.stages):
            hops = base.get((number, position), [])
            arrived = _add_stage(found, hops, stage, places[number], home, local, arrived)
    paths = [isinstance(template, TorusPaths) for template in templates]
    followers: list[list[int]] = [[] for _ in found.hops]
    for number, before in enumerate(found.waits):
        for one in before:
            followers[one].append(number)
    copies = list(found.copies)
    for number in reversed(range(len(copies))):
        if paths[found.hops[number].shard]:
            # A path leads over a hop to each rank beyond it.
            beyond = sum(copies[one] // found.copies[one] for one in followers[number])
            copies[number] = found.copies[number] * (1 + beyond)
    whole = replace(
        flow,
        hops=tuple(replace(hop, waits=tuple(w)) for hop, w in zip(found.hops, found.waits, strict=True)),
        followers=tuple(map(tuple, followers)),
    )
    return whole, _starters(plan, whole, copies), _earliest(templates, found, followers)


def template_flow(plan: PlanByKind) -> Dataflow:
    """Return the hops of the templates of a torus: those into server 0 and its neighbours, each once."""
    home = plan.sample.servers_of(plan.fabric.ranks)
    templates = [one for one in plan.templates if isinstance(one, TorusTemplate)]
    return flow_of(plan.fabric, [_entered_alone(plan, one, home) for one in templates], plan.link_loads())


def torus_diameter(plan: PlanByKind) -> float:
    """Return a lower bound of the seconds of start-ups from a rank to the farthest server of a torus.

    A way there crosses at least half a ring of cables in each dimension.
    """
    torus, fabric, sample = plan.cluster.network.torus, plan.fabric, plan.sample
    sampled = sample.cluster.network.torus
    cheapest: dict[int, float] = {}
    for link, cost in zip(fabric.links, least_start_ups(fabric), strict=True):
        ends = [sample.numbers[sample.server_of(end)] for end in (link.src, link.dst)]
        for dimension, steps in enumerate(sampled.between(*ends)):
            if steps:
                cheapest[dimension] = min(cost, cheapest.get(dimension, cost))
    return math.fsum(side // 2 * cheapest[dimension] for dimension, side in enumerate(torus.sides))


def _entered_alone(plan: PlanByKind, template: TorusTemplate, home: Sequence[int]) -> tuple[Shard, int]:
    """Return the shard of a template with the edges into servers that its arms enter, and the number of its images."""
    stands = represented_in_torus(plan.sample, template.arms)
    stages = tuple(
        Stage(stage.op, stage.root, tuple(edge for edge in stage.edges if home[edge.child] in stands))
        for stage in template.stages
    )
    images = plan.images(template)
    return Shard(images.share_each, stages), images.count


def _add_stage(
    found: _Hops,
    base: Sequence[Hop],
    stage: Stage,
    places: Sequence[ArmPlace],
    home: Sequence[int],
    local: Sequence[int],
    arrived: Sequence[int],
) -> list[int]:
    """Add the hops of one stage at all places, and return the hops that end at the root.

    ``base`` are the hops of the template, in the order of their data, and ``arrived`` the hops of the stage before that
    end at the root.
    """
    upwards, root = stage.op == "reduce", local[stage.root]
    into: dict[int, list[Hop]] = {}
    for hop in base:
        into.setdefault(home[hop.src if upwards else hop.dst], []).append(hop)
    order = [
        (place, hop)
        for place in (range(len(places) - 1, -1, -1) if upwards else range(len(places)))
        for hop in into.get(places[place].server, ())
    ]
    first = len(found.hops)
    lower = {
        (place, local[hop.src if upwards else hop.dst]): first + number
        for number, (place, hop) in enumerate(order)
    }
    found.hops += [hop for _, hop in order]
    found.copies += [places[place].copies for place, _ in order]
    found.waits += [[] for _ in order]
    ends: list[int] = []
    for number, (place, hop) in enumerate(order, start=first):
        child, parent = (hop.src, hop.dst) if upwards else (hop.dst, hop.src)
        # The parent is on the same server, or on one of those before it.
        beside = home[child] == home[parent]
        starts = (place,) if beside else places[place].before
        at_root = 0 in starts and local[parent] == root
        above = [lower[one, local[parent]] for one in starts if (one, local[parent]) in lower]
        if upwards:
            for one in above:
                found.waits[one].append(number)
            if at_root:
                ends.append(number)
        else:
            found.waits[number] += [*above, *(arrived if at_root else ())]
        if not at_root:
            found.alternatives[number] = above
    return ends


def _starters(plan: PlanByKind, flow: Dataflow, copies: Sequence[int]) -> Starters:
    """Return the routes, each with as many copies as the moved ones."""
    links, keys = flow.fabric.links, plan.sample.class_keys(flow.fabric.links)
    number: dict[tuple[object, ...], int] = {}
    route = tuple(
        number.setdefault(tuple(keys[link] for link in hop.links), len(number)) for hop in flow.hops
    )
    wires = {
        at: min(links[link].count for link in hop.links) for at, hop in zip(route, flow.hops, strict=True)
    }
    return Starters(
        tuple(range(len(route))),
        route,
        tuple(wires[at] for at in range(len(number))),
        tuple(map(float, copies)),
    )


def _earliest(
    templates: Sequence[TorusTemplate], found: _Hops, followers: Sequence[Sequence[int]]
) -> EarliestStarts:
    """Return what the earliest copy of each hop waits for, and what waits for the earliest one.

    A hop that may begin or end at the root has no earlier one than that. A path may end at every rank.
    """
    before: list[Sequence[int]] = [list(one) for one in found.waits]
    after: list[Sequence[int]] = [list(one) for one in followers]
    chosen: tuple[list[bool], list[bool]] = ([], [])
    upwards = []
    for hop in found.hops:
        template = templates[hop.shard]
        upwards.append(template.stages[hop.stage].op == "reduce")
        many = len(found.alternatives.get(len(upwards) - 1, ())) > 1
        chosen[0].append(many and not upwards[-1])
        chosen[1].append(many and upwards[-1])
    for number, hop in enumerate(found.hops):
        if isinstance(templates[hop.shard], TorusPaths):
            after[number] = ()
        side = after if upwards[number] else before
        if number not in found.alternatives:
            # Hops of the same stage are those of other servers than the root's.
            side[number] = [one for one in side[number] if found.hops[one].stage != hop.stage]
    return EarliestStarts(
        tuple(map(tuple, before)), tuple(map(tuple, after)), np.array(chosen[0]), np.array(chosen[1])
    )
