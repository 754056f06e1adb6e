"""The certificate by lengths: any y(e) >= 0, and L the length of the cheapest forest of the collective.

An edge of that forest between two ranks is as long as the shortest path (`topoplan.plans.certificates.forest_length`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import ClassVar, Self

from topoplan.errors import PlanError
from topoplan.fabric.fabric import Fabric
from topoplan.plans.certificates.certificate import OneFabric, list_words, number_words, registered
from topoplan.plans.certificates.forest_length import forest_length, zero_parts
from topoplan.plans.json_values import read_fraction, read_list, read_text


@registered
@dataclass(frozen=True, slots=True)
class Lengths(OneFabric):
    """Dual lengths of the links that have one above zero, as (src, dst, length)."""

    kind: ClassVar[str] = "lengths"
    lengths: tuple[tuple[str, str, Fraction], ...]

    def bound(self, fabric: Fabric, collective: str, root: int | None) -> Fraction:
        for src, dst, value in self.lengths:
            if (src, dst) not in fabric.link_index:
                raise PlanError(f"the certificate gives a length to {src}->{dst}, which is no usable link")
            if value < 0:
                raise PlanError(
                    f"the certificate gives {src}->{dst} a length below zero; lengths are zero or more"
                )
        length = self.link_lengths(fabric, collective)
        scale = lcm(*(value.denominator for value in length))
        whole = [int(value * scale) for value in length]
        _check_switches(fabric, whole, collective)
        cheapest = forest_length(fabric, whole, collective, root)
        if cheapest == 0:
            raise PlanError("the certificate's lengths allow a forest of length zero and bound nothing")
        total = sum((c * y for c, y in zip(fabric.capacity, whole, strict=True)), Fraction(0))
        return total / cheapest

    def link_lengths(self, fabric: Fabric, collective: str) -> list[Fraction]:
        """The listed lengths, and 0 for the other links."""
        listed = {(src, dst): value for src, dst, value in self.lengths}
        return [listed.get((link.src, link.dst), Fraction(0)) for link in fabric.links]

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


def _ports(fabric: Fabric, links: set[tuple[str, str]]) -> str:
    """The names of links, or what they are together where they are all that leave or enter the GPUs."""
    pairs = [(link.src, link.dst) for link in fabric.links]
    for end, way in ((0, "out of"), (1, "into")):
        if links == {pair for pair in pairs if pair[end] in fabric.ranks}:
            return f"the links {way} all {fabric.size} GPUs"
    return list_words(f"{src}>{dst}" for src, dst in pairs if (src, dst) in links)
