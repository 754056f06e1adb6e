"""Fewer trees at the same rate.

Among the corners of the optimal face (`topoplan.simplex.reweighted_vertices`) one with few trees is looked for. Trees
to choose from are the cheapest ones under the certificate's lengths, since no other tree is in any optimal packing. The
search ends early when the number of trees meets a lower bound that the certificate implies.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from topoplan.columns.generation import ColumnGeneration
from topoplan.columns.pricing import Oracle
from topoplan.columns.problem import Packing, TreeColumn
from topoplan.simplex.random_numbers import Stream
from topoplan.simplex.reweighted_vertices import WORK, cheapest_corner

POOL = 200
"""Trees to look for, apart from those that the packing already knows."""
STALE = 16
"""Rounds without a new tree after which the search for trees ends."""
_NOISE = 1000


def thin(master: ColumnGeneration, lengths: list[int]) -> dict[TreeColumn, Fraction]:
    """Weights of an optimal packing with few trees.

    Parameters
    ----------
    master : ColumnGeneration
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
    found = cheapest_corner(
        master.program, random, offset=master.offset, least=least, cost=len, deadline=master.deadline
    )
    if found is None or len(found) >= len(best):
        return best
    return {master.columns[j - master.offset]: weight for j, weight in found.items()}


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
        return packing.groups
    unit = [int(bool(y)) for y in lengths]
    found = Oracle(packing).cheapest(unit)
    if packing.groups > 1:
        return packing.groups
    crossed = min(length for length, _ in found.values())
    return -(-len(positive) // crossed) if crossed else 1


def _tight_columns(master: ColumnGeneration, lengths: list[int], random: Stream) -> list[TreeColumn]:
    """Columns that are cheapest under the lengths, found by breaking ties at random."""
    packing = master.packing
    top = max(lengths)
    # The noise of a whole column must stay below one unit of length.
    unit = _NOISE * 4 * packing.fabric.size * max(arc.hops for arc in packing.routes.arcs)
    if top * unit >= 1 << 30:
        return []
    cheapest = {root: length for root, (length, _) in master.oracle.cheapest(lengths, master.height).items()}
    if packing.groups == 1:
        cheapest = dict.fromkeys(cheapest, min(cheapest.values()))
    found: set[TreeColumn] = set()
    stale = 0
    widths = sorted(set(packing.limits.tolist()))[-4:]
    for turn in range(-(-POOL // len(packing.roots))):
        # Trees over wide links can carry much: in turn, links narrower than each width come last among equals.
        narrow = np.array(packing.limits < widths[turn % len(widths)], dtype=np.int64)
        noise = random.whole(len(lengths), _NOISE) + 2 * _NOISE * narrow
        noisy = [y * unit + int(z) for y, z in zip(lengths, noise, strict=True)]
        before = len(found)
        for root, (_, column) in master.oracle.cheapest(noisy, master.height).items():
            length = int(packing.usage(column) @ np.array(lengths, dtype=np.int64))
            if length == cheapest[root]:
                found.add(column)
        stale = stale + 1 if len(found) == before else 0
        if stale == STALE or len(found) >= POOL:
            break
    return sorted(found)
