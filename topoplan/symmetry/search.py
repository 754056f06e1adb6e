"""Finds a small group of automorphisms of a fabric with few orbits of ranks and links.

First the symmetries that follow the blocks of ranks, lined up by number. Where the classes of an equitable partition
leave something to gain and like blocks were not joined, they are lined up by their wires; and on fabrics of up to
`MOST_RANKS_IN_FULL` ranks all automorphisms are looked for. The best of the groups found is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from topoplan.errors import UsageError
from topoplan.fabric.fabric import Fabric
from topoplan.fabric.labelled_graph import Integers, Wiring, wiring_of
from topoplan.symmetry.automorphism import Automorphism
from topoplan.symmetry.block_rotations import BlockSymmetry
from topoplan.symmetry.permutation_groups import LARGEST_TABLE, Permutation, colours_with_fixed, group_order
from topoplan.symmetry.stabiliser_chain import MOST_ELEMENTS, all_or_some, stabiliser_chain
from topoplan.symmetry.subgroup_choice import OrbitCount, best_subgroup, fitted, useful_links

MOST_RANKS_IN_FULL = 64
"""Up to so many ranks, all automorphisms of a fabric are looked for."""

REFINED_LINKS = 400_000
"""Work limit of that search: links of the fabric times refinements."""


def find_symmetry(
    fabric: Fabric, *, fixed: int | None = None, largest: int | None = None
) -> tuple[Permutation, ...]:
    """Generators of a small group of automorphisms with few orbits of ranks and links.

    Fewest orbits of links and ranks together, then fewest elements. Links to dead ends do not count.

    Parameters
    ----------
    fabric : Fabric
    fixed : int or None
        A rank that stays, the root of a broadcast.
    largest : int or None
        Most elements that the group may have; None allows four for each rank. Best is one for each rank. Never more
        than a table of all elements can list.

    Returns
    -------
    tuple of int64 arrays (nodes,)
        Permutations of `Fabric.nodes`, each checked on all links; none where the ranks are all different. They do not
        always generate the whole automorphism group, nor always the best group within the limit.

    Raises
    ------
    UsageError
        ``fixed`` is no rank, or ``largest`` is below 1.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.symmetry.permutation_groups import group_order, link_orbits
    >>> fabric = Fabric(topoplan.load("dgx-2"), ("nvlink",))
    >>> generators = find_symmetry(fabric)
    >>> group_order(generators, 64), sorted(set(link_orbits(fabric, generators).tolist()))
    (16, [0, 1])
    """
    if fixed is not None and not 0 <= fixed < fabric.size:
        raise UsageError(f"rank {fixed} cannot stay: the fabric has ranks 0 to {fabric.size - 1}")
    if largest is not None and largest < 1:
        raise UsageError(f"a group of at most {largest} elements is asked for; allow 1 or more")
    wiring = wiring_of(fabric)
    colours = colours_with_fixed(wiring, () if fixed is None else (fixed,))
    classes = wiring.refined(colours)
    if len(np.unique(classes[: wiring.ranks])) == wiring.ranks:
        return ()
    limit = 4 * wiring.ranks if largest is None else largest
    limit = min(limit, max(1, LARGEST_TABLE // wiring.size))
    count = OrbitCount(wiring, useful_links(wiring))
    fewest = _kinds_of_links(wiring, classes, count)
    search = BlockSymmetry(fabric, count, classes, fewest=fewest)
    parts, lined_up = search.parts(by_wires=False, largest=limit)
    found = [fitted(count, parts.parts, largest=limit)]
    if count.links(parts.links) > fewest and not lined_up:
        parts, _ = search.parts(by_wires=True, largest=limit)
        found.append(fitted(count, parts.parts, largest=limit))
    if count.links(parts.links) > fewest and wiring.ranks <= MOST_RANKS_IN_FULL:
        found.append(_in_full(count, colours, min(found, key=lambda each: _cost(count, each, limit)), limit))
    return tuple(each.nodes for each in min(found, key=lambda each: _cost(count, each, limit)))


def _kinds_of_links(wiring: Wiring, classes: Integers, count: OrbitCount) -> int:
    """Different (class of tail, class of head, label) of useful links: no group has fewer orbits of them."""
    kinds = np.stack((classes[wiring.tails], classes[wiring.heads], wiring.link_labels))
    return int(np.unique(kinds[:, count.useful], axis=1).shape[1])


def _cost(count: OrbitCount, generators: Sequence[Automorphism], limit: int) -> tuple[int, int]:
    """Orbits of links and ranks, then elements: the less the better."""
    order = group_order([each.nodes for each in generators], limit)
    assert order is not None, "no group beyond the limit is ever chosen"
    return count.rows(generators), order


def _in_full(
    count: OrbitCount, colours: Integers, known: tuple[Automorphism, ...], limit: int
) -> tuple[Automorphism, ...]:
    """A group chosen from all automorphisms, or from as many as are found; what is known where it cannot be better."""
    refinements = REFINED_LINKS // max(1, len(count.useful))
    chain = stabiliser_chain(count.wiring, colours, refinements=refinements)
    small = chain.order is not None and chain.order <= MOST_ELEMENTS
    if not small and count.rows(chain.generators) >= count.rows(known):
        return known
    return best_subgroup(count, [*known, *all_or_some(count.wiring, chain)], largest=limit)
