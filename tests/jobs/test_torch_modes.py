"""The optimiser's hook of stale modes, and the loop of docs/ddp-hook.md and the example."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from collectives import Communicator, LocalSGD
from collectives.training.averaging import LocalAverager
from collectives.training.report import Recorder
from tests.support.checkout import ROOT
from tests.support.hand_plans import forest_plan
from tests.support.torch_jobs import forked

pytestmark = pytest.mark.thorough

torch = pytest.importorskip("torch", reason="needs torch")


def printed(folder: Path, *program: str) -> str:
    """Return what a job of two ranks prints."""
    text, errors, statuses = forked(program, folder, ranks=2)
    assert statuses == [0, 0], errors[-3000:]
    return text + errors


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


def test_the_loop_of_the_page_on_the_hook_runs_as_it_stands(tmp_path: Path) -> None:
    """From the group to its end; only what a user brings is put before it."""
    blocks = (ROOT / "docs" / "ddp-hook.md").read_text(encoding="utf-8").split("```python\n")[1:]
    loop, *_ = [block.split("```")[0] for block in blocks if "register_comm_hook" in block]
    program = tmp_path / "loop.py"
    brought = (
        "from torch import nn\nnetwork, loss = nn.Linear(3, 2), nn.functional.mse_loss\n"
        "import torch\nbatches = [(torch.ones(4, 3), torch.zeros(4, 2))] * 3\n"
    )
    program.write_text(brought + loop, encoding="utf-8")
    assert "hook on 2 ranks, 3 steps of " in printed(tmp_path, str(program))


def test_the_example_trains_and_reports(tmp_path: Path) -> None:
    out, plot = tmp_path / "told.json", tmp_path / "steps.png"
    options = ["--steps", "40", "--every", "20", "--density", "0.05", "--out", str(out), "--plot", str(plot)]
    text = printed(tmp_path, "collectives.examples.train_cifar_like", *options)
    assert "sparse gradients, BSP(), 2 ranks over shared: " in text
    assert "hook on 2 ranks, 40 steps of " in text
    told = json.loads(out.read_text())
    losses = [loss for _, loss in told["losses"]]
    assert losses[-1] < losses[0] < math.log(10)
    assert plot.stat().st_size > 1000
