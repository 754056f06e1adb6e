"""What must hold of exchanges on a GPU, as plain functions: all ranks on one, and NCCL of a rank with itself.

As `gpu_checks`, which is about kernels and selection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import Communicator
from collectives.backends.loopback.gpu_loopback import LoopbackGpu
from collectives.backends.nccl.nccl_library import NcclCommunicator, NcclLibrary
from tests.jobs.nccl_rank import methods
from tests.support.gpu_checks import GUARD
from tests.support.hand_plans import forest_plan
from tests.support.kernel_data import averaged, joined, special
from tests.support.sparse_steps import ON_GPUS, TWO_SERVERS, Step, as_it_is, taken
from topoplan.plans.plan import Plan

Array = NDArray[Any]


# ---- the sparse allreduce of all ranks on one GPU


def check_sparse(cupy: Any, steps: list[Step]) -> None:
    with Communicator(TWO_SERVERS) as comm:
        wanted = taken(comm, steps, as_it_is, as_it_is)
    with Communicator(TWO_SERVERS, "loopback-gpu") as comm:
        assert taken(comm, steps, cupy.asarray, lambda array: array.get()) == wanted


def check_nan_in_sparse(cupy: Any, size: int = 70_001) -> None:
    """A NaN shows on all ranks, and the residuals are as before."""
    ranks = range(len(TWO_SERVERS.ranks))
    gradients = [np.random.default_rng(rank).standard_normal(size) for rank in ranks]
    with Communicator(TWO_SERVERS, "loopback-gpu") as comm:
        comm.sparse_all_reduce([cupy.asarray(one) for one in gradients], density=0.01, exchange="servers")
        before = comm.sparse_state()[""]
        gradients[3][[size // 3, size - 1]] = np.nan
        given = [cupy.asarray(one) for one in gradients]
        for exchange in ON_GPUS:
            sums = [one.get() for one in comm.sparse_all_reduce(given, density=0.01, exchange=exchange)]
            assert not np.isfinite(sums[0]).all(), f"{exchange} does not show a NaN"
            assert all(np.array_equal(one, sums[0], equal_nan=True) for one in sums), exchange
        for one, other in zip(before, comm.sparse_state()[""], strict=True):
            assert np.array_equal(one["residual"], other["residual"])


# ---- all ranks on one GPU


def check_loopback(
    cupy: Any, shape: str, collective: str, *, graphs: bool = True, counts: Sequence[int] = (0, 1, 7, 1000003)
) -> None:
    """A collective has the bits of the loopback, step by step the first time and then as a graph."""
    plan = forest_plan(8, collective, shape)
    backend = LoopbackGpu(cupy, 8, step_bytes=1 << 18, graphs=graphs)
    with Communicator(plan, backend, chunk_bytes=1 << 14) as comm, Communicator(plan) as plain:
        for count in counts:
            size = -(-count // 8) * 8
            for seed in range(4):
                generator = np.random.default_rng(seed)
                arrays = [generator.standard_normal(size).astype(np.float32) for _ in range(8)]
                found = methods(comm)[collective]([cupy.asarray(array) for array in arrays])
                _same_arrays(found, methods(plain)[collective](arrays), f"{collective} of {count}")


def check_shrink(cupy: Any, count: int = 100_003) -> None:
    """Ranks are left out one after the other, until one is left."""
    plan = forest_plan(4, "allreduce", "binary")
    arrays = [np.random.default_rng(rank).standard_normal(count).astype(np.float32) for rank in range(4)]
    with Communicator(plan, "loopback-gpu") as comm, Communicator(plan) as plain:
        for gone in (1, 0, 1):
            del arrays[gone]
            for one in (comm, plain):
                one.shrink(without=[gone])
            for _ in range(3):
                found = comm.all_reduce([cupy.asarray(array) for array in arrays])
                _same_arrays(found, plain.all_reduce(arrays), f"the sum of {len(arrays)} ranks")


def _same_arrays(found: Sequence[Any], wanted: Sequence[Any], what: str) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None), what
        assert one is None or one.get().tobytes() == other.tobytes(), f"{what} differs"


OPERATIONS = [
    *(
        (dtype, op)
        for dtype in ("float16", "float32", "int8", "uint64")
        for op in ("sum", "prod", "min", "max", "avg")
    ),
    ("complex64", "sum"),
    ("complex64", "avg"),
    ("complex128", "sum"),
    ("bool", "min"),
    ("bool", "max"),
]
"""dtypes and operations through a communicator."""


def check_operation(cupy: Any, dtype: str, op: str) -> None:
    """A reduction through a communicator has the bits of the loopback."""
    plan = forest_plan(3, "allreduce", "star")
    generator = np.random.default_rng(0)
    arrays = [(generator.standard_normal((7, 31)) * 100).astype(dtype) for _ in range(3)]
    with Communicator(plan, "loopback-gpu", chunk_bytes=64) as comm, Communicator(plan) as plain:
        found = comm.all_reduce([cupy.asarray(array) for array in arrays], op=op)
        _same_arrays(found, plain.all_reduce(arrays, op=op), f"{op} of {dtype}")


def check_bfloat16(cupy: Any, bfloat16: Any, op: str) -> None:
    """bfloat16 is rounded after every join, in one of the orders that three ranks have; averages divide before."""
    plan: Plan = forest_plan(3, "allreduce", "star", root=0)
    bits = [special("bfloat16", 501, np.random.default_rng(rank)) for rank in range(3)]
    with Communicator(plan, "loopback-gpu") as comm:
        results = comm.all_reduce([cupy.asarray(one.view(bfloat16)) for one in bits], op=op)
    lines = [result.get().view(np.uint16) for result in results]
    assert all(np.array_equal(line, lines[0]) for line in lines), f"ranks differ in {op}"
    if op == "avg":
        bits = [averaged("bfloat16", line, 3) for line in bits]
    orders = [joined("bfloat16", op, bits[a], [bits[b], bits[c]]) for a, b, c in permutations(range(3))]
    alike = [_alike(lines[0], line) for line in orders]
    assert np.any(alike, axis=0).all(), f"{op} of bfloat16 has bits of no order"


def _alike(one: Array, other: Array) -> NDArray[np.bool_]:
    """Where two arrays of bfloat16 have the same bits, or NaN both."""
    nan = [(bits & 0x7FFF) > 0x7F80 for bits in (one, other)]
    return (one == other) | (nan[0] & nan[1])


def check_background(cupy: Any, count: int = 1 << 22, queued: int = 100) -> None:
    """Collectives in the background wait for the stream that they were called on, whose arrays may be gone by then."""
    plan, stream = forest_plan(4, "allreduce", "binary"), cupy.cuda.Stream(non_blocking=True)
    with Communicator(plan, "loopback-gpu") as comm:
        for async_op in (False, True):
            with stream:
                given = [cupy.zeros(count, dtype=np.float32) for _ in range(4)]
                for value in range(queued):
                    for array in given:
                        array[...] = float(value)
                handles = [comm.all_reduce(given, async_op=async_op) for _ in range(3)]
                del given, array
                # takes the memory that was freed, if it was
                taken_over = [cupy.zeros(count, dtype=np.float32) for _ in range(4)]
            for handle in handles:
                for result in handle.wait() if async_op else handle:
                    found = result.get()
                    assert (found == 4.0 * (queued - 1)).all(), (
                        f"async_op={async_op}: {found.min()} to {found.max()}"
                    )
            del handles, taken_over


def check_out_of_other_streams(cupy: Any, count: int = 1 << 20) -> None:
    """A result may be read in another stream right when the call returns, and given back in place."""
    plan = forest_plan(4, "allreduce", "chain")
    with Communicator(plan, "loopback-gpu") as comm:
        one, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        with one:
            given = [cupy.asarray(np.full(count, rank, dtype=np.float32)) for rank in range(4)]
        one.synchronize()
        for round_number in range(4):
            with one if round_number % 2 else other:
                comm.all_reduce(given, out=given)
            with other if round_number % 2 else one:
                assert given[3].get().tolist()[:: count // 8] == [6.0 * 4.0**round_number] * 8


# ---- one rank that sends to itself over NCCL


def check_messages_to_itself(
    cupy: Any, library: NcclLibrary, sizes: Sequence[int] = (1, 15, 16, 1000003), rounds: int = 3
) -> None:
    """Bytes arrive at any alignment, step by step and as a graph that is replayed on other values."""
    with alone(cupy, library) as link:
        for nbytes in sizes:
            for shifts in ((0, 0), (16, 1), (3, 5), (8, 0)):
                _check_message(cupy, library, link, nbytes, shifts, rounds)


def _check_message(
    cupy: Any, library: NcclLibrary, link: NcclCommunicator, nbytes: int, shifts: tuple[int, int], rounds: int
) -> None:
    """The graph ends with this call, as it must before its communicator."""
    stream, graph = cupy.cuda.Stream(non_blocking=True), None
    given, out = (cupy.zeros(nbytes + shift + GUARD, dtype=np.uint8) for shift in shifts)
    lines = given[shifts[0] : shifts[0] + nbytes], out[shifts[1] : shifts[1] + nbytes]
    for number in range(rounds):
        values = np.frombuffer(np.random.default_rng(number).bytes(nbytes), dtype=np.uint8)
        lines[0].set(values)
        cupy.cuda.get_current_stream().synchronize()
        if number and graph is None:
            graph = captured(library, link, lines, stream)
        if graph is None:
            to_itself(library, link, lines, stream)
        else:
            graph.launch(stream)
        stream.synchronize()
        found = out.get()
        where = f"{nbytes} bytes from +{shifts[0]} to +{shifts[1]}, {'graph' if number else 'step'}"
        assert found[shifts[1] : shifts[1] + nbytes].tobytes() == values.tobytes(), where
        assert not found[: shifts[1]].any(), where
        assert not found[shifts[1] + nbytes :].any(), where


def check_abort_beside_a_graph(cupy: Any, library: NcclLibrary, *, limit: float = 10.0) -> float:
    """An abort ends once the graph that was captured is dropped; seconds from then."""
    link = connected(cupy, library)
    graph = _replayed_graph(cupy, library, link)
    aborted = _beside(cupy, link.abort)
    aborted.join(0.3)
    started = time.monotonic()
    del graph
    aborted.join(limit)
    assert not aborted.is_alive(), f"the abort has not ended {limit:g} s after the graph was dropped"
    return time.monotonic() - started


def check_close_behind_a_graph(cupy: Any, library: NcclLibrary, *, limit: float = 4.0) -> float:
    """Seconds that a communicator takes to close whose graph was dropped before."""
    link = connected(cupy, library)
    graph = _replayed_graph(cupy, library, link)
    del graph
    started = time.monotonic()
    closed = _beside(cupy, link.destroy)
    closed.join(limit)
    assert not closed.is_alive(), f"closing takes more than {limit:g} s"
    return time.monotonic() - started


@contextmanager
def alone(cupy: Any, library: NcclLibrary) -> Iterator[NcclCommunicator]:
    """A communicator of one rank; behind an error it stays, since a traceback keeps graphs that it would wait for."""
    link = connected(cupy, library)
    yield link
    link.destroy()


def connected(cupy: Any, library: NcclLibrary) -> NcclCommunicator:
    link = library.connect(1, 0, library.unique_id())
    settle(link)
    return link


def to_itself(library: NcclLibrary, link: NcclCommunicator, lines: tuple[Any, Any], stream: Any) -> None:
    given, out = lines
    with library.group():
        link.send(given.data.ptr, given.nbytes, 0, stream.ptr)
        link.receive(out.data.ptr, out.nbytes, 0, stream.ptr)
    settle(link)


def captured(library: NcclLibrary, link: NcclCommunicator, lines: tuple[Any, Any], stream: Any) -> Any:
    stream.begin_capture()
    try:
        to_itself(library, link, lines, stream)
    finally:
        graph = stream.end_capture()
    return graph


def settle(link: NcclCommunicator, *, limit: float = 30.0) -> None:
    end = time.monotonic() + limit
    while not link.ready():
        assert time.monotonic() < end, f"NCCL is not ready after {limit:g} s"
        time.sleep(1e-4)


def _replayed_graph(cupy: Any, library: NcclLibrary, link: NcclCommunicator) -> Any:
    stream = cupy.cuda.Stream(non_blocking=True)
    lines = tuple(cupy.zeros(1 << 20, dtype=np.uint8) for _ in range(2))
    cupy.cuda.get_current_stream().synchronize()
    to_itself(library, link, (lines[0], lines[1]), stream)
    graph = captured(library, link, (lines[0], lines[1]), stream)
    graph.launch(stream)
    stream.synchronize()
    return graph


def _beside(cupy: Any, call: Callable[[], object]) -> threading.Thread:
    """A thread that calls this on the GPU that is current here."""
    device = cupy.cuda.Device().id

    def run() -> None:
        with cupy.cuda.Device(device):
            call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread
