"""One rank's part in the job as a whole: waits that end, and failures that everybody hears of.

A failure is told to the rendezvous, which tells all ranks the first that it hears of; so ranks that are not
neighbours of the one that failed stop too, and all name the same culprit. A rank that has waited for a whole timeout
asks the rendezvous, which finds the one that holds everybody up, or says that there is still some movement.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NoReturn

from collectives.backends.tcp.flow import Flow
from collectives.backends.tcp.wires import Queue
from collectives.peers.blame import Waiting
from collectives.peers.framing import Message
from collectives.peers.rendezvous_client import GRACE_SECONDS, Control
from collectives.peers.signature import Signature
from topoplan.errors import BackendError


class Job:
    """What threads of one rank share.

    Parameters
    ----------
    rank : int
    timeout : float
        Seconds without any movement.

    Attributes
    ----------
    lock : threading.RLock
        Guards everything.
    changed : threading.Condition
        On that lock; it is told of every change that the caller's thread waits for.
    flow : Flow or None
        The collective that runs now.
    control : Control
        Set once the ranks have met.
    """

    def __init__(self, rank: int, *, timeout: float) -> None:
        self.rank = rank
        self.timeout = timeout
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.flow: Flow | None = None
        self.control: Control
        self._trouble: Message | None = None

    def ask(self, message: Message, signature: Signature | None = None) -> Message:
        """Tell the rendezvous something that all ranks tell it, and wait for its answer.

        Parameters
        ----------
        signature : Signature, optional
            Of the collective that is about to begin.

        Raises
        ------
        BackendError
            As `wait`.
        """
        with self.changed:
            self.control.answer = None
        self.control.say(message)
        self.wait(lambda: self.control.answer is not None, signature)
        assert self.control.answer is not None, "that was waited for"
        return self.control.answer

    def wait(self, done: Callable[[], bool], signature: Signature | None = None) -> None:
        """Wait until something is true, which is looked at after every change.

        Raises
        ------
        BackendError
            The job has failed, or nothing has moved for too long.
        """
        since = time.monotonic()
        with self.changed:
            while not done():
                self._check(signature)
                moved = self.flow.touched if self.flow is not None else since
                left = max(since, moved) + self.timeout - time.monotonic()
                if left > 0:
                    self.changed.wait(left)
                else:
                    self._ask_who_stalls(signature)
                    since = time.monotonic() - 0.75 * self.timeout

    def ended(self, lane: Queue, message: str) -> None:
        """The other end of a link has closed it; that is trouble only while this link has more to carry.

        A rank that has ended well may still have data on its way over its other links.
        """
        with self.changed:
            if self.flow is not None and self.flow.needs(lane):
                self.broken(lane[0] if lane[1] == self.rank else lane[1], message)

    def broken(self, peer: int, message: str) -> None:
        """A link has failed."""
        with self.changed:
            flow = self.flow
            if flow is None or flow.stopped or self._trouble is not None:
                return
            where = {"rank": self.rank, "peer": peer, "step": flow.step(peer)}
            self._trouble = {"type": "failed", "message": message, **where}
            self.changed.notify_all()

    def waiting(self) -> Waiting:
        """What this rank waits for, for a rank that has waited too long."""
        with self.changed:
            return Waiting(None, None, 0.0) if self.flow is None else self.flow.waiting()

    def tell(self, message: Message) -> None:
        """Tell the rendezvous that it is over, and give it time to tell the others."""
        self.control.say(message)
        with self.changed:
            self.changed.wait_for(self._over, GRACE_SECONDS)

    def _over(self) -> bool:
        return self.control.verdict is not None or self.control.alone

    def _check(self, signature: Signature | None) -> None:
        """Raise what has happened to the job; called with the lock, as all that follows."""
        if self.control.verdict is None and self._trouble is not None:
            self.tell(self._trouble)
            if not self._over() and self.control.host is not None:
                # a neighbour that closed its links knew as little, but gave up earlier
                self._raise_silence(self._trouble["message"], self._trouble["peer"])
        # where the rank that hosts the rendezvous died, neighbours that knew it earlier have closed their links
        host_died = self.control.lost and self.control.host is not None
        verdict = self.control.verdict or (None if host_died else self._trouble)
        if verdict is not None and verdict["type"] == "differ":
            self._raise_difference(verdict, signature)
        if verdict is not None:
            self._raise_failure(verdict)
        troubled = self._trouble is not None
        if self.control.alone and (troubled or self.flow is None or self.control.answer is None):
            host = self.control.host
            name = f"rendezvous {self.control.rendezvous}" if host is None else f"rendezvous of rank {host}"
            raise BackendError(
                f"the {name} is gone: its process has ended or left the job; start all ranks again",
                rank=self.rank,
                peer=host,
                step=self._step(host),
            )

    def _ask_who_stalls(self, signature: Signature | None) -> None:
        """Raise what the rendezvous finds; nothing where it asks for patience."""
        wait = self.waiting()
        if self.control.alone:
            peer, step = wait.peer, wait.step
            raise BackendError(f"waited {self.timeout:g} s", rank=self.rank, peer=peer, step=step)
        before, self.control.answer = self.control.answer, None
        where = {"peer": wait.peer, "step": wait.step, "idle": wait.idle}
        self.control.say({"type": "stall", "timeout": self.timeout, **where})
        self.changed.wait_for(lambda: self._over() or self.control.answer is not None, GRACE_SECONDS)
        self._check(signature)
        if self.control.answer is None:
            self._raise_silence(f"waited {self.timeout:g} s", wait.peer)
        if self.control.answer["type"] == "patience":
            self.control.answer = before

    def _raise_difference(self, verdict: Message, signature: Signature | None) -> NoReturn:
        others = {int(rank): text for rank, text in verdict["signatures"].items() if int(rank) != self.rank}
        if signature is not None:
            for rank, text in others.items():
                signature.check(Signature.unpack(text.encode()), rank=self.rank, peer=rank)
        raise BackendError(str(verdict["message"]), rank=self.rank, peer=min(others, default=None))

    def _raise_silence(self, reason: str, peer: int | None) -> NoReturn:
        """The rendezvous does not answer; if a rank hosts it, that one holds everybody up."""
        host = self.control.host
        name = f"rendezvous {self.control.rendezvous}" if host is None else f"rendezvous of rank {host}"
        peer = peer if host is None else host
        raise BackendError(
            f"{reason}, and the {name} does not answer: it is stopped, or cut off",
            rank=self.rank,
            peer=peer,
            step=self._step(peer),
        )

    def _raise_failure(self, verdict: Message) -> NoReturn:
        peer = verdict["peer"]
        rank = self.rank if verdict["rank"] is None else verdict["rank"]
        step = self._step(peer) if verdict["step"] is None else verdict["step"]
        raise BackendError(str(verdict["message"]), rank=rank, peer=peer, step=step)

    def _step(self, peer: int | None) -> int | None:
        """The row at which this rank stops because of another, else the one that it waits for anyway."""
        if self.flow is None:
            return None
        step = None if peer is None else self.flow.step(peer)
        return self.flow.waiting().step if step is None else step
