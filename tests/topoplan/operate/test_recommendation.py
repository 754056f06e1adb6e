"""Which GPUs to take: every set as it does when planned on its own, best first, and what the best leave."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import comb

import pytest
from hypothesis import given, settings

import topoplan
from tests.support.checkout import Done
from tests.support.small_fabrics import direct_machines
from tests.support.small_fabrics import machine as machine_of_gpus
from tests.topoplan.cli.conftest import Told
from topoplan.errors import InfeasibleError, UsageError
from topoplan.machine.topology import Topology
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
    assert "leaves       1,4-7: 62.5 GB/s for the next job of 3, 50 for one of all 5" in out
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
