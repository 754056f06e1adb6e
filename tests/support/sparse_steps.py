"""Steps of sparse allreduces that back ends are compared by, on two servers of two GPUs each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

import topoplan
from collectives import Communicator
from collectives.sparse.codec import WireFormat
from topoplan.machine.topology import Topology

Array = NDArray[Any]

EXCHANGES = ("dense", "pairs", "hashed", "servers", "tree", "balanced")
ON_GPUS = tuple(name for name in EXCHANGES if name != "hashed")
"""Exchanges of gradients on GPUs: hashed owners are for the host."""
DGX = topoplan.load("dgx-1v")
TWO_SERVERS = topoplan.plan(
    topoplan.cluster([topoplan.Server(DGX, gpus=[0, 1], count=2)], nic_gbps=25), "allreduce"
)
SIZE = 701


def servers_of(gpus: tuple[int, ...]) -> Topology:
    """Return DGX-1V servers with the first so many GPUs of each, or one of them alone."""
    if len(gpus) == 1:
        return DGX.subset(list(range(gpus[0])))
    servers = [topoplan.Server(DGX, list(range(number))) for number in gpus]
    return topoplan.cluster(servers, nic_gbps=100, nics=1)


@dataclass(frozen=True, eq=False)
class Step:
    gradients: list[Array]
    exchange: str
    key: str = ""
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
    """Some calls by one exchange, with a residual of their own."""
    key = f"{exchange} {dtype} {size}"
    return [Step(gradients(step, dtype, size), exchange, key, **options) for step in range(count)]


def steps_of_each(exchanges: Sequence[str] = EXCHANGES, **options: Any) -> list[Step]:
    """Some calls by each exchange in turn."""
    return [step for exchange in exchanges for step in steps_of(exchange, **options)]


def mixed_steps(dtype: str = "float32") -> list[Step]:
    """Calls of which each leaves its residuals to another exchange."""
    order = ("pairs", "servers", "tree", "dense", "balanced", "servers", "pairs")
    return [Step(gradients(step, dtype), exchange, f"mixed {dtype}") for step, exchange in enumerate(order)]


def rounded_steps() -> list[Step]:
    """Calls with values that bfloat16 can hold, of which the sums do not fit."""
    steps = steps_of_each(("dense", "pairs", "servers"), density=0.5)
    for step in steps:
        for gradient in step.gradients:
            gradient.view(np.uint32)[...] &= np.uint32(0xFFFF0000)
    return [replace(step, key=f"rounded {step.key}") for step in steps]


def as_it_is(array: Array) -> Array:
    """For back ends that give numpy arrays."""
    return array


def read_only(array: Array) -> Array:
    """For back ends that take numpy arrays, which they are not to change."""
    seen = array[:]
    seen.flags.writeable = False
    return seen


def of_each_rank(steps: list[Step]) -> list[list[Any]]:
    """What `taken` gives on every rank that is alone in its process, by the loopback back end."""
    with Communicator(TWO_SERVERS) as comm:
        results, kept = taken(comm, steps, read_only, as_it_is)
    return [[[[one[rank]] for one in results], [[one[rank]] for one in kept]] for rank in comm.ranks]


def taken(
    comm: Communicator, steps: list[Step], put: Callable[[Array], Any], get: Callable[[Any], Array]
) -> tuple[list[list[str]], list[list[str]]]:
    """Digests of each step's results, and of what each key keeps at the end; of each the ranks of this process."""
    results = []
    for step in steps:
        given = [put(step.gradients[rank]) for rank in comm.ranks]
        found = comm.sparse_all_reduce(
            given[0] if comm.one_rank else given,
            density=step.density,
            exchange=step.exchange,
            key=step.key,
            momentum=step.momentum,
            wire=step.wire,
        )
        results.append([_digest(get(one)) for one in ([found] if comm.one_rank else found)])
    kept = [[_kept(state) for state in states] for states in comm.sparse_state().values()]
    return results, kept


def _kept(state: dict[str, Any]) -> str:
    velocity = np.zeros(0) if state["velocity"] is None else state["velocity"]
    return f"{state['step']} {_digest(state['residual'])} {_digest(velocity)}"


def _digest(array: Array) -> str:
    return f"{array.dtype} {array.shape} {sha256(array.tobytes()).hexdigest()[:16]}"
