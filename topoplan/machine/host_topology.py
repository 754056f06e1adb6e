"""Describe one server by its PCIe tree, NVLinks and NICs, and convert the description to its Topology.

The probe and the reader of NCCL's topology files make the description, in GB/s per direction. PCI bus IDs identify
devices, written as the kernel writes them (``0000:06:00.0``, see `bus_id`).

The PCIe tree keeps GPUs, NICs and the switches that they share. A port or bridge above a single device is a part of its
link, as fast as the slower; a port above several functions of one card stays, since they share its link. Two levels of
one Broadcom switch chip, which appears as a cascade but has full bandwidth between all ports, become one switch (NCCL,
``ncclTopoFlattenBcmSwitches``). A PCIe wire or a link between CPUs is full-duplex: two links of equal bandwidth.
Each GPU lists the far ends of its NVLinks, so a link between two GPUs is listed once for each direction. All NVSwitch
chips are one switch, since hardware stripes every transfer over them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace

from topoplan.errors import TopologyError
from topoplan.machine.hardware import nvswitch_capable
from topoplan.machine.topology import Device, Link, Topology, facts
from topoplan.units import counted, summed

PCI_KINDS = ("bridge", "port", "gpu", "nic", "nvswitch", "other")

NVLINK_ENDS = ("gpu", "nvswitch", "cpu", "unknown")

_BUS_ID = re.compile(r"([0-9a-f]{1,8}):([0-9a-f]{1,2}):([01]?[0-9a-f])(?:\.([0-7]))?")


def bus_id(text: str) -> str:
    """Return a PCI bus ID as the kernel writes it; drivers print longer domains and capitals.

    TopologyError if the text is not a bus ID.
    """
    match = _BUS_ID.fullmatch(text.strip().lower())
    if not match:
        raise TopologyError(f"{text[:40]!r} is not a PCI bus id such as 0000:06:00.0")
    domain, bus, device, function = match.groups()
    return f"{int(domain, 16):04x}:{int(bus, 16):02x}:{int(device, 16):02x}.{function or 0}"


def plain_bus_id(text: str) -> str:
    """Return a PCI bus ID as `bus_id`, and any other text unchanged."""
    try:
        return bus_id(text)
    except TopologyError:
        return text


def bus_id_order(busid: str) -> tuple[int, ...]:
    """Return the sort key of a bus ID, by numbers of domain, bus, device and function, as drivers count devices."""
    return tuple(int(part, 16) for part in re.split("[:.]", busid))


def number_spans(numbers: Iterable[int], separator: str = ",") -> str:
    """Return ascending numbers as the kernel lists CPUs, ``0-19,40``: also two in a row are a span."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return separator.join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


@dataclass(frozen=True, slots=True)
class HostCpu:
    """A NUMA node with its ``number`` in the operating system, -1 if unknown.

    ``socket_bandwidth`` is that to any other NUMA node. ``facts`` are of `topoplan.machine.topology.FACTS`. An empty
    ``name`` means ``cpu0``, ``cpu1``, … in order.
    """

    number: int
    socket_bandwidth: float
    model: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    name: str = ""


@dataclass(frozen=True, slots=True)
class PciDevice:
    """A node of the PCIe tree: a bridge or a device, one of `PCI_KINDS`.

    A bridge is a switch, or its upstream port in its place; root ports and downstream ports are ports, if listed.
    ``parent`` is the bus ID of the bridge above, empty directly below a host bridge; ``cpu`` is a `HostCpu.number`, and
    ``bandwidth`` that of the link upwards. ``chip`` is the fact ``pci``: two levels of one Broadcom chip are a single
    switch. ``name`` and ``model`` are for a bridge that becomes a switch, empty for ``pcie0``, ``pcie1``, … in order;
    ``host_bridge`` is the fact of that name.
    """

    busid: str
    kind: str
    parent: str
    cpu: int
    bandwidth: float
    chip: str = ""
    name: str = ""
    model: str = ""
    host_bridge: str = ""


@dataclass(frozen=True, slots=True)
class NvlinkBundle:
    """The active NVLinks (or XGMI links) from one GPU to one far end, one of `NVLINK_ENDS`.

    ``target`` is the bus ID of the far end, empty if not visible; ``bandwidth`` is that of all ``count`` links.
    """

    end: str
    target: str
    count: int
    bandwidth: float


@dataclass(frozen=True, slots=True)
class HostGpu:
    """A GPU, at the bus ID of its `PciDevice`, with the driver's number.

    ``c2c`` is the bandwidth of its chip-to-chip link to its CPU, 0 without one. An empty ``name`` means
    ``gpu<number>``.
    """

    busid: str
    number: int
    model: str = ""
    nvlinks: tuple[NvlinkBundle, ...] = ()
    c2c: float = 0.0
    facts: tuple[tuple[str, str], ...] = ()
    name: str = ""


@dataclass(frozen=True, slots=True)
class HostNic:
    """A NIC, at the bus ID of its `PciDevice`; empty if only its CPU is known.

    ``facts`` are ``adapter`` and ``gigabits``. ``cpu`` is the NUMA node, and ``bandwidth`` that of the link to it, of a
    NIC without bus ID. An empty ``name`` means ``nic0``, ``nic1``, … in order.
    """

    busid: str
    model: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    cpu: int = -1
    bandwidth: float = 0.0
    name: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """One server: CPUs and GPUs in ascending order of number, the PCIe tree with bridges before their children.

    ``source`` is that of the description; ``notes`` are assumptions and faults, one line each.
    """

    name: str
    cpus: tuple[HostCpu, ...]
    tree: tuple[PciDevice, ...]
    gpus: tuple[HostGpu, ...]
    nics: tuple[HostNic, ...]
    source: str = ""
    notes: tuple[str, ...] = ()


SWITCH = "nvswitch0"

STRIPED = f"{SWITCH} stands for all NVSwitch chips: hardware stripes every transfer over them"


def nvlink_links(
    host: Host, names: Mapping[str, str], cpus: Mapping[str, str]
) -> tuple[tuple[Link, ...], tuple[str, ...]]:
    """Return the links over NVLink, in both directions, and a note for each omission or contradiction.

    ``names`` are those of GPUs and ``cpus`` those of their CPUs, by the GPU's bus ID. Links between GPUs come first, in
    the order of their numbers, then those to the switch, then to CPUs.
    """
    notes: list[str] = []
    direct: dict[tuple[str, str], NvlinkBundle] = {}
    others: list[Link] = []
    for gpu in host.gpus:
        name = names[gpu.busid]
        for bundle in gpu.nvlinks:
            if bundle.end == "gpu" and bundle.target in names and bundle.target != gpu.busid:
                direct[name, names[bundle.target]] = _joined(direct.get((name, names[bundle.target])), bundle)
            elif bundle.end == "nvswitch":
                others += both_ways(name, SWITCH, "nvlink", bundle.bandwidth, count=bundle.count)
            elif bundle.end == "cpu" and gpu.busid in cpus:
                cpu = cpus[gpu.busid]
                others += both_ways(name, cpu, "nvlink", bundle.bandwidth, count=bundle.count)
            else:
                notes.append(_omission_note(gpu, name, bundle))
    notes += _one_sided(direct)
    return (*_paired(direct), *_merged(others)), tuple(notes)


def _joined(first: NvlinkBundle | None, second: NvlinkBundle) -> NvlinkBundle:
    if first is None:
        return second
    bandwidth = summed((first.bandwidth, second.bandwidth))
    return NvlinkBundle(second.end, second.target, first.count + second.count, bandwidth)


def _merged(links: list[Link]) -> list[Link]:
    """Return one link for all with the same ends: a GPU may list several switch chips."""
    merged: dict[tuple[str, str], Link] = {}
    for link in links:
        before = merged.get((link.src, link.dst))
        count, bandwidth = (before.count, before.bandwidth) if before else (0, 0.0)
        merged[link.src, link.dst] = Link(
            link.src, link.dst, "nvlink", summed((bandwidth, link.bandwidth)), count + link.count
        )
    return list(merged.values())


def _paired(direct: Mapping[tuple[str, str], NvlinkBundle]) -> list[Link]:
    """Return the links of both directions of each pair next to each other."""
    order = dict.fromkeys(pair for ends in direct for pair in (ends, ends[::-1]) if pair in direct)
    return [Link(*ends, "nvlink", direct[ends].bandwidth, direct[ends].count) for ends in order]


def _one_sided(direct: Mapping[tuple[str, str], NvlinkBundle]) -> list[str]:
    notes = []
    for (src, dst), bundle in direct.items():
        back = direct.get((dst, src))
        if back is None:
            notes.append(
                f"{src} lists {bundle.count} NVLinks to {dst}, but {dst} lists none to {src}; used in one direction"
            )
        elif back.count < bundle.count:
            notes.append(
                f"{src} lists {bundle.count} NVLinks to {dst}, but {dst} lists {back.count} to {src}; each as listed"
            )
    return notes


def _omission_note(gpu: HostGpu, name: str, bundle: NvlinkBundle) -> str:
    links = f"{name}: {counted(bundle.count, 'NVLink')}"
    if bundle.target == gpu.busid:
        return f"{links} to itself ({bundle.target}); which GPU is at the far end is not known, so they are left out"
    if bundle.end == "gpu":
        return f"{links} to {bundle.target}, which is none of the GPUs; they are left out"
    return f"{links} to an unknown far end {bundle.target or '(not visible)'}; they are left out"


SERVER = "s0"


def host_topology(host: Host) -> Topology:
    """Return the Topology of a server: ``gpu<n>``, ``nvswitch0``, ``pcie<i>``, ``cpu<i>``, ``nic<i>``, or given names.

    TopologyError for a repeated bus ID or name, an unlisted NUMA node, or a GPU that is not in the tree.
    """
    check_tree(host.tree)
    nics = {nic.busid: nic for nic in host.nics if nic.busid}
    tree = switch_tree(device for device in host.tree if device.kind != "nic" or device.busid in nics)
    names = _names(host, tree)
    cpu_names = {cpu.number: cpu.name or f"cpu{i}" for i, cpu in enumerate(host.cpus)}
    place = {device.busid: device for device in tree}
    for device in tree:
        if not device.parent and device.cpu not in cpu_names:
            raise TopologyError(f"pci {device.busid} is on NUMA node {device.cpu}, which is not listed")
    for gpu in host.gpus:
        if gpu.busid not in place:
            raise TopologyError(f"GPU {gpu.number} is at {gpu.busid}, which is not in the PCIe tree")
    cpu_of = {gpu.busid: cpu_names[_root(place, gpu.busid).cpu] for gpu in host.gpus}
    nvlinks, nvlink_notes = nvlink_links(host, {gpu.busid: names[gpu.busid] for gpu in host.gpus}, cpu_of)
    switched = any(SWITCH in (link.src, link.dst) for link in nvlinks)
    links = [*nvlinks]
    for gpu in host.gpus:
        if gpu.c2c:
            links += both_ways(names[gpu.busid], cpu_of[gpu.busid], "c2c", gpu.c2c)
    for device in tree:
        above = names[device.parent] if device.parent else cpu_names[device.cpu]
        links += both_ways(names[device.busid], above, "pcie", device.bandwidth)
    for nic in host.nics:
        if not nic.busid:
            links += both_ways(names[_key(nic)], cpu_names[nic.cpu], "pcie", nic.bandwidth)
    links += _socket_links(host, cpu_names)
    return Topology(
        name=host.name,
        devices=(
            *(
                Device(
                    names[gpu.busid],
                    "gpu",
                    SERVER,
                    model=gpu.model,
                    busid=gpu.busid,
                    numa=_numa(_root(place, gpu.busid).cpu),
                    facts=_with_place(gpu.facts, place[gpu.busid]),
                )
                for gpu in host.gpus
            ),
            *([_nvswitch(host)] if switched else []),
            *(
                Device(
                    names[device.busid],
                    "pcie",
                    SERVER,
                    device.model,
                    device.busid,
                    facts=facts(pci=device.chip),
                )
                for device in tree
                if device.kind == "bridge"
            ),
            *(
                Device(
                    cpu_names[cpu.number], "cpu", SERVER, cpu.model, numa=_numa(cpu.number), facts=cpu.facts
                )
                for cpu in host.cpus
            ),
            *(_nic(nic, names[_key(nic)], place) for nic in host.nics),
        ),
        links=tuple(links),
        notes=(*host.notes, *nvlink_notes, *([STRIPED] if switched else [])),
        source=host.source,
    )


def _nvswitch(host: Host) -> Device:
    gpus = [Device(f"gpu{gpu.number}", "gpu", model=gpu.model, facts=gpu.facts) for gpu in host.gpus]
    return Device(SWITCH, "nvswitch", SERVER, model="NVSwitch", capable=nvswitch_capable(gpus))


def _names(host: Host, tree: tuple[PciDevice, ...]) -> dict[str, str]:
    """Return the name of each GPU, switch and NIC by its bus ID, or by `_key` for a NIC without one."""
    names = {gpu.busid: gpu.name or f"gpu{gpu.number}" for gpu in host.gpus}
    switches = [device for device in tree if device.kind == "bridge"]
    names |= {device.busid: device.name or f"pcie{i}" for i, device in enumerate(switches)}
    names |= {_key(nic): nic.name or f"nic{i}" for i, nic in enumerate(host.nics)}
    if len(names) != len(host.gpus) + len(switches) + len(host.nics):
        keys = Counter([gpu.busid for gpu in host.gpus] + [_key(nic) for nic in host.nics])
        repeated = next((key for key, times in keys.items() if times > 1), "")
        raise TopologyError(f"{repeated or 'a bus id'} is listed twice; each GPU and NIC has its own place")
    return names


def _key(nic: HostNic) -> str:
    return nic.busid or f"{dict(nic.facts).get('adapter', '')} on NUMA node {nic.cpu}"


def _root(place: dict[str, PciDevice], busid: str) -> PciDevice:
    device = place[busid]
    while device.parent:
        device = place[device.parent]
    return device


def _numa(number: int) -> int | None:
    return None if number < 0 else number


def _with_place(known: tuple[tuple[str, str], ...], device: PciDevice) -> tuple[tuple[str, str], ...]:
    return facts(**dict(known) | {"pci": device.chip, "host_bridge": device.host_bridge})


def _nic(nic: HostNic, name: str, place: dict[str, PciDevice]) -> Device:
    if not nic.busid:
        return Device(name, "nic", SERVER, nic.model, numa=_numa(nic.cpu), facts=nic.facts)
    cpu = _root(place, nic.busid).cpu
    known = _with_place(nic.facts, place[nic.busid])
    return Device(name, "nic", SERVER, nic.model, nic.busid, _numa(cpu), facts=known)


def _socket_links(host: Host, names: dict[int, str]) -> list[Link]:
    """Return a link between every two NUMA nodes, as in NCCL, each direction as fast as its own end states."""
    links = []
    for i, first in enumerate(host.cpus):
        for second in host.cpus[i + 1 :]:
            ends = ((first, second), (second, first))
            links += [Link(names[a.number], names[b.number], "sys", a.socket_bandwidth) for a, b in ends]
    return links


def check_tree(tree: Iterable[PciDevice]) -> None:
    """Raise TopologyError for a tree with a repeated bus ID, or with a device before its bridge."""
    kinds: dict[str, str] = {}
    for device in tree:
        if device.busid in kinds:
            raise TopologyError(f"pci {device.busid} is listed twice; a bus id names one device of a server")
        if device.parent and kinds.get(device.parent) not in ("bridge", "port"):
            raise TopologyError(
                f"pci {device.busid} is below {device.parent}, which is not a bridge before it"
            )
        kinds[device.busid] = device.kind


def switch_tree(tree: Iterable[PciDevice]) -> tuple[PciDevice, ...]:
    """Return GPUs, NICs and the switches above them, in the order of the tree; every remaining bridge is a switch."""
    without_ports = [
        replace(device, kind="bridge", chip="") if device.kind == "port" else device
        for device in _contracted(_with_ends(list(tree)), ("port",))
    ]
    return tuple(_contracted(_flattened(without_ports), ("bridge",)))


def _with_ends(tree: list[PciDevice]) -> list[PciDevice]:
    """Return the tree without branches that hold neither GPU nor NIC."""
    kept = {device.busid for device in tree if device.kind in ("gpu", "nic")}
    for device in reversed(tree):
        if device.busid in kept and device.parent:
            kept.add(device.parent)
    return [device for device in tree if device.busid in kept]


def _flattened(tree: list[PciDevice]) -> list[PciDevice]:
    """Return the tree without the lower level of Broadcom chips; its devices move to the upper level."""
    chips = {device.busid: _chip_generation(device.chip, lower=False) for device in tree}
    upper: dict[str, str] = {}
    result = []
    for device in tree:
        generation = _chip_generation(device.chip, lower=True)
        # A removed level absorbs no further one: NCCL marks a fused switch and leaves it alone.
        if (
            device.kind == "bridge"
            and generation
            and device.parent not in upper
            and chips.get(device.parent) == generation
        ):
            upper[device.busid] = device.parent
            continue
        result.append(replace(device, parent=upper.get(device.parent, device.parent)))
    return result


def _chip_generation(chip: str, *, lower: bool) -> int:
    """Return the generation of a Broadcom switch chip with two levels; 0 for other devices (NCCL's ``getBcmGen``)."""
    if chip.startswith("1000:c010:1000:a"):
        return 4
    if chip.startswith(f"1000:c030:1000:{int(lower)}"):
        return 5
    return 0


def _contracted(tree: list[PciDevice], kinds: Container[str]) -> list[PciDevice]:
    """Return the tree without devices of some kinds above a single device."""
    children: dict[str, list[PciDevice]] = {}
    for device in tree:
        children.setdefault(device.parent, []).append(device)
    above: dict[str, tuple[str, float]] = {}
    result = []
    for device in tree:
        parent, slowest = above.get(device.parent, (device.parent, device.bandwidth))
        bandwidth = min(slowest, device.bandwidth)
        if device.kind in kinds and len(children[device.busid]) == 1:
            above[device.busid] = (parent, bandwidth)
        else:
            result.append(replace(device, parent=parent, bandwidth=bandwidth))
    return result


def cpus_of(parents: Mapping[str, str]) -> tuple[str, ...]:
    """Return the roots of a host tree, in order of first appearance."""
    return tuple(dict.fromkeys(parent for parent in parents.values() if parent not in parents))


def host_links(parents: Mapping[str, str], *, pcie: float, socket: float) -> tuple[Link, ...]:
    """Return the links of a host tree in both directions, and a link between every two CPUs, as in NCCL.

    ``parents`` map child to parent; roots are CPUs. ``pcie`` and ``socket`` are in GB/s per direction; a socket of 0
    leaves CPUs unjoined.
    """
    cpus = cpus_of(parents)
    links = [link for child, parent in parents.items() for link in both_ways(child, parent, "pcie", pcie)]
    for i, first in enumerate(cpus if socket else ()):
        for second in cpus[i + 1 :]:
            links += both_ways(first, second, "sys", socket)
    return tuple(links)


def both_ways(
    first: str, second: str, channel: str, bandwidth: float, *, count: int = 1
) -> tuple[Link, Link]:
    """Return a full-duplex wire as two links; ``bandwidth`` is GB/s per direction with all ``count`` wires."""
    return (Link(first, second, channel, bandwidth, count), Link(second, first, channel, bandwidth, count))
