"""Gossip in plain loops: parameters mixed with those of one neighbour."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import topoplan
from collectives import Gossip, GradientSynchronizer
from topoplan.errors import UsageError

PLAN = topoplan.plan("v100x4")
SPEED = topoplan.neighbour_probabilities("v100x4")


def descended(seed: int, steps: int = 300) -> tuple[list[Any], list[Any], str]:
    """Parameters of four ranks before and after `finish`; each pulls towards a target of its own."""
    targets = np.random.default_rng(0).normal(size=(4, 7))
    weights = [[np.zeros(7), np.zeros((2, 0))] for _ in range(4)]
    mode = Gossip(SPEED, seed=seed)
    with GradientSynchronizer(weights, PLAN, backend="loopback", mode=mode) as synchronizer:
        for step in range(steps):
            gradients = [[mine[0] - target, mine[1]] for mine, target in zip(weights, targets, strict=True)]
            for mine, own in zip(weights, synchronizer.step(gradients), strict=True):
                mine[0] -= 0.5 / (1 + step / 10) * own[0]
            synchronizer.after_step(weights)
        before = [mine[0].copy() for mine in weights]
        synchronizer.finish(weights)
        how = synchronizer.recorder.exchanges()[0].how
    assert np.abs(np.mean(before, axis=0) - weights[0][0]).max() < 1e-12
    return before, [mine[0] for mine in weights], how


def test_four_ranks_converge_to_the_mean_and_repeat_bit_for_bit() -> None:
    best = np.random.default_rng(0).normal(size=(4, 7)).mean(axis=0)
    before, after, how = descended(1)
    assert how == "gossip"
    assert max(np.abs(one - best).max() for one in before) < 0.15
    assert len({one.tobytes() for one in before}) == 4
    assert len({one.tobytes() for one in after}) == 1
    again, *_ = descended(1)
    other, *_ = descended(2)
    assert [one.tobytes() for one in again] == [one.tobytes() for one in before]
    assert [one.tobytes() for one in other] != [one.tobytes() for one in before]


def test_neighbours_are_chosen_as_often_as_they_should_be() -> None:
    mode = Gossip([[0.5, 0.1, 0.4], [1, 0, 0], [0.25, 0.75, 0]], seed=3)
    found = np.bincount([mode.neighbour(0, step) for step in range(4000)], minlength=3) / 4000
    assert found == pytest.approx([0.5, 0.1, 0.4], abs=0.025)
    assert {mode.neighbour(1, step) for step in range(50)} == {0}


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    weights = [[np.zeros(3)] for _ in range(4)]
    pair = Gossip([[0, 1], [1, 0]])
    with pytest.raises(UsageError, match=r"^Gossip\(2 ranks, .*\) must be for 4 ranks, got 2$"):
        GradientSynchronizer(weights, PLAN, backend="loopback", mode=pair)
    with pytest.raises(UsageError, match="seed must be a whole number of 0 or more, got -1"):
        Gossip(SPEED, seed=-1)
    with pytest.raises(UsageError, match="exchanges dense gradients or parameters; leave the density out"):
        GradientSynchronizer(weights, PLAN, backend="loopback", mode=Gossip(SPEED), density=0.1)
    with GradientSynchronizer(weights, PLAN, backend="loopback", mode=Gossip(SPEED)) as synchronizer:
        synchronizer.step(weights)
        with pytest.raises(UsageError, match=r"call after_step\(parameters\) in every step"):
            synchronizer.step(weights)
        synchronizer.after_step(weights)
        with pytest.raises(UsageError, match=r"parameters of its own after Gossip.*finish\(parameters\)"):
            synchronizer.finish()
    whole = [[np.zeros(3, np.int64)] for _ in range(4)]
    with GradientSynchronizer(whole, PLAN, backend="loopback", mode=Gossip(SPEED)) as synchronizer:
        synchronizer.step(whole)
        with pytest.raises(UsageError, match="parameters of int64 cannot be mixed"):
            synchronizer.after_step(whole)


def test_the_hook_refuses_it() -> None:
    torch = pytest.importorskip("torch.distributed")
    if torch.is_initialized():
        pytest.skip("a process group is open")
    from collectives.torch import HookState

    with pytest.raises(UsageError, match=r"use collectives\.GradientSynchronizer$"):
        HookState(PLAN, mode=Gossip(SPEED))
