"""Values to and from the bytes of their section, in each format that a sparse message knows.

As given: the array itself. Rounded formats: the narrower array. Fixed point: all scales (float32), then all codes; the
scale of a block with a value that is not finite is NaN, and so are all its values when they are read.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from collectives.wire.fixed_point import CODE_DTYPES, FixedPoint, from_fixed_point, to_fixed_point
from collectives.wire.message import as_bytes, corrupt
from collectives.wire.value_formats import WIRE_DTYPES, FloatFormat, narrow, widen
from topoplan.errors import UsageError

ValueFormat = Literal["as given", "float32", "float16", "bfloat16", "fixed8", "fixed16"]

VALUE_FORMATS: tuple[ValueFormat, ...] = ("as given", "float32", "float16", "bfloat16", "fixed8", "fixed16")
"""Their places are their numbers in a header."""

VALUE_DTYPES: tuple[np.dtype[Any], ...] = (
    *(np.dtype(f"float{bits}") for bits in (16, 32, 64)),
    *(np.dtype(f"complex{bits}") for bits in (64, 128)),
    *(np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)),
    *(np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)),
)
"""dtypes that can be given; their places are their numbers in a header."""

FIXED_BITS = {"fixed8": 8, "fixed16": 16}
"""Bits of a code, by format."""

_KEPT_BY = {"float32": ("float16", "float32"), "float16": ("float16",)}


def keeps(form: ValueFormat, dtype: np.dtype[Any]) -> bool:
    """Whether every value of the dtype comes back as it was.

    Infinities do, and NaN as NaN; where a format is wider than the dtype, a signalling NaN comes back quiet.

    Examples
    --------
    >>> import numpy as np
    >>> keeps("float32", np.dtype(np.float16)), keeps("float16", np.dtype(np.float32))
    (True, False)
    """
    return form == "as given" or dtype.name in _KEPT_BY.get(form, ())


def section_bytes(form: ValueFormat, dtype: np.dtype[Any], count: int, block: int) -> int:
    """Bytes of the section; they depend on the count only.

    Examples
    --------
    >>> import numpy as np
    >>> section_bytes("fixed8", np.dtype(np.float32), 1000, 256)
    1016
    """
    if form in FIXED_BITS:
        return count * FIXED_BITS[form] // 8 + 4 * -(-count // block)
    return count * (dtype if form == "as given" else WIRE_DTYPES[form]).itemsize


def check_given(form: ValueFormat, dtype: np.dtype[Any]) -> None:
    """Raise UsageError unless values of this dtype can travel in this format."""
    if dtype not in VALUE_DTYPES:
        raise UsageError(
            f"values of {dtype} cannot be sent; bfloat16 travels as uint16 bits, others as numbers"
        )
    if form != "as given" and dtype.kind != "f":
        raise UsageError(f"values of {dtype} have no {form} form; send them as given")


def values_to_section(
    form: ValueFormat, values: NDArray[Any], *, seed: int, step: int, stream: int, block: int
) -> NDArray[np.uint8]:
    """The bytes of these values."""
    check_given(form, values.dtype)
    if form == "as given":
        return as_bytes(values)
    if form in FIXED_BITS:
        finite = np.isfinite(values)
        fixed = to_fixed_point(
            np.where(finite, values, values.dtype.type(0)),
            bits=FIXED_BITS[form],
            seed=seed,
            step=step,
            stream=stream,
            block=block,
        )
        fixed.scales[np.flatnonzero(~finite) // block] = np.nan
        return np.concatenate([as_bytes(fixed.scales), as_bytes(fixed.codes)])
    return as_bytes(narrow(values, cast(FloatFormat, form)))


def values_from_section(
    form: ValueFormat, section: NDArray[np.uint8], dtype: np.dtype[Any], count: int, block: int
) -> NDArray[Any]:
    """The values of a section, in the dtype that was given.

    Raises
    ------
    UsageError
        The section does not have the length that the count asks for.
    """
    if len(section) != section_bytes(form, dtype, count, block):
        raise corrupt(f"{count} values of {dtype} as {form} do not take {len(section)} bytes")
    if form == "as given":
        return _from_bytes(section, dtype)
    if form in FIXED_BITS:
        scales = _from_bytes(section[: 4 * -(-count // block)], np.dtype(np.float32))
        codes = _from_bytes(section[scales.nbytes :], CODE_DTYPES[FIXED_BITS[form]])
        with np.errstate(over="ignore", under="ignore"):
            return from_fixed_point(FixedPoint(codes, scales, block)).astype(dtype, copy=False)
    return widen(_from_bytes(section, WIRE_DTYPES[form]), cast(FloatFormat, form), dtype)


def _from_bytes(section: NDArray[np.uint8], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A vector of its own, aligned and in the machine's byte order."""
    return np.frombuffer(section.tobytes(), dtype=dtype.newbyteorder("<")).astype(dtype, copy=True)
