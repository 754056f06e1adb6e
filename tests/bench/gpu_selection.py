"""Selection and error feedback on the GPU against the copy engine's best, `torch.topk` and passes of CuPy's.

The share of copy bandwidth counts the bytes that each road must move for a float32 element: 8 in two reads and 4 in
one, with a gradient that is added 16 and 12; 20 with momentum, 10 where the gradient is float16. A rival that
fails, for memory or whatever else, is told by its error. The last of them is given the bound that the others look for:
an abs pass and CuPy's compaction, which is cub's where CuPy is set to use it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from collectives.sparse.gpu_entry_arrays import GpuErrorFeedback, add_entries_gpu
from collectives.sparse.selection.gpu_topk import FeedbackAddend, SelectionPasses, topk_gpu
from collectives.tables.cupy_arrays import load_cupy
from tests.bench.gpu import RUNS, copy_bandwidth, gpu_seconds
from topoplan.errors import UsageError

SIZES = (26, 28, 30)  # logarithms of the numbers of elements

DENSITIES = (0.001, 0.01)

BYTES_FOR_EACH = 24  # of free memory that an element needs: two arrays, lists, and the rivals' copies


def main() -> None:
    try:
        cupy: Any = load_cupy("gpu selection")
    except UsageError as error:
        print(f"gpu_selection: skipped: {error}")
        return
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    copied = copy_bandwidth(cupy)
    print(f"{name}: device copy {copied:.0f} GB/s (read and written)")
    for size in SIZES:
        if BYTES_FOR_EACH << size > cupy.cuda.runtime.memGetInfo()[0]:
            print(f"  2^{size}: skipped: needs {BYTES_FOR_EACH << size >> 30} GiB of free memory")
            continue
        for density in DENSITIES:
            for figures in (measure, measure_feedback):
                figures(cupy, 1 << size, round(density * 2**size), copied)
                cupy.get_default_memory_pool().free_all_blocks()


def measure(cupy: Any, count: int, k: int, copied: float) -> None:
    """Print a line for k of so many normal values."""
    x, gradient = (cupy.random.RandomState(seed).standard_normal(count, dtype=np.float32) for seed in (1, 2))
    own = gpu_seconds(cupy, lambda: topk_gpu(x, k))
    twice = gpu_seconds(cupy, lambda: roads(cupy, x, k, clears=False).two_reads())
    figures = [f"topk {share(4 * count, own, copied)}, two reads {share(8 * count, twice, copied)}"]
    for rival, call in rivals(cupy, x, k):
        took = rival_seconds(cupy, call)
        figures.append(f"{rival} {took if isinstance(took, str) else f'{took / own:.1f}x its time'}")
    added = FeedbackAddend(gradient, "float32", None, None)
    plain = gpu_seconds(cupy, lambda: roads(cupy, x, k, clears=True).two_reads(added))
    figures.append(f"feed in two reads {share(16 * count, plain, copied)}")
    print(f"  {count} elements, k {k}: {'; '.join(figures)}")


def measure_feedback(cupy: Any, count: int, k: int, copied: float) -> None:
    """Print a line for steps of error feedback, and for adding as many entries elsewhere."""
    gradient = cupy.random.RandomState(2).standard_normal(count, dtype=np.float32)
    figures = []
    for name, given, momentum, nbytes in (
        ("float32", gradient, 0.0, 12),
        ("float16", gradient.astype(np.float16), 0.0, 10),
        ("float32 with momentum", gradient, 0.9, 20),
    ):
        feedback = GpuErrorFeedback(count, momentum=momentum)
        seconds = gpu_seconds(cupy, partial(feedback.feed, given, k))
        figures.append(f"{name} {share(nbytes * count, seconds, copied)}")
        if not momentum:
            entries = feedback.feed(given, k)
        del feedback
    added = gpu_seconds(cupy, lambda: add_entries_gpu(gradient, *entries))
    print(f"    error feedback: {'; '.join(figures)}; entries added in {added * 1e3:.3f} ms")


def roads(cupy: Any, x: Any, k: int, *, clears: bool) -> SelectionPasses:
    return SelectionPasses(cupy, x, "float32", k, refuses=True, clears=clears)


def share(nbytes: int, seconds: float, copied: float) -> str:
    """Milliseconds, and bandwidth as a share of the copy's."""
    return f"{seconds * 1e3:.3f} ms ({nbytes / seconds / 1e9 / copied:.0%} of copy)"


def rivals(cupy: Any, x: Any, k: int) -> list[tuple[str, Callable[[], object]]]:
    found: list[tuple[str, Callable[[], object]]] = [
        ("cupy abs and argpartition", lambda: cupy.argpartition(cupy.abs(x), x.size - k)[x.size - k :]),
        ("cupy abs and sort", lambda: cupy.sort(cupy.abs(x))[x.size - k :]),
    ]
    if find_spec("torch"):

        def topk() -> None:
            torch: Any = import_module("torch")
            with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
                torch.topk(torch.from_dlpack(x).abs(), k, sorted=False)

        found.append(("torch.topk", topk))
    least = cupy.abs(topk_gpu(x, k)[1]).min()

    def compacted() -> None:
        places = cupy.flatnonzero(cupy.abs(x) >= least)
        x[places]

    return [*found, ("cupy abs and compaction with the bound told", compacted)]


def rival_seconds(cupy: Any, call: Callable[[], object], runs: int = RUNS) -> float | str:
    """Median time, or how the rival failed: each library has errors of its own, and none of them is ours."""
    try:
        return gpu_seconds(cupy, call, runs)
    except Exception as error:
        if "OutOfMemory" in type(error).__name__:
            return "has no memory"
        words = " ".join(str(error).split())
        return f"failed: {type(error).__name__}: {words[:120]}"
