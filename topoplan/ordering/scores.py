"""Many orders judged at once: the loads of all hops between some places as one table, summed along each order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from topoplan.ordering.hop_loads import HopLoads, tree_edges
from topoplan.ordering.server_ways import Loads

DIGITS = 9
"""Rates are compared after rounding, so that the last bits of a sum decide nothing."""

Floats = NDArray[np.float64]
Places = NDArray[np.int64]


class HopTable:
    """Hops between some places, over the links that differ: what a byte costs on each, in seconds per GB.

    Parameters
    ----------
    rows : N x N loads
        Of the hop from place i to place j; the diagonal is not looked at.
    homes : sequence of int
        Server of every place.
    extra : loads or None
        What is on the links besides.
    """

    def __init__(
        self,
        hops: HopLoads,
        rows: Sequence[Sequence[Loads | None]],
        homes: Sequence[int],
        extra: Loads | None = None,
    ) -> None:
        size = len(rows)
        self.homes = np.array(homes, dtype=np.int64)
        self.apart: Floats = np.asarray(self.homes[:, None] != self.homes[None, :], dtype=np.float64)
        self.missing: Floats = np.eye(size)
        self.switched: Floats = np.zeros((size, size))
        used = sorted({n for row in rows for loads in row if loads for n in loads} | set(extra or {}))
        column = {number: place for place, number in enumerate(used)}
        table = np.zeros((size * size + 1, len(used)))
        for tail, head in permutations(range(size), 2):
            loads = rows[tail][head]
            self.missing[tail, head] = loads is None
            for number, part in (loads or {}).items():
                table[tail * size + head, column[number]] = float(part / hops.capacity[number])
                self.switched[tail, head] += float(part) * (number in hops.ways.between_switches)
        for number, part in (extra or {}).items():
            table[-1, column[number]] = float(part / hops.capacity[number])
        distinct: Floats = np.unique(table, axis=1)
        self.seconds: Floats = distinct[:-1].reshape(size, size, distinct.shape[1])
        self.extra: Floats = distinct[-1]

    @property
    def content(self) -> bytes:
        """What orders of the places are judged by."""
        return b"".join(part.tobytes() for part in (self.seconds, self.extra, self.missing))

    def scores(self, orders: Places, *, closed: bool = True, tree: bool = False) -> Floats:
        """(orders, 7): missing hops, fullest link of ring and of tree, hops between servers, between switches, …

        Then whether the last hop back to the first place stays near, where servers on one leaf would not stand side by
        side in the list, and the squares of all loads, least where these are even: they lead past equal orders.

        Of an open ring the hop from the last place to the first is left out.
        """
        count, size = orders.shape
        total = np.tile(self.extra, (count, 1))
        missing, apart, switched = np.zeros((3, count))
        for place in range(size if closed else size - 1):
            hop = orders[:, place], orders[:, (place + 1) % size]
            total += self.seconds[hop]
            missing += self.missing[hop]
            apart += self.apart[hop]
            switched += self.switched[hop]
        worst = total.max(axis=1, initial=0.0)
        trees = self._trees(orders) if tree else np.zeros(count)
        back = orders[:, -1], orders[:, 0]
        return np.stack(
            [
                missing,
                _rounded(worst),
                trees,
                apart,
                _rounded(switched),
                -np.sign(self.apart[back]) - np.sign(self.switched[back]),
                _rounded((total**2).sum(axis=1)),
            ],
            axis=1,
        )

    def _trees(self, orders: Places) -> Floats:
        """Seconds per GB on the fullest link of the double binary tree, servers in the order of their first places."""
        count = len(orders)
        homes = self.homes[orders]
        total = np.zeros((count, self.seconds.shape[2]))
        first = []
        for server in sorted(set(self.homes.tolist())):
            here = homes == server
            first.append(here.argmax(axis=1))
            inside = orders[here].reshape(count, -1)
            ranks = inside.shape[1]
            for place in range(ranks if ranks > 1 else 0):
                tail, head = inside[:, place], inside[:, (place + 1) % ranks]
                total += (self.seconds[tail, head] + self.seconds[head, tail]) * (ranks - 1) / ranks
        doors = np.take_along_axis(orders, np.sort(np.stack(first, axis=1), axis=1), axis=1)
        for one, other in tree_edges(doors.shape[1]):
            tail, head = doors[:, one], doors[:, other]
            total += (self.seconds[tail, head] + self.seconds[head, tail]) / 2
        return _rounded(total.max(axis=1, initial=0.0))


def _rounded(values: Floats) -> Floats:
    """To some digits, whatever the size of the numbers: the last bits of a sum decide nothing."""
    scale = 10.0 ** np.floor(np.log10(np.where(values > 0, values, 1.0)))
    return np.asarray(np.round(values / scale, DIGITS) * scale, dtype=np.float64)


def least(scores: Floats, orders: Places) -> int:
    """The best score, among equals the first order in the order of places."""
    keys = (*orders.T[::-1], *scores.T[::-1])
    return int(np.lexsort(keys)[0])
