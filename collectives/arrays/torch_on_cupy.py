"""Tensors on a GPU as CuPy's kernels take them: their own memory, and streams that are torch's."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from collectives.arrays.cupy_arrays import load_cupy
from topoplan.errors import UsageError

BITS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64", 16: "complex128"}
"""numpy's type of elements of so many bytes, for kernels that are told by name what they are."""


def gpu_device(gpu: int) -> torch.device:
    """The device of a GPU."""
    return torch.device("cuda", gpu)


def check_cupy(purpose: str) -> Any:
    """The CuPy that runs on the same CUDA as torch.

    Parameters
    ----------
    purpose : str
        What needs it, as the beginning of a sentence.

    Raises
    ------
    UsageError
        It is missing, finds no GPU, or is for another CUDA; says what to install.
    """
    major = (torch.version.cuda or "12").split(".")[0]
    remedy = f'pip install "topoplan[cuda{major}]"'
    if find_spec("cupy") is None:
        raise UsageError(f"{purpose} needs CuPy: {remedy}")
    cupy: Any = load_cupy("torch")
    other = cupy.cuda.runtime.runtimeGetVersion() // 1000
    if str(other) != major:
        raise UsageError(
            f"CuPy is built for CUDA {other} and torch for CUDA {torch.version.cuda}: "
            f"pip uninstall cupy-cuda{other}x, then {remedy}"
        )
    return cupy


def stream_on_cupy(cupy: Any, stream: torch.cuda.Stream, gpu: int) -> Any:
    """A stream of torch as one of CuPy."""
    if hasattr(stream, "__cuda_stream__") and hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(stream)
    # before CuPy 14, or a torch whose streams do not tell of themselves
    return cupy.cuda.ExternalStream(stream.cuda_stream, gpu)


def line_on_cupy(cupy: Any, line: torch.Tensor, gpu: int) -> Any:
    """The memory of a line, as elements of as many bytes; keeps the tensor alive."""
    kind, nbytes = BITS[line.element_size()], line.numel() * line.element_size()
    if not nbytes:
        return cupy.empty(0, dtype=kind)
    memory = cupy.cuda.UnownedMemory(line.data_ptr(), nbytes, line, gpu)
    return cupy.ndarray((line.numel(),), dtype=kind, memptr=cupy.cuda.MemoryPointer(memory, 0))
