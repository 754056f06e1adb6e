"""List the plans that compete for message sizes, and search the limits that no schedule of few start-ups exceeds.

Candidates are low optimal trees, the best trees of each height below, few optimal trees, disjoint trees of each height
on direct links, one-shot along the trees of an allgather, exchanges of a few owners, and every schedule of
`topoplan.schedules.registry` that the machine allows, all on the same links. All carry the strongest certificate that
any of them found, so each states its gap to the optimum.

Chain limits state why schedules with few start-ups are slow on a machine; `topoplan.plans.chain_limits` defines and
recomputes them. Tried are single ranks and servers, on few ranks the smallest cut around every set of them, and lengths
from packings of trees of limited height. Only limits that lower a rate are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import reduce
from itertools import combinations, islice, product

import numpy as np

from topoplan.errors import InfeasibleError, PlanError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.fabric_structure import FabricServers
from topoplan.machine.topology import TopologyLike, as_topology
from topoplan.model.times_by_size import least_start_ups, rounded, start_up_diameter
from topoplan.plans.chain_limits import (
    ChainLimit,
    ExitLimit,
    Exits,
    GroupLimit,
    HeightLimit,
    Limit,
    StartLimit,
    hop_start_ups,
    rank_groups,
)
from topoplan.plans.minimum_trees import LARGEST_EXACT
from topoplan.plans.plan import Plan, check_collective
from topoplan.plans.shards import ImageShards
from topoplan.schedules.low_latency import one_shot_along
from topoplan.schedules.owner_exchange import owner_exchanges
from topoplan.schedules.registry import MOST_RANKS, SCHEDULES, cause
from topoplan.solve.cuts_and_partitions import FlowNetwork, whole_capacities
from topoplan.solve.packing.column_generation import ColumnGeneration
from topoplan.solve.packing.packing_program import Packing, Pricing, has_exact_tables
from topoplan.solve.planner import disjoint_forest, lower_trees, plan
from topoplan.units import TOLERANCE

MOST_FEW = 16
"""Most ranks for forests of few and of lower trees: with more they take minutes, and seldom win."""

MOST_LOWEST = 1
"""Number of lowest forests above `MOST_FEW` ranks."""

MOST_LOW = 32
"""Most ranks for the lowest forests on direct links."""

MOST_DISJOINT = 64
"""Most ranks among which disjoint trees are grown."""

MOST_DOUBLED = 96
"""Most trees that are tried as two each: with more the start-ups of a wire outlast its bytes."""


def candidates(
    topology: TopologyLike,
    collective: str = "allreduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
    progress: Callable[[str], None] | None = None,
) -> tuple[tuple[Plan, ...], tuple[str, ...]]:
    """Return all schedules of a collective on an allocation, and notes on schedules that do not exist there.

    Parameters are those of `topoplan.plan`. The optimal trees come first; all forests are different, and have the same
    channels, bound and certificate.

    >>> import topoplan
    >>> plans, notes = candidates(topoplan.load("dgx-1v"), "broadcast")
    >>> [(one.schedule, one.num_trees, one.height, one.rate) for one in plans][:3]
    [('trees', 9, 4, 150.0), ('trees', 2, 2, 50.0), ('trees', 5, 3, 125.0)]
    >>> notes
    ('no one-hop: gpu0 reaches gpu5 only through another GPU',)
    """
    topology = as_topology(topology)
    collective = check_collective(collective)
    chosen = topology.select(gpus)
    best = plan(
        topology, collective, gpus=chosen, root=root, channels=channels, order="height", progress=progress
    )
    if len(chosen) == 1:
        return (best,), ()
    made = [best]
    notes = []
    made += _lower_forests(best, progress)
    made += _disjoint_forests(best, progress)
    if best.collective == "allreduce" and best.height > 1 and len(chosen) <= LARGEST_EXACT:
        over_same = "+".join(best.channels)
        gathered = plan(topology, "allgather", gpus=chosen, channels=over_same, progress=progress)
        made.append(one_shot_along(gathered))
    if len(chosen) <= MOST_LOW and best.height > 1:
        made += owner_exchanges(best)
    if best.height > 1 and len(chosen) > MOST_FEW:
        notes.append(f"a forest of few trees is not looked for above {MOST_FEW} GPUs")
    elif best.height > 1:
        few = plan(
            topology, collective, gpus=chosen, root=root, channels=channels, order="trees", progress=progress
        )
        made.append(few)
    over = "+".join(best.channels)
    too_large = False
    for schedule in SCHEDULES.values():
        if not schedule.timed or not schedule.fits(best):
            continue
        if schedule.most_ranks is not None and len(chosen) > schedule.most_ranks:
            too_large = True
            continue
        if progress:
            progress(f"{schedule.words} …")
        try:
            if schedule.beside:
                made.append(schedule.beside(best, progress))
            else:
                made.append(schedule.make(topology, collective, gpus=chosen, root=root, channels=over))
        except InfeasibleError as error:
            notes.append(f"no {schedule.words}: {cause(error)}")
    if too_large:
        notes.append(f"rings and other regular schedules are not tried above {MOST_RANKS} GPUs")
    return _distinct([one for one in made if one.channels == best.channels]), tuple(dict.fromkeys(notes))


def doubled(plan: Plan) -> Plan | None:
    """Return the plan with each tree as two of half its share; None if that cannot help.

    A tree sends one chunk at a time over each of its edges. Two trees on the same wire start their copies one after
    another there, and while one starts, the other moves: a pipeline fills sooner, at no cost in rate. More than two
    gain little more, and start more. Up to four NVLinks one after another on a DGX-1V, 32 MB in microseconds:

    >>> import topoplan
    >>> plan = topoplan.plan("dgx-1v", "broadcast")
    >>> [round(topoplan.simulate(one, nbytes=32 << 20).seconds * 1e6) for one in (plan, doubled(plan))]
    [384, 267]
    """
    if (
        isinstance(plan.shards, ImageShards)
        or plan.depth < 2
        or plan.num_trees > MOST_DOUBLED
        or all(stage.op == "gather" for shard in plan.shards for stage in shard.stages)
    ):
        return None
    halves = (replace(shard, share=shard.share / 2) for shard in plan.shards)
    return replace(plan, shards=tuple(half for one in halves for half in (one, one)))


def same_trees(one: Plan, other: Plan) -> bool:
    """Return whether two plans have the same set of trees.

    >>> import topoplan
    >>> plan = topoplan.plan("dgx-1v")
    >>> [same_trees(plan, each) for each in (doubled(plan), topoplan.ring_plan("dgx-1v"))]
    [True, False]
    """
    return {shard.stages for shard, _ in one.shard_counts} == {
        shard.stages for shard, _ in other.shard_counts
    }


def _lower_forests(best: Plan, progress: Callable[[str], None] | None) -> list[Plan]:
    """Return the best forests of each height below that of the optimal trees, if they are found quickly."""
    fabric = Fabric(best.topology, best.channels)
    most = MOST_LOW if fabric.direct else MOST_FEW
    if best.height < 3 or fabric.split or fabric.in_network or fabric.size > most:
        return []
    made: list[Plan] = []
    for height in range(1, best.height):
        if fabric.size > MOST_FEW and len(made) == MOST_LOWEST:
            break
        if progress:
            progress(f"trees of height {height} …")
        try:
            # the planner's notes are shown once, with the optimal trees
            made.append(replace(lower_trees(best, height), notes=()))
        except UsageError:
            continue  # no tree is so low
    return made


def _disjoint_forests(best: Plan, progress: Callable[[str], None] | None) -> list[Plan]:
    """Return forests of disjoint trees of a broadcast or reduce: of each height the most, if more than of a lower."""
    if best.root is None or len(best.ranks) > MOST_DISJOINT:
        return []
    if progress:
        progress("disjoint trees of each height …")
    made: list[Plan] = []
    for height in range(1, best.height + 1):
        above = made[-1].num_trees if made else 0
        found = disjoint_forest(best, height, above=above)
        if found is not None:
            made.append(found)
            if found.rate >= best.bound * (1 - TOLERANCE):
                break
    return made


def _distinct(made: Sequence[Plan]) -> tuple[Plan, ...]:
    """Return the first of each forest, all under the lowest bound."""
    proof = min(made, key=lambda one: one.bound)
    kept: list[Plan] = []
    for one in made:
        if all(one.shards != other.shards for other in kept):
            # a candidate's order is fixed: another collective is selected by size anew
            kept.append(replace(one, bound=proof.bound, certificate=proof.certificate, order="height"))
    return tuple(kept)


MOST_SIDES = 64
"""Most ranks that are sides by themselves."""

MOST_CHAINS = 16
"""Number of chains from the shortest whose exits are tried."""

ONE_BUFFER = ("allreduce", "broadcast", "reduce")
"""Collectives in which every byte of the buffer concerns all ranks."""

MOST_HEIGHTS = 3
"""Number of heights from the lowest whose packings are tried among few ranks; among more one more, at little cost."""

_LONGEST = 1 << 30
"""Largest rounded length."""


def chain_limits(
    fabric: Fabric, collective: str, root: int | None, rate: Fraction | None
) -> tuple[Limit, ...]:
    """Return limits of a collective on a fabric, ascending in chain, each with a lower rate than all later ones.

    The last may be that of a rank whose wires start many copies.

    rate: GB/s that no schedule exceeds.

    One hop of a DGX-2, in which every rank receives the data of fifteen others:

    >>> import topoplan
    >>> chain_limits(Fabric(topoplan.load("dgx-2"), ("nvlink",)), "allreduce", None, Fraction(80))
    (GroupLimit(chain=1.76e-05, between='ranks', side=('gpu0',)),)
    """
    if fabric.size == 1 or fabric.split or fabric.in_network or fabric.helpers or rate is None:
        return ()
    start_ups = least_start_ups(fabric)
    diameter = start_up_diameter(fabric, collective, root)
    best: dict[float, tuple[Fraction, ChainLimit]] = {}
    for limit in _tried(fabric, collective, root, start_ups, diameter):
        if limit.chain <= diameter * (1 + TOLERANCE):
            continue
        try:
            limited = limit.bound(fabric, collective, root, start_ups)
        except PlanError:
            continue
        if limited < rate and (limit.chain not in best or limited < best[limit.chain][0]):
            best[limit.chain] = limited, limit
    kept: list[ChainLimit] = []
    lowest = rate
    for _, (limited, limit) in sorted(best.items(), reverse=True):
        if limited < lowest:
            lowest = limited
            kept.append(limit)
    return (*reversed(kept), *_starts(fabric, collective, start_ups, diameter))


def _starts(
    fabric: Fabric, collective: str, start_ups: Sequence[float], diameter: float
) -> tuple[StartLimit, ...]:
    """Return the limit of the rank whose wires need longest to start its copies, if that is above the diameter."""
    if collective in ONE_BUFFER or not fabric.direct or fabric.size > MOST_SIDES:
        return ()
    seconds = {limit: limit.seconds(fabric, collective, start_ups) for limit in map(StartLimit, fabric.ranks)}
    longest = max(seconds, key=seconds.__getitem__)
    return (longest,) if seconds[longest] > diameter * (1 + TOLERANCE) else ()


def _tried(
    fabric: Fabric, collective: str, root: int | None, start_ups: Sequence[float], diameter: float
) -> Iterator[ChainLimit]:
    sides = list(_sides(fabric))
    for between in ("ranks", "servers"):
        yield from _groups(fabric, between, sides, start_ups)
    if fabric.size <= LARGEST_EXACT:
        for side in sides:
            yield from _groups(fabric, "sides", [side], start_ups)
    if has_exact_tables(fabric) or (fabric.direct and fabric.size <= MOST_LOW):
        yield from _heights(fabric, collective, root, start_ups, diameter)
    if collective in ONE_BUFFER and fabric.direct and fabric.size <= MOST_SIDES:
        yield from _exits(fabric, collective, root, start_ups, diameter)


def _groups(
    fabric: Fabric, between: str, sides: Sequence[frozenset[int]], start_ups: Sequence[float]
) -> Iterator[GroupLimit]:
    """Yield a limit for every side and every length of chain at which the groups change the limit."""
    groups = rank_groups(fabric, between, set(sides[0]))
    if len(groups) < 2:
        return
    inside, across = hop_start_ups(fabric, groups, start_ups)
    most = (3 if len(groups) == 2 else 2) * across
    chains = sorted({min(chain, most) for chain in (across + inside, across + 2 * inside, most)} - {math.inf})
    for side in sides:
        names = tuple(fabric.nodes[node] for node in sorted(side))
        for chain in chains:
            yield GroupLimit(_below(chain), between, names)


def _below(chain: float) -> float:
    """Return at most ``chain`` seconds, in the digits of a file.

    >>> [_below(chain) for chain in (17.6e-6, 29.505882e-6, 29.505874e-6)]
    [1.76e-05, 2.95058e-05, 2.95058e-05]
    """
    written = rounded(chain)
    if written <= chain * (1 + TOLERANCE):
        return written
    return rounded(chain - 10.0 ** (math.floor(math.log10(chain)) - 5))


def _sides(fabric: Fabric) -> Iterator[frozenset[int]]:
    """Yield sets of nodes that hold some ranks and not others: the traffic out of them is bounded."""
    nodes = frozenset(range(len(fabric.nodes)))
    seen: set[frozenset[int]] = set()

    def both(side: frozenset[int]) -> Iterator[frozenset[int]]:
        for one in (side, nodes - side):
            if one not in seen:
                seen.add(one)
                yield one

    for rank in range(min(fabric.size, MOST_SIDES)):
        yield from both(frozenset((rank,)))
    home = {device.name: device.server for device in fabric.topology.devices}
    for name in FabricServers(fabric).names if len(set(home.values())) > 1 else ():
        yield from both(frozenset(node for node in nodes if home[fabric.nodes[node]] == name))
    if fabric.size > LARGEST_EXACT:
        return
    capacity, _ = whole_capacities(fabric)
    plenty = sum(capacity) + 1
    arcs = [(src, dst, c) for (src, dst), c in zip(fabric.ends, capacity, strict=True)]
    source, sink = len(fabric.nodes), len(fabric.nodes) + 1
    for count in range(1, fabric.size):
        for chosen in combinations(range(fabric.size), count):
            ends = [
                (source, rank, plenty) if rank in chosen else (rank, sink, plenty)
                for rank in range(fabric.size)
            ]
            network = FlowNetwork(len(fabric.nodes) + 2, [*arcs, *ends])
            network.maximum(source, sink)
            side = frozenset(network.source_side()) & nodes
            if side not in seen:
                seen.add(side)
                yield side


def _exits(
    fabric: Fabric, collective: str, root: int | None, start_ups: Sequence[float], diameter: float
) -> Iterator[ExitLimit]:
    """Yield limits at the shortest chains at which a wire more reaches a rank.

    Lengths: of a broadcast or reduce 1 on some of the root's wires, of an allreduce 1 on every link, or the time of a
    byte. A rank with a switch next to it has none.
    """
    outward = collective != "reduce"
    try:
        exits = [
            Exits.of(fabric, rank, start_ups, outward=outward)
            for rank in (range(fabric.size) if root is None else (root,))
        ]
    except PlanError:
        return
    reached = np.concatenate([one.reach[one.reach < math.inf] for one in exits])
    chains = sorted({_below(float(chain)) for chain in reached if chain > diameter * (1 + TOLERANCE)})
    if root is None:
        apart = sorted({float(one) for each in exits for one in each.reach.min(axis=0)})
        longest = max(start_ups)
        for chain, plain in product(chains[:MOST_CHAINS], _plain_lengths(fabric)):
            # the rounding of `_below` is above the tolerance
            enough = (one for one in apart if 2 * one * (1 + TOLERANCE) - longest >= chain)
            for far in (0.0, *islice(enough, 1)):
                yield ExitLimit(chain, far, plain)
        return
    (alone,) = exits
    for chain in chains[:MOST_CHAINS]:
        for count in range(1, len(alone.links) + 1):
            for chosen in combinations(alone.links, count):
                lengths = [
                    (fabric.links[link].src, fabric.links[link].dst, 1) for each in chosen for link in each
                ]
                yield ExitLimit(chain, 0.0, tuple(lengths))


def _heights(
    fabric: Fabric, collective: str, root: int | None, start_ups: Sequence[float], diameter: float
) -> Iterator[HeightLimit]:
    """Yield lengths from packings of trees of the lowest heights, for an allreduce from those of its broadcasts.

    Among more ranks than tables are for, lengths of 1 on every link, or the time of a byte, are tried too. There the
    packings of an allreduce are left out, and above `MOST_FEW` ranks all of them.
    """
    alone = [(rank,) for rank in range(fabric.size)]
    hop = min(hop_start_ups(fabric, alone, start_ups))
    lowest = max(1, int(diameter / hop * (1 + TOLERANCE)))
    few = has_exact_tables(fabric)
    asked = [(collective, root)]
    if collective == "allreduce":
        asked = [("broadcast", rank) for rank in range(fabric.size if few else 1)]
    if fabric.size > MOST_FEW:
        asked = []
    for height in range(lowest, min(lowest + MOST_HEIGHTS + (not few), fabric.size - 1)):
        chain = _below((height + 1) * hop)
        for each, start in asked:
            packing = Packing(fabric, each, start)
            generation = ColumnGeneration(Pricing(packing, height))
            generation.run(None)
            lengths = packing.certificate(generation.duals()).lengths
            common = reduce(math.lcm, (length.denominator for _, _, length in lengths), 1)
            whole = [(src, dst, int(length * common)) for src, dst, length in lengths]
            longest = max((length for _, _, length in whole), default=0)
            if longest > _LONGEST:
                whole = [(src, dst, -(-length * _LONGEST // longest)) for src, dst, length in whole]
            yield HeightLimit(chain, height, tuple(whole))
        for lengths_of_all in () if few else _plain_lengths(fabric):
            yield HeightLimit(chain, height, lengths_of_all)


def _plain_lengths(fabric: Fabric) -> tuple[tuple[tuple[str, str, int], ...], ...]:
    """Return lengths of 1 on every link, and the times of a byte, in whole numbers."""
    alike = tuple((link.src, link.dst, 1) for link in fabric.links)
    capacity, _ = whole_capacities(fabric)
    common = math.lcm(*capacity)
    return alike, tuple((src, dst, common // c) for (src, dst, _), c in zip(alike, capacity, strict=True))
