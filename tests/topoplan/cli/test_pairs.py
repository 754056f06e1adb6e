"""``topoplan pairs``: what it prints, its scripts run, and what they write is read back."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from topoplan.cli.main import main

FOUR = ["dgx-1v", "--servers", "4", "--nic-bandwidth", "100Gb/s", "--nics", "1", "--nic-access", "direct"]

MPIRUN = """#!/bin/sh
case "$*" in
*"--host node3"*) rate=5.1 ;;
*) rate=11.5 ;;
esac
case "$*" in *"--host node1"*"--host node2"*) exit 1 ;; esac
echo "$*" >> "$CALLS"
echo "# Avg bus bandwidth    : $rate"
"""


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["pairs", *words])
    told = capsys.readouterr()
    return status, told.out, told.err


def test_rounds_as_text_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Three rounds of two tests, and why no fewer."""
    status, out, _ = run(capsys, *FOUR)
    assert status == 0
    assert out.startswith(
        "4 x dgx-1v, 4 GPUs: 6 tests in 3 rounds, both ways at once\nrounds       the fewest possible: "
    )
    assert max(map(len, out.splitlines())) <= 120
    _, out, _ = run(capsys, *FOUR, "--json")
    made = json.loads(out)
    assert [len(tests) for tests in made["rounds"]] == [2, 2, 2]
    assert made["fewest"] == 3
    assert run(capsys, *FOUR, "--format", "json")[1] == out
    lines = run(capsys, *FOUR, "--csv")[1].splitlines()
    assert run(capsys, *FOUR, "--format", "csv")[1].splitlines() == lines
    assert lines[:2] == ["round,src,dst,channel,stated", "1,s0.gpu0,s1.gpu0,network,12.5"]
    assert len(lines) == 7


@pytest.mark.parametrize("starter", ["mpirun", "ssh"])
def test_the_script_runs_and_its_results_are_read(
    starter: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An mpirun that stands for a cluster where node3 is slow and one test fails: that server is named."""
    (tmp_path / "hosts").write_text("# ours\n" + "".join(f"node{n} slots=8\n" for n in range(4)))
    binaries = tmp_path / "bin"
    binaries.mkdir()
    (binaries / "mpirun").write_text(MPIRUN)
    (binaries / "ssh").write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    for name in ("mpirun", "ssh"):
        (binaries / name).chmod(0o755)
    script, results = tmp_path / "run.sh", tmp_path / "pairs.csv"
    hosts = ["--hosts", str(tmp_path / "hosts")]
    status, out, _ = run(capsys, *FOUR, "--format", starter, *hosts, "-o", str(script))
    assert (status, out) == (0, f"written: {script}, 4 GPUs: 6 tests in 3 rounds, both ways at once\n")
    calls = tmp_path / "calls"
    done = subprocess.run(
        ["bash", str(script)],
        env=os.environ
        | {"PATH": f"{binaries}:{os.environ['PATH']}", "OUT": str(results), "CALLS": str(calls)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["round 1 done", "round 2 done", "round 3 done"]
    first = sorted(calls.read_text().splitlines())[0]
    each = (
        "env CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0 "
        "./build/sendrecv_perf -b 268435456 -e 268435456 -g 1"
    )
    assert first == f"-np 1 --host node0 {each} : -np 1 --host node1 {each}"
    lines = results.read_text().splitlines()
    assert lines[0] == "a,b,GB/s"
    assert sorted(lines[1:])[3] == "s1.gpu0,s2.gpu0,failed"
    status, out, _ = run(capsys, *FOUR, "--results", str(results))
    assert status == 1
    assert "slow  s3.gpu0-s3.nic0 s3.nic0-switch0   5.1" in out
    assert "no link explains s1.gpu0-s2.gpu0 0 GB/s" in out
    status, out, _ = run(capsys, *FOUR, "--results", str(results), "--json")
    assert (status, json.loads(out)["slow_links"][0]["links"]) == (1, ["s3.gpu0-s3.nic0", "s3.nic0-switch0"])


def test_within_a_server_the_script_needs_no_mpi(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One process with two GPUs, numbered as in the machine; one way it is a broadcast."""
    _, out, _ = run(capsys, "v100x4", "--gpus", "1,3", "--one-way", "--format", "mpirun", "--size", "1MB")
    assert "mpirun" not in out
    assert "CUDA_VISIBLE_DEVICES=$4,$7" in out
    assert "broadcast_perf -b 1048576 -e 1048576 -r 0 -g 2" in out
    assert "pair 1 gpu1 s0 1 gpu3 s0 3 &" in out
    script = tmp_path / "run.sh"
    script.write_text(out)
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_rounds_that_fill_links_run_longer_and_say_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Their tests have a name of the round as the last word, and its results as fourth value."""
    words = [
        "dgx-1v",
        "--servers",
        "4",
        "--nic-bandwidth",
        "100Gb/s",
        "--nics",
        "1",
        "--nic-access",
        "direct",
    ]
    words += ["--network", "fat-tree", "--leaf-size", "2", "--fill"]
    script, results, calls = (tmp_path / name for name in ("run.sh", "r.csv", "calls"))
    run(capsys, *words, "--format", "mpirun", "-o", str(script))
    (tmp_path / "mpirun").write_text(MPIRUN)
    (tmp_path / "mpirun").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OUT": str(results), "CALLS": str(calls)}
    subprocess.run(["bash", str(script)], env=environment, capture_output=True, check=True)
    filled = [line for line in results.read_text().splitlines() if line.count(",") == 3]
    ends = ("s0.gpu0,s2.gpu0", "s1.gpu0,s3.gpu0")
    assert filled == [f"{two},11.5,fill{turn}" for turn in (1, 2) for two in ends]
    assert sum("-n 1000" in line for line in calls.read_text().splitlines()) == 4
    assert run(capsys, *words, "--results", str(results))[0] == 0
    assert "give --fill" in run(capsys, *words[:-1], "--results", str(results))[2]


def test_healthy_results_end_well(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Status 0; what was not measured is told, and so is a machine that is slow as a whole."""
    results = tmp_path / "r.csv"
    results.write_text("a,b,GB/s\ns0,s1,6\ns2,s3,6\n")
    status, out, _ = run(capsys, *FOUR, "--results", str(results))
    assert status == 0
    assert "no pair is slow" in out
    assert "without a result: 4 pairs of the rounds" in out
    assert "1. run the tests without a result" in out
    assert "even the faster pairs get less than 70 % of what network states" in out


NODES = ["dgx-h100", "--servers", "4", "--nics", "2", "--nic-bandwidth", "400Gb/s"]


def test_results_name_hosts_and_all_nics_of_each(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """In the order of their names, or of --hosts; n10 has one dead NIC of two, and both its pairs are slow."""
    results = tmp_path / "r.csv"
    results.write_text("a,b,GB/s\nn10,n9,48\nn9,n2,92\nn10,n2,47.5\nn2,n33,91\nn9,n33,90\n")
    status, out, _ = run(capsys, *NODES, "--results", str(results))
    assert status == 1
    assert "slow  n10.gpu0-n10.nic0 n10.gpu1-n10.nic1" in out
    assert "hosts are taken for servers in the order of their names, n2 first" in out
    assert "up to 2 NICs of each" in out
    status, out, _ = run(capsys, *NODES, "--results", str(results), "--hosts", "n[10,2,33,9]", "--json")
    (slow,) = json.loads(out)["slow_links"]
    assert {name.split(".")[0] for name in slow["links"]} == {"n10"}
    assert (slow["pairs"], json.loads(out)["missing"]) == (["n10-n9", "n10-n2"], [])


def test_hosts_of_one_nic_are_tests_of_the_rounds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Hosts of GPUs too; pairs that get more than the NICs state are noted."""
    results = tmp_path / "r.csv"
    results.write_text("a,b,GB/s\nn1.gpu0,n2.gpu0,23\nn3.gpu0,n4.gpu0,24\n")
    status, out, _ = run(capsys, *FOUR, "--results", str(results))
    assert status == 0
    assert "without a result: 4 pairs of the rounds" in out
    assert "the pairs get more than network states; say with --nics" in out
