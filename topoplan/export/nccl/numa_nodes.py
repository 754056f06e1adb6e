"""Numbers of the NUMA nodes of a server, of which NCCL's topology file needs one for every CPU.

A CPU that states none has that of the GPUs and NICs below it, where these agree; else the lowest free number.
"""

from __future__ import annotations

from topoplan.errors import UsageError
from topoplan.export.nccl.host_tree import HostTree
from topoplan.topology import Topology


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
