"""Find the links that a copy from one GPU to another crosses.

A copy takes NVLink if a path exists, direct or through NVSwitches; else PCIe, sockets and C2C; always over as few links
as possible, and through no other GPU. If peer access is refused, the driver stages copies in host memory: up to a CPU
and down again, even below one PCIe switch.

Hardware stripes a copy over parallel NVSwitches, so a route is a sequence of stages and a stage is one or several
links. Over PCIe a copy takes one path: at each device the widest link. A single copy does not feel a cap on both
directions of a link together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cache

from topoplan.machine.fabric import Fabric
from topoplan.machine.half_duplex import without_caps
from topoplan.machine.topology import Link, Topology

PathStep = tuple[Link, int, int]
"""A link on a shortest path, and the states at its ends in the graph of routes."""

CHANNELS = {"nvlink": ("nvlink",), "pcie": ("pcie",), "network": ("pcie", "network")}
"""Channels of each kind of route."""


@dataclass(frozen=True, slots=True)
class CopyRoute:
    """Links of a copy, from source to destination.

    channel: nvlink, pcie or network.
    stages: a copy is striped over the links of a stage in proportion to their stated bandwidths.
    ends: indices of the stages that bear its start-up: on a network those into its switches and out of them; None for
    the first and the last.
    """

    channel: str
    stages: tuple[tuple[Link, ...], ...]
    ends: tuple[int, int] | None = None

    @property
    def links(self) -> tuple[Link, ...]:
        return tuple(link for stage in self.stages for link in stage)

    @property
    def bandwidth(self) -> float:
        """GB/s of the narrowest stage, as stated."""
        return min(stage_bandwidth(stage) for stage in self.stages)


def stage_bandwidth(stage: tuple[Link, ...]) -> float:
    """Return the sum of the stated GB/s of a stage."""
    return sum(link.bandwidth for link in stage)


class CopyRoutes:
    """Routes of copies in one machine.

    >>> import topoplan
    >>> routes = CopyRoutes(topoplan.load("dgx-1v"))
    >>> route = routes.between("gpu0", "gpu5")
    >>> route.channel, route.bandwidth, [link.dst for link in route.links]
    ('pcie', 8.0, ['pcie0', 'cpu0', 'cpu1', 'pcie2', 'gpu5'])
    >>> [link.dst for link in routes.between("gpu0", "gpu1", through_host=True).links]
    ['pcie0', 'cpu0', 'pcie0', 'gpu1']
    """

    def __init__(self, topology: Topology) -> None:
        topology = without_caps(topology)
        self._gpus = set(topology.gpus)
        self._switches = {device.name for device in topology.devices if device.kind == "switch"}
        self._cpus = tuple(device.name for device in topology.devices if device.kind == "cpu")
        self._ways = cache(lambda channel: _ChannelRoutes(Fabric(topology, CHANNELS[channel])))
        self._search = cache(lambda channel, src: _Search(self._ways(channel), self._gpus, src))
        self._path = cache(self._walked)

    def between(self, src: str, dst: str, *, through_host: bool = False) -> CopyRoute | None:
        """Return the route of a copy, or None.

        through_host: peer access is refused.
        """
        if not through_host:
            striped = self._stages("nvlink", src, dst)
            if striped:
                return CopyRoute("nvlink", tuple(tuple(link for link, _, _ in stage) for stage in striped))
        if through_host and self._cpus:
            halves = [(self._path(src, cpu), self._path(cpu, dst)) for cpu in self._cpus]
            path = min((up + down for up, down in halves if up and down), key=len, default=())
        else:
            path = self._path(src, dst)
        return CopyRoute("pcie", tuple((link,) for link in path)) if path else None

    def between_servers(self, src: str, dst: str) -> CopyRoute | None:
        """Return the route as `between`, or else over the network and the PCIe at both ends."""
        inside = self.between(src, dst)
        path = () if inside else self._path(src, dst, "network")
        if not path:
            return inside
        into = [place for place, link in enumerate(path) if link.dst in self._switches]
        out = [place for place, link in enumerate(path) if link.src in self._switches]
        ends = (into[0], out[-1]) if into and out else (0, len(path) - 1)
        return CopyRoute("network", tuple((link,) for link in path), ends)

    def _walked(self, src: str, dst: str, channel: str = "pcie") -> tuple[Link, ...]:
        """Return one shortest path, or ()."""
        links: list[Link] = []
        at = -1
        for stage in self._stages(channel, src, dst):
            onwards = [step for step in stage if at < 0 or step[1] == at]
            link, _, at = max(onwards, key=lambda step: step[0].bandwidth)
            links.append(link)
        return tuple(links)

    def _stages(self, channel: str, src: str, dst: str) -> tuple[tuple[PathStep, ...], ...]:
        """Return the links of all shortest paths by their distance from the source, or ()."""
        search, ways = self._search(channel, src), self._ways(channel)
        ends = ways.states.get(dst, ())
        least = search.distance(ends) if src != dst else None
        if least is None:
            return ()
        wanted = {state for state in ends if search.steps.get(state) == least}
        stages: list[tuple[PathStep, ...]] = []
        for distance in range(least - 1, -1, -1):
            found = sorted(
                (ways.places[number], before, state)
                for number, before, state in search.links_into(wanted, distance)
                if not distance or ways.devices[before] not in self._gpus
            )
            wanted = {before for _, before, _ in found}
            stages.append(tuple((ways.links[number], before, state) for (_, number), before, state in found))
        return tuple(reversed(stages))


class _Search:
    """The states that a copy from one GPU reaches without passing another, layer by layer as far as they are asked for.

    ``steps`` are the numbers of links to the states known so far, in ``layers`` by that number.
    """

    def __init__(self, ways: _ChannelRoutes, gpus: Set[str], src: str) -> None:
        self._ways, self._gpus = ways, gpus
        self.layers = [list(ways.states.get(src, ()))[:1]]
        self.steps = dict.fromkeys(self.layers[0], 0)

    def distance(self, ends: Sequence[int]) -> int | None:
        """Return the links to the nearest of some states; None if none is reached."""
        while True:
            known = [self.steps[state] for state in ends if state in self.steps]
            if known or not self.layers[-1]:
                return min(known, default=None)
            self._extend()

    def _extend(self) -> None:
        distance, following = len(self.layers), list[int]()
        for state in self.layers[-1]:
            if distance > 1 and self._ways.devices[state] in self._gpus:
                continue
            for _, after in self._ways.leaving[state]:
                if after not in self.steps:
                    self.steps[after] = distance
                    following.append(after)
        self.layers.append(following)

    def links_into(self, wanted: Set[int], distance: int) -> Iterator[tuple[int, int, int]]:
        """Yield number and states of the links from the states at a distance into some others."""
        ways, layer = self._ways, self.layers[distance]
        # A switch of the network has a link from every NIC, and few of them are near.
        if len(layer) < sum(len(ways.entering[state]) for state in wanted):
            for before in layer:
                yield from (
                    (number, before, after) for number, after in ways.leaving[before] if after in wanted
                )
            return
        for state in wanted:
            for number, before in ways.entering[state]:
                if self.steps.get(before) == distance:
                    yield number, before, state


class _ChannelRoutes:
    """The graph of the routes over some channels (`topoplan.machine.routing`), its states by device."""

    def __init__(self, fabric: Fabric) -> None:
        graph = fabric.route_graph
        self.links = fabric.links
        self.devices = [fabric.nodes[node] for node in graph.nodes]
        self.leaving, self.entering = graph.leaving(), graph.entering()
        self.states: dict[str, list[int]] = {}
        for state, name in enumerate(self.devices):
            self.states.setdefault(name, []).append(state)
        sources = {name: place for place, name in enumerate(dict.fromkeys(link.src for link in self.links))}
        self.places = [(sources[link.src], number) for number, link in enumerate(self.links)]
        """Sort links by their source."""
