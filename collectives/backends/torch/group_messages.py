"""Send and receive over a process group with a deadline or the name of the lost peer.

Gloo's operations are waited for one by one, on the host. NCCL's are queued on the GPU: waiting for one only orders the
current stream behind it, so a few steps may be queued before the host checks whether the oldest ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from collectives.peers.control_plane import Waiting

LANES = 62
"""Back ends of one group whose messages are kept apart, from 0; a training job's own messages have smaller tags."""

TAGS = 1 << 25
"""Tags of each back end."""

QUEUED = 4
"""Batches that may be queued on a GPU before the host checks the first one."""

POLL = 50e-6
"""Seconds between two checks of a GPU."""


@dataclass(frozen=True, slots=True)
class GroupMessage:
    """Bytes to or from a peer; `step` is a row of the transfer table, None outside of one."""

    peer: int
    data: torch.Tensor
    step: int | None = None


class LostPeer(Exception):
    """A message did not get through: its `peer` and `step`, or None, and the `fault`, a clause about the peer.

    `timed_out` says that the connection stood still for the timeout; otherwise it is closed.
    """

    def __init__(self, peer: int | None, step: int | None, fault: str, *, timed_out: bool = False) -> None:
        super().__init__(fault)
        self.peer = peer
        self.step = step
        self.fault = fault
        self.timed_out = timed_out


class GroupMessages(Protocol):
    """Messages between this rank and its peers."""

    ahead: bool
    """Receives may be posted before the step of their sends."""

    lane: int
    """Number of the back end, the same on all ranks, below `LANES`; 0 until they have agreed on one."""

    def connect(self) -> None:
        """Connect all ranks of the group before the first message; all of them must call it."""

    def start(self, receives: Sequence[GroupMessage], sends: Sequence[GroupMessage]) -> None:
        """Begin a step: all messages are under way from now on, and must end within the timeout."""

    def sent(self, peer: int, step: int | None = None) -> None:
        """Wait until a message has left, so that its memory may be reused."""

    def received(self, peer: int, step: int | None = None) -> None:
        """Wait until a message has arrived."""

    def settle(self) -> None:
        """Wait until nothing is under way."""

    def cut(self) -> None:
        """Drop what is under way, and close all connections."""

    def close_connections(self) -> None:
        """Close all connections of the group, so that every peer that waits on this rank fails; from any thread."""

    def waiting(self) -> Waiting:
        """Return the peer that this rank waits for in a collective; from any thread."""


class GlooMessages:
    """`GroupMessages` over gloo; the group need not be registered with torch.distributed. `timeout` is in seconds."""

    ahead = True

    def __init__(self, group: dist.ProcessGroup, *, timeout: float) -> None:
        self.lane = 0
        self._group = group
        self._timeout = timeout
        self._deadline = 0.0
        self._works: dict[tuple[bool, int, int | None], dist.Work] = {}
        self._last: tuple[bool, int, int | None] = (False, 0, None)

    def connect(self) -> None:
        """Return at once: gloo connected all ranks when the group was made."""

    def start(self, receives: Sequence[GroupMessage], sends: Sequence[GroupMessage]) -> None:
        self._deadline = time.monotonic() + self._timeout
        for sending, messages in ((False, receives), (True, sends)):
            for message in messages:
                key = (sending, message.peer, message.step)
                try:
                    self._works[key] = self._post(sending, message)
                except RuntimeError as error:
                    raise LostPeer(message.peer, message.step, _broken(error)) from error

    def sent(self, peer: int, step: int | None = None) -> None:
        self._wait((True, peer, step), "did not take data")

    def received(self, peer: int, step: int | None = None) -> None:
        self._wait((False, peer, step), "sent no data")

    def settle(self) -> None:
        """Return at once: every message has been waited for."""

    def cut(self) -> None:
        self._works.clear()
        self.close_connections()

    def close_connections(self) -> None:
        # gloo closes every connection of a group when a receive times out; this one has a tag of its own, since
        # gloo ends the process when a message does not fit into its receive
        nothing = torch.empty(1, dtype=torch.uint8)
        for peer in range(self._group.size()):
            if peer != self._group.rank():
                try:
                    self._work(False, GroupMessage(peer, nothing), (1 + LANES) * TAGS).wait(
                        timedelta(milliseconds=1)
                    )
                except RuntimeError:
                    continue

    def waiting(self) -> Waiting:
        _, peer, step = self._last
        return Waiting(peer, step, time.monotonic() + self._timeout - self._deadline)

    def _post(self, sending: bool, message: GroupMessage) -> dist.Work:
        number = 0 if message.step is None else 1 + message.step % (TAGS - 1)
        return self._work(sending, message, (1 + self.lane) * TAGS + number)

    def _work(self, sending: bool, message: GroupMessage, tag: int) -> dist.Work:
        operation = self._group.send if sending else self._group.recv
        work: dist.Work = operation([message.data], message.peer, tag)
        return work

    def _wait(self, key: tuple[bool, int, int | None], failing: str) -> None:
        left = max(self._deadline - time.monotonic(), 0.001)
        self._last = key
        try:
            self._works.pop(key).wait(timedelta(seconds=left))
        except RuntimeError as error:
            _, peer, step = key
            timed_out = "Timed out waiting" in str(error)
            fault = f"{failing} within {self._timeout:g} s" if timed_out else _broken(error)
            raise LostPeer(peer, step, fault, timed_out=timed_out) from error


class NcclMessages:
    """`GroupMessages` over NCCL: the messages of one step are one group call, the same on both sides, without tags.

    `device` is the GPU of this rank; `timeout` is in seconds.
    """

    ahead = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, timeout: float) -> None:
        self.lane = 0
        self._group = group
        self._device = device
        self._timeout = timeout
        self._queued: deque[tuple[float, list[dist.Work], Sequence[GroupMessage]]] = deque()
        self._unordered: list[dist.Work] = []

    def connect(self) -> None:
        """Reduce a number: NCCL does not specify sends and receives of some ranks as the first calls of a group."""
        with self._as_lost(()):
            works = [self._group.allreduce([torch.zeros((), device=self._device)])]
        self._follow(works, ())
        self.settle()

    def start(self, receives: Sequence[GroupMessage], sends: Sequence[GroupMessage]) -> None:
        messages = [*receives, *sends]
        if not messages:
            return
        while len(self._queued) >= QUEUED:
            self._end_first()
        with self._as_lost(messages):
            works = self._batch(receives, sends)
        self._follow(works, messages)

    def sent(self, peer: int, step: int | None = None) -> None:
        self._order()

    def received(self, peer: int, step: int | None = None) -> None:
        self._order()

    def settle(self) -> None:
        self._order()
        while self._queued:
            self._end_first()

    def cut(self) -> None:
        self._queued.clear()
        self._unordered = []
        self.close_connections()

    def close_connections(self) -> None:
        abort(self._group, self._device)

    def waiting(self) -> Waiting:
        with suppress(IndexError):
            deadline, _, messages = self._queued[0]
            if messages:
                idle = time.monotonic() + self._timeout - deadline
                return Waiting(messages[0].peer, messages[0].step, idle)
        return Waiting(0, None, 0.0)

    def _batch(self, receives: Sequence[GroupMessage], sends: Sequence[GroupMessage]) -> list[dist.Work]:
        """Make one group call, as `torch.distributed.batch_isend_irecv` does in registered groups."""
        self._group._start_coalescing(self._device)
        for one in receives:
            self._group.recv([one.data], one.peer, 0)
        for one in sends:
            self._group.send([one.data], one.peer, 0)
        return [self._group._end_coalescing(self._device)]

    def _follow(self, works: list[dist.Work], messages: Sequence[GroupMessage]) -> None:
        self._unordered += works
        self._queued.append((time.monotonic() + self._timeout, works, messages))

    def _order(self) -> None:
        for work in self._unordered:
            work.wait()
        self._unordered = []

    def _end_first(self) -> None:
        deadline, works, messages = self._queued.popleft()
        while not all(work.is_completed() for work in works):
            if time.monotonic() > deadline:
                peers = sorted({message.peer for message in messages})
                others = f"ranks {peers}" if peers else "the group"
                fault = f"or another one of {others} exchanged no data within {self._timeout:g} s"
                raise _lost(messages, fault, timed_out=True)
            time.sleep(POLL)
        with self._as_lost(messages):
            for work in works:
                self._check(work)

    @contextmanager
    def _as_lost(self, messages: Sequence[GroupMessage]) -> Iterator[None]:
        """Turn NCCL's errors into the loss of the first of some peers."""
        try:
            yield
        except RuntimeError as error:
            raise _lost(messages, _broken(error)) from error

    def _check(self, work: dist.Work) -> None:
        """Raise NCCL's error; only a wait with a time limit reports it, and returns at once for a completed work."""
        work.wait(timedelta(seconds=self._timeout))


def abort(group: dist.ProcessGroup, device: torch.device) -> None:
    """Abort a group's NCCL communicator on this rank, and no other library of the group."""
    nccl = (getattr(group, "get_backend", None) or group._get_backend)(device)  # public from torch 2.14 on
    # releases of torch differ in its name
    name = next((name for name in ("abort", "_abort", "_shutdown") if hasattr(nccl, name)), "shutdown")
    getattr(nccl, name)()


def _lost(messages: Sequence[GroupMessage], fault: str, *, timed_out: bool = False) -> LostPeer:
    """Return the loss of the first of some messages, or of an unknown peer if there are none."""
    peer, step = (messages[0].peer, messages[0].step) if messages else (None, None)
    return LostPeer(peer, step, fault, timed_out=timed_out)


def _broken(error: RuntimeError) -> str:
    """Return a library's report of a broken connection, as a clause with the peer as its subject."""
    return f"is gone ({' '.join(str(error).split('] ', 1)[-1].split())[:100]})"


TEXT_BYTES = 1024
"""Longest text of `text_of_rank_0`."""


def text_of_rank_0(wires: GroupMessages, text: str, *, rank: int, size: int, device: torch.device) -> str:
    """Return rank 0's text on all ranks; all of them call this. `device` is that of the messages."""
    data = torch.frombuffer(bytearray(text.encode().ljust(TEXT_BYTES)), dtype=torch.uint8).to(device)
    messages = [GroupMessage(peer, data) for peer in (range(1, size) if rank == 0 else [0])]
    wires.start(*(([], messages) if rank == 0 else (messages, [])))
    for one in messages:
        (wires.sent if rank == 0 else wires.received)(one.peer)
    wires.settle()
    return data.cpu().numpy().tobytes().decode().rstrip()
