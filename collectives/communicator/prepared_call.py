"""Start a collective that all ranks have agreed on once, as often as they like, on the same arrays.

As MPI's persistent collectives (MPI-4.1, section 6.13): arguments and memory are fixed when the call is prepared, and a
start needs no planning, no check of arguments and no meeting of its own. Each start carries the number of the prepared
call beside its data, so that ranks that start different ones find out and fail together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from collectives.communicator.handle import CallQueue, Handle
from topoplan.errors import UsageError

if TYPE_CHECKING:
    from collectives.backends.execution import PreparedRequest

Result = TypeVar("Result")


class PreparedCall(Generic[Result]):
    """A prepared collective of `Communicator.prepare`.

    ``call()`` runs it to its end and returns `result`. ``call.start()`` starts it in the background, and
    ``call.wait()`` returns `result`. Between the two the input must not change, and the result is undefined. One start
    is active at a time. Prepared calls may be started in any order, the same on all ranks, and other collectives may
    run between.

    Raises
    ------
    UsageError
        Before anything moves, on this rank alone: an array was moved, freed or resized; the last start was not waited
        for, or another thread runs the call; the communicator was closed, or its ranks or plan have changed since.
    RefusedError
        Another rank started something else: on all ranks, with both calls named. The communicator stays usable.
    BackendError
        A rank failed or did not start it within the communicator's timeout.
    """

    def __init__(
        self,
        request: PreparedRequest[Result],
        run: Callable[[], Result],
        queue: CallQueue,
        changed: Callable[[], str],
    ) -> None:
        self._request = request
        self._run = run
        self._queue = queue
        self._changed = changed
        self._idle = threading.Lock()
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

    def __call__(self) -> Result:
        """Run the call to its end, and return `result`."""
        self._begin()
        try:
            return self._queue.run(self._run)
        finally:
            self._idle.release()

    def start(self) -> None:
        """Start the call in the background, behind all earlier collectives; `wait` ends it."""
        self._begin()
        try:
            self._started = self._queue.submit(self._run)
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
            if started.done():
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
