"""Post gradients to all other ranks and take what has arrived, without a collective (bounded staleness, or none).

After each post comes the sender's clock, the number of steps it has finished: a rank that knows a clock has everything
that belongs to it. Gradients that were not sent yet to a slow receiver are added up, so a queue never holds more than
one for each key, however far apart ranks are. A published array goes only to the rank that pulls it, by a thread of its
own: the publisher's loop does not stop.

There is one connection from each rank to each other, at the address that the job uses (`address_among`), behind the
handshake of `collectives.peers.connections`. A message is a line of JSON, and as many bytes as it says. A rank that
dies without a shutdown notice fails the others in their next call. A rank that loses a peer reports it to the others
before it fails itself, so that they attribute the failure to the right rank.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from io import BufferedReader
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.backends.tcp.connections import connect, tune
from collectives.peers.address import address_among
from collectives.peers.agreement import Gather, gather_or_raise
from collectives.peers.connections import Connection, Endpoint, Listener, Message
from collectives.peers.environment import job_key
from collectives.training.modes import may_begin
from topoplan.errors import BackendError

Array = NDArray[Any]
GRADIENT = "gradient"
SHUTDOWN_NOTICE = "goodbye"
FINISHED = "finished"
LOST = "lost"
PULL, PULLED = "pull", "pulled"
"""Kinds of messages beside clocks."""

WARNING_SECONDS = 0.5
"""Time for reporting a failed rank to the others, and for the reason of a broken connection to arrive."""


class Mailbox:
    """Posts of one rank to all others, and theirs to it.

    `gather` is for the rendezvous; `timeout` is in seconds, at the start and later. All waits raise `BackendError` if
    another rank failed, or does not answer within the timeout.
    """

    def __init__(self, gather: Gather, *, rank: int, size: int, timeout: float = 30.0) -> None:
        self.rank = rank
        self.size = size
        self.clock = 0
        self.farthest = 0
        self._timeout = timeout
        self._changed = threading.Condition()
        self._inbox: dict[str, Array] = {}
        self._clocks = {peer: 0 for peer in range(size) if peer != rank}
        self._gone: set[int] = set()
        self._published: Mapping[str, Array] | None = None
        self._askers: set[int] = set()
        self._answered: set[int] = set()
        self._failure: BackendError | None = None
        self._closed = False
        self._senders: dict[int, MailboxSender] = {}
        self._incoming: dict[int, tuple[socket.socket, threading.Thread]] = {}
        try:
            self._connect(gather)
        except BaseException:
            self._fail(None, "not all ranks connected")
            self.close()
            raise

    def post(self, key: str, gradient: Array) -> None:
        """Queue a copy of a gradient for all other ranks."""
        self._check()
        for sender in self._senders.values():
            sender.add(key, gradient)

    def tick(self) -> None:
        """Advance this rank's clock at the end of a step, and send it to all others after what was posted."""
        with self._changed:
            self.clock += 1
        for sender in self._senders.values():
            sender.tell(self.clock)

    def take(self, key: str) -> Array | None:
        """Return and clear the sum of the gradients that have arrived for a key; None if there are none."""
        self._check()
        with self._changed:
            return self._inbox.pop(key, None)

    def publish(self, arrays: Mapping[str, Array]) -> None:
        """Set the arrays that `pull` of other ranks returns from now on; they must not change afterwards."""
        with self._changed:
            self._published = arrays
            askers, self._askers = sorted(self._askers), set()
        for peer in askers:
            self._answer(peer, arrays)

    def pull(self, peer: int) -> dict[str, Array]:
        """Return the newest arrays that a rank has published; waits for its first ones."""
        self._check()
        self._senders[peer].say(PULL)
        with self._changed:
            self._wait_until(
                lambda: peer in self._answered,
                lambda: (
                    peer,
                    f"the parameters of rank {peer}; call finish on all ranks before one of them closes",
                ),
            )
            self._answered.remove(peer)
            pulled, self._inbox = self._inbox, {}
            return pulled

    def wait_to_begin(self, bound: int | None) -> None:
        """Wait until this rank's clock is at most `bound` steps ahead of all others (`modes.may_begin`).

        Raises `BackendError` if another rank failed, or its clock stood still for the timeout.
        """
        with self._changed:
            self._wait_until(
                lambda: may_begin(self.clock, self._running(), bound),
                lambda: (
                    slowest := min(self._clocks, key=self._clocks.__getitem__),
                    f"rank {slowest}, whose clock stands at {self._clocks[slowest]}; see what it is doing, and call "
                    "finish on ranks with fewer batches",
                ),
                while_clocks_stand=True,
            )
            self._check()
            self.farthest = max([self.farthest, *(self.clock - clock for clock in self._running())])

    def drain(self) -> dict[str, Array]:
        """Wait until all ranks drain, and return and clear the sums of all keys, the same on all ranks."""
        for sender in self._senders.values():
            sender.tell(self.clock, finished=True)
        with self._changed:
            self._wait_until(
                lambda: len(self._gone) == len(self._clocks),
                lambda: (
                    slowest := min(set(self._clocks) - self._gone),
                    f"rank {slowest} to finish; call finish on all ranks, with similar numbers of batches",
                ),
            )
            sums, self._inbox = self._inbox, {}
            self._gone.clear()
            return sums

    def close(self) -> None:
        """Send everything and a shutdown notice; closing twice is allowed."""
        if self._closed:
            return
        self._closed = True
        for sender in self._senders.values():
            sender.close()
        for connection, thread in self._incoming.values():
            # the other end sends a shutdown notice when it closes, unless a rank failed
            thread.join(0 if self._failure else self._timeout)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()
            connection.close()

    def _wait_until(
        self,
        over: Callable[[], bool],
        missing: Callable[[], tuple[int, str]],
        *,
        while_clocks_stand: bool = False,
    ) -> None:
        """Wait until something is over; after the timeout, fail with the rank and the text of what is missing."""
        before, until = dict(self._clocks), time.monotonic() + self._timeout
        while not over():
            self._check()
            if not self._changed.wait(until - time.monotonic()):
                peer, text = missing()
                raise self._fail(peer, f"waited {self._timeout:g} s for {text}")
            if while_clocks_stand and before != self._clocks:
                before, until = dict(self._clocks), time.monotonic() + self._timeout

    def _running(self) -> list[int]:
        """Return the clocks of the ranks that have not finished."""
        return [clock for peer, clock in self._clocks.items() if peer not in self._gone]

    def _connect(self, gather: Gather) -> None:
        """Open a connection to each other rank, and accept one from each."""
        local, served = address_among(gather, self.rank), list[tuple[Listener, Endpoint]]()

        def contact() -> str:
            if not local:
                raise BackendError("hosts do not reach each other by TCP; look at their names and firewalls")
            endpoint = Endpoint.of_rank(job_key(), self._accept, self._broke)
            served.append((Listener.serve(local, endpoint), endpoint))
            return json.dumps([local, served[0][0].address.port, endpoint.card])

        try:
            contacts = [json.loads(text) for text in gather_or_raise(gather, contact)]
            for peer in self._clocks:
                host, port, card = contacts[peer]
                mine = {"type": "mail", "rank": self.rank}
                try:
                    made = connect((host, port), card, job_key(), mine, timeout=self._timeout)
                except OSError as error:
                    why = f"cannot reach rank {peer} at {host}:{port}: {error.strerror or error}"
                    raise self._fail(peer, why) from None
                self._senders[peer] = MailboxSender(peer, made, self._cannot_send)
            with self._changed:
                self._wait_until(
                    lambda: not self._missing(),
                    lambda: (one := self._missing()[0], f"rank {one} to connect; see what it is doing"),
                )
        finally:
            for listener, endpoint in served:
                listener.leave(endpoint)

    def _missing(self) -> list[int]:
        return [peer for peer in self._clocks if peer not in self._incoming]

    def _accept(self, connection: Connection) -> None:
        """Take a connection of a rank: it says which rank it is, and its mail follows."""
        connection.start_link(self._identify, self._broke)

    def _identify(self, connection: Connection, message: Message) -> None:
        peer = message.get("rank")
        if type(peer) is not int or peer not in self._missing() or self._failure is not None:
            connection.close()
            return
        made = connection.detach()
        tune(made)
        thread = threading.Thread(
            target=self._receive, args=(peer, made), name=f"mail from {peer}", daemon=True
        )
        thread.start()
        with self._changed:
            self._incoming[peer] = made, thread
            self._changed.notify_all()

    def _broke(self, error: BaseException) -> None:
        """Fail by an error of the code that accepts connections."""
        with self._changed:
            self._fail(self.rank, f"a connection to this rank failed: {type(error).__name__}: {error}")
            self._changed.notify_all()

    def _receive(self, peer: int, connection: socket.socket) -> None:
        try:
            with connection.makefile("rb") as stream:
                while self._hear(peer, *_read(stream)):
                    pass
        except (EOFError, OSError, KeyError, TypeError, ValueError) as error:
            reason = f"rank {peer} failed ({type(error).__name__} {error})".replace(" )", ")")
            self._lost(
                peer, f"{reason}; start all ranks again, or call finish on all of them before they end"
            )

    def _hear(self, peer: int, head: Message, body: bytes) -> bool:
        """Take a message; return whether others may follow."""
        kind = head["kind"]
        if kind == LOST:
            self._lost(head["peer"], head["told"])
        if kind in (LOST, SHUTDOWN_NOTICE):
            return False
        with self._changed:
            published = self._published if kind == PULL else None
            if kind == GRADIENT:
                given = np.frombuffer(body, head["dtype"]).reshape(head["shape"])
                known = self._inbox.get(head["key"])
                self._inbox[head["key"]] = given.copy() if known is None else known + given
                return True
            if kind == PULL:
                self._askers |= {peer} if published is None else set()
            elif kind == PULLED:
                self._answered.add(peer)
            else:
                self._clocks[peer] = head["clock"]
                self._gone |= {peer} if kind == FINISHED else set()
            self._changed.notify_all()
        if published is not None:
            self._answer(peer, published)
        return True

    def _answer(self, peer: int, arrays: Mapping[str, Array]) -> None:
        for key, array in arrays.items():
            self._senders[peer].add(key, array)
        self._senders[peer].say(PULLED)

    def _cannot_send(self, peer: int, reason: str) -> None:
        """Report a broken connection, after a wait for its reason on the other connection to that rank."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._closed, WARNING_SECONDS)
        self._lost(peer, reason)

    def _lost(self, peer: int, reason: str) -> None:
        """Fail because of a rank; the first reason stands, and the other ranks get it before it shows here."""
        if self._failure is None and not self._closed:
            until = time.monotonic() + WARNING_SECONDS
            for warned in [one.warn(peer, reason) for other, one in self._senders.items() if other != peer]:
                warned.wait(max(0.0, until - time.monotonic()))
        with self._changed:
            if not self._closed:
                self._fail(peer, reason)
            self._changed.notify_all()

    def _fail(self, peer: int | None, reason: str) -> BackendError:
        if self._failure is None:
            self._failure = BackendError(reason, rank=self.rank, peer=peer, step=self.clock)
        return self._failure

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


class MailboxSender:
    """Queue of messages to one rank, and the thread that sends them.

    `lost` is called with the peer and a reason if the connection breaks.
    """

    def __init__(self, peer: int, connection: socket.socket, lost: Callable[[int, str], None]) -> None:
        self._peer = peer
        self._connection = connection
        self._lost = lost
        self._waiting: dict[str, Array] = {}
        self._clock: int | None = None
        self._kind = "clock"
        self._words: list[str] = []
        self._warning: dict[str, Any] | None = None
        self._warned = threading.Event()
        self._ending = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name=f"mail to {peer}", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Gradients that the thread has not taken yet."""
        with self._changed:
            return len(self._waiting)

    def add(self, key: str, gradient: Array) -> None:
        """Queue a gradient, or add it to the queued one of its key."""
        with self._changed:
            known = self._waiting.get(key)
            self._waiting[key] = gradient.copy() if known is None else known + gradient
            self._changed.notify()

    def tell(self, clock: int, *, finished: bool = False) -> None:
        """Queue this rank's clock after everything that was queued before."""
        with self._changed:
            self._clock = clock
            self._kind = FINISHED if finished else "clock"
            self._changed.notify()

    def say(self, word: str) -> None:
        """Queue a message that is only its kind."""
        with self._changed:
            self._words.append(word)
            self._changed.notify()

    def warn(self, peer: int, reason: str) -> threading.Event:
        """Queue the failure of a rank before all else; the event is set once it was sent."""
        with self._changed:
            if self._warning is None:
                self._warning = {"kind": LOST, "peer": peer, "told": reason}
                self._changed.notify()
        return self._warned

    def close(self) -> None:
        """Send everything and a shutdown notice, or give up if the peer is gone."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join()
        self._connection.close()

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    while not (
                        self._waiting
                        or self._words
                        or self._clock is not None
                        or self._warning
                        or self._ending
                    ):
                        self._changed.wait()
                    waiting, self._waiting = self._waiting, {}
                    warning = self._warning
                    words, self._words = self._words, []
                    clock, self._clock = self._clock, None
                    kind, ending = self._kind, self._ending
                if warning is not None:
                    self._send(warning)
                    self._warned.set()
                    return
                for key, gradient in waiting.items():
                    about = {"dtype": gradient.dtype.str, "shape": gradient.shape}
                    head = {"kind": GRADIENT, "key": key, **about}
                    self._send(head, np.ascontiguousarray(gradient).reshape(-1).view(np.uint8).data)
                for word in words:
                    self._send({"kind": word})
                if clock is not None:
                    self._send({"kind": kind, "clock": clock})
                if ending:
                    self._send({"kind": SHUTDOWN_NOTICE})
                    return
        except OSError as error:
            self._warned.set()  # the peer cannot be reached any more
            self._lost(self._peer, f"cannot send to rank {self._peer}: {error.strerror or error}")

    def _send(self, head: Message, body: bytes | memoryview = b"") -> None:
        self._connection.sendall(json.dumps({**head, "nbytes": len(body)}).encode() + b"\n")
        self._connection.sendall(body)


def _read(stream: BufferedReader) -> tuple[Message, bytes]:
    """Return the next message; raise EOFError at the end of the connection."""
    line = stream.readline()
    head = json.loads(line) if line.endswith(b"\n") else {}
    body = stream.read(head.get("nbytes", 0))
    if len(body) < head.get("nbytes", 1):
        raise EOFError
    return head, body
