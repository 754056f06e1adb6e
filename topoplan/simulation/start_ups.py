"""Start-ups that queue: from one rank to another, a route starts one copy at a time on each of its wires.

Several shards whose trees share a route therefore pay one alpha after another there, as one shard cut into as
many chunks does; while one copy starts, others still move. Without this rule a forest of many trees would
start all of them at once, and dividing a tree's shard would hide its start-ups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from topoplan.simulation.dataflow import Dataflow
from topoplan.simulation.levels import Floats, Indices


@dataclass(frozen=True, slots=True)
class Starters:
    """Hops grouped by the route that starts them.

    Parameters
    ----------
    route : tuple of int
        For every hop, the number of its route.
    wires : tuple of int
        For every route, how many copies it can start at once: the wires of its narrowest link.
    """

    route: tuple[int, ...]
    wires: tuple[int, ...]

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
        busy = np.add.reduceat(starting[order], first, axis=0) / wires
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
    number: dict[tuple[int, int, tuple[int, ...]], int] = {}
    route = tuple(number.setdefault((hop.src, hop.dst, hop.links), len(number)) for hop in flow.hops)
    links = flow.fabric.links
    return Starters(route, tuple(min(links[link].count for link in path) for _, _, path in number))
