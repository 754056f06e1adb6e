"""Ascending indices packed to about log2(1/density) + 1.5 bits each, and how large they can become.

Random sets of k out of d indices need log2(d/k) + 1.443 bits each (the entropy of a gap); Golomb codes of the gaps
(`golomb_code`) come within 0.03 of that. The largest size depends on k and d only, about log2(d/k) + 3 bits each in
the worst case, so that a receiver can set memory aside before it knows the indices.

Packed bytes: a header of 32 bytes, little-endian ("TI", version, bytes of an index, CRC-32 of the header with
0 in its place, count, universe, payload bytes), then the payload in whole 64-bit words. The payload has no
checksum of its own: bits that turn on the way are noticed where they lead out of the universe or past the end, the
rest is left to the transport.
"""

from __future__ import annotations

import struct
import zlib
from math import exp, inf, log1p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.wire.golomb_code import (
    BLOCK,
    GOOD,
    GUARD_WORDS,
    LEFT_OVER,
    MODULI,
    OUT_OF_UNIVERSE,
    PAST_THE_END,
    UNKNOWN_MODULUS,
    WIDEST_UNIVERSE,
    bits_at_most,
    decode_blocks,
    encode_blocks,
    first_out_of_order,
    modulus_of,
)
from topoplan.errors import UsageError

HEADER = struct.Struct("<2sBBIQQQ")
"""Magic, version, bytes of an index, CRC-32, count, universe, payload bytes."""

_MAGIC, _VERSION = b"TI", 1

_FAULTS = {
    PAST_THE_END: "the codes run past the end",
    UNKNOWN_MODULUS: "a block names a modulus that does not exist",
    OUT_OF_UNIVERSE: "an index lies outside the universe",
    LEFT_OVER: "bits are left over",
}


def pack_indices(indices: NDArray[Any], universe: int) -> NDArray[np.uint8]:
    """Pack a set of indices without loss.

    Parameters
    ----------
    indices : ndarray of int32 or int64, shape (k,)
        Strictly ascending, each in [0, universe).
    universe : int
        How many indices there are to choose from; at most 2^48.

    Returns
    -------
    ndarray of uint8
        The same bytes for the same set on every machine, `packed_bytes_at_most` of them at most.

    Raises
    ------
    UsageError
        Not a vector of int32 or int64, not ascending, or outside the universe.

    Examples
    --------
    >>> import numpy as np
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


def packed_bytes_expected(count: int, universe: int) -> float:
    """The mean length of `pack_indices` over all sets of `count` indices below `universe`, for a cost model.

    With s the share of elements that are not chosen and m the modulus, the unary part of a code is 1 / (1 - s^m) bits
    long on average, and its remainder the longer form with a probability of (s^t - s^m) / (1 - s^m), t being how many
    remainders are short. Clustered sets are shorter.

    Examples
    --------
    >>> round(8 * packed_bytes_expected(10**6, 10**8) / 10**6, 3)  # log2(100) + 1.443 is 8.087
    8.113
    """
    _check_size(count, universe)
    if not count:
        return HEADER.size
    modulus = modulus_of(count, universe)
    floor = modulus.bit_length() - 1
    # Logarithms, since 1 - 2^-48 has but five digits left of the share that is chosen.
    skipped = log1p(-count / universe) if count < universe else -inf
    beyond = exp(modulus * skipped)
    longer = (exp(((2 << floor) - modulus) * skipped) - beyond) / (1 - beyond)
    return HEADER.size + (count * (1 / (1 - beyond) + floor + longer) + 8 * -(-count // BLOCK)) / 8


def unpack_indices(packed: NDArray[np.uint8], *, expected_universe: int | None = None) -> NDArray[Any]:
    """The indices that `pack_indices` packed, in the dtype in which they were given.

    Parameters
    ----------
    packed : ndarray of uint8
        Its result; bytes behind it are ignored, so the whole of a larger receive buffer will do.
    expected_universe : int, optional
        What the receiver knows of; another is refused.

    Raises
    ------
    UsageError
        Truncated, for another universe, no packed indices, or corrupt where the header, the lengths or the universe
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
    # Each index takes a bit at least: no header makes the receiver set more aside than was sent.
    if payload > len(packed) - HEADER.size or count > 8 * payload:
        raise _corrupt(
            f"the header tells of {count} indices in {payload} bytes, of which {len(packed) - HEADER.size} came"
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
    """The most bytes that `pack_indices` makes of any `count` indices below `universe`.

    Raises
    ------
    UsageError
        The universe has fewer elements, or more than 2^48.

    Examples
    --------
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
            f"indices are a vector of int32 or int64, not {indices.dtype} of shape {indices.shape}; convert them"
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
