"""Plan schedules level by level: BML and HiPS on grids, rails across servers, and three phases.

Ranks are points of a grid, a digit for each dimension. A tree leads every rank to the root by setting one digit
after another: ``mesh`` in one hop from all others, ``ring`` step by step with half of the buffer each way round,
``ps`` in one hop to the first rank of the dimension. Trees that start at different dimensions run side by side. BML
has ``mesh`` in every dimension (Wang et al., NeurIPS 2018); HiPS takes a kind for each (Geng et al., 2018).
The grid exchange is an allreduce that sums over all dimensions but one, exchanges sums one-shot along that one, and
broadcasts the total back: a hop less than a tree each way, in D dimensions 2 D - 1.

Rails broadcast in three hops: scatter in the root's server, across over all NICs, gather in each server. Relayed
rails take one more across: each server forwards its part to the others, so the root's NICs send everything once.
Reduce runs backwards.

Three phases (Blink 3.4): a part has one local root in each server, which collects it over a tree, exchanges it in
one hop, and broadcasts the total. Trees, roots and shares come from one program
(`topoplan.solve.packing.composition`), pipelined by chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import product
from typing import Unpack

import numpy as np

from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.fabric_structure import FabricServers
from topoplan.machine.topology import TopologyLike
from topoplan.plans.build import Allocation, Request, stage_order, timed, trivial_plan
from topoplan.plans.loads import forest_rate
from topoplan.plans.plan import Plan
from topoplan.plans.shards import Edge, Shard, Stage
from topoplan.schedules.routes import LeastLoaded
from topoplan.solve.cuts_and_partitions import bounded_plan
from topoplan.solve.packing.composition import THREE_PHASE
from topoplan.solve.planner import plan

LEVELS = ("mesh", "ring", "ps")

GRID_EXCHANGE, ROTATED_GRID_EXCHANGE = "grid exchange", "rotated grid exchange"

Digits = tuple[int, ...]


@timed
def hierarchical(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    levels: Sequence[str] = ("mesh",),
    rotated: bool = True,
    name: str = "hips",
    **request: Unpack[Request],
) -> Plan:
    """Return a schedule that goes dimension by dimension.

    ``levels`` gives the kind of each dimension, the highest digit first, or one kind for all; allgather and
    reduce-scatter have no level ``ps``. Dimensions are servers and the GPUs of each, if there are several of several,
    else the fewest dimensions, two at least, in which ranks that a level joins have a route of their own. If
    ``rotated``, parts of the buffer begin at each dimension, else all begin at the last. ``name`` is the schedule of
    the plan.

    UsageError if levels do not fit the dimensions; InfeasibleError if the ranks are not such a grid.

    On a BCube of 16 hosts with two ports of 10 GB/s, twice a ring's rate:

    >>> bml("bcube:4,2@10").rate, round(hips_ring("torus:4,4@10").rate, 3)
    (10.666666666666666, 21.333)
    >>> import topoplan
    >>> pair = topoplan.cluster([topoplan.Server("dgx-a100", count=2)], nics=8, nic_gbps=200, nic_access="direct")
    >>> made = two_level(pair)
    >>> made.num_trees, made.height, made.rate
    (2, 2, 50.0)
    """
    asked = Allocation.of(topology, collective, **request)
    collective, rank, fabric = asked.collective, asked.root, asked.connected()
    if fabric.size == 1:
        return trivial_plan(fabric, collective, root=rank, method=name)
    unknown = next((one for one in levels if one not in LEVELS), None)
    if unknown is not None or not levels:
        raise UsageError(f"level {unknown!r} is unknown; use {', '.join(LEVELS)}")
    if "ps" in levels and collective in ("allgather", "reduce_scatter"):
        raise UsageError(f"in {collective} every rank is a root, and a level of ps has one; use mesh or ring")
    routes = LeastLoaded(fabric)
    grid = _Grid(_sides(fabric, routes, levels), levels)
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
    return bounded_plan(fabric, collective, shards, name, root=rank)


bml = partial(hierarchical, name="bml")
"""BML: every dimension in one hop, a part of the buffer beginning at each."""

hips_ring = partial(hierarchical, levels=("ring",), name="hips-ring")
"""HiPS with a ring in every dimension."""

grid = partial(hierarchical, rotated=False, name="grid")
"""Every dimension in one hop, the lowest digit's nearest the root, each block in one piece: few start-ups."""

two_level = partial(hierarchical, levels=("mesh", "ps"), rotated=False, name="two-level")
"""Two levels of parameter servers: a GPU of each server adds up there, and shards go between those GPUs.

As MXNet's distributed store on one GPU of each machine (arXiv 1512.01274)."""


@timed
def grid_exchange(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    rotated: bool = False,
    **request: Unpack[Request],
) -> Plan:
    """Return the allreduce that exchanges sums along one dimension of the grid of `hierarchical`.

    The dimension is the one with the highest rate, the first among equals; if ``rotated``, parts of the buffer are
    exchanged along each.

    UsageError for another collective; InfeasibleError if the ranks are not such a grid.

    Three hops on the hybrid cube mesh: into the owner in four GPUs, across, and out again:

    >>> import topoplan
    >>> made = grid_exchange("dgx-1p")
    >>> made.num_trees, made.depth, made.rate
    (4, 3, 40.0)
    """
    asked = Allocation.of(topology, collective, **request)
    if asked.collective != "allreduce":
        raise UsageError(
            f"a grid exchange is an allreduce, not {asked.collective}; choose another schedule, such as trees"
        )
    fabric = asked.connected()
    name = ROTATED_GRID_EXCHANGE if rotated else GRID_EXCHANGE
    if fabric.size == 1:
        return trivial_plan(fabric, asked.collective, root=None, method=name)
    routes = LeastLoaded(fabric)
    grid = _Grid(_sides(fabric, routes, ("mesh",)), ("mesh",))
    grid.check(fabric, routes)
    places = range(len(grid.sides))
    tried = [places] if rotated else [(place,) for place in places]
    forests = [_exchanged(grid, along, routes.emptied()) for along in tried]
    shards = max(forests, key=lambda forest: forest_rate(forest, fabric) or 0)
    return bounded_plan(fabric, asked.collective, shards, name)


def _exchanged(grid: _Grid, along: Sequence[int], routes: LeastLoaded) -> list[Shard]:
    """Return the shards whose sums are exchanged along some dimensions, with equal parts for each."""
    shards = []
    for place in along:
        owners = [point for point in grid.points() if not point[place]]
        share = Fraction(1, len(owners) * len(along))
        start = (place + 1) % len(grid.sides)
        for owner in owners:
            line = [(*owner[:place], digit, *owner[place + 1 :]) for digit in range(grid.sides[place])]
            stages = []
            for op in ("reduce", "gather", "broadcast"):
                for centre in line:
                    root = grid.number(centre)
                    if op == "gather":
                        pairs = [(grid.number(other), root) for other in line if other != centre]
                    else:
                        parents = grid.parents(centre, start, 1)
                        pairs = [pair for pair in parents if grid.digits(pair[0])[place] == centre[place]]
                    way = "reduce" if op == "reduce" else "broadcast"
                    edges = tuple(routes.edge(way, (parent,), child, share) for child, parent in pairs)
                    stages.append(Stage(op, root, edges))
            shards.append(Shard(share, tuple(stages)))
    return shards


class _Grid:
    """Ranks by their digits, the highest first, and the kinds of levels that set them."""

    def __init__(self, sides: Digits, levels: Sequence[str]) -> None:
        if len(levels) not in (1, len(sides)):
            raise UsageError(f"{len(levels)} levels do not fit {len(sides)} dimensions; give one for each")
        self.sides = sides
        self.kinds = tuple(levels) * (len(sides) if len(levels) == 1 else 1)

    def digits(self, number: int) -> Digits:
        return tuple(map(int, np.unravel_index(number, self.sides)))

    def number(self, digits: Digits) -> int:
        return int(np.ravel_multi_index(digits, self.sides))

    def points(self) -> Iterator[Digits]:
        return product(*map(range, self.sides))

    def roots(self) -> list[Digits]:
        """Return the points that collect a piece."""
        alone = [place for place, kind in enumerate(self.kinds) if kind == "ps"]
        return [point for point in self.points() if not any(point[place] for place in alone)]

    def parents(self, centre: Digits, start: int, way: int) -> list[tuple[int, int]]:
        """Return each rank but the centre with the next on its way there, nearer ranks first."""
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
        """Raise InfeasibleError if a level would pass through a third rank."""
        for a, b in self.pairs():
            if not routes.joined(a, b):
                raise InfeasibleError(f"{fabric.ranks[a]} reaches {fabric.ranks[b]} only through another GPU")

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yield the pairs of ranks between which a level moves data."""
        for point in self.points():
            for place, (side, kind) in enumerate(zip(self.sides, self.kinds, strict=True)):
                others = (1, side - 1) if kind == "ring" else range(1, side)
                for step in others:
                    digit = (point[place] + step) % side
                    yield self.number(point), self.number((*point[:place], digit, *point[place + 1 :]))


def _sides(fabric: Fabric, routes: LeastLoaded, levels: Sequence[str]) -> Digits:
    """Return the dimensions of a machine."""
    servers = FabricServers(fabric)
    counts = {len(members) for members in servers.members}
    if len(servers.names) > 1 and counts != {1} and len(counts) == 1:
        return (len(servers.names), counts.pop())
    wanted = len(levels) if len(levels) > 1 else None
    for sides in sorted(_factorings(fabric.size), key=lambda sides: (len(sides), sides)):
        if len(sides) < 2 or (wanted is not None and len(sides) != wanted):
            continue
        if all(routes.joined(a, b) for a, b in _Grid(sides, levels).pairs()):
            return sides
    raise InfeasibleError(f"the {fabric.size} GPUs are not a grid whose dimensions have routes of their own")


def _factorings(size: int) -> Iterator[Digits]:
    """Yield all ways to write a number as a product of numbers above one, in every order."""
    yield (size,)
    for first in range(2, size // 2 + 1):
        if size % first == 0:
            yield from ((first, *rest) for rest in _factorings(size // first))


RAILS, RELAYED_RAILS = "rails", "relayed rails"


@timed
def _rails(
    kind: str, topology: TopologyLike, collective: str = "broadcast", **request: Unpack[Request]
) -> Plan:
    """Return the broadcast or reduce along rails, as many as the smallest server has GPUs.

    Four DGX-A100 with a NIC of 25 GB/s for each GPU: three of four eighths leave each, at 25 / (3 / 8) GB/s.

    >>> import topoplan
    >>> servers = [topoplan.Server(topoplan.load("dgx-a100"), count=4)]
    >>> plan = rails(topoplan.cluster(servers, nic_gbps=200, nics=8, nic_access="direct"))
    >>> plan.num_trees, plan.height, round(plan.rate, 2)
    (8, 3, 66.67)
    >>> plan = relayed_rails(topoplan.cluster(servers, nic_gbps=200, nics=8))
    >>> plan.num_trees, plan.height, round(plan.rate, 2)
    (24, 4, 171.43)
    """
    asked = Allocation.of(topology, collective, **request)
    if asked.root is None:
        raise UsageError(
            f"rails are a broadcast or a reduce, not {asked.collective}; choose another schedule"
        )
    fabric = asked.connected()
    servers = FabricServers(fabric)
    servers.check()
    op = asked.collective
    members = sorted(
        (sorted(each.tolist()) for each in servers.members),
        key=lambda ranks: (asked.root not in ranks, ranks),
    )
    count = min(len(ranks) for ranks in members)
    routes = LeastLoaded(fabric)
    relays = range(1, len(members)) if kind == RELAYED_RAILS else (0,)
    share = Fraction(1, count * len(relays))
    shards = [
        _shard(fabric, op, asked.root, members, place, relay, share, routes)
        for relay in relays
        for place in range(count)
    ]
    return bounded_plan(fabric, op, shards, kind, root=asked.root)


rails = partial(_rails, RAILS)
"""Rails: one tree for each place in a server, of height three."""

relayed_rails = partial(_rails, RELAYED_RAILS)
"""Rails on which every other server forwards a part: trees of height four."""


def _shard(
    fabric: Fabric,
    op: str,
    root: int,
    members: Sequence[Sequence[int]],
    place: int,
    relay: int,
    share: Fraction,
    routes: LeastLoaded,
) -> Shard:
    """Return the tree of one rail, or of the part that a server relays; the root's server comes first."""
    hub = members[0][place]
    edges: list[Edge] = []

    def attach(parent: int, child: int) -> None:
        tail, head = (parent, child) if op == "broadcast" else (child, parent)
        if not routes.joined(tail, head):
            raise InfeasibleError(
                f"{fabric.ranks[tail]} reaches {fabric.ranks[head]} only through another GPU; rails need direct routes"
            )
        edges.append(routes.edge(op, (parent,), child, share))

    if hub != root:
        attach(root, hub)
    relaying = members[relay][place]
    if relaying != hub:
        attach(hub, relaying)
    for number, ranks in enumerate(members):
        if number not in (0, relay):
            attach(relaying, ranks[place])
    for ranks in members:
        for rank in ranks:
            if rank not in (ranks[place], root):
                attach(ranks[place], rank)
    return Shard(share, (Stage(op, root, tuple(edges)),))


def three_phase(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
) -> Plan:
    """Return the three-phase schedule of a collective on several servers, as ``plan(…, method="three-phase")``.

    Parameters
    ----------
    topology : Topology, or what `topoplan.load` takes
        A cluster: its devices state their servers.
    collective : str
        allreduce; or broadcast, reduce, allgather, reduce_scatter, which are one direction of it. In these the root
        need not be a local root: a gateway in its server sends to the centre of the exchange, or is the centre.
    gpus, root, channels
        As for `topoplan.plan`. Servers may have different numbers of GPUs.

    Raises
    ------
    UsageError
        As `topoplan.plan`; all GPUs are on one server.
    InfeasibleError
        The GPUs of a server are not connected inside it, or the servers are not one hop apart.

    See Also
    --------
    topoplan.plan, topoplan.cluster

    References
    ----------
    Wang et al., "Blink: Fast and Generic Collectives for Distributed ML", MLSys 2020, section 3.4.

    Examples
    --------
    Blink's two DGX-1V with 3 and 5 GPUs, one NIC of 40 Gb/s each (figure 19b: 5.0 GB/s):

    >>> import topoplan
    >>> dgx = topoplan.load("dgx-1v")
    >>> pair = [topoplan.Server(dgx, [0, 1, 2]), topoplan.Server(dgx, [0, 1, 2, 3, 4])]
    >>> made = three_phase(topoplan.cluster(pair, nic_gbps=40, nics=1, nic_access="direct"))
    >>> made.rate, made.bound, made.schedule
    (5.0, 5.0, 'three-phase')
    """
    return plan(topology, collective, gpus=gpus, root=root, method=THREE_PHASE, channels=channels)
