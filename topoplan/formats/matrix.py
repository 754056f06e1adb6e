"""The connection matrix of a machine, in the codes of ``nvidia-smi topo -m``."""

from __future__ import annotations

from collections.abc import Sequence

from topoplan.topology import Topology


def relation_matrix(topology: Topology) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Names of GPUs and NICs, and for each pair how they are joined.

    Returns
    -------
    names : tuple of str
    cells : tuple of tuple of str
        ``NV#`` for # NVLinks, direct or into a common switch; ``PIX`` at most one PCIe switch, ``PXB`` several, ``PHB``
        through one CPU, ``SYS`` through several, ``NET`` over a network, ``-`` no path, ``X`` itself.

    Examples
    --------
    >>> import topoplan
    >>> names, cells = relation_matrix(topoplan.load("dgx-1v"))
    >>> cells[0][:8]
    ('X', 'NV1', 'NV1', 'NV2', 'NV2', 'SYS', 'SYS', 'SYS')
    """
    names = tuple(device.name for device in topology.devices if device.kind in ("gpu", "nic"))
    kinds = {device.name: device.kind for device in topology.devices}
    nvlinks = {(link.src, link.dst): link.count for link in topology.links if link.channel == "nvlink"}
    ports: dict[tuple[str, str], int] = {}
    for (src, switch), count in nvlinks.items():
        for (other, dst), far in nvlinks.items():
            if (
                other == switch
                and kinds[switch] == "nvswitch"
                and kinds[src] == kinds[dst] == "gpu"
                and src != dst
            ):
                ports[src, dst] = min(count, far)
    leaving: dict[str, list[str]] = {}
    for link in topology.links:
        if link.channel in ("pcie", "sys", "network", "c2c"):
            leaving.setdefault(link.src, []).append(link.dst)
    cells = []
    for name in names:
        paths = _paths(name, leaving, kinds)
        row = []
        for other in names:
            count = nvlinks.get((name, other), 0) + ports.get((name, other), 0)
            if other == name:
                row.append("X")
            elif count:
                row.append(f"NV{count}")
            else:
                row.append(_code([kinds[device] for device in paths[other]]) if other in paths else "-")
        cells.append(tuple(row))
    return names, tuple(cells)


def _paths(start: str, leaving: dict[str, list[str]], kinds: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """The forwarding devices on a shortest path to every device that can be reached without passing an end device."""
    found: dict[str, tuple[str, ...]] = {start: ()}
    frontier = [start]
    for device in frontier:
        if device != start and kinds[device] == "gpu":
            continue
        through = () if device == start else (*found[device], device)
        for following in leaving.get(device, ()):
            if following not in found:
                found[following] = through
                frontier.append(following)
    return found


def _code(through: Sequence[str]) -> str:
    if "switch" in through:
        return "NET"
    cpus = through.count("cpu")
    if cpus:
        return "PHB" if cpus == 1 else "SYS"
    return "PIX" if through.count("pcie") <= 1 else "PXB"
