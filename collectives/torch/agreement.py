"""By which plan the ranks of a process group exchange gradients, or why by none: all of them decide alike.

Every rank tells the others, once, what plan it has and what it finds wrong; one that finds something ends it for all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from collectives.backends.torch.open_group import devices_of
from collectives.execution.plan_store import PlanStore
from collectives.job.plan import GivenPlan, job_plan, plan_of
from topoplan.errors import TopoplanError, UsageError
from topoplan.plans.plan import Plan
from topoplan.plans.size_plans import SizePlans

Plans = Plan | SizePlans
Gather = Callable[[str], list[str]]
"""From a text of this rank to those of all ranks, in their order."""


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


def gather_by(group: dist.ProcessGroup) -> Gather:
    """The gathering of texts over a process group."""

    def gather(text: str) -> list[str]:
        texts = [""] * dist.get_world_size(group)
        dist.all_gather_object(texts, text, group=group)
        return texts

    return gather


def agreed_plan(plan: GivenPlan | None, group: dist.ProcessGroup, gather: Gather) -> Verdict:
    """The plan that all ranks have and that fits their group; all of them must call this.

    Parameters
    ----------
    plan : Plan, SizePlans, Topology, str, path or None
        As `plan_of` takes it; None to make one from what the job runs on.
    group : ProcessGroup
    gather : callable
        Over the ranks of the group.

    Raises
    ------
    UsageError
        The plan that a rank was given is none, or is not for this group, or not that of the others; on all ranks, with
        the same text.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    unserved = _first(gather(_unserved(group)))
    if unserved:
        return Verdict(None, unserved)
    made: Plans | None = None
    fault = ""
    if any(gather("" if plan is None else "given")):
        try:
            made = _meant(plan, size)
        except TopoplanError as error:
            fault = str(error)
        verdict = _agreed(made, fault, gather)
        if verdict.plan is None:
            raise UsageError(verdict.reason)
        return verdict
    try:
        made = job_plan(gather, rank=rank, size=size)
    except TopoplanError as error:
        made, fault = None, f"no plan can be made of this job: {error}"
    return _agreed(made, fault, gather)


def _unserved(group: dist.ProcessGroup) -> str:
    """Why the messages of a plan cannot travel over a group; empty if they can."""
    try:
        devices_of(group)
    except TopoplanError as error:
        return str(error)
    return ""


def _meant(plan: GivenPlan | None, size: int) -> Plans:
    """The plan that this rank was given, checked."""
    if plan is None:
        raise UsageError("this rank was given no plan and others were; give all ranks the same plan")
    meant = plan_of(plan, size=size)
    try:
        PlanStore(meant)
    except TopoplanError as error:
        raise UsageError(f"the plan was refused: {error}") from error
    return meant


def _agreed(plan: Plans | None, fault: str, gather: Gather) -> Verdict:
    """The verdict of all ranks on the plan that each of them has."""
    digest = "" if plan is None else plan.digest
    told = [json.loads(text) for text in gather(json.dumps([fault, digest]))]
    reason = _first([one[0] for one in told])
    others = [place for place, one in enumerate(told) if one[1] != told[0][1]]
    if not reason and others:
        reason = (
            f"rank {others[0]} has plan {told[others[0]][1][:16]} and rank 0 plan {told[0][1][:16]}; "
            "give all ranks the same plan"
        )
    return Verdict(None, reason) if reason else Verdict(plan)


def _first(faults: list[str]) -> str:
    """The first fault that a rank has told of, with its rank; empty where there is none."""
    for rank, fault in enumerate(faults):
        if fault:
            return f"rank {rank}: {fault}"
    return ""
