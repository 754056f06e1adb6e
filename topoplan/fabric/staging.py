"""PCIe by way of the host's memory: what a copy out of a GPU, followed by a copy into another one, may cross.

Where GPUs have no peer access over PCIe, or keep that of NVLink, bytes go to pinned memory of a CPU and from there to
the other GPU. Both copies cross links of the PCIe tree, and no switch turns them around below its CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from topoplan.errors import UsageError
from topoplan.topology import Device, Link, Topology

DOWNWARDS = ".down"
"""What the name of a PCIe switch ends with where it stands for the half that leads from the CPU to the GPUs."""


def staged(topology: Topology) -> Topology:
    """The machine in which PCIe joins GPUs only through a CPU.

    Every PCIe switch becomes two devices, one on the way up to a CPU and one on the way down, so that routes, loads,
    cuts and lengths speak of staged copies like of all others. A staged machine stays as it is.

    Parameters
    ----------
    topology : Topology

    Raises
    ------
    UsageError
        A PCIe switch leads to no CPU.

    Examples
    --------
    >>> import topoplan
    >>> box = staged(topoplan.load("dgx-1v").subset([0, 1]))
    >>> wires = [(link.src, link.dst) for link in box.links if "pcie0" in link.src + link.dst]
    >>> wires[:2], wires[-2:]
    ([('pcie0', 'cpu0'), ('cpu0', 'pcie0.down')], [('nic0', 'pcie0'), ('pcie0.down', 'nic0')])
    """
    kinds = {device.name: device.kind for device in topology.devices}
    switches = {name for name, kind in kinds.items() if kind == "pcie"}
    if any(name.endswith(DOWNWARDS) for name in switches):
        return topology
    hops = _hops_to_a_cpu(topology, kinds)
    for name in switches:
        if name not in hops:
            raise UsageError(
                f"copies cannot pass a CPU's memory: no link leads from {name} to a CPU; use channels all, "
                "or state the CPU in the machine"
            )
    devices: list[Device] = []
    for device in topology.devices:
        devices.append(device)
        if device.name in switches:
            devices.append(replace(device, name=device.name + DOWNWARDS, busid="", facts=()))
    links: list[Link] = []
    for link in topology.links:
        src, dst = link.src, link.dst
        if link.channel == "pcie" and kinds[src] == kinds[dst] == "gpu":
            continue
        above = hops.get(dst, 1 << 30) < hops.get(src, 1 << 30)
        if src in switches and not above:
            src += DOWNWARDS
        if dst in switches and not above:
            dst += DOWNWARDS
        links.append(replace(link, src=src, dst=dst))
    return replace(topology, devices=tuple(devices), links=tuple(links))


def _hops_to_a_cpu(topology: Topology, kinds: Mapping[str, str]) -> dict[str, int]:
    """PCIe links from every device up to the nearest CPU, through switches alone."""
    into: dict[str, list[str]] = {}
    for link in topology.links:
        if link.channel == "pcie":
            into.setdefault(link.dst, []).append(link.src)
    hops = {name: 0 for name, kind in kinds.items() if kind == "cpu"}
    frontier = list(hops)
    for name in frontier:
        for below in into.get(name, ()):
            if below not in hops:
                hops[below] = hops[name] + 1
                if kinds[below] == "pcie":
                    frontier.append(below)
    return hops
