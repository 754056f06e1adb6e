"""Bounds from the cuts around single ranks, servers and pods alone, for machines on which flows take too long.

Where no two ranks look alike the best cut takes a flow to each of them. On clusters it is nearly always around one
rank, one server or one pod, so only these are looked at: `nested_blocks`. For an allreduce the links into all blocks of
a level together may prove less than any cut: k groups of ranks, and every byte enters k - 1 of them, twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

from topoplan.bounds.cuts_and_partitions import best_bound
from topoplan.errors import PlanError
from topoplan.fabric.fabric import Fabric
from topoplan.fabric.labelled_graph import wiring_of
from topoplan.plans.certificates import Cut, Lengths, OneFabric
from topoplan.symmetry.hierarchy import nested_blocks

MOST_FLOWS = 64
"""Ranks of which no two look alike, up to which flows are made for all of them."""


def quick_bound(fabric: Fabric, collective: str, root: int | None = None) -> OneFabric:
    """The certificate of the lowest bound that blocks prove; of few ranks, or where none does, that flows prove too.

    Parameters
    ----------
    fabric : Fabric
        At least two connected ranks.
    collective : str
    root : int or None
        Root rank of a broadcast or reduce.

    Examples
    --------
    >>> import topoplan
    >>> fabric = Fabric(topoplan.nvswitch_cluster(16), ("nvlink", "network"))
    >>> for collective in ("allgather", "allreduce"):
    ...     print(collective, float(quick_bound(fabric, collective).bound(fabric, collective, None)))
    allgather 213.33333333333334
    allreduce 106.66666666666667
    """
    found: list[tuple[Fraction, OneFabric]] = []
    for candidate in _candidates(fabric, collective, root):
        try:
            found.append((candidate.bound(fabric, collective, root), candidate))
        except PlanError:
            # Lengths prove nothing past a switch that copies or adds, nor a cut without a rank on either side.
            continue
    if fabric.size <= MOST_FLOWS or not found:
        flows = best_bound(fabric, collective, root)
        found.append((flows.bound(fabric, collective, root), flows))
    return min(found, key=lambda each: each[0])[1]


def _candidates(fabric: Fabric, collective: str, root: int | None) -> Iterator[OneFabric]:
    for level in nested_blocks(fabric, wiring_of(fabric)):
        ranks_in = Counter(level[: fabric.size].tolist())
        for entering in (True, False) if len(ranks_in) > 1 else ():
            blocks = _tightened(fabric, level.tolist(), entering)
            crossing = dict.fromkeys(ranks_in, Fraction(0))
            crossed = []
            for link, (src, dst), capacity in zip(fabric.links, fabric.ends, fabric.capacity, strict=True):
                block = blocks[dst if entering else src]
                if blocks[src] != blocks[dst] and block in crossing:
                    crossing[block] += capacity
                    crossed.append((link.src, link.dst, Fraction(1)))
            rates = {
                block: capacity / (fabric.size - ranks_in[block]) for block, capacity in crossing.items()
            }
            tightest = min(rates, key=rates.__getitem__)
            yield _cut(fabric, {node for node, block in enumerate(blocks) if block == tightest}, holds=root)
            if collective == "allreduce":
                yield Lengths(tuple(crossed))


def _tightened(fabric: Fabric, blocks: list[int], entering: bool) -> list[int]:
    """The blocks without the devices at their borders through which more comes from outside than goes on inside.

    A NIC with a wide cable and a narrow slot is left out of its server: the cut then runs through the slot.
    """
    while True:
        outside = [Fraction(0)] * len(blocks)
        inside = [Fraction(0)] * len(blocks)
        for (src, dst), capacity in zip(fabric.ends, fabric.capacity, strict=True):
            near, far = (dst, src) if entering else (src, dst)
            if blocks[near] != blocks[far]:
                outside[near] += capacity
            else:
                inside[far] += capacity
        loose = [
            node
            for node in range(fabric.size, len(blocks))
            if blocks[node] >= 0 and outside[node] > inside[node]
        ]
        if not loose:
            return blocks
        for node in loose:
            blocks[node] = -1


def _cut(fabric: Fabric, part: set[int], *, holds: int | None) -> Cut:
    """The cut between a part and the rest, named by the side of the root; without one, by the rest."""
    return Cut(tuple(name for node, name in enumerate(fabric.nodes) if (node in part) == (holds in part)))
