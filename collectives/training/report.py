"""Record a training job's gradient exchanges, and report them: a line at the start, a table, a timeline.

Times are seconds on this process's clock since the recorder was made. A step lasts from the end of the previous one to
its own end; an exchange lasts from the call that starts it to its completion; a wait is the time in which the training
loop is blocked by it.

Effective bandwidth is the gradient's bytes over the time of its exchange, queueing included, beside the bound that no
plan on this machine exceeds.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from collectives.communicator.communicator import Communicator
from collectives.tables.compiled import compile_seconds
from collectives.training.exchange_settings import ExchangeSettings
from collectives.training.modes import LocalSGD, OuterMode, Straggler, mode_of
from topoplan.errors import UsageError
from topoplan.model.asynchronous_training import run_clocks
from topoplan.units import check_type, format_seconds, format_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class ExchangeRecord:
    """One gradient exchange.

    `nbytes` are those of the gradient; `density` is the share of its elements that was exchanged, 1 if dense; `how` is
    the schedule of the plan, or the sparse exchange; `bound` is in GB/s of algorithm bandwidth, infinite if unknown;
    times are in seconds; `sent` is what a rank gave, as a fraction of `nbytes`.
    """

    step: int
    key: str
    nbytes: int
    density: float
    how: str
    bound: float
    started: float
    ended: float
    sent: float = 1.0

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.ended - self.started


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of training; `waited` are the seconds in which exchanges blocked the loop."""

    step: int
    started: float
    ended: float
    waited: float


@dataclass(frozen=True, slots=True)
class ChangeRecord:
    """A change of the membership from one exchange to the next, by original ranks.

    `key` is the first bucket with the new membership; `repeated` are the buckets that this rank exchanged again; `kept`
    is the norm of this rank's residuals at the end of the step, None without residuals; `notes` say what the
    communicator planned anew.
    """

    step: int
    key: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    repeated: tuple[str, ...] = ()
    kept: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def without(self) -> tuple[int, ...]:
        """Ranks that left."""
        return tuple(rank for rank in self.before if rank not in self.after)

    @property
    def joined(self) -> tuple[int, ...]:
        """Ranks that joined."""
        return tuple(rank for rank in self.after if rank not in self.before)

    def __str__(self) -> str:
        lost, joined = self.without, self.joined
        parts = [f"without rank {', '.join(map(str, lost))}"] if lost else []
        parts += [f"with rank {', '.join(map(str, joined))}"] if joined else []
        text = f"step {self.step}, from {self.key} on: {' and '.join(parts)}, {len(self.after)} ranks"
        if self.repeated:
            text += f"; exchanged again: {', '.join(self.repeated)}"
        if lost and self.kept is not None:
            text += (
                f"; residuals of {len(lost)} rank{'s' * (len(lost) > 1)} are lost (their norm is not known, "
                f"that of this rank is {self.kept:.3g})"
            )
        return text


class Recorder:
    """Collects the last `most` records of exchanges and of steps.

    `step` counts steps; `among` are the original ranks of the last exchange (`gave`).

    >>> recorder = Recorder("demo", ranks=2)
    >>> started = recorder.now()
    >>> recorder.add("bucket 0", 4096, started, density=1.0, how="trees", bound=50.0)
    >>> with recorder.waiting():
    ...     pass
    >>> recorder.end_step()
    >>> recorder.step, len(recorder.exchanges()), recorder.steps()[0].step
    (1, 1, 0)
    """

    def __init__(self, name: str, *, ranks: int, most: int = 100_000) -> None:
        self.name = name
        self.ranks = ranks
        self.step = 0
        self.among: tuple[int, ...] = ()
        self.compiled = compile_seconds()
        """Seconds of compilation that `log_compilation` has seen."""
        self._changes: list[ChangeRecord] = []
        self._explained = 0
        self._most = most
        self._zero = time.perf_counter()
        self._step_started = 0.0
        self._waited = 0.0
        self._exchanges: list[ExchangeRecord] = []
        self._steps: list[StepRecord] = []
        self._lock = threading.Lock()

    def now(self) -> float:
        """Return the seconds since the recorder was made."""
        return time.perf_counter() - self._zero

    def add(
        self,
        key: str,
        nbytes: int,
        started: float,
        *,
        density: float,
        how: str,
        bound: float,
        sent: float | None = None,
        step: int | None = None,
    ) -> None:
        """Record an exchange that has just ended, of the current step by default; any thread may call it.

        `sent` is `density` by default, as of dense gradients and of filters.
        """
        if sent is None:
            sent = density
        when = self.step if step is None else step
        record = ExchangeRecord(when, key, nbytes, density, how, bound, started, self.now(), sent)
        with self._lock:
            self._exchanges.append(record)
            del self._exchanges[: -self._most]

    def gave(self, key: str, among: tuple[int, ...], *, repeated: bool, step: int | None = None) -> None:
        """Note the ranks whose gradients an exchange averaged (`Handle.among`), in the order of the exchanges."""
        if not among:
            return
        if self.among and among != self.among:
            self._changes.append(ChangeRecord(self.step if step is None else step, key, self.among, among))
        if repeated and self._changes:
            last = self._changes[-1]
            self._changes[-1] = replace(last, repeated=(*last.repeated, key))
        self.among, self.ranks = among, len(among)

    def explain_changes(self, kept: float | None, notes: tuple[str, ...]) -> None:
        """Add the norm of residuals and notes to the changes that have none yet."""
        for place in range(self._explained, len(self._changes)):
            last = place == len(self._changes) - 1
            self._changes[place] = replace(self._changes[place], kept=kept, notes=notes if last else ())
        self._explained = len(self._changes)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as a wait."""
        started = self.now()
        try:
            yield
        finally:
            self._waited += self.now() - started

    @property
    def ended(self) -> int:
        """Number of the steps on record."""
        return len(self._steps)

    def end_step(self) -> None:
        """End the step, and begin the next one."""
        now = self.now()
        with self._lock:
            self._steps.append(StepRecord(self.step, self._step_started, now, self._waited))
            del self._steps[: -self._most]
        self.step += 1
        self._step_started = now
        self._waited = 0.0

    def exchanges(self) -> list[ExchangeRecord]:
        """Return the exchanges in the order in which they ended."""
        with self._lock:
            return list(self._exchanges)

    def changes(self) -> list[ChangeRecord]:
        """Return all changes in order."""
        return list(self._changes)

    def steps(self) -> list[StepRecord]:
        """Return the steps in order."""
        with self._lock:
            return [replace(one) for one in self._steps]


LEAST_RATE = 1e-3
"""GB/s below which the report has no rate: such an exchange waits for something else, as for compilers."""

COMPILED_LONG = 2.0
"""Seconds of compilation that are worth a line."""

LOGGER = logging.getLogger("collectives")

BAR, BORDER, WAIT = "#0072B2", "#333333", "#D55E00"

_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


def register_recorder(recorder: Recorder) -> Recorder:
    """Let `report` find a recorder as long as it lives."""
    _recorders.add(recorder)
    return recorder


@dataclass(frozen=True, slots=True)
class BucketRow:
    """The exchanges of one bucket.

    `nbytes`, `how`, `density` and `sent` are those of the last step; `seconds` is the median; `bandwidth` and `bound`
    are in GB/s, the bound infinite if unknown.
    """

    key: str
    nbytes: int
    how: str
    density: float
    exchanges: int
    seconds: float
    bandwidth: float
    bound: float
    sent: float = 1.0


@dataclass(frozen=True, slots=True)
class Report:
    """Summary of the exchanges of one hook or synchronizer.

    `seconds`, `exchanging` and `waiting` are those of the median step: all of it, while any exchange ran, and while one
    blocked the loop. `nbytes` are those of all exchanged gradients.
    """

    name: str
    ranks: int
    steps: int
    seconds: float
    exchanging: float
    waiting: float
    nbytes: int
    buckets: tuple[BucketRow, ...]
    exchanges: tuple[ExchangeRecord, ...]
    step_records: tuple[StepRecord, ...]
    changes: tuple[ChangeRecord, ...] = ()

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank gave for its exchanges."""
        return round(math.fsum(one.nbytes * one.sent for one in self.exchanges))

    def _names(self) -> dict[str, str]:
        """Return the names of the rows by key: buckets that only the first step had are marked."""
        first = min(one.step for one in self.exchanges)
        later = {one.key for one in self.exchanges if one.step > first}
        early = [row.key for row in self.buckets if later and row.key not in later]
        names = {row.key: row.key for row in self.buckets}
        return names | {key: f"first step: {key}" if len(early) > 1 else "first step" for key in early}

    def __str__(self) -> str:
        if not self.exchanges:
            return (
                f"{self.name} on {self.ranks} ranks, {self.steps} steps of {format_seconds(self.seconds)}: nothing has "
                "been exchanged yet"
            )
        heads = ("bucket", "size", "sent", "plan", "exchanges", "time", "GB/s", "bound")
        names = self._names()
        rows = [
            (
                names[row.key],
                _decimal_size(row.nbytes),
                f"{100 * row.sent:.3g} %",
                row.how,
                str(row.exchanges),
                format_seconds(row.seconds),
                f"{row.bandwidth:.3g}" if row.bandwidth >= LEAST_RATE else "-",
                f"{row.bound:.4g}" if math.isfinite(row.bound) else "-",
            )
            for row in self.buckets
        ]
        widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
        lines = [
            f"{self.name} on {self.ranks} ranks, {self.steps} steps of {format_seconds(self.seconds)}: "
            f"exchanges run for {format_seconds(self.exchanging)} of it, and the loop waits "
            f"{format_seconds(self.waiting)}; {_decimal_size(self.nbytes)} of gradients, "
            f"{_decimal_size(self.sent_bytes)} sent per rank"
        ]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in (heads, *rows)
        ]
        for change in self.changes:
            lines += [f"{change}", *(f"  {note}" for note in change.notes)]
        return "\n".join(line.rstrip() for line in lines)

    def predicted(
        self, mode: object = None, straggler: Straggler | None = None, *, held: float | None = None
    ) -> float:
        """Return the steps a second of the slowest rank by the clock model, if all ranks compute as long as this one.

        A step computes for the median of its time without waits, and an exchange blocks the loop for the median of its
        wait. Compared with the measured rate it shows the effect of the mode on a straggler that is late in fewer than
        half of the steps. `held` are the seconds that the straggler's factor multiplies, by default those of a step's
        computing. Raises `UsageError` for an unknown mode (`mode_of`), or if no step has ended.
        """
        found = mode_of(mode)
        if not self.step_records:
            raise UsageError("predicted() needs a step that has ended; train for a step")
        work = _median_of([step.ended - step.started - step.waited for step in self.step_records])
        send = _median_of([step.waited for step in self.step_records])
        late = straggler or Straggler(rank=0, factor=1.0, first=0, last=0)
        times = [
            [
                work + late.delay(rank, step, work if held is None else held)
                for step in range(len(self.step_records))
            ]
            for rank in range(max(1, self.ranks))
        ]
        every = found.every if isinstance(found, LocalSGD) else 1
        if isinstance(found, OuterMode):
            every = found.period
        return run_clocks(times, send, staleness=found.bound, every=every).steps_per_second

    def plot(self, path: str | Path | None = None, *, last: int = 5) -> Figure:
        """Return a timeline of the last steps, a row for each bucket, and save it if a path is given."""
        from topoplan.operate.plot.canvas import save_figure

        figure = _timeline(self, last=last)
        if path is not None:
            save_figure(figure, path)
        return figure


def report(recorder: Recorder | None = None) -> Report:
    """Return the report of a recorder, by default of that of this process which has moved most bytes.

    Without exchanges the report is empty, and its text says so; that is not an error, since a job that has finished
    should not end with one.

    Examples
    --------
    >>> recorder = Recorder("demo", ranks=2)
    >>> recorder.add("bucket 0", 4096, recorder.now(), density=1.0, how="trees", bound=50.0)
    >>> recorder.end_step()
    >>> found = report(recorder)
    >>> found.steps, found.nbytes, found.buckets[0].how
    (1, 4096, 'trees')
    """
    chosen = recorder
    if chosen is None:
        known = sorted(_recorders, key=lambda one: (-sum(r.nbytes for r in one.exchanges()), one.name))
        chosen = known[0] if known else None
    if chosen is None:
        chosen = Recorder("this process", ranks=0)
    check_type("recorder", chosen, Recorder, remedy="give that of a HookState or GradientSynchronizer")
    exchanges, steps = chosen.exchanges(), chosen.steps()
    by_key: dict[str, list[ExchangeRecord]] = {}
    for one in exchanges:
        by_key.setdefault(one.key, []).append(one)
    return Report(
        name=chosen.name,
        ranks=chosen.ranks,
        steps=len(steps),
        seconds=_median_of([step.ended - step.started for step in steps]),
        exchanging=_median_of([_busy([e for e in exchanges if e.step == step.step]) for step in steps]),
        waiting=_median_of([step.waited for step in steps]),
        nbytes=sum(one.nbytes for one in exchanges),
        buckets=tuple(_bucket_row(key, records) for key, records in by_key.items()),
        exchanges=tuple(exchanges),
        step_records=tuple(steps),
        changes=tuple(chosen.changes()),
    )


def _bucket_row(key: str, records: Sequence[ExchangeRecord]) -> BucketRow:
    last = records[-1]
    seconds = _median_of([one.seconds for one in records])
    return BucketRow(
        key=key,
        nbytes=last.nbytes,
        how=last.how,
        density=last.density,
        exchanges=len(records),
        seconds=seconds,
        bandwidth=last.nbytes / seconds / 1e9 if seconds else 0.0,
        bound=last.bound,
        sent=last.sent,
    )


def _decimal_size(nbytes: int) -> str:
    """Return a short text for a number of bytes in decimal units, as those of GB/s.

    >>> _decimal_size(68_000_000), _decimal_size(1999), _decimal_size(7)
    ('68.0 MB', '2.00 KB', '7 B')
    """
    for suffix, unit in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= unit:
            value = nbytes / unit
            return f"{value:#.3g} {suffix}" if value < 100 else f"{value:.0f} {suffix}"
    return f"{nbytes} B"


def _busy(records: Sequence[ExchangeRecord]) -> float:
    total, until = 0.0, -math.inf
    for one in sorted(records, key=lambda each: each.started):
        total += max(0.0, one.ended - max(one.started, until))
        until = max(until, one.ended)
    return total


def _median_of(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


def _timeline(report: Report, *, last: int) -> Figure:
    """Return a figure of the last steps, in ms since the first of them."""
    from topoplan.operate.plot.canvas import new_figure

    steps = report.step_records[-last:]
    first = steps[0].step if steps else 0
    shown = [one for one in report.exchanges if one.step >= first]
    zero = min([step.started for step in steps] + [one.started for one in shown], default=0.0)
    keys = list(dict.fromkeys(one.key for one in shown))
    figure = new_figure(10, 1.6 + 0.32 * len(keys))
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    for row, key in enumerate(keys):
        mine = [one for one in shown if one.key == key]
        axes.broken_barh(
            [((one.started - zero) * 1e3, one.seconds * 1e3) for one in mine],
            (row - 0.4, 0.8),
            color=BAR,
            lw=0,
        )
    for step in steps:
        axes.axvline((step.ended - zero) * 1e3, color=BORDER, lw=0.8)
        if step.waited:
            start = step.ended - step.waited
            axes.broken_barh(
                [((start - zero) * 1e3, step.waited * 1e3)], (len(keys) - 0.4, 0.8), color=WAIT, lw=0
            )
    sizes = {row.key: _decimal_size(row.nbytes) for row in report.buckets}
    axes.set_yticks(range(len(keys) + 1), [f"{key} ({sizes[key]})" for key in keys] + ["the loop waits"])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(
        f"{report.name}: exchanges of the last {len(steps)} steps on {report.ranks} ranks; lines end steps"
    )
    return figure


def start_line(communicator: Communicator, how: ExchangeSettings) -> str:
    """Return one line on plan, rate and bound of a job's exchanges.

    >>> import topoplan
    >>> with Communicator(topoplan.plan(topoplan.load("dgx-2"))) as comm:
    ...     line = start_line(comm, ExchangeSettings())
    >>> line.split(": ")[1]
    'one-hop of dgx-2 (16 of height 1), 80 GB/s of at most 80, chunks of 256KB'
    """
    plan = communicator.plan
    chosen = plan.plans[-1]
    chunk = communicator.chunk_bytes
    chunks = "chunks searched for" if chunk is None else f"chunks of {format_size(chunk)}"
    kind = "dense gradients" if how.top_k is None else "sparse gradients"
    engine = f" ({communicator.engine})" if communicator.engine else ""
    return (
        f"{kind}, {how.mode}, {communicator.size} ranks over {communicator.backend}{engine}: {chosen.schedule} of "
        f"{chosen.topology.name} ({chosen.num_trees} of height {chosen.height}), {chosen.rate:.4g} GB/s of at most "
        f"{chosen.bound:.4g}, {chunks}"
    )


def log_start(communicator: Communicator, how: ExchangeSettings) -> None:
    """Log `start_line` on rank 0, at level INFO of the logger ``collectives``."""
    if 0 in communicator.ranks:
        LOGGER.info(start_line(communicator, how))


def log_compilation(recorder: Recorder, communicator: Communicator) -> None:
    """Log on rank 0 that loops were compiled, if it took long, at level WARNING, which Python shows by default.

    Later steps than the first two use what these have compiled.
    """
    if recorder.ended > 2:
        return
    seconds = compile_seconds() - recorder.compiled
    if seconds > COMPILED_LONG:
        recorder.compiled += seconds
        if 0 in communicator.ranks:
            LOGGER.warning(
                f"compiling loops for this processor took {seconds:.1f} s, once per user; if it happens again, set "
                "NUMBA_CACHE_DIR to a folder that you, and no other user, can write"
            )
