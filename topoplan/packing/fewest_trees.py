"""Fewer trees at the same rate.

Among the corners of the optimal face (`topoplan.simplex.reweighted_vertices`) one with few trees is looked for. Trees
to choose from are the cheapest ones under the certificate's lengths, since no other tree is in any optimal packing. The
search ends early when the number of trees meets a lower bound that the certificate implies.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from topoplan.columns.generation import Generation
from topoplan.columns.pricing import Pricing, length_of
from topoplan.columns.problem import Packing, TreeColumn
from topoplan.simplex.random_numbers import Stream
from topoplan.simplex.reweighted_vertices import WALKS, WORK

POOL = 200
"""Trees to look for, apart from those that the packing already knows."""
STALE = 16
"""Rounds without a new tree after which the search for trees ends."""
_NOISE = 1000


def thin(master: Generation, lengths: list[int]) -> dict[TreeColumn, Fraction]:
    """Weights of an optimal packing with few trees.

    Parameters
    ----------
    master : Generation
        Column generation that has reached the optimal value.
    lengths : list of int, one per row
        Lengths under which every tree of an optimal packing is a cheapest one.

    Returns
    -------
    dict of TreeColumn to Fraction
        Deterministic: the random walks come from a fixed stream.
    """
    best = master.weights()
    least = fewest_possible(master.packing, lengths)
    if len(best) <= least or master.program.work > WORK or master.deadline.over():
        return best
    random = Stream(0)
    master.add(_tight_columns(master, lengths, random))
    return master.fewer_trees(random, least=least, walks=WALKS)


def fewest_possible(packing: Packing, lengths: list[int]) -> int:
    """A number of trees below which no packing can fill every row that has a length.

    With lengths 0 and 1 each optimal tree crosses exactly ``L`` of the rows of length 1, and all of them are full:
    rows / L trees at least.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.plans import Fabric
    >>> fabric = Fabric(topoplan.load("dgx-1v"), ("nvlink",))
    >>> packing = Packing(fabric, "broadcast", 0)
    >>> fewest_possible(packing, [int(link.src == "gpu0") for link in fabric.links])
    4
    """
    positive = [y for y in lengths if y]
    if not positive or len(set(positive)) > 1:
        return packing.owners
    unit = [int(bool(y)) for y in lengths]
    if packing.shared:
        return packing.owners
    crossed = min(length_of(tree, unit) for tree in Pricing(packing).cheapest(unit).values())
    return -(-len(positive) // crossed) if crossed else 1


def _tight_columns(master: Generation, lengths: list[int], random: Stream) -> list[TreeColumn]:
    """Columns that are cheapest under the lengths, found by breaking ties at random."""
    packing, pricing = master.packing, master.pricing
    top = max(lengths)
    # The noise of a whole column must stay below one unit of length.
    unit = _NOISE * 4 * packing.fabric.size * max(arc.hops for arc in packing.fabric.arcs)
    if top * unit >= 1 << 30:
        return []
    cheapest = {place: length_of(tree, lengths) for place, tree in pricing.cheapest(lengths).items()}
    if not packing.shared:
        cheapest = dict.fromkeys(cheapest, min(cheapest.values()))
    found: set[TreeColumn] = set()
    stale = 0
    widths = sorted(set(packing.limits))[-4:]
    for turn in range(-(-POOL // len(packing.roots))):
        # Trees over wide links can carry much: in turn, links narrower than each width come last among equals.
        narrow = np.array(packing.limits) < widths[turn % len(widths)]
        noise = random.whole(len(lengths), _NOISE) + 2 * _NOISE * narrow
        noisy = [y * unit + int(z) for y, z in zip(lengths, noise, strict=True)]
        before = len(found)
        for place, tree in pricing.cheapest(noisy).items():
            if length_of(tree, lengths) == cheapest[place]:
                found.add(tree)
        stale = stale + 1 if len(found) == before else 0
        if stale == STALE or len(found) >= POOL:
            break
    return sorted(found, key=lambda tree: tree.order)
