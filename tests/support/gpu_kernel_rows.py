"""Rows of `gpu_report` about kernels and one process: bits, bandwidths, torch.topk, all ranks on one GPU."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from collectives.sparse.codec import WireFormat
from collectives.sparse.selection.gpu_topk import FeedbackAddend, SelectionPasses, topk_gpu
from collectives.tables.cupy_arrays import load_cupy
from collectives.tables.kernels.kernel_launch import Kernels
from collectives.tables.kernels.source import BYTES
from tests.bench import gpu as bench
from tests.bench.gpu_selection import rival_seconds
from tests.gpu_report import CannotRun, Missed
from tests.support import gpu_checks as checks
from tests.support import gpu_exchange_checks as exchanges
from tests.support import kernel_data
from tests.support.feedback_steps import CASES, compare_steps
from tests.support.hand_plans import SHAPES
from tests.support.kernel_data import bits_type
from tests.support.selection_data import DATA, DTYPES
from tests.support.sparse_steps import ON_GPUS, mixed_steps, steps_of_each
from topoplan.plans.plan import COLLECTIVES

JOIN_GOAL, SELECT_GOAL = 0.8, 0.6  # shares of the memory's bandwidth

MEMORY_CLOCK, BUS_WIDTH = 36, 37
"""CUDA's numbers of these attributes, which CuPy has no names for; in kHz and bits."""

RIVAL_SECONDS = 25.0  # after which no larger array is given to torch.topk
FREE_FOR_EACH = 8  # times its own size an element of a selection needs free memory, with torch's copies


def cupy_here() -> Any:
    return load_cupy("loopback-gpu")


def memory_peak(cupy: Any) -> float:
    """GB/s of the memory by its clock and its width; 0 where the driver does not tell."""
    clock, bits = (cupy.cuda.runtime.deviceGetAttribute(number, 0) for number in (MEMORY_CLOCK, BUS_WIDTH))
    return 2 * clock * 1e3 * bits / 8 / 1e9


# ---- every kernel bit for bit


def joins() -> str:
    cupy, names = cupy_here(), checks.kernel_cases()
    for dtype, op in kernel_data.EVERY_CASE:
        checks.check_joins(cupy, dtype, op)
    left = (
        ""
        if kernel_data.numpy_fuses()
        else "; not complex products, which numpy rounds otherwise on this processor"
    )
    return f"{sum(name.startswith('join') for name in names)} kernels, 7 forms each{left}"


def averages_and_copies() -> str:
    cupy = cupy_here()
    for dtype in checks.averaged_dtypes():
        checks.check_averages(cupy, dtype)
    for itemsize in BYTES:
        checks.check_copies(cupy, itemsize)
    return f"{len(checks.averaged_dtypes())} averages by 2, 3, 7 and 200; {len(BYTES)} copies"


def selection() -> str:
    cupy = cupy_here()
    for dtype in DTYPES:
        for kind in sorted(DATA):
            checks.check_topk(cupy, kind, dtype, ((1, (0, 1)), (70001, (0, 1, 700, 20000, 70001))))
        checks.check_topk(cupy, "normal", dtype)
    for dtype in ("float32", "float64"):
        checks.check_feed(cupy, dtype)
    checks.check_nan_in_topk(cupy)
    checks.check_topk_on_the_current_stream(cupy)
    return f"{len(DATA)} kinds of data, {len(DTYPES)} dtypes, up to 5,000,001 elements; with a residual, NaN, a stream"


def repeated_selection() -> str:
    cupy = cupy_here()
    for dtype in DTYPES:
        checks.check_repeated_topk(cupy, dtype)
    wide = cupy.cuda.runtime.memGetInfo()[0] >= checks.FREE_FOR_WIDE_INDICES
    if wide:
        checks.check_wide_indices(cupy)
    return f"21 times the same bits; 2^31 + 5 elements: {'right' if wide else 'no 12 GiB of free memory'}"


def feedback() -> str:
    cupy = cupy_here()
    for case in CASES:
        compare_steps(cupy, case, 70001, (700, 0, 20000, 70001, 700))
    for case in (("float32", "float32", 0.0), ("float32", "bfloat16", 0.9), ("float64", "float64", 0.9)):
        compare_steps(cupy, case, 4300003, (43000, 4300, 43000, 2000000))
    for momentum in (0.0, 0.5):
        checks.check_nan_in_feedback(cupy, momentum)
    for dtype in ("float32", "float64"):
        for index in ("int32", "int64"):
            checks.check_messages(cupy, dtype, index)
    checks.check_indices_outside(cupy)
    return f"{len(CASES)} kinds of steps, NaN taken back, messages of entries"


# ---- bandwidths


def shares(cupy: Any, goal: float, found: Mapping[str, float]) -> dict[str, Any]:
    """Bandwidths in GB/s beside the memory's; raises where one is below the goal."""
    peak = memory_peak(cupy)
    if not peak:
        figures = ", ".join(f"{name} {rate:.0f} GB/s" for name, rate in found.items())
        raise CannotRun(f"the driver does not tell the memory's clock and width; {figures}")
    copied = bench.copy_bandwidth(cupy)
    lines = [f"{name}: {rate:.0f} GB/s, {rate / peak:.0%} of {peak:.0f}" for name, rate in found.items()]
    text = "\n".join([f"goal {goal:.0%}; a copy by CUDA takes {copied:.0f} GB/s", *lines])
    if min(found.values()) < goal * peak:
        raise Missed(text)
    return {"text": text, "peak": peak, "copied": copied, **found}


def join_bandwidth() -> dict[str, Any]:
    cupy = cupy_here()
    cases = [
        ("float32", "sum", 1),
        ("float32", "sum", 3),
        ("float16", "sum", 1),
        ("bfloat16", "sum", 3),
        ("float64", "max", 1),
        ("float64", None, 0),
    ]
    found = {
        f"{op or 'copy'} {dtype}, {siblings} arriving": bench.join_bandwidth(cupy, dtype, op, siblings)
        for dtype, op, siblings in cases
    }
    return shares(cupy, JOIN_GOAL, found)


def average_bandwidth() -> dict[str, Any]:
    cupy = cupy_here()
    kernels, found = Kernels(cupy), {}
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        line = cupy.zeros(bench.BYTES, dtype="uint8").view(bits_type(dtype))
        seconds = bench.gpu_seconds(cupy, partial(kernels.divide, line, dtype, 7))
        found[dtype] = 2 * line.nbytes / seconds / 1e9
    return shares(cupy, JOIN_GOAL, found)


def select_bandwidth() -> dict[str, Any]:
    """Two reads of everything, whatever a sample would spare."""
    cupy, found = cupy_here(), {}
    for dtype, share in (("float32", 0.001), ("float32", 0.01), ("float16", 0.01), ("bfloat16", 0.01)):
        x = normal(cupy, dtype, bench.BYTES // bits_type(dtype).itemsize)
        k = int(share * x.size)

        def twice(x: Any = x, dtype: str = dtype, k: int = k) -> None:
            assert SelectionPasses(cupy, x, dtype, k, refuses=True, clears=False).two_reads(), (
                "the list had no room"
            )

        found[f"{dtype}, {share:.1%}"] = 2 * x.nbytes / bench.gpu_seconds(cupy, twice) / 1e9
    return shares(cupy, SELECT_GOAL, found)


def feedback_bandwidth() -> dict[str, Any]:
    """A gradient is added and the largest are taken: two reads and a write of the residual, a read of the gradient."""
    cupy, found = cupy_here(), {}
    x, gradient = (normal(cupy, "float32", bench.BYTES // 4, seed) for seed in (1, 2))
    for share in (0.001, 0.01):

        def twice(k: int = int(share * x.size)) -> None:
            added = FeedbackAddend(gradient, "float32", None, None)
            SelectionPasses(cupy, x, "float32", k, refuses=True, clears=True).two_reads(added)

        found[f"float32, {share:.1%}"] = 4 * x.nbytes / bench.gpu_seconds(cupy, twice) / 1e9
    return shares(cupy, SELECT_GOAL, found)


def normal(cupy: Any, dtype: str, count: int, seed: int = 1) -> Any:
    values = np.random.default_rng(seed).standard_normal(count, dtype=np.float32)
    if dtype == "bfloat16":
        return cupy.asarray((values.view(np.uint32) >> 16).astype(np.uint16))
    return cupy.asarray(values.astype(dtype))


def topk_against_torch(dtype: str) -> dict[str, Any]:
    """Magnitudes of what is chosen, and times; sizes as far as memory and time allow."""
    cupy, torch = cupy_here(), import_module("torch")
    each = FREE_FOR_EACH * torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    end, lines, ratios = time.monotonic() + RIVAL_SECONDS, [], {}
    for power in (20, 22, 24, 26, 28, 30):
        free = cupy.cuda.runtime.memGetInfo()[0]
        if each << power > free or time.monotonic() > end:
            lines.append(
                f"2^{power}: left out, {'no time' if time.monotonic() > end else 'no memory'} for it"
            )
            continue
        generator = torch.Generator(device="cuda").manual_seed(power)
        tensor = torch.randn(1 << power, device="cuda", dtype=getattr(torch, dtype), generator=generator)
        bits = tensor.view(torch.int16) if dtype == "bfloat16" else tensor
        torch.cuda.synchronize()
        x = cupy.from_dlpack(bits)
        x = x.view(np.uint16) if dtype == "bfloat16" else x
        for share in (0.001, 0.01, 0.1):
            k = int(share * x.size)
            where = f"2^{power}, {share:.1%}"
            try:
                wanted = torch.topk(tensor.abs(), k).values
                torch.cuda.synchronize()
            except Exception as error:
                lines.append(f"{where}: torch.topk failed: {type(error).__name__}: {str(error)[:80]}")
                continue
            values = topk_gpu(x, k)[1]
            given = torch.from_dlpack(values.view(np.int16) if dtype == "bfloat16" else values)
            chosen = given.view(torch.bfloat16) if dtype == "bfloat16" else given
            assert torch.equal(chosen.abs().sort(descending=True).values, wanted), f"{where}: other values"
            del wanted, given, chosen, values
            own = bench.gpu_seconds(cupy, lambda x=x, k=k: topk_gpu(x, k), 5)
            theirs = rival_seconds(cupy, lambda tensor=tensor, k=k: _topk_on(cupy, torch, tensor, k), 5)
            how = theirs if isinstance(theirs, str) else f"torch.topk takes {theirs / own:.1f} times that"
            lines.append(f"{where}: the same values in {own * 1e3:.3f} ms, {how}")
            if not isinstance(theirs, str):
                ratios[where] = theirs / own
        del tensor, bits, x
        cupy.get_default_memory_pool().free_all_blocks()
        torch.cuda.empty_cache()
    return {"text": "\n".join(lines), "ratios": ratios}


def _topk_on(cupy: Any, torch: Any, tensor: Any, k: int) -> None:
    with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
        torch.topk(tensor.abs(), k, sorted=False)


# ---- all ranks on one GPU


def loopback(graphs: bool) -> str:
    cupy = cupy_here()
    for shape in sorted(SHAPES):
        for collective in COLLECTIVES:
            exchanges.check_loopback(cupy, shape, collective, graphs=graphs, counts=(0, 1, 7, 300_007))
    return f"{len(SHAPES)} shapes of trees, {len(COLLECTIVES)} collectives, 8 ranks, the bits of loopback"


def shrunk() -> str:
    exchanges.check_shrink(cupy_here())
    return "4 ranks, 3, 2 and 1, the bits of loopback"


def operations() -> str:
    cupy = cupy_here()
    for dtype, op in exchanges.OPERATIONS:
        exchanges.check_operation(cupy, dtype, op)
    return f"{len(exchanges.OPERATIONS)} dtypes and operations, the bits of loopback"


def bfloat16() -> str:
    cupy, ml_dtypes = cupy_here(), import_module("ml_dtypes")
    if int(cupy.__version__.split(".")[0]) < 14:
        raise CannotRun(f"CuPy {cupy.__version__} has no bfloat16; 14 and newer have")
    for op in ("sum", "avg", "prod", "min", "max"):
        exchanges.check_bfloat16(cupy, ml_dtypes.bfloat16, op)
    return "sum, avg, prod, min, max, rounded after every join"


def background() -> str:
    cupy = cupy_here()
    exchanges.check_background(cupy)
    exchanges.check_out_of_other_streams(cupy)
    return "async_op, other streams, arrays freed meanwhile"


def sparse() -> str:
    cupy = cupy_here()
    for momentum in (0.0, 0.9):
        exchanges.check_sparse(cupy, steps_of_each(ON_GPUS, size=300_007, momentum=momentum))
    for size in (0, 1, 3, 701):
        exchanges.check_sparse(cupy, steps_of_each(ON_GPUS, size=size))
    exchanges.check_sparse(cupy, steps_of_each(ON_GPUS[1:], size=30_011, wire=WireFormat(values="float16")))
    for dtype in ("float16", "float64"):
        exchanges.check_sparse(cupy, mixed_steps(dtype))
    exchanges.check_nan_in_sparse(cupy)
    return f"{len(ON_GPUS)} exchanges, momentum, wire formats, NaN: the bits of numpy arrays"
