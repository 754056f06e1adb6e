"""Select for every message size the schedule with the least model time, or plan in the way of another plan.

`topoplan.plan_by_size` takes the closed form (`topoplan.model.closed_form`) as its model; its times grow with size
without jumps, so neighbouring ranges meet at the crossing of two curves. The fastest is found at every tested size, and
between two neighbours with different answers the change is bisected to the byte. For the windows engine the model is
`topoplan.model.window_engine`, whose times fall once, where packets end. A plan that is fastest only between two
neighbours that agree is not found. Outside the tested sizes the plan of the nearest range is kept without a claim.

`plan_like` reads from a plan its channels, method or schedule, the priority among equal rates, the kind of ring, and
whether it is selected by size. The epsilon and threshold of mwu and time limits are defaults. An all-to-all is always
the optimal one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, ParamSpec

from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.fabric import CHANNEL_SPLITS, UNIONS, Fabric, channel_words
from topoplan.machine.hardware import is_amd
from topoplan.machine.topology import Topology, TopologyLike
from topoplan.model.candidates import candidates, chain_limits, doubled
from topoplan.model.closed_form import plan_seconds
from topoplan.model.dataflow import LAUNCH
from topoplan.model.expected_times import ExpectedTimes, expected_times, fitted_costs
from topoplan.model.times_by_size import TimeBound, least_start_ups, start_up_diameter, time_bound, times_of
from topoplan.model.window_engine import EngineCosts, WindowsClock, costs_of, switched_stages, words_of
from topoplan.plans.chain_limits import hop_start_ups
from topoplan.plans.deferred_plan import DeferredPlan
from topoplan.plans.plan import ALL_TO_ALL, Plan, Plans, SizeRange, collective_name
from topoplan.plans.size_plans import SizePlans
from topoplan.schedules.registry import SCHEDULES
from topoplan.schedules.ring import RING_KINDS, ring_plan
from topoplan.schedules.routes import LeastLoaded
from topoplan.solve.planner import GAP, METHODS, plan
from topoplan.units import TOLERANCE, check_type, counted, format_size, listed, parse_size, parse_sizes

if TYPE_CHECKING:
    from topoplan.solve.packing.all_to_all import Matrix

SIZES = (1 << 10, 1 << 30)
"""Default smallest and largest tested size in bytes."""

Asked = ParamSpec("Asked")

ENGINES = ("messages", "windows")
"""Engines: copies that are started one by one, or one kernel for each collective over NVLink."""


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """Plans by size and the candidates they were selected from.

    candidates: all timed plans.
    sizes: the tested sizes, ascending, at which the selection is the least of all.
    notes: schedules that the allocation does not have, and the source of the model's figures.
    costs: figures of the windows engine; None for messages.
    windows: model times of each candidate on that engine; empty for messages.
    bound: lower bound on the time of any schedule; None for the windows engine, whose start-ups differ.
    complete: whether the candidates are all that were timed, not those of a file alone.
    """

    plans: SizePlans
    candidates: tuple[Plan, ...]
    sizes: tuple[int, ...]
    notes: tuple[str, ...]
    costs: EngineCosts | None = None
    windows: tuple[WindowsClock, ...] = ()
    bound: TimeBound | None = None
    complete: bool = True

    def clocks(self) -> list[Callable[[int], float]]:
        """Return functions from bytes to seconds of every candidate."""
        if self.windows:
            return [one.seconds for one in self.windows]
        return [_by_messages(plan) for plan in self.candidates]


def _by_messages(plan: Plan) -> Callable[[int], float]:
    """Return a cached function from bytes to seconds."""
    return cache(plan_seconds(plan))


def _floor(plan: Plan) -> Callable[[int], float]:
    """Return a cheap lower bound on a plan's model time: start-ups that are known without a dataflow, and its rate."""
    fabric = Fabric(plan.topology, plan.channels)
    if fabric.size == 1 or fabric.split:
        return lambda nbytes: 0.0
    chain = start_up_diameter(fabric, plan.collective, plan.root)
    through_root = all(
        len(shard.stages) <= 2 and len({stage.root for stage in shard.stages}) == 1
        for shard, _ in plan.shard_counts
    )
    if through_root:
        # the slowest byte goes up to the root and down again
        hop = min(hop_start_ups(fabric, [(rank,) for rank in range(fabric.size)], least_start_ups(fabric)))
        chain = max(chain, plan.depth * hop)
    pace = 1 / (plan.rate * 1e9)
    return lambda nbytes: (LAUNCH + chain + nbytes * pace) * (1 - TOLERANCE)


def plan_by_size(
    topology: TopologyLike,
    collective: str = "all_reduce",
    *,
    gpus: Sequence[int] | None = None,
    root: int | None = None,
    channels: str = "auto",
    sizes: str | Sequence[int | str] = SIZES,
    engine: str = "messages",
    costs: EngineCosts | None = None,
    progress: Callable[[str], None] | None = None,
) -> SizePlans:
    """Return the fastest schedule for each range of message sizes.

    Parameters
    ----------
    topology, collective, gpus, root, channels, progress
        As for `topoplan.plan`.
    sizes : str, or sequence of int or str
        ``"1KB:1GB"``, or bytes and texts such as "64MB" in a list, of the user's buffer (of the full gathered one for
        all_gather and reduce_scatter). The smallest and the largest bound the search; all sizes named, and powers of
        two between them, are tested.
    engine : str
        messages, or windows: one kernel that writes to the other GPUs' memory.
    costs : EngineCosts or None
        Figures for windows; those of the GPUs' kind for None.

    Returns
    -------
    SizePlans
        Ranges from 0 bytes on, without gap or end.

    Raises
    ------
    UsageError
        No size or a negative one, an unknown engine, windows among GPUs that do not reach each other over NVLink, or as
        `topoplan.plan`.
    InfeasibleError
        As `topoplan.plan`.

    See Also
    --------
    topoplan.plan, topoplan.simulate

    Examples
    --------
    A DGX-2 broadcasts small messages from the root to every rank at once; large ones would not fit its port.

    >>> import topoplan
    >>> plans = plan_by_size(topoplan.load("dgx-2"), "broadcast")
    >>> [(one.start, one.stop, one.plan.height, one.plan.rate) for one in plans.ranges]
    [(0, 94286, 1, 10.0), (94286, None, 2, 150.0)]
    """
    if engine not in ENGINES:
        raise UsageError(f"engine {engine!r} is unknown; use one of {', '.join(ENGINES)}")
    if costs is not None and engine != "windows":
        raise UsageError(f"engine costs need engine 'windows', got {engine!r}; leave them out")
    if channels in UNIONS:
        raise UsageError(
            f"plans by size need channels that suit all sizes, got {channels!r}; give one size instead (--size)"
        )
    if isinstance(sizes, str):
        sizes = parse_sizes(sizes)
    check_type("sizes", sizes, Iterable, remedy="give numbers of bytes or texts, such as ['1KB', '1GB']")
    named = [*map(parse_size, sizes)]
    if not named:
        raise UsageError(
            "sizes must be numbers of 0 or more, got none; give at least one, of zero bytes or more"
        )
    competing, notes = candidates(
        topology, collective, gpus=gpus, root=root, channels=channels, progress=progress
    )
    if engine == "windows":
        # its packets are a one-shot exchange, whatever the plan
        competing = tuple(one for one in competing if not one.exchanges)
    tested = grid_of_sizes(named)
    if progress:
        progress(f"timing {len(competing)} plans at {len(tested)} sizes and where they cross …")
    windows: tuple[WindowsClock, ...] = ()
    if engine == "windows":
        competing, costs, windows, words = _on_windows(competing, costs)
        notes = (*notes, *words)
        changes = fastest_from([one.seconds for one in windows], tested)
    else:
        clocks, floors = ([make(plan) for plan in competing] for make in (_by_messages, _floor))
        changes = fastest_from(clocks, tested, least=floors)
        # also of trees that only a schedule without pairs, such as one-shot, overtakes; so too among exchanges
        made = [doubled(plan) for plan in competing]
        halved: set[int] = set()
        for exchanges in (False, True):
            able = [n for n, pair in enumerate(made) if pair and pair.exchanges == exchanges]
            if able:
                able_clocks, able_floors = [clocks[n] for n in able], [floors[n] for n in able]
                halved |= {able[place] for _, place in fastest_from(able_clocks, tested, least=able_floors)}
        pairs = [made[number] for number in sorted(halved)]
        more = tuple(pair for pair in pairs if pair)
        clocks += [_by_messages(plan) for plan in more]
        floors += [_floor(plan) for plan in more]
        changes = fastest_from(clocks, tested, least=floors)
        competing += more
    starts = [(0, changes[0][1]), *changes[1:]]
    stops = [start for start, _ in changes[1:]]
    plans = SizePlans(
        tuple(
            SizeRange(start, stop, competing[number])
            for (start, number), stop in zip(starts, [*stops, None], strict=True)
        )
    )
    proved = None
    if not windows:
        plans, proved = with_times(plans, tested)
    choice = ScheduleChoice(
        plans=plans,
        candidates=competing,
        sizes=tested,
        notes=notes,
        costs=costs,
        windows=windows,
        bound=proved,
    )
    object.__setattr__(plans, "_choice", choice)
    return plans


def choice_of(plans: SizePlans) -> ScheduleChoice:
    """Return the choice that made plans by size; of a file, with the file's own plans as candidates."""
    made: ScheduleChoice | None = getattr(plans, "_choice", None)
    if made is not None:
        return made
    timed = plans if plans.times is not None else with_times(plans, grid_of_sizes(SIZES))[0]
    sizes = tuple(size for size, _, _ in timed.times.points) if timed.times else SIZES
    own = [one for place, one in enumerate(plans.plans) if one not in plans.plans[:place]]
    return ScheduleChoice(plans=timed, candidates=tuple(own), sizes=sizes, notes=(), complete=False)


def _choosing(make: Callable[Asked, SizePlans]) -> Callable[Asked, ScheduleChoice]:
    return lambda *args, **options: choice_of(make(*args, **options))


choose_by_size = _choosing(plan_by_size)
"""As `plan_by_size`, with all candidates."""


def with_times(plans: SizePlans, sizes: Sequence[int]) -> tuple[SizePlans, TimeBound]:
    """Return the plans with their model times at some sizes, and a bound on the time of any schedule."""
    model = plans.plans[-1]
    fabric = Fabric(model.topology, model.channels)
    rate = model.certificate.bound(fabric, model.collective, model.root) if fabric.size > 1 else None
    limits = chain_limits(fabric, model.collective, model.root, rate)
    timed = replace(plans, times=times_of(plans, limits, sizes))
    return timed, time_bound(fabric, model.collective, model.root, limits, rate)


def _on_windows(
    plans: Sequence[Plan], given: EngineCosts | None
) -> tuple[tuple[Plan, ...], EngineCosts, tuple[WindowsClock, ...], list[str]]:
    """Return the plans whose times are known, and figures, clocks and notes of the windows engine.

    UsageError if the GPUs do not suit it.
    """
    topology, channels = plans[0].topology, plans[0].channels
    if is_amd(device for device in topology.devices if device.kind == "gpu"):
        raise UsageError("the windows engine needs NVIDIA's GPUs, got AMD's; choose the engine messages")
    costs, words = costs_of(topology) if given is None else (given, words_of(given))
    in_network = False
    if len(plans[0].ranks) > 1:
        fabric = Fabric(topology, channels)
        in_network = fabric.in_network
        _check_domain(fabric)
    if not in_network:
        return tuple(plans), costs, tuple(WindowsClock(plan, costs) for plan in plans), [words]
    measured = _multimem(topology, plans[0].collective)
    fitted = measured.costs
    words_of_switch = (
        f"switches that add and copy: times of multimem kernels, from {format_size(fitted.least)} to "
        f"{format_size(fitted.most)} measured by {fitted.source}"
    )
    clocks: list[tuple[Plan, WindowsClock]] = []
    for one in plans:
        switched = len(switched_stages(one, (0,) * len(one.ranks)))
        # the time of trees that switches add or copy in part is not known
        if switched in (0, sum(len(shard.stages) for shard in one.shards)):
            clocks.append((one, WindowsClock(one, costs, measured=measured.seconds if switched else None)))
    kept, windows = zip(*clocks, strict=True)
    return kept, costs, windows, [words, words_of_switch]


def _multimem(topology: Topology, collective: str) -> ExpectedTimes:
    """Return the measured times of kernels in which switches add and copy; UsageError if there are none."""
    known = (one for one in expected_times(topology, collective) if one.implementation == "multimem")
    found = next(known, None)
    if found is None:
        kinds = listed(one.generation for one in fitted_costs() if one.implementation == "multimem")
        raise UsageError(
            "the windows engine's time with switches that copy or add must be measured, and is for all_reduce of three "
            f"GPUs or more of {kinds}, got {collective_name(collective)} of {counted(len(topology.gpus), 'GPU')}; "
            "choose --in-network none, or the engine messages"
        )
    return found


def _check_domain(fabric: Fabric) -> None:
    """Raise UsageError if a GPU cannot write to another's memory over NVLink."""
    if fabric.channels != ("nvlink",):
        raise UsageError(
            "the windows engine needs GPUs in one NVLink domain, but these are planned over "
            f"{channel_words(fabric.channels)}; choose others, or the engine messages"
        )
    routes, ranks = LeastLoaded(fabric), range(fabric.size)
    pair = next(((a, b) for a in ranks for b in ranks if a != b and not routes.joined(a, b)), None)
    if pair:
        tail, head = (fabric.ranks[rank] for rank in pair)
        raise UsageError(
            f"the windows engine needs GPUs in one NVLink domain, but {tail} reaches {head} only through another GPU; "
            "choose others, or the engine messages"
        )


def fastest_from(
    clocks: Sequence[Callable[[int], float]],
    sizes: Sequence[int],
    *,
    least: Sequence[Callable[[int], float]] = (),
) -> tuple[tuple[int, int], ...]:
    """Return (size, index of the fastest clock) for the first size and every size at which the fastest changes.

    clocks: functions from bytes to seconds; ties (within `topoplan.units.TOLERANCE`) go to the first.
    sizes: bytes, ascending and distinct.
    least: cheap lower bounds of the clocks, by which clocks are skipped; empty for none.

    Start-ups of 1, 3 and 9 and paces of 4, 2 and 1 per byte cross at 1 and at 6 bytes; the first wins ties.

    >>> fastest_from([lambda n: 9 + n, lambda n: 3 + 2 * n, lambda n: 1 + 4 * n], [0, 4, 8])
    ((0, 2), (1, 1), (6, 0))
    """
    known: dict[int, int] = {}

    def fastest(size: int) -> int:
        if size not in known:
            floors = [one(size) for one in least] or [0.0] * len(clocks)
            seconds: dict[int, float] = {}
            limit = math.inf
            for number in sorted(range(len(clocks)), key=floors.__getitem__):
                if floors[number] > limit:
                    break
                # an earlier clock is as fast as this one can be
                if any(
                    first < number and time <= floors[number] * (1 + 2 * TOLERANCE)
                    for first, time in seconds.items()
                ):
                    continue
                seconds[number] = clocks[number](size)
                limit = min(limit, seconds[number] * (1 + TOLERANCE))
            known[size] = min(number for number, time in seconds.items() if time <= limit)
        return known[size]

    changes = [(sizes[0], fastest(sizes[0]))]
    open_spans = list(pairwise(sizes))[::-1]
    while open_spans:
        low, high = open_spans.pop()
        if fastest(low) == fastest(high):
            continue
        if high - low == 1:
            changes.append((high, fastest(high)))
        else:
            middle = (low + high) // 2
            open_spans += [(middle, high), (low, middle)]
    return tuple(changes)


def grid_of_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the given sizes and powers of two times the smallest, ascending.

    >>> grid_of_sizes([0, 3, 9])
    (0, 1, 2, 3, 4, 8, 9)
    """
    tested = set(sizes)
    size = max(1, min(sizes))
    while size < max(sizes):
        tested.add(size)
        size *= 2
    return tuple(sorted(tested))


def plan_like(
    given: Plans,
    collective: str,
    *,
    root: int | None = None,
    machine: Topology | None = None,
    demand: Matrix | None = None,
    epsilon: float | None = None,
) -> Plans:
    """Plan another collective on the machine and the channels of a plan, in the same way.

    The planner's optimal trees replace a schedule that the collective does not have, and plans made by hand.

    root: rank of the root of a broadcast or reduce.
    machine: the machine to plan for instead, such as a degraded one.
    demand: for an all-to-all, the bytes that row sends to column.
    epsilon: for an all-to-all, the part of its bound that it may lack; by default it is an optimum.

    >>> import topoplan
    >>> dgx = topoplan.load("dgx-1v")
    >>> plan_like(topoplan.ring_plan(dgx), "allgather").schedule
    'nvlink ring'
    """
    if isinstance(given, DeferredPlan) and machine is None and demand is None:
        try:
            return _like_by_kind(given, collective, root)
        except InfeasibleError:
            pass  # the kinds have no such plan: the listed cluster is planned below
    model, topology = given.plans[-1], machine or given.topology
    channels = "+".join(model.channels)
    if collective == ALL_TO_ALL:
        # paths have no sizes and no orders of trees, and are not divided between channels
        split = "auto" if channels in CHANNEL_SPLITS else channels
        return plan(
            topology,
            collective,
            channels=split,
            demand=demand,
            method="exact" if epsilon is None else "mwu",
            epsilon=GAP if epsilon is None else epsilon,
        )
    if isinstance(given, SizePlans):
        return plan_by_size(topology, collective, root=root, channels=channels)
    try:
        if model.method == "ring":
            kind = model.schedule.removesuffix(" ring")
            return ring_plan(topology, collective, root=root, kind=kind if kind in RING_KINDS else "auto")
        if model.method in METHODS and model.method != "exact":
            return plan(topology, collective, root=root, method=model.method, channels=channels)
        for schedule in SCHEDULES.values():
            if schedule.method == model.method:
                return schedule.make(topology, collective, root=root, channels=channels)
    except (InfeasibleError, UsageError):
        pass  # the collective has no such schedule
    return plan(topology, collective, root=root, channels=channels, order=model.order)


def _like_by_kind(given: DeferredPlan, collective: str, root: int | None) -> DeferredPlan:
    """Plan another collective on the cluster of a plan by kind."""
    from topoplan.solve.packing.kind_composition import plan_by_kind  # few plans are by kind

    cluster, channels = given.by_kind.cluster, "+".join(given.channels)
    return DeferredPlan(plan_by_kind(cluster, collective, root=root, channels=channels))
