"""The compiled run of the shared back end: its instructions, and the same bits on every road. Ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from collectives import Communicator
from collectives.backends.shared.backend import SharedBackend
from collectives.compiled import Word, add_to_word, compiled, full_fence, load_word, store_word
from collectives.peers.control_page import SMALL
from collectives.reduction import loop_of
from tests.support.hand_plans import forest_plan
from topoplan.plans.plan import Plan

Array = NDArray[Any]

TYPES = ("int8", "uint16", "int64", "float16", "float32", "float64", "complex64", "longdouble", ">f4")


@compiled
def passes_messages(words: Word, rounds: int, sends: int) -> int:
    """Send numbers and their doubles one way, back and forth; how often the second was older than the first."""
    wrong = 0
    for number in range(1, rounds + 1):
        if sends:
            store_word(words + 128, 2 * number)
            store_word(words, number)
            while load_word(words + 256) < number:
                pass
        else:
            while load_word(words) < number:
                pass
            wrong += load_word(words + 128) != 2 * number
            store_word(words + 256, number)
    return wrong


@compiled
def posts_and_looks(words: Word, rounds: int, own: int) -> int:
    """Post a number and look for the other's in every round; how often that was not there yet."""
    missed = 0
    for number in range(1, rounds + 1):
        add_to_word(words + 512, 1)
        while load_word(words + 512) < 2 * number - 1:
            pass
        store_word(words + 128 * own, number)
        full_fence()
        seen = load_word(words + 128 * (1 - own)) >= number
        store_word(words + 256 + 128 * own, seen)
        add_to_word(words + 640, 1)
        while load_word(words + 640) < 2 * number:
            pass
        missed += load_word(words + 256) + load_word(words + 384) == 0
        add_to_word(words + 768, 1)
        while load_word(words + 768) < 2 * number:
            pass
    return missed


@pytest.mark.thorough
@pytest.mark.parametrize("litmus", [passes_messages, posts_and_looks])
def test_no_thread_sees_the_news_before_what_it_announces_nor_do_two_miss_each_other(
    litmus: Callable[[int, int, int], int],
) -> None:
    words = np.zeros(256, dtype=np.int64)
    litmus(words.ctypes.data, 0, 0)
    with ThreadPoolExecutor(2) as threads:
        seen = [threads.submit(litmus, words.ctypes.data, 200, side) for side in range(2)]
        assert [one.result(60) for one in seen] == [0, 0]


class Gather:
    """An allgather of texts among threads."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._told = [""] * size

    def of(self, rank: int) -> Callable[[str], list[str]]:
        def gather(text: str) -> list[str]:
            self._told[rank] = text
            self._barrier.wait(60)
            told = list(self._told)
            self._barrier.wait(60)
            return told

        return gather


def in_threads(
    plan: Plan, work: Callable[[Communicator, int], list[Array]], **options: Any
) -> list[list[Array]]:
    """What each rank's thread returns."""
    size = len(plan.ranks)
    gather = Gather(size)

    def one(rank: int) -> list[Array]:
        backend = SharedBackend(gather.of(rank), rank=rank, size=size)
        with Communicator(plan, backend, **options) as comm:
            return work(comm, rank)

    with ThreadPoolExecutor(size) as threads:
        return [future.result(120) for future in [threads.submit(one, rank) for rank in range(size)]]


def given_to(rank: int, count: int, dtype: str) -> Array:
    """Numbers of all magnitudes, whose sum depends on the order."""
    generator = np.random.default_rng([rank, count])
    values = generator.standard_normal(count) * 10.0 ** generator.integers(-3, 4, count)
    if np.dtype(dtype).kind == "c":
        return (values + 1j * values[::-1]).astype(dtype)
    return values.astype(np.float64 if np.dtype(dtype).kind == "f" else np.int64).astype(dtype)


@pytest.mark.sampled
@pytest.mark.parametrize("collective", ["allreduce", "reduce_scatter", "allgather", "broadcast"])
@pytest.mark.parametrize("shape", ["star", "chain", "binary"])
@pytest.mark.parametrize("nbytes", [8, SMALL, SMALL + 64, 40 * SMALL])
def test_every_road_adds_in_the_order_of_the_plan(shape: str, collective: str, nbytes: int) -> None:
    plan = forest_plan(4, collective, shape)

    def run(comm: Communicator, inputs: Any, op: str) -> Any:
        if collective == "allgather":
            return comm.all_gather(inputs)
        if collective == "broadcast":
            return comm.broadcast(inputs)
        return (comm.all_reduce if collective == "allreduce" else comm.reduce_scatter)(inputs, op=op)

    cases = [
        (dtype, op)
        for dtype in TYPES
        for op in ("sum", "avg", "prod", "min", "max")
        if not (np.dtype(dtype).kind == "c" and op in ("min", "max"))
    ]

    def of(rank: int, dtype: str) -> Array:
        return given_to(rank, -(-nbytes // np.dtype(dtype).itemsize // 4) * 4, dtype)

    def work(comm: Communicator, rank: int) -> list[Array]:
        return [run(comm, of(rank, dtype), op) for dtype, op in cases]

    found = in_threads(plan, work, chunk_bytes=1 << 14)
    with Communicator(plan, chunk_bytes=1 << 14) as comm:
        for number, (dtype, op) in enumerate(cases):
            wanted = run(comm, [of(rank, dtype) for rank in range(4)], op)
            for rank in range(4):
                ours, theirs = found[rank][number], wanted[rank]
                if dtype == "longdouble":  # with bytes that mean nothing
                    assert np.array_equal(ours, theirs, equal_nan=True), (op, rank)
                else:
                    assert ours.tobytes() == theirs.tobytes(), (dtype, op, rank)


def test_numpy_has_a_loop_for_every_sum_of_numbers() -> None:
    for dtype in ("int8", "uint64", "float16", "float32", "complex128"):
        assert all(address for address in loop_of(np.add, np.dtype(dtype))[:1])
    assert loop_of(np.add, np.dtype("M8[s]")) == (0, 0)
