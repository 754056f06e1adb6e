"""How ranks learn that all of them begin the same collective, without the rendezvous; what is small ends with it.

In round k every rank tells the rank 2**k places behind it what it means to run, and hears it from that 2**k places
before it. It goes on only if that is the same, so who has come through all log2 N rounds knows that all ranks have
come, and mean the same (the dissemination barrier of Hensgen, Finkel and Manber, 1988). What small collectives put in
goes along: after round k a rank has it of 2**(k + 1) ranks (Bruck et al., IEEE TPDS 1997), and in the end of all.

A meeting is one compiled call. It gives its processor away for a short while before it sleeps, as ranks in shared
memory do (`collectives.backends.shared.run`), and ends after a while, or when the bell rings, so that Python can look
whether the others still live.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from collectives.compiled import Word, compiled, from_system
from collectives.peers.control_page import SHOWABLE, Room
from collectives.peers.signature import LENGTH

MET, WAITING, DIFFERS, PEER_ENDED = range(4)
"""What a call ends with: all have met; it waits; a peer means another collective; a connection has ended."""

TOGETHER = 64 << 10
"""Bytes that all ranks may put in altogether to have it told in a meeting."""

MOST_RANKS = 64
"""So many ranks at most tell each other what they put in."""

PATIENCE = 20_000_000
"""Nanoseconds of waiting after which a call ends."""

YIELDING, EATEN, RESPITE, LONGEST_RESPITE = 200_000, 500_000, 32, 320_000_000
"""See `collectives.backends.shared.run`."""

ROUND, SENT, GOT, RANK, RANKS, GIVEN, SOURCE, TOLD, HEARD, SHOWN, RESTED, ERROR, CLOCK = range(13)
"""What a frame holds: the round, the bytes of it that have left and come, this rank, how many there are, bytes that
each puts in, where they lie, the addresses of what is told, of what is heard and of what all have shown in the end,
when a processor may be given away again, and room for an error and a time (2 words)."""

FRAME = 16
"""Words of a frame."""

WOULD_WAIT = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR)
SEND_FLAGS = int(getattr(socket, "MSG_DONTWAIT", 0)) | int(getattr(socket, "MSG_NOSIGNAL", 0))
RECEIVE_FLAGS = int(getattr(socket, "MSG_DONTWAIT", 0))
READ, WRITE = int(select.POLLIN), int(select.POLLOUT)

_send = from_system("send", arguments=4)
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
        ``MET``, ``WAITING``, ``DIFFERS`` or ``PEER_ENDED``.
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
            before = now
            now = _now(frame)
            if now - began >= PATIENCE:
                return WAITING
            if now >= frame[RESTED] and now - idle < YIELDING:
                before = now
                _sched_yield()
                now = _now(frame)
                if now - before > EATEN:
                    frame[RESTED] = now + min(RESPITE * (now - before), LONGEST_RESPITE)
            elif _sleep(rounds, frame, polled, length, PATIENCE - (now - began)):
                return WAITING
    if given > 0:
        for rank in range(ranks):
            place = (frame[RANK] - rank) % ranks
            _memcpy(frame[SHOWN] + rank * 2 * SHOWABLE, frame[TOLD] + LENGTH + place * given, given)
    return MET


@compiled
def _sleep(
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


class Bell(threading.Condition):
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


class Meeting:
    """Where the ranks of a job meet, again and again.

    Parameters
    ----------
    rank, size : int
    links : sequence of (socket, socket)
        For each distance of `distances` the connection to the rank so many places behind and from that before.
    bell : Bell

    Attributes
    ----------
    touched : float
        When something came or left last, on the steady clock.
    """

    def __init__(
        self, rank: int, size: int, links: Sequence[tuple[socket.socket, socket.socket]], bell: Bell
    ) -> None:
        self._rounds = np.array(
            [[tells.fileno(), hears.fileno()] for tells, hears in links], dtype=np.int64
        ).reshape(-1, 2)
        self._polled = np.zeros((3, 4), dtype=np.int16)
        self._polled.view(np.int32)[2, 0] = bell.descriptor
        self._told = Room.of(np.empty(LENGTH + TOGETHER, np.uint8))
        self._heard = Room.of(np.empty(LENGTH + TOGETHER, np.uint8))
        self.shown = Room.of(np.empty(size * 2 * SHOWABLE if size <= MOST_RANKS else 0, np.uint8))
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
            place = tuple(self._frame[: GOT + 1].tolist())
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


def distances(size: int) -> list[int]:
    """How far from each other ranks meet, round by round.

    Examples
    --------
    >>> distances(1), distances(2), distances(5)
    ([], [1], [1, 2, 4])
    """
    return [1 << number for number in range(max(size - 1, 0).bit_length())]


def compile_ahead() -> None:
    """Compile `meet`, or load it, before anybody waits for this rank."""
    meet(np.zeros((0, 2), dtype=np.int64), np.zeros(FRAME, dtype=np.int64), np.zeros((3, 4), dtype=np.int16))
