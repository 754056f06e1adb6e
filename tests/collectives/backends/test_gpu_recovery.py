"""Ranks of the GPU back ends that are left go on when one dies, on GPUs that this processor plays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Queue
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import topoplan
from collectives import Communicator
from collectives.backends.loopback.gpu_loopback import LoopbackGpu
from collectives.backends.nccl import nccl_backend as backend_module
from collectives.backends.nccl.nccl_backend import NcclBackend
from collectives.backends.nccl.nccl_communicators import NcclConnection
from collectives.peers.membership_protocol import MembershipProtocol
from tests.support import fake_nccl
from tests.support.fake_nccl import Comm
from tests.support.fake_streams import Machine
from tests.support.gpu_exchange_checks import check_shrink
from tests.support.gpu_ranks import cupy as cupy
from tests.support.gpu_ranks import floats, on_every_rank, outcome
from tests.support.gpu_ranks import machine as machine
from topoplan.errors import BackendError, TopoplanError, UsageError
from topoplan.plans.plan import Plan

LENGTH = 3001
SMALL = {"region_bytes": 8 << 20, "engine": "windows", "timeout": 40.0}
"""Of the windows engine, whose kernels an interpreter runs."""

RELEASES = {"revoked": (2, 28, 7), "aborted": (2, 27, 3), "older": (2, 26, 5)}
"""What NCCL can do to a communicator on which a rank waits for a dead one."""


class Gone(Exception):
    """A rank of a test has died."""


def plan_for(size: int) -> Plan:
    return topoplan.plan(topoplan.load("dgx-1v"), gpus=range(size))


def backend_of(comm: Communicator) -> Any:
    return comm._open().backend  # type: ignore[attr-defined]


def dies(backend: Any) -> None:
    """What the others see of a process that is killed: its connections end, and it says nothing."""
    backend._closed = True
    backend._guard.close()
    backend._world.end()
    backend.survivors.close()


def bits(plan: Plan, arrays: list[np.ndarray], ranks: tuple[int, ...]) -> bytes:
    """The sum of those ranks by such a plan."""
    with Communicator(plan) as reference:
        found: np.ndarray = reference.all_reduce([arrays[rank] for rank in ranks])[0]
        return found.tobytes()


def recovered(
    machine: Machine, cupy: ModuleType, size: int, left: tuple[int, ...], task: Any, **options: Any
) -> list[Any]:
    """Return the task's result on each rank, plan and sum first; survivors have their plan's bits; all is closed."""
    results = outcome(on_every_rank(cupy, plan_for(size), task, **options))
    for rank in left:
        plan, found = results[rank][:2]
        assert found.tobytes() == bits(plan, floats(size, found.size), left)
    assert settled() == []
    if options.get("engine") == "messages":  # arenas of before are kept
        assert all(one.aborted or one.destroyed for one in comms(machine) if one.device in left)
    return results


def comms(machine: Machine) -> list[Comm]:
    return [one for one in machine.kept if isinstance(one, Comm)]


def settled() -> list[str]:
    """Threads of back ends that have not ended, some time after all are closed."""
    end = time.monotonic() + 5
    while (
        left := [one.name for one in threading.enumerate() if one.name.startswith(("nccl", "surv"))]
    ) and time.monotonic() < end:
        time.sleep(0.01)
    return left


@pytest.fixture(
    params=[
        "revoked",
        pytest.param("aborted", marks=pytest.mark.thorough),
        pytest.param("older", marks=pytest.mark.thorough),
    ]
)
def way(request: pytest.FixtureRequest, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> str:
    """How much NCCL helps: 2.28.7, 2.27.3, or older."""
    monkeypatch.setattr(fake_nccl, "VERSION", RELEASES[request.param])
    return str(request.param)


@pytest.mark.parametrize("alone", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_survivors_have_their_plans_bits(machine: Machine, cupy: ModuleType, way: str, alone: bool) -> None:
    """One dies in front of a collective that is replayed as a graph; a revoked communicator is shrunk."""
    machine.gpus = 4
    arrays = floats(4, LENGTH)

    def task(comm: Communicator, rank: int) -> Any:
        given, out = cupy.asarray(arrays[rank]), cupy.zeros(LENGTH, dtype=np.float32)
        for _ in range(4):
            comm.all_reduce(given, out=out)
        if rank == 2:
            return dies(backend_of(comm))
        if not alone:
            with pytest.raises(BackendError) as raised:
                comm.all_reduce(given, out=out)
            assert raised.value.peer == 2
            assert out.get().tobytes() == bits(comm.plan, arrays, (0, 1, 2, 3))
            comm.shrink()
        found = [comm.all_reduce(given, out=out).get() for _ in range(4)]
        assert (comm.rank, comm.size, comm.epoch) == ((0, 1, None, 2)[rank], 3, 1)
        return comm.plan, found

    results = outcome(
        on_every_rank(cupy, plan_for(4), task, on_failure="shrink" if alone else "raise", engine="messages")
    )
    wanted = bits(results[0][0], arrays, (0, 1, 3))
    for rank in (0, 1, 3):
        assert [one.tobytes() for one in results[rank][1]] == [wanted] * 4
    shrunk = [stay for one in comms(machine) for stay in one.world.shrunk]
    assert set(shrunk) == ({(0, 1, 3)} if way == "revoked" else set())
    assert settled() == []
    assert all(one.aborted or one.destroyed for one in comms(machine) if one.device != 2)


def test_a_live_rank_is_excluded_without_an_error(machine: Machine, cupy: ModuleType, way: str) -> None:
    """NCCL can since 2.27.3; what is left may be one rank, whose collectives are copies."""
    machine.gpus = 3
    arrays = floats(3, LENGTH)

    def task(comm: Communicator, rank: int) -> Any:
        given = cupy.asarray(arrays[rank])
        comm.all_reduce(given)
        if rank == 1:
            return None
        comm.shrink(without=[1])
        found = [comm.all_reduce(given).get()]
        if rank == 2:
            comm.shrink(without=[0])
            found.append(comm.all_reduce(given).get())
        return comm.plan, found

    results = outcome(on_every_rank(cupy, plan_for(3), task))
    wanted = bits(results[0][0], arrays, (0, 2))
    assert [one.tobytes() for one in results[2][1]] == [wanted, arrays[2].tobytes()]
    assert results[0][1][0].tobytes() == wanted
    worlds = {id(one.world): one.world for one in comms(machine)}.values()
    shrunk = sorted(stay for world in worlds for stay in world.shrunk)
    assert shrunk == ([(0, 2), (1,)] if way in ("revoked", "aborted") else [])
    assert settled() == []
    assert all(one.aborted or one.destroyed for one in comms(machine))


@pytest.mark.parametrize("told", [True, False])
def test_ranks_recover_from_the_failure_of_queued_calls(
    machine: Machine, cupy: ModuleType, told: bool
) -> None:
    """Whether they were told before they shrink or not, which raises the failure then."""
    machine.gpus, machine.peers = 3, True
    arrays, queued = floats(3, 24), threading.Barrier(3)

    def task(comm: Communicator, rank: int) -> Any:
        given, out = cupy.asarray(arrays[rank]), cupy.zeros(24, dtype=np.float32)
        for _ in range(2):
            comm.all_reduce(given)
        comm.synchronize()
        queued.wait()
        if rank == 2:
            return dies(backend_of(comm))
        for _ in range(3):
            comm.all_reduce(given, out=out)
        with pytest.raises(BackendError) as raised:
            comm.synchronize() if told else comm.shrink()
        assert raised.value.peer == 2
        assert not out.get().any()
        comm.shrink()
        return comm.plan, comm.all_reduce(given).get()

    recovered(machine, cupy, 3, (0, 1), task, **SMALL)


@pytest.mark.thorough
@pytest.mark.parametrize("windows", [True, False])
def test_kernels_that_wait_for_a_dead_rank_end(machine: Machine, cupy: ModuleType, windows: bool) -> None:
    """Those of before are kept, since a rank that is taken for dead may still write there."""
    machine.gpus, machine.peers, machine.windows = 3, True, (windows, False)
    arrays = floats(3, 24)

    def task(comm: Communicator, rank: int) -> Any:
        given = cupy.asarray(arrays[rank])
        old = comm.empty(24)
        comm.all_reduce(given, out=old)
        if rank == 2:
            # in the middle: the others have agreed on the collective and their kernels run
            backend = backend_of(comm)

            def dies_here(*_: object) -> None:
                dies(backend)
                raise Gone

            backend._start = dies_here
            with pytest.raises(TopoplanError):
                comm.all_reduce(given)
            return None
        found = comm.all_reduce(given).get()
        new = comm.empty(24)
        backend = backend_of(comm)
        assert (backend.writes(old), backend.writes(new)) == (False, True)
        assert comm.all_reduce(given, out=old).get().tobytes() == found.tobytes()
        assert comm.all_reduce(given, out=new).get().tobytes() == found.tobytes()
        return comm.plan, found, comm.engine

    results = recovered(machine, cupy, 3, (0, 1), task, on_failure="shrink", **SMALL)
    for _, _, engine in results[:2]:
        assert engine.startswith(f"windows over {'windows' if windows else 'peer access'}")


@pytest.mark.thorough
@pytest.mark.parametrize("deaf", [False, True])
def test_a_death_within_a_replayed_graph(machine: Machine, cupy: ModuleType, deaf: bool) -> None:
    """Where the graph goes on although its communicator is revoked, that is aborted, and they go on by a new id."""
    machine.gpus, machine.deaf_graphs = 3, deaf
    arrays = floats(3, LENGTH)

    def task(comm: Communicator, rank: int) -> Any:
        given, out = cupy.asarray(arrays[rank]), cupy.zeros(LENGTH, dtype=np.float32)
        for _ in range(4):
            comm.all_reduce(given, out=out)
        backend = backend_of(comm)
        if rank == 2:
            agree = backend._agree

            def dies_behind(*about: Any) -> None:
                agree(*about)
                dies(backend)
                raise Gone

            backend._agree = dies_behind
            with pytest.raises(BackendError):
                comm.all_reduce(given, out=out)
            return None
        before = machine.graph_launches
        with pytest.raises(BackendError) as raised:
            comm.all_reduce(given, out=out)
        assert machine.graph_launches > before
        assert (raised.value.rank, raised.value.peer) == (rank, 2)
        comm.shrink()
        assert (comm.epoch, backend_of(comm)._connection.shrunk) == (1, not deaf)
        return comm.plan, comm.all_reduce(given, out=out).get()

    recovered(machine, cupy, 3, (0, 1), task, engine="messages")


@pytest.mark.thorough
def test_one_that_is_left_out_closes_its_arena_without_the_others(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus, machine.peers = 3, True
    arrays = floats(3, 24)

    def task(comm: Communicator, rank: int) -> Any:
        given = cupy.asarray(arrays[rank])
        comm.all_reduce(given)
        if rank != 1:
            comm.shrink(without=[1])
        found = comm.all_reduce(given).get() if rank != 1 else None
        comm.close()
        return comm.plan, found

    recovered(machine, cupy, 3, (0, 2), task, **SMALL)


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["at the first text", "in NCCL", "as the engine is opened"])
def test_another_rank_that_dies_meanwhile_is_left_out_too(
    machine: Machine, cupy: ModuleType, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was begun of the old communicator is aborted, and the next attempt is by a new id."""
    machine.gpus = 4
    arrays = floats(4, LENGTH)
    doomed: list[Any] = []

    def dying(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *given: Any, **options: Any) -> Any:
            world = getattr(self, "_world", None)
            if doomed and (self is doomed[0].survivors or getattr(world, "mine", False)):
                dies_with(doomed[0], world)
                raise Gone
            return method(self, *given, **options)

        return call

    def dies_with(old: Any, world: Any) -> None:
        if world is not None:
            world.end()
        old.survivors.close()

    if where == "at the first text":
        monkeypatch.setattr(MembershipProtocol, "gather", dying(MembershipProtocol.gather))
    elif where == "in NCCL":
        monkeypatch.setattr(NcclConnection, "join", dying(NcclConnection.join))
    else:
        monkeypatch.setattr(NcclBackend, "_open_engine", dying(NcclBackend._open_engine))
    meet = NcclBackend.__init__

    def made(self: Any, cupy: ModuleType, world: Any, **options: Any) -> None:
        world.mine = bool(doomed) and options.get("survivors") is doomed[0].survivors
        meet(self, cupy, world, **options)

    monkeypatch.setattr(NcclBackend, "__init__", made)

    def task(comm: Communicator, rank: int) -> Any:
        given = cupy.asarray(arrays[rank])
        comm.all_reduce(given)
        if rank == 3:
            return dies(backend_of(comm))
        if rank == 1:
            doomed.append(backend_of(comm))
            with pytest.raises((Gone, TopoplanError)):
                comm.all_reduce(given)
            return None
        found = comm.all_reduce(given).get()
        return comm.plan, found, comm.size, comm.epoch

    results = recovered(machine, cupy, 4, (0, 2), task, on_failure="shrink", engine="messages")
    assert [results[rank][2:] for rank in (0, 2)] == [(2, 2)] * 2


def test_survivors_exclude_a_rank_whose_gpu_fails(machine: Machine, cupy: ModuleType) -> None:
    """No later call of CUDA's mends it, so this process takes no part any more."""
    machine.gpus = 3
    arrays = floats(3, LENGTH)

    def task(comm: Communicator, rank: int) -> Any:
        given = cupy.asarray(arrays[rank])
        comm.all_reduce(given)
        if rank == 1:
            broken = cupy.cuda.Stream(non_blocking=True)
            broken.do(lambda: machine.faults.update({1: 700}))
            with broken, pytest.raises(BackendError, match=r"the GPU failed.*700"):
                comm.all_reduce(given)
            with pytest.raises(BackendError, match="cannot continue"):
                comm.shrink()
            return None
        found = comm.all_reduce(given).get()
        return comm.plan, found, comm.notes

    for told in recovered(machine, cupy, 3, (0, 2), task, on_failure="shrink", engine="messages")[::2]:
        assert told[2][0].startswith("epoch 1: without rank 1: 2 ranks (gpu0 gpu2)")


def test_a_repeated_collective_waits_for_the_callers_stream(machine: Machine, cupy: ModuleType) -> None:
    """The gradients come late: after the rank has died, and after the others have gone on."""
    machine.gpus = 3
    arrays = floats(3, LENGTH)
    told = threading.Event()

    def task(comm: Communicator, rank: int) -> Any:
        given = cupy.asarray(np.zeros(LENGTH, np.float32))
        comm.all_reduce(given)
        if rank == 2:
            return dies(backend_of(comm))
        late = cupy.cuda.Stream(non_blocking=True)
        late.wait_event(recorded(cupy))

        def fill() -> bool:
            if told.is_set():
                given.host[:] = arrays[rank]
            return told.is_set()

        late.do(fill)
        with late:
            handle = comm.all_reduce(given, async_op=True)
        while comm.epoch == 0:
            time.sleep(0.01)
        time.sleep(0.3)
        told.set()
        found = handle.wait().get()
        return comm.plan, found, handle.repeated, handle.without

    results = recovered(machine, cupy, 3, (0, 1), task, on_failure="shrink", engine="messages")
    assert [told[2:] for told in results[:2]] == [(True, (2,))] * 2


def recorded(cupy: ModuleType) -> Any:
    event = cupy.cuda.Event(disable_timing=True)
    event.record()
    return event


@pytest.mark.thorough
def test_a_graph_of_before_ends_at_once_and_writes_nothing(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus, machine.peers = 2, True
    arrays = floats(2, 24)

    def task(comm: Communicator, rank: int) -> Any:
        given, out = cupy.asarray(arrays[rank]), cupy.zeros(24, dtype=np.float32)
        comm.all_reduce(given, op="avg")
        stream = cupy.cuda.Stream(non_blocking=True)
        stream.wait_event(recorded(cupy))
        with stream:
            stream.begin_capture()
            comm.all_reduce(given, op="avg", out=out)
            graph = stream.end_capture()
        if rank == 1:
            return dies(backend_of(comm))
        with pytest.raises(BackendError):
            comm.all_reduce(given)
        comm.shrink()
        comm.all_reduce(given)
        graph.launch(stream)
        stream.synchronize()
        return out.get()

    results = outcome(on_every_rank(cupy, plan_for(2), task, **SMALL))
    assert not results[0].any()


def test_a_collective_that_would_be_repeated_is_not_captured(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus, machine.peers = 2, True
    arrays = floats(2, 24)

    def task(comm: Communicator, rank: int) -> None:
        given, out = cupy.asarray(arrays[rank]), cupy.zeros(24, dtype=np.float32)
        comm.all_reduce(given)
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            try:
                comm.all_reduce(given, out=out)
            finally:
                stream.end_capture()

    for error in on_every_rank(cupy, plan_for(2), task, on_failure="shrink", **SMALL):
        assert isinstance(error, UsageError)
        assert 'capture it with a communicator that has on_failure="raise"' in str(error)


@pytest.mark.thorough
def test_where_nobody_has_gone_all_go_on_by_a_new_id(machine: Machine, cupy: ModuleType) -> None:
    """A rank's arguments were refused; NCCL shrinks no communicator to all of its ranks."""
    machine.gpus = 2
    arrays = floats(2, LENGTH)

    def task(comm: Communicator, rank: int) -> Any:
        given = cupy.asarray(arrays[rank])
        with pytest.raises(BackendError, match="count"):
            comm.all_reduce(given[: LENGTH - rank])
        comm.shrink()
        return comm.all_reduce(given).get(), comm.notes

    results = outcome(on_every_rank(cupy, plan_for(2), task))
    for found, notes in results:
        assert found.tobytes() == bits(plan_for(2), arrays, (0, 1))
        assert notes == ("epoch 1: all ranks continue",)
    assert all(not one.world.shrunk for one in comms(machine))
    assert settled() == []


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["messages", "windows"])
def test_a_newcomer_takes_the_place_of_the_dead_by_a_new_id(
    machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """It has no communicator to shrink. Arenas are given back where all that know them are there."""
    machine.gpus, machine.peers = 3, engine == "windows"
    arrays = floats(3, 24)
    invitations: Queue[str] = Queue()
    found: list[Any] = []

    def come() -> None:
        invitation = invitations.get(timeout=60)
        monkeypatch.setenv("LOCAL_RANK", "1")
        with Communicator.join(invitation, wait=60) as comm:
            found.append(summed(comm))

    def summed(comm: Communicator) -> Any:
        with cupy.cuda.Device(comm.rank):
            given = cupy.asarray(arrays[comm.rank])
            sums = [comm.all_reduce(given).get() for _ in range(4)]
        # what is left behind: of the first three the arenas of all, while there was a dead one
        return comm.plan, sums, comm.engine, backend_of(comm)._connection.shrunk, len(machine.memory)

    def task(comm: Communicator, rank: int) -> Any:
        comm.all_reduce(cupy.asarray(arrays[rank]))
        if rank == 1:
            return dies(backend_of(comm))
        two = comm.all_reduce(cupy.asarray(arrays[rank])).get()
        assert backend_of(comm)._connection.shrunk
        if rank == 0:
            invitations.put(comm.join_token)
        while not (joined := comm.grow()):
            time.sleep(0.01)
        assert joined == (1,)
        return two, *summed(comm)

    newcomer = threading.Thread(target=come)
    newcomer.start()
    settings = {**SMALL, "engine": engine}
    results = outcome(on_every_rank(cupy, plan_for(3), task, on_failure="shrink", **settings))
    newcomer.join(60)
    for plan, sums, about, shrunk, arenas in [results[0][1:], results[2][1:], *found]:
        assert plan.digest == plan_for(3).digest
        assert [one.tobytes() for one in sums] == [bits(plan, arrays, (0, 1, 2))] * 4
        assert about.startswith(engine)
        assert not shrunk
        assert arenas == (6 if engine == "windows" else 0)
    assert results[0][0].tobytes() == results[2][0].tobytes()
    assert len(found) == 1
    assert settled() == []


@pytest.mark.thorough
def test_a_newcomer_without_nccl(machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.gpus = 3
    arrays = floats(3, LENGTH)
    invitations: Queue[str] = Queue()
    told: list[str] = []
    prepare = backend_module.prepare_library

    def prepared(*about: Any, **settings: Any) -> Any:
        if threading.current_thread() is newcomer:
            raise UsageError("nccl4py is missing")
        return prepare(*about, **settings)

    monkeypatch.setattr(backend_module, "prepare_library", prepared)

    def come() -> None:
        with pytest.raises(UsageError) as refused:
            Communicator.join(invitations.get(timeout=60))
        told.append(str(refused.value))

    def task(comm: Communicator, rank: int) -> Any:
        if rank == 2:
            return None
        comm.shrink(without=[2])
        if rank == 0:
            invitations.put(comm.join_token)
        started = time.monotonic()
        while comm.epoch < 2:
            assert comm.grow() == ()
            assert time.monotonic() < started + 20
        return comm.plan, comm.all_reduce(cupy.asarray(arrays[rank])).get()

    newcomer = threading.Thread(target=come)
    newcomer.start()
    results = outcome(on_every_rank(cupy, plan_for(3), task, engine="messages", timeout=30.0))
    newcomer.join(60)
    for plan, found in results[:2]:
        assert found.tobytes() == bits(plan, arrays, (0, 1))
    assert told == ["nccl4py is missing"]
    assert settled() == []


def test_loopback_gpu_goes_on_without_ranks_as_loopback_does(machine: Machine, cupy: ModuleType) -> None:
    check_shrink(cupy, LENGTH)


def test_parts_of_loopback_gpu_have_its_gpu(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus = 2
    backend = LoopbackGpu(cupy, 3, device=1)
    parts = [(one.size, one.arrays.device) for one in backend.split([[0, 2], [1]])]  # type: ignore[attr-defined]
    assert parts == [(2, 1), (1, 1)]
