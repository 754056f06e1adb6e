"""The order of a GPU's work around exchanges that run in a thread of their own.

A bucket is ready when the stream that computed it has got there, so the exchange's stream waits for it, not the host.
What uses the averages waits for the exchange's stream, as the events of a `torch.futures.Future` see to. On the CPU
there is nothing to order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from collectives.communicator import Communicator


class SideStream:
    """A CUDA stream of the thread in which a communicator runs collectives; made when the first CUDA tensor comes.

    Parameters
    ----------
    communicator : Communicator
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._stream: torch.cuda.Stream | None = None

    def after_current(self, tensor: torch.Tensor) -> None:
        """Let the next collective wait for what the current stream has been given so far, as it makes a tensor."""
        if not tensor.is_cuda:
            return
        if self._stream is None:
            side = self._stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
            self._communicator.in_background(lambda: torch.cuda.set_stream(side))
        stream = self._stream
        made = torch.cuda.current_stream(tensor.device).record_event()
        tensor.record_stream(stream)  # its memory is not given away before the exchange has read it
        self._communicator.in_background(lambda: stream.wait_event(made))

    @contextmanager
    def current(self) -> Iterator[None]:
        """The stream of the exchange is the current one inside."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield
