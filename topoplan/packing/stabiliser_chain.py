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

from topoplan.packing.automorphism import Automorphism, alike_nodes, colours_told_apart, matched
from topoplan.plans.symmetry import orbits
from topoplan.plans.wiring import Integers, Wiring


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


class _Search:
    def __init__(self, wiring: Wiring, colours: Integers, refinements: int) -> None:
        self.wiring = wiring
        self.left = refinements
        self.path = [self.refined(colours)]
        self.base: list[int] = []
        while (alike := alike_nodes(self.path[-1])).size:
            self.base.append(int(alike[0]))
            self.path.append(self.refined(colours_told_apart(self.path[-1], int(alike[0]))))

    def refined(self, colours: Integers) -> Integers:
        if not self.left:
            raise _LimitReachedError
        self.left -= 1
        return self.wiring.refined(colours)

    def image(self, depth: int, colours: Integers, node: int) -> Automorphism | None:
        """An automorphism that sends base[depth] to a node, where ``colours`` tells what came before."""
        colours = self.refined(colours_told_apart(colours, node))
        depth += 1
        if not np.array_equal(np.bincount(colours), np.bincount(self.path[depth])):
            return None
        if depth == len(self.base):
            return matched(self.wiring, self.path[depth], colours)
        following = self.base[depth]
        choices = np.flatnonzero(colours == self.path[depth][following]).tolist()
        # Its own place first: simple elements move few nodes.
        for choice in sorted(choices, key=lambda other: (other != following, other)):
            found = self.image(depth, colours, choice)
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
    >>> from topoplan.plans.wiring import wiring_of
    >>> wiring = wiring_of(Fabric(topoplan.load("dgx-1v"), ("nvlink",)))
    >>> stabiliser_chain(wiring, wiring.node_labels, refinements=1000).order
    4
    """
    generators: list[Automorphism] = []
    sizes: list[int] = []
    try:
        search = _Search(wiring, colours, refinements)
        for depth in reversed(range(len(search.base))):
            node, here = search.base[depth], search.path[depth]
            refuted: set[int] = set()
            orbit = orbits(wiring.size, [each.nodes for each in generators])
            for other in np.flatnonzero(here == here[node]).tolist():
                if orbit[other] == orbit[node] or int(orbit[other]) in refuted:
                    continue
                found = search.image(depth, here, other)
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
