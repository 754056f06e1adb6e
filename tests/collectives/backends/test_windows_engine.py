"""The windows engine of the nccl back end on GPUs that this processor plays: who has it, its results, its failures."""

from __future__ import annotations

import re
import threading
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import topoplan
from collectives import Communicator
from collectives.backends.nccl import device_arenas
from collectives.backends.nccl.agreed_setup import AgreedStepFailed, AgreedSteps
from tests.support.fake_streams import Machine
from tests.support.gpu_ranks import check_bits, cupy, floats, machine, on_every_rank, outcome
from tests.support.hand_plans import forest_plan
from topoplan.errors import BackendError, UsageError

__all__ = ["cupy", "machine"]

REGION = 8 << 20
"""Bytes: what these plans need, so that memory is quickly made."""


LONG = 4200
"""Elements of float32 that are no small collective any more; each takes an interpreter many instructions."""


def about(comm: Communicator, rank: int) -> str:
    """What a rank says of its engine."""
    found: str = comm._open().backend.about_engine
    return found


def run(cupy: ModuleType, size: int, task: Any, collective: str = "allreduce", **options: Any) -> list[Any]:
    plan = forest_plan(size, collective, "binary")
    return on_every_rank(cupy, plan, task, region_bytes=REGION, **options)


@pytest.mark.parametrize(
    ("windows", "peers", "kind"),
    [
        ((True, False), False, "windows over windows (no multicast address"),
        ((True, True), False, "windows over windows and multicast"),
        (
            (False, False),
            True,
            "windows over peer access (no windows: rank 0: NCCL has no windows among these",
        ),
        ((False, False), False, "messages: no windows: rank 0: NCCL has no windows"),
    ],
)
def test_all_ranks_take_the_best_that_all_have_and_say_why_it_is_no_better(
    machine: Machine, cupy: ModuleType, windows: tuple[bool, bool], peers: bool, kind: str
) -> None:
    machine.gpus, machine.windows, machine.peers = 3, windows, peers
    said = outcome(run(cupy, 3, about))
    assert len(set(said)) == 1
    assert said[0].startswith(kind)
    if kind.startswith("messages"):
        assert "GPU 0 has no peer access to GPU 1 of rank 1" in said[0]
    assert not machine.memory or not peers


def test_a_collective_is_one_launch(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus, machine.peers = 4, True
    check_bits(cupy, "reduce", 24, calls=3, region_bytes=REGION, chunk_bytes=1 << 20, timeout=40.0)
    # three calls and one empty run on each rank, behind the two runs that try the peers
    assert machine.launches == 4 * (4 + 2)
    assert machine.graph_launches == 0


@pytest.mark.parametrize(
    "collective",
    [
        pytest.param("allreduce", marks=pytest.mark.thorough),
        "broadcast",
        pytest.param("allgather", marks=pytest.mark.thorough),
    ],
)
def test_results_in_arrays_of_empty_are_written_by_the_rank_that_has_them_first(
    machine: Machine, cupy: ModuleType, collective: str
) -> None:
    machine.gpus, machine.peers = 3, True
    arrays = floats(3, LONG)
    plan = forest_plan(3, collective, "binary")

    def call(comm: Communicator, given: Any, out: Any = None) -> Any:
        if collective == "broadcast":
            return comm.broadcast(given, root=plan.root, out=out)
        return (comm.all_gather if collective == "allgather" else comm.all_reduce)(given, out=out)

    def task(comm: Communicator, rank: int) -> Any:
        backend: Any = comm._open().backend
        shape = 3 * LONG if collective == "allgather" else LONG
        given, out = comm.empty(LONG), comm.empty(shape)
        given[:] = cupy.asarray(arrays[rank])
        assert call(comm, given, out) is out
        kinds = [layout[-1] for layout in backend._engine._programs]
        found = [out.get()]
        if rank == 1:
            out = comm.empty(1)  # from here on its arrays lie elsewhere
        other = comm.empty(shape)
        found.append(call(comm, given, other).get())
        if collective != "allgather":
            found.append(call(comm, given, given).get())  # in place
        return kinds, found

    found = outcome(run(cupy, 3, task, collective, chunk_bytes=1 << 20, timeout=40.0))
    with Communicator(plan, "loopback") as comm:
        wanted = call(comm, arrays)
    for rank, (kinds, results) in enumerate(found):
        assert kinds == [False, True]
        for one in results:
            assert one.tobytes() == np.asarray(wanted[rank]).tobytes()


@pytest.mark.parametrize("length", [24, pytest.param(LONG, marks=pytest.mark.thorough)])
def test_a_collective_is_captured_in_a_graph_of_the_caller_and_replayed_on_new_data(
    machine: Machine, cupy: ModuleType, length: int
) -> None:
    machine.gpus, machine.peers = 2, True
    arrays = floats(2, length)
    together = threading.Barrier(2)

    def task(comm: Communicator, rank: int) -> Any:
        given, out = cupy.asarray(arrays[rank]), cupy.zeros(length, dtype=np.float32)
        refused = []
        comm.all_reduce(given, op="avg")
        stream = cupy.cuda.Stream(non_blocking=True)
        stream.wait_event(recorded(cupy))
        with stream:
            stream.begin_capture()
            assert comm.all_reduce(given, op="avg", out=out) is out
            graph = stream.end_capture()
        found = []
        for factor in (1, 2):
            given[:] = cupy.asarray(arrays[rank] * factor)
            stream.wait_event(recorded(cupy))
            together.wait()
            graph.launch(stream)
            stream.synchronize()
            found.append(out.get())
        found.append(comm.all_reduce(given, op="avg").get())
        with stream:
            stream.begin_capture()
            try:
                comm.all_gather(given)
            except UsageError as error:
                refused.append(str(error))
        return found, refused

    found = outcome(run(cupy, 2, task, timeout=40.0))
    with Communicator(forest_plan(2, "allreduce", "binary")) as comm:
        wanted = [comm.all_reduce([one * factor for one in arrays], op="avg")[0] for factor in (1, 2, 2)]
    for results, refused in found:
        assert [one.tobytes() for one in results] == [one.tobytes() for one in wanted]
        assert "a graph can capture an allreduce, reduce or reduce_scatter" in refused[0]


def recorded(cupy: Any) -> Any:
    """An event behind what the current stream was told."""
    event = cupy.cuda.Event(disable_timing=True)
    event.record()
    return event


def test_an_engine_that_cannot_be_had_is_refused_in_one_line_alike(
    machine: Machine, cupy: ModuleType
) -> None:
    machine.gpus = 2
    found = run(cupy, 2, about, engine="windows")
    assert [type(one) for one in found] == [UsageError] * 2
    assert len({str(one) for one in found}) == 1
    assert "cannot be had: no windows: rank 0: NCCL has no windows" in str(found[0])
    machine.peers, machine.room = True, 1 << 20
    found = run(cupy, 2, about, engine="windows")
    assert len({str(one) for one in found}) == 1
    assert "free on its GPU, and a region takes" in str(found[0])
    found = run(cupy, 2, about, engine="threads")
    assert "the engine 'threads' is unknown; use auto, windows or messages" in str(found[0])


@pytest.mark.parametrize("far", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_an_address_that_leads_elsewhere_is_noticed_before_it_is_used(
    machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch, far: int
) -> None:
    """Copies through the host may get through where stores of a kernel do not: rank 1's stores to one rank are lost."""
    machine.gpus, machine.peers = 3, True
    genuine = device_arenas._CudaArenas._reach

    def elsewhere(mapped: Any, given: Any) -> list[int]:
        seen = genuine(mapped, given)
        if machine.device == 1:
            seen[far] = machine.allocate(1 << 10)
        return seen

    monkeypatch.setattr(device_arenas._CudaArenas, "_reach", elsewhere)
    monkeypatch.setattr(device_arenas, "TRIAL_SECONDS", 0.5)
    said = outcome(run(cupy, 3, about))
    assert len(set(said)) == 1
    assert said[0].endswith(
        f"; and rank {far}: its GPU sees no flag from the GPU of rank 1, whose stores it should see"
    )
    assert len(machine.memory) == 1  # what rank 1 has beside its arena


def test_a_rank_that_fails_ends_the_kernels_that_wait_for_it(
    machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.gpus, machine.peers = 3, True
    genuine = device_arenas._PeerTrial._run

    def fails(trial: Any, flags: Any, seconds: float) -> None:
        if machine.device == 1:
            raise UsageError("cannot launch")
        genuine(trial, flags, seconds)

    monkeypatch.setattr(device_arenas._PeerTrial, "_run", fails)
    said = outcome(run(cupy, 3, about))
    assert set(said) == {said[0]}
    assert said[0].endswith("; and rank 1: cannot launch")
    assert machine.memory == {}  # no kernel may write there any more


def test_ranks_that_want_different_engines_are_told_so(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus, machine.peers = 2, True
    found = run(cupy, 2, about, engine=["messages", "auto"])
    assert [type(one) for one in found] == [UsageError] * 2
    assert re.search("got 'auto' .* on rank 1 and 'messages'", str(found[0]))
    plan = forest_plan(2, "allreduce", "binary")
    found = on_every_rank(cupy, plan, about, region_bytes=[1 << 20, 1 << 21])
    assert re.search("got 'auto' and 2097152 bytes for it on rank 1 and 'auto' and", str(found[1]))
    found = on_every_rank(cupy, plan, about, region_bytes=1000)
    assert "must be a multiple of 512" in str(found[0])


def test_messages_are_used_where_they_are_asked_for_or_a_plan_has_no_room(
    machine: Machine, cupy: ModuleType
) -> None:
    machine.gpus, machine.peers = 2, True
    assert outcome(run(cupy, 2, about, engine="messages")) == ["messages"] * 2
    arrays = floats(2, LONG)

    def task(comm: Communicator, rank: int) -> Any:
        return comm.all_reduce(cupy.asarray(arrays[rank])).get()

    plan = forest_plan(2, "allreduce", "binary")
    found = outcome(on_every_rank(cupy, plan, task, region_bytes=1 << 18))
    refused = on_every_rank(cupy, plan, task, region_bytes=1 << 18, engine="windows")
    assert all("too large for a region of 256KB" in str(one) for one in refused)
    assert all(np.array_equal(one, arrays[0] + arrays[1]) for one in found)
    outcome(
        on_every_rank(cupy, plan, task, region_bytes=1 << 16)
    )  # no room for the inbox of small ones either
    assert not any(name.startswith("forest") for name in machine.compiled)


@pytest.mark.parametrize("length", [24, pytest.param(LONG, marks=pytest.mark.thorough)])
def test_when_a_rank_does_not_come_the_others_end_and_name_it(
    machine: Machine, cupy: ModuleType, length: int
) -> None:
    """Its own agreement fails first; so one is made to end between that and its kernel."""
    machine.gpus, machine.peers = 3, True
    arrays = floats(3, length)

    def task(comm: Communicator, rank: int) -> Any:
        comm.all_reduce(cupy.asarray(arrays[rank]))
        backend: Any = comm._open().backend
        if rank == 1:
            backend._engine.queue = lambda *_: (_ for _ in ()).throw(RuntimeError("the GPU fell off the bus"))
        comm.all_reduce(cupy.asarray(arrays[rank]))

    found = run(cupy, 3, task, timeout=15.0)
    assert all(isinstance(one, BackendError) for one in found)
    assert all(one.rank == 1 and "fell off the bus" in str(one) for one in found)


@pytest.mark.thorough
def test_a_kernel_that_the_host_has_forgotten_ends_by_itself(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus, machine.peers = 2, True
    arrays = floats(2, LONG)
    gone = threading.Event()

    def task(comm: Communicator, rank: int) -> Any:
        comm.all_reduce(cupy.asarray(arrays[rank]))
        backend: Any = comm._open().backend
        if rank == 1:
            backend._engine.queue = lambda *_: None
        else:
            backend._guard.watch = lambda *_: __import__("contextlib").nullcontext()
        try:
            comm.all_reduce(cupy.asarray(arrays[rank]))
        finally:
            gone.set()

    found = run(cupy, 2, task, timeout=4.0)
    assert isinstance(found[0], BackendError)
    assert "the kernel waited 8 s for rank 1" in str(found[0])


def test_steps_fail_on_all_ranks_alike() -> None:
    class Alone:
        def texts(self, text: str, *, timeout: float) -> list[str]:
            return [text, '{"failed": "no room"}'] if "given" in text else [text, "{}"]

    steps = AgreedSteps(Alone(), timeout=5.0)  # type: ignore[arg-type]
    with pytest.raises(AgreedStepFailed, match="rank 1: no room"):
        steps.take(lambda: 7)


def test_groups_of_a_mesh_have_communicators_and_regions_of_their_own(
    machine: Machine, cupy: ModuleType
) -> None:
    machine.gpus, machine.peers = 4, True
    mesh = topoplan.plan_mesh(topoplan.load("dgx-1v"), {"dp": 2, "tp": 2}, gpus=[0, 1, 2, 3])

    def task(comm: Communicator, rank: int) -> Any:
        with comm.split(mesh, "dp") as group:
            assert about(group, rank).startswith("windows over peer access")
            return group.all_reduce(cupy.asarray(np.full(5, rank + 1.0))).get().tolist()

    assert outcome(run(cupy, 4, task, timeout=40.0)) == [[4.0] * 5, [6.0] * 5] * 2
