"""DDP in every synchronisation mode, and the example as the README runs it, with real processes under torchrun."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.thorough

torch = pytest.importorskip("torch", reason="needs torch")

TESTS = Path(__file__).parent


def torchrun(processes: int, *command: str) -> str:
    """What a job printed."""
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}", "OMP_NUM_THREADS": "1"}
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
    ]
    done = subprocess.run(
        [*launcher, *command], capture_output=True, text=True, timeout=150, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def modes() -> list[dict[str, Any]]:
    """What each of two ranks saw, by mode."""
    text = torchrun(2, str(TESTS / "torch_mode_ranks.py"))
    found: list[dict[str, Any]] = json.loads(next(line for line in text.splitlines() if line.startswith("[")))
    return found


def test_in_step_ranks_hold_the_same_bits(modes: list[dict[str, Any]]) -> None:
    first, second = (told["BSP()"] for told in modes)
    assert first["digest"] == second["digest"]
    assert first["farthest"] is None


@pytest.mark.parametrize("mode", ["SSP(staleness=1)", "ASP()"])
def test_stale_ranks_have_used_the_same_gradients_in_the_end(modes: list[dict[str, Any]], mode: str) -> None:
    first, second = (told[mode] for told in modes)
    assert first["values"] == pytest.approx(second["values"], rel=1e-12, abs=1e-14)
    assert any(how.startswith(("stale", "asynchronous")) for how in first["how"])


def test_no_rank_is_further_ahead_than_the_bound(modes: list[dict[str, Any]]) -> None:
    """When a step begins; a step later the gap is one more at most."""
    assert all(told["SSP(staleness=1)"]["farthest"] <= 1 for told in modes)


def test_local_ranks_hold_the_same_bits_whenever_parameters_are_averaged(modes: list[dict[str, Any]]) -> None:
    first, second = (told["LocalSGD(every=4)"] for told in modes)
    assert first["averaged"] == second["averaged"]
    assert len(first["averaged"]) == 3
    assert first["digest"] == first["averaged"][-1]


def test_the_example_trains_and_reports(tmp_path: Path) -> None:
    out, plot = tmp_path / "told.json", tmp_path / "steps.png"
    command = [
        "-m",
        "collectives.examples.train_cifar_like",
        "--steps",
        "40",
        "--every",
        "20",
        "--density",
        "0.05",
    ]
    text = torchrun(2, *command, "--out", str(out), "--plot", str(plot))
    assert "sparse gradients, BSP(), 2 ranks over shared: " in text
    assert "hook on 2 ranks, 40 steps of " in text
    told = json.loads(out.read_text())
    losses = [loss for _, loss in told["losses"]]
    assert losses[-1] < losses[0] < math.log(10)
    assert plot.stat().st_size > 1000
