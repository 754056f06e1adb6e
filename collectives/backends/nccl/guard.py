"""A thread that watches a running collective, and ends it when it will not end by itself.

NCCL's kernels wait for their peers without end, and so can calls that connect ranks. Only aborting the communicators
lets go of them, so that is what happens when a rank reports trouble, when NCCL reports an error of its own, or when no
step has ended for the timeout.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from collectives.backends.nccl.connections import Connections
from collectives.peers.blame import Waiting
from collectives.peers.peers import World, waits_for_nothing
from topoplan.errors import BackendError

LOOK_SECONDS = 0.02

FAREWELL_SECONDS = 5.0
"""Time for the thread to end."""

Place = Callable[[], tuple[int | None, int | None]]
"""The peer and the row of the table that a rank waits for."""


class Guard:
    """Watches one collective at a time.

    Parameters
    ----------
    world : World
    connections : Connections
    timeout : float
        Seconds without an ended step.

    Attributes
    ----------
    error : BackendError or None
        Why the communicators were aborted.
    """

    def __init__(self, world: World, connections: Connections, *, timeout: float) -> None:
        self.error: BackendError | None = None
        self._world = world
        self._connections = connections
        self._timeout = timeout
        self._progress: Callable[[], int] | None = None
        self._since = 0.0
        self._changed = threading.Condition()
        self._closed = False
        self._aborted = False
        self._thread = threading.Thread(target=self._work, name="nccl guard", daemon=True)
        self._thread.start()

    @contextmanager
    def watch(self, progress: Callable[[], int], place: Place) -> Iterator[None]:
        """Watch what runs inside.

        Parameters
        ----------
        progress : callable
            A number that changes whenever a step has ended.
        place : callable
        """

        def waiting() -> Waiting:
            return Waiting(*place(), time.monotonic() - self._since)

        with self._changed:
            self._progress, self._since = progress, time.monotonic()
            self._world.waiting = waiting
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._progress = None
                self._world.waiting = waits_for_nothing
                self._changed.notify_all()

    def check(self) -> None:
        """Raise `error`, if there is one."""
        if self.error is not None:
            raise self.error

    def stop(self, error: BackendError) -> None:
        """Begin to abort the communicators, from any thread; the first error stays."""
        with self._changed:
            self.error = self.error or error
            first, self._aborted = not self._aborted, True
        if first:
            self._connections.abort()

    def close(self) -> None:
        """End the thread; closing twice is fine."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(FAREWELL_SECONDS)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._progress is not None)
                if self._closed:
                    return
                progress = self._progress
            assert progress is not None, "that was waited for"
            self._attend(progress)

    def _attend(self, progress: Callable[[], int]) -> None:
        """Look after one collective until it has ended or been stopped."""
        last = progress()
        while self.error is None:
            with self._changed:
                if self._changed.wait_for(
                    lambda: self._progress is not progress or self._closed, LOOK_SECONDS
                ):
                    return
            error = self._world.trouble() or self._own_error()
            if error is None and progress() != last:
                self._since, last = time.monotonic(), progress()
            elif error is None and time.monotonic() - self._since > self._timeout:
                self._world.stalled(self._timeout)
                error = self._world.trouble()
                # somebody still moves: look again a quarter of the timeout later
                self._since = max(self._since, time.monotonic() - 0.75 * self._timeout)
            if error is not None:
                self.stop(error)
        with self._changed:
            self._changed.wait_for(lambda: self._progress is not progress or self._closed)

    def _own_error(self) -> BackendError | None:
        """What NCCL itself has met."""
        met = self._connections.error()
        if met is None:
            return None
        wait = self._world.waiting()
        error = BackendError(
            f"NCCL reports {met}; NCCL_DEBUG=WARN tells more",
            rank=self._world.rank,
            peer=wait.peer,
            step=wait.step,
        )
        self._world.tell(error)
        return self._world.trouble() or error
