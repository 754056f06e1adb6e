"""Column generation over composed trees, and the same with the aim to leave NICs evenly free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import gcd

from topoplan.columns.generation import Generation
from topoplan.columns.hierarchical_routes import ServerRoutes
from topoplan.columns.hierarchical_trees import one_way_stars, paired_stars
from topoplan.columns.pricing import Pricing, rounded
from topoplan.columns.problem import TreeColumn
from topoplan.columns.server_trees import server_trees
from topoplan.fabric.servers import Servers

_LARGEST_PART = 1 << 31


@dataclass(frozen=True)
class ComposedPricing(Pricing):
    """The cheapest composed trees; ``height`` limits the trees inside servers.

    Unlimited trees, and limited ones in servers of up to `hop_constrained_exact.LARGEST` GPUs, are priced exactly.
    """

    servers: Servers = field(kw_only=True)

    @property
    def efforts(self) -> tuple[int, ...]:
        """One: trees inside servers are looked for in one way."""
        return (0,)

    def cheapest(self, lengths: Sequence[int], effort: int = 0) -> dict[int, TreeColumn]:
        """A cheapest composed tree of every root that has one, by the place of the root."""
        packing = self.packing
        routes = ServerRoutes(packing.orbits, self.servers, rounded(lengths))
        down = routes.cost()
        up = down.T
        below = server_trees(down, self.servers, self.height) if packing.uses("broadcast") else None
        above = server_trees(up, self.servers, self.height) if packing.uses("reduce") else None
        if below and above:
            stars = paired_stars(down, up, below, above, packing.roots)
        elif below:
            stars = one_way_stars(down, below, packing.roots)
        else:
            assert above is not None, "every collective has a stage"
            stars = one_way_stars(up, above, packing.roots)
        return {
            place: packing.tree(
                star.root,
                star.parents(above).tolist() if above else (),
                star.parents(below).tolist() if below else (),
                routes,
            )
            for place, star in enumerate(stars)
            if star is not None
        }


@dataclass
class EvenGeneration(Generation):
    """Column generation with one more column for each group of ports: bandwidth that all of them have to spare.

    A port takes part in proportion to its capacity. The objective is ``gain`` x rate + the sum of what is spare.
    """

    ports: tuple[tuple[int, ...], ...] = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        columns = []
        for rows in self.ports:
            column = [0] * self.program.rows
            for row, part in zip(rows, self._parts(rows), strict=True):
                column[row] = part
            columns.append(column)
        self.program.add(columns, [1] * len(columns))
        self.offset += len(columns)

    @property
    def value(self) -> Fraction:
        """Rate of the packing in units of the packing's scale, without what is spare."""
        solution = self.program.solution()
        if self.packing.shared:
            return solution.get(0, Fraction(0)) * self.packing.owners
        return sum((x for j, x in solution.items() if j >= self.offset), Fraction(0))

    def _parts(self, rows: tuple[int, ...]) -> list[int]:
        """Capacities of some rows without common divisor; rounded where they would be huge."""
        limits = [self.packing.limits[row] for row in rows]
        common = max(gcd(*limits), -(-max(limits) // _LARGEST_PART))
        return [max(1, limit // common) for limit in limits]


def port_groups(servers: Servers, row_of_link: list[int]) -> tuple[tuple[int, ...], ...]:
    """Rows of the links that leave, and of those that enter, each server; only groups of several rows."""
    found: dict[tuple[str, str], set[int]] = {}
    for row, (src, dst) in zip(row_of_link, servers.ends, strict=True):
        if src != dst:
            found.setdefault(("out of", src), set()).add(row)
            found.setdefault(("into", dst), set()).add(row)
    groups = {tuple(sorted(rows)) for (_, server), rows in found.items() if server in servers.names}
    return tuple(sorted(group for group in groups if len(group) > 1))
