"""What one of three processes does for the tests of uneven inputs, of collectives beside the hook, and of checkpoints.

Started by torchrun, it writes ``OUT/RANK.json``.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from collectives import GradientSynchronizer
from collectives.torch import HookState
from collectives.training.gradient_filters import Significance
from collectives.training.low_rank import LowRank
from tests.jobs.torch_hook_ranks import batch, furthest, model, plan, trained, values, wrapped
from topoplan.errors import BackendError, UsageError

BATCHES = (4, 6, 0)
"""Of each rank: the last never has any."""

RATE = 0.1


def digest(one: list[float]) -> str:
    return hashlib.sha256(np.array(one).tobytes()).hexdigest()


def by_hand(divide_by: str) -> list[float]:
    """The parameters after all steps, computed by one process from the batches of all."""
    network = model()
    for step in range(max(BATCHES)):
        there = [rank for rank, count in enumerate(BATCHES) if step < count]
        total = [torch.zeros_like(one) for one in network.parameters()]
        for rank in there:
            network.zero_grad()
            given, target = batch(step, rank=rank)
            (network(given, "all") - target).square().mean().backward()
            for kept, one in zip(total, network.parameters(), strict=True):
                assert one.grad is not None
                kept += one.grad
        with torch.no_grad():
            for kept, one in zip(total, network.parameters(), strict=True):
                one.sub_(kept, alpha=RATE / (len(there) if divide_by == "present" else len(BATCHES)))
    return values(network)


def uneven() -> dict[str, Any]:
    """How far parameters are from those by hand, and whether ranks have the same bits."""
    mine = range(BATCHES[dist.get_rank()])
    right = {divide_by: by_hand(divide_by) for divide_by in ("present", "all")}
    found: dict[str, Any] = {}

    def run(
        name: str,
        divide_by: str | None,
        join: Callable[[HookState, DistributedDataParallel], AbstractContextManager[Any]],
        options: dict[str, Any] | None = None,
        how: dict[str, Any] | None = None,
        group: Any = None,
    ) -> None:
        state = HookState(plan(), group=group, **(options or {}))
        ddp = wrapped(model(), state, process_group=group, **(how or {}))
        with join(state, ddp):
            trained(ddp, steps=mine)
        end = values(ddp.module)
        far = None if divide_by is None else furthest(end, right[divide_by])
        found[name] = {"furthest": far, "digest": digest(end), "steps": state.recorder.step}
        state.close()

    small = {"bucket_cap_mb": 0.0005}
    for divide_by in ("present", "all"):

        def join(state: HookState, ddp: DistributedDataParallel, by: str = divide_by) -> Any:
            return state.join(ddp, divide_by=by)

        run(f"one bucket, {divide_by}", divide_by, join)
        run(f"several, {divide_by}", divide_by, join, how=small)
        run(f"codes, {divide_by}", divide_by, join, {"codes": 16})
    run(
        "unused", "present", lambda state, ddp: state.join(ddp), how={"find_unused_parameters": True, **small}
    )
    run("torch's own", "all", lambda state, ddp: ddp.join(), how=small)
    filters: dict[str, dict[str, Any]] = {"sparse": {"density": 0.1}, "low rank": {"low_rank": 1}}
    for name, options in filters.items():
        run(name, None, lambda state, ddp: state.join(ddp), options, small)

    def gloo(store: Any, rank: int, size: int, limit: timedelta) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, limit)

    dist.Backend.register_backend("elsewhere", gloo, devices=["cpu"])
    group = dist.new_group(backend="elsewhere")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no plan carries it
        run("built-in", "present", lambda state, ddp: state.join(ddp), group=group)
    return found


def refused_joins() -> dict[str, str]:
    """What is said of torch's own join where averages would be wrong, and of ours where it has no sense."""
    found = {}
    late = HookState(plan(), mode="local:2")
    for name, given in {"mode": wrapped(model(), late), "no model": model()}.items():
        try:
            with late.join(given):  # type: ignore[arg-type]
                pass
        except UsageError as error:
            found[name] = str(error)
    late.close()
    state = HookState(plan(), timeout=20)
    ddp = wrapped(model(), state)
    try:
        with ddp.join(divide_by_initial_world_size=False):
            trained(ddp, steps=range(2 if dist.get_rank() else 1))
    except (UsageError, BackendError) as error:
        found["torch's own"] = str(error)
    state.close()
    dist.barrier()
    return found


def raised() -> str:
    """What is said where the first rank raises something inside join, and the others have data."""
    rank, group = dist.get_rank(), dist.new_group()
    state = HookState(plan(), group=group, timeout=20)
    ddp = wrapped(model(), state, process_group=group)
    try:
        with state.join(ddp):
            trained(ddp, steps=range(2))
            if rank == 0:
                ddp(batch(2)[0], "all")
                raise ValueError("no such picture")
            trained(ddp, steps=range(2, 4))
    except (ValueError, BackendError) as error:
        said = str(error)
    state.close()
    dist.barrier()
    return said


def loops() -> dict[str, Any]:
    """A loop without DDP, whose ranks have unequally many batches."""
    found: dict[str, Any] = {}

    def gradients(network: nn.Module, step: int) -> list[torch.Tensor]:
        network.zero_grad()
        given, target = batch(step)
        (network(given, "all") - target).square().mean().backward()
        return [one.grad for one in network.parameters()]  # type: ignore[misc]  # all are used

    for name, by_use in (("use", True), ("parameters", False)):
        network = model()
        weights = [one.detach() for one in network.parameters()]

        def use(averages: list[torch.Tensor], weights: list[torch.Tensor] = weights) -> None:
            for one, average in zip(weights, averages, strict=True):
                one -= RATE * average

        left: dict[str, Any] = {"use": use} if by_use else {"parameters": weights}
        synchronizer = GradientSynchronizer(weights, plan(), backend="torch", bucket_bytes=600)
        with synchronizer, synchronizer.join(**left):
            for step in range(BATCHES[dist.get_rank()]):
                use(synchronizer.step(gradients(network, step)))
        end = values(network)
        found[name] = {"furthest": furthest(end, by_hand("present")), "digest": digest(end)}
    return found


class SumOverRanks(torch.autograd.Function):
    """A sum over all ranks in forward, and of the gradients in backward, as batch normalisation over ranks needs it."""

    @staticmethod
    def forward(context: Any, given: torch.Tensor) -> torch.Tensor:
        total = given.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (total,) = (one.clone() for one in gradients)
        dist.all_reduce(total)
        return total


class Normalised(nn.Module):
    """Layers between which values are normalised by mean and variance of the batches of all ranks."""

    def __init__(self, total: Callable[[torch.Tensor], torch.Tensor], ranks: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        widths = (6, 40, 30, 3)
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))
        self.total, self.ranks = total, ranks
        self.double()

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            given = layer(given)
            sums = self.total(torch.stack([given.sum(0), given.square().sum(0)])) / (8 * self.ranks)
            given = torch.tanh((given - sums[0]) / (sums[1] - sums[0].square() + 1e-5).sqrt())
        return given


def beside() -> dict[str, Any]:
    """Collectives of a model in forward and backward beside the hook, against one process with the batches of all."""
    size, found = dist.get_world_size(), {}
    alone = Normalised(lambda one: one, size)
    for step in range(4):
        alone.zero_grad()
        pairs = [batch(step, rank=rank) for rank in range(size)]
        given, target = (torch.cat(one) for one in zip(*pairs, strict=True))
        _scaled(alone(given), target, size).backward()
        _descend(alone)
    for name, options in {
        "one": {"bucket_cap_mb": 100.0},
        "several": {"bucket_cap_mb": 0.0005},
        "sparse": {"bucket_cap_mb": 0.0005},
    }.items():
        state = HookState(plan(), density=1.0 if name == "sparse" else None)
        ddp = wrapped(Normalised(SumOverRanks.apply, size), state, **options)
        for step in range(4):
            ddp.zero_grad()
            given, target = batch(step)
            _scaled(ddp(given), target, 1).backward()
            _descend(ddp)
        found[name] = furthest(values(ddp.module), values(alone))
        state.close()
    return found


def _scaled(found: torch.Tensor, target: torch.Tensor, ranks: int) -> Any:
    return (found - target).square().sum() / 8 / ranks


def _descend(network: nn.Module) -> None:
    with torch.no_grad():
        for one in network.parameters():
            assert one.grad is not None
            one.sub_(one.grad, alpha=RATE)


def restored() -> dict[str, Any]:
    """Runs under filters that stop in the middle and go on from a file, in the same buckets and in others."""
    found: dict[str, Any] = {}
    filters: dict[str, dict[str, Any]] = {
        "low rank": {"low_rank": 1},
        "layers": {"low_rank": LowRank(1, begins=0, matrices="layers")},
        "codes": {"codes": 8},
        "significance": {"significance": 0.02},
        "admission": {"significance": Significance(0.02, admission=2, width=1024)},
    }
    for name, options in filters.items():
        same: dict[str, Any] = {"find_unused_parameters": True, "bucket_cap_mb": 0.0005}
        whole, *_ = _run(options, range(8), None, same)
        _, model_then, hook_then, _ = _run(options, range(4), None, same)
        file = Path(sys.argv[1], f"{dist.get_rank()}.pt")
        torch.save({"model": model_then, "hook": hook_then}, file)
        again, *_, told = _run(options, range(4, 8), torch.load(file), same)
        blank = {**hook_then, "filters": {"filter": "", "residuals": {}, "arrays": {}}}
        without, *_ = _run(options, range(4, 8), {"model": model_then, "hook": blank}, same)
        other = _run(options, range(4, 8), torch.load(file), {"bucket_cap_mb": 0.0015})
        _, model_then, hook_then, _ = _run(options, range(4), None, same, given=True)
        saved = {"model": model_then, "hook": hook_then}
        given = _run(options, range(4, 8), saved, {"bucket_cap_mb": 0.0015}, given=True)
        found[name] = {
            "same": again == whole,
            "told": told,
            "without": without == whole,
            "other buckets": other[3],
            "given": given[3],
            "digest": digest(other[0]),
        }
    return found


def _run(
    options: dict[str, Any], steps: range, loaded: Any, how: dict[str, Any], *, given: bool = False
) -> tuple[Any, ...]:
    """The parameters in the end, the states of model and hook, and the warnings; the hook may be given the order."""
    network = model()
    state = HookState(plan(), parameters=network.parameters() if given else None, **options)
    ddp = wrapped(network, state, **how)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if loaded is not None:
            ddp.load_state_dict(loaded["model"])
            state.load_state_dict(loaded["hook"])
        end = trained(ddp, steps=steps)
    states = {key: one.clone() for key, one in ddp.state_dict().items()}, state.state_dict()
    state.close()
    return end, *states, [str(one.message) for one in caught if "checkpoint" in str(one.message)]


def conserved() -> dict[str, float]:
    """By how much averages and residuals miss gradients, where branches are unused on some ranks, or on all."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), {}
    uses: dict[str, Callable[[int], str]] = {
        "on all": lambda step: "both" if step < 2 else "left" if step < 4 else "both",
        "on one": lambda step: "both" if (step + rank) % 2 else "left",
    }
    for name, use in uses.items():
        network, alone = model(), model()
        late = Significance(0.002, admission=3)  # so that more is kept than the threshold
        state = HookState(plan(), significance=late, parameters=network.parameters())
        ddp = wrapped(network, state, find_unused_parameters=True, bucket_cap_mb=0.0005)
        missed = [torch.zeros_like(one) for one in alone.parameters()]
        for step in range(6):
            given, target = batch(step)
            for module, sign in ((alone, 1), (ddp, -1)):
                module.zero_grad()
                (module(given, use(step)) - target).square().mean().backward()
                for total, one in zip(missed, module.parameters(), strict=True):
                    if one.grad is not None:
                        total += sign * one.grad
        left = state.state_dict()["filters"]["residuals"]
        for number, total in enumerate(missed):
            for kept in left.get(f"parameter {number}", []):
                total -= kept.view_as(total)
            dist.all_reduce(total)
        found[name] = max(float(total.abs().max()) for total in missed) / size
        state.close()
    return found


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    stages = (uneven, loops, beside, conserved, restored, refused_joins, raised)
    found = {stage.__name__: stage() for stage in stages}
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
