"""``topoplan pairs``: what it prints, its scripts run, and what they write is read back."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.checkout import Done, Run

FOUR = "pairs dgx-1v --servers 4 --nic-bandwidth 100Gb/s --nics 1 --nic-access direct"

MPIRUN = """#!/bin/sh
case "$*" in
*"--host node3"*) rate=5.1 ;;
*) rate=11.5 ;;
esac
case "$*" in *"--host node1"*"--host node2"*) exit 1 ;; esac
echo "$*" >> "$CALLS"
echo "# Avg bus bandwidth    : $rate"
"""


def run_script(script: Path, folder: Path) -> tuple[str, list[str]]:
    """Run a script where mpirun stands for a cluster with a slow node3; return its output and its calls."""
    for name, text in (("mpirun", MPIRUN), ("ssh", '#!/bin/sh\nshift\nexec sh -c "$*"\n')):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path, calls = f"{folder}:{os.environ['PATH']}", folder / "calls"
    environment = os.environ | {"PATH": path, "OUT": str(folder / "r.csv"), "CALLS": str(calls)}
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, check=True)
    return done.stdout, calls.read_text().splitlines()


def test_rounds_as_text_json_and_csv(done: Done) -> None:
    """Three rounds of two tests, and why no fewer."""
    out = done(FOUR)
    head = "4 x dgx-1v, 4 GPUs: 6 tests in 3 rounds, both ways at once\nrounds       the fewest possible: "
    assert out.startswith(head)
    assert max(map(len, out.splitlines())) <= 120
    out = done(f"{FOUR} --json")
    made = json.loads(out)
    assert ([len(tests) for tests in made["rounds"]], made["fewest"]) == ([2, 2, 2], 3)
    assert done(f"{FOUR} --format json") == out
    lines = done(f"{FOUR} --csv").splitlines()
    assert done(f"{FOUR} --format csv").splitlines() == lines
    assert lines[:2] == ["round,src,dst,channel,stated", "1,s0.gpu0,s1.gpu0,network,12.5"]
    assert len(lines) == 7


@pytest.mark.parametrize("starter", ["mpirun", "ssh"])
def test_the_script_runs_and_its_results_are_read(starter: str, done: Done, run: Run, tmp_path: Path) -> None:
    """Where node3 is slow and one test fails, that server is named."""
    (tmp_path / "hosts").write_text("# ours\n" + "".join(f"node{n} slots=8\n" for n in range(4)))
    script, results = tmp_path / "run.sh", tmp_path / "r.csv"
    out = done(f"{FOUR} --format {starter} --hosts {tmp_path}/hosts -o {script}")
    assert out == f"written: {script}, 4 GPUs: 6 tests in 3 rounds, both ways at once\n"
    said, calls = run_script(script, tmp_path)
    assert said.splitlines() == ["round 1 done", "round 2 done", "round 3 done"]
    first = sorted(calls)[0]
    each = (
        "env CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0 "
        "./build/sendrecv_perf -b 268435456 -e 268435456 -g 1"
    )
    assert first == f"-np 1 --host node0 {each} : -np 1 --host node1 {each}"
    lines = results.read_text().splitlines()
    assert lines[0] == "a,b,GB/s"
    assert sorted(lines[1:])[3] == "s1.gpu0,s2.gpu0,failed"
    status, out, _ = run(f"{FOUR} --results {results}")
    assert status == 1
    assert "slow  s3.gpu0-s3.nic0 s3.nic0-switch0   5.1" in out
    assert "no link explains s1.gpu0-s2.gpu0 0 GB/s" in out
    status, out, _ = run(f"{FOUR} --results {results} --json")
    assert (status, json.loads(out)["slow_links"][0]["links"]) == (1, ["s3.gpu0-s3.nic0", "s3.nic0-switch0"])


def test_within_a_server_the_script_needs_no_mpi(done: Done, tmp_path: Path) -> None:
    """One process with two GPUs, numbered as in the machine; one way it is a broadcast."""
    out = done("pairs v100x4 --gpus 1,3 --one-way --format mpirun --size 1MB")
    assert "mpirun" not in out
    assert "CUDA_VISIBLE_DEVICES=$4,$7" in out
    assert "broadcast_perf -b 1048576 -e 1048576 -r 0 -g 2" in out
    assert "pair 1 gpu1 s0 1 gpu3 s0 3 &" in out
    script = tmp_path / "run.sh"
    script.write_text(out)
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_rounds_that_fill_links_run_longer_and_say_so(done: Done, refused: Done, tmp_path: Path) -> None:
    """Their tests have a name of the round as the last word, and its results as fourth value."""
    tree = f"{FOUR} --network fat-tree --leaf-size 2"
    script, results = tmp_path / "run.sh", tmp_path / "r.csv"
    done(f"{tree} --fill --format mpirun -o {script}")
    _, calls = run_script(script, tmp_path)
    filled = [line for line in results.read_text().splitlines() if line.count(",") == 3]
    ends = ("s0.gpu0,s2.gpu0", "s1.gpu0,s3.gpu0")
    assert filled == [f"{two},11.5,fill{turn}" for turn in (1, 2) for two in ends]
    assert sum("-n 1000" in line for line in calls) == 4
    done(f"{tree} --fill --results {results}")
    assert "give --fill" in refused(f"{tree} --results {results}")


def test_healthy_results_end_well(done: Done) -> None:
    """What was not measured is told, and so is a machine that is slow, or faster than its NICs, as a whole."""
    out = done(f"{FOUR} --results -", stdin="a,b,GB/s\ns0,s1,6\ns2,s3,6\n")
    assert "no pair is slow" in out
    assert "without a result: 4 pairs of the rounds" in out
    assert "1. run the tests without a result" in out
    assert "even the faster pairs get less than 70 % of what network states" in out
    out = done(f"{FOUR} --results -", stdin="a,b,GB/s\nn1.gpu0,n2.gpu0,23\nn3.gpu0,n4.gpu0,24\n")
    assert "without a result: 4 pairs of the rounds" in out
    assert "the pairs get more than network states; say with --nics" in out


def test_results_name_hosts_and_all_nics_of_each(run: Run) -> None:
    """In the order of their names, or of --hosts; n10 has one dead NIC of two, and both its pairs are slow."""
    results = "a,b,GB/s\nn10,n9,48\nn9,n2,92\nn10,n2,47.5\nn2,n33,91\nn9,n33,90\n"
    nodes = "pairs dgx-h100 --servers 4 --nics 2 --nic-bandwidth 400Gb/s --results -"
    status, out, _ = run(nodes, stdin=results)
    assert status == 1
    assert "slow  n10.gpu0-n10.nic0 n10.gpu1-n10.nic1" in out
    assert "hosts are taken for servers in the order of their names, n2 first" in out
    assert "up to 2 NICs of each" in out
    found = json.loads(run(f"{nodes} --hosts n[10,2,33,9] --json", stdin=results)[1])
    (slow,) = found["slow_links"]
    assert {name.split(".")[0] for name in slow["links"]} == {"n10"}
    assert (slow["pairs"], found["missing"]) == (["n10-n9", "n10-n2"], [])
