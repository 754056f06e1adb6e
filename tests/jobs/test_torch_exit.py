"""Torch jobs that have finished end: no abort, and no hang, where gloo's threads are still letting go of tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.checkout import ROOT

pytest.importorskip("torch", reason="PyTorch is not installed")

RUNS = 1


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["close", pytest.param("end of program", marks=pytest.mark.slow)])
def test_ranks_end_in_order_while_gloos_threads_let_go_of_a_tensor(how: str) -> None:
    """By ``close``, which waits for them, and by the end of the program, at which torch alone aborts."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "jobs" / "torch_exit_ranks.py"), how, str(RUNS)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [0] * 2 * RUNS, done.stderr[-3000:]
