"""One MPI process of the tests of GradientSynchronizer; ``gradient_ranks.py FOLDER`` leaves a file of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import GradientSynchronizer
from collectives.backends.mpi.mpi_backend import MpiBackend
from collectives.training.exchange_settings import TopK
from tests.support.hand_plans import forest_plan
from topoplan.errors import BackendError, UsageError

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


def gradients_of(rank: int, seed: int, size: int) -> Arrays:
    """Multiples of the number of ranks, so that averages are whole numbers."""
    random = np.random.default_rng([rank, seed])
    return [np.array(random.integers(-999, 999, shape) * size, dtype) for shape, dtype in SHAPES]


def is_mean(averages: Arrays, seed: int, size: int) -> bool:
    """Whether these are the averages over all ranks, exactly."""
    every = [gradients_of(rank, seed, size) for rank in range(size)]
    wanted = [
        np.mean(np.stack(one).astype(float), axis=0).astype(one[0].dtype) for one in zip(*every, strict=True)
    ]
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(averages, wanted, strict=True))


def averages(world: Any) -> dict[str, Any]:
    """Dense steps, without a plan: new arrays, in place, and gradients one after another."""
    with GradientSynchronizer(gradients_of(world.rank, 0, world.size), bucket_bytes=5000) as synchronizer:
        right = [
            is_mean(synchronizer.step(gradients_of(world.rank, seed, world.size)), seed, world.size)
            for seed in range(3)
        ]
        own = gradients_of(world.rank, 3, world.size)
        synchronizer.step(own, out=own)
        right.append(is_mean(own, 3, world.size))
        # each rank in another order
        for index in np.random.default_rng(world.rank).permutation(len(SHAPES)).tolist():
            synchronizer.ready(index, gradients_of(world.rank, 4, world.size)[index])
        right.append(is_mean(synchronizer.wait(), 4, world.size))
        exchanged = [(one.key, one.nbytes) for one in synchronizer.recorder.exchanges()]
        return {
            "right": right,
            "ranks": synchronizer.communicator.plan.ranks,
            "exchanged": exchanged,
            "buckets": len(synchronizer.buckets),
        }


def sparse(world: Any) -> dict[str, Any]:
    """Twenty sparse steps, broken off by a checkpoint in the middle; what was given and kept, over all ranks."""
    shape = (300, 4)

    def gradient(step: int) -> Arrays:
        return [np.random.default_rng([world.rank, step]).integers(-99, 99, shape) * float(world.size)]

    given = np.zeros(shape)
    state: dict[str, Any] = {}
    for half in range(2):
        plan = forest_plan(world.size, "allreduce", "chain")
        with GradientSynchronizer(
            gradient(0), plan, compression=TopK(0.05, exchange="pairs")
        ) as synchronizer:
            if state:
                synchronizer.load_state_dict(state)
            for step in range(10 * half, 10 * half + 10):
                given += world.size * synchronizer.step(gradient(step))[0]
            state = synchronizer.state_dict()
    (bucket,) = state["residuals"].values()
    kept = world.allreduce(bucket[0]["residual"].reshape(shape))
    total = world.allreduce(sum(gradient(step)[0] for step in range(20)))
    return {
        "conserved": bool(np.array_equal(given + kept, total)),
        "kept": bool(kept.any()),
        "step": state["step"],
    }


def _other_buckets(world: Any) -> None:
    GradientSynchronizer(
        gradients_of(world.rank, 0, world.size),
        bucket_bytes=5_000_000 if world.rank == world.size - 1 else 5000,
        timeout=10,
    )


def _other_shapes(world: Any) -> None:
    """As many elements in the same buckets, but not the same matrix."""
    parameters = gradients_of(world.rank, 0, world.size)
    if world.rank == world.size - 1:
        parameters[0] = parameters[0].T
    GradientSynchronizer(parameters, timeout=10)


def _no_array(world: Any) -> None:
    GradientSynchronizer([[1.0]] if world.rank == world.size - 1 else [np.ones(1)], timeout=10)


def _other_world(world: Any) -> None:
    GradientSynchronizer(
        gradients_of(world.rank, 0, world.size), forest_plan(world.size + 1, "allreduce", "chain"), timeout=10
    )


def _wrong_gradient(world: Any) -> None:
    with GradientSynchronizer(
        gradients_of(world.rank, 0, world.size), bucket_bytes=5000, timeout=10
    ) as synchronizer:
        synchronizer.step(gradients_of(world.rank, 0, world.size))
        own = gradients_of(world.rank, 1, world.size)
        if world.rank == world.size - 1:
            own[3] = own[3][:-1]
        before = [one.copy() for one in own]
        try:
            synchronizer.step(own, out=own)
        finally:
            assert all(np.array_equal(a, b) for a, b in zip(own, before, strict=True)), "an array was touched"


def _leaves(world: Any) -> None:
    """The last rank has gone when the others want to know what to plan for."""
    backend = MpiBackend(timeout=10)
    if world.rank == world.size - 1:
        backend.close()
    else:
        GradientSynchronizer(gradients_of(world.rank, 0, world.size), backend=backend)


MISTAKES: dict[str, Callable[[Any], None]] = {
    "other buckets": _other_buckets,
    "other shapes": _other_shapes,
    "no array": _no_array,
    "other world": _other_world,
    "wrong gradient": _wrong_gradient,
    "leaves": _leaves,
}


def mistakes(world: Any) -> dict[str, Any]:
    """What each rank raises where the last one does something else."""
    found: dict[str, Any] = {}
    for name, mistake in MISTAKES.items():
        try:
            mistake(world)
        except BackendError as error:  # of which RefusedError is one, and a UsageError too
            kind = type(error).__name__
            found[name] = {"kind": kind, "text": str(error), "rank": error.rank, "peer": error.peer}
        except UsageError as error:
            found[name] = {"kind": "UsageError", "text": str(error)}
        world.Barrier()
    return found


def main() -> None:
    """All of it."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    found = {"averages": averages(world), "sparse": sparse(world), "mistakes": mistakes(world)}
    Path(sys.argv[1], f"{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
