"""The table of `gpu_report` on stand-ins: ``python -m tests.support.stand_in_rows [--gpus 8] [-o FILE] [--rows ...]``.

It shows what a first run would print, and that rows and report hold together; it says nothing about a GPU. Kernels run
on this processor, ranks are threads, and arrays are small. A row without a stand-in says so.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import topoplan
from collectives import Communicator
from tests import gpu_report
from tests.gpu_report import CannotRun, Row
from tests.jobs import nccl_rank
from tests.support import gpu_exchange_checks, gpu_facts, gpu_kernel_rows, gpu_rank_rows, gpu_rows
from tests.support import gpu_windows_rows as windows
from tests.support.fake_streams import Machine
from tests.support.gpu_ranks import on_every_rank
from tests.support.selection_on_cpu import install_selection
from topoplan.machine.variants import with_all_capabilities

COUNTS = (0, 701)
LENGTH = 3001
TIMEOUT = 40.0  # seconds; ranks on stand-ins need them only where one of them fails

REGION = 32 << 20

PROCESSORS = 8  # of a GPU that ranks share, so that each has a block
MOST_RANKS = 3  # ranks on GPUs of their own: this processor runs the kernels of all of them at once

PROPERTIES = {"name": b"NVIDIA H100 80GB HBM3", "major": 9, "minor": 0, "totalGlobalMem": 80 << 30}
"""Of a GPU that the stand-ins play."""

H100 = {"compute mode": 0, "VMM": 1, "multicast": 1, "MPS": 0}


class Killed(BaseException):
    """Ends a thread that plays a rank, as SIGKILL ends a process."""


def install(patch: pytest.MonkeyPatch, gpus: int) -> tuple[Machine, Any]:
    """Make this process see so many H100, and rows use threads as ranks."""
    machine = Machine()
    machine.gpus, machine.peers, machine.windows = gpus, True, (True, gpus > 1)
    cupy, _ = install_selection(patch, machine)
    runtime = cupy.cuda.runtime
    more = {
        "getDeviceProperties": lambda device: PROPERTIES,
        "driverGetVersion": lambda: 13020,
        "runtimeGetVersion": lambda: 12090,
        "deviceGetAttribute": lambda number, device: {36: 2_619_000, 37: 5120}.get(number, 0),
    }
    for name, value in more.items():
        patch.setattr(runtime, name, value, raising=False)
    original = cupy.cuda.Device.__init__

    def wide(self: Any, ordinal: int | None = None) -> None:
        original(self, ordinal)
        self.attributes = {"MultiProcessorCount": PROCESSORS if gpus == 1 else 2}

    patch.setattr(cupy.cuda.Device, "__init__", wide)
    patch.setattr(gpu_facts, "attributes", lambda: [H100] * gpus)
    patch.setattr(gpu_facts, "peers", lambda: {"access": [[1] * gpus] * gpus})
    patch.setattr(gpu_report, "driver", lambda: ("", gpus))
    patch.setattr(gpu_rank_rows, "driver", lambda: ("", min(gpus, MOST_RANKS)))
    for module in (gpu_kernel_rows, gpu_rank_rows, windows):
        patch.setattr(module, "cupy_here", lambda: cupy)
    patch.setattr(nccl_rank, "COUNTS", COUNTS)
    patch.setattr(nccl_rank, "AFTERWARDS", COUNTS)
    patch.setattr(nccl_rank, "REPLAYED", LENGTH)
    patch.setattr(nccl_rank, "SIZES", (1024, 16384))
    # NCCL's own allreduce has no stand-in
    patch.setattr(nccl_rank, "_rival", lambda cupy, comm, rank: nullcontext(comm.all_reduce))
    patch.setattr(nccl_rank, "start", partial(start, machine, cupy, patch))
    return machine, cupy


def start(
    machine: Machine,
    cupy: Any,
    patch: pytest.MonkeyPatch,
    ranks: int,
    tasks: str,
    *,
    port: int,
    timeout: float,
    **settings: Any,
) -> tuple[bool, str]:
    """Do as `nccl_rank.start`, with a thread in place of each process."""
    lines: list[str] = []
    lock = threading.Lock()
    wanted = {name: settings[name] for name in ("engine",) if name in settings}
    flags = {name: bool(settings[name]) for name in ("graphs", "exact") if name in settings}
    machine.gpus = ranks
    if settings.get("nccl_win_enable") == 0:
        machine.windows = (False, False)
    elif settings.get("nccl_nvls_enable") == 0:
        machine.windows = (True, False)

    def say(text: str) -> None:
        with lock:
            lines.append(text)

    def killed() -> None:
        raise Killed

    patch.setattr(nccl_rank, "say", say)
    patch.setattr(nccl_rank, "killed", killed)
    small = {
        "check": partial(nccl_rank.check, counts=COUNTS),
        "sparse": partial(nccl_rank.sparse, size=701),
        "allreduce": partial(nccl_rank.allreduce, count=5000),
        "queue": partial(nccl_rank.queue, calls=8),
    }

    def be(comm: Communicator, rank: int) -> None:
        nccl_rank.say(f"rank {rank}: engine: {comm.engine}")
        for task in tasks.split(","):
            small.get(task, nccl_rank.TASKS[task])(comm, rank)

    machine_of_plan = with_all_capabilities(topoplan.load(settings.get("machine", "dgx-1v")))
    plan = topoplan.plan(machine_of_plan, "allreduce", gpus=range(ranks))
    options = {"engine": "messages", "region_bytes": REGION, **wanted, **flags}
    found = on_every_rank(cupy, plan, be, chunk_bytes=1 << 12, timeout=TIMEOUT, **options)
    failed = [f"{type(one).__name__}: {one}" for one in found if isinstance(one, Exception)]
    return not failed, "\n".join([*lines, *failed]) + "\n"


def no_stand_in(why: str) -> Callable[[], str]:
    def row() -> str:
        raise CannotRun(f"no stand-in: {why}")

    return row


def loopback(graphs: bool, cupy: Any) -> str:
    gpu_exchange_checks.check_loopback(cupy, "binary", "allreduce", graphs=graphs, counts=COUNTS)
    return "right to the bit"


def small_rows(machine: Machine, cupy: Any) -> Mapping[str, Callable[[], Any]]:
    """Return what rows do on small arrays, by their names; other rows are done as they are."""
    figures = no_stand_in("it measures time")
    return {
        "windows-1/multicast": no_stand_in("the driver's multicast objects"),
        "windows-1/peer-access": partial(peer_access, machine),
        **{f"windows-1/{size}-ranks": partial(ranks_on_one_gpu, cupy, size) for size in (2, 4, 8)},
        "windows-1/results": partial(windows.results_in_arenas, 2, LENGTH - 1, blocks=1, slot_bytes=4096),
        "windows-1/graphs": partial(windows.graphs, 2, (10, 5000), blocks=1, slot_bytes=4096),
        "windows-1/sweep": figures,
        "windows-each/multicast": no_stand_in("kernels that use the switch run on the PTX interpreter only"),
        "windows-each/ipc": no_stand_in(
            "ranks are threads of one process, which need no IPC to reach each other"
        ),
        "windows-each/probed": no_stand_in("NVML's stand-in is a process of its own"),
        **{
            name: no_stand_in("a thread cannot be killed")
            for name in (
                *("windows-each/death", "windows-each/death-inside", "windows-each/death-running"),
                *("nccl-each/death", "nccl-2/death", "mps-2/death-inside"),
            )
        },
        "nccl-1/messages": partial(messages, cupy),
        "loopback-gpu/graphs": partial(loopback, True, cupy),
        "loopback-gpu/steps": partial(loopback, False, cupy),
        "kernels/windows": no_stand_in("kernels that use the switch run on the PTX interpreter only"),
        **{
            name: no_stand_in("it takes arrays of millions of elements")
            for name in ("kernels/joins", "kernels/selection", "kernels/repeated", "kernels/feedback")
        },
        **{row.name: figures for row in gpu_rows.ROWS if row.name.startswith(("bandwidth/", "topk/"))},
    }


def messages(cupy: Any) -> str:
    from collectives.backends.nccl.nccl_library import find_library

    gpu_exchange_checks.check_messages_to_itself(cupy, find_library(), (1, 16, 3001))
    return "right at any alignment, by steps and as a graph"


def peer_access(machine: Machine) -> str:
    """Do as the row of this name; the stand-in of NCCL reads no environment variable."""
    machine.windows = (False, False)
    return windows.region_of_one_rank("peer access")


def ranks_on_one_gpu(cupy: Any, size: int) -> str:
    for small in (0, 16384):
        settings = {"arena": 8 << 20, "blocks": 1, "slot_bytes": 4096, "small_bytes": small}
        windows.check(cupy, size, (700,), timeout=TIMEOUT, **settings)
    return "right to the bit"


def rows_of(machine: Machine, cupy: Any) -> list[Row]:
    small = small_rows(machine, cupy)
    return [
        replace(row, run=small.get(row.name, row.run), seconds=4 * row.seconds, shares_gpu=False)
        for row in gpu_rows.ROWS
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the exit status is that of the report."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--gpus", type=int, default=1)
    asked, others = parser.parse_known_args(arguments)
    command = [sys.executable, "-m", "tests.support.stand_in_rows", "--gpus", str(asked.gpus)]
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        if not any(one.startswith(("-o", "--output")) for one in others):
            others += ["-o", str(Path(folder) / "out.json")]
        inside = any(re.fullmatch("--row", one) for one in others)
        machine, cupy = install(patch, asked.gpus) if inside else (Machine(), None)
        if not inside:
            patch.setattr(gpu_report, "driver", lambda: ("", asked.gpus))
        return gpu_report.main(others, rows_of(machine, cupy), command=command, seconds=3600.0)


if __name__ == "__main__":
    sys.exit(main())
