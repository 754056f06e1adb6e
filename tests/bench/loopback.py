"""An allreduce among ranks of one process, against numpy doing the same sum and the copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

import topoplan
from collectives import Communicator

MEGABYTES = (1, 16, 64)
RUNS = 7


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


def _arrays(ranks: int, megabytes: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    inputs = [np.full(megabytes << 18, rank, dtype=np.float32) for rank in range(ranks)]
    return inputs, [np.zeros_like(array) + 1 for array in inputs]


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
