"""The notebooks run from top to bottom, print what they printed when they were committed, and keep the house form.

After a change that alters their outputs: ``python -m tests.test_notebooks`` runs and saves them. Read them again, since
the prose speaks of the numbers. Cells tagged ``solver-dependent`` may print other numbers with another SciPy.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.checkout import ROOT
from tests.test_docs import complaints

pytestmark = pytest.mark.thorough

REASON = 'the notebooks need nbformat, nbclient and pandas: pip install "topoplan[notebooks]"'
nbformat = pytest.importorskip("nbformat", reason=REASON)
nbclient = pytest.importorskip("nbclient", reason=REASON)
pytest.importorskip("pandas", reason=REASON)

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_LINES = 5
LONGEST_LINE = 120
OPEN = 'Open it with `pip install "topoplan[notebooks]"`, then `jupyter lab notebooks`.'
LARGEST_FILE = 600_000
SECONDS_PER_CELL = 300

LONG = (
    "2-trees-against-rings",
    "3-many-servers-three-phases",
    "4-one-percent-of-a-gradient",
    "6-which-job-goes-first",
)
"""Notebooks that run in make test-long; one of plans, one of training and one of figures run in make test-all."""

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell: nbformat.NotebookNode) -> str:
    """What a reader sees of a cell's outputs as text; a figure counts as its size and number of axes."""
    parts = [output.text if "text" in output else output.data["text/plain"] for output in cell.outputs]
    return "".join(parts)


def code_lines(source: str) -> int:
    """Return the lines of a cell; a text in triple quotes, such as a listing, counts as one."""
    python = re.sub(r'"""(.*?)"""', "text", source, flags=re.DOTALL)
    return len([line for line in python.splitlines() if line])


def run(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Run all cells in a fresh kernel, in a folder."""
    nbclient.NotebookClient(
        notebook, timeout=SECONDS_PER_CELL, record_timing=False, resources={"metadata": {"path": str(folder)}}
    ).execute()


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] * (path.stem in LONG)) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_runs_in_an_empty_folder_and_prints_what_was_committed(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    committed, notebook = read(path), read(path)
    folder = tmp_path / "run"
    folder.mkdir()
    run(notebook, folder)
    for before, after in zip(code_cells(committed), code_cells(notebook), strict=True):
        if "solver-dependent" not in before.metadata.get("tags", ()):
            assert printed(after) == printed(before), f"cell {before.id}; see the top of this file"
    assert list(folder.iterdir()) == []


def test_names_are_numbered_without_a_gap() -> None:
    names = [re.fullmatch(r"([1-9]\d*)-[a-z0-9-]+\.ipynb", path.name) for path in NOTEBOOKS]
    assert sorted(int(name[1]) for name in names if name) == list(range(1, len(NOTEBOOKS) + 1))
    assert len(NOTEBOOKS) >= 2


def test_a_listing_in_a_cell_counts_as_one_line() -> None:
    assert code_lines('TEXT = """\nGPU0  X\nGPU1  NV1\n"""\n\nprint(TEXT)') == 2


@each_notebook
def test_keeps_the_form_of_the_house(path: Path, tmp_path: Path) -> None:
    """It begins with its number, one question and how to open it, and is committed as run from top to bottom.

    Cells have at most five lines, and are counted 1, 2, 3, …; none ended in an error. The prose keeps to the rules of
    pages, figures are small enough for a repository, and no path names the machine that ran it.
    """
    notebook = read(path)
    nbformat.validate(notebook)
    number = path.name.split("-")[0]
    assert notebook.cells[0].cell_type == "markdown"
    assert re.match(rf"# {number}\. [^\n]+\?\n\n{re.escape(OPEN)}", notebook.cells[0].source)
    prose = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert len(re.findall(r"^# ", prose, re.MULTILINE)) == 1
    cells = code_cells(notebook)
    assert [cell.source for cell in cells if code_lines(cell.source) > MOST_LINES] == []
    lines = [line for cell in cells for line in cell.source.splitlines()]
    assert [line for line in lines if len(line) > LONGEST_LINE] == []
    page = tmp_path / "prose.md"
    page.write_text(prose, encoding="utf-8")
    assert complaints(page) == []
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
    assert notebook.metadata.kernelspec.name == "python3"
    assert path.stat().st_size <= LARGEST_FILE
    text = "\n".join([*(cell.source for cell in notebook.cells), *map(printed, cells)])
    assert re.findall(r"(?<![\w.:/])/(?:\w[\w.-]*/)+\w*", text) == []


if __name__ == "__main__":
    for path in [Path(name) for name in sys.argv[1:]] or NOTEBOOKS:
        notebook = read(path)
        run(notebook, ROOT)
        notebook.metadata.language_info = {"name": "python"}
        nbformat.write(notebook, path)
