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

GRACE_SECONDS = 2.0
"""Time that the rendezvous gets for an answer, the second included that it may give the ranks."""


class RendezvousClient:
    """One rank's end. The attributes are set by the watcher's thread and read with the lock.

    Parameters
    ----------
    rendezvous : str
    rank, size : int
    until : float
        Time of `time.monotonic` after which no rank is expected any more.
    look : callable, optional
        See `collectives.peers.address.connect`.

    Attributes
    ----------
    opening : int or None
        Which of the communicators that are opened there this is.
    answer : Message or None
        To what was asked last.
    differ : Message or None
        The signatures of all ranks, where they differ in what they agree on now.
    patience : bool
        Whether a rank that has asked who stalls is to wait on.
    verdict : Message or None
        Why the job has failed.
    alone : bool
        The rendezvous has ended.
    lost : bool
        It has ended without a word: its process died.
    host : int or None
        The rank that hosts it, if one does.
    """

    def __init__(
        self,
        rendezvous: str,
        rank: int,
        size: int,
        *,
        until: float,
        look: Callable[[], None] | None = None,
    ) -> None:
        self.rendezvous = rendezvous
        self.rank = rank
        self.size = size
        self.opening: int | None = None
        self.answer: Message | None = None
        self.differ: Message | None = None
        self.patience = False
        self.verdict: Message | None = None
        self.alone = False
        self.lost = False
        self.host: int | None = None
        self._process = ("", 0)
        self._until = until
        self._unpacker = Unpacker()
        self._early: Sequence[Message] = ()
        """What came together with the welcome: a rank that is quicker may have failed already."""
        self._writing = threading.Lock()
        self._look = look
        self._connection = connect(parse_address(rendezvous), until, look=look)

    @property
    def connection(self) -> socket.socket:
        """The connection, for the watcher."""
        return self._connection

    @property
    def local(self) -> str:
        """The address of this machine that the rendezvous is reached from."""
        return (
            "127.0.0.1"
            if self._connection.family == socket.AF_UNIX
            else str(self._connection.getsockname()[0])
        )

    def join(self, about: Message) -> Message | None:
        """Say who this is, and what else the others must know; return the welcome, once all ranks have come.

        None where the one that listens there ends before this rank has a place with it: the next is to be asked.

        Raises
        ------
        BackendError
            The rendezvous refuses, does not answer, or is something else.
        """
        hello = {"type": "hello", "format": FORMAT, "rank": self.rank, "size": self.size, "pid": os.getpid()}
        left = max(0.0, self._until - time.monotonic())
        told = {**hello, **about, "timeout": left, "processes": process_namespace()}
        try:
            self._connection.sendall(pack(told))
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
        """Let a watcher take what comes, until the connection ends; ``waiting`` answers what this rank waits for."""
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
                watcher.remove(self._connection)  # it would be ready to be read for ever
            hear(messages, ended=not data)

        hear(self._early)
        watcher.add(self._connection, take)

    def say(self, message: Message) -> None:
        """Send a message; that nobody hears it shows when it is not answered."""
        with self._writing, contextlib.suppress(OSError):
            self._connection.sendall(pack(message))

    def host_stands_still(self) -> bool:
        """Whether the process that serves the rendezvous is seen to be stopped."""
        return is_stopped(*self._process)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _note(self, message: Message) -> None:
        if message["type"] == "failed":
            self.verdict = self.verdict or message
        elif message["type"] == "differ":
            self.differ = message
        elif message["type"] == "leaving":
            self.alone = True
        elif message["type"] == "patience":
            self.patience = True
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
                f"the rendezvous {self.rendezvous} does not answer; look what listens there", rank=self.rank
            ) from None
        except ValueError as error:
            raise BackendError(
                f"what listens at {self.rendezvous} is no rendezvous of topoplan ({error}); name another address",
                rank=self.rank,
            ) from None
        except OSError as error:
            if self.opening is None:  # it has stopped to listen without having taken this connection
                return [{"type": "again"}]
            raise BackendError(
                f"the rendezvous {self.rendezvous} is gone: {error.strerror}", rank=self.rank
            ) from error
        if not data:
            raise BackendError(
                f"what listens at {self.rendezvous} closed the connection; it is no rendezvous of topoplan, "
                "or its process has ended",
                rank=self.rank,
            )
        return messages


class SocketWatcher:
    """Calls a function, in its own thread, whenever a socket has something to read; the functions must not wait.

    Parameters
    ----------
    name : str
        Of the thread.
    """

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def add(self, watched: socket.socket, callback: Callable[[], None]) -> None:
        """Watch a socket; from any thread."""
        self._selector.register(watched, selectors.EVENT_READ, callback)

    def remove(self, watched: socket.socket) -> None:
        """Do not watch a socket any more, before it is closed; it need not have been watched."""
        with contextlib.suppress(KeyError, ValueError, RuntimeError):
            self._selector.unregister(watched)

    def close(self) -> None:
        """End the thread; closing twice is fine."""
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
