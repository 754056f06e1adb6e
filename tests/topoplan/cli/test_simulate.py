"""``simulate JOBS.json --policy``: what it prints and writes, jobs of a plan, one line for what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkout import Run
from topoplan.cli.output import DEFAULT_LINES

STAGE: dict[str, Any] = {"iterations": 10, "compute": 2.0, "bytes": {"leaf0": 1e9}}
JOBS: dict[str, Any] = {
    "format": "topoplan.jobs/1",
    "links": {"leaf0": 1.0},
    "jobs": [
        {"name": "a", "gpus": 8, "stages": [STAGE]},
        {"name": "b", "gpus": 4, "release": 1.0, "weight": 2.0, "stages": [STAGE, {**STAGE, "overlap": 0.5}]},
    ],
}


@pytest.fixture
def path(tmp_path: Path) -> str:
    place = tmp_path / "jobs.json"
    place.write_text(json.dumps(JOBS))
    return str(place)


def test_a_table_of_policies_and_one_of_jobs(run: Run, path: str, tmp_path: Path) -> None:
    status, out, err = run("simulate", path, "--policy", "fifo,fair", "--plot", str(tmp_path / "f.svg"))
    assert (status, err) == (0, "")
    assert out.startswith("2 jobs on 1 link: lowest cost 92, by fair\n\npolicy  first stage s")
    rows = {tuple(line.split()[:2]): line.split() for line in out.splitlines()}
    assert rows["fifo", "a"][2:5] == ["30", "10", "3"]
    assert float(rows["fair", "b"][2]) > 30
    assert rows["cost:", "weight"]
    assert "fair: " in (tmp_path / "f.svg").read_text()


def test_json_has_the_keys_of_the_format(run: Run, path: str) -> None:
    """All policies where all are asked for; stages, iterations and idle of every job."""
    value = json.loads(run("simulate", path, "--policy", "all", "--json")[1])
    assert list(value["policies"]) == ["fifo", "fair", "grouper", "jpas", "crux", "mltcp", "cassini"]
    fifo = value["policies"]["fifo"]
    assert fifo["order"] == ["a", "b"]
    assert fifo["cost"] == fifo["jobs"][0]["stages"][0] + 2 * fifo["jobs"][1]["stages"][0]
    assert fifo["makespan"] == fifo["jobs"][1]["stages"][1]
    assert 0 < fifo["utilisation"] < 1
    assert [len(job["iterations"]) for job in fifo["jobs"]] == [10, 20]
    assert value["policies"]["fair"]["order"] is None


def test_bytes_of_a_plan(run: Run, tmp_path: Path) -> None:
    """What an allreduce of 1 GB puts on a DGX-2's ports; two jobs on the machine share them."""
    assert run("plan", "dgx-2", "--gpus", "0-7", "-o", str(tmp_path / "plan.json"))[0] == 0
    stage = {"iterations": 3, "compute": 0.01, "plan": "plan.json", "size": 10**9}
    jobs = [{"name": name, "stages": [stage]} for name in ("a", "b")]
    (tmp_path / "jobs.json").write_text(json.dumps({"format": "topoplan.jobs/1", "jobs": jobs}))
    value = json.loads(run("simulate", str(tmp_path / "jobs.json"), "--policy", "fair", "--json")[1])
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
def test_wrong_files_are_one_line(run: Run, tmp_path: Path, place: str, value: object, words: str) -> None:
    path = tmp_path / "jobs.json"
    path.write_text(changed(place, value))
    status, out, err = run("simulate", str(path), "--policy", "fair")
    assert (status, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_many_jobs_are_folded(run: Run, tmp_path: Path) -> None:
    """Thirty jobs under seven policies, and all rows with --all."""
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps({**JOBS, "jobs": [{**JOBS["jobs"][0], "name": f"j{i}"} for i in range(30)]}))
    lines = run("simulate", str(path), "--policy", "fifo,fair")[1].splitlines()
    assert len(lines) <= DEFAULT_LINES
    assert lines[-3].startswith("… and ")
    whole = run("simulate", str(path), "--policy", "fifo,fair", "--all")[1]
    assert whole.count("\nfifo ") == whole.count("\nfair ") == 31
