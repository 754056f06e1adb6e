"""Run the barrier of a rank, and move the chunks of a collective over its links, as machine code.

A barrier stands alone, or runs beside the chunks: ranks whose links are open move chunks before the last rank has come.
Both are one call that releases the interpreter lock, sleeps while nothing moves, and returns after `CALL_NANOSECONDS`,
or when the rank is woken, so that Python can check whether the peers live. The state lies in arrays, so the next call
continues there. Joins are numpy's own loops (`numpy_arrays.loop_of`).

Both yield the processor for a short while before they sleep, as ranks in shared memory do
(`collectives.backends.shared.compiled_program`).
"""

from __future__ import annotations

import errno
import select
import socket
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.peers.control_page import SHOWABLE
from collectives.peers.control_plane import LENGTH
from collectives.tables.compiled import (
    Records,
    Word,
    call_numpy,
    compiled,
    compiled_by_one,
    from_system,
    words,
)

TAKEN_NUMBERS = 955512967
"""A checksum of the numbers imported here: cached machine code depends on this file alone."""

ENDED, WAITING, DIFFERS, PEER_ENDED, BROKEN, STRANGE, BY_PYTHON, NOT_MET = range(8)
"""Results of a call: done; waiting; a peer calls another collective; a connection has ended; the system reports an
error; an unexpected chunk came; a join is left to Python; the barrier beside the chunks cannot end."""

CALL_NANOSECONDS = 20_000_000
"""Nanoseconds after which a call returns in any case."""

# numba compiles a loop again for each literal among its arguments; these have the type of computed values
BUSY: Any = np.bool_(False)
"""A rank is not idle before its first look at the links."""

BEHIND_WAKER = np.int64(1)
"""The first place of `polled` behind that which wakes the rank."""

YIELDING, EATEN, RESPITE, LONGEST_RESPITE = 200_000, 500_000, 32, 320_000_000
"""See `collectives.backends.shared.compiled_program`."""

OPENING_BYTES = 256 << 10
"""Bytes of a held stream that may be under way before its link is known to be long."""

PROMPT = 1_000_000
"""Nanoseconds beyond two round trips after which a credit is late: its chunk waited in a queue, or for its join."""

LINGERING = 50_000
"""Nanoseconds for which a rank yields its processor before it sleeps while chunks move."""


_HEAD = [("errno", np.int32), ("unused", np.int32), *words(("clock", 2))]
"""Begins the state of a barrier and of an exchange: the system's last error, and a time."""

BARRIER = np.dtype(
    [
        *_HEAD,
        *words(
            "round",
            "sent",  # bytes of the round
            "got",
            "rank",
            "ranks",
            "given",  # bytes of each input
            "source",  # address of the input
            "outbox",  # addresses of the outgoing note, the incoming note and all inputs in the end
            "inbox",
            "shown",
            "rests",  # when the processor may be yielded again
            "met_at",  # when all ranks had come
        ),
    ]
)
"""The state of a barrier."""

STREAM = np.dtype(
    words(
        "number",  # the same on all ranks
        "first",  # first element in the rank's input
        "length",  # elements
        "chunk",  # elements of a chunk
        "chunks",
        "adds",  # arriving chunks are added
        "own",  # the rank has received nothing yet there: it sends its input, or adds to it
        "place",  # first element in the result, or among the partial sums
        "slots",  # partial sums, 0 for the result
        "slot",  # elements of a partial sum
        "written",  # stream that must have been joined here before a chunk is sent, or -1
        "window",  # chunks that may be under way, or 0 for all
        "opening",  # of them, as many as may be under way at first
        "first_before",  # rows of `befores` that must precede a join
        "last_before",
        "kept",  # first place of the ring of arrived buffers
        "keeps",  # places of that ring
        "first_chunk",  # number of its first chunk among those of all streams
    )
)
"""A stream at one of its ends. Streams are sorted by link."""

BEFORE = np.dtype(words("stream", "lag"))
"""A chunk may be joined once the stream has done the chunk so many before it."""

PROGRESS = np.dtype(
    words(
        "done",  # chunks that were sent or joined
        "come",  # that arrived
        "credited",  # that the destination has joined, as it says
        "timed",  # chunks up to that whose credit is timed, 0 for none
        "timed_at",  # when that chunk left
        "shut",  # the limit has held back a chunk since then
        "limit",  # chunks that may be under way now; kept for later calls
    )
)
"""The state of a stream; a limit grows from `opening` to `window`."""

LINK = np.dtype(
    words(
        "descriptor",  # of the connection, -1 before it is open
        "leaves",  # chunks leave here
        "first_stream",
        "last_stream",  # exclusive
        "left",  # chunks that have yet to be moved
        "pace",  # bytes per second, 0 for no limit
        "over",  # when the next chunk may leave
        "stream",  # of the chunk that is being moved, -1 for none; so are the next five
        "moved",  # bytes of header and chunk
        "at",  # address
        "bytes",
        "buffer",  # in which it arrives, -1 for its own place
        "back",  # bytes of a credit that have come
        "came_at",  # when the chunk began to come
        "touched",  # time of the last progress, 0 before the first
        ("header", 4),  # call, stream, chunk, bytes
        ("credit", 3),  # call, stream, chunks joined
    )
)
"""A link of the rank."""

EXCHANGE = np.dtype(
    [
        *_HEAD,
        *words(
            "left",  # chunks that have yet to be sent or joined
            "call",  # number of the collective
            "item",  # bytes of an element
            "given_at",  # addresses
            "result_at",
            "partial_at",
            "buffers_at",
            "buffer_bytes",
            "free",  # free buffers
            "kept_chunks",  # arrived chunks that wait for their join
            "join",  # address of the loop that joins, 0 for Python
            "join_data",  # numpy's data of that loop
            "aside",  # stream whose chunk Python must join
            "done_aside",  # Python has joined it
            "touched",  # time of the last progress
            "trouble",  # link that ended the call
            "rests",  # when the processor may be yielded again
            "shut",  # a window was found closed
            ("arguments", 7),  # of numpy's loops
            ("message", 7),  # a message of the system (``struct msghdr``)
            ("parts", 4),  # and its two parts
            ("info", 20),  # of the system on a connection (``struct tcp_info``), and before it its length
        ),
    ]
)
"""The state of an exchange."""


def _offset(record: np.dtype[np.void], name: str) -> int:
    assert record.fields is not None
    return record.fields[name][1]


def word_of(record: np.dtype[np.void], name: str) -> int:
    """Return the place of a field among the words of its record."""
    return _offset(record, name) // 8


HEADER_BYTES, CREDIT_BYTES = LINK["header"].itemsize, LINK["credit"].itemsize
LINK_BYTES, HEADER_AT, CREDIT_AT = LINK.itemsize, _offset(LINK, "header"), _offset(LINK, "credit")
CLOCK_AT, ARGUMENTS_AT, MESSAGE_AT, INFO_AT = (
    _offset(EXCHANGE, name) for name in ("clock", "arguments", "message", "info")
)

WOULD_WAIT = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR)
SEND_FLAGS = int(getattr(socket, "MSG_DONTWAIT", 0)) | int(getattr(socket, "MSG_NOSIGNAL", 0))
RECEIVE_FLAGS = int(getattr(socket, "MSG_DONTWAIT", 0))
MEASURES = sys.platform == "linux" and sys.byteorder == "little"
TCP, TCP_INFO = int(socket.IPPROTO_TCP), int(getattr(socket, "TCP_INFO", 0))
INFO_BYTES, ROUND_TRIP_WORD = 152, 18
"""In Linux's ``struct tcp_info``: its bytes up to tcpi_min_rtt, in microseconds; the word whose upper half that is."""
READ, WRITE = int(select.POLLIN), int(select.POLLOUT)

_send = from_system("send", arguments=4)
_sendmsg = from_system("sendmsg", arguments=3)
_recv = from_system("recv", arguments=4)
_getsockopt = from_system("getsockopt", arguments=5)
_poll = from_system("poll", arguments=3)
_sched_yield = from_system("sched_yield", arguments=0)
_clock_gettime = from_system("clock_gettime", arguments=2)
_memcpy = from_system("memcpy", arguments=3)
_memcmp = from_system("memcmp", arguments=3)
_error_location = from_system("__error" if sys.platform == "darwin" else "__errno_location", arguments=0)

Numbers = NDArray[np.int64]


@compiled
def barrier(rounds: Numbers, frame: Records, polled: NDArray[np.int16]) -> Word:
    """Continue a barrier; return ``ENDED``, ``WAITING``, ``DIFFERS`` or ``PEER_ENDED``.

    `rounds` has for each of log2 N rounds the file descriptors of the connections to send on and to receive on.
    `polled` has (3, 4) numbers, of the wakeup, the receiving connection and the sending one: the descriptor in two
    numbers, the awaited events, and the events.
    """
    state = frame[0]
    given, ranks = state.given, state.ranks
    if state.round == 0 and state.sent == 0 and given > 0:
        _memcpy(state.outbox + LENGTH, state.source, given)
    began = now = _now(frame)
    idle, rounds_done = began, state.round
    status = _advance_barrier(rounds, frame)
    while status == WAITING:
        now = _now(frame)
        if now - began >= CALL_NANOSECONDS:
            return WAITING
        if state.round > rounds_done:
            idle, rounds_done = now, state.round
        if now >= state.rests and now - idle < YIELDING:
            state.rests = _lend(frame, now)
        elif _sleep_in_barrier(rounds, frame, polled, CALL_NANOSECONDS - (now - began)):
            return WAITING
        status = _advance_barrier(rounds, frame)
    if status == ENDED and given > 0:
        for rank in range(ranks):
            place = (state.rank - rank) % ranks
            _memcpy(state.shown + rank * 2 * SHOWABLE, state.outbox + LENGTH + place * given, given)
    return status


@compiled
def _advance_barrier(rounds: Numbers, frame: Records) -> Word:
    """Continue a barrier as far as its connections allow without a wait; return as `barrier`."""
    state = frame[0]
    moved = True
    while state.round < len(rounds):
        if not moved:
            return WAITING
        moved = False
        length = _barrier_bytes(frame)
        if state.sent < length:
            done = _send(rounds[state.round, 0], state.outbox + state.sent, length - state.sent, SEND_FLAGS)
            if done < 0 and not _would_wait(frame):
                return PEER_ENDED
            if done > 0:
                state.sent += done
                moved = True
        if state.got < length:
            done = _recv(rounds[state.round, 1], state.inbox + state.got, length - state.got, RECEIVE_FLAGS)
            if done == 0 or (done < 0 and not _would_wait(frame)):
                return PEER_ENDED
            if done > 0:
                state.got += done
                moved = True
        if state.got >= LENGTH and _memcmp(state.inbox, state.outbox, LENGTH) & 0xFFFFFFFF:
            return DIFFERS
        if state.sent == length and state.got == length:
            held = (1 << state.round) * state.given
            _memcpy(state.outbox + LENGTH + held, state.inbox + LENGTH, length - LENGTH)
            state.round += 1
            state.sent = state.got = 0
            state.met_at = _now(frame)
            moved = True
    return ENDED


@compiled
def _barrier_bytes(frame: Records) -> Word:
    """Return the bytes of a message in the current round of a barrier."""
    state = frame[0]
    distance = 1 << state.round
    return LENGTH + min(distance, state.ranks - distance) * state.given


@compiled
def _sleep_in_barrier(rounds: Numbers, frame: Records, polled: NDArray[np.int16], nanoseconds: Word) -> bool:
    """Sleep until a connection is ready; return whether the rank was woken instead."""
    _await_barrier(rounds, frame, polled, BEHIND_WAKER)
    polled[:, 3] = 0
    _poll(polled.ctypes.data, 3, nanoseconds // 1_000_000 + 1)
    woken: bool = polled[0, 3] != 0
    return woken


@compiled
def _await_barrier(rounds: Numbers, frame: Records, polled: NDArray[np.int16], place: Word) -> None:
    """Await the connections of a barrier's round, at two places of `polled`."""
    state = frame[0]
    connections = polled.view(np.int32)
    length = _barrier_bytes(frame)
    connections[place, 0] = rounds[state.round, 1]
    connections[place + 1, 0] = rounds[state.round, 0]
    polled[place, 2] = READ if state.got < length else 0
    polled[place + 1, 2] = WRITE if state.sent < length else 0


@compiled
def exchange(
    streams: Records,
    befores: Records,
    links: Records,
    progress: Records,
    kept: Numbers,
    free: Numbers,
    frame: Records,
    polled: NDArray[np.int16],
    times: Numbers,
    counts: Numbers,
    rounds: Numbers,
    meeting: Records,
) -> Word:
    """Continue to send and receive the chunks of one rank, and a barrier beside them.

    Returns ``ENDED`` once both have ended, ``WAITING``, ``PEER_ENDED``, ``BROKEN``, ``STRANGE``, ``BY_PYTHON``, or
    ``NOT_MET`` if `barrier` has the reason.

    - `streams`: (S,) of `STREAM`; `links`: (L,) of `LINK`; `progress`: (S,) of `PROGRESS`; `frame`: one `EXCHANGE`.
    - `befores`: (B,) of `BEFORE`.
    - `kept`: the buffers in which arrived chunks wait, for each stream a ring.
    - `free`: the free buffers; the last one returned is taken first, for the cache.
    - `polled`: (L + 3, 4), the wakeup, each link that has more to move, and the barrier (see `barrier`).
    - `times`: (C, 2), for each arriving chunk when it began to arrive and when it was complete; or empty.
    - `counts`: (L, 2), bytes of chunks that this end of each link has sent or received, and of credits.
    - `rounds`, `meeting`: the barrier as `barrier` takes it, without inputs; no rounds if the ranks have met.
    """
    state = frame[0]
    began = now = _now(frame)
    idle = BUSY
    if state.kept_chunks > 0 and not _join_kept(streams, befores, links, progress, kept, free, frame, counts):
        return BY_PYTHON
    meets = meeting[0].round < len(rounds)
    while state.left > 0 or meets:
        moved = False
        if meets:
            before = meeting[0].round
            status = _advance_barrier(rounds, meeting)
            if status not in (ENDED, WAITING):
                return NOT_MET
            meets = status == WAITING
            moved = meeting[0].round > before
        for link in range(len(links)):
            if links[link].descriptor < 0 or links[link].left == 0:
                continue
            if links[link].leaves:
                status = _send_chunk(streams, links, progress, frame, counts, link, now, idle)
            else:
                status = _receive_chunk(
                    streams, befores, links, progress, kept, free, frame, times, counts, link
                )
            if status == ENDED:
                moved = True
                links[link].touched = now
                if state.kept_chunks > 0 and not _join_kept(
                    streams, befores, links, progress, kept, free, frame, counts
                ):
                    return BY_PYTHON
            elif status != WAITING:
                state.trouble = link
                return status
        now = _now(frame)
        if moved:
            state.touched = now
        if now - began >= CALL_NANOSECONDS:
            return WAITING
        if not moved and idle:
            lingers = YIELDING if meets else LINGERING
            if now - state.touched < lingers and now >= state.rests:
                state.rests = _lend(frame, now)
            elif _sleep(links, polled, now, CALL_NANOSECONDS - (now - began), rounds, meeting):
                return WAITING
        idle = not moved
    return ENDED


@compiled
def _send_chunk(
    streams: Records,
    links: Records,
    progress: Records,
    frame: Records,
    counts: Numbers,
    link: Word,
    now: Word,
    idle: bool,
) -> Word:
    """Send some of a link's next chunk: ``ENDED`` if anything moved, else as `exchange`."""
    state = frame[0]
    if links[link].stream < 0:
        if links[link].over > now:
            return WAITING
        stream = _next(streams, links, progress, frame, link)
        if state.shut or (stream < 0 and idle):
            # this also detects a peer that has ended, so it runs before every sleep
            status = _take_credits(streams, links, progress, frame, counts, link)
            if status not in (ENDED, WAITING):
                return status
            if status == ENDED:
                stream = _next(streams, links, progress, frame, link)
        if stream < 0:
            return WAITING
        chunk = progress[stream].done
        length = _bytes(streams, frame, stream, chunk)
        links[link].at = _own(streams, frame, stream, chunk)
        if streams[stream].window > 0 and progress[stream].timed == 0:
            progress[stream].timed, progress[stream].timed_at = chunk + 1, now
        links[link].stream, links[link].bytes, links[link].moved = stream, length, 0
        links[link].header[0], links[link].header[1] = state.call, streams[stream].number
        links[link].header[2], links[link].header[3] = chunk, length
        if links[link].pace > 0:
            # make up for a little: sleeps are longer than asked for
            base = max(links[link].over, now - 2_000_000)
            links[link].over = base + length * 1_000_000_000 // links[link].pace
    stream, length, moved = links[link].stream, links[link].bytes, links[link].moved
    address = frame.ctypes.data + MESSAGE_AT
    of_header = max(HEADER_BYTES - moved, 0)
    state.message[2], state.message[3] = address + 56, 2
    state.parts[0] = links.ctypes.data + link * LINK_BYTES + HEADER_AT + HEADER_BYTES - of_header
    state.parts[1] = of_header
    state.parts[2] = links[link].at + moved + of_header - HEADER_BYTES
    state.parts[3] = length - (moved + of_header - HEADER_BYTES)
    done = _sendmsg(links[link].descriptor, address, SEND_FLAGS)
    if done < 0:
        return WAITING if _would_wait(frame) else BROKEN
    links[link].moved += done
    counts[link, 0] += done
    if moved + done == HEADER_BYTES + length:
        links[link].stream = -1
        links[link].left -= 1
        progress[stream].done += 1
        state.left -= 1
    return ENDED


@compiled
def _next(streams: Records, links: Records, progress: Records, frame: Records, link: Word) -> Word:
    """Return the stream whose chunk leaves next, -1 if none may; note whether a window is closed.

    All shards advance in proportion: one that ends early would leave its links idle.
    """
    state = frame[0]
    found = -1
    state.shut = 0
    for stream in range(links[link].first_stream, links[link].last_stream):
        chunk, chunks, written = progress[stream].done, streams[stream].chunks, streams[stream].written
        if chunk == chunks or (written >= 0 and progress[written].done <= chunk):
            continue
        if streams[stream].window > 0 and chunk >= progress[stream].credited + progress[stream].limit:
            state.shut = progress[stream].shut = 1
            continue
        if found < 0 or chunk * streams[found].chunks < progress[found].done * chunks:
            found = stream
    return found


@compiled
def _take_credits(
    streams: Records, links: Records, progress: Records, frame: Records, counts: Numbers, link: Word
) -> Word:
    """Read how many of this rank's chunks have been joined: ``ENDED`` if a credit came, else as `exchange`."""
    state = frame[0]
    address = links.ctypes.data + link * LINK_BYTES + CREDIT_AT
    came = WAITING
    while True:
        back = links[link].back
        done = _recv(links[link].descriptor, address + back, CREDIT_BYTES - back, RECEIVE_FLAGS)
        if done == 0:
            return PEER_ENDED
        if done < 0:
            return came if _would_wait(frame) else BROKEN
        came = ENDED
        counts[link, 1] += done
        links[link].back = (back + done) % CREDIT_BYTES
        # a late credit is of an earlier call
        if links[link].back == 0 and links[link].credit[0] == state.call:
            for stream in range(links[link].first_stream, links[link].last_stream):
                if streams[stream].number == links[link].credit[1]:
                    progress[stream].credited = max(progress[stream].credited, links[link].credit[2])
                    _widen(streams, links, progress, frame, link, stream)


@compiled
def _widen(
    streams: Records, links: Records, progress: Records, frame: Records, link: Word, stream: Word
) -> None:
    """Let more chunks of a stream be under way if its limit keeps them back though its credits are prompt.

    If a credit is late, the chunk waited for others at its destination, or in a queue of the network. More chunks would
    lengthen that queue, and delay or drop chunks of other streams.
    """
    window, timed = streams[stream].window, progress[stream].timed
    if window == 0 or timed == 0 or progress[stream].credited < timed:
        return
    if progress[stream].shut and progress[stream].limit < window:
        late = _now(frame) - progress[stream].timed_at - PROMPT
        if not MEASURES or late <= 2 * _round_trip(frame, links[link].descriptor):
            progress[stream].limit = min(window, 2 * progress[stream].limit)
    progress[stream].timed = progress[stream].shut = 0


@compiled
def _round_trip(frame: Records, descriptor: Word) -> Word:
    """Return the least nanoseconds from a packet to its acknowledgement on a connection; 0 if unknown."""
    state = frame[0]
    address = frame.ctypes.data + INFO_AT
    state.info[0], state.info[ROUND_TRIP_WORD + 1] = INFO_BYTES, 0
    _getsockopt(descriptor, TCP, TCP_INFO, address + 8, address)
    return (state.info[ROUND_TRIP_WORD + 1] >> 32) * 1_000


@compiled
def _receive_chunk(
    streams: Records,
    befores: Records,
    links: Records,
    progress: Records,
    kept: Numbers,
    free: Numbers,
    frame: Records,
    times: Numbers,
    counts: Numbers,
    link: Word,
) -> Word:
    """Receive some of a link's data: ``ENDED`` if anything moved, else as `exchange`."""
    state = frame[0]
    moved = links[link].moved
    status = WAITING
    if moved < HEADER_BYTES:
        status = ENDED
        header = links.ctypes.data + link * LINK_BYTES + HEADER_AT
        done = _recv(links[link].descriptor, header + moved, HEADER_BYTES - moved, RECEIVE_FLAGS)
        if done == 0:
            return PEER_ENDED
        if done < 0:
            return WAITING if _would_wait(frame) else BROKEN
        moved += done
        counts[link, 0] += done
        links[link].moved = moved
        if moved < HEADER_BYTES:
            return ENDED
        if not _expect(streams, befores, links, progress, free, frame, link):
            return STRANGE
        if len(times) > 0:
            links[link].came_at = _now(frame)
    stream, length = links[link].stream, links[link].bytes
    done = moved - HEADER_BYTES
    came = _recv(links[link].descriptor, links[link].at + done, length - done, RECEIVE_FLAGS)
    if came == 0:
        return PEER_ENDED
    if came < 0:
        return status if _would_wait(frame) else BROKEN
    links[link].moved += came
    counts[link, 0] += came
    if done + came == length:
        if len(times) > 0:
            number = streams[stream].first_chunk + progress[stream].come
            times[number, 0], times[number, 1] = links[link].came_at, _now(frame)
        buffer = links[link].buffer
        links[link].stream, links[link].moved = -1, 0
        links[link].left -= 1
        if buffer < 0:
            progress[stream].come += 1
            _count(streams, links, progress, frame, counts, stream)
        else:
            kept[streams[stream].kept + progress[stream].come % streams[stream].keeps] = buffer
            progress[stream].come += 1
            state.kept_chunks += 1
    return ENDED


@compiled
def _expect(
    streams: Records,
    befores: Records,
    links: Records,
    progress: Records,
    free: Numbers,
    frame: Records,
    link: Word,
) -> bool:
    """Find the place of a chunk whose header has come; return whether it is expected.

    It goes to its own place if that is free and nothing is added, else into a buffer.
    """
    state = frame[0]
    stream = links[link].first_stream
    while stream < links[link].last_stream and streams[stream].number != links[link].header[1]:
        stream += 1
    if links[link].header[0] != state.call or stream == links[link].last_stream:
        return False
    chunk = progress[stream].come
    if chunk == streams[stream].chunks or links[link].header[2] != chunk:
        return False
    if links[link].header[3] != _bytes(streams, frame, stream, chunk):
        return False
    links[link].stream, links[link].bytes = stream, links[link].header[3]
    waits = chunk - progress[stream].done
    if waits == 0 and not streams[stream].adds and _may_join(streams, befores, progress, stream, chunk):
        links[link].buffer = -1
        links[link].at = _place(streams, frame, stream, chunk)
        return True
    if waits == streams[stream].keeps:
        return False
    state.free -= 1
    links[link].buffer = free[state.free]
    links[link].at = state.buffers_at + links[link].buffer * state.buffer_bytes
    return True


@compiled
def _may_join(streams: Records, befores: Records, progress: Records, stream: Word, chunk: Word) -> bool:
    for number in range(streams[stream].first_before, streams[stream].last_before):
        if progress[befores[number].stream].done <= chunk - befores[number].lag:
            return False
    return True


@compiled
def _join_kept(
    streams: Records,
    befores: Records,
    links: Records,
    progress: Records,
    kept: Numbers,
    free: Numbers,
    frame: Records,
    counts: Numbers,
) -> bool:
    """Join what has arrived and may be joined; False if the next join is for Python."""
    state = frame[0]
    found = True
    first = state.aside if state.done_aside else 0
    while found and state.kept_chunks > 0:
        found = False
        for stream in range(first, len(streams)):
            chunk = progress[stream].done
            if streams[stream].keeps == 0 or progress[stream].come == chunk:
                continue
            if not _may_join(streams, befores, progress, stream, chunk):
                continue
            buffer = kept[streams[stream].kept + chunk % streams[stream].keeps]
            if state.done_aside == 0 and not _join(streams, frame, stream, chunk, buffer):
                state.aside = stream
                return False
            state.done_aside = 0
            free[state.free] = buffer
            state.free += 1
            state.kept_chunks -= 1
            _count(streams, links, progress, frame, counts, stream)
            found = True
        first = 0
    return True


@compiled
def _join(streams: Records, frame: Records, stream: Word, chunk: Word, buffer: Word) -> bool:
    """Add or store a chunk that lies in a buffer; return False if Python must."""
    state = frame[0]
    target = _place(streams, frame, stream, chunk)
    length = _bytes(streams, frame, stream, chunk)
    arrived = state.buffers_at + buffer * state.buffer_bytes
    if not streams[stream].adds:
        _memcpy(target, arrived, length)
        return True
    if state.join == 0:
        return False
    own = _own(streams, frame, stream, chunk)
    arguments = frame.ctypes.data + ARGUMENTS_AT
    state.arguments[0], state.arguments[1], state.arguments[2] = own, arrived, target
    state.arguments[3] = length // state.item
    # numpy rounds complex products of one element in place differently
    state.arguments[4:] = 0 if length == state.item and own == target else state.item
    call_numpy(state.join, arguments, arguments + 24, arguments + 32, state.join_data)
    return True


@compiled
def _count(
    streams: Records, links: Records, progress: Records, frame: Records, counts: Numbers, stream: Word
) -> None:
    """Count a joined chunk of a stream, and send its source a credit often enough that its window need not close."""
    state = frame[0]
    progress[stream].done += 1
    state.left -= 1
    done, opening = progress[stream].done, streams[stream].opening
    if opening == 0 or done == streams[stream].chunks or (opening >= 4 and done % (opening // 4) > 0):
        return
    link = 0
    while links[link].leaves or not links[link].first_stream <= stream < links[link].last_stream:
        link += 1
    # it never blocks: a source has at most a window under way, and reads when it must wait
    links[link].credit[0], links[link].credit[1] = state.call, streams[stream].number
    links[link].credit[2] = done
    sent = _send(
        links[link].descriptor,
        links.ctypes.data + link * LINK_BYTES + CREDIT_AT,
        CREDIT_BYTES,
        SEND_FLAGS,
    )
    counts[link, 1] += max(sent, 0)


@compiled
def _bytes(streams: Records, frame: Records, stream: Word, chunk: Word) -> Word:
    """Return the length of a chunk."""
    state = frame[0]
    left = streams[stream].length - chunk * streams[stream].chunk
    return min(streams[stream].chunk, left) * state.item


@compiled
def _own(streams: Records, frame: Records, stream: Word, chunk: Word) -> Word:
    """Return the address of this rank's values of a chunk: in its input, until it has received some."""
    state = frame[0]
    if streams[stream].own:
        return state.given_at + (streams[stream].first + chunk * streams[stream].chunk) * state.item
    return _place(streams, frame, stream, chunk)


@compiled
def _place(streams: Records, frame: Records, stream: Word, chunk: Word) -> Word:
    """Return the address of a chunk in the rank's result, or among its partial sums."""
    state = frame[0]
    slots, place = streams[stream].slots, streams[stream].place
    if slots > 0:
        return state.partial_at + (place + chunk % slots * streams[stream].slot) * state.item
    return state.result_at + (place + chunk * streams[stream].chunk) * state.item


@compiled
def _sleep(
    links: Records,
    polled: NDArray[np.int16],
    now: Word,
    nanoseconds: Word,
    rounds: Numbers,
    meeting: Records,
) -> bool:
    """Sleep until something can move; return whether the rank was woken instead."""
    connections = polled.view(np.int32)
    count = 1
    for link in range(len(links)):
        if links[link].descriptor < 0 or links[link].left == 0:
            continue
        in_hand = links[link].leaves and links[link].stream >= 0
        if links[link].over > now and not in_hand:
            # credits are not read before the next chunk may leave
            nanoseconds = min(nanoseconds, links[link].over - now)
            continue
        connections[count, 0] = links[link].descriptor
        polled[count, 2] = WRITE if in_hand else READ
        count += 1
    if meeting[0].round < len(rounds):
        _await_barrier(rounds, meeting, polled, count)
        count += 2
    polled[:count, 3] = 0
    _poll(polled.ctypes.data, count, (nanoseconds + 999_999) // 1_000_000)
    woken: bool = polled[0, 3] != 0
    return woken


@compiled
def _lend(frame: Records, now: Word) -> Word:
    """Yield the processor once; return when that may be done again, which a neighbour that takes it puts off."""
    _sched_yield()
    eaten = _now(frame) - now
    return now + eaten + min(RESPITE * eaten, LONGEST_RESPITE) if eaten > EATEN else 0


@compiled
def _now(frame: Records) -> Word:
    """Return the steady clock in nanoseconds."""
    _clock_gettime(1, frame.ctypes.data + CLOCK_AT)
    return frame[0].clock[0] * 1_000_000_000 + frame[0].clock[1]


@compiled
def _would_wait(frame: Records) -> bool:
    """Return whether the last system call failed because it would have blocked."""
    frame[0].errno = 0
    _memcpy(frame.ctypes.data, _error_location(), 4)
    return frame[0].errno in WOULD_WAIT


def compile_ahead() -> None:
    """Compile `barrier` and `exchange`, or load them, before any peer waits for this rank."""
    polled, pairs = np.zeros((1, 4), dtype=np.int16), np.zeros((0, 2), dtype=np.int64)
    streams, befores, links, progress = (np.zeros(0, kind) for kind in (STREAM, BEFORE, LINK, PROGRESS))
    barrier_frame, frame, none = np.zeros(1, BARRIER), np.zeros(1, EXCHANGE), np.zeros(0, dtype=np.int64)
    with compiled_by_one(exchange):
        barrier(pairs, barrier_frame, polled)
        exchange(
            streams, befores, links, progress, none, none, frame, polled, pairs, pairs, pairs, barrier_frame
        )
