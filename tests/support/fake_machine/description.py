"""A machine as the fakes are told of it: PCIe tree, GPUs with their NVLinks, NICs, CPUs, and what does not work.

One description is written twice, as the text that the fake NVML answers from (`fake_machine.nvml_text`) and as a sysfs
tree (`fake_machine.sysfs`), so both agree unless a description makes them disagree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from uuid import NAMESPACE_OID, uuid5

BRIDGE = "0x060400"
GPU_3D = "0x030200"
NVSWITCH = "0x068000"
ETHERNET = "0x020000"
INFINIBAND = "0x020700"

SPEEDS = {1: "2.5", 2: "5.0", 3: "8.0", 4: "16.0", 5: "32.0"}


@dataclass(frozen=True, slots=True)
class Pci:
    """A PCI device, with what is below it.

    Parameters
    ----------
    busid : str
        As the kernel writes it.
    ids : str
        Vendor, device, subsystem vendor and subsystem device, as ``10b5:8764:10b5:8764``.
    pci_class : str
    generation, width : int
        Fastest that the link to what is above can do; generation 0: the kernel writes ``Unknown`` and width 0.
    current_generation : int
        0 for the fastest.
    children : tuple of Pci
    """

    busid: str
    ids: str
    pci_class: str = BRIDGE
    generation: int = 3
    width: int = 16
    current_generation: int = 0
    children: tuple[Pci, ...] = ()


@dataclass(frozen=True, slots=True)
class Root:
    """A host bridge (``0000:00``) with the NUMA node (-1: not told) of all that is below."""

    bus: str
    numa: int
    children: tuple[Pci, ...]


@dataclass(frozen=True, slots=True)
class Nvlink:
    """One end of an NVLink.

    Parameters
    ----------
    remote : str
        Bus id of the far end as the kernel writes it; ``hidden`` for a switch that the machine does not show.
    kind : str
        Of the far end: gpu, switch, cpu or unknown.
    megabytes : int
        Speed in MB/s.
    up : bool
    """

    remote: str
    kind: str
    megabytes: int
    up: bool = True


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as NVML describes it.

    Parameters
    ----------
    busid, name : str
    capability : tuple of int
        Compute capability.
    nvlink_version : int
        ``nvmlNvlinkVersion_t``: 1 for P100, 2 for V100, 4 for A100, 6 for H100.
    links : tuple of Nvlink
    pstate : int
        8 is idle: the PCIe link then runs at generation 1.
    fabric : tuple of int
        State, status, clique, health mask, health summary.
    c2c_links : int
    mig : tuple of int
        Mode now, mode after the next reset, most instances; empty where the GPU knows no MIG.
    instances : tuple of str
        Name of each MIG instance.
    memory_node : int
        NUMA node of the GPU's own memory; -1 without one.
    """

    busid: str
    name: str
    capability: tuple[int, int]
    nvlink_version: int = 0
    links: tuple[Nvlink, ...] = ()
    pstate: int = 0
    fabric: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    c2c_links: int = 0
    mig: tuple[int, ...] = ()
    instances: tuple[str, ...] = ()
    memory_node: int = -1


@dataclass(frozen=True, slots=True)
class Nic:
    """A network device of Linux: RDMA adapter, network interface, or both.

    Parameters
    ----------
    busid : str
        Empty for a virtual interface.
    adapter : str
        Such as ``mlx5_0``; empty without RDMA.
    rate : str
        As in the port's file ``rate``: ``100 Gb/sec (4X EDR)``.
    layer : str
        InfiniBand or Ethernet.
    interface : str
        Such as ``eno1``; empty without one.
    megabits : int or None
        As in the interface's file ``speed``; None: reading it is an error, as where there is no carrier.
    up : bool
    """

    busid: str
    adapter: str = ""
    rate: str = ""
    layer: str = "InfiniBand"
    interface: str = ""
    megabits: int | None = None
    up: bool = True


@dataclass(frozen=True, slots=True)
class Cpus:
    """All CPUs of the machine.

    Parameters
    ----------
    vendor, name : str
        Vendor as CPUID gives it; the name is empty on ARM, where ``/proc/cpuinfo`` has none.
    family, model : int
    nodes : tuple of str
        CPUs of each NUMA node, as ``0-19,40-59``; empty for a node of memory only.
    distances : tuple of tuple of int
        Between nodes, as the firmware's SLIT table.
    """

    vendor: str
    name: str
    family: int
    model: int
    nodes: tuple[str, ...]
    distances: tuple[tuple[int, ...], ...]

    def count(self) -> int:
        """How many CPUs there are."""
        return 1 + max(int(part.split("-")[-1]) for node in self.nodes if node for part in node.split(","))

    def near(self, node: int) -> str:
        """CPUs of a NUMA node; all of them where it is not told (-1)."""
        return self.nodes[node] if node >= 0 else f"0-{self.count() - 1}"


@dataclass(frozen=True, slots=True)
class FakeMachine:
    """A machine.

    Parameters
    ----------
    name : str
    cpus : Cpus
    roots : tuple of Root
    gpus : tuple of Gpu
        In NVML's order.
    nics : tuple of Nic
    driver : str
        Version; empty: no driver is installed.
    cuda : int
        Newest CUDA version that the driver supports, as NVML says it.
    library : str
        ``new``, ``old`` (newer functions are absent) or ``none``.
    p2p_across_sockets : bool
        Whether PCIe peer access works between NUMA nodes.
    refused : tuple of (int, int, int)
        Pairs of GPUs for which NVML refuses peer access, with ``nvmlGpuP2PStatus_t``.
    rules : tuple of str
        ``FUNCTION CODE [GPU [LINK]]``, see ``machine_text.c``.
    unreadable, absent : tuple of str
        Files of the sysfs tree, as paths from its root, that give an error when read, or are not there.
    """

    name: str
    cpus: Cpus
    roots: tuple[Root, ...]
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    driver: str = "535.161.08"
    cuda: int = 12020
    library: str = "new"
    p2p_across_sockets: bool = True
    refused: tuple[tuple[int, int, int], ...] = ()
    rules: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

    def uuid(self, of: str) -> str:
        """An identity that is the same in every run."""
        return str(uuid5(NAMESPACE_OID, f"{self.name} {of}"))

    def places(self) -> dict[str, tuple[Root, tuple[Pci, ...]]]:
        """Bus id to host bridge and PCI devices from the top down to the device itself."""
        return {chain[-1].busid: (root, chain) for root in self.roots for chain in _chains(root.children, ())}


def _chains(devices: tuple[Pci, ...], above: tuple[Pci, ...]) -> Iterator[tuple[Pci, ...]]:
    for device in devices:
        yield (*above, device)
        yield from _chains(device.children, (*above, device))


def pcie_switch(
    upstream: str, ids: str, below: dict[str, Pci], *, generation: int = 3, width: int = 16
) -> Pci:
    """A PCIe switch as the kernel shows it: an upstream port, then a downstream port (the keys) above each device."""
    ports = tuple(
        Pci(port, ids, generation=generation, width=device.width, children=(device,))
        for port, device in below.items()
    )
    return Pci(upstream, ids, generation=generation, width=width, children=ports)
