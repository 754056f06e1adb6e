"""What a process tells of the collectives that it runs while it is traced."""

from __future__ import annotations

import time

import numpy as np

from collectives import Communicator
from collectives.backends.backend import TraceEvent
from tests.support.hand_plans import forest_plan
from tests.support.job_meeting import in_shared_memory
from tests.support.tcp_jobs import in_threads


def traced(comm: Communicator, elements: int) -> tuple[int, int, list[TraceEvent]]:
    """When two sums began and ended, and their steps; a third one is not traced."""
    array = np.ones(elements, np.float32)
    comm.all_reduce(array)
    began = time.monotonic_ns()
    with comm.trace() as steps:
        for _ in range(2):
            comm.all_reduce(array)
    told, ended = list(steps), time.monotonic_ns()
    comm.all_reduce(array)
    assert steps == told
    return began, ended, told


def test_in_shared_memory_a_rank_tells_what_it_waits_for_copies_and_adds() -> None:
    plan = forest_plan(3, "allreduce", "chain")
    found = in_shared_memory(plan, lambda comm, rank: traced(comm, 200_000), chunk_bytes=1 << 16)
    for rank, (began, ended, steps) in enumerate(found):
        assert {step.row for step in steps} == {f"rank {rank}"}
        assert [step.what for step in steps].count("meet") == 2
        assert {"copy", "add"} < {step.what.split()[0] for step in steps} <= {"meet", "wait", "copy", "add"}
        times = [time for step in steps for time in (step.start, step.end)]
        assert times == sorted(times)
        assert began <= times[0] < times[-1] <= ended


def test_over_links_a_rank_tells_when_each_chunk_came() -> None:
    plan = forest_plan(3, "allreduce", "chain")
    found = in_threads(plan, lambda comm, rank: traced(comm, 200_000), chunk_bytes=1 << 16)
    for rank, (began, ended, steps) in enumerate(found):
        links = {step.row for step in steps if step.what != "meet"}
        assert links
        assert all(row.split(" -> ")[1].split()[0] == str(plan.ranks[rank]) for row in links)
        for row in links:
            names = [step.what for step in steps if step.row == row]
            assert len(names) == 2 * len(set(names))  # each chunk, twice
        assert all(began <= step.start <= step.end <= ended for step in steps)


def test_back_ends_that_tell_nothing_trace_nothing() -> None:
    with Communicator(forest_plan(2, "allreduce", "star")) as comm, comm.trace() as steps:
        comm.all_reduce([np.ones(3)] * 2)
    assert steps == []
