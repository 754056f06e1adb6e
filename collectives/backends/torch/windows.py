"""The ranks of a process group with a GPU each: tensors there go by the kernels of the nccl back end.

Nothing of the group is used for them. The kernels work in a stream of CuPy's, behind torch's stream of the collectives,
which is itself behind the caller's. Tensors on the CPU, where a group takes these too, go by messages of the group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from collectives.arrays.current_device import on_device
from collectives.arrays.torch_arrays import TorchArrays, on_gpu
from collectives.arrays.torch_on_cupy import line_on_cupy, stream_on_cupy
from collectives.backends.backend import AVERAGED, Call
from collectives.backends.nccl.backend import NcclBackend
from collectives.backends.torch.backend import TorchBackend
from collectives.peers.signature import Signature


class WindowMembers:
    """`Backend` of one rank of a process group; closes what its ranks have met over, too.

    Parameters
    ----------
    kernels : NcclBackend
    messages : TorchBackend, optional
        Of the same ranks, for tensors on the CPU; not closed.
    arrays : TorchArrays
    cupy : module

    Attributes
    ----------
    about_engine : str
        See `NcclBackend`.
    then : list of callable
        Called when this has been closed.
    """

    name = "nccl"
    one_rank = True
    direct = False
    averages = True

    def __init__(
        self, kernels: NcclBackend, messages: TorchBackend | None, *, arrays: TorchArrays, cupy: Any
    ) -> None:
        self.then: list[Callable[[], None]] = []
        self.ranks, self.size, self.arrays = kernels.ranks, kernels.size, arrays
        self.chunk_bytes, self.about_engine = kernels.chunk_bytes, kernels.about_engine
        self._kernels, self._messages, self._cupy = kernels, messages, cupy
        self._gpu = kernels.arrays.device

    def run(self, call: Call[torch.Tensor]) -> None:
        """See `Backend.run`."""
        (memory,) = call.memory
        if not on_gpu(memory.source):
            self._run_messages(call)
            return
        with on_device(self._cupy, self._gpu):
            stream = torch.cuda.current_stream(memory.source.device)
            self._kernels.arrays.behind(stream_on_cupy(self._cupy, stream, self._gpu))
        source, result = (
            line_on_cupy(self._cupy, line, self._gpu) for line in (memory.source, memory.result)
        )
        self._kernels.run(replace(call, memory=(replace(memory, source=source, result=result),)))

    def refuse(self, signature: Signature) -> None:
        """See `Backend.refuse`."""
        self._kernels.refuse(signature)

    def largest(self, value: float) -> float:
        """See `Backend.largest`."""
        return self._kernels.largest(value)

    def agree(self, signature: Signature) -> None:
        """See `GathersTexts.agree`."""
        self._kernels.agree(signature)

    def gather_texts(self, text: str) -> list[str]:
        """See `GathersTexts.gather_texts`."""
        return self._kernels.gather_texts(text)

    def empty(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """See `GivesMemory.empty`: of the region, for tensors on the GPU."""
        nbytes = math.prod(shape) * like.element_size()
        memory = self._kernels.memory(nbytes) if nbytes and on_gpu(like) else None
        if memory is None:
            return self.arrays.empty(shape, like)
        line: torch.Tensor = torch.utils.dlpack.from_dlpack(memory)
        return line.view(like.dtype).view(shape)

    def writes(self, array: torch.Tensor) -> bool:
        """See `GivesMemory.writes`."""
        return self._kernels.holds(array.data_ptr(), array.nbytes)

    def close(self) -> None:
        """See `Backend.close`."""
        self._kernels.close()
        for close in self.then:
            close()

    def _run_messages(self, call: Call[torch.Tensor]) -> None:
        assert self._messages is not None, (
            "the group takes no tensors on the CPU, and `check` has seen to that"
        )
        self._kernels.agree_on_host(call.signature)
        self._messages.run(call)
        if call.op == "avg" and call.dtype in AVERAGED:
            self.arrays.divide(call.memory[0].result, self.size)
