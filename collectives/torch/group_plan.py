"""The plan of a process group: from the file that TOPOPLAN_PLAN names, or made from what the job runs on.

A file is for the whole job. Groups of some of its ranks get plans for their devices on the machine of the file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

import topoplan
from collectives.torch.agreement import Gather
from topoplan.plans.plan import Plans
from topoplan.plans.size_plans import SizePlans

VARIABLE = "TOPOPLAN_PLAN"


def given_plan(members: Sequence[int], world: int) -> Plans | None:
    """The plan that the environment gives for a group; None where it gives none.

    Parameters
    ----------
    members : sequence of int
        The group's ranks in the job.
    world : int
        Ranks of the job.

    Raises
    ------
    UsageError, PlanError, InfeasibleError
        The file cannot be read or is wrong, or there is no plan for these devices of it.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return None
    whole = topoplan.load_plan(path)
    if len(members) == world or len(whole.ranks) != world:
        return whole  # where it has another number of ranks, that is what is to be said
    gpus = [device.name for device in whole.topology.devices if device.kind == "gpu"]
    numbers = [gpus.index(whole.ranks[member]) for member in members]
    plan = topoplan.plan_by_size if isinstance(whole, SizePlans) else topoplan.plan
    made: Plans = plan(whole.topology, "allreduce", gpus=numbers)
    return made


def gather_over(group: dist.ProcessGroup, device: torch.device) -> Gather:
    """The gathering of texts over a process group that torch does not know by name.

    Parameters
    ----------
    group : ProcessGroup
    device : torch.device
        Of tensors that the group takes.
    """

    def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
        outputs = [torch.empty_like(tensor) for _ in range(group.size())]
        group.allgather([outputs], [tensor]).wait()
        return [output.cpu() for output in outputs]

    def gather(text: str) -> list[str]:
        data = text.encode()
        lengths = [int(one) for one in gathered(torch.tensor([len(data)], device=device))]
        padded = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        padded[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
        found = gathered(padded.to(device))
        return [one[:length].numpy().tobytes().decode() for one, length in zip(found, lengths, strict=True)]

    return gather
