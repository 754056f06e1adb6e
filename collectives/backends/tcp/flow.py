"""One collective on one rank while it runs: how far each stream is, what may go next, and who waits for whom.

Threads of links come here with every chunk. All of them share one lock, which nobody holds while bytes move or are
added.

Why this cannot deadlock. Receivers never wait for anything but their connection: a chunk that arrives is joined at
once, or kept until what precedes it has been joined, by whoever joins that. So every connection always drains. Look at
the chunk that is first, by (part of its shard that lies before it, stream), among all that have not been joined
anywhere. What must precede it at its source and at its destination is of the same shard, and comes earlier in this
order: the same chunk of earlier streams, or earlier chunks where partial sums are bounded. All that is done. Its window
is open, for it is counted from earlier chunks of its own stream, whose joining was told. So nothing holds it, and
sooner or later it is sent, arrives and is joined.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.backends.backend import Call
from collectives.backends.tcp.memory import Memory, Spare
from collectives.backends.tcp.order import Order, orders
from collectives.backends.tcp.wires import Queue
from collectives.lowering.edge_streams import Stream, row_of
from collectives.peers.blame import Waiting

Credit = Callable[[Stream, int], None]
"""Tells the source of a stream how many of its chunks have been joined here."""


class Flow:
    """The streams of a collective that begin or end at one rank.

    Parameters
    ----------
    call : Call
    rank : int
    over : threading.Condition
        Of the back end: its lock guards everything here, and it is told when the collective is finished.
    spare : Spare
        Buffers for what arrives and cannot go straight to its place.
    credit : callable
        Called without the lock.
    flight_bytes : int
        Window of a held stream, at least `Stream.window` chunks.
    lane_of : callable
        The connection that carries a stream (see `collectives.backends.tcp.wires`).
    """

    def __init__(
        self,
        call: Call[NDArray[Any]],
        rank: int,
        *,
        over: threading.Condition,
        spare: Spare,
        credit: Credit,
        flight_bytes: int,
        lane_of: Callable[[Stream], Queue],
    ) -> None:
        signature = call.signature
        found = orders(call.table, signature.collective, signature.root)
        mine = [one for one in found if rank in (one.stream.source, one.stream.destination)]
        self.number = signature.call
        self.rank = rank
        self.over = over
        self.touched = time.monotonic()
        self.stopped = False
        self.lanes: dict[Queue, list[Stream]] = {}
        self._table = call.table
        self._orders: dict[int, Order] = {one.stream.number: one for one in mine}
        self.lane_of = {one.stream.number: lane_of(one.stream) for one in mine}
        self._memory = Memory(call, (one for one in mine if one.stream.destination == rank))
        self._spare = spare
        self._credit = credit
        self._done = dict.fromkeys(self._orders, 0)
        self._credited = dict.fromkeys(self._orders, 0)
        self._joining: set[int] = set()
        self._in_hand: set[int] = set()
        self._kept: dict[int, deque[NDArray[np.uint8]]] = {}
        self._wakes: dict[int, list[Queue]] = {number: [] for number in self._orders}
        self._frees: dict[int, list[int]] = {number: [] for number in self._orders}
        self._conditions: Mapping[Queue, threading.Condition] = {}
        self._left = sum(one.stream.chunks for one in mine)
        chunk = min(call.table.chunk_elements, max((s.stop - s.start for s in self._streams()), default=0))
        spare.resize(chunk * call.itemsize)
        self._flight = -(-flight_bytes // max(1, chunk * call.itemsize))
        for one in mine:
            stream = one.stream
            if stream.source == rank:
                lane = self.lane_of[stream.number]
                self.lanes.setdefault(lane, []).append(stream)
                if one.written is not None:
                    self._wakes[one.written].append(lane)
            else:
                self._kept[stream.number] = deque()
                for earlier, _ in one.before:
                    self._frees[earlier].append(stream.number)

    def _streams(self) -> list[Stream]:
        return [one.stream for one in self._orders.values()]

    @property
    def finished(self) -> bool:
        """Whether this rank has sent and joined everything; called with the lock."""
        return self._left == 0

    def touch(self) -> None:
        """Something has arrived."""
        self.touched = time.monotonic()

    def attach(self, conditions: Mapping[Queue, threading.Condition]) -> None:
        """Name the condition on which the sender of each link waits."""
        with self.over:
            self._conditions = conditions

    def stop(self) -> None:
        """Let all threads leave."""
        with self.over:
            self.stopped = True
            for condition in self._conditions.values():
                condition.notify_all()
            self.over.notify_all()

    def next(self, lane: Queue, condition: threading.Condition) -> tuple[Stream, int, memoryview] | None:
        """The chunk that a link sends next, its bytes with it; waits for it. None when there is no more."""
        streams = self.lanes[lane]
        with self.over:
            while not self.stopped:
                unsent = [s for s in streams if self._done[s.number] < s.chunks]
                if not unsent:
                    return None
                ready = [s for s in unsent if self._may_send(s)]
                if ready:
                    # all shards advance in proportion: one that ends early would leave its links idle
                    stream = min(ready, key=lambda s: (self._done[s.number] / s.chunks, s.number))
                    chunk = self._done[stream.number]
                    self._in_hand.add(stream.number)
                    return stream, chunk, self._memory.outgoing(stream, chunk)
                condition.wait()
        return None

    def sent(self, stream: Stream) -> None:
        """The bytes of a stream's next chunk have been handed to the system."""
        with self.over:
            self._in_hand.discard(stream.number)
            self._count(stream)
        self._join_what_can_be(self._frees[stream.number])

    def credited(self, number: int, joined: int) -> None:
        """The destination of a stream has joined so many of its chunks."""
        with self.over:
            if joined > self._credited.get(number, joined):
                self._credited[number] = joined
                self._notify(self.lane_of[number])

    def place(self, number: int, chunk: int, length: int, source: int) -> tuple[Stream, memoryview, Any]:
        """Where to read a chunk that is arriving: its own place, or a buffer, which is returned as well.

        Raises
        ------
        ValueError
            No such chunk is expected from that rank now.
        """
        order = self._orders.get(number)
        if order is None or order.stream.source != source:
            raise ValueError(f"stream {number}, which does not run from rank {source} to rank {self.rank}")
        stream = order.stream
        with self.over:
            due = self._come(number)
            direct = not stream.add and due == self._done[number] and self._may_join(order, chunk)
        if chunk != due or length != self._memory.length(stream, chunk):
            raise ValueError(f"chunk {chunk} of stream {number} with {length} bytes instead of chunk {due}")
        if direct:
            return stream, self._memory.place(stream, chunk), None
        buffer = self._spare.take()
        return stream, memoryview(buffer.data)[:length], buffer

    def arrived(self, stream: Stream, buffer: NDArray[np.uint8] | None) -> None:
        """The bytes of a stream's next chunk are where `place` said."""
        if buffer is None:
            with self.over:
                done = self._count(stream)
            self._tell(stream, done)
            self._join_what_can_be(self._frees[stream.number])
        else:
            with self.over:
                self._kept[stream.number].append(buffer)
            self._join_what_can_be([stream.number])

    def waiting(self) -> Waiting:
        """What this rank waits for: the first chunk that has not come, else the first that has not left."""
        with self.over:
            found = self._first_missing(None)
        idle = time.monotonic() - self.touched
        if found is None:
            return Waiting(None, None, idle)
        stream, chunk = found
        peer = stream.source if stream.destination == self.rank else stream.destination
        return Waiting(peer, row_of(self._table, stream.number, chunk), idle)

    def step(self, peer: int) -> int | None:
        """The row of the first chunk that has not come from a rank, else of the first that has not left for it."""
        with self.over:
            found = self._first_missing(peer)
        return None if found is None else row_of(self._table, found[0].number, found[1])

    def stops_at(self, peer: int | None) -> int | None:
        """The row at which this rank stops because of another, else the one that it waits for anyway."""
        step = None if peer is None else self.step(peer)
        return self.waiting().step if step is None else step

    def needs(self, lane: Queue) -> bool:
        """Whether chunks have yet to come over a link, or to be given to the system for it."""
        with self.over:
            return any(
                self._come(s.number) < s.chunks
                if s.destination == self.rank
                else self._done[s.number] + (s.number in self._in_hand) < s.chunks
                for s in self._streams()
                if self.lane_of[s.number] == lane
            )

    def _first_missing(self, peer: int | None) -> tuple[Stream, int] | None:
        """The first chunk that has not come from a rank, or any, else the first that has not left."""
        rows = []
        for stream in self._streams():
            number, leaves = stream.number, stream.source == self.rank
            chunk = self._done[number] if leaves else self._come(number)
            if chunk < stream.chunks and peer in (None, stream.source, stream.destination):
                rows.append((leaves, chunk, number))
        if not rows:
            return None
        _, chunk, number = min(rows)
        return self._orders[number].stream, chunk

    def _come(self, number: int) -> int:
        """Chunks of a stream that have arrived here."""
        return self._done[number] + len(self._kept[number]) + (number in self._joining)

    def _may_send(self, stream: Stream) -> bool:
        order = self._orders[stream.number]
        chunk = self._done[stream.number]
        if order.written is not None and self._done[order.written] <= chunk:
            return False
        window = max(stream.window, self._flight)
        return not order.held or chunk < self._credited[stream.number] + window

    def _may_join(self, order: Order, chunk: int) -> bool:
        return all(self._done[earlier] > chunk - lag for earlier, lag in order.before)

    def _count(self, stream: Stream) -> int:
        """A chunk of a stream is done here; how many that makes. Called with the lock."""
        self._done[stream.number] += 1
        self._left -= 1
        self.touched = time.monotonic()
        for lane in self._wakes[stream.number]:
            self._notify(lane)
        if self._left == 0:
            self.over.notify_all()
        return self._done[stream.number]

    def _notify(self, lane: Queue) -> None:
        if lane in self._conditions:
            self._conditions[lane].notify()

    def _join_what_can_be(self, numbers: Sequence[int]) -> None:
        """Join kept chunks of these streams, and those that this makes possible.

        A stream is joined by one thread at a time, which looks again when it is through, so none is overlooked.
        """
        work = list(numbers)
        while work:
            number = work.pop()
            order = self._orders[number]
            with self.over:
                chunk = self._done[number]
                if number in self._joining or not self._kept[number] or not self._may_join(order, chunk):
                    continue
                buffer = self._kept[number].popleft()
                self._joining.add(number)
            self._memory.join(order.stream, chunk, buffer)
            self._spare.give(buffer)
            with self.over:
                self._joining.discard(number)
                done = self._count(order.stream)
            self._tell(order.stream, done)
            work += [number, *self._frees[number]]

    def _tell(self, stream: Stream, done: int) -> None:
        """Credit the source of a held stream, often enough that its window never closes without need."""
        if not self._orders[stream.number].held:
            return
        window = max(stream.window, self._flight)
        if done < stream.chunks and (window < 4 or done % (window // 4) == 0):
            self._credit(stream, done)
