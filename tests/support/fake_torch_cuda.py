"""A stand-in for torch's CUDA streams and for NCCL's way to use a process group, on tensors of this processor.

Nothing that is queued on a stream runs before somebody waits for it: whoever forgets to wait for an event reads what is
not there yet. What torch itself computes meanwhile runs at once. Names and parameters are those of the real ones, which
a test compares.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch

Recorded = list[tuple[torch.Tensor, "Stream"]]


class Event:
    """As `torch.cuda.Event`."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.stream: Stream | None = None
        self.place = 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = current_stream() if stream is None else stream
        self.place = self.stream.queued

    def query(self) -> bool:
        return self.stream is None or self.stream.queued - len(self.stream.left) >= self.place

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.until(self.place)


class Stream:
    """As `torch.cuda.Stream`; ``calls`` are what it was told, and by which thread."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = torch.device("cpu")
        self.cuda_stream = id(self)
        self.calls: list[tuple[str, str]] = []
        self.capturing = False
        self.queued = 0
        self.left: list[Callable[[], object]] = []
        self.late = False  # waits for a GPU, so what waits for it has to wait too

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.cuda_stream)

    def do(self, work: Callable[[], object]) -> None:
        self.left.append(work)
        self.queued += 1

    def until(self, place: int) -> None:
        """Run what was queued up to there."""
        while self.queued - len(self.left) < place:
            self.left[0]()
            self.left.pop(0)
        self.late = self.late and bool(self.left)

    def record_event(self, event: Event | None = None) -> Event:
        made = Event() if event is None else event
        made.record(self)
        return made

    def wait_event(self, event: Event) -> None:
        self.calls.append(("wait_event", threading.current_thread().name))
        other, place = event.stream, event.place
        assert other is not None
        if other.late and other is not self:
            self.late = True
            self.do(lambda: other.until(place))
        else:
            other.until(place)

    def synchronize(self) -> None:
        self.calls.append(("synchronize", threading.current_thread().name))
        self.until(self.queued)


_default = Stream()
_currents = threading.local()


def current_stream(device: Any = None) -> Stream:
    """As `torch.cuda.current_stream`: each thread has its own."""
    found: Stream = getattr(_currents, "stream", _default)
    return found


def is_current_stream_capturing() -> bool:
    return current_stream().capturing


@contextmanager
def stream(stream: Stream) -> Iterator[None]:
    before, _currents.stream = current_stream(), stream
    try:
        yield
    finally:
        _currents.stream = before


def install(patch: pytest.MonkeyPatch) -> Recorded:
    """Put the streams into `torch.cuda`; the tensors that are recorded for a stream."""
    recorded: Recorded = []
    patch.setattr(torch.version, "cuda", None)  # the stand-in for CuPy has the CUDA of any torch
    patch.setattr(torch.cuda, "Stream", Stream)
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(torch.cuda, "current_stream", current_stream)
    patch.setattr(torch.cuda, "stream", stream)
    patch.setattr(torch.cuda, "is_current_stream_capturing", is_current_stream_capturing)
    patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append((tensor, stream)))
    return recorded


def on_gpu_0(patch: pytest.MonkeyPatch) -> None:
    """Let every tensor count as memory of GPU 0."""
    patch.setattr("collectives.tables.torch_arrays.on_gpu", lambda array: True)
    patch.setattr("collectives.torch.bucket_exchange.on_gpu", lambda array: True)
    patch.setattr("collectives.backends.torch.backend_selection.on_gpu", lambda array: True)
    patch.setattr("collectives.sparse.torch_entry_arrays.gpu_device", lambda gpu: torch.device("cpu"))


def seen_by(cupy: Any, patch: pytest.MonkeyPatch) -> None:
    """Give a fake CuPy what of it tensors need: DLPack, and streams that are torch's."""
    plain: Any = cupy.cuda.Stream

    class Shared(plain):  # type: ignore[misc]
        """A stream of torch's: what it is told is done at once, as torch's own work here; but it waits for the GPU
        when somebody waits for it."""

        of_torch: Any

        def push(self, make: Callable[[], Any]) -> None:
            super().push(make)
            self.synchronize()

        def wait_event(self, event: Any) -> None:
            super().wait_event(event)
            self.of_torch.late = True
            self.of_torch.do(self.synchronize)

    def from_external(stream: Any) -> Any:
        stream.__cuda_stream__()
        made = Shared()
        made.of_torch = stream
        return made

    def from_dlpack(tensor: torch.Tensor) -> Any:
        return cupy.ndarray(None, host=tensor.numpy(), device=0)

    patch.setattr(plain, "from_external", from_external, raising=False)
    patch.setattr(cupy, "from_dlpack", from_dlpack, raising=False)
    patch.setattr(cupy.cuda.runtime, "runtimeGetVersion", lambda: 12090, raising=False)
    patch.setattr(torch.utils.dlpack, "from_dlpack", lambda array: torch.from_numpy(array.host))


class Together:
    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        # gloo's sends and receives can be waited for once
        while self.works:
            self.works.pop().wait()
        return True

    def is_completed(self) -> bool:
        return all(one.is_completed() for one in self.works)


class Batches:
    """A group of gloo that is spoken to as NCCL's are: group calls with one work each, and no tags.

    ``calls`` are what it was told, and by which thread.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.calls: list[tuple[str, str]] = []
        self.works: list[Any] = []

    def _told(self, call: str) -> None:
        self.calls.append((call, threading.current_thread().name))

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        self._told("allreduce")
        return self.group.allreduce(tensors)

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int) -> None:
        self._told("send")
        assert tag == 0
        self.works.append(self.group.send(tensors, dstRank, tag))

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> None:
        self._told("recv")
        assert tag == 0
        self.works.append(self.group.recv(tensors, srcRank, tag))

    def _start_coalescing(self, device: torch.device) -> None:
        self._told("_start_coalescing")
        assert not self.works

    def _end_coalescing(self, device: torch.device) -> Together:
        self._told("_end_coalescing")
        works, self.works = self.works, []
        return Together(works)

    def shutdown(self) -> None:
        self._told("shutdown")
