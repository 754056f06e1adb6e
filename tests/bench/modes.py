"""The example in every synchronisation mode, one of four ranks three times as slow for a while.

Each step sleeps for 20 ms as if it computed, rank 1 for 60 ms in the second quarter of the run, so cores do not matter.
Steps a second are those of the slowest rank; the loss is on images that were not trained on; the gap is how many steps
the fastest rank was ahead of the slowest when it had ended one, at most.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from tests.bench.tables import Table

STEPS, WORK = 160, 0.02
MODES = ("bsp", "ssp:1", "ssp:4", "asp", "local:4", "local:16")


def main() -> None:
    if find_spec("torch") is None:
        print("not measured: torch is not installed")
        return
    slow = f"1,3,{STEPS // 4},{STEPS // 2}"
    print(
        f"# 4 processes, {STEPS} steps of {WORK * 1e3:g} ms of work each, rank 1 is 3 x as slow in a quarter of them"
    )
    table = Table("mode|<9", "steps/s|9.1f", "test loss|11.4f", "gap of clocks|15")
    with tempfile.TemporaryDirectory() as folder:
        for mode in MODES:
            out = Path(folder) / "told.json"
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
            options = f"--steps {STEPS} --every {STEPS} --work {WORK} --sgd-momentum 0 --rate 0.2".split()
            options += ["--mode", mode, "--straggler", slow, "--out", str(out)]
            subprocess.run(
                [sys.executable, *launcher, "-m", "collectives.examples.train_cifar_like", *options],
                check=True,
                capture_output=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            told = json.loads(out.read_text())
            table.row(mode, told["steps_per_second"], told["final"], told["gap"])
