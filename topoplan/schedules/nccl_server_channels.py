"""Find the NIC of each of NCCL's channels, the GPU at which it enters a server, and the paths between servers.

A channel takes one NIC of every server, number c modulo their count, and begins in each at a GPU nearest to that
NIC, so all NICs carry the same number of channels. A GPU that does not reach the NIC of its channel sends through
one of its own if that is not a detour, else through the GPU at which the channel enters (NCCL's PXN).

Between two servers channel c leaves over NIC c of one and enters over NIC c of the other, each with an equal part of
the data. All shortest paths between two NICs count, and data is striped over them at every switch by the width of the
next links.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from itertools import pairwise

from topoplan.errors import InfeasibleError
from topoplan.machine.fabric import Fabric
from topoplan.machine.fabric_structure import FabricServers
from topoplan.machine.topology import Link, Topology
from topoplan.plans.shards import Edge
from topoplan.schedules.nccl_channels import NcclPaths
from topoplan.schedules.ring_forest import shortest_route
from topoplan.schedules.routes import DirectRoutes, Links, edge_along
from topoplan.units import exact

_Find = Callable[[int, int], Links]


@dataclass(frozen=True, slots=True)
class ChannelPort:
    """A NIC of a server: its links into the network and back, and the nearest ranks."""

    links: frozenset[int]
    ranks: tuple[int, ...]


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
        self.count = max(
            (max(len(ports), len(self.members[s])) for s, ports in enumerate(self.ports)), default=0
        )
        """Number of channels: one for each NIC, or for each GPU if several share a NIC."""
        self._widths = cache(self._channel_widths)

    def start(self, server: int, channel: int) -> int:
        """Return the rank at which a channel enters a server."""
        ports = self.ports[server]
        if not ports:
            return self.members[server][channel % len(self.members[server])]
        near = ports[channel % len(ports)].ranks
        return near[(channel // len(ports) + channel % len(ports) * len(near) // len(ports)) % len(near)]

    def inside(self, op: str, parent: int, child: int, share: Fraction) -> Edge:
        """Return an edge within a server, on NCCL's path between its two GPUs."""
        return self._edge(op, parent, child, share, lambda tail, head: self._inner(tail, head, share))

    def between(self, op: str, parent: int, child: int, share: Fraction, channel: int, entry: int) -> Edge:
        """Return an edge from one server to the rank at which the channel enters another.

        ``entry`` is the rank at which the channel enters the parent's server: the parent, or the rank through which it
        sends.
        """

        def find(tail: int, head: int) -> Links:
            own = self._over_channel(tail, head, channel)
            if own is not None or entry == parent:
                return own or self._free(tail, head) or shortest_route(self._fabric, tail, head)
            ends = (entry, head) if tail == parent else (tail, entry)
            outer = (
                self._over_channel(*ends, channel) or self._free(*ends) or shortest_route(self._fabric, *ends)
            )
            free = self._free(tail, head)
            if free is not None and len(free) <= len(outer):
                return free
            if tail == parent:
                return self._inner(tail, entry, share) + outer
            return outer + self._inner(entry, head, share)

        return self._edge(op, parent, child, share, find)

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

    def _over_channel(self, tail: int, head: int, channel: int) -> Links | None:
        """Return the shortest route over the channel's own NICs on both servers; None if no such route exists."""
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
        """Return the shortest route over any NICs, the least loaded among equals."""
        return self._routes.shortest(tail, head, self._room)


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
                ports.append(ChannelPort(frozenset((*leave, *enter)), near))
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


Loads = Mapping[int, Fraction]
"""Crossings of a byte, by number of the link."""

Path = tuple[int, ...]

NOWHERE = Fraction(1 << 20)
"""The distance of unconnected servers: more links than a machine has."""


class NcclServerRoutes:
    """The paths between the servers of a cluster; ``fabric`` holds its usable links.

    >>> import topoplan
    >>> machine = topoplan.nvswitch_cluster(3, gpus=2, rails=1)
    >>> routes = NcclServerRoutes(machine, Fabric(machine, ("nvlink", "network")))
    >>> routes.plugs(1), routes.distance(0, 1)
    ((('rail0',), ('rail0',)), Fraction(4, 1))
    """

    def __init__(self, topology: Topology, fabric: Fabric) -> None:
        self.fabric = fabric
        self.links = topology.links
        self.capacity = tuple(exact(link.bandwidth) for link in self.links)
        self.number = {link: number for number, link in enumerate(self.links)}
        self.channels = ServerChannels(fabric)
        self.names = self.channels.servers.names
        self.home = {device.name: device.server for device in topology.devices}
        self._between: dict[tuple[int, int], Loads | None] = {}
        self._ways: dict[tuple[str, str], tuple[int, Loads] | None] = {}
        self._port_paths: dict[tuple[int, int, bool], tuple[Path, ...]] = {}
        self._distance: dict[str, dict[str, int]] = {}

    def between(self, first: int, second: int) -> Loads | None:
        """Return the load of a byte from one server to another on each link, over all channels that join them."""
        if (first, second) not in self._between:
            ways = [self._way(first, second, channel) for channel in range(self.channels.count)]
            joined = [way for way in ways if way]
            part = Fraction(1, max(len(joined), 1))
            whole = summed((way, Fraction(1)) for way in joined)
            self._between[first, second] = (
                {number: part * load for number, load in whole.items()} if joined else None
            )
        return self._between[first, second]

    def distance(self, first: int, second: int) -> Fraction:
        """Return the links from one server to another on the first channel that joins them, else `NOWHERE`."""
        ways = (self._way(first, second, channel) for channel in range(self.channels.count))
        way = next((way for way in ways if way), None)
        return NOWHERE if way is None else sum(way.values(), Fraction(0))

    def switch_ways(self) -> dict[str, tuple[str, ...]]:
        """Map every switch of the network to its path from one in the middle; empty if the network is not a tree."""
        near: dict[str, set[str]] = {}
        for number in sorted(self.between_switches):
            link = self.links[number]
            near.setdefault(link.src, set()).add(link.dst)
            near.setdefault(link.dst, set()).add(link.src)
        if sum(map(len, near.values())) != 2 * (len(near) - 1):
            return {}

        def ways(root: str) -> dict[str, tuple[str, ...]]:
            found: dict[str, tuple[str, ...]] = {root: (root,)}
            frontier = [root]
            for switch in frontier:
                for other in sorted(near[switch] - set(found)):
                    found[other] = (*found[switch], other)
                    frontier.append(other)
            return found

        # The farthest switch from any one is an end of a longest path, whose middle is the middle of the tree.
        far = max(ways(min(near)).items(), key=lambda item: (len(item[1]), item[0]))[0]
        longest = max(ways(far).values(), key=lambda way: (len(way), way))
        found = ways(longest[len(longest) // 2])
        return found if len(found) == len(near) else {}

    def plugs(self, server: int) -> tuple[tuple[str, ...], ...]:
        """Return the devices outside a server that each of its channels leads to."""
        return tuple(
            tuple(self.links[way[-1]].dst for way in self._ends(server, channel, leaves=True))
            for channel in range(self.channels.count)
        )

    @cached_property
    def between_switches(self) -> frozenset[int]:
        """Links that join two devices outside all servers."""
        return frozenset(
            number
            for number, link in enumerate(self.links)
            if not self.home[link.src] and not self.home[link.dst] and link.channel == "network"
        )

    @cached_property
    def _network(self) -> tuple[dict[str, list[tuple[int, str]]], dict[str, list[tuple[int, str]]]]:
        """Links out of and into every device outside the servers, each with its number and other end."""
        leaving: dict[str, list[tuple[int, str]]] = {}
        entering: dict[str, list[tuple[int, str]]] = {}
        for number in sorted(self.between_switches):
            link = self.links[number]
            leaving.setdefault(link.src, []).append((number, link.dst))
            entering.setdefault(link.dst, []).append((number, link.src))
        return leaving, entering

    def _way(self, first: int, second: int, channel: int) -> Loads | None:
        """Return the loads of one channel between two servers: all shortest paths, by the width of their NICs."""
        found: list[tuple[int, Path, Loads]] = []
        for leave in self._ends(first, channel, leaves=True):
            for enter in self._ends(second, channel, leaves=False):
                if leave[-1] == enter[0]:
                    found.append((len(leave) + len(enter) - 1, (*leave, *enter[1:]), {}))
                    continue
                way = self._middle(self.links[leave[-1]].dst, self.links[enter[0]].src)
                if way is not None:
                    found.append((len(leave) + len(enter) + way[0], (*leave, *enter), way[1]))
        if not found:
            return None
        least = min(length for length, _, _ in found)
        kept = [(path, middle) for length, path, middle in found if length == least]
        if len(kept) == 1:
            return {**dict.fromkeys(kept[0][0], Fraction(1)), **kept[0][1]}
        width = [min(self.capacity[number] for number in path) for path, _ in kept]
        total = sum(width, Fraction(0))
        return summed(
            ({**dict.fromkeys(path, Fraction(1)), **middle}, part / total)
            for (path, middle), part in zip(kept, width, strict=True)
        )

    def _ends(self, server: int, channel: int, *, leaves: bool) -> tuple[Path, ...]:
        """Return the links from a channel's start in a server to each link out over its NIC, or the same back."""
        key = (server, channel, leaves)
        if key not in self._port_paths:
            ports = self.channels.ports[server]
            if not ports:
                return ()
            port = ports[channel % len(ports)]
            name = self.fabric.ranks[self.channels.start(server, channel)]
            found = []
            for number in sorted(port.links):
                link = self.fabric.links[number]
                near, far = (link.src, link.dst) if leaves else (link.dst, link.src)
                if self.home[near] == self.names[server] and self.home[far] != self.names[server]:
                    walk = self._walk(name, near, leaves=leaves)
                    own = self.number[link]
                    if walk is not None:
                        found.append((*walk, own) if leaves else (own, *walk))
            self._port_paths[key] = tuple(found)
        return self._port_paths[key]

    @cached_property
    def _inner(self) -> tuple[dict[str, list[Link]], dict[str, list[Link]]]:
        """Usable links inside servers, by source and by destination."""
        leaving: dict[str, list[Link]] = {}
        entering: dict[str, list[Link]] = {}
        for link in self.fabric.links:
            if self.home[link.src] == self.home[link.dst] != "":
                leaving.setdefault(link.src, []).append(link)
                entering.setdefault(link.dst, []).append(link)
        return leaving, entering

    def _walk(self, rank: str, device: str, *, leaves: bool) -> Path | None:
        """Return the first shortest path in a server from a rank to a device; for ``leaves=False`` back to the rank."""
        table = self._inner[0 if leaves else 1]
        came: dict[str, Link | None] = {rank: None}
        frontier = [rank]
        for node in frontier:
            if node == device:
                break
            for link in table.get(node, ()):
                other = link.dst if leaves else link.src
                if other not in came:
                    came[other] = link
                    frontier.append(other)
        if device not in came:
            return None
        path: list[int] = []
        node = device
        while (step := came[node]) is not None:
            path.append(self.number[step])
            node = step.src if leaves else step.dst
        return tuple(path[::-1] if leaves else path)

    def _middle(self, source: str, target: str) -> tuple[int, Loads] | None:
        """Return the number of links between two switches, and a byte's load on each link of the shortest paths."""
        if self.home[source] or self.home[target]:
            return None
        if (source, target) not in self._ways:
            self._ways[source, target] = self._striped(source, target)
        return self._ways[source, target]

    def _striped(self, source: str, target: str) -> tuple[int, Loads] | None:
        leaving, entering = self._network
        if target not in self._distance:
            behind = {target: 0}
            frontier = [target]
            for node in frontier:
                for _, other in entering.get(node, ()):
                    if other not in behind:
                        behind[other] = behind[node] + 1
                        frontier.append(other)
            self._distance[target] = behind
        behind = self._distance[target]
        if source not in behind:
            return None
        loads: dict[int, Fraction] = {}
        there = {source: Fraction(1)}
        for depth in range(behind[source], 0, -1):
            onward: dict[str, list[tuple[int, str]]] = {}
            for node in there:
                for number, dst in leaving.get(node, ()):
                    if behind.get(dst) == depth - 1:
                        onward.setdefault(node, []).append((number, dst))
            arrived: dict[str, Fraction] = {}
            for node, part in there.items():
                total = sum((self.capacity[number] for number, _ in onward[node]), Fraction(0))
                for number, dst in onward[node]:
                    loads[number] = part * self.capacity[number] / total
                    arrived[dst] = arrived.get(dst, Fraction(0)) + loads[number]
            there = arrived
        return behind[source], loads


def summed(parts: Iterable[tuple[Loads, Fraction]]) -> dict[int, Fraction]:
    """Add up loads, each times its factor."""
    total: dict[int, Fraction] = {}
    for loads, times in parts:
        for number, part in loads.items():
            more = part if times == 1 else part * times
            known = total.get(number)
            total[number] = more if known is None else known + more
    return total
