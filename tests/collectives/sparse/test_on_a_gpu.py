"""Selection, error feedback and sparse exchanges on a real GPU have the processor's bits; run by ``make test-gpu``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from collectives.sparse.codec import WireFormat
from collectives.tables.cupy_arrays import load_cupy
from tests.support import gpu_checks, gpu_exchange_checks
from tests.support.feedback_steps import CASES
from tests.support.selection_data import DATA, DTYPES
from tests.support.sparse_steps import ON_GPUS, mixed_steps, steps_of_each
from topoplan.errors import UsageError

pytestmark = pytest.mark.gpu

VALUES: tuple[Any, ...] = ("as given", "float16", "fixed8")

CHECKS: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
    *[(gpu_checks.check_topk, (kind, dtype)) for kind in sorted(DATA) for dtype in DTYPES],
    *[(gpu_checks.check_repeated_topk, (dtype,)) for dtype in DTYPES],
    *[(gpu_checks.check_feed, (dtype,)) for dtype in ("float32", "float64")],
    (gpu_checks.check_nan_in_topk, ()),
    (gpu_checks.check_topk_on_the_current_stream, ()),
    *[(gpu_checks.check_feedback, (case,)) for case in CASES],
    *[(gpu_checks.check_nan_in_feedback, (momentum,)) for momentum in (0.0, 0.5)],
    *[
        (gpu_checks.check_messages, (dtype, index))
        for dtype in ("float32", "float64")
        for index in ("int32", "int64")
    ],
    (gpu_checks.check_indices_outside, ()),
    (gpu_exchange_checks.check_nan_in_sparse, ()),
]

STEPS: dict[str, dict[str, Any]] = {
    **{
        f"momentum {momentum}": {"exchanges": ON_GPUS, "size": 300_007, "momentum": momentum}
        for momentum in (0.0, 0.9)
    },
    **{f"{size} elements": {"exchanges": ON_GPUS, "size": size} for size in (0, 1, 3, 701)},
    **{
        f"values {values}": {"exchanges": ON_GPUS[1:], "size": 30_011, "wire": WireFormat(values=values)}
        for values in VALUES
    },
}


@pytest.fixture(scope="module")
def cupy() -> Any:
    pytest.importorskip("cupy", reason="selection on a GPU needs CuPy")
    try:
        return load_cupy("gpu selection")
    except UsageError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("check", "arguments"), CHECKS)
def test_the_gpu_gives_the_processors_bits(
    cupy: Any, check: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    check(cupy, *arguments)


@pytest.mark.parametrize("name", STEPS)
def test_every_exchange_gives_the_bits_of_numpy_arrays(cupy: Any, name: str) -> None:
    gpu_exchange_checks.check_sparse(cupy, steps_of_each(**STEPS[name]))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_changing_exchanges_give_the_bits_of_numpy_arrays(cupy: Any, dtype: str) -> None:
    gpu_exchange_checks.check_sparse(cupy, mixed_steps(dtype))


def test_arrays_of_more_than_2_to_the_31_elements_have_wide_indices(cupy: Any) -> None:
    if cupy.cuda.runtime.memGetInfo()[0] < gpu_checks.FREE_FOR_WIDE_INDICES:
        pytest.skip("the GPU has less than 12 GiB of free memory")
    gpu_checks.check_wide_indices(cupy)
