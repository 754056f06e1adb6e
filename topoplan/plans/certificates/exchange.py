"""Certify plans that exchange blocks or entries, and trees that pass devices other than ranks.

- `Demand`: pairs of ranks exchange different numbers of bytes, and no path is shorter than the distance.
- `EntryBound`: each stage moves entries of one size, so it is the bound of elements, divided by that size.
- `InsideServerBound`: elements are summed inside servers, and no server sums faster than its own links allow.
- `BetweenServersBound`: the entries of every server must leave any set of servers, once for each server in it.
- `Steiner`: lengths of links for trees that may pass helpers, and switches that copy or add.

`SparseCertificate.suppose` rejects plans of other kinds: `EntryBound` holds if each stage moves entries, the others
if elements stay inside servers and the entries of each server are exchanged once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from math import lcm
from typing import ClassVar, Self

import numpy as np

from topoplan.errors import PlanError
from topoplan.machine.fabric import Fabric
from topoplan.machine.fabric_structure import FabricServers
from topoplan.plans.certificates.certificate import (
    Certificate,
    Cut,
    Lengths,
    OneFabric,
    capacity_of,
    format_number,
    format_set,
    leaving,
    node_set,
    read_one_fabric,
    register_certificate,
)
from topoplan.plans.certificates.forest_length import (
    Table,
    arborescence_of,
    checked_root,
    contracted_graph,
    distances,
    exchange_length,
)
from topoplan.plans.file_values import read_fraction, read_list, read_text, read_texts, read_whole
from topoplan.plans.minimum_trees import equivalent_vertices, inner_sets, set_count
from topoplan.plans.shards import Shard, Stage, check_entries, path_ends, shard_counts
from topoplan.units import format_seconds, shown

DemandMatrix = tuple[tuple[int, ...], ...]
"""Amounts that row sends to column."""


@register_certificate
@dataclass(frozen=True, slots=True)
class Demand(Certificate):
    """A certificate for an all-to-all whose pairs exchange different numbers of bytes; row sends to column.

    For every byte of the buffer D(s, d) bytes go from rank s to rank d. ``certificate`` gives the lengths y: rate <=
    sum of c(e) y(e) / sum of D(s, d) distance(s, d), the dual of concurrent flow (Shahrokhi, Matula 1990, section 2).
    """

    kind: ClassVar[str] = "demand"
    demand: DemandMatrix
    certificate: OneFabric

    @property
    def buffer(self) -> Fraction:
        """Mean bytes that a rank sends or keeps."""
        return Fraction(sum(map(sum, self.demand)), len(self.demand))

    def bound(self, fabric: Fabric, collective: str, root: int | None) -> Fraction:
        if collective != "alltoall":
            raise PlanError(f"a demand bounds alltoall, not {collective}")
        self.check(fabric)
        lengths = self.certificate.link_lengths(fabric, collective)
        if any(value.numerator < 0 for value in lengths):
            raise PlanError("the certificate gives a link a length below zero; lengths are zero or more")
        scale = lcm(*(value.denominator for value in lengths))
        whole = [value.numerator * (scale // value.denominator) for value in lengths]
        needed = exchange_length(fabric, whole, self.demand)
        if needed == 0:
            raise PlanError("the demand has length zero under the certificate's lengths, which bound nothing")
        return capacity_of(lengths, fabric) * scale * self.buffer / needed

    def suppose(self, shards: Sequence[Shard]) -> None:
        """Raise PlanError if the shards of a plan carry another demand than the bound assumes."""
        carried: dict[tuple[int, int], Fraction] = {}
        for shard in shards:
            pair = path_ends(shard)
            known = carried.get(pair)
            carried[pair] = shard.share if known is None else known + shard.share
        buffer, none = self.buffer, Fraction(0)
        for source, row in enumerate(self.demand):
            for destination, amount in enumerate(row):
                share = carried.get((source, destination), none)
                # share * buffer == amount, without a Fraction for each pair
                if share.numerator * buffer.numerator != amount * share.denominator * buffer.denominator:
                    raise PlanError(
                        f"carries {format_number(share * buffer)} bytes to rank {destination} instead of the "
                        f"{amount} that the certificate's demand states",
                        rank=source,
                    )

    def seconds(self, rate: Fraction) -> Fraction:
        """Return the seconds that the demand takes at a rate in GB/s."""
        return self.buffer / rate / 10**9

    def words(self, fabric: Fabric, collective: str, root: int | None) -> str:
        lengths = self.certificate.link_lengths(fabric, collective)
        capacity = capacity_of(lengths, fabric)
        bound = self.bound(fabric, collective, root)
        needed = capacity * self.buffer / bound
        least = f"{format_seconds(float(self.seconds(bound)))} at least"
        if isinstance(self.certificate, Cut):
            crossing = self.certificate.crossing_words(fabric, collective)
            return f"{crossing}, and {format_number(needed)} bytes must: {least}"
        return (
            f"{sum(map(bool, lengths))} links, weighted by their dual lengths, carry {format_number(capacity)} GB/s, "
            f"and the demand takes {format_number(needed)} bytes of that weight: {least}"
        )

    def to_object(self) -> dict[str, object]:
        rows = [list(row) for row in self.demand]
        return {"kind": self.kind, "bytes": rows, "certificate": self.certificate.to_object()}

    @classmethod
    def from_object(cls, value: dict[str, object]) -> Self:
        where = "certificate: bytes"
        rows = (read_list(row, where) for row in read_list(value.get("bytes"), where))
        return cls(
            tuple(tuple(read_whole(item, where) for item in row) for row in rows),
            read_one_fabric(value, "a demand"),
        )

    def check(self, fabric: Fabric) -> None:
        """Raise PlanError unless the demand has a row and a column for every rank, and sends something."""
        size = fabric.size
        if len(self.demand) != size or any(len(row) != size for row in self.demand):
            raise PlanError(f"the certificate's demand has other than {size} rows of {size}")
        if min(map(min, self.demand)) < 0 or not any(map(any, self.demand)):
            raise PlanError("the certificate's demand must be zero or more bytes, and some above")


class SparseCertificate(Certificate):
    """The bound of a plan that moves entries."""

    __slots__ = ()
    of_entries: ClassVar[bool] = True

    @abstractmethod
    def suppose(self, shards: Sequence[Shard], fabric: Fabric) -> None:
        """Raise PlanError if shards do not meet the assumptions of the bound.

        Their trees are valid, and all have the same rounds.
        """


class ServerBound(SparseCertificate):
    """The bound of plans that sum elements inside servers, and exchange the entries of each server once."""

    __slots__ = ()

    @property
    def least(self) -> Fraction:
        """Least bytes of entries, for each byte of the shard, that the exchange moves."""
        return Fraction(0)

    def suppose(self, shards: Sequence[Shard], fabric: Fabric) -> None:
        kinds = [kind for kind, _ in groupby(stage.kind for stage in shards[0].stages)]
        if kinds != ["elements", "gather", "elements"]:
            raise PlanError(
                f"takes the rounds {', '.join(kinds)}, and the bound holds for elements, one exchange, and elements"
            )
        servers = FabricServers(fabric)
        home = {device.name: device.server for device in fabric.topology.devices}
        # Every image too: a symmetry may map a server to several.
        for number, shard in enumerate(shards):
            _check_phases(shard, number, self.least, servers, home)


@register_certificate
@dataclass(frozen=True, slots=True)
class EntryBound(SparseCertificate):
    """A certificate for elements, for a plan that moves only entries: ``entries`` bytes for a byte of the shard."""

    kind: ClassVar[str] = "entries"
    entries: Fraction
    certificate: OneFabric

    def suppose(self, shards: Sequence[Shard], fabric: Fabric) -> None:
        for number, (shard, _) in enumerate(shard_counts(shards)):
            _check_all_entries(shard, number, self.entries)

    def bound(self, fabric: Fabric, collective: str, root: int | None) -> Fraction:
        check_entries(self.entries)
        return self.certificate.bound(fabric, collective, root) / self.entries

    def words(self, fabric: Fabric, collective: str, root: int | None) -> str:
        elements = self.certificate.words(fabric, collective, root)
        return (
            f"a byte of the buffer is {format_number(self.entries)} bytes of entries, and of these {elements}"
        )

    def to_object(self) -> dict[str, object]:
        return {"kind": self.kind, "entries": str(self.entries), "certificate": self.certificate.to_object()}

    @classmethod
    def from_object(cls, value: dict[str, object]) -> Self:
        return cls(_read_entries(value), read_one_fabric(value, "entries"))


@register_certificate
@dataclass(frozen=True, slots=True)
class InsideServerBound(ServerBound):
    """The name of a server, and a certificate for the allreduce of its own ranks over its own links."""

    kind: ClassVar[str] = "inside server"
    server: str
    certificate: OneFabric

    def bound(self, fabric: Fabric, collective: str, root: int | None) -> Fraction:
        return self.certificate.bound(self._alone(fabric), "allreduce", None)

    def words(self, fabric: Fabric, collective: str, root: int | None) -> str:
        return f"inside {self.server} {self.certificate.words(self._alone(fabric), 'allreduce', None)}"

    def _alone(self, fabric: Fabric) -> Fabric:
        """Return the fabric of the server alone."""
        for server, alone in FabricServers(fabric).alone():
            if server == self.server:
                return Fabric(alone.topology, inside_channels(fabric))
        raise PlanError(f"the certificate names server {self.server!r}, which has no two ranks of this plan")

    def to_object(self) -> dict[str, object]:
        return {"kind": self.kind, "server": self.server, "certificate": self.certificate.to_object()}

    @classmethod
    def from_object(cls, value: dict[str, object]) -> Self:
        server = read_text(value.get("server"), "certificate: server")
        return cls(server, read_one_fabric(value, "a server"))


@register_certificate
@dataclass(frozen=True, slots=True)
class BetweenServersBound(ServerBound):
    """Devices, among them all ranks of some servers and none of the others, that the chosen entries must leave."""

    kind: ClassVar[str] = "between servers"
    entries: Fraction
    side: tuple[str, ...]

    @property
    def least(self) -> Fraction:
        return self.entries

    def bound(self, fabric: Fabric, collective: str, root: int | None) -> Fraction:
        # Every server on the side sends its entries to the others: once for each they must cross the border.
        check_entries(self.entries)
        side = node_set(self.side, fabric)
        servers = FabricServers(fabric)
        inside = 0
        for name, members in zip(servers.names, servers.members, strict=True):
            within = sum(rank in side for rank in members.tolist())
            if 0 < within < len(members):
                raise PlanError(
                    f"the certificate's side holds {within} of the {len(members)} ranks of {name}"
                )
            inside += within > 0
        if not 0 < inside < len(servers.names):
            raise PlanError("the certificate's side must hold at least one server and leave out at least one")
        return capacity_of(leaving(side, fabric), fabric) / (self.entries * inside)

    def words(self, fabric: Fabric, collective: str, root: int | None) -> str:
        side = set(self.side)
        crossing = format_number(capacity_of(leaving(node_set(side, fabric), fabric), fabric))
        home = {device.name: device.server for device in fabric.topology.devices}
        within = tuple(dict.fromkeys(home[name] for name in fabric.ranks if name in side))
        others = tuple(dict.fromkeys(home[name] for name in fabric.ranks if name not in side))
        verb, names = ("leave", within) if len(within) <= len(others) else ("enter", others)
        return (
            f"only {crossing} GB/s {verb} {format_set(names)}, and the entries of {len(within)} servers must, "
            f"{format_number(self.entries)} bytes each for a byte of the buffer"
        )

    def to_object(self) -> dict[str, object]:
        return {"kind": self.kind, "entries": str(self.entries), "side": list(self.side)}

    @classmethod
    def from_object(cls, value: dict[str, object]) -> Self:
        return cls(_read_entries(value), read_texts(value.get("side"), "certificate: side"))


def inside_channels(fabric: Fabric) -> tuple[str, ...]:
    """Return the channels of a fabric over which elements of sparse plans may move."""
    return tuple(channel for channel in fabric.channels if channel != "network")


def _read_entries(value: dict[str, object]) -> Fraction:
    entries = read_fraction(value.get("entries"), "certificate: entries")
    if entries <= 0:
        raise PlanError(f"certificate: entries of {entries} must be above zero")
    return entries


def _check_all_entries(shard: Shard, number: int, least: Fraction) -> None:
    """Check that entries are summed up trees on which no rank sends twice, and then broadcast."""
    sent: set[int] = set()
    falling = False
    for position, stage in enumerate(shard.stages):
        if stage.op == "gather" or stage.entries is None or stage.entries < least:
            raise PlanError(
                f"{stage.op}s {shown(stage.weight)} bytes for a byte of the shard, and the bound holds for trees on "
                f"which {shown(least)} bytes of entries move",
                shard=number,
                stage=position,
            )
        falling = falling or stage.op == "broadcast"
        for edge in reversed(stage.top_down()) if stage.op == "reduce" else ():
            if falling or {edge.child, edge.parent} & sent:
                raise PlanError(
                    "sums entries of which a rank has sent its own already; they would count twice",
                    shard=number,
                    stage=position,
                    rank=edge.child,
                )
            sent.add(edge.child)


def _check_phases(
    shard: Shard, number: int, least: Fraction, servers: FabricServers, home: dict[str, str]
) -> None:
    """Check that elements are reduced to one owner in each server, which exchanges entries and broadcasts elements."""
    gathers = [stage for stage in shard.stages if stage.op == "gather"]
    owner = {int(servers.of_rank[stage.root]): stage.root for stage in gathers}
    if len(owner) < len(gathers) or len(owner) < len(servers.names):
        raise PlanError(
            f"{len(gathers)} ranks gather for {len(servers.names)} servers, and the bound holds for one of each",
            shard=number,
        )
    exchanged = False
    for position, stage in enumerate(shard.stages):
        if stage.op == "gather":
            exchanged = True
            fault = _exchange_fault(stage, least, servers, owner)
        else:
            fault = _inside_fault(stage, "broadcast" if exchanged else "reduce", servers, owner, home)
        if fault:
            raise PlanError(fault, shard=number, stage=position)


def _exchange_fault(stage: Stage, least: Fraction, servers: FabricServers, owner: dict[int, int]) -> str:
    if stage.weight < least:
        return (
            f"gathers {shown(stage.weight)} bytes of entries for a byte of the shard, and the bound supposes "
            f"{shown(least)}"
        )
    for edge in stage.edges:
        server = int(servers.of_rank[edge.child])
        if owner[server] != edge.child:
            return f"gathers at rank {edge.child}, and the owner in {servers.names[server]} is rank {owner[server]}"
    return ""


def _inside_fault(
    stage: Stage, op: str, servers: FabricServers, owner: dict[int, int], home: dict[str, str]
) -> str:
    if stage.entries is not None:
        return f"{stage.op}s entries, and the bound holds if elements move inside servers"
    if stage.op != op:
        return f"{stage.op}s in place of a {op}, before or after the exchange"
    server = int(servers.of_rank[stage.root])
    if owner[server] != stage.root:
        return f"{stage.op}s at rank {stage.root}, and the owner in {servers.names[server]} is rank {owner[server]}"
    for edge in stage.edges:
        if edge.channel == "network" or len({home.get(device, "") for device in edge.route}) > 1:
            return f"the route {'-'.join(edge.route)} leaves its server, and the bound holds if elements stay inside"
    return ""


MOST_COMPARED = 4096
"""Most sets of inner vertices that are compared for one root; beyond it the certificate proves nothing."""


@register_certificate
@dataclass(frozen=True, slots=True)
class Steiner(Lengths):
    """Lengths of the links under which a cheapest tree may pass helpers and switches.

    L is the length of the cheapest forest of the collective whose trees span the ranks and may have other inner
    vertices: helpers in every tree; switches that copy in trees that lead down, switches that add in trees that lead
    up. Helpers and switches that add may be roots of an allreduce. If data may be coded instead, cuts are the bound,
    which may be higher.
    For example n workers and k helpers with links of B each way behind one switch (BytePS: Jiang et al., OSDI 2020).
    With y = 1 on the links of workers and y = (n - 2) / n on those of helpers, c y is 2 B (n + k (n - 2) / n) in all.
    A star around a worker is 4 (n - 1) long up and down, and one around a helper 2 (n + n (n - 2) / n), which is equal.
    No tree is shorter: rate <= (n^2 + k n - 2 k) B / (2 n (n - 1)).
    """

    kind: ClassVar[str] = "steiner"

    def forest(self, fabric: Fabric, collective: str, root: int | None) -> Fraction:
        length = self.link_lengths(fabric, collective)
        scale = lcm(*(value.denominator for value in length))
        return lightest_forest(fabric, [int(value * scale) for value in length], collective, root) / scale


def lightest_forest(fabric: Fabric, length: Sequence[int], collective: str, root: int | None) -> Fraction:
    """Return the length of the cheapest forest of a collective whose trees may pass inner vertices.

    ``length`` has zero or more for each link. PlanError if a tree cannot span all ranks, or there are too many sets of
    inner vertices to compare.
    """
    part, arcs = contracted_graph(fabric, length)
    where = sorted({part[rank] for rank in range(fabric.size)})
    states: dict[str, list[int]] = {}
    for state, node in enumerate(fabric.route_graph.nodes):
        states.setdefault(fabric.nodes[node], []).append(state)

    def beside(names: Iterable[str]) -> set[int]:
        return {part[state] for name in names for state in states[name]} - set(where)

    inner = {op: beside(fabric.inner_devices(op)) for op in ("reduce", "broadcast")}
    vertices = [*where, *sorted(inner["reduce"] | inner["broadcast"])]
    place = {vertex: number for number, vertex in enumerate(vertices)}
    # A staged route may cross a cap twice.
    no_arc = (2 * sum(length) + 1) * len(vertices)
    table = np.array(
        [
            [no_arc if reach < 0 else reach for reach in distances(arcs, start, vertices)]
            for start in vertices
        ],
        dtype=np.int64 if no_arc * (len(vertices) + 1) < 1 << 61 else object,
    )
    terminals = list(range(len(where)))
    trees = {
        "broadcast": _Lightest(table, terminals, sorted(place[v] for v in inner["broadcast"])),
        "reduce": _Lightest(table.T.copy(), terminals, sorted(place[v] for v in inner["reduce"])),
    }
    if collective in ("broadcast", "reduce"):
        found = Fraction(trees[collective].length(place[part[checked_root(root)]]))
    elif collective in ("allgather", "reduce_scatter"):
        one = trees["broadcast" if collective == "allgather" else "reduce"]
        total = 0
        for members in equivalent_vertices(table, terminals):
            ranks = sum(place[part[rank]] in members for rank in range(fabric.size))
            total += ranks * one.length(members[0])
        found = Fraction(total, fabric.size)
    else:
        # The sum may lie at a switch that adds, from where copies leave.
        inside = beside((*fabric.helpers, *fabric.adding))
        roots = equivalent_vertices(table, terminals) + equivalent_vertices(
            table, sorted(place[v] for v in inside)
        )
        found = Fraction(
            min(trees["reduce"].length(same[0]) + trees["broadcast"].length(same[0]) for same in roots)
        )
    if found >= no_arc:
        raise PlanError(f"no tree of this {collective} spans all ranks on the plan's channels")
    return found


@dataclass(frozen=True)
class _Lightest:
    """Cheapest arborescences over the terminals that may pass inner vertices, in one table of distances."""

    table: Table
    terminals: Sequence[int]
    inner: Sequence[int]

    def length(self, root: int) -> int:
        classes = equivalent_vertices(self.table, [vertex for vertex in self.inner if vertex != root])
        if set_count(classes) > MOST_COMPARED:
            raise PlanError(
                f"{set_count(classes)} sets of helpers and switches are too many to compare: "
                "the certificate's lengths prove nothing there; a cut does"
            )
        lengths = []
        for chosen in inner_sets(classes):
            kept = sorted({root, *self.terminals, *chosen})
            lengths.append(arborescence_of(self.table[np.ix_(kept, kept)], kept.index(root)))
        return min(lengths)
