"""Torch tensors on GPUs that this processor plays, moved by kernels, as for hook and process group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from collectives import Communicator  # noqa: E402
from collectives.arrays.torch_arrays import TorchArrays  # noqa: E402
from collectives.backends.nccl.backend import NcclBackend  # noqa: E402
from collectives.backends.torch import members  # noqa: E402
from tests.support.fake_streams import Machine  # noqa: E402
from tests.support.fake_torch_cuda import install, on_gpu_0, seen_by  # noqa: E402
from tests.support.gpu_ranks import cupy, floats, machine, outcome  # noqa: E402
from tests.support.hand_plans import forest_plan  # noqa: E402
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
    monkeypatch.setattr(
        members, "NcclBackend", partial(NcclBackend, region_bytes=8 << 20, bindings="nccl4py")
    )
    monkeypatch.setattr(members, "TorchArrays", lambda devices: TorchArrays([torch.device("cpu")]))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return cupy


def on_every_rank(
    cupy: ModuleType, task: Callable[[Communicator, int], Any], *, engine: str = "auto", **options: Any
) -> list[Any]:
    """What the task returns or raises on each rank; what is said instead where there are no windows."""
    together, results = Together(RANKS), [None] * RANKS
    plan = forest_plan(RANKS, "allreduce", "binary")

    def be(rank: int) -> None:
        try:
            with cupy.cuda.Device(rank):
                job = members.Members(together.gather(rank), rank, RANKS, 20.0)
                devices = [torch.device("cuda", rank)]
                made, about = members.by_windows(job, devices, None, engine=engine, exact=True)
                if made is None:
                    results[rank] = about
                    return
                with Communicator(plan, made, timeout=20.0, **options) as comm:
                    results[rank] = task(comm, rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=be, args=[rank]) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_tensors_are_summed_where_they_lie_with_the_bits_of_loopback(
    machine: Machine, gpus: ModuleType
) -> None:
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
    assert machine.launches == RANKS * (4 + 4)  # each kernel runs once empty when it is loaded
    with Communicator(forest_plan(RANKS, "allreduce", "binary"), "loopback") as reference:
        average, total = reference.all_reduce(arrays, op="avg"), reference.all_reduce(arrays)
    for rank, (engine, found, half) in enumerate(told):
        assert engine.startswith("windows over peer access")
        for one, want in zip(found, (average, total, total), strict=True):
            assert one.tobytes() == want[rank].tobytes()
        assert half == whole[RANKS - 1].tolist()


def test_a_rank_that_refuses_is_an_error_on_all(gpus: ModuleType) -> None:
    def task(comm: Communicator, rank: int) -> Any:
        return comm.all_reduce(torch.zeros(8 if rank else 9))

    assert all(isinstance(one, BackendError) for one in on_every_rank(gpus, task))


@pytest.mark.parametrize("engine", ["auto", "windows", "messages"])
def test_without_windows_the_groups_messages_are_taken_or_windows_refused_on_all_ranks_alike(
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


def test_ranks_of_two_jobs_that_met_in_one_store_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(text: str) -> list[str]:
        return [text, text.replace("nightly", "weekly")]

    members.check_one_job(lambda text: [text, text], 2)
    monkeypatch.setenv("TOPOPLAN_JOB", "nightly")
    with pytest.raises(
        UsageError,
        match=r"rank 0 belongs to job 'nightly' .*and rank 1 to job 'weekly' .*another MASTER_PORT",
    ):
        members.check_one_job(gather, 2)


def test_engines_are_agreed_on_before_anything_is_made() -> None:
    def agreed(engine: str, theirs: str, served: tuple[str, ...] = ("cuda",)) -> set[str]:
        def gather(text: str) -> list[str]:
            return [text, text.replace(f"'{engine}'", f"'{theirs}'")]

        return members.agreed_engine(gather, engine, True, served)

    assert agreed("auto", "auto", ("cpu", "cuda")) == {"cpu", "cuda"}
    with pytest.raises(
        UsageError, match="rank 1 has engine='auto' and exact=True, and rank 0 engine='windows'"
    ):
        agreed("windows", "auto")
    with pytest.raises(UsageError, match="the engine 'fast' is unknown; use auto, windows or messages"):
        agreed("fast", "fast")
    with pytest.raises(UsageError, match="no GPUs, which engines are for; leave engine='windows' out"):
        agreed("windows", "windows", ("cpu",))
