"""The torch back end: sends and receives of an existing process group, gloo's or NCCL's.

Every rank runs the table as a program of global steps (`program`); tensors are sent and received where they lie.
After a `BackendError` that is no disagreement the connections of the group are closed, as gloo itself does after a
timeout: that is how ranks learn of it which wait for others. Such a group must be destroyed and made anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from collectives.arrays.torch_arrays import TorchArrays, joining, operands
from collectives.backends.backend import Call, RankArrays
from collectives.backends.torch.exchange import BLOCK, exchange
from collectives.backends.torch.gloo_threads import let_go
from collectives.backends.torch.open_group import (
    asked_for,
    carrier_of,
    devices_of,
    existing_group,
    make_group,
)
from collectives.backends.torch.program import Part, Program, Transfer, program
from collectives.backends.torch.roll_call import Contact, Notice, RollCall
from collectives.backends.torch.wires import LANES, GlooWires, LostPeer, Message, NcclWires, Wires
from collectives.peers.signature import LENGTH, Signature
from topoplan.errors import BackendError, UsageError

Result = TypeVar("Result")


class TorchBackend:
    """`Backend` of one rank of a process group.

    Parameters
    ----------
    group : ProcessGroup, optional
        The default group if it is left out. Ranks are those of the group. The group may be used for other things
        between collectives; where it is NCCL's, not while one is in flight, since calls on one NCCL communicator must
        come in one order on all ranks.
    timeout : float
        Seconds that a rank waits for the messages of one step.

    Raises
    ------
    UsageError
        torch.distributed is not initialised, this process is not in the group, the group uses neither gloo nor NCCL,
        or NCCL and torch finds no GPU.
    BackendError
        The other ranks of the group do not make a back end within the timeout.
    """

    name = "torch"
    one_rank = True
    direct = False
    averages = False
    chunk_bytes: int | None = None

    _lanes = 1
    """The next number of a back end, as far as this process knows."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float = 30.0) -> None:
        self._group = existing_group(group)
        served = devices_of(self._group)
        self.size = dist.get_world_size(self._group)
        self.ranks: tuple[int, ...] = (dist.get_rank(self._group),)
        self.arrays = TorchArrays([_device(kind) for kind in served])
        self._wires: dict[str, Wires] = {}
        if "cpu" in served:
            self._wires["cpu"] = GlooWires(self._group, timeout=timeout)
        if "cuda" in served:
            gpu = next(device for device in self.arrays.devices if device.type == "cuda")
            self._wires["cuda"] = NcclWires(carrier_of(self._group), gpu, timeout=timeout)
        self._small = self.arrays.devices[0]
        self._scratch: dict[str, torch.Tensor] = {}
        self._owned = False
        self._roll_call = RollCall(self.ranks[0])
        try:
            self._meet()
        except BackendError:
            self.close()
            raise

    @classmethod
    def open(cls, *, timeout: float) -> TorchBackend:
        """Over the default group; made here, and destroyed by `close`, where torchrun asks for one."""
        owned = asked_for()
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
        """See `Backend.run`."""
        (memory,) = call.memory
        kind = memory.source.device.type
        self._agree(call.signature, kind)
        wires = self._wires[kind]
        steps = program(call.table, memory.rank, memory.given, memory.block, ahead=wires.ahead)
        joined = None if call.op is None else joining(call.op, memory.source)
        lines = self._lines(steps, memory)
        self._guarded(lambda: _execute(steps, lines, wires, joined))

    def refuse(self, signature: Signature) -> None:
        """See `Backend.refuse`."""
        try:
            self._exchange(self._block(signature, ""))
        except BackendError:
            return  # the caller has an error of his own to hear of

    def largest(self, value: float) -> float:
        """See `Backend.largest`."""
        blocks = self._exchange(value.hex().encode())
        values = []
        for peer, block in enumerate(blocks):
            try:
                values.append(float.fromhex(block.decode().strip()))
            except ValueError:
                raise BackendError(
                    "the peer runs a collective while this rank compares times; make the same calls on all ranks",
                    rank=self.ranks[0],
                    peer=peer,
                ) from None
        return max(values)

    def agree(self, signature: Signature) -> None:
        """See `GathersTexts.agree`."""
        self._agree(signature, "")

    def gather_texts(self, text: str) -> list[str]:
        """See `GathersTexts.gather_texts`."""
        data = text.encode()
        lengths = []
        for peer, block in enumerate(self._exchange(str(len(data)).encode())):
            if not block.strip().isdigit():
                raise BackendError(
                    "the peer is at something else than this rank, which waits for a plan; make the same calls on all "
                    "ranks",
                    rank=self.ranks[0],
                    peer=peer,
                )
            lengths.append(int(block))
        found = self._exchange(data, length=max(1, *lengths))
        return [one[:length].decode() for one, length in zip(found, lengths, strict=True)]

    def close(self) -> None:
        """See `Backend.close`."""
        self._roll_call.close()
        self._scratch.clear()
        if self._owned:
            self._owned = False
            let_go()
            dist.destroy_process_group()

    def _meet(self) -> None:
        """Tell all ranks where this one listens, and agree on a lane for the messages of this back end."""
        for wires in self._wires.values():
            self._guarded(wires.meet)
        mine = {"lane": TorchBackend._lanes, "contact": asdict(self._roll_call.contact)}
        theirs = [json.loads(block) for block in self._exchange(json.dumps(mine).encode())]
        lane = max(one["lane"] for one in theirs)
        self._roll_call.meet([Contact(**one["contact"]) for one in theirs])
        for wires in self._wires.values():
            wires.lane = 1 + (lane - 1) % (LANES - 1)
        TorchBackend._lanes = lane + 1

    def _agree(self, mine: Signature, kind: str) -> None:
        """Compare with all ranks, so that all of them fail where two differ."""
        (rank,) = self.ranks
        blocks = self._exchange(self._block(mine, kind))
        theirs = [(_signature(block, rank=rank, peer=peer), peer) for peer, block in enumerate(blocks)]
        for other, peer in sorted(theirs, key=lambda one: not one[0].refusal):
            mine.check(other, rank=rank, peer=peer)
        for peer, block in enumerate(blocks):
            where = block[LENGTH:].decode().strip()
            if where != kind:
                raise BackendError(
                    f"the peer has its tensors on {where} and this rank on {kind}; move them to the same kind",
                    rank=rank,
                    peer=peer,
                )

    def _block(self, signature: Signature, kind: str) -> bytes:
        return signature.pack() + kind.encode()

    def _exchange(self, block: bytes, length: int = BLOCK) -> list[bytes]:
        wires = self._wires[self._small.type]
        place = {"rank": self.ranks[0], "size": self.size}
        return self._guarded(lambda: exchange(block, wires, **place, device=self._small, length=length))

    def _lines(self, steps: Program, memory: RankArrays[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The rank's contribution, its result, and scratch memory, as the parts of a program count them."""
        device = memory.source.device
        elements = steps.slots * steps.slot
        nbytes = elements * memory.source.element_size()
        kept = self._scratch.get(str(device))
        if kept is None or kept.nbytes < nbytes:
            kept = self._scratch[str(device)] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return memory.source, memory.result, kept[:nbytes].view(memory.source.dtype)

    def _guarded(self, task: Callable[[], Result]) -> Result:
        """A task's result; where a peer is lost, all ranks are told and the culprit is named."""
        try:
            return task()
        except LostPeer as lost:
            (rank,) = self.ranks
            mine = Notice(rank, lost.peer, lost.step, lost.fault)
            for wires in self._wires.values():
                wires.cut()
            found = self._roll_call.blame(mine)
            raise _error(found, rank) from lost


def _execute(
    steps: Program, lines: Sequence[torch.Tensor], wires: Wires, joined: Callable[..., object] | None
) -> None:
    """Run a program to its end."""
    itemsize = lines[0].element_size()
    raw = [line.view(torch.uint8) for line in lines]
    values = [operands(line) for line in lines]

    def message(transfer: Transfer) -> Message:
        part = transfer.part
        data = raw[part.line][part.start * itemsize : part.stop * itemsize]
        return Message(transfer.peer, data, transfer.row)

    def elements(part: Part) -> object:
        return values[part.line][part.start : part.stop]

    with np.errstate(all="ignore"):
        for step in steps.steps:
            for transfer in step.ended:
                wires.sent(transfer.peer, transfer.row)
            wires.start([message(one) for one in step.receives], [message(one) for one in step.sends])
            for arrival in step.arrivals:
                wires.received(arrival.peer, arrival.row)
                if arrival.own is not None:
                    assert joined is not None, "only reductions join"
                    joined(elements(arrival.own), elements(arrival.arrived), out=elements(arrival.target))
        wires.settle()
    if lines[0].is_cuda:
        torch.cuda.current_stream(lines[0].device).synchronize()


def _signature(block: bytes, *, rank: int, peer: int) -> Signature:
    try:
        return Signature.unpack(block[:LENGTH])
    except ValueError as error:
        raise BackendError(
            "the peer compares times while this rank runs a collective; make the same calls on all ranks",
            rank=rank,
            peer=peer,
        ) from error


def _error(found: Notice, rank: int) -> BackendError:
    """What this rank raises when a notice, its own or another's, names the culprit."""
    if found.peer == rank:
        message = f"the other ranks gave up on this one: rank {found.rank} says that it {found.fault}"
    elif found.rank == rank:
        message = f"the peer {found.fault}"
    else:
        message = f"the peer {found.fault}, as rank {found.rank} found"
    return BackendError(
        f"{message}; see what its process did and whether it had fewer batches, and make a new process group",
        rank=rank,
        peer=found.peer,
        step=found.step,
    )


def _device(kind: str) -> torch.device:
    """The device of that kind on which this process works."""
    if kind != "cuda":
        return torch.device(kind)
    try:
        return torch.device(kind, torch.cuda.current_device())
    except (AssertionError, RuntimeError) as error:
        raise UsageError(
            f"the process group is for GPUs and torch finds none ({' '.join(str(error).split())[:100]}); look at "
            "CUDA_VISIBLE_DEVICES, install a torch that is built for CUDA, or make the group with gloo"
        ) from None
