"""Certificates: the data from which a third party recomputes a plan's bound, and the kinds for plans on one fabric.

All kinds give every directed link e a length y(e) >= 0. Whatever the trees, one byte of the buffer uses at least L
of length, so rate <= sum of c(e) y(e) / L. A certificate is recomputed in exact arithmetic, without the solver.

- `Cut`: y = 1 on the links across a device set S. Broadcast: L = 1 (Edmonds 1973). Allgather: L = |S ∩ ranks| / N
  (ForestColl, 2024). Reduce and reduce-scatter: the same on reversed links. Allreduce: L = 1 in either direction.
  All-to-all: L = |S ∩ ranks| |ranks - S| / N, as every rank of S has a block for each rank outside.
- `Partition`: y = 1 between the parts of a partition into k parts that hold a rank; L = 2 (k - 1), (k - 1) for each
  direction (Tutte 1961, Nash-Williams 1961). For allreduce.
- `Lengths`: any y. L is the length of the cheapest forest of the collective, where an edge between two ranks is as
  long as the shortest path (`topoplan.plans.certificates.forest_length`).
- `Channels`: one certificate for each channel of a plan that splits the buffer between channels.

For example, three GPUs in a triangle of links of 25 GB/s each way. Two links leave the cut {gpu0}: neither a broadcast
from gpu0 nor an allreduce is faster than 50 GB/s. The partition {gpu0} {gpu1} {gpu2} has all six directions between its
parts, 150 GB/s, and 2 (3 - 1) = 4 crossings for every byte: an allreduce runs at most at 37.5 GB/s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import ClassVar, Protocol, Self, TypeVar

from topoplan.errors import PlanError
from topoplan.machine.fabric import Fabric, channel_words
from topoplan.machine.half_duplex import caps, is_part, whole_ends, wire_name
from topoplan.machine.topology import Topology
from topoplan.plans.certificates.forest_length import forest_length, zero_length_components
from topoplan.plans.file_values import (
    check_known,
    read_fraction,
    read_list,
    read_object,
    read_text,
    read_texts,
)
from topoplan.units import name_ranges


class Certificate(ABC):
    """A proof that no plan is faster; ``kind`` is its name in files."""

    __slots__ = ()
    kind: ClassVar[str]
    of_entries: ClassVar[bool] = False

    @abstractmethod
    def bound(self, fabric: Fabric, collective: str, root: int | None) -> Fraction:
        """Recompute the bound that the certificate proves, in GB/s of algorithm bandwidth, exactly.

        Parameters
        ----------
        fabric : Fabric
            Ranks, and the links that the plan may use.
        collective : str
        root : int or None
            Root rank of a broadcast or reduce.

        Raises
        ------
        PlanError
            It proves nothing: it names unknown devices, does not fit the collective, or is empty.
        """

    @abstractmethod
    def words(self, fabric: Fabric, collective: str, root: int | None) -> str:
        """Return the certificate in words: a capacity in GB/s over how often a byte uses it is the bound."""

    @abstractmethod
    def to_object(self) -> dict[str, object]:
        """Return the JSON object of a plan file, with its kind."""

    @classmethod
    @abstractmethod
    def from_object(cls, value: dict[str, object]) -> Self:
        """Read such an object; PlanError if a key is missing or of a wrong type."""


class OneFabric(Certificate):
    """The bound of a plan whose links are one fabric."""

    __slots__ = ()

    @abstractmethod
    def link_lengths(self, fabric: Fabric, collective: str) -> list[Fraction]:
        """Return the length that the certificate gives each link of the fabric."""

    @abstractmethod
    def renamed(self, names: Mapping[str, str]) -> Self:
        """Return the certificate of a machine with other device names, by ``names``."""


Kind = TypeVar("Kind", bound=type[Certificate])
_KINDS: dict[str, type[Certificate]] = {}


def register_certificate(kind: Kind) -> Kind:
    """Register a kind of certificate for `certificate_from_object`."""
    _KINDS[kind.kind] = kind
    return kind


def certificate_from_object(item: object) -> Certificate:
    """Read the certificate of a plan file; PlanError if its kind is unknown, or a key is missing or of a wrong type."""
    import topoplan.plans.certificates.exchange  # noqa: F401, which registers further kinds

    value = read_object(item, "certificate")
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        *others, last = _KINDS
        raise PlanError(f"certificate kind {repr(kind)[:60]} is unknown; use {', '.join(others)} or {last}")
    made = _KINDS[kind].from_object(value)
    check_known(value, made.to_object(), f"certificate {kind}")
    return made


def read_one_fabric(value: dict[str, object], of: str) -> OneFabric:
    """Return the inner certificate of an object that contains one; errors as `certificate_from_object`."""
    inner = read_object(value.get("certificate"), f"certificate: certificate of {of}")
    kind = _KINDS.get(str(inner.get("kind")))
    if kind is None or not issubclass(kind, OneFabric):
        raise PlanError(f"certificate: that of {of} must be a cut, a partition, lengths or trivial")
    made = kind.from_object(inner)
    check_known(inner, made.to_object(), f"certificate of {of}")
    return made


@register_certificate
@dataclass(frozen=True, slots=True)
class Channels(Certificate):
    """A certificate for each channel, as (channel, certificate), of a plan that splits the buffer between them.

    A shard keeps to one channel (`topoplan.plans.verify`), so each carries at most its own bound, and all together at
    most the sum of the bounds.
    """

    kind: ClassVar[str] = "channels"
    parts: tuple[tuple[str, OneFabric], ...]

    def bound(self, fabric: Fabric, collective: str, root: int | None) -> Fraction:
        bounded = tuple(channel for channel, _ in self.parts)
        if len(set(bounded)) < len(bounded) or set(bounded) != set(fabric.channels):
            raise PlanError(
                f"the certificate bounds {', '.join(bounded) or 'no channel'}, but the plan has channels "
                f"{', '.join(fabric.channels)}: each channel needs one part"
            )
        return sum((part.bound(one, collective, root) for one, part in self._alone(fabric)), Fraction(0))

    def words(self, fabric: Fabric, collective: str, root: int | None) -> str:
        sums = [
            f"{format_number(part.bound(one, collective, root))} GB/s over {channel_words(one.channels)} "
            f"({part.words(one, collective, root)})"
            for one, part in self._alone(fabric)
        ]
        return f"{' and '.join(sums)}, since each tree uses one of them"

    def _alone(self, fabric: Fabric) -> Iterator[tuple[Fabric, OneFabric]]:
        """Yield the fabric of each channel, and its certificate."""
        for channel, part in self.parts:
            yield Fabric(fabric.topology, (channel,)), part

    def to_object(self) -> dict[str, object]:
        parts = [{"channel": channel, "certificate": part.to_object()} for channel, part in self.parts]
        return {"kind": self.kind, "parts": parts}

    @classmethod
    def from_object(cls, value: dict[str, object]) -> Self:
        parts = []
        for item in read_list(value.get("parts"), "certificate: parts"):
            part = read_object(item, "certificate: part")
            channel = read_text(part.get("channel"), "certificate: channel")
            inner = part.get("certificate")
            if isinstance(inner, dict) and inner.get("kind") == cls.kind:
                raise PlanError("certificate: a channel's certificate cannot itself be one of channels")
            parts.append((channel, read_one_fabric(part, "a channel")))
        return cls(tuple(parts))


class Certified(Protocol):
    """A plan, or a bound alone: a certificate and its context."""

    @property
    def topology(self) -> Topology: ...
    @property
    def channels(self) -> tuple[str, ...]: ...
    @property
    def collective(self) -> str: ...
    @property
    def root(self) -> int | None: ...
    @property
    def certificate(self) -> Certificate: ...


def explain_certificate(plan: Certified) -> str:
    """Return one sentence on the bottleneck that the certificate of a plan, or of a bound alone, proves.

    PlanError if the certificate proves nothing (see `Certificate.bound`).

    >>> import topoplan
    >>> explain_certificate(topoplan.plan(topoplan.load("dgx-1v"), "broadcast"))
    'only 150 GB/s leave {gpu0}; each byte must leave it once'
    >>> explain_certificate(topoplan.plan(topoplan.load("dgx-2"), "allreduce", gpus=[0, 1, 2]))
    'the links out of all 3 GPUs carry 450 GB/s together; each byte crosses them at least 4 times'
    """
    return plan.certificate.words(Fabric(plan.topology, plan.channels), plan.collective, plan.root)


def node_set(names: Iterable[str], fabric: Fabric) -> set[int]:
    """Return the nodes of named devices that have a link of the fabric; PlanError for an unknown device."""
    position = {name: i for i, name in enumerate(fabric.nodes)}
    known = {device.name for device in fabric.topology.devices}
    for name in names:
        if name not in known:
            raise PlanError(f"the certificate names device {name!r}, which the topology does not have")
    return {position[name] for name in names if name in position}


def leaving(side: set[int], fabric: Fabric) -> list[Fraction]:
    """Return length 1 for every link that leaves a set of nodes, and 0 for the others."""
    one, none = Fraction(1), Fraction(0)
    return [one if src in side and dst not in side else none for src, dst in fabric.ends]


def capacity_of(lengths: Sequence[Fraction], fabric: Fabric) -> Fraction:
    """Return the sum of c(e) y(e) over the links, in GB/s."""
    return sum((c * y for c, y in zip(fabric.capacity, lengths, strict=True) if y), Fraction(0))


_LISTED, _LISTED_PARTS = 8, 4


def format_number(value: Fraction) -> str:
    """Return a number with six digits."""
    return f"{float(value):.6g}"


def format_names(names: Iterable[str]) -> str:
    """Return the first names of a list, numbers as ranges, and the number of omitted ones."""
    ranges = name_ranges(names)
    more = f" and {len(ranges) - _LISTED} more" if len(ranges) > _LISTED else ""
    return " ".join(ranges[:_LISTED]) + more


def format_set(names: Sequence[str]) -> str:
    """Return a set in braces, numbers as ranges; the first ranges of many, and the number of omitted ones.

    >>> format_set(["gpu0", "gpu1", "gpu2", "gpu6"]), format_set(["s0.gpu0", "s1.gpu0"])
    ('{gpu0-2,6}', '{s0,1.gpu0}')
    """
    ranges = name_ranges(name for name in names if not is_part(name))
    shown = ranges if len(ranges) <= _LISTED else (*ranges[:_LISTED], f"and {len(ranges) - _LISTED} more")
    return "{" + " ".join(shown) + "}"


@register_certificate
@dataclass(frozen=True, slots=True)
class Trivial(OneFabric):
    """One rank: nothing moves, nothing bounds."""

    kind: ClassVar[str] = "trivial"

    def bound(self, fabric: Fabric, collective: str, root: int | None) -> Fraction:
        if fabric.size > 1:
            raise PlanError(f"the certificate 'trivial' proves nothing for {fabric.size} ranks")
        raise PlanError("a plan of one rank moves nothing and has no bound")

    def link_lengths(self, fabric: Fabric, collective: str) -> list[Fraction]:
        return [Fraction(0)] * len(fabric.links)

    def renamed(self, names: Mapping[str, str]) -> Self:
        return self

    def words(self, fabric: Fabric, collective: str, root: int | None) -> str:
        return "one rank moves nothing"

    def to_object(self) -> dict[str, object]:
        return {"kind": self.kind}

    @classmethod
    def from_object(cls, value: dict[str, object]) -> Self:
        return cls()


@register_certificate
@dataclass(frozen=True, slots=True)
class Cut(OneFabric):
    """A set of devices whose outgoing links are the bottleneck (incoming ones for reduce, reduce-scatter)."""

    kind: ClassVar[str] = "cut"
    side: tuple[str, ...]

    def bound(self, fabric: Fabric, collective: str, root: int | None) -> Fraction:
        side = node_set(self.side, fabric)
        inside = sum(rank in side for rank in range(fabric.size))
        if inside == 0 or inside == fabric.size:
            raise PlanError("the cut must hold at least one rank and leave out at least one")
        crossing = capacity_of(self.link_lengths(fabric, collective), fabric)
        if collective == "alltoall":
            return crossing * fabric.size / (inside * (fabric.size - inside))
        if collective in ("allgather", "reduce_scatter"):
            return crossing * fabric.size / inside
        if collective in ("broadcast", "reduce") and root not in side:
            raise PlanError(f"the cut must hold the root, rank {root}")
        return crossing

    def link_lengths(self, fabric: Fabric, collective: str) -> list[Fraction]:
        # 1 for the links that leave the side for broadcast and allgather, that enter it for reduce and
        # reduce-scatter. For allreduce, in which every byte crosses in both directions, those of the weaker one.
        return self._crossing(fabric, collective)[1]

    def _crossing(self, fabric: Fabric, collective: str) -> tuple[bool, list[Fraction]]:
        """Return whether the counted links lead outwards, and their lengths."""
        side = node_set(self.side, fabric)
        leaves, enters = leaving(side, fabric), leaving(set(range(len(fabric.nodes))) - side, fabric)
        outwards = collective in ("broadcast", "allgather", "alltoall")
        if collective == "allreduce":
            outwards = capacity_of(leaves, fabric) <= capacity_of(enters, fabric)
        return outwards, leaves if outwards else enters

    def renamed(self, names: Mapping[str, str]) -> Self:
        return type(self)(tuple(names[name] for name in self.side))

    def words(self, fabric: Fabric, collective: str, root: int | None) -> str:
        part = ""
        within = len(set(self.side).intersection(fabric.ranks))
        if collective in ("allgather", "reduce_scatter"):
            part = f"{within}/{fabric.size} of the buffer"
        elif collective == "alltoall":
            part = f"{within} x {fabric.size - within} blocks of 1/{fabric.size} of a buffer"
        only = self.crossing_words(fabric, collective)
        verb = "leave" if " GB/s leave {" in only else "enter"
        return f"{only}, and {part} must" if part else f"{only}; each byte must {verb} it once"

    def crossing_words(self, fabric: Fabric, collective: str) -> str:
        """Return in words the capacity that crosses the cut."""
        side = set(self.side)
        outwards, lengths = self._crossing(fabric, collective)
        inside = tuple(name for name in fabric.nodes if name in side)
        outside = tuple(name for name in fabric.nodes if name not in side)
        verbs = ("leave", "enter") if outwards else ("enter", "leave")
        verb, names = (verbs[0], inside) if len(inside) <= len(outside) else (verbs[1], outside)
        return f"only {format_number(capacity_of(lengths, fabric))} GB/s {verb} {format_set(names)}"

    def to_object(self) -> dict[str, object]:
        return {"kind": self.kind, "side": list(self.side)}

    @classmethod
    def from_object(cls, value: dict[str, object]) -> Self:
        return cls(read_texts(value.get("side"), "certificate: side"))


@register_certificate
@dataclass(frozen=True, slots=True)
class Partition(OneFabric):
    """Parts of devices such that the links between the parts are the bottleneck of an allreduce.

    A device in no part is a part of its own.
    """

    kind: ClassVar[str] = "partition"
    parts: tuple[tuple[str, ...], ...]

    def bound(self, fabric: Fabric, collective: str, root: int | None) -> Fraction:
        if collective != "allreduce":
            raise PlanError(f"a partition bounds allreduce, not {collective}")
        with_rank = set(self._part_of(fabric)[: fabric.size])
        if len(with_rank) < 2:
            raise PlanError("the partition must divide the ranks into at least two parts")
        crossing = capacity_of(self.link_lengths(fabric, collective), fabric)
        return crossing / (2 * (len(with_rank) - 1))

    def link_lengths(self, fabric: Fabric, collective: str) -> list[Fraction]:
        part = self._part_of(fabric)
        return [Fraction(part[src] != part[dst]) for src, dst in fabric.ends]

    def _part_of(self, fabric: Fabric) -> list[int]:
        """Return the number of the part of every node."""
        part_of: dict[int, int] = {}
        node_set((name for part in self.parts for name in part), fabric)
        position = {name: node for node, name in enumerate(fabric.nodes)}
        for number, part in enumerate(self.parts):
            for node in sorted({position[name] for name in part if name in position}):
                if node in part_of:
                    raise PlanError(f"device {fabric.nodes[node]} stands in two parts of the partition")
                part_of[node] = number
        return [part_of.get(node, len(self.parts) + node) for node in range(len(fabric.nodes))]

    def renamed(self, names: Mapping[str, str]) -> Self:
        return type(self)(tuple(tuple(names[name] for name in part) for part in self.parts))

    def words(self, fabric: Fabric, collective: str, root: int | None) -> str:
        part_of = self._part_of(fabric)
        parts: dict[int, list[str]] = {}
        for name, number in zip(fabric.nodes, part_of, strict=True):
            parts.setdefault(number, []).append(name)
        crossing = capacity_of(self.link_lengths(fabric, collective), fabric)
        times = 2 * (len(set(part_of[: fabric.size])) - 1)
        alone = len(parts) == fabric.size > 4 and all(len(part) == 1 for part in parts.values())
        named = [format_set(part) for part in parts.values()][:_LISTED_PARTS]
        more = f" and {len(parts) - len(named)} more parts" if len(parts) > len(named) else ""
        listed = f"all {len(parts)} GPUs" if alone else f"{' '.join(named)}{more}"
        return (
            f"the links between {listed} carry {format_number(crossing)} GB/s both ways; each byte crosses this cut at "
            f"least {times} times (2 x ({times // 2 + 1} parts - 1))"
        )

    def to_object(self) -> dict[str, object]:
        return {"kind": self.kind, "parts": [list(part) for part in self.parts]}

    @classmethod
    def from_object(cls, value: dict[str, object]) -> Self:
        parts = read_list(value.get("parts"), "certificate: parts")
        return cls(tuple(read_texts(part, "certificate: parts") for part in parts))


@register_certificate
@dataclass(frozen=True, slots=True)
class Lengths(OneFabric):
    """Nonzero dual lengths of links, as (src, dst, length)."""

    kind: ClassVar[str] = "lengths"
    lengths: tuple[tuple[str, str, Fraction], ...]

    def bound(self, fabric: Fabric, collective: str, root: int | None) -> Fraction:
        self.check(fabric)
        cheapest = self.forest(fabric, collective, root)
        if cheapest == 0:
            raise PlanError("the certificate's lengths allow a forest of length zero and bound nothing")
        return self.volume(fabric) / cheapest

    def check(self, fabric: Fabric) -> None:
        """Raise PlanError if a length is below zero, or of an unknown link."""
        for src, dst, value in self.lengths:
            if (src, dst) not in fabric.link_index:
                raise PlanError(f"the certificate gives a length to {src}->{dst}, which is not a usable link")
            if value < 0:
                raise PlanError(
                    f"the certificate gives {src}->{dst} a length below zero; lengths are zero or more"
                )

    def volume(self, fabric: Fabric) -> Fraction:
        """Return the sum of c(e) y(e) over the links, in GB/s."""
        length = self.link_lengths(fabric, "")
        return sum((c * y for c, y in zip(fabric.capacity, length, strict=True) if y), Fraction(0))

    def forest(self, fabric: Fabric, collective: str, root: int | None) -> Fraction:
        """Return the length of the cheapest forest of one byte; links that the fabric lacks do not count."""
        if fabric.helpers and collective != "alltoall":
            raise PlanError(
                f"trees may pass helper {fabric.helpers[0]}, which these lengths do not count: they prove nothing "
                "there; a cut or the kind steiner does"
            )
        length = self.link_lengths(fabric, collective)
        scale = lcm(*(value.denominator for value in length))
        whole = [value.numerator * (scale // value.denominator) for value in length]
        _check_switches(fabric, whole, collective)
        return forest_length(fabric, whole, collective, root) / scale

    def link_lengths(self, fabric: Fabric, collective: str) -> list[Fraction]:
        listed = {(src, dst): value for src, dst, value in self.lengths}
        return [listed.get((link.src, link.dst), Fraction(0)) for link in fabric.links]

    def renamed(self, names: Mapping[str, str]) -> Self:
        return type(self)(tuple((names[src], names[dst], length) for src, dst, length in self.lengths))

    def words(self, fabric: Fabric, collective: str, root: int | None) -> str:
        # With equal lengths a count of crossings; otherwise the lengths are weights, the greatest one being 1.
        bound = self.bound(fabric, collective, root)
        stated = {(src, dst): value for src, dst, value in self.lengths}
        longest = max(stated.values())
        length = {ends: value / longest for ends, value in stated.items() if value}
        total = sum((fabric.capacity[fabric.link_index[ends]] * y for ends, y in length.items()), Fraction(0))
        names = _ports(fabric, {ends for ends, value in length.items() if value == 1})
        if all(value == 1 for value in length.values()):
            return (
                f"{names} carry {format_number(total)} GB/s together; "
                f"each byte crosses them at least {format_number(total / bound)} times"
            )
        return (
            f"{len(length)} links, by their dual edge weights, carry {format_number(total)} GB/s; each byte takes at "
            f"least {format_number(total / bound)} of that weight; the heaviest are {names}"
        )

    def to_object(self) -> dict[str, object]:
        return {"kind": self.kind, "lengths": [[src, dst, str(y)] for src, dst, y in self.lengths]}

    @classmethod
    def from_object(cls, value: dict[str, object]) -> Self:
        where = "certificate: lengths"
        rows = []
        for row in read_list(value.get("lengths"), where):
            if not isinstance(row, list) or len(row) != 3:
                raise PlanError(f"certificate: a length must be [src, dst, length], not {row!r}"[:200])
            rows.append((read_text(row[0], where), read_text(row[1], where), read_fraction(row[2], where)))
        return cls(tuple(rows))


def _check_switches(fabric: Fabric, length: Sequence[int], collective: str) -> None:
    """Raise PlanError if a switch that copies or adds, as an inner vertex of a tree, could make trees shorter.

    It cannot if a rank at distance zero both ways could do the same, or if the path shared by its copies, from any rank
    to it, has no length (for one that adds: the path from it to any rank). A reduce or reduce-scatter does not copy, a
    broadcast or allgather does not add; an all-to-all does neither.
    """
    part = zero_length_components(fabric, length) if fabric.in_network and collective != "alltoall" else []
    if not part:
        return
    with_rank = {part[rank] for rank in range(fabric.size)}
    for names, forward, unused in (
        (fabric.copying, False, ("reduce", "reduce_scatter")),
        (fabric.adding, True, ("broadcast", "allgather")),
    ):
        for state, node in enumerate(fabric.route_graph.nodes):
            name = fabric.nodes[node]
            if name not in names or collective in unused or part[state] in with_rank:
                continue
            if not fabric.reached_from(state, forward=forward, length=length) >= set(range(fabric.size)):
                raise PlanError(
                    f"the certificate's lengths part {name}, which can copy or add, from every rank: "
                    "they prove nothing there; a cut or a partition does"
                )


def _ports(fabric: Fabric, links: set[tuple[str, str]]) -> str:
    """Return the names of links, or words for all links that leave or enter the GPUs."""
    pairs = [(link.src, link.dst) for link in fabric.links]
    for end, way in ((0, "out of"), (1, "into")):
        if links == {pair for pair in pairs if pair[end] in fabric.ranks}:
            return f"the links {way} all {fabric.size} GPUs"
    natural = whole_ends(fabric.topology)
    ports = {(link.src, link.dst) for link in caps(fabric.topology)}
    near = {natural[pair][0] for pair in pairs if pair in natural and pair[0] in fabric.ranks}
    if links == ports and len(ports) == len(near) == fabric.size:
        return f"both directions of the links of all {fabric.size} GPUs"
    return format_names(dict.fromkeys(wire_name(*natural.get(pair, pair)) for pair in pairs if pair in links))
