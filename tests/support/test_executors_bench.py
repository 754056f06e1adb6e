"""Benchmarks that start processes: executors beside busy ones, which leave nothing behind, and training over a link."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from collectives.lab.testbed.sandbox import sandbox_refusal
from tests.bench.executors import Contender, Failed, Job, neighbours
from tests.support.checkout import ROOT


@pytest.mark.slow
def test_contenders_of_two_checkouts_run_in_the_same_rounds() -> None:
    words = [
        "--ranks",
        "2",
        "--sizes",
        "8,64KB",
        "--rounds",
        "2",
        "--busy",
        "0,1",
        "--only",
        "tcp,memcpy",
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", "executors", *words, "--against", str(ROOT)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    cells = json.loads(done.stdout)
    assert [(cell["busy"], cell["size"], cell["contender"]) for cell in cells] == [
        (busy, size, name)
        for busy in (0, 1)
        for size in (8, 65536)
        for name in ("tcp", "tcp, before", "tcp, prepared", "memcpy")
    ]
    assert all([len(blocks) for blocks in cell["seconds"]] == [2, 2] for cell in cells)


@pytest.mark.thorough
def test_a_contender_that_does_not_start_says_why() -> None:
    what = {"kind": "planned", "backend": "smoke", "in_place": False, "shared_arrays": False}
    wrong = Contender("tcp", what, "tcp")
    with pytest.raises(Failed, match="'smoke'"):
        Job(wrong, 2)


@pytest.mark.thorough
def test_busy_neighbours_end_where_they_are_no_longer_needed() -> None:
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    if not children.exists():
        pytest.skip("this system does not list a process's children")
    before = set(children.read_text().split())
    with neighbours(2):
        started = set(children.read_text().split()) - before
        assert len(started) == 2
    assert not started & set(children.read_text().split())


@pytest.mark.slow
@pytest.mark.skipif(bool(sandbox_refusal()), reason="needs user namespaces")
def test_training_over_a_shaped_link_prints_a_row_for_each_method() -> None:
    pytest.importorskip("torch", reason="needs torch")
    words = ["--seconds", "0.2", "--seeds", "1", "--width", "16", "--only", "SparseLoCo"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", "sparse_training", *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split("  ")[1].strip() for line in done.stdout.splitlines() if not line.startswith("#")]
    assert rows == ["method", "dense", "SparseLoCo", "SparseLoCo, senders"]
