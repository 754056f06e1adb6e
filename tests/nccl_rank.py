"""One rank of an nccl communicator in a process of its own: ``python -m tests.nccl_rank check``, ``time`` or ``die``.

Its place comes from the environment (see `collectives.backends.nccl.environment`); ``RANKS_PER_GPU``, ``LANES``,
``OVERLAP``, ``GRAPHS`` and ``CHUNK`` choose settings. ``check`` compares every collective with the loopback on numpy
arrays, over and over so that graphs are captured and replayed too; ``time`` prints the seconds of an allreduce; in
``die`` the last rank kills itself while the others wait for it.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import topoplan
from collectives import Communicator
from collectives.backends.nccl.environment import from_environment

ROOT = Path(__file__).parents[1]
COUNTS = (0, 7, 1000003)
ROUNDS = 4


def start(
    ranks: int, task: str, *, port: int, timeout: float = 120.0, **settings: object
) -> tuple[bool, str]:
    """Start all ranks on this machine; whether all ended well, and what they printed."""
    environment = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        **{name.upper(): str(value) for name, value in settings.items()},
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.nccl_rank", task],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    end = time.monotonic() + timeout
    texts = []
    for process in processes:
        try:
            texts.append(process.communicate(timeout=max(0.1, end - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            process.kill()
            texts.append(process.communicate()[0] + "killed: it took too long\n")
    return all(process.returncode == 0 for process in processes), "".join(texts)


def main() -> None:
    """Be one rank."""
    options: dict[str, Any] = {
        "lanes": os.environ.get("LANES", "steps"),
        "overlap": os.environ.get("OVERLAP", "1") == "1",
        "graphs": os.environ.get("GRAPHS", "1") == "1",
    }
    if os.environ.get("RANKS_PER_GPU"):
        options["ranks_per_gpu"] = int(os.environ["RANKS_PER_GPU"])
    backend = from_environment(timeout=30.0, **options)
    gpus = list(range(backend.size))
    plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=gpus)
    with Communicator(plan, backend, chunk_bytes=int(os.environ.get("CHUNK", 1 << 20)), timeout=30.0) as comm:
        {"check": _check, "time": _time, "die": _die}[sys.argv[1]](comm, backend.rank)


def _methods(comm: Communicator) -> Sequence[Callable[..., Any]]:
    return (comm.all_reduce, comm.broadcast, comm.reduce, comm.all_gather, comm.reduce_scatter)


def _check(comm: Communicator, rank: int) -> None:
    import cupy

    with Communicator(comm.plan) as reference:
        for method, plain in zip(_methods(comm), _methods(reference), strict=True):
            for count in COUNTS:
                size = -(-count // comm.size) * comm.size
                generator = np.random.default_rng(count)
                rounds = [
                    [generator.standard_normal(size).astype(np.float32) for _ in range(comm.size)]
                    for _ in range(ROUNDS)
                ]
                given, out = cupy.zeros(size, dtype=np.float32), None
                for arrays in rounds:
                    given.set(arrays[rank])
                    out = method(given, out=out)
                    wanted = plain(arrays)[rank]
                    assert (out is None) == (wanted is None)
                    if out is not None:
                        assert out.get().tobytes() == wanted.tobytes(), (
                            f"{method.__name__} of {count} differs"
                        )
    print(f"rank {rank}: ok")


def _time(comm: Communicator, rank: int) -> None:
    import cupy

    for megabytes in (1, 16, 256):
        given = cupy.full(megabytes << 18, rank + 1, dtype=np.float32)
        out = cupy.empty_like(given)
        seconds = []
        for _ in range(13):
            started = time.perf_counter()
            comm.all_reduce(given, out=out)
            seconds.append(time.perf_counter() - started)
        if rank == 0:
            print(f"{megabytes} {statistics.median(seconds[3:])}")


def _die(comm: Communicator, rank: int) -> None:
    import cupy

    given = cupy.zeros(1 << 20, dtype=np.float32)
    comm.all_reduce(given)
    if rank == comm.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(given)


if __name__ == "__main__":
    main()
