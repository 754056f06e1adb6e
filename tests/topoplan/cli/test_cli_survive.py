"""``plan --survive 1`` and ``verify`` of its file, and what they refuse."""

from __future__ import annotations

import json
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


def test_plans_for_failures_go_through_their_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The summary names the worst failure, the file verifies, and commands that take one plan take the whole's."""
    place = str(tmp_path / "plans.json")
    said = run(capsys, "plan", "v100x4", "--survive", "1", "-o", place)
    assert "lost   one of 4 GPUs, 6 links: 10 failures\n" in said
    assert "plans  10 before symmetry, 6 after: so many classes of failures\n" in said
    assert (
        "worst  50 GB/s of algorithm bandwidth, 66.6667 of bus bandwidth, without gpu2 (over nvlink)\n"
        in said
    )
    assert all(len(line) <= 120 for line in said.splitlines())
    assert run(capsys, "plan", "v100x4", "--survive", "1", "-o", "-") == Path(place).read_text()
    said = run(capsys, "verify", place)
    assert (
        "all 10 plans after a failure valid, each on the degraded machine, from 6 in the file\n"
        "rate = bound for 10 of them\nworst  50 GB/s, without "
    ) in said
    told = json.loads(run(capsys, "verify", place, "--json"))
    assert (told["valid"], len(told["failures"]), told["without_plan"]) == (True, 10, 0)
    assert "of height" in run(capsys, "simulate", place, "--sizes", "1MB")
    assert run(capsys, "export", place, "--to", "dot").startswith("digraph")


def test_the_numbers_stand_in_json_and_csv(capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each failure; what cuts the machine in two has no plan and says why."""
    machine = ("plan", "nvlink-x4", "--servers", "2", "--nic-gbps", "100", "--survive", "1")
    told = json.loads(run(capsys, *machine, "--json"))
    counts = ("number", "plans_before", "plans_after", "classes", "without_plan")
    assert [told[key] for key in counts] == [29, 24, 6, 6, 5]
    assert (told["worst"]["rate"], told["rate"]) == (12.5, 12.5)
    last = told["failures"][-1]
    assert (last["failure"], last["rate"]) == ("switch0", None)
    assert last["none"].startswith("no NVLink, PCIe or network path leads from")
    head, *rows = run(capsys, *machine, "--csv").splitlines()
    assert head == "kind,failure,class,rate,bound,busbw,over,none"
    assert rows[0] == "gpu,s0.gpu0,0,12.5,12.5,21.428571428571427,nvlink+network,"
    assert len(rows) == 29
    said = run(capsys, *machine)
    assert "none   5 failures leave no plan at all, such as that of" in said
    assert max(len(line) for line in said.splitlines()) <= 120


def test_plans_over_other_wires_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, "plan", "dgx-2", "--gpus", "0,1", "--survive", "1")
    assert "other  3 failures leave no plan over nvlink: over pcie\n" in said
    assert "worst  12 GB/s of algorithm bandwidth, without link gpu0-nvswitch0 (over pcie)\n" in said


def test_the_first_optimum_says_how_to_have_fewer_trees(capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, "plan", "v100x4", "--order", "first")
    assert "(optimal over nvlink, proved)" in said
    assert "; the first such plan that was found: --order height looks for fewer trees\n" in said


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--survive", "2"), "--survive 2: plans are made for single failures; give 1"),
        (("--survive", "x"), "--survive"),
        (("--survive", "1", "--sizes"), "--survive does not go with --sizes"),
        (("--survive", "1", "--mesh", "dp=2,tp=2"), "--mesh"),
        (("--survive", "1", "--schedule", "ring"), "--schedule"),
        (("--survive", "1", "--method", "mwu"), "--method"),
        (("--survive", "1", "--channels", "nvlink+pcie"), "take one forest, not channels nvlink+pcie"),
        (("--survive", "1", "--json", "--csv"), "both print to stdout"),
    ],
)
def test_what_does_not_go_together_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    assert told in run(capsys, "plan", "v100x4", *arguments, status=2)


def test_a_wrong_file_is_told_with_its_failure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Exit status 1, and 2 where it is no file of the format."""
    place = tmp_path / "plans.json"
    value = json.loads(run(capsys, "plan", "v100x4", "--survive", "1", "-o", "-"))
    value["failures"][0]["plan"]["rate"] = 1000
    place.write_text(json.dumps(value))
    assert "wrong plan: without gpu0: claims a rate of 1000 GB/s" in run(
        capsys, "verify", str(place), status=1
    )
    value["failures"][0] = {"gpu": "gpu0"}
    place.write_text(json.dumps(value))
    assert "failure 0: a failure has one of" in run(capsys, "verify", str(place), status=2)
