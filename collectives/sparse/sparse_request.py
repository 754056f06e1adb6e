"""What a caller asks of a sparse allreduce, checked before anything is taken from his arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from collectives.backends.backend import Backend
from collectives.execution.request import check_inputs, check_outputs
from topoplan.errors import UsageError

DTYPES = ("float16", "bfloat16", "float32", "float64")
"""Of gradients; those of 16 bits are kept, selected and sent in float32."""

OPERATIONS = ("sum", "avg")


@dataclass(frozen=True, slots=True)
class SparseRequest:
    """A sparse allreduce whose arguments fit.

    Parameters
    ----------
    inputs : list of arrays, one for each rank of this process
    outputs : list of arrays or None
    op : str
        sum or avg.
    shape : tuple of int
    size : int
        Elements of a gradient.
    dtype : str
        In which entries are kept and sent.
    """

    inputs: list[Any]
    outputs: Sequence[Any | None]
    op: str
    shape: tuple[int, ...]
    size: int
    dtype: str


def sparse_request(backend: Backend[Any], arrays: Any, *, out: Any, op: str) -> SparseRequest:
    """Check the arguments of a sparse allreduce.

    Raises
    ------
    UsageError
        Names the rank and what does not fit.
    """
    library = backend.arrays
    inputs = check_inputs([arrays] if backend.one_rank else arrays, backend.ranks, library)
    dtype = library.dtype(inputs[0])
    if dtype not in DTYPES:
        raise UsageError(f"gradients of {dtype} cannot be made sparse; give {', '.join(DTYPES)}")
    if op not in OPERATIONS:
        raise UsageError(f"a sparse {op!r} is not defined; use {' or '.join(OPERATIONS)}")
    shape = library.shape(inputs[0])
    outputs = check_outputs(
        [out] if backend.one_rank and out is not None else out,
        backend.ranks,
        library,
        shape=shape,
        like=inputs[0],
        holders=backend.ranks,
    )
    size = 1
    for length in shape:
        size *= length
    return SparseRequest(inputs, outputs, op, shape, size, "float64" if dtype == "float64" else "float32")
