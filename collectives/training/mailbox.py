"""Post gradients to all other ranks and take what has arrived, without a collective (bounded staleness, or none).

Behind each post comes the sender's clock, the number of steps it has finished: a rank that knows a clock has everything
that belongs to it. Gradients that a slow receiver has not been sent yet are added up, so a queue never holds more than
one for each key, however far apart ranks are. A published array goes only to the rank that pulls it, by a thread of its
own: the publisher's loop does not stop.

Connections are those of ``multiprocessing.connection``, one from each rank to each other, authenticated by a key that
the ranks share. A rank that dies without a shutdown notice fails the others in their next call. A rank that loses a
peer tells the others before it fails itself, so that they attribute the failure to the right rank.
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
"""Time in which the others are told of a rank that was lost, or the reason of a broken connection arrives."""

STRANGER_SECONDS = 2.0
"""Time in which whoever connects must prove that it has the key, which a scanner of ports has not."""


class Mailbox:
    """One rank's posts to all others, and theirs to it.

    Parameters
    ----------
    gather : callable
        By which ranks find each other; called twice.
    rank, size : int
    timeout : float
        Seconds to wait for another rank, at the start and later.

    Raises
    ------
    BackendError
        The ranks do not reach each other.
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
        self._meet(gather)

    def post(self, key: str, gradient: Array) -> None:
        """Send a gradient to all other ranks; it is copied, and nothing is waited for.

        Raises
        ------
        BackendError
            Another rank has failed.
        """
        self._check()
        for sender in self._senders.values():
            sender.add(key, gradient)

    def tick(self) -> None:
        """This rank has finished a step: its clock goes on, and all others hear of it behind what was posted."""
        with self._changed:
            self.clock += 1
        for sender in self._senders.values():
            sender.tell(self.clock)

    def take(self, key: str) -> Array | None:
        """The sum of what has come for a key since it was taken last; None if nothing has.

        Raises
        ------
        BackendError
            Another rank has failed.
        """
        self._check()
        with self._changed:
            return self._inbox.pop(key, None)

    def publish(self, arrays: Mapping[str, Array]) -> None:
        """What other ranks get that `pull` from this one, from now on; the arrays are not changed afterwards."""
        with self._changed:
            self._published = arrays
            askers, self._askers = sorted(self._askers), set()
        for peer in askers:
            self._answer(peer, arrays)

    def pull(self, peer: int) -> dict[str, Array]:
        """The newest arrays that a rank has published; waits for its first ones.

        Raises
        ------
        BackendError
            Another rank has failed, or nothing has come within the timeout.
        """
        self._check()
        self._senders[peer].say(PULL)
        with self._changed:
            until = time.monotonic() + self._timeout
            while peer not in self._answered:
                self._check()
                if not self._changed.wait(until - time.monotonic()):
                    raise self._fail(
                        peer,
                        f"waited {self._timeout:g} s for the parameters of rank {peer}; call finish on all ranks "
                        "before one of them closes",
                    )
            self._answered.remove(peer)
            pulled, self._inbox = self._inbox, {}
            return pulled

    def clocks(self) -> Mapping[int, int]:
        """The clocks of the other ranks, as far as they are known."""
        with self._changed:
            return dict(self._clocks)

    def wait_to_begin(self, bound: int | None) -> None:
        """Wait until this rank's clock is at most so many steps ahead of all others (`modes.may_begin`).

        Raises
        ------
        BackendError
            Another rank has failed, or its clock stood still for the timeout.
        """
        with self._changed:
            before, until = dict(self._clocks), time.monotonic() + self._timeout
            while not may_begin(self.clock, self._running(), bound):
                self._check()
                if not self._changed.wait(until - time.monotonic()):
                    slowest = min(self._clocks, key=self._clocks.__getitem__)
                    raise self._fail(
                        slowest,
                        f"waited {self._timeout:g} s for rank {slowest}, whose clock stands at "
                        f"{self._clocks[slowest]}; see what it is doing, and call finish where there are fewer batches",
                    )
                if before != self._clocks:
                    before, until = dict(self._clocks), time.monotonic() + self._timeout
            self._check()
            self.farthest = max([self.farthest, *(self.clock - clock for clock in self._running())])

    def drain(self) -> dict[str, Array]:
        """Wait until all ranks drain; what has come since it was taken last. Then all have the same sums.

        Raises
        ------
        BackendError
            Another rank has failed, or does not drain within the timeout.
        """
        for sender in self._senders.values():
            sender.tell(self.clock, finished=True)
        with self._changed:
            until = time.monotonic() + self._timeout
            while len(self._gone) < len(self._clocks):
                self._check()
                if not self._changed.wait(until - time.monotonic()):
                    slowest = min(set(self._clocks) - self._gone)
                    raise self._fail(
                        slowest,
                        f"waited {self._timeout:g} s for rank {slowest} to finish; call finish on all ranks, which "
                        "must not have many more batches one than another",
                    )
            left, self._inbox = self._inbox, {}
            self._gone.clear()
            return left

    def close(self) -> None:
        """Say goodbye once everything has been sent; closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        for sender in self._senders.values():
            sender.close()
        for thread, connection in zip(self._threads, self._incoming, strict=True):
            # the other end says goodbye when it closes, unless something has failed
            thread.join(0 if self._failure else self._timeout)
            if thread.is_alive():
                _shut_down_connection(connection)
                thread.join()
            connection.close()

    def _running(self) -> list[int]:
        """Clocks of the ranks that have not finished."""
        return [clock for peer, clock in self._clocks.items() if peer not in self._gone]

    def _meet(self, gather: Gather) -> None:
        key = bytes.fromhex(gather(secrets.token_hex(32))[0])
        listener = Listener(("", 0))
        here = host_identity()
        told = {"host": here, "address": _own_address(), "port": listener.address[1]}
        contacts = [json.loads(text) for text in gather(json.dumps(told))]
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
                f"not all of {self.size} ranks came within {self._timeout:g} s", rank=self.rank
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
                    connection.close()  # no rank of this job
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
            told = f"rank {peer} is gone ({type(error).__name__} {error})".replace(" )", ")")
            self._lost(peer, f"{told}; start all ranks again, or call finish on all of them before they end")

    def _answer(self, peer: int, arrays: Mapping[str, Array]) -> None:
        for key, array in arrays.items():
            self._senders[peer].add(key, array)
        self._senders[peer].say(PULLED)

    def _cannot_send(self, peer: int, told: str) -> None:
        """A connection broke; the other one to that rank may hold the reason."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._closed, WARNING_SECONDS)
        self._lost(peer, told)

    def _lost(self, peer: int, told: str) -> None:
        """A rank is gone: the first reason is the one that is told, to the others before it shows here."""
        if self._failure is None and not self._closed:
            until = time.monotonic() + WARNING_SECONDS
            for warned in [one.warn(peer, told) for other, one in self._senders.items() if other != peer]:
                warned.wait(max(0.0, until - time.monotonic()))
        with self._changed:
            if not self._closed:
                self._fail(peer, told)
            self._changed.notify_all()

    def _fail(self, peer: int, told: str) -> BackendError:
        if self._failure is None:
            self._failure = BackendError(told, rank=self.rank, peer=peer, step=self.clock)
        return self._failure

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


class MailboxSender:
    """What waits to be sent to one rank, and the thread that sends it.

    Parameters
    ----------
    peer : int
        The rank that it is for.
    connection : Connection
        To that rank.
    lost : callable
        Told the peer, and how the connection broke.
    rank : int
        This one.
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
        """Gradients that have not been taken up for sending."""
        with self._changed:
            return len(self._waiting)

    def add(self, key: str, gradient: Array) -> None:
        """Send a gradient, or what it makes with one of its key that still waits."""
        with self._changed:
            known = self._waiting.get(key)
            self._waiting[key] = gradient.copy() if known is None else known + gradient
            self._changed.notify()

    def tell(self, clock: int, *, finished: bool = False) -> None:
        """Send this rank's clock behind what was added before."""
        with self._changed:
            self._clock = clock
            self._kind = FINISHED if finished else "clock"
            self._changed.notify()

    def say(self, word: str) -> None:
        """Send a message of nothing but its kind behind what was added before."""
        with self._changed:
            self._words.append(word)
            self._changed.notify()

    def warn(self, peer: int, told: str) -> threading.Event:
        """Send word that a rank is lost, before all else that waits; the event tells when that has left."""
        with self._changed:
            if self._warning is None:
                self._warning = {"kind": LOST, "peer": peer, "told": told}
                self._changed.notify()
        return self._warned

    def close(self) -> None:
        """Send everything and a goodbye, or give up where the peer is gone."""
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
            self._warned.set()  # it cannot be told any more
            self._lost(self._peer, f"cannot send to rank {self._peer}: {error.strerror or error}")


@contextlib.contextmanager
def _time_limit(connection: Connection, seconds: float) -> Iterator[None]:
    """What is received in the block comes within so many seconds, or is an OSError."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        whole = int(seconds)
        limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        yield
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))


def _shut_down_connection(connection: Connection) -> None:
    """End the connection for the thread that reads from it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def _own_address() -> str:
    """An address of this machine that others may reach it at."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
