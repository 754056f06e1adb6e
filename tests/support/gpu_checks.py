"""What must hold on a GPU, as plain functions: the tests marked ``gpu`` and the rows of `gpu_report` call them.

Each takes CuPy and raises AssertionError where something differs from numpy, the processor or the loopback. Data come
from seeds. pytest is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import ErrorFeedback
from collectives.sparse.entry_arrays import encode_entries
from collectives.sparse.gpu_entry_arrays import (
    GpuErrorFeedback,
    add_entries_gpu,
    decode_entries_gpu,
    encode_entries_gpu,
)
from collectives.sparse.selection.gpu_topk import topk_gpu
from collectives.tables.kernels.kernel_launch import TILE_BYTES, Chunks, Kernels, work_of
from collectives.tables.kernels.source import BYTES, ELEMENTS, divide_kernel, join_kernel, kernel_names
from tests.support.feedback_steps import compare_steps
from tests.support.kernel_data import (
    COMPLEX,
    EVERY_CASE,
    averaged,
    bits_type,
    joined,
    numpy_fuses,
    same_bits,
    special,
)
from tests.support.selection_data import drawn, reference, same
from topoplan.errors import TopoplanError, UsageError

Array = NDArray[Any]

GUARD = 8  # elements behind every result that no kernel may touch


def refuses(text: str, call: Callable[[], object], error: type[TopoplanError] = UsageError) -> None:
    """A call raises this error, with a text that matches."""
    said = None
    try:
        call()
    except error as met:
        said = str(met)
    assert said is not None, f"no {error.__name__} that says {text!r}"
    assert re.search(text, said), f"{said!r} does not say {text!r}"


# ---- joins, averages, copies


def forms(itemsize: int) -> list[tuple[int, tuple[int, int], int]]:
    """Elements, elements by which own and arriving arrays lie behind a multiple of 16 bytes, and how many arrive."""
    tile = TILE_BYTES // itemsize
    return [
        (1, (0, 0), 1),
        (tile + 1, (0, 0), 1),
        (2 * tile + 7, (3, 3), 3),
        (1000, (1, 1), 2),
        (1003, (0, 1), 2),
        (300, (2, 3), 5),
        (100003, (3, 3), 3),
    ]


def kernel_cases() -> tuple[str, ...]:
    """The kernels that `check_joins`, `check_averages` and `check_copies` run when they are given everything."""
    joins = {join_kernel(op, dtype, 0) for dtype, op in EVERY_CASE}
    divides = {divide_kernel(dtype) for dtype in averaged_dtypes()}
    copies = {join_kernel(None, "", itemsize) for itemsize in BYTES}
    assert joins | divides | copies == set(kernel_names()), "a kernel that nobody checks"
    return kernel_names()


def averaged_dtypes() -> list[str]:
    return [dtype for dtype in ELEMENTS if dtype != "bool"]


def check_joins(cupy: Any, dtype: str, op: str) -> None:
    """A fused join has numpy's bits for any size, alignment and number of siblings, and touches nothing else."""
    if dtype in COMPLEX and op == "prod" and not numpy_fuses():
        return  # numpy multiplies complex numbers otherwise on this processor
    generator = np.random.default_rng(7)
    kernels, itemsize = Kernels(cupy), bits_type(dtype).itemsize
    kernel = kernels.compiled(op, dtype, itemsize)
    for count, shifts, siblings in forms(itemsize):
        own = special(dtype, count, generator)
        arriving = [special(dtype, count, generator) for _ in range(siblings)]
        found = _run(cupy, kernels, kernel, own, arriving, shifts)
        wanted = joined(dtype, op, own, arriving)
        assert same_bits(found, wanted, dtype), (
            f"{op} of {count} {dtype}, {siblings} arriving, shifts {shifts}"
        )


def check_copies(cupy: Any, itemsize: int) -> None:
    """A copy keeps every bit."""
    kernels = Kernels(cupy)
    kernel = kernels.compiled(None, "", itemsize)
    kind = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}[itemsize]
    for count, shifts, _ in forms(itemsize):
        values = np.frombuffer(np.random.default_rng(count).bytes(itemsize * count), dtype=kind)
        found = _run(cupy, kernels, kernel, values, [], shifts)
        assert found.tobytes() == values.tobytes(), f"copy of {count} elements of {itemsize} bytes"


def _run(
    cupy: Any, kernels: Kernels, kernel: Any, own: Array, arriving: Sequence[Array], shifts: tuple[int, int]
) -> Array:
    """One item: own values joined with what arrives, or copied where nothing does."""
    count, kind = len(own), own.dtype
    rows = np.arange(max(len(arriving), 1))
    here, there = (np.full(len(rows), shift * kind.itemsize) for shift in shifts)
    zero = 0 * rows
    buffer = rows + 2 if arriving else zero + 1
    adds = np.full(len(rows), bool(arriving))
    chunks = Chunks(
        zero,
        zero,
        zero,
        zero + count,
        adds,
        (zero, here),
        (zero + 1, here),
        (buffer, there if arriving else here),
    )
    room = cupy.zeros(shifts[0] + count + GUARD, dtype=kind)
    buffers = [room, _behind(cupy, own, shifts[0]), *(_behind(cupy, one, shifts[1]) for one in arriving)]
    done = kernels.upload(work_of(chunks, kind.itemsize), len(buffers))
    addresses = np.array([buffer.data.ptr for buffer in buffers], dtype=np.int64)
    done.bases.set(addresses)
    kernels.launch(kernel, done, 0)
    found: Array = room.get()
    assert not found[: shifts[0]].any(), "written in front of the result"
    assert not found[shifts[0] + count :].any(), "written behind the result"
    return found[shifts[0] : shifts[0] + count]


def _behind(cupy: Any, values: Array, shift: int) -> Any:
    return cupy.asarray(np.concatenate((np.zeros(shift, dtype=values.dtype), values)))


def check_averages(cupy: Any, dtype: str, counts: Sequence[int] = (1, 3001, 100003)) -> None:
    """An average has numpy's bits, for numbers of ranks that divide evenly and that do not."""
    kernels = Kernels(cupy)
    for count in counts:
        for ranks in (2, 3, 7, 200):
            values = special(dtype, count, np.random.default_rng(ranks))
            room = cupy.asarray(np.concatenate((values[:1], values, np.zeros(GUARD, dtype=values.dtype))))
            kernels.divide(room[1 : count + 1], dtype, ranks)
            found = room.get()
            wanted = averaged(dtype, values, ranks)
            assert same_bits(found[1 : count + 1], wanted, dtype), f"{count} {dtype} by {ranks}"
            assert found[:1].tobytes() == values[:1].tobytes(), "written in front of the result"
            assert not found[count + 1 :].any(), "written behind the result"


# ---- selection and error feedback

LARGE = ((1, (0, 1)), (70001, (0, 1, 700, 20000, 70001)), (5000001, (5000, 1500000)))
"""Elements, and of how many the largest are taken."""


def check_topk(cupy: Any, kind: str, dtype: str, sizes: Iterable[tuple[int, Sequence[int]]] = LARGE) -> None:
    """The k largest elements are those of a stable sort."""
    for count, several in sizes:
        x = drawn(kind, dtype, count, np.random.default_rng(count))
        for k in several:
            indices, values = topk_gpu(cupy.asarray(x), k, nan="largest")
            assert same((indices.get(), values.get()), reference(x, k)), f"{k} of {count} {kind} {dtype}"


def check_repeated_topk(cupy: Any, dtype: str, count: int = 1 << 22, rounds: int = 20) -> None:
    """The same data give the same bits every time, where blocks race for the same counters."""
    for kind, k in (("few values", count // 4), ("normal", count // 100)):
        array = cupy.asarray(drawn(kind, dtype, count, np.random.default_rng(0)))
        first = [one.get() for one in topk_gpu(array, k)]
        for _ in range(rounds):
            assert same(tuple(one.get() for one in topk_gpu(array, k)), tuple(first)), (
                f"{k} of {kind} {dtype}"
            )


def check_feed(cupy: Any, dtype: str, count: int = 4300003, k: int = 10000) -> None:
    """Error feedback takes out what numpy would and keeps the rest, at any alignment."""
    generator = np.random.default_rng(7)
    whole = GpuErrorFeedback(count + 1, dtype)
    for feedback in (whole.part(0, count), whole.part(1, count + 1)):
        feedback.residual[...] = 0
        total = np.zeros(count, dtype=dtype)
        for _ in range(4):
            gradient = drawn("normal", dtype, count, generator)
            total = total + gradient
            expected = reference(total, k)
            indices, values = feedback.feed(cupy.asarray(gradient), k)
            assert same((indices.get(), values.get()), expected)
            total[expected[0]] = 0
            assert feedback.residual.get().tobytes() == total.tobytes()


def check_nan_in_topk(cupy: Any, size: int = 100000) -> None:
    """A NaN is refused, or the largest of all."""
    x = np.ones(size, dtype=np.float32)
    x[size - size // 4] = np.nan
    given = cupy.asarray(x)
    refuses(f"NaN among the {size} elements", lambda: topk_gpu(given, 10))
    assert topk_gpu(given, 1, nan="largest")[0].get().tolist() == [size - size // 4]


def check_topk_on_the_current_stream(cupy: Any) -> None:
    """What the caller's stream still has to do is waited for."""
    x = drawn("normal", "float32", 1 << 20, np.random.default_rng(9))
    with cupy.cuda.Stream(non_blocking=True):
        given = cupy.zeros(x.size, dtype=np.float32)
        given[...] = cupy.asarray(x)
        found = topk_gpu(given, 1000)
        assert same((found[0].get(), found[1].get()), reference(x, 1000))


def check_wide_indices(cupy: Any) -> None:
    """More than 2^31 elements have indices of 64 bits; needs 12 GiB of free memory."""
    count = 2**31 + 5
    x = cupy.zeros(count, dtype=np.float16)
    places = np.array([3, 2**31 - 1, 2**31, count - 1])
    x[cupy.asarray(places)] = cupy.asarray(np.array([1, -2, 3, -4], dtype=np.float16))
    indices, values = topk_gpu(x, 4)
    assert indices.dtype == np.int64
    assert indices.get().tolist() == places.tolist()
    assert values.get().tolist() == [1, -2, 3, -4]
    assert topk_gpu(x, 6)[0].get().tolist() == [0, 1, *places.tolist()]


FREE_FOR_WIDE_INDICES = 3 * 2 * (2**31 + 5)  # bytes of free memory


def check_feedback(cupy: Any, case: tuple[str, str, float]) -> None:
    """Steps of error feedback give and keep the processor's bits."""
    compare_steps(cupy, case, 70001, (700, 0, 20000, 70001, 700))
    compare_steps(cupy, case, 4300003, (43000, 4300, 43000, 2000000))


def check_nan_in_feedback(cupy: Any, momentum: float, size: int = 4300003) -> None:
    """A gradient with NaN is refused by its first place, and all is as before."""
    feedback = GpuErrorFeedback(size, momentum=momentum)
    whole = [np.random.default_rng(i).integers(-100, 101, size).astype(np.float32) for i in range(2)]
    feedback.feed(cupy.asarray(whole[0]), 5000)
    before, broken = feedback.state(), whole[1].copy()
    place = size - size // 4
    broken[[place, size - 1]] = np.nan
    for k in (0, 5000):
        refuses(f"element {place} of the gradient is NaN", lambda k=k: feedback.feed(cupy.asarray(broken), k))
    after = feedback.state()
    assert np.array_equal(after["residual"], before["residual"])
    assert momentum == 0 or np.array_equal(after["velocity"], before["velocity"])
    host = ErrorFeedback(size, momentum=momentum)
    host.restore(before)
    found = feedback.feed(cupy.asarray(whole[1]), 5000)
    assert same((found[0].get(), found[1].get()), host.feed(whole[1], 5000))


def check_messages(cupy: Any, dtype: str, index: str, size: int = 3000001) -> None:
    """Messages of entries are made and added as the processor makes and adds them."""
    generator = np.random.default_rng(5)
    total = drawn("normal", dtype, size, generator)
    there = cupy.asarray(total)
    universe = size if index == "int32" else 2**31
    for count in (0, 1, size // 100, size):
        indices = np.sort(generator.permutation(size)[:count]).astype(index)
        values = drawn("normal", dtype, count, generator) if count else np.zeros(0, dtype)
        message = encode_entries_gpu(cupy.asarray(indices), cupy.asarray(values))
        wanted = encode_entries(indices, values, size=universe, wire=None, rank=0, step=0)
        assert message.get().tobytes() == wanted.tobytes()
        odd = cupy.zeros(message.size + 3, dtype=np.uint8)[3:]
        odd[...] = message
        for one in (message, odd):
            add_entries_gpu(there, *decode_entries_gpu(one, size=universe, dtype=dtype))
            total[indices] += values
    assert there.get().tobytes() == total.tobytes()


def check_indices_outside(cupy: Any) -> None:
    """An index outside is refused, and nothing beside the array is written."""
    room = cupy.zeros(30, dtype=np.float32)
    entries = cupy.asarray(np.int32([-1, 0, 9, 10])), cupy.asarray(np.ones(4, dtype=np.float32))
    refuses("2 of 4 indices are not in 0 to 9", lambda: add_entries_gpu(room[10:20], *entries))
    assert np.flatnonzero(room.get()).tolist() == [10, 19]
