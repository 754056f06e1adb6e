"""How a process ends after one of its peers was lost: MPI cannot be shut down in order then, and would hang.

At the end of such a process the ranks of a host that still live wait for each other, for a few seconds at most, so
that a launcher that ends all of them with the first does not cut off what the others have to say. Then they leave
without MPI's farewell, with exit status 1. Where the lost peer still exists, stopped or stuck, the lowest of them
asks MPI to end the whole job, so that nothing is left behind.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from typing import Any

from collectives.backends.mpi.control import LEAVING, Control
from collectives.backends.mpi.placement import Placement
from collectives.backends.mpi.watch import process_state

PATIENCE = 5.0
"""Seconds that a process waits for the others at its end."""

_open: dict[int, tuple[Any, Control, Placement]] = {}


def watch_the_end(comm: Any, control: Control, placement: Placement) -> None:
    """Have the end of this process looked after, as long as the communicator is open or has failed."""
    if not _open:
        atexit.register(_leave)
    _open[id(control)] = (comm, control, placement)


def forget(control: Control) -> None:
    """The communicator was closed in order."""
    _open.pop(id(control), None)
    if not _open:
        atexit.unregister(_leave)


def _leave() -> None:
    lost = []
    for comm, control, placement in _open.values():
        control.announce(LEAVING, 1)
        failure = control.failure()
        if failure is not None and failure.lost:
            lost.append((comm, control, placement, failure.peer))
    if not lost:
        return
    comm, control, placement, peer = lost[0]
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and _others(control, placement, peer):
        time.sleep(0.002)
    # What was registered before has not run yet, and will not after this process has left.
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    lowest = next(rank for rank in placement.members if rank != peer and _lives(placement, rank))
    if _lives(placement, peer) and lowest == placement.rank:
        comm.Abort(1)
    os._exit(1)


def _others(control: Control, placement: Placement, peer: int) -> bool:
    """Whether a rank of this host still has something to do."""
    return any(
        rank != peer and not control.word(place, LEAVING) and _lives(placement, rank)
        for place, rank in enumerate(placement.members)
    )


def _lives(placement: Placement, rank: int) -> bool:
    pid = placement.pids[rank]
    return bool(pid) and process_state(pid) not in "ZX"
