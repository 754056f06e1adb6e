"""Plan the schedules with the lowest latency, for small messages: one hop, the lowest tree, one-shot.

- One hop: one star for each rank with 1/N of the buffer (allreduce, allgather, reduce-scatter), or the root's star.
  Behind one switch with equal ports the stars of all ranks also reach the optimum (Blink 3.5, for DGX-2). It needs a
  route without a third rank between any two.
- Spread one hop: the same stars for an allreduce, with the shares of the greatest rate; of these the ones that fill the
  other links least, so that a slow link does not wait at a port that the fast ones fill.
- Lowest tree: the buffer in one piece along a breadth-first tree of shortest paths; an allreduce takes the root with
  the shortest way up and down, then the highest rate; a rank's parent is the one with the least full link.
- One-shot: every rank sends its whole buffer to all others, and each adds everything up in the order of the senders,
  so all have the same bits. An exchange is a gather from every rank (`topoplan.plans.shards.Stage`). Between servers it
  is the middle of three phases: servers add up inside, the owners of a part exchange sums, and each broadcasts the
  total inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise
from math import lcm
from typing import Unpack

from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.routing import fewest_steps
from topoplan.machine.topology import TopologyLike
from topoplan.plans.build import Allocation, Request, stage_order, timed, trivial_plan
from topoplan.plans.loads import forest_rate, link_loads
from topoplan.plans.plan import ALL_COLLECTIVES, ALL_TO_ALL, Plan, check_collective
from topoplan.plans.shards import Edge, Shard, Stage
from topoplan.schedules.routes import LeastLoaded
from topoplan.schedules.sparse_plan import exchanging_servers
from topoplan.solve.cuts_and_partitions import bounded_plan, whole_capacities
from topoplan.solve.simplex.exact_simplex import PackingSimplex


@timed
def lowest_tree(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
) -> Plan:
    """Return the schedule of a collective with the fewest sequential edges, in one piece for each owner.

    Parameters and errors are those of `topoplan.plan`; an alltoall has none.

    See Also
    --------
    topoplan.plan

    Examples
    --------
    The hybrid cube mesh has diameter 2:

    >>> import topoplan
    >>> plan = lowest_tree(topoplan.load("dgx-1v"))
    >>> plan.num_trees, plan.height, plan.rate
    (1, 2, 25.0)
    """
    asked = Allocation.of(topology, collective, gpus=gpus, root=root, channels=channels)
    collective, rank, fabric = asked.collective, asked.root, asked.connected()
    if fabric.size == 1:
        return trivial_plan(fabric, collective, root=rank, method="lowest tree")
    if collective in ("allgather", "reduce_scatter"):
        shards = _gathering(fabric, collective)
    else:
        shards = [_best_shard(fabric, collective, range(fabric.size) if rank is None else (rank,))]
    name = "lowest tree" if len(shards) == 1 else "lowest trees"
    return bounded_plan(fabric, collective, shards, name, root=rank, method="lowest tree")


def _gathering(fabric: Fabric, collective: str) -> list[Shard]:
    """Return a tree of shortest paths for each owner; on direct links with the fewest copies on the busiest wire.

    Parents are chosen one after another. An owner's tree may take any of a rank's wires that lie on shortest paths, so
    the copies of each rank are then moved between its wires along augmenting paths.
    """
    share, steps, routes = Fraction(1, fabric.size), _steps(fabric, collective), LeastLoaded(fabric)
    shards = [_shard(steps, owner, routes, share) for owner in range(fabric.size)]
    if not fabric.direct:
        return shards
    ((op, onward),) = steps.items()
    wires: dict[tuple[int, int], int] = {}
    for link, (src, dst) in zip(fabric.links, fabric.ends, strict=True):
        wires[src, dst] = wires.get((src, dst), 0) + link.count
    depths = [tree_depths(onward, owner) for owner in range(fabric.size)]
    parents: list[dict[int, int]] = [{} for _ in depths]
    for shard in shards:
        for edge in shard.stages[0].edges:
            parents[edge.child][shard.stages[0].root] = edge.parent
    moved = False
    for child, chosen in enumerate(parents):
        near = [rank for rank, further in enumerate(onward) if child in further]
        width = {rank: wires[(rank, child) if op == "broadcast" else (child, rank)] for rank in near}
        allowed = {
            owner: [rank for rank in near if depths[owner][rank] + 1 == depths[owner][child]]
            for owner in chosen
        }
        moved |= _spread(chosen, allowed, width)
    if not moved:
        return shards
    routes = routes.emptied()
    spread = []
    for owner, shard in enumerate(shards):
        edges = [
            routes.edge(op, (parents[edge.child][owner],), edge.child, share)
            for edge in shard.stages[0].edges
        ]
        spread.append(Shard(share, (Stage(op, owner, Stage(op, owner, tuple(edges)).top_down()),)))
    return spread


def _spread(chosen: dict[int, int], allowed: dict[int, list[int]], width: dict[int, int]) -> bool:
    """Move items between places until the fullest cannot have fewer for its width; return whether any moved.

    ``chosen`` is the place of each item, changed here, and ``allowed`` has the places that it may take.

    >>> place = {0: 7, 1: 7, 2: 8}
    >>> _spread(place, {0: [7, 8], 1: [7], 2: [8, 9]}, {7: 1, 8: 1, 9: 1}), place
    (True, {0: 8, 1: 7, 2: 9})
    """
    moved = False
    while chosen:
        load = dict.fromkeys(width, 0)
        for place in chosen.values():
            load[place] += 1
        fullest = max(load, key=lambda place: (Fraction(load[place], width[place]), -place))
        came: dict[int, int] = {}  # place -> the item that would move there
        frontier = [fullest]
        end = None
        for here in frontier:
            for item in sorted(item for item, place in chosen.items() if place == here):
                for there in allowed[item]:
                    if there == fullest or there in came:
                        continue
                    came[there] = item
                    frontier.append(there)
                    if end is None and (load[there] + 1) * width[fullest] < load[fullest] * width[there]:
                        end = there
        if end is None:
            return moved
        moved = True
        while end != fullest:
            item = came[end]
            chosen[item], end = end, chosen[item]
    return moved


def _best_shard(fabric: Fabric, collective: str, roots: Sequence[int]) -> Shard:
    """Return the whole buffer over the trees of the best root: lowest, then fastest, then first."""
    steps = _steps(fabric, collective)
    depths = {root: sum(max(tree_depths(onward, root)) for onward in steps.values()) for root in roots}
    lowest = min(depths.values())
    routes = LeastLoaded(fabric)
    shards = [_shard(steps, root, routes.emptied(), Fraction(1)) for root in roots if depths[root] == lowest]
    return max(shards, key=lambda shard: forest_rate([shard], fabric) or 0)


Steps = dict[str, list[list[int]]]
"""For each operation the ranks one hop further from the root than every rank, in the direction of the data."""


def _steps(fabric: Fabric, collective: str) -> Steps:
    steps: Steps = {}
    for op in stage_order(collective):
        onward: list[set[int]] = [set() for _ in range(fabric.size)]
        for arc in fabric.arcs:
            near, far = (arc.tail, arc.head) if op == "broadcast" else (arc.head, arc.tail)
            onward[near].add(far)
        steps[op] = [sorted(each) for each in onward]
    return steps


def _shard(steps: Steps, root: int, routes: LeastLoaded, share: Fraction) -> Shard:
    return Shard(share, tuple(_stage(op, onward, root, routes, share) for op, onward in steps.items()))


def _stage(op: str, onward: list[list[int]], root: int, routes: LeastLoaded, share: Fraction) -> Stage:
    """Return a tree of shortest paths; ranks with the fewest possible parents choose first."""
    depth = tree_depths(onward, root)
    level: dict[int, list[int]] = {}
    for parent, children in enumerate(onward):
        for child in children:
            if depth[parent] + 1 == depth[child]:
                level.setdefault(child, []).append(parent)
    edges: list[Edge] = []
    for child in sorted(level, key=lambda rank: (depth[rank], len(level[rank]), rank)):
        edges.append(routes.edge(op, sorted(level[child]), child, share))
    return Stage(op, root, Stage(op, root, tuple(edges)).top_down())


def tree_depths(onward: Sequence[Sequence[int]], root: int) -> list[int]:
    """Return the fewest edges between the root and every rank, in the direction of the data."""
    depth = fewest_steps([root], onward.__getitem__)
    return [depth[rank] for rank in range(len(onward))]


@timed
def one_hop_plan(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
) -> Plan:
    """Return the one-hop schedule of a collective, also of an alltoall; parameters and errors as of `topoplan.plan`.

    Raises
    ------
    InfeasibleError
        The channels do not connect the allocation, or some rank reaches another only through a third.

    See Also
    --------
    topoplan.plan, topoplan.one_shot_plan

    Examples
    --------
    >>> import topoplan
    >>> machine = topoplan.load("dgx-2")
    >>> plan = one_hop_plan(machine)
    >>> plan.num_trees, plan.height, plan.rate, plan.bound
    (16, 1, 80.0, 80.0)
    >>> one_hop_plan(machine, "broadcast").rate
    10.0
    """
    asked = Allocation.of(
        topology, collective, gpus=gpus, root=root, channels=channels, among=ALL_COLLECTIVES
    )
    collective, rank, fabric = asked.collective, asked.root, asked.connected()
    if fabric.size == 1:
        return trivial_plan(fabric, collective, root=rank, method="one-hop")
    routes = LeastLoaded(fabric)
    roots = range(fabric.size) if rank is None else (rank,)
    share = Fraction(1, len(roots))
    shards: list[Shard] = []
    for centre in roots:
        if collective == ALL_TO_ALL:
            shards += _direct_sends(routes, centre, fabric)
            continue
        others = [other for other in range(fabric.size) if other != centre]
        stages = []
        for op in stage_order(collective):
            for other in others:
                _check_joined(routes, *((centre, other) if op == "broadcast" else (other, centre)), fabric)
            edges = tuple(routes.edge(op, (centre,), other, share) for other in others)
            stages.append(Stage(op, centre, edges))
        shards.append(Shard(share, tuple(stages)))
    return bounded_plan(fabric, collective, shards, "one-hop", root=rank)


SPREAD = "spread-one-hop"

MOST_LEVELS = 256
"""Kinds of links up to which the search of shares settles all: 64 ports of unlike rates take 8 s."""


@timed
def spread_one_hop(topology: TopologyLike, collective: str = "allreduce", **request: Unpack[Request]) -> Plan:
    """Return the stars of `one_hop_plan` for an allreduce with the shares of the greatest rate, spread evenly.

    The shares are max-min fair: links that limit the rate of all shares are settled, the others are filled least, and
    so on. Behind one switch with a slow port each rank with a full port has the same share, none waits for another's
    port, and the rate is that of packed trees. Parameters and errors as of `one_hop_plan`.

    See Also
    --------
    topoplan.one_hop_plan

    Examples
    --------
    Four servers, of which the last has a NIC at a quarter of the rate:

    >>> import topoplan
    >>> slow = topoplan.cluster([topoplan.Server(topoplan.load("mac-tb5"), count=4)], nic_gbps=80)
    >>> slow = slow.degrade_links({"s3.nic0-switch0": 2.5})
    >>> plan = spread_one_hop(slow)
    >>> [str(shard.share) for shard in plan.shards], plan.rate, plan.bound
    (['1/3', '1/3', '1/3'], 2.5, 2.5)
    """
    if check_collective(collective) != "allreduce":
        raise UsageError(f"{SPREAD} is for all_reduce, got {collective}; use one-hop")
    even = one_hop_plan(topology, collective, **request)
    if len(even.shards) < 2:
        return replace(even, schedule=SPREAD, method=SPREAD)
    fabric = Fabric(even.topology, even.channels)
    shares = _spread_shares(fabric, even.shards)
    shards = [
        replace(shard, share=share) for shard, share in zip(even.shards, shares, strict=True) if share > 0
    ]
    return bounded_plan(fabric, "allreduce", shards, SPREAD)


def _spread_shares(fabric: Fabric, shards: Sequence[Shard]) -> list[Fraction]:
    """Return max-min fair shares: the part of a link that is filled is least where it is greatest, then elsewhere.

    With all shares together 1, a settled link has fill <= T, so the sum of (fill - T) times its share is at most 0, and
    the program finds the least T of the others. A link with a dual value above zero is full in every solution. Links
    that every star fills alike are one row.
    """
    capacity, _ = whole_capacities(fabric)
    loads = [link_loads([replace(shard, share=Fraction(1))], fabric) for shard in shards]
    fills = {tuple(line[link] / c for line in loads) for link, c in enumerate(capacity)}
    rows = sorted(row for row in fills if any(row))
    unit = lcm(*(fill.denominator for row in rows for fill in row))
    scaled = [[int(fill * unit) for fill in row] for row in rows]
    settled: dict[int, Fraction] = {}
    shares: list[Fraction] = []
    while len(settled) < min(len(rows), MOST_LEVELS):
        lines = [
            row
            if (most := settled.get(place)) is None
            else [fill * most.denominator - most.numerator * unit for fill in row]
            for place, row in enumerate(scaled)
        ]
        columns = list(zip(*lines, strict=True))
        # Stars on settled links alone: if they can have all, the other links stay empty, and nothing limits the others.
        left = [row for place, row in enumerate(scaled) if place not in settled]
        free = [place for place in range(len(shards)) if not any(row[place] for row in left)]
        if free and settled:
            empty = PackingSimplex([0] * len(settled) + [1])
            empty.add([(*(columns[place][one] for one in settled), 1) for place in free], [1] * len(free))
            empty.optimise()
            if empty.value == 1:
                found = {free[number]: share for number, share in empty.solution().items()}
                return [found.get(place, Fraction(0)) for place in range(len(shards))]
        program = PackingSimplex([0 if place in settled else unit for place in range(len(rows))])
        program.add(columns, [1] * len(shards))
        program.optimise()
        found, total = program.solution(), program.value
        shares = [found.get(place, Fraction(0)) / total for place in range(len(shards))]
        duals, _ = program.duals()
        settled |= {place: 1 / total for place, dual in enumerate(duals) if dual > 0 and place not in settled}
    return shares


def mesh(topology: TopologyLike, collective: str = "allreduce", **request: Unpack[Request]) -> Plan:
    """Return one hop as HiPS's mesh, with the connections of workers that are the servers of gradients themselves.

    >>> mesh("v100x4", "allreduce").notes[-1]
    '12 connections: each rank that owns a part with all others'
    """
    made = one_hop_plan(topology, collective, **request)
    pairs = {
        (edge.parent, edge.child) for shard in made.shards for stage in shard.stages for edge in stage.edges
    }
    note = f"{len(pairs)} connections: each rank that owns a part with all others"
    return replace(made, schedule="mesh", method="mesh", notes=(*made.notes, note))


def direct_sends(topology: TopologyLike, *, gpus: Sequence[int] | None = None) -> Plan | None:
    """Return the all-to-all of libraries that send every block directly to its rank.

    It runs over NVLink, or over PCIe if NVLink does not join all pairs, since a plan runs over one of them; None if
    neither does.

    Half of the pairs of a DGX-1V have no NVLink, so blocks go over PCIe:

    >>> made = direct_sends("dgx-1v")
    >>> made.channels, made.rate
    (('pcie',), 4.0)
    """
    for channels in ("auto", "pcie"):
        try:
            return one_hop_plan(topology, ALL_TO_ALL, gpus=gpus, channels=channels)
        except InfeasibleError:
            continue
    return None


def _direct_sends(routes: LeastLoaded, destination: int, fabric: Fabric) -> list[Shard]:
    """Return the shards of a rank in an all-to-all: each block directly from its source."""
    share = Fraction(1, fabric.size)
    shards = []
    for source in range(fabric.size):
        edges: tuple[Edge, ...] = ()
        if source != destination:
            _check_joined(routes, source, destination, fabric)
            edges = (routes.edge("broadcast", (source,), destination, share),)
        shards.append(Shard(share, (Stage("broadcast", source, edges),)))
    return shards


def _check_joined(routes: LeastLoaded, tail: int, head: int, fabric: Fabric) -> None:
    if not routes.joined(tail, head):
        raise InfeasibleError(
            f"{fabric.ranks[tail]} reaches {fabric.ranks[head]} only through another GPU; "
            "a one-hop schedule needs direct routes, so plan trees instead"
        )


ONE_SHOT = "one-shot"
ONE_SHOT_SERVERS = "one-shot three-phase"


@timed
def one_shot_plan(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
) -> Plan:
    """Return the allreduce in which every rank sends its buffer to all others, over the lowest tree of each.

    Parameters and errors are those of `topoplan.plan`; another collective is a UsageError.

    See Also
    --------
    topoplan.one_hop_plan

    Examples
    --------
    A DGX-2 adds up in one hop, with fifteen times the traffic through its ports:

    >>> import topoplan
    >>> plan = one_shot_plan(topoplan.load("dgx-2"))
    >>> plan.rate, plan.depth, len(plan.shards[0].stages)
    (10.0, 1, 16)
    >>> round(topoplan.simulate(plan, nbytes=1024).seconds * 1e6, 1)
    17.3
    """
    asked = Allocation.of(topology, collective, gpus=gpus, root=root, channels=channels)
    _check(asked.collective)
    fabric = asked.connected()
    if fabric.size == 1:
        return trivial_plan(fabric, asked.collective, root=None, method=ONE_SHOT)
    gathered = lowest_tree(topology, "allgather", gpus=gpus, channels="+".join(fabric.channels))
    return bounded_plan(fabric, asked.collective, exchange_of(gathered), ONE_SHOT)


@timed
def one_shot_servers(
    topology: TopologyLike, collective: str = "allreduce", **request: Unpack[Request]
) -> Plan:
    """Return the allreduce in three phases, with a one-shot exchange between servers."""
    asked = Allocation.of(topology, collective, **request)
    _check(asked.collective)
    fabric = asked.connected()
    shards = exchanging_servers(fabric, None)
    return bounded_plan(fabric, asked.collective, shards, ONE_SHOT_SERVERS)


def exchange_of(gathered: Plan) -> tuple[Shard, ...]:
    """Return the exchange along the trees of an allgather, with a rank's whole buffer in place of its block.

    Each owner divides its block between trees in its own way; a shard here is a part that none of them divides.

    >>> import topoplan
    >>> gathered = topoplan.plan(topoplan.load("dgx-1v"), "allgather", gpus=[0, 1, 2])
    >>> [(str(shard.share), len(shard.stages)) for shard in exchange_of(gathered)]
    [('1', 3)]
    """
    size = len(gathered.ranks)
    trees: dict[int, list[tuple[Fraction, Stage]]] = {}
    for shard in gathered.shards:
        stage = shard.stages[0]
        trees.setdefault(stage.root, []).append((shard.share * size, stage))
    ends = {root: list(accumulate(share for share, _ in parts)) for root, parts in trees.items()}
    cuts = sorted({Fraction(0), *(end for found in ends.values() for end in found)})
    shards = []
    for start, stop in pairwise(cuts):
        stages = []
        for root in sorted(trees):
            place = next(number for number, end in enumerate(ends[root]) if end > start)
            stage = trees[root][place][1]
            stages.append(Stage("gather", root, stage.edges))
        shards.append(Shard(stop - start, tuple(stages)))
    return tuple(shards)


def one_shot_along(gathered: Plan) -> Plan:
    """Return the one-shot allreduce along the trees of an allgather on the same machine."""
    fabric = Fabric(gathered.topology, gathered.channels)
    return bounded_plan(fabric, "allreduce", exchange_of(gathered), ONE_SHOT)


def _check(collective: str) -> None:
    if collective != "allreduce":
        raise UsageError(f"one-shot is an allreduce, not {collective}; choose another schedule")
