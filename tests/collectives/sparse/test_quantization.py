"""Values on the wire: rounded formats against an oracle, fixed point without bias, exactly and in the mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from collectives.sparse.quantization import (
    FloatFormat,
    from_fixed_point,
    narrow,
    random_key,
    round_at_random,
    to_fixed_point,
    uniform_at,
    widen,
)
from topoplan.errors import UsageError

FIRST_INFINITE = {
    "float32": float.fromhex("0x1.ffffffp127"),
    "float16": 65520.0,
    "bfloat16": float.fromhex("0x1.ffp127"),
}
"""The least magnitude that a format rounds to infinity."""

EVERY_16_BITS = np.arange(1 << 16, dtype=np.uint16)


def finite_magnitudes(wire: FloatFormat) -> NDArray[np.float64]:
    """Every finite magnitude of a 16-bit format in ascending order; the place of each is its bits."""
    if wire == "float16":
        return EVERY_16_BITS[:0x7C00].view(np.float16).astype(np.float64)
    return (EVERY_16_BITS[:0x7F80].astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def nearest_bits(values: NDArray[np.floating], wire: FloatFormat) -> NDArray[np.uint16]:
    """Bits of the nearest value of a format by search among all of them, ties to the even bits."""
    magnitudes = finite_magnitudes(wire)
    exact = np.abs(values.astype(np.float64))
    above = np.searchsorted(magnitudes, exact)
    below = np.maximum(above - 1, 0)
    # The place behind the largest stands for infinity, one step beyond it.
    steps = np.append(magnitudes, 2 * magnitudes[-1] - magnitudes[-2])
    last = np.minimum(above, len(magnitudes))
    to_above, to_below = steps[last] - exact, exact - magnitudes[below]
    bits = np.where((to_above < to_below) | ((to_above == to_below) & (last % 2 == 0)), last, below)
    return (bits | (np.signbit(values).astype(np.int64) << 15)).astype(np.uint16)


def neighbours(wire: FloatFormat, dtype: type[np.floating]) -> NDArray[np.floating]:
    """All values of a format, all ties between them, and what lies next to the ties in a wider dtype."""
    magnitudes = finite_magnitudes(wire)
    ties = ((magnitudes[1:] + magnitudes[:-1]) / 2).astype(dtype)
    limit = np.array([FIRST_INFINITE[wire]]).astype(dtype)
    points = np.concatenate([magnitudes.astype(dtype), ties, limit])
    around = np.concatenate(
        [points, np.nextafter(points, dtype(np.inf)), np.nextafter(points, dtype(-np.inf))]
    )
    around = around[np.isfinite(around)]
    return np.concatenate([around, -around])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_every_value_every_tie_and_its_neighbours_round_to_nearest_even(
    wire: FloatFormat, dtype: type[np.floating]
) -> None:
    values = neighbours(wire, dtype)
    assert np.array_equal(narrow(values, wire).view(np.uint16), nearest_bits(values, wire))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_every_bit_pattern_survives_widening_and_narrowing(
    wire: FloatFormat, dtype: type[np.floating]
) -> None:
    received = EVERY_16_BITS.view(np.float16) if wire == "float16" else EVERY_16_BITS
    again = narrow(widen(received, wire, np.dtype(dtype)), wire).view(np.uint16)
    quiet = 0x0200 if wire == "float16" else 0x0040
    is_nan = np.isnan(widen(received, wire, np.dtype(np.float32)))
    assert np.array_equal(again[~is_nan], EVERY_16_BITS[~is_nan])
    assert np.array_equal(again[is_nan] | quiet, EVERY_16_BITS[is_nan] | quiet)


def test_every_nan_of_float32_stays_nan_in_bfloat16() -> None:
    payloads = np.concatenate([np.arange(1, 2**12), 2 ** np.arange(23)]).astype(np.uint32)
    for sign in (0x7F800000, 0xFF800000):
        nan = (payloads | np.uint32(sign)).view(np.float32)
        assert np.all(np.isnan(widen(narrow(nan, "bfloat16"), "bfloat16", np.dtype(np.float32))))
    assert np.all(np.isnan(narrow(np.array([np.nan, -np.nan]), "float16")))


@pytest.mark.parametrize("wire", ["float32", "float16", "bfloat16"])
def test_what_overflows_becomes_infinite(wire: FloatFormat) -> None:
    limit = FIRST_INFINITE[wire]
    values = np.array([limit, -limit, np.nextafter(limit, 0), 1e308, np.inf, -np.inf, np.nan, 0.0])
    back = widen(narrow(values, wire), wire, np.dtype(np.float64))
    assert np.isinf(back).tolist() == [True, True, False, True, True, True, False, False]


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_codes_are_the_rule_applied_to_the_random_number_of_each_position(
    bits: int, dtype: type[np.floating]
) -> None:
    values = np.random.default_rng(1).standard_normal(1000).astype(dtype)
    fixed = to_fixed_point(values, bits=bits, seed=5, step=2, stream=3, block=64)
    key = np.uint64(random_key(5, 2, 3))
    levels = values.astype(np.float64) / np.repeat(fixed.scales, 64)[:1000]
    numbers = [uniform_at(key, position) for position in range(1000)]
    assert fixed.codes.tolist() == [round_at_random(*pair) for pair in zip(levels, numbers, strict=True)]


@pytest.mark.parametrize("bits", [8, 16])
def test_the_mean_of_many_steps_is_the_value(bits: int) -> None:
    values = np.random.default_rng(2).laplace(size=500).astype(np.float32)
    steps = 2000
    total = np.zeros(500)
    for step in range(steps):
        fixed = to_fixed_point(values, bits=bits, seed=6, step=step)
        total += from_fixed_point(fixed)
    scales = np.repeat(fixed.scales.astype(np.float64), fixed.block)[:500]
    levels = values / scales
    fraction = levels - np.floor(levels)
    # In units of the standard error of each mean; a bias of a fiftieth of a step would be beyond 6.
    error = (total / steps - values) / scales
    deviation = np.sqrt(np.maximum(fraction * (1 - fraction), 1e-3) / steps)
    assert np.max(np.abs(error / deviation)) < 5
    assert abs(np.mean(error)) < 4 * np.sqrt(0.25 / steps / 500)
    assert 0.8 < np.mean((error / deviation) ** 2) < 1.2


def test_random_numbers_are_spread_evenly_and_independent_of_their_neighbours() -> None:
    numbers = np.array([uniform_at(np.uint64(9), position) for position in range(20_000)])
    counts = np.bincount((numbers * 100).astype(int), minlength=100)
    assert np.sum((counts - 200.0) ** 2 / 200) < 150  # chi-squared with 99 degrees: 1 in 1000 beyond 149
    for lag in (1, 2, 16, 256):
        assert abs(np.corrcoef(numbers[lag:], numbers[:-lag])[0, 1]) < 4 / np.sqrt(20_000)


def test_seed_step_and_stream_each_give_roundings_that_agree_only_by_chance() -> None:
    values = np.random.default_rng(3).standard_normal(4096).astype(np.float32)
    base = to_fixed_point(values, bits=8, seed=1, step=2, stream=3)
    assert np.array_equal(to_fixed_point(values, bits=8, seed=1, step=2, stream=3).codes, base.codes)
    fraction = np.modf(values / np.repeat(base.scales, 256))[0] % 1
    by_chance = np.mean(fraction**2 + (1 - fraction) ** 2)
    for seed, step, stream in ((2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3), (1, 3, 2)):
        other = to_fixed_point(values, bits=8, seed=seed, step=step, stream=stream)
        assert abs(np.mean(other.codes == base.codes) - by_chance) < 4 * 0.5 / 64


@given(
    st.lists(st.floats(-(2.0**127), 2.0**127, width=32), max_size=40),
    st.sampled_from([8, 16]),
    st.integers(1, 50),
    st.integers(0, 2**64 - 1),
)
@example(numbers=[6.58554226294091e-41], bits=16, block=1, seed=0)  # the scale is subnormal
@settings(max_examples=200)
def test_every_float32_comes_back_within_one_step_and_codes_times_scales_are_exact(
    numbers: list[float], bits: int, block: int, seed: int
) -> None:
    values = np.array(numbers, dtype=np.float32)
    fixed = to_fixed_point(values, bits=bits, seed=seed, block=block)
    back = from_fixed_point(fixed)
    scales = np.repeat(fixed.scales.astype(np.float64), block)[: len(values)]
    assert np.array_equal(back.astype(np.float64), fixed.codes * scales)
    error = np.abs(back.astype(np.float64) - values)
    assert np.all((error < scales) | ((scales == 0) & (error == 0)))
    for start in range(0, len(values), block):
        largest = float(np.max(np.abs(values[start : start + block])))
        scale = float(fixed.scales[start // block])
        exact = largest / (2 ** (bits - 1) - 1)
        # rounded up to 9 bits or more, or where it is subnormal to the next multiple of the smallest float32
        assert exact * (1 - 2.0**-50) <= scale <= max(exact * (1 + 2.0**-8), exact + 2.0**-149)


def test_blocks_of_zeros_and_the_smallest_float_have_codes() -> None:
    values = np.array([0, 0, 2.0**-149, 0], dtype=np.float32)
    fixed = to_fixed_point(values, bits=16, seed=0, block=2)
    assert fixed.scales.tolist() == [0, 2.0**-149]
    assert np.array_equal(from_fixed_point(fixed), values)
    tiny = to_fixed_point(np.array([5e-324, 0.0]), bits=8, seed=0)
    assert tiny.scales.tolist() == [2.0**-149]
    assert tiny.codes.tolist() == [0, 0]


def test_the_mean_over_all_random_numbers_is_the_value_exactly() -> None:
    for value in np.arange(-24, 25) / 8:
        rounded = [round_at_random(value, place / 64) for place in range(64)]
        assert sum(rounded) / 64 == value
        assert set(rounded) <= {int(np.floor(value)), int(np.ceil(value))}


def one_infinite(place: int, value: float) -> NDArray[np.float64]:
    return np.where(np.arange(300) == place, value, 1.0)


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (np.arange(3), {}, "vector of float16, float32 or float64"),
        (np.zeros((2, 2)), {}, "vector of float16, float32 or float64"),
        (np.zeros(2, np.complex64), {}, "vector of float16, float32 or float64"),
        (np.ones(3), {"bits": 4}, "block at least 1, got 4 and 256"),
        (np.ones(3), {"block": 0}, "block at least 1, got 8 and 0"),
        (np.ones(3), {"seed": -1}, "seed -1 is out of range"),
        (np.ones(3), {"step": 2**64}, "step 18446744073709551616 is out of range"),
        *[
            (one_infinite(place, value), {}, f"at position {place} has no fixed-point form")
            for place, value in ((0, np.nan), (255, np.inf), (256, -np.inf), (299, 1.8e38), (299, -1e300))
        ],
    ],
)
def test_refuses_what_has_no_fixed_point_form(
    values: NDArray[Any], options: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        to_fixed_point(values, **{"bits": 8, "seed": 0, **options})
    if values.dtype != np.float64 or values.ndim > 1:
        with pytest.raises(UsageError, match=message):
            narrow(values, "bfloat16")


def test_reads_strided_read_only_and_empty_values() -> None:
    values = np.linspace(-1, 1, 100)
    spaced = np.repeat(values, 2)[::2]
    spaced.flags.writeable = False
    one, two = (to_fixed_point(given_, bits=8, seed=4) for given_ in (values, spaced))
    assert np.array_equal(one.codes, two.codes)
    empty = to_fixed_point(np.empty(0), bits=8, seed=0)
    assert empty.scales.shape == empty.codes.shape == from_fixed_point(empty).shape == (0,)
