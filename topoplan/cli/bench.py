"""``topoplan bench``: run a plan on real arrays, check every element, and time it in the columns of nccl-tests."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from topoplan.cli import arguments
from topoplan.cli.output import counted, plan_notes, print_json, print_notes
from topoplan.cli.progress import progress_line
from topoplan.cli.sources import read_plan
from topoplan.errors import UsageError
from topoplan.plans.plan import Plan
from topoplan.plans.size_plans import SizePlans
from topoplan.simulation.model import bus_factor
from topoplan.units import format_size

if TYPE_CHECKING:
    from collectives import Communicator

REPEATS = 5

DTYPES = (
    *("float16", "float32", "float64", "int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
)

BUFFERS = 5
"""Arrays of full size for each rank: input, result, a reduction's scratch, and two for the check."""

METHODS = {
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
}
"""The communicator's method for each collective."""


def add_options(parser: arguments.OneLineParser) -> None:
    """Add the options of ``bench``."""
    arguments.add_plan_file(parser)
    parser.add_argument(
        "--backend", default="loopback", metavar="B", help="loopback: all ranks in this process"
    )
    arguments.add_sizes(parser, "64KB:16MB")
    parser.add_argument(
        "--dtype", default="float32", metavar="T", help=f"{', '.join(DTYPES)} (default: float32)"
    )
    arguments.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Run a plan among ranks of this process; exit status 1 if any element of a result is wrong."""
    from collectives import Communicator

    if options.dtype not in DTYPES:
        raise UsageError(f"dtype {options.dtype!r} is unknown; use one of {', '.join(DTYPES)}")
    dtype = np.dtype(options.dtype)
    plan = read_plan(options.plan)
    _check_memory(max(options.sizes), len(plan.ranks))
    rows = []
    with Communicator(plan, options.backend) as communicator, progress_line("running") as progress:
        for nbytes in options.sizes:
            if progress:
                progress(f"{format_size(nbytes)} …")
            rows.append(_measure(communicator, plan, nbytes, dtype))
    notes = plan_notes(plan)
    if options.json:
        print_json(
            {
                "collective": plan.collective,
                "machine": plan.topology.name,
                "ranks": list(plan.ranks),
                "backend": options.backend,
                "rows": rows,
                "notes": notes,
            }
        )
    else:
        ranks = counted(len(plan.ranks), "rank")
        print(f"# {plan.collective} of {ranks}, {options.backend}, median of {REPEATS}")
        print(_format_table(rows))
        print_notes(*notes)
    return 1 if any(row["wrong"] for row in rows) else 0


def _check_memory(nbytes: int, ranks: int) -> None:
    """Refuse what this machine's memory cannot hold: asking for it may end the process without a word."""
    needed = BUFFERS * nbytes * ranks
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise UsageError(
            f"{format_size(nbytes)} on {ranks} ranks of one process need {format_size(needed)} of memory, and "
            f"there are {format_size(memory)}; choose smaller --sizes"
        )


def _format_table(rows: list[dict[str, int | float | str]]) -> str:
    heads = (
        ("size", "count", "type", "redop", "time", "algbw", "busbw", "wrong"),
        ("(B)", "(elements)", "", "", "(us)", "(GB/s)", "(GB/s)", ""),
    )
    lines = ["# {:>12}  {:>12}  {:>8}  {:>6}  {:>11}  {:>7}  {:>7}  {:>6}".format(*head) for head in heads]
    lines += [
        f"  {row['size']:>12}  {row['count']:>12}  {row['type']:>8}  {row['redop']:>6}  {row['time']:>11.1f}  "
        f"{row['algbw']:>7.2f}  {row['busbw']:>7.2f}  {row['wrong']:>6}"
        for row in rows
    ]
    return "\n".join(lines)


def _measure(
    communicator: Communicator, plan: Plan | SizePlans, nbytes: int, dtype: np.dtype[np.generic]
) -> dict[str, int | float | str]:
    """Time one size and count wrong elements. Small whole numbers, so that every dtype adds them exactly."""
    size = len(plan.ranks)
    count = nbytes // dtype.itemsize
    if plan.collective in ("allgather", "reduce_scatter"):
        count -= count % size
    each = count // size if plan.collective == "allgather" else count
    inputs = [((np.arange(each) + rank) % 7).astype(dtype) for rank in range(size)]
    method = getattr(communicator, METHODS[plan.collective])
    results = method(inputs)
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        method(inputs, out=results)
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds)
    algbw = count * dtype.itemsize / median / 1e9
    return {
        "size": count * dtype.itemsize,
        "count": count // size if plan.collective in ("allgather", "reduce_scatter") else count,
        "type": dtype.name,
        "redop": "sum" if plan.collective in ("allreduce", "reduce", "reduce_scatter") else "none",
        "time": median * 1e6,
        "algbw": algbw,
        "busbw": algbw * bus_factor(plan.collective, size),
        "wrong": count_wrong(plan, inputs, results),
    }


def count_wrong(
    plan: Plan | SizePlans,
    inputs: list[NDArray[np.generic]],
    results: list[NDArray[np.generic] | None],
) -> int:
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
