"""Build a server of GPUs joined by direct links or by an NVSwitch, with the PCIe side behind them.

NVLink figures are nominal, PCIe and socket figures effective (see `topoplan.machine.hardware`). A NIC has its plug but
no network, which is not part of one server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from topoplan.machine.hardware import GpuGeneration, nvswitch_capable
from topoplan.machine.host_topology import STRIPED, both_ways, cpus_of, host_links
from topoplan.machine.topology import Device, Link, Topology, facts
from topoplan.units import several

SERVER = "s0"

PCIE_SOURCE = (
    "PCIe: effective, NCCL src/graph/topo.cc kvDictPciGen: x16 of generation 3, 4, 5 is 12, 24, 48 GB/s; "
    "sockets: NCCL src/graph/topo.h"
)


@dataclass(frozen=True, slots=True)
class HostSide:
    """Switches, CPUs and NICs of a box.

    ``parents`` map child to parent; the roots are the CPUs. ``pcie`` and ``socket`` are in GB/s per direction, ``cpu``
    and ``nic`` are models. ``gigabits`` is the Gb/s of each NIC if all machines of this name have the same, for
    clusters of them.
    """

    parents: Mapping[str, str]
    pcie: float
    socket: float
    cpu: str
    nic: str = ""
    gigabits: int | None = None

    def devices(self) -> tuple[Device, ...]:
        """Return switches, CPUs and NICs, in this order."""
        switches = [Device(name, "pcie", SERVER) for name in self.parents if name.startswith("pcie")]
        cpus = [Device(name, "cpu", SERVER, model=self.cpu) for name in cpus_of(self.parents)]
        nics = [
            Device(name, "nic", SERVER, model=self.nic, facts=facts(gigabits=self.gigabits))
            for name in self.parents
            if name.startswith("nic")
        ]
        return (*switches, *cpus, *nics)

    def links(self) -> tuple[Link, ...]:
        """Return their links and those of the GPUs to them."""
        return host_links(self.parents, pcie=self.pcie, socket=self.socket)


def switches(members: Sequence[Sequence[str]], *, cpus: int) -> dict[str, str]:
    """Return the parents of a box with one PCIe switch for each group of members, divided evenly among the CPUs."""
    parents: dict[str, str] = {}
    for i, group in enumerate(members):
        parents[f"pcie{i}"] = f"cpu{i * cpus // len(members)}"
        parents |= dict.fromkeys(group, f"pcie{i}")
    return parents


def hybrid_cube_mesh(doubled: Sequence[tuple[int, int]] = ()) -> dict[tuple[int, int], int]:
    """Return the NVLinks of each connected pair of a DGX-1's 8 GPUs; ``doubled`` pairs have two.

    They are two quads, fully connected, and four links across.
    """
    quads = [(i + q, j + q) for q in (0, 4) for i in range(4) for j in range(i + 1, 4)]
    return {pair: 1 + (pair in doubled) for pair in [*quads, *((i, i + 4) for i in range(4))]}


def direct_box(
    name: str,
    host: HostSide,
    *,
    gpu: GpuGeneration,
    gpus: int,
    pairs: Mapping[tuple[int, int], int],
    source: str,
    notes: Sequence[str] = (),
) -> Topology:
    """Return a server whose GPUs are joined by direct links; ``pairs`` has the links of each connected pair.

    An empty ``pairs`` makes a PCIe-only box. ``source`` is that of the figures.
    """
    wires = [
        link
        for (i, j), count in pairs.items()
        for link in both_ways(f"gpu{i}", f"gpu{j}", "nvlink", several(count, gpu.nvlink), count=count)
    ]
    devices = (*(Device(f"gpu{i}", "gpu", SERVER, model=gpu.name) for i in range(gpus)), *host.devices())
    return Topology(name, devices, (*wires, *host.links()), tuple(notes), source)


def nvswitch_box(name: str, host: HostSide, *, gpu: GpuGeneration, gpus: int, source: str) -> Topology:
    """Return a server whose GPUs have all NVLinks to NVSwitch chips, which one device ``nvswitch0`` represents."""
    wires = [
        link
        for i in range(gpus)
        for link in both_ways(
            f"gpu{i}", "nvswitch0", "nvlink", several(gpu.links, gpu.nvlink), count=gpu.links
        )
    ]
    every = [Device(f"gpu{i}", "gpu", SERVER, model=gpu.name) for i in range(gpus)]
    devices = (
        *every,
        Device("nvswitch0", "nvswitch", SERVER, model="NVSwitch", capable=nvswitch_capable(every)),
        *host.devices(),
    )
    return Topology(name, devices, (*wires, *host.links()), (STRIPED,), source)
