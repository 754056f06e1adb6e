"""Files of plans for failures: nothing lost, nothing believed, and looked up without planning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import topoplan
from tests.support.checkout import ROOT
from topoplan.errors import PlanError, UsageError
from topoplan.plans.plan import PLAN_FORMAT_2, Plan
from topoplan.plans.shards import ImageShards
from topoplan.plans.survival import MachineFailure, SurvivalPlans, renamed_plan, verify_survival


@cache
def book() -> SurvivalPlans:
    """10 failures and 6 plans."""
    return topoplan.plan_survival("v100x4")


def test_a_book_survives_its_file(tmp_path: Path) -> None:
    """Read back it is equal, written again the same bytes, and the usual loader knows it."""
    text = book().to_json()
    path = tmp_path / "book.json"
    path.write_text(text, encoding="utf-8")
    for back in (SurvivalPlans.from_json(text), topoplan.load_plan(path), topoplan.load_survival(path)):
        assert back == book()
        assert back.to_json() == text
    assert json.loads(text) == book().to_object()
    assert len(verify_survival(topoplan.load_survival(path))) == 11


def test_a_book_is_the_plan_of_the_whole_machine_to_who_takes_one() -> None:
    """Collective, ranks and range are those of the whole machine, and so is the file but for two keys."""
    text = book().to_json()
    assert text.count('"devices"') == 1
    value = json.loads(text)
    assert value.pop("format") == PLAN_FORMAT_2
    del value["failures"]
    assert Plan.from_object({**value, "format": "topoplan.plan/1"}) == book().whole
    assert book().plans == (book().whole,)
    assert (book().collective, book().ranks, book().root) == ("allreduce", book().whole.ranks, None)


@pytest.mark.thorough
def test_images_of_templates_are_renamed_with_their_symmetries() -> None:
    """A plan of 63 GPUs without one of server 0, carried to server 1: templates, generators and certificate."""
    whole = topoplan.nvswitch_cluster(8)
    lost, other = (MachineFailure("gpu", f"s{server}.gpu3") for server in (0, 1))
    plan = topoplan.plan(lost.left_of(whole))
    assert isinstance(plan.shards, ImageShards)
    names = {device.name: device.name for device in whole.devices}
    for name in names:
        server, _, rest = name.partition(".")
        if server in ("s0", "s1"):
            names[name] = f"{'s1' if server == 's0' else 's0'}.{rest}"
    there = renamed_plan(plan, names, other.left_of(whole))
    assert isinstance(there.shards, ImageShards)
    assert topoplan.verify(there).exact_rate == topoplan.verify(plan).exact_rate
    with pytest.raises(PlanError):
        topoplan.verify(
            renamed_plan(plan, {**names, "s2.gpu0": "s3.gpu0", "s3.gpu0": "s2.gpu0"}, other.left_of(whole))
        )


def test_nothing_is_planned_when_something_is_lost(tmp_path: Path) -> None:
    """A process that reads the book and takes a plan from it loads no planner, no bounds and no simplex."""
    path = tmp_path / "book.json"
    path.write_text(book().to_json(), encoding="utf-8")
    code = (
        "import sys, topoplan\n"
        f"after = topoplan.load_plan({str(path)!r}).plan_without(gpus=[3])\n"
        "assert after.ranks == ('gpu0', 'gpu1', 'gpu2'), after.ranks\n"
        "print(*sorted(sys.modules))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    rooms = {name.split(".")[1] for name in done.stdout.split() if name.startswith("topoplan.")}
    assert "plans" in rooms
    assert not rooms & {"packing", "columns", "simplex", "bounds", "schedules"}


Change = Callable[[dict[str, Any]], object]


def renamed(value: dict[str, Any]) -> dict[str, Any]:
    """The first failure that has another one's plan under other names."""
    return next(row for row in value["failures"] if "rename" in row)


def broken(value: dict[str, Any]) -> None:
    """A failure of which the file says that nothing is left."""
    row = renamed(value)
    del row["as"], row["rename"]
    row["none"] = "it is broken"


def first_stage(value: dict[str, Any]) -> Any:
    return value["failures"][0]["plan"]["shards"][0]["stages"][0]


PERMUTE = "rename must permute devices of the machine among themselves"
ONE_OF = "failure 0: a failure has one of gpu, link and device"
DAMAGE: list[tuple[Change, str]] = [
    (lambda v: v["failures"].pop(), "the file has 9 failures; the machine has 10 over these links"),
    (lambda v: renamed(v).update(gpu="gpu0"), "is that of gpu0; it must be"),
    (lambda v: renamed(v).pop("rename"), "without gpu1: "),
    (lambda v: renamed(v).update(rename={"gpu1": "gpu2", "gpu2": "gpu1"}), "without gpu1: "),
    (lambda v: renamed(v).update(rename={"gpu0": "gpu1"}), PERMUTE),
    (lambda v: renamed(v).update(rename={"gpu8": "gpu9", "gpu9": "gpu8"}), PERMUTE),
    (
        lambda v: renamed(v).update({"as": 9}),
        "as is 9, which is not an earlier failure with a plan of its own",
    ),
    (lambda v: renamed(v).update({"as": -1}), "as is -1, which is not an earlier failure"),
    (lambda v: v["failures"][0]["plan"].update(rate=1e3), "without gpu0: claims a rate of 1000 GB/s"),
    (lambda v: v["failures"][0]["plan"].update(bound=1e3), "without gpu0: claims a bound of 1000 GB/s"),
    (
        lambda v: v["failures"][0]["plan"].update(collective="allgather"),
        "without gpu0: it is a allgather, not a allreduce",
    ),
    (lambda v: first_stage(v).update(root=7), "out of range"),
    (lambda v: v["failures"][0].update(link="gpu0-gpu1"), ONE_OF),
    (lambda v: v["failures"][0].update(colour="red"), f"{ONE_OF}, and one of plan, as and none"),
    (lambda v: v["failures"][0].update(gpu="gpu9"), "failure 0: v100x4 has no GPU 'gpu9'"),
    (
        lambda v: v["failures"][4].update(link="gpu0-gpu4"),
        "failure 4: link gpu0-gpu4: v100x4 has no device 'gpu4'",
    ),
    (lambda v: v.update(failures={}), "failures must be a list, not dict"),
    (lambda v: v.update(failures=[1]), "failure 0: a failure must be an object, not int"),
    (lambda v: v["failures"][0].update(plan=[]), "failure 0: plan must be an object, not list"),
    (broken, "without gpu1: the file says that no plan exists, but links still join"),
]


@pytest.mark.parametrize(("change", "told"), DAMAGE)
def test_a_damaged_file_is_refused_in_one_line(change: Change, told: str) -> None:
    value = json.loads(book().to_json())
    change(value)
    with pytest.raises(PlanError) as caught:
        verify_survival(SurvivalPlans.from_json(json.dumps(value)))
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_files_are_no_books(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(book().whole.to_json(), encoding="utf-8")
    with pytest.raises(PlanError, match="no key failures; topoplan plan --survive 1 -o writes one"):
        topoplan.load_survival(path)
    with pytest.raises(UsageError, match="cannot be read"):
        topoplan.load_survival(tmp_path / "none.json")
