"""Certificates: what a third party needs to recompute the bound of a plan, and the recomputation.

Three kinds, all with the same idea, and a fourth that adds them up: give every directed link e a length y(e) >= 0.
Whatever the trees, one byte of the buffer uses at least L of length, so rate <= sum of c(e) y(e) / L.

- `Cut`: y = 1 on the links across a device set S. Broadcast: L = 1 (Edmonds 1973). Allgather: L = |S ∩ ranks| / N
  (ForestColl, 2024). Reduce and reduce-scatter: the same on reversed links. Allreduce: L = 1 in either direction.
- `Partition`: y = 1 between the parts of a partition into k parts that hold a rank; L = 2 (k - 1), once up and
  once down (Tutte 1961, Nash-Williams 1961). For allreduce.
- `Lengths`: any y. L is the length of the cheapest forest of the collective, where an edge between two ranks
  is as long as the shortest path (`topoplan.plans.forest_length`).
- `Channels`: one of the above for each channel of a plan that splits the buffer between them. A shard keeps to one
  channel (`topoplan.plans.channel_check`), so the bounds add up.

Where entries move instead of elements (`topoplan.plans.sparse_check` holds what these take for granted):

- `Entries`: each stage moves entries of one size, so the bound of elements, divided by it.
- `InsideServer`: elements are summed inside servers, and none sums faster than its own links allow.
- `BetweenServers`: what every server chooses must leave any set of servers, once for each server in it.

A certificate is never trusted: its figures are recomputed here, in exact arithmetic, without the solver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from topoplan.errors import PlanError
from topoplan.fabric.fabric import Fabric
from topoplan.fabric.servers import Servers
from topoplan.plans.forest_length import forest_length, zero_parts
from topoplan.units import shown


@dataclass(frozen=True, slots=True)
class Cut:
    """A set of devices whose outgoing links are the bottleneck (incoming ones for reduce, reduce-scatter)."""

    side: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Partition:
    """Parts of devices such that the links between the parts are the bottleneck of an allreduce."""

    parts: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Dual lengths of the links that have one above zero, as (src, dst, length)."""

    lengths: tuple[tuple[str, str, Fraction], ...]


@dataclass(frozen=True, slots=True)
class Trivial:
    """One rank: nothing moves, nothing bounds."""


LEAST_ENTRIES, MOST_ENTRIES = Fraction(1, 10**9), 10**6
"""Bytes of entries for each byte of a shard, beyond which none are meant."""

OneFabric = Cut | Partition | Lengths | Trivial
"""What bounds a plan whose links are one fabric."""


@dataclass(frozen=True, slots=True)
class Channels:
    """A certificate for each channel, as (channel, certificate), of a plan whose shards keep to one channel each."""

    parts: tuple[tuple[str, OneFabric], ...]


@dataclass(frozen=True, slots=True)
class Entries:
    """A certificate for elements, of a plan on which only entries move: so many bytes for a byte of the shard."""

    entries: Fraction
    certificate: OneFabric


@dataclass(frozen=True, slots=True)
class InsideServer:
    """A server, and a certificate for the allreduce of its own ranks over its own links."""

    server: str
    certificate: OneFabric


@dataclass(frozen=True, slots=True)
class BetweenServers:
    """Devices, among them all ranks of some servers and none of the others, that the chosen entries have to leave."""

    entries: Fraction
    side: tuple[str, ...]


Sparse = Entries | InsideServer | BetweenServers
"""What bounds a plan that moves entries."""

Certificate = OneFabric | Channels | Sparse


def certified_bound(certificate: Certificate, fabric: Fabric, collective: str, root: int | None) -> Fraction:
    """Recompute the bound that a certificate proves, in GB/s of algorithm bandwidth, exactly.

    Parameters
    ----------
    certificate : Certificate
    fabric : Fabric
        Ranks, and the links that the plan may use.
    collective : str
    root : int or None
        Root rank of a broadcast or reduce.

    Returns
    -------
    Fraction
        No plan for this collective on this fabric has a higher rate.

    Raises
    ------
    PlanError
        The certificate proves nothing: it names unknown devices, does not fit the collective, or is empty.
    """
    if isinstance(certificate, Cut):
        return _cut_bound(certificate, fabric, collective, root)
    if isinstance(certificate, Partition):
        return _partition_bound(certificate, fabric, collective)
    if isinstance(certificate, Lengths):
        return _lengths_bound(certificate, fabric, collective, root)
    if isinstance(certificate, Channels):
        return _channels_bound(certificate, fabric, collective, root)
    if isinstance(certificate, Entries):
        check_entries(certificate.entries)
        return certified_bound(certificate.certificate, fabric, collective, root) / certificate.entries
    if isinstance(certificate, InsideServer):
        return certified_bound(
            certificate.certificate, _server(certificate.server, fabric), "allreduce", None
        )
    if isinstance(certificate, BetweenServers):
        return _between_bound(certificate, fabric)
    if fabric.size > 1:
        raise PlanError(f"the certificate 'trivial' proves nothing for {fabric.size} ranks")
    raise PlanError("a plan of one rank moves nothing and has no bound")


def _cut_bound(cut: Cut, fabric: Fabric, collective: str, root: int | None) -> Fraction:
    side = _node_set(cut.side, fabric)
    inside = sum(rank in side for rank in range(fabric.size))
    if inside == 0 or inside == fabric.size:
        raise PlanError("the cut must hold at least one rank and leave out at least one")
    crossing = _weighed(link_lengths(cut, fabric, collective), fabric)
    if collective in ("allgather", "reduce_scatter"):
        return crossing * fabric.size / inside
    if collective in ("broadcast", "reduce") and root not in side:
        raise PlanError(f"the cut must hold the root, rank {root}")
    return crossing


def _partition_bound(partition: Partition, fabric: Fabric, collective: str) -> Fraction:
    if collective != "allreduce":
        raise PlanError(f"a partition bounds allreduce, not {collective}")
    part_of: dict[int, int] = {}
    for number, part in enumerate(partition.parts):
        for node in sorted(_node_set(part, fabric)):
            if node in part_of:
                raise PlanError(f"device {fabric.nodes[node]} stands in two parts of the partition")
            part_of[node] = number
    for node in range(len(fabric.nodes)):
        part_of.setdefault(node, len(partition.parts) + node)
    with_rank = {part_of[rank] for rank in range(fabric.size)}
    if len(with_rank) < 2:
        raise PlanError("the partition must divide the ranks into at least two parts")
    crossing = _weighed(link_lengths(partition, fabric, collective), fabric)
    return crossing / (2 * (len(with_rank) - 1))


def _lengths_bound(certificate: Lengths, fabric: Fabric, collective: str, root: int | None) -> Fraction:
    length = [Fraction(0)] * len(fabric.links)
    for src, dst, value in certificate.lengths:
        if (src, dst) not in fabric.link_index:
            raise PlanError(f"the certificate gives a length to {src}->{dst}, which is no usable link")
        if value < 0:
            raise PlanError(
                f"the certificate gives {src}->{dst} a length below zero; lengths are zero or more"
            )
        length[fabric.link_index[src, dst]] = value
    scale = lcm(*(value.denominator for value in length))
    whole = [int(value * scale) for value in length]
    _check_switches(fabric, whole, collective)
    cheapest = forest_length(fabric, whole, collective, root)
    if cheapest == 0:
        raise PlanError("the certificate's lengths allow a forest of length zero and bound nothing")
    total = sum((c * y for c, y in zip(fabric.capacity, whole, strict=True)), Fraction(0))
    return total / cheapest


def _channels_bound(certificate: Channels, fabric: Fabric, collective: str, root: int | None) -> Fraction:
    """Each channel carries at most its bound, in shares of its own: together they carry at most the sum."""
    bounded = tuple(channel for channel, _ in certificate.parts)
    if len(set(bounded)) < len(bounded) or set(bounded) != set(fabric.channels):
        raise PlanError(
            f"the certificate bounds {', '.join(bounded) or 'no channel'}, but the plan speaks of "
            f"{', '.join(fabric.channels)}: each channel needs one part"
        )
    alone = ((Fabric(fabric.topology, (channel,)), part) for channel, part in certificate.parts)
    return sum((certified_bound(part, one, collective, root) for one, part in alone), Fraction(0))


def inside_channels(fabric: Fabric) -> tuple[str, ...]:
    """The channels of a fabric over which elements of sparse plans may move."""
    return tuple(channel for channel in fabric.channels if channel != "network")


def _server(name: str, fabric: Fabric) -> Fabric:
    """The fabric of one server."""
    for server, alone in Servers(fabric).alone():
        if server == name:
            return Fabric(alone.topology, inside_channels(fabric))
    raise PlanError(f"the certificate names server {name!r}, which has no two ranks of this plan")


def _between_bound(certificate: BetweenServers, fabric: Fabric) -> Fraction:
    """Every server on the side sends what it has chosen to the others: once for each it must cross the border."""
    check_entries(certificate.entries)
    side = _node_set(certificate.side, fabric)
    servers = Servers(fabric)
    inside = 0
    for name, members in zip(servers.names, servers.members, strict=True):
        within = sum(rank in side for rank in members.tolist())
        if 0 < within < len(members):
            raise PlanError(f"the certificate's side holds {within} of the {len(members)} ranks of {name}")
        inside += within > 0
    if not 0 < inside < len(servers.names):
        raise PlanError("the certificate's side must hold at least one server and leave out at least one")
    crossing = (
        capacity for ends, capacity in zip(fabric.ends, fabric.capacity, strict=True) if _leaves(ends, side)
    )
    return sum(crossing, Fraction(0)) / (certificate.entries * inside)


def check_entries(entries: Fraction) -> None:
    """Refuse a size of entries that no exchange has.

    Raises
    ------
    PlanError
        It is not between `LEAST_ENTRIES` and `MOST_ENTRIES`.
    """
    if not LEAST_ENTRIES <= entries <= MOST_ENTRIES:
        raise PlanError(
            f"{shown(entries)} bytes of entries for a byte of the shard must be from {float(LEAST_ENTRIES):g} to "
            f"{MOST_ENTRIES}"
        )


def _leaves(ends: tuple[int, int], side: set[int]) -> bool:
    return ends[0] in side and ends[1] not in side


def _check_switches(fabric: Fabric, length: Sequence[int], collective: str) -> None:
    """A switch that copies or adds may be an inner vertex of a tree, which must not make trees shorter.

    It does not where a rank at distance zero both ways could do the same, and where what its copies share, the way
    from any rank to it, has no length (for one that adds: the way from it to any rank). To copy serves no reduce and
    no reduce-scatter, to add no broadcast and no allgather.
    """
    part = zero_parts(fabric, length) if fabric.in_network else []
    with_rank = {part[rank] for rank in range(fabric.size)} if part else set()
    for names, forward, unused in (
        (fabric.copying, False, ("reduce", "reduce_scatter")),
        (fabric.adding, True, ("broadcast", "allgather")),
    ):
        for node, name in enumerate(fabric.nodes):
            if name not in names or collective in unused or part[node] in with_rank:
                continue
            if not fabric.zero_reach(node, length, forward=forward) >= set(range(fabric.size)):
                raise PlanError(
                    f"the certificate's lengths part {name}, which can copy or add, from every rank: "
                    "they prove nothing there; a cut or a partition does"
                )


def link_lengths(certificate: Certificate, fabric: Fabric, collective: str) -> list[Fraction]:
    """The length that a certificate gives every link: 1 across a cut or between parts, or the listed value.

    A cut counts the links that leave its side for broadcast and allgather, those that enter it for reduce and
    reduce-scatter, and the weaker of both directions for allreduce, where every byte crosses in both.
    """
    if isinstance(certificate, Lengths):
        listed = {(src, dst): value for src, dst, value in certificate.lengths}
        return [listed.get((link.src, link.dst), Fraction(0)) for link in fabric.links]
    if isinstance(certificate, Partition):
        part_of = {name: number for number, part in enumerate(certificate.parts) for name in part}
        return [
            Fraction(part_of.get(link.src, link.src) != part_of.get(link.dst, link.dst))
            for link in fabric.links
        ]
    side = set(certificate.side) if isinstance(certificate, Cut) else set()
    leaves = [Fraction(link.src in side and link.dst not in side) for link in fabric.links]
    enters = [Fraction(link.src not in side and link.dst in side) for link in fabric.links]
    if collective == "allreduce":
        return min(leaves, enters, key=lambda lengths: _weighed(lengths, fabric))
    return leaves if collective in ("broadcast", "allgather") else enters


def _weighed(lengths: Sequence[Fraction], fabric: Fabric) -> Fraction:
    """Sum of c(e) y(e) over the links."""
    return sum((c * y for c, y in zip(fabric.capacity, lengths, strict=True)), Fraction(0))


def _node_set(names: tuple[str, ...], fabric: Fabric) -> set[int]:
    position = {name: i for i, name in enumerate(fabric.nodes)}
    known = {device.name for device in fabric.topology.devices}
    for name in names:
        if name not in known:
            raise PlanError(f"the certificate names device {name!r}, which the topology does not have")
    return {position[name] for name in names if name in position}
