"""GradientSynchronizer in real processes: mpi with 2 and 4 ranks, tcp with a rank that errs, leaves or dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collectives import GradientSynchronizer
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.communicator.launch import mpiexec_command
from collectives.peers.rendezvous import Rendezvous
from tests.support.checkout import ROOT
from tests.support.forking import forking
from tests.support.hand_plans import forest_plan
from tests.support.rank_scenarios import check_scenario, scenarios
from tests.support.tcp_jobs import backends_in_threads
from topoplan.errors import BackendError, RefusedError, TopoplanError, UsageError

pytestmark = pytest.mark.thorough

LIMIT = 100
"""Seconds after which processes hang."""


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_of_mpi(ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    program = [sys.executable, str(ROOT / "tests" / "jobs" / "gradient_ranks.py"), str(tmp_path)]
    try:
        command = mpiexec_command(ranks, program)
    except UsageError as error:
        pytest.skip(str(error))
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    for name in scenarios("gradient_ranks.py", ranks):
        check_scenario(told, name)


OWN = [np.ones((40, 7)), np.ones(5), np.ones((1000, 300))]


@pytest.mark.parametrize(
    ("first", "last", "options", "kind", "text"),
    [
        (OWN, OWN, {"bucket_bytes": 5_000_000}, UsageError, "rank 2 has other parameters or settings than "),
        (OWN, [OWN[0].T, *OWN[1:]], {}, UsageError, "rank 2 has other parameters or settings than rank 0"),
        (OWN, [[1.0]], {}, RefusedError, "has a list instead of a numpy array as its parameter 0"),
    ],
)
def test_a_rank_that_begins_otherwise_stops_all_before_the_first_step(
    first: list[Any], last: list[Any], options: dict[str, Any], kind: type[TopoplanError], text: str
) -> None:
    """Also with as many elements in the same buckets, but not the same matrix."""
    given = [(first, {}), (first, {}), (last, options)]

    def begin(backend: TcpBackend, rank: int) -> None:
        GradientSynchronizer(given[rank][0], backend=backend, **{"bucket_bytes": 5000, **given[rank][1]})

    for error in backends_in_threads(3, begin):
        assert isinstance(error, kind)
        assert text in str(error)
        assert getattr(error, "peer", 2) == 2


def test_a_plan_for_another_number_of_ranks_is_refused_by_all() -> None:
    plan = forest_plan(4, "allreduce", "chain")
    for error in backends_in_threads(
        3, lambda backend, rank: GradientSynchronizer(OWN, plan, backend=backend)
    ):
        assert "the plan is for 4 ranks and the tcp back end has 3" in str(error)


def test_what_one_rank_cannot_give_names_step_bucket_and_rank_on_the_others() -> None:
    def steps(backend: TcpBackend, rank: int) -> None:
        with GradientSynchronizer(OWN, backend=backend, bucket_bytes=5000) as synchronizer:
            synchronizer.step(OWN)
            own = [one.copy() for one in OWN]
            if rank == 2:
                own[2] = own[2][:-1]
            try:
                synchronizer.step(own, out=own)
            finally:
                assert all(bool((one == 1).all()) for one in own), "an array was touched"

    *others, last = backends_in_threads(3, steps)
    refused = "rank 2 refused the collective: training step 1: "
    assert str(last).startswith(refused)
    for error in (last, *others):
        assert (type(error), error.peer) == (RefusedError, 2)
        assert "gradient 2 must have shape (1000, 300) as its parameter, got (999, 300)" in str(error)
    for error in others:
        assert str(error).startswith(f"training step 1, bucket 0 of 2: {refused}")


def test_a_rank_that_is_gone_before_there_is_a_plan_is_named_by_the_others() -> None:
    def plan(backend: TcpBackend, rank: int) -> Any:
        if rank == 1:
            return backend.close()
        return GradientSynchronizer([np.ones(3)], backend=backend)

    first, none, third = backends_in_threads(3, plan)
    assert none is None
    for error in (first, third):
        assert isinstance(error, BackendError)
        assert error.peer == 1
        assert "rank 1 has closed its communicator" in str(error)


def test_ranks_of_tcp_agree_on_a_plan_through_their_rendezvous() -> None:
    gradients = [[np.full((3, 4), 3 * rank), np.arange(5.0) * rank] for rank in range(3)]

    def steps(backend: TcpBackend, rank: int) -> Any:
        with GradientSynchronizer(gradients[rank], backend=backend) as synchronizer:
            assert synchronizer.communicator.plan.ranks == ("rank0", "rank1", "rank2")
            return [synchronizer.step(gradients[rank]) for _ in range(2)][1]

    for averages in backends_in_threads(3, steps):
        assert isinstance(averages, list), averages
        assert np.array_equal(averages[0], np.full((3, 4), 3))
        assert np.array_equal(averages[1], np.arange(5.0))


def _dies(rank: int, meeting: str, told: Connection) -> None:
    """Three steps; in the second, rank 2 is killed when half of its gradients are there."""
    own = [np.full(5000, float(rank)), np.full(5000, float(rank))]
    try:
        backend = TcpBackend(rank, 3, rendezvous=meeting, timeout=10)
        with GradientSynchronizer(own, backend=backend, bucket_bytes=100) as synchronizer:
            synchronizer.step(own)
            synchronizer.ready(1, own[1])
            if rank == 2:
                while len(synchronizer.recorder.exchanges()) < 3:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            synchronizer.ready(0, own[0])
            synchronizer.wait()
    except TopoplanError as error:
        told.send((type(error).__name__, str(error), getattr(error, "peer", None)))


def test_survivors_of_a_rank_that_is_killed_name_it_and_the_step_and_the_bucket() -> None:
    started = forking()
    with Rendezvous("127.0.0.1:0", 3) as meeting:
        pipes = [started.Pipe(duplex=False) for _ in range(3)]
        processes = [
            started.Process(target=_dies, args=(rank, meeting.address, pipes[rank][1])) for rank in range(3)
        ]
        for process in processes:
            process.start()
        heard = [pipes[rank][0].recv() if pipes[rank][0].poll(60) else None for rank in range(2)]
        for process in processes:
            process.join(30)
    assert [process.exitcode for process in processes] == [0, 0, -signal.SIGKILL]
    for one in heard:
        assert one is not None
        kind, text, peer = one
        assert (kind, peer) == (BackendError.__name__, 2)
        assert text.startswith("training step 1, bucket 1 of 2: rank ")
