"""Model the time that NCCL expects of a collective by each algorithm and protocol, by which it chooses among them.

Its model (``src/graph/tuning.cc``, 2.27 to 2.30) is a latency and a bandwidth for each: a base for the launch, and a
hop's latency for every sequential step; the bandwidth of all channels together, less the losses of protocol and
algorithm, and at most a fixed amount for each channel:

    ring       N - 1 steps (2 (N - 1) for allreduce), of which those between servers cost a network's hop
    tree       up and down a chain in the server and log2(n) servers
    NVLS       one hop through the switch, of which 85 % (Hopper) or 74 % (Blackwell) of its rate is expected
    NVLS tree  the same in servers, and a tree between them
    PAT        log2(n) steps and a linear part; of allgather and reduce_scatter with one rank on each server

LL sends 4 bytes of flags with 4 of data, LL128 8 with 120. The bandwidth of all channels is that of the rings, chains
and switches of a machine at NCCL's rates of NVLink (`topoplan.schedules.nccl_search`); NCCL's search for them has
speeds in steps and may find less. Deliberately absent: CollNet (SHARP), several operations in one launch, RCCL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.cluster_by_kind import ClusterByKind
from topoplan.machine.cluster_network import nic_rate
from topoplan.machine.fabric import Fabric, usable_fabric
from topoplan.machine.fabric_structure import FabricServers
from topoplan.machine.hardware import (
    UNKNOWN_CAPABILITY,
    is_amd,
    known_capability,
    nvlink_counts,
    with_assumed_capability,
    with_capable,
)
from topoplan.machine.topology import Topology
from topoplan.machine.variants import with_all_capabilities
from topoplan.plans.plan_by_kind import PlanByKind
from topoplan.schedules.binary_trees import nccl_tree, nvls, nvls_tree
from topoplan.schedules.nccl_channels import MOST_CHANNELS, NcclPaths
from topoplan.schedules.nccl_search import best_graphs, counted_machine
from topoplan.schedules.nccl_server_channels import ServerChannels
from topoplan.schedules.ring import ring_plan
from topoplan.units import bus_factor, nearest_float

LL, LL128, SIMPLE = PROTOCOLS = ("ll", "ll128", "simple")
RING, TREE, NVLS, NVLS_TREE, PAT = ALGORITHMS = ("ring", "tree", "nvls", "nvls_tree", "pat")
"""In the words of NCCL's tuner plugin; among equally fast ones the first is taken."""

COLLECTIVES = ("allreduce", "allgather", "reduce_scatter", "broadcast", "reduce")
"""Collectives that NCCL chooses an algorithm for."""

_DOES: Mapping[str, tuple[str, ...]] = {
    RING: COLLECTIVES,
    TREE: ("allreduce",),
    NVLS: ("allreduce", "allgather", "reduce_scatter"),
    NVLS_TREE: ("allreduce",),
    PAT: ("allgather", "reduce_scatter"),
}

_BASE: Mapping[str, tuple[float, float, float]] = {
    RING: (6.6, 14.0, 8.4),
    TREE: (6.8, 14.0, 8.4),
    NVLS: (0, 0, 0),
    NVLS_TREE: (0, 0, 0),
    PAT: (8.0, 8.0, 8.0),
}
"""Microseconds of a launch, for LL, LL128 and Simple, as all tables here."""

_HOP: Mapping[str, Mapping[str, tuple[float, float, float]]] = {
    RING: {"nvlink": (0.6, 1.9, 3.4), "pcie": (1.0, 2.5, 5.7), "net": (2.7, 4.0, 14.0)},
    TREE: {"nvlink": (0.6, 1.25, 4.0), "pcie": (1.0, 1.9, 4.0), "net": (5.0, 8.5, 14)},
    NVLS: {"nvlink": (0, 0, 25), "pcie": (0, 0, 0), "net": (0, 0, 18)},
    NVLS_TREE: {"nvlink": (0, 0, 25), "pcie": (0, 0, 0), "net": (0, 0, 20.9)},
    PAT: {"nvlink": (0, 0, 4), "pcie": (0, 0, 4), "net": (0, 0, 14)},
}
"""Microseconds of a hop."""

_GENERATIONS = (0, 80, 90, 100)
"""Compute capability from which each row of the tables below holds: Volta and older, Ampere, Hopper, Blackwell."""

HOPPER = 2
"""The first generation whose switches add."""

_LL_MOST = ((39.0, 39.0, 20.4), (87.7, 22.5, 19.0), (141.0, 45.0, 35.0), (282.0, 90.0, 70.0))
"""GB/s of LL at most: on one server by generation, else in the row of the CPU: Intel's the first, AMD's the second."""

_RING_LL128 = (20.0, 20.0, 36.7, 40.0)
_TREE_LL128 = ((20.0,) * 3, (20.0,) * 3, (36.7, 36.7, 29.0), (55.6, 31.67, 20.0))
_TREE_MOST = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (38.7, 41.4, 36.0), (70.0, 42.8, 24.0))
_NVLS_TREE_MOST = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (0.0, 57.7, 45.5), (0.0, 96.0, 80.0))
"""GB/s of one channel at most, by generation, on one server, two, and more."""

_NVLS_PART = (0.0, 0.0, 0.85, 0.74)
"""Fraction of the switch's rate that is expected, by generation."""

_TREE_PART = {
    LL: "1 1 1 1 .9 .8 .7 .7 .7 .7 .6 .5 .4 .4 .5 .6 .7 .8 .9 1 1 1 1 1",
    LL128: "1 1 1 1 1 .9 .8 .8 .8 .7 .6 .6 .6 .6 .6 .6 .8 .9 .9 .9 .9 1 1 1",
    SIMPLE: ".9 .9 .9 .9 .9 .9 .9 .8 .7 .6 .6 .5 .5 .5 .5 .6 .7 .8 .7 .7 .8 .9 .9 .9",
}
"""Fraction of a tree's bandwidth that is expected, from 64 bytes on by powers of two."""

_TREE_PARTS = {protocol: tuple(map(float, parts.split())) for protocol, parts in _TREE_PART.items()}
_THREADS = {LL: 512, LL128: 640, SIMPLE: 512}
_BYTES_A_THREAD = {LL: 8, LL128: 8, SIMPLE: 64}
_PAT_PART = 0.75


@dataclass(frozen=True, slots=True)
class NcclSetting:
    """The properties of a communicator on which NCCL's choice depends.

    Attributes
    ----------
    generation : int
        Row of the tables.
    wire : str
        nvlink or pcie, inside servers.
    channels : int
        Channels of a graph of rings or trees; NCCL runs twice as many.
    rings, trees, multicast : float
        GB/s of all channels: rings in bus bandwidth, trees in an allreduce's algorithm bandwidth, an adding switch in
        the rate that each GPU sends; 0 if there are none.
    """

    ranks: int
    servers: int
    generation: int
    wire: str
    amd_cpu: bool
    channels: int
    rings: float
    trees: float
    multicast: float

    @property
    def scale(self) -> int:
        """Column of the tables: one server, two, or more."""
        return min(self.servers, 3) - 1


@dataclass(frozen=True, slots=True)
class NcclExpectation:
    """Latency in seconds, and algorithm bandwidth in GB/s, that NCCL expects of one algorithm and protocol."""

    algorithm: str
    protocol: str
    latency: float
    bandwidth: float
    setting: NcclSetting
    collective: str

    def seconds(self, nbytes: int) -> float:
        bandwidth, latency, here = self.bandwidth, self.latency, self.setting
        step = (max(nbytes, 1) >> 6).bit_length() - 1
        if self.algorithm == TREE and 0 <= step < len(_TREE_PARTS[self.protocol]) - 1:
            bandwidth *= _TREE_PARTS[self.protocol][step]
        plateau = self.algorithm == RING and self.protocol == SIMPLE and here.servers > 1
        if plateau and self.collective == "allreduce" and nbytes >= 64 * here.ranks * here.channels * 2:
            latency *= 1.4 if here.generation else 1.9
        return latency + nbytes / (bandwidth * 1e9)

    def channels(self, nbytes: int) -> int:
        most = 2 * self.setting.channels
        return channel_count(self.algorithm, self.protocol, nbytes, ranks=self.setting.ranks, most=most)


def least_bytes(algorithm: str, protocol: str, ranks: int) -> int:
    """Return the bytes of a buffer below which NCCL removes another channel; 0 for algorithms that always run all."""
    if algorithm in (NVLS, NVLS_TREE):
        return 0
    least = _THREADS[protocol] * _BYTES_A_THREAD[protocol]
    return least * ranks if algorithm == RING and protocol == LL else least


def channel_count(algorithm: str, protocol: str, nbytes: int, *, ranks: int, most: int) -> int:
    """Return the number of channels that NCCL runs of its ``most``: fewer if each would get little.

    >>> [channel_count("ring", "simple", size, ranks=8, most=24) for size in (1 << 10, 1 << 18, 1 << 30)]
    [1, 8, 24]
    """
    least = least_bytes(algorithm, protocol, ranks)
    return max(1, min(most, nbytes // least)) if least else min(most, MOST_CHANNELS)


@lru_cache(maxsize=16)
def setting_of(topology: Topology) -> NcclSetting:
    """Return the properties of a communicator of all GPUs of a machine.

    UsageError for a single GPU, and for AMD's GPUs; InfeasibleError if the GPUs are not connected.
    """
    topology = with_assumed_capability(topology)
    gpus = [device for device in topology.devices if device.kind == "gpu"]
    if len(gpus) < 2:
        raise UsageError("a single GPU has nothing to tune; choose two or more")
    if is_amd(gpus):
        raise UsageError("NCCL's model is of NVIDIA's GPUs, and these are AMD's; tune RCCL by its own plugin")
    machine = counted_machine(topology).machine
    counts = nvlink_counts(topology)
    slowest = min(known_capability(gpu, counts.get(gpu.name, 0)) or UNKNOWN_CAPABILITY for gpu in gpus)
    fabric = usable_fabric(machine)
    servers = len(FabricServers(fabric).names)
    vendors = {device.fact("vendor") for device in topology.devices if device.kind == "cpu"}
    common = (
        len(gpus),
        servers,
        max(row for row, least in enumerate(_GENERATIONS) if slowest >= least),
        "nvlink" if "nvlink" in fabric.channels else "pcie",
        "AuthenticAMD" in vendors,
    )
    if servers == 1:
        graphs = best_graphs(machine, NcclPaths(machine))
        rates = (nearest_float(graphs.bandwidth), nearest_float(graphs.chain_rate))
        return NcclSetting(*common, graphs.count, *rates, _multicast(machine, fabric))
    count = min(MOST_CHANNELS, ServerChannels(fabric).graph_channels)
    rings = ring_plan(machine).rate * bus_factor("allreduce", len(gpus))
    return NcclSetting(*common, count, rings, nccl_tree(machine).rate, _multicast(machine, fabric))


SERVERS_ALIKE = 4
"""Servers from which on more of one kind change neither NCCL's channels nor their rates."""


def setting_by_kind(cluster: ClusterByKind) -> NcclSetting | None:
    """Return the properties of a communicator of all GPUs of a cluster, by a few of its servers.

    None if its servers are of several kinds, or cabled to one another, or a leaf, pod or rail, or the link between two
    groups of a dragonfly, carries less than its NICs. Servers without GPUs do not count. Errors as `setting_of`.
    """
    network = cluster.network
    used = [kind for kind, count in cluster.runs if count and cluster.gpus_of_kind[kind]]
    kinds = {next(one for one in used if cluster.kinds[one] == cluster.kinds[kind]) for kind in used}
    thin = max(network.oversubscription or 1, network.pod_oversubscription or 1) > 1
    if network.global_gbps is not None and len(cluster.leaves) > 1:
        most = max(sum(max(port.out, port.back) for port in cluster.kinds[kind].ports) for kind in kinds)
        thin = nic_rate(network.global_gbps) < most * cluster.leaf_size
    if len(kinds) > 1 or thin or cluster.uplinks or cluster.global_links or network.kind == "torus":
        return None
    servers = sum(count for kind, count in cluster.runs if cluster.gpus_of_kind[kind])
    few = replace(cluster, runs=((kinds.pop(), min(SERVERS_ALIKE, servers)),)).listed()
    alike = setting_of(with_all_capabilities(with_capable(few)))
    return replace(alike, ranks=cluster.size, servers=servers)


@dataclass(frozen=True, slots=True)
class NcclPeak:
    """A schedule of NCCL and its rate in GB/s of algorithm bandwidth, without latency."""

    name: str
    rate: float


def _equal_ports(plan: PlanByKind) -> float:
    """Return the GB/s of all ports of a host in a torus of hosts, if equal ports lead ahead and back; else 0.

    Rings then fill them: the links of a torus are a union of cycles (`topoplan.schedules.hamiltonian_cycles`).
    """
    fabric, torus = plan.fabric, plan.cluster.network.torus
    cables = [
        (link.count, capacity)
        for link, capacity, (src, _) in zip(fabric.links, fabric.capacity, fabric.ends, strict=True)
        if src == 0
    ]
    of_hosts = plan.size == plan.cluster.servers and fabric.direct
    equal = len(cables) == 2 * len(torus.sides) and len(set(cables)) == 1
    return float(sum(capacity for _, capacity in cables)) if of_hosts and equal else 0.0


def nccl_peaks(plan: PlanByKind) -> list[NcclPeak]:
    """Return NCCL's schedules beside a plan, the fastest first; none if its model does not know the cluster."""
    cluster, collective = plan.cluster, plan.collective
    if collective not in COLLECTIVES:
        return []
    if cluster.network.kind == "torus":
        ports = _equal_ports(plan)
        return [NcclPeak("network ring", ports / bus_factor(collective, plan.size))] if ports else []
    try:
        here = setting_by_kind(cluster)
    except (UsageError, InfeasibleError):
        return []
    if here is None:
        return []
    found = [NcclPeak("network ring", here.rings / bus_factor(collective, cluster.size))]
    if collective == "allreduce":
        found += [NcclPeak("nccl tree", here.trees), NcclPeak("nvls tree", here.multicast)]
    return sorted((one for one in found if one.rate), key=lambda one: -one.rate)


def _multicast(machine: Topology, fabric: Fabric) -> float:
    """Return the rate of an allreduce through an adding switch; 0 without one."""
    make = nvls if len(FabricServers(fabric).names) == 1 else nvls_tree
    try:
        return make(machine).rate
    except InfeasibleError:
        return 0.0


def expectations(here: NcclSetting, collective: str) -> tuple[NcclExpectation, ...]:
    """Return the expectations of all algorithms and protocols that NCCL has for a collective.

    >>> import topoplan
    >>> known = expectations(setting_of(topoplan.load("dgx-a100")), "allreduce")
    >>> for size in (1 << 10, 1 << 20, 1 << 30):
    ...     best = min(known, key=lambda one: one.seconds(size))
    ...     print(best.algorithm, best.protocol, f"{best.seconds(size) * 1e6:.1f}")
    ring ll 15.0
    ring ll 35.9
    ring simple 7885.4
    """
    if collective not in COLLECTIVES:
        raise UsageError(f"NCCL chooses no algorithm for {collective}; use one of {', '.join(COLLECTIVES)}")
    found = []
    for algorithm in ALGORITHMS:
        for protocol in PROTOCOLS:
            bandwidth = _bandwidth(here, collective, algorithm, protocol)
            if bandwidth > 0:
                latency = _latency(here, collective, algorithm, protocol) * 1e-6
                found.append(NcclExpectation(algorithm, protocol, latency, bandwidth, here, collective))
    return tuple(found)


def has(algorithm: str, collective: str) -> bool:
    return collective in _DOES[algorithm]


def _bandwidth(here: NcclSetting, collective: str, algorithm: str, protocol: str) -> float:
    """Return GB/s of algorithm bandwidth; 0 for a combination that NCCL does not have here."""
    halves = collective in ("allgather", "reduce_scatter")
    row, scale, count = here.generation, here.scale, here.channels
    if not has(algorithm, collective) or (protocol == LL128 and here.wire != "nvlink"):
        return 0.0
    of_ring = 1 / bus_factor(collective, here.ranks)
    ll_most = _LL_MOST[row if here.servers == 1 else int(here.amd_cpu)][scale]
    if algorithm == RING:
        bus = {
            LL: min(ll_most, here.rings / 2),
            LL128: min(here.rings * 0.92, count * _RING_LL128[row]),
            SIMPLE: here.rings,
        }[protocol]
        return bus * of_ring
    if algorithm == TREE:
        bus = min(2 * here.trees * 0.92, count * _TREE_MOST[row][scale])
        if protocol == LL:
            bus = min(bus / 3.8, ll_most)
        if protocol == LL128:
            bus = min(bus * (7 / 9 if here.servers == 1 else 120 / 128), count * _TREE_LL128[row][scale])
        return bus / 2
    if protocol != SIMPLE:
        return 0.0
    if algorithm == PAT:
        return here.rings * _PAT_PART if here.ranks == here.servers else 0.0
    if algorithm == NVLS and here.servers == 1:
        each = here.multicast * _NVLS_PART[row] * (here.ranks - 1) / here.ranks
        return each * (here.ranks - 1) / here.ranks if halves else 2 * each * of_ring
    if algorithm == NVLS_TREE and here.servers > 1:
        each = min(2 * here.multicast * _NVLS_PART[row], count * _NVLS_TREE_MOST[row][scale])
        return each * of_ring
    return 0.0


def _latency(here: NcclSetting, collective: str, algorithm: str, protocol: str) -> float:
    place = PROTOCOLS.index(protocol)
    base, inside = _BASE[algorithm][place], _HOP[algorithm][here.wire][place]
    each = here.ranks // here.servers
    outside = _HOP[TREE if each == 1 else algorithm]["net"][place]
    depth = here.servers.bit_length() - 1
    twice = 2 if collective == "allreduce" else 1
    if algorithm == RING:
        if collective in ("broadcast", "reduce"):
            return base + _HOP[RING]["net" if here.servers > 1 else here.wire][place]
        overhead = (2.0 if here.amd_cpu else 1.0) * (3 if protocol == SIMPLE else 1)
        if here.servers > 1:
            inside = max(inside, overhead)
        between = twice * (here.servers - 1) if here.servers > 1 else 0
        return base + (twice * (here.ranks - 1) - between) * inside + between * outside
    if algorithm == TREE:
        return base + 2 * ((each - 1) * inside + depth * outside)
    if algorithm == NVLS:
        return inside
    if algorithm == NVLS_TREE:
        return base + inside + 2 * depth * outside
    return base + depth * outside / 3.5 + here.ranks * 2.8
