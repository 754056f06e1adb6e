"""The rows of `gpu_report`: what each needs, how long it may take, and what it runs.

Libraries are imported in the rows, so that the table can be made where they are missing.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tests.gpu_report import CannotRun, Facts, Missed, Need, Row, driver, program

JOIN_GOAL, SELECT_GOAL = 0.8, 0.6
"""Shares of the memory's bandwidth."""

MEMORY_CLOCK, BUS_WIDTH = 36, 37
"""CUDA's numbers of these attributes, which CuPy has no names for; in kHz and bits."""

ERROR_SECONDS = 10.0
"""In which every rank must have raised after another refused or died."""

CLOSE_SECONDS = 4.0

RIVAL_SECONDS = 60.0
"""After which no larger array is given to torch.topk."""

FREE_FOR_EACH = 24
"""Bytes of free memory that an element of a selection needs, with torch's copies."""


# ---- what rows need


def gpu(facts: Facts) -> str | None:
    return facts.trouble or None


def two_gpus(facts: Facts) -> str | None:
    return "one GPU only" if facts.gpus < 2 else None


def library(name: str, remedy: str) -> Need:
    def need(facts: Facts) -> str | None:
        return None if name in facts.libraries else f"{name} is not installed: {remedy}"

    return need


def tool(name: str) -> Need:
    def need(facts: Facts) -> str | None:
        return None if name in facts.tools else f"{name} is not on the PATH nor in CUDA_HOME"

    return need


def told(name: str, why: Callable[[Any], str | None]) -> Need:
    """A need of what the row ``device`` has found; where it has found nothing the row must try."""

    def need(facts: Facts) -> str | None:
        return why(facts.told[name]) if name in facts.told else None

    return need


CUPY = (gpu, library("cupy", 'pip install "topoplan[cuda12]" or "topoplan[cuda13]"'))
TORCH = (
    gpu,
    library("torch", "install the build for this CUDA"),
    told("torch_cuda", lambda found: None if found is True else f"torch shows no GPU: {found}"),
)
NCCL = (*CUPY, told("nccl", lambda found: None if isinstance(found, int) else str(found)))
SHARED_GPU = (
    *NCCL,
    told(
        "nccl",
        lambda found: (
            None if found >= 23003 else f"NCCL {found} puts one rank on a GPU; 2.30.3 and newer can do more"
        ),
    ),
)
PYTEST = library("pytest", "the torch checks are a test module")


def cupy_here() -> Any:
    """CuPy with a GPU."""
    from collectives.arrays.cupy_arrays import load_cupy

    return load_cupy("loopback-gpu")


# ---- device and versions


def device() -> dict[str, Any]:
    """What is here; NCCL comes before torch, since the first libnccl that is loaded is everyone's."""
    found: dict[str, Any] = {"python": platform.python_version(), "numpy": _version("numpy")}
    lines = []
    for part in (_hardware, _nccl, _torch):
        try:
            lines.append(part(found))
        except Exception as error:
            lines.append(f"{part.__name__[1:]}: {type(error).__name__}: {' '.join(str(error).split())}")
    lines.append(f"numpy {found['numpy']}, python {found['python']}")
    if "name" not in found:
        raise RuntimeError("; ".join(lines))
    return {"text": "\n".join(lines), **found}


def _hardware(found: dict[str, Any]) -> str:
    from collectives.kernels.compiler import nvrtc_of_cupy

    cupy = cupy_here()
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    name = properties["name"].decode()
    capability = f"{properties['major']}.{properties['minor']}"
    peak = memory_peak(cupy)
    nvrtc = ".".join(map(str, nvrtc_of_cupy().getVersion()))
    versions = [_cuda(number) for number in (runtime.driverGetVersion(), runtime.runtimeGetVersion())]
    found.update(
        name=name, gpus=runtime.getDeviceCount(), capability=capability, memory=properties["totalGlobalMem"],
        peak=peak, driver=versions[0], runtime=versions[1], cupy=cupy.__version__, nvrtc=nvrtc,
    )  # fmt: skip
    return (
        f"{found['gpus']} x {name}, compute capability {capability}, {found['memory'] / 2**30:.0f} GiB at "
        f"{peak:.0f} GB/s\ndriver for CUDA {versions[0]}, runtime {versions[1]}, CuPy {cupy.__version__}, NVRTC {nvrtc}"
    )


def _nccl(found: dict[str, Any]) -> str:
    from collectives.backends.nccl.library import described, find_library
    from topoplan.errors import UsageError

    try:
        library = find_library(cupy_here())
    except UsageError as error:
        found["nccl"] = str(error)
        return f"NCCL: {error}"
    found.update(
        nccl=library.version, nccl_path=library.path, nccl_by=library.name, nccl4py=_version("nccl4py")
    )
    return f"NCCL {described(library)}; nccl4py {found['nccl4py']}"


def _torch(found: dict[str, Any]) -> str:
    try:
        torch: Any = import_module("torch")
        found["torch_cuda"] = torch.cuda.is_available() or f"torch {torch.__version__} is built without it"
    except ImportError as error:
        found["torch_cuda"] = str(error)
        return f"torch: {error}"
    found.update(torch=torch.__version__, torch_runtime=torch.version.cuda)
    return f"torch {torch.__version__} with CUDA {torch.version.cuda}, {'a' if found['torch_cuda'] is True else 'no'} GPU"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cuda(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def memory_peak(cupy: Any) -> float:
    """GB/s of the memory by its clock and its width; 0 where the driver does not tell."""
    clock, bits = (cupy.cuda.runtime.deviceGetAttribute(number, 0) for number in (MEMORY_CLOCK, BUS_WIDTH))
    return 2 * clock * 1e3 * bits / 8 / 1e9


# ---- every kernel bit for bit


def joins() -> str:
    from gpu_checks import check_joins, kernel_cases
    from kernel_data import EVERY_CASE, numpy_fuses

    cupy, names = cupy_here(), kernel_cases()
    for dtype, op in EVERY_CASE:
        check_joins(cupy, dtype, op)
    left = "" if numpy_fuses() else "; not complex products, which numpy rounds otherwise on this processor"
    return f"{sum(name.startswith('join') for name in names)} kernels, 7 forms each{left}"


def averages_and_copies() -> str:
    from gpu_checks import averaged_dtypes, check_averages, check_copies

    from collectives.kernels.source import BYTES

    cupy = cupy_here()
    for dtype in averaged_dtypes():
        check_averages(cupy, dtype)
    for itemsize in BYTES:
        check_copies(cupy, itemsize)
    return f"{len(averaged_dtypes())} averages by 2, 3, 7 and 200; {len(BYTES)} copies"


def selection() -> str:
    from gpu_checks import check_feed, check_nan_in_topk, check_topk, check_topk_on_the_current_stream
    from selection_data import DATA, DTYPES

    cupy = cupy_here()
    for dtype in DTYPES:
        for kind in sorted(DATA):
            check_topk(cupy, kind, dtype, ((1, (0, 1)), (70001, (0, 1, 700, 20000, 70001))))
        check_topk(cupy, "normal", dtype)
    for dtype in ("float16", "float32", "float64"):
        check_feed(cupy, dtype)
    check_nan_in_topk(cupy)
    check_topk_on_the_current_stream(cupy)
    return f"{len(DATA)} kinds of data, {len(DTYPES)} dtypes, up to 5,000,001 elements; with a residual, NaN, a stream"


def repeated_selection() -> str:
    from gpu_checks import FREE_FOR_WIDE_INDICES, check_repeated_topk, check_wide_indices
    from selection_data import DTYPES

    cupy = cupy_here()
    for dtype in DTYPES:
        check_repeated_topk(cupy, dtype)
    wide = cupy.cuda.runtime.memGetInfo()[0] >= FREE_FOR_WIDE_INDICES
    if wide:
        check_wide_indices(cupy)
    return f"21 times the same bits; 2^31 + 5 elements: {'right' if wide else 'no 12 GiB of free memory'}"


def feedback() -> str:
    from feedback_steps import CASES, compare_steps
    from gpu_checks import check_indices_outside, check_messages, check_nan_in_feedback

    cupy = cupy_here()
    for case in CASES:
        compare_steps(cupy, case, 70001, (700, 0, 20000, 70001, 700))
    for case in (("float32", "float32", 0.0), ("float32", "bfloat16", 0.9), ("float64", "float64", 0.9)):
        compare_steps(cupy, case, 4300003, (43000, 4300, 43000, 2000000))
    for momentum in (0.0, 0.5):
        check_nan_in_feedback(cupy, momentum)
    for dtype in ("float32", "float64"):
        for index in ("int32", "int64"):
            check_messages(cupy, dtype, index)
    check_indices_outside(cupy)
    return f"{len(CASES)} kinds of steps, NaN taken back, messages of entries"


# ---- bandwidths


def shares(cupy: Any, goal: float, found: Mapping[str, float]) -> dict[str, Any]:
    """Bandwidths in GB/s beside the memory's; raises where one is below the goal."""
    peak = memory_peak(cupy)
    if not peak:
        figures = ", ".join(f"{name} {rate:.0f} GB/s" for name, rate in found.items())
        raise CannotRun(f"the driver does not tell the memory's clock and width; {figures}")
    lines = [f"{name}: {rate:.0f} GB/s, {rate / peak:.0%} of {peak:.0f}" for name, rate in found.items()]
    text = "\n".join([f"goal {goal:.0%}", *lines])
    if min(found.values()) < goal * peak:
        raise Missed(text)
    return {"text": text, "peak": peak, **found}


def join_bandwidth() -> dict[str, Any]:
    from tests.bench import gpu as bench

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
    from collectives.kernels import Kernels
    from tests.bench import gpu as bench

    cupy = cupy_here()
    kernels, found = Kernels(cupy), {}
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        line = cupy.zeros(bench.BYTES // 8, dtype=np_dtype(dtype))
        seconds = bench.gpu_seconds(cupy, partial(kernels.divide, line, dtype, 7))
        found[dtype] = 2 * line.nbytes / seconds / 1e9
    return shares(cupy, JOIN_GOAL, found)


def select_bandwidth() -> dict[str, Any]:
    """Two reads of everything, whatever a sample would spare."""
    from collectives.selection.gpu_passes import Passes
    from tests.bench import gpu as bench

    cupy, found = cupy_here(), {}
    for dtype, share in (("float32", 0.001), ("float32", 0.01), ("float16", 0.01), ("bfloat16", 0.01)):
        x = normal(cupy, dtype, 1 << 26)
        k = int(share * x.size)

        def twice(x: Any = x, dtype: str = dtype, k: int = k) -> None:
            assert Passes(cupy, x, dtype, k, refuses=True, clears=False).two_reads(), "the list had no room"

        found[f"{dtype}, {share:.1%}"] = 2 * x.nbytes / bench.gpu_seconds(cupy, twice) / 1e9
    return shares(cupy, SELECT_GOAL, found)


def feedback_bandwidth() -> dict[str, Any]:
    """A gradient is added and the largest are taken: two reads and a write of the residual, a read of the gradient."""
    from collectives.selection.gpu_addend import Addend
    from collectives.selection.gpu_passes import Passes
    from tests.bench import gpu as bench

    cupy, found = cupy_here(), {}
    x, gradient = (normal(cupy, "float32", 1 << 26, seed) for seed in (1, 2))
    for share in (0.001, 0.01):

        def twice(k: int = int(share * x.size)) -> None:
            Passes(cupy, x, "float32", k, refuses=True, clears=True).two_reads(Addend(gradient))

        found[f"float32, {share:.1%}"] = 4 * x.nbytes / bench.gpu_seconds(cupy, twice) / 1e9
    return shares(cupy, SELECT_GOAL, found)


def np_dtype(dtype: str) -> str:
    """bfloat16 is its bits."""
    return "uint16" if dtype == "bfloat16" else dtype


def normal(cupy: Any, dtype: str, count: int, seed: int = 1) -> Any:
    """Normal values on the GPU."""
    import numpy as np

    values = np.random.default_rng(seed).standard_normal(count, dtype=np.float32)
    if dtype == "bfloat16":
        return cupy.asarray((values.view(np.uint32) >> 16).astype(np.uint16))
    return cupy.asarray(values.astype(dtype))


def topk_against_torch(dtype: str) -> dict[str, Any]:
    """Magnitudes of what is chosen, and times; sizes as far as memory and time allow."""
    from collectives.selection.gpu import topk_gpu
    from tests.bench import gpu as bench
    from tests.bench.gpu_selection import rival_seconds

    cupy, torch = cupy_here(), import_module("torch")
    end, lines, ratios = time.monotonic() + RIVAL_SECONDS, [], {}
    for power in (20, 22, 24, 26, 28, 30):
        free = cupy.cuda.runtime.memGetInfo()[0]
        if FREE_FOR_EACH << power > free or time.monotonic() > end:
            lines.append(
                f"2^{power}: left out, {'no time' if time.monotonic() > end else 'no memory'} for it"
            )
            continue
        generator = torch.Generator(device="cuda").manual_seed(power)
        tensor = torch.randn(1 << power, device="cuda", dtype=getattr(torch, dtype), generator=generator)
        bits = tensor.view(torch.int16) if dtype == "bfloat16" else tensor
        torch.cuda.synchronize()
        x = cupy.from_dlpack(bits)
        x = x.view("uint16") if dtype == "bfloat16" else x
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
            given = torch.from_dlpack(values.view("int16") if dtype == "bfloat16" else values)
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
    from gpu_exchange_checks import check_loopback
    from hand_plans import SHAPES

    from topoplan.plans.plan import COLLECTIVES

    cupy = cupy_here()
    for shape in sorted(SHAPES):
        for collective in COLLECTIVES:
            check_loopback(cupy, shape, collective, graphs=graphs, counts=(0, 1, 7, 300_007))
    return f"{len(SHAPES)} shapes of trees, {len(COLLECTIVES)} collectives, 8 ranks, the bits of loopback"


def operations() -> str:
    from gpu_exchange_checks import OPERATIONS, check_operation

    cupy = cupy_here()
    for dtype, op in OPERATIONS:
        check_operation(cupy, dtype, op)
    return f"{len(OPERATIONS)} dtypes and operations, the bits of loopback"


def bfloat16() -> str:
    from gpu_exchange_checks import check_bfloat16

    cupy, ml_dtypes = cupy_here(), import_module("ml_dtypes")
    if int(cupy.__version__.split(".")[0]) < 14:
        raise CannotRun(f"CuPy {cupy.__version__} has no bfloat16; 14 and newer have")
    for op in ("sum", "avg", "prod", "min", "max"):
        check_bfloat16(cupy, ml_dtypes.bfloat16, op)
    return "sum, avg, prod, min, max, rounded after every join"


def background() -> str:
    from gpu_exchange_checks import check_background, check_out_of_other_streams

    cupy = cupy_here()
    check_background(cupy)
    check_out_of_other_streams(cupy)
    return "async_op, other streams, arrays freed meanwhile"


def sparse() -> str:
    from gpu_exchange_checks import check_nan_in_sparse, check_sparse
    from sparse_steps import EXCHANGES, mixed_steps, steps_of_each

    from collectives.wire import WireFormat

    cupy = cupy_here()
    for momentum in (0.0, 0.9):
        check_sparse(cupy, steps_of_each(size=300_007, momentum=momentum))
    for size in (0, 1, 3, 701):
        check_sparse(cupy, steps_of_each(size=size))
    check_sparse(cupy, steps_of_each(EXCHANGES[1:], size=30_011, wire=WireFormat(values="float16")))
    for dtype in ("float16", "float64"):
        check_sparse(cupy, mixed_steps(dtype))
    check_nan_in_sparse(cupy)
    return f"{len(EXCHANGES)} exchanges, momentum, wire formats, NaN: the bits of numpy arrays"


# ---- NCCL


def messages_to_itself() -> str:
    from gpu_exchange_checks import alone, check_messages_to_itself, to_itself

    from collectives.backends.nccl.library import find_library
    from tests.bench import gpu as bench

    cupy = cupy_here()
    nccl = find_library(cupy)
    check_messages_to_itself(cupy, nccl)
    rates = []
    with alone(cupy, nccl) as link:
        for shift in (0, 4):
            room = [cupy.zeros((64 << 20) + shift, dtype="uint8")[shift:] for _ in range(2)]
            lines = (room[0], room[1])

            def send(lines: tuple[Any, Any] = lines) -> None:
                to_itself(nccl, link, lines, cupy.cuda.get_current_stream())

            rates.append(lines[0].nbytes / bench.gpu_seconds(cupy, send, 5) / 1e9)
    return (
        f"right at any alignment, by steps and as a graph; 64 MB at {rates[0]:.0f} GB/s, "
        f"behind 4 bytes at {rates[1]:.0f} GB/s"
    )


def abort_beside_a_graph() -> str:
    from gpu_exchange_checks import check_abort_beside_a_graph

    from collectives.backends.nccl.library import find_library

    cupy = cupy_here()
    seconds = check_abort_beside_a_graph(cupy, find_library(cupy))
    return f"ended {seconds:.3f} s after the graph was dropped"


def close_behind_a_graph() -> str:
    from gpu_exchange_checks import check_close_behind_a_graph

    from collectives.backends.nccl.library import find_library

    cupy = cupy_here()
    return f"{check_close_behind_a_graph(cupy, find_library(cupy)):.3f} s"


def said(text: str, task: str) -> dict[int, str]:
    """What each rank has printed of a task.

    Examples
    --------
    >>> said("rank 0: check: ok\\nrank 1: check: ok\\nrank 0: close: 0.012 s\\n", "check")
    {0: 'ok', 1: 'ok'}
    """
    return {
        int(rank): words for rank, words in re.findall(rf"^rank (\d+): {task}: (.*)$", text, re.MULTILINE)
    }


def seconds_of(text: str, task: str, ranks: Sequence[int], limit: float) -> float:
    """The longest time that ranks have printed for a task; raises where one is missing or above the limit.

    Examples
    --------
    >>> seconds_of("rank 0: refuse: raised after 0.25 s: no\\nrank 0: close: 0.012 s\\n", "refuse", [0], 10.0)
    0.25
    """
    lines = said(text, task)
    missing = [rank for rank in ranks if rank not in lines]
    assert not missing, f"ranks {missing} have not got through {task}: {_end(text)}"
    found = [re.search(r"([\d.]+) s\b", lines[rank]) for rank in ranks]
    longest = max(float(one[1]) for one in found if one is not None)
    assert longest <= limit, f"{task} takes {longest:.1f} s, and may take {limit:g}"
    return longest


def ranks(count: int, tasks: str, *, shared: bool, timeout: float, **settings: object) -> str:
    """What some ranks print that do tasks; on one GPU, or with a GPU each."""
    from tests.bench.gpu import free_port
    from tests.nccl_rank import refused_by_nccl, start

    place: dict[str, object] = {"ranks_per_gpu": count, **_first_gpu()} if shared else {}
    ended, text = start(count, tasks, port=free_port(), timeout=timeout, **place, **settings)
    refused = refused_by_nccl(text) if shared and not ended else None
    if refused:
        raise CannotRun(f"NCCL does not run {count} ranks on this GPU: {refused}")
    print(text)
    assert ended or "die" in tasks, _end(text)
    return text


def collectives_of(
    count: int,
    tasks: str = "check,allreduce,graph,close",
    *,
    shared: bool = True,
    timeout: float = 90.0,
    **settings: Any,
) -> str:
    """Ranks that do tasks and end well."""
    count = count or min(8, driver()[1])
    text = ranks(count, tasks, shared=shared, timeout=timeout, **settings)
    closed = seconds_of(text, "close", range(count), CLOSE_SECONDS)
    done = [f"{task} on {len(said(text, task))} ranks" for task in tasks.split(",") if task != "close"]
    compared = said(text, "allreduce").get(0)
    first = f"{compared}\n" if compared else ""
    return f"{first}{', '.join(done)}; closed in {closed:.3f} s"


def failure_of(count: int, task: str, *, shared: bool, timeout: float = 90.0) -> dict[str, Any]:
    """How soon every rank that is left has raised, after a graph was captured and replayed."""
    count = count or min(8, driver()[1])
    text = ranks(count, f"{task},close", shared=shared, timeout=timeout)
    left = range(count - 1) if task == "die" else range(count)
    raised = seconds_of(text, task, left, ERROR_SECONDS)
    closed = seconds_of(text, "close", left, CLOSE_SECONDS)
    if task == "die":
        unnamed = [rank for rank in left if f"rank {count - 1} is gone" not in said(text, task)[rank]]
        assert not unnamed, f"ranks {unnamed} do not name rank {count - 1}: {said(text, task)}"
    return {
        "text": f"every rank left raised within {raised:.3f} s and closed within {closed:.3f} s",
        "raised": raised,
        "closed": closed,
    }


def _first_gpu() -> dict[str, object]:
    """What makes ranks see one GPU where there are more."""
    if driver()[1] < 2:
        return {}
    return {"cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}


def _end(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-3:]) or "nothing was printed"


# ---- torch


def torch_checks(*patterns: str) -> str:
    """Checks of ``test_torch_gpu`` whose names match; each raises where something is wrong."""
    checks: Mapping[str, Callable[[], None]] = import_module("test_torch_gpu").CHECKS
    names = [name for name in checks if any(fnmatchcase(name, pattern) for pattern in patterns)]
    assert names, f"there is no check {patterns}; there are {', '.join(checks)}"
    for name in names:
        checks[name]()
    return "; ".join(names)


def lars_lamb(device: str = "cuda") -> str:
    """Steps of LARS and LAMB on a device are those on the processor, to rounding."""
    torch = import_module("torch")
    optimizers = import_module("collectives.torch.optimizers")
    shapes, steps = ((300, 70), (70,), (7, 3, 5, 5), (1,)), 6
    for kind in (optimizers.Lars, optimizers.Lamb):
        for dtype, near in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
            ends = []
            for place in ("cpu", device):
                generator = torch.Generator().manual_seed(3)
                parameters = [
                    torch.nn.Parameter(torch.randn(shape, generator=generator).to(place, dtype))
                    for shape in shapes
                ]
                groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "adapt": False}]
                optimizer = kind(groups, lr=0.01, weight_decay=1e-3)
                for _ in range(steps):
                    for parameter, shape in zip(parameters, shapes, strict=True):
                        parameter.grad = torch.randn(shape, generator=generator).to(place, dtype)
                    optimizer.step()
                ends.append([parameter.detach().cpu().double() for parameter in parameters])
            for one, other in zip(*ends, strict=True):
                worst = float((one - other).abs().max())
                assert worst <= near * float(one.abs().max()), (
                    f"{kind.__name__} of {dtype} is {worst:.3g} off"
                )
    return f"{steps} steps of both with float64, float32 and bfloat16 parameters as on the processor"


# ---- compute-sanitizer


def small_subset() -> str:
    """What the sanitizer looks at, in memory that CUDA hands out piece by piece, so that no pool hides an overrun."""
    from feedback_steps import compare_steps
    from gpu_checks import check_averages, check_copies, check_joins, check_topk
    from gpu_exchange_checks import check_operation

    cupy = cupy_here()
    cupy.cuda.set_allocator(None)
    check_joins(cupy, "float32", "sum")
    check_joins(cupy, "bfloat16", "max")
    check_averages(cupy, "float16", (3001,))
    check_copies(cupy, 16)
    for kind in ("normal", "few values"):
        check_topk(cupy, kind, "float32", ((70001, (700, 20000)), (600_011, (600,))))
    compare_steps(cupy, ("float32", "float16", 0.9), 70001, (700, 20000))
    check_operation(cupy, "float32", "sum")
    return "joins, averages, copies, topk, error feedback, a collective"


def sanitized(check: str, seconds: float) -> str:
    """`small_subset` under one of the sanitizer's tools."""
    found = program("compute-sanitizer")
    assert found is not None, "it was there a moment ago"
    command = [found, "--tool", check, "--error-exitcode", "9", sys.executable, "-m", "tests.gpu_report"]
    done = subprocess.run(
        [*command, "--row", SUBSET], capture_output=True, text=True, timeout=seconds, check=False
    )
    print(done.stdout[-20000:], done.stderr[-5000:])
    assert done.returncode == 0, f"exit status {done.returncode}: {_end(done.stdout)}"
    assert '"verdict": "ok"' in done.stdout, _end(done.stdout)
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", done.stdout)
    return summary[-1] if summary else "no errors"


SUBSET = "small subset"
ON_ONE = "on one GPU"

ROWS: tuple[Row, ...] = (
    Row("device", device, 60, (gpu,)),
    Row("kernels: joins", joins, 90, CUPY),
    Row("kernels: averages, copies", averages_and_copies, 60, CUPY),
    Row("kernels: selection", selection, 90, CUPY),
    Row("kernels: selection, repeated", repeated_selection, 60, CUPY),
    Row("kernels: error feedback", feedback, 90, CUPY),
    Row("bandwidth: joins", join_bandwidth, 60, CUPY),
    Row("bandwidth: averages", average_bandwidth, 60, CUPY),
    Row("bandwidth: select", select_bandwidth, 60, CUPY),
    Row("bandwidth: feedback", feedback_bandwidth, 60, CUPY),
    Row("loopback-gpu: graphs", partial(loopback, True), 60, CUPY),
    Row("loopback-gpu: steps", partial(loopback, False), 60, CUPY),
    Row("loopback-gpu: operations", operations, 60, CUPY),
    Row("loopback-gpu: bfloat16", bfloat16, 60, (*CUPY, library("ml_dtypes", "pip install ml-dtypes"))),
    Row("loopback-gpu: streams", background, 60, CUPY),
    Row("loopback-gpu: sparse", sparse, 60, CUPY),
    Row("nccl alone: messages", messages_to_itself, 60, NCCL),
    Row("nccl alone: abort", abort_beside_a_graph, 40, NCCL),
    Row("nccl alone: close", close_behind_a_graph, 40, NCCL),
    Row(
        "nccl alone: back end",
        partial(collectives_of, 1, "check,graph,close", shared=False, timeout=50),
        60,
        NCCL,
    ),
    Row(f"nccl 2 {ON_ONE}: graphs", partial(collectives_of, 2), 100, SHARED_GPU, shares_gpu=True),
    Row(
        f"nccl 2 {ON_ONE}: steps", partial(collectives_of, 2, "check,close", graphs=0), 100, SHARED_GPU, True
    ),
    Row(
        f"nccl 2 {ON_ONE}: trees",
        partial(collectives_of, 2, "check,close", lanes="trees"),
        100,
        SHARED_GPU,
        True,
    ),
    Row(f"nccl 2 {ON_ONE}: sparse", partial(collectives_of, 2, "sparse,close"), 100, SHARED_GPU, True),
    Row(f"nccl 2 {ON_ONE}: refusal", partial(failure_of, 2, "refuse", shared=True), 100, SHARED_GPU, True),
    Row(f"nccl 2 {ON_ONE}: death", partial(failure_of, 2, "die", shared=True), 100, SHARED_GPU),
    Row("nccl each GPU: graphs", partial(collectives_of, 0, shared=False), 100, (two_gpus, *NCCL)),
    Row(
        "nccl each GPU: steps",
        partial(collectives_of, 0, "check,close", shared=False, graphs=0),
        100,
        (two_gpus, *NCCL),
    ),
    Row(
        "nccl each GPU: trees",
        partial(collectives_of, 0, "check,close", shared=False, lanes="trees"),
        100,
        (two_gpus, *NCCL),
    ),
    Row(
        "nccl each GPU: sparse",
        partial(collectives_of, 0, "sparse,close", shared=False),
        100,
        (two_gpus, *NCCL),
    ),
    Row("nccl each GPU: refusal", partial(failure_of, 0, "refuse", shared=False), 100, (two_gpus, *NCCL)),
    Row("nccl each GPU: death", partial(failure_of, 0, "die", shared=False), 100, (two_gpus, *NCCL)),
    Row("torch: streams", partial(torch_checks, "streams", "bad input"), 60, (*TORCH, PYTEST)),
    Row("torch: hook, dense", partial(torch_checks, "hook, dense*"), 60, (*TORCH, PYTEST)),
    Row("torch: hook, bfloat16", partial(torch_checks, "hook, in bfloat16*"), 60, (*TORCH, PYTEST)),
    Row(
        "torch: hook, sparse",
        partial(torch_checks, "hook, sparse*", "hook, a hundredth*"),
        60,
        (*TORCH, *CUPY, PYTEST),
    ),
    Row("torch: process group", partial(torch_checks, "process group*"), 60, (*TORCH, PYTEST)),
    Row("torch: LARS, LAMB", lars_lamb, 60, TORCH),
    Row("topk: float32", partial(topk_against_torch, "float32"), 90, (*CUPY, *TORCH)),
    Row("topk: float16", partial(topk_against_torch, "float16"), 90, (*CUPY, *TORCH)),
    Row("topk: bfloat16", partial(topk_against_torch, "bfloat16"), 90, (*CUPY, *TORCH)),
    Row("topk: float64", partial(topk_against_torch, "float64"), 90, (*CUPY, *TORCH)),
    Row(f"nccl 4 {ON_ONE}: graphs", partial(collectives_of, 4, "check,graph,close"), 120, SHARED_GPU, True),
    Row("sanitizer: memcheck", partial(sanitized, "memcheck", 80.0), 90, (tool("compute-sanitizer"), *CUPY)),
    Row(
        "sanitizer: racecheck",
        partial(sanitized, "racecheck", 110.0),
        120,
        (tool("compute-sanitizer"), *CUPY),
    ),
    Row(SUBSET, small_subset, 120, CUPY, listed=False),
)
"""All of them, in the order in which they run: what others rest on first, what may take long last."""
