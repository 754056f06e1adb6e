"""Find the paths of NCCL's channels between servers, and the load of a byte on every link of them.

Between two servers channel c leaves over its NIC of one and enters over its NIC of the other
(`topoplan.schedules.nccl_server_channels`), each with an equal part of the data. All shortest paths between two NICs
count, and data is striped over them at every switch by the width of the next links.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from functools import cached_property
from itertools import permutations
from math import lcm

from topoplan.machine.fabric import Fabric
from topoplan.machine.routing import fewest_steps
from topoplan.machine.topology import Link, Topology
from topoplan.schedules.nccl_server_channels import ServerChannels
from topoplan.units import exact

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
            joined = list(self._joined(first, second))
            part = Fraction(1, max(len(joined), 1))
            whole = summed((way, Fraction(1)) for way in joined)
            self._between[first, second] = (
                {number: part * load for number, load in whole.items()} if joined else None
            )
        return self._between[first, second]

    def distance(self, first: int, second: int) -> Fraction:
        """Return the links from one server to another on the first channel that joins them, else `NOWHERE`."""
        way = next(self._joined(first, second), None)
        return NOWHERE if way is None else sum(way.values(), Fraction(0))

    def _joined(self, first: int, second: int) -> Iterator[Loads]:
        """Yield the ways of all channels between two servers.

        If none joins them, as on cables from one port to another, a channel may leave over one NIC and enter over
        another, which NCCL does with NCCL_IB_SUBNET_AWARE_ROUTING.
        """
        channels = range(self.channels.count)
        found = False
        for channel in channels:
            if way := self._way(first, second, channel, channel):
                found = True
                yield way
        if not found:
            ways = (self._way(first, second, *pair) for pair in permutations(channels, 2))
            yield from filter(None, ways)

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

    def _way(self, first: int, second: int, channel: int, there: int) -> Loads | None:
        """Return the loads from a channel of one server to one of another: all shortest paths, by the width of their
        NICs.
        """
        found: list[tuple[int, Path, Loads]] = []
        for leave in self._ends(first, channel, leaves=True):
            for enter in self._ends(second, there, leaves=False):
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
            port = self.channels.port(server, channel)
            if port is None:
                return ()
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
            self._distance[target] = fewest_steps(
                [target], lambda node: (other for _, other in entering.get(node, ()))
            )
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
    """Add up loads, each times its factor, as whole numbers of one unit."""
    every = list(parts)
    unit = lcm(*{part.denominator for loads, _ in every for part in loads.values()})
    unit_of_times = lcm(*{times.denominator for _, times in every})
    total: dict[int, int] = {}
    for loads, times in every:
        factor = times.numerator * (unit_of_times // times.denominator) * unit
        for number, part in loads.items():
            total[number] = total.get(number, 0) + part.numerator * factor // part.denominator
    whole = unit * unit_of_times
    known = {value: Fraction(value, whole) for value in {*total.values()}}
    return {number: known[value] for number, value in total.items()}
