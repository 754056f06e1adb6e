"""The links of one rank: where it listens, those it has opened, those that were opened to it.

A link is opened by its source, when a transfer table first has chunks for it; the destination listens all the time,
so both need not act together. A connection introduces itself with the job's token and its queue; what does not is
closed and forgotten.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from collectives.backends.tcp.flow import Flow
from collectives.backends.tcp.link import Broken, Ended, Incoming, Outgoing
from collectives.backends.tcp.sockets import connect, read, tune
from collectives.backends.tcp.wires import Queue, Wire
from collectives.peers.rendezvous import STRANGER_SECONDS
from collectives.peers.rendezvous_client import Watcher
from topoplan.errors import UsageError

INTRODUCTION = 192
"""Bytes with which a connection introduces itself."""

MEETING = "meeting"
"""The channel of connections over which ranks meet."""


class Network:
    """Listens for links to a rank, and opens links from it.

    Parameters
    ----------
    rank : int
    general : str or None
        Address for links that are not among the wires.
    wires : dict of queue to Wire
    lock : threading.RLock
        Of the back end.
    changed : threading.Condition
        On that lock; told when a connection has come over which ranks meet.
    flow : callable
        The collective that runs now, or None.
    broken, ended : callable
        Told of every link that fails, and of every one that its other end has closed.

    Raises
    ------
    UsageError
        An address of the wires is not one of this machine.
    """

    def __init__(
        self,
        rank: int,
        general: str | None,
        wires: Mapping[Queue, Wire],
        *,
        lock: threading.RLock,
        changed: threading.Condition,
        flow: Callable[[], Flow | None],
        broken: Broken,
        ended: Ended,
    ) -> None:
        self.rank = rank
        self.general = general
        self.outgoing: dict[Queue, Outgoing] = {}
        self.telling: dict[int, socket.socket] = {}
        self.hearing: dict[int, socket.socket] = {}
        self._wires = wires
        self._lock = lock
        self._changed = changed
        self._flow = flow
        self._broken = broken
        self._ended = ended
        self._incoming: dict[Queue, Incoming] = {}
        self._threads: list[threading.Thread] = []
        self._connections: set[socket.socket] = set()
        self._listeners: dict[str, socket.socket] = {}
        self._peers: Mapping[str, Any] = {}
        self._token = ""
        self._watcher: Watcher | None = None
        self._closed = False
        addresses = {wire.reaches for wire in wires.values() if wire.queue[1] == rank}
        for address in sorted(addresses | ({general} if general is not None else set())):
            self._listen(address, optional=address not in addresses)

    @property
    def ports(self) -> dict[str, int]:
        """The port at each address where this rank listens."""
        return {address: int(one.getsockname()[1]) for address, one in self._listeners.items()}

    def start(self, watcher: Watcher, token: str, peers: Mapping[str, Any]) -> None:
        """Let links in from now on; ``peers`` tells where the other ranks listen."""
        self._watcher, self._token, self._peers = watcher, token, peers
        for listener in self._listeners.values():
            watcher.add(listener, lambda listener=listener: self._accept(listener))  # type: ignore[misc]

    def open(self, queue: Queue, timeout: float) -> None:
        """Open a link from this rank, if it is not open yet.

        Raises
        ------
        ConnectionError
            The peer is not reached; the message is for the caller.
        """
        if queue not in self.outgoing:
            self.outgoing[queue] = self._open(queue, timeout)

    def open_to_meet(self, distances: Sequence[int], timeout: float) -> Callable[[], bool]:
        """Open the connections over which ranks meet, to `telling`; tells whether the others have opened `hearing`.

        Raises
        ------
        ConnectionError
            As `open`.
        """
        size = len(self._peers)
        for distance in distances:
            peer = (self.rank + distance) % size
            self.telling[peer] = self._connect((self.rank, peer, MEETING), timeout)
        return lambda: len(self.hearing) == len(distances)

    def credit(self, queue: Queue, call: int, stream: int, joined: int) -> None:
        """Tell the source of a link how many chunks of a stream have been joined."""
        self._incoming[queue].credit(call, stream, joined)

    def drain(self, timeout: float) -> None:
        """Wait until what was sent has reached the other machines, or for so many seconds none of it has.

        A process that is stopped there does not matter. What is not waited for could be lost: a connection that is
        closed before all credits were read is reset.
        """
        for link in self.outgoing.values():
            with contextlib.suppress(OSError):
                link.connection.shutdown(socket.SHUT_WR)
        ways = [(link.connection, link.ended) for link in self.outgoing.values()]
        ways += [(connection, threading.Event()) for connection in self.telling.values()]
        for connection, ended in ways:
            left, deadline = -1, 0.0
            while not ended.is_set() and (now := _unacknowledged(connection)):
                if now != left:
                    left, deadline = now, time.monotonic() + timeout
                if time.monotonic() > deadline:
                    break
                ended.wait(0.002)

    def close(self) -> None:
        """Close everything and end all threads."""
        with self._lock:
            self._closed = True
            incoming = list(self._incoming.values())
            strangers = list(self._connections)
        for listener in self._listeners.values():
            if self._watcher is not None:
                self._watcher.remove(listener)
            listener.close()
        for link in self.outgoing.values():
            if self._watcher is not None:
                self._watcher.remove(link.connection)
            link.shut()
        for end in incoming:
            end.shut()
        for connection in strangers:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for link in self.outgoing.values():
            link.close()
        for thread in self._threads:
            thread.join()
        for connection in (*self.telling.values(), *self.hearing.values()):
            connection.close()

    def _listen(self, address: str, *, optional: bool) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listener = socket.create_server((address, 0), family=family, backlog=1024)
        except OSError as error:
            if optional:
                self.general = None
                return
            raise UsageError(
                f"rank {self.rank} cannot listen at {address}: {error.strerror}; name an address of its machine "
                "in the wires file"
            ) from error
        listener.setblocking(False)
        self._listeners[address] = listener

    def _open(self, queue: Queue, timeout: float) -> Outgoing:
        connection = self._connect(queue, timeout)
        link = Outgoing(queue, connection, lock=self._lock, flow=self._flow, broken=self._broken)
        assert self._watcher is not None, "links are opened after the start"
        self._watcher.add(connection, lambda: self._take_credits(link))
        return link

    def _connect(self, queue: Queue, timeout: float) -> socket.socket:
        """A connection to a rank that knows what it is for."""
        peer = queue[1]
        wire = self._wires.get(queue)
        entry = self._peers[str(peer)]
        address = entry["general"] if wire is None else wire.reaches
        port = entry["ports"].get(address)
        if port is None:
            where = "outside its wires" if wire is None else f"at {address}"
            raise ConnectionError(
                f"rank {peer} does not listen {where}; give all ranks the same wires file, with all links of the plan"
            )
        try:
            connection = connect((address, port), leaves=wire.leaves if wire else None, timeout=timeout)
            connection.sendall(self._introduction(queue))
        except OSError as error:
            leaves = f" from {wire.leaves}" if wire else ""
            raise ConnectionError(
                f"cannot reach rank {peer} at {address}:{port}{leaves}: {error.strerror or error}"
            ) from error
        return connection

    def _take_credits(self, link: Outgoing) -> None:
        link.take_credits()
        if link.ended.is_set() and self._watcher is not None:
            self._watcher.remove(link.connection)
            self._ended(link.queue, f"rank {link.queue[1]} closed its connection")

    def _introduction(self, queue: Queue) -> bytes:
        text = json.dumps({"token": self._token, "link": queue}).encode()
        if len(text) > INTRODUCTION:
            raise ConnectionError(f"channel {queue[2]!r} has too long a name")
        return text.ljust(INTRODUCTION)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        thread = threading.Thread(target=self._take_in, args=[connection], name="tcp link", daemon=True)
        with self._lock:
            if self._closed:
                connection.close()
                return
            self._connections.add(connection)
            self._threads = [one for one in self._threads if one.is_alive()]
            self._threads.append(thread)
            thread.start()

    def _take_in(self, connection: socket.socket) -> None:
        """The life of a connection that has come in; one over which ranks meet is only kept."""
        kept = False
        try:
            connection.settimeout(STRANGER_SECONDS)
            data = memoryview(bytearray(INTRODUCTION))
            queue = self._introduced(bytes(data)) if read(connection, data, lambda: None) else None
            if queue is not None:
                connection.settimeout(None)
                tune(connection)
                if queue[2] == MEETING:
                    with self._changed:
                        kept = queue[0] not in self.hearing and not self._closed
                        if kept:
                            self.hearing[queue[0]] = connection
                            self._changed.notify_all()
                    return
                end = Incoming(queue, connection, flow=self._flow, broken=self._broken, ended=self._ended)
                with self._lock:
                    if queue in self._incoming or self._closed:
                        return
                    self._incoming[queue] = end
                end.serve()
        except OSError:
            pass
        finally:
            with self._lock:
                self._connections.discard(connection)
            if not kept:
                connection.close()

    def _introduced(self, data: bytes) -> Queue | None:
        """The queue of a connection; None if it is a stranger's."""
        try:
            said: Any = json.loads(data)
            source, destination, channel = said["link"]
        except (ValueError, TypeError, KeyError):
            return None
        known = isinstance(said.get("token"), str) and said["token"] == self._token and bool(self._token)
        return (source, destination, channel) if known and destination == self.rank else None


def _unacknowledged(connection: socket.socket) -> int:
    """Bytes that the other machine has not got yet."""
    try:
        asked = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
    except OSError:
        return 0
    return int(struct.unpack("@i", asked)[0])
