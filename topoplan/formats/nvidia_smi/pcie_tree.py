"""The PCIe side of a machine: which devices share a switch or a CPU, inferred from pairwise codes; its links.

A code says how far up the PCIe tree two devices meet, so true codes are an ultrametric: d(a, c) is at most
the larger of d(a, b) and d(b, c), and equal to it where these differ. A pair whose code is not printed (NV#
in its place, or cut rows) therefore gets the least, over all paths, of the largest code on the path: single
linkage. Devices joined at PIX share a switch, at PXB a cascade of switches, at PHB a host bridge, at NODE a CPU; the
last two give the same tree, for a root port of its own limits nothing, and so does a switch above one device,
which is left out. Host bridges are named where a code tells two of a CPU apart. Groups that no code joins are joined
by CPU affinity: where their distance is unknown, or where it is SYS but affinity differs elsewhere (firmware without
NUMA nodes prints SYS everywhere, and a job bound to one core prints one affinity everywhere). The rest is assumed,
with a note.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from topoplan.hosts.notes import listed

CODES = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""How far two devices are apart on PCIe, nearest first; position is the distance."""

_PIX, _PXB, _PHB, _NODE = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class HostTree:
    """Parent of each device on the PCIe side, and what was assumed to find it.

    Parameters
    ----------
    parents : dict of str to str
        Child to parent, parents before their children; ``pcie0``, ... are switches, ``cpu0``, ... the roots.
    notes : tuple of str
        One line for each assumption.
    bridges : dict of str to str
        Host bridge ``pci0``, ... of the devices that a printed code tells from others of their CPU.
    """

    parents: dict[str, str]
    notes: tuple[str, ...] = ()
    bridges: dict[str, str] = field(default_factory=dict)

    def root(self, name: str) -> str:
        """The CPU of a device."""
        while name in self.parents:
            name = self.parents[name]
        return name


def infer_host_tree(
    names: Sequence[str], distance: Mapping[tuple[str, str], int], *, affinity: Mapping[str, str]
) -> HostTree:
    """Place devices under switches and CPUs.

    Parameters
    ----------
    names : sequence of str
        GPUs, then NICs.
    distance : mapping of (str, str) to int
        Position in `CODES` for each pair whose code is known, under one of the two orders.
    affinity : mapping of str to str
        CPUs that a device is local to, any text; only equality counts. Missing where unknown.

    Examples
    --------
    Both GPUs share a switch with the NIC, so they share it with each other:

    >>> pix = {("gpu0", "nic0"): 0, ("gpu1", "nic0"): 0}
    >>> infer_host_tree(["gpu0", "gpu1", "nic0"], pix, affinity={}).parents
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
    return HostTree(parents, tuple(notes), _host_bridges(names, distance, cpus))


def _host_bridges(
    names: Sequence[str], distance: Mapping[tuple[str, str], int], cpus: Sequence[Sequence[str]]
) -> dict[str, str]:
    """Host bridge of each device whose group a printed code puts on another bridge than a group of the same CPU."""
    groups = _joined(names, distance, _PHB)
    group_of = {name: i for i, group in enumerate(groups) for name in group}
    cpu_of = {name: i for i, members in enumerate(cpus) for name in members}
    told = {
        group_of[name]
        for (first, second), apart in distance.items()
        for name in (first, second)
        if apart > _PHB and group_of[first] != group_of[second] and cpu_of[first] == cpu_of[second]
    }
    return {name: f"pci{number}" for number, i in enumerate(sorted(told)) for name in groups[i]}


def _joined(
    names: Sequence[str], distance: Mapping[tuple[str, str], int], level: int
) -> list[tuple[str, ...]]:
    """Groups joined by pairs at this distance or nearer, in the order of names."""
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
    """Groups of one CPU each, merged by affinity or by assumption, and notes on both."""
    telling = len(set(affinity.values())) > 1
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
            if here & there and (telling or not apart):
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
    """A note if some printed code is farther than what other codes imply; the nearer relation is kept."""
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
