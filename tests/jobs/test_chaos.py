"""``topoplan bench --chaos``: whole runs, and runs in which something is wrong, which must be found."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import topoplan
from tests.support.checkout import ROOT
from topoplan.cli.main import main

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}

PATIENT = ("--timeout", "4")
"""So that a busy machine does not hold up a rank for longer."""

WRONG = """
import sys, topoplan
from collectives.lab import chaos_rank, chaos_run
from collectives.lab.chaos_run import ChaosSettings, run_chaos_jobs

{patch}

plan = topoplan.plan("dgx-1v", gpus=range(4))
outcome = run_chaos_jobs(ChaosSettings(plan, "shared", 1.0, 9, timeout=1.0, largest=1 << 16), tell=print)
print({{name: sum(getattr(one, name) for one in outcome.tallies.values()) for name in ("wrong", "lost", "hangs")}})
"""
"""A run of ranks that do something else than they should."""

FLIP = """
method = chaos_rank.Communicator.all_reduce
def all_reduce(self, array, **options):
    handle = method(self, array, **options)
    def flip(found):
        if found.size > 100 and self.rank == 1:
            found[found.size // 2] += 1
        return found
    return Changed(handle, flip)

class Changed:
    def __init__(self, handle, change):
        self._handle, self._change = handle, change
    def wait(self):
        return self._change(self._handle.wait())
    def __getattr__(self, name):
        return getattr(self._handle, name)

chaos_rank.Communicator.all_reduce = all_reduce
"""

BITS = """
import zlib
crc = zlib.crc32
chaos_rank.zlib = type("Other", (), {"crc32": staticmethod(lambda data: crc(data) + chaos_rank.os.getpid())})
"""

SLEEP = """
import time
work = chaos_rank._RankLoop._run_round
def late(self):
    if self._round > 2 and {who}:
        time.sleep(30)
    return work(self)
chaos_rank._RankLoop._run_round = late
chaos_run.HANG_SECONDS, chaos_run.HANG_TIMEOUTS = {limits}
"""


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    path.write_text(topoplan.plan("dgx-1v", "allreduce", gpus=range(5)).to_json())
    return path


def bench(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "topoplan", "bench", *map(str, words)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=180)


def run_wrong(patch: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", WRONG.format(patch=patch)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["shared", "tcp"])
def test_ranks_go_on_whatever_is_done_to_them(backend: str, plan_path: Path) -> None:
    """Nothing wrong, nobody lost that was not hurt, no hang, nothing left over."""
    for seconds in (10, 60):  # on a busy machine fewer ranks are hurt in the time
        options = ("--seed", 3, "--backend", backend, "--sizes", "256KB", "--json", *PATIENT)
        done = bench(plan_path, "--chaos", seconds, *options)
        assert done.returncode == 0, done.stderr + done.stdout
        told = json.loads(done.stdout)
        assert told["problems"] == []
        rows = {row["fault"]: row for row in told["rows"]}
        if rows["all"]["faults"] >= 5 and told["collectives"] > 100:
            break
    assert rows["all"]["faults"] >= 5
    assert rows["all"]["median_ms"] > 0
    assert told["collectives"] > 100
    assert (told["seed"], told["timeout"], told["backend"]) == (3, 4.0, backend)


@pytest.mark.thorough
def test_the_table_can_be_had_as_comma_separated_values(plan_path: Path) -> None:
    done = bench(
        plan_path, "--chaos", 0.5, "--seed", 3, "--backend", "shared", "--sizes", "64KB", "--csv", *PATIENT
    )
    assert done.returncode == 0, done.stderr + done.stdout
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["fault"] for row in rows[-2:]] == ["all", "end of a job"]
    assert {row["wrong"] for row in rows} == {"0"}


@pytest.mark.thorough
def test_one_wrong_element_of_one_rank_is_found() -> None:
    told = run_wrong(FLIP)
    assert "rank 1, round" in told
    assert ": 1 wrong elements" in told
    assert "seed 9, job 1" in told


@pytest.mark.thorough
def test_results_of_other_bits_are_found() -> None:
    assert "has other bits than another rank" in run_wrong(BITS)


@pytest.mark.thorough
def test_a_rank_that_is_left_out_though_nobody_has_hurt_it_is_found() -> None:
    told = run_wrong(SLEEP.format(who="self._rank == 2", limits="(15.0, 8)"))
    assert "excluded rank 2, which had no fault" in told


@pytest.mark.thorough
def test_ranks_that_hang_are_named_with_their_stacks() -> None:
    told = run_wrong(SLEEP.format(who="True", limits="(1.0, 0)"))
    assert "seed 9, job 1" in told
    assert "rank 0 hangs" in told
    assert "in late" in told
    assert "'hangs': 0" not in told


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--chaos", "0", "--backend", "tcp"], "must be a number of seconds above zero, such as 60, got '0'"),
        (["--chaos", "5"], "loopback is not one, use --backend shared, tcp or mpi"),
        (["--chaos", "5", "--backend", "shared", "--baselines"], "--baselines does not go with --chaos"),
        (["--chaos", "5", "--backend", "shared", "--csv", "--json"], "--json and --csv both print"),
        (["--seed", "5"], "--seed belongs to --chaos"),
    ],
)
def test_bad_input_is_one_line(
    options: list[str], said: str, plan_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(plan_path), *options]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1, told


def test_two_ranks_are_too_few_and_ranks_are_started_here(
    plan_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = tmp_path / "plan.json"
    few.write_text(topoplan.plan("dgx-1v", gpus=[0, 1]).to_json())
    assert main(["bench", str(few), "--chaos", "5", "--backend", "tcp"]) == 2
    assert "kills ranks until two survive, and the plan has 2 ranks" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    assert main(["bench", str(plan_path), "--chaos", "5", "--backend", "tcp"]) == 2
    assert "--chaos starts its ranks by itself" in capsys.readouterr().err
