"""Agree on the plan that a caller gives for a job, the same on all ranks, and open the back end for it.

The caller gives a plan, its file, or a machine, on which one rank plans for all. If nothing is given, the ranks agree
on a plan for the machine they run on (`collectives.communicator.job_topology`).
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from typing import Any

import topoplan
from collectives.backends.backend import Backend
from collectives.backends.open_backend import BACKENDS, BackendSettings, backends_with, check_backend
from collectives.peers.agreement import Gather, check_still_wanted, gather_or_raise, plan_on_one_rank
from collectives.peers.control_plane import Signature
from topoplan.errors import UsageError
from topoplan.machine.topology import Topology
from topoplan.plans.deferred_plan import DeferredPlan
from topoplan.plans.plan import Plans
from topoplan.plans.plan_by_kind import PlanByKind
from topoplan.plans.size_plans import parse_job_plan, read_plan_file
from topoplan.reading.load import library
from topoplan.units import check_type

PlanLike = Plans | PlanByKind | Topology | str | os.PathLike[str]
"""A plan, also by kind, the path of its file, or the machine whose GPUs are the ranks, also by its name in the library.
"""

PlanOrTopology = Plans | Topology

INPUT = Signature(0, "", 0, "plan from a file, a machine or by kind", None, None, "", 0, 0)
"""The agreement before ranks compare their inputs; a rank with a listed plan has none to compare."""


def resolve_plan(given: PlanLike) -> Plans:
    """Return a caller's plan, made here for a machine.

    A name of the library takes precedence over a file of that name, as in `topoplan.load`. Raises `UsageError` if it
    is not a plan or its file cannot be read, `PlanError` for a wrong file, and `InfeasibleError` if the GPUs are not
    joined.

    >>> resolve_plan("v100x4").ranks
    ('gpu0', 'gpu1', 'gpu2', 'gpu3')
    """
    given_plan = _read_given(given)
    return topoplan.plan(given_plan) if isinstance(given_plan, Topology) else given_plan


def agree_on_input(gather: Gather, given: PlanLike | None, *, size: int, where: str) -> PlanOrTopology | None:
    """Return the plan or machine that all ranks were given, None without one; all of them must call it.

    `size` is the number of ranks, and `where` names the job in messages ("the process group"). Raises `TopoplanError`
    on all ranks, with the same text, if an input is invalid, for another number of ranks, or differs between ranks.

    >>> agree_on_input(lambda text: [text] * 4, "v100x4", size=4, where="the group").name
    'v100x4'
    """
    given_plan: list[PlanOrTopology] = []

    def read() -> str:
        if given is None:
            return ""
        given_plan.append(_read_given(given))
        _check_size(given_plan[0], size, where)
        if isinstance(given_plan[0], Topology):
            return f"machine {hashlib.sha256(given_plan[0].to_json().encode()).hexdigest()}"
        return f"plan {given_plan[0].digest}"

    inputs = gather_or_raise(gather, read)
    for rank, one in enumerate(inputs):
        if bool(one) != any(inputs):
            raise UsageError(
                f"rank {rank}: this rank was given no plan and others were; give all ranks the same plan"
            )
        if one != inputs[0]:
            raise UsageError(
                f"rank {rank} has {one[:24]} and rank 0 {inputs[0][:24]}; give all ranks the same plan"
            )
    return given_plan[0] if given_plan else None


def agree_on_plan(gather: Gather, given_plan: PlanOrTopology | None, *, rank: int, size: int) -> Plans:
    """Return the plan of a job for the result of `agree_on_input`; one rank makes it, and all must call this.

    Raises `TopoplanError` as `topoplan.plan` and `collectives.communicator.job_topology.agree_on_job_plan`, on all
    ranks with the same text.
    """
    if given_plan is None:
        from collectives.communicator.job_topology import (
            agree_on_job_plan,
        )  # probes, which few processes need

        return agree_on_job_plan(gather, rank=rank, size=size)
    if isinstance(given_plan, Topology):
        machine = given_plan
        return plan_on_one_rank(
            gather, lambda: topoplan.plan(machine, progress=check_still_wanted), rank=rank
        )
    return given_plan


def open_backend_for_plan(
    backend: str | Backend[Any], plan: PlanLike | None, settings: BackendSettings
) -> tuple[Backend[Any], Plans]:
    """Return the back end, and the plan on which its ranks agree.

    A given back end stays open after an error. `plan` is None if ranks compute without GPUs, to plan for where they
    run. Raises `UsageError` without a plan if the ranks of this back end cannot agree on one, or as `resolve_plan` and
    `agree_on_job_plan`; `BackendError` if the ranks do not find each other.
    """
    check_type("backend", backend, str, Backend, remedy="give the name of a back end, such as tcp")
    if isinstance(backend, str):
        check_backend(backend, settings)
        record = BACKENDS[backend]
        if plan is None and not record.agrees:
            raise _no_plan(backend)
        if record.in_process:
            assert plan is not None, "checked above"
            given_plan = resolve_plan(plan)
            return record.open(given_plan, settings), given_plan
        opened = record.open(None, settings)
    else:
        opened = backend
    try:
        if plan is None and opened.name not in backends_with("agrees"):
            raise _no_plan(opened.name)
        if not opened.one_rank:
            assert plan is not None, "checked above"
            return opened, resolve_plan(plan)
        gather, (rank,), size = opened.gather_texts, opened.ranks, opened.size
        opened.agree(replace(INPUT, world=size))  # a rank with a plan of its own is at its first collective
        agreed = agree_on_input(gather, plan, size=size, where=f"the {opened.name} back end")
        return opened, agree_on_plan(gather, agreed, rank=rank, size=size)
    except BaseException:
        if opened is not backend:
            opened.close()
        raise


def _read_given(given: PlanLike) -> PlanOrTopology:
    if isinstance(given, str) and given in library():
        return topoplan.load(given)
    if isinstance(given, str | os.PathLike):
        return parse_job_plan(read_plan_file(given))
    if isinstance(given, PlanByKind):
        return DeferredPlan(given)
    if not isinstance(given, Plans | Topology):
        raise not_a_plan(given)
    return given


def not_a_plan(given: object) -> UsageError:
    """Return the error for another type than `PlanLike`."""
    return UsageError(
        f"plan must be a Plan, a plan file or the name of a machine, got {type(given).__name__}; make one with "
        "topoplan.plan or topoplan.plan_by_size"
    )


def _check_size(given_plan: PlanOrTopology, size: int, where: str) -> None:
    if isinstance(given_plan, Topology):
        if len(given_plan.gpus) != size:
            raise UsageError(
                f"{given_plan.name} has {len(given_plan.gpus)} GPUs and {where} {size} ranks; choose {size} GPUs: "
                "topoplan.plan(machine, gpus=[...])"
            )
    elif len(given_plan.ranks) != size:
        raise UsageError(
            f"the plan is for {len(given_plan.ranks)} ranks and {where} has {size}; plan for {size} GPUs"
        )


def _no_plan(name: str) -> UsageError:
    if name in backends_with("in_process"):
        return UsageError(
            f"{name} holds all ranks in this process, without a job to plan for; give a plan, for example "
            "topoplan.plan(topoplan.probe())"
        )
    return UsageError(
        f"without a plan the ranks must agree on one, which ranks of {', '.join(backends_with('agrees'))} can "
        f"and ranks of {name} cannot; pass the plan that "
        "collectives.communicator.job_topology.agree_on_job_plan makes with your own allgather"
    )
