"""Pack ascending indices to about log2(1/density) + 1.5 bits each, by Golomb codes of their gaps.

A gap g is g // m in unary (zeros and a one) and g % m in truncated binary, m near ln 2 times the mean gap: within 0.03
bits of the entropy log2(d/k) + 1.443 of a random set (Golomb, "Run-length encodings", 1966; Gallager and Van Voorhis,
1975). Every block of 1024 gaps names its own m, in steps of a quarter octave; a quotient of 16 or more is in Elias
gamma behind 16 zeros. Bits fill 64-bit words from the lowest up; a block is one chain of dependent shifts, about 20
cycles per index. The worst case is about log2(d/k) + 3 bits each, so a receiver can set memory aside beforehand.

Packed bytes: a header of 32 bytes, little-endian ("TI", version, bytes of an index, CRC-32 of the header with 0 in its
place, count, universe, payload bytes), then the payload. The payload has no checksum: turned bits are noticed if they
lead out of the universe or past the end.
"""

from __future__ import annotations

import struct
import zlib
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.tables.compiled import Word, compiled, leading_zeros, trailing_zeros
from topoplan.errors import UsageError

GAPS_PER_BLOCK = 1024  # gaps that share one modulus: the byte that names it costs 0.008 bits per gap
ESCAPE = 16  # quotients from here on are in Elias gamma instead of unary
GUARD_WORDS = 8  # words after the payload that a decoder of corrupt bits may read before it notices
WIDEST_UNIVERSE = 1 << 48  # limit up to which a short code fits one word: 15 zeros, a one, and 48 bits
GOOD, PAST_THE_END, UNKNOWN_MODULUS, OUT_OF_UNIVERSE, TRAILING_BITS = range(5)  # results of `decode_blocks`

MODULI = np.array([0] + [isqrt(isqrt(1 << step)) for step in range(191)], dtype=np.int64)
"""Modulus by its name in a block: 2^((name - 1) / 4) rounded down; name 0 is the modulus of the whole set."""

_GAMMA_HALVES = np.array(
    [0] + [min(3 * 2 ** (above - 1) - 1, 2 * ESCAPE + 4 * (above - 1)) for above in range(1, 64)],
    dtype=np.int64,
)
"""Twice the mean bits of a quotient, by the bits by which the gap is longer than the remainder."""


def modulus_of(count: int, universe: int) -> int:
    """Return the Golomb modulus of `count` random indices below `universe`: ln 2 times the mean distance, at least 1.

    In whole numbers, so that every machine finds the same.

    >>> modulus_of(10, 1000), modulus_of(10, 10)
    (69, 1)
    """
    return max(1, 45426 * int(universe) // (65536 * max(int(count), 1)))


def bits_at_most(count: int, universe: int) -> int:
    """Return the bits that no set of `count` indices below `universe` exceeds.

    All gaps together are at most ``universe - count``, so with the modulus m of the whole set the quotients add up to
    at most Q = (universe - count) // m, and gamma is longer than unary by one bit at most, from quotient 17 on. A
    block chooses another modulus only if that is shorter.

    >>> bits_at_most(1000, 100_000) / 1000  # names of blocks, unary ends, remainders, quotients
    9.526
    """
    count, universe = int(count), int(universe)
    if not count:
        return 0
    modulus = modulus_of(count, universe)
    remainder = (modulus - 1).bit_length()
    quotients = (universe - count) // modulus
    return -(-count // GAPS_PER_BLOCK) * 8 + count * (1 + remainder) + quotients + quotients // (ESCAPE + 1)


@compiled
def encode_blocks(
    indices: NDArray[np.int32] | NDArray[np.int64],
    universe: int,
    set_modulus: int,
    moduli: NDArray[np.int64],
    words: NDArray[np.uint64],
) -> int:
    """Write all blocks into `words`, which are zero; return the bits written, or -1 - p if index p is out of order."""
    gaps = np.empty(GAPS_PER_BLOCK, np.int64)
    count = len(indices)
    position = 0
    previous = np.int64(-1)
    for start in range(0, count, GAPS_PER_BLOCK):
        length = min(GAPS_PER_BLOCK, count - start)
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
    """Fill `indices` from the first `limit` bits of `words`, followed by `GUARD_WORDS`; return `GOOD` or a fault."""
    count = len(indices)
    position = 0
    index = np.int64(-1)
    for start in range(0, count, GAPS_PER_BLOCK):
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
        for place in range(start, min(start + GAPS_PER_BLOCK, count)):
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
        return TRAILING_BITS
    return GOOD


@compiled
def first_out_of_order(indices: NDArray[np.int32] | NDArray[np.int64], universe: int) -> int:
    """Return the position of the first index that is not ascending or not in [0, universe); -1 without one."""
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
    """Return the name of the shortest of three: the set's modulus, that of the block's mean, that of its histogram."""
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
    """Return the power of two that codes gaps of these bit lengths shortest, estimated from the lengths."""
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
    """Return the bits of these gaps under this modulus, without the name."""
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
    """Write these gaps from bit `position` on; return the position after them."""
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
    """Return quotient and remainder; a gap below 2^48 times a rounded inverse is off by one at most."""
    quotient = np.int64(gap * inverse)
    remainder = gap - quotient * modulus
    below = np.int64(remainder < 0)
    above = np.int64(remainder >= modulus)
    return quotient + above - below, remainder + (below - above) * modulus


@compiled
def _put(words: NDArray[np.uint64], position: Word, bits: Word, width: Word) -> None:
    """Write `bits`, all below `width`, at a position that is still zero."""
    word, shift = position >> 6, np.uint64(position & 63)
    words[word] |= np.uint64(bits) << shift
    if np.int64(shift) + width > 64:
        words[word + 1] = np.uint64(bits) >> (np.uint64(64) - shift)


@compiled
def _window(words: NDArray[np.uint64], position: Word) -> Word:
    """Return the 64 bits from `position` on."""
    word, shift = position >> 6, np.uint64(position & 63)
    # Two shifts, since one by 64 is undefined if the position is a multiple of 64.
    return (words[word] >> shift) | ((words[word + 1] << np.uint64(1)) << (np.uint64(63) - shift))


HEADER = struct.Struct("<2sBBIQQQ")
"""Magic, version, bytes of an index, CRC-32, count, universe, payload bytes."""

_MAGIC, _VERSION = b"TI", 1

_FAULTS = {
    PAST_THE_END: "the codes run past the end",
    UNKNOWN_MODULUS: "a block names a modulus that does not exist",
    OUT_OF_UNIVERSE: "an index lies outside the universe",
    TRAILING_BITS: "bits are left over",
}


def pack_indices(indices: NDArray[Any], universe: int) -> NDArray[np.uint8]:
    """Pack a set of indices without loss: the same bytes on every machine, at most `packed_bytes_at_most`.

    `indices` are (k,) int32 or int64, strictly ascending in [0, universe), and `universe` is at most 2^48; UsageError
    otherwise.

    >>> indices = np.arange(50, 1_000_000, 100, dtype=np.int32)
    >>> packed = pack_indices(indices, 1_000_000)
    >>> len(packed), indices.nbytes
    (10048, 40000)
    >>> bool(np.array_equal(unpack_indices(packed), indices))
    True
    """
    indices = np.asarray(indices)
    _check_kind(indices, universe)
    universe = int(universe)
    # The bound, and a word for the upper half of a last code of no bits.
    words = np.zeros(bits_at_most(len(indices), universe) // 64 + 2, dtype=np.uint64)
    bits = encode_blocks(
        np.ascontiguousarray(indices), universe, modulus_of(len(indices), universe), MODULI, words
    )
    if bits < 0:
        raise _out_of_order(indices, -1 - bits, universe)
    payload = 8 * -(-bits // 64)
    formats = (_MAGIC, _VERSION, indices.dtype.itemsize)
    check = zlib.crc32(HEADER.pack(*formats, 0, len(indices), universe, payload))
    header = HEADER.pack(*formats, check, len(indices), universe, payload)
    packed = np.empty(HEADER.size + payload, dtype=np.uint8)
    packed[: HEADER.size] = np.frombuffer(header, dtype=np.uint8)
    packed[HEADER.size :] = words.astype("<u8", copy=False).view(np.uint8)[:payload]
    return packed


def unpack_indices(packed: NDArray[np.uint8], *, expected_universe: int | None = None) -> NDArray[Any]:
    """Return the indices of `pack_indices`, in their dtype.

    Bytes after the packed ones are ignored, so a whole larger receive buffer can be passed. Raises `UsageError` if
    they are truncated, of another universe than expected, or corrupt as far as the header, the lengths or the universe
    show it.
    """
    packed = np.ascontiguousarray(packed, dtype=np.uint8).reshape(-1)
    if len(packed) < HEADER.size:
        raise _corrupt(f"{len(packed)} bytes are less than a header")
    magic, version, width, check, count, universe, payload = HEADER.unpack(packed[: HEADER.size].tobytes())
    if magic != _MAGIC or version != _VERSION or width not in (4, 8):
        raise _corrupt(f"begins with {packed[:4].tobytes()!r}")
    if check != zlib.crc32(HEADER.pack(magic, version, width, 0, count, universe, payload)):
        raise _corrupt("the header does not match its checksum")
    _check_size(count, universe)
    if expected_universe is not None and universe != expected_universe:
        raise _corrupt(f"they are of {universe} elements where {expected_universe} are expected")
    # Each index takes a bit at least: no header makes the receiver allocate more than was sent.
    if payload > len(packed) - HEADER.size or count > 8 * payload:
        raise _corrupt(
            f"the header has {count} indices in {payload} bytes, of which {len(packed) - HEADER.size} came"
        )
    words = np.zeros(payload // 8 + GUARD_WORDS, dtype="<u8")
    words.view(np.uint8)[:payload] = packed[HEADER.size : HEADER.size + payload]
    indices = np.empty(count, dtype=np.int32 if width == 4 else np.int64)
    found = decode_blocks(
        words.astype(np.uint64, copy=False),
        8 * payload,
        min(universe, 1 << (8 * width - 1)),
        modulus_of(count, universe),
        MODULI,
        indices,
    )
    if found != GOOD:
        raise _corrupt(_FAULTS[found])
    return indices


def packed_bytes_at_most(count: int, universe: int) -> int:
    """Return the most bytes of `pack_indices` for any `count` indices below `universe`; UsageError if those do not
    exist.

    >>> packed_bytes_at_most(10_000, 1_000_000)
    11944
    """
    _check_size(count, universe)
    return HEADER.size + 8 * -(-bits_at_most(count, universe) // 64)


def check_indices(indices: NDArray[Any], universe: int) -> None:
    """Raise UsageError unless these are a vector of int32 or int64, strictly ascending, in [0, universe)."""
    _check_kind(indices, universe)
    place = first_out_of_order(np.ascontiguousarray(indices), universe)
    if place >= 0:
        raise _out_of_order(indices, place, universe)


def _check_kind(indices: NDArray[Any], universe: int) -> None:
    if indices.ndim != 1 or indices.dtype not in (np.int32, np.int64):
        raise UsageError(
            f"indices must be a vector of int32 or int64, got {indices.dtype} of shape {indices.shape}; convert them"
        )
    _check_size(len(indices), universe)


def _out_of_order(indices: NDArray[Any], place: int, universe: int) -> UsageError:
    before = f"after {indices[place - 1]}" if place else "first"
    return UsageError(
        f"index {indices[place]} at position {place}, {before}, with {universe} elements; "
        "indices ascend strictly and lie below the universe"
    )


def _check_size(count: int, universe: int) -> None:
    if not 0 <= count <= universe <= WIDEST_UNIVERSE:
        raise UsageError(
            f"{count} indices of a universe of {universe}; choose 0 to universe of them, and at most 2^48 elements"
        )


def _corrupt(what: str) -> UsageError:
    return UsageError(f"packed indices are corrupt: {what}; send them again")
