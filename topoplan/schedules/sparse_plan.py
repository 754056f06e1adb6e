"""Plan the sparse allreduce of an allocation: three phases over several servers, else trees on entries.

Over servers (HiTopKComm), the owner of a part in each server collects its sum, selects the largest entries, keeps
the rest as residual and exchanges the selection with the owners in other servers; then it broadcasts the total
inside. Phases run one after another. Trees and owners are those of the dense three phases with a network twice as
fast as the servers.

On one server every tree of an allreduce plan carries the largest entries of its shard: a rank adds up all arrivals,
keeps one message's worth, and sends it on. One low tree is gTop-k; one star for each rank balances load as Ok-Topk
does, with fixed borders between the parts. A dropped entry stays in the rank's residual.

References: Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters", MLSys
2021, section 3.2 (HiTopKComm). Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification
for Low Bandwidth Networks", ICDCS 2019 (gTop-k). Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep
Learning", PPoPP 2022 (Ok-Topk).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

from topoplan.errors import InfeasibleError, PlanError, UsageError
from topoplan.machine.fabric import CHANNEL_CHOICES, Fabric
from topoplan.machine.fabric_structure import FabricServers
from topoplan.machine.topology import Topology, TopologyLike, as_topology
from topoplan.plans.build import Allocation, build_plan, timed
from topoplan.plans.certificates.certificate import OneFabric
from topoplan.plans.certificates.exchange import (
    BetweenServersBound,
    EntryBound,
    InsideServerBound,
    SparseCertificate,
    inside_channels,
)
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Edge, Shard, Stage
from topoplan.schedules.routes import LeastLoaded
from topoplan.solve.packing.composition import compose
from topoplan.solve.planner import plan
from topoplan.units import entry_share, nearest_float

SPARSE_SERVERS = "sparse three-phase"

MOST_EDGES = 1 << 20
"""Most edges of all exchanges: their number grows with the square of the servers."""

_AHEAD = 2
"""Speed of the network, in multiples of the servers', for the choice of trees and owners."""


def _check_entries(entries: Fraction) -> None:
    if entries <= 0:
        raise UsageError(f"{entries} bytes of entries for a byte of the buffer must be above zero")


def sparse_servers(
    topology: Topology, *, entries: Fraction, gpus: Sequence[int] | None = None, channels: str = "auto"
) -> Plan:
    """Return the three-phase sparse allreduce of a cluster.

    ``entries`` is bytes of entries for each byte of the buffer (`topoplan.units.entry_share`). Servers may have
    different numbers of GPUs of the allocation.
    """
    _check_entries(entries)
    fabric = Allocation.of(topology, gpus=gpus, channels=channels).connected()
    shards = exchanging_servers(fabric, entries)
    proofs: list[tuple[SparseCertificate, Fraction]] = [*_server_proofs(fabric.topology, fabric.channels)]
    for cut in _cuts(fabric, FabricServers(fabric), entries):
        proofs.append((cut, cut.bound(fabric, "allreduce", None)))
    made = build_plan(
        fabric,
        "allreduce",
        root=None,
        shards=shards,
        certificate=min(proofs, key=lambda each: each[1])[0],
        schedule=SPARSE_SERVERS,
        method="three-phase",
    )
    if made.gap == 0:
        return made
    lost = f"stays {made.gap:.2%} below the bound of {made.bound:.6g} GB/s on such sparse three phases"
    return replace(made, notes=(lost,))


def exchanging_servers(fabric: Fabric, entries: Fraction | None) -> list[Shard]:
    """Return the shards of three phases whose owners exchange entries, or elements if ``entries`` is None.

    UsageError if all GPUs are on one server; InfeasibleError if each GPU is on a server of its own, if the GPUs of a
    server are not connected inside it, if the servers are not one hop apart, or if the exchange is too large.
    """
    servers = FabricServers(fabric)
    servers.check()
    count = len(servers.names)
    if count == fabric.size:
        raise InfeasibleError(
            f"each of {count} servers has one GPU, so nothing is summed inside; "
            + ("use the schedule one-shot" if entries is None else "use the trees of sparse_trees")
        )
    parts, routes = _parts(fabric.topology, fabric.channels)
    if len(parts) * count**2 > MOST_EDGES:
        raise InfeasibleError(
            f"{len(parts)} parts exchanged between {count} servers are more than {MOST_EDGES} routes; plan for fewer"
        )
    # Routes of a network twice as wide may share one NIC, which slows elements down and entries hardly.
    exchange = _Exchange(fabric, entries, {} if entries is None else routes)
    return [
        Shard(share, (*up, *exchange.stages([stage.root for stage in up], share), *down))
        for up, down, share in parts
    ]


@lru_cache(maxsize=4)
def _parts(
    topology: Topology, channels: tuple[str, ...]
) -> tuple[tuple[tuple[tuple[Stage, ...], tuple[Stage, ...], Fraction], ...], dict[tuple[int, int], Edge]]:
    """Return trees inside servers with their shares, and routes between ranks of different servers; for any entries."""
    fabric = Fabric(topology, channels)
    servers = FabricServers(fabric)
    parts: dict[tuple[tuple[Stage, ...], tuple[Stage, ...]], Fraction] = {}
    routes: dict[tuple[int, int], Edge] = {}
    for shard in compose(_with_wide_network(fabric, servers), "allreduce").shards:
        inside = _inside(shard, servers)
        parts[inside] = parts.get(inside, Fraction(0)) + shard.share
        routes.update(((edge.parent, edge.child), edge) for edge in _between(shard, servers))
    listed = [(up, down, share) for (up, down), share in parts.items()]
    # Parts of the same owners are contiguous.
    return tuple(sorted(listed, key=lambda part: [stage.root for stage in part[0]])), routes


def _with_wide_network(fabric: Fabric, servers: FabricServers) -> Fabric:
    """Return the fabric with a network at `_AHEAD` times the servers' speed, divided between links as before."""
    count = len(servers.names)
    leaving = {name: Fraction(0) for name in servers.names}
    for (src, dst), capacity in zip(servers.ends, fabric.capacity, strict=True):
        if src in leaving and src != dst:
            leaving[src] += capacity
    inside = max(nearest_float(bound) for _, bound in _server_proofs(fabric.topology, fabric.channels))
    needed = _AHEAD * inside * 2 * (count - 1) / count
    # A round number: shares are made of it.
    times = float(f"{needed / nearest_float(min(leaving.values())):.1g}")
    links = tuple(
        replace(link, bandwidth=float(f"{link.bandwidth * times:.6g}")) if link.channel == "network" else link
        for link in fabric.topology.links
    )
    return Fabric(replace(fabric.topology, links=links), fabric.channels)


def _inside(shard: Shard, servers: FabricServers) -> tuple[tuple[Stage, ...], tuple[Stage, ...]]:
    """Return the trees of one shard inside servers: a reduce to the owner of each, and a broadcast from it."""
    up, down = shard.stages
    reduces, broadcasts = [], []
    for members in servers.members:
        ranks = set(members.tolist())
        rising, falling = (
            tuple(edge for edge in stage.edges if {edge.parent, edge.child} <= ranks) for stage in (up, down)
        )
        owner = min(ranks - {edge.child for edge in rising})
        if owner in {edge.child for edge in falling}:
            raise PlanError(f"goes up to rank {owner} and comes down from another of its server")
        reduces.append(Stage("reduce", owner, rising))
        broadcasts.append(Stage("broadcast", owner, falling))
    return tuple(reduces), tuple(broadcasts)


def _between(shard: Shard, servers: FabricServers) -> Iterator[Edge]:
    """Yield the edges between servers that a shard takes, each from the sending rank."""
    up, down = shard.stages
    for edge in up.edges:
        if not servers.same[edge.parent, edge.child]:
            yield Edge(edge.child, edge.parent, edge.route[::-1], edge.channel)
    for edge in down.edges:
        if not servers.same[edge.parent, edge.child]:
            yield edge


class _Exchange:
    """Stars between owners: over the routes of the dense plan, or else over the least loaded ones."""

    def __init__(self, fabric: Fabric, entries: Fraction | None, routes: dict[tuple[int, int], Edge]) -> None:
        self.entries = entries
        self._fabric = fabric
        self._routes = routes
        self._free = LeastLoaded(fabric)

    def stages(self, owners: Sequence[int], share: Fraction) -> tuple[Stage, ...]:
        """Return a gather from each of the owners to all others."""
        stages = []
        for owner in owners:
            edges = tuple(self._edge(owner, other, share) for other in owners if other != owner)
            stages.append(Stage("gather", owner, edges, self.entries))
        return tuple(stages)

    def _edge(self, owner: int, other: int, share: Fraction) -> Edge:
        known = self._routes.get((owner, other))
        if known is not None:
            return known
        if not self._free.joined(owner, other):
            raise InfeasibleError(
                f"{self._fabric.ranks[owner]} reaches {self._fabric.ranks[other]} only through another GPU; "
                "sparse three phases need one hop between servers"
            )
        weight = share if self.entries is None else share * self.entries
        return self._free.edge("broadcast", (owner,), other, weight)


def _cuts(fabric: Fabric, servers: FabricServers, entries: Fraction) -> Iterator[BetweenServersBound]:
    """Yield cuts around each server, around all others, and around the servers of each network switch."""
    home = {device.name: device.server for device in fabric.topology.devices}
    groups = [{name} for name in servers.names]
    for switch in (name for name in fabric.nodes if home[name] == ""):
        ends = {link.src for link in fabric.links if link.dst == switch}
        near = {home[end] for end in ends} & set(servers.names)
        if 1 < len(near) < len(servers.names):
            groups.append(near)
    for group in groups:
        inside = tuple(name for name in fabric.nodes if home[name] in group)
        yield BetweenServersBound(entries, inside)
        yield BetweenServersBound(entries, tuple(name for name in fabric.nodes if home[name] not in group))


@lru_cache(maxsize=4)
def _server_proofs(
    topology: Topology, channels: tuple[str, ...]
) -> tuple[tuple[InsideServerBound, Fraction], ...]:
    """Return for servers that differ a bound of the allreduce inside, with its value in GB/s."""
    fabric = Fabric(topology, channels)
    known: set[tuple[object, ...]] = set()
    proofs = []
    for name, alone in FabricServers(fabric).alone():
        shape = _shape(alone.topology, name)
        if shape in known:
            continue
        known.add(shape)
        proof = plan(alone.topology, "allreduce", channels="+".join(inside_channels(fabric))).certificate
        if isinstance(proof, OneFabric):
            inside = InsideServerBound(name, proof)
            proofs.append((inside, inside.bound(fabric, "allreduce", None)))
    return tuple(proofs)


def _shape(topology: Topology, server: str) -> tuple[object, ...]:
    """Return the links of a server under names that are the same in isomorphic servers."""
    prefix = f"{server}."
    return tuple(
        (link.src.removeprefix(prefix), link.dst.removeprefix(prefix), link.channel, link.bandwidth)
        for link in topology.links
    )


@timed
def sparse_plan(
    topology: TopologyLike,
    *,
    density: float,
    gpus: Sequence[int] | None = None,
    channels: str = "auto",
    entry_bits: float = 64,
    element_bits: int = 32,
) -> Plan:
    """Plan an allreduce of which only the largest entries cross the network.

    Parameters
    ----------
    topology, gpus, channels
        As for `topoplan.plan`.
    density : float
        Fraction of the elements that is chosen, above 0 and at most 1.
    entry_bits : float
        Size of an encoded entry: 64 for a float32 with its index, about 33.5 + log2(1 / density) with packed indices.
    element_bits : int
        Size of an element.

    Returns
    -------
    Plan
        Over several servers with several GPUs, the three phases of `topoplan.schedules.sparse_plan`. Otherwise the
        trees of the optimal allreduce on entries (`sparse_trees`).

    Raises
    ------
    UsageError, InfeasibleError
        As `topoplan.plan`; the density or the bits are out of range.

    See Also
    --------
    topoplan.plan

    Examples
    --------
    >>> import topoplan
    >>> machines = [topoplan.Server(topoplan.load("dgx-1v"), count=4)]
    >>> made = sparse_plan(topoplan.cluster(machines, nic_gbps=25, nics=1), density=0.01)
    >>> made.schedule, made.num_trees, round(made.rate, 2), round(made.bound, 2)
    ('sparse three-phase', 32, 52.08, 52.08)
    """
    topology = as_topology(topology)
    share = entry_share(density, entry_bits=entry_bits, element_bits=element_bits)
    over_servers = False
    if str(channels) in CHANNEL_CHOICES:  # neither divided between channels inside a server, nor unknown
        fabric = Allocation.of(topology, gpus=gpus, channels=channels).connected()
        over_servers = 1 < len(FabricServers(fabric).names) < fabric.size
    if over_servers:
        return sparse_servers(topology, entries=share, gpus=gpus, channels=channels)
    return sparse_trees(plan(topology, "allreduce", gpus=gpus, channels=channels), entries=share)


def sparse_trees(plan: Plan, *, entries: Fraction) -> Plan:
    """Return the trees of an allreduce of elements over one fabric, on entries.

    ``entries`` is bytes of entries for each byte of the buffer (`topoplan.units.entry_share`).

    At density 1 % in pairs of 4 bytes each, a fiftieth of the bytes moves:

    >>> import topoplan
    >>> from topoplan.units import entry_share
    >>> dense = topoplan.plan(topoplan.load("dgx-2"), "allreduce")
    >>> made = sparse_trees(dense, entries=entry_share(0.01))
    >>> dense.rate, made.rate, made.bound
    (80.0, 4000.0, 4000.0)
    """
    if plan.collective != "allreduce" or plan.sparse:
        kind = "sparse " if plan.sparse else ""
        raise UsageError(
            f"entries are summed on the trees of an allreduce, and this is a {kind}{plan.collective}"
        )
    _check_entries(entries)
    if len(plan.ranks) == 1:
        return plan
    if not isinstance(plan.certificate, OneFabric):
        raise UsageError(
            "a plan that divides the buffer between channels has no sparse form; plan for one channel"
        )
    shards = [
        Shard(shard.share, tuple(replace(stage, entries=entries) for stage in shard.stages))
        for shard in plan.shards
    ]
    return build_plan(
        Fabric(plan.topology, plan.channels),
        "allreduce",
        root=None,
        shards=shards,
        certificate=EntryBound(entries, plan.certificate),
        schedule=f"sparse {plan.schedule}",
        method=plan.method,
        notes=plan.notes,
    )
