"""Describe one server before it is a Topology: its PCIe tree, the far ends of its NVLinks, its NICs.

The probe and the reader of NCCL's topology files make this description; `topoplan.machine.host_topology` makes the
Topology of it. Bandwidths are in GB/s per direction. PCI bus ids identify devices, written as the kernel writes them
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
    """A PCI bus id as the kernel writes it; drivers print longer domains and capitals.

    Raises
    ------
    TopologyError
        It is none.

    Examples
    --------
    >>> bus_id("00000000:0A:00.0"), bus_id("0001:00:00")
    ('0000:0a:00.0', '0001:00:00.0')
    """
    match = _BUS_ID.fullmatch(text.strip().lower())
    if not match:
        raise TopologyError(f"{text[:40]!r} is no PCI bus id such as 0000:06:00.0")
    domain, bus, device, function = match.groups()
    return f"{int(domain, 16):04x}:{int(bus, 16):02x}:{int(device, 16):02x}.{function or 0}"


def plain_bus_id(text: str) -> str:
    """As `bus_id`, but what is none stays as it is, and so is equal only to itself.

    Examples
    --------
    >>> plain_bus_id("00000000:0A:00.0"), plain_bus_id("slot 3")
    ('0000:0a:00.0', 'slot 3')
    """
    try:
        return bus_id(text)
    except TopologyError:
        return text


def bus_id_order(busid: str) -> tuple[int, ...]:
    """Sorts bus ids of `bus_id` as drivers count devices: by domain, bus, device and function, as numbers.

    Examples
    --------
    >>> sorted(["10000:01:00.0", "2000:01:00.0"], key=bus_id_order)
    ['2000:01:00.0', '10000:01:00.0']
    """
    return tuple(int(part, 16) for part in re.split("[:.]", busid))


@dataclass(frozen=True, slots=True)
class HostCpu:
    """A NUMA node.

    Parameters
    ----------
    number : int
        NUMA node as the operating system counts; -1 where it does not say.
    socket_bandwidth : float
        GB/s from here to any other NUMA node.
    model : str
        Such as ``Xeon E5-2698 v4``; may be empty.
    facts : tuple of (str, str)
        See `topoplan.machine.topology.FACTS`.
    name : str
        Name of the device; empty for ``cpu0``, ``cpu1``, … in order.
    """

    number: int
    socket_bandwidth: float
    model: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    name: str = ""


@dataclass(frozen=True, slots=True)
class PciDevice:
    """A node of the PCIe tree: a bridge, or what is plugged in.

    Parameters
    ----------
    busid : str
        See `bus_id`.
    kind : str
        One of `PCI_KINDS`. A bridge is a switch, or its upstream port, which stands for it; root ports and downstream
        ports are ports, where a description lists them at all.
    parent : str
        Bus id of the bridge above; empty directly below a host bridge.
    cpu : int
        NUMA node's `HostCpu.number`.
    bandwidth : float
        GB/s per direction to what is above.
    chip : str
        The fact ``pci``: two levels of one Broadcom chip are a single switch.
    name, model : str
        Of the device that a bridge becomes if it is a switch; empty for ``pcie0``, ``pcie1``, … in order.
    host_bridge : str
        The fact of that name; empty where it is not known.
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
    """NVLinks (or XGMI links) from one GPU to one far end.

    Parameters
    ----------
    end : str
        One of `NVLINK_ENDS`; unknown where nothing tells what is there.
    target : str
        Bus id of the far end, empty where it is not visible.
    count : int
        Links that are up.
    bandwidth : float
        GB/s per direction of all of them.
    """

    end: str
    target: str
    count: int
    bandwidth: float


@dataclass(frozen=True, slots=True)
class HostGpu:
    """A GPU.

    Parameters
    ----------
    busid : str
        Of its `PciDevice`.
    number : int
        The n of ``gpu<n>``, as the driver counts.
    model : str
    nvlinks : tuple of NvlinkBundle
    c2c : float
        GB/s per direction of its chip-to-chip link to its CPU; 0 without one.
    facts : tuple of (str, str)
    name : str
        Name of the device; empty for ``gpu<number>``.
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
    """A NIC.

    Parameters
    ----------
    busid : str
        Of its `PciDevice`; empty for a NIC of which only the CPU is known.
    model : str
    facts : tuple of (str, str)
        ``adapter`` and ``gigabits`` where known.
    cpu : int
        NUMA node, for a NIC without bus id.
    bandwidth : float
        GB/s per direction to that CPU, for a NIC without bus id.
    name : str
        Name of the device; empty for ``nic0``, ``nic1``, … in order.
    """

    busid: str
    model: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    cpu: int = -1
    bandwidth: float = 0.0
    name: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """One server.

    Parameters
    ----------
    name : str
    cpus : tuple of HostCpu
        In ascending order of number.
    tree : tuple of PciDevice
        A bridge stands before what is below it.
    gpus : tuple of HostGpu
        In ascending order of number.
    nics : tuple of HostNic
    source : str
        Where the description comes from.
    notes : tuple of str
        What was assumed or is amiss, one line each.
    """

    name: str
    cpus: tuple[HostCpu, ...]
    tree: tuple[PciDevice, ...]
    gpus: tuple[HostGpu, ...]
    nics: tuple[HostNic, ...]
    source: str = ""
    notes: tuple[str, ...] = ()
