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
    busid: str  # as the kernel writes it
    ids: str  # vendor, device, subsystem vendor and subsystem device, as ``10b5:8764:10b5:8764``
    pci_class: str = BRIDGE
    # fastest that the link to what is above can do; generation 0: the kernel writes ``Unknown`` and width 0
    generation: int = 3
    width: int = 16
    current_generation: int = 0  # 0 for the fastest
    children: tuple[Pci, ...] = ()


@dataclass(frozen=True, slots=True)
class Root:
    """A host bridge (``0000:00``) with the NUMA node (-1: not told) of all that is below."""

    bus: str
    numa: int
    children: tuple[Pci, ...]


@dataclass(frozen=True, slots=True)
class Nvlink:
    # bus id of the far end as the kernel writes it; ``hidden`` for a switch that the machine does not show
    remote: str
    kind: str  # of the far end: gpu, switch, cpu or unknown
    megabytes: int  # speed in MB/s
    up: bool = True


@dataclass(frozen=True, slots=True)
class Gpu:
    busid: str
    name: str
    capability: tuple[int, int]  # compute capability
    nvlink_version: int = 0  # ``nvmlNvlinkVersion_t``: 1 for P100, 2 for V100, 4 for A100, 6 for H100
    links: tuple[Nvlink, ...] = ()
    pstate: int = 0  # 8 is idle: the PCIe link then runs at generation 1
    # state, status, clique, health mask, health summary
    fabric: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    c2c_links: int = 0
    # mode now, mode after the next reset, most instances; empty where the GPU knows no MIG
    mig: tuple[int, ...] = ()
    instances: tuple[str, ...] = ()  # name of each MIG instance
    memory_node: int = -1  # NUMA node of the GPU's own memory; -1 without one


@dataclass(frozen=True, slots=True)
class Nic:
    """A network device of Linux: RDMA adapter, network interface, or both."""

    busid: str  # empty for a virtual interface
    adapter: str = ""  # such as ``mlx5_0``; empty without RDMA
    rate: str = ""  # as in the port's file ``rate``: ``100 Gb/sec (4X EDR)``
    layer: str = "InfiniBand"  # InfiniBand or Ethernet
    interface: str = ""  # such as ``eno1``; empty without one
    # as in the interface's file ``speed``; None: reading it is an error, as without a carrier
    megabits: int | None = None
    up: bool = True


@dataclass(frozen=True, slots=True)
class Cpus:
    vendor: str  # vendor as CPUID gives it; the name is empty on ARM, where ``/proc/cpuinfo`` has none
    name: str
    family: int
    model: int
    nodes: tuple[str, ...]  # CPUs of each NUMA node, as ``0-19,40-59``; empty for a node of memory only
    distances: tuple[tuple[int, ...], ...]  # between nodes, as the firmware's SLIT table

    def count(self) -> int:
        return 1 + max(int(part.split("-")[-1]) for node in self.nodes if node for part in node.split(","))

    def near(self, node: int) -> str:
        """CPUs of a NUMA node; all of them where it is not told (-1)."""
        return self.nodes[node] if node >= 0 else f"0-{self.count() - 1}"


@dataclass(frozen=True, slots=True)
class FakeMachine:
    name: str
    cpus: Cpus
    roots: tuple[Root, ...]
    gpus: tuple[Gpu, ...] = ()  # in NVML's order
    nics: tuple[Nic, ...] = ()
    driver: str = "535.161.08"  # version; empty: no driver is installed
    cuda: int = 12020  # newest CUDA version that the driver supports, as NVML says it
    library: str = "new"  # ``new``, ``old`` (newer functions are absent) or ``none``
    p2p_across_sockets: bool = True  # whether PCIe peer access works between NUMA nodes
    # pairs of GPUs for which NVML refuses peer access, with ``nvmlGpuP2PStatus_t``
    refused: tuple[tuple[int, int, int], ...] = ()
    rules: tuple[str, ...] = ()  # ``FUNCTION CODE [GPU [LINK]]``, see ``machine_text.c``
    # files of the sysfs tree, as paths from its root, that give an error when read, or are not there
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
