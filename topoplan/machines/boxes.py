"""Generators of boxes: GPUs joined by links of their own or by an NVSwitch, with the PCIe side behind them.

NVLink figures are nominal, PCIe and socket figures effective (see `topoplan.hosts.link_rates`). A NIC is
shown where it plugs in; its network is not part of one server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from topoplan.hosts.build import both_ways, cpus_of, host_links
from topoplan.hosts.gpu_identity import nvswitch_capable
from topoplan.hosts.link_rates import GpuGeneration
from topoplan.hosts.nvlink_ends import STRIPED
from topoplan.topology import Device, Link, Topology, facts
from topoplan.units import several

SERVER = "s0"

PCIE_SOURCE = (
    "PCIe: effective, NCCL src/graph/topo.cc kvDictPciGen: x16 of generation 3, 4, 5 is 12, 24, 48 GB/s; "
    "sockets: NCCL src/graph/topo.h"
)


@dataclass(frozen=True, slots=True)
class HostSide:
    """Switches, CPUs and NICs of a box.

    Parameters
    ----------
    parents : mapping of str to str
        Child to parent; the roots are the CPUs.
    pcie, socket : float
        GB/s per direction of a PCIe link and of the link between two CPUs.
    cpu, nic : str
        Models.
    gigabits : int or None
        Gb/s of each NIC, where all machines of this name have the same; a cluster of them takes it from here.
    """

    parents: Mapping[str, str]
    pcie: float
    socket: float
    cpu: str
    nic: str = ""
    gigabits: int | None = None

    def devices(self) -> tuple[Device, ...]:
        """Switches, CPUs and NICs, in this order."""
        switches = [Device(name, "pcie", SERVER) for name in self.parents if name.startswith("pcie")]
        cpus = [Device(name, "cpu", SERVER, model=self.cpu) for name in cpus_of(self.parents)]
        nics = [
            Device(name, "nic", SERVER, model=self.nic, facts=facts(gigabits=self.gigabits))
            for name in self.parents
            if name.startswith("nic")
        ]
        return (*switches, *cpus, *nics)

    def links(self) -> tuple[Link, ...]:
        """Their links and those of the GPUs to them."""
        return host_links(self.parents, pcie=self.pcie, socket=self.socket)


def switches(members: Sequence[Sequence[str]], *, cpus: int) -> dict[str, str]:
    """Parents of a box with one PCIe switch for each group of members, dealt evenly to the CPUs.

    Examples
    --------
    >>> switches([["gpu0"], ["gpu1"]], cpus=2)
    {'pcie0': 'cpu0', 'gpu0': 'pcie0', 'pcie1': 'cpu1', 'gpu1': 'pcie1'}
    """
    parents: dict[str, str] = {}
    for i, group in enumerate(members):
        parents[f"pcie{i}"] = f"cpu{i * cpus // len(members)}"
        parents |= dict.fromkeys(group, f"pcie{i}")
    return parents


def hybrid_cube_mesh(doubled: Sequence[tuple[int, int]] = ()) -> dict[tuple[int, int], int]:
    """NVLinks between the 8 GPUs of a DGX-1: two quads, fully connected, and four links across.

    Parameters
    ----------
    doubled : sequence of (int, int)
        Pairs with two links.

    Returns
    -------
    dict of (int, int) to int
        Links of each connected pair.

    Examples
    --------
    >>> len(hybrid_cube_mesh()), sum(hybrid_cube_mesh([(0, 3), (0, 4)]).values())
    (16, 18)
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
    """A server whose GPUs are joined by links of their own.

    Parameters
    ----------
    name, source : str
        Of the machine and of its figures.
    host : HostSide
        PCIe side.
    gpu : GpuGeneration
        Its name and the rate of one of its links are used.
    gpus : int
        Number of GPUs.
    pairs : mapping of (int, int) to int
        Direct links of each connected pair; empty for a PCIe-only box.
    notes : sequence of str
        Shown to the user.

    Examples
    --------
    >>> from topoplan.hosts.link_rates import V100
    >>> host = HostSide({"gpu0": "cpu0", "gpu1": "cpu0"}, 12, 8, "")
    >>> box = direct_box("pair", host, gpu=V100, gpus=2, pairs={(0, 1): 2}, source="")
    >>> box.links[0].bandwidth, len(box.links)
    (50.0, 6)
    """
    wires = [
        link
        for (i, j), count in pairs.items()
        for link in both_ways(f"gpu{i}", f"gpu{j}", "nvlink", several(count, gpu.nvlink), count=count)
    ]
    devices = (*(Device(f"gpu{i}", "gpu", SERVER, model=gpu.name) for i in range(gpus)), *host.devices())
    return Topology(name, devices, (*wires, *host.links()), tuple(notes), source)


def nvswitch_box(name: str, host: HostSide, *, gpu: GpuGeneration, gpus: int, source: str) -> Topology:
    """A server whose GPUs have all NVLinks to NVSwitch chips; one device ``nvswitch0`` stands for them.

    Parameters are those of `direct_box`.

    Examples
    --------
    >>> from topoplan.hosts.link_rates import V100
    >>> host = HostSide({f"gpu{i}": "cpu0" for i in range(4)}, 12, 8, "")
    >>> nvswitch_box("four", host, gpu=V100, gpus=4, source="").links[0]
    Link(src='gpu0', dst='nvswitch0', channel='nvlink', bandwidth=150.0, count=6, latency=None)
    """
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
