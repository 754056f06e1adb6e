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


def unstaged(topology: Topology) -> Topology:
    """The machine whose PCIe switches turn bytes around again, from one that `staged` made; others stay as they are.

    Examples
    --------
    >>> import topoplan
    >>> box = topoplan.load("pcie-x8")
    >>> unstaged(staged(box)) == box
    True
    """
    names = {device.name for device in topology.devices}
    if not any(name.endswith(DOWNWARDS) for name in names):
        return topology
    whole = {name: name.removesuffix(DOWNWARDS) for name in names}
    whole |= {name: name for name, base in whole.items() if base not in names}
    links = {
        (whole[link.src], whole[link.dst], link.channel): replace(
            link, src=whole[link.src], dst=whole[link.dst]
        )
        for link in topology.links
    }
    devices = tuple(device for device in topology.devices if whole[device.name] == device.name)
    return replace(topology, devices=devices, links=tuple(links.values()))


def without_peer_access(topology: Topology) -> Topology:
    """The machine `staged` with a note, if its GPUs say that they have no peer access (see `has_peer_access`).

    Where only some of them have none the machine stays as it is, and a plan may use what the driver refuses.
    """
    gpus = [device for device in topology.devices if device.kind == "gpu"]
    if not gpus or any(has_peer_access(gpu) for gpu in gpus):
        return topology
    try:
        made = staged(topology)
    except UsageError:
        return topology
    return topology if made == topology else replace(made, notes=(*made.notes, STAGED_NOTE))


STAGED_NOTE = "no peer access: copies over PCIe are planned by way of the CPUs' memory"


def has_peer_access(gpu: Device) -> bool:
    """Whether other GPUs may read a GPU's memory: not in MIG mode, nor where the fact ``peer_access`` is ``none``."""
    return not gpu.fact("mig") and gpu.fact("peer_access") != "none"


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
