"""Find automorphisms of a labelled graph: extend permutations of ranks to all nodes, and build stabiliser chains.

Extension: with every rank individualised, refinement tells most switches and NICs apart too; two copies of the
graph, ranks coloured by number in one and by preimage in the other, show the image of each switch. Switches with
the same links to the same nodes keep their order. Remaining ties are individualised, one pair of nodes at a time,
without turning back: an extension may be missed, but every one that is returned has been checked on all links.

Chains of stabilisers (Schreier 1927, Sims 1970; McKay 1981): nodes b1, b2, … are individualised until refinement
tells all nodes apart. From the last to the first, every node that might be an image of bi while b1 … b(i-1) stay is
tried, unless known automorphisms already take bi there. The group has as many elements as the orbits of all bi
multiplied. The search stops at a number of refinements that is the same on every machine, perhaps with a subgroup.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm, prod

import numpy as np

from topoplan.machine.fabric_structure import Integers, LabelledGraph
from topoplan.plans.permutation_groups import group_elements, orbits

MOST_INDIVIDUALISED = 16
"""Most pairs of nodes that are individualised after the ranks."""


@dataclass(frozen=True, eq=False, slots=True)
class Automorphism:
    """A permutation of the nodes that keeps all labels, and what it does to the links.

    Parameters
    ----------
    nodes, links : int64 arrays
        Node i goes to ``nodes[i]``, link i to ``links[i]``.
    """

    nodes: Integers
    links: Integers

    def then(self, other: Automorphism) -> Automorphism:
        """First this one, then the other."""
        return Automorphism(other.nodes[self.nodes], other.links[self.links])

    def power(self, exponent: int) -> Automorphism:
        """This one so many times, 0 or more."""
        result = Automorphism(np.arange(len(self.nodes)), np.arange(len(self.links)))
        square = self
        while exponent:
            if exponent & 1:
                result = result.then(square)
            square = square.then(square)
            exponent >>= 1
        return result

    def order(self) -> int:
        """The least power, from 1, that is the identity."""
        return lcm(*cycle_lengths(self.nodes))

    def commutes(self, other: Automorphism) -> bool:
        """True where the order of the two does not matter."""
        return np.array_equal(self.nodes[other.nodes], other.nodes[self.nodes])


def cycle_lengths(permutation: Integers) -> list[int]:
    """The different lengths of a permutation's cycles, ascending.

    Examples
    --------
    >>> cycle_lengths(np.array([1, 2, 0, 3]))
    [1, 3]
    """
    # A cycle's smallest member, by doubling: after step k the least of 2^k members that follow.
    smallest = np.arange(len(permutation), dtype=np.int64)
    ahead = permutation
    while True:
        further = np.minimum(smallest, smallest[ahead])
        if np.array_equal(further, smallest):
            break
        smallest, ahead = further, ahead[ahead]
    counts = np.bincount(smallest)
    return [int(length) for length in np.unique(counts[counts > 0])]


def checked_automorphism(wiring: LabelledGraph, nodes: Integers) -> Automorphism | None:
    """The automorphism that moves nodes so; None where it is none."""
    links = wiring.image_of_links(nodes)
    return None if links is None else Automorphism(nodes, links)


class PermutationExtender:
    """Extends permutations of the ranks of one wiring to all its nodes.

    Parameters
    ----------
    wiring : Wiring
    """

    def __init__(self, wiring: LabelledGraph) -> None:
        self.wiring = wiring
        self._by_twins = np.argsort(wiring.twins, kind="stable")
        group = wiring.twins[self._by_twins]
        self._twin_begins = np.searchsorted(group, wiring.twins)
        self._twin_places = np.argsort(self._by_twins) - self._twin_begins
        labels = wiring.node_labels * wiring.size + self._twin_places
        self._others = np.unique(labels[wiring.ranks :], return_inverse=True)[1]
        path = [wiring.refined(self._coloured(np.arange(wiring.ranks)))]
        self._chosen: list[int] = []
        while (alike := nodes_of_shared_colour(path[-1])).size and len(self._chosen) < MOST_INDIVIDUALISED:
            self._chosen.append(int(alike[0]))
            path.append(wiring.refined(individualised(path[-1], int(alike[0]))))
        self._path = path
        self._discrete = not alike.size

    def _coloured(self, number_of_rank: Integers) -> Integers:
        """Every rank in the colour of a number, the other nodes by label and place among their twins."""
        return np.concatenate((number_of_rank, self.wiring.ranks + self._others))

    def extend(self, ranks: Integers) -> Automorphism | None:
        """An automorphism that permutes the ranks like this; None where none is found."""
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
                alike = np.flatnonzero(colours == self._path[step][node])
                if not alike.size:
                    return None
                image = int(alike[0])
            colours = self.wiring.refined(individualised(colours, image))
        return matched_automorphism(self.wiring, self._path[-1], colours)

    @property
    def twin_counts(self) -> tuple[int, ...]:
        """Sizes, from two, of the groups of nodes with the same links to and from the same nodes."""
        counts = np.bincount(self.wiring.twins)
        return tuple(np.unique(counts[counts > 1]).tolist())

    def twins_turned(self, count: int, run: int, step: int) -> Automorphism | None:
        """Every group of ``count`` twins rotated by ``step`` places within runs of ``run``; all else stays."""
        begins, place = self._twin_begins, self._twin_places
        turned = begins + place - place % run + (place + step) % run
        nodes = np.arange(self.wiring.size)
        moving = np.bincount(self.wiring.twins, minlength=self.wiring.size)[self.wiring.twins] == count
        nodes[moving] = self._by_twins[turned[moving]]
        return checked_automorphism(self.wiring, nodes)

    def planes_exchanged(self) -> Iterator[Automorphism]:
        """Automorphisms that keep ranks and move switches that are no twins, as far as one choice decides them."""
        if self._discrete and self._chosen:
            first = self._path[0]
            for image in np.flatnonzero(first == first[self._chosen[0]])[1:].tolist():
                if (found := self._follow(np.arange(self.wiring.ranks), image)) is not None:
                    yield found


def individualised(colours: Integers, node: int) -> Integers:
    """The same colours with one node before the others of its colour."""
    apart = 2 * colours
    apart[node] -= 1
    return apart


def matched_automorphism(wiring: LabelledGraph, left: Integers, right: Integers) -> Automorphism | None:
    """The automorphism that takes each node to the one of its colour; None where colours or links differ."""
    from_order, to_order = np.argsort(left, kind="stable"), np.argsort(right, kind="stable")
    if not np.array_equal(left[from_order], right[to_order]):
        return None
    nodes = np.empty_like(from_order)
    nodes[from_order] = to_order
    return checked_automorphism(wiring, nodes)


def nodes_of_shared_colour(colours: Integers) -> Integers:
    """The nodes of the first colour that several share."""
    shared = np.flatnonzero(np.bincount(colours) > 1)
    return np.flatnonzero(colours == shared[0]) if len(shared) else shared


MOST_ELEMENTS = 512
"""Up to so many elements, a group is listed."""

MOST_PRODUCTS = 128
"""So many products of two generators stand for a larger group."""


@dataclass(frozen=True, eq=False, slots=True)
class StabiliserChain:
    """Generators of the automorphism group, or of what the search found of it.

    Parameters
    ----------
    generators : tuple of Automorphism
    order : int or None
        Number of elements of the whole automorphism group; None where the search stopped at its limit.
    """

    generators: tuple[Automorphism, ...]
    order: int | None


class _LimitReachedError(Exception):
    """The search has refined as often as it may."""


class NodeSearch:
    """Nodes that tell a coloured wiring apart, and how they can be laid on the nodes of a wiring.

    Parameters
    ----------
    wiring : Wiring
    colours : int64 array (nodes,)
        At least as fine as the node labels.
    refinements : int or None
        How often the search may refine a colouring; None for no limit.
    """

    def __init__(self, wiring: LabelledGraph, colours: Integers, refinements: int | None = None) -> None:
        self.wiring = wiring
        # What begins below zero never gets there.
        self.left = -1 if refinements is None else refinements
        self.path = [self.refined(wiring, colours)]
        self.base: list[int] = []
        while (alike := nodes_of_shared_colour(self.path[-1])).size:
            self.base.append(int(alike[0]))
            self.path.append(self.refined(wiring, individualised(self.path[-1], int(alike[0]))))

    def refined(self, wiring: LabelledGraph, colours: Integers) -> Integers:
        if not self.left:
            raise _LimitReachedError
        self.left -= 1
        return wiring.refined(colours)

    def image_in(self, other: LabelledGraph, colours: Integers) -> Integers | None:
        """Where the nodes go in another wiring, whose colours mean the same; None where it is not isomorphic."""
        return self.onto(other, 0, self.refined(other, colours))

    def onto(
        self, wiring: LabelledGraph, depth: int, colours: Integers, first: int | None = None
    ) -> Integers | None:
        """Where the nodes go in a wiring whose colours tell the images of ``base[:depth]`` apart.

        Parameters
        ----------
        first : int or None
            The image of base[depth]; None leaves it free.
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
    """The automorphisms that keep a colouring of the nodes.

    Parameters
    ----------
    wiring : Wiring
    colours : int64 array (nodes,)
        At least as fine as the node labels.
    refinements : int
        How often the search may refine a colouring.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.machine.fabric import Fabric
    >>> from topoplan.machine.fabric_structure import labelled_graph_of
    >>> wiring = wiring_of(Fabric(topoplan.load("dgx-1v"), ("nvlink",)))
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
    """All elements but the identity of a group of up to `MOST_ELEMENTS`; of another generators and their products."""
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
    """Where the nodes of a coloured wiring go in another one; None where none is found within the work limit.

    Parameters
    ----------
    first, second : tuple of Wiring and int64 array (nodes,)
        Link labels, node labels and colours mean the same in both.
    refinements : int
        How often the search may refine a colouring.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.machine.fabric import Fabric
    >>> from topoplan.machine.fabric_structure import labelled_graph_of
    >>> wiring = wiring_of(Fabric(topoplan.load("dgx-1v"), ("nvlink",)))
    >>> halves = [wiring.part(np.arange(4)), wiring.part(np.arange(4, 8))]
    >>> isomorphism(*((half, half.node_labels) for half in halves), refinements=50).tolist()
    [0, 1, 2, 3]
    """
    if not np.array_equal(np.sort(first[1]), np.sort(second[1])):
        return None
    try:
        return NodeSearch(*first, refinements).image_in(*second)
    except _LimitReachedError:
        return None
