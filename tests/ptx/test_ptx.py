"""The machine that runs PTX on this processor: what each of its checks finds and lets pass.

Its results are compared with numpy by `tests.ptx.test_ptx_kernels`, on the instructions that kernels have.
"""

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
ALL_AT_ONCE = range(12)  # for blocks that wait for each other

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
