"""Schedules dimension by dimension: BML and HiPS on BCubes and tori, two levels of parameter servers on clusters.

Ranks are points of a grid, a digit for each dimension. A tree of the schedule leads every rank to the root by setting
one digit after another to the root's, up to reduce and down to broadcast. How a digit is set is the level's kind:

- ``mesh``: in one hop; each of the ranks that differ there gets a piece from all others.
- ``ring``: step by step along the ring of that dimension, half of the buffer each way round.
- ``ps``: in one hop to the first rank of the dimension, which alone is a root there, as a parameter server is.

Trees that start at different dimensions run side by side, so that all ports are busy: BML has ``mesh`` in every
dimension (Wang et al., NeurIPS 2018), HiPS takes a kind for each (Geng et al., 2018).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import product
from math import prod

from topoplan.bounds.cuts_and_partitions import best_bound
from topoplan.errors import InfeasibleError, UsageError
from topoplan.fabric.fabric import Fabric
from topoplan.fabric.servers import Servers
from topoplan.plans.allocation import Allocation
from topoplan.plans.build import build_plan, stage_order, trivial_plan
from topoplan.plans.plan import Plan
from topoplan.plans.tree import Shard, Stage
from topoplan.schedules.least_loaded import LeastLoaded
from topoplan.topology import TopologyLike

LEVELS = ("mesh", "ring", "ps")

Digits = tuple[int, ...]


def bml(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
) -> Plan:
    """BML: every dimension in one hop, a part of the buffer beginning at each; parameters as for `hierarchical`.

    Examples
    --------
    On a BCube of 16 hosts with two ports of 10 GB/s: twice a ring's rate.

    >>> bml("bcube:4,2@10").rate
    10.666666666666666
    """
    return hierarchical(topology, collective, gpus=gpus, root=root, channels=channels, name="bml")


def hips_ring(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
) -> Plan:
    """HiPS with a ring in every dimension; parameters as for `hierarchical`.

    Examples
    --------
    >>> round(hips_ring("torus:4,4@10").rate, 3)
    21.333
    """
    return hierarchical(
        topology, collective, gpus=gpus, root=root, channels=channels, levels=("ring",), name="hips-ring"
    )


def two_level(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
) -> Plan:
    """Two levels of parameter servers: a GPU of each server adds up there, and shards go between those GPUs.

    As MXNet's distributed store on one GPU of each machine (arXiv 1512.01274). Parameters as for `hierarchical`.

    Examples
    --------
    >>> import topoplan
    >>> pair = topoplan.cluster([topoplan.Server("dgx-a100", count=2)], nics=8, nic_gbps=200, nic_access="direct")
    >>> made = two_level(pair)
    >>> made.trees, made.height, made.rate
    (2, 2, 50.0)
    """
    return hierarchical(
        topology,
        collective,
        gpus=gpus,
        root=root,
        channels=channels,
        levels=("mesh", "ps"),
        rotated=False,
        name="two-level",
    )


def hierarchical(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
    levels: Sequence[str] = ("mesh",),
    sides: Sequence[int] | None = None,
    rotated: bool = True,
    name: str = "hips",
) -> Plan:
    """A schedule that goes dimension by dimension.

    Parameters
    ----------
    topology, gpus, root, channels
        As for `topoplan.one_hop`.
    collective : str
        allreduce, broadcast, reduce; allgather and reduce_scatter too where no level is ``ps``.
    levels : sequence of str
        The kind of each dimension, the highest digit first; one stands for all.
    sides : sequence of int or None
        Ranks in each dimension. None: servers and the GPUs of each where there are several of several, else the fewest
        dimensions, two at least, in which ranks that a level joins have a route of their own.
    rotated : bool
        Whether parts of the buffer begin at each dimension; else all begin at the last.
    name : str
        What the plan calls its schedule.

    Raises
    ------
    UsageError
        Levels or sides that do not fit, or as `topoplan.one_hop`.
    InfeasibleError
        The ranks are no such grid, or as `topoplan.one_hop`.
    """
    started = time.perf_counter()
    asked = Allocation.of(topology, collective, gpus=gpus, root=root)
    collective, rank, fabric = asked.collective, asked.root, asked.connected(channels)
    if fabric.size == 1:
        return trivial_plan(fabric, collective, root=rank, method=name).timed(time.perf_counter() - started)
    unknown = next((one for one in levels if one not in LEVELS), None)
    if unknown is not None or not levels:
        raise UsageError(f"level {unknown!r} is unknown; use {', '.join(LEVELS)}")
    if "ps" in levels and collective in ("allgather", "reduce_scatter"):
        raise UsageError(f"in {collective} every rank is a root, and a level of ps has one; use mesh or ring")
    routes = LeastLoaded(fabric)
    grid = _Grid(_sides(fabric, routes, levels) if sides is None else tuple(sides), levels)
    if prod(grid.sides) != fabric.size:
        raise UsageError(f"sides {grid.sides} hold {prod(grid.sides)} ranks, and there are {fabric.size}")
    grid.check(fabric, routes)
    starts = range(len(grid.sides)) if rotated else (len(grid.sides) - 1,)
    ways = (1, -1) if "ring" in grid.kinds else (1,)
    roots = grid.roots() if rank is None else [grid.digits(rank)]
    share = Fraction(1, len(starts) * len(ways) * len(roots))
    shards = []
    for centre, start, way in product(roots, starts, ways):
        parents = grid.parents(centre, start, way)
        stages = []
        for op in stage_order(collective):
            edges = tuple(routes.edge(op, (parent,), child, share) for child, parent in parents)
            stages.append(Stage(op, grid.number(centre), edges))
        shards.append(Shard(share, tuple(stages)))
    made = build_plan(
        fabric,
        collective,
        root=rank,
        shards=shards,
        certificate=best_bound(fabric, collective, rank),
        schedule=name,
        method=name,
    )
    return made.timed(time.perf_counter() - started)


class _Grid:
    """Ranks by their digits, the highest first, and how a level sets one."""

    def __init__(self, sides: Digits, levels: Sequence[str]) -> None:
        if len(levels) not in (1, len(sides)):
            raise UsageError(f"{len(levels)} levels do not fit {len(sides)} dimensions; give one for each")
        self.sides = sides
        self.kinds = tuple(levels) * (len(sides) if len(levels) == 1 else 1)

    def digits(self, number: int) -> Digits:
        found = []
        for side in reversed(self.sides):
            number, digit = divmod(number, side)
            found.append(digit)
        return tuple(reversed(found))

    def number(self, digits: Digits) -> int:
        number = 0
        for side, digit in zip(self.sides, digits, strict=True):
            number = number * side + digit
        return number

    def points(self) -> Iterator[Digits]:
        return product(*map(range, self.sides))

    def roots(self) -> list[Digits]:
        """Those that collect a piece."""
        alone = [place for place, kind in enumerate(self.kinds) if kind == "ps"]
        return [point for point in self.points() if not any(point[place] for place in alone)]

    def parents(self, centre: Digits, start: int, way: int) -> list[tuple[int, int]]:
        """Each rank but the centre with the next on its way there; those nearer to the centre first."""
        others = [point for point in self.points() if point != centre]
        others.sort(key=lambda point: (self._steps(point, centre, way), point))
        return [(self.number(point), self._next(point, centre, start, way)) for point in others]

    def _steps(self, point: Digits, centre: Digits, way: int) -> int:
        steps = 0
        for here, there, side, kind in zip(point, centre, self.sides, self.kinds, strict=True):
            if here != there:
                steps += (there - here) * way % side if kind == "ring" else 1
        return steps

    def _next(self, point: Digits, centre: Digits, start: int, way: int) -> int:
        count = len(self.sides)
        order = [(start + step) % count for step in range(count)]
        place = next(one for one in order if point[one] != centre[one])
        digit = (point[place] + way) % self.sides[place] if self.kinds[place] == "ring" else centre[place]
        return self.number((*point[:place], digit, *point[place + 1 :]))

    def check(self, fabric: Fabric, routes: LeastLoaded) -> None:
        """Refuse a grid in which a level would pass through a third rank."""
        for a, b in self.pairs():
            if not routes.joined(a, b):
                raise InfeasibleError(f"{fabric.ranks[a]} reaches {fabric.ranks[b]} only through another GPU")

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Ranks between which a level moves data."""
        for point in self.points():
            for place, (side, kind) in enumerate(zip(self.sides, self.kinds, strict=True)):
                others = (1, side - 1) if kind == "ring" else range(1, side)
                for step in others:
                    digit = (point[place] + step) % side
                    yield self.number(point), self.number((*point[:place], digit, *point[place + 1 :]))


def _sides(fabric: Fabric, routes: LeastLoaded, levels: Sequence[str]) -> Digits:
    """The dimensions of a machine that nobody names."""
    servers = Servers(fabric)
    counts = {len(members) for members in servers.members}
    if len(servers.names) > 1 and counts != {1} and len(counts) == 1:
        return (len(servers.names), counts.pop())
    wanted = len(levels) if len(levels) > 1 else None
    for sides in sorted(_factorings(fabric.size), key=lambda sides: (len(sides), sides)):
        if len(sides) < 2 or (wanted is not None and len(sides) != wanted):
            continue
        if all(routes.joined(a, b) for a, b in _Grid(sides, levels).pairs()):
            return sides
    raise InfeasibleError(f"the {fabric.size} GPUs are no grid whose dimensions have routes of their own")


def _factorings(size: int) -> Iterator[Digits]:
    """All ways to write a number as a product of numbers above one, in every order."""
    yield (size,)
    for first in range(2, size // 2 + 1):
        if size % first == 0:
            yield from ((first, *rest) for rest in _factorings(size // first))
