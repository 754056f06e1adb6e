"""Error feedback on the GPU that is there, against the processor's: run by ``make test-gpu``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from feedback_steps import CASES, compare_steps
from selection_data import drawn, same

from collectives import ErrorFeedback
from collectives.arrays.cupy_arrays import load_cupy
from collectives.selection.gpu_entries import add_entries_gpu
from collectives.selection.gpu_error_feedback import GpuErrorFeedback
from collectives.selection.gpu_pairs import decode_entries_gpu, encode_entries_gpu
from collectives.sparse.pairs import encode_entries
from topoplan.errors import UsageError

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    pytest.importorskip("cupy", reason="error feedback on a GPU needs CuPy")
    try:
        return load_cupy("gpu selection")
    except UsageError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("case", CASES)
def test_error_feedback_on_the_gpu_gives_and_keeps_the_processors_bits(
    cupy: Any, case: tuple[str, str, float]
) -> None:
    compare_steps(cupy, case, 70001, (700, 0, 20000, 70001, 700))
    compare_steps(cupy, case, 4300003, (43000, 4300, 43000, 2000000))


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_nan_on_the_gpu_is_refused_and_all_is_as_before(cupy: Any, momentum: float) -> None:
    size = 4300003
    feedback = GpuErrorFeedback(size, momentum=momentum)
    whole = [np.random.default_rng(i).integers(-100, 101, size).astype(np.float32) for i in range(2)]
    feedback.feed(cupy.asarray(whole[0]), 5000)
    before, broken = feedback.state(), whole[1].copy()
    broken[[3333333, size - 1]] = np.nan
    for k in (0, 5000):
        with pytest.raises(UsageError, match="element 3333333 of the gradient is NaN"):
            feedback.feed(cupy.asarray(broken), k)
    after = feedback.state()
    assert np.array_equal(after["residual"], before["residual"])
    assert momentum == 0 or np.array_equal(after["velocity"], before["velocity"])
    host = ErrorFeedback(size, momentum=momentum)
    host.restore(before)
    found = feedback.feed(cupy.asarray(whole[1]), 5000)
    assert same((found[0].get(), found[1].get()), host.feed(whole[1], 5000))


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_messages_made_and_added_on_the_gpu_are_the_processors(cupy: Any, dtype: str, index: str) -> None:
    generator, size = np.random.default_rng(5), 3000001
    total = drawn("normal", dtype, size, generator)
    there = cupy.asarray(total)
    universe = size if index == "int32" else 2**31
    for count in (0, 1, 30001, size):
        indices = np.sort(generator.permutation(size)[:count]).astype(index)
        values = drawn("normal", dtype, count, generator) if count else np.zeros(0, dtype)
        message = encode_entries_gpu(cupy.asarray(indices), cupy.asarray(values))
        wanted = encode_entries(indices, values, size=universe, wire=None, rank=0, step=0)
        assert message.get().tobytes() == wanted.tobytes()
        odd = cupy.concatenate((cupy.zeros(3, dtype=np.uint8), message))[3:]
        for one in (message, odd):
            add_entries_gpu(there, *decode_entries_gpu(one, size=universe, dtype=dtype))
            total[indices] += values
    assert there.get().tobytes() == total.tobytes()


def test_an_index_outside_is_refused_on_the_gpu(cupy: Any) -> None:
    room = cupy.zeros(30, dtype=np.float32)
    entries = cupy.asarray(np.int32([-1, 0, 9, 10])), cupy.ones(4, dtype=np.float32)
    with pytest.raises(UsageError, match="2 of 4 indices are not in 0 to 9"):
        add_entries_gpu(room[10:20], *entries)
    assert np.flatnonzero(room.get()).tolist() == [10, 19]
