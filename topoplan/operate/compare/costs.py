"""Compute the cost of each server of a cluster and of each fault of a machine for a collective.

For a server: the rate of the collective on all servers, and on all but that one. A server with slower NICs slows down
all others, and without it there are fewer ranks. Isomorphic servers, on switches with isomorphic neighbours, share one
result. Leaving out several together is not searched. For a fault: the rates of the machine as it is, without any fault,
and with that fault alone, by the planner, or by the upper bound beyond `MOST_PLANNED` GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.routing import staged, unstaged
from topoplan.machine.topology import REFUSED, Device, Topology, TopologyLike
from topoplan.machine.variants import equivalent_servers
from topoplan.operate.diagnosis import Diagnosis
from topoplan.operate.faults import Fault, mended
from topoplan.plans.build import Allocation
from topoplan.plans.plan import ALL_COLLECTIVES
from topoplan.solve.planner import plan
from topoplan.solve.upper_bound import compute_bound
from topoplan.units import TOLERANCE, bus_factor


@dataclass(frozen=True, slots=True)
class WithoutServer:
    """Rates without one server, or without any one of several isomorphic servers.

    servers: empty if none is left out.
    gpus: remaining ranks.
    rate, bus: GB/s of algorithm and of bus bandwidth; 0 if no path joins the remaining ranks.
    gap: relative distance of the rate to its bound.
    """

    servers: tuple[str, ...]
    gpus: int
    rate: float
    bus: float
    gap: float


@dataclass(frozen=True, slots=True)
class ServerCosts:
    """Rates without each server of an allocation, highest first; ``whole`` is with all."""

    collective: str
    whole: WithoutServer
    rows: tuple[WithoutServer, ...]

    def gain(self, row: WithoutServer) -> float:
        """Return the rate without the server over the rate with all: above 1 if it slows the others down."""
        return row.rate / self.whole.rate

    @property
    def slow(self) -> tuple[WithoutServer, ...]:
        """Servers without which the others are faster than with all, and than without any other.

        Fewer ranks alone can be faster: an allreduce moves 2 (N - 1) / N bytes per byte of the buffer.
        """
        least = max(1.0, self.gain(self.rows[-1]))
        return tuple(row for row in self.rows if self.gain(row) > least * (1 + TOLERANCE))


def without_each_server(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    channels: str = "auto",
    progress: Callable[[str], None] | None = None,
) -> ServerCosts:
    """Return the rate of packed trees on all servers of an allocation, and without each of them.

    topology, collective, gpus, channels: as for `topoplan.plan`; the root of a broadcast or reduce is the first
    remaining GPU.

    One GPU of each of three DGX-1V with NICs of 100 Gb/s, and of one with 25:

    >>> import topoplan
    >>> box, slow = topoplan.Server("dgx-1v", [0], count=3), topoplan.Server("dgx-1v", [0], nic_gbps=25)
    >>> mixed = topoplan.cluster([box, slow], nic_gbps=100, nics=1, nic_access="direct")
    >>> found = without_each_server(mixed)
    >>> [(row.servers, row.gpus, row.rate) for row in (found.whole, *found.rows)]
    [((), 4, 3.125), (('s3',), 3, 9.375), (('s0', 's1', 's2'), 3, 3.125)]
    """
    asked = Allocation.of(topology, collective, gpus=gpus, root=None, among=ALL_COLLECTIVES)
    machine, collective = asked.machine, asked.collective
    every = machine.gpus
    of_server: dict[str, list[int]] = {}
    for gpu in asked.gpus:
        of_server.setdefault(machine.device(every[gpu]).server, []).append(gpu)
    if len(of_server) < 3:
        raise UsageError(
            f"the cost of a server needs an allocation of three servers or more, got {len(of_server)}; name more GPUs"
        )
    groups = _groups(machine, of_server)
    whole = _without((), machine, collective, asked.gpus, channels, progress)
    rows = []
    for group in groups:
        left = [gpu for gpu in asked.gpus if gpu not in of_server[group[0]]]
        rows.append(_without(group, machine, collective, left, channels, progress))
    return ServerCosts(collective, whole, tuple(sorted(rows, key=lambda row: -row.rate)))


def _without(
    servers: tuple[str, ...],
    machine: Topology,
    collective: str,
    gpus: Sequence[int],
    channels: str,
    progress: Callable[[str], None] | None,
) -> WithoutServer:
    if progress:
        progress(f"without {servers[0]}" if servers else "all servers")
    try:
        made = plan(machine, collective, gpus=gpus, channels=channels)
    except InfeasibleError:
        if not servers:
            raise
        return WithoutServer(servers, len(gpus), 0.0, 0.0, 0.0)
    return WithoutServer(
        servers, len(gpus), made.rate, made.rate * bus_factor(collective, len(gpus)), made.gap
    )


def _groups(machine: Topology, of_server: dict[str, list[int]]) -> list[tuple[str, ...]]:
    """Return equivalent servers: isomorphic, with the same GPUs in use, on switches with the same neighbours."""
    kind = {server: number for number, group in enumerate(equivalent_servers(machine)) for server in group}
    place: dict[str, int] = {}
    for number, gpu in enumerate(machine.gpus):
        place.setdefault(machine.device(gpu).server, number)
    used = {server: tuple(sorted(gpu - place[server] for gpu in gpus)) for server, gpus in of_server.items()}
    switches = {device.name for device in machine.devices if device.kind == "switch"}
    home = {device.name: device.server for device in machine.devices}
    below: dict[str, dict[str, float]] = {name: {} for name in switches}
    for link in machine.links:
        if link.dst in switches and home[link.src] in of_server:
            own = below[link.dst]
            own[home[link.src]] = own.get(home[link.src], 0.0) + link.bandwidth
    neighbours: dict[str, list[tuple[tuple[int, float], ...]]] = {server: [] for server in of_server}
    for members in below.values():
        seen = tuple(sorted((kind[server], bandwidth) for server, bandwidth in members.items()))
        for server in members:
            neighbours[server].append(seen)
    groups: dict[object, list[str]] = {}
    for server in of_server:
        groups.setdefault((kind[server], used[server], tuple(sorted(neighbours[server]))), []).append(server)
    return [tuple(group) for group in groups.values()]


MOST_PLANNED = 72
"""Most GPUs for rates of plans; larger machines get upper bounds."""

TIME_LIMIT = 20.0
"""Time limit in seconds for the plan of a machine with faults."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Rates of a collective over all GPUs in GB/s of algorithm bandwidth; 0 if no links join them.

    now, healthy: of the machine as it is, and with all its faults repaired.
    alone: of the machine with this fault and no other.
    """

    now: float
    healthy: float
    alone: float


def costs_of(
    found: Diagnosis, collective: str = "allreduce", *, progress: Callable[[str], None] | None = None
) -> tuple[Cost, ...]:
    """Return the cost of each fault for a collective over all GPUs; () for fewer than two GPUs.

    >>> import topoplan
    >>> from topoplan.operate.diagnosis import diagnose
    >>> broken = topoplan.without_links("dgx-1v", ["gpu0-gpu3", "gpu5-gpu6"])
    >>> [(round(c.now, 1), round(c.healthy, 1), round(c.alone, 1)) for c in costs_of(diagnose(broken))]
    [(71.4, 85.7, 78.6), (71.4, 85.7, 78.6)]
    """
    topology = found.topology
    if len(topology.gpus) < 2 or not found.faults:
        return ()
    rates: dict[tuple[object, ...], float] = {}

    def rate(machine: Topology) -> float:
        key = (machine.devices, frozenset(machine.links))
        if key not in rates:
            if progress is not None:
                progress(f"{len(rates)} machines planned")
            rates[key] = _rate(machine, collective)
        return rates[key]

    now, healthy = rate(topology), rate(_with_faults(found, []))
    return tuple(Cost(now, healthy, rate(_with_faults(found, [fault]))) for fault in found.faults)


def _with_faults(found: Diagnosis, left: Sequence[Fault]) -> Topology:
    """Return the machine with all faults repaired but ``left``; with peer access PCIe switches forward again."""
    whole = unstaged(found.topology)
    stay = {link for fault in left for link in fault.links}
    others = [fault for fault in found.faults if fault not in left]
    # two GPUs without any NVLink may share a link
    repaired = [
        replace(fault, links=tuple(link for link in fault.links if link not in stay)) for fault in others
    ]
    machine = _with_access(mended(whole, repaired), left)
    barred = any(fault.kind in ("MIG", "no peer access") for fault in left)
    return staged(machine) if barred and whole != found.topology else machine


def _with_access(machine: Topology, left: Sequence[Fault]) -> Topology:
    """Return the machine whose GPUs have peer access, but for those of some faults."""
    barred = {
        name
        for fault in left
        if fault.kind in ("MIG", "no peer access")
        for device in fault.devices
        for name in (device, *(f"{server}.{device.rpartition('.')[2]}" for server in fault.servers))
    }

    def repaired(device: Device) -> Device:
        kept = tuple(fact for fact in device.facts if fact[0] not in (REFUSED, "mig", "peer_access"))
        return device if device.name in barred or kept == device.facts else replace(device, facts=kept)

    return replace(machine, devices=tuple(map(repaired, machine.devices)))


def _rate(machine: Topology, collective: str) -> float:
    try:
        if len(machine.gpus) > MOST_PLANNED:
            return float(compute_bound(machine, collective).rate)
        return float(plan(machine, collective, time_limit=TIME_LIMIT).rate)
    except InfeasibleError:
        return 0.0
