"""Post gradients to all other ranks and take what has arrived, without a collective (bounded staleness, or none).

After each post comes the sender's clock, the number of steps it has finished: a rank that knows a clock has everything
that belongs to it. Gradients that were not sent yet to a slow receiver are added up, so a queue never holds more than
one for each key, however far apart ranks are. A published array goes only to the rank that pulls it, by a thread of its
own: the publisher's loop does not stop.

Connections are those of ``multiprocessing.connection``, one from each rank to each other, authenticated by a key that
the ranks share. A rank that dies without a shutdown notice fails the others in their next call. A rank that loses a
peer reports it to the others before it fails itself, so that they attribute the failure to the right rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.peers.address import host_identity
from collectives.peers.agreement import Gather
from collectives.training.modes import may_begin
from topoplan.errors import BackendError

Array = NDArray[Any]
SHUTDOWN_NOTICE = "goodbye"
FINISHED = "finished"
LOST = "lost"
PULL, PULLED = "pull", "pulled"
"""Kinds of messages beside gradients and clocks."""

WARNING_SECONDS = 0.5
"""Time for reporting a failed rank to the others, and for the reason of a broken connection to arrive."""

STRANGER_SECONDS = 2.0
"""Time in which a connecting process must prove that it has the key; a port scanner does not have it."""


class Mailbox:
    """Posts of one rank to all others, and theirs to it.

    `gather` is called twice for the rendezvous; `timeout` is in seconds, at the start and later. All waits raise
    `BackendError` if another rank failed, or does not answer within the timeout.
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
        self._incoming: list[Connection] = []
        self._threads: list[threading.Thread] = []
        self._connect(gather)

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
        for thread, connection in zip(self._threads, self._incoming, strict=True):
            # the other end sends a shutdown notice when it closes, unless a rank failed
            thread.join(0 if self._failure else self._timeout)
            if thread.is_alive():
                _shut_down_connection(connection)
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
        key = bytes.fromhex(gather(secrets.token_hex(32))[0])
        listener = Listener(("", 0))
        here = host_identity()
        own = {"host": here, "address": _own_address(), "port": listener.address[1]}
        contacts = [json.loads(text) for text in gather(json.dumps(own))]
        accepting = threading.Thread(target=self._accept, args=(listener, key), daemon=True)
        accepting.start()
        try:
            for peer in self._clocks:
                contact = contacts[peer]
                where = ("127.0.0.1" if contact["host"] == here else contact["address"], contact["port"])
                made = Client(where)
                with _time_limit(made, self._timeout):
                    answer_challenge(made, key)
                    deliver_challenge(made, key)
                self._senders[peer] = MailboxSender(peer, made, self._cannot_send, self.rank)
        except (OSError, EOFError, AuthenticationError) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise self._fail(peer, f"cannot reach rank {peer}: {why}") from None
        accepting.join(self._timeout)
        listener.close()
        if accepting.is_alive() or len(self._incoming) < len(self._clocks):
            raise BackendError(
                f"not all of {self.size} ranks connected within {self._timeout:g} s", rank=self.rank
            )

    def _accept(self, listener: Listener, key: bytes) -> None:
        with contextlib.suppress(OSError):
            while len(self._incoming) < len(self._clocks):
                connection = listener.accept()
                try:
                    with _time_limit(connection, STRANGER_SECONDS):
                        deliver_challenge(connection, key)
                        answer_challenge(connection, key)
                        peer = int(connection.recv_bytes().decode())
                except (OSError, EOFError, AuthenticationError):
                    connection.close()  # not a rank of this job
                    continue
                self._incoming.append(connection)
                thread = threading.Thread(
                    target=self._receive, args=(peer, connection), name=f"mail from {peer}", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _receive(self, peer: int, connection: Connection) -> None:
        try:
            while True:
                head = json.loads(connection.recv_bytes())
                if head["kind"] == SHUTDOWN_NOTICE:
                    return
                if head["kind"] == LOST:
                    self._lost(head["peer"], head["told"])
                    return
                if head["kind"] == "gradient":
                    body = np.frombuffer(connection.recv_bytes(), head["dtype"]).reshape(head["shape"])
                    with self._changed:
                        known = self._inbox.get(head["key"])
                        self._inbox[head["key"]] = body.copy() if known is None else known + body
                    continue
                if head["kind"] == PULL:
                    with self._changed:
                        published = self._published
                        if published is None:
                            self._askers.add(peer)
                    if published is not None:
                        self._answer(peer, published)
                    continue
                if head["kind"] == PULLED:
                    with self._changed:
                        self._answered.add(peer)
                        self._changed.notify_all()
                    continue
                with self._changed:
                    self._clocks[peer] = head["clock"]
                    if head["kind"] == FINISHED:
                        self._gone.add(peer)
                    self._changed.notify_all()
        except (EOFError, OSError, ValueError) as error:
            reason = f"rank {peer} failed ({type(error).__name__} {error})".replace(" )", ")")
            self._lost(
                peer, f"{reason}; start all ranks again, or call finish on all of them before they end"
            )

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

    def _fail(self, peer: int, reason: str) -> BackendError:
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

    def __init__(
        self, peer: int, connection: Connection, lost: Callable[[int, str], None], rank: int
    ) -> None:
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
        connection.send_bytes(str(rank).encode())
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
                    self._connection.send_bytes(json.dumps(warning).encode())
                    self._warned.set()
                    return
                for key, gradient in waiting.items():
                    head = {
                        "kind": "gradient",
                        "key": key,
                        "dtype": gradient.dtype.str,
                        "shape": gradient.shape,
                    }
                    self._connection.send_bytes(json.dumps(head).encode())
                    self._connection.send_bytes(
                        np.ascontiguousarray(gradient).reshape(-1).view(np.uint8).data
                    )
                for word in words:
                    self._connection.send_bytes(json.dumps({"kind": word}).encode())
                if clock is not None:
                    self._connection.send_bytes(json.dumps({"kind": kind, "clock": clock}).encode())
                if ending:
                    self._connection.send_bytes(json.dumps({"kind": SHUTDOWN_NOTICE}).encode())
                    return
        except OSError as error:
            self._warned.set()  # the peer cannot be reached any more
            self._lost(self._peer, f"cannot send to rank {self._peer}: {error.strerror or error}")


@contextlib.contextmanager
def _time_limit(connection: Connection, seconds: float) -> Iterator[None]:
    """Raise OSError from receives inside that take longer than so many seconds."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        whole = int(seconds)
        limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        yield
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))


def _shut_down_connection(connection: Connection) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
