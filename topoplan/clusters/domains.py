"""One NVLink domain cut into several: a rack as a cluster of smaller domains that only the network joins.

A rack of 72 GPUs may be run as domains of 36, 8 or 4 (partitions of its NVSwitches, or cliques of NCCL): each keeps its
GPUs' NVLinks to a switch of its own, and the trays with their CPUs and NICs.
"""

from __future__ import annotations

from topoplan.errors import UsageError
from topoplan.topology import Topology


def domain(machine: Topology, size: int) -> Topology:
    """The first ``size`` GPUs of a machine on one NVSwitch, with the CPUs, PCIe switches and NICs that belong to them.

    What links without NVSwitch join to those GPUs belongs to them, and what joins GPUs of several domains is refused.

    Raises
    ------
    UsageError
        The size does not divide the number of GPUs, no NVSwitch joins them, or the domains would not be alike: they
        share a CPU, or have other NICs.

    Examples
    --------
    >>> import topoplan
    >>> tray = domain(topoplan.load("gb200-nvl72"), 4)
    >>> tray.gpus, [device.name for device in tray.devices if device.kind in ("cpu", "nic")]
    (('gpu0', 'gpu1', 'gpu2', 'gpu3'), ['cpu0', 'cpu1', 'nic0', 'nic1', 'nic2', 'nic3'])
    """
    gpus = machine.gpus
    if not any(device.kind == "nvswitch" for device in machine.devices):
        raise UsageError(f"{machine.name} has no NVSwitch whose domain could be cut; leave --domain out")
    if not 1 <= size <= len(gpus) or len(gpus) % size:
        fits = ", ".join(str(one) for one in range(1, len(gpus) + 1) if len(gpus) % one == 0)
        raise UsageError(f"{len(gpus)} GPUs of {machine.name} make no domains of {size}; use one of {fits}")
    belongs = [_belonging(machine, gpus[first : first + size]) for first in range(0, len(gpus), size)]
    kinds = [sorted(machine.device(name).kind for name in devices) for devices in belongs]
    if any(kind != kinds[0] for kind in kinds) or len(frozenset().union(*belongs)) < sum(map(len, belongs)):
        raise UsageError(
            f"domains of {size} GPUs of {machine.name} would share CPUs or have other NICs; use larger domains"
        )
    return first_part(machine, size)


def first_part(machine: Topology, size: int) -> Topology:
    """The first ``size`` GPUs with the NVSwitches and what belongs to the GPUs, which is not checked.

    Examples
    --------
    >>> import topoplan
    >>> part = first_part(topoplan.load("gb200-nvl72"), 20)
    >>> len(part.gpus), sum(device.kind == "nic" for device in part.devices)
    (20, 20)
    """
    kept = _belonging(machine, machine.gpus[:size])
    kept |= {device.name for device in machine.devices if device.kind == "nvswitch"}
    return Topology(
        machine.name if size == len(machine.gpus) else f"{machine.name} domain of {size}",
        tuple(device for device in machine.devices if device.name in kept),
        tuple(link for link in machine.links if link.src in kept and link.dst in kept),
        machine.notes,
        machine.source,
    )


def _belonging(machine: Topology, gpus: tuple[str, ...]) -> frozenset[str]:
    """These GPUs and what links without NVSwitch join to them."""
    switches = {device.name for device in machine.devices if device.kind == "nvswitch"}
    near: dict[str, list[str]] = {}
    for link in machine.links:
        if link.src not in switches and link.dst not in switches:
            near.setdefault(link.src, []).append(link.dst)
    reached = set(gpus)
    frontier = list(gpus)
    for device in frontier:
        for other in near.get(device, ()):
            if other not in reached:
                reached.add(other)
                frontier.append(other)
    return frozenset(reached)
