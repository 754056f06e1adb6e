"""NCCL's channels between servers: which NIC each one keeps to, where it enters a server, and the way of its hops.

A channel takes one NIC of every server, number c modulo their count, and begins in each at a GPU nearest to that NIC.
So all NICs carry equally many channels. A GPU that does not reach the NIC of its channel sends through one of its own
where that is no detour, or else through the GPU at which the channel enters (NCCL's PXN).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import pairwise

from topoplan.errors import InfeasibleError
from topoplan.fabric.fabric import Fabric
from topoplan.fabric.servers import Servers
from topoplan.plans.tree import Edge
from topoplan.schedules.nccl.paths import NcclPaths
from topoplan.schedules.relay import shortest_route
from topoplan.schedules.rings.routes import Links, Routes
from topoplan.topology import Topology

_Find = Callable[[int, int], Links]


@dataclass(frozen=True, slots=True)
class Port:
    """A NIC of a server: its links into the network and back, and the ranks that are nearest to it."""

    links: frozenset[int]
    ranks: tuple[int, ...]


class ServerChannels:
    """The channels of a fabric, and the ways that their hops take.

    Parameters
    ----------
    fabric : Fabric
        On one server there is nothing to enter, and `count` is 0.

    Examples
    --------
    >>> import topoplan
    >>> channels = ServerChannels(Fabric(topoplan.nvswitch_cluster(2, gpus=4), ("nvlink", "network")))
    >>> channels.count, [channels.start(1, channel) for channel in range(4)]
    (4, [4, 5, 6, 7])
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._routes = Routes(fabric)
        self._load = [Fraction(0)] * len(fabric.links)
        self._room = list(fabric.capacity)
        self.servers = Servers(fabric)
        self.members: list[tuple[int, ...]] = [tuple(ranks.tolist()) for ranks in self.servers.members]
        """Ranks of every server."""
        self.parts = _parts(fabric, self.servers)
        """Every server with several ranks, without what lies outside it, and NCCL's ways in it."""
        self.ports = _ports(fabric, self.servers) if len(self.members) > 1 else []
        """NICs of every server, in the order of its links into the network."""
        self.count = max(
            (max(len(ports), len(self.members[s])) for s, ports in enumerate(self.ports)), default=0
        )
        """Number of channels: one for each NIC, or for each GPU where several share a NIC."""
        self._widths = cache(self._channel_widths)

    def start(self, server: int, channel: int) -> int:
        """The rank at which a channel enters a server."""
        ports = self.ports[server]
        if not ports:
            return self.members[server][channel % len(self.members[server])]
        near = ports[channel % len(ports)].ranks
        return near[(channel // len(ports) + channel % len(ports) * len(near) // len(ports)) % len(near)]

    def inside(self, op: str, parent: int, child: int, share: Fraction) -> Edge:
        """An edge within a server, on the way that NCCL takes between its two GPUs."""
        return self._edge(op, parent, child, share, lambda tail, head: self._inner(tail, head, share))

    def between(self, op: str, parent: int, child: int, share: Fraction, channel: int, door: int) -> Edge:
        """An edge from a server to another, whose child is where the channel enters the other.

        Parameters
        ----------
        door : int
            Where the channel enters the parent's server; the parent or the rank through which it sends.
        """

        def find(tail: int, head: int) -> Links:
            own = self._kept(tail, head, channel)
            if own is not None or door == parent:
                return own or self._free(tail, head) or shortest_route(self._fabric, tail, head)
            ends = (door, head) if tail == parent else (tail, door)
            outer = self._kept(*ends, channel) or self._free(*ends) or shortest_route(self._fabric, *ends)
            free = self._free(tail, head)
            if free is not None and len(free) <= len(outer):
                return free
            if tail == parent:
                return self._inner(tail, door, share) + outer
            return outer + self._inner(door, head, share)

        return self._edge(op, parent, child, share, find)

    def through(self, op: str, parent: int, child: int, switch: str) -> Edge:
        """An edge over a switch to which both ranks have a link."""
        ranks = self._fabric.ranks
        route = (ranks[parent], switch, ranks[child])
        links = tuple(self._fabric.link_index[pair] for pair in pairwise(route))
        return Edge(parent, child, route, self._fabric.channel_of(links))

    def _edge(self, op: str, parent: int, child: int, share: Fraction, find: _Find) -> Edge:
        tail, head = (parent, child) if op == "broadcast" else (child, parent)
        links = find(tail, head)
        for number in links:
            self._load[number] += share
            self._room[number] = self._fabric.capacity[number] / (1 + self._load[number])
        route = (self._fabric.ranks[tail], *(self._fabric.links[number].dst for number in links))
        return Edge(
            parent, child, route if op == "broadcast" else route[::-1], self._fabric.channel_of(links)
        )

    def _inner(self, tail: int, head: int, share: Fraction) -> Links:
        """Of the links that NCCL stripes a hop over one after another, each time the one that is least full."""
        fabric, ranks = self._fabric, self._fabric.ranks
        paths = self.parts[int(self.servers.of_rank[tail])][1]
        try:
            crossed = [
                fabric.link_index[link.src, link.dst] for link in paths.hop(ranks[tail], ranks[head]).part
            ]
        except InfeasibleError:
            return shortest_route(fabric, tail, head)
        found: list[int] = []
        device = ranks[tail]
        while device != ranks[head]:
            onward = [number for number in crossed if fabric.links[number].src == device]
            number = min(onward, key=lambda link: ((self._load[link] + share) / fabric.capacity[link], link))
            found.append(number)
            device = fabric.links[number].dst
        return tuple(found)

    def _kept(self, tail: int, head: int, channel: int) -> Links | None:
        """The shortest route over the channel's own NICs on both servers; None where there is none."""
        servers = (int(self.servers.of_rank[tail]), int(self.servers.of_rank[head]))
        width = self._widths(*servers, channel)
        links = self._routes.shortest(tail, head, width)
        return None if links is None or not all(width[number] for number in links) else links

    def _channel_widths(self, first: int, second: int, channel: int) -> tuple[Fraction, ...]:
        closed: set[int] = set()
        for server in (first, second):
            ports = self.ports[server]
            own = ports[channel % len(ports)].links if ports else frozenset()
            closed.update(*(port.links - own for port in ports))
        return tuple(
            Fraction(0) if number in closed else capacity
            for number, capacity in enumerate(self._fabric.capacity)
        )

    def _free(self, tail: int, head: int) -> Links | None:
        """The shortest route over any NICs, of equals the one that is least full."""
        return self._routes.shortest(tail, head, self._room)


def _parts(fabric: Fabric, servers: Servers) -> Mapping[int, tuple[Topology, NcclPaths]]:
    number = {name: place for place, name in enumerate(servers.names)}
    if len(number) < 2:
        alone = Topology(fabric.topology.name, fabric.topology.devices, fabric.links)
        return {0: (alone, NcclPaths(alone))}
    return {number[name]: (part.topology, NcclPaths(part.topology)) for name, part in servers.alone()}


def _ports(fabric: Fabric, servers: Servers) -> list[list[Port]]:
    """NICs of every server, in the order of its links into the network."""
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
                ports.append(Port(frozenset((*leave, *enter)), near))
        found.append(ports)
    return found


def _nearest(
    device: str,
    fabric: Fabric,
    servers: Servers,
    entering: Mapping[str, list[int]],
    rank_of: Mapping[str, int],
) -> tuple[int, ...]:
    """Ranks from which fewest links of one server lead to a device; the device itself where it is a rank."""
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
