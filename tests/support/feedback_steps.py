"""Steps of error feedback on a GPU, or on what stands in for one, beside those of `ErrorFeedback`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import ErrorFeedback
from collectives.sparse.gpu_entry_arrays import GpuErrorFeedback
from collectives.tables.kernels.source import GRADIENT_DTYPES
from tests.support.selection_data import drawn, same

Array = NDArray[Any]

CASES = [
    (dtype, given, momentum)
    for dtype in GRADIENT_DTYPES
    for given in GRADIENT_DTYPES[dtype]
    for momentum in (0.0, 0.9)
]
"""A residual's dtype, its gradients', and the momentum."""


def widened(gradient: Array, given: str, dtype: str) -> Array:
    if given == "bfloat16":
        gradient = (gradient.astype(np.uint32) << 16).view(np.float32)
    return gradient.astype(dtype)


def compare_steps(
    cupy: Any,
    case: tuple[str, str, float],
    size: int,
    several: Iterable[int],
    before_step: Callable[[int], None] = lambda step: None,
) -> None:
    """Feed both, and compare all that they give and keep; half-way the checkpoints change places."""
    dtype, given, momentum = case
    host, device = (made(size, dtype, momentum=momentum) for made in (ErrorFeedback, GpuErrorFeedback))
    for step, k in enumerate(several):
        before_step(step)
        gradient = drawn("normal", given, size, np.random.default_rng(step))
        expected = host.feed(widened(gradient, given, dtype), k)
        found = device.feed(cupy.asarray(gradient), k)
        assert same((found[0].get(), found[1].get()), expected), (step, k)
        equal_states(host, device)
        if step == 2:
            saved = host.state(), device.state()
            host, device = (
                made(size, dtype, momentum=momentum) for made in (ErrorFeedback, GpuErrorFeedback)
            )
            host.restore(saved[1])
            device.restore(saved[0])


def equal_states(host: ErrorFeedback, device: GpuErrorFeedback) -> None:
    expected, found = host.state(), device.state()
    assert expected.keys() == found.keys()
    assert (expected["step"], expected["momentum"]) == (found["step"], found["momentum"])
    for name in ("residual", "velocity"):
        assert type(found[name]) is type(expected[name])
        if expected[name] is not None:
            assert found[name].dtype == expected[name].dtype, name
            assert found[name].tobytes() == expected[name].tobytes(), name
