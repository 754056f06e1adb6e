"""Messages of the largest entries of each chunk: selection, ties, packed bits, two magnitudes a chunk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.sparse.chunk_codec import ChunkFormat, largest_in_rows, pack_bits, unpack_bits
from collectives.sparse.selection.topk import topk
from topoplan.errors import UsageError


@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 1 << 30), st.data())
def test_each_row_gives_what_top_k_of_the_row_gives(
    rows: int, width: int, seed: int, data: st.DataObject
) -> None:
    """With many ties, which go to the lowest index in both."""
    k = data.draw(st.integers(1, width))
    values = np.random.default_rng(seed).integers(-3, 4, (rows, width)).astype(np.float32)
    found = largest_in_rows(values, k)
    for row, mine in zip(values, found, strict=True):
        assert mine.tolist() == sorted(topk(row, k)[0].tolist())


@given(st.lists(st.integers(0, (1 << 12) - 1), max_size=50), st.integers(12, 16))
def test_packed_bits_come_back(numbers: list[int], width: int) -> None:
    octets = pack_bits(np.array(numbers, dtype=np.int64), width)
    assert octets.size == -(-len(numbers) * width // 8)
    assert unpack_bits(octets, width, len(numbers)).tolist() == numbers


@pytest.mark.parametrize("bits", [2, None])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("k", "chunk"), [(1, 1), (3, 10), (10, 10), (5, 4096)])
def test_a_message_says_what_its_sender_believes_that_it_sent(
    bits: int | None, dtype: type[np.floating], k: int, chunk: int
) -> None:
    form, draw = ChunkFormat(k, chunk, bits), np.random.default_rng(k)
    lines = [draw.standard_normal(size).astype(dtype) for size in (25, 1, 40, 0)]
    sizes = [line.size for line in lines]
    message, sent = form.encode(lines)
    assert message.size == form.nbytes(sizes, np.dtype(dtype))
    decoded = form.decode(message, sizes, np.dtype(dtype))
    assert decoded is not None
    for line, carried, (indices, values) in zip(lines, sent, decoded, strict=True):
        whole = np.zeros_like(line)
        whole[indices] = values
        assert whole.tobytes() == carried.tobytes()
        assert len(set(indices.tolist())) == form.entries(line.size)
        if bits is None:
            assert values.tobytes() == line[indices].tobytes()
        assert (np.sign(values) == np.sign(line[indices])).all()


def test_two_bits_are_the_mean_magnitudes_above_and_below_the_mean() -> None:
    """Of 1, -2, 6 and 7 the mean magnitude is 4: magnitudes 1.5 and 6.5, which bfloat16 holds."""
    form = ChunkFormat(4, 8)
    _, (sent,) = form.encode([np.array([1.0, 0.0, -2.0, 6.0, 0.0, 0.0, 7.0, 0.0])])
    assert sent.tolist() == [1.5, 0, -1.5, 6.5, 0, 0, 6.5, 0]
    assert form.nbytes([8], np.dtype(np.float64)) == 1 + 2 + 1 + 4


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_a_value_without_a_code_is_told_and_not_sent(bad: float) -> None:
    """1e300 is finite and its magnitude in bfloat16 is not; as it is, it travels."""
    for bits in (2, None):
        form = ChunkFormat(1, 4, bits)
        message, (sent,) = form.encode([np.array([1.0, bad, 0.0])])
        told = form.decode(message, [3], np.dtype(np.float64)) is None
        assert told == (bits == 2 or not np.isfinite(bad))
        assert not told or not sent.any()


def test_damaged_messages_and_wrong_settings_are_refused() -> None:
    form = ChunkFormat(1, 3, None)
    message, _ = form.encode([np.array([1.0, 2.0, 3.0])])
    with pytest.raises(UsageError, match="must have 10 bytes, got 9"):
        form.decode(message[:-1], [3], np.dtype(np.float64))
    message[1] = 0xFF
    with pytest.raises(UsageError, match="must be below 3, got 3"):
        form.decode(message, [3], np.dtype(np.float64))
    for k, chunk in ((0, 4), (5, 4), (1, 1 << 17)):
        with pytest.raises(UsageError, match="chunk must be from 1 to 65536 and k from 1 to chunk"):
            ChunkFormat(k, chunk)
    with pytest.raises(UsageError, match="bits of an entry must be 2"):
        ChunkFormat(1, 4, 8)
