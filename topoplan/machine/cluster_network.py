"""Describe the servers of a cluster and join them by a network of switches.

- ``switch``: all NICs on one switch.
- ``rail-optimised``: NIC i of every server on switch ``rail<i>``; with R rails on ``rail<i mod R>``. A spine joins the
  rails if an oversubscription is given; else they are not joined.
- ``fat-tree``: the NICs of several servers on each switch ``leaf<i>``, and the leaves on a spine.
- ``dragonfly``: the NICs of several servers on each switch ``group<i>``, and a link between every two groups.
- ``torus``: the NICs cabled to those of the next servers in each dimension (`topoplan.machine.torus`), no switches.
- a `SwitchTree`: named servers on named switches, and these on others.

One device ``spine0`` stands for all spine switches, and one ``group<i>`` for all switches of a group, whose links are
taken as no bottleneck. The uplink of a switch is as fast as its downlinks together, divided by the
oversubscription.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import permutations

from topoplan.errors import UsageError
from topoplan.machine.nic_wiring import NicPort
from topoplan.machine.topology import (
    FASTEST,
    SLOWEST,
    Device,
    Link,
    Topology,
    TopologyLike,
    as_topology,
    format_value,
    is_number,
)
from topoplan.machine.torus import MOST_DIMENSIONS, Torus, join_torus
from topoplan.units import exact, gigabytes_from_gigabits, nearest_float

MOST_NICS = 1024
"""Most NICs of one server: more is taken for a typing error."""


@dataclass(frozen=True, slots=True)
class Server:
    """A machine as a server of a cluster.

    Parameters
    ----------
    machine : Topology, or what `topoplan.load` takes
        One server, not a cluster.
    gpus : sequence of int or None
        GPU numbers of the allocation on this server; None takes all. Devices keep their names.
    nics : int, str or None
        NICs of this server, as for `topoplan.cluster`; None takes the cluster's value.
    nic_gbps : float or None
        Gb/s of each NIC in each direction; None takes the cluster's value.
    count : int
        Servers of this kind.
    served : sequence of int or None
        The GPUs for which NICs are chosen, if only some of them will be used; None for all.
    flow_gbps : float or None
        Gb/s of one connection through a NIC; None takes the cluster's value.
    name : str
        Its name in the cluster; made from its number (``s0``) if empty.
    gbps_total : float or None
        Most Gb/s that it sends over all of its cables, and most that it receives; None takes the cluster's value. Only
        networks of cables have it.

    Raises
    ------
    UsageError
        The machine is a cluster already, a GPU does not exist, or a number is out of range.

    Examples
    --------
    >>> import topoplan
    >>> Server("dgx-1v", gpus=[2, 0, 1], count=2).gpus
    (0, 1, 2)
    """

    machine: TopologyLike
    gpus: Sequence[int] | None = None
    nics: int | str | None = None
    nic_gbps: float | None = None
    count: int = 1
    served: Sequence[int] | None = None
    flow_gbps: float | None = None
    name: str = ""
    gbps_total: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "machine", as_topology(self.machine))
        machine = self.topology
        if len(machine.servers) > 1 or any(link.channel == "network" for link in machine.links):
            raise UsageError(f"{machine.name} has a network of its own; build a cluster from single servers")
        for name in ("gpus", "served"):
            chosen = tuple(sorted(machine.select(getattr(self, name))))
            object.__setattr__(self, name, None if getattr(self, name) is None else chosen)
        if not isinstance(self.nics, str):
            check_count("nics", self.nics, most=MOST_NICS)
        check_count("count", self.count)
        if self.nic_gbps is not None:
            nic_rate(self.nic_gbps)
        check_flow(self.flow_gbps)
        if self.name and self.count != 1:
            raise UsageError(
                f"{self.count} servers cannot all be called {self.name}; list each with its name"
            )

    @property
    def topology(self) -> Topology:
        """The machine as a topology."""
        return as_topology(self.machine)

    @property
    def kind(self) -> Server:
        """The same without its name: servers of one kind are wired equally."""
        return replace(self, name="") if self.name else self


def check_count(name: str, value: int | None, *, most: int = 10**15) -> None:
    """Raise UsageError unless a value is a whole number from 1 to ``most``, or None."""
    if value is None:
        return
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not 1 <= value <= most:
        raise UsageError(f"{name} {format_value(value)} must be a whole number from 1 to {most:,}")


def nic_rate(gbps: float, name: str = "nic_gbps") -> float:
    """Return the GB/s of a NIC, or of another link, sold as ``gbps`` Gb/s; UsageError if out of the range of links."""
    if not is_number(gbps) or not 8 * SLOWEST <= gbps <= 8 * FASTEST:
        raise UsageError(f"{name} {format_value(gbps)} must be a number of Gb/s above zero, for example 100")
    return gigabytes_from_gigabits(gbps)


def check_flow(gbps: float | None) -> None:
    """Raise UsageError unless a value is a rate of a connection, or None."""
    if gbps is not None and not (is_number(gbps) and 8 * SLOWEST <= gbps <= 8 * FASTEST):
        raise UsageError(
            f"flow_gbps {format_value(gbps)} must be the Gb/s of one connection, above zero, for example 5"
        )


def stated_gigabits(machine: Topology) -> float:
    """Return the Gb/s that all NICs of a machine state; UsageError if none is stated, or they differ."""
    stated = sorted({device.fact("gigabits") for device in machine.devices if device.kind == "nic"})
    numbers = [text for text in stated if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", text) and float(text) > 0]
    if len(stated) == len(numbers) == 1:
        return float(numbers[0])
    if len(numbers) > 1:
        raise UsageError(
            f"the NICs of {machine.name} differ ({', '.join(numbers)} Gb/s): say with nic_gbps what each has"
        )
    raise UsageError("nic_gbps is not given: say how many Gb/s each NIC has, for example 100")


NETWORKS = ("switch", "rail-optimised", "fat-tree", "dragonfly", "torus")

SPINE = "spine0"

CORE = "core0"

MOST_OVERSUBSCRIPTION = 1000.0

_BELONGS = {
    "rails": ("rail-optimised",),
    "oversubscription": ("rail-optimised", "fat-tree"),
    "leaf_size": ("fat-tree",),
    "pod_size": ("fat-tree",),
    "pod_oversubscription": ("fat-tree",),
    "group_size": ("dragonfly",),
    "global_gbps": ("dragonfly",),
    "sides": ("torus",),
    "dimension_nics": ("torus",),
}


@dataclass(frozen=True, slots=True)
class ClusterNetwork:
    """A network that joins the NICs of servers, one of `NETWORKS`.

    ``rails`` None makes one for each NIC of the server with most. ``oversubscription`` is downlinks over uplinks of a
    leaf or rail, 1 or more; None is 1 for a fat tree, and leaves rails unjoined. ``leaf_size`` is the servers on each
    leaf of a fat tree. ``pod_size`` is the leaves in each pod of a fat tree of three levels, whose leaves are joined by
    a switch ``pod<i>``, and the pods by ``core0``; ``pod_oversubscription`` is downlinks over uplinks of a pod, 1 if
    None. ``group_size`` is the servers in each group of a dragonfly, and ``global_gbps`` the Gb/s each way between any
    two groups. ``sides`` are the servers in each dimension of a torus (`topoplan.machine.torus`), and
    ``dimension_nics`` the NICs of a server ahead, and as many back, in each; None deals out all NICs evenly.
    UsageError if the kind is unknown, or a field is missing, out of range or of another kind.
    """

    kind: str = "switch"
    rails: int | None = None
    oversubscription: float | None = None
    leaf_size: int | None = None
    pod_size: int | None = None
    pod_oversubscription: float | None = None
    group_size: int | None = None
    global_gbps: float | None = None
    sides: tuple[int, ...] | None = None
    dimension_nics: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind == "cables":
            raise UsageError(
                "a network of cables must list each of them; write them into a cluster file, or give topoplan.cluster "
                "cables"
            )
        if self.kind not in NETWORKS:
            raise UsageError(f"network {self.kind!r} is unknown; use one of {', '.join(NETWORKS)}")
        for name, kinds in _BELONGS.items():
            if getattr(self, name) is not None and self.kind not in kinds:
                raise UsageError(
                    f"{name} belongs to the network {' or '.join(kinds)}, not to {self.kind}; leave it out"
                )
        check_count("rails", self.rails)
        check_count("leaf_size", self.leaf_size)
        check_count("pod_size", self.pod_size)
        check_count("group_size", self.group_size)
        _check_ratio(self.oversubscription)
        _check_ratio(self.pod_oversubscription, "pod_oversubscription")
        if self.pod_oversubscription is not None and self.pod_size is None:
            raise UsageError(
                f"pod_oversubscription {self.pod_oversubscription:g} needs pod_size (--pod-size), the number of leaves "
                "in each pod"
            )
        if self.kind == "fat-tree" and self.leaf_size is None:
            raise UsageError(
                "a fat tree needs leaf_size (--leaf-size), the number of servers on each leaf switch"
            )
        if self.kind == "dragonfly" and (self.group_size is None or self.global_gbps is None):
            raise UsageError(
                "a dragonfly needs group_size (--group-size), the number of servers in each group, and global_gbps "
                "(--global-bandwidth), the Gb/s between any two groups"
            )
        if self.global_gbps is not None:
            nic_rate(self.global_gbps, "global_gbps")
        if self.kind == "torus":
            self._check_torus()

    def _check_torus(self) -> None:
        sides, nics = self.sides, self.dimension_nics
        if not sides:
            raise UsageError("a torus needs sides (--sides), the number of servers in each dimension")
        if len(sides) > MOST_DIMENSIONS:
            raise UsageError(
                f"a torus must have at most {MOST_DIMENSIONS} dimensions, got {len(sides)}; give fewer sides"
            )
        for side in sides:
            check_count("sides", side)
            if side < 2:
                raise UsageError(f"sides must be 2 or more, got {side}; leave out a dimension of one server")
        for one in nics or ():
            check_count("dimension_nics", one, most=MOST_NICS)
        if nics is not None and len(nics) != len(sides):
            raise UsageError(
                f"dimension_nics must have a number for each of {len(sides)} dimensions, got {len(nics)}; give as many"
            )

    @property
    def torus(self) -> Torus:
        """The servers of a torus by their coordinates."""
        assert self.sides is not None, "a torus has them"
        return Torus(self.sides)

    @property
    def leaf(self) -> str:
        """The name of leaf switches without their number, empty for a network that has none."""
        return {"fat-tree": "leaf", "dragonfly": "group"}.get(self.kind, "")

    @property
    def has_spine(self) -> bool:
        """Whether a spine may join leaves or rails."""
        return self.kind == "fat-tree" or self.oversubscription is not None

    def above(self, switch: str) -> str:
        """Return the switch above a leaf, rail or pod."""
        if self.pod_size is None:
            return SPINE
        number = int(switch.lstrip("leafpod"))
        return CORE if switch.startswith("pod") else f"pod{number // self.pod_size}"


@dataclass(frozen=True, slots=True)
class SwitchTree:
    """Switches in a tree, and the servers on them.

    ``switches`` are pairs of a switch and the one above it, empty for a top one; ``servers`` are pairs of a server and
    the switch of all its NICs. Servers that are not built count for uplinks, as if equal to the first built one.
    ``oversubscription`` is downlinks over uplinks of every switch, 1 or more; None is 1.
    """

    switches: tuple[tuple[str, str], ...]
    servers: tuple[tuple[str, str], ...]
    oversubscription: float | None = None

    def __post_init__(self) -> None:
        _check_ratio(self.oversubscription)


def join_servers(
    network: ClusterNetwork | SwitchTree,
    servers: Sequence[tuple[str, Sequence[NicPort]]],
    *,
    nics: int,
    latency: float | None = None,
    numbers: Sequence[int] | None = None,
    counts: Sequence[int] | None = None,
    below: Mapping[str, Mapping[tuple[float, float], int]] | None = None,
) -> tuple[list[Device], list[Link]]:
    """Return the switches, and the links to and among them.

    ``servers`` are names with ports, whose devices have their names in the cluster; ``nics`` are those of the server
    with most, in use or not; ``latency`` is in seconds, for the wires of NICs. ``numbers`` are the servers' numbers, by
    default 0, 1 and so on; ``counts`` is how many servers each represents on its switches, by default one: the uplinks
    are those of all. ``below`` is for each pod the rates out and back of all ports below it, None if the servers are
    all. UsageError for more rails than NICs, or for servers that cannot reach each other.
    """
    if isinstance(network, SwitchTree):
        return _join_tree(network, servers, latency)
    if network.kind == "torus":
        check_torus_size(network, len(servers) if numbers is None else None)
        assert network.sides is not None, "a torus has them"
        at = range(len(servers)) if numbers is None else numbers
        shape = network.sides, network.dimension_nics
        return [], join_torus(*shape, servers, nics=nics, latency=latency, numbers=at)
    most = max(nics, *(port.number + 1 for _, ports in servers for port in ports))
    rails = network.rails or most
    if rails > most:
        raise UsageError(
            f"{rails} rails, but no server has more than {most} NICs: rail{most} would be a switch without ports; "
            f"use {most} rails or fewer"
        )
    homes = [
        [_switch(network, number, port.number, rails) for port in ports]
        for number, (_, ports) in zip(numbers or range(len(servers)), servers, strict=True)
    ]
    links, down = _plugged(servers, homes, latency, counts)
    switches = sorted(down, key=lambda name: (len(name), name))
    if network.has_spine and len(switches) > 1:
        ratio = exact(network.oversubscription or 1.0)
        for switch in switches:
            links += _uplinks(switch, down[switch], ratio, network.above(switch))
        pods = list(dict.fromkeys(network.above(switch) for switch in switches))
        if network.pod_size is not None and len(pods) > 1:
            ratio *= exact(network.pod_oversubscription or 1.0)
            for pod in pods:
                inside = Counter[tuple[float, float]]()
                for switch in switches:
                    if network.above(switch) == pod:
                        inside.update(down[switch])
                links += _uplinks(pod, inside if below is None else below[pod], ratio, CORE)
            pods.append(CORE)
        switches += pods
    elif network.kind == "dragonfly":
        links += _global_links(network, switches)
    else:
        _check_reach([name for name, _ in servers], homes)
    return [Device(switch, "switch") for switch in switches], links


def check_torus_size(network: ClusterNetwork, servers: int | None) -> None:
    """Raise UsageError if a torus has not as many servers as its sides say."""
    if servers is not None and servers != network.torus.servers:
        sides = ",".join(map(str, network.sides or ()))
        raise UsageError(
            f"a torus of sides {sides} must have {network.torus.servers:,} servers, got {servers:,}; give as many, "
            "without helpers"
        )


def _plugged(
    servers: Sequence[tuple[str, Sequence[NicPort]]],
    homes: Sequence[Sequence[str]],
    latency: float | None,
    counts: Sequence[int] | None = None,
) -> tuple[list[Link], dict[str, Counter[tuple[float, float]]]]:
    """Return the links of all ports with their switches, and the ports' rates out and back at every switch."""
    links: list[Link] = []
    down: dict[str, Counter[tuple[float, float]]] = defaultdict(Counter)
    for (_, ports), home, count in zip(servers, homes, counts or [1] * len(servers), strict=True):
        for port, switch in zip(ports, home, strict=True):
            if port.out:
                links.append(Link(port.sender, switch, "network", port.out, latency=latency))
            if port.back:
                links.append(Link(switch, port.receiver, "network", port.back, latency=latency))
            down[switch][port.built or (port.out, port.back)] += count
    return links, down


def _check_ratio(ratio: float | None, name: str = "oversubscription") -> None:
    if ratio is not None and not (is_number(ratio) and 1 <= ratio <= MOST_OVERSUBSCRIPTION):
        raise UsageError(
            f"{name} {str(ratio)[:40]} must be a number from 1 (none) to {MOST_OVERSUBSCRIPTION:g}"
        )


def _join_tree(
    tree: SwitchTree, servers: Sequence[tuple[str, Sequence[NicPort]]], latency: float | None
) -> tuple[list[Device], list[Link]]:
    """Return the switches above servers of the tree, up to the first one above all of them."""
    above, home = dict(tree.switches), dict(tree.servers)
    ways = {name: _upwards(home[name], above) for name, _ in servers}
    common = [switch for switch in ways[servers[0][0]] if all(switch in way for way in ways.values())]
    if not common:
        first = servers[0][0]
        other = next(name for name, way in ways.items() if not set(way) & set(ways[first]))
        raise UsageError(
            f"{first} and {other} cannot reach each other: nothing is above both {home[first]} and {home[other]}; "
            "add a switch above them, or name nodes below one"
        )
    links, down = _plugged(servers, [[home[name]] * len(ports) for name, ports in servers], latency)
    for name, switch in tree.servers:
        if name not in ways:
            for port in servers[0][1]:
                down[switch][port.out, port.back] += 1
    ratio = exact(tree.oversubscription or 1.0)
    used = {switch for way in ways.values() for switch in way[: way.index(common[0])]}
    # From the servers up: the downlinks of a switch are known before its uplink.
    for switch in sorted(above, key=lambda switch: (-len(_upwards(switch, above)), switch)):
        if switch in down and above[switch]:
            up, back = _uplinks(switch, down[switch], ratio, above[switch])
            links += (up, back) if switch in used else ()
            down[above[switch]][up.bandwidth, back.bandwidth] += 1
    listed = [switch for switch, _ in tree.switches if switch in used or switch == common[0]]
    return [Device(switch, "switch") for switch in listed], links


def _upwards(switch: str, above: Mapping[str, str]) -> list[str]:
    """Return a switch and the switches above it, up to the top."""
    way = [switch]
    while above[way[-1]]:
        way.append(above[way[-1]])
    return way


def _switch(network: ClusterNetwork, server: int, nic: int, rails: int) -> str:
    if network.kind == "switch":
        return "switch0"
    if network.kind == "rail-optimised":
        return f"rail{nic % rails}"
    if network.kind == "dragonfly":
        assert network.group_size is not None, "a dragonfly has it"
        return f"group{server // network.group_size}"
    assert network.leaf_size is not None, "a fat tree has it"
    return f"leaf{server // network.leaf_size}"


def _uplinks(
    switch: str, down: Mapping[tuple[float, float], int], ratio: Fraction, above: str
) -> tuple[Link, Link]:
    up = sum(exact(out) * number for (out, _), number in down.items()) / ratio
    back = sum(exact(back) * number for (_, back), number in down.items()) / ratio
    return (
        Link(switch, above, "network", nearest_float(Fraction(up))),
        Link(above, switch, "network", nearest_float(Fraction(back))),
    )


def _global_links(network: ClusterNetwork, groups: Sequence[str]) -> list[Link]:
    """Return the links between any two groups of a dragonfly, both ways."""
    assert network.global_gbps is not None, "a dragonfly has it"
    rate = nic_rate(network.global_gbps)
    return [Link(one, other, "network", rate) for one, other in permutations(groups, 2)]


def _check_reach(servers: Sequence[str], homes: Sequence[Sequence[str]]) -> None:
    """Raise UsageError if no chain of common switches joins the servers."""
    reached = set(homes[0])
    missing = [number for number, home in enumerate(homes) if not reached & set(home)]
    grown = True
    while missing and grown:
        before = len(reached)
        reached.update(*(home for home in homes if reached & set(home)))
        grown = len(reached) > before
        missing = [number for number in missing if not reached & set(homes[number])]
    if missing:
        first = missing[0]
        raise UsageError(
            f"{servers[0]} and {servers[first]} cannot reach each other: {servers[0]} has NICs on "
            f"{', '.join(dict.fromkeys(homes[0]))}, {servers[first]} on {', '.join(dict.fromkeys(homes[first]))}, and "
            "the rails are not joined; give an oversubscription, which joins them by a spine, or one switch"
        )
