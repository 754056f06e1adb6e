"""Read the data in compiled loops: gather the largest entries, find the k-th largest key, and put entries back.

A gathering pass takes `BLOCK` elements at a time: first one bit for each element that reaches the threshold, then
those are picked out while their block is in the nearest cache and the next one is on its way. The k-th largest key is
found by histograms of leading bits (radix select).

Steps of `WORD` neighbours are written as LLVM vector instructions (`reached`, `add`, `fetch`, `copy`), since numba
turns no loop over elements into them: 64 comparisons come out as the bits of one word. The compiler cuts the vectors
to what the processor has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic
from numpy.typing import NDArray

from collectives.tables.compiled import compiled, trailing_zeros

Array = NDArray[Any]


@compiled
def histogram(bits: Array, mask: Any, shift: Any, counts: Array) -> None:
    """Count the keys by their bits after a right shift; adds to ``counts`` (2, bins)."""
    even = bits.size - bits.size % 2
    # two tables: equal neighbours would wait for each other's count
    for i in range(0, even, 2):
        counts[0, (bits[i] & mask) >> shift] += 1
        counts[1, (bits[i + 1] & mask) >> shift] += 1
    if even < bits.size:
        counts[0, (bits[even] & mask) >> shift] += 1


@compiled
def histogram_within(bits: Array, mask: Any, shift: Any, bin_shift: Any, border: Any, counts: Array) -> None:
    """Count the keys in one bin, ``border``, of an earlier histogram; ``counts`` has the bins that divide it."""
    first = border << (bin_shift - shift)
    for i in range(bits.size):
        key = bits[i] & mask
        if key >> bin_shift == border:
            counts[(key >> shift) - first] += 1


@compiled
def take(bits: Array, mask: Any, border: Any, ties: int, kept: Array) -> None:
    """Write the indices of keys above ``border`` and of the first ``ties`` equal to it; ``kept`` has a spare place."""
    count = 0
    for i in range(bits.size):
        key = bits[i] & mask
        tie = (key == border) & (ties > 0)
        kept[count] = i
        count += (key > border) | tie
        ties -= tie


@compiled
def divide(bits: Array, mask: Any, shift: Any, border: Any, certain: Array, candidates: Array) -> None:
    """Write the indices of keys above a bin of the histogram, and of those in it; both buffers fit exactly."""
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


WORD = 64  # elements of a step, and bits of its result
SPAN = 16  # elements that `copy` copies
CACHE_LINE = 64  # bytes of a cache line

HALF_INFINITY, INFINITY, HALF_SHIFT, HALF_SCALE = 0x7C00, 0x7F80_0000, 13, 2.0**112
"""Infinity of float16 and of float32; the shift between their fractions and the factor between their exponents."""

_INTEGER = ir.IntType(32)


def _vector(kind: Any) -> Any:
    return ir.VectorType(kind, WORD)


def _all(builder: Any, value: Any) -> Any:
    """Return a vector with one value in all places."""
    nothing = ir.Constant(_vector(value.type), ir.Undefined)
    first = builder.insert_element(nothing, value, _INTEGER(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(_vector(_INTEGER), [0] * WORD))


def _constant(value: Any, kind: Any) -> Any:
    return ir.Constant(_vector(kind), [value] * WORD)


def _address(context: Any, builder: Any, kind: Any, array: Any, start: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    place = builder.gep(data, [start])
    return builder.bitcast(place, _vector(context.get_data_type(kind.dtype)).as_pointer())


def _load(context: Any, builder: Any, kind: Any, array: Any, start: Any) -> Any:
    return builder.load(_address(context, builder, kind, array, start), align=kind.dtype.bitwidth // 8)


def _store(context: Any, builder: Any, kind: Any, array: Any, start: Any, value: Any) -> None:
    builder.store(value, _address(context, builder, kind, array, start), align=kind.dtype.bitwidth // 8)


def _widened(context: Any, builder: Any, kind: Any, loaded: Any, wanted: Any) -> Any:
    """Return a gradient's elements in the residual's type; int16 is a float16's memory, uint16 a bfloat16's."""
    if kind in (numba.types.int16, numba.types.uint16):
        bits = builder.zext(loaded, _vector(_INTEGER))
        loaded = _from_half(builder, bits) if kind == numba.types.int16 else _from_brain(builder, bits)
        kind = numba.types.float32
    return loaded if kind == wanted else builder.fpext(loaded, _vector(context.get_data_type(wanted)))


def _from_brain(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.shl(bits, _constant(16, _INTEGER)), _vector(ir.FloatType()))


def _from_half(builder: Any, bits: Any) -> Any:
    magnitude = builder.and_(bits, _constant(0x7FFF, _INTEGER))
    shifted = builder.shl(magnitude, _constant(HALF_SHIFT, _INTEGER))
    # the product gives denormals their exponents
    scaled = builder.fmul(
        builder.bitcast(shifted, _vector(ir.FloatType())), _constant(HALF_SCALE, ir.FloatType())
    )
    finite = builder.icmp_signed("<", magnitude, _constant(HALF_INFINITY, _INTEGER))
    exponent = builder.select(finite, _constant(0, _INTEGER), _constant(INFINITY, _INTEGER))
    sign = builder.shl(builder.and_(bits, _constant(0x8000, _INTEGER)), _constant(16, _INTEGER))
    whole = builder.or_(builder.or_(builder.bitcast(scaled, _vector(_INTEGER)), exponent), sign)
    return builder.bitcast(whole, _vector(ir.FloatType()))


def _keys(context: Any, builder: Any, bits_kind: Any, values: Any, mask: Any) -> Any:
    integers = builder.bitcast(values, _vector(context.get_data_type(bits_kind)))
    return builder.and_(integers, _all(builder, mask))


def _reaching(builder: Any, keys: Any, threshold: Any) -> Any:
    """Return one bit for each key, the first one lowest."""
    return builder.bitcast(builder.icmp_signed(">=", keys, _all(builder, threshold)), ir.IntType(WORD))


def _reached(types: Any, bits: Any, start: Any, mask: Any, threshold: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        loaded = _load(context, builder, kind, arguments[0], arguments[1])
        keys = _keys(context, builder, kind.dtype, loaded, arguments[2])
        return _reaching(builder, keys, arguments[3])

    return numba.types.uint64(bits, start, bits.dtype, bits.dtype), generate


def _add(
    types: Any,
    residual: Any,
    velocity: Any,
    momentum: Any,
    gradient: Any,
    start: Any,
    sums: Any,
    place: Any,
    mask: Any,
    threshold: Any,
    infinity: Any,
) -> Any:

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, speed_kind, _, step_kind, _, sums_kind, *_ = signature.args
        kept_, moving, factor, given, at, totals, where, keys_of, border, limit = arguments
        kept = _load(context, builder, kind, kept_, at)
        loaded = _load(context, builder, step_kind, given, at)
        step = _widened(context, builder, step_kind.dtype, loaded, kind.dtype)
        if speed_kind != numba.types.none:
            speed = _load(context, builder, speed_kind, moving, at)
            step = builder.fadd(builder.fmul(_all(builder, factor), speed), step)
        total = builder.fadd(kept, step)
        keys = _keys(context, builder, mask, total, keys_of)
        _store(context, builder, sums_kind, totals, where, total)
        finite = builder.icmp_signed("<", keys, _all(builder, limit))
        _store(context, builder, kind, kept_, at, builder.select(finite, total, kept))
        if speed_kind != numba.types.none:
            _store(context, builder, speed_kind, moving, at, builder.select(finite, step, speed))
        return _reaching(builder, keys, border)

    kinds = residual, velocity, momentum, gradient, start, sums, place, mask, mask, mask
    return numba.types.uint64(*kinds), generate


def _fetch(types: Any, array: Any, start: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        pointer = ir.IntType(8).as_pointer()
        form = ir.FunctionType(ir.VoidType(), [pointer, _INTEGER, _INTEGER, _INTEGER])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], form)
        data = context.make_array(kind)(context, builder, arguments[0]).data
        width = kind.dtype.bitwidth // 8
        for step in range(0, WORD, CACHE_LINE // width):
            # plain arithmetic: the place may lie past the end, where a prefetch does nothing
            place = builder.gep(data, [builder.add(arguments[1], arguments[1].type(step))])
            builder.call(function, [builder.bitcast(place, pointer), _INTEGER(0), _INTEGER(3), _INTEGER(1)])
        return context.get_dummy_value()

    return numba.types.void(array, start), generate


def _copy(types: Any, source: Any, start: Any, target: Any, place: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, _, target_kind, _ = signature.args
        width = kind.dtype.bitwidth // 8
        span = ir.VectorType(context.get_data_type(kind.dtype), SPAN).as_pointer()
        read, written = (
            builder.bitcast(builder.gep(context.make_array(of)(context, builder, array).data, [at]), span)
            for of, array, at in ((kind, *arguments[:2]), (target_kind, *arguments[2:]))
        )
        builder.store(builder.load(read, align=width), written, align=width)
        return context.get_dummy_value()

    return numba.types.void(source, start, target, place), generate


Intrinsic = Callable[..., Any]

reached = cast(Intrinsic, intrinsic(_reached))
"""``reached(bits, start, mask, threshold)``: bits of the keys from ``start`` on that are at least a threshold."""

add = cast(Intrinsic, intrinsic(_add))
"""``add(residual, velocity, momentum, gradient, start, sums, place, mask, threshold, infinity)``.

Adds ``momentum * velocity + gradient`` to the residual from ``start`` on, or the gradient if velocity is None; also
writes the sums from ``place`` on, and returns the bits of keys that are at least a threshold. If a sum is not finite,
its residual and velocity do not change.
"""

fetch = cast(Intrinsic, intrinsic(_fetch))
"""``fetch(array, start)``: prefetch these elements; harmless past the end."""

copy = cast(Intrinsic, intrinsic(_copy))
"""``copy(source, start, target, place)``: copy `SPAN` elements between arrays of one type."""


BLOCK = 1024  # elements of a block

ROOM = BLOCK + WORD
"""Places that buffers for candidates need in addition: for a block, and for a step after it."""

OVERFLOW = -1  # returned in place of a count: more entries than places

DISTANCE = BLOCK + 4 * WORD
"""Prefetch distance in elements; a whole number of pages would cause conflict misses."""

AHEAD = 16  # sample places that are prefetched at the same time: each is a cache miss


@compiled
def gather(bits: Array, mask: Any, threshold: Any, indices: Array, found: Array) -> int:
    """Write indices and bits of all keys that are at least a threshold, ascending; return their count, or `OVERFLOW`.

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
    """Add a gradient to a residual, and remove from the sum what `gather` would find, leaving zeros; in one read.

    With a velocity, that takes in the gradient first, and is added. ``gradient`` is of floats, or the memory of
    float16 as int16, or that of bfloat16 as uint16; ``bits`` is the residual's memory. ``threshold`` is at most
    ``infinity``.

    Returns the number of removed entries, or `OVERFLOW` if the places did not suffice: then none was removed; and -1,
    or the end of the first block with a sum that is not finite. Then nothing was added from there on, nor to the
    entries with such sums, which are the infinite and NaN ones among the removed.
    """
    count = 0
    overflowed = False
    words = np.zeros(BLOCK // WORD, np.uint64)
    sums = np.empty(BLOCK, residual.dtype)
    sum_bits = sums.view(bits.dtype)
    whole = residual.size - residual.size % WORD
    for start in range(0, residual.size, BLOCK):
        # a trip count that is known beforehand, which the compiler optimizes
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
            # one by one: numba takes seconds to compile the assignment of an array to a slice
            for i in range(rest):
                residual[whole + i] = kept[i]
                if velocity is not None:
                    velocity[whole + i] = speed[i]
        if count + ROOM > indices.size:
            for i in range(count):
                bits[indices[i]] = found[i]
            count = 0
            overflowed = True
            threshold = infinity
        # the places of the next candidates
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
    """Write the keys of `WORD` neighbours from each start on; ``keys`` is (starts, WORD)."""
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
    """Write the sums of `accumulate` for `WORD` neighbours from each start on; ``sums`` is (starts, WORD)."""
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
    indices: Array, bits: Array, size: int, mask: Any, border: Any, ties: int, kept: Array, kept_bits: Array
) -> None:
    """Keep, of gathered entries, those above a key and the first ``ties`` equal to it; all of these for -1.

    The others move to the front of the gathered ones. All arrays have `WORD` places more than entries.
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
    """Copy a run of entries, and some after it, which the next run overwrites."""
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
    """Run `add` on up to `WORD` elements copied to ``kept`` and ``speed``."""
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
    """Take the elements of a block whose bits are set; return the new count."""
    found_any = np.uint64(0)
    for q in range(words.size):
        found_any |= words[q]
    if found_any == 0:
        return count
    for q in range(words.size):
        word = words[q]
        # the first one is written in any case: it is usually set, and a misprediction costs more than a write
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
