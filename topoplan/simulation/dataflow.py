"""What waits for what when a plan runs: its tree edges as hops, in an order in which they can start.

A hop carries one chunk of one shard from one rank to another. It may start when its rank holds that chunk:
every hop of the same shard into that rank, in an earlier stage or the same one, has delivered it. For a
reduce tree these are the children, for a broadcast tree the parent, and between two stages the handover at
the root. Gathers that follow one another are one exchange and wait only for what came before it. Where the buffer is
split between channels, each runs by itself, a *lane*, and may start later than others.

All images of a tree under symmetries of the machine take the same time, so of a compact plan the templates alone
become hops; what they share with their images, the links and the wires that start copies, is counted for all.
"""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.fabric.fabric import ALL, Fabric
from topoplan.plans.loads import edge_links, full_links, link_loads
from topoplan.plans.plan import Plan
from topoplan.plans.symmetric_shards import ImageShards
from topoplan.simulation.latency import channel_starts, device_kinds, peer_access_seconds, route_latency


@dataclass(frozen=True, slots=True)
class Hop:
    """One tree edge in the direction of its data.

    Parameters
    ----------
    shard, stage, src, dst : int
        Where it stands in the plan, and its sending and receiving rank.
    links : tuple of int
        The links that it crosses, in order, as indices into the fabric.
    alpha : float
        Seconds of start-up for every chunk.
    pace : float
        Seconds for each byte of a chunk that has the route to itself: 1 / slowest bandwidth.
    waits : tuple of int
        Positions of the hops that must have delivered a chunk before it can start here.
    """

    shard: int
    stage: int
    src: int
    dst: int
    links: tuple[int, ...]
    alpha: float
    pace: float
    waits: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dataflow:
    """A plan ready for timing.

    Parameters
    ----------
    fabric : Fabric
    shares : tuple of float
        Share of every shard; of a compact plan, here and below, of every template (`Plan.shard_counts`).
    counts : tuple of int
        How many shards each of them stands for.
    images : ImageShards or None
        The symmetries of a compact plan.
    hops : tuple of Hop
        Every hop stands after the hops it waits for.
    followers : tuple of tuple of int
        For every hop, the hops that wait for it.
    seconds_per_byte : tuple of float
        For every link of the fabric, the time it is busy for each byte of the buffer.
    load : tuple of float
        For every link of the fabric, the bytes across it for each byte of the buffer.
    full : tuple of int
        The links that are busy longest.
    lanes : tuple of (str, float)
        Name of every lane, its channels, and the seconds after the launch at which it may start. One lane, at once,
        where the buffer is not split.
    lane_of_shard : tuple of int
    """

    fabric: Fabric
    shares: tuple[float, ...]
    counts: tuple[int, ...]
    images: ImageShards | None
    hops: tuple[Hop, ...]
    followers: tuple[tuple[int, ...], ...]
    seconds_per_byte: tuple[float, ...]
    load: tuple[float, ...]
    full: tuple[int, ...]
    lanes: tuple[tuple[str, float], ...]
    lane_of_shard: tuple[int, ...]


def dataflow(plan: Plan) -> Dataflow:
    """Hops of a plan and what each waits for.

    Raises
    ------
    PlanError
        A stage is no tree, or a route crosses a link that the machine does not have.

    Examples
    --------
    >>> import topoplan
    >>> flow = dataflow(topoplan.plan(topoplan.load("dgx-2"), "allreduce"))
    >>> len(flow.hops), len(flow.hops[0].links)
    (480, 2)
    """
    fabric = Fabric(plan.topology, plan.channels)
    kinds = device_kinds(plan.topology)
    hops: list[Hop] = []
    for number, (shard, _) in enumerate(plan.shard_counts):
        arriving: dict[int, list[int]] = {}
        exchanged: dict[int, list[int]] = {}
        for position, stage in enumerate(shard.stages):
            upwards = stage.op == "reduce"
            gather = stage.op == "gather"
            if not gather:
                _arrive(arriving, exchanged)
                exchanged = {}
            carried: dict[int, int] = {}
            edges = stage.top_down()
            for edge in reversed(edges) if upwards else edges:
                src, dst = (edge.child, edge.parent) if upwards else (edge.parent, edge.child)
                links = edge_links(edge, stage.op, fabric)
                hop = Hop(
                    shard=number,
                    stage=position,
                    src=src,
                    dst=dst,
                    links=links,
                    alpha=route_latency([fabric.links[link] for link in links], kinds),
                    pace=1e-9 / min(fabric.links[link].bandwidth for link in links),
                    waits=(carried[src],) if src in carried else tuple(arriving.get(src, ())),
                )
                if gather:
                    carried[dst] = len(hops)
                (exchanged if gather else arriving).setdefault(dst, []).append(len(hops))
                hops.append(hop)
    followers: list[list[int]] = [[] for _ in hops]
    for number, hop in enumerate(hops):
        for before in hop.waits:
            followers[before].append(number)
    loads = link_loads(plan.shards, fabric)
    lanes, lane_of_shard = _lanes(plan, fabric)
    return Dataflow(
        fabric=fabric,
        shares=tuple(float(shard.share) for shard, _ in plan.shard_counts),
        counts=tuple(count for _, count in plan.shard_counts),
        images=plan.shards if isinstance(plan.shards, ImageShards) else None,
        hops=tuple(hops),
        followers=tuple(tuple(after) for after in followers),
        seconds_per_byte=tuple(
            float(load / c) * 1e-9 for load, c in zip(loads, fabric.capacity, strict=True)
        ),
        load=tuple(float(load) for load in loads),
        full=full_links(loads, fabric),
        lanes=lanes,
        lane_of_shard=lane_of_shard,
    )


def _arrive(arriving: dict[int, list[int]], exchanged: dict[int, list[int]]) -> None:
    """What ranks have once an exchange is over."""
    for rank, hops in exchanged.items():
        arriving.setdefault(rank, []).extend(hops)


def switched_hops(plan: Plan) -> int:
    """Edges of a plan that take PCIe between two GPUs that NVLink joins too, for which peer access is switched.

    Staged copies need no peer access, and channels of a split plan know their starts themselves.

    Examples
    --------
    >>> import topoplan
    >>> switched_hops(topoplan.plan("dgx-1v", "broadcast", gpus=[6, 7], channels="all"))
    1
    >>> switched_hops(topoplan.plan("dgx-1v", gpus=[0, 1, 6]))
    0
    """
    if ALL not in plan.channels:
        return 0
    joined = Fabric(plan.topology, plan.channels).nvlink_pairs
    return sum(
        edge.channel not in ("nvlink", "network") and (edge.parent, edge.child) in joined
        for shard, _ in plan.shard_counts
        for stage in shard.stages
        for edge in stage.edges
    )


def _lanes(plan: Plan, fabric: Fabric) -> tuple[tuple[tuple[str, float], ...], tuple[int, ...]]:
    """The channels that a split plan uses, in its order, and which of them each shard keeps to."""
    if switched_hops(plan):
        start = float(peer_access_seconds(plan.topology))
        return (("+".join(plan.channels), start),), (0,) * len(plan.shard_counts)
    if not fabric.split:
        return (("+".join(plan.channels), 0.0),), (0,) * len(plan.shard_counts)
    starts = channel_starts(plan.topology, plan.channels)
    # A shard of several channels, which no valid split plan has, waits for the last of them.
    last = [
        max((plan.channels.index(edge.channel) for stage in shard.stages for edge in stage.edges), default=0)
        for shard, _ in plan.shard_counts
    ]
    used = sorted(set(last))
    lanes = tuple((plan.channels[place], float(starts[plan.channels[place]])) for place in used)
    return lanes, tuple(used.index(place) for place in last)
