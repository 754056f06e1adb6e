"""Forests for machines whose GPUs all hang on one switch (Blink 3.5, for DGX-2).

- allreduce, allgather, reduce-scatter: one star per rank, height 1, 1/N of the buffer each.
- broadcast, reduce: N - 1 trees of height 2: the root hands a different part to every other rank, which copies it to
  the rest. A star of height 1 would send N - 1 copies out of the root's one port.

With equal ports these reach the optimum: 2 (N - 1) / N of the buffer leaves every port in an allreduce, (N - 1) / N
in an allgather, all of it once in a broadcast. The planner checks that against the bound and keeps them only then.
"""

from __future__ import annotations

from fractions import Fraction

from topoplan.columns.problem import Packing, TreeColumn
from topoplan.fabric.fabric import Fabric


def on_one_switch(fabric: Fabric) -> bool:
    """True where every pair of ranks has exactly one route, of two links, and all meet at one switch."""
    if len(fabric.nodes) != fabric.size + 1 or fabric.size < 3:
        return False
    pairs = fabric.size * (fabric.size - 1)
    return len(fabric.arcs) == pairs and all(len(arc.links) == 2 for arc in fabric.arcs)


def one_hop_forest(packing: Packing) -> dict[TreeColumn, Fraction]:
    """Equal weights for the stars, or for the two-level trees of a broadcast or reduce.

    Parameters
    ----------
    packing : Packing
        On a fabric that is `on_one_switch`.

    Examples
    --------
    >>> import topoplan
    >>> from topoplan.plans import Fabric
    >>> packing = Packing(Fabric(topoplan.load("dgx-2"), ("nvlink",)), "allreduce", None)
    >>> forest = one_hop_forest(packing)
    >>> len(forest), {column.height for column in forest}
    (16, {1})
    """
    size = packing.fabric.size
    ranks = range(size)
    if packing.root is None:
        parents = [{child: root for child in ranks if child != root} for root in ranks]
        roots = list(ranks)
    else:
        roots = [packing.root] * (size - 1)
        parents = []
        for hub in ranks:
            if hub != packing.root:
                below = {child: hub for child in ranks if child not in (hub, packing.root)}
                parents.append({hub: packing.root, **below})
    routes = packing.routes([1] * len(packing.limits))
    forest = {}
    for root, parent in zip(roots, parents, strict=True):
        tree = [parent.get(child, -1) for child in ranks]
        up, down = (tree if packing.uses(op) else [] for op in ("reduce", "broadcast"))
        forest[packing.tree(root, up, down, routes)] = Fraction(1)
    return forest
