"""How ranks of torch end whose gloo threads hardly get a processor: ``torch_exit_ranks.py HOW RUNS`` prints a list.

Two ranks a run are forked from a process that has imported torch already. In each, gloo's threads share a processor
with one that is always busy and has precedence, so that they let go of the last collective's tensors late, as they do
now and then on a busy machine. The list has an exit status for each rank; one that hangs is killed, and told as such.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch._dynamo  # DDP loads it, which takes seconds: not in every rank
import torch.distributed as dist
from hand_plans import forest_plan
from torch import nn

from collectives.torch import HookState, topoplan_hook

PATIENCE = 30.0
"""Seconds that a rank may take."""


class Slow:
    """Takes a while to go with the interpreter, as large programs do."""

    def __del__(self, sleep=time.sleep) -> None:  # type: ignore[no-untyped-def]
        sleep(0.3)


def starve() -> None:
    """From now on gloo's threads run only when a busy process leaves them a little."""
    cpu = max(os.sched_getaffinity(0))
    rank = os.getpid()
    if os.fork() == 0:
        os.sched_setaffinity(0, {cpu})
        while os.getppid() == rank:
            sum(range(20_000))
        os._exit(0)
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "pt_gloo_runloop":
            os.sched_setaffinity(int(task.name), {cpu})
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))


def rank(number: int, port: int, how: str) -> None:
    """Train a little, gather something, and end."""
    os.environ.update(RANK=str(number), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(30, 3))
    state = HookState(forest_plan(2, "allreduce", "star"))
    model.register_comm_hook(state, topoplan_hook)
    for _ in range(2):
        model(torch.ones(8, 30)).square().mean().backward()
    starve()
    dist.all_gather_object([None, None], number)
    if how == "close":
        state.close()
        dist.destroy_process_group()


def status(pid: int, until: float) -> int | str:
    """How a process ended."""
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
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
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
    slow = Slow()
    main(sys.argv[1], int(sys.argv[2]))
