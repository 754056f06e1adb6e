"""Parse the tables of nccl-tests and of ``topoplan bench``, with the labels of launchers removed from their lines.

A run begins with its settings (``# nThread 1 nGpus 8 …``), lists its ranks, and prints a table under a head that
names the columns, first out of place and then in place; a summary ends it. Columns are found by the names in that
head, so that versions with other columns are parsed too. The # marks may be missing (web pages remove them). NCCL's
lines between the rows are skipped (`topoplan.reading.nccl.debug_log` parses them). rccl-tests prints a JSON object for
each row. The test is the one that a run names itself; else one that is mentioned before it, such as in its command, if
the columns are those of that test.

Nothing is dropped silently: a malformed row, wrong results, a missing summary and a failed test each leave a warning.
The meaning of the figures on a machine is not decided here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from topoplan.machine.host_topology import plain_bus_id
from topoplan.units import format_size

_ESCAPE = re.compile(
    r"\x1b(?:\[[0-9;?]{0,40}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[()][0-9A-Za-z])"
)
_TIME = re.compile(
    r"\[?(?:\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d|\d\d:\d\d:\d\d|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d"
    r"(?: [\w.-]{1,100}(?= [\w./@-]{1,100}(?:\[\d{1,10}\])?:))?)"
    r"(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?:?[ \t]{1,8}"
)
_EPOCH = re.compile(r"\[? {0,8}\d{1,10}\.\d{3,9}\]?[ \t]{1,8}(?=#|\[|\S{1,200}[:|])")
_LABEL = re.compile(
    r"[ \t]{0,40}(?:"
    r">[ \t]?"
    r"|\[[^][<>\s]{1,200}(?: [^][<>\s]{1,100})?\]<std(?:out|err|diag)>:?[ \t]?"
    r"|\[(?:default|rank|worker|local_rank)[ _]?\d{1,6}\]:?[ \t]?"
    r"|\[pod/[^][\s]{1,300}\][ \t]?"
    r"|\[\d{1,6}\]:?[ \t]"
    r"|[\w./@-]{1,200}[ \t]{0,40}\|[ \t]?"
    r"|[\w./@-]{1,200}(?:\[\d{1,10}\])?:(?:[ \t]{1,8}|(?=#))"
    r")"
)
_WORDS = re.compile(
    r"(?=[A-Za-z])(?:[\w./@-]{1,200}[ \t]{1,8}){1,3}"
    r"(?=#(?:[ \t]|$)|\{\"|[ \t]{0,40}\d{1,20} {1,20}\d{1,20} {1,20}[a-z])"
)
"""Names before a comment or a row of a test, as stern and ``kubectl logs`` over several pods write them."""

ENDLESS = re.compile(r"[0-9]{25}")
"""More digits than any number of a log has."""

_ENTITIES = (("&gt;", ">"), ("&lt;", "<"), ("&quot;", '"'), ("&nbsp;", " "), ("&amp;", "&"))
_MOST = 6
"""Largest number of labels before a line."""


def log_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield every line with its number from 1, without colours, hard blanks and HTML's entities, with its labels.

    A progress bar that returns to the beginning of its line makes several lines of one number.

    >>> list(log_lines("\\ufeffone\\r\\n\\x1b[32mtwo\\x1b[0m 0 -&gt; 1"))
    [(1, 'one'), (2, 'two 0 -> 1')]
    """
    for number, whole in enumerate(text.split("\n"), 1):
        for line in whole.split("\r"):
            if "\x1b" in line:
                line = _ESCAPE.sub("", line)
            if "&" in line:
                for entity, character in _ENTITIES:
                    line = line.replace(entity, character)
            line = line.replace("\xa0", " ").replace("\ufeff", "").replace("\u200b", "")
            if line or line is whole:
                yield number, line


def split_label(line: str) -> tuple[str, str]:
    """Return the labels before a line, without blanks and time stamps, and the rest of the line.

    A launcher puts a label before every line, often a time stamp too, and several may follow one another:

        [1,0]<stdout>: …            mpirun --tag-output; prterun and SageMaker write more between the brackets
        [default0]:…  [rank0]: …    torchrun
        [0] …  0: …                 mpiexec -l, srun -l
        n1: …  nccl-1  | …          pdsh and clush, docker compose
        Nov  2 10:00:00 n1 nccl[7]: syslog
        [pod/name/container] …      kubectl logs --prefix; stern writes both names and blanks
        > …                         a quotation

    A label is removed only if it is the whole beginning of a line, so that no word of the log itself is lost. Every
    pattern matches a bounded number of characters, so that a long line costs no more than its length.

    >>> split_label("2026-11-02T10:00:00.5Z [1,0]<stdout>:#  Rank  0")
    ('[1,0]<stdout>:', '#  Rank  0')
    >>> split_label("n1 | 0: nccl-tests: done"), split_label("# nThread 1: no label")
    (('n1 |0:nccl-tests:', 'done'), ('', '# nThread 1: no label'))
    """
    labels, start = "", 0
    for _ in range(_MOST):
        found = _TIME.match(line, start) or _EPOCH.match(line, start)
        if found is None:
            found = _LABEL.match(line, start) or _WORDS.match(line, start)
            if found is None:
                break
            labels += found[0].strip()
        start = found.end()
    return labels, line[start:]


PROGRAMS = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "alltoall": "alltoall",
}
"""Collective of each test that has one here, by the test's name without ``_perf``."""

_SPELLINGS = {**PROGRAMS, "all_to_all": "alltoall", **{name: name for name in PROGRAMS.values()}}
"""Collective of each name in a table of ``topoplan bench``."""

OTHER_PROGRAMS = ("alltoallv", "sendrecv", "gather", "scatter", "hypercube")
"""Tests of nccl-tests whose traffic belongs to no collective of a plan."""

_TESTS = "|".join(sorted((*PROGRAMS, *OTHER_PROGRAMS), key=len, reverse=True))
_TEST = re.compile(rf"({_TESTS})_perf(?![a-zA-Z])")
_AROUND = "\"'`()[]{}<>,;:=*$|&"
"""Characters that may surround the name of a test."""

_LOST_MARK = re.compile(
    r"\s*(?:nThread \d|Using devices|Rank +\d+ +(?:Group|Pid)|nccl-tests version|Collective test (?:starting|concluded)"
    r"|size +count +type|\(B\)|out-of-place|in-place|Out of bounds values|Avg bus bandwidth|\w{1,20} of \d+ ranks?, )"
)
"""Beginnings of comments, which web pages show without their mark."""

_RANK = re.compile(
    r"^#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+(\d+)\s+\[([0-9a-fA-Fx:.]+)\]\s*(.*)$"
)
_BENCH = re.compile(r"^#\s*(\w+) of (\d+) ranks?, (\S+)(?: \(\w+\))?(?:, (.+))?, median of \d+$")
_SUMMARY = re.compile(r"^#\s*(Out of bounds values|Avg bus bandwidth)\s*:\s*(\S+)\s*(\w*)")
_FAILED = re.compile(
    r"Test (?:NCCL |CUDA )?failure|Test timeout|: Test (?:NCCL|CUDA) |Invalid number of GPUs"
)
_NUMBER = re.compile(r"^[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?$")
_BLOCK = ("time", "algbw", "busbw", "#wrong")
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_WHOLE = ("all_reduce", "broadcast", "reduce", "sendrecv")
"""Tests whose count is that of the whole buffer; of the others it is that of a rank's part."""

_BYTES = {
    **dict.fromkeys(("int8", "uint8", "char", "fp8_e4m3", "fp8_e5m2", "f8e4m3", "f8e5m2"), 1),
    **dict.fromkeys(("half", "float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float", "float32", "int32", "uint32", "int"), 4),
    **dict.fromkeys(("double", "float64", "int64", "uint64"), 8),
}
"""Bytes of an element by the name of its type."""

_STANDARD = ("size", "count", "type", "redop", "root", *_BLOCK, *_BLOCK)


@dataclass(frozen=True, slots=True)
class LoggedRank:
    """A rank as a log lists it.

    ``group`` is its communicator if a test runs several side by side; ``device`` is CUDA's number of the GPU on that
    host; ``busid`` is as the kernel writes it, empty if the log has none; ``name`` is the device of a plan, in logs of
    ``topoplan bench``.
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
    """One measurement of a row; bandwidths in GB/s as printed, ``wrong`` elements None if not checked."""

    seconds: float
    algbw: float
    busbw: float
    wrong: int | None


@dataclass(frozen=True, slots=True)
class LoggedRow:
    """One size of a run, measured out of place, in place or both.

    ``line`` counts from 1; in JSON it is the place in the list. ``size`` is in bytes as nccl-tests counts them: of the
    full buffer for allgather, reduce_scatter and alltoall. ``root`` is None for tests without one, which print -1.
    ``count`` is in elements as printed: of a rank's part in tests that divide the buffer.
    """

    line: int
    size: int
    type: str
    redop: str
    root: int | None
    out_of_place: Timing | None
    in_place: Timing | None
    count: int | None = None

    @property
    def parts(self) -> int | None:
        """Return the parts of the buffer, one for each rank, by size over count; None if that gives none."""
        part = (self.count or 0) * _BYTES.get(self.type, 0)
        return self.size // part if part and self.size > part and self.size % part == 0 else None

    @property
    def wrong(self) -> bool:
        """Return whether a result was wrong, out of place or in place."""
        return any(one is not None and bool(one.wrong) for one in (self.out_of_place, self.in_place))

    @property
    def timing(self) -> Timing:
        """Return the timing out of place, or in place if it is the only one."""
        found = self.out_of_place or self.in_place
        assert found is not None
        return found


@dataclass(frozen=True, slots=True)
class PerfRun:
    """A run of one test, from its first ``line``.

    ``program`` is the test without ``_perf``, ``bench`` for ours, empty if unknown; ``collective`` is as in
    `topoplan.plan`, empty if it has none. ``stated`` is the number of ranks that the log states, or lists. ``failed``:
    its summary says that values were out of bounds.
    """

    line: int
    program: str
    collective: str
    schedule: str
    stated: int | None
    ranks: tuple[LoggedRank, ...]
    rows: tuple[LoggedRow, ...]
    warnings: tuple[str, ...]
    failed: bool = False


@dataclass(slots=True)
class OpenRun:
    """A run while it is parsed."""

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
    failed: bool = False
    began: bool = False
    mentioned: tuple[str, ...] = ()
    in_place_only: bool = False

    @property
    def is_bench(self) -> bool:
        return self.program == "bench"

    def _name(self) -> None:
        """Take the test that is mentioned before the run, if the columns can be those of this one alone."""
        fitting = [name for name in self.mentioned if columns_fit(self.rows, name)]
        if len(fitting) == 1:
            self.program = fitting[0]
        elif self.mentioned and self.rows:
            self.warnings.append(
                f"line {self.line}: before the run stands {' and '.join(f'{name}_perf' for name in self.mentioned)}, "
                + (
                    "so the log does not say which one it is"
                    if fitting
                    else "and its columns are those of another test"
                )
            )

    def closed(self) -> PerfRun:
        if not self.program:
            self._name()
        self.collective = self.collective or PROGRAMS.get(self.program, "")
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
            self.failed,
        )


def parse_perf_text(text: str) -> tuple[PerfRun, ...]:
    """Return all runs in a text, in its order; none if the text is not such a log."""
    runs: list[OpenRun] = []
    named: list[str] = []
    for number, raw in log_lines(text):
        if "NCCL INFO" in raw or "NCCL WARN" in raw or not raw.strip():
            continue
        if ENDLESS.search(raw):
            if runs:
                runs[-1].warnings.append(f"line {number}: it has a number of 25 digits or more; left out")
            continue
        if _FAILED.search(raw):
            if not runs:
                runs.append(OpenRun(number))
            runs[-1].warnings.append(f"line {number}: the test failed: {' '.join(raw[:400].split())[:120]}")
            continue
        _, line = split_label(raw.rstrip())
        if _LOST_MARK.match(line):
            line = f"# {line.lstrip()}"
        if line.lstrip().startswith("{"):
            _json_row(runs, number, line)
        elif not line.startswith("#"):
            _plain_line(runs, number, line, named)
        else:
            begins = _begins(runs, line)
            if begins or not runs:
                runs.append(OpenRun(number, began=begins))
            _comment(runs[-1], number, line, named)
    meant = [run for run in runs if run.began or run.rows or run.warnings or run.ranks or run.columns]
    for run in meant:
        if not run.columns and not run.mentioned:
            run.mentioned = tuple(dict.fromkeys(named))
    return tuple(run.closed() for run in meant)


def columns_fit(rows: Sequence[LoggedRow], test: str) -> bool:
    """Return whether rows can be those of a test: by reduction, root, and whether it divides the buffer."""
    return all(
        (not row.redop or (row.redop != "none") == (test in _REDUCING))
        and (row.root is not None) == (test in _ROOTED)
        and (row.parts is None or test not in _WHOLE)
        for row in rows
    )


def named_tests(words: str) -> list[str]:
    """Return the tests that a command or a line names, in its order, by the programs alone and not by their folders.

    >>> named_tests("mpirun -np 8 /opt/all_reduce_perf_runs/build/all_gather_perf_mpi -b 8")
    ['all_gather']
    """
    if "_perf" not in words:
        return []
    programs = (token.strip(_AROUND).rsplit("/", 1)[-1] for token in words.split() if "_perf" in token)
    return [found[1] for found in map(_TEST.match, programs) if found]


def _begins(runs: Sequence[OpenRun], line: str) -> bool:
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


def _comment(run: OpenRun, number: int, line: str, named: list[str]) -> None:
    """Apply a line that begins with # to a run; tests in ``named`` belong to the next table."""
    bench, rank, summary = _BENCH.match(line), _RANK.match(line), _SUMMARY.match(line)
    tests = named_tests(line)
    if bench:
        run.program, run.stated, run.schedule = "bench", int(bench[2]), bench[4] or "plan"
        run.collective = _SPELLINGS.get(bench[1], "")
    elif tests and "starting" in line:
        run.program = tests[0]
        named.clear()
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
            run.failed = True
            run.warnings.append(f"line {number}: nccl-tests says {summary[1]} : {summary[2]} FAILED")
        elif summary[1].startswith("Avg") and not run.warnings:
            run.warnings += _average_doubts(run, number, summary[2])
    elif " algbw" in line and " size" in line:
        columns = line.lstrip("#").split()
        first = next((place for place, name in enumerate(columns) if name.endswith("time")), 0)
        if "size" in columns[:first]:
            run.columns = columns
            if not run.program:
                run.mentioned = tuple(dict.fromkeys(named))
            named.clear()
    elif "in-place" in line and "out-of-place" not in line:
        run.in_place_only = True
    else:
        named += tests


def _average_doubts(run: OpenRun, number: int, text: str) -> list[str]:
    """Return a warning if the printed average is not that of the rows, out of place, in place, or both."""
    try:
        printed = float(text)
    except ValueError:
        return []
    places = [[row.timing.busbw for row in run.rows if row.out_of_place]]
    places += [[row.in_place.busbw for row in run.rows if row.in_place]]
    means = [sum(one) / len(one) for one in (*places, [*places[0], *places[1]]) if one]
    if not means or any(abs(printed - mean) <= 0.01 + 0.01 * mean for mean in means):
        return []
    return [
        f"line {number}: Avg bus bandwidth {printed:g} is not the average of the rows, {means[-1]:.4g}: rows are "
        "missing or were changed"
    ]


def short_bus_id(text: str) -> str:
    """Return a bus id as the kernel writes it; older tests print only ``0x07``."""
    return plain_bus_id(text if ":" in text else f"0000:{text.removeprefix('0x').lower():0>2}:00.0")


def _plain_line(runs: list[OpenRun], number: int, line: str, named: list[str]) -> None:
    """Apply a line that is not a comment: a row, or a command that names the test of a run."""
    tokens = line.split()
    if not tokens or not tokens[0].isdecimal():
        named += named_tests(line)
        return
    if (runs and (runs[-1].columns or runs[-1].ranks)) or len(tokens) >= 8:
        if not runs:
            runs.append(OpenRun(number))
        _row(runs[-1], number, line)


_RCCL_NAMES = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter"}
"""Tests by the names that rccl-tests gives its rows, in small letters, if they differ."""


def _json_row(runs: list[OpenRun], number: int, line: str) -> None:
    """Apply a row of rccl-tests, an object for each place of a size; runs differ in test, operation, type or ranks."""
    if '"busBw"' not in line and '"algBw"' not in line:
        return
    try:
        value = json.loads(line)
        name = str(value["name"]).lower().replace("_", "")
        size, inside = int(value["size"]), str(value.get("inPlace", "0")) in ("1", "true", "True")
        ranks = int(value.get("ranks") or 0) or int(value.get("gpus") or 0) or None
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        if not runs:
            runs.append(OpenRun(number))
        runs[-1].warnings.append(
            f"line {number}: the row is cut or lacks a key ({str(error)[:60]}); left out"
        )
        return
    test, kind = _RCCL_NAMES.get(name, name), (str(value.get("type", "")), str(value.get("redop", "")))
    last = runs[-1] if runs else None
    same = last and last.rows and (last.program, last.stated) == (test, ranks)
    if last is None or not same or (last.rows[-1].type, last.rows[-1].redop) != kind:
        last = OpenRun(number, program=test, stated=ranks, began=True, summaries=1)
        runs.append(last)
    known = {key: str(value.get(key)) for key in ("time", "algBw", "busBw")}
    known |= {"#wrong": str(value.get("#wrong", value.get("wrong", "N/A")))}
    timing = timing_of(last, number, str(size), {key.lower(): text for key, text in known.items()})
    if timing is None or not 0 <= size < 1 << 63:
        return
    places = (None, timing) if inside else (timing, None)
    before = last.rows[-1] if last.rows else None
    if inside and before and (before.size, before.in_place) == (size, None):
        last.rows[-1] = replace(before, in_place=timing)
    else:
        last.rows.append(LoggedRow(number, size, *kind, None, *places))


def _row(run: OpenRun, number: int, line: str) -> None:
    """Add a row to a run, or a warning that says why it is left out."""
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
        fault = "is cut" if len(values) < len(columns) else "has more columns than its head"
        run.warnings.append(
            f"line {number}: the row of {_size_words(line.split()[0])} {fault} ({len(values)} of {len(columns)}); "
            "left out"
        )
        return
    fixed = dict(zip(columns[:head], values[:head], strict=False))
    if not fixed["size"].isdecimal():
        run.warnings.append(f"line {number}: {fixed['size'][:20]!r} is not a number of bytes; left out")
        return
    placed: list[Timing | None] = []
    for start in [head] if alone or len(blocks) == 1 else blocks[:2]:
        known = dict(zip(columns[start : start + width], values[start : start + width], strict=False))
        placed.append(timing_of(run, number, fixed["size"], known))
    alone = alone or (run.in_place_only and len(placed) == 1)
    out_of_place, in_place = (None, placed[0]) if alone else (placed[0], placed[1] if placed[1:] else None)
    if out_of_place is None and in_place is None:
        return
    run.rows.append(logged_row(number, int(fixed["size"]), fixed, out_of_place, in_place))


def logged_row(
    line: int,
    size: int,
    fields: Mapping[str, object],
    out_of_place: Timing | None,
    in_place: Timing | None,
) -> LoggedRow:
    """Return the row of some fields as they are printed; a root or count that is not a whole number is None."""
    kind, redop, root, count = (str(fields.get(key, "")) for key in ("type", "redop", "root", "count"))
    root_rank, elements = (int(text) if text.strip().isdecimal() else None for text in (root, count))
    return LoggedRow(line, size, kind, redop, root_rank, out_of_place, in_place, elements)


def _end(columns: Sequence[str]) -> int:
    """Return the end of a table's only block: ``topoplan bench --paced`` has the model's time behind it."""
    return next((place for place, name in enumerate(columns) if name == "model"), len(columns))


def timing_of(run: OpenRun, number: int, size: str, known: Mapping[str, str]) -> Timing | None:
    """Return the measurement in a block of columns; None, and a warning, if a figure is not a number."""
    figures = [
        next((text for name, text in known.items() if name.endswith(key)), "")
        for key in ("time", "algbw", "busbw")
    ]
    if not all(_NUMBER.match(text) and math.isfinite(float(text)) for text in figures) or not float(
        figures[0]
    ):
        run.warnings.append(
            f"line {number}: {_size_words(size)}: {' '.join(figures)} are not a time and bandwidths; left out"
        )
        return None
    stated = next((known[name] for name in ("#wrong", "wrong") if name in known), "N/A")
    wrong = int(float(stated)) if _NUMBER.match(stated) and math.isfinite(float(stated)) else None
    said = ""
    if wrong:
        said = f"{wrong} wrong elements, so its time is meaningless"
    elif wrong is None and stated != "N/A":
        said = f"wrong elements must be a number, got {stated!r}"
    text = f"line {number}: {_size_words(size)}: {said}"
    if said and run.warnings[-1:] != [text]:  # out of place and in place may have the same
        run.warnings.append(text)
    seconds, algbw, busbw = (float(text) for text in figures)
    return Timing(seconds * 1e-6, algbw, busbw, wrong)


def _size_words(text: str) -> str:
    return format_size(int(text)) if text.isdecimal() and len(text) < 20 else text[:20]
