"""The cheapest composed tree of each root: one tree over every server, joined by a star between local roots.

A composed tree has one local root in each server. One of these is the centre: the others hang on it by one edge each,
and the ranks of a server on its local root. For an allreduce the centre is the root, and both directions use the same
local roots (Blink 3.4, where each of n centres owns 1/n of a partition). A broadcast or allgather has its root where
the data is: its server's tree starts there, and from a gateway, any rank of that tree, the data goes to the centre,
or the gateway is the centre. A reduce or reduce-scatter is the same backwards.

Under additive lengths everything but the centre is chosen server by server, so N centres price all composed trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topoplan.columns.server_trees import ServerTrees
from topoplan.fabric.servers import Servers
from topoplan.trees.hop_constrained_exact import UNREACHABLE

Costs = NDArray[np.int64]
Parents = NDArray[np.int64]


@dataclass(frozen=True)
class Star:
    """Which centre, gateway and local roots a composed tree has.

    Parameters
    ----------
    root, gateway, centre : int
        Ranks; all three the same for an allreduce, the last two where the data starts in the centre's server.
    local : (servers,) int64
        Local root of each server; not used for those of gateway and centre.
    """

    root: int
    gateway: int
    centre: int
    local: NDArray[np.int64]

    def parents(self, trees: ServerTrees) -> Parents:
        """(N,) int64: parent of every rank in the composed tree, -1 for the root."""
        servers = trees.servers
        found = np.full(servers.fabric.size, -1, dtype=np.int64)
        trees.hang(self.root, found)
        if self.centre != self.gateway:
            found[self.centre] = self.gateway
            trees.hang(self.centre, found)
        reached = {int(servers.of_rank[self.root]), int(servers.of_rank[self.centre])}
        for number, local in enumerate(self.local.tolist()):
            if number not in reached:
                found[local] = self.centre
                trees.hang(local, found)
        return found


def paired_stars(
    down: Costs, up: Costs, below: ServerTrees, above: ServerTrees, roots: Sequence[int]
) -> list[Star | None]:
    """The cheapest composed tree from each root for data that runs up and down by the same local roots.

    Parameters
    ----------
    down, up : (N, N) int64
        ``[u, v]`` is the cost of data from parent u to child v, and from child v to parent u.
    below, above : ServerTrees
        Trees for the way down and the way up.
    roots : sequence of int

    Returns
    -------
    list of Star or None
        None where a root reaches no rank of some server.
    """
    joined = _Joined(np.minimum(down + up, UNREACHABLE), below.costs + above.costs, below.servers)
    return [
        Star(root, root, root, joined.local[root]) if joined.total[root] < UNREACHABLE else None
        for root in roots
    ]


def one_way_stars(cost: Costs, trees: ServerTrees, roots: Sequence[int]) -> list[Star | None]:
    """The cheapest composed tree from each root for data that runs one way, perhaps through a gateway."""
    servers = trees.servers
    joined = _Joined(cost, trees.costs, servers)
    found: list[Star | None] = []
    for root in roots:
        home = int(servers.of_rank[root])
        members = servers.members[home]
        inside = servers.of_rank == home
        best = int(members[np.argmin(joined.beyond[members])])
        # A centre elsewhere is reached from a gateway, and does not reach back into the root's server.
        entry = cost[members].min(axis=0)
        elsewhere = joined.beyond - joined.cheapest[:, home] + entry + trees.costs
        elsewhere[inside] = len(servers.names) * UNREACHABLE
        centre = int(np.argmin(elsewhere))
        if elsewhere[centre] < joined.beyond[best]:
            gateway = int(members[np.argmin(cost[members, centre])])
            star, total = Star(root, gateway, centre, joined.local[centre]), elsewhere[centre]
        else:
            star, total = Star(root, best, best, joined.local[best]), joined.beyond[best]
        found.append(star if total + trees.costs[root] < UNREACHABLE else None)
    return found


class _Joined:
    """For every centre and server: the cheapest local root there, with its tree, and the sums over servers."""

    def __init__(self, near: Costs, trees: Costs, servers: Servers) -> None:
        shape = (len(trees), len(servers.names))
        every, places = np.arange(len(trees)), _places(servers)
        self.cheapest = np.zeros(shape, dtype=np.int64)
        self.local = np.zeros(shape, dtype=np.int64)
        for number, members in enumerate(servers.members):
            costs = near[:, members] + trees[members]
            # Of equals the one at the centre's own place: rails join equal places, and centres spread by themselves.
            order = (np.arange(len(members)) + places[:, None]) % len(members)
            turned = np.take_along_axis(costs, order, axis=1)
            chosen = np.take_along_axis(order, turned.argmin(axis=1)[:, None], axis=1)[:, 0]
            self.cheapest[:, number] = costs[every, chosen]
            self.local[:, number] = members[chosen]
        self.cheapest[every, servers.of_rank] = 0
        self.beyond: Costs = self.cheapest.sum(axis=1)
        self.total: Costs = self.beyond + trees


def _places(servers: Servers) -> NDArray[np.int64]:
    """(N,) int64: place of every rank among those of its server."""
    places = np.zeros(servers.fabric.size, dtype=np.int64)
    for members in servers.members:
        places[members] = np.arange(len(members))
    return places
