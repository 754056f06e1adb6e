"""What one process of the mpi tests does: ``mpi_ranks.py SCENARIO FOLDER`` leaves a file of JSON for each rank."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import topoplan
from collectives import Communicator
from collectives.backends.mpi.mpi_backend import MpiBackend
from tests.collectives.backends.test_uneven_collectives import check_on_one_rank
from tests.support.contract import GROUPS, MESH, cases, refusals, run_cases, sums_of_mesh
from tests.support.hand_plans import forest_plan
from tests.support.sparse_steps import TWO_SERVERS, as_it_is, read_only, steps_of_each, taken
from topoplan.errors import BackendError, UsageError

FORMS: dict[str, Callable[[int], dict[str, Any]]] = {
    "shared": lambda size: {},
    "messages": lambda size: {"shared": False},
    "mixed": lambda size: {"hosts": [rank // 2 for rank in range(size)]},
}
"""How the ranks exchange: options of `MpiBackend`."""


def results(form: str) -> dict[str, Any]:
    """Digests of this rank's results, by group of the contract; on four ranks "sparse" too."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    backend = MpiBackend(timeout=60, **FORMS[form](world.size))
    found: dict[str, Any] = {group: run_cases(backend, cases(group, world.size)) for group in GROUPS}
    if world.size == 4:
        found["sparse"] = taken(Communicator(TWO_SERVERS, backend), steps_of_each(), read_only, as_it_is)
        found["mesh"] = sums_of_mesh(Communicator(topoplan.plan(MESH.topology, "allreduce"), backend))
        found["uneven"] = uneven_blocks(Communicator(topoplan.plan("dgx-1v", gpus=[1, 4, 5, 7]), backend))
    backend.close()
    backend.close()
    # MPI would keep the processors busy with waiting
    last = world.Ibarrier()
    while not last.Test():
        time.sleep(0.01)
    return found


def uneven_blocks(comm: Communicator) -> list[int]:
    """Return the lengths of blocks that this rank gets, in which all elements tell source and destination."""
    counts = [[(3 * source + 2 * rank) % 5 * 700 for rank in range(4)] for source in range(4)]
    given = np.repeat(10 * comm.rank + np.arange(4), counts[comm.rank])
    found = [comm.all_to_all_v(given, counts[comm.rank]) for _ in range(2)]
    lengths = [int(np.count_nonzero(found[1] == 10 * source + comm.rank)) for source in range(4)]
    assert all(np.array_equal(one, np.repeat(10 * np.arange(4) + comm.rank, lengths)) for one in found)
    for rows, root in (([700, 0, 3, 90_000], 1), ([0, 0, 5000, 0], 3)):
        check_on_one_rank(comm, rows, (), root)
    return lengths


def mistakes(form: str) -> dict[str, Any]:
    """What each rank raises where one of them does something else."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    found: dict[str, Any] = {}
    for name, mistake in MISTAKES.items():
        if (form, name) == ("messages", "leaves early"):
            continue  # without shared memory that is a rank that does not answer
        backend = MpiBackend(timeout=5, **FORMS[form](world.size))
        found[name] = _raised(lambda mistake=mistake, backend=backend: mistake(backend, world.rank))
        found[f"{name}, closing"] = _raised(backend.close)
        world.Barrier()
    backend = MpiBackend(timeout=20, **FORMS[form](world.size))
    found["refusals"] = refusals(backend)
    backend.close()
    found["hosts"] = _raised(lambda: MpiBackend(hosts=[0]))
    found["chunks"] = _raised(lambda: _find_chunks(MpiBackend(timeout=5, **FORMS[form](world.size))))
    return found


def _raised(what: Callable[[], object]) -> dict[str, Any]:
    try:
        what()
    except BackendError as error:
        return {"kind": type(error).__name__, "text": str(error), "rank": error.rank, "peer": error.peer}
    except UsageError as error:
        return {"kind": "UsageError", "text": str(error)}
    return {"kind": "nothing"}


def _after_failure(backend: MpiBackend, rank: int) -> None:
    comm = Communicator(forest_plan(backend.size, "allreduce", "chain"), backend)
    try:
        backend.largest(1.0) if rank == 1 else comm.all_reduce(np.ones(2))
    except BackendError:
        comm._open()._note_failure(BackendError("as a collective would"))
        comm.all_reduce(np.ones(2))


def _leaves_early(backend: MpiBackend, rank: int) -> None:
    comm = Communicator(forest_plan(backend.size, "allreduce", "chain"), backend)
    comm.all_reduce(np.ones(2))
    if rank != 1:
        comm.all_reduce(np.ones(2))


def _wrong_size(backend: MpiBackend, rank: int) -> None:
    Communicator(forest_plan(backend.size + 1, "allreduce", "chain"), backend)


def _measures(backend: MpiBackend, rank: int) -> None:
    if rank == 1:
        backend.largest(1.0)
    else:
        Communicator(forest_plan(backend.size, "allreduce", "chain"), backend).all_reduce(np.ones(2))


MISTAKES: dict[str, Callable[[MpiBackend, int], None]] = {
    "after failure": _after_failure,
    "leaves early": _leaves_early,
    "wrong size": _wrong_size,
    "measures": _measures,
}


def _find_chunks(backend: MpiBackend) -> None:
    """Calls without a chunk size, of which all ranks must choose the same."""
    with Communicator(forest_plan(backend.size, "allreduce", "chain"), backend) as comm:
        for _ in range(5):
            assert np.all(comm.all_reduce(np.ones(1 << 19, np.float32)) == backend.size)
        (rank,) = backend.ranks
        assert backend.largest(float(rank)) == backend.size - 1


def main() -> None:
    from mpi4py import MPI

    scenario, form = sys.argv[1].split()
    found = {"results": results, "mistakes": mistakes}[scenario](form)
    Path(sys.argv[2], f"{MPI.COMM_WORLD.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
