"""By which plan the ranks of a process group exchange, and over what, or why by none: all of them decide alike.

The plan is the given one, or that of the file which TOPOPLAN_PLAN names, or it is made of what the job runs on. A file
is for the whole job; groups of some of its ranks get plans for their devices on the machine of the file. What a rank
finds wrong it tells the others, and it ends it for all (`collectives.peers.error_rounds`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

import topoplan
from collectives.backends.torch.open_group import devices_of
from collectives.job.given_plan import GivenPlan, given_alike, plan_for_all
from collectives.peers.error_rounds import Gather, say_all, still_wanted
from collectives.peers.plan_by_one import plan_by_one
from collectives.training.exchange_settings import ExchangeSettings
from topoplan.errors import InfeasibleError, TopoplanError, UsageError
from topoplan.plans.plan import Plans
from topoplan.plans.size_plans import SizePlans

VARIABLE = "TOPOPLAN_PLAN"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the ranks have agreed on.

    Parameters
    ----------
    plan : Plan or SizePlans or None
    reason : str
        Why there is no plan; empty where there is one.
    """

    plan: Plans | None
    reason: str = ""


def agreed_plan(plan: GivenPlan | None, group: dist.ProcessGroup, gather: Gather) -> Verdict:
    """The plan that all ranks have and that fits their group; all of them must call this.

    Parameters
    ----------
    plan : Plan, SizePlans, Topology, str, path or None
        As `plan_of` takes it; None to make one of what the job runs on.
    group : ProcessGroup
    gather : callable
        Over the ranks of the group.

    Raises
    ------
    UsageError
        The plan that a rank was given is none, or is not for this group, or not that of the others; on all ranks, with
        the same text.
    """
    rank, size = group.rank(), group.size()
    try:
        say_all(gather, lambda: str(devices_of(group)))  # else its messages cannot carry a plan
    except TopoplanError as error:
        return Verdict(None, str(error))
    try:
        meant = given_alike(gather, plan, size=size, where="the process group")
        if meant is not None:
            return Verdict(plan_for_all(gather, meant, rank=rank, size=size))
    except TopoplanError as error:
        raise UsageError(str(error)) from error
    try:
        return Verdict(plan_for_all(gather, None, rank=rank, size=size))
    except TopoplanError as error:
        return Verdict(None, f"no plan can be made of this job: {error}")


def agreed_file(group: dist.ProcessGroup, gather: Gather, members: Sequence[int]) -> Verdict:
    """As `agreed_plan`, for the plan that the environment gives, if it gives one.

    Parameters
    ----------
    group : ProcessGroup
    gather : callable
        Over its ranks.
    members : sequence of int
        Its ranks, as those of the job are counted.
    """
    rank = group.rank()
    read: list[Plans | None] = []

    def whole() -> str:
        try:
            path = os.environ.get(VARIABLE)
            read.append(topoplan.load_plan(path) if path else None)
        except TopoplanError as error:
            raise UsageError(f"{VARIABLE}: {error}") from error
        return "" if read[0] is None else read[0].digest

    digests, world = say_all(gather, whole), dist.get_world_size()
    plan = read[0]
    # what differs, or has another number of ranks than the job, is refused as it is
    if plan is None or len(set(digests)) > 1 or len(members) == world or len(plan.ranks) != world:
        return agreed_plan(plan, group, gather)
    try:
        part = plan_by_one(gather, _for_members(plan, members), rank=rank)
    except InfeasibleError as error:
        return Verdict(None, str(error))
    return agreed_plan(part, group, gather)


def _for_members(plan: Plans, members: Sequence[int]) -> Callable[[], Plans]:
    """What plans for some ranks of a job on the machine of its plan."""
    gpus = [device.name for device in plan.topology.devices if device.kind == "gpu"]
    numbers = [gpus.index(plan.ranks[member]) for member in members]
    make = topoplan.plan_by_size if isinstance(plan, SizePlans) else topoplan.plan
    return lambda: make(plan.topology, "allreduce", gpus=numbers, progress=still_wanted)


def agreed_settings(make: Callable[[], ExchangeSettings], gather: Gather, more: str = "") -> ExchangeSettings:
    """The settings of this rank, which are those of all; all of them must call this.

    Parameters
    ----------
    make : callable
        Raises what is wrong with them.
    gather : callable
        Over all ranks.
    more : str
        What must be alike besides, as it is told.

    Raises
    ------
    UsageError
        An argument is out of range on some rank, or ranks differ; on all ranks, with the same text.
    """
    made: list[ExchangeSettings] = []

    def told() -> str:
        made.append(make())
        return f"{made[0]}{more}"

    first, *others = say_all(gather, told)
    for rank, one in enumerate(others, start=1):
        if one != first:
            raise UsageError(f"rank {rank} has {one}, and rank 0 {first}; give all ranks the same settings")
    return made[0]


def gather_by(group: dist.ProcessGroup) -> Gather:
    """The gathering of texts over a process group."""

    def gather(text: str) -> list[str]:
        texts = [""] * dist.get_world_size(group)
        dist.all_gather_object(texts, text, group=group)
        return texts

    return gather


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
