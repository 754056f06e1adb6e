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
"""In how many looks one after another none of them may have run."""

PAUSE = 7e-3
"""Seconds between two looks, in which they may have Python's lock: who waits for it asks for it every 5 ms."""


def let_go(*, limit: float = 10.0) -> bool:
    """Wait until gloo's threads in this process have nothing left to do; whether they had within the limit, in seconds.

    Call it between the last collective and the end of a process group or program. A thread that still has something to
    drop is ready to run, or wakes up again and again for Python's lock; one that does neither in several looks has
    nothing. Where Linux tells nothing, or there are no such threads, nothing is waited for.
    """
    until = time.monotonic() + limit
    before, quiet = _threads(), 0
    while before and quiet < LOOKS:
        if time.monotonic() > until:
            return False
        time.sleep(PAUSE)
        now = _threads()
        asleep = all(state == "S" for state, _ in now.values())
        quiet = quiet + 1 if asleep and now == before else 0
        before = now
    return True


def _threads() -> dict[str, tuple[str, str]]:
    """Gloo's threads by number: the state of each, one letter, and how often it has been given a processor."""
    found = {}
    for task in Path("/proc/self/task").glob("*"):
        try:
            if (task / "comm").read_text(encoding="utf-8", errors="replace").strip() != NAME:
                continue
            lines = (task / "status").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue  # it has just ended
        told = dict(line.split(":", 1) for line in lines if ":" in line)
        switches = told.get("voluntary_ctxt_switches", "") + told.get("nonvoluntary_ctxt_switches", "")
        found[task.name] = told["State"].strip()[:1], switches
    return found


atexit.register(let_go)
