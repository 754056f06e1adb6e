"""Certificates of plans whose links are one fabric: a length y(e) for every link, and the length L of any forest.

- `Cut`: y = 1 on the links across a device set S. Broadcast: L = 1 (Edmonds 1973). Allgather: L = |S ∩ ranks| / N
  (ForestColl, 2024). Reduce and reduce-scatter: the same on reversed links. Allreduce: L = 1 in either direction.
  All-to-all: L = |S ∩ ranks| |ranks - S| / N, as every rank of S has a block for each rank outside.
- `Partition`: y = 1 between the parts of a partition into k parts that hold a rank; L = 2 (k - 1), once up and
  once down (Tutte 1961, Nash-Williams 1961). For allreduce.
- `Lengths`: any y. L is the length of the cheapest forest of the collective, where an edge between two ranks is as long
  as the shortest path (`topoplan.plans.certificates.forest_length`).

For example, three GPUs in a triangle of links of 25 GB/s each way. A cut {gpu0} is left by two of them: no broadcast
from gpu0, nor an allreduce, is faster than 50 GB/s. The partition {gpu0} {gpu1} {gpu2} has all six directions between
its parts, 150 GB/s, and 2 (3 - 1) = 4 crossings for every byte: an allreduce runs at 37.5 GB/s at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import ClassVar, Self

from topoplan.errors import PlanError
from topoplan.fabric.fabric import Fabric
from topoplan.plans.certificates.certificate import (
    OneFabric,
    capacity_of,
    leaving,
    list_words,
    node_set,
    number_words,
    registered,
    set_words,
)
from topoplan.plans.certificates.forest_length import forest_length, zero_parts
from topoplan.plans.json_values import read_fraction, read_list, read_text, read_texts


@registered
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


@registered
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
        """1 for the links that leave the side for broadcast and allgather, that enter it for reduce, reduce-scatter.

        For allreduce, where every byte crosses in both directions, the weaker of them.
        """
        return self._crossing(fabric, collective)[1]

    def _crossing(self, fabric: Fabric, collective: str) -> tuple[bool, list[Fraction]]:
        """Whether the links that count lead outwards, and their lengths."""
        side = node_set(self.side, fabric)
        leaves, enters = leaving(side, fabric), leaving(set(range(len(fabric.nodes))) - side, fabric)
        outwards = collective in ("broadcast", "allgather", "alltoall")
        if collective == "allreduce":
            outwards = capacity_of(leaves, fabric) <= capacity_of(enters, fabric)
        return outwards, leaves if outwards else enters

    def renamed(self, names: Mapping[str, str]) -> Self:
        return type(self)(tuple(names[name] for name in self.side))

    def words(self, fabric: Fabric, collective: str, root: int | None) -> str:
        part = "every byte"
        within = sum(name in set(self.side) for name in fabric.ranks)
        if collective in ("allgather", "reduce_scatter"):
            part = f"{within}/{fabric.size} of the buffer"
        elif collective == "alltoall":
            part = f"{within} x {fabric.size - within} blocks of 1/{fabric.size} of a buffer"
        return f"{self.crossing_words(fabric, collective)}, and {part} must"

    def crossing_words(self, fabric: Fabric, collective: str) -> str:
        """What crosses the cut at most."""
        side = set(self.side)
        outwards, lengths = self._crossing(fabric, collective)
        inside = tuple(name for name in fabric.nodes if name in side)
        outside = tuple(name for name in fabric.nodes if name not in side)
        verbs = ("leave", "enter") if outwards else ("enter", "leave")
        verb, names = (verbs[0], inside) if len(inside) <= len(outside) else (verbs[1], outside)
        return f"only {number_words(capacity_of(lengths, fabric))} GB/s {verb} {set_words(names)}"

    def to_object(self) -> dict[str, object]:
        return {"kind": self.kind, "side": list(self.side)}

    @classmethod
    def from_object(cls, value: dict[str, object]) -> Self:
        return cls(read_texts(value.get("side"), "certificate: side"))


@registered
@dataclass(frozen=True, slots=True)
class Partition(OneFabric):
    """Parts of devices such that the links between the parts are the bottleneck of an allreduce.

    A device that stands in no part is a part of its own.
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
        """1 for the links between parts."""
        part = self._part_of(fabric)
        return [Fraction(part[src] != part[dst]) for src, dst in fabric.ends]

    def _part_of(self, fabric: Fabric) -> list[int]:
        """The number of the part of every node."""
        part_of: dict[int, int] = {}
        for number, part in enumerate(self.parts):
            for node in sorted(node_set(part, fabric)):
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
        listed = f"all {len(parts)} GPUs" if alone else " ".join(map(set_words, parts.values()))
        return (
            f"the links between {listed} carry {number_words(crossing)} GB/s both ways, "
            f"and every byte crosses them {times} times"
        )

    def to_object(self) -> dict[str, object]:
        return {"kind": self.kind, "parts": [list(part) for part in self.parts]}

    @classmethod
    def from_object(cls, value: dict[str, object]) -> Self:
        parts = read_list(value.get("parts"), "certificate: parts")
        return cls(tuple(read_texts(part, "certificate: parts") for part in parts))


@registered
@dataclass(frozen=True, slots=True)
class Lengths(OneFabric):
    """Dual lengths of the links that have one above zero, as (src, dst, length)."""

    kind: ClassVar[str] = "lengths"
    lengths: tuple[tuple[str, str, Fraction], ...]

    def bound(self, fabric: Fabric, collective: str, root: int | None) -> Fraction:
        self.check(fabric)
        cheapest = self.forest(fabric, collective, root)
        if cheapest == 0:
            raise PlanError("the certificate's lengths allow a forest of length zero and bound nothing")
        return self.volume(fabric) / cheapest

    def check(self, fabric: Fabric) -> None:
        """Raise `PlanError` where a length is below zero, or of no link."""
        for src, dst, value in self.lengths:
            if (src, dst) not in fabric.link_index:
                raise PlanError(f"the certificate gives a length to {src}->{dst}, which is no usable link")
            if value < 0:
                raise PlanError(
                    f"the certificate gives {src}->{dst} a length below zero; lengths are zero or more"
                )

    def volume(self, fabric: Fabric) -> Fraction:
        """What the links carry a second, each by its length."""
        length = self.link_lengths(fabric, "")
        return sum((c * y for c, y in zip(fabric.capacity, length, strict=True) if y), Fraction(0))

    def forest(self, fabric: Fabric, collective: str, root: int | None) -> Fraction:
        """Length of the cheapest forest of one byte; links that the fabric lacks do not count."""
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
        """The listed lengths, and 0 for the other links."""
        listed = {(src, dst): value for src, dst, value in self.lengths}
        return [listed.get((link.src, link.dst), Fraction(0)) for link in fabric.links]

    def renamed(self, names: Mapping[str, str]) -> Self:
        return type(self)(tuple((names[src], names[dst], length) for src, dst, length in self.lengths))

    def words(self, fabric: Fabric, collective: str, root: int | None) -> str:
        """With equal lengths a count of crossings; otherwise the lengths are weights, the greatest one being 1."""
        bound = self.bound(fabric, collective, root)
        stated = {(src, dst): value for src, dst, value in self.lengths}
        longest = max(stated.values())
        length = {ends: value / longest for ends, value in stated.items() if value}
        total = sum((fabric.capacity[fabric.link_index[ends]] * y for ends, y in length.items()), Fraction(0))
        names = _ports(fabric, {ends for ends, value in length.items() if value == 1})
        if all(value == 1 for value in length.values()):
            return (
                f"{names} carry {number_words(total)} GB/s together, "
                f"and every byte crosses them at least {number_words(total / bound)} times"
            )
        return (
            f"{len(length)} links, weighted by their dual lengths, carry {number_words(total)} GB/s, and every byte "
            f"takes at least {number_words(total / bound)} of that weight; the heaviest are {names}"
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
    """A switch that copies or adds may be an inner vertex of a tree, which must not make trees shorter.

    It does not where a rank at distance zero both ways could do the same, and where what its copies share, the way
    from any rank to it, has no length (for one that adds: the way from it to any rank). To copy serves no reduce and
    no reduce-scatter, to add no broadcast and no allgather; neither serves an all-to-all.
    """
    part = zero_parts(fabric, length) if fabric.in_network and collective != "alltoall" else []
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
            if not fabric.zero_reach(state, length, forward=forward) >= set(range(fabric.size)):
                raise PlanError(
                    f"the certificate's lengths part {name}, which can copy or add, from every rank: "
                    "they prove nothing there; a cut or a partition does"
                )


def _ports(fabric: Fabric, links: set[tuple[str, str]]) -> str:
    """The names of links, or what they are together where they are all that leave or enter the GPUs."""
    pairs = [(link.src, link.dst) for link in fabric.links]
    for end, way in ((0, "out of"), (1, "into")):
        if links == {pair for pair in pairs if pair[end] in fabric.ranks}:
            return f"the links {way} all {fabric.size} GPUs"
    return list_words(f"{src}>{dst}" for src, dst in pairs if (src, dst) in links)
