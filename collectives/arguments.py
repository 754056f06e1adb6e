"""The arrays that a caller hands to a collective: checked before anything is written, and kept apart.

One array per rank, all of one shape and dtype. Results may be written over the inputs (``out=arrays``); any
other overlap between inputs and ``out`` is resolved by copying the input first, as numpy's own functions do,
and overlap between the ``out`` arrays of two ranks is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from collectives.reduction import DTYPE_KINDS
from topoplan.errors import UsageError

Scalar = TypeVar("Scalar", bound=np.generic)
Item = TypeVar("Item")


def check_inputs(arrays: Sequence[NDArray[Scalar]], ranks: int) -> list[NDArray[Scalar]]:
    """The arrays as a list, one per rank, of one shape and one supported dtype.

    Raises
    ------
    UsageError
        Names the first rank whose array does not fit.

    Examples
    --------
    >>> check_inputs([np.zeros(3), np.zeros(4)], 2)
    Traceback (most recent call last):
    ...
    topoplan.errors.UsageError: rank 1 has shape (4,) and rank 0 (3,); give every rank the same shape
    """
    listed = _one_per_rank(arrays, ranks, "arrays")
    for rank, array in enumerate(listed):
        _check_array(array, rank, "array")
        if array.dtype.kind not in DTYPE_KINDS:
            raise UsageError(
                f"rank {rank} has dtype {array.dtype}, which cannot be moved; "
                f"use {', '.join(DTYPE_KINDS.values())}"
            )
        if array.dtype != listed[0].dtype:
            raise UsageError(
                f"rank {rank} has dtype {array.dtype} and rank 0 {listed[0].dtype}; "
                "give every rank the same dtype"
            )
        if array.shape != listed[0].shape:
            raise UsageError(
                f"rank {rank} has shape {array.shape} and rank 0 {listed[0].shape}; "
                "give every rank the same shape"
            )
    return listed


def check_outputs(
    out: Sequence[NDArray[Scalar] | None] | None,
    ranks: int,
    *,
    shape: tuple[int, ...],
    dtype: np.dtype[Scalar],
    holders: Sequence[int],
) -> list[NDArray[Scalar] | None]:
    """Where the results go: the caller's arrays or new ones for the ``holders``, None for the other ranks.

    Raises
    ------
    UsageError
        Names the first rank whose ``out`` array has another shape or dtype, is read-only, or shares memory
        with that of another rank.
    """
    if out is None:
        return [np.empty(shape, dtype) if rank in holders else None for rank in range(ranks)]
    given = _one_per_rank(out, ranks, "out arrays")
    kept: list[NDArray[Scalar] | None] = [None] * ranks
    for rank in holders:
        array = given[rank]
        _check_array(array, rank, "out array")
        assert array is not None
        if array.dtype != dtype or array.shape != shape:
            raise UsageError(
                f"rank {rank} has an out array of shape {array.shape} and dtype {array.dtype}; "
                f"this result needs shape {shape} and dtype {dtype}"
            )
        if not array.flags.writeable:
            raise UsageError(f"rank {rank} has a read-only out array; pass a copy or leave out away")
        for other in range(rank):
            held = kept[other]
            if held is not None and np.may_share_memory(array, held) and np.shares_memory(array, held):
                raise UsageError(
                    f"the out arrays of rank {other} and rank {rank} share memory; give every rank its own"
                )
        kept[rank] = array
    return kept


def flat_inputs(
    inputs: Sequence[NDArray[Scalar]], outputs: Sequence[NDArray[Scalar] | None]
) -> list[NDArray[Scalar]]:
    """Every input as one contiguous dimension; copied where it is not, or where results would overwrite it.

    Examples
    --------
    >>> line = np.arange(4)
    >>> flat = flat_inputs([line[:3], line[1:]], [line[:3], None])
    >>> [bool(np.shares_memory(part, line)) for part in flat]
    [True, False]
    """
    flat = []
    for rank, array in enumerate(inputs):
        endangered = any(
            output is not None
            and np.may_share_memory(array, output)
            and not (other == rank and _same_memory(array, output))
            for other, output in enumerate(outputs)
        )
        line = np.ascontiguousarray(array).reshape(-1)
        flat.append(line.copy() if endangered and np.may_share_memory(line, array) else line)
    return flat


def _same_memory(one: NDArray[Scalar], other: NDArray[Scalar]) -> bool:
    return one.ctypes.data == other.ctypes.data and one.shape == other.shape and one.strides == other.strides


def _one_per_rank(arrays: Sequence[Item], ranks: int, what: str) -> list[Item]:
    if isinstance(arrays, np.ndarray) and arrays.ndim == 0:
        raise UsageError(f"a single number instead of {ranks} {what}; pass a list with one array per rank")
    listed = list(arrays)
    if len(listed) != ranks:
        raise UsageError(
            f"{len(listed)} {what} for {ranks} ranks; pass one per rank, in the order of the ranks"
        )
    return listed


def _check_array(array: object, rank: int, what: str) -> None:
    if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
        raise UsageError(
            f"rank {rank} has a {type(array).__name__} instead of a numpy array as its {what}; "
            "convert it with numpy.array"
        )
