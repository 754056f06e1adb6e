"""Filters of gradients - codes, low rank, significance - and the state that they keep."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import topoplan
from collectives import GradientSynchronizer
from collectives.sparse.quantization import code_levels, from_fixed_point, largest_magnitudes, to_fixed_point
from collectives.training.common_rows import CommonRows
from collectives.training.gradient_filters import Cast, CountMin, Quantize, Threshold
from collectives.training.low_rank import LowRank, orthonormal, outer
from topoplan.errors import UsageError
from topoplan.schedules.registry import make_schedule

Array = NDArray[Any]

RANKS = 4
PLAN = topoplan.plan("v100x4")


def averages(steps: list[list[Array]], plan: Any = PLAN, **options: Any) -> tuple[list[list[Array]], Any]:
    zeros = [[np.zeros_like(one)] for one in steps[0]]
    with GradientSynchronizer(zeros, plan, backend="loopback", **options) as synchronizer:
        got = [[one[0] for one in synchronizer.step([[one] for one in step])] for step in steps]
    # An exchange is recorded after its handle is done.
    return got, synchronizer.recorder.exchanges()


def drawn(steps: int, elements: int, dtype: Any = np.float32, seed: int = 11) -> list[list[Array]]:
    draw = np.random.default_rng(seed)
    return [[draw.standard_normal(elements).astype(dtype) for _ in range(RANKS)] for _ in range(steps)]


def products(draw: np.random.Generator, size: int, rank: int) -> list[Array]:
    """Return one gradient for each rank, products of thin matrices with the same space of rows."""
    left = draw.standard_normal((size, rank))
    return [(left @ draw.standard_normal((rank, size))).astype(np.float32).reshape(-1) for _ in range(RANKS)]


FILTERS: dict[str, dict[str, Any]] = {
    "codes": {"compression": Quantize(8)},
    "low rank": {"compression": LowRank(2, begins=0, matrices="bucket")},
    "layers": {"compression": LowRank(2, begins=0, matrices="layers")},
    "rows": {"compression": CommonRows(0.2)},
    "significance": {"compression": Threshold(4.0)},
    "admission": {"compression": Threshold(4.0, admission=3)},
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", FILTERS)
def test_all_ranks_get_the_same_bits(name: str) -> None:
    for step in averages(drawn(20, 1000), **FILTERS[name])[0]:
        assert len({one.tobytes() for one in step}) == 1


@pytest.mark.parametrize(
    ("gradient", "options", "message"),
    [
        (np.int64, {"compression": Quantize(8)}, "Quantize needs gradients of floats, got int64"),
        (
            np.float32,
            {"compression": LowRank(2, matrices="bucket"), "sync": "asp"},
            "compression LowRank needs steps that wait",
        ),
        (
            np.float32,
            {"compression": Cast("float16"), "sync": "local:2"},
            "compression Cast needs steps that",
        ),
        (
            np.int64,
            {"compression": LowRank(2, begins=0, matrices="bucket")},
            "LowRank needs gradients of floats",
        ),
        (np.int32, {"compression": Threshold(0.5)}, "Threshold needs gradients of floats, got int32"),
        (np.float32, {"compression": 0.01}, r"compression must be one of TopK\(0.01\), LowRank.*, got 0.01"),
    ],
)
def test_refuses_settings_that_do_not_fit(gradient: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        averages([[np.zeros(4096, gradient)] * RANKS], **options)


def test_refuses_settings_out_of_range() -> None:
    for wrong in ({"admission": 0}, {"width": 1000}, {"width": 1}, {"depth": 0}, {"depth": True}):
        with pytest.raises(UsageError, match=f"{next(iter(wrong))} must be a"):
            Threshold(0.1, **wrong)
    with pytest.raises(UsageError, match="matrices of LowRank must be bucket or layers, got 'rows'"):
        LowRank(2, matrices="rows")
    with pytest.raises(UsageError, match="rank of LowRank must be a whole number of 1 or more, got 0"):
        LowRank(0)
    with pytest.raises(UsageError, match="bits of Quantize must be 8 or 16, got 12"):
        Quantize(12)
    with pytest.raises(UsageError, match="dtype of Cast must be float16 or bfloat16, got 'int8'"):
        Cast("int8")
    for value in (-1.0, np.nan):
        with pytest.raises(UsageError, match=f"threshold must be a magnitude of 0 or more, got {value}"):
            Threshold(value)
    with pytest.raises(UsageError, match="block of Quantize must be a whole number of 1 or more, got 0"):
        Quantize(block=0)
    with pytest.raises(UsageError, match="cannot be added over 128 ranks, at most over 127; take more bits"):
        code_levels(8, 128)
    for largest, message in (
        ([2], "beyond the largest magnitude that ranks have agreed on"),
        ([2, 2], "for 1 blocks; give a float32 for each"),
    ):
        with pytest.raises(UsageError, match=message):
            to_fixed_point(np.float32([1, 3]), bits=8, seed=0, largest=np.float32(largest))


# ---- codes


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_averages_are_within_a_scale_of_the_mean(bits: int, dtype: Any) -> None:
    step = drawn(1, 1000, dtype)[0]
    got, records = averages([step], compression=Quantize(bits))
    mean = np.mean([one.astype(np.float64) for one in step], axis=0)
    largest = np.max([largest_magnitudes(one) for one in step], axis=0)
    scale = np.repeat(largest / code_levels(bits, 4), 256)[:1000] * 1.02
    assert np.all(np.abs(got[0][0] - mean) <= scale + np.abs(mean) * np.finfo(dtype).eps)
    assert got[0][0].dtype == dtype
    assert records[0].how == f"{bits} bits"
    assert records[0].density * records[0].nbytes == 1000 * bits // 8 + 4 * 4


def test_every_plan_gives_the_same_bits() -> None:
    """Whole numbers add up alike in trees, rings and stars; sums of float32 do not."""
    step = drawn(1, 5000)[0]
    machine = topoplan.load("v100x4")
    plans = [PLAN] + [
        make_schedule(name, machine, "allreduce") for name in ("ring", "double-tree", "one-hop")
    ]
    found = [averages([step], plan, compression=Quantize(8))[0][0][0] for plan in plans]
    for one in found[1:]:
        np.testing.assert_array_equal(one, found[0])
    whole = [averages([step], plan)[0][0][0] for plan in plans]
    assert any(not np.array_equal(one, whole[0]) for one in whole[1:])


def test_rounding_is_unbiased() -> None:
    """Over 400 steps of one gradient the mean comes as near as independent errors let it: 5 standard errors."""
    step, steps = drawn(1, 600)[0], 400
    got, _ = averages([step] * steps, compression=Quantize(8))
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


def test_the_range_of_one_rank_is_its_own() -> None:
    values = drawn(1, 1000)[0][0]
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
    got, _ = averages([[np.zeros(300, np.float32)] * 4], compression=Quantize(8))
    assert not got[0][2].any()
    assert averages([[np.zeros(0, np.float32)] * 4], compression=Quantize(8))[0][0][1].shape == (0,)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, 3e38])
def test_a_block_without_codes_on_a_rank_is_nan_on_all(wrong: float, bits: int) -> None:
    step = drawn(1, 700)[0]
    bad = [one.copy() for one in step]
    bad[2][300] = wrong
    (_, found), _ = averages([step, bad], compression=Quantize(bits))
    for one in found:
        assert np.isnan(one[256:512]).all()
        assert np.isfinite(one[:256]).all()
        assert np.isfinite(one[512:]).all()
        np.testing.assert_array_equal(one, found[0])


# ---- low rank


def test_a_gradient_of_that_rank_is_averaged_exactly() -> None:
    step = products(np.random.default_rng(1), 32, 2)
    got, records = averages([step], compression=LowRank(2, begins=0, matrices="bucket"))
    np.testing.assert_allclose(got[0][0], np.mean(step, axis=0), rtol=1e-4, atol=1e-5)
    assert (records[0].how, records[0].density) == ("rank 2", (2 * 64 + 1) / 1024)  # and who uses it


@pytest.mark.parametrize("elements", [1000, 1024, 4097])
def test_error_feedback_of_a_low_rank_keeps_the_sum(elements: int) -> None:
    (step,) = drawn(1, elements)
    mean, steps = np.mean(step, axis=0), 60
    got, _ = averages([step] * steps, compression=LowRank(2, begins=0, matrices="bucket"))
    total = np.sum([one[0] for one in got], axis=0)
    forgetful, _ = averages(
        [step] * steps, compression=LowRank(2, feedback=False, begins=0, matrices="bucket")
    )
    lost = np.sum([one[0] for one in forgetful], axis=0)
    assert np.linalg.norm(total - steps * mean) < 0.5 * np.linalg.norm(lost - steps * mean)


@pytest.mark.parametrize("largest", [1.0, 4000.0])
def test_large_gradients_of_float16_do_not_overflow(largest: float) -> None:
    """As a loss scaler makes them: the thin matrices are no larger than the gradient's rows and columns."""
    draw = np.random.default_rng(5)
    whole = draw.standard_normal((64, 2)) @ draw.standard_normal((2, 64))
    step = [(whole * largest / np.abs(whole).max()).astype(np.float16) for _ in range(4)]
    got, _ = averages([step] * 5, compression=LowRank(2, begins=0, matrices="bucket"))
    for one in got:
        assert np.linalg.norm(one[0].astype(np.float64) - step[0]) < 0.02 * np.linalg.norm(
            step[0].astype(np.float64)
        )


@pytest.mark.parametrize("matrices", ["bucket", "layers"])
def test_products_beyond_float16_do_not_overflow_averages(matrices: str) -> None:
    """Rows of 40 elements of 30000 have a product of 190000, and their average is 30000."""
    step = [np.full((40, 40), 30000, np.float16)] * 4
    got, _ = averages([step] * 3, compression=LowRank(1, begins=0, matrices=matrices))
    for one in got:
        np.testing.assert_allclose(one[3].astype(np.float64), 30000, rtol=1e-2)


def test_the_first_steps_and_small_gradients_are_whole() -> None:
    steps = drawn(3, 400)
    got, records = averages(steps, compression=LowRank(4, matrices="bucket"))
    assert [one.how.startswith("rank") for one in records] == [False, False, True]
    np.testing.assert_allclose(got[1][0], np.mean(steps[1], axis=0), rtol=1e-5, atol=1e-6)
    small = [[np.arange(9, dtype=np.float32) for _ in range(4)]]
    assert averages(small, compression=LowRank(4, begins=0, matrices="bucket"))[1][0].density == 1.0


def test_a_gradient_after_zeros_has_new_directions() -> None:
    """A step of zeros leaves Q's columns dead; the next gradient finds new ones."""
    step = products(np.random.default_rng(4), 20, 1)
    zeros = [np.zeros(400, np.float32)] * 4
    got, _ = averages([zeros, step], compression=LowRank(1, begins=0, matrices="bucket"))
    np.testing.assert_array_equal(got[0][0], zeros[0])
    np.testing.assert_allclose(got[1][0], np.mean(step, axis=0), rtol=1e-4, atol=1e-5)


def test_thin_matrices_are_orthonormal() -> None:
    draw = np.random.default_rng(5)
    matrix = draw.standard_normal((50, 4)).astype(np.float32)
    found = orthonormal(np.hstack([matrix, matrix[:, :1]]))
    np.testing.assert_allclose(found[:, :4].T @ found[:, :4], np.eye(4), atol=1e-6)
    assert not found[:, 4].any()
    np.testing.assert_allclose(outer(matrix, matrix), matrix @ matrix.T, rtol=1e-4, atol=1e-4)


# ---- significance


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_a_threshold_of_zero_is_dense(dtype: str) -> None:
    """Whole numbers, so that every order of additions gives the same; few and many that are not zero."""
    draw = np.random.default_rng(3)
    for share in (0.02, 1.0):
        step = [(draw.integers(-9, 9, 500) * (draw.random(500) < share)).astype(dtype) for _ in range(RANKS)]
        got, (record,) = averages([step], compression=Threshold(0))
        for one in got[0]:
            np.testing.assert_array_equal(one, np.mean(step, axis=0, dtype=np.float64).astype(dtype))
        assert (record.how, record.density == 1.0) == ("above 0", share == 1.0)


@pytest.mark.parametrize("admission", [1, 3])
def test_sums_differ_from_gradients_by_no_more_than_is_kept(admission: int) -> None:
    steps, threshold = 40, 4.0
    gradients = drawn(steps, 700)
    how = Threshold(threshold, admission=admission)
    got, records = averages(gradients, compression=how)
    given = np.cumsum([np.mean(step, axis=0, dtype=np.float64) for step in gradients], axis=0)
    used = np.cumsum([one[0].astype(np.float64) for one in got], axis=0)
    largest = max(float(np.abs(one).max()) for step in gradients for one in step)
    assert np.abs(given - used).max() <= threshold + (admission - 1) * largest + 1e-4
    assert max(one.density for one in records) < 1


def test_without_feedback_small_entries_are_never_used() -> None:
    step = [np.full(64, 0.4, np.float32) for _ in range(RANKS)]
    kept, _ = averages([step] * 4, compression=Threshold(1.0))
    assert [float(one[0][0]) for one in kept] == pytest.approx([0, 0, 1.2, 0])
    lost, _ = averages([step] * 4, compression=Threshold(1.0, feedback=False))
    assert [float(one[0][0]) for one in lost] == [0, 0, 0, 0]


def test_an_entry_is_admitted_when_it_has_come_often_enough() -> None:
    """Entry 5 is large in every step, entry 9 in one alone: 5 goes in the third step with all of it, 9 never."""
    steps = []
    for number in range(4):
        line = np.zeros(400, np.float32)
        line[5] = 2.0
        line[9] = 3.0 * (number == 1)
        steps.append([line] * RANKS)
    got, _ = averages(steps, compression=Threshold(2.5, admission=3))
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
    _, (record,) = averages(gradients, compression=Threshold(1.0))
    assert record.how == "above 1"
    assert record.density == pytest.approx(31 * 8 / 4000)
