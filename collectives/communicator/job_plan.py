"""Agree on the plan that a caller gives for a job, the same on all ranks, and open the back end for it.

The caller gives a plan, its file, or a machine, on which one rank plans for all. If nothing is given, the ranks agree
on a plan for the machine they run on (`collectives.communicator.job_topology`).
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import topoplan
from collectives.backends.backend import Backend, GathersTexts
from collectives.backends.open_backend import BACKENDS, BackendSettings, check_backend
from collectives.peers.agreement import Gather, check_still_wanted, gather_or_raise, plan_on_one_rank
from topoplan.errors import UsageError
from topoplan.machine.topology import Topology
from topoplan.plans.plan import Plans
from topoplan.reading.load import library

PlanLike = Plans | Topology | str | os.PathLike[str]
"""A plan, the path of its file, or the machine all of whose GPUs are the ranks, also by its name in the library."""

PlanOrTopology = Plans | Topology

AGREEING_BACKENDS = ("mpi", "shared", "tcp")
"""The back ends whose ranks, processes without GPUs, can make a plan of where they run."""


def resolve_plan(given: PlanLike) -> Plans:
    """The plan that a caller means, made here where he means a machine.

    Parameters
    ----------
    given : Plan, SizePlans, Topology, str or path
        A name of the library wins over a file of that name, as in `topoplan.load`.

    Raises
    ------
    UsageError
        It is no plan, or its file cannot be read.
    PlanError
        The file is no plan file.
    InfeasibleError
        The GPUs of the machine are not joined.

    Examples
    --------
    >>> resolve_plan("v100x4").ranks
    ('gpu0', 'gpu1', 'gpu2', 'gpu3')
    """
    meant = _read_given(given)
    return topoplan.plan(meant) if isinstance(meant, Topology) else meant


def agree_on_input(gather: Gather, given: PlanLike | None, *, size: int, where: str) -> PlanOrTopology | None:
    """What all ranks were given, read; None where nothing. All of them must call it.

    Parameters
    ----------
    gather : Gather
    given : as `resolve_plan` takes it, or None
    size : int
        Ranks of the job.
    where : str
        What has so many, as "the process group".

    Raises
    ------
    TopoplanError
        A rank was given what is none, is for another number of ranks, or is not that of the others; on all ranks, with
        the same text.

    Examples
    --------
    >>> agree_on_input(lambda text: [text] * 4, "v100x4", size=4, where="the group").name
    'v100x4'
    """
    meant: list[PlanOrTopology] = []

    def read() -> str:
        if given is None:
            return ""
        meant.append(_read_given(given))
        _check_size(meant[0], size, where)
        if isinstance(meant[0], Topology):
            return f"machine {hashlib.sha256(meant[0].to_json().encode()).hexdigest()}"
        return f"plan {meant[0].digest}"

    told = gather_or_raise(gather, read)
    for rank, one in enumerate(told):
        if bool(one) != any(told):
            raise UsageError(
                f"rank {rank}: this rank was given no plan and others were; give all ranks the same plan"
            )
        if one != told[0]:
            raise UsageError(
                f"rank {rank} has {one[:24]} and rank 0 {told[0][:24]}; give all ranks the same plan"
            )
    return meant[0] if meant else None


def agree_on_plan(gather: Gather, meant: PlanOrTopology | None, *, rank: int, size: int) -> Plans:
    """The plan of a job for what `agree_on_input` has found; one rank makes it. All of them must call this.

    Raises
    ------
    TopoplanError
        As `topoplan.plan` and `collectives.communicator.job_topology.agree_on_job_plan`; on all ranks, with the same
        text.
    """
    if meant is None:
        from collectives.communicator.job_topology import (
            agree_on_job_plan,  # it probes, which few processes need
        )

        return agree_on_job_plan(gather, rank=rank, size=size)
    if isinstance(meant, Topology):
        machine = meant
        return plan_on_one_rank(
            gather, lambda: topoplan.plan(machine, progress=check_still_wanted), rank=rank
        )
    return meant


def open_backend_for_plan(
    backend: str | Backend[Any], plan: PlanLike | None, settings: BackendSettings
) -> tuple[Backend[Any], Plans]:
    """The back end, and the plan on which its ranks agree.

    Parameters
    ----------
    backend : str or Backend
        One that is given stays open where no plan can be had.
    plan : as `resolve_plan` takes it, or None
        None where ranks compute without GPUs, to plan for where they run.
    settings : Settings
        Of a back end that is named.

    Raises
    ------
    UsageError
        There is no plan, and ranks of this back end cannot ask each other; or as `resolve_plan` and
        `agree_on_job_plan`.
    BackendError
        The ranks do not find each other.
    """
    if isinstance(backend, str):
        check_backend(backend, settings)
        if plan is None and backend not in AGREEING_BACKENDS:
            raise _not_a_plan(backend)
        if backend.startswith("loopback"):
            assert plan is not None, "looked at above"
            meant = resolve_plan(plan)
            return BACKENDS[backend](meant, settings), meant
        opened = BACKENDS[backend](None, settings)
    else:
        opened = backend
    try:
        if plan is None and opened.name not in AGREEING_BACKENDS:
            raise _not_a_plan(opened.name)
        if not isinstance(opened, GathersTexts):
            assert plan is not None, "looked at above"
            return opened, resolve_plan(plan)
        gather, (rank,), size = opened.gather_texts, opened.ranks, opened.size
        alike = agree_on_input(gather, plan, size=size, where=f"the {opened.name} back end")
        return opened, agree_on_plan(gather, alike, rank=rank, size=size)
    except BaseException:
        if opened is not backend:
            opened.close()
        raise


def _read_given(given: PlanLike) -> PlanOrTopology:
    """A plan or a machine, read where it is named."""
    if isinstance(given, str) and given in library():
        return topoplan.load(given)
    if isinstance(given, str | os.PathLike):
        return topoplan.load_plan(given)
    if not isinstance(given, Plans | Topology):
        raise UsageError(
            f"a {type(given).__name__} is no plan; make one with topoplan.plan or topoplan.plan_by_size, or give the "
            "path of a plan file or the name of a machine"
        )
    return given


def _check_size(meant: PlanOrTopology, size: int, where: str) -> None:
    """Raise `UsageError` where it is for another number of ranks."""
    if isinstance(meant, Topology):
        if len(meant.gpus) != size:
            raise UsageError(
                f"{meant.name} has {len(meant.gpus)} GPUs and {where} {size} ranks; choose {size} GPUs: "
                "topoplan.plan(machine, gpus=[...])"
            )
    elif len(meant.ranks) != size:
        raise UsageError(
            f"the plan is for {len(meant.ranks)} ranks and {where} has {size}; plan for {size} GPUs"
        )


def _not_a_plan(name: str) -> UsageError:
    if name.startswith("loopback"):
        return UsageError(
            f"{name} holds all ranks in this process, so there is no job to plan for; give a plan, for example "
            "topoplan.plan(topoplan.probe())"
        )
    return UsageError(
        f"without a plan the ranks have to ask each other, which those of {', '.join(AGREEING_BACKENDS)} can "
        f"and {name} cannot; "
        "give the plan that collectives.communicator.job_topology.agree_on_job_plan makes with an allgather of yours"
    )
