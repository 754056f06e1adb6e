"""Write a machine as a topology file for NCCL (``NCCL_TOPO_FILE``), or RCCL for AMD GPUs, with notes.

The file holds what NCCL needs: CPUs, the PCIe tree below them, GPUs with their NVLinks, NICs. NCCL works with rates of
its own, by processor, compute capability and PCIe generation; the nearest ones are chosen, and notes name omissions,
assumptions and differing rates. The machine's own figures are attributes that NCCL ignores and `topoplan.load` parses:
``name``, ``model``, ``bandwidth`` and ``socket`` in GB/s, ``peer_access`` in seconds, and ``assumed``, the attributes
of an element that NCCL needs and the machine does not state. Sources: ``src/graph/xml.cc``, ``topo.cc`` and ``topo.h``
of NCCL (2.27 to 2.30) and RCCL. NCCL 2.30 makes of the file what it makes of the machine itself. Deliberately absent: a
network, several servers, partitions of a GPU. NCCL asks the driver about a GPU that lists no NVLink.

NCCL finds a NIC in the file by the operating system's name of its network device, or else by its bus id, and then adds
the network device itself: a NIC without known name and speed needs no ``net`` element.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fractions import Fraction

from topoplan.engines.exported import Exported, one_server
from topoplan.engines.nccl.identities import (
    CpuIdentity,
    bus_ids,
    cpu_identity,
    cpu_mask,
    gpu_numbers,
    numa_nodes,
)
from topoplan.engines.nccl.xml_tree import NcclHostTree, gpu_links, host_tree, nccl_xml
from topoplan.errors import UsageError
from topoplan.machine.hardware import (
    GpuIdentity,
    counted_bandwidth,
    direct_to_nic,
    gpu_identity,
    is_amd,
    nearest_pcie,
    nvlink_bandwidth,
    xgmi_bandwidth,
)
from topoplan.machine.host_topology import SWITCH
from topoplan.machine.topology import Device, Topology
from topoplan.reading.nccl.topology_elements import XmlElement
from topoplan.units import exact, listed

_KEPT_FACTS = {
    "gpu": {"gcn", "pci", "sm"},
    "cpu": {"arch", "cpus", "family", "model", "vendor"},
    "nic": {"adapter", "gigabits", "pci"},
    "pcie": {"pci"},
}
_SERVER = "s0"


def _bus_id_notes(devices: list[Device]) -> list[str]:
    if not any(device.kind == "gpu" for device in devices):
        return []
    return [
        f"bus ids are invented for {listed(device.name for device in devices)}: NCCL finds GPUs by bus id, so put in "
        "those of nvidia-smi before a run"
    ]


def _guess_notes(gpus: Mapping[str, GpuIdentity]) -> list[str]:
    guessed = [name for name, identity in gpus.items() if identity.guessed]
    if not guessed:
        return []
    gcn = gpus[guessed[0]].gcn
    if gcn:
        return [f"gcn {gcn} is assumed for {listed(guessed)}, whose model does not state it"]
    return [
        f"sm is left to the driver, which NCCL asks, for {listed(guessed)}, whose model does not state it"
    ]


def _driver_nvlink_notes(machine: Topology, gpus: Mapping[str, GpuIdentity]) -> list[str]:
    """Return a note on GPUs without NVLinks: NCCL then asks the driver, and the file cannot state that none exist."""
    joined = {link.src for link in machine.links if link.channel == "nvlink"}
    bare = [name for name in gpus if name not in joined]
    return [f"NCCL asks the driver for NVLinks of {listed(bare)}, as none are stated here"] if bare else []


def _rate_notes(
    machine: Topology, tree: NcclHostTree, gpus: Mapping[str, GpuIdentity], cpus: Mapping[str, CpuIdentity]
) -> list[str]:
    counted: dict[str, list[str]] = {}

    def compare(subject: str, stated: Fraction, own: Fraction, place: str) -> None:
        if stated != own:
            line = (
                f"NCCL counts {float(own):g} GB/s for {subject}, where the machine states {float(stated):g}"
            )
            counted.setdefault(line, []).append(place)

    for link in machine.links:
        if link.channel == "nvlink" and link.src in gpus:
            identity = gpus[link.src]
            if identity.guessed and not identity.gcn:
                continue
            own = xgmi_bandwidth(identity.gcn) if identity.gcn else nvlink_bandwidth(identity.capability)
            subject = "an XGMI link" if identity.gcn else "an NVLink"
            compare(subject, exact(link.bandwidth) / link.count, exact(own), link.src)
    for name, bandwidth in tree.bandwidth.items():
        compare("the PCIe link", exact(bandwidth), counted_bandwidth(*nearest_pcie(bandwidth)), name)
    for name, rate in tree.socket.items():
        compare("the way to another CPU", exact(rate), exact(cpus[name].rate), name)
    return [f"{line}: {listed(dict.fromkeys(places))}" for line, places in counted.items()]


def _omission_notes(machine: Topology, tree: NcclHostTree, nodes: Mapping[str, int]) -> list[str]:
    unsaid: dict[str, list[str]] = {}

    def omit(fact: str, place: str) -> None:
        unsaid.setdefault(fact, []).append(place)

    for device in machine.devices:
        for key, _ in device.facts:
            if key not in _KEPT_FACTS.get(device.kind, ()):
                omit(f"fact {key}", device.name)
        as_read = (device.name, device.model, device.busid) == (SWITCH, "NVSwitch", "")
        if device.kind == "nvswitch" and not as_read:
            omit(f"name, model and bus id of an NVSwitch, which is read as {SWITCH}", device.name)
        placed = device.kind in ("gpu", "nic") and device.name in tree.above and device.numa is not None
        if placed and nodes[tree.cpu_of(device.name)] != device.numa:
            omit("a NUMA node that is not that of the CPU above", device.name)
        if device.kind == "pcie" and device.numa is not None:
            omit("the NUMA node of a switch", device.name)
    for link in machine.links:
        if link.latency is not None:
            omit("latency", f"{link.src}->{link.dst}")
        if link.access:
            omit("push and pull", f"{link.src}->{link.dst}")
        if link.shared is not None:
            omit("the GB/s of both directions together", f"{link.src}->{link.dst}")
        if link.channel == "c2c" and link.count > 1:
            omit("the number of c2c links, which are read as one", link.src)
    notes = [f"not in the file: {fact}: {listed(dict.fromkeys(places))}" for fact, places in unsaid.items()]
    if machine.servers and machine.servers != (_SERVER,):
        notes.append(f"not in the file: the name of server {machine.servers[0]}, which is read as {_SERVER}")
    return notes


MAX_ELEMENTS = 255
"""Elements that NCCL holds, less one: it needs a free one before it parses on (NCCL_TOPO_XML_MAX_NODES is 256)."""

_CLASS = {"pcie": "0x060400", "gpu": "0x030200", "nic": "0x020000"}
_AMD_CLASS = {**_CLASS, "gpu": "0x038000"}
_NVSWITCH_CLASS, _CPU_CLASS = "0x068000", "0x068001"
_CHIP_KEYS = ("vendor", "device", "subsystem_vendor", "subsystem_device")
_HIDDEN = "fffffff:ffff:ff"
"""Bus id that NCCL itself writes for an NVLink's far end if it cannot see the NVSwitch."""


def nccl_topo_xml(topology: Topology, *, server: str | None = None) -> Exported:
    """Return the topology file of a machine, or of one ``server`` of several.

    Ranks follow the order of the GPUs; ``dev`` is NVML's number (see `topoplan.engines.nccl.identities`). A UsageError
    names a device or link that has no place in the file, or says that it exceeds `MAX_ELEMENTS`.

    >>> import topoplan
    >>> text = nccl_topo_xml(topoplan.load("dgx-2")).text
    >>> print(next(line.strip() for line in text.splitlines() if "<nvlink" in line))
    <nvlink target="fffffff:ffff:ff" count="6" tclass="0x068000" bandwidth="150.0"/>
    """
    machine = one_server(topology, server, "a topology file of NCCL")
    if not machine.gpus:
        raise UsageError(f"{machine.name} has no GPU; a topology file of NCCL describes a machine with GPUs")
    writer = _TopologyWriter(machine)
    root = writer.system()
    if root.size > MAX_ELEMENTS:
        raise UsageError(
            f"{machine.name} takes {root.size} elements, and NCCL reads {MAX_ELEMENTS}; choose fewer GPUs with --gpus"
        )
    invented = [device for device in machine.devices if device.name in writer.invented]
    notes = (
        *writer.tree.notes,
        *_bus_id_notes(invented),
        *_guess_notes(writer.gpus),
        *_driver_nvlink_notes(machine, writer.gpus),
        *_rate_notes(machine, writer.tree, writer.gpus, writer.cpus),
        *_omission_notes(machine, writer.tree, writer.nodes),
        *writer.nvlink_notes,
    )
    kind = "RCCL" if writer.amd else "NCCL"
    title = f"topoplan: {kind} topology of {machine.name}, for NCCL_TOPO_FILE"
    return Exported(nccl_xml(root, (title, *notes)), notes)


class _TopologyWriter:
    """Everything that elements are made of."""

    def __init__(self, machine: Topology) -> None:
        gpus = [device for device in machine.devices if device.kind == "gpu"]
        cpus = [device for device in machine.devices if device.kind == "cpu"]
        self.machine = machine
        self.tree = tree = host_tree(machine)
        self.links, self.nvlink_notes = gpu_links(machine, tree)
        self.busid, self.invented = bus_ids([one for one in machine.devices if one.name in tree.above])
        self.amd = is_amd(gpus)
        self.numbers = gpu_numbers(machine.gpus)
        self.nodes, self.unnumbered = numa_nodes(machine, tree)
        self.cpus = {cpu.name: cpu_identity(cpu, tree.socket.get(cpu.name)) for cpu in cpus}
        self.gpus = {gpu.name: gpu_identity(gpu, amd=self.amd) for gpu in gpus}
        self.named_nics = any(device.fact("adapter") for device in machine.devices)

    def system(self) -> XmlElement:
        cpus = tuple(self._cpu(device) for device in self.machine.devices if device.kind == "cpu")
        version = "2" if self.amd else "1"
        peer_access = " ".join(f"{gpus}:{seconds!r}" for gpus, seconds in self.machine.peer_access)
        known = [("version", version), ("name", self.machine.name), ("peer_access", peer_access)]
        return XmlElement("system", _drop_empty(known), cpus)

    def _cpu(self, device: Device) -> XmlElement:
        identity = self.cpus[device.name]
        known = [
            ("numaid", str(self.nodes[device.name])),
            *identity.attributes,
            ("name", device.name),
            ("model", device.model),
        ]
        if device.name in self.tree.socket:
            known.append(("socket", repr(float(self.tree.socket[device.name]))))
        known.append(("affinity", cpu_mask(device.fact("cpus"))))
        known.append(_assumed(*(["numaid"] if device.name in self.unnumbered else []), *identity.invented))
        return XmlElement("cpu", self._settled(known, "affinity"), self._below(device.name))

    def _settled(self, known: list[tuple[str, str]], *left: str) -> dict[str, str]:
        """Return attributes of a CPU or switch, with empty values for the ones that NCCL would query.

        If the file names network devices, ranks keep CPUs and switches that are not above their GPU and query nothing
        about them; since 2.21 NCCL then takes one that two ranks describe differently for two.
        """
        found = _drop_empty(known)
        if not self.named_nics:
            return found
        return found | {key: "" for key in left if key not in found}

    def _below(self, name: str) -> tuple[XmlElement, ...]:
        pcie: list[XmlElement] = []
        plain: list[XmlElement] = []
        for child in self.tree.children[name]:
            device = self.machine.device(child)
            # NCCL puts a NIC with a name but no place on PCIe below the CPU.
            adapter = device.fact("adapter")
            virtual = device.kind == "nic" and adapter and "+" not in adapter and not device.busid
            if virtual and name in self.cpus:
                plain += net_elements(device, self._net_number(child), bandwidth=self.tree.bandwidth[child])
            else:
                pcie.append(self._pci(device))
        return (*pcie, *plain)

    def _pci(self, device: Device) -> XmlElement:
        bandwidth = self.tree.bandwidth[device.name]
        speed, lanes = nearest_pcie(bandwidth)
        known = [
            ("busid", self.busid[device.name]),
            ("class", (_AMD_CLASS if self.amd else _CLASS)[device.kind]),
            *_chip(device.fact("pci")),
            ("link_speed", speed),
            ("link_width", str(lanes)),
            ("name", device.name),
            ("model", device.model),
            ("bandwidth", repr(float(bandwidth))),
            _assumed(*(["busid"] if device.name in self.invented else [])),
        ]
        if device.kind == "pcie":
            return XmlElement("pci", self._settled(known, *_CHIP_KEYS), self._below(device.name))
        if device.kind == "nic":
            return XmlElement("pci", _drop_empty(known), net_elements(device, self._net_number(device.name)))
        return XmlElement("pci", _drop_empty(known), (self._gpu(device),))

    def _gpu(self, device: Device) -> XmlElement:
        identity = self.gpus[device.name]
        known = [
            ("dev", str(self.numbers[device.name])),
            *identity.attributes,
            ("rank", str(self.machine.gpus.index(device.name))),
            ("gdr", "1" if direct_to_nic(device) else "0"),
            _assumed(*identity.invented),
        ]
        links = self.links[device.name]
        bundles = [self._nvlink(*bundle) for bundle in links.nvlinks]
        if links.c2c:
            one = max(1, round(exact(links.c2c.bandwidth) * 1000 / links.c2c.count))
            wire = {"bw": str(one), "count": str(links.c2c.count)}
            bundles.append(XmlElement("c2c", wire | {"bandwidth": repr(float(links.c2c.bandwidth))}))
        return XmlElement("gpu", _drop_empty(known), tuple(bundles))

    def _nvlink(self, end: str, count: int, bandwidth: float) -> XmlElement:
        if end in self.gpus:
            target, target_class = self.busid[end], (_AMD_CLASS if self.amd else _CLASS)["gpu"]
        else:
            target, target_class = _HIDDEN, _CPU_CLASS if end else _NVSWITCH_CLASS
        known = {"target": target, "count": str(count), "tclass": target_class}
        return XmlElement("xgmi" if self.amd else "nvlink", {**known, "bandwidth": repr(float(bandwidth))})

    def _net_number(self, name: str) -> int:
        """Return the first number of a NIC's network devices."""
        number = 0
        for device in self.machine.devices:
            if device.name == name:
                break
            if device.kind == "nic":
                number += max(1, len(device.fact("adapter").split("+")))
        return number


def _drop_empty(attributes: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {key: value for key, value in attributes if value}


def _assumed(*names: str) -> tuple[str, str]:
    return "assumed", " ".join(names)


def _chip(pci: str) -> list[tuple[str, str]]:
    """Return attributes for the fact ``pci``, such as 10de:1db1:10de:1212."""
    parts = pci.split(":")
    if len(parts) != len(_CHIP_KEYS):
        return []
    return [(key, f"0x{part}") for key, part in zip(_CHIP_KEYS, parts, strict=True)]


_GIGABITS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")


def net_elements(nic: Device, number: int, *, bandwidth: float | None = None) -> tuple[XmlElement, ...]:
    """Return the ``nic`` element of a NIC, if it needs one.

    Fact ``adapter`` is the name of its network device, or several joined by +; fact ``gigabits`` its speed in Gb/s.
    ``number`` is ``dev`` of its first network device, ``bandwidth`` GB/s per direction for a NIC directly below the
    CPU, without a place on PCIe.

    >>> from topoplan.machine.topology import facts
    >>> nic = Device("nic0", "nic", facts=facts(adapter="mlx5_0", gigabits=100))
    >>> net_elements(nic, 0)[0].children[0].attributes
    {'name': 'mlx5_0', 'dev': '0', 'speed': '100000'}
    """
    adapters, gigabits = nic.fact("adapter"), nic.fact("gigabits")
    speed = round(Fraction(gigabits) * 1000) if _GIGABITS.fullmatch(gigabits) else 0
    if not adapters and not speed:
        return ()
    names = adapters.split("+")
    nets = []
    for place, name in enumerate(names):
        part = speed // len(names) + (place < speed % len(names))
        known = [("name", name), ("dev", str(number + place)), ("speed", str(part) if part else "")]
        if bandwidth is not None:
            known.append(("bandwidth", repr(float(bandwidth))))
        # Without a speed NCCL asks the network; a reader must not take its default for a fact.
        known.append(("assumed", "" if part else "speed"))
        nets.append(XmlElement("net", _drop_empty(known)))
    own = (("name", nic.name), ("model", nic.model)) if bandwidth is not None else ()
    return (XmlElement("nic", _drop_empty(own), tuple(nets)),)
