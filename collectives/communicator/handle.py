"""Run collectives in the background, one after another in the order in which they were called."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from collectives.tables.array_library import ArrayLibrary
from collectives.tables.numpy_arrays import NumpyArrays
from topoplan.errors import RefusedError

if TYPE_CHECKING:
    from collectives.sparse.exchange_choice import SparseExplanation

Result = TypeVar("Result")
Other = TypeVar("Other")


@dataclass(slots=True, eq=False)
class CollectiveOutcome:
    """How a collective came to its end: filled in while it runs.

    Parameters
    ----------
    repeated : bool
        Whether it was run again, by fewer ranks than it was called on.
    without : tuple of int
        The ranks that its result is without, as they were counted when it was called.
    among : tuple of int
        The ranks whose arrays are in the result, by their numbers in the first plan.
    exchange : Explanation or None
        Of a sparse collective: by which exchange it ran.
    """

    repeated: bool = False
    without: tuple[int, ...] = ()
    among: tuple[int, ...] = ()
    exchange: SparseExplanation | None = None


class Handle(Generic[Result]):
    """A collective that was started with ``async_op=True``.

    Until it is done the input arrays must not be changed, and the ``out`` arrays neither read nor changed; on a GPU
    that means work which is queued after the call. When it is done, any stream may use them.
    """

    def __init__(
        self,
        future: Future[Result],
        received: Callable[[object], None] | None = None,
        outcome: CollectiveOutcome | None = None,
    ) -> None:
        self._future = future
        self._received = received
        self._outcome = outcome or CollectiveOutcome()

    @property
    def repeated(self) -> bool:
        """Once it is done: whether it was run again without ranks that died (``on_failure="shrink"``)."""
        return self._outcome.repeated

    @property
    def without(self) -> tuple[int, ...]:
        """Once it is done: the ranks that its result is without, as they were counted when it was called.

        They died on the way, or before it began, where it waited behind others. One that died when all had their
        results is not among them.
        """
        return self._outcome.without

    @property
    def among(self) -> tuple[int, ...]:
        """Once it is done: the ranks whose arrays are in the result, by their numbers in the first plan.

        The same on all ranks, whoever has died meanwhile, which `Communicator.size` need not be: one may have had its
        result just before the others went on without a rank. Empty where nothing was exchanged.
        """
        return self._outcome.among

    @property
    def exchange(self) -> SparseExplanation | None:
        """Once it is done, of a sparse collective: what travelled, and why."""
        return self._outcome.exchange

    @staticmethod
    def of(result: Result) -> Handle[Result]:
        """One that has ended, with this result."""
        future: Future[Result] = Future()
        future.set_result(result)
        return Handle(future)

    @staticmethod
    def around(found: Any) -> Handle[Any]:
        """What a collective gave: its handle, or without ``async_op`` one that has ended with its result."""
        return found if isinstance(found, Handle) else Handle.of(found)

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def when_done(self, then: Callable[[], object]) -> None:
        """Call a function when it has ended, well or not: in the thread that ran it, or at once."""
        self._future.add_done_callback(lambda _: then())

    def then(self, make: Callable[[Result], Other]) -> Handle[Other]:
        """One whose result is made of this one's when it is there, in the thread that ends it; errors are passed on."""
        future: Future[Other] = Future()

        def follow() -> None:
            try:
                future.set_result(make(self.wait()))
            except BaseException as error:  # whoever waits is told of it
                future.set_exception(error)

        self.when_done(follow)
        return Handle(future, outcome=self._outcome)

    def wait(self, timeout: float | None = None) -> Result:
        """The result, once it is there.

        Parameters
        ----------
        timeout : float, optional
            Seconds; for ever by default, since a back end ends by itself when a peer fails.

        Raises
        ------
        TimeoutError
            It is still running.
        TopoplanError
            What ended it.
        """
        try:
            result = self._future.result(timeout)
        except TimeoutError:
            if self._future.done():
                raise
            raise TimeoutError(f"the collective is still running after {timeout} s; wait again") from None
        if self._received is not None:
            self._received(result)
        return result


class StepBatch:
    """Collectives of one training step: where one is refused, the later ones exchange nothing.

    A rank that refuses one starts no later one. Its peers may have queued them already.

    Attributes
    ----------
    refused : RefusedError or None
        The error of the first refused collective; the later ones raise it too.
    """

    refused: RefusedError | None = None

    def guarded(self, task: Callable[[], Result]) -> Callable[[], Result]:
        """Return a task that raises the error of an earlier one in place of running."""

        def run() -> Result:
            if self.refused is not None:
                raise self.refused
            try:
                return task()
            except RefusedError as error:
                self.refused = error
                raise

        return run


class CallQueue:
    """Runs tasks one after another: in the background, or at once where nothing is in the background.

    Parameters
    ----------
    arrays : ArrayLibrary, optional
        By which a task runs behind what its caller has told a GPU, whichever thread runs it.
    """

    def __init__(self, arrays: ArrayLibrary[Any] | None = None) -> None:
        self._arrays: ArrayLibrary[Any] = NumpyArrays() if arrays is None else arrays
        self._worker: ThreadPoolExecutor | None = None
        self._last: Future[object] | None = None
        self._one = threading.Lock()
        self.batch: StepBatch | None = None
        """The batch of the exchanges that are started from now on."""

    def run(self, task: Callable[[], Result], *, exchanges: bool = True) -> Result:
        """The task's result, after everything that was submitted before.

        A task that exchanges nothing is in no batch.
        """
        if self._last is not None and not self._last.done():
            return self.submit(task, exchanges=exchanges).wait()
        if self.batch is not None and exchanges:
            task = self.batch.guarded(task)
        with self._one, self._arrays.ordered():
            result = task()
        self._arrays.received(result)
        return result

    def submit(
        self, task: Callable[[], Result], outcome: CollectiveOutcome | None = None, *, exchanges: bool = True
    ) -> Handle[Result]:
        """Start the task in the background, after everything that was submitted before."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="collectives")
        if self.batch is not None and exchanges:
            task = self.batch.guarded(task)
        turn = self._arrays.ordered()  # here, since it is this thread's stream that the task is to be behind

        def in_turn() -> Result:
            with self._one, turn:
                return task()

        future: Future[Result] = self._worker.submit(in_turn)
        self._last = future  # type: ignore[assignment]  # only asked whether it is done
        return Handle(future, self._arrays.received, outcome)

    def close(self) -> None:
        """Wait for what runs; what has not begun fails."""
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
