"""Find automorphisms of a labelled graph: extend permutations of ranks to all nodes, and build stabiliser chains.

Extension: with every rank individualised, refinement separates most switches and NICs too. Two copies of the graph,
with ranks coloured by number in one and by preimage in the other, show the image of each switch. Switches with the
same links to the same nodes keep their order. Remaining ties are individualised one pair of nodes at a time, without
backtracking: an extension may be missed, but every one that is returned has been checked on all links.

Chains of stabilisers (Schreier 1927, Sims 1970; McKay 1981): nodes b1, b2, … are individualised until refinement
separates all nodes. From the last to the first, every node that might be an image of bi while b1 … b(i-1) stay is
tried, unless known automorphisms already take bi there. The order of the group is the product of the sizes of the
orbits of all bi. The search stops at a fixed number of refinements, the same on every machine, perhaps with a subgroup.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from topoplan.machine.fabric_structure import LabelledGraph
from topoplan.machine.permutation_groups import Integers, group_elements, orbits, permutation_order

MOST_INDIVIDUALISED = 16
"""Most pairs of nodes that are individualised after the ranks."""


@dataclass(frozen=True, eq=False, slots=True)
class Automorphism:
    """A permutation that keeps all labels: node i goes to ``nodes[i]``, link i to ``links[i]``."""

    nodes: Integers
    links: Integers

    def then(self, other: Automorphism) -> Automorphism:
        """Return the composition: first this one, then the other."""
        return Automorphism(other.nodes[self.nodes], other.links[self.links])

    def power(self, exponent: int) -> Automorphism:
        """Return this one applied ``exponent`` times, 0 or more."""
        result = Automorphism(np.arange(len(self.nodes)), np.arange(len(self.links)))
        square = self
        while exponent:
            if exponent & 1:
                result = result.then(square)
            square = square.then(square)
            exponent >>= 1
        return result

    def order(self) -> int:
        """Return the least power, from 1, that is the identity."""
        return permutation_order(self.nodes)

    def commutes(self, other: Automorphism) -> bool:
        """Return whether the two commute."""
        return np.array_equal(self.nodes[other.nodes], other.nodes[self.nodes])


def checked_automorphism(wiring: LabelledGraph, nodes: Integers) -> Automorphism | None:
    """Return the automorphism with this image of each node; None if it does not keep all links."""
    links = wiring.image_of_links(nodes)
    return None if links is None else Automorphism(nodes, links)


class PermutationExtender:
    """Extends permutations of the ranks of one labelled graph to all its nodes."""

    def __init__(self, wiring: LabelledGraph) -> None:
        self.wiring = wiring
        self._by_group = np.argsort(wiring.twins, kind="stable")
        group = wiring.twins[self._by_group]
        self._group_begins = np.searchsorted(group, wiring.twins)
        self._group_places = np.argsort(self._by_group) - self._group_begins
        labels = wiring.node_labels * wiring.size + self._group_places
        self._others = np.unique(labels[wiring.ranks :], return_inverse=True)[1]
        path = [wiring.refined(self._coloured(np.arange(wiring.ranks)))]
        self._chosen: list[int] = []
        while (tied := nodes_of_shared_colour(path[-1])).size and len(self._chosen) < MOST_INDIVIDUALISED:
            self._chosen.append(int(tied[0]))
            path.append(wiring.refined(individualised(path[-1], int(tied[0]))))
        self._path = path
        self._discrete = not tied.size

    def _coloured(self, number_of_rank: Integers) -> Integers:
        """Colour every rank by its number, the other nodes by label and place in their interchangeable group."""
        return np.concatenate((number_of_rank, self.wiring.ranks + self._others))

    def extend(self, ranks: Integers) -> Automorphism | None:
        """Return an automorphism that permutes the ranks in this way; None if none is found."""
        return self._follow(ranks, None)

    def _follow(self, ranks: Integers, first: int | None) -> Automorphism | None:
        if not self._discrete:
            return None
        number = np.empty_like(ranks)
        number[ranks] = np.arange(len(ranks))
        colours = self.wiring.refined(self._coloured(number))
        for step, node in enumerate(self._chosen):
            image = first if step == 0 and first is not None else -1
            if image < 0:
                tied = np.flatnonzero(colours == self._path[step][node])
                if not tied.size:
                    return None
                image = int(tied[0])
            colours = self.wiring.refined(individualised(colours, image))
        return matched_automorphism(self.wiring, self._path[-1], colours)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Sizes, from two, of the groups of nodes with the same links to and from the same nodes."""
        counts = np.bincount(self.wiring.twins)
        return tuple(np.unique(counts[counts > 1]).tolist())

    def groups_rotated(self, count: int, run: int, step: int) -> Automorphism | None:
        """Rotate every group of ``count`` interchangeable nodes by ``step`` places within runs of ``run``."""
        begins, place = self._group_begins, self._group_places
        turned = begins + place - place % run + (place + step) % run
        nodes = np.arange(self.wiring.size)
        moving = np.bincount(self.wiring.twins, minlength=self.wiring.size)[self.wiring.twins] == count
        nodes[moving] = self._by_group[turned[moving]]
        return checked_automorphism(self.wiring, nodes)

    def planes_exchanged(self) -> Iterator[Automorphism]:
        """Yield automorphisms that keep ranks and move inequivalent switches, as far as one choice decides them."""
        if self._discrete and self._chosen:
            first = self._path[0]
            for image in np.flatnonzero(first == first[self._chosen[0]])[1:].tolist():
                if (found := self._follow(np.arange(self.wiring.ranks), image)) is not None:
                    yield found


def individualised(colours: Integers, node: int) -> Integers:
    """Return the same colours with one node before the others of its colour."""
    apart = 2 * colours
    apart[node] -= 1
    return apart


def matched_automorphism(wiring: LabelledGraph, left: Integers, right: Integers) -> Automorphism | None:
    """Return the automorphism that takes each node to the one of its colour; None if colours or links differ."""
    from_order, to_order = np.argsort(left, kind="stable"), np.argsort(right, kind="stable")
    if not np.array_equal(left[from_order], right[to_order]):
        return None
    nodes = np.empty_like(from_order)
    nodes[from_order] = to_order
    return checked_automorphism(wiring, nodes)


def nodes_of_shared_colour(colours: Integers) -> Integers:
    """Return the nodes of the first colour that several share."""
    shared = np.flatnonzero(np.bincount(colours) > 1)
    return np.flatnonzero(colours == shared[0]) if len(shared) else shared


MOST_ELEMENTS = 512
"""Elements up to which a group is listed."""

MOST_PRODUCTS = 128
"""Products of two generators that represent a larger group."""


@dataclass(frozen=True, eq=False, slots=True)
class StabiliserChain:
    """Generators of the automorphism group; ``order`` is None if the search stopped at its limit with a part of it."""

    generators: tuple[Automorphism, ...]
    order: int | None


class _LimitReachedError(Exception):
    """The search has used up its refinements."""


class NodeSearch:
    """A base that separates all nodes of a coloured graph, and the isomorphisms from there to other graphs.

    ``colours``, int64 of shape (nodes,), are at least as fine as the node labels. ``refinements`` limits how often the
    search may refine a colouring; None sets no limit.
    """

    def __init__(self, wiring: LabelledGraph, colours: Integers, refinements: int | None = None) -> None:
        self.wiring = wiring
        # A count that begins below zero never reaches it.
        self.left = -1 if refinements is None else refinements
        self.path = [self.refined(wiring, colours)]
        self.base: list[int] = []
        while (tied := nodes_of_shared_colour(self.path[-1])).size:
            self.base.append(int(tied[0]))
            self.path.append(self.refined(wiring, individualised(self.path[-1], int(tied[0]))))

    def refined(self, wiring: LabelledGraph, colours: Integers) -> Integers:
        if not self.left:
            raise _LimitReachedError
        self.left -= 1
        return wiring.refined(colours)

    def image_in(self, other: LabelledGraph, colours: Integers) -> Integers | None:
        """Map the nodes to another graph whose colours mean the same; None if it is not isomorphic."""
        return self.onto(other, 0, self.refined(other, colours))

    def onto(
        self, wiring: LabelledGraph, depth: int, colours: Integers, first: int | None = None
    ) -> Integers | None:
        """Map the nodes to a graph whose colours separate the images of ``base[:depth]``; None if no map exists.

        ``first`` is the image of ``base[depth]``; None leaves it free.
        """
        if not np.array_equal(np.bincount(colours), np.bincount(self.path[depth])):
            return None
        if depth == len(self.base):
            nodes = np.empty_like(colours)
            nodes[np.argsort(self.path[depth])] = np.argsort(colours)
            return nodes if self.wiring.image_of_links(nodes, wiring) is not None else None
        own = self.base[depth]
        choices = np.flatnonzero(colours == self.path[depth][own]).tolist() if first is None else [first]
        # Its own place first: simple automorphisms move few nodes.
        for choice in sorted(choices, key=lambda other: (other != own, other)):
            further = self.refined(wiring, individualised(colours, choice))
            found = self.onto(wiring, depth + 1, further)
            if found is not None:
                return found
        return None


def stabiliser_chain(wiring: LabelledGraph, colours: Integers, *, refinements: int) -> StabiliserChain:
    """Return the automorphisms that keep a colouring of the nodes, at least as fine as the node labels.

    ``refinements`` limits how often the search may refine a colouring.

    >>> import topoplan
    >>> from topoplan.machine.fabric import Fabric
    >>> from topoplan.machine.fabric_structure import labelled_graph_of
    >>> wiring = labelled_graph_of(Fabric(topoplan.load("dgx-1v"), ("nvlink",)))
    >>> stabiliser_chain(wiring, wiring.node_labels, refinements=1000).order
    4
    """
    generators: list[Automorphism] = []
    sizes: list[int] = []
    try:
        search = NodeSearch(wiring, colours, refinements)
        for depth in reversed(range(len(search.base))):
            node, here = search.base[depth], search.path[depth]
            refuted: set[int] = set()
            orbit = orbits(wiring.size, [each.nodes for each in generators])
            for other in np.flatnonzero(here == here[node]).tolist():
                if orbit[other] == orbit[node] or int(orbit[other]) in refuted:
                    continue
                nodes = search.onto(wiring, depth, here, other)
                found = None if nodes is None else checked_automorphism(wiring, nodes)
                if found is None:
                    refuted.add(int(orbit[other]))
                else:
                    generators.append(found)
                    orbit = orbits(wiring.size, [each.nodes for each in generators])
                    refuted = {int(orbit[place]) for place in refuted}
            sizes.append(int(np.count_nonzero(orbit == orbit[node])))
    except _LimitReachedError:
        return StabiliserChain(tuple(generators), None)
    return StabiliserChain(tuple(generators), prod(sizes))


def elements_or_products(wiring: LabelledGraph, chain: StabiliserChain) -> list[Automorphism]:
    """Return all elements but the identity of a group of up to `MOST_ELEMENTS`, else generators and their products."""
    if chain.generators and chain.order is not None and chain.order <= MOST_ELEMENTS:
        elements = group_elements([each.nodes for each in chain.generators], chain.order)
        assert elements is not None, "the chain knows the order"
        found = [checked_automorphism(wiring, element.astype(np.int64)) for element in elements[1:]]
        return [each for each in found if each is not None]
    several = [one.then(other) for one in chain.generators for other in chain.generators if one is not other]
    return [*chain.generators, *several[:MOST_PRODUCTS]]


def isomorphism(
    first: tuple[LabelledGraph, Integers], second: tuple[LabelledGraph, Integers], *, refinements: int
) -> Integers | None:
    """Map the nodes of a coloured graph to another one; None if no isomorphism is found within the work limit.

    Link labels, node labels and colours mean the same in both. ``refinements`` limits how often the search may refine a
    colouring.
    """
    if not np.array_equal(np.sort(first[1]), np.sort(second[1])):
        return None
    try:
        return NodeSearch(*first, refinements).image_in(*second)
    except _LimitReachedError:
        return None
