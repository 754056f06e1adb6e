"""Plans through memory that the processes of a training job share, where all of them run on one host.

What the mpi back end does on one host, without MPI: ranks meet over the process group, and from then on read each
other's values where they lie. Kept to processors that show stores in the order in which they were made: on others
MPI's fence is needed. bfloat16, which numpy lacks, goes by messages.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from platform import machine
from typing import Any

import torch
from numpy.typing import NDArray

from collectives.backends.backend import Backend, Call, RankArrays
from collectives.backends.mpi.agreement import Agreement
from collectives.backends.mpi.backend import CACHED_CHUNK, MpiBackend
from collectives.backends.mpi.control import CLOSED, Control
from collectives.backends.mpi.fence import ORDERED
from collectives.backends.mpi.notices import Notices
from collectives.backends.mpi.operations import Program
from collectives.backends.mpi.placement import Placement
from collectives.backends.mpi.segment import Segment, can_share, create_memory, open_memory
from collectives.backends.mpi.transport import Transport
from collectives.backends.mpi.watch import Watch
from collectives.backends.torch.backend import TorchBackend
from collectives.torch.agreement import Gather

BY_MESSAGES = "bfloat16"


class HostBackend(MpiBackend):
    """`Backend` of one rank of a process group, all of whose ranks run on this host and share memory.

    Parameters
    ----------
    messages : TorchBackend
        Over the same group: for what does not go through memory. Closed with this one.
    placement : Placement
        One host.
    segment : Segment
    timeout : float
        Seconds that a rank waits for another one, in each step.
    """

    name = "torch"

    def __init__(
        self, messages: TorchBackend, placement: Placement, segment: Segment, *, timeout: float
    ) -> None:
        self.size = messages.size
        self.ranks = messages.ranks
        self.arrays = messages.arrays  # type: ignore[assignment]  # tensors, where MPI has numpy's arrays
        self.chunk_bytes = CACHED_CHUNK
        self._by_messages = messages
        self._placement, self._segment = placement, segment
        self._control = Control(segment.control, placement.place)
        self._notices = Notices(None, placement)
        self._watch = Watch(self._control, placement, self._notices, timeout)
        self._agreement = Agreement(None, self._control, placement, self._watch)
        self._places = {rank: place for place, rank in enumerate(placement.members)}
        self._calls = 0
        self._closed = False

    def run(self, call: Call[Any]) -> None:
        """See `Backend.run`."""
        (memory,) = call.memory
        if call.dtype != BY_MESSAGES:
            numbers = RankArrays(
                memory.rank, memory.given, memory.source.numpy(), memory.block, memory.result.numpy()
            )
            super().run(replace(call, memory=(numbers,)))
            return
        mine = call.signature.pack()
        self._agreement.reach(mine, lambda notes: self._compare(mine, notes))
        whole = torch.empty_like(memory.result)  # messages may fail when a part of the result is there
        self._by_messages.run(replace(call, memory=(replace(memory, result=whole),)))
        memory.result.copy_(whole)

    def close(self) -> None:
        """See `Backend.close`."""
        if not self._closed:
            self._closed = True
            self._control.announce(CLOSED, 1)
            self._segment.close()
            self._by_messages.close()

    def _messages(self, program: Program, scratch: NDArray[Any]) -> Transport:
        return _NoMessages()


class _NoMessages(Transport):
    """The messages of ranks that all share memory."""

    def __init__(self) -> None:
        self._sends = []


def backend_of(messages: TorchBackend, gather: Gather, *, timeout: float) -> Backend[Any]:
    """The back end for a group: through memory where all its ranks can share some; all of them must call this.

    Parameters
    ----------
    messages : TorchBackend
    gather : callable
        Over its ranks.
    timeout : float
        Seconds that a rank waits for another one, in each step.
    """
    rank = messages.ranks[0]
    able = can_share() and machine() in ORDERED and _on_cpu(messages)
    descriptor = create_memory() if able and rank == 0 else -1
    told = [
        json.loads(text) for text in gather(json.dumps([able, os.getpid(), descriptor, _file(descriptor)]))
    ]
    if not all(one[0] for one in told):
        _give_up(descriptor)
        return messages
    _, pid, number, file = told[0]
    if rank:
        descriptor = _opened(pid, number, file)
    pids = [one[1] for one in told]
    seen = descriptor >= 0 and all(Path(f"/proc/{other}/stat").exists() for other in pids)
    if not all(gather("seen" if seen else "")):
        _give_up(descriptor)
        return messages
    placement = Placement(rank, (0,) * messages.size, tuple(pids))
    segment = Segment(descriptor, Control.size(messages.size))
    gather("mapped")  # nobody tells anything before all can see it
    return HostBackend(messages, placement, segment, timeout=timeout)


def _on_cpu(messages: TorchBackend) -> bool:
    return [device.type for device in messages.arrays.devices] == ["cpu"]


def _opened(pid: int, number: int, file: Sequence[int]) -> int:
    """The memory of rank 0; -1 where that process is not one of this host's, or not to be seen from here."""
    try:
        descriptor = open_memory(pid, number)
    except OSError:
        return -1
    if _file(descriptor) == list(file):
        return descriptor
    os.close(descriptor)
    return -1


def _file(descriptor: int) -> list[int | str]:
    """What tells one memory from all others, on any host."""
    if descriptor < 0:
        return []
    known = os.fstat(descriptor)
    return [known.st_dev, known.st_ino, Path("/proc/sys/kernel/random/boot_id").read_text().strip()]


def _give_up(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)
