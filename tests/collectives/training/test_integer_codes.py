"""Sums of codes: the same bits by every plan, near the mean, right on average, never too large; refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import topoplan
from collectives import GradientSynchronizer
from collectives.sparse.quantization import code_levels, from_fixed_point, largest_magnitudes, to_fixed_point
from collectives.training.gradient_filters import IntegerCodes
from topoplan.errors import UsageError
from topoplan.schedules.registry import make_schedule

PLAN = topoplan.plan("v100x4")


def averages(
    steps: list[list[np.ndarray[Any, Any]]], plan: Any = PLAN, **options: Any
) -> tuple[list[Any], Any]:
    """What every rank gets in each step; gradients by step and rank."""
    zeros = [[np.zeros_like(one)] for one in steps[0]]
    with GradientSynchronizer(zeros, plan, backend="loopback", **options) as synchronizer:
        got = [[one[0] for one in synchronizer.step([[one] for one in step])] for step in steps]
        return got, synchronizer.recorder.exchanges()


def random_step(elements: int, seed: int, dtype: Any = np.float32) -> list[np.ndarray[Any, Any]]:
    draw = np.random.default_rng(seed)
    return [draw.standard_normal(elements).astype(dtype) for _ in range(4)]


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_averages_are_within_a_scale_and_the_same_on_all_ranks(bits: int, dtype: Any) -> None:
    step = random_step(1000, 1, dtype)
    got, records = averages([step], codes=bits)
    mean = np.mean([one.astype(np.float64) for one in step], axis=0)
    largest = np.max([largest_magnitudes(one) for one in step], axis=0)
    scale = np.repeat(largest / code_levels(bits, 4), 256)[:1000] * 1.02
    assert np.all(np.abs(got[0][0] - mean) <= scale + np.abs(mean) * np.finfo(dtype).eps)
    for one in got[0]:
        assert one.dtype == dtype
        np.testing.assert_array_equal(one, got[0][0])
    assert records[0].how == f"{bits} bits"
    assert records[0].density * records[0].nbytes == 1000 * bits // 8 + 4 * 4


def test_every_plan_gives_the_same_bits() -> None:
    """Whole numbers add up alike in trees, rings and stars; sums of float32 do not."""
    step = random_step(5000, 2)
    machine = topoplan.load("v100x4")
    plans = [PLAN] + [
        make_schedule(name, machine, "allreduce") for name in ("ring", "double-tree", "one-hop")
    ]
    found = [averages([step], plan, codes=8)[0][0][0] for plan in plans]
    for one in found[1:]:
        np.testing.assert_array_equal(one, found[0])
    whole = [averages([step], plan)[0][0][0] for plan in plans]
    assert any(not np.array_equal(one, whole[0]) for one in whole[1:])


def test_rounding_is_right_on_average() -> None:
    """Over 400 steps of one gradient the mean comes as near as independent errors let it: 5 standard errors."""
    step, steps = random_step(600, 3), 400
    got, _ = averages([step] * steps, codes=8)
    scale = np.max([largest_magnitudes(one) for one in step], axis=0).max() / code_levels(8, 4) * 1.02
    error = np.mean([one[0] for one in got], axis=0) - np.mean(step, axis=0)
    assert np.abs(error).max() < 5 * scale / 2 / np.sqrt(4 * steps)


@pytest.mark.parametrize(("bits", "ranks"), [(8, 1), (8, 3), (8, 127), (16, 5), (16, 1000)])
def test_no_sum_of_codes_overflows(bits: int, ranks: int) -> None:
    """Each rank gives the largest magnitude: the sum of codes fits into the bits, for both signs."""
    draw = np.random.default_rng(ranks)
    values = np.float32(draw.uniform(0.1, 10, 64)) * np.float32([1, -1] * 32)
    made = [
        to_fixed_point(
            values,
            bits=bits,
            seed=1,
            stream=rank,
            block=1,
            ranks=ranks,
            largest=largest_magnitudes(values, 1),
        )
        for rank in range(ranks)
    ]
    exact = np.sum([one.codes.astype(np.int64) for one in made], axis=0)
    wrapped = np.add.reduce([one.codes for one in made], axis=0, dtype=made[0].codes.dtype)
    np.testing.assert_array_equal(wrapped, exact)
    assert np.abs(exact).max() <= 2 ** (bits - 1) - 1


def test_a_range_of_ones_own_is_the_range_of_one_rank() -> None:
    values = random_step(1000, 4)[0]
    alone = to_fixed_point(values, bits=8, seed=7)
    agreed = to_fixed_point(values, bits=8, seed=7, largest=largest_magnitudes(values))
    np.testing.assert_array_equal(agreed.codes, alone.codes)
    np.testing.assert_array_equal(from_fixed_point(agreed), from_fixed_point(alone))


def test_a_largest_magnitude_is_never_rounded_down() -> None:
    values = np.array([1 + 2.0**-40, 2.0**-160, 0.0, 0.0, np.nan])
    found = largest_magnitudes(values, block=1)
    assert all(one >= value for one, value in zip(found[:4], values[:4], strict=True))
    assert np.isnan(found[4])


def test_gradients_of_zeros_and_of_no_elements() -> None:
    got, _ = averages([[np.zeros(300, np.float32)] * 4], codes=8)
    assert not got[0][2].any()
    assert averages([[np.zeros(0, np.float32)] * 4], codes=8)[0][0][1].shape == (0,)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, 3e38])
def test_a_block_that_has_no_codes_on_some_rank_is_nan_on_all(wrong: float, bits: int) -> None:
    step = random_step(700, 5)
    bad = [one.copy() for one in step]
    bad[2][300] = wrong
    (_, found), _ = averages([step, bad], codes=bits)
    for one in found:
        assert np.isnan(one[256:512]).all()
        assert np.isfinite(one[:256]).all()
        assert np.isfinite(one[512:]).all()
        np.testing.assert_array_equal(one, found[0])


@pytest.mark.parametrize(
    ("gradient", "options", "words"),
    [
        (np.zeros(4, np.float32), {"codes": 12}, "bits of codes must be 8 or 16, got 12"),
        (np.zeros(4, np.float32), {"codes": 8, "density": 0.1}, "codes is for dense gradients in mode bsp"),
        (np.zeros(4, np.float32), {"codes": 8, "low_rank": 2}, "give low_rank or codes"),
        (np.zeros(4, np.int64), {"codes": 8}, "codes needs gradients of floats, got int64"),
    ],
)
def test_refusals(gradient: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        averages([[np.zeros_like(gradient)] * 3 + [gradient]], **options)


def test_more_ranks_than_codes_and_values_beyond_the_range_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot be added over 128 ranks, at most over 127; take more bits"):
        code_levels(8, 128)
    with pytest.raises(UsageError, match="beyond the largest magnitude that ranks have agreed on"):
        to_fixed_point(np.float32([1, 3]), bits=8, seed=0, largest=np.float32([2]))
    with pytest.raises(UsageError, match="block 1 or more, got 0 and 0"):
        IntegerCodes(block=0)
    with pytest.raises(UsageError, match="for 1 blocks; give a float32 for each"):
        to_fixed_point(np.float32([1, 3]), bits=8, seed=0, largest=np.float32([2, 2]))
