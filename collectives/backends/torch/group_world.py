"""A world of the ranks of a process group: small blocks of bytes over its messages, and one datagram after a failure.

Blocks are gathered as in Bruck et al., "Efficient algorithms for all-to-all communications in multiport
message-passing systems", IEEE TPDS 8 (1997), section 3: with N ranks ceil(log2 N) rounds, in each of which a rank sends
all it has to one peer. torch's own all_gather is not used because gloo gives it no timeout of its own, and a thread
that hangs in it would outlive the error.

A process group only tells a rank that its own peer failed, and that peer may have failed because of another one.
So every rank that fails tells all others, by one datagram each, for whom it waited, and listens for a moment to
what they tell. Whoever is waited for and tells nothing is dead, stopped, or elsewhere: the chain of waiting from
any rank ends there, so all ranks name the same culprit. Nothing of that is sent while all goes well. Where datagrams
cannot pass, every rank names its own peer.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import TypeVar

import torch

from collectives.backends.torch.wires import LostPeer, Message, Wires
from collectives.peers.address import this_host
from collectives.peers.peers import BlockWorld, plain
from topoplan.errors import BackendError

Result = TypeVar("Result")

LISTEN = 1.0
"""Seconds for which a failed rank listens."""


@dataclass(frozen=True, slots=True)
class Notice:
    """What a failed rank tells.

    Parameters
    ----------
    rank : int
    peer : int or None
        For whom it waited.
    step : int or None
        Row of the transfer table.
    fault : str
        What happened, as a clause with the peer as its subject.
    """

    rank: int
    peer: int | None
    step: int | None
    fault: str


@dataclass(frozen=True, slots=True)
class Contact:
    """Where a rank can be told something.

    Parameters
    ----------
    host : str
        The same for ranks that reach each other by the loopback address.
    addresses : tuple of str
    port : int
    key : str
        What a message to it must hold.
    """

    host: str
    addresses: tuple[str, ...]
    port: int
    key: str


class GroupWorld(BlockWorld):
    """`World` of the ranks of a process group, which must all make one.

    Parameters
    ----------
    rank, size : int
    wires : sequence of Wires
        The first carries the blocks; where a peer is lost all are cut, so that ranks that wait for this one notice.
    device : torch.device
        Where blocks are put together.
    lane : int
        The number of the back end, as far as this rank knows.
    timeout : float
        Seconds to wait for the other ranks.

    Attributes
    ----------
    lane : int
        The number that all ranks have agreed on.
    """

    def __init__(
        self, rank: int, size: int, wires: Sequence[Wires], device: torch.device, *, lane: int, timeout: float
    ) -> None:
        super().__init__(rank, size)
        self._wires = list(wires)
        self._device = device
        self._found: BackendError | None = None
        self._aborted: BackendError | None = None
        self._others: dict[int, Contact] = {}
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        port = self._socket.getsockname()[1]
        self._contact = Contact(this_host(), _addresses(), port, secrets.token_hex(8))
        try:
            for one in self._wires:
                self.guarded(one.meet)
            mine = {"lane": lane, "contact": asdict(self._contact)}
            theirs = [json.loads(text) for text in self.texts(json.dumps(mine), timeout=timeout)]
        except BaseException:
            self.close()
            raise
        self.lane = max(int(one["lane"]) for one in theirs)
        self._others = {
            peer: Contact(**one["contact"]) for peer, one in enumerate(theirs) if peer != self.rank
        }

    def guarded(self, task: Callable[[], Result]) -> Result:
        """A task's result; where a peer is lost, all ranks are told and the culprit is named.

        Raises
        ------
        BackendError
        """
        try:
            return task()
        except LostPeer as lost:
            if self._aborted is not None:
                raise self._aborted from lost
            mine = Notice(self.rank, lost.peer, lost.step, lost.fault)
            for wires in self._wires:
                wires.cut()
            self._tell(mine)
            self._found = _error(culprit(mine, {**self._listen(), self.rank: mine}), self.rank)
            raise self._found from lost

    def trouble(self) -> BackendError | None:
        """See `World.trouble`."""
        return self._found

    def tell(self, error: BackendError) -> None:
        """See `World.tell`: by a datagram, for ranks that fail too."""
        self._tell(Notice(self.rank, error.peer, error.step, plain(error)))

    def abort(self, error: BackendError) -> None:
        """See `World.abort`: waits for messages end when their connections are closed."""
        self._found = self._aborted = error
        self.tell(error)
        for wires in self._wires:
            wires.close_connections()

    def stalled(self, timeout: float) -> None:
        """See `World.stalled`: every wait for a message ends by itself."""

    def close(self) -> None:
        """See `World.close`."""
        self._socket.close()

    def _exchange(self, own: bytes, lengths: Sequence[int], timeout: float) -> list[bytes]:
        """See `BlockWorld`; each message has the timeout of the wires."""
        return self.guarded(lambda: self._gathered(own, lengths))

    def _gathered(self, own: bytes, lengths: Sequence[int]) -> list[bytes]:
        rank, size, wires = self.rank, self.size, self._wires[0]
        # what this rank has, in the order rank, rank + 1, ...
        ends = [0, *accumulate(lengths[(rank + place) % size] for place in range(size))]
        have = torch.empty(ends[-1], dtype=torch.uint8, device=self._device)
        if own:
            have[: ends[1]] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        known = 1
        while known < size:
            more = min(known, size - known)
            ahead, behind = (rank + known) % size, (rank - known) % size
            receives = [Message(ahead, have[ends[known] : ends[known + more]])]
            sends = [Message(behind, have[: ends[more]])]
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

    def _tell(self, notice: Notice) -> None:
        for contact in self._others.values():
            data = json.dumps({"key": contact.key, **asdict(notice)}).encode()
            here = contact.host == self._contact.host
            for address in ("127.0.0.1",) if here else contact.addresses:
                try:
                    self._socket.sendto(data, (address, contact.port))
                except OSError:
                    continue

    def _listen(self) -> dict[int, Notice]:
        told: dict[int, Notice] = {}
        until = time.monotonic() + LISTEN
        while len(told) < len(self._others) and (left := until - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                message = json.loads(self._socket.recv(4096))
                if message.pop("key") == self._contact.key:
                    notice = Notice(**message)
                    told.setdefault(notice.rank, notice)
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue
        return told


def culprit(mine: Notice, told: Mapping[int, Notice]) -> Notice:
    """The notice at the end of the chain of waiting that begins with this one.

    Where the chain runs in a circle everybody was there, and the lowest rank of the circle is believed.

    Examples
    --------
    >>> told = {0: Notice(0, 1, 7, "sent no data"), 1: Notice(1, 2, 4, "is gone")}
    >>> culprit(told[0], told).peer
    2
    """
    chain = [mine]
    while (peer := chain[-1].peer) is not None and peer in told:
        notice = told[peer]
        if notice in chain:
            return min(chain[chain.index(notice) :], key=lambda one: one.rank)
        chain.append(notice)
    return chain[-1]


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


def _addresses() -> tuple[str, ...]:
    """IPv4 addresses of this host, as its name and the way to the group's first process tell; at most four."""
    found = []
    try:
        found += socket.gethostbyname_ex(socket.gethostname())[2]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
            found.append(probe.getsockname()[0])
    except OSError:
        pass
    return tuple(sorted({address for address in found if not address.startswith("127.")})[:4])
