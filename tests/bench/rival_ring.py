"""A rival: allreduce by a ring of MPI messages, as written by hand with Isend and Irecv.

``mpiexec -n 4 python -m tests.bench.rival_ring MEGABYTES RUNS`` prints the median seconds as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import numpy as np
from mpi4py import MPI


def main() -> None:
    """Run the ring on float32 arrays and check the sums."""
    megabytes, runs = map(int, sys.argv[1:])
    world = MPI.COMM_WORLD
    given = np.full(megabytes << 18, world.rank + 1, dtype=np.float32)
    result = np.empty_like(given)
    arriving = np.empty(-(-len(given) // world.size), dtype=np.float32)
    seconds = []
    for _ in range(runs + 1):
        world.Barrier()
        started = time.perf_counter()
        all_reduce(world, given, result, arriving)
        world.Barrier()
        seconds.append(time.perf_counter() - started)
    right = bool(np.all(result == world.size * (world.size + 1) / 2))
    if not world.allreduce(right, op=MPI.LAND):
        raise SystemExit("the ring added up wrong sums")
    if world.rank == 0:
        print(json.dumps(statistics.median(seconds[1:])))


def all_reduce(world: MPI.Comm, given: np.ndarray, result: np.ndarray, arriving: np.ndarray) -> None:
    """Each block goes around twice: once to be added up, once to be handed out."""
    size, rank = world.size, world.rank
    bounds = [len(given) * block // size for block in range(size + 1)]
    blocks = [slice(bounds[block], bounds[block + 1]) for block in range(size)]
    before, after = (rank - 1) % size, (rank + 1) % size
    for step in range(size - 1):
        leaving = (given if step == 0 else result)[blocks[(rank - step) % size]]
        here = blocks[(rank - step - 1) % size]
        landing = arriving[: here.stop - here.start]
        MPI.Request.Waitall([world.Irecv(landing, before), world.Isend(leaving, after)])
        np.add(given[here], landing, out=result[here])
    for step in range(size - 1):
        leaving = result[blocks[(rank + 1 - step) % size]]
        landing = result[blocks[(rank - step) % size]]
        MPI.Request.Waitall([world.Irecv(landing, before), world.Isend(leaving, after)])


if __name__ == "__main__":
    main()
