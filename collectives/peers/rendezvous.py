"""The place where the ranks of a job meet: one process listens, all others come, and the connections stay open.

Rank 0 hosts it by itself. A launcher may host it instead: it listens on a port that the system chooses (or on a
Unix path) before it starts the ranks and hands the address on, so no port can be taken away in between, and the
ranks hear of a failure even when rank 0 is the one that failed.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from collectives.peers.address import Address, ahead_of_data, listen, parse_address
from collectives.peers.peer_watchdog import stands_still
from collectives.peers.rendezvous_state import Hub, Message, Post, Unpacker, pack
from topoplan.errors import UsageError

STRANGER_SECONDS = 10.0
"""Time in which a connection must say who it is."""

CLOSED = getattr(select, "POLLRDHUP", select.POLLHUP)
"""What the system says of a connection that its other end has closed."""

LINGER_SECONDS = 1.0
"""Time for ranks to hear the last word before the connections are closed."""


@dataclass(slots=True, eq=False)
class _Visitor:
    """A connection: of a rank, or of a process that has not said yet who it is (rank -1)."""

    connection: socket.socket
    until: float
    rank: int = -1
    unpacker: Unpacker = field(default_factory=Unpacker)
    out: bytearray = field(default_factory=bytearray)
    ending: bool = False


class Rendezvous:
    """Listens at an address and serves the ranks of one job, in a thread of its own.

    Parameters
    ----------
    address : str
        ``host:port`` (port 0: the system chooses) or ``unix:/path``.
    size : int
        Number of ranks.
    host : int, optional
        The rank whose process this is; leave it out in a launcher.

    Raises
    ------
    UsageError
        Nobody can listen at this address.

    Examples
    --------
    >>> with Rendezvous("127.0.0.1:0", 4) as rendezvous:
    ...     rendezvous.address.startswith("127.0.0.1:")
    True
    """

    def __init__(self, address: str, size: int, *, host: int | None = None) -> None:
        asked = parse_address(address)
        try:
            self._listener = listen(asked)
        except OSError as error:
            raise UsageError(
                f"cannot listen at the rendezvous {address}: {error}; name a free one"
            ) from error
        port = asked.port if asked.path else int(self._listener.getsockname()[1])
        self._where = Address(asked.host, port, asked.path)
        self._hub = Hub(size, host=host, stopped=_stands_still)
        self._visitors: set[_Visitor] = set()
        self._selector = selectors.DefaultSelector()
        self._closing = threading.Event()
        self._waker, self._woken = socket.socketpair()
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """Where ranks come to, with the port that the system chose."""
        return str(self._where)

    @property
    def pids(self) -> dict[int, int]:
        """Process id of every rank that has come."""
        return {rank: int(hello["pid"]) for rank, hello in dict(self._hub.hellos).items()}

    def start(self) -> Rendezvous:
        """Begin to serve; until then those that come wait."""
        self._thread = threading.Thread(target=self._serve, name="tcp rendezvous", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """End, a second at most after the ranks were told; closing twice is fine."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._waker.send(b".")
        if self._thread is not None:
            self._thread.join()
        self._selector.close()
        self._listener.close()
        self._waker.close()
        self._woken.close()
        if self._where.path:
            with contextlib.suppress(OSError):
                os.unlink(self._where.path)

    def __enter__(self) -> Rendezvous:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _serve(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        end: float | None = None
        while True:
            now = time.monotonic()
            if self._closing.is_set() and end is None:
                end = now + LINGER_SECONDS
                self._selector.unregister(self._woken)
                for visitor in list(self._visitors):
                    self._say(visitor, {"type": "leaving"})
            if end is not None and (now >= end or not self._hearing()):
                break
            for key, events in self._selector.select(self._pause(now, end)):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, _Visitor):
                    self._attend(key.data, events)
            now = time.monotonic()
            self._deliver(self._hub.tick(now))
            for visitor in [one for one in self._visitors if one.rank < 0 and one.until < now]:
                self._drop(visitor)
        for visitor in list(self._visitors):
            self._drop(visitor)

    def _hearing(self) -> bool:
        """Whether somebody is there who may still hear the last word."""
        hellos = self._hub.hellos
        return any(one.rank < 0 or not _stands_still(hellos[one.rank]) for one in self._visitors)

    def _pause(self, now: float, end: float | None) -> float | None:
        times = [one.until for one in self._visitors if one.rank < 0]
        times += [time for time in (self._hub.deadline, end) if time is not None]
        return max(0.0, min(times) - now) if times else None

    def _left(self) -> list[_Visitor]:
        """Ranks that have closed their connections, also where what they said before is not read yet."""
        ended = select.poll()
        ranks = {one.connection.fileno(): one for one in self._visitors if one.rank >= 0}
        for descriptor in ranks:
            ended.register(descriptor, CLOSED)
        return [ranks[descriptor] for descriptor, _ in ended.poll(0)]

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        ahead_of_data(connection)
        visitor = _Visitor(connection, time.monotonic() + STRANGER_SECONDS)
        self._visitors.add(visitor)
        self._selector.register(connection, selectors.EVENT_READ, visitor)

    def _attend(self, visitor: _Visitor, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(visitor)
        if not events & selectors.EVENT_READ or visitor not in self._visitors:
            return
        try:
            data = visitor.connection.recv(1 << 16)
            messages: Sequence[Message] = visitor.unpacker.feed(data)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            data, messages = b"", []
        for message in messages:
            if not self._hear(visitor, message):
                data = b""
                break
        if not data:
            self._drop(visitor)

    def _hear(self, visitor: _Visitor, message: Message) -> bool:
        """Pass a message on; False if it makes no sense."""
        now = time.monotonic()
        try:
            if visitor.rank >= 0:
                posts = self._hub.receive(visitor.rank, message, now)
                left = self._left() if any(said["type"] == "agreed" for _, said in posts) else []
                for one in left:  # where this process was stopped, so long that they have given it up
                    self._deliver(self._hub.lost(one.rank))
                if not left:
                    self._deliver(posts)
                return True
            refusal, posts = self._hub.join(message, now)
        except (KeyError, TypeError, ValueError):
            return False
        if refusal:
            self._say(visitor, {"type": "refused", "message": refusal})
            visitor.ending = True
        else:
            visitor.rank = int(message["rank"])
        self._deliver(posts)
        return True

    def _deliver(self, posts: Sequence[Post]) -> None:
        visitors = {visitor.rank: visitor for visitor in self._visitors}
        for rank, message in posts:
            if rank in visitors:
                self._say(visitors[rank], message)

    def _say(self, visitor: _Visitor, message: Message) -> None:
        visitor.out += pack(message)
        self._flush(visitor)

    def _flush(self, visitor: _Visitor) -> None:
        try:
            while visitor.out:
                del visitor.out[: visitor.connection.send(visitor.out)]
        except BlockingIOError:
            pass
        except OSError:
            visitor.out.clear()
        interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if visitor.out else 0)
        if visitor in self._visitors:
            self._selector.modify(visitor.connection, interest, visitor)

    def _drop(self, visitor: _Visitor) -> None:
        self._visitors.discard(visitor)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(visitor.connection)
        visitor.connection.close()
        if visitor.rank >= 0:
            self._deliver(self._hub.lost(visitor.rank))


def _stands_still(hello: Message) -> bool:
    """Whether the process that said this is seen to be stopped."""
    return stands_still(str(hello.get("processes")), int(hello["pid"]))
