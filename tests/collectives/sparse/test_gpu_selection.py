"""Selection and error feedback on the GPU that is there, against plain numpy: run by ``make test-gpu``."""

from __future__ import annotations

from typing import Any

import pytest

from collectives.tables.cupy_arrays import load_cupy
from tests.support.gpu_checks import (
    FREE_FOR_WIDE_INDICES,
    check_feed,
    check_nan_in_topk,
    check_repeated_topk,
    check_topk,
    check_topk_on_the_current_stream,
    check_wide_indices,
)
from tests.support.selection_data import DATA, DTYPES
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
    check_topk(cupy, kind, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_repeated_runs_on_a_busy_gpu_give_the_same_bits(cupy: Any, dtype: str) -> None:
    check_repeated_topk(cupy, dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_error_feedback_on_the_gpu_is_numpys(cupy: Any, dtype: str) -> None:
    check_feed(cupy, dtype)


def test_a_nan_on_the_gpu_is_refused(cupy: Any) -> None:
    check_nan_in_topk(cupy)


def test_the_current_stream_is_used(cupy: Any) -> None:
    check_topk_on_the_current_stream(cupy)


def test_arrays_of_more_than_2_to_the_31_elements_have_wide_indices(cupy: Any) -> None:
    if cupy.cuda.runtime.memGetInfo()[0] < FREE_FOR_WIDE_INDICES:
        pytest.skip("the GPU has less than 12 GiB of free memory")
    check_wide_indices(cupy)
