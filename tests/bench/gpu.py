"""What the GPU does: fused joins and the loopback against the copy engine's best, and NCCL's ways of running a plan.

The share of copy bandwidth counts all bytes that are read and written, as the copy's own figure does.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np

import topoplan
from collectives import Communicator, lower
from collectives.backends.backend import RankArrays
from collectives.backends.loopback.gpu_loopback import LoopbackGpu, program_of
from collectives.backends.nccl.nccl_library import describe_library, find_library
from collectives.tables.cupy_arrays import load_cupy
from collectives.tables.kernels.kernel_launch import Chunks, Kernels, work_of
from tests.bench.timing import medians
from tests.gpu_report import last_line
from tests.jobs.nccl_rank import start
from tests.support.ports import free_port
from topoplan.errors import UsageError

RUNS = 20
CHUNK = 1 << 20
BYTES = 1 << 28  # of one buffer: far more than a cache holds


def main() -> None:
    try:
        cupy: Any = load_cupy("loopback-gpu")
    except UsageError as error:
        print(f"gpu: skipped: {error}")
        return
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    copied = copy_bandwidth(cupy)
    print(f"{name}: device copy {copied:.0f} GB/s (read and written)")
    for dtype, op in [
        ("float32", "sum"),
        ("float16", "sum"),
        ("bfloat16", "sum"),
        ("int8", "max"),
        ("float64", None),
    ]:
        for siblings in (1, 3, 7) if op else (0,):
            found = join_bandwidth(cupy, dtype, op, siblings)
            print(
                f"  {op or 'copy':4} {dtype:9} {siblings} arriving  {found:6.0f} GB/s  {found / copied:5.0%} of copy"
            )
    for megabytes in (1, 16, 64, 256):
        for step_bytes in (8 << 20, 32 << 20, 1 << 40):
            found = loopback_bandwidth(cupy, megabytes, step_bytes)
            step = "all chunks" if step_bytes >> 40 else f"{step_bytes >> 20:4} MB a step"
            print(
                f"  loopback-gpu dgx-1v {megabytes:4} MB, {step}: {found:6.0f} GB/s  {found / copied:5.0%} of copy"
            )
    nccl(cupy)


def copy_bandwidth(cupy: Any) -> float:
    """GB/s of a copy inside the GPU's memory."""
    source, target = (cupy.zeros(BYTES, dtype=np.uint8) for _ in range(2))
    runtime = cupy.cuda.runtime

    def copy() -> None:
        stream = cupy.cuda.get_current_stream().ptr
        runtime.memcpyAsync(target.data.ptr, source.data.ptr, BYTES, runtime.memcpyDeviceToDevice, stream)

    return 2 * BYTES / gpu_seconds(cupy, copy) / 1e9


def join_bandwidth(cupy: Any, dtype: str, op: str | None, siblings: int) -> float:
    """GB/s of one launch that joins many chunks with some arrivals each."""
    itemsize = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    chunks = BYTES // CHUNK
    rows = np.arange(chunks * max(siblings, 1))
    chunk = rows // max(siblings, 1)
    zero = np.zeros_like(rows)
    buffer = np.where(siblings, 2 + rows % max(siblings, 1), 1)
    work = work_of(
        Chunks(
            zero,
            zero,
            chunk * CHUNK,
            np.full_like(rows, CHUNK // itemsize),
            np.full(len(rows), bool(siblings)),
            (zero, chunk * CHUNK),
            (zero + 1, chunk * CHUNK),
            (buffer, chunk * CHUNK),
        ),
        itemsize,
    )
    kernels = Kernels(cupy)
    buffers = [cupy.zeros(BYTES, dtype=np.uint8) for _ in range(2 + siblings)]
    done = kernels.upload(work, len(buffers))
    addresses = np.array([one.data.ptr for one in buffers], dtype=np.int64)
    done.bases.set(addresses)  # which is read when the GPU comes to it
    kernel = kernels.compiled(op, dtype, itemsize)
    seconds = gpu_seconds(cupy, lambda: kernels.launch(kernel, done, 0))
    return work.traffic(itemsize) / seconds / 1e9


def loopback_bandwidth(cupy: ModuleType, megabytes: int, step_bytes: int) -> float:
    """GB/s of an allreduce of 8 ranks on one GPU, by the bytes that its work reads and writes."""
    plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce")
    count, at_once = megabytes << 18, CHUNK // 4
    memory = [RankArrays(rank, (0, count), None, (0, count), None) for rank in range(8)]
    work, _ = program_of(lower(plan, count, chunk_elements=at_once), memory, 4, step_bytes=step_bytes)
    any_cupy: Any = cupy
    given = [any_cupy.full(count, rank, dtype=np.float32) for rank in range(8)]
    out = [any_cupy.empty_like(array) for array in given]
    with Communicator(plan, LoopbackGpu(cupy, 8, step_bytes=step_bytes), chunk_bytes=CHUNK) as comm:
        return (
            work.traffic(4)
            / medians({"": lambda: comm.all_reduce(given, out=out)}, RUNS, warm_up=3)[""]
            / 1e9
        )


def nccl(cupy: Any) -> None:
    """An allreduce over NCCL with its settings, one rank on each GPU, or two on a single one."""
    try:
        library = find_library()
    except UsageError as error:
        print(f"  nccl: skipped: {error}")
        return
    print(f"  nccl: {describe_library(library)}")
    gpus = cupy.cuda.runtime.getDeviceCount()
    ranks = max(2, min(8, gpus))
    for graphs in (1, 0):
        ended, text = start(ranks, "time", port=free_port(), timeout=180, graphs=graphs)
        how = "as a graph" if graphs else "step by step"
        if not ended:
            print(f"  nccl, {ranks} ranks on {gpus} GPUs, {how}: failed: {last_line(text)}")
            continue
        for megabytes, seconds in timings(text):
            rate = megabytes * 2**20 / seconds / 1e9
            print(f"  nccl, {ranks} ranks on {gpus} GPUs, {how}: {megabytes:>4} MB {rate:7.2f} GB/s")


def timings(text: str) -> list[tuple[int, float]]:
    """Megabytes and seconds from the lines of two numbers, whatever else ranks and libraries print."""
    found = [re.fullmatch(r"(\d+) (\d[\d.e+-]*)", line.strip()) for line in text.splitlines()]
    return [(int(one[1]), float(one[2])) for one in found if one is not None]


def gpu_seconds(cupy: Any, call: Callable[[], object], runs: int = RUNS) -> float:
    """Median time of a call by the GPU's own clock."""
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        for _ in range(min(3, runs)):
            call()
        marks = [cupy.cuda.Event() for _ in range(runs + 1)]
        marks[0].record(stream)
        for mark in marks[1:]:
            call()
            mark.record(stream)
        stream.synchronize()
    times = [cupy.cuda.get_elapsed_time(one, other) / 1e3 for one, other in pairwise(marks)]
    return statistics.median(times)
