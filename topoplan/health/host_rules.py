"""What is amiss in a server beside its NVLinks: PCIe, NICs, NUMA nodes, and GPUs that may not reach each other.

What more than half of the links of a sort carry is usual, and so is the distance from which most GPUs have a NIC, where
the server shows all of its GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from topoplan.formats.matrix import relation_matrix
from topoplan.formats.nvidia_smi.pcie_tree import CODES
from topoplan.health.embedding import ALIKE
from topoplan.health.faults import SLOW, Ends, Fault, compared, lower_median, most_have
from topoplan.health.resemblance import Resemblance
from topoplan.hosts.staging import has_peer_access
from topoplan.topology import Link, Topology

SOCKETS, MOST_NODES = 2, 4
"""NUMA nodes with GPUs, and in all, up to which nodes are taken for sockets; beyond, a socket has several."""

LEAST_SWITCHES, MOST_SWITCHES = 4, 3 / 4
"""PCIe switches with GPUs from which on one with fewer NICs is named, and part of them that must have as many."""


def host_faults(server: Topology, found: Resemblance) -> list[Fault]:
    """What is amiss beside NVLink; a GPU near a fault that is named is not said to be far from NICs besides."""
    faults: list[Fault] = []
    for rule in (_pcie_faults, _unplugged, _fewer_nics, _far_from_nics, _distant_nics, _misplaced, _divided):
        hurt = {name for fault in faults for name in fault.devices}
        above = {link.src for link in server.links if link.dst in hurt and link.channel == "pcie"}
        named = hurt | above if rule is _far_from_nics else set()
        faults += [one for one in rule(server, found) if not named & set(one.devices)]
    return faults


def _pcie_faults(server: Topology, found: Resemblance) -> list[Fault]:
    """Links of the host that are slower than others of their sort, or run one way."""
    sorts: dict[tuple[str, ...], dict[Ends, Link]] = {}
    for link in server.links:
        if link.channel in ("pcie", "c2c"):
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


def _usual_rate(rates: Iterable[float]) -> float | None:
    """The middle rate, where more than half are about as high; None where they are not."""
    known = sorted(rates)
    middle = lower_median(known)
    near = sum(SLOW * middle <= rate <= middle / SLOW for rate in known)
    return middle if 2 * near > len(known) else None


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


def _distant_nics(server: Topology, found: Resemblance) -> list[Fault]:
    """NICs on a NUMA node that holds no GPU, if they are most of the NICs: a few there are for storage, as in a DGX.

    Where sockets are cut into nodes it is no fault to sit on another one, and of an allocation nothing can be said.
    """
    homes = {_numa(server, gpu) for gpu in server.gpus}
    nics = [device.name for device in server.devices if device.kind == "nic"]
    apart = [nic for nic in nics if _numa(server, nic) not in homes | {None}]
    nodes = {device.numa for device in server.devices if device.kind == "cpu"}
    if 2 * len(apart) <= len(nics) or not homes or None in homes or not found.whole(server):
        return []
    if len(homes) > SOCKETS or len(nodes) > MOST_NODES:
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


def _fewer_nics(server: Topology, _found: Resemblance) -> list[Fault]:
    """PCIe switches above GPUs that have fewer NICs than nearly all others."""
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
    """NICs in words."""
    return {0: "no NIC", 1: "1 NIC"}.get(nics, f"{nics} NICs")


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


def _far_from_nics(server: Topology, found: Resemblance) -> list[Fault]:
    """GPUs farther from their nearest NIC than most are; a NIC that hangs on a GPU of its own is near no other."""
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
    # One NIC is near some GPUs and far from others wherever it is.
    if usual is None or usual == len(CODES) or len(serving[usual]) < 2 or not found.whole(server):
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
    return faults
