"""``plan --mesh`` and ``verify`` of its file, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from topoplan.cli.main import main

MESH = ("plan", "dgx-a100", "--mesh", "dp=2,tp=4")


def run(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    """What a command prints, or the line on stderr of one that is refused."""
    capsys.readouterr()
    assert main(arguments) == status
    out, err = capsys.readouterr()
    assert err.count("\n") == (1 if status else 0)
    return err if status else out


def test_a_mesh_goes_through_its_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    place = tmp_path / "mesh.json"
    said = run(capsys, *MESH, "--axes", "dp=1,tp=3", "-o", str(place))
    assert "a mesh of dp 2 x tp 4: 4 groups along dp and 2 groups along tp at once, over nvlink" in said
    assert "GB/s of algorithm bandwidth in every group of weight 1 (optimal over nvlink, proved)" in said
    assert place.read_text() == run(capsys, *MESH, "--axes", "tp=3,dp", "-o", "-")
    said = run(capsys, "verify", str(place))
    assert said.startswith("valid: 6 groups, each with each contribution exactly once wherever it must be\n")
    assert said.endswith("rate = bound: optimal\n")
    told = json.loads(run(capsys, "verify", str(place), "--json"))
    assert (told["valid"], told["optimal"], len(told["groups"])) == (True, True, 6)
    value = json.loads(place.read_text())
    place.write_text(json.dumps({**value, "rate": 2 * value["rate"]}))
    assert main(("verify", str(place), "--json")) == 1
    out, err = capsys.readouterr()
    assert "of all groups at once; it is" in json.loads(out)["error"]
    assert err.startswith("topoplan verify: wrong plan: ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((*MESH, "--sizes"), "--mesh does not go with --sizes"),
        ((*MESH, "--root", "1"), "--root does not go with --mesh"),
        (("plan", "dgx-a100", "--axes", "dp"), "--axes belongs to --mesh"),
        (("plan", "dgx-a100", "--mesh", "dp=2,dp=4"), "'dp=2,dp=4' must be axes with whole numbers of ranks"),
        (("plan", "dgx-a100", "--mesh", "dp=1/2"), "'dp=1/2' must be axes with whole numbers of ranks"),
        ((*MESH, "--axes", "tp=x"), "'tp=x' must be axes, such as dp, or with weights, such as dp=1,tp=3"),
    ],
)
def test_what_does_not_go_together_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    assert told in run(capsys, *arguments, status=2)
