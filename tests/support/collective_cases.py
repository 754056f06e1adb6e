"""Collectives of every kind, number of ranks, dtype and reduction, with the digests of loopback's results."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import Communicator
from tests.support.hand_plans import forest_plan
from topoplan.plans.plan import ALL_COLLECTIVES

REDUCTIONS = ("allreduce", "reduce", "reduce_scatter")
DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "float32", "float64", "complex64", "complex128")


@dataclass(frozen=True)
class Case:
    """One collective; the elements are those of one rank's array."""

    ranks: int
    collective: str
    shape: str
    count: int
    dtype: str = "float32"
    op: str = "sum"
    chunk_bytes: int = 65536
    in_place: bool = False


def cases(size: int) -> Iterator[Case]:
    """Every collective on 2 to ``size`` ranks, every dtype and reduction on 4."""
    for ranks in range(2, size + 1):
        for number, collective in enumerate(ALL_COLLECTIVES):
            shape = ("chain", "binary", "star")[(ranks + number) % 3]
            for count in (0, 1, 7, 1000003):
                yield Case(ranks, collective, shape, _fitting(collective, ranks, count))
    for shape in ("star", "chain", "binary"):
        for collective in ALL_COLLECTIVES:
            yield Case(6, collective, shape, 6 * 177, chunk_bytes=60)
            yield Case(5, collective, shape, 5 * 40, chunk_bytes=1 << 30)
            if collective in ("allreduce", "broadcast"):
                yield Case(3, collective, shape, 5000, chunk_bytes=100, in_place=True)
    for dtype in (*DTYPES, *FLOATS):
        for op in ("sum", "prod", "min", "max", "avg"):
            if (dtype != "bool" or op in ("min", "max")) and (dtype[0] != "c" or op not in ("min", "max")):
                yield Case(4, REDUCTIONS[len(dtype) % 3], "chain", 1024, dtype, op, chunk_bytes=200)
        yield Case(4, "allgather", "binary", 33, dtype, chunk_bytes=16)


def _fitting(collective: str, ranks: int, count: int) -> int:
    return count + -count % ranks if collective in ("reduce_scatter", "alltoall") else count


def inputs(case: Case) -> list[NDArray[Any]]:
    """What each rank puts in: numbers that do not add up exactly, of both signs, with a NaN where there can be."""
    generator = np.random.default_rng(zlib.crc32(repr(case).encode()))
    arrays = []
    for rank in range(case.ranks):
        values = generator.standard_normal(case.count) * (3 if case.dtype in FLOATS else 50)
        if case.dtype in FLOATS and case.count > 10 and rank == 1:
            values[5] = np.nan
        array = (
            values > 0 if case.dtype == "bool" else values.astype("int64" if case.dtype in DTYPES else "f8")
        )
        if case.dtype.startswith("complex"):
            array = array + 1j * array[::-1]
        arrays.append(array.astype(case.dtype))
    return arrays


def collective_of(comm: Communicator, case: Case) -> Callable[..., Any]:
    """The communicator's method for a case."""
    names = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
    method: Callable[..., Any] = getattr(comm, names.get(case.collective, case.collective))
    if case.collective not in REDUCTIONS:
        return method
    return lambda array, **options: method(array, op=case.op, **options)


def digest(result: NDArray[Any] | None) -> str:
    """What two equal results have in common; any NaN is as good as another."""
    if result is None:
        return "none"
    if result.dtype.kind in "fc":
        result = np.where(np.isnan(result), np.asarray(np.nan, result.dtype), result)
    return f"{result.dtype} {result.shape} {hashlib.sha256(result.tobytes()).hexdigest()[:12]}"


def expected(case: Case) -> list[str]:
    """The digests of the loopback back end's results."""
    plan = forest_plan(case.ranks, case.collective, case.shape)
    with Communicator(plan, chunk_bytes=case.chunk_bytes) as comm:
        return [digest(result) for result in collective_of(comm, case)(inputs(case))]
