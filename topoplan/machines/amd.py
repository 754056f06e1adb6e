"""The library's machines with AMD GPUs, whose dies are joined by Infinity Fabric links.

A package holds two dies (GCDs), and each die is a GPU. The channel names nvlink and pcie stand for the links between
dies and the way to the CPU.
"""

from __future__ import annotations

from dataclasses import replace

from topoplan.hosts.link_rates import PCIE_X16, SOCKET, GpuGeneration
from topoplan.hosts.wires import both_ways
from topoplan.machines.boxes import PCIE_SOURCE, SERVER, HostSide, direct_box, switches
from topoplan.topology import Device, Topology

FABRIC_SOURCE = "Infinity Fabric: 50 GB/s per link and direction, ROCm documentation, MI250 microarchitecture"


def mi250() -> Topology:
    """A server with 16 dies (GCDs) of 8 AMD MI250 without a switch: 7 links a die, to 3 or 4 others, unevenly."""
    pairs = (
        dict.fromkeys([(2 * i, 2 * i + 1) for i in range(8)], 4)
        | dict.fromkeys([(0, 4), (3, 7), (8, 12), (11, 15)], 2)
        | dict.fromkeys([(0, 2), (1, 2), (1, 3), (1, 5), (2, 6), (4, 12), (5, 13), (5, 14)], 1)
        | dict.fromkeys([(6, 13), (6, 14), (7, 15), (8, 10), (9, 10), (9, 11), (9, 13), (10, 14)], 1)
    )
    die = GpuGeneration("MI250 GCD", links=7, nvlink=50.0, pcie=PCIE_X16[4] / 2, socket=SOCKET["Zen 1 to 2"])
    groups = [[*(f"gpu{4 * i + j}" for j in range(4)), f"nic{2 * i}", f"nic{2 * i + 1}"] for i in range(4)]
    host = HostSide(switches(groups, cpus=2), PCIE_X16[4], die.socket, "EPYC, Zen 2", "ConnectX-6 200 Gb/s")
    source = (
        f"{FABRIC_SOURCE}; links and PCIe shape: RCCL, tools/topo_expl/models/topo_16p1h.xml, sub-switches of one "
        f"chip flattened as NCCL does, the two NUMA nodes of a socket taken as one CPU; {PCIE_SOURCE}, AMD_BW 16; "
        "a die has 8 lanes"
    )
    box = direct_box("mi250", host, gpu=die, gpus=16, pairs=pairs, source=source)
    return replace(
        box,
        links=tuple(
            replace(link, bandwidth=die.pcie)
            if link.channel == "pcie" and "gpu" in link.src + link.dst
            else link
            for link in box.links
        ),
        notes=("nvlink names the channel between GPUs: here it is AMD Infinity Fabric",),
    )


def mi250x() -> Topology:
    """A Frontier node: 8 dies (GCDs) of 4 AMD MI250X, joined by 1, 2 or 4 Infinity Fabric links each."""
    pairs = (
        dict.fromkeys([(0, 1), (2, 3), (4, 5), (6, 7)], 4)
        | dict.fromkeys([(0, 6), (2, 4)], 2)
        | dict.fromkeys([(0, 2), (1, 3), (1, 5), (3, 7), (4, 6), (5, 7)], 1)
    )
    die = GpuGeneration("MI250X GCD", links=8, nvlink=50.0, pcie=36.0, socket=0.0)
    host = HostSide({f"gpu{i}": "cpu0" for i in range(8)}, die.pcie, die.socket, "EPYC 7A53")
    source = (
        f"{FABRIC_SOURCE}; 4 links in a package, 2 or 1 between packages, 36 GB/s to the CPU: OLCF Frontier User "
        "Guide; "
        "neighbours from RCCL, tools/topo_expl/models/topo_8p_90a_1.xml; 0-1 has 4, 0-6 has 2, 0-2 has 1: "
        "Pearson, arXiv 2302.14827; other counts from the eight ports of a die (even: 4+2+1 and the CPU; "
        "odd: 4+1+1, the CPU and a NIC, at PCIe generation 4 x16, effective 24 GB/s)"
    )
    notes = [
        "nvlink and pcie name the channels between GPUs and to the CPU: here both are AMD Infinity Fabric"
    ]
    box = direct_box("mi250x", host, gpu=die, gpus=8, pairs=pairs, source=source, notes=notes)
    nics = [Device(f"nic{i}", "nic", SERVER, model="Slingshot 200 Gb/s") for i in range(4)]
    plugs = [link for i in range(4) for link in both_ways(f"nic{i}", f"gpu{2 * i + 1}", "pcie", PCIE_X16[4])]
    return replace(box, devices=(*box.devices, *nics), links=(*box.links, *plugs))
