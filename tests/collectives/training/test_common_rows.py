"""Rows that all ranks choose alike from a sketch: known rows, exact averages, and nothing lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import topoplan
from collectives import CommonRows, GradientSynchronizer
from collectives.training.checkpoint_state import BucketPart
from collectives.training.common_rows import common_rows
from topoplan.errors import UsageError

Array = NDArray[Any]

RANKS = 4
PLAN = topoplan.plan("v100x4")
SHAPES = ((50, 12), (12,), (7, 3, 3, 3), (3, 2))


def drawn(step: int) -> list[list[Array]]:
    """Return whole numbers for each parameter and rank: sums of them are exact."""
    draw = np.random.default_rng(step)
    return [[draw.integers(-99, 100, shape).astype(np.float32) for _ in range(RANKS)] for shape in SHAPES]


def averages(
    steps: Sequence[list[list[Array]]], how: CommonRows, **options: Any
) -> tuple[list[list[list[Array]]], Any, Any]:
    """Return the averages of each step by parameter and rank, the last state, and the recorded exchanges."""
    zeros = [[np.zeros_like(one) for one in steps[0][number]] for number in range(len(steps[0]))]
    given = [list(one) for one in zip(*zeros, strict=True)]
    with GradientSynchronizer(given, PLAN, backend="loopback", compression=how, **options) as synchronizer:
        got = [synchronizer.step([list(one) for one in zip(*step, strict=True)]) for step in steps]
        state = synchronizer.state_dict()
    turned = [[list(one) for one in zip(*step, strict=True)] for step in got]
    return turned, state, synchronizer.recorder.exchanges()


def test_the_rows_of_the_paper() -> None:
    """With V = I: squares of the mean's rows are 0, 4, 2 and 4, and the lowest of equals is taken.

    The largest rows of the two ranks are 0 and 3, of which the first cancels.
    """
    first = np.array([[3.0, 0], [0, 2], [1, 1], [0, 0]])
    second = np.array([[-3.0, 0], [0, 2], [1, 1], [0, 4]])
    assert [int((one**2).sum(axis=1).argmax()) for one in (first, second)] == [0, 3]
    mean = (first + second) / 2
    assert (mean**2).sum(axis=1).tolist() == [0, 4, 2, 4]
    found = [common_rows(mean @ np.eye(2), count) for count in (1, 2, 3)]
    assert [rows.tolist() for rows in found if rows is not None] == [[1], [1, 3], [1, 2, 3]]


def test_rows_do_not_depend_on_the_scale_and_have_to_be_finite() -> None:
    sketch = np.random.default_rng(3).standard_normal((40, 3)).astype(np.float32)
    rows = common_rows(sketch, 7)
    assert rows is not None
    for factor in (2.0**-140, 2.0**120):
        again = common_rows((sketch.astype(np.float64) * factor), 7)
        assert np.array_equal(rows, again if again is not None else [])
    assert np.array_equal(rows, np.sort(np.argsort(-(sketch.astype(np.float64) ** 2).sum(axis=1))[:7]))
    for wrong in (np.nan, np.inf):
        sketch[3, 1] = wrong
        assert common_rows(sketch, 7) is None
    assert common_rows(np.zeros((5, 2)), 2) is not None


def test_averages_are_those_of_the_rows_that_the_mean_of_the_sketches_has() -> None:
    how, step = CommonRows(0.1, columns=3), drawn(0)
    ((table, bias, kernel, thin),), state, records = averages([step], how)
    for number, sent, count in ((0, table[0], 5), (2, kernel[0], 1)):
        mean = np.mean(step[number], axis=0).reshape(len(sent), -1)
        (name,) = (name for name, one in state["filters"]["residuals"].items() if one[0].size == mean.size)
        (at,) = how.matrices([BucketPart(name, 0, mean.size, SHAPES[number])])
        wanted = common_rows(mean @ how.sketch(at, 0), count)
        rows = np.flatnonzero(sent.reshape(mean.shape).any(axis=1))
        assert wanted is not None
        assert rows.tolist() == wanted.tolist()
        assert np.array_equal(sent.reshape(mean.shape)[rows], mean[rows])
    assert np.array_equal(bias[0], np.mean(step[1], axis=0)), "vectors travel whole"
    assert np.array_equal(thin[0], np.mean(step[3], axis=0)), "a sketch of it would be larger"
    numbers = 50 * 3 + 5 * 12 + 7 * 3 + 27 + 12 + 6
    assert records[0].density == pytest.approx(numbers / (600 + 12 + 189 + 6))


def test_all_ranks_have_the_same_bits_and_averages_and_residuals_are_the_gradients() -> None:
    steps = [drawn(step) for step in range(6)]
    got, state, _ = averages(steps, CommonRows(0.1, columns=2))
    for step in got:
        for ranks in step:
            assert len({one.tobytes() for one in ranks}) == 1
    residuals = state["filters"]["residuals"]
    assert len(residuals) == 2
    for number, shape in enumerate(SHAPES):
        given: Any = sum(sum(step[number]) for step in steps)
        delivered: Any = sum(step[number][0] * RANKS for step in got)
        missing = (given - delivered).reshape(-1)
        if len(shape) == 1 or shape == (3, 2):
            assert not missing.any()
        else:
            assert missing.any()
            (kept,) = (one for one in residuals.values() if one[0].size == missing.size)
            assert np.array_equal(np.sum(kept, axis=0), missing)


def test_rows_that_are_kept_come_later_and_without_feedback_never() -> None:
    """A constant gradient is delivered row after row: residuals grow until their row is chosen."""
    step = [[np.outer(np.arange(20, 0, -1), np.ones(12)).astype(np.float32)] * RANKS]
    got, _, _ = averages([step] * 60, CommonRows(0.2))
    delivered: Any = sum(one[0][0] for one in got)
    assert delivered.any(axis=1).all()
    got, _, _ = averages([step] * 10, CommonRows(0.2, feedback=False))
    delivered = sum(one[0][0] for one in got)
    assert not delivered[12:].any()


def test_a_step_that_is_not_finite_shows_on_all_ranks_and_leaves_no_trace() -> None:
    broken = drawn(1)
    broken[0][2][4, 4] = np.inf
    with pytest.warns(UserWarning, match="are not finite"):
        with_it, state, _ = averages([drawn(0), broken], CommonRows(0.1))
    assert all(np.isnan(one).all() for one in with_it[1][0])
    _, alone, _ = averages([drawn(0)], CommonRows(0.1))
    kept, others = (one["filters"]["residuals"] for one in (state, alone))
    assert kept.keys() == others.keys()
    assert all(np.array_equal(kept[name], others[name]) for name in kept)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0.0}, "density must be above 0 and at most 1, got 0.0"),
        ({"density": 0.1, "columns": 0}, "columns of CommonRows must be a whole number of 1 or more, got 0"),
        ({"density": 0.1, "seed": -1}, "seed must be from 0 to 2.32 - 1, got -1"),
    ],
)
def test_refuses_settings_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CommonRows(**options)
