"""The numbers by which NCCL finds things: ``dev`` of a GPU, PCI bus ids, NUMA nodes; and those that are invented.

``dev`` is the index that NVML and nvidia-smi count, neither the rank in a communicator nor the number under
CUDA_VISIBLE_DEVICES. Where all GPUs of a server are called ``gpu<n>`` (or ``<server>.gpu<n>``), n is that index: so it
stays right for an allocation and for a machine that lacks GPUs. Otherwise GPUs are counted as they stand.

NCCL identifies devices by bus id, so a file cannot do without. Invented ones lie in PCI domain ffff, as in the files of
AWS and Azure: switches on bus ff, GPUs on bus 00, NICs on bus 80. The function is always 0, because NCCL keeps the two
lowest bits of a GPU's bus id for itself. A CPU that states no NUMA node has that of the GPUs and NICs below it, where
these agree; else the lowest free number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from topoplan.errors import UsageError
from topoplan.export.nccl.host_tree import HostTree
from topoplan.hosts.host import bus_id
from topoplan.topology import Device, Topology

_NUMBERED = re.compile(r"(?:.*\.)?gpu([0-9]{1,4})")


def gpu_numbers(names: Sequence[str]) -> dict[str, int]:
    """Number of each GPU of one server by name.

    Examples
    --------
    >>> gpu_numbers(["gpu1", "gpu4"]), gpu_numbers(["left", "right"])
    ({'gpu1': 1, 'gpu4': 4}, {'left': 0, 'right': 1})
    """
    matches = [_NUMBERED.fullmatch(name) for name in names]
    numbers = [int(match[1]) for match in matches if match]
    if len(set(numbers)) == len(names):
        return dict(zip(names, numbers, strict=True))
    return {name: number for number, name in enumerate(names)}


_FIRST_BUS = {"pcie": 0xFF, "gpu": 0x00, "nic": 0x80}
_BUSES = {"pcie": 1, "gpu": 0x80, "nic": 0x7F}
_PLACES = 32


def bus_ids(devices: Sequence[Device]) -> tuple[dict[str, str], frozenset[str]]:
    """Bus id of every GPU, NIC and PCIe switch by name, and the names for which it is invented.

    Raises
    ------
    UsageError
        Two devices state one bus id, or there are more devices without one than there is room for.
    TopologyError
        What a device states is no bus id.

    Examples
    --------
    >>> gpus = [Device("gpu0", "gpu"), Device("gpu1", "gpu", busid="00000000:07:00.0")]
    >>> ids, invented = bus_ids([*gpus, Device("pcie0", "pcie")])
    >>> sorted(ids.items()), sorted(invented)
    ([('gpu0', 'ffff:00:01.0'), ('gpu1', '0000:07:00.0'), ('pcie0', 'ffff:ff:01.0')], ['gpu0', 'pcie0'])
    """
    found = {device.name: bus_id(device.busid) for device in devices if device.busid}
    taken: dict[str, str] = {}
    for name, busid in found.items():
        if busid in taken:
            raise UsageError(f"{taken[busid]} and {name} both state bus id {busid}; give each its own")
        taken[busid] = name
    invented = []
    for kind, first in _FIRST_BUS.items():
        # Bus 1 up to its place 31, as the switches of those files start at ff:01.0.
        places = iter(range(1, _BUSES[kind] * _PLACES))
        for device in devices:
            if device.kind != kind or device.busid:
                continue
            free = (f"ffff:{first + place // _PLACES:02x}:{place % _PLACES:02x}.0" for place in places)
            chosen = next((busid for busid in free if busid not in taken), "")
            if not chosen:
                raise UsageError(f"{device.name} has no bus id, and no more can be invented; state its busid")
            found[device.name] = chosen
            taken[chosen] = device.name
            invented.append(device.name)
    return found, frozenset(invented)


def numa_nodes(machine: Topology, tree: HostTree) -> tuple[dict[str, int], frozenset[str]]:
    """Number of every CPU's NUMA node by name, and the CPUs for which it is invented.

    Raises
    ------
    UsageError
        Two CPUs state the same.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.export.nccl.host_tree import host_tree
    >>> box = topoplan.load("dgx-1v")
    >>> nodes, invented = numa_nodes(box, host_tree(box))
    >>> nodes, sorted(invented)
    ({'cpu0': 0, 'cpu1': 1}, ['cpu0', 'cpu1'])
    """
    cpus = [device for device in machine.devices if device.kind == "cpu"]
    taken: dict[int, str] = {}
    for cpu in cpus:
        if cpu.numa is not None:
            if cpu.numa in taken:
                raise UsageError(
                    f"{taken[cpu.numa]} and {cpu.name} are both NUMA node {cpu.numa}, and NCCL's file has one CPU for "
                    "a node; number them apart"
                )
            taken[cpu.numa] = cpu.name
    below: dict[str, set[int]] = {}
    for device in machine.devices:
        if device.name in tree.above and device.numa is not None:
            below.setdefault(tree.cpu_of(device.name), set()).add(device.numa)
    for cpu in cpus:
        numbers = below.get(cpu.name, set())
        if cpu.name not in taken.values() and len(numbers) == 1 and not numbers <= set(taken):
            taken[min(numbers)] = cpu.name
    known = frozenset(taken.values())
    free = iter([number for number in range(len(cpus) + len(taken)) if number not in taken])
    nodes = {name: number for number, name in taken.items()}
    nodes |= {cpu.name: next(free) for cpu in cpus if cpu.name not in known}
    return nodes, frozenset(cpu.name for cpu in cpus) - known
