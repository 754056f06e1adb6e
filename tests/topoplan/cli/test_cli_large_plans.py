"""Commands on plans of hundreds of GPUs: what is printed stays short, and images stand for themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import topoplan
from topoplan.cli.main import main
from topoplan.cli.plan import MAX_ROWS, tree_table
from topoplan.plans.shards import ImageShards


@pytest.fixture(scope="module")
def cluster_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A topology file of 64 servers, 512 GPUs."""
    path = tmp_path_factory.mktemp("large") / "cluster.json"
    path.write_text(topoplan.nvswitch_cluster(64).to_json())
    return str(path)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    status = main(arguments)
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    return out


def test_a_plan_of_512_gpus_prints_one_row(
    capsys: pytest.CaptureFixture[str], cluster_file: str, tmp_path: Path
) -> None:
    """One tree stands for 512; GPUs and edges are named at the beginning, with how many are left out."""
    target = tmp_path / "plan.json"
    out = printed(capsys, "plan", cluster_file, "--collective", "allgather", "-o", str(target))
    assert len(out) < 3000
    assert "512 GPUs (s0-63.gpu0-7)" in out
    rows = [line for line in out.splitlines() if line.startswith("1 of ")]
    assert [row.split("  ")[0] for row in rows] == ["1 of 512 symmetric"]
    assert rows[0].endswith(" … (511 edges)")
    checked = printed(capsys, "verify", str(target))
    assert "512 trees, height 2" in checked
    assert "rate = bound: optimal" in checked


@pytest.mark.thorough
def test_simulate_of_512_gpus_beside_rings_across_servers(
    capsys: pytest.CaptureFixture[str], cluster_file: str
) -> None:
    """Both are timed from their templates; at a large size the plan has its rate, and the rings theirs."""
    out = printed(capsys, "simulate", cluster_file, "--collective", "allgather", "--sizes", "64GB", "--json")
    value = json.loads(out)
    assert value["plan"]["trees"] == 512
    assert value["plan"]["rows"][0]["algbw"] == pytest.approx(value["plan"]["rate"], rel=0.01)
    assert value["ring"]["schedule"] == "network ring"
    assert value["ring"]["trees"] == 8 * 512
    assert value["ring"]["rate"] == pytest.approx(200 * 512 / 511)


@pytest.mark.thorough
def test_a_trace_of_too_many_transfers_is_refused(
    capsys: pytest.CaptureFixture[str], cluster_file: str, tmp_path: Path
) -> None:
    """One line with the number, exit 2, and no file."""
    trace = tmp_path / "trace.json"
    sizes = ("--sizes", "1GB")
    assert main(("simulate", cluster_file, "--collective", "allgather", *sizes, "--trace", str(trace))) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "chunk transfers must be at most 2000000" in err
    assert not trace.exists()


def test_a_plan_of_many_shards_that_differ_is_cut_after_some() -> None:
    """Five rings of 15 ranks have 75 shards; the last line counts those that are not listed."""
    ring = topoplan.ring(topoplan.nvswitch_cluster(3, gpus=5, rails=None))
    assert not isinstance(ring.shards, ImageShards)
    lines = tree_table(ring).splitlines()
    assert len(ring.shards) == 75
    assert len(lines) == 1 + MAX_ROWS + 1
    assert lines[-1] == "… and 11 shards more: -o and --json write all"


def test_channels_are_named_where_shards_keep_to_different_ones() -> None:
    """A tree across servers uses NVLink and the network, as all others do: no column; a split plan has one."""
    assert "channel" not in tree_table(topoplan.plan(topoplan.nvswitch_cluster(2), "allgather"))
    both = tree_table(topoplan.plan(topoplan.load("v100x4"), channels="nvlink+pcie"))
    assert {line.split()[1] for line in both.splitlines()[1:]} == {"nvlink", "pcie"}
