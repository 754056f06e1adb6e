"""Reads of the data, each compiled to one loop: gathering, counting, dividing, adding up.

Every loop works on `BLOCK` elements at a time, so that a second look at them finds them in the nearest cache. What it
looks for is marked in bytes first, which processors do many at once, and then picked out word by word.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.compiled import compiled, trailing_zeros

BLOCK = 1024
"""Elements that are looked at together; buffers for indices need so many places more."""

OVERFLOW = -1
"""Instead of a count: more entries than places."""

Array = NDArray[Any]


@compiled
def gather(bits: Array, mask: Any, threshold: Any, indices: Array, found: Array) -> int:
    """Indices and bits of all keys that are at least a threshold, ascending; how many, or `OVERFLOW`.

    ``indices`` and ``found`` must have `BLOCK` places more than may be filled.
    """
    count = 0
    flags = np.zeros(BLOCK, np.uint8)
    for start in range(0, bits.size, BLOCK):
        block = bits[start : start + BLOCK]
        if count + BLOCK > indices.size:
            return OVERFLOW
        if block.size < BLOCK:
            flags[:] = 0
        for j in range(block.size):
            flags[j] = (block[j] & mask) >= threshold
        count = _pick(flags.view(np.uint64), block, start, indices, found, count)
    return count


@compiled
def accumulate(
    residual: Array,
    gradient: Array,
    bits: Array,
    mask: Any,
    threshold: Any,
    indices: Array,
    found: Array,
) -> tuple[int, int]:
    """Add a gradient to a residual, and gather from the sum as `gather` does, in the same read.

    ``bits`` is the residual's memory. Returns the count, or `OVERFLOW` where the places did not suffice (everything is
    added all the same), and where the first block with a NaN begins, -1 if there is none: nothing was added from there.
    """
    count = 0
    flags = np.zeros(BLOCK, np.uint8)
    sums = np.empty(BLOCK, residual.dtype)
    sum_bits = sums.view(bits.dtype)
    for start in range(0, residual.size, BLOCK):
        kept, added = residual[start : start + BLOCK], gradient[start : start + BLOCK]
        broken: Any = np.int32(0)
        for j in range(kept.size):
            broken += np.int32(added[j] != added[j])
            sums[j] = kept[j] + added[j]
        if broken:
            return count, start
        flags[kept.size :] = 0
        for j in range(kept.size):
            kept[j] = sums[j]
            flags[j] = (sum_bits[j] & mask) >= threshold
        count = _pick_with_room(flags, sum_bits, start, indices, found, count)
    return count, -1


@compiled
def accumulate_with_momentum(
    residual: Array,
    velocity: Array,
    momentum: Any,
    gradient: Array,
    bits: Array,
    mask: Any,
    threshold: Any,
    indices: Array,
    found: Array,
) -> tuple[int, int]:
    """As `accumulate`, but what is added is the velocity, which takes in the gradient first."""
    count = 0
    flags = np.zeros(BLOCK, np.uint8)
    speeds = np.empty(BLOCK, residual.dtype)
    sums = np.empty(BLOCK, residual.dtype)
    sum_bits = sums.view(bits.dtype)
    for start in range(0, residual.size, BLOCK):
        kept, added = residual[start : start + BLOCK], gradient[start : start + BLOCK]
        moving = velocity[start : start + BLOCK]
        broken: Any = np.int32(0)
        for j in range(kept.size):
            broken += np.int32(added[j] != added[j])
            speeds[j] = momentum * moving[j] + added[j]
            sums[j] = kept[j] + speeds[j]
        if broken:
            return count, start
        flags[kept.size :] = 0
        for j in range(kept.size):
            moving[j] = speeds[j]
            kept[j] = sums[j]
            flags[j] = (sum_bits[j] & mask) >= threshold
        count = _pick_with_room(flags, sum_bits, start, indices, found, count)
    return count, -1


@compiled
def keep_largest(
    indices: Array, bits: Array, mask: Any, border: Any, ties: int, kept: Array, kept_bits: Array
) -> None:
    """Of gathered entries those above a key, and the first so many that equal it; the results have one place more."""
    count = 0
    for i in range(indices.size):
        key = bits[i] & mask
        tie = (key == border) & (ties > 0)
        kept[count] = indices[i]
        kept_bits[count] = bits[i]
        count += (key > border) | tie
        ties -= tie


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


@compiled
def _pick_with_room(flags: Array, block: Array, start: int, indices: Array, found: Array, count: int) -> int:
    """As `_pick`; `OVERFLOW` where there may not be room for all of a block, or was not before."""
    if count == OVERFLOW or count + BLOCK > indices.size:
        return OVERFLOW
    return _pick(flags.view(np.uint64), block, start, indices, found, count)


@compiled
def _pick(words: Array, block: Array, start: int, indices: Array, found: Array, count: int) -> int:
    """Take the elements of a block where bytes are 1, while it is in the cache; the new count."""
    for q in range(words.size):
        word = words[q]
        while word != 0:
            place = q * 8 + (trailing_zeros(word) >> 3)
            indices[count] = start + place
            found[count] = block[place]
            count += 1
            word &= word - np.uint64(1)
    return count
