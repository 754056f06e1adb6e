"""Gossip: which neighbour is chosen, how fast ranks agree; steps a second under a staleness bound."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import topoplan
from tests.bench.gossip import rules, trained, two_servers
from topoplan import InfeasibleError, UsageError, neighbour_probabilities
from topoplan.model.asynchronous_training import (
    checked_probabilities,
    mixing_weights,
    pull_seconds,
    run_clocks,
    strongest,
)

UNIFORM = (np.ones((4, 4)) - np.eye(4)) / 3


def test_a_neighbour_is_chosen_in_proportion_to_its_speed() -> None:
    """Three of 8 GB/s and four of 1 GB/s: 8/28 and 1/28; the direction of a pull counts, and measured links."""
    found = topoplan.neighbour_probabilities(two_servers())
    assert found[5] == pytest.approx(np.array([1, 1, 1, 1, 8, 0, 8, 8]) / 28, rel=1e-12)
    one_way = topoplan.slow_links("v100x4", {"gpu0-gpu1": 5})
    links = tuple(
        dataclasses.replace(link, bandwidth=5.0) if (link.src, link.dst) == ("gpu2", "gpu3") else link
        for link in one_way.links
    )
    times = pull_seconds(dataclasses.replace(one_way, links=links), nbytes=1 << 40)
    assert times[0, 1] == pytest.approx(times[1, 0]) == pytest.approx(times[3, 2], rel=1e-6)
    assert times[2, 3] < times[3, 2] / 4


@pytest.mark.parametrize("machine", ["dgx-1v", "mi250x", topoplan.nvswitch_cluster(2)], ids=str)
def test_rows_sum_to_one(machine: topoplan.Topology | str) -> None:
    found = neighbour_probabilities(machine)
    assert np.abs(found.sum(axis=1) - 1).max() <= 1e-12
    assert not found.diagonal().any()
    assert np.array_equal(found, neighbour_probabilities(machine))
    slow = float(pull_seconds(two_servers()).max())
    assert neighbour_probabilities(two_servers(), compute=slow)[0, 1:] == pytest.approx(np.full(7, 1 / 7))


def test_one_that_never_chooses_mixes_half_as_much() -> None:
    one_way = checked_probabilities([[0, 1], [0, 1]])
    assert mixing_weights(one_way, 1.0).tolist() == [[0, 0.5], [0, 0]]
    assert strongest(one_way) == 1.0


@pytest.mark.parametrize("alike", [True, False], ids=["alike", "apart"])
def test_speed_beats_chance_in_the_same_simulated_time(alike: bool) -> None:
    """Quadratics on 8 workers of 2 servers, NIC 8 x slower; pulls move the mean by little."""
    for seed in range(2):
        fast, even = (trained(one, alike=alike, until=50, seed=seed) for one in rules().values())
        assert fast.steps > 2.5 * even.steps
        assert fast.loss_of_mean < even.loss_of_mean / 3
        if alike:
            assert fast.loss < even.loss / 5
        assert 0 < fast.drift < 0.35


ALONE = topoplan.Topology("alone", (topoplan.Device("gpu0", "gpu"), topoplan.Device("gpu1", "gpu")), ())


@pytest.mark.parametrize(
    ("machine", "options", "message"),
    [
        (
            "v100x4",
            {"rule": "netmax"},
            r"'netmax' is unknown; use 'speed' \(the linear program .* implemented\)$",
        ),
        ("v100x4", {"rule": "random"}, r"rule 'random' is unknown; use 'speed'$"),
        ("v100x4", {"gpus": [1]}, "needs two GPUs or more, got 1"),
        ("v100x4", {"nbytes": 0}, "nbytes must be 1 or more, got 0"),
        ("v100x4", {"compute": -1}, "compute must be 0 seconds or more, got -1"),
        (ALONE, {}, "rank 0 can pull from no other rank"),
    ],
)
def test_refuses_neighbours(machine: topoplan.Topology | str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InfeasibleError if machine is ALONE else UsageError, match=message):
        neighbour_probabilities(machine, **options)


def test_refuses_probabilities_and_strengths() -> None:
    for wrong, told in [
        ("half", "must be a square"),
        ([[1.0]], "must be a square"),
        ([[0, 1], [0.5, 0.4]], r"rank 1 must be 0 or more and sum to 1, got \[0.5, 0.4\]"),
        ([[0, 1], [float("nan"), 1]], "rank 1 must be 0 or more"),
        (np.kron(np.eye(2), [[0, 1], [1, 0]]), "ranks 2, 3 never mix with rank 0"),
        (np.eye(2), "ranks 1 never mix"),
    ]:
        with pytest.raises(UsageError, match=told):
            checked_probabilities(wrong)
    for strength in (0, -1, 0.4, float("nan")):
        with pytest.raises(UsageError, match=r"past its neighbour, got .*; give at most 0.3333$"):
            mixing_weights(UNIFORM, strength)


def test_a_rank_that_is_late_once_costs_others_nothing_within_the_bound() -> None:
    """Each of N ranks is late by d once, at different times: K t + N d in step, K t + d where s t >= d."""
    ranks, steps, late = 4, 100, 3.0
    times = np.ones((ranks, steps))
    for rank in range(ranks):
        times[rank, 10 + 20 * rank] += late
    assert run_clocks(times).seconds == steps + ranks * late
    assert run_clocks(times, staleness=3).seconds == steps + late
    assert run_clocks(times, staleness=None).seconds == steps + late
    assert steps + late < run_clocks(times, staleness=1).seconds < steps + ranks * late


def test_a_rank_that_is_slow_for_ever_sets_the_pace() -> None:
    """Three of four ranks in 1000 s: 333 steps each, s + 1 more, or 1000 with no bound."""
    times = np.ones((4, 1200))
    times[0] *= 3
    updates = {s: int(run_clocks(times, staleness=s).finished(1000.0)[1:].sum()) for s in (0, 1, 3, 10, None)}
    assert updates == {0: 999, 1: 3 * 335, 3: 3 * 337, 10: 3 * 344, None: 3000}


@pytest.mark.parametrize("staleness", [0, 1, 2, 5, None])
def test_clocks_differ_by_the_bound_and_one_at_most(staleness: int | None) -> None:
    times = np.random.default_rng(7).exponential(1.0, (5, 300))
    run = run_clocks(times, 0.1, staleness=staleness)
    gaps = run.gaps
    assert sum(gaps.values()) == times.size
    assert min(gaps) == 0
    assert staleness is None or max(gaps) <= staleness + 1
    assert (run.waited >= 0).all()
    assert run.ends[:, -1] == pytest.approx(times.sum(axis=1) + run.waited.sum(axis=1) + 30.0)
    assert run.steps_per_second == pytest.approx(300 / run.ends.max())
    assert (run.idle >= 0).all()
    assert (run.idle < 1).all()


def test_local_steps_wait_and_send_at_the_exchanges_only() -> None:
    times = np.ones((2, 8))
    times[1, 0] = 2
    run = run_clocks(times, 0.5, every=4)
    assert run.ends[0].tolist() == [1, 2, 3, 5.5, 6.5, 7.5, 8.5, 10]
    assert run.ends[1].tolist() == [2, 3, 4, 5.5, 6.5, 7.5, 8.5, 10]
    assert run.waited.sum() == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"staleness": -1}, "staleness must be 0 or more, got -1"),
        ({"every": 0}, "every must be 1 or more, got 0"),
        ({"send": -1.0}, "must be numbers of zero or more"),
        ({"compute": [[float("nan")]]}, "must be numbers of zero or more"),
        ({"compute": [[]]}, "one step or more"),
    ],
)
def test_refuses_clocks(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run_clocks(**{"compute": [[1.0]], **options})
