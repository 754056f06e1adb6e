"""``topoplan bench``: run a plan on real arrays, check every element, and time it in the columns of nccl-tests."""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from numpy.typing import NDArray

from topoplan.cli import arguments
from topoplan.cli.output import print_json, table
from topoplan.errors import UsageError
from topoplan.plans.plan import Plan
from topoplan.simulation.model import bus_factor
from topoplan.units import parse_sizes

REPEATS = 5


def add_to(commands: argparse._SubParsersAction[arguments.OneLineParser]) -> None:
    """Add the command ``bench``."""
    parser = commands.add_parser(
        "bench", help="run a plan on real arrays, checked and timed", description=run.__doc__
    )
    parser.add_argument("plan", metavar="PLAN.json", help="a plan file, or - for stdin")
    parser.add_argument(
        "--backend", default="loopback", metavar="B", help="loopback: all ranks in this process"
    )
    parser.add_argument(
        "--sizes",
        default="64KB:16MB",
        metavar="S",
        help="1KB:1GB doubling, or 64KB,1MB,… (default: 64KB:16MB)",
    )
    parser.add_argument(
        "--dtype", default="float32", metavar="T", help="float16, float32, float64, int32, … "
    )
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run a plan among ranks of this process; exit status 1 if any element of a result is wrong."""
    from collectives import Communicator

    plan = arguments.read_plan(options.plan)
    dtype = _dtype(options.dtype)
    rows = []
    with Communicator(plan, options.backend) as communicator:
        for nbytes in parse_sizes(options.sizes):
            rows.append(_measure(communicator, plan, nbytes, dtype))
    if options.json:
        print_json({"collective": plan.collective, "backend": options.backend, "rows": rows})
    else:
        print(f"# {plan.collective} of {len(plan.ranks)} ranks, {options.backend}, median of {REPEATS}")
        header = ("size (B)", "count", "type", "redop", "time (us)", "algbw (GB/s)", "busbw (GB/s)", "#wrong")
        cells = [
            (
                str(row["size"]),
                str(row["count"]),
                str(row["type"]),
                str(row["redop"]),
                f"{row['time']:.1f}",
                f"{row['algbw']:.2f}",
                f"{row['busbw']:.2f}",
                str(row["wrong"]),
            )
            for row in rows
        ]
        print(table(header, cells))
    return 1 if any(row["wrong"] for row in rows) else 0


def _dtype(name: str) -> np.dtype[np.generic]:
    try:
        dtype = np.dtype(name)
    except TypeError:
        raise UsageError(f"dtype {name!r} is unknown; use float32, int32 or another numpy name") from None
    if dtype.kind not in "iuf":
        raise UsageError(f"dtype {name!r} is no integer or float; use float32, int32, …")
    return dtype


def _measure(
    communicator: object, plan: Plan, nbytes: int, dtype: np.dtype[np.generic]
) -> dict[str, int | float | str]:
    """Time one size and count wrong elements. Small whole numbers, so that every dtype adds them exactly."""
    size = len(plan.ranks)
    count = nbytes // dtype.itemsize
    if plan.collective in ("allgather", "reduce_scatter"):
        count -= count % size
    each = count // size if plan.collective == "allgather" else count
    inputs = [((np.arange(each) + rank) % 7).astype(dtype) for rank in range(size)]
    call = {
        "allreduce": "all_reduce",
        "broadcast": "broadcast",
        "reduce": "reduce",
        "allgather": "all_gather",
        "reduce_scatter": "reduce_scatter",
    }[plan.collective]
    method = getattr(communicator, call)
    results = method(inputs)
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        method(inputs, out=results)
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds)
    algbw = count * dtype.itemsize / median / 1e9
    reduces = plan.collective in ("allreduce", "reduce", "reduce_scatter")
    return {
        "size": count * dtype.itemsize,
        "count": count,
        "type": dtype.name,
        "redop": "sum" if reduces else "none",
        "time": median * 1e6,
        "algbw": algbw,
        "busbw": algbw * bus_factor(plan.collective, size),
        "wrong": _wrong(plan, inputs, results),
    }


def _wrong(plan: Plan, inputs: list[NDArray[np.generic]], results: list[NDArray[np.generic] | None]) -> int:
    """Elements that differ from what plain numpy gives."""
    if plan.collective == "allgather":
        expected = [np.concatenate(inputs)] * len(inputs)
    elif plan.collective == "broadcast":
        assert plan.root is not None, "a broadcast has a root"
        expected = [inputs[plan.root]] * len(inputs)
    else:
        total = np.sum(np.stack(inputs), axis=0, dtype=inputs[0].dtype)
        expected = [total] * len(inputs)
        if plan.collective == "reduce_scatter":
            expected = np.split(total, len(inputs))
    return sum(
        int(np.count_nonzero(result != wanted))
        for result, wanted in zip(results, expected, strict=True)
        if result is not None
    )
