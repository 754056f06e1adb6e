"""A communicator that goes on without ranks or links, with all ranks in this process."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import topoplan
from collectives import Communicator
from collectives.backends.loopback.paced_loopback import PacedLoopback
from collectives.recovery import survivors
from collectives.recovery.survivors import (
    JoinSettings,
    Membership,
    RecoveryState,
    known_wires,
    recover,
    replaceable_links,
)
from tests.support.tcp_jobs import METHODS, call, given_to
from topoplan.errors import BackendError, InfeasibleError, UsageError
from topoplan.machine.variants import slow_links, without_links
from topoplan.plans.plan import Plan


def dgx(*gpus: int, collective: str = "allreduce") -> Plan:
    return topoplan.plan(topoplan.load("dgx-1v"), collective, gpus=gpus or None)


@pytest.mark.sampled
@pytest.mark.parametrize("collective", METHODS)
def test_results_are_those_of_a_new_communicator_of_the_ranks_that_are_left(collective: str) -> None:
    plan, left = dgx(*range(8)), (0, 1, 3, 4, 6, 7)
    fresh = topoplan.replan(plan, without_gpus=[2, 5]).plan
    given = [given_to(rank, 6, collective, 1003) for rank in range(6)]
    with Communicator(plan) as comm, Communicator(fresh) as other:
        comm.shrink(without=[5, 2])
        assert (comm.size, comm.ranks, comm.epoch) == (6, tuple(range(6)), 1)
        assert comm.plan.ranks == tuple(f"gpu{gpu}" for gpu in left)
        assert math.isclose(comm.plan.rate, dgx(*left).rate)
        found, wanted = call(comm, collective, given), call(other, collective, given)
        for one, right in zip(found, wanted, strict=True):
            assert (one is None and right is None) or one.tobytes() == right.tobytes()


def test_shrinking_again_and_again_ends_with_one_rank_whose_collectives_are_copies() -> None:
    with Communicator(dgx(1, 4, 5, 7)) as comm:
        for number, (gone, left) in enumerate([(1, "gpu1 gpu5 gpu7"), (0, "gpu5 gpu7"), (1, "gpu5")], 1):
            comm.shrink(without=[gone])
            assert (comm.plan.ranks, comm.epoch) == (tuple(left.split()), number)
        given = np.arange(7.0)
        for collective in METHODS:
            assert np.array_equal(call(comm, collective, [given])[0], given)
        assert comm.notes[-1] == "epoch 3: without rank 1: gpu5 alone, whose collectives are copies"


def test_gpus_that_no_nvlink_joins_go_on_over_pcie_and_say_so() -> None:
    with Communicator(dgx(1, 4, 5)) as comm:
        assert comm.plan.channels == ("nvlink",)
        comm.shrink(without=[2])
        assert comm.plan.channels == ("pcie",)
        assert "nvlink does not join them, planned over pcie" in comm.notes[0]
        assert np.array_equal(comm.all_reduce([np.arange(9)] * 2)[1], 2 * np.arange(9))


def test_a_root_that_is_gone_becomes_the_first_rank_and_one_that_stays_is_counted_anew() -> None:
    plan = topoplan.plan(topoplan.load("dgx-1v"), "broadcast", gpus=[0, 1, 2, 3], root=2)
    with Communicator(plan) as comm:
        comm.shrink(without=[0])
        assert comm.plan.root == 1
        comm.shrink(without=[1])
        assert comm.plan.root == 0


def test_plans_by_size_stay_plans_by_size() -> None:
    plans = topoplan.plan_by_size(topoplan.load("dgx-1v"), "allreduce", gpus=range(4))
    with Communicator(plans) as comm:
        comm.shrink(without=[3])
        assert type(comm.plan) is type(plans)
        assert comm.all_reduce([np.ones(3)] * 3)[0].tolist() == [3, 3, 3]


def test_residuals_of_those_that_are_left_stay() -> None:
    given = [np.arange(100.0) + 1000 * rank for rank in range(3)]
    with Communicator(dgx(0, 1, 2)) as comm:
        comm.sparse_all_reduce(given, density=0.1, exchange="pairs")
        before = comm.sparse_state()[""]
        comm.shrink(without=[1])
        after = comm.sparse_state()[""]
        assert [one["residual"].tolist() for one in after] == [
            before[rank]["residual"].tolist() for rank in (0, 2)
        ]
        comm.sparse_all_reduce(given[:2], density=0.1, exchange="pairs")


def test_paced_links_stay_paced() -> None:
    with Communicator(dgx(0, 1, 2), PacedLoopback(3, scale=1e6)) as comm:
        comm.shrink(without=[0])
        assert comm.all_reduce([np.ones(3)] * 2)[0].tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("without", "message"),
    [
        ([0, 1, 2], "excluding all 3 ranks leaves none"),
        ([3], "rank 3 does not exist; ranks are 0 to 2"),
        ([-1], "rank -1 does not exist"),
        (["a"], "ranks must be numbers from 0 to 2"),
        (None, "all ranks are in this process and none has failed"),
        ([], "name the ranks to leave out"),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(without: Any, message: str) -> None:
    with Communicator(dgx(0, 1, 2)) as comm:
        with pytest.raises(UsageError, match=message):
            comm.shrink(without=without)
        assert (comm.size, comm.epoch) == (3, 0)
        comm.all_reduce([np.ones(3)] * 3)


def test_replanning_gives_the_plan_of_the_machine_with_its_links_as_they_are() -> None:
    machine = topoplan.load("dgx-1v")
    given = [given_to(rank, 8, "allreduce", 1003) for rank in range(8)]
    with Communicator(topoplan.plan(machine)) as comm:
        comm.all_reduce(given)
        comm.replan(without_links=["gpu0-gpu3"])
        comm.replan(slow_links={"gpu1-gpu2": 12.5})
        wanted = topoplan.plan(slow_links(without_links(machine, ["gpu0-gpu3"]), {"gpu1-gpu2": 12.5}))
        assert math.isclose(comm.plan.rate, wanted.rate)
        assert (comm.epoch, comm.size, len(comm.notes)) == (0, 8, 2)
        with Communicator(comm.plan) as other:
            assert comm.all_reduce(given)[5].tobytes() == other.all_reduce(given)[5].tobytes()
        comm.shrink(without=[7])
        joined = {(link.src, link.dst) for link in comm.plan.topology.links}
        assert comm.size == 7
        assert ("gpu0", "gpu3") not in joined


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "no link changes"),
        ({"without_links": ["gpu0-gpu9"]}, "gpu9"),
        ({"slow_links": {"gpu0-gpu3": 1000.0}}, "not slower"),
    ],
)
def test_replanning_for_links_that_are_not_there_is_refused(asked: dict[str, Any], message: str) -> None:
    with Communicator(dgx()) as comm:
        with pytest.raises(UsageError, match=message):
            comm.replan(**asked)
        assert comm.notes == ()


def test_ranks_that_nothing_joins_any_more_are_no_communicator() -> None:
    machine = topoplan.load("v100x4")
    wires = sorted({f"{link.src}-{link.dst}" for link in machine.links if "gpu0" in (link.src, link.dst)})
    with Communicator(topoplan.plan(machine)) as comm, pytest.raises(InfeasibleError):
        comm.replan(without_links=wires)


def test_an_unknown_answer_to_failures_is_refused() -> None:
    with pytest.raises(UsageError, match="on_failure is 'stop'; use raise or shrink"):
        Communicator(dgx(0, 1), on_failure="stop")


def test_back_ends_that_cannot_go_on_say_what_to_do() -> None:
    class Other(PacedLoopback):
        name = "nccl"
        one_rank = True

    with pytest.raises(
        BackendError, match="nccl back end cannot continue without a rank; start the job again"
    ):
        recover(
            RecoveryState(
                Other(2), Membership(dgx(0, 1)), dgx(0, 1), JoinSettings("nccl", {}, 1.0, None, "raise")
            ),
            [1],
        )
    with pytest.raises(UsageError, match="nccl back end cannot continue without a rank"):
        Communicator(dgx(0, 1), Other(2), on_failure="shrink")


@pytest.fixture(scope="module")
def book() -> topoplan.SurvivalPlans:
    return topoplan.plan_survival("dgx-1v")


@pytest.mark.thorough
def test_plans_ahead_are_not_made_again(
    book: topoplan.SurvivalPlans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survivors, "replan", None)
    with Communicator(book) as comm:
        comm.shrink(without=[3])
        assert comm.plan == book.plan_without(gpus=[3])
        assert comm.all_reduce([np.arange(3)] * 7)[6].tolist() == [0, 7, 14]
        comm.grow()
        comm.replan(without_links=["gpu0-gpu3"])
        assert comm.plan == book.plan_without(links=["gpu0-gpu3"])


@pytest.mark.thorough
def test_what_the_book_has_no_plan_for_is_planned(book: topoplan.SurvivalPlans) -> None:
    with Communicator(book) as comm:
        comm.shrink(without=[3, 5])
        assert comm.plan.rate == topoplan.replan(book.whole, without_gpus=[3, 5]).plan.rate
        assert comm.grow() == (3, 5)
        assert comm.plan is book
        comm.replan(slow_links={"gpu0-gpu3": 5})
        assert comm.all_reduce([np.ones(3)] * 8)[6].tolist() == [8, 8, 8]


def test_wires_of_ranks_beyond_the_plan_are_left_out() -> None:
    """One wires file may serve several jobs."""
    ring = topoplan.plan(topoplan.load("mac-tb5-ring-x4"))
    wires: dict[tuple[int, int, str], tuple[str, ...]] = {
        (a, b, "network"): () for a in range(8) for b in range(8) if (a - b) % 8 in (1, 7)
    }
    assert len(known_wires(ring, wires)) == 6
    assert replaceable_links(ring, known_wires(ring, wires)) == {}
