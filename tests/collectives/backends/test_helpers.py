"""Helpers of a plan at work: processes of their own over tcp, nobody where ranks share memory; the bits of loopback."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import topoplan
from collectives import Communicator
from collectives.backends.loopback.gpu_loopback import LoopbackGpu
from collectives.backends.open_backend import machine_helpers
from collectives.backends.shared.shared_backend import SharedBackend
from collectives.backends.tcp.tcp_backend import TcpBackend
from tests.support.fake_streams import Machine
from tests.support.file_gather import FileGather
from tests.support.forking import forking
from tests.support.gpu_ranks import cupy as cupy
from tests.support.gpu_ranks import machine as machine
from tests.support.regular_fabrics import helped_star
from tests.support.tcp_jobs import backends_in_threads, call, given_to, in_processes, seal
from topoplan.errors import BackendError, RefusedError, UsageError
from topoplan.plans.plan import Plan
from topoplan.schedules.parameter_server import parameter_server

RANKS, HELPERS, COUNT = 4, 2, 30_011


def serving(plan: Plan, body: Callable[[Communicator, int], Any], **options: Any) -> list[Any]:
    """What the body returns on every rank, and how many collectives each helper took part in."""

    def work(backend: TcpBackend, rank: int) -> Any:
        with Communicator(plan, backend, chunk_bytes=1 << 12) as comm:
            assert comm.is_helper == (rank >= RANKS)
            return comm.serve() if comm.is_helper else body(comm, rank)

    return backends_in_threads(RANKS, work, helpers=machine_helpers(plan), **options)


def arrays_for(collective: str, count: int = COUNT) -> list[Any]:
    return [given_to(rank, RANKS, collective, count) for rank in range(RANKS)]


@pytest.mark.sampled
@pytest.mark.parametrize("collective", ["allreduce", "broadcast", "reduce", "reduce_scatter", "allgather"])
def test_helpers_over_tcp_add_up_as_on_loopback(collective: str) -> None:
    plan = topoplan.plan(helped_star(RANKS, HELPERS), collective)
    given = [arrays_for(collective, count) for count in (0, 1, COUNT)]
    found = serving(plan, lambda comm, rank: [seal(call(comm, collective, one[rank])) for one in given])
    with Communicator(plan, chunk_bytes=1 << 12) as comm:
        expected = [call(comm, collective, one) for one in given]
    assert found[:RANKS] == [[seal(one[rank]) for one in expected] for rank in range(RANKS)]
    passed = any(
        max(edge.parent, edge.child) >= RANKS
        for shard in plan.shards
        for stage in shard.stages
        for edge in stage.edges
    )
    assert found[RANKS:] == [len(given) * passed] * HELPERS


def test_idle_gpus_relay_over_tcp_as_on_loopback() -> None:
    """Half of a DGX-1V: a process for each of the other GPUs, of which some add and send on."""
    plan = topoplan.plan(topoplan.with_relays("dgx-1v", range(RANKS)))
    given = arrays_for("allreduce")
    found = serving(plan, lambda comm, rank: seal(call(comm, "allreduce", given[rank])))
    with Communicator(plan, chunk_bytes=1 << 12) as comm:
        expected = call(comm, "allreduce", given)
    assert found[:RANKS] == [seal(expected[rank]) for rank in range(RANKS)]
    assert sum(found[RANKS:]) == len(plan.helpers) > 0


def test_helpers_follow_other_collectives_averages_and_calls_in_the_background() -> None:
    """Ranks agree on a second plan by themselves, and the helpers make the same one."""
    plan = parameter_server(helped_star(RANKS, HELPERS))
    given = arrays_for("allreduce")

    def body(comm: Communicator, rank: int) -> list[str | None]:
        later = comm.all_reduce(given[rank], op="avg", async_op=True)
        largest = comm.all_reduce(given[rank], op="max")
        return [seal(one) for one in (later.wait(), largest, comm.broadcast(given[rank], root=2))]

    found = serving(plan, body)
    with Communicator(plan) as comm:
        expected = [comm.all_reduce(given, op="avg"), comm.all_reduce(given, op="max"), given[2:3] * RANKS]
    assert found[:RANKS] == [[seal(one[rank]) for one in expected] for rank in range(RANKS)]
    assert min(found[RANKS:]) >= 2


@pytest.mark.parametrize(
    ("exchange", "helped"), [("dense", 1), pytest.param("tree", 0, marks=pytest.mark.thorough), ("pairs", 0)]
)
def test_helpers_add_dense_entries_only(exchange: str, helped: int) -> None:
    plan = topoplan.plan(helped_star(RANKS, HELPERS))
    given, how = arrays_for("allreduce"), {"density": 0.01, "exchange": exchange}
    found = serving(plan, lambda comm, rank: seal(comm.sparse_all_reduce(given[rank], **how)))
    with Communicator(plan) as comm:
        assert found[:RANKS] == [seal(one) for one in comm.sparse_all_reduce(given, **how)]
    assert found[RANKS:] == [helped] * HELPERS


@pytest.mark.thorough
def test_ranks_on_one_host_add_up_what_helpers_would(tmp_path: Path) -> None:
    plan = topoplan.plan(helped_star(RANKS, HELPERS))
    with Communicator(plan) as comm:
        expected = [seal(one) for one in comm.all_reduce(arrays_for("allreduce"))]
    assert in_processes(RANKS, shared_sum, plan, str(tmp_path)) == expected


def shared_sum(rank: int, plan: Plan, folder: str) -> str | None:
    backend = SharedBackend(FileGather(folder, rank, RANKS), rank=rank, size=RANKS)
    with Communicator(plan, backend) as comm:
        return seal(comm.all_reduce(arrays_for("allreduce")[rank]))


@pytest.mark.thorough
def test_a_server_that_is_killed_between_two_steps_is_survived_with_the_same_bits(tmp_path: Path) -> None:
    """All ranks name it; without it the keys of the dead server are its replica's, and the sums do not change."""
    before = parameter_server(helped_star(RANKS, 2), placement="hashed", replicas=1)
    after = parameter_server(helped_star(RANKS, 1), placement="hashed")
    context = forking()
    servers = [
        context.Process(target=serve_twice, args=(place, before, after, str(tmp_path)), daemon=True)
        for place in range(2)
    ]
    for one in servers:
        one.start()
    victim = servers[1].pid
    found = in_processes(RANKS, train, before, after, str(tmp_path), victim)
    with Communicator(before) as comm:
        expected = [seal(comm.all_reduce(arrays_for("allreduce", COUNT + step))[0]) for step in range(3)]
    assert found == [(RANKS + 1, expected)] * RANKS
    servers[0].join(30)
    assert [one.exitcode for one in servers] == [0, -signal.SIGKILL]


def serve_twice(place: int, before: Plan, after: Plan, folder: str) -> None:
    """A server: until one is killed, and then without it."""
    with (
        Communicator(before, rendezvoused(RANKS + place, f"{folder}/0", 2)) as comm,
        pytest.raises(BackendError, match=f"peer {RANKS + 1}"),
    ):
        comm.serve()
    with Communicator(after, rendezvoused(RANKS, f"{folder}/1", 1)) as comm:
        assert comm.serve() == 2


def train(
    rank: int, before: Plan, after: Plan, folder: str, victim: int
) -> tuple[int | None, list[str | None]]:
    """A rank: one step, the murder, and the step that fails and the next one without the dead server."""
    with Communicator(before, rendezvoused(rank, f"{folder}/0", 2)) as comm:
        sums = [seal(comm.all_reduce(arrays_for("allreduce")[rank]))]
        comm._gather_texts("done")
        if rank == 0:
            os.kill(victim, signal.SIGKILL)
        with pytest.raises(BackendError) as failed:
            endless(comm, arrays_for("allreduce", COUNT + 1)[rank])
    with Communicator(after, rendezvoused(rank, f"{folder}/1", 1)) as comm:
        sums += [seal(comm.all_reduce(arrays_for("allreduce", COUNT + step)[rank])) for step in (1, 2)]
    return failed.value.peer, sums


def endless(comm: Communicator, array: Any) -> None:
    """A killed process may have its connections for a moment longer."""
    while True:
        comm.all_reduce(array)


def rendezvoused(rank: int, place: str, helpers: int) -> TcpBackend:
    return TcpBackend(rank, RANKS, helpers=helpers, rendezvous=f"unix:{place}", timeout=20)


def test_who_is_what_and_what_helpers_do_not_do_is_said_in_one_line() -> None:
    plan = topoplan.plan(helped_star(RANKS, HELPERS))

    def confused(comm: Communicator, rank: int) -> None:
        with pytest.raises(UsageError, match="serve is for helpers, and this process is a rank"):
            comm.serve()

    assert serving(plan, confused) == [None] * RANKS + [0] * HELPERS

    def helper_calls(backend: TcpBackend, rank: int) -> str:
        with Communicator(plan, backend) as comm:
            if not comm.is_helper:
                return ""
            with pytest.raises(UsageError) as refused:
                comm.all_reduce(np.ones(3))
            return str(refused.value)

    told = backends_in_threads(RANKS, helper_calls, helpers=HELPERS)
    assert told[RANKS:] == ["this process is a helper without arrays; call serve"] * HELPERS


def test_a_helper_with_another_plan_is_named_by_all() -> None:
    plan = topoplan.plan(helped_star(RANKS, HELPERS))
    other = parameter_server(helped_star(RANKS, HELPERS))

    def work(backend: TcpBackend, rank: int) -> Any:
        with Communicator(other if rank == RANKS else plan, backend) as comm:
            return comm.serve() if comm.is_helper else comm.all_reduce(np.ones(COUNT))

    found = backends_in_threads(RANKS, work, helpers=HELPERS, timeout=5.0)
    assert isinstance(found[RANKS], UsageError)
    assert all(isinstance(one, BackendError) for one in found[:RANKS])
    assert all(f"helper {RANKS} cannot take part" in str(one) for one in found[:RANKS])


@pytest.mark.sampled
@pytest.mark.parametrize("collective", ["allreduce", "broadcast", "reduce", "reduce_scatter", "allgather"])
def test_relays_on_a_gpu_work_in_scratch_alone(collective: str, machine: Machine, cupy: ModuleType) -> None:
    """Each relay is a buffer besides those of the ranks; sums have the bits of loopback, as a graph too."""
    plan = topoplan.plan(topoplan.with_relays("dgx-1v", [0, 1, 4, 6]), collective)
    assert plan.helpers
    given = arrays_for(collective, 3001)
    with Communicator(plan, LoopbackGpu(cupy, RANKS, step_bytes=1), chunk_bytes=1 << 10) as comm:
        found = [call(comm, collective, [cupy.asarray(one) for one in given]) for _ in range(3)]
    with Communicator(plan, chunk_bytes=1 << 10) as comm:
        expected = [seal(one) for one in call(comm, collective, given)]
    assert [[None if one is None else seal(one.get()) for one in ranks] for ranks in found] == [expected] * 3


def test_a_call_that_is_refused_leaves_the_links_to_helpers_open() -> None:
    """Helpers do not hear of a refusal."""

    def body(comm: Communicator, rank: int) -> list[float]:
        ones = np.ones(COUNT)
        comm.all_reduce(ones)
        with pytest.raises(RefusedError):
            comm.all_reduce(ones, op="max" if rank == 2 else "sum")
        return [float(comm.all_reduce(ones)[0]) for _ in range(2)]

    found = serving(topoplan.plan(helped_star(RANKS, HELPERS)), body)
    assert found[:RANKS] == [[RANKS, RANKS]] * RANKS
