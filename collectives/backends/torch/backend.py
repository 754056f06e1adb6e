"""The ranks of an existing process group, by messages of gloo or NCCL.

Every rank runs the table as a program of global steps (`program`); tensors are sent and received where they lie. After
a `BackendError` that is no disagreement the connections of the group are closed, as gloo itself does after a timeout:
that is how ranks learn of it which wait for others. Such a group must be destroyed and made anew, which ranks that go
on do (`TorchBackend.go_on`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from collectives.arrays.torch_arrays import TorchArrays, joining, operands
from collectives.backends.backend import Backend, Call, OneRank
from collectives.backends.stepped.program import Message as Move
from collectives.backends.torch.gloo_threads import let_go
from collectives.backends.torch.group_world import GroupWorld
from collectives.backends.torch.open_group import (
    asked_for,
    carrier_of,
    devices_of,
    existing_group,
    gloo_among,
    make_group,
)
from collectives.backends.torch.program import Join, Part, Program, program
from collectives.backends.torch.wires import LANES, GlooWires, Message, NcclWires, Wires
from collectives.peers.error_rounds import Gather
from collectives.peers.signature import Signature
from collectives.peers.survivors import Survivors
from topoplan.errors import RefusedError, UsageError


class TorchBackend(OneRank):
    """`Backend` of one rank of a process group, by its messages.

    Parameters
    ----------
    group : ProcessGroup, optional
        The default group if it is left out. Ranks are those of the group. The group may be used for other things
        between collectives; where it is NCCL's, not while one is in flight, since calls on one NCCL communicator must
        come in one order on all ranks.
    timeout : float
        Seconds that a rank waits for the messages of one step.
    served : mapping of str to str, optional
        What serves each kind of device in a group that torch does not know by name.
    survivors : Survivors, optional
        Of ranks that are left of another job, which go on here; this closes them. `meet_survivors` makes new ones.

    Raises
    ------
    UsageError
        torch.distributed is not initialised, this process is not in the group, the group uses neither gloo nor NCCL,
        or NCCL and torch finds no GPU.
    BackendError
        The other ranks of the group do not make a back end within the timeout.

    Attributes
    ----------
    about_engine : str
        What carries tensors on GPUs, and why nothing better; empty where the group takes none.
    """

    _world: GroupWorld

    name = "torch"
    one_rank = True
    direct = False
    averages = False
    chunk_bytes: int | None = None
    survivors: Survivors | None

    _lanes = 1
    """The next number of a back end, as far as this process knows."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: float = 30.0,
        served: Mapping[str, str] | None = None,
        survivors: Survivors | None = None,
    ) -> None:
        if group is None or served is None:
            group = existing_group(group)
            served = devices_of(group)
        self._group = group
        self.size = group.size()
        self.ranks: tuple[int, ...] = (group.rank(),)
        self.survivors = survivors
        self.arrays = TorchArrays([device_of(kind) for kind in served])
        self._wires: dict[str, Wires] = {}
        if "cpu" in served:
            self._wires["cpu"] = GlooWires(self._group, timeout=timeout)
        if "cuda" in served:
            gpu = next(device for device in self.arrays.devices if device.type == "cuda")
            self._wires["cuda"] = NcclWires(carrier_of(self._group), gpu, timeout=timeout)
        self._scratch: dict[str, torch.Tensor] = {}
        self._timeout = timeout
        self._owned = False
        self.about_engine = ""
        self._world = GroupWorld(
            self.ranks[0],
            self.size,
            [self._wires[device.type] for device in self.arrays.devices],
            self.arrays.devices[0],
            lane=TorchBackend._lanes,
            timeout=timeout,
        )
        for wires in self._wires.values():
            wires.lane = 1 + (self._world.lane - 1) % (LANES - 1)
        TorchBackend._lanes = self._world.lane + 1

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
        steps = program(call.table, memory.rank, memory.given, memory.block, call.itemsize, ahead=wires.ahead)
        joined = None if call.op is None else joining(call.op, memory.source)
        lines = (memory.source, memory.result, self._room(steps.scratch, memory.source))
        self._world.guarded(lambda: _execute(steps, lines, wires, joined))

    def meet_survivors(self, local: str) -> None:
        """Let ranks go on when others are gone, where all tensors are on the CPU; all ranks must call this.

        Parameters
        ----------
        local : str
            The address of this machine at which the others reach it.
        """
        if set(self._wires) == {"cpu"}:
            self.survivors = Survivors.of(self.gather_texts, self.ranks[0], local)

    @classmethod
    def among(
        cls, gather: Gather, *, rank: int, size: int, survivors: Survivors, timeout: float
    ) -> TorchBackend:
        """That of one of the ranks that are left of another job, or have joined it: over a new group of gloo."""
        group = gloo_among(gather, rank=rank, size=size, local=survivors.local, timeout=timeout)
        return cls(group, timeout=timeout, served={"cpu": "gloo"}, survivors=survivors)

    @property
    def about(self) -> dict[str, Any]:
        """See `GoesOn.about`."""
        return {}

    def go_on(self, gather: Gather, *, rank: int, size: int) -> Backend[Any]:
        """See `GoesOn.go_on`."""
        assert self.survivors is not None, "looked at before"
        self._world.close()
        made = TorchBackend.among(
            gather, rank=rank, size=size, survivors=self.survivors, timeout=self._timeout
        )
        made._owned, self._owned = self._owned, False
        return made

    def close(self) -> None:
        """See `Backend.close`."""
        self._world.close()
        self._scratch.clear()
        if self.survivors is not None:
            self.survivors.close()
        if self._owned:
            self._owned = False
            let_go()
            dist.destroy_process_group()

    def _agree(self, mine: Signature, kind: str) -> None:
        """Compare with all ranks, so that all of them refuse where two differ."""
        kinds = self._world.compare(mine, kind, timeout=self._timeout)
        for peer, where in enumerate(kinds):
            if where != kinds[0]:
                raise RefusedError(
                    f"rank {peer} has its tensors on {where} and rank 0 on {kinds[0]}; move them to the same kind",
                    rank=self.ranks[0],
                    peer=peer,
                    next_call=mine.call + 1,
                )

    def _room(self, nbytes: int, like: torch.Tensor) -> torch.Tensor:
        """Scratch memory of so many bytes, kept between calls."""
        device = like.device
        kept = self._scratch.get(str(device))
        if kept is None or kept.nbytes < nbytes:
            kept = self._scratch[str(device)] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return kept[:nbytes].view(like.dtype)


def _execute(
    steps: Program, lines: Sequence[torch.Tensor], wires: Wires, joined: Callable[..., object] | None
) -> None:
    """Run a program to its end."""
    itemsize = lines[0].element_size()
    raw = [line.view(torch.uint8) for line in lines]
    values = [operands(line) for line in lines]

    def messages(listed: Sequence[Move]) -> list[Message]:
        return [
            Message(one.peer, raw[one.buffer][one.offset : one.offset + one.nbytes], one.row)
            for one in listed
        ]

    def elements(part: Part, count: int) -> object:
        first = part[1] // itemsize
        return values[part[0]][first : first + count]

    def join(listed: Sequence[Join]) -> None:
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
    if lines[0].is_cuda:
        torch.cuda.current_stream(lines[0].device).synchronize()


def device_of(kind: str) -> torch.device:
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
