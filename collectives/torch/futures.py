"""Wrap collectives in the background as torch's futures and works of a process group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from collectives.communicator.handle import Handle, behind
from collectives.tables.numpy_arrays import ArrayLibrary
from topoplan.errors import TopoplanError


def future_of(
    handle: Handle[Any],
    result: Any,
    *,
    device: torch.device,
    arrays: ArrayLibrary[Any],
    finish: Callable[[], None],
    convert_error: Callable[[TopoplanError], TopoplanError] = lambda error: error,
) -> torch.futures.Future[Any]:
    """Return a future that ends with a collective, on a GPU when that is queued.

    It holds `result`, tensors on `device`, after `finish`, which handles the result of the collective in its thread and
    stream. On a GPU a wait for the future orders the current stream after the collective. `convert_error` turns an
    error of the collective into that of the future.
    """
    future: torch.futures.Future[Any] = torch.futures.Future(
        devices=[device] if device.type == "cuda" else None
    )

    def ended() -> None:
        with arrays.here():
            try:
                handle.queued()
                with behind(handle.alone):
                    finish()
            except TopoplanError as error:
                future.set_exception(convert_error(error))
            except Exception as error:
                # else a wait for the future would never return
                future.set_exception(error)
            except BaseException as error:
                # Ctrl-C, where the caller's thread ends the collective; torch's futures take exceptions alone
                future.set_exception(RuntimeError(f"{type(error).__name__} ended the collective"))
                raise
            else:
                future.set_result(result)

    handle.when_queued(ended)
    return future


class WaitedWork(dist.Work):
    """A work of which every way to wait is `wait`."""

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        """Order the current stream of a GPU after it without holding the host; on the CPU wait for it."""
        self.wait()


class PlannedWork(WaitedWork):
    """`torch.distributed.Work` of a collective in the background.

    `future` holds the tensors that are written; `left` is called with the handle if a wait for it times out.
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
        """Wait for the end, on a GPU in the order of its current stream, which holds the host with a timeout alone;
        raises the error, as far as it is known, or TimeoutError."""
        if timeout or self._handle.done():
            try:
                self._handle.wait(timeout.total_seconds() if timeout else None)
            except TimeoutError:
                self._left(self._handle)
                raise
            except TopoplanError:
                self._future.wait()  # raises it in its own words, unless the GPU has failed later
                raise
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether it has ended, on a GPU too, with or without an error."""
        return self._future.done() and self._handle.done()

    def result(self) -> list[Any]:
        """Return the tensors once it has ended."""
        self.wait()
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors, which carries errors to C++ too."""
        return self._future.then(lambda ended: ended.value())


class JointWork(WaitedWork):
    """`torch.distributed.Work` that ends with several others, and then with `finish`.

    The first wait calls `finish` once, after all works, from any thread; no wait returns before it has ended, and the
    next wait calls it again if it raises. `finish` queues its copies on the current stream of `device`; later waits
    order their stream after them. `tensors` are the result; by default those of the works.

    A work may be None: NCCL's group returns that for synchronous calls, which follow the current stream already.
    """

    def __init__(
        self,
        works: Sequence[dist.Work | None],
        finish: Callable[[], None] = lambda: None,
        device: torch.device | None = None,
        tensors: list[Any] | None = None,
    ) -> None:
        super().__init__()
        self._works = [work for work in works if work is not None]
        self._tensors = tensors
        self._finish = finish
        self._device = device if device is not None and device.type == "cuda" else None
        self._lock = threading.Lock()
        self._over = False
        self._queued: torch.cuda.Event | None = None
        """Recorded after the copies that `finish` has queued on a GPU."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end of all, on a GPU in the order of its current stream; raises the first error."""
        for work in self._works:
            work.wait(timeout) if timeout else work.wait()
        self._end()
        return True

    def is_completed(self) -> bool:
        """Return whether all have ended, with or without an error, and the results are in place."""
        if not all(work.is_completed() for work in self._works):
            return False
        with suppress(Exception):  # which `wait` raises
            self.wait()
        return self._queued is None or bool(self._queued.query())  # type: ignore[no-untyped-call]

    def result(self) -> list[Any]:
        """Return the result once all have ended."""
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
        with self._lock:
            if not self._over:
                self._finish()
                if self._device is not None:
                    self._queued = torch.cuda.current_stream(self._device).record_event()
                self._over = True
            elif self._queued is not None:
                torch.cuda.current_stream(self._device).wait_event(self._queued)

    def _source_rank(self) -> int:
        (work,) = self._works
        return int(work._source_rank())
