"""A world over TCP: rank 0 listens at an address that all ranks know, and every rank keeps a connection to it."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time

from collectives.backends.nccl.hub import ANSWER_SECONDS, Hub, pack, unpack
from topoplan.errors import BackendError, UsageError

RETRY_SECONDS = 0.05
LINGER_SECONDS = 2.0
"""Time for the last words of a job."""


class TcpWorld:
    """`World` of processes that reach one address.

    Parameters
    ----------
    address : str
        ``host:port`` of rank 0, which listens there.
    rank, size : int
    timeout : float
        Seconds to wait for rank 0.
    listener : socket, optional
        For rank 0: a socket that listens there already.

    Raises
    ------
    UsageError
        The address makes no sense, or rank 0 cannot listen there.
    BackendError
        Nobody listens there.

    Examples
    --------
    >>> with socket.create_server(("127.0.0.1", 0)) as listener:
    ...     world = TcpWorld("127.0.0.1:%d" % listener.getsockname()[1], 0, 1, listener=listener)
    ...     world.gather(b"alone", timeout=5)
    ...     world.close()
    [b'alone']
    """

    def __init__(
        self,
        address: str,
        rank: int,
        size: int,
        *,
        timeout: float = 30.0,
        listener: socket.socket | None = None,
    ) -> None:
        if not 0 <= rank < size:
            raise UsageError(f"rank {rank} of {size} does not exist; ranks are 0 to {max(size, 1) - 1}")
        self.rank = rank
        self.size = size
        self._address = address
        self._changed = threading.Condition()
        self._answer: list[bytes] | None = None
        self._trouble: BackendError | None = None
        self._closed = False
        self._hub = Hub(listener or _listen(address), size) if rank == 0 else None
        self._connection = _connect(address, rank, timeout)
        self._say(b"H", json.dumps({"rank": rank, "size": size}).encode())
        threading.Thread(target=self._read, name="nccl control", daemon=True).start()

    def gather(self, data: bytes, *, timeout: float) -> list[bytes]:
        """See `World.gather`."""
        with self._changed:
            self._answer = None
        self._say(b"G", data)
        if not self._wait(timeout):
            self.stalled(timeout)
            self._wait(2 * ANSWER_SECONDS)
        with self._changed:
            if self._trouble is not None:
                raise self._trouble
            if self._answer is None:
                raise BackendError(
                    f"waited {timeout:g} s, and the rendezvous does not answer", rank=self.rank, peer=0
                )
            return self._answer

    def stalled(self, timeout: float, *, peer: int | None = None, step: int | None = None) -> None:
        """Report that this rank has waited too long; what the hub finds becomes the trouble of all ranks."""
        where = {"rank": self.rank, "peer": peer, "step": step, "timeout": timeout}
        self._say(b"W", json.dumps(where).encode())

    def trouble(self) -> BackendError | None:
        """See `World.trouble`."""
        return self._trouble

    def tell(self, error: BackendError) -> None:
        """See `World.tell`."""
        told = {"message": plain(error), "rank": error.rank, "peer": error.peer, "step": error.step}
        self._say(b"F", json.dumps(told).encode())
        with self._changed:
            self._changed.wait_for(lambda: self._trouble is not None, ANSWER_SECONDS)

    def close(self) -> None:
        """See `World.close`."""
        if self._closed:
            return
        self._closed = True
        self._say(b"B")
        if self._hub is not None and self._trouble is None:
            self._hub.join(LINGER_SECONDS)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _wait(self, timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: self._answer is not None or self._trouble is not None, timeout
            )

    def _say(self, kind: bytes, data: bytes = b"") -> None:
        # That nobody hears it shows when nobody answers.
        with self._changed, contextlib.suppress(OSError):
            self._connection.sendall(pack(kind, data))

    def _read(self) -> None:
        buffer = bytearray()
        while True:
            try:
                data = self._connection.recv(1 << 16)
                buffer += data
                messages = unpack(buffer)
            except (OSError, ValueError):
                data, messages = b"", []
            for kind, content in messages:
                if kind == b"P":
                    self._say(b"P")
                    continue
                with self._changed:
                    if kind == b"G":
                        self._answer = _parts(content)
                    elif kind == b"F":
                        self._note(**json.loads(content))
                    self._changed.notify_all()
            if not data:
                break
        with self._changed:
            if not self._closed:
                self._note(
                    "the rendezvous of rank 0 is gone: its process has ended; start all ranks again", peer=0
                )
            self._changed.notify_all()
        self._connection.close()

    def _note(
        self,
        message: str,
        rank: int | None = None,
        peer: int | None = None,
        step: int | None = None,
        timeout: float | None = None,
    ) -> None:
        if self._trouble is None:
            where = self.rank if rank is None else rank
            self._trouble = BackendError(message, rank=where, peer=peer, step=step)


def plain(error: BackendError) -> str:
    """The message of an error without the place, which goes along in fields of its own."""
    text = str(error)
    known = any(value is not None for value in (error.rank, error.peer, error.step))
    return text.split(": ", 1)[1] if known else text


def _parts(content: bytes) -> list[bytes]:
    parts, at = [], 0
    while at < len(content):
        (length,) = struct.unpack_from(">I", content, at)
        parts.append(content[at + 4 : at + 4 + length])
        at += 4 + length
    return parts


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UsageError(f"{address!r} is no place to meet; write host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _listen(address: str) -> socket.socket:
    host, port = _place(address)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise UsageError(
            f"rank 0 cannot listen at {address}: {error}; name a free address of its machine"
        ) from error


def _connect(address: str, rank: int, timeout: float) -> socket.socket:
    place = _place(address)
    deadline = time.monotonic() + timeout
    while True:
        try:
            made = socket.create_connection(place, timeout=max(RETRY_SECONDS, deadline - time.monotonic()))
            if made.getsockname() != made.getpeername():
                break
            made.close()  # on an unused port of this machine a socket can meet itself
            problem = "nobody listens"
        except OSError as error:
            problem = str(error)
        if time.monotonic() > deadline:
            raise BackendError(
                f"nobody listens at the rendezvous {address} ({problem}); start rank 0, which listens there",
                rank=rank,
                peer=0,
            )
        time.sleep(RETRY_SECONDS)
    made.settimeout(None)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made
