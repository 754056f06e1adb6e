"""Infer a PCIe tree from codes of pairs of devices, give the codes of a machine, and merge two descriptions of one.

A code says how far up the PCIe tree two devices meet, so true codes are an ultrametric: d(a, c) is at most the larger
of d(a, b) and d(b, c), and equal to it if these differ. A pair whose code is not printed (NV# in its place, or cut
rows) gets the least, over all paths, of the largest code on the path: single linkage. Devices joined at PIX share a
switch, at PXB a cascade of switches, at PHB a host bridge, at NODE a CPU. The last two give the same tree, since a root
port of its own limits nothing; nor does a switch above one device, which is left out. The rest is placed by CPU
affinity or assumed, with a note.

`merge_nvlink` serves files that hold the PCIe part only, such as those of cloud machines. A note stays with its
subject: notes about NVLink come from the description that gives the NVLinks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from topoplan.errors import UsageError
from topoplan.machine.hardware import with_capable
from topoplan.machine.host_topology import plain_bus_id
from topoplan.machine.topology import Device, Link, Topology, facts, without_named
from topoplan.units import listed

_ABOUT_NVLINK = re.compile("nvlink|nvswitch|xgmi|infinity fabric", re.IGNORECASE)

_PLACELESS = ("gcn", "pci", "sm", "uuid")
"""Facts of a GPU that do not depend on the slot it is plugged into."""

ONE_SWITCH, DIFFERENT_CPUS = "one switch", "different CPUs"


def merge_nvlink(topology: Topology, other: Topology) -> Topology:
    """Return a machine with the NVLinks, models and facts of GPUs of another description of it.

    NVLinks and NVSwitches of ``topology`` are replaced; models and facts are taken if it states none. GPUs are matched
    by bus id, or by number if a bus id is missing. A UsageError says that the descriptions are of different machines.
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
        notes=(*notes, *_merge_contradictions(topology, other, same)),
        source="; ".join(filter(None, (topology.source, f"NVLinks from {other.name}: {other.source}"))),
        peer_access=topology.peer_access or other.peer_access,
    )
    return with_capable(merged)


def _without_nvlinks(topology: Topology) -> Topology:
    """Return the machine without NVLinks and NVSwitches and without the notes about them."""
    gone = {device.name for device in topology.devices if device.kind == "nvswitch"}
    bare = without_named(topology, gone)
    return replace(
        bare,
        links=tuple(link for link in bare.links if link.channel != "nvlink"),
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


def _merge_contradictions(topology: Topology, other: Topology, same: Mapping[str, str]) -> list[str]:
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


def relation_matrix(
    topology: Topology, kinds: Sequence[str] = ("gpu", "nic")
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return the names of GPUs and NICs, or of devices of other kinds, and for each pair how they are joined.

    Cells: ``NV#`` for # NVLinks, direct or into a common switch; ``PIX`` at most one PCIe switch, ``PXB`` several,
    ``PHB`` through one CPU, ``NODE`` likewise if the devices are known to hang below different host bridges, ``SYS``
    through several CPUs or between devices of different NUMA nodes, ``NET`` over a network if no other path exists,
    ``-`` no path, ``X`` itself.
    """
    chosen = [device for device in topology.devices if device.kind in kinds]
    kind_of = {device.name: device.kind for device in topology.devices}
    nvlinks = nvlinks_of_pairs(topology)
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
    """Return the columns that ``nvidia-smi topo -m`` prints beside the matrix, if they are known of any GPU.

    ``CPU Affinity`` (the fact ``cpus`` of the GPU, or of its CPU) and ``NUMA`` have a cell for each of ``names``,
    empty for devices other than GPUs.
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


def nvlinks_of_pairs(topology: Topology) -> Counter[tuple[str, str]]:
    """Return the NVLinks from each GPU to each other one: direct, and into NVSwitches that they share.

    Switches that are joined to each other count as one; through several planes of switches the links add up, as
    ``nvidia-smi topo -m`` counts them.
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
    """Return for each device the kinds of devices and ``network`` links that a shortest path to it crosses, no GPU."""
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
    """Return whether both are known and not the same."""
    return first != second and first not in (None, "") and second not in (None, "")


CODES = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""PCIe distances of two devices, nearest first; position is the distance."""

_PIX, _PXB, _PHB, _NODE = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class PcieTree:
    """Parents of devices on PCIe, and a note for each assumption.

    ``parents`` lists parents before their children; ``pcie0``, ... are switches, ``cpu0``, ... the roots. ``bridges``
    holds the host bridge ``pci0``, ... of the devices that a printed code separates from others of their CPU.
    """

    parents: dict[str, str]
    notes: tuple[str, ...] = ()
    bridges: dict[str, str] = field(default_factory=dict)

    def root(self, name: str) -> str:
        while name in self.parents:
            name = self.parents[name]
        return name


def infer_pcie_tree(
    names: Sequence[str], distance: Mapping[tuple[str, str], int], *, affinity: Mapping[str, str]
) -> PcieTree:
    """Place devices, GPUs before NICs, under switches and CPUs.

    Host bridges are named if a code distinguishes two of a CPU. Groups that no code joins are joined by CPU affinity if
    their distance is unknown, or if it is SYS but affinity differs elsewhere (firmware without NUMA nodes prints SYS
    everywhere, and a job bound to one core prints one affinity everywhere).

    ``distance`` holds the position in `CODES` of each pair whose code is known, under one of its two orders.
    ``affinity`` is the text of a device's CPUs, of which only equality counts; unknown ones are missing.
    """
    hosts = _joined(names, distance, _NODE)
    cpus, notes = _cpus(hosts, distance, affinity)
    notes = _contradictions(names, distance, hosts) + notes
    cascade_of = {name: group for group in _joined(names, distance, _PXB) for name in group}
    leaf_of = {name: group for group in _joined(names, distance, _PIX) for name in group}
    parents: dict[str, str] = {}
    switches = 0
    for number, members in enumerate(cpus):
        for cascade in dict.fromkeys(cascade_of[name] for name in members):
            above = f"cpu{number}"
            leaves = tuple(dict.fromkeys(leaf_of[name] for name in cascade))
            if len(leaves) > 1:
                parents[f"pcie{switches}"], above = above, f"pcie{switches}"
                switches += 1
            for leaf in leaves:
                parent = above
                if len(leaf) > 1:
                    parents[f"pcie{switches}"], parent = above, f"pcie{switches}"
                    switches += 1
                parents.update(dict.fromkeys(leaf, parent))
    return PcieTree(parents, tuple(notes), _host_bridges(names, distance, cpus))


def _host_bridges(
    names: Sequence[str], distance: Mapping[tuple[str, str], int], cpus: Sequence[Sequence[str]]
) -> dict[str, str]:
    """Return the host bridge of each device that a printed code separates from a group of the same CPU."""
    groups = _joined(names, distance, _PHB)
    group_of = {name: i for i, group in enumerate(groups) for name in group}
    cpu_of = {name: i for i, members in enumerate(cpus) for name in members}
    separated = {
        group_of[name]
        for (first, second), apart in distance.items()
        for name in (first, second)
        if apart > _PHB and group_of[first] != group_of[second] and cpu_of[first] == cpu_of[second]
    }
    return {name: f"pci{number}" for number, i in enumerate(sorted(separated)) for name in groups[i]}


def _joined(
    names: Sequence[str], distance: Mapping[tuple[str, str], int], level: int
) -> list[tuple[str, ...]]:
    """Return the groups joined by pairs at this distance or nearer, in the order of names."""
    group = {name: [name] for name in names}
    for (first, second), apart in distance.items():
        if apart <= level and group[first] is not group[second]:
            group[first] += group[second]
            for name in group[second]:
                group[name] = group[first]
    order = {name: i for i, name in enumerate(names)}
    distinct = {id(members): members for members in (group[name] for name in names)}
    return [tuple(sorted(members, key=order.__getitem__)) for members in distinct.values()]


def _cpus(
    hosts: Sequence[tuple[str, ...]], distance: Mapping[tuple[str, str], int], affinity: Mapping[str, str]
) -> tuple[list[list[str]], list[str]]:
    """Return groups of one CPU each, merged by affinity or by assumption, and notes on both."""
    differing = len(set(affinity.values())) > 1
    host_of = {name: i for i, host in enumerate(hosts) for name in host}
    far = {
        frozenset((host_of[first], host_of[second]))
        for (first, second) in distance
        if host_of[first] != host_of[second]
    }
    cpus: list[list[int]] = []
    overruled: list[str] = []
    by_affinity: list[str] = []
    assumed: dict[int, list[str]] = {}
    for i, host in enumerate(hosts):
        here = {affinity[name] for name in host if name in affinity}
        for number, cpu in enumerate(cpus):
            there = {affinity[name] for j in cpu for name in hosts[j] if name in affinity}
            apart = any(frozenset((i, j)) in far for j in cpu)
            if here & there and (differing or not apart):
                (overruled if apart else by_affinity).extend(host)
            elif not apart and not (here and there):
                assumed.setdefault(number, []).extend(host)
            else:
                continue
            cpu.append(i)
            break
        else:
            cpus.append([i])
    notes = []
    if overruled:
        notes.append(f"{listed(overruled)}: SYS read as NODE where CPU affinity is that of an earlier GPU")
    if by_affinity:
        notes.append(f"{listed(by_affinity)}: PCIe codes are hidden by NV#; placed by CPU affinity")
    for number, devices in assumed.items():
        notes.append(f"{listed(devices)}: no code says where on PCIe; assumed at root ports of cpu{number}")
    return [[name for j in cpu for name in hosts[j]] for cpu in cpus], notes


def _contradictions(
    names: Sequence[str], distance: Mapping[tuple[str, str], int], hosts: Sequence[tuple[str, ...]]
) -> list[str]:
    """Return a note if a printed code is farther than other codes imply; the nearer relation is kept."""
    wrong: dict[tuple[str, str], tuple[int, int]] = {}
    for level, groups in (
        *((level, _joined(names, distance, level)) for level in (_PIX, _PXB, _PHB)),
        (_NODE, hosts),
    ):
        group_of = {name: i for i, group in enumerate(groups) for name in group}
        for (first, second), apart in distance.items():
            if apart > level and group_of[first] == group_of[second]:
                wrong.setdefault((first, second), (apart, level))
    if not wrong:
        return []
    (first, second), (printed, implied) = next(iter(wrong.items()))
    more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return [
        f"{first}-{second} is printed {CODES[printed]} but other codes imply {CODES[implied]}{more}; "
        "the nearer is kept"
    ]
