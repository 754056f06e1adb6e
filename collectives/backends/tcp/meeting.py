"""How ranks learn that all of them begin the same collective, without the rendezvous; what is small ends with it.

In round k every rank tells the rank 2**k places behind it what it means to run, and hears it from that 2**k places
before it. It goes on only if that is the same, so who has come through all log2 N rounds knows that all ranks have
come, and mean the same (the dissemination barrier of Hensgen, Finkel and Manber, 1988). What small collectives put in
goes along: after round k a rank has it of 2**(k + 1) ranks (Bruck et al., IEEE TPDS 1997), and in the end of all.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence

import numpy as np

from collectives.backends.tcp.loops import (
    FRAME,
    GIVEN,
    GOT,
    RANK,
    RANKS,
    ROUND,
    SHOWN,
    SOURCE,
    TOLD,
    WAITING,
    meet,
)
from collectives.peers.control_page import SHOWABLE, Room
from collectives.peers.signature import LENGTH

TOGETHER = 64 << 10
"""Bytes that all ranks may put in altogether to have it told in a meeting."""

MOST_RANKS = 64
"""So many ranks at most tell each other what they put in."""


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


def distances(size: int) -> list[int]:
    """How far from each other ranks meet, round by round.

    Examples
    --------
    >>> distances(1), distances(2), distances(5)
    ([], [1], [1, 2, 4])
    """
    return [1 << number for number in range(max(size - 1, 0).bit_length())]
