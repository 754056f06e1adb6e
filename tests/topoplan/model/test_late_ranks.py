"""Plans for late ranks: bounds by networkx, times on a switch in closed form, and nothing at a rank before it comes."""

from __future__ import annotations

from fractions import Fraction

import networkx
import numpy as np
import pytest

import topoplan
from collectives import Communicator
from tests.support.small_fabrics import both_ways, machine
from topoplan.errors import UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Topology
from topoplan.machine.variants import with_in_network
from topoplan.model.event_simulation import run_events
from topoplan.model.late_ranks import LatePlan, plan_late
from topoplan.plans.plan import LATE

SIZE = 1 << 28


def switch(size: int, last: float = 8.0) -> Topology:
    """GPUs on a switch with 8 GB/s each way, the last one with its own rate."""
    ports = {(f"gpu{rank}", "sw0"): last if rank == size - 1 else 8.0 for rank in range(size)}
    return machine(size, both_ways(ports), switches=1)


def late_by_one_collective(made: Topology | str, rank: int) -> LatePlan:
    """The plan if a rank comes as late as the usual plan takes at its rate."""
    return plan_late(made, {rank: SIZE / topoplan.plan(made).rate * 1e-9}, nbytes=SIZE)


@pytest.mark.sampled
@pytest.mark.parametrize("size", [3, 5, 8, 12])
def test_one_late_rank_on_a_switch_needs_one_buffer_at_full_rate(size: int) -> None:
    """Waiting needs 2 (p - 1) / p buffers after the arrival; the late rank is a leaf of equal trees of all others."""
    held = late_by_one_collective(switch(size), 1)
    assert held.rate_after == held.bound_after == 8
    assert held.bound == pytest.approx(SIZE / 8e9 * (1 + 2 * (size - 1) / size), rel=1e-9)
    assert held.bound <= held.seconds <= 1.03 * held.bound
    assert held.waiting / held.seconds == pytest.approx(4 * (size - 1) / (3 * size - 2), rel=0.03)
    report = topoplan.verify(held.plan)
    assert report.exact_rate == 8 * Fraction(size - 1, 2 * size - 3)
    assert [(shard.share, shard.stages[-1].root) for shard in held.plan.shards] == [
        (Fraction(1, size - 1), root) for root in range(size) if root != 1
    ]


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["dgx-1v", "dgx-h100", "mac-tb5-ring-x5", "mi300x", "dgx-spark-x4-switch"])
def test_the_rate_after_the_arrival_meets_the_flows_of_networkx(name: str) -> None:
    """The least flow from the late rank to another one, or from all others into it."""
    held = late_by_one_collective(name, 2)
    fabric = Fabric(held.plan.topology, held.plan.channels)
    graph = networkx.DiGraph()
    for link in fabric.links:
        known = graph.get_edge_data(link.src, link.dst, {"capacity": 0.0})["capacity"]
        graph.add_edge(link.src, link.dst, capacity=known + link.bandwidth)
    others = [rank for rank in fabric.ranks if rank != fabric.ranks[2]]
    flows = [networkx.maximum_flow_value(graph, fabric.ranks[2], rank) for rank in others]
    graph.add_edges_from(("others", rank) for rank in others)
    flows.append(networkx.maximum_flow_value(graph, "others", fabric.ranks[2]))
    assert held.bound_after == pytest.approx(min(flows), rel=1e-9)
    assert held.rate_after == held.bound_after
    assert held.plan.schedule == LATE
    assert held.waiting / held.seconds > 1.1


def test_no_byte_moves_at_a_rank_before_it_comes() -> None:
    """The others move meanwhile; seconds of 0 change nothing."""
    made = plan_late("dgx-1v", {2: 0.004, 5: 0.002}, nbytes=SIZE).plan
    run = run_events(made, nbytes=SIZE, late={2: 0.004, 5: 0.002})
    first = {rank: min(t.start for t in run.transfers if rank in (t.src, t.dst)) for rank in range(8)}
    assert first[2] >= 0.004
    assert 0.002 <= first[5] < 0.004
    assert max(first[rank] for rank in (0, 1, 3)) < 0.002
    assert run_events(made, nbytes=SIZE, late={2: 0.0}) == run_events(made, nbytes=SIZE)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["dgx-1v", "dgx-2", "v100x4", "dgx-h100"])
def test_times_of_the_usual_plan_with_a_late_rank_are_those_of_the_events(name: str) -> None:
    """The closed form stays within a sixth of the event simulation, and grows by at most the delay."""
    for collective in ("allreduce", "allgather", "reduce_scatter"):
        plan = topoplan.plan(name, collective)
        for size in (1 << 20, 1 << 26):
            usual = topoplan.simulate(plan, size).seconds
            for seconds in (0.0, 1e-5, 1e-3, 1e-2):
                found = topoplan.simulate(plan, size, late={2: seconds}).seconds
                assert found == pytest.approx(
                    run_events(plan, nbytes=size, late={2: seconds}).seconds, rel=1 / 6
                )
                assert usual <= found <= usual + seconds + 1e-12


@pytest.mark.thorough
def test_a_late_rank_delays_a_channel_that_starts_later_by_the_rest_of_its_delay() -> None:
    """PCIe beside NVLink starts 3.7 ms after the launch: a rank that comes before that delays nothing there."""
    plan = topoplan.plan("dgx-1v", channels="nvlink+pcie", nbytes="1GB")
    usual = topoplan.simulate(plan, "1GB")
    assert [one.start > 0.003 for one in usual.channels] == [False, True]
    for seconds in (0.001, 0.003, 0.01):
        found = topoplan.simulate(plan, "1GB", late={2: seconds})
        events = run_events(plan, nbytes=1 << 30, late={2: seconds}).seconds
        assert usual.seconds <= found.seconds <= (usual.seconds + seconds) * (1 + 1e-9)
        assert found.seconds == pytest.approx(events, rel=0.1)
        assert found.channels[1].seconds - usual.channels[1].seconds < max(0.0, seconds - 0.0036) + 1e-12


def test_one_rank_has_nobody_to_wait_for_it() -> None:
    one = topoplan.plan("dgx-1v", gpus=[3])
    assert topoplan.simulate(one, SIZE, late={0: 1.0}).seconds == topoplan.simulate(one, SIZE).seconds


def test_the_buffer_of_a_late_rank_crosses_its_port_after_it_comes() -> None:
    """Two ranks: launch, delay, start-up, bytes."""
    pair = topoplan.plan(switch(2), "broadcast")
    usual, late = (topoplan.simulate(pair, SIZE, late=late) for late in (None, {1: 0.25}))
    assert late.seconds == pytest.approx(usual.seconds + 0.25, rel=1e-12)
    assert late.latency_seconds == pytest.approx(usual.latency_seconds + 0.25, rel=1e-12)
    with pytest.raises(UsageError, match="a late rank must be 0 to 1, got 2"):
        topoplan.simulate(pair, SIZE, late={2: 0.25})
    with pytest.raises(UsageError, match="late goes with one size"):
        topoplan.simulate(pair, late={1: 0.25})  # type: ignore[call-overload]


@pytest.mark.thorough
def test_the_usual_plan_stays_if_no_other_is_faster() -> None:
    """Ranks that come together, two ranks, and a late rank whose slow port limits all plans alike."""
    cases = [(switch(8), {3: 0.0}), (switch(2), {1: 0.1}), (switch(8, last=4.0), {7: 0.1})]
    for made, late in cases:
        held = plan_late(made, late, nbytes=SIZE)
        assert held.plan == topoplan.plan(made)
        assert held.seconds == held.usual
        assert held.rate_after == held.plan.rate


def test_two_late_ranks_wait_for_the_later_one() -> None:
    held = plan_late(switch(6), {4: 0.06, 2: 0.03}, nbytes="256MB")
    assert held.late == ((2, 0.03), (4, 0.06))
    assert held.nbytes == SIZE
    assert all(shard.stages[-1].root != 4 for shard in held.plan.shards)
    assert held.bound == pytest.approx(0.06 + SIZE / 8e9)
    assert held.seconds < 1.03 * held.bound


@pytest.mark.parametrize(("seconds", "nbytes"), [(1e6, 8), (1e-12, 1), (30.0, "1KB")])
def test_delays_of_any_length_have_a_plan(seconds: float, nbytes: int | str) -> None:
    held = plan_late("dgx-h100", {3: seconds}, nbytes=nbytes)
    assert topoplan.verify(held.plan).exact_rate > 0
    assert held.bound <= held.seconds <= held.usual


def test_a_plan_for_late_ranks_adds_up_the_buffers_of_all_ranks() -> None:
    plan = late_by_one_collective("dgx-1v", 6).plan
    rng = np.random.default_rng(3)
    given = [rng.integers(-99, 99, 1001).astype(np.float64) for _ in plan.ranks]
    with Communicator(plan) as communicator:
        for result in communicator.all_reduce(given):
            np.testing.assert_array_equal(result, sum(given))


@pytest.mark.parametrize(
    ("late", "options", "words"),
    [
        ({}, {}, "late must name a rank, got none"),
        ({8: 1.0}, {}, "a late rank must be 0 to 7, got 8"),
        ({-1: 1.0}, {}, "a late rank must be 0 to 7, got -1"),
        ({1: -0.5}, {}, "seconds of late rank 1 must be finite and at least 0, got -0.5"),
        ({1: float("inf")}, {}, "must be finite and at least 0, got inf"),
        ({1: float("nan")}, {}, "must be finite and at least 0, got nan"),
        ({0: 1.0}, {"gpus": [3]}, "2 to 128 GPUs, got 1"),
        ({0: 1.0}, {"nbytes": 0}, "nbytes must be above 0, got 0"),
        ({0: 1.0}, {"channels": "nvlink+pcie"}, "channels that share a buffer, got nvlink\\+pcie"),
    ],
)
def test_bad_input_is_refused(late: dict[int, float], options: dict[str, object], words: str) -> None:
    asked: dict[str, object] = {"nbytes": SIZE, **options}
    with pytest.raises(UsageError, match=words):
        plan_late("dgx-1v", late, **asked)  # type: ignore[arg-type]


@pytest.mark.thorough
def test_large_numbers_and_machines_whose_switches_add() -> None:
    """Delays of odd length gave numbers beyond 64 bits; waiting is never said to be faster than what is taken."""
    sparks = topoplan.cluster([topoplan.Server("dgx-spark", count=8)], nic_gbps=400)
    for seconds in (1.0, 0.1234567891, 1e-6):
        made = plan_late(sparks, {6: seconds}, nbytes=10**6)
        assert made.bound * (1 - 1e-9) <= made.seconds <= made.waiting
    with pytest.raises(UsageError, match="switches do not add"):
        plan_late(with_in_network("dgx-h100", "all"), {3: 0.01}, nbytes="1GB")
    with pytest.raises(UsageError, match="2 to 128 GPUs, got 256"):
        plan_late(
            topoplan.cluster([topoplan.Server("dgx-h100", count=32)], nic_gbps=400), {3: 0.01}, nbytes="1GB"
        )
