"""Implement the control plane over a rendezvous, to which every rank keeps a connection.

A rank reports a failure to the rendezvous, which sends the first report to all ranks; ranks that are not neighbours of
the failed one stop too, and all name the same culprit. A rank that has waited for a whole timeout asks the rendezvous,
which finds the stalled rank or answers that some rank still moves. `rendezvous_within` opens a rendezvous for a group
of ranks over the control plane of the whole job.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from errno import EADDRINUSE
from typing import Any

from collectives.peers.address import RETRY_SECONDS, Address, listening_process, parse_address
from collectives.peers.agreement import Gather, gather_or_raise
from collectives.peers.connections import Connection, Endpoint, Message, encode_message
from collectives.peers.control_plane import (
    ControlPlane,
    Link,
    LinkCount,
    Signature,
    Waiting,
    disagreement,
    plain_message,
    waits_for_no_peer,
)
from collectives.peers.environment import JobIdentity, job_identity
from collectives.peers.peer_watchdog import LOOK
from collectives.peers.rendezvous import AddressLock, Rendezvous, meeting_key, process_mark
from collectives.peers.rendezvous_client import GRACE_SECONDS, RendezvousClient, told
from collectives.peers.rendezvous_state import digest_of, values_of
from topoplan.errors import BackendError, RefusedError, TopoplanError, UsageError


def rendezvous_within(
    gather: Gather, members: Sequence[int], *, rank: int, local: str
) -> tuple[str, Rendezvous | None]:
    """Return the address of the rendezvous of a rank's group, and its server on the group's first rank.

    All ranks of the job call `gather` at once, each with the ``members`` of its own group. `local` is the address of
    this machine that other ranks reach. If the first rank of a group cannot listen, all ranks raise `UsageError`.
    """
    places: list[Rendezvous] = []

    def offered() -> str:
        if members[0] != rank:
            return ""
        token = secrets.token_hex(16)
        places.append(Rendezvous(f"{local}:0#{token}", len(members), host=0, job_made=True).start())
        return f"{places[0].address}#{token}"

    try:
        return gather_or_raise(gather, offered)[members[0]], places[0] if places else None
    except BaseException:
        for place in places:
            place.close()
        raise


SOURCE_SECONDS = 5.0  # time for another rank to pass the announcements on, before the rendezvous is asked
NO_END = 1e6  # timeout of a helper that waits for work; then it checks that the ranks still run


class TcpControlPlane(ControlPlane):
    """The control plane of processes that reach one address.

    `rendezvous` is ``host:port`` or ``unix:/path``; rank 0 listens there, unless a `Rendezvous` does. All ranks must
    come within `timeout` seconds. `helpers` are processes besides the ranks, numbered behind them, that follow the
    agreements of the ranks. `hello` returns the announcement of this rank, such as its ports, given the address of
    this machine from which it reaches the rendezvous; `peers` returns those of all ranks. `changed` guards
    the state and is notified of every change, on a reentrant lock. `look` is called repeatedly while ranks are
    missing, and raises if one of them will not come. The back end sets `step`, the row at which this rank stops
    because of another, or None; `met`, the number of barriers that this rank has passed without the rendezvous; and
    `link_counts`, the bytes of its links, which decide about a stall in a circle.

    Raises
    ------
    UsageError
        The rank or the address is invalid.
    BackendError
        The ranks do not find each other, or do not agree on their number.

    Examples
    --------
    >>> with Rendezvous("127.0.0.1:0", 1) as rendezvous:
    ...     world = TcpControlPlane(rendezvous.address, 0, 1)
    ...     world.gather(b"alone", timeout=5)
    ...     world.close()
    [b'alone']
    """

    def __init__(
        self,
        rendezvous: str,
        rank: int,
        size: int,
        *,
        timeout: float = 30.0,
        helpers: int = 0,
        hello: Callable[[str], Message] = lambda local: {"general": None, "ports": {}, "flight_bytes": 0},
        changed: threading.Condition | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        if size < 1 or not 0 <= rank < size + helpers:
            raise UsageError(f"rank {rank} of {size} does not exist; ranks are 0 to {max(size, 1) - 1}")
        self.helpers = helpers
        super().__init__(rank, size)
        self.changed = changed or threading.Condition()
        self.step: Callable[[int | None], int | None] = lambda peer: self.waiting().step
        self.met = 0
        self.link_counts: Callable[[], tuple[LinkCount, ...]] = tuple
        self._timeout = timeout
        self._peers: list[Message] = []
        self._key = b""
        self._found: BackendError | None = None
        self._own: Message | None = None  # a failure that this rank has noticed and not reported yet
        self._process = os.getpid()
        self._undo: list[Callable[[], None]] = []
        self._hosted: tuple[str, JobIdentity] | None = None
        try:
            self._connect(rendezvous, timeout, hello, look)
        except BaseException:
            self.end()
            raise
        atexit.register(self.close)

    def peers(self, pass_on: Callable[[bytes], None] = lambda text: None) -> list[Message]:
        """Return the announcements of all ranks and helpers, in order (`rendezvous_state.ANNOUNCED`).

        In large jobs they come over other ranks. `pass_on` gets the text of the message for ranks that ask this one,
        and returns at once; the ranks wait until all have it. Raises `BackendError` if the job fails meanwhile.
        """
        if self._peers:
            return self._peers
        columns = self._welcome["peers"] if "peers" in self._welcome else self._passed_on()
        if columns is None:
            self.control.say({"type": "peers"})
            self.wait(lambda: self.control.announced is not None, timeout=self._timeout)
            columns = self.control.announced
        assert columns is not None, "the wait is over"
        if "digest" in self._welcome:
            pass_on(encode_message({"type": "peers", "peers": columns}))
            self.gather(b"", timeout=self._timeout)
            with self.changed:
                self.control.answer = None  # this rank has called nothing yet
        rows = zip(*(values_of(runs) for runs in columns.values()), strict=True)
        self._peers = [dict(zip(columns, row, strict=True)) for row in rows]
        return self._peers

    def _passed_on(self) -> Message | None:
        """Return the announcements that the rank passes on whom the rendezvous has named; None without an answer."""
        source, answers, ended = self._welcome["source"], list[Message](), list[object]()

        def note(where: list[Any], *what: object) -> None:
            with self.changed:
                where.extend(what)
                self.changed.notify_all()

        until = time.monotonic() + SOURCE_SECONDS
        try:
            where = Endpoint.named(source["links"], self._key)
            made = socket.create_connection((source["general"], source["port"]), SOURCE_SECONDS)
        except (OSError, ValueError, TypeError, OverflowError):  # the fields are another rank's
            return None
        connection = Connection.dial(
            made,
            *where,
            receive=lambda messages: note(answers, *messages),
            ended=lambda error: note(ended, error),
            failed=lambda error: note(ended, error),
        )
        try:
            connection.send({"type": "peers"})
            with self.changed:
                while not answers and not ended and (left := until - time.monotonic()) > 0:
                    self._check()
                    self.changed.wait(left)
        finally:
            connection.close()
        columns: Message | None = answers[0].get("peers") if answers else None
        return columns if columns and digest_of(columns) == self._welcome["digest"] else None

    def gather(self, data: bytes, *, timeout: float) -> list[bytes]:
        answer = self._ask({"type": "gather", "data": base64.b64encode(data).decode()}, timeout)
        return values_of(answer["runs"], base64.b64decode)

    def agree(
        self,
        signature: Signature,
        *,
        timeout: float,
        helped: bool = False,
        moved: Callable[[], float] = lambda: 0.0,
        pause: Callable[[], bool] | None = None,
    ) -> None:
        """The rendezvous compares, and answers once all ranks have come; with ``helped``, also all helpers.

        `moved` and `pause` are as of `wait`.
        """
        self._ask({**_agreement(signature), "helped": helped}, timeout, moved=moved, pause=pause)

    def follow(self) -> Signature | None:
        """Return the signature of the next collective that this helper takes part in; None once the ranks have left."""
        control = self.control
        with self.changed:
            control.answer = None
        control.say({"type": "follow"})
        self.wait(lambda: control.answer is not None or control.alone, timeout=NO_END)
        with self.changed:
            if control.verdict is not None or control.lost:
                self._check()
            signature = None if control.answer is None else control.answer.get("signature")
        return None if signature is None else Signature.unpack(str(signature).encode())

    def meet(self) -> None:
        """Note that this rank enters a barrier without the rendezvous."""
        self.control.differ = None

    def miss_others(self, signature: Signature) -> None:
        """Report a barrier in which this rank waits, so that the rendezvous checks on the others.

        If they do not come because their signatures differ, `differing` is the error to raise.
        """
        self.control.say({**_agreement(signature), "met": self.met, "meeting": self.met + 1})

    @property
    def differing(self) -> RefusedError | None:
        """The error that all ranks raise if their signatures differ."""
        if self.control.differ is None:
            return None
        signatures = values_of(self.control.differ["runs"], lambda text: Signature.unpack(text.encode()))
        return disagreement(signatures, rank=self.rank)

    def largest(self, value: float, *, timeout: float) -> float:
        return float(self._ask({"type": "largest", "value": float(value)}, timeout)["value"])

    def refuse(self, signature: Signature) -> None:
        """End what the ranks have agreed on, from a helper, and give the reason; does not wait."""
        self._report_failure(_agreement(signature))

    def wait(
        self,
        done: Callable[[], bool],
        *,
        timeout: float,
        moved: Callable[[], float] = lambda: 0.0,
        pause: Callable[[], object] | None = None,
    ) -> None:
        """Wait until `done` returns true; it is called after every change.

        `timeout` is in seconds without movement, and `moved` returns the time of the last movement. `pause`, if given,
        spends the time between two calls of `done` and returns on a change, or returns False at once. Raises
        `BackendError` when the job has failed or the timeout has passed.
        """
        since = time.monotonic()
        idle = False
        while True:
            with self.changed:
                if done():
                    return
                until = max(since, moved()) + timeout
                self._check(until)
                left = until - time.monotonic()
                if left <= 0:
                    self._ask_for_stalled_rank(timeout)
                    since = time.monotonic() - 0.75 * timeout
                    continue
                if pause is None or idle:
                    self.changed.wait(left)
                    idle = False
                    continue
            idle = pause is not None and pause() is False

    def report(self, message: str, *, peer: int, step: int | None, links: tuple[Link, ...] = ()) -> None:
        """Note a failure; the thread that waits reports it to the others. Thread-safe."""
        with self.changed:
            if self._own is None:
                error = BackendError(message, rank=self.rank, peer=peer, step=step, links=links)
                self._own = _failure(error)
                self.changed.notify_all()

    def report_lost(self, links: Sequence[Link]) -> None:
        """Report links that do not answer; does not wait.

        The job fails if the ranks at their other ends answer the rendezvous. To be repeated while it is true.
        """
        self.control.say({"type": "lost", "links": links, "met": self.met, **told(self._wait_state())})

    def trouble(self) -> BackendError | None:
        with self.changed:
            if self._found is None and self.control.verdict is not None:
                self._found = self._verdict_error(self.control.verdict)
            if self._found is None and self.control.alone:
                self._found = self._ended_rendezvous()
            return self._found

    def tell(self, error: BackendError) -> None:
        self._report_failure(_failure(error))

    def stalled(self, timeout: float) -> None:
        with self.changed:
            try:
                self._ask_for_stalled_rank(timeout)
            except BackendError as error:
                self._found = self._found or error

    def hold_address(self, fail: Callable[[str], None]) -> Callable[[], None]:
        """Hold the address against other jobs after this control plane is closed (`AddressLock`); returns the release.

        `fail` is called with a reason if another process comes there as rank 0 of what may be the same job.
        """
        return (lambda: None) if self._hosted is None else AddressLock.take(*self._hosted, fail)

    def close(self) -> None:
        """A forked child does nothing, since it shares its parent's sockets."""
        if os.getpid() == self._process:
            self.leave()
            self.end()

    def close_with(self, error: BaseException) -> None:
        """Close after a failed set-up: the ranks that wait for this one raise its error."""
        if self.trouble() is None:
            text = " ".join(str(error).split()) if isinstance(error, TopoplanError) else repr(error)
            self.tell(error if isinstance(error, BackendError) else BackendError(text, rank=self.rank))
        self.close()

    def leave(self) -> None:
        """Announce the shutdown of this rank."""
        if self._undo:
            self.control.say({"type": "bye", "met": self.met})

    def end(self) -> None:
        """Close the connection without an announcement."""
        atexit.unregister(self.close)
        while self._undo:
            with contextlib.suppress(OSError):
                self._undo.pop()()

    def _connect(
        self,
        rendezvous: str,
        timeout: float,
        hello: Callable[[str], Message],
        look: Callable[[], None] | None,
    ) -> None:
        problem, until = "", time.monotonic() + timeout
        where = parse_address(rendezvous)
        key = self._key = meeting_key(where)
        job = job_identity(self.size + self.helpers)
        made: list[RendezvousClient] = []
        foreign: UsageError | None = None
        if self.rank == 0:
            try:
                hosted = Rendezvous.shared(rendezvous, job)
            except UsageError as error:
                problem = f"rank 0 cannot listen at {where} ({error.__cause__ or error}): "
                foreign = _foreign_listener(where, key, problem, error)
                if foreign is not None:
                    # the job of that process must hear of this one; its answer, if it is another, is not believed
                    until = min(until, time.monotonic() + GRACE_SECONDS)
            else:
                self._undo.append(lambda: hosted.release(made[-1].opening if made else None))
                self._hosted = (rendezvous, job) if hosted.kept else None
        about: Message = {}
        welcome: Message | None = None
        while welcome is None:
            try:
                self.control = RendezvousClient(
                    rendezvous,
                    self.rank,
                    self.size + self.helpers,
                    key=key,
                    job=str(job),
                    until=until,
                    lock=self.changed,
                    look=look,
                )
                made.append(self.control)
                self._undo.append(self.control.close)
                about = about or {
                    **hello(self.control.local),
                    "helper": self.rank >= self.size,
                    "process": process_mark(),
                    "job": asdict(job),
                }
                welcome = self.control.join(about)
            except BackendError as error:
                if foreign is not None and not (made and made[-1].refused):
                    raise foreign from error
                raise BackendError(
                    f"{problem}{plain_message(error)}", rank=self.rank, peer=error.peer
                ) from error
            if foreign is not None:
                raise foreign
            if welcome is None:
                self._undo.pop()()
                time.sleep(RETRY_SECONDS)
        self._welcome = welcome
        self.control.waiting = self._wait_state

    def _wait_state(self) -> Waiting:
        """Return what this rank waits for, with the counts of its links."""
        return replace(self.waiting(), counts=self.link_counts())

    def _ask(
        self,
        message: Message,
        timeout: float,
        *,
        moved: Callable[[], float] = lambda: 0.0,
        pause: Callable[[], bool] | None = None,
    ) -> Message:
        """Send a request of all ranks and return the answer; RefusedError if signatures differ, else as `wait`."""
        control = self.control
        with self.changed:
            before, control.answer, control.differ = control.answer, None, None
        control.say({**message, "met": self.met})
        self.wait(
            lambda: control.answer is not None or control.differ is not None,
            timeout=timeout,
            moved=moved,
            pause=pause,
        )
        error = self.differing
        if error is not None:
            control.answer = before
            raise error
        assert control.answer is not None, "the wait is over"
        return control.answer

    def _report_failure(self, message: Message, until: float = math.inf) -> None:
        """Report to the rendezvous that the job is over, and give it time to report to the others."""
        self.control.say(message)
        with self.changed:
            self._give_time(self._is_over, until)

    def _give_time(self, done: Callable[[], bool], until: float) -> None:
        """Wait for an answer of the rendezvous; after ``until`` no longer if its process is stopped."""
        limit = time.monotonic() + GRACE_SECONDS
        while not done() and (now := time.monotonic()) < limit:
            if now >= until and self.control.host_stands_still():
                break
            self.changed.wait(LOOK)

    def _is_over(self) -> bool:
        return self.control.verdict is not None or self.control.alone

    def _check(self, until: float = math.inf) -> None:
        """Raise the failure of the job; called with the lock, as the methods below.

        `until` is when the timeout of this rank ends; the rendezvous may be stopped as long.
        """
        if self._found is not None:
            raise self._found
        control = self.control
        if control.verdict is None and self._own is not None:
            self._report_failure(self._own, until)
            if not self._is_over() and control.host is not None:
                # a neighbour that closed its links has only given up earlier
                raise self._silent_rendezvous(self._own["message"], self._own["peer"])
        # when the host of the rendezvous dies, neighbours that notice it earlier close their links
        host_died = control.lost and control.host is not None
        verdict = control.verdict or (None if host_died else self._own)
        if verdict is not None:
            raise self._verdict_error(verdict)
        moving = self.waiting is not waits_for_no_peer and control.answer is not None
        if control.alone and (self._own is not None or not moving):
            raise self._ended_rendezvous()

    def _ask_for_stalled_rank(self, timeout: float) -> None:
        """Raise the failure that the rendezvous finds; return if it asks this rank to keep waiting."""
        wait = self._wait_state()
        if self.control.alone:
            raise BackendError(f"waited {timeout:g} s", rank=self.rank, peer=wait.peer, step=wait.step)
        control = self.control
        before, control.answer, control.keep_waiting = control.answer, None, False
        control.say({"type": "stall", "timeout": timeout, "met": self.met, **told(wait)})
        now = time.monotonic()
        self._give_time(
            lambda: (
                self._is_over()
                or control.keep_waiting
                or control.answer is not None
                or control.differ is not None
            ),
            now,
        )
        self._check(now)
        if control.answer is None and control.differ is not None:
            control.answer = before
        if control.answer is None:  # the answer may have come just now
            if not control.keep_waiting:
                raise self._silent_rendezvous(f"waited {timeout:g} s", wait.peer)
            control.answer = before

    def _verdict_error(self, verdict: Message) -> BackendError:
        """Return the error of this rank for a verdict."""
        peer = verdict["peer"]
        rank = self.rank if verdict["rank"] is None else verdict["rank"]
        step = self.step(peer) if verdict["step"] is None else verdict["step"]
        links = tuple(
            (source, destination, channel) for source, destination, channel in verdict.get("links", [])
        )
        return BackendError(str(verdict["message"]), rank=rank, peer=peer, step=step, links=links)

    def _silent_rendezvous(self, reason: str, peer: int | None) -> BackendError:
        """Return the error for a silent rendezvous; if a rank hosts it, that rank holds up all others."""
        peer = peer if self.control.host is None else self.control.host
        return BackendError(
            f"{reason}, and the {self._rendezvous_name()} does not answer: it is stopped, or cut off",
            rank=self.rank,
            peer=peer,
            step=self.step(peer),
        )

    def _ended_rendezvous(self) -> BackendError:
        host = self.control.host
        return BackendError(
            f"the {self._rendezvous_name()} is gone: its process has ended or left the job; start all ranks again",
            rank=self.rank,
            peer=host,
            step=self.step(host),
        )

    def _rendezvous_name(self) -> str:
        host = self.control.host
        return f"rendezvous {self.control.rendezvous}" if host is None else f"rendezvous of rank {host}"


def _foreign_listener(where: Address, key: bytes, problem: str, error: UsageError) -> UsageError | None:
    """Return the error of a rank 0 in whose place another process listens; None if it may be the job's launcher.

    With a key, the handshake shows whether it is. Raises the error of an address that is not of this machine.
    """
    cause = error.__cause__
    if not (isinstance(cause, OSError) and cause.errno == EADDRINUSE):
        raise UsageError(
            f"{problem}give an address of rank 0's machine (MASTER_ADDR or TOPOPLAN_RENDEZVOUS)"
        ) from error
    holder = listening_process(where)
    if key or holder.launched_this:
        return None
    return UsageError(
        f"{problem}{holder} listens there; give each job an address of its own (MASTER_PORT or "
        "TOPOPLAN_RENDEZVOUS), or, if that is the launcher of this job, give it and all ranks one TOPOPLAN_JOB_KEY"
    )


def _agreement(signature: Signature) -> Message:
    packed = signature.pack().decode()
    return {"type": "agree", "signature": packed, "refused": bool(signature.refusal)}


def _failure(error: BackendError) -> Message:
    where = {"rank": error.rank, "peer": error.peer, "step": error.step, "links": error.links}
    return {"type": "failed", "message": plain_message(error), **where}
