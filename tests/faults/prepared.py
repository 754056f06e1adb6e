"""Start prepared calls of mixed sizes with random delays, and kill a rank in some jobs.

The command is `python -m tests.faults.prepared`.

A job prepares a call of every collective and size, and starts them in a random order, the same on all ranks, some in
the background. The sums are of whole numbers, so every result is compared with its exact value. In the jobs chosen, one
rank is killed at a random moment: each survivor must raise an error that names it.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import topoplan
from collectives import Communicator
from collectives.backends.backend import Backend
from collectives.backends.shared.shared_backend import SharedBackend
from collectives.backends.tcp.tcp_backend import TcpBackend
from tests.support.forking import forking
from tests.support.ports import free_port
from topoplan.errors import BackendError

RANKS = 4
TIMEOUT = 10.0
SIZES = {"shared": (4, 1000, 20_000, 200_000, 3_000_000), "tcp": (4, 1000, 20_000)}  # elements of float32
OPENED: dict[str, Callable[..., Backend[Any]]] = {"shared": SharedBackend.met_at, "tcp": TcpBackend}


def prepared(comm: Communicator, elements: int, index: int) -> tuple[Any, Any, Callable[[int], float]]:
    """Return a call, its input, and the sum of its result after the start of a number."""
    collective = ("allreduce", "reduce_scatter", "allgather", "broadcast")[index % 4]
    given = np.zeros(elements, np.float32)
    in_place = collective == "allreduce" and index % 8 == 0
    call = comm.prepare(collective, given, out=given if in_place else None)
    whole = (RANKS * (RANKS + 1)) // 2

    def wanted(number: int) -> float:
        if collective == "broadcast":
            return float(1 + number % 7)
        return whole + RANKS * float(number % 7)

    return call, given, wanted


def work(backend: str, rank: int, port: int, starts: int, seed: int, report: Connection) -> None:
    """Run the starts of one job, and report how many were right, or the error."""
    plan = topoplan.plan(topoplan.load("dgx-1v"), gpus=range(RANKS))
    order = random.Random(seed)
    delays = random.Random(1000 * seed + rank)
    done = 0
    opened = {"rendezvous": f"127.0.0.1:{port}", "rank": rank, "size": RANKS, "timeout": TIMEOUT}
    try:
        with Communicator(plan, OPENED[backend](**opened)) as comm:
            listed = [
                prepared(comm, size, 4 * place + kind)
                for place, size in enumerate(SIZES[backend])
                for kind in range(4)
            ]
            weights = [1 / (1 + len(given)) ** 0.5 for _, given, _ in listed]
            report.send("prepared")
            while done < starts:
                call, given, wanted = order.choices(listed, weights)[0]
                waits = order.random() < 0.02
                given[:] = rank + 1 + done % 7
                if delays.random() < 0.01:
                    time.sleep(delays.random() * 2e-3)
                if waits:
                    call.start()
                    result = call.wait()
                else:
                    result = call()
                expected = wanted(done)
                if len(result) == RANKS * len(given):  # an allgather
                    right = (result.reshape(RANKS, -1) == np.arange(RANKS)[:, None] + 1 + done % 7).all()
                else:
                    right = (result == expected).all()
                if not right:
                    report.send(
                        f"WRONG: start {done} of {call.result.shape}: {result[:4]} instead of {expected}"
                    )
                    os._exit(1)
                done += 1
        report.send(done)
    except BackendError as error:
        report.send((done, error.peer, str(error)))


def one_job(backend: str, starts: int, seed: int, killed: int | None) -> list[Any]:
    """Return what every rank reported."""
    context, port = forking(), free_port()
    jobs = []
    for rank in range(RANKS):
        here, there = context.Pipe(False)
        process = context.Process(target=work, args=(backend, rank, port, starts, seed, there), daemon=True)
        process.start()
        there.close()
        jobs.append((process, here))
    for _, here in jobs:
        here.recv()
    if killed is not None:
        time.sleep(random.Random(seed).random() * 0.3)
        os.kill(jobs[killed][0].pid or 0, signal.SIGKILL)
    said: list[Any] = []
    for process, here in jobs:
        try:
            said.append(here.recv() if here.poll(120) else "HANG")
        except EOFError:
            said.append("killed")
        process.kill()
        process.join()
    return said


def main() -> int:
    """Print what came of the starts of all jobs; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=OPENED, default="shared")
    parser.add_argument("--starts", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=400)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found: Counter[str] = Counter()
    for job in range(options.jobs):
        seed = options.seed + job
        killed = random.Random(seed).randrange(RANKS) if job < options.kills else None
        starts = options.starts // max(1, options.jobs - options.kills)
        # a job with a kill has as many starts as it lives for
        said = one_job(options.backend, 10**9 if killed is not None else starts, seed, killed)
        for rank, one in enumerate(said):
            if isinstance(one, int) and killed is None:
                found["right starts"] += one if rank == 0 else 0
            elif killed is not None and rank == killed and one == "killed":
                found["killed"] += 1
            elif killed is not None and isinstance(one, tuple) and one[1] == killed:
                found["deaths named by a survivor"] += 1
                found["right starts"] += one[0] if rank == (killed == 0) else 0
            else:
                found["FAULTS"] += 1
                print(f"job {job}, rank {rank}, killed {killed}: {one}", flush=True)
    print(f"{options.backend}: {dict(sorted(found.items()))}")
    return 1 if found["FAULTS"] else 0


if __name__ == "__main__":
    sys.exit(main())
