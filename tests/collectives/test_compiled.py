"""Machine code that is kept is made anew when its file changes, so a file names what it takes from other files."""

from __future__ import annotations

import ast
import importlib
import zlib

import pytest

from tests.support.checkout import ROOT


def taken(path: str) -> dict[str, int]:
    """The numbers that a file of compiled loops imports from files of this project, by name."""
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    names = [
        name.asname or name.name
        for statement in ast.parse((ROOT / path).read_text()).body
        if isinstance(statement, ast.ImportFrom)
        and str(statement.module).startswith(("collectives", "topoplan"))
        for name in statement.names
    ]
    return {name: vars(module)[name] for name in sorted(names) if isinstance(vars(module)[name], int)}


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
