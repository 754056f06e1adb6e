"""Routes do not pass another server's NIC or CPU, unless that device forwards (`Device.forwards`).

A server that receives a message hands it to a rank of its own, or drops it: no host forwards RDMA. So a route leaves
the server of its first rank once, and ends in the first server whose NIC or CPU it enters. Ranks and helpers store and
forward, but that is the end of one tree edge and the beginning of the next.

The graph of routes has a state for every device and phase of a route: `OWN` in the server of the last rank, `FREE`
beyond it, and `ENDING` in a server that the route cannot leave any more. Its paths are the allowed routes, so a search
over states finds no other, and lengths measured over states bound what allowed routes can do. A fabric in which no
simple path leads through a third server has one state for each device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from topoplan.topology import Link, Topology

NOT_FORWARDING = ("nic", "cpu")
"""Kinds of devices that carry data of their own server alone, unless they say otherwise."""

OWN, FREE, ENDING = range(3)


@dataclass(frozen=True, slots=True)
class RouteGraph:
    """A directed graph whose paths between vertices are the routes of a fabric.

    Parameters
    ----------
    nodes : tuple of int
        Device of every state, as a position in `Fabric.nodes`; states 0 to V - 1 are the ranks and helpers, in order.
    ends : tuple of (int, int)
        States at both ends of every arc.
    links : tuple of int
        Index of the fabric's link that each arc crosses; a link may have several arcs.
    """

    nodes: tuple[int, ...]
    ends: tuple[tuple[int, int], ...]
    links: tuple[int, ...]

    def leaving(self) -> list[list[tuple[int, int]]]:
        """For every state its arcs, as (link, state at the other end), in the order of the links."""
        table: list[list[tuple[int, int]]] = [[] for _ in self.nodes]
        for link, (src, dst) in zip(self.links, self.ends, strict=True):
            table[src].append((link, dst))
        return table

    def entering(self) -> list[list[tuple[int, int]]]:
        """For every state the arcs into it, as (link, state at the other end), in the order of the links."""
        table: list[list[tuple[int, int]]] = [[] for _ in self.nodes]
        for link, (src, dst) in zip(self.links, self.ends, strict=True):
            table[dst].append((link, src))
        return table


@dataclass(frozen=True)
class Transit:
    """Servers of the devices of a machine, and which of its devices do not forward.

    Parameters
    ----------
    servers : mapping of str to str
        Server of every device, empty for switches between servers.
    ends : frozenset of str
        NICs and CPUs of servers that do not forward.
    vertices : frozenset of str
        GPUs and helpers.
    """

    servers: Mapping[str, str]
    ends: frozenset[str]
    vertices: frozenset[str]

    @classmethod
    def of(cls, topology: Topology) -> Transit:
        """Read a machine."""
        devices = topology.devices
        return cls(
            {device.name: device.server for device in devices},
            frozenset(d.name for d in devices if d.kind in NOT_FORWARDING and d.server and not d.forwards),
            frozenset(d.name for d in devices if d.kind in ("gpu", "helper")),
        )

    def joins(self, link: Link) -> bool:
        """True where a link joins two servers, or a server and a switch between servers."""
        return self.servers[link.src] != self.servers[link.dst]

    def foreign(self, route: Sequence[str]) -> str | None:
        """The first device that a route must not pass: a NIC or CPU of a server that it enters and leaves.

        Parameters
        ----------
        route : sequence of str
            Devices from rank to rank, in either direction.
        """
        if self.ends.isdisjoint(route):
            return None
        servers = self.servers
        start = 0
        for stop in range(1, len(route)):
            if stop < len(route) - 1 and route[stop] not in self.vertices:
                continue
            first, last = start, stop
            while first <= stop and servers[route[first]] == servers[route[start]]:
                first += 1
            while last >= first and servers[route[last]] == servers[route[stop]]:
                last -= 1
            for name in route[first : last + 1]:
                if name in self.ends:
                    return name
            start = stop
        return None

    def graph(self, nodes: Sequence[str], vertices: int, ends: tuple[tuple[int, int], ...]) -> RouteGraph:
        """The graph of the routes over some links.

        Parameters
        ----------
        nodes : sequence of str
            Devices, the ranks and helpers first.
        vertices : int
            Number of ranks and helpers.
        ends : tuple of (int, int)
            Both ends of every link, as positions in ``nodes``.
        """
        server = [self.servers[name] for name in nodes]
        closed = [name in self.ends for name in nodes]
        if not self._passable(server, closed, vertices, ends):
            return RouteGraph(tuple(range(len(nodes))), ends, tuple(range(len(ends))))
        leaving: list[list[int]] = [[] for _ in nodes]
        for src, dst in ends:
            leaving[src].append(dst)

        def after(phase: int, src: int, dst: int) -> int | None:
            """The phase in which a route that crosses a link goes on; None where it may not cross it."""
            if dst < vertices:
                return None if phase == ENDING and server[src] != server[dst] else OWN
            if server[src] == server[dst]:
                return ENDING if phase == FREE and closed[dst] else phase
            if phase == ENDING:
                return None
            return ENDING if closed[dst] else FREE

        reached = {(node, OWN) for node in range(vertices)}
        frontier = sorted(reached)
        for node, phase in frontier:
            for dst in leaving[node]:
                further = after(phase, node, dst)
                if further is not None and (dst, further) not in reached:
                    reached.add((dst, further))
                    frontier.append((dst, further))
        states = sorted(reached)
        number = {state: place for place, state in enumerate(states)}
        arcs = [
            (link, number[src, phase], number[dst, further])
            for link, (src, dst) in enumerate(ends)
            for phase in (OWN, FREE, ENDING)
            if (src, phase) in number and (further := after(phase, src, dst)) is not None
        ]
        return RouteGraph(
            tuple(node for node, _ in states),
            tuple((src, dst) for _, src, dst in arcs),
            tuple(link for link, _, _ in arcs),
        )

    def _passable(
        self, server: Sequence[str], closed: Sequence[bool], vertices: int, ends: Sequence[tuple[int, int]]
    ) -> bool:
        """True where a simple path leads from outside a server through a closed device to elsewhere outside.

        From every device outside that a link enters from, devices of the server are searched that are no vertices.
        """
        inside: dict[int, list[int]] = {}
        outwards: dict[int, set[int]] = {}
        entries: dict[tuple[str, int], list[int]] = {}
        for src, dst in ends:
            if server[src] == server[dst]:
                if max(src, dst) >= vertices and min(src, dst) >= vertices:
                    inside.setdefault(src, []).append(dst)
                continue
            if server[src] and src >= vertices:
                outwards.setdefault(src, set()).add(dst)
            if server[dst] and dst >= vertices:
                entries.setdefault((server[dst], src), []).append(dst)
        return any(
            closed_on_the_way and outwards.get(node, set()) - {came_from}
            for (_, came_from), starts in entries.items()
            for node, closed_on_the_way in _reached(starts, inside, closed)
        )


def _reached(
    starts: Sequence[int], inside: Mapping[int, Sequence[int]], closed: Sequence[bool]
) -> Iterator[tuple[int, bool]]:
    """Devices that are reached from some, each with whether a closed one lies on the way or is it."""
    frontier = [(node, closed[node]) for node in starts]
    known = set(frontier)
    for node, passed in frontier:
        yield node, passed
        for other in inside.get(node, ()):
            state = (other, passed or closed[other])
            if state not in known:
                known.add(state)
                frontier.append(state)
