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


class Recorder:
    """Collects records; the last ones are kept.

    Parameters
    ----------
    name : str
        What the exchanges belong to.
    ranks : int
    most : int
        Exchanges and steps that are kept.

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

    def steps(self) -> list[StepRecord]:
        """In order."""
        with self._lock:
            return [replace(one) for one in self._steps]
