"""Ranks of the tcp back end that die or stop: every survivor says so once, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import topoplan
from collectives import Communicator, lower
from collectives.backends.backend import Call, RankArrays
from collectives.backends.tcp.connections import wires_of
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.peers.control_plane import Signature
from collectives.peers.rendezvous import Rendezvous
from tests.faults.tcp import FEW, RANKS, Round, faults_of, one_round
from tests.support.hand_plans import chain, forest_plan, plan_of, stage
from tests.support.tcp_jobs import backends_in_threads, in_processes, ring_wires
from topoplan.errors import BackendError, UsageError
from topoplan.plans.shards import Shard


@pytest.mark.thorough
@pytest.mark.parametrize(
    "what",
    [
        Round(victim=0, number=signal.SIGKILL, delay=0.03, rank_hosts=True),
        Round(victim=0, number=signal.SIGKILL, delay=0.01, rank_hosts=False),
        Round(victim=3, number=signal.SIGKILL, delay=0.02, rank_hosts=True),
        Round(victim=2, number=signal.SIGSTOP, delay=0.02, rank_hosts=False),
        Round(victim=0, number=signal.SIGSTOP, delay=0.02, rank_hosts=True),
        Round(victim=1, number=signal.SIGINT, delay=0.02, rank_hosts=True),
        Round(victim=0, number=signal.SIGKILL, delay=0.02, rank_hosts=True, elements=FEW),
        Round(victim=2, number=signal.SIGSTOP, delay=0.01, rank_hosts=True, elements=FEW),
    ],
    ids=str,
)
def test_all_survivors_name_the_rank_that_was_killed_stopped_or_interrupted(what: Round) -> None:
    """Results untouched, threads ended, sockets closed; the victim is no neighbour of all the others."""
    plan = topoplan.ring_plan(topoplan.load("dgx-1v"), "allreduce", gpus=range(RANKS))
    reports = one_round(plan, what)
    assert faults_of(reports) == []
    assert {report["peer"] for listed in reports.values() for report in listed} == {what.victim}


@pytest.mark.thorough
def test_a_link_slower_than_the_timeout_is_no_failure_while_bytes_arrive_anywhere() -> None:
    """Two ranks of a chain wait at the same time, and much longer than their timeout, for their first chunk."""
    timeout, tree = 0.3, stage("broadcast", 0, chain(range(4), 0))
    plan = plan_of(4, "broadcast", [Shard(Fraction(1), (tree,))], root=0)
    count = (
        1 << 18
    )  # 2 MiB in one chunk over links of 2 MB/s, where the system lets the first 640 KiB pass at once

    def body(backend: TcpBackend, rank: int) -> float:
        with Communicator(plan, backend, chunk_bytes=1 << 30) as comm:
            begun = time.monotonic()
            assert np.array_equal(comm.broadcast(np.full(count, 7.0 * (rank == 0))), np.full(count, 7.0))
            return time.monotonic() - begun

    took = backends_in_threads(4, body, timeout=timeout, pace=2e-3)
    assert not any(isinstance(one, BaseException) for one in took), took
    assert took[3] > 4 * timeout


def all_reduce_beside_a_stop(rank: int, meeting: str, wires: list[Any]) -> tuple[int, bool, int]:
    """The ranks' epoch, whether cables are watched, and wrong elements, when rank 2 stands still for a second."""
    plan = topoplan.plan("dgx-spark-x3")
    backend = TcpBackend(rank, 3, rendezvous=meeting, wires=wires_of(wires), timeout=20.0)
    with Communicator(plan, backend, chunk_bytes=1 << 16, on_failure="shrink") as comm:
        ones = np.ones(1 << 22, np.float32)
        pids = [int(text) for text in comm._gather_texts(str(os.getpid()))]
        comm.all_reduce(ones)

        def stop() -> None:
            os.kill(pids[2], signal.SIGSTOP)
            time.sleep(1.0)
            os.kill(pids[2], signal.SIGCONT)

        stopping = threading.Thread(target=stop)
        if rank == 0:
            stopping.start()
        wrong = 0
        while not comm._gather_texts("over" if rank == 0 and not stopping.is_alive() else "").count("over"):
            wrong += int(np.count_nonzero(comm.all_reduce(ones) != 3))
        return comm.epoch, backend._probes is not None, wrong


@pytest.mark.thorough
def test_a_stopped_rank_has_lost_no_cable() -> None:
    """Its system answers for it, although its windows are closed and nothing moves for longer than a lost cable has."""
    with Rendezvous("127.0.0.1:0", 3) as meeting:
        found = in_processes(3, all_reduce_beside_a_stop, meeting.address, ring_wires(3))
    assert found == [(0, True, 0)] * 3


def test_a_rank_that_cannot_even_begin_tells_the_others_why() -> None:
    plan = forest_plan(3, "allreduce", "chain")
    table = lower(plan, 144, chunk_elements=32)
    signature = Signature(0, plan.digest[:16], 3, "allreduce", None, "sum", "float64", 144, 32)

    def body(backend: TcpBackend, rank: int) -> None:
        memory = RankArrays(rank, (0, 144), np.ones(144), (0, 144), np.empty(144))
        op = "median" if rank == 1 else "sum"
        backend.run(Call(plan, table, signature, op, "float64", 8, (memory,)))

    errors = backends_in_threads(3, body)
    assert isinstance(errors[1], UsageError)
    for rank in (0, 2):
        assert isinstance(errors[rank], BackendError)
        assert (errors[rank].rank, errors[rank].peer) == (rank, 1)
        assert "rank 1 gave up: UsageError reduction 'median' is unknown" in str(errors[rank])
