"""Jobs whose links or ranks become slow: sums stay right, all ranks say and do the same, and only where they should."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import topoplan
from collectives import Communicator
from collectives.backends.tcp import tcp_backend as tcp
from collectives.backends.tcp.connections import Queue, link_rates
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.recovery.link_monitor import JUDGEMENT_CALLS, SlowLink, SlowRank
from tests.support.job_meeting import in_shared_memory
from tests.support.tcp_jobs import backends_in_threads
from topoplan.errors import UsageError

PLAN = topoplan.plan(topoplan.load("dgx-1v"), gpus=[0, 1, 2, 3])
PACE = 0.0002  # 5 MB/s for each NVLink, which even a busy machine keeps up with
COUNT, CHUNK = 1 << 18, 1 << 16  # elements of float32, 1 MB, some 70 ms; and bytes of a chunk
SLOW = (0, 3)  # both ways

PLANNED = {(link.src, link.dst): link.bandwidth * 1e9 for link in PLAN.topology.links}


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], float]:
    """What part of their rates links have, all of it where nothing is said, whatever a plan counts on."""
    parts: dict[tuple[int, int], float] = {}

    def rates(plan: topoplan.Plan, wires: object) -> dict[Queue, float]:
        def rate(source: int, destination: int) -> float:
            part = parts.get((min(source, destination), max(source, destination)), parts.get((-1, -1), 1.0))
            return PLANNED[plan.ranks[source], plan.ranks[destination]] * part

        return {link: rate(*link[:2]) for link in link_rates(plan)}

    monkeypatch.setattr(tcp, "connection_rates", rates)
    monkeypatch.setattr(socket, "create_connection", connect_with_short_packets)
    return parts


def connect_with_short_packets(
    destination: tuple[str, int], timeout: float | None = None, source: tuple[str, int] | None = None
) -> socket.socket:
    """As `socket.create_connection`: a pace holds up no packet alone, and loopback's are as long as a chunk."""
    made = socket.socket()
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 4096)
    made.settimeout(timeout)
    made.connect(destination)
    return made


def falls(
    backend: TcpBackend, left: dict[tuple[int, int], float], part: float, link: tuple[int, int]
) -> None:
    """From now on a link, or all where it is (-1, -1), has this part of its rate."""
    left[link] = part
    backend._rates.clear()


def told_by(body: Callable[[TcpBackend, int], Any]) -> Any:
    """What all of four ranks return, which must be the same."""
    first, *others = backends_in_threads(4, body, pace=PACE)
    assert not isinstance(first, Exception), first
    assert others == [first] * 3
    return first


def added(comm: Communicator, rank: int, times: int, count: int = COUNT) -> None:
    for step in range(times):
        mine = (np.arange(count) % 1021 + 7 * rank + step).astype(np.float32)
        want = (np.arange(count) % 1021 * 4 + 42 + 4 * step).astype(np.float32)
        assert np.array_equal(comm.all_reduce(mine), want)


@pytest.mark.thorough
@pytest.mark.parametrize("on_failure", ["raise", "shrink"])
def test_traffic_leaves_a_slow_link_and_returns(left: dict[tuple[int, int], float], on_failure: str) -> None:
    """All ranks have the same faster plan within three judgements, and the first one when the link is fast again."""

    def body(backend: TcpBackend, rank: int) -> object:
        with Communicator(PLAN, backend, on_slow="replan", on_failure=on_failure, chunk_bytes=CHUNK) as comm:
            added(comm, rank, JUDGEMENT_CALLS)
            assert comm.notes == ()
            falls(backend, left, 0.2, SLOW)
            added(comm, rank, 3 * JUDGEMENT_CALLS + 1)
            told = comm.slow_links, comm.plan.digest, comm.plan.plans[-1].rate
            falls(backend, left, 1.0, SLOW)
            for _ in range(20):
                if comm.slow_links:
                    added(comm, rank, JUDGEMENT_CALLS)
            return *told, comm.notes, comm.slow_links, comm.plan.digest

    slow, _, rate, notes, slow_after, digest = told_by(body)
    assert {one.wire for one in slow} <= {"gpu0->gpu3", "gpu3->gpu0"}
    assert all(0.02 < one.share < 0.5 for one in slow)
    assert slow
    assert any(note.startswith("replanned: ") for note in notes)
    assert rate < PLAN.rate
    assert (slow_after, digest) == ((), PLAN.digest)
    assert "gpu0->gpu3 is not slow any more" in notes


@pytest.mark.thorough
def test_survivors_are_planned_for_with_slow_links(left: dict[tuple[int, int], float]) -> None:
    def body(backend: TcpBackend, rank: int) -> object:
        with Communicator(PLAN, backend, on_slow="replan", chunk_bytes=CHUNK) as comm:
            added(comm, rank, JUDGEMENT_CALLS)
            falls(backend, left, 0.1, SLOW)
            added(comm, rank, 3 * JUDGEMENT_CALLS + 1)
            if rank == 2:
                return None
            comm.shrink(without=[2])
            assert comm.slow_links == ()
            assert np.array_equal(comm.all_reduce(np.full(COUNT, rank + 1.0)), np.full(COUNT, 7.0))
            return {
                f"{link.src}->{link.dst}": link.bandwidth
                for link in comm.plan.topology.links
                if link.bandwidth < 25 and link.channel == "nvlink"
            }

    first, second, gone, fourth = backends_in_threads(4, body, pace=PACE)
    assert gone is None
    assert first == second == fourth
    assert set(first) <= {"gpu0->gpu3", "gpu3->gpu0"}
    assert first


@pytest.mark.thorough
def test_reports_change_no_plan_and_skip_small_collectives(left: dict[tuple[int, int], float]) -> None:
    def body(backend: TcpBackend, rank: int) -> object:
        with Communicator(PLAN, backend, on_slow="report", chunk_bytes=CHUNK) as comm:
            added(comm, rank, 1, COUNT // 2)
            falls(backend, left, 0.2, SLOW)
            added(comm, rank, 3 * JUDGEMENT_CALLS, COUNT // 2)
            assert comm.notes == ()
            added(comm, rank, 3 * JUDGEMENT_CALLS + 1)
            return (
                [one.wire for one in comm.slow_links if isinstance(one, SlowLink)],
                comm.notes,
                comm.plan.digest,
            )

    wires, notes, digest = told_by(body)
    assert digest == PLAN.digest
    assert len(notes) == len(wires)
    assert 0 < len(wires) == len(set(wires) & {"gpu0->gpu3", "gpu3->gpu0"})


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["tcp", "shared"])
def test_all_ranks_name_the_one_that_they_wait_for(backend: str) -> None:
    def body(comm: Communicator, rank: int) -> object:
        for _ in range(3 * JUDGEMENT_CALLS + 1):
            time.sleep(0.2 * (rank == 2))
            comm.all_reduce(np.ones(1 << 18, np.float32))
        return [(one.rank, one.gpu) for one in comm.slow_links if isinstance(one, SlowRank)], comm.notes

    def with_communicator(backend: TcpBackend, rank: int) -> object:
        with Communicator(PLAN, backend, on_slow="report") as comm:
            return body(comm, rank)

    if backend == "tcp":
        told = backends_in_threads(4, with_communicator)
    else:
        told = in_shared_memory(PLAN, body, on_slow="report")
    assert told == [([(2, "gpu2")], ())] * 4


def test_who_cannot_measure_links_says_so_in_one_line() -> None:
    def body(comm: Communicator, rank: int) -> object:
        with pytest.raises(UsageError, match="the shared back end cannot measure its links here") as refused:
            Communicator(PLAN, comm._open().backend, on_slow="replan")
        return "\n" in str(refused.value)

    assert in_shared_memory(PLAN, body) == [False] * 4
