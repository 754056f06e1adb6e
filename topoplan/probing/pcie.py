"""The PCIe side of this machine: from the kernel's tree where it is visible, else from the driver's word on each pair.

The bandwidth of a link is what its lanes carry at the highest rate that both ends know: an idle GPU lowers its rate and
raises it again when there is work. Lanes do not come back by themselves, so the present width counts.

Bridges above a GPU or NIC alternate: a root port, the upstream port of a switch, a downstream port of it, and so on.
Each has one link: an upstream port, like a GPU, to the port above it; a root or downstream port to what is below it.
So both ends tell of a link, and nothing tells of the inside of a switch. Bridges to PCI and PCI-X, which break the
rule, are above no GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from topoplan.formats.nvidia_smi.pcie_tree import CODES, infer_host_tree
from topoplan.hosts.host import PciDevice
from topoplan.hosts.nccl_rates import LANE, UNKNOWN_LANE, UNKNOWN_WIDTH
from topoplan.probing.driver import Driver, DriverGpu
from topoplan.probing.sysfs import SysfsDevice

_GENERATIONS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}


@dataclass(frozen=True, slots=True)
class PcieSide:
    """PCI devices with GPUs and NICs among them, a bridge before what is below it, and notes."""

    tree: tuple[PciDevice, ...]
    notes: tuple[str, ...]


def kernel_tree(
    chains: Mapping[str, list[SysfsDevice]], kinds: Mapping[str, str], driver: Driver, cpus: list[int]
) -> PcieSide:
    """The tree as the kernel shows it.

    Parameters
    ----------
    chains : mapping of str to list of SysfsDevice
        For the bus id of each GPU and NIC its devices from the host bridge down, empty where the kernel has none.
    kinds : mapping of str to str
        gpu or nic, by bus id.
    driver : Driver
        What GPUs say of their own links.
    cpus : list of int
        NUMA nodes.
    """
    gpus = {gpu.busid: gpu for gpu in driver.gpus}
    found: dict[str, PciDevice] = {}
    notes: list[str] = []
    assumed: list[str] = []
    nodes = _numa_nodes(chains, gpus)
    for busid in sorted(chains, key=lambda one: [device.busid for device in chains[one]] or [one]):
        chain, gpu = chains[busid], gpus.get(busid)
        places = (chain[0].busid, chain[0].host_bridge) if chain else (busid,)
        numa = next((nodes[place] for place in places if place in nodes), None)
        cpu = numa if numa in cpus else cpus[0]
        if not chain:
            name = f"gpu{gpu.index}" if gpu is not None else busid
            notes.append(
                f"warning: {name} ({busid}) is not in the kernel's PCIe tree; assumed on a link of its own to its CPU"
            )
            width = (gpu.width if gpu is not None else None) or UNKNOWN_WIDTH
            found[busid] = PciDevice(busid, kinds[busid], "", cpu, width * _lane(None, None, gpu))
        for place, device in enumerate(chain):
            if device.busid not in found:
                kind = kinds[busid] if device is chain[-1] else "bridge" if place % 2 else "port"
                found[device.busid] = PciDevice(
                    busid=device.busid,
                    kind=kind,
                    parent=device.parent,
                    cpu=cpu,
                    bandwidth=_bandwidth(chain, place, gpus, notes, assumed),
                    chip=device.chip,
                    host_bridge=device.host_bridge,
                )
    if assumed:
        more = f" and {len(assumed) - 3} more" if len(assumed) > 3 else ""
        notes.append(f"PCIe rate not known, generation 3 assumed: {', '.join(assumed[:3])}{more}")
    return PcieSide(tuple(found.values()), tuple(notes))


def _numa_nodes(chains: Mapping[str, list[SysfsDevice]], gpus: Mapping[str, DriverGpu]) -> dict[str, int]:
    """NUMA node by the uppermost device of a chain, and by its host bridge for chains of which nothing tells."""
    nodes: dict[str, int] = {}
    for busid, chain in sorted(chains.items()):
        gpu = gpus.get(busid)
        said = [*(device.numa for device in reversed(chain)), gpu.numa if gpu is not None else None]
        numa = next((node for node in said if node is not None), None)
        if numa is not None:
            for place in (chain[0].busid, chain[0].host_bridge) if chain else (busid,):
                nodes.setdefault(place, numa)
    return nodes


def _bandwidth(
    chain: list[SysfsDevice],
    place: int,
    gpus: Mapping[str, DriverGpu],
    notes: list[str],
    assumed: list[str],
) -> float:
    """GB/s of the link of one device of a chain: of a port downwards, without notes, of any other to the port above."""
    if place % 2 == 0 and place + 1 < len(chain):
        return _bandwidth(chain, place + 1, gpus, [], [])
    device = chain[place]
    gpu = gpus.get(device.busid)
    port = chain[place - 1] if place % 2 else None
    most = [end.most_width for end in (device, port) if end is not None and end.most_width]
    widest = min(most) if most else None
    width = device.width or (gpu.width if gpu is not None else None) or widest or UNKNOWN_WIDTH
    if widest and width < widest:
        name = f"gpu{gpu.index}" if gpu is not None else f"PCIe device {device.busid}"
        notes.append(f"warning: {name}: its PCIe link runs at x{width}, both ends have x{widest}")
    rate = _lane(device, port, gpu)
    if not (
        device.most_speed
        or (port is not None and port.most_speed)
        or (gpu is not None and gpu.most_generation)
    ):
        assumed.append(device.busid)
    if (
        gpu is not None
        and not gpu.idle
        and gpu.generation in _GENERATIONS
        and LANE[_GENERATIONS[gpu.generation]] < rate
    ):
        rate = LANE[_GENERATIONS[gpu.generation]]
        notes.append(
            f"warning: gpu{gpu.index}: its PCIe link runs at generation {gpu.generation} under load, both ends "
            "can do more"
        )
    return width * rate


def _lane(device: SysfsDevice | None, above: SysfsDevice | None, gpu: DriverGpu | None) -> float:
    """GB/s of a lane at the highest rate that both ends know."""
    rates = [end.most_speed for end in (device, above) if end is not None and end.most_speed]
    if not rates and gpu is not None and gpu.most_generation in _GENERATIONS:
        rates = [_GENERATIONS[gpu.most_generation]]
    return LANE.get(min(rates), UNKNOWN_LANE) if rates else UNKNOWN_LANE


def driver_tree(driver: Driver) -> PcieSide:
    """The tree that the driver's common ancestors of each pair imply, for a container without the kernel's tree."""
    names = {gpu.index: gpu.busid for gpu in driver.gpus}
    distance = {(names[a], names[b]): CODES.index(code) for (a, b), code in driver.ancestors.items()}
    affinity = {gpu.busid: str(gpu.numa) for gpu in driver.gpus if gpu.numa is not None}
    tree = infer_host_tree(list(names.values()), distance, affinity=affinity)
    by_busid = {gpu.busid: gpu for gpu in driver.gpus}
    devices = []
    for child, parent in tree.parents.items():
        gpu = by_busid.get(child)
        width = gpu.most_width if gpu is not None else None
        bandwidth = _lane(None, None, gpu) * (width or UNKNOWN_WIDTH)
        above = parent if parent in tree.parents else ""
        kind = "gpu" if gpu is not None else "bridge"
        devices.append(PciDevice(child, kind, above, int(tree.root(child).removeprefix("cpu")), bandwidth))
    note = "the kernel's PCIe tree is not visible here: placed by what the driver says of each pair"
    return PcieSide(tuple(devices), (note, *tree.notes))
