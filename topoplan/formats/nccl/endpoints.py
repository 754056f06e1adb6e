"""GPUs and NICs of a topology file, the ends of its PCIe tree.

The rate of a link is NCCL's, by compute capability, or RCCL's, by architecture (see `topoplan.hosts.nccl_rates`). An
element ``nvlink`` or ``xgmi`` stands for links that lead from this GPU to one far end; the far end has one of its own.

As in NCCL, several functions of one PCI device are one NIC, since they share its PCIe link, and a ``net`` without
``dev`` is a part of a NIC that NCCL has fused with others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from topoplan.errors import TopologyError
from topoplan.formats.nccl.attributes import (
    Findings,
    GivenRates,
    needed,
    stated,
    stated_rate,
    whole_number,
)
from topoplan.formats.nccl.cpu import cpu_number
from topoplan.formats.nccl.pci import PciNode, device_kind
from topoplan.formats.nccl.xml_tree import Element
from topoplan.hosts.host import HostGpu, HostNic, NvlinkBundle, bus_id, bus_id_order
from topoplan.hosts.nccl_rates import gcn_name, nvlink_bandwidth, xgmi_bandwidth
from topoplan.topology import FASTEST, MOST_WIRES, facts
from topoplan.units import exact, gigabytes_from_gigabits, nearest_float, summed

_HIDDEN = "fffffff:"
"""Beginning of the target that NCCL writes for a far end which a virtual machine cannot see: a switch."""

NO_NVLINKS = "no gpu element, so that NVLinks are not known; --merge adds them from another description"


def host_gpus(nodes: Sequence[PciNode], rates: GivenRates, findings: Findings) -> tuple[HostGpu, ...]:
    """The GPUs among the ``pci`` elements, in ascending order of their numbers.

    Raises
    ------
    TopologyError
        An attribute without which NCCL fails is missing, or a number is out of range.
    """
    ends = {node.device.busid: node.device.kind for node in nodes}
    gpus = []
    elements = [node for node in nodes if node.device.kind == "gpu"]
    for number, node in _numbered(elements, findings):
        parts = node.element.all("gpu")
        if not parts:
            findings.add(NO_NVLINKS, node.device.busid)
            gpus.append(_host_gpu(number, node, Element("gpu", node.element.line), ()))
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
    """Numbers by ``dev``, else as the driver counts: by bus id."""
    numbers = [whole_number(gpu, "dev") for node in nodes for gpu in node.element.all("gpu")[:1]]
    known = [number for number in numbers if number is not None and number >= 0]
    if len(set(known)) == len(nodes):
        if sorted(known) != list(range(len(nodes))):
            findings.add(
                "numbers of GPUs are their dev; options such as --gpus count the GPUs of the file from 0"
            )
        return sorted(zip(known, nodes, strict=True), key=lambda pair: pair[0])
    if nodes:
        findings.add("GPUs are numbered by bus id, as the driver counts: dev is not stated, or there twice")
    return list(enumerate(sorted(nodes, key=lambda node: bus_id_order(node.device.busid))))


def _host_gpu(
    number: int, node: PciNode, gpu: Element, bundles: tuple[NvlinkBundle, ...], *, c2c: float = 0.0
) -> HostGpu:
    gcn = stated(gpu, "gcn")
    # On an AMD GPU ``sm`` is the number of its compute units.
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


def _c2c(gpu: Element, findings: Findings, busid: str) -> float:
    """GB/s per direction of the chip-to-chip link to the CPU; NCCL states MB/s of one link."""
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
            findings.add("c2c with a bw or count that is none above zero; left out", busid)
    return nearest_float(total)


class _Bundles:
    """Reader of the ``nvlink`` and ``xgmi`` elements of one GPU; equal far ends are one bundle."""

    def __init__(self, busid: str, ends: Mapping[str, str], rates: GivenRates, findings: Findings) -> None:
        self.busid = busid
        self.ends = ends
        self.rates = rates
        self.findings = findings

    def read(self, gpu: Element) -> tuple[NvlinkBundle, ...]:
        sums: dict[tuple[str, str], tuple[int, Fraction]] = {}
        for link in gpu.all("nvlink", "xgmi"):
            needed(link, "count")
            count = whole_number(link, "count") or 0
            if count > MOST_WIRES:
                raise TopologyError(
                    f"line {link.line}: {link.name} count {count} is too large; no GPU has more than {MOST_WIRES} links"
                )
            if count < 1:
                self.findings.add(f"{link.name} with a count that is none above zero; left out", self.busid)
                continue
            end = self._far_end(link)
            links, bandwidth = sums.get(end, (0, Fraction(0)))
            sums[end] = (links + count, bandwidth + self._bandwidth(link, gpu, count))
        return tuple(NvlinkBundle(*end, count, nearest_float(rate)) for end, (count, rate) in sums.items())

    def _far_end(self, link: Element) -> tuple[str, str]:
        """Kind of the far end as `NvlinkBundle` has it, and its bus id where it is a GPU."""
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

    def _bandwidth(self, link: Element, gpu: Element, count: int) -> Fraction:
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
                f"sm is not stated; {nvlink_bandwidth(80):g} GB/s taken for an NVLink (--nvlink-gbps sets it)",
                self.busid,
            )
        return count * exact(nvlink_bandwidth(80 if sm is None else sm))


_UNKNOWN_SPEED = 10_000
"""Mb/s where none above zero is stated, as in NCCL."""

FASTEST_NIC = 1_000_000_000
"""Mb/s beyond which no NIC is meant."""


@dataclass(frozen=True, slots=True)
class _Ports:
    """What the ``net`` elements of one NIC say together: Mb/s, names, and the lowest ``dev``."""

    speed: int
    speed_known: bool
    adapter: str
    dev: int | None

    def facts(self) -> tuple[tuple[str, str], ...]:
        gigabits = f"{self.speed // 1000 if self.speed % 1000 == 0 else self.speed / 1000}"
        return facts(adapter=self.adapter, gigabits=gigabits if self.speed_known else None)


def host_nics(system: Element, nodes: Sequence[PciNode], findings: Findings) -> tuple[HostNic, ...]:
    """The NICs, in the order of ``dev`` where they have one, then in that of the file.

    Raises
    ------
    TopologyError
        A speed is out of range.
    """
    reader = _Reader(any(_has_dev(net) for net in _all_nets(system, nodes)), findings)
    found = [*reader.on_pcie(nodes), *reader.on_cpus(system)]
    return tuple(nic for dev, nic in sorted(found, key=lambda pair: (pair[0] is None, pair[0] or 0)))


def _all_nets(system: Element, nodes: Sequence[PciNode]) -> list[Element]:
    places = [*(node.element for node in nodes), *system.all("cpu")]
    return [net for place in places for nic in place.all("nic") for net in nic.all("net")]


def _has_dev(net: Element) -> bool:
    return "dev" in net.attributes


@dataclass(frozen=True, slots=True)
class _Reader:
    """``numbered``: some ``net`` has a ``dev``, so that those without one do not count."""

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

    def on_cpus(self, system: Element) -> list[tuple[int | None, HostNic]]:
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

    def _counted(self, nets: Sequence[Element]) -> list[Element]:
        return [net for net in nets if _has_dev(net) or not self.numbered]

    def _ports(self, nets: Sequence[Element], place: str) -> _Ports:
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
                    f"speed of a NIC is none above zero; {_UNKNOWN_SPEED // 1000} Gb/s taken, as NCCL does",
                    stated(net, "name") or place,
                )
            speeds.append(speed if speed > 0 else _UNKNOWN_SPEED)
        names = dict.fromkeys(stated(net, "name") for net in nets)
        devs = [dev for net in nets if (dev := whole_number(net, "dev")) is not None]
        known = bool(nets) and all("speed" not in net.attributes.get("assumed", "").split() for net in nets)
        return _Ports(sum(speeds), known, "+".join(name for name in names if name), min(devs, default=None))
