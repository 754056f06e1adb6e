"""Implement the control plane over a rendezvous, to which every rank keeps a connection.

A rank reports a failure to the rendezvous, which sends the first report to all ranks; ranks that are not neighbours
of the failed one stop too, and all name the same culprit. A rank that has waited for a whole timeout asks the
rendezvous, which finds the stalled rank or answers that some rank still moves. `rendezvous_within` opens a
rendezvous for a group of ranks over the control plane of the whole job.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from collectives.peers.address import RETRY_SECONDS
from collectives.peers.agreement import Gather, gather_or_raise
from collectives.peers.control_plane import (
    ControlPlane,
    Signature,
    disagreement,
    plain_message,
    waits_for_no_peer,
)
from collectives.peers.environment import JobIdentity, job_identity
from collectives.peers.peer_watchdog import LOOK
from collectives.peers.rendezvous import AddressLock, Rendezvous, process_mark
from collectives.peers.rendezvous_client import GRACE_SECONDS, RendezvousClient, SocketWatcher
from collectives.peers.rendezvous_state import Message
from topoplan.errors import BackendError, RefusedError, UsageError


def rendezvous_within(
    gather: Gather, members: Sequence[int], *, rank: int, local: str
) -> tuple[str, Rendezvous | None]:
    """The address at which the members of a rank's group meet, and what serves it on the first of them.

    Parameters
    ----------
    gather : callable
        Over all ranks of the job, which call this at once, each with its own group.
    members : sequence of int
        With this rank.
    rank : int
    local : str
        The address of this machine that other ranks reach.

    Raises
    ------
    UsageError
        The first of a group cannot listen; on all ranks.
    """
    places: list[Rendezvous] = []

    def told() -> str:
        if members[0] != rank:
            return ""
        places.append(Rendezvous(f"{local}:0", len(members), host=0, told=True).start())
        return places[0].address

    try:
        return gather_or_raise(gather, told)[members[0]], places[0] if places else None
    except BaseException:
        for place in places:
            place.close()
        raise


NO_END = 1e6
"""Seconds that a helper waits for work, more than a week; then it asks whether the ranks still live, and waits on."""


def _no_links(local: str) -> Message:
    """What the others must know of a rank that has no links of the tcp back end."""
    return {"general": None, "ports": {}, "flight_bytes": 0}


class TcpControlPlane(ControlPlane):
    """`ControlPlane` of processes that reach one address.

    Parameters
    ----------
    rendezvous : str
        Where the ranks meet: ``host:port`` or ``unix:/path``. Rank 0 listens there, unless a `Rendezvous` does.
    rank, size : int
    timeout : float
        Seconds to wait for all ranks to come.
    helpers : int
        Processes besides the ranks, numbered behind them, that follow what the ranks agree on.
    hello : callable, optional
        What the other ranks must know of this one, given the address of this machine from which the rendezvous is
        reached: where it listens, as the tcp back end does.
    changed : threading.Condition, optional
        Guards everything, and is told of every change that a thread waits for; on a lock that can be taken twice.
    look : callable, optional
        Called now and then while the ranks are waited for; raises where one of them will not come.

    Attributes
    ----------
    step : callable
        Set by who uses the world: the row at which this rank stops because of another, or None.
    met : int
        Counted by who uses the world: meetings that this rank has come through without the rendezvous.
    control : Control
    watcher : Watcher
        The thread that listens to the rendezvous, and may listen to more.
    welcome : Message
        What all ranks have said.

    Raises
    ------
    UsageError
        The rank or the address makes no sense.
    BackendError
        The ranks do not find each other, or do not agree on their number.

    Examples
    --------
    >>> with Rendezvous("127.0.0.1:0", 1) as meeting:
    ...     world = TcpControlPlane(meeting.address, 0, 1)
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
        hello: Callable[[str], Message] = _no_links,
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
        self._found: BackendError | None = None
        self._own: Message | None = None
        """A failure that this rank has met and not told yet."""
        self._process = os.getpid()
        self._undo: list[Callable[[], None]] = []
        self._hosted: tuple[str, JobIdentity] | None = None
        try:
            self._meet(rendezvous, timeout, hello, look)
        except BaseException:
            self.end()
            raise
        atexit.register(self.close)

    def gather(self, data: bytes, *, timeout: float) -> list[bytes]:
        """See `ControlPlane.gather`."""
        answer = self._ask({"type": "gather", "data": base64.b64encode(data).decode()}, timeout)
        return [base64.b64decode(part) for part in answer["data"]]

    def agree(self, signature: Signature, *, timeout: float, helped: bool = False) -> None:
        """See `ControlPlane.agree`; the rendezvous compares, and answers once all have come.

        Where it is ``helped``, all helpers are told what the ranks have agreed on, and waited for.
        """
        self._ask({**_agreement(signature), "helped": helped}, timeout)

    def follow(self) -> Signature | None:
        """What the ranks have agreed on that this helper takes part in, whenever that is; None once they have left.

        Raises
        ------
        BackendError
            The job has failed.
        """
        control = self.control
        with self.changed:
            control.answer = None
        control.say({"type": "follow"})
        self.wait(lambda: control.answer is not None or control.alone, timeout=NO_END)
        with self.changed:
            if control.verdict is not None or control.lost:
                self._check()
            told = None if control.answer is None else control.answer.get("signature")
        return None if told is None else Signature.unpack(str(told).encode())

    def meet(self) -> None:
        """Note that this rank is about to agree with the others without the rendezvous."""
        self.control.differ = None

    def miss_others(self, signature: Signature) -> None:
        """Tell the rendezvous that this rank waits for others where it meets them; it looks why they do not come.

        Where they do not come because ranks differ, `differing` is what to raise.
        """
        self.control.say({**_agreement(signature), "met": self.met, "meeting": self.met + 1})

    @property
    def differing(self) -> RefusedError | None:
        """What all ranks raise where they differ in what they agree on now."""
        if self.control.differ is None:
            return None
        signatures = [Signature.unpack(text.encode()) for text in self.control.differ["signatures"]]
        return disagreement(signatures, rank=self.rank)

    def largest(self, value: float, *, timeout: float) -> float:
        """See `ControlPlane.largest`."""
        return float(self._ask({"type": "largest", "value": float(value)}, timeout)["value"])

    def refuse(self, signature: Signature) -> None:
        """Of a helper: end what the ranks have agreed on, and tell them why; waits for nobody."""
        self._tell(_agreement(signature))

    def wait(
        self,
        done: Callable[[], bool],
        *,
        timeout: float,
        moved: Callable[[], float] = lambda: 0.0,
        pause: Callable[[], None] | None = None,
    ) -> None:
        """Wait until something is true, which is looked at after every change.

        Parameters
        ----------
        done : callable
        timeout : float
            Seconds without any movement.
        moved : callable
            When something moved last, on the steady clock.
        pause : callable, optional
            Spends the time between two looks, and ends when there is a change; by default nothing is done.

        Raises
        ------
        BackendError
            The job has failed, or nothing has moved for too long.
        """
        since = time.monotonic()
        while True:
            with self.changed:
                if done():
                    return
                until = max(since, moved()) + timeout
                self._check(until)
                left = until - time.monotonic()
                if left <= 0:
                    self._ask_who_stalls(timeout)
                    since = time.monotonic() - 0.75 * timeout
                    continue
                if pause is None:
                    self.changed.wait(left)
                    continue
            pause()

    def report(self, message: str, *, peer: int, step: int | None) -> None:
        """Note what this rank has met; the thread that waits tells the others. From any thread."""
        with self.changed:
            if self._own is None:
                self._own = _failure(BackendError(message, rank=self.rank, peer=peer, step=step))
                self.changed.notify_all()

    def trouble(self) -> BackendError | None:
        """See `ControlPlane.trouble`."""
        with self.changed:
            if self._found is None and self.control.verdict is not None:
                self._found = self._failed(self.control.verdict)
            if self._found is None and self.control.alone:
                self._found = self._gone()
            return self._found

    def tell(self, error: BackendError) -> None:
        """See `ControlPlane.tell`."""
        self._tell(_failure(error))

    def stalled(self, timeout: float) -> None:
        """See `ControlPlane.stalled`."""
        with self.changed:
            try:
                self._ask_who_stalls(timeout)
            except BackendError as error:
                self._found = self._found or error

    def hold_address(self, fail: Callable[[str], None]) -> Callable[[], None]:
        """Keep the address from other jobs once this world is closed, until what this returns is called
        (`AddressLock`).

        ``fail`` is called with a reason if another process comes there as rank 0 of what may be the same job.
        """
        return (lambda: None) if self._hosted is None else AddressLock.take(*self._hosted, fail)

    def close(self) -> None:
        """See `ControlPlane.close`; a forked child does nothing, since it shares the sockets of its parent."""
        if os.getpid() == self._process:
            self.leave()
            self.end()

    def leave(self) -> None:
        """Say goodbye."""
        if self._undo:
            self.control.say({"type": "bye", "met": self.met})

    def end(self) -> None:
        """Close the connection, whatever the others think of that."""
        atexit.unregister(self.close)
        while self._undo:
            with contextlib.suppress(OSError):
                self._undo.pop()()

    def _meet(
        self,
        rendezvous: str,
        timeout: float,
        hello: Callable[[str], Message],
        look: Callable[[], None] | None,
    ) -> None:
        problem, until = "", time.monotonic() + timeout
        job = job_identity(self.size + self.helpers)
        made: list[RendezvousClient] = []
        if self.rank == 0:
            try:
                hosted = Rendezvous.shared(rendezvous, job)
            except UsageError as error:  # a launcher listens there, or nobody can
                problem = f"rank 0 cannot listen at {rendezvous} ({error.__cause__ or error}): "
            else:
                self._undo.append(lambda: hosted.release(made[-1].opening if made else None))
                self._hosted = (rendezvous, job) if hosted.kept else None
        about: Message = {}
        welcome: Message | None = None
        while welcome is None:
            try:
                self.control = RendezvousClient(
                    rendezvous, self.rank, self.size + self.helpers, until=until, look=look
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
                raise BackendError(
                    f"{problem}{plain_message(error)}", rank=self.rank, peer=error.peer
                ) from error
            if welcome is None:
                self._undo.pop()()
                time.sleep(RETRY_SECONDS)
        self.welcome = welcome
        self.watcher = SocketWatcher(f"rank {self.rank}")
        self._undo.append(self.watcher.close)
        self.control.listen(self.changed, lambda: self.waiting(), self.watcher)

    def _ask(self, message: Message, timeout: float) -> Message:
        """Tell the rendezvous something that all ranks tell it, and wait for its answer.

        Raises
        ------
        RefusedError
            Ranks differ in what they agree on.
        BackendError
            As `wait`.
        """
        control = self.control
        with self.changed:
            before, control.answer, control.differ = control.answer, None, None
        control.say({**message, "met": self.met})
        self.wait(lambda: control.answer is not None or control.differ is not None, timeout=timeout)
        error = self.differing
        if error is not None:
            control.answer = before
            raise error
        assert control.answer is not None, "that was waited for"
        return control.answer

    def _tell(self, message: Message, until: float = math.inf) -> None:
        """Tell the rendezvous that it is over, and give it time to tell the others."""
        self.control.say(message)
        with self.changed:
            self._give_time(self._over, until)

    def _give_time(self, done: Callable[[], bool], until: float) -> None:
        """Wait for what the rendezvous is to say; until then at most where its process is seen to be stopped."""
        limit = time.monotonic() + GRACE_SECONDS
        while not done() and (now := time.monotonic()) < limit:
            if now >= until and self.control.host_stands_still():
                break
            self.changed.wait(LOOK)

    def _over(self) -> bool:
        return self.control.verdict is not None or self.control.alone

    def _check(self, until: float = math.inf) -> None:
        """Raise what has happened to the job; called with the lock, as all that follows.

        Parameters
        ----------
        until : float
            When this rank has waited for the whole timeout: so long the rendezvous may be stopped.
        """
        if self._found is not None:
            raise self._found
        control = self.control
        if control.verdict is None and self._own is not None:
            self._tell(self._own, until)
            if not self._over() and control.host is not None:
                # a neighbour that closed its links knew as little, but gave up earlier
                raise self._silence(self._own["message"], self._own["peer"])
        # where the rank that hosts the rendezvous died, neighbours that knew it earlier have closed their links
        host_died = control.lost and control.host is not None
        verdict = control.verdict or (None if host_died else self._own)
        if verdict is not None:
            raise self._failed(verdict)
        moving = self.waiting is not waits_for_no_peer and control.answer is not None
        if control.alone and (self._own is not None or not moving):
            raise self._gone()

    def _ask_who_stalls(self, timeout: float) -> None:
        """Raise what the rendezvous finds; nothing where it asks for patience."""
        wait = self.waiting()
        if self.control.alone:
            raise BackendError(f"waited {timeout:g} s", rank=self.rank, peer=wait.peer, step=wait.step)
        control = self.control
        before, control.answer, control.patience = control.answer, None, False
        where = {"peer": wait.peer, "step": wait.step, "idle": wait.idle}
        control.say({"type": "stall", "timeout": timeout, "met": self.met, **where})
        now = time.monotonic()
        self._give_time(
            lambda: (
                self._over() or control.patience or control.answer is not None or control.differ is not None
            ),
            now,
        )
        self._check(now)
        if control.answer is None and control.differ is not None:
            control.answer = before
        if control.answer is None:  # what was waited for may have come just now
            if not control.patience:
                raise self._silence(f"waited {timeout:g} s", wait.peer)
            control.answer = before

    def _failed(self, verdict: Message) -> BackendError:
        """What a verdict means for this rank."""
        peer = verdict["peer"]
        rank = self.rank if verdict["rank"] is None else verdict["rank"]
        step = self.step(peer) if verdict["step"] is None else verdict["step"]
        return BackendError(str(verdict["message"]), rank=rank, peer=peer, step=step)

    def _silence(self, reason: str, peer: int | None) -> BackendError:
        """The rendezvous does not answer; if a rank hosts it, that one holds everybody up."""
        peer = peer if self.control.host is None else self.control.host
        return BackendError(
            f"{reason}, and the {self._name()} does not answer: it is stopped, or cut off",
            rank=self.rank,
            peer=peer,
            step=self.step(peer),
        )

    def _gone(self) -> BackendError:
        host = self.control.host
        return BackendError(
            f"the {self._name()} is gone: its process has ended or left the job; start all ranks again",
            rank=self.rank,
            peer=host,
            step=self.step(host),
        )

    def _name(self) -> str:
        host = self.control.host
        return f"rendezvous {self.control.rendezvous}" if host is None else f"rendezvous of rank {host}"


def _agreement(signature: Signature) -> Message:
    packed = signature.pack().decode()
    return {"type": "agree", "signature": packed, "refused": bool(signature.refusal)}


def _failure(error: BackendError) -> Message:
    where = {"rank": error.rank, "peer": error.peer, "step": error.step}
    return {"type": "failed", "message": plain_message(error), **where}
