"""Encode the largest entries of each chunk of a vector, in 2 bits and a short index each, and decode them.

Chunked top-k (SparseLoCo, arXiv 2508.15706; DeMo, arXiv 2411.19870): a vector is cut into chunks, and each gives the
same number of entries, so an index counts within its chunk: 12 bits for chunks of 4096. Ties go to the lowest index.
Messages of one format and the same lengths have the same number of bytes, so an allgather exchanges them.

A value of 2 bits is a sign and one of two magnitudes of its chunk: the mean of those above the mean magnitude, and that
of the others. The two are sent as bfloat16. Without rounding, values travel as given. A message is a byte that says
whether all values are finite, then the packed indices, the packed codes and the magnitudes (or the values).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.sparse.quantization import narrow, widen
from topoplan.errors import UsageError

Line = NDArray[Any]

Entries = tuple[NDArray[np.int64], Line]
"""Indices in a vector, ascending by chunk, and values."""


def largest_in_rows(rows: Line, k: int) -> NDArray[np.int64]:
    """Return the columns of the k largest magnitudes of each row, ascending; ties go to the lowest column.

    `rows` is (m, n) without NaN; the result is (m, k).

    >>> largest_in_rows(np.array([[1.0, -3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]]), 2).tolist()
    [[1, 2], [0, 1]]
    """
    count, width = rows.shape
    if k >= width:
        return np.broadcast_to(np.arange(width), (count, width)).copy()
    magnitudes = np.abs(rows)
    least = np.partition(magnitudes, width - k, axis=1)[:, width - k, None]
    above, equal = magnitudes > least, magnitudes == least
    missing = k - above.sum(axis=1, keepdims=True)
    chosen = above | (equal & (np.cumsum(equal, axis=1) <= missing))
    return np.nonzero(chosen)[1].reshape(count, k)


def pack_bits(numbers: NDArray[Any], width: int) -> NDArray[np.uint8]:
    """Return the lowest `width` bits, at most 32, of each number, one after another from the highest bit.

    >>> pack_bits(np.array([1, 2, 3]), 4).tolist()
    [18, 48]
    """
    octets = numbers.astype(">u4").view(np.uint8).reshape(-1, 4)
    return np.packbits(np.unpackbits(octets, axis=1)[:, 32 - width :])


def unpack_bits(octets: NDArray[np.uint8], width: int, count: int) -> NDArray[np.int64]:
    """Return the numbers of `pack_bits`."""
    bits = np.zeros((count, 32), dtype=np.uint8)
    bits[:, 32 - width :] = np.unpackbits(octets, count=count * width).reshape(count, width)
    return np.packbits(bits, axis=1).view(">u4").reshape(-1).astype(np.int64)


@dataclass(frozen=True, slots=True)
class ChunkFormat:
    """The format of messages: `k` entries of each chunk of `chunk` elements, in 2 bits, or as given for None.

    >>> form = ChunkFormat(k=1, chunk=4, bits=None)
    >>> message, (sent,) = form.encode([np.array([4.0, -5.0, 1.0, 0.0, 7.0])])
    >>> sent.tolist(), form.nbytes([5], np.dtype(np.float64)) == message.size
    ([0.0, -5.0, 0.0, 0.0, 7.0], True)
    >>> ((indices, values),) = form.decode(message, [5], np.dtype(np.float64))
    >>> indices.tolist(), values.tolist()
    ([1, 4], [-5.0, 7.0])
    """

    k: int
    chunk: int = 4096
    bits: int | None = 2

    def __post_init__(self) -> None:
        if not 1 <= self.chunk <= 1 << 16 or not 1 <= self.k <= self.chunk:
            raise UsageError(
                f"chunk must be from 1 to 65536 and k from 1 to chunk, got chunk {self.chunk} and k {self.k}"
            )
        if self.bits not in (2, None):
            raise UsageError(f"bits of an entry must be 2, or None for values as they are, got {self.bits!r}")

    @property
    def index_bits(self) -> int:
        """Bits of an index within its chunk."""
        return (self.chunk - 1).bit_length()

    def shapes(self, size: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield first element, chunks, elements of each and entries of each: whole chunks, then the rest."""
        whole = size // self.chunk
        if whole:
            yield 0, whole, self.chunk, self.k
        if rest := size % self.chunk:
            yield whole * self.chunk, 1, rest, min(self.k, rest)

    def entries(self, size: int) -> int:
        """Return the number of entries of a vector.

        >>> ChunkFormat(k=32).entries(2 * 4096 + 10)
        74
        """
        return sum(chunks * k for _, chunks, _, k in self.shapes(size))

    def nbytes(self, sizes: Sequence[int], dtype: np.dtype[Any]) -> int:
        """Return the bytes of a message of vectors of these lengths and this dtype.

        A chunk of 4096 with 1 % of its entries takes 578 bits in place of 131072:

        >>> ChunkFormat(k=39).nbytes([4096], np.dtype(np.float32))
        74
        """
        entries = sum(map(self.entries, sizes))
        chunks = sum(shape[1] for size in sizes for shape in self.shapes(size))
        values = entries * dtype.itemsize if self.bits is None else -(-entries * 2 // 8) + 4 * chunks
        return 1 + -(-entries * self.index_bits // 8) + values

    def encode(self, lines: Sequence[Line]) -> tuple[NDArray[np.uint8], list[Line]]:
        """Return the message of vectors, all of one float dtype, and what it carries, as vectors.

        If a value is not finite, nor its magnitude in bfloat16, the message only says so, and carries zeros.
        """
        sent = [np.zeros_like(line) for line in lines]
        message = np.zeros(self.nbytes([line.size for line in lines], lines[0].dtype), dtype=np.uint8)
        if not all(bool(np.isfinite(line).all()) for line in lines):
            return message, sent
        columns: list[NDArray[np.int64]] = []
        values: list[Line] = []
        codes: list[NDArray[Any]] = []
        levels: list[NDArray[np.uint16]] = []
        for line, carried in zip(lines, sent, strict=True):
            for first, chunks, width, k in self.shapes(line.size):
                rows = line[first : first + chunks * width].reshape(chunks, width)
                found = largest_in_rows(rows, k)
                taken = np.take_along_axis(rows, found, axis=1)
                if self.bits is not None:
                    code, level = _two_bits(taken)
                    taken = _of_two_bits(code, level, line.dtype)
                    codes.append(code.reshape(-1))
                    levels.append(level.reshape(-1))
                np.put_along_axis(
                    carried[first : first + chunks * width].reshape(chunks, width), found, taken, axis=1
                )
                columns.append(found.reshape(-1))
                values.append(taken.reshape(-1))
        if not columns:  # vectors without elements
            message[0] = 1
            return message, sent
        if not all(bool(np.isfinite(one).all()) for one in values):
            return message, [np.zeros_like(line) for line in lines]
        parts = [np.ones(1, dtype=np.uint8), pack_bits(np.concatenate(columns), self.index_bits)]
        if self.bits is None:
            parts.append(np.concatenate(values).view(np.uint8))
        else:
            parts += [pack_bits(np.concatenate(codes), 2), np.concatenate(levels).view(np.uint8)]
        return np.concatenate(parts), sent

    def decode(
        self, message: NDArray[np.uint8], sizes: Sequence[int], dtype: np.dtype[Any]
    ) -> list[Entries] | None:
        """Return the entries of each vector of a message; None if its sender had a value that is not finite.

        Raises `UsageError` for a message of another length, or an index outside of its chunk.
        """
        if message.size != (wanted := self.nbytes(sizes, dtype)):
            raise UsageError(f"a message of these vectors must have {wanted} bytes, got {message.size}")
        if not message[0]:
            return None
        count = sum(map(self.entries, sizes))
        stop = 1 + -(-count * self.index_bits // 8)
        columns = unpack_bits(message[1:stop], self.index_bits, count)
        codes = np.zeros(0, dtype=np.int64)
        levels = np.zeros(0, dtype=np.uint16)
        values = np.zeros(0, dtype=dtype)
        if self.bits is None:
            values = message[stop:].copy().view(dtype)
        else:
            middle = stop + -(-count * 2 // 8)
            codes = unpack_bits(message[stop:middle], 2, count)
            levels = message[middle:].copy().view(np.uint16)
        found: list[Entries] = []
        entry = chunk = 0
        for size in sizes:
            indices, taken = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=dtype)]
            for first, chunks, width, k in self.shapes(size):
                part = slice(entry, entry + chunks * k)
                inside = columns[part].reshape(chunks, k)
                if inside.max() >= width:
                    raise UsageError(f"an index in a chunk must be below {width}, got {inside.max()}")
                indices.append((first + np.arange(chunks)[:, None] * width + inside).reshape(-1))
                if self.bits is None:
                    taken.append(values[part])
                else:
                    pairs = levels[2 * chunk : 2 * (chunk + chunks)].reshape(chunks, 2)
                    taken.append(_of_two_bits(codes[part].reshape(chunks, k), pairs, dtype).reshape(-1))
                entry, chunk = entry + chunks * k, chunk + chunks
            found.append((np.concatenate(indices), np.concatenate(taken)))
        return found


def _two_bits(rows: Line) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
    """Return the codes of values (sign, then whether above the mean), and both magnitudes of each row in bfloat16."""
    magnitudes = np.abs(rows.astype(np.float64))
    with np.errstate(over="ignore"):  # an infinite magnitude is seen by the caller
        upper = magnitudes > magnitudes.mean(axis=1, keepdims=True)
        total = np.where(upper, magnitudes, 0).sum(axis=1)
        rest = np.where(upper, 0, magnitudes).sum(axis=1)
    above, below = upper.sum(axis=1), (~upper).sum(axis=1)
    levels = np.stack([rest / np.maximum(below, 1), total / np.maximum(above, 1)], axis=1)
    codes = 2 * np.signbit(rows).astype(np.int64) + upper
    return codes, narrow(levels.reshape(-1), "bfloat16").reshape(-1, 2)


def _of_two_bits(codes: NDArray[np.int64], levels: NDArray[np.uint16], dtype: np.dtype[Any]) -> Line:
    """Return the values of codes, (m, k), by the magnitudes of each row, (m, 2)."""
    wide = widen(levels.reshape(-1), "bfloat16", dtype).reshape(-1, 2)
    signed: Line = np.take_along_axis(wide, codes & 1, axis=1)
    return np.where(codes & 2, -signed, signed)
