"""Diagnose a machine: compare its links with the expected ones, and its devices with each other.

The library machine of a server (`topoplan.operate.resemblance`) states what to expect. Without one the server itself
does: what more than half of its GPUs have at a switch or on PCIe is usual, a wire is as fast in both directions, and if
nearly all pairs of GPUs have the same NVLinks, all should. A pair has lost NVLinks if three quarters of the pairs have
more and all have some, or if nearly all have some; so have a few of eight GPUs, sixteen, … if the others have equal
sums. An allocation of an unknown machine looks like one that lost wires, so `diagnose` prefers a missed fault to a
false one.

A graph or file that states neither its source nor the models of its GPUs is a design: none of its links is a fault.

Beside NVLinks: PCIe rates, NICs and their distance (the usual one, if the server shows all its GPUs), NUMA nodes, and
GPUs without peer access. A link rate is usual if more than half of the links of its kind have it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from topoplan.errors import Note, kind_of, warning
from topoplan.machine.fabric import Fabric
from topoplan.machine.routing import fewest_steps, has_peer_access, named_peers, refused_pairs, unstaged
from topoplan.machine.topology import REFUSED, Device, Link, Topology, TopologyLike, as_topology
from topoplan.machine.variants import equivalent_servers, nic_name
from topoplan.operate.faults import SLOW, Ends, Fault, Kind, compared, lower_median, most_have
from topoplan.operate.resemblance import (
    ALIKE,
    Resemblance,
    counted_nvlinks,
    resemblance,
    server_nvlinks,
    shape_of,
    wire_of_model,
)
from topoplan.reading.pcie_tree import CODES, relation_matrix
from topoplan.units import counted, listed, name_ranges

SOCKETS, MOST_NODES = 2, 4
"""Most NUMA nodes with GPUs, and in all, that are taken for sockets; with more, a socket has several nodes."""

LEAST_SWITCHES, MOST_SWITCHES = 4, 3 / 4
"""Least PCIe switches with GPUs for a comparison of NICs, and the part of them that must agree."""


def host_faults(server: Topology, found: Resemblance) -> list[Fault]:
    """Return the faults beside NVLink; a GPU near another fault is not reported as far from NICs."""
    faults: list[Fault] = []
    for rule in (_pcie_faults, _unplugged, _fewer_nics, _far_from_nics, _distant_nics, _misplaced, _divided):
        affected = {name for fault in faults for name in fault.devices}
        above = {link.src for link in server.links if link.dst in affected and link.channel == "pcie"}
        named = affected | above if rule is _far_from_nics else set()
        faults += [one for one in rule(server, found) if not named & set(one.devices)]
    return faults


def _pcie_faults(server: Topology, found: Resemblance) -> list[Fault]:
    """Return links of the host that are slower than others of their sort, or run one way."""
    sorts: dict[tuple[str, ...], dict[Ends, Link]] = {}
    for link in server.links:
        # a NIC whose place is unknown has a side for each direction
        sided = any(nic_name(end) != end for end in (link.src, link.dst))
        if link.channel in ("pcie", "c2c") and not sided:
            sorts.setdefault(_sort(server, link), {})[link.src, link.dst] = link
    faults = []
    for sort, have in sorts.items():
        rate = _usual_rate(_wire_ends(have).values())
        if rate is None and found.machine is not None:
            rate = _library_rate(found.machine, sort, have)
        wanted: dict[Ends, Link] = {}
        for (src, dst), link in have.items():
            back = have.get((dst, src))
            best = max(link.bandwidth, back.bandwidth if back else 0.0, rate or 0.0)
            wanted |= {
                (a, b): Link(a, b, link.channel, best, link.count, shared=link.shared)
                for a, b in ((src, dst), (dst, src))
            }
        faults += compared(have, wanted)
    return faults


def _sort(server: Topology, link: Link) -> tuple[str, ...]:
    """Return a key of links that are comparable: between devices of the same kinds, and NICs of one speed."""
    ends = [server.device(end) for end in (link.src, link.dst)]
    known = sorted(
        f"{end.model} {end.fact('gigabits')} {end.fact('pci')}" for end in ends if end.kind in ("nic", "gpu")
    )
    return (link.channel, *sorted(end.kind for end in ends), *known)


def _wire_ends(have: Mapping[Ends, Link]) -> dict[frozenset[str], float]:
    """Return the GB/s of each wire in its faster direction."""
    rates: dict[frozenset[str], float] = {}
    for ends, link in have.items():
        rates[frozenset(ends)] = max(link.bandwidth, rates.get(frozenset(ends), 0.0))
    return rates


def _usual_rate(rates: Iterable[float]) -> float | None:
    """Return the middle rate if more than half are close to it, else None."""
    known = sorted(rates)
    middle = lower_median(known)
    near = sum(SLOW * middle <= rate <= middle / SLOW for rate in known)
    return middle if 2 * near > len(known) else None


def _library_rate(machine: Topology, sort: tuple[str, ...], have: Mapping[Ends, Link]) -> float | None:
    """Return the server's fastest rate of this sort if it is close to the library machine's, else None."""
    rates = {link.bandwidth for link in machine.links if _sort(machine, link)[:3] == sort[:3]}
    most = max(link.bandwidth for link in have.values())
    rate = rates.pop() if len(rates) == 1 else 0.0
    return most if SLOW * rate <= most <= ALIKE * rate else None


def _unplugged(server: Topology, _found: Resemblance) -> list[Fault]:
    """Return GPUs without PCIe if most have it."""
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


def _distant_nics(server: Topology, found: Resemblance) -> list[Fault]:
    """Return NICs on a NUMA node that holds no GPU, if they are most of the NICs: a few there are for storage, as in a
    DGX.

    Another node is not a fault if sockets are cut into nodes, and an allocation does not tell.
    """
    homes = {_numa(server, gpu) for gpu in server.gpus}
    nics = [device.name for device in server.devices if device.kind == "nic"]
    distant = [nic for nic in nics if _numa(server, nic) not in homes | {None}]
    nodes = {device.numa for device in server.devices if device.kind == "cpu"}
    if 2 * len(distant) <= len(nics) or not homes or None in homes or not found.whole(server):
        return []
    if len(homes) > SOCKETS or len(nodes) > MOST_NODES:
        return []
    return [Fault("NUMA", tuple(distant), "on a NUMA node without a GPU", "on one with GPUs")]


def _numa(server: Topology, name: str) -> int | None:
    """Return the NUMA node of a device, or else that of the first CPU above it."""
    own = server.device(name).numa
    return own if own is not None else _numa_above(server, name)


def _numa_above(server: Topology, name: str) -> int | None:
    """Return the NUMA node of the first device above that states one."""
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


def _fewer_nics(server: Topology, _found: Resemblance) -> list[Fault]:
    """Return PCIe switches above GPUs that have fewer NICs than nearly all others."""
    below: dict[str, Counter[str]] = {}
    for link in server.links:
        if link.channel == "pcie" and server.device(link.dst).kind == "pcie":
            below.setdefault(link.dst, Counter())[server.device(link.src).kind] += 1
    nics = {switch: kinds["nic"] for switch, kinds in below.items() if kinds["gpu"]}
    if len(nics) < LEAST_SWITCHES:
        return []
    usual, times = Counter(nics.values()).most_common(1)[0]
    if times < MOST_SWITCHES * len(nics) or not usual:
        return []
    return [
        Fault(
            "NIC missing", (switch,), _counted(count), f"{_counted(usual)}, as most switches with GPUs have"
        )
        for switch, count in nics.items()
        if count < usual
    ]


def _counted(nics: int) -> str:
    return {0: "no NIC", 1: "1 NIC"}.get(nics, f"{nics} NICs")


def _misplaced(server: Topology, _found: Resemblance) -> list[Fault]:
    """Return GPUs and NICs whose stated NUMA node is not that of the CPU above them."""
    faults = []
    for device in server.devices:
        if device.kind in ("gpu", "nic") and device.numa is not None:
            node = _numa_above(server, device.name)
            if node is not None and node != device.numa:
                state = f"NUMA node {device.numa}, but its PCIe leads to node {node}"
                faults.append(Fault("NUMA", (device.name,), state, f"node {node}"))
    return faults


def _far_from_nics(server: Topology, found: Resemblance) -> list[Fault]:
    """Return GPUs farther from their nearest NIC than most; a NIC on a GPU of its own is not near another."""
    names, cells = relation_matrix(server)
    plugged = {link.src for link in server.links if server.device(link.dst).kind in ("pcie", "cpu")}
    nics = [server.device(name).kind == "nic" and name in plugged for name in names]
    nearest: dict[str, int] = {}
    serving: dict[int, set[str]] = {}
    for name, row in zip(names, cells, strict=True):
        if name in server.gpus:
            codes = {
                nic: CODES.index(code)
                for nic, code, is_nic in zip(names, row, nics, strict=True)
                if is_nic and code in CODES
            }
            nearest[name] = min(codes.values(), default=len(CODES))
            serving.setdefault(nearest[name], set()).update(n for n in codes if codes[n] == nearest[name])
    usual = most_have(nearest.values())
    # a single NIC is always near some GPUs and far from others
    if usual is None or usual == len(CODES) or len(serving[usual]) < 2 or not found.whole(server):
        return []
    faults = []
    for far in sorted({distance for distance in nearest.values() if distance > usual}):
        gpus = tuple(gpu for gpu, distance in nearest.items() if distance == far)
        state = f"the nearest NIC is {CODES[far]}" if far < len(CODES) else "no NIC is within reach"
        faults.append(Fault("NIC far", gpus, state, f"{CODES[usual]}, as for most GPUs"))
    return faults


def _divided(server: Topology, _found: Resemblance) -> list[Fault]:
    """Return GPUs in MIG mode, and GPUs without peer access."""
    faults = []
    divided = {gpu: server.device(gpu).fact("mig") for gpu in server.gpus}
    instances = {gpu: text.count(",") + 1 for gpu, text in divided.items() if text}
    if instances:
        numbers = " or ".join(map(str, sorted(set(instances.values()))))
        state = f"in MIG mode ({numbers} instances)"
        faults.append(Fault("MIG", tuple(instances), state, "whole GPUs, with peer access"))
    barred = tuple(gpu for gpu in server.gpus if not divided[gpu] and not has_peer_access(server.device(gpu)))
    if barred:
        state = "no peer access: copies pass the CPU's memory"
        faults.append(Fault("no peer access", barred, state, "peer access (ACS off, one container)"))
    refused: dict[tuple[str, ...], list[str]] = {}
    lost = _pairs_that_lose_routes(server)
    told: set[tuple[str, str]] = set()  # a pair that is refused both ways is one fault
    for gpu in server.gpus:
        if gpu not in barred and not divided[gpu]:
            named = named_peers(server.device(gpu), REFUSED, server.gpus)
            peers = tuple(peer for peer in named if (gpu, peer) in lost and (peer, gpu) not in told)
            refused.setdefault(peers, []).append(gpu)
            told |= {(gpu, peer) for peer in peers}
    for others, gpus in refused.items():
        if others:
            state = f"no peer access to {listed(others).lower()}: copies pass the CPU's memory"
            faults.append(Fault("no peer access", tuple(gpus), state, "peer access (ACS off, one container)"))
    return faults


def _pairs_that_lose_routes(server: Topology) -> frozenset[tuple[str, str]]:
    """Return the pairs without peer access that a route without a CPU would join."""
    refused = refused_pairs(server)
    found = {(link.src, link.dst) for link in server.links} & refused
    for channel in ("nvlink", "pcie") if refused else ():
        fabric = Fabric(server, (channel,))
        found |= {
            (fabric.vertices[a], fabric.vertices[b]) for a, heads in fabric.barred.items() for b in heads
        }
    return frozenset(found)


MOST = 3 / 4
"""Least part of the pairs, or of the GPUs, with the same NVLinks that makes fewer a fault."""

NEARLY_ALL = 0.9
"""Part of the pairs of GPUs with NVLinks above which none is a fault."""

_WIRED = re.compile(r"SXM[3-9]|HBM3|GB[23]00|MI3\d\dX")
"""Names of GPUs whose boards always have NVLink between every two. V100-SXM2 is not one: see a DGX-1."""


def nvlink_faults(server: Topology, found: Resemblance) -> list[Fault]:
    """Return missing and slow NVLinks, compared with the library machine, else with the usual ones."""
    have = {(link.src, link.dst): link for link in counted_nvlinks(server, found.wire)}
    if not have and not found.wires:
        return _dark(server)
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


def _dark(server: Topology) -> list[Fault]:
    """Return all GPUs of a server without NVLink, if their boards have it; GPUs in MIG mode have none."""
    gpus = [server.device(gpu) for gpu in server.gpus]
    wired = len(gpus) > 1 and all(_WIRED.search(gpu.model) and not gpu.fact("mig") for gpu in gpus)
    return [_no_nvlink(server)] if wired else []


def _no_nvlink(server: Topology) -> Fault:
    """Return the fault of a server without NVLink that should have some."""
    should_be = "some, as on every such board (is the fabric manager running?)"
    return Fault("no NVLink", server.gpus, "no NVLink", should_be)


def _usual_ports(server: Topology, have: Mapping[Ends, Link]) -> dict[Ends, Link]:
    """Return for each switch the wires of most GPUs, both ways, for all GPUs."""
    rate = lower_median([link.bandwidth / link.count for link in have.values()])
    wanted: dict[Ends, Link] = {}
    for switch in (device.name for device in server.devices if device.kind == "nvswitch"):
        ports = {gpu: _better(have.get((gpu, switch)), have.get((switch, gpu))) for gpu in server.gpus}
        usual = most_have(port.count if port else 0 for port in ports.values()) or 0
        for gpu, port in ports.items():
            count = max(usual, port.count if port else 0)
            if count:
                wanted |= _whole_bundle(gpu, switch, count, rate, port)
    return wanted


AS_NCCL_COUNTS = 0.72
"""The least part of the rate of a wire that NCCL or RCCL counts: 36 of the 50 GB/s of an MI250's."""


def _usual_pairs(server: Topology, have: Mapping[Ends, Link]) -> dict[Ends, Link]:
    """Return the wires of each pair, both ways and at full rate; if nearly all pairs agree, for all pairs."""
    rate = lower_median([link.bandwidth / link.count for link in have.values()])
    model = wire_of_model(server)
    rate = model if rate < AS_NCCL_COUNTS * SLOW * model else rate
    pairs: dict[Ends, Link] = {}
    for first, second in combinations(server.gpus, 2):
        best = _better(have.get((first, second)), have.get((second, first)))
        if best is not None:
            pairs[first, second] = best
    every = len(server.gpus) * (len(server.gpus) - 1) // 2
    (count, times), *_ = Counter(link.count for link in pairs.values()).most_common(1)
    mesh = times >= MOST * every and (len(pairs) == every > 1 or len(pairs) > NEARLY_ALL * every)
    mesh = mesh and not shape_of(server).regular
    wanted: dict[Ends, Link] = {}
    for pair in combinations(server.gpus, 2):
        there = pairs.get(pair)
        number = max(there.count if there else 0, count if mesh else 0)
        if number:
            wanted |= _whole_bundle(*pair, number, rate, there)
    return wanted


def _whole_bundle(first: str, second: str, count: int, rate: float, there: Link | None) -> dict[Ends, Link]:
    """Return ``count`` wires both ways at the present rate, or at the usual one if that is higher."""
    bandwidth = max(count * rate, there.bandwidth if there else 0.0)
    if there is not None and there.count == count and there.bandwidth >= SLOW * count * rate:
        bandwidth = there.bandwidth
    ends = ((first, second), (second, first))
    return {(a, b): Link(a, b, "nvlink", bandwidth, count) for a, b in ends}


def _better(first: Link | None, second: Link | None) -> Link | None:
    return max((one for one in (first, second) if one), key=lambda one: one.bandwidth, default=None)


def _fewer(server: Topology) -> list[Fault]:
    """Return GPUs of an unknown machine that have fewer NVLinks than most."""
    shape = shape_of(server)
    counts = dict(zip(shape.gpus, shape.wires, strict=True))
    present = {gpu: count for gpu, count in counts.items() if count}
    most = max(present.values())
    count = len(counts)
    lost = {gpu: most - count for gpu, count in counts.items() if count < most}
    # a dead wire is missing at both ends; counts that cannot pair up are the machine's own
    paired = sum(lost.values()) % 2 == 0 and 2 * max(lost.values(), default=0) <= sum(lost.values())
    if not Resemblance().whole(server) or len(lost) > (1 - MOST) * count or not paired:
        return []
    return [
        Fault("fewer NVLinks", (gpu,), counted(counts[gpu], "NVLink"), f"{most} as most GPUs have")
        for gpu in lost
    ]


_MOST = 4


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Faults of a machine.

    resembles: the library machine of its first server, with faults or as a part; empty if none.
    parts: GPUs of that machine.
    faults: equal servers have one entry, which names the others.
    places: GPUs of that machine that a part of it equals under other numbers than its own, so that it may as well be
        another part that lost links; empty otherwise.
    lacking: pairs that lost links if the GPUs have the numbers of their names.
    unknown: servers that resemble no machine of the library; the machine's name if it names no servers.
    assumed: GB/s of an NVLink if the description does not state it, else 0.
    alike: if it is assumed, the machines with as many NVLinks of another rate, and that rate in GB/s.
    before: whether it is compared with its description before listings and options.
    """

    topology: Topology
    resembles: str
    parts: int
    faults: tuple[Fault, ...]
    places: tuple[int, ...] = ()
    lacking: tuple[tuple[str, str], ...] = ()
    unknown: tuple[str, ...] = ()
    assumed: float = 0.0
    alike: tuple[tuple[str, float], ...] = ()
    before: bool = False

    @property
    def healthy(self) -> bool | None:
        """False for a fault; None if none was found, but a server resembles no known machine or may be another part."""
        if self.faults:
            return False
        return None if self.unknown or self.places or is_designed(self.topology) else True


def diagnose(topology: TopologyLike, *, sound: Topology | None = None) -> Diagnosis:
    """Return the faults of a machine or cluster.

    sound: the machine before listings and options took NVLinks from it; tells what those of a server that resembles no
    machine of the library should be.

    >>> import topoplan
    >>> found = diagnose(topoplan.without_links("dgx-1v", ["gpu0-gpu3"]))
    >>> found.resembles, [fault.text for fault in found.faults]
    ('dgx-1v', ['gpu0-gpu3: no NVLink, should be 2 NVLinks of 25 GB/s'])
    >>> diagnose("dgx-1v").healthy
    True
    >>> diagnose("torus:2,2").healthy is None
    True
    """
    topology = as_topology(topology)
    faults: list[Fault] = []
    unknown: list[str] = []
    first: Resemblance | None = None
    designed = is_designed(topology)
    classes = equivalent_servers(topology) or (("",),)
    insides = _servers(unstaged(topology), [server for server, *_ in classes])
    before = insides if sound is None else _servers(unstaged(sound), [server for server, *_ in classes])
    unlike: set[Hashable] = set()
    for (server, *others), inside, whole in zip(classes, insides, before, strict=True):
        form = _form(inside)
        found = Resemblance() if not inside.gpus or form in unlike else resemblance(inside)
        if whole is not inside and (found.machine is None or found.exact):
            found = replace(found, wires=_left(whole, inside))
        first = found if first is None else first
        if found.machine is None and inside.gpus:
            unlike.add(form)
            unknown += [name or topology.name for name in (server, *others)]
        if not designed:
            own = _server_faults(inside, found)
            if (
                server_nvlinks(whole)
                and not server_nvlinks(inside)
                and not any(one.kind == "no NVLink" for one in own)
            ):
                own.append(_no_nvlink(inside))
            faults += [_in_all(fault, server, others) for fault in own]
    if sound is not None and topology.servers:  # the NICs of a server alone are compared with one another
        there = {nic_name(device.name) for device in topology.devices}
        gone = dict.fromkeys(nic_name(one.name) for one in sound.devices if one.kind == "nic")
        faults += [Fault("NIC missing", (nic,), "no NIC", "1 NIC") for nic in gone if nic not in there]
    faults += _rows(topology) + _unreachable(topology)
    faults += _stated_faults(topology, faults)
    first = first or Resemblance()
    machine = first.machine
    parts = 0 if machine is None else len(machine.gpus)
    moved = first.exact and not first.numbered and len(first.places) < parts
    return Diagnosis(
        topology,
        "" if machine is None else machine.name,
        parts,
        tuple(faults),
        first.places if moved else (),
        first.lacking if moved else (),
        tuple(unknown),
        first.assumed,
        first.alike,
        sound is not None,
    )


def _left(whole: Topology, server: Topology) -> tuple[Link, ...]:
    """Return the NVLinks that a server had between the devices that are left."""
    names = {device.name for device in server.devices}
    return tuple(link for link in server_nvlinks(whole) if {link.src, link.dst} <= names)


def is_designed(topology: Topology) -> bool:
    """Return whether a machine is a design: without source, and GPUs without model, bus ID, NUMA node and facts.

    Its links are as they are meant, so unequal ones are not faults.
    """
    gpus = (device for device in topology.devices if device.kind == "gpu")
    return not topology.source and not any(
        one.model or one.busid or one.facts or one.numa is not None for one in gpus
    )


def machine_warnings(topology: Topology, *, gpus: Iterable[str] | None = None) -> tuple[str, ...]:
    """Return the faults of a machine as warnings, without those in its notes; of many of one kind the first.

    gpus: leave out faults that affect other GPUs only; None for all.
    """
    others = set() if gpus is None else set(topology.gpus) - set(gpus)
    texts: dict[Kind, list[str]] = {}
    for fault in diagnose(topology).faults:
        if fault.kind not in ("told", "row missing") and not all(
            map(others.intersection, _places(topology, fault))
        ):
            texts.setdefault(fault.kind, []).append(fault.text)
    return tuple(warning(text) for kind, found in texts.items() for text in _shortened(found, kind))


def _places(topology: Topology, fault: Fault) -> list[tuple[str, ...]]:
    servers = {device.name: device.server for device in topology.devices}
    copies = [tuple(_moved(name, servers[name], other) for name in fault.devices) for other in fault.servers]
    return [fault.devices, *copies]


def _shortened(texts: list[str], kind: Kind) -> list[str]:
    if len(texts) <= _MOST:
        return texts
    return [
        *texts[: _MOST - 1],
        f"{len(texts) - _MOST + 1} more like this ({kind}); topoplan check lists all",
    ]


def _servers(topology: Topology, names: Sequence[str]) -> list[Topology]:
    """Return the devices and links inside each of these servers; of the only one, all devices."""
    home = {device.name: device.server if names != [""] else "" for device in topology.devices}
    devices: dict[str, list[Device]] = {name: [] for name in names}
    links: dict[str, list[Link]] = {name: [] for name in names}
    for device in topology.devices:
        if home[device.name] in devices:
            devices[home[device.name]].append(device)
    for link in topology.links:
        if link.channel != "network" and home[link.src] == home[link.dst] in links:
            links[home[link.src]].append(link)
    notes = tuple(note for note in topology.notes if kind_of(note) == "assumed")
    return [Topology(topology.name, tuple(devices[name]), tuple(links[name]), notes=notes) for name in names]


def _form(server: Topology) -> Hashable:
    """Return a server of one GPU with numbers in place of names, so that equal servers compare equal; others whole."""
    if len(server.gpus) > 1:
        return server
    number = {device.name: str(place) for place, device in enumerate(server.devices)}
    devices = tuple(replace(one, name=number[one.name], server="") for one in server.devices)
    return devices, tuple(replace(one, src=number[one.src], dst=number[one.dst]) for one in server.links)


def _server_faults(server: Topology, found: Resemblance) -> list[Fault]:
    faults = nvlink_faults(server, found) + host_faults(server, found)
    divided = {name for fault in faults if fault.kind == "MIG" for name in fault.devices}
    dark = [one for one in faults if one.kind == "no NVLink" and divided & set(one.devices)]
    links = tuple(link for one in dark for link in one.links)
    # NVLinks of a GPU in MIG mode come back with the whole GPU.
    return [replace(one, links=links) if one.kind == "MIG" else one for one in faults if one not in dark]


def _in_all(fault: Fault, server: str, others: Sequence[str]) -> Fault:
    """Return a fault of a server with the links of the isomorphic servers."""
    links = [
        replace(link, src=_moved(link.src, server, other), dst=_moved(link.dst, server, other))
        for other in others
        for link in fault.links
    ]
    return replace(fault, links=(*fault.links, *links), servers=tuple(others))


def _moved(name: str, server: str, other: str) -> str:
    return f"{other}.{name.removeprefix(f'{server}.')}"


def _rows(topology: Topology) -> list[Fault]:
    return [
        Fault("row missing", note.devices, "no row, filled in from the others", "a whole listing")
        for note in topology.notes
        if isinstance(note, Note) and note.kind == "filled in"
    ]


def _stated_faults(topology: Topology, known: Iterable[Fault]) -> list[Fault]:
    """Return warnings in the notes, but for devices with known faults."""
    affected = {name for fault in known for name in fault.devices}
    faults = []
    for note in topology.notes:
        if kind_of(note) == "warning":
            text = warning_text(note)
            words = dict.fromkeys(re.findall(r"[\w.]+", re.sub(r"\bGPU (\d+)", r"gpu\1", text)))
            names = {device.name for device in topology.devices}
            named = tuple(word for word in words if word in names or re.fullmatch(r"gpu\d+", word))
            if not named or not set(named) <= affected:
                faults.append(Fault("told", named, text, "nothing to warn of"))
    return faults


def warning_text(note: str) -> str:
    return note.removeprefix("warning: ")


def _unreachable(topology: Topology) -> list[Fault]:
    """Return GPUs without a path, there and back, to most of the others."""
    leaving: dict[str, list[str]] = {device.name: [] for device in topology.devices}
    entering: dict[str, list[str]] = {device.name: [] for device in topology.devices}
    for link in topology.links:
        leaving[link.src].append(link.dst)
        entering[link.dst].append(link.src)
    waiting = dict.fromkeys(topology.gpus)
    groups = []
    while waiting:
        first = next(iter(waiting))
        joined = fewest_steps([first], leaving.__getitem__).keys() & fewest_steps(
            [first], entering.__getitem__
        )
        groups.append([gpu for gpu in waiting if gpu in joined])
        waiting = {gpu: None for gpu in waiting if gpu not in joined}
    largest = max(groups, key=len, default=[])
    return [
        Fault("unreachable", tuple(group), f"no path to {', '.join(name_ranges(largest))} and back", "one")
        for group in groups
        if group is not largest
    ]
