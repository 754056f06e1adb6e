"""DDP in every synchronisation mode, and under torchrun the loop of docs/training.md and the example."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collectives import Communicator, LocalSGD
from collectives.training.averaging import LocalAverager
from collectives.training.report import Recorder
from tests.support.checkout import ROOT
from tests.support.hand_plans import forest_plan
from tests.support.torch_jobs import Told, told_by_all

pytestmark = pytest.mark.thorough

torch = pytest.importorskip("torch", reason="needs torch")


def torchrun(processes: int, *command: str) -> str:
    """What a job printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
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
def modes(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What each of two ranks saw, by mode."""
    return told_by_all("torch_mode_ranks.py", tmp_path_factory.mktemp("modes"), ranks=2)


def test_in_step_ranks_hold_the_same_bits(modes: Told) -> None:
    first, second = (told["BSP()"] for told in modes)
    assert first["digest"] == second["digest"]
    assert first["farthest"] is None


@pytest.mark.parametrize("mode", ["SSP(staleness=1)", "ASP()"])
def test_stale_ranks_have_used_the_same_gradients_in_the_end(modes: Told, mode: str) -> None:
    first, second = (told[mode] for told in modes)
    assert first["digest"] == second["digest"]
    assert any(how.startswith(("stale", "asynchronous")) for how in first["how"])


def test_no_rank_is_further_ahead_than_the_bound(modes: Told) -> None:
    """When a step begins; a step later the gap is one more at most."""
    assert all(told["SSP(staleness=1)"]["farthest"] <= 1 for told in modes)


@pytest.mark.parametrize("mode", ["BSP()", "SSP(staleness=1)", "ASP()", "LocalSGD(every=4)"])
@pytest.mark.parametrize("steps", ["linear", "uneven linear"])
def test_every_gradient_is_in_the_parameters_of_every_rank_in_the_end(
    modes: Told, mode: str, steps: str
) -> None:
    """Whole numbers, exactly; ten steps, which 4 does not divide, and eleven on one of the ranks."""
    for told in modes:
        if mode in told[steps]:
            assert told[steps][mode]["weights"] == told[steps][mode]["right"]


@pytest.mark.parametrize("mode", ["BSP()", "SSP(staleness=1)", "ASP()", "LocalSGD(every=4)"])
def test_finish_leaves_the_same_bits_and_training_that_goes_on_without_it_is_warned_of(
    modes: Told, mode: str
) -> None:
    """With Adam, whose moments are each rank's own."""
    first, second = (told["momentum"][mode] for told in modes)
    assert first["digests"][0] == second["digests"][0]
    assert first["digests"][0] != first["digests"][1]
    for told in (first, second):
        if mode == "BSP()":
            assert told["warnings"] == []
            assert first["digests"][1] == second["digests"][1]
        else:
            (warning,) = told["warnings"]
            assert warning.startswith(f"training in mode {mode} ended without finish")


def test_a_loop_without_an_optimiser_says_when_parameters_have_moved(modes: Told) -> None:
    for told in modes:
        for mode in ("SSP(staleness=1)", "LocalSGD(every=2)"):
            assert told["by hand"][mode]["weights"] == told["by hand"][mode]["right"]


def test_one_that_does_not_say_so_is_an_error_in_the_third_step(modes: Told) -> None:
    for told in modes:
        found = told["by hand"]["LocalSGD(every=3)"]
        assert found["step"] == 2
        assert "call state.after_step(model.parameters()) after each update" in found["error"]


def test_what_an_optimiser_computes_anew_inside_a_step_is_of_that_step(modes: Told) -> None:
    """LBFGS with closures, more on one rank than on the other: four steps, averaged after the second and the fourth."""
    first, second = (told["again"]["LBFGS"] for told in modes)
    assert first["passes"] < second["passes"]
    assert first["steps"] == second["steps"] == 4
    alike = [one == other for one, other in zip(first["digests"], second["digests"], strict=True)]
    assert alike == [False, True, False, True]


def test_an_optimiser_whose_step_has_failed_does_not_keep_those_of_another_from_counting() -> None:
    from collectives.torch.mode_exchange import ModeExchange

    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.ones(3)
    failing, other = (torch.optim.SGD([weight], lr=0.1) for _ in range(2))
    with Communicator(forest_plan(2, "allreduce", "star")) as comm:
        averager = LocalAverager(comm, LocalSGD(100), Recorder("test", ranks=2))
        modes: Any = ModeExchange(averager, None, comm)  # type: ignore[arg-type]
        modes._parameters = {id(weight): weight}
        with pytest.raises(ZeroDivisionError):
            failing.step(lambda: 1 / 0)
        for _ in range(4):
            modes._end_step()
            other.step()
        assert averager.recorder.step == 4
        modes._drift.steps = 0
        modes.close()


def test_parameters_that_move_to_and_fro_before_their_optimiser_steps_are_no_error(
    modes: Told,
) -> None:
    """Two gradients a step, so that each step ends with the average."""
    first, second = (told["again"]["SAM"] for told in modes)
    assert first["digests"] == second["digests"]
    assert len(set(first["digests"])) == 4
    assert first["steps"] == 8


def test_a_run_that_ends_before_it_was_time_is_averaged_and_reported(modes: Told) -> None:
    for told in modes:
        assert told["short"]["weights"] == told["short"]["right"]
        assert told["short"]["report"].startswith("hook on 2 ranks, 3 steps of ")
        assert told["short"]["buckets"] == 1


def test_where_a_rank_has_fewer_batches_the_others_hear_that_this_may_be_the_cause(
    modes: Told,
) -> None:
    first, second = (told["uneven"] for told in modes)
    assert second is None
    assert first.startswith("training step 3, bucket 0 of ")
    assert "peer 1" in first
    assert "with as many batches on each" in first


def test_local_ranks_hold_the_same_bits_whenever_parameters_are_averaged(modes: Told) -> None:
    first, second = (told["LocalSGD(every=4)"] for told in modes)
    assert first["averaged"] == second["averaged"]
    assert len(first["averaged"]) == 3
    assert first["digest"] == first["averaged"][-1]


def test_what_pulls_local_ranks_back_is_in_their_gradients(modes: Told) -> None:
    """w <- w - (g + (w - anchor) / 4), the anchor being the average after step 3."""
    ranks = len(modes)
    weights = np.zeros((ranks, 6))
    anchor = np.zeros(6)
    for number in range(5):
        if number == 3:
            anchor = weights.mean(axis=0)
            weights[:] = anchor
        gradients = [np.arange(6) * (rank + 1) + number for rank in range(ranks)]
        weights -= gradients + (weights - anchor) / 4
    for told in modes:
        np.testing.assert_allclose(told["pulled"]["weights"], [weights.mean(axis=0)] * 2)


def test_the_loop_of_the_page_on_training_runs_as_it_stands(tmp_path: Path) -> None:
    """From the group to its end; only what a user brings is put before it."""
    blocks = (ROOT / "docs" / "training.md").read_text(encoding="utf-8").split("```python\n")[1:]
    (loop,) = [block.split("```")[0] for block in blocks if "register_comm_hook" in block]
    program = tmp_path / "loop.py"
    brought = (
        "from torch import nn\nnetwork, loss = nn.Linear(3, 2), nn.functional.mse_loss\n"
        "import torch\nbatches = [(torch.ones(4, 3), torch.zeros(4, 2))] * 3\n"
    )
    program.write_text(brought + loop, encoding="utf-8")
    assert "hook on 2 ranks, 3 steps of " in torchrun(2, str(program))


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
