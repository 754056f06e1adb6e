"""Run the ranks of an existing process group, by messages of gloo or NCCL.

Every rank runs the table as a program of global steps; tensors are sent and received in place. Ranks agree, and report
failures, at a rendezvous of rank 0 (`TcpControlPlane`), whose address and token come over the group once. After a
`BackendError` that is not a disagreement the connections of the group are closed, as gloo does after a timeout: that
ends the waits of the other ranks. Such a group must be destroyed and made anew, as in a recovery
(`TorchBackend.go_on`).

The steps are those of `stepped_program`, some moved by a step or two. Arrivals of a step are joined before the next one
starts. A receive may start one step ahead; a send is waited for two steps later. Both only if nothing else uses their
memory in between:

    step 4   send a from P, receive b           a is waited for before step 6 ...
    step 5   receive c into P, which a reads    ... but here before step 5, and c cannot be started in step 4
    step 6   receive d into Q                   d is started in step 5, once b has been joined
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from collectives.backends.backend import Backend, Call, CallArrivals, OneRank, RankArrays
from collectives.backends.stepped_program import (
    SCRATCH,
    VECTOR,
    ProgramMessage,
    ProgramStep,
    SteppedProgram,
    program_of,
)
from collectives.backends.stepped_program import ProgramMessage as Move
from collectives.backends.torch.group_messages import (
    LANES,
    GlooMessages,
    GroupMessage,
    GroupMessages,
    LostPeer,
    NcclMessages,
    text_of_rank_0,
)
from collectives.backends.torch.process_groups import (
    carrier_of,
    devices_of,
    existing_group,
    gloo_among,
    group_requested,
    make_group,
    own_address,
    wait_for_gloo_threads,
)
from collectives.peers.agreement import Gather
from collectives.peers.control_plane import waits_for_no_peer
from collectives.peers.membership_protocol import MembershipProtocol
from collectives.peers.rendezvous_client import GRACE_SECONDS
from collectives.peers.tcp_control_plane import TcpControlPlane, rendezvous_within
from collectives.tables.kernels.kernel_launch import Chunks
from collectives.tables.torch_arrays import TorchArrays, join_function, join_operand
from collectives.tables.transfer_table import Given, TransferTable
from topoplan.errors import BackendError, UsageError

SEND_STEPS = 2
"""Steps after which a send is waited for."""

Part = tuple[int, int]
"""A buffer and a byte in it."""


@dataclass(frozen=True, slots=True)
class TorchJoin:
    """The join of `count` elements: ``target = own joined with arrived``."""

    own: Part
    arrived: Part
    target: Part
    count: int


@dataclass(frozen=True, slots=True)
class TorchStep:
    """One step of one rank, in this order.

    - `ended`: sends of earlier steps that must have left.
    - `joins` of the previous step's arrivals.
    - `receives`, `sends` are started.
    - `ahead`: receives of the next step that can be started.
    - `arrivals` are waited for.
    """

    ended: tuple[ProgramMessage, ...]
    joins: tuple[TorchJoin, ...]
    receives: tuple[ProgramMessage, ...]
    sends: tuple[ProgramMessage, ...]
    ahead: tuple[ProgramMessage, ...]
    arrivals: tuple[ProgramMessage, ...]


@dataclass(frozen=True, slots=True)
class TorchProgram:
    """The turns of one rank, and the bytes of scratch that they need."""

    turns: tuple[TorchStep, ...]
    scratch: int


@lru_cache(maxsize=64)
def program(
    table: TransferTable,
    rank: int,
    given: Given,
    block: tuple[int, int],
    itemsize: int,
    *,
    ahead: bool,
    step_bytes: int = 1,
) -> TorchProgram:
    """Return the program of a rank; the last 64 results are kept.

    `given` and `block` are as in `RankArrays`, `step_bytes` as in `program_of`. `ahead`: receives may be started before
    their step; not if the sends and receives of a step are matched.

    Deadlock is impossible: a rank waits in a step for messages that its peer has started in that step or before, and
    starting waits only for messages of earlier steps.

    >>> import topoplan
    >>> from collectives import lower
    >>> table = lower(topoplan.plan(topoplan.load("dgx-1v"), "allreduce"), 80000, chunk_elements=100)
    >>> made = program(table, 3, (0, 80000), (0, 80000), 4, ahead=True)
    >>> sum(len(turn.sends) for turn in made.turns) == int((table.source == 3).sum())
    True
    """
    one = RankArrays(rank, given, None, block, None)
    found = program_of(table, one, itemsize, step_bytes=step_bytes, overlap=False)
    return TorchProgram(tuple(_torch_steps(found, ahead)), found.scratch)


def _torch_steps(found: SteppedProgram, ahead: bool) -> list[TorchStep]:
    steps, joins = found.steps, _joins(found.joins)
    turns: list[TorchStep] = []
    leaving: list[tuple[int, ProgramMessage]] = []
    started: tuple[ProgramMessage, ...] = ()
    waiting: tuple[TorchJoin, ...] = ()
    for place, step in enumerate(steps):
        receives = tuple(one for one in step.receives if one not in started)
        brought = joins.get(step.number, ())
        started = _early(step, brought, steps[place + 1]) if ahead and place + 1 < len(steps) else ()
        writes = {_place(one) for one in (*receives, *started)}
        ended = [one for at, one in leaving if at <= place - SEND_STEPS or _place(one) in writes]
        turns.append(TorchStep(tuple(ended), waiting, receives, step.sends, started, step.receives))
        leaving = [(at, one) for at, one in leaving if one not in ended]
        leaving += [(place, one) for one in step.sends]
        waiting = brought
    if steps:
        turns.append(TorchStep(tuple(one for _, one in leaving), waiting, (), (), (), ()))
    return turns


def _early(
    step: ProgramStep, joins: tuple[TorchJoin, ...], following: ProgramStep
) -> tuple[ProgramMessage, ...]:
    """Return the receives of the next step that can be started in this one."""
    if following.number != step.number + 1:
        return ()
    used = {_place(one) for one in (*step.sends, *step.receives)}
    used |= {_slot(*part) for one in joins for part in (one.own, one.target)}
    return tuple(one for one in following.receives if _place(one) not in used)


def _place(message: ProgramMessage) -> Part:
    return _slot(message.buffer, message.offset)


def _slot(buffer: int, offset: int) -> Part:
    """Return the place of a chunk; in scratch its slot, in which elements are aligned as in the buffer."""
    return buffer, offset - (offset % VECTOR if buffer == SCRATCH else 0)


def _joins(chunks: Chunks) -> dict[int, tuple[TorchJoin, ...]]:
    """Return the joins of each step, in their order."""
    columns = (chunks.count, *chunks.own, *chunks.arriving, *chunks.destination)
    found: dict[int, list[TorchJoin]] = {}
    for step, count, *parts in zip(
        chunks.step.tolist(), *(column.tolist() for column in columns), strict=True
    ):
        own, arrived, target = zip(parts[::2], parts[1::2], strict=True)
        found.setdefault(step, []).append(TorchJoin(own, arrived, target, count))
    return {step: tuple(listed) for step, listed in found.items()}


class TorchBackend(OneRank):
    """`Backend` of one rank of a process group, by its messages.

    - `group`: the default group if it is left out. It may be used for other things between collectives; a group over
      NCCL not during one, since calls on one NCCL communicator must come in one order on all ranks.
    - `timeout`: seconds that a rank waits for the messages of one step, and at first for the other ranks.
    - `served`: the library for each kind of device, in a group that torch does not know by name.
    - `survivors`: membership of an earlier back end, whose ranks recover here; closed with this one. `meet_survivors`
      makes a new one.

    `about_engine` says what carries tensors on GPUs, and why nothing better; empty if the group takes none.

    Raises `UsageError` if torch.distributed is not initialised, this process is not in the group, the group uses
    neither gloo nor NCCL, NCCL and torch finds no GPU, or rank 0 cannot listen; `BackendError` if ranks do not come.
    """

    _world: TcpControlPlane

    name = "torch"
    arrays: TorchArrays
    arrivals: CallArrivals
    direct = False
    averages = False

    _lanes = 1
    """The next number of a back end that this process knows."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: float = 30.0,
        served: Mapping[str, str] | None = None,
        survivors: MembershipProtocol | None = None,
    ) -> None:
        if group is None or served is None:
            group = existing_group(group)
            served = devices_of(group)
        self._group = group
        self.size = group.size()
        self.ranks: tuple[int, ...] = (group.rank(),)
        self.survivors = survivors
        self.arrays = TorchArrays([device_of(kind) for kind in served])
        self._wires: dict[str, GroupMessages] = {}
        if "cpu" in served:
            self._wires["cpu"] = GlooMessages(self._group, timeout=timeout)
        if "cuda" in served:
            gpu = next(device for device in self.arrays.devices if device.type == "cuda")
            self._wires["cuda"] = NcclMessages(carrier_of(self._group), gpu, timeout=timeout)
        self._scratch: dict[str, torch.Tensor] = {}
        self._timeout = timeout
        self.arrivals = CallArrivals()
        self._owned = False
        self.about_engine = ""
        self._world, self._close_rendezvous = self._meet()
        try:
            lanes = self._world.texts(str(TorchBackend._lanes), timeout=timeout)
        except BaseException:
            self._leave()
            raise
        lane = max(map(int, lanes))
        for wires in self._wires.values():
            wires.lane = 1 + (lane - 1) % (LANES - 1)
        TorchBackend._lanes = lane + 1

    def _meet(self) -> tuple[TcpControlPlane, Callable[[], None]]:
        """Return the control plane of all ranks, and the end of its rendezvous; rank 0 listens for the others."""
        (rank,), device = self.ranks, self.arrays.devices[0]
        wires = self._wires[device.type]

        def from_rank_0(text: str) -> list[str]:
            return [text_of_rank_0(wires, text, rank=rank, size=self.size, device=device)] * self.size

        try:
            for one in self._wires.values():
                one.connect()
            address, place = rendezvous_within(from_rank_0, range(self.size), rank=rank, local=own_address())
        except LostPeer as lost:
            raise self._error_of(lost) from lost
        try:
            world = TcpControlPlane(address, rank, self.size, timeout=self._timeout)
        except BaseException:
            if place is not None:
                place.close()
            raise
        return world, (lambda: None) if place is None else place.close

    @classmethod
    def open(cls, *, timeout: float) -> TorchBackend:
        """Return one over the default group, which is made here, and destroyed by `close`, if torchrun asks for one."""
        owned = group_requested()
        if owned:
            make_group(timeout=timeout)
        try:
            made = cls(timeout=timeout)
        except BaseException:
            if owned:
                dist.destroy_process_group()
            raise
        made._owned = owned
        return made

    def run(self, call: Call[torch.Tensor]) -> None:
        (memory,) = call.memory
        kind, signature = memory.source.device.type, call.signature
        if len(self._wires) > 1:
            signature = replace(signature, dtype=f"{signature.dtype} on {kind}")
        self.arrivals.add(self._agree_timed(signature))
        wires = self._wires[kind]
        steps = program(call.table, memory.rank, memory.given, memory.block, call.itemsize, ahead=wires.ahead)
        joined = None if call.op is None else join_function(call.op, memory.source)
        buffers = (memory.source, memory.result, self._scratch_of(steps.scratch, memory.source))
        self._world.waiting = wires.waiting
        try:
            _execute(steps, buffers, wires, joined)
        except LostPeer as lost:
            error = self._failure(lost)
            for one in self._wires.values():
                one.cut()
            raise error from lost
        finally:
            self._world.waiting = waits_for_no_peer

    def _failure(self, lost: LostPeer) -> BackendError:
        """Return the failure of the job that has ended a collective.

        The rank at the other end of a closed connection has died, which the rendezvous notices too, or has given up
        because of another one, which it reports.
        """
        world, limit = self._world, time.monotonic() + GRACE_SECONDS
        if lost.timed_out and world.trouble() is None:
            world.stalled(self._timeout)
        try:
            world.wait(
                lambda: world.trouble() is not None or time.monotonic() >= limit, timeout=GRACE_SECONDS
            )
        except BackendError as error:
            return error
        if world.trouble() is None:
            world.tell(self._error_of(lost))
        return world.trouble() or self._error_of(lost)

    def _error_of(self, lost: LostPeer) -> BackendError:
        return BackendError(
            f"the peer {lost.fault}; see what its process did and whether it had fewer batches, and make a new process "
            "group",
            rank=self.ranks[0],
            peer=lost.peer,
            step=lost.step,
        )

    def abort(self, error: BackendError) -> None:
        self._world.abort(error)
        for wires in self._wires.values():
            wires.close_connections()

    def meet_survivors(self, local: str) -> None:
        """Enable recovery if all tensors are on the CPU; all ranks call this, with their machine's address."""
        if set(self._wires) == {"cpu"}:
            self.survivors = MembershipProtocol.of(self.gather_texts, self.ranks[0], local)

    @classmethod
    def among(
        cls, gather: Gather, *, rank: int, size: int, survivors: MembershipProtocol, timeout: float
    ) -> TorchBackend:
        """Return the back end of a rank that survived in a job, or joined it: over a new gloo group."""
        group = gloo_among(gather, rank=rank, size=size, local=survivors.local, timeout=timeout)
        return cls(group, timeout=timeout, served={"cpu": "gloo"}, survivors=survivors)

    def go_on(self, gather: Gather, *, rank: int, size: int) -> Backend[Any]:
        assert self.survivors is not None, "looked at before"
        self._leave()
        made = TorchBackend.among(
            gather, rank=rank, size=size, survivors=self.survivors, timeout=self._timeout
        )
        made._owned, self._owned = self._owned, False
        return made

    def _leave(self) -> None:
        self._world.close()
        self._close_rendezvous()

    def close(self) -> None:
        self._leave()
        self._scratch.clear()
        if self.survivors is not None:
            self.survivors.close()
        if self._owned:
            self._owned = False
            wait_for_gloo_threads()
            dist.destroy_process_group()

    def _scratch_of(self, nbytes: int, like: torch.Tensor) -> torch.Tensor:
        """Return scratch memory of so many bytes, kept between calls."""
        device = like.device
        kept = self._scratch.get(str(device))
        if kept is None or kept.nbytes < nbytes:
            kept = self._scratch[str(device)] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return kept[:nbytes].view(like.dtype)


def _execute(
    steps: TorchProgram,
    buffers: Sequence[torch.Tensor],
    wires: GroupMessages,
    joined: Callable[..., object] | None,
) -> None:
    """Run a program to its end."""
    itemsize = buffers[0].element_size()
    raw = [line.view(torch.uint8) for line in buffers]
    values = [join_operand(line) for line in buffers]

    def messages(listed: Sequence[Move]) -> list[GroupMessage]:
        return [
            GroupMessage(one.peer, raw[one.buffer][one.offset : one.offset + one.nbytes], one.row)
            for one in listed
        ]

    def elements(part: Part, count: int) -> object:
        first = part[1] // itemsize
        return values[part[0]][first : first + count]

    def join(listed: Sequence[TorchJoin]) -> None:
        for one in listed:
            assert joined is not None, "only reductions join"
            own, arrived, target = (elements(part, one.count) for part in (one.own, one.arrived, one.target))
            joined(own, arrived, out=target)

    with np.errstate(all="ignore"):
        for turn in steps.turns:
            for one in turn.ended:
                wires.sent(one.peer, one.row)
            join(turn.joins)
            if turn.receives or turn.sends:
                wires.start(messages(turn.receives), messages(turn.sends))
            if turn.ahead:
                wires.start(messages(turn.ahead), [])
            for one in turn.arrivals:
                wires.received(one.peer, one.row)
        wires.settle()
    if buffers[0].is_cuda:
        torch.cuda.current_stream(buffers[0].device).synchronize()


def device_of(kind: str) -> torch.device:
    """Return the device of that kind on which this process works."""
    if kind != "cuda":
        return torch.device(kind)
    try:
        return torch.device(kind, torch.cuda.current_device())
    except (AssertionError, RuntimeError) as error:
        raise UsageError(
            f"the process group needs GPUs and torch finds none ({' '.join(str(error).split())[:100]}); look at "
            "CUDA_VISIBLE_DEVICES, install a torch that is built for CUDA, or make the group with gloo"
        ) from None
