"""Join servers by cables from port to port, without a switch.

A port is a NIC that the machine lists, by its device name, its adapter's name or the name of one of its functions; a
machine that lists no NIC has the ports that the cables name. `plug_in` gives every server the NICs of its cabled ports
alone, `topoplan.machine.nic_wiring` wires them to the GPUs, and `PluggedCables.join` adds the cables, each a link in
both directions between two NICs. NICs do not forward (`topoplan.machine.routing`), so data that passes a server is
stored and forwarded by one of its GPUs.

A cap on the traffic of a server is that of the host's side of one adapter with several ports: a NIC ``ports`` stands
between the GPUs and the ports, and the links to it and from it have the cap.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from topoplan.errors import UsageError
from topoplan.machine.cluster_network import MOST_NICS, Server, check_count
from topoplan.machine.nic_wiring import NicPort, machine_nics
from topoplan.machine.topology import (
    FASTEST,
    SLOWEST,
    Device,
    Link,
    Topology,
    format_value,
    is_number,
    without_named,
)
from topoplan.machine.transport import Transport
from topoplan.machine.variants import SIDES
from topoplan.units import check_type, gigabytes_from_gigabits, listed

ADAPTER = "ports"
"""Name of the NIC that stands for all ports of a server whose traffic is capped."""

MOST_MESH = 8
"""Most servers of a full mesh that JACCL runs."""

_END = re.compile(r"(?P<server>[^\s:]{1,200}):(?P<port>[A-Za-z0-9_-]{1,80})")


def cabled_nics(topology: Topology) -> Iterator[tuple[Device, Device]]:
    """Yield for every link from a NIC to that of another server both NICs: each cable in both directions."""
    for link in topology.links:
        near, far = topology.device(link.src), topology.device(link.dst)
        if near.kind == far.kind == "nic" and near.server and far.server and near.server != far.server:
            yield near, far


def _check_gbps(where: str, gbps: float) -> None:
    if not is_number(gbps) or not 8 * SLOWEST <= gbps <= 8 * FASTEST / MOST_NICS:
        raise UsageError(
            f"{where} must be a number of Gb/s above zero, got {format_value(gbps)}; write for example 200"
        )


@dataclass(frozen=True, slots=True)
class Cable:
    """A cable between the ports of two servers, or several equal ones side by side.

    Parameters
    ----------
    start, end : str
        Server and port, ``s0:p0``; the order does not matter.
    gbps : float
        Gb/s of one cable in each direction.
    count : int
        Cables side by side, from as many ports under one name; they are lost together.

    Raises
    ------
    UsageError
        An end has another form, both ends are of one server, or a number is out of range.

    Examples
    --------
    >>> str(Cable("s0:p0", "s1:p1", 200))
    's0:p0-s1:p1'
    """

    start: str
    end: str
    gbps: float
    count: int = 1

    def __post_init__(self) -> None:
        for end in (self.start, self.end):
            if not isinstance(end, str) or not _END.fullmatch(end):
                raise UsageError(
                    f"the end of a cable must be a server and its port, got {format_value(end)}; write for example "
                    "s0:p0"
                )
        if self.servers[0] == self.servers[1]:
            raise UsageError(
                f"cable {self} must join two servers, got {self.servers[0]} twice; correct one end"
            )
        _check_gbps(f"gbps of cable {self}", self.gbps)
        check_count(f"count of cable {self}", self.count, most=MOST_NICS)

    def __str__(self) -> str:
        return f"{self.start}-{self.end}"

    @property
    def servers(self) -> tuple[str, str]:
        """The servers of both ends."""
        return self.start.partition(":")[0], self.end.partition(":")[0]


class _Plug(NamedTuple):
    """One end of a cable: number of the server, and name of the port's NIC there."""

    server: int
    port: str


@dataclass(frozen=True, slots=True)
class PluggedCables:
    """Cables with both ends found, and the NICs of each server's ports by name, in order.

    ``capped`` are the numbers of the servers whose ports share a NIC `ADAPTER`.
    """

    cables: tuple[tuple[Cable, _Plug, _Plug], ...]
    ports: tuple[Mapping[str, Device], ...]
    capped: frozenset[int]

    def join(
        self, servers: Sequence[tuple[str, Sequence[NicPort]]], carrier: Transport
    ) -> tuple[list[Device], list[Link]]:
        """Return the devices and links that join wired servers, in the order of `plug_in`, names in the cluster first.

        UsageError if a port serves no GPU of the server.
        """
        devices: list[Device] = []
        links: list[Link] = []
        ends: dict[_Plug, NicPort] = {}
        for number, (name, wired) in enumerate(servers):
            if number in self.capped:
                sender, receiver = self._behind_a_cap(name, wired[0], devices, links)
                for cable, plug in self._plugs_of(number):
                    rate = carrier.rate(gigabytes_from_gigabits(cable.gbps)) * cable.count
                    port = f"{name}.{plug.port}"
                    devices.append(replace(self.ports[number][plug.port], name=port, server=name))
                    links.append(Link(sender, port, "network", rate, latency=0.0))
                    links.append(Link(port, receiver, "network", rate, latency=0.0))
                    ends[plug] = NicPort(0, port, port, rate, rate)
                continue
            order = list(self.ports[number])
            ends |= {_Plug(number, order[port.number]): port for port in wired}
        for cable, *plugs in self.cables:
            for plug in plugs:
                if plug not in ends:
                    raise UsageError(
                        f"cable {cable}: port {plug.port} of {servers[plug.server][0]} is near no GPU of the "
                        "allocation; add GPUs, leave the cable out, or use nic_access direct"
                    )
            rate = carrier.rate(gigabytes_from_gigabits(cable.gbps)) * cable.count
            one, other = (ends[plug] for plug in plugs)
            for src, dst in ((one, other), (other, one)):
                links.append(
                    Link(
                        src.sender,
                        dst.receiver,
                        "network",
                        min(rate, src.out, dst.back),
                        cable.count,
                        carrier.alpha,
                    )
                )
        return devices, links

    def _plugs_of(self, server: int) -> list[tuple[Cable, _Plug]]:
        return [(cable, plug) for cable, *plugs in self.cables for plug in plugs if plug.server == server]

    @staticmethod
    def _behind_a_cap(
        server: str, port: NicPort, devices: list[Device], links: list[Link]
    ) -> tuple[str, str]:
        """Return the devices behind the cap of a server that send and receive.

        A NIC of several GPUs has a link from each; one more link then carries the cap.
        """
        if port.sender == port.receiver:
            return port.sender, port.receiver
        sender, receiver = (f"{server}.total{side}" for side in SIDES)
        devices += [Device(name, "nic", server) for name in (sender, receiver)]
        links.append(Link(port.sender, sender, "network", port.out, latency=0.0))
        links.append(Link(receiver, port.receiver, "network", port.back, latency=0.0))
        return sender, receiver


def plug_in(
    servers: Sequence[Server], cables: Sequence[Cable], gbps_total: float | None = None
) -> tuple[list[Server], PluggedCables]:
    """Return the servers, each for itself, named and with the NICs of its cabled ports alone, and the plugged cables.

    ``gbps_total`` is the most Gb/s that a server sends, and that it receives, if it states no other; None for no cap.
    UsageError if a cable or port is unknown or named twice, a server has no cable, a cap is below one cable, or servers
    cannot reach each other.
    """
    check_type("cables", cables, Collection, remedy="give a list of Cable")
    for cable in cables:
        check_type("a cable", cable, Cable, remedy="write Cable('s0:p0', 's1:p0', 200)")
    count = sum(server.count for server in servers)
    if count > len(cables) + 1:
        raise UsageError(
            f"{count:,} servers need at least {count - 1:,} cables to be joined, got {len(cables):,}; add cables"
        )
    each: list[Server] = []
    for server in servers:
        if server.nics is not None or server.nic_gbps is not None:
            raise UsageError(
                "nics and nic_gbps do not go with cables, which state ports and rates; leave them out"
            )
        each += [
            replace(server, name=server.name or f"s{len(each) + copy}", count=1)
            for copy in range(server.count)
        ]
    number = {server.name: place for place, server in enumerate(each)}
    ports: list[dict[str, Device]] = [{} for _ in each]
    plugged: list[tuple[Cable, _Plug, _Plug]] = []
    known: dict[_Plug, tuple[Cable, _Plug]] = {}
    for cable in cables:
        plugs = []
        for end in (cable.start, cable.end):
            name, _, port = end.partition(":")
            if name not in number:
                raise UsageError(
                    f"cable {cable}: {name} is not a server of the cluster, which has "
                    f"{listed(list(number))}; correct it"
                )
            nic = _nic_of(each[number[name]].topology, name, port, cable)
            ports[number[name]][nic.name] = nic
            plugs.append(_Plug(number[name], nic.name))
        for plug, far in (plugs, plugs[::-1]):
            before, there = known.setdefault(plug, (cable, far))
            if before is cable:
                continue
            if there == far and before.gbps != cable.gbps:
                raise UsageError(
                    f"cable {cable} must have one rate, got {before.gbps:g} and {cable.gbps:g} Gb/s; leave one out"
                )
            if there == far:
                raise UsageError(
                    f"cable {cable} must be named once, got it twice; cables side by side have a count"
                )
            raise UsageError(
                f"port {each[plug.server].name}:{plug.port} must have one cable, got {before} and {cable}; correct one"
            )
        plugged.append((cable, plugs[0], plugs[1]))
    _check_reach(each, plugged)
    made: list[Server] = []
    capped: set[int] = set()
    for place, server in enumerate(each):
        own = [cable for cable, *plugs in plugged if place in {plug.server for plug in plugs}]
        total = gbps_total if server.gbps_total is None else server.gbps_total
        widest = max(cable.gbps * cable.count for cable in own)
        if total is not None:
            _check_gbps(f"gbps_total of {server.name}", total)
            least = max(cable.gbps for cable in own)
            if total < least:
                raise UsageError(
                    f"gbps_total of {server.name} must be at least {least:g} Gb/s, the rate of one of its cables, got "
                    f"{total:g}; correct one"
                )
            capped.add(place)
        machine, nics = _cabled_machine(server, list(ports[place].values()), total)
        # NICs are numbered in the order of the machine.
        order = machine_nics(server.topology)
        if order:
            ports[place] = {name: ports[place][name] for name in order if name in ports[place]}
        made.append(
            replace(
                server,
                machine=machine,
                nics=nics,
                nic_gbps=widest if total is None else total,
                gbps_total=None,
            )
        )
    return made, PluggedCables(tuple(plugged), tuple(ports), frozenset(capped))


def _nic_of(machine: Topology, server: str, port: str, cable: Cable) -> Device:
    """Return the NIC of a port; a new one if the machine lists none."""
    nics = [device for device in machine.devices if device.kind == "nic"]
    for nic in nics:
        if port in (nic.name, nic.fact("adapter"), *nic.fact("functions").split(",")):
            stated = nic.fact("gigabits")
            if stated and cable.gbps * cable.count > float(stated):
                raise UsageError(
                    f"cable {cable} must have at most the {stated} Gb/s of port {server}:{port}, got "
                    f"{cable.gbps * cable.count:g}; correct one"
                )
            return nic
    if nics:
        names = listed([nic.fact("functions").replace(",", ", ") or nic.name for nic in nics])
        raise UsageError(
            f"cable {cable}: {port} is not a port of {server}, whose {machine.name} has "
            f"{listed([nic.name for nic in nics])} ({names}); correct it"
        )
    if port == ADAPTER or any(device.name == port for device in machine.devices):
        raise UsageError(
            f"cable {cable}: {port} is the name of another device of {server}; give the port another name"
        )
    return Device(port, "nic", "".join(machine.servers))


def _cabled_machine(server: Server, ports: Sequence[Device], total: float | None) -> tuple[Topology, int]:
    """Return the machine of a server and its NICs: of these ports alone, or `ADAPTER` for all of them."""
    machine = server.topology
    known = set(machine_nics(machine))
    named = {port.name for port in ports}
    if total is None:
        made = without_named(machine, known - named)
        new = tuple(port for port in ports if port.name not in known)
        return replace(made, devices=(*made.devices, *new)), len(ports)
    near = {
        port: frozenset(link.dst for link in machine.links if link.src == port)
        for port in sorted(named & known)
    }
    if len(set(near.values())) > 1:
        raise UsageError(
            f"gbps_total of {server.name} must cap the ports of one adapter, got {listed(list(near))}, which are at "
            "different places on PCIe; leave it out, PCIe caps each"
        )
    plug = gigabytes_from_gigabits(total)
    links: dict[tuple[str, str, str], float] = {}
    for link in machine.links:
        if {link.src, link.dst} & named:
            src, dst = (ADAPTER if end in named else end for end in (link.src, link.dst))
            key = (src, dst, link.channel)
            links[key] = min(plug, links.get(key, 0.0) + link.bandwidth)
    made = without_named(machine, known)
    devices = (*made.devices, Device(ADAPTER, "nic", "".join(machine.servers)))
    added = (Link(*key, bandwidth) for key, bandwidth in links.items())
    return replace(made, devices=devices, links=(*made.links, *added)), 1


def _check_reach(servers: Sequence[Server], cables: Sequence[tuple[Cable, _Plug, _Plug]]) -> None:
    """Raise UsageError for servers that no chain of cables joins."""
    beside: dict[int, list[int]] = {}
    for _, one, other in cables:
        beside.setdefault(one.server, []).append(other.server)
        beside.setdefault(other.server, []).append(one.server)
    reached = [0]
    for server in reached:
        reached += [other for other in dict.fromkeys(beside.get(server, ())) if other not in reached]
    apart = [server.name for place, server in enumerate(servers) if place not in reached]
    if apart:
        raise UsageError(
            f"{servers[0].name} and {apart[0]} cannot reach each other: no chain of cables joins {listed(apart)} to "
            f"{servers[0].name}; add a cable, or leave servers out"
        )
