"""Delayed block proximal gradient: the optimum of another method, whatever the delay and the filter; what is sent."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives.examples.block_proximal import RegressionProblem, descend, main, make_problem, violations

Floats = NDArray[np.float64]


def small() -> RegressionProblem:
    return make_problem(samples=300, features=24, seed=4)


def shrunk(weights: Floats, by: float) -> Floats:
    found: Floats = np.sign(weights) * np.maximum(np.abs(weights) - by, 0)
    return found


def whole_gradient(problem: RegressionProblem, weights: Floats) -> Floats:
    inputs, kinds = np.vstack(problem.inputs), np.concatenate(problem.kinds)
    found: Floats = -(kinds / (1 + np.exp(kinds * (inputs @ weights)))) @ inputs / len(kinds)
    return found


def accelerated(problem: RegressionProblem) -> Floats:
    """FISTA with restarts, on all weights at once."""
    inputs = np.vstack(problem.inputs)
    step = 4 * len(inputs) / np.linalg.norm(inputs, 2) ** 2
    weights = ahead = np.zeros(inputs.shape[1])
    speed = 1.0
    for _ in range(4000):
        following = shrunk(ahead - step * whole_gradient(problem, ahead), step * problem.penalty)
        if (ahead - following) @ (following - weights) > 0:
            speed = 1.0
        faster = (1 + np.sqrt(1 + 4 * speed**2)) / 2
        ahead = following + (speed - 1) / faster * (following - weights)
        weights, speed = following, faster
    return weights


@pytest.mark.sampled
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("delay", [0, 1, 4, 16])
def test_every_delay_finds_the_optimum(delay: int, filtered: bool) -> None:
    problem = small()
    run = descend(problem, delay=delay, filtered=filtered)
    best = accelerated(problem)
    np.testing.assert_allclose(run.weights, best, atol=1e-7)
    assert run.objectives[-1] == pytest.approx(problem.objective(best), abs=1e-14)
    assert violations(run.weights, whole_gradient(problem, run.weights), problem.penalty).max() < 1e-9


def test_without_delay_it_is_block_coordinate_descent() -> None:
    problem = small()
    run = descend(problem, delay=0, filtered=False)
    weights = np.zeros(24)
    seen = [problem.objective(weights)]
    step = 1 / problem.curvature(0)
    for block in problem.blocks:
        slope = whole_gradient(problem, weights)
        weights[block] = shrunk(weights[block] - step * slope[block], step * problem.penalty)
        seen.append(problem.objective(weights))
    np.testing.assert_allclose(run.objectives[: len(seen)], seen, rtol=1e-12)
    assert (np.diff(run.objectives) <= 1e-15).all()


def test_late_news_cost_moves_and_the_filter_saves_bytes() -> None:
    problem = small()
    runs = {delay: descend(problem, delay=delay, filtered=False) for delay in (0, 4, 16)}
    assert runs[0].moves < runs[4].moves < runs[16].moves
    for delay, whole in runs.items():
        filtered = descend(problem, delay=delay, filtered=True)
        assert filtered.nbytes < whole.nbytes
        np.testing.assert_allclose(filtered.weights, whole.weights, atol=1e-7)


def test_delays_that_are_none_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for given in ("-1", "x"):
        assert main([f"--delays={given}"]) == 2
        assert capsys.readouterr().err.startswith("block_proximal: ")
