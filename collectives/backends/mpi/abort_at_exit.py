"""How a process ends after one of its peers was lost: MPI cannot be shut down in order then, and would hang.

At the end of such a process the ranks of a host that still live wait for each other, for a few seconds at most, so
that a launcher that ends all of them with the first does not cut off what the others have to say. Then they leave
without MPI's farewell, with exit status 1. Where the lost peer still exists, stopped or stuck, the lowest of them
asks MPI to end the whole job, so that nothing is left behind.

Ranks that went on without the lost peer leave without that farewell too, with the exit status of their program: what
`sys.exit` was called with, or 1 after an exception. A rank that is out is ended if it is stopped.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from collectives.peers.control_page import LEAVING, Control, Placement
from collectives.peers.peer_watchdog import process_state
from collectives.peers.survivors import Survivors

PATIENCE = 5.0
"""Seconds that a process waits at its end for the others of its host."""

STRANGERS = 0.5
"""Seconds that it gives those of other hosts."""

LAST_WORDS = 0.3
"""Seconds in which a launcher passes on what the processes have printed; what it has not by then is lost when MPI ends
the job."""


@dataclass(frozen=True, slots=True)
class _Remains:
    """A communicator whose ranks went on without it.

    Parameters
    ----------
    placement : Placement
        Of all its ranks.
    survivors : Survivors
        Who knows which of them are out by now.
    numbers : tuple of int
        What it calls them.
    lost : bool
        Whether one has failed.
    """

    placement: Placement
    survivors: Survivors
    numbers: tuple[int, ...]
    lost: bool

    @property
    def broken(self) -> bool:
        """Whether MPI would wait for ranks that do not come."""
        states = [process_state(pid) if pid else "X" for pid in self.placement.pids]
        return self.lost or any(state in "ZXTt" for state in states)

    def end_stopped(self) -> None:
        """End ranks of this machine that are out and stopped, for which the launcher would wait for ever."""
        for number, pid in zip(self.numbers, self.placement.pids, strict=True):
            if pid and number not in self.survivors.members and process_state(pid) in "Tt":
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


_open: dict[int, tuple[Control, Placement]] = {}
_left: dict[int, _Remains] = {}
_farewell: Callable[[], None] | None = None
"""What is to be done before a rank may leave that still used MPI."""
_asked: object = None
"""What `sys.exit` was called with since ranks went on; nothing else tells with which status a process will end."""


def watch_the_end(control: Control, placement: Placement) -> None:
    """Have the end of this process looked after, as long as the communicator is open or has failed."""
    if not _open and not _left:
        atexit.register(_leave)
    _open[id(control)] = (control, placement)


def forget(control: Control) -> None:
    """The communicator was closed in order."""
    _open.pop(id(control), None)
    if not _open and not _left:
        atexit.unregister(_leave)


def went_on(
    control: Control,
    placement: Placement,
    survivors: Survivors,
    numbers: tuple[int, ...],
    farewell: Callable[[], None] | None = None,
) -> None:
    """The ranks that are left have another back end: this process may end well all the same.

    Parameters
    ----------
    control, placement
        Of the one that they had.
    survivors : Survivors
    numbers : tuple of int
        What it calls the ranks of that one.
    farewell : callable, optional
        Where the new one uses MPI too: waits for the other ranks at the end.
    """
    global _farewell
    if not _left:
        _note_status()
    _open.pop(id(control), None)
    failure = control.failure()
    _left[id(control)] = _Remains(placement, survivors, numbers, failure is not None and failure.lost)
    _farewell = farewell


def _note_status() -> None:
    """Let `sys.exit` tell what it is called with."""
    leave = sys.exit

    def exit_and_tell(status: object = None, /) -> NoReturn:
        global _asked
        _asked = status
        leave(status)  # type: ignore[arg-type]

    sys.exit = exit_and_tell


def _status() -> int:
    """The exit status with which this process is about to end."""
    if getattr(sys, "last_value", None) is not None:
        return 1
    return _asked & 0xFF if isinstance(_asked, int) else int(_asked is not None)


def _leave() -> None:
    lost = []
    for control, placement in _open.values():
        failure = control.failure()
        if failure is not None and failure.lost:
            lost.append((control, placement, failure.peer))
    broken = any(one.broken for one in _left.values())
    if lost or broken:
        # What was registered before this has not run yet, and would not run any more.
        atexit.unregister(_leave)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    for control, _ in _open.values():
        control.announce(LEAVING, 1)
    for one in _left.values():
        one.end_stopped()
    if lost:
        _leave_without_farewell(*lost[0])
    if broken:
        if _farewell is not None:
            _farewell()
        os._exit(_status())


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
