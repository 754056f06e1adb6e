"""What commands print: JSON, notes, errors, tables with stable columns."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TextIO

from topoplan.hosts.notes import kind_of, warnings_first
from topoplan.plans.plan import Plans

LONGEST = 600
"""Characters of an error that are shown; values from a file may be of any length."""


def printable(text: str) -> str:
    """One line, with ``?`` for what a terminal would obey and not show: texts of a file are anybody's.

    Examples
    --------
    >>> printable("Tesla\\n V100 \\x1b[31m")
    'Tesla V100 ?[31m'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def print_error(prefix: str, message: str) -> None:
    """Print an error as one line on stderr; of a long one head and tail, where cause and remedy stand."""
    line = printable(message)
    if len(line) > LONGEST:
        line = f"{line[: LONGEST // 2]} … {line[-LONGEST // 2 :]}"
    # in one write, since the ranks of a job share stderr
    print(f"{prefix}: {line}\n", end="", file=sys.stderr)


def print_json(value: dict[str, object]) -> None:
    """Print one JSON object, in ASCII: any terminal and any pipe can take it."""
    print(json.dumps(value, allow_nan=False, indent=1))


def plan_notes(plan: Plans) -> list[str]:
    """What the reader of a plan should know, of its machine and of itself, each note once."""
    return list(dict.fromkeys((*plan.topology.notes, *plan.notes)))


def print_notes(*notes: str, file: TextIO | None = None) -> None:
    """Print what the reader should know beside the result, each note once, warnings first; on stdout unless told."""
    for note in warnings_first(notes):
        line = printable(note)
        print(line if kind_of(note) == "warning" else f"note: {line}", file=file)


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    Examples
    --------
    >>> counted(1, "GPU"), counted(8, "GPU")
    ('1 GPU', '8 GPUs')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, gap: int = 2) -> str:
    """Columns padded to their widest cell, ``gap`` spaces between them; numbers to the right, text to the left.

    Examples
    --------
    >>> print(table(("name", "GB/s"), [("a", "1.5"), ("bc", "10.0")]))
    name  GB/s
    a      1.5
    bc    10.0
    """
    rows = [[cell if cell.isprintable() else printable(cell) for cell in row] for row in rows]
    columns = list(zip(header, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    numeric = [all(_is_number(cell) for cell in column[1:]) and len(column) > 1 for column in columns]
    lines = []
    for row in (header, *rows):
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        lines.append((" " * gap).join(cells).rstrip())
    return "\n".join(lines)


def _is_number(cell: str) -> bool:
    try:
        float(cell.rstrip("x%"))
    except ValueError:
        return cell in ("", "-")
    return True
