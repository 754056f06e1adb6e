"""Schedules for small messages: one hop, and the lowest tree."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import topoplan
from tests.support.small_fabrics import COLLECTIVES, both_ways, direct_machines, machine, switched_machines
from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Topology
from topoplan.model.dataflow import LAUNCH, START_UP
from topoplan.reading.load import library
from topoplan.schedules.ring_forest import shortest_route
from topoplan.schedules.routes import LeastLoaded

MACHINES = direct_machines() | direct_machines(symmetric=True) | switched_machines()


def planes(count: int) -> Topology:
    """Four GPUs, each with a 10 GB/s port into each of some switches."""
    ports = {(f"gpu{i}", f"sw{j}"): 10.0 for i in range(4) for j in range(count)}
    return machine(4, both_ways(ports), switches=count)


@pytest.mark.sampled
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("name", library())
def test_both_are_valid_wherever_they_exist(name: str, collective: str) -> None:
    """On every library machine; only machines with a missing link have no one-hop schedule."""
    topology = topoplan.load(name)
    lowest = topoplan.lowest_tree(topology, collective)
    uneven = 3 if collective == "allreduce" else 5
    heights = {"dgx-1p": 2, "dgx-1v": 2, "mi250x": 2, "mi250": uneven}
    assert topoplan.verify(lowest).height == heights.get(name, 1)
    if lowest.height > 1:
        with pytest.raises(InfeasibleError, match="only through another GPU; a one-hop schedule needs"):
            topoplan.one_hop(topology, collective)
        return
    assert topoplan.verify(topoplan.one_hop(topology, collective)).height == 1


def test_a_hop_without_a_wire_is_one_clear_error() -> None:
    """GPUs 0 and 5 of a DGX-1V have no NVLink between them: a schedule that wants one is told the cut."""
    alone = Fabric(topoplan.load("dgx-1v").subset([0, 5]), ("nvlink",))
    with pytest.raises(InfeasibleError, match="no path over nvlink leads from gpu0 to gpu5; use a") as caught:
        shortest_route(alone, 0, 1)
    assert caught.value.cut == ("gpu0",)
    with pytest.raises(InfeasibleError, match="no wire leads from gpu0 to gpu5 but through another GPU"):
        LeastLoaded(alone).edge("broadcast", (0,), 1, Fraction(1))
    with pytest.raises(InfeasibleError, match="no wire leads to gpu0 from gpu5 but through another GPU"):
        LeastLoaded(alone).edge("reduce", (0,), 1, Fraction(1))


def test_one_hop_on_dgx2_is_the_optimum_but_for_rooted_collectives() -> None:
    """Stars of all ranks fill every port; the star of a root sends 15 copies out of one port of 150 GB/s."""
    dgx = topoplan.load("dgx-2")
    rates = {collective: topoplan.one_hop(dgx, collective).rate for collective in COLLECTIVES}
    assert rates == {
        "allreduce": 80.0,
        "broadcast": 10.0,
        "reduce": 10.0,
        "allgather": 160.0,
        "reduce_scatter": 160.0,
    }
    assert topoplan.one_hop(dgx, "broadcast").bound == 150.0
    assert topoplan.one_hop(dgx, "broadcast", gpus=[3, 5, 9], root=9).root == 2


def test_one_hop_on_a_full_mesh_is_below_the_optimum_where_links_are_unequal() -> None:
    """Four V100 with single and double links: each pair carries half of the buffer, 25 GB/s ones limit it to 50."""
    plan = topoplan.one_hop(topoplan.load("v100x4"))
    assert (plan.trees, plan.rate, plan.bound) == (4, 50.0, 75.0)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("collective", ["allreduce", "allgather"])
def test_parallel_switches_are_used_evenly(collective: str, count: int) -> None:
    """Three destinations on one, two or three planes: the fullest port carries 3, 2 or 1 of them."""
    plan = topoplan.one_hop(planes(count), collective)
    fullest = -(-3 // count)
    whole = 4 * 10.0 / fullest
    assert topoplan.verify(plan).rate == pytest.approx(whole / 2 if collective == "allreduce" else whole)


@pytest.mark.thorough
@given(MACHINES, st.sampled_from(COLLECTIVES))
@settings(max_examples=60, deadline=None)
def test_no_plan_is_lower_than_the_lowest_tree(topology: Topology, collective: str) -> None:
    """It is valid, stays within the bound, and no optimal plan has fewer edges one after another."""
    low, best = topoplan.lowest_tree(topology, collective), topoplan.plan(topology, collective)
    report = topoplan.verify(low)
    assert report.exact_rate is not None
    assert report.exact_rate <= Fraction(topoplan.verify(best).exact_bound or 0)
    assert low.depth <= best.depth
    assert low.trees == (len(topology.gpus) if collective in ("allgather", "reduce_scatter") else 1)


@given(MACHINES, st.sampled_from(COLLECTIVES))
@settings(max_examples=60, deadline=None)
def test_one_hop_exists_exactly_where_the_lowest_tree_has_height_one(
    topology: Topology, collective: str
) -> None:
    """For all roots at once in the collectives without a root of their own."""
    roots = range(len(topology.gpus)) if collective in ("broadcast", "reduce") else [None]
    for root in roots:
        low = topoplan.lowest_tree(topology, collective, root=root)
        try:
            plan = topoplan.one_hop(topology, collective, root=root)
        except InfeasibleError:
            assert low.height > 1 or collective == "allreduce"
        else:
            assert low.height == topoplan.verify(plan).height == 1


def test_the_lowest_tree_starts_in_the_middle() -> None:
    """Five GPUs in a row: an allreduce meets at the third, two hops up and two down, whoever is first."""
    row = machine(5, both_ways({(f"gpu{i}", f"gpu{i + 1}"): 1.0 for i in range(4)}))
    plan = topoplan.lowest_tree(row)
    assert (plan.shards[0].stages[0].root, plan.height, plan.depth) == (2, 2, 4)
    assert topoplan.lowest_tree(row, "broadcast").height == 4
    seconds = topoplan.simulate(plan, nbytes=0).seconds
    assert seconds == pytest.approx(LAUNCH + 4 * START_UP["nvlink"])


def test_children_share_the_parents_that_are_equally_near() -> None:
    """A root, two middle ranks, and four leaves behind a switch with both: each middle port feeds two of them."""
    wires = {("gpu0", f"gpu{middle}"): 4.0 for middle in (1, 2)}
    wires |= {(f"gpu{rank}", "sw0"): 2.0 for rank in range(1, 7)}
    plan = topoplan.lowest_tree(machine(7, both_ways(wires), switches=1), "broadcast")
    children = [edge.parent for edge in plan.shards[0].stages[0].edges]
    assert (children.count(1), children.count(2), plan.rate) == (2, 2, 1.0)


@pytest.mark.parametrize("build", [topoplan.one_hop, topoplan.lowest_tree])
def test_one_gpu_moves_nothing(build: object) -> None:
    """A valid plan without a tree."""
    assert callable(build)
    plan = build(topoplan.load("dgx-1v"), "broadcast", gpus=[3])
    assert topoplan.verify(plan).trees == 0


@pytest.mark.parametrize("build", [topoplan.one_hop, topoplan.lowest_tree])
def test_what_does_not_fit_is_refused(build: object) -> None:
    """Unknown collectives and channels, foreign roots, GPUs without a path."""
    assert callable(build)
    dgx = topoplan.load("dgx-1v")
    with pytest.raises(UsageError, match="collective 'gather' is unknown"):
        build(dgx, "gather")
    with pytest.raises(UsageError, match="root 7 is not in the allocation 0, 1"):
        build(dgx, "reduce", gpus=[0, 1], root=7)
    with pytest.raises(UsageError, match="channels 'air' is unknown"):
        build(dgx, channels="air")
    with pytest.raises(InfeasibleError, match="no NVLink path"):
        build(dgx, gpus=[0, 5], channels="nvlink")
