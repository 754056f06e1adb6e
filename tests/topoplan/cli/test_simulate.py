"""``simulate JOBS.json --policy``: what it prints and writes, jobs of a plan, one line for what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import topoplan
from tests.support.checkout import Done
from tests.topoplan.cli.conftest import Told
from topoplan.cli.output import DEFAULT_LINES
from topoplan.model.event_simulation import run_events

STAGE: dict[str, Any] = {"iterations": 10, "compute": 2.0, "bytes": {"leaf0": 1e9}}
JOBS: dict[str, Any] = {
    "format": "topoplan.jobs/1",
    "links": {"leaf0": 1.0},
    "jobs": [
        {"name": "a", "gpus": 8, "stages": [STAGE]},
        {"name": "b", "gpus": 4, "release": 1.0, "weight": 2.0, "stages": [STAGE, {**STAGE, "overlap": 0.5}]},
    ],
}


def test_a_table_of_policies_and_one_of_jobs(done: Done, tmp_path: Path) -> None:
    out = done(f"simulate - --policy fifo,fair --plot {tmp_path}/f.svg", stdin=json.dumps(JOBS))
    assert out.startswith("2 jobs on 1 link: lowest cost 92, by fair\n\npolicy  first stage s")
    rows = {tuple(line.split()[:2]): line.split() for line in out.splitlines()}
    assert rows["fifo", "a"][2:5] == ["30", "10", "3"]
    assert float(rows["fair", "b"][2]) > 30
    assert rows["cost:", "weight"]
    assert "fair: " in (tmp_path / "f.svg").read_text()


def test_json_has_the_keys_of_the_format(told: Told) -> None:
    """All policies where all are asked for; stages, iterations and idle of every job."""
    policies = told("simulate - --policy all", stdin=json.dumps(JOBS))["policies"]
    assert list(policies) == ["fifo", "fair", "grouper", "jpas", "crux", "mltcp", "cassini"]
    fifo = policies["fifo"]
    first, second = (job["stages"] for job in fifo["jobs"])
    assert (fifo["order"], policies["fair"]["order"]) == (["a", "b"], None)
    assert (fifo["cost"], fifo["makespan"]) == (first[0] + 2 * second[0], second[1])
    assert 0 < fifo["utilisation"] < 1
    assert [len(job["iterations"]) for job in fifo["jobs"]] == [10, 20]


def test_bytes_of_a_plan(done: Done, told: Told, tmp_path: Path) -> None:
    """What an allreduce of 1 GB puts on a DGX-2's ports; two jobs on the machine share them."""
    done(f"plan dgx-2 --gpus 0-7 -o {tmp_path}/plan.json")
    stage = {"iterations": 3, "compute": 0.01, "plan": "plan.json", "size": 10**9}
    jobs = [{"name": name, "stages": [stage]} for name in ("a", "b")]
    (tmp_path / "jobs.json").write_text(json.dumps({"format": "topoplan.jobs/1", "jobs": jobs}))
    value = told(f"simulate {tmp_path}/jobs.json --policy fair")
    alone = 2 * 7 / 8 * 1e9 / 150e9
    first = value["policies"]["fair"]["jobs"][0]["iterations"]
    assert first == pytest.approx([0.01 + 2 * alone] * 3, rel=1e-6)


def changed(place: str, value: object) -> str:
    """The file with one value at a path of keys."""
    whole = json.loads(json.dumps(JOBS))
    *keys, last = [int(key) if key.isdigit() else key for key in place.split(".")]
    at = whole
    for key in keys:
        at = at[key]
    at[last] = value
    return json.dumps(whole)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("format", "topoplan.jobs/9", "format 'topoplan.jobs/9' is not 'topoplan.jobs/1'"),
        ("jobs", [], "jobs must not be empty"),
        ("jobs.1.name", "a", "job names must be unique, got 'a' twice"),
        ("jobs.0.color", "red", "job 0: key 'color' is unknown"),
        ("jobs.0.first", "sleep", "first must be compute or send"),
        ("jobs.0.gpus", 0, "gpus must be a whole number of one or more"),
        ("jobs.0.stages", [], "job a has no stages"),
        ("jobs.0.stages.0.bytes", {"leaf9": 1}, "stage 0: link 'leaf9' is unknown; the links are leaf0"),
        ("jobs.0.stages.0.bytes", {"leaf0": -1}, "bytes of leaf0 must be a number of zero or more, got -1"),
        ("jobs.0.stages.0.compute", float("nan"), "compute must be a number of zero or more, got nan"),
        ("jobs.0.stages.0.overlap", 2, "overlap must be from 0 to 1, got 2"),
        ("jobs.0.stages.0.iterations", 10**9, "iterations must be at most 1000000 in all, got 1e+09"),
        ("jobs.0.stages.0.plan", "none.json", "bytes and plan exclude each other"),
        ("jobs.0.stages.0.size", 5, "size needs a plan"),
        ("links.leaf0", 0, "job a: stage 0 never ends: link 'leaf0' has 0 GB/s"),
        ("links", [1], "links must be an object, not list"),
    ],
)
def test_wrong_files_are_one_line(refused: Done, place: str, value: object, words: str) -> None:
    assert words in refused("simulate - --policy fair", stdin=changed(place, value))


def test_many_jobs_are_folded(done: Done) -> None:
    """Thirty jobs under two policies, and all rows with --all."""
    jobs = json.dumps({**JOBS, "jobs": [{**JOBS["jobs"][0], "name": f"j{i}"} for i in range(30)]})
    lines = done("simulate - --policy fifo,fair", stdin=jobs).splitlines()
    assert len(lines) <= DEFAULT_LINES
    assert lines[-3].startswith("… and ")
    whole = done("simulate - --policy fifo,fair --all", stdin=jobs)
    assert whole.count("\nfifo ") == whole.count("\nfair ") == 31


def test_times_by_events_stand_beside_those_of_the_plan(done: Done, told: Told, tmp_path: Path) -> None:
    """A plan by kind has the events of its list; --late shifts them."""
    small = topoplan.cluster_by_kind([topoplan.Server("dgx-h100", [0, 1], count=3)], nic_gbps=400)
    plan = topoplan.plan_by_kind(small, "allgather")
    (tmp_path / "kinds.json").write_text(plan.to_json())
    (tmp_path / "list.json").write_text(plan.listed().to_json())
    asked = "--sizes 64KB,64MB --events"
    kinds = told(f"simulate {tmp_path}/kinds.json {asked}")["times"]
    by_events = [one["time"] for one in kinds if one["schedule"] == "plan, by events"]
    listed = told(f"simulate {tmp_path}/list.json {asked}")["events"]
    assert [one["time"] for one in listed] == by_events
    assert by_events[1] == pytest.approx(run_events(plan.listed(), nbytes=64 << 20).seconds * 1e6)
    late = told(f"simulate {tmp_path}/kinds.json {asked} --late 3=0.5")["times"]
    assert [one["time"] > 5e5 for one in late] == [True] * 4
    head = next(line for line in done(f"simulate dgx-2 {asked}").splitlines() if line.startswith("size"))
    assert "busbw  events us" in head
