"""An allreduce among ranks of one process, against others that do the same sum.

Rivals in one process: numpy doing the sum and the copies. With a process for each rank: a ring of MPI messages written
by hand, and torch's gloo. Those start anew in every round, and rounds alternate; each round gives the median of its
runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

import topoplan
from collectives import Communicator
from tests.bench.rivals import gloo_seconds, mpi_name, ring_seconds

MEGABYTES = (1, 16, 64)
RUNS = 7
RANKS = 4
ROUNDS = 3


def main() -> None:
    """Print all times and ratios."""
    plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce")
    print(f"allreduce of 8 ranks on arrays in one process, float32, median of {RUNS}:")
    with Communicator(plan) as communicator:
        for megabytes in MEGABYTES:
            ours, rival = _beside_numpy(communicator, megabytes)
            print(
                f"  {megabytes:3} MB  plan {ours * 1e3:7.2f} ms  numpy sum and copies {rival * 1e3:7.2f} ms  "
                f"ratio {rival / ours:.2f} x"
            )
    print(
        f"allreduce of {RANKS} ranks, float32, median of {ROUNDS} rounds of {RUNS}; rivals in {RANKS} processes:"
    )
    plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=range(RANKS))
    with Communicator(plan) as communicator:
        for megabytes in (16, 64):
            _print_processes(communicator, megabytes)


def _beside_numpy(communicator: Communicator, megabytes: int) -> tuple[float, float]:
    """Median seconds of the plan and of numpy, in turns."""
    inputs, results = _arrays(communicator.size, megabytes)

    def plain() -> None:
        np.add(inputs[0], inputs[1], out=results[0])
        for array in inputs[2:]:
            np.add(results[0], array, out=results[0])
        for result in results[1:]:
            result[...] = results[0]

    pairs = [
        (_seconds(lambda: communicator.all_reduce(inputs, out=results)), _seconds(plain)) for _ in range(RUNS)
    ]
    ours, rival = (statistics.median(times) for times in zip(*pairs, strict=True))
    return ours, rival


def _print_processes(communicator: Communicator, megabytes: int) -> None:
    inputs, results = _arrays(communicator.size, megabytes)
    ours: list[float] = []
    rings: list[float | None] = []
    gloos: list[float | None] = []
    for _ in range(ROUNDS):
        runs = [_seconds(lambda: communicator.all_reduce(inputs, out=results)) for _ in range(RUNS)]
        ours.append(statistics.median(runs))
        rings.append(ring_seconds(RANKS, megabytes, RUNS))
        gloos.append(gloo_seconds(RANKS, megabytes, RUNS))
    mine = statistics.median(ours)
    print(f"  {megabytes:3} MB  plan {mine * 1e3:7.2f} ms")
    _print_rival("ring of messages", rings, mine, "mpi4py or mpiexec", mpi_name)
    _print_rival("gloo", gloos, mine, "torch", lambda: "torch")


def _print_rival(
    name: str, times: list[float | None], mine: float, needs: str, library: Callable[[], str]
) -> None:
    found = [seconds for seconds in times if seconds is not None]
    if not found:
        print(f"          {name}: not measured, {needs} is not installed")
        return
    rival = statistics.median(found)
    print(f"          {name}, {library()}: {rival * 1e3:7.2f} ms  ratio {rival / mine:.2f} x")


def _arrays(ranks: int, megabytes: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    inputs = [np.full(megabytes << 18, rank, dtype=np.float32) for rank in range(ranks)]
    return inputs, [np.zeros_like(array) + 1 for array in inputs]


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
