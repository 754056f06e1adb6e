"""The sparse allreduce of all ranks on the GPU that is there: the bits of numpy arrays. Run by ``make test-gpu``."""

from __future__ import annotations

from typing import Any

import pytest

from collectives.sparse.codec import WireFormat
from collectives.tables.cupy_arrays import load_cupy
from tests.support.gpu_exchange_checks import check_nan_in_sparse, check_sparse
from tests.support.sparse_steps import EXCHANGES, mixed_steps, steps_of_each
from topoplan.errors import UsageError

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    pytest.importorskip("cupy", reason="the sparse allreduce on a GPU needs CuPy")
    try:
        return load_cupy("gpu selection")
    except UsageError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_every_exchange_on_the_gpu_has_the_bits_of_numpy_arrays(cupy: Any, momentum: float) -> None:
    check_sparse(cupy, steps_of_each(size=300_007, momentum=momentum))


@pytest.mark.parametrize("size", [0, 1, 3, 701])
def test_small_gradients_on_the_gpu_have_the_bits_of_numpy_arrays(cupy: Any, size: int) -> None:
    check_sparse(cupy, steps_of_each(size=size))


@pytest.mark.parametrize("values", ["as given", "float16", "fixed8"])
def test_wire_formats_on_the_gpu_have_the_bits_of_numpy_arrays(cupy: Any, values: Any) -> None:
    check_sparse(cupy, steps_of_each(EXCHANGES[1:], size=30_011, wire=WireFormat(values=values)))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_change_of_exchange_on_the_gpu_has_the_bits_of_numpy_arrays(cupy: Any, dtype: str) -> None:
    check_sparse(cupy, mixed_steps(dtype))


def test_a_nan_on_the_gpu_is_named_and_changes_nothing(cupy: Any) -> None:
    check_nan_in_sparse(cupy)
