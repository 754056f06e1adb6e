"""The contract of every back end: each collective, size, root, type and reduction with the bits of loopback."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from collectives import Communicator
from collectives.backends.loopback.gpu_loopback import LoopbackGpu
from collectives.backends.loopback.loopback_backend import Loopback
from collectives.backends.loopback.paced_loopback import PacedLoopback
from collectives.backends.nccl.nccl_backend import NcclBackend
from collectives.backends.shared.shared_backend import SharedBackend
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.peers.rendezvous import Rendezvous
from collectives.peers.tcp_control_plane import TcpControlPlane
from tests.support.contract import (
    GROUPS,
    Case,
    cases,
    check_refusals,
    expected,
    refusals,
    run_cases,
)
from tests.support.fake_streams import Machine
from tests.support.file_gather import FileGather
from tests.support.gpu_ranks import cupy as cupy
from tests.support.gpu_ranks import machine as machine
from tests.support.hand_plans import forest_plan
from tests.support.job_meeting import Meeting, as_threads, of_all
from tests.support.tcp_jobs import in_processes

RANKS = 4
EVERY = [case for group in GROUPS for case in cases(group)]
SOME = EVERY[::3]
"""A third of each group: all trees, sizes, types and reductions."""
Found = list[list[str]]


def in_one_process(backend: Any, listed: Sequence[Case], **arrays: Any) -> Found:
    with_all = run_cases(backend, listed, **arrays)
    backend.close()
    return with_all


def in_threads(listed: Sequence[Case], opened: Callable[[int, str], Any], **arrays: Any) -> Found:
    """The digests of all ranks by case, when a thread opens the back end of each."""
    found = on_ranks(lambda backend: run_cases(backend, listed, **arrays), opened)
    return [list(chain.from_iterable(ranks)) for ranks in zip(*found, strict=True)]


def on_ranks(body: Callable[[Any], Any], opened: Callable[[int, str], Any]) -> list[Any]:
    """Return the body's result with the back end of each rank, a thread."""

    def be(rank: int) -> Any:
        backend = opened(rank, meeting.address)
        try:
            return body(backend)
        finally:
            backend.close()

    with Rendezvous("127.0.0.1:0", RANKS) as meeting:
        return of_all(as_threads(RANKS, be))


def shared() -> Callable[[int, str], Any]:
    meeting = Meeting(RANKS)
    return lambda rank, _: SharedBackend(meeting.gather(rank), rank=rank, size=RANKS)


def tcp(rank: int, address: str) -> TcpBackend:
    return TcpBackend(rank, RANKS, rendezvous=address, flight_bytes=1 << 10)


def nccl(cupy: Any, **options: Any) -> Callable[[int, str], Any]:
    def opened(rank: int, address: str) -> NcclBackend:
        cupy.cuda.Device(rank).use()
        return NcclBackend(cupy, TcpControlPlane(address, rank, RANKS), region_bytes=8 << 20, **options)

    return opened


BACKENDS: dict[str, Callable[[Sequence[Case], Any], Found]] = {
    "loopback": lambda listed, cupy: in_one_process(Loopback(RANKS, threads=3), listed),
    "paced": lambda listed, cupy: in_one_process(PacedLoopback(RANKS, scale=1e9), listed),
    "loopback-gpu": lambda listed, cupy: in_one_process(
        LoopbackGpu(cupy, RANKS), listed, here=cupy.asarray, back=lambda one: one.get()
    ),
    "shared": lambda listed, cupy: in_threads(listed, shared()),
    "tcp": lambda listed, cupy: in_threads(listed, tcp),
    "nccl": lambda listed, cupy: in_threads(
        listed, nccl(cupy, engine="messages", step_bytes=600), here=cupy.asarray, back=lambda one: one.get()
    ),
    "windows": lambda listed, cupy: in_threads(
        listed, nccl(cupy), here=cupy.asarray, back=lambda one: one.get()
    ),
}


PLAYED = {
    "loopback-gpu": ("alltoall", "in place"),
    "nccl": ("allreduce", "in place"),
    "windows": ("broadcast",),
}
"""Groups of the default run for back ends on GPUs that this processor plays."""


def chosen(backend: str, group: str) -> list[Case]:
    """An interpreter runs the kernels of windows: of a group one case in packets and one in chunks, or some types.

    nccl has one reduction of each type, all reductions among them, or "all types".
    """
    listed = list(cases(group.removeprefix("all ")))
    if (backend, group) == ("nccl", "types"):
        return listed[::5]
    if backend != "windows":
        return listed
    if group == "types":
        return listed[::9]
    one = replace(listed[2], chunk_bytes=1 << 20)
    return [one, replace(one, count=4200)]


@pytest.mark.parametrize(
    ("backend", "group"),
    [
        pytest.param(
            backend,
            group,
            marks=[]
            if group in PLAYED.get(backend, GROUPS)
            else pytest.mark.slow
            if group == "all types" or (group == "types" and backend != "nccl")  # stand-ins of GPUs are slow
            else pytest.mark.thorough,
        )
        for backend in BACKENDS
        for group in (*GROUPS, *(["all types"] if backend == "nccl" else []))
        if backend not in PLAYED or group != "exchanges"  # which GPUs do not run
    ],
)
def test_results_have_the_bits_of_loopback(
    backend: str, group: str, machine: Machine, cupy: ModuleType
) -> None:
    machine.gpus, machine.peers = RANKS, backend == "windows"
    listed = chosen(backend, group)
    for case, found in zip(listed, BACKENDS[backend](listed, cupy), strict=True):
        assert tuple(found) == expected(case), case


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("backend", "options"), [("shared", {}), ("tcp", {}), ("tcp", {"on_failure": "shrink"}), ("nccl", {})]
)
def test_ranks_that_differ_refuse_and_continue(
    backend: str, options: dict[str, str], machine: Machine, cupy: ModuleType
) -> None:
    machine.gpus = RANKS
    opened = {"shared": shared(), "tcp": tcp, "nccl": nccl(cupy)}[backend]
    arrays: dict[str, Any] = (
        {"here": cupy.asarray, "back": lambda one: one.get()} if backend == "nccl" else {}
    )
    check_refusals(on_ranks(lambda backend: refusals(backend, **arrays, **options), opened))


@pytest.mark.parametrize("backend", ["shared", "tcp", "nccl"])
def test_no_rank_leaves_a_barrier_before_all_have_entered_it(
    backend: str, machine: Machine, cupy: ModuleType
) -> None:
    machine.gpus = RANKS
    entered: list[int] = []

    def body(made: Any) -> None:
        comm = Communicator(forest_plan(RANKS, "allgather", "chain"), made)
        for late in range(RANKS):
            time.sleep(0.02 * (comm.rank == late))
            entered.append(comm.rank)
            comm.barrier()
            assert len(entered) >= RANKS * (late + 1)

    on_ranks(body, {"shared": shared(), "tcp": tcp, "nccl": nccl(cupy, engine="messages")}[backend])


def rank_of_processes(rank: int, listed: list[Case], backend: str, place: str) -> Found:
    """Return the results of a process that is one rank of all cases in turn."""
    made: Any = (
        TcpBackend(rank, RANKS, rendezvous=f"unix:{place}/rendezvous", timeout=60)
        if backend == "tcp"
        else SharedBackend(FileGather(place, rank, RANKS), rank=rank, size=RANKS, timeout=60)
    )
    found = run_cases(made, listed)
    made.close()
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["shared", "tcp"])  # of torch in `tests.jobs.torch_ranks`
@pytest.mark.parametrize("listed", [SOME, pytest.param(EVERY, marks=pytest.mark.slow)], ids=["some", "every"])
def test_processes_have_the_bits_of_loopback(backend: str, listed: list[Case], tmp_path: Path) -> None:
    ranks = in_processes(RANKS, rank_of_processes, listed, backend, str(tmp_path))
    for case, *found in zip(listed, *of_all(ranks), strict=True):
        assert tuple(chain.from_iterable(found)) == expected(case), case
