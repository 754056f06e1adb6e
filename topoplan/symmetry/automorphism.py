"""Automorphisms of a wiring, and how a permutation of the ranks is extended to all nodes.

With every rank told apart, refinement tells most switches and NICs apart too: two copies of the wiring, ranks coloured
by number in one and by preimage in the other, show where each switch must go. Switches with the same links to the same
nodes keep their order. Whatever still looks alike is individualised, one pair of nodes at a time, without turning
back: an extension may be missed, but every one that is returned has been checked on all links.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

import numpy as np

from topoplan.fabric.labelled_graph import Integers, Wiring

STEPS = 16
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


def checked(wiring: Wiring, nodes: Integers) -> Automorphism | None:
    """The automorphism that moves nodes so; None where it is none."""
    links = wiring.image_of_links(nodes)
    return None if links is None else Automorphism(nodes, links)


class Extender:
    """Extends permutations of the ranks of one wiring to all its nodes.

    Parameters
    ----------
    wiring : Wiring
    """

    def __init__(self, wiring: Wiring) -> None:
        self.wiring = wiring
        self._by_twins = np.argsort(wiring.twins, kind="stable")
        group = wiring.twins[self._by_twins]
        self._twin_begins = np.searchsorted(group, wiring.twins)
        self._twin_places = np.argsort(self._by_twins) - self._twin_begins
        labels = wiring.node_labels * wiring.size + self._twin_places
        self._others = np.unique(labels[wiring.ranks :], return_inverse=True)[1]
        path = [wiring.refined(self._coloured(np.arange(wiring.ranks)))]
        self._chosen: list[int] = []
        while (alike := alike_nodes(path[-1])).size and len(self._chosen) < STEPS:
            self._chosen.append(int(alike[0]))
            path.append(wiring.refined(colours_told_apart(path[-1], int(alike[0]))))
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
            colours = self.wiring.refined(colours_told_apart(colours, image))
        return matched(self.wiring, self._path[-1], colours)

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
        return checked(self.wiring, nodes)

    def planes_exchanged(self) -> Iterator[Automorphism]:
        """Automorphisms that keep ranks and move switches that are no twins, as far as one choice decides them."""
        if self._discrete and self._chosen:
            first = self._path[0]
            for image in np.flatnonzero(first == first[self._chosen[0]])[1:].tolist():
                if (found := self._follow(np.arange(self.wiring.ranks), image)) is not None:
                    yield found


def colours_told_apart(colours: Integers, node: int) -> Integers:
    """The same colours with one node before the others of its colour."""
    apart = 2 * colours
    apart[node] -= 1
    return apart


def matched(wiring: Wiring, left: Integers, right: Integers) -> Automorphism | None:
    """The automorphism that takes each node to the one of its colour; None where colours or links differ."""
    from_order, to_order = np.argsort(left, kind="stable"), np.argsort(right, kind="stable")
    if not np.array_equal(left[from_order], right[to_order]):
        return None
    nodes = np.empty_like(from_order)
    nodes[from_order] = to_order
    return checked(wiring, nodes)


def alike_nodes(colours: Integers) -> Integers:
    """The nodes of the first colour that several share."""
    shared = np.flatnonzero(np.bincount(colours) > 1)
    return np.flatnonzero(colours == shared[0]) if len(shared) else shared
