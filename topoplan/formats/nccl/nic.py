"""The NICs of a topology file: those with a place on PCIe, and those of which only the CPU is known.

As in NCCL, several functions of one PCI device are one NIC, since they share its PCIe link, and a ``net`` without
``dev`` is a part of a NIC that NCCL has fused with others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from topoplan.errors import TopologyError
from topoplan.formats.nccl.attributes import Findings, stated, stated_rate, whole_number
from topoplan.formats.nccl.cpu import cpu_number
from topoplan.formats.nccl.pci import PciNode
from topoplan.formats.nccl.xml_tree import Element
from topoplan.hosts.host import HostNic
from topoplan.topology import facts
from topoplan.units import gigabytes_from_gigabits

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
                        host_nic = replace(before[1], bandwidth=before[1].bandwidth + rate)
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
