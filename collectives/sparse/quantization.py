"""Round values to narrower floats, or at random to fixed point of 8 or 16 bits with a scale per block.

Floats: float32, float16, bfloat16, to nearest, ties to even, and back without loss. bfloat16 is the upper 16 bits of a
float32, in uint16. Finite values beyond a format's largest (65504 and 3.39e38, plus half a step) become infinite (IEEE
754). NaN stays NaN (quiet); signs of zero and subnormal values are kept.

Fixed point: y = x / scale becomes floor(y) + 1 with probability y - floor(y), so the mean is right and errors of many
steps and ranks cancel (Alistarh et al., "QSGD", 2017, section 3.1; Gupta et al., "Deep learning with limited numerical
precision", 2015). The random number is a hash of seed, step, stream and position: the same call gives the same bytes.
A scale is max |x| over 127 or 32767, rounded up to so few bits that code times scale is exact in float32. Codes of
several ranks add as whole numbers in any order, without overflow, if all share scales and each has a share of codes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from collectives.tables.compiled import Word, compiled
from topoplan.errors import UsageError

FloatFormat = Literal["float32", "float16", "bfloat16"]

WIRE_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}
"""The dtype of an encoded format."""


def narrow(values: NDArray[Any], wire: FloatFormat) -> NDArray[Any]:
    """Round a vector of floats to a format, once, also from float64; bfloat16 is returned as its bits in uint16.

    Raises `UsageError` for another dtype or an unknown format.

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
    """Convert values of `narrow` to a dtype of floats; exact if that holds every value of the format.

    >>> widen(np.uint16([16256, 16257, 32640]), "bfloat16", np.dtype(np.float32))
    array([1.       , 1.0078125,       inf], dtype=float32)
    """
    _check_format(wire)
    if wire == "bfloat16":
        received = (received.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return received.astype(dtype)


def check_floats(values: NDArray[Any]) -> None:
    """Raise UsageError unless these are a vector of float16, float32 or float64."""
    if values.ndim != 1 or values.dtype not in (np.float16, np.float32, np.float64):
        raise UsageError(
            f"values of {values.dtype} and shape {values.shape} have no rounded format; "
            "give a vector of float16, float32 or float64, or send them as given"
        )


def _check_format(wire: str) -> None:
    if wire not in WIRE_DTYPES:
        raise UsageError(f"format must be one of {', '.join(WIRE_DTYPES)}, got {wire!r}")


def _rounded_to_odd(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Round to float32 with the lowest bit set if bits were cut off, so that rounding again is rounding once.

    Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd",
    2008: exact if the second format is at least two bits narrower.
    """
    single = values.astype(np.float32)
    inexact = (single.astype(np.float64) != values) & ~np.isnan(values)
    bits = single.view(np.uint32)
    bits -= (inexact & (np.abs(single.astype(np.float64)) > np.abs(values))).astype(np.uint32)
    bits |= inexact.astype(np.uint32)
    return single


@compiled
def _upper_halves(bits: NDArray[np.uint32], upper: NDArray[np.uint16]) -> None:
    """Round float32 bits to their upper halves; carries run into the exponent, up to infinity."""
    for place in range(len(bits)):
        word = bits[place]
        if (word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
            # A NaN with its payload in the lower half would become infinity.
            upper[place] = (word >> np.uint32(16)) | np.uint32(0x40)
        else:
            tie = (word >> np.uint32(16)) & np.uint32(1)
            upper[place] = (word + np.uint32(0x7FFF) + tie) >> np.uint32(16)


LARGEST = 2.0**127  # above it, a value that is rounded up might not be finite in float32

CODE_DTYPES: dict[int, np.dtype[Any]] = {8: np.dtype(np.int8), 16: np.dtype(np.int16)}
"""dtype of the codes, by their bits."""


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """Values as integer codes times one scale per block.

    `codes` are int8 in -127 to 127 or int16 in -32767 to 32767, shape (k,). `scales` are float32, shape (ceil(k /
    block),), 0 for a block of zeros. The last block may be shorter.
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
    """Round (k,) floats at random to multiples of their block's scale; the expected value of each is itself.

    The values are finite, at most 2^127 in magnitude. With `bits` 8 or 16 the error of a value is below the block's
    largest magnitude over 126 or 32639, or if that quotient is subnormal in float32 below the largest over 127 or
    32767, plus 2^-149. The random numbers depend on `seed`, `step`, `stream` (each from 0 to 2^64 - 1) and the
    position: errors of steps and ranks are independent if every step has its number and every rank its stream. `block`
    is in values per scale of 4 bytes. If the codes of several `ranks` are added, those of one are at most 127 or 32767
    over their number, rounded down, and the error of a value grows as that bound shrinks. `largest` has the largest
    magnitude of every block on all these ranks as float32 (`largest_magnitudes`), by default that of the values.
    Raises `UsageError` for anything else, for more ranks than codes, and for a value above the largest.

    >>> fixed = to_fixed_point(np.float32([127, 0.25, -3, 0]), bits=8, seed=7)
    >>> fixed.codes, fixed.scales
    (array([127,   1,  -3,   0], dtype=int8), array([1.], dtype=float32))
    >>> quarter = [to_fixed_point(np.float32([127, 0.25]), bits=8, seed=7, step=s).codes[1] for s in range(1000)]
    >>> 0.22 < np.mean(quarter) < 0.28
    np.True_
    """
    check_floats(values)
    if bits not in CODE_DTYPES or block < 1:
        raise UsageError(f"bits must be 8 or 16 and block at least 1, got {bits} and {block}")
    levels = code_levels(bits, ranks)
    key = random_key(seed, step, stream)
    # The compiled loop has no float16; every float16 is a float32.
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
            "send NaN, infinite and values beyond 2^127 as given"
        )
    return FixedPoint(codes, scales, block)


def code_levels(bits: int, ranks: int = 1) -> int:
    """Return the largest code of one rank such that the sum over all ranks fits into the bits; UsageError without one.

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
    """Return the largest magnitude of every block as float32, not rounded down; NaN if the block has one.

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
    """Return codes times scales, exact in float32.

    >>> from_fixed_point(FixedPoint(np.int8([4, -8, 3]), np.float32([0.5, 2]), block=2))
    array([ 2., -4.,  6.], dtype=float32)
    """
    values = np.empty(len(fixed.codes), dtype=np.float32)
    _scale_blocks(fixed.codes, fixed.scales, fixed.block, values)
    return values


@compiled
def round_at_random(value: float, uniform: float) -> int:
    """Return the integer above `value` if `uniform`, in [0, 1), is below its fraction, else the one below.

    Over uniform numbers the mean is `value`: floor(y) + P(u < y - floor(y)) = y.

    >>> [round_at_random(-1.25, uniform) for uniform in (0, 0.25, 0.5, 0.75)]  # -5/4 on average
    [-1, -1, -1, -2]
    """
    below = math.floor(value)
    return int(below) + int(uniform < value - below)


@compiled
def uniform_at(key: Word, position: Word) -> float:
    """Return the random number of a position: a multiple of 2^-53 in [0, 1) (Steele et al., SplitMix, 2014)."""
    return float(
        _mixed(np.uint64(key) + np.uint64(position) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(11)
    ) * (1.0 / 9007199254740992.0)


def random_key(seed: int, step: int, stream: int) -> int:
    """Return one number of 64 bits from three, mixed so that seed 1 step 2 differs from seed 2 step 1.

    Raises `UsageError` for a number outside 0 to 2^64 - 1.

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
    """Fill codes and scales; return the position of the first value without a code, or -1.

    `agreed` are the largest magnitudes of the blocks; if it is empty, they are those of the values.
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
    """Return `largest` / `levels`, rounded up to `scale_bits` significant bits of a float32, subnormal ones included.

    Never below the exact quotient, so no code exceeds the levels: the division rounds down to a number of so few bits
    only from where `largest` is `levels` times that number, because neighbours of that product lie further apart.
    """
    if largest == 0.0:
        return 0.0
    step = largest / levels
    exponent = max(math.frexp(step)[1] - scale_bits, -149)
    # A float64 so small that the division gives 0 is not 0, and keeps its probability of being rounded up.
    return max(math.ldexp(math.ceil(math.ldexp(step, -exponent)), exponent), 2.0**-149)


@compiled
def _scale_blocks(
    codes: NDArray[Any], scales: NDArray[np.float32], block: int, values: NDArray[np.float32]
) -> None:
    for number in range(len(scales)):
        scale = scales[number]
        for position in range(number * block, min((number + 1) * block, len(codes))):
            values[position] = np.float32(codes[position]) * scale
