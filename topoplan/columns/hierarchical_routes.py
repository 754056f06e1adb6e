"""Shortest routes of composed trees: between ranks of one server inside it, between servers by any way."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from topoplan.fabric.servers import Servers
from topoplan.trees.hop_constrained_exact import UNREACHABLE
from topoplan.trees.route_table import Orbits, RouteTable


@dataclass(frozen=True)
class ServerRoutes:
    """Routes under one length for every orbit of links, of which none between ranks of one server leaves it.

    Parameters
    ----------
    orbits : Orbits
        Of symmetries that keep servers together (see `Servers.keeps`).
    servers : Servers
    lengths : tuple of int, one per row
        Zero or more, and far below `UNREACHABLE`.
    """

    orbits: Orbits
    servers: Servers
    lengths: tuple[int, ...]

    @cached_property
    def _across(self) -> RouteTable:
        return RouteTable(self.orbits, self.lengths)

    @cached_property
    def _inside(self) -> RouteTable:
        """Routes that pay so much for leaving a server that it counts as no way."""
        lengths = np.array(self.lengths, dtype=np.int64)
        lengths[self.orbits.row_of_link[self.servers.crossing]] = UNREACHABLE
        return RouteTable(self.orbits, tuple(lengths.tolist()))

    def cost(self) -> NDArray[np.int64]:
        """(N, N) int64: distance from rank to rank; `UNREACHABLE` where there is no way."""
        inside = np.minimum(self._inside.cost, UNREACHABLE)
        return np.where(self.servers.same, inside, self._across.cost)

    def usage(self, tails: NDArray[np.int64], heads: NDArray[np.int64]) -> NDArray[np.int64]:
        """(rows,) int64: how often the routes from the tails to the heads cross each orbit of links together."""
        same = self.servers.same[tails, heads]
        inside = self._inside.usage(tails[same], heads[same])
        return np.asarray(inside + self._across.usage(tails[~same], heads[~same]))

    def route(self, tail: int, head: int) -> tuple[int, ...]:
        """Links of the route between two ranks, as numbers of the fabric's links."""
        table = self._inside if self.servers.same[tail, head] else self._across
        return table.route(tail, head)
