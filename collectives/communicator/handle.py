"""Run collectives in the background, one after another in the order in which they were called.

A prepared call is started as often as you like, as MPI's persistent collectives (MPI-4.1, section 6.13): arguments and
memory are fixed when it is prepared, and each start carries its number beside the data.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from collectives.recovery.membership import CollectiveOutcome, CommunicatorMembers
from collectives.tables.numpy_arrays import ArrayLibrary, Completion, NumpyArrays
from topoplan.errors import RefusedError, UsageError
from topoplan.units import check_function, is_real, shortened

if TYPE_CHECKING:
    from collectives.backends.execution import PreparedRequest
    from collectives.sparse.exchange_choice import SparseExplanation

Result = TypeVar("Result")
Other = TypeVar("Other")


class Handle(Generic[Result]):
    """A collective that was started with ``async_op=True``.

    Until it is done the input arrays must not be changed, and the ``out`` arrays neither read nor changed; on a GPU
    this applies to work queued after the call. When it is done, any stream may use them. `ends` is filled when it is
    queued on a GPU, with what has to end there. `alone` takes an error that this rank raises behind the exchange.
    """

    def __init__(
        self,
        future: Future[Result],
        received: Callable[[object], None] | None = None,
        outcome: CollectiveOutcome | None = None,
        ends: Sequence[Completion] = (),
        alone: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._ends = ends
        self.alone = alone
        self._future = future
        self._received = received
        self._outcome = outcome or CollectiveOutcome()

    @property
    def repeated(self) -> bool:
        """Whether it was run again without failed ranks (``on_failure="shrink"``); valid once it is done."""
        return self._outcome.repeated

    @property
    def without(self) -> tuple[int, ...]:
        """The ranks that its result lacks, as numbered when it was called; valid once it is done.

        They failed during the collective, or while it was queued. A rank that failed when all had their results is not
        among them.
        """
        return self._outcome.without

    @property
    def among(self) -> tuple[int, ...]:
        """The original ranks whose arrays are in the result; valid once it is done.

        The same on all ranks. Empty if nothing was exchanged.
        """
        return self._outcome.among

    @property
    def exchange(self) -> SparseExplanation | None:
        """The exchange of a sparse collective, and its reason; valid once it is done."""
        return self._outcome.exchange

    @staticmethod
    def of(result: Result, alone: Callable[[BaseException], None] = lambda error: None) -> Handle[Result]:
        """Return a handle that is done, with this result."""
        future: Future[Result] = Future()
        future.set_result(result)
        return Handle(future, alone=alone)

    def done(self) -> bool:
        """Return whether it has ended, with or without an error."""
        return self._future.done() and all(one.done for one in self._ends)

    def when_done(self, then: Callable[[], object]) -> None:
        """Call a function when it has ended, with or without an error: in the thread that ran it, or at once."""
        check_function("then", then)

        def ended() -> None:
            with suppress(Exception):
                self.wait()
            then()

        self.when_queued(ended)

    def when_queued(self, then: Callable[[], object]) -> None:
        """Call a function as `when_done`, on a GPU already when it is queued there."""
        check_function("then", then)
        self._future.add_done_callback(lambda _: then())

    def queued(self) -> Result:
        """Return the result once it is queued; on a GPU work in the stream of collectives comes behind it."""
        return self._future.result()

    def then(self, make: Callable[[Result], Other]) -> Handle[Other]:
        """Return a handle whose result is made from this one's, in the thread that ends it; errors are passed on.

        An error of `make` on this rank alone ends the job: the other ranks have their results, and are notified.
        """
        check_function("make", make)
        future: Future[Other] = Future()

        def follow() -> None:
            try:
                result = self.wait()
                with behind(self.alone):
                    made = make(result)
            except BaseException as error:  # raised by wait()
                future.set_exception(error)
            else:
                future.set_result(made)

        self.when_queued(follow)
        return Handle(future, outcome=self._outcome, alone=self.alone)

    def wait(self, timeout: float | None = None) -> Result:
        """Return the result, once it is available, or raise its error; `TimeoutError` if it is still running.

        `timeout` is in seconds, unlimited by default, since a back end ends by itself when a peer fails.
        """
        if timeout is not None and not is_real(timeout):
            raise UsageError(f"timeout must be seconds or None, got {shortened(timeout)}")
        until = None if timeout is None else time.monotonic() + timeout
        try:
            result = self._future.result(timeout)
            for end in self._ends:
                end.wait(None if until is None else until - time.monotonic())
        except TimeoutError:
            if self.done():
                raise
            raise TimeoutError(f"the collective is still running after {timeout} s; wait again") from None
        if self._received is not None:
            self._received(result)
        return result


@contextmanager
def behind(alone: Callable[[BaseException], None]) -> Iterator[None]:
    """Call a function with an error of the block, which handles the result of an exchange, and raise the error."""
    try:
        yield
    except BaseException as error:
        alone(error)
        raise


class StepBatch:
    """Collectives of one training step: if one is refused, the later ones exchange nothing.

    A rank that refuses one starts no later one, but its peers may have queued them already. `refused` is the error of
    the first refused collective, which the later ones raise too.
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
    """Runs tasks one after another: in the background, or at once if the background is idle.

    `arrays` orders a task after the caller's work on a GPU, in whichever thread it runs. `completion` returns the end
    of the collective that a task has queued there, or None. Who runs a task has the `turn`. `begun` counts exchanges,
    also queued ones.
    """

    def __init__(
        self,
        arrays: ArrayLibrary[Any] | None = None,
        completion: Callable[[], Completion | None] = lambda: None,
        members: CommunicatorMembers | None = None,
    ) -> None:
        self._arrays: ArrayLibrary[Any] = NumpyArrays() if arrays is None else arrays
        self._on_host = type(self._arrays).ordered is NumpyArrays.ordered  # nothing to order on a GPU
        self._completion = completion
        self._members = members
        self.begun = 0
        self._worker: ThreadPoolExecutor | None = None
        self._last: Future[object] | None = None
        self.turn = threading.Lock()
        self.batch: StepBatch | None = None  # the batch of the exchanges that are started from now on

    @property
    def is_busy(self) -> bool:
        """Whether a task runs or waits in the background."""
        return self._last is not None and not self._last.done()

    def run(self, task: Callable[[], Result], *, exchanges: bool = True) -> Result:
        """Return the task's result, after all earlier tasks; one that exchanges nothing is in no batch."""
        if self.is_busy:
            return self.submit(task, exchanges=exchanges).wait()
        if self.batch is not None and exchanges:
            task = self.batch.guarded(task)
        if self._on_host:
            with self.turn:
                return self.in_step(task) if exchanges else task()
        with self.turn, self._arrays.ordered():
            result = self.in_step(task) if exchanges else task()
        self._arrays.received(result)
        return result

    def in_step(self, task: Callable[[], Result], *, now: bool = True) -> Result:
        """Run an exchange in its turn; all ranks refuse it, or the job ends, if it fails on this rank alone."""
        members, mark = self._members, None
        try:
            mark = None if members is None else members.mark
            self.begun += now
            return task()
        except BaseException as error:
            if members is not None:
                members.fall_out(error, mark)
            raise

    def submit(
        self, task: Callable[[], Result], outcome: CollectiveOutcome | None = None, *, exchanges: bool = True
    ) -> Handle[Result]:
        """Start the task in the background, after all earlier tasks."""
        worker = self._worker or ThreadPoolExecutor(1, thread_name_prefix="collectives")
        if self.batch is not None and exchanges:
            task = self.batch.guarded(task)
        if exchanges:
            task = partial(self.in_step, task, now=False)
        # here, since the task must run after this thread's stream
        turn, ends = self._arrays.ordered(later=True), list[Completion]()

        def in_turn() -> Result:
            with self.turn, turn as end:
                result = task()
                ends.extend(one for one in (self._completion(), end) if one is not None)
            return result

        future: Future[Result] = worker.submit(in_turn)
        self._worker = worker  # one whose thread cannot start would keep the task for later
        self.begun += exchanges
        self._last = future  # type: ignore[assignment]  # only its done() is called
        return Handle(future, self._arrays.received, outcome, ends, self.leave)

    def around(self, found: Any) -> Handle[Any]:
        """Return the handle of a collective, or a done one with its result without ``async_op``."""
        return found if isinstance(found, Handle) else Handle.of(found, self.leave)

    def leave(self, error: BaseException) -> None:
        """End the job after an error that this rank alone raises behind an exchange, whose result the others use."""
        if self._members is not None:
            self._members.leave(error)

    def close(self) -> None:
        """Wait for the running task; queued ones fail."""
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)


Method = TypeVar("Method", bound=Callable[..., Any])


class Exchanging(Protocol):
    """A class whose methods exchange, by tasks of its queue."""

    _in_order: CallQueue

    def _refuse_for(self, error: BaseException) -> None: ...


def in_step(method: Method) -> Method:
    """Let all ranks refuse a call that this rank could not begin: wrong arguments, no memory, an interrupt.

    Once it has begun, `CallQueue.in_step` does so.
    """

    @wraps(method)
    def call(self: Exchanging, *given: Any, **options: Any) -> Any:
        begun = None
        try:
            begun = self._in_order.begun
            return method(self, *given, **options)
        except BaseException as error:
            if begun is None or self._in_order.begun == begun:
                self._refuse_for(error)
            raise

    return cast("Method", call)


class PreparedCall(Generic[Result]):
    """A prepared collective of `Communicator.prepare`.

    ``call()`` runs it to its end and returns `result`. ``call.start()`` starts it in the background, and
    ``call.wait()`` returns `result`. Between the two the input must not change, and the result is undefined. One start
    is active at a time. Prepared calls may be started in any order, the same on all ranks, and other collectives may
    run between.

    Raises
    ------
    UsageError
        Before anything moves: an array was moved, freed or resized; the last start was not waited for, or another
        thread runs the call; the communicator was closed, or its ranks or plan have changed since.
    RefusedError
        That on some ranks alone, or another rank started something else: on all ranks, and a rank is named. The
        communicator stays usable.
    BackendError
        A rank failed or did not start it within the communicator's timeout.
    """

    def __init__(
        self,
        request: PreparedRequest[Result],
        run: Callable[[], Result],
        queue: CallQueue,
        changed: Callable[[], str],
        refuse: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._request = request
        self._run = run
        self._otherwise = run != request.run
        self._in_order = queue
        self._refuse_for = refuse
        self._changed = changed
        self._idle, self._ending = threading.Lock(), threading.Lock()
        self._started: Handle[Result] | None = None

    @property
    def result(self) -> Result:
        """The result's memory: ``out``, or memory that was allocated when the call was prepared; None without a
        result."""
        result: Result = self._request.result
        return result

    @property
    def stale(self) -> bool:
        """Whether the communicator was closed, or its ranks or plan have changed; then prepare the call again."""
        return bool(self._changed())

    @in_step
    def __call__(self) -> Result:
        """Run the call to its end, and return `result`."""
        self._begin()
        try:
            quick, queue = self._request.quick, self._in_order
            if quick is None or self._otherwise or queue.batch or queue.is_busy:
                return queue.run(self._run)
            with queue.turn:
                queue.in_step(quick)
            result: Result = self._request.result
            return result
        finally:
            self._idle.release()

    @in_step
    def start(self) -> None:
        """Start the call in the background, behind all earlier collectives; `wait` ends it."""
        self._begin()
        try:
            self._started = self._in_order.submit(self._run)
        except BaseException:
            self._idle.release()
            raise

    def wait(self, timeout: float | None = None) -> Result:
        """Return `result` when the started call has ended, or raise its error.

        Raises `TimeoutError` after `timeout` seconds, and the call is still active; by default the back end's timeout
        alone ends it.
        """
        started = self._started
        if started is None:
            raise UsageError(f"prepared call {self._number} must be started before wait; call start() first")
        try:
            return started.wait(timeout)
        finally:
            with self._ending:
                if started.done() and self._started is started:
                    self._started = None
                    self._idle.release()

    @property
    def _number(self) -> int:
        return self._request.request.prepared

    def _begin(self) -> None:
        """Take the call for one start, if its arrays and its communicator are as they were."""
        if not self._idle.acquire(blocking=False):
            raise UsageError(
                f"prepared call {self._number} is active; wait for its last start before the next one, and start it "
                "from one thread"
            )
        try:
            changed = self._changed()
            if changed:
                raise UsageError(f"prepared call {self._number} is stale: {changed}; prepare it again")
            self._request.check()
        except BaseException:
            self._idle.release()
            raise
