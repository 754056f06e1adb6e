"""Merge two descriptions of one machine: NVLinks from one, PCIe, NICs and CPUs from the other.

Some files hold the PCIe part only, such as those of cloud machines, and some sources see more of one side than of the
other. A note stays with its subject: notes about NVLink come from the description that gives the NVLinks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations

from topoplan.errors import UsageError
from topoplan.machine.hardware import with_capable
from topoplan.machine.host import plain_bus_id
from topoplan.machine.topology import Device, Link, Topology, facts

_ABOUT_NVLINK = re.compile("nvlink|nvswitch|xgmi|infinity fabric", re.IGNORECASE)

_PLACELESS = ("gcn", "pci", "sm", "uuid")
"""Facts of a GPU that do not depend on the slot it is plugged into."""

ONE_SWITCH, DIFFERENT_CPUS = "one switch", "different CPUs"


def merge_nvlink(topology: Topology, other: Topology) -> Topology:
    """Return a machine with the NVLinks, models and facts of GPUs of another description of it.

    NVLinks and NVSwitches of ``topology`` are replaced; models and facts are taken if it states none. GPUs are matched
    by bus id, or by number if a bus id is missing. A UsageError says that the descriptions are of different machines.

    >>> import topoplan
    >>> boxes = topoplan.load("pcie-x8"), topoplan.load("dgx-1v")
    >>> machine = merge_nvlink(*boxes)
    >>> [sum(link.count for link in m.links if link.channel == "nvlink") for m in (*boxes, machine)]
    [0, 48, 48]
    >>> machine.notes[-1]
    'NVLinks from dgx-1v, GPUs matched by number'
    """
    for machine in (topology, other):
        if len(machine.servers) > 1:
            raise UsageError(
                f"{machine.name} has {len(machine.servers)} servers, and --merge joins two descriptions of one; "
                "merge the server first"
            )
    same, how = _matched(topology, other)
    server = next(iter(topology.servers), "")
    switches = tuple(replace(device, server=server) for device in other.devices if device.kind == "nvswitch")
    names = {there: here for here, there in same.items()} | {switch.name: switch.name for switch in switches}
    bare = _without_nvlinks(topology)
    gpus = [_with_known(bare.device(here), other.device(there)) for here, there in same.items()]
    rest = [device for device in bare.devices if device.kind != "gpu"]
    notes = [*bare.notes, *(note for note in other.notes if _ABOUT_NVLINK.search(note))]
    links = _nvlinks(topology, other, names)
    none = "" if links else "; it states none"
    notes.append(f"NVLinks from {other.name}, GPUs matched by {how}{none}")
    if any(link.channel == "nvlink" for link in topology.links):
        notes.append(f"the NVLinks that {topology.name} itself states are replaced")
    merged = replace(
        bare,
        devices=(*gpus, *switches, *rest),
        links=(*links, *bare.links),
        notes=(*notes, *_contradictions(topology, other, same)),
        source="; ".join(filter(None, (topology.source, f"NVLinks from {other.name}: {other.source}"))),
        peer_access=topology.peer_access or other.peer_access,
    )
    return with_capable(merged)


def _without_nvlinks(topology: Topology) -> Topology:
    """Return the machine without NVLinks and NVSwitches and without the notes about them."""
    gone = {device.name for device in topology.devices if device.kind == "nvswitch"}
    return replace(
        topology,
        devices=tuple(device for device in topology.devices if device.name not in gone),
        links=tuple(
            link for link in topology.links if link.channel != "nvlink" and not gone & {link.src, link.dst}
        ),
        notes=tuple(note for note in topology.notes if not _ABOUT_NVLINK.search(note)),
    )


def _matched(topology: Topology, other: Topology) -> tuple[dict[str, str], str]:
    """Return the name of each GPU in the other description, and the property by which they were matched."""
    here, there = topology.gpus, other.gpus
    if len(here) != len(there):
        raise UsageError(
            f"{topology.name} has {len(here)} GPUs and {other.name} has {len(there)}; --merge joins two "
            "descriptions of one machine"
        )
    here_ids, there_ids = gpu_bus_ids(topology), gpu_bus_ids(other)
    if not all(here_ids) or not all(there_ids):
        return dict(zip(here, there, strict=True)), "number"
    at = dict(zip(there_ids, there, strict=True))
    for gpu, busid in zip(here, here_ids, strict=True):
        if busid not in at:
            raise UsageError(
                f"{gpu} of {topology.name} is at bus id {busid}, where {other.name} has no GPU; --merge joins two "
                "descriptions of one machine"
            )
    return {gpu: at[busid] for gpu, busid in zip(here, here_ids, strict=True)}, "bus id"


def gpu_bus_ids(topology: Topology) -> tuple[str, ...]:
    """Return the bus ids of the GPUs as the kernel writes them; empty if a description states none."""
    return tuple(plain_bus_id(topology.device(gpu).busid) for gpu in topology.gpus)


def _with_known(gpu: Device, other: Device) -> Device:
    """Return the GPU with the model and the facts of its kind that only the other description states."""
    known = {key: value for key, value in other.facts if key in _PLACELESS} | dict(gpu.facts)
    return replace(gpu, model=gpu.model or other.model, facts=facts(**known))


def _nvlinks(topology: Topology, other: Topology, names: Mapping[str, str]) -> list[Link]:
    """Return the NVLinks under the first description's names; one to a CPU leads to the CPU of its GPU there."""
    cpus = {gpu: path[-1] for gpu, path in upward_paths(topology).items() if path}
    links = []
    for link in other.links:
        if link.channel != "nvlink":
            continue
        src, dst = (names.get(end, "") for end in (link.src, link.dst))
        src, dst = src or cpus.get(dst, ""), dst or cpus.get(src, "")
        if not src or not dst:
            raise UsageError(
                f"{other.name} has an NVLink {link.src}->{link.dst}, which has no place in {topology.name}; take that "
                "link out first"
            )
        links.append(replace(link, src=src, dst=dst))
    return links


def upward_paths(topology: Topology) -> dict[str, tuple[str, ...]]:
    """Return the devices on the shortest path from each GPU over PCIe to a CPU, nearest first; empty without a path."""
    kinds = {device.name: device.kind for device in topology.devices}
    neighbours: dict[str, list[str]] = {}
    for link in topology.links:
        if link.channel == "pcie" and kinds[link.dst] in ("gpu", "pcie"):
            neighbours.setdefault(link.src, []).append(link.dst)
    reached = [name for name, kind in kinds.items() if kind == "cpu"]
    paths: dict[str, tuple[str, ...]] = dict.fromkeys(reached, ())
    for device in reached:
        for below in neighbours.get(device, ()):
            if below not in paths:
                paths[below] = (device, *paths[device])
                reached.append(below)
    return {gpu: paths.get(gpu, ()) for gpu in topology.gpus}


def _contradictions(topology: Topology, other: Topology, same: Mapping[str, str]) -> list[str]:
    """Return a note on GPUs that share a switch in one description and no CPU in the other; a VM may hide less."""
    here, there = upward_paths(topology), upward_paths(other)
    pairs = []
    for first, second in combinations(topology.gpus, 2):
        relations = {relation(here[first], here[second]), relation(there[same[first]], there[same[second]])}
        if relations == {ONE_SWITCH, DIFFERENT_CPUS}:
            pairs.append(f"{first}-{second}")
    if not pairs:
        return []
    more = f" and {len(pairs) - 1} more pairs" if len(pairs) > 1 else ""
    return [
        f"PCIe of {topology.name} is kept, but {other.name} contradicts it: {pairs[0]}{more} share a switch in one of "
        "them and are on different CPUs in the other"
    ]


def relation(first: tuple[str, ...], second: tuple[str, ...]) -> str:
    """Return the PCIe relation of two GPUs with these `upward_paths`; empty for anything in between."""
    if not first or not second:
        return ""
    if set(first[:-1]) & set(second[:-1]):
        return ONE_SWITCH
    return "" if first[-1] == second[-1] else DIFFERENT_CPUS
