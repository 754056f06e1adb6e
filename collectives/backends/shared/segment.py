"""Memory that the ranks of one host share, and that no name leads to.

The lowest rank makes it (`memfd_create`) and the others open it through ``/proc``, so it is gone when the last
process that has it is gone, however that ends. Its first pages hold what the ranks tell each other (`control_page`);
behind them lie the slots. Linux gives memory to the pages that are touched, and the slots grow without a message:
all ranks know how many a collective needs.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


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
        self._slots: mmap.mmap | None = None

    def _grow(self, length: int) -> None:
        if self._descriptor < 0:
            return
        # All ranks of a collective grow it to one length, so nobody can cut off what another has just added.
        if os.fstat(self._descriptor).st_size < length:
            os.ftruncate(self._descriptor, length)

    def slots(self, elements: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """At least so many elements of slots, as one dimension; what they hold is undefined.

        All ranks must call it in the same collective, after all have left the one before.
        """
        length = elements * dtype.itemsize
        if self._slots is None or len(self._slots) < length:
            length = -(-max(length, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
            self._grow(self._control + length)
            offset = self._control if self._descriptor >= 0 else 0
            self._slots = mmap.mmap(self._descriptor, length, offset=offset)
        return np.frombuffer(self._slots, dtype, count=elements)

    def close(self) -> None:
        """Give up the slots. What the ranks tell each other stays readable in this process."""
        self._slots = None
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
