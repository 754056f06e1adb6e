"""Plans by size: the fastest of all schedules at every size, and where the curves of two of them meet."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.small_fabrics import COLLECTIVES, direct_machines, switched_machines
from topoplan import InfeasibleError, Topology, UsageError
from topoplan.machine.variants import with_all_capabilities
from topoplan.model.candidates import candidates, doubled
from topoplan.model.closed_form import clock
from topoplan.model.dataflow import LAUNCH, START_UP
from topoplan.model.event_simulation import run_events
from topoplan.model.expected_times import expected_times
from topoplan.model.schedule_selection import ScheduleChoice, choose_by_size, fastest_from, grid_of_sizes
from topoplan.model.window_engine import HOPPER, WindowsClock
from topoplan.plans.verify import verify_all
from topoplan.units import TOLERANCE

ALPHA = START_UP["nvlink"]
CASES = [
    *((name, collective) for name in ("dgx-1v", "v100x4", "pcie-x8") for collective in COLLECTIVES),
    ("dgx-2", "allreduce"),
    ("dgx-2", "reduce"),
    ("mi250x", "broadcast"),
]
QUICK = [("v100x4", "allgather"), ("pcie-x8", "reduce"), ("dgx-2", "reduce")]


@cache
def chosen(name: str, collective: str) -> ScheduleChoice:
    return choose_by_size(name, collective)


def seconds(choice: ScheduleChoice, number: int, nbytes: int) -> float:
    return topoplan.simulate(choice.candidates[number], nbytes=nbytes).seconds


def test_dgx2_broadcast_crosses_where_two_lines_meet() -> None:
    """The root's star takes launch + alpha + 15 D / 150, two levels 2 alpha + D / 150: equal at 150 alpha / 14."""
    plans = topoplan.plan_by_size("dgx-2", "broadcast")
    assert plans.crossovers == (ceil(150e9 * ALPHA / 14),) == (94286,)
    assert [(one.plan.height, one.plan.rate) for one in plans.ranges] == [(1, 10.0), (2, 150.0)]


@pytest.mark.thorough
def test_schedules_of_an_allreduce_by_size() -> None:
    """Inputs of all in one hop or two, then one hop or the optimal trees; a ring of a DGX-2 takes 30 hops."""
    choice = chosen("dgx-2", "allreduce")
    assert [one.plan.schedule for one in choice.plans.ranges] == ["one-shot", "one-hop"]
    assert choice.plans.at(1 << 30).rate == 80.0
    ring = next(plan for plan in choice.candidates if plan.schedule == "nvlink ring")
    for plan, hops in ((ring, 30), (choice.plans.at(1 << 20), 2), (choice.plans.at(1024), 1)):
        assert topoplan.simulate(plan, nbytes=1024).seconds == pytest.approx(LAUNCH + hops * ALPHA, rel=0.01)
    plans = chosen("dgx-1v", "allreduce").plans
    assert topoplan.simulate(plans, nbytes=4).seconds == pytest.approx(LAUNCH + 2 * ALPHA, rel=1e-3)
    assert (plans.at(4).schedule, plans.at(4).height) == ("one-shot", 2)
    assert topoplan.verify(plans.at(1 << 30)).optimal
    four = [one.plan for one in chosen("v100x4", "allreduce").plans.ranges]
    assert [(one.schedule, one.num_trees) for one in four] == [("one-shot", 1), ("one-hop", 4), ("trees", 4)]
    assert topoplan.verify(four[-1]).optimal


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["mi300x", "v100x4", "dgx-1v"])
def test_doubled_trees_fill_sooner_at_the_same_rate(name: str) -> None:
    plan = topoplan.plan(name, "broadcast")
    pairs = doubled(plan)
    assert pairs is not None
    assert topoplan.verify(pairs).rate == plan.rate
    assert run_events(pairs, nbytes=8 << 20).seconds < 0.95 * run_events(plan, nbytes=8 << 20).seconds
    assert doubled(topoplan.plan("dgx-2", "allgather")) is None  # one hop has no pipeline to fill


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_picks_the_fastest_candidate_and_changes_where_curves_meet(case: tuple[str, str]) -> None:
    """Time grows with size along all ranges; at a crossover the two plans differ by a hair."""
    choice = chosen(*case)
    for nbytes in choice.sizes:
        least = min(seconds(choice, number, nbytes) for number in range(len(choice.candidates)))
        assert topoplan.simulate(choice.plans, nbytes=nbytes).seconds <= least * (1 + TOLERANCE)
    for before, after in pairwise(choice.plans.ranges):
        at, last = after.start, after.start - 1
        old = [topoplan.simulate(before.plan, nbytes=size).seconds for size in (last, at)]
        new = [topoplan.simulate(after.plan, nbytes=size).seconds for size in (last, at)]
        assert old[0] <= new[0] * (1 + TOLERANCE)
        assert new[1] <= old[1] * (1 + TOLERANCE)
        assert old[1] == pytest.approx(new[1], rel=1e-4)
    time = clock(choice.plans)
    steps = [time(int(512 * 1.21**i)).seconds for i in range(70)]
    assert steps == sorted(steps)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in QUICK else pytest.mark.thorough) for case in CASES],
    ids="-".join,
)
def test_ranges_cover_every_size_with_verified_candidates(case: tuple[str, str]) -> None:
    """From 0 without gap or end; one bound for all candidates, which the optimal trees reach; no forest twice."""
    choice = chosen(*case)
    ranges = choice.plans.ranges
    assert (ranges[0].start, ranges[-1].stop) == (0, None)
    for before, after in pairwise(ranges):
        assert before.stop == after.start
        assert before.plan.shards != after.plan.shards
    for one in ranges:
        assert choice.plans.at(one.start) is one.plan
        assert one.stop is None or choice.plans.at(one.stop - 1) is one.plan
    best = topoplan.verify(choice.candidates[0])
    assert best.optimal
    for plan in choice.candidates:
        assert topoplan.verify(plan).exact_bound == best.exact_bound
        assert plan.channels == choice.candidates[0].channels
    forests = [plan.shards for plan in choice.candidates]
    assert all(a != b for i, a in enumerate(forests) for b in forests[:i])


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), min_size=1, max_size=6),
    st.sets(st.integers(0, 40), min_size=1, max_size=6),
)
@settings(max_examples=200, deadline=None)
def test_the_envelope_of_straight_lines_is_found_exactly(
    lines: list[tuple[int, int]], sizes: set[int]
) -> None:
    """Against trying every byte: lines win over one stretch each, so bisection misses none."""
    clocks = [lambda n, line=line: float(line[0] + line[1] * n) for line in lines]
    grid = sorted(sizes)
    changes = fastest_from(clocks, grid)
    for nbytes in range(grid[0], grid[-1] + 1):
        found = next(number for start, number in reversed(changes) if start <= nbytes)
        least = min(clock(nbytes) for clock in clocks)
        assert found == next(i for i, clock in enumerate(clocks) if clock(nbytes) <= least * (1 + TOLERANCE))
    assert all(a[1] != b[1] for a, b in pairwise(changes))


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=8))
def test_sizes_of_the_grid_double_at_most(sizes: list[int]) -> None:
    """All named sizes are among them, none lies outside, and no step is longer than a doubling."""
    tested = grid_of_sizes(sizes)
    assert set(sizes) <= set(tested)
    assert (tested[0], tested[-1]) == (min(sizes), max(sizes))
    assert all(b <= 2 * max(a, 1) for a, b in pairwise(tested))


@pytest.mark.thorough
@given(direct_machines(most=4) | switched_machines(), st.sampled_from(COLLECTIVES))
@settings(max_examples=25, deadline=None)
def test_plans_by_size_of_random_machines_are_valid(topology: Topology, collective: str) -> None:
    """Every range verifies; the last byte range is never slower at 1 GB than the optimal trees."""
    plans = topoplan.plan_by_size(topology, collective)
    best = topoplan.plan(topology, collective)
    assert {report.bound for report in verify_all(plans)} == {plans.ranges[0].plan.bound}
    assert plans.ranges[0].plan.bound <= best.bound
    for nbytes in (1 << 10, 1 << 30):
        mine, other = (topoplan.simulate(plan, nbytes=nbytes).seconds for plan in (plans, best))
        assert mine <= other * (1 + TOLERANCE)


def test_nothing_is_claimed_outside_the_sizes() -> None:
    """Tested at 64 KB and below only, the lowest tree is kept for all larger sizes; a single size has one plan."""
    dgx = topoplan.load("dgx-1v")
    by_size = partial(topoplan.plan_by_size, dgx, gpus=[1, 4, 5, 7])
    assert by_size(sizes=[1 << 10, 1 << 15]).at(1 << 40).schedule == "owner exchange"
    assert len(by_size(sizes=[1 << 26]).ranges) == 1
    assert by_size(sizes=[0]).at(0).num_trees == 1
    plans = topoplan.plan_by_size(dgx, "reduce", gpus=[4])
    assert [(one.start, one.stop, one.plan.num_trees) for one in plans.ranges] == [(0, None, 0)]


def test_what_has_no_path_says_so() -> None:
    """GPUs 0 and 5 have no NVLink between them; over PCIe they are planned, with PCIe rings and one hop."""
    dgx = topoplan.load("dgx-1v")
    with pytest.raises(InfeasibleError, match="no NVLink path leads from"):
        topoplan.plan_by_size(dgx, gpus=[0, 5], channels="nvlink")
    made, notes = candidates(dgx, gpus=[0, 2, 5], channels="pcie")
    assert {plan.channels for plan in made} == {("pcie",)}
    assert "pcie ring" in {plan.schedule for plan in made}
    assert notes == ("no grid exchange: the 3 GPUs are not a grid whose dimensions have routes of their own",)


def test_notes_name_the_schedules_that_do_not_exist() -> None:
    _, notes = candidates("dgx-1v", gpus=[1, 4, 5, 7])
    assert [note.split(":")[0] for note in notes] == ["no one-hop", "no ring", "no grid exchange"]
    assert "no NVLink ring exists" in notes[1]
    assert not any(";" in note for note in notes)
    _, notes = candidates("bcube:2,2")
    wanted = "no one-shot between servers: each of 4 servers has one GPU"
    assert any(note.startswith(wanted) for note in notes)


def test_progress_names_what_is_tried() -> None:
    lines: list[str] = []
    topoplan.plan_by_size("v100x4", progress=lines.append)
    assert [line for line in lines if line.startswith(("one-hop", "lowest", "relay", "timing"))] == [
        "one-hop …",
        "lowest tree …",
        "relay rings …",
        "timing 12 plans at 21 sizes and where they cross …",
    ]


@cache
def on_windows(name: str, collective: str) -> ScheduleChoice:
    """As `chosen`, for the windows engine."""
    return choose_by_size(name, collective, engine="windows")


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["v100x4", "dgx-h100", "dgx-b200"])
def test_windows_take_the_least_of_all_candidates(name: str) -> None:
    """At every tested size, by clocks of their own, with the figures that the choice names."""
    choice = on_windows(name, "allreduce")
    assert choice.costs is not None
    clocks = [WindowsClock(plan, choice.costs) for plan in choice.candidates]
    for nbytes in choice.sizes:
        own = clocks[choice.candidates.index(choice.plans.at(nbytes))]
        assert own.seconds(nbytes) <= min(one.seconds(nbytes) for one in clocks) * (1 + TOLERANCE)


def test_windows_say_whose_figures_they_take() -> None:
    """Given figures are taken as they are."""
    assert any("figures of Hopper" in note for note in on_windows("dgx-h100", "allreduce").notes)
    assert any("are known for V100: 24 blocks" in note for note in on_windows("v100x4", "allreduce").notes)
    mine = replace(HOPPER, name="mine", source="a sweep")
    choice = choose_by_size("v100x4", engine="windows", costs=mine, sizes=[1 << 20])
    assert choice.costs == mine
    assert "windows engine: figures of mine, from a sweep" in choice.notes


@pytest.mark.parametrize(("name", "gpus"), [("dgx-h100", 8), ("dgx-b200", 4), ("dgx-b300", 8)])
def test_on_windows_a_switch_that_adds_takes_the_published_times_of_multimem(name: str, gpus: int) -> None:
    """Beyond packets, of trees that it adds and copies throughout; others keep the model's times."""
    machine = with_all_capabilities(topoplan.load(name)).subset(range(gpus))
    choice = choose_by_size(machine, engine="windows", sizes=[1 << 10, 1 << 20, 64 << 20])
    (known,) = [one for one in expected_times(machine, "allreduce") if one.implementation == "multimem"]
    assert choice.costs is not None
    switched = 0
    for plan, time in zip(choice.candidates, choice.windows, strict=True):
        stages = [stage for shard in plan.shards for stage in shard.stages]
        star = all([edge.parent for edge in one.edges] == [one.root] * (gpus - 1) for one in stages)
        model = WindowsClock(plan, choice.costs)
        assert time.seconds(1 << 10) == model.seconds(1 << 10)
        assert time.seconds(1 << 20) == (known.seconds(1 << 20) if star else model.seconds(1 << 20))
        assert time.setting(1 << 20).blocks == model.setting(1 << 20).blocks
        switched += star
    assert 0 < switched < len(choice.candidates)
    assert any(known.costs.source in note for note in choice.notes)


def test_by_windows_medium_sizes_go_in_one_hop_as_by_messages() -> None:
    """DGX H100: the engine cuts them into so few chunks that a double binary tree is not faster."""
    machine = topoplan.load("dgx-h100")
    assert topoplan.plan_by_size(machine, sizes=[8 << 20]).plans[0].schedule == "one-hop"
    found = on_windows("dgx-h100", "allreduce").plans
    schedules = [found.at(size).schedule for size in (1 << 20, 8 << 20, 64 << 20)]
    assert schedules == ["one-hop", "one-hop", "one-hop"]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("machine", "options", "message"),
    [
        ("dgx-1v", {}, "one NVLink domain, but gpu0 reaches gpu5 only through another GPU"),
        ("pcie-x8", {}, "one NVLink domain, but these are planned over PCIe"),
        ("2 servers", {}, "one NVLink domain, but these are planned over NVLink and the network"),
        ("mi250x", {}, "needs NVIDIA's GPUs, got AMD's"),
        ("v100x4", {"engine": "kernels"}, "engine 'kernels' is unknown; use one of messages, windows"),
        (
            "v100x4",
            {"engine": "messages", "costs": HOPPER},
            "engine costs need engine 'windows', got 'messages'",
        ),
        ("v100x4", {"engine": "messages", "sizes": []}, "give at least one, of zero bytes or more"),
        ("v100x4", {"engine": "messages", "sizes": [1024, -5]}, "give at least one, of zero bytes or more"),
    ],
)
def test_refuses_in_one_line(machine: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        topoplan.plan_by_size(
            topoplan.nvswitch_cluster(2, gpus=2) if machine == "2 servers" else topoplan.load(machine),
            **{"engine": "windows", "sizes": [1 << 20], **options},
        )
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [None, 1e6])
def test_sizes_are_whole_numbers_or_texts(size: Any) -> None:
    plans = topoplan.plan_by_size("v100x4", sizes=[1 << 10, 1 << 20])
    assert plans.at("1MB") is plans.at(1 << 20)
    with pytest.raises(UsageError, match=f"whole number of bytes or a text such as 64MB, got {size}"):
        plans.at(size)
