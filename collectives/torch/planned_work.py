"""A collective of the process group that runs by a plan, as torch wants to hear of it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from collectives.communicator.handle import Handle


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
