"""Training that recovers from failed ranks: divisors, residuals, reports, joining ranks, refusals."""

from __future__ import annotations

import re
import threading
from typing import Any

import numpy as np
import pytest

import topoplan
from collectives import Communicator, DiLoCo, GradientSynchronizer, SparseLoCo, report
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.training.exchange_settings import Shrink, TopK
from collectives.training.gradient_filters import Quantize, Threshold
from collectives.training.low_rank import LowRank
from collectives.training.modes import Gossip
from tests.faults.recovery import plan_for
from tests.support.sparse_steps import servers_of
from tests.support.tcp_jobs import backends_in_threads
from topoplan.errors import BackendError, UsageError


def synchronizer(backend: TcpBackend, like: list[Any], **options: Any) -> GradientSynchronizer:
    given = {"fault_tolerance": Shrink(), "bucket_bytes": 600, **options}
    return GradientSynchronizer(like, plan_for(backend.size), backend=backend, **given)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": Quantize(16)},
        {"compression": Threshold(0.0)},
        {"compression": LowRank(1, begins=0, matrices="layers")},
        {"compression": TopK(1.0)},
    ],
    ids=str,
)
def test_the_divisor_is_the_number_of_ranks_that_gave_a_gradient(options: dict[str, Any]) -> None:
    # of rank one, in whole numbers, and with a largest entry of which others are multiples
    given = [np.outer(np.arange(1.0, 13.0), np.ones(12)).astype(np.float32), np.full(200, 3, np.float32)]

    def body(backend: TcpBackend, rank: int) -> Any:
        own = synchronizer(backend, given, **options)
        first = own.step(given)
        if rank == 1:
            backend.close()  # as if it had died: its connections end
            return None
        with own:
            return [first, *(own.step(given) for _ in range(2))], [
                one.without for one in own.recorder.changes()
            ]

    first, _, last = backends_in_threads(3, body)
    assert first[1] == last[1] == [(1,)]
    for steps, others in zip(first[0], last[0], strict=True):
        for average, other, wanted in zip(steps, others, given, strict=True):
            assert average.tobytes() == other.tobytes()
            close = {Quantize: 2e-3, LowRank: 1e-6}.get(type(options.get("compression")), 0.0)
            assert np.allclose(average, wanted, rtol=close, atol=0 if not close else close * 12)


@pytest.mark.parametrize(
    "exchange", ["pairs", "tree", "dense", pytest.param("servers", marks=pytest.mark.thorough)]
)
def test_survivors_neither_lose_nor_repeat_sparse_gradients(exchange: str) -> None:
    """Whole numbers: what the survivors give and keep is what they had, with what the lost rank gave in its time."""
    steps, lost_at, size = 6, 3, 3000
    plan = topoplan.plan(servers_of((2, 2))) if exchange == "servers" else plan_for(3)
    *left, last = range(len(plan.ranks))

    def gradient(rank: int, step: int) -> Any:
        return np.random.default_rng([rank, step]).integers(-99, 99, size).astype(np.float64)

    def body(backend: TcpBackend, rank: int) -> Any:
        comm = Communicator(plan, backend, on_failure="shrink")
        given, told = np.zeros(size), []
        for step in range(steps):
            if rank == last and step == lost_at:
                break
            handle = comm.sparse_all_reduce(
                gradient(rank, step), density=0.01, exchange=exchange, key="g", async_op=True
            )
            given += handle.wait()
            if step == lost_at:
                told = [handle.among, handle.exchange.exchange, handle.repeated]
        kept = comm.sparse_state()["g"][0]["residual"]
        if rank == last:
            backend.close()
        else:
            comm.close()
        return given, kept, told

    *found, (_, lost, _) = backends_in_threads(len(plan.ranks), body)
    given = found[0][0]
    assert {one.tobytes() for one, _, _ in found} == {given.tobytes()}
    # one may have heard of the loss a collective earlier
    assert [told[:2] for *_, told in found] == [[tuple(left), exchange]] * len(left)
    assert any(told[2] for *_, told in found)
    had = sum(gradient(rank, step) for rank in left for step in range(steps))
    had = had + sum(gradient(last, step) for step in range(lost_at)) - lost
    assert np.array_equal(given + sum(kept for _, kept, _ in found), had)


@pytest.mark.thorough
def test_a_note_names_the_exchange_that_replaces_one_without_enough_ranks() -> None:
    """Two servers of two, of which one is lost."""
    cluster = topoplan.plan(servers_of((2, 2)))

    def body(backend: TcpBackend, rank: int) -> Any:
        comm = Communicator(cluster, backend, on_failure="shrink")
        gradient = np.arange(1000.0)

        def add() -> tuple[str, Any]:
            handle = comm.sparse_all_reduce(gradient, density=0.01, exchange="servers", async_op=True)
            return handle.wait(), handle.exchange.exchange

        first, before = add()
        if rank > 1:
            backend.close()
            return None
        with comm:
            second, after = add()
            kept = comm.sparse_state()[""][0]["residual"]
            return before, after, comm.notes[-1], first + second + 0 * kept

    found = backends_in_threads(4, body)
    assert found[0][0] == "servers"
    assert found[0][1] != "servers"
    assert "in place of exchange 'servers': no exchange 'servers' here" in found[0][2]
    assert np.array_equal(found[0][3], found[1][3])


def test_the_report_names_the_failed_rank_and_on_change_comes_first() -> None:
    def body(backend: TcpBackend, rank: int) -> Any:
        told: list[Any] = []
        like = [np.ones(100), np.ones(100)]
        own = synchronizer(
            backend,
            like,
            compression=TopK(0.1, exchange="pairs"),
            fault_tolerance=Shrink(on_change=lambda old, new: told.append((old, new))),
        )
        for _ in range(2):
            own.step(like)
        if rank == 0:
            backend.close()
            return None
        with own:
            own.step(like)
            assert told == [(3, 2)]
            own.step(like)
            assert told == [(3, 2)]
            assert own.communicator.original_ranks == (1, 2)
            return str(report(own.recorder)).splitlines()[-2:]

    _, *others = backends_in_threads(3, body)
    for change, note in others:
        assert re.fullmatch(
            r"step 2, from bucket 0 on: without rank 0, 2 ranks(; exchanged again: bucket 0)?; residuals of 1 rank are "
            r"lost \(their norm is not known, that of this rank is \d[\d.]*\)",
            change,
        )
        assert note.startswith("  epoch 1: without rank 0: 2 ranks (gpu1 gpu2) at ")


@pytest.mark.parametrize(
    "mode",
    [
        DiLoCo(period=2, outer_rate=1.0, outer_momentum=0.5, nesterov=False),
        SparseLoCo(period=2, k=4, chunk=4, bits=None),
    ],
    ids=str,
)
def test_a_round_of_survivors_moves_by_what_the_survivors_have_moved(mode: Any) -> None:
    """Rank 1 of three dies within the second round; ranks move by 1, 2 and 6 in each step."""
    moves = (1.0, 2.0, 6.0)

    def body(backend: TcpBackend, rank: int) -> Any:
        weights, found = [np.zeros(8)], []
        own = synchronizer(backend, weights, sync=mode)
        for step in range(6):
            if rank == 1 and step == 3:
                backend.close()
                return None
            weights[0] += own.step([np.full(8, moves[rank])])[0]
            own.after_step(weights)
            found.append(weights[0].tolist())
        own.close()
        return found[1::2]

    first, _, last = backends_in_threads(3, body)
    wanted = [6.0, 6 + (7 + 3), 16 + (7 + 5)] if isinstance(mode, DiLoCo) else [6.0, 13.0, 20.0]
    assert first == last == [[one] * 8 for one in wanted]


@pytest.mark.parametrize("mode", ["ssp:2", Gossip(np.array([[0.0, 1.0], [1.0, 0.0]]))], ids=str)
def test_recovery_refuses_modes_without_common_steps(mode: Any) -> None:
    def body(backend: TcpBackend, rank: int) -> None:
        with pytest.raises((UsageError, BackendError), match="needs mode bsp or local, got "):
            synchronizer(backend, [np.ones(4, np.float32)], sync=mode)

    assert backends_in_threads(2, body) == [None, None]


def test_recovery_needs_a_process_for_each_rank_and_a_known_divisor() -> None:
    plan = plan_for(2)
    with pytest.raises(
        UsageError, match="needs a process for each rank, and the loopback back end has all in one"
    ):
        GradientSynchronizer([[np.ones(3)]] * 2, plan, backend="loopback", fault_tolerance=Shrink())

    def body(backend: TcpBackend, rank: int) -> Any:
        weights = [np.zeros(3)]
        with synchronizer(backend, weights) as own:

            def use(averages: list[Any]) -> None:
                weights[0] -= averages[0]

            with own.join(use=use, divide_by="all"):
                for _ in range(2 * rank):
                    use(own.step([np.full(3, 4.0)]))
            with pytest.raises((UsageError, BackendError)) as error, own.join(use=use):
                pass
            return weights[0].tolist(), str(error.value)

    (first, text), (second, _) = backends_in_threads(2, body)
    assert first == second == [-4.0] * 3
    assert "survivors do not know whether a failed rank had data" in text


def test_a_joining_rank_has_parameters_and_step_of_the_others() -> None:
    invitation: list[str] = []
    given = threading.Event()

    def body(backend: TcpBackend, rank: int) -> Any:
        weights, grown = [np.zeros(3)], ()
        own = synchronizer(backend, weights)

        def move() -> None:
            weights[0] -= own.step([np.full(3, 1.0 + rank)])[0]

        move()
        if rank == 1:
            backend.close()
            assert given.wait(20)
            weights[0][:] = 99
            own = GradientSynchronizer(
                weights, fault_tolerance=Shrink(join_token=invitation[0]), bucket_bytes=600
            )
            with pytest.raises(
                UsageError, match="this rank has joined and does not have the state of the others"
            ):
                own._check_calls()
            grown = own.grow(weights)
        else:
            move()
            if rank == 0:
                invitation.append(own.communicator.join_token)
                given.set()
            while not grown:
                grown = own.grow(weights)
        with own:
            while own.recorder.step < 4:
                move()
            return weights[0].tolist(), grown, own.communicator.original_ranks

    # an average of 2 of three ranks, 2 of two, and twice 2 again
    assert backends_in_threads(3, body) == [([-8.0] * 3, (1,), (0, 1, 2))] * 3


def test_a_joining_rank_with_other_parameters_is_refused() -> None:
    invitation: list[str] = []
    given = threading.Event()

    def body(backend: TcpBackend, rank: int) -> Any:
        weights = [np.zeros(3)]
        own = synchronizer(backend, weights)
        own.step(weights)
        if rank == 1:
            backend.close()
            assert given.wait(20)
            other = GradientSynchronizer(
                [np.zeros(4)], fault_tolerance=Shrink(join_token=invitation[0]), bucket_bytes=600
            )
            with other, pytest.raises(UsageError, match="make the synchronizer with the same arguments"):
                other.grow([np.zeros(4)])
            return None
        with own:
            own.step(weights)
            if rank == 0:
                invitation.append(own.communicator.join_token)
                given.set()
            while own.communicator.epoch < 2:
                own.grow(weights)
            return own.step([np.ones(3)])[0].tolist(), own.communicator.original_ranks

    assert backends_in_threads(3, body) == [([1.0] * 3, (0, 2)), None, ([1.0] * 3, (0, 2))]
