"""Values as whole numbers of 8 or 16 bits times a scale per block, rounded at random so that the mean is right.

y = x / scale becomes floor(y) + 1 with probability y - floor(y), else floor(y): the expected value is y, so errors
of many steps and ranks cancel instead of adding up (Alistarh et al., "QSGD", 2017, section 3.1; Gupta et al.,
"Deep learning with limited numerical precision", 2015). The random number of a value is a hash of seed, step,
stream and position; there is no other state, so the same call gives the same bytes in any order on any machine.

A scale is max |x| of its block over 127 or 32767, rounded up to so few bits that a code times its scale is exact in
float32: what is decoded has no rounding of its own that could bend the mean.

Codes of several ranks can be added as whole numbers, in any order: where all take the scales of the largest magnitudes
among them, and each only its share of the codes, no sum overflows, and it is as exact in float32 as one code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.compiled import Word, compiled
from collectives.wire.value_formats import check_floats
from topoplan.errors import UsageError

LARGEST = 2.0**127
"""Beyond it a value that is rounded up might not be finite in float32."""

CODE_DTYPES: dict[int, np.dtype[Any]] = {8: np.dtype(np.int8), 16: np.dtype(np.int16)}
"""dtype of the whole numbers, by their bits."""


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """Values as whole numbers times one scale per block.

    Attributes
    ----------
    codes : ndarray of int8 or int16, shape (k,)
        In -127 to 127 or -32767 to 32767.
    scales : ndarray of float32, shape (ceil(k / block),)
        0 where a block is all zero.
    block : int
        Values per scale; the last block may be shorter.
    """

    codes: NDArray[Any]
    scales: NDArray[np.float32]
    block: int


def to_fixed_point(
    values: NDArray[Any],
    *,
    bits: int,
    seed: int,
    step: int = 0,
    stream: int = 0,
    block: int = 256,
    ranks: int = 1,
    largest: NDArray[np.float32] | None = None,
) -> FixedPoint:
    """Round values at random to multiples of their block's scale; the expected value of each is itself.

    Parameters
    ----------
    values : ndarray of float16, float32 or float64, shape (k,)
        Finite, at most 2^127 in magnitude.
    bits : int
        8 or 16. The error of a value is below the block's largest magnitude over 126 or 32639, or where that quotient
        is subnormal in float32 below the largest over 127 or 32767, plus 2^-149.
    seed, step, stream : int
        What the random numbers depend on besides the position, each from 0 to 2^64 - 1. Give every step its number,
        and every rank its own stream, so that their errors are independent.
    block : int
        Values per scale; a scale takes 4 bytes.
    ranks : int
        How many ranks' codes are to be added: the codes of one are at most 127 or 32767 over that, rounded down, and
        the error of a value grows as that bound shrinks.
    largest : ndarray of float32, shape (ceil(k / block),), optional
        Of every block the largest magnitude on all these ranks (`largest_magnitudes`); by default that of the values.

    Raises
    ------
    UsageError
        NaN, infinite or too large values, no vector of floats, other bits, or numbers out of range; more ranks than
        there are codes, or a value beyond the largest.

    Examples
    --------
    >>> import numpy as np
    >>> fixed = to_fixed_point(np.float32([127, 0.25, -3, 0]), bits=8, seed=7)
    >>> fixed.codes, fixed.scales
    (array([127,   1,  -3,   0], dtype=int8), array([1.], dtype=float32))
    >>> quarter = [to_fixed_point(np.float32([127, 0.25]), bits=8, seed=7, step=s).codes[1] for s in range(1000)]
    >>> 0.22 < np.mean(quarter) < 0.28
    np.True_
    """
    check_floats(values)
    if bits not in CODE_DTYPES or block < 1:
        raise UsageError(
            f"fixed point of {bits} bits in blocks of {block}; choose 8 or 16 bits and at least 1 value"
        )
    levels = code_levels(bits, ranks)
    key = random_key(seed, step, stream)
    # Machine code knows no float16; every float16 is a float32.
    given = np.ascontiguousarray(values, dtype=np.float32 if values.dtype == np.float16 else values.dtype)
    codes = np.empty(len(given), dtype=CODE_DTYPES[bits])
    scales = np.empty(-(-len(given) // block), dtype=np.float32)
    agreed = largest is not None
    if largest is None:
        largest = np.zeros(0, dtype=np.float32)
    elif largest.shape != scales.shape or largest.dtype != np.float32:
        raise UsageError(
            f"largest magnitudes of {largest.dtype} and shape {largest.shape} for {len(scales)} blocks; "
            "give a float32 for each"
        )
    wrong = _round_blocks(given, block, levels, 25 - bits, np.uint64(key), largest, codes, scales)
    if wrong >= 0 and agreed and abs(float(values[wrong])) <= LARGEST:
        raise UsageError(
            f"value {values[wrong]} at position {wrong} is beyond the largest magnitude that ranks have agreed on"
        )
    if wrong >= 0:
        raise UsageError(
            f"value {values[wrong]} at position {wrong} has no fixed-point form; "
            "NaN, infinite and values beyond 2^127 travel as given"
        )
    return FixedPoint(codes, scales, block)


def code_levels(bits: int, ranks: int = 1) -> int:
    """The largest code of one rank where those of so many are added: their sum fits into the bits.

    Raises
    ------
    UsageError
        There is none.

    Examples
    --------
    >>> code_levels(8), code_levels(8, ranks=4), code_levels(16, ranks=128)
    (127, 31, 255)
    """
    most: int = (1 << (bits - 1)) - 1
    if not 1 <= ranks <= most:
        raise UsageError(
            f"codes of {bits} bits cannot be added over {ranks} ranks, at most over {most}; take more bits"
        )
    return most // ranks


def largest_magnitudes(values: NDArray[Any], block: int = 256) -> NDArray[np.float32]:
    """Of every block the largest magnitude, not rounded down; NaN where one is, so that a maximum over ranks tells.

    Parameters
    ----------
    values : ndarray of float16, float32 or float64, shape (k,)
    block : int

    Returns
    -------
    ndarray of float32, shape (ceil(k / block),)

    Examples
    --------
    >>> import numpy as np
    >>> largest_magnitudes(np.float32([1, -4, 0, 2, 3]), block=2)
    array([4., 2., 3.], dtype=float32)
    """
    check_floats(values)
    if not len(values):
        return np.zeros(0, dtype=np.float32)
    exact = np.maximum.reduceat(np.abs(values), np.arange(0, len(values), block))
    with np.errstate(over="ignore"):
        rounded = exact.astype(np.float32)
    return np.where(rounded < exact, np.nextafter(rounded, np.float32(np.inf)), rounded)


def from_fixed_point(fixed: FixedPoint) -> NDArray[np.float32]:
    """Codes times scales; exact in float32.

    Returns
    -------
    ndarray of float32, shape (k,)

    Examples
    --------
    >>> import numpy as np
    >>> from_fixed_point(FixedPoint(np.int8([4, -8, 3]), np.float32([0.5, 2]), block=2))
    array([ 2., -4.,  6.], dtype=float32)
    """
    values = np.empty(len(fixed.codes), dtype=np.float32)
    _scale_blocks(fixed.codes, fixed.scales, fixed.block, values)
    return values


@compiled
def round_at_random(value: float, uniform: float) -> int:
    """The whole number above `value` if `uniform`, in [0, 1), lies below its fraction, else the one below.

    Over uniform numbers the mean is `value`: floor(y) + P(u < y - floor(y)) = y.

    Examples
    --------
    >>> [round_at_random(-1.25, uniform) for uniform in (0, 0.25, 0.5, 0.75)]  # -5/4 on average
    [-1, -1, -1, -2]
    """
    below = math.floor(value)
    return int(below) + int(uniform < value - below)


@compiled
def uniform_at(key: Word, position: Word) -> float:
    """The random number in [0, 1), a multiple of 2^-53, of one position (Steele et al., SplitMix, 2014)."""
    return float(
        _mixed(np.uint64(key) + np.uint64(position) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(11)
    ) * (1.0 / 9007199254740992.0)


def random_key(seed: int, step: int, stream: int) -> int:
    """One number of 64 bits from three, mixed in between so that seed 1 step 2 is not seed 2 step 1.

    Raises
    ------
    UsageError
        A number is not in 0 to 2^64 - 1.

    Examples
    --------
    >>> random_key(0, 0, 0) == random_key(0, 0, 0) != random_key(0, 1, 0)
    True
    """
    key = 0
    for name, number in (("seed", seed), ("step", step), ("stream", stream)):
        if not 0 <= number < 1 << 64:
            raise UsageError(f"{name} {number} is out of range; choose 0 to 2^64 - 1")
        key = int(_mixed(np.uint64((key + number + 0x9E3779B97F4A7C15) % (1 << 64))))
    return key


@compiled
def _mixed(bits: Word) -> Word:
    """The finaliser of SplitMix64: one to one, and every bit depends on every bit."""
    mixed = np.uint64(bits)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@compiled
def _round_blocks(
    values: NDArray[Any],
    block: int,
    levels: int,
    scale_bits: int,
    key: Word,
    agreed: NDArray[np.float32],
    codes: NDArray[Any],
    scales: NDArray[np.float32],
) -> int:
    """Fill codes and scales; the position of the first value that has no code, or -1.

    The largest magnitudes of the blocks are those agreed on, where there are any.
    """
    for number in range(len(scales)):
        start, stop = number * block, min((number + 1) * block, len(values))
        largest = 0.0
        for position in range(start, stop):
            magnitude = abs(float(values[position]))
            if not magnitude <= LARGEST or (len(agreed) > 0 and magnitude > agreed[number]):
                return position
            largest = max(largest, magnitude)
        if len(agreed) > 0:
            largest = float(agreed[number])
        scale = _scale_of(largest, levels, scale_bits)
        scales[number] = scale
        if scale == 0.0:
            codes[start:stop] = 0
            continue
        for position in range(start, stop):
            codes[position] = round_at_random(float(values[position]) / scale, uniform_at(key, position))
    return -1


@compiled
def _scale_of(largest: float, levels: int, scale_bits: int) -> float:
    """`largest` / `levels`, rounded up to `scale_bits` significant bits of a float32, subnormal ones included.

    Never below the exact quotient, so no code exceeds the levels: the division rounds down to a number of so few bits
    only from where `largest` is `levels` times that number, because neighbours of that product lie further apart.
    """
    if largest == 0.0:
        return 0.0
    step = largest / levels
    exponent = max(math.frexp(step)[1] - scale_bits, -149)
    # A float64 so small that the division gives 0 is not 0, and keeps its chance of being rounded up.
    return max(math.ldexp(math.ceil(math.ldexp(step, -exponent)), exponent), 2.0**-149)


@compiled
def _scale_blocks(
    codes: NDArray[Any], scales: NDArray[np.float32], block: int, values: NDArray[np.float32]
) -> None:
    for number in range(len(scales)):
        scale = scales[number]
        for position in range(number * block, min((number + 1) * block, len(codes))):
            values[position] = np.float32(codes[position]) * scale
