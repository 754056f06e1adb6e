"""The process groups beneath a planned one: gloo for the CPU, and NCCL where there are GPUs, twice.

Plans run in a thread of their own, and what they do not carry is called by the caller's. Gloo tells the messages of
both apart by tags. NCCL does not: calls on one communicator match in the order in which they come, so that a barrier
right after an allreduce by plan in the background could meet that allreduce on another rank. So messages of plans have
a communicator of their own. (To let the others wait for the plans instead would be a deadlock where one rank receives
after a collective what its peer sends before it.) NCCL makes a communicator, and takes its memory, when it is first
used.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from collectives.backends.torch.open_group import PATIENCE

DELEGATED = (
    "_end_coalescing",
    "_get_backend",
    "_get_sequence_number_for_group",
    "_set_sequence_number_for_group",
    "_start_coalescing",
    "_wait_for_pending_works",
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


@dataclass(frozen=True, slots=True)
class InnerGroups:
    """What is beneath a planned group.

    Parameters
    ----------
    others : ProcessGroup
        For everything that is not by plan.
    plans : ProcessGroup
        For messages of plans over NCCL; where there is none, the same.
    served : str
        What serves which kind of device, as "cpu:gloo,cuda:nccl".
    """

    others: dist.ProcessGroup
    plans: dist.ProcessGroup
    served: str


def inner_groups(store: Store, rank: int, size: int, timeout: timedelta) -> InnerGroups:
    """The groups of a rank; steps of plans must end in the timeout, and their NCCL group has twice the time."""
    kind = dist.ProcessGroup.BackendType
    others = dist.ProcessGroup(store, rank, size)
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)
    others._set_default_backend(kind.GLOO)
    others._register_backend(torch.device("cpu"), kind.GLOO, gloo)
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return InnerGroups(others, others, "cpu:gloo")

    def nccl(name: str, limit: timedelta) -> dist.ProcessGroupNCCL:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(PrefixStore(name, store), rank, size, options)

    others._register_backend(torch.device("cuda"), kind.NCCL, nccl("nccl", timeout))
    plans = dist.ProcessGroup(store, rank, size)
    plans._set_default_backend(kind.NCCL)
    plans._register_backend(torch.device("cuda"), kind.NCCL, nccl("nccl of plans", PATIENCE * timeout))
    return InnerGroups(others, plans, "cpu:gloo,cuda:nccl")
