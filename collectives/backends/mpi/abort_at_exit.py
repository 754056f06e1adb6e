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

from collectives.peers.control_page import LEAVING, Control, Placement
from collectives.peers.peer_watchdog import process_state

PATIENCE = 5.0
"""Seconds that a process waits at its end for the others of its host."""

STRANGERS = 0.5
"""Seconds that it gives those of other hosts."""

LAST_WORDS = 0.3
"""Seconds in which a launcher passes on what the processes have printed; what it has not by then is lost when MPI ends
the job."""

_open: dict[int, tuple[Control, Placement]] = {}


def watch_the_end(control: Control, placement: Placement) -> None:
    """Have the end of this process looked after, as long as the communicator is open or has failed."""
    if not _open:
        atexit.register(_leave)
    _open[id(control)] = (control, placement)


def forget(control: Control) -> None:
    """The communicator was closed in order."""
    _open.pop(id(control), None)
    if not _open:
        atexit.unregister(_leave)


def _leave() -> None:
    lost = []
    for control, placement in _open.values():
        failure = control.failure()
        if failure is not None and failure.lost:
            lost.append((control, placement, failure.peer))
    if lost:
        # What was registered before this has not run yet, and would not run any more.
        atexit.unregister(_leave)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    for control, _ in _open.values():
        control.announce(LEAVING, 1)
    if lost:
        _leave_without_farewell(*lost[0])


def _leave_without_farewell(control: Control, placement: Placement, peer: int) -> None:
    from mpi4py import MPI

    others = [rank for rank in range(len(placement.hosts)) if rank != peer and _may_live(placement, rank)]
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and _busy(control, placement, peer):
        time.sleep(0.002)
    if placement.strangers:
        time.sleep(STRANGERS)
    if _may_live(placement, peer) and others[0] == placement.rank:
        time.sleep(LAST_WORDS)
        MPI.COMM_WORLD.Abort(1)
    os._exit(1)


def _busy(control: Control, placement: Placement, peer: int) -> bool:
    """Whether another rank of this host still has something to do."""
    return any(
        rank != peer and not control.word(place, LEAVING) and _may_live(placement, rank)
        for place, rank in enumerate(placement.members)
    )


def _may_live(placement: Placement, rank: int) -> bool:
    """Whether a rank's process exists, or cannot be seen from here."""
    pid = placement.pids[rank]
    return not pid or process_state(pid) not in "ZX"
