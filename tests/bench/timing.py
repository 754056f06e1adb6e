"""The timing loop of the benchmarks: contenders take turns, and the median of their runs counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping


def seconds_of(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def medians(
    contenders: Mapping[str, Callable[[], object]], runs: int, *, warm_up: int = 0
) -> dict[str, float]:
    """Return the median seconds of each contender; in every run each has its turn, and warm-up runs do not count."""
    seconds = [{name: seconds_of(call) for name, call in contenders.items()} for _ in range(warm_up + runs)]
    return {name: statistics.median(run[name] for run in seconds[warm_up:]) for name in contenders}
