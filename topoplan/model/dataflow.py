"""Order the hops of a plan by their dependencies, with their start-up costs and the wires on which start-ups queue.

A hop carries one chunk of one shard between two ranks and starts once its rank holds the chunk; consecutive gathers are
one exchange. Parts of the buffer on other channels run independently. A compact plan has hops of templates only: with
|T| images of the template and |R| of the route, each of these starts |T| / |R| copies of it, one at a time on each
wire.

A hop costs alpha + bytes / bandwidth (Hockney 1994); alpha is the start of a copy, half for each end that is a GPU,
unless a ``latency`` is stated. A network hop is one start-up: half at the first NIC, half at the last. LAUNCH and the
ratios of channels: NCCL ``src/graph/tuning.cc``, ``baseLat`` and ``hwLat`` of Ring, Simple (8.4 us; NVLink 3.4, PCI 5.7
us). Scale: Blink (MLSys 2020) figure 27, two hops on a DGX-2 in 26 us up to 64 KB; the double binary tree of eight hops
comes out at 79 us, 84 us were measured. The network is set to 36 us (24.8 us on that scale), so that an allgather of 1
MB between two DGX-A100 (a 200 Gb/s NIC for each GPU) runs at the measured 13.1 GB/s; 1 GB comes out at 340 GB/s, 247
were measured. PCIe beside NVLink waits T_dpa for peer access to be switched (Blink, appendix A.3); PCIe alone, or only
between GPUs that NVLink does not join or through a CPU's memory, does not. Absent: headers, flow control, queues in
NICs and switches, proxy threads, NVLink flags. More: ``tests.bench published``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from topoplan.machine.fabric import ALL, Fabric
from topoplan.machine.hardware import PEER_ACCESS
from topoplan.machine.topology import Link, Topology
from topoplan.plans.loads import edge_links, full_links, link_loads
from topoplan.plans.plan import Plan
from topoplan.plans.shards import ImageShards, Shard
from topoplan.units import exact

LAUNCH = 8.4e-6
"""Seconds from the call until the first copy starts."""

_TWO_HOPS = 26e-6
_NCCL_HOP = {"nvlink": 3.4, "c2c": 3.4, "pcie": 5.7, "sys": 5.7}

START_UP: Mapping[str, float] = {
    **{channel: (_TWO_HOPS - LAUNCH) / 2 * hop / _NCCL_HOP["nvlink"] for channel, hop in _NCCL_HOP.items()},
    "network": 36e-6,
}
"""Seconds to start one copy between two ranks, by link channel."""


def link_latency(link: Link, kinds: Mapping[str, str]) -> float:
    """Return the seconds of start-up that a hop pays for crossing a link.

    kinds: kind of every device, by name (see `device_kinds`).

    >>> import topoplan
    >>> machine = topoplan.load("dgx-2")
    >>> up = next(link for link in machine.links if link.channel == "nvlink")
    >>> round(link_latency(up, device_kinds(machine)) * 1e6, 3)
    4.4
    """
    if link.latency is not None:
        return link.latency
    ends = [kinds[link.src], kinds[link.dst]]
    if link.channel == "network" and sorted(ends) == ["gpu", "nic"]:
        return 0.0
    paying = ("gpu", "nic") if link.channel == "network" else ("gpu",)
    return START_UP[link.channel] * sum(end in paying for end in ends) / 2


def route_latency(links: Sequence[Link], kinds: Mapping[str, str]) -> float:
    """Return the seconds of start-up of a hop over a sequence of links."""
    networked = any(link.channel == "network" for link in links)
    return sum(
        link_latency(link, kinds)
        for link in links
        if link.latency is not None or not networked or link.channel in ("network", "nvlink")
    )


def device_kinds(topology: Topology) -> dict[str, str]:
    return {device.name: device.kind for device in topology.devices}


def channel_starts(topology: Topology, channels: Sequence[str]) -> dict[str, Fraction]:
    """Return the seconds after the launch at which each channel may start: 0, but for pcie beside nvlink.

    topology: the allocation whose GPUs switch peer access (`peer_access_seconds`).

    >>> import topoplan
    >>> channel_starts(topoplan.load("dgx-1v"), ("nvlink", "pcie"))
    {'nvlink': Fraction(0, 1), 'pcie': Fraction(37, 10000)}
    """
    starts = dict.fromkeys(channels, Fraction(0))
    if "nvlink" in starts and "pcie" in starts:
        starts["pcie"] = peer_access_seconds(topology)
    return starts


def peer_access_seconds(topology: Topology) -> Fraction:
    """Return T_dpa, the exact seconds to switch peer access between all GPUs of an allocation.

    Servers switch at the same time, so the largest one counts. Between two numbers of GPUs that `Topology.peer_access`
    states the time is interpolated; below the first it is the first; above the last it grows with the number of peers,
    n - 1, each of which costs a process one call. A machine that states none gets the times of a DGX-1V
    (`topoplan.machine.hardware.PEER_ACCESS`).

    >>> import topoplan
    >>> machine = topoplan.load("dgx-1v")
    >>> [float(peer_access_seconds(machine.subset(range(n)))) for n in (2, 5, 8)]
    [0.0035, 0.0035, 0.0037]
    >>> round(float(peer_access_seconds(topoplan.load("dgx-2"))), 6)
    0.007929
    """
    gpus = [device.server for device in topology.devices if device.kind == "gpu"]
    count = max(Counter(gpus).values(), default=0)
    stated = [(number, exact(seconds)) for number, seconds in topology.peer_access or PEER_ACCESS]
    below = [pair for pair in stated if pair[0] <= count]
    above = [pair for pair in stated if pair[0] > count]
    if not below:
        return above[0][1]
    number, seconds = below[-1]
    if not above:
        return seconds * Fraction(count - 1, number - 1)
    further, longer = above[0]
    return seconds + (longer - seconds) * Fraction(count - number, further - number)


@dataclass(frozen=True, slots=True)
class Hop:
    """One tree edge in the direction of its data.

    shard, stage: indices in the plan; src, dst: ranks.
    links: indices into the fabric, in the order of crossing.
    alpha: seconds of start-up per chunk.
    pace: seconds per byte of a chunk without contention: 1 / slowest bandwidth.
    waits: indices of the hops that must have delivered a chunk before it can start here.
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
    """A plan prepared for timing.

    shares: share of every shard; of a compact plan, here and below, of every template (`Plan.shard_counts`).
    counts: number of shards that each stands for.
    images: the symmetries of a compact plan.
    hops: in topological order.
    followers: for every hop, the hops that wait for it.
    seconds_per_byte, load: busy seconds of every link of the fabric, and bytes across it, per byte of the buffer.
    full: the links that are busy longest.
    lanes: the channels of every independent part of the buffer, and the seconds after the launch at which it may start.
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
    """Return the hops of a plan and their dependencies."""
    fabric = Fabric(plan.topology, plan.channels)
    images = plan.shards if isinstance(plan.shards, ImageShards) else None
    return flow_of(fabric, plan.shard_counts, link_loads(plan.shards, fabric), images=images)


def flow_of(
    fabric: Fabric,
    shard_counts: Sequence[tuple[Shard, int]],
    loads: Sequence[Fraction],
    *,
    images: ImageShards | None = None,
) -> Dataflow:
    """Return the hops of shards and their dependencies.

    shard_counts: each shard with the number of shards that it stands for.
    loads: bytes across every link of the fabric for each byte of the buffer.
    """
    kinds = device_kinds(fabric.topology)
    hops: list[Hop] = []
    for number, (shard, _) in enumerate(shard_counts):
        arriving: dict[int, list[int]] = {}
        exchanged: dict[int, list[int]] = {}
        for position, stage in enumerate(shard.stages):
            upwards = stage.op == "reduce"
            gather = stage.op == "gather"
            if not gather:
                for rank, received in exchanged.items():
                    arriving.setdefault(rank, []).extend(received)
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
    lanes, lane_of_shard = _channel_parts(fabric, [shard for shard, _ in shard_counts])
    return Dataflow(
        fabric=fabric,
        shares=tuple(float(shard.share) for shard, _ in shard_counts),
        counts=tuple(count for _, count in shard_counts),
        images=images,
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


def switched_hops(plan: Plan) -> int:
    """Return the number of edges that take PCIe between GPUs that NVLink joins too, for which peer access is switched.

    Staged copies need no peer access, and channels of a split plan have their own starts.

    >>> import topoplan
    >>> switched_hops(topoplan.plan("dgx-1v", "broadcast", gpus=[6, 7], channels="all"))
    1
    """
    return _switched(Fabric(plan.topology, plan.channels), [shard for shard, _ in plan.shard_counts])


def _switched(fabric: Fabric, shards: Sequence[Shard]) -> int:
    if ALL not in fabric.channels:
        return 0
    joined = fabric.nvlink_pairs
    return sum(
        edge.channel not in ("nvlink", "network") and (edge.parent, edge.child) in joined
        for shard in shards
        for stage in shard.stages
        for edge in stage.edges
    )


def _channel_parts(
    fabric: Fabric, shards: Sequence[Shard]
) -> tuple[tuple[tuple[str, float], ...], tuple[int, ...]]:
    """Return the channels that a split plan uses, in its order, and the index of each shard's channel."""
    channels = fabric.channels
    if _switched(fabric, shards):
        start = float(peer_access_seconds(fabric.topology))
        return (("+".join(channels), start),), (0,) * len(shards)
    if not fabric.split:
        return (("+".join(channels), 0.0),), (0,) * len(shards)
    starts = channel_starts(fabric.topology, channels)
    # A shard of several channels, which no valid split plan has, waits for the last of them.
    last = [
        max((channels.index(edge.channel) for stage in shard.stages for edge in stage.edges), default=0)
        for shard in shards
    ]
    used = sorted(set(last))
    lanes = tuple((channels[place], float(starts[channels[place]])) for place in used)
    return lanes, tuple(used.index(place) for place in last)


Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Starters:
    """Hops grouped by the routes that start them.

    hop, route: pairs of a hop and a route, in ascending order of the hops, each of which has a route or more.
    wires: for every route, the copies that it can start at once: the wires of its narrowest link.
    copies: for every pair, the number that the hop stands for on one such route.
    """

    hop: tuple[int, ...]
    route: tuple[int, ...]
    wires: tuple[int, ...]
    copies: tuple[float, ...]

    def longest(self, before: Floats, starting: Floats, after: Floats) -> Floats:
        """Return, as (F, C), the seconds that the slowest route of every hop takes to start all its copies.

        before, starting, after: (F, C) float64, seconds of every hop: until its first start-up can begin, in all its
        start-ups, and from the end of its last one. No order is faster: a route begins after the least ``before`` and
        ends with the least ``after``.
        """
        hop = np.array(self.hop, dtype=np.int64)
        route = np.array(self.route, dtype=np.int64)
        order = np.argsort(route, kind="stable")
        first = np.searchsorted(route[order], np.arange(len(self.wires)))
        wires = np.array(self.wires, dtype=np.float64)[:, None]
        every = starting[hop] * np.array(self.copies, dtype=np.float64)[:, None]
        busy = np.add.reduceat(every[order], first, axis=0) / wires
        earliest, latest = (np.minimum.reduceat(time[hop[order]], first, axis=0) for time in (before, after))
        through = (earliest + busy + latest)[route]
        longest: Floats = np.maximum.reduceat(through, np.searchsorted(hop, np.arange(len(starting))), axis=0)
        return longest


def starters(flow: Dataflow) -> Starters:
    """Return the routes of a dataflow and the hops on each.

    DGX-2, one hop: two ranks share a reduce and a broadcast, each on a route of its own direction.
    """
    links = flow.fabric.links
    if flow.images is None:
        keys: list[tuple[object, ...]] = [(hop.src, hop.dst, hop.links) for hop in flow.hops]
        copies = [1.0] * len(keys)
    else:
        found = _route_orbits(flow, flow.images)
        keys = [(nodes, tuple(links[link].channel for link in hop.links)) for hop, (nodes, _) in found]
        copies = [flow.counts[hop.shard] / size for hop, (_, size) in found]
    number: dict[tuple[object, ...], int] = {}
    route = tuple(number.setdefault(key, len(number)) for key in keys)
    narrowest = {
        at: min(links[link].count for link in hop.links) for at, hop in zip(route, flow.hops, strict=True)
    }
    wires = tuple(narrowest[at] for at in range(len(number)))
    return Starters(tuple(range(len(keys))), route, wires, tuple(copies))


def _route_orbits(flow: Dataflow, images: ImageShards) -> list[tuple[Hop, tuple[tuple[int, ...], int]]]:
    """Return every hop with the least image of its route, as nodes from the first rank of an orbit, and the orbit's
    size.
    """
    elements, ends = images.elements, flow.fabric.ends
    to_first: dict[int, Indices] = {}
    found = []
    for hop in flow.hops:
        if hop.src not in to_first:
            image = elements[:, hop.src]
            to_first[hop.src] = np.flatnonzero(image == image.min())
        route = [hop.src, *(ends[link][1] for link in hop.links)]
        distinct = {tuple(row) for row in elements[to_first[hop.src][:, None], np.array(route)].tolist()}
        size = len(elements) // len(to_first[hop.src]) * len(distinct)
        found.append((hop, (min(distinct), size)))
    return found
