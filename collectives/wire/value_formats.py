"""Values as float32, float16 or bfloat16 on the wire: rounded to nearest, ties to even, and back without loss.

bfloat16 travels as the upper 16 bits of a float32, in uint16. Finite values beyond the largest of a format
(65504 and 3.39e38, plus half a step) become infinite, as IEEE 754 has it; `overflows` counts them beforehand.
NaN stays NaN (quiet), signs of zero and subnormal values are kept.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from collectives.compiled import compiled
from topoplan.errors import UsageError

FloatFormat = Literal["float32", "float16", "bfloat16"]

WIRE_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}
"""The dtype in which a format travels."""

FIRST_INFINITE = {
    "float32": float.fromhex("0x1.ffffffp127"),
    "float16": 65520.0,
    "bfloat16": float.fromhex("0x1.ffp127"),
}
"""The least magnitude that a format rounds to infinity."""


def narrow(values: NDArray[Any], wire: FloatFormat) -> NDArray[Any]:
    """Round values to a format of the wire.

    Parameters
    ----------
    values : ndarray of float16, float32 or float64, shape (k,)
    wire : {"float32", "float16", "bfloat16"}

    Returns
    -------
    ndarray of float32, float16 or uint16 (the bits of bfloat16), shape (k,)
        Rounded once from what was given, also from float64.

    Raises
    ------
    UsageError
        Values are no vector of floats, or the format is unknown.

    Examples
    --------
    >>> import numpy as np
    >>> narrow(np.float32([1, 1 + 2**-8, 1 + 2**-7, 3.4e38]), "bfloat16")
    array([16256, 16256, 16257, 32640], dtype=uint16)
    >>> narrow(np.float32([1 / 3, 65519, 65520]), "float16")
    array([3.333e-01, 6.550e+04,       inf], dtype=float16)
    """
    check_floats(values)
    _check_format(wire)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if wire != "bfloat16":
            return values.astype(WIRE_DTYPES[wire])
        if values.dtype == np.float64:
            values = _rounded_to_odd(values)
        single = np.ascontiguousarray(values, dtype=np.float32)
    bits = np.empty(len(single), dtype=np.uint16)
    _upper_halves(single.view(np.uint32), bits)
    return bits


def widen(received: NDArray[Any], wire: FloatFormat, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Values of the wire in the dtype of the computation.

    Parameters
    ----------
    received : ndarray, shape (k,)
        What `narrow` made.
    wire : {"float32", "float16", "bfloat16"}
    dtype : numpy.dtype
        float16, float32 or float64. Exact where it holds every value of the format.

    Examples
    --------
    >>> import numpy as np
    >>> widen(np.uint16([16256, 16257, 32640]), "bfloat16", np.dtype(np.float32))
    array([1.       , 1.0078125,       inf], dtype=float32)
    """
    _check_format(wire)
    if wire == "bfloat16":
        received = (received.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return received.astype(dtype)


def overflows(values: NDArray[Any], wire: FloatFormat) -> int:
    """How many finite values the format rounds to infinity.

    Examples
    --------
    >>> import numpy as np
    >>> overflows(np.float32([1, 65519, -65520, np.inf]), "float16")
    1
    """
    check_floats(values)
    _check_format(wire)
    if values.dtype == np.float16:
        return 0
    magnitudes = np.abs(values).astype(np.float64, copy=False)
    return int(np.count_nonzero((magnitudes >= FIRST_INFINITE[wire]) & (magnitudes < np.inf)))


def check_floats(values: NDArray[Any]) -> None:
    """Raise UsageError unless these are a vector of float16, float32 or float64."""
    if values.ndim != 1 or values.dtype not in (np.float16, np.float32, np.float64):
        raise UsageError(
            f"values of {values.dtype} and shape {values.shape} have no rounded format; "
            "give a vector of float16, float32 or float64, or send them as given"
        )


def _check_format(wire: str) -> None:
    if wire not in WIRE_DTYPES:
        raise UsageError(f"no format {wire!r} on the wire; choose one of {', '.join(WIRE_DTYPES)}")


def _rounded_to_odd(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """float32 whose lowest bit remembers that something was cut off, so that rounding again is rounding once.

    Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd",
    2008: safe where the second format is at least two bits narrower.
    """
    single = values.astype(np.float32)
    inexact = (single.astype(np.float64) != values) & ~np.isnan(values)
    bits = single.view(np.uint32)
    bits -= (inexact & (np.abs(single.astype(np.float64)) > np.abs(values))).astype(np.uint32)
    bits |= inexact.astype(np.uint32)
    return single


@compiled
def _upper_halves(bits: NDArray[np.uint32], upper: NDArray[np.uint16]) -> None:
    """Round the bits of float32 to their upper halves; carries run into the exponent, up to infinity."""
    for place in range(len(bits)):
        word = bits[place]
        if (word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
            # A NaN whose payload lies in the lower half would turn into infinity.
            upper[place] = (word >> np.uint32(16)) | np.uint32(0x40)
        else:
            tie = (word >> np.uint32(16)) & np.uint32(1)
            upper[place] = (word + np.uint32(0x7FFF) + tie) >> np.uint32(16)
