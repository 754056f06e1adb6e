"""Steps of sparse allreduces that back ends are compared by, on two servers of two GPUs each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

import topoplan
from collectives import Communicator
from collectives.wire import WireFormat

Array = NDArray[Any]

EXCHANGES = ("dense", "pairs", "servers", "tree", "balanced")
TWO_SERVERS = topoplan.plan(
    topoplan.cluster([topoplan.Server(topoplan.load("dgx-1v"), gpus=[0, 1], count=2)], nic_gbps=25),
    "allreduce",
)
SIZE = 701


@dataclass(frozen=True, eq=False)
class Step:
    """One call, with the gradients of all ranks."""

    gradients: list[Array]
    exchange: str
    density: float = 0.03
    momentum: float = 0.0
    wire: WireFormat | None = None


def gradients(step: int, dtype: str = "float32", size: int = SIZE) -> list[Array]:
    """Numbers that round when they are added."""
    draw = np.random.default_rng(step)
    return [draw.standard_normal(size).astype(dtype) for _ in TWO_SERVERS.ranks]


def steps_of(
    exchange: str, *, count: int = 3, dtype: str = "float32", size: int = SIZE, **options: Any
) -> list[Step]:
    """Some calls by one exchange."""
    return [Step(gradients(step, dtype, size), exchange, **options) for step in range(count)]


def mixed_steps(dtype: str = "float32") -> list[Step]:
    """Calls of which each leaves its residuals to another exchange."""
    order = ("pairs", "servers", "tree", "dense", "balanced", "servers", "pairs")
    return [Step(gradients(step, dtype), exchange) for step, exchange in enumerate(order)]


def taken(
    comm: Communicator, steps: list[Step], put: Callable[[Array], Any], get: Callable[[Any], Array]
) -> tuple[list[list[str]], list[str]]:
    """Digests of the results of each step, and of what is kept at the end, for each rank of this process."""
    results = []
    for step in steps:
        given = [put(step.gradients[rank]) for rank in comm.ranks]
        found = comm.sparse_all_reduce(
            given[0] if comm.one_rank else given,
            density=step.density,
            exchange=step.exchange,
            momentum=step.momentum,
            wire=step.wire,
        )
        results.append([_digest(get(one)) for one in ([found] if comm.one_rank else found)])
    kept = []
    for state in comm.sparse_state()[""]:
        parts = [state["residual"], np.zeros(0) if state["velocity"] is None else state["velocity"]]
        kept.append(f"{state['step']} {' '.join(map(_digest, parts))}")
    return results, kept


def _digest(array: Array) -> str:
    return f"{array.dtype} {array.shape} {sha256(array.tobytes()).hexdigest()[:16]}"
