"""Significant entries: dense at a threshold of zero, nothing lost with feedback, bounds of the sketch, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import topoplan
from collectives import GradientSynchronizer
from collectives.training.gradient_filters import CountMin, Significance
from topoplan.errors import UsageError

PLAN = topoplan.plan("v100x4")
RANKS = 4


def averages(gradients: list[list[np.ndarray[Any, Any]]], **options: Any) -> tuple[list[Any], Any]:
    """What every rank gets in each step, as one list of arrays; gradients by step and rank."""
    zeros = [[np.zeros_like(one)] for one in gradients[0]]
    with GradientSynchronizer(zeros, PLAN, backend="loopback", **options) as synchronizer:
        got = [[one[0] for one in synchronizer.step([[one] for one in step])] for step in gradients]
        return got, synchronizer.recorder.exchanges()


def drawn(steps: int, elements: int, dtype: str = "float32") -> list[list[np.ndarray[Any, Any]]]:
    draw = np.random.default_rng(11)
    return [[draw.standard_normal(elements).astype(dtype) for _ in range(RANKS)] for _ in range(steps)]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_a_threshold_of_zero_is_dense(dtype: str) -> None:
    """Whole numbers, so that every order of additions gives the same; few and many that are not zero."""
    draw = np.random.default_rng(3)
    for share in (0.02, 1.0):
        step = [(draw.integers(-9, 9, 500) * (draw.random(500) < share)).astype(dtype) for _ in range(RANKS)]
        got, (record,) = averages([step], significance=0)
        for one in got[0]:
            np.testing.assert_array_equal(one, np.mean(step, axis=0, dtype=np.float64).astype(dtype))
        assert (record.how, record.density == 1.0) == ("above 0", share == 1.0)


@pytest.mark.parametrize("admission", [1, 3])
def test_what_is_sent_and_what_is_kept_add_up(admission: int) -> None:
    """All averages so far and all gradients differ by no more than what may be kept, while not admitted too."""
    steps, threshold = 40, 4.0
    gradients = drawn(steps, 700)
    how = Significance(threshold, admission=admission)
    got, records = averages(gradients, significance=how)
    for one in got:
        assert all((one[rank] == one[0]).all() for rank in range(RANKS))
    given = np.cumsum([np.mean(step, axis=0, dtype=np.float64) for step in gradients], axis=0)
    used = np.cumsum([one[0].astype(np.float64) for one in got], axis=0)
    largest = max(float(np.abs(one).max()) for step in gradients for one in step)
    assert np.abs(given - used).max() <= threshold + (admission - 1) * largest + 1e-4
    assert max(one.density for one in records) < 1


@pytest.mark.parametrize("admission", [1, 3])
@pytest.mark.filterwarnings("ignore:gradients of training step")
def test_what_is_no_number_is_sent_at_once_and_not_kept(admission: int) -> None:
    """All ranks see it in its step, and never again."""
    steps = drawn(4, 700)
    steps[1][2][7] = np.nan
    got, _ = averages(steps, significance=Significance(4.0, admission=admission))
    found = [[np.flatnonzero(np.isnan(one)).tolist() for one in step] for step in got]
    assert found == [[[]] * RANKS, [[7]] * RANKS, [[]] * RANKS, [[]] * RANKS]


def test_without_feedback_small_entries_are_never_used() -> None:
    step = [np.full(64, 0.4, np.float32) for _ in range(RANKS)]
    kept, _ = averages([step] * 4, significance=1.0)
    assert [float(one[0][0]) for one in kept] == pytest.approx([0, 0, 1.2, 0])
    lost, _ = averages([step] * 4, significance=Significance(1.0, feedback=False))
    assert [float(one[0][0]) for one in lost] == [0, 0, 0, 0]


def test_an_entry_is_admitted_when_it_has_come_often_enough() -> None:
    """Entry 5 is large in every step, entry 9 in one alone: 5 goes in the third step with all of it, 9 never."""
    steps = []
    for number in range(4):
        line = np.zeros(400, np.float32)
        line[5] = 2.0
        line[9] = 3.0 * (number == 1)
        steps.append([line] * RANKS)
    got, _ = averages(steps, significance=Significance(2.5, admission=3))
    assert [float(one[0][5]) for one in got] == pytest.approx(
        [0, 0, 0, 8]
    )  # above 2.5 from the second step on
    # what is kept of 9 stays above the threshold, and so is counted in each step until it goes
    assert [float(one[0][9]) for one in got] == pytest.approx([0, 0, 0, 3])


def test_the_sketch_counts_never_too_few_and_seldom_too_many() -> None:
    """Cormode and Muthukrishnan: more than e n / width too many with a probability of e^-depth at most."""
    draw = np.random.default_rng(7)
    width, depth = 512, 4
    sketch, counts = CountMin(width=width, depth=depth), np.zeros(1 << 16, np.int64)
    for _ in range(60):
        numbers = np.unique((draw.zipf(1.3, 600) - 1) % (1 << 16))
        sketch.add(numbers)
        counts[numbers] += 1
    found = sketch.estimate(np.arange(1 << 16))
    assert (found >= counts).all()
    allowed = np.e * counts.sum() / width
    assert (found - counts > allowed).mean() <= np.exp(-depth)
    assert (sketch.counts.sum(axis=1) == counts.sum()).all()


def test_the_report_says_what_was_sent() -> None:
    gradients = [[np.where(np.arange(1000) < 30, 5.0, 0.1).astype(np.float32) for _ in range(RANKS)]]
    _, (record,) = averages(gradients, significance=1.0)
    assert record.how == "above 1"
    assert record.density == pytest.approx(31 * 8 / 4000)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"significance": -1.0}, "threshold must be a magnitude of 0 or more, got -1.0"),
        ({"significance": float("nan")}, "threshold must be a magnitude of 0 or more, got nan"),
        ({"significance": 0.1, "codes": 8}, "give codes or significance"),
        ({"significance": 0.1, "density": 0.1}, "significance is for dense gradients in mode bsp"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        averages(drawn(1, 10), **options)


def test_settings_out_of_range_are_refused() -> None:
    for wrong in ({"admission": 0}, {"width": 1000}, {"width": 1}, {"depth": 0}, {"depth": True}):
        with pytest.raises(UsageError, match=f"{next(iter(wrong))} must be a"):
            Significance(0.1, **wrong)
    with pytest.raises(UsageError, match="significance needs gradients of floats, got int32"):
        averages([[np.arange(4, dtype=np.int32)] * RANKS], significance=0.5)
