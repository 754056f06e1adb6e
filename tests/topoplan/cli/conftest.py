"""Fixtures of the tests of commands: a command that succeeds, its JSON, and one that is refused."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import topoplan
from tests.support.checkout import Run

Told = Callable[..., Any]
"""The fixture ``told``."""

PAIR = "     GPU0 GPU1 CPU Affinity\nGPU0  X   NV2  0-15\nGPU1 NV2   X   0-15\n"
"""The text of nvidia-smi topo -m for two GPUs, which leaves the speed of the links open."""


@pytest.fixture
def run(run: Run) -> Run:
    """Run a command, as words or as one line; return exit status, stdout and stderr."""

    def call(*arguments: str, stdin: str | bytes = "") -> tuple[int, str, str]:
        words = shlex.split(arguments[0]) if len(arguments) == 1 else arguments
        return run(*words, stdin=stdin)

    return call


@pytest.fixture
def done(run: Run) -> Callable[..., str]:
    """Run a command that must succeed, or end with ``status``; return what it prints, errors if there are any."""

    def call(*arguments: str, status: int = 0, stdin: str | bytes = "") -> str:
        ended, out, err = run(*arguments, stdin=stdin)
        assert ended == status, err
        if status == 2:
            assert (out, err.count("\n")) == ("", 1), err
        if status == 0:
            assert all(line.startswith("note: ") for line in err.splitlines()), err
            return out
        return err or out

    return call


@pytest.fixture
def told(done: Callable[..., str]) -> Told:
    """Run a command with --json; return the object, without infinity and NaN, which are not JSON."""

    def call(line: str, *, status: int = 0, stdin: str | bytes = "") -> Any:
        text = done(f"{line} --json", status=status, stdin=stdin)
        return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    return call


@pytest.fixture
def refused(done: Callable[..., str]) -> Callable[..., str]:
    """Run a command that must be refused; return the line on stderr."""
    return lambda *arguments, stdin="": done(*arguments, status=2, stdin=stdin)


@pytest.fixture(scope="session")
def plan_text() -> str:
    """The plan file of Blink's allocation 1, 4, 5, 7."""
    return topoplan.plan(topoplan.load("dgx-1v"), gpus=[1, 4, 5, 7]).to_json()


@pytest.fixture
def plan_file(tmp_path: Path, plan_text: str) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(plan_text)
    return path
