"""Times of plans of tori by kind: those of the list, known answers, bounds, and sides that are too long."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

import topoplan
from tests.support.kind_clusters import exchange_of_torus, plan_of_torus
from topoplan import PlanByKind, Server, UsageError, plan_by_kind
from topoplan.machine.torus import Torus
from topoplan.model.closed_form import clock, pipeline
from topoplan.model.dataflow import LAUNCH, START_UP
from topoplan.model.kind_dataflow import KindClock
from topoplan.model.times_by_size import start_up_diameter
from topoplan.model.torus_dataflow import torus_dataflow, torus_diameter, torus_places
from topoplan.plans.torus_templates import TorusPaths, TorusTemplate, represented_in_torus
from topoplan.reading.load import load_cluster_by_kind

SIZES = (0, 1_000, 100_000, 10_000_000, 10_000_000_000)


def hosts(name: str, collective: str) -> PlanByKind:
    found = load_cluster_by_kind(name)
    assert found is not None
    return plan_by_kind(found, collective)


def agree(plan: PlanByKind | None, seed: int) -> None:
    """Compare with the list, in every third case with ranks that come late on all servers."""
    if plan is None:
        return
    rng = random.Random(seed)
    late: dict[int, float] = {}
    if seed % 3 == 0:
        late = {rng.randrange(plan.size): 10 ** rng.uniform(-6, -2)}
    places = [plan.cluster.server_of(rank) for rank in range(plan.size)]
    every = {
        other: seconds
        for rank, seconds in late.items()
        for other, place in enumerate(places)
        if place[1] == places[rank][1]
    }
    kind, listed = KindClock(plan, late), clock(plan.listed(), late=every)
    for size in SIZES:
        one, two = kind.time(size), listed(size)
        assert one.seconds == pytest.approx(two.seconds, rel=1e-13)
        assert one.latency_seconds == pytest.approx(two.latency_seconds, rel=1e-13)
        assert one.bandwidth_seconds == pytest.approx(two.bandwidth_seconds, rel=1e-13)
        assert (one.ranks, set(one.chunks)) == (two.ranks, set(two.chunks))
        loads = {link: two.link_bytes[link] for link in one.link_bytes}
        assert one.link_bytes == pytest.approx(loads, rel=1e-13)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(24))
def test_times_are_those_of_the_list(seed: int) -> None:
    agree(plan_of_torus(seed, most=30) if seed % 4 else exchange_of_torus(seed, most=14), seed)


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(24, 240))
def test_times_up_to_256_gpus_are_those_of_the_list(seed: int) -> None:
    agree(plan_of_torus(seed, most=256) if seed % 4 else exchange_of_torus(seed, most=40), seed)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["torus:9@25", "torus:2,5", "torus:4,3,2@7"])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_to_all"])
def test_times_of_hosts_are_those_of_the_list(name: str, collective: str) -> None:
    agree(hosts(name, collective), 1)


def test_a_route_starts_its_first_copy_before_the_farthest_one() -> None:
    """The copies of a hop are not equally late: the first of the second dimension begin at the root."""
    plan = plan_of_torus(13, most=12)
    assert plan is not None
    flow, starting, _ = torus_dataflow(plan)
    kind = KindClock(plan)
    assert kind.time(0).seconds == pytest.approx(clock(plan.listed())(0).seconds, rel=1e-13)
    without = pipeline(flow, starting)
    one_chunk = np.ones((len(flow.shares), 1), dtype=np.int64)
    assert without.seconds(0, one_chunk)[0] > kind.time(0).seconds


@pytest.mark.parametrize(("hosts_of_ring", "copies"), [(200, 199), (201, 100), (64, 63)])
def test_start_ups_of_a_ring(hosts_of_ring: int, copies: int) -> None:
    """Each tree goes half around the ring each way; on an even one there are two for each host, N / 2 and N / 2 - 1."""
    plan = hosts(f"torus:{hosts_of_ring}", "all_gather")
    kind = KindClock(plan)
    assert kind.start_ups == pytest.approx(LAUNCH + copies * START_UP["network"], rel=1e-12)
    assert kind.diameter == pytest.approx(hosts_of_ring // 2 * START_UP["network"], rel=1e-12)
    # Both halves are cut the same, so N B bytes take N / (2 (N - 1)) of their time on one port.
    size = 10**12
    least = size * (hosts_of_ring - 1) / hosts_of_ring / 25e9
    assert kind.time(size).bandwidth_seconds == pytest.approx(least, rel=1e-12)


def test_messages_of_a_cable_are_the_trees_or_blocks_that_cross_it() -> None:
    """In an all_gather on A x B hosts, 4 ports of each take N - 1 blocks in, each in as many parts as templates."""
    plan = hosts("torus:12,20", "all_gather")
    number, seconds = KindClock(plan).nic_start_ups
    loads = {
        template: represented_in_torus(plan.sample, template.arms)
        for template in plan.templates
        if isinstance(template, TorusTemplate)
    }
    each = [sum(stands[server] for stands in loads.values()) for server in range(1, 5)]
    assert (number, sum(each)) == (max(each), len(plan.templates) * (plan.size - 1))
    assert seconds == pytest.approx(number * START_UP["network"], rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_places_stand_for_all_servers_and_copies_for_all_blocks(seed: int) -> None:
    plan = exchange_of_torus(seed, most=40)
    if plan is None:
        return
    flow, starting, _ = torus_dataflow(plan)
    for number, template in enumerate(plan.templates):
        assert isinstance(template, TorusPaths)
        places = torus_places(plan, template)
        assert sum(place.copies for place in places) == plan.cluster.servers
        # Each path of h edges has h copies.
        images = plan.images(template)
        copies = sum(
            int(starting.copies[hop]) for hop in range(len(flow.hops)) if flow.hops[hop].shard == number
        )
        assert copies == sum(len(images.shard(one).stages[0].edges) for one in range(plan.size - 1))


@pytest.mark.parametrize("name", ["torus:4,3", "torus:9", "torus:2,3,4"])
def test_the_diameter_is_that_of_the_list_for_hosts(name: str) -> None:
    plan = hosts(name, "all_gather")
    listed = plan.listed()
    fabric = topoplan.machine.fabric.Fabric(listed.topology, listed.channels)
    assert torus_diameter(plan) == pytest.approx(start_up_diameter(fabric, "allgather", None), rel=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_the_diameter_is_not_above_that_of_the_list(seed: int) -> None:
    plan = plan_of_torus(seed, most=30)
    if plan is not None:
        listed = plan.listed()
        fabric = topoplan.machine.fabric.Fabric(listed.topology, listed.channels)
        assert torus_diameter(plan) <= start_up_diameter(fabric, plan.collective, None) * (1 + 1e-12)


def test_the_time_of_40000_hosts_grows_with_the_sides_alone() -> None:
    """1,592 hops: two trees of two stages, 199 steps each along two dimensions."""
    plan = hosts("torus:200,200", "all_reduce")
    flow, _, _ = torus_dataflow(plan)
    assert len(flow.hops) == len(plan.templates) * 2 * (199 + 199)
    assert KindClock(plan).time(0).latency_seconds == pytest.approx(
        LAUNCH + 2 * 200 * START_UP["network"], rel=1e-12
    )


def test_sides_that_are_too_long_to_be_timed_are_refused() -> None:
    with pytest.raises(UsageError, match="need trees of at most 4,096 edges in height, got 4,150"):
        topoplan.simulate(hosts("torus:8300", "all_gather"), "1MB")
    torus = Torus((200, 210))
    cluster = topoplan.cluster_by_kind(
        [Server("dgx-h100", count=torus.servers)], nic_gbps=400, network="torus", sides=torus.sides
    )
    plan = plan_by_kind(cluster, "all_gather")
    many = replace(plan, templates=plan.templates * 12)
    with pytest.raises(UsageError, match="must have at most 400,000 hops along its sides, got"):
        KindClock(many).time(1)


@pytest.mark.parametrize(("name", "height"), [("torus:300", 299), ("torus:16,9", 24)])
@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_times_of_a_root_have_a_start_up_for_each_edge_of_the_highest_tree(
    name: str, height: int, collective: str
) -> None:
    """Each tree has a cable of its own, and all ports are full at large sizes."""
    found = load_cluster_by_kind(name)
    assert found is not None
    plan = plan_by_kind(found, collective, root=5)
    kind = KindClock(plan)
    assert plan.height == height
    assert kind.start_ups == pytest.approx(LAUNCH + height * START_UP["network"], rel=1e-12)
    assert kind.nic_start_ups == (1, pytest.approx(START_UP["network"], rel=1e-12))
    sides = found.network.torus.sides
    assert kind.diameter == pytest.approx(sum(side // 2 for side in sides) * START_UP["network"], rel=1e-12)
    size = 10**11
    assert kind.time(size).bandwidth_seconds == pytest.approx(size / plan.rate / 1e9, rel=1e-9)
    late = KindClock(plan, {5: 1e-3}).time(0).seconds
    assert kind.time(0).seconds < late <= kind.time(0).seconds + 1.001e-3
