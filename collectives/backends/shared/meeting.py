"""How processes of one host come to share memory, with an allgather of short texts as their only way to talk."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

from collectives.backends.shared.control_page import Control
from collectives.backends.shared.placement import Placement
from collectives.backends.shared.segment import Segment, can_share, create_memory, open_memory
from topoplan.errors import UsageError

Gather = Callable[[str], list[str]]
"""An allgather of short texts among the ranks; all of them call it."""


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
