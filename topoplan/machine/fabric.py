"""Select the part of a machine that one plan may use: ranks, links of its channels, routes.

A *route* runs from one rank to another through forwarding devices only (switches, CPUs, NICs). A path through another
rank is two edges of a tree. The NIC or CPU of a third server forwards only if it says so
(`topoplan.machine.routing`). Capacities are exact rationals in GB/s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from topoplan.errors import InfeasibleError, TopologyError, UsageError
from topoplan.machine.half_duplex import is_part, split
from topoplan.machine.routing import NOT_FORWARDING, RouteGraph, Transit, fewest_steps, staged
from topoplan.machine.topology import Link, Topology
from topoplan.units import exact

CHANNEL_LINKS = {
    "nvlink": ("nvlink",),
    "pcie": ("pcie", "sys", "c2c"),
    "network": ("network",),
    "all": ("nvlink", "pcie", "sys", "c2c"),
    "all-staged": ("nvlink", "pcie", "sys", "c2c"),
}
"""Links of the topology that make up each channel of a plan."""

ALL, STAGED = "all", "all-staged"
"""Channels of trees that take NVLink and PCIe in parallel. Staged, PCIe carries only copies to and from a CPU's memory
(see `topoplan.machine.routing`), which need no peer access."""

UNIONS = (ALL, STAGED)
"""Choices of channels that pack NVLink and PCIe together."""


def edge_channels(channels: Sequence[str]) -> tuple[str, ...]:
    """Return the channels that edges of plans have.

    >>> edge_channels(("all", "network"))
    ('nvlink', 'pcie', 'network')
    """
    return tuple(name for one in channels for name in (("nvlink", "pcie") if one in UNIONS else (one,)))


CHANNEL_CHOICES = {
    "auto": (("nvlink",), (ALL,), ("pcie",), ("nvlink", "network"), (ALL, "network"), ("pcie", "network")),
    "nvlink": (("nvlink",),),
    "pcie": (("pcie",),),
    "nvlink+network": (("nvlink", "network"),),
    "pcie+network": (("pcie", "network"),),
    "all": ((ALL,), (ALL, "network")),
    "all-staged": ((STAGED,), (STAGED, "network")),
    "all+network": ((ALL, "network"),),
    "all-staged+network": ((STAGED, "network"),),
}
"""Channels that a caller may choose: the first alternative that connects all ranks is taken."""

CHANNEL_SPLITS = {"nvlink+pcie": ("nvlink", "pcie")}
"""Channels between which a caller may split the buffer: every tree keeps to one of them, the first leads."""

_WORDS = {
    "nvlink": "NVLink",
    "pcie": "PCIe",
    "network": "the network",
    ALL: "NVLink and PCIe together",
    STAGED: "NVLink together with PCIe through the CPUs' memory",
}

MOST_LISTED = 16
"""Routes between two ranks, shortest first, that are listed; others are searched for on demand."""


class Arc(NamedTuple):
    """One route between two ranks; arcs sort by tail, head, number of links (hops), and links.

    ``links`` are the indices of the crossed links and ``route`` the devices, both from tail to head.
    """

    tail: int
    head: int
    hops: int
    links: tuple[int, ...]
    route: tuple[str, ...]
    channel: str


@dataclass(frozen=True)
class Fabric:
    """Ranks and usable directed links of an allocation.

    ``topology`` has only the allocation's GPUs (see `Topology.subset`), and is split where directions share a cap
    (`topoplan.machine.half_duplex`); ``channels`` are any of nvlink, pcie, network; or all or all-staged, and network.
    """

    topology: Topology
    channels: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.topology.half_duplex:
            object.__setattr__(self, "topology", split(self.topology))

    @cached_property
    def ranks(self) -> tuple[str, ...]:
        """Device of each rank."""
        return self.topology.gpus

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """The links that the channels may cross, in the topology's order.

        Parallel links between two devices count as the widest (of each channel, if the buffer is split): a copy takes
        one path, and a route names devices only.
        """
        group = {
            name: channel if self.split else ""
            for channel in self.channels
            for name in CHANNEL_LINKS[channel]
        }
        widest: dict[tuple[str, str, str], Link] = {}
        refused = self.transit.refused
        for link in self.topology.links:
            if link.channel in group and (link.src, link.dst) not in refused:
                ends = (link.src, link.dst, group[link.channel])
                if ends not in widest or link.bandwidth > widest[ends].bandwidth:
                    widest[ends] = link
        kept = set(widest.values())
        return tuple(link for link in self.topology.links if link in kept)

    @property
    def split(self) -> bool:
        """Whether NVLink and PCIe split the buffer: the driver mixes them in no route and no tree."""
        return {"nvlink", "pcie"} <= set(self.channels)

    @property
    def union(self) -> bool:
        """Whether trees take NVLink and PCIe together."""
        return self.channels[0] in UNIONS

    @cached_property
    def nvlink_pairs(self) -> frozenset[tuple[int, int]]:
        """Pairs of ranks that NVLink joins without a rank between them: PCIe joins them after a peer access switch."""
        nvlink = Fabric(self.topology, ("nvlink",))
        return frozenset((arc.tail, arc.head) for arc in nvlink.arcs)

    @cached_property
    def edge_channels(self) -> tuple[str, ...]:
        """The channels that an edge may name."""
        return ("nvlink", "pcie", *self.channels) if self.union else self.channels

    @cached_property
    def capacity(self) -> tuple[Fraction, ...]:
        """Capacity of each link in GB/s, exact."""
        known = {bandwidth: exact(bandwidth) for bandwidth in {link.bandwidth for link in self.links}}
        return tuple(known[link.bandwidth] for link in self.links)

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Ranks first, then helpers, then the forwarding devices on usable links, in the topology's order."""
        touched = {end for link in self.links for end in (link.src, link.dst)}
        rest = (d for d in self.topology.devices if d.kind not in ("gpu", "helper") and d.name in touched)
        return self.vertices + tuple(device.name for device in rest)

    @cached_property
    def helpers(self) -> tuple[str, ...]:
        """Devices on usable links that add and copy but are not ranks."""
        named = [device.name for device in self.topology.devices if device.kind == "helper"]
        touched = {end for link in self.links for end in (link.src, link.dst)} if named else set()
        return tuple(name for name in named if name in touched)

    @cached_property
    def vertices(self) -> tuple[str, ...]:
        """The vertices of trees, in the numbering of edges: the ranks, then the helpers."""
        return self.ranks + self.helpers

    @cached_property
    def link_index(self) -> dict[tuple[str, str], int]:
        """Index of the usable link from one device to another."""
        return {(link.src, link.dst): number for number, link in enumerate(self.links)}

    @cached_property
    def link_between(self) -> dict[tuple[int, int], int]:
        """The same by positions in `nodes`."""
        return {ends: number for number, ends in enumerate(self.ends)}

    @cached_property
    def link_on(self) -> dict[tuple[str, str, str], int]:
        """Index of the widest link from one device to another that an edge of a channel may cross.

        An edge over the network may start and end on any link of the plan; other edges keep to their own.
        """
        found: dict[tuple[str, str, str], int] = {}
        for number, link in enumerate(self.links):
            for channel in self.edge_channels:
                if channel == "network" or link.channel in CHANNEL_LINKS[channel]:
                    known = found.setdefault((link.src, link.dst, channel), number)
                    if link.bandwidth > self.links[known].bandwidth:
                        found[link.src, link.dst, channel] = number
        return found

    @cached_property
    def ends(self) -> tuple[tuple[int, int], ...]:
        """Every link as a pair of positions in `nodes`."""
        position = {name: i for i, name in enumerate(self.nodes)}
        return tuple((position[link.src], position[link.dst]) for link in self.links)

    @cached_property
    def transit(self) -> Transit:
        """Restrictions of routes by servers and by peer access."""
        return Transit.of(self.topology)

    @cached_property
    def route_graph(self) -> RouteGraph:
        """The graph of searches for routes: states 0 to N - 1 are the ranks."""
        return self.transit.graph(self.nodes, len(self.vertices), self.ends, self.barred)

    @cached_property
    def barred(self) -> dict[int, frozenset[int]]:
        """The ranks and helpers to which each one may copy through a CPU only, though shorter paths exist."""
        return self.transit.without_access(self.nodes, len(self.vertices), self.ends)

    @property
    def has_transit(self) -> bool:
        """Whether not every path is a route (see `topoplan.machine.routing`)."""
        return self.route_graph.ends is not self.ends

    @cached_property
    def direct(self) -> bool:
        """Whether every usable link joins two ranks, without a switch in between."""
        return len(self.nodes) == self.size

    @cached_property
    def symmetric(self) -> bool:
        """Whether every link has an equal one in the other direction."""
        capacity = {(s, d): c for (s, d), c in zip(self.ends, self.capacity, strict=True)}
        return all(capacity.get((d, s)) == c for (s, d), c in capacity.items())

    @cached_property
    def copying(self) -> frozenset[str]:
        """Devices on usable links that can copy one input to several outputs."""
        used = set(self.nodes[self.size :])
        return frozenset(d.name for d in self.topology.devices if d.multicast and d.name in used)

    @cached_property
    def adding(self) -> frozenset[str]:
        """Devices on usable links that can add several inputs."""
        used = set(self.nodes[self.size :])
        return frozenset(d.name for d in self.topology.devices if d.reduce and d.name in used)

    def inner_devices(self, op: str) -> tuple[str, ...]:
        """Devices that are not ranks and may be inner vertices of a tree of this kind, reduce or broadcast."""
        merging = self.adding if op == "reduce" else self.copying
        return (
            *self.helpers,
            *(name for name in self.nodes if name in merging and name not in self.helpers),
        )

    @property
    def in_network(self) -> bool:
        """Whether a switch on usable links can copy or add."""
        return bool(self.copying or self.adding)

    def forwarding_only(self) -> Fabric:
        """Return the same fabric with switches that neither copy nor add, and helpers that are such switches."""
        if not self.in_network and not self.helpers:
            return self
        devices = tuple(
            replace(
                device,
                kind="switch" if device.kind == "helper" else device.kind,
                multicast=False,
                reduce=False,
            )
            for device in self.topology.devices
        )
        return Fabric(replace(self.topology, devices=devices), self.channels)

    @cached_property
    def arcs(self) -> tuple[Arc, ...]:
        """Routes between all pairs of ranks, in ascending order: for each pair the first `MOST_LISTED`, at least one.

        Searches choose among all routes of a tree (`topoplan.solve.route_table`, `topoplan.schedules.routes`), since
        the omitted ones may be the only ones with spare capacity.
        """
        return self._listed[0]

    @property
    def lists_every_route(self) -> bool:
        """Whether `arcs` omits no route."""
        return not self._listed[1]

    @property
    def lists_shortest_routes(self) -> bool:
        """Whether `arcs` omits no route that is among the shortest between its ranks."""
        return "shortest" not in self._listed[1]

    @cached_property
    def _listed(self) -> tuple[tuple[Arc, ...], frozenset[str]]:
        """The arcs, and the omitted kinds: at most `MOST_LISTED` paths to each switch are extended."""
        graph = self.route_graph
        leaving = graph.leaving()
        # Routes without peer access go up to a CPU and back down, and staged ones cross both directions of a cap.
        halves = self.transit.halves
        inner = range(len(self.vertices), len(self.nodes))
        twice = {node for node in inner if self.barred or self.nodes[node] in halves}
        arcs = []
        left_out: set[str] = set()
        for tail in range(self.size):
            found: dict[int, list[tuple[int, ...]]] = {}
            ways: dict[int, int] = {}
            depth: dict[int, int] = {}
            level: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = [(tail, (), (tail,))]
            while level:
                following = []
                for state, path, visited in level:
                    for number, dst in leaving[state]:
                        place = -dst if graph.nodes[dst] in twice else graph.nodes[dst]
                        if place in visited:
                            continue
                        ways[dst] = ways.get(dst, 0) + 1
                        links = len(path) + 1
                        if ways[dst] > MOST_LISTED:
                            left_out.add("shortest" if links == depth[dst] else "longer")
                            continue
                        depth.setdefault(dst, links)
                        if dst < self.size:
                            found.setdefault(dst, []).append((*path, number))
                        else:
                            following.append((dst, (*path, number), (*visited, place)))
                level = following
            for head in sorted(found):
                arcs += [self.arc(path) for path in found[head]]
        return tuple(arcs), frozenset(left_out)

    def arc(self, links: tuple[int, ...]) -> Arc:
        """Return the arc that crosses these links, given by their indices from its tail to its head."""
        tail, head = self.ends[links[0]][0], self.ends[links[-1]][1]
        route = (self.ranks[tail], *(self.links[number].dst for number in links))
        return Arc(tail, head, len(links), links, route, self.channel_of(links))

    def channel_of(self, path: Sequence[int]) -> str:
        """Return the channel name of an edge that crosses these links."""
        links = self.links
        crossed = {links[number].channel for number in path}
        for channel in ("nvlink", "pcie"):
            if crossed.issubset(CHANNEL_LINKS[channel]):
                return channel
        return "network" if "network" in crossed else self.channels[0]

    def unreachable(
        self,
        collective: str = "allreduce",
        root: int | None = None,
        demand: Sequence[Sequence[int]] | None = None,
    ) -> tuple[str, ...]:
        """Return the devices of a cut that no link leaves and that a collective has to cross; () if none exists.

        A broadcast needs paths from its root, a reduce paths to it, a demand from row to column paths for what it
        sends, every other collective paths between all ranks.
        """
        if demand is not None:
            pair = self.pair_without_path(demand)
            return () if pair is None else self.devices_of(self.reached_from(pair[0], forward=True))
        ranks = set(range(self.size))
        start = root if root is not None else 0
        if collective != "reduce":
            reached = self.reached_from(start, forward=True)
            if not reached >= ranks:
                return self.devices_of(reached)
        if collective != "broadcast":
            lost = ranks - self.reached_from(start, forward=False)
            if lost:
                return self.devices_of(self.reached_from(min(lost), forward=True))
        return ()

    def pair_without_path(self, demand: Sequence[Sequence[int]]) -> tuple[int, int] | None:
        """Return the first ranks, by source and destination, between which a demand has no path; None if all have."""
        if not self.unreachable():
            return None
        for source, row in enumerate(demand):
            wanted = {rank for rank, amount in enumerate(row) if amount} - {source}
            lost = wanted - self.reached_from(source, forward=True) if wanted else wanted
            if lost:
                return source, min(lost)
        return None

    def devices_of(self, states: Iterable[int]) -> tuple[str, ...]:
        """Return the names of the devices of some states of the graph of routes, in the order of `nodes`."""
        return tuple(self.nodes[node] for node in sorted({self.route_graph.nodes[state] for state in states}))

    def reached_from(self, start: int, *, forward: bool, length: Sequence[int] | None = None) -> set[int]:
        """Return the states that a state reaches, or with ``forward=False`` that reach it.

        With ``length``, only over links of length zero.
        """
        table = self.route_graph.leaving() if forward else self.route_graph.entering()
        reached = {start}
        frontier = [start]
        for state in frontier:
            for number, other in table[state]:
                if other not in reached and (length is None or length[number] == 0):
                    reached.add(other)
                    frontier.append(other)
        return reached


def channel_words(channels: Sequence[str], topology: Topology | None = None) -> str:
    """Return the channels of a plan, or of its links, as words for a sentence.

    Channels of which ``topology`` has no link are left out, unless it has none of any.

    >>> channel_words(("nvlink", "network")), channel_words(("all",))
    ('NVLink and the network', 'NVLink and PCIe together')
    """
    if topology is not None:
        linked = {link.channel for link in topology.links}
        channels = [one for one in channels if linked & set(CHANNEL_LINKS[one])] or channels
    return " and ".join(_WORDS.get(channel, channel) for channel in channels)


def usable_fabric(
    topology: Topology,
    *,
    channels: str = "auto",
    collective: str = "allreduce",
    root: int | None = None,
    demand: Sequence[Sequence[int]] | None = None,
) -> Fabric:
    """Return the fabric of a plan for an allocation (see `Topology.subset`).

    ``channels="auto"`` takes NVLink if it connects all ranks, else NVLink islands together with the PCIe between them,
    else PCIe, else the same with the network: NVLink if it connects the ranks of each server, else NVLink islands and
    PCIe, else PCIe. Other values allow no alternative. A broadcast needs paths from ``root`` only, a reduce paths to
    it. If no choice connects all ranks, a ``demand`` from row to column takes the first with paths for all that it
    sends.

    InfeasibleError if the links do not connect the ranks, with the cut; UsageError for unknown ``channels``;
    TopologyError for a helper without a link in or out.
    """
    _check_helpers(topology)
    if not isinstance(channels, str) or channels not in CHANNEL_CHOICES:
        raise UsageError(f"channels {channels!r} is unknown; use one of {', '.join(CHANNEL_CHOICES)}")
    if channels.startswith(ALL) and not _states_pcie(topology):
        raise UsageError(
            f"{topology.name} states no PCIe links, which channels {channels} would take beside NVLink; use auto"
        )
    for needed in (None,) if demand is None else (None, demand):
        for choice in CHANNEL_CHOICES[channels]:
            if channels == "auto" and not is_default(choice, [topology]):
                continue
            fabric = Fabric(staged(topology) if STAGED in choice else topology, choice)
            if not fabric.unreachable(collective, root, needed):
                return fabric
    raise _no_path(topology, channels, collective, root, demand)


def _states_pcie(topology: Topology) -> bool:
    return any(link.channel in CHANNEL_LINKS["pcie"] for link in topology.links)


def is_default(choice: tuple[str, ...], parts: Sequence[Topology]) -> bool:
    """Return whether ``auto`` takes a choice of channels for allocations planned together, if it joins their ranks."""
    if choice[0] == ALL:
        return any(map(_has_islands, parts))
    return choice != ("nvlink", "network") or not any(map(_needs_pcie, parts))


def _needs_pcie(topology: Topology) -> bool:
    """Return whether PCIe joins GPUs of a server that NVLink does not: they need no NIC to reach one another.

    Links from GPUs to NICs of their own stand for PCIe (`topoplan.machine.nic_wiring`), which is not counted twice.
    """
    if not nvlink_leaves_apart(topology):
        return False
    nics: dict[str, set[str]] = {name: set() for name in topology.gpus}
    for link in topology.links:
        if link.channel == "network" and link.src in nics:
            nics[link.src].add(link.dst)
    servers = joined_gpus(topology, CHANNEL_LINKS[ALL])
    return all(nics[name] == nics[server[0]] for server in servers for name in server)


def nvlink_leaves_apart(topology: Topology) -> bool:
    """Return whether PCIe joins GPUs of a server that NVLink does not."""
    if not _states_pcie(topology):
        return False
    return len(joined_gpus(topology, ("nvlink",))) > len(joined_gpus(topology, CHANNEL_LINKS[ALL]))


def joined_gpus(topology: Topology, channels: Collection[str]) -> list[list[str]]:
    """Return groups of GPUs that links of some channels join."""
    out: dict[str, list[str]] = {}
    for link in topology.links:
        if link.channel in channels:
            out.setdefault(link.src, []).append(link.dst)
    left, found = list(topology.gpus), []
    while left:
        beside = fewest_steps(left[:1], lambda name: out.get(name, ()))
        found.append([name for name in left if name in beside])
        left = [name for name in left if name not in beside]
    return found


def _has_islands(topology: Topology) -> bool:
    """Return whether NVLink joins some of the ranks, but leaves PCIe to join the others."""
    nvlink = Fabric(topology, ("nvlink",))
    ranks = set(range(nvlink.size))
    sending = sorted({src for src, _ in nvlink.ends} & ranks)
    return any(len(nvlink.reached_from(rank, forward=True) & ranks) > 1 for rank in sending)


def _check_helpers(topology: Topology) -> None:
    """Raise TopologyError for a helper without a link in or out: the machine description is wrong."""
    for device in topology.devices:
        if device.kind == "helper":
            for end in ("dst", "src"):
                if not any(getattr(link, end) == device.name for link in topology.links):
                    raise TopologyError(
                        f"helper {device.name} has no link {'in' if end == 'dst' else 'out'}; add one to the machine, "
                        "or take the helper out of it"
                    )


def _forwarding(fabric: Fabric) -> Fabric:
    """Return the fabric in which the NICs and CPUs of all servers forward."""
    devices = tuple(
        replace(device, forwards=device.kind in NOT_FORWARDING) for device in fabric.topology.devices
    )
    return Fabric(replace(fabric.topology, devices=devices), fabric.channels)


def _no_path(
    topology: Topology,
    channels: str,
    collective: str,
    root: int | None,
    demand: Sequence[Sequence[int]] | None,
) -> InfeasibleError:
    """Return the error with a cut that none of the chosen links leaves; for ``auto``, if possible, no link at all."""
    mixed = Fabric(topology, tuple(dict.fromkeys(sum(CHANNEL_CHOICES[channels], ()))))
    cut = mixed.unreachable(collective, root, demand)
    if cut and not _forwarding(mixed).unreachable(collective, root, demand):
        gpus = [name for name in cut if name in topology.gpus]
        others = [name for name in topology.gpus if name not in gpus]
        return InfeasibleError(
            f"every path from {{{', '.join(gpus)}}} to {{{', '.join(others)}}} passes NICs or CPUs of a third server, "
            "which do not forward what other servers send; plan with a GPU of that server too, or state "
            '"forwards": true of these devices',
            cut=cut,
        )
    wires = {
        "auto": "NVLink, PCIe or network",
        "nvlink": "NVLink",
        "pcie": "PCIe",
        ALL: "NVLink or PCIe",
    }.get(channels, channels)
    hint = "" if channels == "auto" else "; try --channels auto"
    if channels == "auto" and _has_islands(topology) and not _states_pcie(topology):
        hint = "; NVLink joins only some of them, and the machine states no PCIe links of a host that joins the others"
    if not cut:
        mixed = Fabric(topology, CHANNEL_CHOICES[channels][0])
        cut = mixed.unreachable(collective, root, demand)
        wires = "NVLink"
        hint = ", and PCIe or network alone do not connect the GPUs either; plan each part alone with --gpus"
    gpus = [name for name in cut if name in topology.gpus]
    others = [name for name in topology.gpus if name not in gpus]
    pair = None if demand is None else mixed.pair_without_path(demand)
    if pair is not None:
        hint = f", and the demand sends a block from rank {pair[0]} to rank {pair[1]}{hint}"
        others = [topology.gpus[pair[1]]]
    return InfeasibleError(
        f"no {wires} path leads from {{{', '.join(gpus)}}} to {{{', '.join(others)}}}: "
        f"nothing leaves the cut {{{', '.join(name for name in cut if not is_part(name))}}}{hint}",
        cut=cut,
    )
