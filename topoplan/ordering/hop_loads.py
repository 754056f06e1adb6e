"""What every order of the ranks puts on the links: around NCCL's ring, and along its double binary tree of servers.

A ring follows the ranks one by one. A hop inside a server takes NCCL's way (`topoplan.schedules.nccl.paths`), a hop
between servers stands for all of NCCL's channels, each on a NIC of its own (`topoplan.ordering.server_ways`).

    bus bandwidth of a ring  =  min over links of  c(e) / sum over hops of load(e)

The tree joins servers in the order of their first ranks (`topoplan.schedules.nccl.tree.server_trees`), and inside a
server every channel has a chain that begins at another GPU of the order. Deliberately absent: latency, and that NCCL
chooses the order of the GPUs inside a server by itself and gathers the ranks of a server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from topoplan.errors import InfeasibleError
from topoplan.fabric.fabric import Fabric, usable_fabric
from topoplan.ordering.server_ways import Loads, ServerWays, summed
from topoplan.schedules.nccl.paths import NcclPaths
from topoplan.schedules.nccl.tree import server_trees
from topoplan.topology import Device, Link, Topology


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
        self.ways = ServerWays(topology, self.fabric)
        """Between the servers."""
        self.links = topology.links
        self.capacity = self.ways.capacity
        found = self.ways.channels
        self.servers = tuple(found.members)
        """Ranks of every server, servers in the order of their first ranks."""
        self.names = self.ways.names
        self.server_of = tuple(int(server) for server in found.servers.of_rank)
        self._paths: dict[int, NcclPaths] = {}
        self._inside: dict[tuple[int, int], Loads | None] = {}

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
            return self.ways.between(first, second)
        if (tail, head) not in self._inside:
            ranks = self.fabric.ranks
            try:
                found = self._paths_of(first).hop(ranks[tail], ranks[head]).part
            except InfeasibleError:
                self._inside[tail, head] = None
            else:
                self._inside[tail, head] = {self.ways.number[link]: part for link, part in found.items()}
        return self._inside[tail, head]

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
            (self.hop(tail, head) if inside else self.ways.between(tail, head), part)
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
                (part for number, part in (ring or {}).items() if number in self.ways.between_switches),
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
            if self.ways.home[link.src] == self.ways.home[link.dst]:
                parts[self.ways.home[link.src]][1].append(link)
        return parts


def tree_edges(count: int) -> list[tuple[int, int]]:
    """Edges of both of NCCL's trees over so many servers, each as two places in their order.

    Examples
    --------
    >>> tree_edges(3)
    [(1, 2), (2, 0), (2, 0), (0, 1)]
    """
    return [(child, parent) for tree in server_trees(count) for child, (parent, _) in tree.items()]
