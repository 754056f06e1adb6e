"""Run a program and outlive it if it fails: ``python mpiexec_wrapper.py [--wait SECONDS] PROGRAM ARGUMENT ...``.

MPICH's launcher ends all processes of a job as soon as one ends by a signal, regardless of its options, and signals
them when one ends without ``MPI_Finalize``; that cuts them off before they can report the failure. It sees this
process instead, which waits for the others if the program has failed: a minute at most, in which all ranks that notice
it end, or as long as ``--wait`` gives, ``inf`` if they continue without it. This file runs by itself and imports no
other module of the package, so that it starts in a few milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time

LIMIT = 60.0  # seconds to wait for the others by default


def main() -> int:
    """Run the program; return its exit status, or 128 + the number of the signal that killed it."""
    program, limit = sys.argv[1:], LIMIT
    if program[:1] == ["--wait"]:
        limit, program = float(program[1]), program[2:]
    child = os.fork()
    if not child:
        try:
            os.execvp(program[0], program)
        except OSError as error:
            print(f"cannot start {program[0]}: {error.strerror}", file=sys.stderr)
            os._exit(127)
    # signals of the keyboard or the launcher reach the program too, which handles them
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    deadline = time.monotonic() + limit
    while status and time.monotonic() < deadline and others():
        time.sleep(0.05)
    return 128 - status if status < 0 else status


def others() -> bool:
    """Return whether another process of this parent still runs a program."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state not in "ZX":
            parents[int(name)] = int(parent)
    parents_of_programs = set(parents.values())
    return any(
        parent == os.getppid() and pid != os.getpid() and pid in parents_of_programs
        for pid, parent in parents.items()
    )


if __name__ == "__main__":
    sys.exit(main())
