"""``export`` to engines and ``verify`` of their files: told apart by content, one line and an exit status each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import topoplan
from topoplan.cli.main import main


@pytest.fixture
def plan(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    path.write_text(topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7]).to_json(), encoding="utf-8")
    return str(path)


def test_an_exported_file_is_verified_with_the_load_of_links(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of the four tree edges in both directions carries half of the buffer, twice where trees share a wire."""
    file = str(tmp_path / "file.json")
    assert main(["export", plan, "--to", "mscclpp", "-o", file]) == 0
    assert "note: keeps 50 GB/s, all of the rate; 2 chunks" in capsys.readouterr().out
    assert main(["verify", file, "--machine", "dgx-1v", "--gpus", "1,4,5,7"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("valid execution plan of MSCCL++: allreduce of 4 GPUs, in place: 2 chunks")
    assert "rate   50 GB/s, from the loads of nvlink links" in out
    assert main(["verify", file, "--machine", "dgx-1v", "--gpus", "1,4,5,7", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["valid"], found["rate"], found["ranks"]) == (True, 50.0, 4)


def test_wrong_files_exit_1_and_unreadable_ones_2(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line on stderr."""
    file = tmp_path / "file.json"
    assert main(["export", plan, "--to", "mscclpp", "-o", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    capsys.readouterr()
    file.write_text(text.replace('"name": "rres"', '"name": "rre"', 1), encoding="utf-8")
    assert main(["verify", str(file)]) == 1
    assert capsys.readouterr().err.startswith("topoplan verify: wrong execution plan of MSCCL++: gpu")
    for damaged in (text[: len(text) // 2], text.replace('"ops"', '"opps"', 1)):
        file.write_text(damaged, encoding="utf-8")
        assert main(["verify", str(file)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_options_that_do_not_fit_are_refused(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan names its machine, NCCL's files have no blocks, and a machine is no plan."""
    for arguments, message in (
        (["verify", plan, "--machine", "dgx-1v"], "--machine does not go with a plan"),
        (
            ["export", plan, "--to", "nccl-topo", "--max-blocks", "4"],
            "--max-blocks does not go with nccl-topo",
        ),
        (["export", "dgx-1v", "--to", "mscclpp"], "mscclpp takes a plan"),
        (["export", plan, "--to", "mscclpp", "--size", "1000"], "1000 bytes are not a multiple"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
