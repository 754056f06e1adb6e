"""A collective that runs in the background, as torch wants to hear of it: a future, and the work of a process group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from collectives.arrays.library import ArrayLibrary
from collectives.communicator.handle import Handle
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
    """

    def __init__(self, handle: Handle[Any], future: torch.futures.Future[Any], tensors: list[Any]) -> None:
        super().__init__()
        self._handle = handle
        self._future = future
        self._tensors = tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end, on a GPU in the order of its current stream; raises what went wrong."""
        if timeout:
            self._handle.wait(timeout.total_seconds())
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
