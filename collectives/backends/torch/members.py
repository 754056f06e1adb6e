"""What carries the collectives of a process group: what its ranks reach each other by soonest.

Where all tensors are on the CPU, memory that the ranks share is faster than gloo's messages, and so are connections of
the tcp back end: `by_memory_or_links` takes these where every rank reaches those so that it meets in each collective.
Tensors on GPUs go by kernels of the nccl back end where all ranks have its windows (`windows`). Elsewhere
`TorchBackend` sends messages of the group.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from collectives.arrays.torch_arrays import TorchArrays
from collectives.arrays.torch_on_cupy import check_cupy
from collectives.backends.backend import Backend
from collectives.backends.nccl.backend import ENGINES, NcclBackend, no_windows
from collectives.backends.nccl.library import find_library
from collectives.backends.shared.backend import SharedBackend
from collectives.backends.tcp.backend import TcpBackend
from collectives.backends.tcp.loops import compile_ahead
from collectives.backends.torch.backend import TorchBackend, device_of
from collectives.backends.torch.open_group import devices_of
from collectives.backends.torch.windows import WindowMembers
from collectives.peers.address import address_of_interface
from collectives.peers.error_rounds import Gather, say_all
from collectives.peers.over_rendezvous import TcpWorld
from collectives.peers.place_in_job import JobIdentity, job_identity
from collectives.peers.rendezvous import Rendezvous
from topoplan.errors import BackendError, TopoplanError, UsageError

MEETING_SECONDS = 5.0
"""How long ranks try to reach each other: where a network lets only gloo through, its messages are taken."""


def open_torch(*, timeout: float, engine: str = "auto", exact: bool = True) -> Backend[Any]:
    """The back end of a rank of the default group, made here where torchrun asks for one.

    Raises
    ------
    UsageError, BackendError
        As `TorchBackend` and `backend_of`.
    """
    messages = TorchBackend.open(timeout=timeout)
    members = Members(messages.gather_texts, messages.ranks[0], messages.size, timeout)
    devices = messages.arrays.devices
    try:
        check_one_job(members.gather, members.size)
        kinds = agreed_engine(members.gather, engine, exact, [device.type for device in devices])
        if kinds == {"cpu"}:
            found: Backend[Any] | None = by_memory_or_links(members, messages.close)
        else:
            found, messages.about_engine = by_windows(members, devices, messages, engine=engine, exact=exact)
    except BaseException:
        messages.close()
        raise
    return messages if found is None else found


def backend_of(
    group: dist.ProcessGroup,
    gather: Gather,
    *,
    timeout: float,
    shared: bool = True,
    engine: str = "auto",
    exact: bool = True,
) -> Backend[Any]:
    """The back end of a group's ranks.

    Parameters
    ----------
    group : ProcessGroup
        All of its ranks must call this.
    gather : callable
        Over its ranks.
    timeout : float
        Seconds that a rank waits for another one, in each step.
    shared : bool
        Whether tensors on the CPU may go another way than by messages of the group.
    engine : str
        For tensors on GPUs: "windows", "messages", or "auto" for the first that all ranks have.
    exact : bool
        Whether sums of windows must have the plan's bits.

    Raises
    ------
    UsageError
        The engine is unknown, not that of the other ranks, or cannot be had; on all ranks, with the same text.
    """
    served = devices_of(group)
    kinds = agreed_engine(gather, engine, exact, served)
    members = Members(gather, dist.get_rank(group), dist.get_world_size(group), timeout)
    found: Backend[Any] | None = None
    if kinds == {"cpu"}:
        found = by_memory_or_links(members) if shared else None
        if found is not None:
            return found
        told = TorchBackend(group, timeout=timeout)
        if not shared:  # else links of our own did not pass, by which those that are left would meet
            told.meet_survivors(_own_address())
        return told
    # where all tensors are on GPUs, the group's own NCCL need not be there
    messages = TorchBackend(group, timeout=timeout) if "cpu" in kinds else None
    try:
        devices = [device_of(kind) for kind in served]
        found, about = by_windows(members, devices, messages, engine=engine, exact=exact)
        if found is not None:
            return found
        messages = messages or TorchBackend(group, timeout=timeout)
    except BaseException:
        if messages is not None:
            messages.close()
        raise
    messages.about_engine = about
    return messages


@dataclass(frozen=True, slots=True)
class Members:
    """The ranks of a group, seen from one of them.

    Parameters
    ----------
    gather : callable
        Over the ranks.
    rank, size : int
    timeout : float
        Seconds that a rank waits for another one.
    """

    gather: Gather
    rank: int
    size: int
    timeout: float


def check_one_job(gather: Gather, size: int) -> None:
    """Raise `UsageError` on all ranks where two of them are known to belong to different jobs.

    A store of torch takes in whatever process comes to its port.
    """
    told = say_all(gather, lambda: json.dumps(asdict(job_identity(size))))
    first, *others = (JobIdentity.of_message(json.loads(text)) for text in told)
    for rank, other in enumerate(others, 1):
        if first.differs(other):
            raise UsageError(
                f"rank 0 belongs to {first}, and rank {rank} to {other}; give each job another MASTER_PORT, or, if "
                "this is one job, set TOPOPLAN_JOB to the same text for all of its ranks"
            )


def agreed_engine(gather: Gather, engine: str, exact: bool, served: Iterable[str]) -> set[str]:
    """The kinds of devices that a group serves, where all ranks want the same engine for GPUs, and there are GPUs.

    Raises
    ------
    UsageError
        As `backend_of`.
    """
    kinds = set(served)

    def wanted() -> str:
        if engine not in ENGINES:
            raise UsageError(
                f"the engine {engine!r} is unknown; use {', '.join(ENGINES[:-1])} or {ENGINES[-1]}"
            )
        if engine != "auto" and "cuda" not in kinds:
            raise UsageError(
                f"the process group has no GPUs, which engines are for; leave engine={engine!r} out"
            )
        return f"engine={engine!r} and exact={exact}"

    said = say_all(gather, wanted)
    for peer, theirs in enumerate(said):
        if theirs != said[0]:
            raise UsageError(f"rank {peer} has {theirs}, and rank 0 {said[0]}; make it alike")
    return kinds


def by_memory_or_links(members: Members, *closes: Callable[[], None]) -> Backend[Any] | None:
    """What carries tensors on the CPU sooner than messages of gloo, if there is something; the same on all ranks.

    Parameters
    ----------
    members : Members
        All of them must call this.
    *closes : callable
        Called when it is closed.
    """
    try:
        made = SharedBackend(
            members.gather,
            rank=members.rank,
            size=members.size,
            timeout=members.timeout,
            arrays=torch_arrays(),
        )
    except UsageError:  # on all ranks: they are on several hosts, or do not see each other
        compile_ahead()  # before anybody waits for this rank
        linked = _met(members, partial(_linked, members), *closes)
        return None if isinstance(linked, str) else linked
    made.then = [*closes]
    return made


def _linked(members: Members, address: str) -> TcpBackend:
    """The tcp back end of a rank; all of them reach each other within `MEETING_SECONDS`, or half the timeout."""
    limit = min(members.timeout / 2, MEETING_SECONDS)
    made = TcpBackend(
        members.rank,
        members.size,
        rendezvous=address,
        timeout=members.timeout,
        meeting_timeout=limit,
        arrays=torch_arrays(),
    )
    try:
        made.reach_others(limit)
    except BaseException:
        made.close()
        raise
    return made


def by_windows(
    members: Members,
    devices: Sequence[torch.device],
    messages: TorchBackend | None,
    *,
    engine: str,
    exact: bool,
) -> tuple[WindowMembers | None, str]:
    """What carries tensors on GPUs by kernels that write to the others' memory, and what is to be said of the engine.

    Parameters
    ----------
    members : Members
        All of them must call this, and get the same.
    devices : sequence of torch.device
        Of their tensors, the GPU with its number.
    messages : TorchBackend, optional
        For tensors on the CPU; closed with what is returned.
    engine : str
    exact : bool
        Whether sums must have the plan's bits.

    Raises
    ------
    UsageError
        Windows are demanded and cannot be had; on all ranks, with the same text.
    """
    if engine == "messages" or members.size == 1:
        return None, "messages"
    gpu = next(device.index for device in devices if device.type == "cuda")
    cupy: Any = None
    fault = ""
    try:
        cupy = check_cupy("the windows engine")
        find_library(cupy)
    except UsageError as error:
        fault = str(error)

    def opened(address: str) -> WindowMembers:
        kernels = open_kernels(cupy, address, members, device=gpu, engine=engine, exact=exact)
        return WindowMembers(kernels, messages, arrays=TorchArrays(devices), cupy=cupy)

    faults = [f"rank {rank}: {one}" for rank, one in enumerate(members.gather(fault)) if one]
    made = faults[0] if faults else _met(members, opened, *([] if messages is None else [messages.close]))
    if not isinstance(made, str):
        return made, made.about_engine
    if engine == "windows":
        raise no_windows(made)
    return None, f"messages: {made}"


def open_kernels(
    cupy: Any, address: str, members: Members, *, device: int, engine: str, exact: bool
) -> NcclBackend:
    """The nccl back end of a rank on a GPU, with windows; all ranks call this, and meet at an address.

    Raises
    ------
    UsageError
        There are none; with the bare reason as its cause, the same on all ranks.
    BackendError
        A rank does not come, or its GPU fails.
    """
    world = TcpWorld(address, members.rank, members.size, timeout=members.timeout)
    try:
        made = NcclBackend(cupy, world, device=device, timeout=members.timeout, engine=engine, exact=exact)
    except BaseException as error:
        world.close()
        if isinstance(error, TopoplanError) or not isinstance(error, Exception):
            raise
        raise BackendError(" ".join(str(error).split()), rank=members.rank) from error
    if made.about_engine.startswith("messages"):
        made.close()
        raise no_windows(made.about_engine.removeprefix("messages: "))
    return made


Met = TypeVar("Met", TcpBackend, WindowMembers)


def _met(members: Members, make: Callable[[str], Met], *closes: Callable[[], None]) -> Met | str:
    """What a rank makes of an address at which all meet, where all of them do; else why not, the same on all ranks."""
    place, made, told, fault = None, None, "", ""
    try:
        if members.rank == 0:
            with suppress(TopoplanError, OSError):  # nobody comes to an address that is empty
                place = Rendezvous(f"{_own_address()}:0", members.size, host=0, told=True).start()
                told = place.address
        address = members.gather(told)[0]
        faults = ["rank 0 has no address at which the others can meet it"]
        if address:
            try:
                made = make(address)
            except UsageError as error:
                fault = str(error.__cause__ or error)
            except (TopoplanError, OSError) as error:  # the others hear of it
                fault = str(error) or type(error).__name__
            faults = [one for one in members.gather(fault) if one]
        if made is not None and not faults:
            made.then = [*closes] if place is None else [place.close, *closes]
            return made
    except BaseException:
        _close(made, place)
        raise
    _close(made, place)
    return faults[0]


def _close(*opened: TcpBackend | WindowMembers | Rendezvous | None) -> None:
    for one in opened:
        if one is not None:
            one.close()


def torch_arrays() -> TorchArrays:
    """Tensors on the CPU."""
    return TorchArrays([torch.device("cpu")])


def _own_address() -> str:
    """The address of this machine on gloo's interface, or by which it reaches where the job meets or its own name."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return address_of_interface(interface)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR") or socket.gethostname(), 9))  # nothing is sent
        return str(probe.getsockname()[0])
