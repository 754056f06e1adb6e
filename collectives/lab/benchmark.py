"""Time a communicator in the columns of nccl-tests, and check every element of every result.

Calls run back to back in blocks, as in MPI's own benchmarks: ranks pass one barrier before a block, so that their skew
after the barrier does not count in every small call. A block is timed on its slowest rank, from a common start, over
its calls; the row gives the median of the blocks. A call that fills `BLOCK_SECONDS` is a block.

Inputs are small whole numbers, so every dtype adds them exactly and rounding cannot hide a wrong element.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.backends.backend import TraceEvent
from collectives.communicator.communicator import Communicator
from collectives.tables.numpy_arrays import numpy_dtype
from topoplan.errors import UsageError
from topoplan.machine.topology import physical_memory
from topoplan.model import event_simulation
from topoplan.model.closed_form import simulate
from topoplan.model.event_simulation import SimulatedRun
from topoplan.plans.plan import Plans
from topoplan.units import bus_factor, counted, format_size

METHODS = {
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}
"""The communicator's method for each collective."""

DIVIDED = ("allgather", "reduce_scatter", "alltoall")
"""Collectives whose buffer has a block for each rank."""

REDUCING = ("allreduce", "reduce", "reduce_scatter")
"""Collectives that add up; bool, which has no sums, goes with the others."""

DTYPES = {
    **{"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16},
    **{"int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8},
    "bool": 1,
}
"""Bytes of an element of each dtype that collectives move."""

REPEATS = 5
"""Blocks of calls; the median counts."""

BLOCK_SECONDS = 0.02
"""Seconds of a block of calls, unless one call takes longer."""

MAX_CALLS = 1000
"""Most calls of a block."""


@dataclass(frozen=True, slots=True)
class BenchmarkRow:
    """One line of a benchmark.

    ``schedule`` is plan, ring, or the name of a library's own collective. ``size`` are the bytes of the buffer, the
    full gathered one for allgather and reduce_scatter; ``count`` are the elements as nccl-tests counts them, one rank's
    part for these. ``seconds`` are those of one call, ``algbw`` and ``busbw`` are in GB/s, ``wrong`` counts elements of
    all ranks. ``predicted`` are the model's seconds on links with given bandwidths, None without these.
    """

    schedule: str
    size: int
    count: int
    type: str
    redop: str
    seconds: float
    algbw: float
    busbw: float
    wrong: int
    predicted: float | None = None

    def to_object(self) -> dict[str, int | float | str]:
        """Return a JSON object; ``time`` in microseconds, as nccl-tests prints it."""
        return {
            "schedule": self.schedule,
            "size": self.size,
            "count": self.count,
            "type": self.type,
            "redop": self.redop,
            "time": self.seconds * 1e6,
            "algbw": self.algbw,
            "busbw": self.busbw,
            "wrong": self.wrong,
            **({} if self.predicted is None else {"model": self.predicted * 1e6}),
        }


def check_dtype(dtype: str, backend: str, collective: str) -> None:
    """Raise `UsageError` if a dtype is unknown, needs a missing package, or has no sums where they are needed.

    >>> check_dtype("bool", "loopback", "allreduce")
    Traceback (most recent call last):
    ...
    topoplan.errors.UsageError: bool has no sums; bench it with a plan for broadcast or allgather, or take uint8
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is unknown; use one of {', '.join(DTYPES)}")
    if dtype == "bool" and collective in REDUCING:
        raise UsageError("bool has no sums; bench it with a plan for broadcast or allgather, or take uint8")
    if backend != "torch":
        numpy_dtype(dtype)


def check_memory(nbytes: int, ranks: int, *, arrays: int) -> None:
    """Refuse arrays that this machine's memory cannot hold: the system may kill a process without a message."""
    needed = arrays * nbytes * ranks
    memory = physical_memory()
    if needed > memory:
        raise UsageError(
            f"{format_size(nbytes)} on {counted(ranks, 'rank')} need {format_size(needed)} of memory, and the machine "
            f"has {format_size(memory)}; choose smaller --sizes"
        )


def measure(
    communicator: Communicator,
    *,
    nbytes: int,
    dtype: str,
    schedule: str = "plan",
    own: Callable[[Any, Any], None] | None = None,
) -> BenchmarkRow:
    """Time the collective of a communicator's plan for one size, in blocks of calls; every rank must call it.

    ``nbytes`` is cut to whole elements and, for `DIVIDED` collectives, whole blocks. ``own``, a function of input and
    result, is an allreduce of another library on the same ranks, timed in place of the communicator's. The row is the
    same on every rank.

    >>> import topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allgather", gpus=[4, 5, 7])
    >>> with Communicator(plan) as comm:
    ...     row = measure(comm, nbytes=1000, dtype="float32")
    >>> row.size, row.count, row.wrong
    (996, 83, 0)
    """
    plan = communicator.plan
    size = len(plan.ranks)
    itemsize = DTYPES[dtype]
    count, each = _counts(plan, nbytes // itemsize)
    results, run = _prepare_call(communicator, each, dtype, own)
    while own is None and not communicator._settled(count * itemsize):
        run()
    run()
    calls = _calls_per_block(communicator, run)
    seconds = [_time_block(communicator, run, calls) for _ in range(REPEATS)]
    slowest = _reduce_over_ranks(communicator, np.array(seconds), "max")
    listed = [results] if communicator.one_rank else results
    wrong = count_wrong(
        plan,
        each,
        {
            rank: communicator.arrays.values(result)
            for rank, result in zip(communicator.ranks, listed, strict=True)
            if result is not None
        },
    )
    median = statistics.median(slowest.tolist()) / calls
    algbw = count * itemsize / median / 1e9
    return BenchmarkRow(
        schedule=schedule,
        size=count * itemsize,
        count=count // size if plan.collective in DIVIDED else count,
        type=dtype,
        redop="sum" if plan.collective in REDUCING else "none",
        seconds=median,
        algbw=algbw,
        busbw=algbw * bus_factor(plan.collective, size),
        wrong=int(_reduce_over_ranks(communicator, np.array([wrong]), "sum")[0]),
    )


def timeline(communicator: Communicator, *, nbytes: int, dtype: str) -> tuple[TraceEvent, ...]:
    """Return when each rank began and ended `REPEATS` calls back to back, and their steps (`Communicator.trace`).

    Every rank must call it, after `measure`, which settles the size of chunks. Calls come first, by rank, then steps,
    in nanoseconds; all ranks return the same. All processes of a host read one steady clock, which begins with the
    first call on that host; clocks of different hosts are not compared.

    >>> import topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[4, 5, 7])
    >>> with Communicator(plan) as comm:
    ...     spans = timeline(comm, nbytes=1000, dtype="float32")
    >>> spans[0].row, spans[0].what, spans[0].start, len(spans)
    ('ranks 0 to 2', 'call 0', 0, 5)
    """
    _, each = _counts(communicator.plan, nbytes // DTYPES[dtype])
    _, run = _prepare_call(communicator, each, dtype, None)
    run()
    _barrier(communicator)
    clock = [time.monotonic_ns()]
    with communicator.trace() as steps:
        for _ in range(REPEATS):
            run()
            clock.append(time.monotonic_ns())
    first, last = communicator.ranks[0], communicator.ranks[-1]
    row = f"rank {first}" if first == last else f"ranks {first} to {last}"
    calls = [TraceEvent(row, f"call {number}", *bounds) for number, bounds in enumerate(pairwise(clock))]
    mine = [[astuple(step) for step in some] for some in (calls, steps)]
    texts = dict.fromkeys(communicator._gather_texts(json.dumps([platform.node(), *mine])))
    processes = [json.loads(text) for text in texts]  # a process with several ranks sends equal texts
    begun: dict[str, int] = {}
    for host, ((_, _, start, _), *_), _ in processes:
        begun[host] = min(start, begun.get(host, start))
    return tuple(
        TraceEvent(row, what, start - begun[process[0]], end - begun[process[0]])
        for part in (1, 2)
        for process in processes
        for row, what, start, end in process[part]
    )


def chrome_trace(spans: Sequence[TraceEvent], what: str, model: SimulatedRun | None = None) -> str:
    """Return calls as a Chrome trace in JSON, as `topoplan.model.event_simulation.chrome_trace`.

    A process has one row, in which its steps lie under its calls, and each link over which chunks came has one.
    ``model``, the simulated run of one call, has rows of its own from the same zero.

    >>> text = chrome_trace([TraceEvent("rank 2", "call 0", 0, 1_000_000)], "allreduce of 1MB")
    >>> events = json.loads(text)["traceEvents"]
    >>> [(event["name"], event.get("dur")) for event in events]
    [('process_name', None), ('thread_name', None), ('call 0', 1000.0)]
    """
    rows: list[dict[str, object]] = [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": f"measured: {what}"}}
    ]
    numbers = {row: number for number, row in enumerate(dict.fromkeys(span.row for span in spans))}
    for row, number in numbers.items():
        rows.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": row}})
    rows += [
        {
            "name": span.what,
            "cat": span.what.split()[0],
            "ph": "X",
            "ts": round(span.start / 1e3, 4),
            "dur": round((span.end - span.start) / 1e3, 4),
            "pid": 1,
            "tid": numbers[span.row],
            "args": {},
        }
        for span in spans
    ]
    if model is not None:
        rows += json.loads(event_simulation.chrome_trace(model))["traceEvents"]
    body = ",\n".join(json.dumps(row) for row in rows)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{body}\n]}}\n'


def _counts(plan: Plans, count: int) -> tuple[int, int]:
    """Return the elements of the whole buffer, cut to whole blocks, and of each rank's input."""
    size = len(plan.ranks)
    if plan.collective in DIVIDED:
        count -= count % size
    return count, count // size if plan.collective == "allgather" else count


def _prepare_call(
    communicator: Communicator, each: int, dtype: str, own: Callable[[Any, Any], None] | None
) -> tuple[Any, Callable[[], None]]:
    size = len(communicator.plan.ranks)
    given = [communicator.arrays.of(_make_inputs(each, rank, size), dtype) for rank in communicator.ranks]
    inputs = given[0] if communicator.one_rank else given
    if own is not None:
        results = communicator.arrays.of(_make_inputs(each, communicator.ranks[0], size), dtype)
        return results, lambda: own(inputs, results)
    method = getattr(communicator, METHODS[communicator.plan.collective])
    results = method(inputs)

    def run() -> None:
        method(inputs, out=results)

    return results, run


def _make_inputs(count: int, rank: int, ranks: int) -> NDArray[np.int64]:
    """Return a rank's input: whole numbers whose sums over up to 256 ranks bfloat16 holds, with its 8 bits."""
    return (np.arange(count) + rank) % max(2, min(7, 1 + 256 // ranks))


def _calls_per_block(communicator: Communicator, run: Callable[[], None]) -> int:
    """Return how many calls fill a block, the same on every rank: blocks grow tenfold at most."""
    calls = 1
    while calls < MAX_CALLS:
        took = float(
            _reduce_over_ranks(communicator, np.array([_time_block(communicator, run, calls)]), "max")[0]
        )
        if 2 * took > BLOCK_SECONDS:
            break
        calls = min(MAX_CALLS, 10 * calls, int(calls * BLOCK_SECONDS / max(took, 1e-9)))
    return calls


def _time_block(communicator: Communicator, run: Callable[[], None], calls: int) -> float:
    """Return this rank's seconds for some calls back to back, after a barrier."""
    _barrier(communicator)
    started = time.perf_counter()
    for _ in range(calls):
        run()
    communicator.synchronize()
    return time.perf_counter() - started


def _barrier(communicator: Communicator) -> None:
    """Wait until every rank is here; a process with all ranks does not wait."""
    if communicator.one_rank:
        _reduce_over_ranks(communicator, np.zeros(1), "sum")


def _reduce_over_ranks(communicator: Communicator, values: NDArray[Any], op: str) -> NDArray[Any]:
    if not communicator.one_rank:
        return values
    reduced = communicator.all_reduce(communicator.arrays.of(values), op=op)
    return np.asarray(communicator.arrays.values(reduced))


def predicted(row: BenchmarkRow, plan: Plans, scale: float) -> BenchmarkRow:
    """Return the row with the model's time of its plan on links at their bandwidths times ``scale``.

    Start-ups are not scaled, so D bytes take as long as D / scale at full bandwidth.
    """
    seconds = simulate(plan.at(row.size), nbytes=round(row.size / scale)).seconds
    return replace(row, predicted=seconds)


def count_wrong(plan: Plans, each: int, results: Mapping[int, NDArray[Any]]) -> int:
    """Return how many elements of some ranks' results differ from plain numpy; ``each`` is the length of an input.

    >>> import topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[4, 5, 7])
    >>> count_wrong(plan, 3, {0: np.array([3, 6, 9]), 2: np.array([3, 6, 8])})
    1
    """
    size = len(plan.ranks)
    wrong = 0
    for rank, result in results.items():
        inputs = [_make_inputs(each, one, size).astype(result.dtype) for one in range(size)]
        if plan.collective == "allgather":
            expected = np.concatenate(inputs)
        elif plan.collective == "broadcast":
            assert plan.root is not None, "a broadcast has a root"
            expected = inputs[plan.root]
        elif plan.collective == "alltoall":
            expected = np.concatenate([np.split(one, size)[rank] for one in inputs])
        else:
            expected = inputs[0]
            for one in inputs[1:]:
                expected += one
            if plan.collective == "reduce_scatter":
                expected = np.split(expected, size)[rank]
        wrong += int(np.count_nonzero(result != expected))
    return wrong
