"""Reduction operators on numpy arrays: which exist, for which dtypes, and what they mean.

``sum``, ``prod``, ``min`` and ``max`` are numpy's; integers wrap around and NaN wins in min and max. Truth values have
min (and) and max (or) only; complex numbers have no order, so no min and max.

``avg`` has the same bits on all back ends:

- float16, bfloat16: each value is divided by the number of ranks, rounded to its type, and added up, as by DDP.
  An average of finite values is finite, but for the rounding of those near the largest number. Values below the
  smallest normal number times the number of ranks lose bits.
- wider floats and complex numbers: the sum is divided by the number of ranks; it is infinite beyond their type.
- integers: the sum, which wraps around, is divided and truncated towards zero, as by NCCL.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import UsageError

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
"""The kinds of dtype that can be moved, as numpy codes them."""


BFLOAT16 = "bfloat16"
"""A float that numpy has from the package ml_dtypes; for numpy its kind is none of these."""

LIMITS = {"float16": 65520.0, BFLOAT16: float.fromhex("0x1.ffp127")}
"""Magnitudes from which on a number is infinite when it is rounded to a type of 16 bits."""


def reduction(op: str, dtype: np.dtype[np.generic]) -> np.ufunc:
    """The numpy function that joins two contributions.

    Parameters
    ----------
    op : str
        sum, prod, min, max or avg.
    dtype : numpy dtype
        Of kind float, integer, complex or bool, or ml_dtypes' bfloat16.

    Raises
    ------
    UsageError
        No such operator, or not for this dtype.

    Examples
    --------
    >>> reduction("sum", np.dtype("float32"))
    <ufunc 'add'>
    """
    if op not in OPERATORS:
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

    Examples
    --------
    >>> total = np.array([-7, 7])
    >>> divide(total, 2)
    >>> total
    array([-3,  3])
    """
    if total.dtype.kind not in "iu":
        np.divide(total, ranks, out=total)
        return
    # int8 cannot hold 200 ranks, so the division is done in 64 bits
    wide = total.astype(np.int64 if total.dtype.kind == "i" else np.uint64)
    wide -= np.fmod(wide, ranks)
    np.copyto(total, wide // ranks, casting="same_kind")


class _Ufunc(ctypes.Structure):
    """The beginning of ``PyUFuncObject``, as numpy's public header ``ufuncobject.h`` lays it down."""

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
    """Address of the loop that joins two arrays of a type to one of the same type, and of what numpy keeps with it.

    It is a C loop ``void loop(char **arguments, npy_intp *lengths, npy_intp *steps, void *data)``, which needs no
    interpreter lock. What calls it gets numpy's bits, signed zeros and NaNs included, on every processor.

    Returns
    -------
    (int, int)
        Zeros where there is none: the type is no number of numpy's own, or its bytes are in foreign order.

    Examples
    --------
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
