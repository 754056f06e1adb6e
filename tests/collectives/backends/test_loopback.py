"""Loopback: exact, the same bits on every rank, by any number of threads, and paced on a clock of our own."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import topoplan
from collectives import Communicator, check_table, lower
from collectives.backends.backend import Call, RankArrays
from collectives.backends.loopback.loopback_backend import (
    BYTES_PER_THREAD,
    LONGEST_PIECE,
    Loopback,
    TaskThreads,
)
from collectives.backends.loopback.paced_loopback import (
    AHEAD,
    BURST,
    ChunkMover,
    LinkPlayer,
    PacedLoopback,
    crossings,
    paced_links_of,
    recut,
)
from collectives.peers.control_plane import Signature
from collectives.tables.lowering import PlanKey
from collectives.tables.numpy_arrays import NumpyArrays, divide
from collectives.tables.transfer_table import EdgeStream, TransferTable, streams
from tests.support.checkout import ROOT
from tests.support.hand_plans import SHAPES, forest_plan, full_mesh, plan_of, stage, three_phase_plan
from tests.support.table_execution import execute
from tests.support.tcp_jobs import call
from topoplan.errors import PlanError, UsageError
from topoplan.machine.cluster import cluster
from topoplan.machine.cluster_network import Server
from topoplan.machine.fabric import Fabric
from topoplan.machine.topology import Device, Link, Topology
from topoplan.model.dataflow import START_UP
from topoplan.plans.build import trivial_plan
from topoplan.plans.loads import link_loads
from topoplan.plans.plan import COLLECTIVES, Plan
from topoplan.plans.shards import Shard

DTYPES = (
    "float16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
)
DTYPES += ("complex64", "complex128")


def numbers(
    ranks: int, shape: int | tuple[int, ...], *, dtype: str = "int64", seed: int = 0
) -> list[NDArray[Any]]:
    """Small whole numbers of any dtype, different on every rank."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 4, shape).astype(dtype) for _ in range(ranks)]


def wanted(collective: str, arrays: Sequence[NDArray[Any]], *, root: int) -> list[NDArray[Any] | None]:
    """The definition of each collective in plain numpy."""
    ranks = len(arrays)
    total = np.sum(np.stack(arrays), axis=0, dtype=arrays[0].dtype)
    if collective == "allreduce":
        return [total] * ranks
    if collective == "broadcast":
        return [arrays[root]] * ranks
    if collective == "reduce":
        return [total if rank == root else None for rank in range(ranks)]
    if collective == "allgather":
        return [np.concatenate(arrays)] * ranks
    return list(np.split(total, ranks))


def same(results: Sequence[NDArray[Any] | None], expected: Sequence[NDArray[Any] | None]) -> bool:
    return len(results) == len(expected) and all(
        (a is None and b is None)
        or (a is not None and b is not None and a.dtype == b.dtype and np.array_equal(a, b))
        for a, b in zip(results, expected, strict=True)
    )


@given(
    st.integers(2, 5),
    st.sampled_from(COLLECTIVES),
    st.sampled_from(sorted(SHAPES)),
    st.sampled_from(DTYPES),
    st.integers(0, 640),
    st.integers(1, 6400),
    st.integers(0, 2**32 - 1),
)
@example(5, "reduce_scatter", "binary", "int64", 200_001, 65536, 0)
@example(5, "allreduce", "chain", "int64", 200_001, 65536, 0)
@settings(max_examples=150, deadline=None)
def test_whole_numbers_are_exact_in_any_size_chunk_and_dtype(
    ranks: int, collective: str, shape: str, dtype: str, count: int, chunk_bytes: int, seed: int
) -> None:
    per_rank = count * ranks if collective == "reduce_scatter" else count
    arrays = numbers(ranks, per_rank, dtype=dtype, seed=seed)
    before = [array.copy() for array in arrays]
    with Communicator(forest_plan(ranks, collective, shape), chunk_bytes=chunk_bytes) as comm:
        assert same(call(comm, collective, arrays), wanted(collective, arrays, root=1))
    assert same(arrays, before)


@pytest.mark.parametrize("collective", ["allreduce", "reduce", "reduce_scatter"])
def test_reductions_agree_with_numpy(collective: str) -> None:
    with Communicator(forest_plan(4, collective, "star")) as comm:
        for dtype in ("float16", "float64", "int8", "uint32"):
            arrays = numbers(4, 196, dtype=dtype)
            stacked = np.stack(arrays)
            for op, total in {
                "prod": stacked.prod(axis=0),
                "min": stacked.min(axis=0),
                "max": stacked.max(axis=0),
                "avg": stacked.sum(axis=0) / 4,
            }.items():
                total = total.astype(dtype)
                blocks = np.split(total, 4) if collective == "reduce_scatter" else [total] * 4
                if collective == "reduce":
                    blocks = [block if rank == 1 else None for rank, block in enumerate(blocks)]
                assert same(call(comm, collective, arrays, op=op), blocks), (dtype, op)


def test_three_phase_sums_over_unequal_servers_are_exact() -> None:
    with Communicator(three_phase_plan([[0, 1, 2], [3, 4, 5, 6, 7]])) as comm:
        for count in (0, 1, 7, 15, 17, 100_003):
            arrays = numbers(8, count)
            assert same(comm.all_reduce(arrays), wanted("allreduce", arrays, root=0))


def test_a_back_end_of_the_caller_stays_open_where_no_communicator_can_be_made_of_it(tmp_path: Path) -> None:
    """Its ranks work on with the next plan; one that was opened by name is the communicator's to close."""
    unreadable = tmp_path / "chunks.json"
    unreadable.write_text("no JSON")
    backend = Watched(4)
    with pytest.raises(UsageError, match="the plan is for 8 ranks and the loopback back end has 4"):
        Communicator(forest_plan(8, "allreduce", "chain"), backend)
    plan = forest_plan(4, "allreduce", "chain")
    with pytest.raises(UsageError):
        Communicator(plan, backend, chunk_file=unreadable)
    with pytest.raises(UsageError):
        Communicator(plan, backend, chunk_bytes=0)
    assert backend.closed == 0
    with Communicator(plan, backend) as comm:
        assert comm.all_reduce([np.ones(3)] * 4)[3].tolist() == [4.0] * 3
    assert backend.closed == 1


class Watched(Loopback):
    """Counts how often it is closed."""

    closed = 0

    def close(self) -> None:
        """See `Loopback.close`."""
        self.closed += 1
        super().close()


@pytest.mark.parametrize("ranks", [3, 4, 7])
@pytest.mark.parametrize("collective", ["allreduce", "reduce", "reduce_scatter"])
def test_averages_of_16_bits_do_not_overflow(collective: str, ranks: int) -> None:
    for dtype, value, ulp in (("float16", 60000, 32), ("bfloat16", 3e38, 2.0**120)):
        arrays = [NumpyArrays().of(np.full(7 * ranks, value), dtype) for _ in range(ranks)]
        given = [one.copy() for one in arrays]
        with Communicator(forest_plan(ranks, collective, "chain")) as comm:
            results = [one for one in call(comm, collective, arrays, op="avg") if one is not None]
        assert results
        for one in results:
            assert abs(one.astype(np.float64) - float(arrays[0][0])).max() <= ranks * ulp
        assert all(np.array_equal(one, other) for one, other in zip(arrays, given, strict=True))


def test_integer_averages_truncate_towards_zero_also_where_the_dtype_cannot_hold_the_rank_count() -> None:
    with Communicator(forest_plan(3, "allreduce", "star")) as comm:
        assert comm.all_reduce([np.array([-4, 4]), *[np.array([-2, 2])] * 2], op="avg")[2].tolist() == [-2, 2]
        assert comm.all_reduce([np.array([-3, 3]), *[np.array([-1, 1])] * 2], op="avg")[2].tolist() == [-1, 1]
    total = np.array([-128, -127, 127], dtype=np.int8)
    divide(total, 128)
    assert total.tolist() == [-1, 0, 0]


def test_bool_reduces_by_and_and_or_and_refuses_a_sum() -> None:
    arrays = [np.array([True, True]), np.array([True, False])]
    with Communicator(forest_plan(2, "allreduce", "star")) as comm:
        assert comm.all_reduce(arrays, op="min")[1].tolist() == [True, False]
        assert comm.all_reduce(arrays, op="max")[1].tolist() == [True, True]
        with pytest.raises(UsageError, match="'sum' is not defined for bool; use 'max'"):
            comm.all_reduce(arrays)


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_float_results_are_bit_identical_on_all_ranks_and_in_every_run(shape: str) -> None:
    generator = np.random.default_rng(5)
    arrays = [generator.standard_normal(10007).astype(np.float32) for _ in range(8)]
    results = []
    for chunk_bytes in (100, 4096, 1 << 20):
        with Communicator(forest_plan(8, "allreduce", shape), chunk_bytes=chunk_bytes) as comm:
            results += comm.all_reduce(arrays) + comm.all_reduce(arrays)
    assert len({result.tobytes() for result in results}) == 1
    exact = np.sum(np.stack(arrays).astype(np.float64), axis=0)
    bound = 7 * np.finfo(np.float32).eps * np.abs(np.stack(arrays)).sum(axis=0)
    assert np.all(np.abs(results[0] - exact) <= bound)


def test_overflow_and_nan_pass_through_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    arrays = [np.array([60000, np.nan, np.inf], dtype=np.float16), np.array([60000, 1, -np.inf], np.float16)]
    with Communicator(forest_plan(2, "allreduce", "star")) as comm:
        result = comm.all_reduce(arrays)[0]
    assert np.isposinf(result[0])
    assert np.isnan(result[1:]).all()
    assert len(recwarn) == 0


def test_reduce_in_place_changes_the_roots_array_only() -> None:
    arrays = numbers(5, 335)
    before = [array.copy() for array in arrays]
    with Communicator(forest_plan(5, "reduce", "chain", root=3)) as comm:
        comm.reduce(arrays, out=arrays)
        results = comm.reduce(before, out=[None, None, None, before[3].copy(), None])
    assert same(arrays, [*before[:3], np.sum(before, axis=0), before[4]])
    assert [result is None for result in results] == [True, True, True, False, True]


def test_gather_and_scatter_work_in_place_as_in_nccl() -> None:
    """The input is the rank's own block of the gathered buffer, or the output the own block of the input."""
    gathered = [np.zeros((8, 2), dtype=np.int64) for _ in range(4)]
    own = [buffer[2 * rank : 2 * rank + 2] for rank, buffer in enumerate(gathered)]
    for rank, block in enumerate(own):
        block[...] = rank + 1
    with Communicator(forest_plan(4, "allgather", "chain")) as comm:
        comm.all_gather(own, out=gathered)
    assert all(np.array_equal(buffer[:, 1], np.repeat([1, 2, 3, 4], 2)) for buffer in gathered)

    arrays = numbers(4, 8)
    expected = wanted("reduce_scatter", [array.copy() for array in arrays], root=0)
    outputs = [array[2 * rank : 2 * rank + 2] for rank, array in enumerate(arrays)]
    with Communicator(forest_plan(4, "reduce_scatter", "star")) as comm:
        assert same(comm.reduce_scatter(arrays, out=outputs), expected)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_strided_and_transposed_arrays_are_read_and_written_in_their_own_layout(collective: str) -> None:
    arrays = [np.asfortranarray(array)[:, ::2] for array in numbers(4, (80, 6))]
    expected = wanted(collective, arrays, root=1)
    out = [None if e is None else np.zeros((*e.shape, 2), e.dtype)[..., 1] for e in expected]
    with Communicator(forest_plan(4, collective, "binary")) as comm:
        results = call(comm, collective, arrays, out=out)
    assert same(results, expected)
    assert all(a is b for a, b in zip(results, out, strict=True))


def test_results_over_other_inputs_are_as_if_all_inputs_had_been_read_first() -> None:
    line = np.arange(640)
    arrays = [line[0:160], line[160:320], line[320:480], line[480:640]]
    expected = wanted("allreduce", [array.copy() for array in arrays], root=0)
    out = [line[80:240], line[240:400], line[400:560], np.zeros(160, dtype=line.dtype)]
    with Communicator(forest_plan(4, "allreduce", "chain")) as comm:
        assert same(comm.all_reduce(arrays, out=out), expected)


def test_one_number_per_rank_is_gathered_into_a_vector() -> None:
    with Communicator(forest_plan(3, "allgather", "star")) as comm:
        assert comm.all_gather([np.array(7), np.array(8), np.array(9)])[1].tolist() == [7, 8, 9]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_rank_gets_a_copy_of_its_own_data(collective: str) -> None:
    root = 0 if collective in ("broadcast", "reduce") else None
    plan = trivial_plan(Fabric(full_mesh(1), ("nvlink",)), collective, root=root, method="hand")
    array = np.arange(5)
    with Communicator(plan) as comm:
        (result,) = call(comm, collective, [array])
    assert result is not None
    assert result.tolist() == [0, 1, 2, 3, 4]
    assert not np.shares_memory(result, array)


BAD_ARRAYS = [
    (lambda a: a[:-1], "3 arrays for 4 ranks"),
    (lambda a: np.array(5), "arrays must be a list with one for each of 4 ranks, got a ndarray"),
    (lambda a: None, "arrays must be a list with one for each of 4 ranks, got a NoneType"),
    (lambda a: [*a[:2], [1, 2, 3], a[3]], "rank 2 has a list instead of a numpy array"),
    (lambda a: [*a[:2], np.ma.masked_array(a[2]), a[3]], "rank 2 has a MaskedArray"),
    (lambda a: [*a[:3], a[3][:4]], r"rank 3 has shape \(4,\) and rank 0 \(8,\)"),
    (lambda a: [a[0], a[1].astype(np.float32), *a[2:]], "rank 1 has dtype float32 and rank 0 int64"),
    (lambda a: [x.astype(object) for x in a], "rank 0 has dtype object, which cannot be moved"),
    (lambda a: [x.astype("datetime64[s]") for x in a], "rank 0 has dtype datetime64"),
]


@pytest.mark.parametrize(("change", "message"), BAD_ARRAYS)
def test_refuses_arrays(change: Callable[[list[NDArray[Any]]], list[NDArray[Any]]], message: str) -> None:
    for collective in COLLECTIVES:
        with (
            Communicator(forest_plan(4, collective, "star")) as comm,
            pytest.raises(UsageError, match=message),
        ):
            call(comm, collective, change(numbers(4, 8)))


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.setflags(write=False)
    return array


BAD_OUT = [
    (lambda o: o[:3], "3 out arrays for 4 ranks"),
    (lambda o: [*o[:3], None], "rank 3 has a NoneType instead of a numpy array as its out array"),
    (lambda o: [*o[:3], o[3][:4]], r"rank 3 has an out array of shape \(4,\).*needs shape \(8,\)"),
    (lambda o: [*o[:3], o[3].astype(np.int32)], "rank 3 has an out array .* dtype int32"),
    (lambda o: [*o[:3], read_only(o[3])], "rank 3 has a read-only out array"),
    (lambda o: [*o[:3], o[1]], "out arrays of rank 1 and rank 3 share memory"),
]


@pytest.mark.parametrize(("change", "message"), BAD_OUT)
def test_refuses_an_out(change: Callable[[list[NDArray[Any]]], list[NDArray[Any]]], message: str) -> None:
    out = [np.full(8, -1) for _ in range(4)]
    with (
        Communicator(forest_plan(4, "allreduce", "star")) as comm,
        pytest.raises(UsageError, match=message),
    ):
        comm.all_reduce(numbers(4, 8), out=change(out))
    assert all((array == -1).all() for array in out)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), 1e6])
def test_timeouts_that_no_system_can_wait_are_refused(timeout: float) -> None:
    plan = topoplan.plan("dgx-1v", gpus=[0, 1])
    with pytest.raises(UsageError, match=f"timeout must be above 0 and at most 100000 s, got {timeout}"):
        Communicator(plan, timeout=timeout)


def test_other_requests_that_do_not_fit_are_refused() -> None:
    plan = forest_plan(4, "reduce_scatter", "star")
    with Communicator(plan) as comm:
        with pytest.raises(
            UsageError, match=r"axis 0 of shape \(6, 2\) cannot be divided among 4 ranks; .* 8"
        ):
            comm.reduce_scatter(numbers(4, (6, 2)))
        with pytest.raises(
            UsageError, match="reduction 'mean' is unknown; use one of avg, max, min, prod, sum"
        ):
            comm.reduce_scatter(numbers(4, 8), op="mean")
        with pytest.raises(UsageError, match="'min' is not defined for complex64"):
            comm.reduce_scatter(numbers(4, 8, dtype="complex64"), op="min")
        with pytest.raises(UsageError, match="root must be a rank, 0 to 3, got 4"):
            comm.broadcast(numbers(4, 8), root=4)
    with pytest.raises(UsageError, match="closed"):
        comm.reduce_scatter(numbers(4, 8))
    with pytest.raises(UsageError, match="back end 'smoke' is unknown; use loopback"):
        Communicator(plan, "smoke")
    with pytest.raises(UsageError, match="chunks must have at least 1 byte, got 0"):
        Communicator(plan, chunk_bytes=0)
    with pytest.raises(UsageError, match=r"nowhere\.json cannot be read"):
        Communicator("nowhere.json")
    with pytest.raises(UsageError, match=r"plan must be a Plan.*, got int"):
        Communicator(7)  # type: ignore[arg-type]
    for backend in ("loopback", "mpi", "tcp"):
        with pytest.raises(UsageError, match=r"plan must be a Plan.*, got NoneType"):
            Communicator(None, backend)  # type: ignore[arg-type]


def test_a_plan_may_be_named_by_its_file_or_its_machine(tmp_path: Path) -> None:
    plan = topoplan.plan(topoplan.load("v100x4"))
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json(), encoding="utf-8")
    for named in (plan, file, str(file), "v100x4", topoplan.load("v100x4")):
        with Communicator(named) as comm:
            assert comm.plan.digest == plan.digest
            assert comm.all_reduce(numbers(4, 8))[3].shape == (8,)


def test_a_wrong_plan_is_refused_at_construction() -> None:
    plan = forest_plan(4, "allreduce", "star")
    lossy = replace(plan.shards[2], stages=plan.shards[2].stages[:1])
    with pytest.raises(PlanError, match="shard 2"):
        Communicator(replace(plan, shards=(*plan.shards[:2], lossy, plan.shards[3])))


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.stem, marks=[pytest.mark.slow] * (path.stem == "gb300-nvl72"))
        for path in sorted((ROOT / "topologies").glob("*.json"))
    ],
)
def test_an_allreduce_plan_runs_all_five_collectives_exactly(name: str) -> None:
    """The others are planned on first use, on the same allocation, and then kept."""
    machine = topoplan.load(name)
    ranks = len(machine.gpus)
    arrays = numbers(ranks, ranks * 1003)
    plan = topoplan.plan(machine, "allreduce")
    check_table(lower(plan, 16147, chunk_elements=512), plan)
    with Communicator(plan, chunk_bytes=4096) as comm:
        for collective in COLLECTIVES:
            assert same(call(comm, collective, arrays), wanted(collective, arrays, root=0))
        for collective, root in itertools.product(("broadcast", "reduce"), (min(1, ranks - 1), ranks - 1)):
            assert same(call(comm, collective, arrays, root=root), wanted(collective, arrays, root=root))


def test_a_communicator_of_three_gpus_plans_by_rank_not_by_gpu_number() -> None:
    plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[4, 5, 7])
    arrays = numbers(3, 195)
    with Communicator(plan) as comm:
        assert same(comm.broadcast(arrays, root=2), [arrays[2]] * 3)
        assert same(comm.all_gather(arrays), [np.concatenate(arrays)] * 3)


def reference(plan: Plan, arrays: list[NDArray[Any]], *, op: np.ufunc = np.add) -> list[NDArray[Any] | None]:
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


def same_bits(results: list[NDArray[Any] | None], expected: list[NDArray[Any] | None]) -> bool:
    return [None if a is None else a.tobytes() for a in results] == [
        None if a is None else a.tobytes() for a in expected
    ]


def normals(ranks: int, count: int) -> list[NDArray[Any]]:
    generator = np.random.default_rng(count)
    return [generator.standard_normal(count) for _ in range(ranks)]


@pytest.mark.thorough
def test_threads_work_in_place_and_with_every_chunk_size() -> None:
    plan = forest_plan(4, "allreduce", "binary")
    arrays = normals(4, BYTES_PER_THREAD // 8)
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
    arrays = normals(4, BYTES_PER_THREAD // 8)
    with Communicator(forest_plan(4, "allreduce", "star"), Loopback(4, threads=3)) as comm:
        comm.all_reduce(arrays)
        assert len(set(threading.enumerate()) - before) == 2
    assert set(threading.enumerate()) <= before


def test_small_calls_start_no_thread() -> None:
    before = set(threading.enumerate())
    with Communicator(forest_plan(4, "allreduce", "star"), Loopback(4, threads=3)) as comm:
        comm.all_reduce(normals(4, 10000))
        assert set(threading.enumerate()) <= before


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


class OwnClock:
    """Time passes only while somebody waits; ``late(n)`` seconds too long the n-th time."""

    def __init__(self, late: Callable[[int], float] = lambda wait: 0.0) -> None:
        self.time = 100.0
        self.waits = 0
        self.late = late

    def now(self) -> float:
        return self.time

    def wait_until(self, moment: float) -> None:
        self.time = max(self.time, moment) + self.late(self.waits)
        self.waits += 1


def player_of(
    plan: Plan,
    table: TransferTable,
    move: Callable[[EdgeStream, int, int], None],
    *,
    scale: float,
    itemsize: int,
) -> LinkPlayer:
    wires = paced_links_of(PlanKey(plan.digest, plan), table)
    paces = wires.paces(itemsize, scale, [None] * len(wires.parts))
    return LinkPlayer(
        wires.parts,
        wires.routes,
        paces,
        ranks=len(plan.ranks),
        chunk_elements=table.chunk_elements,
        move=move,
    )


def seconds(
    plan: Plan,
    nbytes: int,
    *,
    chunk_bytes: int,
    scale: float = 1.0,
    clock: OwnClock | None = None,
    move: Callable[[EdgeStream, int, int], None] = lambda part, start, stop: None,
) -> float:
    """How long a buffer takes."""
    table = lower(plan, nbytes, chunk_elements=chunk_bytes)
    return player_of(plan, table, move, scale=scale, itemsize=1).play(clock or OwnClock())


def chain_plan(size: int) -> Plan:
    """A broadcast along a chain of 1 GB/s links."""
    tree = {rank: rank - 1 for rank in range(1, size)}
    return plan_of(size, "broadcast", [Shard(Fraction(1), (stage("broadcast", 0, tree),))], root=0)


@pytest.mark.parametrize(("size", "chunks"), [(2, 1), (2, 10), (5, 1), (5, 40)])
def test_a_chain_takes_the_time_of_the_pipeline_formula(size: int, chunks: int) -> None:
    """(H + k - 1) (alpha + s / (k c)) for H hops and k chunks."""
    nbytes = 40_000_000
    took = seconds(chain_plan(size), nbytes, chunk_bytes=nbytes // chunks)
    hop = START_UP["nvlink"] + nbytes / chunks / 1e9
    assert took == pytest.approx((size - 1 + chunks - 1) * hop, rel=1e-9)


def test_the_scale_multiplies_every_bandwidth_and_no_latency() -> None:
    took = seconds(chain_plan(2), 1_000_000, chunk_bytes=1_000_000, scale=0.01)
    assert took == pytest.approx(START_UP["nvlink"] + 0.1, rel=1e-9)


def test_a_stated_latency_delays_every_chunk() -> None:
    plan = chain_plan(2)
    slow = tuple(replace(link, latency=0.5) for link in plan.topology.links)
    plan = replace(plan, topology=replace(plan.topology, links=slow))
    assert seconds(plan, 3_000_000, chunk_bytes=1_000_000) == pytest.approx(3 * 0.501, rel=1e-9)


def thin_link_cycle() -> Topology:
    names = [f"gpu{rank}" for rank in range(4)]
    pairs = [(names[rank], names[(rank + 1) % 4], 25.0 if rank == 3 else 100.0) for rank in range(4)]
    links = [Link(*ends, "nvlink", bandwidth) for a, b, bandwidth in pairs for ends in ((a, b), (b, a))]
    return Topology("cycle", tuple(Device(name, "gpu") for name in names), tuple(links))


def behind_nics() -> Topology:
    return cluster([Server(topoplan.load("dgx-1v"), gpus=[0, 1], count=2)], nic_gbps=10)


def in_network() -> Topology:
    """A DGX H100 whose switches copy and add."""
    machine = topoplan.load("dgx-h100")
    devices = tuple(
        replace(d, multicast=d.kind == "nvswitch", reduce=d.kind == "nvswitch") for d in machine.devices
    )
    return replace(machine, devices=devices)


def dgx(gpus: list[int], channels: str = "auto") -> Callable[[], Plan]:
    return lambda: topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=gpus, channels=channels)


PLANS: dict[str, Callable[[], Plan]] = {
    "cycle": lambda: topoplan.plan(thin_link_cycle(), "allreduce"),
    "cycle ring": lambda: topoplan.ring_plan(thin_link_cycle(), "allreduce"),
    "dgx-1v": dgx([0, 1, 2, 3, 4, 5, 6, 7]),
    "dgx-1v, six": dgx([0, 1, 2, 3, 4, 5]),
    "dgx-1v, pcie ring": lambda: topoplan.ring_plan(topoplan.load("dgx-1v"), "allreduce", gpus=[1, 4, 5, 7]),
    "dgx-1v, split": dgx([0, 1, 2, 3], "nvlink+pcie"),
    "dgx-2": lambda: topoplan.plan(topoplan.load("dgx-2"), "allreduce"),
    "two servers": lambda: topoplan.plan(behind_nics(), "allreduce"),
    "two servers, ring": lambda: topoplan.ring_plan(behind_nics(), "allreduce"),
    "in the network": lambda: topoplan.plan(in_network(), "allreduce"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", PLANS)
def test_at_64_mb_time_is_within_5_percent_of_the_simulation_and_of_the_rate(name: str) -> None:
    """With the chunks that the back end chooses, at a scale at which the rate alone gives two seconds."""
    plan = PLANS[name]()
    count = 16 << 20
    scale = 4 * count / (plan.rate * 1e9 * 2)
    key = PlanKey(plan.digest, plan)
    table = recut(key, lower(plan, count, chunk_elements=1 << 16), itemsize=4, scale=scale)
    took = player_of(plan, table, lambda *_: None, scale=scale, itemsize=4).play(OwnClock())
    assert took == pytest.approx(topoplan.simulate(plan, nbytes=round(4 * count / scale)).seconds, rel=0.05)
    assert 2 / took >= 0.95


def test_trees_of_unequal_weight_keep_their_parts_of_a_shared_link() -> None:
    """Six GPUs of a DGX-1V: by chunk index alone the rate would be missed by a sixth, however many chunks."""
    plan = PLANS["dgx-1v, six"]()
    assert len({shard.share for shard in plan.shards}) > 1
    nbytes = round(plan.rate * 1e9)
    assert seconds(plan, nbytes, chunk_bytes=nbytes // 500) == pytest.approx(1, rel=0.03)


@pytest.mark.sampled
@pytest.mark.parametrize("name", [*PLANS, "dgx-1v, gather"])
def test_crossings_load_every_link_as_the_rate_counts_it(name: str) -> None:
    machine = topoplan.load("dgx-1v")
    plan = PLANS[name]() if name in PLANS else topoplan.plan(machine, "allgather")
    fabric = Fabric(plan.topology, plan.channels)
    parts = streams(lower(plan, 8 * 9 * 5 * 7 * 1000, chunk_elements=1 << 20))
    found = crossings(plan, fabric, parts)
    loads = [Fraction(0)] * len(fabric.links)
    for link, members in zip(found.link, found.members, strict=True):
        loads[link] += plan.shards[parts[members[0]].shard].share
    assert loads == link_loads(plan.shards, fabric)
    for part, path in zip(parts, found.paths, strict=True):
        crossed = [fabric.links[found.link[at]] for at in path]
        assert (crossed[0].src, crossed[-1].dst) == (plan.ranks[part.source], plan.ranks[part.destination])
        assert all(one.dst == after.src for one, after in pairwise(crossed))


def test_waking_late_by_less_than_the_burst_is_made_good() -> None:
    exact = seconds(chain_plan(3), 10**8, chunk_bytes=10**6)
    took = seconds(chain_plan(3), 10**8, chunk_bytes=10**6, clock=OwnClock(lambda wait: 0.9 * BURST))
    assert exact <= took <= exact + 0.9 * BURST + 1e-9


def test_of_one_long_delay_only_the_burst_is_made_good() -> None:
    exact = seconds(chain_plan(3), 10**9, chunk_bytes=10**6)
    stalled = OwnClock(lambda wait: 1.0 if wait == 700 else 0.0)
    assert seconds(chain_plan(3), 10**9, chunk_bytes=10**6, clock=stalled) == pytest.approx(exact + 1 - BURST)


@given(st.lists(st.floats(0, 3 * BURST), min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_no_link_carries_more_than_its_bandwidth_and_a_burst_whatever_wakes_late(late: list[float]) -> None:
    """Between any two moments at which chunks leave a link of 1 GB/s; it is never done too early either."""
    clock = OwnClock(lambda wait: late[wait % len(late)])
    left: list[float] = []
    plan, chunk = chain_plan(2), 5_000_000
    took = seconds(
        plan, 100 * chunk, chunk_bytes=chunk, clock=clock, move=lambda *_: left.append(clock.now())
    )
    assert took >= 100 * (chunk / 1e9 + START_UP["nvlink"]) - 1e-9
    for first in range(100):
        for last in range(first + 1, 100):
            assert (last - first) * chunk / 1e9 <= left[last] - left[first] + BURST + 1e-9


def test_what_passes_through_a_rank_is_bounded_though_the_next_link_is_slow() -> None:
    """Data arrives at rank 1 a thousand times as fast as it can leave."""
    tree = stage("reduce", 0, {1: 0, 2: 1})
    plan = plan_of(3, "reduce", [Shard(Fraction(1), (tree,))], root=0)
    links = tuple(
        replace(link, bandwidth=1000.0 if link.src == "gpu2" else 1.0) for link in plan.topology.links
    )
    plan = replace(plan, topology=replace(plan.topology, links=links), bound=1001.0)
    arrays = [np.ones(4 << 20, np.float32) for _ in range(3)]
    chunk_bytes = 16 << 10
    backend = PacedLoopback(3, clock=OwnClock())
    with Communicator(plan, backend, chunk_bytes=chunk_bytes) as comm:
        out = comm.reduce(arrays)
        tracemalloc.start()
        comm.reduce(arrays, out=out)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert out[0] is not None
    assert (out[0] == 3).all()
    assert peak < (AHEAD + 4) * chunk_bytes + (256 << 10) < arrays[0].nbytes / 10


@pytest.mark.thorough
def test_the_limit_on_what_is_passed_on_costs_no_time() -> None:
    plan = topoplan.plan(topoplan.load("dgx-1v"), "reduce")
    arrays = [np.ones(1 << 20, np.float32) for _ in range(8)]
    clock = OwnClock()
    with Communicator(plan, PacedLoopback(8, scale=1e-5, clock=clock)) as comm:
        comm.reduce(arrays)
    assert clock.time - 100 == pytest.approx((4 << 20) / (plan.rate * 1e4), rel=0.05)


def test_an_error_while_data_moves_ends_the_call() -> None:
    """A result that cannot be written, which the communicator would have refused."""
    plan = chain_plan(2)
    parts = streams(lower(plan, 160, chunk_elements=48))
    source, target = np.ones(160), np.zeros(160)
    target.setflags(write=False)
    memory = (
        RankArrays(0, (0, 160), source, (0, 160), source),
        RankArrays(1, (0, 160), source, (0, 160), target),
    )
    mover = ChunkMover(parts, memory, np.add, chunk_elements=48)
    with pytest.raises(ValueError, match="read-only"):
        seconds(plan, 160, chunk_bytes=48, move=mover.move)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_links_that_carry_nothing_are_refused(scale: float) -> None:
    with pytest.raises(UsageError, match="scale must be above 0 and finite"):
        PacedLoopback(4, scale=scale)
