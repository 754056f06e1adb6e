"""The GPU back ends on GPUs that this processor plays: results have the bits of the loopback on numpy arrays."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from fake_gpu import install
from fake_streams import Machine
from hand_plans import SHAPES, forest_plan
from test_loopback import run

from collectives import Communicator
from collectives.backends.nccl.backend import NcclBackend
from collectives.backends.nccl.tcp_world import TcpWorld
from topoplan.plans.plan import COLLECTIVES, Plan

ORDERS = ("first", "last", "random")


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


@pytest.mark.parametrize("count", [0, 1, 7, 5003])
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("shape", sorted(SHAPES))
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
    listener = socket.create_server(("127.0.0.1", 0))
    address = "127.0.0.1:%d" % listener.getsockname()[1]
    results: list[Any] = [None] * size

    def be(rank: int) -> None:
        try:
            with cupy.cuda.Device(rank):
                world = TcpWorld(
                    address, rank, size, timeout=timeout, listener=listener if rank == 0 else None
                )
                backend = NcclBackend(cupy, world, timeout=timeout, **options)
                with Communicator(plan, backend, chunk_bytes=chunk_bytes, timeout=timeout) as comm:
                    results[rank] = task(comm, rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=be, args=[rank]) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.mark.parametrize("count", [0, 1, 7, 5003])
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("shape", sorted(SHAPES))
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
