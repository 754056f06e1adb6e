"""Gloo's threads let go of the tensors of the last collective before the process group, or the interpreter, goes.

torch's process group of gloo runs collectives in threads of its own (``pt_gloo_runloop``). When one has ended, its
thread drops the tensors, for which it takes Python's lock, and whoever waited for the collective goes on meanwhile. On
a busy machine that may be too late (torch 2.13, without this package too):

- the interpreter has ended: Python ends the thread inside a destructor, and the process aborts with "terminate called
  without an active exception";
- the group is being destroyed: that waits for the thread with Python's lock held, for ever.

There is no call by which torch tells that its threads are idle, so this looks at what Linux says of them.
"""

from __future__ import annotations

import atexit
import time
from pathlib import Path

NAME = "pt_gloo_runloop"

LOOKS = 3
"""In how many looks one after another all of them must be found asleep."""

PAUSE = 2e-3
"""Seconds between two looks, in which they may have Python's lock."""


def let_go(*, limit: float = 5.0) -> bool:
    """Wait until gloo's threads in this process have nothing left to do; whether they had within the limit, in seconds.

    Call it between the last collective and the end of a process group or program: it takes some milliseconds. A thread
    that still has something to drop is ready to run as soon as Python's lock is free, so one that sleeps in several
    looks has nothing. Where Linux tells nothing, nothing is waited for.
    """
    until = time.monotonic() + limit
    asleep = 0
    while asleep < LOOKS:
        if time.monotonic() > until:
            return False
        time.sleep(PAUSE)
        states = [state for name, state in _threads() if name == NAME]
        if not states:
            return True
        asleep = asleep + 1 if all(state == "S" for state in states) else 0
    return True


def _threads() -> list[tuple[str, str]]:
    """Name and state, one letter, of every thread of this process."""
    found = []
    for task in Path("/proc/self/task").glob("*/stat"):
        try:
            text = task.read_text(encoding="ascii", errors="replace")
        except OSError:
            continue  # it has just ended
        name, _, rest = text.partition("(")[2].rpartition(")")
        found.append((name, rest.split()[0]))
    return found


atexit.register(let_go)
