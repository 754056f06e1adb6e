"""Wire the NICs of one server to its GPUs: choose NICs, assign GPUs to them, and rate the paths.

A server whose GPUs are joined by NVLink: its plans use NVLink between GPUs, and traffic to the network crosses PCIe. So
``network`` links join each NIC directly to the GPUs that it serves; the other GPUs relay over NVLink. Such a link is as
fast as the PCIe path and the NIC allow, the NIC's wire as the NIC and its PCIe slot. A PCIe link on the path of several
NICs counts for each with an even part. The plugs of the NICs are left out; the other PCIe links stay for plans inside
the server. Not modelled: such a plan and network traffic at the same time. A NIC of several GPUs becomes two devices,
``nic0.tx`` that sends and ``nic0.rx`` that receives: through one device the GPUs could exchange data, and its PCIe slot
would count twice. Other servers keep their PCIe tree with the NICs in it; a NIC without a place is at the CPUs above
its GPUs.

A NIC serves the nearest GPUs in the PCIe tree: fewest hops, never through another GPU. NICs with the same nearest GPUs
share them in order. NICs without a place on PCIe are spread evenly. The places are those of the whole machine, for any
allocation. A NIC whose GPUs are all outside the allocation serves none; if that leaves no NIC, the nearest to the
allocation serves it.

NCCL searches with NICs at the nearest kind of path first (below one PCIe switch, below several, on the GPU's CPU, on
another one) and stops at the first kind that works (``ncclTopoCompute``, ``src/graph/search.cc``). So a NIC that is
farther from each of its GPUs than another NIC is not used, unless a user names it as for ``NCCL_IB_HCA``. Nor is a NIC
on a CPU if every GPU can send through a GPU below the PCIe switch of another NIC, over NVLink (PXN).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise

from topoplan.errors import Note, UsageError
from topoplan.machine.fabric import joined_gpus
from topoplan.machine.hardware import gpu_identity
from topoplan.machine.routing import fewest_steps
from topoplan.machine.topology import Device, Link, Topology, without_named
from topoplan.machine.variants import SIDES
from topoplan.units import exact, listed, nearest_float

NICS_FORM = "names such as mlx5_0,mlx5_1, ^NAME to leave NICs out, =NAME for one exact name, or a number"
"""Syntax of a choice of NICs."""

FASTEST_NIC = 200.0
"""GB/s of the fastest NIC of 2026, of 1600 Gb/s."""

_NAME = r"[A-Za-z0-9_.-]{1,80}(?::[0-9]{1,3})?"
_CHOICE = re.compile(rf"(\^?)(=?)({_NAME}(?:,{_NAME})*)")


def path_kind(machine: Topology, path: Sequence[str]) -> int:
    """Return the distance of a NIC and a GPU: 0 for PIX, 1 for PXB, 2 for PHB and NODE (one to NCCL), 3 for SYS.

    An empty path, which means unknown, is 0.
    """
    kinds = [machine.device(name).kind for name in path[1:-1]]
    if "cpu" in kinds:
        return 2 if kinds.count("cpu") == 1 else 3
    return 0 if kinds.count("pcie") <= 1 else 1


def nic_machine(machine: Topology, choice: str) -> Topology:
    """Return a machine with the NICs of a choice alone, under their names.

    A name is a device's (``nic0``, in any case) or begins an adapter's, as in ``NCCL_IB_HCA``: ``mlx5_1`` takes
    mlx5_1 and mlx5_10, ``=mlx5_1`` the first alone, ``^mlx5_1`` all others. Port 1 may stand behind the name, as in
    ``mlx5_1:1``; a machine does not describe other ports. UsageError for another syntax or port, unknown names, a NIC
    named twice, or a choice that leaves no NIC.
    """
    match = _CHOICE.fullmatch(choice)
    if match is None:
        both = "; ^ and = stand once, before the first name" if re.search("[^^=][\\^=]", choice) else ""
        raise UsageError(f"nics {choice[:60]!r} must be {NICS_FORM}{both}")
    every = [device for device in machine.devices if device.kind == "nic"]
    if not every:
        raise UsageError(f"nics {choice[:60]!r}: {machine.name} lists no NIC; give a number of NICs")
    words = {
        word: [nic for nic in every if _is_named(nic, word.split(":")[0], exact=bool(match[2]))]
        for word in match[3].split(",")
    }
    unknown = [word.split(":")[0] for word, found in words.items() if not found]
    if unknown:
        names = ", ".join(_nic_label(nic) for nic in every)
        legend = "" if any(nic.fact("adapter") for nic in every) else "; it has no adapter names (NIC Legend)"
        verb = "is not a NIC" if len(unknown) == 1 else "are not NICs"
        raise UsageError(f"nics: {listed(unknown)} {verb} of {machine.name}, which has {names[:300]}{legend}")
    for word in words:
        if word.partition(":")[2] not in ("", "1"):
            raise UsageError(
                f"nics: the port of {word} must be 1, the only one that {machine.name} describes; leave it out"
            )
    named: set[str] = set()
    notes: list[str] = []
    before: dict[str, str] = {}
    for word in match[3].split(","):
        name, found = word.split(":")[0], words[word]
        for nic in (nic for nic in found if _is_named(nic, name, exact=True)):
            if nic.name in before:
                raise UsageError(
                    f"nics must name a NIC once, got {before[nic.name]} and {word} for {_nic_label(nic)}; leave one out"
                )
            before[nic.name] = word
        named |= {nic.name for nic in found}
        longer = [_nic_label(nic) for nic in found if name not in (nic.name, nic.fact("adapter"))]
        if longer and len(longer) < len(found):
            notes.append(
                f"{name} names {', '.join(longer)[:200]} too, as in NCCL_IB_HCA; ={name} names one alone"
            )
    kept = {nic.name for nic in every if (nic.name in named) != bool(match[1])}
    if not kept:
        raise UsageError(f"nics {choice[:60]!r} leaves no NIC of {machine.name}; name fewer behind ^")
    if len(kept) < len(every):
        used, rest = (
            [_nic_label(nic) for nic in every if (nic.name in kept) == is_kept] for is_kept in (True, False)
        )
        notes.append(
            Note(f"NICs used: {', '.join(used)}, as chosen by name; left out: {', '.join(rest)}", "nics")
        )
    return without_named(machine, {nic.name for nic in every} - kept, *notes)


def _is_named(nic: Device, name: str, *, exact: bool) -> bool:
    adapter = nic.fact("adapter")
    if name.lower() == nic.name.lower() or name == adapter:
        return True
    return not exact and bool(adapter) and adapter.startswith(name)


def _nic_label(nic: Device) -> str:
    """Return a NIC's name for a message: that of the adapter if known."""
    return nic.fact("adapter") or nic.name


NIC_ACCESS = ("pcie", "direct")
"""Access of GPUs to NICs: over the PCIe tree, or all GPUs of a server at the NIC's rate."""


@dataclass(frozen=True, slots=True)
class NicPort:
    """The network side of a NIC; NIC number i is on rail i.

    ``sender`` and ``receiver`` are one device if a single GPU uses the NIC. ``out`` and ``back`` are GB/s into the
    network and from it, 0 without a link. ``built``, after a fault, are the two rates before it: uplinks of switches
    are as fast as they ask for.
    """

    number: int
    sender: str
    receiver: str
    out: float
    back: float
    built: tuple[float, float] | None = None

    def after(self, out: float, back: float) -> NicPort:
        """Return the port after faults have lowered its rates."""
        if (out, back) == (self.out, self.back):
            return self
        return replace(self, out=out, back=back, built=self.built or (self.out, self.back))


@dataclass(frozen=True, slots=True)
class WiredServer:
    """A server without the network: devices, links, number of NICs, ports of the serving ones, and notes."""

    devices: tuple[Device, ...] = field(repr=False)
    links: tuple[Link, ...] = field(repr=False)
    nics: int
    ports: tuple[NicPort, ...] = field(repr=False)
    notes: tuple[str, ...]

    def with_gpus(self, gpus: Sequence[int]) -> WiredServer:
        """Return the server with some of its GPUs, by number; one without any has no device and no link."""
        if not gpus:
            return replace(
                self, devices=(), links=(), ports=tuple(port.after(0.0, 0.0) for port in self.ports)
            )
        every = [device.name for device in self.devices if device.kind == "gpu"]
        gone = {*every} - {every[gpu] for gpu in gpus}
        return replace(
            self,
            devices=tuple(device for device in self.devices if device.name not in gone),
            links=tuple(link for link in self.links if link.src not in gone and link.dst not in gone),
        )

    def named(self, server: str) -> tuple[list[Device], list[Link], list[NicPort]]:
        """Return devices, links and ports of a server of this name in a cluster; all names begin with the server's."""
        return (
            [replace(device, name=f"{server}.{device.name}", server=server) for device in self.devices],
            [replace(link, src=f"{server}.{link.src}", dst=f"{server}.{link.dst}") for link in self.links],
            [
                replace(port, sender=f"{server}.{port.sender}", receiver=f"{server}.{port.receiver}")
                for port in self.ports
            ],
        )


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

    ``gpus`` are present, ``served`` those for which NICs are chosen; None means all present ones. ``nics`` is as for
    `nic_places`; ``rate`` is that of a NIC in GB/s per direction. ``access`` is one of `NIC_ACCESS`: ``direct`` is the
    projection of Blink, figure 19b, in which only the port of the NIC limits.
    """
    if access not in NIC_ACCESS:
        raise UsageError(f"nic_access {access!r} is unknown; use one of {', '.join(NIC_ACCESS)}")
    part = machine.subset(gpus)
    there = set(part.gpus)
    has_nvlink = any(link.channel == "nvlink" for link in machine.links)
    tree_carries = access == "pcie" and not (has_nvlink and len(joined_gpus(part, ("nvlink",))) < 2)
    idle: tuple[str, ...] = ()
    if access == "direct":
        everywhere = dict.fromkeys(machine.gpus, ())
        places = tuple(replace(place, paths=everywhere) for place in nic_places(machine, None, nics))
    else:
        idle = far_nics(machine)
        places = nic_places(machine, gpus if served is None else served, nics, idle=idle)
    plugged = {place.name for place in places if tree_carries and any(place.paths.values())}
    speed = _shared_speeds(machine, places)
    sockets = {
        place.name: _sockets(part, place) if tree_carries and place.name not in plugged else ()
        for place in places
    }
    sides = {place.name: _sides(place, place.name in plugged) for place in places}
    wires: list[Link] = []
    ports: list[NicPort] = []
    for place in places:
        sender, receiver = sides[place.name][0], sides[place.name][-1]
        if place.name in plugged:
            ports.append(NicPort(place.number, sender, receiver, rate, rate))
            continue
        if sockets[place.name]:
            wires += [Link(cpu, sender, "pcie", rate) for cpu in sockets[place.name]]
            wires += [Link(receiver, cpu, "pcie", rate) for cpu in sockets[place.name]]
            ports.append(NicPort(place.number, sender, receiver, rate, rate))
            continue
        for gpu, path in place.paths.items():
            if gpu not in there:
                continue
            wires.append(Link(gpu, sender, "network", _slowest(rate, path[::-1], speed)))
            wires.append(Link(receiver, gpu, "network", _slowest(rate, path, speed)))
        common = _common_start(list(place.paths.values()))
        out, back = _slowest(rate, common[::-1], speed), _slowest(rate, common, speed)
        ports.append(NicPort(place.number, sender, receiver, out, back))
    unplugged = set(machine_nics(machine)) - plugged
    kept = tuple(link for link in part.links if not {link.src, link.dst} & unplugged)
    devices = _devices(part, sides)
    wanted = nics or len(machine_nics(machine)) or 1
    return WiredServer(
        devices, (*kept, *wires), wanted, tuple(ports), _notes(machine, nics, ports, rate, places, idle)
    )


def _sockets(part: Topology, place: NicPlace) -> tuple[str, ...]:
    """Return the CPUs above the GPUs of a NIC without a place, of a server whose PCIe tree carries its traffic.

    Links between these GPUs and the NIC would leave the PCIe tree out of a plan, or count the GPUs' slots twice.
    """
    above: dict[str, list[str]] = {}
    for link in part.links:
        if link.channel == "pcie":
            above.setdefault(link.src, []).append(link.dst)
    cpus = {device.name for device in part.devices if device.kind == "cpu"}
    found: dict[str, None] = {}
    for gpu in place.paths:
        steps = fewest_steps(
            [gpu],
            lambda name: () if name in cpus else [top for top in above.get(name, ()) if top not in part.gpus],
        )
        distances = {name: steps[name] for name in steps if name in cpus}
        if not distances and gpu in part.gpus:
            return ()
        nearest = min(distances.values(), default=0)
        found.update(dict.fromkeys(name for name, distance in distances.items() if distance == nearest))
    return tuple(found)


def far_nics(machine: Topology) -> tuple[str, ...]:
    """Return the NICs that NCCL would not take.

    Another NIC is nearer, by kind of path, to each of their GPUs; or they are on a CPU, and every GPU reaches one below
    a PCIe switch, itself or over NVLink through a GPU near that NIC.
    """
    nearest: dict[str, int] = {}
    kinds: dict[str, dict[str, int]] = {}
    for nic, paths in _nearest(machine, machine_nics(machine), machine.gpus).items():
        kinds[nic] = {gpu: path_kind(machine, path) for gpu, path in paths.items()}
        for gpu, kind in kinds[nic].items():
            nearest[gpu] = min(kind, nearest.get(gpu, kind))
    doors = {gpu for near in kinds.values() for gpu, kind in near.items() if kind <= _SWITCHES}
    beside = nvlink_neighbours(machine.links, machine.gpus)
    relayed = all(gpu in doors or doors & beside[gpu] for gpu in machine.gpus) and all(
        gpu_identity(device, amd=False).capability >= _AMPERE
        for device in machine.devices
        if device.kind == "gpu"
    )
    return tuple(
        nic
        for nic, near in kinds.items()
        if near
        and (
            all(kind > nearest[gpu] for gpu, kind in near.items())
            or (relayed and min(near.values()) > _SWITCHES)
        )
    )


_AMPERE = 80
"""Compute capability below which NCCL takes NICs on a CPU beside nearer ones that fill their PCIe slot."""

_SWITCHES = 1
"""`path_kind` of a NIC that PCIe switches alone join to a GPU, PXB: through such a GPU others send (PXN)."""


def nvlink_neighbours(links: Iterable[Link], gpus: Iterable[str]) -> dict[str, set[str]]:
    """Return the GPUs that NVLinks join to each GPU, directly or through one switch."""
    out: dict[str, set[str]] = {}
    for link in links:
        if link.channel == "nvlink":
            out.setdefault(link.src, set()).add(link.dst)
    gpus = set(gpus)
    return {
        gpu: {
            end
            for near in out.get(gpu, ())
            for end in (near, *out.get(near, ()))
            if near not in gpus or end == near
        }
        for gpu in gpus
    }


def _sides(place: NicPlace, plugged: bool) -> tuple[str, ...]:
    if plugged or len(place.paths) == 1:
        return (place.name,)
    return place.name + SIDES[0], place.name + SIDES[1]


def _devices(part: Topology, sides: Mapping[str, tuple[str, ...]]) -> tuple[Device, ...]:
    """Return the server's devices with the NICs as wired; unlisted NICs come last."""
    found = [
        replace(device, name=name)
        for device in part.devices
        for name in (sides.get(device.name, ()) if device.kind == "nic" else (device.name,))
    ]
    listed = set(machine_nics(part))
    found += [Device(name, "nic") for nic, names in sides.items() if nic not in listed for name in names]
    return tuple(found)


def _shared_speeds(machine: Topology, places: Iterable[NicPlace]) -> dict[tuple[str, str], Fraction]:
    """Return a NIC's GB/s of each directed PCIe link on its path: an even part if several NICs cross it."""
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
    """Return the GB/s along a path, at most the NIC's rate."""
    return nearest_float(min([exact(rate), *(speed[hop] for hop in pairwise(path))]))


def _common_start(paths: Sequence[Path]) -> Path:
    """Return the common beginning of all paths from a NIC."""
    length = 0
    while all(len(path) > length for path in paths) and len({path[length] for path in paths}) == 1:
        length += 1
    return paths[0][:length]


def _notes(
    machine: Topology,
    nics: int | None,
    ports: Sequence[NicPort],
    rate: float,
    places: Sequence[NicPlace],
    idle: Collection[str],
) -> tuple[str, ...]:
    notes: list[str] = []
    out = [nic for nic in idle if nic not in {place.name for place in places}]
    if out:
        used = ", ".join(_with_adapter(machine, place.name) for place in places)
        names = ", ".join(_with_adapter(machine, nic) for nic in out)
        notes.append(
            Note(
                f"NICs used: {used}; left out, since every GPU has a nearer NIC and NCCL takes that: {names}; --nics "
                "chooses NICs by name or number",
                "nics",
            )
        )
    if nics is None and not machine_nics(machine):
        notes.append(
            f"{machine.name} lists no NIC: one is assumed, within reach of all GPUs; set the number of NICs (--nics)"
        )
    if rate > FASTEST_NIC:
        notes.append(
            f"NICs of {rate * 8:g} Gb/s are faster than any that is sold; state {rate:g}Gb/s for the rate that its "
            "maker names"
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


HOST_CHANNELS = ("pcie", "sys", "c2c")

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NicPlace:
    """A NIC with its number in the server, and the GPUs that it serves, allocated or not.

    ``paths`` have the devices from the NIC to each GPU; an empty path means unknown.
    """

    number: int
    name: str
    paths: Mapping[str, Path] = field(default_factory=dict)


def nic_places(
    machine: Topology, gpus: Sequence[int] | None, nics: int | None, *, idle: Collection[str] = ()
) -> tuple[NicPlace, ...]:
    """Return the NICs of a server that serve an allocation.

    ``nics`` takes at most so many of the machine's NICs, the nearest to the allocation first; if it has fewer, NICs
    without a place are added, which serve GPUs without a NIC before others. None keeps the machine's NICs, or adds one
    if it has none. ``idle`` NICs serve only if ``nics`` exceeds the number of the others.
    """
    own = machine_nics(machine)
    every = machine.gpus
    chosen = {every[gpu] for gpu in machine.select(gpus)}
    wanted = nics or len(own) or 1
    near = _nearest(machine, own, every)
    # A stable sort: first the NICs near the allocation, or without a place and so as near as any.
    useful = [nic for nic in own if nic not in idle]
    order = sorted(useful, key=lambda nic: bool(near[nic]) and not chosen & set(near[nic]))
    order += [nic for nic in own if nic in idle] if nics else []
    kept = [NicPlace(number, nic) for number, nic in enumerate(own) if nic in order[:wanted]]
    names = [name for number in range(wanted + len(own)) if (name := f"nic{number}") not in set(own)]
    added = [NicPlace(len(own) + i, names[i]) for i in range(wanted - len(own))]
    placed = [
        replace(place, paths={gpu: near[place.name][gpu] for gpu in share})
        for place, share in _shared_out([place for place in kept if near[place.name]], near)
    ]
    loose = [place for place in kept if not near[place.name]] + added
    serving = [place for place in placed if chosen & set(place.paths)]
    if not serving and not loose:
        serving = _nearest_to_allocation(machine, placed, chosen)
    bare = [gpu for gpu in every if gpu in chosen and not any(gpu in place.paths for place in serving)]
    found = serving + _spread(loose, bare or [gpu for gpu in every if gpu in chosen])
    return tuple(sorted(found, key=lambda place: place.number))


def _with_adapter(machine: Topology, nic: str) -> str:
    adapter = machine.device(nic).fact("adapter") if nic in machine_nics(machine) else ""
    return f"{nic} ({adapter})" if adapter and adapter != nic else nic


def machine_nics(machine: Topology) -> tuple[str, ...]:
    """Return the names of the NICs that a machine lists, in its order."""
    return tuple(device.name for device in machine.devices if device.kind == "nic")


def _nearest(machine: Topology, nics: Sequence[str], among: Collection[str]) -> dict[str, dict[str, Path]]:
    """Return for each NIC the nearest GPUs in hops over links that run both ways, with the paths."""
    wires = {(link.src, link.dst) for link in machine.links if link.channel in HOST_CHANNELS}
    neighbours: dict[str, list[str]] = {}
    for src, dst in dict.fromkeys((link.src, link.dst) for link in machine.links):
        if (src, dst) in wires and (dst, src) in wires:
            neighbours.setdefault(src, []).append(dst)
    near: dict[str, dict[str, Path]] = {}
    for nic in nics:
        level: dict[str, Path] = {nic: (nic,)}
        seen = {nic}
        while level and not set(level) & set(among):
            following = {}
            for device, path in level.items():
                if device == nic or machine.device(device).kind != "nic":
                    for other in neighbours.get(device, ()):
                        if other not in seen:
                            seen.add(other)
                            following[other] = (*path, other)
            level = following
        near[nic] = {gpu: level[gpu] for gpu in among if gpu in level}
    return near


def _shared_out(
    places: Sequence[NicPlace], near: Mapping[str, Mapping[str, Path]]
) -> list[tuple[NicPlace, tuple[str, ...]]]:
    """Return each NIC with its part of the GPUs that are nearest to it and others."""
    groups: dict[tuple[str, ...], list[NicPlace]] = {}
    for place in places:
        groups.setdefault(tuple(near[place.name]), []).append(place)
    return [
        pair for gpus, group in groups.items() for pair in zip(group, _parts(gpus, len(group)), strict=True)
    ]


def _nearest_to_allocation(
    machine: Topology, places: Sequence[NicPlace], chosen: Collection[str]
) -> list[NicPlace]:
    """Return one NIC with its paths to the allocation, if necessary through GPUs outside it (a NIC may be on a GPU).

    More NICs would share one path between the sockets.
    """
    among = [gpu for gpu in machine.gpus if gpu in chosen]
    near = _nearest(machine, [place.name for place in places], among)
    within_reach = [place for place in places if near[place.name]]
    if not within_reach:
        return _spread(places[:1], among)
    best = min(within_reach, key=lambda place: len(next(iter(near[place.name].values()))))
    return [replace(best, paths=near[best.name])]


def _spread(places: Sequence[NicPlace], gpus: Sequence[str]) -> list[NicPlace]:
    """Return the NICs without a place, spread evenly over some GPUs."""
    if not places:
        return []
    return [
        replace(place, paths=dict.fromkeys(part, ()))
        for place, part in zip(places, _parts(gpus, len(places)), strict=True)
    ]


def _parts(gpus: Sequence[str], number: int) -> list[tuple[str, ...]]:
    """Return the GPUs divided among NICs, in order; a GPU has several NICs if there are more NICs than GPUs."""
    if number > len(gpus):
        return [(gpus[i * len(gpus) // number],) for i in range(number)]
    ends = [i * len(gpus) // number for i in range(number + 1)]
    return [tuple(gpus[a:b]) for a, b in pairwise(ends)]
