"""Machine code that is kept is made anew when its file changes, so a file names what it takes from other files.

Of processes that start together one makes it.
"""

from __future__ import annotations

import ast
import fcntl
import importlib
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

import collectives.tables.compiled
from collectives.tables.compiled import compiled, compiled_by_one
from tests.support.checkout import ROOT
from topoplan.private_files import machine_code_folder

LOOPS = """
from collectives.tables.compiled import compiled, compiled_by_one

@compiled
def twice(number):
    return 2 * number

if __name__ == "__main__":
    with compiled_by_one(twice):
        twice(21)
    print(sum(twice.stats.cache_misses.values()))
"""
"""A file of loops that tells how often it has compiled."""


def taken(path: str) -> dict[str, Any]:
    """The numbers and dtypes that a file of compiled loops imports from files of this project, by name."""
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    names = [
        name.asname or name.name
        for statement in ast.parse((ROOT / path).read_text()).body
        if isinstance(statement, ast.ImportFrom)
        and str(statement.module).startswith(("collectives", "topoplan"))
        for name in statement.names
    ]
    return {
        name: vars(module)[name] for name in sorted(names) if isinstance(vars(module)[name], (int, np.dtype))
    }


@pytest.mark.parametrize(
    "path",
    [
        str(file.relative_to(ROOT))
        for room in ("collectives", "topoplan")
        for file in sorted((ROOT / room).rglob("*.py"))
        if "\n@compiled\n" in file.read_text()
    ],
)
def test_a_file_of_compiled_loops_changes_with_the_numbers_that_it_takes_from_others(path: str) -> None:
    numbers = taken(path)
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    assert getattr(module, "TAKEN_NUMBERS", 0) == (zlib.crc32(repr(numbers).encode()) if numbers else 0)


@pytest.mark.slow
def test_of_processes_that_start_together_one_compiles(tmp_path: Path) -> None:
    file = tmp_path / "loops.py"
    for text in (
        LOOPS,
        LOOPS.replace("2 * number", "number + number"),
    ):  # another file of loops is compiled anew
        file.write_text(text)
        ranks = [
            subprocess.Popen([sys.executable, str(file)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
            for _ in range(3)
        ]
        assert sorted(rank.communicate()[0].strip() for rank in ranks) == ["0", "0", "1"]


@pytest.mark.parametrize("who", ["others", "nobody else", "others below"])
def test_machine_code_that_others_may_write_is_not_loaded(
    who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(number: int) -> int:
        return 2 * number

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    machine_code_folder.cache_clear()
    tmp_path.chmod(0o777 if who == "others" else 0o700)
    path = compiled(twice).stats.cache_path  # type: ignore[attr-defined]
    assert (path is None) == (who == "others")
    if who == "others below":
        Path(path).chmod(0o775)
        assert compiled(twice).stats.cache_path is None  # type: ignore[attr-defined]
    machine_code_folder.cache_clear()


def test_a_stopped_compiler_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives.tables.compiled, "COMPILE_SECONDS", 0.1)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "stopped_loops.py").write_text(LOOPS)
    twice = importlib.import_module("stopped_loops").twice
    mark = Path(twice.stats.cache_path) / "stopped_loops.compiled"
    mark.parent.mkdir(exist_ok=True)
    with mark.open("a+") as held:
        fcntl.flock(held.fileno(), fcntl.LOCK_EX)
        with compiled_by_one(twice):
            assert twice(21) == 42
