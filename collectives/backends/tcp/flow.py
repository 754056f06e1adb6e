"""One collective on one rank while it runs: what it sends and receives, how far it is, and who waits for whom.

Why this cannot deadlock. A chunk that has come is joined at once, or kept until what precedes it has been joined; who
has come stands in the way of nobody, for there is a buffer for every chunk that may be under way. So every connection
always drains. Look at the chunk that is first, by (part of its shard that lies before it, stream), among all that have
not been joined anywhere. What must precede it at its source and at its destination is of the same shard, and comes
earlier in this order: the same chunk of earlier streams, or earlier chunks where partial sums are bounded. All that is
done. Its window is open, for it is counted from earlier chunks of its own stream, whose joining was told. So nothing
holds it, and sooner or later it is sent, arrives and is joined.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.backends.backend import Call
from collectives.backends.shared.execution import Lines, lines_of
from collectives.backends.tcp import loops
from collectives.backends.tcp.loops import BY_PYTHON, COME, DONE, PEER_ENDED, STRANGE, WAITING
from collectives.backends.tcp.order import orders
from collectives.backends.tcp.wires import Queue
from collectives.lowering.edge_streams import Stream, row_of
from collectives.lowering.transfer_table import TransferTable, place_in
from collectives.peers.blame import Waiting
from collectives.peers.control_page import Scratch

CALLS = 1 << 32
"""Collectives are counted modulo this."""

CACHE_LINE = 64

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class FlowProgram:
    """What one rank sends and receives in a collective, as `loops.flow` takes it.

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
    parts: tuple[Stream, ...]
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
        cls, call: Call[Any], rank: int, lane_of: Callable[[Stream], Queue], flight_bytes: int
    ) -> FlowProgram:
        """The program of calls like one.

        Parameters
        ----------
        call : Call
            With the arrays of one rank, at which nothing looks.
        rank : int
        lane_of : callable
            The link that carries a stream (see `collectives.backends.tcp.wires`).
        flight_bytes : int
            Window of a held stream, at least `Stream.window` chunks.
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
        streams = np.zeros((len(mine), len(loops.STREAM_COLUMNS)), dtype=np.int64)
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
        lanes = np.zeros((len(links), loops.LANE), dtype=np.int64)
        for place, link in enumerate(links):
            numbers = [number for number, (lane, _, _) in enumerate(carried) if lane == link]
            left = sum(mine[number].stream.chunks for number in numbers)
            lanes[place, : loops.PACE] = -1, link[0] == rank, numbers[0], numbers[-1] + 1, left
            buffers += link[1] == rank
        lanes[:, loops.STREAM] = -1
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


class Flow:
    """Collectives of one kind on one rank, one after another; each begins with `begin` and is over with `end`.

    Only the thread of the collective calls what moves chunks; others may ask what it waits for meanwhile.

    Parameters
    ----------
    program : FlowProgram
    table : TransferTable
        The one that it was made from.
    scratch : Scratch
        Memory that nothing else uses from the beginning of a collective to its end.
    bell : int
        Descriptor that is ready to be read when there is something else to look at.

    Attributes
    ----------
    status : int
        How the last call of `loops.flow` ended.
    """

    def __init__(self, program: FlowProgram, table: TransferTable, scratch: Scratch, bell: int) -> None:
        self.program = program
        self.status = WAITING
        self._table = table
        self._scratch = scratch
        self._chunks = int(program.streams[:, loops.CHUNKS].sum())
        self._lanes = program.lanes.copy()
        self._state = np.zeros((len(program.streams), 3), dtype=np.int64)
        self._kept = np.zeros(program.keeps, dtype=np.int64)
        self._all_free = np.arange(program.buffers, dtype=np.int64)
        self._free = self._all_free.copy()
        self._polled = np.zeros((len(program.lanes) + 1, 4), dtype=np.int16)
        self._polled.view(np.int32)[0, 0] = bell
        self._polled[0, 2] = loops.READ
        self._frame = np.zeros(loops.FLOW_FRAME, dtype=np.int64)
        self._times = np.zeros((0, 2), dtype=np.int64)
        self.end()

    def reset(self) -> None:
        """Stand where a collective begins."""
        self._lanes[:] = self.program.lanes
        self._state[:] = 0
        self._free[:] = self._all_free

    def end(self) -> None:
        """Let go of the arrays."""
        self._lines: Lines | None = None

    def begin(self, call: Call[Any], *, traced: bool = False) -> None:
        """Begin a collective after `reset`, with the arrays of the rank; traced, `arrivals` can be asked for."""
        program = self.program
        partial = program.partial_elements * call.itemsize
        partial += -partial % CACHE_LINE
        room = self._scratch.of(partial + program.buffers * program.buffer_bytes)
        self._lines = lines = lines_of(call)
        self._times = np.zeros((self._chunks if traced else 0, 2), dtype=np.int64)
        self._frame[loops.LEFT : loops.TOUCHED + 1] = (
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
            if self._lanes[place, loops.DESCRIPTOR] < 0:
                self._lanes[place, loops.DESCRIPTOR] = descriptor(link)
                self._lanes[place, loops.PACE] = max(1, round(paces[link])) if link in paces else 0

    def go_on(self) -> None:
        """Move the chunks of what was begun until all is done, or there is something to look at: see `status`."""
        program = self.program
        while True:
            self.status = int(
                loops.flow(
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
        return bool(self._frame[loops.LEFT] == 0)

    def arrivals(self) -> Iterator[tuple[Queue, Stream, int, int, int]]:
        """The chunks that came: link, stream, chunk, and when each began to come and was there, in nanoseconds."""
        for lane, link in zip(self._lanes, self.program.links, strict=True):
            for place in range(lane[loops.FIRST_STREAM], lane[loops.LAST_STREAM]):
                if link[1] == self.program.rank:
                    first, stream = self.program.streams[place, loops.FIRST_CHUNK], self.program.parts[place]
                    for chunk, (start, end) in enumerate(self._times[first:][: stream.chunks].tolist()):
                        yield link, stream, chunk, start, end

    @property
    def touched(self) -> float:
        """When something moved last, on the steady clock."""
        return float(self._frame[loops.TOUCHED]) / 1e9

    def trouble(self) -> tuple[int, str]:
        """The peer with which a call failed, and how."""
        link = self.program.links[self._frame[loops.TROUBLE]]
        leaves = link[0] == self.program.rank
        peer = link[1] if leaves else link[0]
        if self.status == STRANGE:
            call, number, chunk, nbytes = self._lanes[self._frame[loops.TROUBLE], loops.HEADER : loops.CREDIT]
            return peer, (
                f"rank {peer} sent chunk {chunk} of stream {number} of collective {call} with {nbytes} bytes, "
                "which is not expected now"
            )
        if self.status == PEER_ENDED:
            return peer, f"rank {peer} closed its connection"
        error = os.strerror(int(self._frame.view(np.int32)[2 * loops.ERROR :][:2].sum()))
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

    def _first_missing(self, peer: int | None) -> tuple[Stream, int] | None:
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
        place, lines = int(self._frame[loops.ASIDE]), self._lines
        assert lines is not None, "between begin and end"
        row, room, itemsize = self.program.streams[place], self._scratch.of(0), lines.arithmetic.itemsize
        as_elements = lines.arithmetic.as_elements
        number = int(self._state[place, DONE])
        first = number * self._table.chunk_elements
        elements = min(self._table.chunk_elements, int(row[loops.LENGTH_OF]) - first)
        buffer = self._kept[row[loops.KEPT] + number % row[loops.KEEPS]]
        begin = self._frame[loops.BUFFERS_AT] - room.address + buffer * self.program.buffer_bytes
        arrived = as_elements(room.data[begin:][: elements * itemsize])
        own = lines.source[row[loops.FIRST] + first :][:elements]
        if row[loops.SLOTS]:
            sums = as_elements(room.data[: self.program.partial_elements * itemsize])
            target = sums[row[loops.PLACE] + number % row[loops.SLOTS] * row[loops.SLOT] :][:elements]
        else:
            target = lines.result[row[loops.PLACE] + first :][:elements]
        with np.errstate(all="ignore"):
            lines.arithmetic.combine(own if row[loops.OWN] else target, arrived, out=target)
        self._frame[loops.DONE_ASIDE] = 1


def _longest(stream: Stream, table: TransferTable) -> int:
    """Elements of the longest chunk of a stream."""
    return min(table.chunk_elements, stream.stop - stream.start)
