"""Count the files of the two packages that eight common tasks enter: ``python -m tests.support.walks``.

A file counts once a function or a class body of it runs; running its module body on import does not count. Each walk
runs in a process of its own, so that no walk finds what another has cached.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

from tests.support.checkout import ROOT

QUAD = """\
\tGPU0\tGPU1\tGPU2\tGPU3
GPU0\t X \tNV1\tNV1\tNV2
GPU1\tNV1\t X \tNV2\tNV1
GPU2\tNV1\tNV2\t X \tNV1
GPU3\tNV2\tNV1\tNV1\t X
"""

Begin = Callable[[str], None]
"""Begin a walk of this name: what was done before it, its preparation, does not count."""


def text_to_verified_plan(begin: Begin) -> None:
    import topoplan

    begin("text_to_verified_plan")
    topoplan.verify(topoplan.plan(topoplan.load(QUAD), "allreduce"))


def plan_of_a_dgx_2(begin: Begin) -> None:
    import topoplan

    machine = topoplan.load("dgx-2")
    begin("plan_of_a_dgx_2")
    topoplan.plan(machine, "allreduce")


def loopback_all_reduce(begin: Begin) -> None:
    import numpy as np

    import collectives
    import topoplan

    plan = topoplan.plan("dgx-1v", "allreduce", gpus=[0, 1, 2, 3])
    begin("loopback_all_reduce")
    with collectives.Communicator(plan) as comm:
        comm.all_reduce([np.arange(5.0) for _ in range(4)])


def all_reduce_between_two(backend: str, begin: Begin) -> None:
    import numpy as np

    import collectives
    import topoplan

    plan = topoplan.plan("dgx-1v", "allreduce", gpus=[0, 1])
    fork_second_rank()
    begin(f"{backend}_all_reduce")
    with collectives.Communicator(plan, backend) as comm:
        comm.all_reduce(np.arange(5.0))
        if backend == "shared":
            begin("shared_sparse_all_reduce")
            comm.sparse_all_reduce(np.arange(500.0), density=0.1)


def steps_of_the_hook(begin: Begin) -> None:
    import torch
    import torch.distributed as dist

    import topoplan
    from collectives.torch import HookState, topoplan_hook

    plan = topoplan.plan("dgx-1v", "allreduce", gpus=[0, 1])
    fork_second_rank()
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(50, 50))
    begin("hook_first_step")
    model.register_comm_hook(HookState(plan), topoplan_hook)
    for name in ("", "", "hook_steady_step"):
        if name:
            begin(name)
        model(torch.ones(2, 50)).sum().backward()
        if not name:
            begin("")


WALKS = (
    text_to_verified_plan,
    plan_of_a_dgx_2,
    loopback_all_reduce,
    partial(all_reduce_between_two, "shared"),
    partial(all_reduce_between_two, "tcp"),
    steps_of_the_hook,
)


def fork_second_rank() -> None:
    """Fork the second of two ranks; each has its place in the environment variables that torchrun sets."""
    from tests.support.ports import free_port  # which imports the packages: a walk must find them unimported

    port = free_port()
    rank = 0 if os.fork() else 1
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def files_entered(walk: Callable[[Begin], None]) -> dict[str, list[str]]:
    """Return for each name that a walk begins the files, relative to the repository, whose functions it calls."""
    entered: dict[str, set[str]] = {}
    current: set[str] = set()

    def record(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            current.add(frame.f_code.co_filename)

    def begin(name: str) -> None:
        nonlocal current
        current = entered.setdefault(name, set())
        threading.setprofile(record)
        sys.setprofile(record)

    walk(begin)
    sys.setprofile(None)
    threading.setprofile(None)
    rooms = tuple(f"{ROOT / package}/" for package in ("topoplan", "collectives"))
    return {
        walk: sorted(str(Path(file).relative_to(ROOT)) for file in files if file.startswith(rooms))
        for walk, files in entered.items()
        if walk
    }


def main() -> int:
    """Print the files of every walk as one JSON object."""
    found: dict[str, list[str]] = {}
    for walk in WALKS:
        with tempfile.TemporaryFile("w+") as answer:
            process = os.fork()
            if process == 0:
                try:
                    files = files_entered(walk)
                    if os.environ.get("RANK", "0") == "0":
                        json.dump(files, answer)
                        answer.flush()
                finally:
                    os._exit(0)
            os.waitpid(process, 0)
            answer.seek(0)
            found.update(json.load(answer))
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
