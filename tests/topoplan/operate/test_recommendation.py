"""Which GPUs to take: every set as it does when planned on its own, best first, and what the best leave."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from math import comb
from pathlib import Path

import pytest
from hypothesis import given, settings

import topoplan
from tests.support.checkout import Run
from tests.support.small_fabrics import direct_machines
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
    """Each half of the cube leaves the other; 12,870 sets of 8 behind NVSwitches are planned once."""
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
    """Behind a thin uplink, two GPUs of one switch leave the pair of the other switch."""
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


def test_the_command_lists_every_set_best_first(run: Run) -> None:
    """With the four keys that others rely on, under the machine's own numbers where a GPU is gone."""
    out = run("recommend", "dgx-1v", "--count", "3", "--without-gpu", "0", "--json")[1]
    sets = json.loads(out)["sets"]
    assert len(sets) == comb(7, 3)
    assert all({"gpus", "rate", "ring", "bound"} <= set(one) for one in sets)
    assert [one["rate"] for one in sets] == sorted((one["rate"] for one in sets), reverse=True)
    assert {gpu for one in sets for gpu in one["gpus"]} == set(range(1, 8))
    assert sets[0]["busbw"] == pytest.approx(sets[0]["rate"] * 4 / 3)


def test_the_command_says_what_is_best_and_what_it_leaves(run: Run) -> None:
    out = run("recommend", "dgx-1v", "--count", "3")[1]
    assert out.startswith("all_reduce on dgx-1v: GPUs 0,2,3 are the best 3\n")
    assert "56 sets in 9 classes" in out
    assert "leaves       1,4-7: 62.5 GB/s for the next job of 3, 50 for one of all 5" in out
    assert max(len(line) for line in out.splitlines()) <= 120


def test_the_command_says_where_no_set_is_joined_none_is_the_best(run: Run, tmp_path: Path) -> None:
    devices = [{"name": f"gpu{number}", "kind": "gpu"} for number in range(3)]
    file = tmp_path / "apart.json"
    file.write_text(json.dumps({"format": "topoplan.topology/1", "devices": devices, "links": []}))
    _, out, _ = run("recommend", str(file), "--count", "2")
    assert out == "all_reduce on machine: no path joins any 2 of the 3 GPUs\n"


@pytest.mark.thorough
def test_a_large_class_is_cut_in_text_only(run: Run) -> None:
    out = run("recommend", "dgx-2", "--count", "8", "--members")[1]
    assert out.startswith("all_reduce on dgx-2, any 8 of the 16 GPUs: all equal\n")
    assert "… and 12,800 more (--json, --csv)" in " ".join(out.split())
    assert max(len(line) for line in out.splitlines()) <= 120


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "say how many GPUs the job has with --count"),
        (("--count", "0"), "must be a number of GPUs"),
        (("--count", "4", "--json", "--csv"), "both print to stdout"),
        (("--jobs", "4,x"), "must be a list of numbers of GPUs such as 4,2,2, got '4,x'"),
        (("--jobs", "4", "--count", "2"), "say how many GPUs the job has with --count 4, or of several"),
        (("--jobs", "4,6"), "jobs of 4 and 6 GPUs do not fit on 8"),
        (("--count", "2", "--free", "0-3", "--without-gpu", "1"), "GPU 1 is named by --free and"),
    ],
)
def test_the_command_refuses_in_one_line(run: Run, arguments: tuple[str, ...], told: str) -> None:
    status, _, err = run("recommend", "dgx-1v", *arguments)
    assert (status, err.count("\n"), told in err) == (2, 1, True)


def test_of_equal_sets_one_on_one_numa_node_is_taken(run: Run, tmp_path: Path) -> None:
    """GPUs whose numbers alternate between two nodes."""
    machine = topoplan.load("dgx-h100")
    devices = (
        replace(one, numa=int(one.name[3:]) % 2 if one.kind == "gpu" else one.numa) for one in machine.devices
    )
    path = tmp_path / "machine.json"
    path.write_text(replace(machine, devices=tuple(devices)).to_json())
    out = run("recommend", str(path), "--count", "4")[1]
    assert "\ntake         0,2,4,6, on 1 NUMA node\nleaves       1,3,5,7: 300 GB/s" in out
