"""After a failure: which rank is to blame, found out by asking who is still there.

A process group only tells a rank that its own peer failed, and that peer may have failed because of another one.
So every rank that fails tells all others, by one datagram each, for whom it waited, and listens for a moment to
what they tell. Whoever is waited for and tells nothing is dead, stopped, or elsewhere: the chain of waiting from
any rank ends there, so all ranks name the same culprit.

Nothing is sent while all goes well. Where datagrams cannot pass, every rank names its own peer.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

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


class RollCall:
    """One rank's datagram socket; the others must know its ``contact``, and theirs are given to `meet`."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._others: dict[int, Contact] = {}
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        port = self._socket.getsockname()[1]
        self.contact = Contact(_host(), _addresses(), port, secrets.token_hex(8))

    def meet(self, contacts: Sequence[Contact]) -> None:
        """Take in the contacts of all ranks, in the order of the ranks."""
        self._others = {rank: contact for rank, contact in enumerate(contacts) if rank != self.rank}

    def blame(self, mine: Notice) -> Notice:
        """Tell the others what happened here, listen, and give the notice that names the culprit.

        It is this rank's own where its peer, or whoever that one waited for, did not tell anything.
        """
        for contact in self._others.values():
            self._tell(mine, contact)
        return culprit(mine, {**self._listen(), mine.rank: mine})

    def close(self) -> None:
        """Give up the socket; closing twice is fine."""
        self._socket.close()

    def _tell(self, notice: Notice, contact: Contact) -> None:
        data = json.dumps({"key": contact.key, **asdict(notice)}).encode()
        here = contact.host == self.contact.host
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
                if message.pop("key") == self.contact.key:
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


def _host() -> str:
    """What two ranks have in common that reach each other by the loopback address."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/net")
    except OSError:
        return socket.gethostname()


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
