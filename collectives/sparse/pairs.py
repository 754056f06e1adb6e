"""Chosen entries as bytes: all indices, then all values, so that every rank's message has one length."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.selection.topk import index_type

Array = NDArray[Any]


def pair_bytes(size: int, dtype: str) -> int:
    """Bytes of an entry of a gradient with so many elements: index and value."""
    return np.dtype(index_type(size)).itemsize + np.dtype(dtype).itemsize


def encode_pairs(indices: Array, values: Array) -> NDArray[np.uint8]:
    """Indices and values as bytes, in the machine's byte order."""
    return np.concatenate((indices.view(np.uint8), values.view(np.uint8)))


def decode_pairs(message: NDArray[np.uint8], *, size: int, dtype: str) -> tuple[Array, Array]:
    """What `encode_pairs` made of entries of a gradient with so many elements.

    Examples
    --------
    >>> message = encode_pairs(np.array([2, 5], np.int32), np.array([0.5, -1.0], np.float32))
    >>> indices, values = decode_pairs(message, size=9, dtype="float32")
    >>> len(message), indices.tolist(), values.tolist()
    (16, [2, 5], [0.5, -1.0])
    """
    index = np.dtype(index_type(size))
    count = len(message) // pair_bytes(size, dtype)
    border = count * index.itemsize
    return message[:border].view(index), message[border:].view(dtype)
