"""Which GPUs to take: every set as it does when planned on its own, best first, and what the best leave."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import comb
from typing import Any

import pytest
from hypothesis import given, settings

import topoplan
from tests.support.checkout import Done
from tests.support.small_fabrics import direct_machines
from tests.support.small_fabrics import machine as machine_of_gpus
from tests.topoplan.cli.conftest import Told
from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.topology import Topology
from topoplan.operate.compare.allocation_shapes import RankedShapes, recommend_shapes
from topoplan.operate.compare.recommendation import GpuSet, recommend


def alone(machine: Topology, gpus: tuple[int, ...]) -> tuple[float, float, float]:
    """Rate, bound and ring of a set that is planned on its own; 0 where there is none."""
    try:
        made = topoplan.plan(machine, gpus=gpus)
    except InfeasibleError:
        return 0.0, 0.0, 0.0
    try:
        return made.rate, made.bound, topoplan.ring_plan(machine, gpus=gpus).rate
    except InfeasibleError:
        return made.rate, made.bound, 0.0


def check_against_all(
    machine: Topology, count: int, free: tuple[int, ...] | None = None
) -> tuple[GpuSet, ...]:
    """All sets are there, each as fast as alone, and what the best leave is the best of what is left."""
    among = free or tuple(range(len(machine.gpus)))
    sets = recommend(machine, count, free=free)
    assert sorted(one.gpus for one in sets) == list(combinations(among, count))
    for one in sets:
        assert (one.rate, one.bound, one.ring) == pytest.approx(alone(machine, one.gpus)), one.gpus
    assert [one.rate for one in sets] == sorted((one.rate for one in sets), reverse=True)
    rate = {one.gpus: one.rate for one in sets}
    for one in sets:
        rest = tuple(gpu for gpu in among if gpu not in one.gpus)
        fastest = one.rate == sets[0].rate
        following = [rate[others] for others in combinations(rest, count)]
        assert one.following == (max(following) if fastest and following else None)
        left = alone(machine, rest)[0] if fastest and len(rest) > 1 else None
        assert one.left == (left if left is None else pytest.approx(left))
    best = [one for one in sets if one.rate == sets[0].rate]
    assert best == sorted(best, key=lambda one: (-(one.following or 0), -(one.left or 0), -one.ring))
    return sets


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "count", "free"),
    [
        ("v100x4", 3, None),
        ("pcie-x8", 3, (0, 1, 4, 6)),
        ("dgx-1p", 3, (0, 1, 2, 5, 6)),
        ("pcie-x8", 4, None),
        ("dgx-1v", 4, (0, 1, 4, 5, 7)),
        ("dgx-1v", 3, None),
        ("dgx-1v", 4, None),
        ("dgx-1p", 4, None),
    ],
)
def test_every_set_is_as_fast_as_when_planned_on_its_own(
    name: str, count: int, free: tuple[int, ...] | None
) -> None:
    check_against_all(topoplan.load(name), count, free)


@pytest.mark.thorough
@settings(max_examples=6)
@given(direct_machines(most=5))
def test_random_machines_too(machine: Topology) -> None:
    check_against_all(machine, 2)
    if len(machine.gpus) > 2:
        check_against_all(machine, 3)


@pytest.mark.thorough
@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_the_root_of_a_set_counts_if_links_differ_by_direction(collective: str) -> None:
    """Around a ring of 10 GB/s one way and 5 back, images of a set have rates of their own from their first GPUs."""
    ways = {(f"gpu{rank}", f"gpu{(rank + 1) % 5}"): 10.0 for rank in range(5)}
    ring = machine_of_gpus(5, {**ways, **{(b, a): 5.0 for a, b in ways}})
    for count in (2, 3, 4):
        sets = recommend(ring, count, collective)
        rates = {}
        for one in sets:
            try:
                rates[one.gpus] = topoplan.plan(ring, collective, gpus=one.gpus).rate
            except InfeasibleError:
                rates[one.gpus] = 0.0
        assert {one.gpus: one.rate for one in sets} == rates
        assert {5.0, 10.0} <= {*rates.values()}
        assert sets[0].rate == max(rates.values())


def test_known_sets_of_known_machines() -> None:
    sets = recommend("dgx-1v", 4)
    assert [(one.gpus, one.following, one.left) for one in sets[:2]] == [
        ((0, 1, 2, 3), 75.0, 75.0),
        ((4, 5, 6, 7), 75.0, 75.0),
    ]
    assert sets[2].rate < 75
    sets = recommend("dgx-2", 8)
    assert len(sets) == comb(16, 8)
    assert {(one.rate, one.number, one.following) for one in sets} == {(sets[0].rate, 1, sets[0].rate)}


def test_of_equally_fast_pairs_those_come_first_that_leave_a_fast_rest() -> None:
    sets = check_against_all(topoplan.load("pcie-x8"), 3, free=(0, 1, 2, 4, 5))
    assert sets[0].gpus == (0, 1, 2)


@pytest.mark.parametrize(
    ("count", "free", "told"),
    [
        (9, None, "at most 8, the GPUs to choose from, got 9; ask for 2 to 8"),
        (1, None, "at most 8, the GPUs to choose from, got 1"),
        (3, (0, 1), "at most 2, the GPUs to choose from, got 3"),
        (2, (0, 11), "GPU 11"),
        (2, (5,), "at most 1, the GPUs to choose from, got 2; name two or more"),
    ],
)
def test_what_cannot_be_chosen_is_said(count: int, free: tuple[int, ...] | None, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        recommend("dgx-1v", count, free=free)


def test_refuses_too_many_sets_before_any_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"got more than 10\^306 among 1024 GPUs"):
        recommend(topoplan.nvswitch_cluster(128), 512)
    told = r"sets of 8 GPUs must be at most 20,000, got 10,518,300 among 32 GPUs"
    with pytest.raises(UsageError, match=told):
        recommend(topoplan.nvswitch_cluster(4), 8)
    monkeypatch.setattr("topoplan.operate.compare.recommendation.MOST_CLASSES", 2)
    with pytest.raises(UsageError, match=r"classes of 2 GPUs must be at most 2, got 3 of 28 sets"):
        recommend("dgx-1v", 2)


def test_the_command_lists_every_set_best_first(told: Told) -> None:
    """With the four keys that others rely on, under the machine's own numbers where a GPU is gone."""
    sets = told("recommend dgx-1v --count 3 --without-gpu 0")["sets"]
    assert len(sets) == comb(7, 3)
    assert all({"gpus", "rate", "ring", "bound"} <= set(one) for one in sets)
    assert [one["rate"] for one in sets] == sorted((one["rate"] for one in sets), reverse=True)
    assert {gpu for one in sets for gpu in one["gpus"]} == set(range(1, 8))
    assert sets[0]["busbw"] == pytest.approx(sets[0]["rate"] * 4 / 3)


def test_the_command_says_what_is_best_and_what_it_leaves(done: Done) -> None:
    """Of equal sets one on one NUMA node is taken; where no set is joined, none is the best."""
    out = done("recommend dgx-1v --count 3")
    assert out.startswith("all_reduce on dgx-1v: GPUs 0,2,3 are the best 3\n")
    assert "56 sets in 9 classes" in out
    assert "leaves       1,4-7: 62.5 GB/s for the next job of 3, 50 for a job of all 5" in out
    assert max(len(line) for line in out.splitlines()) <= 120
    apart = machine_of_gpus(3, {}).to_json()
    none = "all_reduce on small: no path joins any 2 of the 3 GPUs\n"
    assert done("recommend - --count 2", stdin=apart) == none
    turns = topoplan.load("dgx-h100")
    devices = (
        replace(one, numa=int(one.name[3:]) % 2 if one.kind == "gpu" else one.numa) for one in turns.devices
    )
    out = done("recommend - --count 4", stdin=replace(turns, devices=tuple(devices)).to_json())
    assert "\ntake         0,2,4,6, on 1 NUMA node\nleaves       1,3,5,7: 300 GB/s" in out


@pytest.mark.thorough
def test_a_large_class_is_cut_in_text_only(done: Done) -> None:
    out = done("recommend dgx-2 --count 8 --members")
    assert out.startswith("all_reduce on dgx-2, any 8 of the 16 GPUs: all equal\n")
    assert "… and 12,800 more (--json, --csv)" in " ".join(out.split())
    assert max(len(line) for line in out.splitlines()) <= 120


def shapes_and_sets(
    count: int, machine: str, network: dict[str, object], gpus: int, collective: str
) -> tuple[RankedShapes, tuple[GpuSet, ...]]:
    """The shapes of a cluster by kind, and all sets of the listed one."""
    servers = [topoplan.Server(machine, count=count)]
    given: dict[str, Any] = {"nic_gbps": 100, "nic_access": "direct", "nics": 2, **network}
    listed = recommend(topoplan.cluster(servers, **given), gpus, collective)
    return recommend_shapes(topoplan.cluster_by_kind(servers, **given), gpus, collective), listed


IN_LEAVES: dict[str, Any] = {"network": "fat-tree", "leaf_size": 2, "oversubscription": 2}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("count", "machine", "network", "gpus", "collective"),
    [
        (2, "nvlink-x4", {}, 2, "allreduce"),
        (2, "nvlink-x4", {}, 5, "allreduce"),
        (2, "nvlink-x4", {}, 6, "allgather"),
        (2, "v100x4", {"network": "rail-optimised"}, 4, "reduce_scatter"),
        (2, "nvlink-x4", {}, 7, "broadcast"),
        (3, "nvlink-x4", IN_LEAVES, 8, "allreduce"),
        (2, "nvlink-x4", {}, 3, "reduce"),
    ],
)
def test_the_best_shape_is_as_fast_as_the_best_of_all_listed_sets(
    count: int, machine: str, network: dict[str, object], gpus: int, collective: str
) -> None:
    """Both roads; no listed set exceeds the limit of any set."""
    found, listed = shapes_and_sets(count, machine, network, gpus, collective)
    assert found.shapes[0].rate == pytest.approx(listed[0].rate, rel=1e-12)
    assert found.limit is not None
    assert listed[0].rate <= found.limit * (1 + 1e-12)
    assert [one.rate for one in found.shapes] == sorted((one.rate for one in found.shapes), reverse=True)


def test_the_best_set_inside_a_server_is_found_for_an_all_to_all_too() -> None:
    found, listed = shapes_and_sets(2, "v100x4", {}, 2, "alltoall")
    assert (found.shapes[0].gpus, found.shapes[0].rate) == ((0, 3), listed[0].rate)


def test_shapes_of_unlike_servers_take_the_fast_ones_first() -> None:
    """Fast NICs stand behind the slow ones, and a server with a slow NIC; free GPUs are the only ones taken."""
    slow, fast = (topoplan.Server("nvlink-x4", count=5, nics=nics) for nics in (1, 4))
    many = topoplan.cluster_by_kind([slow, fast], nic_gbps=200, nic_access="direct")
    many = many.with_faults(slow_links={"s6.nic0-switch0": 1.0})
    found = recommend_shapes(many, 12)
    assert found.shapes[0].gpus == (*range(20, 24), *range(28, 36))
    assert found.shapes[0].rate == found.shapes[0].bound
    assert found.limit is not None
    free = tuple(range(3, 30))
    assert set(recommend_shapes(many, 6, free=free).shapes[0].gpus) <= set(free)
    with pytest.raises(UsageError, match="at most 27, the GPUs to choose from, got 30"):
        recommend_shapes(many, 30, free=free)
    with pytest.raises(UsageError, match="different numbers from 0 to 39"):
        recommend_shapes(many, 2, free=[0, 0, 1])


def test_an_allocation_keeps_switches_and_the_order_of_ranks() -> None:
    """Taken GPUs alone remain, in their order; a server that gives none has no link."""
    many = topoplan.cluster_by_kind([topoplan.Server("dgx-a100", count=6)], nic_gbps=200, **IN_LEAVES)
    part = many.with_gpus({1: (0, 3), 2: tuple(range(8)), 5: (7,)})
    assert part.size == 11
    assert [part.gpu_name(rank) for rank in (0, 1, 2, 10)] == ["s1.gpu0", "s1.gpu3", "s2.gpu0", "s5.gpu7"]
    listed = part.listed()
    whole = {(link.src, link.dst): link.bandwidth for link in many.listed().links}
    assert all(whole[link.src, link.dst] == link.bandwidth for link in listed.links)
    assert not any("s0." in end or "s3." in end for link in listed.links for end in (link.src, link.dst))
