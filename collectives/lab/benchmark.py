"""Timing a communicator in the columns of nccl-tests, every element of every result checked.

Calls run back to back in blocks, as in MPI's own benchmarks: ranks meet once before a block, so that what they leave
the meeting one after another with does not count in every small call. A block is timed on its slowest rank, from a
common start, over its calls; the row gives the median of the blocks. Where one call fills `BLOCK_SECONDS`, it is a
block.

Inputs are small whole numbers, so that every dtype adds them exactly and a wrong element cannot hide in rounding.
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
from topoplan.model import event_simulation
from topoplan.model.closed_form import simulate
from topoplan.model.event_simulation import SimulatedRun
from topoplan.plans.plan import Plans
from topoplan.units import bus_factor

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
"""Blocks of calls, of which the median counts."""

BLOCK_SECONDS = 0.02
"""Seconds that a block of calls takes, unless one call takes longer."""

MAX_CALLS = 1000
"""Calls of a block at most."""


@dataclass(frozen=True, slots=True)
class BenchmarkRow:
    """One line of a benchmark.

    Parameters
    ----------
    schedule : str
        What ran: plan, ring, or the name of a library's own collective.
    size : int
        Bytes of the buffer, the full gathered one for allgather and reduce_scatter.
    count : int
        Elements as nccl-tests counts them: of one rank's part for allgather and reduce_scatter.
    type, redop : str
    seconds : float
        Of one call.
    algbw, busbw : float
        GB/s.
    wrong : int
        Elements of all ranks that are not what they must be.
    predicted : float or None
        Seconds that the model says, where links run at given bandwidths.
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
        """A JSON object; ``time`` in microseconds, as nccl-tests prints it."""
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
    """Raise `UsageError` where a dtype is unknown, needs a package that is not there, or has no sums and needs them.

    Examples
    --------
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


def measure(
    communicator: Communicator,
    *,
    nbytes: int,
    dtype: str,
    schedule: str = "plan",
    own: Callable[[Any, Any], None] | None = None,
) -> BenchmarkRow:
    """Time the collective of a communicator's plan for one size, in blocks of calls; every rank must call it.

    Parameters
    ----------
    communicator : Communicator
    nbytes : int
        Bytes of the buffer; cut to whole elements and, for those of `DIVIDED`, whole blocks.
    dtype : str
        One of `DTYPES`.
    schedule : str
        Name of the row.
    own : function of (input, result), optional
        An allreduce of another library among the same ranks, timed instead of the communicator's.

    Returns
    -------
    Row
        The same on every rank.

    Examples
    --------
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
    while own is None and not communicator.settled(count * itemsize):
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
    """When each rank began and ended `REPEATS` calls back to back, and their steps (`Communicator.trace`).

    Every rank must call it.

    The clock is the steady one of the host, which all its processes read; on each host it begins with the first call
    there, since clocks of different hosts know nothing of each other.

    Parameters
    ----------
    communicator : Communicator
    nbytes, dtype
        As for `measure`, which should have run before: it settles the size of chunks.

    Returns
    -------
    tuple of Step
        Calls by rank, then steps, in nanoseconds from the first call of their host; the same on every rank.

    Examples
    --------
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
    told = dict.fromkeys(communicator.gather_texts(json.dumps([platform.node(), *mine])))
    processes = [json.loads(text) for text in told]  # who holds several ranks says it once
    begun: dict[str, int] = {}
    for host, ((_, _, start, _), *_), _ in processes:
        begun[host] = min(start, begun.get(host, start))
    return tuple(
        TraceEvent(row, what, start - begun[said[0]], end - begun[said[0]])
        for part in (1, 2)
        for said in processes
        for row, what, start, end in said[part]
    )


def chrome_trace(spans: Sequence[TraceEvent], what: str, model: SimulatedRun | None = None) -> str:
    """Calls as a Chrome trace, in JSON, as `topoplan.model.event_simulation.chrome_trace`.

    One row for each process, in which its own steps lie under its calls, and one for each link over which chunks came.

    Parameters
    ----------
    spans : sequence of Step
    what : str
        What ran.
    model : Run, optional
        Of one call, in rows of its own, from the same zero.

    Examples
    --------
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
    """Elements of the whole buffer, cut to whole blocks, and of what each rank gives."""
    size = len(plan.ranks)
    if plan.collective in DIVIDED:
        count -= count % size
    return count, count // size if plan.collective == "allgather" else count


def _prepare_call(
    communicator: Communicator, each: int, dtype: str, own: Callable[[Any, Any], None] | None
) -> tuple[Any, Callable[[], None]]:
    """Results, and the call that computes them from inputs of `_make_inputs`."""
    size = len(communicator.plan.ranks)
    given = [communicator.arrays.of(_make_inputs(each, rank, size), dtype) for rank in communicator.ranks]
    inputs = _one_or_list(communicator, given)
    if own is not None:
        results = communicator.arrays.of(_make_inputs(each, communicator.ranks[0], size), dtype)
        return results, lambda: own(inputs, results)
    method = getattr(communicator, METHODS[communicator.plan.collective])
    results = method(inputs)

    def run() -> None:
        method(inputs, out=results)

    return results, run


def _make_inputs(count: int, rank: int, ranks: int) -> NDArray[np.int64]:
    """What a rank gives: whole numbers whose sums over up to 256 ranks bfloat16 holds, with its 8 bits."""
    return (np.arange(count) + rank) % max(2, min(7, 1 + 256 // ranks))


def _one_or_list(communicator: Communicator, arrays: list[Any]) -> Any:
    """One array where a process holds one rank, else the list."""
    return arrays[0] if communicator.one_rank else arrays


def _calls_per_block(communicator: Communicator, run: Callable[[], None]) -> int:
    """How many calls fill a block, the same on every rank: found by blocks that grow tenfold at most."""
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
    """Seconds that this rank takes for some calls, one behind the other, once every rank is here."""
    _barrier(communicator)
    started = time.perf_counter()
    for _ in range(calls):
        run()
    return time.perf_counter() - started


def _barrier(communicator: Communicator) -> None:
    """Wait until every rank is here."""
    if communicator.one_rank:
        _reduce_over_ranks(communicator, np.zeros(1), "sum")


def _reduce_over_ranks(communicator: Communicator, values: NDArray[Any], op: str) -> NDArray[Any]:
    """Reduce a few numbers over all processes."""
    if not communicator.one_rank:
        return values
    reduced = communicator.all_reduce(communicator.arrays.of(values), op=op)
    return np.asarray(communicator.arrays.values(reduced))


def predicted(row: BenchmarkRow, plan: Plans, scale: float) -> BenchmarkRow:
    """The row with what the model says of its plan on links at their bandwidths times ``scale``.

    Start-ups are not scaled, so that D bytes take as long as D / scale at full bandwidth.
    """
    seconds = simulate(plan.at(row.size), nbytes=round(row.size / scale)).seconds
    return replace(row, predicted=seconds)


def count_wrong(plan: Plans, each: int, results: Mapping[int, NDArray[Any]]) -> int:
    """Elements that differ from what plain numpy gives.

    Parameters
    ----------
    plan : Plan or SizePlans
        Names the collective, its root and the number of ranks.
    each : int
        Elements that every rank gave.
    results : mapping from rank to array
        Of the ranks that are looked at.

    Examples
    --------
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
