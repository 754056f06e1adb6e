"""Encode the chunks of a gradient as messages of one length, and add arrived messages up in the order of the ranks.

A gradient is (n, c): row r is the chunk that rank r reduces. The owner adds the messages of all ranks in their order,
so every run has the same bits. A message is

    TopK       the largest entries of the chunk, its residual included; the whole chunk if entries take as many bytes
    Quantize   a scale for each block, then the codes; only the owner adds, so each rank has all codes for itself
    Cast       the chunk, rounded to 16 bits

Sums are made in float32, or in float64 for gradients of float64. An infinite or undefined value reaches the owner as
such. The largest entries are chosen in each chunk, not in the whole gradient: so messages have one length, and no
counts travel. Threshold has no place here: its messages have no length that all ranks know.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.sparse.entry_arrays import EntryMessages, HostEntryArrays, place_bytes
from collectives.sparse.quantization import (
    CODE_DTYPES,
    LARGEST,
    WIRE_DTYPES,
    FixedPoint,
    FloatFormat,
    from_fixed_point,
    largest_magnitudes,
    narrow,
    to_fixed_point,
    widen,
)
from collectives.sparse.residuals import Residuals, ResidualSnapshot, select_entries
from collectives.sparse.selection.error_feedback import ErrorFeedback
from collectives.tables.numpy_arrays import NumpyArrays
from collectives.training.exchange_settings import TopK
from collectives.training.gradient_filters import Cast, Quantize

Array = NDArray[Any]
Bytes = NDArray[np.uint8]


class ChunkMessages(ABC):
    """Messages of one gradient on one rank, of `chunks` chunks of `count` elements; `key` names the gradient.

    `dtype` is that of the sums, float32 or float64; `how` is the name of the encoding in reports.
    """

    how: str
    density = 1.0
    """Share of the elements that the last messages had."""

    def __init__(self, key: str, chunks: int, count: int, dtype: str) -> None:
        self.key, self.chunks, self.count, self.dtype = key, chunks, count, dtype

    @abstractmethod
    def encode(
        self, gradient: Array, *, step: int, rank: int, scale: float, draw: int | None = None
    ) -> Bytes:
        """Return the messages of a (chunks, count) gradient times a loss scale, (chunks, bytes).

        `step` chooses a density by function; `draw` is the number of the random rounding, by default that of the step.
        """

    @abstractmethod
    def add(self, message: Bytes, total: Array) -> None:
        """Add what an arrived message holds to a (count,) sum."""

    def total(self, messages: Bytes) -> Array:
        """Return the (count,) sum of messages, added in their order."""
        total = np.zeros(self.count, self.dtype)
        with np.errstate(over="ignore", invalid="ignore"):  # as in sums of such values
            for message in messages:
                self.add(message, total)
        return total


def chunk_messages(
    how: TopK | Quantize | Cast, key: str, chunks: int, count: int, dtype: str
) -> ChunkMessages:
    """Return the messages of a gradient by the settings of compression.

    >>> made = chunk_messages(TopK(0.25), "layer", 2, 4, "float32")
    >>> sent = made.encode(np.float32([[4, 0, 3, 1], [0, 0, 2, 5]]), step=0, rank=0, scale=1.0)
    >>> sent.shape, made.total(sent[:1]).tolist(), made.kept.whole.residual.tolist()
    ((2, 16), [4.0, 0.0, 0.0, 0.0], [0.0, 0.0, 3.0, 1.0, 0.0, 0.0, 2.0, 0.0])
    """
    if isinstance(how, TopK):
        return EntryChunkMessages(how, key, chunks, count, dtype)
    if isinstance(how, Quantize):
        return CodeChunkMessages(how, key, chunks, count, dtype)
    return RoundedChunkMessages(how, key, chunks, count, dtype)


class EntryChunkMessages(ChunkMessages):
    """The largest entries of each chunk; `kept` is the residual of the whole gradient.

    Without `loss_scale` protection nothing is copied; `remember` keeps a copy of the residual that `undo` restores.
    """

    def __init__(self, settings: TopK, key: str, chunks: int, count: int, dtype: str) -> None:
        super().__init__(key, chunks, count, dtype)
        self._settings = settings
        self._arrays = HostEntryArrays(NumpyArrays())
        feedback = ErrorFeedback(chunks * count, dtype, momentum=settings.momentum)
        self.kept = Residuals(feedback, self._arrays, fresh=False)
        self._messages: EntryMessages[Any]
        self._whole = False
        self._before: ResidualSnapshot | None = None
        self._remembered = False

    @property
    def how(self) -> str:  # type: ignore[override]
        return "whole chunks" if self._whole else "entries"

    def encode(
        self, gradient: Array, *, step: int, rank: int, scale: float, draw: int | None = None
    ) -> Bytes:
        density = self._settings.at(step)
        assert isinstance(density, float), "compress_fsdp2 refuses others"
        self._use(density)
        self.kept.rescale(scale)
        made = []
        for shard, chunk in enumerate(gradient):
            part = self.kept.part(shard * self.count, (shard + 1) * self.count)
            entries = select_entries(
                part, np.ascontiguousarray(chunk), self._messages.entries[shard], self._arrays
            )
            if self._whole:
                made.append(entries[1].view(np.uint8))
                continue
            encoded = self._messages.encoded(entries, shard, rank=rank, step=step if draw is None else draw)
            if encoded.lost is not None:
                self._arrays.add(part.residual, encoded.lost)
            made.append(encoded.message)
        return _in_rows(made)

    def add(self, message: Bytes, total: Array) -> None:
        if self._whole:
            total += message[: total.nbytes].view(total.dtype)
        else:
            self._arrays.add(total, self._messages.decoded(message[: self._messages.lengths[0]], 0))

    def _use(self, density: float) -> None:
        """Take the messages of a density: entries, unless the values of all elements take as few bytes."""
        borders = range(0, self.chunks * self.count + 1, self.count)
        whole = self.count * np.dtype(self.dtype).itemsize
        for share in (density, 1.0):
            self.density = share
            self._messages = EntryMessages(
                self._arrays, borders, dtype=self.dtype, density=share, wire=self._settings.wire
            )
            self._whole = self._messages.lengths[0] >= whole
            if not self._whole:
                break

    def remember(self) -> None:
        """Keep a copy of the present residual, unless one is kept already."""
        if not self._remembered:
            self._before, self._remembered = self.kept.saved(self._before), True

    def settle(self, *, undo: bool) -> None:
        """Forget the copy of `remember`; with `undo` the residual is what it was then."""
        if undo and self._remembered and self._before is not None:
            self.kept.restore(self._before)
        self._remembered = False


class CodeChunkMessages(ChunkMessages):
    """Integer codes with a scale for each block: at most one code wrong, and right in expectation."""

    def __init__(self, settings: Quantize, key: str, chunks: int, count: int, dtype: str) -> None:
        super().__init__(key, chunks, count, dtype)
        self._settings = settings
        self.how = f"{settings.bits} bits"

    def encode(
        self, gradient: Array, *, step: int, rank: int, scale: float, draw: int | None = None
    ) -> Bytes:
        how, made = self._settings, []
        for number, chunk in enumerate(gradient):
            largest = largest_magnitudes(chunk, how.block)
            broken = ~(largest <= LARGEST)
            values, undefined = np.ascontiguousarray(chunk), np.repeat(broken, how.block)[: chunk.size]
            if broken.any():
                values = np.where(undefined, chunk.dtype.type(0), chunk)
            fixed = to_fixed_point(
                values,
                bits=how.bits,
                seed=how.seed << 32 | zlib.crc32(f"{self.key}, chunk {number}".encode()),
                step=step if draw is None else draw,
                stream=rank,
                block=how.block,
            )
            # a code times NaN is NaN
            scales = np.where(broken, np.float32(np.nan), fixed.scales)
            made.append(np.concatenate((scales.view(np.uint8), fixed.codes.view(np.uint8))))
        return _in_rows(made)

    def add(self, message: Bytes, total: Array) -> None:
        how = self._settings
        border = 4 * -(-self.count // how.block)
        codes = message[border : border + self.count * how.bits // 8].view(CODE_DTYPES[how.bits])
        total += from_fixed_point(FixedPoint(codes, message[:border].view(np.float32), how.block))


class RoundedChunkMessages(ChunkMessages):
    """Values of 16 bits."""

    def __init__(self, settings: Cast, key: str, chunks: int, count: int, dtype: str) -> None:
        super().__init__(key, chunks, count, dtype)
        self.how = settings.dtype
        self._format: FloatFormat = "bfloat16" if settings.dtype == "bfloat16" else "float16"

    def encode(
        self, gradient: Array, *, step: int, rank: int, scale: float, draw: int | None = None
    ) -> Bytes:
        return _in_rows([narrow(np.ascontiguousarray(one), self._format).view(np.uint8) for one in gradient])

    def add(self, message: Bytes, total: Array) -> None:
        values = message[: 2 * self.count].view(WIRE_DTYPES[self._format])
        total += widen(values, self._format, total.dtype)


def _in_rows(messages: list[Bytes]) -> Bytes:
    """Return messages of one length as rows, which begin where any type may."""
    length = messages[0].size
    rows = np.zeros((len(messages), place_bytes(length)), np.uint8)
    for row, message in zip(rows, messages, strict=True):
        row[:length] = message
    return rows
