"""Golomb codes of the gaps between ascending indices, block by block, as machine code.

A gap g is written as g // m in unary (that many zeros and a one) and g % m in truncated binary, with m near
ln 2 times the mean gap: within 0.03 bits of the entropy of a random set (Golomb, "Run-length encodings", 1966;
Gallager and Van Voorhis, 1975). Two things keep sets decent that are not random: every block of 1024 gaps names
its own m, in steps of a quarter octave, and a quotient of 16 or more is written in Elias gamma behind
16 zeros, so that one wide gap among narrow ones costs little.

Bits fill 64-bit words from the lowest up. A block is read by one chain of dependent shifts, about 20 cycles per index.
"""

from __future__ import annotations

from math import isqrt

import numpy as np
from numpy.typing import NDArray

from collectives.compiled import Word, compiled, leading_zeros, trailing_zeros

BLOCK = 1024
"""Gaps that share one modulus: the byte that names it costs 0.008 bits per gap."""

ESCAPE = 16
"""Quotients from here on are written in Elias gamma instead of unary."""

GUARD_WORDS = 8
"""Words behind the payload that a decoder of corrupt bits may touch before it notices."""

WIDEST_UNIVERSE = 1 << 48
"""Up to here a short code fits one word: 15 zeros, a one, and 48 bits."""

GOOD, PAST_THE_END, UNKNOWN_MODULUS, OUT_OF_UNIVERSE, LEFT_OVER = range(5)
"""What `decode_blocks` found."""

MODULI = np.array([0] + [isqrt(isqrt(1 << step)) for step in range(191)], dtype=np.int64)
"""Modulus by its name in a block: 2^((name - 1) / 4) rounded down; 0 stands for the modulus of the whole set."""

_GAMMA_HALVES = np.array(
    [0] + [min(3 * 2 ** (above - 1) - 1, 2 * ESCAPE + 4 * (above - 1)) for above in range(1, 64)],
    dtype=np.int64,
)
"""Twice the bits that a quotient costs on average, by how many bits the gap is longer than the remainder."""


def modulus_of(count: int, universe: int) -> int:
    """The Golomb modulus of `count` random indices below `universe`: ln 2 times the mean distance, at least 1.

    In whole numbers, so that every machine finds the same.

    Examples
    --------
    >>> modulus_of(10, 1000), modulus_of(10, 10)
    (69, 1)
    """
    return max(1, 45426 * int(universe) // (65536 * max(int(count), 1)))


def bits_at_most(count: int, universe: int) -> int:
    """The bits that no set of `count` indices below `universe` exceeds.

    All gaps together are at most ``universe - count``, so with the modulus m of the whole set the quotients add up
    to at most Q = (universe - count) // m, and gamma is longer than unary by one bit at most, from quotient 17 on. A
    block chooses another modulus only where that is shorter.

    Examples
    --------
    >>> bits_at_most(1000, 100_000) / 1000  # names of blocks, unary ends, remainders, quotients
    9.526
    """
    count, universe = int(count), int(universe)
    if not count:
        return 0
    modulus = modulus_of(count, universe)
    remainder = (modulus - 1).bit_length()
    quotients = (universe - count) // modulus
    return -(-count // BLOCK) * 8 + count * (1 + remainder) + quotients + quotients // (ESCAPE + 1)


@compiled
def encode_blocks(
    indices: NDArray[np.int32] | NDArray[np.int64],
    universe: int,
    set_modulus: int,
    moduli: NDArray[np.int64],
    words: NDArray[np.uint64],
) -> int:
    """Write all blocks into `words`, which are zero; the bits written, or -1 - p if index p is out of order."""
    gaps = np.empty(BLOCK, np.int64)
    count = len(indices)
    position = 0
    previous = np.int64(-1)
    for start in range(0, count, BLOCK):
        length = min(BLOCK, count - start)
        total = np.int64(0)
        for place in range(length):
            index = np.int64(indices[start + place])
            gap = index - previous - 1
            if gap < 0 or index >= universe:
                return -1 - (start + place)
            gaps[place] = gap
            total += gap
            previous = index
        name = _best_modulus(gaps, length, total, set_modulus, moduli)
        _put(words, position, np.uint64(name), 8)
        modulus = set_modulus if name == 0 else moduli[name]
        position = _encode_gaps(gaps, length, modulus, words, position + 8)
    return position


@compiled
def decode_blocks(
    words: NDArray[np.uint64],
    limit: int,
    universe: int,
    set_modulus: int,
    moduli: NDArray[np.int64],
    indices: NDArray[np.int32] | NDArray[np.int64],
) -> int:
    """Fill `indices` from the first `limit` bits of `words`, behind which lie `GUARD_WORDS`; how it went."""
    count = len(indices)
    position = 0
    index = np.int64(-1)
    for start in range(0, count, BLOCK):
        if position + 8 > limit:
            return PAST_THE_END
        name = np.int64(_window(words, position) & np.uint64(255))
        position += 8
        if name >= len(moduli):
            return UNKNOWN_MODULUS
        modulus = set_modulus if name == 0 else moduli[name]
        floor = 63 - leading_zeros(modulus)
        short = (np.int64(2) << floor) - modulus
        mask = (np.uint64(1) << np.uint64(floor)) - np.uint64(1)
        for place in range(start, min(start + BLOCK, count)):
            window = _window(words, position)
            quotient = trailing_zeros(window)
            if quotient >= ESCAPE:
                position += ESCAPE
                width = trailing_zeros(_window(words, position))
                if width > 48:
                    return OUT_OF_UNIVERSE
                position += width + 1
                tail = _window(words, position) & ((np.uint64(1) << np.uint64(width)) - np.uint64(1))
                quotient = ESCAPE - 1 + (np.int64(1) << width) + np.int64(tail)
                if quotient > universe // modulus:
                    return OUT_OF_UNIVERSE
                position += width
                window = _window(words, position)
            else:
                window >>= np.uint64(quotient + 1)
                position += quotient + 1
            remainder = np.int64(window & mask)
            longer = np.int64(remainder >= short)
            last = np.int64(window >> np.uint64(floor)) & longer
            remainder += longer * (remainder - short) + last
            position += floor + longer
            index += quotient * modulus + remainder + 1
            if position > limit:
                return PAST_THE_END
            if index >= universe:
                return OUT_OF_UNIVERSE
            indices[place] = index
    if limit - position >= 64 or (limit > position and _window(words, position) != 0):
        return LEFT_OVER
    return GOOD


@compiled
def first_out_of_order(indices: NDArray[np.int32] | NDArray[np.int64], universe: int) -> int:
    """Position of the first index that is not above the one before it or not in [0, universe); -1 if all are."""
    previous = np.int64(-1)
    for place in range(len(indices)):
        index = np.int64(indices[place])
        if index <= previous or index >= universe:
            return place
        previous = index
    return -1


@compiled
def _best_modulus(
    gaps: NDArray[np.int64], length: int, total: Word, set_modulus: int, moduli: NDArray[np.int64]
) -> int:
    """Name of the shortest of three: the set's modulus, that of the block's mean, that of its histogram."""
    best = 0
    bits = _bits_of(gaps, length, set_modulus)
    # 2839 / 4096 is ln 2.
    of_mean: Word = max(1, np.searchsorted(moduli, ((total * 2839) >> 12) // length + 1))
    of_histogram = 1 + 4 * _best_power(gaps, length)
    for name in (of_mean, of_histogram):
        if name >= len(moduli):
            continue
        candidate = _bits_of(gaps, length, moduli[name])
        if candidate < bits:
            best, bits = name, candidate
    return best


@compiled
def _best_power(gaps: NDArray[np.int64], length: int) -> int:
    """The power of two that codes gaps of these bit lengths shortest, as far as their lengths tell."""
    lengths = np.zeros(64, np.int64)
    longest: Word = 0
    for place in range(length):
        bits = 64 - leading_zeros(gaps[place])
        lengths[bits] += 1
        longest = max(longest, bits)
    best = 0
    least: Word = np.int64(1) << 62
    for power in range(longest + 1):
        cost = 2 * length * power
        for bits in range(power + 1, longest + 1):
            cost += lengths[bits] * _GAMMA_HALVES[bits - power]
        if cost < least:
            best, least = power, cost
    return best


@compiled
def _bits_of(gaps: NDArray[np.int64], length: int, modulus: Word) -> Word:
    """Bits of these gaps under this modulus, without the name."""
    floor = 63 - leading_zeros(modulus)
    short = (np.int64(2) << floor) - modulus
    inverse = 1.0 / modulus
    bits = length * (floor + 1)
    for place in range(length):
        quotient, remainder = _divide(gaps[place], modulus, inverse)
        if quotient < ESCAPE:
            bits += quotient
        else:
            bits += ESCAPE + 2 * (63 - leading_zeros(quotient - ESCAPE + 1))
        bits += np.int64(remainder >= short)
    return bits


@compiled
def _encode_gaps(
    gaps: NDArray[np.int64], length: int, modulus: Word, words: NDArray[np.uint64], position: int
) -> int:
    """Write these gaps from bit `position` on; the position behind them."""
    floor = 63 - leading_zeros(modulus)
    short = (np.int64(2) << floor) - modulus
    inverse = 1.0 / modulus
    for place in range(length):
        quotient, remainder = _divide(gaps[place], modulus, inverse)
        longer = np.int64(remainder >= short)
        # The longer codes x + short follow the shorter ones; their lowest bit comes last.
        code = longer * short + remainder
        tail = np.uint64((code >> longer) | ((code & longer) << floor))
        if quotient < ESCAPE:
            bits = (np.uint64(1) | (tail << np.uint64(1))) << np.uint64(quotient)
            _put(words, position, bits, quotient + 1 + floor + longer)
            position += quotient + 1 + floor + longer
        else:
            rest = quotient - ESCAPE + 1
            width = 63 - leading_zeros(rest)
            position += ESCAPE + width
            _put(words, position, np.uint64(1), 1)
            _put(words, position + 1, np.uint64(rest - (np.int64(1) << width)), width)
            _put(words, position + 1 + width, tail, floor + longer)
            position += 1 + width + floor + longer
    return position


@compiled
def _divide(gap: Word, modulus: Word, inverse: float) -> tuple[Word, Word]:
    """Quotient and remainder; a gap below 2^48 times a rounded inverse is off by one at most."""
    quotient = np.int64(gap * inverse)
    remainder = gap - quotient * modulus
    below = np.int64(remainder < 0)
    above = np.int64(remainder >= modulus)
    return quotient + above - below, remainder + (below - above) * modulus


@compiled
def _put(words: NDArray[np.uint64], position: Word, bits: Word, width: Word) -> None:
    """Write `bits`, of which none lies at or above `width`, at a position that is still zero."""
    word, shift = position >> 6, np.uint64(position & 63)
    words[word] |= np.uint64(bits) << shift
    if np.int64(shift) + width > 64:
        words[word + 1] = np.uint64(bits) >> (np.uint64(64) - shift)


@compiled
def _window(words: NDArray[np.uint64], position: Word) -> Word:
    """The 64 bits from `position` on."""
    word, shift = position >> 6, np.uint64(position & 63)
    # Two shifts, since one by 64 is undefined where the position is a multiple of 64.
    return (words[word] >> shift) | ((words[word + 1] << np.uint64(1)) << (np.uint64(63) - shift))
