"""Define the pages by which the ranks of one host exchange counters, notes and failures through shared memory.

Every rank writes only to a page of its own, so no lock is needed. A word has 8 bytes and is written at once. Data is
written before the word that announces it; a fence keeps that order on processors that would not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.peers.control_plane import LENGTH
from topoplan.errors import BackendError, UsageError

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
ASLEEP, UNTIL, WAKE_COUNT = 96, 97, 112
"""Words: the place of the rank for whose `DONE` this one sleeps, plus 1, or -1 for all notes; what it sleeps for; and
how often others have woken it."""
NOTE = 2048
"""Byte where the two notes begin."""
_FAILURE, _LARGEST = 1024, 1920
"""Bytes where a failure and the leader's number begin."""
LOOK = 99
"""Word: 1 where the rank is to look after the others now, as one has died or failed; whoever knows sets it."""
GIVEN, TAKEN, ARENA = 120, 122, 124
"""Words, of the first two one for even notes and one for odd ones: where in a rank's arena lies what it puts into the
collective of that note, and its result, plus 1; -1 if it has none, and 0 if it lies elsewhere; and the file descriptor
of the arena, plus 1."""
LYING, PROBE, PROBED = 104, 106, 107
"""Words, the first one for even notes and one for odd ones: the address of what a rank puts into the collective of that
note, where it reads the others' memory and lets them read its own, else 0; an address that others may read to find out
whether they can, and what stands there."""
SHOWABLE = 256 << 10
"""Bytes that a rank can show together with a note."""


@dataclass(frozen=True, slots=True)
class HostPlacement:
    """Which ranks share memory: those of one host, unless told otherwise.

    Numbers of hosts mean nothing but equality: ranks with the same number exchange through shared memory, all others
    by messages. The lowest rank of a host speaks for it when all ranks must agree.

    Parameters
    ----------
    rank : int
        The rank of this process.
    hosts : tuple of int
        For each rank the number of its host.
    pids : tuple of int
        For each rank its process number, 0 where that process cannot be seen from here.

    Examples
    --------
    >>> place = HostPlacement(2, (0, 0, 1, 1), (11, 12, 13, 14))
    >>> place.members, place.place, place.leaders, place.leader
    ((2, 3), 0, (0, 2), 2)
    """

    rank: int
    hosts: tuple[int, ...]
    pids: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.pids) != len(self.hosts):
            raise UsageError(
                f"{len(self.hosts)} host numbers for {len(self.pids)} ranks; give one for each rank"
            )

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that share memory with this one, itself included, ascending."""
        own = self.hosts[self.rank]
        return tuple(rank for rank, host in enumerate(self.hosts) if host == own)

    @property
    def place(self) -> int:
        """Where this rank stands among the members."""
        return self.members.index(self.rank)

    @property
    def leaders(self) -> tuple[int, ...]:
        """The lowest rank of every host, ascending."""
        return tuple(sorted({host: rank for rank, host in reversed(list(enumerate(self.hosts)))}.values()))

    @property
    def leader(self) -> int:
        """The lowest rank of this host."""
        return self.members[0]

    @property
    def strangers(self) -> tuple[int, ...]:
        """The ranks that do not share memory with this one."""
        return tuple(rank for rank in range(len(self.hosts)) if rank not in self.members)

    def members_of(self, leader: int) -> tuple[int, ...]:
        """The ranks on the host of another rank, ascending."""
        return tuple(rank for rank, host in enumerate(self.hosts) if host == self.hosts[leader])


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Why a collective cannot go on, as one rank tells it to the others.

    Parameters
    ----------
    rank : int
        Who noticed.
    peer : int
        Who failed.
    step : int
        The row of the transfer table that could not run; 0 where none had begun.
    text : str
    lost : bool
        Whether the peer has died or does not answer, so that MPI cannot be shut down in order.
    time : int
        Nanoseconds of the noticing host's steady clock.

    Examples
    --------
    >>> seen = RankFailure(2, 0, 17, "the peer died", True, 5)
    >>> RankFailure.unpack(seen.pack()) == seen, seen.error(2).args[0]
    (True, 'rank 2, peer 0, step 17: the peer died')
    >>> print(seen.error(3))
    rank 3, peer 0, step 17: rank 2 noticed: the peer died
    """

    LENGTH: ClassVar[int] = 768
    """Bytes of a packed failure."""

    rank: int
    peer: int
    step: int
    text: str
    lost: bool
    time: int

    def pack(self) -> bytes:
        """As `LENGTH` bytes of JSON; a long text is cut."""
        packed = json.dumps(asdict(self)).encode()
        if len(packed) > self.LENGTH:
            text = self.text.encode("ascii", "replace").decode()
            packed = json.dumps(asdict(replace(self, text=text[: self.LENGTH // 2 - 120]))).encode()
        return packed.ljust(self.LENGTH)

    @classmethod
    def unpack(cls, data: bytes) -> RankFailure:
        """Read what `pack` wrote."""
        return cls(**json.loads(data))

    def error(self, rank: int) -> BackendError:
        """The failure as an error of one rank, which may not have noticed by itself."""
        text = self.text if rank == self.rank else f"rank {self.rank} noticed: {self.text}"
        return BackendError(text, rank=rank, peer=self.peer, step=self.step)


class AddressedMemory(NamedTuple):
    """Memory, and the address at which it begins, which takes numpy longer to find than a small sum takes."""

    data: NDArray[np.uint8]
    address: int

    @classmethod
    def of(cls, data: NDArray[np.uint8]) -> AddressedMemory:
        """Where an array of bytes lies."""
        return cls(data, data.ctypes.data)


class ScratchMemory:
    """Memory of this process alone that is kept between calls."""

    def __init__(self) -> None:
        self._room = AddressedMemory.of(np.empty(0, dtype=np.uint8))

    def of(self, nbytes: int) -> AddressedMemory:
        """At least so many bytes, the same again and again; contents undefined."""
        if len(self._room.data) < nbytes:
            self._room = AddressedMemory.of(np.empty(-(-nbytes // 64) * 64, dtype=np.uint8))
        return self._room


def _nothing() -> None:
    """No fence, no alarm."""


class ControlPage:
    """The pages of all ranks of a host.

    Parameters
    ----------
    memory : memoryview
        One page for each of them, and behind all pages twice `SHOWABLE` for each.
    place : int
        Which page is this rank's.
    fence : callable, optional
        Keeps what was read and written before it ahead of what comes after, as other processors see it.

    Attributes
    ----------
    alarm : callable
        Wakes the ranks that sleep, so that they look after the others; set by who lets them sleep.
    """

    def __init__(self, memory: memoryview, place: int, *, fence: Callable[[], None] | None = None) -> None:
        self.words = memory.cast("q")
        self.ranks = len(memory) // (PAGE + 2 * SHOWABLE)
        pages = np.frombuffer(memory, np.uint8)
        self.address: int = pages.ctypes.data
        self._shown = tuple(
            AddressedMemory.of(pages[self.ranks * PAGE + parity * SHOWABLE :]) for parity in range(2)
        )
        self.fence = fence or _nothing
        self.alarm = _nothing
        self._bytes = memory
        self._place = place
        self._base = place * PAGE

    @staticmethod
    def size(ranks: int) -> int:
        """Bytes for so many ranks."""
        return ranks * (PAGE + 2 * SHOWABLE)

    def word(self, place: int, name: int) -> int:
        """A word of a rank."""
        value: int = self.words[place * WORDS + name]
        return value

    def announce(self, name: int, value: int) -> None:
        """Set a word of this rank, after everything that it has written before."""
        self.fence()
        self.words[self._place * WORDS + name] = value

    def put_note(self, number: int, note: bytes) -> None:
        """Put a note where the other ranks will look for it; the one before stays readable."""
        start = self._base + NOTE + number % 2 * LENGTH
        self._bytes[start : start + LENGTH] = note

    def write_note(self, number: int, note: bytes) -> None:
        """Show a note to the other ranks."""
        self.put_note(number, note)
        self.announce(NOTES, number)

    def note(self, place: int, number: int) -> bytes:
        """A rank's note, once its word says that it is there."""
        start = place * PAGE + NOTE + number % 2 * LENGTH
        return bytes(self._bytes[start : start + LENGTH])

    def shown(self, number: int) -> AddressedMemory:
        """What the ranks show with a note: the first one's from byte 0, each next one's 2 `SHOWABLE` bytes further."""
        return self._shown[number % 2]

    def write_agreed(self, number: int, outcome: bytes) -> None:
        """As the host's leader: what all hosts agree on."""
        self._bytes[self._base + _LARGEST : self._base + _LARGEST + len(outcome)] = outcome
        self.announce(AGREED, number)

    def outcome(self, place: int, length: int) -> bytes:
        """What the leader has written."""
        start = place * PAGE + _LARGEST
        return bytes(self._bytes[start : start + length])

    def write_failure(self, failure: RankFailure) -> None:
        """Show a failure to the other ranks, and wake them; only the first of each rank counts."""
        if not self.word(self._place, FAILED):
            packed = failure.pack()
            start = self._base + _FAILURE
            self._bytes[start : start + len(packed)] = packed
            self.announce(FAILED, 1)
            self.alarm()

    def failure(self) -> RankFailure | None:
        """The earliest failure that a rank of this host has seen."""
        found = []
        for place in range(self.ranks):
            if self.word(place, FAILED):
                self.fence()
                start = place * PAGE + _FAILURE
                found.append(RankFailure.unpack(bytes(self._bytes[start : start + RankFailure.LENGTH])))
        return min(found, key=lambda failure: failure.time, default=None)
