"""Where the bytes of each chunk lie on one rank during one collective."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.backends.backend import Call
from collectives.backends.tcp.order import Order
from collectives.lowering.edge_streams import Stream
from collectives.peers.control_page import Room
from collectives.reduction import reduction


class Spare:
    """Buffers of one size in bytes, used again and again; the one given back last is taken first, for the cache."""

    def __init__(self) -> None:
        self._size = 0
        self._free: list[NDArray[np.uint8]] = []
        self._kept = Room.of(np.empty(0, dtype=np.uint8))

    def resize(self, size: int) -> None:
        """Give out buffers of at least this many bytes from now on."""
        if size > self._size:
            self._size = size
            self._free.clear()

    def at_least(self, size: int) -> Room:
        """So many bytes, the same again and again."""
        if len(self._kept.data) < size:
            self._kept = Room.of(np.empty(size, dtype=np.uint8))
        return self._kept

    def take(self) -> NDArray[np.uint8]:
        """A buffer."""
        try:
            return self._free.pop()
        except IndexError:
            return np.empty(self._size, dtype=np.uint8)

    def give(self, buffer: NDArray[np.uint8]) -> None:
        """Put a buffer back."""
        if len(buffer) == self._size:
            self._free.append(buffer)


class Memory:
    """The input and the result of a rank, and the partial sums of shards of which it gets no result.

    Parameters
    ----------
    call : Call
        With the arrays of one rank.
    orders : iterable of Order
        Of the streams that lead to that rank.
    """

    def __init__(self, call: Call[NDArray[Any]], orders: Iterable[Order]) -> None:
        arrays = call.memory[0]
        self._chunk = call.table.chunk_elements
        self._source, self._source_start = arrays.source, arrays.given[0]
        self._result, self._result_start = arrays.result, arrays.block[0]
        self._dtype = arrays.source.dtype
        self._combine = np.add if call.op is None else reduction(call.op, self._dtype)
        self._partial: dict[int, NDArray[Any]] = {}
        for order in orders:
            if order.slots:
                stream = order.stream
                longest = min(self._chunk, stream.stop - stream.start)
                slots = min(order.slots, stream.chunks)
                self._partial[stream.shard] = np.empty((slots, longest), dtype=self._dtype)

    def outgoing(self, stream: Stream, chunk: int) -> memoryview:
        """The bytes of a chunk that this rank sends."""
        start, stop = self._range(stream, chunk)
        if stream.source_fresh:
            return _bytes(self._source[start - self._source_start : stop - self._source_start])
        return _bytes(self._held(stream, chunk))

    def place(self, stream: Stream, chunk: int) -> memoryview:
        """Where the bytes of a chunk that is stored here belong."""
        return _bytes(self._held(stream, chunk))

    def length(self, stream: Stream, chunk: int) -> int:
        """Bytes of a chunk."""
        start, stop = self._range(stream, chunk)
        return (stop - start) * self._dtype.itemsize

    def join(self, stream: Stream, chunk: int, arrived: NDArray[np.uint8]) -> None:
        """Add or store a chunk that has arrived."""
        start, stop = self._range(stream, chunk)
        data = arrived[: (stop - start) * self._dtype.itemsize].view(self._dtype)
        target = self._held(stream, chunk)
        if not stream.add:
            target[...] = data
            return
        own = target
        if stream.destination_fresh:
            own = self._source[start - self._source_start : stop - self._source_start]
        with np.errstate(all="ignore"):
            self._combine(own, data, out=target)

    def _range(self, stream: Stream, chunk: int) -> tuple[int, int]:
        start = stream.start + chunk * self._chunk
        return start, min(start + self._chunk, stream.stop)

    def _held(self, stream: Stream, chunk: int) -> NDArray[Any]:
        """What this rank has of a chunk: its result, or a partial sum."""
        start, stop = self._range(stream, chunk)
        partial = self._partial.get(stream.shard)
        if partial is None:
            return self._result[start - self._result_start : stop - self._result_start]
        part: NDArray[Any] = partial[chunk % len(partial), : stop - start]
        return part


def _bytes(array: NDArray[Any]) -> memoryview:
    return memoryview(array.view(np.uint8).data)
