"""Count what jobs leave that end by SIGKILL, SIGTERM or Ctrl-C at any moment: processes, files, shared memory.

``python -m tests.faults.left_over --jobs 200`` prints, for each back end and signal, how many jobs left something at
once, and what is left of all jobs once another one has run: nothing. The jobs see a temporary folder and a /dev/shm of
their own, so other processes of this machine do not count; it needs what a test bed needs.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import topoplan
from collectives.communicator.launch import die_with_parent
from collectives.lab.testbed.sandbox import sandbox_refusal
from collectives.peers.peer_watchdog import process_state
from topoplan.cli.main import RANK_VARIABLES
from topoplan.interrupts import end_by_signal

commands = import_module("topoplan.cli.main")
for name in ("collectives.lab.bench_command", "collectives.lab.chaos_run", "collectives.lab.benchmark"):
    import_module(name)

SHARED_MEMORY = Path("/dev/shm")
BACKENDS = ("shared", "tcp", "mpi", "chaos")
ENDS = ("SIGKILL", "SIGKILL to all", "SIGTERM", "Ctrl-C")
START_SECONDS = 120.0
ORPHAN_SECONDS = 10.0  # for ranks whose launcher was killed

INSIDE = (
    "unshare",
    "--user",
    "--map-root-user",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
)
MOUNT = 'mount -t tmpfs none /dev/shm && exec "$@"'


def processes() -> list[int]:
    """Return the running processes that jobs have started: all but this one, which is the first here."""
    found = [int(place.name) for place in Path("/proc").glob("[0-9]*")]
    return [pid for pid in found if pid != os.getpid() and process_state(pid) not in "ZX"]


def files_of(folder: Path) -> list[Path]:
    """Return all files and directories below a temporary folder and in shared memory."""
    return [*folder.rglob("*"), *SHARED_MEMORY.rglob("*")]


def arguments_of(backend: str, plan: Path) -> list[str]:
    """Return the arguments of a job that takes longer than it gets."""
    if backend == "chaos":
        return ["bench", str(plan), "--backend", "shared", "--chaos", "600"]
    return ["bench", str(plan), "--backend", backend, "--sizes", ",".join(["4MB"] * 500)]


def start(arguments: Sequence[str], folder: Path) -> int:
    """Run a command in a forked process, which has loaded it already, and return the number of the process."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may let background jobs ignore it
        for name in (*RANK_VARIABLES, "XDG_RUNTIME_DIR"):
            os.environ.pop(name, None)
        os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
        silent = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(silent, descriptor)
        sys.argv[1:] = arguments
        commands.main()
        end_by_signal()
    finally:
        os._exit(1)


def end_one(arguments: Sequence[str], end: str, folder: Path, wait: float) -> tuple[int, int]:
    """Start a job, end it so many seconds after its directory is there, and return its process and exit status."""
    job = start(arguments, folder)
    until = time.monotonic() + START_SECONDS
    while not list(folder.glob(f"*/*-{job}-*")) and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(wait)
    if end == "SIGKILL to all":
        for pid in processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    if end == "Ctrl-C":
        os.killpg(job, signal.SIGINT)
    else:
        os.kill(job, signal.Signals[end.split()[0]])
    status = os.waitstatus_to_exitcode(os.waitpid(job, 0)[1])
    until = time.monotonic() + ORPHAN_SECONDS
    while processes() and time.monotonic() < until:
        time.sleep(0.02)
    return job, status


def run(jobs: int, seed: int, backends: Sequence[str]) -> int:
    """End jobs, print what they left, run one to its end, and print what is left then; 0 if that is nothing."""
    chance = random.Random(seed)
    before = set(SHARED_MEMORY.rglob("*"))
    count: Counter[tuple[str, str, str]] = Counter()
    with tempfile.TemporaryDirectory() as name:
        plan, folder = Path(name) / "plan.json", Path(name) / "temporary"
        folder.mkdir(mode=0o700)
        plan.write_text(topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[0, 1, 2]).to_json())
        for number in range(jobs):
            backend, end = backends[number % len(backends)], chance.choice(ENDS)
            wait = chance.uniform(0, 3)
            job, status = end_one(arguments_of(backend, plan), end, folder, wait)
            expected = {"SIGTERM": -signal.SIGTERM, "Ctrl-C": -signal.SIGINT}.get(end, -signal.SIGKILL)
            own = [one for one in files_of(folder) if f"-{job}-" in one.name]
            count[backend, end, "jobs"] += 1
            count[backend, end, "other status"] += status != expected
            count[backend, end, "with processes left"] += bool(processes())
            count[backend, end, "with directories left"] += bool(own)
            if number % 20 == 19:
                print(f"{number + 1} jobs", file=sys.stderr, flush=True)
        at_once = len(processes()), len([one for one in files_of(folder) if one not in before])
        last = [
            sys.executable,
            "-m",
            "topoplan",
            "bench",
            str(plan),
            "--backend",
            "shared",
            "--sizes",
            "64KB",
        ]
        subprocess.run(last, env={**os.environ, "TMPDIR": str(folder)}, check=True, stdout=subprocess.DEVNULL)
        left = len(processes()), len([one for one in files_of(folder) if one not in before])
    words = ("jobs", "other status", "with processes left", "with directories left")
    print(f"{'back end':10}{'ended by':18}" + "".join(f"{word:>24}" for word in words))
    for backend in backends:
        for end in ENDS:
            print(f"{backend:10}{end:18}" + "".join(f"{count[backend, end, word]:>24}" for word in words))
    print(
        f"left of {jobs} jobs: {at_once[0]} processes, {at_once[1]} files in the temporary folder and /dev/shm"
    )
    print(f"once another job has run: {left[0]} processes, {left[1]} files")
    return int(left != (0, 0))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the jobs; exit status 1 if something is left."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--inside", action="store_true", help="this process has a /dev/shm of its own")
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(given)
    if options.inside:
        return run(options.jobs, options.seed, options.backends.split(","))
    if refusal := sandbox_refusal():
        print(refusal, file=sys.stderr)
        return 2
    again = [sys.executable, "-m", "tests.faults.left_over", *given, "--inside"]
    inside = [*INSIDE, "sh", "-c", MOUNT, "sh", *again]
    return subprocess.run(inside, preexec_fn=die_with_parent(), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
