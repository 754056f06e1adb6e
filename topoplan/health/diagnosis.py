"""What is amiss in a machine: its wires against those they should be, its devices against each other.

What a server should be is said by the machine of the library that it is (`topoplan.health.resemblance`), else by
itself: what more than half of its GPUs have at a switch or on PCIe is usual, a wire runs as fast one way as the other,
and where nearly all pairs of GPUs have the same NVLinks, all should. Of a machine that nobody knows an allocation looks
like a machine that lost wires, so there `diagnose` would rather miss a fault than name one that is none. The rules are
in `topoplan.health.nvlink_rules` and `topoplan.health.host_rules`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from topoplan.clusters.alike import alike
from topoplan.health.faults import Fault, Kind
from topoplan.health.host_rules import host_faults
from topoplan.health.nvlink_rules import nvlink_faults
from topoplan.health.resemblance import Resemblance, resemblance
from topoplan.hosts.notes import Note, kind_of, warning
from topoplan.hosts.staging import unstaged
from topoplan.topology import Topology, TopologyLike, as_topology
from topoplan.units import name_ranges

_MOST = 4


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is amiss in a machine.

    Parameters
    ----------
    topology : Topology
    resembles : str
        The machine of the library that its first server is, is a part of, or is with faults; empty if none.
    parts : int
        GPUs of that machine.
    faults : tuple of Fault
        Of servers that are alike, those of the first, which name the others.
    """

    topology: Topology
    resembles: str
    parts: int
    faults: tuple[Fault, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing is amiss."""
        return not self.faults


def diagnose(topology: TopologyLike) -> Diagnosis:
    """Find what is amiss in a machine or cluster.

    Parameters
    ----------
    topology : Topology, or what `topoplan.load` takes

    Examples
    --------
    >>> import topoplan
    >>> found = diagnose(topoplan.without_links("dgx-1v", ["gpu0-gpu3"]))
    >>> found.resembles, [fault.text for fault in found.faults]
    ('dgx-1v', ['gpu0-gpu3: no NVLink, should be 2 NVLinks of 25 GB/s'])
    >>> diagnose("dgx-1v").healthy
    True
    """
    topology = as_topology(topology)
    faults: list[Fault] = []
    first: Resemblance | None = None
    whole = unstaged(topology)
    for server, *others in alike(topology) or [("",)]:
        inside = _server(whole, server)
        found = resemblance(inside) if inside.gpus else Resemblance()
        first = found if first is None else first
        faults += [_in_all(fault, server, others) for fault in _of_server(inside, found)]
    faults += _rows(topology) + _unreachable(topology)
    faults += _told(topology, faults)
    machine = first.machine if first is not None else None
    return Diagnosis(
        topology,
        "" if machine is None else machine.name,
        0 if machine is None else len(machine.gpus),
        tuple(faults),
    )


def machine_warnings(topology: Topology, *, gpus: Iterable[str] | None = None) -> tuple[str, ...]:
    """The faults of a machine as warnings, but for what its notes tell already; of many of one kind the first.

    Parameters
    ----------
    topology : Topology
    gpus : iterable of str or None
        Leave out what hurts other GPUs than these.

    Examples
    --------
    >>> import topoplan
    >>> machine_warnings(topoplan.load("dgx-1v"))
    ()
    >>> machine_warnings(topoplan.without_links("dgx-1v", ["gpu0-gpu3"]))
    ('warning: gpu0-gpu3: no NVLink, should be 2 NVLinks of 25 GB/s',)
    """
    others = set() if gpus is None else set(topology.gpus) - set(gpus)
    texts: dict[Kind, list[str]] = {}
    for fault in diagnose(topology).faults:
        if fault.kind not in ("told", "row missing") and not set(fault.devices) & others:
            texts.setdefault(fault.kind, []).append(fault.text)
    return tuple(warning(text) for kind, found in texts.items() for text in _shortened(found, kind))


def _shortened(texts: list[str], kind: Kind) -> list[str]:
    if len(texts) <= _MOST:
        return texts
    return [
        *texts[: _MOST - 1],
        f"{len(texts) - _MOST + 1} more like this ({kind}); topoplan check lists all",
    ]


def _server(topology: Topology, server: str) -> Topology:
    names = {device.name for device in topology.devices if device.server == server or not server}
    return Topology(
        topology.name,
        tuple(device for device in topology.devices if device.name in names),
        tuple(
            link
            for link in topology.links
            if link.src in names and link.dst in names and link.channel != "network"
        ),
    )


def _of_server(server: Topology, found: Resemblance) -> list[Fault]:
    faults = nvlink_faults(server, found) + host_faults(server, found)
    divided = {name for fault in faults if fault.kind == "MIG" for name in fault.devices}
    dark = [one for one in faults if one.kind == "no NVLink" and divided & set(one.devices)]
    links = tuple(link for one in dark for link in one.links)
    # NVLinks of a GPU in MIG mode come back with the whole GPU.
    return [replace(one, links=links) if one.kind == "MIG" else one for one in faults if one not in dark]


def _in_all(fault: Fault, server: str, others: Sequence[str]) -> Fault:
    """A fault of a server and of those that are wired alike."""
    links = [
        replace(link, src=_moved(link.src, server, other), dst=_moved(link.dst, server, other))
        for other in others
        for link in fault.links
    ]
    return replace(fault, links=(*fault.links, *links), servers=tuple(others))


def _moved(name: str, server: str, other: str) -> str:
    """The name that a device of a server has in another one that is wired alike."""
    return f"{other}.{name.removeprefix(f'{server}.')}"


def _rows(topology: Topology) -> list[Fault]:
    """Rows that a reader had to fill in."""
    return [
        Fault("row missing", note.devices, "no row, filled in from the others", "a whole listing")
        for note in topology.notes
        if isinstance(note, Note) and note.kind == "filled in"
    ]


def _told(topology: Topology, known: Iterable[Fault]) -> list[Fault]:
    """What the driver, or whoever wrote the file, says is amiss, but for devices whose faults are known."""
    hurt = {name for fault in known for name in fault.devices}
    faults = []
    for note in topology.notes:
        if kind_of(note) == "warning":
            text = warning_text(note)
            words = dict.fromkeys(re.findall(r"[\w.]+", re.sub(r"\bGPU (\d+)", r"gpu\1", text)))
            names = {device.name for device in topology.devices}
            named = tuple(word for word in words if word in names or re.fullmatch(r"gpu\d+", word))
            if not named or not set(named) <= hurt:
                faults.append(Fault("told", named, text, "nothing to warn of"))
    return faults


def warning_text(note: str) -> str:
    """A warning without the word."""
    return note.removeprefix("warning: ")


def _unreachable(topology: Topology) -> list[Fault]:
    """GPUs that no links join, there and back, to most of the others."""
    leaving: dict[str, list[str]] = {}
    entering: dict[str, list[str]] = {}
    for link in topology.links:
        leaving.setdefault(link.src, []).append(link.dst)
        entering.setdefault(link.dst, []).append(link.src)
    waiting = dict.fromkeys(topology.gpus)
    groups = []
    while waiting:
        first = next(iter(waiting))
        joined = _reached(first, leaving) & _reached(first, entering)
        groups.append([gpu for gpu in waiting if gpu in joined])
        waiting = {gpu: None for gpu in waiting if gpu not in joined}
    largest = max(groups, key=len, default=[])
    return [
        Fault("unreachable", tuple(group), f"no path to {', '.join(name_ranges(largest))} and back", "one")
        for group in groups
        if group is not largest
    ]


def _reached(start: str, near: Mapping[str, list[str]]) -> set[str]:
    found = {start}
    frontier = [start]
    for device in frontier:
        new = [end for end in near.get(device, ()) if end not in found]
        found.update(new)
        frontier += new
    return found
