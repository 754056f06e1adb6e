"""Ranks that run out of data: with all ranks in one process, against averages by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import GradientSynchronizer
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.training.buckets import DataPresence
from collectives.training.exchange_settings import TopK
from collectives.training.modes import LocalSGD
from tests.support.hand_plans import forest_plan
from tests.support.tcp_jobs import backends_in_threads
from topoplan.errors import BackendError, RefusedError, UsageError

RANKS = 4
BATCHES = (2, 5, 0, 3)
SHAPES = ((4, 5), (), (0,), (7,))
PLAN = forest_plan(RANKS, "allreduce", "chain")


def gradient(rank: int, step: int) -> list[NDArray[Any]] | None:
    if step >= BATCHES[rank]:
        return None
    draw = np.random.default_rng([rank, step])
    return [np.asarray(draw.integers(-9, 9, shape) * 12.0) for shape in SHAPES]


def made(dtype: str = "float64", **options: Any) -> GradientSynchronizer:
    zeros = [[np.zeros(shape, dtype) for shape in SHAPES] for _ in range(RANKS)]
    return GradientSynchronizer(zeros, PLAN, backend="loopback", **options)


@pytest.mark.parametrize("divide_by", ["present", "all"])
@pytest.mark.parametrize("bucket_bytes", [8, 1 << 20])
def test_averages_are_over_the_ranks_that_have_data_or_over_all(divide_by: str, bucket_bytes: int) -> None:
    used: list[Any] = []
    with made(bucket_bytes=bucket_bytes) as synchronizer:
        with synchronizer.join(use=used.append, divide_by=divide_by):
            for step in range(max(BATCHES)):
                given = [gradient(rank, step) for rank in range(RANKS)]
                there = [one for one in given if one is not None]
                averages = synchronizer.step(given)
                over = len(there) if divide_by == "present" else RANKS
                for rank in range(RANKS):
                    for index, one in enumerate(averages[rank]):
                        right = sum(g[index] for g in there) / over
                        np.testing.assert_allclose(one, right, rtol=1e-15)
        assert used == []
        with pytest.raises(UsageError, match="give a list of gradients"):
            synchronizer.step([None] * RANKS)


def test_parameters_are_those_of_the_rank_with_most_batches() -> None:
    """Of several ranks in one process too, where those without data move no more."""
    weights = [[np.zeros(shape) for shape in SHAPES] for _ in range(RANKS)]
    alone = [np.zeros(shape) for shape in SHAPES]
    synchronizer = GradientSynchronizer(weights, PLAN, backend="loopback")
    with synchronizer, synchronizer.join(parameters=weights):
        for step in range(max(BATCHES)):
            given = [gradient(rank, step) for rank in range(RANKS)]
            averages = synchronizer.step(given)
            for rank in (rank for rank in range(RANKS) if given[rank] is not None):
                for one, average in zip(weights[rank], averages[rank], strict=True):
                    one -= average
            for one, average in zip(alone, averages[1], strict=True):
                one -= average
    assert alone[0].any()
    for mine in weights:
        for one, right in zip(mine, alone, strict=True):
            np.testing.assert_array_equal(one, right)


def test_gradients_may_be_given_one_by_one() -> None:
    with made() as synchronizer, synchronizer.join(use=list):
        ones = [np.ones(shape) for shape in SHAPES]
        for index in reversed(range(len(SHAPES))):
            synchronizer.ready(index, [np.asarray(ones[index] * rank) for rank in range(RANKS)])
        assert synchronizer.wait()[0][1] == 1.5


def test_nothing_is_lost_of_sparse_gradients() -> None:
    total, given = np.zeros((4, 5)), np.zeros((4, 5))
    with made(compression=TopK(0.1)) as synchronizer:
        with synchronizer.join(use=list, divide_by="all"):
            for step in range(max(BATCHES)):
                lists = [gradient(rank, step) for rank in range(RANKS)]
                total += sum(one[0] for one in lists if one is not None)
                given += RANKS * synchronizer.step(lists)[0][0]
        kept = np.sum([one["residual"] for one in synchronizer.state_dict()["residuals"]["bucket 0"]], axis=0)
    assert kept.any()
    np.testing.assert_array_equal(given + kept[-20:].reshape(4, 5), total)


@pytest.mark.parametrize(
    ("options", "join", "words"),
    [
        ({}, {}, "join needs either use"),
        ({}, {"use": list, "parameters": []}, "join needs either use"),
        ({}, {"use": list, "divide_by": "some"}, "divide_by must be present or all, got 'some'"),
        (
            {"sync": "local:2"},
            {"use": list},
            "join needs mode bsp, whose steps wait for all ranks, got Local",
        ),
        ({"dtype": "int64"}, {"use": list}, "averages of int64 are not divided by the ranks present"),
    ],
)
def test_refuses_what_does_not_go_together(options: dict[str, Any], join: dict[str, Any], words: str) -> None:
    with made(**options) as synchronizer, pytest.raises(UsageError, match=words), synchronizer.join(**join):
        pass


def test_an_error_in_the_block_is_that_of_the_caller_and_a_step_must_be_over() -> None:
    with made() as synchronizer:
        with pytest.raises(ZeroDivisionError), synchronizer.join(use=list):
            raise ZeroDivisionError
        with pytest.raises(UsageError, match="the step is not over"), synchronizer.join(use=list):
            synchronizer.ready(0, [np.zeros((4, 5))] * RANKS)


def test_ranks_are_asked_once_a_step() -> None:
    asked: list[int] = []

    def total(here: int) -> int:
        asked.append(here)
        return here + 1

    presence = DataPresence(4, total, here=1)
    assert [presence.ask(step) for step in (0, 0, 1, 1, 1)] == [2] * 5
    presence.here = 0
    assert (presence.ask(2), presence.factor, asked) == (1, 4.0, [1, 1, 0])


def test_an_error_inside_join_reaches_all_ranks() -> None:
    def body(backend: TcpBackend, rank: int) -> str:
        with GradientSynchronizer(
            [np.zeros(3)], forest_plan(3, "allreduce", "chain"), backend=backend
        ) as own:
            try:
                with own.join(use=list):
                    for step in range(3 * rank):
                        if (rank, step) == (1, 2):
                            raise ValueError("no such picture")
                        own.step([np.ones(3)])
            except (ValueError, BackendError) as error:
                return str(error)
        return "all is well"

    first, second, third = backends_in_threads(3, body)
    assert second == "no such picture"
    for heard in (first, third):
        assert "inside join: ValueError: no such picture" in heard
        assert "rank 1 refused the collective: " in heard


def test_an_error_of_a_rank_without_data_reaches_all_ranks_and_they_stay_in_step() -> None:
    def body(backend: TcpBackend, rank: int) -> list[str]:
        used = [0]

        def use(averages: object) -> None:
            used[0] += 1
            if rank == 1 and used[0] == 3:
                raise ValueError("no such picture")

        with GradientSynchronizer(
            [np.zeros(3)], forest_plan(2, "allreduce", "chain"), backend=backend
        ) as own:
            try:
                with own.join(use=use):
                    for _ in range(2 if rank else 5):
                        use(own.step([np.ones(3)]))
            except (ValueError, BackendError) as error:
                told = str(error)
            return [told, *(str(own.step([np.full(3, 10.0**step)])[0][0]) for step in range(3))]

    first, second = backends_in_threads(2, body)
    assert "inside join: ValueError: no such picture" in first[0]
    assert second[0] == "no such picture"
    assert first[1:] == second[1:] == ["1.0", "10.0", "100.0"]


def test_parameters_that_do_not_fit_on_one_rank_are_refused_by_all() -> None:
    """Else its next average would be of other steps than those of the others."""

    def body(backend: TcpBackend, rank: int) -> list[float]:
        weights, found = [np.zeros(3)], []
        plan = forest_plan(2, "allreduce", "chain")
        with GradientSynchronizer(weights, plan, backend=backend, sync=LocalSGD(1)) as own:
            for step in range(4):
                own.step([np.ones(3)])
                weights[0][:] = 10.0**step * (rank + 1)
                if step in (1, 3):
                    with pytest.raises(RefusedError, match="rank 1 refused the collective"):
                        (own.after_step if step == 1 else own.finish)([] if rank else weights)
                own.after_step(weights)
                found.append(float(weights[0][0]))
        return found

    assert backends_in_threads(2, body) == [[1.5, 15.0, 150.0, 1500.0]] * 2
