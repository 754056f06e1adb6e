"""Open and accept the connections of one rank's links, and set their socket options.

Chunks go one way, each behind a header (collective, stream, chunk, length). Credits go the other way: the number of
joined chunks of a held stream. The source opens a link when a transfer table first has chunks for it; the
destination listens all the time, so both need not act together. A connection introduces itself with the job's token
and its queue; any other is closed.

There is one connection per directed link, without Nagle delay, with reno instead of a congestion control that
models the path (bbr takes a shaped link for a slower one), and little unsent data in the system, so that the next
chunk is chosen as late as possible. If links are paced and the system cannot do it, the sender pauses
(`compiled_exchange.flow`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from collectives.backends.backend import LinkUse
from collectives.backends.tcp.link_addresses import LinkAddresses, Queue
from collectives.peers.rendezvous import HANDSHAKE_SECONDS
from collectives.peers.rendezvous_client import SocketWatcher
from topoplan.errors import UsageError

UNSENT_BYTES = 128 << 10
"""Bytes that wait in the system before they are under way."""

PACING = 47
"""Linux's SO_MAX_PACING_RATE, for which Python has no name."""

_ACKNOWLEDGED, _BUSY = struct.Struct("@Q"), struct.Struct("@QQ")
_ACKNOWLEDGED_AT, _BUSY_AT, _INFO_BYTES = 120, 168, 184
"""In Linux's ``struct tcp_info``: bytes_acked; busy_time and rwnd_limited, in microseconds, since 4.10."""


def connect(
    destination: tuple[str, int], *, leaves: str | None = None, timeout: float = 30.0
) -> socket.socket:
    """Return a connection for the chunks of a link, from this machine's address `leaves` if given; raise OSError."""
    source = None if leaves is None else (leaves, 0)
    made = socket.create_connection(destination, timeout, source)
    made.settimeout(None)
    tune(made)
    return made


def tune(connection: socket.socket) -> None:
    """Set the options of either end; options that a system lacks are left out."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError, AttributeError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    with contextlib.suppress(OSError, AttributeError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def set_pace(connection: socket.socket, rate: float | None) -> bool:
    """Limit a connection to `rate` bytes per second (None: no limit); return False if the system cannot.

    >>> with socket.socket() as connection:
    ...     set_pace(connection, 1e6) == (sys.platform == "linux")
    True
    """
    if sys.platform != "linux":
        return rate is None
    value = 2**64 - 1 if rate is None else max(1, round(rate))
    try:
        connection.setsockopt(socket.SOL_SOCKET, PACING, struct.pack("@Q", value))
    except OSError:
        return rate is None
    return True


def link_use(connection: socket.socket) -> LinkUse | None:
    """Return the system's counts of a connection; None if it has none (before Linux 4.10, and elsewhere).

    A connection is busy while something that was handed to the system is not acknowledged: one that waits for the
    process is not. The kernel counts ticks of its clock (usually 4 ms), so short times are right on average only.

    >>> with socket.socket() as connection:
    ...     (link_use(connection) == LinkUse(0, 0.0)) == (sys.platform == "linux")
    True
    """
    if sys.platform != "linux":
        return None
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _INFO_BYTES:
        return None
    (nbytes,) = _ACKNOWLEDGED.unpack_from(info, _ACKNOWLEDGED_AT)
    busy, held = _BUSY.unpack_from(info, _BUSY_AT)
    return LinkUse(nbytes, (busy - held) / 1e6)


INTRODUCTION = 192
"""Bytes of the handshake of a connection."""

BARRIER = "meeting"
"""The channel of the barrier's connections."""


class TcpConnections:
    """Listen for links to a rank, and open links from it.

    `general` is the address for links without wires, or None. `changed` is a condition on `lock`, the back end's, that
    is notified when a connection has come.

    `outgoing` and `incoming` hold the open links from and to this rank, `barrier_out` and `barrier_in` the barrier's
    connections by peer. Raises `UsageError` if an address of the wires is not one of this machine.
    """

    def __init__(
        self,
        rank: int,
        general: str | None,
        wires: Mapping[Queue, LinkAddresses],
        *,
        lock: threading.RLock,
        changed: threading.Condition,
    ) -> None:
        self.rank = rank
        self.general = general
        self.outgoing: dict[Queue, socket.socket] = {}
        self.incoming: dict[Queue, socket.socket] = {}
        self.barrier_out: dict[int, socket.socket] = {}
        self.barrier_in: dict[int, socket.socket] = {}
        self._wires = wires
        self._lock = lock
        self._changed = changed
        self._threads: list[threading.Thread] = []
        self._connections: set[socket.socket] = set()
        self._listeners: dict[str, socket.socket] = {}
        self._peers: Mapping[str, Any] = {}
        self._token = ""
        self._watcher: SocketWatcher | None = None
        self._closed = False
        addresses = {wire.reaches for wire in wires.values() if wire.queue[1] == rank}
        for address in sorted(addresses | ({general} if general is not None else set())):
            self._listen(address, optional=address not in addresses)

    @property
    def ports(self) -> dict[str, int]:
        """Return the port at each address at which this rank listens."""
        return {address: int(one.getsockname()[1]) for address, one in self._listeners.items()}

    def start(self, watcher: SocketWatcher, token: str, peers: Mapping[str, Any]) -> None:
        """Accept links from now on; `peers` holds the addresses at which the other ranks listen."""
        self._watcher, self._token, self._peers = watcher, token, peers
        for listener in self._listeners.values():
            watcher.add(listener, lambda listener=listener: self._accept(listener))  # type: ignore[misc]

    def open(self, queue: Queue, timeout: float) -> None:
        """Open a link from this rank, if it is not open yet; raise ConnectionError with a message for the caller."""
        if queue not in self.outgoing:
            self.outgoing[queue] = self._connect(queue, timeout)

    def descriptor(self, queue: Queue) -> int:
        """Return the descriptor of a link's connection, -1 if it is not open yet."""
        link = self.outgoing.get(queue) or self.incoming.get(queue)
        return -1 if link is None else link.fileno()

    def uses(self) -> dict[Queue, LinkUse]:
        """Return the traffic over each link from this rank so far."""
        found = {queue: link_use(connection) for queue, connection in self.outgoing.items()}
        return {queue: use for queue, use in found.items() if use is not None}

    def open_barrier(self, distances: Sequence[int], timeout: float) -> Callable[[], bool]:
        """Open `barrier_out`; return a function that tells whether the peers have opened `barrier_in`."""
        size = len(self._peers)
        for distance in distances:
            peer = (self.rank + distance) % size
            self.barrier_out[peer] = self._connect((self.rank, peer, BARRIER), timeout)
        return lambda: len(self.barrier_in) == len(distances)

    def close_barrier(self) -> None:
        """Close the barrier's connections; they may be opened again when all ranks have done so."""
        with self._lock:
            connections = [*self.barrier_out.values(), *self.barrier_in.values()]
            self.barrier_out.clear()
            self.barrier_in.clear()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def drain(self, timeout: float) -> None:
        """Wait until sent data has reached the other machines, or `timeout` seconds without progress have passed.

        It does not matter whether the peer's process is stopped. Without this data could be lost: a connection that is
        closed before all credits were read is reset.
        """
        for connection in self.outgoing.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        for connection in (*self.outgoing.values(), *self.barrier_out.values()):
            left, deadline = -1, 0.0
            while not _ended(connection) and (now := _unacknowledged(connection)):
                if now != left:
                    left, deadline = now, time.monotonic() + timeout
                if time.monotonic() > deadline:
                    break
                time.sleep(0.002)

    def close(self) -> None:
        """Close everything and end all threads."""
        with self._lock:
            self._closed = True
            unidentified = list(self._connections)
        for listener in self._listeners.values():
            if self._watcher is not None:
                self._watcher.remove(listener)
            listener.close()
        kept = (self.outgoing, self.incoming, self.barrier_out, self.barrier_in)
        connections = [connection for some in kept for connection in some.values()]
        for connection in (*unidentified, *connections):
            # closing alone does not end the connection while a forked process has it too
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for connection in connections:
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

    def _connect(self, queue: Queue, timeout: float) -> socket.socket:
        """Return an introduced connection to a rank."""
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
        thread = threading.Thread(target=self._identify, args=[connection], name="tcp link", daemon=True)
        with self._lock:
            if self._closed:
                connection.close()
                return
            self._connections.add(connection)
            self._threads = [one for one in self._threads if one.is_alive()]
            self._threads.append(thread)
            thread.start()

    def _identify(self, connection: socket.socket) -> None:
        """Keep an accepted connection once it has introduced itself."""
        kept = False
        try:
            queue = self._introduced(_read(connection, INTRODUCTION))
            if queue is not None:
                connection.settimeout(None)
                tune(connection)
                with self._changed:
                    known: dict[Any, socket.socket] = (
                        self.barrier_in if queue[2] == BARRIER else self.incoming
                    )
                    name = queue[0] if queue[2] == BARRIER else queue
                    kept = name not in known and not self._closed
                    if kept:
                        known[name] = connection
                        self._changed.notify_all()
        except OSError:
            pass
        finally:
            with self._lock:
                self._connections.discard(connection)
            if not kept:
                connection.close()

    def _introduced(self, data: bytes) -> Queue | None:
        """Return the queue of a connection; None if it is not of this job."""
        try:
            introduction: Any = json.loads(data)
            source, destination, channel = introduction["link"]
        except (ValueError, TypeError, KeyError):
            return None
        known = (
            isinstance(introduction.get("token"), str)
            and introduction["token"] == self._token
            and bool(self._token)
        )
        return (source, destination, channel) if known and destination == self.rank else None


def _unacknowledged(connection: socket.socket) -> int:
    """Return the bytes that the other machine has not acknowledged yet."""
    try:
        reply = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
    except OSError:
        return 0
    return int(struct.unpack("@i", reply)[0])


def _ended(connection: socket.socket) -> bool:
    """Discard incoming data that is not needed any more; return whether the peer has closed."""
    try:
        while connection.recv(1 << 14, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _read(connection: socket.socket, nbytes: int) -> bytes:
    """Return so many bytes, or fewer if the connection ends; raise OSError if it breaks, or is too slow."""
    connection.settimeout(HANDSHAKE_SECONDS)
    data = b""
    while len(data) < nbytes and (more := connection.recv(nbytes - len(data))):
        data += more
    return data
