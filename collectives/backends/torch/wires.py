"""Sends and receives of a process group, each ended within a timeout or with the name of the peer that failed.

Gloo's operations are waited for one by one, on the host. Those of NCCL are queued on the GPU: waiting for one only
orders the current stream behind it, so a few steps may be queued before the host looks whether the oldest ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

LANES = 62
"""Back ends of one group whose messages are kept apart, from 0; a training job's own messages have smaller tags."""

TAGS = 1 << 25
"""Tags of each of them."""

QUEUED = 4
"""Batches that may be queued on a GPU before the host looks whether the first has ended."""

POLL = 50e-6
"""Seconds between two looks at a GPU."""


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes that go to a peer, or come from it; ``step`` is a row of the transfer table, None outside of one."""

    peer: int
    data: torch.Tensor
    step: int | None = None


class LostPeer(Exception):
    """A message did not get through.

    Attributes
    ----------
    peer, step : int or None
        Whose and which message.
    fault : str
        What happened, as a clause with the peer as its subject.
    """

    def __init__(self, peer: int | None, step: int | None, fault: str) -> None:
        super().__init__(fault)
        self.peer = peer
        self.step = step
        self.fault = fault


class Wires(Protocol):
    """Messages between this rank and its peers."""

    ahead: bool
    """Whether receives may be posted before the step of their sends."""

    lane: int
    """Number of the back end, the same on all ranks, below `LANES`; 0 until they have agreed on one."""

    def meet(self) -> None:
        """Bring all ranks of the group together, before the first message; all of them must call it."""

    def start(self, receives: Sequence[Message], sends: Sequence[Message]) -> None:
        """Begin a step: all of these are under way from now on, and must end within the timeout."""

    def sent(self, peer: int, step: int | None = None) -> None:
        """Wait until a message has left, so that its memory may be written to."""

    def received(self, peer: int, step: int | None = None) -> None:
        """Wait until a message is there."""

    def settle(self) -> None:
        """Wait until nothing is under way any more."""

    def cut(self) -> None:
        """Forget what is under way, and close all connections."""

    def close_connections(self) -> None:
        """Close all connections of the group, so that every peer that waits on this rank notices; from any thread."""


class GlooWires:
    """`Wires` over gloo.

    Parameters
    ----------
    group : ProcessGroup
        It is spoken to itself, so it need not be one that torch.distributed has listed.
    timeout : float
        Seconds.
    """

    ahead = True

    def __init__(self, group: dist.ProcessGroup, *, timeout: float) -> None:
        self.lane = 0
        self._group = group
        self._timeout = timeout
        self._deadline = 0.0
        self._works: dict[tuple[bool, int, int | None], dist.Work] = {}

    def meet(self) -> None:
        """See `Wires.meet`: gloo has connected all ranks when the group was made."""

    def start(self, receives: Sequence[Message], sends: Sequence[Message]) -> None:
        """See `Wires.start`."""
        self._deadline = time.monotonic() + self._timeout
        for sending, messages in ((False, receives), (True, sends)):
            for message in messages:
                key = (sending, message.peer, message.step)
                try:
                    self._works[key] = self._post(sending, message)
                except RuntimeError as error:
                    raise LostPeer(message.peer, message.step, _broken(error)) from error

    def sent(self, peer: int, step: int | None = None) -> None:
        """See `Wires.sent`."""
        self._wait((True, peer, step), "did not take data")

    def received(self, peer: int, step: int | None = None) -> None:
        """See `Wires.received`."""
        self._wait((False, peer, step), "sent no data")

    def settle(self) -> None:
        """See `Wires.settle`: everything has been waited for."""

    def cut(self) -> None:
        """See `Wires.cut`."""
        self._works.clear()
        self.close_connections()

    def close_connections(self) -> None:
        """See `Wires.close_connections`."""
        # a receive that times out is what makes gloo close every connection of a group; with a tag of its own,
        # since gloo ends the process when a message does not fit into its receive
        nothing = torch.empty(1, dtype=torch.uint8)
        for peer in range(self._group.size()):
            if peer != self._group.rank():
                try:
                    self._work(False, Message(peer, nothing), (1 + LANES) * TAGS).wait(
                        timedelta(milliseconds=1)
                    )
                except RuntimeError:
                    continue

    def _post(self, sending: bool, message: Message) -> dist.Work:
        number = 0 if message.step is None else 1 + message.step % (TAGS - 1)
        return self._work(sending, message, (1 + self.lane) * TAGS + number)

    def _work(self, sending: bool, message: Message, tag: int) -> dist.Work:
        operation = self._group.send if sending else self._group.recv
        work: dist.Work = operation([message.data], message.peer, tag)
        return work

    def _wait(self, key: tuple[bool, int, int | None], failing: str) -> None:
        left = max(self._deadline - time.monotonic(), 0.001)
        try:
            self._works.pop(key).wait(timedelta(seconds=left))
        except RuntimeError as error:
            _, peer, step = key
            timed_out = "Timed out waiting" in str(error)
            fault = f"{failing} within {self._timeout:g} s" if timed_out else _broken(error)
            raise LostPeer(peer, step, fault) from error


class NcclWires:
    """`Wires` over NCCL: what starts in one step is one group call, the same on both sides. It knows no tags.

    Parameters
    ----------
    group : ProcessGroup
        Spoken to itself, too.
    device : torch.device
        The GPU of this rank.
    timeout : float
        Seconds.
    """

    ahead = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, timeout: float) -> None:
        self.lane = 0
        self._group = group
        self._device = device
        self._timeout = timeout
        self._queued: deque[tuple[float, list[dist.Work], Sequence[Message]]] = deque()
        self._unordered: list[dist.Work] = []

    def meet(self) -> None:
        """See `Wires.meet`: NCCL leaves it open what sends and receives of some ranks do in a group of no calls yet."""
        with self._as_lost(()):
            works = [self._group.allreduce([torch.zeros((), device=self._device)])]
        self._follow(works, ())
        self.settle()

    def start(self, receives: Sequence[Message], sends: Sequence[Message]) -> None:
        """See `Wires.start`."""
        messages = [*receives, *sends]
        if not messages:
            return
        while len(self._queued) >= QUEUED:
            self._end_first()
        with self._as_lost(messages):
            works = self._batch(receives, sends)
        self._follow(works, messages)

    def sent(self, peer: int, step: int | None = None) -> None:
        """See `Wires.sent`: the stream is behind the whole batch."""
        self._order()

    def received(self, peer: int, step: int | None = None) -> None:
        """See `Wires.received`: the stream is behind the whole batch."""
        self._order()

    def settle(self) -> None:
        """See `Wires.settle`."""
        self._order()
        while self._queued:
            self._end_first()

    def cut(self) -> None:
        """See `Wires.cut`."""
        self._queued.clear()
        self._unordered = []
        self.close_connections()

    def close_connections(self) -> None:
        """See `Wires.close_connections`."""
        abort(self._group, self._device)

    def _batch(self, receives: Sequence[Message], sends: Sequence[Message]) -> list[dist.Work]:
        """One group call, as `torch.distributed.batch_isend_irecv` makes it in groups that it has listed."""
        self._group._start_coalescing(self._device)
        for one in receives:
            self._group.recv([one.data], one.peer, 0)
        for one in sends:
            self._group.send([one.data], one.peer, 0)
        return [self._group._end_coalescing(self._device)]

    def _follow(self, works: list[dist.Work], messages: Sequence[Message]) -> None:
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
                raise _lost(messages, fault)
            time.sleep(POLL)
        with self._as_lost(messages):
            for work in works:
                self._check(work)

    @contextmanager
    def _as_lost(self, messages: Sequence[Message]) -> Iterator[None]:
        """Turn what NCCL raises into the loss of the first of some peers."""
        try:
            yield
        except RuntimeError as error:
            raise _lost(messages, _broken(error)) from error

    def _check(self, work: dist.Work) -> None:
        """Raise what NCCL met; only a wait with a time limit tells, which does not wait for what has ended."""
        work.wait(timedelta(seconds=self._timeout))


def abort(group: dist.ProcessGroup, device: torch.device) -> None:
    """End what a group's NCCL has under way, on this rank, and leave what else serves the group alone."""
    nccl = group._get_backend(device)
    # releases of torch differ in what it is called
    name = next((name for name in ("abort", "_abort", "_shutdown") if hasattr(nccl, name)), "shutdown")
    getattr(nccl, name)()


def _lost(messages: Sequence[Message], fault: str) -> LostPeer:
    """The loss of the first of some messages, or of nobody who is known where there are none."""
    return LostPeer(messages[0].peer, messages[0].step, fault) if messages else LostPeer(None, None, fault)


def _broken(error: RuntimeError) -> str:
    """What a library says about a broken connection, as a clause with the peer as its subject."""
    return f"is gone ({' '.join(str(error).split('] ', 1)[-1].split())[:100]})"
