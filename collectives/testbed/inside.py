"""The process within the sandbox: builds the network, measures its links, starts a process for each rank.

``python -m collectives.testbed.inside`` reads a `Job` from the first line of stdin and writes one JSON object on each
line of stdout: the rates of the links, then what the ranks write (`collectives.testbed.rank`). It is the first process
of its namespaces: when it ends, all others do. It ends when stdin does, so nothing outlives whoever has started it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

from collectives.testbed.job import Job
from collectives.testbed.link_rates import measure_links
from collectives.testbed.sandbox import PRIVATE_RUN, build, within
from collectives.testbed.scaling import MOST_TOGETHER
from topoplan.errors import TopoplanError

FOLDER = Path("/run/topoplan")
"""Job, wires and rendezvous; private to the sandbox."""

AFTER_A_FAILURE = 3.0
"""Seconds in which the other ranks may say what they saw of one that failed."""


def main() -> int:
    """Do the job; exit status 1 if a rank failed or the network cannot be built."""
    line = sys.stdin.readline()
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    job = Job.from_json(line)
    try:
        subprocess.run(PRIVATE_RUN, check=True)
        build(job.commands.create, job.commands.inside, job.commands.shape)
        if job.links:
            print(json.dumps({"links": measure_links(job.links, MOST_TOGETHER)}), flush=True)
    except (TopoplanError, OSError, subprocess.CalledProcessError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 1
    FOLDER.mkdir()
    (FOLDER / "job.json").write_text(line, encoding="utf-8")
    return _run_ranks(job) if job.schedules else 0


def _end_with_stdin() -> None:
    # Read below the text layer: it holds a lock, over which the interpreter would stumble when it ends.
    while os.read(0, 1 << 16):
        pass
    os._exit(1)


def _run_ranks(job: Job) -> int:
    hearts = _start_hearts(job)
    ranks: list[subprocess.Popen[bytes]] = []
    for number, namespace in enumerate(job.ranks):
        with within(namespace):
            command = [sys.executable, "-m", "collectives.testbed.rank", str(FOLDER), str(number)]
            ranks.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
    deadline = None
    while any(rank.poll() is None for rank in ranks):
        failed = [number for number, rank in enumerate(ranks) if rank.poll() not in (None, 0)]
        if failed and deadline is None:
            deadline = time.monotonic() + AFTER_A_FAILURE
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for number, rank in enumerate(ranks):
        if rank.poll() not in (None, 0, 1):
            print(json.dumps({"rank": number, "error": f"ended with status {rank.poll()}"}), flush=True)
    for heart in hearts:
        heart.terminate()
    if all(heart.wait() == 0 for heart in hearts):
        told = [(FOLDER / f"beats{rank}.json").read_text(encoding="utf-8") for rank in range(len(hearts))]
        print(json.dumps({"beats": [beat for one in told for beat in json.loads(one)]}), flush=True)
    return int(any(rank.poll() != 0 for rank in ranks))


def _start_hearts(job: Job) -> list[subprocess.Popen[bytes]]:
    """A process for the heartbeats of each rank, where there are any."""
    hearts: list[subprocess.Popen[bytes]] = []
    if job.pulses:
        pulses = json.dumps([asdict(pulse) for pulse in job.pulses])
        (FOLDER / "pulses.json").write_text(pulses, encoding="utf-8")
        for number, namespace in enumerate(job.ranks):
            with within(namespace):
                command = [sys.executable, "-m", "collectives.testbed.heartbeats", str(FOLDER), str(number)]
                hearts.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
    return hearts


if __name__ == "__main__":
    sys.exit(main())
