"""How the NICs of one server are wired to its GPUs, and how fast.

A machine with NVLink: between its GPUs a plan uses NVLink only, yet what goes to the network crosses PCIe. So each
NIC is joined by ``network`` links straight to the GPUs that it serves (see `topoplan.clusters.nic_places`); other
GPUs relay over NVLink. Such a link is as fast as the PCIe path between the two and the NIC allow, the NIC's wire as
the NIC and its PCIe slot. A PCIe link on the way of several NICs counts for each with an even part, so that nothing
is promised twice. A distant NIC that takes more from nearer ones so than it brings, such as one for storage on another
CPU, serves nobody. The plugs of the NICs are left out, since the network links stand for them; the other PCIe links
stay for plans inside the server. Running such a plan and network traffic at the same time is not modelled.

A NIC of several GPUs becomes two devices, ``nic0.tx`` that sends and ``nic0.rx`` that receives: through one device
the GPUs could talk to each other, and its PCIe slot would count twice.

A machine without NVLink keeps its PCIe tree with the NICs in it: plans run over PCIe and the network together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

from topoplan.clusters.nic_places import HOST_CHANNELS, NicPlace, Path, machine_nics, nic_places
from topoplan.degraded import SIDES
from topoplan.errors import UsageError
from topoplan.topology import Device, Link, Topology
from topoplan.units import exact, nearest_float

NIC_ACCESS = ("pcie", "direct")
"""How GPUs reach NICs: over the PCIe tree, or all GPUs of a server at the NIC's rate."""


@dataclass(frozen=True, slots=True)
class Port:
    """The network side of a NIC.

    Parameters
    ----------
    number : int
        The NIC's number in its server: NIC i hangs on rail i.
    sender, receiver : str
        Devices, the same one where a single GPU uses the NIC.
    out, back : float
        GB/s into the network and from it.
    """

    number: int
    sender: str
    receiver: str
    out: float
    back: float


@dataclass(frozen=True, slots=True)
class WiredServer:
    """A server without the network: devices, links, number of NICs, ports of those that serve, and notes."""

    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    nics: int
    ports: tuple[Port, ...]
    notes: tuple[str, ...]


def wire_server(
    machine: Topology,
    gpus: Sequence[int] | None,
    *,
    nics: int | None,
    rate: float,
    access: str,
    served: Sequence[int] | None = None,
) -> WiredServer:
    """Wire the NICs of a server to its GPUs.

    Parameters
    ----------
    machine : Topology
        One server.
    gpus : sequence of int or None
        The GPUs that are there.
    nics : int or None
        As `topoplan.clusters.nic_places.nic_places`.
    rate : float
        GB/s of a NIC in each direction.
    access : str
        One of `NIC_ACCESS`. ``direct`` is the projection of Blink, figure 19b: the port of the NIC is all that limits.
    served : sequence of int or None
        The GPUs for which NICs are chosen; None takes those that are there.

    Examples
    --------
    Each NIC of a DGX-1V serves two GPUs over PCIe of generation 3:

    >>> import topoplan
    >>> wired = wire_server(topoplan.load("dgx-1v"), None, nics=None, rate=50.0, access="pcie")
    >>> wired.ports[0]
    Port(number=0, sender='nic0.tx', receiver='nic0.rx', out=12.0, back=12.0)
    >>> [(link.src, link.bandwidth) for link in wired.links if link.dst == "nic0.tx"]
    [('gpu0', 12.0), ('gpu1', 12.0)]
    """
    if access not in NIC_ACCESS:
        raise UsageError(f"nic_access {access!r} is unknown; use one of {', '.join(NIC_ACCESS)}")
    part = machine.subset(gpus)
    there = set(part.gpus)
    tree_carries = access == "pcie" and not any(link.channel == "nvlink" for link in machine.links)
    idle: frozenset[str] = frozenset()
    if access == "direct":
        everywhere = dict.fromkeys(machine.gpus, ())
        places = tuple(replace(place, paths=everywhere) for place in nic_places(machine, None, nics))
    else:
        idle = frozenset() if tree_carries else _idle(machine, rate)
        places = nic_places(machine, gpus if served is None else served, nics, idle=idle)
    plugged = {place.name for place in places if tree_carries and any(place.paths.values())}
    speed = _shared_speeds(machine, places)
    sides = {place.name: _sides(place, place.name in plugged) for place in places}
    wires: list[Link] = []
    ports: list[Port] = []
    for place in places:
        sender, receiver = sides[place.name][0], sides[place.name][-1]
        if place.name in plugged:
            ports.append(Port(place.number, sender, receiver, rate, rate))
            continue
        for gpu, path in place.paths.items():
            if gpu not in there:
                continue
            wires.append(Link(gpu, sender, "network", _slowest(rate, path[::-1], speed)))
            wires.append(Link(receiver, gpu, "network", _slowest(rate, path, speed)))
        common = _common_start(list(place.paths.values()))
        out, back = _slowest(rate, common[::-1], speed), _slowest(rate, common, speed)
        ports.append(Port(place.number, sender, receiver, out, back))
    unplugged = set(machine_nics(machine)) - plugged
    kept = tuple(link for link in part.links if not {link.src, link.dst} & unplugged)
    devices = _devices(part, sides)
    wanted = nics or len(machine_nics(machine)) or 1
    return WiredServer(
        devices, (*kept, *wires), wanted, tuple(ports), _notes(machine, nics, ports, rate, idle)
    )


def _idle(machine: Topology, rate: float) -> frozenset[str]:
    """NICs all of whose GPUs have a nearer one, if all NICs together carry no more with them than without them."""
    places = nic_places(machine, None, None)
    nearest: dict[str, int] = {}
    for place in places:
        for gpu, path in place.paths.items():
            nearest[gpu] = min(len(path), nearest.get(gpu, len(path)))
    near = [place for place in places if any(len(path) == nearest[gpu] for gpu, path in place.paths.items())]
    if _carried(machine, near, rate) < _carried(machine, places, rate):
        return frozenset()
    return frozenset(place.name for place in places if place not in near)


def _carried(machine: Topology, places: Sequence[NicPlace], rate: float) -> Fraction:
    """GB/s that leave the server's GPUs through these NICs."""
    speed = _shared_speeds(machine, places)
    total = Fraction(0)
    for place in places:
        paths = [path[::-1] for path in place.paths.values()]
        port = _slowest(rate, _common_start(list(place.paths.values()))[::-1], speed)
        total += min(exact(port), sum((exact(_slowest(rate, path, speed)) for path in paths), Fraction(0)))
    return total


def _sides(place: NicPlace, plugged: bool) -> tuple[str, ...]:
    if plugged or len(place.paths) == 1:
        return (place.name,)
    return place.name + SIDES[0], place.name + SIDES[1]


def _devices(part: Topology, sides: Mapping[str, tuple[str, ...]]) -> tuple[Device, ...]:
    """The server's devices, its NICs as they are wired; NICs that it does not list come last."""
    found = [
        replace(device, name=name)
        for device in part.devices
        for name in (sides.get(device.name, ()) if device.kind == "nic" else (device.name,))
    ]
    listed = set(machine_nics(part))
    found += [Device(name, "nic") for nic, names in sides.items() if nic not in listed for name in names]
    return tuple(found)


def _shared_speeds(machine: Topology, places: Iterable[NicPlace]) -> dict[tuple[str, str], Fraction]:
    """GB/s that a NIC has of each directed PCIe link on its way: an even part where several NICs cross it."""
    users: Counter[tuple[str, str]] = Counter()
    for place in places:
        hops = {hop for path in place.paths.values() for hop in pairwise(path)}
        users.update(hops | {(b, a) for a, b in hops})
    widest: dict[tuple[str, str], Fraction] = {}
    for link in machine.links:
        ends = (link.src, link.dst)
        if link.channel in HOST_CHANNELS and ends in users:
            widest[ends] = max(widest.get(ends, Fraction(0)), exact(link.bandwidth))
    return {ends: bandwidth / users[ends] for ends, bandwidth in widest.items()}


def _slowest(rate: float, path: Path, speed: Mapping[tuple[str, str], Fraction]) -> float:
    """GB/s along a path, at most the NIC's rate."""
    return nearest_float(min([exact(rate), *(speed[hop] for hop in pairwise(path))]))


def _common_start(paths: Sequence[Path]) -> Path:
    """The way that all paths from a NIC have in common."""
    length = 0
    while all(len(path) > length for path in paths) and len({path[length] for path in paths}) == 1:
        length += 1
    return paths[0][:length]


def _notes(
    machine: Topology, nics: int | None, ports: Sequence[Port], rate: float, idle: Collection[str]
) -> tuple[str, ...]:
    notes = []
    if idle:
        names = ", ".join(nic for nic in machine_nics(machine) if nic in idle)
        notes.append(f"left out, since nearer NICs fill the PCIe links of the GPUs: {names}")
    if nics is None and not machine_nics(machine):
        notes.append(
            f"{machine.name} lists no NIC: one is assumed, within reach of all GPUs; set the number of NICs (--nics)"
        )
    limit = min(min(port.out, port.back) for port in ports)
    if limit < rate:
        notes.append(
            f"NICs of {rate * 8:g} Gb/s sit in PCIe slots of {limit:g} GB/s, which is what they carry; "
            "NIC access direct (--nic-access) leaves PCIe out"
        )
    if any(port.sender != port.receiver for port in ports):
        notes.append(
            f"a NIC of several GPUs is two devices, {SIDES[0]} that sends and {SIDES[1]} that receives"
        )
    return tuple(notes)
