"""A back end for a job that has no plan yet, and the plan that its ranks agree on through it."""

from __future__ import annotations

from typing import Any

from collectives.backends.backend import Backend, GathersTexts
from collectives.backends.open_backend import check_backend, open_backend
from collectives.job.plan import GivenPlan, job_plan, plan_of
from collectives.peers.error_rounds import Gather
from topoplan.errors import UsageError
from topoplan.plans.plan import Plans

ASKING = ("mpi", "shared", "tcp")
"""The back ends whose ranks can speak to each other before there is a plan."""


def gather_of(backend: Backend[Any]) -> Gather | None:
    """How the ranks of a back end tell each other texts where each is a process without a GPU; None for others."""
    if backend.name in ASKING and isinstance(backend, GathersTexts):
        return backend.gather_texts
    return None


def open_for_plan(
    backend: str | Backend[Any], plan: GivenPlan | None, *, timeout: float
) -> tuple[Backend[Any], Plans]:
    """The back end, and the plan: the given one, or else the one that the ranks agree on (see `collectives.job.plan`).

    Parameters
    ----------
    backend : str or Backend
        One that is given stays open where no plan can be had.
    plan : Plan, SizePlans, Topology, str, path or None
        As `plan_of` takes it; None where ranks compute without GPUs.
    timeout : float
        Seconds that a rank waits for the others; where the ranks agree on a plan, as long as one of them makes it.
        A machine given as ``plan`` is planned on by every rank before they meet.

    Raises
    ------
    UsageError
        There is no plan, and ranks of this back end cannot ask each other; or as `plan_of` and `job_plan`.
    """
    if plan is not None:
        meant = plan_of(plan)
        opened = open_backend(backend, meant, timeout=timeout) if isinstance(backend, str) else backend
        return opened, meant
    if isinstance(backend, str):
        check_backend(backend)
        opened = _open_alone(backend, timeout)
    else:
        opened = backend
    try:
        gather = gather_of(opened)
        if gather is None:
            raise _no_plan(opened.name)
        return opened, job_plan(gather, rank=opened.ranks[0], size=opened.size)
    except BaseException:
        if opened is not backend:
            opened.close()
        raise


def _open_alone(name: str, timeout: float) -> Backend[Any]:
    if name == "mpi":
        from collectives.backends.mpi.backend import MpiBackend

        return MpiBackend(timeout=timeout)
    if name == "shared":
        from collectives.backends.shared.backend import SharedBackend

        return SharedBackend.from_environment(timeout=timeout)
    if name == "tcp":
        from collectives.backends.tcp.backend import TcpBackend

        return TcpBackend.from_environment(timeout=timeout)
    raise _no_plan(name)


def _no_plan(name: str) -> UsageError:
    if name.startswith("loopback"):
        return UsageError(
            f"{name} holds all ranks in this process, so there is no job to plan for; give a plan, for example "
            "topoplan.plan(topoplan.probe())"
        )
    return UsageError(
        f"without a plan the ranks have to ask each other, which those of {', '.join(ASKING)} can and {name} cannot; "
        "give the plan that collectives.job.plan.job_plan makes with an allgather of yours"
    )
