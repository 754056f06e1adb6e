"""Fixtures of the tests of commands: a command that succeeds, and one that is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import topoplan
from tests.support.checkout import Run


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
