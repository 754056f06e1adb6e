"""Finds a small group of automorphisms of a fabric with few orbits of ranks and links.

Blocks of ranks (servers, leaves, pods) are rotated level by level, in all blocks of a kind at once, so that what is
accepted commutes: S servers of n GPUs get a group of S n elements, one for each rank. Where the inside of a block is
irregular, all its own automorphisms are found and a good subgroup is used in every such block at once. Up to
`MOST_RANKS_IN_FULL` ranks, if anything is left to gain, all automorphisms of the fabric are looked for. The classes of
an equitable partition tell when no more can be joined.

Guesses cost nothing but time: every permutation is checked on all links. Missed are symmetries of large fabrics that
do not follow their blocks, or whose numbering does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from topoplan.errors import UsageError
from topoplan.packing.automorphism import Automorphism, Extender, checked
from topoplan.packing.rank_blocks import Level, block_members, lined_up, nested_blocks, shifts
from topoplan.packing.small_subgroup import OrbitCount, Part, best_subgroup, fitted, useful_links
from topoplan.packing.stabiliser_chain import StabiliserChain, stabiliser_chain
from topoplan.plans.fabric import Fabric
from topoplan.plans.symmetry import Permutation, colours_with_fixed, group_elements, group_order, orbits
from topoplan.plans.wiring import Integers, Wiring, wiring_of

MOST_RANKS_IN_FULL = 64
"""Up to so many ranks, of a fabric or a block, all automorphisms are looked for."""

MOST_ELEMENTS = 512
"""Up to so many elements, all of a group are tried as generators."""

REFINEMENTS = 2000
"""Work limit of one search for all automorphisms."""

_WORK = 3_000_000
"""Links that may be looked at, over all guesses of one level."""


@dataclass(frozen=True, eq=False, slots=True)
class _Found:
    """Parts that commute with each other, and the orbits that they make."""

    parts: tuple[Part, ...]
    links: Integers

    def accepts(self, count: OrbitCount, part: Part) -> _Found:
        """With one more part, if it commutes with all others and joins links; else unchanged."""
        label = self.links
        for each in part:
            if not all(each.commutes(other) for known in self.parts for other in known):
                return self
            label = count.joined(label, each)
        if count.links(label) == count.links(self.links):
            return self
        return _Found((*self.parts, part), label)


class _Finder:
    def __init__(self, fabric: Fabric, wiring: Wiring, colours: Integers, largest: int) -> None:
        self.wiring = wiring
        self.colours = colours
        self.largest = largest
        self.classes = wiring.refined(colours)
        self.count = OrbitCount(wiring, useful_links(wiring))
        self.extender = Extender(wiring)
        self.blocks = nested_blocks(fabric, wiring)
        kinds = np.stack((self.classes[wiring.tails], self.classes[wiring.heads], wiring.link_labels))
        self.fewest = np.unique(kinds[:, self.count.useful], axis=1).shape[1]

    def by_blocks(self, *, aligned: bool) -> tuple[Automorphism, ...]:
        """Generators from rotations of blocks, and from automorphisms inside irregular ones.

        Parameters
        ----------
        aligned : bool
            Line up ranks by the switches outside their block before their numbers.
        """
        found = _Found((), self.count.none())
        classes = self.classes[: self.wiring.ranks]
        for parents, children in reversed(list(pairwise(self.blocks))):
            among, within = (self._order_by(each, aligned) for each in (parents, children))
            level = lined_up(parents, children, classes=classes, among=among, within=within)
            turned = self._turned(found, level)
            if children is self.blocks[-1] and not self._joins(turned, level):
                inside = self._inside(found, parents, among)
                turned = min(turned, inside, key=lambda each: self.count.links(each.links))
            found = turned
            if self.count.links(found.links) == self.fewest:
                return fitted(self.count, found.parts, largest=self.largest)
        for each in self.extender.keeping_ranks():
            if np.array_equal(self.colours[each.nodes], self.colours):
                found = found.accepts(self.count, (each,))
        return fitted(self.count, found.parts, largest=self.largest)

    def _order_by(self, blocks: Integers, aligned: bool) -> Integers:
        """For each rank what the devices outside all blocks, told apart, tell of it; nothing if not asked."""
        outside = np.flatnonzero(blocks < 0)
        if not aligned or not len(outside):
            return np.zeros(self.wiring.ranks, dtype=np.int64)
        colours = self.classes.copy()
        colours[outside] = self.wiring.size + np.arange(len(outside))
        return self.wiring.refined(colours)[: self.wiring.ranks]

    def _joins(self, found: _Found, level: Level) -> bool:
        """True where in every row ranks at the same place of all children are in one orbit."""
        label = orbits(self.wiring.size, [each.nodes for part in found.parts for each in part])
        return all((label[row] == label[row[:, :1]]).all() for row in level)

    def _turned(self, found: _Found, level: Level) -> _Found:
        """With rotations of children that are automorphisms, until the rows are joined."""
        guesses = max(8, _WORK // max(1, len(self.wiring.tails)))
        for guess, ranks in enumerate(shifts(level, self.wiring.ranks)):
            if guess == guesses or self._joins(found, level):
                break
            element = self.extender.extend(ranks)
            if element is not None:
                found = found.accepts(self.count, (element,))
        return found

    def _inside(self, found: _Found, parents: Integers, order: Integers) -> _Found:
        """With automorphisms of one block of each type, done in all blocks of the type at once."""
        classes = self.classes[: self.wiring.ranks]
        types: dict[bytes, list[Integers]] = {}
        for text, members in block_members(parents, classes=classes, order=order):
            types.setdefault(text, []).append(members)
        for alike in types.values():
            blocks = np.array(alike)
            size = blocks.shape[1]
            # A block that is the whole fabric is for `in_full`.
            if not 1 < size <= MOST_RANKS_IN_FULL or size == self.wiring.ranks:
                continue
            part = []
            for places in self._local(np.flatnonzero(parents == parents[blocks[0, 0]]), blocks[0]):
                ranks = np.arange(self.wiring.ranks)
                ranks[blocks] = blocks[:, places]
                element = self.extender.extend(ranks)
                if element is not None:
                    part.append(element)
            if part:
                found = found.accepts(self.count, tuple(part))
        return found

    def _local(self, nodes: Integers, members: Integers) -> list[Integers]:
        """Generators of a good group of one block, as permutations of places in the list of its ranks."""
        local = self.wiring.part(nodes)
        inside = np.isin(self.wiring.tails, nodes) & np.isin(self.wiring.heads, nodes)
        count = OrbitCount(local, self.count.useful[inside])
        chain = stabiliser_chain(local, self.classes[nodes], refinements=REFINEMENTS)
        largest = max(1, self.largest * len(members) // self.wiring.ranks)
        generators = best_subgroup(count, _candidates(local, chain, ()), largest=largest)
        place = np.argsort(members)
        position = np.searchsorted(nodes, members)
        return [place[np.searchsorted(np.sort(members), nodes[each.nodes[position]])] for each in generators]

    def in_full(self, known: Sequence[Automorphism]) -> tuple[Automorphism, ...]:
        """Generators chosen from all automorphisms, or from as many as the work limit lets be found."""
        chain = stabiliser_chain(self.wiring, self.colours, refinements=REFINEMENTS)
        return best_subgroup(self.count, _candidates(self.wiring, chain, known), largest=self.largest)

    def rank(self, generators: Sequence[Automorphism]) -> tuple[int, int, int]:
        """Orbits of links and of ranks, and order: the less the better."""
        order = group_order([each.nodes for each in generators], self.largest)
        assert order is not None, "no group beyond the limit is ever chosen"
        return (*self.count.score(generators), order)


def _candidates(wiring: Wiring, chain: StabiliserChain, known: Sequence[Automorphism]) -> list[Automorphism]:
    """All elements of a group that is small enough; of a large one generators, their products and powers."""
    nodes = [each.nodes for each in chain.generators]
    if nodes and chain.order is not None and chain.order <= MOST_ELEMENTS:
        elements = group_elements(nodes, chain.order)
        assert elements is not None, "the chain knows the order"
        found = [checked(wiring, element.astype(np.int64)) for element in elements[1:]]
        return [each for each in found if each is not None]
    simple = [*known, *chain.generators]
    several = [one.then(other) for one in simple for other in simple if one is not other]
    return [*simple, *several][:MOST_ELEMENTS]


def find_symmetry(
    fabric: Fabric, *, fixed: int | None = None, largest: int | None = None
) -> tuple[Permutation, ...]:
    """Generators of a small group of automorphisms with few orbits of ranks and links.

    Parameters
    ----------
    fabric : Fabric
    fixed : int or None
        A rank that stays, the root of a broadcast.
    largest : int or None
        Most elements that the group may have; None allows four for each rank. Best is one for each rank.

    Returns
    -------
    tuple of int64 arrays (nodes,)
        Permutations of `Fabric.nodes`, each checked on all links; none where the ranks are all different.

    Raises
    ------
    UsageError
        ``fixed`` is no rank, or ``largest`` is below 1.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.plans.symmetry import group_order, link_orbits
    >>> fabric = Fabric(topoplan.load("dgx-2"), ("nvlink",))
    >>> generators = find_symmetry(fabric)
    >>> group_order(generators, 64), sorted(set(link_orbits(fabric, generators).tolist()))
    (16, [0, 1])
    """
    if fixed is not None and not 0 <= fixed < fabric.size:
        raise UsageError(f"rank {fixed} cannot stay: the fabric has ranks 0 to {fabric.size - 1}")
    if largest is not None and largest < 1:
        raise UsageError(f"a group of at most {largest} elements: allow 1 or more")
    wiring = wiring_of(fabric)
    colours = colours_with_fixed(wiring, () if fixed is None else (fixed,))
    classes = wiring.refined(colours)[: wiring.ranks]
    if len(np.unique(classes)) == wiring.ranks:
        return ()
    finder = _Finder(fabric, wiring, colours, 4 * wiring.ranks if largest is None else largest)
    best = finder.by_blocks(aligned=False)
    if finder.count.score(best)[0] > finder.fewest:
        trials = [best, finder.by_blocks(aligned=True)]
        if wiring.ranks <= MOST_RANKS_IN_FULL:
            trials.append(finder.in_full(trials[0]))
        best = min(trials, key=finder.rank)
    return tuple(each.nodes for each in best)
