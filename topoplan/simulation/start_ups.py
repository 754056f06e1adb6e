"""Start-ups that queue: from one rank to another, a route starts one copy at a time on each of its wires.

Several shards whose trees share a route therefore pay one alpha after another there, as one shard cut into as
many chunks does; while one copy starts, others still move. Without this rule a forest of many trees would
start all of them at once, and dividing a tree's shard would hide its start-ups.

Of a compact plan the hops are those of templates. Images spread a hop evenly over the images of its route: with |T|
images of the template and |R| of the route, each of these starts |T| / |R| copies of it. For example, the star 0>1, 0>2
and its image 0>1, 0>3 under the swap of ranks 2 and 3: |T| = 2; the hop 0>1 has one route, which starts two copies, and
the hop 0>2 has two, 0>2 and 0>3, of one copy each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topoplan.plans.symmetric_shards import ImageShards
from topoplan.simulation.dataflow import Dataflow, Hop

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Starters:
    """Hops grouped by the route that starts them.

    Parameters
    ----------
    route : tuple of int
        For every hop, the number of its route.
    wires : tuple of int
        For every route, how many copies it can start at once: the wires of its narrowest link.
    copies : tuple of float
        For every hop, how many it stands for on one route.
    """

    route: tuple[int, ...]
    wires: tuple[int, ...]
    copies: tuple[float, ...]

    def longest(self, before: Floats, starting: Floats, after: Floats) -> Floats:
        """How long the route of every hop takes to start all its copies.

        Parameters
        ----------
        before, starting, after : (F, C) float64
            Seconds of every hop: until its first start-up can begin, in all its start-ups, and from the end of its
            last one.

        Returns
        -------
        (F, C) float64
            No order is faster: a route begins after the least ``before`` and ends with the least ``after``.
        """
        order, first = self._grouped()
        wires = np.array(self.wires, dtype=np.float64)[:, None]
        every = starting * np.array(self.copies, dtype=np.float64)[:, None]
        busy = np.add.reduceat(every[order], first, axis=0) / wires
        earliest, latest = (np.minimum.reduceat(time[order], first, axis=0) for time in (before, after))
        longest: Floats = (earliest + busy + latest)[list(self.route)]
        return longest

    def _grouped(self) -> tuple[Indices, Indices]:
        """The hops in the order of their routes, and where each route begins."""
        route = np.array(self.route, dtype=np.int64)
        order = np.argsort(route, kind="stable")
        return order, np.searchsorted(route[order], np.arange(len(self.wires)))


def starters(flow: Dataflow) -> Starters:
    """The routes of a dataflow and the hops on each.

    Examples
    --------
    DGX-2, one hop: two ranks share a reduce and a broadcast, each on a route of its own direction.

    >>> import topoplan
    >>> from topoplan.simulation.dataflow import dataflow
    >>> found = starters(dataflow(topoplan.plan(topoplan.load("dgx-2"), "allreduce")))
    >>> len(found.route), len(found.wires), found.route.count(0)
    (480, 240, 2)
    """
    links = flow.fabric.links
    if flow.images is None:
        keys: list[tuple[object, ...]] = [(hop.src, hop.dst, hop.links) for hop in flow.hops]
        copies = [1.0] * len(keys)
    else:
        found = _route_orbits(flow, flow.images)
        keys = [(nodes, tuple(links[link].channel for link in hop.links)) for hop, (nodes, _) in found]
        copies = [flow.counts[hop.shard] / size for hop, (_, size) in found]
    number: dict[tuple[object, ...], int] = {}
    route = tuple(number.setdefault(key, len(number)) for key in keys)
    narrowest = {
        at: min(links[link].count for link in hop.links) for at, hop in zip(route, flow.hops, strict=True)
    }
    return Starters(route, tuple(narrowest[at] for at in range(len(number))), tuple(copies))


def _route_orbits(flow: Dataflow, images: ImageShards) -> list[tuple[Hop, tuple[tuple[int, ...], int]]]:
    """Every hop with the least image of its route, as nodes from the first rank of an orbit on, and their number."""
    elements, ends = images.elements, flow.fabric.ends
    to_first: dict[int, Indices] = {}
    found = []
    for hop in flow.hops:
        if hop.src not in to_first:
            image = elements[:, hop.src]
            to_first[hop.src] = np.flatnonzero(image == image.min())
        route = [hop.src, *(ends[link][1] for link in hop.links)]
        distinct = {tuple(row) for row in elements[to_first[hop.src]][:, route].tolist()}
        size = len(elements) // len(to_first[hop.src]) * len(distinct)
        found.append((hop, (min(distinct), size)))
    return found
