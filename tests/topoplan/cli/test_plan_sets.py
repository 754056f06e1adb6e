"""``plan --mesh`` and ``plan --survive 1``, and ``verify`` of their files."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.checkout import Done, Run
from tests.topoplan.cli.conftest import Told

MESH = "plan dgx-a100 --mesh dp=2,tp=4"


def test_a_mesh_goes_through_its_file(run: Run, done: Done, told: Told, tmp_path: Path) -> None:
    place = tmp_path / "mesh.json"
    said = done(f"{MESH} --axes dp=1,tp=3 -o {place}")
    assert said.startswith("all_reduce on dgx-a100, a mesh of dp 2 x tp 4, over NVLink: provably optimal\n")
    assert "GB/s in every group of weight 1\n" in said
    assert "groups       4 groups along dp and 2 groups along tp, all at once\n" in said
    assert place.read_text() == done(f"{MESH} --axes tp=3,dp -o -")
    said = done(f"verify {place}")
    head = "valid: all_reduce on dgx-a100, a mesh of dp 2 x tp 4, 6 groups at once: provably optimal\n"
    assert said.startswith(head)
    assert "checked      in every group each contribution arrives exactly once wherever it must\n" in said
    found = told(f"verify {place}")
    assert (found["valid"], found["optimal"], len(found["groups"])) == (True, True, 6)
    value = json.loads(place.read_text())
    status, out, err = run("verify - --json", stdin=json.dumps({**value, "rate": 2 * value["rate"]}))
    assert status == 1
    assert "of all groups at once; it is" in json.loads(out)["error"]
    assert err.startswith("topoplan verify: wrong plan: ")


def test_plans_for_failures_go_through_their_file(done: Done, told: Told, tmp_path: Path) -> None:
    """The summary names the worst failure, the file verifies, and commands that take one plan take the whole's."""
    place = tmp_path / "plans.json"
    said = done(f"plan v100x4 --survive 1 -o {place}")
    assert "over NVLink: 10 single failures, worst 50 GB/s without gpu2\n" in said
    assert "failures     4 GPUs, 6 links\nplans        10, in 6 equivalence classes\n" in said
    assert all(len(line) <= 120 for line in said.splitlines())
    assert done("plan v100x4 --survive 1 -o -") == place.read_text()
    assert (
        "failures     10 plans valid, each on the degraded machine (6 in the file)\n"
        "optimal      10 of 10 reach their upper bound\nworst        50 GB/s without gpu2\n"
    ) in done(f"verify {place}")
    found = told(f"verify {place}")
    assert (found["valid"], len(found["failures"]), found["without_plan"]) == (True, 10, 0)
    assert "of height" in done(f"simulate {place} --sizes 1MB")
    assert done(f"export {place} --to dot").startswith("digraph")


def test_the_numbers_stand_in_json_and_csv(done: Done, told: Told) -> None:
    """A row for each failure; what cuts the machine in two has no plan and says why."""
    machine = "plan nvlink-x4 --servers 2 --nic-bandwidth 100Gb/s --survive 1"
    found = told(machine)
    counts = ("number", "plans_before", "plans_after", "classes", "without_plan")
    assert [found[key] for key in counts] == [29, 24, 6, 6, 5]
    assert (found["worst"]["rate"], found["rate"]) == (12.5, 12.5)
    last = found["failures"][-1]
    assert (last["failure"], last["rate"]) == ("switch0", None)
    assert last["none"].startswith("no NVLink, PCIe or network path leads from")
    head, *rows = done(f"{machine} --csv").splitlines()
    assert head == "kind,failure,class,rate,bound,busbw,over,none"
    assert rows[0] == "gpu,s0.gpu0,0,12.5,12.5,21.428571428571427,nvlink+network,"
    assert len(rows) == 29
    said = done(machine)
    assert "no plan      5 failures, such as that of" in said
    assert max(len(line) for line in said.splitlines()) <= 140


def test_a_wrong_file_is_told_with_its_failure(done: Done) -> None:
    value = json.loads(done("plan v100x4 --survive 1 -o -"))
    value["failures"][0]["plan"]["rate"] = 1000
    wrong = "wrong plan: without gpu0: claims a rate of 1000 GB/s"
    assert wrong in done("verify -", status=1, stdin=json.dumps(value))
    value["failures"][0] = {"gpu": "gpu0"}
    assert "failure 0: a failure has one of" in done("verify -", status=2, stdin=json.dumps(value))
