"""PowerSGD: exact where a gradient has the rank, nothing lost with feedback, the same bits on all ranks, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import topoplan
from collectives import GradientSynchronizer
from collectives.training.low_rank import LowRank, orthonormal, outer
from topoplan.errors import UsageError

PLAN = topoplan.plan("v100x4")


def averages(gradients: list[list[np.ndarray[Any, Any]]], **options: Any) -> tuple[list[Any], Any]:
    """What every rank gets in each step; gradients by step and rank."""
    zeros = [[np.zeros_like(one)] for one in gradients[0]]
    with GradientSynchronizer(zeros, PLAN, backend="loopback", **options) as synchronizer:
        got = [synchronizer.step([[one] for one in step]) for step in gradients]
        return got, synchronizer.recorder.exchanges()


def test_a_gradient_of_that_rank_is_averaged_exactly() -> None:
    """Products of 32 x 2 and 2 x 32 that share their rows' space: two columns hold their sum."""
    draw = np.random.default_rng(1)
    left = draw.standard_normal((32, 2))
    step = [(left @ draw.standard_normal((2, 32))).astype(np.float32).reshape(-1) for _ in range(4)]
    got, records = averages([step], low_rank=LowRank(2, begins=0))
    np.testing.assert_allclose(got[0][0][0], np.mean(step, axis=0), rtol=1e-4, atol=1e-5)
    assert (records[0].how, records[0].density) == ("rank 2", 2 * 64 / 1024)


@pytest.mark.parametrize("elements", [1000, 1024, 4097])
def test_what_is_sent_and_what_is_kept_add_up(elements: int) -> None:
    """Over many steps of one gradient the averages sum to the gradients but for a residual that does not grow."""
    draw = np.random.default_rng(2)
    step = [draw.standard_normal(elements).astype(np.float32) for _ in range(4)]
    mean, steps = np.mean(step, axis=0), 60
    got, _ = averages([step] * steps, low_rank=LowRank(2, begins=0))
    for rank in range(1, 4):
        for one in got:
            np.testing.assert_array_equal(one[rank][0], one[0][0])
    total = np.sum([one[0][0] for one in got], axis=0)
    kept = np.linalg.norm(total - steps * mean) / np.linalg.norm(mean)
    forgetful, _ = averages([step] * steps, low_rank=LowRank(2, feedback=False, begins=0))
    lost = np.linalg.norm(np.sum([one[0][0] for one in forgetful], axis=0) - steps * mean) / np.linalg.norm(
        mean
    )
    assert kept < 0.5 * lost


@pytest.mark.parametrize("largest", [1.0, 4000.0])
def test_large_gradients_of_float16_do_not_overflow(largest: float) -> None:
    """As a loss scaler makes them: the thin matrices are no larger than the gradient's rows and columns."""
    draw = np.random.default_rng(5)
    whole = draw.standard_normal((64, 2)) @ draw.standard_normal((2, 64))
    step = [(whole * largest / np.abs(whole).max()).astype(np.float16) for _ in range(4)]
    got, _ = averages([step] * 5, low_rank=LowRank(2, begins=0))
    for one in got:
        assert np.linalg.norm(one[0][0].astype(np.float64) - step[0]) < 0.02 * np.linalg.norm(
            step[0].astype(np.float64)
        )


@pytest.mark.parametrize("matrices", ["bucket", "layers"])
def test_products_beyond_float16_are_no_reason_for_an_average_that_is(matrices: str) -> None:
    """Rows of 40 elements of 30000 have a product of 190000, and their average is 30000."""
    step = [np.full((40, 40), 30000, np.float16)] * 4
    got, _ = averages([step] * 3, low_rank=LowRank(1, begins=0, matrices=matrices))
    for one in got:
        np.testing.assert_allclose(one[3][0].astype(np.float64), 30000, rtol=1e-2)


@pytest.mark.filterwarnings("ignore:gradients of training step 2")
@pytest.mark.parametrize("matrices", ["bucket", "layers"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_no_number_shows_on_all_ranks_and_is_not_kept(matrices: str, wrong: float) -> None:
    """A step that is skipped leaves no trace: the next ones are those of a run without it."""
    draw = np.random.default_rng(4)
    steps = [[draw.standard_normal((30, 30)).astype(np.float32) for _ in range(4)] for _ in range(4)]
    bad = [one.copy() for one in steps[0]]
    bad[2][3, 7] = wrong
    how = LowRank(2, begins=0, matrices=matrices)
    got, _ = averages([*steps[:2], bad, *steps[2:]], low_rank=how)
    assert all(np.isnan(one[0]).all() for one in got[2])
    right, _ = averages(steps, low_rank=how)
    for one, other in zip([*got[:2], *got[3:]], right, strict=True):
        np.testing.assert_array_equal(one[0][0], other[0][0])


def test_the_first_steps_and_small_gradients_are_whole() -> None:
    draw = np.random.default_rng(3)
    steps = [[draw.standard_normal(400).astype(np.float32) for _ in range(4)] for _ in range(3)]
    got, records = averages(steps, low_rank=4)
    assert [one.how.startswith("rank") for one in records] == [False, False, True]
    np.testing.assert_allclose(got[1][0][0], np.mean(steps[1], axis=0), rtol=1e-5, atol=1e-6)
    small = [[np.arange(9, dtype=np.float32) for _ in range(4)]]
    assert averages(small, low_rank=LowRank(4, begins=0))[1][0].density == 1.0


def test_zero_gradients_do_not_end_the_search_for_directions() -> None:
    """A step of zeros leaves Q's columns dead; the next gradient finds new ones."""
    draw = np.random.default_rng(4)
    left = draw.standard_normal((20, 1))
    step = [(left @ draw.standard_normal((1, 20))).astype(np.float32).reshape(-1) for _ in range(4)]
    zeros = [np.zeros(400, np.float32)] * 4
    got, _ = averages([zeros, step], low_rank=LowRank(1, begins=0))
    np.testing.assert_array_equal(got[0][0][0], zeros[0])
    np.testing.assert_allclose(got[1][0][0], np.mean(step, axis=0), rtol=1e-4, atol=1e-5)


def test_thin_matrices() -> None:
    draw = np.random.default_rng(5)
    matrix = draw.standard_normal((50, 4)).astype(np.float32)
    found = orthonormal(np.hstack([matrix, matrix[:, :1]]))
    np.testing.assert_allclose(found[:, :4].T @ found[:, :4], np.eye(4), atol=1e-6)
    assert not found[:, 4].any()
    np.testing.assert_allclose(outer(matrix, matrix), matrix @ matrix.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"low_rank": 0}, "rank of a low rank must be a whole number of 1 or more, got 0"),
        ({"low_rank": 2, "density": 0.01}, "leave out density, compress and mode"),
        ({"low_rank": 2, "mode": "asp"}, "leave out density, compress and mode"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        averages([[np.zeros(4, np.float32)] * 4], **options)


def test_whole_numbers_have_no_low_rank() -> None:
    with pytest.raises(UsageError, match="low_rank needs gradients of floats"):
        averages([[np.zeros(4096, np.int64)] * 4], low_rank=LowRank(2, begins=0))
