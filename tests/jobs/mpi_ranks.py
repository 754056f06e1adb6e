"""What one process of the mpi tests does: ``mpi_ranks.py SCENARIO FOLDER`` leaves a file of JSON for each rank."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from collectives import Communicator
from collectives.backends.mpi.mpi_backend import MpiBackend
from tests.support.collective_cases import Case, cases, collective_of, digest, inputs
from tests.support.hand_plans import forest_plan
from tests.support.sparse_steps import TWO_SERVERS, as_it_is, read_only, steps_of_each, taken
from topoplan.errors import BackendError, UsageError

FORMS: dict[str, Callable[[int], dict[str, Any]]] = {
    "shared": lambda size: {},
    "messages": lambda size: {"shared": False},
    "mixed": lambda size: {"hosts": [rank // 2 for rank in range(size)]},
}
"""How the ranks exchange: options of `MpiBackend`."""

FEWER = (2, 4)
"""Numbers of ranks for which messages are tested; shared memory is for all."""

LARGE = 1_000_000
"""Elements from which on a case is large."""


def chosen(form: str, size: int) -> list[Case]:
    """The cases of a form: with "every" before it all of them, else the large ones on the most ranks only."""
    *every, form = form.split("-")
    sizes = range(2, size + 1) if form == "shared" else FEWER
    return [
        case
        for case in cases(size)
        if case.ranks in sizes and (every or case.count < LARGE or case.ranks == max(sizes))
    ]


def results(form: str) -> dict[str, Any]:
    """Digests of this rank's results, by case; "sparse" are those of sparse allreduces on four ranks."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    backends: dict[int, MpiBackend] = {}
    listed = chosen(form, world.size)
    form = form.split("-")[-1]
    for size in sorted({case.ranks for case in listed}):
        part = world.Split(0 if world.rank < size else MPI.UNDEFINED, world.rank)
        if part != MPI.COMM_NULL:
            backends[size] = MpiBackend(part, timeout=60, **FORMS[form](size))
    found: dict[str, Any] = {
        repr(case): _run(case, backends[case.ranks]) for case in listed if case.ranks in backends
    }
    if 4 in backends:
        found["sparse"] = taken(Communicator(TWO_SERVERS, backends[4]), steps_of_each(), read_only, as_it_is)
    for backend in backends.values():
        backend.close()
        backend.close()
    # MPI would keep the processors busy with waiting
    last = world.Ibarrier()
    while not last.Test():
        time.sleep(0.01)
    return found


def _run(case: Case, backend: MpiBackend) -> str:
    """The digest of this rank's result; two calls, of which the second is in the background."""
    (rank,) = backend.ranks
    comm = Communicator(
        forest_plan(case.ranks, case.collective, case.shape), backend, chunk_bytes=case.chunk_bytes
    )
    array = inputs(case)[rank]
    before = array.copy()
    once = collective_of(comm, case)(array)
    if before.tobytes() != array.tobytes():
        return "changed its input"
    options = {"out": array} if case.in_place else {}
    twice = collective_of(comm, case)(array, async_op=True, **options).wait()
    if case.in_place and twice is not array:
        return "put its result elsewhere"
    return digest(once) if digest(once) == digest(twice) else "differs from run to run"


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
    found = {"results": results, "mistakes": mistakes}[scenario](form)
    Path(sys.argv[2], f"{MPI.COMM_WORLD.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
