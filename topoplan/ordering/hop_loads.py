"""What every order of the ranks puts on the links: around NCCL's ring, and along its double binary tree of servers.

A ring follows the ranks one by one. A hop inside a server takes NCCL's way (`topoplan.schedules.nccl.paths`). A hop
between servers stands for all of NCCL's channels: channel c leaves over NIC c of one server and enters over NIC c of
the other, each carries an even part, striped over all shortest ways between the switches.

    bus bandwidth of a ring  =  min over links of  c(e) / sum over hops of load(e)

The tree joins servers in the order of their first ranks (`topoplan.schedules.nccl.tree.server_trees`), and inside a
server every channel has a chain that begins at another GPU of the order. Deliberately absent: latency, and that NCCL
chooses the order of the GPUs inside a server by itself and gathers the ranks of a server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from topoplan.errors import InfeasibleError
from topoplan.fabric.fabric import Fabric, usable_fabric
from topoplan.schedules.nccl.paths import NcclPaths
from topoplan.schedules.nccl.server_channels import ServerChannels
from topoplan.schedules.nccl.tree import server_trees
from topoplan.topology import Device, Link, Topology
from topoplan.units import exact

Loads = Mapping[int, Fraction]
"""Of a link, by its number, how often a byte crosses it."""

Path = tuple[int, ...]

NOWHERE = Fraction(1 << 20)
"""The distance of servers that nothing joins: more links than there are."""


@dataclass(frozen=True, slots=True)
class OrderRates:
    """What an order gives, in GB/s.

    Parameters
    ----------
    ring : Fraction
        Bus bandwidth of the ring that follows the ranks.
    tree : Fraction or None
        Algorithm bandwidth of an allreduce over the double binary tree of the servers; None on one server.
    between_servers : int
        Hops of the ring from one server to another.
    between_switches : Fraction
        How often the ring crosses a link between two switches of the network.
    """

    ring: Fraction
    tree: Fraction | None
    between_servers: int
    between_switches: Fraction

    @property
    def merit(self) -> tuple[Fraction, ...]:
        """By what orders are compared, the larger the better: the ring, then the tree, then short ways."""
        tree = self.tree or Fraction(0)
        return (self.ring, tree, Fraction(-self.between_servers), -self.between_switches)


class HopLoads:
    """The hops of a machine or cluster; all GPUs are ranks.

    Parameters
    ----------
    topology : Topology
    channels : str
        As for `topoplan.plan`: over which wires servers are joined.

    Raises
    ------
    InfeasibleError
        The wires do not join the GPUs.

    Examples
    --------
    GPU 3 of a DGX-1V has no NVLink to GPU 4, which is reached through another GPU:

    >>> import topoplan
    >>> loads = HopLoads(topoplan.load("dgx-1v"))
    >>> float(loads.rates(range(8)).ring), float(loads.rates([0, 3, 2, 1, 5, 6, 7, 4]).ring)
    (25.0, 50.0)
    """

    def __init__(self, topology: Topology, channels: str = "auto") -> None:
        self.fabric: Fabric = usable_fabric(topology, channels=channels)
        self.topology = topology
        self.links = topology.links
        self.capacity = tuple(exact(link.bandwidth) for link in self.links)
        self._number = {link: number for number, link in enumerate(self.links)}
        self._channels = ServerChannels(self.fabric)
        self.servers = tuple(self._channels.members)
        """Ranks of every server, servers in the order of their first ranks."""
        self.names = self._channels.servers.names
        self.server_of = tuple(int(server) for server in self._channels.servers.of_rank)
        self._home = {device.name: device.server for device in topology.devices}
        self._paths: dict[int, NcclPaths] = {}
        self._inside: dict[tuple[int, int], Loads | None] = {}
        self._between: dict[tuple[int, int], Loads | None] = {}
        self._ways: dict[tuple[str, str], tuple[int, Loads] | None] = {}
        self._doors: dict[tuple[int, int, bool], tuple[Path, ...]] = {}
        self._distance: dict[str, dict[str, int]] = {}

    @cached_property
    def alike_inside(self) -> bool:
        """True where GPUs of a server reach each other over NVSwitches alone, all alike: inside, no order is better."""
        kind = {device.name: device.kind for device in self.topology.devices}
        ports: dict[str, list[tuple[str, str, Fraction]]] = {name: [] for name in self.fabric.ranks}
        for link, capacity in zip(self.links, self.capacity, strict=True):
            for rank, other, way in ((link.src, link.dst, "out"), (link.dst, link.src, "in")):
                if rank in ports and link.channel == "nvlink":
                    if kind[other] != "nvswitch":
                        return False
                    ports[rank].append((other, way, capacity))
        names = self.fabric.ranks
        alike = [{tuple(sorted(ports[names[rank]])) for rank in ranks} for ranks in self.servers]
        return all(len(kinds) == 1 and any(kinds) for kinds in alike)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.fabric.ranks)

    def hop(self, tail: int, head: int) -> Loads | None:
        """What a byte from one rank to another puts on each link; None where they are not joined."""
        first, second = self.server_of[tail], self.server_of[head]
        if first != second:
            return self.between(first, second)
        if (tail, head) not in self._inside:
            ranks = self.fabric.ranks
            try:
                found = self._paths_of(first).hop(ranks[tail], ranks[head]).part
            except InfeasibleError:
                self._inside[tail, head] = None
            else:
                self._inside[tail, head] = {self._number[link]: part for link, part in found.items()}
        return self._inside[tail, head]

    def between(self, first: int, second: int) -> Loads | None:
        """What a byte from one server to another puts on each link, over all channels that join them."""
        if (first, second) not in self._between:
            ways = [self._way(first, second, channel) for channel in range(self._channels.count)]
            joined = [way for way in ways if way]
            part = Fraction(1, max(len(joined), 1))
            whole = summed((way, Fraction(1)) for way in joined)
            self._between[first, second] = (
                {number: part * load for number, load in whole.items()} if joined else None
            )
        return self._between[first, second]

    def distance(self, first: int, second: int) -> Fraction:
        """Links from one server to another, on the first channel that joins them; many where none does."""
        ways = (self._way(first, second, channel) for channel in range(self._channels.count))
        way = next((way for way in ways if way), None)
        return NOWHERE if way is None else sum(way.values(), Fraction(0))

    def switch_ways(self) -> dict[str, tuple[str, ...]]:
        """Of every switch of the network those on the way to it from one in the middle; empty where it is no tree."""
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

        # The farthest switch from any one is an end of a longest way, and the middle of that is the middle of all.
        far = max(ways(min(near)).items(), key=lambda item: (len(item[1]), item[0]))[0]
        longest = max(ways(far).values(), key=lambda way: (len(way), way))
        found = ways(longest[len(longest) // 2])
        return found if len(found) == len(near) else {}

    def plugs(self, server: int) -> tuple[tuple[str, ...], ...]:
        """The devices outside a server that each of its channels leads to."""
        return tuple(
            tuple(self.links[way[-1]].dst for way in self._ends(server, channel, leaves=True))
            for channel in range(self._channels.count)
        )

    def ring_loads(self, *orders: Sequence[int]) -> Loads | None:
        """Loads of a ring over ranks in an order, or of several together; None where a hop is missing."""
        hops = Counter(hop for order in orders for hop in zip(order, (*order[1:], order[0]), strict=True))
        return self._together((hop, Fraction(times)) for hop, times in hops.items())

    def _together(self, hops: Iterable[tuple[tuple[int, int], Fraction]]) -> Loads | None:
        """Loads of hops from rank to rank, each so many times."""
        times: dict[tuple[int, int, bool], Fraction] = {}
        for (tail, head), part in hops:
            first, second = self.server_of[tail], self.server_of[head]
            key = (tail, head, True) if first == second else (first, second, False)
            times[key] = times.get(key, Fraction(0)) + part
        parts = [
            (self.hop(tail, head) if inside else self.between(tail, head), part)
            for (tail, head, inside), part in times.items()
        ]
        known = [(loads, part) for loads, part in parts if loads is not None]
        return summed(known) if len(known) == len(parts) else None

    def tree_loads(self, order: Sequence[int]) -> Loads | None:
        """Loads of an allreduce over NCCL's trees of servers for a byte of the buffer; None where a hop is missing."""
        members: dict[int, list[int]] = {}
        for rank in order:
            members.setdefault(self.server_of[rank], []).append(rank)
        doors = [ranks[0] for ranks in members.values()]
        hops = [
            (hop, Fraction(1, 2))
            for one, other in tree_edges(len(doors))
            for hop in ((doors[one], doors[other]), (doors[other], doors[one]))
        ]
        for ranks in members.values():
            for tail, head in zip(ranks, (*ranks[1:], ranks[0]), strict=True):
                if tail != head:
                    hops += [
                        (hop, Fraction(len(ranks) - 1, len(ranks))) for hop in ((tail, head), (head, tail))
                    ]
        return self._together(hops)

    def rates(self, order: Sequence[int]) -> OrderRates:
        """What the ranks in an order give; rates of 0 where a hop has no way."""
        ring = self.ring_loads(order)
        tree = self.tree_loads(order) if len(self.servers) > 1 else None
        return OrderRates(
            self.rate(ring),
            self.rate(tree) if len(self.servers) > 1 else None,
            sum(
                self.server_of[tail] != self.server_of[head]
                for tail, head in zip(order, (*order[1:], order[0]), strict=True)
            ),
            sum(
                (part for number, part in (ring or {}).items() if number in self.between_switches),
                Fraction(0),
            ),
        )

    def rate(self, loads: Loads | None) -> Fraction:
        """GB/s at which the first link is full; 0 without loads."""
        if loads is None:
            return Fraction(0)
        return min(
            (self.capacity[number] / part for number, part in loads.items() if part), default=Fraction(0)
        )

    @cached_property
    def between_switches(self) -> frozenset[int]:
        """Links that join two devices outside of all servers."""
        return frozenset(
            number
            for number, link in enumerate(self.links)
            if not self._home[link.src] and not self._home[link.dst] and link.channel == "network"
        )

    @cached_property
    def _outside(self) -> dict[str, list[tuple[int, str, str]]]:
        """Of every device outside the servers the links that enter it from others: number, source, itself."""
        found: dict[str, list[tuple[int, str, str]]] = {}
        for number in sorted(self.between_switches):
            link = self.links[number]
            found.setdefault(link.dst, []).append((number, link.src, link.dst))
        return found

    def _paths_of(self, server: int) -> NcclPaths:
        if server not in self._paths:
            if len(self.servers) == 1:
                part = self.topology
            else:
                devices, links = self._parts[self.names[server]]
                part = Topology(self.names[server], tuple(devices), tuple(links))
            self._paths[server] = NcclPaths(part)
        return self._paths[server]

    @cached_property
    def _parts(self) -> dict[str, tuple[list[Device], list[Link]]]:
        parts: dict[str, tuple[list[Device], list[Link]]] = {}
        for device in self.topology.devices:
            parts.setdefault(device.server, ([], []))[0].append(device)
        for link in self.links:
            if self._home[link.src] == self._home[link.dst]:
                parts[self._home[link.src]][1].append(link)
        return parts

    def _way(self, first: int, second: int, channel: int) -> Loads | None:
        """Loads of one channel between two servers: of the shortest ways all, by the width of their NICs."""
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
        """Links from where a channel begins in a server to each one that leaves over its NIC, or the same way back."""
        key = (server, channel, leaves)
        if key not in self._doors:
            ports = self._channels.ports[server]
            if not ports:
                return ()
            port = ports[channel % len(ports)]
            name = self.fabric.ranks[self._channels.start(server, channel)]
            found = []
            for number in sorted(port.links):
                link = self.fabric.links[number]
                near, far = (link.src, link.dst) if leaves else (link.dst, link.src)
                if self._home[near] == self.names[server] and self._home[far] != self.names[server]:
                    walk = self._walk(name, near, leaves=leaves)
                    own = self._number[link]
                    if walk is not None:
                        found.append((*walk, own) if leaves else (own, *walk))
            self._doors[key] = tuple(found)
        return self._doors[key]

    @cached_property
    def _inner(self) -> tuple[dict[str, list[Link]], dict[str, list[Link]]]:
        """Usable links inside servers, by where they begin and by where they end."""
        leaving: dict[str, list[Link]] = {}
        entering: dict[str, list[Link]] = {}
        for link in self.fabric.links:
            if self._home[link.src] == self._home[link.dst] != "":
                leaving.setdefault(link.src, []).append(link)
                entering.setdefault(link.dst, []).append(link)
        return leaving, entering

    def _walk(self, rank: str, device: str, *, leaves: bool) -> Path | None:
        """The first shortest way inside a server from a rank to a device, or for ``leaves=False`` back to the rank."""
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
            path.append(self._number[step])
            node = step.src if leaves else step.dst
        return tuple(path[::-1] if leaves else path)

    def _middle(self, source: str, target: str) -> tuple[int, Loads] | None:
        """Number of links between two switches, and what each link of the shortest ways carries of a byte."""
        if self._home[source] or self._home[target]:
            return None
        if (source, target) not in self._ways:
            self._ways[source, target] = self._striped(source, target)
        return self._ways[source, target]

    def _striped(self, source: str, target: str) -> tuple[int, Loads] | None:
        if target not in self._distance:
            behind = {target: 0}
            frontier = [target]
            for node in frontier:
                for _, other, _ in self._outside.get(node, ()):
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
                for number, dst in self._leaving.get(node, ()):
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

    @cached_property
    def _leaving(self) -> dict[str, list[tuple[int, str]]]:
        found: dict[str, list[tuple[int, str]]] = {}
        for number in sorted(self.between_switches):
            found.setdefault(self.links[number].src, []).append((number, self.links[number].dst))
        return found


def tree_edges(count: int) -> list[tuple[int, int]]:
    """Edges of both of NCCL's trees over so many servers, each as two places in their order.

    Examples
    --------
    >>> tree_edges(3)
    [(1, 2), (2, 0), (2, 0), (0, 1)]
    """
    return [(child, parent) for tree in server_trees(count) for child, (parent, _) in tree.items()]


def summed(parts: Iterable[tuple[Loads, Fraction]]) -> dict[int, Fraction]:
    """Loads added up, each so many times."""
    total: dict[int, Fraction] = {}
    for loads, times in parts:
        for number, part in loads.items():
            more = part if times == 1 else part * times
            known = total.get(number)
            total[number] = more if known is None else known + more
    return total
