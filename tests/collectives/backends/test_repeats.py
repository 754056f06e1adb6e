"""Calls like an earlier one: the same results and refusals as the first, wherever the arrays lie."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import Communicator
from collectives.backends import execution
from collectives.backends.shared.program_runner import Arithmetic
from tests.support import tcp_jobs
from tests.support.hand_plans import forest_plan
from tests.support.job_meeting import in_shared_memory
from tests.support.tcp_jobs import METHODS, call, given_to
from topoplan.errors import BackendError, UsageError
from topoplan.plans.plan import Plan

Array = NDArray[Any]
Body = Callable[[Communicator, int], Any]


@pytest.fixture(params=[in_shared_memory, tcp_jobs.in_threads], ids=["shared", "tcp"])
def in_ranks(request: pytest.FixtureRequest) -> Callable[[Plan, Body], list[Any]]:
    run: Callable[[Plan, Body], list[Any]] = request.param
    return run


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The collectives that are repeated, as they are."""
    seen: list[str] = []
    run = execution.Execution._run_cached

    def noted(self: Any, call: Any, *rest: Any) -> Any:
        seen.append(call.kind.collective)
        return run(self, call, *rest)

    monkeypatch.setattr(execution.Execution, "_run_cached", noted)
    return seen


@pytest.mark.sampled
@pytest.mark.parametrize("collective", list(METHODS))
def test_repeated_calls_have_equal_results(collective: str, in_ranks: Any, repeats: list[str]) -> None:
    plan = forest_plan(3, collective, "chain")
    options = {"op": "avg"} if collective in ("allreduce", "reduce", "reduce_scatter") else {}
    given = [given_to(rank, 3, collective, 51) for rank in range(3)]

    def body(comm: Communicator, rank: int) -> list[bytes | None]:
        found = []
        for _ in range(3):
            result = call(comm, collective, given[rank].copy(), **options)
            found.append(None if result is None else result.tobytes())
        return found

    with Communicator(plan) as comm:
        wanted = call(comm, collective, given, **options)
    sealed = [None if one is None else one.tobytes() for one in wanted]
    assert in_ranks(plan, body) == [[one] * 3 for one in sealed]
    assert len(repeats) == 2 * (1 if collective == "reduce" else 3)


def places(kind: str, rank: int) -> tuple[Array, Array | None]:
    """Input and place for a sum of 20 numbers, of some kind of memory."""
    room = np.zeros(64, np.uint8 if kind == "not aligned" else np.float64)
    values = np.arange(20.0) + rank
    if kind == "in place":
        room[:20] = values
        return room[:20], room[:20]
    if kind == "not aligned":
        bent = np.zeros(20 * 8 + 1, np.uint8)[1:].view(np.float64)
        bent[:] = values
        return bent, None
    if kind == "strided":
        room[:40:2] = values
        return room[:40:2], room[1:41:2]
    if kind == "overlapping":
        room[:20] = values
        return room[:20], room[7:27]
    if kind == "read-only":
        values.setflags(write=False)
        return values, None
    return values, room[24:44]


@pytest.mark.parametrize("kind", ["apart", "in place", "not aligned", "strided", "overlapping", "read-only"])
def test_arrays_may_lie_otherwise_than_the_first_on_one_rank_alone(kind: str, in_ranks: Any) -> None:
    def body(comm: Communicator, rank: int) -> list[list[float]]:
        found = []
        for number in range(4):
            array, out = places(kind if number % 2 and rank == 1 else "apart", rank)
            result = comm.all_reduce(array, out=out)
            assert out is None or result is out
            found.append(result.tolist())
        return found

    wanted = [3.0 * number + 3 for number in range(20)]
    assert in_ranks(forest_plan(3, "allreduce", "star"), body) == [[wanted] * 4] * 3


@pytest.mark.parametrize(
    ("out", "named"),
    [
        (np.zeros(4, np.float32), "dtype"),
        (np.zeros(5), "shape"),
        ([0.0] * 4, "list"),
        (np.broadcast_to(np.zeros(1), 4), "read-only"),
    ],
)
def test_refuses_a_wrong_out_in_a_later_call(out: Any, named: str, in_ranks: Any) -> None:
    def body(comm: Communicator, rank: int) -> str:
        comm.all_reduce(np.ones(4), out=np.empty(4))
        comm.all_reduce(np.ones(4), out=np.empty(4))
        with pytest.raises((UsageError, BackendError)) as caught:
            comm.all_reduce(np.ones(4), out=out if rank == 0 else np.empty(4))
        assert comm.all_reduce(np.ones(4)).tolist() == [2.0] * 4
        return str(caught.value)

    found = in_ranks(forest_plan(2, "allreduce", "star"), body)
    assert all(named in text for text in found), found


def test_types_that_have_to_be_looked_at_always_are(in_ranks: Any, repeats: list[str]) -> None:
    """Averages of whole numbers are divided by the communicator; roots and operators are not what they equal."""

    def body(comm: Communicator, rank: int) -> list[Any]:
        averages = [comm.all_reduce(np.full(3, 5 + rank), op="avg").tolist() for _ in range(2)]
        roots: list[Any] = [1, np.int64(1), 1]
        sums = [comm.reduce(np.ones(1), root=root) for root in roots]
        wrong: Any = 1.0
        with pytest.raises((UsageError, BackendError)):
            comm.reduce(np.ones(1), root=wrong)
        return [averages, [None if one is None else one.tolist() for one in sums]]

    found = in_ranks(forest_plan(2, "allreduce", "star"), body)
    assert found == [[[[5] * 3] * 2, [None] * 3], [[[5] * 3] * 2, [[2.0]] * 3]]
    assert repeats == ["reduce"]


def test_calls_in_the_background_keep_their_turn(in_ranks: Any) -> None:
    def body(comm: Communicator, rank: int) -> list[float]:
        totals = []
        for number in range(20):
            handle = comm.all_reduce(np.full(8, float(number)), async_op=True)
            totals.append(comm.all_reduce(np.full(8, rank + number)).tolist()[0])
            totals.append(handle.wait().tolist()[0])
        return totals

    wanted = [value for number in range(20) for value in (1 + 2 * number, 2.0 * number)]
    assert in_ranks(forest_plan(2, "allreduce", "star"), body) == [wanted] * 2


@pytest.mark.sampled
def test_averages_are_divided_by_the_number_of_ranks_whatever_else_has_run(in_ranks: Any) -> None:
    def body(comm: Communicator, rank: int) -> list[Any]:
        found = []
        for _ in range(3):
            found.append(comm.all_reduce(np.full(3, 6 + rank, np.complex64), op="avg").tolist())
            Arithmetic.of.cache_clear()
            gc.collect()
            found.append(len([np.full(1, 1e9, np.complex64) for _ in range(1000)]))
        return found

    assert in_ranks(forest_plan(3, "allreduce", "star"), body) == [[[7.0] * 3, 1000] * 3] * 3


@pytest.mark.parametrize("elements", [16, 50_000])
def test_arrays_are_let_go_when_a_call_has_ended(elements: int, in_ranks: Any) -> None:
    def body(comm: Communicator, rank: int) -> list[bool]:
        gone = []
        for _ in range(3):
            whole = np.ones(100_000)
            comm.all_reduce(whole[:elements])
            kept = weakref.ref(whole)
            del whole
            gone.append(kept() is None)
        return gone

    assert in_ranks(forest_plan(2, "allreduce", "star"), body) == [[True] * 3] * 2


def test_results_of_calls_in_the_background_have_memory_of_their_own(in_ranks: Any) -> None:
    def body(comm: Communicator, rank: int) -> list[bool]:
        arrays = [np.full(200_000, float(number)) for number in range(6)]
        comm.all_reduce(arrays[0])
        handles = [comm.all_reduce(array, async_op=True) for array in arrays]
        strided = [comm.all_reduce(np.ones(400_000)[::2], async_op=True) for _ in range(3)]
        results = [handle.wait() for handle in (*handles, *strided)]
        apart = not any(np.shares_memory(*pair) for pair in itertools.combinations(results, 2))
        return [apart, *(bool((one == 2.0 * number).all()) for number, one in enumerate(results[:6]))]

    assert in_ranks(forest_plan(2, "allreduce", "star"), body) == [[True] * 7] * 2
