"""Read the structure of a plan: rounds that stream, phases over servers, shapes of trees, connections over NICs.

- `rounds`: the largest entries of a shard are known only after all of it has arrived, so a sparse plan runs in rounds,
  one after another; each is a plan whose trees stream. All shards have the same kinds of rounds, in parallel.
- `phases`: reduce inside servers, exchange between them, broadcast inside. Alone a phase runs at min c(e) / load(e)
  over the links that its edges cross; phases that share a link are slower together.
- `tree_shapes`: classes of shards whose trees are isomorphic as rooted trees with channels (Aho, Hopcroft and
  Ullman 1974, example 3.2: the sorted shapes below a vertex identify it). A shape is independent of loads.
- `connections_needed`: the connections over NICs that cap one connection (fact ``flow_gigabits``), as in clouds. Rate
  and bound are those of the wires; with one connection for each pair of ranks the busiest one sets the rate.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import groupby
from math import ceil

from topoplan.errors import PlanError
from topoplan.machine.fabric import Fabric
from topoplan.machine.fabric_structure import FabricServers
from topoplan.machine.topology import Topology
from topoplan.plans.loads import full_links, link_loads, rate_of_loads
from topoplan.plans.plan import ALL_TO_ALL, Plan
from topoplan.plans.shards import Edge, ImageShards, Shard, Stage, owner_of
from topoplan.units import exact, gigabytes_from_gigabits, nearest_float

FLOW_FACT = "flow_gigabits"

NicFlow = tuple[int, int, tuple[str, ...]]
"""Source and destination rank, and the NICs between them."""


@dataclass(frozen=True, slots=True)
class PlanConnections:
    """The effect of a cap for each connection on a plan.

    ``src`` and ``dst`` are the devices of the first two ranks whose traffic exceeds its cap most: ``carried`` GB/s at
    the plan's rate, ``cap`` GB/s of one connection. With ``needed`` connections between any two ranks the plan reaches
    its rate; ``single`` is its GB/s of algorithm bandwidth with one.
    """

    src: str
    dst: str
    carried: float
    cap: float
    needed: int
    single: float

    def to_object(self) -> dict[str, object]:
        return asdict(self)


def flow_caps(topology: Topology) -> dict[str, Fraction]:
    """Return the GB/s of one connection through each NIC that states a cap, by device."""
    return {
        device.name: exact(gigabytes_from_gigabits(float(device.fact(FLOW_FACT))))
        for device in topology.devices
        if device.kind == "nic" and device.fact(FLOW_FACT)
    }


def connections_needed(plan: Plan) -> PlanConnections | None:
    """Return the connections that a plan needs; None if it uses no NIC with a cap, or nothing moves.

    Two servers with NICs of 25 Gb/s, and a cap of 5 for one connection:

    >>> import topoplan
    >>> pair = topoplan.cluster([topoplan.Server("dgx-1v", [0], count=2)], nic_gbps=25, nics=1, flow_gbps=5)
    >>> found = connections_needed(topoplan.plan(pair))
    >>> found.needed, found.single, topoplan.plan(pair).rate
    (5, 0.625, 3.125)
    """
    caps = flow_caps(plan.topology)
    if not caps or len(plan.ranks) == 1:
        return None
    loads: dict[NicFlow, Fraction] = defaultdict(Fraction)
    for shard in plan.shards:
        for stage in shard.stages:
            for edge in stage.edges:
                nics = tuple(name for name in edge.route if name in caps)
                if nics:
                    ends = (edge.child, edge.parent) if stage.op == "reduce" else (edge.parent, edge.child)
                    loads[(*ends, nics)] += shard.share * stage.weight
    if not loads:
        return None
    rate = exact(plan.rate)
    cap = {flow: min(caps[name] for name in flow[2]) for flow in loads}
    most = max(loads, key=lambda flow: (loads[flow] / cap[flow], -flow[0], -flow[1]))
    names = (*plan.ranks, *plan.helpers)
    return PlanConnections(
        names[most[0]],
        names[most[1]],
        nearest_float(rate * loads[most]),
        nearest_float(cap[most]),
        max(1, ceil(rate * loads[most] / cap[most] * (1 - Fraction(1, 10**9)))),
        nearest_float(min(rate, cap[most] / loads[most])),
    )


def connections_line(found: PlanConnections) -> str:
    """Return a line on the connections.

    >>> connections_line(PlanConnections("s0.gpu0", "s1.gpu0", 3.125, 0.625, 5, 0.625))
    '5 connections from s0.gpu0 to s1.gpu0 carry 3.125 GB/s at 0.625 GB/s each; with one the rate is 0.625 GB/s'
    """
    if found.needed == 1:
        return (
            f"one connection from a rank to another does: at most {found.carried:.4g} GB/s, and it may carry "
            f"{found.cap:.4g}"
        )
    return (
        f"{found.needed} connections from {found.src} to {found.dst} carry {found.carried:.4g} GB/s "
        f"at {found.cap:.4g} GB/s each; with one the rate is {found.single:.4g} GB/s"
    )


REDUCE, BETWEEN_SERVERS, BROADCAST = "reduce inside servers", "between servers", "broadcast inside servers"
INSIDE_SERVERS = "both inside servers"


@dataclass(frozen=True, slots=True)
class PlanPhase:
    """One phase, or several together.

    ``rate`` is in GB/s of algorithm bandwidth if nothing else uses the links, infinite if it moves nothing; ``full``
    are the links that are full at that rate.
    """

    name: str
    rate: float
    full: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class PlanPhases:
    """The phases of a plan; ``inside`` is reduce and broadcast inside servers together.

    ``bottleneck`` names the full links at the plan's rate: ``between servers``, ``inside servers``, both, or the links
    that both cross.
    """

    reduce: PlanPhase
    between: PlanPhase
    broadcast: PlanPhase
    inside: PlanPhase
    bottleneck: str

    def to_object(self) -> dict[str, object]:
        """Return a JSON object: GB/s of every phase alone, null for one that moves nothing, and the bottleneck."""
        phases = (self.reduce, self.between, self.broadcast, self.inside)
        return {
            "alone": {one.name: one.rate if math.isfinite(one.rate) else None for one in phases},
            "bottleneck": self.bottleneck,
        }


def phases(plan: Plan) -> PlanPhases | None:
    """Return the phases of a plan over several servers; None for others, and for an all-to-all.

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
    servers = FabricServers(fabric)
    if len(servers.names) < 2:
        return None
    load = {name: _phase_loads(name, plan.shards, servers) for name in (REDUCE, BETWEEN_SERVERS, BROADCAST)}
    inside = [a + b for a, b in zip(load[REDUCE], load[BROADCAST], strict=True)]
    between = load[BETWEEN_SERVERS]
    total = [a + b for a, b in zip(inside, between, strict=True)]
    return PlanPhases(
        reduce=_plan_phase(REDUCE, load[REDUCE], fabric),
        between=_plan_phase(BETWEEN_SERVERS, between, fabric),
        broadcast=_plan_phase(BROADCAST, load[BROADCAST], fabric),
        inside=_plan_phase(INSIDE_SERVERS, inside, fabric),
        bottleneck=_bottleneck(
            [(bool(inside[link]), bool(between[link])) for link in full_links(total, fabric)]
        ),
    )


def _phase_loads(phase: str, shards: Sequence[Shard], servers: FabricServers) -> list[Fraction]:
    """Return the bytes across every link in a phase, for each byte of the buffer."""

    def within(edge: Edge) -> bool:
        # Helpers are in no server.
        return max(edge.parent, edge.child) < len(servers.same) and servers.same[edge.parent, edge.child]

    def part(stage: Stage) -> Stage:
        inside = REDUCE if stage.op == "reduce" else BROADCAST
        edges = (edge for edge in stage.edges if (inside if within(edge) else BETWEEN_SERVERS) == phase)
        return replace(stage, edges=tuple(edges))

    if isinstance(shards, ImageShards) and not all(map(servers.keeps, shards.generators)):
        shards = tuple(shards)  # an edge inside a server may have images between two servers
    return link_loads(shards, servers.fabric, part=part)


def _plan_phase(name: str, load: Sequence[Fraction], fabric: Fabric) -> PlanPhase:
    rate = rate_of_loads(load, fabric)
    return PlanPhase(
        name,
        math.inf if rate is None else nearest_float(rate),
        tuple((fabric.links[link].src, fabric.links[link].dst) for link in full_links(load, fabric)),
    )


def _bottleneck(full: Sequence[tuple[bool, bool]]) -> str:
    """Return the bottleneck from the full links, each given as (inside, between)."""
    kinds = set(full)
    names = []
    if (False, True) in kinds:
        names.append(BETWEEN_SERVERS)
    if (True, False) in kinds:
        names.append("inside servers")
    if (True, True) in kinds:
        names.append("links that both cross")
    return " and ".join(names)


ROUND = "round"
"""The collective of a round's plan: every rank's buffer is its result, in place."""

UNSPLIT_KINDS = ("exchange", "gather")
"""Kinds of which all consecutive stages are one round."""


@dataclass(frozen=True, slots=True)
class PlanRound:
    """A part of a plan that streams, without a choice of entries in between.

    ``kind`` is ``elements``, ``exchange`` (elements of every root to its tree), ``gather`` (entries of every root to
    its tree), ``merge`` (entries one level up) or ``spread`` (entries of the root down). ``plan`` has its trees, on the
    sparse plan's ranks, topology and channels; shares are those of the moved bytes, and need not add up to 1.
    ``shards`` are, for every shard of it, the sparse plan's shards in it: for ``elements`` one, else all whose entries
    travel in one message. ``senders`` are the ranks of these messages; empty for ``elements``.
    """

    kind: str
    plan: Plan
    shards: tuple[tuple[int, ...], ...]
    senders: tuple[int, ...]


def rounds(plan: Plan) -> tuple[PlanRound, ...]:
    """Return the rounds of a plan that exchanges elements or entries, in order.

    PlanError if its shards do not have the same kinds of rounds.

    >>> import topoplan
    >>> made = topoplan.sparse_plan(topoplan.load("dgx-2"), density=0.01)
    >>> [(one.kind, len(one.plan.shards)) for one in rounds(made)]
    [('merge', 240), ('spread', 16)]
    """
    runs = [
        [(kind, tuple(stages)) for kind, stages in groupby(shard.stages, key=lambda stage: stage.kind)]
        for shard in plan.shards
    ]
    first = [kind for kind, _ in runs[0]] if runs else []
    name = "a sparse plan" if plan.sparse else "a plan with exchanges"
    for number, run in enumerate(runs):
        if [kind for kind, _ in run] != first:
            raise PlanError(
                f"runs through {', '.join(kind for kind, _ in run) or 'nothing'}, and shard 0 through "
                f"{', '.join(first)}; all shards of {name} take the same rounds",
                shard=number,
            )
    made: list[PlanRound] = []
    for place, kind in enumerate(first):
        made += _rounds_of(plan, kind, [run[place][1] for run in runs])
    return tuple(made)


def _rounds_of(plan: Plan, kind: str, stages: Sequence[tuple[Stage, ...]]) -> Iterator[PlanRound]:
    """Yield the rounds of one run of stages of every shard."""
    if kind == "elements":
        shards = tuple(Shard(shard.share, run) for shard, run in zip(plan.shards, stages, strict=True))
        yield PlanRound(kind, _as_plan(plan, shards), tuple((number,) for number in range(len(shards))), ())
        return
    if kind != "merge":
        for position in range(1 if kind in UNSPLIT_KINDS else max(len(run) for run in stages)):
            part = stages if kind in UNSPLIT_KINDS else [run[position : position + 1] for run in stages]
            yield _message_round(
                plan, kind, [(number, stage) for number, run in enumerate(part) for stage in run]
            )
        return
    for position in range(max(len(run) for run in stages)):
        level_stages = [(number, run[position]) for number, run in enumerate(stages) if position < len(run)]
        for depth in range(max(stage.height for _, stage in level_stages), 0, -1):
            yield _message_round(
                plan, kind, [(number, up) for number, stage in level_stages for up in _upwards(stage, depth)]
            )


def _upwards(stage: Stage, depth: int) -> Iterator[Stage]:
    """Yield the edges of a reduce tree from one depth upwards, each as the path of a message."""
    depths = stage.depths()
    for edge in sorted(stage.edges, key=lambda edge: edge.child):
        if depths[edge.child] == depth:
            way = Edge(edge.child, edge.parent, edge.route[::-1], edge.channel)
            yield Stage("broadcast", edge.child, (way,), stage.entries)


def _message_round(plan: Plan, kind: str, stages: Sequence[tuple[int, Stage]]) -> PlanRound:
    """Return a round in which entries of shards with the same path travel in one message."""
    ways: dict[tuple[int, tuple[Edge, ...]], list[tuple[int, Stage]]] = {}
    for number, stage in stages:
        ways.setdefault((stage.root, stage.top_down()), []).append((number, stage))
    shards = []
    for (root, edges), together in ways.items():
        share = sum((plan.shards[number].share * stage.weight for number, stage in together), Fraction(0))
        shards.append(Shard(share, (Stage("broadcast", root, edges),)))
    contents = tuple(tuple(number for number, _ in together) for together in ways.values())
    return PlanRound(kind, _as_plan(plan, tuple(shards)), contents, tuple(root for root, _ in ways))


def _as_plan(plan: Plan, shards: tuple[Shard, ...]) -> Plan:
    return replace(plan, collective=ROUND, shards=shards)


@dataclass(frozen=True, slots=True)
class ShapeClass:
    """Shards of one shape, represented by the first, number ``number`` from 0 among the shards with trees.

    ``roots`` are the ranks at which their buffers are summed or start, in the order of the shards, each once.
    """

    number: int
    shard: Shard
    count: int
    roots: tuple[int, ...]

    @property
    def trees(self) -> tuple[tuple[Stage, tuple[str, ...]], ...]:
        """The trees of the first shard, each with its operations in order: a tree up and then down is one."""
        found: list[tuple[Stage, list[str]]] = []
        for stage in self.shard.stages:
            if not stage.edges:
                continue
            if found and _isomorphic_trees(found[-1][0], stage):
                found[-1][1].append(stage.op)
            else:
                found.append((stage, [stage.op]))
        return tuple((stage, tuple(operations)) for stage, operations in found)


def tree_shapes(plan: Plan, *, apart: int = 0) -> tuple[ShapeClass, ...]:
    """Return the shapes of a plan's trees, in order of first appearance; up to ``apart`` trees are listed singly.

    >>> import topoplan
    >>> [(one.count, one.roots[-1]) for one in tree_shapes(topoplan.plan(topoplan.load("dgx-2"), "allreduce"))]
    [(16, 15)]
    >>> len(tree_shapes(topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7]), apart=2))
    2
    """
    return _classes(plan, apart, lambda shard: ())


def tree_classes(plan: Plan, *, apart: int = 0) -> tuple[ShapeClass, ...]:
    """Return `tree_shapes`, but for rings a class for each cyclic order: its rotations differ only in the root.

    >>> import topoplan
    >>> rings = topoplan.ring_plan("dgx-1v")
    >>> [len(tree_shapes(rings)), len(tree_classes(rings))]
    [1, 6]
    """
    return _classes(plan, apart, _cyclic_order if plan.method == "ring" else lambda shard: ())


def _classes(plan: Plan, apart: int, order: Callable[[Shard], tuple[int, ...]]) -> tuple[ShapeClass, ...]:
    """Return the classes of shards with trees that have the same shape and ``order``."""
    known: dict[tuple[tuple[str, int], ...], int] = {}
    groups: dict[tuple[object, ...], list[ShapeClass]] = {}
    number = 0
    for template, (shard, count) in enumerate(plan.shard_counts):
        if not any(stage.edges for stage in shard.stages):
            continue
        one = ShapeClass(number, shard, count, _roots(plan.shards, template, shard))
        groups.setdefault((order(shard), *_shard_shape(shard, known)), []).append(one)
        number += count
    found: list[ShapeClass] = []
    for group in groups.values():
        total = sum(one.count for one in group)
        if total <= apart and total == len(group):
            found += group
        else:
            roots = dict.fromkeys(root for one in group for root in one.roots)
            found.append(ShapeClass(group[0].number, group[0].shard, total, tuple(roots)))
    return tuple(sorted(found, key=lambda one: one.number))


def _cyclic_order(shard: Shard) -> tuple[int, ...]:
    """Return the ranks of a ring in order, from the lowest on; the edges of the last stage are a chain."""
    stage = shard.stages[-1]
    ranks = [stage.root, *(edge.child for edge in stage.top_down())]
    start = ranks.index(min(ranks))
    return (*ranks[start:], *ranks[:start])


def shown_stage(shard: Shard) -> Stage:
    """Return the stage that stands for a shard in a line: of an exchange the first gather, else the last one, which of
    an allreduce is the broadcast.
    """
    return next((stage for stage in shard.stages if stage.op == "gather"), shard.stages[-1])


def _roots(shards: Sequence[Shard], template: int, shard: Shard) -> tuple[int, ...]:
    """Return the roots of a shard and of its images."""
    if not isinstance(shards, ImageShards):
        return (owner_of(shard),)
    images = shards.elements[:, owner_of(shards.templates[template])]
    if shards.parts is not None:
        images = images[list(shards.parts.elements[template])]
    return tuple(sorted(set(images.tolist())))


def _shard_shape(
    shard: Shard, known: dict[tuple[tuple[str, int], ...], int]
) -> tuple[Fraction, tuple[object, ...]]:
    stages = [stage for stage in shard.stages if stage.edges]
    parts: list[object] = []
    for place, stage in enumerate(stages):
        again = place > 0 and _isomorphic_trees(stages[place - 1], stage)
        parts.append((stage.op, stage.entries, again, _rooted_shape(stage, known)))
    return shard.share, tuple(parts)


def _rooted_shape(stage: Stage, known: dict[tuple[tuple[str, int], ...], int]) -> int:
    """Return the number of the shape below the root; ``known`` numbers the shapes below a vertex."""
    below: dict[int, list[tuple[str, int]]] = {}
    for edge in reversed(stage.top_down()):
        shape = tuple(sorted(below.pop(edge.child, ())))
        below.setdefault(edge.parent, []).append((edge.channel, known.setdefault(shape, len(known))))
    shape = tuple(sorted(below.get(stage.root, ())))
    return known.setdefault(shape, len(known))


def _isomorphic_trees(first: Stage, second: Stage) -> bool:
    return first.root == second.root and set(first.edges) == set(second.edges)
