"""The answers of commands in Python: rows, a dict, a data frame, a figure, a file, and the text of the command."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING

from topoplan.cli.output import Answer, printable, write_whole
from topoplan.errors import UsageError, warnings_first
from topoplan.units import counted

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

Row = dict[str, object]

MOST_HTML_ROWS = 24
"""Rows of a result in HTML; the rest is counted."""


class Result:
    """The answer of a command.

    Attributes
    ----------
    rows : list of dict
        A row for each thing found, with the keys of the command's CSV or JSON; bandwidths are in GB/s.
    notes : tuple of str
        Assumptions about the machine and the plans, warnings first.
    ok : bool
        False if the command would exit with 1: faults in a check, differences in a diff.

    Examples
    --------
    >>> import topoplan
    >>> found = topoplan.compare("dgx-1v", gpus=[1, 4, 5, 7])
    >>> found
    <Result of compare: 1 row>
    >>> found.rows[0]["trees"], found.rows[0]["nccl"], sorted(found.to_dict())
    (50.0, 50.0, ['collective', 'machine', 'notes', 'rows', 'summary'])
    """

    def __init__(self, command: str, answer: Answer, rows: Callable[[], list[Row]]) -> None:
        self.command, self._answer, self._rows = command, answer, rows
        self.notes = warnings_first(answer.notes)
        self.ok = answer.status == 0

    @property
    def rows(self) -> list[Row]:
        return self._rows()

    def to_dict(self) -> dict[str, object]:
        """Return the object that the command prints with ``--json``; UsageError if it has none."""
        if self._answer.value is None:
            raise UsageError(f"{self.command} has no JSON object; str(result) is its text")
        return self._answer.value()

    def to_dataframe(self) -> pandas.DataFrame:
        """Return the rows as a `pandas.DataFrame`; UsageError if pandas is not installed."""
        try:
            from pandas import DataFrame
        except ImportError:
            raise UsageError(
                "to_dataframe() needs pandas: pip install pandas; result.rows needs nothing"
            ) from None
        return DataFrame(self.rows)

    def plot(self) -> Figure:
        """Return the matplotlib figure that the command draws with ``--plot``; UsageError if it draws none."""
        if self._answer.figure is None:
            raise UsageError(f"{self.command} has no figure; plot result.rows or result.to_dataframe()")
        return self._answer.figure()

    def save(self, path: str | PathLike[str]) -> tuple[str, ...]:
        """Write the file of an export, a report or an order, whole or not at all, and return the names.

        UsageError if the command makes none, or it cannot be written.
        """
        if self._answer.file is None:
            raise UsageError(f"{self.command} makes no file; result.rows and result.to_dict() hold its data")
        write_whole(fspath(path), self._answer.file())
        return (fspath(path),)

    def __str__(self) -> str:
        """Return what the command prints, without notes; the file of an export, a report or an order."""
        if self._answer.file is not None:
            return self._answer.file()
        return "\n".join(self._answer.text()) if self._answer.text else ""

    def __repr__(self) -> str:
        what = (
            f"a file of {len(str(self)):,} characters"
            if self._answer.file
            else counted(len(self.rows), "row")
        )
        return f"<Result of {self.command}: {what}>"

    def _repr_html_(self) -> str:
        rows = self.rows
        if not rows:
            return f"<pre>{escape(str(self) if self._answer.text else repr(self))}</pre>"
        keys = [*dict.fromkeys(key for row in rows for key in row)]
        cells = [[printable(str(row.get(key, ""))) for key in keys] for row in rows[:MOST_HTML_ROWS]]
        lines = [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in cells]
        head = "".join(f"<th>{escape(key)}</th>" for key in keys)
        more = f"<p>… and {len(rows) - len(cells)} more rows</p>" if len(rows) > len(cells) else ""
        return f"<table><tr>{head}</tr>{''.join(lines)}</table>{more}"


class ExportedFiles(Result):
    """The file of an export, or several: ``files`` are their contents by the end of the name, empty for one file."""

    files: Mapping[str, bytes]

    def save(self, path: str | PathLike[str]) -> tuple[str, ...]:
        if not self.files:
            return super().save(path)
        names = {end: str(Path(path).with_suffix("")) + end for end in self.files}
        for end, content in self.files.items():
            write_whole(names[end], content)
        return tuple(names.values())

    def __repr__(self) -> str:
        return f"<Result of export: {counted(len(self.files), 'file')}>" if self.files else super().__repr__()
