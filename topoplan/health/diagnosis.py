"""What is amiss in a machine: its wires against those they should be, its devices against each other.

What a server should be is said by the machine of the library that it is (`topoplan.health.resemblance`), else by
itself: what more than half of its GPUs have is usual, a wire runs as fast one way as the other, and where three
quarters of all pairs have the same NVLinks, all should. What is merely uneven by design (four of the eight V100 of a
rented half, GPUs near no NIC because there is one) is passed over: `diagnose` would rather miss a fault of a machine
that nobody knows than name one that is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

from topoplan.clusters.alike import alike
from topoplan.formats.matrix import relation_matrix
from topoplan.formats.nvidia_smi.pcie_tree import CODES
from topoplan.health.faults import SLOW, Ends, Fault, Kind, compared
from topoplan.health.resemblance import ALIKE, Resemblance, resemblance, server_nvlinks, shape_of, whole_rate
from topoplan.hosts.notes import Note, kind_of, listed, warning
from topoplan.topology import Link, Topology, TopologyLike, as_topology

Value = TypeVar("Value", bound=Hashable)

NEARLY_ALL = 3 / 4
"""Part of the pairs of GPUs that have the same NVLinks where the others are said to lack some."""

MOST_SOCKETS = 2
"""NUMA nodes that are taken for sockets; where GPUs are on more, a socket has several."""

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
        Of servers that are alike, those of the first.
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
    for server in [group[0] for group in alike(topology)] or [""]:
        inside = _server(topology, server)
        found = resemblance(inside) if inside.gpus else Resemblance()
        first = found if first is None else first
        faults += _of_server(inside, found)
    faults += _rows(topology) + _told(topology) + _unreachable(topology, faults)
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
    faults = _nvlink_faults(server, found)
    for rule in (_pcie_faults, _unplugged, _far_from_nics, _distant_nics, _misplaced, _divided):
        hurt = {name for fault in faults for name in fault.devices}
        faults += [one for one in rule(server, found) if one.kind != "NIC far" or not hurt & set(one.devices)]
    divided = {name for fault in faults if fault.kind == "MIG" for name in fault.devices}
    return [one for one in faults if one.kind != "no NVLink" or not divided & set(one.devices)]


def _nvlink_faults(server: Topology, found: Resemblance) -> list[Fault]:
    have = {(link.src, link.dst): link for link in server_nvlinks(server)}
    if not have:
        return []
    if found.wires:
        wanted = {(link.src, link.dst): link for link in found.wires}
    elif any(server.device(end).kind == "nvswitch" for ends in have for end in ends):
        wanted = _usual_ports(server, have)
    else:
        wanted = _usual_pairs(server, have)
    gpus = [gpu for gpu in server.gpus if any(gpu in ends for ends in wanted)]
    faults = compared(have, wanted, gpus)
    if found.machine is not None or faults:
        return faults
    return _fewer(server)


def _usual_ports(server: Topology, have: Mapping[Ends, Link]) -> dict[Ends, Link]:
    """For each switch what most of the GPUs have, both ways, for all of them."""
    wanted: dict[Ends, Link] = {}
    for switch in (device.name for device in server.devices if device.kind == "nvswitch"):
        ports = {gpu: _better(have.get((gpu, switch)), have.get((switch, gpu))) for gpu in server.gpus}
        usual = _usual((port.count, port.bandwidth) if port else None for port in ports.values())
        for gpu, port in ports.items():
            count, bandwidth = usual or ((port.count, port.bandwidth) if port else (0, 0.0))
            if count:
                wanted |= _both(gpu, switch, count, bandwidth)
    return wanted


def _usual_pairs(server: Topology, have: Mapping[Ends, Link]) -> dict[Ends, Link]:
    """What each pair has, both ways and at the rate of a whole wire; nearly all pairs say what the others should."""
    rate = whole_rate(list(have.values()))
    pairs: dict[Ends, Link] = {}
    for first, second in combinations(server.gpus, 2):
        best = _better(have.get((first, second)), have.get((second, first)))
        if best is not None:
            pairs[first, second] = best
    every = len(server.gpus) * (len(server.gpus) - 1) // 2
    (count, times), *_ = Counter(link.count for link in pairs.values()).most_common(1)
    mesh = every > 1 and times >= NEARLY_ALL * every and not shape_of(server).regular
    wanted: dict[Ends, Link] = {}
    for pair in combinations(server.gpus, 2):
        there = pairs.get(pair)
        number = max(there.count if there else 0, count if mesh else 0)
        if number:
            slow = there is None or there.bandwidth / there.count < SLOW * rate or there.count < number
            wanted |= _both(*pair, number, number * rate if slow or there is None else there.bandwidth)
    return wanted


def _both(first: str, second: str, count: int, bandwidth: float) -> dict[Ends, Link]:
    ends = ((first, second), (second, first))
    return {(a, b): Link(a, b, "nvlink", bandwidth, count) for a, b in ends}


def _better(first: Link | None, second: Link | None) -> Link | None:
    """The faster of a wire's directions, as far as they are there."""
    return max((one for one in (first, second) if one), key=lambda one: one.bandwidth, default=None)


def _usual(values: Iterable[Value]) -> Value | None:
    """What more than half of the values are; None where there is no such value."""
    counted = Counter(values)
    return next((value for value, times in counted.items() if 2 * times > counted.total()), None)


def _fewer(server: Topology) -> list[Fault]:
    """GPUs of a machine that nobody knows which have fewer NVLinks than most."""
    shape = shape_of(server)
    counts = dict(zip(shape.gpus, shape.wires, strict=True))
    present = {gpu: count for gpu, count in counts.items() if count}
    bare = [gpu for gpu in counts if gpu not in present]
    peers = [sum(cell > 0 for cell in row) for row in shape.carried]
    # Cards with bridges between two of them: one may be left over.
    bridged = max(peers, default=0) == 1 and len(bare) == 1
    most = max(present.values())
    usual = f"{most} as most GPUs have" if _usual(present.values()) == most else f"{most} as others have"
    faults = []
    if 2 * len(bare) < len(counts) and not bridged:
        faults = [Fault("no NVLink", (gpu,), "no NVLink", f"{usual}") for gpu in bare]
    lost = {gpu: most - count for gpu, count in present.items() if count < most}
    # A dead wire between two GPUs is missing at both; counts that cannot pair up are the machine's own, or those
    # of GPUs whose peers are not visible here.
    total = sum(lost.values())
    if _usual(present.values()) != most or total % 2 or 2 * max(lost.values(), default=0) > total:
        return faults
    return faults + [
        Fault("fewer NVLinks", (gpu,), f"{present[gpu]} NVLink{'s' * (present[gpu] > 1)}", usual)
        for gpu in lost
    ]


def _pcie_faults(server: Topology, found: Resemblance) -> list[Fault]:
    """Links of the host that are slower than others of their sort, or run one way."""
    sorts: dict[tuple[str, ...], dict[Ends, Link]] = {}
    for link in server.links:
        if link.channel in ("pcie", "c2c"):
            sorts.setdefault(_sort(server, link), {})[link.src, link.dst] = link
    faults = []
    for sort, have in sorts.items():
        rate = _usual(_wire_ends(have).values())
        if rate is None and found.machine is not None:
            rate = _library_rate(found.machine, sort, have)
        wanted: dict[Ends, Link] = {}
        for (src, dst), link in have.items():
            back = have.get((dst, src))
            best = max(link.bandwidth, back.bandwidth if back else 0.0, rate or 0.0)
            wanted |= {
                (a, b): Link(a, b, link.channel, best, link.count) for a, b in ((src, dst), (dst, src))
            }
        faults += compared(have, wanted)
    return faults


def _sort(server: Topology, link: Link) -> tuple[str, ...]:
    """Links of one sort may be held against each other: between devices of the same kinds, and NICs of one speed."""
    ends = [server.device(end) for end in (link.src, link.dst)]
    known = sorted(
        f"{end.model} {end.fact('gigabits')} {end.fact('pci')}" for end in ends if end.kind in ("nic", "gpu")
    )
    return (link.channel, *sorted(end.kind for end in ends), *known)


def _wire_ends(have: Mapping[Ends, Link]) -> dict[frozenset[str], float]:
    """GB/s of each wire, the faster direction."""
    rates: dict[frozenset[str], float] = {}
    for ends, link in have.items():
        rates[frozenset(ends)] = max(link.bandwidth, rates.get(frozenset(ends), 0.0))
    return rates


def _library_rate(machine: Topology, sort: tuple[str, ...], have: Mapping[Ends, Link]) -> float | None:
    """What the machine's links of this sort carry, where the fastest of the server's carry about as much."""
    rates = {link.bandwidth for link in machine.links if _sort(machine, link)[:3] == sort[:3]}
    most = max(link.bandwidth for link in have.values())
    rate = rates.pop() if len(rates) == 1 else 0.0
    return most if SLOW * rate <= most <= ALIKE * rate else None


def _unplugged(server: Topology, _found: Resemblance) -> list[Fault]:
    """GPUs without PCIe where most have it."""
    host = {
        end
        for link in server.links
        if link.channel in ("pcie", "c2c")
        and {server.device(e).kind for e in (link.src, link.dst)} - {"gpu", "nic"}
        for end in (link.src, link.dst)
    }
    away = [gpu for gpu in server.gpus if gpu not in host]
    if 2 * len(away) >= len(server.gpus):
        return []
    return [Fault("PCIe missing", (gpu,), "no PCIe link", "one, as most GPUs have") for gpu in away]


def _distant_nics(server: Topology, _found: Resemblance) -> list[Fault]:
    """NICs on a NUMA node that holds no GPU, if they are most of the NICs: a few there are for storage, as in a DGX.

    GPUs on many nodes say that sockets are cut into nodes; then it is no fault to sit on another node of a socket.
    """
    homes = {_numa(server, gpu) for gpu in server.gpus}
    nics = [device.name for device in server.devices if device.kind == "nic"]
    apart = [nic for nic in nics if _numa(server, nic) not in homes | {None}]
    if 2 * len(apart) <= len(nics) or not homes or None in homes or len(homes) > MOST_SOCKETS:
        return []
    return [Fault("NUMA", tuple(apart), "on a NUMA node without a GPU", "on one with GPUs")]


def _numa(server: Topology, name: str) -> int | None:
    """NUMA node of a device, or else that of the first CPU above it."""
    own = server.device(name).numa
    return own if own is not None else _numa_above(server, name)


def _numa_above(server: Topology, name: str) -> int | None:
    """NUMA node of the first CPU above a device that states one."""
    above = [name]
    for device in above:
        if device != name and (numa := server.device(device).numa) is not None:
            return numa
        above += [
            link.dst
            for link in server.links
            if link.src == device
            and link.channel == "pcie"
            and link.dst not in above
            and server.device(link.dst).kind in ("pcie", "cpu")
            and server.device(device).kind != "cpu"
        ]
    return None


def _misplaced(server: Topology, _found: Resemblance) -> list[Fault]:
    """GPUs and NICs that say another NUMA node than the CPU their PCIe leads to."""
    faults = []
    for device in server.devices:
        if device.kind in ("gpu", "nic") and device.numa is not None:
            node = _numa_above(server, device.name)
            if node is not None and node != device.numa:
                state = f"NUMA node {device.numa}, but its PCIe leads to node {node}"
                faults.append(Fault("NUMA", (device.name,), state, f"node {node}"))
    return faults


def _far_from_nics(server: Topology, _found: Resemblance) -> list[Fault]:
    """GPUs farther from their nearest NIC than most are; a NIC that hangs on a GPU of its own is near no other."""
    names, cells = relation_matrix(server)
    plugged = {link.src for link in server.links if server.device(link.dst).kind in ("pcie", "cpu")}
    nics = [server.device(name).kind == "nic" and name in plugged for name in names]
    nearest: dict[str, int] = {}
    for name, row in zip(names, cells, strict=True):
        if name in server.gpus:
            codes = [code for code, nic in zip(row, nics, strict=True) if nic and code in CODES]
            nearest[name] = min(map(CODES.index, codes), default=len(CODES))
    usual = _usual(nearest.values())
    if usual is None or usual == len(CODES):
        return []
    faults = []
    for far in sorted({distance for distance in nearest.values() if distance > usual}):
        gpus = tuple(gpu for gpu, distance in nearest.items() if distance == far)
        state = f"the nearest NIC is {CODES[far]}" if far < len(CODES) else "no NIC is within reach"
        faults.append(Fault("NIC far", gpus, state, f"{CODES[usual]}, as for most GPUs"))
    return faults


def _divided(server: Topology, _found: Resemblance) -> list[Fault]:
    """GPUs in MIG mode, and GPUs that may not read each other's memory."""
    faults = []
    for gpu in server.gpus:
        instances = server.device(gpu).fact("mig").split(",")
        if instances[0]:
            state = (
                f"in MIG mode, {len(instances)} instance{'s' * (len(instances) > 1)}, no access between GPUs"
            )
            faults.append(Fault("MIG", (gpu,), state, "whole, for collectives"))
    barred = tuple(gpu for gpu in server.gpus if server.device(gpu).fact("peer_access") == "none")
    if barred:
        state = "no peer access, so that copies over PCIe pass the CPU's memory"
        faults.append(Fault("no peer access", barred, state, "peer access (ACS off, one container, no MIG)"))
    return faults


def _rows(topology: Topology) -> list[Fault]:
    """Rows that a reader had to fill in."""
    return [
        Fault("row missing", note.devices, "no row of its own, filled in from the others", "a whole listing")
        for note in topology.notes
        if isinstance(note, Note) and note.kind == "filled in"
    ]


def _told(topology: Topology) -> list[Fault]:
    """What the driver, or whoever wrote the file, says is amiss."""
    faults = []
    for note in topology.notes:
        if kind_of(note) == "warning":
            text = warning_text(note)
            words = set(text.replace(",", " ").replace(":", " ").replace("-", " ").split())
            named = tuple(device.name for device in topology.devices if device.name in words)
            faults.append(Fault("told", named, text, "nothing to warn of"))
    return faults


def warning_text(note: str) -> str:
    """A warning without the word."""
    return note.removeprefix("warning: ")


def _unreachable(topology: Topology, known: Iterable[Fault]) -> list[Fault]:
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
        Fault("unreachable", tuple(group), f"no path to {listed(largest)} and back", "one")
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
