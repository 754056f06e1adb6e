"""Compute shortest routes between the ranks of a cluster by kind, part by part.

A route between two servers leaves the first by a switch, passes switches, perhaps servers, and enters the second by a
switch. So distances inside servers, from ranks to switches and back, are searched for one server of each kind under
equal lengths, and those between switches once for all. Distances and routes are those of `ServerRoutes`, ties included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from topoplan.machine.fabric_structure import FabricServers
from topoplan.plans.minimum_trees import UNREACHABLE
from topoplan.solve.route_table import FabricOrbits, ShortestRoutes, arcs_to

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """One server: its arcs, by their numbers in the graph of routes, with each switch once as start and once as end.

    ``ends`` are states of the part: ranks first, then devices, then ``switches`` as starts, then as ends. ``states``
    are those of ranks and devices in the graph of routes.
    """

    ranks: Numbers
    states: Numbers
    switches: Numbers
    arcs: Numbers
    ends: Numbers
    nodes: int
    search: ShortestRoutes


class RouteParts:
    """The parts of a fabric's graph of routes: one for each server, and the arcs between switches."""

    def __init__(self, orbits: FabricOrbits, servers: FabricServers) -> None:
        self.orbits, self.servers = orbits, servers
        fabric, graph = orbits.fabric, orbits.fabric.route_graph
        number = {name: place for place, name in enumerate(servers.names)}
        of_device = {device.name: number.get(device.server, -1) for device in fabric.topology.devices}
        home = np.array([of_device[fabric.nodes[node]] for node in graph.nodes], dtype=np.int64)
        ends = np.array(graph.ends, dtype=np.int64).reshape(-1, 2)
        at = home[ends]
        self.switches = np.flatnonzero(home < 0)
        """States of switches between servers."""
        self.column = np.full(len(home), -1, dtype=np.int64)
        self.column[self.switches] = np.arange(len(self.switches))
        self.between = np.flatnonzero((at < 0).all(axis=1))
        self.ends = ends
        searches: dict[tuple[int, int, bytes], ShortestRoutes] = {}
        self.parts: list[_Part] = []
        for server, ranks in enumerate(servers.members):
            arcs = np.flatnonzero(((at == server) | (at < 0)).all(axis=1) & (at == server).any(axis=1))
            own = ends[arcs]
            states = np.flatnonzero(home == server)
            switches = np.unique(own[at[arcs] < 0])
            place = np.full(len(home), -1, dtype=np.int64)
            place[states] = np.arange(len(states))
            place[switches] = np.arange(len(states), len(states) + len(switches))
            local = place[own]
            local[:, 1] += np.where(at[arcs, 1] < 0, len(switches), 0)
            nodes = len(states) + 2 * len(switches)
            key = (len(ranks), nodes, local.tobytes())
            if key not in searches:
                searches[key] = ShortestRoutes(local, ranks=len(ranks), nodes=nodes)
            self.parts.append(_Part(ranks, states, switches, arcs, local, nodes, searches[key]))


@dataclass(frozen=True)
class KindRoutes:
    """Shortest routes under lengths of the links, 0 or more and far below `UNREACHABLE`.

    Routes between ranks of one server stay in it if its links connect them, and pass switches of the network if not.
    """

    parts: RouteParts
    lengths: Numbers
    _inside: list[tuple[Numbers, NDArray[np.int32]]] = field(default_factory=list)
    _across: dict[int, list[int]] = field(default_factory=dict)

    def _searched(self) -> list[tuple[Numbers, NDArray[np.int32]]]:
        """The distances and last arcs of every part, from its ranks and from its switches, by its states."""
        if not self._inside:
            of_arc = self.lengths[self.parts.orbits.link_of_arc]
            known: dict[tuple[int, bytes], tuple[Numbers, NDArray[np.int32]]] = {}
            for part in self.parts.parts:
                own = of_arc[part.arcs]
                key = (id(part.search), own.tobytes())
                if key not in known:
                    first = part.nodes - 2 * len(part.switches)
                    starts = [*range(len(part.ranks)), *range(first, first + len(part.switches))]
                    known[key] = part.search(own, np.array(starts))
                self._inside.append(known[key])
        return self._inside

    def cost(self) -> Numbers:
        """(N, N) int64: distance from rank to rank; `UNREACHABLE` if no route exists, and on the diagonal."""
        parts, size, many = self.parts, self.parts.orbits.fabric.size, len(self.parts.switches)
        between = np.full((many, many), UNREACHABLE, dtype=np.int64)
        np.fill_diagonal(between, 0)
        ends = parts.column[parts.ends[parts.between]]
        between[ends[:, 0], ends[:, 1]] = self.lengths[parts.orbits.link_of_arc[parts.between]]
        out = np.full((size, many), UNREACHABLE, dtype=np.int64)
        back = np.full((many, size), UNREACHABLE, dtype=np.int64)
        for part, (distance, _) in zip(parts.parts, self._searched(), strict=True):
            table = np.where(distance < 0, UNREACHABLE, distance)
            ranks, columns = len(part.ranks), parts.column[part.switches]
            out[part.ranks[:, None], columns] = table[:ranks, part.nodes - len(columns) :]
            back[columns[:, None], part.ranks] = table[ranks:, :ranks]
            through = table[ranks:, part.nodes - len(columns) :]
            between[columns[:, None], columns] = np.minimum(between[columns[:, None], columns], through)
        for middle in range(many):
            np.minimum(between, between[:, middle, None] + between[middle], out=between)
        reach = np.full((size, many), UNREACHABLE, dtype=np.int64)
        for middle in range(many):
            tails = np.flatnonzero(out[:, middle] < UNREACHABLE)
            reach[tails] = np.minimum(reach[tails], out[tails, middle, None] + between[middle])
        found = np.full((size, size), UNREACHABLE, dtype=np.int64)
        for middle in range(many):
            heads = np.flatnonzero(back[middle] < UNREACHABLE)
            found[:, heads] = np.minimum(found[:, heads], reach[:, middle, None] + back[middle, heads])
        for part, (distance, _) in zip(parts.parts, self._searched(), strict=True):
            inside = distance[: len(part.ranks), : len(part.ranks)]
            through = found[part.ranks[:, None], part.ranks]
            inside = np.where(inside < 0, UNREACHABLE, inside)
            found[part.ranks[:, None], part.ranks] = np.where(_apart(inside), through, inside)
        np.fill_diagonal(found, UNREACHABLE)
        return found

    def routes(self, tails: Sequence[int], heads: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the links of the route between each two ranks, as numbers of the fabric's links."""
        servers, orbits = self.parts.servers, self.parts.orbits
        same = servers.same[np.array(tails), np.array(heads)].tolist()
        pairs = [
            (tail, head, one and self._connected(tail, head))
            for tail, head, one in zip(tails, heads, same, strict=True)
        ]
        missing = sorted({tail for tail, _, near in pairs if not near} - self._across.keys())
        if missing:
            lengths = self.lengths[orbits.link_of_arc]
            last = orbits.search(lengths, np.array(missing))[1]
            self._across.update(zip(missing, last.tolist(), strict=True))
        return [self._near(tail, head) if near else self._far(tail, head) for tail, head, near in pairs]

    def _connected(self, tail: int, head: int) -> bool:
        """Return whether a route inside their server leads from one rank to another."""
        server = int(self.parts.servers.of_rank[tail])
        start, state = np.searchsorted(self.parts.parts[server].ranks, (tail, head)).tolist()
        return bool(self._searched()[server][0][start, state] >= 0)

    def _far(self, tail: int, head: int) -> tuple[int, ...]:
        graph = self.parts.orbits.fabric.route_graph
        return tuple([graph.links[arc] for arc in arcs_to(head, self._across[tail], graph.ends)])

    def _near(self, tail: int, head: int) -> tuple[int, ...]:
        server = int(self.parts.servers.of_rank[tail])
        part = self.parts.parts[server]
        start, state = np.searchsorted(part.ranks, (tail, head)).tolist()
        last, links = self._searched()[server][1][start], self.parts.orbits.link_of_arc
        return tuple([int(links[part.arcs[arc]]) for arc in arcs_to(state, last, part.ends)])


def _apart(inside: Numbers) -> NDArray[np.bool_]:
    """Return which ranks of a server have no route inside it to which others, not even through other ranks."""
    reach = (inside < UNREACHABLE) | np.eye(len(inside), dtype=bool)
    if reach.all():
        return ~reach
    for middle in range(len(reach)):
        reach |= reach[:, middle, None] & reach[middle]
    return ~reach
