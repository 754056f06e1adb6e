"""What goes wrong on purpose in training with the hook, and what every rank hears of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from collectives.torch import HookState, topoplan_hook
from tests.support.hand_plans import forest_plan
from topoplan.errors import BackendError

TIMEOUT = 2.0
STEP = 2
"""In which it goes wrong."""


def faults(*, last: Callable[[dict[str, Any]], object]) -> None:
    """All faults, one after another; ``last`` is told what happened, also where a rank has been killed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    struck = size - 1
    pids: list[Any] = [None] * size
    dist.all_gather_object(pids, os.getpid())
    groups = [dist.new_group() for _ in range(9)]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun would end us when one of us is killed

    def at(number: int, kind: signal.Signals) -> Callable[[int], None]:
        return lambda step: os.kill(os.getpid(), kind) if (step, rank) == (STEP, number) else None

    found = {
        "nan": _told(groups[0], nan=rank == 1, density=0.1),
        "nan by messages": _told(groups[4], nan=rank == 1, density=0.1, shared=False),
        "sizes": _told(groups[1], cap=100 if rank == 1 else 0.0002),
    }
    found["refused"] = _refused(groups[6])
    found["refused by messages"] = _refused(groups[7], shared=False)
    found["refused where ranks may be lost"] = _refused(groups[8], on_failure="shrink")
    found["stalled by messages"] = _told(groups[5], strike=at(struck, signal.SIGSTOP), shared=False)
    if rank == 0:
        time.sleep(0.2)
        os.kill(pids[struck], signal.SIGCONT)
    dist.barrier()
    found["stalled"] = _told(groups[2], strike=at(struck, signal.SIGSTOP))
    if rank == 0:
        time.sleep(0.2)  # the others are to hear of a rank that does not run
        os.kill(pids[struck], signal.SIGCONT)
    dist.barrier()
    found["killed"] = _told(groups[3], strike=at(struck, signal.SIGKILL))
    last(found)


def _refused(group: Any, **options: Any) -> Any:
    """What comes out of ``backward`` where rank 1 refuses the second of four buckets, and the averages of other steps.

    One is before it, where DDP has yet to arrange its buckets, and three behind it.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    asked = [0]

    def density(step: int) -> float:
        asked[0] += step == 1
        if (rank, asked[0]) == (1, 2):
            raise ValueError("no density is known")
        return 1.0

    plan = forest_plan(size, "allreduce", "chain")
    state = HookState(plan, group=group, timeout=TIMEOUT, density=density, **options)
    network = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(4)])

    class Added(nn.Module):
        """The sum of all layers, whose gradients are sums of what is given."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = network

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            """Return it."""
            return torch.stack([layer(given) for layer in self.layers]).sum(0)

    error, averages = None, []
    for steps in (2, 3):
        # a backward pass that was left ends its DDP, and neither the state nor the group
        ddp = DistributedDataParallel(Added(), process_group=group, bucket_cap_mb=0.00005)
        state.register(ddp)
        for number in range(steps):
            network.zero_grad()
            try:
                ddp(torch.full((1, 4), float(size * number + rank))).sum().backward()
            except BackendError as raised:
                error = f"{type(raised).__name__}: {raised}"
            else:
                averages.append(
                    [float(one.grad.unique().item()) for one in network.parameters() if one.grad is not None]
                )
        del ddp
    kept = max(float(one.abs().max()) for one in state.state_dict()["residuals"].values() or [torch.zeros(1)])
    assert state.communicator is not None
    told = {"error": error, "averages": averages, "kept": kept, "notes": list(state.communicator.notes)}
    state.close()
    return told


def _told(
    group: Any,
    *,
    nan: bool = False,
    cap: float = 0.0002,
    strike: Callable[[int], None] = lambda step: None,
    **options: Any,
) -> Any:
    """What comes out of ``backward``, and in which step; or in which steps all gradients were finite."""
    torch.manual_seed(5)
    network = nn.Sequential(nn.Linear(5, 30), nn.Tanh(), nn.Linear(30, 2))
    size = dist.get_world_size()
    state = HookState(forest_plan(size, "allreduce", "chain"), group=group, timeout=TIMEOUT, **options)
    # where DDP looks for unused parameters, every rank keeps the buckets that it made itself
    ddp = DistributedDataParallel(
        network, process_group=group, bucket_cap_mb=cap, find_unused_parameters=True
    )
    ddp.register_comm_hook(state, topoplan_hook)
    finite = []
    try:
        for step in range(STEP + 2):
            given = torch.full((3, 5), float("nan") if nan and step == STEP else 1.0)
            hidden = ddp(given)
            hidden.register_hook(lambda gradient, step=step: strike(step))
            network.zero_grad()
            hidden.sum().backward()
            finite.append(all(bool(one.grad.isfinite().all()) for one in network.parameters()))
    except BackendError as error:
        return {"error": str(error), "rank": error.rank, "peer": error.peer, "step": step}
    finally:
        state.close()
    return {"finite": finite}
