"""Keep a rank's connection to the rendezvous: agreement before collectives, and failure notices.

A thread (`SocketWatcher`) waits for messages on it, and on any other socket that it is given.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from collectives.peers.address import RETRY_SECONDS, connect, parse_address, process_namespace
from collectives.peers.control_plane import Waiting
from collectives.peers.peer_watchdog import is_stopped
from collectives.peers.rendezvous_state import FORMAT, Message, Unpacker, pack
from topoplan.errors import BackendError

GRACE_SECONDS = 2.0  # time for an answer of the rendezvous, including the second that it may give the ranks


class RendezvousClient:
    """A rank's end of the rendezvous. The watcher's thread sets the attributes, and readers hold the lock.

    `until` is the deadline for all ranks by `time.monotonic`; for `look` see `collectives.peers.address.connect`.

    Attributes
    ----------
    opening : int or None
        Number of this communicator among those opened there.
    answer, differ, verdict : Message or None
        The answer to the last request; the signatures of all ranks if they differ; the failure of the job.
    keep_waiting : bool
        Whether a rank that has asked for the stalled rank is to keep waiting.
    alone, lost : bool
        The rendezvous has ended, and without a message: its process died.
    host : int or None
        The rank that hosts it, if one does.
    """

    def __init__(
        self, rendezvous: str, rank: int, size: int, *, until: float, look: Callable[[], None] | None = None
    ) -> None:
        self.rendezvous = rendezvous
        self.rank = rank
        self.size = size
        self.opening: int | None = None
        self.answer: Message | None = None
        self.differ: Message | None = None
        self.keep_waiting = False
        self.verdict: Message | None = None
        self.alone = False
        self.lost = False
        self.host: int | None = None
        self._process = ("", 0)
        self._until = until
        self._unpacker = Unpacker()
        self._early: Sequence[Message] = ()
        """Messages that came with the welcome: a faster rank may have failed already."""
        self._writing = threading.Lock()
        self._look = look
        self._connection = connect(parse_address(rendezvous), until, look=look)

    @property
    def connection(self) -> socket.socket:
        return self._connection

    @property
    def local(self) -> str:
        """The address of this machine on the connection to the rendezvous."""
        return (
            "127.0.0.1"
            if self._connection.family == socket.AF_UNIX
            else str(self._connection.getsockname()[0])
        )

    def join(self, about: Message) -> Message | None:
        """Send the hello and the fields `about`; return the welcome, once all ranks have come.

        None if the server ends before it has admitted this rank: connect again. Raises `BackendError` if the
        rendezvous refuses, does not answer, or is something else.
        """
        hello = {"type": "hello", "format": FORMAT, "rank": self.rank, "size": self.size, "pid": os.getpid()}
        left = max(0.0, self._until - time.monotonic())
        announced = {**hello, **about, "timeout": left, "processes": process_namespace()}
        try:
            self._connection.sendall(pack(announced))
        except OSError:
            return None
        while True:
            messages = self._read_until(self._until + GRACE_SECONDS)
            for number, message in enumerate(messages, 1):
                if message["type"] in ("refused", "failed"):
                    raise BackendError(str(message["message"]), rank=self.rank, peer=message.get("peer"))
                if message["type"] == "again":
                    return None
                if message["type"] == "heard":
                    self.opening = int(message["opening"])
                if message["type"] == "welcome":
                    self.host = message["host"]
                    self._process = str(message.get("processes")), int(message.get("pid", 0))
                    self._early = messages[number:]
                    return message

    def listen(
        self, lock: threading.Condition, waiting: Callable[[], Waiting], watcher: SocketWatcher
    ) -> None:
        """Let a watcher read messages until the connection ends; `waiting` returns what this rank waits for."""
        self._connection.settimeout(None)

        def hear(messages: Sequence[Message], *, ended: bool = False) -> None:
            for message in messages:
                if message["type"] == "ping":
                    wait = waiting()
                    self.say({"type": "pong", "peer": wait.peer, "step": wait.step, "idle": wait.idle})
            with lock:
                for message in messages:
                    self._note(message)
                self.lost = self.lost or (ended and not self.alone)
                self.alone = self.alone or ended
                lock.notify_all()

        def take() -> None:
            try:
                data = self._connection.recv(1 << 16, socket.MSG_DONTWAIT)
                messages = self._unpacker.feed(data)
            except BlockingIOError:
                return
            except (OSError, ValueError):
                data, messages = b"", []
            if not data:
                watcher.remove(self._connection)  # it would stay readable for ever
            hear(messages, ended=not data)

        hear(self._early)
        watcher.add(self._connection, take)

    def say(self, message: Message) -> None:
        """Send a message; a failed send shows as a missing answer."""
        with self._writing, contextlib.suppress(OSError):
            self._connection.sendall(pack(message))

    def host_stands_still(self) -> bool:
        """Return whether the process that serves the rendezvous is stopped."""
        return is_stopped(*self._process)

    def close(self) -> None:
        self._connection.close()

    def _note(self, message: Message) -> None:
        if message["type"] == "failed":
            self.verdict = self.verdict or message
        elif message["type"] == "differ":
            self.differ = message
        elif message["type"] == "leaving":
            self.alone = True
        elif message["type"] == "keep waiting":
            self.keep_waiting = True
        elif message["type"] != "ping":
            self.answer = message

    def _read_until(self, deadline: float) -> list[dict[str, Any]]:
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            while self._look is not None and time.monotonic() < deadline:
                self._look()
                if selector.select(RETRY_SECONDS):
                    break
        try:
            self._connection.settimeout(max(0.01, deadline - time.monotonic()))
            data = self._connection.recv(1 << 16)
            messages = self._unpacker.feed(data)
        except TimeoutError:
            raise BackendError(
                f"the rendezvous {self.rendezvous} does not answer; check what listens there", rank=self.rank
            ) from None
        except ValueError as error:
            raise BackendError(
                f"the server at {self.rendezvous} is not a rendezvous of topoplan ({error}); give another address",
                rank=self.rank,
            ) from None
        except OSError as error:
            if self.opening is None:  # it stopped listening before it accepted this connection
                return [{"type": "again"}]
            raise BackendError(
                f"the rendezvous {self.rendezvous} is gone: {error.strerror}", rank=self.rank
            ) from error
        if not data:
            raise BackendError(
                f"the server at {self.rendezvous} closed the connection; it is not a rendezvous of topoplan, "
                "or its process has ended",
                rank=self.rank,
            )
        return messages


class SocketWatcher:
    """A thread that calls a function whenever a socket is readable; the functions must not block."""

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def add(self, watched: socket.socket, callback: Callable[[], None]) -> None:
        """Watch a socket; thread-safe."""
        self._selector.register(watched, selectors.EVENT_READ, callback)

    def remove(self, watched: socket.socket) -> None:
        """Stop watching a socket, before it is closed; idempotent."""
        with contextlib.suppress(KeyError, ValueError, RuntimeError):
            self._selector.unregister(watched)

    def close(self) -> None:
        """End the thread; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._waker.send(b".")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._selector.close()
        self._waker.close()
        self._woken.close()

    def _work(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select():
                if key.fileobj is not self._woken and not self._closed:
                    key.data()
