"""Selection and error feedback on the GPU that is there, against plain numpy: run by ``make test-gpu``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from selection_data import DATA, DTYPES, drawn, key_of, reference, same

from collectives.arrays.cupy_arrays import load_cupy
from collectives.selection.gpu import feed_gpu, topk_gpu
from topoplan.errors import UsageError

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    pytest.importorskip("cupy", reason="selection on a GPU needs CuPy")
    try:
        return load_cupy("gpu selection")
    except UsageError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", sorted(DATA))
def test_topk_on_the_gpu_is_numpys(cupy: Any, kind: str, dtype: str) -> None:
    for count, several in ((1, (0, 1)), (70001, (0, 1, 700, 20000, 70001)), (5000001, (5000, 1500000))):
        x = drawn(kind, dtype, count, np.random.default_rng(count))
        for k in several:
            indices, values = topk_gpu(cupy.asarray(x), k, nan="largest")
            assert same((indices.get(), values.get()), reference(x, k)), (count, k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_repeated_runs_on_a_busy_gpu_give_the_same_bits(cupy: Any, dtype: str) -> None:
    x = cupy.asarray(drawn("few values", dtype, 1 << 22, np.random.default_rng(0)))
    spread = cupy.asarray(drawn("normal", dtype, 1 << 22, np.random.default_rng(1)))
    for array, k in ((x, 1 << 20), (spread, 40000)):
        first = [one.get() for one in topk_gpu(array, k)]
        for _ in range(20):
            assert same(tuple(one.get() for one in topk_gpu(array, k)), tuple(first))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_error_feedback_on_the_gpu_is_numpys(cupy: Any, dtype: str) -> None:
    generator = np.random.default_rng(7)
    count, k = 4300003, 10000
    room = cupy.zeros(count + 1, dtype=dtype)
    for residual in (room[:count], room[1:]):
        residual[...] = 0
        total, threshold = np.zeros(count, dtype=dtype), None
        for _ in range(4):
            gradient = drawn("normal", dtype, count, generator)
            total = total + gradient
            expected = reference(total, k)
            indices, values, threshold = feed_gpu(residual, cupy.asarray(gradient), k, threshold=threshold)
            assert same((indices.get(), values.get()), expected)
            assert threshold.get()[0] == key_of(expected[1]).min()
            total[expected[0]] = 0
            assert residual.get().tobytes() == total.tobytes()


def test_a_nan_on_the_gpu_is_refused(cupy: Any) -> None:
    x = np.ones(100000, dtype=np.float32)
    x[77777] = np.nan
    with pytest.raises(UsageError, match="NaN among the 100000 elements"):
        topk_gpu(cupy.asarray(x), 10)
    assert topk_gpu(cupy.asarray(x), 1, nan="largest")[0].get().tolist() == [77777]


def test_the_current_stream_is_used(cupy: Any) -> None:
    x = drawn("normal", "float32", 1 << 20, np.random.default_rng(9))
    with cupy.cuda.Stream(non_blocking=True):
        found = topk_gpu(cupy.asarray(x) * 2, 1000)
        assert same((found[0].get(), found[1].get()), reference(x * 2, 1000))


def test_arrays_of_more_than_2_to_the_31_elements_have_wide_indices(cupy: Any) -> None:
    count = 2**31 + 5
    if cupy.cuda.runtime.memGetInfo()[0] < 3 * 2 * count:
        pytest.skip("the GPU has less than 12 GiB of free memory")
    x = cupy.zeros(count, dtype=np.float16)
    places = np.array([3, 2**31 - 1, 2**31, count - 1])
    x[cupy.asarray(places)] = cupy.asarray(np.array([1, -2, 3, -4], dtype=np.float16))
    indices, values = topk_gpu(x, 4)
    assert indices.dtype == np.int64
    assert indices.get().tolist() == places.tolist()
    assert values.get().tolist() == [1, -2, 3, -4]
    assert topk_gpu(x, 6)[0].get().tolist() == [0, 1, *places.tolist()]
