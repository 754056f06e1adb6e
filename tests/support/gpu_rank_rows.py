"""Rows of `gpu_report` about NCCL, torch and the sanitizer: what several processes or other libraries do on a GPU."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

from collectives.backends.nccl.nccl_library import find_library
from tests.bench import gpu as bench
from tests.gpu_report import COMMAND, FOLDER, CannotRun, driver, last_line, program
from tests.jobs import nccl_rank
from tests.support import gpu_checks as checks
from tests.support import gpu_exchange_checks as exchanges
from tests.support.feedback_steps import compare_steps
from tests.support.gpu_kernel_rows import cupy_here
from tests.support.ports import free_port

ERROR_SECONDS = 10.0  # in which every rank must have raised after another refused or died

CLOSE_SECONDS = 4.0

GO_ON_SECONDS = 20.0
"""In which the ranks that are left must have gone on: a second for doubts, the rest for what NCCL and CUDA set up."""

SUBSET = "small-subset"  # the row that the sanitizer runs


# ---- NCCL


def messages_to_itself() -> str:
    cupy = cupy_here()
    nccl = find_library()
    exchanges.check_messages_to_itself(cupy, nccl)
    rates = []
    with exchanges.alone(cupy, nccl) as link:
        for shift in (0, 4):
            room = [cupy.zeros((64 << 20) + shift, dtype="uint8")[shift:] for _ in range(2)]
            lines = (room[0], room[1])

            def send(lines: tuple[Any, Any] = lines) -> None:
                exchanges.to_itself(nccl, link, lines, cupy.cuda.get_current_stream())

            rates.append(lines[0].nbytes / bench.gpu_seconds(cupy, send, 5) / 1e9)
    return (
        f"right at any alignment, by steps and as a graph; 64 MB at {rates[0]:.0f} GB/s, "
        f"behind 4 bytes at {rates[1]:.0f} GB/s"
    )


def abort_beside_a_graph() -> str:
    cupy = cupy_here()
    seconds = exchanges.check_abort_beside_a_graph(cupy, find_library())
    return f"ended {seconds:.3f} s after the graph was dropped"


def close_behind_a_graph() -> str:
    cupy = cupy_here()
    return f"{exchanges.check_close_behind_a_graph(cupy, find_library()):.3f} s"


def said(text: str, task: str) -> dict[int, str]:
    return {
        int(rank): words for rank, words in re.findall(rf"^rank (\d+): {task}: (.*)$", text, re.MULTILINE)
    }


def seconds_of(text: str, task: str, ranks: Sequence[int], limit: float) -> float:
    """The longest time that ranks have printed for a task; raises where one is missing or above the limit."""
    lines = said(text, task)
    missing = [rank for rank in ranks if rank not in lines]
    assert not missing, f"ranks {missing} have not got through {task}: {last_line(text)}"
    found = [re.search(r"([\d.]+) s\b", lines[rank]) for rank in ranks]
    longest = max(float(one[1]) for one in found if one is not None)
    assert longest <= limit, f"{task} takes {longest:.1f} s, and may take {limit:g}"
    return longest


def ranks(count: int, tasks: str, *, shared: bool, timeout: float, **settings: object) -> str:
    """What some ranks print that do tasks; on one GPU, or with a GPU each."""
    place: dict[str, object] = _first_gpu() if shared else {}
    ended, text = nccl_rank.start(count, tasks, port=free_port(), timeout=timeout, **place, **settings)
    print(text)
    refused = nccl_rank.refused_by_nccl(text + _nccl_logs()) if shared and not ended else None
    if refused:
        raise CannotRun(f"NCCL does not run {count} ranks on this GPU: {refused}")
    assert ended or any(task.startswith(("die", "shrink")) for task in tasks.split(",")), last_line(text)
    return text


def _nccl_logs() -> str:
    """Return what NCCL has written into the folder of this row."""
    folder = os.environ.get(FOLDER)
    logs = sorted(Path(folder).glob("nccl.*.log")) if folder else []
    return "".join(log.read_text(errors="replace") for log in logs)


def engine_of(text: str, kind: str = "") -> str:
    """Return the engine that ranks have printed; raises if it is not of the kind that was asked for."""
    engines = said(text, "engine")
    assert 0 in engines, f"no rank has printed its engine: {last_line(text)}"
    assert engines[0].split(" (")[0].endswith(kind), f"the engine is {engines[0]}, and the row is on {kind}"
    return engines[0]


def collectives_of(
    count: int,
    tasks: str = "check,allreduce,graph,close",
    *,
    shared: bool = True,
    timeout: float = 90.0,
    kind: str = "",
    **settings: Any,
) -> str:
    """Return what ranks that do tasks have printed; raises unless all end well, on an engine of this kind."""
    count = count or min(8, driver()[1])
    text = ranks(count, tasks, shared=shared, timeout=timeout, **settings)
    closed = seconds_of(text, "close", range(count), CLOSE_SECONDS)
    done = [f"{task} on {len(said(text, task))} ranks" for task in tasks.split(",") if task != "close"]
    compared = [
        said(text, "allreduce").get(0),
        said(text, "queue").get(0),
        *re.findall(r"^rank 0: (rates \d+: .*)$", text, re.MULTILINE),
    ]
    lines = [f"{', '.join(done)}; closed in {closed:.3f} s", engine_of(text, kind), *filter(None, compared)]
    return "\n".join(lines)


def failure_of(
    count: int, task: str, *, shared: bool, timeout: float = 90.0, kind: str = "", **settings: object
) -> dict[str, Any]:
    """Return how soon every surviving rank has raised and closed."""
    count = count or min(8, driver()[1])
    text = ranks(count, f"{task},close", shared=shared, timeout=timeout, **settings)
    engine = engine_of(text, kind)
    left = range(count - 1) if task.startswith("die") else range(count)
    raised = seconds_of(text, task, left, ERROR_SECONDS)
    closed = seconds_of(text, "close", left, CLOSE_SECONDS)
    if task.startswith("die"):
        unnamed = [rank for rank in left if f"rank {count - 1} is gone" not in said(text, task)[rank]]
        assert not unnamed, f"ranks {unnamed} do not name rank {count - 1}: {said(text, task)}"
    return {
        "text": f"every surviving rank raised within {raised:.3f} s and closed within {closed:.3f} s\n{engine}",
        "raised": raised,
        "closed": closed,
    }


def going_on(
    count: int, task: str, *, shared: bool, timeout: float = 90.0, kind: str = "", **settings: object
) -> dict[str, Any]:
    """Return how soon, and how, all ranks but the last continued without it, and whether it came back if it can."""
    count = count or min(8, driver()[1])
    text = ranks(count, f"{task},close", shared=shared, timeout=timeout, **settings)
    engine = engine_of(text, kind)
    left = range(count - 1)
    seconds = seconds_of(text, task, left, GO_ON_SECONDS)
    closed = seconds_of(text, "close", left, CLOSE_SECONDS)
    back = said(text, "back")
    assert task != "leave" or len(back) == len(left), f"ranks {sorted(back)} have seen it come back"
    return {
        "text": "\n".join(
            [said(text, task)[0], *list(back.values())[:1], f"closed within {closed:.3f} s", engine]
        ),
        "seconds": seconds,
        "closed": closed,
    }


def _first_gpu() -> dict[str, object]:
    """What makes ranks see one GPU where there are more."""
    if driver()[1] < 2:
        return {}
    return {"cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}


# ---- torch


def torch_checks(*patterns: str) -> str:
    """Checks of ``test_torch_gpu`` whose names match; each raises where something is wrong."""
    checks: Mapping[str, Callable[[], None]] = import_module("tests.jobs.test_torch_gpu").CHECKS
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
    cupy = cupy_here()
    cupy.cuda.set_allocator(None)
    checks.check_joins(cupy, "float32", "sum")
    checks.check_joins(cupy, "bfloat16", "max")
    checks.check_averages(cupy, "float16", (3001,))
    checks.check_copies(cupy, 16)
    for kind in ("normal", "few values"):
        checks.check_topk(cupy, kind, "float32", ((70001, (700, 20000)), (600_011, (600,))))
    compare_steps(cupy, ("float32", "float16", 0.9), 70001, (700, 20000))
    exchanges.check_operation(cupy, "float32", "sum")
    return "joins, averages, copies, topk, error feedback, a collective"


def sanitized(check: str, seconds: float) -> str:
    found = program("compute-sanitizer")
    assert found is not None, "it was there a moment ago"
    # errors that CuPy provokes to find out what there is are none of a kernel's
    quiet = ["--report-api-errors", "no"] if check == "memcheck" else []
    command = [found, "--tool", check, *quiet, "--error-exitcode", "9", *COMMAND]
    done = subprocess.run(
        [*command, "--row", SUBSET], capture_output=True, text=True, timeout=seconds, check=False
    )
    print(done.stdout[-20000:], done.stderr[-5000:])
    assert done.returncode == 0, f"exit status {done.returncode}: {last_line(done.stdout)}"
    assert '"verdict": "ok"' in done.stdout, last_line(done.stdout)
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", done.stdout)
    return summary[-1] if summary else "no errors"
