"""What programs of torch ranks share: how each begins and ends, and what is compared of all ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from collectives.backends.torch.process_groups import wait_for_gloo_threads
from tests.support.rank_scenarios import run_scenarios

LIMIT = timedelta(seconds=60)


def be_rank(group: str = "gloo", *, at_end: Callable[[], object] = lambda: None) -> None:
    """Run the scenarios of the program that calls this, in the folder of its command line."""
    torch.set_num_threads(1)
    dist.init_process_group(group, timeout=LIMIT)
    run_scenarios(sys.argv[1], dist.get_rank(), dist.get_world_size())
    at_end()
    wait_for_gloo_threads()
    dist.destroy_process_group()


def of_all_ranks(one: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, one)
    return every


def same_on_all_ranks(one: Any) -> bool:
    return all(one == other for other in of_all_ranks(one))


def gloo_by_another_name() -> dist.ProcessGroup:
    """A new group that carries no plans."""

    def gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend("elsewhere", gloo, devices=["cpu"])
    return dist.new_group(backend="elsewhere")


def values(network: nn.Module) -> list[float]:
    return torch.cat([one.detach().double().flatten() for one in network.parameters()]).tolist()


def furthest(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))
