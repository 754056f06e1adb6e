"""Record a training job's gradient exchanges, and report them: a line at the start, a table, a timeline.

Times are seconds on this process's clock, from the making of the recorder on. A step lasts from the end of the one
before to its own end; an exchange lasts from the call that starts it to its completion; a wait is the part in which
the training loop stood still for it.

Effective bandwidth is the gradient's bytes over the time of its exchange, waiting in line included, beside the bound
that no plan on this machine exceeds.
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
from collectives.training.exchange_settings import ExchangeSettings
from collectives.training.modes import LocalSGD, Straggler, mode_of
from topoplan.errors import UsageError
from topoplan.model.asynchronous_training import run_clocks
from topoplan.units import format_seconds, format_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class ExchangeRecord:
    """One gradient exchange.

    Parameters
    ----------
    step : int
    key : str
        Of the bucket.
    nbytes : int
        Of the gradient.
    density : float
        Share of its elements that was exchanged: 1 where it was dense.
    how : str
        Schedule of the plan, or the sparse exchange.
    bound : float
        GB/s of algorithm bandwidth that no plan exceeds; infinite where nothing is known.
    started, ended : float
    """

    step: int
    key: str
    nbytes: int
    density: float
    how: str
    bound: float
    started: float
    ended: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.started


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of training.

    Parameters
    ----------
    step : int
    started, ended : float
    waited : float
        Seconds in which the loop stood still for exchanges.
    """

    step: int
    started: float
    ended: float
    waited: float


@dataclass(frozen=True, slots=True)
class ChangeRecord:
    """From one exchange to the next other ranks took part. Ranks are numbered as in the first plan.

    Parameters
    ----------
    step : int
    key : str
        Of the bucket from which on it were others.
    before, after : tuple of int
        The ranks whose gradients were averaged.
    repeated : tuple of str
        The buckets that this rank exchanged again.
    kept : float or None
        Norm of what this rank had kept of gradients at the end of the step; None where ranks keep nothing.
    notes : tuple of str
        What the communicator planned anew.
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
        """Who was there before only."""
        return tuple(rank for rank in self.before if rank not in self.after)

    @property
    def joined(self) -> tuple[int, ...]:
        """Who was not there before."""
        return tuple(rank for rank in self.after if rank not in self.before)

    def __str__(self) -> str:
        lost, joined = self.without, self.joined
        parts = [f"without rank {', '.join(map(str, lost))}"] if lost else []
        parts += [f"with rank {', '.join(map(str, joined))}"] if joined else []
        told = f"step {self.step}, from {self.key} on: {' and '.join(parts)}, {len(self.after)} ranks"
        if self.repeated:
            told += f"; exchanged again: {', '.join(self.repeated)}"
        if lost and self.kept is not None:
            told += (
                f"; what {len(lost)} rank{'s' * (len(lost) > 1)} had kept is lost (how much is not known, "
                f"this rank keeps a norm of {self.kept:.3g})"
            )
        return told


class Recorder:
    """Collects records; the last ones are kept.

    Parameters
    ----------
    name : str
        What the exchanges belong to.
    ranks : int
    most : int
        Exchanges and steps that are kept.

    Attributes
    ----------
    step : int
        Steps so far.
    among : tuple of int
        The ranks that took part in the last exchange of which `gave` was told, as numbered in the first plan.

    Examples
    --------
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
        """Seconds since the recorder was made."""
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
        step: int | None = None,
    ) -> None:
        """An exchange has just ended; of the current step unless told otherwise. Any thread may say so."""
        record = ExchangeRecord(
            self.step if step is None else step, key, nbytes, density, how, bound, started, self.now()
        )
        with self._lock:
            self._exchanges.append(record)
            del self._exchanges[: -self._most]

    def gave(self, key: str, among: tuple[int, ...], *, repeated: bool, step: int | None = None) -> None:
        """Whose gradients an exchange has averaged (`Handle.among`); said in the order of the exchanges."""
        if not among:
            return
        if self.among and among != self.among:
            self._changes.append(ChangeRecord(self.step if step is None else step, key, self.among, among))
        if repeated and self._changes:
            last = self._changes[-1]
            self._changes[-1] = replace(last, repeated=(*last.repeated, key))
        self.among, self.ranks = among, len(among)

    def explain_changes(self, kept: float | None, notes: tuple[str, ...]) -> None:
        """Say of the changes that were not explained yet what this rank has kept and what was planned."""
        for place in range(self._explained, len(self._changes)):
            last = place == len(self._changes) - 1
            self._changes[place] = replace(self._changes[place], kept=kept, notes=notes if last else ())
        self._explained = len(self._changes)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The loop stands still inside."""
        started = self.now()
        try:
            yield
        finally:
            self._waited += self.now() - started

    def end_step(self) -> None:
        """The step is over; the next one begins."""
        now = self.now()
        with self._lock:
            self._steps.append(StepRecord(self.step, self._step_started, now, self._waited))
            del self._steps[: -self._most]
        self.step += 1
        self._step_started = now
        self._waited = 0.0

    def exchanges(self) -> list[ExchangeRecord]:
        """In the order in which they ended."""
        with self._lock:
            return list(self._exchanges)

    def changes(self) -> list[ChangeRecord]:
        """In order; all of them are kept."""
        return list(self._changes)

    def steps(self) -> list[StepRecord]:
        """In order."""
        with self._lock:
            return [replace(one) for one in self._steps]


LOGGER = logging.getLogger("collectives")

BAR, BORDER, WAIT = "#4c72b0", "#333333", "#c44e52"

_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


def register_recorder(recorder: Recorder) -> Recorder:
    """Let `report` speak of a recorder for as long as it lives."""
    _recorders.add(recorder)
    return recorder


@dataclass(frozen=True, slots=True)
class BucketRow:
    """The exchanges of one bucket.

    Parameters
    ----------
    key : str
    nbytes : int
        Of its gradient, in the last step.
    how : str
        Schedule of the plan, or the sparse exchange, in the last step.
    density : float
    exchanges : int
    seconds : float
        Median.
    bandwidth, bound : float
        GB/s; the bound is infinite where nothing is known.
    """

    key: str
    nbytes: int
    how: str
    density: float
    exchanges: int
    seconds: float
    bandwidth: float
    bound: float


@dataclass(frozen=True, slots=True)
class Report:
    """What the exchanges of one hook or synchroniser did.

    Parameters
    ----------
    name : str
    ranks : int
    steps : int
    seconds : float
        Of the median step.
    exchanging, waiting : float
        Seconds of the median step in which any exchange ran, and in which the loop stood still for one.
    nbytes : int
        Of all gradients that were exchanged.
    buckets : tuple of BucketRow
    exchanges : tuple of ExchangeRecord
    step_records : tuple of StepRecord
    changes : tuple of ChangeRecord
        Where other ranks took part than before.
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

    def __str__(self) -> str:
        if not self.exchanges:
            return (
                f"{self.name} on {self.ranks} ranks, {self.steps} steps of {format_seconds(self.seconds)}: nothing has "
                "been exchanged yet"
            )
        heads = ("bucket", "size", "plan", "density", "exchanges", "time", "GB/s", "bound")
        rows = [
            (
                row.key,
                format_size(row.nbytes),
                row.how,
                f"{row.density:g}",
                str(row.exchanges),
                format_seconds(row.seconds),
                f"{row.bandwidth:.3g}",
                f"{row.bound:.4g}" if math.isfinite(row.bound) else "-",
            )
            for row in self.buckets
        ]
        widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
        lines = [
            f"{self.name} on {self.ranks} ranks, {self.steps} steps of {format_seconds(self.seconds)}: "
            f"exchanges run for {format_seconds(self.exchanging)} of it, and the loop waits "
            f"{format_seconds(self.waiting)}; {format_size(self.nbytes)} of gradients"
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
        """Steps a second of the slowest rank by the clock model, if all ranks compute as long as this one.

        A step computes for the median of what it does not wait, and an exchange holds up the loop for the median of
        what it did. Beside the measured rate it tells what the mode makes of a straggler that is late in fewer steps
        than half.

        Parameters
        ----------
        mode : BSP, SSP, ASP, LocalSGD, str or None
            As `collectives.training.modes.mode_of` takes it.
        straggler : Straggler, optional
            A rank that is late.
        held : float, optional
            Seconds that its factor multiplies; those of a step's computing by default.

        Raises
        ------
        UsageError
            No mode, or no step has ended.
        """
        found = mode_of(mode)
        if not self.step_records:
            raise UsageError("no step has ended, so none can be predicted from; train for a step")
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
        return run_clocks(times, send, staleness=found.bound, every=every).steps_per_second

    def plot(self, path: str | Path | None = None, *, last: int = 5) -> Figure:
        """A picture of the last steps: what ran when, a row for each bucket.

        Parameters
        ----------
        path : path, optional
            Where to save it.
        last : int
            Steps.
        """
        from topoplan.operate.plot.canvas import save_figure

        figure = _timeline(self, last=last)
        if path is not None:
            save_figure(figure, path)
        return figure


def report(recorder: Recorder | None = None) -> Report:
    """What the hook or synchroniser of this process has done so far; of several, the one that moved most.

    Where nothing has been exchanged yet the report is an empty one, and says so; it is no error, since a job that has
    finished had better not end with one.

    Examples
    --------
    >>> recorder = Recorder("demo", ranks=2)
    >>> recorder.add("bucket 0", 4096, recorder.now(), density=1.0, how="trees", bound=50.0)
    >>> recorder.end_step()
    >>> told = report(recorder)
    >>> told.steps, told.nbytes, told.buckets[0].how
    (1, 4096, 'trees')
    """
    chosen = recorder
    if chosen is None:
        watched = sorted(_recorders, key=lambda one: (-sum(r.nbytes for r in one.exchanges()), one.name))
        chosen = watched[0] if watched else None
    if chosen is None:
        chosen = Recorder("this process", ranks=0)
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
    )


def _busy(records: Sequence[ExchangeRecord]) -> float:
    """Seconds in which at least one of them ran."""
    total, until = 0.0, -math.inf
    for one in sorted(records, key=lambda each: each.started):
        total += max(0.0, one.ended - max(one.started, until))
        until = max(until, one.ended)
    return total


def _median_of(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


def _timeline(report: Report, *, last: int) -> Figure:
    """The last steps of a report; a row for each bucket, in ms from the first of these steps on."""
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
    sizes = {row.key: format_size(row.nbytes) for row in report.buckets}
    axes.set_yticks(range(len(keys) + 1), [f"{key} ({sizes[key]})" for key in keys] + ["the loop waits"])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(
        f"{report.name}: exchanges of the last {len(steps)} steps on {report.ranks} ranks; lines end steps"
    )
    return figure


def start_line(communicator: Communicator, how: ExchangeSettings) -> str:
    """What a person wants to know of a job's exchanges.

    Examples
    --------
    >>> import topoplan
    >>> with Communicator(topoplan.plan(topoplan.load("dgx-2"))) as comm:
    ...     told = start_line(comm, ExchangeSettings())
    >>> told.split(": ")[1]
    'one-hop of dgx-2 (16 of height 1), 80 GB/s of at most 80, chunks of 256KB'
    """
    plan = communicator.plan
    chosen = plan.plans[-1]
    chunk = communicator.chunk_bytes
    chunks = "chunks searched for" if chunk is None else f"chunks of {format_size(chunk)}"
    kind = "dense gradients" if how.density is None else "sparse gradients"
    engine = f" ({communicator.engine})" if communicator.engine else ""
    return (
        f"{kind}, {how.mode}, {communicator.size} ranks over {communicator.backend}{engine}: {chosen.schedule} of "
        f"{chosen.topology.name} ({chosen.trees} of height {chosen.height}), {chosen.rate:.4g} GB/s of at most "
        f"{chosen.bound:.4g}, {chunks}"
    )


def log_start(communicator: Communicator, how: ExchangeSettings) -> None:
    """Log it, on rank 0, at level INFO of the logger ``collectives``."""
    if 0 in communicator.ranks:
        LOGGER.info(start_line(communicator, how))
