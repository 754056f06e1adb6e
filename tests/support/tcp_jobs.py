"""Jobs of the tcp back end for tests: ranks as threads of this process, or as processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import Communicator
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.peers.rendezvous import Rendezvous
from tests.support.forking import forking
from tests.support.job_meeting import as_threads
from topoplan.plans.plan import Plan

Array = NDArray[Any]

METHODS = {
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}

SECONDS = 60.0
"""Timeout of ranks that should never need it."""


def given_to(rank: int, size: int, collective: str, count: int, dtype: str = "float32") -> Array:
    """The array of a rank: numbers that round when they are added."""
    per_rank = -(-count // size) * size if collective in ("reduce_scatter", "alltoall") else count
    values = np.arange(per_rank) * (2 * rank + 3) % 1013 / 7 - 60
    return values.astype(dtype) if dtype != "bool" else values > 0


def call(comm: Communicator, collective: str, arrays: Any, **options: Any) -> Any:
    return getattr(comm, METHODS[collective])(arrays, **options)


def seal(array: Array | None) -> str | None:
    """A result in few bytes, to send between processes."""
    return None if array is None else f"{array.dtype} {array.shape} {sha256(array.tobytes()).hexdigest()}"


def ring_wires(ranks: int) -> list[dict[str, object]]:
    """Wires of cables in a ring, each with an address at both ends."""
    pairs = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
    ends = {pair: (f"127.0.{1 + pair[0]}.1", f"127.0.{1 + pair[0]}.2") for pair in pairs}
    ends |= {pair[::-1]: both[::-1] for pair, both in ends.items()}
    return [
        {"source": pair[0], "destination": pair[1], "channel": "network", "from": both[0], "to": both[1]}
        for pair, both in ends.items()
    ]


def backends_in_threads(
    size: int,
    body: Callable[[TcpBackend, int], Any],
    *,
    timeout: float = SECONDS,
    helpers: int = 0,
    **options: Any,
) -> list[Any]:
    """What the body returns, or raises, with the back end of every rank, and of every helper behind them."""
    options = {**options, "timeout": timeout, "helpers": helpers}
    with Rendezvous("127.0.0.1:0", size + helpers) as meeting:
        return as_threads(
            size + helpers,
            lambda rank: body(TcpBackend(rank, size, rendezvous=meeting.address, **options), rank),
        )


def in_threads(
    plans: Plan | list[Plan],
    body: Callable[[Communicator, int], Any],
    *,
    chunk_bytes: int | list[int] = 1 << 16,
    timeout: float = SECONDS,
    **options: Any,
) -> list[Any]:
    """What the body returns, or raises, with every rank's communicator; one plan for all or one for each."""
    size = len((plans[0] if isinstance(plans, list) else plans).ranks)

    def with_communicator(backend: TcpBackend, rank: int) -> Any:
        plan = plans[rank] if isinstance(plans, list) else plans
        longest = chunk_bytes[rank] if isinstance(chunk_bytes, list) else chunk_bytes
        with Communicator(plan, backend, chunk_bytes=longest, timeout=timeout) as comm:
            return body(comm, rank)

    return backends_in_threads(size, with_communicator, timeout=timeout, **options)


def _work(rank: int, body: Callable[..., Any], results: Any, arguments: tuple[Any, ...]) -> None:
    try:
        results.put((rank, body(rank, *arguments)))
    except BaseException as error:
        results.put((rank, error))


def in_processes(size: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``body(rank, *arguments)`` returns, or raises, in one process for each rank."""
    context = forking()
    queue = context.SimpleQueue()
    processes = [
        context.Process(target=_work, args=(rank, body, queue, arguments), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        reported = dict(queue.get() for _ in range(size))
    finally:
        for process in processes:
            process.join(SECONDS)
            process.kill()
    return [reported[rank] for rank in range(size)]
