"""Hold the state of one collective on one rank: its barrier, its chunks, its progress and its waits.

In round k of the barrier every rank sends its signature to the rank 2**k places behind it and receives that of the
rank 2**k places before it. It continues only if both are equal, so after log2 N rounds all ranks have arrived, with
the same call (the dissemination barrier of Hensgen, Finkel and Manber, 1988). Inputs of small collectives go along:
after round k a rank has those of 2**(k + 1) ranks (Bruck et al., IEEE TPDS 1997), and in the end of all.

Chunks need not wait for the barrier, but results do. A rank takes chunks of its own call only (each has the call's
number), and leaves later ones in their connections. So ranks may begin a call while others are in the one before, and
what ranks with different signatures have exchanged is dropped before any of them has a result.

Deadlock is impossible. An arrived chunk is joined at once, or buffered until its predecessors have been joined;
there is a buffer for every chunk under way, so every connection drains. Take the first chunk, by (part of its shard
that lies before it, stream), among all that have not been joined anywhere. Its predecessors at both ends are of the
same shard and earlier in this order: the same chunk of earlier streams, or earlier chunks if partial sums are
bounded. All of them are done. Its window is open, for it is counted from earlier chunks of its own stream, whose
joining was acknowledged. So it is sent, arrives and is joined.
"""

from __future__ import annotations

import contextlib
import errno
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
from collectives.backends.tcp import compiled_exchange as machine
from collectives.backends.tcp.chunk_order import rank_order
from collectives.backends.tcp.connections import Queue
from collectives.peers.control_page import SHOWABLE, AddressedMemory, ScratchMemory
from collectives.peers.control_plane import LENGTH, Waiting
from collectives.tables.transfer_table import EdgeStream, Given, TransferTable, place_in, row_of, streams

CALLS = 1 << 32
"""Collectives are counted modulo this."""

CACHE_LINE = 64

UNREACHED = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)
"""Errors of a connection whose packets do not arrive: the network's, not those of the process at the other end."""

LEFT, TOUCHED = (machine.word_of(machine.EXCHANGE, name) for name in ("left", "touched"))
ROUND, GOT, GIVEN, SOURCE, MET_AT = (
    machine.word_of(machine.BARRIER, name) for name in ("round", "got", "given", "source", "met_at")
)

Records = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class TcpProgram:
    """One rank's streams and links in a collective, as `compiled_exchange.exchange` takes them.

    - `rows`: the streams that begin or end at the rank, sorted by link, by the row of their first chunk.
    - `links`: source, destination and channel. `link_rows`: their rows, without connections.
    - `partial_elements` of all partial sums that the rank keeps.
    - `keeps`, `buffers`: places of the rings of arrived chunks, and buffers for them, each of `buffer_bytes`.
    """

    rank: int
    rows: NDArray[np.int64]
    links: tuple[Queue, ...]
    streams: Records
    befores: Records
    link_rows: Records
    partial_elements: int
    keeps: int
    buffers: int
    buffer_bytes: int

    @property
    def leaving(self) -> list[Queue]:
        """Return the links that the rank opens."""
        return [link for link in self.links if link[0] == self.rank]

    @classmethod
    def of(
        cls,
        call: Call[Any],
        rank: int,
        links_of: Callable[[Records], tuple[tuple[Queue, ...], Records]],
        flight_bytes: int,
    ) -> TcpProgram:
        """Return the program of calls like one, whose arrays are not read.

        `links_of` returns the links that carry the streams of some rows, and that of each (`connections_of`).
        `flight_bytes` is the window of a held stream, at least `RankOrder.window` chunks.
        """
        table, (memory,) = call.table, call.memory
        order = rank_order(table, rank, call.signature.collective, call.signature.root)
        links, link = links_of(order.rows)
        sorting = np.argsort(link, kind="stable")
        here = np.empty_like(sorting)
        here[sorting] = np.arange(len(sorting))
        rows = order.rows[sorting]
        start, shard = table.bounds[table.shard[rows]], table.shard[rows]
        length = table.bounds[shard + 1] - start
        longest = np.minimum(length, table.chunk_elements)
        chunks = -(-length // table.chunk_elements)
        arrives = table.destination[rows] == rank
        buffer_bytes = int(longest.max(initial=0)) * call.itemsize
        buffer_bytes += -buffer_bytes % CACHE_LINE
        flight = -(-flight_bytes // (longest * call.itemsize))
        held = order.held[sorting]
        window = np.where(held, np.minimum(np.maximum(order.window[sorting], flight), chunks), 0)
        opening = np.maximum(-(-machine.OPENING_BYTES // (longest * call.itemsize)), 2)
        opening = np.minimum(np.maximum(order.window[sorting], opening), window)
        # Partial sums of a shard are placed at its first stream that has slots.
        slotted = np.flatnonzero(order.slots[sorting] * arrives)
        slots = np.minimum(order.slots[sorting][slotted], chunks[slotted])
        places = np.cumsum(slots * longest[slotted])
        partial = {
            of: (end - each * slot, each, slot)
            for of, end, each, slot in zip(
                shard[slotted].tolist(),
                places.tolist(),
                slots.tolist(),
                longest[slotted].tolist(),
                strict=True,
            )
        }
        streams = np.zeros(len(rows), machine.STREAM)
        streams["place"] = start - memory.block[0]
        if partial:
            of_sums = [partial.get(of, (-1, 0, 0)) for of in shard.tolist()]
            place, streams["slots"], streams["slot"] = np.array(of_sums, dtype=np.int64).T
            streams["place"] = np.where(streams["slots"] > 0, place, streams["place"])
        streams["number"] = order.numbers[sorting]
        streams["first"] = _places_in(memory.given, start)
        streams["length"], streams["chunk"], streams["chunks"] = length, table.chunk_elements, chunks
        streams["adds"] = table.add[rows]
        streams["own"] = np.where(arrives, table.destination_fresh[rows], table.source_fresh[rows])
        written = order.written[sorting]
        streams["written"] = np.where(written >= 0, here[written], -1)
        streams["window"], streams["opening"] = window, opening
        after = here[order.befores[:, 0]]
        sorted_befores = np.argsort(after, kind="stable")
        counts = np.bincount(after, minlength=len(rows))
        streams["last_before"] = np.cumsum(counts)
        streams["first_before"] = streams["last_before"] - counts
        befores = np.zeros(len(after), machine.BEFORE)
        befores["stream"], befores["lag"] = (
            here[order.befores[:, 1]][sorted_befores],
            order.befores[sorted_befores, 2],
        )
        keeps = np.where(arrives, np.maximum(window, 1), 0)
        streams["keeps"], streams["kept"] = keeps, np.cumsum(keeps) - keeps
        streams["first_chunk"] = np.cumsum(chunks) - chunks
        link_rows = np.zeros(len(links), machine.LINK)
        link_rows["leaves"] = [one[0] == rank for one in links]
        link_rows["left"] = np.bincount(link, weights=chunks[here], minlength=len(links)).astype(np.int64)
        in_link = np.bincount(link, minlength=len(links))
        link_rows["last_stream"] = np.cumsum(in_link)
        link_rows["first_stream"] = link_rows["last_stream"] - in_link
        link_rows["descriptor"] = link_rows["stream"] = -1
        return cls(
            rank,
            rows,
            links,
            streams,
            befores,
            link_rows,
            int(places[-1]) if len(places) else 0,
            int(keeps.sum()),
            # a chunk of a stream that is not held waits only at its link
            int(window[arrives].sum()) + sum(one[1] == rank for one in links),
            buffer_bytes,
        )


class TcpCollective:
    """Collectives of one kind on one rank, one after another, each from `begin` to `end`.

    Only the thread of the collective moves chunks; other threads may ask what it waits for. `scratch` is memory that
    nothing else uses from `begin` to `end`. `wakeup` is a descriptor that becomes readable when Python has to look at
    something. `status` is the last result of `compiled_exchange.exchange`.
    """

    def __init__(
        self, program: TcpProgram, table: TransferTable, scratch: ScratchMemory, wakeup: int
    ) -> None:
        self.program = program
        self.status = machine.WAITING
        self._table = table
        self._scratch = scratch
        self._chunks = int(program.streams["chunks"].sum())
        self._link_rows = program.link_rows.copy()
        self._progress = np.zeros(len(program.streams), machine.PROGRESS)
        self._progress["limit"] = program.streams["opening"]
        fields = machine.PROGRESS.itemsize // 8
        self._of_call = self._progress.view(np.int64).reshape(-1, fields)[:, : fields - 1]
        self._kept = np.zeros(program.keeps, dtype=np.int64)
        self._all_free = np.arange(program.buffers, dtype=np.int64)
        self._free = self._all_free.copy()
        self._polled = np.zeros((len(program.link_rows) + 3, 4), dtype=np.int16)
        self._polled.view(np.int32)[0, 0] = wakeup
        self._polled[0, 2] = machine.READ
        self._frame = np.zeros(1, machine.EXCHANGE)
        self._words = self._frame.view(np.int64)
        self._times = np.zeros((0, 2), dtype=np.int64)
        self._counts = np.zeros((len(program.links), 2), dtype=np.int64)
        self._counts_before = self._counts  # of the present call
        self.end()

    def reset(self) -> None:
        """Return to the state before `begin`; limits of streams stay."""
        self._link_rows[:] = self.program.link_rows
        self._of_call[:] = 0
        self._free[:] = self._all_free

    def end(self) -> None:
        """Drop the arrays."""
        self._buffers: RankBuffers | None = None

    def begin(self, call: Call[Any], *, traced: bool = False) -> None:
        """Begin a collective after `reset`, with the arrays of the rank; `traced` enables `arrivals`."""
        program = self.program
        self.status = machine.WAITING
        self._counts_before = self._counts.copy()
        partial = program.partial_elements * call.itemsize
        partial += -partial % CACHE_LINE
        room = self._scratch.of(partial + program.buffers * program.buffer_bytes)
        self._buffers = buffers = rank_buffers_of(call)
        self._times = np.zeros((self._chunks if traced else 0, 2), dtype=np.int64)
        # in the order of `EXCHANGE`, from "left" to "touched": one slice of words costs less than 15 fields
        self._words[LEFT : TOUCHED + 1] = (
            self._chunks,
            call.signature.call % CALLS,
            call.itemsize,
            buffers.source_at,
            buffers.result_at,
            room.address,
            room.address + partial,
            program.buffer_bytes,
            program.buffers,
            0,
            *(buffers.arithmetic.loops[:2] if buffers.aligned else (0, 0)),
            0,
            0,
            time.monotonic_ns(),
        )

    def connect(self, descriptor: Callable[[Queue], int]) -> None:
        """Use the links that are open by now; to be called again until all are.

        `descriptor` returns that of a link's connection, -1 if it is not open.
        """
        descriptors = self._link_rows["descriptor"]
        for place, link in enumerate(self.program.links):
            if descriptors[place] < 0:
                descriptors[place] = descriptor(link)

    def pace(self, paces: Mapping[Queue, float]) -> None:
        """Limit links to so many bytes per second, in place of the system."""
        for place, link in enumerate(self.program.links if paces else ()):
            if link in paces:
                self._link_rows["pace"][place] = max(1, round(paces[link]))

    @property
    def connected(self) -> bool:
        """Return whether all links have been open at the last `connect`."""
        return bool((self._link_rows["descriptor"] >= 0).all())

    def go_on(self, barrier: DisseminationBarrier | None = None) -> None:
        """Move chunks until all is done, or Python has to look at something: see `status`.

        A `barrier` continues beside them, and is a part of all.
        """
        program = self.program
        meeting = _MET if barrier is None else barrier.state
        while True:
            self.status = int(
                machine.exchange(
                    program.streams,
                    program.befores,
                    self._link_rows,
                    self._progress,
                    self._kept,
                    self._free,
                    self._frame,
                    self._polled,
                    self._times,
                    self._counts,
                    *meeting,
                )
            )
            if self.status != machine.BY_PYTHON:
                return
            self._join()

    def meet(self, barrier: DisseminationBarrier) -> int:
        """Move chunks while a barrier is under way; return how far that is, as `DisseminationBarrier.go_on`.

        If chunks fail, only the barrier continues: it tells whether all ranks are in this call. `status` has the
        failure.
        """
        if self.status == machine.WAITING:
            self.go_on(barrier)
            barrier.touched = max(barrier.touched, self.touched)
            if barrier.ended:
                return machine.ENDED
            if self.status == machine.WAITING:
                return machine.WAITING
        return barrier.go_on()

    @property
    def finished(self) -> bool:
        """Return whether this rank has sent and joined everything."""
        return bool(self._words[LEFT] == 0)

    def arrivals(self) -> Iterator[tuple[Queue, EdgeStream, int, int, int]]:
        """Yield the chunks that came: link, stream, chunk, and nanoseconds of its begin and end."""
        every = streams(self._table)
        for row, link in zip(self._link_rows, self.program.links, strict=True):
            for place in range(row["first_stream"], row["last_stream"]):
                if link[1] == self.program.rank:
                    first, stream = (
                        self.program.streams["first_chunk"][place],
                        every[self.program.rows[place]],
                    )
                    for chunk, (start, end) in enumerate(self._times[first:][: stream.chunks].tolist()):
                        yield link, stream, chunk, start, end

    @property
    def touched(self) -> float:
        """Return the time of the last progress, on the steady clock."""
        return float(self._words[TOUCHED]) / 1e9

    def counts(self, *, ahead: bool = False) -> dict[Queue, tuple[int, int, bool]]:
        """Return for each link the bytes of chunks that this end has moved in all calls, those of credits, and whether
        the present call has begun and has chunks for it yet.

        A rank that is `ahead` has begun a call that others have not reached. What it has sent in this call is left out:
        the others do not read it yet.
        """
        counts = self._counts
        if ahead:
            leaves = np.array([link[0] == self.program.rank for link in self.program.links], dtype=bool)
            counts = np.where(np.stack([leaves, ~leaves], axis=1), self._counts_before, counts)
        left = ((self._link_rows["left"] > 0) & (self._link_rows["descriptor"] >= 0)).tolist()
        rows = zip(self.program.links, counts.tolist(), left, strict=True)
        return {link: (data, back, more) for link, (data, back), more in rows}

    def silent(self, seconds: float, *, began: int) -> list[Queue]:
        """Return the open links that have chunks to move yet, and have moved nothing for so many seconds.

        `began` is when all ranks had come, in nanoseconds of the steady clock.
        """
        rows = self._link_rows
        since = np.maximum(rows["touched"], began) + round(seconds * 1e9)
        silent = (rows["descriptor"] >= 0) & (rows["left"] > 0) & (since < time.monotonic_ns())
        return [self.program.links[place] for place in np.flatnonzero(silent).tolist()]

    def trouble(self) -> tuple[int, str, tuple[Queue, ...]]:
        """Return the peer with which a call failed, how, and the link if the network ended its connection."""
        place = int(self._frame["trouble"][0])
        link = self.program.links[place]
        leaves = link[0] == self.program.rank
        peer = link[1] if leaves else link[0]
        if self.status == machine.STRANGE:
            call, number, chunk, nbytes = self._link_rows["header"][place]
            return (
                peer,
                f"rank {peer} sent chunk {chunk} of stream {number} of collective {call} with {nbytes} bytes, "
                "which is not expected now",
                (),
            )
        if self.status == machine.PEER_ENDED:
            return peer, f"rank {peer} closed its connection", ()
        number = int(self._frame["errno"][0])
        lost = (link,) if number in UNREACHED else ()
        if leaves:
            return peer, f"cannot send to rank {peer}: {os.strerror(number)}", lost
        return peer, f"the connection from rank {peer} broke: {os.strerror(number)}", lost

    def waiting(self) -> Waiting:
        """Return what this rank waits for: the first chunk that has not come, else the first that has not left."""
        found = self._first_missing(None)
        idle = time.monotonic() - self.touched
        if found is None:
            return Waiting(None, None, idle)
        stream, chunk = found
        peer = stream.source if stream.destination == self.program.rank else stream.destination
        return Waiting(peer, row_of(self._table, stream.number, chunk), idle)

    def stops_at(self, peer: int | None) -> int | None:
        """Return the row at which this rank waits for a peer, else the one that it waits for anyway.

        It is that of the first chunk that has not come from the peer, else of the first that has not left for it.
        """
        found = None if peer is None else self._first_missing(peer)
        return self.waiting().step if found is None else row_of(self._table, found[0].number, found[1])

    def _first_missing(self, peer: int | None) -> tuple[EdgeStream, int] | None:
        """Return the first chunk that has not come from a rank, or any, else the first that has not left."""
        rows, every = [], streams(self._table)
        for place, number in enumerate(self.program.rows.tolist()):
            stream = every[number]
            leaves = stream.source == self.program.rank
            chunk = int(self._progress["done" if leaves else "come"][place])
            if chunk < stream.chunks and peer in (None, stream.source, stream.destination):
                rows.append((leaves, chunk, stream.number, stream))
        if not rows:
            return None
        _, chunk, _, stream = min(rows, key=lambda row: row[:3])
        return stream, chunk

    def _join(self) -> None:
        """Add an arrived chunk with an operation that only Python has."""
        place, buffers = int(self._frame["aside"][0]), self._buffers
        assert buffers is not None, "between begin and end"
        row, room, itemsize = self.program.streams[place], self._scratch.of(0), buffers.arithmetic.itemsize
        as_elements = buffers.arithmetic.as_elements
        number = int(self._progress["done"][place])
        first = number * self._table.chunk_elements
        elements = min(self._table.chunk_elements, int(row["length"]) - first)
        buffer = self._kept[row["kept"] + number % row["keeps"]]
        begin = int(self._frame["buffers_at"][0]) - room.address + buffer * self.program.buffer_bytes
        arrived = as_elements(room.data[begin:][: elements * itemsize])
        own = buffers.source[row["first"] + first :][:elements]
        if row["slots"]:
            sums = as_elements(room.data[: self.program.partial_elements * itemsize])
            target = sums[row["place"] + number % row["slots"] * row["slot"] :][:elements]
        else:
            target = buffers.result[row["place"] + first :][:elements]
        with np.errstate(all="ignore"):
            buffers.arithmetic.combine(own if row["own"] else target, arrived, out=target)
        self._frame["done_aside"] = 1


def _places_in(given: Given, elements: Records) -> Records:
    """Return the positions of elements in a rank's input, as `place_in`."""
    if len(given) == 2:
        return elements - given[0]
    return np.array([place_in(given, element) for element in elements.tolist()], dtype=np.int64)


COMBINED_BYTES = 64 << 10
"""The most bytes of all ranks' inputs together that a barrier carries."""

MOST_RANKS = 64
"""The most ranks that exchange their inputs in a barrier."""


class WakingCondition(threading.Condition):
    """A condition whose `notify_all` also wakes a rank that sleeps in compiled code.

    `descriptor` becomes readable then, until `clear`.
    """

    def __init__(self, lock: threading.RLock) -> None:
        super().__init__(lock)
        self.descriptor, self._write_end = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._write_end, False)

    def notify_all(self) -> None:
        super().notify_all()
        with contextlib.suppress(OSError):
            os.write(self._write_end, b".")

    def clear(self) -> None:
        """Reset the descriptor; look at the changes afterwards."""
        with contextlib.suppress(OSError):
            os.read(self.descriptor, 1 << 16)

    def close(self) -> None:
        """Close the descriptors; notifications wake only waiting threads from then on."""
        with self:
            ends, self.descriptor, self._write_end = (self.descriptor, self._write_end), -1, -1
            for end in ends:
                if end >= 0:
                    os.close(end)


class DisseminationBarrier:
    """The barrier of a job's ranks in each collective.

    `links` has for each distance of `barrier_distances` the connections to the rank so many places behind and from the
    one before. `state` is as `compiled_exchange.exchange` takes it. `touched` is the time of the last progress on the
    steady clock. `shown` holds the inputs of all ranks.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        links: Sequence[tuple[socket.socket, socket.socket]],
        wakeup: WakingCondition,
    ) -> None:
        self._rounds = np.array(
            [[sending.fileno(), receiving.fileno()] for sending, receiving in links], dtype=np.int64
        ).reshape(-1, 2)
        self._polled = np.zeros((3, 4), dtype=np.int16)
        self._polled.view(np.int32)[0, 0] = wakeup.descriptor
        self._polled[0, 2] = machine.READ
        self._outbox = AddressedMemory.of(np.empty(LENGTH + COMBINED_BYTES, np.uint8))
        self._inbox = AddressedMemory.of(np.empty(LENGTH + COMBINED_BYTES, np.uint8))
        self.shown = AddressedMemory.of(np.empty(size * 2 * SHOWABLE if size <= MOST_RANKS else 0, np.uint8))
        self._frame = np.zeros(1, machine.BARRIER)
        self._words = self._frame.view(np.int64)
        state = self._frame[0]
        state["rank"], state["ranks"] = rank, size
        state["outbox"], state["inbox"] = self._outbox.address, self._inbox.address
        state["shown"] = self.shown.address
        self.state: tuple[Records, Records] = self._rounds, self._frame
        self._rank, self._size = rank, size
        self._place = (0, 0, 0)
        self.touched = 0.0

    def begin(self, note: bytes, source: int = 0, nbytes: int = 0) -> None:
        """Begin with a note of `LENGTH` bytes that must be the same on all ranks; `go_on` sends it.

        `source` is the address of the input that goes along, of `nbytes` on every rank.
        """
        self._outbox.data[:LENGTH] = np.frombuffer(note, np.uint8)
        self._words[ROUND : GOT + 1] = 0
        self._words[GIVEN : SOURCE + 1] = nbytes, source

    @property
    def met_at(self) -> int:
        """Return when all ranks had arrived, in nanoseconds of the steady clock."""
        return int(self._words[MET_AT])

    @property
    def ended(self) -> bool:
        """Return whether all ranks have arrived with the same note."""
        return int(self._words[ROUND]) == len(self._rounds)

    def go_on(self) -> int:
        """Continue until all ranks have arrived, or Python has to look at something; return the result of `barrier`."""
        status = int(machine.barrier(self._rounds, self._frame, self._polled))
        if status == machine.WAITING:
            place = tuple(self._words[ROUND : GOT + 1].tolist())
            if place != self._place:
                self._place, self.touched = place, time.monotonic()
        return status

    @property
    def peer(self) -> int:
        """Return the rank from which this one receives in the current round."""
        number = min(int(self._words[ROUND]), len(self._rounds) - 1)
        return int((self._rank - (1 << number)) % self._size)


_MET = np.zeros((0, 2), dtype=np.int64), np.zeros(1, machine.BARRIER)
"""The barrier of ranks that have met."""


def barrier_distances(size: int) -> list[int]:
    """Return the distances of peers in the barrier, round by round.

    >>> barrier_distances(1), barrier_distances(2), barrier_distances(5)
    ([], [1], [1, 2, 4])
    """
    return [1 << number for number in range(max(size - 1, 0).bit_length())]
