"""Scenarios of one job: functions of a rank program that every rank calls in order, each a test of its own.

Starting torch takes seconds, so one start of all ranks serves all scenarios of a program.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.checkout import ROOT

_REGISTERED: list[tuple[tuple[int, ...], Callable[[], None]]] = []


def scenario(*ranks: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a function of a rank program for jobs of so many ranks."""

    def register(call: Callable[[], None]) -> Callable[[], None]:
        _REGISTERED.append((ranks, call))
        return call

    return register


def run_scenarios(folder: str, rank: int, ranks: int) -> None:
    """Call each scenario, and write the traceback of each that fails into ``FOLDER/RANK.json``."""
    outcomes: dict[str, str] = {}
    for among, call in _REGISTERED:
        if ranks in among and call.__module__ == "__main__":
            try:
                call()
                outcomes[call.__name__] = ""
            except Exception:
                outcomes[call.__name__] = traceback.format_exc()
            Path(folder, f"{rank}.json").write_text(json.dumps(outcomes), encoding="utf-8")


def scenarios(program: str, ranks: int) -> list[str]:
    """Return the names of a program's scenarios for so many ranks, without importing it."""
    source = (ROOT / "tests" / "jobs" / program).read_text(encoding="utf-8")
    found = re.findall(r"^@scenario\(([\d, ]+)\)\ndef (\w+)", source, re.MULTILINE)
    return [name for among, name in found if str(ranks) in among.split(", ")]


def check_scenario(outcomes: list[dict[str, Any]], name: str) -> None:
    """Fail with the tracebacks of the ranks on which a scenario failed."""
    failed = [
        f"rank {rank}: {one.get(name, 'not run')}" for rank, one in enumerate(outcomes) if one.get(name) != ""
    ]
    assert not failed, "\n".join(failed)
