"""Compute the load of every link under an order of ranks: NCCL's ring, and its double binary tree of servers.

A hop inside a server takes NCCL's path (`topoplan.schedules.nccl_channels`). A hop between servers stands for all of
NCCL's channels, each on one NIC of every server (`topoplan.schedules.nccl_server_routes`).

    bus bandwidth of a ring  =  min over links of  c(e) / sum over hops of load(e)

The tree joins servers in the order of their first ranks (`topoplan.schedules.binary_trees.server_trees`); inside a
server every channel has a chain that begins at another GPU of the order. `HopTable` scores many orders at once from one
table of hop loads. Absent: latency, and that NCCL orders the GPUs inside a server independently and groups the ranks of
a server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cached_property
from itertools import permutations
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import InfeasibleError
from topoplan.machine.fabric import Fabric, usable_fabric
from topoplan.machine.topology import Device, Link, Topology
from topoplan.schedules.binary_trees import server_trees
from topoplan.schedules.nccl_channels import NcclPaths
from topoplan.schedules.nccl_server_routes import Loads, NcclServerRoutes, summed


@dataclass(frozen=True, slots=True)
class OrderRates:
    """Rates of an order in GB/s.

    ring: bus bandwidth of the ring that follows the ranks.
    tree: algorithm bandwidth of an allreduce over the double binary tree of the servers; None on one server.
    between_servers: hops of the ring from one server to another.
    between_switches: number of times that the ring crosses a link between two network switches.
    """

    ring: Fraction
    tree: Fraction | None
    between_servers: int
    between_switches: Fraction

    @property
    def merit(self) -> tuple[Fraction, ...]:
        """Sort key, larger is better: the ring, then the tree, then short paths."""
        tree = self.tree or Fraction(0)
        return (self.ring, tree, Fraction(-self.between_servers), -self.between_switches)


class HopLoads:
    """The hops of a machine or cluster; all GPUs are ranks.

    channels: as for `topoplan.plan`, between servers.

    GPU 3 of a DGX-1V has no NVLink to GPU 4, which is reached through another GPU:

    >>> import topoplan
    >>> loads = HopLoads(topoplan.load("dgx-1v"))
    >>> float(loads.rates(range(8)).ring), float(loads.rates([0, 3, 2, 1, 5, 6, 7, 4]).ring)
    (25.0, 50.0)
    """

    def __init__(self, topology: Topology, channels: str = "auto") -> None:
        self.fabric: Fabric = usable_fabric(topology, channels=channels)
        self.topology = topology = self.fabric.topology
        self.ways = NcclServerRoutes(topology, self.fabric)
        self.links = topology.links
        self.capacity = self.ways.capacity
        found = self.ways.channels
        self.servers = tuple(found.members)
        self.names = self.ways.names
        self.server_of = tuple(int(server) for server in found.servers.of_rank)
        self._paths: dict[int, NcclPaths] = {}
        self._inside: dict[tuple[int, int], Loads | None] = {}
        self._of_first: dict[tuple[int, str, str], Loads | None] = {}

    @cached_property
    def symmetric_inside(self) -> bool:
        """Whether all GPUs of a server have equal ports to NVSwitches alone, so that their order does not matter."""
        kind = {device.name: device.kind for device in self.topology.devices}
        ports: dict[str, list[tuple[str, str, Fraction]]] = {name: [] for name in self.fabric.ranks}
        for link, capacity in zip(self.links, self.capacity, strict=True):
            for rank, other, way in ((link.src, link.dst, "out"), (link.dst, link.src, "in")):
                if rank in ports and link.channel == "nvlink":
                    if kind[other] != "nvswitch":
                        return False
                    ports[rank].append((other, way, capacity))
        names = self.fabric.ranks
        kinds_of = [{tuple(sorted(ports[names[rank]])) for rank in ranks} for ranks in self.servers]
        return all(len(kinds) == 1 and any(kinds) for kinds in kinds_of)

    @property
    def size(self) -> int:
        return len(self.fabric.ranks)

    def hop(self, tail: int, head: int) -> Loads | None:
        """Return the load on each link of a byte from one rank to another; None without a path."""
        first, second = self.server_of[tail], self.server_of[head]
        if first != second:
            return self.ways.between(first, second)
        if (tail, head) not in self._inside:
            self._inside[tail, head] = self._hop_inside(first, tail, head)
        return self._inside[tail, head]

    def _hop_inside(self, server: int, tail: int, head: int) -> Loads | None:
        """Return the loads of a hop inside a server: those of the first equal server, under this one's numbers."""
        src, dst = self.fabric.ranks[tail], self.fabric.ranks[head]
        first = self._first_equal[server]
        if first != server:
            own = len(self.names[server])
            src, dst = (f"{self.names[first]}{name[own:]}" for name in (src, dst))
        if (first, src, dst) not in self._of_first:
            try:
                found = self._paths_of(first).hop(src, dst).part
            except InfeasibleError:
                self._of_first[first, src, dst] = None
            else:
                place = {link: place for place, (_, link) in enumerate(self._parts[first].links)}
                self._of_first[first, src, dst] = {place[link]: part for link, part in found.items()}
        loads = self._of_first[first, src, dst]
        numbers = self._parts[server].links
        return None if loads is None else {numbers[place][0]: part for place, part in loads.items()}

    def ring_loads(self, *orders: Sequence[int]) -> Loads | None:
        """Return the loads of rings over ranks in some orders, together; None if a hop is missing."""
        hops = Counter(hop for order in orders for hop in zip(order, (*order[1:], order[0]), strict=True))
        return self._together((hop, Fraction(times)) for hop, times in hops.items())

    def _together(self, hops: Iterable[tuple[tuple[int, int], Fraction]]) -> Loads | None:
        """Return the sum of loads of hops, each a number of times."""
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
        """Return the loads of an allreduce over NCCL's trees of servers per byte; None if a hop is missing."""
        members: dict[int, list[int]] = {}
        for rank in order:
            members.setdefault(self.server_of[rank], []).append(rank)
        entries = [ranks[0] for ranks in members.values()]
        hops = [
            (hop, Fraction(1, 2))
            for one, other in tree_edges(len(entries))
            for hop in ((entries[one], entries[other]), (entries[other], entries[one]))
        ]
        for ranks in members.values():
            for tail, head in zip(ranks, (*ranks[1:], ranks[0]), strict=True):
                if tail != head:
                    hops += [
                        (hop, Fraction(len(ranks) - 1, len(ranks))) for hop in ((tail, head), (head, tail))
                    ]
        return self._together(hops)

    def rates(self, order: Sequence[int]) -> OrderRates:
        """Return the rates of an order; 0 if a hop has no path."""
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
        """Return the GB/s at which the first link is full; 0 without loads."""
        if loads is None:
            return Fraction(0)
        return min(
            (self.capacity[number] / part for number, part in loads.items() if part), default=Fraction(0)
        )

    def _paths_of(self, server: int) -> NcclPaths:
        if server not in self._paths:
            if len(self.servers) == 1:
                machine = self.topology
            else:
                part = self._parts[server]
                machine = Topology(
                    self.names[server], tuple(part.devices), tuple(link for _, link in part.links)
                )
            self._paths[server] = NcclPaths(machine)
        return self._paths[server]

    @cached_property
    def _parts(self) -> list[_ServerPart]:
        """The devices and links of each server."""
        if len(self.servers) == 1:
            return [_ServerPart(list(self.topology.devices), list(enumerate(self.links)))]
        parts: dict[str, _ServerPart] = {name: _ServerPart([], []) for name in self.names}
        for device in self.topology.devices:
            if device.server in parts:
                parts[device.server].devices.append(device)
        for number, link in enumerate(self.links):
            home = self.ways.home[link.src]
            if home in parts and home == self.ways.home[link.dst]:
                parts[home].links.append((number, link))
        return [parts[name] for name in self.names]

    @cached_property
    def _first_equal(self) -> list[int]:
        """For each server the first one that equals it in all but its name, which begins the names of its devices."""
        first: dict[object, int] = {}
        return [
            first.setdefault(part.without_name(name), server)
            for server, (name, part) in enumerate(zip(self.names, self._parts, strict=True))
        ]


_OF_DEVICE, _OF_LINK = (
    attrgetter(*(one.name for one in fields(of) if one.name not in ("name", "server", "src", "dst")))
    for of in (Device, Link)
)
"""All that equal devices, or links, of two servers have in common."""


@dataclass(frozen=True, slots=True)
class _ServerPart:
    """The devices of a server, and its links with their numbers."""

    devices: list[Device]
    links: list[tuple[int, Link]]

    def without_name(self, server: str) -> object:
        """Return a key that equal servers share; a server whose devices have other names than its own shares none."""
        start = f"{server}."
        if not server or not all(device.name.startswith(start) for device in self.devices):
            return server, None
        cut = len(start)
        return (
            tuple((device.name[cut:], _OF_DEVICE(device)) for device in self.devices),
            tuple((link.src[cut:], link.dst[cut:], _OF_LINK(link)) for _, link in self.links),
        )


def tree_edges(count: int) -> list[tuple[int, int]]:
    """Return the edges of both of NCCL's trees over ``count`` servers, as indices in their order.

    >>> tree_edges(3)
    [(1, 2), (2, 0), (2, 0), (0, 1)]
    """
    return [(child, parent) for tree in server_trees(count) for child, (parent, _) in tree.items()]


DIGITS = 9
"""Digits of compared rates, so that the last bits of a sum do not matter."""

Floats = NDArray[np.float64]
Places = NDArray[np.int64]


class HopTable:
    """Hops between some places, over the links that differ: seconds per GB on each.

    rows: loads of the hop from place i to place j; the diagonal is ignored.
    homes: server of every place.
    extra: other loads on the links.
    """

    def __init__(
        self,
        hops: HopLoads,
        rows: Sequence[Sequence[Loads | None]],
        homes: Sequence[int],
        extra: Loads | None = None,
    ) -> None:
        size = len(rows)
        self.homes = np.array(homes, dtype=np.int64)
        self.crossing: Floats = np.asarray(self.homes[:, None] != self.homes[None, :], dtype=np.float64)
        self.missing: Floats = np.eye(size)
        self.switched: Floats = np.zeros((size, size))
        used = sorted({n for row in rows for loads in row if loads for n in loads} | set(extra or {}))
        column = {number: place for place, number in enumerate(used)}
        table = np.zeros((size * size + 1, len(used)))
        for tail, head in permutations(range(size), 2):
            loads = rows[tail][head]
            self.missing[tail, head] = loads is None
            for number, part in (loads or {}).items():
                table[tail * size + head, column[number]] = float(part / hops.capacity[number])
                self.switched[tail, head] += float(part) * (number in hops.ways.between_switches)
        for number, part in (extra or {}).items():
            table[-1, column[number]] = float(part / hops.capacity[number])
        distinct: Floats = np.unique(table, axis=1)
        self.seconds: Floats = distinct[:-1].reshape(size, size, distinct.shape[1])
        self.extra: Floats = distinct[-1]

    @property
    def content(self) -> bytes:
        """A key of all that scores depend on."""
        return b"".join(part.tobytes() for part in (self.seconds, self.extra, self.missing))

    def scores(self, orders: Places, *, closed: bool = True, tree: bool = False) -> Floats:
        """Return, as (orders, 7): missing hops, fullest link of ring and of tree, hops between servers, between
        switches, …

        Then whether the last hop back to the first place is near, since servers on one leaf should be adjacent in the
        list, and the squares of all loads, which decide between otherwise equal orders. An open ring has no hop from
        the last place to the first.
        """
        count, size = orders.shape
        total = np.tile(self.extra, (count, 1))
        missing, crossing, switched = np.zeros((3, count))
        for place in range(size if closed else size - 1):
            hop = orders[:, place], orders[:, (place + 1) % size]
            total += self.seconds[hop]
            missing += self.missing[hop]
            crossing += self.crossing[hop]
            switched += self.switched[hop]
        worst = total.max(axis=1, initial=0.0)
        trees = self._trees(orders) if tree else np.zeros(count)
        back = orders[:, -1], orders[:, 0]
        return np.stack(
            [
                missing,
                _rounded(worst),
                trees,
                crossing,
                _rounded(switched),
                -np.sign(self.crossing[back]) - np.sign(self.switched[back]),
                _rounded((total**2).sum(axis=1)),
            ],
            axis=1,
        )

    def _trees(self, orders: Places) -> Floats:
        """Return the seconds per GB on the fullest link of the double binary tree, servers in the order of their first
        places.
        """
        count = len(orders)
        homes = self.homes[orders]
        total = np.zeros((count, self.seconds.shape[2]))
        first = []
        for server in sorted(set(self.homes.tolist())):
            here = homes == server
            first.append(here.argmax(axis=1))
            inside = orders[here].reshape(count, -1)
            ranks = inside.shape[1]
            for place in range(ranks if ranks > 1 else 0):
                tail, head = inside[:, place], inside[:, (place + 1) % ranks]
                total += (self.seconds[tail, head] + self.seconds[head, tail]) * (ranks - 1) / ranks
        entries = np.take_along_axis(orders, np.sort(np.stack(first, axis=1), axis=1), axis=1)
        for one, other in tree_edges(entries.shape[1]):
            tail, head = entries[:, one], entries[:, other]
            total += (self.seconds[tail, head] + self.seconds[head, tail]) / 2
        return _rounded(total.max(axis=1, initial=0.0))


def _rounded(values: Floats) -> Floats:
    scale = 10.0 ** np.floor(np.log10(np.where(values > 0, values, 1.0)))
    return np.asarray(np.round(values / scale, DIGITS) * scale, dtype=np.float64)


def least(scores: Floats, orders: Places) -> int:
    """Return the index of the best score; ties go to the lexicographically first order."""
    keys = (*orders.T[::-1], *scores.T[::-1])
    return int(np.lexsort(keys)[0])
