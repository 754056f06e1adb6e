"""Where the NVLinks of a server lead: to a GPU, to the NVSwitch, to a CPU, or nowhere that is known.

Each GPU lists its own far ends, so a link between two GPUs is listed twice, once for each direction. All NVSwitch chips
are one switch, since hardware stripes every transfer over them. What NCCL would pass over in silence is a note here.
"""

from __future__ import annotations

from collections.abc import Mapping

from topoplan.hosts.host import Host, HostGpu, NvlinkBundle
from topoplan.topology import Link
from topoplan.units import counted, summed

SWITCH = "nvswitch0"

STRIPED = f"{SWITCH} stands for all NVSwitch chips: hardware stripes every transfer over them"


def nvlink_links(
    host: Host, names: Mapping[str, str], cpus: Mapping[str, str]
) -> tuple[tuple[Link, ...], tuple[str, ...]]:
    """Links over NVLink, in both directions, and notes.

    Parameters
    ----------
    host : Host
    names : mapping of str to str
        Name of each GPU by its bus id.
    cpus : mapping of str to str
        Name of the CPU of each GPU by the GPU's bus id.

    Returns
    -------
    tuple of Link
        Between GPUs in the order of their numbers, then to the switch, then to CPUs.
    tuple of str
        One note for everything that was left out or looks wrong.
    """
    notes: list[str] = []
    direct: dict[tuple[str, str], NvlinkBundle] = {}
    others: list[Link] = []
    for gpu in host.gpus:
        name = names[gpu.busid]
        for bundle in gpu.nvlinks:
            if bundle.end == "gpu" and bundle.target in names and bundle.target != gpu.busid:
                direct[name, names[bundle.target]] = _joined(direct.get((name, names[bundle.target])), bundle)
            elif bundle.end == "nvswitch":
                others += _to_and_from(name, SWITCH, bundle)
            elif bundle.end == "cpu" and gpu.busid in cpus:
                others += _to_and_from(name, cpus[gpu.busid], bundle)
            else:
                notes.append(_left_out(gpu, name, bundle))
    notes += _one_sided(direct)
    return (*_paired(direct), *_merged(others)), tuple(notes)


def _joined(first: NvlinkBundle | None, second: NvlinkBundle) -> NvlinkBundle:
    if first is None:
        return second
    bandwidth = summed((first.bandwidth, second.bandwidth))
    return NvlinkBundle(second.end, second.target, first.count + second.count, bandwidth)


def _to_and_from(name: str, end: str, bundle: NvlinkBundle) -> list[Link]:
    ends = ((name, end), (end, name))
    return [Link(src, dst, "nvlink", bundle.bandwidth, bundle.count) for src, dst in ends]


def _merged(links: list[Link]) -> list[Link]:
    """Links with the same ends as one: a GPU may list several switch chips."""
    merged: dict[tuple[str, str], Link] = {}
    for link in links:
        before = merged.get((link.src, link.dst))
        count, bandwidth = (before.count, before.bandwidth) if before else (0, 0.0)
        merged[link.src, link.dst] = Link(
            link.src, link.dst, "nvlink", summed((bandwidth, link.bandwidth)), count + link.count
        )
    return list(merged.values())


def _paired(direct: Mapping[tuple[str, str], NvlinkBundle]) -> list[Link]:
    """Both directions of a pair side by side."""
    order = dict.fromkeys(pair for ends in direct for pair in (ends, ends[::-1]) if pair in direct)
    return [Link(*ends, "nvlink", direct[ends].bandwidth, direct[ends].count) for ends in order]


def _one_sided(direct: Mapping[tuple[str, str], NvlinkBundle]) -> list[str]:
    notes = []
    for (src, dst), bundle in direct.items():
        back = direct.get((dst, src))
        if back is None:
            notes.append(
                f"{src} lists {bundle.count} NVLinks to {dst}, but {dst} lists none to {src}; used in one direction"
            )
        elif back.count < bundle.count:
            notes.append(
                f"{src} lists {bundle.count} NVLinks to {dst}, but {dst} lists {back.count} to {src}; each as listed"
            )
    return notes


def _left_out(gpu: HostGpu, name: str, bundle: NvlinkBundle) -> str:
    links = f"{name}: {counted(bundle.count, 'NVLink')}"
    if bundle.target == gpu.busid:
        return f"{links} to itself ({bundle.target}); which GPU is at the far end is not known, so they are left out"
    if bundle.end == "gpu":
        return f"{links} to {bundle.target}, which is none of the GPUs; they are left out"
    return f"{links} to an unknown far end {bundle.target or '(not visible)'}; they are left out"
