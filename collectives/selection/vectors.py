"""What compiled loops do with `WORD` neighbours at once: look at them, or add to them and look at the sums.

Each is one step of a loop, written in the compiler's own terms, because no loop over elements is turned into it: the
comparisons of 64 elements come out as the 64 bits of a word. The compiler cuts the vectors to what the processor has.

Machine code that is kept between processes does not notice a change of this file: change the file of the loop too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
from llvmlite import ir
from numba.extending import intrinsic

WORD = 64
"""Elements of a step, and bits of what comes back."""

SPAN = 16
"""Elements that `copy` copies."""

LINE = 64
"""Bytes that a processor fetches together."""

HALF_INFINITY, INFINITY, HALF_SHIFT, HALF_SCALE = 0x7C00, 0x7F80_0000, 13, 2.0**112
"""Infinity of float16 and of float32; how far apart their fractions and their exponents are."""

_INTEGER = ir.IntType(32)


def _vector(kind: Any) -> Any:
    return ir.VectorType(kind, WORD)


def _all(builder: Any, value: Any) -> Any:
    """A vector with one value everywhere."""
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
    """A gradient's elements in the residual's type; int16 is a float16's memory, uint16 a bfloat16's."""
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
    # multiplying gives denormals the exponents that they lack
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
    """One bit for each key, the first one lowest."""
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
        for step in range(0, WORD, LINE // width):
            # plain arithmetic: the place may lie behind the end, where nothing is fetched
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


Step = Callable[..., Any]

reached = cast(Step, intrinsic(_reached))
"""``reached(bits, start, mask, threshold)``: which of the keys from ``start`` on are at least a threshold."""

add = cast(Step, intrinsic(_add))
"""``add(residual, velocity, momentum, gradient, start, sums, place, mask, threshold, infinity)``.

Adds ``momentum * velocity + gradient`` to the residual from ``start`` on, or the gradient where velocity is None;
writes the sums from ``place`` on as well, and gives which of their keys are at least a threshold. Where a sum is not
finite, residual and velocity stay as they were.
"""

fetch = cast(Step, intrinsic(_fetch))
"""``fetch(array, start)``: the processor may bring these elements near; places behind the end do no harm."""

copy = cast(Step, intrinsic(_copy))
"""``copy(source, start, target, place)``: `SPAN` elements, between arrays of one type."""
