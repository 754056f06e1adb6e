"""Verify a plan independently of how it was made: recompute every claim from the plan alone.

Recomputed are the trees, the postcondition (every rank ends with each contribution exactly once), the link loads,
the rate, and the bound that the certificate proves. Contributions are counted: rank r starts with one of its own,
which its buffer holds even if the collective does not use it; a reduce edge adds the child's counts to the parent's, a
broadcast edge replaces the child's by the parent's, and a gather adds its root's state from before the exchange to
every rank of its tree. Entries count as the elements that they represent. Ranks that only forward elements between
others are counted too, but a broadcast must replace what they hold.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import PlanError, UsageError
from topoplan.machine.fabric import CHANNEL_LINKS, STAGED, Fabric
from topoplan.machine.fabric_structure import keeps_wires
from topoplan.machine.permutation_groups import orbits
from topoplan.machine.routing import staged
from topoplan.plans.certificates.certificate import Channels
from topoplan.plans.deferred_plan import DeferredPlan
from topoplan.plans.loads import edge_links, full_links, link_loads, rate_of_loads
from topoplan.plans.plan import ALL_COLLECTIVES, ALL_TO_ALL, ROOTED, Plan, Plans
from topoplan.plans.shards import (
    OPERATIONS,
    ImageShards,
    Shard,
    Stage,
    check_entries,
    owner_of,
    path_ends,
)
from topoplan.units import TOLERANCE, nearest_float, shown

if TYPE_CHECKING:
    from topoplan.plans.certificates.exchange import Demand
    from topoplan.plans.plan_by_kind import PlanByKind

MANY = 1 << 40
"""Counts of contributions are capped here: wrapped around, a wrong count could look right."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The recomputed facts of a plan.

    Parameters
    ----------
    rate, bound : float
        GB/s of algorithm bandwidth; infinite for a single rank.
    exact_rate, exact_bound : Fraction or None
        The same as rational numbers; None for a single rank.
    optimal : bool
        Rate and bound are equal as rational numbers.
    trees, height : int
    bottleneck : tuple of (str, str)
        Links that are full at the plan's rate.
    loads : dict of (src, dst) to float
        Bytes across each used link for each byte of the buffer, of all channels between two devices together.
    """

    rate: float
    bound: float
    exact_rate: Fraction | None
    exact_bound: Fraction | None
    optimal: bool
    trees: int
    height: int
    bottleneck: tuple[tuple[str, str], ...] = field(repr=False)
    loads: dict[tuple[str, str], float] = field(repr=False)


def verify(plan: Plan | PlanByKind) -> Verification:
    """Recompute everything that a plan claims.

    Parameters
    ----------
    plan : Plan or PlanByKind
        The trees of a cluster by kind are verified by their templates; ``loads`` then has one link of each class.

    Raises
    ------
    PlanError
        The first fault, with shard, stage and rank.

    See Also
    --------
    topoplan.compute_bound, topoplan.load_plan

    Examples
    --------
    >>> import topoplan
    >>> report = topoplan.verify(topoplan.plan(topoplan.load("dgx-1v"), "allreduce"))
    >>> report.exact_rate, report.exact_bound
    (Fraction(600, 7), Fraction(600, 7))
    """
    if isinstance(plan, DeferredPlan):
        plan = plan.by_kind
    if not isinstance(plan, Plan):
        # Few plans are of clusters by kind, so their modules are imported here.
        from topoplan.plans.plan_by_kind import PlanByKind
        from topoplan.plans.verify_by_kind import verify_by_kind

        if not isinstance(plan, PlanByKind):
            raise UsageError(
                f"verify takes one plan, got {type(plan).__name__}; read a file by load_plan, and take the plans of a "
                "SizePlans or MeshPlans one by one"
            )
        return verify_by_kind(plan)
    fabric = _check_header(plan)
    if isinstance(plan.shards, ImageShards):
        _check_symmetries(plan, plan.shards, fabric)
    _check_shares(plan)
    sparse = plan.sparse
    for number, (shard, _) in enumerate(plan.shard_counts):
        _check_trees(shard, number, len(fabric.vertices), sparse=sparse)
        _check_helpers(shard, number, fabric)
        if plan.collective != ALL_TO_ALL:
            _check_postcondition(plan, shard, number, len(fabric.vertices))
    if plan.collective == ALL_TO_ALL:
        _check_exchange(plan)
    elif plan.certificate.kind == "demand":
        raise PlanError(f"a demand bounds alltoall, not {plan.collective}")
    _check_channels(plan, fabric)
    _check_exchanges(plan)
    _check_sparse(plan, fabric)
    found = link_loads(plan.shards, fabric)
    rate = rate_of_loads(found, fabric)
    bound = plan.certificate.bound(fabric, plan.collective, plan.root) if fabric.size > 1 else None
    check_claims((plan.rate, plan.bound), rate, bound, "machine")
    loads: dict[tuple[str, str], float] = {}
    for link, load in zip(fabric.links, found, strict=True):
        if load:
            loads[link.src, link.dst] = loads.get((link.src, link.dst), 0.0) + float(load)
    return Verification(
        rate=math.inf if rate is None else nearest_float(rate),
        bound=math.inf if bound is None else nearest_float(bound),
        exact_rate=rate,
        exact_bound=bound,
        optimal=rate == bound,
        trees=plan.num_trees,
        height=plan.height,
        bottleneck=tuple((fabric.links[i].src, fabric.links[i].dst) for i in full_links(found, fabric)),
        loads=loads,
    )


def verify_all(plans: Plans) -> tuple[Verification, ...]:
    """Verify a plan, or the plan of every range; return a report for each.

    PlanError for the first fault, with range, shard, stage and rank.
    """
    reports = []
    for one in plans.ranges:
        try:
            reports.append(verify(one.plan))
        except PlanError as error:
            raise error.under(f"{one}") if len(plans.ranges) > 1 else error from None
    return tuple(reports)


def _check_header(plan: Plan) -> Fabric:
    if plan.collective not in ALL_COLLECTIVES:
        raise PlanError(f"collective {plan.collective!r} is unknown")
    if tuple(plan.ranks) != plan.topology.gpus:
        raise PlanError(
            f"ranks {', '.join(plan.ranks)} are not the GPUs of the embedded topology, "
            f"{', '.join(plan.topology.gpus) or 'none'}"
        )
    if plan.collective in ROOTED and (plan.root is None or not 0 <= plan.root < len(plan.ranks)):
        raise PlanError(f"root {plan.root} is not a rank of this {plan.collective}")
    if plan.collective not in ROOTED and plan.root is not None:
        raise PlanError(f"{plan.collective} has no root, but the plan names rank {plan.root}")
    fabric = Fabric(plan.topology, plan.channels)
    demand = _demand_of(plan)
    if demand is not None:
        demand.check(fabric)
    if fabric.unreachable(plan.collective, plan.root, None if demand is None else demand.demand):
        raise PlanError(f"the ranks are not connected over {', '.join(plan.channels)}")
    return fabric


def _demand_of(plan: Plan) -> Demand | None:
    """Return the demand of an all-to-all whose blocks differ; None for other plans."""
    if plan.collective != ALL_TO_ALL:
        return None
    from topoplan.plans.certificates.exchange import Demand

    return plan.certificate if isinstance(plan.certificate, Demand) else None


def _check_symmetries(plan: Plan, shards: ImageShards, fabric: Fabric) -> None:
    """Check that a symmetry maps the wires onto themselves: then images of correct trees are correct, and loads even.

    Equal links are those of one channel. Their bandwidths may differ: the rate is taken link by link, from the loads.
    The root of a broadcast or reduce must stay, and images stand in the order of their owners.
    """
    if shards.nodes != fabric.nodes or shards.ranks != fabric.size:
        raise PlanError("the symmetries must permute the devices of this plan")
    for number, generator in enumerate(shards.generators):
        if not keeps_wires(fabric, generator):
            raise PlanError(f"symmetry {number} does not map the machine's links onto equal links")
        if plan.root is not None and generator[plan.root] != plan.root:
            raise PlanError(
                f"symmetry {number} moves the root of this {plan.collective}, rank {plan.root}, "
                f"to rank {generator[plan.root]}"
            )
    for number, shard in enumerate(shards.templates):
        _check_trees(shard, number, fabric.size)
        gathers = plan.collective in ("allgather", "reduce_scatter")
        if gathers and owner_of(shard) != _owner(plan, shard, number):
            raise PlanError(
                f"the images would be ordered by rank {owner_of(shard)}, not by their owner",
                shard=number,
                rank=_owner(plan, shard, number),
            )


def _check_shares(plan: Plan) -> None:
    sums: dict[int, int] = {}  # of the shares of each denominator
    owned = [Fraction(0)] * len(plan.ranks)
    previous = 0
    for number, (shard, count) in enumerate(plan.shard_counts):
        if shard.share.numerator <= 0:
            raise PlanError(f"share {shown(shard.share)} must be above zero", shard=number)
        if isinstance(plan.shards, ImageShards) and plan.shards.parts is not None:
            mean = plan.shards.parts.share(number)
            if shard.share != mean:
                raise PlanError(
                    f"share {shown(shard.share)} is not the mean of its images' parts, {shown(mean)}",
                    shard=number,
                )
        sums[shard.share.denominator] = sums.get(shard.share.denominator, 0) + shard.share.numerator * count
        if plan.collective in ("allgather", "reduce_scatter"):
            owner = _owner(plan, shard, number)
            if not 0 <= owner < len(plan.ranks):
                raise PlanError(
                    f"owns the shard and is out of range 0 to {len(plan.ranks) - 1}", shard=number, rank=owner
                )
            if owner < previous and not isinstance(plan.shards, ImageShards):
                raise PlanError(
                    "shards must stand in the order of their owners, the ranks", shard=number, rank=owner
                )
            previous = owner
            owned[owner] += shard.share * count
    unit = math.lcm(*sums)
    total = Fraction(sum(parts * (unit // denominator) for denominator, parts in sums.items()), unit)
    whole = len(plan.ranks) if plan.collective == ALL_TO_ALL else 1
    if total != whole:
        raise PlanError(f"the shares add up to {shown(total)}, not {whole}")
    if plan.collective in ("allgather", "reduce_scatter"):
        for rank, share in enumerate(_shared_by_symmetry(plan, owned)):
            if share != Fraction(1, len(plan.ranks)):
                raise PlanError(
                    f"owns {shown(share)} of the buffer instead of 1/{len(plan.ranks)}", rank=rank
                )


def _shared_by_symmetry(plan: Plan, owned: list[Fraction]) -> list[Fraction]:
    """Return every rank's share, given the shares of the templates' owners with all their images."""
    if not isinstance(plan.shards, ImageShards):
        return owned
    images = plan.shards.parts
    if images is not None:
        parts = [0] * len(owned)
        for number, (template, each) in enumerate(zip(plan.shards.templates, images.parts, strict=True)):
            owners = plan.shards.elements[list(plan.shards.images[number]), owner_of(template)]
            for owner, part in zip(owners.tolist(), each, strict=True):
                parts[owner] += part
        return [Fraction(part, images.unit) for part in parts]
    orbit = orbits(len(plan.shards.nodes), [np.array(generator) for generator in plan.shards.generators])[
        : len(owned)
    ].tolist()
    total, sizes = [Fraction(0)] * len(owned), Counter(orbit)
    for label, share in zip(orbit, owned, strict=True):
        total[label] += share
    mean = {label: total[label] / size for label, size in sizes.items()}
    return [mean[label] for label in orbit]


def _check_trees(shard: Shard, number: int, size: int, *, sparse: bool = False) -> None:
    if not shard.stages:
        raise PlanError("has no stage", shard=number)
    for position, stage in enumerate(shard.stages):
        if stage.op not in OPERATIONS:
            raise PlanError(
                f"op {stage.op!r} must be one of {', '.join(OPERATIONS)}", shard=number, stage=position
            )
        if sparse and stage.kind == "exchange":
            raise PlanError("a gather moves entries, and the stage says none", shard=number, stage=position)
        try:
            if stage.entries is not None:
                check_entries(stage.entries)
            stage.check_ranks(size)
            stage.top_down()
        except PlanError as error:
            raise error.within(number, position) from None


def _check_helpers(shard: Shard, number: int, fabric: Fabric) -> None:
    """Raise PlanError for a route that passes a helper: it stores data and sends it on, as a vertex of the tree."""
    helpers = set(fabric.helpers)
    for position, stage in enumerate(shard.stages) if helpers else ():
        for edge in stage.edges:
            passed = helpers.intersection(edge.route[1:-1])
            if passed:
                text = f"edge {edge.parent}>{edge.child} passes helper {min(passed)}; make it a vertex of the tree"
                raise PlanError(text, shard=number, stage=position, rank=edge.child)


@dataclass(frozen=True)
class Moves:
    """The edges of a stage as arrays, level by level from the root."""

    op: str
    root: int
    levels: tuple[tuple[NDArray[np.int64], NDArray[np.int64]], ...]

    @staticmethod
    def of(stage: Stage) -> Moves:
        depth = {stage.root: 0}
        levels: dict[int, tuple[list[int], list[int]]] = {}
        for edge in stage.top_down():
            depth[edge.child] = depth[edge.parent] + 1
            parents, children = levels.setdefault(depth[edge.child], ([], []))
            parents.append(edge.parent)
            children.append(edge.child)
        return Moves(stage.op, stage.root, tuple((np.array(p), np.array(c)) for p, c in levels.values()))


def contributions(stages: Sequence[Moves], held: NDArray[np.int64], ranks: int) -> NDArray[np.int64]:
    """Count the contributions that every rank holds after the stages.

    ``held``, (V, sources), is changed and returned: how often vertex r, one of the first ``ranks`` or a helper, holds
    the contribution of a source; counts above `MANY` are `MANY`. PlanError if a helper sends before it holds anything
    from any source.
    """
    chosen: NDArray[np.int64] | None = None
    for stage in stages:
        if stage.op == "gather":
            chosen = held.copy() if chosen is None else chosen
            for _, children in stage.levels:
                held[children] = np.minimum(held[children] + chosen[stage.root], MANY)
            continue
        chosen = None
        down = stage.op == "broadcast"
        for parents, children in stage.levels if down else reversed(stage.levels):
            _check_senders(held, parents if down else children, ranks)
            if down:
                held[children] = held[parents]
            else:
                np.add.at(held, parents, held[children])
                held[parents] = np.minimum(held[parents], MANY)
    return held


def _check_senders(held: NDArray[np.int64], vertices: NDArray[np.int64], ranks: int) -> None:
    for vertex in vertices[vertices >= ranks].tolist():
        if not held[vertex].any():
            raise PlanError("is a helper and sends before it holds anything", rank=vertex)


MOST_COUNTED = 1 << 25
"""Entries up to which the contributions of all ranks are counted together: 256 MB. Helpers need them together."""


def _check_postcondition(plan: Plan, shard: Shard, number: int, vertices: int) -> None:
    size = len(plan.ranks)
    destinations: Sequence[int] = range(size)
    owner: int | None = None
    if plan.collective in ("broadcast", "allgather"):
        owner = _integer(plan.root if plan.collective == "broadcast" else _owner(plan, shard, number))
    elif plan.collective in ("reduce", "reduce_scatter"):
        destinations = [_integer(plan.root if plan.collective == "reduce" else _owner(plan, shard, number))]
    last = len(shard.stages) - 1
    step = size if vertices > size else max(1, MOST_COUNTED // vertices)
    moves = [Moves.of(stage) for stage in shard.stages]
    for first in range(0, size, step):
        sources = np.arange(first, min(first + step, size))
        start = np.zeros((vertices, len(sources)), dtype=np.int64)
        start[sources, np.arange(len(sources))] = 1
        wanted = np.ones(len(sources), dtype=np.int64) if owner is None else start[owner].copy()
        try:
            held = contributions(moves, start, size)
        except PlanError as error:
            raise error.within(number, last) from None
        there = held if len(destinations) == vertices else held[destinations]
        if (there == wanted).all():
            continue
        for rank in destinations:
            wrong = np.flatnonzero(held[rank] != wanted)
            if wrong.size:
                missing = np.flatnonzero(held[rank] < wanted)
                source = int(missing[0] if missing.size else wrong[0])
                raise PlanError(
                    f"ends with the contribution of rank {sources[source]} {int(held[rank, source])} times "
                    f"instead of {int(wanted[source])}",
                    shard=number,
                    stage=last,
                    rank=rank,
                )


def _check_exchange(plan: Plan) -> None:
    """Check that every rank's block for every rank is sent in full, by paths in the order of destination and source."""
    if isinstance(plan.shards, ImageShards):
        raise PlanError("the shards of an alltoall follow their destinations and sources, not symmetries")
    if isinstance(plan.certificate, Channels):
        raise PlanError(
            "the bounds of channels do not add up for an alltoall: pairs may be divided differently"
        )
    size = len(plan.ranks)
    demand = _demand_of(plan)
    carried: dict[tuple[int, int], Fraction] = {}
    last = (0, 0)
    for number, shard in enumerate(plan.shards):
        try:
            source, destination = path_ends(shard)
        except PlanError as error:
            raise error.within(number, 0) from None
        if (destination, source) < last:
            raise PlanError(
                "shards of an alltoall must stand in the order of their destinations, then of their sources",
                shard=number,
                rank=source,
            )
        last = destination, source
        if demand is None:
            pair = source, destination
            carried[pair] = carried.get(pair, Fraction(0)) + shard.share
    if demand is not None:
        demand.suppose(plan.shards)
        return
    for source in range(size):
        for destination in range(size):
            share = carried.get((source, destination), Fraction(0))
            if share != Fraction(1, size):
                raise PlanError(
                    f"sends {shown(share)} of its buffer to rank {destination} instead of 1/{size}",
                    rank=source,
                )


def _check_channels(plan: Plan, fabric: Fabric) -> None:
    """Check that every shard of a split plan keeps to one channel, and owners' blocks are divided equally.

    Only then do the bounds of the channels add up: that of one channel assumes equal blocks.
    """
    if STAGED in plan.channels and staged(plan.topology) != plan.topology:
        raise PlanError(
            "a PCIe switch of the machine turns copies around, which channels all-staged leave to the CPUs' memory"
        )
    if not (fabric.split or isinstance(plan.certificate, Channels)):
        return
    carried: dict[tuple[str, int], Fraction] = {}
    for number, shard in enumerate(plan.shards):
        channel = _only_channel(shard, number, fabric)
        owner = _owner(plan, shard, number)
        carried[channel, owner] = carried.get((channel, owner), Fraction(0)) + shard.share
    if plan.collective in ("allgather", "reduce_scatter") and isinstance(plan.certificate, Channels):
        for channel in sorted({channel for channel, _ in carried}):
            shares = [carried.get((channel, rank), Fraction(0)) for rank in range(fabric.size)]
            for rank, share in enumerate(shares):
                if share != shares[0]:
                    raise PlanError(
                        f"{float(share):.6g} of the buffer runs over {channel} from this owner and "
                        f"{float(shares[0]):.6g} from rank 0: the bound holds only if all are divided equally",
                        rank=rank,
                    )


def _only_channel(shard: Shard, number: int, fabric: Fabric) -> str:
    first = ""
    for position, stage in enumerate(shard.stages):
        for edge in stage.edges:
            first = first or edge.channel
            try:
                crossed = {fabric.links[link].channel for link in edge_links(edge, stage.op, fabric)}
            except PlanError as error:
                raise error.within(number, position) from None
            if edge.channel != first or not crossed <= set(CHANNEL_LINKS[first]):
                raise PlanError(
                    f"a shard over {first} uses {edge.channel} too; in a split plan every shard keeps to one channel",
                    shard=number,
                    stage=position,
                    rank=edge.child,
                )
    return first


def _check_exchanges(plan: Plan) -> None:
    """Check the condition for equal bits on all ranks: what is used was added up from elements of the same ranks.

    A rank of an exchange that does not send, or to which not all do, only forwards. A broadcast must replace its
    elements before they are used.
    """
    if not plan.exchanges:
        return
    if plan.collective != "allreduce":
        raise PlanError(f"elements are exchanged in an allreduce only, not in a {plan.collective}")
    from topoplan.plans.structure import rounds

    rounds(plan)  # rejects shards that cannot run in parallel
    for number, shard in enumerate(plan.shards):
        forwarded: dict[int, str] = {}
        found = {place: (roots, reached) for place, roots, reached in exchanged(shard)}
        for position, stage in enumerate(shard.stages):
            used = [stage.root]
            if stage.op == "reduce":
                used += [edge.child for edge in stage.edges] + [edge.parent for edge in stage.edges]
            if stage.op != "gather":
                _check_used(used, forwarded, number, position)
            elif position in found:
                roots, reached = found[position]
                _check_used(roots, forwarded, number, position)
                adding = ranks_that_add(roots, reached)
                forwarded |= {
                    rank: f"{len(senders)} of {len(roots)} ranks"
                    for rank, senders in reached.items()
                    if rank not in adding
                }
            if stage.op == "broadcast":
                for edge in stage.edges:
                    forwarded.pop(edge.child, None)
        _check_used(range(len(plan.ranks)), forwarded, number, len(shard.stages) - 1)


def _check_used(ranks: Iterable[int], forwarded: dict[int, str], shard: int, stage: int) -> None:
    """Raise PlanError if elements of ranks that only forward are used."""
    wrong = next((rank for rank in ranks if rank in forwarded), None)
    if wrong is not None:
        raise PlanError(
            f"adds up elements of {forwarded[wrong]} of an exchange, so its sum has other bits; every rank of an "
            "exchange must send to all, or receive the total before it is used",
            shard=shard,
            stage=stage,
            rank=wrong,
        )


def exchanged(shard: Shard) -> Iterator[tuple[int, list[int], dict[int, list[int]]]]:
    """Yield a shard's exchanges: the first stage, the senders, and for each rank the senders whose elements it has."""
    position = 0
    for kind, run in groupby(shard.stages, key=lambda stage: stage.kind):
        stages = list(run)
        if kind == "exchange":
            roots = [stage.root for stage in stages]
            reached: dict[int, list[int]] = {}
            for stage in stages:
                for rank in (stage.root, *(edge.child for edge in stage.edges)):
                    reached.setdefault(rank, []).append(stage.root)
            yield position, roots, reached
        position += len(stages)


def ranks_that_add(roots: Sequence[int], reached: Mapping[int, Sequence[int]]) -> frozenset[int]:
    """Return the ranks of an exchange that send and receive from all; others only forward."""
    return frozenset(rank for rank in roots if list(reached[rank]) == list(roots))


def _check_sparse(plan: Plan, fabric: Fabric) -> None:
    """Check that a sparse plan can run, and meets the assumptions of its certificate."""
    certificate = plan.certificate
    if not plan.sparse:
        if certificate.of_entries:
            raise PlanError("the certificate bounds plans that move entries, and this one moves none")
        return
    if plan.collective != "allreduce":
        raise PlanError(f"entries can be summed by an allreduce only, not by {plan.collective}")
    from topoplan.plans.structure import rounds

    rounds(plan)  # rejects shards that cannot run in parallel
    from topoplan.plans.certificates.exchange import SparseCertificate

    if not isinstance(certificate, SparseCertificate):
        raise PlanError(
            "the certificate bounds plans that move elements; entries, inside server or between servers bound this one"
        )
    certificate.suppose(plan.shards, fabric)


def _owner(plan: Plan, shard: Shard, number: int) -> int:
    if not shard.stages:
        raise PlanError("has no stage", shard=number)
    return shard.stages[0].root if plan.collective == "allgather" else shard.stages[-1].root


def _integer(value: int | None) -> int:
    assert value is not None
    return value


def check_claims(
    claims: tuple[float, float], rate: Fraction | None, bound: Fraction | None, machine: str
) -> None:
    """Raise PlanError unless a plan claims this rate and bound, and the rate is not above the bound."""
    check_claim("rate", claims[0], rate)
    check_claim("bound", claims[1], bound)
    if rate is not None and bound is not None and rate > bound:
        raise PlanError(
            f"the forest's rate {nearest_float(rate):.6g} GB/s exceeds the certified bound "
            f"{nearest_float(bound):.6g}: the certificate does not fit this {machine}"
        )


def check_claim(name: str, claimed: float, recomputed: Fraction | None) -> None:
    if recomputed is None:
        if math.isfinite(claimed):
            raise PlanError(f"claims a {name} of {claimed:.6g} GB/s, but no byte crosses a link")
        return
    nearest = nearest_float(recomputed)
    if claimed != nearest and not abs(claimed - nearest) <= TOLERANCE * nearest < math.inf:
        raise PlanError(f"claims a {name} of {claimed:.9g} GB/s; recomputed it is {nearest:.9g}")
