"""State the packing problem as a linear program over trees, and price its columns.

    maximise the rate, subject to   sum of x(T) crossings(T, L)  <=  capacity(L)   for every orbit L of links,

where x(T) is the rate that tree T and its images under some symmetries of the fabric carry together. A forest can
be averaged over the symmetries without loss, so some optimal one loads all links of an orbit equally: the program of
1024 GPUs in 128 equal servers has six rows, and trees are priced for the first rank of every orbit only.

One byte needs one tree from the root (broadcast, reduce), one of the owner's trees (allgather, reduce-scatter:
every rank owns an equal part), or a pair of trees that share any root (allreduce; on direct symmetric links one
tree used both ways, so one row stands for both directions of a wire).

`Pricing` finds a cheapest column of each root under a length for every row, on the shortest routes: arborescences
(Chu-Liu, Edmonds) without a limit on the height; with one, exact tables for few ranks (`minimum_trees`), and else a
search (`hop_constrained_search`) that may miss the cheapest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

from topoplan.machine.fabric import Arc, Fabric
from topoplan.plans.build import stage_order
from topoplan.plans.certificates.certificate import Lengths
from topoplan.plans.loads import stage_links
from topoplan.plans.minimum_trees import LARGEST_EXACT, UNREACHABLE, HopLimitedTrees, cheapest_arborescence
from topoplan.plans.shards import Edge, ImageShards, Shard, Stage, shard_counts
from topoplan.solve.cuts_and_partitions import whole_capacities
from topoplan.solve.route_table import FabricOrbits, RankRoutes, RouteTable, SparseCosts

MOST_EDGES = 10_000
"""Tree edges of a plan beyond which its file holds templates and symmetries instead of all shards."""

Parents = tuple[int, ...]
"""Parent of every rank in a tree, -1 for the root; empty where a collective has no such tree."""


@dataclass(frozen=True, slots=True)
class TreeColumn:
    """Trees that carry one share of the buffer, and all their images.

    The reduce tree ``up`` ends and the broadcast tree ``down`` starts at ``root``, the first rank of its orbit.
    ``usage`` is how often one byte crosses each row; ``routes`` gives the route of every edge.
    """

    root: int
    up: Parents
    down: Parents
    usage: tuple[int, ...]
    routes: RankRoutes = field(compare=False, repr=False)

    @property
    def height(self) -> int:
        """Edges on the longest path of either tree."""
        return max(_height(self.up), _height(self.down))

    @property
    def order(self) -> tuple[int, Parents, list[tuple[int, int]], tuple[int, ...]]:
        """Sort key: root, the edges up by child, the edges down by parent."""
        down = sorted((parent, child) for child, parent in enumerate(self.down) if parent >= 0)
        return self.root, self.up, down, self.usage


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
class Packing:
    """The packing problem of one collective on one fabric, perhaps up to symmetries.

    ``generators`` are automorphisms, as permutations of `Fabric.nodes`, that keep the root; none for no symmetry.
    """

    fabric: Fabric
    collective: str
    root: int | None
    generators: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def folded(self) -> bool:
        """Whether both directions of a wire share one row."""
        return self.collective == "allreduce" and self.fabric.direct and self.fabric.symmetric

    @cached_property
    def orbits(self) -> FabricOrbits:
        """Ranks and links up to the symmetries, and up to direction if rows are folded."""
        return FabricOrbits(self.fabric, self.generators, self.folded)

    def uses(self, op: str) -> bool:
        """Return whether a byte of the collective runs through a tree of this kind, reduce or broadcast."""
        return op in stage_order(self.collective)

    @cached_property
    def roots(self) -> tuple[int, ...]:
        """Ranks whose trees are packed."""
        return self.orbits.first_ranks if self.root is None else (self.root,)

    @cached_property
    def shared(self) -> bool:
        """Whether every rank owns an equal part of the buffer."""
        return self.collective in ("allgather", "reduce_scatter")

    @property
    def owners(self) -> int:
        """Number of equal parts of the buffer: N for allgather and reduce-scatter, else 1."""
        return self.fabric.size if self.shared else 1

    @property
    def rate_of_one(self) -> Fraction:
        """Rate of the plan, in units of `scale`, if the value of the program is 1."""
        return Fraction(self.owners)

    @property
    def owner_rows(self) -> int:
        """Rows beside those of the links: one for each rank whose part must move at the common rate."""
        return len(self.roots) if self.shared else 0

    @property
    def owner_parts(self) -> Sequence[int]:
        """Parts of the common rate that each owner row asks for: as many as its root represents ranks."""
        return self.root_counts

    def owner_row(self, column: TreeColumn) -> int:
        """Return the owner row of a column; 0 if the program has none."""
        return self._places[column.root] if self.shared else 0

    @cached_property
    def _places(self) -> dict[int, int]:
        return {root: place for place, root in enumerate(self.roots)}

    @property
    def uneven(self) -> bool:
        """Whether blocks of ranks differ: the numbers of an exact simplex then grow long soon."""
        return False

    @property
    def column_size(self) -> int:
        """Power of two about as large as the entries of columns; 1 if these are small numbers."""
        return 1

    @cached_property
    def root_counts(self) -> tuple[int, ...]:
        """If every rank owns a part, the number of ranks that each of `roots` represents."""
        count = dict(zip(self.orbits.first_ranks, self.orbits.rank_counts, strict=True))
        return tuple(count[root] for root in self.roots)

    def owner(self, column: TreeColumn) -> int:
        """Return the rank whose part of the buffer a column carries; 0 if the buffer has one part."""
        return column.root if self.shared else 0

    @cached_property
    def scale(self) -> Fraction:
        """Units of `limits` in one GB/s."""
        capacity, scale = whole_capacities(self.fabric)
        return Fraction(scale, gcd(*capacity))

    @cached_property
    def limits(self) -> tuple[int, ...]:
        """Capacity of every row, all its links or wires together, in whole numbers of 1 / `scale` GB/s."""
        capacity, _ = whole_capacities(self.fabric)
        common = gcd(*capacity)
        limits = [0] * len(self.widths)
        for row, c in zip(self.orbits.row_of_link.tolist(), capacity, strict=True):
            limits[row] = c // common * self.widths[row]
        return tuple(limits)

    @cached_property
    def widths(self) -> list[int]:
        """Number of links in every row, or of wires if both directions share it."""
        return [count // 2 if self.folded else count for count in self.orbits.row_counts.tolist()]

    def routes(self, lengths: Sequence[int]) -> RouteTable:
        """Return the shortest routes between all ranks under whole lengths of the rows."""
        return RouteTable(self.orbits, tuple(lengths))

    def trees(
        self, parents: Iterable[tuple[int, Sequence[int], Sequence[int]]], routes: RankRoutes
    ) -> list[TreeColumn]:
        """Return columns from roots and the parents of every rank in both trees, -1 for the root."""
        made = [(root, tuple(up), tuple(down)) for root, up, down in parents]
        if self.fabric.in_network:
            bare = [TreeColumn(*tree, (), routes) for tree in made]
            return [replace(tree, usage=self._merged_usage(tree)) for tree in bare]
        usage = np.zeros((len(made), len(self.limits)), dtype=np.int64)
        rising = () if self.folded else [up for _, up, _ in made]
        for columns, above_first in ((rising, False), ([down for _, _, down in made], True)):
            if columns and columns[0]:
                parent = np.array(columns, dtype=np.int64)
                number, child = np.nonzero(parent >= 0)
                above = parent[number, child]
                tails, heads = (above, child) if above_first else (child, above)
                usage += routes.usage(tails, heads, number, len(made))
        return [TreeColumn(*tree, tuple(row), routes) for tree, row in zip(made, usage.tolist(), strict=True)]

    def _merged_usage(self, tree: TreeColumn) -> tuple[int, ...]:
        """Return the usage of a tree on switches that copy or add, which let routes share links."""
        usage = [0] * len(self.limits)
        for stage in self._stages(tree):
            for number in stage_links(stage, self.fabric):
                usage[int(self.orbits.row_of_link[number])] += 1
        return tuple(usage)

    def image_count(self, tree: TreeColumn) -> int:
        """Return the number of different trees that the symmetries make of one."""
        if not self.generators:
            return 1
        known = self._image_counts.get(tree)
        if known is None:
            shard = Shard(Fraction(1), self._stages(tree))
            one = ImageShards(self.fabric.nodes, self.fabric.size, self.generators, (shard,))
            known = self._image_counts[tree] = len(one)
        return known

    @cached_property
    def _image_counts(self) -> dict[TreeColumn, int]:
        return {}

    def _parts(self, weights: Mapping[TreeColumn, Fraction]) -> dict[TreeColumn, Fraction]:
        """Return shares in proportion to the weights, of a tree with all its images; each owner's make its part."""
        totals: dict[int, Fraction] = {}
        for tree, weight in weights.items():
            totals[self.owner(tree)] = totals.get(self.owner(tree), Fraction(0)) + weight
        count = dict(zip(self.orbits.first_ranks, self.orbits.rank_counts, strict=True))
        part = {
            owner: Fraction(count[owner] if self.shared else 1, self.owners) / total
            for owner, total in totals.items()
        }
        return {tree: weight * part[self.owner(tree)] for tree, weight in weights.items()}

    def shards(self, weights: Mapping[TreeColumn, Fraction]) -> tuple[Shard, ...]:
        """Return the shards of a plan without symmetries, by owner, then largest first."""
        ordered = sorted(
            self._parts(weights).items(), key=lambda item: (self.owner(item[0]), -item[1], item[0].order)
        )
        return tuple(Shard(share, self._stages(tree)) for tree, share in ordered)

    def images(self, weights: Mapping[TreeColumn, Fraction]) -> ImageShards:
        """Return the shards of a plan: every tree with all its images, by root, then largest first."""
        templates = [
            Shard(share / self.image_count(tree), self._stages(tree))
            for tree, share in self._parts(weights).items()
        ]
        templates.sort(key=lambda shard: (shard.stages[0].root, -shard.share))
        return ImageShards(self.fabric.nodes, self.fabric.size, self.generators, tuple(templates))

    def forest(self, weights: Mapping[TreeColumn, Fraction]) -> Sequence[Shard]:
        """Return `images`, as a tuple of all shards if they are few."""
        images = self.images(weights)
        edges = sum(
            len(stage.edges) * count for shard, count in shard_counts(images) for stage in shard.stages
        )
        return images if edges > MOST_EDGES else tuple(images)

    @cached_property
    def _arcs(self) -> dict[tuple[int, ...], Arc]:
        return {}

    def _stages(self, tree: TreeColumn) -> tuple[Stage, ...]:
        stages = []
        for op in stage_order(self.collective):
            down = op == "broadcast"
            above = tree.down if down else tree.up
            children = [child for child, parent in enumerate(above) if parent >= 0]
            parents = [above[child] for child in children]
            routes = tree.routes.routes(parents, children) if down else tree.routes.routes(children, parents)
            edges = []
            for parent, child, links in zip(parents, children, routes, strict=True):
                arc = self._arcs.get(links) or self._arcs.setdefault(links, self.fabric.arc(links))
                route = arc.route if down else arc.route[::-1]
                edges.append(Edge(parent, child, route, arc.channel))
            stages.append(Stage(op, tree.root, Stage(op, tree.root, tuple(edges)).top_down()))
        return tuple(stages)

    def certificate(self, duals: Sequence[int]) -> Lengths:
        """Return dual values of the rows as lengths of the links, whole numbers without common divisor."""
        common = gcd(*duals) or 1
        return Lengths(
            tuple(
                (link.src, link.dst, Fraction(duals[row] // common))
                for link, row in zip(self.fabric.links, self.orbits.row_of_link.tolist(), strict=True)
                if duals[row]
            )
        )

    def row_lengths(self, values: Sequence[Fraction]) -> list[int]:
        """Return, in whole numbers, the mean over each row of lengths of the links."""
        total = [Fraction(0)] * len(self.limits)
        for row, value in zip(self.orbits.row_of_link.tolist(), values, strict=True):
            total[row] += value
        means = [value / count for value, count in zip(total, self.orbits.row_counts.tolist(), strict=True)]
        scale = lcm(*(value.denominator for value in means))
        return [int(value * scale) for value in means]


_LONGEST_SCALED = 1 << 20
"""Most that a rounded length of a row is; the cost of a tree is then exact."""

_LONGEST_SCALED_OF_FEW = 1 << 30
"""The same for few ranks, whose trees have lower total costs."""


MOST_SEARCHED = 8192
"""Ranks up to which trees are improved by moves, in tables of all pairs."""


def has_exact_tables(fabric: Fabric) -> bool:
    """Return whether heights are priced by tables: few ranks and shortest routes, switches that only forward.

    >>> import topoplan
    >>> [has_exact_tables(Fabric(topoplan.load(name), ("nvlink",))) for name in ("dgx-1v", "dgx-2")]
    [True, False]
    """
    return fabric.size <= LARGEST_EXACT and not fabric.in_network and fabric.lists_shortest_routes


@dataclass(frozen=True)
class Pricing:
    """Cheapest columns of one packing problem; ``height`` limits the edges on a root-to-leaf path."""

    packing: Packing
    height: int | None = None

    @property
    def efforts(self) -> tuple[int, ...]:
        """Efforts worth trying in turn: a longer search pays only if the quick answer is not better."""
        if self.height is None or self.height == 1 or has_exact_tables(self.packing.fabric):
            return (0,)
        from topoplan.solve.hop_constrained_search import BY_HOPS, SEARCH_EFFORT, SMALL_SEARCH

        if self.height == 2 or self.packing.fabric.size <= SMALL_SEARCH:
            return (0, SEARCH_EFFORT)
        return (BY_HOPS, 0, SEARCH_EFFORT) if self.packing.fabric.size <= MOST_SEARCHED else (BY_HOPS,)

    def cheapest(self, lengths: Sequence[int], effort: int = 0) -> dict[int, TreeColumn]:
        """Return a cheap column of every root that has one, by the place of the root among `Packing.roots`.

        ``lengths``, one for each row, are 0 or more. Numbers too large for the tables are scaled down together, which
        at worst makes the column slightly dearer than the cheapest. ``effort`` is how long a search perturbs trees.
        """
        packing = self.packing
        few = has_exact_tables(packing.fabric)
        routes = packing.routes(rounded_lengths(lengths, _LONGEST_SCALED_OF_FEW if few else _LONGEST_SCALED))
        nothing: list[Sequence[int] | None] = [()] * len(packing.roots)
        downs = self._trees(routes.costs, effort) if packing.uses("broadcast") else nothing
        ups = downs
        if not packing.uses("reduce"):
            ups = nothing
        elif not packing.uses("broadcast") or not (packing.folded or symmetric_costs(routes.costs)):
            ups = self._trees(routes.costs.T, effort)
        made = {
            place: (root, up, down)
            for place, (root, up, down) in enumerate(zip(packing.roots, ups, downs, strict=True))
            if up is not None and down is not None
        }
        return dict(zip(made, packing.trees(made.values(), routes), strict=True))

    def _trees(self, cost: NDArray[np.int64] | SparseCosts, effort: int) -> list[Sequence[int] | None]:
        """Return a tree of every root in which parents reach children at the given cost, or None."""
        roots = self.packing.roots
        if not has_exact_tables(self.packing.fabric) and self.height is not None:
            from topoplan.solve.hop_constrained_search import low_arborescences

            return list(low_arborescences(cost, roots, self.height, effort=effort))
        cost = cost.table() if isinstance(cost, SparseCosts) else cost
        if self.height is None:
            by_head = cost.T.tolist()
            return [cheapest_arborescence(by_head, root) for root in roots]
        tables = HopLimitedTrees(cost, self.height)
        return [tables.parents(root) if tables.costs[root] < UNREACHABLE else None for root in roots]


def symmetric_costs(cost: NDArray[np.int64] | SparseCosts) -> bool:
    """Return whether every cost equals that of the way back: trees up are then trees down."""
    return cost.symmetric if isinstance(cost, SparseCosts) else np.array_equal(cost, cost.T)


def length_of(tree: TreeColumn, lengths: Sequence[int]) -> int:
    """Return the exact cost of one byte of a column under lengths of the rows."""
    return sum(times * length for times, length in zip(tree.usage, lengths, strict=True) if times)


def rounded_lengths(lengths: Sequence[int], longest: int = _LONGEST_SCALED) -> tuple[int, ...]:
    """Return lengths small enough for pricing, in proportion as far as whole numbers allow."""
    largest = max(lengths)
    if largest <= longest:
        return tuple(lengths)
    # Rounded up, so that no positive length becomes 0.
    return tuple(-(-length * longest // largest) for length in lengths)
