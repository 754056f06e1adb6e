"""List what changed from one log of nccl-tests or NCCL to another: times by size, and what NCCL set up and chose.

Rows match by test, ranks, type and size. Of rows that match several times the fastest counts: noise only adds time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from topoplan.errors import UsageError
from topoplan.operate.compare.judged_log import TESTS, fits_factor
from topoplan.operate.compare.nccl_debug_run import choice_lines
from topoplan.reading.nccl.debug_log import LoggedCommunicator, NcclLog, parse_nccl_log, via_kind
from topoplan.reading.nccl.perf_json import parse_perf_runs
from topoplan.reading.nccl.perf_text import LoggedRow, PerfRun, columns_fit
from topoplan.units import counted

NOISE = 0.05
"""Relative change of a time that two runs of one setup may have."""

_Key = tuple[str, int, str, int]
"""Test, number of ranks or 0, type of the elements, bytes."""


@dataclass(frozen=True, slots=True)
class SizeChange:
    """A size that both logs have.

    test: its collective, or else its program; empty if not named.
    old, new: seconds; old_busbw, new_busbw: GB/s.
    old_choice, new_choice: NCCL's algorithm and protocol as logged; empty if not.
    """

    test: str
    ranks: int
    type: str
    nbytes: int
    old: float
    new: float
    old_busbw: float
    new_busbw: float
    old_choice: str
    new_choice: str

    @property
    def change(self) -> float:
        """Relative change of the time, above 0 if slower."""
        return self.new / self.old - 1

    @property
    def changed(self) -> bool:
        """Whether the time differs by more than noise."""
        return abs(self.change) > NOISE


@dataclass(frozen=True, slots=True)
class SetupChange:
    """Something that NCCL logged otherwise; empty texts stand for nothing logged."""

    what: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class LogChanges:
    """Changes between two logs.

    sizes: every size that both have.
    setup: every difference in what NCCL says.
    only_old, only_new: rows of one log alone.
    spoken: whether both have lines of NCCL, without which ``setup`` is empty.
    """

    sizes: tuple[SizeChange, ...]
    setup: tuple[SetupChange, ...]
    only_old: int
    only_new: int
    spoken: bool

    @property
    def slower(self) -> tuple[SizeChange, ...]:
        """Sizes that take longer, the worst first."""
        found = (one for one in self.sizes if one.change > NOISE)
        return tuple(sorted(found, key=lambda one: -one.change))

    @property
    def faster(self) -> tuple[SizeChange, ...]:
        """Sizes that take less time, the best first."""
        found = (one for one in self.sizes if one.change < -NOISE)
        return tuple(sorted(found, key=lambda one: one.change))


def log_changes(old: str, new: str) -> LogChanges:
    """Return the changes from one log to another, both as text.

    Raises
    ------
    UsageError
        A text is not a log, or the logs have neither a size nor lines of NCCL in common.

    >>> row = "1048576 262144 float sum -1 {} {} {} 0 {} {} {} 0"
    >>> head = "#  size  count  type  redop  root  time  algbw  busbw  #wrong  time  algbw  busbw  #wrong"
    >>> texts = [f"{head}\\n{row.format(*times * 2)}" for times in ((50, 20.97, 36.7), (75, 13.98, 24.47))]
    >>> [round(one.change, 3) for one in log_changes(*texts).slower]
    [0.5]
    """
    rows, spoken = [], []
    for where, text in (("the first", old), ("the second", new)):
        said = parse_nccl_log(text)
        found = _rows(text, said)
        if not found and said is None and any(run.rows for run in parse_perf_runs(text)):
            raise UsageError(
                f"{where} log has no right row: all have wrong elements; topoplan explain judges it alone"
            )
        if not found and said is None:
            raise UsageError(
                f"{where} log holds no run of nccl-tests and no line of NCCL_DEBUG=INFO; give their output"
            )
        rows.append(found)
        spoken.append(said)
    both = [key for key in rows[0] if key in rows[1]]
    sizes = []
    for key in both:
        (before, old_choice), (after, new_choice) = rows[0][key], rows[1][key]
        test, ranks, kind, size = key
        times = (before.timing.seconds, after.timing.seconds)
        busbws = (before.timing.busbw, after.timing.busbw)
        sizes.append(SizeChange(test, ranks, kind, size, *times, *busbws, old_choice, new_choice))
    if not both and None in spoken:
        raise UsageError("the logs have no size in common: give two runs of the same test on as many ranks")
    before_setup, after_setup = (dict(_setup(one)) if one else {} for one in spoken)
    setup = []
    for what in dict.fromkeys((*before_setup, *after_setup)) if None not in spoken else ():
        pair = before_setup.get(what, ""), after_setup.get(what, "")
        if pair[0] != pair[1]:
            setup.append(SetupChange(what, *pair))
    return LogChanges(
        tuple(sizes), tuple(setup), len(rows[0]) - len(both), len(rows[1]) - len(both), None not in spoken
    )


def _rows(text: str, spoken: NcclLog | None) -> dict[_Key, tuple[LoggedRow, str]]:
    """Return the fastest right row of each key, and NCCL's choice for it."""
    found: dict[_Key, tuple[LoggedRow, str]] = {}
    for run in parse_perf_runs(text):
        ranks = run.stated or len(run.ranks)
        test = run.collective or run.program or _test_by_columns(run, ranks)
        for row in run.rows:
            if row.wrong or not row.size:
                continue
            key = (test, ranks, row.type or "", row.size)
            if key not in found or row.timing.seconds < found[key][0].timing.seconds:
                found[key] = (row, _choice(spoken, test, row.size))
    return found


def _test_by_columns(run: PerfRun, ranks: int) -> str:
    """Return the collectives that the columns of a run without a name fit; empty if its ranks are not known."""
    if ranks < 2:
        return ""
    return " or ".join(
        name
        for name, test in TESTS.items()
        if columns_fit(run.rows, test) and all(fits_factor(row.timing, name, ranks) for row in run.rows)
    )


def _choice(spoken: NcclLog | None, test: str, size: int) -> str:
    """Return the logged algorithm and protocol of a size, several if communicators differ."""
    functions = [
        f"{choice.algorithm}/{choice.protocol}"
        for one in (spoken.communicators if spoken else ())
        for choice in one.choices
        if choice.size == size and choice.function.lower() == test.replace("_", "")
    ]
    return " ".join(dict.fromkeys(functions))


def _setup(log: NcclLog) -> Iterator[tuple[str, str]]:
    """Yield what NCCL says of itself, of its largest communicator, and of its settings."""
    yield "NCCL", " ".join(log.versions) or log.version
    yield from log.settings
    if log.communicators:
        yield from _communicator(log.communicators[0])


def _communicator(one: LoggedCommunicator) -> Iterator[tuple[str, str]]:
    yield "ranks", str(one.size or "")
    yield "channels", str(one.channels or len(one.rings) or "")
    yield "NVLS channels", str(one.nvls_channels or "")
    ways = Counter(via_kind(joined.via) for joined, _ in one.joined())
    yield (
        "transports",
        ", ".join(f"{way} for {counted(count, 'pair')}" for way, count in sorted(ways.items())),
    )
    orders = sorted(set(one.rings.values()))
    yield "rings", "; ".join(" ".join(map(str, ring)) for ring in orders)
    for line in choice_lines(one):
        function, _, words = line.partition(": ")
        yield f"{function} algorithm", words
