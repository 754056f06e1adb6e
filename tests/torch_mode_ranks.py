"""One rank of a torchrun job: DDP in every synchronisation mode; rank 0 prints what all ranks saw as JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from collectives import ASP, BSP, SSP, LocalSGD, report
from collectives.staleness.modes import Mode
from collectives.staleness.simulated_straggler import Straggler
from collectives.torch import HookState, topoplan_hook

STEPS = 12
MODES: tuple[Mode, ...] = (BSP(), SSP(1), ASP(), LocalSGD(4))


def trained(mode: Mode, rank: int, size: int) -> dict[str, Any]:
    """Parameters after a few steps of plain SGD on whole numbers, and how far clocks were apart."""
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 3)).double(), bucket_cap_mb=0.005
    )
    state = HookState(mode=mode)
    model.register_comm_hook(state, topoplan_hook)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    straggler = Straggler(rank=1, factor=3, first=4, last=9)
    averaged = []
    for step in range(STEPS):
        inputs = torch.randn(8, 30, generator=generator, dtype=torch.float64)
        straggler.hold_up(rank, step, 0.01)
        optimiser.zero_grad()
        model(inputs).square().mean().backward()
        optimiser.step()
        state.after_step(model.parameters())
        if isinstance(mode, LocalSGD) and mode.averages_after(step):
            averaged.append(_digest(model))
    if state.finish():
        optimiser.step()
    mailbox = getattr(getattr(state.buckets, "_exchange", None), "mailbox", None)
    told = {
        "digest": _digest(model),
        "values": [value for one in model.parameters() for value in one.detach().reshape(-1)[:5].tolist()],
        "averaged": averaged,
        "farthest": None if mailbox is None else mailbox.farthest,
        "how": sorted({row.how for row in report(state.recorder).buckets})
        if state.recorder.exchanges()
        else [],
    }
    dist.barrier()
    state.close()
    return told


def _digest(model: nn.Module) -> str:
    return str(
        hash(tuple(value for one in model.parameters() for value in one.detach().reshape(-1).tolist()))
    )


def main() -> None:
    """Run all modes."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    told = {str(mode): trained(mode, rank, size) for mode in MODES}
    everything: list[Any] = [None] * size
    dist.all_gather_object(everything, told)
    if rank == 0:
        print(json.dumps(everything), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # DDP leaves gloo's threads behind (torch 2.13, also without hooks): on a busy machine they may let go of a tensor
    # when the interpreter is gone already, and abort the process
    os._exit(0)
