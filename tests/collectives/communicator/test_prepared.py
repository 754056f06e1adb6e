"""Prepared calls refuse what no longer fits before anything moves, and name both calls where ranks differ."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from collectives import Communicator, PreparedCall
from tests.support import tcp_jobs
from tests.support.hand_plans import forest_plan
from tests.support.job_meeting import in_shared_memory
from topoplan.errors import BackendError, RefusedError, UsageError

PLAN = forest_plan(3, "allreduce", "chain")
IN_RANKS = pytest.mark.parametrize("in_ranks", [in_shared_memory, tcp_jobs.in_threads], ids=["shared", "tcp"])


def one_process() -> tuple[Communicator, list[Any], PreparedCall[Any]]:
    comm = Communicator(PLAN)
    arrays = [np.ones(4) for _ in range(3)]
    return comm, arrays, comm.prepare("allreduce", arrays, out=arrays)


@IN_RANKS
def test_starts_follow_the_order_of_the_ranks_and_other_collectives_run_between(in_ranks: Any) -> None:
    def body(comm: Communicator, rank: int) -> list[float]:
        first, second = np.full(5, rank, np.float32), np.full((2, 3), rank + 1.0)
        calls = [comm.prepare("allreduce", first), comm.prepare("allreduce", second, op="max")]
        found = []
        for number in (1, 0, 0, 1, 1):
            calls[number].start()
            found.append(float(comm.all_reduce(np.ones(2))[0]))
            found.append(float(calls[number].wait().reshape(-1)[0]))
        first[:] = 7
        return [*found, float(calls[0]()[0])]

    assert in_ranks(PLAN, body) == [[3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 21]] * 3


@IN_RANKS
def test_ranks_that_start_other_calls_fail_together_and_go_on(in_ranks: Any) -> None:
    def body(comm: Communicator, rank: int) -> list[str]:
        given = np.full(5, 2.0)
        calls = [comm.prepare("allreduce", given, op=op) for op in ("sum", "max", "sum")]
        told = []
        for mine, theirs in ((0, 1), (2, 0)):
            with pytest.raises(RefusedError) as raised:
                calls[theirs if rank == 2 else mine]()
            told.append(str(raised.value).partition(";")[0])
            assert (raised.value.rank, raised.value.peer) == (rank, 2)
        assert calls[2]().tolist() == [6.0] * 5
        return told

    assert (
        in_ranks(PLAN, body)
        == [
            [
                "rank 2 runs prepared call 2 (allreduce, max, 5 float64) and rank 0 prepared call 1 (allreduce, sum, 5 "
                "float64)",
                "rank 2 runs prepared call 1 (allreduce, sum, 5 float64) and rank 0 prepared call 3 (allreduce, sum, 5 "
                "float64)",
            ]
        ]
        * 3
    )


@IN_RANKS
def test_a_rank_that_starts_a_call_more_often_is_told_who_has_left(in_ranks: Any) -> None:
    def body(comm: Communicator, rank: int) -> bool:
        call = comm.prepare("allreduce", np.ones(3))
        call()
        if rank:
            return True
        with pytest.raises(BackendError) as raised:
            call()
        return raised.value.peer in (1, 2) and "closed" in str(raised.value)

    assert in_ranks(PLAN, body) == [True] * 3


@pytest.mark.parametrize("change", ["moved", "resized", "reshaped"])
def test_arrays_must_keep_their_memory_and_shape(change: str) -> None:
    comm, arrays, call = one_process()
    with comm:
        call()
        if change == "moved":
            before = arrays[1].ctypes.data
            others = []
            while arrays[1].ctypes.data == before:  # malloc may give the old place back once
                arrays[1].resize(1 << 20, refcheck=False)
                others.append([np.empty(4) for _ in range(64)])
                arrays[1].resize(4, refcheck=False)
        elif change == "resized":
            arrays[1].resize(3, refcheck=False)
        else:
            arrays[1].shape = (2, 2)
        with pytest.raises(UsageError, match="prepared call 1 must keep their memory and shape"):
            call()
        with pytest.raises(UsageError, match="moved, freed or resized; prepare the call again"):
            call.start()


@pytest.mark.parametrize(
    ("collective", "options", "message"),
    [
        ("all_redux", {}, "collective 'all_redux' is unknown; did you mean"),
        ("all_reduce", {"root": 1}, "allreduce has no root, got 1; leave root out"),
        ("broadcast", {"op": "max"}, "broadcast has no reduction, got op 'max'; leave op out"),
        ("reduce", {"root": 3}, "root must be a rank, 0 to 2, got 3"),
        ("all_reduce", {"op": "xor"}, "xor"),
    ],
)
def test_arguments_that_a_collective_does_not_take_are_refused(
    collective: str, options: dict[str, Any], message: str
) -> None:
    comm, arrays, call = one_process()
    with comm:
        with pytest.raises(UsageError, match=message):
            comm.prepare(collective, arrays, **options)
        call()


def test_memory_of_a_tensor_that_is_freed_is_refused() -> None:
    torch = pytest.importorskip("torch")
    from collectives.tables.torch_arrays import TorchArrays

    tensor, view = torch.ones(6), torch.ones(6)
    library = TorchArrays([torch.device("cpu")])
    placed = [library.placed([one]) for one in (tensor, view)]
    assert [one() for one in placed] == [True, True]
    tensor.untyped_storage().resize_(0)
    view.resize_(3)
    assert [one() for one in placed] == [False, False]


def test_a_call_is_stale_once_the_communicator_has_changed() -> None:
    comm, arrays, call = one_process()
    assert not call.stale
    comm.shrink([2])
    with pytest.raises(
        UsageError, match="call 1 is stale: the communicator has shrunk from 3 to 2 ranks; prepare it"
    ):
        call()
    again = comm.prepare("allreduce", arrays[:2])
    assert [one.tolist() for one in again()] == [[2.0] * 4] * 2
    comm.grow()
    with pytest.raises(
        UsageError, match="stale: the communicator has grown from 2 to 3 ranks; prepare it again"
    ):
        again.start()
    comm.close()
    assert again.stale
    with pytest.raises(UsageError, match="stale: the communicator is closed"):
        again()
    with pytest.raises(UsageError, match="the communicator is closed; make a new one"):
        comm.prepare("allreduce", arrays)


def test_one_start_is_active_at_a_time() -> None:
    comm, _, call = one_process()
    with comm:
        with pytest.raises(
            UsageError, match=r"prepared call 1 must be started before wait; call start\(\) first"
        ):
            call.wait()
        call.start()
        for again in (call, call.start):
            with pytest.raises(UsageError, match="prepared call 1 is active; wait for its last start"):
                again()
        assert call.wait()[0].tolist() == [3.0] * 4
        call()


def test_a_second_thread_is_refused_while_the_first_runs_the_call() -> None:
    comm, _, call = one_process()
    entered, go_on = threading.Event(), threading.Event()
    with comm:
        comm._in_order.submit(lambda: (entered.set(), go_on.wait(20)))  # the call waits behind it
        assert entered.wait(20)
        thread = threading.Thread(target=call)
        thread.start()
        while not call._idle.locked():
            pass
        with pytest.raises(UsageError, match="start it from one thread"):
            call()
        go_on.set()
        thread.join()
        call()


def test_results_have_memory_of_their_own_where_none_is_given() -> None:
    def body(comm: Communicator, rank: int) -> list[Any]:
        call = comm.prepare("reduce", np.full(3, rank + 1.0), root=1)
        gathered = comm.prepare("allgather", np.full(2, rank, np.int16))
        assert call() is call.result
        assert gathered() is gathered.result
        return [None if call.result is None else call.result.tolist(), gathered.result.tolist()]

    whole = [0, 0, 1, 1, 2, 2]
    assert in_shared_memory(PLAN, body) == [[None, whole], [[6.0] * 3, whole], [None, whole]]


def test_survivors_repeat_a_prepared_call_in_which_a_rank_fails() -> None:
    calls: dict[int, PreparedCall[Any]] = {}
    entered = threading.Barrier(3)

    def body(comm: Communicator, rank: int) -> Any:
        call = calls[rank] = comm.prepare("all_reduce", np.full(4, rank + 1.0))
        gathered = comm.prepare("all_gather", np.full(1, rank))
        assert gathered().tolist() == [0, 1, 2]
        first = call().tolist()
        entered.wait(20)  # all have handed the first one over
        if rank == 2:
            while not (calls[0]._idle.locked() and calls[1]._idle.locked()):
                pass
            comm.abort("leaves")
            return first
        second = call().tolist()
        return first, second, call.stale, comm.size

    found = in_shared_memory(PLAN, body, on_failure="shrink")
    assert found[0] == found[1] == ([6.0] * 4, [3.0] * 4, True, 2)
