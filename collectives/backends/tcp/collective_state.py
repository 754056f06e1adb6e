"""Hold the state of one collective on one rank: the barrier before it, its chunks, its progress and its waits.

In round k of the barrier every rank sends its signature to the rank 2**k places behind it and receives that of the
rank 2**k places before it. It continues only if both are equal, so after log2 N rounds all ranks have arrived, with
the same call (the dissemination barrier of Hensgen, Finkel and Manber, 1988). Inputs of small collectives go along:
after round k a rank has those of 2**(k + 1) ranks (Bruck et al., IEEE TPDS 1997), and in the end of all.

Deadlock is impossible. An arrived chunk is joined at once, or buffered until its predecessors have been joined;
there is a buffer for every chunk under way, so every connection drains. Take the first chunk, by (part of its shard
that lies before it, stream), among all that have not been joined anywhere. Its predecessors at both ends are of the
same shard and earlier in this order: the same chunk of earlier streams, or earlier chunks if partial sums are
bounded. All of them are done. Its window is open, for it is counted from earlier chunks of its own stream, whose
joining was acknowledged. So it is sent, arrives and is joined.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.backends.backend import Call
from collectives.backends.shared.program_runner import RankBuffers, rank_buffers_of
from collectives.backends.tcp import compiled_exchange
from collectives.backends.tcp.chunk_order import orders
from collectives.backends.tcp.compiled_exchange import (
    BY_PYTHON,
    COME,
    DONE,
    FRAME,
    GIVEN,
    GOT,
    PEER_ENDED,
    RANK,
    RANKS,
    ROUND,
    SHOWN,
    SOURCE,
    STRANGE,
    TOLD,
    WAITING,
    meet,
)
from collectives.backends.tcp.link_addresses import Queue
from collectives.peers.control_page import SHOWABLE, AddressedMemory, ScratchMemory
from collectives.peers.control_plane import LENGTH, Waiting
from collectives.tables.transfer_table import EdgeStream, TransferTable, place_in, row_of

CALLS = 1 << 32
"""Collectives are counted modulo this."""

CACHE_LINE = 64

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TcpProgram:
    """What one rank sends and receives in a collective, as `compiled_exchange.flow` takes it.

    Parameters
    ----------
    rank : int
    parts : tuple of Stream
        Those that begin or end at the rank, sorted by link.
    links : tuple of (source, destination, channel)
    streams, befores, lanes : arrays
        The last without connections.
    partial_elements : int
        Elements of all partial sums that the rank keeps.
    keeps, buffers : int
        Places in which arrived chunks are noted, and buffers for them.
    buffer_bytes : int
        Bytes of each.
    """

    rank: int
    parts: tuple[EdgeStream, ...]
    links: tuple[Queue, ...]
    streams: Numbers
    befores: Numbers
    lanes: Numbers
    partial_elements: int
    keeps: int
    buffers: int
    buffer_bytes: int

    @property
    def leaving(self) -> list[Queue]:
        """The links that the rank opens."""
        return [link for link in self.links if link[0] == self.rank]

    @classmethod
    def of(
        cls, call: Call[Any], rank: int, lane_of: Callable[[EdgeStream], Queue], flight_bytes: int
    ) -> TcpProgram:
        """The program of calls like one.

        Parameters
        ----------
        call : Call
            With the arrays of one rank, at which nothing looks.
        rank : int
        lane_of : callable
            The link that carries a stream (see `collectives.backends.tcp.link_addresses`).
        flight_bytes : int
            Window of a held stream, at least `EdgeStream.window` chunks.
        """
        about, (memory,) = call.signature, call.memory
        carried = sorted(
            (lane_of(one.stream), one.stream.number, one)
            for one in orders(call.table, about.collective, about.root)
            if rank in (one.stream.source, one.stream.destination)
        )
        mine = [one for _, _, one in carried]
        here = {one.stream.number: place for place, one in enumerate(mine)}
        longest = {one.stream.number: _longest(one.stream, call.table) for one in mine}
        buffer_bytes = max(longest.values(), default=0) * call.itemsize
        buffer_bytes += -buffer_bytes % CACHE_LINE
        partial: dict[int, tuple[int, int, int]] = {}
        elements = 0
        for one in mine:
            if one.slots and one.stream.destination == rank:
                slots, slot = min(one.slots, one.stream.chunks), longest[one.stream.number]
                partial[one.stream.shard] = (elements, slots, slot)
                elements += slots * slot
        streams = np.zeros((len(mine), len(compiled_exchange.STREAM_COLUMNS)), dtype=np.int64)
        befores: list[tuple[int, int]] = []
        keeps = buffers = first_chunk = 0
        for place, one in enumerate(mine):
            part, arrives = one.stream, one.stream.destination == rank
            flight = -(-flight_bytes // (longest[part.number] * call.itemsize))
            window = min(max(part.window, flight), part.chunks) if one.held else 0
            kept = (window or 1) if arrives else 0
            where, slots, slot = partial.get(part.shard, (part.start - memory.block[0], 0, 0))
            first_before = len(befores)
            if arrives:
                befores += [(here[number], lag) for number, lag in one.before]
            streams[place] = (
                part.number,
                place_in(memory.given, part.start),
                part.stop - part.start,
                call.table.chunk_elements,
                part.chunks,
                part.add,
                part.destination_fresh if arrives else part.source_fresh,
                where,
                slots,
                slot,
                -1 if arrives or one.written is None else here[one.written],
                window,
                first_before,
                len(befores),
                keeps,
                kept,
                first_chunk,
            )
            first_chunk += part.chunks
            keeps += kept
            # of a stream that is not held a chunk waits nowhere but in the hand of its link
            buffers += window if arrives else 0
        links = tuple(sorted({link for link, _, _ in carried}))
        lanes = np.zeros((len(links), compiled_exchange.LANE), dtype=np.int64)
        for place, link in enumerate(links):
            numbers = [number for number, (lane, _, _) in enumerate(carried) if lane == link]
            left = sum(mine[number].stream.chunks for number in numbers)
            lanes[place, : compiled_exchange.PACE] = -1, link[0] == rank, numbers[0], numbers[-1] + 1, left
            buffers += link[1] == rank
        lanes[:, compiled_exchange.STREAM] = -1
        return cls(
            rank,
            tuple(one.stream for one in mine),
            links,
            streams,
            np.array(befores, dtype=np.int64).reshape(-1, 2),
            lanes,
            elements,
            keeps,
            buffers,
            buffer_bytes,
        )


class TcpCollective:
    """Collectives of one kind on one rank, one after another; each begins with `begin` and is over with `end`.

    Only the thread of the collective calls what moves chunks; others may ask what it waits for meanwhile.

    Parameters
    ----------
    program : TcpProgram
    table : TransferTable
        The one that it was made from.
    scratch : Scratch
        Memory that nothing else uses from the beginning of a collective to its end.
    bell : int
        Descriptor that is ready to be read when there is something else to look at.

    Attributes
    ----------
    status : int
        How the last call of `compiled_exchange.flow` ended.
    """

    def __init__(self, program: TcpProgram, table: TransferTable, scratch: ScratchMemory, bell: int) -> None:
        self.program = program
        self.status = WAITING
        self._table = table
        self._scratch = scratch
        self._chunks = int(program.streams[:, compiled_exchange.CHUNKS].sum())
        self._lanes = program.lanes.copy()
        self._state = np.zeros((len(program.streams), 3), dtype=np.int64)
        self._kept = np.zeros(program.keeps, dtype=np.int64)
        self._all_free = np.arange(program.buffers, dtype=np.int64)
        self._free = self._all_free.copy()
        self._polled = np.zeros((len(program.lanes) + 1, 4), dtype=np.int16)
        self._polled.view(np.int32)[0, 0] = bell
        self._polled[0, 2] = compiled_exchange.READ
        self._frame = np.zeros(compiled_exchange.FLOW_FRAME, dtype=np.int64)
        self._times = np.zeros((0, 2), dtype=np.int64)
        self.end()

    def reset(self) -> None:
        """Stand where a collective begins."""
        self._lanes[:] = self.program.lanes
        self._state[:] = 0
        self._free[:] = self._all_free

    def end(self) -> None:
        """Let go of the arrays."""
        self._lines: RankBuffers | None = None

    def begin(self, call: Call[Any], *, traced: bool = False) -> None:
        """Begin a collective after `reset`, with the arrays of the rank; traced, `arrivals` can be asked for."""
        program = self.program
        partial = program.partial_elements * call.itemsize
        partial += -partial % CACHE_LINE
        room = self._scratch.of(partial + program.buffers * program.buffer_bytes)
        self._lines = lines = rank_buffers_of(call)
        self._times = np.zeros((self._chunks if traced else 0, 2), dtype=np.int64)
        self._frame[compiled_exchange.LEFT : compiled_exchange.TOUCHED + 1] = (
            self._chunks,
            call.signature.call % CALLS,
            call.itemsize,
            lines.source_at,
            lines.result_at,
            room.address,
            room.address + partial,
            program.buffer_bytes,
            program.buffers,
            0,
            *(lines.arithmetic.loops[:2] if lines.aligned else (0, 0)),
            0,
            0,
            time.monotonic_ns(),
        )

    def connect(self, descriptor: Callable[[Queue], int], paces: Mapping[Queue, float]) -> None:
        """Use the links that are open by now; to be called again until all are.

        Parameters
        ----------
        descriptor : callable
            That of the connection of a link, -1 where there is none yet.
        paces : dict of link to float
            Bytes per second, where the system does not see to it.
        """
        for place, link in enumerate(self.program.links):
            if self._lanes[place, compiled_exchange.DESCRIPTOR] < 0:
                self._lanes[place, compiled_exchange.DESCRIPTOR] = descriptor(link)
                self._lanes[place, compiled_exchange.PACE] = (
                    max(1, round(paces[link])) if link in paces else 0
                )

    def go_on(self) -> None:
        """Move the chunks of what was begun until all is done, or there is something to look at: see `status`."""
        program = self.program
        while True:
            self.status = int(
                compiled_exchange.flow(
                    program.streams,
                    program.befores,
                    self._lanes,
                    self._state,
                    self._kept,
                    self._free,
                    self._frame,
                    self._polled,
                    self._times,
                )
            )
            if self.status != BY_PYTHON:
                return
            self._join()

    @property
    def finished(self) -> bool:
        """Whether this rank has sent and joined everything."""
        return bool(self._frame[compiled_exchange.LEFT] == 0)

    def arrivals(self) -> Iterator[tuple[Queue, EdgeStream, int, int, int]]:
        """The chunks that came: link, stream, chunk, and when each began to come and was there, in nanoseconds."""
        for lane, link in zip(self._lanes, self.program.links, strict=True):
            for place in range(lane[compiled_exchange.FIRST_STREAM], lane[compiled_exchange.LAST_STREAM]):
                if link[1] == self.program.rank:
                    first, stream = (
                        self.program.streams[place, compiled_exchange.FIRST_CHUNK],
                        self.program.parts[place],
                    )
                    for chunk, (start, end) in enumerate(self._times[first:][: stream.chunks].tolist()):
                        yield link, stream, chunk, start, end

    @property
    def touched(self) -> float:
        """When something moved last, on the steady clock."""
        return float(self._frame[compiled_exchange.TOUCHED]) / 1e9

    def trouble(self) -> tuple[int, str]:
        """The peer with which a call failed, and how."""
        link = self.program.links[self._frame[compiled_exchange.TROUBLE]]
        leaves = link[0] == self.program.rank
        peer = link[1] if leaves else link[0]
        if self.status == STRANGE:
            call, number, chunk, nbytes = self._lanes[
                self._frame[compiled_exchange.TROUBLE], compiled_exchange.HEADER : compiled_exchange.CREDIT
            ]
            return peer, (
                f"rank {peer} sent chunk {chunk} of stream {number} of collective {call} with {nbytes} bytes, "
                "which is not expected now"
            )
        if self.status == PEER_ENDED:
            return peer, f"rank {peer} closed its connection"
        error = os.strerror(int(self._frame.view(np.int32)[2 * compiled_exchange.ERROR :][:2].sum()))
        if leaves:
            return peer, f"cannot send to rank {peer}: {error}"
        return peer, f"the connection from rank {peer} broke: {error}"

    def waiting(self) -> Waiting:
        """What this rank waits for: the first chunk that has not come, else the first that has not left."""
        found = self._first_missing(None)
        idle = time.monotonic() - self.touched
        if found is None:
            return Waiting(None, None, idle)
        stream, chunk = found
        peer = stream.source if stream.destination == self.program.rank else stream.destination
        return Waiting(peer, row_of(self._table, stream.number, chunk), idle)

    def stops_at(self, peer: int | None) -> int | None:
        """The row at which this rank stops because of another, else the one that it waits for anyway.

        It is that of the first chunk that has not come from the other, else of the first that has not left for it.
        """
        found = None if peer is None else self._first_missing(peer)
        return self.waiting().step if found is None else row_of(self._table, found[0].number, found[1])

    def _first_missing(self, peer: int | None) -> tuple[EdgeStream, int] | None:
        """The first chunk that has not come from a rank, or any, else the first that has not left."""
        rows = []
        for place, stream in enumerate(self.program.parts):
            leaves = stream.source == self.program.rank
            chunk = int(self._state[place, DONE if leaves else COME])
            if chunk < stream.chunks and peer in (None, stream.source, stream.destination):
                rows.append((leaves, chunk, stream.number, stream))
        if not rows:
            return None
        _, chunk, _, stream = min(rows, key=lambda row: row[:3])
        return stream, chunk

    def _join(self) -> None:
        """Add a chunk that has arrived, as only Python can."""
        place, lines = int(self._frame[compiled_exchange.ASIDE]), self._lines
        assert lines is not None, "between begin and end"
        row, room, itemsize = self.program.streams[place], self._scratch.of(0), lines.arithmetic.itemsize
        as_elements = lines.arithmetic.as_elements
        number = int(self._state[place, DONE])
        first = number * self._table.chunk_elements
        elements = min(self._table.chunk_elements, int(row[compiled_exchange.LENGTH_OF]) - first)
        buffer = self._kept[row[compiled_exchange.KEPT] + number % row[compiled_exchange.KEEPS]]
        begin = self._frame[compiled_exchange.BUFFERS_AT] - room.address + buffer * self.program.buffer_bytes
        arrived = as_elements(room.data[begin:][: elements * itemsize])
        own = lines.source[row[compiled_exchange.FIRST] + first :][:elements]
        if row[compiled_exchange.SLOTS]:
            sums = as_elements(room.data[: self.program.partial_elements * itemsize])
            target = sums[
                row[compiled_exchange.PLACE]
                + number % row[compiled_exchange.SLOTS] * row[compiled_exchange.SLOT] :
            ][:elements]
        else:
            target = lines.result[row[compiled_exchange.PLACE] + first :][:elements]
        with np.errstate(all="ignore"):
            lines.arithmetic.combine(own if row[compiled_exchange.OWN] else target, arrived, out=target)
        self._frame[compiled_exchange.DONE_ASIDE] = 1


def _longest(stream: EdgeStream, table: TransferTable) -> int:
    """Elements of the longest chunk of a stream."""
    return min(table.chunk_elements, stream.stop - stream.start)


COMBINED_BYTES = 64 << 10
"""Bytes that all ranks may put in altogether to have it told in a meeting."""

MOST_RANKS = 64
"""So many ranks at most tell each other what they put in."""


class WakingCondition(threading.Condition):
    """A condition that also wakes who sleeps in a meeting, when all are told of a change.

    Attributes
    ----------
    descriptor : int
        What the system sees as ready to be read while the bell has rung.
    """

    def __init__(self, lock: threading.RLock) -> None:
        super().__init__(lock)
        self.descriptor, self._rope = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._rope, False)

    def notify_all(self) -> None:
        """See `threading.Condition`."""
        super().notify_all()
        with contextlib.suppress(OSError):
            os.write(self._rope, b".")

    def hush(self) -> None:
        """Take back what has rung so far; look afterwards what it was."""
        with contextlib.suppress(OSError):
            os.read(self.descriptor, 1 << 16)

    def close(self) -> None:
        """Free the descriptors; ringing goes unheard from then on."""
        with self:
            ends, self.descriptor, self._rope = (self.descriptor, self._rope), -1, -1
            for end in ends:
                if end >= 0:
                    os.close(end)


class DisseminationBarrier:
    """Where the ranks of a job meet, again and again.

    Parameters
    ----------
    rank, size : int
    links : sequence of (socket, socket)
        For each distance of `barrier_distances` the connection to the rank so many places behind and from that before.
    bell : Bell

    Attributes
    ----------
    touched : float
        When something came or left last, on the steady clock.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        links: Sequence[tuple[socket.socket, socket.socket]],
        bell: WakingCondition,
    ) -> None:
        self._rounds = np.array(
            [[tells.fileno(), hears.fileno()] for tells, hears in links], dtype=np.int64
        ).reshape(-1, 2)
        self._polled = np.zeros((3, 4), dtype=np.int16)
        self._polled.view(np.int32)[2, 0] = bell.descriptor
        self._told = AddressedMemory.of(np.empty(LENGTH + COMBINED_BYTES, np.uint8))
        self._heard = AddressedMemory.of(np.empty(LENGTH + COMBINED_BYTES, np.uint8))
        self.shown = AddressedMemory.of(np.empty(size * 2 * SHOWABLE if size <= MOST_RANKS else 0, np.uint8))
        self._frame = np.zeros(FRAME, dtype=np.int64)
        self._frame[RANK : RANKS + 1] = rank, size
        self._frame[TOLD : SHOWN + 1] = self._told.address, self._heard.address, self.shown.address
        self._rank, self._size = rank, size
        self._place = (0, 0, 0)
        self.touched = 0.0

    def begin(self, note: bytes, source: int = 0, nbytes: int = 0) -> int:
        """Begin to meet, with a note that must be the same on all ranks; returns as `go_on`.

        Parameters
        ----------
        note : bytes
            Of `LENGTH`.
        source, nbytes : int
            Address and bytes of what is told with it; as long on all ranks.
        """
        self._told.data[:LENGTH] = np.frombuffer(note, np.uint8)
        frame = self._frame
        frame[ROUND : GOT + 1] = 0
        frame[GIVEN : SOURCE + 1] = nbytes, source
        return self.go_on()

    def go_on(self) -> int:
        """Go on until all have met, or there is something to look at: what `meet` returns."""
        status = int(meet(self._rounds, self._frame, self._polled))
        if status == WAITING:
            place = tuple(self._frame[ROUND : GOT + 1].tolist())
            if place != self._place:
                self._place, self.touched = place, time.monotonic()
        return status

    @property
    def peer(self) -> int:
        """The rank that this one hears from in the round that it is in."""
        number = min(int(self._frame[ROUND]), len(self._rounds) - 1)
        return int((self._rank - (1 << number)) % self._size)

    @property
    def heard(self) -> bytes:
        """The note that has come last."""
        return bytes(self._heard.data[:LENGTH])


def barrier_distances(size: int) -> list[int]:
    """How far from each other ranks meet, round by round.

    Examples
    --------
    >>> barrier_distances(1), barrier_distances(2), barrier_distances(5)
    ([], [1], [1, 2, 4])
    """
    return [1 << number for number in range(max(size - 1, 0).bit_length())]
