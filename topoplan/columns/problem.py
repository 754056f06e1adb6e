"""What is packed: one tree, or one pair of an up and a down tree, as a column of the packing program.

The rows of the program are directed links, except for allreduce on direct symmetric links: there a tree is used
upwards by the reduce and downwards by the broadcast, which loads both directions of a wire alike, so one row
stands for both. The collective decides what one byte needs: one tree from the root (broadcast, reduce), one of the
owner's trees (allgather, reduce-scatter: a group of columns per owner), or a pair of trees that share any root.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import gcd

import numpy as np
from numpy.typing import NDArray

from topoplan.bounds.cuts_and_partitions import whole_capacities
from topoplan.columns.routes import KnownRoutes
from topoplan.fabric.fabric import Arc, Fabric
from topoplan.plans.build import stage_order
from topoplan.plans.tree import Edge, Shard, Stage


@dataclass(frozen=True, slots=True, order=True)
class TreeColumn:
    """Trees that one share of the buffer runs through.

    Parameters
    ----------
    root : int
        Rank where the up tree ends and the down tree starts.
    up, down : tuple of Arc
        Routes of the reduce tree, towards the root, and of the broadcast tree.
    """

    root: int
    up: tuple[Arc, ...]
    down: tuple[Arc, ...]


@dataclass(frozen=True)
class Packing:
    """The packing problem of one collective on one fabric: rows, groups and routes.

    Parameters
    ----------
    fabric : Fabric
    collective : str
    root : int or None
        Root rank of a broadcast or reduce.
    """

    fabric: Fabric
    collective: str
    root: int | None

    @cached_property
    def folded(self) -> bool:
        """True where both directions of a wire share one row."""
        return self.collective == "allreduce" and self.fabric.direct and self.fabric.symmetric

    @cached_property
    def uses_up(self) -> bool:
        """True where data is reduced towards a root."""
        return "reduce" in stage_order(self.collective)

    @cached_property
    def uses_down(self) -> bool:
        """True where data is broadcast from a root."""
        return "broadcast" in stage_order(self.collective)

    @cached_property
    def roots(self) -> tuple[int, ...]:
        """Ranks that may be the root of a column."""
        return tuple(range(self.fabric.size)) if self.root is None else (self.root,)

    @cached_property
    def groups(self) -> int:
        """Number of groups that share the buffer equally: N for allgather and reduce-scatter, else 1."""
        return self.fabric.size if self.collective in ("allgather", "reduce_scatter") else 1

    @cached_property
    def row_of_link(self) -> NDArray[np.int64]:
        """Row of every link."""
        if not self.folded:
            return np.arange(len(self.fabric.links))
        rows: dict[tuple[int, int], int] = {}
        for s, d in self.fabric.ends:
            rows.setdefault((min(s, d), max(s, d)), len(rows))
        return np.array([rows[min(s, d), max(s, d)] for s, d in self.fabric.ends])

    @cached_property
    def limits(self) -> NDArray[np.int64] | NDArray[np.object_]:
        """Capacity of every row as a whole number of 1 / `scale` GB/s, without common divisor."""
        capacity, _ = whole_capacities(self.fabric)
        common = gcd(*capacity)
        limits: list[int] = [0] * (int(self.row_of_link.max()) + 1)
        for row, c in zip(self.row_of_link, capacity, strict=True):
            limits[row] = c // common
        return np.array(limits, dtype=np.int64 if max(limits) < 1 << 40 else object)

    @cached_property
    def scale(self) -> Fraction:
        """How many units of `limits` make one GB/s."""
        capacity, scale = whole_capacities(self.fabric)
        return Fraction(scale, gcd(*capacity))

    @cached_property
    def routes(self) -> KnownRoutes:
        """The routes that trees may take, and what they cost."""
        return KnownRoutes(self.fabric, self.row_of_link)

    def first_arc(self, tail: int, head: int) -> Arc:
        """The first known route from one rank to another: of fewest links."""
        return self.routes.arcs[self.routes.between(tail, head).start]

    def usage(self, column: TreeColumn) -> NDArray[np.int64]:
        """(rows,) int64: how often a byte of the column crosses each row."""
        arcs = column.down if self.folded else (*column.up, *column.down)
        links = [link for arc in arcs for link in arc.links]
        return np.bincount(self.row_of_link[links], minlength=len(self.limits))

    def group(self, column: TreeColumn) -> int:
        """Group of a column."""
        return column.root if self.groups > 1 else 0

    def height(self, column: TreeColumn) -> int:
        """Edges on the longest path of either tree."""
        return max(self._stage(op, column).height for op in stage_order(self.collective))

    def column(self, root: int, up: Iterable[Arc], down: Iterable[Arc]) -> TreeColumn:
        """A column in canonical form: arcs in ascending order."""
        return TreeColumn(root, tuple(sorted(up)), tuple(sorted(down)))

    def reversed_arc(self, arc: Arc) -> Arc:
        """The arc that runs the same direct link backwards."""
        return self.first_arc(arc.head, arc.tail)

    def shards(self, weights: Mapping[TreeColumn, Fraction]) -> tuple[Shard, ...]:
        """The shards of a plan: shares in proportion to the weights, in the order of owners, then largest first.

        Each owner of an allgather or reduce-scatter gets 1/N of the buffer whatever its weights add up to.
        """
        totals: dict[int, Fraction] = {}
        for column, weight in weights.items():
            group = self.group(column)
            totals[group] = totals.get(group, Fraction(0)) + weight
        ordered = sorted(weights.items(), key=lambda item: (self.group(item[0]), -item[1], item[0]))
        return tuple(
            Shard(
                weight / totals[self.group(column)] / self.groups,
                tuple(self._stage(op, column) for op in stage_order(self.collective)),
            )
            for column, weight in ordered
        )

    def _stage(self, op: str, column: TreeColumn) -> Stage:
        edges = []
        for arc in column.down if op == "broadcast" else column.up:
            if op == "broadcast":
                edges.append(Edge(arc.tail, arc.head, arc.route, arc.channel))
            else:
                edges.append(Edge(arc.head, arc.tail, arc.route[::-1], arc.channel))
        return Stage(op, column.root, Stage(op, column.root, tuple(edges)).top_down())
