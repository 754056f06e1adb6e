"""The process group beneath a planned one: gloo for the CPU, and NCCL where there are GPUs."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

DELEGATED = (
    "_end_coalescing",
    "_get_backend",
    "_get_sequence_number_for_group",
    "_set_sequence_number_for_group",
    "_start_coalescing",
    "_wait_for_pending_works",
    "abort",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
    "set_timeout",
)
"""What the process group beneath does as it is; releases of torch that lack one of these do not ask for it."""


def inner_group(store: Store, rank: int, size: int, timeout: timedelta) -> tuple[dist.ProcessGroup, str]:
    """The process group, and what serves which kind of device in it."""
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)
    group._set_default_backend(kind.GLOO)
    group._register_backend(torch.device("cpu"), kind.GLOO, gloo)
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return group, "cpu:gloo"
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
    group._register_backend(torch.device("cuda"), kind.NCCL, nccl)
    return group, "cpu:gloo,cuda:nccl"
