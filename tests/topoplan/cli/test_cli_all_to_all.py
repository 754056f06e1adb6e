"""All-to-all on the command line: planned, checked, timed, compared and benched, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from topoplan.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    """What a command prints, or the line on stderr of one that is refused."""
    capsys.readouterr()
    assert main(arguments) == status
    out, err = capsys.readouterr()
    assert err.count("\n") == (1 if status else 0)
    return err if status else out


def demand_file(folder: Path, text: str) -> str:
    path = folder / "demand.json"
    path.write_text(text)
    return str(path)


def test_a_plan_goes_through_its_file_and_all_commands(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place = str(tmp_path / "plan.json")
    said = run(capsys, "plan", "v100x4", "--collective", "all-to-all", "-o", place)
    assert (
        "rate   125 GB/s of algorithm bandwidth, 93.75 of bus bandwidth (optimal over nvlink, proved)" in said
    )
    assert "only 125 GB/s leave {gpu0,3}, and 2 x 2 blocks of 1/4 of a buffer must" in said
    assert "paths  18, height 2 (paths, exact)" in said
    said = run(capsys, "verify", place)
    assert "valid: alltoall of 4 ranks, 18 paths, height 2" in said
    assert "rate = bound: optimal" in said
    timed = json.loads(run(capsys, "simulate", place, "--sizes", "64MB", "--json"))
    assert timed["ring"] is None
    assert timed["direct"]["rate"] == 100
    assert timed["plan"]["rows"][0]["busbw"] == pytest.approx(0.75 * timed["plan"]["rows"][0]["algbw"])
    benched = run(capsys, "bench", place, "--sizes", "64KB").splitlines()[-1].split()
    assert (benched[1], benched[-1]) == ("4096", "0")


@pytest.mark.parametrize(("machine", "direct"), [("v100x4", 100.0), ("dgx-1v", 4.0), ("dgx-2", 160.0)])
def test_paths_stand_beside_direct_sends(
    capsys: pytest.CaptureFixture[str], machine: str, direct: float
) -> None:
    (row,) = json.loads(run(capsys, "compare", machine, "--collective", "alltoall", "--json"))["rows"]
    assert (row["nccl"], row["nccl_kind"]) == (direct, "direct sends")
    assert row["trees"] == row["bound"] >= direct
    assert row["nccl_ratio"] == pytest.approx(row["trees"] / direct)


def test_a_demand_is_planned_in_the_time_of_its_cut(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = demand_file(tmp_path, '{"bytes": [[0, 2000000], [500000, 0]]}')
    asked = ("plan", "dgx-a100", "--gpus", "0,1", "--collective", "alltoall", "--demand", path)
    said = run(capsys, *asked, "-o", str(tmp_path / "plan.json"))
    assert "time   6.67 us for the demand" in said
    assert "only 300 GB/s leave {gpu0}, and 2e+06 bytes must: 6.67 us at least" in said
    assert "rate = bound: optimal" in run(capsys, "verify", str(tmp_path / "plan.json"))
    assert json.loads(run(capsys, *asked, "--json"))["certificate"]["kind"] == "demand"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"bytes": [[0, -1], [1, 0]]}', "the demand from rank 0 to rank 1 is -1"),
        ('{"bytes": [[0, NaN], [1, 0]]}', "the demand from rank 0 to rank 1 is nan"),
        ('{"bytes": [[0, 1, 2], [1, 0, 2], [1, 2, 0]]}', "the demand has 3 rows of 3 entries for 2 ranks"),
        ('{"bytes": [[0, "1"], [1, 0]]}', "must be a demand: give"),
        ('{"bytes": 4}', "must be a demand: give"),
        ("[[0, 1], [1, 0]]", "must be a demand: give"),
        ('{"bytes": [[0, 1], [1, 0]], "unit": "MB"}', "must be a demand: give"),
        ("bytes", "is not JSON"),
    ],
)
def test_a_file_that_is_no_demand_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    path = demand_file(tmp_path, text)
    asked = ("plan", "dgx-1v", "--gpus", "0,1", "--collective", "alltoall", "--demand", path)
    assert message in run(capsys, *asked, status=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sizes"], "an alltoall is planned by paths"),
        (["--method", "three-phase"], "method 'three-phase' does not apply"),
        (["--schedule", "ring"], "unknown to trees and rings; use topoplan.plan, or the schedule one-hop"),
        (["--channels", "nvlink+pcie"], "takes one choice of links"),
        (["--root", "0"], "alltoall has no root"),
        (["--demand", "/nowhere.json"], "/nowhere.json"),
    ],
)
def test_options_of_trees_do_not_go_with_it(
    capsys: pytest.CaptureFixture[str], options: Sequence[str], message: str
) -> None:
    assert message in run(capsys, "plan", "dgx-1v", "--collective", "alltoall", *options, status=2)


def test_an_engine_without_paths_is_told_of_and_another_runs_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place, file = str(tmp_path / "plan.json"), str(tmp_path / "engine.json")
    run(capsys, "plan", "v100x4", "--collective", "alltoall", "-o", place)
    assert "so alltoall is left out" in run(capsys, "export", place, "--to", "msccl-xml", status=2)
    assert "take paths; use simple" in run(
        capsys, "export", place, "--to", "mscclpp", "--protocol", "ll", status=2
    )
    assert "keeps 125 GB/s, all of the rate; 20 chunks" in run(
        capsys, "export", place, "--to", "mscclpp", "-o", file
    )
    assert "postcondition of alltoall holds" in run(capsys, "verify", file)
