"""Buffers in slices over two hosts, whose messages move beside kernels, on GPUs that this processor plays."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from collectives import Communicator, lower
from collectives.backends.backend import RankArrays
from collectives.backends.nccl import nccl_backend, window_engine
from collectives.backends.nccl.kernel_program import KernelPlan
from collectives.backends.nccl.nccl_backend import NcclBackend
from collectives.backends.nccl.window_engine import COMPLETE, FIRST_BLOCK
from collectives.tables.lowering import PlanKey
from tests.support.fake_nccl import Group
from tests.support.fake_streams import Machine
from tests.support.gpu_ranks import check_bits, cupy, floats, machine, on_every_rank, outcome, pairs
from tests.support.hand_plans import forest_plan, three_phase_plan
from topoplan.errors import BackendError, RefusedError, TopoplanError
from topoplan.model.window_engine import SLOT_BYTES
from topoplan.model.window_slices import SlicedClock
from topoplan.plans.plan import Plan

__all__ = ["cupy", "machine", "pairs"]

PLAN = three_phase_plan([[0, 1], [2, 3]])
LENGTH = 96  # of float32: 16 elements of each shard in each of three slices
OPTIONS: dict[str, Any] = {
    "region_bytes": 8 << 20,
    "engine": "windows",
    "chunk_bytes": 1 << 20,
    "timeout": 40.0,
}

Sliced = Callable[[int], None]


@pytest.fixture
def sliced(pairs: Machine, monkeypatch: pytest.MonkeyPatch) -> Sliced:
    """Cut buffers into so many slices, on GPUs with room for kernels and messages."""
    pairs.peers = True
    monkeypatch.setattr(nccl_backend, "NCCL_BLOCKS", 0)

    def cut(slices: int) -> None:
        monkeypatch.setattr(SlicedClock, "slices", lambda *_, **__: slices)

    return cut


def sums(arrays: list[np.ndarray], plan: Plan = PLAN) -> list[bytes]:
    with Communicator(plan, "loopback") as comm:
        return [np.asarray(one).tobytes() for one in comm.all_reduce(arrays)]


def engine_of(comm: Communicator) -> Any:
    return comm._open().backend._engine  # type: ignore[attr-defined]


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not done() and time.monotonic() < end:
        time.sleep(1e-3)


@pytest.mark.parametrize(
    ("collective", "slices"),
    [
        ("allreduce", 2),
        *(
            pytest.param(collective, 3, marks=pytest.mark.thorough)
            for collective in ("allreduce", "reduce", "broadcast", "allgather", "reduce_scatter")
        ),
    ],
)
def test_slices_give_the_bits_of_loopback(
    pairs: Machine, cupy: ModuleType, sliced: Sliced, collective: str, slices: int
) -> None:
    sliced(slices)
    check_bits(cupy, collective, LENGTH, calls=2, **OPTIONS)
    assert pairs.memory == {}


@pytest.mark.parametrize("slices", [1, 2, 3])
def test_kernels_of_other_slices_run_while_messages_rest(
    pairs: Machine, cupy: ModuleType, sliced: Sliced, monkeypatch: pytest.MonkeyPatch, slices: int
) -> None:
    """All first kernels end; then no other can, and with one slice nothing moves beside messages."""
    sliced(slices)
    arrays, progress = floats(4, LENGTH), Group.progress
    rests, together, groups = threading.Event(), threading.Barrier(4), Counter[int]()

    def held(group: Group) -> bool:
        ended = not rests.is_set() and progress(group)
        groups[group.comm.rank] += ended
        return ended

    monkeypatch.setattr(Group, "progress", held)
    engines: list[Any] = [None] * 4
    seen: list[list[int]] = []

    def look_on() -> None:
        def words() -> list[int]:
            return [int(engine._page[FIRST_BLOCK]) for engine in engines]

        until(lambda: words() == [slices - 1 << 32 | COMPLETE] * 4)
        time.sleep(0.05)
        seen.append(words())
        rests.clear()

    def task(comm: Communicator, rank: int) -> Any:
        given = cupy.asarray(arrays[rank])
        comm.all_reduce(given)
        engines[rank] = engine_of(comm)
        together.wait()
        before = pairs.launches, groups[rank]
        if rank == 0:
            rests.set()
            threading.Thread(target=look_on).start()
        together.wait()
        found = comm.all_reduce(given).get()
        together.wait()
        return found.tobytes(), pairs.launches - before[0], groups[rank] - before[1]

    for found, kernels, moved in outcome(on_every_rank(cupy, PLAN, task, **OPTIONS)):
        assert found == sums(arrays)[0]
        assert (kernels, moved) == (4 * 3 * slices, 2 * slices)
    assert seen == [[slices - 1 << 32 | COMPLETE] * 4]


def test_messages_of_a_slice_move_while_the_kernel_of_another_rests(
    pairs: Machine, cupy: ModuleType, sliced: Sliced, monkeypatch: pytest.MonkeyPatch
) -> None:
    sliced(2)
    arrays, progress = floats(4, LENGTH), Group.progress
    goes_on, moved = threading.Event(), Counter[int]()

    def counted(group: Group) -> bool:
        ended = progress(group)
        moved[group.comm.rank] += ended
        return ended

    def task(comm: Communicator, rank: int) -> Any:
        given = cupy.asarray(arrays[rank])
        comm.all_reduce(given)
        (bound,) = engine_of(comm)._programs.values()
        kernel, calls = bound.kernel, []

        def rests(*arguments: Any) -> None:
            calls.append(arguments)
            if len(calls) == 2:
                cupy.cuda.get_current_stream().do(goes_on.is_set)
            kernel(*arguments)

        bound.kernel = rests
        return comm.all_reduce(given).get().tobytes()

    def look_on() -> None:
        until(lambda: moved == Counter(dict.fromkeys(range(4), 4 + 1)))
        time.sleep(0.05)
        seen.append(dict(moved))
        goes_on.set()

    seen: list[dict[int, int]] = []
    monkeypatch.setattr(Group, "progress", counted)
    threading.Thread(target=look_on).start()
    assert outcome(on_every_rank(cupy, PLAN, task, **OPTIONS)) == sums(arrays)
    assert seen == [dict.fromkeys(range(4), 5)]  # four of the first call, one of the second


@pytest.mark.parametrize(
    ("what", "slices"),
    [
        ("fails", 2),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (("fails", 1), ("stands still", 1), ("stands still", 2))
        ),
    ],
)
def test_a_rank_that_fails_between_two_groups_of_messages_is_named(
    pairs: Machine, cupy: ModuleType, sliced: Sliced, monkeypatch: pytest.MonkeyPatch, slices: int, what: str
) -> None:
    sliced(slices)
    arrays, progress, moves = floats(4, LENGTH), Group.progress, NcclBackend._move
    stands: list[Group] = []

    def held(group: Group) -> bool:
        # an abort ends it, as any other
        return progress(group) if group not in stands or group.comm.aborted else False

    def task(comm: Communicator, rank: int) -> Any:
        given, backend, calls = cupy.asarray(arrays[rank]), comm._open().backend, []  # type: ignore[attr-defined]
        comm.all_reduce(given)

        def move(*arguments: Any) -> None:
            calls.append(arguments)
            if len(calls) == 2 and what == "fails":
                raise RuntimeError("the GPU fell off the bus")
            moves(backend, *arguments)
            if len(calls) == 2:
                with pairs.lock:
                    stands.extend(one for one in arguments[1].queue if isinstance(one, Group))

        if rank == 1:
            backend._move = move
        comm.all_reduce(given)

    if what == "stands still":
        monkeypatch.setattr(Group, "progress", held)
    found = on_every_rank(cupy, PLAN, task, **{**OPTIONS, "timeout": 6.0 if what != "fails" else 40.0})
    assert all(isinstance(one, BackendError) for one in found), found
    if what == "fails":
        assert all(one.rank == 1 and "fell off the bus" in str(one) for one in found), found
    else:
        assert all(one.peer == 1 and "waited 6 s for rank 1" in str(one) for one in found), found
    assert not any(stream.queue for stream in pairs.streams)


def test_survivors_go_on_after_a_death_between_slices(
    pairs: Machine, cupy: ModuleType, sliced: Sliced
) -> None:
    sliced(2)
    arrays, moves = floats(4, LENGTH), NcclBackend._move

    def task(comm: Communicator, rank: int) -> Any:
        given, backend, calls = cupy.asarray(arrays[rank]), comm._open().backend, []  # type: ignore[attr-defined]
        comm.all_reduce(given)

        def dies(*arguments: Any) -> None:
            calls.append(arguments)
            if len(calls) < 2:
                return moves(backend, *arguments)
            backend._closed = True
            backend._guard.close()
            backend._world.end()
            backend.survivors.close()
            raise RuntimeError("killed")

        if rank == 1:
            backend._move = dies
            with pytest.raises(TopoplanError):
                comm.all_reduce(given)
            return None
        found = comm.all_reduce(given).get().tobytes()
        return comm.plan, engine_of(comm)._programs, found

    results = outcome(on_every_rank(cupy, PLAN, task, on_failure="shrink", **OPTIONS))
    left = [arrays[rank] for rank in (0, 2, 3)]
    for rank in (0, 2, 3):
        plan, programs, found = results[rank]
        assert found == sums(left, plan)[0]
        assert {one.slices for one in programs.values()} == {2}


def test_calls_that_differ_are_refused_before_a_slice_is_queued(
    pairs: Machine, cupy: ModuleType, sliced: Sliced
) -> None:
    sliced(2)
    arrays, together = floats(4, LENGTH), threading.Barrier(4)

    def task(comm: Communicator, rank: int) -> Any:
        given = cupy.asarray(arrays[rank])
        comm.all_reduce(given)
        together.wait()
        before = pairs.launches
        with pytest.raises(RefusedError, match="max"):
            comm.all_reduce(given, op="max" if rank == 3 else "sum")
        together.wait()
        queued = pairs.launches - before
        together.wait()
        return queued, comm.all_reduce(given).get().tobytes()

    assert outcome(on_every_rank(cupy, PLAN, task, **OPTIONS)) == [
        (1, one) for one in sums(arrays)
    ]  # rank 3 loads a kernel


@pytest.mark.parametrize(("fewest", "overlaps"), [(88, True), (87, False)])
def test_all_ranks_cut_buffers_if_each_gpu_has_room_for_both_kernels(
    pairs: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch, fewest: int, overlaps: bool
) -> None:
    """24 processors for a kernel of the engine, and 64 for one of NCCL; rank 2 has the fewest."""
    pairs.peers = True
    device = cupy.cuda.Device

    class Device(device):  # type: ignore[misc, valid-type]
        def __init__(self, ordinal: int | None = None) -> None:
            super().__init__(ordinal)
            self.attributes = {"MultiProcessorCount": fewest if self.id == 2 else 132}

    monkeypatch.setattr(cupy.cuda, "Device", Device)

    def task(comm: Communicator, rank: int) -> tuple[int, bool]:
        engine = engine_of(comm)
        return engine.blocks, engine._beside is not None

    monkeypatch.setattr(window_engine, "WIDE_BLOCKS", 24)
    assert outcome(on_every_rank(cupy, PLAN, task, **OPTIONS)) == [(24, overlaps)] * 4


@pytest.mark.sampled
@pytest.mark.parametrize("count", [1, 15, 16, 17, 1000, 70_001])
@pytest.mark.parametrize("slices", [1, 2, 3, 4])
def test_slices_are_aligned_parts_of_every_shard_that_leave_nothing_out(
    monkeypatch: pytest.MonkeyPatch, count: int, slices: int
) -> None:
    """Steps of all kernels, and messages of both sides, have the same elements."""
    monkeypatch.setattr(SlicedClock, "slices", lambda *_, **__: slices)
    plan = forest_plan(4, "allreduce", "binary")
    made = KernelPlan(
        PlanKey(plan.digest, plan), base=0, stride=SLOT_BYTES, blocks=4, domains=(0, 0, 1, 1), overlaps=True
    )
    table = lower(plan, count, chunk_elements=1 << 20)
    sent: Counter[tuple[int, ...]] = Counter()
    for rank in range(4):
        array: np.ndarray = np.zeros(count, dtype=np.float32)
        tables = made.tables(table, RankArrays(rank, (0, count), array, (0, count), array), 4)
        assert [one.slice for one in tables.phases] == list(range(slices)) * made.phases
        for number, phase in enumerate(tables.phases):
            for one in phase.messages:
                ends = (rank, one.peer) if one.sends else (one.peer, rank)
                sent[(number, *ends, one.count)] += 1 if one.sends else -1
        for first in range(0, len(tables.phases), slices):
            rows = [
                (start, stop)
                for phase in tables.phases[first : first + slices]
                for start, stop in {(int(s["start"]), int(s["stop"])) for s in phase.steps}
            ]
            whole = np.zeros(count, dtype=np.int64)
            for start, stop in rows:
                whole[start:stop] += 1
            bounds = table.bounds.tolist()
            for start, stop in pairwise(bounds):
                assert set(whole[start:stop].tolist()) in ({0}, {1}, set())
            assert all((start - max(b for b in bounds if b <= start)) % 16 == 0 for start, _ in rows)
    assert not any(sent.values())
