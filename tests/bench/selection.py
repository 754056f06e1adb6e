"""Selecting the largest entries, against torch, numpy, MSTopK in numpy and one read of the data; all on one thread.

A time is the median of a few runs, which take turns. ``topk`` finds the same entries as its rivals, exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

import collectives
from collectives.sparse.selection.error_feedback import ErrorFeedback
from tests.bench.timing import medians

SIZES = (16 << 20, 64 << 20)
DENSITIES = (0.001, 0.01)
RUNS = 5
SLOW_RUNS = 1  # runs of rivals that take seconds

Array = NDArray[Any]


def main() -> None:
    print("the k largest of d float32 entries by magnitude, one thread; times faster than")
    print(
        f"  {'entries':<10} {'d':>5} {'k/d':>6} {'topk':>9} {'reads':>6} {'torch':>7} {'argpart':>8} {'mstopk':>7} "
        f"{'of numpy':>9}   {'feedback':>9} {'of add':>7} {'torch':>7}"
    )
    for size in SIZES:
        for name, make in distributions().items():
            data = make(size)
            for density in DENSITIES:
                _line(name, data, int(size * density))


def distributions() -> dict[str, Callable[[int], Array]]:
    def normal(size: int) -> Array:
        return np.random.default_rng(1).standard_normal(size, dtype=np.float32)

    def laplace(size: int) -> Array:
        signs = np.sign(normal(size))
        return signs * np.random.default_rng(2).standard_exponential(size, dtype=np.float32)

    def heavy(size: int) -> Array:
        result: Array = np.sign(normal(size)) * np.exp(
            3 * np.random.default_rng(3).standard_normal(size, dtype=np.float32)
        )
        return result

    return {"normal": normal, "Laplace": laplace, "lognormal": heavy}


def _line(name: str, data: Array, k: int) -> None:
    gradient = np.roll(data, 1) * np.float32(0.1)
    feedback, residual = ErrorFeedback(data.size), data.copy()
    quick = medians(
        {
            "topk": lambda: collectives.topk(data, k),
            "read": lambda: np.add.reduce(data),
            "mstopk": lambda: collectives.mstopk(data, k),
            "feedback": lambda: feedback.feed(gradient, k),
            "add": lambda: np.add(residual, gradient, out=residual),
        },
        RUNS,
        warm_up=1,
    )
    slow: dict[str, Callable[[], object]] = {
        "argpartition": lambda: np.argpartition(np.abs(data), data.size - k)[data.size - k :],
        "numpy mstopk": lambda: _mstopk_in_numpy(data, k),
    }
    if find_spec("torch") is not None:
        slow |= _torch_rivals(data, gradient, k)
    slowly = medians(slow, SLOW_RUNS)
    topk = quick["topk"]

    def times(rival: str, ours: float) -> str:
        return f"{slowly[rival] / ours:.0f} x" if rival in slowly else "-"

    print(
        f"  {name:<10} {data.size >> 20:>4}M {k / data.size:>6.1%} {topk * 1e3:>6.1f} ms "
        f"{topk / quick['read']:>5.2f}x {times('torch', topk):>7} {times('argpartition', topk):>8} "
        f"{quick['mstopk'] * 1e3:>4.0f} ms {times('numpy mstopk', topk):>9}   {quick['feedback'] * 1e3:>6.1f} ms "
        f"{quick['feedback'] / quick['add']:>6.2f}x {times('torch feedback', quick['feedback']):>7}",
        flush=True,
    )


def _torch_rivals(data: Array, gradient: Array, k: int) -> dict[str, Callable[[], object]]:
    import torch

    torch.set_num_threads(1)
    tensor, step = torch.from_numpy(data), torch.from_numpy(gradient)
    residual = tensor.clone()

    def feedback() -> object:
        residual.add_(step)
        indices = torch.topk(residual.abs(), k).indices
        values = residual[indices]
        residual[indices] = 0
        return indices, values

    return {"torch": lambda: torch.topk(tensor.abs(), k), "torch feedback": feedback}


def _mstopk_in_numpy(data: Array, k: int, samples: int = 30) -> Array:
    """The published bisection in numpy's own operations."""
    magnitudes = np.abs(data)
    mean, largest = magnitudes.mean(), magnitudes.max()
    low, high, upper, lower = 0.0, 1.0, largest, np.float32(0)
    certain, possible = 0, data.size
    for _ in range(samples):
        ratio = (low + high) / 2
        threshold = mean + ratio * (largest - mean)
        count = int(np.count_nonzero(magnitudes >= threshold))
        if count <= k:
            high = ratio
            if count > certain:
                certain, upper = count, threshold
        else:
            low = ratio
            if count < possible:
                possible, lower = count, threshold
    sure = np.flatnonzero(magnitudes >= upper)[:k]
    band = np.flatnonzero((magnitudes < upper) & (magnitudes >= lower))
    return np.concatenate((sure, band[: k - len(sure)]))
