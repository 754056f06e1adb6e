"""The connection matrix of a machine, in the codes of ``nvidia-smi topo -m``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from topoplan.topology import Device, Link, Topology


def relation_matrix(
    topology: Topology, kinds: Sequence[str] = ("gpu", "nic")
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Names of GPUs and NICs, or of devices of other kinds, and for each pair how they are joined.

    Returns
    -------
    names : tuple of str
    cells : tuple of tuple of str
        ``NV#`` for # NVLinks, direct or into a common switch; ``PIX`` at most one PCIe switch, ``PXB`` several, ``PHB``
        through one CPU, ``NODE`` likewise where the devices are known to hang below different host bridges, ``SYS``
        through several CPUs or between devices of different NUMA nodes, ``NET`` over a network where there is no
        other path, ``-`` no path, ``X`` itself.

    Examples
    --------
    >>> import topoplan
    >>> names, cells = relation_matrix(topoplan.load("dgx-1v"))
    >>> cells[0][:8]
    ('X', 'NV1', 'NV1', 'NV2', 'NV2', 'SYS', 'SYS', 'SYS')
    """
    chosen = [device for device in topology.devices if device.kind in kinds]
    kind_of = {device.name: device.kind for device in topology.devices}
    nvlinks = nvlink_counts(topology)
    leaving: dict[str, list[Link]] = {}
    for link in topology.links:
        if link.channel != "nvlink":
            leaving.setdefault(link.src, []).append(link)
    inside = {name: [link for link in links if link.channel != "network"] for name, links in leaving.items()}
    cells = []
    for device in chosen:
        paths = _paths(device.name, leaving, kind_of) | _paths(device.name, inside, kind_of)
        row = []
        for other in chosen:
            if other == device:
                row.append("X")
            elif count := nvlinks[device.name, other.name]:
                row.append(f"NV{count}")
            else:
                row.append(_code(device, other, paths[other.name]) if other.name in paths else "-")
        cells.append(tuple(row))
    return tuple(device.name for device in chosen), tuple(cells)


def affinity_columns(topology: Topology, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """What ``nvidia-smi topo -m`` prints of GPUs beside the matrix, as far as it is known of any of them.

    Parameters
    ----------
    topology : Topology
    names : sequence of str
        Devices of the rows; of those that are no GPUs nothing is printed.

    Returns
    -------
    dict of str to tuple of str
        ``CPU Affinity`` (the fact ``cpus`` of the GPU, or of its CPU) and ``NUMA``, a cell for each row.

    Examples
    --------
    >>> from topoplan.formats.nvidia_smi.topology import parse_nvidia_smi
    >>> text = "     GPU0 GPU1 CPU Affinity\\nGPU0  X   NV2  0-15\\nGPU1 NV2   X   0-15"
    >>> affinity_columns(parse_nvidia_smi(text), ["gpu0", "gpu1"])
    {'CPU Affinity': ('0-15', '0-15')}
    """
    kinds = {device.name: device.kind for device in topology.devices}
    leaving: dict[str, list[Link]] = {}
    for link in topology.links:
        if link.channel == "pcie":
            leaving.setdefault(link.src, []).append(link)
    rows = []
    for name in names:
        device = topology.device(name)
        if device.kind != "gpu":
            rows.append(("", ""))
            continue
        near = (end for end in _paths(name, leaving, kinds) if kinds[end] == "cpu")
        cpu = topology.device(next(near, name))
        numa = device.fact("numa_nodes") or (cpu.numa if device.numa is None else device.numa)
        rows.append((device.fact("cpus") or cpu.fact("cpus"), "" if numa is None else str(numa)))
    columns = {"CPU Affinity": tuple(row[0] for row in rows), "NUMA": tuple(row[1] for row in rows)}
    return {title: cells for title, cells in columns.items() if any(cells)}


def nvlink_counts(topology: Topology) -> Counter[tuple[str, str]]:
    """NVLinks from each GPU to each other one: direct, and into NVSwitches that they share.

    Switches that are joined to each other count as one; through several planes of switches the links add up, as
    ``nvidia-smi topo -m`` counts them.

    Examples
    --------
    >>> import topoplan
    >>> nvlink_counts(topoplan.load("dgx-2"))["gpu0", "gpu15"]
    6
    """
    kinds = {device.name: device.kind for device in topology.devices}
    links = [link for link in topology.links if link.channel == "nvlink"]
    plane = {name: name for name, kind in kinds.items() if kind == "nvswitch"}
    for link in links:
        if link.src in plane and link.dst in plane:
            kept, merged = plane[link.src], plane[link.dst]
            plane = {name: kept if leader == merged else leader for name, leader in plane.items()}
    counts: Counter[tuple[str, str]] = Counter()
    entering: Counter[tuple[str, str]] = Counter()
    leaving: dict[str, Counter[str]] = {}
    for link in links:
        if kinds[link.src] == kinds[link.dst] == "gpu":
            counts[link.src, link.dst] += link.count
        elif kinds[link.src] == "gpu" and link.dst in plane:
            entering[link.src, plane[link.dst]] += link.count
        elif kinds[link.dst] == "gpu" and link.src in plane:
            leaving.setdefault(plane[link.src], Counter())[link.dst] += link.count
    for (src, switch), inwards in entering.items():
        for dst, outwards in leaving.get(switch, Counter()).items():
            if src != dst:
                counts[src, dst] += min(inwards, outwards)
    return counts


def _paths(start: str, leaving: dict[str, list[Link]], kinds: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """What a shortest path to each device crosses, no path through a GPU: kinds of devices, and ``network`` links."""
    crossed: dict[str, tuple[str, ...]] = {start: ()}
    frontier = [start]
    for device in frontier:
        if device != start and kinds[device] == "gpu":
            continue
        so_far = crossed[device] if device == start else (*crossed[device], kinds[device])
        for link in leaving.get(device, ()):
            if link.dst not in crossed:
                crossed[link.dst] = (*so_far, "network") if link.channel == "network" else so_far
                frontier.append(link.dst)
    return crossed


def _code(first: Device, second: Device, crossed: Sequence[str]) -> str:
    if "network" in crossed:
        return "NET"
    if "cpu" not in crossed:
        return "PIX" if crossed.count("pcie") <= 1 else "PXB"
    if crossed.count("cpu") > 1 or _differ(first.numa, second.numa):
        return "SYS"
    return "NODE" if _differ(first.fact("host_bridge"), second.fact("host_bridge")) else "PHB"


def _differ(first: int | str | None, second: int | str | None) -> bool:
    """True where both are known and not the same."""
    return first != second and first not in (None, "") and second not in (None, "")
