"""What kernels that join, divide and copy are given, and what they must make of it, in plain numpy.

bfloat16 is its bits in uint16, as in `selection_data`: numpy has none of its own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.tables.numpy_arrays import divide, reduction

Array = NDArray[Any]

WHOLE = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = ["float16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
CASES = (
    [(dtype, op) for dtype in WHOLE + FLOATS for op in ("sum", "prod", "min", "max")]
    + [(dtype, op) for dtype in COMPLEX for op in ("sum", "prod")]
    + [("bool", "min"), ("bool", "max")]
)
"""Joins that numpy has."""

EVERY_CASE = [*CASES, *(("bfloat16", op) for op in ("sum", "prod", "min", "max"))]


def bits_type(dtype: str) -> np.dtype[Any]:
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


def special(dtype: str, count: int, generator: np.random.Generator) -> Array:
    """Values of all magnitudes, the ends of the range, zeros of both signs, infinities, NaN."""
    if dtype == "bfloat16":
        return narrowed(special("float32", count, generator))
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return generator.integers(0, 2, count).astype(np.bool_)
    if kind.kind in "iu":
        ends = np.iinfo(kind)
        values = generator.integers(ends.min, ends.max, count, dtype=kind, endpoint=True)
        values[generator.random(count) < 0.2] = ends.max
        values[generator.random(count) < 0.2] = ends.min
        return values
    if kind.kind == "c":
        part = "float32" if dtype == "complex64" else "float64"
        values = np.empty(count, dtype=kind)
        values.real, values.imag = (special(part, count, generator) for _ in range(2))
        return values
    ends = np.finfo(kind)
    values = (generator.standard_normal(count) * np.exp2(generator.integers(-12, 12, count))).astype(kind)
    for odd in (0.0, -0.0, np.inf, -np.inf, np.nan, ends.max, ends.smallest_subnormal, ends.smallest_normal):
        values[generator.random(count) < 0.02] = odd
    return values


def joined(dtype: str, op: str, own: Array, arriving: list[Array]) -> Array:
    """Own values joined with what arrives, one array after the other, each time rounded."""
    total = own.copy()
    with np.errstate(all="ignore"):
        for array in arriving:
            if dtype == "bfloat16":
                wide = reduction(op, np.dtype(np.float32))(widened(total), widened(array))
                total = narrowed(wide)
            else:
                reduction(op, total.dtype)(total, array, out=total)
    return total


def averaged(dtype: str, total: Array, ranks: int) -> Array:
    with np.errstate(all="ignore"):
        if dtype == "bfloat16":
            return narrowed(widened(total) / widened(narrowed(np.array([ranks], np.float32))))
        found = total.copy()
        divide(found, ranks)
        return found


def widened(bits: Array) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrowed(wide: NDArray[np.float32]) -> NDArray[np.uint16]:
    """float32 rounded to the nearest bfloat16, to the even one of two; NaN stays NaN."""
    bits = wide.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(wide), bits >> 16 | 0x40, rounded).astype(np.uint16)


def same_bits(found: Array, expected: Array, dtype: str = "") -> bool:
    """Equal bit for bit; of NaN only that both are one."""
    if dtype == "bfloat16":
        found, expected = widened(found), widened(expected)
    if found.dtype.kind == "c":
        parts = f"float{found.dtype.itemsize * 4}"
        found, expected = found.view(parts), expected.view(parts)
    if found.dtype.kind != "f":
        return found.tobytes() == expected.tobytes()
    nan = np.isnan(expected)
    return np.array_equal(nan, np.isnan(found)) and found[~nan].tobytes() == expected[~nan].tobytes()


@cache
def numpy_fuses() -> bool:
    """Whether numpy multiplies complex numbers with fused multiply-adds, as it does where the processor has them."""
    generator = np.random.default_rng(1)
    a, b = (generator.standard_normal(64).astype(np.float32).view(np.complex64) for _ in range(2))
    plain = a.real * b.real - a.imag * b.imag
    return not np.array_equal((a * b).real, plain)
