"""Three phases with a sparse middle: sum inside servers, exchange entries between them, hand the sum out inside.

HiTopKComm: each part of the buffer has one owner in every server. It collects the sum of its server, chooses the
largest entries, keeps the rest, and sends the chosen to the owners in all other servers, which add them to what they
have chosen themselves; then every owner hands the total out in its server. Elements cross NVLink or PCIe, entries the
network.

The phases run one after another, so each is to be as quick as it can be alone. Trees and owners are those of the three
phases of elements (`topoplan.packing.hierarchical`) on the same servers with a network that would be twice as fast as
they are: then the trees are the best inside, and owners load the NICs evenly, or nearly so where centres of stars of
elements, which owners here have none of, make up for a difference.

References
----------
Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public Cloud Clusters", MLSys 2021, section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

from topoplan.errors import InfeasibleError, PlanError, UsageError
from topoplan.fabric.fabric import Fabric
from topoplan.fabric.servers import Servers
from topoplan.packing.hierarchical import compose
from topoplan.packing.planner import plan
from topoplan.plans.allocation import Allocation
from topoplan.plans.build import build_plan
from topoplan.plans.certificates import BetweenServers, InsideServer, OneFabric, Sparse
from topoplan.plans.certificates.sparse import inside_channels
from topoplan.plans.plan import Plan
from topoplan.plans.tree import Edge, Shard, Stage
from topoplan.schedules.least_loaded import LeastLoaded
from topoplan.topology import Topology
from topoplan.units import nearest_float

SPARSE_SERVERS = "sparse three-phase"

MOST_EDGES = 1 << 20
"""Most edges of all exchanges: their number grows with the square of the servers."""

_AHEAD = 2
"""How much faster than the servers the network is to be, for the choice of trees and owners."""


def sparse_servers(
    topology: Topology, *, entries: Fraction, gpus: Sequence[int] | None = None, channels: str = "auto"
) -> Plan:
    """The three-phase sparse allreduce of a cluster.

    Parameters
    ----------
    topology : Topology
        A cluster: its devices say to which server they belong.
    entries : Fraction
        Bytes of entries for each byte of the buffer (`topoplan.units.entry_share`).
    gpus : sequence of int or None
        The allocation; all GPUs for None. One server may have more of them than another.
    channels : str
        As for `topoplan.plan`.

    Raises
    ------
    UsageError
        All GPUs are on one server, a GPU is out of range, or ``entries`` not above zero.
    InfeasibleError
        As `exchanging_servers`.

    Examples
    --------
    Two DGX-1V with one NIC of 96 Gb/s each, where the dense allreduce reaches 12 GB/s:

    >>> import topoplan
    >>> from topoplan.units import entry_share
    >>> pair = topoplan.cluster([topoplan.Server(topoplan.load("dgx-1v"), count=2)], nic_gbps=96, nics=1)
    >>> made = sparse_servers(pair, entries=entry_share(0.01))
    >>> round(made.rate, 1), round(made.bound, 1), [stage.op for stage in made.shards[0].stages]
    (85.7, 85.7, ['reduce', 'reduce', 'gather', 'gather', 'broadcast', 'broadcast'])
    """
    if entries <= 0:
        raise UsageError(f"{entries} bytes of entries for a byte of the buffer must be above zero")
    fabric = Allocation.of(topology, gpus=gpus).connected(channels)
    shards = exchanging_servers(fabric, entries)
    servers = Servers(fabric)
    made = build_plan(
        fabric,
        "allreduce",
        root=None,
        shards=shards,
        certificate=_proof(fabric, servers, entries),
        schedule=SPARSE_SERVERS,
        method="three-phase",
    )
    if made.gap == 0:
        return made
    lost = f"stays {made.gap:.2%} below the bound of {made.bound:.6g} GB/s on such sparse three phases"
    return replace(made, notes=(lost,))


def exchanging_servers(fabric: Fabric, entries: Fraction | None) -> list[Shard]:
    """The shards of three phases whose owners exchange what they have, elements where ``entries`` is None.

    Raises
    ------
    UsageError
        All GPUs are on one server.
    InfeasibleError
        Each GPU is on a server of its own, those of a server are not connected inside it, the servers are not in one
        hop, or the exchange is too large.
    """
    servers = Servers(fabric)
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
    # ways of a network twice as wide may crowd on one NIC, which slows elements down and entries hardly
    exchange = _Exchange(fabric, entries, {} if entries is None else routes)
    return [
        Shard(share, (*up, *exchange.stages([stage.root for stage in up], share), *down))
        for up, down, share in parts
    ]


@lru_cache(maxsize=4)
def _parts(
    topology: Topology, channels: tuple[str, ...]
) -> tuple[tuple[tuple[tuple[Stage, ...], tuple[Stage, ...], Fraction], ...], dict[tuple[int, int], Edge]]:
    """Trees inside servers with their shares, and ways between ranks of different servers; for any entries."""
    fabric = Fabric(topology, channels)
    servers = Servers(fabric)
    parts: dict[tuple[tuple[Stage, ...], tuple[Stage, ...]], Fraction] = {}
    routes: dict[tuple[int, int], Edge] = {}
    for shard in compose(_with_wide_network(fabric, servers), "allreduce").shards:
        inside = _inside(shard, servers)
        parts[inside] = parts.get(inside, Fraction(0)) + shard.share
        routes.update(((edge.parent, edge.child), edge) for edge in _between(shard, servers))
    listed = [(up, down, share) for (up, down), share in parts.items()]
    # parts of the same owners lie side by side
    return tuple(sorted(listed, key=lambda part: [stage.root for stage in part[0]])), routes


def _with_wide_network(fabric: Fabric, servers: Servers) -> Fabric:
    """The fabric with a network that is `_AHEAD` of the servers, and of which each link has its part as before."""
    count = len(servers.names)
    leaving = {name: Fraction(0) for name in servers.names}
    for (src, dst), capacity in zip(servers.ends, fabric.capacity, strict=True):
        if src in leaving and src != dst:
            leaving[src] += capacity
    inside = max(nearest_float(bound) for _, bound in _server_proofs(fabric.topology, fabric.channels))
    needed = _AHEAD * inside * 2 * (count - 1) / count
    # a round number: shares are made of it
    times = float(f"{needed / nearest_float(min(leaving.values())):.1g}")
    links = tuple(
        replace(link, bandwidth=float(f"{link.bandwidth * times:.6g}")) if link.channel == "network" else link
        for link in fabric.topology.links
    )
    return Fabric(replace(fabric.topology, links=links), fabric.channels)


def _inside(shard: Shard, servers: Servers) -> tuple[tuple[Stage, ...], tuple[Stage, ...]]:
    """The trees of one shard inside servers: a reduce to the owner of each, and a broadcast from it."""
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


def _between(shard: Shard, servers: Servers) -> Iterator[Edge]:
    """The ways between servers that a shard takes, each from the rank that sends."""
    up, down = shard.stages
    for edge in up.edges:
        if not servers.same[edge.parent, edge.child]:
            yield Edge(edge.child, edge.parent, edge.route[::-1], edge.channel)
    for edge in down.edges:
        if not servers.same[edge.parent, edge.child]:
            yield edge


class _Exchange:
    """Stars between owners: over the ways that the dense plan takes, or else over the least loaded ones."""

    def __init__(self, fabric: Fabric, entries: Fraction | None, routes: dict[tuple[int, int], Edge]) -> None:
        self.entries = entries
        self._fabric = fabric
        self._routes = routes
        self._free = LeastLoaded(fabric)

    def stages(self, owners: Sequence[int], share: Fraction) -> tuple[Stage, ...]:
        """A gather from each of the owners to all others."""
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


def _proof(fabric: Fabric, servers: Servers, entries: Fraction) -> Sparse:
    """The lowest bound on sparse three phases that is quickly had."""
    proofs: list[tuple[Sparse, Fraction]] = [*_server_proofs(fabric.topology, fabric.channels)]
    for cut in _cuts(fabric, servers, entries):
        proofs.append((cut, cut.bound(fabric, "allreduce", None)))
    return min(proofs, key=lambda each: each[1])[0]


def _cuts(fabric: Fabric, servers: Servers, entries: Fraction) -> Iterator[BetweenServers]:
    """Each server and all others; and what hangs on one switch of the network."""
    home = {device.name: device.server for device in fabric.topology.devices}
    groups = [{name} for name in servers.names]
    for switch in (name for name in fabric.nodes if home[name] == ""):
        ends = {link.src for link in fabric.links if link.dst == switch}
        near = {home[end] for end in ends} & set(servers.names)
        if 1 < len(near) < len(servers.names):
            groups.append(near)
    for group in groups:
        inside = tuple(name for name in fabric.nodes if home[name] in group)
        yield BetweenServers(entries, inside)
        yield BetweenServers(entries, tuple(name for name in fabric.nodes if home[name] not in group))


@lru_cache(maxsize=4)
def _server_proofs(
    topology: Topology, channels: tuple[str, ...]
) -> tuple[tuple[InsideServer, Fraction], ...]:
    """For servers that differ, a bound of the allreduce inside, and what it proves in GB/s."""
    fabric = Fabric(topology, channels)
    known: set[tuple[object, ...]] = set()
    proofs = []
    for name, alone in Servers(fabric).alone():
        shape = _shape(alone.topology, name)
        if shape in known:
            continue
        known.add(shape)
        proof = plan(alone.topology, "allreduce", channels="+".join(inside_channels(fabric))).certificate
        if isinstance(proof, OneFabric):
            inside = InsideServer(name, proof)
            proofs.append((inside, inside.bound(fabric, "allreduce", None)))
    return tuple(proofs)


def _shape(topology: Topology, server: str) -> tuple[object, ...]:
    """The links of a server, named as in any other that is built alike."""
    prefix = f"{server}."
    return tuple(
        (link.src.removeprefix(prefix), link.dst.removeprefix(prefix), link.channel, link.bandwidth)
        for link in topology.links
    )
