"""The machine code in which a numpy ufunc joins arrays of one type, for callers that hold no interpreter lock.

A ufunc of numbers keeps for every type the address of a C loop ``void loop(char **arguments, npy_intp *lengths,
npy_intp *steps, void *data)``. What calls that loop gets numpy's bits, signed zeros and NaNs included, on every
processor. Where it lies in the object is laid down in numpy's public header ``ufuncobject.h``.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np


class _Ufunc(ctypes.Structure):
    """The beginning of ``PyUFuncObject``."""

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


NUMBERS = np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"
"""Types whose loops touch no Python object."""
