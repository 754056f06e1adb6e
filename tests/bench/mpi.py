"""An allreduce of the mpi back end, against MPI's own and torch's gloo in the same processes.

All of them run once in every round, in another order each time, so that they meet the same machine and caches. A time
is that from the last rank's start to the last rank's end; the clock is that of the one machine. The back end is given
arrays to put results into, as MPI is; gloo works in place. ``python -m tests.bench mpi`` starts the processes itself.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import topoplan
from collectives import Communicator
from collectives.launching.mpiexec import run_mpi
from topoplan.errors import UsageError

MEGABYTES = (16, 64)
PROCESSES = (4, 8)
RUNS = 15
SMALL = 8
"""Elements of the small allreduce."""

Contender = Callable[[Any, Any], object]


def main() -> None:
    """Start 4 and then 8 processes, which print what they measured."""
    for processes in PROCESSES:
        with tempfile.TemporaryDirectory() as folder:
            meeting = str(Path(folder, "gloo"))
            command = [sys.executable, "-m", "tests.bench.mpi", meeting]
            try:
                status = run_mpi(command, processes)
            except UsageError as error:
                print(f"not measured: {error}")
                return
        if status:
            raise SystemExit(f"the processes ended with status {status}")


def work(meeting: str) -> None:
    """What each process does."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=range(world.size))
    with Communicator(plan, "mpi") as communicator:
        contenders: dict[str, Contender] = {
            "plan": lambda given, out: communicator.all_reduce(given, out=out),
            "plan, new array": lambda given, out: communicator.all_reduce(given),
            _library(): lambda given, out: world.Allreduce(given, out),
        }
        if find_spec("torch") is not None:
            contenders["gloo"] = _gloo(meeting)
        if world.rank == 0:
            print(
                f"allreduce of {world.size} processes, float32, plan for {world.size} GPUs of a DGX-1V, "
                f"median of {RUNS}:"
            )
            if "gloo" not in contenders:
                print("  gloo: not measured, torch is not installed")
        for count in (SMALL, *(megabytes << 18 for megabytes in MEGABYTES)):
            given, out = np.full(count, world.rank + 1, np.float32), np.empty(count, np.float32)
            while not communicator.settled(given.nbytes):
                communicator.all_reduce(given, out=out)
            _print(world, contenders, given, out)


def _print(world: Any, contenders: dict[str, Contender], given: Any, out: Any) -> None:
    """Measure and print one size."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for run in range(RUNS + 1):
        for name in random.Random(run).sample(list(contenders), len(contenders)):
            began, ended = _once(world, contenders[name], given, out)
            if run:
                seconds[name].append(ended - began)
    if world.rank:
        return
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    size = f"{given.nbytes >> 20} MB" if given.nbytes >> 20 else f"{given.nbytes} B"
    ours = medians["plan"]
    print(
        f"  {size:>6}  plan {ours * 1e3:8.3f} ms, into a new array {medians['plan, new array'] * 1e3:8.3f} ms"
    )
    for name, rival in medians.items():
        if not name.startswith("plan"):
            print(f"          {name}: {rival * 1e3:8.3f} ms  ratio {rival / ours:.2f} x", flush=True)


def _once(world: Any, contender: Contender, given: Any, out: Any) -> tuple[float, float]:
    """When the last rank began and ended."""
    from mpi4py import MPI

    world.Barrier()
    began = time.monotonic()
    contender(given, out)
    ended = time.monotonic()
    return world.allreduce(began, MPI.MAX), world.allreduce(ended, MPI.MAX)


def _library() -> str:
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))} MPI_Allreduce"


def _gloo(meeting: str) -> Contender:
    """An allreduce of torch's gloo process group, in place; filling its tensor is not timed."""
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    dist.init_process_group(
        "gloo", init_method=f"file://{world.bcast(meeting)}", rank=world.rank, world_size=world.size
    )

    def run(given: Any, out: Any) -> None:
        dist.all_reduce(torch.from_numpy(out))

    return run


if __name__ == "__main__":
    work(sys.argv[1])
