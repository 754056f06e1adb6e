"""Collectives in the background: several at once, in the order of their calls."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from collectives import Communicator
from collectives.communicator.handle import CallQueue
from tests.support.hand_plans import forest_plan
from topoplan.errors import UsageError


def test_several_collectives_in_flight_run_in_order() -> None:
    """Each works in place on what the one before it left behind."""
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


@pytest.mark.parametrize("collective", ["reduce", "broadcast", "all_gather", "reduce_scatter"])
def test_every_collective_can_run_in_the_background(collective: str) -> None:
    arrays = [np.arange(12) * (rank + 1) for rank in range(4)]
    with Communicator(forest_plan(4, "allreduce", "binary")) as comm:
        method = getattr(comm, collective)
        for now, later in zip(method(arrays), method(arrays, async_op=True).wait(), strict=True):
            assert (now is None and later is None) or np.array_equal(now, later)


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
    arrays = [np.ones(1_000_000) for _ in range(4)]
    comm = Communicator(forest_plan(4, "allreduce", "chain"))
    handle = comm.all_reduce(arrays, out=arrays, async_op=True)
    comm.close()
    assert handle.done()
    assert arrays[3][-1] == 4
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("collectives")]
