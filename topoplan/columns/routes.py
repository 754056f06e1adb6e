"""The routes that trees of a packing may take: those that are listed, and those that lengths ask for.

A table of the rows that known routes cross gives their costs. Where the fabric leaves some out, and the known ones
bring no better tree, shortest routes are searched under the same lengths, and one that is shorter than all known of its
pair becomes known: column generation once more, one floor below the trees. Lengths prove a bound only after such a
search.
"""

from __future__ import annotations

from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from topoplan.fabric.fabric import Arc, Fabric
from topoplan.trees.shortest_paths import LONGEST, shortest_routes

Number = TypeVar("Number", np.int64, np.float64)


class KnownRoutes:
    """Known routes in ascending order, so that those of a pair of ranks stand together.

    Parameters
    ----------
    fabric : Fabric
    row_of_link : (links,) int64
        Row of the packing program of every link.

    Examples
    --------
    Two servers with eight NICs that serve all GPUs have 64 routes between two GPUs. With lengths on all NICs but the
    last the shortest route is none of those that are listed.

    >>> import topoplan
    >>> machine = topoplan.Server(topoplan.load("dgx-a100"), count=2, gpus=[0])
    >>> fabric = Fabric(topoplan.cluster([machine], nic_gbps=200, nic_access="direct"), ("nvlink", "network"))
    >>> routes = KnownRoutes(fabric, np.arange(len(fabric.links)))
    >>> lengths = np.array([int("nic7" not in link.src + link.dst) for link in fabric.links])
    >>> len(routes.arcs), routes.learn(lengths), len(routes.arcs), routes.learn(lengths)
    (32, True, 34, False)
    """

    def __init__(self, fabric: Fabric, row_of_link: NDArray[np.int64]) -> None:
        self._fabric = fabric
        self._row_of_link = row_of_link
        self._ends = np.array(fabric.ends, dtype=np.int64)
        self.arcs: tuple[Arc, ...]
        self.pairs: NDArray[np.int64]
        self.starts: NDArray[np.int64]
        self._take(fabric.arcs)

    def costs(self, lengths: NDArray[Number]) -> NDArray[Number]:
        """(arcs,) cost of every known route under lengths of the rows, whole numbers up to `LONGEST` or floats."""
        table = self.crossings if lengths.dtype.kind == "i" else self._crossings_as_floats
        return np.asarray(table @ lengths, dtype=lengths.dtype)

    def between(self, tail: int, head: int) -> range:
        """Places in `arcs` of the routes from one rank to another."""
        return self._places[tail, head]

    def _take(self, arcs: tuple[Arc, ...]) -> None:
        self.arcs = arcs
        self.crossings: NDArray[np.int64] = np.zeros(
            (len(arcs), int(self._row_of_link.max()) + 1), dtype=np.int64
        )
        crossed = np.array([link for arc in arcs for link in arc.links], dtype=np.int64)
        places = np.repeat(np.arange(len(arcs)), [arc.hops for arc in arcs])
        np.add.at(self.crossings, (places, self._row_of_link[crossed]), 1)
        self._places: dict[tuple[int, int], range] = {}
        for place, arc in enumerate(arcs):
            pair = arc.tail, arc.head
            self._places[pair] = range(self._places.get(pair, range(place, place)).start, place + 1)
        self.pairs = np.array(list(self._places), dtype=np.int64).reshape(-1, 2).T
        self.starts = np.array([places.start for places in self._places.values()])
        self.__dict__.pop("_crossings_as_floats", None)

    @cached_property
    def _crossings_as_floats(self) -> NDArray[np.float64]:
        return self.crossings.astype(np.float64)

    def learn(self, lengths: NDArray[np.int64] | NDArray[np.float64]) -> bool:
        """Make the shortest routes known that are shorter than all known ones; False where there are none.

        Floats are compared as whole numbers, 2^31 being the longest way between two ranks.
        """
        fabric = self._fabric
        if fabric.lists_every_route:
            return False
        if lengths.dtype.kind == "i":
            whole = lengths.astype(np.int64)
        else:
            farthest = np.minimum.reduceat(self._crossings_as_floats @ lengths, self.starts).max()
            # A longer link is on no shorter route, and the others lose little as whole numbers.
            whole = np.rint(np.minimum(lengths / farthest, 1) * LONGEST).astype(np.int64)
        distance: NDArray[np.int64]
        via: NDArray[np.int32]
        distance, via = shortest_routes(
            self._ends,
            whole[self._row_of_link],
            np.arange(fabric.size),
            ranks=fabric.size,
            nodes=len(fabric.nodes),
        )
        tails, heads = self.pairs
        known = np.minimum.reduceat(self.crossings @ whole, self.starts)
        shorter = np.flatnonzero(distance[tails, heads] < known)
        if not shorter.size:
            return False
        found = [self._found(via[tails[i]], int(heads[i])) for i in shorter.tolist()]
        self._take(tuple(sorted([*self.arcs, *found])))
        return True

    def _found(self, last: NDArray[np.int32], head: int) -> Arc:
        """The route to a rank, from the last link of the routes to every node."""
        path: list[int] = []
        node = head
        while last[node] >= 0:
            path.append(int(last[node]))
            node = self._fabric.ends[path[-1]][0]
        return self._fabric.arc(tuple(reversed(path)))
