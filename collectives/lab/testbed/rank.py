"""Run one rank of a testbed: the schedules of the job over its wires, every element checked, times reported.

``python -m collectives.lab.testbed.rank`` is the first process of a sandbox, which forks the ranks. A rank writes one
JSON object for each run: schedule, size, the agreed start, seconds from there, and wrong elements. All processes of a
machine read the same monotonic clock.

The expected result is known without running the collective: inputs repeat after a prime number of elements. Sums are
exact in float32 for any number of ranks that a testbed can hold, and a misplaced chunk shows, since no chunk is a
multiple of the period.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from math import ceil, floor

import numpy as np
from numpy.typing import NDArray

from collectives.backends.tcp.compiled_exchange import compile_ahead
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.communicator.communicator import Communicator
from collectives.lab.benchmark import DIVIDED, METHODS
from collectives.lab.testbed.sandbox import (
    JOB_FOLDER,
    SandboxJob,
    ScheduledPlan,
    change_interfaces,
    run_sandbox,
    shape_links,
)
from collectives.tables.lowering import lower
from topoplan.errors import BackendError, TopoplanError, UsageError
from topoplan.plans.certificates.exchange import Demand
from topoplan.plans.plan import Plan
from topoplan.plans.size_plans import parse_plan_file

PERIOD = 8191

Floats = NDArray[np.float32]


def make_input(rank: int, count: int) -> Floats:
    """Return the input of a rank, (count,) float32.

    >>> make_input(1, 4).tolist()
    [0.0, 2.0, 4.0, 6.0]
    """
    return np.resize(_period(rank), count)


def expected_result(collective: str, root: int | None, *, rank: int, ranks: int, count: int) -> Floats | None:
    """Return the result of a rank, None if it has none; ``count`` are the elements of an input.

    >>> expected_result("allreduce", None, rank=0, ranks=2, count=3).tolist()
    [0.0, 3.0, 6.0]
    """
    if collective == "allgather":
        return np.concatenate([make_input(other, count) for other in range(ranks)])
    if collective == "broadcast":
        return make_input(root or 0, count)
    if collective == "alltoall":
        return np.concatenate([np.split(make_input(other, count), ranks)[rank] for other in range(ranks)])
    if collective == "reduce" and rank != root:
        return None
    total = np.resize(np.sum([_period(other) for other in range(ranks)], axis=0, dtype=np.float32), count)
    if collective == "reduce_scatter":
        block = count // ranks
        return total[rank * block : (rank + 1) * block]
    return total


def _period(rank: int) -> Floats:
    return (np.arange(PERIOD) * (rank + 1) % 251).astype(np.float32)


def sent_counts(demand: Demand, nbytes: int) -> tuple[tuple[int, ...], ...]:
    """Return the elements that row sends to column, if the mean buffer of a rank has so many bytes.

    UsageError if they are so few that a rank would send or receive another amount, by an eighth of the fullest rank's.

    >>> from topoplan.plans.certificates.certificate import Cut
    >>> sent_counts(Demand(((0, 9), (3, 0)), Cut(("gpu0",))), 1200)
    ((0, 450), (150, 0))
    """
    unit = nbytes / demand.buffer / ITEMSIZE
    longest = max(amount for s, row in enumerate(demand.demand) for d, amount in enumerate(row) if s != d)
    # By less than an element for each block, so that they follow the demand, and none vanishes.
    counts = tuple(
        tuple(
            ceil(amount * unit) if amount == longest else max(floor(amount * unit), min(amount, 1))
            for amount in row
        )
        for row in demand.demand
    )
    wanted = [amount * unit for amount in _line_sums(demand.demand)]
    if 8 * max(abs(a - b) for a, b in zip(_line_sums(counts), wanted, strict=True)) > max(wanted):
        raise UsageError(
            f"sizes must be large enough for the proportions of the demand, got {nbytes} bytes; take larger ones"
        )
    return counts


def _line_sums(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return what each rank sends, and then what each receives, without what it keeps."""
    kept = [row[rank] for rank, row in enumerate(rows)]
    return [
        sum(line) - own
        for lines in (rows, zip(*rows, strict=True))
        for line, own in zip(lines, kept, strict=True)
    ]


def received_blocks(counts: Sequence[Sequence[int]], rank: int) -> Floats:
    """Return what a rank receives if the input of every rank is its blocks, one behind the other.

    >>> received_blocks(((0, 2), (1, 1)), 1).tolist()
    [0.0, 1.0, 2.0]
    """
    blocks = []
    for other, row in enumerate(counts):
        first = sum(row[:rank])
        blocks.append(make_input(other, sum(row))[first : first + row[rank]])
    return np.concatenate(blocks)


WARM_UP_BYTES = 16 << 20
"""Bytes of the first, untimed run of a schedule, unless all sizes are smaller: it opens connections and TCP windows."""

START_DELAY = 0.05
"""Seconds from the agreement on a start to the start."""

ITEMSIZE = 4


def run_rank(job: SandboxJob, rank: int) -> int:
    """Run a job as one rank; exit status 1 if a run failed."""
    try:
        for number, schedule in enumerate(job.schedules):
            _run_schedule(job, schedule, number, rank=rank)
    except (TopoplanError, OSError) as error:
        _write_record(rank=rank, error=str(error))
        return 1
    return 0


def _run_schedule(job: SandboxJob, schedule: ScheduledPlan, number: int, *, rank: int) -> None:
    plan = parse_plan_file(schedule.plan)
    assert isinstance(plan, Plan), "a test bed runs one plan, not plans by size"
    wires = JOB_FOLDER / f"wires{number}-{rank}.json"
    wires.write_text(schedule.wires, encoding="utf-8")
    backend = TcpBackend(
        rank,
        len(job.ranks),
        rendezvous=job.meeting or f"unix:{JOB_FOLDER / f'rendezvous{number}'}",
        wires=str(wires),
        pace=schedule.pace,
        timeout=job.timeout,
    )
    on_slow = "replan" if job.drop else "ignore"
    with Communicator(
        plan, backend, chunk_bytes=job.chunk_bytes, on_failure=job.on_failure, on_slow=on_slow
    ) as communicator:
        every = job.late or isinstance(plan.certificate, Demand)
        for nbytes in (min(WARM_UP_BYTES, *job.sizes), *(job.sizes if every else ())):
            _run_once(communicator, plan, nbytes, job.chunk_bytes)
        if job.drop or job.cut:
            _run_dropping(job, communicator, plan, number)
            return
        for size, nbytes in enumerate(job.sizes):
            for run in range(job.runs):
                late = dict(job.late).get(rank, 0.0)
                start, seconds, wrong = _run_once(communicator, plan, nbytes, job.chunk_bytes, late=late)
                times = {"start": start, "seconds": seconds, "wrong": wrong}
                _write_record(rank=rank, schedule=number, size=size, run=run, **times)


def _run_dropping(job: SandboxJob, communicator: Communicator, plan: Plan, schedule: int) -> None:
    """Run before links become slower or are cut, then until the ranks have replanned, then by the new plan.

    The three parts are reported as sizes 0, 1 and 2; the ranks replanned before or in the first run of the last part.
    Rank 0 cuts links in the middle of a run, and reports when. Runs that ended before count as runs before.
    """
    rank, usual = communicator.ranks[0], 0.0

    def run(phase: int, number: int) -> float:
        start, seconds, wrong = _run_once(communicator, plan, job.sizes[0], job.chunk_bytes)
        phase = phase if communicator.plan.digest == plan.digest else 2
        times = {"start": start, "seconds": seconds, "wrong": wrong}
        _write_record(rank=rank, schedule=schedule, size=phase, run=number, **times)
        return seconds

    for number in range(job.runs):
        usual = run(0, number)
    if rank == 0:
        shape_links(job.drop)
        if job.cut:
            threading.Timer(START_DELAY + usual / 2, _cut, [job]).start()
    number = job.runs
    while not communicator.notes and number < job.runs + job.most_dropped:
        run(0 if job.cut else 1, number)
        number += 1
    if communicator.plan.digest != plan.digest:
        for after in range(number, number + job.runs):
            run(1, after)
    if rank == 0:
        _write_record(notes=list(communicator.notes))


def _cut(job: SandboxJob) -> None:
    """Cut links, and report when this began."""
    began = time.monotonic()
    change_interfaces(job.cut)
    _write_record(cut=began)


def _run_once(
    communicator: Communicator, plan: Plan, nbytes: int, chunk_bytes: int, *, late: float = 0.0
) -> tuple[float, float, int]:
    """Return the agreed start, seconds from there to this rank's end, and wrong elements.

    The rank begins `late` seconds behind the start. A failure that the communicator raises is recovered by
    `Communicator.shrink`, and the run is repeated.
    """
    rank, ranks = communicator.ranks[0], communicator.size
    wanted: Floats | None
    if isinstance(plan.certificate, Demand):
        counts = sent_counts(plan.certificate, nbytes)
        mine, wanted = make_input(rank, sum(counts[rank])), received_blocks(counts, rank)
        method = partial(communicator.all_to_all_v, send_counts=counts[rank])
    else:
        count = element_count(plan, nbytes)
        each = count // ranks if plan.collective == "allgather" else count
        mine = make_input(rank, each)
        wanted = expected_result(plan.collective, plan.root, rank=rank, ranks=ranks, count=each)
        method = getattr(communicator, METHODS[plan.collective])
        # Lower before the clock starts: tables are cached.
        whole = count * ranks if plan.collective == "alltoall" else count
        lower(plan, whole, chunk_elements=max(1, chunk_bytes // ITEMSIZE))
    said = communicator._gather_texts(repr(time.monotonic()))
    start = max(map(float, said)) + START_DELAY
    time.sleep(max(0.0, start + late - time.monotonic()))
    try:
        result = method(mine)
    except BackendError as error:
        if not error.links:
            raise
        communicator.shrink()
        result = method(mine)
    seconds = time.monotonic() - start
    return start, seconds, 0 if wanted is None else int(np.count_nonzero(result != wanted))


def element_count(plan: Plan, nbytes: int) -> int:
    """Return the elements of a plan's buffer for a size; a multiple of the ranks if it is divided among them."""
    count = nbytes // ITEMSIZE
    return count - count % len(plan.ranks) if plan.collective in DIVIDED else count


def _write_record(**said: object) -> None:
    """Write one line in one write: the ranks share a pipe."""
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    compile_ahead()  # once for all ranks
    sys.exit(run_sandbox(run_rank))
