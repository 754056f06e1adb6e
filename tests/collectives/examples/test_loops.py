"""The training loops that pages link to print what their docstrings say."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import ROOT
from tests.support.torch_jobs import forked

FOLDER = ROOT / "collectives" / "examples"
SHOWN = re.compile(r"^    \$ (.*-m collectives\.examples\.(\w+))\n((?:    .*\n)+)", re.MULTILINE)
LOOPS = {
    found[2]: (found[1], [line[4:] for line in found[3].splitlines()])
    for path in sorted(FOLDER.glob("*.py"))
    for found in SHOWN.finditer(path.read_text(encoding="utf-8").split('"""')[1])
    if found[2] == path.stem
}


def test_every_loop_of_the_page_is_run() -> None:
    page = (ROOT / "docs" / "training-loops.md").read_text(encoding="utf-8")
    assert set(re.findall(r"collectives/examples/(\w+)\.py", page)) >= set(LOOPS)
    assert len(LOOPS) == 9


STARTED = ("plain_loop", "restart_ddp")
"""One is one process, and torchrun starts one; ranks of the others are forked, with torch loaded, in less time."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            one,
            marks={"plain_loop": [], "restart_ddp": pytest.mark.slow}.get(one, pytest.mark.thorough),
        )
        for one in LOOPS
    ],
)
def test_a_loop_prints_what_its_docstring_says(name: str, tmp_path: Path) -> None:
    """Every line that is not printed once, in any order, is wrong."""
    command, lines = LOOPS[name]
    if name != "plain_loop":
        pytest.importorskip("torch", reason="PyTorch is not installed")
    words = shlex.split(command)
    module = words[words.index("-m") + 1 :]
    if name in STARTED:
        launcher = [] if name == "plain_loop" else ["-m", "torch.distributed.run", "--standalone"]
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        if name == "restart_ddp":
            # else a second life may find in torchrun's store what the first one has left there
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        line = [sys.executable, *launcher, *words[1:]]
        done = subprocess.run(
            line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        told, errors, statuses = done.stdout, done.stderr, [done.returncode]
    else:
        ranks = 3 if words[0].startswith("RANK=") else int(words[words.index("--nproc-per-node") + 1])
        told, errors, statuses = forked(module, tmp_path, ranks=ranks)
    dies = name == "shrink_ddp"  # which no launcher starts that would end the others
    assert sorted(map(str, statuses)) == [str(-signal.SIGKILL)] * dies + ["0"] * (len(statuses) - dies), (
        errors[-3000:]
    )
    # torchrun's ranks write a line and its end one after another, and others may come between
    printed = re.sub(r"(?<!\n)(?=rank \d+:)", "\n", told).split("\n")
    assert sorted(filter(None, printed)) == sorted(lines), errors[-3000:]
