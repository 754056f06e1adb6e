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
from typing import Any

from collectives.backends.nccl.world import World
from topoplan.errors import BackendError

LOOK_SECONDS = 0.02

VERDICT_SECONDS = 3.0
"""Time for the world to say who holds everybody up."""


class Guard:
    """Watches one collective at a time.

    Parameters
    ----------
    world : World
    timeout : float
        Seconds without an ended step.
    communicators : list
        NCCL's; the list may grow.
    refusals : type
        The exception that they raise.

    Attributes
    ----------
    error : BackendError or None
        Why the communicators were aborted.
    """

    def __init__(
        self, world: World, *, timeout: float, communicators: list[Any], refusals: type[Exception]
    ) -> None:
        self.error: BackendError | None = None
        self._world = world
        self._timeout = timeout
        self._communicators = communicators
        self._refusals = refusals
        self._progress: Callable[[], int] | None = None
        self._waiting: Callable[[], tuple[int | None, int | None]] = lambda: (None, None)
        self._changed = threading.Condition()
        self._closed = False
        self._aborted = False
        self._thread = threading.Thread(target=self._work, name="nccl guard", daemon=True)
        self._thread.start()

    @contextmanager
    def watch(
        self, progress: Callable[[], int], waiting: Callable[[], tuple[int | None, int | None]]
    ) -> Iterator[None]:
        """Watch what runs inside.

        Parameters
        ----------
        progress : callable
            A number that changes whenever a step has ended.
        waiting : callable
            The peer and the row of the table that this rank waits for.
        """
        with self._changed:
            self._progress, self._waiting = progress, waiting
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._progress = None
                self._changed.notify_all()

    def check(self) -> None:
        """Raise `error`, if there is one."""
        if self.error is not None:
            raise self.error

    def stop(self, error: BackendError) -> None:
        """Abort the communicators, from any thread; the first error stays."""
        with self._changed:
            self.error = self.error or error
            first, self._aborted = not self._aborted, True
        if first:
            for communicator in list(self._communicators):
                communicator.abort()

    def close(self) -> None:
        """End the thread; closing twice is fine."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(VERDICT_SECONDS + self._timeout)

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
        since, last = time.monotonic(), progress()
        while self.error is None:
            with self._changed:
                if self._changed.wait_for(
                    lambda: self._progress is not progress or self._closed, LOOK_SECONDS
                ):
                    return
            error = self._world.trouble() or self._own_error()
            if error is None and progress() != last:
                since, last = time.monotonic(), progress()
            elif error is None and time.monotonic() - since > self._timeout:
                error = self._verdict()
            if error is not None:
                self.stop(error)
        with self._changed:
            self._changed.wait_for(lambda: self._progress is not progress or self._closed)

    def _own_error(self) -> BackendError | None:
        """What NCCL itself has met."""
        try:
            for communicator in list(self._communicators):
                communicator.check_async_error()
        except self._refusals as failure:
            peer, row = self._waiting()
            error = BackendError(
                f"NCCL reports {failure}; NCCL_DEBUG=WARN tells more",
                rank=self._world.rank,
                peer=peer,
                step=row,
            )
            self._world.tell(error)
            return self._world.trouble() or error
        return None

    def _verdict(self) -> BackendError:
        """Nothing has moved: ask the world why."""
        peer, row = self._waiting()
        self._world.stalled(self._timeout, peer=peer, step=row)
        end = time.monotonic() + VERDICT_SECONDS
        while time.monotonic() < end:
            error = self._world.trouble()
            if error is not None:
                return error
            time.sleep(LOOK_SECONDS)
        return BackendError(
            f"waited {self._timeout:g} s for rank {peer}", rank=self._world.rank, peer=peer, step=row
        )
