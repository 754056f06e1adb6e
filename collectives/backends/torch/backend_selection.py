"""Select the back end that carries the collectives of a process group.

For tensors on the CPU shared memory is faster than gloo's messages, and so are connections of the tcp back end:
`memory_or_tcp_backend` takes these if every rank reaches the peers of its barriers. Tensors on GPUs use kernels of the
nccl back end if all ranks have its windows; these need nothing of the group, and run in a stream of CuPy's behind
torch's stream of the collectives, which is behind the caller's. In all other cases `TorchBackend` sends messages of the
group.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from collectives.backends.backend import AVERAGED, Backend, Call, OneRank, PreparedRun, StartedCall
from collectives.backends.nccl.nccl_backend import ENGINES, NcclBackend, no_windows
from collectives.backends.nccl.nccl_library import find_library
from collectives.backends.shared.shared_backend import SharedBackend
from collectives.backends.tcp.compiled_exchange import compile_ahead
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.backends.torch.process_groups import devices_of, own_address
from collectives.backends.torch.torch_backend import TorchBackend, device_of
from collectives.peers.agreement import Gather, gather_or_raise
from collectives.peers.control_plane import Signature
from collectives.peers.environment import JobIdentity, job_identity
from collectives.peers.rendezvous import Rendezvous
from collectives.peers.tcp_control_plane import TcpControlPlane, rendezvous_within
from collectives.tables.cupy_arrays import on_device
from collectives.tables.torch_arrays import TorchArrays, check_cupy, on_gpu, stream_on_cupy, tensor_on_cupy
from topoplan.errors import BackendError, TopoplanError, UsageError


class WindowBackend(OneRank):
    """`Backend` of one rank of a process group over the windows of an nccl back end.

    `messages`, of the same ranks, carries tensors on the CPU; it is not closed. `close` calls all of `on_close`.
    """

    name = "nccl"
    arrays: TorchArrays
    direct = False
    averages = True

    def __init__(
        self, kernels: NcclBackend, messages: TorchBackend | None, *, arrays: TorchArrays, cupy: Any
    ) -> None:
        self.on_close: list[Callable[[], None]] = []
        self.ranks, self.size, self.arrays = kernels.ranks, kernels.size, arrays
        self.chunk_bytes, self.about_engine = kernels.chunk_bytes, kernels.about_engine
        self._kernels, self._messages, self._cupy = kernels, messages, cupy
        self._world, self._timeout = kernels._world, kernels.timeout
        self._gpu = kernels.arrays.device
        arrays.settle = kernels.settle
        self._seen: tuple[torch.cuda.Stream, Any] | None = None

    def run(self, call: Call[torch.Tensor]) -> None:
        (memory,) = call.memory
        if not on_gpu(memory.source):
            self._run_messages(call)
            return
        self._follow(memory.source.device)
        source, result = (
            tensor_on_cupy(self._cupy, line, self._gpu) for line in (memory.source, memory.result)
        )
        self._kernels.run(replace(call, memory=(replace(memory, source=source, result=result),)))
        self.about_engine = self._kernels.about_engine

    def repeated(self, call: Call[torch.Tensor]) -> PreparedRun | None:
        device = call.memory[0].source.device
        run = self._kernels.repeated(call) if on_gpu(call.memory[0].source) else None
        if run is None:
            return None

        def run_behind(number: int, source: int, result: int) -> StartedCall | None:
            stream = self._follow(device)
            started = run(number, source, result)
            self._kernels.arrays.lead(stream)
            return started

        return run_behind

    def _follow(self, device: torch.device) -> Any:
        """Let the kernels wait for torch's current stream, and return it as CuPy's."""
        stream = torch.cuda.current_stream(device)
        if self._seen is None or self._seen[0] != stream:
            with on_device(self._cupy, self._gpu):
                self._seen = stream, stream_on_cupy(self._cupy, stream, self._gpu)
        self._kernels.arrays.behind(self._seen[1])
        return self._seen[1]

    def agree(self, signature: Signature) -> None:
        self._kernels.agree(signature)

    def settle(self) -> None:
        self._kernels.settle()

    def empty(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        nbytes = math.prod(shape) * like.element_size()
        memory = self._kernels.memory(nbytes) if nbytes and on_gpu(like) else None
        if memory is None:
            return self.arrays.empty(shape, like)
        line: torch.Tensor = torch.utils.dlpack.from_dlpack(memory)
        return line.view(like.dtype).view(shape)

    def writes(self, array: torch.Tensor) -> bool:
        return self._kernels.holds(array.data_ptr(), array.nbytes)

    def close(self) -> None:
        try:
            self._kernels.close()
        finally:
            for close in self.on_close:
                close()

    def _reporting_failures(self) -> AbstractContextManager[None]:
        return self._kernels._reporting_failures()

    def _run_messages(self, call: Call[torch.Tensor]) -> None:
        assert self._messages is not None, "`check` refuses tensors on the CPU without them"
        self._kernels.agree_on_host(call.signature)
        self._messages.run(call)
        if call.op == "avg" and call.dtype in AVERAGED:
            self.arrays.divide(call.memory[0].result, self.size)


RENDEZVOUS_SECONDS = 5.0
"""Time for ranks to reach each other: a network that lets only gloo through gets its messages."""


def open_torch(*, timeout: float, engine: str = "auto", exact: bool = True) -> Backend[Any]:
    """Return the back end of a rank of the default group, which is made here if torchrun asks for one."""
    messages = TorchBackend.open(timeout=timeout)
    members = GroupMembers(messages.gather_texts, messages.ranks[0], messages.size, timeout)
    devices = messages.arrays.devices
    try:
        check_one_job(members.gather, members.size)
        kinds = agreed_engine(members.gather, engine, exact, [device.type for device in devices])
        if kinds == {"cpu"}:
            found: Backend[Any] | None = memory_or_tcp_backend(members, messages.close)
        else:
            found, messages.about_engine = window_backend(
                members, devices, messages, engine=engine, exact=exact
            )
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
    """Return the back end of a group's ranks; all of them must call this.

    `gather` is over the ranks. `timeout` is in seconds, for another rank in each step. `shared`: tensors on the CPU may
    use other connections than the group's. `engine` is for tensors on GPUs: "windows", "messages", or "auto" for the
    first that all ranks have. `exact`: sums of windows must have the plan's bits.

    Raises `UsageError` on all ranks, with the same text, if the engine is unknown, differs among ranks, or is not
    available.
    """
    served = devices_of(group)
    kinds = agreed_engine(gather, engine, exact, served)
    members = GroupMembers(gather, group.rank(), group.size(), timeout)
    found: Backend[Any] | None = None
    if kinds == {"cpu"}:
        found = memory_or_tcp_backend(members) if shared else None
        if found is not None:
            return found
        over_gloo = TorchBackend(group, timeout=timeout, served=served)
        if not shared:  # otherwise connections failed, which survivors would need for their rendezvous
            over_gloo.meet_survivors(own_address())
        return over_gloo
    # if all tensors are on GPUs, the group's own NCCL is not needed
    messages = TorchBackend(group, timeout=timeout, served=served) if "cpu" in kinds else None
    try:
        devices = [device_of(kind) for kind in served]
        found, about = window_backend(members, devices, messages, engine=engine, exact=exact)
        if found is not None:
            return found
        messages = messages or TorchBackend(group, timeout=timeout, served=served)
    except BaseException:
        if messages is not None:
            messages.close()
        raise
    messages.about_engine = about
    return messages


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """The ranks of a group, seen from one of them; `timeout` is in seconds, for another rank."""

    gather: Gather
    rank: int
    size: int
    timeout: float


def check_one_job(gather: Gather, size: int) -> None:
    """Raise `UsageError` on all ranks if two of them are known to belong to different jobs.

    torch's store accepts any process that connects to its port.
    """
    texts = gather_or_raise(gather, lambda: json.dumps(asdict(job_identity(size))))
    first, *others = (JobIdentity.of_message(json.loads(text)) for text in texts)
    for rank, other in enumerate(others, 1):
        if first.differs(other):
            raise UsageError(
                f"rank 0 belongs to {first}, and rank {rank} to {other}; give each job another MASTER_PORT, or, if "
                "this is one job, set TOPOPLAN_JOB to the same text for all of its ranks"
            )


def agreed_engine(gather: Gather, engine: str, exact: bool, served: Iterable[str]) -> set[str]:
    """Return the kinds of devices of a group, after checking that all ranks want the same engine, for existing GPUs."""
    kinds = set(served)

    def wanted() -> str:
        if engine not in ENGINES:
            raise UsageError(
                f"the engine {engine!r} is unknown; use {', '.join(ENGINES[:-1])} or {ENGINES[-1]}"
            )
        if engine != "auto" and "cuda" not in kinds:
            raise UsageError(f"engines need a process group with GPUs; leave engine={engine!r} out")
        return f"engine={engine!r} and exact={exact}"

    texts = gather_or_raise(gather, wanted)
    for peer, theirs in enumerate(texts):
        if theirs != texts[0]:
            raise UsageError(
                f"engine and exact must be the same on all ranks, got {theirs} on rank {peer} and {texts[0]} on rank 0"
            )
    return kinds


def memory_or_tcp_backend(members: GroupMembers, *closes: Callable[[], None]) -> Backend[Any] | None:
    """Return a back end for tensors on the CPU that is faster than gloo, or None; all ranks call it, with one result.

    `closes` are called when it is closed.
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
        compile_ahead()  # before any peer waits for this rank
        linked = _at_rendezvous(members, partial(_linked, members), *closes)
        return None if isinstance(linked, str) else linked
    made.on_close = [*closes]
    return made


def _linked(members: GroupMembers, address: str) -> TcpBackend:
    """Return the tcp back end of a rank; all reach each other within `RENDEZVOUS_SECONDS`, or half the timeout."""
    limit = min(members.timeout / 2, RENDEZVOUS_SECONDS)
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


def window_backend(
    members: GroupMembers,
    devices: Sequence[torch.device],
    messages: TorchBackend | None,
    *,
    engine: str,
    exact: bool,
) -> tuple[WindowBackend | None, str]:
    """Return the back end over windows for tensors on GPUs, or None, and `about_engine`; all ranks call it, with one
    result.

    `messages`, for tensors on the CPU, is closed with the back end. Raises `UsageError` on all ranks, with the same
    text, if windows are demanded and not available.
    """
    if engine == "messages" or members.size == 1:
        return None, "messages"
    gpu = next(device.index for device in devices if device.type == "cuda")
    cupy: Any = None
    fault = ""
    try:
        cupy = check_cupy("the windows engine")
        find_library()
    except UsageError as error:
        fault = str(error)

    def opened(address: str) -> WindowBackend:
        kernels = open_kernels(cupy, address, members, device=gpu, engine=engine, exact=exact)
        return WindowBackend(kernels, messages, arrays=TorchArrays(devices), cupy=cupy)

    faults = [f"rank {rank}: {one}" for rank, one in enumerate(members.gather(fault)) if one]
    made = (
        faults[0]
        if faults
        else _at_rendezvous(members, opened, *([] if messages is None else [messages.close]))
    )
    if not isinstance(made, str):
        return made, made.about_engine
    if engine == "windows":
        raise no_windows(made)
    return None, f"messages: {made}"


def open_kernels(
    cupy: Any, address: str, members: GroupMembers, *, device: int, engine: str, exact: bool
) -> NcclBackend:
    """Return the nccl back end of a rank on a GPU, with windows; all ranks call it with the address of their
    rendezvous.

    Raises `UsageError` if there are none, with the bare reason as its cause, the same on all ranks; `BackendError` if a
    rank does not come, or its GPU fails.
    """
    world = TcpControlPlane(address, members.rank, members.size, timeout=members.timeout)
    try:
        made = NcclBackend(cupy, world, device=device, timeout=members.timeout, engine=engine, exact=exact)
    except BaseException as error:
        world.close_with(error)
        if isinstance(error, TopoplanError) or not isinstance(error, Exception):
            raise
        raise BackendError(" ".join(str(error).split()), rank=members.rank) from error
    if made.about_engine.startswith("messages"):
        made.close()
        raise no_windows(made.about_engine.removeprefix("messages: "))
    return made


Met = TypeVar("Met", TcpBackend, WindowBackend)


def _at_rendezvous(
    members: GroupMembers, make: Callable[[str], Met], *closes: Callable[[], None]
) -> Met | str:
    """Return what a rank makes at a common rendezvous, if all succeed; otherwise the reason, the same on all ranks."""
    place, made, fault = None, None, ""
    try:
        try:
            address, place = rendezvous_within(
                members.gather, range(members.size), rank=members.rank, local=own_address()
            )
        except UsageError as error:  # on all ranks
            return str(error)
        try:
            made = make(address)
        except UsageError as error:
            fault = str(error.__cause__ or error)
        except (TopoplanError, OSError) as error:  # reported to the others below
            fault = str(error) or type(error).__name__
        faults = [one for one in members.gather(fault) if one]
        if made is not None and not faults:
            made.on_close = [*closes] if place is None else [place.close, *closes]
            return made
    except BaseException:
        _close(made, place)
        raise
    _close(made, place)
    return faults[0]


def _close(*opened: TcpBackend | WindowBackend | Rendezvous | None) -> None:
    for one in opened:
        if one is not None:
            one.close()


def torch_arrays() -> TorchArrays:
    """Return the array library of tensors on the CPU."""
    return TorchArrays([torch.device("cpu")])
