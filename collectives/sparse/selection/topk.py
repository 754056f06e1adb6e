"""Select the exact k largest entries by magnitude, mostly in one read of the data.

The bits of a float without its sign, read as an integer, order as the magnitudes do: zero, denormals, numbers,
infinity, and NaN above all (`Magnitudes`). So selection by magnitude is selection of integers, for every kind of
float.

A sample gives a threshold that a little more than k entries will reach. One read gathers those; if they are k or more,
they certify themselves and hold the result. If the sample misled, or k is not small, a histogram of the leading bits
divides the entries exactly into certain ones, candidates and others, in two reads. The result is the same: it depends
on the data alone.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any

import numpy as np
from numpy.typing import NDArray

from topoplan.errors import UsageError

INTEGERS: dict[str, tuple[type[np.signedinteger[Any]], int]] = {
    "float16": (np.int16, 0x7C00),
    "bfloat16": (np.int16, 0x7F80),
    "float32": (np.int32, 0x7F80_0000),
    "float64": (np.int64, 0x7FF0_0000_0000_0000),
}
"""For each kind of float the integer of its size, and the key of infinity."""


@dataclass(frozen=True, slots=True, eq=False)
class Magnitudes:
    """An array of floats, seen as integers.

    `bits` is the floats' own memory as (d,) int16, int32 or int64, and ``bits & mask`` are the keys. Keys above
    `infinity` are NaN.
    """

    bits: NDArray[Any]
    mask: Any
    infinity: Any

    @property
    def width(self) -> int:
        """Bits of a key."""
        return 8 * self.bits.dtype.itemsize - 1


def magnitudes(array: NDArray[Any]) -> Magnitudes:
    """Return the keys of a contiguous array of float16, bfloat16 (of ml_dtypes), float32 or float64, flat.

    Raises `UsageError` for any other array.

    >>> keys = magnitudes(np.array([-2.0, 1.0, 0.5, -np.inf]))
    >>> np.argsort(keys.bits & keys.mask).tolist()
    [2, 1, 0, 3]
    """
    if not isinstance(array, np.ndarray) or array.dtype.name not in INTEGERS or not array.dtype.isnative:
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise UsageError(
            f"entries are selected from floats, got {kind}; give a numpy array of {', '.join(INTEGERS)}"
        )
    if not array.flags.c_contiguous:
        raise UsageError("the array is not contiguous; give numpy.ascontiguousarray of it")
    integer, infinity = INTEGERS[array.dtype.name]
    return Magnitudes(array.reshape(-1).view(integer), integer(np.iinfo(integer).max), integer(infinity))


LARGEST_SHARE = 1 / 16  # largest share of the entries for which a sampled threshold is tried
SMALL = 1 << 14  # elements below which a sample would not be much smaller than the data
SAMPLE_RUNS, RUN = 1024, 64  # the sample: runs of neighbours, spread over the data

HISTOGRAM_BITS = 11

SPARE = 64  # padding after entries, for reads and writes of whole vectors
LARGEST_BIN = 1 / 4  # largest share of the entries in one bin that is listed

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class SelectedEntries:
    """Some entries of an array, by ascending index; `bits` are the entries as the integers of `Magnitudes`."""

    indices: Array
    bits: Array

    def first(self, count: int) -> SelectedEntries:
        """Return the first entries, in the same memory."""
        return SelectedEntries(self.indices[:count], self.bits[:count])


def topk(x: Array, k: int, *, nan: str = "refuse") -> tuple[Array, Array]:
    """Return the k entries of largest magnitude, exactly.

    Among entries of equal magnitude at the border those with the lowest indices are selected.

    Parameters
    ----------
    x : contiguous array of float16, bfloat16, float32 or float64, any shape
        A numpy array, or a CuPy array: then see `collectives.sparse.selection.gpu_topk.topk_gpu`.
    k : int
        Between 0 and the number of elements d.
    nan : str
        "refuse" raises if NaN is among the k largest, as any NaN is for k > 0; "largest" counts it above infinity.

    Returns
    -------
    indices : (k,) int32, or int64 for d of 2**31 or more
        Into the flattened array, ascending.
    values : (k,) of x's dtype
        With their signs.

    Raises
    ------
    UsageError
        ``k`` is out of range, or ``x`` is of another kind or has a NaN.

    Notes
    -----
    One read of the data and O(k) more if the sampled threshold certifies itself, two otherwise. Deterministic: the
    sample is always taken at the same places.

    Examples
    --------
    >>> indices, values = topk(np.array([3.0, -7.0, 0.5, 7.0, -4.0]), 2)
    >>> indices.tolist(), values.tolist()
    ([1, 3], [-7.0, 7.0])
    """
    cupy = sys.modules.get("cupy")  # imported if x is one of its arrays
    if cupy is not None and isinstance(x, cupy.ndarray):
        from collectives.sparse.selection.gpu_topk import topk_gpu

        return topk_gpu(x, k, nan=nan)
    data = magnitudes(x)
    k = check_arguments(k, data.bits.size, nan)
    chosen = select(data, k)
    if nan == "refuse":
        refuse_nan(data, chosen)
    return chosen.indices, chosen.bits.view(x.dtype)


def check_arguments(k: int, size: int, nan: str) -> int:
    """Return k as an int; UsageError if it is out of range or `nan` is unknown."""
    try:
        count = index(k)
    except TypeError:
        count = -1
    if not 0 <= count <= size:
        raise UsageError(
            f"k must be a whole number from 0 to {size}, as many as there are entries, got {k!r}"
        )
    if nan not in ("refuse", "largest"):
        raise UsageError(f"nan={nan!r} is unknown; use 'refuse' or 'largest'")
    return count


def refuse_nan(data: Magnitudes, chosen: SelectedEntries) -> None:
    """Raise if a selected entry is NaN: it would be the largest of all."""
    broken = np.flatnonzero((chosen.bits & data.mask) > data.infinity)
    if len(broken):
        raise UsageError(
            f"element {int(chosen.indices[broken[0]])} is NaN; repair the gradient, or count it largest with "
            "nan='largest'"
        )


def select(data: Magnitudes, k: int) -> SelectedEntries:
    """Return the entries with the k largest keys."""
    size = data.bits.size
    if k == 0:
        return SelectedEntries(np.zeros(0, index_type(size)), data.bits[:0].copy())
    if k == size:
        return SelectedEntries(np.arange(size, dtype=index_type(size)), data.bits.copy())
    threshold = sampled_threshold(data, k)
    if threshold is not None:
        from collectives.sparse.selection.compiled_passes import gather

        buffer = candidate_buffer(data, k)
        count = gather(data.bits, data.mask, threshold, buffer.indices, buffer.bits)
        if count >= k:
            return largest_of(buffer, count, k, data.mask)
    return select_in_two_reads(data, k)


def sampled_threshold(data: Magnitudes, k: int) -> Any | None:
    """Return a key that probably k entries reach and not many more; None if a sample does not help."""
    size = data.bits.size
    if size < SMALL or k > LARGEST_SHARE * size:
        return None
    from collectives.sparse.selection.compiled_passes import sample_keys

    starts = sample_starts(size)
    keys = np.empty((len(starts), RUN), data.bits.dtype)
    sample_keys(data.bits, data.mask, starts, keys)
    return threshold_of_sample(keys.reshape(-1), k, size)


@lru_cache(maxsize=16)
def sample_starts(size: int) -> Array:
    """Return the starts of a sample's runs: one in each of equal parts, at offsets without a period."""
    runs = min(SAMPLE_RUNS, size // (4 * RUN))
    part = size // runs
    # the golden ratio spreads any number of offsets evenly
    offsets = (np.arange(runs) * 0.6180339887498949 % 1 * (part - RUN)).astype(np.int64)
    starts: Array = np.arange(runs) * part + offsets
    starts.flags.writeable = False
    return starts


def threshold_of_sample(sample: Array, k: int, size: int) -> Any:
    """Return the key of a sample with a margin of four standard deviations and four entries; reorders the sample.

    Never 0, which all entries reach.
    """
    expected = k / size * len(sample)
    rank = min(len(sample), int(expected + 4 * math.sqrt(expected) + 4))
    place = len(sample) - rank
    sample.partition(place)
    return max(sample[place], sample.dtype.type(1))


def candidate_buffer(data: Magnitudes, k: int) -> SelectedEntries:
    """Return a buffer for the entries that reach a sampled threshold."""
    from collectives.sparse.selection.compiled_passes import BLOCK

    return padded_buffer(2 * k + 4 * BLOCK, index_type(data.bits.size), data.bits.dtype)


def largest_of(
    entries: SelectedEntries,
    size: int,
    k: int,
    mask: Any,
    keys: Array | None = None,
    kept: SelectedEntries | None = None,
) -> SelectedEntries:
    """Return the k largest of the first `size` entries, k > 0, in the same order; of equal ones the first.

    Moves the others to the front of ``entries``. ``keys`` is a buffer for the keys of all, and ``kept`` for the
    result, if given; ``entries`` and ``kept`` have `SPARE` places more.
    """
    from collectives.sparse.selection.compiled_passes import keep_largest

    surplus = size - k
    keys = np.bitwise_and(entries.bits[:size], mask, out=keys)
    keys.partition(surplus)
    border = keys[surplus]
    ties = -1
    if surplus and keys[:surplus].max() == border:
        ties = k - int(np.count_nonzero(keys[surplus:] > border))
    if kept is None:
        kept = padded_buffer(k, entries.indices.dtype, entries.bits.dtype)
    keep_largest(entries.indices, entries.bits, size, mask, border, ties, kept.indices, kept.bits)
    return kept.first(k)


def padded_buffer(size: int, index: Any, bits: Any) -> SelectedEntries:
    """Return a buffer for entries, with `SPARE` places more."""
    return SelectedEntries(np.empty(size + SPARE, index), np.empty(size + SPARE, bits))


def select_in_two_reads(data: Magnitudes, k: int) -> SelectedEntries:
    """Return `select`, by a histogram of the leading bits; in more reads if many entries share them."""
    from collectives.sparse.selection.compiled_passes import divide, histogram

    shift = data.width - HISTOGRAM_BITS
    counts = np.zeros((2, 1 << HISTOGRAM_BITS), np.int64)
    histogram(data.bits, data.mask, shift, counts)
    border, certain_count, candidate_count = _border(counts.sum(axis=0), k)
    index = index_type(data.bits.size)
    if candidate_count > LARGEST_BIN * data.bits.size:
        return _select_in_ever_smaller_bins(data, k, shift, border, certain_count)
    certain, listed = np.empty(certain_count, index), padded_buffer(candidate_count, index, data.bits.dtype)
    divide(data.bits, data.mask, shift, border, certain, listed.indices)
    listed.bits[:candidate_count] = data.bits[listed.indices[:candidate_count]]
    rest = largest_of(listed, candidate_count, k - certain_count, data.mask)
    indices = np.sort(np.concatenate((certain, rest.indices)), kind="stable")
    return SelectedEntries(indices, data.bits[indices])


def _border(counts: Array, k: int) -> tuple[int, int, int]:
    """Return, from a histogram, the bin with the k-th largest key, and the entries above and in it."""
    reached = np.cumsum(counts[::-1])
    above = int(np.searchsorted(reached, k))
    certain_count = int(reached[above - 1]) if above else 0
    return len(counts) - 1 - above, certain_count, int(reached[above]) - certain_count


def _select_in_ever_smaller_bins(
    data: Magnitudes, k: int, shift: int, border: int, certain_count: int
) -> SelectedEntries:
    """Find the k-th largest key digit by digit, without a list of candidates, which ties make as long as the data."""
    from collectives.sparse.selection.compiled_passes import histogram_within, take

    while shift:
        next_shift = max(0, shift - HISTOGRAM_BITS)
        counts = np.zeros(1 << (shift - next_shift), np.int64)
        histogram_within(data.bits, data.mask, next_shift, shift, border, counts)
        place, more, _ = _border(counts, k - certain_count)
        border, certain_count, shift = (
            (border << (shift - next_shift)) + place,
            certain_count + more,
            next_shift,
        )
    indices = np.empty(k + 1, index_type(data.bits.size))
    take(data.bits, data.mask, border, k - certain_count, indices)
    return SelectedEntries(indices[:k], data.bits[indices[:k]])


def index_type(size: int) -> type[np.signedinteger[Any]]:
    """Return the integer type of indices below a size."""
    return np.int32 if size < 1 << 31 else np.int64
