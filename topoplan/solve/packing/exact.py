"""Pack optimally by column generation, then at the lowest height, then with few trees.

The first bound comes from flows alone (`topoplan.solve.cuts_and_partitions`). A packing that reaches it is proved
optimal. If none does (switches that cannot copy, asymmetric ports), the final duals are the certificate: dual lengths
under which every forest is long enough.

Few ranks (`has_exact_tables`): trees of any height give the optimum. Then heights are tried from the lowest on, and
each is refuted by its own duals before the next is tried, so the height is the lowest possible.

A broadcast or reduce over links between many ranks, without switches, is packed by disjoint trees
(`topoplan.solve.packing.disjoint_arborescences`).

All others are packed on orbits of their symmetries. The trees of a known plan come first. Then heights are tried from
the lowest possible one on: the first at which column generation reaches the bound is taken. If the bound is not
reached, the duals of the run may themselves prove its value; else the optimum is found with trees of any height, priced
exactly, and low heights are tried once more for that rate. The height is proved lowest if hop counts force it, or if it
is one above a refuted star (the star of a rank is its only tree of height 1). Otherwise it is the lowest found, and the
plan says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property

import numpy as np

from topoplan.errors import Note, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.plans.certificates.certificate import Certificate, Lengths
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Shard, Stage, owner_of
from topoplan.solve.cuts_and_partitions import best_bound, lowest, proved_bounds
from topoplan.solve.packing.column_generation import ColumnGeneration, ProgressCallback
from topoplan.solve.packing.fewest_trees import fewest_peeled, with_few_trees
from topoplan.solve.packing.packing_program import (
    MOST_SEARCHED,
    Packing,
    Pricing,
    TreeColumn,
    has_exact_tables,
    symmetric_costs,
)
from topoplan.solve.route_table import DirectLinks, SparseCosts
from topoplan.solve.search_control import (
    Deadline,
    RandomStream,
    deadline_of,
)

FIRST_HEIGHTS = 3
"""Heights that are tried before trees of any height."""

LATER_HEIGHTS = 12
"""Heights that are tried for a rate that only trees of any height have reached."""

WALKS = 12
"""Walks along the optimal face in the search for fewer trees."""

MOST_AGAIN = 64
"""Ranks up to which smaller groups of symmetries are tried too, for fewer trees."""


@dataclass(frozen=True, slots=True)
class ExactPacking:
    """An optimal packing on the symmetries of ``packing``; weights are rates in units of 1 / scale GB/s.

    ``notes`` state what was not proved, or what a time limit ended.
    """

    packing: Packing
    weights: dict[TreeColumn, Fraction]
    certificate: Certificate
    notes: tuple[str, ...] = ()

    @property
    def shards(self) -> Sequence[Shard]:
        """All shards of a plan, or for large forests their templates with the symmetries."""
        few = has_exact_tables(self.packing.fabric)
        return self.packing.shards(self.weights) if few else self.packing.forest(self.weights)


def pack_exact(
    fabric: Fabric,
    collective: str,
    *,
    root: int | None = None,
    order: str = "height",
    time_limit: float | Deadline | None = None,
    progress: ProgressCallback | None = None,
    known: Plan | None = None,
) -> ExactPacking:
    """Return the optimal packing of a collective on at least two connected ranks, with its certificate.

    ``order`` is ``height`` (lowest height found, then few trees), ``trees`` (few trees of any height) or ``first`` (the
    first optimum of the lowest height found). ``known`` is a plan whose trees and bound are tried first, by height:
    that is quick on measured bandwidths. After ``time_limit`` seconds the best packing so far is taken: heights, rounds
    and walks under way are ended. The number of columns stays near the number of rows; DGX-1V takes milliseconds.
    """
    deadline = deadline_of(time_limit)
    if has_exact_tables(fabric):
        return _pack_few(fabric, collective, root, order, deadline, progress)
    disjoint = (
        _pack_disjoint(fabric, collective, root, deadline) if root is not None and known is None else None
    )
    if disjoint is not None:
        return disjoint
    return _pack_on_orbits(fabric, collective, root, order, deadline, progress, known)


def pack_low(
    fabric: Fabric,
    collective: str,
    certificate: Certificate,
    *,
    root: int | None = None,
    height: int,
    time_limit: float | Deadline | None = None,
    progress: ProgressCallback | None = None,
) -> ExactPacking:
    """Return the best packing of trees of at most ``height`` edges: proved best for few ranks, else the best found.

    ``certificate`` bounds trees of any height. UsageError if no tree of this height joins all ranks.
    """
    few = has_exact_tables(fabric)
    packing = Packing(fabric, collective, root, () if few else _symmetries(fabric, root))
    lowest_of_all = _lowest_height(packing)
    if height < lowest_of_all:
        raise UsageError(
            f"no trees of height {height} serve all GPUs; the lowest that do are of height {lowest_of_all}"
        )
    deadline = deadline_of(time_limit)
    generator = ColumnGeneration(Pricing(packing, height), progress=progress, deadline=deadline)
    generator.run(None)
    best = "the best" if few and not deadline.cut else "the best found"
    text = f"trees of height {height} at most, as asked; {best} of that height"
    cut = (deadline.note_of_height(),) if deadline.cut else ()
    return ExactPacking(packing, generator.weights(), certificate, (Note(text, "height asked"), *cut))


def _symmetries(fabric: Fabric, root: int | None, largest: int | None = None) -> tuple[tuple[int, ...], ...]:
    from topoplan.solve.symmetry.symmetry_search import find_symmetry

    return tuple(tuple(each.tolist()) for each in find_symmetry(fabric, fixed=root, largest=largest))


def _pack_few(
    fabric: Fabric,
    collective: str,
    root: int | None,
    order: str,
    deadline: Deadline,
    progress: ProgressCallback | None,
) -> ExactPacking:
    packing = Packing(fabric, collective, root)
    certificate = best_bound(fabric, collective, root)
    target = certificate.bound(fabric, collective, root) * packing.scale
    tight = certificate
    generator = ColumnGeneration(Pricing(packing), progress=progress, deadline=deadline)
    low = at_first_heights(generator, target) if order == "first" else None
    if low is not None:
        return ExactPacking(packing, low.weights(), certificate)
    if not generator.run(target):
        if deadline.cut:
            return _cut_short(generator, certificate)
        target = generator.value
        certificate = tight = packing.certificate(generator.duals())
    if order != "trees":
        generator = at_lowest_height(generator, target, progress)
    weights = generator.weights()
    if order != "first":
        weights = with_few_trees(generator, packing.row_lengths(tight.link_lengths(fabric, collective)))
    if order == "trees" and not deadline.over():
        weights = fewest_peeled(packing, target, fewer_than=len(weights), deadline=deadline) or weights
    notes = (deadline.note(target, target),) if deadline.cut else ()
    return ExactPacking(packing, weights, certificate, notes)


def _cut_short(generator: ColumnGeneration, certificate: Certificate) -> ExactPacking:
    """Return the packing at the time limit, with the better of two bounds and its gap."""
    packing = generator.packing
    candidates = (certificate, packing.certificate(generator.duals()))
    bound, best = lowest(proved_bounds(candidates, packing.fabric, packing.collective, packing.root))
    note = generator.deadline.note(generator.value / packing.scale, bound)
    return ExactPacking(packing, generator.weights(), best, (note,))


def at_first_heights(generator: ColumnGeneration, target: Fraction) -> ColumnGeneration | None:
    """Return column generation at the lowest of the first heights that reaches the target; None if none does.

    Unlike `at_lowest_height` it does not need the trees of any height, which take longer to find if low ones suffice.
    """
    pool: list[TreeColumn] = []
    lowest_of_all = _lowest_height(generator.packing)
    for height in range(lowest_of_all, lowest_of_all + FIRST_HEIGHTS):
        limited = ColumnGeneration(
            replace(generator.pricing, height=height),
            progress=generator.progress,
            deadline=generator.deadline,
        )
        limited.add(pool)
        if limited.run(target, hopeless=target):
            return limited
        if generator.deadline.over():
            return None
        pool = limited.trees
    return None


def at_lowest_height(
    generator: ColumnGeneration, target: Fraction, progress: ProgressCallback | None
) -> ColumnGeneration:
    """Return column generation at the lowest height that reaches the target, given a run with trees of any height."""

    def limited_to(height: int) -> ColumnGeneration:
        pricing = replace(generator.pricing, height=height)
        return ColumnGeneration(pricing, progress=progress, deadline=generator.deadline)

    tallest = max(tree.height for tree in generator.weights())
    pool = generator.trees
    for height in range(1, tallest):
        if generator.deadline.over():
            return generator
        limited = limited_to(height)
        limited.add([tree for tree in pool if tree.height <= height])
        if limited.run(target, hopeless=target):
            return limited
        pool = sorted({*pool, *limited.trees}, key=lambda tree: tree.order)
    if generator.deadline.over():
        return generator
    limited = limited_to(tallest)
    limited.add([tree for tree in pool if tree.height <= tallest])
    return limited if limited.run(target) else generator


MOST_DISJOINT = 64
"""Most disjoint trees of a broadcast, in units of bandwidth of the smallest cut."""


def _pack_disjoint(fabric: Fabric, collective: str, root: int, deadline: Deadline) -> ExactPacking | None:
    """Return the optimal packing of a broadcast or reduce on links between many ranks; None for other fabrics."""
    from topoplan.solve.hop_constrained_search import SMALL_SEARCH, lowest_heights
    from topoplan.solve.packing.disjoint_arborescences import disjoint_arborescences

    if not fabric.direct or not SMALL_SEARCH < fabric.size <= MOST_SEARCHED:
        return None
    packing = Packing(fabric, collective, root)
    certificate = best_bound(fabric, collective, root)
    count = certificate.bound(fabric, collective, root) * packing.scale
    if count > MOST_DISJOINT:
        return None
    down = collective == "broadcast"
    ends = fabric.ends if down else tuple((head, tail) for tail, head in fabric.ends)
    units = dict(zip(ends, packing.limits, strict=True))
    found = disjoint_arborescences(fabric.size, units, root, int(count), deadline=deadline)
    assert found is not None, "as many trees exist as the smallest cut has links (Edmonds 1973)"
    parents = [(root, (), tree) if down else (root, tree, ()) for tree in found]
    trees = Counter(packing.trees(parents, DirectLinks(fabric)))
    height = max(tree.height for tree in trees)
    tails, heads = np.array(ends, dtype=np.int64).T
    least = int(lowest_heights(SparseCosts.of(fabric.size, tails, heads, np.ones_like(tails)), [root])[0])
    open_text = f"height {height} is the lowest found, {least} the lowest not excluded"
    notes = (Note(open_text, "height open"),) if height > least else ()
    weights = {tree: Fraction(times) for tree, times in trees.items()}
    return ExactPacking(packing, weights, certificate, notes)


def _pack_on_orbits(
    fabric: Fabric,
    collective: str,
    root: int | None,
    order: str,
    deadline: Deadline,
    progress: ProgressCallback | None,
    first: Plan | None,
) -> ExactPacking:
    known: _Found | None = None
    enough = 1 if order == "trees" and root is not None else fabric.size
    for largest in (None, fabric.size) if order != "trees" else (None, fabric.size, 1):
        if order == "first" and known is not None and known.optimal:
            break
        packing = Packing(fabric, collective, root, _symmetries(fabric, root, largest))
        elements = len(packing.orbits.elements)
        if known is not None and elements == known.elements:
            continue
        if known is not None and (known.trees <= enough or fabric.size > MOST_AGAIN):
            break
        if known is not None and deadline.over():
            break
        search = _Search(packing, order, progress, deadline, first)
        search.run()
        found = _Found(search, elements)
        if known is None or found.rank(order) < known.rank(order):
            known = found
    assert known is not None, "the first group is always tried"
    search = known.search
    return ExactPacking(search.packing, known.weights, search.certificate, search.notes())


def _parents(stage: Stage, size: int) -> tuple[int, ...]:
    parents = [-1] * size
    for edge in stage.edges:
        parents[edge.child] = edge.parent
    return tuple(parents)


def _columns_of(packing: Packing, shards: Sequence[Shard]) -> list[TreeColumn]:
    """Return the trees of shards on the shortest routes, if their roots are among those of the packing."""
    trees = []
    for shard in shards:
        parents = {"reduce": (), "broadcast": ()} | {
            stage.op: _parents(stage, packing.fabric.size) for stage in shard.stages
        }
        trees.append((owner_of(shard), parents["reduce"], parents["broadcast"]))
    return packing.trees(
        [tree for tree in trees if tree[0] in packing.roots], packing.routes([1] * len(packing.limits))
    )


class _Found:
    """A finished search, and its forest with few trees."""

    def __init__(self, search: _Search, elements: int) -> None:
        assert search.best is not None, "at least one height has been tried"
        self.search = search
        self.elements = elements
        packing = search.packing
        weights = search.best.weights()
        if search.order != "first":
            weights = search.best.fewer_trees(RandomStream(0), least=packing.owners, walks=WALKS)
        self.weights = weights
        self.height = max(tree.height for tree in weights)
        self.value = search.best.value

    @cached_property
    def trees(self) -> int:
        """Number of trees of the forest, with all images."""
        return sum(map(self.search.packing.image_count, self.weights))

    @property
    def optimal(self) -> bool:
        """Whether no packing on any symmetries is better."""
        return self.value >= self.search.target

    def rank(self, order: str) -> tuple[Fraction, int, int]:
        """Return a sort key: smaller is better."""
        behind = -self.value / self.search.packing.scale
        return (behind, self.trees, self.height) if order == "trees" else (behind, self.height, self.trees)


@dataclass
class _Search:
    """The state of a search over heights."""

    packing: Packing
    order: str
    progress: ProgressCallback | None
    deadline: Deadline
    known: Plan | None = None
    best: ColumnGeneration | None = None
    refuted: int = 0
    target: Fraction = field(init=False)
    certificate: Certificate = field(init=False)
    first: list[TreeColumn] = field(init=False)

    def __post_init__(self) -> None:
        packing = self.packing
        asked = packing.fabric, packing.collective, packing.root
        candidates: list[Certificate] = [best_bound(*asked)]
        if self.known is not None:
            candidates.append(self.known.certificate)
        bound, self.certificate = lowest([(one.bound(*asked), one) for one in candidates])
        self.first = [] if self.known is None else _columns_of(packing, self.known.shards)
        self.target = bound * packing.scale
        self.lowest = _lowest_height(packing)
        self.refuted = self.lowest - 1

    def run(self) -> None:
        """Find trees that reach the optimum: of the lowest height, or of any height if their number comes first."""
        from topoplan.solve.hop_constrained_search import SMALL_SEARCH

        if self.order == "trees" and self.packing.fabric.size <= SMALL_SEARCH:
            self.best = self._generation(None)
            if not self.best.run(self.target):
                self._prove(self.packing.certificate(self.best.duals()))
            return
        for height in sorted({tree.height for tree in self.first}):
            self.best = self._generation(height)
            self.best.add([tree for tree in self.first if tree.height <= height])
            if self.best.pack_known(self.target):
                return
        for height in range(self.lowest, self.lowest + FIRST_HEIGHTS):
            if self._try(height) or self.deadline.over():
                return
        size = self.packing.fabric.size
        if size <= SMALL_SEARCH:
            free = self._generation(None)
            free.add(self._pool())
            if not free.run(self.target):
                self._prove(self.packing.certificate(free.duals()))
            assert self.best is not None, "a height has been tried"
            if self.best.value >= self.target:
                return
            if free.value > self.best.value:
                self.best = free
        for height in range(self.lowest, min(self.lowest + LATER_HEIGHTS, size)):
            if self.deadline.over() or self._try(height):
                return

    def _try(self, height: int) -> bool:
        """Generate trees of a height; return whether they are proved optimal."""
        generation = self._generation(height)
        generation.add([tree for tree in self._pool() if tree.height <= height])
        reached = generation.run(self.target)
        if reached or self.best is None or generation.value > self.best.value:
            self.best = generation
        if reached:
            return True
        if height == 1:
            self.refuted = 1
        self._prove(self.packing.certificate(generation.duals()))
        return generation.value >= self.target

    def _generation(self, height: int | None) -> ColumnGeneration:
        return ColumnGeneration(Pricing(self.packing, height), progress=self.progress, deadline=self.deadline)

    def _prove(self, lengths: Lengths) -> None:
        """Keep dual lengths if they prove a lower bound; those of a limited height may prove none."""
        packing = self.packing
        for bound, _ in proved_bounds([lengths], packing.fabric, packing.collective, packing.root):
            if bound * packing.scale < self.target:
                self.certificate, self.target = lengths, bound * packing.scale

    def _pool(self) -> list[TreeColumn]:
        return [*self.first, *(self.best.trees if self.best is not None else ())]

    def notes(self) -> tuple[str, ...]:
        """State what is not proved of the height that was taken."""
        best = self.best
        assert best is not None, "at least one height has been tried"
        height = max(tree.height for tree in best.weights())
        if self.deadline.cut:
            return (self.deadline.note(best.value, self.target),)
        if self.order == "trees" or height <= self.refuted + 1:
            return ()
        text = f"height {height} is the lowest found, {self.refuted + 1} the lowest not excluded"
        return (Note(text, "height open"),)


def _lowest_height(packing: Packing) -> int:
    """Return the height that hop counts force: of the best root if any will do, else of the worst."""
    from topoplan.solve.hop_constrained_search import lowest_heights

    routes = packing.routes([1] * len(packing.limits))
    needed = [0] * len(packing.roots)
    both = packing.uses("broadcast") and symmetric_costs(routes.costs)
    for op, cost in (("broadcast", routes.costs), ("reduce", routes.costs.T)):
        if packing.uses(op) and not (both and op == "reduce"):
            for place, far in enumerate(lowest_heights(cost, packing.roots).tolist()):
                needed[place] = max(needed[place], far)
    return max(needed) if packing.shared or packing.root is not None else min(needed)
