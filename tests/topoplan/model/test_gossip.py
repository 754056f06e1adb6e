"""Gossip: who is chosen how often, and how fast ranks agree."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import topoplan
from tests.bench.gossip import rules, trained, two_servers
from topoplan.errors import InfeasibleError, UsageError
from topoplan.model.asynchronous_training import (
    checked_probabilities,
    mixing_weights,
    neighbour_probabilities,
    pull_seconds,
    strongest,
)

UNIFORM = (np.ones((4, 4)) - np.eye(4)) / 3


def test_a_neighbour_is_chosen_in_proportion_to_its_speed() -> None:
    """Three of 8 GB/s and four of 1 GB/s: 8/28 and 1/28; the direction of a pull counts, and measured links."""
    found = topoplan.neighbour_probabilities(two_servers())
    assert found[5] == pytest.approx(np.array([1, 1, 1, 1, 8, 0, 8, 8]) / 28, rel=1e-12)
    one_way = topoplan.slow_links(topoplan.load("v100x4"), {"gpu0-gpu1": 5})
    links = tuple(
        dataclasses.replace(link, bandwidth=5.0) if (link.src, link.dst) == ("gpu2", "gpu3") else link
        for link in one_way.links
    )
    times = pull_seconds(dataclasses.replace(one_way, links=links), nbytes=1 << 40)
    assert times[0, 1] == pytest.approx(times[1, 0]) == pytest.approx(times[3, 2], rel=1e-6)
    assert times[2, 3] < times[3, 2] / 4


@pytest.mark.parametrize(
    "machine", ["dgx-1v", "dgx-2", "mi250x", topoplan.nvswitch_cluster(2)], ids=["1v", "2", "mi", "cluster"]
)
def test_rows_sum_to_one_and_repeat(machine: topoplan.Topology | str) -> None:
    found = neighbour_probabilities(machine)
    assert np.abs(found.sum(axis=1) - 1).max() <= 1e-12
    assert not found.diagonal().any()
    assert np.array_equal(found, neighbour_probabilities(machine))


def test_long_computing_hides_the_network() -> None:
    """A pull that ends before the gradient is there is as good as any other."""
    slow = float(pull_seconds(two_servers()).max())
    assert neighbour_probabilities(two_servers(), compute=slow)[0, 1:] == pytest.approx(np.full(7, 1 / 7))


def test_one_that_never_chooses_mixes_half_as_much() -> None:
    """A one-way pull has half the gamma."""
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


def test_what_makes_no_sense_is_refused_in_one_line() -> None:
    with pytest.raises(
        UsageError, match=r"'netmax' is unknown; use 'speed' \(the linear program .* implemented\)$"
    ):
        neighbour_probabilities("v100x4", rule="netmax")
    with pytest.raises(UsageError, match=r"rule 'random' is unknown; use 'speed'$"):
        neighbour_probabilities("v100x4", rule="random")
    with pytest.raises(UsageError, match="needs two GPUs or more, got 1"):
        neighbour_probabilities("v100x4", gpus=[1])
    with pytest.raises(UsageError, match="nbytes must be 1 or more, got 0"):
        neighbour_probabilities("v100x4", nbytes=0)
    with pytest.raises(UsageError, match="compute must be 0 seconds or more, got -1"):
        neighbour_probabilities("v100x4", compute=-1)
    alone = topoplan.Topology("alone", (topoplan.Device("gpu0", "gpu"), topoplan.Device("gpu1", "gpu")), ())
    with pytest.raises(InfeasibleError, match="rank 0 can pull from no other rank"):
        neighbour_probabilities(alone)
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
