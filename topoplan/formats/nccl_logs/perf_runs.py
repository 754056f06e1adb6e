"""The runs of nccl-tests in a text, and of ``topoplan bench``: their ranks, their rows, and what is amiss with them.

A run begins with its settings (``# nThread 1 nGpus 8 …``), lists its ranks, and prints a table under a head that names
the columns, first out of place and then in place; a summary ends it. Columns are found by the names in that head, so
that versions with other columns are read alike. What launchers put before a line (``[1,0]<stdout>:``, ``0: ``) is left
out, and so is what NCCL prints between the rows (`topoplan.formats.nccl_logs.debug_log` reads that).

Nothing is dropped without a word: a line that looks like a row and is none, results that are wrong, a missing summary
and a failed test each leave a warning. What the figures mean on a machine is not decided here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from topoplan.formats.nccl_logs.log_lines import ENDLESS
from topoplan.hosts.host import plain_bus_id
from topoplan.units import format_size

PROGRAMS = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "alltoall": "alltoall",
}
"""The collective of every test that has one here, by the test's name without ``_perf``."""

OTHER_PROGRAMS = ("alltoallv", "sendrecv", "gather", "scatter", "hypercube")
"""Tests of nccl-tests whose traffic is no collective of a plan."""

_LABEL = re.compile(r"^(?:\[\d+,\d+\]<std(?:out|err)>:\s?|\[\d+\] |\s*\d+:\s)")
PROGRAM = re.compile(rf"\b({'|'.join(sorted((*PROGRAMS, *OTHER_PROGRAMS), key=len, reverse=True))})_perf")
_RANK = re.compile(
    r"^#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+(\d+)\s+\[([0-9a-fA-Fx:.]+)\]\s*(.*)$"
)
_BENCH = re.compile(r"^# (\w+) of (\d+) ranks?, (\S+)(?: \(\w+\))?(?:, (.+))?, median of \d+$")
_SUMMARY = re.compile(r"^#\s*(Out of bounds values|Avg bus bandwidth)\s*:\s*(\S+)\s*(\w*)")
_FAILED = re.compile(
    r"Test (?:NCCL |CUDA )?failure|Test timeout|: Test (?:NCCL|CUDA) |Invalid number of GPUs"
)
_NUMBER = re.compile(r"^[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?$")
_BLOCK = ("time", "algbw", "busbw", "#wrong")
_STANDARD = ("size", "count", "type", "redop", "root", *_BLOCK, *_BLOCK)


@dataclass(frozen=True, slots=True)
class LoggedRank:
    """A rank as a log lists it.

    Parameters
    ----------
    rank, group : int
        Its number among all ranks, and its communicator where a test runs several side by side.
    host : str
    device : int or None
        Number of the GPU for CUDA on that host.
    busid : str
        As the kernel writes it; empty where the log has none.
    model : str
    name : str
        The device of a plan, in logs of ``topoplan bench``.
    """

    rank: int
    group: int = 0
    host: str = ""
    device: int | None = None
    busid: str = ""
    model: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Timing:
    """One measurement of a row.

    Parameters
    ----------
    seconds : float
    algbw, busbw : float
        GB/s, as printed.
    wrong : int or None
        Elements that are not what they must be; None where nobody looked.
    """

    seconds: float
    algbw: float
    busbw: float
    wrong: int | None


@dataclass(frozen=True, slots=True)
class LoggedRow:
    """One size of a run; of out of place and in place at least one was measured.

    Parameters
    ----------
    line : int
        Of the text, from 1; of JSON the place in its list.
    size : int
        Bytes as nccl-tests counts them: of the full buffer for allgather, reduce_scatter and alltoall.
    type, redop : str
    root : int or None
    out_of_place, in_place : Timing or None
    """

    line: int
    size: int
    type: str
    redop: str
    root: int | None
    out_of_place: Timing | None
    in_place: Timing | None

    @property
    def timing(self) -> Timing:
        """Out of place, or in place where that is all there is."""
        found = self.out_of_place or self.in_place
        assert found is not None
        return found


@dataclass(frozen=True, slots=True)
class PerfRun:
    """A run of one test.

    Parameters
    ----------
    line : int
        Where it begins.
    program : str
        Name of the test without ``_perf``, ``bench`` for ours, empty where the log does not say.
    collective : str
        As `topoplan.plan` names it; empty where it is none or unknown.
    schedule : str
        What `topoplan bench` says that it ran.
    stated : int or None
        Number of ranks that the log states, or lists.
    ranks : tuple of LoggedRank
    rows : tuple of LoggedRow
    warnings : tuple of str
    """

    line: int
    program: str
    collective: str
    schedule: str
    stated: int | None
    ranks: tuple[LoggedRank, ...]
    rows: tuple[LoggedRow, ...]
    warnings: tuple[str, ...]


@dataclass(slots=True)
class OpenRun:
    """A run while it is read."""

    line: int
    program: str = ""
    collective: str = ""
    schedule: str = ""
    stated: int | None = None
    ranks: list[LoggedRank] = field(default_factory=list)
    rows: list[LoggedRow] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    columns: list[str] | None = None
    summaries: int = 0
    began: bool = False

    @property
    def is_bench(self) -> bool:
        return self.program == "bench"

    def closed(self) -> PerfRun:
        if (
            self.rows
            and not self.is_bench
            and not self.summaries
            and not any("failed" in w for w in self.warnings)
        ):
            self.warnings.append(
                f"the run from line {self.line} ends without its summary: it is cut, or it died after "
                f"{format_size(self.rows[-1].size)}"
            )
        if not self.rows and not self.warnings:
            self.warnings.append(
                f"the run from line {self.line} has no row: it is cut, or it died before the first"
            )
        stated = self.stated or (len({rank.rank for rank in self.ranks}) or None)
        return PerfRun(
            self.line,
            self.program,
            self.collective,
            self.schedule,
            stated,
            tuple(self.ranks),
            tuple(self.rows),
            tuple(self.warnings),
        )


def parse_perf_text(text: str) -> tuple[PerfRun, ...]:
    """All runs in a text, in its order; none where the text is no such log.

    Examples
    --------
    >>> log = '''# nThread 1 nGpus 2 minBytes 1048576 maxBytes 1048576 step: 2(factor)
    ... # Using devices
    ... #  Rank  0 Group  0 Pid   7 on  node1 device  0 [0000:07:00] NVIDIA A100
    ... #  Rank  1 Group  0 Pid   7 on  node1 device  1 [0000:0f:00] NVIDIA A100
    ... #     size     count   type  redop   root   time  algbw  busbw #wrong   time  algbw  busbw #wrong
    ...    1048576    262144  float    sum     -1  20.00  52.43  52.43      0  19.50  53.77  53.77      0
    ... # Out of bounds values : 0 OK
    ... '''
    >>> run, = parse_perf_text(log)
    >>> run.stated, [(row.size, row.timing.algbw, row.in_place.wrong) for row in run.rows], run.warnings
    (2, [(1048576, 52.43, 0)], ())
    """
    runs: list[OpenRun] = []
    named = ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = _LABEL.sub("", raw.rstrip())
        if "NCCL INFO" in line or "NCCL WARN" in line or not line.strip():
            continue
        if ENDLESS.search(line):
            if runs:
                runs[-1].warnings.append(f"line {number}: it has a number of 25 digits or more; left out")
            continue
        if not line.startswith("#"):
            named = _plain_line(runs, number, line) or named
        elif _begins(runs, line):
            runs.append(OpenRun(number, began=True))
            named = _comment(runs[-1], number, line, named)
        else:
            if not runs:
                runs.append(OpenRun(number))
            named = _comment(runs[-1], number, line, named)
    meant = [run for run in runs if run.began or run.rows or run.warnings or run.ranks or run.columns]
    for run in meant:
        run.program = run.program or named
        run.collective = run.collective or PROGRAMS.get(run.program, "")
    return tuple(run.closed() for run in meant)


def _begins(runs: Sequence[OpenRun], line: str) -> bool:
    """Whether a comment is the first line of a run."""
    if _BENCH.match(line):
        return True
    first = re.match(r"#\s*(nccl-tests version|Collective test starting|nThread |Using devices)", line)
    if first is None:
        return False
    if not runs:
        return True
    last = runs[-1]
    return bool(
        last.rows or last.summaries or last.ranks or last.columns or any("failed" in w for w in last.warnings)
    )


def _comment(run: OpenRun, number: int, line: str, named: str) -> str:
    """Take what a line that begins with # says; returns the test that the next run without a name is of."""
    bench, rank, summary = _BENCH.match(line), _RANK.match(line), _SUMMARY.match(line)
    program = PROGRAM.search(line)
    if bench:
        run.program, run.stated, run.schedule = "bench", int(bench[2]), bench[4] or "plan"
        run.collective = bench[1] if bench[1] in PROGRAMS.values() else ""
    elif program and "starting" in line:
        run.program = program[1]
        return ""
    elif rank:
        run.ranks.append(
            LoggedRank(
                int(rank[1]),
                int(rank[2] or 0),
                rank[3],
                int(rank[4]),
                short_bus_id(rank[5]),
                rank[6].strip(),
            )
        )
    elif summary:
        run.summaries += 1
        if summary[3] == "FAILED":
            run.warnings.append(f"line {number}: nccl-tests says {summary[1]} : {summary[2]} FAILED")
    elif " algbw" in line and " size" in line:
        if not run.program and named:
            run.program, named = named, ""
        run.columns = line.lstrip("#").split()
    return named


def short_bus_id(text: str) -> str:
    """A bus id as tests print it, in older ones only ``0x07``, as the kernel writes it."""
    return plain_bus_id(text if ":" in text else f"0000:{text.removeprefix('0x').lower():0>2}:00.0")


def _plain_line(runs: list[OpenRun], number: int, line: str) -> str:
    """Take a line that is no comment: a row, a failure, or the command that begins a run, whose test is returned."""
    program = PROGRAM.search(line)
    tokens = line.split()
    if _FAILED.search(line):
        if not runs:
            runs.append(OpenRun(number))
        runs[-1].warnings.append(f"line {number}: the test failed: {' '.join(tokens)[:120]}")
        return ""
    if program and not tokens[0].isdecimal():
        return program[1]
    in_table = bool(runs and (runs[-1].columns or runs[-1].ranks))
    if not tokens[0].isdecimal() or not (in_table or len(tokens) >= 8):
        return ""
    if not runs:
        runs.append(OpenRun(number))
    _row(runs[-1], number, line)
    return ""


def _row(run: OpenRun, number: int, line: str) -> None:
    """Add a row to a run, or a warning why there is none."""
    columns = run.columns or list(_STANDARD)
    head = next((place for place, name in enumerate(columns) if name.endswith("time")), len(columns))
    blocks = [place for place, name in enumerate(columns) if name.endswith("time")]
    width = (blocks[1] if len(blocks) > 1 else _end(columns)) - head
    values = line.split()
    if columns[-1] == "timestamp":
        columns, values = columns[:-1], values[:-2] if re.match(r"\d+:\d+", values[-1]) else values
    # a test that ran in place only leaves the columns of out of place blank
    alone = len(blocks) > 1 and len(values) == head + width and re.search(r"\S {24,}\S", line) is not None
    if len(values) != len(columns) and not alone:
        what = "is cut" if len(values) < len(columns) else "has more columns than its head"
        run.warnings.append(
            f"line {number}: the row of {_size_words(values[0])} {what} ({len(values)} of {len(columns)}); left out"
        )
        return
    fixed = dict(zip(columns[:head], values[:head], strict=True))
    placed: list[Timing | None] = []
    for start in [head] if alone or len(blocks) == 1 else blocks[:2]:
        known = dict(zip(columns[start : start + width], values[start : start + width], strict=True))
        placed.append(timing_of(run, number, fixed["size"], known))
    out_of_place, in_place = (None, placed[0]) if alone else (placed[0], placed[1] if placed[1:] else None)
    if out_of_place is None and in_place is None:
        return
    root = fixed.get("root", "")
    run.rows.append(
        LoggedRow(
            number,
            int(fixed["size"]),
            fixed.get("type", ""),
            fixed.get("redop", ""),
            int(root) if root.isdecimal() else None,
            out_of_place,
            in_place,
        )
    )


def _end(columns: Sequence[str]) -> int:
    """Where the only block of a table ends: ``topoplan bench --paced`` has the model's time behind it."""
    return next((place for place, name in enumerate(columns) if name == "model"), len(columns))


def timing_of(run: OpenRun, number: int, size: str, known: Mapping[str, str]) -> Timing | None:
    """The measurement in a block of columns; None, and a warning, where a figure is none."""
    figures = [
        next((text for name, text in known.items() if name.endswith(key)), "")
        for key in ("time", "algbw", "busbw")
    ]
    if not all(_NUMBER.match(text) and math.isfinite(float(text)) for text in figures) or not float(
        figures[0]
    ):
        run.warnings.append(
            f"line {number}: {_size_words(size)}: {' '.join(figures)} is no time and bandwidths; left out"
        )
        return None
    stated = next((known[name] for name in ("#wrong", "wrong") if name in known), "N/A")
    wrong = int(float(stated)) if _NUMBER.match(stated) and math.isfinite(float(stated)) else None
    if wrong:
        run.warnings.append(
            f"line {number}: {_size_words(size)}: {wrong} wrong elements, so its time tells nothing"
        )
    elif wrong is None and stated != "N/A":
        run.warnings.append(f"line {number}: {_size_words(size)}: {stated!r} is no number of wrong elements")
    seconds, algbw, busbw = (float(text) for text in figures)
    return Timing(seconds * 1e-6, algbw, busbw, wrong)


def _size_words(text: str) -> str:
    return format_size(int(text)) if text.isdecimal() and len(text) < 20 else text[:20]
