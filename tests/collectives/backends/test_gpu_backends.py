"""The GPU back ends on GPUs that this processor plays: results have the bits of the loopback on numpy arrays."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import permutations, product
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import topoplan
from collectives import Communicator, lower
from collectives.backends.backend import RankArrays
from collectives.backends.loopback.gpu_loopback import LoopbackGpu
from collectives.backends.loopback.gpu_loopback import program_of as loopback_program
from collectives.backends.stepped_program import program_of as nccl_program
from collectives.tables.transfer_table import streams
from tests.support.fake_streams import Machine
from tests.support.gpu_ranks import cupy as cupy
from tests.support.gpu_ranks import floats, on_every_rank, outcome
from tests.support.gpu_ranks import machine as machine
from tests.support.hand_plans import forest_plan, three_phase_plan
from tests.support.tcp_jobs import call
from topoplan.plans.plan import ALL_COLLECTIVES, Plan

ORDERS = ("first", "last", "random")


def few(cases: Iterable[Any], every: int = 3) -> list[Any]:
    """The cases, of which the default run takes one in so many."""
    return [
        pytest.param(*case, marks=pytest.mark.thorough if number % every else ())
        for number, case in enumerate(cases)
    ]


def expected(
    plan: Plan, collective: str, arrays: list[np.ndarray], **options: object
) -> list[np.ndarray | None]:
    """What the loopback on numpy arrays gives."""
    with Communicator(plan, chunk_bytes=1 << 20) as comm:
        return call(comm, collective, arrays, **options)


def identical(found: list[object], wanted: list[np.ndarray | None]) -> bool:
    return len(found) == len(wanted) and all(
        (one is None and other is None)
        or (one is not None and other is not None and one.get().tobytes() == other.tobytes())  # type: ignore[attr-defined]
        for one, other in zip(found, wanted, strict=True)
    )


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize(("collective", "order"), few(zip(ALL_COLLECTIVES, ORDERS * 2, strict=True)))
def test_loopback_repeats_its_bits(machine: Machine, cupy: ModuleType, collective: str, order: str) -> None:
    machine.order = order
    plan = forest_plan(6, collective, "binary")
    with Communicator(plan, LoopbackGpu(cupy, 6, step_bytes=2000), chunk_bytes=100) as comm:
        for seed in range(4):
            arrays = floats(6, 1806, seed=seed)
            results = call(comm, collective, [cupy.asarray(array) for array in arrays])
            assert identical(results, expected(plan, collective, arrays))
    assert machine.graph_launches == 3


@pytest.mark.thorough
def test_a_caller_may_copy_during_capture(cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a training loop does that puts gradients into the next bucket: another thread, the stream of the library."""
    backend, plan = LoopbackGpu(cupy, 6, step_bytes=2000), forest_plan(6, "allreduce", "binary")
    launch, copied = backend.arrays.kernels.launch, []

    def copy() -> None:
        source, target = cupy.asarray(np.arange(3.0)), cupy.empty(3)
        backend.arrays.copy(target, backend.arrays.check(source, rank=0, what="gradient"))
        copied.append(target.get().tolist())

    def launch_beside_a_copy(*arguments: Any) -> None:
        thread = threading.Thread(target=copy)
        thread.start()
        thread.join()
        launch(*arguments)

    with Communicator(plan, backend, chunk_bytes=100) as comm:
        for seed in range(3):
            arrays = floats(6, 1806, seed=seed)
            if seed == 1:
                monkeypatch.setattr(
                    type(backend.arrays.kernels), "launch", lambda _, *rest: launch_beside_a_copy(*rest)
                )
            results = call(comm, "allreduce", [cupy.asarray(array) for array in arrays])
            assert identical(results, expected(plan, "allreduce", arrays))
    assert copied
    assert all(one == [0.0, 1.0, 2.0] for one in copied)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("order", "graphs", "collective"), few(product(ORDERS, (True, False), ALL_COLLECTIVES), 7)
)
def test_nccl_repeats_its_bits_in_any_order_that_streams_may_run(
    machine: Machine, cupy: ModuleType, collective: str, graphs: bool, order: str
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
            outs.append(call(comm, collective, given, out=outs[-1]))
            found.append(None if outs[-1] is None else outs[-1].get())
        return found

    results = outcome(on_every_rank(cupy, plan, task, step_bytes=500, graphs=graphs))
    for number, arrays in enumerate(rounds):
        wanted = expected(plan, collective, arrays)
        assert [None if one is None else one.tobytes() for one in wanted] == [
            None if one[number] is None else one[number].tobytes() for one in results
        ]
    assert (machine.graph_launches > 0) == graphs


def test_graphs_are_replayed_only_when_all_ranks_have_them(machine: Machine, cupy: ModuleType) -> None:
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
        "ring": topoplan.ring_plan(machine, "allreduce"),
        "double binary tree": topoplan.double_binary_tree(machine, "allreduce"),
    }


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "order"),
    few(product(("three phases", "dgx-1v", "ring", "double binary tree"), ORDERS), 12),
)
def test_real_plans_have_loopbacks_bits(machine: Machine, cupy: ModuleType, name: str, order: str) -> None:
    machine.gpus, machine.order = 8, order
    plan, arrays = plans()[name], floats(8, 2011)
    wanted = expected(plan, "allreduce", arrays)
    with Communicator(plan, LoopbackGpu(cupy, 8, step_bytes=1), chunk_bytes=256) as comm:
        assert identical(comm.all_reduce([cupy.asarray(array) for array in arrays]), wanted)
    results = on_every_rank(
        cupy, plan, lambda comm, rank: comm.all_reduce(cupy.asarray(arrays[rank])), step_bytes=1
    )
    assert identical(outcome(results), wanted)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["loopback-gpu", "nccl"])
def test_out_may_be_strided_or_the_input(machine: Machine, cupy: ModuleType, backend: str) -> None:
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


def test_a_collective_waits_for_the_callers_stream(machine: Machine, cupy: ModuleType) -> None:
    machine.order = "last"
    plan = forest_plan(3, "allreduce", "star")
    with Communicator(plan, "loopback-gpu") as comm:
        with cupy.cuda.Stream(non_blocking=True):
            given = [cupy.zeros(100, dtype=np.float32) for _ in range(3)]
            for array in given:
                array[...] = 2.0
            handles = [comm.all_reduce(given, async_op=True) for _ in range(3)]
        assert all(handle.wait()[0].get().tolist() == [6.0] * 100 for handle in handles)


def test_background_collectives_follow_one_another(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus = 3
    plan = forest_plan(3, "allreduce", "chain")
    arrays = floats(3, 300)

    def task(comm: Communicator, rank: int) -> bytes:
        line = cupy.asarray(arrays[rank])
        handles = [comm.all_reduce(line, out=line, async_op=True) for _ in range(5)]
        handles[-1].wait()
        return bytes(line.get().tobytes())

    expected_lines = arrays
    for _ in range(5):
        expected_lines = [one for one in expected(plan, "allreduce", expected_lines) if one is not None]
    results = outcome(on_every_rank(cupy, plan, task))
    assert results == [line.tobytes() for line in expected_lines]


def test_bfloat16_is_rounded_after_every_join(machine: Machine, cupy: ModuleType) -> None:
    bfloat16 = pytest.importorskip("ml_dtypes", reason="numpy has no bfloat16 of its own").bfloat16
    machine.gpus = 3
    plan = forest_plan(3, "allreduce", "star", root=0)
    arrays = [array.astype(bfloat16) for array in floats(3, 501)]
    orders = {tuple(order) for order in permutations(range(3))}
    sums = np.stack([(arrays[a] + arrays[b]) + arrays[c] for a, b, c in orders]).view(np.uint16)
    with Communicator(plan, "loopback-gpu") as comm:
        results = comm.all_reduce([cupy.asarray(array) for array in arrays])
    lines = [result.get().view(np.uint16) for result in results]
    assert all(np.array_equal(line, lines[0]) for line in lines)
    assert (sums == lines[0]).any(axis=0).all()


def test_scratch_of_a_gpu_is_bounded_by_chunks_and_not_by_the_buffer() -> None:
    """Slots of chunks for the depth of the trees; twice that is more than enough for any of these."""
    table = lower(forest_plan(8, "reduce_scatter", "binary"), 8 * 20000, chunk_elements=96)
    memory = [
        RankArrays(rank, (0, 160000), None, (rank * 20000, (rank + 1) * 20000), None) for rank in range(8)
    ]
    depth = max(stream.level for stream in streams(table)) + 2
    work, scratch = loopback_program(table, memory, 4, step_bytes=1)
    assert 0 < scratch <= 8 * 8 * depth * (384 + 32)
    for one in memory:
        program = nccl_program(table, one, 4, step_bytes=1)
        assert 0 < program.scratch <= (8 * (depth + 2) + 2 * 8 * 8) * (384 + 32)
    assert len(work.steps) > 200
