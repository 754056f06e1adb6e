"""The bound on time at every size: what proves it, that plans respect it, and that files are recomputed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.checkout import Run
from tests.support.regular_fabrics import wire
from tests.support.small_fabrics import COLLECTIVES, direct_machines, switched_machines
from topoplan import PlanError, SizePlans, Topology
from topoplan.machine.fabric import Fabric
from topoplan.model.candidates import (
    ONE_BUFFER,
    _disjoint_forests,
    _exits,
    _heights,
    candidates,
    chain_limits,
)
from topoplan.model.closed_form import pipeline
from topoplan.model.dataflow import LAUNCH, START_UP, dataflow
from topoplan.model.schedule_selection import ScheduleChoice, choose_by_size
from topoplan.model.times_by_size import (
    TimeBound,
    check_times,
    least_start_ups,
    start_up_diameter,
    time_bound,
    times_of,
)
from topoplan.plans.chain_limits import (
    ExitLimit,
    GroupLimit,
    HeightLimit,
    StartLimit,
    crossings_of,
    limit_from_object,
)
from topoplan.units import TOLERANCE

HOP, ACROSS = START_UP["nvlink"], START_UP["network"]


def bound_of(machine: Topology, collective: str) -> TimeBound:
    plan = topoplan.plan(machine, collective)
    fabric = Fabric(plan.topology, plan.channels)
    rate = plan.certificate.bound(fabric, collective, plan.root)
    return time_bound(fabric, collective, plan.root, chain_limits(fabric, collective, plan.root, rate), rate)


def check_candidates(choice: ScheduleChoice) -> None:
    if choice.bound is None or len(choice.plans.ranks) == 1:
        return
    for clock in choice.clocks():
        for size in choice.sizes:
            assert clock(size) >= choice.bound.seconds(size) * (1 - TOLERANCE)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "collective", "steps"),
    [
        ("dgx-2", "allreduce", [(1, 10), (2, 80)]),
        ("dgx-2", "broadcast", [(1, 10), (2, 150)]),
        ("dgx-2", "allgather", [(1, 160)]),
        ("dgx-1v", "broadcast", [(2, 50), (3, 125), (4, 150)]),
        ("dgx-1v", "allgather", [(2, "1200/7")]),
        ("mi250", "broadcast", [(5, 150), (6, 200), (8, 250), (9, 300)]),
    ],
)
def test_best_rates_by_hops(name: str, collective: str, steps: list[tuple[int, int | str]]) -> None:
    """DGX-1V from GPU 0: height 2, 3, 4 give 50, 125, 150; a star of N ranks receives N - 1 buffers at each port.

    Sixteen ranks of an MI250 host have trees of all these heights and rates.
    """
    found = bound_of(topoplan.load(name), collective).steps
    assert [rate for _, rate in found] == [Fraction(rate) for _, rate in steps]
    assert [chain for chain, _ in found] == pytest.approx([hops * HOP for hops, _ in steps])


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "collective", "steps"),
    [
        ("torus:9@25", "broadcast", [(4, 25), (8, 50)]),
        ("torus:27@25", "reduce", [(13, 25), (26, 50)]),
        (
            "torus:27@25",
            "allreduce",
            [(13, "450/91"), (14, "25/2"), (17, 25), (26, "675/26")],
        ),
        ("torus:9@25", "allreduce", [(4, "25/2"), (5, 25), (8, "225/8")]),
        ("torus:3,3@25", "allreduce", [(2, 25), (3, "225/4")]),
        ("torus:3,3,3@25", "broadcast", [(3, 50), (4, 150)]),
        ("torus:3,3,3@25", "allreduce", [(3, "75/2"), (4, "2025/26")]),
    ],
)
def test_a_rank_sends_over_several_wires_if_chains_are_short(
    name: str, collective: str, steps: list[tuple[int, int | str]]
) -> None:
    """Around a ring of N both wires of the root carry everything, unless a chain has N - 1 hops.

    With as many hops as the diameter, an allreduce sends and receives twice at each rank of a ring for its furthest
    two; in three dimensions of three ranks each, all that is furthest needs both wires of a dimension, or three.
    """
    found = bound_of(topoplan.load(name), collective).steps
    assert [rate for _, rate in found] == [Fraction(rate) for _, rate in steps]
    assert [chain for chain, _ in found] == pytest.approx([hops * ACROSS for hops, _ in steps])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "collective", "starts"),
    [("torus:3,3,3", "allgather", 5), ("torus:3,3,3", "reduce_scatter", 5), ("torus:9", "allgather", 0)],
)
def test_a_wire_starts_one_block_at_a_time(name: str, collective: str, starts: int) -> None:
    """26 blocks over six wires take five start-ups, more than the diameter of three; 8 over two take the diameter."""
    found = bound_of(topoplan.load(name), collective)
    assert found.starts == pytest.approx(starts * ACROSS)
    assert found.seconds(0) == pytest.approx(LAUNCH + max(starts * ACROSS, found.steps[0][0]))
    plan = topoplan.lowest_tree(name, collective)
    assert topoplan.simulate(plan, nbytes=1).seconds == pytest.approx(found.seconds(1), rel=0.01)


def test_copies_of_two_wires_start_at_once() -> None:
    """GPU 7 of a DGX-1V has links of 2, 1, 2 and 1 wires: six copies in one start-up, a seventh in half more."""
    fabric = Fabric(topoplan.load("dgx-1v"), ("nvlink",))
    limit = StartLimit("gpu7")
    assert limit.seconds(fabric, "allgather", [1.0] * len(fabric.links)) == 1.5
    assert limit_from_object(limit.to_object()) == limit
    for rank, collective, told in (
        ("gpu7", "broadcast", "needs a block of every rank, got broadcast"),
        ("gpu9", "allgather", "which is not a rank"),
    ):
        with pytest.raises(PlanError, match=told):
            StartLimit(rank).seconds(fabric, collective, [1.0] * len(fabric.links))
    switched = Fabric(topoplan.load("dgx-2"), ("nvlink",))
    with pytest.raises(PlanError, match="needs wires to ranks, and no switch"):
        StartLimit("gpu0").seconds(switched, "allgather", least_start_ups(switched))


def uneven(name: str) -> Topology:
    """Return a machine whose links have three latencies and two bandwidths; of another name the machine itself."""
    machine = topoplan.load(name.removeprefix("uneven "))
    if not name.startswith("uneven "):
        return machine
    links = tuple(
        replace(link, latency=(1 + number % 3) * 1e-5, bandwidth=link.bandwidth * (1 + number % 2))
        for number, link in enumerate(machine.links)
    )
    return replace(machine, links=links)


@pytest.mark.sampled
@pytest.mark.parametrize("collective", ONE_BUFFER)
@pytest.mark.parametrize("name", ["dgx-1v", "mi250x", "torus:3,3", "uneven torus:5", "uneven torus:3,3"])
def test_no_schedule_is_above_a_limit_of_exits(name: str, collective: str) -> None:
    """All limits that are tried, not only those that lower the bound, on every candidate of short chains."""
    plans, _ = candidates(uneven(name), collective)
    fabric = Fabric(plans[0].topology, plans[0].channels)
    start_ups = least_start_ups(fabric)
    diameter = start_up_diameter(fabric, collective, plans[0].root)
    below = [(max(lane.chain for lane in pipeline(dataflow(plan)).lanes), plan.rate) for plan in plans]
    held = 0
    for limit in _exits(fabric, collective, plans[0].root, start_ups, diameter):
        try:
            bound = limit.bound(fabric, collective, plans[0].root, start_ups)
        except PlanError:
            continue
        for chain, rate in below:
            if chain < limit.chain * (1 - TOLERANCE):
                assert rate <= bound * (1 + TOLERANCE)
                held += 1
    assert held


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "collective"),
    [
        ("mi250", "broadcast"),
        ("mi250", "allreduce"),
        ("torus:11", "reduce"),
        ("torus:4,4", "broadcast"),
    ],
)
def test_no_schedule_is_above_a_limit_of_heights(name: str, collective: str) -> None:
    """Optimal trees, lower ones and disjoint ones, among more ranks than have tables."""
    best = topoplan.plan(name, collective)
    made = [best, *_disjoint_forests(best, None), topoplan.lowest_tree(name, collective)]
    fabric = Fabric(best.topology, best.channels)
    start_ups = least_start_ups(fabric)
    diameter = start_up_diameter(fabric, collective, best.root)
    below = [(max(lane.chain for lane in pipeline(dataflow(plan)).lanes), plan.rate) for plan in made]
    held = 0
    for limit in _heights(fabric, collective, best.root, start_ups, diameter):
        bound = limit.bound(fabric, collective, best.root, start_ups)
        assert limit_from_object(limit.to_object()) == limit
        for chain, rate in below:
            if chain < limit.chain * (1 - TOLERANCE):
                assert rate <= bound * (1 + TOLERANCE)
                held += 1
    assert held


@pytest.mark.thorough
def test_a_file_without_limits_of_exits_still_verifies() -> None:
    """Limits are in the file, so a bound that an earlier version proved is recomputed as it was."""
    plans = topoplan.plan_by_size("torus:9", sizes=[1 << 20])
    assert plans.times is not None
    kinds = [one.kind for one in plans.times.limits]
    assert kinds == ["exits", "exits"]
    earlier = replace(plans, times=times_of(plans, (), [1 << 20]))
    found, now = check_times(earlier), check_times(plans)
    assert found is not None
    assert now is not None
    assert found.seconds(1 << 20) < now.seconds(1 << 20)
    assert SizePlans.from_json(plans.to_json()) == plans


def test_between_servers_each_hop_more_allows_less_traffic() -> None:
    """32 GPUs on four servers, 200 GB/s each: 192, 24 and 3 buffers into a server, then the optimum."""
    one = topoplan.Server("dgx-a100", count=4)
    machine = topoplan.cluster([one], nic_gbps=200, nics=8, nic_access="direct")
    found = bound_of(machine, "allreduce").steps
    rates = [Fraction(200, 192), Fraction(200, 24), Fraction(200, 3), Fraction(400, 3)]
    assert [rate for _, rate in found] == rates
    chains = [ACROSS, ACROSS + HOP, ACROSS + 2 * HOP, 2 * ACROSS]
    assert [chain for chain, _ in found] == pytest.approx(chains)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["dgx-2", "dgx-a100", "dgx-h100"])
def test_switch_machines_are_optimal_at_every_size(name: str) -> None:
    """One-shot and then one hop meet the bound; they cross where bytes cost as much as a start-up."""
    for collective in ("allreduce", "allgather", "reduce_scatter"):
        plans = topoplan.plan_by_size(name, collective)
        assert plans.times is not None
        assert all(seconds <= least * 1.011 for _, seconds, least in plans.times.points)
        if collective == "allreduce":
            first, second = plans.ranges
            assert (first.plan.schedule, second.plan.schedule) == ("one-shot", "one-hop")
            cost = 1 / first.plan.rate - 1 / second.plan.rate
            assert second.start == pytest.approx(HOP / cost * 1e9, rel=0.02)


@pytest.mark.thorough
@settings(max_examples=25, deadline=None)
@given(
    direct_machines() | direct_machines(symmetric=True) | switched_machines(), st.sampled_from(COLLECTIVES)
)
def test_no_candidate_is_below_the_bound(machine: Topology, collective: str) -> None:
    check_candidates(choose_by_size(machine, collective, sizes=[1 << 10, 1 << 26]))


@pytest.mark.thorough
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_helpers_copy_and_add_so_chains_have_no_limits(collective: str) -> None:
    """Twelve ranks around one helper: it adds up their buffers, and sends the sum to all."""
    gpus = [topoplan.Device(f"gpu{rank}", "gpu") for rank in range(12)]
    links = [link for gpu in gpus for link in wire(gpu.name, "helper0", "network", 10.0)]
    hub = Topology("hub", (*gpus, topoplan.Device("helper0", "helper")), tuple(links))
    choice = choose_by_size(hub, collective, sizes=[1 << 10, 1 << 15, 1 << 20, 1 << 26])
    check_candidates(choice)
    times = choice.plans.times
    assert times is not None
    assert times.limits == ()
    limit = GroupLimit(7.2e-5, "ranks", ("gpu0",))
    with pytest.raises(PlanError, match="chain limits need one kind of wire, no helpers"):
        check_times(replace(choice.plans, times=replace(times, limits=(limit,))))


def test_what_a_chain_of_some_length_can_do() -> None:
    """Between two groups a chain that returns does not help; between more, two hops pass a third."""
    assert crossings_of(2.5, 1, 1, two=True) == "half"
    assert crossings_of(2.5, 1, 1, two=False) is None
    assert crossings_of(2.0, 1, 1, two=False) == "direct"
    assert crossings_of(3.0, float("inf"), 1.5, two=False) == "direct"


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        (GroupLimit(4e-5, "ranks", ("gpu0",)), "may hop between groups more than once"),
        (GroupLimit(1e-5, "sides", ("gpu0", "nobody")), "names device 'nobody'"),
        (GroupLimit(1e-5, "servers", ("gpu0",)), "parts the ranks of a group"),
        (GroupLimit(1e-5, "ranks", ()), "nothing must leave"),
        (HeightLimit(4e-5, 2, (("gpu0", "gpu1", 1),)), "may have more than 2 hops"),
        (HeightLimit(1e-5, 2, ()), "have no length"),
        (HeightLimit(1e-5, 2, (("gpu0", "gpu1", -1),)), "must be whole numbers from 0 on"),
        (ExitLimit(4e-5, 2e-5, (("gpu0", "gpu1", 1),)), "may count a hop of far ranks twice"),
        (ExitLimit(1e-5, 0.0, (("gpu0", "gpu1", 1),)), "do not reach all ranks"),
        (ExitLimit(3e-5, 0.0, ()), "have no length"),
        (ExitLimit(3e-5, 0.0, (("gpu0", "gpu1", -1),)), "must be whole numbers from 0 on"),
    ],
)
def test_what_proves_nothing_is_refused(limit: GroupLimit | HeightLimit | ExitLimit, told: str) -> None:
    fabric = Fabric(topoplan.load("dgx-1v"), ("nvlink",))
    with pytest.raises(PlanError, match=told):
        limit.bound(fabric, "allreduce", None, least_start_ups(fabric))


def test_limits_of_heights_need_a_height_that_reaches_all() -> None:
    ring = Fabric(topoplan.load("torus:27"), ("network",))
    lengths = tuple((link.src, link.dst, 1) for link in ring.links)
    for name, height, told in (
        ("torus:65", 1, "needs up to 64 ranks and a height below their number, got 65 ranks"),
        ("torus:27", 0, "got 27 ranks and height 0"),
        ("torus:27", 12, "trees of height 12 do not reach all ranks"),
    ):
        fabric = Fabric(topoplan.load(name), ("network",))
        for collective, root in (("broadcast", 3), ("allreduce", None), ("reduce_scatter", None)):
            with pytest.raises(PlanError, match=told):
                HeightLimit(1e-6, height, lengths).bound(fabric, collective, root, least_start_ups(fabric))
    with pytest.raises(PlanError, match="have no length"):
        HeightLimit(1e-6, 13, ()).bound(ring, "allreduce", None, least_start_ups(ring))


def test_limits_of_exits_need_direct_wires_and_one_buffer() -> None:
    limit = ExitLimit(3e-5, 0.0, (("gpu0", "nvswitch0", 1),))
    for name, collective, told in (
        ("dgx-2", "allreduce", "and no switch"),
        ("dgx-1v", "allgather", "one buffer"),
    ):
        fabric = Fabric(topoplan.load(name), ("nvlink",))
        with pytest.raises(PlanError, match=told):
            limit.bound(fabric, collective, None, least_start_ups(fabric))


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"kind": "exits", "chain": 1.0, "far": -1, "lengths": []}, "far must be a number of zero or more"),
        (
            {"kind": "guess", "chain": 1.0},
            "limit: kind 'guess' is unknown; use groups, heights, exits or starts",
        ),
        ({"kind": "groups", "chain": 1.0, "between": "racks", "side": []}, "between must be one of ranks"),
        (
            {"kind": "heights", "chain": 1.0, "height": 2, "lengths": [["gpu0", 1]]},
            r"must be \[src, dst, length\]",
        ),
        ([], "limit"),
    ],
)
def test_limits_of_a_wrong_form_are_refused(value: object, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        limit_from_object(value)


@pytest.mark.thorough
def test_a_file_says_times_and_verify_recomputes_them(run: Run, tmp_path: Path) -> None:
    """Times, bounds and ratios in table and JSON; a time or a limit that is not right is found."""
    path = tmp_path / "sizes.json"
    command = ("plan", "dgx-1v", "--sizes", "1KB:1GB")
    status, out, _ = run(*command, "-o", str(path))
    assert status == 0
    assert "lower bound us  ratio" in out
    points = json.loads(run(*command, "--json")[1])["points"]
    keys = "size schedule seconds bound_seconds ratio nccl nccl_runs quickest quickest_seconds"
    assert [list(point) for point in points] == [keys.split()] * 21
    assert all(1 <= point["ratio"] < 1.6 for point in points)
    status, told, _ = run("verify", str(path))
    assert status == 0
    assert f"times        21 sizes recomputed; every schedule takes at least {LAUNCH * 1e6:.1f} us" in told
    value = json.loads(run("verify", str(path), "--json")[1])
    assert value["times"]["steps"][0]["rate"] == 25
    plans = topoplan.load_plan(path)
    assert isinstance(plans, SizePlans)
    assert plans.times is not None
    assert SizePlans.from_json(plans.to_json()) == plans
    assert check_times(replace(plans, times=None)) is None
    for place, name in ((1, "model time"), (2, "bound on time")):
        point = list(plans.times.points[3])
        point[place] *= 1.001
        spoiled = replace(plans.times, points=((point[0], point[1], point[2]),))
        path.write_text(replace(plans, times=spoiled).to_json())
        status, _, err = run("verify", str(path))
        assert status == 1
        assert f"claims a {name}" in err
    (limit,) = plans.times.limits
    path.write_text(
        replace(plans, times=replace(plans.times, limits=(replace(limit, chain=1e-3),))).to_json()
    )
    assert run("verify", str(path))[0] == 1


def test_verify_needs_no_solver(tmp_path: Path) -> None:
    """What recomputes the bounds loads neither the simplex nor column generation nor a packing."""
    path = tmp_path / "sizes.json"
    path.write_text(topoplan.plan_by_size("v100x4").to_json())
    code = (
        "import sys; from topoplan.cli.main import main; status = main(['verify', sys.argv[1]]);"
        "print(status, [name for name in sys.modules if name.startswith(('topoplan.solve.simplex',"
        " 'topoplan.solve.packing', 'topoplan.solve.planner', 'topoplan.schedules', 'topoplan.model.candidates',"
        " 'topoplan.model.schedule_selection', 'scipy'))])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
