"""What commands print, JSON, notes, errors and tables, and the files that they write.

A target is refused before the work begins, then written whole or not at all.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import logging
import math
import os
import re
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from topoplan.bounds.upper_bound import Bound, in_network_bound
from topoplan.cli.arguments import PLOT_OPTIONS, first_given
from topoplan.errors import UsageError
from topoplan.fabric.fabric import channel_words
from topoplan.hosts.notes import kind_of, warnings_first
from topoplan.plans.plan import Plan, Plans
from topoplan.units import bus_words, number_ranges

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from topoplan.plot.canvas import Look

LONGEST = 600
"""Characters of an error that are shown; values from a file may be of any length."""

STARTED = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"}
"""Variables of processes that mpiexec started."""

WIDEST = 120
"""Columns of a line on a terminal, or fewer where it has fewer."""


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


def verdict(channels: Sequence[str], gap: float, without: str = "") -> str:
    """What is proved of a rate: over which wires it is the best, or how far it is below the bound.

    ``without`` says what the bound leaves out, as `in_network_words` does.

    Examples
    --------
    >>> verdict(("nvlink",), 0.0), verdict(("nvlink",), 0.25)
    ('optimal over nvlink, proved', '25.00% below the bound')
    """
    told = f"{gap:.2%} below the bound" if gap else f"optimal over {channel_words(channels)}, proved"
    return f"{told} {without}" if without else told


def in_network_words(proved: Plan | Bound) -> str:
    """What in-network reduction could do beside a bound that leaves it out; empty where it could do no more.

    Examples
    --------
    >>> import topoplan
    >>> in_network_words(topoplan.plan("dgx-h100"))
    'without in-network reduction; with it at most 450 GB/s, 787.5 of bus bandwidth'
    """
    beyond = in_network_bound(proved)
    if beyond is None:
        return ""
    bus = bus_words(beyond, proved.collective, len(proved.ranks))
    return f"without in-network reduction; with it at most {beyond:.6g} GB/s{bus}"


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


def print_csv(rows: Sequence[Mapping[str, object]]) -> None:
    """Print objects as comma-separated values (RFC 4180, lines ended as everywhere here), their keys first.

    Nothing stands for None and for infinite rates.
    """
    keys = dict.fromkeys(key for row in rows for key in row)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(keys)
    for row in rows:
        cells = (row.get(key) for key in keys)
        writer.writerow("" if isinstance(cell, float) and not math.isfinite(cell) else cell for cell in cells)


def terminal_width() -> int | None:
    """Columns of a line where stdout is a terminal: `WIDEST`, or fewer where it has fewer; None elsewhere.

    What mpiexec starts has a terminal of its own, wherever its output goes.
    """
    if sys.stdout is None or not sys.stdout.isatty() or STARTED & os.environ.keys():
        return None
    return min(WIDEST, shutil.get_terminal_size().columns)


class WrappedText(io.TextIOBase):
    """What a terminal gets: lines wrapped between words at `WIDEST` columns or its own width.

    What does not fit goes below the beginning of the last column of its line, or is indented by four spaces.

    Parameters
    ----------
    stream : text stream
    width : int
        Columns.
    """

    def __init__(self, stream: TextIO, width: int) -> None:
        super().__init__()
        self._stream, self._width, self._begun = stream, width, ""

    def write(self, text: str) -> int:
        """Write the lines that end in the text, and keep what follows them."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._stream.write(f"{wrapped(line, self._width)}\n")
        return len(text)

    def flush(self) -> None:
        """Write what was kept too."""
        self._stream.write(self._begun)
        self._begun = ""
        self._stream.flush()

    def isatty(self) -> bool:
        """Whether it is a terminal: the stream is asked."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """That of the stream."""
        return self._stream.fileno()


def wrapped(line: str, width: int) -> str:
    """A line as lines of at most so many columns, words whole; as it is where a word, such as a path, is too long.

    Examples
    --------
    >>> print(wrapped("bound  50 GB/s: the links between them carry 300 GB/s", 30))
    bound  50 GB/s: the links
           between them carry 300
           GB/s
    """
    if len(line) <= width:
        return line
    gaps = [match.end() for match in re.finditer(r" {2,}", line) if match.end() <= width // 2]
    indent = max(gaps, default=4)
    if max(map(len, line.split())) > width - indent:
        return line
    return "\n".join(
        textwrap.wrap(
            line,
            width,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
            expand_tabs=False,
        )
    )


def _is_number(cell: str) -> bool:
    try:
        float(cell.rstrip("x%"))
    except ValueError:
        return cell in ("", "-")
    return True


MOST_SETS = 70
"""Sets of GPUs that a line of text lists: all that have equal wires on machines of 8 GPUs."""


def listed_sets(head: str, sets: Sequence[Sequence[int]], number: int, *, width: int = 116) -> str:
    """Sets of GPUs in lines under a head; of many the first.

    Parameters
    ----------
    head : str
    sets : sequence of sequence of int
        Those that are known, which may be fewer than there are.
    number : int
        How many there are.
    width : int
        Columns.

    Examples
    --------
    >>> listed_sets("class 1: ", [(0, 1, 2, 3), (4, 5, 6, 7)], 2)
    'class 1: 0-3  4-7'
    """
    texts = [number_ranges(gpus) for gpus in sets[:MOST_SETS]]
    if number > len(texts):
        texts.append(f"… and {number - len(texts):,} more (--json, --csv)")
    return textwrap.fill(
        "  ".join(texts),
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
    )


def check_target(path: str | None, what: str) -> None:
    """Refuse a place where no file can be written, before time is spent on what should go there.

    Parameters
    ----------
    path : str or None
        None where nothing is to be written, ``-`` for stdout.
    what : str
        The option, for the message.

    Raises
    ------
    UsageError
        The name is empty, or a folder; its folder is not there; either is not writable.
    """
    if path in (None, "-"):
        return
    target = Path(path)
    if not path:
        raise UsageError(f"the file name after {what} is empty; name a file")
    if target.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder; name a file in it")
    if not target.parent.is_dir():
        raise UsageError(
            f"cannot write {path}: there is no folder {target.parent}; make it, or choose another"
        )
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise UsageError(f"cannot write {path}: permission denied; choose another place for it")


def write_whole(path: str, text: str | bytes) -> None:
    """Write a file, a text in UTF-8, aside and rename it into place, so that nobody ever sees half of it.

    What is there already keeps its permissions; a link is followed; a device or a pipe is written to.

    Raises
    ------
    UsageError
        It cannot be written; an older file is left as it was.
    """
    content = text.encode() if isinstance(text, str) else text
    target = Path(path)
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content)
            return
        target = Path(os.path.realpath(path))
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
        handle, aside = tempfile.mkstemp(prefix=".", suffix=".part", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(aside, mode)
            os.replace(aside, target)
        except BaseException:
            os.unlink(aside)
            raise
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another place for it") from None


def check_plot(options: argparse.Namespace) -> None:
    """Refuse a figure that could not be written: as `check_target`, or there is no such format, font or size."""
    if options.plot is None:
        given = first_given(options, dict.fromkeys(PLOT_OPTIONS))
        if given:
            raise UsageError(f"{given} belongs to a figure; add --plot F.png, or leave {given} out")
        return
    check_target(options.plot, "--plot")
    # The first use on a machine logs that fonts are being listed; nothing belongs on stderr.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from topoplan.plot.canvas import check_font, check_format, new_figure

    look = _look(options)
    check_format(new_figure(1, 1), options.plot, look.file_format)
    if look.font is not None:
        check_font(look.font)


def draw_plot(options: argparse.Namespace, draw: Callable[[], Figure]) -> None:
    """Draw the figure that ``--plot`` and its options ask for, if they do."""
    if options.plot:
        from topoplan.plot.canvas import write_figure

        write_figure(draw, options.plot, _look(options))


def _look(options: argparse.Namespace) -> Look:
    from topoplan.plot.canvas import PLAIN, Look

    return Look(
        size=options.plot_size,
        dpi=PLAIN.dpi if options.dpi is None else options.dpi,
        font=options.font,
        file_format=options.plot_format,
    )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
