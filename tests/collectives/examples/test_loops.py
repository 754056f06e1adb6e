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
from tests.support.ports import free_port

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


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one == "plain_loop" else pytest.mark.thorough) for one in LOOPS]
)
def test_a_loop_prints_what_its_docstring_says(name: str, tmp_path: Path) -> None:
    """Every line that is not printed once, in any order, is wrong."""
    command, lines = LOOPS[name]
    if name != "plain_loop":
        pytest.importorskip("torch", reason="PyTorch is not installed")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    words = shlex.split(command)
    if words[0].startswith("RANK="):
        told, errors, statuses = each_by_itself(words[words.index("-m") :], 3, tmp_path, environment)
        assert sorted(statuses) == [-signal.SIGKILL, 0, 0], errors[-3000:]
    else:
        if "--max-restarts" in words:
            # else a second life may find in torchrun's store what the first one has left there
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        launcher = {"python": [], "torchrun": ["-m", "torch.distributed.run", "--standalone"]}[words[0]]
        done = subprocess.run(
            [sys.executable, *launcher, *words[1:]],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        told, errors = done.stdout, done.stderr
        assert done.returncode == 0, errors[-3000:]
    # torchrun's ranks write a line and its end one after another, and others may come between
    printed = re.sub(r"(?<!\n)(?=rank \d+:)", "\n", told).split("\n")
    assert sorted(filter(None, printed)) == sorted(lines), errors[-3000:]


def each_by_itself(
    module: list[str], ranks: int, folder: Path, environment: dict[str, str]
) -> tuple[str, str, list[int]]:
    """What processes print and complain of that a shell starts, with the variables of torchrun, and how they end."""
    environment = environment | {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    started = [
        subprocess.Popen(
            [sys.executable, *module],
            cwd=folder,
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        texts = [one.communicate(timeout=300) for one in started]
    finally:
        for one in started:
            one.kill()
    return "".join(out for out, _ in texts), "".join(err for _, err in texts), [one.wait() for one in started]
