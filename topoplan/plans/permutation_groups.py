"""Compute with permutation groups that keep every link of a fabric: elements, orbits, equitable partitions.

An automorphism maps ranks to ranks and each link to one of equal bandwidth, channel and latency. Averaged over a group
of them, a packing loads all links of an orbit equally: a program needs one row for each orbit of links, one root for
each orbit of ranks, and a tree represents all its images. An equitable partition bounds every group: nodes of different
classes are never in one orbit. The search for groups is in `topoplan.solve.symmetry`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from topoplan.errors import UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.fabric_structure import (
    Integers,
    LabelledGraph,
    bare_labelled_graph_of,
    labelled_graph_of,
)

Permutation = NDArray[np.int64]
"""Node i, a position in `Fabric.nodes`, is mapped to node ``permutation[i]``."""

LARGEST_TABLE = 1 << 26
"""Most entries of a table of group elements: 256 MB."""


def is_automorphism(fabric: Fabric, permutation: ArrayLike) -> bool:
    """Return whether a permutation of `Fabric.nodes` keeps ranks, switches that copy or add, and every link.

    The image of a link must have equal bandwidth, channel and latency. False for an array that is not a permutation.
    """
    return labelled_graph_of(fabric).image_of_links(np.asarray(permutation)) is not None


def keeps_wires(fabric: Fabric, permutation: ArrayLike) -> bool:
    """Return whether a permutation keeps ranks, switches that copy or add, and maps every link to one of its channel.

    Bandwidths may differ, as measured ones do: a forest and its images still load all links of an orbit equally.

    >>> import topoplan
    >>> worn = topoplan.slow_links(topoplan.load("dgx-2"), {"gpu3-nvswitch0": 149.5})
    >>> turned = [*range(1, 16), 0, 16]
    >>> fabric = Fabric(worn, ("nvlink",))
    >>> keeps_wires(fabric, turned), is_automorphism(fabric, turned)
    (True, False)
    """
    return bare_labelled_graph_of(fabric).image_of_links(np.asarray(permutation)) is not None


def link_permutation(fabric: Fabric, permutation: ArrayLike) -> Permutation:
    """Return the link permutation of one that `keeps_wires`: link i is mapped to link ``result[i]`` of `Fabric.links`.

    UsageError if the permutation does not keep the wires.

    >>> import topoplan
    >>> fabric = Fabric(topoplan.load("dgx-1v").subset([4, 5, 7]), ("nvlink",))
    >>> fabric.ends
    ((0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1))
    >>> link_permutation(fabric, [2, 1, 0]).tolist()
    [5, 4, 3, 2, 1, 0]
    """
    image = bare_labelled_graph_of(fabric).image_of_links(np.asarray(permutation))
    if image is None:
        raise UsageError("the permutation does not keep the fabric's links; check it with is_automorphism")
    return image


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
    """Return the orbit of each of ``size`` positions under the generated group, labelled by its smallest member.

    >>> orbits(5, [np.array([2, 1, 0, 3, 4]), np.array([0, 1, 4, 3, 2])]).tolist()
    [0, 1, 0, 3, 0]
    """
    here = np.arange(size, dtype=np.int64)
    if not generators:
        return here
    return components(size, np.tile(here, len(generators)), np.concatenate(generators))


def link_orbits(fabric: Fabric, generators: Sequence[Permutation]) -> Integers:
    """Return the orbit of each link of `Fabric.links` under the generated group, labelled by its first link.

    UsageError if a generator does not keep the wires.
    """
    return orbits(len(fabric.links), [link_permutation(fabric, each) for each in generators])


def group_elements(generators: Sequence[Permutation], limit: int) -> NDArray[np.int32] | None:
    """Return all elements of the generated group, int32 of (order, nodes); None if there are more than ``limit``.

    ``generators`` are not empty. The identity is first, then breadth first: products of one generator, of two, …, in
    the generators' order. None too if the table would exceed `LARGEST_TABLE` entries. Callers share it, read-only.

    >>> group_elements([np.array([1, 2, 0])], 3).tolist()
    [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
    """
    steps = tuple(np.asarray(each, dtype=np.int32).tobytes() for each in generators)
    return _group_elements(steps, min(limit, LARGEST_TABLE // max(1, len(generators[0]))))


@lru_cache(maxsize=1)
def _group_elements(generators: tuple[bytes, ...], limit: int) -> NDArray[np.int32] | None:
    # Cached, since a plan needs the same table several times, and that of a large machine is large.
    steps = [np.frombuffer(each, dtype=np.int32) for each in generators]
    frontier = np.arange(len(steps[0]), dtype=np.int32)[None, :]
    if limit < 1:
        return None
    layers = [frontier]
    known = {frontier.tobytes()}
    while len(frontier):
        # Rows are multiplied by all generators in turn: element 0 by each generator, then element 1, …
        products = np.stack([step[frontier] for step in steps], axis=1).reshape(-1, frontier.shape[1])
        fresh = []
        for place, row in enumerate(products):
            text = row.tobytes()
            if text not in known:
                known.add(text)
                fresh.append(place)
                if len(known) > limit:
                    return None
        frontier = products[fresh]
        layers.append(frontier)
    elements = np.concatenate(layers)
    elements.setflags(write=False)
    return elements


def group_order(generators: Sequence[Permutation], limit: int) -> int | None:
    """Return the order of the generated group; None if it exceeds ``limit``.

    Commuting generators need no table of elements: an element is then determined by its image of one node of each
    orbit, for if it fixes x it fixes k(x) for every element k.

    >>> group_order([np.array([1, 2, 0, 3, 4]), np.array([0, 1, 2, 4, 3])], 10)
    6
    """
    if not generators:
        return 1
    for place, one in enumerate(generators):
        if any(not np.array_equal(one[other], other[one]) for other in generators[:place]):
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


def equitable_partition(fabric: Fabric, fixed: Sequence[int] = ()) -> Integers:
    """Return the coarsest equitable partition of the nodes that isolates the ``fixed`` ones, as smallest members.

    Nodes of one class have, for every class and every kind of link, equally many links to and from it. Automorphisms
    that keep the fixed nodes never leave the classes, so the number of orbits is at least that of classes.

    >>> import topoplan
    >>> fabric = Fabric(topoplan.load("dgx-1v"), ("nvlink",))
    >>> equitable_partition(fabric).tolist(), equitable_partition(fabric, [0]).tolist()
    ([0, 0, 0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7])
    """
    graph = labelled_graph_of(fabric)
    return by_smallest_member(graph.refined(colours_with_fixed(graph, fixed)))


def colours_with_fixed(graph: LabelledGraph, fixed: Sequence[int]) -> Integers:
    """Return the node labels, with a unique colour for each of some nodes."""
    colours = graph.node_labels.copy()
    top = int(colours.max(initial=0)) + 1
    for place, node in enumerate(fixed):
        colours[node] = top + place
    return colours


def by_smallest_member(colours: Integers) -> Integers:
    """Return the same classes, each labelled by its smallest member."""
    _, first, inverse = np.unique(colours, return_index=True, return_inverse=True)
    return first[inverse].astype(np.int64)
