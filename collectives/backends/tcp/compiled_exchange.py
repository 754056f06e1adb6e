"""Run the barrier of a rank, and move the chunks of a collective over its links, as machine code.

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

import numpy as np
from numpy.typing import NDArray

from collectives.peers.control_page import SHOWABLE
from collectives.peers.control_plane import LENGTH
from collectives.tables.compiled import Word, call_numpy, compiled, compiled_by_one, from_system

TAKEN_NUMBERS = 955512967
"""A checksum of the numbers imported here: cached machine code depends on this file alone."""

ENDED, WAITING, DIFFERS, PEER_ENDED, BROKEN, STRANGE, BY_PYTHON = range(7)
"""Results of a call: done; waiting; a peer calls another collective; a connection has ended; the system reports an
error; an unexpected chunk came; a join is left to Python."""

CALL_NANOSECONDS = 20_000_000
"""Nanoseconds after which a call returns in any case."""

YIELDING, EATEN, RESPITE, LONGEST_RESPITE = 200_000, 500_000, 32, 320_000_000
"""See `collectives.backends.shared.compiled_program`."""

LINGERING = 50_000
"""Nanoseconds for which a rank yields its processor before it sleeps while chunks move."""

ERROR, CLOCK = range(2)
"""The first words of both frames: an error of the system, and a time (2 words)."""

ROUND, SENT, GOT, RANK, RANKS, GIVEN, SOURCE, OUTBOX, INBOX, SHOWN, RESTED = range(3, 14)
"""The frame of a barrier: the round, the bytes of it that were sent and received, this rank, the number of ranks, bytes
of each input, its address, the addresses of the outgoing note, the incoming note and all inputs in the end, and when
the processor may be yielded again."""

FRAME = 16
"""Words of the frame of a barrier."""

# columns of streams, which are sorted by link
STREAM_COLUMNS = (
    NUMBER,  # the same on all ranks
    FIRST,  # first element in the rank's input
    LENGTH_OF,  # elements
    CHUNK,  # elements of a chunk
    CHUNKS,
    ADDS,  # arriving chunks are added
    OWN,  # the rank has received nothing yet there: it sends its input, or adds to it
    PLACE,  # first element in the result, or among the partial sums
    SLOTS,  # partial sums, 0 for the result
    SLOT,  # elements of a partial sum
    WRITTEN,  # stream that must have been joined here before a chunk is sent, or -1
    WINDOW,  # chunks that may be under way, or 0 for all
    FIRST_BEFORE,  # rows of `befores` that must precede a join
    LAST_BEFORE,
    KEPT,  # first place of the ring of arrived buffers
    KEEPS,  # places of that ring
    FIRST_CHUNK,  # number of its first chunk among those of all streams
) = range(17)

DONE, COME, CREDITED = range(3)
"""The state of a stream in chunks: sent or joined; arrived; and acknowledged by the destination."""

# columns of links; STREAM to BUFFER are of the chunk that is being moved
LINK_COLUMNS = (
    DESCRIPTOR,  # of the connection, -1 before it is open
    LEAVES,  # chunks leave here
    FIRST_STREAM,
    LAST_STREAM,  # exclusive
    LEFT_HERE,  # chunks that have yet to be moved
    PACE,  # bytes per second, 0 for no limit
    OVER,  # when the next chunk may leave
    STREAM,  # -1 for none
    MOVED,  # bytes of header and chunk
    AT,  # address
    BYTES,
    BUFFER,  # in which it arrives, -1 for its own place
    BACK,  # bytes of a credit that have come
    CAME_AT,  # when the chunk began to come
    HEADER,  # call, stream, chunk, bytes; then a credit: call, stream, chunks joined
) = range(15)

CREDIT = HEADER + 4
LINK_WORDS = CREDIT + 3
HEADER_BYTES, CREDIT_BYTES = 32, 24

# the frame of an exchange
(
    LEFT,  # chunks that have yet to be sent or joined
    CALL,  # number of the collective
    ITEM,  # bytes of an element
    GIVEN_AT,  # addresses
    RESULT_AT,
    PARTIAL_AT,
    BUFFERS_AT,
    BUFFER_BYTES,
    FREE,  # free buffers
    KEPT_CHUNKS,  # arrived chunks that wait for their join
    JOIN,  # address of the loop that joins, 0 for Python
    JOIN_DATA,  # numpy's data of that loop
    ASIDE,  # stream whose chunk Python must join
    DONE_ASIDE,  # Python has joined it
    TOUCHED,  # time of the last progress
    TROUBLE,  # link that ended the call
    RESTS,  # when the processor may be yielded again
    SHUT,  # a window was found closed
    ARGUMENTS,  # of numpy's loops
) = range(3, 22)

MESSAGE = ARGUMENTS + 7
"""A message of the system with its two parts (``struct msghdr``)."""

EXCHANGE_FRAME = MESSAGE + 11

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
def barrier(rounds: Numbers, frame: Numbers, polled: NDArray[np.int16]) -> Word:
    """Continue a barrier; return ``ENDED``, ``WAITING``, ``DIFFERS`` or ``PEER_ENDED``.

    `rounds` has for each of log2 N rounds the file descriptors of the connections to send on and to receive on.
    `polled` has (3, 4) numbers, of the receiving connection, the sending one and the wakeup: the descriptor in two
    numbers, the awaited events, and the events.
    """
    given, ranks = frame[GIVEN], frame[RANKS]
    if frame[ROUND] == 0 and frame[SENT] == 0 and given > 0:
        _memcpy(frame[OUTBOX] + LENGTH, frame[SOURCE], given)
    began = now = _now(frame)
    idle = began
    while frame[ROUND] < len(rounds):
        distance = 1 << frame[ROUND]
        length = LENGTH + min(distance, ranks - distance) * given
        moved = False
        if frame[SENT] < length:
            done = _send(
                rounds[frame[ROUND], 0], frame[OUTBOX] + frame[SENT], length - frame[SENT], SEND_FLAGS
            )
            if done < 0 and not _would_wait(frame):
                return PEER_ENDED
            if done > 0:
                frame[SENT] += done
                moved = True
        if frame[GOT] < length:
            done = _recv(
                rounds[frame[ROUND], 1], frame[INBOX] + frame[GOT], length - frame[GOT], RECEIVE_FLAGS
            )
            if done == 0 or (done < 0 and not _would_wait(frame)):
                return PEER_ENDED
            if done > 0:
                frame[GOT] += done
                moved = True
        if frame[GOT] >= LENGTH and _memcmp(frame[INBOX], frame[OUTBOX], LENGTH) & 0xFFFFFFFF:
            return DIFFERS
        if frame[SENT] == length and frame[GOT] == length:
            _memcpy(frame[OUTBOX] + LENGTH + distance * given, frame[INBOX] + LENGTH, length - LENGTH)
            frame[ROUND] += 1
            frame[SENT] = frame[GOT] = 0
            idle = _now(frame)
        elif not moved:
            now = _now(frame)
            if now - began >= CALL_NANOSECONDS:
                return WAITING
            if now >= frame[RESTED] and now - idle < YIELDING:
                frame[RESTED] = _lend(frame, now)
            elif _sleep_in_barrier(rounds, frame, polled, length, CALL_NANOSECONDS - (now - began)):
                return WAITING
    if given > 0:
        for rank in range(ranks):
            place = (frame[RANK] - rank) % ranks
            _memcpy(frame[SHOWN] + rank * 2 * SHOWABLE, frame[OUTBOX] + LENGTH + place * given, given)
    return ENDED


@compiled
def _sleep_in_barrier(
    rounds: Numbers, frame: Numbers, polled: NDArray[np.int16], length: Word, nanoseconds: Word
) -> bool:
    """Sleep until a connection is ready; return whether the rank was woken instead."""
    connections = polled.view(np.int32)
    connections[0, 0] = rounds[frame[ROUND], 1]
    connections[1, 0] = rounds[frame[ROUND], 0]
    polled[0, 2] = READ if frame[GOT] < length else 0
    polled[1, 2] = WRITE if frame[SENT] < length else 0
    polled[2, 2] = READ
    polled[:, 3] = 0
    _poll(polled.ctypes.data, 3, nanoseconds // 1_000_000 + 1)
    woken: bool = polled[2, 3] != 0
    return woken


@compiled
def exchange(
    streams: Numbers,
    befores: Numbers,
    links: Numbers,
    state: Numbers,
    kept: Numbers,
    free: Numbers,
    frame: Numbers,
    polled: NDArray[np.int16],
    times: Numbers,
) -> Word:
    """Continue to send and receive the chunks of one rank.

    Returns ``ENDED``, ``WAITING``, ``PEER_ENDED``, ``BROKEN``, ``STRANGE`` or ``BY_PYTHON``.

    - `streams`: (S, 17), see `STREAM_COLUMNS`. `links`: (L, LINK_WORDS), see `LINK_COLUMNS`. `state`: (S, 3).
    - `befores`: (B, 2), stream and lag: a chunk may be joined once that stream has done the chunk so many before it.
    - `kept`: the buffers in which arrived chunks wait, for each stream a ring.
    - `free`: the free buffers; the last one returned is taken first, for the cache.
    - `polled`: (L + 1, 4), the wakeup and each link that has more to move (see `barrier`).
    - `times`: (C, 2), for each arriving chunk when it began to arrive and when it was complete; or empty.
    """
    began = now = _now(frame)
    idle = False
    if frame[KEPT_CHUNKS] > 0 and not _join_kept(streams, befores, links, state, kept, free, frame):
        return BY_PYTHON
    while frame[LEFT] > 0:
        moved = False
        for link in range(len(links)):
            if links[link, DESCRIPTOR] < 0 or links[link, LEFT_HERE] == 0:
                continue
            if links[link, LEAVES]:
                status = _send_chunk(streams, links, state, frame, link, now, idle)
            else:
                status = _receive_chunk(streams, befores, links, state, kept, free, frame, times, link)
            if status == ENDED:
                moved = True
                if frame[KEPT_CHUNKS] > 0 and not _join_kept(
                    streams, befores, links, state, kept, free, frame
                ):
                    return BY_PYTHON
            elif status != WAITING:
                frame[TROUBLE] = link
                return status
        now = _now(frame)
        if moved:
            frame[TOUCHED] = now
        if now - began >= CALL_NANOSECONDS:
            return WAITING
        if not moved and idle:
            if now - frame[TOUCHED] < LINGERING and now >= frame[RESTS]:
                frame[RESTS] = _lend(frame, now)
            elif _sleep(links, frame, polled, now, CALL_NANOSECONDS - (now - began)):
                return WAITING
        idle = not moved
    return ENDED


@compiled
def _send_chunk(
    streams: Numbers, links: Numbers, state: Numbers, frame: Numbers, link: Word, now: Word, idle: bool
) -> Word:
    """Send some of a link's next chunk: ``ENDED`` if anything moved, else as `exchange`."""
    if links[link, STREAM] < 0:
        if links[link, OVER] > now:
            return WAITING
        stream = _next(streams, links, state, frame, link)
        if frame[SHUT] or (stream < 0 and idle):
            # this also detects a peer that has ended, so it runs before every sleep
            status = _take_credits(streams, links, state, frame, link)
            if status not in (ENDED, WAITING):
                return status
            if status == ENDED:
                stream = _next(streams, links, state, frame, link)
        if stream < 0:
            return WAITING
        chunk = state[stream, DONE]
        length = _bytes(streams, frame, stream, chunk)
        links[link, AT] = _own(streams, frame, stream, chunk)
        links[link, STREAM], links[link, BYTES], links[link, MOVED] = stream, length, 0
        links[link, HEADER], links[link, HEADER + 1] = frame[CALL], streams[stream, NUMBER]
        links[link, HEADER + 2], links[link, HEADER + 3] = chunk, length
        if links[link, PACE] > 0:
            # make up for a little: sleeps are longer than asked for
            base = max(links[link, OVER], now - 2_000_000)
            links[link, OVER] = base + length * 1_000_000_000 // links[link, PACE]
    stream, length, moved = links[link, STREAM], links[link, BYTES], links[link, MOVED]
    address = frame.ctypes.data + 8 * MESSAGE
    of_header = max(HEADER_BYTES - moved, 0)
    frame[MESSAGE + 2], frame[MESSAGE + 3] = address + 56, 2
    frame[MESSAGE + 7] = links.ctypes.data + 8 * (link * LINK_WORDS + HEADER) + HEADER_BYTES - of_header
    frame[MESSAGE + 8] = of_header
    frame[MESSAGE + 9] = links[link, AT] + moved + of_header - HEADER_BYTES
    frame[MESSAGE + 10] = length - (moved + of_header - HEADER_BYTES)
    done = _sendmsg(links[link, DESCRIPTOR], address, SEND_FLAGS)
    if done < 0:
        return WAITING if _would_wait(frame) else BROKEN
    links[link, MOVED] += done
    if moved + done == HEADER_BYTES + length:
        links[link, STREAM] = -1
        links[link, LEFT_HERE] -= 1
        state[stream, DONE] += 1
        frame[LEFT] -= 1
    return ENDED


@compiled
def _next(streams: Numbers, links: Numbers, state: Numbers, frame: Numbers, link: Word) -> Word:
    """Return the stream whose chunk leaves next, -1 if none may; note whether a window is closed.

    All shards advance in proportion: one that ends early would leave its links idle.
    """
    found = -1
    frame[SHUT] = 0
    for stream in range(links[link, FIRST_STREAM], links[link, LAST_STREAM]):
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
def _take_credits(streams: Numbers, links: Numbers, state: Numbers, frame: Numbers, link: Word) -> Word:
    """Read how many of this rank's chunks have been joined: ``ENDED`` if a credit came, else as `exchange`."""
    address = links.ctypes.data + 8 * (link * LINK_WORDS + CREDIT)
    came = WAITING
    while True:
        back = links[link, BACK]
        done = _recv(links[link, DESCRIPTOR], address + back, CREDIT_BYTES - back, RECEIVE_FLAGS)
        if done == 0:
            return PEER_ENDED
        if done < 0:
            return came if _would_wait(frame) else BROKEN
        came = ENDED
        links[link, BACK] = (back + done) % CREDIT_BYTES
        # a late credit is of an earlier call
        if links[link, BACK] == 0 and links[link, CREDIT] == frame[CALL]:
            for stream in range(links[link, FIRST_STREAM], links[link, LAST_STREAM]):
                if streams[stream, NUMBER] == links[link, CREDIT + 1]:
                    state[stream, CREDITED] = max(state[stream, CREDITED], links[link, CREDIT + 2])


@compiled
def _receive_chunk(
    streams: Numbers,
    befores: Numbers,
    links: Numbers,
    state: Numbers,
    kept: Numbers,
    free: Numbers,
    frame: Numbers,
    times: Numbers,
    link: Word,
) -> Word:
    """Receive some of a link's data: ``ENDED`` if anything moved, else as `exchange`."""
    moved = links[link, MOVED]
    status = WAITING
    if moved < HEADER_BYTES:
        status = ENDED
        header = links.ctypes.data + 8 * (link * LINK_WORDS + HEADER)
        done = _recv(links[link, DESCRIPTOR], header + moved, HEADER_BYTES - moved, RECEIVE_FLAGS)
        if done == 0:
            return PEER_ENDED
        if done < 0:
            return WAITING if _would_wait(frame) else BROKEN
        moved += done
        links[link, MOVED] = moved
        if moved < HEADER_BYTES:
            return ENDED
        if not _expect(streams, befores, links, state, free, frame, link):
            return STRANGE
        if len(times) > 0:
            links[link, CAME_AT] = _now(frame)
    stream, length = links[link, STREAM], links[link, BYTES]
    done = moved - HEADER_BYTES
    came = _recv(links[link, DESCRIPTOR], links[link, AT] + done, length - done, RECEIVE_FLAGS)
    if came == 0:
        return PEER_ENDED
    if came < 0:
        return status if _would_wait(frame) else BROKEN
    links[link, MOVED] += came
    if done + came == length:
        if len(times) > 0:
            number = streams[stream, FIRST_CHUNK] + state[stream, COME]
            times[number, 0], times[number, 1] = links[link, CAME_AT], _now(frame)
        buffer = links[link, BUFFER]
        links[link, STREAM], links[link, MOVED] = -1, 0
        links[link, LEFT_HERE] -= 1
        if buffer < 0:
            state[stream, COME] += 1
            _count(streams, links, state, frame, stream)
        else:
            kept[streams[stream, KEPT] + state[stream, COME] % streams[stream, KEEPS]] = buffer
            state[stream, COME] += 1
            frame[KEPT_CHUNKS] += 1
    return ENDED


@compiled
def _expect(
    streams: Numbers,
    befores: Numbers,
    links: Numbers,
    state: Numbers,
    free: Numbers,
    frame: Numbers,
    link: Word,
) -> bool:
    """Find the place of a chunk whose header has come; return whether it is expected.

    It goes to its own place if that is free and nothing is added, else into a buffer.
    """
    stream = links[link, FIRST_STREAM]
    while stream < links[link, LAST_STREAM] and streams[stream, NUMBER] != links[link, HEADER + 1]:
        stream += 1
    if links[link, HEADER] != frame[CALL] or stream == links[link, LAST_STREAM]:
        return False
    chunk = state[stream, COME]
    if chunk == streams[stream, CHUNKS] or links[link, HEADER + 2] != chunk:
        return False
    if links[link, HEADER + 3] != _bytes(streams, frame, stream, chunk):
        return False
    links[link, STREAM], links[link, BYTES] = stream, links[link, HEADER + 3]
    waits = chunk - state[stream, DONE]
    if waits == 0 and not streams[stream, ADDS] and _may_join(streams, befores, state, stream, chunk):
        links[link, BUFFER] = -1
        links[link, AT] = _place(streams, frame, stream, chunk)
        return True
    if waits == streams[stream, KEEPS]:
        return False
    frame[FREE] -= 1
    links[link, BUFFER] = free[frame[FREE]]
    links[link, AT] = frame[BUFFERS_AT] + links[link, BUFFER] * frame[BUFFER_BYTES]
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
    links: Numbers,
    state: Numbers,
    kept: Numbers,
    free: Numbers,
    frame: Numbers,
) -> bool:
    """Join what has arrived and may be joined; False if the next join is for Python."""
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
            _count(streams, links, state, frame, stream)
            found = True
        first = 0
    return True


@compiled
def _join(streams: Numbers, frame: Numbers, stream: Word, chunk: Word, buffer: Word) -> bool:
    """Add or store a chunk that lies in a buffer; return False if Python must."""
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
    # numpy rounds complex products of one element in place differently
    frame[ARGUMENTS + 4 : ARGUMENTS + 7] = 0 if length == frame[ITEM] and own == target else frame[ITEM]
    call_numpy(frame[JOIN], arguments, arguments + 24, arguments + 32, frame[JOIN_DATA])
    return True


@compiled
def _count(streams: Numbers, links: Numbers, state: Numbers, frame: Numbers, stream: Word) -> None:
    """Count a joined chunk of a stream, and send its source a credit often enough that its window need not close."""
    state[stream, DONE] += 1
    frame[LEFT] -= 1
    done, window = state[stream, DONE], streams[stream, WINDOW]
    if window == 0 or done == streams[stream, CHUNKS] or (window >= 4 and done % (window // 4) > 0):
        return
    link = 0
    while links[link, LEAVES] or not links[link, FIRST_STREAM] <= stream < links[link, LAST_STREAM]:
        link += 1
    # it never blocks: a source has at most a window under way, and reads when it must wait
    links[link, CREDIT], links[link, CREDIT + 1] = frame[CALL], streams[stream, NUMBER]
    links[link, CREDIT + 2] = done
    _send(
        links[link, DESCRIPTOR],
        links.ctypes.data + 8 * (link * LINK_WORDS + CREDIT),
        CREDIT_BYTES,
        SEND_FLAGS,
    )


@compiled
def _bytes(streams: Numbers, frame: Numbers, stream: Word, chunk: Word) -> Word:
    """Return the length of a chunk."""
    left = streams[stream, LENGTH_OF] - chunk * streams[stream, CHUNK]
    return min(streams[stream, CHUNK], left) * frame[ITEM]


@compiled
def _own(streams: Numbers, frame: Numbers, stream: Word, chunk: Word) -> Word:
    """Return the address of this rank's values of a chunk: in its input, until it has received some."""
    if streams[stream, OWN]:
        return frame[GIVEN_AT] + (streams[stream, FIRST] + chunk * streams[stream, CHUNK]) * frame[ITEM]
    return _place(streams, frame, stream, chunk)


@compiled
def _place(streams: Numbers, frame: Numbers, stream: Word, chunk: Word) -> Word:
    """Return the address of a chunk in the rank's result, or among its partial sums."""
    slots, place = streams[stream, SLOTS], streams[stream, PLACE]
    if slots > 0:
        return frame[PARTIAL_AT] + (place + chunk % slots * streams[stream, SLOT]) * frame[ITEM]
    return frame[RESULT_AT] + (place + chunk * streams[stream, CHUNK]) * frame[ITEM]


@compiled
def _sleep(links: Numbers, frame: Numbers, polled: NDArray[np.int16], now: Word, nanoseconds: Word) -> bool:
    """Sleep until something can move; return whether the rank was woken instead."""
    connections = polled.view(np.int32)
    count = 1
    for link in range(len(links)):
        if links[link, DESCRIPTOR] < 0 or links[link, LEFT_HERE] == 0:
            continue
        in_hand = links[link, LEAVES] and links[link, STREAM] >= 0
        if links[link, OVER] > now and not in_hand:
            # credits are not read before the next chunk may leave
            nanoseconds = min(nanoseconds, links[link, OVER] - now)
            continue
        connections[count, 0] = links[link, DESCRIPTOR]
        polled[count, 2] = WRITE if in_hand else READ
        count += 1
    polled[:count, 3] = 0
    _poll(polled.ctypes.data, count, (nanoseconds + 999_999) // 1_000_000)
    woken: bool = polled[0, 3] != 0
    return woken


@compiled
def _lend(frame: Numbers, now: Word) -> Word:
    """Yield the processor once; return when that may be done again, which a neighbour that takes it puts off."""
    _sched_yield()
    eaten = _now(frame) - now
    return now + eaten + min(RESPITE * eaten, LONGEST_RESPITE) if eaten > EATEN else 0


@compiled
def _now(frame: Numbers) -> Word:
    """Return the steady clock in nanoseconds."""
    _clock_gettime(1, frame.ctypes.data + 8 * CLOCK)
    return frame[CLOCK] * 1_000_000_000 + frame[CLOCK + 1]


@compiled
def _would_wait(frame: Numbers) -> bool:
    """Return whether the last system call failed because it would have blocked."""
    frame[ERROR] = 0
    _memcpy(frame.ctypes.data + 8 * ERROR, _error_location(), 4)
    error = frame.view(np.int32)[2 * ERROR] + frame.view(np.int32)[2 * ERROR + 1]
    return error in WOULD_WAIT


def compile_ahead() -> None:
    """Compile `barrier` and `exchange`, or load them, before any peer waits for this rank."""
    nothing, polled = np.zeros((0, 2), dtype=np.int64), np.zeros((1, 4), dtype=np.int16)
    words = np.zeros(0, dtype=np.int64)
    frame = np.zeros(EXCHANGE_FRAME, dtype=np.int64)
    with compiled_by_one(exchange):
        barrier(nothing, np.zeros(FRAME, dtype=np.int64), polled)
        exchange(nothing, nothing, nothing, nothing, words, words, frame, polled, nothing)
