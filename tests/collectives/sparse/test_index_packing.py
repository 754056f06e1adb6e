"""Packed indices: every set comes back, random ones near the entropy, and none exceeds the stated bound."""

from __future__ import annotations

from math import log2
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from collectives.sparse.index_packing import (
    GAPS_PER_BLOCK,
    HEADER,
    MODULI,
    WIDEST_UNIVERSE,
    bits_at_most,
    modulus_of,
    pack_indices,
    packed_bytes_at_most,
    unpack_indices,
)
from topoplan.errors import UsageError

Indices = NDArray[np.int32] | NDArray[np.int64]


def random_set(seed: int, count: int, universe: int) -> NDArray[np.int32]:
    generator = np.random.default_rng(seed)
    chosen = np.sort(generator.choice(universe, count, replace=False, shuffle=False))
    return chosen.astype(np.int32)


@st.composite
def index_sets(draw: st.DrawFn) -> tuple[Indices, int]:
    """Sets from a few to a few thousand indices: random, in runs, with wide gaps, and up to the last element."""
    universe = draw(st.one_of(st.integers(1, 3 * GAPS_PER_BLOCK), st.integers(1, WIDEST_UNIVERSE)))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    wide = int(np.log2(universe)) + 1
    # Gaps of very different sizes in one set: the exponent of each is drawn as well.
    count = draw(st.integers(0, min(universe, 2500)))
    gaps = (2.0 ** (generator.random(count) * draw(st.integers(0, wide)))).astype(np.int64)
    indices = np.cumsum(gaps) - draw(st.integers(0, 1))
    indices = indices[indices < universe]
    if draw(st.booleans()):
        indices = np.union1d(indices, [universe - 1])
    small = universe <= 2**31 and draw(st.booleans())
    return indices.astype(np.int32 if small else np.int64), universe


@given(index_sets())
@example((np.empty(0, dtype=np.int64), 0))
@example((np.empty(0, dtype=np.int64), WIDEST_UNIVERSE))
@example((np.array([2**31 - 1]), 2**31))
@example((np.array([2**31]), 2**31 + 1))
@example((np.array([2**48 - 1]), WIDEST_UNIVERSE))
@settings(max_examples=150)
def test_packing_is_invertible_within_the_stated_bytes(case: tuple[Indices, int]) -> None:
    indices, universe = case
    packed = pack_indices(indices, universe)
    unpacked = unpack_indices(packed)
    assert unpacked.dtype == indices.dtype
    assert np.array_equal(unpacked, indices)
    assert len(packed) <= packed_bytes_at_most(len(indices), universe)
    assert np.array_equal(unpack_indices(np.append(packed, np.full(5, 255, np.uint8))), indices)


@pytest.mark.parametrize("universe", [1, 63, 64, 65, GAPS_PER_BLOCK, GAPS_PER_BLOCK + 1])
def test_a_full_set_takes_one_bit_per_index_and_a_byte_per_block(universe: int) -> None:
    packed = pack_indices(np.arange(universe, dtype=np.int32), universe)
    bits = universe + 8 * -(-universe // GAPS_PER_BLOCK)
    assert len(packed) == HEADER.size + 8 * -(-bits // 64) == packed_bytes_at_most(universe, universe)
    assert np.array_equal(unpack_indices(packed), np.arange(universe))


@pytest.mark.parametrize(("count", "universe"), [(16_777, 1 << 24), (100_000, 10**8), (167_772, 1 << 24)])
def test_a_random_set_takes_at_most_1_5_bits_beyond_the_density(count: int, universe: int) -> None:
    packed = pack_indices(random_set(4, count, universe), universe)
    entropy = log2(universe / count) + 1.4427
    assert entropy <= 8 * len(packed) / count <= log2(universe / count) + 1.5


def test_clustered_sets_take_fewer_bits_than_random_ones() -> None:
    starts = random_set(5, 2000, 1 << 17)
    runs = (starts[:, None].astype(np.int64) * 128 + np.arange(80)).reshape(-1)
    assert 8 * len(pack_indices(runs, 1 << 24)) / len(runs) < 1.75
    half = random_set(6, 80_000, 1 << 18)
    spread = np.union1d(half, random_set(7, 80_000, 1 << 24))
    assert 8 * len(pack_indices(spread, 1 << 24)) / len(spread) < 6.1


def adversarial_set(count: int, universe: int) -> NDArray[np.int64]:
    """Gaps one below a multiple of the set's modulus: longest quotients and longest remainders."""
    modulus = modulus_of(count, universe)
    gaps = np.full(count, modulus - 1, dtype=np.int64)
    spare = (universe - count * modulus) // modulus
    gaps[: max(spare, 0)] += modulus
    indices = np.cumsum(gaps + 1) - 1
    return indices[indices < universe]


@pytest.mark.parametrize(("count", "universe"), [(5000, 500_000), (5000, 2**40), (3000, 4500), (1025, 2**31)])
def test_a_set_made_to_be_long_nearly_reaches_the_bound(count: int, universe: int) -> None:
    indices = adversarial_set(count, universe)
    packed = 8 * (len(pack_indices(indices, universe)) - HEADER.size)
    bound = bits_at_most(len(indices), universe)
    assert packed <= bound + 63
    assert packed > 0.85 * bound


@given(st.integers(0, WIDEST_UNIVERSE), st.integers(0, WIDEST_UNIVERSE))
@example(2**31, 2**31)
@example(6, 2**31)
@example(2**30, 2**31)
def test_the_bound_stays_below_plain_indices_and_a_header(first: int, second: int) -> None:
    count, universe = sorted((first, second))
    assert packed_bytes_at_most(count, universe) <= (4 if universe <= 2**31 else 8) * count + 48


def test_the_bytes_depend_on_the_set_alone() -> None:
    indices = random_set(8, 4000, 100_000)
    packed = pack_indices(indices, 100_000)
    spaced = np.repeat(indices, 2)[::2]
    assert np.array_equal(pack_indices(spaced, 100_000), packed)
    wide = pack_indices(indices.astype(np.int64), 100_000)
    assert np.array_equal(wide[HEADER.size :], packed[HEADER.size :])
    spaced.flags.writeable = False
    assert np.array_equal(pack_indices(spaced, np.int32(100_000)), packed)


def test_the_bytes_are_those_of_the_written_format() -> None:
    # With modulus 3 the remainders 0, 1 and 2 are written 0, 10 and 11, behind the quotient's zeros and their one.
    assert modulus_of(3, 16) == 3
    packed = pack_indices(np.array([0, 5, 15], dtype=np.int32), 16)
    block = packed[HEADER.size]
    modulus = 3 if block == 0 else MODULI[block]
    assert modulus == 3
    # Gaps 0, 4 and 9, as quotient and remainder: 0 and 0, 1 and 1, 3 and 0.
    bits = "".join(f"{byte:08b}"[::-1] for byte in packed[HEADER.size + 1 :])
    assert bits.rstrip("0") == "1" + "0" + "01" + "10" + "0001"
    assert len(packed) == HEADER.size + 8


@pytest.mark.parametrize(
    ("indices", "universe", "message"),
    [
        ([3, 3], 10, "index 3 at position 1, after 3"),
        ([4, 3], 10, "index 3 at position 1, after 4"),
        ([-1, 3], 10, "index -1 at position 0, first"),
        ([3, 10], 10, "index 10 at position 1"),
        ([0, 1, 2], 2, "3 indices of a universe of 2"),
        ([0], 2**48 + 1, "at most 2\\^48"),
        ([0.0], 10, "vector of int32 or int64"),
        ([[0]], 10, "vector of int32 or int64"),
        (np.zeros(1, np.uint32), 10, "vector of int32 or int64"),
    ],
)
def test_refuses_indices_out_of_order_or_range(indices: Any, universe: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pack_indices(np.array(indices), universe)


def test_refuses_every_truncation_every_flipped_bit_of_the_header_and_constant_payloads() -> None:
    packed = pack_indices(random_set(9, 300, 30_000), 30_000)
    broken = [packed[:length] for length in range(len(packed))]
    for bit in range(8 * HEADER.size):
        broken.append(packed.copy())
        broken[-1][bit // 8] ^= 1 << bit % 8
    for one in broken:
        with pytest.raises(UsageError, match="packed indices are corrupt"):
            unpack_indices(one)
    for byte, message in ((0, "past the end|left over|outside"), (255, "names a modulus")):
        packed[HEADER.size :] = byte
        with pytest.raises(UsageError, match=message):
            unpack_indices(packed)


@given(st.data())
@settings(max_examples=200)
def test_corrupt_codes_are_refused_or_give_a_proper_set(data: st.DataObject) -> None:
    packed = pack_indices(random_set(11, 1500, 60_000), 60_000)
    start = data.draw(st.integers(HEADER.size, len(packed) - 1))
    noise = np.frombuffer(data.draw(st.binary(min_size=1, max_size=len(packed) - start)), np.uint8)
    packed[start : start + len(noise)] = noise
    try:
        indices = unpack_indices(packed)
    except UsageError:
        return
    assert len(indices) == 1500
    assert np.all(np.diff(indices) > 0)
    assert indices[0] >= 0
    assert indices[-1] < 60_000


def forged(packed: NDArray[np.uint8], **changes: int) -> NDArray[np.uint8]:
    """The same payload under a changed header whose checksum holds."""
    names = ("magic", "version", "width", "check", "count", "universe", "payload")
    fields = dict(zip(names, HEADER.unpack(packed[: HEADER.size].tobytes()), strict=True)) | changes
    fields["check"] = crc32(HEADER.pack(*(fields | {"check": 0}).values()))
    header = np.frombuffer(HEADER.pack(*fields.values()), dtype=np.uint8)
    return np.concatenate([header, packed[HEADER.size :]])


def test_refuses_forged_headers_before_it_allocates() -> None:
    packed = pack_indices(np.array([3, 100, 2**31, 2**31 + 9, 2**32 - 1]), 2**32)
    for changes, words in (
        ({"universe": 2**32 - 1}, "outside the universe"),
        ({"width": 4}, "outside the universe"),
        ({"width": 2}, "begins with"),
        ({"count": 2**40, "universe": 2**48}, "has 1099511627776 indices in"),
        ({"universe": 2**50}, "at most 2\\^48 elements"),
        ({"universe": 4}, "5 indices of a universe of 4"),
    ):
        with pytest.raises(UsageError, match=words):
            unpack_indices(forged(packed, **changes))
    assert np.array_equal(unpack_indices(forged(packed)), unpack_indices(packed))


def of_bits(bits: int, words: int) -> NDArray[np.uint8]:
    """Two indices below 2^40 in a payload of these words, under a header that fits."""
    payload = np.frombuffer(bits.to_bytes(8 * words, "little"), dtype=np.uint8)
    empty = pack_indices(np.empty(0, dtype=np.int64), 2**40)
    return forged(np.concatenate([empty, payload]), count=2, payload=8 * words)


def test_payloads_are_read_to_their_last_bit_and_no_further() -> None:
    # The modulus of the set lies between 2^38 and 2^39: a gap of 0 is a one and 38 zeros.
    both = 1 << 8 | 1 << 47
    assert unpack_indices(of_bits(both, 2)).tolist() == [0, 1]
    for bits, words, fault in (
        (both, 1, "past the end"),
        (both, 3, "left over"),
        (both | 1 << 86, 2, "left over"),
        (both | 1 << 127, 2, "left over"),
        (1 << 8, 2, "outside the universe"),
        # Gamma codes too wide for any universe, and one whose product with the modulus is 0 modulo 2^64.
        (1 << 8 + 16 + 49, 5, "outside the universe"),
        (1 << 8 + 16 + 47 | 2**47 - 15 << 8 + 16 + 48 | 1 << 157, 5, "outside the universe"),
    ):
        with pytest.raises(UsageError, match=fault):
            unpack_indices(of_bits(bits, words))
