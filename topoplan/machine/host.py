"""Describe one server before it is a Topology: its PCIe tree, the far ends of its NVLinks, its NICs.

The probe and the reader of NCCL's topology files make this description; `topoplan.machine.host_topology` converts it to
a Topology. Bandwidths are in GB/s per direction. PCI bus IDs identify devices, written as the kernel writes them
(``0000:06:00.0``, see `bus_id`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from topoplan.errors import TopologyError

PCI_KINDS = ("bridge", "port", "gpu", "nic", "nvswitch", "other")

NVLINK_ENDS = ("gpu", "nvswitch", "cpu", "unknown")

_BUS_ID = re.compile(r"([0-9a-f]{1,8}):([0-9a-f]{1,2}):([01]?[0-9a-f])(?:\.([0-7]))?")


def bus_id(text: str) -> str:
    """Return a PCI bus ID as the kernel writes it; drivers print longer domains and capitals.

    TopologyError if the text is not a bus ID.

    >>> bus_id("00000000:0A:00.0"), bus_id("0001:00:00")
    ('0000:0a:00.0', '0001:00:00.0')
    """
    match = _BUS_ID.fullmatch(text.strip().lower())
    if not match:
        raise TopologyError(f"{text[:40]!r} is not a PCI bus id such as 0000:06:00.0")
    domain, bus, device, function = match.groups()
    return f"{int(domain, 16):04x}:{int(bus, 16):02x}:{int(device, 16):02x}.{function or 0}"


def plain_bus_id(text: str) -> str:
    """Return a PCI bus ID as `bus_id`, and any other text unchanged.

    >>> plain_bus_id("00000000:0A:00.0"), plain_bus_id("slot 3")
    ('0000:0a:00.0', 'slot 3')
    """
    try:
        return bus_id(text)
    except TopologyError:
        return text


def bus_id_order(busid: str) -> tuple[int, ...]:
    """Return the sort key of a bus ID, by numbers of domain, bus, device and function, as drivers count devices.

    >>> sorted(["10000:01:00.0", "2000:01:00.0"], key=bus_id_order)
    ['2000:01:00.0', '10000:01:00.0']
    """
    return tuple(int(part, 16) for part in re.split("[:.]", busid))


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
