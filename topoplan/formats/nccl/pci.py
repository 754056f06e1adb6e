"""The ``pci`` elements of a topology file as a PCIe tree, and what is at its ends.

What a ``pci`` element is follows from its children, then from the beginning of its class, as in NCCL
(``kvDictPciClass`` in ``src/graph/topo.cc``) and RCCL, which adds 0x120000. A class that neither knows is a switch, as
NCCL takes it; at the end of a branch such a device can be anything, and is left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from topoplan.errors import TopologyError
from topoplan.formats.nccl.attributes import (
    Findings,
    GivenRates,
    needed_bus_id,
    stated,
    stated_rate,
    whole_number,
)
from topoplan.formats.nccl.cpu import cpu_number
from topoplan.formats.nccl.xml_tree import Element
from topoplan.hosts.host import PciDevice
from topoplan.hosts.nccl_rates import UNKNOWN_WIDTH, lane_bandwidth, pcie_bandwidth

CLASSES = {
    "0x060400": "bridge",
    "0x080100": "bridge",
    "0x068000": "nvswitch",
    "0x068001": "cpu",
    "0x03": "gpu",
    "0x02": "nic",
    "0x120000": "gpu",
}
"""What a PCI class is by its beginning, the first that fits."""

MOST_LANES = 64
"""Lanes of a PCIe link, four of 16 that NCCL joins; the kernel writes 255 for a number that it does not know."""

_ASSUMED_LINK = (
    "link_speed or link_width is not stated; PCIe of generation 3 or "
    f"{UNKNOWN_WIDTH} lanes taken for it, as NCCL does (--pcie-gbps sets the rate)"
)


@dataclass(frozen=True, slots=True)
class PciNode:
    """A ``pci`` element.

    Parameters
    ----------
    device : PciDevice
    element : Element
    """

    device: PciDevice
    element: Element


def device_kind(pci_class: str) -> str:
    """What a device of this class is, as in `CLASSES`; empty for an unknown one.

    Examples
    --------
    >>> device_kind("0x030200"), device_kind("0x020700"), device_kind("0x120000"), device_kind("0x088000")
    ('gpu', 'nic', 'gpu', '')
    """
    return next((kind for start, kind in CLASSES.items() if pci_class.lower().startswith(start)), "")


def pci_nodes(
    system: Element, rates: GivenRates, findings: Findings, *, gpu_ids: Collection[str] = ()
) -> tuple[PciNode, ...]:
    """All ``pci`` elements of a system, a bridge before what is below it.

    Parameters
    ----------
    system : Element
    rates : GivenRates
    findings : Findings
        Takes the notes.
    gpu_ids : collection of str
        Bus ids that are known from elsewhere to be those of GPUs, for elements that state no class.

    Raises
    ------
    TopologyError
        A bus id is missing, none, or there twice.
    """
    reader = _Reader(rates, findings, frozenset(gpu_ids))
    return tuple(
        node
        for cpu in system.all("cpu")
        for pci in cpu.all("pci")
        for node in reader.walk(pci, "", cpu_number(cpu))
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    rates: GivenRates
    findings: Findings
    gpu_ids: frozenset[str]
    lines: dict[str, int] = field(default_factory=dict)

    def walk(self, pci: Element, parent: str, cpu: int) -> Iterator[PciNode]:
        busid = needed_bus_id(pci)
        if busid in self.lines:
            raise TopologyError(
                f"line {pci.line}: pci busid {busid} is there twice, first in line {self.lines[busid]}; "
                "a bus id names one device of a server"
            )
        self.lines[busid] = pci.line
        kind = self._kind(pci, busid)
        device = PciDevice(
            busid,
            kind,
            parent,
            cpu,
            self._bandwidth(pci, busid) if kind in ("bridge", "gpu", "nic") else 0.0,
            chip=_chip(pci),
            name=stated(pci, "name"),
            model=stated(pci, "model"),
        )
        yield PciNode(device, pci)
        below = pci.all("pci")
        if kind == "bridge":
            for child in below:
                yield from self.walk(child, busid, cpu)
        elif below:
            self.findings.add(
                "has pci elements below it though it is no switch; left out, as NCCL does", busid
            )

    def _kind(self, pci: Element, busid: str) -> str:
        known = device_kind(pci.attributes.get("class", ""))
        if pci.all("gpu"):
            if known != "gpu":
                self.findings.add("has a gpu element but not the class of a GPU; taken as a GPU", busid)
            return "gpu"
        if pci.all("nic"):
            return "nic"
        if known:
            return "other" if known == "cpu" else known
        if "class" not in pci.attributes and busid in self.gpu_ids:
            return "gpu"
        if pci.all("pci"):
            self.findings.add("class is unknown or not stated; taken as a PCIe switch, as NCCL does", busid)
            return "bridge"
        self.findings.add("class is unknown or not stated; left out", busid)
        return "other"

    def _bandwidth(self, pci: Element, busid: str) -> float:
        exact = stated_rate(pci, "bandwidth")
        if self.rates.pcie is not None or exact is not None:
            return self.rates.pcie or exact or 0.0
        speed = pci.attributes.get("link_speed", "")
        width = whole_number(pci, "link_width") or 0
        if not 0 < width <= MOST_LANES:
            width = 0
        if not width or lane_bandwidth(speed) is None:
            self.findings.add(_ASSUMED_LINK, busid)
        return pcie_bandwidth(speed, width)


def _chip(pci: Element) -> str:
    """The fact ``pci``; empty unless vendor and device are stated."""
    ids = []
    for attribute in ("vendor", "device", "subsystem_vendor", "subsystem_device"):
        number = whole_number(pci, attribute) if stated(pci, attribute) else None
        ids.append(0 if number is None or not 0 <= number <= 0xFFFF else number)
    return ":".join(f"{number:04x}" for number in ids) if ids[0] and ids[1] else ""
