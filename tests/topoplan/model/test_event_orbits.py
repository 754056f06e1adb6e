"""Events of plans by kind: those of the list, bit for bit, known answers, late ranks, and what is refused."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import Any

import pytest

import topoplan
from tests.support.kind_clusters import (
    exchange_of_torus,
    plan_of_groups,
    plan_of_three_levels,
    plan_of_torus,
    plan_with_equal_gpus,
    plan_with_stragglers,
    random_cluster,
    random_dragonfly,
    random_plan,
    random_three_levels,
)
from topoplan import InfeasibleError, PlanByKind, Server, UsageError
from topoplan.model import event_engine, event_orbits
from topoplan.model.dataflow import LAUNCH, START_UP
from topoplan.model.event_engine import depths
from topoplan.model.event_images import GpuPhases, Units
from topoplan.model.event_orbits import EventOrbits
from topoplan.model.event_simulation import run_events
from topoplan.model.kind_dataflow import KindClock


def plan_of(
    servers: int, collective: str = "allreduce", *, gpus: int | None = 2, rate: float = 400, **options: Any
) -> PlanByKind:
    kind = Server("dgx-h100", None if gpus is None else list(range(gpus)), count=servers)
    return topoplan.plan_by_kind(topoplan.cluster_by_kind([kind], nic_gbps=rate, **options), collective)


def agree(plan: PlanByKind, sizes: tuple[int, ...], late: dict[int, float] | None = None) -> EventOrbits:
    """Compare with the list: seconds, chunks in flight and the longest queue are equal."""
    orbits, listed, every = EventOrbits(plan, late), plan.listed(), {}
    if late:
        places = [plan.cluster.server_of(rank) for rank in range(plan.size)]
        kinds = [(plan.cluster.place(server).cell, gpu) for server, gpu in places]
        every = {one: late[rank] for rank in late for one, kind in enumerate(kinds) if kind == kinds[rank]}
    for size in sizes:
        found, run = orbits.run(size), run_events(listed, nbytes=size, late=every)
        assert found.seconds == run.seconds
        assert found.in_flight == run.in_flight
        assert max(count for count, _ in found.queues) == max((one.chunks for one in run.queues), default=0)
    return orbits


NETWORKS: dict[str, tuple[int, dict[str, Any]]] = {
    "switch": (7, {}),
    "shared-nics": (5, {"nics": 1}),
    "rails": (6, {"network": "rail-optimised", "nic_access": "direct"}),
    "fat-tree": (8, {"network": "fat-tree", "leaf_size": 2, "oversubscription": 2}),
    "odd-leaf": (7, {"network": "fat-tree", "leaf_size": 3, "oversubscription": 2}),
    "three-levels": (
        8,
        {
            "network": "fat-tree",
            "leaf_size": 2,
            "pod_size": 2,
            "oversubscription": 2,
            "pod_oversubscription": 2,
        },
    ),
    "dragonfly": (6, {"network": "dragonfly", "group_size": 2, "global_gbps": 100}),
}


@pytest.mark.sampled
@pytest.mark.parametrize("collective", ["allreduce", "allgather", "reduce_scatter", "broadcast"])
@pytest.mark.parametrize("network", NETWORKS)
def test_events_are_those_of_the_list(network: str, collective: str) -> None:
    servers, options = NETWORKS[network]
    agree(plan_of(servers, collective, **options), (1_000, 100_000_000))


@pytest.mark.parametrize("network", ["switch", "shared-nics", "rails", "odd-leaf", "dragonfly"])
def test_exchanges_have_the_events_of_the_list(network: str) -> None:
    servers, options = NETWORKS[network]
    agree(plan_of(servers, "alltoall", **options), (1_000, 100_000_000))


@pytest.mark.parametrize("network", ["fat-tree", "three-levels"])
def test_exchanges_between_equal_leaves_are_refused(network: str) -> None:
    """Chunks of two leaves tie at the link into a third one, and the list orders them by the numbers of their ranks."""
    servers, options = NETWORKS[network]
    with pytest.raises(UsageError, match="chunks of servers in different leaves tie at a link"):
        EventOrbits(plan_of(servers, "alltoall", **options)).run(1)


@pytest.mark.sampled
@pytest.mark.parametrize("which", ["nvswitch", "all"])
@pytest.mark.parametrize("collective", ["allreduce", "broadcast"])
def test_events_with_switches_that_add_are_those_of_the_list(which: str, collective: str) -> None:
    kind = Server("dgx-h100", range(3), count=4)
    many = topoplan.cluster_by_kind(
        [kind], nic_gbps=400, nic_access="direct", network="fat-tree", leaf_size=2
    )
    agree(topoplan.plan_by_kind(many.with_in_network(which), collective), (1_000, 100_000_000))


def test_events_do_not_depend_on_the_order_of_the_shards() -> None:
    plan = plan_of(5).listed()
    turned = replace(plan, shards=tuple(plan.shards)[::-1])
    assert run_events(turned, nbytes=10**8).seconds == run_events(plan, nbytes=10**8).seconds


def test_equal_servers_are_a_few_orbits() -> None:
    """The 8 GPUs of a server, and 24 servers, are one: hops to 23 servers and 7 GPUs, up and down, of 8 x 24 trees."""
    plan = plan_of(24, gpus=None)
    hops = EventOrbits(plan).hops
    assert sum(hops.stands) == 2 * 192 * 191
    assert len(hops.stands) == 2 * 191
    assert set(hops.stands) == {192}


@pytest.mark.sampled
@pytest.mark.parametrize("seed", [1, 3, 9, 12, 20, 26, 35, 37, 47, 60])
@pytest.mark.parametrize("make", [random_plan, plan_of_three_levels, plan_of_groups])
def test_random_clusters_have_the_events_of_the_list(make: Any, seed: int) -> None:
    plan = make(seed, most=30)
    if plan is None:
        return
    rng = random.Random(seed)
    agree(
        plan, (1_000, 1_000_000), {rng.randrange(plan.size): 10 ** rng.uniform(-6, -2)} if seed % 2 else None
    )


def with_slow_nics(plan: PlanByKind, apart: int) -> PlanByKind:
    """Return the plan if the first NIC of every so many servers sends at half its rate."""
    many = plan.cluster
    out = next(
        one
        for one in many.joined([0, 1], [1, 1]).links
        if one.src == "s0.nic0" and not one.dst.startswith("s0.")
    )
    names = [f"s{server}.nic0->{out.dst}" for server in range(0, many.servers, apart)]
    slow = many.with_faults(slow_links=dict.fromkeys(names, out.bandwidth / 2))
    return topoplan.plan_by_kind(slow, plan.collective)


@pytest.mark.parametrize("collective", ["allreduce", "alltoall"])
def test_slow_nics_evenly_apart_have_the_events_of_the_list(collective: str) -> None:
    """Three servers rotate at once, and none if one NIC alone is slow."""
    plan = with_slow_nics(plan_of(12, collective), 3)
    agree(plan, (1_000, 100_000_000))
    assert Units.of(plan) == Units((4,), 3, 0, 0)
    assert Units.of(with_slow_nics(plan_of(12, collective), 12)).count == 1


def phases_of(plan: PlanByKind) -> int:
    return GpuPhases.of(plan, KindClock(plan).schedule.flow, {}).count


@pytest.mark.parametrize("collective", ["allreduce", "alltoall"])
def test_equal_gpus_of_servers_are_phases(collective: str) -> None:
    """GPUs with a NIC each rotate; a slow NIC, one NIC for all, or an uplink for all ends that."""
    plan = plan_of(6, collective, gpus=3)
    assert phases_of(plan) == 3
    agree(plan, (1_000, 100_000_000))
    assert phases_of(with_slow_nics(plan, 3)) == 1
    assert phases_of(plan_of(6, collective, gpus=3, nics=1)) == 1
    assert phases_of(plan_of(6, collective, gpus=3, network="fat-tree", leaf_size=2)) == 1


@pytest.mark.thorough
@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(120))
def test_random_servers_of_equal_gpus_have_the_events_of_the_list(seed: int) -> None:
    plan = plan_with_equal_gpus(seed, most=24)
    if plan is not None:
        agree(plan, (1_000, 100_000_000))


def agree_or_refuse(plan: PlanByKind, *words: str) -> None:
    """Compare the events with those of the list, or the beginning of a refusal with these words."""
    refusal = ""
    try:
        _ = EventOrbits(plan).hops
    except UsageError as error:
        refusal = str(error)
    if refusal:
        assert refusal.startswith(words)
    else:
        agree(plan, (1_000, 1_000_000, 300_000_000))


@pytest.mark.thorough
@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(240))
def test_random_stragglers_have_the_events_of_the_list(seed: int) -> None:
    """Servers of several leaves whose chunks tie at a link are refused."""
    plan = plan_with_stragglers(seed, most=36)
    if plan is not None:
        agree_or_refuse(plan, "chunks of servers in different leaves tie", "trees of all servers share")


@pytest.mark.thorough
@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("make", [plan_of_torus, exchange_of_torus])
def test_random_tori_have_the_events_of_the_list(make: Any, seed: int) -> None:
    plan = make(seed, most=26)
    if plan is None:
        return
    rng = random.Random(seed)
    late = {rng.randrange(plan.size): 10 ** rng.uniform(-6, -2)} if seed % 2 else None
    agree(plan, (1_000, 1_000_000, 300_000_000), late)


def torus_plan(sides: tuple[int, ...], collective: str) -> PlanByKind:
    kind = Server("v100x4", range(2), count=prod(sides))
    many = topoplan.cluster_by_kind(
        [kind], nic_gbps=200, nics=2 * len(sides), nic_access="pcie", network="torus", sides=sides
    )
    return topoplan.plan_by_kind(many, collective)


@pytest.mark.sampled
@pytest.mark.parametrize("collective", ["allreduce", "allgather", "reduce_scatter", "alltoall"])
@pytest.mark.parametrize("sides", [(5,), (3, 4)])
def test_a_torus_has_the_events_of_the_list(sides: tuple[int, ...], collective: str) -> None:
    agree(torus_plan(sides, collective), (1_000, 100_000_000))


@pytest.mark.thorough
@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("make", [random_cluster, random_dragonfly, random_three_levels])
def test_random_exchanges_have_the_events_of_the_list(make: Any, seed: int) -> None:
    """Rails joined by a spine, equal leaves, and several paths of a pair through other servers, are refused."""
    cluster = make(seed, most=26)
    if cluster is None:
        return
    with suppress(InfeasibleError):
        plan = topoplan.plan_by_kind(cluster, "alltoall")
        agree_or_refuse(plan, "trees of all servers share", "chunks of s")


def test_a_translation_of_a_torus_does_not_change_its_orbits() -> None:
    """Each hop stands for one on every server."""
    plan = torus_plan((5, 7), "allreduce")
    hops = EventOrbits(plan).hops
    assert sum(hops.stands) == 2 * 69 * plan.num_trees
    assert set(hops.stands) <= {35, 70}


@pytest.mark.parametrize("collective", ["allgather", "alltoall"])
@pytest.mark.parametrize("servers", [5, 1_250])
def test_time_of_sends_to_all_in_turn_is_that_of_their_bytes(servers: int, collective: str) -> None:
    """Servers of one GPU that send to all others in turn: all NICs are busy until the end, after one start-up."""
    plan = plan_of(servers, collective, gpus=1, nic_access="direct", nics=1)
    seconds = EventOrbits(plan).run(10**9, 10**9).seconds
    assert seconds == pytest.approx(LAUNCH + START_UP["network"] + (servers - 1) / servers / 50, rel=1e-9)


def test_late_ranks_of_all_servers_shift_the_events() -> None:
    plan = plan_of(6)
    late = {3: 0.01}
    agree(plan, (1_000, 10_000_000), late)
    assert EventOrbits(plan, late).run(1_000).seconds > 0.01
    with pytest.raises(UsageError, match="a late rank must be 0 to 11, got 12"):
        EventOrbits(plan, {12: 0.1}).run(1)


def test_links_that_all_servers_share_are_refused() -> None:
    """Rails joined by a spine that trees pass: no rotation moves its links."""
    plan = random_plan(46, most=40)
    assert plan is not None
    with pytest.raises(UsageError, match="trees of all servers share the link rail0->spine0"):
        EventOrbits(plan).run(1)


def test_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="nbytes must be 1 or more, got 0"):
        EventOrbits(plan_of(2)).run(0)
    monkeypatch.setattr(event_orbits, "MOST_HOPS", 49)
    with pytest.raises(UsageError, match="32 equal parts of the cluster have 62 hops, more than 49"):
        EventOrbits(plan_of(16)).run(1)
    monkeypatch.undo()
    monkeypatch.setattr(event_orbits, "MOST_EXCHANGING", 31)
    with pytest.raises(UsageError, match="must be of at most 31 GPUs, got 32"):
        EventOrbits(plan_of(16, "alltoall")).run(1)
    monkeypatch.setattr(event_orbits, "MAX_TRANSFERS", 99)
    with pytest.raises(UsageError, match="must be at most 99, got "):
        EventOrbits(plan_of(16)).run(10**10)


@pytest.mark.parametrize("collective", ["allreduce", "alltoall"])
def test_machine_code_and_the_interpreter_run_the_same_events(
    collective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [plan_of(4, collective, nics=1), torus_plan((3, 3), collective)]
    runs: list[list[object]] = []
    for most in (event_engine.INTERPRETED, -1):
        monkeypatch.setattr(event_engine, "INTERPRETED", most)
        runs.append([EventOrbits(plan, {1: 1e-4}).run(10**9) for plan in plans])
        runs[-1] += [run_events(plan.listed(), nbytes=10**8) for plan in plans]
    assert runs[0] == runs[1]


def test_depth_is_the_longest_chain_before_a_server() -> None:
    assert depths([(0, 1, 3), (0, 2), (2, 3)], 4) == [0, 1, 1, 2]
    assert depths([(0, 1), (1, 0)], 2) == []
