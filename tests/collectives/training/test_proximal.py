"""The pull of EMSO in a plain loop: nothing at zero, the closed form else, also through checkpoints; refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import topoplan
from collectives import GradientSynchronizer, LocalSGD
from topoplan.errors import UsageError

PLAN = topoplan.plan("v100x4")
RANKS = 4


def gradient(rank: int, weights: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Of a quadratic whose minimum is elsewhere on each rank."""
    return (weights - (rank + 1)) * np.linspace(0.5, 1.5, weights.size)


def trained(
    mode: LocalSGD, steps: int, *, saved_at: int | None = None, scale: float | None = None
) -> list[list[np.ndarray[Any, Any]]]:
    """The weights of all ranks after each step of descent, in float64; gradients may have a loss scale."""
    weights, by = [np.zeros(6) for _ in range(RANKS)], scale or 1.0
    synchronizer = GradientSynchronizer(
        [[one] for one in weights], PLAN, backend="loopback", mode=mode, loss_scale=scale
    )
    seen = []
    for step in range(steps):
        given = [[gradient(rank, one) * by] for rank, one in enumerate(weights)]
        for one, (average,) in zip(weights, synchronizer.step(given), strict=True):
            one -= 0.1 * (average / by)
        synchronizer.after_step([[one] for one in weights])
        seen.append([one.copy() for one in weights])
        if step == saved_at:
            state = synchronizer.state_dict()
            synchronizer.close()
            other = [[np.full(6, 9.0)] for _ in weights]
            synchronizer = GradientSynchronizer(other, PLAN, backend="loopback", mode=mode)
            synchronizer.load_state_dict(state)
    synchronizer.close()
    return seen


def test_no_pull_is_local_sgd_bit_for_bit() -> None:
    np.testing.assert_array_equal(trained(LocalSGD(3, proximal=0.0), 8), trained(LocalSGD(3), 8))
    assert (LocalSGD(3, proximal=0), f"{LocalSGD(3)}") == (LocalSGD(3), "LocalSGD(every=3)")


def test_the_pull_is_multiplied_by_the_loss_scale_of_the_gradients() -> None:
    mode = LocalSGD(3, proximal=0.7)
    np.testing.assert_array_equal(trained(mode, 8, scale=1024.0), trained(mode, 8))


def test_the_pull_is_the_way_from_the_last_average() -> None:
    found = trained(LocalSGD(3, proximal=0.7), 8)
    weights = [np.zeros(6) for _ in range(RANKS)]
    anchors = [one.copy() for one in weights]
    for step in range(8):
        for rank, one in enumerate(weights):
            one -= 0.1 * (gradient(rank, one) + 0.7 * (one - anchors[rank]))
        if (step + 1) % 3 == 0:
            mean = np.mean(weights, axis=0)
            weights = [mean.copy() for _ in weights]
            anchors = [mean.copy() for _ in weights]
        np.testing.assert_allclose(found[step], weights, rtol=1e-12)


@pytest.mark.parametrize("saved_at", [3, 5])
def test_a_checkpoint_knows_the_anchor(saved_at: int) -> None:
    """In the middle of a round, and at its end."""
    mode = LocalSGD(3, proximal=0.7)
    np.testing.assert_array_equal(trained(mode, 8, saved_at=saved_at), trained(mode, 8))


def test_a_state_of_another_mode_is_refused() -> None:
    parameters = [[np.zeros(3)] for _ in range(RANKS)]
    with GradientSynchronizer(parameters, PLAN, backend="loopback", mode=LocalSGD(2)) as plain:
        state = plain.state_dict()
    pulled = LocalSGD(2, proximal=1)
    with (
        GradientSynchronizer(parameters, PLAN, backend="loopback", mode=pulled) as other,
        pytest.raises(UsageError, match="without the parameters of the last average"),
    ):
        other.load_state_dict(state)


@pytest.mark.parametrize("wrong", [-0.1, float("inf"), float("nan"), True, "1"])
def test_a_pull_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(UsageError, match="proximal must be 0 or more, got"):
        LocalSGD(4, proximal=wrong)


def test_whole_numbers_have_no_pull() -> None:
    parameters = [[np.zeros(3, np.int64)] for _ in range(RANKS)]
    with pytest.raises(UsageError, match="proximal needs float or complex parameters, got int64"):
        GradientSynchronizer(parameters, PLAN, backend="loopback", mode=LocalSGD(2, proximal=1))
