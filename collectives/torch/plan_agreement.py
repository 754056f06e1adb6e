"""Agree on the plan and the settings of a process group: all ranks have the same, or all raise the same error."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

import topoplan
from collectives.backends.torch.process_groups import devices_of
from collectives.communicator.job_plan import PlanLike, agree_on_input, agree_on_plan
from collectives.peers.agreement import Gather, check_still_wanted, gather_or_raise, plan_on_one_rank
from collectives.training.exchange_settings import ExchangeSettings
from topoplan.errors import InfeasibleError, TopoplanError, UsageError
from topoplan.plans.plan import Plans
from topoplan.plans.size_plans import SizePlans

PLAN_VARIABLE = "TOPOPLAN_PLAN"
ON_FAILURE = "TOPOPLAN_ON_FAILURE"


@dataclass(frozen=True, slots=True)
class PlanAgreement:
    """The plan that the ranks have agreed on, or the reason for none; `reason` is empty with a plan."""

    plan: Plans | None
    reason: str = ""


def agreed_plan(plan: PlanLike | None, group: dist.ProcessGroup, gather: Gather) -> PlanAgreement:
    """Return the plan that all ranks have and that fits their group; all of them must call this.

    `plan` is as in `plan_of`; None makes one for the job. Raises `UsageError`, with the same text on all ranks, if a
    given plan is invalid, not for this group, or not that of the others.
    """
    rank, size = group.rank(), group.size()
    try:
        gather_or_raise(gather, lambda: str(devices_of(group)))  # else its messages cannot carry a plan
    except TopoplanError as error:
        return PlanAgreement(None, str(error))
    try:
        job_input = agree_on_input(gather, plan, size=size, where="the process group")
        if job_input is not None:
            return PlanAgreement(agree_on_plan(gather, job_input, rank=rank, size=size))
    except TopoplanError as error:
        raise UsageError(str(error)) from None
    try:
        return PlanAgreement(agree_on_plan(gather, None, rank=rank, size=size))
    except TopoplanError as error:
        return PlanAgreement(None, f"no plan can be made of this job: {error}")


def agreed_file(
    group: dist.ProcessGroup, gather: Gather, members: Sequence[int], world: int
) -> PlanAgreement:
    """Return `agreed_plan` for the plan in the environment, if any; `members` are the group's ranks in a job of
    `world` ranks."""
    rank = group.rank()
    read: list[Plans | None] = []

    def whole() -> str:
        try:
            path = os.environ.get(PLAN_VARIABLE)
            read.append(topoplan.load_plan(path) if path else None)
        except TopoplanError as error:
            raise UsageError(f"{PLAN_VARIABLE}: {error}") from error
        return "" if read[0] is None else read[0].digest

    digests = gather_or_raise(gather, whole)
    plan = read[0]
    # a plan that differs between ranks, or has another number of ranks than the job, is refused as it is
    if plan is None or len(set(digests)) > 1 or len(members) == world or len(plan.ranks) != world:
        return agreed_plan(plan, group, gather)
    try:
        part = plan_on_one_rank(gather, _plan_for_members(plan, members), rank=rank)
    except InfeasibleError as error:
        return PlanAgreement(None, str(error))
    return agreed_plan(part, group, gather)


def _plan_for_members(plan: Plans, members: Sequence[int]) -> Callable[[], Plans]:
    gpus = [device.name for device in plan.topology.devices if device.kind == "gpu"]
    numbers = [gpus.index(plan.ranks[member]) for member in members]
    make = topoplan.plan_by_size if isinstance(plan, SizePlans) else topoplan.plan
    return lambda: make(plan.topology, "allreduce", gpus=numbers, progress=check_still_wanted)


def agreed_settings(make: Callable[[], ExchangeSettings], gather: Gather) -> ExchangeSettings:
    """Return the settings of `make` once all ranks have the same; all of them must call this.

    Raises `UsageError`, with the same text on all ranks, if `make` raises on some rank, or ranks differ.
    """
    made: list[ExchangeSettings] = []

    def text() -> str:
        made.append(make())
        return f"{made[0]}"

    _agreed_text(gather, text)
    return made[0]


def _agreed_text(gather: Gather, text: Callable[[], str], name: str = "") -> str:
    first, *others = gather_or_raise(gather, text)
    for rank, one in enumerate(others, start=1):
        if one != first:
            raise UsageError(f"rank {rank} has {name}{one}, and rank 0 {first}; give all ranks the same")
    return first


def gather_by(group: dist.ProcessGroup) -> Gather:
    """Return the gathering of texts over a process group."""

    def gather(text: str) -> list[str]:
        texts = [""] * dist.get_world_size(group)
        dist.all_gather_object(texts, text, group=group)
        return texts

    return gather


def gather_over(group: dist.ProcessGroup, device: torch.device) -> Gather:
    """Return the gathering of texts over a process group without a name in torch; it takes tensors on `device`."""

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


def agreed_on_failure(gather: Gather) -> str:
    """Return the reaction to failures in the environment of all ranks: "raise" or "shrink"; all must call this.

    Raises `UsageError`, with the same text on all ranks, for another value, or if ranks differ.
    """

    def text() -> str:
        found = os.environ.get(ON_FAILURE) or "raise"
        if found not in ("raise", "shrink"):
            raise UsageError(f"{ON_FAILURE} must be raise or shrink, got {found!r}")
        return found

    return _agreed_text(gather, text, f"{ON_FAILURE}=")
