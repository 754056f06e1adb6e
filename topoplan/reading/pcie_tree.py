"""Relate the PCIe tree of a machine and its pairwise codes, those of ``nvidia-smi topo -m``.

`infer_pcie_tree` infers switches and CPUs from codes, and `relation_matrix` gives the codes of a machine.

A code says how far up the PCIe tree two devices meet, so true codes are an ultrametric: d(a, c) is at most the larger
of d(a, b) and d(b, c), and equal to it if these differ. A pair whose code is not printed (NV# in its place, or cut
rows) gets the least, over all paths, of the largest code on the path: single linkage. Devices joined at PIX share a
switch, at PXB a cascade of switches, at PHB a host bridge, at NODE a CPU. The last two give the same tree, since a root
port of its own limits nothing; nor does a switch above one device, which is left out. Host bridges are named if a code
distinguishes two of a CPU. Groups that no code joins are joined by CPU affinity if their distance is unknown, or if it
is SYS but affinity differs elsewhere (firmware without NUMA nodes prints SYS everywhere, and a job bound to one core
prints one affinity everywhere). The rest is assumed, with a note.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from topoplan.machine.notes import listed
from topoplan.machine.topology import Device, Link, Topology


def relation_matrix(
    topology: Topology, kinds: Sequence[str] = ("gpu", "nic")
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return the names of GPUs and NICs, or of devices of other kinds, and for each pair how they are joined.

    Cells: ``NV#`` for # NVLinks, direct or into a common switch; ``PIX`` at most one PCIe switch, ``PXB`` several,
    ``PHB`` through one CPU, ``NODE`` likewise if the devices are known to hang below different host bridges, ``SYS``
    through several CPUs or between devices of different NUMA nodes, ``NET`` over a network if no other path exists,
    ``-`` no path, ``X`` itself.

    >>> import topoplan
    >>> names, cells = relation_matrix(topoplan.load("dgx-1v"))
    >>> cells[0][:8]
    ('X', 'NV1', 'NV1', 'NV2', 'NV2', 'SYS', 'SYS', 'SYS')
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

    >>> import topoplan
    >>> nvlinks_of_pairs(topoplan.load("dgx-2"))["gpu0", "gpu15"]
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

    ``distance`` holds the position in `CODES` of each pair whose code is known, under one of its two orders.
    ``affinity`` is the text of a device's CPUs, of which only equality counts; unknown ones are missing.

    Both GPUs share a switch with the NIC, so they share it with each other:

    >>> pix = {("gpu0", "nic0"): 0, ("gpu1", "nic0"): 0}
    >>> infer_pcie_tree(["gpu0", "gpu1", "nic0"], pix, affinity={}).parents
    {'pcie0': 'cpu0', 'gpu0': 'pcie0', 'gpu1': 'pcie0', 'nic0': 'pcie0'}
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
