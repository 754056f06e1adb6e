"""What the GPU back ends refuse, and how they end when a rank, a GPU or NCCL fails."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from collectives import Communicator
from collectives.backends.mpi import mpi_backend
from collectives.backends.nccl.nccl_backend import NcclBackend, use_local_gpu
from collectives.peers.control_plane import Signature
from collectives.peers.rendezvous import Rendezvous
from collectives.peers.tcp_control_plane import TcpControlPlane
from tests.jobs import nccl_rank
from tests.support import fake_nccl
from tests.support.fake_processes import customized
from tests.support.fake_streams import Machine
from tests.support.gpu_ranks import SECONDS, floats, on_every_rank, outcome
from tests.support.gpu_ranks import cupy as cupy
from tests.support.gpu_ranks import machine as machine
from tests.support.hand_plans import forest_plan
from tests.support.job_meeting import Meeting, as_threads
from tests.support.ports import free_port
from topoplan.errors import BackendError, UsageError

# Seconds that a rank waits for one that stands still: also the longest that a busy machine may hold up a thread.
WAITED = 3.0


@pytest.mark.thorough
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
    return type(line)(None, host=line.host[1:].view(np.float32), device=0)


def ones(cupy: ModuleType, count: int = 4) -> Any:
    return cupy.asarray(np.ones(count, np.float32))


@contextlib.contextmanager
def stuck(cupy: ModuleType) -> Iterator[None]:
    """Make a stream current whose queue never moves on."""
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.do(lambda: False)
    with stream:
        yield


def test_refuses_different_settings_before_anything_moves(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus = 3
    plan, steps = forest_plan(3, "allreduce", "star"), [1000, 1001, 1001]
    results = on_every_rank(cupy, plan, lambda comm, rank: comm.all_reduce(ones(cupy)), step_bytes=steps)
    assert all("settings" in str(error) and "same on all ranks" in str(error) for error in results)
    assert machine.launches == 0


@pytest.mark.thorough
def test_a_rank_that_stays_away_is_named_by_all_others(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus = 4
    release = threading.Event()

    def task(comm: Communicator, rank: int) -> None:
        if rank == 2:
            release.wait(10)
            return
        try:
            comm.all_reduce(ones(cupy))
        finally:
            release.set()

    results = on_every_rank(cupy, forest_plan(4, "allreduce", "chain"), task, timeout=WAITED)
    for rank in (0, 1, 3):
        assert isinstance(results[rank], BackendError)
        assert results[rank].peer == 2
        assert "which has not called this collective" in str(results[rank])


@pytest.mark.thorough
def test_a_hanging_gpu_ends_the_collective_on_all_ranks(machine: Machine, cupy: ModuleType) -> None:
    """Rank 3's stream hangs in front of its messages; results stay what they were."""
    machine.gpus = 4
    outs: list[Any] = [None] * 4

    def task(comm: Communicator, rank: int) -> Any:
        given, outs[rank] = ones(cupy, 600), cupy.zeros(600, dtype=np.float32)
        comm.all_reduce(given)
        with stuck(cupy) if rank == 3 else contextlib.nullcontext():
            return comm.all_reduce(given, out=outs[rank])

    plan = forest_plan(4, "allreduce", "chain")
    results = on_every_rank(cupy, plan, task, timeout=WAITED, step_bytes=300)
    assert all(isinstance(result, BackendError) for result in results), results
    assert len({str(result) for result in results}) == 1
    assert results[0].step is not None
    assert results[0].peer is not None
    assert f"waited {WAITED:g} s for rank" in str(results[0])
    with machine.lock:
        for stream in machine.streams:
            stream.queue.clear()
    assert not any(out.get().any() for out in outs)


@pytest.mark.parametrize(
    "state", ["remote process gone", pytest.param("NCCL_ERROR_TIMEOUT", marks=pytest.mark.thorough)]
)
def test_an_nccl_error_ends_later_calls_too(machine: Machine, cupy: ModuleType, state: str) -> None:
    machine.gpus = 2

    def task(comm: Communicator, rank: int) -> Any:
        if rank == 0:
            threading.Timer(0.3, lambda: setattr(machine, "async_error", state)).start()
        with stuck(cupy), pytest.raises(BackendError, match=f"NCCL reports .*{state}"):
            comm.all_reduce(ones(cupy))
        return comm.all_reduce(ones(cupy))

    results = on_every_rank(cupy, forest_plan(2, "allreduce", "star"), task)
    assert all("failed in an earlier collective" in str(result) for result in results), results


@pytest.mark.thorough
def test_control_messages_between_collectives_are_agreed(machine: Machine, cupy: ModuleType) -> None:
    """A text of any length; ranks that do different things, or mean different collectives, are named."""
    machine.gpus = 3
    plan = forest_plan(3, "allreduce", "star")

    def signed(comm: Communicator, count: int) -> Any:
        backend: Any = comm._open().backend  # type: ignore[attr-defined]
        backend.agree(Signature(0, "12ab", 3, "allreduce", None, "sum", "float32", count, 9))
        return backend

    def task(comm: Communicator, rank: int) -> Any:
        backend = signed(comm, 9)
        found = [backend.gather_texts(f"rank {rank}"), backend.gather_texts("long" * 5000 * rank)]
        assert backend.largest(rank / 2) == 1.0
        other = (lambda: backend.gather_texts("here")) if rank == 1 else (lambda: backend.largest(1.0))
        with pytest.raises(BackendError) as wrong:
            other()
        return [*found, str(wrong.value)]

    for short, long, wrong in outcome(on_every_rank(cupy, plan, task)):
        assert short == ["rank 0", "rank 1", "rank 2"]
        assert [len(text) for text in long] == [0, 20000, 40000]
        assert "do different things; make the same calls on all ranks" in wrong
    errors = on_every_rank(cupy, plan, lambda comm, rank: signed(comm, 9 + (rank == 2)))
    assert all(isinstance(error, BackendError) and "count " in str(error) for error in errors)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "what", ["refuses", "dies", "closes", pytest.param("hangs", marks=pytest.mark.thorough)]
)
def test_calls_after_a_replayed_graph_end_at_once(machine: Machine, cupy: ModuleType, what: str) -> None:
    """NCCL frees a communicator only when its graphs are gone."""
    machine.gpus = 3
    before = set(threading.enumerate())

    def task(comm: Communicator, rank: int) -> Any:
        given, out = ones(cupy, 600), cupy.zeros(600, dtype=np.float32)
        for _ in range(4):
            comm.all_reduce(given, out=out)
        if what == "closes":
            return comm.close()
        if rank == 1 and what == "dies":
            raise RuntimeError("this rank dies")
        with stuck(cupy) if rank == 1 and what == "hangs" else contextlib.nullcontext():
            wrong = rank == 1 and what == "refuses"
            return comm.all_reduce(np.zeros(600, np.float32) if wrong else given, out=out)

    plan = forest_plan(3, "allreduce", "star")
    results = on_every_rank(cupy, plan, task, timeout=WAITED if what == "hangs" else SECONDS)
    assert machine.graph_launches > 0, results
    others = [results[0], results[2]]
    if what == "refuses":
        assert isinstance(results[1], UsageError)
        assert all("refused the collective: rank 1 has a ndarray" in str(result) for result in others)
    elif what == "dies":
        assert all(isinstance(result, BackendError) and result.peer == 1 for result in others)
    elif what == "hangs":
        assert all(f"waited {WAITED:g} s for rank" in str(result) for result in others), results
    else:
        assert results == [None] * 3
    left = set(threading.enumerate()) - before
    assert what == "hangs" or not any(one.name.startswith("nccl") for one in left)


@pytest.mark.thorough
def test_an_error_of_the_gpu_is_told_by_the_rank_that_met_it(machine: Machine, cupy: ModuleType) -> None:
    """CuPy's events are never done after an illegal address, and so nobody would say which rank it was."""
    machine.gpus = 3

    def task(comm: Communicator, rank: int) -> Any:
        broken = cupy.cuda.Stream(non_blocking=True)
        if rank == 1:
            broken.do(lambda: setattr(machine, "fault", 700))
        with broken:
            return comm.all_reduce(ones(cupy))

    results = on_every_rank(cupy, forest_plan(3, "allreduce", "chain"), task, timeout=30.0)
    assert all(isinstance(result, BackendError) for result in results)
    assert any("the GPU failed: CUDARuntimeError('cudaError 700')" in str(result) for result in results)


@pytest.mark.thorough
def test_communicators_are_not_aborted_beside_a_running_call(machine: Machine, cupy: ModuleType) -> None:
    """Rank 2 comes to its first message after the others have given up, so they cannot connect to it."""
    machine.gpus = 3
    gave_up = threading.Barrier(3)

    def task(comm: Communicator, rank: int) -> Any:
        if rank == 2:
            streams: Any = comm._open().backend._streams  # type: ignore[attr-defined]
            run = streams.run
            streams.run = lambda *arguments: (gave_up.wait(60), run(*arguments))
        try:
            return comm.all_reduce(ones(cupy))
        finally:
            if rank != 2:
                gave_up.wait(60)

    results = on_every_rank(cupy, forest_plan(3, "allreduce", "star", root=2), task, timeout=WAITED)
    assert all(isinstance(result, BackendError) for result in results), results
    assert not any("beside" in misuse for misuse in machine.misuses)


# ---- how a process finds its place


def from_environments(
    machine: Machine, ranks: int, task: Callable[[Communicator, NcclBackend, int], Any], **place: str
) -> list[Any]:
    """What the task returns or raises on each rank, each a thread that a launcher gave its place."""

    def be(rank: int) -> Any:
        told = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "TOPOPLAN_RENDEZVOUS": meeting.address}
        mine = {name: value.format(rank=rank, next=rank + 1) for name, value in place.items()}
        backend = NcclBackend.from_environment(
            environment={**told, **mine}, timeout=20.0, region_bytes=8 << 20
        )
        with Communicator(forest_plan(ranks, "allreduce", "binary"), backend, timeout=20.0) as comm:
            return task(comm, backend, rank)

    with Rendezvous("127.0.0.1:0", ranks) as meeting:
        return as_threads(ranks, be)


def test_a_launcher_gives_each_rank_a_gpu(
    machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks on one of two GPUs, as LOCAL_RANK says; NCCL is told how many are on a GPU."""
    machine.gpus = 2
    for name in ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MAX_CTAS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    found = from_environments(
        machine,
        2,
        lambda comm, backend, rank: (backend.rank, backend.size, backend.arrays.device),
        LOCAL_RANK="3",
    )
    assert found == [(0, 2, 1), (1, 2, 1)]
    assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert os.environ["NCCL_MAX_CTAS"] == "4"


def test_ranks_that_see_one_gpu_each(
    machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a GPU for each task, or a container for each rank: all call theirs 0, and the host has many ranks."""
    for name in ("NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_MAX_CTAS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(fake_nccl, "VERSION", (2, 29, 7))
    busses = iter(range(4))

    def bus(device: int) -> str:
        if not hasattr(machine.here, "bus"):
            machine.here.bus = next(busses)
        return f"0000:{machine.here.bus:02x}:00.0"

    cupy.cuda.runtime.deviceGetPCIBusId = bus
    found = from_environments(
        machine,
        4,
        lambda comm, backend, rank: backend.arrays.device,
        LOCAL_RANK="{rank}",
        LOCAL_WORLD_SIZE="4",
    )
    assert found == [0] * 4
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ


@pytest.mark.parametrize("peers", [pytest.param(True, marks=pytest.mark.thorough), False])
def test_no_rank_makes_a_context_on_gpu_0(machine: Machine, cupy: ModuleType, peers: bool) -> None:
    """GPU 0 is another process's alone (EXCLUSIVE_PROCESS), and the ranks are on GPUs 1 and 2."""
    machine.gpus, machine.peers, machine.exclusive = 3, peers, {0}
    arrays = floats(2, 5000)

    def task(comm: Communicator, backend: NcclBackend, rank: int) -> Any:
        found = [comm.all_reduce(cupy.asarray(arrays[rank])).get() for _ in range(3)]
        later = comm.all_reduce(cupy.asarray(arrays[rank]), async_op=True).wait()
        return backend.arrays.device, [one.tobytes() for one in (*found, later.get())]

    found = from_environments(machine, 2, task, LOCAL_RANK="{next}")
    with Communicator(forest_plan(2, "allreduce", "binary")) as reference:
        wanted = reference.all_reduce(arrays)[0].tobytes()
    assert found == [(rank + 1, [wanted] * 4) for rank in range(2)]
    assert machine.contexts == {1, 2}


@pytest.mark.thorough
@pytest.mark.parametrize("exclusive", [False, True])
def test_ranks_of_mpiexec_meet_by_mpi_or_all_raise(
    machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch, exclusive: bool
) -> None:
    """MPI would wait without end for a rank that has no GPU, and at the end for a dead one: so none recovers."""
    machine.gpus, machine.exclusive = 2, {1} if exclusive else set()
    here, meeting = threading.local(), Meeting(2)

    class World:
        size = 2
        rank = property(lambda self: here.rank)

        def allgather(self, text: str) -> list[str]:
            return meeting.gather(here.rank)(text)

        def Split_type(self, kind: int) -> World:
            return self

        def Get_rank(self) -> int:
            return int(here.rank)

    monkeypatch.setattr(
        mpi_backend, "load_mpi", lambda: SimpleNamespace(COMM_WORLD=World(), COMM_TYPE_SHARED=0)
    )

    def be(rank: int) -> Any:
        here.rank = rank
        backend = NcclBackend.from_environment(environment={"PMI_SIZE": "2"}, timeout=SECONDS)
        parts = backend.split([[0, 1]])
        with contextlib.ExitStack() as stack:
            for one in (backend, *parts):
                stack.callback(one.close)
            return backend.arrays.device, [one.survivors for one in (backend, *parts)]

    found = as_threads(2, be)
    if exclusive:
        assert all(isinstance(one, UsageError) and "GPU 1 cannot be used" in str(one) for one in found)
    else:
        assert found == [(0, [None, None]), (1, [None, None])]


@pytest.mark.parametrize("options", [{}, {"device": 5}], ids=str)
def test_an_exclusive_gpu_is_named(machine: Machine, cupy: ModuleType, options: dict[str, int]) -> None:
    """Another process has it in compute mode EXCLUSIVE_PROCESS, or there is none of this number."""
    machine.gpus, machine.exclusive = 2, {1}
    with Rendezvous("127.0.0.1:0", 1) as meeting:
        place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1", "TOPOPLAN_RENDEZVOUS": meeting.address}
        number = options.get("device", 1)
        with pytest.raises(
            UsageError, match=rf"^GPU {number} cannot be used: cudaError.*; look at .*nvidia-smi"
        ):
            NcclBackend.from_environment(environment=place, **options)


def test_a_joining_rank_names_its_gpu(
    machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.gpus, machine.exclusive = 2, {1}
    assert use_local_gpu(cupy, {"LOCAL_RANK": "2"}) == 0
    with pytest.raises(UsageError, match=r"^GPU 1 cannot be used: cudaError.*; look at .*nvidia-smi"):
        use_local_gpu(cupy, {"LOCAL_RANK": "3"})

    def none() -> int:
        raise cupy.cuda.runtime.CUDARuntimeError("cudaErrorNoDevice")

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", none)
    with pytest.raises(
        UsageError, match=r"^the GPUs cannot be used: cudaErrorNoDevice; look at .*nvidia-smi"
    ):
        use_local_gpu(cupy, {"LOCAL_RANK": "0"})


@pytest.mark.thorough
@pytest.mark.parametrize("one_each", [False, True], ids=["all GPUs", "one GPU each"])
def test_processes_use_their_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_each: bool) -> None:
    """What the report runs on real GPUs, in two processes with stand-ins of their own."""
    for name, value in customized(tmp_path, gpus=3, one_each=one_each).items():
        monkeypatch.setenv(name, value)
    ended, text = nccl_rank.start(2, "check,close", port=free_port(), timeout=120, counts="7")
    assert ended, text
    assert text.count("check: ok") == 2
    for rank in range(2):
        assert f"rank {rank}: contexts [{rank}], misuses []" in text


def test_settings_that_make_no_sense_are_refused(cupy: ModuleType) -> None:
    with pytest.raises(
        UsageError, match=r"RANK, WORLD_SIZE, TOPOPLAN_RENDEZVOUS .* are not set; start the ranks"
    ):
        NcclBackend.from_environment(environment={})
    with Rendezvous("127.0.0.1:0", 1) as meeting:
        world = TcpControlPlane(meeting.address, 0, 1)
        with pytest.raises(UsageError, match="the engine 'rings' is unknown; use auto, windows or messages"):
            NcclBackend(cupy, world, engine="rings")
        with pytest.raises(UsageError, match=r"above 0, .* got 0 and"):
            NcclBackend(cupy, world, step_bytes=0)
        world.close()


def test_a_machine_without_gpus_is_named(machine: Machine, cupy: ModuleType) -> None:
    machine.gpus = 0
    with pytest.raises(UsageError, match=r"the loopback-gpu back end finds no GPU; .* CUDA_VISIBLE_DEVICES"):
        Communicator(forest_plan(2, "allreduce", "star"), "loopback-gpu")
