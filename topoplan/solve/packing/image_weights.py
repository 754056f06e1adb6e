"""Weigh the images of a symmetric plan's trees by the measured bandwidths of the links, so that slow links carry less.

A plan on the slowest link of each kind gives all images of a tree one share. On the measured links the shares solve

    minimise the largest load / capacity,   subject to   shares of every owner add up to its part of the buffer,

a program with a column for each image and a row for each link. Two kinds of further templates have columns too, since
images of one tree load all servers in one pattern:

- mixed trees: some servers are entered as in one image of a tree, others as in another, if both images enter the same
  servers from the same servers, each once. Images of all templates take part, in proportion to their shares: a tree
  may then enter some servers over one rail and others over another;
- for an allreduce, turned trees: the broadcast is that of another image, turned to the root of the reduce. So a server
  that is wide in one direction serves more trees in that direction.

The program is solved by the primal-dual method (Chambolle, Pock 2011) with diagonal steps (Pock, Chambolle 2011) and
restarts from the average (Applegate et al. 2021, PDLP). It takes sums, products and comparisons only. Its answer is
rounded to whole parts of the buffer; rate and bound are recomputed from these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from math import ceil
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from topoplan.machine.fabric import Fabric
from topoplan.machine.fabric_structure import FabricServers, link_images
from topoplan.plans.loads import stage_links
from topoplan.plans.shards import Edge, ImageParts, ImageShards, Shard, Stage, moved_shard, owner_of
from topoplan.solve.search_control import RandomStream
from topoplan.solve.symmetry.symmetry_search import find_symmetry

if TYPE_CHECKING:
    from scipy.sparse import csr_array

MIXED = (2, 4)
"""Least and most mixed trees for each template: as many as templates take part; more reach the same rate."""

TURNED = 2
"""Images of the broadcast that an allreduce turns to the root of its reduce."""

MOST_WORK = 2_000_000_000
"""Most entries of the program times rounds: some seconds."""

MOST_ENTRIES = 1 << 26
"""Columns times links up to which images are weighed: about 1,500 GPUs."""

ROUNDS_PER_CHECK = 50
CHECKS_PER_RESTART = 4

LEAST_GAIN = 0.0005
"""Part of the bound that may be left between the shares found and the best ones."""

LEAST_SHARE = Fraction(1, 8)
"""Part of the buffer on the images of a template from which on mixed trees are made of it."""

MOST_ALIKE = 4
"""Images of a tree that differ inside servers alone, up to which all have a column."""

MOST_MIXED = 8
"""Images of each template that a mixed tree draws from."""

UNITS = 1 << 10
"""Parts of the buffer for a mean share of an image."""

SMALLEST = (0.7, 0.5, 0.35, 0.25, 0.15, 0.05)
"""Parts of the mean share of an owner's images below which images are left out; the first that the rate allows."""

Floats = NDArray[np.float64]


def weighed_images(
    fabric: Fabric,
    symmetric: ImageShards,
    collective: str,
    *,
    bound: Fraction,
    tolerance: float,
    progress: Callable[[str], None] | None = None,
) -> ImageShards | None:
    """Return images of a symmetric plan's trees, and of trees made from them, with parts that fit the fabric's links.

    The search ends within ``tolerance``, a part of the ``bound`` in GB/s, or after `MOST_WORK`. The rate may be lower
    than that of the symmetric plan: the caller compares. None if the fabric is too large.
    """
    found: ImageShards | None = None
    # The sums over all servers that bound an allreduce may be met by images of one tree from every root.
    for variants in (False, True) if collective == "allreduce" else (True,):
        program = _Program(fabric, symmetric, *_columns(fabric, symmetric, variants=variants), collective)
        if len(program.start) * len(fabric.links) > MOST_ENTRIES:
            break
        found, reached = program.solve(bound, tolerance, progress)
        if reached:
            break
    return found


def tree_variants(fabric: Fabric, symmetric: ImageShards) -> Iterator[tuple[int, Shard]]:
    """Yield mixed and turned trees of every template that has any, with the number of the template."""
    servers = FabricServers(fabric)
    home = servers.of_rank
    mixer = _Mixer(symmetric, servers, RandomStream(0))
    for number, template in enumerate(symmetric.templates):
        if [stage.op for stage in template.stages] == ["reduce", "broadcast"]:
            for element in _far_elements(symmetric, owner_of(template), home):
                yield number, _turned(symmetric, template, element)
        elif template.share * len(symmetric.images[number]) >= LEAST_SHARE:
            for variant in mixer.variants(number):
                yield number, variant


def as_images(shards: Sequence[Shard], floored: Fabric, root: int | None) -> ImageShards:
    """Return the shards of a plan for the floored fabric as images under its symmetries, with equal shares."""
    if isinstance(shards, ImageShards):
        return shards
    generators = tuple(tuple(each.tolist()) for each in find_symmetry(floored, fixed=root))
    share = {shard.stages: shard.share for shard in shards}
    templates = []
    while share:
        template = Shard(Fraction(1), next(iter(share)))
        images = ImageShards(floored.nodes, floored.size, generators, (template,))
        total = sum((share.pop(image.stages, Fraction(0)) for image in images), Fraction(0))
        templates.append(replace(template, share=total / len(images)))
    return ImageShards(floored.nodes, floored.size, generators, tuple(templates))


def symmetric_trees(fabric: Fabric, symmetric: ImageShards) -> tuple[Shard, ...]:
    """Return the images of a symmetric plan's trees, and of trees made from them; shares are of no use."""
    made = tuple(variant for _, variant in tree_variants(fabric, symmetric))
    return (*symmetric, *replace(symmetric, templates=made))


def _columns(
    fabric: Fabric, symmetric: ImageShards, *, variants: bool
) -> tuple[list[Shard], list[Sequence[int]], list[int]]:
    """Return templates, the elements that make the images of each, and the template of which it is made.

    If elements move all servers, and the owner of the tree, alike, `MOST_ALIKE` of them stand for all.
    """
    servers = FabricServers(fabric)
    moved = servers.of_rank[symmetric.elements[:, [int(members[0]) for members in servers.members]]]
    templates, elements = [*symmetric.templates], []
    bases = [*range(len(templates))]
    random = RandomStream(2)
    for template, images in zip(symmetric.templates, symmetric.images, strict=True):
        chosen = np.array(images)
        keys = np.column_stack((moved[chosen], symmetric.elements[chosen, owner_of(template)]))
        _, label, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
        order = np.lexsort((random.whole(len(chosen), 1 << 30), label.ravel()))
        place = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        elements.append(np.sort(chosen[order[place < MOST_ALIKE]]).tolist())
    for number, variant in tree_variants(fabric, symmetric) if variants else ():
        templates.append(variant)
        elements.append(elements[number])
        bases.append(number)
    return templates, elements, bases


def _moved(symmetric: ImageShards, shard: Shard, element: int) -> Shard:
    image = symmetric.elements[element].tolist()
    names = {name: symmetric.nodes[place] for name, place in zip(symmetric.nodes, image, strict=True)}
    return moved_shard(shard, image, names)


class _Mixer:
    """Mixes images of templates that enter the same servers from the same servers."""

    def __init__(self, symmetric: ImageShards, servers: FabricServers, random: RandomStream) -> None:
        self.symmetric, self.random = symmetric, random
        self.home: list[int] = servers.of_rank.tolist()
        self.entries = [self._entries(template) for template in symmetric.templates]
        firsts = [int(members[0]) for members in servers.members]
        self.moved = servers.of_rank[symmetric.elements[:, firsts]]
        self.images: dict[tuple[int, int], Shard] = {}

    def _entries(self, template: Shard) -> list[NDArray[np.int64]] | None:
        """Return for every stage the server from which each server is entered, -1 for the root's.

        None if an edge leads back into the root's server, or two into another one.
        """
        home, found = self.home, []
        for stage in template.stages:
            above = np.full(max(home) + 1, -1)
            for edge in stage.edges:
                src, dst = home[edge.parent], home[edge.child]
                if src == dst:
                    continue
                if above[dst] >= 0 or dst == home[stage.root]:
                    return None
                above[dst] = src
            found.append(above)
        return found

    def variants(self, number: int) -> Iterator[Shard]:
        """Yield mixed trees of a template, if other images may take its place."""
        pool, weights = self._pool(number)
        reach = np.cumsum(weights)
        servers = self.moved.shape[1]
        least, most = MIXED
        count = min(most, max(least, len({template for template, _ in pool})))
        for _ in range(count if len(pool) > 1 else 0):
            place = np.argsort(np.argsort(self.random.whole(servers, 1 << 30), kind="stable"), kind="stable")
            drawn = np.searchsorted(reach, (place + 0.5) / servers * reach[-1])
            yield self._mixed(number, [pool[each] for each in drawn.tolist()])

    def _pool(self, number: int) -> tuple[list[tuple[int, int]], list[float]]:
        """Return images, as template and element, that enter servers as a template does, and their weights."""
        pool: list[tuple[int, int]] = []
        weights: list[float] = []
        wanted = self.entries[number]
        for other, entries in enumerate(self.entries if wanted is not None else ()):
            if entries is None or wanted is None or len(entries) != len(wanted):
                continue
            same = np.ones(len(self.moved), dtype=bool)
            for above, below in zip(wanted, entries, strict=True):
                image = np.full(self.moved.shape, -1)
                np.put_along_axis(image, self.moved, np.where(below >= 0, self.moved[:, below], -1), axis=1)
                same &= (image == above).all(axis=1)
            chosen = np.flatnonzero(same)
            drawn = np.argsort(self.random.whole(len(chosen), 1 << 30), kind="stable")[:MOST_MIXED]
            whole = float(self.symmetric.templates[other].share) * len(self.symmetric.images[other])
            for element in np.sort(chosen[drawn]).tolist():
                pool.append((other, element))
                weights.append(whole / len(drawn))
        return pool, weights

    def _mixed(self, number: int, chosen: list[tuple[int, int]]) -> Shard:
        """Return a tree whose edges into and inside each server are those of the image ``chosen`` for it.

        The root's server keeps those of the template.
        """
        home, template = self.home, self.symmetric.templates[number]
        for key in sorted({*chosen} - self.images.keys()):
            self.images[key] = _moved(self.symmetric, self.symmetric.templates[key[0]], key[1])
        stages = []
        for place, stage in enumerate(template.stages):
            edges = [edge for edge in stage.edges if home[edge.child] == home[stage.root]]
            for key in sorted(set(chosen)):
                edges += [
                    edge
                    for edge in self.images[key].stages[place].edges
                    if home[edge.child] != home[stage.root] and chosen[home[edge.child]] == key
                ]
            stages.append(_ordered(replace(stage, edges=tuple(edges))))
        return replace(template, stages=tuple(stages))


def _far_elements(symmetric: ImageShards, root: int, home: NDArray[np.int64]) -> list[int]:
    """Return elements that move a root to its own place in 1, 2, 4, … servers on, as ranks count."""
    order = np.argsort(home, kind="stable")
    place = np.empty(len(home), dtype=np.int64)
    place[order] = np.arange(len(home)) - np.searchsorted(home[order], home[order])
    images = symmetric.elements[:, root]
    first: dict[int, int] = {}
    for element, image in enumerate(images.tolist()):
        if home[image] != home[root] and place[image] == place[root]:
            first.setdefault(image, element)
    far = [first[image] for image in sorted(first)]
    steps = [(1 << step) - 1 for step in range(TURNED)]
    return [far[step] for step in steps if step < len(far)]


def _turned(symmetric: ImageShards, template: Shard, element: int) -> Shard:
    """Return the template's reduce with the broadcast of another image, which is turned to begin at the root."""
    reduce, _ = template.stages
    broadcast = _moved(symmetric, template, element).stages[-1]
    above = {edge.child: edge for edge in broadcast.edges}
    at = reduce.root
    turned = dict(above)
    while at in above:
        edge = above[at]
        turned.pop(at)
        at = edge.parent
    at = reduce.root
    while at in above:
        edge = above[at]
        turned[edge.parent] = Edge(at, edge.parent, edge.route[::-1], edge.channel)
        at = edge.parent
    stage = Stage("broadcast", reduce.root, tuple(turned.values()), broadcast.entries)
    return replace(template, stages=(reduce, _ordered(stage)))


def _ordered(stage: Stage) -> Stage:
    return replace(stage, edges=stage.top_down())


@dataclass(frozen=True)
class _Program:
    """The program over images: a column for each of some ``elements`` of each template, by template."""

    fabric: Fabric
    symmetric: ImageShards
    templates: list[Shard]
    elements: list[Sequence[int]]
    bases: list[int]
    collective: str

    @cached_property
    def _starts(self) -> list[int]:
        """The first column of every template, and the number of all columns."""
        return [0, *accumulate(map(len, self.elements))]

    @cached_property
    def owners(self) -> NDArray[np.int64]:
        """(columns,) int64: the owner of every image, 0 if the buffer is not divided among owners."""
        if self.collective not in ("allgather", "reduce_scatter"):
            return np.zeros(self._starts[-1], dtype=np.int64)
        return np.concatenate(
            [
                self.symmetric.elements[list(elements), owner_of(template)].astype(np.int64)
                for template, elements in zip(self.templates, self.elements, strict=True)
            ]
        )

    @cached_property
    def start(self) -> Floats:
        """The shares of the symmetric plan, divided between a template and the trees made from it."""
        made = Counter(self.bases)
        shares = []
        for base, elements in zip(self.bases, self.elements, strict=True):
            whole = float(self.symmetric.templates[base].share) * len(self.symmetric.images[base])
            shares.append(np.full(len(elements), whole / made[base] / len(elements)))
        return np.concatenate(shares)

    def matrix(self, bound: float) -> csr_array:
        """Return loads over capacities at the rate ``bound``, by link and column, without links that are never full.

        A group of links that all columns cross alike is its narrowest.
        """
        from scipy.sparse import csr_array

        capacity = np.array([float(each) for each in self.fabric.capacity])
        crossed = list(self._crossed())
        most = np.zeros(len(capacity))
        for links, times in crossed:
            np.maximum.at(most, links, np.broadcast_to(times, links.shape))
        rows = np.flatnonzero(most * bound > capacity)
        row_of = np.full(len(capacity), -1)
        row_of[rows] = np.arange(len(rows))
        places, columns, values = [], [], []
        for first, (links, times) in zip(self._starts, crossed, strict=False):
            image, place = np.nonzero(row_of[links] >= 0)
            places.append(row_of[links[image, place]])
            columns.append(first + image)
            values.append(times[place])
        entries = np.concatenate(values), (np.concatenate(places), np.concatenate(columns))
        usage = csr_array(entries, shape=(len(rows), self._starts[-1]))
        probes = RandomStream(1).whole(4 * usage.shape[1], 1 << 20).astype(np.float64)
        marks = np.asarray(usage @ probes.reshape(-1, 4))
        groups = np.unique(marks, axis=0, return_inverse=True)[1].ravel()
        order = np.lexsort((capacity[rows], groups))
        kept = order[np.unique(groups[order], return_index=True)[1]]
        matrix = usage[kept] * bound
        loads = matrix.data / np.repeat(capacity[rows[kept]], np.diff(matrix.indptr))
        return csr_array((loads, matrix.indices, matrix.indptr), shape=matrix.shape)

    def _crossed(self) -> Iterator[tuple[NDArray[np.int64], Floats]]:
        """Yield for every template (images, links) the links of its images, and how often each tree crosses them."""
        for template, elements in zip(self.templates, self.elements, strict=True):
            crossed: Counter[int] = Counter()
            for stage in template.stages:
                crossed.update(stage_links(stage, self.fabric))
            links = np.array(sorted(crossed), dtype=np.int64)
            times = np.array([crossed[link] for link in links.tolist()], dtype=np.float64)
            yield link_images(self.fabric, self.symmetric.elements[list(elements)], links), times

    def solve(
        self, bound: Fraction, tolerance: float, progress: Callable[[str], None] | None
    ) -> tuple[ImageShards, bool]:
        """Return images with parts, and whether they are within the tolerance.

        Sums of duals prove how far shares can come: costs at duals of sum 1 are at most the largest overload.
        """
        from scipy.sparse import csr_array

        matrix = self.matrix(float(bound))
        names, owner = np.unique(self.owners, return_inverse=True)
        simplices = _Simplices(owner, len(names))
        enough = goal = 1 + 0.8 * tolerance
        best = shares = self.start
        least, proved = float((matrix @ shares).max()), 0.0
        turned = csr_array(matrix.T)
        used: Floats = np.asarray(matrix.sum(axis=0), dtype=np.float64).ravel()
        steps = 1 / np.maximum(simplices.largest(used), 1e-30)
        steps_of_rows = 1 / np.asarray(matrix.sum(axis=1)).ravel()
        duals = np.zeros(matrix.shape[0])
        sums, count = (np.zeros_like(shares), np.zeros_like(duals)), 0
        rounds = ceil(MOST_WORK / (2 * matrix.nnz + 1))
        for number in range(1, rounds + 1):
            moved = simplices.nearest(shares - steps * (turned @ duals))
            duals = np.maximum(0, duals + steps_of_rows * (matrix @ (2 * moved - shares) - goal))
            shares = moved
            sums, count = (sums[0] + shares, sums[1] + duals), count + 1
            if number % ROUNDS_PER_CHECK:
                continue
            for candidate in (sums[0] / count, shares):
                most = float((matrix @ candidate).max())
                if most < least:
                    best, least = candidate, most
            if progress is not None:
                progress(f"weighing {len(shares)} images: {float(bound) / least:.6g} GB/s")
            if least <= enough or least - proved < LEAST_GAIN:
                break
            weight = sums[1].sum()
            if weight > 0:
                proved = max(proved, simplices.cheapest(turned @ sums[1]) / weight)
            if proved > enough and len(self.templates) == len(self.symmetric.templates):
                break  # the program with trees made from these may reach more
            if proved > goal:
                # No shares reach the goal.
                goal, shares, duals = (proved + least) / 2, best, np.zeros_like(duals)
            elif number % (ROUNDS_PER_CHECK * CHECKS_PER_RESTART) == 0:
                shares, duals = sums[0] / count, sums[1] / count
            else:
                continue
            sums, count = (np.zeros_like(shares), np.zeros_like(duals)), 0
        enough = max(least, 1 / (1 - 0.9 * tolerance))
        pruned = (simplices.without_small(best, smallest) for smallest in SMALLEST)
        fewer = next((shares for shares in pruned if (matrix @ shares).max() <= enough), best)
        return self._rounded(fewer, owner, len(names)), least <= 1 + 0.8 * tolerance

    def _rounded(self, shares: Floats, owner: NDArray[np.int64], owners: int) -> ImageShards:
        """Return the images with shares in whole parts."""
        parts = np.zeros(len(shares), dtype=np.int64)
        order = np.argsort(owner, kind="stable")
        counts = np.bincount(owner, minlength=owners)
        units = UNITS * int(counts.max())
        for columns in np.split(order, np.cumsum(counts)[:-1]):
            exact = shares[columns] * (owners * units)
            whole = np.floor(exact).astype(np.int64)
            whole[np.argsort(whole - exact, kind="stable")[: units - int(whole.sum())]] += 1
            parts[columns] = whole
        kept, lists, numbers = [], [], []
        for place, elements in enumerate(self.elements):
            mine = parts[self._starts[place] : self._starts[place + 1]]
            used = np.flatnonzero(mine)
            if len(used):
                kept.append(self.templates[place])
                lists.append(tuple(np.array(elements)[used].tolist()))
                numbers.append(tuple(mine[used].tolist()))
        images = ImageParts(units * owners, tuple(lists), tuple(numbers))
        templates = [replace(one, share=images.share(place)) for place, one in enumerate(kept)]
        return replace(self.symmetric, templates=tuple(templates), parts=images)


class _Simplices:
    """Shares of every owner, which add up to its part of the buffer; all owners have equal parts."""

    def __init__(self, owner: NDArray[np.int64], owners: int) -> None:
        counts = np.bincount(owner, minlength=owners)
        order = np.argsort(owner, kind="stable")
        self._columns = order
        self._row = owner[order]
        self._place = np.arange(len(owner)) - (np.cumsum(counts) - counts)[self._row]
        self._shape = (owners, int(counts.max()))

    def _table(self, values: Floats, empty: float) -> Floats:
        table = np.full(self._shape, empty, dtype=np.float64)
        table[self._row, self._place] = values[self._columns]
        return table

    def largest(self, values: Floats) -> Floats:
        """Return for each column the largest value of its owner."""
        return self._of_column(self._table(values, 0).max(axis=1))

    def cheapest(self, costs: Floats) -> float:
        """Return the least cost of shares."""
        return float(self._table(costs, np.inf).min(axis=1).mean())

    def without_small(self, shares: Floats, smallest: float) -> Floats:
        """Return shares without those below a part of their owner's mean; the others grow in proportion."""
        table = self._table(shares, 0)
        mean = table.sum(axis=1) / np.count_nonzero(table, axis=1)
        kept = np.where(shares < smallest * self._of_column(mean), 0, shares)
        return kept * self._of_column(table.sum(axis=1) / self._table(kept, 0).sum(axis=1))

    def _of_column(self, values: Floats) -> Floats:
        found = np.empty(len(self._columns))
        found[self._columns] = values[self._row]
        return found

    def nearest(self, values: Floats) -> Floats:
        """Return the nearest shares (Held, Wolfe, Crowder 1974)."""
        owners, widest = self._shape
        descending = -np.sort(-self._table(values, -np.inf) * owners, axis=1)
        excess = (np.cumsum(descending, axis=1) - 1) / np.arange(1, widest + 1)
        used = (descending > excess).sum(axis=1)
        threshold = excess[np.arange(owners), used - 1]
        return np.maximum(values - self._of_column(threshold / owners), 0)
