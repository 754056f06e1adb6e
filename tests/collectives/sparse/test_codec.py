"""The codec: lossless formats keep every bit, sizes keep their bounds, damage is refused, keys are cached."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from collectives.sparse.codec import (
    MESSAGE_HEADER,
    VALUE_DTYPES,
    VALUE_FORMATS,
    KeyCache,
    WireFormat,
    frame,
    framed_bytes,
    unframe,
)
from collectives.sparse.quantization import from_fixed_point, narrow, to_fixed_point, widen
from topoplan.errors import UsageError

FORMATS = [
    WireFormat(values=values, indices=indices, cache_keys=cached, seed=17, block=32)
    for values, indices, cached in product(VALUE_FORMATS, ("plain", "packed"), (False, True))
]

LOSSLESS = [(wire, dtype) for wire in FORMATS for dtype in VALUE_DTYPES if wire.lossless_for(dtype)]


def caches(wire: WireFormat, **bounds: int) -> tuple[KeyCache | None, KeyCache | None]:
    return (KeyCache(**bounds), KeyCache(**bounds)) if wire.cache_keys else (None, None)


def contribution(
    seed: int, count: int, universe: int, dtype: Any = np.float32
) -> tuple[NDArray[np.int32], NDArray[Any]]:
    generator = np.random.default_rng(seed)
    indices = np.sort(generator.choice(universe, count, replace=False, shuffle=False)).astype(np.int32)
    return indices, generator.integers(0, 256, count * np.dtype(dtype).itemsize, np.uint8).view(dtype)


def gaussian(seed: int, count: int, universe: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    indices, _ = contribution(seed, count, universe)
    return indices, np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def test_values_as_given_alone_are_lossless_for_every_dtype() -> None:
    assert {wire.values for wire in FORMATS if wire.lossless} == {"as given"}
    kept = {(wire.values, dtype.name) for wire, dtype in LOSSLESS if not wire.lossless}
    assert kept == {("float32", "float32"), ("float32", "float16"), ("float16", "float16")}


@pytest.mark.sampled
@pytest.mark.parametrize(("wire", "dtype"), LOSSLESS, ids=str)
def test_lossless_formats_keep_every_bit(wire: WireFormat, dtype: np.dtype[Any]) -> None:
    sender, receiver = caches(wire)
    for seed, count in ((1, 300), (2, 0), (3, 1), (1, 300), (4, 1000)):
        indices, values = contribution(seed, count, 1000, dtype)
        message = wire.encode(indices, values, 1000, keys=sender)
        assert len(message) <= wire.encoded_bytes_at_most(count, 1000, dtype)
        got_indices, got_values = wire.decode(message, universe=1000, keys=receiver)
        assert got_indices.dtype == indices.dtype
        assert got_values.dtype == dtype
        assert np.array_equal(got_indices, indices)
        # Widening makes signalling NaN quiet; apart from these, bits are compared.
        nan = np.isnan(values) if dtype.kind in "fc" else np.zeros(count, dtype=bool)
        assert np.array_equal(got_values[~nan].view(np.uint8), values[~nan].view(np.uint8))
        assert np.all(np.isnan(got_values[nan]))
        if wire.lossless:
            assert got_values.tobytes() == values.tobytes()


@pytest.mark.thorough
@given(st.data())
@settings(max_examples=100)
def test_lossless_formats_return_any_sequence_of_sets(data: st.DataObject) -> None:
    wire, dtype = data.draw(st.sampled_from(LOSSLESS))
    universe = data.draw(st.integers(1, 2**48))
    some_sets = data.draw(
        st.lists(st.sets(st.integers(0, universe - 1), max_size=60), min_size=1, max_size=3)
    )
    sender, receiver = caches(wire, sets=2)
    for chosen in data.draw(st.lists(st.sampled_from(some_sets), max_size=6)):
        indices = np.array(sorted(chosen), dtype=np.int64)
        values = np.arange(len(indices)).astype(dtype)
        message = wire.encode(indices, values, universe, keys=sender)
        assert len(message) <= wire.encoded_bytes_at_most(len(indices), universe, dtype, index_dtype=np.int64)
        got_indices, got_values = wire.decode(message, keys=receiver)
        assert np.array_equal(got_indices, indices)
        assert np.array_equal(got_values, values)


@pytest.mark.parametrize("indices", ["plain", "packed"])
def test_rounded_values_are_those_of_their_format(indices: Any) -> None:
    places, values = gaussian(5, 700, 60_000)
    for form in ("float32", "float16", "bfloat16"):
        wire = WireFormat(values=form, indices=indices)
        got = wire.decode(wire.encode(places, values.astype(np.float64), 60_000))[1]
        assert got.dtype == np.float64
        assert np.array_equal(got, widen(narrow(values.astype(np.float64), form), form, got.dtype))
    for form, bits in (("fixed8", 8), ("fixed16", 16)):
        wire = WireFormat(values=form, indices=indices, seed=3, block=100)
        got = wire.decode(wire.encode(places, values, 60_000, step=8, stream=2))[1]
        fixed = to_fixed_point(values, bits=bits, seed=3, step=8, stream=2, block=100)
        assert np.array_equal(got, from_fixed_point(fixed))


def test_plain_messages_have_exactly_the_stated_size() -> None:
    for count in (0, 1, 7, 33):
        indices, values = gaussian(7, count, 100)
        for form in VALUE_FORMATS:
            wire = WireFormat(values=form, indices="plain", block=16)
            size = len(wire.encode(indices, values, 100))
            assert size == wire.encoded_bytes_at_most(count, 100, np.float32)


def test_the_same_call_gives_the_same_bytes() -> None:
    indices, values = gaussian(8, 500, 9000)
    for wire in FORMATS:
        one = wire.encode(indices, values, 9000, step=1, keys=caches(wire)[0])
        two = wire.encode(
            np.repeat(indices, 3)[::3], np.repeat(values, 2)[::2], 9000, step=1, keys=caches(wire)[0]
        )
        assert np.array_equal(one, two)


@pytest.mark.sampled
@pytest.mark.parametrize("wire", FORMATS, ids=str)
def test_refuses_every_truncation_and_every_flipped_bit_of_the_header(wire: WireFormat) -> None:
    indices, values = gaussian(9, 25, 9000)
    message = wire.encode(indices, values, 9000, keys=caches(wire)[0])
    for length in range(len(message)):
        with pytest.raises(UsageError, match="corrupt"):
            wire.decode(message[:length], keys=caches(wire)[1])
    for bit in range(8 * MESSAGE_HEADER.size):
        broken = message.copy()
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(UsageError, match="corrupt"):
            wire.decode(broken, keys=caches(wire)[1])


@given(st.binary(max_size=200))
def test_refuses_noise(noise: bytes) -> None:
    with pytest.raises(UsageError, match="a sparse message is corrupt"):
        WireFormat().decode(np.frombuffer(noise, dtype=np.uint8))


@pytest.mark.parametrize("indices", ["plain", "packed"])
@pytest.mark.parametrize("values", ["as given", "fixed8"])
def test_refuses_sections_that_do_not_fit_a_valid_header(values: Any, indices: Any) -> None:
    places, numbers = gaussian(15, 25, 9000)
    wire = WireFormat(values=values, indices=indices)
    header, index_section, value_section = unframe(wire.encode(places, numbers, 9000))
    fewer_indices = unframe(wire.encode(places[1:], numbers[1:], 9000))[1]
    for changed, index_bytes, value_bytes in (
        (replace(header, count=24), index_section, value_section),
        (replace(header, count=2**60), index_section, value_section),
        (replace(header, value_dtype=99), index_section, value_section),
        (replace(header, index_width=16 - header.index_width), index_section, value_section),
        (replace(header, universe=9001 if indices == "packed" else 20), index_section, value_section),
        (replace(header, index_bytes=len(fewer_indices)), fewer_indices, value_section),
        (replace(header, value_bytes=len(value_section) - 1), index_section, value_section[:-1]),
    ):
        with pytest.raises(UsageError):
            wire.decode(frame(changed, index_bytes, value_bytes))
    assert np.array_equal(wire.decode(frame(header, index_section, value_section))[0], places)


def test_bytes_behind_a_message_are_ignored() -> None:
    indices, values = gaussian(11, 25, 9000)
    for wire in FORMATS:
        sender, receiver = caches(wire)
        buffer = np.full(wire.encoded_bytes_at_most(25, 9000, np.float32) + 3, 7, dtype=np.uint8)
        message = wire.encode(indices, values, 9000, keys=sender)
        buffer[: len(message)] = message
        assert np.array_equal(wire.decode(buffer, keys=receiver)[0], indices)


def test_refuses_a_message_of_another_format_or_universe() -> None:
    indices, values = gaussian(12, 25, 9000)
    for sent, expected in product(FORMATS, FORMATS):
        if sent == expected:
            continue
        message = sent.encode(indices, values, 9000, keys=caches(sent)[0])
        with pytest.raises(UsageError, match="give both ends the same wire format"):
            expected.decode(message, keys=caches(expected)[1])
    wire = WireFormat()
    with pytest.raises(UsageError, match="9000 elements came where 9001 are expected"):
        wire.decode(wire.encode(indices, values, 9000), universe=9001)


@pytest.mark.parametrize("wrong", [np.nan, -np.inf])
def test_a_fixed_point_block_that_is_not_finite_becomes_nan(wrong: float) -> None:
    indices, values = gaussian(13, 25, 9000)
    wire = WireFormat(values="fixed8", block=4)
    (_, alone), values[5] = wire.decode(wire.encode(indices, values, 9000)), wrong
    _, found = wire.decode(wire.encode(indices, values, 9000))
    assert np.isnan(found[4:8]).all()
    assert np.array_equal(np.delete(found, range(4, 8)), np.delete(alone, range(4, 8)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"values": "float8"}, "values must be one of as given, float32.*, got 'float8'"),
        ({"indices": "bitmap"}, "indices must be one of plain, packed, got 'bitmap'"),
        ({"seed": -1}, "seed must be from 0 to 18446744073709551615, got -1"),
        ({"block": 0}, "block must be from 1 to 4294967295, got 0"),
    ],
)
def test_refuses_unknown_formats(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        WireFormat(**options)


def test_refuses_entries_that_it_cannot_encode_and_leaves_the_cache() -> None:
    indices, values = gaussian(13, 25, 9000)
    wire = WireFormat(values="fixed8", cache_keys=True)
    keys = KeyCache()
    wire.encode(indices, values, 9000, keys=keys)
    before = (keys.digests, keys.calls, keys.held_bytes)
    for wrong_indices, wrong_values, message in (
        (indices, values[1:], "one value per index"),
        (indices[::-1], values, "at position 1"),
        (indices, np.full(len(values), 1e300), "no fixed-point form"),
        (indices, indices, "send them as given"),
        (indices, values.astype("U8"), "cannot be sent"),
    ):
        with pytest.raises(UsageError, match=message):
            wire.encode(wrong_indices, wrong_values, 9000, keys=keys)
        assert (keys.digests, keys.calls, keys.held_bytes) == before
    with pytest.raises(UsageError, match="give the cache of this peer"):
        wire.encode(indices, values, 9000)
    with pytest.raises(UsageError, match="caches no keys"):
        WireFormat().encode(indices, values, 9000, keys=keys)
    plain = WireFormat(indices="plain")
    message = plain.encode(indices, values, 9000)
    first = MESSAGE_HEADER.size
    message[first + 4 : first + 8] = message[first : first + 4]
    with pytest.raises(UsageError, match="at position 1"):
        plain.decode(message)


# ---- cached keys

UNIVERSE = 5000

SETS = [
    np.sort(np.random.default_rng(seed).choice(UNIVERSE, 100 * seed, replace=False)).astype(np.int32)
    for seed in range(1, 8)
]

WIRE = WireFormat(cache_keys=True)


def send(indices: NDArray[np.int32], sender: KeyCache, receiver: KeyCache) -> int:
    """Bytes of a message that was decoded at once, after checking what came out."""
    values = np.arange(len(indices), dtype=np.float32)
    message = WIRE.encode(indices, values, UNIVERSE, keys=sender)
    got_indices, got_values = WIRE.decode(message, keys=receiver)
    assert np.array_equal(got_indices, indices)
    assert np.array_equal(got_values, values)
    return len(message)


def digest_message(indices: NDArray[np.int32]) -> int:
    return framed_bytes(16, 4 * len(indices))


@given(
    st.lists(st.integers(0, len(SETS) - 1), max_size=25),
    st.integers(1, 5),
    st.integers(1, 8000),
)
@settings(max_examples=100)
def test_both_ends_hold_the_least_recently_used_sets_within_bounds(
    numbers: list[int], sets: int, nbytes: int
) -> None:
    sender, receiver = (KeyCache(sets=sets, nbytes=nbytes) for _ in range(2))
    held: list[int] = []
    for number in numbers:
        size = send(SETS[number], sender, receiver)
        assert (size == digest_message(SETS[number])) == (number in held)
        # The definition, on numbers of sets.
        if SETS[number].nbytes <= nbytes:
            held = [other for other in held if other != number] + [number]
        while len(held) > sets or sum(SETS[other].nbytes for other in held) > nbytes:
            held.pop(0)
        assert sender.digests == receiver.digests
        assert sender.held_bytes == receiver.held_bytes == sum(SETS[other].nbytes for other in held)
        assert len(sender.digests) == len(held)


def test_another_index_universe_or_dtype_is_another_set() -> None:
    sender, receiver = KeyCache(), KeyCache()
    send(SETS[0], sender, receiver)
    other = SETS[0].copy()
    other[-1] += 1
    assert send(other, sender, receiver) > digest_message(other)
    values = np.zeros(len(other), dtype=np.float32)
    wider = WIRE.encode(SETS[0], values, UNIVERSE + 1, keys=sender)
    assert len(wider) > digest_message(other)
    WIRE.decode(wider, universe=UNIVERSE + 1, keys=receiver)
    longer = WIRE.encode(SETS[0].astype(np.int64), values, UNIVERSE, keys=sender)
    assert WIRE.decode(longer, keys=receiver)[0].dtype == np.int64
    assert len(sender.digests) == len(receiver.digests) == 4


def test_a_lost_or_repeated_message_is_refused_until_both_ends_reset() -> None:
    sender, receiver = KeyCache(), KeyCache()
    values = np.zeros(100)
    first = WIRE.encode(SETS[0], values, UNIVERSE, keys=sender)
    second = WIRE.encode(SETS[0], values, UNIVERSE, keys=sender)
    with pytest.raises(UsageError, match="message 1 came to the key cache, which expected 0"):
        WIRE.decode(second, keys=receiver)
    WIRE.decode(first, keys=receiver)
    with pytest.raises(UsageError, match="message 0 came to the key cache, which expected 1"):
        WIRE.decode(first, keys=receiver)
    sender.reset()
    receiver.reset()
    assert send(SETS[0], sender, receiver) > digest_message(SETS[0])
    assert send(SETS[0], sender, receiver) == digest_message(SETS[0])


def test_an_unknown_digest_is_refused_and_changes_nothing() -> None:
    sender, receiver = KeyCache(sets=2), KeyCache(sets=1)
    send(SETS[0], sender, receiver)
    send(SETS[1], sender, receiver)
    message = WIRE.encode(SETS[0], np.zeros(100), UNIVERSE, keys=sender)
    before = (receiver.digests, receiver.calls)
    with pytest.raises(UsageError, match="give both ends caches of the same size"):
        WIRE.decode(message, keys=receiver)
    assert (receiver.digests, receiver.calls) == before


def test_a_digest_of_another_universe_or_count_is_refused() -> None:
    sender, receiver = KeyCache(), KeyCache()
    send(SETS[0], sender, receiver)
    header, digest, values = unframe(WIRE.encode(SETS[0], np.zeros(100), UNIVERSE, keys=sender))
    for changed, section in (
        (replace(header, universe=UNIVERSE + 1), values),
        (replace(header, count=99, value_bytes=len(values) - 8), values[8:]),
    ):
        with pytest.raises(UsageError, match="corrupt"):
            WIRE.decode(frame(changed, digest, section), keys=receiver)
    assert receiver.calls == 1
    assert np.array_equal(WIRE.decode(frame(header, digest, values), keys=receiver)[0], SETS[0])


def test_neither_end_can_write_into_a_cached_set() -> None:
    sender, receiver = KeyCache(), KeyCache()
    indices = SETS[1].copy()
    send(indices, sender, receiver)
    indices[-1] = UNIVERSE - 1
    assert send(indices, sender, receiver) > digest_message(indices)
    assert send(SETS[1], sender, receiver) == digest_message(SETS[1])
    received, _ = WIRE.decode(WIRE.encode(SETS[1], np.zeros(200), UNIVERSE, keys=sender), keys=receiver)
    with pytest.raises(ValueError, match="read-only"):
        received[0] = 1


def test_a_set_no_larger_than_a_digest_is_not_cached() -> None:
    sender, receiver = KeyCache(), KeyCache()
    for _ in range(2):
        send(np.array([3, 5, 8, 13], dtype=np.int32), sender, receiver)
    assert sender.digests == receiver.digests == ()
    assert sender.calls == 2
    for bounds in ({"sets": 0}, {"nbytes": 0}):
        with pytest.raises(UsageError, match="choose at least 1 of both"):
            KeyCache(**bounds)
