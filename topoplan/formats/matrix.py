"""The connection matrix of a machine, in the codes of ``nvidia-smi topo -m``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from topoplan.topology import Link, Topology


def relation_matrix(
    topology: Topology, kinds: Sequence[str] = ("gpu", "nic")
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Names of GPUs and NICs, or of devices of other kinds, and for each pair how they are joined.

    Returns
    -------
    names : tuple of str
    cells : tuple of tuple of str
        ``NV#`` for # NVLinks, direct or into a common switch; ``PIX`` at most one PCIe switch, ``PXB`` several, ``PHB``
        through one CPU, ``SYS`` through several, ``NET`` over a network where there is no other path, ``-`` no path,
        ``X`` itself.

    Examples
    --------
    >>> import topoplan
    >>> names, cells = relation_matrix(topoplan.load("dgx-1v"))
    >>> cells[0][:8]
    ('X', 'NV1', 'NV1', 'NV2', 'NV2', 'SYS', 'SYS', 'SYS')
    """
    names = tuple(device.name for device in topology.devices if device.kind in kinds)
    kind_of = {device.name: device.kind for device in topology.devices}
    nvlinks = nvlink_counts(topology)
    leaving: dict[str, list[Link]] = {}
    for link in topology.links:
        if link.channel != "nvlink":
            leaving.setdefault(link.src, []).append(link)
    inside = {name: [link for link in links if link.channel != "network"] for name, links in leaving.items()}
    cells = []
    for name in names:
        paths = _paths(name, leaving, kind_of) | _paths(name, inside, kind_of)
        row = []
        for other in names:
            if other == name:
                row.append("X")
            elif nvlinks[name, other]:
                row.append(f"NV{nvlinks[name, other]}")
            else:
                row.append(_code(paths[other]) if other in paths else "-")
        cells.append(tuple(row))
    return names, tuple(cells)


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


def _code(crossed: Sequence[str]) -> str:
    if "network" in crossed:
        return "NET"
    cpus = crossed.count("cpu")
    if cpus:
        return "PHB" if cpus == 1 else "SYS"
    return "PIX" if crossed.count("pcie") <= 1 else "PXB"
