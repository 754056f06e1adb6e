"""``plan --mesh`` and ``plan --survive 1``, and ``verify`` of their files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.checkout import Done
from topoplan.cli.main import main

MESH = ("plan", "dgx-a100", "--mesh", "dp=2,tp=4")


def test_a_mesh_goes_through_its_file(capsys: pytest.CaptureFixture[str], done: Done, tmp_path: Path) -> None:
    place = tmp_path / "mesh.json"
    said = done(*MESH, "--axes", "dp=1,tp=3", "-o", str(place))
    assert "a mesh of dp 2 x tp 4: 4 groups along dp and 2 groups along tp at once, over nvlink" in said
    assert "GB/s of algorithm bandwidth in every group of weight 1 (optimal over nvlink, proved)" in said
    assert place.read_text() == done(*MESH, "--axes", "tp=3,dp", "-o", "-")
    said = done("verify", str(place))
    assert said.startswith("valid: 6 groups, each with each contribution exactly once wherever it must be\n")
    assert said.endswith("rate = bound: optimal\n")
    told = json.loads(done("verify", str(place), "--json"))
    assert (told["valid"], told["optimal"], len(told["groups"])) == (True, True, 6)
    value = json.loads(place.read_text())
    place.write_text(json.dumps({**value, "rate": 2 * value["rate"]}))
    assert main(("verify", str(place), "--json")) == 1
    out, err = capsys.readouterr()
    assert "of all groups at once; it is" in json.loads(out)["error"]
    assert err.startswith("topoplan verify: wrong plan: ")


def test_plans_for_failures_go_through_their_file(done: Done, tmp_path: Path) -> None:
    """The summary names the worst failure, the file verifies, and commands that take one plan take the whole's."""
    place = str(tmp_path / "plans.json")
    said = done("plan", "v100x4", "--survive", "1", "-o", place)
    assert "lost   one of 4 GPUs, 6 links: 10 failures\n" in said
    assert "plans  10 before symmetry, 6 after: so many classes of failures\n" in said
    assert (
        "worst  50 GB/s of algorithm bandwidth, 66.6667 of bus bandwidth, without gpu2 (over nvlink)\n"
        in said
    )
    assert all(len(line) <= 120 for line in said.splitlines())
    assert done("plan", "v100x4", "--survive", "1", "-o", "-") == Path(place).read_text()
    said = done("verify", place)
    assert (
        "all 10 plans after a failure valid, each on the degraded machine, from 6 in the file\n"
        "rate = bound for 10 of them\nworst  50 GB/s, without "
    ) in said
    told = json.loads(done("verify", place, "--json"))
    assert (told["valid"], len(told["failures"]), told["without_plan"]) == (True, 10, 0)
    assert "of height" in done("simulate", place, "--sizes", "1MB")
    assert done("export", place, "--to", "dot").startswith("digraph")


def test_the_numbers_stand_in_json_and_csv(done: Done) -> None:
    """A row for each failure; what cuts the machine in two has no plan and says why."""
    machine = ("plan", "nvlink-x4", "--servers", "2", "--nic-bandwidth", "100Gb/s", "--survive", "1")
    told = json.loads(done(*machine, "--json"))
    counts = ("number", "plans_before", "plans_after", "classes", "without_plan")
    assert [told[key] for key in counts] == [29, 24, 6, 6, 5]
    assert (told["worst"]["rate"], told["rate"]) == (12.5, 12.5)
    last = told["failures"][-1]
    assert (last["failure"], last["rate"]) == ("switch0", None)
    assert last["none"].startswith("no NVLink, PCIe or network path leads from")
    head, *rows = done(*machine, "--csv").splitlines()
    assert head == "kind,failure,class,rate,bound,busbw,over,none"
    assert rows[0] == "gpu,s0.gpu0,0,12.5,12.5,21.428571428571427,nvlink+network,"
    assert len(rows) == 29
    said = done(*machine)
    assert "none   5 failures leave no plan at all, such as that of" in said
    assert max(len(line) for line in said.splitlines()) <= 120


def test_a_wrong_file_is_told_with_its_failure(done: Done, tmp_path: Path) -> None:
    """Exit status 1, and 2 for a file of another format."""
    place = tmp_path / "plans.json"
    value = json.loads(done("plan", "v100x4", "--survive", "1", "-o", "-"))
    value["failures"][0]["plan"]["rate"] = 1000
    place.write_text(json.dumps(value))
    assert "wrong plan: without gpu0: claims a rate of 1000 GB/s" in done("verify", str(place), status=1)
    value["failures"][0] = {"gpu": "gpu0"}
    place.write_text(json.dumps(value))
    assert "failure 0: a failure has one of" in done("verify", str(place), status=2)
