"""The GPU back ends on GPUs that this processor plays: results have the bits of the loopback on numpy arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from fake_gpu import install
from fake_streams import Machine
from hand_plans import SHAPES, forest_plan, three_phase_plan
from test_loopback import run

import topoplan
from collectives import Communicator
from collectives.backends.loopback_gpu.backend import LoopbackGpu
from collectives.backends.nccl.backend import NcclBackend
from collectives.backends.nccl.tcp_world import TcpWorld
from collectives.backends.tcp.rendezvous import Rendezvous
from topoplan.errors import BackendError, UsageError
from topoplan.plans.plan import COLLECTIVES, Plan

ORDERS = ("first", "last", "random")
SIZES = [*((shape, 5003) for shape in sorted(SHAPES)), ("binary", 0), ("star", 1), ("chain", 7)]


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def cupy(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return install(monkeypatch, machine)


def floats(
    ranks: int, shape: int | tuple[int, ...], dtype: str = "float32", seed: int = 0
) -> list[np.ndarray]:
    """Numbers whose sums round, so that another order of additions shows."""
    generator = np.random.default_rng(seed)
    arrays = [generator.standard_normal(shape) * 100 for _ in range(ranks)]
    return [array.astype(dtype) for array in arrays]


def expected(
    plan: Plan, collective: str, arrays: list[np.ndarray], **options: object
) -> list[np.ndarray | None]:
    """What the loopback on numpy arrays gives."""
    with Communicator(plan, chunk_bytes=1 << 20) as comm:
        return run(comm, collective, arrays, **options)


def identical(found: list[object], wanted: list[np.ndarray | None]) -> bool:
    return len(found) == len(wanted) and all(
        (one is None and other is None)
        or (one is not None and other is not None and one.get().tobytes() == other.tobytes())  # type: ignore[attr-defined]
        for one, other in zip(found, wanted, strict=True)
    )


# ---- all ranks on one GPU


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(("shape", "count"), SIZES)
def test_loopback_on_a_gpu_has_the_bits_of_loopback(
    cupy: ModuleType, shape: str, collective: str, count: int
) -> None:
    plan = forest_plan(5, collective, shape)
    arrays = floats(5, (count + 4) // 5 * 5 if collective == "reduce_scatter" else count)
    with Communicator(plan, "loopback-gpu", chunk_bytes=256) as comm:
        results = run(comm, collective, [cupy.asarray(array) for array in arrays])
    assert identical(results, expected(plan, collective, arrays))


# ---- one rank per GPU


def on_every_rank(
    cupy: ModuleType,
    plan: Plan,
    task: Callable[[Communicator, int], Any],
    *,
    chunk_bytes: int = 256,
    timeout: float = 10.0,
    **options: Any,
) -> list[Any]:
    """What the task returns or raises on each rank, each rank a thread with a GPU of its own."""
    size = len(plan.ranks)
    results: list[Any] = [None] * size

    def be(rank: int) -> None:
        try:
            with cupy.cuda.Device(rank):
                world = TcpWorld(meeting.address, rank, size, timeout=timeout)
                settings = {
                    name: value[rank] if isinstance(value, list) else value for name, value in options.items()
                }
                backend = NcclBackend(cupy, world, timeout=timeout, **settings)
                with Communicator(plan, backend, chunk_bytes=chunk_bytes, timeout=timeout) as comm:
                    results[rank] = task(comm, rank)
        except Exception as error:
            results[rank] = error

    with Rendezvous("127.0.0.1:0", size) as meeting:
        threads = [threading.Thread(target=be, args=[rank]) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    return results


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(("shape", "count"), SIZES)
def test_nccl_has_the_bits_of_loopback(
    machine: Machine, cupy: ModuleType, shape: str, collective: str, count: int
) -> None:
    machine.gpus = 5
    plan = forest_plan(5, collective, shape)
    arrays = floats(5, (count + 4) // 5 * 5 if collective == "reduce_scatter" else count)
    results = on_every_rank(
        cupy,
        plan,
        lambda comm, rank: run(comm, collective, cupy.asarray(arrays[rank])),
        step_bytes=600,
    )
    for result in results:
        if isinstance(result, Exception):
            raise result
    assert identical(results, expected(plan, collective, arrays))


def outcome(results: list[Any]) -> list[Any]:
    """The results, where no rank failed."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_loopback_on_a_gpu_repeats_its_bits_step_by_step_and_as_a_graph_for_other_arrays(
    machine: Machine, cupy: ModuleType, collective: str, order: str
) -> None:
    machine.order = order
    plan = forest_plan(6, collective, "binary")
    with Communicator(plan, LoopbackGpu(cupy, 6, step_bytes=2000), chunk_bytes=100) as comm:
        for seed in range(4):
            arrays = floats(6, 1806, seed=seed)
            results = run(comm, collective, [cupy.asarray(array) for array in arrays])
            assert identical(results, expected(plan, collective, arrays))
    assert machine.graph_launches == 3


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("how", [{}, {"overlap": False}, {"lanes": "trees"}, {"graphs": False}], ids=str)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_nccl_repeats_its_bits_in_any_order_that_streams_may_run(
    machine: Machine, cupy: ModuleType, collective: str, how: dict[str, Any], order: str
) -> None:
    """The first call runs step by step, the second is captured, the third replayed on other values."""
    machine.gpus, machine.order = 4, order
    plan = forest_plan(4, collective, "chain")
    rounds = [floats(4, 1204, seed=seed) for seed in range(4)]

    def task(comm: Communicator, rank: int) -> list[Any]:
        given = cupy.asarray(rounds[0][rank])
        outs: list[Any] = [None]
        found = []
        for arrays in rounds:
            given.set(arrays[rank])
            outs.append(run(comm, collective, given, out=outs[-1]))
            found.append(None if outs[-1] is None else outs[-1].get())
        return found

    results = outcome(on_every_rank(cupy, plan, task, step_bytes=500, **how))
    for number, arrays in enumerate(rounds):
        wanted = expected(plan, collective, arrays)
        assert [None if one is None else one.tobytes() for one in wanted] == [
            None if one[number] is None else one[number].tobytes() for one in results
        ]
    replayed = not how.get("lanes") and how.get("graphs", True)
    assert (machine.graph_launches > 0) == replayed


def test_graphs_are_replayed_only_where_all_ranks_have_the_same_one_for_their_arrays(
    machine: Machine, cupy: ModuleType
) -> None:
    """In each round every rank takes one of two arrays, so all mixtures of old and new addresses come up."""
    machine.gpus = 3
    plan = forest_plan(3, "allreduce", "chain")
    generator = np.random.default_rng(2)
    rounds = [(0, 0, 0)] * 3 + [(1, 0, 0)] * 3 + [(0, 0, 0)] * 3 + generator.integers(0, 2, (12, 3)).tolist()
    arrays = [floats(3, 50, seed=seed) for seed in range(2)]

    def task(comm: Communicator, rank: int) -> list[bytes]:
        given = [cupy.asarray(choice[rank]) for choice in arrays]
        out = cupy.zeros(50, dtype=np.float32)
        return [comm.all_reduce(given[chosen[rank]], out=out).get().tobytes() for chosen in rounds]

    results = outcome(on_every_rank(cupy, plan, task))
    for number, chosen in enumerate(rounds):
        mixed = [arrays[choice][rank] for rank, choice in enumerate(chosen)]
        wanted = expected(plan, "allreduce", mixed)[0]
        assert wanted is not None
        assert {result[number] for result in results} == {wanted.tobytes()}
    assert machine.graph_launches > 3 * len(rounds) / 2


def plans() -> dict[str, Plan]:
    machine = topoplan.load("dgx-1v")
    return {
        "three phases": three_phase_plan([[0, 1, 2], [3, 4, 5, 6, 7]]),
        "dgx-1v": topoplan.plan(machine, "allreduce"),
        "ring": topoplan.ring(machine, "allreduce"),
        "double binary tree": topoplan.double_binary_tree(machine, "allreduce"),
    }


@pytest.mark.parametrize("name", ["three phases", "dgx-1v", "ring", "double binary tree"])
@pytest.mark.parametrize("order", ORDERS)
def test_plans_of_real_machines_have_the_same_bits_on_both(
    machine: Machine, cupy: ModuleType, name: str, order: str
) -> None:
    machine.gpus, machine.order = 8, order
    plan, arrays = plans()[name], floats(8, 2011)
    wanted = expected(plan, "allreduce", arrays)
    with Communicator(plan, LoopbackGpu(cupy, 8, step_bytes=1), chunk_bytes=256) as comm:
        assert identical(comm.all_reduce([cupy.asarray(array) for array in arrays]), wanted)
    results = on_every_rank(
        cupy, plan, lambda comm, rank: comm.all_reduce(cupy.asarray(arrays[rank])), step_bytes=1
    )
    assert identical(outcome(results), wanted)


OPERATIONS = [
    (dtype, op) for dtype in ("float16", "int8", "uint64") for op in ("sum", "prod", "min", "max", "avg")
]
OPERATIONS += [
    ("complex64", "sum"),
    ("complex64", "avg"),
    ("complex128", "sum"),
    ("bool", "min"),
    ("bool", "max"),
]


@pytest.mark.parametrize(("dtype", "op"), OPERATIONS)
def test_every_reduction_has_the_bits_of_loopback_on_both(
    machine: Machine, cupy: ModuleType, dtype: str, op: str
) -> None:
    machine.gpus = 3
    plan = forest_plan(3, "allreduce", "star")
    arrays = floats(3, (7, 31), dtype=dtype)
    wanted = expected(plan, "allreduce", arrays, op=op)
    with Communicator(plan, "loopback-gpu", chunk_bytes=64) as comm:
        assert identical(comm.all_reduce([cupy.asarray(array) for array in arrays], op=op), wanted)
    results = on_every_rank(cupy, plan, lambda comm, rank: comm.all_reduce(cupy.asarray(arrays[rank]), op=op))
    assert identical(outcome(results), wanted)


@pytest.mark.parametrize("backend", ["loopback-gpu", "nccl"])
def test_inputs_stay_and_out_arrays_are_filled_in_place_strided_and_beside_others(
    machine: Machine, cupy: ModuleType, backend: str
) -> None:
    machine.gpus = 4
    plan = forest_plan(4, "allreduce", "binary")
    arrays = floats(4, (6, 10))
    wanted = expected(plan, "allreduce", arrays)
    given, rooms = [], []
    for rank, array in enumerate(arrays):
        with cupy.cuda.Device(rank if backend == "nccl" else 0):
            given.append(cupy.asarray(array))
            rooms.append(cupy.zeros((6, 20), dtype=np.float32))
            cupy.cuda.get_current_stream().synchronize()
    out = [room[:, ::2] for room in rooms]
    if backend == "nccl":
        outcome(on_every_rank(cupy, plan, lambda comm, rank: comm.all_reduce(given[rank], out=out[rank])))
        outcome(on_every_rank(cupy, plan, lambda comm, rank: comm.all_reduce(given[rank], out=given[rank])))
    else:
        with Communicator(plan, backend) as comm:
            assert all(a is b for a, b in zip(comm.all_reduce(given, out=out), out, strict=True))
            comm.all_reduce(given, out=given)
    for rank in range(4):
        assert np.array_equal(rooms[rank].get()[:, ::2], wanted[rank])
        assert not rooms[rank].get()[:, 1::2].any()
        assert np.array_equal(given[rank].get(), wanted[rank])


def test_a_collective_waits_for_what_the_callers_stream_still_has_to_do(
    machine: Machine, cupy: ModuleType
) -> None:
    machine.order = "last"
    plan = forest_plan(3, "allreduce", "star")
    with Communicator(plan, "loopback-gpu") as comm:
        with cupy.cuda.Stream(non_blocking=True):
            given = [cupy.zeros(100, dtype=np.float32) for _ in range(3)]
            for array in given:
                array[...] = 2.0
            handles = [comm.all_reduce(given, async_op=True) for _ in range(3)]
        assert all(handle.wait()[0].get().tolist() == [6.0] * 100 for handle in handles)


# ---- refusals and failures


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
