"""The machine that runs PTX on this processor: what it computes, and what each of its checks finds and lets pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.ptx.machine import FIRST, LAST, KernelFault, Memory, read, run
from tests.ptx.text import PtxError, float_bits

pytestmark = pytest.mark.thorough

Array = NDArray[Any]

ORDERS = (FIRST, LAST, *range(8))
ALL_AT_ONCE = range(12)
"""For blocks that wait for each other."""

HEADER = """
.visible .entry test(.param .u64 out, .param .u64 more)
{
    .reg .pred %p<20>;
    .reg .b16 %h<20>;
    .reg .b32 %r<20>;
    .reg .f32 %f<20>;
    .reg .b64 %d<20>;
    ld.param.u64 %d0, [out];
    ld.param.u64 %d1, [more];
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, %ctaid.x;
    mul.wide.u32 %d2, %r0, 4;
    add.s64 %d3, %d0, %d2;     // a word of out for each thread
"""


def kernel(body: str, before: str = "") -> Any:
    """A kernel of two arrays: %r0 is the thread, %r1 the block, %d3 the thread's word of `out`."""
    return read(before + HEADER + body + "\n ret;\n}")["test"]


def launch(
    body: str,
    *,
    blocks: int = 1,
    threads: int = 64,
    before: str = "",
    seed: int = FIRST,
    out: int = 64,
    more: Array | None = None,
    **placing: Any,
) -> Array:
    """Run it; what is in `out` then."""
    memory = Memory()
    words = np.zeros(out, dtype=np.uint32)
    other = np.zeros(64, dtype=np.uint32) if more is None else more
    arguments = [memory.put("out", words, **placing), memory.put("more", other)]
    run(kernel(body, before), blocks, threads, arguments, memory=memory, seed=seed, most_steps=10**7)
    return words


def fault(body: str, problem: str, orders: Sequence[int] = ORDERS, **options: Any) -> str:
    """The message of the fault that must come, in every order."""
    told = []
    for seed in orders:
        with pytest.raises(KernelFault) as caught:
            launch(body, seed=seed, **options)
        assert caught.value.problem == problem, str(caught.value)
        told.append(str(caught.value))
    return told[0]


def passes(body: str, orders: Sequence[int] = ORDERS, **options: Any) -> Array:
    """What is in `out`, the same in every order."""
    found = [launch(body, seed=seed, **options) for seed in orders]
    assert all(np.array_equal(found[0], other) for other in found)
    return found[0]


# ---- arithmetic: each instruction on many operands at once, against numpy

FLOATS = np.array(
    [
        0.0,
        -0.0,
        1.0,
        -1.5,
        3.0,
        1e-40,
        -1e-45,
        2**-126,
        3e38,
        -3e38,
        np.inf,
        -np.inf,
        np.nan,
        0.1,
        65504,
        65520,
        6e-8,
    ]
)
WHOLES = np.array(
    [0, 1, 2, 3, 5, 31, 32, 33, 127, 128, 255, 32767, 32768, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**63]
)


def operands(dtype: str, number: int, rng: np.random.Generator) -> list[Array]:
    """Some special values with each other, then random bits."""
    kind = np.dtype(dtype)
    with np.errstate(all="ignore"):
        special = (
            FLOATS.astype(kind) if kind.kind == "f" else np.concatenate([WHOLES, 0 - WHOLES]).astype(kind)
        )
    pairs = [column.ravel() for column in np.meshgrid(*[special] * min(number, 2))]
    pairs += [rng.permutation(pairs[0]) for _ in range(number - len(pairs))]
    drawn = [rng.integers(0, 2**64, 200, dtype=np.uint64).view(kind)[:200] for _ in range(number)]
    return [np.concatenate(both) for both in zip(pairs, drawn, strict=True)]


WIDTH = {"b16": "h", "b32": "r", "b64": "d"}


def computed(
    mnemonic: str, result: str, kinds: Sequence[str], columns: Sequence[Array], extra: str = ""
) -> Array:
    """One thread for each row: loads the operands, runs the instruction, stores the result."""
    count = len(columns[0])
    made = np.zeros(count, dtype=result)
    names = [f"a{i}" for i in range(len(columns))]
    sizes = [column.itemsize for column in columns]
    lines = [".visible .entry test(" + ", ".join(f".param .u64 {name}" for name in [*names, "out"]) + ") {"]
    lines += [".reg .b64 %d<30>; .reg .b32 %r<30>; .reg .b16 %h<30>; .reg .pred %p<9>;"]
    lines += [
        "mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mad.lo.u32 %r3, %r1, %r2, %r0;"
    ]
    lines += [f"setp.ge.u32 %p8, %r3, {count}; @%p8 ret;"]
    for place, (name, size) in enumerate(zip(names, sizes, strict=True)):
        lines += [
            f"ld.param.u64 %d{20 + place}, [{name}]; mad.wide.u32 %d{20 + place}, %r3, {size}, %d{20 + place};"
        ]
        lines += [
            f"ld.global.b{8 * size} %{'h' if size <= 2 else 'r' if size == 4 else 'd'}{10 + place}, [%d{20 + place}];"
        ]
    registers = [
        f"%{'h' if size <= 2 else 'r' if size == 4 else 'd'}{10 + i}" for i, size in enumerate(sizes)
    ]
    if "pred" in kinds:
        place = list(kinds).index("pred")
        lines += [f"setp.ne.s16 %p1, {registers[place]}, 0;"]
        registers[place] = "%p1"
    bits = np.dtype(result).itemsize * 8
    into = f"%{'h' if bits <= 16 else 'r' if bits == 32 else 'd'}1" if result != "bool" else "%p0"
    lines += [f"{mnemonic} {', '.join([into, *registers])}{extra};"]
    if result == "bool":
        lines += ["selp.u16 %h1, 1, 0, %p0;"]
        into = "%h1"
    lines += [f"ld.param.u64 %d9, [out]; mad.wide.u32 %d9, %r3, {bits // 8}, %d9;"]
    lines += [f"st.global.b{bits} [%d9], {into};", "ret;", "}"]
    arguments = [column.ctypes.data for column in (*columns, made)]
    run(read("\n".join(lines))["test"], -(-count // 128), 128, arguments)
    return made


def agree(found: Array, wanted: Array) -> bool:
    """The same bits, of NaN only that it is one."""
    if found.dtype.kind == "f":
        nan = np.isnan(wanted)
        return np.array_equal(nan, np.isnan(found)) and found[~nan].tobytes() == wanted[~nan].tobytes()
    return np.array_equal(found, wanted)


def flush(values: Array) -> Array:
    """Denormals as zeros of their sign."""
    return np.where(np.abs(values) < np.float32(2**-126), np.copysign(np.float32(0), values), values)


def pairwise(function: Callable[[Any, Any], Any]) -> Callable[[Array, Array], list[Any]]:
    return lambda a, b: [function(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]


NUMPY: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: (a != b) & (a == a) & (b == b),
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": lambda a, b: a != b,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: (a == a) & (b == b),
    "nan": lambda a, b: (a != a) | (b != b),
}


@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_floats_are_added_multiplied_divided_and_compared_as_numpy_does(dtype: str, flushes: bool) -> None:
    if flushes and dtype == "float64":
        pytest.skip("PTX flushes no doubles")
    rng = np.random.default_rng(1)
    a, b = operands(dtype, 2, rng)
    suffix = f"{'.ftz' if flushes else ''}.f{np.dtype(dtype).itemsize * 8}"
    ends = flush if flushes else np.asarray
    with np.errstate(all="ignore"):
        for name, function in NUMPY.items():
            compares = name not in ("add", "sub", "mul", "div")
            wanted = function(ends(a), ends(b))
            mnemonic = f"setp.{name}{suffix}" if compares else f"{name}.rn{suffix}"
            found = computed(mnemonic, "bool" if compares else dtype, ["", ""], [a, b])
            assert agree(found, wanted if compares else ends(wanted)), mnemonic
        for name, wanted in {
            "neg": -ends(a),
            "abs": np.abs(ends(a)),
            "sqrt.rn": np.sqrt(ends(a)),
            "rcp.rn": 1 / ends(a),
        }.items():
            assert agree(computed(name + suffix, dtype, [""], [a]), ends(wanted)), name
        for name, pick in {"min": np.fmin, "max": np.fmax}.items():
            found, wanted = computed(name + suffix, dtype, ["", ""], [a, b]), pick(ends(a), ends(b))
            zero = wanted == 0
            assert agree(found[~zero], wanted[~zero])
            both = (
                np.signbit(ends(a)) & np.signbit(ends(b))
                if name == "max"
                else np.signbit(ends(a)) | np.signbit(ends(b))
            )
            mixed = zero & (ends(a) == 0) & (ends(b) == 0)
            assert np.array_equal(np.signbit(found[mixed]), both[mixed])


def test_a_fused_multiply_add_rounds_once() -> None:
    a, b, c = (np.random.default_rng(2).standard_normal((3, 5000))).astype(np.float32)
    with np.errstate(all="ignore"):
        wide = a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)
        plain = a * b + c
    found = computed("fma.rn.f32", "float32", ["", "", ""], [a, b, c])
    # the product of two singles is exact in 64 bits, and the sum nearly always: then one rounding follows
    with np.errstate(all="ignore"):
        back = wide - c.astype(np.longdouble)
        exact = (back == a.astype(np.longdouble) * b.astype(np.longdouble)) & np.isfinite(wide)
        assert agree(found[exact], wide[exact].astype(np.float32))
    assert np.count_nonzero(found[exact] != plain[exact]) > 10


@pytest.mark.parametrize("bits", [16, 32, 64])
@pytest.mark.parametrize("sign", ["s", "u"])
def test_whole_numbers_wrap_divide_and_compare_as_numpy_does(sign: str, bits: int) -> None:
    kind = f"{'u' if sign == 'u' else ''}int{bits}"
    suffix = f".{sign}{bits}"
    a, b = operands(kind, 2, np.random.default_rng(3))
    with np.errstate(all="ignore"):
        for name in ("add", "sub", "mul"):
            mnemonic = f"{name}{'.lo' if name == 'mul' else ''}{suffix}"
            assert agree(computed(mnemonic, kind, ["", ""], [a, b]), NUMPY[name](a, b)), mnemonic
        for name in ("eq", "ne", "lt", "le", "gt", "ge"):
            assert agree(computed(f"setp.{name}{suffix}", "bool", ["", ""], [a, b]), NUMPY[name](a, b))
        for name, pick in {"min": np.minimum, "max": np.maximum}.items():
            assert agree(computed(name + suffix, kind, ["", ""], [a, b]), pick(a, b))
        some = b != 0
        ends = (1 << bits) - 1

        def towards_zero(x: int, y: int) -> int:
            return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)

        quotients = pairwise(towards_zero)(a[some], b[some])
        wanted = np.array([one & ends for one in quotients], dtype=np.uint64).astype(f"uint{bits}").view(kind)
        assert agree(computed(f"div{suffix}", kind, ["", ""], [a[some], b[some]]), wanted)
        rests = pairwise(lambda x, y: x - towards_zero(x, y) * y)(a[some], b[some])
        assert agree(
            computed(f"rem{suffix}", kind, ["", ""], [a[some], b[some]]), np.array(rests, dtype=kind)
        )
        high = pairwise(lambda x, y: x * y >> bits)(a, b)
        assert agree(
            computed(f"mul.hi{suffix}", kind, ["", ""], [a, b]),
            np.array([one & ends for one in high], dtype=np.uint64).astype(f"uint{bits}").view(kind),
        )
        by = (np.arange(len(a)) % 70).astype(np.uint32)
        shifted = pairwise(lambda x, y: x >> min(y, 64))(a, by)
        assert agree(computed(f"shr{suffix}", kind, ["", ""], [a, by]), np.array(shifted, dtype=kind))
    if bits < 64:
        wide = f"{'u' if sign == 'u' else ''}int{2 * bits}"
        assert agree(computed(f"mul.wide{suffix}", wide, ["", ""], [a, b]), a.astype(wide) * b.astype(wide))


def test_bits_are_counted_turned_and_moved() -> None:
    a, b = operands("uint32", 2, np.random.default_rng(4))
    text = [f"{one:032b}" for one in a.tolist()]
    u32 = np.uint32
    assert agree(computed("popc.b32", "uint32", [""], [a]), np.array([one.count("1") for one in text], u32))
    assert agree(
        computed("brev.b32", "uint32", [""], [a]), np.array([int(one[::-1], 2) for one in text], u32)
    )
    leading = [len(one) - len(one.lstrip("0")) for one in text]
    assert agree(computed("clz.b32", "uint32", [""], [a]), np.array(leading, u32))
    top = np.array([31 - zeros if zeros < 32 else 2**32 - 1 for zeros in leading], u32)
    assert agree(computed("bfind.u32", "uint32", [""], [a]), top)
    from_top = np.array([zeros if zeros < 32 else 2**32 - 1 for zeros in leading], u32)
    assert agree(computed("bfind.shiftamt.u32", "uint32", [""], [a]), from_top)
    for name, function in {"and": a & b, "or": a | b, "xor": a ^ b}.items():
        assert agree(computed(f"{name}.b32", "uint32", ["", ""], [a, b]), function)
    assert agree(computed("not.b32", "uint32", [""], [a]), ~a)
    by = (np.arange(len(a)) % 40).astype(u32)
    left = np.array([(x << y) & 0xFFFFFFFF for x, y in zip(a.tolist(), by.tolist(), strict=True)], u32)
    assert agree(computed("shl.b32", "uint32", ["", ""], [a, by]), left)
    funnel = [
        (((y << 32) | x) << (n & 31) >> 32) & 0xFFFFFFFF
        for x, y, n in zip(a.tolist(), b.tolist(), by.tolist(), strict=True)
    ]
    assert agree(computed("shf.l.wrap.b32", "uint32", ["", "", ""], [a, b, by]), np.array(funnel, u32))
    funnel = [
        (((y << 32) | x) >> min(n, 32)) & 0xFFFFFFFF
        for x, y, n in zip(a.tolist(), b.tolist(), by.tolist(), strict=True)
    ]
    assert agree(computed("shf.r.clamp.b32", "uint32", ["", "", ""], [a, b, by]), np.array(funnel, u32))
    c = np.roll(a, 3)
    assert agree(computed("lop3.b32", "uint32", ["", "", ""], [a, b, c], ", 0xCA"), (a & b) | (~a & c))
    fields = [(x >> 5) & 0x7F for x in a.tolist()]
    assert agree(computed("bfe.u32", "uint32", [""], [a], ", 5, 7"), np.array(fields, u32))
    signed = [one - 128 if one >= 64 else one for one in fields]
    assert agree(computed("bfe.s32", "int32", [""], [a.view(np.int32)], ", 5, 7"), np.array(signed, np.int32))
    inserted = [(y & ~(0x7F << 5)) | ((x & 0x7F) << 5) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert agree(computed("bfi.b32", "uint32", ["", ""], [a, b], ", 5, 7"), np.array(inserted, u32))
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    taken = np.array(
        [
            int.from_bytes(bytes([x[3], x[6], x[1], 0xFF if x[0] & 128 else 0]), "little")
            for x in (int(one).to_bytes(8, "little") for one in both)
        ],
        u32,
    )
    assert agree(computed("prmt.b32", "uint32", ["", ""], [a, b], ", 0x8163"), taken)
    holds = (np.arange(len(a)) % 2).astype(np.uint16)
    assert agree(computed("selp.b32", "uint32", ["", "", "pred"], [a, b, holds]), np.where(holds, a, b))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_conversions_are_those_of_numpy_and_saturate() -> None:
    every = np.arange(65536, dtype=np.uint16)
    halves = every.view(np.float16)
    assert agree(computed("cvt.f32.f16", "float32", [""], [every]), halves.astype(np.float32))
    singles = np.concatenate(
        [
            halves.astype(np.float32),
            *(np.nextafter(halves.astype(np.float32), end, dtype=np.float32) for end in (np.inf, -np.inf)),
        ]
    )
    middle = (halves[:31743].astype(np.float32) + halves[1:31744].astype(np.float32)) / 2
    singles = np.concatenate(
        [singles, middle, operands("float32", 1, np.random.default_rng(5))[0], np.float32([65519, 65520])]
    )
    with np.errstate(all="ignore"):
        wanted = singles.astype(np.float16)
        assert agree(computed("cvt.rn.f16.f32", "uint16", [""], [singles]).view(np.float16), wanted)
        doubles = operands("float64", 1, np.random.default_rng(6))[0]
        assert agree(computed("cvt.rn.f32.f64", "float32", [""], [doubles]), doubles.astype(np.float32))
        flushed = computed("cvt.rn.ftz.f32.f64", "float32", [""], [doubles])
        assert agree(flushed, flush(doubles.astype(np.float32)))
        assert agree(computed("cvt.f64.f32", "float64", [""], [singles]), singles.astype(np.float64))
    longs = operands("int64", 1, np.random.default_rng(7))[0]
    assert agree(computed("cvt.rn.f32.s64", "float32", [""], [longs]), longs.astype(np.float32))
    assert agree(
        computed("cvt.rn.f64.u64", "float64", [""], [longs.view(np.uint64)]),
        longs.view(np.uint64).astype(np.float64),
    )
    assert agree(computed("cvt.u16.u64", "uint16", [""], [longs]), longs.astype(np.uint16))
    assert agree(
        computed("cvt.sat.s16.s64", "int16", [""], [longs]), np.clip(longs, -32768, 32767).astype(np.int16)
    )
    assert agree(
        computed("cvt.sat.u16.s64", "uint16", [""], [longs]), np.clip(longs, 0, 65535).astype(np.uint16)
    )
    shorts = operands("int16", 1, np.random.default_rng(8))[0]
    assert agree(computed("cvt.s64.s8", "int64", [""], [shorts]), shorts.astype(np.int8).astype(np.int64))
    ends = np.iinfo(np.int32)
    clipped = np.where(
        np.isnan(singles), 0, np.clip(np.trunc(singles.astype(np.float64)), ends.min, ends.max)
    )
    assert agree(computed("cvt.rzi.s32.f32", "int32", [""], [singles]), clipped.astype(np.int32))


# ---- the text


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("frob.u32 %r2, %r3;", "test, line 15: unknown instruction frob.u32: frob.u32 %r2, %r3"),
        ("add.f32 %f1, %f2, %f3;", "unknown instruction add.f32"),
        ("ld.global.v3.u32 {%r2, %r3, %r4}, [%d0];", "unknown instruction ld.global.v3.u32"),
        ("st.local.u32 [%d0], %r2;", "unknown instruction st.local.u32"),
        ("mov.u32 %r99, 0;", "%r99 is not declared"),
        ("mov.u32 %r2, table;", "unknown operand 'table'"),
        ("bra NOWHERE;", "no label NOWHERE"),
        ("ld.param.u64 %d4, [more+4];", "8 bytes at 4 of a parameter of 8"),
        (".local .align 4 .b8 depot[8];", "unknown declaration"),
    ],
)
def test_what_the_machine_does_not_know_is_named(body: str, told: str) -> None:
    with pytest.raises(PtxError, match=re.escape(told)):
        kernel(body)


def test_arguments_of_every_width_arrive() -> None:
    text = """.visible .entry test(.param .u8 a, .param .f32 b, .param .align 16 .b8 c[16], .param .u64 out) {
        .reg .b32 %r<9>; .reg .b64 %d<9>;
        ld.param.u64 %d0, [out]; ld.param.s8 %r1, [a]; ld.param.f32 %r2, [b]; ld.param.v2.u64 {%d1, %d2}, [c];
        cvt.s64.s32 %d4, %r1; cvt.u64.u32 %d5, %r2;
        st.global.v2.u64 [%d0], {%d1, %d2}; st.global.v2.b64 [%d0+16], {%d4, %d5}; }"""
    memory, words = Memory(), np.zeros(4, dtype=np.int64)
    run(
        read(text)["test"], 1, 1, [255, float_bits(1.5), 7 << 64 | 5, memory.put("out", words)], memory=memory
    )
    assert words.tolist() == [5, 7, -1, 0x3FC00000]


# ---- bounds, alignment, memory that nobody has written


def test_every_word_of_an_array_and_no_byte_behind_it_can_be_written() -> None:
    body = "st.global.u32 [%d3], %r0;"
    assert passes(body).tolist() == list(range(64))
    told = fault(body, "outside of every array", out=63)
    assert told == (
        "test, line 15: st.global.u32 [%d3], %r0: block 0 thread 63: outside of every array, "
        "write of 4 bytes at byte 252 of out (252 bytes)"
    )
    assert "byte 256 of out" in fault("st.global.u32 [%d3+256], %r0;", "outside of every array", threads=1)
    assert "address" in fault("ld.global.u32 %r2, [%d3+-4];", "outside of every array", threads=1)


def test_a_vector_must_lie_in_its_array_wholly() -> None:
    body = "st.global.v4.u32 [%d0+240], {%r0, %r0, %r0, %r0};"
    assert passes(body, threads=1)[60:].tolist() == [0] * 4
    assert "16 bytes at byte 240" in fault(body, "outside of every array", threads=1, out=63)


def test_an_array_that_is_only_read_must_not_be_written() -> None:
    passes("ld.global.u32 %r2, [%d3];", writable=False)
    fault("st.global.u32 [%d3], %r0;", "write to an array that is only read", writable=False)
    fault("atom.global.add.u32 %r2, [%d0], 1;", "write to an array that is only read", writable=False)


@pytest.mark.parametrize(
    ("access", "shift"),
    [
        ("u32 %r2", 2),
        ("u64 %d4", 4),
        ("v2.u32 {%r2, %r3}", 4),
        ("v4.u32 {%r2, %r3, %r4, %r5}", 8),
        ("u16 %h2", 1),
    ],
)
def test_an_access_must_be_aligned_to_all_of_its_bytes(access: str, shift: int) -> None:
    kind, _, into = access.partition(" ")
    body = f"ld.global.{kind} {into}, [%d0];"
    passes(body, shift=2 * shift)
    assert "at byte 0 of out" in fault(body, "not aligned", shift=shift)


SHARED = ".shared .align 16 .b8 room[256];"
OWN = "mov.u64 %d4, room; add.s64 %d5, %d4, %d2;"


def test_shared_memory_holds_what_its_block_has_written() -> None:
    body = OWN + "st.shared.u32 [%d5], %r0; bar.sync 0; xor.b32 %r2, %r0, 63; mul.wide.u32 %d6, %r2, 4;"
    body += "add.s64 %d6, %d6, %d4; ld.shared.u32 %r3, [%d6]; st.global.u32 [%d3], %r3;"
    assert passes(body, before=SHARED).tolist() == list(range(63, -1, -1))
    generic = body.replace("mov.u64 %d4, room", "mov.u64 %d4, room; cvta.shared.u64 %d4, %d4").replace(
        ".shared.u32", ".u32"
    )
    assert passes(generic, before=SHARED).tolist() == list(range(63, -1, -1))


def test_shared_memory_that_nobody_has_written_is_not_read() -> None:
    told = fault(OWN + "ld.shared.u32 %r2, [%d5];", "read of memory that nobody has written", before=SHARED)
    assert "of shared room (256 bytes)" in told
    # half of it is written
    fault(
        OWN + "st.shared.u16 [%d5], %r0; ld.shared.u32 %r2, [%d5];",
        "read of memory that nobody has written",
        before=SHARED,
    )
    # what one block has written the next has not
    fault(
        OWN + "setp.eq.u32 %p1, %r1, 0; @%p1 st.shared.u32 [%d5], %r0; ld.shared.u32 %r2, [%d5];",
        "read of memory that nobody has written",
        before=SHARED,
        blocks=2,
    )


def test_shared_memory_has_an_end() -> None:
    fault(OWN + "st.shared.u32 [%d5+256], %r0;", "outside of every array", before=SHARED, threads=1)
    passes(OWN + "st.shared.u32 [%d5+252], %r0;", before=SHARED, threads=1)


def test_an_array_may_be_marked_as_not_written() -> None:
    fault("ld.global.u32 %r2, [%d3];", "read of memory that nobody has written", written=False)
    passes("st.global.u32 [%d3], %r0; ld.global.u32 %r2, [%d3];", written=False)


# ---- barriers and warps


def test_a_barrier_that_some_never_come_to_is_reported() -> None:
    told = fault(
        "setp.lt.u32 %p1, %r0, 32; @%p1 bra HERE; ret; HERE: bar.sync 0;",
        "threads that do not come to a barrier",
    )
    assert "has ended" in told
    fault(
        "setp.lt.u32 %p1, %r0, 32; @%p1 bra HERE; bar.sync 1; ret; HERE: bar.sync 0;",
        "threads that do not come to a barrier",
    )
    fault("setp.ne.u32 %p1, %r0, 5; @%p1 bar.sync 0;", "threads that do not come to a barrier")


def test_threads_of_a_warp_meet_at_one_barrier_and_warps_at_any() -> None:
    split = (
        "setp.lt.u32 %p1, %r0, {}; @%p1 bra HERE; {}; bra THERE; HERE: {}; THERE: st.global.u32 [%d3], %r0;"
    )
    passes(split.format(32, "bar.sync 0", "bar.sync 0"))
    told = fault(split.format(16, "bar.sync 0", "bar.sync 0"), "threads of a warp at different barriers")
    assert told.count("bar.sync 0") == 2
    passes(split.format(16, "barrier.sync 0", "barrier.sync 0"))


def test_a_barrier_of_some_threads_lets_them_pass() -> None:
    body = "setp.ge.u32 %p1, %r0, 32; @%p1 bra END; st.global.u32 [%d3], %r0; {} ld.global.u32 %r2, [%d0];"
    body += "END: ret;"
    passes(body.format("bar.sync 1, 32;"))
    fault(body.format(""), "race")


def test_lanes_of_a_mask_must_come() -> None:
    shuffle = "shfl.sync.up.b32 %r2|%p2, %r0, 1, 0, 0xffffffff;"
    assert passes(shuffle + "st.global.u32 [%d3], %r2;")[:34].tolist() == [0, *range(31), 32, 32]
    told = fault(
        f"setp.eq.u32 %p1, %r0, 7; @%p1 bra END; {shuffle} END: ret;", "a lane of the mask does not come"
    )
    assert "thread 7 has ended" in told
    fault(
        f"setp.lt.u32 %p1, %r0, 7; @%p1 bra HERE; {shuffle} ret; HERE: {shuffle}",
        "a lane of the mask does not come",
    )
    fault("bar.warp.sync 0x1;", "lane outside of the mask")
    other_half = "shfl.sync.bfly.b32 %r2, %r0, 16, 31, 0xffff;"
    fault(f"setp.gt.u32 %p1, %r0, 15; @%p1 bra END; {other_half} END: ret;", "lane outside of the mask")
    fault(shuffle, "a lane of the mask does not come", threads=40)


@pytest.mark.parametrize(
    ("way", "b", "c", "source"),
    [
        ("up", 3, 0, lambda lane: lane - 3 if lane >= 3 else lane),
        ("down", 3, 31, lambda lane: lane + 3 if lane + 3 < 32 else lane),
        ("bfly", 5, 31, lambda lane: lane ^ 5),
        ("idx", 9, 31, lambda lane: 9),
        ("idx", 9, 24 << 8 | 31, lambda lane: lane & 24 | 1),
        ("down", 3, 24 << 8 | 31, lambda lane: lane + 3 if lane % 8 + 3 < 8 else lane),
    ],
)
def test_shuffles_read_the_lane_that_they_say(way: str, b: int, c: int, source: Callable[[int], int]) -> None:
    found = passes(f"shfl.sync.{way}.b32 %r2, %r0, {b}, {c}, -1; st.global.u32 [%d3], %r2;", threads=32)
    assert found[:32].tolist() == [source(lane) for lane in range(32)]


def test_votes_count_all_lanes() -> None:
    body = "setp.lt.u32 %p1, %r0, 5; vote.sync.ballot.b32 %r2, {}%p1, -1; st.global.u32 [%d3], %r2;"
    assert passes(body.format(""), threads=32)[:32].tolist() == [31] * 32
    assert passes(body.format("!"), threads=32)[:32].tolist() == [2**32 - 32] * 32
    for way, held in (("any", 1), ("all", 0), ("uni", 0)):
        body = f"setp.lt.u32 %p1, %r0, 5; vote.sync.{way}.pred %p2, %p1, -1; selp.u32 %r2, 1, 0, %p2;"
        body += "st.global.u32 [%d3], %r2;"
        assert passes(body, threads=32)[:32].tolist() == [held] * 32


def test_a_loop_without_end_is_given_up() -> None:
    fault("AGAIN: bra AGAIN;", "no end", threads=2)


# ---- races

NEXT = "xor.b32 %r2, %r0, {}; mul.wide.u32 %d6, %r2, 4; add.s64 %d6, %d0, %d6;"


@pytest.mark.parametrize("far", [1, 32])
def test_neighbours_race_without_a_barrier_between_them(far: int) -> None:
    body = NEXT.format(far) + "st.global.u32 [%d3], %r0; {} ld.global.u32 %r3, [%d6];"
    told = fault(body.format(""), "race")
    assert "st.global.u32" in told
    assert "ld.global.u32" in told
    passes(body.format("bar.sync 0;"))
    if far < 32:
        passes(body.format("bar.warp.sync -1;"))
        fault(body.format("shfl.sync.up.b32 %r4, %r0, 1, 0, -1;"), "race")
        fault(body.format("membar.gl;"), "race")
    else:
        fault(body.format("bar.warp.sync -1;"), "race")


def test_reads_race_with_a_later_write() -> None:
    body = "ld.global.u32 %r2, [%d0]; {} setp.eq.u32 %p1, %r0, 9; @%p1 st.global.u32 [%d0], %r0;"
    fault(body.format(""), "race")
    passes(body.format("bar.sync 0;"))
    fault(body.format("bar.sync 0;"), "race", blocks=2)


def test_two_writes_of_one_value_race() -> None:
    fault("st.global.u32 [%d0], 1;", "race")
    fault("st.volatile.global.u32 [%d0], 1; setp.eq.u32 %p1, %r0, 3; @%p1 st.global.u32 [%d0], 1;", "race")
    passes("st.volatile.global.u32 [%d0], 1;")
    passes("st.relaxed.gpu.global.u32 [%d0], 1;", blocks=2)
    fault("st.relaxed.cta.global.u32 [%d0], 1;", "race", blocks=2)
    passes("st.relaxed.cta.global.u32 [%d0], 1;")


def test_atomics_do_not_race_with_each_other_and_do_with_plain_accesses() -> None:
    assert passes("atom.global.add.u32 %r2, [%d0], 1;", blocks=3)[0] == 192
    assert passes("red.global.max.u32 [%d0], %r0;", blocks=2)[0] == 63
    fault("atom.global.add.u32 %r2, [%d0], 1; ld.global.u32 %r3, [%d0];", "race")
    passes("atom.global.add.u32 %r2, [%d0], 1; bar.sync 0; ld.global.u32 %r3, [%d0];")
    fault(
        "atom.global.add.u32 %r2, [%d0], 1; cvt.u16.u32 %h1, %r0; st.relaxed.gpu.global.u16 [%d0], 0;", "race"
    )


def test_bytes_of_one_word_do_not_race() -> None:
    body = "cvt.u64.u32 %d5, %r0; add.s64 %d5, %d0, %d5; st.global.u8 [%d5], %r0;"
    passes(body)
    fault(body + "ld.global.u32 %r2, [%d3];", "race")


def test_shared_memory_races_like_any_other() -> None:
    body = (
        OWN
        + "st.shared.u32 [%d5], 0; bar.sync 0; st.shared.u32 [%d5], %r0; {}"
        + "ld.shared.u32 %r3, [%d4]; st.global.u32 [%d3], %r3;"
    )
    told = fault(body.format(""), "race", before=SHARED, threads=2)
    assert "of shared room" in told
    passes(body.format("bar.sync 0;"), before=SHARED)


PASS = """
    setp.ne.u32 %p1, %r1, 0; @%p1 bra READER;
    st.global.u32 [%d0], 5; {release} ret;
READER: {acquire} setp.eq.u32 %p2, %r2, 0; @%p2 bra READER;
    {fence} ld.global.u32 %r3, [%d0]; st.global.u32 [%d0+4], %r3;
"""
FLAG = "[%d1]"


@pytest.mark.parametrize(
    ("release", "acquire", "fence"),
    [
        ("membar.gl; st.volatile.global.u32 [%d1], 1;", "ld.volatile.global.u32 %r2, [%d1];", "membar.gl;"),
        (
            "fence.acq_rel.gpu; st.relaxed.gpu.global.u32 [%d1], 1;",
            "ld.relaxed.gpu.global.u32 %r2, [%d1];",
            "fence.acq_rel.gpu;",
        ),
        ("st.release.gpu.global.u32 [%d1], 1;", "ld.acquire.gpu.global.u32 %r2, [%d1];", ""),
        ("st.release.sys.global.u32 [%d1], 1;", "ld.relaxed.sys.global.u32 %r2, [%d1];", "fence.sc.sys;"),
        ("atom.release.gpu.global.add.u32 %r4, [%d1], 1;", "ld.acquire.gpu.global.u32 %r2, [%d1];", ""),
        ("membar.gl; red.global.add.u32 [%d1], 1;", "atom.acquire.gpu.global.or.b32 %r2, [%d1], 0;", ""),
    ],
)
def test_a_release_that_is_acquired_passes_a_message(release: str, acquire: str, fence: str) -> None:
    found = passes(
        PASS.format(release=release, acquire=acquire, fence=fence), ALL_AT_ONCE, blocks=2, threads=1
    )
    assert found[:2].tolist() == [5, 5]


@pytest.mark.parametrize(
    ("release", "acquire", "fence"),
    [
        ("st.volatile.global.u32 [%d1], 1;", "ld.volatile.global.u32 %r2, [%d1];", "membar.gl;"),
        ("membar.gl; st.volatile.global.u32 [%d1], 1;", "ld.volatile.global.u32 %r2, [%d1];", ""),
        ("membar.cta; st.volatile.global.u32 [%d1], 1;", "ld.volatile.global.u32 %r2, [%d1];", "membar.gl;"),
        ("membar.gl; st.volatile.global.u32 [%d1], 1;", "ld.volatile.global.u32 %r2, [%d1];", "membar.cta;"),
        ("st.relaxed.gpu.global.u32 [%d1], 1;", "ld.acquire.gpu.global.u32 %r2, [%d1];", ""),
        ("st.release.gpu.global.u32 [%d1], 1;", "ld.relaxed.gpu.global.u32 %r2, [%d1];", ""),
        ("st.release.cta.global.u32 [%d1], 1;", "ld.acquire.gpu.global.u32 %r2, [%d1];", ""),
        ("membar.gl; st.global.u32 [%d1], 1;", "ld.volatile.global.u32 %r2, [%d1];", "membar.gl;"),
        ("st.volatile.global.u32 [%d1], 1; membar.gl;", "ld.volatile.global.u32 %r2, [%d1];", "membar.gl;"),
    ],
)
def test_a_message_without_a_whole_pattern_races(release: str, acquire: str, fence: str) -> None:
    fault(
        PASS.format(release=release, acquire=acquire, fence=fence), "race", ALL_AT_ONCE, blocks=2, threads=1
    )


LAST_BLOCK = """
    mul.wide.u32 %d7, %r1, 128; add.s64 %d7, %d7, %d3; st.global.u32 [%d7], %r0;
    {all} bar.sync 0; setp.ne.u32 %p1, %r0, 0; @%p1 bra WAIT;
    {before} atom.global.add.u32 %r2, [%d1], 1; {after} st.shared.u32 [room], %r2;
WAIT: bar.sync 0; {then} ld.shared.u32 %r3, [room]; setp.ne.u32 %p2, %r3, 1; @%p2 bra END;
    xor.b32 %r4, %r1, 1; mul.wide.u32 %d8, %r4, 128; add.s64 %d8, %d8, %d3; ld.global.u32 %r5, [%d8];
    END: ret;
"""


def test_the_last_block_sees_what_others_wrote_where_the_thread_that_counts_has_fences() -> None:
    right = {"all": "", "before": "membar.gl;", "after": "membar.gl;", "then": ""}
    options: dict[str, Any] = {"blocks": 2, "threads": 32, "before": SHARED}
    passes(LAST_BLOCK.format(**right), **options)
    for missing in ("before", "after"):
        fault(LAST_BLOCK.format(**{**right, missing: ""}), "race", **options)
    fault(
        LAST_BLOCK.format(**{**dict.fromkeys(right, ""), "all": "membar.gl;", "then": "membar.gl;"}),
        "race",
        **options,
    )


def test_an_atomic_of_another_thread_passes_a_release_on() -> None:
    body = """
    setp.eq.u32 %p1, %r1, 0; @%p1 bra WRITER; setp.eq.u32 %p1, %r1, 1; @%p1 bra MIDDLE;
    READER: ld.acquire.gpu.global.u32 %r2, [%d1]; setp.ne.u32 %p2, %r2, 2; @%p2 bra READER;
    ld.global.u32 %r3, [%d0]; ret;
    WRITER: st.global.u32 [%d0], 5; st.release.gpu.global.u32 [%d1], 1; ret;
    MIDDLE: {} setp.ne.u32 %p2, %r2, 1; @%p2 bra MIDDLE;
    """
    passes(body.format("atom.relaxed.gpu.global.cas.b32 %r2, [%d1], 1, 2;"), ALL_AT_ONCE, blocks=3, threads=1)
    plain = "ld.relaxed.gpu.global.u32 %r2, [%d1]; setp.eq.u32 %p3, %r2, 1; @%p3 st.relaxed.gpu.global.u32 [%d1], 2;"
    # a reader that came early enough has seen the release itself
    seen = []
    for seed in ALL_AT_ONCE:
        try:
            launch(body.format(plain), seed=seed, blocks=3, threads=1)
            seen.append("nothing")
        except KernelFault as error:
            seen.append(error.problem)
    assert set(seen) == {"race", "nothing"}
