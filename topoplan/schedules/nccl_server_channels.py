"""Find the NIC of each of NCCL's channels on every server, and the GPU at which the channel enters.

NCCL gives all channels one speed (``ncclTopoCompute``, ``src/graph/search.cc``, 2.30): a NIC carries as many channels
as its rate holds of that speed, and of the speeds that NCCL tries the one with the largest product of speed and number
is taken, down to half of the best so far. So NICs of one rate carry equally many channels, a NIC of twice the rate
twice as many, and 10 and 25 GB/s together no more than one channel of 24 GB/s. Up to four fast channels are run twice,
and servers that differ run the fewest channels of any. A channel enters and leaves a server over one NIC; it begins
at a GPU nearest to that NIC, and another GPU that does not reach the NIC sends through the first one (NCCL's PXN).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise
from math import lcm
from typing import Any

from topoplan.errors import InfeasibleError
from topoplan.machine.fabric import Fabric
from topoplan.machine.fabric_structure import FabricServers
from topoplan.machine.hardware import gpu_identity, is_amd, with_assumed_capability
from topoplan.machine.topology import Topology
from topoplan.plans.shards import Edge
from topoplan.schedules.nccl_channels import MOST_CHANNELS, NcclPaths
from topoplan.schedules.ring_forest import shortest_route
from topoplan.schedules.routes import DirectRoutes, Links, edge_along

_Find = Callable[[int, int], Links]


@dataclass(frozen=True, slots=True)
class ChannelPort:
    """A NIC of a server: its links into the network and back, the nearest ranks, and GB/s in one direction."""

    links: frozenset[int]
    ranks: tuple[int, ...]
    rate: Fraction


SPEEDS: Mapping[int, tuple[float, ...]] = {
    0: (48, 30, 28, 24, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3, 2.4, 1.2, 0.24, 0.12),
    90: (48, 45, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, 0.24, 0.12),
    100: (96, 86, 80, 48, 45.1, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, 0.24, 0.12),
}
"""GB/s that NCCL tries for one channel between servers, from this compute capability on."""

LEAST_NEXT = Fraction(49, 100)
"""Part of the best speed so far below which no further speed is tried."""


@dataclass(frozen=True, slots=True)
class NicChannels:
    """Channels of one server: the number of the NIC of each, and how often NCCL runs the whole list."""

    nics: tuple[int, ...]
    times: int


def nic_channels(rates: Sequence[Fraction], capability: int) -> NicChannels:
    """Return the channels on NICs of these rates in GB/s, for GPUs of this compute capability (80, 90, ...).

    A NIC of 200 Gb/s beside one of 100; two of 400 Gb/s, for which the channels are run twice:

    >>> nic_channels([Fraction(25), Fraction(25, 2)], 80)
    NicChannels(nics=(0, 1, 0), times=1)
    >>> nic_channels([Fraction(50), Fraction(50)], 90)
    NicChannels(nics=(0, 1), times=2)
    """
    most = max(MOST_CHANNELS, len(rates))
    best, chosen = Fraction(0), Fraction(0)
    room: list[int] = []
    for number in SPEEDS[max(least for least in SPEEDS if least <= capability)]:
        speed = Fraction(str(number))
        if best and speed < LEAST_NEXT * chosen:
            break
        held = [int(rate / speed) for rate in rates]
        total = speed * min(sum(held), most)
        if total > best:
            best, chosen, room = total, speed, held
    if not best:
        return NicChannels(tuple(range(len(rates))), 1)
    nics: list[int] = []
    while len(nics) < best / chosen:
        turn = [(len(nics) + step) % len(rates) for step in range(len(rates))]
        nics.append(next(nic for nic in turn if room[nic]))
        room[nics[-1]] -= 1
    many = capability > 80 and chosen < 50 and len(nics) > 4
    return NicChannels(tuple(nics), 1 if chosen < 25 or many else 2)


class _OpenLinks(Sequence[Fraction]):
    """The capacities of links, 0 for closed ones."""

    def __init__(self, capacity: Sequence[Fraction], closed: Collection[int]) -> None:
        self._capacity, self._closed = capacity, closed

    def __len__(self) -> int:
        return len(self._capacity)

    def __getitem__(self, number: Any) -> Any:
        return Fraction(0) if number in self._closed else self._capacity[number]


class ServerChannels:
    """The channels of a fabric, and the routes of their hops; on one server ``count`` is 0.

    >>> import topoplan
    >>> channels = ServerChannels(Fabric(topoplan.nvswitch_cluster(2, gpus=4), ("nvlink", "network")))
    >>> channels.count, [channels.start(1, channel) for channel in range(4)]
    (4, [4, 5, 6, 7])
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._routes = DirectRoutes(fabric)
        self._load = [Fraction(0)] * len(fabric.links)
        self._room = list(fabric.capacity)
        self.servers = FabricServers(fabric)
        self.members: list[tuple[int, ...]] = [tuple(ranks.tolist()) for ranks in self.servers.members]
        """Ranks of every server."""
        self.parts = _parts(fabric, self.servers)
        """Every server with several ranks as a machine of its own, and NCCL's paths in it."""
        self.ports = _ports(fabric, self.servers) if len(self.members) > 1 else []
        """NICs of every server, in the order of its links into the network."""
        self._own = [
            nic_channels([port.rate for port in ports], capability) if ports else None
            for ports, capability in zip(self.ports, self._capabilities(), strict=True)
        ]
        known = [own for own in self._own if own]
        self.graph_channels = min((len(own.nics) * own.times for own in known), default=0)
        """Number of channels of NCCL's graphs; 0 on one server."""
        # Channels that repeat others on every server are left out: each has an equal part of the buffer.
        period = lcm(*(len(own.nics) for own in known))
        self.count = self.graph_channels if self.graph_channels % period else min(self.graph_channels, period)
        """Number of channels that differ."""
        if self.ports and not known:
            self.count = self.graph_channels = max(map(len, self.members))
        self._widths = cache(self._channel_widths)

    def port(self, server: int, channel: int) -> ChannelPort | None:
        """Return the NIC of a channel on a server; None if the server has no NIC."""
        own = self._own[server]
        return self.ports[server][own.nics[channel % len(own.nics)]] if own else None

    def start(self, server: int, channel: int) -> int:
        """Return the rank at which a channel enters a server."""
        own = self._own[server]
        if own is None:
            return self.members[server][channel % len(self.members[server])]
        channel %= len(own.nics)
        nic = own.nics[channel]
        near = self.ports[server][nic].ranks
        return near[(own.nics[:channel].count(nic) + nic * len(near) // len(self.ports[server])) % len(near)]

    def inside(self, op: str, parent: int, child: int, share: Fraction) -> Edge:
        """Return an edge within a server, on NCCL's path between its two GPUs."""
        return self._edge(op, parent, child, share, lambda tail, head: self._inner(tail, head, share))

    def between(self, op: str, parent: int, child: int, share: Fraction, channel: int) -> Edge:
        """Return an edge between two servers over the channel's NICs, or over any if they do not join the ranks."""
        return self._edge(
            op,
            parent,
            child,
            share,
            lambda tail, head: (
                self.over_nic(tail, head, channel)
                or self._routes.shortest(tail, head, self._room)
                or shortest_route(self._fabric, tail, head)
            ),
        )

    def through(self, parent: int, child: int, switch: str) -> Edge:
        """Return an edge over a switch to which both ranks have a link."""
        route = (self._fabric.ranks[parent], switch, self._fabric.ranks[child])
        links = tuple(self._fabric.link_index[pair] for pair in pairwise(route))
        return edge_along(self._fabric, "broadcast", parent, child, links)

    def _edge(self, op: str, parent: int, child: int, share: Fraction, find: _Find) -> Edge:
        tail, head = (parent, child) if op == "broadcast" else (child, parent)
        links = find(tail, head)
        for number in links:
            self._load[number] += share
            self._room[number] = self._fabric.capacity[number] / (1 + self._load[number])
        return edge_along(self._fabric, op, parent, child, links)

    def _inner(self, tail: int, head: int, share: Fraction) -> Links:
        """Return, of the links that NCCL stripes a hop over in turn, each time the least loaded one."""
        fabric, ranks = self._fabric, self._fabric.ranks
        paths = self.parts[int(self.servers.of_rank[tail])][1]
        try:
            hop = paths.hop(ranks[tail], ranks[head])
        except InfeasibleError:
            return shortest_route(fabric, tail, head)
        if hop.path:
            return tuple(fabric.link_index[link.src, link.dst] for link in hop.path)
        crossed = [fabric.link_index[link.src, link.dst] for link in hop.part]
        found: list[int] = []
        device = ranks[tail]
        while device != ranks[head]:
            onward = [number for number in crossed if fabric.links[number].src == device]
            number = min(onward, key=lambda link: ((self._load[link] + share) / fabric.capacity[link], link))
            found.append(number)
            device = fabric.links[number].dst
        return tuple(found)

    def over_nic(self, tail: int, head: int, channel: int) -> Links | None:
        """Return the shortest route over the channel's own NICs on both servers; None if no such route exists."""
        servers = (int(self.servers.of_rank[tail]), int(self.servers.of_rank[head]))
        width = self._widths(*servers, channel)
        links = self._routes.shortest(tail, head, width)
        return None if links is None or not all(width[number] for number in links) else links

    def _channel_widths(self, first: int, second: int, channel: int) -> _OpenLinks:
        closed: set[int] = set()
        for server in (first, second):
            own = self.port(server, channel)
            closed.update(*(port.links - own.links for port in self.ports[server] if own))
        return _OpenLinks(self._fabric.capacity, closed)

    def _capabilities(self) -> list[int]:
        """Return the lowest compute capability of each server's GPUs, where there are several servers."""
        machine = with_assumed_capability(self._fabric.topology)
        gpus = {device.name: device for device in machine.devices if device.kind == "gpu"}
        amd = is_amd(gpus.values())
        of = [0 if amd else gpu_identity(gpus[name], amd=False).capability for name in self._fabric.ranks]
        return [min(of[rank] for rank in ranks) for ranks in self.members[: len(self.ports)]]


def _parts(fabric: Fabric, servers: FabricServers) -> Mapping[int, tuple[Topology, NcclPaths]]:
    number = {name: place for place, name in enumerate(servers.names)}
    if len(number) < 2:
        alone = Topology(fabric.topology.name, fabric.topology.devices, fabric.links)
        return {0: (alone, NcclPaths(alone))}
    return {number[name]: (part.topology, NcclPaths(part.topology)) for name, part in servers.alone()}


def _ports(fabric: Fabric, servers: FabricServers) -> list[list[ChannelPort]]:
    """Return the NICs of every server, in the order of its links into the network."""
    entering: dict[str, list[int]] = {}
    for number, link in enumerate(fabric.links):
        entering.setdefault(link.dst, []).append(number)
    out: dict[str, dict[str, list[int]]] = {name: {} for name in servers.names}
    back: dict[str, dict[str, list[int]]] = {name: {} for name in servers.names}
    for number, (src, dst) in enumerate(servers.ends):
        if src != dst:
            if src in out:
                out[src].setdefault(fabric.links[number].src, []).append(number)
            if dst in back:
                back[dst].setdefault(fabric.links[number].dst, []).append(number)
    rank_of = {name: rank for rank, name in enumerate(fabric.ranks)}
    found = []
    for name in servers.names:
        ports = []
        for (sender, leave), enter in zip(out[name].items(), back[name].values(), strict=False):
            near = _nearest(sender, fabric, servers, entering, rank_of)
            if near:
                widths = [sum(fabric.capacity[number] for number in links) for links in (leave, enter)]
                if sender not in rank_of:
                    feeds = (number for number in entering.get(sender, ()) if number not in enter)
                    widths.append(sum(fabric.capacity[number] for number in feeds))
                ports.append(ChannelPort(frozenset((*leave, *enter)), near, min(map(Fraction, widths))))
        found.append(ports)
    return found


def _nearest(
    device: str,
    fabric: Fabric,
    servers: FabricServers,
    entering: Mapping[str, list[int]],
    rank_of: Mapping[str, int],
) -> tuple[int, ...]:
    """Return the ranks from which the fewest links of one server lead to a device; a rank is nearest to itself."""
    level, seen = [device], {device}
    while level:
        near = sorted(rank_of[name] for name in level if name in rank_of)
        if near:
            return tuple(near)
        level = list(
            dict.fromkeys(
                fabric.links[number].src
                for name in level
                for number in entering.get(name, ())
                if servers.ends[number][0] == servers.ends[number][1] and fabric.links[number].src not in seen
            )
        )
        seen.update(level)
    return ()
