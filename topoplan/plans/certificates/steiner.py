"""Certify bounds for trees that may pass devices other than ranks: helpers, and switches that copy or add.

`Steiner`: any y, as in `topoplan.plans.certificates.certificate.Lengths`. L is the length of the cheapest forest of the
collective whose trees span the ranks and may have other inner vertices: helpers in every tree, and as roots of an
allreduce; switches that copy in trees that lead down, switches that add in trees that lead up. If data may be coded
instead of copied and added, cuts are the bound; these lengths bound what trees can do, which may be less.

For example n workers and k helpers with links of B each way behind one switch (BytePS: Jiang et al., OSDI 2020). With
y = 1 on the links of workers and y = (n - 2) / n on those of helpers, c y is 2 B (n + k (n - 2) / n) in all. A star
around a worker is 4 (n - 1) long up and down, and one around a helper 2 (n + n (n - 2) / n), which is equal. No tree is
shorter: rate <= (n^2 + k n - 2 k) B / (2 n (n - 1)).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import ClassVar

import numpy as np

from topoplan.errors import PlanError
from topoplan.machine.fabric import Fabric
from topoplan.plans.certificates.certificate import Lengths, register_certificate
from topoplan.plans.certificates.forest_length import (
    Table,
    arborescence_of,
    checked_root,
    contracted_graph,
    distances,
)
from topoplan.plans.minimum_trees import equivalent_vertices, inner_sets, set_count

MOST_COMPARED = 4096
"""Most sets of inner vertices that are compared for one root; beyond it the certificate proves nothing."""


@register_certificate
@dataclass(frozen=True, slots=True)
class Steiner(Lengths):
    """Lengths of the links under which a cheapest tree may pass helpers and switches."""

    kind: ClassVar[str] = "steiner"

    def forest(self, fabric: Fabric, collective: str, root: int | None) -> Fraction:
        length = self.link_lengths(fabric, collective)
        scale = lcm(*(value.denominator for value in length))
        return lightest_forest(fabric, [int(value * scale) for value in length], collective, root) / scale


def inner_devices(fabric: Fabric, op: str) -> tuple[str, ...]:
    """Return the devices that are not ranks and may be inner vertices of a tree of this kind, reduce or broadcast."""
    merging = fabric.adding if op == "reduce" else fabric.copying
    return (
        *fabric.helpers,
        *(name for name in fabric.nodes if name in merging and name not in fabric.helpers),
    )


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

    inner = {op: beside(inner_devices(fabric, op)) for op in ("reduce", "broadcast")}
    vertices = [*where, *sorted(inner["reduce"] | inner["broadcast"])]
    place = {vertex: number for number, vertex in enumerate(vertices)}
    no_arc = (sum(length) + 1) * len(vertices)
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
        roots = equivalent_vertices(table, terminals) + equivalent_vertices(
            table, sorted(place[v] for v in beside(fabric.helpers))
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
