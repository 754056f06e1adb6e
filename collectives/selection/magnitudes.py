"""Floats as integers that order as their magnitudes.

The bits of a float without its sign, read as an integer, order as the magnitudes do: zero, denormals, numbers,
infinity, and NaN above all. So selecting by magnitude is selecting by integers, exactly and for every kind of float.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import UsageError

INTEGERS: dict[str, tuple[type[np.signedinteger[Any]], int]] = {
    "float16": (np.int16, 0x7C00),
    "bfloat16": (np.int16, 0x7F80),
    "float32": (np.int32, 0x7F80_0000),
    "float64": (np.int64, 0x7FF0_0000_0000_0000),
}
"""For each kind of float the integer of its size, and the key of infinity."""


@dataclass(frozen=True, slots=True, eq=False)
class Magnitudes:
    """An array of floats, seen as integers.

    Parameters
    ----------
    bits : (d,) int16, int32 or int64
        The floats' own memory.
    mask : integer of that type
        ``bits & mask`` are the keys.
    infinity : integer of that type
        The key of infinity; those above it are NaN.
    """

    bits: NDArray[Any]
    mask: Any
    infinity: Any

    @property
    def width(self) -> int:
        """Bits of a key."""
        return 8 * self.bits.dtype.itemsize - 1


def magnitudes(array: NDArray[Any]) -> Magnitudes:
    """An array's keys, flat.

    Parameters
    ----------
    array : contiguous array of float16, bfloat16 (of the package ml_dtypes), float32 or float64

    Raises
    ------
    UsageError
        It holds something else, or is not contiguous.

    Examples
    --------
    >>> keys = magnitudes(np.array([-2.0, 1.0, 0.5, -np.inf]))
    >>> np.argsort(keys.bits & keys.mask).tolist()
    [2, 1, 0, 3]
    """
    if not isinstance(array, np.ndarray) or array.dtype.name not in INTEGERS or not array.dtype.isnative:
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise UsageError(
            f"{kind} has no magnitudes to select by; give a numpy array of {', '.join(INTEGERS)}"
        )
    if not array.flags.c_contiguous:
        raise UsageError("the array is not contiguous; give numpy.ascontiguousarray of it")
    integer, infinity = INTEGERS[array.dtype.name]
    return Magnitudes(array.reshape(-1).view(integer), integer(np.iinfo(integer).max), integer(infinity))
