"""Groups of permutations of a fabric's nodes: orbits, orders, and the images of nodes under all elements.

A group is listed as a table, one permutation to a row, as long as that is small. If its generators commute, no table is
needed: an element is a number of uses of each generator, and images come from tables of the generators' powers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations
from math import isqrt, lcm
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Integers: TypeAlias = NDArray[np.int64]

Number = TypeVar("Number", np.int32, np.int64)

Permutation = NDArray[np.int64]
"""Node i, a position in `Fabric.nodes`, is mapped to node ``permutation[i]``."""

Numbers: TypeAlias = "int | slice | Sequence[int] | Integers"
"""Which elements, or which nodes."""

Elements: TypeAlias = "NDArray[np.int32] | CommutingGroup"
"""All elements of a group, by element and node."""

LARGEST_TABLE = 1 << 26
"""Most entries of a table of group elements: 256 MB."""


def components(size: int, first: Integers, second: Integers) -> Integers:
    """Return the connected component of each of ``size`` items, if ``first[k]`` and ``second[k]`` are joined.

    The label is the component's smallest item. Every round hooks the larger of two labels on the smaller and then
    follows labels to their end (Shiloach and Vishkin 1982), so long chains take few rounds.

    >>> components(5, np.array([3, 4]), np.array([1, 3])).tolist()
    [0, 1, 2, 1, 1]
    """
    label = np.arange(size, dtype=np.int64)
    while True:
        left, right = label[first], label[second]
        apart = left != right
        if not apart.any():
            return label
        low, high = np.minimum(left, right)[apart], np.maximum(left, right)[apart]
        np.minimum.at(label, high, low)
        while True:
            further = label[label]
            if np.array_equal(further, label):
                break
            label = further


def orbits(size: int, generators: Sequence[Permutation]) -> Integers:
    """Return the orbit of each of ``size`` positions under the generated group, labelled by its smallest member."""
    here = np.arange(size, dtype=np.int64)
    if not generators:
        return here
    return components(size, np.tile(here, len(generators)), np.concatenate(generators))


def cycle_lengths(permutation: Integers) -> list[int]:
    """Return the different lengths of a permutation's cycles, ascending.

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


def permutation_order(permutation: Permutation) -> int:
    """Return the least power, from 1, that is the identity."""
    return lcm(*cycle_lengths(permutation))


def group_elements(generators: Sequence[Permutation], limit: int) -> NDArray[np.int32] | None:
    """Return all elements of the generated group, int32 of (order, nodes); None if there are more than ``limit``.

    ``generators`` are not empty. The identity is first, then breadth first: products of one generator, of two, …, in
    the generators' order. None too if the table would exceed `LARGEST_TABLE` entries. Callers share it, read-only.
    """
    steps = tuple(np.asarray(each, dtype=np.int32).tobytes() for each in generators)
    return _group_elements(steps, min(limit, LARGEST_TABLE // max(1, len(generators[0]))))


@lru_cache(maxsize=1)
def _group_elements(generators: tuple[bytes, ...], limit: int) -> NDArray[np.int32] | None:
    # Cached, since a plan needs the same table several times, and that of a large machine is large.
    steps = [np.frombuffer(each, dtype=np.int32) for each in generators]
    found = _breadth_first(steps, np.arange(len(steps[0]), dtype=np.int32), limit)
    if found is None:
        return None
    found[0].setflags(write=False)
    return found[0]


def _breadth_first(
    steps: Sequence[NDArray[Number]], nodes: NDArray[Number], limit: int
) -> tuple[NDArray[Number], Integers] | None:
    """Return the images of some nodes under all elements, and how often each uses every generator.

    Elements with the same images count once; None if there are more than ``limit``.
    """
    if limit < 1:
        return None
    frontier, uses = nodes[None, :], np.zeros((1, len(steps)), dtype=np.int64)
    layers, counts = [frontier], [uses]
    known = {frontier.tobytes()}
    while len(frontier):
        # Rows are multiplied by all generators in turn: element 0 by each generator, then element 1, …
        products = np.stack([step[frontier] for step in steps], axis=1).reshape(-1, frontier.shape[1])
        grown = (uses[:, None, :] + np.eye(len(steps), dtype=np.int64)).reshape(-1, len(steps))
        fresh = []
        for place, row in enumerate(products):
            text = row.tobytes()
            if text not in known:
                known.add(text)
                fresh.append(place)
                if len(known) > limit:
                    return None
        frontier, uses = products[fresh], grown[fresh]
        layers.append(frontier)
        counts.append(uses)
    return np.concatenate(layers), np.concatenate(counts)


def _commute(generators: Sequence[Permutation]) -> bool:
    return all(np.array_equal(one[other], other[one]) for one, other in combinations(generators, 2))


def group_order(generators: Sequence[Permutation], limit: int) -> int | None:
    """Return the order of the generated group; None if it exceeds ``limit``.

    Commuting generators need no table of elements: an element is then determined by its image of one node of each
    orbit, for if it fixes x it fixes k(x) for every element k.
    """
    if not generators:
        return 1
    if not _commute(generators):
        elements = group_elements(generators, limit)
        return None if elements is None else len(elements)
    label = orbits(len(generators[0]), generators)
    first = np.arange(len(label))
    moved = np.bincount(label, minlength=len(label)) > 1
    representatives = first[(label == first) & moved]
    rows = representatives[None, :]
    for step in generators:
        known = {row.tobytes() for row in rows}
        layers = [rows]
        image = step[representatives]
        while image.tobytes() not in known:
            layers.append(step[layers[-1]])
            image = step[image]
            if len(layers) * len(rows) > limit:
                return None
        rows = np.concatenate(layers)
    return len(rows) if len(rows) <= limit else None


class CommutingGroup:
    """All elements of a group of commuting permutations, numbered as by `group_elements`, without a table of them.

    Element number i uses generator k ``exponents[i, k]`` times. Indexing reads as that of a table of shape (order,
    nodes), int32: ``group[i]`` is a permutation, ``group[:, node]`` the images of a node under all elements, and
    ``group[numbers, nodes]`` an image for each pair, of arrays that broadcast together.
    """

    def __init__(self, generators: Sequence[Permutation], exponents: Integers) -> None:
        self.nodes = len(generators[0])
        self.exponents = exponents
        self._orders = tuple(permutation_order(one) for one in generators)
        self._powers = tuple(_powers(one, order) for one, order in zip(generators, self._orders, strict=True))

    def __len__(self) -> int:
        return len(self.exponents)

    def __getitem__(self, key: Numbers | tuple[Numbers, Numbers]) -> NDArray[np.int32]:
        numbers, nodes = key if isinstance(key, tuple) else (key, slice(None))
        exponents = self.exponents[numbers]
        if isinstance(nodes, slice):
            return self._moved(exponents[..., None, :], np.arange(self.nodes)[nodes])
        return self._moved(exponents, np.asarray(nodes))

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        return (self[number] for number in range(len(self)))

    def preimages(self, numbers: Integers, nodes: Integers) -> NDArray[np.int32]:
        """Return the node that each element, by number, takes to a node, int32 of the shape of both."""
        return self._moved(-self.exponents[numbers] % np.array(self._orders), nodes)

    def _moved(self, exponents: Integers, nodes: Integers) -> NDArray[np.int32]:
        for place, (few, many) in enumerate(self._powers):
            times = exponents[..., place]
            nodes = few[times % len(few), many[times // len(few), nodes]].astype(np.int64)
        return nodes.astype(np.int32)


def _powers(permutation: Permutation, order: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the powers 0 to s - 1 and the multiples of s below the order, s about its square root."""
    step = isqrt(order - 1) + 1
    few = [np.arange(len(permutation), dtype=np.int32)]
    while len(few) < step:
        few.append(permutation[few[-1]].astype(np.int32))
    stride = permutation[few[-1]].astype(np.int32)
    many = [few[0]]
    while len(many) * step < order:
        many.append(stride[many[-1]])
    return np.stack(few), np.stack(many)


def all_elements(generators: Sequence[Permutation], limit: int) -> Elements | None:
    """Return all elements of the generated group, the identity first; None if there are more than ``limit``.

    They are a table of at most `LARGEST_TABLE` entries; of a larger group of commuting generators a `CommutingGroup`,
    and of any other None.
    """
    nodes = len(generators[0])
    if limit * nodes > LARGEST_TABLE and _commute(generators):
        steps = tuple(np.asarray(one, dtype=np.int64).tobytes() for one in generators)
        group = _commuting_group(steps, limit)
        if group is None or len(group) * nodes > LARGEST_TABLE:
            return group
    return group_elements(generators, limit)


@lru_cache(maxsize=1)
def _commuting_group(generators: tuple[bytes, ...], limit: int) -> CommutingGroup | None:
    steps = [np.frombuffer(each, dtype=np.int64) for each in generators]
    # An element is known by its images of one node of each orbit.
    found = _breadth_first(steps, np.unique(orbits(len(steps[0]), steps)), limit)
    return None if found is None else CommutingGroup(steps, found[1])
