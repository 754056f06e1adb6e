"""Scenarios of MPI processes with a GradientSynchronizer: averages by a plan of their own, and sparse steps."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives import GradientSynchronizer
from collectives.training.exchange_settings import TopK
from tests.support.hand_plans import forest_plan
from tests.support.rank_scenarios import run_scenarios, scenario

WORLD = MPI.COMM_WORLD
SHAPES: list[tuple[tuple[int, ...], str]] = [
    ((40, 7), "float32"),
    ((0, 3), "float64"),
    ((5,), "int64"),
    ((1000, 300), "float32"),
    ((), "float32"),
    ((12, 12), "float64"),
    ((6,), "float32"),
]

Arrays = list[NDArray[Any]]


def gradients_of(rank: int, seed: int) -> Arrays:
    """Multiples of the number of ranks, so that averages are whole numbers."""
    random = np.random.default_rng([rank, seed])
    return [np.array(random.integers(-999, 999, shape) * WORLD.size, dtype) for shape, dtype in SHAPES]


def check_means(averages: Arrays, seed: int) -> None:
    every = zip(*(gradients_of(rank, seed) for rank in range(WORLD.size)), strict=True)
    for average, given in zip(averages, every, strict=True):
        assert average.dtype == given[0].dtype
        assert np.array_equal(average, np.mean(np.stack(given).astype(float), axis=0))


@scenario(2, 4)
def processes_get_exact_averages_by_a_plan_of_their_own() -> None:
    """New arrays, in place, and gradients one after another, in another order on each rank."""
    own = [gradients_of(WORLD.rank, seed) for seed in range(5)]
    with GradientSynchronizer(own[0], bucket_bytes=5000) as synchronizer:
        for seed in range(3):
            check_means(synchronizer.step(own[seed]), seed)
        synchronizer.step(own[3], out=own[3])
        check_means(own[3], 3)
        for index in np.random.default_rng(WORLD.rank).permutation(len(SHAPES)).tolist():
            synchronizer.ready(index, own[4][index])
        check_means(synchronizer.wait(), 4)
        assert synchronizer.communicator.plan.ranks == tuple(f"rank{rank}" for rank in range(WORLD.size))
        exchanged = [(one.key, one.nbytes) for one in synchronizer.recorder.exchanges()]
        assert [key for key, _ in exchanged] == [f"bucket {n}" for n in range(len(synchronizer.buckets))] * 5
    assert WORLD.allgather(exchanged) == [exchanged] * WORLD.size


@scenario(2, 4)
def sparse_steps_keep_what_they_do_not_give_across_a_checkpoint() -> None:
    """Twenty steps, broken off in the middle."""
    shape = (300, 4)

    def gradient(step: int) -> Arrays:
        return [np.random.default_rng([WORLD.rank, step]).integers(-99, 99, shape) * float(WORLD.size)]

    plan, compression = forest_plan(WORLD.size, "allreduce", "chain"), TopK(0.05, exchange="pairs")
    given, state = np.zeros(shape), {}
    for half in range(2):
        with GradientSynchronizer(gradient(0), plan, compression=compression) as synchronizer:
            if state:
                synchronizer.load_state_dict(state)
            for step in range(10 * half, 10 * half + 10):
                given += WORLD.size * synchronizer.step(gradient(step))[0]
            state = synchronizer.state_dict()
    (bucket,) = state["residuals"].values()
    kept = WORLD.allreduce(bucket[0]["residual"].reshape(shape))
    assert np.array_equal(given + kept, WORLD.allreduce(sum(gradient(step)[0] for step in range(20))))
    assert kept.any()
    assert state["step"] == 20


if __name__ == "__main__":
    run_scenarios(sys.argv[1], WORLD.rank, WORLD.size)
