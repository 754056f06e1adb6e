"""Define the protocol of an array library, and implement it for numpy: reduction operators and pooled memory.

``sum``, ``prod``, ``min`` and ``max`` are numpy's; integers wrap around and NaN wins in min and max. Booleans have
min (and) and max (or) only; complex numbers have no order, so no min and max.

``avg`` has the same bits on all back ends:

- float16, bfloat16: each value is divided by the number of ranks, rounded to its type, and added up, as by DDP.
  An average of finite values is finite, but for the rounding of those near the largest number. Values below the
  smallest normal number times the number of ranks lose bits.
- wider floats and complex numbers: the sum is divided by the number of ranks; it is infinite beyond their type.
- integers: the sum, which wraps around, is divided and truncated towards zero, as by NCCL.

New memory costs a page fault and a zeroing per page, as much time as the whole collective. `PooledArrays` therefore
keeps the memory of large results and hands it out again once no array refers to it.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import UsageError

Array = TypeVar("Array")


class Completion(Protocol):
    """The end of work that is queued on a GPU."""

    @property
    def done(self) -> bool:
        """Return whether the GPU has ended it, with or without an error."""

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end on the host; raise the error of a collective, or `TimeoutError` after so many seconds."""


class ArrayLibrary(Protocol[Array]):
    """The operations that differ between array libraries.

    Every method takes arrays that `check` has accepted.
    """

    name: str

    plain: tuple[type[Any], ...]
    """Types of arrays without state beside their elements, unlike subclasses."""

    def ordered(self, *, later: bool = False) -> AbstractContextManager[Completion | None]:
        """Return a context that orders a collective behind the caller's work on the GPU.

        It is created where the collective is called, and entered in the thread that runs it. Inside, the GPU works
        behind the work that the caller's current stream held, if `check` has seen an array on it since the last call.
        When the context ends without an error, the caller's stream is behind the work queued inside, unless that runs
        `later`, in the background. It yields the end of that work, or None without a GPU; the host does not wait.
        """

    def here(self) -> AbstractContextManager[object]:
        """Return a context in which this thread works on arrays in the stream of collectives."""

    def follow_caller(self, *arrays: Array) -> bool:
        """Order the next collective behind the caller's work on arrays that `check` does not see.

        Returns False, and orders nothing, while the caller captures a graph.
        """

    def received(self, result: object) -> None:
        """Note that this thread has received the result of a collective, and uses it in its current stream."""

    def gpu(self, array: Array) -> int | None:
        """Return the CUDA number of the GPU whose memory an array is; None for host memory."""

    def check(self, array: object, *, rank: int, what: str) -> Array:
        """Return the array if collectives can use it: kind, device and dtype.

        UsageError names the rank otherwise; ``what`` is "array" or "out array".
        """

    def shape(self, array: Array) -> tuple[int, ...]:
        """Return its shape."""

    def dtype(self, array: Array) -> str:
        """Return numpy's name of its dtype, bfloat16 included."""

    def itemsize(self, array: Array) -> int:
        """Return the bytes of an element."""

    def writeable(self, array: Array) -> bool:
        """Return whether results can be written to it."""

    def check_reduction(self, op: str, array: Array) -> None:
        """Raise `UsageError` if a reduction is unknown or not defined for the array's dtype."""

    def empty(self, shape: tuple[int, ...], like: Array) -> Array:
        """Return a new contiguous array of the same dtype on the same device, contents undefined."""

    def line(self, array: Array) -> Array:
        """Return the array as one contiguous dimension: the same memory if it is contiguous, else a copy."""

    def contiguous(self, array: Array) -> bool:
        """Return whether `line` is the same memory."""

    def address(self, array: Array) -> int:
        """Return the address of a contiguous array, which `check` may not have seen; else 0."""

    def placed(self, arrays: Sequence[Array]) -> Callable[[], bool]:
        """Return a function that tells whether all arrays still have the memory and shapes that they have now."""

    def copy(self, target: Array, source: Array) -> None:
        """Copy the elements of one array into another of the same shape and dtype; on a GPU in order of `here`."""

    def part(self, line: Array, start: int, stop: int) -> Array:
        """Return a slice of a line, the same memory."""

    def shaped(self, line: Array, shape: tuple[int, ...]) -> Array:
        """Return a line in another shape, the same memory."""

    def reals(self, line: Array) -> Array:
        """Return the real and imaginary parts of a contiguous complex line in turn, the same memory; another line as it
        is.
        """

    def overlap(self, one: Array, other: Array) -> bool:
        """Return whether two arrays share memory."""

    def same(self, one: Array, other: Array) -> bool:
        """Return whether two arrays are the same memory in the same order."""

    def of(self, values: NDArray[Any], dtype: str | None = None) -> Array:
        """Return a new array with the values of a numpy array, in its dtype or a named one.

        UsageError says what to install for the dtype.
        """

    def wrapped(self, values: NDArray[Any]) -> Array:
        """Return an array with the values of a numpy array that the caller gives up, in its memory if possible."""

    def values(self, array: Array) -> NDArray[Any]:
        """Return the values as a numpy array."""

    def by_numpy(self, array: Array) -> bool:
        """Return whether `values` are the array's own memory."""

    def put(self, target: Array, values: NDArray[Any]) -> None:
        """Copy the elements of a numpy array into an array of the same shape, in its dtype."""

    def divide(self, total: Array, ranks: int) -> None:
        """Turn a sum into an average in place, integers truncated towards zero."""

    def join(self, target: Array, parts: Sequence[Array], op: str) -> None:
        """Join two lines or more, one after another, into a line that shares no memory with them."""


OPERATORS: dict[str, np.ufunc] = {
    "avg": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
    "sum": np.add,
}
"""The operator that joins two contributions."""

NUMBERS = np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"
"""Types whose loops touch no Python object."""

DTYPE_KINDS = {
    "b": "truth values",
    "i": "integers",
    "u": "unsigned integers",
    "f": "floats",
    "c": "complex numbers",
}
"""Kinds of dtype that collectives move, by numpy's codes."""

BFLOAT16 = "bfloat16"
"""A float of the package ml_dtypes; its kind in numpy is not in `DTYPE_KINDS`."""

LIMITS = {"float16": 65520.0, BFLOAT16: float.fromhex("0x1.ffp127")}
"""Magnitudes from which on a number becomes infinite when it is rounded to a type of 16 bits."""


def reduction(op: str, dtype: np.dtype[np.generic]) -> np.ufunc:
    """Return the numpy function of a reduction (sum, prod, min, max or avg); UsageError if it is not defined for the
    dtype.

    >>> reduction("sum", np.dtype("float32"))
    <ufunc 'add'>
    """
    if not isinstance(op, str) or op not in OPERATORS:
        raise UsageError(f"reduction {op!r} is unknown; use one of {', '.join(sorted(OPERATORS))}")
    if dtype.kind == "b" and op not in ("min", "max"):
        raise UsageError(
            f"reduction {op!r} is not defined for bool; use 'max' (or), 'min' (and), or an integer dtype"
        )
    if dtype.kind == "c" and op in ("min", "max"):
        raise UsageError(
            f"reduction {op!r} is not defined for {dtype}: complex numbers have no order; use 'sum'"
        )
    return OPERATORS[op]


def divide(total: NDArray[np.generic], ranks: int) -> None:
    """Turn a sum into an average, in place.

    >>> total = np.array([-7, 7])
    >>> divide(total, 2)
    >>> total
    array([-3,  3])
    """
    if total.dtype.kind not in "iu":
        np.divide(total, ranks, out=total)
        return
    # int8 cannot hold a divisor of 200 ranks
    wide = total.astype(np.int64 if total.dtype.kind == "i" else np.uint64)
    wide -= np.fmod(wide, ranks)
    np.copyto(total, wide // ranks, casting="same_kind")


class _Ufunc(ctypes.Structure):
    """The first fields of ``PyUFuncObject`` in numpy's public header ``ufuncobject.h``."""

    _fields_ = (
        ("head", ctypes.c_char * object.__basicsize__),
        ("inputs", ctypes.c_int),
        ("outputs", ctypes.c_int),
        ("arguments", ctypes.c_int),
        ("identity", ctypes.c_int),
        ("loops", ctypes.POINTER(ctypes.c_void_p)),
        ("data", ctypes.POINTER(ctypes.c_void_p)),
        ("types", ctypes.c_int),
    )


@lru_cache(maxsize=256)
def loop_of(function: np.ufunc, dtype: np.dtype[np.generic]) -> tuple[int, int]:
    """Return the addresses of the C loop that joins two arrays of a type to one of it, and of the loop's data.

    The loop, ``void loop(char **arguments, npy_intp *lengths, npy_intp *steps, void *data)``, needs no interpreter lock
    and gives numpy's bits, signed zeros and NaNs included, on every processor. Zeros if numpy has no such loop: for
    other types and foreign byte order.

    >>> loop_of(np.add, np.dtype("float32"))[0] != 0, loop_of(np.add, np.dtype(">f4"))
    (True, (0, 0))
    """
    signature = f"{dtype.char * 2}->{dtype.char}"
    if not dtype.isnative or dtype.char not in NUMBERS or signature not in function.types:
        return 0, 0
    found = _Ufunc.from_address(id(function))
    assert (found.inputs, found.outputs, found.types) == (function.nin, function.nout, function.ntypes)
    number = function.types.index(signature)
    return found.loops[number] or 0, (found.data[number] or 0) if found.data else 0


AnyArray = NDArray[Any]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return numpy's dtype of a name; bfloat16 is that of ml_dtypes, and UsageError says how to install it."""
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
    """Return numpy's name of a dtype of numpy or torch, or of such a name; UsageError if collectives cannot move it.

    >>> dtype_name(np.float32), dtype_name("f8"), dtype_name("bfloat16")
    ('float32', 'float64', 'bfloat16')
    """
    name: Any = dtype if isinstance(dtype, type) else str(dtype).removeprefix("torch.")
    if name == BFLOAT16:
        return BFLOAT16
    try:
        found = np.dtype(name)
    except (TypeError, ValueError, SyntaxError):  # numpy parses texts such as "(2,)f4"
        found = np.dtype(object)
    if found.kind not in DTYPE_KINDS:
        raise UsageError(f"dtype {dtype!r} cannot be moved; use one like float32, int64 or bfloat16")
    return _name(found)


def placed_by(arrays: Sequence[Any], address: Callable[[Any], int]) -> Callable[[], bool]:
    """Return `ArrayLibrary.placed` of arrays with this address."""
    kept = [(array, address(array), array.shape) for array in arrays]

    def placed() -> bool:
        for array, before, shape in kept:  # noqa: SIM110  # a generator takes as long as a small sum
            if address(array) != before or array.shape != shape:
                return False
        return True

    return placed


_word_at = ctypes.c_size_t.from_address


def _field(array: AnyArray) -> int:
    """Return the address from numpy's public struct, in which it is the first field; `ctypes.data` takes longer."""
    return _word_at(id(array) + object.__basicsize__).value


def _attribute(array: AnyArray) -> int:
    """Return the address as numpy's documentation has it."""
    return array.ctypes.data


_probe = np.empty(3)
address_of = _field if _field(_probe) == _probe.ctypes.data else _attribute
"""Return the address of an array's first element."""


class NumpyArrays:
    """`ArrayLibrary` of numpy."""

    name = "numpy"
    plain: tuple[type[Any], ...] = (np.ndarray,)

    def ordered(self, *, later: bool = False) -> AbstractContextManager[Completion | None]:
        return nullcontext()

    def here(self) -> AbstractContextManager[object]:
        return nullcontext()

    def follow_caller(self, *arrays: AnyArray) -> bool:
        return True

    def received(self, result: object) -> None:
        pass

    def gpu(self, array: AnyArray) -> int | None:
        return None

    def check(self, array: object, *, rank: int, what: str) -> AnyArray:
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
        return array.shape

    def dtype(self, array: AnyArray) -> str:
        """The byte order is part of the name if it is not the machine's."""
        return _name(array.dtype)

    def itemsize(self, array: AnyArray) -> int:
        return array.dtype.itemsize

    def writeable(self, array: AnyArray) -> bool:
        return array.flags.writeable

    def check_reduction(self, op: str, array: AnyArray) -> None:
        reduction(op, array.dtype)

    def empty(self, shape: tuple[int, ...], like: AnyArray) -> AnyArray:
        return np.empty(shape, like.dtype)

    def line(self, array: AnyArray) -> AnyArray:
        return np.ascontiguousarray(array).reshape(-1)

    def contiguous(self, array: AnyArray) -> bool:
        return array.flags.c_contiguous

    def address(self, array: AnyArray) -> int:
        return address_of(array) if array.flags.c_contiguous else 0

    def placed(self, arrays: Sequence[AnyArray]) -> Callable[[], bool]:
        fields = [
            (one, _word_at(id(one) + object.__basicsize__), address_of(one), one.shape) for one in arrays
        ]
        if any(field.value != address for _, field, address, _ in fields):
            return placed_by(arrays, address_of)

        def placed() -> bool:
            for one, field, address, shape in fields:  # noqa: SIM110  # as in `placed_by`
                if field.value != address or one.shape != shape:
                    return False
            return True

        return placed

    def copy(self, target: AnyArray, source: AnyArray) -> None:
        target[...] = source

    def part(self, line: AnyArray, start: int, stop: int) -> AnyArray:
        return line[start:stop]

    def shaped(self, line: AnyArray, shape: tuple[int, ...]) -> AnyArray:
        return line.reshape(shape)

    def reals(self, line: AnyArray) -> AnyArray:
        return line.view(line.real.dtype) if line.dtype.kind == "c" else line

    def overlap(self, one: AnyArray, other: AnyArray) -> bool:
        return np.may_share_memory(one, other) and np.shares_memory(one, other)

    def same(self, one: AnyArray, other: AnyArray) -> bool:
        return (
            one.ctypes.data == other.ctypes.data and one.shape == other.shape and one.strides == other.strides
        )

    def of(self, values: AnyArray, dtype: str | None = None) -> AnyArray:
        return values.copy() if dtype is None else values.astype(numpy_dtype(dtype))

    def wrapped(self, values: AnyArray) -> AnyArray:
        return values

    def values(self, array: AnyArray) -> AnyArray:
        return array

    def by_numpy(self, array: AnyArray) -> bool:
        return True

    def put(self, target: AnyArray, values: AnyArray) -> None:
        target[...] = values

    def divide(self, total: AnyArray, ranks: int) -> None:
        divide(total, ranks)

    def join(self, target: AnyArray, parts: Sequence[AnyArray], op: str) -> None:
        add = reduction(op, target.dtype)
        with np.errstate(all="ignore"):
            add(parts[0], parts[1], out=target)
            for part in parts[2:]:
                add(target, part, out=target)


@lru_cache(maxsize=64)
def _name(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype: numpy computes it anew at each access."""
    return dtype.name if dtype.isnative else dtype.str


LEAST_POOLED_BYTES = 1 << 20
"""Bytes from which on memory is pooled; numpy pools smaller arrays itself."""

KEPT_RESULTS = 4
"""Most buffers in the pool, free or in use."""


class PooledArrays(NumpyArrays):
    """`ArrayLibrary` of numpy with a buffer pool for large results.

    >>> library = PooledArrays()
    >>> first = library.empty((1 << 20,), np.empty(0))
    >>> place = first.ctypes.data
    >>> second = library.empty((1 << 20,), np.empty(0))
    >>> del first
    >>> third = library.empty((1 << 19, 2), np.empty(0))
    >>> third.ctypes.data == place, second.ctypes.data == place
    (True, False)
    """

    def __init__(self) -> None:
        self._kept: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], like: NDArray[Any]) -> NDArray[Any]:
        length = math.prod(shape) * like.dtype.itemsize
        if length < LEAST_POOLED_BYTES:
            return super().empty(shape, like)
        with self._lock:
            memory = self._free(length)
            if memory is None:
                memory = np.empty(length, np.uint8)
                self._kept = [*self._kept[1 - KEPT_RESULTS :], memory]
            return memory[:length].view(like.dtype).reshape(shape)

    def _free(self, length: int) -> NDArray[np.uint8] | None:
        """Return the smallest buffer that is long enough, at most twice as long, and not in use."""
        found = None
        for place in range(len(self._kept)):
            # Arrays in this memory hold a reference to it as their base, beside the list and getrefcount.
            unused = sys.getrefcount(self._kept[place]) == 2
            size = len(self._kept[place])
            if unused and length <= size <= 2 * length and (found is None or size < len(found)):
                found = self._kept[place]
        return found
