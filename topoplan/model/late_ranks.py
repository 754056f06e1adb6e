"""Plan an allreduce in which some ranks come late (`topoplan.plan_late`), and bound its time from below.

The other ranks add up their buffers while the latest rank is absent. Its own buffer then leaves it once, and the result
enters it once: it is a leaf next to the root of every tree, or the root of trees that leave it over several links.

Trees come from two forests: a broadcast from the latest rank, and an allreduce among the others that the latest rank
joins at every root. Their shares x are those of the least time t after its arrival,

    minimise t   subject to   sum of x(T) after(T, e) <= c(e) t   and
                              sum of x(T) load(T, e) <= c(e) (d + t)   for every link e,   sum of x(T) = 1,

where load counts all bytes on a link for each byte of the buffer, after those of broadcasts and of the reduce edges at
the latest rank, and d is its delay. No plan exceeds the rate at which a late rank broadcasts, nor the largest flow from
the others into it: its buffer must reach every other rank after d, and something for each element must enter it after
d. On p equal ports of a switch both are one buffer at full rate, which t reaches for large d; a plan for ranks that
come together needs 2 (p - 1) / p.

The times are those of engines whose ranks start without the others, as those of the tcp back end do. Ranks of the
shared back end have no links: the others add up their buffers before the late one comes, each rank its part.

Absent: reduce, reduce_scatter and broadcast, which gain nothing on a switch: the bound of this kind is there the time
of the usual plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import chain
from math import lcm

from topoplan.errors import InfeasibleError, PlanError, UsageError
from topoplan.machine.fabric import CHANNEL_SPLITS, Fabric
from topoplan.machine.topology import TopologyLike
from topoplan.model.closed_form import check_late, chunk_counts, pipeline
from topoplan.model.dataflow import dataflow
from topoplan.model.event_simulation import run_events
from topoplan.plans.build import Allocation
from topoplan.plans.loads import edge_links, link_loads, rate_of_loads
from topoplan.plans.plan import LATE, Plan
from topoplan.plans.shards import Edge, Shard, Stage
from topoplan.plans.verify import verify
from topoplan.schedules.routes import DirectRoutes, edge_along
from topoplan.solve.cuts_and_partitions import FlowNetwork, best_bound, bounded_plan, whole_capacities
from topoplan.solve.packing.column_generation import GUIDED_ROWS
from topoplan.solve.planner import plan as plan_together
from topoplan.solve.simplex.exact_simplex import PackingSimplex
from topoplan.solve.simplex.guided_simplex import GuidedSimplex
from topoplan.units import exact, nearest_float, parse_size

DELAY_PARTS = 64
"""Parts of the time of the usual plan to which the delay is rounded for the program of shares."""

LONGEST_DELAY = 64
"""Times of the usual plan above which a longer delay changes no share."""

MOST_RANKS = 128
"""GPUs up to which late ranks are planned: 128 take 20 seconds, and the time grows faster than their square."""

MOST_GUIDED = 1 << 31
"""Entries up to which a large program is solved in floats and confirmed exactly."""

MOST_TRANSFERS = 100_000
"""Transfers of chunks up to which a plan is simulated with the chunks that the closed form finds best."""

MOST_TREES = 1024
"""Trees times ranks up to which every tree is tried with every root."""


@dataclass(frozen=True, slots=True)
class LatePlan:
    """A plan for late ranks, its time, and the bound below which no plan comes.

    Attributes
    ----------
    plan : Plan
        Its schedule is ``late ranks``; or the usual plan, if that takes no longer.
    late : tuple of (int, float)
        Late ranks, ascending, and the seconds by which they come after the others.
    nbytes : int
        Bytes of the buffer.
    seconds, usual, waiting : float
        Seconds from the call of the first rank until the last one has the result, by the event simulation: of this
        plan, of the usual plan with the ranks held back or all waiting, whichever takes less, and if all ranks wait
        for the latest and then run the usual plan.
    bound : float
        Seconds from the call of the first rank that no plan beats without in-network reduction, without start-ups.
    rate_after, bound_after : float
        GB/s of the buffer after the arrival of the latest rank, once the others have added up their buffers: by the
        loads of the links, and the most of any plan. ``rate_after`` of the usual plan is its own rate.
    """

    plan: Plan
    late: tuple[tuple[int, float], ...]
    nbytes: int
    seconds: float
    usual: float
    waiting: float
    bound: float
    rate_after: float
    bound_after: float

    @property
    def arrival(self) -> float:
        """Seconds from the call of the first rank to that of the last."""
        return max(seconds for _, seconds in self.late)

    def to_object(self) -> dict[str, object]:
        names = ("nbytes", "seconds", "usual", "waiting", "bound", "rate_after", "bound_after")
        ranks = [{"rank": rank, "seconds": seconds} for rank, seconds in self.late]
        return {"ranks": ranks, **{name: getattr(self, name) for name in names}}


def plan_late(
    topology: TopologyLike,
    late: Mapping[int, float],
    *,
    nbytes: int | str,
    gpus: Sequence[int] | None = None,
    channels: str = "auto",
    progress: Callable[[str], None] | None = None,
) -> LatePlan:
    """Return the faster of the plan for late ranks and the usual plan of an allreduce, by the event simulation.

    Parameters
    ----------
    topology, gpus, channels, progress
        As for `topoplan.plan`; channels between which a buffer is split are not supported.
    late : mapping of int to float
        For each late rank, 0 to N - 1 in the order of the GPUs, the seconds by which it comes after the others.
    nbytes : int or str
        Bytes of the buffer, or a text such as "64MB".

    Raises
    ------
    UsageError
        An unknown rank, seconds that are negative or not finite, no late rank, a single GPU or more than `MOST_RANKS`,
        switches that add, or as `topoplan.plan`.
    InfeasibleError
        As `topoplan.plan`.

    See Also
    --------
    topoplan.plan, topoplan.verify

    Examples
    --------
    Eight GPUs on an NVSwitch; rank 3 comes as late as one allreduce of the others takes. Without start-ups the plan
    takes 2.75 buffers at full rate, and waiting 3.5.

    >>> import topoplan
    >>> made = plan_late("dgx-h100", {3: 0.00417}, nbytes="1GB")
    >>> made.rate_after, made.bound_after, round(made.waiting / made.seconds, 2)
    (450.0, 450.0, 1.25)
    """
    asked = Allocation.of(topology, gpus=gpus)
    size = len(asked.gpus)
    _check(late, size, channels)
    size_in_bytes = parse_size(nbytes)
    if size_in_bytes <= 0:
        raise UsageError(f"nbytes must be above 0, got {size_in_bytes}; give the size of the buffer")
    make = partial(plan_together, asked.machine, channels=channels, progress=progress)
    usual = make(gpus=asked.gpus)
    fabric = Fabric(usual.topology, usual.channels)
    if fabric.in_network:
        raise UsageError("late ranks need a machine whose switches do not add; leave --in-network out")
    arrival = max(late.values())
    latest = min(rank for rank, seconds in late.items() if seconds == arrival)
    bounds = {rank: _bound_after(fabric, rank) for rank in late}
    least = max(late[rank] + size_in_bytes / (float(bounds[rank]) * 1e9) for rank in late)
    candidates = [usual]
    delay = _rounded_delay(usual, arrival / size_in_bytes)
    shards = _late_forest(asked, fabric, latest, delay, make)
    if shards:
        candidates.append(bounded_plan(fabric, "allreduce", shards, LATE))
        verify(candidates[-1])
    waiting = arrival + _simulated(usual, size_in_bytes, {})
    times = [_simulated(one, size_in_bytes, late) for one in candidates]
    times[0] = min(times[0], waiting)
    best = min(range(len(times)), key=lambda place: (times[place], place))
    return LatePlan(
        plan=candidates[best],
        late=tuple(sorted(late.items())),
        nbytes=size_in_bytes,
        seconds=times[best],
        usual=times[0],
        waiting=waiting,
        bound=max(least, size_in_bytes / (usual.bound * 1e9)),
        rate_after=nearest_float(_rate_after(shards, fabric, latest)) if best else usual.rate,
        bound_after=nearest_float(bounds[latest]),
    )


def _check(late: Mapping[int, float], size: int, channels: str) -> None:
    if not 2 <= size <= MOST_RANKS:
        raise UsageError(f"late ranks need 2 to {MOST_RANKS} GPUs, got {size}; choose others with gpus")
    if not late:
        raise UsageError("late must name a rank, got none; give a rank and its seconds, or use topoplan.plan")
    check_late(late, size)
    if str(channels) in CHANNEL_SPLITS:
        raise UsageError(f"late ranks need channels that share a buffer, got {channels}; use auto or nvlink")


def _simulated(plan: Plan, nbytes: int, late: Mapping[int, float]) -> float:
    """Return the seconds of the event simulation, of coarser chunks if there are more than `MOST_TRANSFERS`."""
    flow = dataflow(plan)
    of_chunk = [len(hop.links) * flow.counts[hop.shard] for hop in flow.hops]
    chunks = chunk_counts(pipeline(flow), nbytes, None)
    chunk_bytes = None
    if (
        sum(count * chunks[hop.shard] for count, hop in zip(of_chunk, flow.hops, strict=True))
        > MOST_TRANSFERS
    ):
        chunk_bytes = math.ceil(max(flow.shares) * nbytes / max(1, MOST_TRANSFERS // sum(of_chunk)))
    return run_events(plan, nbytes=nbytes, chunk_bytes=chunk_bytes, late=late).seconds


def _bound_after(fabric: Fabric, rank: int) -> Fraction:
    """Return the GB/s of the buffer that no plan exceeds after the arrival of a rank, exact.

    Its elements must reach every other rank, and something for each element must enter it; the others may have moved
    theirs next to it before.
    """
    leaving = best_bound(fabric, "broadcast", rank).bound(fabric, "broadcast", rank)
    capacity, unit = whole_capacities(fabric)
    source, unlimited = len(fabric.nodes), sum(capacity)
    arcs = [(tail, head, c) for (tail, head), c in zip(fabric.ends, capacity, strict=True)]
    arcs += [(source, other, unlimited) for other in range(fabric.size) if other != rank]
    entering = FlowNetwork(source + 1, arcs).maximum(source, rank)
    return min(leaving, Fraction(entering, unit))


def _rounded_delay(usual: Plan, delay: float) -> Fraction:
    """Return seconds per byte as seconds per GB, rounded down to a 64th of the time of the usual plan.

    It is at most `LONGEST_DELAY`: the others have added up by then, and the program keeps small numbers.
    """
    parts = math.floor(min(delay * 1e9 * usual.rate, LONGEST_DELAY) * DELAY_PARTS)
    return Fraction(parts, DELAY_PARTS) / exact(usual.rate)


def _late_forest(
    asked: Allocation,
    fabric: Fabric,
    latest: int,
    delay: Fraction,
    make: Callable[..., Plan],
) -> tuple[Shard, ...]:
    """Return the shards for a late rank; () if no tree joins it so.

    If the trees stay below the bound, they are taken with every root next to the late rank.
    """
    routes = DirectRoutes(fabric)
    trees = _unique(
        chain(
            _rooted_trees(asked, fabric, routes, latest, make),
            _joined_trees(asked, fabric, routes, latest, make),
        )
    )
    if not trees:
        return ()
    shards = _best_shares(fabric, latest, delay, trees)
    short = _rate_after(shards, fabric, latest) < _bound_after(fabric, latest)
    if short and len(trees) * fabric.size <= MOST_TREES:
        trees = _unique(chain(trees, *(_rerooted(fabric, routes, latest, stages) for stages in trees)))
        shards = _best_shares(fabric, latest, delay, trees)
    return shards


def _loads_after(shards: Sequence[Shard], fabric: Fabric, latest: int) -> list[Fraction]:
    """Return the bytes on every link after the arrival for each byte of the buffer, if the others have added up."""

    def after(stage: Stage) -> Stage:
        if stage.op == "broadcast":
            return stage
        return replace(
            stage, edges=tuple(edge for edge in stage.edges if latest in (edge.parent, edge.child))
        )

    return link_loads(shards, fabric, part=after)


def _rate_after(shards: Sequence[Shard], fabric: Fabric, latest: int) -> Fraction:
    rate = rate_of_loads(_loads_after(shards, fabric, latest), fabric)
    assert rate is not None, "the result crosses a link"
    return rate


def _best_shares(
    fabric: Fabric, latest: int, delay: Fraction, trees: Sequence[tuple[Stage, ...]]
) -> tuple[Shard, ...]:
    """Return the shards of the least time after the arrival of the latest rank.

    Columns are x(T) / t. The second rows, of all loads, are those of the module's formula divided by t.
    """
    capacity, scale = whole_capacities(fabric)
    shards = [Shard(Fraction(1), stages) for stages in trees]
    after = [_loads_after([shard], fabric, latest) for shard in shards]
    whole = [link_loads([shard], fabric) for shard in shards]
    # bytes that cross a link before the arrival are rounded down, or the numbers had hundreds of bits
    unit = DELAY_PARTS * lcm(*(load.denominator for loads in (*after, *whole) for load in loads))
    before = [math.floor(delay * c * unit / scale) for c in capacity]
    columns = [
        [
            *(int(load * unit) for load in late),
            *(int(load * unit) - early for load, early in zip(loads, before, strict=True)),
        ]
        for late, loads in zip(after, whole, strict=True)
    ]
    limits = [*capacity, *capacity]
    guided = len(limits) >= GUIDED_ROWS and max(map(abs, chain(*columns))) < MOST_GUIDED
    program: PackingSimplex | GuidedSimplex = GuidedSimplex(limits) if guided else PackingSimplex(limits)
    program.add(columns, [1] * len(trees))
    program.optimise()
    found = {place: share for place, share in program.solution().items() if share}
    total = sum(found.values(), Fraction(0))
    return tuple(Shard(found[place] / total, trees[place]) for place in sorted(found))


def _rerooted(
    fabric: Fabric, routes: DirectRoutes, latest: int, stages: tuple[Stage, ...]
) -> Iterator[tuple[Stage, ...]]:
    """Yield the stages of a tree with a leaf at the late rank, from each other root that it reaches directly."""
    spread = stages[-1]
    if spread.root == latest:
        return
    beside: dict[int, list[Edge]] = {}
    for edge in spread.edges:
        if latest not in (edge.parent, edge.child):
            beside.setdefault(edge.parent, []).append(edge)
            turned = Edge(edge.child, edge.parent, edge.route[::-1], edge.channel)
            beside.setdefault(edge.child, []).append(turned)
    for root in sorted(beside):
        reached, edges = [root], []
        for rank in reached:
            below = [edge for edge in beside[rank] if edge.child not in reached]
            reached += [edge.child for edge in below]
            edges += below
        routed = [_routed(fabric, routes, "broadcast", edge) for edge in edges]
        inner = [edge for edge in routed if edge is not None]
        made = _with_leaf(fabric, routes, root, latest, inner, inner)
        if made is not None and len(inner) == len(edges) and root < fabric.size:
            yield made


def _unique(trees: Iterator[tuple[Stage, ...]]) -> list[tuple[Stage, ...]]:
    known = {
        tuple((stage.op, stage.root, tuple(sorted(map(_key, stage.edges)))) for stage in stages): stages
        for stages in trees
    }
    return list(known.values())


def _key(edge: Edge) -> tuple[int, int, tuple[str, ...], str]:
    return edge.parent, edge.child, edge.route, edge.channel


def _rooted_trees(
    asked: Allocation,
    fabric: Fabric,
    routes: DirectRoutes,
    latest: int,
    make: Callable[..., Plan],
) -> Iterator[tuple[Stage, ...]]:
    """Yield stages from the trees of a broadcast by the late rank.

    If it has one child, that is the root, with one hop less after the arrival and the same loads.
    """
    root = asked.gpus[latest]
    forest = make("broadcast", gpus=asked.gpus, root=root)
    if forest.channels != fabric.channels:
        return
    for shard in forest.shards:
        edges = shard.stages[0].edges
        below = [edge for edge in edges if edge.parent == latest]
        if len(below) == 1:
            inner = tuple(edge for edge in edges if edge.parent != latest)
            made = _with_leaf(fabric, routes, below[0].child, latest, inner, inner)
        else:
            made = _both_ways(fabric, routes, latest, edges)
        if made is not None:
            yield made


def _joined_trees(
    asked: Allocation,
    fabric: Fabric,
    routes: DirectRoutes,
    latest: int,
    make: Callable[..., Plan],
) -> Iterator[tuple[Stage, ...]]:
    """Yield stages from the trees of an allreduce among the other ranks, whose roots the late rank joins."""
    others = [rank for rank in range(fabric.size) if rank != latest]
    chosen = [asked.gpus[rank] for rank in others]
    try:
        forest = make(gpus=chosen)
    except InfeasibleError:
        return
    if len(others) > 1 and forest.channels != fabric.channels:
        return
    number = {place: fabric.vertices.index(name) for place, name in enumerate(forest.vertices)}
    for shard in forest.shards:
        reduce, broadcast = (
            tuple(replace(edge, parent=number[edge.parent], child=number[edge.child]) for edge in stage.edges)
            for stage in shard.stages
        )
        made = _with_leaf(fabric, routes, number[shard.stages[0].root], latest, reduce, broadcast)
        if made is not None:
            yield made


def _with_leaf(
    fabric: Fabric,
    routes: DirectRoutes,
    root: int,
    leaf: int,
    reduce: Sequence[Edge],
    broadcast: Sequence[Edge],
) -> tuple[Stage, ...] | None:
    """Return the stages of a reduce to and a broadcast from a root that a leaf joins; None without a route.

    The leaf has a stage of its own, so that the root adds its elements last: sums of the others need not be kept.
    """
    upwards = _turned(fabric, routes, reduce)
    last = _routed(fabric, routes, "reduce", Edge(root, leaf, (), ""))
    spread = _routed(fabric, routes, "broadcast", Edge(root, leaf, (), ""))
    if upwards is None or last is None or spread is None:
        return None
    first = (Stage("reduce", root, upwards),) if upwards else ()
    return *first, Stage("reduce", root, (last,)), Stage("broadcast", root, (*broadcast, spread))


def _both_ways(
    fabric: Fabric, routes: DirectRoutes, root: int, edges: Sequence[Edge]
) -> tuple[Stage, ...] | None:
    upwards = _turned(fabric, routes, edges)
    return (
        None if upwards is None else (Stage("reduce", root, upwards), Stage("broadcast", root, tuple(edges)))
    )


def _turned(fabric: Fabric, routes: DirectRoutes, edges: Sequence[Edge]) -> tuple[Edge, ...] | None:
    """Return the edges of a reduce: on their routes backwards, or else on the shortest ones."""
    turned = [_routed(fabric, routes, "reduce", edge) for edge in edges]
    known = tuple(edge for edge in turned if edge is not None)
    return known if len(known) == len(edges) else None


def _routed(fabric: Fabric, routes: DirectRoutes, op: str, edge: Edge) -> Edge | None:
    """Return an edge whose route data of a stage may take: its own or the shortest; None without one."""
    try:
        edge_links(edge, op, fabric)
    except PlanError:
        ends = (edge.child, edge.parent) if op == "reduce" else (edge.parent, edge.child)
        links = routes.shortest(*ends, fabric.capacity)
        return None if links is None else edge_along(fabric, op, edge.parent, edge.child, links)
    return edge
