"""Send and receive over a process group with a deadline or the name of the failed peer, and a control plane over it.

Gloo's operations are waited for one by one, on the host. NCCL's are queued on the GPU: waiting for one only orders the
current stream behind it, so a few steps may be queued before the host checks whether the oldest ended.

The control plane gathers blocks as in Bruck et al., "Efficient algorithms for all-to-all communications in multiport
message-passing systems", IEEE TPDS 8 (1997), section 3: with N ranks ceil(log2 N) rounds, in each of which a rank sends
all it has to one peer. torch's own all_gather is not used because gloo gives it no timeout of its own.

Failure attribution: a process group only tells a rank that its own peer failed, perhaps because of another one. A rank
that fails therefore sends all others one datagram with the peer that it waited for, and listens for theirs. A rank that
others wait for and that sends none is dead, stopped, or elsewhere: every chain of waits ends there, so all ranks name
the same culprit. If datagrams cannot pass, every rank names its own peer.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from collectives.peers.address import host_identity
from collectives.peers.control_plane import ControlPlane, plain_message
from topoplan.errors import BackendError

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
    """A message did not get through: its `peer` and `step`, or None, and the `fault`, a clause about the peer."""

    def __init__(self, peer: int | None, step: int | None, fault: str) -> None:
        super().__init__(fault)
        self.peer = peer
        self.step = step
        self.fault = fault


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


class GlooMessages:
    """`GroupMessages` over gloo; the group need not be registered with torch.distributed. `timeout` is in seconds."""

    ahead = True

    def __init__(self, group: dist.ProcessGroup, *, timeout: float) -> None:
        self.lane = 0
        self._group = group
        self._timeout = timeout
        self._deadline = 0.0
        self._works: dict[tuple[bool, int, int | None], dist.Work] = {}

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

    def _post(self, sending: bool, message: GroupMessage) -> dist.Work:
        number = 0 if message.step is None else 1 + message.step % (TAGS - 1)
        return self._work(sending, message, (1 + self.lane) * TAGS + number)

    def _work(self, sending: bool, message: GroupMessage, tag: int) -> dist.Work:
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
                raise _lost(messages, fault)
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
    nccl = group._get_backend(device)
    # releases of torch differ in its name
    name = next((name for name in ("abort", "_abort", "_shutdown") if hasattr(nccl, name)), "shutdown")
    getattr(nccl, name)()


def _lost(messages: Sequence[GroupMessage], fault: str) -> LostPeer:
    """Return the loss of the first of some messages, or of an unknown peer if there are none."""
    return LostPeer(messages[0].peer, messages[0].step, fault) if messages else LostPeer(None, None, fault)


def _broken(error: RuntimeError) -> str:
    """Return a library's report of a broken connection, as a clause with the peer as its subject."""
    return f"is gone ({' '.join(str(error).split('] ', 1)[-1].split())[:100]})"


Result = TypeVar("Result")

LISTEN = 1.0
"""Seconds for which a failed rank listens."""


@dataclass(frozen=True, slots=True)
class FailureNotice:
    """The report of a failed rank: the awaited peer and row of the transfer table, and the fault.

    `fault` is a clause with the peer as its subject.
    """

    rank: int
    peer: int | None
    step: int | None
    fault: str


@dataclass(frozen=True, slots=True)
class NoticeAddress:
    """The address of a rank for failure notices.

    `host` is the same for ranks that reach each other by the loopback address; a message to the rank must contain
    `key`.
    """

    host: str
    addresses: tuple[str, ...]
    port: int
    key: str


BLOCK_BYTES = 640
"""Bytes of the first round of a gather: a signature fits, with some text."""


class GroupControlPlane(ControlPlane):
    """The control plane of the ranks of a process group, which must all make one.

    All ranks first send a block of `BLOCK_BYTES` with the length of the message in front. Longer messages end in a
    second round without padding: if one of 1024 ranks sends a plan, the others do not send as much.

    The first of `wires` carries the blocks; after the loss of a peer all are closed, so that ranks that wait for this
    one fail. Blocks are assembled on `device`. `lane` is the number of the back end, proposed by this rank, then as
    agreed. `timeout` is in seconds.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        wires: Sequence[GroupMessages],
        device: torch.device,
        *,
        lane: int,
        timeout: float,
    ) -> None:
        super().__init__(rank, size)
        self._wires = list(wires)
        self._device = device
        self._found: BackendError | None = None
        self._aborted: BackendError | None = None
        self._others: dict[int, NoticeAddress] = {}
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        port = self._socket.getsockname()[1]
        self._contact = NoticeAddress(host_identity(), _addresses(), port, secrets.token_hex(8))
        try:
            for one in self._wires:
                self.guarded(one.connect)
            mine = {"lane": lane, "contact": asdict(self._contact)}
            theirs = [json.loads(text) for text in self.texts(json.dumps(mine), timeout=timeout)]
        except BaseException:
            self.close()
            raise
        self.lane = max(int(one["lane"]) for one in theirs)
        self._others = {
            peer: NoticeAddress(**one["contact"]) for peer, one in enumerate(theirs) if peer != self.rank
        }

    def guarded(self, task: Callable[[], Result]) -> Result:
        """Return a task's result; after the loss of a peer notify all ranks and raise the culprit as `BackendError`."""
        try:
            return task()
        except LostPeer as lost:
            if self._aborted is not None:
                raise self._aborted from lost
            mine = FailureNotice(self.rank, lost.peer, lost.step, lost.fault)
            for wires in self._wires:
                wires.cut()
            self._tell(mine)
            self._found = _error(culprit(mine, {**self._listen(), self.rank: mine}), self.rank)
            raise self._found from lost

    def trouble(self) -> BackendError | None:
        return self._found

    def tell(self, error: BackendError) -> None:
        self._tell(FailureNotice(self.rank, error.peer, error.step, plain_message(error)))

    def abort(self, error: BackendError) -> None:
        self._found = self._aborted = error
        self.tell(error)
        for wires in self._wires:
            wires.close_connections()

    def stalled(self, timeout: float) -> None:
        """Return at once: every wait for a message ends by itself."""

    def close(self) -> None:
        self._socket.close()

    def gather(self, data: bytes, *, timeout: float) -> list[bytes]:
        return self.guarded(lambda: self._gathered(len(data).to_bytes(4, "big") + data))

    def _gathered(self, message: bytes) -> list[bytes]:
        blocks = self._exchange(message[:BLOCK_BYTES].ljust(BLOCK_BYTES), [BLOCK_BYTES] * self.size)
        lengths = [4 + int.from_bytes(block[:4], "big") for block in blocks]
        if max(lengths) > BLOCK_BYTES:
            rest = self._exchange(message[BLOCK_BYTES:], [max(0, length - BLOCK_BYTES) for length in lengths])
            blocks = [block + more for block, more in zip(blocks, rest, strict=True)]
        return [block[4:length] for block, length in zip(blocks, lengths, strict=True)]

    def _exchange(self, own: bytes, lengths: Sequence[int]) -> list[bytes]:
        """Return the bytes of every rank, in order of rank, of these lengths."""
        rank, size, wires = self.rank, self.size, self._wires[0]
        # the blocks of this rank, in the order rank, rank + 1, ...
        ends = [0, *accumulate(lengths[(rank + place) % size] for place in range(size))]
        have = torch.empty(ends[-1], dtype=torch.uint8, device=self._device)
        if own:
            have[: ends[1]] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        known = 1
        while known < size:
            more = min(known, size - known)
            ahead, behind = (rank + known) % size, (rank - known) % size
            receives = [GroupMessage(ahead, have[ends[known] : ends[known + more]])]
            sends = [GroupMessage(behind, have[: ends[more]])]
            # both ends know which are empty
            receives, sends = ([one for one in some if one.data.numel()] for some in (receives, sends))
            wires.start(receives, sends)
            for one in receives:
                wires.received(one.peer)
            for one in sends:
                wires.sent(one.peer)
            known += more
        wires.settle()
        gathered = have.cpu().numpy().tobytes()
        blocks = [gathered[ends[place] : ends[place + 1]] for place in range(size)]
        return [blocks[(other - rank) % size] for other in range(size)]

    def _tell(self, notice: FailureNotice) -> None:
        for contact in self._others.values():
            data = json.dumps({"key": contact.key, **asdict(notice)}).encode()
            here = contact.host == self._contact.host
            for address in ("127.0.0.1",) if here else contact.addresses:
                try:
                    self._socket.sendto(data, (address, contact.port))
                except OSError:
                    continue

    def _listen(self) -> dict[int, FailureNotice]:
        notices: dict[int, FailureNotice] = {}
        until = time.monotonic() + LISTEN
        while len(notices) < len(self._others) and (left := until - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                message = json.loads(self._socket.recv(4096))
                if message.pop("key") == self._contact.key:
                    notice = FailureNotice(**message)
                    notices.setdefault(notice.rank, notice)
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue
        return notices


def culprit(mine: FailureNotice, notices: Mapping[int, FailureNotice]) -> FailureNotice:
    """Return the notice at the end of the chain of waits that begins with this one.

    In a circle no rank was missing, and the notice of its lowest rank decides.

    >>> notices = {0: FailureNotice(0, 1, 7, "sent no data"), 1: FailureNotice(1, 2, 4, "is gone")}
    >>> culprit(notices[0], notices).peer
    2
    """
    chain = [mine]
    while (peer := chain[-1].peer) is not None and peer in notices:
        notice = notices[peer]
        if notice in chain:
            return min(chain[chain.index(notice) :], key=lambda one: one.rank)
        chain.append(notice)
    return chain[-1]


def _error(found: FailureNotice, rank: int) -> BackendError:
    """Return this rank's error when a notice, its own or another's, names the culprit."""
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


def _addresses() -> tuple[str, ...]:
    """Return IPv4 addresses of this host by its name and by the route to the group's first process; at most four."""
    found = []
    try:
        found += socket.gethostbyname_ex(socket.gethostname())[2]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
            found.append(probe.getsockname()[0])
    except OSError:
        pass
    return tuple(sorted({address for address in found if not address.startswith("127.")})[:4])
