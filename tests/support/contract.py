"""The contract of back ends: collectives x trees x sizes x roots, and types x reductions, with the bits of loopback."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import topoplan
from collectives import Communicator
from tests.support.hand_plans import SHAPES, forest_plan
from topoplan.errors import UsageError
from topoplan.plans.plan import ALL_COLLECTIVES, Plan
from topoplan.schedules.low_latency import one_shot_plan

REDUCTIONS = ("allreduce", "reduce", "reduce_scatter")
INTEGERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "float32", "float64", "complex64", "complex128")
SIZES = (0, 1, 7, 1003)
ONE_SHOT = "one shot"
GROUPS = (*ALL_COLLECTIVES, "types", "in place", "exchanges")


@dataclass(frozen=True)
class Case:
    ranks: int
    collective: str
    shape: str
    count: int
    dtype: str = "float32"
    op: str = "sum"
    chunk_bytes: int = 65536
    in_place: bool = False
    root: int = 1


@cache
def cases(group: str, ranks: int = 4) -> tuple[Case, ...]:
    """The cases of a group: a collective, all types, results in the place of the input, or exchanges of arrays."""
    kinds = {"types": _types, "in place": _in_place, "exchanges": _exchanges}
    return tuple(kinds.get(group, _sizes)(group, ranks))


def _sizes(collective: str, ranks: int) -> Iterator[Case]:
    for shape in sorted(SHAPES):
        for number, count in enumerate(SIZES):
            root, chunk = (ranks - 1 if number % 2 else 0), (60 if number % 2 else 1 << 30)
            yield Case(
                ranks, collective, shape, fitting(collective, ranks, count), chunk_bytes=chunk, root=root
            )
    yield Case(ranks, collective, "chain", fitting(collective, ranks, 100_003))


def _types(group: str, ranks: int) -> Iterator[Case]:
    for dtype in (*INTEGERS, *FLOATS):
        for op in ("sum", "prod", "min", "max", "avg"):
            if (dtype != "bool" or op in ("min", "max")) and (dtype[0] != "c" or op not in ("min", "max")):
                collective = REDUCTIONS[len(dtype) % 3]
                yield Case(ranks, collective, "chain", 32 * ranks, dtype, op, chunk_bytes=200)
        yield Case(ranks, "allgather", "binary", 33, dtype, chunk_bytes=16)


def _in_place(group: str, ranks: int) -> Iterator[Case]:
    for shape in sorted(SHAPES):
        for collective in ("allreduce", "broadcast"):
            yield Case(ranks, collective, shape, 500, chunk_bytes=100, in_place=True)


def _exchanges(group: str, ranks: int) -> Iterator[Case]:
    for count in SIZES:
        yield Case(ranks, "allreduce", ONE_SHOT, count)
    for dtype, op in (("float64", "avg"), ("int32", "avg"), ("float16", "max"), ("uint8", "prod")):
        yield Case(ranks, "allreduce", ONE_SHOT, 177, dtype, op, in_place=op == "max")


def plan_of(case: Case) -> Plan:
    """The plan of a case: a forest by hand, or one exchange of whole arrays."""
    if case.shape == ONE_SHOT:
        return one_shot_plan(topoplan.load("dgx-1v"), gpus=range(case.ranks))
    return forest_plan(case.ranks, case.collective, case.shape, root=case.root)


def fitting(collective: str, ranks: int, count: int) -> int:
    """Return the count, or the next one that the ranks divide."""
    return count + -count % ranks if collective in ("reduce_scatter", "alltoall") else count


def inputs(case: Case) -> list[NDArray[Any]]:
    """Return the input of each rank: numbers of both signs with inexact sums, with a NaN if the type has one."""
    generator = np.random.default_rng(zlib.crc32(repr(case).encode()))
    arrays = []
    for rank in range(case.ranks):
        values = generator.standard_normal(case.count) * (3 if case.dtype in FLOATS else 50)
        if case.dtype in FLOATS and case.count > 10 and rank == 1:
            values[5] = np.nan
        array = (
            values > 0 if case.dtype == "bool" else values.astype("i8" if case.dtype in INTEGERS else "f8")
        )
        if case.dtype.startswith("complex"):
            array = array + 1j * array[::-1]
        arrays.append(array.astype(case.dtype))
    return arrays


def collective_of(comm: Communicator, case: Case) -> Callable[..., Any]:
    names = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
    method: Callable[..., Any] = getattr(comm, names.get(case.collective, case.collective))
    options: dict[str, Any] = {}
    if case.collective in REDUCTIONS:
        options["op"] = case.op
    if case.collective in ("broadcast", "reduce"):
        options["root"] = case.root
    return lambda array, **more: method(array, **options, **more)


def digest(result: NDArray[Any] | None) -> str:
    """Return a key that equal results share; all NaNs are equal."""
    if result is None:
        return "none"
    if result.dtype.kind in "fc":
        result = np.where(np.isnan(result), np.asarray(np.nan, result.dtype), result)
    return f"{result.dtype} {result.shape} {hashlib.sha256(result.tobytes()).hexdigest()[:12]}"


@cache
def expected(case: Case) -> tuple[str, ...]:
    """The digests of the results of one thread on numpy arrays, one for each rank."""
    with Communicator(plan_of(case), chunk_bytes=case.chunk_bytes) as comm:
        return tuple(digest(result) for result in collective_of(comm, case)(inputs(case)))


def run_cases(
    backend: Any,
    listed: Sequence[Case],
    *,
    here: Callable[[NDArray[Any]], Any] = np.copy,
    back: Callable[[Any], NDArray[Any]] = np.asarray,
) -> list[list[str]]:
    """Run each case three times on the ranks of a back end, which stays open: then in the background, then prepared.

    `here` makes an array of the back end of a numpy array, `back` the reverse. Returns the digests of this process's
    ranks, by case, or what is wrong with them. A barrier ends them.
    """
    found = [_run(backend, case, here, back) for case in listed]
    Communicator(plan_of(listed[-1]), backend).barrier()
    return found


def _run(backend: Any, case: Case, here: Any, back: Any) -> list[str]:
    comm = Communicator(plan_of(case), backend, chunk_bytes=case.chunk_bytes)
    given = inputs(case)
    arrays = [here(given[rank]) for rank in backend.ranks]
    alone = len(arrays) < case.ranks
    argument = arrays[0] if alone else arrays
    once = collective_of(comm, case)(argument)
    first = [None if one is None else digest(back(one)) for one in ([once] if alone else once)]
    if any(
        back(one).tobytes() != given[rank].tobytes() for one, rank in zip(arrays, backend.ranks, strict=True)
    ):
        return ["changed its input"]
    twice = collective_of(comm, case)(
        argument, async_op=True, **({"out": argument} if case.in_place else {})
    ).wait()
    second = [None if one is None else digest(back(one)) for one in ([twice] if alone else twice)]
    if case.in_place and not all(a is b for a, b in zip([twice] if alone else twice, arrays, strict=True)):
        return ["put its result elsewhere"]
    if first != second:
        return ["differs from run to run"]
    for array, rank in zip(arrays if case.in_place else [], backend.ranks, strict=False):
        back_into(array, here(given[rank]))
    return (
        [one or "none" for one in first]
        if _prepared(comm, case, arrays, given, here, back) == first
        else ["differs when it is prepared"]
    )


def back_into(array: Any, values: Any) -> None:
    """Fill an array of any library."""
    array[...] = values


def _prepared(
    comm: Communicator, case: Case, arrays: Any, given: Any, here: Any, back: Any
) -> list[str | None]:
    """The digests of a prepared call that ran on other inputs, then on these, waited for, and ran again."""
    alone = len(arrays) < case.ranks
    argument = arrays[0] if alone else arrays
    options = {"op": case.op} if case.collective in REDUCTIONS else {}
    if case.collective in ("broadcast", "reduce"):
        options |= {"root": case.root}
    call = comm.prepare(case.collective, argument, **options, **({"out": argument} if case.in_place else {}))
    found = []
    for start in range(3):
        for array, rank in zip(arrays, comm.ranks, strict=True):
            back_into(array, here(given[rank] if start else np.zeros_like(given[rank])))
        if start == 1:
            call.start()
        result = call.wait() if start == 1 else call()
        found.append([None if one is None else digest(back(one)) for one in ([result] if alone else result)])
    return found[2] if found[1] == found[2] else ["differs from start to start"]


def _two_prepared(comm: Communicator, ones: Any) -> list[Callable[[], Any]]:
    """Two prepared calls of one kind; the second is started and waited for."""

    def other() -> Any:
        calls[1].start()
        return calls[1].wait()

    calls = [comm.prepare("allreduce", ones(8)) for _ in range(2)]
    for call in calls:
        call()
    return [calls[0], other]


def _prepared_or_not(comm: Communicator, ones: Any) -> list[Callable[[], Any]]:
    """A call that is prepared, and one like it that is not."""
    return [_two_prepared(comm, ones)[0], lambda: comm.all_reduce(ones(8))]


MISTAKES: dict[str, Callable[[Communicator, Any, bool], Any]] = {
    "count": lambda comm, ones, odd: comm.all_reduce(ones(8 + odd)),
    "count of none": lambda comm, ones, odd: comm.all_reduce(ones(100 * odd)),
    "dtype": lambda comm, ones, odd: comm.all_reduce(ones(8, "f4" if odd else "f8")),
    "op": lambda comm, ones, odd: comm.all_reduce(ones(8), op="max" if odd else "sum"),
    "root": lambda comm, ones, odd: comm.broadcast(ones(8), root=int(odd)),
    "collective": lambda comm, ones, odd: comm.all_gather(ones(8)) if odd else comm.all_reduce(ones(8)),
    "shape": lambda comm, ones, odd: comm.all_reduce(ones((4, 6) if odd else (6, 4))),
    "barrier": lambda comm, ones, odd: comm.barrier() if odd else comm.all_gather(ones(8)),
    "list": lambda comm, ones, odd: comm.all_reduce([1.0] if odd else ones(1)),
    "divided": lambda comm, ones, odd: comm.reduce_scatter(ones(comm.size + odd)),
    "blocks": lambda comm, ones, odd: comm.all_to_all(ones(comm.size + odd)),
    "out": lambda comm, ones, odd: comm.all_gather(ones(2), out=ones(2) if odd else None),
    "unknown op": lambda comm, ones, odd: comm.reduce(
        ones(2), op="xor" if odd else "sum", async_op=True
    ).wait(),
    "prepared": lambda comm, ones, odd: comm.prepare("allreduce", ones(8 + odd)),
    "prepared alone": lambda comm, ones, odd: (
        comm.prepare("allreduce", ones(8)) if odd else comm.all_reduce(ones(8))
    ),
    "prepared order": lambda comm, ones, odd: _two_prepared(comm, ones)[odd](),
    "prepared or not": lambda comm, ones, odd: _prepared_or_not(comm, ones)[odd](),
    "unknown collective": lambda comm, ones, odd: comm.prepare("allreduc" if odd else "allreduce", ones(8)),
    "entries": lambda comm, ones, odd: comm.sparse_all_reduce(
        ones((4, 6) if odd else (6, 4), "f4"), density=0.5
    ),
    "density": lambda comm, ones, odd: comm.sparse_all_reduce(
        ones(40, "f4"), density=2 if odd else 0.1, key="density"
    ),
}
"""The differences of rank 1."""

DIFFER = ("count", "dtype", "op", "root", "collective", "shape", "plan", "chunk")
"""Mistakes of which the error names the argument."""

WRONG = (
    "list",
    "divided",
    "blocks",
    "out",
    "unknown op",
    "unknown collective",
    "density",
)  # mistakes that are wrong on any rank


def refusals(
    backend: Any,
    *,
    here: Callable[[NDArray[Any]], Any] = np.copy,
    back: Callable[[Any], NDArray[Any]] = np.asarray,
    **options: Any,
) -> dict[str, tuple[str, Any, Any]]:
    """The error of this rank for each mistake of rank 1, as text, rank and peer; right calls behind each are exact."""
    (rank,) = backend.ranks
    found: dict[str, tuple[str, Any, Any]] = {}

    def ones(shape: Any, dtype: str = "f8") -> Any:
        return here(np.ones(shape, dtype))

    def check(name: str, call: Callable[[], object], right: Communicator) -> None:
        with pytest.raises(UsageError) as raised:
            call()
        told: Any = raised.value
        found[name] = (str(told), getattr(told, "rank", None), getattr(told, "peer", None))
        for _ in range(3):  # over the rendezvous, and as a cached call
            assert back(right.all_reduce(ones(3))).tolist() == [backend.size] * 3, name

    plans = [forest_plan(backend.size, "allreduce", shape) for shape in ("star", "chain")]
    comm = Communicator(plans[0], backend, chunk_bytes=256, **options)
    for name, call in MISTAKES.items():
        if name in ("entries", "density") and backend.name == "nccl":
            continue  # stand-ins have no kernels of selections
        check(name, partial(call, comm, ones, rank == 1), comm)
        if name in WRONG:
            check(f"{name} on all", partial(call, comm, ones, True), comm)
    for name, plan, chunk in (("plan", plans[1], 256), ("chunk", plans[0], 512)):
        other = Communicator(
            *((plan, backend) if rank == 1 else (plans[0], backend)), chunk_bytes=chunk if rank == 1 else 256
        )
        check(name, lambda other=other: other.all_reduce(ones(64)), comm)
    return found


def check_refusals(ranks: list[dict[str, tuple[str, Any, Any]]]) -> None:
    """All ranks name rank 1, and the argument in which it differs."""
    for name in ranks[0]:
        for rank, found in enumerate(ranks):
            text, own, peer = found[name]
            if name in DIFFER:
                assert name in text, (name, text)
                assert (own, peer) == (rank, 1), (name, text)
            elif name.startswith("prepared "):
                assert (own, peer) == (rank, 1), (name, text)
                assert text.count("(allreduce, sum, 8 float64)") == 2, (name, text)
                assert text.startswith("rank 1 runs "), (name, text)
            elif name in WRONG and rank != 1:
                assert text.startswith("rank 1 refused the collective: "), (name, text)
                assert peer == 1, (name, text)
            elif name.endswith("on all"):
                assert peer is None, (name, text)


MESH = topoplan.plan_mesh(topoplan.load("dgx-1v"), {"dp": 2, "tp": 2}, gpus=[0, 1, 2, 3])
SUMS_OF_MESH = [[4.0, 3.0, 10.0], [6.0, 3.0, 10.0], [4.0, 7.0, 10.0], [6.0, 7.0, 10.0]]
"""Sums of ranks 1 to 4 along dp, along tp, and over all."""


def sums_of_mesh(comm: Communicator) -> list[float]:
    """Sums of this rank's number, from 1, along both axes at once and over all ranks; other axes are refused."""
    (rank,) = comm.ranks
    given = np.full(1000, rank + 1, np.float32)
    with comm.split(MESH, "dp") as dp, comm.split(MESH, "tp") as tp:
        handles = [dp.all_reduce(given, async_op=True), tp.all_reduce(given, async_op=True)]
        sums = [float(handle.wait()[1]) for handle in handles]
    with pytest.raises(
        UsageError, match="the ranks split by different meshes or axes; give all of them the same"
    ):
        comm.split(MESH, "dp" if rank else "tp")
    return [*sums, float(comm.all_reduce(given)[1])]
