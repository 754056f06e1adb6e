"""A step of training under the DDP hook, against DDP with its own allreduce over gloo in the same processes.

A step is a forward and a backward pass over parameters that need next to no computing, so what is measured is the
averaging of their gradients. All contenders run once in every round, in another order each time; a time is that from
the last rank's start to the last rank's end. ``python -m tests.bench hook`` starts the processes with torchrun.
"""

from __future__ import annotations

import os
import random
import socket
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from typing import Any

import topoplan

MEGABYTES = (1, 16, 64)
PROCESSES = 4
RUNS = 9
PARAMETERS = 8
WARM = 12
"""Steps before the first that counts: DDP arranges its buckets anew, and chunk sizes are tried."""

BUILT_IN = "built-in"


def main() -> None:
    """Start the processes, which print what they measured."""
    if find_spec("torch") is None:
        print("not measured: torch is not installed")
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    starter = [sys.executable, "-m", "torch.distributed.run", *address, "--nproc-per-node", str(PROCESSES)]
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([*starter, "-m", "tests.bench.hook"], check=True, env={**os.environ, **settings})


def work() -> None:
    """What each process does."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=range(PROCESSES))
    contenders: dict[str, dict[str, Any] | None] = {
        BUILT_IN: None,
        "by plan": {},
        "by messages": {"shared": False},
        "in bfloat16": {"compress": "bfloat16"},
        "density 0.01": {"density": 0.01},
    }
    if dist.get_rank() == 0:
        print(
            f"a step of {PROCESSES} processes, float32, plan for {PROCESSES} GPUs of a DGX-1V, median of {RUNS}:"
        )
    for megabytes in MEGABYTES:
        models = {name: _model(megabytes, plan, options) for name, options in contenders.items()}
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for run in range(WARM + RUNS):
            for name in random.Random(run).sample(list(models), len(models)):
                took = _step(models[name][0])
                if run >= WARM:
                    seconds[name].append(took)
        for _, state in models.values():
            if state is not None:
                state.close()
        if dist.get_rank() == 0:
            _print(megabytes, {name: statistics.median(times) for name, times in seconds.items()})
    dist.destroy_process_group()


def _model(megabytes: int, plan: Any, options: dict[str, Any] | None) -> tuple[Any, Any]:
    """Parameters of so many megabytes under DDP, and the state of its hook."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from collectives.torch import HookState, topoplan_hook

    class Parameters(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            count = (megabytes << 18) // PARAMETERS
            self.slopes = torch.randn(count, generator=torch.Generator().manual_seed(dist.get_rank()))
            self.parts = torch.nn.ParameterList([torch.zeros(count) for _ in range(PARAMETERS)])

        def forward(self) -> torch.Tensor:
            return torch.stack([torch.dot(part, self.slopes) for part in self.parts]).sum()

    model = DistributedDataParallel(Parameters(), gradient_as_bucket_view=True)
    state = None if options is None else HookState(plan, **options)
    if state is not None:
        model.register_comm_hook(state, topoplan_hook)
    return model, state


def _step(model: Any) -> float:
    """Seconds from when the last rank begins to when the last one ends."""
    import torch
    import torch.distributed as dist

    model.zero_grad(set_to_none=False)
    dist.barrier()
    began = time.monotonic()
    model().backward()
    span = torch.tensor([began, time.monotonic()], dtype=torch.float64)
    dist.all_reduce(span, dist.ReduceOp.MAX)
    return float(span[1] - span[0])


def _print(megabytes: int, medians: dict[str, float]) -> None:
    rival = medians[BUILT_IN]
    print(f"  {megabytes:3d} MB  built-in gloo {rival * 1e3:8.1f} ms")
    for name, ours in medians.items():
        if name != BUILT_IN:
            print(f"          {name:14s} {ours * 1e3:8.1f} ms  ratio {rival / ours:.2f} x", flush=True)


if __name__ == "__main__":
    work()
