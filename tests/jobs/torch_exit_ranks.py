"""How ranks of torch end while a thread of gloo's still drops a tensor: ``torch_exit_ranks.py HOW RUNS`` prints a list.

Two ranks a run are forked from a process that has imported torch already. On rank 0 what hangs on the tensor of the
last collective takes seconds to go, in gloo's thread; else that takes so long on a busy machine only. The list has an
exit status for each rank; one that hangs is killed, and told as such.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress

import torch
import torch._dynamo  # DDP loads it, which takes seconds: not in every rank
import torch.distributed as dist
from torch import nn

from collectives.torch import HookState, topoplan_hook
from tests.support.hand_plans import forest_plan
from tests.support.ports import free_port

PATIENCE = 30.0
"""Seconds that a rank may take."""

SECONDS = 2.0
"""That it takes to drop a tensor."""

GOING, GONE = threading.Event(), threading.Event()
"""A tensor has begun to be dropped, and has been."""


class Load:
    def __del__(self) -> None:
        GOING.set()
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            pass
        GONE.set()


def late() -> None:
    """A last collective, whose tensor gloo's thread of rank 0 has begun to drop."""
    tensor = torch.ones(1)
    if dist.get_rank() == 0:
        tensor.load = Load()  # type: ignore[attr-defined]
    else:
        time.sleep(0.3)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    if dist.get_rank() == 1:
        work.wait()
        return
    del tensor, work
    assert GOING.wait(PATIENCE)


def rank(number: int, port: int, how: str) -> None:
    os.environ.update(RANK=str(number), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(30, 3))
    state = HookState(forest_plan(2, "allreduce", "star"))
    model.register_comm_hook(state, topoplan_hook)
    for _ in range(2):
        model(torch.ones(8, 30)).square().mean().backward()
    late()
    if how == "close":
        state.close()
        if number == 0 and not GONE.is_set():
            sys.exit("close has not waited for gloo's thread")
        dist.destroy_process_group()


def status(pid: int, until: float) -> int | str:
    while time.monotonic() < until:
        found, told = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(told)
        time.sleep(0.01)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hangs"


def main(how: str, runs: int) -> None:
    """Returns in every rank too, so that each ends as any program does."""
    told = []
    for _ in range(runs):
        port = free_port()
        pids = []
        for number in range(2):
            pid = os.fork()
            if pid == 0:
                rank(number, port, how)
                return
            pids.append(pid)
        until = time.monotonic() + PATIENCE
        told += [status(pid, until) for pid in pids]
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]))
