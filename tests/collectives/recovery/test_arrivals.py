"""Which ranks came late to collectives: known arrivals, and ranks that are held back."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest

import topoplan
from collectives import Communicator
from collectives.backends.backend import KEPT_ARRIVALS, CallArrivals
from collectives.recovery.arrivals import ArrivalReport, arrival_report
from tests.support.hand_plans import forest_plan
from tests.support.job_meeting import in_shared_memory
from tests.support.tcp_jobs import in_threads
from topoplan.errors import RefusedError, UsageError

GPUS = ["gpu0", "gpu1", "gpu2"]


def test_lateness_is_the_time_behind_the_median_of_the_other_ranks() -> None:
    """CallArrivals at 0, 4 and 10 ms; at 0, 0 and 0.9 ms; at 6, 0 and 0 ms."""
    waits = [[0.010, 0.0009, 0.0], [0.006, 0.0009, 0.006], [0.0, 0.0, 0.006]]
    report = ArrivalReport.of(waits, GPUS)
    assert [(one.rank, one.late) for one in report.late] == [(0, 1), (2, 1)]
    assert report.ranks[2].longest == pytest.approx(0.008)
    assert report.ranks[0].median == pytest.approx(0.006)
    assert [one.waited for one in report.ranks] == pytest.approx([0.0109, 0.0129, 0.006])
    assert json.loads(json.dumps(report.to_object())) == report.to_object()


def test_two_ranks_are_compared_with_each_other_and_one_with_none() -> None:
    assert [one.late for one in ArrivalReport.of([[0.5, 0.0], [0.0, 0.5]], GPUS[:2]).ranks] == [1, 1]
    assert str(ArrivalReport.of([[0.5]], GPUS[:1])).endswith("no rank came more than 1 ms after the others")
    assert ArrivalReport.of([[], []], GPUS[:2]).calls == 0


def test_the_last_calls_are_kept_once() -> None:
    arrivals = CallArrivals()
    for number in range(KEPT_ARRIVALS + 5):
        arrivals.add(number)
    assert arrivals.taken() == list(range(5, KEPT_ARRIVALS + 5))
    arrivals.forget()
    arrivals.add(7)
    assert arrivals.taken() == arrivals.taken() == [7]
    arrivals.forget()
    assert arrivals.taken() == []


def test_calls_that_not_all_ranks_have_do_not_count() -> None:
    report = arrival_report([json.dumps([9_000_000, 5_000_000]), json.dumps([0])], GPUS[:2])
    assert (report.calls, report.ranks[1].longest) == (1, 0.005)


@pytest.mark.parametrize("in_ranks", [in_shared_memory, in_threads], ids=["shared", "tcp"])
def test_a_rank_that_is_held_back_is_named_on_all_ranks(in_ranks: Any) -> None:
    """Rank 1 comes 30 ms after the barrier, in small calls and in those over links."""

    def body(comm: Communicator, rank: int) -> tuple[dict[str, object], int]:
        pause = threading.Event()
        comm.report()
        for count in (3, 3, 3, 100_000, 100_000, 100_000):
            given = np.ones(count)
            comm.all_reduce(given)
            comm.barrier()
            if rank == 1:
                pause.wait(0.03)
            assert comm.all_reduce(given)[0] == 3.0
        report = comm.report()
        assert comm.report().calls == 0
        assert report.ranks[1].late >= 1
        assert report.ranks[1].longest > 0.001
        return report.to_object(), report.calls

    results = in_ranks(forest_plan(3, "allreduce", "star"), body)
    assert results[0][1] >= 12
    assert results == [results[0]] * 3


def test_ranks_of_one_process_have_no_arrivals() -> None:
    with (
        Communicator(forest_plan(3, "allreduce", "star")) as comm,
        pytest.raises(UsageError, match="loopback back end has its ranks in one process"),
    ):
        comm.report()


def test_idle_gpus_that_relay_are_no_ranks_of_a_report() -> None:
    """Four GPUs of a DGX-1V with the other four as relays: rank 1 alone is held back."""

    def body(comm: Communicator, rank: int) -> tuple[int, list[int]]:
        pause = threading.Event()
        comm.report()
        for _ in range(4):
            if rank == 1:
                pause.wait(0.05)
            comm.all_reduce(np.ones(1000))
        report = comm.report()
        return report.calls, [one.rank for one in report.late if one.late >= 3]

    plan = topoplan.plan(topoplan.with_relays("dgx-1v", range(4)))
    assert in_shared_memory(plan, body) == [(4, [1])] * 4


def test_a_refused_report_keeps_what_it_would_have_told() -> None:
    def body(comm: Communicator, rank: int) -> int:
        given = np.ones(100_000)
        comm.report()
        for _ in range(3):
            comm.all_reduce(given)
        with pytest.raises(RefusedError):
            comm.all_reduce(given) if rank == 2 else comm.report()
        return comm.report().calls

    assert min(in_threads(forest_plan(3, "allreduce", "star"), body)) >= 3
