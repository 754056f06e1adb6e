"""What the ranks of one host tell each other through shared memory: counters, notes and failures.

Every rank has a page of its own and writes only there, so nothing needs a lock. A word is 8 bytes and is written
whole. What a word announces is written before it; `memory_barrier` keeps that order on processors that would not.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

from collectives.backends.shared.failure import Failure
from collectives.peers.signature import LENGTH

PAGE = 4096
"""Bytes of a rank's part."""

WORDS = PAGE // 8
DONE = 0
"""Word: calls begun, times 2**32, and operations done in the last one."""
NOTES = 16
"""Word: notes written so far."""
AGREED = 32
"""Word: notes that the host's leader has compared with those of other hosts."""
PEER, ROW = 48, 49
"""Words: whom the rank is waiting for, plus 1, and at which row; 0 if it is not."""
CLOSED, LEAVING = 64, 65
"""Words: 1 when the rank has closed its communicator, and when its process is about to end."""
FAILED = 80
"""Word: 1 when the rank has written a failure."""
_FAILURE, _LARGEST, _NOTE = 1024, 1920, 2048
"""Bytes where a failure, the leader's number and the two notes begin."""


def _nothing() -> None:
    """No fence."""


class Control:
    """The pages of all ranks of a host.

    Parameters
    ----------
    memory : memoryview
        One page for each of them.
    place : int
        Which page is this rank's.
    fence : callable, optional
        Keeps what was read and written before it ahead of what comes after, as other processors see it.
    """

    def __init__(self, memory: memoryview, place: int, *, fence: Callable[[], None] | None = None) -> None:
        self.words = memory.cast("q")
        self.ranks = len(memory) // PAGE
        self.fence = fence or _nothing
        self._bytes = memory
        self._place = place
        self._base = place * PAGE

    @staticmethod
    def size(ranks: int) -> int:
        """Bytes for so many ranks."""
        return max(ranks * PAGE, mmap.PAGESIZE)

    def word(self, place: int, name: int) -> int:
        """A word of a rank."""
        value: int = self.words[place * WORDS + name]
        return value

    def announce(self, name: int, value: int) -> None:
        """Set a word of this rank, after everything that it has written before."""
        self.fence()
        self.words[self._place * WORDS + name] = value

    def write_note(self, number: int, note: bytes) -> None:
        """Show a note to the other ranks; the one before stays readable."""
        start = self._base + _NOTE + number % 2 * LENGTH
        self._bytes[start : start + LENGTH] = note
        self.announce(NOTES, number)

    def note(self, place: int, number: int) -> bytes:
        """A rank's note, once its word says that it is there."""
        start = place * PAGE + _NOTE + number % 2 * LENGTH
        return bytes(self._bytes[start : start + LENGTH])

    def write_agreed(self, number: int, outcome: bytes) -> None:
        """As the host's leader: what all hosts agree on."""
        self._bytes[self._base + _LARGEST : self._base + _LARGEST + len(outcome)] = outcome
        self.announce(AGREED, number)

    def outcome(self, place: int, length: int) -> bytes:
        """What the leader has written."""
        start = place * PAGE + _LARGEST
        return bytes(self._bytes[start : start + length])

    def write_failure(self, failure: Failure) -> None:
        """Show a failure to the other ranks; only the first of each rank counts."""
        if not self.word(self._place, FAILED):
            packed = failure.pack()
            start = self._base + _FAILURE
            self._bytes[start : start + len(packed)] = packed
            self.announce(FAILED, 1)

    def failure(self) -> Failure | None:
        """The earliest failure that a rank of this host has seen."""
        found = []
        for place in range(self.ranks):
            if self.word(place, FAILED):
                self.fence()
                start = place * PAGE + _FAILURE
                found.append(Failure.unpack(bytes(self._bytes[start : start + Failure.LENGTH])))
        return min(found, key=lambda failure: failure.time, default=None)
