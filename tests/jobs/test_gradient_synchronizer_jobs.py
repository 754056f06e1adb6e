"""GradientSynchronizer in real processes: mpi with 2 and 4 ranks, tcp with a rank that dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from collectives import GradientSynchronizer
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.communicator.launch import mpiexec_command
from collectives.peers.rendezvous import Rendezvous
from tests.support.checkout import ROOT
from tests.support.forking import forking
from tests.support.tcp_jobs import backends_in_threads
from topoplan.errors import BackendError, TopoplanError, UsageError

pytestmark = pytest.mark.thorough

LIMIT = 100
"""Seconds after which processes hang."""


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of so many MPI processes has found."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    folder = tmp_path_factory.mktemp("gradients")
    program = [sys.executable, str(ROOT / "tests" / "jobs" / "gradient_ranks.py"), str(folder)]
    try:
        command = mpiexec_command(request.param, program)
    except UsageError as error:
        pytest.skip(str(error))
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(request.param)]


def test_processes_get_exact_averages_by_a_plan_of_their_own(found: list[dict[str, Any]]) -> None:
    told = [one["averages"] for one in found]
    assert all(one["right"] == [True] * 5 for one in told)
    assert told[0]["ranks"] == [f"rank{rank}" for rank in range(len(found))]
    buckets = told[0]["buckets"]
    assert all(one["exchanged"] == told[0]["exchanged"] for one in told)
    assert [key for key, _ in told[0]["exchanged"]] == [f"bucket {number}" for number in range(buckets)] * 5


def test_sparse_steps_of_processes_keep_what_they_do_not_give_across_a_checkpoint(
    found: list[dict[str, Any]],
) -> None:
    assert [one["sparse"] for one in found] == [{"conserved": True, "kept": True, "step": 20}] * len(found)


def test_a_rank_with_other_parameters_or_buckets_is_named_by_all_before_the_first_step(
    found: list[dict[str, Any]],
) -> None:
    last = len(found) - 1
    for name in ("other buckets", "other shapes"):
        for one in found:
            assert one["mistakes"][name]["kind"] == "UsageError"
            assert (
                f"rank {last} has other parameters or settings than rank 0" in one["mistakes"][name]["text"]
            )


def test_a_rank_whose_parameter_is_no_array_stops_all(found: list[dict[str, Any]]) -> None:
    *others, last = [one["mistakes"]["no array"] for one in found]
    for one in (last, *others):
        assert (one["kind"], one["peer"]) == ("RefusedError", len(others))
        assert "has a list instead of a numpy array as its parameter 0" in one["text"]


def test_a_plan_for_another_number_of_ranks_is_refused_by_all(found: list[dict[str, Any]]) -> None:
    text = f"the plan is for {len(found) + 1} ranks and the mpi back end has {len(found)}"
    assert all(text in one["mistakes"]["other world"]["text"] for one in found)


def test_what_one_rank_cannot_give_names_step_bucket_and_rank_on_the_others(
    found: list[dict[str, Any]],
) -> None:
    *others, last = [one["mistakes"]["wrong gradient"] for one in found]
    refused = f"rank {len(others)} refused the collective: training step 1: "
    assert last["text"].startswith(refused)
    for one in (last, *others):
        assert (one["kind"], one["peer"]) == ("RefusedError", len(others))
        assert "gradient 3 must have shape (1000, 300) as its parameter, got (999, 300)" in one["text"]
    for one in others:
        assert one["text"].startswith(f"training step 1, bucket 0 of 5: {refused}")


def test_a_rank_that_is_gone_before_there_is_a_plan_is_named_by_the_others(
    found: list[dict[str, Any]],
) -> None:
    *others, last = [one["mistakes"].get("leaves") for one in found]
    assert last is None
    for one in others:
        assert one is not None
        assert (one["kind"], one["peer"]) == ("BackendError", len(others))
        assert "the peer has closed its communicator" in one["text"]


def test_a_rank_of_tcp_that_is_gone_before_there_is_a_plan_is_named_by_the_others() -> None:
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
