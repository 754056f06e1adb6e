"""From a server's description to its Topology: names, NVLinks, the cut-down PCIe tree, links between CPUs."""

from __future__ import annotations

from collections import Counter

from topoplan.errors import TopologyError
from topoplan.hosts.host import Host, HostNic, PciDevice
from topoplan.hosts.nvlink_ends import STRIPED, SWITCH, nvlink_links
from topoplan.hosts.pci_tree import check_tree, switch_tree
from topoplan.hosts.wires import both_ways
from topoplan.topology import Device, Link, Topology, facts

SERVER = "s0"


def host_topology(host: Host) -> Topology:
    """The Topology of a server: ``gpu<n>``, ``nvswitch0``, ``pcie<i>``, ``cpu<i>``, ``nic<i>``, unless it names them.

    Raises
    ------
    TopologyError
        Two devices of one bus id or name, a NUMA node that is not listed, or a GPU or NIC that is not in the tree.

    Examples
    --------
    >>> from topoplan.hosts import HostCpu, HostGpu, NvlinkBundle
    >>> ids = ["0000:07:00.0", "0000:08:00.0"]
    >>> gpus = [HostGpu(ids[i], i, "V100", (NvlinkBundle("gpu", ids[1 - i], 2, 50.0),)) for i in (0, 1)]
    >>> tree = tuple(PciDevice(busid, "gpu", "", 0, 12.0) for busid in ids)
    >>> machine = host_topology(Host("pair", (HostCpu(0, 8.0),), tree, tuple(gpus), ()))
    >>> [(link.src, link.dst, link.bandwidth) for link in machine.links]
    ... # doctest: +NORMALIZE_WHITESPACE
    [('gpu0', 'gpu1', 50.0), ('gpu1', 'gpu0', 50.0), ('gpu0', 'cpu0', 12.0), ('cpu0', 'gpu0', 12.0),
     ('gpu1', 'cpu0', 12.0), ('cpu0', 'gpu1', 12.0)]
    """
    check_tree(host.tree)
    nics = {nic.busid: nic for nic in host.nics if nic.busid}
    tree = switch_tree(device for device in host.tree if device.kind != "nic" or device.busid in nics)
    names = _names(host, tree)
    cpu_names = {cpu.number: cpu.name or f"cpu{i}" for i, cpu in enumerate(host.cpus)}
    place = {device.busid: device for device in tree}
    for device in tree:
        if not device.parent and device.cpu not in cpu_names:
            raise TopologyError(f"pci {device.busid} is on NUMA node {device.cpu}, which is not listed")
    for gpu in host.gpus:
        if gpu.busid not in place:
            raise TopologyError(f"GPU {gpu.number} is at {gpu.busid}, which is not in the PCIe tree")
    cpu_of = {gpu.busid: cpu_names[_root(place, gpu.busid).cpu] for gpu in host.gpus}
    nvlinks, nvlink_notes = nvlink_links(host, {gpu.busid: names[gpu.busid] for gpu in host.gpus}, cpu_of)
    switched = any(SWITCH in (link.src, link.dst) for link in nvlinks)
    links = [*nvlinks]
    for gpu in host.gpus:
        if gpu.c2c:
            links += both_ways(names[gpu.busid], cpu_of[gpu.busid], "c2c", gpu.c2c)
    for device in tree:
        above = names[device.parent] if device.parent else cpu_names[device.cpu]
        links += both_ways(names[device.busid], above, "pcie", device.bandwidth)
    for nic in host.nics:
        if not nic.busid:
            links += both_ways(names[_key(nic)], cpu_names[nic.cpu], "pcie", nic.bandwidth)
    links += _socket_links(host, cpu_names)
    return Topology(
        name=host.name,
        devices=(
            *(
                Device(
                    names[gpu.busid],
                    "gpu",
                    SERVER,
                    model=gpu.model,
                    busid=gpu.busid,
                    numa=_numa(_root(place, gpu.busid).cpu),
                    facts=_with_place(gpu.facts, place[gpu.busid]),
                )
                for gpu in host.gpus
            ),
            *([Device(SWITCH, "nvswitch", SERVER, model="NVSwitch")] if switched else []),
            *(
                Device(
                    names[device.busid],
                    "pcie",
                    SERVER,
                    device.model,
                    device.busid,
                    facts=facts(pci=device.chip),
                )
                for device in tree
                if device.kind == "bridge"
            ),
            *(
                Device(
                    cpu_names[cpu.number], "cpu", SERVER, cpu.model, numa=_numa(cpu.number), facts=cpu.facts
                )
                for cpu in host.cpus
            ),
            *(_nic(nic, names[_key(nic)], place) for nic in host.nics),
        ),
        links=tuple(links),
        notes=(*host.notes, *nvlink_notes, *([STRIPED] if switched else [])),
        source=host.source,
    )


def _names(host: Host, tree: tuple[PciDevice, ...]) -> dict[str, str]:
    """Name of each GPU, switch and NIC by its bus id; a NIC without one stands under its adapter (see `_key`)."""
    names = {gpu.busid: gpu.name or f"gpu{gpu.number}" for gpu in host.gpus}
    switches = [device for device in tree if device.kind == "bridge"]
    names |= {device.busid: device.name or f"pcie{i}" for i, device in enumerate(switches)}
    names |= {_key(nic): nic.name or f"nic{i}" for i, nic in enumerate(host.nics)}
    if len(names) != len(host.gpus) + len(switches) + len(host.nics):
        keys = Counter([gpu.busid for gpu in host.gpus] + [_key(nic) for nic in host.nics])
        repeated = next((key for key, times in keys.items() if times > 1), "")
        raise TopologyError(
            f"{repeated or 'a bus id'} is there twice; each GPU and NIC has a place of its own"
        )
    return names


def _key(nic: HostNic) -> str:
    return nic.busid or f"{dict(nic.facts).get('adapter', '')} on NUMA node {nic.cpu}"


def _root(place: dict[str, PciDevice], busid: str) -> PciDevice:
    device = place[busid]
    while device.parent:
        device = place[device.parent]
    return device


def _numa(number: int) -> int | None:
    return None if number < 0 else number


def _with_place(known: tuple[tuple[str, str], ...], device: PciDevice) -> tuple[tuple[str, str], ...]:
    return facts(**dict(known) | {"pci": device.chip, "host_bridge": device.host_bridge})


def _nic(nic: HostNic, name: str, place: dict[str, PciDevice]) -> Device:
    if not nic.busid:
        return Device(name, "nic", SERVER, nic.model, numa=_numa(nic.cpu), facts=nic.facts)
    cpu = _root(place, nic.busid).cpu
    known = _with_place(nic.facts, place[nic.busid])
    return Device(name, "nic", SERVER, nic.model, nic.busid, _numa(cpu), facts=known)


def _socket_links(host: Host, names: dict[int, str]) -> list[Link]:
    """A link between every two NUMA nodes, as NCCL joins them, each direction as fast as its own end says."""
    links = []
    for i, first in enumerate(host.cpus):
        for second in host.cpus[i + 1 :]:
            ends = ((first, second), (second, first))
            links += [Link(names[a.number], names[b.number], "sys", a.socket_bandwidth) for a, b in ends]
    return links
