"""Steps a second under a clock rule: closed forms for ranks that are late once or for ever, and the bound on clocks."""

from __future__ import annotations

import numpy as np
import pytest

from topoplan.errors import UsageError
from topoplan.model.asynchronous_training import run_clocks


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
def test_what_cannot_be_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run_clocks(**{"compute": [[1.0]], **options})  # type: ignore[arg-type]
