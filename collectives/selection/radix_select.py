"""Reads of the data that find the k-th largest key by its leading bits, each compiled to one loop over elements."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from collectives.compiled import compiled

Array = NDArray[Any]


@compiled
def histogram(bits: Array, mask: Any, shift: Any, counts: Array) -> None:
    """Count the keys by what is left of them after a shift to the right; ``counts`` (2, bins) is added to."""
    even = bits.size - bits.size % 2
    # two tables: equal neighbours would wait for each other's count
    for i in range(0, even, 2):
        counts[0, (bits[i] & mask) >> shift] += 1
        counts[1, (bits[i + 1] & mask) >> shift] += 1
    if even < bits.size:
        counts[0, (bits[even] & mask) >> shift] += 1


@compiled
def histogram_within(bits: Array, mask: Any, shift: Any, bin_shift: Any, border: Any, counts: Array) -> None:
    """As `histogram`, of the keys in one bin, ``border``, of an earlier one; ``counts`` has the bins that divide it."""
    first = border << (bin_shift - shift)
    for i in range(bits.size):
        key = bits[i] & mask
        if key >> bin_shift == border:
            counts[(key >> shift) - first] += 1


@compiled
def take(bits: Array, mask: Any, border: Any, ties: int, kept: Array) -> None:
    """Indices of keys above one, and of the first so many that equal it; the result has one place more."""
    count = 0
    for i in range(bits.size):
        key = bits[i] & mask
        tie = (key == border) & (ties > 0)
        kept[count] = i
        count += (key > border) | tie
        ties -= tie


@compiled
def divide(bits: Array, mask: Any, shift: Any, border: Any, certain: Array, candidates: Array) -> None:
    """Indices of keys that lie above a bin of the histogram, and of those in it; both buffers just fit."""
    sure = maybe = 0
    for i in range(bits.size):
        place = (bits[i] & mask) >> shift
        if place >= border:
            if place > border:
                certain[sure] = i
                sure += 1
            else:
                candidates[maybe] = i
                maybe += 1
