"""The sparse allreduce of all ranks on the GPU that is there: the bits of numpy arrays. Run by ``make test-gpu``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sparse_steps import EXCHANGES, TWO_SERVERS, Step, as_it_is, mixed_steps, steps_of_each, taken

from collectives import Communicator
from collectives.arrays.cupy_arrays import load_cupy
from collectives.wire import WireFormat
from topoplan.errors import UsageError

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    pytest.importorskip("cupy", reason="the sparse allreduce on a GPU needs CuPy")
    try:
        return load_cupy("gpu selection")
    except UsageError as error:
        pytest.skip(str(error))


def compare(cupy: Any, steps: list[Step]) -> None:
    """The same calls on numpy arrays and on the GPU's."""
    with Communicator(TWO_SERVERS) as comm:
        wanted = taken(comm, steps, as_it_is, as_it_is)
    with Communicator(TWO_SERVERS, "loopback-gpu") as comm:
        assert taken(comm, steps, cupy.asarray, lambda array: array.get()) == wanted


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_every_exchange_on_the_gpu_has_the_bits_of_numpy_arrays(cupy: Any, momentum: float) -> None:
    compare(cupy, steps_of_each(size=300_007, momentum=momentum))


@pytest.mark.parametrize("size", [0, 1, 3, 701])
def test_small_gradients_on_the_gpu_have_the_bits_of_numpy_arrays(cupy: Any, size: int) -> None:
    compare(cupy, steps_of_each(size=size))


@pytest.mark.parametrize("values", ["as given", "float16", "fixed8"])
def test_wire_formats_on_the_gpu_have_the_bits_of_numpy_arrays(cupy: Any, values: Any) -> None:
    compare(cupy, steps_of_each(EXCHANGES[1:], size=30_011, wire=WireFormat(values=values)))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_change_of_exchange_on_the_gpu_has_the_bits_of_numpy_arrays(cupy: Any, dtype: str) -> None:
    compare(cupy, mixed_steps(dtype))


def test_a_nan_on_the_gpu_is_named_and_changes_nothing(cupy: Any) -> None:
    gradients = [np.random.default_rng(rank).standard_normal(70_001) for rank in TWO_SERVERS.ranks]
    with Communicator(TWO_SERVERS, "loopback-gpu") as comm:
        comm.sparse_all_reduce([cupy.asarray(one) for one in gradients], density=0.01, exchange="servers")
        before = comm.sparse_state()[""]
        gradients[3][[4444, 70_000]] = np.nan
        given = [cupy.asarray(one) for one in gradients]
        for exchange in EXCHANGES:
            with pytest.raises(UsageError, match="element 4444 of the gradient is NaN, on rank 3"):
                comm.sparse_all_reduce(given, density=0.01, exchange=exchange)
        for one, other in zip(before, comm.sparse_state()[""], strict=True):
            assert np.array_equal(one["residual"], other["residual"])
