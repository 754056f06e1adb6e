"""Keep a rank's connection to the rendezvous: agreement before collectives, and failure notices."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from math import isinf

from collectives.peers.address import RETRY_SECONDS, connect, parse_address, process_namespace
from collectives.peers.connections import MEETING, Connection, HandshakeError, Message
from collectives.peers.control_plane import Waiting, waits_for_no_peer
from collectives.peers.peer_watchdog import is_stopped
from collectives.peers.rendezvous_state import FORMAT
from topoplan.errors import BackendError

GRACE_SECONDS = 2.0  # time for an answer of the rendezvous, including the second that it may give the ranks


class RendezvousClient:
    """A rank's end of the rendezvous. The thread of connections sets the attributes, and readers hold the lock.

    `rendezvous` is an address, `until` the deadline for all ranks by `time.monotonic`, `lock` is notified of every
    change, and `job` names the job of this process; for `look` see `collectives.peers.address.connect`. `waiting`
    returns what this rank waits for, in any thread.

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
    refused : bool
        The rendezvous has said why this rank is not admitted.
    host : int or None
        The rank that hosts it, if one does.
    announced : Message or None
        The announcements of all ranks, for a rank that has asked the rendezvous for them.
    """

    def __init__(
        self,
        rendezvous: str,
        rank: int,
        size: int,
        *,
        key: bytes,
        job: str,
        until: float,
        lock: threading.Condition,
        look: Callable[[], None] | None = None,
    ) -> None:
        where = parse_address(rendezvous)
        self.rendezvous = str(where)
        self.rank = rank
        self.size = size
        self.opening: int | None = None
        self.answer: Message | None = None
        self.differ: Message | None = None
        self.keep_waiting = False
        self.verdict: Message | None = None
        self.alone = False
        self.lost = False
        self.refused = False
        self.host: int | None = None
        self.announced: Message | None = None
        self.waiting: Callable[[], Waiting] = waits_for_no_peer
        self._process = ("", 0)
        self._until = until
        self._lock = lock
        self._look = look
        self._job = job
        self._welcome: Message | None = None
        self._again = False
        self._refusal: BackendError | None = None
        made = connect(where, until, look=look)
        unix = made.family == socket.AF_UNIX
        self.local = "127.0.0.1" if unix else str(made.getsockname()[0])
        """The address of this machine on the connection to the rendezvous."""
        self._connection = Connection.dial(
            made, MEETING, key, job=job, receive=self._hear, ended=self._end, failed=self._fail
        )

    def join(self, about: Message) -> Message | None:
        """Send the hello and the fields `about`; return the welcome, once all ranks have come.

        None if the server ends before it has admitted this rank: connect again. Raises `BackendError` if the
        rendezvous refuses, does not answer, or is something else.
        """
        hello = {"type": "hello", "format": FORMAT, "rank": self.rank, "size": self.size, "pid": os.getpid()}
        left = max(0.0, self._until - time.monotonic())
        self.say({**hello, **about, "timeout": left, "processes": process_namespace()})
        deadline = self._until + GRACE_SECONDS
        while True:
            with self._lock:
                if self._welcome is not None:
                    return self._welcome
                if self._refusal is not None:
                    raise self._refusal
                if self._again:
                    return None
                left = deadline - time.monotonic()
                if left <= 0:
                    raise BackendError(
                        f"the rendezvous {self.rendezvous} does not answer; check what listens there",
                        rank=self.rank,
                    )
                self._lock.wait(left if self._look is None else min(left, RETRY_SECONDS))
            if self._look is not None:
                self._look()

    def say(self, message: Message) -> None:
        """Send a message; a failed send shows as a missing answer."""
        self._connection.send(message)

    def host_stands_still(self) -> bool:
        """Return whether the process that serves the rendezvous is stopped."""
        return is_stopped(*self._process)

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._connection.close()

    def _hear(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if message["type"] == "ping":
                wait = self.waiting()
                self.say({"type": "pong", **told(wait)})
        with self._lock:
            for message in messages:
                self._note(message)
            self._lock.notify_all()

    def _note(self, message: Message) -> None:
        kind = message["type"]
        if self._again:
            return  # what follows concerns the others
        if self._welcome is None:
            if kind in ("refused", "failed"):
                self.refused = True
                self._refusal = BackendError(
                    str(message["message"]), rank=self.rank, peer=message.get("peer")
                )
            elif kind == "again":
                self._again = True
            elif kind == "heard":
                self.opening = int(message["opening"])
            elif kind == "welcome":
                self.host = message["host"]
                self._process = str(message.get("processes")), int(message.get("pid", 0))
                self._welcome = message
        elif kind == "failed":
            self.verdict = self.verdict or message
        elif kind == "differ":
            self.differ = message
        elif kind == "leaving":
            self.alone = True
        elif kind == "keep waiting":
            self.keep_waiting = True
        elif kind == "peers":
            self.announced = message["peers"]
        elif kind != "ping":
            self.answer = message

    def _end(self, error: Exception | None) -> None:
        """Note the end of the connection: why this rank is not admitted, or that the rendezvous is gone."""
        with self._lock:
            if self._welcome is None and self._refusal is None and not self._again:
                self._refusal = self._unwelcome(error)
            self.lost = self.lost or not self.alone
            self.alone = True
            self._lock.notify_all()

    def _unwelcome(self, error: Exception | None) -> BackendError | None:
        """Return the error of a rank whose connection has ended before all ranks came; None if it is to come again."""
        where = self.rendezvous
        if isinstance(error, HandshakeError):
            text = f"{where} {error}"
            if "key" in str(error):
                text += (
                    f" from that of this process ({self._job}); give each job another address (MASTER_PORT or "
                    "TOPOPLAN_RENDEZVOUS), or, if this is one job, the same TOPOPLAN_JOB_KEY to all of its ranks"
                )
        elif isinstance(error, ValueError):
            text = f"the server at {where} is not a rendezvous of topoplan ({error}); give another address"
        elif isinstance(error, OSError):
            if self.opening is None:  # it stopped listening before it admitted this process
                self._again = True
                return None
            text = f"the rendezvous {where} is gone: {error.strerror or error}"
        else:
            text = (
                f"the server at {where} closed the connection; it is not a rendezvous of topoplan, or its process has "
                "ended"
            )
        return BackendError(text, rank=self.rank)

    def _fail(self, error: BaseException) -> None:
        """End the job with an error of this end's own code."""
        text = f"this rank's connection to the rendezvous failed: {type(error).__name__}: {error}"
        with self._lock:
            self._refusal = self._refusal or BackendError(text, rank=self.rank)
            self.verdict = self.verdict or {
                "type": "failed",
                "message": text,
                "rank": self.rank,
                "peer": None,
                "step": None,
                "links": [],
            }
            self._lock.notify_all()


def told(wait: Waiting) -> Message:
    """Return the fields of a message that says what a rank waits for."""
    counts = [[*one.link, one.data, one.credits] for one in wait.counts]
    return {
        "peer": wait.peer,
        "step": wait.step,
        "idle": None if isinf(wait.idle) else wait.idle,
        "counts": counts,
    }
