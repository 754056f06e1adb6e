"""Kills (SIGKILL) or stops (SIGSTOP) a rank of the mpi back end at some moment.

Every survivor must report exactly one `BackendError` that names itself, the hurt rank and a step; its ``out`` array
must be untouched. Then all processes must end, the stopped one too, and leave nothing in shared memory.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import topoplan
from collectives import Communicator
from collectives.backends.mpi.mpi_backend import MpiBackend
from collectives.communicator.launch import mpiexec_command
from collectives.peers.peer_watchdog import process_state
from topoplan.errors import BackendError

RANKS = 4

STEP_SECONDS = 1.0  # timeout of the ranks
LIMIT_SECONDS = 30.0  # what has not ended by then hangs

GIVES_UP = "PMIx server's listener thread failed to start"
"""What Open MPI's launcher says where it ends by itself on a busy machine, before it starts a rank."""

FORMS: dict[str, dict[str, Any]] = {
    "shared": {},
    "messages": {"shared": False},
    "mixed": {"hosts": [0, 0, 1, 1]},
}
"""How the ranks exchange: options of `MpiBackend`."""


@dataclass(frozen=True, slots=True)
class Round:
    form: str
    victim: int
    number: signal.Signals
    delay: float
    elements: int


def work(form: str, elements: int) -> None:
    """The life of a rank: collectives until one fails, then one report."""
    plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=range(RANKS))
    backend = MpiBackend(timeout=STEP_SECONDS, **FORMS[form])
    rank = backend.ranks[0]
    comm = Communicator(plan, backend, chunk_bytes=64 << 10, timeout=STEP_SECONDS)
    array = np.full(elements, rank, dtype=np.float32)
    out = np.empty_like(array)
    comm.all_reduce(array, out=out)
    tell({"rank": rank, "pid": os.getpid(), "names": shared_names()})
    seen: dict[str, Any] = {"reporter": rank}
    try:
        while True:
            out.fill(-1)
            comm.all_reduce(array, out=out)
            if not np.all(out == sum(range(RANKS))):
                raise ValueError("a wrong result")
    except BackendError as error:
        seen |= {"rank": error.rank, "peer": error.peer, "step": error.step}
        seen |= {"message": str(error), "time": time.monotonic(), "untouched": bool(np.all(out == -1))}
    except Exception as error:
        seen |= {"message": f"{type(error).__name__}: {error}"}
    comm.close()
    tell(seen)


def shared_names() -> list[str]:
    """The named shared memory that this process has."""
    parts = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    names = {part[5] for part in parts if len(part) == 6}
    return sorted(name for name in names if name.startswith("/dev/shm/") and Path(name).exists())


def tell(what: dict[str, Any]) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def one_round(what: Round, tries: int = 3) -> tuple[list[str], list[float]]:
    """Start the ranks, hurt one, and look at what the others say; complaints, and seconds until they noticed."""
    command = mpiexec_command(
        RANKS,
        [sys.executable, "-m", "tests.faults.mpi", what.form, str(what.elements)],
    )
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        timer = threading.Timer(LIMIT_SECONDS, launcher.kill)
        timer.start()
        said: list[str] = []
        noise = threading.Thread(target=lambda: said.extend(launcher.stderr or ()))
        noise.start()
        lines = [launcher.stdout.readline() for _ in range(RANKS)]
        if not all(lines):
            launcher.kill()
            timer.cancel()
            noise.join()
            if tries > 1 and any(GIVES_UP in line for line in said):
                return one_round(what, tries - 1)
            return [f"the ranks did not start: {' | '.join(said[-20:])}"], []
        started = [json.loads(line) for line in lines]
        pids = {one["rank"]: one["pid"] for one in started}
        time.sleep(what.delay)
        hurt = time.monotonic()
        os.kill(pids[what.victim], what.number)
        reports = [json.loads(line) for line in launcher.stdout if line.startswith("{")]
        hung = not timer.is_alive()
        timer.cancel()
        noise.join()
    complaints = ["the launcher did not end"] if hung else []
    deadline = time.monotonic() + 5
    while (left := [pid for pid in pids.values() if process_state(pid) not in "ZX"]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.05)
    complaints += [f"process {pid} is left" for pid in left]
    names = {name for one in started for name in one["names"]}
    complaints += [f"{name} is left" for name in sorted(names) if Path(name).exists()]
    survivors = [rank for rank in range(RANKS) if rank != what.victim]
    for rank in survivors:
        own = [report for report in reports if report["reporter"] == rank]
        if len(own) != 1:
            complaints.append(f"rank {rank} reported {len(own)} times; {' | '.join(said[-20:])}")
        for report in own:
            if (report.get("rank"), report.get("peer")) != (rank, what.victim) or report.get("step") is None:
                complaints.append(f"rank {rank}: {report['message']}")
            elif not report["untouched"]:
                complaints.append(f"rank {rank}: its out array was touched")
    noticed = [report["time"] for report in reports if report["reporter"] != what.victim and "time" in report]
    return complaints, [when - hurt for when in noticed]


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]))
