"""numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.reduction import BFLOAT16, DTYPE_KINDS, divide, reduction
from topoplan.errors import UsageError

AnyArray = NDArray[Any]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """numpy's dtype of a name; it knows bfloat16 from the package ml_dtypes.

    Raises
    ------
    UsageError
        That package is not there; says what to install.
    """
    if name != BFLOAT16:
        return np.dtype(name)
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise UsageError(
            'numpy has bfloat16 from the package ml_dtypes: pip install "topoplan[bfloat16]"'
        ) from None
    dtype: np.dtype[Any] = np.dtype(bfloat16)
    return dtype


def dtype_name(dtype: object) -> str:
    """numpy's name of a dtype of numpy or torch, or of such a name.

    Raises
    ------
    UsageError
        There is no such dtype.

    Examples
    --------
    >>> dtype_name(np.float32), dtype_name("f8"), dtype_name("bfloat16")
    ('float32', 'float64', 'bfloat16')
    """
    name: Any = dtype if isinstance(dtype, type) else str(dtype).removeprefix("torch.")
    if name == BFLOAT16:
        return BFLOAT16
    try:
        found = np.dtype(name)
    except TypeError:
        found = np.dtype(object)
    if found.kind not in DTYPE_KINDS:
        raise UsageError(f"dtype {dtype!r} cannot be moved; use one like float32, int64 or bfloat16")
    return _name(found)


class NumpyArrays:
    """`ArrayLibrary` of numpy."""

    name = "numpy"
    plain: tuple[type[Any], ...] = (np.ndarray,)

    def ordered(self) -> AbstractContextManager[object]:
        """See `ArrayLibrary.ordered`."""
        return nullcontext()

    def here(self) -> AbstractContextManager[object]:
        """See `ArrayLibrary.here`."""
        return nullcontext()

    def received(self, result: object) -> None:
        """See `ArrayLibrary.received`."""

    def gpu(self, array: AnyArray) -> int | None:
        """See `ArrayLibrary.gpu`."""
        return None

    def check(self, array: object, *, rank: int, what: str) -> AnyArray:
        """See `ArrayLibrary.check`."""
        if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
            raise UsageError(
                f"rank {rank} has a {type(array).__name__} instead of a numpy array as its {what}; "
                "convert it with numpy.array"
            )
        if array.dtype.kind not in DTYPE_KINDS and array.dtype.name != BFLOAT16:
            raise UsageError(
                f"rank {rank} has dtype {array.dtype}, which cannot be moved; "
                f"use {', '.join(DTYPE_KINDS.values())}, or bfloat16 of the package ml_dtypes"
            )
        return array

    def shape(self, array: AnyArray) -> tuple[int, ...]:
        """See `ArrayLibrary.shape`."""
        return array.shape

    def dtype(self, array: AnyArray) -> str:
        """See `ArrayLibrary.dtype`; with the byte order where it is not the machine's."""
        return _name(array.dtype)

    def itemsize(self, array: AnyArray) -> int:
        """See `ArrayLibrary.itemsize`."""
        return array.dtype.itemsize

    def writeable(self, array: AnyArray) -> bool:
        """See `ArrayLibrary.writeable`."""
        return array.flags.writeable

    def check_reduction(self, op: str, array: AnyArray) -> None:
        """See `ArrayLibrary.check_reduction`."""
        reduction(op, array.dtype)

    def empty(self, shape: tuple[int, ...], like: AnyArray) -> AnyArray:
        """See `ArrayLibrary.empty`."""
        return np.empty(shape, like.dtype)

    def line(self, array: AnyArray) -> AnyArray:
        """See `ArrayLibrary.line`."""
        return np.ascontiguousarray(array).reshape(-1)

    def contiguous(self, array: AnyArray) -> bool:
        """See `ArrayLibrary.contiguous`."""
        return array.flags.c_contiguous

    def address(self, array: AnyArray) -> int:
        """See `ArrayLibrary.address`."""
        return array.ctypes.data if array.flags.c_contiguous else 0

    def copy(self, target: AnyArray, source: AnyArray) -> None:
        """See `ArrayLibrary.copy`."""
        target[...] = source

    def part(self, line: AnyArray, start: int, stop: int) -> AnyArray:
        """See `ArrayLibrary.part`."""
        return line[start:stop]

    def shaped(self, line: AnyArray, shape: tuple[int, ...]) -> AnyArray:
        """See `ArrayLibrary.shaped`."""
        return line.reshape(shape)

    def reals(self, line: AnyArray) -> AnyArray:
        """See `ArrayLibrary.reals`."""
        return line.view(line.real.dtype) if line.dtype.kind == "c" else line

    def overlap(self, one: AnyArray, other: AnyArray) -> bool:
        """See `ArrayLibrary.overlap`."""
        return np.may_share_memory(one, other) and np.shares_memory(one, other)

    def same(self, one: AnyArray, other: AnyArray) -> bool:
        """See `ArrayLibrary.same`."""
        return (
            one.ctypes.data == other.ctypes.data and one.shape == other.shape and one.strides == other.strides
        )

    def of(self, values: AnyArray, dtype: str | None = None) -> AnyArray:
        """See `ArrayLibrary.of`."""
        return values.copy() if dtype is None else values.astype(numpy_dtype(dtype))

    def wrapped(self, values: AnyArray) -> AnyArray:
        """See `ArrayLibrary.wrapped`."""
        return values

    def values(self, array: AnyArray) -> AnyArray:
        """See `ArrayLibrary.values`."""
        return array

    def by_numpy(self, array: AnyArray) -> bool:
        """See `ArrayLibrary.by_numpy`."""
        return True

    def put(self, target: AnyArray, values: AnyArray) -> None:
        """See `ArrayLibrary.put`."""
        target[...] = values

    def divide(self, total: AnyArray, ranks: int) -> None:
        """See `ArrayLibrary.divide`."""
        divide(total, ranks)

    def join(self, target: AnyArray, parts: Sequence[AnyArray], op: str) -> None:
        """See `ArrayLibrary.join`."""
        add = reduction(op, target.dtype)
        with np.errstate(all="ignore"):
            add(parts[0], parts[1], out=target)
            for part in parts[2:]:
                add(target, part, out=target)


@lru_cache(maxsize=64)
def _name(dtype: np.dtype[Any]) -> str:
    """numpy works it out every time."""
    return dtype.name if dtype.isnative else dtype.str
