"""Jobs of processes that lose ranks and go on: every element right, the same bits on all, nothing left over."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import topoplan
from collectives import Communicator
from collectives.backends.tcp.backend import TcpBackend
from tests.faults.recovery import DEATH, FEW, MANY, Round, faults_of, one_round, plan_for
from tests.support.tcp_jobs import backends_in_threads, in_processes
from topoplan.errors import BackendError, UsageError

BEFORE = -1.0
"""Of a victim that dies between two collectives."""


def shared_memory() -> set[str]:
    """What stands in the folder of named shared memory."""
    folder = Path("/dev/shm")
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()


@pytest.mark.parametrize("backend", ["tcp", "shared"])
@pytest.mark.parametrize(
    ("size", "within", "recovering", "alone", "elements"),
    [
        pytest.param(4, {0: BEFORE}, {}, True, FEW, marks=pytest.mark.thorough),
        pytest.param(4, {0: BEFORE}, {}, False, MANY, marks=pytest.mark.slow),
        pytest.param(4, {1: BEFORE}, {}, True, MANY, marks=pytest.mark.slow),
        pytest.param(5, {2: 0.001}, {}, True, MANY, marks=pytest.mark.thorough),
        pytest.param(4, {3: 0.003}, {}, False, MANY, marks=pytest.mark.slow),
        pytest.param(4, {0: 0.001}, {}, True, MANY, marks=pytest.mark.slow),
        pytest.param(6, {0: 0.001, 4: 0.001}, {}, True, MANY, marks=pytest.mark.slow),
        pytest.param(5, {1: BEFORE, 3: BEFORE}, {}, False, FEW, marks=pytest.mark.slow),
        pytest.param(5, {2: BEFORE}, {0: 0}, True, MANY, marks=pytest.mark.thorough),
        pytest.param(5, {0: BEFORE}, {1: 1}, True, MANY, marks=pytest.mark.slow),
        pytest.param(5, {0: 0.001}, {3: 2}, False, MANY, marks=pytest.mark.slow),
        pytest.param(4, {0: BEFORE, 1: BEFORE, 2: BEFORE}, {}, True, MANY, marks=pytest.mark.slow),
        pytest.param(8, {5: 0.001}, {}, True, MANY, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_others_go_on(
    backend: str, size: int, within: dict[int, float], recovering: dict[int, int], alone: bool, elements: int
) -> None:
    """Whoever dies, between and within collectives, two at once, and another while they find each other."""
    what, before = Round(backend, size, within, recovering, alone, elements), shared_memory()
    plan = plan_for(size)
    reports, died = one_round(plan, what)
    assert died
    assert faults_of(plan, what, reports) == []
    assert shared_memory() <= before
    if alone and within and max(within.values()) < 0:
        # the collective that they died before was repeated, by all alike
        told = [report["repeated"] for report in reports.values()]
        assert all(one[0][0] == DEATH and set(one[-1][1]) >= set(within) for one in told), told


def back_from_sleep(rank: int, meeting: str) -> tuple[str, list[float]]:
    """Rank 1 stops; the others go on, wake it, and end when it has heard of it."""
    plan, told = plan_for(3), Path(meeting, "told")
    backend = TcpBackend(rank, 3, rendezvous=f"unix:{meeting}/m", timeout=1.0, meeting_timeout=30)
    with Communicator(plan, backend) as comm:
        sleeper = int(comm.gather_texts(str(os.getpid()))[1])
        try:
            if rank == 1:
                os.kill(sleeper, signal.SIGSTOP)
            with pytest.raises(BackendError):
                comm.all_reduce(np.full(1 << 18, 1.0))
            if rank == 1:
                with pytest.raises(BackendError) as refused:
                    comm.shrink()
                told.touch()
                return str(refused.value), []
            comm.shrink()
            total = comm.all_reduce(np.full(5, rank + 1.0))
        finally:
            if rank == 0:
                os.kill(sleeper, signal.SIGCONT)
        deadline = time.monotonic() + 10
        while not told.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return comm.notes[0], total.tolist()


@pytest.mark.thorough
def test_a_rank_that_was_stopped_and_comes_back_is_refused_by_its_epoch(tmp_path: Path) -> None:
    """The others wait for each other, who notice later, longer than for the one that was reported."""
    told = in_processes(3, back_from_sleep, str(tmp_path))
    assert "this rank is out since epoch 1" in told[1][0]
    assert "what it has is of epoch 0, end this process" in told[1][0]
    assert [one[1] for one in (told[0], told[2])] == [[4.0] * 5] * 2
    assert told[0][0].startswith("epoch 1: without rank 1")


def test_a_rank_that_lives_is_left_out_and_hears_of_it() -> None:
    def body(backend: TcpBackend, rank: int) -> object:
        with Communicator(plan_for(3), backend) as comm:
            comm.all_reduce(np.ones(3))
            if rank == 2:
                with pytest.raises(BackendError):
                    comm.all_reduce(np.ones(3))
                with pytest.raises(BackendError, match="out since epoch 1"):
                    comm.shrink()
                return None
            with pytest.raises(UsageError, match="cannot go on without itself"):
                comm.shrink(without=[rank])
            comm.shrink(without=[2])
            found = comm.all_reduce(np.full(3, rank + 1.0)).tolist()
            time.sleep(0.5)  # until rank 2 has asked
            return comm.rank, comm.size, comm.epoch, found

    assert backends_in_threads(3, body) == [(0, 2, 1, [3.0] * 3), (1, 2, 1, [3.0] * 3), None]


def test_all_ranks_plan_anew_for_links_that_are_gone_and_must_mean_the_same() -> None:
    def body(backend: TcpBackend, rank: int) -> object:
        with Communicator(plan_for(3), backend) as comm:
            comm.replan(slow_links={"gpu0-gpu1": 10.0})
            found = comm.all_reduce(np.full(5, rank + 1.0)).tolist(), comm.plan.rate
            with pytest.raises(BackendError, match="op"):
                comm.replan(without_links=["gpu0-gpu1" if rank else "gpu0-gpu2"])
            return found

    first, *others = backends_in_threads(3, body)
    assert first[0] == [6.0] * 5
    assert first[1] < plan_for(3).rate
    assert others == [first, first]


def test_what_fewer_ranks_cannot_do_is_an_error_and_the_next_call_goes_on() -> None:
    """Blocks for three ranks are not divided among two; the root of a broadcast is gone."""

    def body(backend: TcpBackend, rank: int) -> object:
        comm = Communicator(
            topoplan.plan(topoplan.load("dgx-1v"), gpus=[0, 1, 2]), backend, on_failure="shrink"
        )
        comm.all_reduce(np.ones(3))
        if rank == 2:
            backend.close()  # as if it had died: its connections end
            return None
        with comm:
            with pytest.raises(
                BackendError, match="without rank 2, but this reduce_scatter cannot be repeated"
            ):
                comm.reduce_scatter(np.ones(9))
            assert comm.epoch == 1
            return comm.reduce_scatter(np.full(4, rank + 1.0)).tolist()

    assert backends_in_threads(3, body) == [[3.0, 3.0], [3.0, 3.0], None]


def test_what_waited_behind_a_collective_that_lost_a_rank_is_without_it_too() -> None:
    """Nobody has to repeat it, but its sum is one of fewer ranks."""

    def body(backend: TcpBackend, rank: int) -> object:
        comm = Communicator(plan_for(3), backend, on_failure="shrink")
        comm.all_reduce(np.ones(3))
        if rank == 2:
            backend.close()  # as if it had died: its connections end
            return None
        with comm:
            handles = [comm.all_reduce(np.full(5, rank + 1.0), async_op=True) for _ in range(3)]
            return [(handle.wait()[0], handle.repeated, handle.without) for handle in handles]

    left = [(3.0, True, (2,)), (3.0, False, (2,)), (3.0, False, (2,))]
    assert backends_in_threads(3, body) == [left, left, None]
