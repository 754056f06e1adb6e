"""The tcp back end: one rank in this process, joined to the others by one connection per directed link."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from collectives.arrays.result_arrays import ResultArrays
from collectives.backends.backend import Call
from collectives.backends.tcp.flow import Flow
from collectives.backends.tcp.job import Job
from collectives.backends.tcp.lanes import lane_of
from collectives.backends.tcp.memory import Spare
from collectives.backends.tcp.network import Network
from collectives.backends.tcp.order import FLIGHT_BYTES
from collectives.backends.tcp.pacing import link_rates
from collectives.backends.tcp.wires import Queue, base_queue, read_wires
from collectives.lowering.edge_streams import Stream
from collectives.peers.framing import Message
from collectives.peers.rendezvous import Rendezvous
from collectives.peers.rendezvous_client import Control
from collectives.peers.selector_thread import Watcher
from collectives.peers.signature import Signature
from topoplan.errors import BackendError, UsageError


class TcpBackend:
    """`Backend` of one rank; the others are other processes, on this machine or others.

    Parameters
    ----------
    rank, size : int
        This rank, and number of ranks.
    rendezvous : str
        Where the ranks meet: ``host:port`` or ``unix:/path``. Rank 0 listens there, unless a `Rendezvous` does.
    wires : path, optional
        File that names the addresses of each link (see `collectives.backends.tcp.wires`); other links use the
        address from which the rendezvous is reached, which for a Unix path is 127.0.0.1.
    pace : float, optional
        Let each link run no faster than this times the bandwidth in the plan (see
        `collectives.backends.tcp.pacing`).
    timeout : float
        Seconds to wait for the next step of a collective.
    meeting_timeout : float, optional
        Seconds to wait for all ranks to come; by default ``timeout``.
    flight_bytes : int
        Bytes that may be under way, or wait at their destination, of a stream that another may hold up: what the
        queues in the network hold, or it runs dry. The same on all ranks.

    Raises
    ------
    UsageError
        An argument is out of range, or the wires file is wrong.
    BackendError
        The ranks do not find each other, or do not agree on their number.

    Examples
    --------
    >>> from collectives import Communicator
    >>> from collectives.peers.rendezvous import Rendezvous
    >>> import numpy as np, topoplan
    >>> plan = topoplan.plan(topoplan.load("dgx-1v"), "allreduce", gpus=[3])
    >>> with Rendezvous("127.0.0.1:0", 1) as meeting:
    ...     with Communicator(plan, TcpBackend(0, 1, rendezvous=meeting.address)) as comm:
    ...         print(comm.all_reduce(np.arange(3)))
    [0 1 2]
    """

    name = "tcp"
    one_rank = True
    direct = False
    averages = False
    chunk_bytes: int | None = None

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        rendezvous: str,
        wires: Path | str | None = None,
        pace: float | None = None,
        timeout: float = 30.0,
        meeting_timeout: float | None = None,
        flight_bytes: int = FLIGHT_BYTES,
    ) -> None:
        if size < 1 or not 0 <= rank < size:
            raise UsageError(f"rank {rank} of {size} does not exist; ranks are 0 to {max(size, 1) - 1}")
        if pace is not None and not pace > 0:
            raise UsageError(f"a pace of {pace} moves nothing; give 1 for the plan's bandwidths, or less")
        meeting_timeout = timeout if meeting_timeout is None else meeting_timeout
        if not min(timeout, meeting_timeout) > 0:
            least = min(timeout, meeting_timeout)
            raise UsageError(f"a timeout of {least} s is no time to wait; give more than zero")
        if flight_bytes < 1:
            raise UsageError(
                f"{flight_bytes} bytes under way move nothing; give at least 1, for example 4194304"
            )
        self.size = size
        self.rank = rank
        self.ranks: tuple[int, ...] = (rank,)
        self.arrays = ResultArrays()
        self._pace = pace
        self._flight_bytes = flight_bytes
        self._wires = read_wires(wires) if wires is not None else {}
        self._rates: dict[str, Mapping[Queue, float]] = {}
        self._spare = Spare()
        self._job = Job(rank, timeout=timeout)
        self._closed = False
        self._process = os.getpid()
        self._undo: list[Callable[[], None]] = []
        try:
            self._meet(rendezvous, meeting_timeout)
        except BaseException:
            self._tear_down()
            raise
        atexit.register(self.close)

    def run(self, call: Call[NDArray[Any]]) -> None:
        """See `Backend.run`."""
        self._check_open()
        job, signature = self._job, call.signature
        try:
            flow = Flow(
                call,
                self.rank,
                over=job.changed,
                spare=self._spare,
                credit=self._credit,
                flight_bytes=self._flight_bytes,
                lane_of=lambda stream: lane_of(stream, call.plan, call.table, self._wires),
            )
            with job.changed:
                job.flow = flow
            job.ask(_agreement(signature), signature)
            self._start(call, flow)
            job.wait(lambda: flow.finished, signature)
        except BaseException as error:
            if job.flow is not None:
                job.flow.stop()
            self._give_up(error)
            raise
        finally:
            with job.changed:
                job.flow = None

    def refuse(self, signature: Signature) -> None:
        """See `Backend.refuse`."""
        if not self._closed:
            self._job.tell(_agreement(signature))
            self._end()

    def largest(self, value: float) -> float:
        """See `Backend.largest`."""
        return float(self._asked({"type": "largest", "value": float(value)})["value"])

    def agree(self, signature: Signature) -> None:
        """See `GathersTexts.agree`."""
        self._asked(_agreement(signature), signature)

    def gather_texts(self, text: str) -> list[str]:
        """See `GathersTexts.gather_texts`."""
        return [str(one) for one in self._asked({"type": "gather", "data": text})["data"]]

    def _asked(self, message: Message, signature: Signature | None = None) -> Message:
        """The answer of the rendezvous to what all ranks tell it."""
        self._check_open()
        try:
            return self._job.ask(message, signature)
        except BaseException as error:
            self._give_up(error)
            raise

    def close(self) -> None:
        """See `Backend.close`. What this rank has sent reaches the machines of the others first."""
        # a child that was forked off must not say goodbye for its parent
        if not self._closed and os.getpid() == self._process:
            self._network.drain(self._job.timeout)
            self._job.control.say({"type": "bye"})
            self._end()

    def _meet(self, rendezvous: str, timeout: float) -> None:
        """Find the other ranks."""
        problem = ""
        if self.rank == 0:
            try:
                hub = Rendezvous(rendezvous, self.size, host=0).start()
            except UsageError as error:
                problem = f"{error}; and "  # a launcher listens there, or nobody can
            else:
                self._undo.append(hub.close)
        try:
            control = Control(rendezvous, self.rank, self.size, timeout=timeout)
        except BackendError as error:
            raise BackendError(f"{problem}{error}", rank=self.rank) from error
        self._undo.append(control.close)
        job = self._job
        job.control = control
        self._network = Network(
            self.rank,
            control.local,
            self._wires,
            lock=job.lock,
            flow=lambda: job.flow,
            broken=job.broken,
            ended=job.ended,
        )
        self._undo.append(self._network.close)
        welcome = control.join(
            {
                "general": self._network.general,
                "ports": self._network.ports,
                "flight_bytes": self._flight_bytes,
            }
        )
        watcher = Watcher(f"tcp rank {self.rank}")
        self._undo.append(watcher.close)
        watcher.add(control.connection, control.listen(job.changed, job.waiting))
        self._network.start(watcher, str(welcome["token"]), welcome["peers"])

    def _start(self, call: Call[NDArray[Any]], flow: Flow) -> None:
        """Open the links of a collective and set their senders to work."""
        for lane in sorted(flow.lanes):
            try:
                self._network.open(lane, self._job.timeout)
            except ConnectionError as error:
                self._job.broken(lane[1], str(error))
                return
        links = [self._network.outgoing[lane] for lane in sorted(flow.lanes)]
        if self._pace is not None:
            plan = call.signature.plan
            if plan not in self._rates:
                self._rates[plan] = link_rates(call.plan)
            for link in links:
                link.pace(self._rates[plan][base_queue(link.queue)] * self._pace)
        flow.attach({link.queue: link.condition for link in links})
        for link in links:
            link.serve(flow)

    def _credit(self, stream: Stream, joined: int) -> None:
        flow = self._job.flow
        if flow is not None:
            self._network.credit(flow.lane_of[stream.number], flow.number, stream.number, joined)

    def _check_open(self) -> None:
        if self._closed:
            raise BackendError("the tcp back end has ended; make a new one", rank=self.rank)

    def _give_up(self, error: BaseException) -> None:
        """End; where the others do not know why yet, tell them first."""
        if not isinstance(error, BackendError):
            reason = f"rank {self.rank} gave up: {type(error).__name__} {error}".rstrip()
            message: Message = {"type": "failed", "message": reason, "rank": None, "peer": self.rank}
            self._job.tell({**message, "step": None})
        self._end()

    def _end(self) -> None:
        self._closed = True
        atexit.unregister(self.close)
        self._tear_down()

    def _tear_down(self) -> None:
        while self._undo:
            with contextlib.suppress(OSError):
                self._undo.pop()()


def _agreement(signature: Signature) -> Message:
    packed = signature.pack().decode()
    return {"type": "agree", "signature": packed, "refused": bool(signature.refusal)}
