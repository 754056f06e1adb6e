"""Kernels of several ranks at once: which outcomes a weak memory shows and which it never does, and what is reported.

Litmus tests are named as in the literature: message passing, store buffering, coherence. Each runs at many orders; what
is allowed must come up in some, what is forbidden in none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.ptx.machine import KernelFault, Launch, Memory, Outcome, memories, read, run_ranks
from tests.ptx.text import Program, PtxError

pytestmark = pytest.mark.thorough

Array = NDArray[Any]

FEW, SOME, MANY = range(15), range(40), range(150)

HEADER = """
.visible .entry test(.param .u64 data, .param .u64 flag, .param .u64 out)
{
    .reg .pred %p<20>;
    .reg .b16 %h<20>;
    .reg .b32 %r<30>;
    .reg .f32 %f<20>;
    .reg .b64 %d<30>;
    .shared .align 16 .b8 room[256];
    ld.param.u64 %d0, [data];
    ld.param.u64 %d1, [flag];
    ld.param.u64 %d2, [out];
    mov.u32 %r0, %tid.x;
    mov.u32 %r9, %ctaid.x;
    setp.eq.u32 %p0, %r0, 0;
    mul.wide.u32 %d3, %r0, 4;
    add.s64 %d4, %d0, %d3;     // the thread's words of data and out
    add.s64 %d5, %d2, %d3;
"""


@cache
def kernel(body: str) -> Program:
    """A kernel of three arrays, the first two of which all ranks share."""
    return read(HEADER + body + "\n ret;\n}")["test"]


def launched(
    bodies: Sequence[str | Sequence[str]],
    seed: int,
    *,
    blocks: int = 1,
    threads: int = 1,
    data: Array | None = None,
    aliased: bool = False,
    **options: Any,
) -> tuple[list[list[int]], Outcome]:
    """Run a kernel on each rank, or several one after another; the first two words of each rank's `out`.

    Where `aliased`, the flag is another address of the data.
    """
    shared = np.zeros(64, dtype=np.uint32) if data is None else data
    flag = np.zeros(64, dtype=np.uint64)
    out = np.zeros((len(bodies), 64), dtype=np.uint32)
    queues = []
    for memory, own, body in zip(memories(len(bodies)), out, bodies, strict=True):
        arguments = [memory.put("data", shared), memory.put("flag", shared if aliased else flag)]
        arguments.append(memory.put("out", own))
        queue = [body] if isinstance(body, str) else body
        queues.append([Launch(kernel(one), blocks, threads, arguments, memory) for one in queue])
    outcome = run_ranks(queues, seed=seed, most_steps=3 * 10**6, **options)
    return out[:, :2].tolist(), outcome


def outcomes(
    bodies: Sequence[str | Sequence[str]], seeds: Sequence[int] = SOME, **options: Any
) -> Counter[Any]:
    """How often each content of all ranks' `out` came up, flat, or a problem in its place."""
    found: Counter[Any] = Counter()
    for seed in seeds:
        try:
            found[tuple(word for own in launched(bodies, seed, **options)[0] for word in own)] += 1
        except KernelFault as error:
            found[error.problem] += 1
    return found


def fault(
    bodies: Sequence[str | Sequence[str]], problem: str, seeds: Sequence[int] = FEW, **options: Any
) -> str:
    """The message of the fault that must come, in every order."""
    told = []
    for seed in seeds:
        with pytest.raises(KernelFault) as caught:
            launched(bodies, seed, **options)
        assert caught.value.problem == problem, str(caught.value)
        told.append(str(caught.value))
    return told[0]


WAIT = "AGAIN: {load} %r1, [%d1]; setp.eq.u32 %p1, %r1, 0; @%p1 bra AGAIN; "
RELEASE, ACQUIRE = "st.release.sys.global.u32 [%d1], 1;", "ld.acquire.sys.global.u32"
RELAXED_STORE, RELAXED_LOAD = "st.relaxed.sys.global.u32", "ld.relaxed.sys.global.u32"

# ---- message passing

WRITER = "st.global.u32 [%d0], 5; {release}"
READER = WAIT + "{fence} ld.global.u32 %r2, [%d0]; st.global.u32 [%d2], %r2;"


@pytest.mark.parametrize(
    ("release", "load", "fence"),
    [
        (RELEASE, ACQUIRE, ""),
        ("membar.sys; st.volatile.global.u32 [%d1], 1;", "ld.volatile.global.u32", "membar.sys;"),
        ("fence.acq_rel.sys; st.relaxed.sys.global.u32 [%d1], 1;", RELAXED_LOAD, "fence.sc.sys;"),
        ("red.release.sys.global.add.u32 [%d1], 1;", ACQUIRE, ""),
        ("atom.acq_rel.sys.global.exch.b32 %r3, [%d1], 1;", RELAXED_LOAD, "fence.acq_rel.sys;"),
    ],
)
def test_a_message_that_is_released_and_acquired_arrives(release: str, load: str, fence: str) -> None:
    bodies = [WRITER.format(release=release), READER.format(load=load, fence=fence)]
    assert set(outcomes(bodies)) == {(0, 0, 5, 0)}


@pytest.mark.parametrize(
    ("release", "load", "fence"),
    [
        ("st.relaxed.sys.global.u32 [%d1], 1;", ACQUIRE, ""),
        (RELEASE, RELAXED_LOAD, ""),
        ("st.release.gpu.global.u32 [%d1], 1;", ACQUIRE, ""),
        (RELEASE, "ld.acquire.gpu.global.u32", ""),
        ("membar.gl; st.volatile.global.u32 [%d1], 1;", "ld.volatile.global.u32", "membar.sys;"),
        ("membar.sys; st.volatile.global.u32 [%d1], 1;", "ld.volatile.global.u32", "membar.gl;"),
        ("red.release.gpu.global.add.u32 [%d1], 1;", ACQUIRE, ""),
        ("red.global.add.u32 [%d1], 1;", ACQUIRE, ""),
    ],
)
def test_a_message_without_a_whole_pattern_of_all_ranks_races(release: str, load: str, fence: str) -> None:
    fault([WRITER.format(release=release), READER.format(load=load, fence=fence)], "race")


def test_a_race_names_both_ranks() -> None:
    told = fault(
        [WRITER.format(release="st.relaxed.sys.global.u32 [%d1], 1;"), READER.format(load=ACQUIRE, fence="")],
        "race",
    )
    assert told == (
        "rank 1, test, line 19: ld.global.u32 %r2, [%d0]: block 0 thread 0: race, "
        "read of 4 bytes at byte 0 of data (256 bytes), "
        "with rank 0 block 0 thread 0 at line 19: st.global.u32 [%d0], 5"
    )


STRONG_WRITER = "st.relaxed.sys.global.u32 [%d0], 5; {store} [%d1], 1;"
STRONG_READER = WAIT + "ld.relaxed.sys.global.u32 %r2, [%d0]; st.global.u32 [%d2], %r2;"


@pytest.mark.parametrize(
    ("store", "load", "arrives"),
    [
        ("st.relaxed.sys.global.u32", RELAXED_LOAD, False),
        ("st.release.sys.global.u32", RELAXED_LOAD, False),
        ("st.relaxed.sys.global.u32", ACQUIRE, False),
        ("st.release.gpu.global.u32", ACQUIRE, False),
        ("st.release.sys.global.u32", ACQUIRE, True),
    ],
)
def test_strong_data_is_seen_late_unless_its_flag_is_released_and_acquired(
    store: str, load: str, arrives: bool
) -> None:
    bodies = [STRONG_WRITER.format(store=store), STRONG_READER.format(load=load)]
    if store == "st.release.gpu.global.u32":  # against another rank's acquire
        bodies[0] = bodies[0].replace("[%d1]", "[%d1+8]") + "st.relaxed.sys.global.u32 [%d1], 1;"
    assert set(outcomes(bodies, MANY)) == {(0, 0, 5, 0)} | (set() if arrives else {(0, 0, 0, 0)})


def test_scopes_of_one_rank_order_its_blocks_and_threads_only() -> None:
    pair = (
        "setp.ne.u32 %p2, {which}, 0; @%p2 bra READ; st.global.u32 [%d0], 5;"
        "st.release.{scope}.global.u32 [%d1], 1; ret; READ: "
        + READER.format(load="ld.acquire.{scope}.global.u32", fence="")
    )
    idle = "mov.u32 %r1, 0;"
    device = pair.format(which="%r9", scope="gpu")
    assert set(outcomes([device, idle], blocks=2)) == {(5, 0, 0, 0)}
    fault([pair.format(which="%r9", scope="cta"), idle], "race", blocks=2)
    assert set(outcomes([pair.format(which="%r0", scope="cta"), idle], threads=2)) == {(5, 0, 0, 0)}
    between = "st.relaxed.{}.global.u32 [%d0], 1;"
    assert "race" not in outcomes([between.format("sys")] * 2)
    fault([between.format("gpu")] * 2, "race")
    fault([between.format("gpu"), between.format("sys")], "race")
    fault(["red.global.add.u32 [%d0], 1;"] * 2, "race")
    assert "race" not in outcomes(["red.relaxed.sys.global.add.u32 [%d0], 1;"] * 2, blocks=2)


def test_a_relaxed_load_races_with_a_plain_store_that_comes_after_it_unordered() -> None:
    read_first = "ld.relaxed.sys.global.u32 %r1, [%d0]; st.relaxed.sys.global.u32 [%d1], 1;"
    then_write = WAIT.format(load=ACQUIRE) + "st.global.u32 [%d0], 7;"
    fault([read_first, then_write], "race")
    assert "race" not in outcomes([read_first.replace("st.relaxed", "st.release"), then_write])


# ---- store buffering, coherence, atomicity


def exchange(store: str, fence: str, load: str) -> list[str]:
    """Each of two ranks stores its word and loads the other's."""
    body = "{store} [{own}], 1; {fence} {load} %r1, [{other}]; st.global.u32 [%d2], %r1;"
    return [
        body.format(store=store, fence=fence, load=load, own=own, other=other)
        for own, other in (("%d0", "%d1"), ("%d1", "%d0"))
    ]


def test_two_stores_pass_each_other_unless_fenced() -> None:
    neither = (0, 0, 0, 0)
    assert neither in outcomes(exchange(RELAXED_STORE, "", RELAXED_LOAD))
    assert neither in outcomes(exchange("st.release.sys.global.u32", "", ACQUIRE))
    fenced = outcomes(exchange(RELAXED_STORE, "fence.sc.sys;", RELAXED_LOAD), MANY)
    assert neither not in fenced
    assert len(fenced) >= 2


def test_a_thread_never_goes_back_on_one_word_and_does_not_stay_behind_for_ever() -> None:
    writer = "".join(f"st.relaxed.sys.global.u32 [%d0], {value};" for value in range(1, 6))
    step = "ld.relaxed.sys.global.u32 %r2, [%d0]; setp.lt.u32 %p2, %r2, %r1; @%p2 trap; mov.u32 %r1, %r2;"
    reader = f"mov.u32 %r1, 0; MORE: {step} {step} setp.ne.u32 %p1, %r1, 5; @%p1 bra MORE; st.global.u32 [%d2], %r1;"
    assert set(outcomes([writer, reader], MANY)) == {(0, 0, 5, 0)}


def test_a_thread_sees_its_own_stores_before_others_do() -> None:
    body = (
        "st.relaxed.sys.global.u32 [%d0], {}; ld.relaxed.sys.global.u32 %r1, [%d0];"
        "setp.eq.u32 %p1, %r1, 0; @%p1 trap;"
    )
    parts = (
        "st.volatile.global.u16 [%d0+8], 3; ld.volatile.global.u16 %h1, [%d0+8];"
        "cvt.u32.u16 %r2, %h1; st.global.u32 [%d2], %r2;"
    )
    assert set(outcomes([body.format(1) + parts, body.format(2)], SOME)) == {(3, 0, 0, 0)}
    bytes_ = (
        "st.global.u8 [%d0], 1; st.global.u8 [%d0+1], 2; st.global.u16 [%d0+2], 3;"
        "ld.global.u32 %r1, [%d0]; st.global.u32 [%d2], %r1;"
    )
    assert set(outcomes([bytes_, ""], SOME)) == {(0x00030201, 0, 0, 0)}


def test_readers_may_disagree_on_the_order_of_two_writers_unless_fenced() -> None:
    writers = ["st.relaxed.sys.global.u32 [%d0], 1;", "st.relaxed.sys.global.u32 [%d1], 1;"]
    look = (
        "AGAIN: ld.relaxed.sys.global.u32 %r1, [{}]; setp.eq.u32 %p1, %r1, 0; @%p1 bra AGAIN; {}"
        "ld.relaxed.sys.global.u32 %r2, [{}]; st.global.u32 [%d2], %r2;"
    )

    def disagree(fence: str) -> int:
        readers = [look.format("%d0", fence, "%d1"), look.format("%d1", fence, "%d0")]
        return outcomes([*writers, *readers], MANY)[(0,) * 8]

    assert disagree("")
    assert not disagree("fence.sc.sys;")


def test_atomics_of_all_ranks_lose_nothing() -> None:
    count = "atom.relaxed.sys.global.add.u32 %r1, [%d0], 1;" * 5
    words = np.zeros(64, dtype=np.uint32)
    for seed in FEW:
        launched([count] * 3, seed, threads=4, blocks=2, data=words)
    assert words[0] == len(FEW) * 3 * 8 * 5


# ---- vectors and packets

STORE_TWO = "st.relaxed.sys.global.v2.b64 [%d0], {%d10, %d10};"


def test_a_vector_is_torn_between_its_elements_and_not_within() -> None:
    writer = "mov.u64 %d10, 0x0000000700000007; " + STORE_TWO
    reader = "ld.relaxed.sys.global.v2.b64 {%d11, %d12}, [%d0]; cvt.u32.u64 %r1, %d11; cvt.u32.u64 %r2, %d12;"
    whole = (
        "mov.b64 {%r3, %r4}, %d11; setp.ne.u32 %p1, %r3, %r4; @%p1 trap; st.global.v2.u32 [%d2], {%r1, %r2};"
    )
    found = outcomes([writer, reader + whole], MANY)
    assert {one[2:] for one in found} == {(0, 0), (0, 7), (7, 0), (7, 7)}


PACKETS = (
    "mov.b64 %d10, {%r20, %r21}; st.relaxed.sys.global.v2.b64 [%d0], {%d10, %d10};",
    "AGAIN: ld.relaxed.sys.global.v2.b64 {%d11, %d12}, [%d0];"
    "mov.b64 {%r1, %r2}, %d11; mov.b64 {%r3, %r4}, %d12; setp.ne.u32 %p1, %r2, 1; @%p1 bra AGAIN;"
    "setp.ne.u32 %p1, %r4, 1; @%p1 bra AGAIN; st.global.v2.u32 [%d2], {%r1, %r3};",
)
VALUES = "mov.u32 %r20, 5; mov.u32 %r21, 1;"


def test_a_flag_in_the_same_word_needs_no_fence_and_one_in_the_next_word_is_wrong() -> None:
    right = [VALUES + PACKETS[0], PACKETS[1]]
    assert set(outcomes(right, MANY)) == {(0, 0, 5, 5)}
    # the second flag not read
    found = outcomes([right[0], PACKETS[1].replace("setp.ne.u32 %p1, %r4, 1; @%p1 bra AGAIN;", "")], MANY)
    assert set(found) == {(0, 0, 5, 5), (0, 0, 5, 0)}
    # three words of data and one flag
    words = [
        VALUES + "st.volatile.global.v4.u32 [%d0], {%r20, %r20, %r20, %r21};",
        "AGAIN: ld.volatile.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d0]; setp.ne.u32 %p1, %r4, 1; @%p1 bra AGAIN;"
        "st.global.v2.u32 [%d2], {%r1, %r3};",
    ]
    assert {one[2:] for one in outcomes(words, MANY)} == {(5, 5), (5, 0), (0, 5), (0, 0)}


# ---- blocks

SEND = "st.global.u32 [%d4], 7; {all} bar.sync 0; {one}"
RECEIVE = (
    "@!%p0 bra THERE; "
    + WAIT.format(load=ACQUIRE)
    + "THERE: {barrier} ld.global.u32 %r2, [%d4]; st.global.u32 [%d5], %r2;"
)


def test_one_thread_releases_what_its_block_stored_before_a_barrier() -> None:
    send = SEND.format(all="", one="@%p0 " + RELEASE)
    receive = RECEIVE.format(barrier="bar.sync 0;")
    assert set(outcomes([send, receive], FEW, threads=48)) == {(0, 0, 7, 7)}
    fault([send.replace("bar.sync 0;", ""), receive], "race", threads=48)
    fault([send, RECEIVE.format(barrier="")], "race", threads=48)
    fenced = SEND.format(all="", one="fence.acq_rel.sys; @%p0 st.relaxed.sys.global.u32 [%d1], 1;")
    assert set(outcomes([fenced, receive], FEW, threads=48)) == {(0, 0, 7, 7)}


def test_fences_of_all_threads_before_a_barrier_do_not_release_for_the_one_that_stores_after_it() -> None:
    relaxed = "@%p0 st.relaxed.sys.global.u32 [%d1], 1;"
    receive = RECEIVE.format(barrier="bar.sync 0;")
    fault([SEND.format(all="fence.acq_rel.sys;", one=relaxed), receive], "race", threads=48)


def test_a_barrier_alone_lets_stores_of_the_block_come_late() -> None:
    send = SEND.format(all="", one="@%p0 st.relaxed.sys.global.u32 [%d1], 1;").replace(
        "st.global", RELAXED_STORE[:-4]
    )
    receive = RECEIVE.format(barrier="bar.sync 0;").replace(
        "ld.global.u32 %r2", "ld.relaxed.sys.global.u32 %r2"
    )
    assert len(outcomes([send, receive], SOME, threads=8)) > 1
    # though the block itself sees them
    own = "st.global.u32 [%d4], %r0; bar.sync 0; xor.b32 %r1, %r0, 1; mul.wide.u32 %d6, %r1, 4; add.s64 %d6, %d0, %d6;"
    own += "ld.global.u32 %r2, [%d6]; st.global.u32 [%d5], %r2;"
    assert set(outcomes([own, ""], SOME, threads=48)) == {(1, 0, 0, 0)}


# ---- queues of launches


def test_the_launches_of_a_rank_come_one_after_another() -> None:
    first = "xor.b32 %r1, %r0, 33; st.global.u32 [%d4], %r1;"
    second = "xor.b32 %r1, %r0, 1; mul.wide.u32 %d6, %r1, 4; add.s64 %d6, %d0, %d6; ld.global.u32 %r2, [%d6];"
    second += "st.global.u32 [%d6], 9; st.global.u32 [%d5], %r2;"
    assert set(outcomes([[first, second], [""]], threads=40)) == {(32, 33, 0, 0)}
    # what a launch stored a later one releases
    late = [first, "@%p0 " + RELEASE]
    receive = RECEIVE.format(barrier="bar.sync 0;")
    assert set(outcomes([late, receive], threads=40)) == {(0, 0, 33, 32)}
    fault([late, ["", "ld.global.u32 %r2, [%d4];"]], "race", threads=40)


def test_another_rank_is_not_ordered_with_the_end_of_a_launch() -> None:
    told = fault(
        [["st.global.u32 [%d0], 1;", "st.global.u32 [%d0+4], 1;"], "ld.global.u32 %r1, [%d0+4];"], "race"
    )
    assert "of data" in told
    assert "st.global.u32 [%d0+4], 1" in told


# ---- addresses


def test_a_buffer_is_one_at_whatever_address() -> None:
    told = fault(["st.global.u32 [%d0], 1;", "st.global.u32 [%d1], 1;"], "race", aliased=True)
    assert "[%d0]" in told
    assert "[%d1]" in told
    # also where views of it overlap, and for bytes that nobody has written
    words = np.zeros(8, dtype=np.uint32)
    for index, right in ((2, True), (3, False)):
        one, other = memories(2)
        store = kernel("st.global.u32 [%d0+8], 1; " + RELEASE)
        flag = np.zeros(1, dtype=np.uint64)
        wait = kernel(WAIT.format(load=ACQUIRE) + "ld.global.u32 %r1, [%d0];")
        whole = one.put("whole", words, written=False)
        part = other.put("part", words[index:], shift=4 * (index % 2))
        queues = [
            [Launch(store, 1, 1, [whole, one.put("flag", flag), 0], one)],
            [Launch(wait, 1, 1, [part, other.put("flag", flag), 0], other)],
        ]
        if right:
            run_ranks(queues, seed=1)
            continue
        with pytest.raises(
            KernelFault, match=r"rank 1, .*nobody has written, read of 4 bytes at byte 0 of part"
        ):
            run_ranks(queues, seed=1)


def test_two_addresses_of_one_rank_need_a_proxy_fence_between_them() -> None:
    body = "st.global.u32 [%d0], 1; {} ld.global.u32 %r1, [%d1]; st.global.u32 [%d2], %r1;"
    fault([body.format(""), ""], "two proxies without a fence", aliased=True)
    fault([body.format("fence.sc.sys;"), ""], "two proxies without a fence", aliased=True)
    assert set(outcomes([body.format("fence.proxy.alias;"), ""], FEW, aliased=True)) == {(1, 0, 0, 0)}
    two = ["st.global.u32 [%d0], 1;", "ld.global.u32 %r1, [%d1]; st.global.u32 [%d2], %r1;"]
    assert set(outcomes([two, ""], FEW, aliased=True)) == {(1, 0, 0, 0)}  # the end of a launch is one


def test_the_read_only_cache_does_not_see_what_a_peer_stores_meanwhile() -> None:
    reader = READER.format(load=ACQUIRE, fence="").replace("ld.global.u32 %r2", "ld.global.nc.u32 %r2")
    fault([WRITER.format(release=RELEASE), reader], "two proxies without a fence")


def test_an_address_of_another_rank_is_outside_of_every_array() -> None:
    data, one, other = np.zeros(8, dtype=np.uint32), *memories(2)
    peer = other.put("data", data)
    launches = [
        Launch(kernel("ld.global.u32 %r1, [%d0];"), 1, 1, [peer, 0, 0], memory) for memory in (one, other)
    ]
    with pytest.raises(
        KernelFault, match=r"^rank 0, .*outside of every array, read of 4 bytes at address 0x2"
    ):
        run_ranks([[launches[0]], [launches[1]]], seed=0)
    run_ranks([[], [launches[1]]], seed=0)


def test_an_address_that_is_shifted_against_its_buffer_is_refused() -> None:
    memory, words = Memory(), np.zeros(8, dtype=np.uint32)
    launch = Launch(kernel(""), 1, 1, [memory.put("words", words, shift=4), 0, 0], memory)
    with pytest.raises(ValueError, match="words lies at 0 of 8 bytes and its address at 4"):
        run_ranks([[launch]], seed=0)


def test_bytes_are_counted_by_rank_and_array() -> None:
    body = "ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d0]; st.global.u32 [%d5], %r1;"
    body += "red.relaxed.sys.global.add.u64 [%d1], 1;"
    _, outcome = launched([body, [body, body]], 3, threads=8)
    for traffic, times in zip(outcome.traffic, (8, 16), strict=True):
        assert [(name, one.read, one.written) for name, one in traffic.items()] == [
            ("data", 16 * times, 0),
            ("flag", 8 * times, 8 * times),
            ("out", 0, 4 * times),
        ]
    length = len(kernel(body).code) - 2  # the two ends do not count
    assert outcome.rank_steps == (8 * length, 16 * length)
    assert outcome.steps == 24 * length


# ---- time, and ranks that stop

DEADLINE = """
    mov.u64 %d20, %globaltimer; add.s64 %d20, %d20, 5000;
AGAIN: ld.acquire.sys.global.u32 %r1, [%d1]; setp.ne.u32 %p1, %r1, 0; @%p1 bra CAME;
    mov.u64 %d21, %globaltimer; setp.lt.u64 %p1, %d21, %d20; @%p1 bra AGAIN;
    st.global.u32 [%d2], 99; ret;
CAME: ld.global.u32 %r2, [%d0]; st.global.u32 [%d2], %r2;
"""


def test_a_rank_that_stops_leaves_others_to_their_deadline() -> None:
    writer = "st.global.u32 [%d0], 5; " + RELEASE
    found: Counter[int] = Counter()
    length = len(kernel(writer).code) - 2
    for steps in range(length + 2):
        for seed in range(12):
            out, outcome = launched([writer, DEADLINE], seed, stop=(0, steps), nanoseconds=10)
            assert outcome.rank_steps[0] == min(steps, length)
            assert outcome.finished == (steps > length, True)
            assert out[0] == [0, 0]
            if steps < length:
                assert out[1] == [99, 0]
            found[out[1][0]] += 1
    assert set(found) == {5, 99}


def test_stores_of_a_rank_that_stops_land_or_are_lost() -> None:
    found = set()
    store = "st.global.u32 [%d0], 5; st.global.u32 [%d0+4], 6; AGAIN: bra AGAIN;"
    for seed in MANY:
        words = np.zeros(64, dtype=np.uint32)
        launched([store, ""], seed, data=words, stop=(0, 30))
        found.add(tuple(words[:2].tolist()))
    assert found == {(0, 0), (5, 0), (0, 6), (5, 6)}


def test_who_sleeps_does_not_run_and_time_jumps_where_all_sleep() -> None:
    body = "mov.u64 %d20, %globaltimer; mov.u32 %r1, 1000000000; nanosleep.u32 %r1;"
    body += "mov.u64 %d21, %globaltimer; sub.u64 %d21, %d21, %d20; cvt.u32.u64 %r2, %d21; st.global.u32 [%d2], %r2;"
    out, outcome = launched([body, body], 2)
    assert all(10**9 <= own[0] < 10**9 + 1000 for own in out)
    assert outcome.steps < 100


def test_what_cannot_end_is_told_with_its_rank() -> None:
    assert fault(["", "AGAIN: bra AGAIN;"], "no end").startswith("rank 1, ")
    assert fault(["", "@%p0 trap;"], "trap").startswith(
        "rank 1, test, line 19: @%p0 trap: block 0 thread 0: trap"
    )
    told = fault(["", "@%p0 bar.sync 0;"], "threads that do not come to a barrier", threads=2)
    assert told.startswith("rank 1, ")


def test_each_of_the_special_registers_is_there() -> None:
    body = "mov.u32 %r1, %smid; mov.u32 %r2, %nsmid; setp.ge.u32 %p1, %r1, %r2; @%p1 trap; exit;"
    assert set(outcomes([body, body], FEW, blocks=3)) == {(0, 0, 0, 0)}


# ---- multicast


@cache
def joint_kernel(body: str) -> Program:
    """A kernel with %d2 at the multicast address and %d9 at what it is to fill."""
    text = HEADER.replace("u64 out)", "u64 out, .param .u64 made)") + "ld.param.u64 %d9, [made];"
    return read(text + body + "\n ret;\n}")["test"]


def multicast(
    bodies: Sequence[str], seed: int, arrays: Sequence[Array], threads: int = 1
) -> tuple[list[list[int]], Outcome]:
    """Each rank has its own array as `data` and the address of all of them in place of `out`; flags are shared."""
    flag, result = np.zeros(64, dtype=np.uint64), np.zeros((len(bodies), 4), dtype=np.uint32)
    queues = []
    for memory, own, body, made in zip(memories(len(bodies)), arrays, bodies, result, strict=True):
        arguments = [memory.put("data", own), memory.put("flag", flag), memory.put_multicast("all", arrays)]
        queues.append(
            [Launch(joint_kernel(body), 1, threads, [*arguments, memory.put("made", made)], memory)]
        )
    outcome = run_ranks(queues, seed=seed, most_steps=10**6)
    return result.tolist(), outcome


REDUCE = "multimem.ld_reduce.relaxed.sys.global."


def bits(*values: float, dtype: str) -> Array:
    return np.array(values, dtype=dtype).view(np.uint32)


def first_words(body: str, arrays: Sequence[Array], seeds: Sequence[int] = FEW) -> set[int]:
    """What the first of some ranks fills, while the others do nothing."""
    bodies = [body, *[""] * (len(arrays) - 1)]
    return {multicast(bodies, seed, arrays)[0][0][0] for seed in seeds}


@pytest.mark.parametrize(
    ("kind", "dtype", "values", "wanted"),
    [
        ("add.u32", "uint32", [(5,), (2**32 - 1,), (7,)], (11,)),
        ("add.s32", "int32", [(5,), (-9,), (2,)], (-2,)),
        ("max.s32", "int32", [(5,), (-1,), (7,)], (7,)),
        ("min.u32", "uint32", [(5,), (2**32 - 1,), (7,)], (5,)),
        ("min.s32", "int32", [(5,), (-1,), (7,)], (-1,)),
        ("add.f32", "float32", [(1.5,), (2,), (4,)], (7.5,)),
        ("add.f16x2", "float16", [(1, 9), (3, -2), (2, 4)], (6, 11)),
        ("min.f16x2", "float16", [(1, 9), (3, -2), (2, 4)], (1, -2)),
        ("max.f16x2", "float16", [(1, 9), (3, -2), (2, 4)], (3, 9)),
        ("add.acc::f32.bf16x2", "uint16", [(0x3F80, 0x4000)] * 3, (0x4040, 0x40C0)),  # ones, twos
    ],
)
def test_a_reduction_takes_the_values_of_all_ranks(
    kind: str, dtype: str, values: list[tuple[float, ...]], wanted: tuple[float, ...]
) -> None:
    body = REDUCE + f"{kind} %r1, [%d2]; st.global.u32 [%d9], %r1;"
    for seed in range(5):
        made, outcome = multicast([body] * 3, seed, [bits(*one, dtype=dtype) for one in values])
        assert [own[:1] for own in made] == [bits(*wanted, dtype=dtype).tolist()] * 3
        assert outcome.traffic[0]["all"].read == 4


def test_a_reduction_of_a_vector_takes_each_element_by_itself() -> None:
    arrays = [bits(1, 2, 3, 4, dtype="float32") for _ in range(2)]
    body = REDUCE + "add.v4.f32 {%f1, %f2, %f3, %f4}, [%d2]; st.global.v4.f32 [%d9], {%f1, %f2, %f3, %f4};"
    assert multicast([body, ""], 1, arrays)[0][0] == bits(2, 4, 6, 8, dtype="float32").tolist()


def test_a_reduction_of_halves_rounds_at_the_end_only_where_it_is_told_to() -> None:
    arrays = [bits(2048, 0, dtype="float16"), bits(1, 0, dtype="float16"), bits(1, 0, dtype="float16")]
    body = REDUCE + "{} %r1, [%d2]; st.global.u32 [%d9], %r1;"
    low, high = (int(bits(one, 0, dtype="float16")[0]) for one in (2048, 2050))
    assert first_words(body.format("add.f16x2"), arrays) == {low, high}
    assert first_words(body.format("add.acc::f32.f16x2"), arrays) == {high}


def test_the_order_of_a_sum_of_floats_is_nobodys() -> None:
    arrays = [bits(one, dtype="float32") for one in (1e8, -1e8, 1.0)]
    body = REDUCE + "add.f32 %r1, [%d2]; st.global.u32 [%d9], %r1;"
    assert first_words(body, arrays) == {0, int(bits(1, dtype="float32")[0])}


def test_a_multicast_store_and_a_signal_reach_all_ranks() -> None:
    send = (
        "mov.f32 %f1, 0f3F800000; multimem.st.relaxed.sys.global.v4.f32 [%d2], {%f1, %f1, %f1, %f1};"
        "fence.proxy.alias; multimem.red.release.sys.global.add.u32 [%d2+16], 1;"
    )
    wait = (
        "AGAIN: ld.acquire.sys.global.u32 %r1, [%d0+16]; setp.eq.u32 %p1, %r1, 0; @%p1 bra AGAIN; {fence}"
        "ld.global.u32 %r2, [%d0+12]; st.global.u32 [%d9], %r2;"
    )
    for seed in SOME:
        arrays = [np.zeros(8, dtype=np.uint32) for _ in range(3)]
        made, _ = multicast([send, wait.format(fence=""), wait.format(fence="")], seed, arrays)
        assert [own[0] for own in made] == [0, 0x3F800000, 0x3F800000]
        arrays = [np.zeros(8, dtype=np.uint32) for _ in range(3)]
        send_only = send.replace("fence.proxy.alias;", "")
        with pytest.raises(KernelFault, match="two proxies without a fence"):
            multicast([send_only, wait.format(fence=""), ""], seed, arrays)
        arrays = [np.zeros(8, dtype=np.uint32) for _ in range(3)]
        multicast([send_only, wait.format(fence="fence.proxy.alias;"), ""], seed, arrays)
        arrays = [np.zeros(8, dtype=np.uint32) for _ in range(3)]
        with pytest.raises(KernelFault, match="race"):
            multicast([send.replace("release", "relaxed"), wait.format(fence=""), ""], seed, arrays)


def test_a_reduction_of_what_was_stored_by_one_address_needs_a_proxy_fence() -> None:
    send = "st.global.u32 [%d0], 3; {} " + RELEASE
    wait = WAIT.format(load=ACQUIRE) + "{} " + REDUCE + "add.u32 %r2, [%d2]; st.global.u32 [%d9], %r2;"
    fence = "fence.proxy.alias;"
    for seed in FEW:
        for first, second in ((fence, ""), ("", fence)):
            arrays = [np.zeros(2, dtype=np.uint32) for _ in range(2)]
            assert multicast([send.format(first), wait.format(second)], seed, arrays)[0][1][0] == 3
        arrays = [np.zeros(2, dtype=np.uint32) for _ in range(2)]
        with pytest.raises(KernelFault) as caught:
            multicast([send.format(""), wait.format("")], seed, arrays)
        assert caught.value.problem == "two proxies without a fence"
        assert "of all (8 bytes), with rank 0 block 0 thread 0" in str(caught.value)


def test_multicast_addresses_take_multimem_only_and_others_do_not() -> None:
    for body, problem in (
        ("ld.global.u32 %r1, [%d2];", "multicast address without multimem"),
        ("red.relaxed.sys.global.add.u32 [%d2], 1;", "multicast address without multimem"),
        (REDUCE + "add.u32 %r1, [%d0];", "multimem outside of multicast memory"),
        (REDUCE + "add.u32 %r1, [%d2+8];", "outside of every array"),
    ):
        with pytest.raises(KernelFault) as caught:
            multicast([body, ""], 0, [np.zeros(2, dtype=np.uint32) for _ in range(2)])
        assert caught.value.problem == problem


@pytest.mark.parametrize("kind", ["add.s64 %d11", "min.f32 %f1", "add.v2.u32 {%r1, %r2}", "xor.b32 %r1"])
def test_reductions_that_ptxas_refuses_are_not_known(kind: str) -> None:
    with pytest.raises(PtxError, match="unknown instruction multimem"):
        kernel(REDUCE + f"{kind}, [%d0];")
