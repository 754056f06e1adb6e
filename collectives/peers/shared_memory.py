"""Memory that the ranks of one host share, and that no name leads to; how they come to share it.

The lowest rank makes it (`memfd_create`) and the others open it through ``/proc``, so it is gone when the last
process that has it is gone, however that ends. Its first pages hold what the ranks tell each other (`control_page`);
behind them lie the slots. Linux gives memory to the pages that are touched, and the slots grow without a message:
all ranks know how many a collective needs.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from collectives.peers.control_page import Control, Placement, Room
from topoplan.errors import UsageError

ORDERED = ("x86_64", "AMD64", "i686")
"""Machines that need no fence, as `platform.machine` calls them: they show stores in order, and load in order."""

Gather = Callable[[str], list[str]]
"""An allgather of short texts among the ranks; all of them call it."""


class Segment:
    """A mapping of the shared memory.

    Parameters
    ----------
    descriptor : int
        File descriptor of the memory, closed by `close`; -1 for memory of this process alone.
    control : int
        Bytes for what the ranks tell each other.
    """

    def __init__(self, descriptor: int, control: int) -> None:
        self._descriptor = descriptor
        self._control = -(-control // mmap.PAGESIZE) * mmap.PAGESIZE
        self._grow(self._control)
        self.control = memoryview(mmap.mmap(descriptor, self._control))
        self._slots = Room.of(np.zeros(0, np.uint8))

    def _grow(self, length: int) -> None:
        if self._descriptor < 0:
            return
        # one after another: who has seen a shorter memory must not cut off what another rank adds meanwhile
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            if os.fstat(self._descriptor).st_size < length:
                os.ftruncate(self._descriptor, length)
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def slots(self, length: int) -> Room:
        """At least so many bytes of slots; what they hold is undefined, and who uses them has met all other ranks."""
        if len(self._slots.data) < length:
            length = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
            self._grow(self._control + length)
            offset = self._control if self._descriptor >= 0 else 0
            memory = mmap.mmap(self._descriptor, length, offset=offset)
            self._slots = Room.of(np.frombuffer(memory, np.uint8))
        return self._slots

    def close(self) -> None:
        """Give up the slots. What the ranks tell each other stays readable in this process."""
        self._slots = Room.of(np.zeros(0, np.uint8))
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def can_share() -> bool:
    """Whether this system has what a segment needs."""
    return hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()


def create_memory() -> int:
    """The file descriptor of new memory, empty, without a name."""
    return os.memfd_create("topoplan", os.MFD_CLOEXEC)


def open_memory(pid: int, descriptor: int) -> int:
    """Another process's memory, as a file descriptor of this one.

    Raises
    ------
    OSError
        That process cannot be seen from here, or belongs to another user.
    """
    return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


def meet(gather: Gather, *, rank: int, size: int) -> tuple[Placement, Segment]:
    """Share memory with all ranks.

    Parameters
    ----------
    gather : callable
        Called twice.
    rank, size : int

    Raises
    ------
    UsageError
        The ranks do not see each other's memory: they are on different hosts, in different containers, or of different
        users. Raised on all ranks.
    """
    descriptor = create_memory() if rank == 0 and can_share() else -1
    mine = {"pid": os.getpid(), "descriptor": descriptor, "file": _identity(descriptor)}
    told = [json.loads(text) for text in gather(json.dumps(mine))]
    fault = "" if told[0]["descriptor"] >= 0 else "this system has no memory without a name (memfd_create)"
    if rank and not fault:
        try:
            descriptor = open_memory(told[0]["pid"], told[0]["descriptor"])
            # the same process number may be another process in another container
            same = _identity(descriptor) == told[0]["file"]
            fault = "" if same else f"process {told[0]['pid']} is not rank 0 here"
        except OSError as error:
            fault = f"it cannot see the memory of rank 0 ({error.strerror})"
    faults = gather(fault)
    for other, text in enumerate(faults):
        if text:
            if descriptor >= 0:
                os.close(descriptor)
            raise UsageError(f"ranks cannot share memory: rank {other} says {text}; use another back end")
    placement = Placement(rank, (0,) * size, tuple(one["pid"] for one in told))
    return placement, Segment(descriptor, Control.size(size))


def _identity(descriptor: int) -> list[int | str]:
    """What tells one memory from all others, on any host."""
    if descriptor < 0:
        return []
    known = os.fstat(descriptor)
    return [known.st_dev, known.st_ino, Path("/proc/sys/kernel/random/boot_id").read_text().strip()]


def lock_fence() -> Callable[[], None]:
    """A full memory barrier, which taking and giving back a lock of the threads' library is."""
    lock = threading.Lock()

    def fence() -> None:
        with lock:
            pass

    return fence
