"""Shortest routes from many ranks at once, through devices that forward.

All searches relax all links together (Bellman 1958) until nothing changes, which takes as many steps as the longest
route has links: few, since other ranks pass nothing on. Among equally long routes the one of fewest links is taken,
then the one whose last device is nearest, then the one whose last device comes first: what Dijkstra's search finds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LONGEST = 1 << 31
"""Largest length of a link."""

_FAR = np.int64(1) << 61
_HOPS = 16
"""Bits in which links are counted below the length."""


def shortest_routes(
    ends: NDArray[np.int64],
    lengths: NDArray[np.int64],
    starts: NDArray[np.int64],
    *,
    ranks: int,
    nodes: int,
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Distances from some ranks to all nodes, and the last links of the routes there.

    Parameters
    ----------
    ends : (links, 2) int64
        Source and destination of every link; no two links join the same nodes.
    lengths : (links,) int64
        Zero or more, up to `LONGEST`.
    starts : (starts,) int64
        Ranks to search from.
    ranks, nodes : int
        Nodes below ``ranks`` are ranks; a route passes only through the others.

    Returns
    -------
    distance : (starts, nodes) int64
        -1 where no route leads.
    via : (starts, nodes) int32
        Number of the link that ends the route to each node; -1 where there is none.

    Examples
    --------
    Ranks 0 and 1, and a switch; the direct link is longer than the way round.

    >>> ends = np.array([[0, 1], [0, 2], [2, 1]])
    >>> found = shortest_routes(ends, np.array([5, 2, 2]), np.array([0]), ranks=2, nodes=3)
    >>> found[0].tolist(), found[1].tolist()
    ([[0, 4, 2]], [[-1, 2, 1]])
    """
    order = np.lexsort((ends[:, 0], ends[:, 1]))
    tails, heads = ends[order].T
    weights = (lengths[order] << _HOPS) + 1
    entered, first = np.unique(heads, return_index=True)
    passes = (tails >= ranks) | (tails == starts[:, None])
    reach = np.full((len(starts), nodes), _FAR)
    reach[np.arange(len(starts)), starts] = 0
    while True:
        through = np.where(passes, reach[:, tails], _FAR) + weights
        nearest = np.minimum.reduceat(through, first, axis=1)
        if not (nearest < reach[:, entered]).any():
            break
        reach[:, entered] = np.minimum(reach[:, entered], nearest)
    none = np.iinfo(np.int64).max
    last = np.where(through == reach[:, heads], reach[:, tails] * nodes + tails, none)
    chosen = np.minimum.reduceat(last, first, axis=1)
    number = order[
        np.minimum(np.searchsorted(heads * nodes + tails, entered * nodes + chosen % nodes), len(order) - 1)
    ]
    via = np.full(reach.shape, -1, dtype=np.int32)
    via[:, entered] = np.where(chosen < none, number, -1)
    return np.where(reach < _FAR, reach >> _HOPS, -1), via
