"""Run the barrier of a rank, and move the chunks of a collective over its links, as machine code.

Both are one call that releases the interpreter lock, sleeps while nothing moves, and ends after a while, or when
the rank is woken, so that Python can check whether the others live. The state lies in arrays, so the next call
continues there. Joins are numpy's own loops (`numpy_arrays.loop_of`).

Both yield the processor for a short while before they sleep, as ranks in shared memory do
(`collectives.backends.shared.compiled_program`).
"""

from __future__ import annotations

import errno
import select
import socket
import sys

import numpy as np
from numpy.typing import NDArray

from collectives.peers.control_page import SHOWABLE
from collectives.peers.control_plane import LENGTH
from collectives.tables.compiled import Word, call_numpy, compiled, compiled_by_one, from_system

TAKEN_NUMBERS = 955512967
"""A checksum over the numbers that are imported here: what is kept of machine code changes with this file alone."""

ENDED, WAITING, DIFFERS, PEER_ENDED, BROKEN, STRANGE, BY_PYTHON = range(7)
"""What a call ends with: it is done; it waits; a peer means another collective; a connection has ended; the system
reports an error; a chunk came that is not expected; there is a join that only Python can do."""

PATIENCE = 20_000_000
"""Nanoseconds after which a call ends in any case."""

YIELDING, EATEN, RESPITE, LONGEST_RESPITE = 200_000, 500_000, 32, 320_000_000
"""See `collectives.backends.shared.compiled_program`."""

LINGERING = 50_000
"""Nanoseconds for which a rank gives its processor away before it sleeps while chunks move."""

ERROR, CLOCK = range(2)
"""What both frames begin with: room for an error of the system, and for a time (2 words)."""

ROUND, SENT, GOT, RANK, RANKS, GIVEN, SOURCE, TOLD, HEARD, SHOWN, RESTED = range(3, 14)
"""What the frame of a meeting holds: the round, the bytes of it that have left and come, this rank, how many there are,
bytes that each puts in, where they lie, the addresses of what is told, of what is heard and of what all have shown in
the end, and when a processor may be given away again."""

FRAME = 16
"""Words of a frame of a meeting."""

STREAM_COLUMNS = (
    NUMBER,
    FIRST,
    LENGTH_OF,
    CHUNK,
    CHUNKS,
    ADDS,
    OWN,
    PLACE,
    SLOTS,
    SLOT,
    WRITTEN,
    WINDOW,
    FIRST_BEFORE,
    LAST_BEFORE,
    KEPT,
    KEEPS,
    FIRST_CHUNK,
) = range(17)
"""The columns of streams, which are sorted by link: the number that all ranks know; where what this rank gives begins
among what it puts in, and the length; elements of a chunk, number of chunks; whether arriving chunks are added; whether
this rank has received nothing yet there, so that what it puts in is what it sends, or adds to; where the rest lies in
the result, or among the partial sums; how many of these there are, 0 for the result, and the elements of each; the
stream that must have been joined here before a chunk is sent, or -1; chunks that may be under way, or 0 where as many
as there are; what must precede a join (`befores`), from one and up to another; where the buffers of arrived chunks
are noted, and how many there can be; and the number of its first chunk among those of all streams."""

DONE, COME, CREDITED = range(3)
"""What the state of a stream holds, in chunks: sent or joined; arrived; and joined at the destination, as told."""

LANE_COLUMNS = (
    DESCRIPTOR,
    LEAVES,
    FIRST_STREAM,
    LAST_STREAM,
    LEFT_HERE,
    PACE,
    OVER,
    STREAM,
    MOVED,
    AT,
    BYTES,
    BUFFER,
    BACK,
    CAME_AT,
    HEADER,
) = range(15)
"""The columns of links: descriptor of the connection, -1 before there is one; whether chunks leave; the streams, from
one and up to another; chunks that have yet to be moved; bytes per second, 0 for no limit, and when the next chunk may
leave; then of the chunk that is being moved its stream, -1 for none, the bytes of header and chunk that have been
moved, its address, its length in bytes, and the buffer that it arrives in, -1 for its place; bytes of a credit that
have come; when the chunk began to come; and from here on the header (call, stream, chunk, bytes) and a credit (call,
stream, chunks joined)."""

CREDIT = HEADER + 4
LANE = CREDIT + 3
HEADER_BYTES, CREDIT_BYTES = 32, 24

(
    LEFT,
    CALL,
    ITEM,
    GIVEN_AT,
    RESULT_AT,
    PARTIAL_AT,
    BUFFERS_AT,
    BUFFER_BYTES,
    FREE,
    KEPT_CHUNKS,
    JOIN,
    JOIN_DATA,
    ASIDE,
    DONE_ASIDE,
    TOUCHED,
    TROUBLE,
    RESTS,
    SHUT,
    ARGUMENTS,
) = range(3, 22)
"""What the frame of a flow holds: chunks that have yet to be sent or joined; the number of the collective; bytes of an
element; addresses of what is put in, of the result, of partial sums and of buffers; bytes of a buffer, and how many are
free; chunks that wait for their join; address of the loop that joins, 0 for Python, and what numpy keeps with it; the
stream whose chunk Python must join, and whether it has; when something has moved last; the link that ended the call;
when a processor may be given away again; whether a window was found shut; and from here on what loops of numpy are
called with."""

MESSAGE = ARGUMENTS + 7
FLOW_FRAME = MESSAGE + 11
"""Then a message of the system's with its two parts (``struct msghdr``); and words of a frame of a flow."""

WOULD_WAIT = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR)
SEND_FLAGS = int(getattr(socket, "MSG_DONTWAIT", 0)) | int(getattr(socket, "MSG_NOSIGNAL", 0))
RECEIVE_FLAGS = int(getattr(socket, "MSG_DONTWAIT", 0))
READ, WRITE = int(select.POLLIN), int(select.POLLOUT)

_send = from_system("send", arguments=4)
_sendmsg = from_system("sendmsg", arguments=3)
_recv = from_system("recv", arguments=4)
_poll = from_system("poll", arguments=3)
_sched_yield = from_system("sched_yield", arguments=0)
_clock_gettime = from_system("clock_gettime", arguments=2)
_memcpy = from_system("memcpy", arguments=3)
_memcmp = from_system("memcmp", arguments=3)
_error_location = from_system("__error" if sys.platform == "darwin" else "__errno_location", arguments=0)

Numbers = NDArray[np.int64]


@compiled
def meet(rounds: Numbers, frame: Numbers, polled: NDArray[np.int16]) -> Word:
    """Go on with a meeting.

    Parameters
    ----------
    rounds : (log2 N, 2) int64
        Of each round the file descriptors of the connections that tell and that hear.
    frame : (FRAME,) int64
    polled : (3, 4) int16
        What the system waits for: a connection that hears, one that tells, and the bell; of each the descriptor in two
        numbers, what is waited for, and what has come.

    Returns
    -------
    int
        ``ENDED``, ``WAITING``, ``DIFFERS`` or ``PEER_ENDED``.
    """
    given, ranks = frame[GIVEN], frame[RANKS]
    if frame[ROUND] == 0 and frame[SENT] == 0 and given > 0:
        _memcpy(frame[TOLD] + LENGTH, frame[SOURCE], given)
    began = now = _now(frame)
    idle = began
    while frame[ROUND] < len(rounds):
        distance = 1 << frame[ROUND]
        length = LENGTH + min(distance, ranks - distance) * given
        moved = False
        if frame[SENT] < length:
            done = _send(rounds[frame[ROUND], 0], frame[TOLD] + frame[SENT], length - frame[SENT], SEND_FLAGS)
            if done < 0 and not _would_wait(frame):
                return PEER_ENDED
            if done > 0:
                frame[SENT] += done
                moved = True
        if frame[GOT] < length:
            done = _recv(
                rounds[frame[ROUND], 1], frame[HEARD] + frame[GOT], length - frame[GOT], RECEIVE_FLAGS
            )
            if done == 0 or (done < 0 and not _would_wait(frame)):
                return PEER_ENDED
            if done > 0:
                frame[GOT] += done
                moved = True
        if frame[GOT] >= LENGTH and _memcmp(frame[HEARD], frame[TOLD], LENGTH) & 0xFFFFFFFF:
            return DIFFERS
        if frame[SENT] == length and frame[GOT] == length:
            _memcpy(frame[TOLD] + LENGTH + distance * given, frame[HEARD] + LENGTH, length - LENGTH)
            frame[ROUND] += 1
            frame[SENT] = frame[GOT] = 0
            idle = _now(frame)
        elif not moved:
            now = _now(frame)
            if now - began >= PATIENCE:
                return WAITING
            if now >= frame[RESTED] and now - idle < YIELDING:
                frame[RESTED] = _lend(frame, now)
            elif _sleep_in_meeting(rounds, frame, polled, length, PATIENCE - (now - began)):
                return WAITING
    if given > 0:
        for rank in range(ranks):
            place = (frame[RANK] - rank) % ranks
            _memcpy(frame[SHOWN] + rank * 2 * SHOWABLE, frame[TOLD] + LENGTH + place * given, given)
    return ENDED


@compiled
def _sleep_in_meeting(
    rounds: Numbers, frame: Numbers, polled: NDArray[np.int16], length: Word, nanoseconds: Word
) -> bool:
    """Sleep until a connection is ready; whether the bell has rung instead."""
    connections = polled.view(np.int32)
    connections[0, 0] = rounds[frame[ROUND], 1]
    connections[1, 0] = rounds[frame[ROUND], 0]
    polled[0, 2] = READ if frame[GOT] < length else 0
    polled[1, 2] = WRITE if frame[SENT] < length else 0
    polled[2, 2] = READ
    polled[:, 3] = 0
    _poll(polled.ctypes.data, 3, nanoseconds // 1_000_000 + 1)
    rung: bool = polled[2, 3] != 0
    return rung


@compiled
def flow(
    streams: Numbers,
    befores: Numbers,
    lanes: Numbers,
    state: Numbers,
    kept: Numbers,
    free: Numbers,
    frame: Numbers,
    polled: NDArray[np.int16],
    times: Numbers,
) -> Word:
    """Go on with the chunks that one rank sends and receives.

    Parameters
    ----------
    streams : (S, 17) int64
        See `STREAM_COLUMNS`.
    befores : (B, 2) int64
        Stream and lag: a chunk may be joined once that stream has done the chunk so many before it.
    lanes : (L, LANE) int64
        See `LANE_COLUMNS`.
    state : (S, 3) int64
    kept : (K,) int64
        The buffers in which arrived chunks wait, for each stream a ring.
    free : (N,) int64
        The buffers that are free; who was given back last is taken first, for the cache.
    frame : (FLOW_FRAME,) int64
    polled : (L + 1, 4) int16
        What the system waits for: each link that has more to move, behind the bell (see `meet`).
    times : (C, 2) int64
        Where somebody asks, for each chunk that comes when it began to and when it was there; else empty.

    Returns
    -------
    int
        ``ENDED``, ``WAITING``, ``PEER_ENDED``, ``BROKEN``, ``STRANGE`` or ``BY_PYTHON``.
    """
    began = now = _now(frame)
    idle = False
    if frame[KEPT_CHUNKS] > 0 and not _join_kept(streams, befores, lanes, state, kept, free, frame):
        return BY_PYTHON
    while frame[LEFT] > 0:
        moved = False
        for lane in range(len(lanes)):
            if lanes[lane, DESCRIPTOR] < 0 or lanes[lane, LEFT_HERE] == 0:
                continue
            if lanes[lane, LEAVES]:
                status = _send_chunk(streams, lanes, state, frame, lane, now, idle)
            else:
                status = _receive_chunk(streams, befores, lanes, state, kept, free, frame, times, lane)
            if status == ENDED:
                moved = True
                if frame[KEPT_CHUNKS] > 0 and not _join_kept(
                    streams, befores, lanes, state, kept, free, frame
                ):
                    return BY_PYTHON
            elif status != WAITING:
                frame[TROUBLE] = lane
                return status
        now = _now(frame)
        if moved:
            frame[TOUCHED] = now
        if now - began >= PATIENCE:
            return WAITING
        if not moved and idle:
            if now - frame[TOUCHED] < LINGERING and now >= frame[RESTS]:
                frame[RESTS] = _lend(frame, now)
            elif _sleep(lanes, frame, polled, now, PATIENCE - (now - began)):
                return WAITING
        idle = not moved
    return ENDED


@compiled
def _send_chunk(
    streams: Numbers, lanes: Numbers, state: Numbers, frame: Numbers, lane: Word, now: Word, idle: bool
) -> Word:
    """Hand some of a link's next chunk to the system: ``ENDED`` where anything moved, else as `flow`."""
    if lanes[lane, STREAM] < 0:
        if lanes[lane, OVER] > now:
            return WAITING
        stream = _next(streams, lanes, state, frame, lane)
        if frame[SHUT] or (stream < 0 and idle):
            # a peer that has ended is seen here too, so this is looked at before every sleep
            status = _take_credits(streams, lanes, state, frame, lane)
            if status not in (ENDED, WAITING):
                return status
            if status == ENDED:
                stream = _next(streams, lanes, state, frame, lane)
        if stream < 0:
            return WAITING
        chunk = state[stream, DONE]
        length = _bytes(streams, frame, stream, chunk)
        lanes[lane, AT] = _own(streams, frame, stream, chunk)
        lanes[lane, STREAM], lanes[lane, BYTES], lanes[lane, MOVED] = stream, length, 0
        lanes[lane, HEADER], lanes[lane, HEADER + 1] = frame[CALL], streams[stream, NUMBER]
        lanes[lane, HEADER + 2], lanes[lane, HEADER + 3] = chunk, length
        if lanes[lane, PACE] > 0:
            # a little may be made up for: sleeps are longer than asked for
            base = max(lanes[lane, OVER], now - 2_000_000)
            lanes[lane, OVER] = base + length * 1_000_000_000 // lanes[lane, PACE]
    stream, length, moved = lanes[lane, STREAM], lanes[lane, BYTES], lanes[lane, MOVED]
    address = frame.ctypes.data + 8 * MESSAGE
    of_header = max(HEADER_BYTES - moved, 0)
    frame[MESSAGE + 2], frame[MESSAGE + 3] = address + 56, 2
    frame[MESSAGE + 7] = lanes.ctypes.data + 8 * (lane * LANE + HEADER) + HEADER_BYTES - of_header
    frame[MESSAGE + 8] = of_header
    frame[MESSAGE + 9] = lanes[lane, AT] + moved + of_header - HEADER_BYTES
    frame[MESSAGE + 10] = length - (moved + of_header - HEADER_BYTES)
    done = _sendmsg(lanes[lane, DESCRIPTOR], address, SEND_FLAGS)
    if done < 0:
        return WAITING if _would_wait(frame) else BROKEN
    lanes[lane, MOVED] += done
    if moved + done == HEADER_BYTES + length:
        lanes[lane, STREAM] = -1
        lanes[lane, LEFT_HERE] -= 1
        state[stream, DONE] += 1
        frame[LEFT] -= 1
    return ENDED


@compiled
def _next(streams: Numbers, lanes: Numbers, state: Numbers, frame: Numbers, lane: Word) -> Word:
    """The stream whose chunk leaves next, -1 where none may; notes whether the window of one is shut.

    All shards advance in proportion: one that ends early would leave its links idle.
    """
    found = -1
    frame[SHUT] = 0
    for stream in range(lanes[lane, FIRST_STREAM], lanes[lane, LAST_STREAM]):
        chunk, chunks, written = state[stream, DONE], streams[stream, CHUNKS], streams[stream, WRITTEN]
        if chunk == chunks or (written >= 0 and state[written, DONE] <= chunk):
            continue
        window = streams[stream, WINDOW]
        if window > 0 and chunk >= state[stream, CREDITED] + window:
            frame[SHUT] = 1
            continue
        if found < 0 or chunk * streams[found, CHUNKS] < state[found, DONE] * chunks:
            found = stream
    return found


@compiled
def _take_credits(streams: Numbers, lanes: Numbers, state: Numbers, frame: Numbers, lane: Word) -> Word:
    """Read how many of this rank's chunks have been joined: ``ENDED`` where there was something, else as `flow`."""
    address = lanes.ctypes.data + 8 * (lane * LANE + CREDIT)
    came = WAITING
    while True:
        back = lanes[lane, BACK]
        done = _recv(lanes[lane, DESCRIPTOR], address + back, CREDIT_BYTES - back, RECEIVE_FLAGS)
        if done == 0:
            return PEER_ENDED
        if done < 0:
            return came if _would_wait(frame) else BROKEN
        came = ENDED
        lanes[lane, BACK] = (back + done) % CREDIT_BYTES
        # what comes late is of a call before
        if lanes[lane, BACK] == 0 and lanes[lane, CREDIT] == frame[CALL]:
            for stream in range(lanes[lane, FIRST_STREAM], lanes[lane, LAST_STREAM]):
                if streams[stream, NUMBER] == lanes[lane, CREDIT + 1]:
                    state[stream, CREDITED] = max(state[stream, CREDITED], lanes[lane, CREDIT + 2])


@compiled
def _receive_chunk(
    streams: Numbers,
    befores: Numbers,
    lanes: Numbers,
    state: Numbers,
    kept: Numbers,
    free: Numbers,
    frame: Numbers,
    times: Numbers,
    lane: Word,
) -> Word:
    """Take some of what has come over a link: ``ENDED`` where anything moved, else as `flow`."""
    moved = lanes[lane, MOVED]
    status = WAITING
    if moved < HEADER_BYTES:
        status = ENDED
        header = lanes.ctypes.data + 8 * (lane * LANE + HEADER)
        done = _recv(lanes[lane, DESCRIPTOR], header + moved, HEADER_BYTES - moved, RECEIVE_FLAGS)
        if done == 0:
            return PEER_ENDED
        if done < 0:
            return WAITING if _would_wait(frame) else BROKEN
        moved += done
        lanes[lane, MOVED] = moved
        if moved < HEADER_BYTES:
            return ENDED
        if not _expect(streams, befores, lanes, state, free, frame, lane):
            return STRANGE
        if len(times) > 0:
            lanes[lane, CAME_AT] = _now(frame)
    stream, length = lanes[lane, STREAM], lanes[lane, BYTES]
    done = moved - HEADER_BYTES
    came = _recv(lanes[lane, DESCRIPTOR], lanes[lane, AT] + done, length - done, RECEIVE_FLAGS)
    if came == 0:
        return PEER_ENDED
    if came < 0:
        return status if _would_wait(frame) else BROKEN
    lanes[lane, MOVED] += came
    if done + came == length:
        if len(times) > 0:
            number = streams[stream, FIRST_CHUNK] + state[stream, COME]
            times[number, 0], times[number, 1] = lanes[lane, CAME_AT], _now(frame)
        buffer = lanes[lane, BUFFER]
        lanes[lane, STREAM], lanes[lane, MOVED] = -1, 0
        lanes[lane, LEFT_HERE] -= 1
        if buffer < 0:
            state[stream, COME] += 1
            _count(streams, lanes, state, frame, stream)
        else:
            kept[streams[stream, KEPT] + state[stream, COME] % streams[stream, KEEPS]] = buffer
            state[stream, COME] += 1
            frame[KEPT_CHUNKS] += 1
    return ENDED


@compiled
def _expect(
    streams: Numbers,
    befores: Numbers,
    lanes: Numbers,
    state: Numbers,
    free: Numbers,
    frame: Numbers,
    lane: Word,
) -> bool:
    """Find out where the chunk goes of which a header has come; whether it is expected.

    It goes to its own place where that is free and nothing is added, else into a buffer.
    """
    stream = lanes[lane, FIRST_STREAM]
    while stream < lanes[lane, LAST_STREAM] and streams[stream, NUMBER] != lanes[lane, HEADER + 1]:
        stream += 1
    if lanes[lane, HEADER] != frame[CALL] or stream == lanes[lane, LAST_STREAM]:
        return False
    chunk = state[stream, COME]
    if chunk == streams[stream, CHUNKS] or lanes[lane, HEADER + 2] != chunk:
        return False
    if lanes[lane, HEADER + 3] != _bytes(streams, frame, stream, chunk):
        return False
    lanes[lane, STREAM], lanes[lane, BYTES] = stream, lanes[lane, HEADER + 3]
    waits = chunk - state[stream, DONE]
    if waits == 0 and not streams[stream, ADDS] and _may_join(streams, befores, state, stream, chunk):
        lanes[lane, BUFFER] = -1
        lanes[lane, AT] = _place(streams, frame, stream, chunk)
        return True
    if waits == streams[stream, KEEPS]:
        return False
    frame[FREE] -= 1
    lanes[lane, BUFFER] = free[frame[FREE]]
    lanes[lane, AT] = frame[BUFFERS_AT] + lanes[lane, BUFFER] * frame[BUFFER_BYTES]
    return True


@compiled
def _may_join(streams: Numbers, befores: Numbers, state: Numbers, stream: Word, chunk: Word) -> bool:
    for number in range(streams[stream, FIRST_BEFORE], streams[stream, LAST_BEFORE]):
        if state[befores[number, 0], DONE] <= chunk - befores[number, 1]:
            return False
    return True


@compiled
def _join_kept(
    streams: Numbers,
    befores: Numbers,
    lanes: Numbers,
    state: Numbers,
    kept: Numbers,
    free: Numbers,
    frame: Numbers,
) -> bool:
    """Join what has arrived and may be joined; False where the next one is for Python."""
    found = True
    first = frame[ASIDE] if frame[DONE_ASIDE] else 0
    while found and frame[KEPT_CHUNKS] > 0:
        found = False
        for stream in range(first, len(streams)):
            chunk = state[stream, DONE]
            if streams[stream, KEEPS] == 0 or state[stream, COME] == chunk:
                continue
            if not _may_join(streams, befores, state, stream, chunk):
                continue
            buffer = kept[streams[stream, KEPT] + chunk % streams[stream, KEEPS]]
            if frame[DONE_ASIDE] == 0 and not _join(streams, frame, stream, chunk, buffer):
                frame[ASIDE] = stream
                return False
            frame[DONE_ASIDE] = 0
            free[frame[FREE]] = buffer
            frame[FREE] += 1
            frame[KEPT_CHUNKS] -= 1
            _count(streams, lanes, state, frame, stream)
            found = True
        first = 0
    return True


@compiled
def _join(streams: Numbers, frame: Numbers, stream: Word, chunk: Word, buffer: Word) -> bool:
    """Add or store a chunk that lies in a buffer, unless Python must."""
    target = _place(streams, frame, stream, chunk)
    length = _bytes(streams, frame, stream, chunk)
    arrived = frame[BUFFERS_AT] + buffer * frame[BUFFER_BYTES]
    if not streams[stream, ADDS]:
        _memcpy(target, arrived, length)
        return True
    if frame[JOIN] == 0:
        return False
    own = _own(streams, frame, stream, chunk)
    arguments = frame.ctypes.data + 8 * ARGUMENTS
    frame[ARGUMENTS], frame[ARGUMENTS + 1], frame[ARGUMENTS + 2] = own, arrived, target
    frame[ARGUMENTS + 3] = length // frame[ITEM]
    # numpy rounds complex products of one element in its place in another way
    frame[ARGUMENTS + 4 : ARGUMENTS + 7] = 0 if length == frame[ITEM] and own == target else frame[ITEM]
    call_numpy(frame[JOIN], arguments, arguments + 24, arguments + 32, frame[JOIN_DATA])
    return True


@compiled
def _count(streams: Numbers, lanes: Numbers, state: Numbers, frame: Numbers, stream: Word) -> None:
    """Another chunk of a stream has been joined; tell its source, often enough that its window need not close."""
    state[stream, DONE] += 1
    frame[LEFT] -= 1
    done, window = state[stream, DONE], streams[stream, WINDOW]
    if window == 0 or done == streams[stream, CHUNKS] or (window >= 4 and done % (window // 4) > 0):
        return
    lane = 0
    while lanes[lane, LEAVES] or not lanes[lane, FIRST_STREAM] <= stream < lanes[lane, LAST_STREAM]:
        lane += 1
    # there is always room: a source has at most a window under way, and reads when it must wait
    lanes[lane, CREDIT], lanes[lane, CREDIT + 1] = frame[CALL], streams[stream, NUMBER]
    lanes[lane, CREDIT + 2] = done
    _send(lanes[lane, DESCRIPTOR], lanes.ctypes.data + 8 * (lane * LANE + CREDIT), CREDIT_BYTES, SEND_FLAGS)


@compiled
def _bytes(streams: Numbers, frame: Numbers, stream: Word, chunk: Word) -> Word:
    """The length of a chunk."""
    left = streams[stream, LENGTH_OF] - chunk * streams[stream, CHUNK]
    return min(streams[stream, CHUNK], left) * frame[ITEM]


@compiled
def _own(streams: Numbers, frame: Numbers, stream: Word, chunk: Word) -> Word:
    """Where the values are that this rank has of a chunk: among what it puts in, until it has received some."""
    if streams[stream, OWN]:
        return frame[GIVEN_AT] + (streams[stream, FIRST] + chunk * streams[stream, CHUNK]) * frame[ITEM]
    return _place(streams, frame, stream, chunk)


@compiled
def _place(streams: Numbers, frame: Numbers, stream: Word, chunk: Word) -> Word:
    """Where this rank has a chunk: in its result, or among its partial sums."""
    slots, place = streams[stream, SLOTS], streams[stream, PLACE]
    if slots > 0:
        return frame[PARTIAL_AT] + (place + chunk % slots * streams[stream, SLOT]) * frame[ITEM]
    return frame[RESULT_AT] + (place + chunk * streams[stream, CHUNK]) * frame[ITEM]


@compiled
def _sleep(lanes: Numbers, frame: Numbers, polled: NDArray[np.int16], now: Word, nanoseconds: Word) -> bool:
    """Sleep until something can move; whether the bell has rung instead."""
    connections = polled.view(np.int32)
    count = 1
    for lane in range(len(lanes)):
        if lanes[lane, DESCRIPTOR] < 0 or lanes[lane, LEFT_HERE] == 0:
            continue
        in_hand = lanes[lane, LEAVES] and lanes[lane, STREAM] >= 0
        if lanes[lane, OVER] > now and not in_hand:
            # credits are not read before the next chunk may leave
            nanoseconds = min(nanoseconds, lanes[lane, OVER] - now)
            continue
        connections[count, 0] = lanes[lane, DESCRIPTOR]
        polled[count, 2] = WRITE if in_hand else READ
        count += 1
    polled[:count, 3] = 0
    _poll(polled.ctypes.data, count, (nanoseconds + 999_999) // 1_000_000)
    rung: bool = polled[0, 3] != 0
    return rung


@compiled
def _lend(frame: Numbers, now: Word) -> Word:
    """Give the processor away for a turn; when that may be done again, which a neighbour that takes it puts off."""
    _sched_yield()
    eaten = _now(frame) - now
    return now + eaten + min(RESPITE * eaten, LONGEST_RESPITE) if eaten > EATEN else 0


@compiled
def _now(frame: Numbers) -> Word:
    """Nanoseconds of the steady clock."""
    _clock_gettime(1, frame.ctypes.data + 8 * CLOCK)
    return frame[CLOCK] * 1_000_000_000 + frame[CLOCK + 1]


@compiled
def _would_wait(frame: Numbers) -> bool:
    """Whether the last call of the system failed because there was nothing to do yet."""
    frame[ERROR] = 0
    _memcpy(frame.ctypes.data + 8 * ERROR, _error_location(), 4)
    error = frame.view(np.int32)[2 * ERROR] + frame.view(np.int32)[2 * ERROR + 1]
    return error in WOULD_WAIT


def compile_ahead() -> None:
    """Compile `meet` and `flow`, or load them, before anybody waits for this rank."""
    nothing, polled = np.zeros((0, 2), dtype=np.int64), np.zeros((1, 4), dtype=np.int16)
    words = np.zeros(0, dtype=np.int64)
    frame = np.zeros(FLOW_FRAME, dtype=np.int64)
    with compiled_by_one(flow):
        meet(nothing, np.zeros(FRAME, dtype=np.int64), polled)
        flow(nothing, nothing, nothing, nothing, words, words, frame, polled, nothing)
