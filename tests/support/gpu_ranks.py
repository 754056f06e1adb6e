"""What the tests of the GPU back ends share: GPUs that this processor plays, and ranks as threads that use them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from collectives import Communicator
from collectives.backends.nccl import device_arenas
from collectives.backends.nccl.nccl_backend import NcclBackend
from collectives.peers.rendezvous import Rendezvous
from collectives.peers.tcp_control_plane import TcpControlPlane
from tests.support.fake_gpu import install
from tests.support.fake_streams import Machine
from tests.support.hand_plans import forest_plan
from tests.support.job_meeting import as_threads
from topoplan.plans.plan import Plan

SECONDS = 60.0  # timeout of ranks that should never need it


@pytest.fixture
def machine() -> Iterator[Machine]:
    """Some GPUs, on which nothing was done that NCCL forbids."""
    made = Machine()
    yield made
    with made.lock:
        for stream in made.streams:
            stream.queue.clear()  # what a test has left standing still
    if not any(thread.name == "kernel" for thread in threading.enumerate()):
        made.kept.clear()  # regions of hundreds of megabytes, which nothing looks at any more
        made.memory.clear()
    assert made.misuses == []


@pytest.fixture
def cupy(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return install(monkeypatch, machine)


@pytest.fixture
def pairs(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Four GPUs on two hosts."""
    machine.gpus, machine.teams = 4, 2
    monkeypatch.setattr(device_arenas, "_host", lambda: f"host {machine.device // 2}")
    return machine


def floats(
    ranks: int, shape: int | tuple[int, ...], dtype: str = "float32", seed: int = 0
) -> list[np.ndarray]:
    """Numbers whose sums round, so that another order of additions shows."""
    generator = np.random.default_rng(seed)
    arrays = [generator.standard_normal(shape) * 100 for _ in range(ranks)]
    return [array.astype(dtype) for array in arrays]


def on_every_rank(
    cupy: ModuleType,
    plan: Plan,
    task: Callable[[Communicator, int], Any],
    *,
    chunk_bytes: int = 256,
    timeout: float = SECONDS,
    on_failure: str = "raise",
    gpus: Sequence[int] = (),
    **options: Any,
) -> list[Any]:
    """What the task returns or raises on each rank, each rank a thread with a GPU of its own."""
    size = len(plan.ranks)

    def be(rank: int) -> Any:
        with cupy.cuda.Device(gpus[rank] if gpus else rank):
            world = TcpControlPlane(meeting.address, rank, size, timeout=timeout)
            settings = {
                name: value[rank] if isinstance(value, list) else value for name, value in options.items()
            }
            backend = NcclBackend(cupy, world, timeout=timeout, **settings)
            about: dict[str, Any] = {"chunk_bytes": chunk_bytes, "timeout": timeout, "on_failure": on_failure}
            with Communicator(plan, backend, **about) as comm:
                return task(comm, rank)

    with Rendezvous("127.0.0.1:0", size) as meeting:
        return as_threads(size, be)


def outcome(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def check_bits(cupy: ModuleType, collective: str, length: int, *, calls: int, **options: Any) -> None:
    """Four ranks run a collective so often, along binary trees: with the bits of loopback every time."""
    arrays = floats(4, length)
    plan = forest_plan(4, collective, "binary")

    def call(comm: Communicator, given: Any) -> Any:
        if collective == "allreduce":
            return comm.all_reduce(given, op="avg")
        if collective == "reduce":
            return comm.reduce(given, root=plan.root)
        if collective == "broadcast":
            return comm.broadcast(given, root=plan.root)
        return comm.all_gather(given) if collective == "allgather" else comm.reduce_scatter(given, op="min")

    def task(comm: Communicator, rank: int) -> Any:
        given = cupy.asarray(arrays[rank])
        found = [call(comm, given) for _ in range(calls)]
        return [None if one is None else one.get() for one in found]

    found = outcome(on_every_rank(cupy, plan, task, **options))
    with Communicator(plan, "loopback") as comm:
        wanted = call(comm, arrays)
    for rank, want in enumerate(wanted):
        for one in found[rank]:
            assert (one is None) == (want is None)
            assert one is None or one.tobytes() == np.asarray(want).tobytes()
