"""What commands write: whole files or none, tables with stable columns, progress on a terminal."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from topoplan.errors import UsageError


def write_whole(path: str, text: str) -> None:
    """Write a file aside and rename it into place, so that nobody ever sees half of it.

    Raises
    ------
    UsageError
        The folder is not there or not writable.
    """
    target = Path(path)
    try:
        handle, aside = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(aside, 0o666 & ~_umask())
            os.replace(aside, target)
        except BaseException:
            os.unlink(aside)
            raise
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another place for it") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def print_json(value: object) -> None:
    """Print one JSON object."""
    print(json.dumps(value, ensure_ascii=False, allow_nan=False, indent=1))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell; numbers to the right, text to the left.

    Examples
    --------
    >>> print(table(("name", "GB/s"), [("a", "1.5"), ("bc", "10.0")]))
    name  GB/s
    a      1.5
    bc    10.0
    """
    columns = list(zip(header, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    numeric = [all(_is_number(cell) for cell in column[1:]) and len(column) > 1 for column in columns]
    lines = []
    for row in (header, *rows):
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _is_number(cell: str) -> bool:
    try:
        float(cell.rstrip("x%"))
    except ValueError:
        return cell in ("", "-")
    return True


def progress_line() -> Callable[[str], None] | None:
    """A callback that shows progress on one line of a terminal; None where there is no terminal."""
    if not sys.stderr.isatty():
        return None

    def show(text: str) -> None:
        sys.stderr.write(f"\r\x1b[K{text}" if text else "\r\x1b[K")
        sys.stderr.flush()

    return show
