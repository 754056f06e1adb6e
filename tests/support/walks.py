"""Count the files of the two packages that eight common tasks enter: ``python -m tests.support.walks``.

A file counts once a function or a class body of it runs; running its module body on import does not count. Each walk
runs in a process of its own, so that no walk finds what another has cached.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
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

Run = Callable[[Callable[[], None]], None]
"""A walk: it calls what it is given once its preparation, which does not count, is done."""


def text_to_verified_plan(begin: Callable[[], None]) -> None:
    import topoplan

    begin()
    topoplan.verify(topoplan.plan(topoplan.load(QUAD), "allreduce"))


def plan_of_a_dgx_2(begin: Callable[[], None]) -> None:
    import topoplan

    machine = topoplan.load("dgx-2")
    begin()
    topoplan.plan(machine, "allreduce")


def loopback_all_reduce(begin: Callable[[], None]) -> None:
    import numpy as np

    import collectives
    import topoplan

    plan = topoplan.plan("dgx-1v", "allreduce", gpus=[0, 1, 2, 3])
    begin()
    with collectives.Communicator(plan) as comm:
        comm.all_reduce([np.arange(5.0) for _ in range(4)])


def all_reduce_over(backend: str) -> Run:
    def walk(begin: Callable[[], None]) -> None:
        import numpy as np

        import collectives
        import topoplan

        plan = topoplan.plan("dgx-1v", "allreduce", gpus=[0, 1])
        begin_as_one_of_two(begin)
        with collectives.Communicator(plan, backend) as comm:
            comm.all_reduce(np.arange(5.0))

    return walk


def sparse_all_reduce_over_shared(begin: Callable[[], None]) -> None:
    import numpy as np

    import collectives
    import topoplan

    plan = topoplan.plan("dgx-1v", "allreduce", gpus=[0, 1])
    started = begin_as_one_of_two()
    with collectives.Communicator(plan, "shared") as comm:
        if started:
            begin()
        comm.sparse_all_reduce(np.arange(500.0), density=0.1)


def hook(begin: Callable[[], None], *, steady: bool) -> None:
    import torch
    import torch.distributed as dist

    import topoplan
    from collectives.torch import HookState, topoplan_hook

    plan = topoplan.plan("dgx-1v", "allreduce", gpus=[0, 1])
    counts = begin_as_one_of_two()
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(50, 50))
    if counts and not steady:
        begin()
    model.register_comm_hook(HookState(plan), topoplan_hook)
    for step in range(3 if steady else 1):
        if counts and steady and step == 2:
            begin()
        model(torch.ones(2, 50)).sum().backward()


def first_step_of_the_hook(begin: Callable[[], None]) -> None:
    hook(begin, steady=False)


def steady_step_of_the_hook(begin: Callable[[], None]) -> None:
    hook(begin, steady=True)


WALKS: dict[str, Run] = {
    "text_to_verified_plan": text_to_verified_plan,
    "plan_of_a_dgx_2": plan_of_a_dgx_2,
    "loopback_all_reduce": loopback_all_reduce,
    "shared_all_reduce": all_reduce_over("shared"),
    "tcp_all_reduce": all_reduce_over("tcp"),
    "shared_sparse_all_reduce": sparse_all_reduce_over_shared,
    "hook_first_step": first_step_of_the_hook,
    "hook_steady_step": steady_step_of_the_hook,
}


def begin_as_one_of_two(begin: Callable[[], None] | None = None) -> bool:
    """Fork a second rank; return whether this process is rank 0, the one that counts."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rank = 0 if os.fork() else 1
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if begin is not None and rank == 0:
        begin()
    return rank == 0


def files_entered(walk: Run) -> list[str]:
    """Return the files of the packages, relative to the repository, whose functions a walk calls."""
    entered: set[str] = set()

    def record(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            entered.add(frame.f_code.co_filename)

    def begin() -> None:
        threading.setprofile(record)
        sys.setprofile(record)

    walk(begin)
    sys.setprofile(None)
    threading.setprofile(None)
    rooms = [f"{ROOT / package}/" for package in ("topoplan", "collectives")]
    return sorted(str(Path(name).relative_to(ROOT)) for name in entered if name.startswith(tuple(rooms)))


def main() -> int:
    """Print the files of every walk as one JSON object."""
    found = {}
    for name, walk in WALKS.items():
        with tempfile.TemporaryFile("w+") as answer:
            process = os.fork()
            if process == 0:
                os.setpgid(0, 0)
                try:
                    files = files_entered(walk)
                    if os.environ.get("RANK", "0") == "0":
                        json.dump(files, answer)
                        answer.flush()
                finally:
                    os._exit(0)
            os.waitpid(process, 0)
            answer.seek(0)
            found[name] = json.load(answer)
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
