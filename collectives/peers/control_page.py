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

PAGE = 4096  # bytes of a rank's page

WORDS = PAGE // 8
DONE = 0  # word: calls begun, times 2**32, plus the operations done in the last one
NOTES = 16  # word: notes written so far
AGREED = 32  # word: notes that the host's leader has compared with other hosts
PEER, ROW = 48, 49  # words: the rank that this one waits for, plus 1, and the row; 0 if it does not wait
CLOSED, LEAVING = 64, 65
"""Words: 1 once the rank has closed its communicator, and once its process is about to end."""
FAILED = 80  # word: 1 when the rank has written a failure
ASLEEP, UNTIL, WAKE_COUNT = 96, 97, 112
"""Words: the place of the rank for whose `DONE` this one sleeps, plus 1; or -1 for all notes, -2 - p for all but that
of place p; the value that it waits for; and the number of times that others have woken it.
"""
NOTE = 2048  # byte offset of the two notes
_FAILURE, _LARGEST = 1024, 1920  # byte offsets of a failure and of the leader's outcome
LOOK = 99  # word: 1 if the rank must check the others now, since one has died or failed; set by any rank
GIVEN, TAKEN, ARENA = 120, 122, 124
"""Words. The first two are for even and odd notes: the arena offset of a rank's input to the collective of that note,
and of its result, plus 1; -1 without one, 0 outside the arena. The third is the file descriptor of the arena, plus 1.
"""
LYING, PROBE, PROBED = 104, 106, 107
"""Words. The first is for even and odd notes: the address of a rank's input if it reads the others' memory and they
read its own, else 0. The others are an address for others to probe, and the value there.
"""
SHOWABLE = 256 << 10  # bytes that a rank can share together with a note


@dataclass(frozen=True, slots=True)
class HostPlacement:
    """The host of every rank; by default the ranks of one host share memory.

    Ranks with the same host number exchange through shared memory, all others by messages. The lowest rank of a host
    leads it in agreements of all ranks. `pids` are the process numbers of the ranks, 0 for a process that is not
    visible from here. `memory` is the random name of the memory that the ranks of this host make.

    Examples
    --------
    >>> place = HostPlacement(2, (0, 0, 1, 1), (11, 12, 13, 14))
    >>> place.members, place.place, place.leaders, place.leader
    ((2, 3), 0, (0, 2), 2)
    """

    rank: int
    hosts: tuple[int, ...]
    pids: tuple[int, ...]
    memory: str = ""

    def __post_init__(self) -> None:
        if len(self.pids) != len(self.hosts):
            raise UsageError(
                f"{len(self.hosts)} host numbers for {len(self.pids)} ranks; give one for each rank"
            )

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that share memory with this one, including itself, ascending."""
        own = self.hosts[self.rank]
        return tuple(rank for rank, host in enumerate(self.hosts) if host == own)

    @property
    def place(self) -> int:
        """The index of this rank among the members."""
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
        """Return the ranks on the host of a rank, ascending."""
        return tuple(rank for rank, host in enumerate(self.hosts) if host == self.hosts[leader])


@dataclass(frozen=True, slots=True)
class RankFailure:
    """A failure, as one rank reports it to the others.

    `rank` noticed it and `peer` failed. `step` is the row of the transfer table that could not run, 0 before the
    first. `lost` says that the peer has died or does not answer, so MPI cannot be finalized. `time` is in nanoseconds
    of the noticing host's monotonic clock.

    Examples
    --------
    >>> seen = RankFailure(2, 0, 17, "the peer died", True, 5)
    >>> RankFailure.unpack(seen.pack()) == seen, seen.error(2).args[0]
    (True, 'rank 2, peer 0, step 17: the peer died')
    >>> print(seen.error(3))
    rank 3, peer 0, step 17: rank 2 noticed: the peer died
    """

    LENGTH: ClassVar[int] = 768  # bytes of a packed failure

    rank: int
    peer: int
    step: int
    text: str
    lost: bool
    time: int

    def pack(self) -> bytes:
        """Return `LENGTH` bytes of JSON; a long text is cut."""
        packed = json.dumps(asdict(self)).encode()
        if len(packed) > self.LENGTH:
            text = self.text.encode("ascii", "replace").decode()
            packed = json.dumps(asdict(replace(self, text=text[: self.LENGTH // 2 - 120]))).encode()
        return packed.ljust(self.LENGTH)

    @classmethod
    def unpack(cls, data: bytes) -> RankFailure:
        """Read the output of `pack`."""
        return cls(**json.loads(data))

    def error(self, rank: int) -> BackendError:
        """Return the failure as an error of a rank, which may not have noticed it itself."""
        text = self.text if rank == self.rank else f"rank {self.rank} noticed: {self.text}"
        return BackendError(text, rank=rank, peer=self.peer, step=self.step)


class AddressedMemory(NamedTuple):
    """Memory with its address, since numpy takes longer to find it than to add a few numbers."""

    data: NDArray[np.uint8]
    address: int

    @classmethod
    def of(cls, data: NDArray[np.uint8]) -> AddressedMemory:
        """Return an array of bytes with its address."""
        return cls(data, data.ctypes.data)


class ScratchMemory:
    """Private memory that is kept between calls."""

    def __init__(self) -> None:
        self._memory = AddressedMemory.of(np.empty(0, dtype=np.uint8))

    def of(self, nbytes: int) -> AddressedMemory:
        """Return at least this many bytes, the same memory each time; contents undefined."""
        if len(self._memory.data) < nbytes:
            self._memory = AddressedMemory.of(np.empty(-(-nbytes // 64) * 64, dtype=np.uint8))
        return self._memory


def _nothing() -> None:
    """Do nothing, in place of a fence or an alarm."""


class ControlPage:
    """The pages of all ranks of a host.

    `memory` holds one page for each rank, then twice `SHOWABLE` bytes for each. `fence` orders earlier reads and
    writes before later ones, as other processors see them. `alarm` is set by the back end: it wakes sleeping ranks, so
    that they check the others.
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
        """Return the bytes for a number of ranks."""
        return ranks * (PAGE + 2 * SHOWABLE)

    def word(self, place: int, name: int) -> int:
        """Return a word of a rank."""
        value: int = self.words[place * WORDS + name]
        return value

    def announce(self, name: int, value: int) -> None:
        """Set a word of this rank, after everything that it wrote before."""
        self.fence()
        self.words[self._place * WORDS + name] = value

    def write_note(self, number: int, note: bytes) -> None:
        """Write and announce a note; the previous note stays readable."""
        start = self._base + NOTE + number % 2 * LENGTH
        self._bytes[start : start + LENGTH] = note
        self.announce(NOTES, number)

    def note(self, place: int, number: int) -> bytes:
        """Return a rank's note, once its word announces it."""
        start = place * PAGE + NOTE + number % 2 * LENGTH
        return bytes(self._bytes[start : start + LENGTH])

    def shown(self, number: int) -> AddressedMemory:
        """Return the memory beside a note: rank 0's part at byte 0, each next one 2 `SHOWABLE` bytes further."""
        return self._shown[number % 2]

    def write_agreed(self, number: int, outcome: bytes) -> None:
        """Write the outcome of all hosts, as this host's leader."""
        self._bytes[self._base + _LARGEST : self._base + _LARGEST + len(outcome)] = outcome
        self.announce(AGREED, number)

    def outcome(self, place: int, length: int) -> bytes:
        """Return the outcome that the leader has written."""
        start = place * PAGE + _LARGEST
        return bytes(self._bytes[start : start + length])

    def write_failure(self, failure: RankFailure) -> None:
        """Write a failure and wake the other ranks; only a rank's first failure counts."""
        if not self.word(self._place, FAILED):
            packed = failure.pack()
            start = self._base + _FAILURE
            self._bytes[start : start + len(packed)] = packed
            self.announce(FAILED, 1)
            self.alarm()

    def failure(self) -> RankFailure | None:
        """Return the earliest failure that a rank of this host has noticed."""
        found = []
        for place in range(self.ranks):
            if self.word(place, FAILED):
                self.fence()
                start = place * PAGE + _FAILURE
                found.append(RankFailure.unpack(bytes(self._bytes[start : start + RankFailure.LENGTH])))
        return min(found, key=lambda failure: failure.time, default=None)
