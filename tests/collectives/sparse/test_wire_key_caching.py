"""Key caching: a repeated set costs a digest, both ends hold the same sets, and a lost message is noticed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from collectives.sparse.codec import KeyCache, WireFormat, frame, framed_bytes, unframe
from topoplan.errors import UsageError

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
    """Bytes of a message that names its set."""
    return framed_bytes(16, 4 * len(indices))


def test_a_set_that_went_before_costs_sixteen_bytes_until_it_is_evicted() -> None:
    sender, receiver = KeyCache(sets=2), KeyCache(sets=2)
    # Set 1 is used again before 2 arrives, so 0 goes; asking for 0 then evicts 1, and 2 is still known.
    sequence = [(0, False), (1, False), (0, True), (1, True), (2, False), (0, False), (2, True), (1, False)]
    for number, repeated in sequence:
        size = send(SETS[number], sender, receiver)
        assert (size == digest_message(SETS[number])) == repeated
        assert sender.digests == receiver.digests
    assert len(sender.digests) == 2
    assert sender.calls == receiver.calls == len(sequence)


@given(
    st.lists(st.integers(0, len(SETS) - 1), max_size=25),
    st.integers(1, 5),
    st.integers(1, 8000),
)
@settings(max_examples=100, deadline=None)
def test_both_ends_hold_the_same_least_recently_used_sets_within_their_bounds(
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


def test_sets_that_differ_in_one_index_or_in_their_universe_are_different_sets() -> None:
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


def test_a_sender_that_writes_on_in_its_array_does_not_change_the_cached_set() -> None:
    sender, receiver = KeyCache(), KeyCache()
    indices = SETS[1].copy()
    send(indices, sender, receiver)
    indices[-1] = UNIVERSE - 1
    assert send(indices, sender, receiver) > digest_message(indices)
    assert send(SETS[1], sender, receiver) == digest_message(SETS[1])


def test_a_receiver_cannot_write_into_the_cached_set() -> None:
    sender, receiver = KeyCache(), KeyCache()
    for _ in range(2):
        message = WIRE.encode(SETS[2], np.zeros(300), UNIVERSE, keys=sender)
        indices, _ = WIRE.decode(message, keys=receiver)
        with pytest.raises(ValueError, match="read-only"):
            indices[0] = 1


def test_a_lost_or_doubled_message_is_noticed_and_a_reset_of_both_ends_heals() -> None:
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


def test_a_digest_that_the_receiver_does_not_hold_is_refused_and_changes_nothing() -> None:
    sender, receiver = KeyCache(sets=2), KeyCache(sets=1)
    send(SETS[0], sender, receiver)
    send(SETS[1], sender, receiver)
    message = WIRE.encode(SETS[0], np.zeros(100), UNIVERSE, keys=sender)
    before = (receiver.digests, receiver.calls)
    with pytest.raises(UsageError, match="give both ends caches of the same size"):
        WIRE.decode(message, keys=receiver)
    assert (receiver.digests, receiver.calls) == before


def test_a_digest_that_comes_with_another_universe_or_count_is_refused() -> None:
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


def test_sets_no_larger_than_a_digest_travel_as_they_are() -> None:
    sender, receiver = KeyCache(), KeyCache()
    for _ in range(2):
        send(np.array([3, 5, 8, 13], dtype=np.int32), sender, receiver)
    assert sender.digests == receiver.digests == ()
    assert sender.calls == 2


@pytest.mark.parametrize("bounds", [{"sets": 0}, {"nbytes": 0}])
def test_a_cache_that_can_hold_nothing_is_refused(bounds: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="choose at least 1 of both"):
        KeyCache(**bounds)
