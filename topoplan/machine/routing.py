"""Restrict routes: no transit through a third server, peer access by pair, staging of PCIe copies in host memory.

A host does not forward RDMA unless `Device.forwards` says so. A route therefore leaves the server of its first rank
once and ends in the first server whose NIC or CPU it enters. Ranks and helpers store and forward, which ends one tree
edge and begins the next. The graph of routes has a state for every device and phase: `OWN` in the server of the last
rank, `FREE` beyond it, `ENDING` in a server that the route cannot leave. Its paths are exactly the allowed routes. A
fabric in which every simple path is a route has one state for each device.

GPUs without peer access over PCIe, or that keep the peer access of NVLink, copy through pinned memory of a CPU. Both
copies cross links of the PCIe tree, and no switch below the CPU turns them around: `staged`. If only some pairs have no
access (`refused_pairs`), the routes between those alone pass a CPU: a state then also says from which GPUs it comes
until a CPU, NIC or network switch is passed. In a staged machine the two directions of a link that share a cap
(`topoplan.machine.half_duplex`) are crossed by one route, and a state in their devices says from which end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from topoplan.errors import UsageError
from topoplan.machine.topology import PULLS, REFUSED, UNREACHED, UNWRITTEN, Device, Link, Topology, facts

NOT_FORWARDING = ("nic", "cpu")
"""Kinds of devices that carry data of their own server alone, unless ``forwards`` is set."""

OWN, FREE, ENDING = range(3)

Node = TypeVar("Node")

State = tuple[int, int, int, int]
"""Device, phase, number of the set of vertices to which access is refused, and device before a shared cap or -1."""


@dataclass(frozen=True, slots=True)
class RouteGraph:
    """A directed graph whose paths between vertices are the routes of a fabric.

    ``nodes`` have the device of every state, as a position in `Fabric.nodes`; states 0 to V - 1 are the ranks and
    helpers, in order. ``ends`` are the states of every arc and ``links`` the fabric's link that it crosses; a link may
    have several arcs.
    """

    nodes: tuple[int, ...]
    ends: tuple[tuple[int, int], ...]
    links: tuple[int, ...]

    def leaving(self) -> list[list[tuple[int, int]]]:
        """Return the arcs out of every state, as (link, state at the other end), in the order of the links."""
        return self._by_state(self.ends)

    def entering(self) -> list[list[tuple[int, int]]]:
        """Return the arcs into every state, as (link, state at the other end), in the order of the links."""
        return self._by_state([(dst, src) for src, dst in self.ends])

    def _by_state(self, ends: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        table: list[list[tuple[int, int]]] = [[] for _ in self.nodes]
        for link, (state, other) in zip(self.links, ends, strict=True):
            table[state].append((link, other))
        return table


@dataclass(frozen=True)
class Transit:
    """Servers of a machine's devices, and which of its devices do not forward.

    ``servers`` is empty for switches between servers; ``ends`` are NICs and CPUs of servers that do not forward;
    ``vertices`` are GPUs and helpers. ``refused`` are `refused_pairs`, ``hosts`` the devices that copies without peer
    access may pass, ``halves`` the devices of caps that one route may cross both ways.
    """

    servers: Mapping[str, str]
    ends: frozenset[str]
    vertices: frozenset[str]
    refused: frozenset[tuple[str, str]]
    hosts: frozenset[str]
    halves: frozenset[str]

    @classmethod
    def of(cls, topology: Topology) -> Transit:
        """Return the transit rules of a machine."""
        devices = topology.devices
        return cls(
            {device.name: device.server for device in devices},
            frozenset(d.name for d in devices if d.kind in NOT_FORWARDING and d.server and not d.forwards),
            frozenset(d.name for d in devices if d.kind in ("gpu", "helper")),
            refused_pairs(topology),
            frozenset(d.name for d in devices if d.kind in ("cpu", "nic", "switch")),
            topology.split_parts if _is_staged(devices) else frozenset(),
        )

    def joins(self, link: Link) -> bool:
        """Return whether a link joins two servers, or a server and a switch between servers."""
        return self.servers[link.src] != self.servers[link.dst]

    def foreign(self, route: Sequence[str]) -> str | None:
        """Return the first device that a route must not pass: a NIC or CPU of a server that it enters and leaves.

        ``route`` has the devices from rank to rank, in either direction.
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

    def unable(self, route: Sequence[str]) -> str:
        """Return why no copy takes a route between two ranks, source first, in words; empty if one may.

        Transit through a third server is not judged here (`foreign`).
        """
        start = 0
        for stop in range(1, len(route)) if self.refused else ():
            # a GPU or helper on the way stores and forwards
            if stop < len(route) - 1 and route[stop] not in self.vertices:
                continue
            one, other = route[start], route[stop]
            if (one, other) in self.refused and self.hosts.isdisjoint(route[start + 1 : stop]):
                return f"needs peer access from {one} to {other}, which is refused; lead it through a CPU"
            start = stop
        for before, part, after in zip(route, route[1:], route[3:], strict=False):
            if part in self.halves and before not in self.halves and whole_name(before) == whole_name(after):
                return f"turns around between {before} and {after}; a staged copy passes the CPU"
        return ""

    def without_access(
        self, nodes: Sequence[str], vertices: int, ends: Iterable[tuple[int, int]]
    ) -> dict[int, frozenset[int]]:
        """Return for each vertex those to which a path leads that needs peer access, and that is refused it."""
        if not self.refused:
            return {}
        position = {name: place for place, name in enumerate(nodes)}
        wanted: dict[int, set[int]] = {}
        for one, other in self.refused:
            if one in position and other in position:
                wanted.setdefault(position[one], set()).add(position[other])
        leaving: list[list[int]] = [[] for _ in nodes]
        for src, dst in ends:
            leaving[src].append(dst)
        passed = [
            [] if node < vertices or nodes[node] in self.hosts else ends for node, ends in enumerate(leaving)
        ]
        found = {}
        for start, heads in sorted(wanted.items()):
            if barred := frozenset(heads & fewest_steps(leaving[start], passed.__getitem__).keys()):
                found[start] = barred
        return found

    def graph(
        self,
        nodes: Sequence[str],
        vertices: int,
        ends: tuple[tuple[int, int], ...],
        barred: Mapping[int, frozenset[int]],
    ) -> RouteGraph:
        """Return the graph of the routes over some links.

        ``nodes`` are devices, the ``vertices`` ranks and helpers first; ``ends`` are those of every link, as positions
        in ``nodes``. ``barred`` is what `without_access` returns.
        """
        server = [self.servers[name] for name in nodes]
        closed = [name in self.ends for name in nodes]
        halves = [name in self.halves for name in nodes]
        if not barred and not any(halves) and not self._passable(server, closed, vertices, ends):
            return RouteGraph(tuple(range(len(nodes))), ends, tuple(range(len(ends))))
        host = [name in self.hosts for name in nodes]
        whole = [whole_name(name) for name in nodes]
        heads = (frozenset[int](), *sorted(set(barred.values()), key=sorted))
        tag_of = {node: heads.index(those) for node, those in barred.items()}
        leaving: list[list[int]] = [[] for _ in nodes]
        for src, dst in ends:
            leaving[src].append(dst)

        def phase_after(phase: int, src: int, dst: int) -> int | None:
            """Return the phase of a route after a link; None if it may not cross it."""
            if dst < vertices:
                return None if phase == ENDING and server[src] != server[dst] else OWN
            if server[src] == server[dst]:
                return ENDING if phase == FREE and closed[dst] else phase
            if phase == ENDING:
                return None
            return ENDING if closed[dst] else FREE

        def after(state: State, dst: int) -> State | None:
            """Return the state of a route after a link; None if it may not cross it."""
            src, phase, tag, entered = state
            further = phase_after(phase, src, dst)
            turns = halves[src] and not halves[dst] and whole[dst] == whole[entered]
            if further is None or turns or dst in heads[tag]:
                return None
            if dst < vertices:
                return dst, further, 0, -1
            tag = 0 if host[dst] else tag_of.get(src, 0) if src < vertices else tag
            return dst, further, tag, (entered if halves[src] else src) if halves[dst] else -1

        states = sorted(
            fewest_steps(
                [(node, OWN, 0, -1) for node in range(vertices)],
                lambda state: filter(None, (after(state, dst) for dst in leaving[state[0]])),
            )
        )
        number = {state: place for place, state in enumerate(states)}
        states_of: list[list[State]] = [[] for _ in nodes]
        for state in states:
            states_of[state[0]].append(state)
        arcs = [
            (link, number[state], number[following])
            for link, (src, dst) in enumerate(ends)
            for state in states_of[src]
            if (following := after(state, dst)) is not None
        ]
        return RouteGraph(
            tuple(state[0] for state in states),
            tuple((src, dst) for _, src, dst in arcs),
            tuple(link for link, _, _ in arcs),
        )

    def _passable(
        self, server: Sequence[str], closed: Sequence[bool], vertices: int, ends: Sequence[tuple[int, int]]
    ) -> bool:
        """Return whether a simple path leads from outside a server through a closed device to elsewhere outside.

        The search starts at every entry from outside and covers devices of the server that are not vertices.
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

        def onward(state: tuple[int, bool]) -> list[tuple[int, bool]]:
            """Return the next devices of a path, each with whether a closed one is on it, its end included."""
            return [(other, state[1] or closed[other]) for other in inside.get(state[0], ())]

        return any(
            passes_closed and outwards.get(node, set()) - {source}
            for (_, source), starts in entries.items()
            for node, passes_closed in fewest_steps([(node, closed[node]) for node in starts], onward)
        )


def fewest_steps(starts: Iterable[Node], onward: Callable[[Node], Iterable[Node]]) -> dict[Node, int]:
    """Return the nodes reached from some, breadth first, and the fewest steps to each.

    >>> fewest_steps([1], lambda number: [number * 2 % 5, number * 3 % 5])
    {1: 0, 2: 1, 3: 1, 4: 2}
    """
    steps = dict.fromkeys(starts, 0)
    frontier = list(steps)
    for node in frontier:
        for other in onward(node):
            if other not in steps:
                steps[other] = steps[node] + 1
                frontier.append(other)
    return steps


DOWNWARDS = ".down"
"""Suffix of a PCIe switch's name for its half that leads from the CPU to the GPUs."""


def whole_name(name: str) -> str:
    """Return the PCIe switch of which a device is the lower half, in a staged machine, or the device itself."""
    return name.removesuffix(DOWNWARDS)


def _is_staged(devices: Iterable[Device]) -> bool:
    return any(device.kind == "pcie" and device.name.endswith(DOWNWARDS) for device in devices)


def staged(topology: Topology) -> Topology:
    """Return the machine in which PCIe joins GPUs only through a CPU; a staged machine stays as it is.

    Every PCIe switch becomes two devices, one on the path up to a CPU and one on the path down, so that routes, loads,
    cuts and lengths apply to staged copies too. UsageError if a PCIe switch has no path to a CPU.
    """
    kinds = {device.name: device.kind for device in topology.devices}
    switches = {d.name for d in topology.devices if d.kind == "pcie"} - topology.split_parts
    if _is_staged(topology.devices):
        return topology
    hops = _hops_to_a_cpu(topology, kinds)
    for name in switches:
        if name not in hops:
            raise UsageError(
                f"copies cannot pass a CPU's memory: no link leads from {name} to a CPU; use channels all, "
                "or state the CPU in the machine"
            )
    devices: list[Device] = []
    for device in topology.devices:
        devices.append(device)
        if device.name in switches:
            devices.append(replace(device, name=device.name + DOWNWARDS, busid="", facts=()))
    links: list[Link] = []
    for link in topology.links:
        src, dst = link.src, link.dst
        if link.channel == "pcie" and kinds[src] == kinds[dst] == "gpu":
            continue
        above = hops.get(dst, 1 << 30) < hops.get(src, 1 << 30)
        if src in switches and not above:
            src += DOWNWARDS
        if dst in switches and not above:
            dst += DOWNWARDS
        links.append(replace(link, src=src, dst=dst))
    return replace(topology, devices=tuple(devices), links=tuple(links))


def unstaged(topology: Topology) -> Topology:
    """Return the machine from which `staged` made this one; other machines stay as they are."""
    names = {device.name for device in topology.devices}
    if not any(name.endswith(DOWNWARDS) for name in names):
        return topology
    whole = {name: name.removesuffix(DOWNWARDS) for name in names}
    whole |= {name: name for name, base in whole.items() if base not in names}
    links = {
        (whole[link.src], whole[link.dst], link.channel): replace(
            link, src=whole[link.src], dst=whole[link.dst]
        )
        for link in topology.links
    }
    devices = tuple(device for device in topology.devices if whole[device.name] == device.name)
    return replace(topology, devices=devices, links=tuple(links.values()))


def without_peer_access(topology: Topology) -> Topology:
    """Return the machine `staged` with a note, if none of its GPUs has peer access (see `has_peer_access`).

    If only some have none the machine stays as it is, and routes between `refused_pairs` pass a CPU.
    """
    gpus = [device for device in topology.devices if device.kind == "gpu"]
    if not gpus or any(has_peer_access(gpu) for gpu in gpus):
        return topology
    try:
        made = staged(topology)
    except UsageError:
        return topology
    return topology if made == topology else replace(made, notes=(*made.notes, STAGED_NOTE))


STAGED_NOTE = "no peer access: copies over PCIe are planned by way of the CPUs' memory"


def refused_pairs(topology: Topology) -> frozenset[tuple[str, str]]:
    """Return the pairs of GPUs of a server, source first, whose copies must pass a CPU for lack of peer access.

    Either names the other in the fact ``refused``, the destination names the source in ``unreached``, or one of the two
    has no peer access at all (`has_peer_access`). Helpers that were GPUs count too.

    >>> gpus = (Device("gpu0", "gpu", "s0", facts=(("refused", "gpu1"),)), Device("gpu1", "gpu", "s0"))
    >>> sorted(refused_pairs(Topology("", gpus, ())))
    [('gpu0', 'gpu1'), ('gpu1', 'gpu0')]
    """
    vertices = [device for device in topology.devices if device.kind in ("gpu", "helper")]
    marked = [device for device in vertices if device.facts]
    if not any(device.fact(key) for device in marked for key in (REFUSED, UNREACHED, "mig", "peer_access")):
        return frozenset()
    servers: dict[str, list[str]] = {}
    for device in vertices:
        servers.setdefault(device.server, []).append(device.name)
    found: set[tuple[str, str]] = set()
    for device in marked:
        others = set(servers[device.server]) - {device.name}
        refused = others if not has_peer_access(device) else set(named_peers(device, REFUSED, others))
        found |= {pair for name in refused for pair in ((name, device.name), (device.name, name))}
        found |= {(name, device.name) for name in named_peers(device, UNREACHED, others)}
    return frozenset(found)


def with_refused_pairs(topology: Topology, pairs: Iterable[tuple[str, str]]) -> Topology:
    """Return the machine of one server with more pairs whose GPUs name each other in the fact ``refused``."""
    named: dict[str, set[str]] = {}
    for one, other in pairs:
        named.setdefault(one, set()).add(other)
        named.setdefault(other, set()).add(one)
    if not named:
        return topology
    order = {name: place for place, name in enumerate(topology.gpus)}

    def marked(gpu: Device) -> Device:
        every = named[gpu.name] | set(named_peers(gpu, REFUSED, order))
        return replace(
            gpu, facts=facts(**dict(gpu.facts) | {REFUSED: ",".join(sorted(every, key=order.__getitem__))})
        )

    return replace(
        topology, devices=tuple(marked(one) if one.name in named else one for one in topology.devices)
    )


def named_peers(gpu: Device, key: str, gpus: Collection[str]) -> Iterator[str]:
    """Yield those of some GPUs that a fact names, without the server's name that a cluster puts before it."""
    server = gpu.name.rpartition(".")[0]
    for name in filter(None, gpu.fact(key).split(",")):
        for full in (name, f"{server}.{name}"):
            if full in gpus:
                yield full
                break


def has_peer_access(gpu: Device) -> bool:
    """Return whether other GPUs may read a GPU's memory: not in MIG mode, nor if the fact ``peer_access`` is none."""
    return not gpu.fact("mig") and gpu.fact("peer_access") != "none"


class MemoryAccess(NamedTuple):
    """Pairs of GPUs, source first: the destination pulls the data; the source's writes never end; no copy of a kernel
    joins them, since none ends or peer access is refused.
    """

    pulled: frozenset[tuple[str, str]]
    unwritten: frozenset[tuple[str, str]]
    unreached: frozenset[tuple[str, str]]


def memory_access(topology: Topology) -> MemoryAccess:
    """Return how data comes from one GPU to another where it is not pushed, by links and by facts of GPUs.

    Copies take NVLink where there is one, so the link of another channel does not count beside it. A fact names GPUs of
    the same server, without the server's name that a cluster puts before it. Helpers that were GPUs count too.

    >>> gpus = (Device("gpu0", "gpu"), Device("gpu1", "gpu"))
    >>> found = memory_access(Topology("", gpus, (Link("gpu0", "gpu1", "pcie", 52, push=2.6, pull=52),)))
    >>> [sorted(pairs) for pairs in found]
    [[('gpu0', 'gpu1')], [], []]
    """
    links = sorted(topology.links, key=lambda link: link.channel == "nvlink")
    pulls = {
        ends: link for ends, link in {(link.src, link.dst): link for link in links}.items() if link.pulls
    }
    found = {
        PULLS: set(pulls),
        UNREACHED: set(),
        UNWRITTEN: {ends for ends in pulls if pulls[ends].push is None},
    }
    gpus = {device.name: device for device in topology.devices if device.kind in ("gpu", "helper")}
    for device in (one for one in gpus.values() if one.facts):
        for key, pairs in found.items():
            pairs |= {(name, device.name) for name in named_peers(device, key, gpus)}
        for name in named_peers(device, REFUSED, gpus):
            found[UNREACHED] |= {(name, device.name), (device.name, name)}
    return MemoryAccess(*(frozenset(found[key]) for key in (PULLS, UNWRITTEN, UNREACHED)))


def _hops_to_a_cpu(topology: Topology, kinds: Mapping[str, str]) -> dict[str, int]:
    """Return the PCIe links from every device up to the nearest CPU, through switches alone."""
    into: dict[str, list[str]] = {}
    for link in topology.links:
        if link.channel == "pcie":
            into.setdefault(link.dst, []).append(link.src)
    cpus = [name for name, kind in kinds.items() if kind == "cpu"]
    return fewest_steps(cpus, lambda name: into.get(name, ()) if kinds[name] in ("cpu", "pcie") else ())
