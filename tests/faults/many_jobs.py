"""Start several jobs on one address in random orders: `python -m tests.faults.many_jobs`.

Each rank sums its job's number with the other ranks of its job. It must return that sum or one error; a sum with a
rank of another job is mixed. The jobs are told apart by names (TOPOPLAN_JOB), by keys (TOPOPLAN_JOB_KEY), or by
nothing, as jobs that one shell starts by hand.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections import Counter
from multiprocessing.connection import Connection

import numpy as np

import topoplan
from collectives import Communicator
from collectives.backends.tcp.tcp_backend import TcpBackend
from tests.support.forking import forking
from tests.support.ports import free_port
from topoplan.errors import TopoplanError

RANKS = 2
TIMEOUT = 5.0

TOLD_APART: dict[str, tuple[str, ...]] = {
    "names": ("TOPOPLAN_JOB",),
    "keys": ("TOPOPLAN_JOB_KEY",),
    "names and keys": ("TOPOPLAN_JOB", "TOPOPLAN_JOB_KEY"),
    "nothing": (),
}


def work(job: int, rank: int, port: int, names: tuple[str, ...], report: Connection) -> None:
    """Sum the number of the job with the job's other ranks, and report the result or the error."""
    values = {"TOPOPLAN_JOB": f"job-{job}", "TOPOPLAN_JOB_KEY": f"the key of job {job}"}
    os.environ.update({name: values[name] for name in names})
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    plan = topoplan.plan(topoplan.load("dgx-1v"), gpus=range(RANKS))
    try:
        with Communicator(plan, TcpBackend.from_environment(timeout=TIMEOUT)) as comm:
            total = float(comm.all_reduce(np.array([100.0**job]))[0])
        report.send("right" if total == RANKS * 100.0**job else f"MIXED: {total:g}")
    except TopoplanError as error:
        report.send(str(error))


def one_round(jobs: int, names: tuple[str, ...], order: random.Random) -> list[str]:
    """Return the report of every rank of the jobs, started in a random order."""
    context, port = forking(), free_port()
    places = [(job, rank) for job in range(jobs) for rank in range(RANKS)]
    order.shuffle(places)
    started = []
    for job, rank in places:
        here, there = context.Pipe(False)
        process = context.Process(target=work, args=(job, rank, port, names, there), daemon=True)
        process.start()
        there.close()
        started.append((process, here))
        time.sleep(order.choice((0.0, 0.0, 0.01, 0.05)))
    said = []
    for process, here in started:
        try:
            said.append(here.recv() if here.poll(10 * TIMEOUT) else "HANG")
        except EOFError:
            said.append("ENDED without a report")
        process.kill()
        process.join()
    return said


def main() -> None:
    """Print a row for each number of jobs and each way to tell them apart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--jobs", type=int, nargs="*", default=[2, 3, 5])
    parser.add_argument("--apart", choices=TOLD_APART, nargs="*", default=list(TOLD_APART))
    options = parser.parse_args()
    print(
        "| jobs | told apart by | ranks right | refused in one line | mixed | hung |\n|---|---|---|---|---|---|"
    )
    for jobs in options.jobs:
        for apart in options.apart:
            counts, texts = Counter[str](), Counter[str]()
            order = random.Random(jobs)
            for _ in range(options.rounds):
                for said in one_round(jobs, TOLD_APART[apart], order):
                    kind = said.split(" ")[0].rstrip(":")
                    kind = kind if kind in ("right", "MIXED", "HANG", "ENDED") else "refused"
                    counts[kind] += 1
                    texts[said.split(": ", 1)[-1][:60]] += kind == "refused"
            hung = counts["HANG"] + counts["ENDED"]
            print(
                f"| {jobs} | {apart} | {counts['right']} | {counts['refused']} | {counts['MIXED']} | {hung} |",
                flush=True,
            )
            for text, count in texts.most_common(4):
                print(f"  {count} times: {text}", flush=True)


if __name__ == "__main__":
    main()
