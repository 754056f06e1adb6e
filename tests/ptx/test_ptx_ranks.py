"""Kernels of several ranks at once on the machine: a weak memory shows what it may, and never what it may not."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from collectives.kernels.compiler import compile_source
from tests.ptx.kernels import ARCHITECTURE, ptx
from tests.ptx.machine import KernelFault, Launch, Memory, Outcome, memories, read, run_ranks
from tests.ptx.text import Program

SEEDS = range(20)

HEAD = """
typedef unsigned long long Word;
#define STORE(HOW, TO, VALUE) asm volatile("st." HOW ".global.u64 [%0], %1;" ::"l"(TO), "l"((Word)(VALUE)) : "memory")
#define FENCE(HOW) asm volatile("fence." HOW ".sys;" ::: "memory")
#define LOAD(NAME, HOW)                                                                         \\
    __device__ inline Word NAME(const Word* from) {                                             \\
        Word seen;                                                                              \\
        asm volatile("ld." HOW ".sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(from) : "memory"); \\
        return seen;                                                                            \\
    }
LOAD(load_acquire, "acquire")
LOAD(load_relaxed, "relaxed")
__device__ inline Word clock_now() {
    Word now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}
"""


@cache
def kernel(body: str, parameters: str = "Word* a, Word* b, Word* out") -> Program:
    """A kernel of three arrays."""
    ptx(["copy_1"])  # skips where there is no compiler
    source = f'{HEAD}extern "C" __global__ void one({parameters}) {{ {body} }}'
    return read(compile_source(source, ARCHITECTURE, to="ptx").code.decode())["one"]


class Pair:
    """Two ranks that see the words a and b of both, and have an array of their own for what they have seen."""

    def __init__(self, words: int = 64) -> None:
        self.a, self.b = np.zeros(words, dtype=np.uint64), np.zeros(words, dtype=np.uint64)
        self.out = [np.zeros(words, dtype=np.uint64) for _ in range(2)]
        self.memory = memories(2)
        self.addresses = [
            [seen.put("a", self.a), seen.put("b", self.b), seen.put("out", out)]
            for seen, out in zip(self.memory, self.out, strict=True)
        ]

    def run(self, bodies: tuple[str, str], seed: int, *, threads: int = 1, **options: object) -> Outcome:
        queues = [
            [Launch(kernel(body), 1, threads, self.addresses[rank], self.memory[rank])]
            for rank, body in enumerate(bodies)
        ]
        return run_ranks(queues, seed=seed, **options)  # type: ignore[arg-type]


def seen(bodies: tuple[str, str], words: int = 1, seeds: range = SEEDS) -> set[tuple[int, ...]]:
    """What both ranks have seen, over all seeds."""
    found = set()
    for seed in seeds:
        pair = Pair()
        pair.run(bodies, seed)
        found.add(tuple(int(word) for out in pair.out for word in out[:words]))
    return found


def problems(bodies: tuple[str, str], **options: object) -> set[str]:
    """What goes wrong, over all seeds; empty text for nothing."""
    found = set()
    for seed in SEEDS:
        try:
            Pair().run(bodies, seed, **options)  # type: ignore[arg-type]
            found.add("")
        except KernelFault as fault:
            found.add(fault.problem)
    return found


WRITES = 'a[0] = 42; STORE("release.sys", b, 1);'
WAITS = "while (load_acquire(b) == 0); out[0] = a[0];"


def test_a_release_that_an_acquire_has_seen_passes_everything_on() -> None:
    assert seen((WRITES, WAITS)) == {(0, 42)}


@pytest.mark.parametrize(
    ("writes", "waits"),
    [
        (WRITES.replace("release", "relaxed"), WAITS),
        (WRITES, WAITS.replace("load_acquire", "load_relaxed")),
        (WRITES.replace("release.sys", "release.gpu"), WAITS),
        (WRITES.replace("a[0] = 42; ", "") + "a[0] = 42;", WAITS),
    ],
    ids=["relaxed store", "relaxed load", "of one GPU", "flag first"],
)
def test_less_than_that_is_a_race(writes: str, waits: str) -> None:
    assert problems((writes, waits)) == {"race"}


def test_fences_around_a_relaxed_flag_do_as_well() -> None:
    writes = 'a[0] = 42; FENCE("acq_rel"); STORE("relaxed.sys", b, 1);'
    waits = 'while (load_relaxed(b) == 0); FENCE("acq_rel"); out[0] = a[0];'
    assert seen((writes, waits)) == {(0, 42)}


def test_relaxed_stores_land_in_any_order_and_relaxed_loads_may_be_old() -> None:
    writes = 'STORE("relaxed.sys", a, 42); STORE("relaxed.sys", b, 1);'
    waits = "while (load_relaxed(b) == 0); out[0] = load_relaxed(a);"
    assert seen((writes, waits), seeds=range(100)) == {(0, 0), (0, 42)}


def test_both_may_miss_what_the_other_has_stored_but_not_with_fences() -> None:
    first = 'STORE("relaxed.sys", a, 1); out[0] = load_relaxed(b);'
    second = 'STORE("relaxed.sys", b, 1); out[0] = load_relaxed(a);'
    assert (0, 0) in seen((first, second), seeds=range(100))
    fenced = tuple(body.replace("out", 'FENCE("sc"); out') for body in (first, second))
    assert (0, 0) not in seen((fenced[0], fenced[1]))


def test_no_thread_goes_back_on_a_word() -> None:
    writes = "".join(f'STORE("relaxed.sys", a, {value});' for value in range(1, 9))
    reads = "".join(f"out[{place}] = load_relaxed(a);" for place in range(8))
    found = seen((writes, reads), words=8)
    assert len(found) > 1
    assert all(list(one[8:]) == sorted(one[8:]) for one in found)


def test_a_vector_comes_in_pieces_of_64_bits() -> None:
    writes = 'asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %1};" ::"l"(a), "l"(7ull) : "memory");'
    reads = (
        'Word x, y; asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" '
        ': "=l"(x), "=l"(y) : "l"(a) : "memory");'
        "out[0] = x; out[1] = y;"
    )
    found = {one[2:] for one in seen((writes, reads), 2, range(200))}
    assert found >= {(0, 7), (7, 0)}
    assert found <= {(0, 0), (0, 7), (7, 0), (7, 7)}


def test_one_thread_publishes_what_its_block_has_done_before_a_barrier() -> None:
    writes = 'a[threadIdx.x] = 1; __syncthreads(); if (threadIdx.x == 0) STORE("release.sys", b, 1);'
    waits = "if (threadIdx.x == 0) while (load_acquire(b) == 0); __syncthreads(); out[threadIdx.x] = a[threadIdx.x];"
    for seed in SEEDS:
        pair = Pair()
        pair.run((writes, waits), seed, threads=32)
        assert pair.out[1][:32].all()
    for changed in (writes.replace("__syncthreads();", ""), writes.replace("release", "relaxed")):
        assert problems((changed, waits), threads=32) == {"race"}
    assert problems((writes, waits.replace("__syncthreads();", "")), threads=32) == {"race"}


def test_everybodys_fence_does_not_publish_what_others_stored() -> None:
    writes = 'a[threadIdx.x] = 1; FENCE("acq_rel"); __syncthreads(); if (threadIdx.x == 0) STORE("relaxed.sys", b, 1);'
    waits = "if (threadIdx.x == 0) while (load_acquire(b) == 0); __syncthreads(); out[threadIdx.x] = a[threadIdx.x];"
    assert "race" in problems((writes, waits), threads=32)


RING = """
    for (Word k = 0; k < 6; ++k) {
        %s
    }"""
SENDS = (
    RING % 'while (k >= 2 && load_acquire(b + 8) + 2 < k + 1); a[k % 2] = k; STORE("release.sys", b, k + 1);'
)
TAKES = RING % 'while (load_acquire(b) < k + 1); out[k] = a[k % 2]; STORE("release.sys", b + 8, k + 1);'


def test_slots_go_round_with_credits_and_not_with_one_too_many() -> None:
    for seed in SEEDS:
        pair = Pair()
        pair.run((SENDS, TAKES), seed)
        assert pair.out[1][:6].tolist() == list(range(6))
    assert "race" in problems((SENDS.replace("+ 2 < k", "+ 3 < k"), TAKES))


def test_memory_that_a_rank_has_not_mapped_is_outside_and_the_rank_is_named() -> None:
    pair = Pair()
    pair.addresses[1][0] = pair.addresses[0][0]
    with pytest.raises(KernelFault, match=r"rank 1, .*outside of every array") as met:
        pair.run((";", "out[0] = a[0];"), 0)
    assert met.value.problem == "outside of every array"


def test_a_rank_that_is_stopped_runs_no_more_and_others_tell_by_the_clock() -> None:
    waits = """
        const Word begun = clock_now();
        while (load_acquire(b) == 0 && clock_now() - begun < 5000);
        out[0] = load_acquire(b) == 0 ? 13 : 1;"""
    for seed in SEEDS:
        pair = Pair()
        found = pair.run((WRITES, waits), seed, stop=(0, 1))
        assert found.finished == (False, True)
        assert (pair.out[1][0], found.rank_steps[0]) == (13, 1)
        whole = pair.run((WRITES, WAITS), seed)
        assert whole.finished == (True, True)


def test_launches_of_a_rank_follow_one_another() -> None:
    for seed in SEEDS:
        pair = Pair()
        more = kernel("out[0] = a[0]; a[0] = out[0] + 1;")
        queue = [Launch(more, 1, 1, pair.addresses[0], pair.memory[0]) for _ in range(5)]
        run_ranks([queue, []], seed=seed)
        assert pair.a[0] == 5


def test_bytes_that_are_read_and_written_are_counted() -> None:
    pair = Pair()
    found = pair.run(("a[0] = 1; a[1] = out[2];", "b[0] = out[1];"), 1)
    assert (found.traffic[0]["a"].written, found.traffic[0]["out"].read) == (16, 8)
    assert (found.traffic[1]["b"].written, found.traffic[1]["a"].read) == (8, 0)


def test_one_array_at_two_addresses_needs_a_fence_between_them() -> None:
    shared = np.zeros(8, dtype=np.uint64)
    for fence, wrong in (("", True), ('asm volatile("fence.proxy.alias;" ::: "memory");', False)):
        memory = Memory()
        places = [
            memory.put("x", shared),
            memory.put("x again", shared),
            memory.put("out", np.zeros(8, np.uint64)),
        ]
        launch = Launch(kernel(f"a[0] = 5; {fence} out[0] = b[0];"), 1, 1, places, memory)
        if wrong:
            with pytest.raises(KernelFault, match="two proxies without a fence"):
                run_ranks([[launch]], seed=0)
        else:
            run_ranks([[launch]], seed=0)
            assert memory.arrays[2].array[0] == 5
