"""Print the answers of commands as text, JSON or CSV, write their files and figures, and show errors and progress.

A target is refused before the work begins, then written as a whole or not at all. Progress is one line on a terminal,
drawn by a thread from the second second on and erased afterwards; the result does not depend on it.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import math
import os
import re
import shutil
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TextIO, TypeVar

from topoplan.cli.arguments import PLOT_OPTIONS, first_set_option
from topoplan.errors import UsageError, kind_of, warnings_first
from topoplan.plans.plan import ALL_TO_ALL, Plan, Plans, collective_name
from topoplan.solve.upper_bound import Bound, in_network_bound
from topoplan.units import counted, is_number, labelled, name_ranges, number_ranges, plural, rate_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from topoplan.model.expected_times import Quickest
    from topoplan.operate.plot.canvas import Look

MAX_ERROR_LENGTH = 600
"""Most characters of an error; values from a file may be of any length."""

MPI_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
"""Variables in which MPI launchers pass a process its rank."""

MAX_COLUMNS = 120
"""Columns of a line on a wide terminal."""


def printable(text: str) -> str:
    """Return a text as one line, with ``?`` for control characters: a file may hold any text.

    >>> printable("Tesla\\n V100 \\x1b[31m")
    'Tesla V100 ?[31m'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def print_error(prefix: str, message: str) -> None:
    """Print an error as one line on stderr; a long one keeps head and tail, with cause and remedy."""
    line = printable(message)
    if len(line) > MAX_ERROR_LENGTH:
        line = f"{line[: MAX_ERROR_LENGTH // 2]} … {line[-MAX_ERROR_LENGTH // 2 :]}"
    # in one write, since the ranks of a job share stderr
    print(f"{prefix}: {line}\n", end="", file=sys.stderr)


Record = TypeVar("Record")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of a command, in each form that its options can ask for.

    ``text`` yields lines or paragraphs; without it the file is the answer, and stdout its place unless -o names one.
    ``rows`` are for ``--csv``, ``value`` for ``--json``, ``file`` for -o and ``figure`` for ``--plot``. ``written`` are
    files that the command wrote itself, None for files that were not asked for.
    """

    text: Callable[[], Iterable[str]] | None = None
    value: Callable[[], dict[str, object]] | None = None
    rows: Callable[[], Sequence[Mapping[str, object]]] | None = None
    file: Callable[[], str] | None = None
    figure: Callable[[], Figure] | None = None
    notes: Iterable[str] = ()
    written: Sequence[str | None] = ()
    status: int = 0


def check_outputs(options: argparse.Namespace) -> None:
    """Refuse two answers on stdout and targets that cannot be written, before any work."""
    given = vars(options)
    asked = {"-o -": given.get("output") == "-", "--json": given.get("json"), "--csv": given.get("csv")}
    printing = [name for name, wanted in asked.items() if wanted]
    if len(printing) > 1:
        raise UsageError(f"{printing[0]} and {printing[1]} both print to stdout; leave one of them out")
    check_target(given.get("output"), "-o")
    if "plot_size" in given:
        check_plot(options)


def print_answer(answer: Answer, options: argparse.Namespace) -> int:
    """Write the files of an answer, print the requested form, and return the exit status."""
    given = vars(options)
    output, plot = given.get("output"), given.get("plot")
    if plot and answer.figure:
        draw_plot(options, answer.figure)
    if answer.file and (output == "-" or (output is None and answer.text is None)):
        sys.stdout.write(answer.file())
        if answer.text is None:
            print_notes(*answer.notes, file=sys.stderr)
        return answer.status
    if answer.file and output:
        write_whole(output, answer.file())
    written = [f"written: {path}" for path in (*answer.written, output, plot) if path]
    if given.get("csv") and answer.rows:
        print_csv(answer.rows())
    elif given.get("json") and answer.value:
        print_json(answer.value())
    else:
        text = answer.text() if answer.text else ()
        for part in (*text, *note_lines(*answer.notes, every=given.get("notes", True)), *written):
            print(part)
    return answer.status


class Column(NamedTuple, Generic[Record]):
    """One column of records.

    ``head`` is its head in the table and ``key`` its key in JSON and CSV; a column without one of them is absent there.
    ``value`` is an attribute of the record (``key`` by default) or a function of it, and ``form`` how the table shows
    it: a format or a function of the value. The table shows None as a dash.
    """

    head: str | None
    key: str = ""
    value: str | Callable[[Record], object] = ""
    form: str | Callable[[Any], str] = ""

    def of(self, record: Record) -> object:
        """Return the value of a record."""
        return self.value(record) if callable(self.value) else attrgetter(self.value or self.key)(record)

    def cell(self, record: Record) -> str:
        """Return the value as the table shows it."""
        value = self.of(record)
        if value is None:
            return "-"
        return self.form(value) if callable(self.form) else format(value, self.form)


def records_of(columns: Sequence[Column[Record]], records: Iterable[Record]) -> list[dict[str, object]]:
    """Return the objects of records for JSON and CSV."""
    return [{column.key: column.of(one) for column in columns if column.key} for one in records]


def table_of(columns: Sequence[Column[Record]], records: Sequence[Record]) -> str:
    """Return the table of records.

    >>> from fractions import Fraction
    >>> print(table_of((Column("half", value="numerator"), Column("GB/s", "rate", float, ".2f")), [Fraction(3, 2)]))
    half  GB/s
       3  1.50
    """
    shown = [column for column in columns if column.head is not None]
    return table([str(column.head) for column in shown], [[c.cell(one) for c in shown] for one in records])


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, gap: int = 2) -> str:
    """Return columns padded to their widest cell with ``gap`` spaces between; numbers to the right, text to the left.

    >>> print(table(("name", "GB/s"), [("a", "1.5"), ("bc", "10.0")]))
    name  GB/s
    a      1.5
    bc    10.0
    """
    lines = [header, *([cell if cell.isprintable() else printable(cell) for cell in row] for row in rows)]
    padded = []
    for cells in zip(*lines, strict=True):
        wide = max(map(len, cells))
        numeric = len(cells) > 1 and all(map(is_number, cells[1:]))
        padded.append([cell.rjust(wide) if numeric else cell.ljust(wide) for cell in cells])
    return "\n".join((" " * gap).join(row).rstrip() for row in zip(*padded, strict=True))


def print_json(value: dict[str, object]) -> None:
    """Print one JSON object in ASCII, which every terminal and pipe takes."""
    print(json.dumps(value, allow_nan=False, indent=1))


def print_csv(rows: Sequence[Mapping[str, object]]) -> None:
    """Print objects as comma-separated values (RFC 4180, but lines end with LF), keys first.

    None and infinite rates are empty; lists of GPUs and of names are ranges.
    """

    def cell(value: object) -> object:
        if isinstance(value, list):
            named = all(isinstance(one, str) for one in value)
            return " ".join(name_ranges(value)) if named else number_ranges(value)
        return "" if isinstance(value, float) and not math.isfinite(value) else value

    keys = dict.fromkeys(key for row in rows for key in row)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(keys)
    for row in rows:
        writer.writerow(cell(row.get(key)) for key in keys)


def note_lines(*notes: str, every: bool = True) -> Iterator[str]:
    """Yield the lines of notes, each once, warnings first.

    Without ``every``: warnings, the NICs used and left out, and the number of the others.

    >>> list(note_lines("warning: gpu0 has no NVLink", "PCIe assumed", every=False))
    ['warning: gpu0 has no NVLink', 'notes: 1; --notes prints it']
    """
    ordered = warnings_first(notes)
    others = [note for note in ordered if kind_of(note) != "warning"]
    yield from map(printable, ordered[: len(ordered) - len(others)])
    if every:
        yield from (f"note: {printable(note)}" for note in others)
        return
    yield from (f"note: {printable(note)}" for note in others if kind_of(note) == "nics")
    others = [note for note in others if kind_of(note) != "nics"]
    if others:
        yield f"notes: {len(others)}; --notes prints {'it' if len(others) == 1 else 'them'}"


def print_notes(*notes: str, file: TextIO | None = None) -> None:
    """Print notes, each once, warnings first; on stdout by default."""
    for line in note_lines(*notes):
        print(line, file=file)


def plan_notes(plan: Plans) -> list[str]:
    """Return the notes of a plan and of its machine, each once."""
    return list(dict.fromkeys((*plan.topology.notes, *plan.notes)))


DEFAULT_LINES = 24
"""Most lines of an answer without ``--all``."""

MAX_NAMED = 4
"""Most links or parts named in a sentence."""


def rate_verdict(gap: float, without: str = "") -> str:
    """Return what is proved of a rate: optimal, or the gap to the upper bound.

    ``without`` says what the bound leaves out, see `in_network_words`.

    >>> rate_verdict(0.0), rate_verdict(0.25)
    ('provably optimal', '25.00 % below the upper bound')
    """
    verdict = f"{100 * gap:.2f} % below the upper bound" if gap else "provably optimal"
    return f"{verdict} {without}" if without else verdict


def in_network_words(proved: Plan | Bound) -> tuple[str, str]:
    """Return what a bound leaves out, and the bound with it, if in-network reduction could exceed it; else empty texts.

    >>> import topoplan
    >>> in_network_words(topoplan.plan("dgx-h100"))[1]
    'at most 450 GB/s, busbw 787.5 GB/s with in-network reduction (NVLS, SHARP)'
    >>> in_network_words(topoplan.plan("dgx-1v"))
    ('', '')
    """
    beyond = in_network_bound(proved)
    if beyond is None:
        return "", ""
    what = "in-network reduction"
    return f"without {what}", f"at most {rates_of(beyond, proved)} with {what} (NVLS, SHARP)"


def rates_of(gbps: float, of: Plans | Bound, *, digits: int = 6) -> str:
    """Return algorithm bandwidth and bus bandwidth of a plan or bound.

    >>> import topoplan
    >>> rates_of(50.0, topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7]))
    '50 GB/s, busbw 75 GB/s'
    """
    return rate_words(gbps, of.collective, len(of.ranks), digits=digits)


def microseconds(seconds: float) -> str:
    """Return seconds in microseconds, as tables have them."""
    return f"{seconds * 1e6:.1f}"


def expected_words(one: Quickest) -> str:
    """Return where expected times come from."""
    if one.nccl is None:
        return "NCCL's time is not known here; ours by the model"
    if not one.nccl.measured:
        return "by models alone, since no measurements of such a machine are published"
    return (
        "NCCL and other kernels as published measurements have them; ours is expected to be no quicker than these "
        "kernels"
    )


def step_lines(steps: Sequence[str]) -> list[str]:
    """Return the next step, or the numbered next steps, of a diagnosis.

    >>> step_lines(["nothing to do"]), step_lines(["reset the GPU", "reseat it"])
    (['next step    nothing to do'], ['next steps   1. reset the GPU', '             2. reseat it'])
    """
    if len(steps) == 1:
        return labelled(("next step", steps[0]))
    numbered = [f"{number}. {step}" for number, step in enumerate(steps, 1)]
    return labelled(*zip(("next steps", *[""] * (len(numbered) - 1)), numbered, strict=True))


def folded(rows: Sequence[Record], most: int, *, every: bool = False) -> tuple[Sequence[Record], int]:
    """Return the rows that ``most`` lines show, and how many are left out; the line on these counts too.

    >>> folded("abcde", 3), folded("abc", 3), folded("abcde", 3, every=True)
    (('ab', 3), ('abc', 0), ('abcde', 0))
    """
    if every or len(rows) <= most:
        return rows, 0
    shown = max(1, most - 1)
    return rows[:shown], len(rows) - shown


def folded_line(left: int, noun: str) -> list[str]:
    """Return the line that counts rows left out; no line for none.

    >>> folded_line(28, "tree"), folded_line(1, "class"), folded_line(0, "tree")
    (['… and 28 more trees; --all prints them'], ['… and 1 more class; --all prints it'], [])
    """
    if not left:
        return []
    what, pronoun = (noun, "it") if left == 1 else (plural(noun), "them")
    return [f"… and {left:,} more {what}; --all prints {pronoun}"]


def thinned(rows: Sequence[Record], most: int, *, every: bool = False) -> Sequence[Record]:
    """Return every second, third, … of the rows, the last one among them, so that there are at most ``most``.

    >>> thinned("abcdefg", 4), thinned("abcdefg", 3), thinned("abcdefg", 3, every=True)
    ('aceg', 'adg', 'abcdefg')
    """
    step = 1 if every else max(1, -(-len(rows) // max(1, most)))
    return rows[(len(rows) - 1) % step :: step]


def sizes_table(
    columns: Sequence[Column[Record]], rows: Sequence[Record], most: int, *, every: bool
) -> Iterator[str]:
    """Yield the table of rows by size, `thinned`, and how many it has of all; nothing without rows."""
    shown = thinned(rows, most, every=every)
    if shown:
        yield table_of(columns, shown)
    if len(shown) < len(rows):
        yield f"… {len(shown)} of {len(rows)} sizes; --all prints all"


def few(names: Sequence[str], *, separator: str = " ", most: int = MAX_NAMED) -> str:
    """Return the first of many names, and how many there are more.

    >>> few(["a>b", "b>c", "c>d", "d>e", "e>f"]), few(["a>b", "b>c"])
    ('a>b b>c c>d d>e and 1 more', 'a>b b>c')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{separator.join(names[:most])}{more}"


def terminal_width() -> int | None:
    """Return the columns of a line if stdout is a terminal, at most `MAX_COLUMNS`; else None.

    A process that mpiexec started has a terminal of its own, wherever its output goes, and gets None.
    """
    if sys.stdout is None or not sys.stdout.isatty() or os.environ.keys() & set(MPI_RANK_VARIABLES):
        return None
    return min(MAX_COLUMNS, shutil.get_terminal_size().columns)


MAX_PRINTED_SETS = 70
"""Most sets of GPUs in a line of text: all with equal links on machines of 8 GPUs."""


def gpu_set_lines(head: str, sets: Sequence[Sequence[int]], number: int, *, width: int = 116) -> str:
    """Return sets of GPUs in lines under a head; ``number`` counts all of them, ``sets`` may hold fewer.

    >>> gpu_set_lines("class 1: ", [(0, 1, 2, 3), (4, 5, 6, 7)], 2)
    'class 1: 0-3  4-7'
    """
    texts = [number_ranges(gpus) for gpus in sets[:MAX_PRINTED_SETS]]
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
    """Refuse a path that cannot be written, before any work: UsageError with the remedy.

    ``path`` may be None (nothing is written) or ``-`` (stdout); ``what`` is the option, for the message.
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
            f"cannot write {path}: folder {target.parent} does not exist; make it, or choose another"
        )
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise UsageError(f"cannot write {path}: permission denied; choose another place for it")


def write_whole(path: str, text: str | bytes) -> None:
    """Write a file (a text in UTF-8) to a temporary file and rename it, so that no reader sees half of it.

    An existing file keeps its permissions; a link is followed; a device or pipe is written to. If writing fails,
    UsageError is raised and an older file is unchanged.
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
    """Refuse a figure that cannot be written: path as `check_target`, format, font and size."""
    if options.plot is None:
        given = first_set_option(options, dict.fromkeys(PLOT_OPTIONS))
        if given:
            raise UsageError(f"{given} belongs to a figure; add --plot F.png, or leave {given} out")
        return
    check_target(options.plot, "--plot")
    # The first use on a machine logs that fonts are being listed; nothing belongs on stderr.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from topoplan.operate.plot.canvas import check_font, check_format, new_figure

    look = _look(options)
    check_format(new_figure(1, 1), options.plot, look.file_format)
    if look.font is not None:
        check_font(look.font)


def draw_plot(options: argparse.Namespace, draw: Callable[[], Figure]) -> None:
    """Draw the figure that ``--plot`` and its options ask for."""
    if options.plot:
        from topoplan.operate.plot.canvas import write_figure

        write_figure(draw, options.plot, _look(options))


def _look(options: argparse.Namespace) -> Look:
    from topoplan.operate.plot.canvas import PLAIN, Look

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


QUIET_SECONDS = 1.0
"""Work that takes less shows no progress."""

_REDRAWN_SECONDS = 0.1
_WIDTH = 24
_COUNT = re.compile(r"\b(\d+) of (\d+)\b")


def progress_bar(text: str, seconds: float) -> str:
    """Return the progress line: a bar, the elapsed seconds, and the text.

    A text that counts, such as ``class 3 of 51``, fills the bar; any other moves a mark along it.

    >>> progress_bar("class 3 of 12: GPUs 0, 1", 5)
    '[######                  ]  5 s  class 3 of 12: GPUs 0, 1'
    >>> progress_bar("packing: 8 trees of 16 GPUs", 2.3)
    '[                   ###  ]  2 s  packing: 8 trees of 16 GPUs'
    """
    counted = _COUNT.search(text)
    done, total = (int(number) for number in counted.groups()) if counted else (0, 0)
    if 0 < done <= total:
        bar = ("#" * (_WIDTH * done // total)).ljust(_WIDTH)
    else:
        # The mark goes to the right end and back.
        travel = _WIDTH - 3
        step = int(seconds / _REDRAWN_SECONDS) % (2 * travel)
        bar = (" " * min(step, 2 * travel - step) + "###").ljust(_WIDTH)
    return f"[{bar}] {int(seconds):2d} s  {text}"


_silent = ContextVar("_silent", default=False)


@contextmanager
def without_progress() -> Iterator[None]:
    """Show no progress inside, whatever stderr is: a library does not print."""
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)


@contextmanager
def progress_line(doing: str) -> Iterator[Callable[[str], None] | None]:
    """Yield a callback that takes the current step and shows it from the second second on; None if stderr is not a
    terminal.

    ``doing`` is shown until the callback is first called.
    """
    if _silent.get() or sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    latest = [doing]
    over = threading.Event()
    line = threading.Thread(target=_draw_progress, args=(latest, over), daemon=True)
    line.start()

    def tell(text: str) -> None:
        latest[0] = text

    try:
        yield tell
    finally:
        over.set()
        line.join()


def _draw_progress(latest: list[str], over: threading.Event) -> None:
    started = time.monotonic()
    drawn = False
    while not over.wait(_REDRAWN_SECONDS if drawn else QUIET_SECONDS):
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r\x1b[K{progress_bar(latest[0], time.monotonic() - started)[:width]}")
        sys.stderr.flush()
        drawn = True
    if drawn:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


MAX_NAMES = 8
"""Most names, or ranges of them, in a list."""


def rank_names(names: Sequence[str]) -> str:
    """Return the names of GPUs, numbers as ranges; many ranges are cut to the first ones and the last.

    >>> rank_names(["gpu1", "gpu4", "gpu5", "gpu7"]), rank_names([f"gpu{i}" for i in range(0, 100, 2)])[-8:]
    ('gpu1,4,5,7', '94,96,98')
    """
    ranges = name_ranges(names)
    if len(ranges) > MAX_NAMES:
        ranges = (*ranges[: MAX_NAMES - 1], "…", ranges[-1])
    return " ".join(ranges)


def machine_words(plan: Plans) -> str:
    """Return the machine of a plan and its GPUs."""
    return f"{plan.topology.name}, {counted(len(plan.ranks), 'GPU')} ({rank_names(plan.ranks)})"


def collective_words(plan: Plans) -> str:
    """Return the collective of a plan with its root, as PyTorch spells it."""
    return rooted_words(plan.collective, None if plan.root is None else plan.ranks[plan.root])


def rooted_words(collective: str, root: str | None) -> str:
    """Return a collective as PyTorch spells it, with the GPU that is its root, if it has one.

    >>> rooted_words("allreduce", None), rooted_words("reduce", "gpu1")
    ('all_reduce', 'reduce to gpu1')
    """
    name = collective_name(collective)
    return name if root is None else f"{name} {'to' if collective == 'reduce' else 'from'} {root}"


def tree_noun(plan: Plan) -> str:
    """Return the noun for a tree of a plan."""
    return "path" if plan.collective == ALL_TO_ALL else "tree"
