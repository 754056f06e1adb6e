"""The table of `gpu_report`: what each row needs, how long it may take, what it runs; and what the machine is.

Libraries are imported in the rows, so that the table can be made where they are missing.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.gpu_report import FOLDER, Facts, Need, Row
from tests.support import gpu_facts
from tests.support import gpu_kernel_rows as kernels
from tests.support import gpu_rank_rows as ranks
from tests.support import gpu_windows_rows as windows

SEVERAL_RANKS = 23003  # the first NCCL that puts several ranks on one GPU


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
WINDOWS = (
    *NCCL,
    told(
        "nccl", lambda found: None if found >= 22907 else f"NCCL {found} has no windows; 2.29.7 and newer do"
    ),
)
SHARED_GPU = (
    *NCCL,
    told(
        "nccl",
        lambda found: (
            None
            if found >= SEVERAL_RANKS
            else f"NCCL {found} puts one rank on a GPU; 2.30.3 and newer can do more"
        ),
    ),
)
MPS = (*SHARED_GPU, tool("nvidia-cuda-mps-control"))
TORCH_CHECKS = (
    *TORCH,
    *(library(name, "the checks of torch are a test module") for name in ("pytest", "hypothesis")),
)


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
    folder = os.environ.get(FOLDER)
    found["facts"] = gpu_facts.facts(Path(folder) if folder else None)
    known = found["facts"]["attributes"]
    if isinstance(known, list):
        found["multicast"] = all(one["multicast"] == 1 for one in known)
    assert "name" in found, "; ".join(lines)
    return {"text": "\n".join(lines), **found}


def _hardware(found: dict[str, Any]) -> str:
    from collectives.tables.kernels.kernel_launch import nvrtc_of_cupy

    cupy = kernels.cupy_here()
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    name = properties["name"].decode()
    capability = f"{properties['major']}.{properties['minor']}"
    peak = kernels.memory_peak(cupy)
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
    from collectives.backends.nccl.nccl_library import describe_library, find_library
    from topoplan.errors import UsageError

    try:
        library = find_library()
    except UsageError as error:
        found["nccl"] = str(error)
        return f"NCCL: {error}"
    found.update(nccl=library.version, nccl_path=library.path, nccl4py=_version("nccl4py"))
    return f"NCCL {describe_library(library)}; nccl4py {found['nccl4py']}"


def _torch(found: dict[str, Any]) -> str:
    try:
        torch: Any = import_module("torch")
        why = (
            "without CUDA"
            if torch.version.cuda is None
            else f"for CUDA {torch.version.cuda}, as no driver here is"
        )
        found["torch_cuda"] = torch.cuda.is_available() or f"torch {torch.__version__} is built {why}"
    except ImportError as error:
        found["torch_cuda"] = str(error)
        return f"torch: {error}"
    found.update(torch=torch.__version__, torch_runtime=torch.version.cuda)
    shown = "a GPU" if found["torch_cuda"] is True else "no GPU"
    return f"torch {torch.__version__} with CUDA {torch.version.cuda}, {shown}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cuda(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


MULTICAST = told("multicast", lambda found: None if found else "the driver shows no multicast on these GPUs")
BINDINGS = library("cuda", 'pip install "topoplan[cuda12]" or "topoplan[cuda13]"')

ALONE = partial(ranks.collectives_of, 1, "check,graph,close", shared=False, timeout=50.0)
PAIR = partial(ranks.collectives_of, 2, shared=True)
EACH = partial(ranks.collectives_of, 0, shared=False)
DEATH = partial(ranks.failure_of, 0, shared=False, engine="windows")
ON_EACH = (gpu, two_gpus, *NCCL)
SANITIZER = (*CUPY, tool("compute-sanitizer"))
ML_DTYPES = library("ml_dtypes", "pip install ml-dtypes")
DEATHS = {"death": "die", "death-inside": "die-inside", "death-running": "die-running"}


def alone_on_each(tasks: str, **settings: Any) -> Callable[[], str]:
    """Tasks by the windows engine, with a GPU for each rank."""
    return partial(EACH, tasks, **{"engine": "windows"} | settings)


BY_WINDOWS = alone_on_each("check,sparse,close", kind="windows", nccl_nvls_enable=0)
# a switch may form the sums
BY_SWITCH = alone_on_each("by-switch,close", kind="windows and multicast", machine="dgx-h100", exact=0)
FAILURE_EACH = partial(ranks.failure_of, 0, shared=False)
FAILURE_PAIR = partial(ranks.failure_of, 2, shared=True)
GOING_ON_EACH = partial(ranks.going_on, 0, shared=False)
GOING_ON_THREE = partial(ranks.going_on, 3, shared=True)
REGION_BY_PEERS = partial(windows.region_of_one_rank, "peer access", NCCL_WIN_ENABLE="0")
HOOK_SPARSE = partial(ranks.torch_checks, "hook, sparse*", "hook, a hundredth*")
TORCH_OF_TWO = {
    "two-ranks": "two ranks",
    "sync-batch-norm": "two ranks, SyncBatchNorm",
    "fsdp": "two ranks, FSDP2",
}
TORCH_PAIR = (gpu, two_gpus, *TORCH_CHECKS)

ROWS: tuple[Row, ...] = (
    Row("device", device, 90, CUPY),
    Row("nccl-1/messages", ranks.messages_to_itself, 60, NCCL),
    Row("nccl-1/back-end", ALONE, 60, NCCL),
    Row("windows-1/region", partial(windows.region_of_one_rank, "windows"), 60, WINDOWS),
    Row("windows-1/peer-access", REGION_BY_PEERS, 60, NCCL),
    Row("windows-1/multicast", windows.multicast_of_one_gpu, 40, (*CUPY, BINDINGS, MULTICAST)),
    *(Row(f"windows-1/{size}-ranks", partial(windows.one_gpu, size), 60, CUPY) for size in (2, 4, 8)),
    Row("windows-1/results", windows.results_in_arenas, 40, CUPY),
    Row("windows-1/graphs", windows.graphs, 40, CUPY),
    Row("windows-1/missing", windows.a_rank_is_missing, 40, CUPY),
    Row("windows-each/multicast", BY_SWITCH, 100, (*ON_EACH, MULTICAST)),
    Row("windows-each/windows", BY_WINDOWS, 100, ON_EACH),
    Row("windows-each/ipc", alone_on_each("check,close", kind="ipc", nccl_win_enable=0), 100, ON_EACH),
    Row("windows-each/rates", alone_on_each("allreduce,rates,close", engine="auto"), 60, ON_EACH),
    Row("windows-each/queue", alone_on_each("queue,close", engine="windows"), 60, ON_EACH),
    Row("windows-each/probed", alone_on_each("allreduce,close", machine="probed", exact=0), 100, ON_EACH),
    *(Row(f"windows-each/{name}", partial(DEATH, task), 60, ON_EACH) for name, task in DEATHS.items()),
    Row("windows-each/shrink", partial(GOING_ON_EACH, "shrink", engine="windows"), 60, ON_EACH),
    Row("nccl-each/graphs", EACH, 100, ON_EACH),
    Row("nccl-each/steps", partial(EACH, "check,sparse,close", graphs=0), 100, ON_EACH),
    Row("nccl-each/refusal", partial(FAILURE_EACH, "refuse"), 60, ON_EACH),
    Row("nccl-each/death", partial(FAILURE_EACH, "die"), 60, ON_EACH),
    Row("nccl-each/shrink", partial(GOING_ON_EACH, "shrink"), 60, ON_EACH),
    Row("nccl-each/leave", partial(GOING_ON_EACH, "leave"), 60, ON_EACH),
    Row("torch/streams", partial(ranks.torch_checks, "streams", "bad input"), 60, TORCH_CHECKS),
    Row("torch/hook-dense", partial(ranks.torch_checks, "hook, dense*"), 60, TORCH_CHECKS),
    Row("torch/hook-bfloat16", partial(ranks.torch_checks, "hook, in bfloat16*"), 60, TORCH_CHECKS),
    Row("torch/hook-sparse", HOOK_SPARSE, 60, (*CUPY, *TORCH_CHECKS)),
    Row("torch/process-group", partial(ranks.torch_checks, "process group*"), 60, TORCH_CHECKS),
    *(
        Row(f"torch/{name}", partial(ranks.torch_checks, check), 90, TORCH_PAIR)
        for name, check in TORCH_OF_TWO.items()
    ),
    Row("torch/lars-lamb", ranks.lars_lamb, 60, TORCH),
    *(
        Row(f"topk/{dtype}", partial(kernels.topk_against_torch, dtype), 60, (*CUPY, *TORCH))
        for dtype in ("float32", "float16", "bfloat16", "float64")
    ),
    Row("kernels/joins", kernels.joins, 90, CUPY),
    Row("kernels/averages", kernels.averages_and_copies, 60, CUPY),
    Row("kernels/selection", kernels.selection, 90, CUPY),
    Row("kernels/repeated", kernels.repeated_selection, 60, CUPY),
    Row("kernels/feedback", kernels.feedback, 90, CUPY),
    Row("kernels/windows", windows.every_kernel, 120, CUPY),
    Row("loopback-gpu/graphs", partial(kernels.loopback, True), 60, CUPY),
    Row("loopback-gpu/steps", partial(kernels.loopback, False), 60, CUPY),
    Row("loopback-gpu/operations", kernels.operations, 60, CUPY),
    Row("loopback-gpu/bfloat16", kernels.bfloat16, 60, (*CUPY, ML_DTYPES)),
    Row("loopback-gpu/streams", kernels.background, 60, CUPY),
    Row("loopback-gpu/sparse", kernels.sparse, 60, CUPY),
    Row("loopback-gpu/shrink", kernels.shrunk, 60, CUPY),
    Row("bandwidth/joins", kernels.join_bandwidth, 60, CUPY),
    Row("bandwidth/averages", kernels.average_bandwidth, 60, CUPY),
    Row("bandwidth/select", kernels.select_bandwidth, 60, CUPY),
    Row("bandwidth/feedback", kernels.feedback_bandwidth, 60, CUPY),
    Row("windows-1/sweep", windows.settings_swept, 60, CUPY),
    Row("nccl-1/abort", ranks.abort_beside_a_graph, 40, NCCL),
    Row("nccl-1/close", ranks.close_behind_a_graph, 40, NCCL),
    Row("sanitizer/memcheck", partial(ranks.sanitized, "memcheck", 50.0), 60, SANITIZER),
    Row("sanitizer/racecheck", partial(ranks.sanitized, "racecheck", 80.0), 90, SANITIZER),
    Row("mps-2/windows", partial(PAIR, "check,close", engine="windows"), 60, MPS, True),
    Row("mps-2/rates", partial(PAIR, "allreduce,rates,close", engine="windows"), 60, MPS, True),
    Row("mps-2/queue", partial(PAIR, "queue,close", engine="windows"), 60, MPS, True),
    Row("mps-4/windows", partial(ranks.collectives_of, 4, "check,close", engine="windows"), 60, MPS, True),
    Row("mps-2/death-inside", partial(FAILURE_PAIR, "die-inside", engine="windows"), 60, MPS, True),
    Row("mps-3/shrink", partial(GOING_ON_THREE, "shrink", engine="windows"), 60, MPS, True),
    *(
        Row(f"mps-2/torch-{name}", partial(ranks.torch_checks, check), 90, (*MPS, *TORCH_CHECKS), True)
        for name, check in TORCH_OF_TWO.items()
    ),
    Row("nccl-2/graphs", PAIR, 60, SHARED_GPU, True),
    Row("nccl-2/steps", partial(PAIR, "check,sparse,close", graphs=0), 60, SHARED_GPU, True),
    Row("nccl-2/refusal", partial(FAILURE_PAIR, "refuse"), 60, SHARED_GPU, True),
    Row("nccl-2/death", partial(FAILURE_PAIR, "die"), 60, SHARED_GPU),
    Row("nccl-3/shrink", partial(GOING_ON_THREE, "shrink"), 60, SHARED_GPU),
    Row("nccl-3/leave", partial(GOING_ON_THREE, "leave"), 60, SHARED_GPU, True),
    Row("nccl-4/graphs", partial(ranks.collectives_of, 4, "check,graph,close"), 60, SHARED_GPU, True),
    Row(ranks.SUBSET, ranks.small_subset, 120, CUPY, listed=False),
)
"""All rows in the order in which they run: never run on a GPU first, known kernels after them, and last the rows with
several ranks on a GPU, which NCCL calls experimental and which may hang.
"""
