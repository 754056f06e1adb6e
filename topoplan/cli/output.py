"""Print JSON, notes, errors, tables and progress, and write the files of commands.

A target is refused before the work begins, then written as a whole or not at all. Progress is one line on a terminal,
drawn by a thread from the second second on and erased afterwards; the result does not depend on it.

In a plan for a thousand GPUs one row stands for all symmetric shards; long lists are cut and say how much is missing.
The plan file and ``--json`` hold the whole plan.
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
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from topoplan.cli.arguments import PLOT_OPTIONS, first_set_option
from topoplan.errors import UsageError, kind_of, warnings_first
from topoplan.machine.fabric import Fabric, channel_words
from topoplan.plans.plan import ALL_TO_ALL, Plan, Plans
from topoplan.plans.shards import ImageShards, Shard, Stage, bracket_notation
from topoplan.plans.structure import PlanPhases
from topoplan.solve.upper_bound import Bound, in_network_bound
from topoplan.units import bus_words, counted, name_ranges, number_ranges

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def print_json(value: dict[str, object]) -> None:
    """Print one JSON object in ASCII, which every terminal and pipe takes."""
    print(json.dumps(value, allow_nan=False, indent=1))


def plan_notes(plan: Plans) -> list[str]:
    """Return the notes of a plan and of its machine, each once."""
    return list(dict.fromkeys((*plan.topology.notes, *plan.notes)))


def print_notes(*notes: str, file: TextIO | None = None) -> None:
    """Print notes, each once, warnings first; on stdout by default."""
    for note in warnings_first(notes):
        line = printable(note)
        print(line if kind_of(note) == "warning" else f"note: {line}", file=file)


def rate_verdict(channels: Sequence[str], gap: float, without: str = "") -> str:
    """Return what is proved of a rate: its channels if it is optimal, else the gap to the bound.

    ``without`` says what the bound leaves out, see `in_network_words`.

    >>> rate_verdict(("nvlink",), 0.0), rate_verdict(("nvlink",), 0.25)
    ('optimal over nvlink, proved', '25.00% below the bound')
    """
    verdict = f"{gap:.2%} below the bound" if gap else f"optimal over {channel_words(channels)}, proved"
    return f"{verdict} {without}" if without else verdict


def in_network_words(proved: Plan | Bound) -> str:
    """Return what in-network reduction could do above a bound that leaves it out; empty if it adds nothing.

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
    """Return columns padded to their widest cell with ``gap`` spaces between; numbers to the right, text to the left.

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
    """Print objects as comma-separated values (RFC 4180, but lines end with LF), keys first.

    None and infinite rates are empty.
    """
    keys = dict.fromkeys(key for row in rows for key in row)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(keys)
    for row in rows:
        cells = (row.get(key) for key in keys)
        writer.writerow("" if isinstance(cell, float) and not math.isfinite(cell) else cell for cell in cells)


def terminal_width() -> int | None:
    """Return the columns of a line if stdout is a terminal, at most `MAX_COLUMNS`; else None.

    A process that mpiexec started has a terminal of its own, wherever its output goes, and gets None.
    """
    if sys.stdout is None or not sys.stdout.isatty() or os.environ.keys() & set(MPI_RANK_VARIABLES):
        return None
    return min(MAX_COLUMNS, shutil.get_terminal_size().columns)


class WrappedText(io.TextIOBase):
    """A stream that wraps lines between words at ``width`` columns.

    Continued lines are indented to the last column of their line, or by four spaces.
    """

    def __init__(self, stream: TextIO, width: int) -> None:
        super().__init__()
        self._stream, self._width, self._begun = stream, width, ""

    def write(self, text: str) -> int:
        """Write complete lines, and buffer the rest."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._stream.write(f"{wrap_line(line, self._width)}\n")
        return len(text)

    def flush(self) -> None:
        self._stream.write(self._begun)
        self._begun = ""
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def wrap_line(line: str, width: int) -> str:
    """Return a line wrapped at ``width`` columns, words whole; unchanged if a word, such as a path, is too long.

    >>> print(wrap_line("bound  50 GB/s: the links between them carry 300 GB/s", 30))
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


MAX_PRINTED_SETS = 70
"""Most sets of GPUs in a line of text: all with equal wires on machines of 8 GPUs."""


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


@contextmanager
def progress_line(doing: str) -> Iterator[Callable[[str], None] | None]:
    """Yield a callback that takes the current step and shows it from the second second on; None if stderr is not a
    terminal.

    ``doing`` is shown until the callback is first called.
    """
    if sys.stderr is None or not sys.stderr.isatty():
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


MAX_ROWS = 64
"""Most shards in a table."""

MAX_NAMES = 8
"""Most names, or ranges of them, in a list."""

MAX_TREE_LENGTH = 78
"""Most characters of a tree."""


def rank_names(names: Sequence[str]) -> str:
    """Return the names of GPUs, numbers as ranges; many ranges are cut to the first ones and the last.

    >>> rank_names(["gpu1", "gpu4", "gpu5", "gpu7"]), rank_names([f"gpu{i}" for i in range(0, 100, 2)])[-8:]
    ('gpu1,4,5,7', '94,96,98')
    """
    ranges = name_ranges(names)
    if len(ranges) > MAX_NAMES:
        ranges = (*ranges[: MAX_NAMES - 1], "…", ranges[-1])
    return " ".join(ranges)


def tree_noun(plan: Plan) -> str:
    """Return the noun for a tree of a plan."""
    return "path" if plan.collective == ALL_TO_ALL else "tree"


def tree_table(plan: Plan) -> str:
    """Return a table with a row for each shard; images of one shard under symmetries share a row.

    >>> import topoplan
    >>> print(tree_table(topoplan.plan(topoplan.nvswitch_cluster(64), "allgather")).splitlines()[1][:42])
    1 of 512 symmetric  1/512  0.3968  s0.gpu0
    """
    listed = plan.shard_counts[:MAX_ROWS]
    apart = len({_channels(plan, shard) for shard, _ in plan.shard_counts} - {""}) > 1
    images = isinstance(plan.shards, ImageShards)
    names = plan.vertices
    rows = []
    for number, (shard, count) in enumerate(listed):
        stage = _printed_stage(shard)
        if plan.collective == ALL_TO_ALL and not stage.edges:
            continue
        weight = float(shard.share) * plan.rate if math.isfinite(plan.rate) else 0.0
        rows.append(
            (
                f"1 of {count} symmetric" if images else str(number),
                *((_channels(plan, shard),) if apart else ()),
                str(shard.share),
                f"{weight:.4g}",
                names[stage.root],
                str(stage.height),
                bracket_notation(names, stage, longest=MAX_TREE_LENGTH),
            )
        )
    text = table(("shard", *(("channel",) if apart else ()), "share", "GB/s", "root", "height", "tree"), rows)
    more = len(plan.shard_counts) - len(listed)
    return f"{text}\n… and {counted(more, 'shard')} more: -o and --json write all" if more else text


def tree_rows(plan: Plan) -> list[dict[str, object]]:
    """Return the rows of `tree_table` as objects, without limits; ``count`` is the number of symmetric shards.

    >>> import topoplan
    >>> tree_rows(topoplan.plan(topoplan.load("dgx-1v"), gpus=[1, 4, 5, 7]))[0]["tree"]
    'gpu4>(gpu7 gpu5>gpu1)'
    """
    return [
        {
            "count": count,
            "channel": _channels(plan, shard),
            "share": str(shard.share),
            "GB/s": float(shard.share) * plan.rate if math.isfinite(plan.rate) else 0.0,
            "root": plan.vertices[_printed_stage(shard).root],
            "height": _printed_stage(shard).height,
            "tree": bracket_notation(plan.vertices, _printed_stage(shard)),
        }
        for shard, count in plan.shard_counts
    ]


def _printed_stage(shard: Shard) -> Stage:
    """Return the last stage, which of a reduce and broadcast is the broadcast; of an exchange the first gather."""
    gathers = [stage for stage in shard.stages if stage.op == "gather"]
    return gathers[0] if gathers else shard.stages[-1]


def _channels(plan: Plan, shard: Shard) -> str:
    crossed = {edge.channel for stage in shard.stages for edge in stage.edges}
    known = Fabric(plan.topology, plan.channels).edge_channels
    return "+".join(channel for channel in known if channel in crossed)


_LISTED = 4


def phase_table(by_phase: PlanPhases) -> str:
    """Return the rate of each phase alone, its full links, and which phase is the bottleneck."""
    rows = []
    for one in (by_phase.reduce, by_phase.between, by_phase.broadcast, by_phase.inside):
        links = [f"{src}>{dst}" for src, dst in one.full]
        more = f" and {len(links) - _LISTED} more" if len(links) > _LISTED else ""
        rows.append((one.name, f"{one.rate:.6g}" if links else "-", " ".join(links[:_LISTED]) + more))
    heads = ("phase", "GB/s alone", "full links")
    return f"{table(heads, rows)}\nbottleneck: {by_phase.bottleneck}"
