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
from collectives.peers.control_plane import MpiControlPlane
from tests.support.contract import GROUPS, MESH, cases, run_cases, sums_of_mesh
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
    backend.close()
    backend.close()
    # MPI would keep the processors busy with waiting
    last = world.Ibarrier()
    while not last.Test():
        time.sleep(0.01)
    return found


def control(what: str) -> str:
    """What this rank hears when the last one reports trouble ("tell") or does not come ("away")."""
    from mpi4py import MPI

    world = MpiControlPlane(MPI.COMM_WORLD)
    assert world.gather(b"%d" % world.rank, timeout=20) == [b"%d" % rank for rank in range(world.size)]
    if world.rank == world.size - 1:
        if what == "tell":
            world.tell(BackendError("out of paper: now", rank=world.rank, peer=0, step=7))
        time.sleep(1.5 * (what == "away"))
    try:
        world.gather(b"again", timeout=0.5)
        found = ""
    except BackendError as error:
        assert world.trouble() is not None
        found = str(error)
    world.close()
    return found


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


def _other_call(**different: Any) -> Callable[[MpiBackend, int], None]:
    """An allreduce in which rank 1 has other arguments."""

    def run(backend: MpiBackend, rank: int) -> None:
        given = {"count": 1000, "dtype": "float32", "shape": "chain", "op": "sum", "chunk": 256}
        if rank == 1:
            given |= different
        out = np.full(given["count"], 5, given["dtype"])
        plan = forest_plan(backend.size, "allreduce", given["shape"])
        comm = Communicator(plan, backend, chunk_bytes=given["chunk"])
        try:
            comm.all_reduce(np.ones(given["count"], given["dtype"]), op=given["op"], out=out)
        finally:
            assert np.all(out == 5), "the caller's array was touched"

    return run


def _no_array(backend: MpiBackend, rank: int) -> None:
    comm = Communicator(forest_plan(backend.size, "allreduce", "chain"), backend)
    comm.all_reduce([1.0, 2.0] if rank == 1 else np.ones(2))


def _after_refusals(backend: MpiBackend, rank: int) -> None:
    """Calls that are wrong on all ranks, on one, and other ones on one, and a right call behind each."""
    comm = Communicator(forest_plan(backend.size, "allreduce", "chain"), backend)
    calls: list[Callable[[], object]] = [
        lambda: comm.reduce_scatter(np.ones(backend.size + 1)),
        lambda: comm.all_reduce([1.0, 2.0] if rank == 1 else np.ones(2)),
        lambda: comm.all_gather(np.ones(2)) if rank == 1 else comm.all_reduce(np.ones(2)),
        lambda: comm.broadcast(np.ones(3), root=99 if rank else 0),
        lambda: comm.sparse_all_reduce(np.ones(30), density=2 if rank == 2 else 0.1, exchange="pairs"),
    ]
    for call in calls:
        try:
            call()
        except UsageError:
            assert comm.all_reduce(np.ones(2)).tolist() == [backend.size] * 2
        else:
            raise AssertionError("it is refused")


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
    "count": _other_call(count=1001),
    "dtype": _other_call(dtype="float64"),
    "plan": _other_call(shape="star"),
    "op": _other_call(op="max"),
    "chunk": _other_call(chunk=512),
    "no array": _no_array,
    "after refusals": _after_refusals,
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
    """Run a scenario: results or mistakes, and a form."""
    from mpi4py import MPI

    scenario, form = sys.argv[1].split()
    found = {"results": results, "mistakes": mistakes, "control": control}[scenario](form)
    Path(sys.argv[2], f"{MPI.COMM_WORLD.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
