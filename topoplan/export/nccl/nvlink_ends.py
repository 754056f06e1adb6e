"""NVLinks of one server as NCCL's topology file can hold them: each GPU lists GPUs, the NVSwitch, or its own CPU.

A bundle from GPU to GPU is listed at both ends, so its two directions may differ; a bundle to the switch or to a CPU is
listed once and counts for both. NCCL knows one NVSwitch: several are taken together where every GPU is on all of them.
Links of channel c2c lead from a GPU to its CPU, and are whole numbers of MB/s for each wire.
"""

from __future__ import annotations

from dataclasses import dataclass

from topoplan.errors import UsageError
from topoplan.export.nccl.host_tree import HostTree
from topoplan.hosts.notes import listed
from topoplan.topology import Link, Topology
from topoplan.units import exact, nearest_float


@dataclass(frozen=True, slots=True)
class GpuLinks:
    """What one GPU lists.

    Parameters
    ----------
    nvlinks : tuple of (str, int, float)
        Far end (a GPU, a CPU, or empty for the NVSwitch), links, and GB/s per direction of all of them.
    c2c : Link or None
        To its CPU.
    """

    nvlinks: tuple[tuple[str, int, float], ...]
    c2c: Link | None


def gpu_links(topology: Topology, tree: HostTree) -> tuple[dict[str, GpuLinks], tuple[str, ...]]:
    """What each GPU lists, by name, and what has to be said about it.

    Raises
    ------
    UsageError
        The file cannot hold it; the message names the device or link.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.export.nccl.host_tree import host_tree
    >>> box = topoplan.load("dgx-2")
    >>> gpu_links(box, host_tree(box))[0]["gpu3"].nvlinks
    (('', 6, 150.0),)
    """
    kind = {device.name: device.kind for device in topology.devices}
    links = {(link.src, link.dst): link for link in topology.links if link.channel == "nvlink"}
    c2c = {(link.src, link.dst): link for link in topology.links if link.channel == "c2c"}
    for known in (links, c2c):
        for (src, dst), link in known.items():
            _check_ends(kind, tree, link, known.get((dst, src)))
    found = {}
    switches: dict[str, list[str]] = {}
    for gpu in topology.gpus:
        direct = [(dst, link) for (src, dst), link in links.items() if src == gpu and kind[dst] != "nvswitch"]
        switched = [link for (src, dst), link in links.items() if src == gpu and kind[dst] == "nvswitch"]
        listed_ends = [(dst, link.count, link.bandwidth) for dst, link in direct]
        if switched:
            switches[gpu] = sorted(link.dst for link in switched)
            bandwidth = nearest_float(sum(exact(link.bandwidth) for link in switched))  # type: ignore[arg-type]
            listed_ends.append(("", sum(link.count for link in switched), bandwidth))
        up = [link for (src, _), link in c2c.items() if src == gpu]
        found[gpu] = GpuLinks(tuple(listed_ends), up[0] if up else None)
    return found, _switch_notes(topology, switches)


def _check_ends(kind: dict[str, str], tree: HostTree, link: Link, back: Link | None) -> None:
    ends = f"{link.src}->{link.dst} ({link.channel})"
    if back is None:
        raise UsageError(
            f"{ends} has no way back, and NCCL takes no link of one direction; take it out with --without-link"
        )
    gpu, other = (link.src, link.dst) if kind[link.src] == "gpu" else (link.dst, link.src)
    wanted = ("cpu",) if link.channel == "c2c" else ("gpu", "nvswitch", "cpu")
    if kind[gpu] != "gpu" or kind[other] not in wanted:
        raise UsageError(
            f"{ends} joins a {kind[link.src]} and a {kind[link.dst]}; NCCL's file has no place for it"
        )
    if kind[other] == "cpu" and tree.cpu_of(gpu) != other:
        raise UsageError(f"{ends}: NCCL's file knows only the CPU above a GPU on PCIe, {tree.cpu_of(gpu)}")
    if kind[other] != "gpu" and (back.bandwidth, back.count) != (link.bandwidth, link.count):
        raise UsageError(
            f"{ends} has {link.count} links of together {link.bandwidth:g} GB/s and {back.count} of {back.bandwidth:g} "
            "back, and NCCL's file has one figure for both directions; make them equal with --slow-link"
        )


def _switch_notes(topology: Topology, switches: dict[str, list[str]]) -> tuple[str, ...]:
    known = [device for device in topology.devices if device.kind == "nvswitch"]
    used = sorted({name for names in switches.values() for name in names})
    for gpu, names in switches.items():
        if names != used:
            raise UsageError(
                f"{gpu} is on {', '.join(names)} but other GPUs are on {', '.join(used)}, and NCCL knows one NVSwitch; "
                "choose GPUs that share theirs with --gpus"
            )
    notes = []
    if len(used) > 1:
        notes.append(f"{listed(used)} are one NVSwitch in the file, as NCCL has one")
    able = [device.name for device in known if device.multicast or device.reduce]
    if able:
        notes.append(f"{listed(able)} can copy or add, which the file cannot say")
    spare = [device.name for device in known if device.name not in used]
    if spare:
        notes.append(f"left out, since no GPU is on it: {listed(spare)}")
    return tuple(notes)
