"""The notebooks run from top to bottom, print what they printed when they were committed, and keep the house form.

After a change that alters their outputs: ``jupyter execute --inplace notebooks/*.ipynb``, and read them again, since
the prose speaks of the numbers. Cells tagged ``solver-dependent`` may print other numbers with another SciPy.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

from tests.support.checkout import ROOT

pytestmark = pytest.mark.thorough

REASON = 'the notebooks need nbformat and nbclient: pip install "topoplan[notebooks]"'
nbformat = pytest.importorskip("nbformat", reason=REASON)
nbclient = pytest.importorskip("nbclient", reason=REASON)

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LONGEST_FUNCTION = 8
LARGEST_FILE = 600_000
SECONDS_PER_CELL = 300

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell: nbformat.NotebookNode) -> str:
    """What a reader sees of a cell's outputs as text; a figure counts as its size and number of axes."""
    parts = [output.text if "text" in output else output.data["text/plain"] for output in cell.outputs]
    return "".join(parts)


def long_functions(source: str) -> list[str]:
    """Names of the functions and classes of a cell that take more lines than they may."""
    python = "\n".join("" if line.startswith(("%", "!")) else line for line in source.splitlines())
    return [
        node.name
        for node in ast.walk(ast.parse(python))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= LONGEST_FUNCTION
    ]


@each_notebook
def test_runs_in_an_empty_folder_and_prints_what_was_committed(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fresh kernel runs every cell without an error; texts and figures are those that the prose was written for."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    committed, notebook = read(path), read(path)
    folder = tmp_path / "run"
    folder.mkdir()
    nbclient.NotebookClient(
        notebook, timeout=SECONDS_PER_CELL, resources={"metadata": {"path": str(folder)}}
    ).execute()
    for before, after in zip(code_cells(committed), code_cells(notebook), strict=True):
        if "solver-dependent" not in before.metadata.get("tags", ()):
            assert printed(after) == printed(before), f"cell {before.id}; see the top of this file"
    assert list(folder.iterdir()) == []


def test_names_are_numbered_without_a_gap() -> None:
    """1-…, 2-…, in the order in which they are to be read."""
    names = [re.fullmatch(r"([1-9]\d*)-[a-z0-9-]+\.ipynb", path.name) for path in NOTEBOOKS]
    assert sorted(int(name[1]) for name in names if name) == list(range(1, len(NOTEBOOKS) + 1))
    assert len(NOTEBOOKS) >= 2


def test_a_function_of_nine_lines_is_found_and_one_of_eight_is_not() -> None:
    """The check above counts the line of the head and does not stumble over magics."""
    body = "%matplotlib inline\nprint(1)\ndef f():\n" + "    x = 1\n" * 7
    assert long_functions(body) == []
    assert long_functions(body + "    y = 2\n") == ["f"]


@each_notebook
def test_keeps_the_form_of_the_house(path: Path) -> None:
    """It begins with its number and one question, has short functions, and is committed as run from top to bottom.

    Cells are counted 1, 2, 3, …, none ended in an error, figures are small enough for a repository, and no path names
    the machine that ran it.
    """
    notebook = read(path)
    nbformat.validate(notebook)
    number = path.name.split("-")[0]
    assert notebook.cells[0].cell_type == "markdown"
    assert re.match(rf"# {number}\. [^\n]+\?(\n|$)", notebook.cells[0].source)
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert len(re.findall(r"^# ", prose, re.MULTILINE)) == 1
    cells = code_cells(notebook)
    assert [name for cell in cells for name in long_functions(cell.source)] == []
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
    assert notebook.metadata.kernelspec.name == "python3"
    assert path.stat().st_size <= LARGEST_FILE
    text = "\n".join([*(cell.source for cell in notebook.cells), *map(printed, cells)])
    assert re.findall(r"(?<![\w.:/])/(?:\w[\w.-]*/)+\w*", text) == []
