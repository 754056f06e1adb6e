"""Chosen entries on a GPU as the bytes of a message, and back: as `collectives.sparse.pairs` without a wire format.

A message is all indices and then all values, as they lie in memory. Nothing leaves the GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from collectives.arrays.cupy_arrays import load_cupy
from collectives.selection.topk import index_type
from topoplan.errors import UsageError


def encode_entries_gpu(indices: Any, values: Any) -> Any:
    """A message, on the current stream of the entries' GPU.

    Parameters
    ----------
    indices : (n,) CuPy array of int32 or int64
    values : (n,) CuPy array

    Returns
    -------
    (n (index bytes + value bytes),) CuPy array of uint8
    """
    cupy: Any = load_cupy("gpu selection")
    with cupy.cuda.Device(indices.device.id):
        parts = [cupy.ascontiguousarray(part).view(np.uint8) for part in (indices, values)]
        message = cupy.empty(indices.nbytes + values.nbytes, dtype=np.uint8)
        message[: indices.nbytes] = parts[0]
        message[indices.nbytes :] = parts[1]
        return message


def decode_entries_gpu(message: Any, *, size: int, dtype: str) -> tuple[Any, Any]:
    """Indices and values of a message, in its memory where they are aligned there.

    Parameters
    ----------
    message : (m,) CuPy array of uint8
    size : int
        Elements of the array that the entries are from, which tells the indices' dtype.
    dtype : str
        Of the values; bfloat16 comes as its bits in uint16.

    Raises
    ------
    UsageError
        The message has no length that such entries have.
    """
    cupy: Any = load_cupy("gpu selection")
    index, value = np.dtype(index_type(size)), np.dtype("uint16" if dtype == "bfloat16" else dtype)
    entry = index.itemsize + value.itemsize
    if message.size % entry:
        raise UsageError(
            f"a message of {message.size} bytes does not hold entries of {entry} bytes each; "
            "decode it with the size and dtype that it was encoded with"
        )
    border = message.size // entry * index.itemsize
    with cupy.cuda.Device(message.device.id):
        return _seen_as(cupy, message[:border], index), _seen_as(cupy, message[border:], value)


def _seen_as(cupy: Any, line: Any, dtype: np.dtype[Any]) -> Any:
    """Bytes as numbers: a GPU reads these from multiples of their size only."""
    if line.data.ptr % dtype.itemsize:
        aligned = cupy.empty(line.size, dtype=np.uint8)
        aligned[...] = line
        line = aligned
    return line.view(dtype)
