"""What the GPU back ends refuse, and how they end when a rank, a GPU or NCCL fails."""

from __future__ import annotations

import os
import re
import threading
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from fake_streams import Machine
from gpu_ranks import cupy as cupy
from gpu_ranks import machine as machine
from gpu_ranks import on_every_rank
from hand_plans import forest_plan

from collectives import Communicator
from collectives.backends.nccl.backend import NcclBackend
from collectives.backends.nccl.environment import from_environment
from collectives.backends.nccl.tcp_world import TcpWorld
from collectives.backends.tcp.rendezvous import Rendezvous
from topoplan.errors import BackendError, UsageError


def test_arrays_that_do_not_fit_are_refused(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus = 2
    plan = forest_plan(2, "allreduce", "star")
    good = [cupy.zeros(4, dtype=np.float32) for _ in range(2)]
    with cupy.cuda.Device(1):
        far = cupy.zeros(4, dtype=np.float32)
    with Communicator(plan, "loopback-gpu") as comm:
        for bad, message in [
            (np.zeros(4, dtype=np.float32), "rank 1 has a ndarray instead of a CuPy array.* cupy.asarray"),
            (far, "rank 1 has an array on GPU 1 and its back end is on GPU 0"),
            (cupy.zeros(4, dtype="datetime64[s]"), "rank 1 has dtype datetime64.*cannot be moved"),
            (odd_address(cupy), "rank 1 has an array at address .* no multiple of its element's 4 bytes"),
        ]:
            with pytest.raises(UsageError, match=message):
                comm.all_reduce([good[0], bad])
        with pytest.raises(UsageError, match="'sum' is not defined for bool"):
            comm.all_reduce([cupy.zeros(4, dtype=bool)] * 2)
        with pytest.raises(UsageError, match="out arrays of rank 0 and rank 1 share memory"):
            comm.all_reduce(good, out=[good[0], good[0]])


def odd_address(cupy: ModuleType) -> Any:
    line = cupy.zeros(17, dtype=np.uint8)
    return type(line)(line.host[1:].view(np.float32), 0)


def test_ranks_that_mean_different_things_refuse_before_anything_moves(
    machine: Machine, cupy: ModuleType
) -> None:
    machine.gpus = 3
    plan = forest_plan(3, "allreduce", "star")
    results = on_every_rank(
        cupy, plan, lambda comm, rank: comm.all_reduce(cupy.zeros(5 if rank == 2 else 4, dtype=np.float32))
    )
    assert all(isinstance(result, BackendError) for result in results)
    assert "count 5 instead of 4" in str(results[0])
    assert machine.launches == 0

    results = on_every_rank(
        cupy,
        plan,
        lambda comm, rank: comm.all_reduce(np.zeros(4) if rank == 2 else cupy.zeros(4, dtype=np.float32)),
    )
    assert isinstance(results[2], UsageError)
    assert all("refused the collective: rank 2 has a ndarray" in str(result) for result in results[:2])


def test_back_ends_with_different_settings_refuse(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus = 2
    results = on_every_rank(
        cupy,
        forest_plan(2, "allreduce", "star"),
        lambda comm, rank: comm.all_reduce(cupy.zeros(4, dtype=np.float32)),
        step_bytes=[1000, 1001],
    )
    assert all("settings" in str(error) and "alike on all ranks" in str(error) for error in results)


def test_a_rank_that_stays_away_is_named_by_all_others(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus = 4
    plan = forest_plan(4, "allreduce", "chain")
    release = threading.Event()

    def task(comm: Communicator, rank: int) -> None:
        if rank == 2:
            release.wait(10)
            return
        try:
            comm.all_reduce(cupy.zeros(4, dtype=np.float32))
        finally:
            release.set()

    results = on_every_rank(cupy, plan, task, timeout=0.5)
    for rank in (0, 1, 3):
        assert isinstance(results[rank], BackendError)
        assert results[rank].peer == 2
        assert "which has not called this collective" in str(results[rank])


def test_a_gpu_that_stands_still_ends_the_collective_on_every_rank_and_names_the_step(
    machine: Machine, cupy: ModuleType
) -> None:
    """Rank 3's stream hangs in front of its messages; results stay what they were."""
    machine.gpus = 4
    plan = forest_plan(4, "allreduce", "chain")
    outs: list[Any] = [None] * 4

    def task(comm: Communicator, rank: int) -> Any:
        given, outs[rank] = cupy.asarray(np.ones(600, np.float32)), cupy.zeros(600, dtype=np.float32)
        comm.all_reduce(given)
        if rank == 3:
            stuck = cupy.cuda.Stream(non_blocking=True)
            stuck.do(lambda: False)
            with stuck:
                return comm.all_reduce(given, out=outs[rank])
        return comm.all_reduce(given, out=outs[rank])

    results = on_every_rank(cupy, plan, task, timeout=0.5, step_bytes=300)
    assert all(isinstance(result, BackendError) for result in results), results
    assert len({str(result) for result in results}) == 1
    assert results[0].step is not None
    assert results[0].peer is not None
    assert "waited 0.5 s for rank" in str(results[0])
    with machine.lock:
        for stream in machine.streams:
            stream.queue.clear()
    assert not any(out.get().any() for out in outs)


def test_an_error_of_nccl_ends_the_collective_on_every_rank(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus = 3
    plan = forest_plan(3, "allreduce", "chain")

    def task(comm: Communicator, rank: int) -> Any:
        if rank == 0:
            stuck = cupy.cuda.Stream(non_blocking=True)
            stuck.do(lambda: False)
            with stuck:
                threading.Timer(
                    0.3, lambda: setattr(machine, "async_error", "NCCL_ERROR_REMOTE_ERROR")
                ).start()
                return comm.all_reduce(cupy.zeros(4, dtype=np.float32))
        return comm.all_reduce(cupy.zeros(4, dtype=np.float32))

    results = on_every_rank(cupy, plan, task)
    assert all(isinstance(result, BackendError) for result in results)
    assert all("NCCL reports NCCL_ERROR_REMOTE_ERROR" in str(result) for result in results)


def test_a_failed_communicator_stays_failed(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus = 2
    plan = forest_plan(2, "allreduce", "star")

    def task(comm: Communicator, rank: int) -> Any:
        with pytest.raises(BackendError):
            comm.all_reduce(cupy.zeros(4 + rank, dtype=np.float32))
        return comm.all_reduce(cupy.zeros(4, dtype=np.float32))

    results = on_every_rank(cupy, plan, task)
    assert all("failed in an earlier collective" in str(result) for result in results)


# ---- how a process finds its place


def test_a_launchers_environment_gives_each_process_its_rank_and_gpu(
    machine: Machine, cupy: ModuleType
) -> None:
    machine.gpus = 2
    with Rendezvous("127.0.0.1:0", 1) as meeting:
        place = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "3",
            "LOCAL_WORLD_SIZE": "4",
            "TOPOPLAN_RENDEZVOUS": meeting.address,
        }
        with pytest.MonkeyPatch.context() as patch:
            for name in ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MAX_CTAS"):
                patch.setenv(name, "")
                patch.delenv(name)
            backend = from_environment(environment=place)
            assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
            assert os.environ["NCCL_MAX_CTAS"] == "4"
        assert (backend.rank, backend.size, backend.arrays.device) == (0, 1, 1)
        backend.close()


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({}, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set; start the ranks with topoplan bench"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "here"}, "MASTER_PORT is not set"),
        (
            {"RANK": "x", "WORLD_SIZE": "1", "TOPOPLAN_RENDEZVOUS": "a:1"},
            "RANK is 'x'; set it to a whole number",
        ),
        ({"RANK": "2", "WORLD_SIZE": "2", "TOPOPLAN_RENDEZVOUS": "a:1"}, "rank 2 of 2 does not exist"),
    ],
)
def test_a_place_that_makes_no_sense_is_refused(
    cupy: ModuleType, place: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        from_environment(environment=place)


def test_settings_that_make_no_sense_are_refused(cupy: ModuleType) -> None:
    with Rendezvous("127.0.0.1:0", 1) as meeting:
        world = TcpWorld(meeting.address, 0, 1)
        with pytest.raises(UsageError, match="lanes 'rings' are unknown; use 'steps' or 'trees'"):
            NcclBackend(cupy, world, lanes="rings")
        with pytest.raises(UsageError, match="0 ranks per GPU"):
            NcclBackend(cupy, world, ranks_per_gpu=0)
        vars(cupy.cuda.nccl)["available"] = False
        with pytest.raises(UsageError, match="pip install nvidia-nccl-cu12"):
            NcclBackend(cupy, world)
        world.close()


def test_a_machine_without_gpus_is_named(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus = 0
    with pytest.raises(UsageError, match=r"the loopback-gpu back end finds no GPU; .* CUDA_VISIBLE_DEVICES"):
        Communicator(forest_plan(2, "allreduce", "star"), "loopback-gpu")
