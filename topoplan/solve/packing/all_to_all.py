"""Plan the best all-to-all, for equal blocks or a demand, with the certificate that proves it.

The trees of `topoplan.solve.packing.flow_packing` are packed by the first of these that applies:

- A demand among many ranks fills the links of its slowest cut (`topoplan.solve.packing.demand_paths`), without a
  program. If that reaches the cut's bound, the plan is optimal.
- Column generation on the orbits of the fabric's symmetries finds the optimum. The final duals are priced once more in
  whole numbers, so rate and bound are equal as rationals. If a cut proves the same bound, it is the certificate, since
  people can read it. For a demand it begins with trees under lengths that grow with the loads of the trees before;
  among many ranks, with the few of them that floating point packs.
- Within a given gap, floating point alone packs such trees (HiGHS, of scipy), and its duals are the lengths. Equal
  blocks have one row for each orbit there too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import gcd, lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import Note, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.plans.build import build_plan
from topoplan.plans.certificates.certificate import Certificate, Cut, OneFabric
from topoplan.plans.certificates.exchange import Demand, DemandMatrix
from topoplan.plans.certificates.forest_length import zero_length_components
from topoplan.plans.plan import ALL_TO_ALL, Plan
from topoplan.plans.shards import Shard
from topoplan.solve.cuts_and_partitions import exchange_bounds, lowest, proved_bounds
from topoplan.solve.packing.column_generation import ColumnGeneration
from topoplan.solve.packing.demand_paths import fill_cut
from topoplan.solve.packing.flow_packing import FlowPacking, FlowPricing, path_shards
from topoplan.solve.packing.packing_program import TreeColumn, length_of
from topoplan.solve.search_control import Deadline
from topoplan.solve.symmetry.symmetry_search import find_symmetry

Matrix = Sequence[Sequence[float]]
"""Bytes that row sends to column."""

MOST_LOW = 16
"""Inequivalent ranks up to which lower paths are searched."""

SPREAD_FROM = 9
"""Ranks from which the search for paths of a demand begins with trees that avoid each other's links."""

SPREAD_ROUNDS = 12
"""Trees of each rank that are tried then; 32 GPUs on 4 servers have 8 different ones, one for each NIC."""

FILLED_FROM = 17
"""Ranks from which the links of the slowest cut are filled before the optimum of a demand is searched for."""

NEARLY = 1e-2
"""Gap, as a fraction, to which floating point packs the trees with which an exact search among many ranks begins."""

STRICTER = 0.99
"""Part of the gap that floating point uses; the rest is for rounding."""

WEIGHT_PARTS = 1 << 24
"""Parts in which the weights of the trees of a rank are stated, if they are found in floating point."""

LENGTH_PARTS = 1 << 20
"""Parts of the longest link in which lengths are rounded to whole numbers."""

MOST_BYTES = 1 << 53
"""Bytes of one pair up to which a JSON number is exact everywhere."""


@dataclass(frozen=True)
class _Exchange:
    """The blocks between all ranks of a fabric; ``units`` is their demand without common divisor."""

    fabric: Fabric
    demand: DemandMatrix | None

    @cached_property
    def units(self) -> DemandMatrix:
        if self.demand is None:
            return ((1,) * self.fabric.size,) * self.fabric.size
        common = gcd(*(amount for row in self.demand for amount in row))
        return tuple(tuple(amount // common for amount in row) for row in self.demand)

    @cached_property
    def generators(self) -> tuple[tuple[int, ...], ...]:
        """Symmetries of the fabric, which keep equal blocks; none for others, whose symmetries are not searched."""
        moved = {amount for s, row in enumerate(self.units) for d, amount in enumerate(row) if s != d}
        if len(moved) > 1:
            return ()
        return tuple(tuple(each.tolist()) for each in find_symmetry(self.fabric, largest=self.fabric.size))

    @property
    def packing(self) -> FlowPacking:
        return FlowPacking(self.fabric, ALL_TO_ALL, None, self.generators, self.units)

    def stated(self, certificate: OneFabric) -> Certificate:
        """Return the certificate of a plan for one of links."""
        return certificate if self.demand is None else Demand(self.demand, certificate)

    def proofs(self, certificates: Sequence[OneFabric]) -> list[tuple[Fraction, Certificate]]:
        """Return the bounds that certificates of links prove."""
        return proved_bounds([self.stated(one) for one in certificates], self.fabric, ALL_TO_ALL, None)

    def plan(
        self,
        shards: Sequence[Shard],
        certificate: Certificate,
        method: str,
        notes: Sequence[str] = (),
        *,
        loads: Sequence[Fraction] | None = None,
    ) -> Plan:
        """Return the plan of some shards; ``loads`` of links are theirs, if they are known."""
        return build_plan(
            self.fabric,
            ALL_TO_ALL,
            root=None,
            shards=shards,
            certificate=certificate,
            schedule="paths",
            method=method,
            notes=notes,
            loads=loads,
        )


def plan_all_to_all(
    fabric: Fabric,
    *,
    demand: DemandMatrix | None = None,
    epsilon: float | None = None,
    height: int | None = None,
    deadline: Deadline | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Return the optimal all-to-all among two or more connected ranks.

    ``demand`` is as `check_demand` returns it; None if all pairs exchange the same. With ``epsilon`` the plan may stay
    that fraction below its bound. ``height`` limits the edges of a path, and the bound is still that of all paths. At
    ``deadline`` the best plan so far is taken.
    """
    deadline = deadline or Deadline(None)
    exchange = _Exchange(fabric, demand)
    made = None
    if epsilon is not None:
        gap = Fraction(epsilon)
        made = _filled_plan(exchange, "mwu", deadline, slack=gap / (1 - gap))
        return made or _plan_within(exchange, epsilon, deadline, progress)
    if demand is not None and fabric.size >= FILLED_FROM:
        made = _filled_plan(exchange, "exact", deadline)
    if made is None or made.gap:
        made = _optimal_plan(exchange, deadline, progress)
    if height is not None and made.height > height:
        made = _lower_plan(exchange, height, made.certificate, deadline, progress)
    return made


def _filled_plan(
    exchange: _Exchange, method: str, deadline: Deadline, *, slack: Fraction = Fraction(0)
) -> Plan | None:
    """Return the plan that fills the links of the slowest cut, if there is one."""
    fabric, units = exchange.fabric, exchange.units
    filled = fill_cut(fabric, units, slack=slack, deadline=deadline)
    if filled is None:
        return None
    shards = path_shards(fabric, units, filled.paths())
    tallest = max(len(shard.stages[0].edges) for shard in shards)
    notes = _height_notes(tallest) if method == "exact" else ()
    loads = filled.loads(Fraction(sum(map(sum, units)), fabric.size))
    return exchange.plan(shards, exchange.stated(filled.cut), method, notes, loads=loads)


def _height_notes(tallest: int) -> tuple[str, ...]:
    """Return the note that lower paths were not searched, if there may be any."""
    text = f"height {tallest} is that of the first optimum; lower ones were not tried"
    return (Note(text, "height open"),) if tallest > 1 else ()


def _plan_within(
    exchange: _Exchange, epsilon: float, deadline: Deadline, progress: Callable[[str], None] | None
) -> Plan:
    """Return a plan that stays at most ``epsilon`` below its bound, as a fraction, if the deadline allows."""
    fabric = exchange.fabric
    packing = exchange.packing
    weights, lengths = pack_within(packing, epsilon, deadline=deadline, progress=progress)
    known = exchange.proofs((*exchange_bounds(fabric), *_candidate_cuts(lengths, fabric), lengths))
    return exchange.plan(packing.shards(weights), lowest(known)[1], "mwu")


def _optimal_plan(exchange: _Exchange, deadline: Deadline, progress: Callable[[str], None] | None) -> Plan:
    """Return the optimum by column generation."""
    fabric, demand = exchange.fabric, exchange.demand
    packing = exchange.packing
    known = exchange.proofs(exchange_bounds(fabric))
    bound, certificate = lowest(known)
    generation = ColumnGeneration(FlowPricing(packing), progress=progress, deadline=deadline)
    target = bound * packing.scale
    spread = not exchange.generators and demand is not None and fabric.size >= SPREAD_FROM
    if spread and fabric.size >= FILLED_FROM:
        generation.add(list(pack_within(packing, NEARLY, deadline=deadline, progress=progress)[0]))
    elif spread:
        generation.add(_spread_trees(packing, deadline))
    if not (spread and generation.pack_known(target)) and not generation.run(target):
        while not deadline.over() and _price_again(generation):
            pass
        lengths = packing.certificate(generation.duals())
        known += exchange.proofs((*_candidate_cuts(lengths, fabric), lengths))
        bound, certificate = lowest(known)
    notes: tuple[str, ...] = ()
    routes = (path for tree in generation.weights() for path in packing.paths(tree))
    tallest = max(sum(node < fabric.size for node in path) - 1 for path in routes)
    if len(packing.roots) <= MOST_LOW and not deadline.cut:
        generation = _lowest_paths(packing, generation, tallest, progress, deadline)
    elif not deadline.cut:
        notes = _height_notes(tallest)
    if deadline.cut:
        notes = (deadline.note(generation.value / packing.scale, bound),)
    return exchange.plan(packing.shards(generation.weights()), certificate, "exact", notes)


def _lower_plan(
    exchange: _Exchange,
    height: int,
    certificate: Certificate,
    deadline: Deadline,
    progress: Callable[[str], None] | None,
) -> Plan:
    """Return the best plan whose paths have at most ``height`` edges; UsageError if some ranks have no such path."""
    fabric = exchange.fabric
    packing = FlowPacking(fabric, ALL_TO_ALL, None, (), exchange.units)
    ones = [1] * len(packing.limits)
    for root in packing.roots:
        if packing.shortest_paths(root, ones, height) is None:
            raise UsageError(
                f"height must allow a path from rank {root} to every rank that it sends to, got {height}; raise it"
            )
    generation = ColumnGeneration(FlowPricing(packing, height), progress=progress, deadline=deadline)
    generation.run(None)
    while not deadline.over() and _price_again(generation):
        pass
    best = "the best found" if deadline.cut else "the best"
    notes = [Note(f"paths of height {height} at most, as asked; {best} of that height", "height asked")]
    if deadline.cut:
        notes.append(deadline.note_of_height())
    made = exchange.plan(packing.shards(generation.weights()), certificate, "exact", notes)
    return made if made.gap else replace(made, notes=())


def pack_within(
    packing: FlowPacking,
    epsilon: float,
    *,
    deadline: Deadline | None = None,
    progress: Callable[[str], None] | None = None,
) -> tuple[dict[TreeColumn, Fraction], OneFabric]:
    """Return weights of trees whose rate is at most ``epsilon`` below a bound, as a fraction, and its lengths.

    The weights of every rank, or orbit of ranks, add up to 1. The program of the known trees is solved in floating
    point (HiGHS): the least time in which every rank sends its demand. Trees are priced under its duals, and under the
    mean of earlier ones. At ``deadline`` the weights of the trees so far are returned.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csc_array

    limits = np.array([float(limit) for limit in packing.limits])
    deadline = deadline or Deadline(None)
    trees = dict.fromkeys(_spread_trees(packing, deadline))
    mean = 1 / limits / len(limits)
    best = 0.0
    lengths = [0] * len(limits)
    while True:
        known = list(trees)
        rows = np.array([packing.owner_row(tree) for tree in known])
        usage = np.array([tree.usage for tree in known], dtype=np.float64).T / limits[:, None]
        widest = usage.max()
        owners = np.zeros((len(packing.roots), len(known) + 1))
        owners[rows, np.arange(len(known))] = 1
        cost = np.append(np.zeros(len(known)), 1.0)
        links: Any = csc_array(np.column_stack([usage / widest, -np.ones(len(limits))]))
        ranks: Any = csc_array(owners)
        found = linprog(
            cost,
            A_ub=links,
            b_ub=np.zeros(len(limits)),
            A_eq=ranks,
            b_eq=packing.root_counts,
            method="highs",
        )
        if found.x is None:
            raise RuntimeError(f"HiGHS found no packing of {len(known)} trees: {found.message}")
        time = found.fun * widest
        duals = np.maximum(-found.ineqlin.marginals, 0) / limits
        mean = (mean + duals / (duals @ limits)) / 2
        for values in (duals, mean):
            whole = [int(part) for part in np.rint(values / values.max() * LENGTH_PARTS).tolist()]
            cheapest = [packing.shortest_paths(root, whole) for root in packing.roots]
            priced = [tree for tree in cheapest if tree is not None]
            needed = sum(
                length_of(tree, whole) * packing.root_counts[packing.owner_row(tree)] for tree in priced
            )
            least = needed / sum(c * y for c, y in zip(packing.limits, whole, strict=True))
            if least > best:
                best, lengths = least, whole
            trees |= dict.fromkeys(priced)
        if progress is not None:
            progress(
                f"packing: {len(known)} trees of {packing.fabric.size} GPUs, {best / time:.2%} of the bound"
            )
        if best >= time * (1 - epsilon * STRICTER) or len(trees) == len(known) or deadline.over():
            break
    shares = found.x[:-1] / np.array(packing.root_counts)[rows]
    return _whole_weights(known, rows, shares), packing.certificate(lengths)


def _whole_weights(
    trees: Sequence[TreeColumn], rows: NDArray[np.int64], found: NDArray[np.float64]
) -> dict[TreeColumn, Fraction]:
    """Return weights as fractions that add up to 1 for each rank: its largest takes what rounding leaves."""
    parts = np.rint(np.maximum(found, 0) * WEIGHT_PARTS).astype(np.int64)
    for row in range(int(rows.max()) + 1):
        own = np.flatnonzero(rows == row)
        parts[own[parts[own].argmax()]] += WEIGHT_PARTS - parts[own].sum()
    return {
        tree: Fraction(part, WEIGHT_PARTS) for tree, part in zip(trees, parts.tolist(), strict=True) if part
    }


def check_demand(demand: Matrix, size: int) -> DemandMatrix:
    """Return the bytes that row sends to column among ``size`` ranks; UsageError unless whole, 0 to `MOST_BYTES`."""
    if len(demand) != size or any(len(row) != size for row in demand):
        lengths = ", ".join(map(str, sorted({len(row) for row in demand})))
        raise UsageError(
            f"the demand has {len(demand)} rows of {lengths or 0} entries for {size} ranks; "
            f"give {size} rows of {size}"
        )
    for source, row in enumerate(demand):
        for destination, amount in enumerate(row):
            if isinstance(amount, bool) or not 0 <= amount <= MOST_BYTES or amount != int(amount):
                raise UsageError(
                    f"the demand from rank {source} to rank {destination} must be whole bytes from 0 to "
                    f"{MOST_BYTES:,}, got {amount}"
                )
    if not any(row[other] for rank, row in enumerate(demand) for other in range(size) if other != rank):
        raise UsageError("the demand sends nothing from any rank to another; there is nothing to plan")
    return tuple(tuple(int(amount) for amount in row) for row in demand)


def _spread_trees(packing: FlowPacking, deadline: Deadline) -> list[TreeColumn]:
    """Return trees of shortest paths for every rank, under lengths that grow with the loads of earlier trees.

    The rule is that of multiplicative weights (Garg, Könemann 1998) with long steps. The master program then has most
    trees of an optimum at once, which pricing would find one by one.
    """
    weights = [1 / limit for limit in packing.limits]
    found: list[TreeColumn] = []
    for _ in range(SPREAD_ROUNDS):
        longest = max(weights)
        lengths = [1 + int(weight / longest * LENGTH_PARTS) for weight in weights]
        trees = (packing.shortest_paths(root, lengths) for root in packing.roots)
        round_of_trees = [tree for tree in trees if tree is not None]
        found += round_of_trees
        loads = [sum(used) for used in zip(*(tree.usage for tree in round_of_trees), strict=True)]
        fullest = max((load / limit for load, limit in zip(loads, packing.limits, strict=True)), default=0.0)
        if not fullest or deadline.over():
            break
        weights = [
            weight * (1 + load / limit / fullest / 2)
            for weight, load, limit in zip(weights, loads, packing.limits, strict=True)
        ]
    return found


def _lowest_paths(
    packing: FlowPacking,
    generation: ColumnGeneration,
    tallest: int,
    progress: Callable[[str], None] | None,
    deadline: Deadline,
) -> ColumnGeneration:
    """Return paths of as few edges as reach the same rate, each lower height being refuted by its own duals."""
    target = generation.value
    for height in range(1, tallest):
        limited = ColumnGeneration(FlowPricing(packing, height), progress=progress, deadline=deadline)
        if limited.run(target, hopeless=target):
            return limited
    return generation


def _price_again(generation: ColumnGeneration) -> bool:
    """Price the columns once more under exact duals; return whether the program got better columns."""
    duals, _ = generation.program.duals()
    lengths, prices = duals[: generation.rows], duals[generation.rows :]
    found = generation.pricing.cheapest(lengths)
    better = [tree for place, tree in sorted(found.items()) if length_of(tree, lengths) < prices[place]]
    if not generation.add(better):
        return False
    generation.program.optimise()
    return True


def _candidate_cuts(lengths: OneFabric, fabric: Fabric) -> list[Cut]:
    """Return the cuts between devices at a distance above 0: they may prove the same bound and are readable."""
    values = lengths.link_lengths(fabric, ALL_TO_ALL)
    scale = lcm(*(value.denominator for value in values))
    part = zero_length_components(fabric, [int(value * scale) for value in values])
    with_ranks = sorted(set(part[: fabric.size]))
    if len(with_ranks) < 2:
        return []
    return [
        Cut(fabric.devices_of(state for state, other in enumerate(part) if other == first))
        for first in with_ranks
    ]
