"""What a training job's gradient exchanges did and how long they took: the facts behind `collectives.report`.

Times are seconds on this process's clock, from the making of the recorder on. A step lasts from the end of the one
before to its own end; an exchange lasts from the call that starts it to its completion; a wait is the part in which the
training loop stood still for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace


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
