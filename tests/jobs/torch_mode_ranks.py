"""One of two ranks: DDP in every synchronisation mode; what it saw is written to ``OUT/RANK.json``.

The loops are those of a user: no call but `finish` and `close`.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from collectives import ASP, BSP, SSP, LocalSGD, report
from collectives.backends.torch.process_groups import wait_for_gloo_threads
from collectives.torch import HookState, topoplan_hook
from collectives.training.modes import Mode, Straggler
from topoplan.errors import BackendError, UsageError

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
        if isinstance(mode, LocalSGD) and mode.averages_after(step):
            averaged.append(_digest(model))
    state.finish()
    mailbox = getattr(getattr(state.buckets, "_averager", None), "mailbox", None)
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


def linear(mode: Mode, steps: int, *, by_hand: bool = False, straggler: float = 0.0) -> dict[str, Any]:
    """A model whose gradients are its inputs, whole numbers, so that every gradient can be found in the parameters."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layer = nn.Linear(6, 2, bias=False).double()
    nn.init.zeros_(layer.weight)
    model = nn.parallel.DistributedDataParallel(layer)
    state = HookState(mode=mode)
    model.register_comm_hook(state, topoplan_hook)
    optimiser = None if by_hand else torch.optim.SGD(model.parameters(), lr=1.0)
    given = torch.zeros(6, dtype=torch.float64)

    def step() -> None:
        if optimiser is not None:
            optimiser.step()
            return
        with torch.no_grad():
            for one in model.parameters():
                one -= one.grad

    try:
        for number in range(steps):
            inputs = (torch.arange(6) * (rank + 1) + number).double()
            time.sleep(straggler * rank)
            model.zero_grad()
            model(inputs).sum().backward()
            given += inputs
            step()
            if by_hand and mode != LocalSGD(3):
                state.after_step(model.parameters())
        state.finish(step if by_hand else None)
    except UsageError as error:
        state.close()
        return {"error": str(error), "step": state.recorder.step}
    dist.all_reduce(given)
    told = {
        "weights": layer.weight.tolist(),
        "right": [(-given / size).tolist()] * 2,
        "report": str(report(state.recorder)),
        "buckets": len(report(state.recorder).buckets),
    }
    state.close()
    return told


def momentum(mode: Mode) -> dict[str, Any]:
    """Adam, whose steps depend on when a gradient comes; every parameter after `finish`, and after a warning."""
    torch.manual_seed(2)
    model = nn.parallel.DistributedDataParallel(nn.Linear(20, 5))
    state = HookState(mode=mode)
    model.register_comm_hook(state, topoplan_hook)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    digests = []
    for end in range(2):
        for _ in range(5):
            time.sleep(0.01 * dist.get_rank())
            optimiser.zero_grad()
            model(torch.randn(8, 20, generator=generator)).square().mean().backward()
            optimiser.step()
        if not end:
            state.finish()
        digests.append(_digest(model))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.barrier()
        state.close()
    return {"digests": digests, "warnings": [str(one.message) for one in caught]}


class Sharpness(torch.optim.SGD):
    """Sharpness-aware minimisation: moves up, computes gradients there, moves back, and steps by them."""

    def away(self) -> None:
        """Move up."""
        with torch.no_grad():
            for one in self.param_groups[0]["params"]:
                one += 1.0

    def back(self) -> None:
        """Move back, and step."""
        with torch.no_grad():
            for one in self.param_groups[0]["params"]:
                one -= 1.0
        self.step()


def again(name: str) -> dict[str, Any]:
    """Optimisers that compute gradients more than once for a step, on one rank more often than on the other."""
    rank = dist.get_rank()
    layer = nn.Linear(6, 2, bias=False).double()
    nn.init.zeros_(layer.weight)
    model = nn.parallel.DistributedDataParallel(layer)
    state = HookState(mode=LocalSGD(2))
    model.register_comm_hook(state, topoplan_hook)
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    digests, passes = [], 0

    def closure() -> Any:
        nonlocal passes
        passes += 1
        optimiser.zero_grad()
        loss = (model(inputs) - inputs[:, :2]).square().mean()
        loss.backward()
        return loss

    optimiser: Any
    if name == "LBFGS":
        optimiser = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3 + 2 * rank)
    else:
        optimiser = Sharpness(model.parameters(), lr=0.01)
    for _ in range(4):
        if name == "LBFGS":
            optimiser.step(closure)
        else:
            closure()
            optimiser.away()
            closure()
            optimiser.back()
        digests.append(_digest(model))
    state.finish()
    told = {"digests": digests, "passes": passes, "steps": state.recorder.step}
    state.close()
    return told


def uneven(shared: bool) -> str | None:
    """What rank 0 hears when rank 1 has fewer batches."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    state = HookState(timeout=2.0, shared=shared)
    model.register_comm_hook(state, topoplan_hook)
    found = None
    try:
        for _ in range(4 - dist.get_rank()):
            model(torch.ones(3)).sum().backward()
    except BackendError as error:
        found = str(error)
    state.finish()
    state.close()
    return found


def _digest(model: nn.Module) -> str:
    return str(
        hash(tuple(value for one in model.parameters() for value in one.detach().reshape(-1).tolist()))
    )


def main() -> None:
    """Run all modes."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    told: dict[str, Any] = {str(mode): trained(mode, rank, size) for mode in MODES}
    told["linear"] = {str(mode): linear(mode, 10, straggler=0.005) for mode in MODES}
    told["uneven linear"] = {
        str(mode): linear(mode, 10 + rank) for mode in MODES if not isinstance(mode, BSP)
    }
    told["by hand"] = {
        str(mode): linear(mode, 7, by_hand=True) for mode in (SSP(1), LocalSGD(2), LocalSGD(3))
    }
    told["short"] = linear(LocalSGD(100), 3)
    told["pulled"] = linear(LocalSGD(3, proximal=0.25), 5)
    told["momentum"] = {str(mode): momentum(mode) for mode in MODES}
    told["again"] = {name: again(name) for name in ("LBFGS", "SAM")}
    told["uneven"] = uneven(shared=True)
    Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(told), encoding="utf-8")
    dist.barrier()
    wait_for_gloo_threads()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
