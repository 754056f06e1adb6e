"""A world around the rendezvous of the tcp back end: every rank keeps a connection to it."""

from __future__ import annotations

import atexit
import base64
import contextlib
import threading
from collections.abc import Callable

from collectives.peers.peers import plain, waits_for_nothing
from collectives.peers.rendezvous import Rendezvous
from collectives.peers.rendezvous_client import GRACE_SECONDS, Control
from collectives.peers.selector_thread import Watcher
from topoplan.errors import BackendError, UsageError


class TcpWorld:
    """`World` of processes that reach one address.

    Parameters
    ----------
    rendezvous : str
        Where the ranks meet: ``host:port`` or ``unix:/path``. Rank 0 listens there, unless a `Rendezvous` does.
    rank, size : int
    timeout : float
        Seconds to wait for all ranks to come.

    Raises
    ------
    UsageError
        The rank or the address makes no sense.
    BackendError
        The ranks do not find each other, or do not agree on their number.

    Examples
    --------
    >>> with Rendezvous("127.0.0.1:0", 1) as meeting:
    ...     world = TcpWorld(meeting.address, 0, 1)
    ...     world.gather(b"alone", timeout=5)
    ...     world.close()
    [b'alone']
    """

    def __init__(self, rendezvous: str, rank: int, size: int, *, timeout: float = 30.0) -> None:
        if not 0 <= rank < size:
            raise UsageError(f"rank {rank} of {size} does not exist; ranks are 0 to {max(size, 1) - 1}")
        self.rank = rank
        self.size = size
        self.waiting = waits_for_nothing
        self._changed = threading.Condition()
        self._trouble: BackendError | None = None
        self._closed = False
        self._undo: list[Callable[[], None]] = []
        try:
            self._meet(rendezvous, timeout)
        except BaseException:
            self._tear_down()
            raise
        atexit.register(self.close)

    def gather(self, data: bytes, *, timeout: float) -> list[bytes]:
        """See `World.gather`."""
        control = self._control
        with self._changed:
            control.answer = None
        control.say({"type": "gather", "data": base64.b64encode(data).decode()})
        while True:
            with self._changed:
                self._changed.wait_for(self._over, timeout)
                answer, control.answer = control.answer, None
            if answer is not None and "data" in answer:
                return [base64.b64decode(part) for part in answer["data"]]
            error = self.trouble()
            if error is not None:
                raise error
            self.stalled(timeout)

    def trouble(self) -> BackendError | None:
        """See `World.trouble`."""
        with self._changed:
            verdict = self._control.verdict
            if self._trouble is None and verdict is not None:
                rank, peer, step = verdict["rank"], verdict["peer"], verdict["step"]
                if rank is None:
                    rank, step = self.rank, self.waiting().step
                self._trouble = BackendError(str(verdict["message"]), rank=rank, peer=peer, step=step)
            if self._trouble is None and self._control.alone:
                host = self._control.host
                name = "rendezvous" if host is None else f"rendezvous of rank {host}"
                self._trouble = BackendError(
                    f"the {name} is gone: its process has ended or left the job; start all ranks again",
                    rank=self.rank,
                    peer=host,
                    step=self.waiting().step,
                )
            return self._trouble

    def tell(self, error: BackendError) -> None:
        """See `World.tell`."""
        where = {"rank": error.rank, "peer": error.peer, "step": error.step}
        self._control.say({"type": "failed", "message": plain(error), **where})
        with self._changed:
            self._changed.wait_for(self._ended, GRACE_SECONDS)

    def stalled(self, timeout: float) -> None:
        """See `World.stalled`."""
        control, wait = self._control, self.waiting()
        with self._changed:
            if control.answer is not None:
                return
        where = {"peer": wait.peer, "step": wait.step, "idle": wait.idle}
        control.say({"type": "stall", "timeout": timeout, **where})
        with self._changed:
            if not self._changed.wait_for(self._over, GRACE_SECONDS):
                self._trouble = BackendError(
                    f"waited {timeout:g} s, and the rendezvous, which knows more, does not answer either",
                    rank=self.rank,
                    peer=wait.peer if control.host is None else control.host,
                    step=wait.step,
                )
            elif control.answer is not None and control.answer["type"] == "patience":
                control.answer = None

    def close(self) -> None:
        """See `World.close`."""
        if not self._closed:
            self._closed = True
            atexit.unregister(self.close)
            self._control.say({"type": "bye"})
            self._tear_down()

    def _over(self) -> bool:
        return self._control.answer is not None or self._ended()

    def _ended(self) -> bool:
        return self._control.verdict is not None or self._control.alone

    def _meet(self, rendezvous: str, timeout: float) -> None:
        problem = ""
        if self.rank == 0:
            try:
                hosted = Rendezvous(rendezvous, self.size, host=0).start()
            except UsageError as error:
                problem = f"{error}; and "  # a launcher listens there, or nobody can
            else:
                self._undo.append(hosted.close)
        try:
            self._control = Control(rendezvous, self.rank, self.size, timeout=timeout)
        except BackendError as error:
            raise BackendError(f"{problem}{error}", rank=self.rank) from error
        self._undo.append(self._control.close)
        # this rank has no links of the tcp back end
        self._control.join({"general": None, "ports": {}, "flight_bytes": 0})
        watcher = Watcher(f"nccl rank {self.rank}")
        self._undo.append(watcher.close)
        watcher.add(self._control.connection, self._control.listen(self._changed, lambda: self.waiting()))

    def _tear_down(self) -> None:
        while self._undo:
            with contextlib.suppress(OSError):
                self._undo.pop()()
