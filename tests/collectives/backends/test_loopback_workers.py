"""Loopback's threads: the same bits as one row after another, bounded scratch memory, nothing left behind."""

from __future__ import annotations

import multiprocessing
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import Communicator, lower
from collectives.backends.backend import Call, RankArrays
from collectives.backends.loopback.loopback_backend import (
    BYTES_PER_THREAD,
    LONGEST_PIECE,
    Loopback,
    TaskThreads,
)
from collectives.peers.control_plane import Signature
from tests.support.hand_plans import forest_plan
from tests.support.table_execution import execute
from topoplan.errors import UsageError
from topoplan.plans.plan import Plan

Array = NDArray[Any]
METHODS = {"allreduce": "all_reduce", "allgather": "all_gather"}


def reference(plan: Plan, arrays: list[Array], *, op: np.ufunc = np.add) -> list[Array | None]:
    """The rows of the table one after another, on a full buffer for each rank."""
    ranks = len(arrays)
    count = len(arrays[0]) * (ranks if plan.collective == "allgather" else 1)
    block = count // ranks
    buffers = [np.zeros(count, array.dtype) for array in arrays]
    for rank, (buffer, array) in enumerate(zip(buffers, arrays, strict=True)):
        buffer[rank * block if plan.collective == "allgather" else 0 :][: len(array)] = array
    execute(lower(plan, count, chunk_elements=4096), buffers, buffers, combine=op)
    if plan.collective == "reduce":
        return [buffer if rank == plan.root else None for rank, buffer in enumerate(buffers)]
    if plan.collective == "reduce_scatter":
        return [buffer[rank * block : (rank + 1) * block] for rank, buffer in enumerate(buffers)]
    return list(buffers)


def same_bits(results: list[Array | None], expected: list[Array | None]) -> bool:
    return [None if a is None else a.tobytes() for a in results] == [
        None if a is None else a.tobytes() for a in expected
    ]


def numbers(ranks: int, count: int) -> list[Array]:
    generator = np.random.default_rng(count)
    return [generator.standard_normal(count) for _ in range(ranks)]


@pytest.mark.thorough
def test_threads_work_in_place_and_with_every_chunk_size() -> None:
    plan = forest_plan(4, "allreduce", "binary")
    arrays = numbers(4, BYTES_PER_THREAD // 8)
    expected = reference(plan, arrays, op=np.maximum)
    for chunk_bytes in (40000, LONGEST_PIECE, 1 << 30):
        with Communicator(plan, Loopback(4, threads=3), chunk_bytes=chunk_bytes) as comm:
            within = [array.copy() for array in arrays]
            assert same_bits(comm.all_reduce(within, op="max", out=within), expected)


@pytest.mark.parametrize("collective", ["reduce", "reduce_scatter"])
def test_ranks_without_a_result_keep_one_piece_for_each_thread(collective: str) -> None:
    ranks, threads, count = 8, 2, 4 << 20
    plan = forest_plan(ranks, collective, "binary")
    arrays = [np.ones(count, np.float32) for _ in range(ranks)]
    with Communicator(plan, Loopback(ranks, threads=threads)) as comm:
        method = getattr(comm, collective)
        out = method(arrays)
        tracemalloc.start()
        for _ in range(3):
            method(arrays, out=out)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < ranks * threads * LONGEST_PIECE + (1 << 20) < count * 4


def test_no_thread_is_left_after_close() -> None:
    before = set(threading.enumerate())
    arrays = numbers(4, BYTES_PER_THREAD // 8)
    with Communicator(forest_plan(4, "allreduce", "star"), Loopback(4, threads=3)) as comm:
        comm.all_reduce(arrays)
        assert len(set(threading.enumerate()) - before) == 2
    assert set(threading.enumerate()) == before


def test_small_calls_start_no_thread() -> None:
    before = threading.active_count()
    with Communicator(forest_plan(4, "allreduce", "star"), Loopback(4, threads=3)) as comm:
        comm.all_reduce(numbers(4, 10000))
        assert threading.active_count() == before


def test_an_error_in_a_thread_ends_the_call_with_that_error_and_the_next_call_works() -> None:
    """A result that cannot be written, which the communicator would have refused."""
    plan = forest_plan(4, "allreduce", "star")
    count = BYTES_PER_THREAD // 4
    table = lower(plan, count, chunk_elements=1 << 14)
    signature = Signature(0, plan.digest[:16], 4, "allreduce", None, "sum", "float32", count, 1 << 14)
    inputs = [np.ones(count, np.float32) for _ in range(4)]
    results = [np.zeros(count, np.float32) for _ in range(4)]
    memory = [RankArrays(r, (0, count), inputs[r], (0, count), results[r]) for r in range(4)]
    call = Call(plan, table, signature, "sum", "float32", 4, tuple(memory))
    backend = Loopback(4, threads=3)
    results[2].setflags(write=False)
    with pytest.raises(ValueError, match="read-only"):
        backend.run(call)
    results[2].setflags(write=True)
    backend.run(call)
    backend.close()
    assert all((result == 4).all() for result in results)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_every_task_is_done_once_and_workers_do_not_overlap_themselves(threads: int) -> None:
    workers = TaskThreads(threads)
    done: list[list[int]] = [[] for _ in range(threads)]
    busy = [False] * threads

    def work(worker: int, task: int) -> None:
        assert not busy[worker]
        busy[worker] = True
        done[worker].append(task)
        busy[worker] = False

    for _ in range(20):
        workers.share(range(50), work)
    workers.close()
    assert sorted(task for tasks in done for task in tasks) == sorted(list(range(50)) * 20)


def test_an_error_in_any_worker_stops_the_rest_and_is_raised() -> None:
    workers = TaskThreads(3)
    done = []

    def work(worker: int, task: int) -> None:
        if task == 5:
            raise MemoryError("task 5")
        done.append(task)

    for _ in range(50):
        with pytest.raises(MemoryError, match="task 5"):
            workers.share(range(10000), work)
    workers.close()
    assert len(done) < 50 * 9999


def test_an_interrupted_caller_returns_after_all_others_have_stopped() -> None:
    workers = TaskThreads(3)
    inside: list[int] = []
    both = threading.Event()

    def work(worker: int, task: int) -> None:
        if worker == 0:
            both.wait(5)
            raise KeyboardInterrupt
        inside.append(worker)
        both.set()
        inside.remove(worker)

    with pytest.raises(KeyboardInterrupt):
        workers.share(range(100000), work)
    assert inside == []
    workers.close()


def test_a_forked_child_has_threads_of_its_own() -> None:
    workers = TaskThreads(2)
    done: list[int] = []
    workers.share(range(10), lambda worker, task: done.append(task))

    def child() -> None:
        workers.share(range(10), lambda worker, task: None)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(20)
    code = process.exitcode
    process.kill()
    process.join()
    workers.close()
    assert code == 0
    assert len(done) == 10


def test_no_threads_at_all_are_refused() -> None:
    with pytest.raises(UsageError, match="threads must be at least 1, got 0"):
        Loopback(4, threads=0)
