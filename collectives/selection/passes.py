"""Reads of the data that gather its largest entries, each compiled to one loop; and what follows on those entries.

They take `BLOCK` elements at a time: first a bit for each element that is looked for, then those are picked out while
their block is in the nearest cache and the next one is on its way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.compiled import compiled, trailing_zeros
from collectives.selection.vectors import SPAN, WORD, add, copy, fetch, reached

TAKEN_NUMBERS = 2542049500
"""A checksum over the numbers that are imported here: what is kept of machine code changes with this file alone."""

BLOCK = 1024
"""Elements that are looked at together."""

ROOM = BLOCK + WORD
"""Places that buffers for candidates need besides those that may be filled: for a block, and for a step behind it."""

OVERFLOW = -1
"""Instead of a count: more entries than places."""

DISTANCE = BLOCK + 4 * WORD
"""Elements from those that are looked at to those that are fetched; a whole number of pages would crowd the cache."""

AHEAD = 16
"""Places of the sample that are on their way at once: each is a miss of the caches."""

Array = NDArray[Any]


@compiled
def gather(bits: Array, mask: Any, threshold: Any, indices: Array, found: Array) -> int:
    """Indices and bits of all keys that are at least a threshold, ascending; how many, or `OVERFLOW`.

    ``indices`` and ``found`` must have `ROOM` places more than may be filled.
    """
    count = 0
    words = np.zeros(BLOCK // WORD, np.uint64)
    whole = bits.size - bits.size % WORD
    for start in range(0, whole, BLOCK):
        if count + ROOM > indices.size:
            return OVERFLOW
        used = (min(start + BLOCK, whole) - start) // WORD
        for q in range(used):
            fetch(bits, start + q * WORD + DISTANCE)
            words[q] = reached(bits, start + q * WORD, mask, threshold)
        count = _pick(words[:used], bits[start:], start, indices, found, count)
    if count + ROOM > indices.size:
        return OVERFLOW
    for i in range(whole, bits.size):
        indices[count] = i
        found[count] = bits[i]
        count += (bits[i] & mask) >= threshold
    return count


@compiled
def accumulate(
    residual: Array,
    velocity: Array | None,
    momentum: Any,
    gradient: Array,
    bits: Array,
    mask: Any,
    threshold: Any,
    infinity: Any,
    indices: Array,
    found: Array,
) -> tuple[int, int]:
    """Add a gradient to a residual, and take from the sum what `gather` would find, leaving zeros there; in one read.

    With a velocity, that takes in the gradient first, and is added. ``gradient`` is of floats, or the memory of float16
    as int16, or that of bfloat16 as uint16; ``bits`` is the residual's memory. ``threshold`` is at most ``infinity``.

    Returns
    -------
    count
        Entries that were taken, or `OVERFLOW` where the places did not suffice: then nothing was.
    stop
        -1; or the end of the first block with a sum that is not finite. Then nothing was added from there, nor to the
        entries with such sums; these are the ones that are infinite or NaN among the count.
    """
    count = 0
    overflowed = False
    words = np.zeros(BLOCK // WORD, np.uint64)
    sums = np.empty(BLOCK, residual.dtype)
    sum_bits = sums.view(bits.dtype)
    whole = residual.size - residual.size % WORD
    for start in range(0, residual.size, BLOCK):
        # a number of turns that is known beforehand: the compiler makes more of it
        used = (min(start + BLOCK, whole) - start) // WORD
        for q in range(used):
            at = start + q * WORD
            fetch(residual, at + DISTANCE)
            fetch(gradient, at + DISTANCE)
            if velocity is not None:
                fetch(velocity, at + DISTANCE)
            words[q] = add(
                residual, velocity, momentum, gradient, at, sums, q * WORD, mask, threshold, infinity
            )
        stop = min(start + BLOCK, residual.size)
        if stop > whole:
            rest = residual.size - whole
            kept, speed = np.zeros(WORD, residual.dtype), np.zeros(WORD, residual.dtype)
            word = _add_copied(
                residual,
                velocity,
                momentum,
                gradient,
                whole,
                rest,
                kept,
                speed,
                sums[whole - start :],
                mask,
                threshold,
                infinity,
            )
            words[used] = word & ((np.uint64(1) << np.uint64(rest)) - np.uint64(1))
            used += 1
            residual[whole:] = kept[:rest]
            if velocity is not None:
                velocity[whole:] = speed[:rest]
        if count + ROOM > indices.size:
            for i in range(count):
                bits[indices[i]] = found[i]
            count = 0
            overflowed = True
            threshold = infinity
        # where the next candidates go
        fetch(indices, count + WORD)
        fetch(found, count + WORD)
        before = count
        count = _pick(words[:used], sum_bits, start, indices, found, count)
        finite = True
        for i in range(before, count):
            if (found[i] & mask) < infinity:
                bits[indices[i]] = 0
            else:
                finite = False
        if not finite:
            return count, stop
    return OVERFLOW if overflowed else count, -1


@compiled
def sample_keys(bits: Array, mask: Any, starts: Array, keys: Array) -> None:
    """The keys of `WORD` neighbours from each start on; ``keys`` is (starts, WORD)."""
    for i in range(starts.size):
        if i + AHEAD < starts.size:
            fetch(bits, starts[i + AHEAD])
        for j in range(WORD):
            keys[i, j] = bits[starts[i] + j] & mask


@compiled
def sample_sums(
    residual: Array,
    velocity: Array | None,
    momentum: Any,
    gradient: Array,
    mask: Any,
    infinity: Any,
    starts: Array,
    sums: Array,
) -> None:
    """What `accumulate` would make of `WORD` neighbours from each start on; ``sums`` is (starts, WORD)."""
    kept, speed = np.zeros(WORD, residual.dtype), np.zeros(WORD, residual.dtype)
    for i in range(starts.size):
        if i + AHEAD < starts.size:
            fetch(residual, starts[i + AHEAD])
            fetch(gradient, starts[i + AHEAD])
            if velocity is not None:
                fetch(velocity, starts[i + AHEAD])
        _add_copied(
            residual,
            velocity,
            momentum,
            gradient,
            starts[i],
            WORD,
            kept,
            speed,
            sums[i],
            mask,
            infinity,
            infinity,
        )


@compiled
def keep_largest(
    indices: Array,
    bits: Array,
    size: int,
    mask: Any,
    border: Any,
    ties: int,
    kept: Array,
    kept_bits: Array,
) -> None:
    """Of so many gathered entries those above a key, and the first so many that equal it; -1 for all of these.

    The others move to the front of the gathered ones. All arrays have `WORD` places more than they have entries.
    """
    count = others = first = 0
    for start in range(0, size, WORD):
        word = reached(bits, start, mask, border)
        if ties >= 0:
            for i in range(start, min(start + WORD, size)):
                if bits[i] & mask == border:
                    word ^= np.uint64(ties == 0) << np.uint64(i - start)
                    ties -= ties > 0
        word = ~word
        if start + WORD > size:
            word &= (np.uint64(1) << np.uint64(size - start)) - np.uint64(1)
        while word != 0:
            place = start + trailing_zeros(word)
            _move(indices, bits, first, place - first, kept, kept_bits, count)
            count += place - first
            first = place + 1
            indices[others] = indices[place]
            bits[others] = bits[place]
            others += 1
            word &= word - np.uint64(1)
    _move(indices, bits, first, size - first, kept, kept_bits, count)


@compiled
def put_back(bits: Array, indices: Array, found: Array) -> None:
    """Write entries to their places."""
    for i in range(indices.size):
        bits[indices[i]] = found[i]


@compiled
def _move(
    indices: Array, bits: Array, first: int, length: int, kept: Array, kept_bits: Array, count: int
) -> None:
    """Copy a run of entries, and what follows: the next run overwrites it."""
    for j in range(0, length, SPAN):
        copy(indices, first + j, kept, count + j)
        copy(bits, first + j, kept_bits, count + j)


@compiled
def _add_copied(
    residual: Array,
    velocity: Array | None,
    momentum: Any,
    gradient: Array,
    start: int,
    count: int,
    kept: Array,
    speed: Array,
    sums: Array,
    mask: Any,
    threshold: Any,
    infinity: Any,
) -> Any:
    """As `add`, of up to `WORD` elements, to copies in ``kept`` and ``speed``."""
    given = np.zeros(WORD, gradient.dtype)
    for j in range(count):
        kept[j] = residual[start + j]
        given[j] = gradient[start + j]
    if velocity is None:
        return add(kept, None, momentum, given, 0, sums, 0, mask, threshold, infinity)
    for j in range(count):
        speed[j] = velocity[start + j]
    return add(kept, speed, momentum, given, 0, sums, 0, mask, threshold, infinity)


@compiled
def _pick(words: Array, block: Array, start: int, indices: Array, found: Array, count: int) -> int:
    """Take the elements of a block whose bits are set; the new count."""
    found_any = np.uint64(0)
    for q in range(words.size):
        found_any |= words[q]
    if found_any == 0:
        return count
    for q in range(words.size):
        word = words[q]
        # the first one is written whether it is there or not: often it is, and a wrong guess costs more than a write
        place = q * WORD + (trailing_zeros(word) & (WORD - 1))
        indices[count] = start + place
        found[count] = block[place]
        count += word != 0
        word &= word - np.uint64(word != 0)
        while word != 0:
            place = q * WORD + trailing_zeros(word)
            indices[count] = start + place
            found[count] = block[place]
            count += 1
            word &= word - np.uint64(1)
    return count
