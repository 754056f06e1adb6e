"""Packing programs shrunk by symmetry: one row for each orbit of links, one column for a tree and all its images.

A forest can be averaged over the symmetries of the fabric without loss, so an optimal one loads all links of an orbit
alike. With x(T) the rate that tree T and its images carry together, spread evenly over them, the program is

    maximise the rate, subject to   sum of x(T) crossings(T, L)  <=  |L| c(L)   for every orbit L of links,

and for allgather and reduce-scatter each orbit of ranks owns its part of the buffer. The program of 1024 GPUs in 128
equal servers has six rows. Pricing needs the trees of the first rank of every orbit only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm

import numpy as np

from topoplan.bounds.cuts_and_partitions import whole_capacities
from topoplan.fabric.fabric import Fabric
from topoplan.plans.build import stage_order
from topoplan.plans.certificates import Lengths
from topoplan.plans.loads import stage_links
from topoplan.plans.symmetric_shards import ImageShards
from topoplan.plans.tree import Edge, Shard, Stage
from topoplan.trees.route_table import Orbits, Routes

Parents = tuple[int, ...]
"""Parent of every rank in a tree, -1 for the root; empty where a collective has no such tree."""


@dataclass(frozen=True, slots=True, eq=False)
class OrbitTree:
    """Trees of one first rank, which stand for all their images.

    Parameters
    ----------
    root : int
        First rank of its orbit.
    up, down : tuple of int
        Parents in the reduce tree and in the broadcast tree.
    routes : Routes
        Gives the route of every edge.
    usage : tuple of int
        How often one byte crosses each orbit of links.
    """

    root: int
    up: Parents
    down: Parents
    routes: Routes
    usage: tuple[int, ...]

    @property
    def height(self) -> int:
        """Edges on the longest path of either tree."""
        return max(_height(self.up), _height(self.down))


def _height(parents: Parents) -> int:
    """Edges on the longest path from the root."""
    depth = [0 if parent < 0 else -1 for parent in parents]
    for start in range(len(parents)):
        path = [start]
        while depth[path[-1]] < 0:
            path.append(parents[path[-1]])
        for rank in reversed(path[:-1]):
            depth[rank] = depth[parents[rank]] + 1
    return max(depth, default=0)


@dataclass(frozen=True)
class OrbitPacking:
    """The packing problem of one collective on a fabric with symmetries.

    Parameters
    ----------
    orbits : Orbits
        For a broadcast or reduce all symmetries keep the root.
    collective : str
    root : int or None
    """

    orbits: Orbits
    collective: str
    root: int | None

    @property
    def fabric(self) -> Fabric:
        """The fabric."""
        return self.orbits.fabric

    @cached_property
    def roots(self) -> tuple[int, ...]:
        """Ranks whose trees are packed."""
        return self.orbits.first_ranks if self.root is None else (self.root,)

    @cached_property
    def shared(self) -> bool:
        """True where every rank owns an equal part of the buffer."""
        return self.collective in ("allgather", "reduce_scatter")

    def uses(self, op: str) -> bool:
        """True where a byte of the collective runs through a tree of this kind, reduce or broadcast."""
        return op in stage_order(self.collective)

    @cached_property
    def scale(self) -> Fraction:
        """How many units of `limits` make one GB/s."""
        capacity, scale = whole_capacities(self.fabric)
        return Fraction(scale, gcd(*capacity))

    @cached_property
    def limits(self) -> tuple[int, ...]:
        """Capacity of every orbit of links together."""
        capacity, _ = whole_capacities(self.fabric)
        common = gcd(*capacity)
        counts = self.orbits.row_counts.tolist()
        limits = [0] * len(counts)
        for row, c in zip(self.orbits.row_of_link.tolist(), capacity, strict=True):
            limits[row] = c // common * counts[row]
        return tuple(limits)

    def tree(self, root: int, up: Sequence[int], down: Sequence[int], routes: Routes) -> OrbitTree:
        """A column: parents of every rank in both trees, -1 for the root."""
        made = OrbitTree(root, tuple(up), tuple(down), routes, ())
        return replace(made, usage=self._merged_usage(made) if self.fabric.in_network else self._usage(made))

    def _usage(self, tree: OrbitTree) -> tuple[int, ...]:
        usage = np.zeros(len(self.limits), dtype=np.int64)
        for parents, rising in ((tree.up, True), (tree.down, False)):
            if parents:
                parent = np.array(parents, dtype=np.int64)
                child = np.flatnonzero(parent >= 0)
                tails, heads = (child, parent[child]) if rising else (parent[child], child)
                usage += tree.routes.usage(tails, heads)
        return tuple(usage.tolist())

    def _merged_usage(self, tree: OrbitTree) -> tuple[int, ...]:
        """As `_usage`, where switches that copy or add let routes share links."""
        usage = [0] * len(self.limits)
        for op in stage_order(self.collective):
            for number in stage_links(self._stage(op, tree), self.fabric):
                usage[int(self.orbits.row_of_link[number])] += 1
        return tuple(usage)

    def image_count(self, tree: OrbitTree) -> int:
        """Number of different trees that the symmetries make of one."""
        known = self._image_counts.get(tree)
        if known is None:
            stages = tuple(self._stage(op, tree) for op in stage_order(self.collective))
            shard = Shard(Fraction(1), stages)
            one = ImageShards(self.fabric.nodes, self.fabric.size, self.orbits.generators, (shard,))
            known = self._image_counts[tree] = len(one)
        return known

    @cached_property
    def _image_counts(self) -> dict[OrbitTree, int]:
        return {}

    def images(self, weights: Mapping[OrbitTree, Fraction]) -> ImageShards:
        """The shards of a plan: every tree with all its images, largest shares first among those of one root."""
        groups = self.orbits
        place = {first: number for number, first in enumerate(groups.first_ranks)}
        total: dict[int, Fraction] = {}
        for tree, weight in weights.items():
            key = tree.root if self.shared else 0
            total[key] = total.get(key, Fraction(0)) + weight
        templates = []
        for tree, weight in weights.items():
            part = weight / total[tree.root if self.shared else 0]
            if self.shared:
                part *= Fraction(groups.rank_counts[place[tree.root]], self.fabric.size)
            stages = tuple(self._stage(op, tree) for op in stage_order(self.collective))
            templates.append(Shard(part, stages))
        made = ImageShards(self.fabric.nodes, self.fabric.size, groups.generators, tuple(templates))
        divided = [
            Shard(shard.share / count, shard.stages)
            for shard, count in zip(made.templates, made.counts, strict=True)
        ]
        divided.sort(key=lambda shard: (shard.stages[0].root, -shard.share))
        return ImageShards(self.fabric.nodes, self.fabric.size, groups.generators, tuple(divided))

    def _stage(self, op: str, tree: OrbitTree) -> Stage:
        fabric = self.fabric
        edges = []
        for child, parent in enumerate(tree.down if op == "broadcast" else tree.up):
            if parent < 0:
                continue
            tail, head = (parent, child) if op == "broadcast" else (child, parent)
            links = tree.routes.route(tail, head)
            route = (fabric.ranks[tail], *(fabric.links[number].dst for number in links))
            channel = fabric.channel_of(links)
            edges.append(Edge(parent, child, route if op == "broadcast" else route[::-1], channel))
        return Stage(op, tree.root, Stage(op, tree.root, tuple(edges)).top_down())

    def certificate(self, duals: Sequence[int]) -> Lengths:
        """Dual values of the rows as lengths of the links, whole numbers without common divisor."""
        common = gcd(*duals) or 1
        return Lengths(
            tuple(
                (link.src, link.dst, Fraction(duals[row] // common))
                for link, row in zip(self.fabric.links, self.orbits.row_of_link.tolist(), strict=True)
                if duals[row]
            )
        )

    def row_lengths(self, values: Sequence[Fraction]) -> list[int]:
        """Mean over each orbit of lengths of the links, as whole numbers: what a certificate says of the rows."""
        total = [Fraction(0)] * len(self.limits)
        for row, value in zip(self.orbits.row_of_link.tolist(), values, strict=True):
            total[row] += value
        means = [value / count for value, count in zip(total, self.orbits.row_counts.tolist(), strict=True)]
        scale = lcm(*(value.denominator for value in means))
        return [int(value * scale) for value in means]
