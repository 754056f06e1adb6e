"""Compute with gradients and entries in torch tensors on a GPU: CuPy's kernels on the tensors' memory, in their
stream.

CuPy sees a tensor's memory through DLPack; CuPy arrays that go to torch, messages above all, are copied into tensors,
since torch's allocator and NCCL need to know whose memory they handle. Gradients of 16 bits are widened by torch
before, so that bfloat16, which CuPy lacks, never gets there. Without CuPy, or with one for another CUDA than torch's,
entries are selected on the processor, and a warning says what to install.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from collectives.sparse.entry_arrays import EntryArrays, HostEntryArrays
from collectives.sparse.gpu_entry_arrays import GpuEntryArrays, GpuErrorFeedback
from collectives.tables.cupy_arrays import on_device
from collectives.tables.torch_arrays import TorchArrays, check_cupy, gpu_device, stream_on_cupy
from topoplan.errors import UsageError


class TorchEntryArrays(GpuEntryArrays):
    """The `EntryArrays` of torch tensors on one GPU, in the library's stream: lines are tensors, values CuPy arrays.

    Raises `UsageError` without a CuPy for this torch.
    """

    def __init__(self, library: TorchArrays, gpu: int) -> None:
        check_cupy("selecting entries on a GPU")
        super().__init__(library)
        self._gpu = gpu
        self._seen: tuple[object, Any] | None = None

    @contextmanager
    def here(self) -> Iterator[None]:
        """torch's and CuPy's current streams are the same one."""
        stream = self._library.stream(gpu_device(self._gpu))
        if self._seen is None or self._seen[0] is not stream:
            self._seen = (stream, stream_on_cupy(self._cupy, stream, self._gpu))
        with self._library.here(), on_device(self._cupy, self._gpu), self._seen[1]:
            yield
            stream.synchronize()  # not after an error: the stream may never finish

    def feedback(self, size: int, dtype: str, *, momentum: float) -> GpuErrorFeedback:
        return GpuErrorFeedback(size, dtype, momentum=momentum, device=self._gpu)

    def area(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=gpu_device(self._gpu))

    def values(self, line: torch.Tensor) -> Any:
        if not line.numel():  # no memory to share
            return self._cupy.empty(0, dtype=str(line.dtype).removeprefix("torch."))
        return self._cupy.from_dlpack(line)

    def line(self, values: Any) -> torch.Tensor:
        made = torch.empty(
            values.shape, dtype=getattr(torch, values.dtype.name), device=gpu_device(self._gpu)
        )
        self.store(made, values)
        return made

    def zeroed(self, line: torch.Tensor) -> Any:
        return super().zeroed(self.values(line))

    def store(self, line: torch.Tensor, values: Any) -> None:
        super().store(self.values(line), values)

    def widened(self, array: torch.Tensor, dtype: str) -> torch.Tensor:
        line: torch.Tensor = self._library.line(array)
        return line.to(getattr(torch, dtype))

    def rounded(self, target: torch.Tensor, result: torch.Tensor) -> None:
        self._library.copy(target, result)


def torch_entry_arrays(library: Any, gpu: int) -> EntryArrays[Any]:
    """Return the `EntryArrays` of tensors on a GPU; without CuPy those of the processor, after a warning."""
    try:
        return TorchEntryArrays(library, gpu)
    except UsageError as error:
        warnings.warn(
            f"sparse gradients are copied from GPU {gpu} to the host, which selects their entries: {error}",
            stacklevel=2,
        )
        return HostEntryArrays(library)
