"""Torch tensors on GPUs that this processor plays, moved by kernels, as for hook and process group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from collectives import Communicator  # noqa: E402
from collectives.backends.nccl.nccl_backend import NcclBackend  # noqa: E402
from collectives.backends.torch import backend_selection, process_groups  # noqa: E402
from collectives.tables.torch_arrays import TorchArrays  # noqa: E402
from collectives.torch.futures import PlannedWork, future_of  # noqa: E402
from tests.support.fake_streams import Machine  # noqa: E402
from tests.support.fake_torch_cuda import install, on_gpu_0, seen_by  # noqa: E402
from tests.support.gpu_ranks import cupy, floats, machine, outcome  # noqa: E402
from tests.support.hand_plans import forest_plan  # noqa: E402
from tests.support.job_meeting import as_threads  # noqa: E402
from topoplan.errors import BackendError, UsageError  # noqa: E402

__all__ = ["cupy", "machine"]

RANKS = 3


class Together:
    """Ranks as threads that tell each other texts."""

    def __init__(self, size: int) -> None:
        self._said = [""] * size
        self._barrier = threading.Barrier(size, timeout=30)

    def gather(self, rank: int) -> Callable[[str], list[str]]:
        def told(text: str) -> list[str]:
            self._said[rank] = text
            self._barrier.wait()
            said = list(self._said)
            self._barrier.wait()
            return said

        return told


@pytest.fixture
def gpus(machine: Machine, cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """CuPy on GPUs that reach each other's memory, and tensors that count as theirs."""
    machine.gpus, machine.peers = RANKS, True
    install(monkeypatch)
    on_gpu_0(monkeypatch)
    seen_by(cupy, monkeypatch)
    monkeypatch.setattr(backend_selection, "NcclBackend", partial(NcclBackend, region_bytes=8 << 20))
    monkeypatch.setattr(backend_selection, "TorchArrays", lambda devices: TorchArrays([torch.device("cpu")]))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return cupy


def on_every_rank(
    cupy: ModuleType, task: Callable[[Communicator, int], Any], *, engine: str = "auto", **options: Any
) -> list[Any]:
    """What the task returns or raises on each rank; what is said instead where there are no windows."""
    together, plan = Together(RANKS), forest_plan(RANKS, "allreduce", "binary")

    def be(rank: int) -> Any:
        with cupy.cuda.Device(rank):
            job = backend_selection.GroupMembers(together.gather(rank), rank, RANKS, 20.0)
            devices = [torch.device("cuda", rank)]
            made, about = backend_selection.window_backend(job, devices, None, engine=engine, exact=True)
            if made is None:
                return about
            # each rank is a process of its own, with streams of its own
            with (
                torch.cuda.stream(torch.cuda.Stream()),
                Communicator(plan, made, timeout=20.0, **options) as comm,
            ):
                return task(comm, rank)

    return as_threads(RANKS, be)


def test_tensors_are_summed_in_place_with_the_bits_of_loopback(machine: Machine, gpus: ModuleType) -> None:
    """Averages, sums in place, bfloat16, nothing, results in memory of windows."""
    arrays = floats(RANKS, 4200)
    whole = [np.arange(5, dtype=np.float32) + rank for rank in range(RANKS)]

    def task(comm: Communicator, rank: int) -> Any:
        given = torch.from_numpy(arrays[rank].copy())
        found = [comm.all_reduce(given, op="avg").numpy()]
        into = comm.empty(4200, dtype="float32")
        assert comm.all_reduce(given, out=into) is into
        found.append(into.numpy().copy())
        comm.all_reduce(given, out=given, async_op=True).wait()
        found.append(given.numpy())
        half = comm.all_reduce(torch.from_numpy(whole[rank]).to(torch.bfloat16), op="max")
        assert comm.all_reduce(torch.zeros(0)).numel() == 0
        return comm.engine, found, half.float().tolist()

    told = outcome(on_every_rank(gpus, task, chunk_bytes=1 << 20))
    # each kernel runs once empty when it is loaded, also the one that tries the peers; of the calls, which the ranks
    # compare by texts, only the sum in place is like an earlier one
    assert machine.launches == RANKS * (4 + 4 + 2 + 6)
    with Communicator(forest_plan(RANKS, "allreduce", "binary"), "loopback") as reference:
        average, total = reference.all_reduce(arrays, op="avg"), reference.all_reduce(arrays)
    for rank, (engine, found, half) in enumerate(told):
        assert engine.startswith("windows over peer access")
        for one, want in zip(found, (average, total, total), strict=True):
            assert one.tobytes() == want[rank].tobytes()
        assert half == whole[RANKS - 1].tolist()


def test_a_work_orders_the_stream_and_does_not_hold_the_host(gpus: ModuleType) -> None:
    """Rank 0 waits for its work before the others have called; a wait with a timeout holds it."""
    waited = threading.Event()

    def task(comm: Communicator, rank: int) -> Any:
        given, cpu = torch.full((8,), float(rank)), torch.device("cpu")
        comm.all_reduce(given)
        assert rank == 0 or waited.wait(20)
        handle = comm.all_reduce(given, out=given, async_op=True)
        future = future_of(handle, given, device=cpu, arrays=comm.arrays, finish=lambda: None)
        work = PlannedWork(handle, future, [given])
        assert work.wait()
        early = work.is_completed()
        waited.set()
        work.get_future().wait()
        assert work.wait(timedelta(seconds=20))
        assert rank or not early
        again = comm.all_reduce(given)
        torch.cuda.current_stream().synchronize()
        return work.is_completed(), given.tolist(), again.tolist()

    assert outcome(on_every_rank(gpus, task)) == [(True, [3.0] * 8, [9.0] * 8)] * RANKS


@pytest.mark.sampled
@pytest.mark.parametrize("how", [{}, {"async_op": True}, {"op": "avg"}], ids=str)
def test_refuses_a_collective_on_a_captured_stream(gpus: ModuleType, how: dict[str, Any]) -> None:
    """As inside `torch.cuda.graph`: an event that is recorded there would void the capture when it is asked about."""

    def task(comm: Communicator, rank: int) -> Any:
        captured: Any = torch.cuda.Stream()
        captured.capturing = True
        with torch.cuda.stream(captured), pytest.raises(UsageError) as error:
            comm.all_reduce(torch.zeros(8), **how)
        return str(error.value), captured.calls, captured.queued

    for rank, (text, calls, queued) in enumerate(outcome(on_every_rank(gpus, task))):
        assert text.startswith(f"rank {rank} has an array on a stream that is captured in a CUDA graph")
        assert "\n" not in text
        assert (calls, queued) == ([], 0)


def test_a_rank_that_refuses_is_an_error_on_all(gpus: ModuleType) -> None:
    def task(comm: Communicator, rank: int) -> Any:
        return comm.all_reduce(torch.zeros(8 if rank else 9))

    assert all(isinstance(one, BackendError) for one in on_every_rank(gpus, task))


@pytest.mark.sampled
@pytest.mark.parametrize("engine", ["auto", "windows", "messages"])
def test_without_windows_all_ranks_take_messages_or_refuse(
    machine: Machine, gpus: ModuleType, engine: str
) -> None:
    machine.windows, machine.peers = (False, False), False
    told = on_every_rank(gpus, lambda comm, rank: None, engine=engine)
    assert len({str(one) for one in told}) == 1
    if engine == "windows":
        assert isinstance(told[0], UsageError)
        assert str(told[0]).startswith("the windows engine cannot be had: ")
    else:
        assert str(told[0]).startswith("messages: no windows" if engine == "auto" else "messages")


def test_refuses_ranks_of_two_jobs_in_one_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(text: str) -> list[str]:
        return [text, text.replace("nightly", "weekly")]

    backend_selection.check_one_job(lambda text: [text, text], 2)
    monkeypatch.setenv("TOPOPLAN_JOB", "nightly")
    with pytest.raises(
        UsageError,
        match=r"rank 0 belongs to job 'nightly' .*and rank 1 to job 'weekly' .*another MASTER_PORT",
    ):
        backend_selection.check_one_job(gather, 2)


def test_engines_are_agreed_on_before_anything_is_made() -> None:
    def agreed(engine: str, theirs: str, served: tuple[str, ...] = ("cuda",)) -> set[str]:
        def gather(text: str) -> list[str]:
            return [text, text.replace(f"'{engine}'", f"'{theirs}'")]

        return backend_selection.agreed_engine(gather, engine, True, served)

    assert agreed("auto", "auto", ("cpu", "cuda")) == {"cpu", "cuda"}
    with pytest.raises(UsageError, match="got engine='auto' and exact=True on rank 1 and engine='windows'"):
        agreed("windows", "auto")
    with pytest.raises(UsageError, match="the engine 'fast' is unknown; use auto, windows or messages"):
        agreed("fast", "fast")
    with pytest.raises(
        UsageError, match="engines need a process group with GPUs; leave engine='windows' out"
    ):
        agreed("windows", "windows", ("cpu",))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("told", "visible", "device"),
    [({"LOCAL_RANK": "5"}, 1, 0), ({"LOCAL_RANK": "5"}, 8, 5), ({}, 4, 2), ({"LOCAL_RANK": "5"}, 4, 1)],
)
def test_a_process_takes_one_of_its_visible_gpus(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, str], visible: int, device: int
) -> None:
    """As with a GPU for each task, where every process calls its own 0."""
    chosen: list[int] = []

    def nobody(*_: Any, **__: Any) -> None:
        raise RuntimeError("no other rank")

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in {
        "RANK": "6",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
        **told,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "init_process_group", nobody)
    with pytest.raises(BackendError, match="did not find each other"):
        process_groups.make_group(timeout=1.0)
    assert chosen == [device]
