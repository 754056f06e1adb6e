"""What carries a group's gradients: memory that its processes share, where they can, or else messages of the group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from collectives.arrays.torch_arrays import TorchArrays
from collectives.backends.backend import Backend
from collectives.backends.shared.backend import SharedBackend
from collectives.backends.torch.backend import TorchBackend
from collectives.backends.torch.open_group import devices_of
from collectives.torch.agreement import Gather
from topoplan.errors import UsageError


def backend_of(
    group: dist.ProcessGroup, gather: Gather, *, timeout: float, shared: bool = True
) -> Backend[Any]:
    """The back end of a group's ranks; all of them must call this.

    Parameters
    ----------
    group : ProcessGroup
    gather : callable
        Over its ranks.
    timeout : float
        Seconds that a rank waits for another one, in each step.
    shared : bool
        Whether tensors on the CPU go through shared memory where all ranks run on one host.
    """
    if shared and set(devices_of(group)) == {"cpu"}:
        arrays: Any = TorchArrays([torch.device("cpu")])
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        try:
            return SharedBackend(gather, rank=rank, size=size, timeout=timeout, arrays=arrays)
        except UsageError:
            pass  # on all ranks: they are on several hosts, or do not see each other
    return TorchBackend(group, timeout=timeout)
