"""The compiled run of the shared back end: its instructions, and the same bits on every road. Ranks are threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import topoplan
from collectives import Communicator
from collectives.backends.shared import compiled_program as machine
from collectives.backends.shared import host_program, shared_backend
from collectives.backends.shared.host_program import RING, ROUND_BYTES, SMALL
from collectives.backends.shared.shared_program import BLOCK, DIVIDE, SOURCE, UNLESS_FAILED, ProgramBuilder
from collectives.peers import shared_memory
from collectives.peers.control_page import FAILED, PAGE, SHOWABLE
from collectives.peers.shared_memory import ProcessMemoryAccess
from collectives.tables.compiled import Word, add_to_word, compiled, full_fence, load_word, store_word
from collectives.tables.lowering import lower
from collectives.tables.numpy_arrays import loop_of
from tests.support.hand_plans import forest_plan
from tests.support.job_meeting import in_shared_memory
from topoplan.errors import BackendError, RefusedError, UsageError
from topoplan.plans.plan import LATE

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
def test_words_and_fences_are_ordered(litmus: Callable[[int, int, int], int]) -> None:
    words = np.zeros(256, dtype=np.int64)
    litmus(words.ctypes.data, 0, 0)
    with ThreadPoolExecutor(2) as threads:
        seen = [threads.submit(litmus, words.ctypes.data, 200, side) for side in range(2)]
        assert [one.result(60) for one in seen] == [0, 0]


def given_to(rank: int, count: int, dtype: str) -> Array:
    """Numbers of all magnitudes, whose sum depends on the order."""
    generator = np.random.default_rng([rank, count])
    values = generator.standard_normal(count) * 10.0 ** generator.integers(-3, 4, count)
    if np.dtype(dtype).kind == "c":
        return (values + 1j * values[::-1]).astype(dtype)
    return values.astype(np.float64 if np.dtype(dtype).kind == "f" else np.int64).astype(dtype)


def run(comm: Communicator, collective: str, inputs: Any, op: str, out: Any = None) -> Any:
    """A collective of this name."""
    if collective == "allgather":
        return comm.all_gather(inputs, out=out)
    if collective == "broadcast":
        return comm.broadcast(inputs, out=out)
    call = {"allreduce": comm.all_reduce, "reduce": comm.reduce, "reduce_scatter": comm.reduce_scatter}
    return call[collective](inputs, op=op, out=out)


def have_the_same_bits(found: list[list[Array]], wanted: list[Array | None], times: int) -> None:
    """Every rank has its result so many times; who gets none has an empty array."""
    for rank, result in enumerate(wanted):
        expected = np.zeros(0) if result is None else result
        assert [one.tobytes() == expected.tobytes() for one in found[rank]] == [True] * times, rank


@pytest.mark.sampled
@pytest.mark.parametrize("collective", ["allreduce", "reduce_scatter", "allgather", "broadcast"])
@pytest.mark.parametrize("shape", ["star", "chain", "binary"])
@pytest.mark.parametrize("nbytes", [8, SMALL, SMALL + 64, SHOWABLE + 64])
def test_every_road_adds_in_the_order_of_the_plan(shape: str, collective: str, nbytes: int) -> None:
    plan = forest_plan(4, collective, shape)
    cases = [
        (dtype, op)
        for dtype in TYPES
        for op in ("sum", "avg", "prod", "min", "max")
        if not (np.dtype(dtype).kind == "c" and op in ("min", "max"))
    ]

    def of(rank: int, dtype: str) -> Array:
        return given_to(rank, -(-nbytes // np.dtype(dtype).itemsize // 4) * 4, dtype)

    def work(comm: Communicator, rank: int) -> list[Array]:
        return [run(comm, collective, of(rank, dtype), op) for dtype, op in cases]

    found = in_shared_memory(plan, work, chunk_bytes=1 << 14)
    with Communicator(plan, chunk_bytes=1 << 14) as comm:
        for number, (dtype, op) in enumerate(cases):
            wanted = run(comm, collective, [of(rank, dtype) for rank in range(4)], op)
            for rank in range(4):
                ours, theirs = found[rank][number], wanted[rank]
                if dtype == "longdouble":  # with bytes that mean nothing
                    assert np.array_equal(ours, theirs, equal_nan=True), (op, rank)
                else:
                    assert ours.tobytes() == theirs.tobytes(), (dtype, op, rank)


@pytest.mark.sampled
@pytest.mark.parametrize("collective", ["allreduce", "reduce", "reduce_scatter", "allgather", "broadcast"])
@pytest.mark.parametrize("shape", ["star", "chain", "binary"])
@pytest.mark.parametrize("rounds", [0, 1, 2 * RING + 1])
def test_arrays_that_all_ranks_see_end_with_the_same_bits(shape: str, collective: str, rounds: int) -> None:
    plan = forest_plan(4, collective, shape)
    count = (SMALL + rounds * ROUND_BYTES) // 8 + 4
    count += 1 if collective == "allreduce" else 0  # its last chunk is one element
    given = [given_to(rank, count, "complex64") for rank in range(4)]
    whole = count * (4 if collective == "allgather" else 1) // (4 if collective == "reduce_scatter" else 1)

    def work(comm: Communicator, rank: int) -> list[Array]:
        apart, seen = given[rank].copy(), comm.empty(count, "complex64")
        seen[:] = given[rank]
        out = comm.empty((whole,), np.complex64)
        assert comm.backend == "shared"
        results = [run(comm, collective, apart, "prod"), run(comm, collective, seen, "prod", out)]
        assert np.array_equal(seen, given[rank])
        # the third rank's lie elsewhere, so nobody's are used
        mixed = run(comm, collective, apart if rank == 2 else seen, "prod", comm.empty(whole, "complex64"))
        in_place = run(comm, collective, seen, "prod", seen) if whole == count else mixed
        return [np.zeros(0) if one is None else np.array(one) for one in (*results, mixed, in_place)]

    found = in_shared_memory(plan, work, chunk_bytes=1 << 14)
    with Communicator(plan, chunk_bytes=1 << 14) as comm:
        wanted = run(comm, collective, given, "prod")
    have_the_same_bits(found, wanted, 4)


@pytest.mark.sampled
@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("collective", ["allreduce", "reduce", "reduce_scatter"])
@pytest.mark.parametrize("shape", ["star", "chain", "binary"])
def test_inputs_are_read_from_other_processes_where_all_may_do_so(
    monkeypatch: pytest.MonkeyPatch, shape: str, collective: str, readable: bool
) -> None:
    monkeypatch.setattr(shared_backend, "FETCHED_BYTES", 1 << 16)
    monkeypatch.setattr(host_program, "PAST_BYTES", 1 << 16)
    host_program.host_program_of.cache_clear()
    if not readable:
        monkeypatch.setattr(ProcessMemoryAccess, "_reads", lambda self, place: place != 2)
    plan = forest_plan(4, collective, shape)
    count = (1 << 16) + 4 if collective != "allreduce" else (1 << 16) + 1
    given = [given_to(rank, count, "complex64") for rank in range(4)]

    def work(comm: Communicator, rank: int) -> list[Array]:
        run(comm, collective, given[rank][:4], "sum")  # before it some may not yet have begun
        results = [run(comm, collective, given[rank].copy(), "avg") for _ in range(2)]
        opened: Any = comm
        frame = opened._open().backend._runner.frame
        assert (frame[machine.END] == frame[machine.FETCHED_END]) == readable
        assert frame[machine.FETCHED_END] > frame[machine.ARRAYS_END]
        ways = []
        held = count // (4 if collective == "reduce_scatter" else 1)
        # the results of all lie in arenas, then all but one
        for where in (comm.empty(held, "complex64"), np.zeros(held, "complex64") if rank == 1 else None):
            seen = comm.empty(held, "complex64") if where is None else where
            comm.barrier()  # then each sees the memory of all
            results.append(run(comm, collective, given[rank].copy(), "avg", seen))
            ways.append(bool(frame[machine.END] == frame[machine.INTO_END] > frame[machine.FETCHED_END]))
        assert ways == [readable, False]
        bent = np.zeros(8 * count + 1, np.uint8)[1:].view("complex64")
        bent[:] = given[rank]
        results.append(run(comm, collective, bent if rank == 1 else given[rank], "avg"))
        return [np.zeros(0) if one is None else one for one in results]

    found = in_shared_memory(plan, work, chunk_bytes=1 << 14)
    with Communicator(plan, chunk_bytes=1 << 14) as comm:
        wanted = run(comm, collective, given, "avg")
    have_the_same_bits(found, wanted, 5)
    host_program.host_program_of.cache_clear()


@pytest.mark.parametrize(
    ("machine_name", "size", "late", "roots"), [("dgx-1v", 4, 2, {0, 1, 2, 3}), ("dgx-h100", 3, 1, {0, 2})]
)
@pytest.mark.parametrize("readable", [True, False])
def test_the_others_add_up_before_a_late_rank_comes(
    monkeypatch: pytest.MonkeyPatch, machine_name: str, size: int, late: int, roots: set[int], readable: bool
) -> None:
    """In its own memory each, and the same bits as loopback; if not all can be read, they wait for all."""
    monkeypatch.setattr(shared_backend, "FETCHED_BYTES", 1 << 16)
    host_program.host_program_of.cache_clear()
    if not readable:
        monkeypatch.setattr(ProcessMemoryAccess, "_reads", lambda self, place: place != 1)
    plan = topoplan.plan_late(machine_name, {late: 0.01}, nbytes=1 << 28, gpus=range(size)).plan
    assert plan.schedule == LATE
    assert {shard.stages[-1].root for shard in plan.shards} == roots
    count = (1 << 16) + 1
    given = [given_to(rank, count, "complex64") for rank in range(size)]
    frames: dict[int, Any] = {}

    def work(comm: Communicator, rank: int) -> list[Array]:
        comm.all_reduce(given[rank][:4])  # before it some may not yet have begun
        opened: Any = comm
        frame = frames[rank] = opened._open().backend._runner.frame
        seen, out = comm.empty(count, "complex64"), comm.empty(count, "complex64")
        results, begun = [], []
        for source, target in (
            (given[rank].copy(), None),
            (given[rank].copy(), out),
            (seen, out),
            (seen, seen),
        ):
            if source is seen:
                seen[:] = given[rank]
            comm.barrier()
            called = int(frame[machine.AGREEMENT])
            while (
                rank == late
                and not all(
                    frames[other][machine.AGREEMENT] > called
                    and frames[other][machine.EARLY] == machine.EARLY_DONE
                    for other in range(size)
                    if other != late
                )
                and readable
            ):
                time.sleep(0)
            results.append(comm.all_reduce(source, op="prod", out=target).copy())
            begun.append(int(frame[machine.EARLY]))
        assert begun == [machine.EARLY_DONE if readable and rank != late else machine.ALL_AT_ONCE] * 4
        return results

    found = in_shared_memory(plan, work, chunk_bytes=1 << 14)
    with Communicator(plan, chunk_bytes=1 << 14) as comm:
        wanted = comm.all_reduce(given, op="prod")
    have_the_same_bits(found, list(wanted), 4)
    host_program.host_program_of.cache_clear()


def test_a_late_rank_that_never_comes_or_makes_another_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have begun without it, and no result is written."""
    monkeypatch.setattr(shared_backend, "FETCHED_BYTES", 1 << 16)
    host_program.host_program_of.cache_clear()
    plan = topoplan.plan_late("dgx-1v", {1: 0.01}, nbytes=1 << 28, gpus=[0, 1, 2, 3]).plan
    ended = threading.Barrier(4)

    def work(comm: Communicator, rank: int) -> tuple[str, Array]:
        array, out = np.ones(1 << 16), np.zeros(1 << 16)
        with pytest.raises(RefusedError, match="rank 1"):
            comm.all_reduce(array, op="max" if rank == 1 else "sum", out=out)
        assert not out.any()
        assert (comm.all_reduce((2.0 + rank) * array) == 14).all(), "sums from before the refused call"
        if rank != 1:
            with pytest.raises(BackendError) as seen:
                comm.all_reduce(array, out=out)
        ended.wait(60)
        return str(seen.value) if rank != 1 else "", out

    for rank, (text, out) in enumerate(in_shared_memory(plan, work, timeout=0.5)):
        assert not out.any()
        assert rank == 1 or "peer 1" in text or "rank 1" in text, text
    host_program.host_program_of.cache_clear()


@pytest.mark.parametrize(
    ("method", "moved"), [("ROUNDS", 4.75), ("FETCHED", 3.25), ("INTO", 2.0), ("ARRAYS", 2.0)]
)
def test_an_allreduce_moves_so_many_bytes_for_each_of_its_buffer(method: str, moved: float) -> None:
    """Loads and stores of a rank; an area of a block stays in the cache."""
    count, itemsize = 1 << 20, 4
    table = lower(forest_plan(4, "allreduce", "star"), count, chunk_elements=1 << 16)
    total = 0
    for rank in range(4):
        program = host_program.host_program_of(
            table,
            rank,
            given=(0, count),
            blocks=((0, count),) * 4,
            itemsize=itemsize,
            block_bytes=1 << 14,
            methods=(getattr(host_program, method),),
        )
        for one in program.operations:
            read = program.inputs["memory"][one["first_input"] : one["last_input"]]
            touched = [memory for memory in (*read, one["memory"]) if memory != BLOCK]
            total += one["bytes"] * (0 if one["kind"] == DIVIDE else len(touched))
    assert total / (4 * count * itemsize) == moved


def test_inputs_in_memory_that_cannot_be_read_go_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_backend, "FETCHED_BYTES", 1 << 16)
    host_program.host_program_of.cache_clear()
    hidden = np.ones(1 << 16)
    asked = shared_memory._read_memory

    def read(pid: int, address: int, nbytes: int) -> bytes | None:
        behind = hidden.ctypes.data <= address < hidden.ctypes.data + hidden.nbytes
        return None if behind else asked(pid, address, nbytes)

    monkeypatch.setattr(shared_memory, "_read_memory", read)

    def work(comm: Communicator, rank: int) -> list[Array]:
        comm.all_reduce(np.ones(1))  # before it some may not yet have begun
        return [comm.all_reduce(hidden if rank == 1 else np.ones(1 << 16)) for _ in range(3)]

    for results in in_shared_memory(forest_plan(3, "allreduce", "star"), work):
        assert all((one == 3).all() for one in results)
    host_program.host_program_of.cache_clear()


@pytest.mark.parametrize("failed", [0, 1])
def test_who_has_worked_on_memory_of_others_looks_whether_one_has_failed(failed: int) -> None:
    """A failed rank may change what another one, that stalled, has yet to read."""
    writing = ProgramBuilder(8)
    writing.add(UNLESS_FAILED, 0, 0, [(SOURCE, 0)], (SOURCE, 0))
    pages = np.zeros((3, PAGE // 8), np.int64)
    pages[2, FAILED] = failed
    frame = np.zeros(machine.FRAME + 12, np.int64)
    frame[machine.END] = 1
    status = machine.run(*writing.arrays(), frame, pages.ctypes.data, 0, 3)
    assert status == (machine.OTHERS_FAILED if failed else machine.ENDED)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 200, 4099])
@pytest.mark.parametrize("start", [0, 1, 63])
def test_what_is_copied_past_the_caches_is_all_of_it_and_no_more(nbytes: int, start: int) -> None:
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes + 5, np.uint8)
    target = np.zeros(nbytes + 200, np.uint8)
    machine._copy_past(target.ctypes.data + start, source.ctypes.data + 5, nbytes)
    assert np.array_equal(target[start : start + nbytes], source[5:])
    assert not target[:start].any()
    assert not target[start + nbytes :].any()


def test_memory_of_arrays_that_are_gone_is_used_again_and_arrays_outlive_their_communicator() -> None:
    def work(comm: Communicator, rank: int) -> list[Array]:
        first, second = comm.empty((3, 1000)), comm.empty(5, "int8")
        assert (first.shape, first.dtype, second.dtype) == ((3, 1000), np.float32, np.int8)
        assert not np.shares_memory(first, second)
        first[:], second[:] = rank, rank
        view, place = first[1], first.ctypes.data
        del first
        assert comm.empty((3, 1000)).ctypes.data != place  # a view keeps it
        del view
        again = comm.empty(1000, np.float64)
        assert again.ctypes.data == place
        assert not again.any()  # what it held is gone
        return [second]

    for rank, (kept,) in enumerate(in_shared_memory(forest_plan(2, "allreduce", "star"), work)):
        assert kept.tolist() == [rank] * 5


def test_other_back_ends_give_arrays_like_any_other_and_say_what_they_cannot() -> None:
    with Communicator(forest_plan(2, "allreduce", "star")) as comm:
        arrays = comm.empty((2, 3), np.dtype("int64"))
        assert [(one.shape, one.dtype.name) for one in arrays] == [((2, 3), "int64")] * 2
        assert [comm.empty(4, like)[1].dtype.name for like in ("bfloat16", np.int8, arrays[0])] == [
            "bfloat16",
            "int8",
            "int64",
        ]
        for shape, dtype in (
            (3, "float33"),
            (3, object),
            (3, "datetime64[s]"),
            ((2, -1), "int8"),
            (2.5, "int8"),
        ):
            with pytest.raises(UsageError, match=r"cannot be moved|shape must be"):
                comm.empty(shape, dtype)


def test_numpy_has_a_loop_for_every_sum_of_numbers() -> None:
    for dtype in ("int8", "uint64", "float16", "float32", "complex128"):
        assert all(address for address in loop_of(np.add, np.dtype(dtype))[:1])
    assert loop_of(np.add, np.dtype("M8[s]")) == (0, 0)
