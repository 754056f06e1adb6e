"""Find a small group of automorphisms of a fabric with few orbits of ranks and links.

Every tree of a packing is copied for each element of the group, so of two groups with the same orbits the smaller one
serves better. Symmetries that follow the blocks of ranks, aligned by number, come first (`BlockSymmetry`). If the
classes of an equitable partition leave something to gain and equivalent blocks were not joined, blocks are aligned by
their wires. On fabrics of up to `MOST_RANKS_IN_FULL` ranks all automorphisms follow. The best of the groups found is
taken. Every guess is checked on all links; symmetries across blocks and those hidden by numbering are missed.

From all elements of a small group, the subgroup that joins most is grown greedily (`best_subgroup`). From parts that
commute, such as rotations at different levels, powers within the limit are chosen (`commuting_subgroup`). Counts of
orbits leave out links that are not on a route between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, product
from math import gcd, prod

import numpy as np

from topoplan.errors import UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.fabric_structure import LabelledGraph, colours_with_fixed, labelled_graph_of
from topoplan.machine.permutation_groups import (
    LARGEST_TABLE,
    Integers,
    Permutation,
    components,
    group_order,
    orbits,
)
from topoplan.solve.symmetry.automorphisms import (
    MOST_ELEMENTS,
    Automorphism,
    PermutationExtender,
    elements_or_products,
    isomorphism,
    stabiliser_chain,
)
from topoplan.solve.symmetry.nested_blocks import (
    Level,
    aligned_children,
    block_members,
    nested_blocks,
    row_rotations,
)

Part = tuple[Automorphism, ...]
"""Generators of a subgroup; the parts of one group commute with each other."""

MOST_CHOICES = 256
"""Choices of powers up to which all are tried; beyond, one power after another is given up."""

_STARTS = 6
_ORDERS_TRIED = 32


@dataclass(frozen=True, eq=False, slots=True)
class OrbitCount:
    """Counts the orbits that a packing program would have; ``useful`` links lie on a route between ranks."""

    wiring: LabelledGraph
    useful: np.ndarray[tuple[int], np.dtype[np.bool_]]

    def none(self) -> Integers:
        """Return the partition with every link alone."""
        return np.arange(len(self.useful), dtype=np.int64)

    def joined(self, label: Integers, more: Automorphism) -> Integers:
        """Return the link orbits after one more generator."""
        return components(len(label), label, label[more.links])[label]

    def links(self, label: Integers) -> int:
        """Return the number of orbits of useful links."""
        return int(np.count_nonzero((label == np.arange(len(label))) & self.useful))

    def rows(self, generators: Sequence[Automorphism]) -> int:
        """Return the orbits of useful links and of ranks, together: the rows that a program would have."""
        label = orbits(len(self.useful), [each.links for each in generators])
        nodes = orbits(self.wiring.size, [each.nodes for each in generators])
        ranks = nodes[: self.wiring.ranks]
        return self.links(label) + int(np.count_nonzero(ranks == np.arange(len(ranks))))


def useful_nodes(wiring: LabelledGraph) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return the nodes that are not dead ends, which are devices other than ranks with one neighbour, repeatedly.

    On a DGX-1V GPUs 0 and 1 share a PCIe switch; everything beyond it is a dead end for them.

    >>> import topoplan
    >>> from topoplan.machine.fabric_structure import machine_labelled_graph
    >>> wiring = machine_labelled_graph(topoplan.load("dgx-1v"), ("pcie",))
    >>> pairs = [wiring.part(np.array([*pair, *range(8, wiring.size)])) for pair in ((0, 1), (0, 7))]
    >>> [int(useful_nodes(pair).sum()) for pair in pairs]
    [3, 6]
    """
    low = np.minimum(wiring.tails, wiring.heads)
    high = np.maximum(wiring.tails, wiring.heads)
    pairs = np.unique(low * wiring.size + high)
    low, high = pairs // wiring.size, pairs % wiring.size
    present = np.ones(wiring.size, dtype=bool)
    while True:
        kept = present[low] & present[high]
        degree = np.bincount(low[kept], minlength=wiring.size) + np.bincount(
            high[kept], minlength=wiring.size
        )
        ends = present & (degree < 2)
        ends[: wiring.ranks] = False
        if not ends.any():
            return present
        present[ends] = False


def useful_links(wiring: LabelledGraph) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return the links on a route between ranks: both ends are `useful_nodes`."""
    present = useful_nodes(wiring)
    return np.asarray(present[wiring.tails] & present[wiring.heads])


def best_subgroup(count: OrbitCount, elements: Sequence[Automorphism], *, largest: int) -> Part:
    """Return generators, from some elements, of a group of at most ``largest`` elements that has few orbits.

    Each step greedily adds the element that joins most; the best first element of each order is tried. The result is
    empty if no element joins links within the limit.
    """
    none = count.none()
    best: Part = ()
    least = (count.rows(()), 1)
    starts: dict[int, tuple[int, int]] = {}
    for place, each in enumerate(elements):
        trial = (count.links(count.joined(none, each)), place)
        starts[each.order()] = min(trial, starts.get(each.order(), trial))
    for _, start in sorted(starts.values())[:_STARTS]:
        grown = _grown(count, elements, elements[start], largest=largest)
        order = group_order([each.nodes for each in grown], largest)
        if order is not None and (cost := (count.rows(grown), order)) < least:
            best, least = grown, cost
    return best


def _grown(count: OrbitCount, elements: Sequence[Automorphism], first: Automorphism, *, largest: int) -> Part:
    chosen = [first]
    label = count.joined(count.none(), first)
    while True:
        trials = sorted(
            (count.links(count.joined(label, each)), place) for place, each in enumerate(elements)
        )
        for links, place in trials[:_ORDERS_TRIED]:
            generators = [each.nodes for each in (*chosen, elements[place])]
            if links < count.links(label) and group_order(generators, largest) is not None:
                chosen.append(elements[place])
                label = count.joined(label, elements[place])
                break
        else:
            return tuple(chosen)


def commuting_subgroup(count: OrbitCount, parts: Sequence[Part], *, largest: int) -> tuple[Automorphism, ...]:
    """Return generators of a group of at most ``largest`` elements made of parts that commute.

    Rotations are first split into powers of prime-power order. Two of them are merged if no orbit is lost: rotating
    three servers and three GPUs of a fourth takes 3 elements together and 9 separately. Then each keeps the power that
    leaves the fewest orbits within the limit.
    """
    pieces: list[Part] = []
    for part in parts:
        pieces += [(piece,) for piece in _prime_powers(part[0])] if len(part) == 1 else [part]
    pieces = _merged(count, pieces)
    if _order(pieces, largest) is not None:
        return tuple(chain.from_iterable(pieces))
    options = [_weakened(piece) for piece in pieces]
    if prod(len(each) for each in options) > MOST_CHOICES:
        return _weakened_to_limit(count, options, largest)
    best: tuple[tuple[int, int], tuple[Automorphism, ...]] | None = None
    for choice in product(*options):
        order = _order(choice, largest)
        if order is not None:
            generators = tuple(chain.from_iterable(choice))
            cost = (count.rows(generators), order)
            if best is None or cost < best[0]:
                best = cost, generators
    assert best is not None, "nothing at all always fits"
    return best[1]


def _order(parts: Sequence[Part], largest: int) -> int | None:
    return group_order([each.nodes for each in chain.from_iterable(parts)], largest)


def _prime_powers(element: Automorphism) -> list[Automorphism]:
    """Return powers of an element, of prime-power orders, that together generate the same group."""
    order = element.order()
    found, rest, prime = [], order, 2
    while rest > 1:
        share = 1
        while rest % prime == 0:
            rest //= prime
            share *= prime
        if share > 1:
            found.append(element.power(order // share))
        prime += 1
    return found


def _merged(count: OrbitCount, pieces: list[Part]) -> list[Part]:
    """Merge pairs of rotations of one prime as long as no orbit is lost."""
    target = count.rows(list(chain.from_iterable(pieces)))
    orders = [piece[0].order() if len(piece) == 1 else 0 for piece in pieces]
    i = 0
    while i < len(pieces):
        for j in range(i + 1, len(pieces)):
            shared = max(orders[i], orders[j])
            if not orders[i] or not orders[j] or shared % min(orders[i], orders[j]):
                continue
            both = (pieces[i][0].then(pieces[j][0]),)
            trial = [*pieces[:i], both, *pieces[i + 1 : j], *pieces[j + 1 :]]
            if count.rows(list(chain.from_iterable(trial))) == target:
                pieces, orders = trial, [*orders[:i], shared, *orders[i + 1 : j], *orders[j + 1 :]]
                break
        else:
            i += 1
    return pieces


def _weakened(piece: Part) -> list[Part]:
    """Return the piece and its subgroups down to nothing: for a rotation of prime-power order all of them."""
    if len(piece) > 1:
        return [piece, ()]
    order = piece[0].order()
    prime = next(p for p in range(2, order + 1) if order % p == 0)
    found: list[Part] = []
    step = 1
    while step < order:
        found.append((piece[0].power(step),))
        step *= prime
    return [*found, ()]


def _weakened_to_limit(
    count: OrbitCount, options: Sequence[Sequence[Part]], largest: int
) -> tuple[Automorphism, ...]:
    """Weaken one piece by one step, always the one that costs fewest orbits, until the limit is met."""
    level = [0] * len(options)
    while True:
        chosen = [each[place] for each, place in zip(options, level, strict=True)]
        if _order(chosen, largest) is not None:
            return tuple(chain.from_iterable(chosen))
        trials = []
        for i, each in enumerate(options):
            if level[i] + 1 < len(each):
                trial = [*chosen[:i], each[level[i] + 1], *chosen[i + 1 :]]
                trials.append((count.rows(list(chain.from_iterable(trial))), i))
        level[min(trials)[1]] += 1


MOST_RANKS_IN_BLOCK = 64
"""Ranks up to which all automorphisms of a block are searched."""

MOST_REFINEMENTS = 500
"""Work limit of the search inside one block."""

GUESSED_LINKS = 1_000_000
"""Work limit of the rotations tried at one level, in links checked."""


@dataclass(frozen=True, eq=False, slots=True)
class CommutingParts:
    """Subgroups that commute with each other: the generators of each, and the orbits of links under all of them."""

    parts: tuple[Part, ...]
    links: Integers

    def accepting(self, count: OrbitCount, part: Part) -> CommutingParts:
        """Add one more part if it commutes with all others and joins links; else return this object."""
        label = self.links
        for each in part:
            if not all(each.commutes(other) for known in self.parts for other in known):
                return self
            label = count.joined(label, each)
        if count.links(label) == count.links(self.links):
            return self
        return CommutingParts((*self.parts, part), label)


class BlockSymmetry:
    """The search on one fabric: servers, leaves and pods are rotated in all blocks of a kind at once.

    Level by level, each accepted part commutes with the earlier ones, so S servers of n GPUs get a group of S n
    elements, one for each rank. For blocks with an irregular inside, a good group of one block acts in all of them at
    once. Interchangeable switches rotate along with the rotations that have room for them, which costs no element.

    ``count`` is of the fabric's labelled graph. ``classes``, of shape (nodes,), are an equitable partition that no
    automorphism may leave. No group has less than ``fewest`` orbits of useful links.
    """

    def __init__(self, fabric: Fabric, count: OrbitCount, classes: Integers, *, fewest: int) -> None:
        self._count = count
        self._wiring: LabelledGraph = count.wiring
        self._classes = classes
        self._of_ranks = classes[: self._wiring.ranks]
        self._fewest = fewest
        self._extender = PermutationExtender(self._wiring)
        self._blocks = nested_blocks(fabric, self._wiring)

    def parts(self, *, by_wires: bool, largest: int) -> tuple[CommutingParts, bool]:
        """Return what is found, before any limit on elements, and whether blocks were aligned well.

        They were if at every level equivalent blocks were joined, or all automorphisms of one acted on each of them.
        ``by_wires`` aligns the ranks of equivalent blocks by their wires instead of their numbers. ``largest`` is the
        most elements that a group of the whole fabric may have; each block gets its share of them.
        """
        found = CommutingParts((), self._count.none())
        place = np.zeros(self._wiring.ranks, dtype=np.int64)
        well = True
        for parents, children in reversed(list(pairwise(self._blocks))):
            finest = children is self._blocks[-1]
            among = np.zeros_like(place)
            if by_wires:
                seen = self._seen_outside(parents)
                among = self._aligned_by_wires(parents, seen) if finest else seen[: self._wiring.ranks]
            level, place = aligned_children(
                parents, children, classes=self._of_ranks, among=among, within=place
            )
            turned = self._turned(found, level)
            joined = self._joins(turned, level)
            if finest and not joined:
                inside, joined = self._inside(found, parents, place, largest)
                turned = min(turned, inside, key=lambda each: self._count.links(each.links))
            found, well = turned, well and joined
            if self._count.links(found.links) == self._fewest:
                return found, well
        return self._with_switches(found), well

    def _seen_outside(self, blocks: Integers) -> Integers:
        """Return for each node a colour of its links to the devices outside all blocks, all kept distinct."""
        outside = np.flatnonzero(blocks < 0)
        colours = self._classes.copy()
        colours[outside] = self._wiring.size + np.arange(len(outside))
        return self._wiring.refined(colours)

    def _aligned_by_wires(self, blocks: Integers, seen: Integers) -> Integers:
        """Return each rank's place in its block, such that blocks of one type are isomorphic place by place."""
        by_block = np.argsort(blocks, kind="stable")
        begins = np.flatnonzero(np.r_[True, np.diff(blocks[by_block]) != 0])
        nodes_of = {int(blocks[nodes[0]]): nodes for nodes in np.split(by_block, begins[1:])}
        ranks = self._wiring.ranks
        place = np.zeros(ranks, dtype=np.int64)
        models: dict[bytes, tuple[LabelledGraph, Integers, Integers]] = {}
        for text, members in block_members(blocks, classes=self._of_ranks, order=seen[:ranks]):
            place[members] = np.arange(len(members))
            if not 1 < len(members) <= MOST_RANKS_IN_BLOCK:
                continue
            nodes = nodes_of[int(blocks[members[0]])]
            local = self._wiring.part(nodes)
            if text not in models:
                models[text] = local, nodes, place[nodes[: len(members)]]
                continue
            model, others, places = models[text]
            # Colours from outside differ between leaves; their order inside the block can be compared.
            for one, two in (
                (_dense(seen[others]), _dense(seen[nodes])),
                (self._classes[others], self._classes[nodes]),
            ):
                image = isomorphism((model, one), (local, two), refinements=MOST_REFINEMENTS)
                if image is not None:
                    place[nodes[image[: len(members)]]] = places
                    break
        return place

    def _joins(self, found: CommutingParts, level: Level) -> bool:
        """Return whether in every row ranks at the same place of all children are in one orbit."""
        label = orbits(self._wiring.size, [each.nodes for part in found.parts for each in part])
        return all((label[row] == label[row[:, :1]]).all() for row in level)

    def _turned(self, found: CommutingParts, level: Level) -> CommutingParts:
        """Add rotations of children that are automorphisms, until the rows are joined.

        Beyond the work limit only those are tried that move the first rank along a wire, as shifts of a torus do.
        """
        guesses = max(6, GUESSED_LINKS // max(1, len(self._wiring.tails)))
        first = int(level[0][0, 0, 0]) if level else 0
        near = set(self._wiring.heads[self._wiring.tails == first].tolist())
        for guess, ranks in enumerate(row_rotations(level, self._wiring.ranks)):
            if guess >= guesses and int(ranks[first]) not in near:
                continue
            if self._joins(found, level):
                break
            element = self._extender.extend(ranks)
            if element is not None:
                found = found.accepting(self._count, (element,))
        return found

    def _inside(
        self, found: CommutingParts, parents: Integers, place: Integers, largest: int
    ) -> tuple[CommutingParts, bool]:
        """Add automorphisms of one block of each type, applied to all blocks of the type at once.

        Also return whether all automorphisms of the blocks are known and the chosen ones act on every block.
        """
        types: dict[bytes, list[Integers]] = {}
        for text, members in block_members(parents, classes=self._of_ranks, order=place):
            types.setdefault(text, []).append(members)
        complete = True
        for equivalent in types.values():
            blocks = np.array(equivalent)
            size = blocks.shape[1]
            if size > MOST_RANKS_IN_BLOCK:
                complete = False
                continue
            nodes = np.flatnonzero(parents == parents[blocks[0, 0]])
            chosen, known = self._local(nodes, blocks[0], max(1, largest * size // self._wiring.ranks))
            part = []
            for places in chosen:
                ranks = np.arange(self._wiring.ranks)
                ranks[blocks] = blocks[:, places]
                element = self._extender.extend(ranks)
                if element is not None:
                    part.append(element)
            complete = complete and known and len(part) == len(chosen)
            if part:
                found = found.accepting(self._count, tuple(part))
        return found, complete

    def _local(self, nodes: Integers, members: Integers, largest: int) -> tuple[list[Integers], bool]:
        """Return generators of a good group of one block, as permutations of places in the list of its ranks.

        Also return whether it was chosen among all automorphisms of the block.
        """
        local = self._wiring.part(nodes)
        inside = np.isin(self._wiring.tails, nodes) & np.isin(self._wiring.heads, nodes)
        count = OrbitCount(local, self._count.useful[inside])
        chain = stabiliser_chain(local, self._classes[nodes], refinements=MOST_REFINEMENTS)
        generators = best_subgroup(count, elements_or_products(local, chain), largest=largest)
        listed = np.searchsorted(nodes, members)
        place = np.argsort(listed)
        known = chain.order is not None and chain.order <= MOST_ELEMENTS
        return [place[each.nodes[listed]] for each in generators], known

    def _with_switches(self, found: CommutingParts) -> CommutingParts:
        """Add automorphisms that move switches only, as far as possible inside rotations already there."""
        for count in self._extender.group_sizes:
            left, step = count, 1
            for i, part in enumerate(found.parts):
                run = gcd(part[0].order(), left) if len(part) == 1 else 1
                if run == 1:
                    continue
                rotation = self._extender.groups_rotated(count, step * run, step)
                together = None if rotation is None else self._together(found, i, rotation)
                if together is not None:
                    found, left, step = together, left // run, step * run
            if left > 1 and (rotation := self._extender.groups_rotated(count, step * left, step)) is not None:
                found = found.accepting(self._count, (rotation,))
        for each in self._extender.planes_exchanged():
            found = found.accepting(self._count, (each,))
        return found

    def _together(self, found: CommutingParts, place: int, rotation: Automorphism) -> CommutingParts | None:
        """Merge a rotation of switches into one part, if that joins as many links as the rotation alone would."""
        alone = found.accepting(self._count, (rotation,))
        if alone is found:
            return None
        both = (found.parts[place][0].then(rotation),)
        parts = (*found.parts[:place], both, *found.parts[place + 1 :])
        generators = [each for part in parts for each in part]
        label = orbits(len(found.links), [each.links for each in generators])
        if self._count.links(label) > self._count.links(alone.links):
            return None
        return CommutingParts(parts, label)


def _dense(colours: Integers) -> Integers:
    """Number colours from 0 in their order."""
    return np.unique(colours, return_inverse=True)[1].astype(np.int64)


MOST_RANKS_IN_FULL = 64
"""Ranks up to which all automorphisms of a fabric are searched."""

SEARCH_WORK = 400_000
"""Work limit of that search, in links of the fabric times refinements."""


def find_symmetry(
    fabric: Fabric, *, fixed: int | None = None, largest: int | None = None
) -> tuple[Permutation, ...]:
    """Return generators of a small group of automorphisms with few orbits of ranks and links.

    They are permutations of `Fabric.nodes`, each checked on all links, or none if all ranks differ. The group has the
    fewest orbits of links and ranks together, then the fewest elements; links to dead ends do not count. It is not
    always the whole automorphism group, nor always the best one within the limit.

    ``fixed`` is a rank that stays, as the root of a broadcast. ``largest`` is the most elements that the group may
    have, never more than a table of all elements can list, or one for each rank if all commute; None allows four for
    each rank, and one for each is best.
    """
    if fixed is not None and not 0 <= fixed < fabric.size:
        raise UsageError(f"rank {fixed} cannot stay: the fabric has ranks 0 to {fabric.size - 1}")
    if largest is not None and largest < 1:
        raise UsageError(f"a group of at most {largest} elements is asked for; allow 1 or more")
    wiring = labelled_graph_of(fabric)
    colours = colours_with_fixed(wiring, () if fixed is None else (fixed,))
    classes = wiring.refined(colours)
    if len(np.unique(classes[: wiring.ranks])) == wiring.ranks:
        return ()
    limit = 4 * wiring.ranks if largest is None else largest
    # Larger groups are taken if their generators commute, see `group_order`.
    limit = min(limit, max(wiring.ranks, LARGEST_TABLE // wiring.size))
    count = OrbitCount(wiring, useful_links(wiring))
    fewest = _kinds_of_links(wiring, classes, count)
    search = BlockSymmetry(fabric, count, classes, fewest=fewest)
    parts, lined_up = search.parts(by_wires=False, largest=limit)
    found = [commuting_subgroup(count, parts.parts, largest=limit)]
    if count.links(parts.links) > fewest and not lined_up:
        parts, _ = search.parts(by_wires=True, largest=limit)
        found.append(commuting_subgroup(count, parts.parts, largest=limit))
    if count.links(parts.links) > fewest and wiring.ranks <= MOST_RANKS_IN_FULL:
        best = min(found, key=lambda each: _orbit_cost(count, each, limit))
        found.append(_from_all_automorphisms(count, colours, best, limit))
    best = min(found, key=lambda each: _orbit_cost(count, each, limit))
    return tuple(each.nodes for each in best)


def _kinds_of_links(wiring: LabelledGraph, classes: Integers, count: OrbitCount) -> int:
    """Count the (class of tail, class of head, label) of useful links: no group has fewer orbits of them."""
    kinds = np.stack((classes[wiring.tails], classes[wiring.heads], wiring.link_labels))
    return int(np.unique(kinds[:, count.useful], axis=1).shape[1])


def _orbit_cost(count: OrbitCount, generators: Sequence[Automorphism], limit: int) -> tuple[int, int]:
    """Return orbits of links and ranks, then elements: less is better."""
    order = group_order([each.nodes for each in generators], limit)
    assert order is not None, "no group beyond the limit is ever chosen"
    return count.rows(generators), order


def _from_all_automorphisms(
    count: OrbitCount, colours: Integers, known: tuple[Automorphism, ...], limit: int
) -> tuple[Automorphism, ...]:
    """Return a group chosen from all automorphisms that are found, or the known group if that cannot be better."""
    refinements = SEARCH_WORK // max(1, len(count.useful))
    chain = stabiliser_chain(count.wiring, colours, refinements=refinements)
    small = chain.order is not None and chain.order <= MOST_ELEMENTS
    if not small and count.rows(chain.generators) >= count.rows(known):
        return known
    return best_subgroup(count, [*known, *elements_or_products(count.wiring, chain)], largest=limit)
