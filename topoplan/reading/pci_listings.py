"""Convert the PCIe trees that ``lspci`` and hwloc's ``lstopo`` print to a Topology.

``lspci -vv`` states class, lanes, rates, NUMA node and the buses below each bridge: the chains of bridges above GPUs
and NICs are as the kernel shows them to the probe, so `probe_devices.kernel_tree` reads them. ``lspci -tv`` states
names and the tree alone: rates are assumed. ``lstopo`` (XML of hwloc 2) states the present rate of each link in GB/s,
encoding taken off, which is low while a GPU is idle; rates become those of NCCL, as everywhere here.

None of them states NVLink, and a GPU is one by its PCI class and vendor: displays and accelerators of NVIDIA and AMD,
without the graphics of a processor or a board. GPUs are numbered by bus id, as drivers count them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from xml.etree import ElementTree

from topoplan.errors import TopologyError, warning
from topoplan.machine.hardware import LANE, PCIE_X16, SOCKET, UNKNOWN_LANE, UNKNOWN_WIDTH, checked_rate
from topoplan.machine.host_topology import (
    Host,
    HostCpu,
    HostGpu,
    HostNic,
    PciDevice,
    bus_id,
    bus_id_order,
    host_topology,
)
from topoplan.machine.topology import Topology, facts
from topoplan.reading.probe_devices import SysfsDevice, kernel_tree
from topoplan.reading.probe_driver import Driver
from topoplan.reading.registry import ASSUMED
from topoplan.units import counted, listed

_GPU_VENDOR = re.compile(r"NVIDIA|\[AMD/ATI\]|10de|1002")
_NOT_GPU = re.compile(
    r"Audio|USB|UCSI|Serial|NVSwitch|Bridge|Raphael|Rembrandt|Phoenix|Granite Ridge|Strix", re.IGNORECASE
)
_NIC_CLASS = re.compile(r"Infiniband controller|Ethernet controller|Network controller|0207|0200|0280")
_NIC_NAME = re.compile(r"ConnectX-?\S*|BlueField-?\S*|Elastic Fabric|\bEFA\b|Infiniband", re.IGNORECASE)
_GPU_CLASS = re.compile(
    r"VGA compatible controller|3D controller|Display controller|Processing accelerators|03(?:00|02|80)|1200"
)
_SLOWEST_GPU = 8 * LANE[8.0]
"""GB/s below which a GPU's link is probably idle."""

_LONGEST_NAME = 200
"""Characters of the longest name of a device."""

_NO_NVLINK = (
    "NVLink is not in this listing; add --merge with the output of nvidia-smi topo -m if there is any"
)


@dataclass(slots=True)
class _Listed:
    """A PCI device of a listing; ``link`` is its GB/s if that is stated as one figure, 0 if unknown."""

    busid: str
    parent: str
    kind: str
    model: str = ""
    root: str = ""
    numa: int | None = None
    cpu: int = 0
    link: float = 0.0
    speed: float | None = None
    most_speed: float | None = None
    width: int | None = None
    most_width: int | None = None
    buses: tuple[int, int] | None = None
    adapters: list[str] = field(default_factory=list)


def _kind(classed: str, name: str) -> str:
    """Return whether a device is a GPU, a NIC or another one, by its class and its vendor and name."""
    if _GPU_CLASS.search(classed) and _GPU_VENDOR.search(name) and not _NOT_GPU.search(name):
        return "gpu"
    if _NIC_CLASS.search(classed) and (_NIC_NAME.search(name) or re.search("0207|Infiniband", classed)):
        return "nic"
    return "other"


_HEADER = re.compile(
    r"((?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) ([A-Z0-9][^:\[]{2,60}?)(?: \[([0-9a-f]{4})\])?: (.*)"
)
_BUSES = re.compile(r"\s+Bus: primary=([0-9a-f]{2}), secondary=([0-9a-f]{2}), subordinate=([0-9a-f]{2})")
_LINK = re.compile(r"\s+Lnk(Cap|Sta):.*?Speed ([0-9.]+)GT/s[^,]*, Width x(\d{1,2})")
_NUMA = re.compile(r"\s+NUMA node: (\d{1,4})")


def parse_lspci(text: str, *, socket_gbps: float | None = None) -> Topology:
    """Return the machine of ``lspci -vv``; ``socket_gbps`` is the GB/s between CPUs per direction.

    TopologyError for a listing without GPUs, without lanes (run as another user than root), or one that is cut.
    """
    devices: dict[str, _Listed] = {}
    for line in text.splitlines():
        head = _HEADER.match(line)
        if head:
            busid = bus_id(head[1] if head[1].count(":") == 2 else f"0000:{head[1]}")
            if busid in devices:
                raise TopologyError(f"{busid} is listed twice; give one listing of lspci -vv")
            one = _Listed(busid, "", _kind(head[2], head[4]), _model(head[4]))
            devices[busid] = one
        elif devices:
            _add_property(one, line)
    _place(devices)
    ends = _ends(devices, "lspci -vv")
    bare = [busid for busid in ends if devices[busid].width is None]
    if bare:
        raise TopologyError(
            f"the listing has no LnkSta of {listed(bare, noun='devices')}: lspci shows it to root only; give the "
            "output of sudo lspci -vv"
        )
    chains = {busid: [_as_sysfs(devices[one]) for one in _chain(devices, busid)] for busid in ends}
    nodes = sorted(
        {device.numa for chain in chains.values() for device in chain if device.numa is not None}
    ) or [0]
    side = kernel_tree(
        chains, {busid: devices[busid].kind for busid in ends}, Driver("", (), {}, {}, {}, ()), nodes
    )
    unstated = [busid for busid, chain in chains.items() if not any(one.numa is not None for one in chain)]
    notes = [*side.notes]
    if unstated and len(nodes) > 1:
        notes.append(
            f"the NUMA node of {listed(unstated, noun='devices')} is not stated; node {nodes[0]} taken"
        )
    return _machine("lspci", "lspci -vv", devices, side.tree, nodes, socket_gbps, notes)


def _add_property(device: _Listed, line: str) -> None:
    if match := _BUSES.match(line):
        device.buses = (int(match[2], 16), int(match[3], 16))
    elif match := _NUMA.match(line):
        device.numa = int(match[1])
    elif match := _LINK.match(line):
        speed, width = float(match[2]), int(match[3])
        width_or_none = width if 0 < width <= 32 else None
        if match[1] == "Cap":
            device.most_speed, device.most_width = speed if speed in LANE else None, width_or_none
        else:
            device.speed, device.width = speed if speed in LANE else None, width_or_none


def _place(devices: Mapping[str, _Listed]) -> None:
    """Set the bridge above each device: that of its domain whose buses begin at the bus of the device."""
    above: dict[tuple[str, int], str] = {}
    for one in devices.values():
        if one.buses and one.buses[0]:
            key = (one.busid[: one.busid.index(":")], one.buses[0])
            if key in above:
                raise TopologyError(
                    f"{above[key]} and {one.busid} are both above bus {key[1]:02x}; give one listing"
                )
            above[key] = one.busid
    for one in devices.values():
        domain, bus, _ = one.busid.split(":")
        one.parent = above.get((domain, int(bus, 16)), "")
        one.root = "" if one.parent else f"pci{domain}:{bus}"
        if one.parent == one.busid:
            raise TopologyError(f"{one.busid} is a bridge above itself; give the listing as it was printed")


def _chain(devices: Mapping[str, _Listed], busid: str) -> list[str]:
    """Return a device below its bridges, uppermost first."""
    chain = [busid]
    while parent := devices[chain[0]].parent:
        if parent in chain or parent not in devices:
            raise TopologyError(f"the bridges above {busid} form no tree; give the listing as it was printed")
        chain.insert(0, parent)
    return chain


def _as_sysfs(one: _Listed) -> SysfsDevice:
    return SysfsDevice(
        one.busid,
        one.parent,
        one.root,
        "",
        "",
        one.numa,
        one.speed,
        one.most_speed,
        one.width,
        one.most_width,
    )


def _ends(devices: Mapping[str, _Listed], what: str) -> list[str]:
    """Return GPUs and NICs by bus id; a TopologyError without a GPU."""
    ends = sorted((one.busid for one in devices.values() if one.kind != "other"), key=bus_id_order)
    if not any(devices[busid].kind == "gpu" for busid in ends):
        raise TopologyError(
            f"{what} lists {counted(len(devices), 'device')} and no GPU of NVIDIA or AMD; give the whole listing, or "
            "run it where the GPUs are"
        )
    return ends


def _model(name: str) -> str:
    """Return the name in the last brackets of a device, such as ``H100 SXM5 80GB``, else all but its vendor."""
    name = name[:_LONGEST_NAME]
    name = re.sub(r" \[[0-9a-f]{4}:[0-9a-f]{4}\]|\s*\(rev [0-9a-f]{2}\).*|\s*\(prog-if.*", "", name)
    inner = re.findall(r"\[([^\]]{2,60})\]", name.replace("[AMD/ATI]", ""))
    bare = re.sub(
        r"^(?:NVIDIA Corporation|Advanced Micro Devices, Inc\. \[AMD/ATI\]|Mellanox Technologies)\s*",
        "",
        name,
    )
    return (inner[-1] if inner else bare).strip()[:60]


def _machine(
    name: str,
    source: str,
    devices: Mapping[str, _Listed],
    tree: Iterable[PciDevice],
    nodes: Iterable[int],
    socket_gbps: float | None,
    notes: Iterable[str],
) -> Topology:
    socket = checked_rate("socket_gbps", socket_gbps) or SOCKET["Broadwell"]
    found = list(tree)
    cpus = sorted({*nodes})
    ends = sorted((one.busid for one in devices.values() if one.kind == "gpu"), key=bus_id_order)
    nics = sorted((one.busid for one in devices.values() if one.kind == "nic"), key=bus_id_order)
    every = [*notes, _NO_NVLINK]
    if len(cpus) > 1 and socket_gbps is None:
        every.append(ASSUMED["socket"].format(socket))
    return host_topology(
        Host(
            name=name,
            cpus=tuple(HostCpu(number, socket) for number in cpus),
            tree=tuple(found),
            gpus=tuple(HostGpu(busid, place, devices[busid].model) for place, busid in enumerate(ends)),
            nics=tuple(
                HostNic(busid, devices[busid].model, facts(adapter=",".join(devices[busid].adapters[:1])))
                for busid in nics
            ),
            source=f"{source}; PCIe by lanes and rate as NCCL counts them",
            notes=tuple(every),
        )
    )


_TREE_ROOT = re.compile(r"-?\[(?:([0-9a-f]{4,8}):)?([0-9a-f]{2})(?:-[0-9a-f]{2})?\]")
_TREE_DEVICE = re.compile(r"([01][0-9a-f])\.([0-7])")
_TREE_BUS = re.compile(r"-\[(?:[0-9a-f]{4,8}:)?([0-9a-f]{2})(?:-([0-9a-f]{2}))?\]")


def parse_lspci_tree(
    text: str, *, pcie_gbps: float | None = None, socket_gbps: float | None = None
) -> Topology:
    """Return the machine of ``lspci -tv``; the rates are the GB/s of a PCIe link and between CPUs per direction.

    The tree does not state to which CPU a host bridge belongs: all are on one, and a note says so.
    """
    pcie = checked_rate("pcie_gbps", pcie_gbps) or PCIE_X16[3]
    checked_rate("socket_gbps", socket_gbps)
    devices: dict[str, _Listed] = {}
    # the bus on which each column's branch began: domain, bus, and the bridge above
    branches: dict[int, tuple[str, str, str]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not re.match(r"[ |\t]*(?:-[+\[]|[+\\]-)", line):
            continue
        _tree_line(devices, branches, number, line.rstrip()[:_LONGEST_LINE])
    ends = _ends(devices, "lspci -tv")
    kept = [one for busid in ends for one in _chain(devices, busid)]
    tree = []
    for busid in dict.fromkeys(kept):
        one = devices[busid]
        depth = len(_chain(devices, busid)) - 1
        kind = one.kind if one.kind != "other" else "bridge" if depth % 2 else "port"
        root = devices[_chain(devices, busid)[0]].root
        tree.append(PciDevice(busid, kind, one.parent, 0, pcie, host_bridge=root))
    notes = []
    if pcie_gbps is None:
        notes.append(f"{ASSUMED['pcie'].format(pcie)}, or give lspci -vv")
    roots = {devices[_chain(devices, busid)[0]].root for busid in ends}
    if len(roots) > 1:
        notes.append(
            warning(
                f"lspci -tv does not state the CPUs of {len(roots)} host bridges: all are taken for one CPU's; lspci "
                "-vv states NUMA nodes"
            )
        )
    return _machine("lspci", "lspci -tv", devices, tree, [0], socket_gbps or 1.0, notes)


def _tree_line(
    devices: dict[str, _Listed], branches: dict[int, tuple[str, str, str]], number: int, line: str
) -> None:
    """Add the devices of a line; a branch begins at ``+`` or goes on below it, and ends at a backslash."""
    broken = TopologyError(
        f"line {number} of lspci -tv has no branch above it: {line.strip()[:40]!r}; give the whole tree"
    )
    place = len(line) - len(line.lstrip(" |\t"))
    here: tuple[str, str, str] | None = None
    last = ""
    while place < len(line):
        rest = line[place:]
        if rest[0] in "+\\" and (place in branches or here):
            here = here or branches[place]
            branches[place] = here
            place += 1
        elif rest[0] in "+\\":
            if not re.match(r"[+\\]-\[", rest):
                raise broken
            place += 1
        elif (match := _TREE_ROOT.match(rest)) and not last:
            domain, bus = f"{int(match[1] or '0', 16):04x}", match[2]
            here, place = (domain, bus, ""), place + match.end()
        elif (match := _TREE_BUS.match(rest)) and last and here:
            here, place, last = (here[0], match[1], last), place + match.end(), ""
        elif rest[0] == "-":
            place += 1
        elif (match := _TREE_DEVICE.match(rest)) and here and not last:
            last = f"{here[0]}:{here[1]}:{match[1]}.{match[2]}"
            if last in devices:
                raise TopologyError(f"{last} is listed twice; give one tree of lspci -tv")
            root = "" if here[2] else f"pci{here[0]}:{here[1]}"
            devices[last] = _Listed(last, here[2], "other", root=root)
            place += match.end()
        elif rest.startswith("  ") and last:
            name = rest.strip()
            devices[last].kind, devices[last].model = _named_kind(name), _model(name)
            return
        else:
            return


def _named_kind(name: str) -> str:
    """Return the kind of a device by its name alone."""
    if _GPU_VENDOR.search(name) and not _NOT_GPU.search(name) and not _NIC_NAME.search(name):
        return "gpu"
    return "nic" if _NIC_NAME.search(name) else "other"


_LONGEST_LINE = 2000
"""Characters of the longest line of a tree."""

MOST_DEPTH = 200
"""Deepest nesting of objects in hwloc's XML."""


def parse_lstopo(text: str, *, socket_gbps: float | None = None) -> Topology:
    """Return the machine of hwloc's XML; ``socket_gbps`` is the GB/s between CPUs per direction.

    TopologyError for XML that is cut or has no GPU.
    """
    try:
        root = ElementTree.fromstring(
            re.sub(r"(?s)<!DOCTYPE[^>\[]{0,300}>", "", text.lstrip("\ufeff \t\r\n"))
        )
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise TopologyError(f"the XML of lstopo is cut or damaged: {error}; give the whole file") from None
    devices: dict[str, _Listed] = {}
    nodes: set[int] = set()
    stack: list[tuple[ElementTree.Element, str, int | None, int]] = [(root, "", None, 0)]
    while stack:
        element, parent, numa, depth = stack.pop()
        if depth > MOST_DEPTH:
            raise TopologyError(
                f"the XML of lstopo is nested more than {MOST_DEPTH} deep; give the file as it was written"
            )
        below = parent
        if element.tag == "object":
            numa = _numa_below(element, numa)
            below = _hwloc_device(devices, element, parent, numa)
        stack += [(child, below, numa, depth + 1) for child in reversed(list(element))]
    ends = _ends(devices, "lstopo")
    nodes = {devices[busid].numa or 0 for busid in ends}
    tree, idle, unknown = [], [], []
    for busid in dict.fromkeys(one for end in ends for one in _chain(devices, end)):
        one = devices[busid]
        place = len(_chain(devices, busid)) - 1
        kind = one.kind if one.kind != "other" else "bridge" if place % 2 else "port"
        rate = one.link
        if not rate:
            unknown.append(busid)
            rate = UNKNOWN_WIDTH * UNKNOWN_LANE
        elif one.kind == "gpu" and rate < _SLOWEST_GPU:
            idle.append(busid)
        tree.append(PciDevice(busid, kind, one.parent, one.numa or 0, rate, host_bridge=one.root))
    notes = []
    if unknown:
        notes.append(f"PCIe rate not known, generation 3 assumed: {listed(unknown, noun='devices')}")
    if idle:
        notes.append(
            warning(
                f"the PCIe links of {listed(idle, noun='GPUs')} are slow, as those of idle GPUs: lstopo prints the "
                "present rate; run it under load, or give lspci -vv"
            )
        )
    return _machine("lstopo", "lstopo", devices, tree, nodes, socket_gbps, notes)


def _numa_below(element: ElementTree.Element, numa: int | None) -> int | None:
    """Return the NUMA node of an object's children: that of the only NUMANode directly inside, else the one above."""
    inside = [one.get("os_index", "") for one in element if one.get("type") == "NUMANode"]
    return int(inside[0]) if len(inside) == 1 and re.fullmatch(r"[0-9]{1,4}", inside[0]) else numa


def _hwloc_device(
    devices: dict[str, _Listed], element: ElementTree.Element, parent: str, numa: int | None
) -> str:
    """Add a bridge, PCI device or name of an adapter; return the bridge above the object's children."""
    kind, busid = element.get("type", ""), element.get("pci_busid", "")
    if kind == "OSDev" and parent in devices:
        name = element.get("name", "")
        if element.get("osdev_type") in ("3", "OpenFabrics") or re.match(r"mlx|roce|ib|efa", name):
            devices[parent].adapters.append(name[:40])
        model = next((info.get("value", "") for info in element if info.get("name") == "GPUModel"), "")
        devices[parent].model = model[:60] or devices[parent].model
        return parent
    if kind not in ("Bridge", "PCIDev"):
        return parent
    if not busid:
        return ""
    place = bus_id(busid)
    if place in devices:
        raise TopologyError(f"{place} is listed twice; give one file of lstopo")
    classed = element.get("pci_type", "")
    vendor = next((info.get("value", "") for info in element if info.get("name") == "PCIVendor"), "")
    name = next((info.get("value", "") for info in element if info.get("name") == "PCIDevice"), "")
    identity = re.search(r"\[([0-9a-f]{4}):", classed)
    words = f"{vendor} {name} {identity[1] if identity else ''}"
    if identity and identity[1] == "15b3":
        words += " ConnectX"
    end = "other" if kind == "Bridge" else _kind(classed[:4], words)
    devices[place] = _Listed(
        place,
        parent,
        end,
        _model(name),
        root="" if parent else f"pci{place[:7]}",
        numa=numa,
        link=_link_rate(element.get("pci_link_speed", "")),
    )
    return place


def _link_rate(text: str) -> float:
    """Return the GB/s of a link as NCCL counts them, from those of hwloc; 0 if unknown."""
    stated = float(text) if re.fullmatch(r"[0-9]{1,4}(?:\.[0-9]{1,9})?", text) else 0.0
    for speed, lane in LANE.items():
        for width in (1, 2, 4, 8, 12, 16, 32):
            if abs(stated - width * speed * _ENCODING[speed] / 8) < 0.005 * stated:
                return width * lane
    return 0.0


_ENCODING = {2.5: 0.8, 5.0: 0.8, 8.0: 128 / 130, 16.0: 128 / 130, 32.0: 128 / 130, 64.0: 242 / 256}
"""Share of data in the bits of a lane, by its rate in GT/s."""
