"""The cheapest tree over each server from each of its ranks: the first and the last of three phases.

Without a limit on the height by Chu-Liu and Edmonds; with one by the exact tables of `hop_constrained_exact`, or for
servers with more GPUs than these take by the search of `hop_constrained_search`. Servers with equal costs are worked
out once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from topoplan.fabric.servers import Servers
from topoplan.trees.arborescence import cheapest_arborescence
from topoplan.trees.hop_constrained_exact import LARGEST, UNREACHABLE, HopLimitedTrees
from topoplan.trees.hop_constrained_search import low_arborescences

Parents = list[int]
"""Parent of every rank of a server, as places among its ranks; -1 for the root."""


@dataclass(frozen=True)
class ServerTrees:
    """Trees over servers.

    Parameters
    ----------
    servers : Servers
    costs : (N,) int64
        Cost of the tree over its server from each rank; `UNREACHABLE` where there is none.
    tree_of : one callable per server
        Parents in the tree from the rank at a place of the server.
    """

    servers: Servers
    costs: NDArray[np.int64]
    tree_of: tuple[Callable[[int], Parents], ...]

    def hang(self, root: int, parents: NDArray[np.int64]) -> None:
        """Enter the tree over a rank's server from this rank into the parents of all ranks, but for the rank's own."""
        number = int(self.servers.of_rank[root])
        members = self.servers.members[number]
        place = int(np.searchsorted(members, root))
        for child, parent in enumerate(self.tree_of[number](place)):
            if child != place:
                parents[members[child]] = members[parent]


def server_trees(cost: NDArray[np.int64], servers: Servers, height: int | None) -> ServerTrees:
    """The cheapest trees over all servers.

    Parameters
    ----------
    cost : (N, N) int64
        ``cost[u, v]`` of hanging v below u; `UNREACHABLE` where that cannot be.
    servers : Servers
    height : int or None
        Most edges on a path inside a server.
    """
    costs = np.zeros(servers.fabric.size, dtype=np.int64)
    known: dict[bytes, tuple[NDArray[np.int64], Callable[[int], Parents]]] = {}
    tree_of = []
    for members in servers.members:
        table = cost[np.ix_(members, members)]
        np.fill_diagonal(table, UNREACHABLE)
        key = table.tobytes()
        if key not in known:
            known[key] = _trees(table, height)
        costs[members], trees = known[key]
        tree_of.append(trees)
    return ServerTrees(servers, np.minimum(costs, UNREACHABLE), tuple(tree_of))


def _trees(cost: NDArray[np.int64], height: int | None) -> tuple[NDArray[np.int64], Callable[[int], Parents]]:
    size = len(cost)
    if size == 1:
        return np.zeros(1, dtype=np.int64), lambda place: [-1]
    if height is not None and size <= LARGEST:
        tables = HopLimitedTrees(cost, height)
        return tables.costs, tables.parents
    if height is not None:
        found = low_arborescences(cost, range(size), height)
    else:
        by_head = cost.T.tolist()
        found = [cheapest_arborescence(by_head, place) for place in range(size)]
    trees = [tree or [-1] * size for tree in found]
    sums = [_sum(cost, tree) if tree else int(UNREACHABLE) for tree in found]
    return np.array(sums, dtype=np.int64), trees.__getitem__


def _sum(cost: NDArray[np.int64], parents: Parents) -> int:
    return sum(int(cost[parent, child]) for child, parent in enumerate(parents) if parent >= 0)
