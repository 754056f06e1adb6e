"""Data to select from, and what a selection must give, in plain numpy; bfloat16 is its bits in uint16."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

DTYPES = ("bfloat16", "float16", "float32", "float64")

Array = NDArray[Any]
Entries = tuple[Array, Array]


def _layered(generator: np.random.Generator, count: int) -> Array:
    return generator.standard_normal(count) * np.exp2(-8.0 * (np.arange(count) * 4 // count))


def _outlier(generator: np.random.Generator, count: int) -> Array:
    values = generator.standard_normal(count)
    values[count // 2] = 1e12
    return values


def _special(generator: np.random.Generator, count: int) -> Array:
    odd = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-310, 1e-40, 6e-8, 1.0]
    return np.where(
        generator.random(count) < 0.3, generator.choice(odd, count), generator.standard_normal(count)
    )


DATA = {
    "normal": lambda generator, count: generator.standard_normal(count),
    "lognormal": lambda generator, count: generator.lognormal(0, 5, count) * generator.choice([-1, 1], count),
    "layered": _layered,
    "outlier": _outlier,
    "special": _special,
    "denormal": lambda generator, count: generator.standard_normal(count) * 1e-39,
    "mostly zeros": lambda generator, count: (
        generator.standard_normal(count) * (generator.random(count) < 0.01)
    ),
    "few values": lambda generator, count: generator.integers(-2, 3, count).astype(float),
    "equal": lambda generator, count: np.full(count, -3.0),
    "zeros": lambda generator, count: np.zeros(count),
    "any bits": lambda generator, count: generator.integers(0, 2**64, count, dtype=np.uint64).view(
        np.float64
    ),
}
"""How the values of each kind are drawn."""


def drawn(kind: str, dtype: str, count: int, generator: np.random.Generator) -> Array:
    with np.errstate(all="ignore"):
        values: Array = DATA[kind](generator, count)
        if dtype == "bfloat16":
            return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return values.astype(dtype)


def key_of(x: Array) -> Array:
    """Bits without the sign."""
    bits = x.view(f"u{x.itemsize}")
    return bits & np.array((1 << 8 * x.itemsize - 1) - 1, dtype=bits.dtype)


def reference(x: Array, k: int) -> Entries:
    """Indices and values of the k largest keys, the first ones of equal keys."""
    rank = np.argsort(np.iinfo(key_of(x).dtype).max - key_of(x), kind="stable")
    indices = np.sort(rank[:k]).astype(np.int32)
    return indices, x[indices]


def same(found: Entries, expected: Entries) -> bool:
    """Equal bit for bit, dtypes included."""
    return all(
        one.dtype == other.dtype and one.tobytes() == other.tobytes()
        for one, other in zip(found, expected, strict=True)
    )
