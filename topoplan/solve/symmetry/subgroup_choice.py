"""Choose small groups of automorphisms that still join as many links as possible.

Every tree of a packing is copied for each element of the group, so of two groups with the same orbits the smaller
one serves better. From all elements of a small group, the subgroup that joins most is grown greedily. From parts that
commute, such as rotations at different levels, powers within the limit are chosen, after rotations of unrelated nodes
have been merged. Counts of orbits leave out links that are not on a route between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod

import numpy as np

from topoplan.machine.fabric_structure import Integers, LabelledGraph
from topoplan.plans.permutation_groups import components, group_order, orbits
from topoplan.solve.symmetry.automorphisms import Automorphism

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

    Examples
    --------
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
