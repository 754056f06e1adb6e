"""Fits of copies: exact on undisturbed times, within the stated bound on disturbed ones, and outliers named."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topoplan.errors import UsageError
from topoplan.operate.calibration.fit import PairSamples, fit_line, fit_pair, outlying
from topoplan.units import parse_sizes

SIZES = parse_sizes("64KB:256MB")
ALPHAS = st.floats(1e-6, 1e-4)
BANDWIDTHS = st.floats(0.5, 1000)


def seconds(alpha: float, bandwidth: float, sizes: Sequence[int] = SIZES) -> list[tuple[int, float]]:
    """Times of copies on a wire of this latency and bandwidth."""
    return [(nbytes, alpha + nbytes / (bandwidth * 1e9)) for nbytes in sizes]


def samples(times: Sequence[tuple[int, Sequence[float]]]) -> PairSamples:
    return PairSamples("gpu0", "gpu1", tuple((nbytes, tuple(repeats)) for nbytes, repeats in times))


@given(ALPHAS, BANDWIDTHS, st.lists(st.sampled_from(SIZES), min_size=2, unique=True))
def test_undisturbed_times_give_latency_and_bandwidth_back(
    alpha: float, bandwidth: float, sizes: list[int]
) -> None:
    """Of any two or more sizes over four decades, to eight digits of what the longest time resolves."""
    times = seconds(alpha, bandwidth, sizes)
    if max(sizes) / (bandwidth * 1e9) < 0.2 * alpha:
        return
    line = fit_line(times)
    assert line.bandwidth == pytest.approx(bandwidth, rel=1e-8)
    assert line.alpha == pytest.approx(alpha, abs=1e-8 * max(t for _, t in times))
    assert line.distance < 1e-8


@st.composite
def disturbed(draw: st.DrawFn) -> tuple[float, float, float, PairSamples]:
    """Ten repeats of each size, all within a few per cent of the truth but for two of ten, which are anything."""
    alpha, bandwidth, noise = draw(ALPHAS), draw(BANDWIDTHS), draw(st.floats(0, 0.05))
    times = []
    for nbytes, true in seconds(alpha, bandwidth):
        clean = draw(st.lists(st.floats(1 - noise, 1 + noise), min_size=8, max_size=8))
        wild = draw(st.lists(st.floats(0.01, 100), min_size=2, max_size=2))
        times.append((nbytes, [true * factor for factor in draw(st.permutations(clean + wild))]))
    return alpha, bandwidth, noise, samples(times)


@settings(max_examples=40)
@given(disturbed())
def test_with_a_fifth_of_the_repeats_disturbed_the_line_stays_within_its_bound(
    case: tuple[float, float, float, PairSamples],
) -> None:
    """On average over the sizes within 2e / (1 - e) of the truth, relative to the medians, where e is the noise."""
    alpha, bandwidth, noise, pair = case
    line = fit_pair(pair).line
    off = [
        abs(line.seconds(nbytes) - true) / median(dict(pair.times)[nbytes])
        for nbytes, true in seconds(alpha, bandwidth)
    ]
    assert fmean(off) <= 2 * noise / (1 - noise) + 1e-9


@given(
    st.lists(st.floats(1e-6, 1e-1), min_size=4, max_size=8),
    st.lists(st.tuples(st.floats(0, 1e-3), st.floats(1e-13, 1e-8)), min_size=1),
)
def test_no_line_is_nearer_than_the_fitted_one(times: list[float], others: list[tuple[float, float]]) -> None:
    """Least absolute relative distances, over all lines with a latency of zero or more, whatever the times."""
    points = [(4**place << 16, time) for place, time in enumerate(times)]
    try:
        line = fit_line(points)
    except UsageError:
        return
    assert line.alpha >= 0
    for alpha, slope in others:
        other = fmean(abs(alpha + nbytes * slope - time) / time for nbytes, time in points)
        assert line.distance <= other * (1 + 1e-9)


@given(ALPHAS, BANDWIDTHS, st.integers(-8, 8), st.lists(st.floats(0.5, 2), min_size=13, max_size=13))
def test_times_in_another_unit_give_the_same_line(
    alpha: float, bandwidth: float, power: int, factors: list[float]
) -> None:
    """2^k times as long: 2^k the latency, 2^-k the bandwidth, to the last bit."""
    times = [(n, t * f) for (n, t), f in zip(seconds(alpha, bandwidth), factors, strict=True)]
    try:
        line, scaled = fit_line(times), fit_line([(n, t * 2.0**power) for n, t in times])
    except UsageError:
        return
    assert (scaled.alpha, scaled.bandwidth) == (line.alpha * 2.0**power, line.bandwidth * 2.0**-power)


def test_a_size_that_is_slow_as_a_whole_moves_nothing() -> None:
    """A third of the sizes three times too slow: the line is that of the others, exactly."""
    times = seconds(1e-5, 25)
    slow = [(nbytes, time * (3 if place % 3 == 1 else 1)) for place, (nbytes, time) in enumerate(times)]
    line = fit_line(slow)
    assert (line.alpha, line.bandwidth) == (pytest.approx(1e-5), pytest.approx(25))


def test_outliers_are_named_with_size_and_repeat_and_change_nothing() -> None:
    """One repeat of 1 MB three times too long, one of 16 MB at half: both are named, the fit is that without them."""
    clean = [(nbytes, [time] * 9) for nbytes, time in seconds(1e-5, 25)]
    dirty = [(nbytes, list(repeats)) for nbytes, repeats in clean]
    dirty[4][1][3] *= 3
    dirty[8][1][8] /= 2
    fit = fit_pair(samples(dirty))
    assert [str(outlier) for outlier in fit.outliers] == ["1MB repeat 4 (3x)", "16MB repeat 9 (0.5x)"]
    assert fit.line == fit_pair(samples(clean)).line
    assert not fit_pair(samples(clean)).outliers


def test_what_stands_out_is_beyond_the_deviation_and_beyond_a_tenth() -> None:
    """More than 3.5 scaled median absolute deviations, and more than 10 % of the median; of two values none."""
    assert outlying([1.0, 1.0, 1.0, 1.09]) == ()
    assert outlying([1.0, 1.0, 1.0, 1.11]) == (3,)
    assert outlying([1.0, 1.2, 0.8, 1.4, 0.6]) == ()
    assert outlying([1.0, 1.01, 0.99, 0.5, 1.02]) == (3,)
    assert outlying([1.0, 5.0]) == ()


ZERO_TOLD = "bytes must be above zero; choose larger sizes"
FLAT_TOLD = "whatever their size, which leaves their bandwidth open; choose larger sizes"
SIZES_TOLD = "must be two or more, ascending, from 1 byte: one size cannot tell latency from bandwidth"


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([(1024, [1e-5])], f"copies gpu0>gpu1: sizes [1024] {SIZES_TOLD}"),
        ([(2048, [1e-5]), (1024, [1e-5])], f"copies gpu0>gpu1: sizes [2048, 1024] {SIZES_TOLD}"),
        ([(1024, [1e-5]), (2048, [1e-5, 0.0])], f"copies gpu0>gpu1: times [1e-05, 0.0] of 2048 {ZERO_TOLD}"),
        ([(1024, [1e-5]), (2048, [1.0001e-5])], f"gpu0>gpu1: copies of up to 2KB take 10 us {FLAT_TOLD}"),
    ],
)
def test_refuses_times_that_tell_no_bandwidth(times: list[tuple[int, list[float]]], message: str) -> None:
    with pytest.raises(UsageError) as error:
        fit_pair(samples(times))
    assert str(error.value) == message
