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


class ShortestRoutes:
    """Searches for routes over one set of links.

    Parameters
    ----------
    ends : (links, 2) int64
        Source and destination of every link; no two links join the same nodes.
    ranks, nodes : int
        Nodes below ``ranks`` are ranks; a route passes only through the others.

    Examples
    --------
    Ranks 0 and 1, and a switch; the direct link is longer than the way round.

    >>> search = ShortestRoutes(np.array([[0, 1], [0, 2], [2, 1]]), ranks=2, nodes=3)
    >>> found = search(np.array([5, 2, 2]), np.array([0]))
    >>> found[0].tolist(), found[1].tolist()
    ([[0, 4, 2]], [[-1, 2, 1]])
    """

    def __init__(self, ends: NDArray[np.int64], *, ranks: int, nodes: int) -> None:
        self._nodes = nodes
        self._order = np.lexsort((ends[:, 0], ends[:, 1]))
        self._tails, self._heads = ends[self._order].T
        self._entered, self._first = np.unique(self._heads, return_index=True)
        self._forwards = self._tails >= ranks
        self._keys = self._heads * nodes + self._tails

    def __call__(
        self, lengths: NDArray[np.int64], starts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Distances from some ranks to all nodes, and the last links of the routes there.

        Parameters
        ----------
        lengths : (links,) int64
            Zero or more, up to `LONGEST`.
        starts : (starts,) int64
            Ranks to search from.

        Returns
        -------
        distance : (starts, nodes) int64
            -1 where no route leads.
        via : (starts, nodes) int32
            Number of the link that ends the route to each node; -1 where there is none.
        """
        nodes, tails, heads = self._nodes, self._tails, self._heads
        entered, first = self._entered, self._first
        weights = (lengths[self._order] << _HOPS) + 1
        passes = self._forwards | (tails == starts[:, None])
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
        place = np.searchsorted(self._keys, entered * nodes + chosen % nodes)
        number = self._order[np.minimum(place, len(self._order) - 1)]
        via = np.full(reach.shape, -1, dtype=np.int32)
        via[:, entered] = np.where(chosen < none, number, -1)
        return np.where(reach < _FAR, reach >> _HOPS, -1), via
