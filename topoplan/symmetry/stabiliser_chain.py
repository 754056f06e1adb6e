"""All automorphisms of a small wiring, as a chain of stabilisers (Schreier 1927, Sims 1970; McKay 1981).

Nodes b1, b2, … are individualised until refinement tells all nodes apart. From the last to the first, every node that
might be an image of bi while b1 … b(i-1) stay is tried, unless automorphisms already found take bi there. The group
has as many elements as the orbits of all bi multiplied, and what was found generates it. The search counts refinements
and stops at a limit that is the same on every machine; what it has found by then is a subgroup.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from topoplan.fabric.labelled_graph import Integers, Wiring
from topoplan.symmetry.automorphism import Automorphism, alike_nodes, checked, colours_told_apart
from topoplan.symmetry.permutation_groups import group_elements, orbits

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

    def __init__(self, wiring: Wiring, colours: Integers, refinements: int | None = None) -> None:
        self.wiring = wiring
        # What begins below zero never gets there.
        self.left = -1 if refinements is None else refinements
        self.path = [self.refined(wiring, colours)]
        self.base: list[int] = []
        while (alike := alike_nodes(self.path[-1])).size:
            self.base.append(int(alike[0]))
            self.path.append(self.refined(wiring, colours_told_apart(self.path[-1], int(alike[0]))))

    def refined(self, wiring: Wiring, colours: Integers) -> Integers:
        if not self.left:
            raise _LimitReachedError
        self.left -= 1
        return wiring.refined(colours)

    def image_in(self, other: Wiring, colours: Integers) -> Integers | None:
        """Where the nodes go in another wiring, whose colours mean the same; None where it is not isomorphic."""
        return self.onto(other, 0, self.refined(other, colours))

    def onto(
        self, wiring: Wiring, depth: int, colours: Integers, first: int | None = None
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
            further = self.refined(wiring, colours_told_apart(colours, choice))
            found = self.onto(wiring, depth + 1, further)
            if found is not None:
                return found
        return None


def stabiliser_chain(wiring: Wiring, colours: Integers, *, refinements: int) -> StabiliserChain:
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
    >>> from topoplan.plans import Fabric
    >>> from topoplan.fabric.labelled_graph import wiring_of
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
                found = None if nodes is None else checked(wiring, nodes)
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


def all_or_some(wiring: Wiring, chain: StabiliserChain) -> list[Automorphism]:
    """All elements but the identity of a group of up to `MOST_ELEMENTS`; of another generators and their products."""
    if chain.generators and chain.order is not None and chain.order <= MOST_ELEMENTS:
        elements = group_elements([each.nodes for each in chain.generators], chain.order)
        assert elements is not None, "the chain knows the order"
        found = [checked(wiring, element.astype(np.int64)) for element in elements[1:]]
        return [each for each in found if each is not None]
    several = [one.then(other) for one in chain.generators for other in chain.generators if one is not other]
    return [*chain.generators, *several[:MOST_PRODUCTS]]


def isomorphism(
    first: tuple[Wiring, Integers], second: tuple[Wiring, Integers], *, refinements: int
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
    >>> from topoplan.plans import Fabric
    >>> from topoplan.fabric.labelled_graph import wiring_of
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
