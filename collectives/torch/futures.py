"""Wrap collectives in the background as torch's futures and works of a process group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from collectives.communicator.handle import Handle
from collectives.tables.array_library import ArrayLibrary
from topoplan.errors import TopoplanError


def future_of(
    handle: Handle[Any],
    result: Any,
    *,
    device: torch.device,
    arrays: ArrayLibrary[Any],
    finish: Callable[[], None],
    told: Callable[[TopoplanError], TopoplanError] = lambda error: error,
) -> torch.futures.Future[Any]:
    """A future that ends with a collective.

    Parameters
    ----------
    handle : Handle
    result : tensor, or nested lists of tensors
        What the future holds in the end.
    device : torch.device
        Of these. On a GPU whoever waits for the future orders the current stream behind the collective.
    arrays : ArrayLibrary
        Of the communicator.
    finish : callable
        What is to be done with the result of the collective, in its thread and stream.
    told : callable
        From an error of the collective to that of the future.
    """
    future: torch.futures.Future[Any] = torch.futures.Future(
        devices=[device] if device.type == "cuda" else None
    )

    def ended() -> None:
        with arrays.here():
            try:
                handle.wait()
                finish()
            except TopoplanError as error:
                future.set_exception(told(error))
            except Exception as error:
                # else nobody would hear of it, and whoever waits would wait for ever
                future.set_exception(error)
            except BaseException as error:
                # Ctrl-C, where the caller's thread ends the collective; torch's futures take exceptions alone
                future.set_exception(RuntimeError(f"{type(error).__name__} ended the collective"))
                raise
            else:
                future.set_result(result)

    handle.when_done(ended)
    return future


class PlannedWork(dist.Work):
    """`torch.distributed.Work` of a collective in the background.

    Parameters
    ----------
    handle : Handle
    future : Future
        Of the tensors that are written.
    tensors : list of tensors, or of lists of them
    left : callable, optional
        Called with the handle where a wait for it has ended before it.
    """

    def __init__(
        self,
        handle: Handle[Any],
        future: torch.futures.Future[Any],
        tensors: list[Any],
        left: Callable[[Handle[Any]], None] = lambda handle: None,
    ) -> None:
        super().__init__()
        self._handle = handle
        self._future = future
        self._tensors = tensors
        self._left = left

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end, on a GPU in the order of its current stream; raises what went wrong, or TimeoutError."""
        if timeout:
            try:
                self._handle.wait(timeout.total_seconds())
            except TimeoutError:
                self._left(self._handle)
                raise
            except TopoplanError:
                pass  # as the future tells it
        self._future.wait()
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def result(self) -> list[Any]:
        """The tensors, when it has ended."""
        self.wait()
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensors, from which also C++ hears what went wrong."""
        return self._future.then(lambda ended: ended.value())


class JointWork(dist.Work):
    """`torch.distributed.Work` that ends with several others, and then with what its first wait does.

    Parameters
    ----------
    works : sequence of Work
    finish : callable
        Called once, in the first wait and behind all works, from any thread. No wait returns before it has ended. It is
        called again by the next wait if it raises.
    device : torch.device, optional
        Device on whose current stream `finish` queues its copies; later waits order their stream behind them.
    tensors : list of tensors, or of lists of them, optional
        Result of the work; by default what the works give.
    """

    def __init__(
        self,
        works: Sequence[dist.Work],
        finish: Callable[[], None] = lambda: None,
        device: torch.device | None = None,
        tensors: list[Any] | None = None,
    ) -> None:
        super().__init__()
        self._works = works
        self._tensors = tensors
        self._finish = finish
        self._device = device if device is not None and device.type == "cuda" else None
        self._lock = threading.Lock()
        self._over = False
        self._queued: torch.cuda.Event | None = None
        """Behind what `finish` has queued on a GPU."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end of all, on a GPU in the order of its current stream; raises what went wrong first."""
        for work in self._works:
            work.wait(timeout) if timeout else work.wait()
        self._end()
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether all have ended, well or not, and their results lie where they belong."""
        if not all(work.is_completed() for work in self._works):
            return False
        with suppress(Exception):  # which `wait` raises
            self.wait()
        return self._queued is None or bool(self._queued.query())  # type: ignore[no-untyped-call]

    def result(self) -> list[Any]:
        """Return the result, when all have ended."""
        self.wait()
        if self._tensors is not None:
            return self._tensors
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the result."""
        futures = [work.get_future() for work in self._works]
        together: torch.futures.Future[Any] = torch.futures.collect_all(futures)

        def ended(all_of_them: torch.futures.Future[Any]) -> Any:
            results = [one.value() for one in all_of_them.value()]
            self._end()  # a wait would not end in gloo's thread, which calls this before its work has ended
            return results if self._tensors is None else self._tensors

        return together.then(ended)

    def _end(self) -> None:
        """Finish once, behind all works."""
        with self._lock:
            if not self._over:
                self._finish()
                if self._device is not None:
                    self._queued = torch.cuda.current_stream(self._device).record_event()
                self._over = True
            elif self._queued is not None:
                torch.cuda.current_stream(self._device).wait_event(self._queued)

    def _source_rank(self) -> int:
        """The rank that a receive from any rank has heard."""
        (work,) = self._works
        return int(work._source_rank())
