"""The Communicator: plans by size, calls in the background, what it traces, and what TOPOPLAN_DEBUG has it print."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import topoplan
from collectives import Communicator
from collectives.backends import execution
from collectives.backends.backend import TraceEvent
from collectives.backends.loopback.loopback_backend import Loopback
from collectives.backends.plan_and_chunk_store import PlanStore
from collectives.backends.shared.shared_backend import SharedBackend
from collectives.communicator import block_sums, communicator
from collectives.communicator.handle import CallQueue
from collectives.sparse import sparse_collective
from collectives.tables.numpy_arrays import NumpyArrays
from tests.support.failing_alone import LoneFailure, outcome_of, places_of
from tests.support.hand_plans import SHAPES, forest_plan
from tests.support.job_meeting import in_shared_memory
from tests.support.tcp_jobs import call, in_threads
from topoplan.errors import BackendError, PlanError, RefusedError, UsageError
from topoplan.plans.plan import COLLECTIVES, SizeRange
from topoplan.plans.size_plans import SizePlans

PARTS = ("allgather", "reduce_scatter")
LARGEST = 9 << 20
"""Bytes of the largest buffer that is run here."""


def by_hand(collective: str) -> SizePlans:
    """Stars, chains and heaps on five ranks, from 0, 403 and 1200 bytes on."""
    plans = [forest_plan(5, collective, shape, root=2) for shape in sorted(SHAPES)]
    return SizePlans(
        (SizeRange(0, 403, plans[0]), SizeRange(403, 1200, plans[1]), SizeRange(1200, None, plans[2]))
    )


def around(crossover: int, itemsize: int, step: int) -> list[int]:
    """Counts of elements one step below the crossover, the first at or above it, and one step above."""
    first = -(-crossover // (itemsize * step)) * step
    return [first - step, first, first + step]


def check(
    comm: Communicator, alone: Communicator, collective: str, count: int, dtype: str = "float32"
) -> None:
    """A collective whose buffer has so many elements has the bits of the plan alone."""
    generator = np.random.default_rng(count)
    each = count // comm.size if collective == "allgather" else count
    inputs = [(generator.standard_normal(each) * 50).astype(dtype) for _ in range(comm.size)]
    for one, other in zip(call(comm, collective, inputs), call(alone, collective, inputs), strict=True):
        assert (one is None) == (other is None)
        assert one is None or one.tobytes() == other.tobytes()


def test_chunk_sizes_may_be_texts() -> None:
    with Communicator("v100x4", chunk_bytes="1MB") as comm:
        assert comm.chunk_bytes == 1 << 20
    with pytest.raises(UsageError, match=r"whole number of bytes or a text such as 64MB, got 1\.5"):
        Communicator("v100x4", chunk_bytes=1.5)  # type: ignore[arg-type]


@pytest.mark.sampled
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("dtype", ["float16", "float64", "int8"])
def test_bytes_of_the_whole_buffer_pick_the_plan(collective: str, dtype: str) -> None:
    """One element below, at and above every crossover; sizes of 0 and 1 too."""
    plans = by_hand(collective)
    step, itemsize = 5 if collective in PARTS else 1, np.dtype(dtype).itemsize
    counts = {0, step, *(count for size in plans.crossovers for count in around(size, itemsize, step))}
    with Communicator(plans, chunk_bytes=64) as comm:
        for count in sorted(counts):
            number = sum(count * itemsize >= size for size in plans.crossovers)
            with Communicator(plans.plans[number]) as alone:
                check(comm, alone, collective, count, dtype)


@pytest.mark.sampled
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("machine", "collective"),
    [(name, collective) for name in ("dgx-1v", "v100x4", "pcie-x8") for collective in COLLECTIVES]
    + [("dgx-2", "broadcast")],
)
def test_plans_change_at_the_crossovers_of_real_machines(machine: str, collective: str) -> None:
    """The ranges that the model finds, up to 9 MB."""
    plans = topoplan.plan_by_size(topoplan.load(machine), collective)
    crossovers = [size for size in plans.crossovers if size <= LARGEST]
    assert crossovers
    step = len(plans.ranks) if collective in PARTS else 1
    with Communicator(plans) as comm:
        for size in crossovers:
            counts = around(size, 4, step)
            store = PlanStore(plans)
            picked = [store.plan(collective, plans.root, 4 * count) for count in counts]
            assert picked[0] is not picked[1] is picked[2]
            for count, plan in zip(counts, picked, strict=True):
                with Communicator(plan) as alone:
                    check(comm, alone, collective, count)


def test_other_collectives_are_planned_by_size_when_they_are_needed() -> None:
    """From plans of an allreduce, a broadcast from rank 3: the root's star for 1 KB, two levels for 1 MB; kept."""
    store = PlanStore(topoplan.plan_by_size(topoplan.load("dgx-2"), "allreduce", gpus=[0, 2, 4, 6, 8]))
    small, large = (store.plan("broadcast", 3, size) for size in (1 << 10, 1 << 20))
    assert (small.height, large.height, small.root, small.ranks) == (1, 2, 3, large.ranks)
    assert store.plan("broadcast", 3, 1 << 20) is large
    assert store.plan("broadcast", 4, 1 << 10) is not small
    single = PlanStore(topoplan.plan(topoplan.load("dgx-2"), "allreduce", gpus=[0, 2, 4]))
    assert single.plan("broadcast", 0, 4) is single.plan("broadcast", 0, 1 << 30)


def test_a_communicator_of_a_file_does_all_five() -> None:
    """What `load_plan` gives is taken as it is; the root of the plans is the default root."""
    plans = topoplan.plan_by_size(topoplan.load("v100x4"), "reduce", root=2)
    with Communicator(SizePlans.from_json(plans.to_json())) as comm, Communicator(plans.plans[0]) as alone:
        assert (comm.size, comm.plan.root) == (4, 2)
        for collective in COLLECTIVES:
            check(comm, alone, collective, 12, "int64")


def test_one_rank_needs_no_plan() -> None:
    """Plans by size of one GPU give back what they get."""
    with Communicator(topoplan.plan_by_size(topoplan.load("dgx-1v"), gpus=[5])) as comm:
        assert comm.all_reduce([np.arange(3)])[0].tolist() == [0, 1, 2]
        assert comm.all_gather([np.arange(3)])[0].tolist() == [0, 1, 2]


def test_a_wrong_plan_in_any_range_is_refused_at_once() -> None:
    """Before the first call, though the first range is right."""
    good, wrong = by_hand("allreduce"), forest_plan(5, "allreduce", "star").shards[1:]
    broken = replace(good.ranges[2], plan=replace(good.plans[2], shards=wrong))
    with pytest.raises(PlanError, match=r"sizes from 1\.172KB: the shares add up to"):
        Communicator(SizePlans((*good.ranges[:2], broken)))
    with pytest.raises(UsageError, match=r"make one with topoplan\.plan or topoplan\.plan_by_size"):
        Communicator(good.ranges)  # type: ignore[arg-type]


def test_a_plan_in_the_memory_of_one_that_is_gone_has_its_own_digest() -> None:
    """The number of an object is given out again; plans that come and go must not share tables."""
    store = PlanStore(forest_plan(3, "allreduce", "chain"))
    for shape in sorted(SHAPES) * 20:
        plan = forest_plan(3, "allreduce", shape)
        assert store.key(plan).digest == plan.digest
        del plan


def test_several_collectives_in_flight_run_in_order() -> None:
    arrays = [np.full(1000, rank + 1) for rank in range(4)]
    with Communicator(forest_plan(4, "allreduce", "chain")) as comm:
        handles = [comm.all_reduce(arrays, out=arrays, async_op=True) for _ in range(5)]
        results = [handle.wait() for handle in handles]
    assert arrays[0][0] == 10 * 4**4
    assert all(result[2] is arrays[2] for result in results)
    assert all(handle.done() for handle in handles)


def test_a_call_that_waits_comes_after_those_in_flight() -> None:
    arrays = [np.full(100_000, rank + 1) for rank in range(3)]
    with Communicator(forest_plan(3, "allreduce", "star")) as comm:
        comm.all_reduce(arrays, out=arrays, async_op=True)
        assert comm.all_reduce(arrays)[1][0] == 18


def test_arguments_are_checked_before_the_call_returns() -> None:
    with (
        Communicator(forest_plan(2, "allreduce", "star")) as comm,
        pytest.raises(UsageError, match="rank 1 has shape"),
    ):
        comm.all_reduce([np.zeros(2), np.zeros(3)], async_op=True)


def test_a_handle_tells_whether_it_is_done_and_hands_on_errors() -> None:
    gate = threading.Event()
    order = CallQueue()
    slow = order.submit(lambda: gate.wait(10))
    failing = order.submit(lambda: 1 // 0)
    assert not slow.done()
    with pytest.raises(TimeoutError, match="still running"):
        slow.wait(0.01)
    gate.set()
    assert slow.wait() is True
    with pytest.raises(ZeroDivisionError):
        failing.wait()
    assert failing.done()
    order.close()


def test_closing_waits_for_what_runs() -> None:
    before = set(threading.enumerate())
    arrays = [np.ones(1_000_000) for _ in range(4)]
    comm = Communicator(forest_plan(4, "allreduce", "chain"))
    handle = comm.all_reduce(arrays, out=arrays, async_op=True)
    assert set(threading.enumerate()) - before
    comm.close()
    assert handle.done()
    assert arrays[3][-1] == 4
    assert set(threading.enumerate()) <= before


def traced(comm: Communicator, elements: int) -> tuple[int, int, list[TraceEvent]]:
    """When two sums began and ended, and their steps; a third one is not traced."""
    array = np.ones(elements, np.float32)
    comm.all_reduce(array)
    began = time.monotonic_ns()
    with comm.trace() as steps:
        for _ in range(2):
            comm.all_reduce(array)
    told, ended = list(steps), time.monotonic_ns()
    comm.all_reduce(array)
    assert steps == told
    return began, ended, told


def test_in_shared_memory_a_rank_tells_what_it_waits_for_copies_and_adds() -> None:
    plan = forest_plan(3, "allreduce", "chain")
    found = in_shared_memory(plan, lambda comm, rank: traced(comm, 200_000), chunk_bytes=1 << 16)
    for rank, (began, ended, steps) in enumerate(found):
        assert {step.row for step in steps} == {f"rank {rank}"}
        assert [step.what for step in steps].count("meet") == 2
        assert {"copy", "add"} < {step.what.split()[0] for step in steps} <= {"meet", "wait", "copy", "add"}
        times = [time for step in steps for time in (step.start, step.end)]
        assert times == sorted(times)
        assert began <= times[0] < times[-1] <= ended


def test_over_links_a_rank_tells_when_each_chunk_came() -> None:
    plan = forest_plan(3, "allreduce", "chain")
    found = in_threads(plan, lambda comm, rank: traced(comm, 200_000), chunk_bytes=1 << 16)
    for rank, (began, ended, steps) in enumerate(found):
        links = {step.row for step in steps if step.what != "meet"}
        assert links
        assert all(row.split(" -> ")[1].split()[0] == str(plan.ranks[rank]) for row in links)
        for row in links:
            names = [step.what for step in steps if step.row == row]
            assert len(names) == 2 * len(set(names))  # each chunk, twice
        assert all(began <= step.start <= step.end <= ended for step in steps)


def test_back_ends_that_tell_nothing_trace_nothing() -> None:
    with Communicator(forest_plan(2, "allreduce", "star")) as comm, comm.trace() as steps:
        comm.all_reduce([np.ones(3)] * 2)
    assert steps == []


def lines(text: str) -> list[dict[str, str]]:
    told = [line for line in text.splitlines() if line.startswith("topoplan: ")]
    return [dict(word.split("=", 1) for word in line.split()[1:]) for line in told]


def test_a_line_is_a_call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TOPOPLAN_DEBUG", "1")
    plan = forest_plan(4, "allreduce", "star")
    with Communicator(plan, chunk_bytes=1024) as comm:
        comm.all_reduce([np.ones(1000, np.float32)] * 4, op="avg")
        comm.broadcast([np.ones(6)] * 4)
    first, second = lines(capsys.readouterr().err)
    assert float(first.pop("seconds")) > 0
    assert float(first.pop("GB/s")) > 0
    assert first == {
        "rank": "0",
        "collective": "allreduce",
        "bytes": "4000",
        "dtype": "float32",
        "op": "avg",
        "plan": f"{plan.digest[:16]}:allreduce:{plan.schedule}",
        "backend": "loopback",
        "chunk": "1024",
    }
    assert (second["collective"], second["op"], second["bytes"]) == ("broadcast", "none", "48")


@pytest.mark.parametrize(("asked", "ranks"), [("1", {"0"}), ("all", {"0", "1", "2"}), ("0", set())])
def test_one_rank_tells_or_every_rank_or_none(
    asked: str, ranks: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOPOPLAN_DEBUG", asked)

    def body(comm: Communicator, rank: int) -> Any:
        return comm.all_reduce(np.full(3, rank)).tolist()

    assert in_threads(forest_plan(3, "allreduce", "chain"), body) == [[3, 3, 3]] * 3
    assert {one["rank"] for one in lines(capsys.readouterr().err)} == ranks


class Unreadable:
    """An argument that raises an error of its own when it is read."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no value")

    def __iter__(self) -> Any:
        raise RuntimeError("no value")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no value")

    __hash__ = None  # type: ignore[assignment]


ODD: tuple[Any, ...] = (
    3,
    1.5,
    True,
    b"sum",
    "x",
    (),
    [],
    {},
    ["sum"],
    np.array([1, 2]),
    np.array("sum"),
    len,
    10**400,
    Unreadable(),
)
"""Values of types that an argument does not have."""


@pytest.mark.parametrize(
    ("method", "names", "more"),
    [
        ("all_reduce", ("op", "arrays"), {}),
        ("reduce_scatter_v", ("op", "counts"), {"counts": [4, 4]}),
        ("broadcast", ("root",), {}),
        ("prepare", ("collective", "op"), {"collective": "all_gather"}),
        ("sparse_all_reduce", ("op", "exchange", "wire", "key", "layers", "density"), {"density": 0.5}),
        ("sparse_all_reduce", ("momentum", "loss_scale", "clip"), {"density": 1.0, "momentum": 0.0}),
    ],
)
def test_an_argument_of_another_type_on_one_rank_is_refused_by_all(
    method: str, names: tuple[str, ...], more: dict[str, Any]
) -> None:
    """None waits for the others, and the next call is that of all ranks."""
    array = np.ones(8, np.float32)
    first = "gradients" if method == "sparse_all_reduce" else "arrays"
    right = {first: array, **more}

    def work(comm: Communicator, rank: int) -> list[str]:
        texts = []
        getattr(comm, method)(**right)  # residuals and prepared calls are there
        for name in names:
            for odd in ODD:
                if (name == "root" and odd is True) or (name == "key" and isinstance(odd, str)):
                    continue  # it has the type
                if name in ("loss_scale", "clip") and type(odd) in (int, float, bool) and odd < 4:
                    continue  # a number
                arguments = {**right, name: odd} if rank == 1 else right
                with pytest.raises((RefusedError, UsageError) if rank == 1 else RefusedError) as seen:
                    getattr(comm, method)(**arguments)
                texts.append(str(seen.value))
                assert (comm.all_reduce(array) == 2).all()
        return texts

    zero, one = in_shared_memory(forest_plan(2, "allreduce", "star"), work, timeout=10)
    assert all("rank 1" in text and "\n" not in text for text in zero)
    assert len(one) == len(zero) >= len(ODD) - 1


def lacks(
    what: Any, name: str, monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None
) -> Callable[[bool], None]:
    """Let a function fail, by default for want of memory, in this thread alone, while it is told so."""
    real, lacking = getattr(what, name), set[int]()

    def tried(*given: Any, **options: Any) -> Any:
        if threading.get_ident() in lacking:
            raise error or MemoryError("no memory")
        return real(*given, **options)

    monkeypatch.setattr(what, name, tried)
    return lambda now: (lacking.add if now else lacking.discard)(threading.get_ident())


@pytest.mark.parametrize("on_failure", ["raise", "shrink"])
@pytest.mark.parametrize(
    ("method", "what", "name"),
    [
        ("all_reduce", NumpyArrays, "empty"),
        ("all_reduce", execution.Execution, "plan_of"),
        ("reduce_scatter_v", execution, "uneven_request"),
        ("reduce_scatter_v", execution.KnownCounts, "number"),
        ("reduce_scatter_v", execution.KnownCounts, "text"),
        ("sparse_all_reduce", sparse_collective, "select_entries"),
        ("prepare", SharedBackend, "empty"),
        ("run", execution.Execution, "plan_of"),
    ],
)
def test_a_rank_without_memory_before_it_moves_anything_lets_all_refuse(
    method: str, what: Any, name: str, on_failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next call would meet the present one of the others, and sums would be of two calls."""
    lack = lacks(what, name, monkeypatch)

    def work(comm: Communicator, rank: int) -> list[float]:
        def call(value: float) -> float:
            more = 0 if method == "sparse_all_reduce" else int(np.log10(value))  # calls of other kinds
            array = np.full(64 + more, value, np.float32)
            if method == "run":
                prepared = comm.prepare("all_reduce", array)
                lack(lacking[0])
                return float(prepared()[0])
            lack(lacking[0])
            if method == "reduce_scatter_v":
                return float(comm.reduce_scatter_v(array, [60, len(array) - 60])[0])
            if method == "prepare":
                return float(comm.prepare("all_reduce", array)()[0])
            if method == "sparse_all_reduce":
                return float(comm.sparse_all_reduce(array, density=0.5, exchange="pairs")[0])
            return float(comm.all_reduce(array)[0])

        lacking = [False]
        found = [call(1)]
        for step in range(1, 5):
            lacking[0] = rank == 1 and step % 2 == 1
            if step % 2:
                with pytest.raises(
                    RefusedError, match=r"rank 1 refused the collective: MemoryError: no memory"
                ):
                    call(10**step)
            lacking[0] = False
            lack(False)
            found.append(call(10**step) if method != "sparse_all_reduce" else comm.all_reduce(np.ones(4))[0])
        return found

    right = [2.0] * 5 if method == "sparse_all_reduce" else [2.0 * 10**step for step in range(5)]
    plan = forest_plan(2, "allreduce", "star")
    assert in_shared_memory(plan, work, timeout=20, on_failure=on_failure) == [right, right]


def test_a_rank_that_fails_between_two_transfers_of_a_collective_ends_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lack = lacks(block_sums, "_message", monkeypatch)

    def work(comm: Communicator, rank: int) -> str:
        lack(rank == 1)
        with pytest.raises((BackendError, MemoryError)):
            comm.all_reduce_blocks(np.ones((1, 4), np.float32), [0], 4)
        lack(False)
        with pytest.raises(BackendError) as seen:
            comm.all_reduce(np.ones(4))
        return str(seen.value)

    zero, one = in_shared_memory(forest_plan(2, "allreduce", "star"), work, timeout=20)
    assert "make a new one" in zero
    assert "rank 1 left a collective: MemoryError: no memory" in one


CALLS: dict[str, tuple[Callable[[Communicator, int], Any], float | None]] = {
    "all_reduce": (lambda comm, rank: comm.all_reduce(full(1)), 3),
    "async": (lambda comm, rank: comm.all_reduce(full(1), async_op=True).wait(), 3),
    "reduce": (lambda comm, rank: comm.reduce(full(1), root=2), None),
    "broadcast": (lambda comm, rank: comm.broadcast(full(rank), root=2), 2),
    "all_gather": (lambda comm, rank: comm.all_gather(full(7)), 7),
    "reduce_scatter": (lambda comm, rank: comm.reduce_scatter(full(1)), 3),
    "all_to_all": (lambda comm, rank: comm.all_to_all(full(5)), 5),
    "all_to_all_v": (lambda comm, rank: comm.all_to_all_v(full(5, 6), [1, 2, 3]), 5),
    "all_gather_v": (lambda comm, rank: comm.all_gather_v(full(5, rank + 1)), 5),
    "reduce_scatter_v": (lambda comm, rank: comm.reduce_scatter_v(full(1, 6), [1, 2, 3]), 3),
    "scatter": (lambda comm, rank: comm.scatter(full(4, 1 if rank else 6), None if rank else [1, 2, 3]), 4),
    "gather": (lambda comm, rank: comm.gather(full(4, rank + 1), root=0), None),
    "barrier": (lambda comm, rank: comm.barrier(), None),
    "pairs": (lambda comm, rank: comm.sparse_all_reduce(full(1), density=1.0, exchange="pairs"), 3),
    "hashed": (lambda comm, rank: comm.sparse_all_reduce(full(1), density=1.0, exchange="hashed"), 3),
    "all_reduce_blocks": (lambda comm, rank: comm.all_reduce_blocks(full(1).reshape(3, 4), [0, 4, 8], 12), 3),
    "prepare": (lambda comm, rank: comm.prepare("all_reduce", full(1))(), 3),
    "report": (lambda comm, rank: comm.report(), None),
    "exchange_for": (lambda comm, rank: comm.exchange_for(full(1), density=0.5), None),
    "plan_for": (lambda comm, rank: comm.plan_for("allreduce", 48), None),
    "grow": (lambda comm, rank: comm.grow(), None),
}
"""Calls of all three ranks, and each element of their results."""


def full(value: float, count: int = 12) -> Any:
    return np.full(count, value, np.float32)


def after_a_failure(
    call: str,
    place: str | None,
    error: BaseException | None = None,
    *,
    meets: Callable[..., list[Any]] = in_shared_memory,
    **options: Any,
) -> tuple[list[Any], LoneFailure]:
    """Return the results of three ranks of a call in which rank 1 fails, and of two sums behind it."""
    failure = LoneFailure(place, error)
    method, _ = CALLS[call]

    def work(comm: Communicator, rank: int) -> Any:
        def calls() -> list[Any]:
            for _ in range(2 if call != "prepare" else 0):
                method(comm, rank)
            comm.all_reduce(full(1))
            if rank == 1:
                failure.armed = True
            found = [outcome_of(lambda: method(comm, rank))]
            if rank == 1:
                failure.armed = False
            return [*found, *(outcome_of(partial(comm.all_reduce, full(value))) for value in (10, 1000))]

        if rank != 1:
            return [outcome_of(calls)]
        with failure.rank_thread():
            return [outcome_of(calls)]

    made = meets(forest_plan(3, "allreduce", "star"), work, timeout=20, **options)
    return [one for (one,) in made], failure


def check_in_step(call: str, place: str, error: BaseException, **options: Any) -> LoneFailure:
    """Every rank has the right results, or errors; one that names rank 1 first on the other ranks.

    Functions in which a rank waits are not entered in each run.
    """
    outcomes, failure = after_a_failure(call, place, error, **options)
    for rank, found in enumerate(outcomes):
        if isinstance(found, BackendError):  # the job has ended before this rank was at the call
            assert "rank 1" in f"{found}", (place, rank, found)
            continue
        for got, right in zip(found, (CALLS[call][1], 30, 3000), strict=True):
            if not isinstance(got, BaseException):
                assert right is None or got is None or (got == right).all(), (place, rank, got)
        errors = [one for one in found if isinstance(one, BaseException)]
        assert rank == 1 or not errors or re.search(r"rank 1\b|peer 1\b", f"{errors[0]}"), (place, errors)
        if any(isinstance(one, BackendError) and not isinstance(one, RefusedError) for one in errors):
            continue  # the job has ended
        assert not any(isinstance(one, BaseException) for one in found[1:]), (place, rank, found)
    return failure


@pytest.mark.parametrize(
    ("call", "place"),
    [
        ("all_reduce", "communicator/handle.py:CallQueue.run"),
        ("all_reduce", "backends/execution.py:Execution._run_bound"),
        ("all_reduce", "backends/shared/program_runner.py:ProgramRunner.start"),
        ("barrier", "tables/numpy_arrays.py:NumpyArrays.of"),
        ("exchange_for", "sparse/exchange_choice.py:sparse_request"),
        ("exchange_for", "sparse/sparse_collective.py:SparseCollective.choose"),
        ("report", "recovery/arrivals.py:own_arrivals"),
        ("report", "recovery/arrivals.py:arrival_report"),
        ("report", "peers/shared_memory_control_plane.py:SharedMemoryControlPlane.gather"),
        ("prepare", "communicator/handle.py:PreparedCall._begin"),
        ("prepare", "communicator/handle.py:PreparedCall.__init__"),
    ],
)
@pytest.mark.parametrize(
    "error", [MemoryError("no memory"), KeyboardInterrupt()], ids=["memory", "interrupt"]
)
def test_a_rank_that_fails_alone_leaves_no_sum_of_two_calls(
    call: str, place: str, error: BaseException
) -> None:
    assert check_in_step(call, place, error).raised


@pytest.mark.thorough
@pytest.mark.sampled
@pytest.mark.parametrize("meets", [in_shared_memory, in_threads], ids=["shared", "tcp"])
@pytest.mark.parametrize(
    "error", [MemoryError("no memory"), KeyboardInterrupt()], ids=["memory", "interrupt"]
)
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_fails_at_any_function_of_a_call_leaves_no_sum_of_two_calls(
    call: str, error: BaseException, meets: Callable[..., list[Any]]
) -> None:
    _, undisturbed = after_a_failure(call, None, meets=meets)
    for place in places_of(undisturbed.seen):
        check_in_step(call, place, error, meets=meets)


def test_arguments_of_one_rank_alone_are_refused_where_ranks_only_agree() -> None:
    """Others ask with right ones, and their next call must not meet that of this rank."""

    def work(comm: Communicator, rank: int) -> list[float]:
        array, odd = np.ones(8, np.float32), rank == 1
        prepared = comm.prepare("all_reduce", array)
        calls: tuple[Callable[[], Any], ...] = (
            lambda: comm.exchange_for(array, density=7 if odd else 0.5),
            lambda: comm.exchange_for(array, density=0.25 if odd else 0.5),
            lambda: comm.exchange_for(array[: 4 if odd else 8], density=0.5),
            prepared.start if odd else prepared,
        )
        if odd:
            prepared.start()
        else:
            prepared.start()
            prepared.wait()
        found = []
        for ask in calls:
            with pytest.raises(RefusedError, match="rank 1"):
                ask()
            if odd and ask is calls[-1]:
                prepared.wait()
            found.append(float(comm.all_reduce(10 * array)[0]))
        return found

    assert in_shared_memory(forest_plan(2, "allreduce", "star"), work, timeout=20) == [[20.0] * 4] * 2


@pytest.mark.parametrize("later", [True, False], ids=["background", "at once"])
def test_a_rank_that_fails_alone_behind_a_collective_is_named_at_the_next_one(later: bool) -> None:
    """In what handles its result: the others have theirs, and use it."""

    def work(comm: Communicator, rank: int) -> str:
        def make(result: Any) -> Any:
            if rank == 1:
                raise MemoryError("no memory")
            return result + 1

        found = comm._in_order.around(comm.all_reduce(np.ones(8), async_op=later)).then(make)
        if rank == 1:
            with pytest.raises(MemoryError):
                found.wait()
        else:
            assert found.wait().tolist() == [3.0] * 8
        with pytest.raises(BackendError, match="rank 1 left a collective: MemoryError: no memory") as raised:
            comm.all_reduce(np.ones(8))
        return str(raised.value)

    assert all("no memory" in text for text in in_shared_memory(forest_plan(2, "allreduce", "star"), work))


def test_a_plan_that_one_rank_alone_cannot_ask_for_ends_the_job_if_the_others_wait_for_it() -> None:
    def work(comm: Communicator, rank: int) -> list[float]:
        array, odd = np.ones(8, np.float32), rank == 1
        found = []
        if odd:  # the others know the plan, and exchange nothing
            with pytest.raises(UsageError, match="did you mean"):
                comm.plan_for("allreduc", 8)
        else:
            comm.plan_for("allreduce", 8)
        found.append(float(comm.all_reduce(array)[0]))
        with pytest.raises((UsageError, BackendError)):
            comm.plan_for("reduce_scatter", -1 if odd else 8)
        for _ in range(2):
            with pytest.raises(BackendError, match=r"rank 1|call plan_for"):
                found.append(float(comm.all_reduce(10 * array)[0]))
        return found

    assert in_shared_memory(forest_plan(2, "allreduce", "star"), work, timeout=20) == [[2.0], [2.0]]


def test_a_queue_whose_thread_cannot_start_keeps_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would run before the next one, and ranks would differ."""
    queue, ran = CallQueue(), list[str]()

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="new thread"):
            queue.submit(lambda: ran.append("first"))
    queue.submit(lambda: ran.append("second")).wait()
    queue.close()
    assert ran == ["second"]


def test_ranks_that_prepare_or_split_otherwise_stay_in_step() -> None:
    machine = topoplan.load("dgx-1v")
    mesh = topoplan.plan_mesh(machine, {"x": 2, "y": 2}, gpus=[0, 1, 2, 3])

    def work(comm: Communicator, rank: int) -> list[float]:
        array = np.ones(4)
        with pytest.raises(RefusedError, match="rank 1 refused"):
            comm.prepare("all_reduce", "x" if rank == 1 else array)
        found = [float(comm.prepare("all_reduce", array)()[0])]
        odd: Any
        for odd in ("z", None):
            with pytest.raises(RefusedError, match="rank 1 refused"):
                comm.split(mesh, odd if rank == 1 else "x")
        with pytest.raises(RefusedError, match=r"'split' instead of 'report'|'report' instead of 'split'"):
            comm.split(mesh, "x") if rank else comm.report()
        return [*found, float(comm.all_reduce(10 * array)[0])]

    plan = topoplan.plan(machine, "allreduce", gpus=[0, 1, 2, 3])
    assert in_shared_memory(plan, work, timeout=20) == [[4.0, 40.0]] * 4


def test_an_interrupt_before_a_call_has_begun_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt = lacks(communicator, "request", monkeypatch, KeyboardInterrupt())

    def work(comm: Communicator, rank: int) -> str:
        interrupt(rank == 1)
        with pytest.raises((KeyboardInterrupt, BackendError)) as seen:
            comm.all_reduce(np.ones(4))
        interrupt(False)
        with pytest.raises(BackendError, match=r"KeyboardInterrupt in the middle of a call|make a new one"):
            comm.all_reduce(np.ones(4))
        return type(seen.value).__name__

    plan = forest_plan(2, "allreduce", "star")
    assert in_shared_memory(plan, work, timeout=20) == ["BackendError", "KeyboardInterrupt"]


def test_connections_are_paced_at_parts_of_planned_rates_by_back_ends_that_can() -> None:
    plan = topoplan.plan("dgx-1v", gpus=[0, 1, 2])
    inputs = [np.arange(5.0) + rank for rank in range(3)]
    with Communicator(plan, pace=0.5) as comm, Communicator(plan) as free:
        assert comm.backend == "paced loopback"
        assert np.array_equal(comm.all_reduce(inputs), free.all_reduce(inputs))
    for pace in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(UsageError, match="pace must be above 0 and finite, got"):
            Communicator(plan, pace=pace)
    with pytest.raises(UsageError, match="the mpi back end cannot be paced; use loopback or tcp"):
        Communicator(plan, "mpi", pace=1)
    with pytest.raises(UsageError, match="back end is already open; pass engine, exact and pace to it"):
        Communicator(plan, Loopback(3), pace=1)
