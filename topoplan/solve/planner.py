"""Plan a collective (`topoplan.plan`): choose the links, pack the trees, prove the rate.

With the exact method, one switch with equal ports gets the one-hop forest first, since it meets the bound at the
lowest height. Up to nine ranks column generation proves the lowest height too; beyond, if switches copy or add, or
if two ranks have many routes, trees are packed on the orbits of the fabric's symmetries. Over many servers a
broadcast is tried in three phases first, as is any collective on servers that are not stars: they are quick and
often optimal.

If bandwidths were measured and no two ranks are equivalent, the machine with the slowest link of each kind is
planned first: it has its symmetries back, and a forest for it runs at least as fast on the measured machine. Two
links are of one kind if channel and kinds of device at both ends agree and no gap of bandwidths separates them. The
loss is about how far the slowest links lie below the mean; above 64 ranks the images of the trees are then weighed by
the measured bandwidths (`image_weights`), and up to 64 the exact search starts from the images. Rate and bound are
always recomputed from the finished plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING

from topoplan.errors import UsageError, kind_of
from topoplan.machine.fabric import CHANNEL_CHOICES, CHANNEL_SPLITS, UNIONS, Fabric
from topoplan.machine.fabric_structure import FabricServers
from topoplan.machine.topology import Link, TopologyLike
from topoplan.machine.variants import with_in_network
from topoplan.plans.build import Allocation, build_plan, trivial_plan
from topoplan.plans.certificates.certificate import Certificate
from topoplan.plans.loads import forest_rate
from topoplan.plans.minimum_trees import LARGEST_EXACT
from topoplan.plans.plan import ALL_COLLECTIVES, ALL_TO_ALL, TREES, Plan
from topoplan.plans.shards import Shard
from topoplan.solve.cuts_and_partitions import best_bound, bounded_plan, equivalent_ranks, quick_bound
from topoplan.solve.packing.packing_program import Packing, TreeColumn
from topoplan.solve.search_control import Deadline
from topoplan.units import is_real, is_whole, parse_size

if TYPE_CHECKING:
    from topoplan.plans.certificates.exchange import DemandMatrix
    from topoplan.solve.packing.all_to_all import Matrix
    from topoplan.solve.packing.exact import ExactPacking

BANDWIDTH_GAP = 1.25
"""The next wider link is of another kind from this ratio of bandwidths on."""

MOST_RANK_CLASSES = 32
"""Classes of equivalent ranks up to which every link is a row of the program."""


def floored_by_kind(fabric: Fabric) -> Fabric | None:
    """Return the fabric with each link at the slowest bandwidth of its kind; None if that gains nothing.

    Links lose their latencies. The floor gains nothing up to `MOST_RANK_CLASSES` classes of equivalent ranks, nor if
    the kinds leave more of them.
    """
    if fabric.size <= MOST_RANK_CLASSES or len(equivalent_ranks(fabric)) <= MOST_RANK_CLASSES:
        return None
    slowest = _slowest_of_kind(fabric)
    links = tuple(
        replace(link, bandwidth=slowest[link], latency=None) if link in slowest else link
        for link in fabric.topology.links
    )
    floored = Fabric(replace(fabric.topology, links=links), fabric.channels)
    return floored if len(equivalent_ranks(floored)) <= MOST_RANK_CLASSES else None


def _slowest_of_kind(fabric: Fabric) -> dict[Link, float]:
    """Map every link of the fabric to the bandwidth, in GB/s, of the slowest link of its kind."""
    kind = {device.name: device.kind for device in fabric.topology.devices}
    of_kind: dict[tuple[str, str, str], list[Link]] = {}
    for link in fabric.links:
        of_kind.setdefault((link.channel, kind[link.src], kind[link.dst]), []).append(link)
    slowest: dict[Link, float] = {}
    for links in of_kind.values():
        floor = last = 0.0
        for link in sorted(links, key=lambda each: each.bandwidth):
            if link.bandwidth > BANDWIDTH_GAP * last:
                floor = link.bandwidth
            last = link.bandwidth
            slowest[link] = floor
    return slowest


MOST_INNER, MOST_INNER_RANKS = 16, 64
"""Inner vertices other than helpers, and ranks, up to which trees are packed over inner vertices."""

ORDERS = ("height", "trees", "first")
"""Objectives that come first among packings of equal rate."""

METHODS = ("exact", "mwu", "three-phase")

MOST_STARS = 64
"""Ranks on one switch up to which stars are listed; larger ones are packed on orbits, and so compactly."""

MOST_PEELED = 32
"""Ranks up to which peeling is tried when few trees come first."""

MOST_FREE = 64
"""Ranks up to which trees of any kind are packed over servers; above, composed ones may come first."""

TOLERANCE = 0.005
"""Most that a plan on the slowest links of each kind may stay below the bound and still be the answer."""

GAP = 0.05
"""Default of ``epsilon`` and ``threshold`` of multiplicative weights."""


def plan(
    topology: TopologyLike,
    collective: str = "all_reduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    schedule: str = TREES,
    method: str = "exact",
    channels: str = "auto",
    order: str = "height",
    height: int | None = None,
    epsilon: float = GAP,
    threshold: float = GAP,
    nbytes: int | str | None = None,
    time_limit: float | None = None,
    demand: Matrix | None = None,
    tolerance: float = TOLERANCE,
    in_network: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Plan a collective: return packed trees, their bandwidth, and an upper bound that proves how good they are.

    Parameters
    ----------
    topology : Topology, or what `topoplan.load` takes
        The machine; of graphs that is a ``MultiDiGraph`` of `Topology.to_networkx`.
    collective : str
        all_reduce, all_gather, reduce_scatter, all_to_all, broadcast or reduce.
    gpus : sequence of int or None
        GPU numbers of the allocation, in the order of the ranks: rank 0 of ``gpus=[7, 1]`` runs on GPU 7. None takes
        all GPUs, by number.
    root : int or None
        GPU number of the root of a broadcast or reduce; None takes the first of the allocation.
    schedule : str
        ``trees``, a name that ``topoplan plan --schedule`` takes, such as ``ring``, or one of
        `topoplan.register_schedule`. Options below other than channels and in_network are for trees.
    method : str
        ``exact``: the optimum. ``mwu``: multiplicative weights and tree minimisation, as Blink; for ``all_to_all``,
        paths within ``epsilon`` of the bound. ``three-phase``: over several servers, the best composition of trees
        inside them (see `topoplan.three_phase`).
    channels : str
        ``auto`` (NVLink if it connects the allocation, else NVLink islands with the PCIe between them, else PCIe, else
        either together with the network), ``nvlink``, ``pcie``, ``nvlink+network`` or ``pcie+network``. ``nvlink+pcie``
        divides the buffer between trees over each, ``all`` packs trees over both, and ``all-staged`` trees whose hops
        over PCIe pass a CPU's memory (see `topoplan.model.channel_split`); ``all+network`` and ``all-staged+network``
        are the same over several servers.
    order : str
        For ``exact``, what comes first among equal rates: ``height`` or ``trees``; ``first`` is ``height`` without the
        search for fewer trees, in a fraction of the time.
    height : int or None
        For ``exact``, most edges between the root of a tree and its leaves, at whatever rate; None for no limit. For
        ``all_to_all`` most edges of a path: 1 takes direct paths alone.
    epsilon, threshold : float
        For ``mwu``: most that the packing may stay below the bound, and most that the minimised trees may stay below
        the bound, or failing that below the packing's rate; as fractions. Paths are not minimised.
    nbytes : int, str or None
        For ``nvlink+pcie``, the size of the buffer in bytes or as "64MB", on which the shares depend, and for ``all``
        and ``all-staged``, whether NVLink alone is faster; None for the limit of large ones.
    time_limit : float or None
        Seconds after which the search ends with the best forest so far, its true gap and a note; None for no limit. It
        is checked between the rounds of the search, and the first round is always made.
    demand : sequence of sequences of int, or None
        For ``alltoall``, the bytes that row sends to column; None if all pairs exchange the same. Over one-way links
        only pairs with bytes need a path.
    tolerance : float
        For ``exact`` on more than 32 classes of equivalent ranks, since their bandwidths were measured: how far
        below the bound a plan on the slowest link of each kind may stay and still be the answer, as a fraction of the
        bound. Such a plan takes seconds for a thousand GPUs, and reports its gap.
    in_network : str or None
        Which switches copy and add: ``none``, ``nvswitch``, ``switch`` or ``all`` (see
        `topoplan.machine.variants.with_in_network`); None for what the machine's description says.
    progress : callable or None
        Called with a line of text now and then while a large plan is made.

    Returns
    -------
    Plan

    Raises
    ------
    UsageError
        Unknown collective, method, channel or order; an absent GPU or root; an invalid time limit or demand; a height
        that no trees have; an option that an all-to-all does not have; absent switches that are to copy and add.
    InfeasibleError
        No usable link joins two parts of the allocation; carries the cut.

    See Also
    --------
    topoplan.Plan, topoplan.compute_bound, topoplan.verify, topoplan.compare, topoplan.plan_by_size

    References
    ----------
    Wang et al., "Blink: Fast and Generic Collectives for Distributed ML", MLSys 2020, sections 3.2 and 3.5.

    Examples
    --------
    >>> import topoplan
    >>> best = topoplan.plan("dgx-1v", "all_reduce", gpus=[1, 4, 5, 7])
    >>> best.algbw, best.busbw, best.gap, best.num_trees, best.height
    (50.0, 75.0, 0.0, 2, 2)
    >>> topoplan.plan("dgx-h100", in_network="nvswitch").algbw
    450.0
    """
    started = time.perf_counter()
    if in_network is not None:
        topology = with_in_network(topology, in_network)
    if schedule != TREES:
        from topoplan.schedules.registry import make_schedule

        given = {
            "method": method != "exact",
            "order": order != "height",
            "height": height is not None,
            "nbytes": nbytes is not None,
            "time_limit": time_limit is not None,
            "demand": demand is not None,
            "epsilon": epsilon != GAP,
            "threshold": threshold != GAP,
            "tolerance": tolerance != TOLERANCE,
        }
        for name in (name for name, stated in given.items() if stated):
            raise UsageError(f"{name} is for packed trees, got schedule {schedule!r}; leave {name} out")
        return make_schedule(schedule, topology, collective, gpus=gpus, root=root, channels=channels)
    asked = Allocation.of(topology, collective, gpus=gpus, root=root, among=ALL_COLLECTIVES)
    collective = asked.collective
    _check_choice("method", method, METHODS)
    _check_choice("order", order, ORDERS)
    _check_choice("channels", channels, (*CHANNEL_CHOICES, *CHANNEL_SPLITS))
    if not is_real(tolerance) or not 0 <= tolerance < 1:
        raise UsageError(
            f"tolerance {tolerance!r} must be a part of the bound, from 0 to below 1, such as 0.005"
        )
    deadline = Deadline(time_limit)
    if height is not None:
        _check_height(height, method, order)
    if collective == ALL_TO_ALL:
        _check_paths(method, channels, order, threshold)
    elif demand is not None:
        raise UsageError(f"a demand belongs to alltoall, not to {collective}; leave it out")
    wanted: DemandMatrix | None = None
    if demand is not None:
        from topoplan.solve.packing.all_to_all import check_demand

        wanted = check_demand(demand, len(asked.gpus))
    sized = (*CHANNEL_SPLITS, *UNIONS)
    if nbytes is not None and channels not in sized:
        raise UsageError(
            f"a size matters only to channels {', '.join(sized)}; leave it out with {channels!r}"
        )
    size = None if nbytes is None else parse_size(nbytes)
    over = partial(plan, asked.machine, collective, gpus=gpus, root=root, method=method, order=order)
    over = partial(over, height=height, epsilon=epsilon, threshold=threshold)
    over = partial(over, tolerance=tolerance, progress=progress)
    if channels in CHANNEL_SPLITS:
        from topoplan.model.channel_split import plan_channels

        split = CHANNEL_SPLITS[channels]
        made = plan_channels(
            split,
            lambda channel: over(channels=channel, time_limit=deadline.left),
            machine=asked.machine.name,
            nbytes=size,
        )
        return replace(
            made, order=_stated_order(method, order), planning_seconds=time.perf_counter() - started
        )
    fabric = asked.fabric(channels, wanted)
    if fabric.size == 1:
        made = trivial_plan(fabric, collective, root=asked.root, method=method)
    elif collective == ALL_TO_ALL:
        from topoplan.solve.packing.all_to_all import plan_all_to_all
        from topoplan.solve.packing.multiplicative_weights import checked_epsilon

        made = plan_all_to_all(
            fabric,
            demand=wanted,
            epsilon=checked_epsilon(epsilon) if method == "mwu" else None,
            height=height,
            deadline=deadline,
            progress=progress,
        )
    elif method == "mwu":
        made = _plan_mwu(fabric.forwarding_only(), collective, asked.root, epsilon, threshold, deadline)
        if fabric.in_network or fabric.helpers:
            made = _certified_in_network(made, fabric)
    elif method == "three-phase":
        from topoplan.solve.packing.composition import plan_three_phase

        made = plan_three_phase(fabric, collective, root=asked.root, deadline=deadline, progress=progress)
    else:
        made = _plan_exact(fabric, collective, asked.root, order, deadline, progress, tolerance)
        if height is not None and made.height > height:
            made = lower_trees(made, height, deadline=deadline, progress=progress)
    made = _with_stop(made, deadline)
    nvlink = Fabric(asked.topology, ("nvlink",))
    if channels in UNIONS and not nvlink.unreachable(collective, asked.root, wanted):
        from topoplan.model.channel_split import beside_nvlink

        alone = over(channels="nvlink", time_limit=deadline.left, demand=demand)
        made = beside_nvlink(made, alone, nbytes=size)
    return replace(made, order=_stated_order(method, order), planning_seconds=time.perf_counter() - started)


def _with_stop(made: Plan, deadline: Deadline) -> Plan:
    """Return the plan with a note first if the deadline cut its search short, and no search has said so."""
    if not deadline.cut or any(kind_of(note) == "stopped" for note in made.notes):
        return made
    note = deadline.note(made.rate if made.gap > 0 else made.bound, made.bound)
    return replace(made, notes=(note, *made.notes))


def lower_trees(
    made: Plan,
    height: int,
    *,
    deadline: Deadline | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Return the best trees of at most ``height`` edges on the links of a plan, under its bound."""
    fabric = Fabric(made.topology, made.channels)
    if fabric.in_network or fabric.helpers:
        raise UsageError(
            "heights are not limited where switches or helpers copy or add; leave the height out"
        )
    from topoplan.solve.packing.exact import pack_low

    packed = pack_low(
        fabric,
        made.collective,
        made.certificate,
        root=made.root,
        height=height,
        time_limit=deadline,
        progress=progress,
    )
    return _packed_plan(fabric, made.collective, made.root, packed)


def disjoint_forest(made: Plan, height: int, *, above: int = 0) -> Plan | None:
    """Return trees of at most ``height`` edges, each with a wire's bandwidth, on the links of a broadcast or reduce.

    None if no more than ``above`` trees are found, for another collective, and if links lead to a switch.

    Around 3 x 3 x 3 ranks six trees carry the optimal 150 GB/s:

    >>> import topoplan
    >>> plan = topoplan.plan(topoplan.load("torus:3,3,3@25"), "broadcast")
    >>> few = disjoint_forest(plan, 4)
    >>> [(one.num_trees, one.height, one.rate) for one in (plan, few)]
    [(120, 6, 150.0), (6, 4, 150.0)]
    """
    from topoplan.solve.packing.exact import ExactPacking
    from topoplan.solve.packing.fewest_trees import disjoint_trees
    from topoplan.solve.packing.packing_program import Packing

    fabric = Fabric(made.topology, made.channels)
    if made.root is None or fabric.size == 1 or not fabric.direct or fabric.split or fabric.in_network:
        return None
    packing = Packing(fabric, made.collective, made.root)
    weights = disjoint_trees(packing, height, above=above)
    if weights is None:
        return None
    return _packed_plan(fabric, made.collective, made.root, ExactPacking(packing, weights, made.certificate))


def _packed_plan(fabric: Fabric, collective: str, root: int | None, packed: ExactPacking) -> Plan:
    return build_plan(
        fabric,
        collective,
        root=root,
        shards=packed.shards,
        certificate=packed.certificate,
        schedule="trees",
        method="exact",
        notes=packed.notes,
    )


def _check_height(height: int, method: str, order: str) -> None:
    """Raise UsageError unless the height is at least 1 and no other option decides heights."""
    if not is_whole(height) or height < 1:
        raise UsageError(f"a height of {height!r} has no edge; give a whole number of 1 or more")
    for name, value, only in (("method", method, "exact"), ("order", order, "height")):
        if value != only:
            raise UsageError(
                f"a limit on the height goes with {name} {only!r}, not {value!r}; leave one of them out"
            )


def _check_paths(method: str, channels: str, order: str, threshold: float) -> None:
    """Raise UsageError for options that only trees to all ranks have."""
    if method == "three-phase":
        raise UsageError("an alltoall is planned by method exact or mwu, got three-phase; choose one of them")
    limits = (("order", order, "height"), ("threshold", threshold, GAP))
    for name, value, only in limits:
        if value != only:
            raise UsageError(
                f"an alltoall is planned by paths, to which {name} {value!r} does not apply; leave it out"
            )
    if channels in CHANNEL_SPLITS:
        raise UsageError(
            f"an alltoall takes one choice of links, not {channels!r}; use {', '.join(CHANNEL_CHOICES)}"
        )


def _stated_order(method: str, order: str) -> str:
    """Return the order that a plan states: methods without one state the default, as the first low packing does."""
    return order if method == "exact" and order != "first" else "height"


def _recertified(made: Plan, fabric: Fabric) -> Plan:
    """Return the same forest under the bound in which helpers, or switches, copy and add too."""
    return bounded_plan(
        fabric,
        made.collective,
        made.shards,
        made.schedule,
        root=made.root,
        method=made.method,
        notes=made.notes,
    )


def _certified_in_network(made: Plan, fabric: Fabric) -> Plan:
    """Return the same forest and its bound on switches that copy or add."""
    certified = _recertified(made, fabric)
    if certified.gap == 0:
        return certified
    note = "these trees were packed for switches that only forward; --method exact uses that they copy or add"
    if fabric.helpers:
        note = "these trees join ranks alone; --method exact lets them pass helpers"
    return replace(certified, notes=(*made.notes, note))


def has_inner_vertices(fabric: Fabric) -> bool:
    """Return whether trees of a fabric may pass devices other than ranks, few enough to pack trees over them."""
    inner = {name for op in ("reduce", "broadcast") for name in fabric.inner_devices(op)}
    few = len(inner) - len(fabric.helpers) <= MOST_INNER
    return bool(inner) and few and 1 < fabric.size <= MOST_INNER_RANKS


def _plan_exact(
    fabric: Fabric,
    collective: str,
    root: int | None,
    order: str,
    deadline: Deadline,
    progress: Callable[[str], None] | None,
    tolerance: float,
) -> Plan:
    inner = has_inner_vertices(fabric)
    if inner:
        from topoplan.solve.packing.inner_vertices import plan_over_inner_vertices, stopped_at_helpers

    if inner and fabric.helpers:
        known: Plan | None = None
        alone = fabric.forwarding_only()
        if not fabric.in_network and not alone.unreachable(collective, root):
            forwarded = _plan_exact(alone, collective, root, order, deadline, progress, tolerance)
            known = _recertified(
                replace(forwarded, shards=stopped_at_helpers(forwarded.shards, fabric)), fabric
            )
            if known.gap == 0:
                return known
        return plan_over_inner_vertices(
            fabric, collective, root=root, known=known, deadline=deadline, progress=progress
        )
    slowest = floored_by_kind(fabric)
    floored: Plan | None = None
    start: Plan | None = None
    if slowest is not None:
        final = deadline.limit is None and fabric.size > MOST_FREE
        symmetric = _plan_exact(slowest, collective, root, order, deadline, progress, tolerance)
        floored = _floored_plan(fabric, slowest, symmetric, tolerance, final=final, progress=progress)
        if floored.gap <= tolerance or final:
            return floored
        if fabric.size <= MOST_FREE:
            from topoplan.solve.packing.image_weights import as_images, symmetric_trees

            images = as_images(symmetric.shards, slowest, root)
            start = replace(floored, shards=symmetric_trees(fabric, images))
    packing = Packing(fabric, collective, root)
    one_hop: Plan | None = None
    if on_one_switch(fabric) and fabric.size <= MOST_STARS and not fabric.in_network:
        stars = one_hop_forest(packing)
        one_hop = _forest_plan(packing, stars, best_bound(fabric, collective, root), "one-hop", "exact")
        if one_hop.gap == 0 and order != "trees":
            return one_hop
    if fabric.size > MOST_FREE and (root is not None or not FabricServers(fabric).stars):
        from topoplan.solve.packing.composition import composed_optimum

        composed = composed_optimum(fabric, collective, root=root, deadline=deadline, progress=progress)
        if composed is not None:
            return replace(composed, method="exact")
    from topoplan.solve.packing.exact import pack_exact

    packed = pack_exact(
        fabric, collective, root=root, order=order, time_limit=deadline, progress=progress, known=start
    )
    made = _packed_plan(fabric, collective, root, packed)
    if inner and made.gap > 0 and not deadline.cut:
        made = plan_over_inner_vertices(
            fabric, collective, root=root, known=made, deadline=deadline, progress=progress
        )
    if order == "trees" and LARGEST_EXACT < fabric.size <= MOST_PEELED and made.gap == 0:
        from topoplan.solve.packing.fewest_trees import fewest_peeled

        bound = made.certificate.bound(fabric, collective, root) * packing.scale
        peeled = fewest_peeled(packing, bound, fewer_than=made.num_trees, deadline=deadline)
        if peeled is not None:
            made = _forest_plan(packing, peeled, made.certificate, "trees", "exact")
    if one_hop is not None and one_hop.gap == 0 and one_hop.num_trees <= made.num_trees:
        return one_hop
    if floored is not None and floored.rate > made.rate:
        return replace(floored, notes=(*floored.notes, *made.notes))
    return made


def _floored_plan(
    fabric: Fabric,
    slowest: Fabric,
    symmetric: Plan,
    tolerance: float,
    *,
    final: bool,
    progress: Callable[[str], None] | None,
) -> Plan:
    """Return the plan for the slowest links of each kind on the actual links, with its gap to the bound there.

    Images of its trees are weighed by the actual bandwidths if the gap exceeds the tolerance.
    """
    certificate = quick_bound(fabric, symmetric.collective, symmetric.root)

    def made_of(shards: Sequence[Shard]) -> Plan:
        return build_plan(
            fabric,
            symmetric.collective,
            root=symmetric.root,
            shards=shards,
            certificate=certificate,
            schedule=symmetric.schedule,
            method="exact",
        )

    made = made_of(symmetric.shards)
    note = "packed on the slowest bandwidth of each kind of link"
    if made.gap > tolerance and fabric.size > MOST_FREE:
        from topoplan.solve.packing.image_weights import as_images, weighed_images

        shards = weighed_images(
            fabric,
            as_images(symmetric.shards, slowest, symmetric.root),
            symmetric.collective,
            bound=certificate.bound(fabric, symmetric.collective, symmetric.root),
            tolerance=tolerance,
            progress=progress,
        )
        weighed = made if shards is None else made_of(shards)
        if weighed.rate > made.rate:
            made = weighed
            note += ", images of the trees weighed by the actual ones"
    note += f", {made.gap:.3%} below the bound"
    if made.gap > tolerance:
        note += f", more than the {tolerance:.3%} that are allowed"
        note += "; --time-limit S searches on from there" if final else ""
    return replace(made, notes=(*symmetric.notes, note))


def _plan_mwu(
    fabric: Fabric,
    collective: str,
    root: int | None,
    epsilon: float,
    threshold: float,
    deadline: Deadline,
) -> Plan:
    from topoplan.solve.packing.fewest_trees import minimise_trees
    from topoplan.solve.packing.multiplicative_weights import pack_mwu

    packing = Packing(fabric, collective, root)
    packed = pack_mwu(packing, epsilon=epsilon, deadline=deadline)
    bound = packed.certificate.bound(fabric, collective, root)
    rate = forest_rate(packing.shards(packed.weights), fabric)
    assert rate is not None, "trees of two ranks or more cross links"
    fewer = None
    for reference in (bound, rate):
        fewer = fewer or minimise_trees(
            packing,
            packed.weights,
            rate=reference * packing.scale,
            threshold=threshold,
            deadline=deadline,
        )
    notes: list[str] = []
    if fewer is None and not deadline.cut:
        notes.append(
            f"no packing in sixteenths of a link is within {threshold:.0%} of the rate: "
            f"all {len(packed.weights)} trees are kept"
        )
    made = _forest_plan(packing, fewer or packed.weights, packed.certificate, "trees", "mwu")
    notes.append(
        f"multiplicative weights: {len(packed.weights)} trees at {float(rate):.6g} GB/s "
        f"after {packed.rounds} rounds"
    )
    return replace(made, notes=tuple(notes))


def _forest_plan(
    packing: Packing,
    weights: dict[TreeColumn, Fraction],
    certificate: Certificate,
    schedule: str,
    method: str,
) -> Plan:
    return build_plan(
        packing.fabric,
        packing.collective,
        root=packing.root,
        shards=packing.shards(weights),
        certificate=certificate,
        schedule=schedule,
        method=method,
    )


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise UsageError(f"{name} {value!r} is unknown; use one of {', '.join(choices)}")


def on_one_switch(fabric: Fabric) -> bool:
    """Return whether all ranks meet at one switch, with exactly one route, of two links, for every pair."""
    if len(fabric.nodes) != fabric.size + 1 or fabric.size < 3:
        return False
    pairs = fabric.size * (fabric.size - 1)
    return len(fabric.arcs) == pairs and all(len(arc.links) == 2 for arc in fabric.arcs)


def one_hop_forest(packing: Packing, lengths: Sequence[int] | None = None) -> dict[TreeColumn, Fraction]:
    """Return equal weights for the stars, or for the two-level trees of a broadcast or reduce.

    The fabric is `on_one_switch`, or any without a root. ``lengths`` of the rows decide which routes are shortest; None
    stands for equal lengths.
    """
    size = packing.fabric.size
    ranks = range(size)
    if packing.root is None:
        # Both stars of two ranks have the same links.
        roots = list(ranks) if size > 2 or packing.owner_rows else [0]
        parents = [{child: root for child in ranks if child != root} for root in roots]
    else:
        roots = [packing.root] * (size - 1)
        parents = []
        for hub in ranks:
            if hub != packing.root:
                below = {child: hub for child in ranks if child not in (hub, packing.root)}
                parents.append({hub: packing.root, **below})
    routes = packing.routes(lengths or [1] * len(packing.limits))
    trees = []
    for root, parent in zip(roots, parents, strict=True):
        tree = [parent.get(child, -1) for child in ranks]
        up, down = (tree if packing.uses(op) else [] for op in ("reduce", "broadcast"))
        trees.append((root, up, down))
    return dict.fromkeys(packing.trees(trees, routes), Fraction(1))
