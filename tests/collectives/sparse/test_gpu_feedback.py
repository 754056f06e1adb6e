"""Error feedback on the GPU that is there, against the processor's: run by ``make test-gpu``."""

from __future__ import annotations

from typing import Any

import pytest

from collectives.tables.cupy_arrays import load_cupy
from tests.support.feedback_steps import CASES
from tests.support.gpu_checks import (
    check_feedback,
    check_indices_outside,
    check_messages,
    check_nan_in_feedback,
)
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
    check_feedback(cupy, case)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_nan_on_the_gpu_is_refused_and_all_is_as_before(cupy: Any, momentum: float) -> None:
    check_nan_in_feedback(cupy, momentum)


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_messages_made_and_added_on_the_gpu_are_the_processors(cupy: Any, dtype: str, index: str) -> None:
    check_messages(cupy, dtype, index)


def test_an_index_outside_is_refused_on_the_gpu(cupy: Any) -> None:
    check_indices_outside(cupy)
