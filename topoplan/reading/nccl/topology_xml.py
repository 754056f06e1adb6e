"""Convert NCCL's topology XML (``NCCL_TOPO_DUMP_FILE``), version 1, and RCCL's, version 2, to a Topology.

The parser does what NCCL does (``src/graph/xml.cc`` and ``topo.cc``): a file that stops NCCL is an error that names
line, element and attribute; an element that NCCL ignores is a note. Rates are NCCL's effective ones, by compute
capability, or RCCL's, by architecture (`topoplan.machine.hardware`), unless the file states better, as our own
exporter makes it. Deliberately absent: links through which two PCIe switches are one (``pcilink``), and partitions of
a GPU.

An element ``nvlink`` or ``xgmi`` stands for links that lead from this GPU to one far end; the far end has one of its
own. As in NCCL, several functions of one PCI device are one NIC, since they share its PCIe link, and a ``net``
without ``dev`` is a part of a NIC that NCCL has fused with others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from topoplan.errors import TopologyError
from topoplan.machine.hardware import checked_rate, gcn_name, nvlink_bandwidth, xgmi_bandwidth
from topoplan.machine.host_topology import (
    Host,
    HostGpu,
    HostNic,
    NvlinkBundle,
    bus_id,
    bus_id_order,
    host_topology,
)
from topoplan.machine.topology import FASTEST, MOST_WIRES, Topology, facts
from topoplan.reading.nccl.topology_elements import (
    Findings,
    GivenRates,
    PciNode,
    XmlElement,
    cpu_number,
    device_kind,
    host_cpus,
    needed,
    parse_xml,
    pci_nodes,
    stated,
    stated_rate,
    whole_number,
)
from topoplan.reading.registry import UNNAMED
from topoplan.units import exact, gigabytes_from_gigabits, nearest_float, summed

_HIDDEN = "fffffff:"
"""Beginning of the target that NCCL writes for a far end that a virtual machine cannot see: a switch."""

NO_NVLINKS = "no gpu element, so that NVLinks are not known; --merge adds them from another description"


def host_gpus(nodes: Sequence[PciNode], rates: GivenRates, findings: Findings) -> tuple[HostGpu, ...]:
    """Return the GPUs among the ``pci`` elements, in ascending order of their numbers."""
    ends = {node.device.busid: node.device.kind for node in nodes}
    gpus = []
    elements = [node for node in nodes if node.device.kind == "gpu"]
    for number, node in _numbered(elements, findings):
        parts = node.element.all("gpu")
        if not parts:
            findings.add(NO_NVLINKS, node.device.busid)
            gpus.append(_host_gpu(number, node, XmlElement("gpu", line=node.element.line), ()))
            continue
        gpu = parts[0]
        if len(parts) > 1:
            findings.add(
                "is divided into several gpu elements; the first stands for all of it", node.device.busid
            )
        bundles = _Bundles(node.device.busid, ends, rates, findings).read(gpu)
        gpus.append(_host_gpu(number, node, gpu, bundles, c2c=_c2c(gpu, findings, node.device.busid)))
    ranked = [
        bool(node.element.all("gpu") and "rank" in node.element.all("gpu")[0].attributes) for node in elements
    ]
    if any(ranked):
        for node, has_rank in zip(elements, ranked, strict=True):
            if not has_rank:
                findings.add("has no rank, so that NCCL leaves the GPU out; kept", node.device.busid)
    return tuple(gpus)


def _numbered(nodes: Sequence[PciNode], findings: Findings) -> list[tuple[int, PciNode]]:
    """Return the nodes with their numbers: ``dev``, else the rank of the bus id, as the driver counts."""
    numbers = [whole_number(gpu, "dev") for node in nodes for gpu in node.element.all("gpu")[:1]]
    known = [number for number in numbers if number is not None and number >= 0]
    if len(set(known)) == len(nodes):
        if sorted(known) != list(range(len(nodes))):
            findings.add(
                "numbers of GPUs are their dev; options such as --gpus count the GPUs of the file from 0"
            )
        return sorted(zip(known, nodes, strict=True), key=lambda pair: pair[0])
    if nodes:
        findings.add("GPUs are numbered by bus id, as the driver counts: dev is not stated, or occurs twice")
    return list(enumerate(sorted(nodes, key=lambda node: bus_id_order(node.device.busid))))


def _host_gpu(
    number: int, node: PciNode, gpu: XmlElement, bundles: tuple[NvlinkBundle, ...], *, c2c: float = 0.0
) -> HostGpu:
    gcn = stated(gpu, "gcn")
    # ``sm`` of an AMD GPU is the number of its compute units.
    amd = "gcn" in gpu.attributes or gpu.all("xgmi") or whole_number(node.element, "vendor") == 0x1002
    sm = whole_number(gpu, "sm") if stated(gpu, "sm") and not amd else None
    return HostGpu(
        node.device.busid,
        number,
        node.device.model,
        bundles,
        c2c,
        facts(sm=sm, gcn=gcn_name(gcn)),
        node.device.name,
    )


def _c2c(gpu: XmlElement, findings: Findings, busid: str) -> float:
    """Return the GB/s per direction of the chip-to-chip link to the CPU; NCCL states MB/s of one link."""
    total = Fraction(0)
    for link in gpu.all("c2c"):
        rate = exact(stated_rate(link, "bandwidth") or 0.0)
        if not rate:
            needed(link, "bw")
            needed(link, "count")
            rate = Fraction((whole_number(link, "bw") or 0) * (whole_number(link, "count") or 0), 1000)
        if 0 < rate <= exact(FASTEST):
            total += rate
        else:
            findings.add("c2c without a bw and count above 0; left out", busid)
    return nearest_float(total)


class _Bundles:
    """Reader of the ``nvlink`` and ``xgmi`` elements of one GPU; equal far ends are one bundle."""

    def __init__(self, busid: str, ends: Mapping[str, str], rates: GivenRates, findings: Findings) -> None:
        self.busid = busid
        self.ends = ends
        self.rates = rates
        self.findings = findings

    def read(self, gpu: XmlElement) -> tuple[NvlinkBundle, ...]:
        sums: dict[tuple[str, str], tuple[int, Fraction]] = {}
        for link in gpu.all("nvlink", "xgmi"):
            needed(link, "count")
            count = whole_number(link, "count") or 0
            if count > MOST_WIRES:
                raise TopologyError(
                    f"line {link.line}: {link.name} count {count} is too large; no GPU has more than {MOST_WIRES} links"
                )
            if count < 1:
                self.findings.add(f"{link.name} without a count above 0; left out", self.busid)
                continue
            end = self._far_end(link)
            links, bandwidth = sums.get(end, (0, Fraction(0)))
            sums[end] = (links + count, bandwidth + self._bandwidth(link, gpu, count))
        return tuple(NvlinkBundle(*end, count, nearest_float(rate)) for end, (count, rate) in sums.items())

    def _far_end(self, link: XmlElement) -> tuple[str, str]:
        """Return the kind of the far end as in `NvlinkBundle`, and its bus id if it is a GPU."""
        target = link.attributes.get("target", "").strip().lower()
        kind = device_kind(link.attributes.get("tclass", ""))
        if kind in ("cpu", "nvswitch"):
            return kind, ""
        if target.startswith(_HIDDEN):
            return "nvswitch", ""
        try:
            target = bus_id(target)
        except TopologyError:
            target = target[:40]
        if kind == "gpu":
            needed(link, "target")
            return "gpu", target
        if self.ends.get(target) == "gpu":
            return "gpu", target
        if self.ends.get(target) != "nvswitch":
            self.findings.add(
                f"{link.name} to {target or 'no target'} of unknown class; taken as an NVSwitch, as NCCL does",
                self.busid,
            )
        return "nvswitch", ""

    def _bandwidth(self, link: XmlElement, gpu: XmlElement, count: int) -> Fraction:
        given = stated_rate(link, "bandwidth")
        if self.rates.nvlink is not None:
            return count * exact(self.rates.nvlink)
        if given is not None:
            return exact(given)
        if link.name == "xgmi":
            gcn = gpu.attributes.get("gcn", "")
            if not gcn:
                self.findings.add(
                    f"gcn is not stated; {xgmi_bandwidth(''):g} GB/s taken for an XGMI link", self.busid
                )
            return count * exact(xgmi_bandwidth(gcn))
        sm = whole_number(gpu, "sm")
        if sm is None:
            self.findings.add(
                f"sm is not stated; {nvlink_bandwidth(80):g} GB/s taken for an NVLink (--nvlink-bandwidth sets it)",
                self.busid,
            )
        return count * exact(nvlink_bandwidth(80 if sm is None else sm))


_UNKNOWN_SPEED = 10_000
"""Mb/s of a NIC without a speed above 0, as in NCCL."""

FASTEST_NIC = 1_000_000_000
"""Mb/s of the fastest NIC that is accepted."""


@dataclass(frozen=True, slots=True)
class _Ports:
    """The ``net`` elements of one NIC together: Mb/s, names, and the lowest ``dev``."""

    speed: int
    speed_known: bool
    adapter: str
    dev: int | None

    def facts(self) -> tuple[tuple[str, str], ...]:
        gigabits = f"{self.speed // 1000 if self.speed % 1000 == 0 else self.speed / 1000}"
        return facts(adapter=self.adapter, gigabits=gigabits if self.speed_known else None)


def host_nics(system: XmlElement, nodes: Sequence[PciNode], findings: Findings) -> tuple[HostNic, ...]:
    """Return the NICs, in the order of ``dev`` if they have one, then in that of the file."""
    places = [*(node.element for node in nodes), *system.all("cpu")]
    nets = [net for place in places for nic in place.all("nic") for net in nic.all("net")]
    reader = _NicReader(any(_has_dev(net) for net in nets), findings)
    found = [*reader.on_pcie(nodes), *reader.on_cpus(system)]
    return tuple(nic for dev, nic in sorted(found, key=lambda pair: (pair[0] is None, pair[0] or 0)))


def _has_dev(net: XmlElement) -> bool:
    return "dev" in net.attributes


@dataclass(frozen=True, slots=True)
class _NicReader:
    """Reads NICs; ``numbered``: some ``net`` has a ``dev``, so that those without one do not count."""

    numbered: bool
    findings: Findings

    def on_pcie(self, nodes: Sequence[PciNode]) -> list[tuple[int | None, HostNic]]:
        groups: dict[tuple[object, ...], list[PciNode]] = {}
        for node in nodes:
            if node.device.kind == "nic":
                slot = node.device.busid if node.device.name else node.device.busid.partition(".")[0]
                groups.setdefault((node.device.parent, node.device.cpu, slot), []).append(node)
        found = []
        for group in groups.values():
            first = group[0].device
            if len(group) > 1:
                self.findings.add(
                    "has several functions, which share its PCIe link; one NIC, as in NCCL", first.busid
                )
            nets = [net for node in group for nic in node.element.all("nic") for net in nic.all("net")]
            if nets and not self._counted(nets):
                self.findings.add(
                    "NIC without dev while others have one; left out, as NCCL does", first.busid
                )
                continue
            ports = self._ports(self._counted(nets), first.busid)
            model = first.model or next((stated(net, "model") for net in nets), "")
            found.append((ports.dev, HostNic(first.busid, model, ports.facts(), name=first.name)))
        return found

    def on_cpus(self, system: XmlElement) -> list[tuple[int | None, HostNic]]:
        found: dict[tuple[int, str], tuple[int | None, HostNic]] = {}
        for cpu in system.all("cpu"):
            number = cpu_number(cpu)
            for nic in cpu.all("nic"):
                for net in self._counted(nic.all("net")):
                    ports = self._ports([net], f"cpu {cpu.attributes['numaid']}")
                    rate = stated_rate(net, "bandwidth") or gigabytes_from_gigabits(ports.speed / 1000)
                    model = stated(nic, "model") or stated(net, "model")
                    host_nic = HostNic("", model, ports.facts(), number, rate, stated(nic, "name"))
                    before = found.get((number, ports.adapter))
                    if before:
                        host_nic = replace(before[1], bandwidth=summed((before[1].bandwidth, rate)))
                    found[number, ports.adapter] = (before[0] if before else ports.dev, host_nic)
        return list(found.values())

    def _counted(self, nets: Sequence[XmlElement]) -> list[XmlElement]:
        return [net for net in nets if _has_dev(net) or not self.numbered]

    def _ports(self, nets: Sequence[XmlElement], place: str) -> _Ports:
        # Several plug-ins may state the same adapter: only one of them moves ordinary messages.
        nets = [net for net in nets if whole_number(net, "net") != 0] or nets
        speeds = []
        for net in nets:
            speed = whole_number(net, "speed") or 0
            if speed > FASTEST_NIC:
                raise TopologyError(
                    f"line {net.line}: net speed {speed} Mb/s is above {FASTEST_NIC}, which no NIC has"
                )
            if speed <= 0:
                self.findings.add(
                    f"speed of a NIC is not above 0; {_UNKNOWN_SPEED // 1000} Gb/s taken, as NCCL does",
                    stated(net, "name") or place,
                )
            speeds.append(speed if speed > 0 else _UNKNOWN_SPEED)
        names = dict.fromkeys(stated(net, "name") for net in nets)
        devs = [dev for net in nets if (dev := whole_number(net, "dev")) is not None]
        known = bool(nets) and all("speed" not in net.attributes.get("assumed", "").split() for net in nets)
        return _Ports(sum(speeds), known, "+".join(name for name in names if name), min(devs, default=None))


_KNOWN = {
    "system": ("cpu",),
    "cpu": ("pci", "nic"),
    "pci": ("pci", "gpu", "nic", "pcilink"),
    "nic": ("net",),
    "gpu": ("nvlink", "xgmi", "c2c"),
}
"""Elements that may stand in an element; NCCL skips others."""

_OTHER_FILES = {
    "graphs": "an NCCL graph file (NCCL_GRAPH_FILE): rings and trees that NCCL found, not the machine",
    "algo": "an MSCCL algorithm: a schedule, not the machine",
}


def parse_nccl_xml(
    text: str,
    *,
    nvlink_gbps: float | None = None,
    pcie_gbps: float | None = None,
    socket_gbps: float | None = None,
    gpu_ids: Collection[str] = (),
) -> Topology:
    """Parse a topology file of NCCL or RCCL.

    The rates are in GB/s per direction of one NVLink or XGMI link, of every PCIe link, and between CPUs, in place of
    the file's and NCCL's. ``gpu_ids`` are bus ids that are known from elsewhere to be those of GPUs: a ``pci`` element
    without class is a GPU there. Assumptions become ``notes``. GPUs without ``gpu`` element have no NVLinks: see
    `topoplan.reading.pcie_tree`. A TopologyError, such as for a file on which NCCL fails, names line, element and
    attribute.
    """
    rates = GivenRates(
        checked_rate("nvlink_gbps", nvlink_gbps),
        checked_rate("pcie_gbps", pcie_gbps),
        checked_rate("socket_gbps", socket_gbps),
    )
    system = parse_xml(text)
    version = _version(system)
    findings = Findings()
    cpus = host_cpus(system, rates, findings)
    nodes = pci_nodes(system, rates, findings, gpu_ids=gpu_ids)
    if not any(node.device.kind == "gpu" for node in nodes):
        raise TopologyError(_no_gpu(nodes, gpu_ids))
    _note_unknown(system, findings)
    host = Host(
        stated(system, "name") or UNNAMED,
        cpus,
        tuple(node.device for node in nodes),
        host_gpus(nodes, rates, findings),
        host_nics(system, nodes, findings),
        source=f"topology XML of {'RCCL' if version == 2 else 'NCCL'}; bandwidths are NCCL's effective ones, below the "
        "nominal ones, where the file states none",
        notes=findings.notes(),
    )
    assumed = {node.device.busid for node in nodes if not stated(node.element, "busid")}
    machine = _without_bus_ids(host_topology(host), assumed)
    return replace(machine, peer_access=_peer_access(system))


def _peer_access(system: XmlElement) -> tuple[tuple[int, float], ...]:
    """Return seconds of switching peer access by number of GPUs, such as ``3:0.0035 8:0.0037``; NCCL skips them."""
    text = stated(system, "peer_access")
    try:
        pairs = [part.split(":") for part in text.split()]
        return tuple((int(gpus), float(seconds)) for gpus, seconds in pairs)
    except ValueError:
        raise TopologyError(
            f"line {system.line}: system peer_access must list GPUs and seconds such as 8:0.0037, got {text[:40]!r}"
        ) from None


def _version(system: XmlElement) -> int:
    """Return the version of the format; raise for an unknown one."""
    if system.name in _OTHER_FILES:
        raise TopologyError(
            f"line {system.line}: {system.name}: this is {_OTHER_FILES[system.name]}; give the file that "
            "NCCL_TOPO_DUMP_FILE writes"
        )
    if system.name != "system":
        raise TopologyError(
            f"line {system.line}: the outermost element is {system.name[:40]}, but system in a topology file of NCCL; "
            "give the file that NCCL_TOPO_DUMP_FILE writes"
        )
    text = needed(system, "version")
    version = whole_number(system, "version")
    if version not in (1, 2):
        raise TopologyError(
            f"line {system.line}: system version {text[:40]!r} is unknown; use 1 (NCCL) or 2 (RCCL)"
        )
    return version


def _no_gpu(nodes: Sequence[PciNode], gpu_ids: Collection[str]) -> str:
    unclassed = sum("class" not in node.element.attributes for node in nodes)
    if not nodes:
        return "the file has no GPU: no pci element is below a cpu; give the file that NCCL_TOPO_DUMP_FILE writes"
    if not unclassed:
        return f"the file has no GPU: none of its {len(nodes)} pci elements has class 0x03… or a gpu element"
    if gpu_ids:
        return (
            f"the file has no GPU: {unclassed} of its {len(nodes)} pci elements state no class, and none of them is at "
            "the bus id of a GPU of --merge"
        )
    return (
        f"the file does not state which of its {len(nodes)} pci elements are GPUs, since {unclassed} of them have no "
        "class; use --merge with topology JSON that has bus ids (topoplan probe writes it)"
    )


def _note_unknown(element: XmlElement, findings: Findings) -> None:
    for child in element.children:
        if child.name == "pcilink":
            findings.add("pcilink joins two PCIe switches in NCCL; left out", f"line {child.line}")
        elif child.name in _KNOWN.get(element.name, ()):
            _note_unknown(child, findings)
        else:
            findings.add(
                f"{child.name[:40]} inside {element.name[:40]} is unknown; skipped, as NCCL does",
                f"line {child.line}",
            )


def _without_bus_ids(topology: Topology, busids: Collection[str]) -> Topology:
    """Remove bus ids that only stand in for unknown ones."""
    return replace(
        topology,
        devices=tuple(
            replace(device, busid="") if device.busid in busids else device for device in topology.devices
        ),
    )
