"""One rank of a test bed: runs the schedules of the job over its wires, checks every element, and tells the times.

``python -m collectives.testbed.rank FOLDER RANK`` writes one JSON object for each run: schedule, size, seconds from the
moment that all ranks agreed on, and wrong elements. All processes of a machine read the same monotonic clock.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from collectives.backends.tcp.backend import TcpBackend
from collectives.benchmark import METHODS
from collectives.communicator.communicator import Communicator
from collectives.lowering.lower import lower
from collectives.testbed.job import Job, Schedule
from collectives.testbed.pattern_data import expected, given
from topoplan.errors import TopoplanError
from topoplan.plans.plan import Plan
from topoplan.plans.size_plans import parse_plan_file

WARM_UP = 16 << 20
"""Bytes of the first, untimed run of a schedule, unless all sizes are smaller: it opens connections and windows."""

AHEAD = 0.05
"""Seconds from the agreement on a start to the start."""

ITEMSIZE = 4


def main(folder: str, rank: int) -> int:
    """Run the job of a folder as one rank; exit status 1 if a run failed."""
    place = Path(folder)
    job = Job.from_json((place / "job.json").read_text(encoding="utf-8"))
    try:
        for number, schedule in enumerate(job.schedules):
            _run_schedule(job, schedule, number, place=place, rank=rank)
    except (TopoplanError, OSError) as error:
        _tell(rank=rank, error=str(error))
        return 1
    return 0


def _run_schedule(job: Job, schedule: Schedule, number: int, *, place: Path, rank: int) -> None:
    plan = parse_plan_file(schedule.plan)
    assert isinstance(plan, Plan), "a test bed runs one plan, not plans by size"
    wires = place / f"wires{number}-{rank}.json"
    wires.write_text(schedule.wires, encoding="utf-8")
    backend = TcpBackend(
        rank,
        len(job.ranks),
        rendezvous=f"unix:{place / f'rendezvous{number}'}",
        wires=str(wires),
        timeout=job.timeout,
    )
    with Communicator(plan, backend, chunk_bytes=job.chunk_bytes) as communicator:
        _run_once(communicator, backend, plan, min(WARM_UP, *job.sizes), job.chunk_bytes)
        for size, nbytes in enumerate(job.sizes):
            for run in range(job.runs):
                seconds, wrong = _run_once(communicator, backend, plan, nbytes, job.chunk_bytes)
                _tell(rank=rank, schedule=number, size=size, run=run, seconds=seconds, wrong=wrong)


def _run_once(
    communicator: Communicator, backend: TcpBackend, plan: Plan, nbytes: int, chunk_bytes: int
) -> tuple[float, int]:
    """Seconds from the agreed start to this rank's end, and wrong elements."""
    rank, ranks = communicator.ranks[0], communicator.size
    count = elements(plan, nbytes)
    each = count // ranks if plan.collective == "allgather" else count
    mine = given(rank, each)
    wanted = expected(plan.collective, plan.root, rank=rank, ranks=ranks, count=each)
    method = getattr(communicator, METHODS[plan.collective])
    # Lowering is kept, so that the clock does not see it.
    lower(plan, count, chunk_elements=max(1, chunk_bytes // ITEMSIZE))
    start = backend.largest(time.monotonic()) + AHEAD
    time.sleep(max(0.0, start - time.monotonic()))
    result = method(mine)
    seconds = time.monotonic() - start
    return seconds, 0 if wanted is None else int(np.count_nonzero(result != wanted))


def elements(plan: Plan, nbytes: int) -> int:
    """Elements of a plan's buffer for a size; a multiple of the ranks where it is divided among them."""
    count = nbytes // ITEMSIZE
    return count - count % len(plan.ranks) if plan.collective in ("allgather", "reduce_scatter") else count


def _tell(**said: object) -> None:
    """One line in one write: the ranks share a pipe."""
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
